// SPDX-License-Identifier: Apache-2.0
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/bench.hpp"
#include "apps/carrier.hpp"
#include "apps/generate_delta.hpp"
#include "apps/memory.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "apps/trace.hpp"
#include "core/delta_chunk.hpp"
#include "core/device_memory.hpp"

namespace longscan {
namespace {

/// Multiply-adds, times two, of the matrix products of one chunk and head: the triangular ones in blocks of 16 rows.
struct ChunkProducts {
  struct Shape {
    int m, n, k;
  };
  std::vector<Shape> shapes;
  double flops() const {
    double sum = 0;
    for (const Shape& s : shapes) sum += 2.0 * s.m * s.n * s.k;
    return sum;
  }
  ChunkProducts(int C, int K, int V) {
    const int rows = (C + delta_block - 1) / delta_block * delta_block;
    for (int i = 0; i < rows; i += delta_block) {
      shapes.push_back({delta_block, i + delta_block, K});  // A
      shapes.push_back({delta_block, i + delta_block, K});  // P
      if (i > 0) shapes.push_back({delta_block, V, i});     // substitution
      shapes.push_back({delta_block, V, i + delta_block});  // P X
    }
    shapes.push_back({rows, V, K});  // A^ S
    shapes.push_back({rows, V, K});  // Q^ S
    shapes.push_back({K, V, rows});  // X^T K
  }
};

/// OpenBLAS's rate on the same products, on one thread, GFLOP/s.
template <class T>
double blas_rate(const ChunkProducts& products, int runs) {
  std::vector<T> a(1 << 16), b(1 << 16), c(1 << 17);
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] = static_cast<T>(0.01 * (i % 97)), b[i] = static_cast<T>(0.02 * (i % 89));
  const auto one = [&] {
    for (const auto& s : products.shapes) {
      if constexpr (sizeof(T) == 8)
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, s.m, s.n, s.k, 1, a.data(), s.k, b.data(), s.n, 1,
                    c.data(), s.n);
      else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, s.m, s.n, s.k, 1, a.data(), s.k, b.data(), s.n, 1,
                    c.data(), s.n);
    }
  };
  constexpr int repeats = 50;
  const Timing t = time_runs(runs, [&] {
    for (int i = 0; i < repeats; ++i) one();
  });
  return products.flops() * repeats / t.median / 1e9;
}

/// A dense array [tokens, heads, width] of `stream`, one vector a work item; channels from `dimensions` on are zero.
struct Fill {
  DeltaStream stream;
  std::int64_t first;  ///< vector
  int width, dimensions;
  DType type;
  void* out;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::uint64_t at = static_cast<std::uint64_t>((first + i) * width);
    double squares = 0;
    for (int j = 0; j < dimensions; ++j) {
      const double x = delta_value(stream, 1, at + j);
      squares += x * x;
    }
    const bool unit = stream == DeltaStream::q || stream == DeltaStream::k;
    const double factor = unit ? 1 / sqrt(squares) : 1;
    for (int j = 0; j < width; ++j)
      store(out, type, i * width + j, j < dimensions ? delta_value(stream, 1, at + j) * factor : 0.0);
  }
};

/// Sums of (got - exact)² and exact² over the tokens of one head.
struct Compare {
  MutableTokenArray got, exact;
  int width;
  int part;  ///< 0: differences, 1: exact values
  KOKKOS_FUNCTION void operator()(std::int64_t i, double& sum) const {
    const std::int64_t t = i / width, j = i % width;
    const double e = load<double>(exact.data, exact.type, t * exact.token_stride + j);
    const double x = part == 1 ? e : load<double>(got.data, got.type, t * got.token_stride + j) - e;
    sum += x * x;
  }
};

