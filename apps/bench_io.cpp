// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <vector>

#include "apps/bench.hpp"
#include "apps/generate_delta.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "apps/setup.hpp"
#include "io/posix_file.hpp"

namespace longscan {
namespace {

namespace fs = std::filesystem;

Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), static_cast<int>(seconds.size())};
}

/// Seconds of `f` on the slowest rank.
double seconds_of(Transport& ranks, const std::function<void()>& f) {
  ranks.barrier();
  const auto start = std::chrono::steady_clock::now();
  agree(ranks, f);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ranks.all_reduce(&seconds, 1, Transport::Reduction::max);
  return seconds;
}

/// As dd does it: this rank's share of the input read, as many bytes as the output has written, brought to disk.
void copy_raw(const Transport& ranks, const std::string& from, const std::string& to, std::int64_t written) {
  constexpr std::int64_t block = 8 << 20;
  const io::FileDescriptor in = io::open_file(from, O_RDONLY, "open"), out = io::open_file(to, O_WRONLY, "write");
  const TokenRange read = part_of(io::file_size(in, from), ranks.size(), ranks.rank());
  const TokenRange write = part_of(written, ranks.size(), ranks.rank());
  std::vector<char> buffer(block);
  std::int64_t at = write.begin;
  for (std::int64_t i = read.begin; i < read.end; i += block) {
    const std::int64_t n = std::min(block, read.end - i);
    io::read_all(in, buffer.data(), n, i, from);
    const double share = static_cast<double>(i + n - read.begin) / static_cast<double>(read.size());
    const std::int64_t end = write.begin + static_cast<std::int64_t>(share * static_cast<double>(write.size()));
    for (; at < end; at += std::min(block, end - at))
      io::write_all(out, buffer.data(), std::min(block, end - at), at, to);
  }
  io::sync_file(out, to);
}

/// The same tokens in the same windows, from memory to memory.
class MemorySolve {
 public:
  MemorySolve(Transport& ranks, const BenchIo& bench, std::int64_t window)
      : rule_(ranks, {bench.heads, bench.d_key, bench.d_value, false}, options(bench), Sequences{{0, bench.tokens}}),
        windows_(rule_.windows(window)) {
    std::int64_t longest = 0;
    for (const TokenRange& w : windows_) longest = std::max(longest, rule_.part(w).size());
    const auto array = [&](DeltaStream stream, int width) {
      Bytes device("longscan::bench", std::max<std::int64_t>(1, longest * bench.heads * width *
                                                                    static_cast<std::int64_t>(size_of(bench.type))));
      const auto host = Kokkos::create_mirror_view(device);
      fill_delta_array(stream, 1, 0, longest, bench.heads, width, bench.type, host.data());
      Kokkos::deep_copy(device, host);
      memory_.push_back(device);
      return TokenArray{device.data(), bench.type, static_cast<std::int64_t>(bench.heads) * width, width, 1};
    };
    in_.q = array(DeltaStream::q, bench.d_key), in_.k = array(DeltaStream::k, bench.d_key);
    in_.v = array(DeltaStream::v, bench.d_value), in_.beta = array(DeltaStream::beta, 1);
    const TokenArray o = array(DeltaStream::v, bench.d_value);
    out_.o = {const_cast<void*>(o.data), o.type, o.token_stride, o.head_stride};
  }
  void run() {
    for (const TokenRange& w : windows_) rule_.solve(w, in_, out_);
  }

 private:
  using Bytes = Kokkos::View<std::byte*, Kokkos::DefaultExecutionSpace::memory_space>;
  static DeltaOptions options(const BenchIo& bench) {
    DeltaOptions o;
    o.precision = arithmetic_of(Precision::automatic, bench.type);
    return o;
  }
  DeltaRule rule_;
  std::vector<TokenRange> windows_;
  std::vector<Bytes> memory_;
  DeltaInputs in_;
  DeltaOutputs out_;
};

/// Collective. What the solve would choose.
std::int64_t window_of(Transport& ranks, const DeltaCommand& solve) {
  std::optional<DeltaProblem> problem;
  agree(ranks, [&] { problem = find_problems(InputFile(solve.solve.input), solve).at(0); });
  const DeltaRule rule(ranks, problem->shape, options_of(solve, *problem), problem->sequences(), problem->counting());
  return choose_window(ranks, 0, needs_of(solve, *problem, rule, ranks.size()));
}

}  // namespace

