// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "apps/batch_run.hpp"
#include "apps/carrier.hpp"
#include "apps/memory.hpp"
#include "apps/newton_problem.hpp"
#include "apps/pipeline.hpp"
#include "apps/setup.hpp"
#include "apps/staging.hpp"
#include "apps/stop_request.hpp"
#include "apps/stopwatch.hpp"
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

std::vector<OutputDataset> newton_outputs(const std::vector<NewtonProblem>& problems, const NewtonCommand& command,
                                          const NetworkShape& network, DType state) {
  std::vector<OutputDataset> datasets;
  const std::int64_t D = network.channels, L = network.layers * network.directions;
  for (const NewtonProblem& problem : problems)
    for (const Source& source : problem.sources)
      for (const std::string& name : state_names(network)) {
        auto shape = source.data.at("x").shape;
        shape.back() = network.directions * D;
        datasets.push_back({dataset_path(source.group, name), shape, newton_output_type(problem, command)});
        datasets.push_back(
            {dataset_path(source.group, name + "_final"),
             problem.many() ? std::vector<std::int64_t>{L, source.sequences(), D} : std::vector<std::int64_t>{L, D},
             state});
      }
  return datasets;
}

/// What a window's part is read into and written from.
struct NewtonSlot {
  struct Place {
    TokenRange part;
    std::vector<Run> runs;
  };
  Place in, out;  ///< while an input is read, the output of another window may still be written
  HostBytes x, h, c;
  std::optional<MappedSlab> mapped;  ///< instead of x
  std::vector<std::byte> h0, c0, h_final, c_final;
  bool written = false;  ///< or about to be
  const std::byte* input() const { return mapped ? mapped->data() : x.data(); }
};

/// For checkpoints.
nlohmann::json to_json(const NewtonReport& r) {
  nlohmann::json history = nlohmann::json::array();
  for (const double x : r.residual_history) history.push_back(exact(x));
  return {{"status", static_cast<int>(r.status)},
          {"method", static_cast<int>(r.method_used)},
          {"reason", r.reason},
          {"counts", {r.iterations, r.converged_prefix, r.first_bad_token, r.bytes_exchanged}},
          {"residual_history", history},
          {"flags", {r.bits_of_token_loop, r.sampled}},
          {"numbers", {exact(r.error_bound), exact(r.lyapunov), exact(r.log_amplification), exact(r.tolerance_floor)}}};
}
NewtonReport report_from(const nlohmann::json& j) {
  NewtonReport r;
  r.status = static_cast<NewtonStatus>(j.at("status").get<int>());
  r.method_used = static_cast<NewtonMethod>(j.at("method").get<int>()), r.reason = j.at("reason");
  const auto& counts = j.at("counts");
  r.iterations = counts.at(0), r.converged_prefix = counts.at(1), r.first_bad_token = counts.at(2);
  r.bytes_exchanged = counts.at(3);
  for (const auto& x : j.at("residual_history")) r.residual_history.push_back(exact(x));
  r.bits_of_token_loop = j.at("flags").at(0), r.sampled = j.at("flags").at(1);
  const auto& numbers = j.at("numbers");
  r.error_bound = exact(numbers.at(0)), r.lyapunov = exact(numbers.at(1));
  r.log_amplification = exact(numbers.at(2)), r.tolerance_floor = exact(numbers.at(3));
  return r;
}

/// One problem, window by window.
class NewtonSolve {
 public:
  NewtonSolve(Transport& ranks, const NewtonCommand& command, const NewtonProblem& problem, const CellSource& cell,
              const InputFile& file, BatchRun& batch, Progress& progress, Seconds& seconds, Precision arithmetic)
      : ranks_(ranks),
        command_(command),
        problem_(problem),
        file_(file),
        batch_(batch),
        progress_(progress),
        seconds_(seconds),
        arithmetic_(arithmetic),
        state_(state_type_of(arithmetic)),
        solver_(ranks, cell.weights, problem.inputs, options_of(command, arithmetic), problem.sequences()) {}

