// SPDX-License-Identifier: Apache-2.0
#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "apps/bench.hpp"
#include "apps/generate_newton.hpp"
#include "apps/memory.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "longscan/partition.hpp"

/// There if the BLAS is OpenBLAS, whose threads would wait for cores that other ranks hold.
extern "C" void openblas_set_num_threads(int) __attribute__((weak));

namespace longscan {
namespace {

/// Features of x: few, so that what is timed is the recurrence.
constexpr int features = 2;

/// A network with its x, and the states it ends with; in `T`.
template <class T>
class Case {
 public:
  Case(Transport& ranks, const BenchNewton& bench, const CellWeights& weights, NewtonMethod method)
      : ranks_(ranks),
        window_{0, bench.tokens},
        solver_(ranks, weights, features, options(bench, method), Sequences{{0, bench.tokens}}) {
    const TokenRange part = solver_.part(window_);
    x_.resize(part.size() * features), h_.resize(part.size() * bench.hidden);
    c_.resize(solver_.shape().state > 1 ? h_.size() : 0);
    fill_normal(1, synthetic_x, 1, part.begin * features, part.size() * features,
                sizeof(T) == 8 ? DType::f64 : DType::f32, x_.data());
  }
  void solve() {
    NewtonData data;
    data.x = x_.data(), data.x_type = sizeof(T) == 8 ? DType::f64 : DType::f32;
    data.h = h_.data(), data.c = c_.empty() ? nullptr : c_.data();
    report = solver_.solve(window_, data);
  }
  Timing time(int runs) {
    return time_runs(runs, [&] {
      ranks_.barrier();
      solve();
      ranks_.barrier();
    });
  }
  const std::vector<T>& h() const { return h_; }
  std::int64_t state() const { return solver_.shape().state; }
  TokenRange part() const { return solver_.part(window_); }
  NewtonReport report;

 private:
  static NewtonOptions options(const BenchNewton& bench, NewtonMethod method) {
    NewtonOptions o;
    o.method = method, o.segment = method == NewtonMethod::sequential ? 0 : bench.segment;
    o.max_iterations = bench.max_iterations;
    o.precision = sizeof(T) == 8 ? Precision::f64 : Precision::f32;
    return o;
  }

  Transport& ranks_;
  TokenRange window_;
  Newton solver_;
  std::vector<T> x_, h_, c_;
};

/// Milliseconds that no method can do without: W_hh h of every token as products of 32 tokens at OpenBLAS's rate, or,
/// where channels do not mix, the bytes of projected inputs and states at the speed of a copy.
template <class T>
double floor_ms(const BenchNewton& bench, std::int64_t gates, std::int64_t state, bool mixes) {
  const int D = bench.hidden;
  if (mixes) {
    if (openblas_set_num_threads) openblas_set_num_threads(1);
    const int rows = 32, columns = static_cast<int>(gates) * D;
    std::vector<T> a(rows * D, T(0.01)), b(static_cast<std::size_t>(D) * columns, T(0.02)), c(rows * columns);
    const int repeats = static_cast<int>(std::max(1.0, 2e7 / (2.0 * rows * D * columns)));
    const Timing t = time_runs(bench.runs, [&] {
      for (int i = 0; i < repeats; ++i)
        if constexpr (sizeof(T) == 8)
          cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, D, 1, a.data(), D, b.data(), columns, 0,
                      c.data(), columns);
        else
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, D, 1, a.data(), D, b.data(), columns, 0,
                      c.data(), columns);
    });
    return 1e3 * t.median / repeats / rows * static_cast<double>(bench.tokens);
  }
  const std::int64_t bytes = bench.tokens * D * (gates + state) * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t piece = std::min<std::int64_t>(bytes, std::int64_t{256} << 20) / 2;  // a copy moves it twice
  std::vector<char> from(piece, 1), to(piece);
  const Timing t = time_runs(bench.runs, [&] { std::memcpy(to.data(), from.data(), piece); });
  return 1e3 * t.median * static_cast<double>(bytes) / (2.0 * static_cast<double>(piece));
}

/// Largest |h - expected| over the RMS of expected, over all ranks; infinite where h is not finite.
template <class T>
double error_of(Transport& ranks, const std::vector<T>& h, const T* expected) {
  double sums[] = {0, static_cast<double>(h.size())}, worst = 0;
  for (std::size_t i = 0; i < h.size(); ++i) {
    const double e = static_cast<double>(expected[i]), d = std::abs(static_cast<double>(h[i]) - e);
    sums[0] += e * e, worst = std::isfinite(d) ? std::max(worst, d) : std::numeric_limits<double>::infinity();
  }
  ranks.all_reduce(sums, 2, Transport::Reduction::sum);
  ranks.all_reduce(&worst, 1, Transport::Reduction::max);
  return worst == 0 ? 0 : worst / std::sqrt(sums[0] / sums[1]);
}