/// One set of inputs and outputs of a rank.
class BenchArrays {
 public:
  BenchArrays(const BenchDelta& bench, TokenRange part, DType type) : bench_(bench), part_(part), type_(type) {
    in.q = filled(DeltaStream::q, bench.d_key, bench.d_key);
    in.k = filled(DeltaStream::k, bench.d_key, bench.key_dimensions > 0 ? bench.key_dimensions : bench.d_key);
    in.v = filled(DeltaStream::v, bench.d_value, bench.d_value), in.beta = filled(DeltaStream::beta, 1, 1);
    const int decays = bench.decay == "head" ? 1 : bench.d_key;
    if (bench.decay != "none") in.log_decay = filled(DeltaStream::log_decay, decays, decays);
    out.o = room(bench.d_value, type);
  }
  MutableTokenArray room(int width, DType type) {
    const std::int64_t bytes = part_.size() * bench_.heads * width * static_cast<std::int64_t>(size_of(type));
    memory_.emplace_back(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string("longscan::bench")),
                         std::max<std::int64_t>(1, bytes));
    return {memory_.back().data(), type, static_cast<std::int64_t>(bench_.heads) * width, width};
  }
  DeltaInputs in;
  DeltaOutputs out;

 private:
  TokenArray filled(DeltaStream stream, int width, int dimensions) {
    const MutableTokenArray x = room(width, type_);
    using Space = Kokkos::DefaultExecutionSpace;
    Kokkos::parallel_for("longscan::bench::fill",
                         Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(0, part_.size() * bench_.heads),
                         Fill{stream, part_.begin * bench_.heads, width, dimensions, type_, x.data});
    return {x.data, x.type, x.token_stride, x.head_stride, 1};
  }
  const BenchDelta& bench_;
  TokenRange part_;
  DType type_;
  std::vector<DeviceArray<std::byte>> memory_;
};

/// A head's own array.
template <class Array>
Array head_of(Array x, int head) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(x.data)>>, const std::byte, std::byte>;
  if (x.data) x.data = static_cast<Byte*>(x.data) + head * x.head_stride * static_cast<std::int64_t>(size_of(x.type));
  return x;
}

/// Relative RMS difference of the last head's outputs from float64 arithmetic on the same inputs.
double error_of(Transport& ranks, const BenchDelta& bench, BenchArrays& arrays, TokenRange window, TokenRange part) {
  BenchDelta one = bench;
  one.heads = 1;
  DeltaOptions options;
  options.precision = Precision::f64;
  DeltaRule rule(ranks, DeltaShape{1, bench.d_key, bench.d_value, bench.decay == "channel"}, options,
                 Sequences{{0, bench.tokens}});
  DeltaOutputs exact;
  const DeviceArray<double> memory(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string("longscan::bench")),
                                   std::max<std::int64_t>(1, part.size() * bench.d_value));
  exact.o = {memory.data(), DType::f64, bench.d_value, bench.d_value};
  DeltaInputs in = arrays.in;
  for (TokenArray* x : {&in.q, &in.k, &in.v, &in.beta, &in.log_decay}) *x = head_of(*x, bench.heads - 1);
  rule.solve(window, in, exact);
  const MutableTokenArray got = head_of(arrays.out.o, bench.heads - 1);
  double sums[2] = {0, 0};
  for (int i = 0; i < 2; ++i)
    Kokkos::parallel_reduce("longscan::bench::compare",
                            Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(
                                0, part.size() * bench.d_value),
                            Compare{got, exact.o, bench.d_value, i}, sums[i]);
  ranks.all_reduce(sums, 2, Transport::Reduction::sum);
  return std::sqrt(sums[0] / sums[1]);
}

}  // namespace