  /// The tokens from `from` on, after which `before` was to be said, in windows of about `wanted` tokens a rank (0: as
  /// it seems best). `save` is given the solve's own part of a checkpoint.
  using Save = std::function<void(BatchRun::Place, const std::function<void()>&)>;
  /// `solved`: collective, with the report, while the last window may be on its way to the file.
  void run(std::int64_t from, const NewtonReport& before, const std::vector<std::byte>& state, std::int64_t wanted,
           std::int64_t done_before, const Save& save, const std::function<void(const NewtonReport&)>& solved) {
    const WindowNeeds needs = needs_of(command_, problem_, solver_, arithmetic_, ranks_.size());
    const std::int64_t tokens = choose_window(ranks_, wanted, needs);
    planned_bytes_ = needs.host(tokens), window_ = tokens;
    if (needs.whole && command_.solve.window > 0 && command_.solve.window < needs.all)
      progress_.say(
          "note: the cell runs in both directions, so --window is set aside and all tokens are kept in memory");
    if (from > 0) solver_.set_state(state), report_ = before;
    WindowStages stages;
    stages.prepare = [&](TokenRange window, int slot) {
      NewtonSlot& s = slots_[slot];
      s.in = {solver_.part(window), solver_.runs(window)};
      map(s);
      if (s.mapped)
        s.x = {};
      else
        reserve_bytes(s.x, input_bytes(s.in.part));
    };
    stages.read = [&](int slot) { read(slots_[slot]); };
    stages.begin = [&] { out_ = &batch_.output(); };
    stages.check = [&](int slot) {
      if (!kernels_reach_host) check(slots_[slot]);
      prepare_output(slots_[slot]);
    };
    stages.solve = [&](TokenRange window, int slot, const WindowStages::Writing& now) {
      progress_.at(done_before + window.begin, "solving");
      solve(window, slots_[slot], now);
      progress_.at(done_before + window.end, "reading and writing");
      return !slots_[slot].written;
    };
    stages.write = [&](int slot) { write(slots_[slot]); };
    stages.end = [&] { solved(report_); };
    stages.between = [&](TokenRange solved, const std::function<void()>& written) {
      save({0, solved.end, tokens, [&] { return solver_.state(); }, [&] { return to_json(report_); }}, written);
    };
    run_windows(ranks_, solver_.windows(tokens, from), stages, seconds_);
  }

  const NewtonReport& report() const { return report_; }
  std::int64_t bytes_read() const { return bytes_read_; }
  std::int64_t window() const { return window_; }
  std::int64_t planned_bytes() const { return planned_bytes_; }

 private:
  std::int64_t input_bytes(TokenRange part) const {
    return part.size() * problem_.inputs * static_cast<std::int64_t>(size_of(problem_.type()));
  }

  Slab token_slab(const Source& source, std::int64_t batch, std::int64_t token, std::int64_t n,
                  std::int64_t width) const {
    (void)source;
    return problem_.batched ? Slab{{batch, token, 0}, {1, n, width}} : Slab{{token, 0}, {n, width}};
  }

  void prepare_output(NewtonSlot& slot) {
    slot.out = slot.in;
    const NetworkShape& network = solver_.shape();
    const std::int64_t width = network.directions * network.channels,
                       element = static_cast<std::int64_t>(size_of(state_));
    const std::int64_t bytes = slot.out.part.size() * width * element;
    const std::int64_t finals =
        static_cast<std::int64_t>(slot.out.runs.size()) * network.layers * network.directions * network.channels;
    reserve_bytes(slot.h, bytes), slot.h_final.resize(finals * element);
    if (network.state > 1) reserve_bytes(slot.c, bytes), slot.c_final.resize(slot.h_final.size());
  }

  /// Kernels on a host can have x where it is in the file.
  void map(NewtonSlot& slot) const {
    slot.mapped.reset();
    if (!kernels_reach_host) return;
    for_pieces(problem_.sources, slot.in.part,
               [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t, std::int64_t n) {
                 if (n == slot.in.part.size())  // all of it
                   slot.mapped = file_.map(source.data.at("x"), token_slab(source, b, token, n, problem_.inputs));
               });
  }

