// SPDX-License-Identifier: Apache-2.0
// Tests and times of the Hopper kernels on their own: no Kokkos, no MPI.
//     nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a bench_hopper.cu delta_hopper.cu -o bench_hopper
//     bench_hopper [descriptors] [check] [maps] [time] [long]     (default: all)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

constexpr int D = 128;
int failures = 0;

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
__device__ double get(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ double get(const __half* p) { return __half2float(*p); }

/// One warp a vector; `unit` vectors have length 1. The coordinates from `span` on are zero.
template <class T>
__global__ void fill_vectors(T* x, std::int64_t vectors, std::uint64_t seed, bool unit, int span) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (i >= vectors) return;
  float e[4], squares = 0;
  for (int j = 0; j < 4; ++j) {
    const int k = lane * 4 + j;
    e[j] = k < span ? normal(seed, i * D + k) : 0.f;
    squares += e[j] * e[j];
  }
  for (int d = 16; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
  const float f = unit ? rsqrtf(squares) : 1.f;
  for (int j = 0; j < 4; ++j) put(x + i * D + lane * 4 + j, e[j] * f);
}

template <class T>
__global__ void fill_scalars(T* x, std::int64_t n, std::uint64_t seed, float low, float high) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) put(x + i, low + (high - low) * uniform(seed, i));
}

template <class T>
struct Given {
  const T *q, *k, *v, *beta, *eta, *o;
  int heads;
};

template <class T>
struct Inputs {
  std::int64_t tokens;
  int heads;
  T *q, *k, *v, *beta, *eta, *o;
  Inputs(std::int64_t tokens, int heads, std::uint64_t seed, int span = D, float beta_high = 1.f)
      : tokens(tokens), heads(heads) {
    const std::int64_t n = tokens * heads;
    q = device<T>(n * D), k = device<T>(n * D), v = device<T>(n * D), o = device<T>(n * D);
    beta = device<T>(n), eta = device<T>(n);
    const auto blocks = static_cast<unsigned>((n + 7) / 8);
    fill_vectors<<<blocks, 256>>>(q, n, seed + 1, true, D);
    fill_vectors<<<blocks, 256>>>(k, n, seed + 2, true, span);
    fill_vectors<<<blocks, 256>>>(v, n, seed + 3, false, D);
    fill_scalars<<<static_cast<unsigned>((n + 255) / 256), 256>>>(beta, n, seed + 4, 0.f, beta_high);
    fill_scalars<<<static_cast<unsigned>((n + 255) / 256), 256>>>(eta, n, seed + 5, 0.f, 1.f);
    poison();
    CHECK(cudaGetLastError());
  }
  void poison() { CHECK(cudaMemset(o, 0xff, tokens * heads * D * sizeof(T))); }  // NaN
  Inputs(const Inputs&) = delete;
  ~Inputs() {
    for (T* p : {q, k, v, beta, eta, o}) cudaFree(p);
  }
  Given<T> given() const { return {q, k, v, beta, eta, o, heads}; }
  Pass pass(bool outputs, bool own_eta) const {
    Pass p;
    constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
    p.type = bf16 ? Type::bf16 : Type::f16;
    const std::int64_t row = std::int64_t{heads} * D;
    p.q = {q, row, D}, p.k = {k, row, D}, p.v = {v, row, D};
    p.tokens = tokens, p.heads = heads;
    p.beta = {beta, p.type, heads, 1};
    if (own_eta) p.eta = {eta, p.type, heads, 1};
    if (outputs) p.o = o, p.o_token_stride = row, p.o_head_stride = D;
    return p;
  }
};

// ---- float64, token by token ----