template <class T>
nlohmann::json bench_in(Transport& ranks, const BenchNewton& bench) {
  const SyntheticCell cell{bench.cell, bench.hidden, features, 1, false, bench.recurrent_scale};
  check(cell);
  const CellWeights weights = synthetic_weights(cell, 1, sizeof(T) == 8 ? DType::f64 : DType::f32);
  const bool mixes = bench.cell != "paragru" && bench.cell != "paralstm";
  const std::int64_t gates = bench.cell == "lstm" ? 4 : bench.cell == "rnn_tanh" || bench.cell == "rnn_relu" ? 1 : 3;

  nlohmann::json rows = nlohmann::json::array();
  double sequential_ms = 0;
  const auto add = [&](const std::string& name, const Timing& time, const NewtonReport& r, double error, double floor,
                       int size) {
    nlohmann::json row = time.json();
    if (name == "sequential") sequential_ms = time.median * 1e3;
    row["name"] = name, row["cell"] = bench.cell, row["tokens"] = bench.tokens, row["hidden"] = bench.hidden;
    row["recurrent_scale"] = bench.recurrent_scale, row["precision"] = sizeof(T) == 8 ? "f64" : "f32";
    row["ranks"] = size, row["device"] = device_name();
    row["floor_ms"] = floor / size;
    row["floor"] = mixes ? "the matrix products at OpenBLAS's rate" : "its bytes at the speed of a copy";
    row["iterations"] = r.iterations, row["status"] = std::string(name_of(r.status));
    row["method_used"] = std::string(name_of(r.method_used)), row["bits_of_token_loop"] = r.bits_of_token_loop;
    row["error"] = std::isfinite(error) ? nlohmann::json(error) : nlohmann::json();
    row["projection_ms"] = r.projection_seconds * 1e3;
    row["lyapunov"] = r.lyapunov, row["log_amplification"] = r.log_amplification;
    row["ns_per_token_channel"] = time.median * 1e9 / static_cast<double>(bench.tokens) / bench.hidden;
    row["speedup_over_sequential"] = sequential_ms / (time.median * 1e3);
    rows.push_back(row);
  };

  // The rival: the fused token loop on one rank, over all tokens. The others wait, then learn its states.
  std::vector<T> expected(bench.tokens * bench.hidden);
  double floor = 0;
  {
    Timing time;
    NewtonReport report;
    if (ranks.rank() == 0) {
      const auto alone = make_single_transport();
      Case<T> sequential(*alone, bench, weights, NewtonMethod::sequential);
      time = sequential.time(bench.runs), report = sequential.report, expected = sequential.h();
      floor = floor_ms<T>(bench, gates, sequential.state(), mixes);
    }
    ranks.broadcast(expected.data(), static_cast<std::int64_t>(expected.size() * sizeof(T)), 0);
    add("sequential", time, report, 0, floor, 1);
  }
  std::vector<NewtonMethod> methods = {NewtonMethod::automatic};
  for (NewtonMethod m : bench.methods)
    if (m != NewtonMethod::sequential && std::find(methods.begin(), methods.end(), m) == methods.end())
      methods.push_back(m);
  for (NewtonMethod method : methods) {
    Case<T> c(ranks, bench, weights, method);
    const Timing time = c.time(bench.runs);
    const double error = error_of(ranks, c.h(), expected.data() + c.part().begin * bench.hidden);
    add(std::string(name_of(method)), time, c.report, error, floor, ranks.size());
  }
  if (ranks.rank() != 0 || bench.json) return rows;
  std::printf("%s  T = %lld, D = %d, recurrent scale %g, %s, %d rank%s (%s); Lyapunov exponent %.3g\n",
              bench.cell.c_str(), static_cast<long long>(bench.tokens), bench.hidden, bench.recurrent_scale,
              sizeof(T) == 8 ? "f64" : "f32", ranks.size(), ranks.size() == 1 ? "" : "s", device_name().c_str(),
              rows[1]["lyapunov"].get<double>());
  std::printf("floor %.2f ms: %s, on one rank\n", floor, rows[0]["floor"].get<std::string>().c_str());
  std::printf("%-10s %6s %10s %10s %10s %13s %7s %9s %16s %9s\n", "method", "ranks", "median ms", "min ms", "max ms",
              "projection ms", "passes", "speed-up", "ns/token/channel", "error");
  for (const auto& row : rows) {
    std::printf("%-10s %6d %10.2f %10.2f %10.2f %13.3f %7lld %9.2f %16.2f ", row["name"].get<std::string>().c_str(),
                row["ranks"].get<int>(), row["median_ms"].get<double>(), row["min_ms"].get<double>(),
                row["max_ms"].get<double>(), row["projection_ms"].get<double>(), row["iterations"].get<long long>(),
                row["speedup_over_sequential"].get<double>(), row["ns_per_token_channel"].get<double>());
    if (row["error"].is_null())
      std::printf("%9s", "inf");
    else
      std::printf("%9.1e", row["error"].get<double>());
    std::printf("  %s\n", row["status"].get<std::string>().c_str());
  }
  return rows;
}

}  // namespace

void run_bench_newton(Transport& ranks, const BenchNewton& command) {
  BenchNewton bench = command;
  // weights, and for each token at least x or its projection, a state, and one to compare with
  const double D = bench.hidden, bytes = bench.precision == Precision::f64 ? 8 : 4;
  const bool mixes = bench.cell != "paragru" && bench.cell != "paralstm";
  const std::int64_t longest = *std::max_element(bench.lengths.begin(), bench.lengths.end());
  agree(ranks, [&] {
    require_memory(bytes * (4 * D * (features + (mixes ? D : 1)) + 3 * D * static_cast<double>(longest)),
                   "weights and states of these sizes");
  });
  nlohmann::json rows = nlohmann::json::array();
  for (const std::int64_t tokens : bench.lengths)
    for (const double scale : bench.scales) {
      bench.tokens = tokens, bench.recurrent_scale = scale;
      const nlohmann::json table = bench.projected                     ? run_bench_recurrence(ranks, bench)
                                   : bench.precision == Precision::f64 ? bench_in<double>(ranks, bench)
                                                                       : bench_in<float>(ranks, bench);
      rows.insert(rows.end(), table.begin(), table.end());
    }
  if (bench.json && ranks.rank() == 0) std::printf("%s\n", rows.dump(2).c_str());
}

}  // namespace longscan
