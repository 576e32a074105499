// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tests and the times of the Hopper kernels share: inputs, and the rule token by token in float64.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "local/hopper/bench_hopper.cuh"
#include "local/hopper/delta_hopper.hpp"
#include "local/hopper/hopper_ops.cuh"

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const cudaError_t e_ = (call);                                                       \
    if (e_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

namespace bench {

using namespace longscan::hopper;
using B = __nv_bfloat16;

constexpr int D = 128;     // keys and values of the operand tests
constexpr int most = 256;  // elements of keys and values

inline void verdict(const char* what, double value, double limit) {
  const bool ok = value <= limit;  // false for NaN
  if (!ok) ++failures;
  std::printf("  %-66s %.3e  (<= %.1e)  %s\n", what, value, limit, ok ? "ok" : "FAILED");
}

template <class T>
T* device(std::size_t n) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, std::max<std::size_t>(n, 1) * sizeof(T)));
  return p;
}

// ---- inputs ----

__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ inline float uniform(std::uint64_t seed, std::uint64_t i) {
  return (static_cast<float>(mix(seed * 0x5851f42d4c957f2dull + i) >> 40) + 0.5f) * (1.f / 16777216.f);
}

__device__ inline float normal(std::uint64_t seed, std::uint64_t i) {
  const float u = uniform(seed, 2 * i), w = uniform(seed, 2 * i + 1);
  return sqrtf(-2.f * logf(u)) * cospif(2.f * w);
}

__device__ inline void put(__nv_bfloat16* p, float x) { *p = __float2bfloat16(x); }
__device__ inline void put(__half* p, float x) { *p = __float2half(x); }
__device__ inline void put(float* p, float x) { *p = x; }
__device__ inline double get(const float* p) { return *p; }
__device__ inline double get(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ inline double get(const __half* p) { return __half2float(*p); }

/// A warp has elements 4 · lane to 4 · lane + 3 of each 128 of a vector.
__device__ inline int element(int lane, int j) { return j / 4 * 128 + 4 * lane + j % 4; }

/// One warp a vector of `size` elements; `unit` vectors have length 1. The coordinates from `span` on are zero.
template <class T>
__global__ void fill_vectors(T* x, std::int64_t vectors, int size, std::uint64_t seed, bool unit, int span) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (i >= vectors) return;
  float e[most / 32], squares = 0;
  for (int j = 0; j < most / 32; ++j) {
    const int k = element(lane, j);
    e[j] = k < span && k < size ? normal(seed, i * (size > 128 ? most : 128) + k) : 0.f;
    squares += e[j] * e[j];
  }
  for (int d = 16; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
  const float f = unit ? rsqrtf(squares) : 1.f;
  for (int j = 0; j < most / 32; ++j)
    if (element(lane, j) < size) put(x + i * size + element(lane, j), e[j] * f);
}

template <class T>
__global__ void fill_scalars(T* x, std::int64_t n, std::uint64_t seed, float low, float high) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) put(x + i, low + (high - low) * uniform(seed, i));
}

enum class Gates { none, zero, usual, slow, strong, bursts, minus_infinity, all_200, mixed, steep, changing };

/// `repeat` neighbours have the same number; a token has `row` of them.
template <class G>
__global__ void fill_gates(G* x, std::int64_t n, std::uint64_t seed, Gates kind, int repeat, int row) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (kind == Gates::changing) {  // every 64 tokens
    const Gates kinds[] = {Gates::strong, Gates::usual, Gates::steep};
    kind = kinds[i / row / 64 % 3];
  }
  const float u = uniform(seed, 2 * (i / repeat)), w = uniform(seed, 2 * (i / repeat) + 1);
  float g = 0;
  if (kind == Gates::usual) g = -0.1f * u;
  if (kind == Gates::slow) g = -1e-5f * u;
  if (kind == Gates::strong) g = -20 * u * u;
  if (kind == Gates::bursts) g = w < 0.05f ? -200.f : w < 0.1f ? -u * 50 : w < 0.5f ? 0.f : -0.01f * u;
  if (kind == Gates::minus_infinity) g = w < 0.03f ? -INFINITY : -0.02f * u;
  if (kind == Gates::all_200) g = -200;
  if (kind == Gates::steep) g = -8 * u;  // of a block of 16 tokens the first 10 to 13 are mild
  if (kind == Gates::mixed) g = w < 0.02f ? -INFINITY : w < 0.04f ? -200.f : w < 0.1f ? -8 * u : w < 0.4f ? 0.f : -u;
  put(x + i, g);
}

