// SPDX-License-Identifier: Apache-2.0
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/bench.hpp"
#include "apps/generate_delta.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "core/delta_chunk.hpp"

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

}  // namespace

void run_bench_delta(Transport& ranks, const BenchDelta& bench) {
  DeltaShape shape{bench.heads, bench.d_key, bench.d_value, bench.decay == "channel"};
  DeltaOptions options;
  options.chunk = bench.chunk, options.reproducible = bench.reproducible;
  options.precision = bench.precision == Precision::automatic ? Precision::f32 : bench.precision;
  if (bench.decay != "none" && bench.decay != "head" && bench.decay != "channel")
    throw_unknown("value of --decay", bench.decay, {"none", "head", "channel"});
  const DType type = options.precision == Precision::f64    ? DType::f64
                     : options.precision == Precision::bf16 ? DType::bf16
                                                            : DType::f32;
  if (std::max({bench.d_key, bench.d_value, bench.chunk}) > 256 && ranks.rank() == 0 && !bench.json)
    std::printf("sizes above 256: the rate of OpenBLAS is not measured\n");
  DeltaRule rule(ranks, shape, options, Sequences{{0, bench.tokens}});
  const TokenRange window{0, bench.tokens}, part = rule.part(window);

  using Bytes = Kokkos::View<std::byte*, Kokkos::DefaultExecutionSpace::memory_space>;
  std::vector<Bytes> memory;
  const auto array = [&](DeltaStream stream, int width) {
    Bytes device("longscan::bench", std::max<std::int64_t>(1, part.size() * bench.heads * width *
                                                                  static_cast<std::int64_t>(size_of(type))));
    const auto host = Kokkos::create_mirror_view(device);
    fill_delta_array(stream, 1, part.begin, part.size(), bench.heads, width, type, host.data());
    Kokkos::deep_copy(device, host);
    memory.push_back(device);
    return TokenArray{device.data(), type, static_cast<std::int64_t>(bench.heads) * width, width, 1};
  };
  DeltaInputs in;
  in.q = array(DeltaStream::q, bench.d_key), in.k = array(DeltaStream::k, bench.d_key);
  in.v = array(DeltaStream::v, bench.d_value), in.beta = array(DeltaStream::beta, 1);
  if (bench.decay != "none") in.log_decay = array(DeltaStream::log_decay, bench.decay == "head" ? 1 : bench.d_key);
  const TokenArray o = array(DeltaStream::v, bench.d_value);
  DeltaOutputs out;
  out.o = {const_cast<void*>(o.data), o.type, o.token_stride, o.head_stride};

  DeltaReport report;
  const Timing time = time_runs(bench.runs, [&] {
    ranks.barrier();
    report = rule.solve(window, in, out);
    ranks.barrier();
  });
  const ChunkProducts products(bench.chunk, bench.d_key, bench.d_value);
  const double flops = products.flops() * static_cast<double>(bench.tokens) / bench.chunk * bench.heads;
  const double rate = flops / time.median / 1e9 / ranks.size();
  const bool compare = std::max({bench.d_key, bench.d_value, bench.chunk}) <= 256;
  const double blas = !compare                          ? 0
                      : sizeof(double) == size_of(type) ? blas_rate<double>(products, bench.runs)
                                                        : blas_rate<float>(products, bench.runs);
  const double bytes = static_cast<double>(bench.tokens) * bench.heads * (2.0 * bench.d_key + 2.0 * bench.d_value + 1) *
                       static_cast<double>(size_of(type));
  if (ranks.rank() != 0) return;

  nlohmann::json row = time.json();
  row["name"] = "delta";
  row["tokens"] = bench.tokens, row["heads"] = bench.heads, row["d_key"] = bench.d_key, row["d_value"] = bench.d_value;
  row["chunk"] = bench.chunk, row["decay"] = bench.decay, row["precision"] = std::string(name_of(options.precision));
  row["reproducible"] = bench.reproducible;
  row["ranks"] = ranks.size(), row["device"] = device_name();
  row["floor_ms"] = compare ? 1e3 * flops / (blas * 1e9) / ranks.size() : 0;
  row["floor"] = "the matrix products at OpenBLAS's rate";
  row["ns_per_token_head"] = time.median * 1e9 / static_cast<double>(bench.tokens) / bench.heads;
  row["gflops_per_rank"] = rate, row["openblas_gflops"] = blas, row["rate_over_openblas"] = compare ? rate / blas : 0;
  row["bytes"] = bytes, row["boundaries_forgotten"] = report.boundaries_forgotten,
  row["map_tokens"] = report.map_tokens;
  if (bench.json) {
    std::printf("%s\n", nlohmann::json::array({row}).dump(2).c_str());
    return;
  }
  std::printf("delta  T = %lld, H = %d, K = %d, V = %d, C = %d, decay %s, %s%s, %d rank%s (%s)\n",
              static_cast<long long>(bench.tokens), bench.heads, bench.d_key, bench.d_value, bench.chunk,
              bench.decay.c_str(), std::string(name_of(options.precision)).c_str(),
              bench.reproducible ? ", reproducible" : "", ranks.size(), ranks.size() == 1 ? "" : "s",
              device_name().c_str());
  std::printf("  median %.2f ms (%.2f to %.2f, %d runs), %.1f ns a token and head\n", time.median * 1e3,
              time.least * 1e3, time.most * 1e3, time.runs, row["ns_per_token_head"].get<double>());
  std::printf("  %.1f GFLOP/s a rank in the matrix products", rate);
  if (compare) std::printf("; OpenBLAS on the same products %.1f, so %.0f %%", blas, 100 * rate / blas);
  std::printf("\n");
}

}  // namespace longscan
