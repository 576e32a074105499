// SPDX-License-Identifier: Apache-2.0
// Tests and times of the Hopper kernels on their own: no Kokkos, no MPI.
//     nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a *.cu -o bench_hopper
//     bench_hopper [descriptors] [check] [channels] [wide] [small] [least] [least_wide] [maps] [time] [time_channels]
//     [time_wide]
//                  [brief] [long] [rows=NAME]
//     (default: all but small, least, least_wide; rows=, as often as wanted, times only the rows of these names)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "local/hopper/delta_hopper.hpp"
#include "local/hopper/hopper_ops.cuh"

using namespace longscan::hopper;

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const cudaError_t e_ = (call);                                                       \
    if (e_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

namespace {

constexpr int D = 128;     // keys and values of the operand tests
constexpr int most = 256;  // elements of keys and values
int failures = 0;
std::vector<std::string> only;  // names of the rows to time; none: all

void verdict(const char* what, double value, double limit) {
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

__host__ __device__ std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ float uniform(std::uint64_t seed, std::uint64_t i) {
  return (static_cast<float>(mix(seed * 0x5851f42d4c957f2dull + i) >> 40) + 0.5f) * (1.f / 16777216.f);
}

__device__ float normal(std::uint64_t seed, std::uint64_t i) {
  const float u = uniform(seed, 2 * i), w = uniform(seed, 2 * i + 1);
  return sqrtf(-2.f * logf(u)) * cospif(2.f * w);
}

__device__ void put(__nv_bfloat16* p, float x) { *p = __float2bfloat16(x); }
__device__ void put(__half* p, float x) { *p = __float2half(x); }
__device__ void put(float* p, float x) { *p = x; }
__device__ double get(const float* p) { return *p; }
__device__ double get(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ double get(const __half* p) { return __half2float(*p); }

/// A warp has elements 4 · lane to 4 · lane + 3 of each 128 of a vector.
__device__ int element(int lane, int j) { return j / 4 * 128 + 4 * lane + j % 4; }

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

enum class Gates { none, zero, usual, slow, strong, bursts, minus_infinity, all_200, mixed };

/// `repeat` neighbours have the same number.
template <class G>
__global__ void fill_gates(G* x, std::int64_t n, std::uint64_t seed, Gates kind, int repeat) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float u = uniform(seed, 2 * (i / repeat)), w = uniform(seed, 2 * (i / repeat) + 1);
  float g = 0;
  if (kind == Gates::usual) g = -0.1f * u;
  if (kind == Gates::slow) g = -1e-5f * u;
  if (kind == Gates::strong) g = -20 * u * u;
  if (kind == Gates::bursts) g = w < 0.05f ? -200.f : w < 0.1f ? -u * 50 : w < 0.5f ? 0.f : -0.01f * u;
  if (kind == Gates::minus_infinity) g = w < 0.03f ? -INFINITY : -0.02f * u;
  if (kind == Gates::all_200) g = -200;
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
  bool undecayed = false;
  int span = most;
  float beta_high = 1.f;
  int group = 1;  ///< heads of v to one of q and k
};

template <class T>
struct Given {
  const T *q, *k, *v, *beta, *eta, *o;
  const float* log_decay;
  const T* short_decay;
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
        if (problem.short_gates) {
          short_decay = device<T>(m);
          fill_gates<<<many, 256>>>(short_decay, m, seed + 6, problem.gates, repeat);
        } else {
          log_decay = device<float>(m);
          fill_gates<<<many, 256>>>(log_decay, m, seed + 6, problem.gates, repeat);
        }
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
    cudaFree(log_decay);
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
      decay[j] = in.log_decay ? exp(get(in.log_decay + g)) : in.short_decay ? exp(get(in.short_decay + g)) : 1.0;
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
double relative(const std::vector<float>& a, const std::vector<double>& b) {
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

// ---- every form of wgmma operand, with small integers: exact ----

__global__ void operand_kernel(const __half* a, const __half* b, float* out, int form) {
  extern __shared__ char raw[];
  const std::uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const std::uint32_t left = base, right = base + 16384;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // both [64 rows][128 columns], in two panels
  for (int i = tid; i < 64 * 16; i += 128) {
    const int row = i / 16, piece = i % 16;
    const std::uint32_t at = (piece >> 3) * 8192 + swizzled(row, piece & 7);
    store16(left + at, reinterpret_cast<const uint4*>(a)[i]);
    store16(right + at, reinterpret_cast<const uint4*>(b)[i]);
  }
  fence_for_tensor_cores();
  __syncthreads();
  std::uint32_t f[32];
  const int r = 16 * warp + lane / 4, c = 2 * (lane % 4);
  for (int i = 0; i < 32; ++i) {
    const int row = r + 8 * (i & 1), col = 16 * (i / 4) + 8 * ((i >> 1) & 1) + c;
    f[i] = *reinterpret_cast<const std::uint32_t*>(a + row * D + col);
  }
  float d[64] = {};
  hold(f);
  hold(d);
  products_fence();
  const std::uint64_t rows = row_descriptor(right), columns = column_descriptor(right), tile = row_descriptor(left);
  if (form == 0) {
    product_n64<true>(d, f, rows);
    for (int s = 1; s < 8; ++s) product_n64<false>(d, f + 4 * s, advance(rows, (s >> 2) * 8192 + (s & 3) * 32));
  } else if (form == 1) {  // rows 32 to 63 of B, k below 64
    product_n32<true>(d, f, advance(rows, 4096));
    for (int s = 1; s < 4; ++s) product_n32<false>(d, f + 4 * s, advance(rows, 4096 + 32 * s));
  } else if (form == 2) {
    product_tiles_n64<true, false>(d, tile, rows);
    for (int s = 1; s < 8; ++s) {
      const int step = (s >> 2) * 8192 + (s & 3) * 32;
      product_tiles_n64<false, false>(d, advance(tile, step), advance(rows, step));
    }
  } else if (form == 5) {  // a[64 × 64] · B[64 × columns 32 to 63]
    for (int s = 0; s < 4; ++s) product_columns_n32(d, f + 4 * s, advance(columns, 2048 * s + 64));
  } else if (form == 4) {  // a[64 × 64] · B[64 × 64]
    for (int s = 0; s < 4; ++s) product_columns_n64(d, f + 4 * s, advance(columns, 2048 * s));
  } else {  // a[64 × 64] · B[64 × 128]
    for (int s = 0; s < 4; ++s) product_columns_n128(d, f + 4 * s, advance(columns, 2048 * s));
  }
  products_commit();
  products_wait<0>();
  hold(d);
  for (int i = 0; i < 64; ++i) out[(r + 8 * ((i >> 1) & 1)) * D + 8 * (i / 4) + c + (i & 1)] = d[i];
}

void test_operands() {
  std::printf("wgmma operands (integers, exact)\n");
  std::vector<__half> a(64 * D), b(64 * D);
  std::vector<int> ia(64 * D), ib(64 * D);
  for (int i = 0; i < 64 * D; ++i) {
    ia[i] = static_cast<int>(mix(i) % 15) - 7, ib[i] = static_cast<int>(mix(i + 1000000) % 15) - 7;
    a[i] = __float2half(ia[i]), b[i] = __float2half(ib[i]);
  }
  const __half *da = upload(a), *db = upload(b);
  float* out = device<float>(64 * D);
  CHECK(cudaFuncSetAttribute(operand_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 34 * 1024));
  const char* names[] = {"A registers, B in rows, n64",
                         "A registers, B in rows, n32 from row 32",
                         "A, B in rows, n64",
                         "A registers, B in columns, n128",
                         "A registers, B in columns, n64",
                         "A registers, B in columns, n32 from column 32"};
  for (int form = 0; form < 6; ++form) {
    operand_kernel<<<1, 128, 34 * 1024>>>(da, db, out, form);
    CHECK(cudaDeviceSynchronize());
    const auto got = host(out, 64 * D);
    int wrong = 0;
    const int columns = form == 3 ? 128 : form == 1 || form == 5 ? 32 : 64, depth = form == 1 || form >= 3 ? 64 : 128;
    for (int m = 0; m < 64; ++m)
      for (int n = 0; n < columns; ++n) {
        int sum = 0;
        for (int k = 0; k < depth; ++k)
          sum += ia[m * D + k] *
                 (form >= 3 ? ib[k * D + n + (form == 5 ? 32 : 0)] : ib[(n + (form == 1 ? 32 : 0)) * D + k]);
        wrong += got[m * D + n] != static_cast<float>(sum);
      }
    verdict(names[form], wrong, 0);
  }
}

// ---- correctness ----

/// Where the tasks begin, are probed (-1: not), and whether they start from a state, without values.
struct Span {
  std::int64_t begin = 0, probe_at = -1;
  bool start = false, no_values = false, outputs = true;
};

double worst_outputs = 0, worst_few = 0, worst_states = 0;  // of the cases so far

template <class T>
void check_case(const char* name, std::int64_t tokens, int heads, Problem problem, Span span, bool quiet = false) {
  const int dk = problem.d_key, dv = problem.d_value, size = dk * dv;
  Inputs<T> in(tokens, heads, 77 + tokens, problem);
  std::vector<float> first(heads * size);
  for (std::size_t i = 0; i < first.size(); ++i)
    first[i] = static_cast<float>(static_cast<int>(mix(i) % 2001) - 1000) / 1000;
  float* from = upload(first);
  // guard floats behind, which nobody may write
  float *to = device<float>(heads * size + 64), *probe = device<float>(heads * size + 64);
  CHECK(cudaMemset(to, 0xff, (heads * size + 64) * 4));
  CHECK(cudaMemset(probe, 0xff, (heads * size + 64) * 4));
  std::vector<Task> tasks(heads), probed(heads);
  for (int h = 0; h < heads; ++h) {
    Task& t = tasks[h];
    t.begin = span.begin, t.end = tokens, t.head = h;
    if (span.no_values) t.flags = without_values;
    if (span.start) t.from = {from + h * size, 1, dk};
    t.to = {to + h * size, 1, dk};
    if (span.probe_at >= 0) t.probe_at = span.probe_at, t.probe = {probe + h * size, 1, dk};
    probed[h] = t;
    probed[h].end = span.probe_at;
  }
  const Task* device_tasks = upload(tasks);
  Counts* counts = device<Counts>(heads);
  CHECK(cudaMemset(counts, 0, heads * sizeof(Counts)));
  Pass pass = in.pass(span.outputs);
  pass.tasks = device_tasks, pass.task_count = heads, pass.counts = counts;
  CHECK(run_pass(pass, nullptr));
  CHECK(cudaDeviceSynchronize());
  double *ends = device<double>(heads * size), *errors = device<double>(3);
  CHECK(cudaMemset(errors, 0, 24));
  run_reference<T>(in.given(), device_tasks, heads, ends, span.outputs ? errors : nullptr);
  CHECK(cudaDeviceSynchronize());
  const auto e = host(errors, 3);
  char line[160];
  const auto judge = [&](const char* what, double value, double limit, double& worst) {
    worst = std::max(worst, value);
    std::snprintf(line, sizeof line, "%s: %s", name, what);
    if (!quiet || !(value <= limit)) verdict(line, value, limit);
  };
  if (tokens > span.begin && span.outputs)
    // a few tokens' roundings do not average out
    judge("o", e[0] == 0 ? 0 : std::sqrt(e[0] / e[1]), tokens - span.begin < 64 ? 2.3e-3 : 1.9e-3,
          tokens - span.begin < 64 ? worst_few : worst_outputs);
  // what is left of the first state alone is small, and has the roundings of what is gone
  double worst_rest = 0;
  judge("end state", relative(host(to, heads * size), host(ends, heads * size)), span.no_values ? 2e-3 : 1e-3,
        span.no_values ? worst_rest : worst_states);
  if (span.probe_at >= 0) {
    const Task* p = upload(probed);
    run_reference<T>(in.given(), p, heads, ends, nullptr);
    CHECK(cudaDeviceSynchronize());
    judge("probe", relative(host(probe, heads * size), host(ends, heads * size)), 1e-3, worst_states);
  }
  int written = 0;
  for (const float* p : {to, probe})
    for (float x : host(p + heads * size, 64)) written += !std::isnan(x);
  // tokens before `begin` must be untouched: still NaN
  const auto o = host(reinterpret_cast<const std::uint16_t*>(in.o), span.begin * heads * dv);
  written += static_cast<int>(o.size() - std::count(o.begin(), o.end(), 0xffff));
  if (written) std::printf("  %s: %d elements written outside\n", name, written), ++failures;
  const auto c = host(counts, heads);
  int bad = 0, breaches = 0;
  for (const Counts& x : c) bad += x.bad, breaches += x.breaches;
  if (bad) std::printf("  %s: reported bad\n", name), ++failures;
  // the breaches, on the host
  const auto hk = host(in.k, tokens * heads / problem.group * dk);
  const auto hb = host(in.beta, tokens * heads);
  const auto hg = host(in.log_decay, in.log_decay && problem.undecayed ? tokens * heads : 0);
  const auto number = [](T x) { return static_cast<double>(static_cast<float>(x)); };
  int least = 0, most = 0;
  for (std::int64_t i = span.begin * heads; i < tokens * heads; ++i) {
    double squares = 0;
    const std::int64_t shared = i / heads * (heads / problem.group) + i % heads / problem.group;
    for (int j = 0; j < dk; ++j) squares += number(hk[shared * dk + j]) * number(hk[shared * dk + j]);
    const double limit = problem.undecayed && !hg.empty() ? 1 + std::exp(double(hg[i])) : 2;
    least += number(hb[i]) * squares > limit * (1 + 1e-5), most += number(hb[i]) * squares > limit * (1 - 1e-5);
  }
  if (breaches < least || breaches > most)
    std::printf("  %s: %d breaches, expected %d to %d\n", name, breaches, least, most), ++failures;
  cudaFree(from), cudaFree(to), cudaFree(probe), cudaFree(counts), cudaFree(ends), cudaFree(errors);
}

template <class T>
void check_map(const char* name, std::int64_t begin, std::int64_t end, int heads, double limit, Problem problem = {}) {
  Inputs<T> in(end, heads, 5, problem);
  const int dk = problem.d_key, dv = problem.d_value, size = std::max(dk, dv) * dk;
  float* maps = device<float>(heads * 2 * size);
  CHECK(cudaMemset(maps, 0xff, heads * 2 * size * 4));
  double worst[2] = {};
  for (int part = 0; part < 2; ++part) {
    std::vector<Task> tasks;
    for (int h = 0; h < heads; ++h) {
      Task t;
      t.begin = begin, t.end = end, t.head = h;
      t.flags = part == 0 ? from_identity | without_values : 0;
      t.to = {maps + (2 * h + part) * size, 1, dk};
      tasks.push_back(t);
    }
    const Task* device_tasks = upload(tasks);
    Pass pass = in.pass(false);
    Given<T> given = in.given();
    if (part == 0) pass.d_value = given.d_value = dk;  // P is dk × dk
    pass.tasks = device_tasks, pass.task_count = heads;
    CHECK(run_pass(pass, nullptr));
    CHECK(cudaDeviceSynchronize());
    const int rows = part == 0 ? dk : dv;
    double* ends = device<double>(heads * rows * dk);
    run_reference<T>(given, device_tasks, heads, ends, nullptr);
    CHECK(cudaDeviceSynchronize());
    const auto exact = host(ends, heads * rows * dk);
    for (int h = 0; h < heads; ++h)
      worst[part] =
          std::max(worst[part], relative(host(maps + (2 * h + part) * size, rows * dk),
                                         {exact.begin() + h * rows * dk, exact.begin() + (h + 1) * rows * dk}));
    cudaFree(ends);
  }
  char line[160];
  std::snprintf(line, sizeof line, "%s: P, worst head", name);
  verdict(line, worst[0], limit);
  std::snprintf(line, sizeof line, "%s: L, worst head", name);
  verdict(line, worst[1], 1e-3);
  if (dk == dv) {
    float* norms = device<float>(2 * heads);
    CHECK(matrix_norms(maps, size, 2 * heads, norms, nullptr, size));
    const auto n = host(norms, 2 * heads);
    const auto P = host(maps, size);
    double squares = 0;
    for (float x : P) squares += double(x) * x;
    std::printf("  |P| of head 0 after %lld tokens: %.2e, |L| %.2e\n", static_cast<long long>(end - begin), n[0], n[1]);
    verdict("  the norm", std::abs(n[0] / std::sqrt(squares) - 1), 1e-5);
    cudaFree(norms);
  }
  cudaFree(maps);
}

using B = __nv_bfloat16;

/// Of one pair of sizes: everything that the kernels of these sizes can do, a line only for what fails and the worst.
void check_sizes(int d_key, int d_value, bool small) {
  worst_outputs = worst_few = worst_states = 0;
  Problem p;
  p.d_key = d_key, p.d_value = d_value;
  const auto with = [&](auto change) {
    Problem x = p;
    change(x);
    return x;
  };
  const auto eta = [](Problem& x) { x.own_eta = true; };
  char name[100];
  const int step = small ? 21 : d_key % 64 ? 7 : 1;
  for (int t = 1; t < (small ? 70 : 130); t += step) {
    std::snprintf(name, sizeof name, "K=%d V=%d T=%d", d_key, d_value, t);
    check_case<B>(name, t, 2, with(eta), {.start = true}, true);
    check_case<B>(name, t, 2, with([&](Problem& x) { x.gates = Gates::usual, x.own_eta = true; }), {.start = true},
                  true);
  }
  std::snprintf(name, sizeof name, "K=%d V=%d T=%d", d_key, d_value, small ? 200 : 2048);
  const std::int64_t T = small ? 200 : 2048;
  check_case<B>(name, T, 3, p, {}, true);
  check_case<__half>(name, T, 2, with(eta), {.start = true}, true);
  check_case<B>(name, T, 2, with([](Problem& x) { x.beta_high = 2; }), {}, true);
  check_case<B>(name, T, 2, with([](Problem& x) { x.span = 32; }), {}, true);
  check_case<B>(name, 200, 2, with(eta), {.start = true, .no_values = true}, true);
  check_case<B>(name, T, 2, with(eta), {.start = true, .outputs = false}, true);
  check_case<B>("groups of heads", 300, 6, with([](Problem& x) { x.group = 3; }), {.start = true}, true);
  check_case<B>("probe", 177, 3, with(eta), {.begin = 30, .probe_at = 101, .start = true}, true);
  check_case<B>("probe at the start", 177, 3, with(eta), {.begin = 30, .probe_at = 30, .start = true}, true);
  check_case<B>("probe at the end", 177, 3, with(eta), {.begin = 30, .probe_at = 177, .start = true}, true);
  check_case<B>("no tokens", 64, 2, with(eta), {.begin = 64, .probe_at = 64, .start = true}, true);
  for (const Gates gates :
       {Gates::zero, Gates::usual, Gates::slow, Gates::strong, Gates::bursts, Gates::minus_infinity, Gates::all_200})
    for (const bool undecayed : {false, true}) {
      std::snprintf(name, sizeof name, "K=%d V=%d gates %d%s", d_key, d_value, static_cast<int>(gates),
                    undecayed ? " undecayed" : "");
      const Problem x = with([&](Problem& y) { y.own_eta = true, y.gates = gates, y.undecayed = undecayed; });
      check_case<B>(name, T, 2, x, {.start = true}, true);
      check_case<B>(name, 177, 2, x, {.begin = 30, .probe_at = 101, .start = true}, true);
    }
  check_case<__half>("fp16, decay", T, 2, with([](Problem& x) { x.gates = Gates::usual; }), {.start = true}, true);
  check_case<B>("decay, states only", T, 2, with([](Problem& x) { x.gates = Gates::usual; }),
                {.start = true, .outputs = false}, true);
  std::snprintf(name, sizeof name, "K=%d V=%d, all: o", d_key, d_value);
  verdict(name, worst_outputs, 1.9e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d, all below 64 tokens: o", d_key, d_value);
  verdict(name, worst_few, 2.3e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d, all: states", d_key, d_value);
  verdict(name, worst_states, 1e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d map", d_key, d_value);
  check_map<B>(name, 37, small ? 200 : 537, 2, 1e-3, p);
  std::snprintf(name, sizeof name, "K=%d V=%d map, decay", d_key, d_value);
  check_map<B>(name, 0, 150, 2, 2e-3, with([](Problem& x) { x.gates = Gates::usual; }));
}

/// The same for a decay a channel.
void check_channel_sizes(int d_key, int d_value, bool small) {
  worst_outputs = worst_few = worst_states = 0;
  Problem p;
  p.d_key = d_key, p.d_value = d_value, p.channels = true, p.own_eta = true, p.gates = Gates::usual;
  const auto with = [&](auto change) {
    Problem x = p;
    change(x);
    return x;
  };
  char name[100];
  const int step = small ? 21 : d_key % 64 ? 7 : 1;
  for (int t = 1; t < (small ? 70 : 130); t += step) {
    std::snprintf(name, sizeof name, "K=%d V=%d T=%d channels", d_key, d_value, t);
    check_case<B>(name, t, 2, p, {.start = true}, true);
  }
  const std::int64_t T = small ? 200 : 2048;
  for (const Gates gates : {Gates::zero, Gates::usual, Gates::slow, Gates::strong, Gates::bursts, Gates::minus_infinity,
                            Gates::all_200, Gates::mixed}) {
    std::snprintf(name, sizeof name, "K=%d V=%d channels, gates %d", d_key, d_value, static_cast<int>(gates));
    const Problem x = with([&](Problem& y) { y.gates = gates; });
    const Problem short_gates = with([&](Problem& y) { y.gates = gates, y.short_gates = true; });
    check_case<B>(name, T, 2, x, {.start = true}, true);
    check_case<B>(name, 177, 2, x, {.begin = 30, .probe_at = 101, .start = true}, true);
    check_case<B>(name, T, 2, short_gates, {.start = true}, true);
    check_case<__half>(name, 177, 2, x, {.begin = 30, .probe_at = 101, .start = true}, true);
    check_case<__half>(name, 300, 2, short_gates, {.start = true}, true);
  }
  check_case<B>("channels, own beta", T, 3, with([](Problem& x) { x.own_eta = false; }), {}, true);
  check_case<B>("channels, beta to 2", T, 2, with([](Problem& x) { x.beta_high = 2; }), {}, true);
  check_case<B>("channels, few dimensions", T, 2, with([](Problem& x) { x.span = 32; }), {}, true);
  check_case<B>("channels, no values", 200, 2, p, {.start = true, .no_values = true}, true);
  check_case<B>("channels, states only", T, 2, p, {.start = true, .outputs = false}, true);
  check_case<B>("channels, groups of heads", 300, 6, with([](Problem& x) { x.group = 3; }), {.start = true}, true);
  check_case<B>("channels, probe at the start", 177, 3, p, {.begin = 30, .probe_at = 30, .start = true}, true);
  check_case<B>("channels, probe at the end", 177, 3, p, {.begin = 30, .probe_at = 177, .start = true}, true);
  check_case<B>("channels, no tokens", 64, 2, p, {.begin = 64, .probe_at = 64, .start = true}, true);
  std::snprintf(name, sizeof name, "K=%d V=%d channels, all: o", d_key, d_value);
  verdict(name, worst_outputs, 1.9e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d channels, all below 64 tokens: o", d_key, d_value);
  verdict(name, worst_few, 2.3e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d channels, all: states", d_key, d_value);
  verdict(name, worst_states, 1e-3);
  std::snprintf(name, sizeof name, "K=%d V=%d channels, map", d_key, d_value);
  check_map<B>(name, 0, 150, 2, 2e-3, p);
  std::snprintf(name, sizeof name, "K=%d V=%d channels, map, slow decay", d_key, d_value);
  check_map<B>(name, 37, 137, 2, 2e-3, with([](Problem& x) { x.gates = Gates::slow; }));
}

/// Equal channels give what a decay a head gives, to rounding; a decay of 0 what no decay gives.
void check_equal_channels(int d) {
  for (const Gates gates : {Gates::zero, Gates::usual, Gates::bursts}) {
    std::vector<B> o[2];
    for (int i = 0; i < 2; ++i) {
      Problem p;
      p.d_key = p.d_value = d, p.gates = gates, p.channels = i, p.equal = i;
      Inputs<B> in(1000, 2, 31, p);
      std::vector<Task> tasks(2);
      for (int h = 0; h < 2; ++h) tasks[h].head = h, tasks[h].end = 1000;
      Pass pass = in.pass(true);
      pass.tasks = upload(tasks), pass.task_count = 2;
      CHECK(run_pass(pass, nullptr));
      CHECK(cudaDeviceSynchronize());
      o[i] = host(in.o, 1000 * 2 * d);
    }
    std::vector<float> a(o[0].size());
    std::vector<double> b(o[0].size());
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(o[1][i]), b[i] = static_cast<float>(o[0][i]);
    char name[100];
    std::snprintf(name, sizeof name, "K=V=%d, gates %d: equal channels and one decay a head", d,
                  static_cast<int>(gates));
    verdict(name, relative(a, b), 2e-3);
  }
}

/// What is not finite is reported, whether it comes in by v, by a query beyond fp16 (only outputs see it) or by a
/// decay.
void check_bad(int d) {
  for (int kind = 0; kind < (d > 128 ? 4 : 6); ++kind) {
    Problem p;
    p.d_key = p.d_value = d, p.gates = kind >= 3 ? Gates::usual : Gates::none, p.channels = kind >= 4;
    Inputs<B> in(300, 2, 8, p);
    const B large = __float2bfloat16(kind == 1 ? INFINITY : 1e30f);
    const float nan = NAN;
    const std::int64_t at = (100 * 2 + 1) * d + 17;  // head 1
    if (kind == 1) CHECK(cudaMemcpy(in.v + at, &large, 2, cudaMemcpyHostToDevice));
    if (kind == 2 || kind == 4) CHECK(cudaMemcpy(in.q + at, &large, 2, cudaMemcpyHostToDevice));
    if (kind == 3) CHECK(cudaMemcpy(in.log_decay + 201, &nan, 4, cudaMemcpyHostToDevice));
    if (kind == 5) CHECK(cudaMemcpy(in.log_decay + at, &nan, 4, cudaMemcpyHostToDevice));
    std::vector<Task> tasks(2);
    for (int h = 0; h < 2; ++h) tasks[h].head = h, tasks[h].end = 300;
    Counts* counts = upload(std::vector<Counts>(2));
    Pass pass = in.pass(true);
    pass.tasks = upload(tasks), pass.task_count = 2, pass.counts = counts;
    CHECK(run_pass(pass, nullptr));
    CHECK(cudaDeviceSynchronize());
    const auto c = host(counts, 2);
    const char* names[] = {
        "all finite", "v infinite", "q beyond fp16", "a decay NaN", "channels, q beyond fp16", "channels, a decay NaN"};
    char line[100];
    std::snprintf(line, sizeof line, "K=V=%d, %s: reports wrong", d, names[kind]);
    verdict(line, (c[0].bad != 0) + (c[1].bad != (kind > 0)), 0);
  }
}

/// Pairs, neighbours or all of one kind before all of the other, give what the tasks give alone.
void check_pairs() {
  for (const Gates gates : {Gates::none, Gates::usual}) {
    Problem p;
    p.d_key = p.d_value = 64, p.gates = gates;
    const int heads = 3, size = 64 * 64, n = (2 * heads + 2) * size;
    Inputs<B> in(200, heads, 19, p);
    std::vector<float> states[3];
    for (int distance : {0, 1, heads}) {
      float* to = device<float>(n);
      CHECK(cudaMemset(to, 0xff, n * 4));
      std::vector<Task> tasks(2 * heads);
      for (int h = 0; h < heads; ++h)
        for (int part = 0; part < 2; ++part) {
          Task& t = tasks[distance == heads ? part * heads + h : 2 * h + part];
          t.head = h, t.begin = h == 2 ? 200 : 7, t.end = 200, t.probe_at = h == 1 ? 99 : -1;
          t.flags = part == 0 ? from_identity | without_values : 0;
          t.to = {to + (2 * h + part) * size, 1, 64};
          if (h == 1) t.probe = {to + (2 * heads + part) * size, 1, 64};
        }
      Pass pass = in.pass(false);
      pass.tasks = upload(tasks), pass.task_count = 2 * heads, pass.pair_distance = distance;
      CHECK(run_pass(pass, nullptr));
      CHECK(cudaDeviceSynchronize());
      states[distance == heads ? 2 : distance] = host(to, n);
    }
    for (int i = 1; i < 3; ++i) {
      char line[100];
      std::snprintf(line, sizeof line, "%s and single tasks%s: states that differ", i == 1 ? "pairs" : "distant pairs",
                    gates == Gates::none ? "" : ", decay");
      verdict(line,
              std::inner_product(states[0].begin(), states[0].end(), states[i].begin(), 0.0, std::plus<>(),
                                 std::not_equal_to<>()),
              0);
    }
  }
}

/// A decay of 0 gives the bits of no decay.
void check_zero_decay(int d) {
  Problem plain, zero;
  plain.d_key = plain.d_value = zero.d_key = zero.d_value = d, zero.gates = Gates::zero;
  std::vector<std::uint16_t> o[2];
  for (int i = 0; i < 2; ++i) {
    Inputs<B> in(1000, 2, 31, i ? zero : plain);
    std::vector<Task> tasks(2);
    for (int h = 0; h < 2; ++h) tasks[h].head = h, tasks[h].end = 1000;
    Pass pass = in.pass(true);
    pass.tasks = upload(tasks), pass.task_count = 2;
    CHECK(run_pass(pass, nullptr));
    CHECK(cudaDeviceSynchronize());
    o[i] = host(reinterpret_cast<const std::uint16_t*>(in.o), 1000 * 2 * d);
  }
  int differ = 0;
  for (std::size_t i = 0; i < o[0].size(); ++i) differ += o[0][i] != o[1][i];
  verdict(d == 128 ? "K=V=128, a decay of 0 and no decay: outputs that differ"
                   : "K=V=64, a decay of 0 and no decay: outputs that differ",
          differ, 0);
}

/// The least that shows races and wild accesses, for compute-sanitizer.
void check_least_wide() {
  for (const auto [k, v] : {std::pair{256, 136}, {192, 64}}) {
    Problem p;
    p.d_key = k, p.d_value = v, p.own_eta = true;
    Problem gated = p;
    gated.gates = Gates::bursts;
    check_case<B>("wide", 400, 1, p, {.begin = 3, .probe_at = 170, .start = true});
    check_case<B>("wide, gated", 400, 1, gated, {.begin = 3, .probe_at = 170, .start = true});
    check_case<B>("wide, gated, states only", 400, 1, gated, {.start = true, .outputs = false});
  }
}

void check_least() {
  for (const auto [k, v] : {std::pair{128, 128}, {64, 64}, {64, 128}}) {
    Problem p;
    p.d_key = k, p.d_value = v, p.own_eta = true;
    Problem gated = p;
    gated.gates = Gates::bursts;
    check_case<B>("plain", 400, 1, p, {.begin = 3, .probe_at = 170, .start = true});
    check_case<B>("gated", 400, 1, gated, {.begin = 3, .probe_at = 170, .start = true});
    check_case<B>("gated, states only", 400, 1, gated, {.start = true, .outputs = false});
    gated.channels = true;
    check_case<B>("channels", 400, 1, gated, {.begin = 3, .probe_at = 170, .start = true});
    check_case<B>("channels, states only", 400, 1, gated, {.start = true, .outputs = false});
    gated.short_gates = true;
    check_case<B>("channels, bf16", 400, 1, gated, {.begin = 3, .probe_at = 170, .start = true});
  }
  check_least_wide();
  check_pairs();
}

/// More than 128 keys.
void check_wide(bool small) {
  std::printf("keys of more than 128 elements, against float64, token by token\n");
  for (const auto [k, v] : {std::pair{256, 256}, {192, 192}, {256, 64}, {192, 128}, {136, 72}})
    if (!small || (k == v)) check_sizes(k, v, small);
  for (const int d : {256, 192}) check_bad(d), check_zero_decay(d);
  if (small) return;
  Problem p, slow;  // what forgets over many chunks forgets at the right rate
  p.d_key = p.d_value = slow.d_key = slow.d_value = 256, slow.gates = Gates::slow, slow.beta_high = 1e-3f;
  check_map<B>("K=V=256, map of 16384 tokens", 0, 16384, 2, 0.5, p);
  check_case<B>("K=V=256, T=65536, slow decay, small beta", 65536, 2, slow, {.start = true});
}

void check_channels(bool small) {
  std::printf("a decay a channel, against float64, token by token\n");
  for (const auto [k, v] : {std::pair{128, 128}, {64, 64}, {64, 128}, {128, 64}, {96, 96}, {72, 104}})
    if (!small || k % 64 == 0) check_channel_sizes(k, v, small);
  check_equal_channels(128);
  check_equal_channels(64);
  if (small) return;
  Problem slow;
  slow.channels = true, slow.gates = Gates::slow, slow.beta_high = 1e-3f;
  check_case<B>("T=65536, channels, slow decay, small beta", 65536, 2, slow, {.start = true});
}

void check(bool small) {
  std::printf("against float64, token by token\n");
  for (const auto [k, v] : {std::pair{128, 128}, {64, 64}, {64, 128}, {128, 64}, {96, 96}, {72, 104}})
    if (!small || k % 64 == 0) check_sizes(k, v, small);
  check_pairs();
  check_bad(128);
  check_bad(64);
  check_zero_decay(128);
  check_zero_decay(64);
  if (small) return;
  check_map<B>("map of 8192 tokens", 0, 8192, 2, 0.5);
  Problem p64;
  p64.d_key = p64.d_value = 64;
  check_map<B>("K=V=64, map of 4096 tokens", 0, 4096, 2, 0.5, p64);
  Problem slow;  // what forgets over many chunks forgets at the right rate
  slow.gates = Gates::slow, slow.beta_high = 1e-3f;
  check_case<B>("T=65536, slow decay, small beta", 65536, 2, slow, {.start = true});
}

// ---- whole solves ----

/// One head after another in segments; states at the borders from the horizon, or from full maps and chains.
template <class T>
struct Solve {
  Inputs<T>& in;
  Segments cut;
  std::int64_t horizon;  ///< tokens before a border that are mapped; 0 is all of them
  float *P, *L, *states, *norms;
  Counts* counts;
  std::vector<Task> map_tasks, out_tasks;
  const Task *device_maps, *device_outs;
  const Chain* chains;
  int borders;

  Solve(Inputs<T>& in, Segments cut, std::int64_t horizon) : in(in), cut(cut), horizon(horizon) {
    const int H = in.heads, K = in.problem.d_key, S = K * K;
    borders = cut.count - 1;
    P = device<float>(std::max(1, borders * H) * S), L = device<float>(std::max(1, borders * H) * S);
    states = device<float>(cut.count * H * S), norms = device<float>(2 * std::max(1, borders * H));
    CHECK(cudaMemset(states, 0, cut.count * H * S * sizeof(float)));
    std::vector<Chain> c;
    for (int j = 0; j < borders; ++j)
      for (int h = 0; h < H; ++h)
        for (int part = 0; part < 2; ++part) {
          Task t;
          t.head = h, t.end = (j + 1) * cut.tokens, t.begin = j * cut.tokens;
          if (horizon > 0) t.begin = std::max(t.begin, t.end - horizon);
          const int slot = j * H + h;
          if (part == 0) t.flags = from_identity | without_values, t.to = {P + slot * S, 1, K};
          if (part == 1) t.to = {(horizon > 0 ? states + (slot + H) * S : L + slot * S), 1, K};
          map_tasks.push_back(t);
        }
    for (int j = 0; j < cut.count; ++j)
      for (int h = 0; h < H; ++h) {
        Task t;
        t.head = h, t.begin = j * cut.tokens, t.end = std::min(in.tokens, t.begin + cut.tokens);
        if (j > 0) t.from = {states + (j * H + h) * S, 1, K};
        out_tasks.push_back(t);
      }
    for (int h = 0; h < H; ++h) c.push_back({P + h * S, L + h * S, states + h * S, H * S, H * S, borders});
    chains = upload(c);
    device_maps = upload(map_tasks), device_outs = upload(out_tasks);
    counts = device<Counts>(map_tasks.size() + out_tasks.size());
    CHECK(cudaMemset(counts, 0, (map_tasks.size() + out_tasks.size()) * sizeof(Counts)));
  }
  ~Solve() {
    for (void* p : {static_cast<void*>(P), static_cast<void*>(L), static_cast<void*>(states), static_cast<void*>(norms),
                    static_cast<void*>(counts)})
      cudaFree(p);
  }
  int size() const { return in.problem.d_key * in.problem.d_key; }
  void run(cudaStream_t stream, int parts = 3) {
    if (parts & 1) {
      Pass m = in.pass(false);
      m.tasks = device_maps, m.task_count = static_cast<int>(map_tasks.size()), m.counts = counts, m.pair_distance = 1;
      CHECK(run_pass(m, stream));
      if (horizon > 0)
        CHECK(matrix_norms(P, size(), borders * in.heads, norms, stream, size()));
      else
        CHECK(run_chains(chains, in.heads, stream, in.problem.d_key, in.problem.d_key));
    }
    if (parts & 2) {
      Pass p = in.pass(true);
      p.tasks = device_outs, p.task_count = static_cast<int>(out_tasks.size()), p.counts = counts + map_tasks.size();
      CHECK(run_pass(p, stream));
    }
  }
  double worst_norm() const {
    double w = 0;
    for (float x : host(norms, borders * in.heads)) w = std::max<double>(w, x);
    return w;
  }
  int bad() const {
    int n = 0;
    for (const Counts& c : host(counts, map_tasks.size() + out_tasks.size())) n += c.bad;
    return n;
  }
};

template <class F>
double median_ms(int runs, F&& f) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int i = 0; i < 3; ++i) f();
  std::vector<float> ms(runs);
  for (float& m : ms) {
    CHECK(cudaEventRecord(a));
    f();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    CHECK(cudaEventElapsedTime(&m, a, b));
  }
  std::sort(ms.begin(), ms.end());
  return ms[runs / 2];
}

template <class T>
double whole_error(Inputs<T>& in) {
  std::vector<Task> tasks(in.heads);
  for (int h = 0; h < in.heads; ++h) tasks[h].head = h, tasks[h].end = in.tokens;
  const Task* t = upload(tasks);
  double* errors = device<double>(3);
  CHECK(cudaMemset(errors, 0, 24));
  run_reference<T>(in.given(), t, in.heads, nullptr, errors);
  CHECK(cudaDeviceSynchronize());
  const auto e = host(errors, 3);
  cudaFree(errors);
  return std::sqrt(e[0] / e[1]);
}

void check_segments() {
  std::printf("segments\n");
  {
    Problem p;
    p.d_key = p.d_value = 256;
    Inputs<B> in(65536, 2, 9, p);
    for (std::int64_t horizon : {std::int64_t{16384}, std::int64_t{0}}) {
      in.poison();
      Solve<B> solve(in, {32768, 2}, horizon);
      solve.run(nullptr);
      CHECK(cudaDeviceSynchronize());
      verdict(horizon ? "K=V=256, T=65536, 2 segments, horizon 16384: o" : "K=V=256, T=65536, 2 segments, full maps: o",
              whole_error(in), 1.9e-3);
    }
    p.d_key = p.d_value = 192, p.span = 64;
    Inputs<B> flat(16384, 2, 10, p);
    Solve<B> solve(flat, {4096, 4}, 0);
    solve.run(nullptr);
    CHECK(cudaDeviceSynchronize());
    verdict("K=V=192, T=16384, keys in 64 dimensions, full maps: o", whole_error(flat), 1.9e-3);
  }
  Inputs<B> in(65536, 2, 9);
  for (std::int64_t horizon : {std::int64_t{8192}, std::int64_t{0}}) {
    in.poison();
    Solve<B> solve(in, {16384, 4}, horizon);
    solve.run(nullptr);
    CHECK(cudaDeviceSynchronize());
    verdict(horizon ? "T=65536, 4 segments, horizon 8192: o" : "T=65536, 4 segments, full maps: o", whole_error(in),
            1.9e-3);
    if (horizon) std::printf("  largest |P| %.2e\n", solve.worst_norm());
  }
  in.poison();
  Problem half;
  half.span = 64;
  Inputs<B> flat(16384, 2, 10, half);  // keys that never span the space
  Solve<B> solve(flat, {4096, 4}, 0);
  solve.run(nullptr);
  CHECK(cudaDeviceSynchronize());
  verdict("T=16384, keys in 64 dimensions, full maps: o", whole_error(flat), 1.9e-3);
}

/// One row: T tokens, H heads; the horizon as the caller of the kernels would find it, and full maps.
void time_row(const char* name, int heads, Problem problem, std::int64_t horizon, bool full, bool check_long,
              std::int64_t T = 1 << 20) {
  if (!only.empty() && std::find(only.begin(), only.end(), name) == only.end()) return;
  const int multiprocessors = 132, D = problem.d_key;
  Inputs<B> in(T, heads, 3, problem);
  const double gate_bytes = in.log_decay     ? 4.0 * in.channels()
                            : in.short_decay ? 2.0 * in.channels()
                                             : 0,
               bytes = double(T) * heads * ((4 * D + 1) * 2 + gate_bytes), floor_ms = bytes / 4.29e9;
  const Segments cut =
      plan_segments(T, heads, multiprocessors * tasks_at_once(D, D, problem.channels) / ctas_of_task(D, D));
  const double operations = double(T) * heads * (6.0 * D * D + 512 * D);  // of the outputs' products
  for (const std::int64_t h : {horizon, std::int64_t{0}}) {
    if (h == 0 && !full) continue;
    Solve<B> solve(in, cut, h);
    in.poison();
    const double all = median_ms(21, [&] { solve.run(nullptr); });
    const double maps = median_ms(11, [&] { solve.run(nullptr, 1); });
    const double outs = median_ms(11, [&] { solve.run(nullptr, 2); });
    const double chunks = double(cut.tokens / 64);
    std::printf(
        "  %-30s %s %6d: %6.3f ms = %6.3f + %6.3f (floor %.3f); %d segments; %.0f cycles a chunk, %.0f TFLOP/s; bad %d",
        name, h ? "horizon" : "full   ", static_cast<int>(h), all, maps, outs, floor_ms, cut.count,
        outs * 1e6 / chunks * 1.755, operations / outs * 1e-9, solve.bad());
    if (h) std::printf("; |P| %.1e", solve.worst_norm());
    std::printf("\n");
    if (check_long) verdict("    the same: o against float64", whole_error(in), 1.9e-3);
  }
}

void time_channels(bool check_long, bool brief) {
  Problem wide, narrow, small;
  wide.gates = Gates::usual, wide.channels = true;
  narrow = wide, narrow.short_gates = true;
  small = wide, small.d_key = small.d_value = 64;
  time_row("H=16 K=V=128 channels, f32", 16, wide, 512, !brief, check_long);
  time_row("H=16 K=V=128 channels, bf16", 16, narrow, 512, false, check_long);
  time_row("H=4 K=V=128 channels, f32", 4, wide, 512, !brief, check_long);
  time_row("H=4 K=V=64 channels, f32", 4, small, 512, false, check_long);
}

/// `brief`: 131,072 tokens only.
void time_wide(bool check_long, bool brief) {
  for (const std::int64_t T : {std::int64_t{1} << 17, std::int64_t{1} << 20}) {
    if (brief && T > 1 << 17) continue;
    for (const int d : {256, 192})
      for (const int heads : {4, 8}) {
        Problem plain, gated;
        plain.d_key = plain.d_value = gated.d_key = gated.d_value = d, gated.gates = Gates::usual;
        char name[100];
        std::snprintf(name, sizeof name, "T=%lldk H=%d K=V=%d", static_cast<long long>(T >> 10), heads, d);
        time_row(name, heads, plain, d == 256 ? 16384 : 12288, T == 1 << 17, check_long, T);
        if (heads == 8) time_row("  the same, head decay", heads, gated, 512, false, check_long, T);
      }
  }
}

void time_all(bool check_long, bool brief) {
  Problem plain, gated, small, small_gated;
  gated.gates = Gates::usual;
  small.d_key = small.d_value = 64, small_gated = small, small_gated.gates = Gates::usual;
  time_row("H=16 K=V=128", 16, plain, 8192, !brief, check_long);
  time_row("H=16 K=V=128 head decay", 16, gated, 512, !brief, check_long);
  time_row("H=4 K=V=128", 4, plain, 8192, !brief, check_long);
  time_row("H=4 K=V=64", 4, small, 4096, !brief, check_long);
  time_row("H=4 K=V=64 head decay", 4, small_gated, 512, !brief, check_long);
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    for (int i = 1; i < argc; ++i)
      if (std::string(argv[i]) == name) return true;
    return argc == 1;
  };
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "rows=", 5) == 0) only.push_back(argv[i] + 5);
  if (wanted("descriptors")) test_operands();
  if (wanted("check")) check(false);
  if (wanted("check") || wanted("channels")) check_channels(false);
  if (wanted("check") || wanted("wide")) check_wide(false);
  if (argc > 1 && wanted("small")) check(true), check_channels(true), check_wide(true);
  if (argc > 1 && wanted("least")) check_least();
  if (argc > 1 && wanted("least_wide")) check_least_wide();
  if (wanted("maps")) check_segments();
#ifdef LONGSCAN_HOPPER_PROFILE
  print_profile();
  print_channel_profile();
  print_wide_profile();
  for (const int d : {256, 128, 64})
    for (int kind = 0; kind < (d > 128 ? 2 : 3); ++kind) {
      const char* kinds[] = {"", ", a decay a head", ", a decay a channel"};
      Problem problem;
      problem.d_key = problem.d_value = d, problem.gates = kind ? Gates::usual : Gates::none;
      problem.channels = problem.short_gates = kind == 2;
      Inputs<B> in(131072, 16, 3, problem);
      Solve<B> solve(in, plan_segments(131072, 16, 132 * tasks_at_once(d, d, kind == 2) / ctas_of_task(d, d)), 0);
      for (int part = 1; part < 3; ++part) {
        solve.run(nullptr, part);
        CHECK(cudaDeviceSynchronize());
        std::printf("K=V=%d%s, %s, CTA 0, %lld chunks\n", d, kinds[kind], part == 1 ? "maps" : "outputs",
                    static_cast<long long>(solve.cut.tokens / 64));
        kind == 2 ? print_channel_profile() : d > 128 ? print_wide_profile() : print_profile();
      }
    }
  return 0;
#endif
  if (wanted("time") || wanted("long") || wanted("brief")) time_all(wanted("long"), wanted("brief"));
  if (wanted("time") || wanted("long") || wanted("brief") || wanted("time_channels"))
    time_channels(wanted("long"), wanted("brief"));
  if (wanted("time") || wanted("long") || wanted("brief") || wanted("time_wide"))
    time_wide(wanted("long"), wanted("brief"));
#ifdef LONGSCAN_HOPPER_PROFILE
  print_profile();
#endif
  std::printf("%d failures\n", failures);
  return failures != 0;
}