/// Sizes and options of one problem.
struct Problem {
  int d_key = 128, d_value = 128;
  bool own_eta = false;
  Gates gates = Gates::none;
  bool channels = false;     ///< a decay a channel
  bool equal = false;        ///< the same in all channels
  bool short_gates = false;  ///< of the vectors' type
  bool other_gates = false;  ///< of the other type of 16 bits
  bool undecayed = false;
  int span = most;
  float beta_high = 1.f;
  int group = 1;  ///< heads of v to one of q and k
};

/// The other type of 16 bits.
template <class T>
using Other = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __half, __nv_bfloat16>;

template <class T>
struct Given {
  const T *q, *k, *v, *beta, *eta, *o;
  const float* log_decay;
  const T* short_decay;
  const Other<T>* other_decay;
  int channels;  ///< numbers of log_decay a token and head
  int heads, d_key, d_value;
  bool own_eta, undecayed;
  int group;
};

template <class T>
struct Inputs {
  std::int64_t tokens;
  int heads;
  Problem problem;
  T *q, *k, *v, *beta, *eta, *o;
  float* log_decay = nullptr;
  T* short_decay = nullptr;
  Other<T>* other_decay = nullptr;
  Inputs(std::int64_t tokens, int heads, std::uint64_t seed, Problem problem = {})
      : tokens(tokens), heads(heads), problem(problem) {
    const std::int64_t n = tokens * heads;
    const int dk = problem.d_key, dv = problem.d_value;
    const std::int64_t shared = n / problem.group;
    q = device<T>(shared * dk), k = device<T>(shared * dk), v = device<T>(n * dv), o = device<T>(n * dv);
    beta = device<T>(n), eta = device<T>(n);
    const auto blocks = static_cast<unsigned>((n + 7) / 8), few = static_cast<unsigned>((n + 255) / 256);
    if (n > 0) {
      fill_vectors<<<blocks, 256>>>(q, shared, dk, seed + 1, true, most);
      fill_vectors<<<blocks, 256>>>(k, shared, dk, seed + 2, true, problem.span);
      fill_vectors<<<blocks, 256>>>(v, n, dv, seed + 3, false, most);
      fill_scalars<<<few, 256>>>(beta, n, seed + 4, 0.f, problem.beta_high);
      fill_scalars<<<few, 256>>>(eta, n, seed + 5, 0.f, 1.f);
      if (problem.gates != Gates::none) {
        const std::int64_t m = n * channels();
        const int repeat = problem.equal ? channels() : 1;
        const auto many = static_cast<unsigned>((m + 255) / 256);
        const auto fill = [&](auto*& x) {
          x = device<std::remove_reference_t<decltype(*x)>>(m);
          fill_gates<<<many, 256>>>(x, m, seed + 6, problem.gates, repeat, heads * channels());
        };
        if (problem.other_gates)
          fill(other_decay);
        else if (problem.short_gates)
          fill(short_decay);
        else
          fill(log_decay);
      }
    }
    poison();
    CHECK(cudaGetLastError());
  }
  int channels() const { return problem.channels ? problem.d_key : 1; }
  void poison() { CHECK(cudaMemset(o, 0xff, tokens * heads * problem.d_value * sizeof(T))); }  // NaN
  Inputs(const Inputs&) = delete;
  ~Inputs() {
    for (T* p : {q, k, v, beta, eta, o, short_decay}) cudaFree(p);
    cudaFree(log_decay), cudaFree(other_decay);
  }
  Given<T> given() const {
    return {q,
            k,
            v,
            beta,
            eta,
            o,
            log_decay,
            short_decay,
            other_decay,
            channels(),
            heads,
            problem.d_key,
            problem.d_value,
            problem.own_eta,
            problem.undecayed,
            problem.group};
  }
  Pass pass(bool outputs) const {
    Pass p;
    constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
    p.type = bf16 ? Type::bf16 : Type::f16;
    p.d_key = problem.d_key, p.d_value = problem.d_value;
    p.group = problem.group;
    const std::int64_t row = std::int64_t{heads / p.group} * p.d_key, value_row = std::int64_t{heads} * p.d_value;
    p.q = {q, row, p.d_key}, p.k = {k, row, p.d_key}, p.v = {v, value_row, p.d_value};
    p.tokens = tokens, p.heads = heads;
    p.beta = {beta, p.type, heads, 1};
    if (problem.own_eta) p.eta = {eta, p.type, heads, 1};
    if (log_decay) p.log_decay = {log_decay, Type::f32, heads * channels(), channels()};
    if (short_decay) p.log_decay = {short_decay, p.type, heads * channels(), channels()};
    if (other_decay) p.log_decay = {other_decay, bf16 ? Type::f16 : Type::bf16, heads * channels(), channels()};
    p.channel_decay = problem.channels && p.log_decay.data;
    p.erase_undecayed = problem.undecayed;
    if (outputs) p.o = o, p.o_token_stride = value_row, p.o_head_stride = p.d_value;
    if (!applies(9, p.d_key, p.d_value, p)) std::printf("does not apply\n"), std::exit(1);
    return p;
  }
};

