// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/resource.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "apps/bench.hpp"
#include "apps/generate_delta.hpp"
#include "apps/generate_newton.hpp"
#include "apps/newton_problem.hpp"
#include "apps/options.hpp"
#include "apps/report.hpp"
#include "apps/setup.hpp"
#include "core/portable.hpp"
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

/// Processor seconds of this process so far.
double processor_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// As dd does it: this rank's share of the input read, as many bytes as the output has written, brought to disk.
/// `buffer` is kept from copy to copy, as dd keeps its own.
void copy_raw(const Transport& ranks, const std::string& from, const std::string& to, std::int64_t written,
              std::vector<char>& buffer) {
  const auto block = static_cast<std::int64_t>(buffer.size());
  const io::FileDescriptor in = io::open_file(from, O_RDONLY, "open"), out = io::open_file(to, O_WRONLY, "write");
  const TokenRange read = part_of(io::file_size(in, from), ranks.size(), ranks.rank());
  const TokenRange write = part_of(written, ranks.size(), ranks.rank());
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

using Bytes = Kokkos::View<std::byte*, Kokkos::DefaultExecutionSpace::memory_space>;

template <class Solver>
std::int64_t longest_part(const Solver& solver, const std::vector<TokenRange>& windows) {
  std::int64_t longest = 1;
  for (const TokenRange& w : windows) longest = std::max(longest, solver.part(w).size());
  return longest;
}

/// What is timed: the files, the solve from file to file, and the same tokens in the same windows from memory to
/// memory.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual std::int64_t written() const = 0;  ///< bytes of outputs a token
  virtual std::string text() const = 0;
  /// Collective. The file to read; the window that a solve of it would choose.
  virtual std::int64_t generate(const std::string& in) = 0;
  virtual void prepare(std::int64_t window) = 0;
  virtual void from_memory() = 0;
  virtual void from_file(const std::string& in, const std::string& out, std::int64_t window) = 0;
};

class DeltaSubject final : public Subject {
 public:
  DeltaSubject(Transport& ranks, const BenchIo& bench) : ranks_(ranks), bench_(bench) {}
  std::int64_t written() const override {
    return static_cast<std::int64_t>(bench_.heads) * bench_.d_value * static_cast<std::int64_t>(size_of(bench_.type));
  }
  std::string text() const override {
    return "H = " + std::to_string(bench_.heads) + ", K = " + std::to_string(bench_.d_key) +
           ", V = " + std::to_string(bench_.d_value);
  }
  std::int64_t generate(const std::string& in) override {
    GenerateDelta make;
    make.output = in, make.tokens = bench_.tokens, make.heads = bench_.heads, make.d_key = bench_.d_key;
    make.d_value = bench_.d_value, make.type = bench_.type, make.force = make.quiet = true;
    run_generate_delta(ranks_, make);
    DeltaCommand solve;
    std::optional<DeltaProblem> problem;
    agree(ranks_, [&] { problem = find_problems(InputFile(in), solve).at(0); });
    const DeltaRule rule(ranks_, problem->shape, options_of(solve, *problem), problem->sequences(),
                         problem->counting());
    return choose_window(ranks_, 0, needs_of(solve, *problem, rule, ranks_.size()));
  }
  void prepare(std::int64_t window) override {
    DeltaOptions options;
    options.precision = arithmetic_of(Precision::automatic, bench_.type);
    rule_.emplace(ranks_, DeltaShape{bench_.heads, bench_.d_key, bench_.d_value, false}, options,
                  Sequences{{0, bench_.tokens}});
    windows_ = rule_->windows(window);
    const std::int64_t longest = longest_part(*rule_, windows_);
    const auto array = [&](DeltaStream stream, int width) {
      Bytes device("longscan::bench", longest * bench_.heads * width * static_cast<std::int64_t>(size_of(bench_.type)));
      const auto host = Kokkos::create_mirror_view(device);
      fill_delta_array(stream, 1, 0, longest, bench_.heads, width, bench_.type, host.data());
      Kokkos::deep_copy(device, host);
      memory_.push_back(device);
      return TokenArray{device.data(), bench_.type, static_cast<std::int64_t>(bench_.heads) * width, width, 1};
    };
    in_.q = array(DeltaStream::q, bench_.d_key), in_.k = array(DeltaStream::k, bench_.d_key);
    in_.v = array(DeltaStream::v, bench_.d_value), in_.beta = array(DeltaStream::beta, 1);
    const TokenArray o = array(DeltaStream::v, bench_.d_value);
    out_.o = {const_cast<void*>(o.data), o.type, o.token_stride, o.head_stride};
  }
  void from_memory() override {
    for (const TokenRange& w : windows_) rule_->solve(w, in_, out_);
  }
  void from_file(const std::string& in, const std::string& out, std::int64_t window) override {
    DeltaCommand solve;
    solve.solve.input = in, solve.solve.output = out, solve.solve.window = window;
    solve.solve.force = solve.solve.quiet = true;
    run_delta(ranks_, solve);
  }