void run_bench_io(Transport& ranks, const BenchIo& bench) {
  const std::string in = bench.folder + "/longscan-bench-in.h5", out = bench.folder + "/longscan-bench-out.h5",
                    raw = bench.folder + "/longscan-bench-raw";
  GenerateDelta make;
  make.output = in, make.tokens = bench.tokens, make.heads = bench.heads, make.d_key = bench.d_key;
  make.d_value = bench.d_value, make.type = bench.type, make.force = make.quiet = true;
  run_generate_delta(ranks, make);
  DeltaCommand solve;
  solve.solve.input = in, solve.solve.output = out, solve.solve.force = solve.solve.quiet = true;
  solve.solve.window = bench.window > 0 ? bench.window : window_of(ranks, solve);
  const std::int64_t written =
      bench.tokens * bench.heads * bench.d_value * static_cast<std::int64_t>(size_of(bench.type));

  MemorySolve memory(ranks, bench, solve.solve.window);
  std::vector<double> copies, solves, files;
  for (int i = 0; i <= bench.runs; ++i) {  // the first one warms up
    agree(ranks, [&] {
      if (ranks.rank() != 0) return;
      fs::remove(out);  // neither of the two gives the blocks of an earlier file back
      io::reserve(io::create_locked(raw, raw, ""), raw, written, 0);
    });
    const double copy = seconds_of(ranks, [&] { copy_raw(ranks, in, raw, written); });
    const double from_memory = seconds_of(ranks, [&] { memory.run(); });
    const double from_file = seconds_of(ranks, [&] { run_delta(ranks, solve); });
    if (i > 0) copies.push_back(copy), solves.push_back(from_memory), files.push_back(from_file);
  }
  ranks.barrier();
  std::int64_t read = 0;
  std::error_code ignored;
  if (ranks.rank() == 0) {
    read = static_cast<std::int64_t>(fs::file_size(in, ignored));
    for (const std::string& path : {in, out, raw}) fs::remove(path, ignored);
  }
  if (ranks.rank() != 0) return;

  const Timing copy = timing_of(copies), compute = timing_of(solves), whole = timing_of(files);
  const double floor = std::max(copy.median, compute.median);
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [name, time] :
       {std::pair<std::string, Timing>{"copy", copy}, {"solve", compute}, {"file to file", whole}}) {
    nlohmann::json row = time.json();
    row["name"] = name, row["floor_ms"] = name == "file to file" ? 1e3 * floor : row["median_ms"].get<double>();
    row["floor"] = "the slower of copy and solve";
    row["share_of_floor_rate"] = name == "file to file" ? floor / time.median : 1.0;
    row["bytes"] = read + written, row["bytes_per_second"] = static_cast<double>(read + written) / time.median;
    row["tokens"] = bench.tokens, row["window_tokens"] = solve.solve.window, row["ranks"] = ranks.size();
    row["device"] = device_name();
    rows.push_back(row);
  }
  if (bench.json) {
    std::printf("%s\n", rows.dump(2).c_str());
    return;
  }
  std::printf(
      "io  T = %lld, H = %d, K = %d, V = %d, %s; %.0f MB in, %.0f MB out, windows of %lld tokens per rank, %d rank%s\n",
      static_cast<long long>(bench.tokens), bench.heads, bench.d_key, bench.d_value,
      std::string(name_of(bench.type)).c_str(), static_cast<double>(read) / 1e6, static_cast<double>(written) / 1e6,
      static_cast<long long>(solve.solve.window), ranks.size(), ranks.size() == 1 ? "" : "s");
  for (const auto& row : rows)
    std::printf("  %-13s median %8.1f ms (%.1f to %.1f, %d runs), %5.0f MB/s\n", row["name"].get<std::string>().c_str(),
                row["median_ms"].get<double>(), row["min_ms"].get<double>(), row["max_ms"].get<double>(),
                row["runs"].get<int>(), row["bytes_per_second"].get<double>() / 1e6);
  std::printf("  file to file runs at %.0f %% of the slower of the other two\n", 100 * floor / whole.median);
}

}  // namespace longscan