  void read(NewtonSlot& slot) {
    if (slot.mapped) {
      file_.load(*slot.mapped);
      bytes_read_ += input_bytes(slot.in.part);
    } else {
      read_tokens(slot);
    }
    slot.h0 = read_states("h0", slot.in.runs), slot.c0 = read_states("c0", slot.in.runs);
    if (kernels_reach_host) check(slot);
  }

  void read_tokens(NewtonSlot& slot) {
    const std::int64_t width = problem_.inputs, element = static_cast<std::int64_t>(size_of(problem_.type()));
    for_pieces(problem_.sources, slot.in.part,
               [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                 file_.read(source.data.at("x"), token_slab(source, b, token, n, width),
                            slot.x.data() + at * width * element);
                 bytes_read_ += n * width * element;
               });
  }

  void check(const NewtonSlot& slot) {
    const std::int64_t width = problem_.inputs;
    DeviceArea device;
    const std::byte* host = slot.input();
    const TokenArray x{slot.mapped ? host : device.upload(slot.x, input_bytes(slot.in.part)), problem_.type(), width,
                       width, 1};
    const auto look = kernels_reach_host ? first_outside_on_host : first_outside;
    const std::int64_t bad = look(x, slot.in.part.size(), 1, static_cast<int>(width), Domain::finite);
    if (bad < 0) return;
    const auto value = load<double>(host, problem_.type(), bad);
    throw Error(ExitCode::bad_input,
                describe_token(problem_.sources, command_.solve.input, "x", slot.in.part.begin + bad / width) +
                    ", feature " + std::to_string(bad % width) + " is " + (value != value ? "NaN" : "infinite") +
                    "; every input must be finite");
  }

