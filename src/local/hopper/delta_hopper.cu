// SPDX-License-Identifier: Apache-2.0
#include "local/hopper/channel_hopper.hpp"
#include "local/hopper/delta_kernel.cuh"
#include "local/hopper/wide_hopper.hpp"

namespace longscan::hopper {
namespace {

// ---- small kernels ----

__global__ void norms_kernel(const float* matrices, std::int64_t stride, int elements, float* norms) {
  const float* m = matrices + blockIdx.x * stride;
  float sum = 0;
#pragma unroll 16
  for (int i = threadIdx.x; i < elements; i += blockDim.x) sum = fmaf(m[i], m[i], sum);
  __shared__ float part[32];
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 1; i < blockDim.x / 32; ++i) sum += part[i];
    norms[blockIdx.x] = sqrtf(sum);
  }
}

/// CTA: 4 rows of the state of one chain; thread: one column.
constexpr int chain_rows = 4;

__global__ void __launch_bounds__(256) chain_kernel(const Chain* chains, int d_key, int groups) {
  const Chain chain = chains[blockIdx.x / groups];
  const int first = blockIdx.x % groups * chain_rows, k = threadIdx.x;
  __shared__ float4 rows[256];  // [j] -> the rows' values in column j
  float s[chain_rows];
  for (int r = 0; r < chain_rows; ++r) s[r] = chain.states[(first + r) * d_key + k];
  for (int i = 0; i < chain.maps; ++i) {
    const float* P = chain.P + i * chain.map_stride + k;
    rows[k] = make_float4(s[0], s[1], s[2], s[3]);
    __syncthreads();
    for (int r = 0; r < chain_rows; ++r) s[r] = chain.L[i * chain.map_stride + (first + r) * d_key + k];
#pragma unroll 32
    for (int j = 0; j < d_key; ++j) {
      const float p = P[j * d_key];
      const float4 x = rows[j];
      s[0] = fmaf(x.x, p, s[0]), s[1] = fmaf(x.y, p, s[1]), s[2] = fmaf(x.z, p, s[2]), s[3] = fmaf(x.w, p, s[3]);
    }
    for (int r = 0; r < chain_rows; ++r) chain.states[(i + 1) * chain.state_stride + (first + r) * d_key + k] = s[r];
    __syncthreads();
  }
}

template <int K, int V, bool Outputs, bool Decay, bool Pairs = false>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  using C = Shape<K, V, 0, Outputs, Pairs>;
  return pass.type == Type::bf16 ? launch<C, true, Outputs, Decay>(pass, stream)
                                 : launch<C, false, Outputs, Decay>(pass, stream);
}

template <int K, int V>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  if (pass.o)
    return pass.log_decay.data ? launch<K, V, true, true>(pass, stream) : launch<K, V, true, false>(pass, stream);
  if constexpr (K == 64 && V == 64)
    if (pass.pair_distance > 0)
      return pass.log_decay.data ? launch<K, V, false, true, true>(pass, stream)
                                 : launch<K, V, false, false, true>(pass, stream);
  return pass.log_decay.data ? launch<K, V, false, true>(pass, stream) : launch<K, V, false, false>(pass, stream);
}

}  // namespace

bool applies(int device_major, int d_key, int d_value, const Pass& pass) {
  const auto aligned = [](const void* p, std::int64_t token_stride, std::int64_t head_stride) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
  };
  const auto narrow = [](const TokenScalars& a) { return !a.data || (a.type != Type::f64 && a.type != Type::none); };
  const auto gates_fit = [&] {
    if (!pass.channel_decay) return true;
    const int per_piece = pass.log_decay.type == Type::f32 ? 4 : 8;
    return pass.log_decay.data && !pass.erase_undecayed &&
           reinterpret_cast<std::uintptr_t>(pass.log_decay.data) % 16 == 0 &&
           pass.log_decay.token_stride % per_piece == 0 && pass.log_decay.head_stride % per_piece == 0;
  };
  const auto fits = [](int d, int most) { return d >= 64 && d <= most && d % 8 == 0; };
  const bool sizes_fit = d_key > 128 ? fits(d_key, 256) && fits(d_value, 1 << 20) && !pass.channel_decay
                                     : fits(d_key, 128) && fits(d_value, 128);
  return narrow(pass.beta) && narrow(pass.eta) && narrow(pass.log_decay) && gates_fit() && device_major == 9 &&
         sizes_fit && d_key == pass.d_key && d_value == pass.d_value &&
         (pass.type == Type::bf16 || pass.type == Type::f16) &&
         aligned(pass.k.data, pass.k.token_stride, pass.k.head_stride) &&
         aligned(pass.v.data, pass.v.token_stride, pass.v.head_stride) &&
         (!pass.o || (aligned(pass.q.data, pass.q.token_stride, pass.q.head_stride) &&
                      aligned(pass.o, pass.o_token_stride, pass.o_head_stride)));
}

int tasks_at_once(int d_key, int d_value, bool channel_decay) {
  return d_key <= 64 && d_value <= 64 && !channel_decay ? Shape<64, 64>::per_multiprocessor
                                                        : Shape<128, 128>::per_multiprocessor;
}

int ctas_of_task(int d_key, int d_value) { return d_key > 128 ? (d_value + 63) / 64 : 1; }

cudaError_t run_pass(const Pass& pass, cudaStream_t stream) {
  if (pass.task_count == 0) return cudaSuccess;
  if (pass.d_key > 128) return run_wide_pass(pass, stream);
  if (pass.channel_decay) return run_channel_pass(pass, stream);
  if (pass.d_key <= 64) return pass.d_value <= 64 ? launch<64, 64>(pass, stream) : launch<64, 128>(pass, stream);
  return pass.d_value <= 64 ? launch<128, 64>(pass, stream) : launch<128, 128>(pass, stream);
}

cudaError_t matrix_norms(const float* matrices, std::int64_t stride, int count, float* norms, cudaStream_t stream,
                         int elements) {
  if (count == 0) return cudaSuccess;
  norms_kernel<<<count, 1024, 0, stream>>>(matrices, stride, elements, norms);
  return cudaGetLastError();
}

cudaError_t run_chains(const Chain* chains, int count, cudaStream_t stream, int d_key, int d_value) {
  if (count == 0) return cudaSuccess;
  const int groups = d_value / chain_rows;
  chain_kernel<<<count * groups, d_key, 0, stream>>>(chains, d_key, groups);
  return cudaGetLastError();
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_profile() {
  print_marks({"wait for data", "scalars, barrier", "K Kᵀ, decays, convert Q", "store A", "store M (early)", "convert",
               "diagonal", "barrier", "wait for an empty T", "merges", "Q Kᵀ", "wait for an empty M", "store M"});
}
#endif

Segments plan_segments(std::int64_t tokens, int heads, int multiprocessors) {
  Segments s;
  const std::int64_t least = 16 * chunk;  // below this the fixed costs of a segment show
  std::int64_t n = multiprocessors / (heads > 0 ? heads : 1);
  if (n > tokens / least) n = tokens / least;
  if (n < 1) n = 1;
  s.tokens = ((tokens + n - 1) / n + chunk - 1) / chunk * chunk;
  if (s.tokens < chunk) s.tokens = chunk;
  s.count = static_cast<std::int32_t>((tokens + s.tokens - 1) / s.tokens);
  if (s.count < 1) s.count = 1;
  return s;
}

}  // namespace longscan::hopper
