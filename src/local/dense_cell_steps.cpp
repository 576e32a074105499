// SPDX-License-Identifier: Apache-2.0
// Segments of large cells in step: a token of all of them is one matrix product and a kernel for the rest.
#include "local/dense_cell_layouts.hpp"

namespace longscan {

using namespace dense;

namespace {

/// The nearest TF32 number (ties away from zero). Not finite stays so.
__device__ __forceinline__ float to_tf32(float x) {
  return fabsf(x) < 3e38f ? __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u) : x;
}

/// Row `row` of the states that the product is made of, for a new h.
template <class T>
__device__ __forceinline__ void put_operand(T* states, T* split, std::int64_t row, int D, int d, T h) {
  states[row * D + d] = h;
  if constexpr (sizeof(T) == 4)
    if (split) {
      const float high = to_tf32(h), low = to_tf32(h - high);
      float* to = split + row * 3 * D + d;
      to[0] = high, to[D] = low, to[2 * D] = high;
    }
}

/// states [state][padded][D] before the first token of each segment.
template <class T>
__global__ void begin_in_step(const CellSegment* list, std::int64_t count, std::int64_t padded, int D, int k,
                              const T* starts, T* ends, T* states, T* split) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= padded * D) return;
  const std::int64_t j = i / D;
  const int d = static_cast<int>(i % D);
  for (int m = 0; m < k; ++m) {
    T value = 0;
    if (j < count) {
      const CellSegment& s = list[j];
      const std::int64_t from = s.warm_up > 0 ? s.from : s.slot, at = static_cast<std::int64_t>(m) * D + d;
      if (from >= 0) value = starts[from * k * D + at];
      if (s.begin == s.end && s.warm_up == 0) ends[s.slot * k * D + at] = value;
    }
    if (m == 0)
      put_operand(states, split, j, D, d, value);
    else
      states[m * padded * D + i] = value;
  }
}

/// `count` neighbours in one access.
template <class T, int count>
struct alignas(count * sizeof(T)) Pack {
  T v[count];
};
template <class T, int count>
__device__ __forceinline__ Pack<T, count> load_pack(const T* p) {
  if constexpr (count * sizeof(T) == 16)
    return bits_as<Pack<T, count>>(__ldcs(reinterpret_cast<const int4*>(p)));
  else
    return *reinterpret_cast<const Pack<T, count>*>(p);
}
template <class T, int count>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, count>& values) {
  if constexpr (count * sizeof(T) == 16)
    __stcs(reinterpret_cast<int4*>(p), bits_as<int4>(values));
  else
    *reinterpret_cast<Pack<T, count>*>(p) = values;
}

/// What is left of token begin + step once W_hh h is there; a thread takes `count` channels of a segment.
template <class Gates, class T, int count>
__global__ void go_in_step(CellTrajectory<T> path, const CellSegment* list, std::int64_t padded, int D,
                           std::int64_t step, const T* __restrict__ products, const T* __restrict__ bias, T* states,
                           T* split, T* starts, T* ends, bool keep) {
  constexpr int k = Gates::state, g = Gates::gates;
  using Values = Pack<T, count>;
  const std::int64_t j = blockIdx.x;
  const int d = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * count;
  if (d >= D) return;
  const CellSegment s = list[j];
  const std::int64_t t = s.begin + step, at = j * D + d;
  if (step < -s.warm_up || t >= s.end) return;
  const T* from = path.x + t * path.x_stride + d;
  Values xs[g], ps[g], bs[g], hs[k];
#pragma unroll
  for (int q = 0; q < g; ++q) {
    xs[q] = load_pack<T, count>(from + static_cast<std::int64_t>(q) * D);
    ps[q] = load_pack<T, count>(products + (j * g + q) * D + d);
    bs[q] = *reinterpret_cast<const Values*>(bias + q * D + d);
  }
#pragma unroll
  for (int m = 0; m < k; ++m) hs[m] = *reinterpret_cast<const Values*>(states + m * padded * D + at);
  if (threadIdx.x % (128 / sizeof(Values)) == 0 && t + 1 < s.end) {  // a line of the next token's inputs
#pragma unroll
    for (int q = 0; q < g; ++q)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + path.x_stride + static_cast<std::int64_t>(q) * D));
  }
  if (step == 0 && s.warm_up > 0)
    for (int m = 0; m < k; ++m) *reinterpret_cast<Values*>(starts + (s.slot * k + m) * D + d) = hs[m];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    T x[g], p[g], h[k];
#pragma unroll
    for (int q = 0; q < g; ++q) x[q] = xs[q].v[i], p[q] = ps[q].v[i] + bs[q].v[i];
#pragma unroll
    for (int m = 0; m < k; ++m) h[m] = hs[m].v[i];
    Gates::step(x, p, h);