// ---- float64, token by token ----

/// One warp a row of S of one task, `Each` channels a lane. Compares with o when `errors` is given:
/// errors[0] += (o - exact)², errors[1] += exact², and counts elements in errors[2].
template <int Each, class T>
__global__ void reference(Given<T> in, const Task* tasks, int task_count, double* ends, double* errors) {
  const int w = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (w >= task_count * in.d_value) return;
  const Task task = tasks[w / in.d_value];
  const int v = w % in.d_value;
  double s[Each];
  for (int j = 0; j < Each; ++j) {
    const int k = element(lane, j);
    s[j] = k >= in.d_key                ? 0.0
           : task.flags & from_identity ? (k == v)
           : task.from.data             ? task.from.data[k * task.from.k_stride + v * task.from.v_stride]
                                        : 0.0;
  }
  double wrong = 0, size = 0, count = 0;
  for (std::int64_t t = task.begin; t < task.end; ++t) {
    const std::int64_t i = t * in.heads + task.head, shared = t * (in.heads / in.group) + task.head / in.group;
    double k[Each], q[Each], decay[Each], sk = 0, sq = 0;
    for (int j = 0; j < Each; ++j) {
      const int c = element(lane, j);
      const bool inside = c < in.d_key;
      const std::int64_t g = i * in.channels + (in.channels > 1 && inside ? c : 0);
      decay[j] = in.log_decay     ? exp(get(in.log_decay + g))
                 : in.short_decay ? exp(get(in.short_decay + g))
                 : in.other_decay ? exp(get(in.other_decay + g))
                                  : 1.0;
      k[j] = inside ? get(in.k + shared * in.d_key + c) : 0;
      q[j] = inside ? get(in.q + shared * in.d_key + c) : 0;
      sk += (in.undecayed ? s[j] : decay[j] * s[j]) * k[j];
    }
    for (int d = 16; d > 0; d >>= 1) sk += __shfl_xor_sync(0xffffffffu, sk, d);
    const double beta = get(in.beta + i), eta = in.own_eta ? get(in.eta + i) : beta;
    const double value = task.flags & without_values ? 0.0 : get(in.v + i * in.d_value + v);
    const double x = eta * value - beta * sk;
    for (int j = 0; j < Each; ++j) s[j] = decay[j] * s[j] + x * k[j], sq += s[j] * q[j];
    if (errors) {
      for (int d = 16; d > 0; d >>= 1) sq += __shfl_xor_sync(0xffffffffu, sq, d);
      const double e = get(in.o + i * in.d_value + v) - sq;
      wrong += e * e, size += sq * sq, count += 1;
    }
  }
  if (errors && lane == 0) atomicAdd(errors, wrong), atomicAdd(errors + 1, size), atomicAdd(errors + 2, count);
  if (ends)
    for (int j = 0; j < Each; ++j)
      if (element(lane, j) < in.d_key) ends[static_cast<std::int64_t>(w) * in.d_key + element(lane, j)] = s[j];
}

template <class T>
void run_reference(const Given<T>& in, const Task* tasks, int count, double* ends, double* errors) {
  const auto kernel = in.d_key > 128 ? reference<8, T> : reference<4, T>;
  kernel<<<(count * in.d_value + 3) / 4, 128>>>(in, tasks, count, ends, errors);
  CHECK(cudaGetLastError());
}

/// Both nothing: 0.
inline double relative(const std::vector<float>& a, const std::vector<double>& b) {
  double wrong = 0, size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) wrong += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
  return wrong == 0 ? 0 : std::sqrt(wrong / size);
}

template <class T>
std::vector<T> host(const T* p, std::size_t n) {
  std::vector<T> v(n);
  CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

template <class T>
T* upload(const std::vector<T>& v) {
  T* p = device<T>(v.size());
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

}  // namespace bench