/// One warp a row of S of one task: four channels a lane. Compares with o when `errors` is given:
/// errors[0] += (o - exact)², errors[1] += exact², and counts elements in errors[2].
template <class T>
__global__ void reference(Given<T> in, bool own_eta, const Task* tasks, int task_count, double* ends, double* errors) {
  const int w = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (w >= task_count * D) return;
  const Task task = tasks[w / D];
  const int v = w % D;
  double s[4];
  for (int j = 0; j < 4; ++j) {
    const int k = lane * 4 + j;
    s[j] = task.flags & from_identity ? (k == v)
           : task.from.data           ? task.from.data[k * task.from.k_stride + v * task.from.v_stride]
                                      : 0.0;
  }
  double wrong = 0, size = 0, count = 0;
  for (std::int64_t t = task.begin; t < task.end; ++t) {
    const std::int64_t i = t * in.heads + task.head;
    double k[4], q[4], sk = 0, sq = 0;
    for (int j = 0; j < 4; ++j) {
      k[j] = get(in.k + i * D + lane * 4 + j), q[j] = get(in.q + i * D + lane * 4 + j);
      sk += s[j] * k[j];
    }
    for (int d = 16; d > 0; d >>= 1) sk += __shfl_xor_sync(0xffffffffu, sk, d);
    const double beta = get(in.beta + i), eta = own_eta ? get(in.eta + i) : beta;
    const double value = task.flags & without_values ? 0.0 : get(in.v + i * D + v);
    const double x = eta * value - beta * sk;
    for (int j = 0; j < 4; ++j) s[j] += x * k[j], sq += s[j] * q[j];
    if (errors) {
      for (int d = 16; d > 0; d >>= 1) sq += __shfl_xor_sync(0xffffffffu, sq, d);
      const double e = get(in.o + i * D + v) - sq;
      wrong += e * e, size += sq * sq, count += 1;
    }
  }
  if (errors && lane == 0) atomicAdd(errors, wrong), atomicAdd(errors + 1, size), atomicAdd(errors + 2, count);
  if (ends)
    for (int j = 0; j < 4; ++j) ends[static_cast<std::int64_t>(w) * D + lane * 4 + j] = s[j];
}

double relative(const std::vector<float>& a, const std::vector<double>& b) {
  double wrong = 0, size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) wrong += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
  return std::sqrt(wrong / size);
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
    product_tiles_n64<true>(d, tile, rows);
    for (int s = 1; s < 8; ++s) {
      const int step = (s >> 2) * 8192 + (s & 3) * 32;
      product_tiles_n64<false>(d, advance(tile, step), advance(rows, step));
    }
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
  const char* names[] = {"A registers, B in rows, n64", "A registers, B in rows, n32 from row 32", "A, B in rows, n64",
                         "A registers, B in columns, n128"};
  for (int form = 0; form < 4; ++form) {
    operand_kernel<<<1, 128, 34 * 1024>>>(da, db, out, form);
    CHECK(cudaDeviceSynchronize());
    const auto got = host(out, 64 * D);
    int wrong = 0;
    const int columns = form == 3 ? 128 : form == 1 ? 32 : 64, depth = form == 1 || form == 3 ? 64 : 128;
    for (int m = 0; m < 64; ++m)
      for (int n = 0; n < columns; ++n) {
        int sum = 0;
        for (int k = 0; k < depth; ++k)
          sum += ia[m * D + k] * (form == 3 ? ib[k * D + n] : ib[(n + (form == 1 ? 32 : 0)) * D + k]);
        wrong += got[m * D + n] != static_cast<float>(sum);
      }
    verdict(names[form], wrong, 0);
  }
}

// ---- correctness ----

