// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "apps/carrier.hpp"
#include "apps/memory.hpp"
#include "apps/newton_problem.hpp"
#include "apps/output.hpp"
#include "apps/progress.hpp"
#include "apps/report.hpp"
#include "apps/stopwatch.hpp"
#include "apps/window.hpp"
#include "core/device_memory.hpp"
#include "core/dtype.hpp"
#include "local/check_inputs.hpp"

namespace longscan {
namespace {

std::string text_of(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

std::vector<std::string> state_names(const NetworkShape& network) {
  return network.state > 1 ? std::vector<std::string>{"h", "c"} : std::vector<std::string>{"h"};
}

DType output_type(const NewtonProblem& problem, const NewtonCommand& command) {
  return command.solve.output_type.value_or(problem.type());
}

std::vector<OutputDataset> newton_outputs(const std::vector<NewtonProblem>& problems, const NewtonCommand& command,
                                          const NetworkShape& network, DType state) {
  std::vector<OutputDataset> datasets;
  const std::int64_t D = network.channels, L = network.layers * network.directions;
  for (const NewtonProblem& problem : problems)
    for (const Source& source : problem.sources)
      for (const std::string& name : state_names(network)) {
        auto shape = source.data.at("x").shape;
        shape.back() = network.directions * D;
        datasets.push_back({dataset_path(source.group, name), shape, output_type(problem, command)});
        datasets.push_back(
            {dataset_path(source.group, name + "_final"),
             problem.many() ? std::vector<std::int64_t>{L, source.sequences(), D} : std::vector<std::int64_t>{L, D},
             state});
      }
  return datasets;
}

/// One problem, window by window.
class NewtonSolve {
 public:
  NewtonSolve(Transport& ranks, const NewtonCommand& command, const NewtonProblem& problem, const CellSource& cell,
              const InputFile& file, SharedOutput& out, Progress& progress, Seconds& seconds, Precision arithmetic)
      : ranks_(ranks),
        command_(command),
        problem_(problem),
        file_(file),
        out_(out),
        progress_(progress),
        seconds_(seconds),
        state_(state_type_of(arithmetic)),
        solver_(ranks, cell.weights, problem.inputs, options_of(command, arithmetic), problem.sequences()) {}

  void run(std::int64_t done_before) {
    const std::int64_t all = (problem_.tokens() + ranks_.size() - 1) / ranks_.size();
    const NetworkShape& network = solver_.shape();
    const std::int64_t element = static_cast<std::int64_t>(size_of(state_));
    const std::int64_t outputs = network.state * network.directions * network.channels;
    const std::int64_t token =
        problem_.inputs * static_cast<std::int64_t>(size_of(problem_.type())) +
        outputs * (element + static_cast<std::int64_t>(size_of(output_type(problem_, command_))));
    // layers that run backwards need every token at once
    const std::int64_t least = network.directions > 1 ? all : 1024;
    const std::int64_t tokens = choose_window(ranks_, command_.solve.window, all, least,
                                              [&](std::int64_t n) { return n * token + solver_.workspace_bytes(n); });
    if (network.directions > 1 && tokens < all && command_.solve.window > 0)
      progress_.say(
          "note: the cell runs in both directions, so --window is set aside and all tokens are kept in memory");
    for (const TokenRange& window : solver_.windows(tokens)) {
      part_ = solver_.part(window), runs_ = solver_.runs(window);
      progress_.at(done_before + window.begin, "reading");
      agree(ranks_, [&] {
        const Stopwatch watch(seconds_.read);
        read();
      });
      progress_.at(done_before + window.begin, "solving");
      solve(window);
      progress_.at(done_before + window.begin + window.size() / 2, "writing");
      agree(ranks_, [&] {
        const Stopwatch watch(seconds_.write);
        write();
      });
    }
  }

  const NewtonReport& report() const { return report_; }
  std::int64_t bytes_read() const { return bytes_read_; }

 private:
  static NewtonOptions options_of(const NewtonCommand& command, Precision arithmetic) {
    NewtonOptions o;
    o.method = command.method, o.tolerance = command.tolerance, o.max_iterations = command.max_iterations;
    o.segment = command.segment, o.precision = arithmetic, o.reproducible = command.solve.reproducible;
    o.scan = command.solve.scan;
    return o;
  }

  Slab token_slab(const Source& source, std::int64_t batch, std::int64_t token, std::int64_t n,
                  std::int64_t width) const {
    (void)source;
    return problem_.batched ? Slab{{batch, token, 0}, {1, n, width}} : Slab{{token, 0}, {n, width}};
  }

  void read() {
    const std::int64_t width = problem_.inputs, element = static_cast<std::int64_t>(size_of(problem_.type()));
    x_.resize(part_.size() * width * element);
    for_pieces(problem_.sources, part_,
               [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                 file_.read(source.data.at("x"), token_slab(source, b, token, n, width),
                            x_.data() + at * width * element);
                 bytes_read_ += n * width * element;
               });
    const DeviceArray<std::byte> device = on_device("longscan::newton::check", x_);
    TokenArray x{device.data(), problem_.type(), width, width, 1};
    const std::int64_t bad = first_outside(x, part_.size(), 1, static_cast<int>(width), Domain::finite);
    if (bad >= 0) {
      const auto value = load<double>(x_.data(), problem_.type(), bad);
      throw Error(ExitCode::bad_input,
                  describe_token(problem_.sources, command_.solve.input, "x", part_.begin + bad / width) +
                      ", feature " + std::to_string(bad % width) + " is " + (value != value ? "NaN" : "infinite") +
                      "; every input must be finite");
    }
    h0_ = read_states("h0"), c0_ = read_states("c0");
  }

  /// [runs][layers][D] of the arithmetic's type; empty if the file has none.
  std::vector<std::byte> read_states(const std::string& role) {
    if (!problem_.has(role)) return {};
    const NetworkShape& network = solver_.shape();
    const std::int64_t one = static_cast<std::int64_t>(network.layers) * network.directions * network.channels;
    std::vector<std::byte> states(runs_.size() * one * size_of(state_)), raw;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const auto [source, sequence] = source_of_sequence(problem_.sources, runs_[i].sequence);
      const DatasetInfo& info = problem_.sources[source].data.at(role);
      raw.resize(one * size_of(info.type));
      file_.read(info, state_slab(info.shape, problem_.layers_first.at(role), sequence), raw.data());
      bytes_read_ += static_cast<std::int64_t>(raw.size());
      for (std::int64_t j = 0; j < one; ++j) {
        const auto value = load<double>(raw.data(), info.type, j);
        if (is_non_finite(value))
          throw Error(ExitCode::bad_input, "dataset '" + info.path + "' of " + command_.solve.input +
                                               " holds a value that is not finite (sequence " +
                                               std::to_string(sequence) + ")");
        store(states.data(), state_, static_cast<std::int64_t>(i) * one + j, value);
      }
    }
    return states;
  }

  void solve(TokenRange window) {
    const Stopwatch watch(seconds_.solve);
    const NetworkShape& network = solver_.shape();
    const std::int64_t width = network.directions * network.channels,
                       element = static_cast<std::int64_t>(size_of(state_));
    const std::int64_t finals =
        static_cast<std::int64_t>(runs_.size()) * network.layers * network.directions * network.channels;
    h_.resize(part_.size() * width * element), h_final_.resize(finals * element);
    if (network.state > 1) c_.resize(h_.size()), c_final_.resize(h_final_.size());
    NewtonData data;
    data.x = x_.data(), data.x_type = problem_.type();
    data.h0 = h0_.empty() ? nullptr : h0_.data(), data.c0 = c0_.empty() ? nullptr : c0_.data();
    data.h = h_.data(), data.h_final = h_final_.data();
    if (network.state > 1) data.c = c_.data(), data.c_final = c_final_.data();
    const NewtonReport r = solver_.solve(window, data);
    const bool first = window.begin == 0;
    take(r, window, first);
    judge(window);
  }

  void take(const NewtonReport& r, TokenRange window, bool first) {
    const std::int64_t tokens = window.size(), before = window.begin;
    if (first) {
      report_ = r;
      return;
    }
    NewtonReport& t = report_;
    if (static_cast<int>(r.status) > static_cast<int>(t.status)) t.status = r.status, t.method_used = r.method_used;
    if (!r.scan.reason.empty()) t.scan = r.scan;
    t.iterations += r.iterations;
    t.residual_history.insert(t.residual_history.end(), r.residual_history.begin(), r.residual_history.end());
    t.converged_prefix = before + r.converged_prefix;
    t.error_bound = std::min(t.error_bound, r.error_bound) < 0 ? -1 : std::max(t.error_bound, r.error_bound);
    t.bits_of_token_loop = t.bits_of_token_loop && r.bits_of_token_loop;
    t.sampled = true;  // sums do not go on across windows
    t.lyapunov = (t.lyapunov * static_cast<double>(before) + r.lyapunov * static_cast<double>(tokens)) /
                 static_cast<double>(std::max<std::int64_t>(1, before + tokens));
    t.log_amplification = std::max(t.log_amplification, r.log_amplification);
    t.first_bad_token = r.first_bad_token >= 0 ? before + r.first_bad_token : t.first_bad_token;
    t.tolerance_floor = std::max(t.tolerance_floor, r.tolerance_floor), t.bytes_exchanged += r.bytes_exchanged;
  }

  /// Exit 6 where this is not a solution.
  void judge(TokenRange window) {
    const NewtonReport& r = report_;
    const std::string method = std::string(name_of(r.method_used));
    if (r.status == NewtonStatus::non_finite)
      throw Error(ExitCode::numerical, "the recurrence leaves the range of " + std::string(name_of(state_)) + " in " +
                                           describe_token(problem_.sources, command_.solve.input, "x",
                                                          window.begin + std::max<std::int64_t>(0, r.first_bad_token)) +
                                           " (method " + method + ", status non_finite); --precision f64 may help");
    if (r.status == NewtonStatus::not_converged)
      throw Error(ExitCode::numerical, "not converged: method " + method + " after " + std::to_string(r.iterations) +
                                           " iterations has a residual of " +
                                           text_of(r.residual_history.empty() ? 0 : r.residual_history.back()) +
                                           " of the RMS; right up to token " + std::to_string(r.converged_prefix) +
                                           "; --method auto always solves, or raise --max-iterations");
    if (r.tolerance_floor > 0 && command_.tolerance > 0) {
      const std::string text = "the tolerance " + text_of(command_.tolerance) + " is below what " +
                               std::string(name_of(state_)) + " arithmetic reaches here, " + text_of(r.tolerance_floor);
      if (command_.method != NewtonMethod::automatic)
        throw Error(ExitCode::numerical, text + "; raise --tolerance, or use --precision f64 or --method auto");
      if (!said_floor_) progress_.say("note: " + text + "; solved to that");
      said_floor_ = true;
    }
  }

  void write() {
    const NetworkShape& network = solver_.shape();
    const std::int64_t width = network.directions * network.channels, D = network.channels;
    const std::int64_t L = network.layers * network.directions;
    const DType type = output_type(problem_, command_);
    for (const std::string& name : state_names(network)) {
      const std::vector<std::byte>& values = name == "h" ? h_ : c_;
      const std::vector<std::byte>& finals = name == "h" ? h_final_ : c_final_;
      std::vector<std::byte> converted(part_.size() * width * size_of(type));
      for (std::int64_t i = 0; i < part_.size() * width; ++i)
        store(converted.data(), type, i, load<double>(values.data(), state_, i));
      for_pieces(problem_.sources, part_,
                 [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                   out_.write(dataset_path(source.group, name), token_slab(source, b, token, n, width),
                              converted.data() + at * width * static_cast<std::int64_t>(size_of(type)));
                 });
      for (std::size_t i = 0; i < runs_.size(); ++i) {
        const auto [source, sequence] = source_of_sequence(problem_.sources, runs_[i].sequence);
        for (std::int64_t l = 0; l < L; ++l) {
          // a forward direction ends where the sequence does, a backward one where it starts
          const bool backward = network.directions > 1 && l % 2 == 1;
          if (!(backward ? runs_[i].starts : runs_[i].ends)) continue;
          const Slab slab = problem_.many() ? Slab{{l, sequence, 0}, {1, 1, D}} : Slab{{l, 0}, {1, D}};
          out_.write(
              dataset_path(problem_.sources[source].group, name + "_final"), slab,
              finals.data() + (static_cast<std::int64_t>(i) * L + l) * D * static_cast<std::int64_t>(size_of(state_)));
        }
      }
    }
  }

  Transport& ranks_;
  const NewtonCommand& command_;
  const NewtonProblem& problem_;
  const InputFile& file_;
  SharedOutput& out_;
  Progress& progress_;
  Seconds& seconds_;
  DType state_;
  Newton solver_;
  TokenRange part_;
  std::vector<Run> runs_;
  std::vector<std::byte> x_, h0_, c0_, h_, c_, h_final_, c_final_;
  NewtonReport report_;
  std::int64_t bytes_read_ = 0;
  bool said_floor_ = false;
};

nlohmann::json verdict_json(const NewtonReport& r) {
  nlohmann::json j = {{"status", std::string(name_of(r.status))},
                      {"iterations", r.iterations},
                      {"residual_history", r.residual_history},
                      {"converged_prefix", r.converged_prefix},
                      {"lyapunov", r.lyapunov},
                      {"log_amplification", r.log_amplification},
                      {"method_used", std::string(name_of(r.method_used))},
                      {"bits_of_token_loop", r.bits_of_token_loop},
                      {"sampled", r.sampled},
                      {"reason", r.reason},
                      {"first_bad_token", r.first_bad_token}};
  j["error_bound"] =
      r.error_bound >= 0 && std::isfinite(r.error_bound) ? nlohmann::json(r.error_bound) : nlohmann::json();
  if (r.tolerance_floor > 0) j["tolerance_floor"] = r.tolerance_floor;
  for (auto& x : j["residual_history"])
    if (!x.is_number() || !std::isfinite(x.get<double>())) x = nullptr;
  return j;
}

std::string verdict_line(const NewtonReport& r) {
  std::string text = std::string(name_of(r.status)) + " by " + std::string(name_of(r.method_used)) + " in " +
                     std::to_string(r.iterations) + (r.iterations == 1 ? " pass" : " passes") +
                     (r.bits_of_token_loop ? ", the bits of the token loop" : "") + "; Lyapunov exponent " +
                     text_of(r.lyapunov) + ", largest log-amplification " + text_of(r.log_amplification);
  if (r.error_bound >= 0)
    text += ", error bound " + text_of(r.error_bound);
  else if (!r.bits_of_token_loop)
    text += ", no error bound certified";
  if (r.sampled) text += " (from a sample)";
  return text;
}

}  // namespace

void run_newton(Transport& ranks, const NewtonCommand& command) {
  const auto start = std::chrono::steady_clock::now();
  require_reproducible_scan(command.solve.scan, command.solve.reproducible);
  std::optional<InputFile> file;
  std::string found, cell_text, fingerprint;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    check_output_path(command.solve.output, command.solve.input, command.solve.force);
    file.emplace(command.solve.input);
    const CellSource cell = read_cell(*file, command.cell);
    NetworkShape network;
    try {
      network = network_shape(cell.weights, -1);
    } catch (const Error& e) {
      throw Error(e.code(), cell.where + ": " + e.what());
    }
    const auto problems = find_newton_problems(*file, command, network);
    std::vector<const Source*> sources;
    for (const NewtonProblem& p : problems)
      for (const Source& s : p.sources) sources.push_back(&s);
    fingerprint = fingerprint_text(*file, sources);
    found = to_text(problems), cell_text = to_text(cell);
  });
  const std::vector<NewtonProblem> problems = newton_problems_from_text(broadcast(ranks, found, 0));
  const CellSource cell = cell_from_text(broadcast(ranks, cell_text, 0));
  const NetworkShape network = network_shape(cell.weights, -1);
  agree(ranks, [&] {
    if (!file) file.emplace(command.solve.input);
  });

  std::int64_t tokens = 0, sequences = 0;
  Precision arithmetic = Precision::f32;
  for (const NewtonProblem& p : problems) {
    tokens += p.tokens(), sequences += p.sequences().count();
    if (newton_arithmetic(command.solve.precision, p.type(), cell.widest) == Precision::f64)
      arithmetic = Precision::f64;
  }
  Progress progress(ranks.rank() == 0 && !command.solve.quiet, "longscan newton", tokens);
  progress.say(network.type + (network.reason.empty() ? "" : " (" + network.reason + ")") +
               ", D = " + std::to_string(network.channels) + ", D_in = " + std::to_string(network.inputs) +
               (network.layers > 1 ? ", " + std::to_string(network.layers) + " layers" : "") +
               (network.directions > 1 ? ", both directions" : "") + ", " + std::to_string(tokens) + " tokens in " +
               std::to_string(sequences) + (sequences == 1 ? " sequence" : " sequences") + ", " +
               std::string(name_of(arithmetic)) + " on " + std::to_string(ranks.size()) +
               (ranks.size() == 1 ? " rank (" : " ranks (") + device_name() + ")");

  Carrier carrier(ranks, command.solve.transport);
  if (!carrier.note().empty()) progress.say("note: " + carrier.note());
  if (command.method == NewtonMethod::newton) {
    const bool mixes = network.type != "paragru" && network.type != "paralstm";
    const double n = static_cast<double>(network.state) * (mixes ? network.channels : 1);
    const double bytes = n * (n + 1) * (mixes ? 1 : network.channels) * (arithmetic == Precision::f64 ? 8 : 4);
    progress.say("note: Jacobians take " + bytes_text(bytes) + " a token, " +
                 bytes_text(bytes * static_cast<double>(tokens)) +
                 " in all; they are made in pieces of at most 64 MiB a rank");
  }

  Attributes attributes = {{"longscan_version", std::string(LONGSCAN_VERSION)},
                           {"command", std::string("newton")},
                           {"input", command.solve.input},
                           {"input_fingerprint", fingerprint},
                           {"arithmetic", std::string(name_of(arithmetic))}};
  for (const auto& [name, value] : describe(command)) attributes["option_" + name] = value;
  SharedOutput out(ranks, command.solve.output, command.solve.input, command.solve.force,
                   newton_outputs(problems, command, network, state_type_of(arithmetic)), attributes);

  Seconds seconds;
  NewtonReport worst;
  std::int64_t done = 0, bytes_read = 0, exchanged = 0;
  bool first = true;
  for (const NewtonProblem& problem : problems) {
    NewtonSolve solve(carrier.transport(), command, problem, cell, *file, out, progress, seconds, arithmetic);
    solve.run(done);
    done += problem.tokens(), bytes_read += solve.bytes_read(), exchanged += solve.report().bytes_exchanged;
    if (first || static_cast<int>(solve.report().status) > static_cast<int>(worst.status) ||
        solve.report().error_bound > worst.error_bound)
      worst = solve.report();
    first = false;
  }
  const nlohmann::json verdict = verdict_json(worst);
  {
    const Stopwatch watch(seconds.write);
    Attributes closing = {{"newton_status", std::string(name_of(worst.status))},
                          {"newton_method_used", std::string(name_of(worst.method_used))},
                          {"newton_iterations", worst.iterations},
                          {"newton_converged_prefix", worst.converged_prefix},
                          {"newton_lyapunov", worst.lyapunov},
                          {"newton_log_amplification", worst.log_amplification},
                          {"newton_error_bound", worst.error_bound},
                          {"newton_residual_history", worst.residual_history},
                          {"newton_reason", worst.reason}};
    out.commit(closing);
  }
  seconds.total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!worst.reason.empty()) progress.say("auto: " + worst.reason);
  progress.say(verdict_line(worst));
  progress.done(command.solve.output);

  nlohmann::json report =
      common_report(carrier.transport(), "newton", describe(command), seconds, bytes_read, out.bytes_written());
  if (command.solve.report.empty()) return;
  // shooting hands states to the next rank; only where memory is long, and in Newton on all states, is there a scan
  report["scan"] = std::string(name_of(worst.scan.reason.empty() ? ScanAlgorithm::chain : worst.scan.algorithm));
  if (!worst.scan.reason.empty()) report["scan_choice"] = scan_json(worst.scan, ranks.size());
  report["precision"] = std::string(name_of(arithmetic));
  report["tokens"] = tokens, report["sequences"] = sequences;
  report["tokens_per_second"] = static_cast<double>(tokens) / std::max(1e-9, report["seconds"]["total"].get<double>());
  report["bytes"]["exchanged"] = exchanged;
  report["checks"] = nlohmann::json::object();
  report["newton"] = verdict;
  agree(ranks, [&] {
    if (ranks.rank() == 0) write_report(command.solve.report, report);
  });
}

}  // namespace longscan