  /// [runs][layers][D] of the arithmetic's type; empty if the file has none.
  std::vector<std::byte> read_states(const std::string& role, const std::vector<Run>& runs) {
    if (!problem_.has(role)) return {};
    const NetworkShape& network = solver_.shape();
    const std::int64_t one = static_cast<std::int64_t>(network.layers) * network.directions * network.channels;
    std::vector<std::byte> states(runs.size() * one * size_of(state_)), raw;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto [source, sequence] = source_of_sequence(problem_.sources, runs[i].sequence);
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

  void solve(TokenRange window, NewtonSlot& slot, const WindowStages::Writing& now) {
    const bool cells = solver_.shape().state > 1,
               narrower = size_of(newton_output_type(problem_, command_)) < size_of(state_);
    NewtonData data;
    data.x = slot.input(), data.x_type = problem_.type();
    data.h0 = slot.h0.empty() ? nullptr : slot.h0.data(), data.c0 = slot.c0.empty() ? nullptr : slot.c0.data();
    data.h = slot.h.data(), data.h_final = slot.h_final.data();
    if (cells) data.c = slot.c.data(), data.c_final = slot.c_final.data();
    slot.written = false;
    if (!narrower) data.ready = [&] { slot.written = now.begin([&] { write(slot); }); };
    const NewtonReport r = solver_.solve(window, data);
    agree(ranks_, [&] { file_.require_whole(); });
    take(r, window, window.begin == 0);
    judge();
    if (narrower) agree(ranks_, [&] { check_output(slot); });
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
    t.projection_seconds += r.projection_seconds;
  }

  /// Exit 6 where this is not a solution.
  void judge() {
    const NewtonReport& r = report_;
    const std::string method = std::string(name_of(r.method_used));
    if (r.status == NewtonStatus::non_finite)
      throw Error(ExitCode::numerical, "the recurrence leaves the range of " + std::string(name_of(state_)) + " in " +
                                           describe_token(problem_.sources, command_.solve.input, "x",
                                                          std::max<std::int64_t>(0, r.first_bad_token)) +
                                           " (method " + method + ", status non_finite); --precision f64 may help");
    if (r.status == NewtonStatus::not_converged)
      throw Error(ExitCode::numerical, "not converged: method " + method + " after " +
                                           count_of(r.iterations, "iteration") + " has a residual of " +
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

  /// Exit 6 where the output's type does not hold a state.
  void check_output(const NewtonSlot& slot) const {
    const DType type = newton_output_type(problem_, command_);
    const std::int64_t width = solver_.shape().directions * solver_.shape().channels;
    const double surely = type == DType::f16 ? 65504 : 3e38;  // held
    for (const std::string& name : state_names(solver_.shape())) {
      const HostBytes& values = name == "h" ? slot.h : slot.c;
      for (std::int64_t i = 0; i < slot.out.part.size() * width; ++i) {
        const auto value = load<double>(values.data(), state_, i);
        if (std::abs(value) <= surely) continue;
        std::byte converted[sizeof(double)];
        store(converted, type, 0, value);
        if (!is_non_finite(load<double>(converted, type, 0))) continue;
        const std::int64_t token = slot.out.part.begin + i / width;
        const Source& source = problem_.sources[place_of(problem_.sources, token).source];
        throw overflow_of_output(dataset_path(source.group, name), type, state_,
                                 describe_token(problem_.sources, command_.solve.input, "x", token) + ", channel " +
                                     std::to_string(i % width));
      }
    }
  }

  void write(const NewtonSlot& slot) {
    const NetworkShape& network = solver_.shape();
    const std::int64_t width = network.directions * network.channels, D = network.channels;
    const std::int64_t L = network.layers * network.directions;
    const DType type = newton_output_type(problem_, command_);
    for (const std::string& name : state_names(network)) {
      const HostBytes& values = name == "h" ? slot.h : slot.c;
      const std::vector<std::byte>& finals = name == "h" ? slot.h_final : slot.c_final;
      std::vector<std::byte> converted;
      if (type != state_) {
        converted.resize(slot.out.part.size() * width * size_of(type));
        for (std::int64_t i = 0; i < slot.out.part.size() * width; ++i)
          store(converted.data(), type, i, load<double>(values.data(), state_, i));
      }
      const std::byte* const written = type == state_ ? values.data() : converted.data();
      for_pieces(problem_.sources, slot.out.part,
                 [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                   out_->write(dataset_path(source.group, name), token_slab(source, b, token, n, width),
                               written + at * width * static_cast<std::int64_t>(size_of(type)));
                 });
      for (std::size_t i = 0; i < slot.out.runs.size(); ++i) {
        const auto [source, sequence] = source_of_sequence(problem_.sources, slot.out.runs[i].sequence);
        for (std::int64_t l = 0; l < L; ++l) {
          // a forward direction ends where the sequence does, a backward one where it starts
          const bool backward = network.directions > 1 && l % 2 == 1;
          if (!(backward ? slot.out.runs[i].starts : slot.out.runs[i].ends)) continue;
          const Slab slab = problem_.many() ? Slab{{l, sequence, 0}, {1, 1, D}} : Slab{{l, 0}, {1, D}};
          out_->write(
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
  BatchRun& batch_;
  SharedOutput* out_ = nullptr;
  Progress& progress_;
  Seconds& seconds_;
  Precision arithmetic_;
  DType state_;
  Newton solver_;
  NewtonSlot slots_[2];
  NewtonReport report_;
  std::int64_t bytes_read_ = 0, window_ = 0, planned_bytes_ = 0;
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

/// HDF5 keeps attributes of less than 64 KiB only; the report has them all.
constexpr std::size_t attribute_passes = 4096;

std::vector<double> last_of(const std::vector<double>& values, std::size_t most) {
  return {values.end() - static_cast<std::ptrdiff_t>(std::min(most, values.size())), values.end()};
}

Attributes closing_attributes(const NewtonReport& r) {
  return {{"newton_status", std::string(name_of(r.status))},
          {"newton_method_used", std::string(name_of(r.method_used))},
          {"newton_iterations", r.iterations},
          {"newton_converged_prefix", r.converged_prefix},
          {"newton_lyapunov", r.lyapunov},
          {"newton_log_amplification", r.log_amplification},
          {"newton_error_bound", r.error_bound},
          {"newton_residual_history", last_of(r.residual_history, attribute_passes)},
          {"newton_reason", r.reason}};
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
  install_stop_signals();
  std::optional<InputFile> file;
  std::string found, cell_text, cell_hash, fingerprint;
  std::vector<FileStamp> stamps;
  std::optional<CellSource> read_here;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    const std::string cell_file = split_cell(command.cell).first;
    if (!command.solve.resume) check_output_path(command.solve.output, command.solve.input, command.solve.force);
    check_files(command.solve, cell_file);
    file.emplace(command.solve.input);
    read_here = read_cell(*file, command.cell);
    const auto problems = find_newton_problems(*file, command, shape_of(*read_here));
    fingerprint = fingerprint_text(*file, sources_of(problems));
    stamps = stamps_of(*file, sources_of(problems));
    found = to_text(problems), cell_text = to_text(*read_here);
    cell_hash = text_hash(cell_text);
  });
  const std::vector<NewtonProblem> problems = newton_problems_from_text(broadcast(ranks, found, 0));
  cell_text = broadcast(ranks, std::move(cell_text), 0);
  const CellSource cell = read_here ? std::move(*read_here) : cell_from_text(cell_text);
  std::string().swap(cell_text);
  const NetworkShape network = shape_of(cell);
  agree(ranks, [&] {
    if (!file) file.emplace(command.solve.input);
  });

  std::int64_t tokens = 0, sequences = 0;
  for (const NewtonProblem& p : problems) tokens += p.tokens(), sequences += p.sequences().count();
  const Precision arithmetic = newton_arithmetic(command, problems, cell.widest);
  Progress progress(ranks.rank() == 0 && !command.solve.quiet, "longscan newton", tokens);
  progress.say(network.type + (network.reason.empty() ? "" : " (" + network.reason + ")") + ", " + shape_text(network) +
               ", " + count_of(tokens, "token") + " in " + count_of(sequences, "sequence") + ", " +
               std::string(name_of(arithmetic)) + " on " + count_of(ranks.size(), "rank") + " (" + device_name() + ")");

  Carrier carrier(ranks, command.solve.transport);
  if (!carrier.note().empty()) progress.say("note: " + carrier.note());
  if (command.method == NewtonMethod::newton) {
    const bool mixes = network.type != "paragru" && network.type != "paralstm";
    const double n = static_cast<double>(network.state) * (mixes ? network.channels : 1);
    const double bytes = n * (n + 1) * (mixes ? 1 : network.channels) * (arithmetic == Precision::f64 ? 8 : 4);
    progress.say("note: Jacobians take " + bytes_text(bytes) + " per token, " +
                 bytes_text(bytes * static_cast<double>(tokens)) +
                 " in all; they are made in pieces of at most 64 MiB per rank");
  }

  Checkpoint identity;
  identity.command = "newton", identity.options = describe(command);
  identity.fingerprint = fingerprint + "-" + cell_hash;
  identity.attributes = {{"longscan_version", std::string(LONGSCAN_VERSION)},
                         {"command", std::string("newton")},
                         {"input", command.solve.input},
                         {"input_fingerprint", fingerprint},
                         {"arithmetic", std::string(name_of(arithmetic))}};
  for (const auto& [name, value] : identity.options) identity.attributes["option_" + name] = value;
  identity.options.erase("window");  // any windows will do
  identity.stamps = stamps;
  BatchRun batch(ranks, command.solve, std::move(identity), progress);
  if (batch.complete()) {
    progress.say(command.solve.output + " is complete already");
    if (command.solve.report.empty()) return;
    Seconds seconds;
    seconds.total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const nlohmann::json report = complete_report(carrier.transport(), "newton", describe(command), seconds, tokens,
                                                  sequences, std::string(name_of(arithmetic)));
    agree(ranks, [&] {
      if (ranks.rank() == 0) write_report(command.solve.report, report);
    });
    return;
  }
  batch.set_outputs(newton_outputs(problems, command, network, state_type_of(arithmetic)));

  std::int64_t program_bytes = resident_memory();
  Seconds seconds;
  double projecting = 0;
  NewtonReport worst;
  std::int64_t done = 0, bytes_read = 0, exchanged = 0, solved = 0, window = 0, planned_bytes = 0;
  bool first = true;
  if (batch.resumed() && batch.problem() > 0) worst = report_from(batch.report().at("worst")), first = false;
  if (batch.resumed()) exchanged = batch.report().at("exchanged");
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const NewtonProblem& problem = problems[i];
    const auto index = static_cast<std::int64_t>(i);
    done += problem.tokens();
    if (index < batch.problem()) continue;
    const NewtonSolve::Save save = [&](BatchRun::Place place, const std::function<void()>& written) {
      const auto current = place.report;
      place.problem += index;
      place.report = [&] {
        return nlohmann::json{{"worst", to_json(worst)}, {"exchanged", exchanged}, {"current", current()}};
      };
      batch.between(place, written);
    };
    const auto take = [&](const NewtonReport& r) {
      if (first || static_cast<int>(r.status) > static_cast<int>(worst.status) || r.error_bound > worst.error_bound)
        worst = r;
      first = false;
      if (i + 1 == problems.size()) batch.output().add(closing_attributes(worst));
    };
    NewtonSolve solve(carrier.transport(), command, problem, cell, *file, batch, progress, seconds, arithmetic);
    const std::int64_t from = index == batch.problem() ? batch.token() : 0;
    solve.run(from, from > 0 ? report_from(batch.report().at("current")) : NewtonReport(), batch.solver_state(),
              from > 0 ? batch.window() : command.solve.window, done - problem.tokens(), save, take);
    projecting += solve.report().projection_seconds;
    solved += problem.tokens() - from, bytes_read += solve.bytes_read(), exchanged += solve.report().bytes_exchanged;
    window = std::max(window, solve.window()), planned_bytes = std::max(planned_bytes, solve.planned_bytes());
    if (i + 1 < problems.size()) save({1, 0, 0, nullptr, [] { return nlohmann::json(); }}, [] {});
  }
  const nlohmann::json verdict = verdict_json(worst);
  {
    const Stopwatch watch(seconds.write);
    batch.output().commit();
    batch.finish();
  }
  seconds.total = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!worst.reason.empty()) progress.say("auto: " + worst.reason);
  progress.say(verdict_line(worst));
  progress.done(command.solve.output);

  nlohmann::json report = common_report(carrier.transport(), "newton", describe(command), seconds, bytes_read,
                                        batch.output().bytes_written());
  if (command.solve.report.empty()) return;
  // shooting hands states to the next rank; only where memory is long, and in Newton on all states, is there a scan
  report["scan"] = std::string(name_of(worst.scan.reason.empty() ? ScanAlgorithm::chain : worst.scan.algorithm));
  if (!worst.scan.reason.empty()) report["scan_choice"] = scan_json(worst.scan, ranks.size());
  report["precision"] = std::string(name_of(arithmetic));
  report["tokens"] = tokens, report["sequences"] = sequences;
  report["tokens_per_second"] = static_cast<double>(solved) / std::max(1e-9, report["seconds"]["total"].get<double>());
  ranks.all_reduce(&projecting, 1, Transport::Reduction::max);
  report["projection_seconds"] = projecting;  // within those of the solve
  report["window_tokens"] = window, report["planned_memory_bytes"] = planned_bytes;
  ranks.all_reduce(&program_bytes, 1, Transport::Reduction::max);
  report["program_memory_bytes"] = program_bytes;
  if (batch.resumed()) report["resumed_at_token"] = tokens - solved;
  report["bytes"]["exchanged"] = exchanged;
  report["checks"] = nlohmann::json::object();
  report["newton"] = verdict;
  agree(ranks, [&] {
    if (ranks.rank() == 0) write_report(command.solve.report, report);
  });
}

}  // namespace longscan