#pragma unroll
    for (int m = 0; m < k; ++m) hs[m].v[i] = h[m];
    if (split) put_operand(states, split, j, D, d + i, h[0]);
  }
#pragma unroll
  for (int m = 0; m < k; ++m) {
    if (m > 0 || !split) *reinterpret_cast<Values*>(states + m * padded * D + at) = hs[m];
    if (keep && step >= 0) store_pack<T, count>(path.h + t * path.h_stride + m * D + d, hs[m]);
    if (t + 1 == s.end) *reinterpret_cast<Values*>(ends + (s.slot * k + m) * D + d) = hs[m];
  }
}

}  // namespace

BatchProducts& batch_products() {
  static BatchProducts products = BatchProducts::plain;
  return products;
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run_in_step(const CellTrajectory<T>& path, const CellSegment* list,
                                          const std::vector<CellSegment>& segments, T* starts, T* ends, bool keep,
                                          bool alone) const {
  const auto count = static_cast<std::int64_t>(segments.size());
  if (!alone) {
    run_group(path, list, segments.data(), count, (count + 63) / 64 * 64, starts, ends, keep, batch_products());
    return;
  }
  // products of one shape: each of its rows is made alike
  constexpr std::int64_t rows = 16;
  for (std::int64_t j = 0; j < count; j += rows)
    run_group(path, list + j, segments.data() + j, std::min(rows, count - j), rows, starts, ends, keep,
              BatchProducts::plain);
}

template <class Gates, class T>
void DenseCellCuda<Gates, T>::run_group(const CellTrajectory<T>& path, const CellSegment* list, const CellSegment* host,
                                        std::int64_t count, std::int64_t padded, T* starts, T* ends, bool keep,
                                        BatchProducts made) const {
  constexpr int k = Gates::state, g = Gates::gates;
  if (count == 0) return;
  const bool split = sizeof(T) == 4 && made == BatchProducts::three;
  reserve(states_, "longscan::cell::states", k * padded * D_);
  if (split) reserve(split_, "longscan::cell::states", 3 * padded * D_);
  reserve(products_, "longscan::cell::products", g * padded * D_);
  T* operand = split ? split_.data() : nullptr;
  std::int64_t longest = 0, warmest = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    longest = std::max(longest, host[j].end - host[j].begin), warmest = std::max(warmest, host[j].warm_up);
  }
  constexpr int threads = 256;
  const auto blocks = [](std::int64_t n) { return static_cast<unsigned>((n + threads - 1) / threads); };
  begin_in_step<T><<<blocks(padded * D_), threads, 0, stream()>>>(list, count, padded, D_, k, starts, ends,
                                                                  states_.data(), operand);
  const bool batch = padded > 16;
  const int m = g * D_, n = static_cast<int>(padded), depth = split ? 3 * D_ : D_;
  const T* W = split ? W_split_.data() : batch ? W_by_output_.data() : W_.data();
  // Half of a warm-up only has to come near: what TF32 rounds off there is forgotten in the other half.
  const std::int64_t near = sizeof(T) == 4 && made == BatchProducts::plain && batch ? -warmest / 2 : -warmest;
  constexpr int pack = 16 / sizeof(T);
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool packs = D_ % pack == 0 && path.x_stride % pack == 0 && path.h_stride % pack == 0 && aligned(path.x) &&
                     aligned(path.h) && aligned(starts) && aligned(ends);
  const auto go = [&](auto size, std::int64_t step) {
    constexpr int channels = decltype(size)::value;
    const int block = D_ >= threads * channels ? threads : 64;
    const dim3 grid(static_cast<unsigned>(count),
                    static_cast<unsigned>((D_ + block * channels - 1) / (block * channels)));
    go_in_step<Gates, T, channels><<<grid, block, 0, stream()>>>(
        path, list, padded, D_, step, products_.data(), bias_.data(), states_.data(), operand, starts, ends, keep);
  };
  for (std::int64_t step = -warmest; step < longest; ++step) {
    products(m, n, depth, W, split || batch ? Factor::by_output : Factor::by_input, split ? operand : states_.data(),
             T(0), products_.data(), made != BatchProducts::plain || step < near);
    if (packs)
      go(std::integral_constant<int, pack>(), step);
    else
      go(std::integral_constant<int, 1>(), step);
  }
  check_cuda(cudaGetLastError(), "running segments in step");
}

#define LONGSCAN_INSTANTIATE(Gates, T)                                                             \
  template void DenseCellCuda<Gates, T>::run_in_step(const CellTrajectory<T>&, const CellSegment*, \
                                                     const std::vector<CellSegment>&, T*, T*, bool, bool) const;
LONGSCAN_FOR_DENSE_CELLS(LONGSCAN_INSTANTIATE)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
