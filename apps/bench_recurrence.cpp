// SPDX-License-Identifier: Apache-2.0
// The recurrence alone: inputs are projected, and lie with the states where kernels run, as in a network on a device.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "apps/bench.hpp"
#include "apps/generate_newton.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "apps/stopwatch.hpp"
#include "core/device_memory.hpp"
#include "core/half.hpp"
#include "core/random.hpp"
#include "local/dense_cell_cuda.hpp"
#include "local/projection.hpp"
#include "longscan/cells.hpp"

namespace longscan {
namespace {

using Space = Kokkos::DefaultExecutionSpace;
using Range = Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>;

/// Larger than any cache. Overwritten before each run, so that no run finds its inputs in one.
constexpr std::int64_t cache_bytes = std::int64_t{256} << 20;
constexpr double tf32_tolerance = 2e-3;
/// Projections are timed for as many tokens as make so many bytes.
constexpr std::int64_t projected_bytes = std::int64_t{8} << 30;
/// A call that takes longer is timed once.
constexpr double long_call = 0.2;

template <class T>
void fill(const DeviceArray<T>& x, std::int64_t first) {
  Kokkos::parallel_for(
      "longscan::bench::fill", Range(0, x.extent(0)), KOKKOS_LAMBDA(const std::int64_t i) {
        x(i) = static_cast<T>(random_normal(1, synthetic_x, static_cast<std::uint64_t>(first + i)));
      });
}

void empty_caches() {
  if (is_host_space<Space>) return;
  static DeviceArray<int>* const array = [] {
    auto* made = new DeviceArray<int>("longscan::bench::cache", cache_bytes / 4);
    Kokkos::push_finalize_hook([made] { *made = {}; });
    return made;
  }();
  Kokkos::deep_copy(*array, 1);
  Kokkos::fence();
}

template <class F>
Timing time_of(int runs, const F& f) {
  std::vector<double> seconds;
  for (int i = 0; i <= runs; ++i) {
    empty_caches();
    double time = 0;
    {
      const Stopwatch watch(time);
      f();
    }
    if (i > 0 || runs == 0 || time > long_call) seconds.push_back(time);
    if (time > long_call) break;
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), static_cast<int>(seconds.size())};
}

/// Largest difference over the RMS of what is expected, over all ranks; infinite where one is not finite.
template <class T>
double error_of(Transport& ranks, const DeviceArray<T>& h, const T* expected, std::int64_t n) {
  double squares = 0, worst = 0;
  Kokkos::parallel_reduce(
      "longscan::bench::error", Range(0, n),
      KOKKOS_LAMBDA(const std::int64_t i, double& sum, double& most) {
        const double e = static_cast<double>(expected[i]), d = static_cast<double>(h(i)) - e, size = d < 0 ? -d : d;
        sum += e * e;
        most = !(size <= 1e300) ? 1e300 : size > most ? size : most;
      },
      Kokkos::Sum<double>(squares), Kokkos::Max<double>(worst));
  double sums[] = {squares, static_cast<double>(n)};
  worst = n > 0 ? worst : 0;
  ranks.all_reduce(sums, 2, Transport::Reduction::sum);
  ranks.all_reduce(&worst, 1, Transport::Reduction::max);
  return worst == 0      ? 0
         : worst < 1e300 ? worst / std::sqrt(sums[0] / sums[1])
                         : std::numeric_limits<double>::infinity();
}

/// x as `S` stores it.
template <class S>
void store_all(const DeviceArray<float>& x, std::int64_t count, const DeviceArray<S>& to) {
  Kokkos::parallel_for(
      "longscan::bench::store", Range(0, count), KOKKOS_LAMBDA(const std::int64_t i) { to(i) = as_stored<S>(x(i)); });
}
/// Values of a and b that differ in a bit.
template <class S>
std::int64_t different(const DeviceArray<S>& a, const DeviceArray<S>& b, std::int64_t count) {
  std::int64_t others = 0;
  Kokkos::parallel_reduce(
      "longscan::bench::compare", Range(0, count),
      KOKKOS_LAMBDA(const std::int64_t i, std::int64_t& sum) { sum += a(i).bits != b(i).bits; }, others);
  return others;
}

/// `auto` on inputs and states of 16 bits, and whether its states have the bits of the token loop's.
struct StoredRun {
  Timing time;
  NewtonReport report;
  bool same = false;
};
template <class S>
StoredRun time_stored(const CellKernel<float>& kernel, std::int64_t tokens, const DeviceArray<float>& x, Stored stored,
                      NewtonOptions options, int runs) {
  const auto alone = make_single_transport();
  const std::int64_t inputs = tokens * kernel.inputs() * kernel.channels(), states = tokens * kernel.state_size();
  DeviceArray<S> x16, h, expected;
  reserve(x16, "longscan::bench::x", inputs), reserve(h, "longscan::bench::h", states),
      reserve(expected, "longscan::bench::h", states);
  store_all(x, inputs, x16);
  const auto solve = [&](const DeviceArray<S>& to) {
    CellArrays<float> arrays{reinterpret_cast<const float*>(x16.data()), reinterpret_cast<float*>(to.data())};
    arrays.stored = stored;
    return solve_cell_kernel<float>(*alone, kernel, {{0, tokens}}, arrays, options);
  };
  StoredRun run;
  options.method = NewtonMethod::sequential;
  solve(expected);
  options.method = NewtonMethod::automatic;
  run.time = time_of(runs, [&] { run.report = solve(h); });
  run.same = different(h, expected, states) == 0;
  return run;
}

/// Bytes a second that a copy reads and writes.
double copy_speed() {
  const DeviceArray<char> from("longscan::bench::copy", cache_bytes), to("longscan::bench::copy", cache_bytes);
  const Timing t = time_of(5, [&] {
    Kokkos::deep_copy(to, from);
    Kokkos::fence();
  });
  return 2.0 * static_cast<double>(cache_bytes) / t.median;
}

/// Seconds that W_ih x + b_ih takes for inputs as wide as the state; the slowest rank's.
template <class T>
double time_of_projection(Transport& ranks, std::int64_t tokens, int features, std::int64_t rows, int runs) {
  tokens = std::min(tokens, projected_bytes / (rows * static_cast<std::int64_t>(sizeof(T))));
  const std::vector<T> weight(static_cast<std::size_t>(rows) * features, T(0.01)), bias(rows, T(0.1));
  const Projection<T> projection(static_cast<int>(rows), features, weight, bias);
  DeviceArray<T> x, y;
  reserve(x, "longscan::bench::x", tokens * features), reserve(y, "longscan::bench::y", tokens * rows);
  fill(x, 7);
  double seconds = time_of(std::min(runs, 5), [&] {
                     projection.apply(x.data(), tokens, y.data());
                     Kokkos::fence();
                   }).median;
  ranks.all_reduce(&seconds, 1, Transport::Reduction::max);
  return seconds;
}

template <class T>
nlohmann::json bench_in(Transport& ranks, const BenchNewton& bench) {
#ifdef KOKKOS_ENABLE_CUDA
  if (!bench.products.empty())
    batch_products() = bench.products == "three"  ? BatchProducts::three
                       : bench.products == "tf32" ? BatchProducts::one_tf32
                                                  : BatchProducts::plain;
#endif
  const SyntheticCell cell{bench.cell, bench.hidden, 2, 1, false, bench.recurrent_scale};
  check(cell);
  const auto kernel = make_cell_kernel<T>(synthetic_weights(cell, 1, sizeof(T) == 8 ? DType::f64 : DType::f32));
  const Sequences all{{0, bench.tokens}};
  const TokenRange part = cell_part(ranks, all);
  const std::int64_t inputs = std::int64_t{kernel->inputs()} * kernel->channels(), size = kernel->state_size();
  const double bytes =
      static_cast<double>(bench.tokens) * static_cast<double>((inputs + size) * std::int64_t{sizeof(T)});
  const double flops =
      kernel->mixes() ? 2.0 * static_cast<double>(bench.tokens) * static_cast<double>(inputs) * bench.hidden : 0;

  nlohmann::json rows = nlohmann::json::array();
  double sequential = 0, floor = 0, projection = 0;
  const auto add = [&](const std::string& name, const Timing& time, const NewtonReport& r, double error, int on) {
    nlohmann::json row = time.json();
    if (name == "sequential") sequential = time.median;
    row["name"] = name, row["cell"] = bench.cell, row["tokens"] = bench.tokens, row["hidden"] = bench.hidden;
    row["recurrent_scale"] = bench.recurrent_scale, row["precision"] = sizeof(T) == 8 ? "f64" : "f32";
    row["projected"] = true, row["ranks"] = on, row["device"] = device_name();
    row["floor_ms"] = floor * 1e3 / on, row["floor"] = "its bytes at the speed of a copy";
    row["iterations"] = r.iterations, row["status"] = std::string(name_of(r.status));
    row["method_used"] = std::string(name_of(r.method_used)), row["reason"] = r.reason;
    row["bits_of_token_loop"] = r.bits_of_token_loop, row["error_bound"] = r.error_bound;
    row["residual_history"] = r.residual_history;
    row["error"] = std::isfinite(error) ? nlohmann::json(error) : nlohmann::json();
    row["lyapunov"] = r.lyapunov, row["log_amplification"] = r.log_amplification;
    row["projection_ms"] = projection * 1e3;
    row["gb_per_s"] = bytes / time.median * 1e-9, row["tflop_per_s"] = flops / time.median * 1e-12;
    row["ns_per_token"] = time.median * 1e9 / static_cast<double>(bench.tokens);
    row["speedup_over_sequential"] = sequential / time.median;
    rows.push_back(row);
  };
  const auto options = [&](NewtonMethod method) {
    NewtonOptions o;
    o.method = method, o.segment = method == NewtonMethod::sequential ? 0 : bench.segment;
    o.max_iterations = bench.max_iterations;
    if (bench.products == "tf32") o.tolerance = tf32_tolerance;  // operands of 11 bits: borders do not agree better
    return o;
  };

  // The rival: the fused token loop on each rank by itself, over all tokens.
  DeviceArray<T> x, h, expected;
  {
    const auto alone = make_single_transport();
    reserve(x, "longscan::bench::x", bench.tokens * inputs),
        reserve(expected, "longscan::bench::h", bench.tokens * size);
    fill(x, 0);
    if (ranks.rank() == 0) floor = bytes / copy_speed();
    NewtonReport report;
    const Timing time = time_of(std::min(bench.runs, 3), [&] {
      report =
          solve_cell_kernel<T>(*alone, *kernel, all, {x.data(), expected.data()}, options(NewtonMethod::sequential));
    });
    ranks.broadcast(&floor, sizeof floor, 0);
    projection = time_of_projection<T>(ranks, part.size(), kernel->channels(), inputs, bench.runs);
    add("sequential", time, report, 0, 1);
  }
  reserve(h, "longscan::bench::h", part.size() * size);
  std::vector<NewtonMethod> methods = {NewtonMethod::automatic};
  for (NewtonMethod m : bench.methods)
    if (m != NewtonMethod::sequential && std::find(methods.begin(), methods.end(), m) == methods.end())
      methods.push_back(m);
  for (NewtonMethod method : methods) {
    NewtonReport report;
    if (h.extent(0) > 0) Kokkos::deep_copy(h, std::numeric_limits<T>::quiet_NaN());
    const Timing time = time_of(bench.runs, [&] {
      ranks.barrier();
      report = solve_cell_kernel<T>(ranks, *kernel, all, {x.data() + part.begin * inputs, h.data()}, options(method));
      ranks.barrier();
    });
    const double error = error_of<T>(ranks, h, expected.data() + part.begin * size, part.size() * size);
    add(std::string(name_of(method)), time, report, error, ranks.size());
  }
  if constexpr (sizeof(T) == 4) {
    if (ranks.size() == 1 && kernel->takes_stored()) {
      const auto add_stored = [&](const char* name, const StoredRun& run) {
        add(name, run.time, run.report, 0, 1);
        rows.back()["gb_per_s"] = bytes / 2 / run.time.median * 1e-9;
        rows.back()["bits_of_token_loop"] = run.same;
      };
      const NewtonOptions o = options(NewtonMethod::automatic);
      add_stored("auto bf16", time_stored<StoredBf16>(*kernel, bench.tokens, x, Stored::bf16, o, bench.runs));
      add_stored("auto f16", time_stored<StoredF16>(*kernel, bench.tokens, x, Stored::f16, o, bench.runs));
    }
  }
  if (ranks.rank() != 0 || bench.json) return rows;
  std::printf(
      "%s  T = %lld, D = %d, recurrent scale %g, %s, %d rank%s (%s), inputs projected; Lyapunov exponent %.3g\n",
      bench.cell.c_str(), static_cast<long long>(bench.tokens), bench.hidden, bench.recurrent_scale,
      sizeof(T) == 8 ? "f64" : "f32", ranks.size(), ranks.size() == 1 ? "" : "s", device_name().c_str(),
      rows[1]["lyapunov"].get<double>());
  std::printf("floor %.4f ms: %s, on one rank\n", floor * 1e3, rows[0]["floor"].get<std::string>().c_str());
  std::printf("%-10s %-10s %10s %10s %10s %13s %7s %9s %8s %9s %9s\n", "method", "used", "median ms", "min ms",
              "max ms", "projection ms", "passes", "speed-up", "GB/s", "TFLOP/s", "error");
  for (const auto& row : rows) {
    std::printf(
        "%-10s %-10s %10.4f %10.4f %10.4f %13.4f %7lld %9.2f %8.0f %9.2f ", row["name"].get<std::string>().c_str(),
        row["method_used"].get<std::string>().c_str(), row["median_ms"].get<double>(), row["min_ms"].get<double>(),
        row["max_ms"].get<double>(), row["projection_ms"].get<double>(), row["iterations"].get<long long>(),
        row["speedup_over_sequential"].get<double>(), row["gb_per_s"].get<double>(), row["tflop_per_s"].get<double>());
    if (row["error"].is_null())
      std::printf("%9s", "inf");
    else
      std::printf("%9.1e", row["error"].get<double>());
    std::printf("  %s%s\n", row["status"].get<std::string>().c_str(),
                row["bits_of_token_loop"].get<bool>() ? ", the token loop's bits" : "");
  }
  return rows;
}

}  // namespace

nlohmann::json run_bench_recurrence(Transport& ranks, const BenchNewton& bench) {
  return bench.precision == Precision::f64 ? bench_in<double>(ranks, bench) : bench_in<float>(ranks, bench);
}

}  // namespace longscan