template <class T>
void check_case(const char* name, std::int64_t tokens, int heads, bool own_eta, bool start, std::int64_t begin,
                std::int64_t probe_at, double limit, int span = D, float beta_high = 1.f) {
  Inputs<T> in(tokens, heads, 77 + tokens, span, beta_high);
  std::vector<float> first(heads * D * D);
  for (std::size_t i = 0; i < first.size(); ++i)
    first[i] = static_cast<float>(static_cast<int>(mix(i) % 2001) - 1000) / 1000;
  float* from = upload(first);
  float *to = device<float>(heads * D * D), *probe = device<float>(heads * D * D);
  CHECK(cudaMemset(to, 0xff, heads * D * D * 4));
  CHECK(cudaMemset(probe, 0xff, heads * D * D * 4));
  std::vector<Task> tasks(heads), probed(heads);
  for (int h = 0; h < heads; ++h) {
    Task& t = tasks[h];
    t.begin = begin, t.end = tokens, t.head = h;
    if (start) t.from = {from + h * D * D, 1, D};
    t.to = {to + h * D * D, 1, D};
    if (probe_at >= 0) t.probe_at = probe_at, t.probe = {probe + h * D * D, 1, D};
    probed[h] = t;
    probed[h].end = probe_at;
  }
  const Task* device_tasks = upload(tasks);
  Counts* counts = device<Counts>(heads);
  CHECK(cudaMemset(counts, 0, heads * sizeof(Counts)));
  Pass pass = in.pass(true, own_eta);
  pass.tasks = device_tasks, pass.task_count = heads, pass.counts = counts;
  CHECK(run_pass(pass, nullptr));
  CHECK(cudaDeviceSynchronize());
  double *ends = device<double>(heads * D * D), *errors = device<double>(3);
  CHECK(cudaMemset(errors, 0, 24));
  reference<T><<<heads * D / 4, 128>>>(in.given(), own_eta, device_tasks, heads, ends, errors);
  CHECK(cudaDeviceSynchronize());
  const auto e = host(errors, 3);
  char line[160];
  std::snprintf(line, sizeof line, "%s: o", name);
  if (tokens > begin) verdict(line, std::sqrt(e[0] / e[1]), limit);
  std::snprintf(line, sizeof line, "%s: end state", name);
  verdict(line, relative(host(to, heads * D * D), host(ends, heads * D * D)), 1e-3);
  if (probe_at >= 0) {
    const Task* p = upload(probed);
    reference<T><<<heads * D / 4, 128>>>(in.given(), own_eta, p, heads, ends, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::snprintf(line, sizeof line, "%s: probe", name);
    verdict(line, relative(host(probe, heads * D * D), host(ends, heads * D * D)), 1e-3);
  }
  // tokens before `begin` must be untouched: still NaN
  if (begin > 0) {
    const auto o = host(reinterpret_cast<const std::uint16_t*>(in.o), begin * heads * D);
    std::snprintf(line, sizeof line, "%s: elements written before the task", name);
    verdict(line, static_cast<double>(o.size() - std::count(o.begin(), o.end(), 0xffff)), 0);
  }
  const auto c = host(counts, heads);
  int bad = 0, breaches = 0;
  for (const Counts& x : c) bad += x.bad, breaches += x.breaches;
  if (bad) std::printf("  %s: reported bad\n", name), ++failures;
  if (breaches) std::printf("  %s: %d breaches\n", name, breaches);
  cudaFree(from), cudaFree(to), cudaFree(probe), cudaFree(counts), cudaFree(ends), cudaFree(errors);
}

template <class T>
void check_map(const char* name, std::int64_t begin, std::int64_t end, int heads, double limit) {
  Inputs<T> in(end, heads, 5);
  float* maps = device<float>(heads * 2 * D * D);
  CHECK(cudaMemset(maps, 0xff, heads * 2 * D * D * 4));
  std::vector<Task> tasks;
  for (int h = 0; h < heads; ++h)
    for (int part = 0; part < 2; ++part) {
      Task t;
      t.begin = begin, t.end = end, t.head = h;
      t.flags = part == 0 ? from_identity | without_values : 0;
      t.to = {maps + (2 * h + part) * D * D, 1, D};
      tasks.push_back(t);
    }
  const Task* device_tasks = upload(tasks);
  Pass pass = in.pass(false, false);
  pass.tasks = device_tasks, pass.task_count = static_cast<int>(tasks.size());
  CHECK(run_pass(pass, nullptr));
  CHECK(cudaDeviceSynchronize());
  double* ends = device<double>(heads * 2 * D * D);
  reference<T><<<2 * heads * D / 4, 128>>>(in.given(), false, device_tasks, 2 * heads, ends, nullptr);
  CHECK(cudaDeviceSynchronize());
  const auto got = host(maps, heads * 2 * D * D);
  const auto exact = host(ends, heads * 2 * D * D);
  double worst[2] = {};
  for (int i = 0; i < 2 * heads; ++i)
    worst[i % 2] = std::max(worst[i % 2], relative({got.begin() + i * D * D, got.begin() + (i + 1) * D * D},
                                                   {exact.begin() + i * D * D, exact.begin() + (i + 1) * D * D}));
  char line[160];
  std::snprintf(line, sizeof line, "%s: P, worst head", name);
  verdict(line, worst[0], limit);
  std::snprintf(line, sizeof line, "%s: L, worst head", name);
  verdict(line, worst[1], 1e-3);
  float* norms = device<float>(2 * heads);
  CHECK(matrix_norms(maps, D * D, 2 * heads, norms, nullptr));
  const auto n = host(norms, 2 * heads);
  std::printf("  |P| of head 0 after %lld tokens: %.2e, |L| %.2e\n", static_cast<long long>(end - begin), n[0], n[1]);
  cudaFree(maps), cudaFree(ends), cudaFree(norms);
}

void check() {
  using B = __nv_bfloat16;
  std::printf("against float64, token by token\n");
  check_case<B>("bf16 T=64 H=1", 64, 1, false, false, 0, -1, 1.9e-3);
  check_case<B>("bf16 T=128 H=1", 128, 1, false, false, 0, -1, 1.9e-3);
  check_case<B>("bf16 T=2048 H=4", 2048, 4, false, false, 0, -1, 1.9e-3);
  check_case<B>("bf16 T=2048 H=4, eta, from a state", 2048, 4, true, true, 0, -1, 1.9e-3);
  check_case<__half>("fp16 T=2048 H=4, eta, from a state", 2048, 4, true, true, 0, -1, 1.9e-3);
  check_case<B>("bf16 T=2048 H=2, beta up to 2", 2048, 2, false, false, 0, -1, 1.9e-3, D, 2.f);
  check_case<B>("bf16 T=2048 H=2, keys in 32 dimensions", 2048, 2, false, false, 0, -1, 1.9e-3, 32);
  for (int t : {1, 15, 63, 65, 127, 129, 1000})
    check_case<B>(("bf16 H=3 T=" + std::to_string(t)).c_str(), t, 3, true, true, 0, -1, 1.9e-3);
  check_case<B>("bf16 T=777 from 130, probe at 401", 777, 3, true, true, 130, 401, 1.9e-3);
  check_case<B>("bf16 T=777 from 130, probe at 130", 777, 3, true, true, 130, 130, 1.9e-3);
  check_map<B>("map of 2048 tokens", 0, 2048, 4, 1e-3);
  check_map<B>("map of 1001 tokens", 37, 1038, 2, 1e-3);
  check_map<B>("map of 8192 tokens", 0, 8192, 2, 0.5);
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
    const int H = in.heads, S = D * D;
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
          if (part == 0) t.flags = from_identity | without_values, t.to = {P + slot * S, 1, D};
          if (part == 1) t.to = {(horizon > 0 ? states + (slot + H) * S : L + slot * S), 1, D};
          map_tasks.push_back(t);
        }
    for (int j = 0; j < cut.count; ++j)
      for (int h = 0; h < H; ++h) {
        Task t;
        t.head = h, t.begin = j * cut.tokens, t.end = std::min(in.tokens, t.begin + cut.tokens);
        if (j > 0) t.from = {states + (j * H + h) * S, 1, D};
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
  void run(cudaStream_t stream, int parts = 3) {
    if (parts & 1) {
      Pass m = in.pass(false, false);
      m.tasks = device_maps, m.task_count = static_cast<int>(map_tasks.size()), m.counts = counts;
      CHECK(run_pass(m, stream));
      if (horizon > 0)
        CHECK(matrix_norms(P, D * D, borders * in.heads, norms, stream));
      else
        CHECK(run_chains(chains, in.heads, stream));
    }
    if (parts & 2) {
      Pass p = in.pass(true, false);
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
  reference<T><<<in.heads * D / 4, 128>>>(in.given(), false, t, in.heads, nullptr, errors);
  CHECK(cudaDeviceSynchronize());
  const auto e = host(errors, 3);
  cudaFree(errors);
  return std::sqrt(e[0] / e[1]);
}

void check_segments() {
  std::printf("segments\n");
  using B = __nv_bfloat16;
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
  Inputs<B> flat(16384, 2, 10, 64);  // keys that never span the space
  Solve<B> solve(flat, {4096, 4}, 0);
  solve.run(nullptr);
  CHECK(cudaDeviceSynchronize());
  verdict("T=16384, keys in 64 dimensions, full maps: o", whole_error(flat), 1.9e-3);
}

void time_all(bool check_long) {
  using B = __nv_bfloat16;
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  int khz = 0;
  CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  std::printf("%s, %d multiprocessors, %.0f MHz at most\n", prop.name, prop.multiProcessorCount, khz / 1e3);
  const std::int64_t T = 1 << 20;
  for (int heads : {16, 4}) {
    Inputs<B> in(T, heads, 3);
    const double bytes = double(T) * heads * (4 * D + 1) * 2, floor_ms = bytes / 4.29e9;
    const Segments cut = plan_segments(T, heads, prop.multiProcessorCount);
    for (std::int64_t horizon : {std::int64_t{8192}, std::int64_t{0}}) {
      Solve<B> solve(in, cut, horizon);
      in.poison();
      const double all = median_ms(21, [&] { solve.run(nullptr); });
      const double maps = median_ms(21, [&] { solve.run(nullptr, 1); });
      const double outs = median_ms(21, [&] { solve.run(nullptr, 2); });
      const double chunks = double(cut.tokens / 64);
      std::printf(
          "  T=%lld H=%d K=V=128 %s: %.3f ms (maps %.3f, outputs %.3f; floor %.3f); %d segments of %lld; "
          "%.0f ns a chunk of outputs = %.0f cycles at 1.755 GHz; bad %d",
          static_cast<long long>(T), heads, horizon ? "horizon 8192" : "full maps", all, maps, outs, floor_ms,
          cut.count, static_cast<long long>(cut.tokens), outs * 1e6 / chunks, outs * 1e6 / chunks * 1.755, solve.bad());
      if (horizon) std::printf("; |P| %.1e", solve.worst_norm());
      std::printf("\n");
      if (check_long) verdict("    the same: o against float64", whole_error(in), 1.9e-3);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    for (int i = 1; i < argc; ++i)
      if (std::string(argv[i]) == name) return true;
    return argc == 1;
  };
  if (wanted("descriptors")) test_operands();
  if (wanted("check")) check();
  if (wanted("maps")) check_segments();
#ifdef LONGSCAN_HOPPER_PROFILE
  print_profile();
  {
    Inputs<__nv_bfloat16> in(131072, 16, 3);
    Solve<__nv_bfloat16> solve(in, plan_segments(131072, 16, 132), 0);
    for (int part = 1; part < 3; ++part) {
      solve.run(nullptr, part);
      CHECK(cudaDeviceSynchronize());
      std::printf("%s, CTA 0, %lld chunks\n", part == 1 ? "maps" : "outputs",
                  static_cast<long long>(solve.cut.tokens / 64));
      print_profile();
    }
    return 0;
  }
#endif
  if (wanted("time") || wanted("long")) time_all(wanted("long"));
#ifdef LONGSCAN_HOPPER_PROFILE
  print_profile();
#endif
  std::printf("%d failures\n", failures);
  return failures != 0;
}
