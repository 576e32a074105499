// SPDX-License-Identifier: Apache-2.0
// Whole solves by the Hopper kernels: right, and how long they take.
#include "local/hopper/bench_parts.cuh"

namespace bench {

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
  Problem wide, narrow, strong, small;
  wide.gates = Gates::usual, wide.channels = true;
  narrow = wide, narrow.short_gates = true;
  strong = narrow, strong.gates = Gates::strong;
  small = wide, small.d_key = small.d_value = 64;
  time_row("H=16 K=V=128 channels, f32", 16, wide, 512, !brief, check_long);
  time_row("H=16 K=V=128 channels, bf16", 16, narrow, 512, false, check_long);
  time_row("H=16 K=V=128 channels, bf16, strong", 16, strong, 512, false, check_long);
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

#ifdef LONGSCAN_HOPPER_PROFILE
/// Cycles by role and place.
void profile_all() {
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
}
#endif

}  // namespace bench
