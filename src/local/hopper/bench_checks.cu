// SPDX-License-Identifier: Apache-2.0
// Tests of the Hopper kernels.
#include "local/hopper/bench_parts.cuh"

namespace bench {

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
                            Gates::all_200, Gates::mixed, Gates::steep, Gates::changing}) {
    std::snprintf(name, sizeof name, "K=%d V=%d channels, gates %d", d_key, d_value, static_cast<int>(gates));
    const Problem x = with([&](Problem& y) { y.gates = gates; });
    const Problem short_gates = with([&](Problem& y) { y.gates = gates, y.short_gates = true; });
    check_case<B>(name, T, 2, x, {.start = true}, true);
    check_case<B>(name, 177, 2, x, {.begin = 30, .probe_at = 101, .start = true}, true);
    check_case<B>(name, T, 2, short_gates, {.start = true}, true);
    check_case<__half>(name, 177, 2, x, {.begin = 30, .probe_at = 101, .start = true}, true);
    check_case<__half>(name, 300, 2, short_gates, {.start = true}, true);
    const Problem other_gates = with([&](Problem& y) { y.gates = gates, y.other_gates = true; });
    check_case<B>(name, T, 2, other_gates, {.start = true}, true);
    check_case<__half>(name, 300, 2, other_gates, {.start = true}, true);
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

/// Later tokens change no bit of earlier outputs. From the last token on backwards they are taken from other inputs,
/// whose decays are of kind `later`.
template <class T>
void check_causal(const char* name, Problem problem, Gates later) {
  constexpr std::int64_t tokens = 200;
  constexpr int heads = 4;
  Inputs<T> in(tokens, heads, 31, problem);
  problem.gates = later;
  Inputs<T> other(tokens, heads, 32, problem);
  std::vector<Task> tasks(heads);
  for (int h = 0; h < heads; ++h) tasks[h].head = h, tasks[h].end = tokens;
  const Task* device_tasks = upload(tasks);
  const auto outputs = [&] {
    in.poison();
    Pass pass = in.pass(true);
    pass.tasks = device_tasks, pass.task_count = heads;
    CHECK(run_pass(pass, nullptr));
    CHECK(cudaDeviceSynchronize());
    return host(reinterpret_cast<const std::uint16_t*>(in.o), tokens * heads * problem.d_value);
  };
  const auto whole = outputs();
  const std::int64_t key = heads * problem.d_key, value = heads * problem.d_value, gate = heads * in.channels();
  std::int64_t changed = 0, unchanged = 0;
  for (std::int64_t t = tokens - 1; t > 0; --t) {
    const auto take = [&](auto* to, const auto* from, std::int64_t row) {
      if (to) CHECK(cudaMemcpy(to + t * row, from + t * row, row * sizeof(*to), cudaMemcpyDeviceToDevice));
    };
    take(in.q, other.q, key), take(in.k, other.k, key), take(in.v, other.v, value);
    take(in.beta, other.beta, heads), take(in.eta, other.eta, heads);
    take(in.log_decay, other.log_decay, gate), take(in.short_decay, other.short_decay, gate);
    take(in.other_decay, other.other_decay, gate);
    const auto o = outputs();
    for (std::int64_t i = 0; i < t * value; ++i) changed += o[i] != whole[i];
    unchanged += std::equal(&o[t * value], &o[(t + 1) * value], &whole[t * value]);
  }
  verdict(name, static_cast<double>(changed + unchanged), 0);
  cudaFree(const_cast<Task*>(device_tasks));
}

void check_causal() {
  std::printf("later tokens change no bit of earlier outputs\n");
  Problem p;
  check_causal<B>("no decay", p, Gates::none);
  p.gates = Gates::usual;
  check_causal<B>("a decay a head, later -200", p, Gates::all_200);
  p.d_key = p.d_value = 256;
  check_causal<B>("K=V=256, a decay a head, later -200", p, Gates::all_200);
  p.channels = true;
  for (const auto [k, v] : {std::pair{128, 128}, {64, 64}, {96, 72}})
    for (Gates now :
         {Gates::usual, Gates::mixed, Gates::slow, Gates::strong, Gates::bursts, Gates::steep, Gates::changing})
      for (Gates later : {Gates::all_200, Gates::minus_infinity, Gates::zero, Gates::usual, Gates::strong}) {
        if (k % 64 && later != Gates::all_200 && later != Gates::zero) continue;
        p.d_key = k, p.d_value = v, p.gates = now, p.short_gates = p.other_gates = false;
        char name[100];
        const auto named = [&](const char* types) {
          std::snprintf(name, sizeof name, "K=%d V=%d channels, %s, gates %d, later %d", k, v, types,
                        static_cast<int>(now), static_cast<int>(later));
          return name;
        };
        check_causal<B>(named("bf16 by f32"), p, later);
        check_causal<__half>(named("f16 by f32"), p, later);
        p.short_gates = true;
        check_causal<B>(named("bf16"), p, later);
        check_causal<__half>(named("f16"), p, later);
        p.other_gates = true;
        check_causal<B>(named("bf16 by f16"), p, later);
        check_causal<__half>(named("f16 by bf16"), p, later);
      }
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
  check_causal();
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

}  // namespace bench