 private:
  Transport& ranks_;
  const BenchIo& bench_;
  std::optional<DeltaRule> rule_;
  std::vector<TokenRange> windows_;
  std::vector<Bytes> memory_;
  DeltaInputs in_;
  DeltaOutputs out_;
};

class NewtonSubject final : public Subject {
 public:
  NewtonSubject(Transport& ranks, const BenchIo& bench)
      : ranks_(ranks), bench_(bench), cell_{bench.cell, bench.hidden, bench.inputs, 1, false, bench.recurrent_scale} {
    check(cell_);
    if (bench.type != DType::f32 && bench.type != DType::f64)
      throw Error(ExitCode::usage, "--dtype " + std::string(name_of(bench.type)) +
                                       " is for the delta rule; with --cell give f32 or f64");
    state_ = bench.cell == "lstm" || bench.cell == "paralstm" ? 2 : 1;
  }
  std::int64_t written() const override {
    return static_cast<std::int64_t>(state_) * bench_.hidden * static_cast<std::int64_t>(size_of(bench_.type));
  }
  std::string text() const override {
    return bench_.cell + ", D = " + std::to_string(bench_.hidden) + ", D_in = " + std::to_string(bench_.inputs);
  }
  std::int64_t generate(const std::string& in) override {
    GenerateNewton make;
    make.output = in, make.tokens = bench_.tokens, make.cell = bench_.cell, make.hidden = bench_.hidden;
    make.inputs = bench_.inputs, make.recurrent_scale = bench_.recurrent_scale, make.type = bench_.type;
    make.force = make.quiet = true;
    run_generate_newton(ranks_, make);
    NewtonCommand solve;
    std::optional<NewtonProblem> problem;
    agree(ranks_, [&] {
      const InputFile file(in);
      problem = find_newton_problems(file, solve, shape_of(read_cell(file, ""))).at(0);
    });
    const auto solver = make_solver();
    return choose_window(ranks_, 0, needs_of(solve, *problem, *solver, arithmetic(), ranks_.size()));
  }
  void prepare(std::int64_t window) override {
    solver_ = make_solver();
    windows_ = solver_->windows(window);
    const std::int64_t longest = longest_part(*solver_, windows_);
    const auto bytes = static_cast<std::int64_t>(size_of(bench_.type));
    x_.resize(longest * bench_.inputs * bytes), h_.resize(longest * bench_.hidden * bytes);
    c_.resize(state_ > 1 ? h_.size() : 0);
    fill_normal(1, synthetic_x, 1, 0, longest * bench_.inputs, bench_.type, x_.data());
  }
  void from_memory() override {
    NewtonData data;
    data.x = x_.data(), data.x_type = bench_.type, data.h = h_.data(), data.c = c_.empty() ? nullptr : c_.data();
    for (const TokenRange& w : windows_) solver_->solve(w, data);
  }
  void from_file(const std::string& in, const std::string& out, std::int64_t window) override {
    NewtonCommand solve;
    solve.solve.input = in, solve.solve.output = out, solve.solve.window = window;
    solve.solve.force = solve.solve.quiet = true;
    run_newton(ranks_, solve);
  }

 private:
  Precision arithmetic() const { return bench_.type == DType::f64 ? Precision::f64 : Precision::f32; }
  std::unique_ptr<Newton> make_solver() const {
    NewtonOptions options;
    options.precision = arithmetic();
    return std::make_unique<Newton>(ranks_, synthetic_weights(cell_, 1, bench_.type), bench_.inputs, options,
                                    Sequences{{0, bench_.tokens}});
  }
  Transport& ranks_;
  const BenchIo& bench_;
  SyntheticCell cell_;
  int state_ = 1;
  std::unique_ptr<Newton> solver_;
  std::vector<TokenRange> windows_;
  std::vector<std::byte> x_, h_, c_;
};

/// Removes files at its end, however that comes.
struct Removed {
  std::vector<std::string> paths;
  ~Removed() {
    std::error_code ignored;
    for (const std::string& path : paths) fs::remove(path, ignored);
  }
};

}  // namespace

