// SPDX-License-Identifier: Apache-2.0
// The scan over ranks alone: every algorithm measured, beside what the model says with the costs measured here.
#include <cmath>
#include <cstdio>

#include "apps/bench.hpp"
#include "apps/carrier.hpp"
#include "apps/command_line.hpp"
#include "apps/memory.hpp"
#include "apps/report.hpp"
#include "core/delta_chunk.hpp"
#include "core/random.hpp"
#include "dist/exclusive_scan.hpp"

namespace longscan {
namespace {

constexpr ScanAlgorithm all_algorithms[] = {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather,
                                            ScanAlgorithm::doubling, ScanAlgorithm::mpi};

/// One sequence over all ranks; maps that neither grow nor vanish. Rank 0 knows its states.
template <class T>
struct Problem {
  ScanPart<T> part;
  DeviceArray<T> maps, in, out;

  Problem(Transport& ranks, const BenchScan& bench) {
    const bool delta = bench.maps == "delta";
    int n = 1, m = 1, leading_map = 2, leading_point = 1;
    part.count = bench.maps == "dense" ? 1 : bench.hidden;
    if (delta) {
      part.count = bench.heads, n = bench.d_key, m = bench.d_value;
      leading_map = padded<T>(n + m), leading_point = padded<T>(m);
    } else {
      n = bench.maps == "diagonal" ? 1 : bench.maps == "block" ? 2 : bench.hidden;
      leading_map = n + 1;
    }
    const std::int64_t map = static_cast<std::int64_t>(n) * leading_map,
                       point = static_cast<std::int64_t>(n) * leading_point;
    const auto seed = static_cast<std::uint64_t>(ranks.rank());
    std::vector<T> values(part.count * bench.segments * map, T(0)), states(part.count * point, T(0));
    const auto size = static_cast<T>(0.9 / std::sqrt(n));
    for (std::int64_t s = 0; s < part.count * bench.segments; ++s)
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < n + m; ++j)
          values[s * map + i * leading_map + j] =
              static_cast<T>(2 * random_uniform(1, seed, (s * n + i) * (n + m) + j) - 1) *
              (j < n ? size * T(1.7) : T(1));
    for (std::int64_t s = 0; s < part.count; ++s)
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < m; ++j)
          states[s * point + i * leading_point + j] = static_cast<T>(random_uniform(2, seed, (s * n + i) * m + j));
    maps = on_device("longscan::bench", values), in = on_device("longscan::bench", states);
    out = on_device("longscan::bench", states);
    const int rank = ranks.rank();
    part.links = {rank > 0 ? rank - 1 : -1, rank + 1 < ranks.size() ? rank + 1 : -1};
    part.known.assign(part.count, rank == 0 ? 1 : 0);
    part.maps = {maps.data(), n, m, leading_map, map, delta};
    part.element_step = bench.segments, part.each = bench.segments;
    part.in = {in.data(), leading_point, point}, part.out = {out.data(), leading_point, point};
  }
  std::vector<T> states() const {
    std::vector<T> host(in.extent(0));
    copy_to_host<T>(in.data(), static_cast<std::int64_t>(host.size()), host.data());
    return host;
  }
};