void run_bench_delta(Transport& all_ranks, const BenchDelta& bench) {
  Carrier carrier(all_ranks, bench.transport);
  Transport& ranks = carrier.transport();
  using Space = Kokkos::DefaultExecutionSpace;
  DeltaShape shape{bench.heads, bench.d_key, bench.d_value, bench.decay == "channel"};
  DeltaOptions options;
  options.chunk = bench.chunk, options.reproducible = bench.reproducible, options.scan = bench.scan;
  options.precision = bench.precision == Precision::automatic ? Precision::f32 : bench.precision;
  if (bench.key_dimensions > bench.d_key)
    throw Error(ExitCode::usage, "--key-dimensions is " + std::to_string(bench.key_dimensions) +
                                     "; keys have --d-key " + std::to_string(bench.d_key));
  const DType type = bench.dtype                            ? *bench.dtype
                     : options.precision == Precision::f64  ? DType::f64
                     : options.precision == Precision::bf16 ? DType::bf16
                                                            : DType::f32;
  const bool on_host = is_host_space<Space>;
  const bool blas_too = on_host && std::max({bench.d_key, bench.d_value, bench.chunk}) <= 256;
  const double per_token = static_cast<double>(bench.heads) * static_cast<double>(size_of(type)) *
                           (2.0 * bench.d_key + 2.0 * bench.d_value + 1 +
                            (bench.decay == "none"   ? 0
                             : bench.decay == "head" ? 1
                                                     : bench.d_key));
  const double bytes = static_cast<double>(bench.tokens) * per_token;
  agree(ranks, [&] {
    require_memory(bytes / ranks.size() + state_bytes(bench.heads, bench.d_key, bench.d_value),
                   "inputs, outputs and states of these sizes");
  });
  DeltaRule rule(ranks, shape, options, Sequences{{0, bench.tokens}});
  const TokenRange window{0, bench.tokens}, part = rule.part(window);

  // inputs in turn, so that no run finds its own in the caches
  constexpr double caches = 256e6;
  const double here = std::max(1.0, static_cast<double>(part.size()) * per_token);
  const int sets = on_host ? 1 : static_cast<int>(std::clamp(std::ceil(caches / here), 1.0, 8.0));
  std::vector<std::unique_ptr<BenchArrays>> arrays;
  for (int i = 0; i < sets; ++i) arrays.push_back(std::make_unique<BenchArrays>(bench, part, type));
  Kokkos::fence();

  std::vector<DeltaReport> reports;
  int turn = 0;
  const Timing time = time_runs(bench.runs, [&] {
    const BenchArrays& a = *arrays[turn++ % sets];
    ranks.barrier();
    reports.push_back(rule.solve(window, a.in, a.out));
    ranks.barrier();
  });
  const DeltaReport& report = reports.back();
  const double error = bench.check ? error_of(ranks, bench, *arrays.front(), window, part) : 0;
  std::vector<double> scans;
  for (const Trace& trace : gather_traces(ranks, reports)) scans.push_back(exchange_seconds(trace));
  std::nth_element(scans.begin(), scans.begin() + scans.size() / 2, scans.end());
  const double scan = scans[scans.size() / 2];
  double waiting = report.seconds_scan;  // of the last run
  ranks.all_reduce(&waiting, 1, Transport::Reduction::max);
  const ChunkProducts products(bench.chunk, bench.d_key, bench.d_value);
  const double flops = products.flops() * static_cast<double>(bench.tokens) / bench.chunk * bench.heads;
  const double rate = flops / time.median / 1e9 / ranks.size();
  const double blas = !blas_too                         ? 0
                      : sizeof(double) == size_of(type) ? blas_rate<double>(products, bench.runs)
                                                        : blas_rate<float>(products, bench.runs);
  arrays.clear();
  const double copy = on_host ? 0 : copy_rate();
  if (ranks.rank() != 0) return;

  const double floor = on_host ? (blas_too ? flops / (blas * 1e9) / ranks.size() : 0) : bytes / copy / ranks.size();
  const std::string kernel = report.tensor_tasks == 0 ? "general" : report.general_tasks == 0 ? "tensor cores" : "both";
  nlohmann::json row = time.json();
  row["name"] = "delta";
  row["tokens"] = bench.tokens, row["heads"] = bench.heads, row["d_key"] = bench.d_key, row["d_value"] = bench.d_value;
  row["chunk"] = bench.chunk, row["decay"] = bench.decay, row["precision"] = std::string(name_of(options.precision));
  row["dtype"] = std::string(name_of(type)), row["key_dimensions"] = bench.key_dimensions;
  row["reproducible"] = bench.reproducible, row["kernel"] = kernel, row["segments"] = report.segments;
  row["ranks"] = ranks.size(), row["device"] = device_name();
  row["floor_ms"] = 1e3 * floor;
  row["floor"] = on_host ? "the matrix products at OpenBLAS's rate" : "inputs and outputs once at the rate of a copy";
  row["ns_per_token_head"] = time.median * 1e9 / static_cast<double>(bench.tokens) / bench.heads;
  row["gflops_per_rank"] = rate, row["openblas_gflops"] = blas, row["rate_over_openblas"] = blas_too ? rate / blas : 0;
  row["bytes"] = bytes, row["gb_per_second"] = bytes / time.median / 1e9, row["copy_gb_per_second"] = copy / 1e9;
  row["horizon_max"] = report.horizon_max, row["boundaries_forgotten"] = report.boundaries_forgotten;
  row["map_tokens"] = report.map_tokens, row["horizons_remembered"] = report.horizons_remembered;
  if (bench.check) row["error"] = error;
  row["scan"] = std::string(name_of(report.scan.algorithm)), row["transport"] = ranks.name();
  row["scan_ms"] = 1e3 * scan, row["scan_share"] = scan / time.median, row["scan_and_waiting_ms"] = 1e3 * waiting;
  row["staged"] = staged(ranks);
  if (bench.json) {
    std::printf("%s\n", nlohmann::json::array({row}).dump(2).c_str());
    return;
  }
  std::printf(
      "delta  T = %lld, H = %d, K = %d, V = %d, C = %d, decay %s, %s of %s%s%s, %d rank%s (%s)\n",
      static_cast<long long>(bench.tokens), bench.heads, bench.d_key, bench.d_value, bench.chunk, bench.decay.c_str(),
      std::string(name_of(options.precision)).c_str(), std::string(name_of(type)).c_str(),
      bench.key_dimensions > 0 ? (", keys in " + std::to_string(bench.key_dimensions) + " dimensions").c_str() : "",
      bench.reproducible ? ", reproducible" : "", ranks.size(), ranks.size() == 1 ? "" : "s", device_name().c_str());
  std::printf("  median %.3f ms (%.3f to %.3f, %d runs), %.2f ns per token and head; %s kernels, %lld segments\n",
              time.median * 1e3, time.least * 1e3, time.most * 1e3, time.runs, row["ns_per_token_head"].get<double>(),
              kernel.c_str(), static_cast<long long>(report.segments));
  if (on_host) {
    std::printf("  %.1f GFLOP/s per rank in the matrix products", rate);
    if (blas_too) std::printf("; OpenBLAS on the same products %.1f, so %.0f %%", blas, 100 * rate / blas);
    std::printf("\n");
  } else {
    std::printf("  floor %.3f ms (a copy moves %.0f GB/s), %.2f times that; %.0f GB/s, %.1f TFLOP/s; maps of %.1f %%\n",
                1e3 * floor, copy / 1e9, time.median / floor, bytes / time.median / 1e9, rate / 1e3,
                100.0 * static_cast<double>(report.map_tokens) / static_cast<double>(bench.tokens) / bench.heads);
  }
  if (ranks.size() > 1)
    std::printf(
        "  scan by %s over %s%s %.3f ms from the last rank's being ready, %.1f %% of the time; %.3f with waiting\n",
        std::string(name_of(report.scan.algorithm)).c_str(), ranks.name().c_str(), staged(ranks) ? ", staged" : "",
        1e3 * scan, 100 * scan / time.median, 1e3 * waiting);
  if (bench.check) std::printf("  error of the last head's outputs against float64 arithmetic: %.3e (RMS)\n", error);
}

}  // namespace longscan