void run_bench_io(Transport& ranks, const BenchIo& bench) {
  const std::string in = bench.folder + "/longscan-bench-in.h5", out = bench.folder + "/longscan-bench-out.h5",
                    raw = bench.folder + "/longscan-bench-raw";
  std::unique_ptr<Removed> removed;
  if (ranks.rank() == 0) removed.reset(new Removed{{in, out, out + ".part", raw}});
  std::unique_ptr<Subject> subject;
  if (bench.cell.empty())
    subject = std::make_unique<DeltaSubject>(ranks, bench);
  else
    subject = std::make_unique<NewtonSubject>(ranks, bench);
  const std::int64_t chosen = subject->generate(in), window = bench.window > 0 ? bench.window : chosen;
  const std::int64_t written = bench.tokens * subject->written();
  subject->prepare(window);
  std::vector<char> buffer(8 << 20);
  std::vector<double> copies, solves, files, copying;  // the last: processor seconds of a rank
  for (int i = 0; i <= bench.runs; ++i) {              // the first one warms up
    agree(ranks, [&] {
      if (ranks.rank() != 0) return;
      fs::remove(out);  // neither of the two gives the blocks of an earlier file back
      io::reserve(io::create_locked(raw, raw, ""), raw, written, 0);
    });
    double busy = 0;
    const double copy = seconds_of(ranks, [&] {
      const double before = processor_seconds();
      copy_raw(ranks, in, raw, written, buffer);
      busy = processor_seconds() - before;
    });
    ranks.all_reduce(&busy, 1, Transport::Reduction::max);
    const double from_memory = seconds_of(ranks, [&] { subject->from_memory(); });
    const double from_file = seconds_of(ranks, [&] { subject->from_file(in, out, window); });
    if (i > 0)
      copies.push_back(copy), solves.push_back(from_memory), files.push_back(from_file), copying.push_back(busy);
  }
  ranks.barrier();
  std::int64_t read = 0;
  std::error_code ignored;
  if (ranks.rank() == 0) {
    read = static_cast<std::int64_t>(fs::file_size(in, ignored));
    removed.reset();
  }
  if (ranks.rank() != 0) return;

  const Timing copy = timing_of(copies), compute = timing_of(solves), whole = timing_of(files);
  const double floor = std::max(copy.median, compute.median), busy = timing_of(copying).median;
  // with a rank on every core copying takes its share of them
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const bool shared = is_host_space<Kokkos::DefaultExecutionSpace> && cores > 0 && ranks.local_size() >= cores;
  const double least = shared ? std::max(floor, compute.median + busy * ranks.local_size() / cores) : floor;
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [name, time] :
       {std::pair<std::string, Timing>{"copy", copy}, {"solve", compute}, {"file to file", whole}}) {
    nlohmann::json row = time.json();
    row["name"] = name, row["solver"] = bench.cell.empty() ? "delta" : "newton";
    row["floor_ms"] = name == "file to file" ? 1e3 * floor : row["median_ms"].get<double>();
    row["floor"] = "the slower of copy and solve";
    if (name == "copy") row["processor_ms"] = 1e3 * busy;
    if (name == "file to file") row["share_of_what_can_be_had"] = least / time.median;
    row["share_of_floor_rate"] = name == "file to file" ? floor / time.median : 1.0;
    row["bytes"] = read + written, row["bytes_per_second"] = static_cast<double>(read + written) / time.median;
    row["tokens"] = bench.tokens, row["window_tokens"] = window, row["ranks"] = ranks.size();
    row["device"] = device_name();
    rows.push_back(row);
  }
  if (bench.json) {
    std::printf("%s\n", rows.dump(2).c_str());
    return;
  }
  std::printf("io  T = %lld, %s, %s; %.0f MB in, %.0f MB out, windows of %lld tokens per rank, %d rank%s\n",
              static_cast<long long>(bench.tokens), subject->text().c_str(), std::string(name_of(bench.type)).c_str(),
              static_cast<double>(read) / 1e6, static_cast<double>(written) / 1e6, static_cast<long long>(window),
              ranks.size(), ranks.size() == 1 ? "" : "s");
  for (const auto& row : rows)
    std::printf("  %-13s median %8.1f ms (%.1f to %.1f, %d runs), %5.0f MB/s\n", row["name"].get<std::string>().c_str(),
                row["median_ms"].get<double>(), row["min_ms"].get<double>(), row["max_ms"].get<double>(),
                row["runs"].get<int>(), row["bytes_per_second"].get<double>() / 1e6);
  std::printf("  file to file runs at %.0f %% of the slower of the other two\n", 100 * floor / whole.median);
  if (shared)
    std::printf(
        "  every core has a rank: copying takes %.1f ms of each, so that %.0f %% can be had; of that it is %.0f %%\n",
        1e3 * busy, 100 * floor / least, 100 * least / whole.median);
}

}  // namespace longscan