template <class T>
void bench_in(Transport& ranks, const BenchScan& bench) {
  const Problem<T> problem(ranks, bench);
  const ScanPart<T>& part = problem.part;
  const bool composes = bench.segments == 1;
  const ScanCosts costs = measure_scan(ranks, part, composes);
  const ScanSize size{part.count, part.point_size() * static_cast<std::int64_t>(sizeof(T)),
                      part.map_size() * static_cast<std::int64_t>(sizeof(T)), bench.segments};
  const ScanChoice choice = choose_scan(ScanAlgorithm::automatic, size, ranks.size(), costs, false);
  const double floor =
      ranks.size() > 1 ? costs.latency + static_cast<double>(size.elements * size.point_bytes) * costs.byte : 0;
  RankScan<T> scan(ranks);
  scan.run(ScanAlgorithm::chain, part);
  const std::vector<T> right = problem.states();
  nlohmann::json rows = nlohmann::json::array();
  for (const ScanAlgorithm algorithm : bench.algorithms.empty()
                                           ? std::vector(std::begin(all_algorithms), std::end(all_algorithms))
                                           : bench.algorithms) {
    if (!composes && (algorithm == ScanAlgorithm::doubling || algorithm == ScanAlgorithm::mpi)) continue;
    const ScanAlgorithm used = algorithm == ScanAlgorithm::automatic ? choice.algorithm : algorithm;
    std::int64_t sent = ranks.bytes_sent();
    const Timing time = time_runs(bench.runs, [&] {
      ranks.barrier();
      scan.run(used, part);
      ranks.barrier();
    });
    sent = (ranks.bytes_sent() - sent) / (bench.runs + 1);
    ranks.all_reduce(&sent, 1, Transport::Reduction::sum);
    double worst = 0, most = 0;
    const std::vector<T> got = problem.states();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double e = static_cast<double>(right[i]), d = std::abs(static_cast<double>(got[i]) - e);
      most = std::max(most, std::abs(e)), worst = d <= worst ? worst : d;
    }
    double difference[] = {worst / std::max(most, 1e-300)};
    ranks.all_reduce(difference, 1, Transport::Reduction::max);
    nlohmann::json row = time.json();
    row["name"] = "scan", row["algorithm"] = std::string(name_of(used)), row["maps"] = bench.maps;
    row["ranks"] = ranks.size(), row["device"] = device_name(), row["transport"] = ranks.name(),
    row["staged"] = staged(ranks);
    row["precision"] = sizeof(T) == 8 ? "f64" : "f32";
    row["elements"] = size.elements, row["n"] = part.maps.n, row["m"] = part.maps.m, row["segments"] = bench.segments;
    row["point_bytes"] = size.point_bytes, row["map_bytes"] = size.map_bytes;
    row["model_ms"] = 1e3 * predict(used, size, ranks.size(), costs), row["chosen_by_auto"] = used == choice.algorithm;
    row["floor_ms"] = 1e3 * floor, row["floor"] = "one message of all states";
    row["bytes"] = sent, row["difference_from_chain"] = difference[0];
    row["alpha_us"] = costs.latency * 1e6, row["beta_ns_per_byte"] = costs.byte * 1e9;
    row["apply_us"] = costs.apply * 1e6, row["compose_us"] = costs.compose * 1e6, row["launch_us"] = costs.launch * 1e6;
    rows.push_back(row);
  }
  if (ranks.rank() != 0) return;
  if (bench.json) {
    std::printf("%s\n", rows.dump(2).c_str());
    return;
  }
  std::printf("scan  %s maps, %lld elements, A %d x %d, b %d x %d%s, %s, %d rank%s (%s, %s)\n", bench.maps.c_str(),
              static_cast<long long>(size.elements), part.maps.n, part.maps.n, part.maps.n, part.maps.m,
              bench.segments > 1 ? (", " + std::to_string(bench.segments) + " maps per rank").c_str() : "",
              sizeof(T) == 8 ? "f64" : "f32", ranks.size(), ranks.size() == 1 ? "" : "s", ranks.name().c_str(),
              device_name().c_str());
  std::printf("alpha %.3g us, beta %.3g ns per byte, an apply %.3g us, a composition %.3g us, a launch %.3g us\n",
              costs.latency * 1e6, costs.byte * 1e9, costs.apply * 1e6, costs.compose * 1e6, costs.launch * 1e6);
  std::printf("%-10s %11s %10s %10s %10s %12s %11s\n", "algorithm", "median ms", "min ms", "max ms", "model ms",
              "bytes", "difference");
  for (const auto& row : rows)
    std::printf("%-10s %11.4g %10.4g %10.4g %10.4g %12lld %11.1e%s\n", row["algorithm"].get<std::string>().c_str(),
                row["median_ms"].get<double>(), row["min_ms"].get<double>(), row["max_ms"].get<double>(),
                row["model_ms"].get<double>(), row["bytes"].get<long long>(),
                row["difference_from_chain"].get<double>(), row["chosen_by_auto"].get<bool>() ? "  <- auto" : "");
  std::printf("auto: %s, %s\n", std::string(name_of(choice.algorithm)).c_str(), choice.reason.c_str());
}

}  // namespace

void bench_scan_options(CLI::App& app, BenchScan& b) {
  one_of(app, "--maps", b.maps, {"delta", "diagonal", "block", "dense"},
         "what is scanned: the delta rule's heads, or Newton's carries (default delta)");
  app.add_option("--heads", b.heads, "heads, H (delta)")->check(whole_number(1, most_int))->capture_default_str();
  app.add_option("--d-key", b.d_key, "key channels of a head, K (delta)")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option("--d-value", b.d_value, "value channels of a head, V (delta)")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option("--hidden", b.hidden, "channels, D (diagonal, block, dense)")
      ->check(whole_number(1, most_int))
      ->capture_default_str();
  app.add_option("--segments", b.segments, "maps per rank that must not be composed, as with --reproducible")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option_function<std::vector<std::string>>(
         "--scan",
         [&b](const std::vector<std::string>& words) {
           for (const std::string& word : words) b.algorithms.push_back(scans.parse("--scan", word));
         },
         "algorithms to time (default: all)")
      ->type_name(scans.text());
  choice(app, "--precision", b.precision, wide_precisions, "arithmetic (default f32)");
  one_of(app, "--transport", b.transport, {"auto", "mpi", "nccl"}, "what carries the messages");
  app.add_option("--runs", b.runs, "timed runs")->check(whole_number(1, most_int))->capture_default_str();
  app.add_flag("--json", b.json, "print one JSON array of rows on stdout");
  config_option(app);
  app.footer("Example:\n  mpirun -n 4 longscan bench scan --heads 16 --d-key 128 --d-value 128");
}

void run_bench_scan(Transport& ranks, const BenchScan& bench) {
  const bool delta = bench.maps == "delta";
  const double D = bench.hidden, width = bench.maps == "dense" ? D : 2;
  agree(ranks, [&] {
    require_memory(static_cast<double>(bench.segments) *
                       (delta ? state_bytes(bench.heads, bench.d_key, bench.d_value) / 2 : 4 * D * (width + 2)),
                   "maps of these sizes");
  });
  Carrier carrier(ranks, bench.transport);
  if (ranks.rank() == 0 && !carrier.note().empty())
    std::fprintf(stderr, "longscan: note: %s\n", carrier.note().c_str());
  if (bench.precision == Precision::f64)
    bench_in<double>(carrier.transport(), bench);
  else
    bench_in<float>(carrier.transport(), bench);
}

}  // namespace longscan
