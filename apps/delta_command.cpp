// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "apps/batch_run.hpp"
#include "apps/carrier.hpp"
#include "apps/delta_file.hpp"
#include "apps/memory.hpp"
#include "apps/pipeline.hpp"
#include "apps/report.hpp"
#include "apps/setup.hpp"
#include "apps/stop_request.hpp"
#include "apps/stopwatch.hpp"
#include "apps/trace.hpp"

namespace longscan {
namespace {

using Clock = std::chrono::steady_clock;

/// For checkpoints.
nlohmann::json to_json(const DeltaReport& r) {
  return {r.stability_breaches,   r.inverse_fallbacks,    r.inverse_terms_max,  r.horizon_max,     r.boundaries,
          r.boundaries_forgotten, r.boundaries_corrected, r.map_tokens,         r.bytes_exchanged, r.segments,
          r.tensor_tasks,         r.general_tasks,        r.horizons_remembered};
}
DeltaReport report_from(const nlohmann::json& j) {
  DeltaReport r;
  std::size_t i = 0;
  for (std::int64_t* count :
       {&r.stability_breaches, &r.inverse_fallbacks, &r.inverse_terms_max, &r.horizon_max, &r.boundaries,
        &r.boundaries_forgotten, &r.boundaries_corrected, &r.map_tokens, &r.bytes_exchanged, &r.segments,
        &r.tensor_tasks, &r.general_tasks, &r.horizons_remembered})
    *count = j.at(i++);
  return r;
}

/// One problem, window by window.
class DeltaSolve {
 public:
  DeltaSolve(Transport& ranks, const DeltaCommand& command, const DeltaProblem& problem, const InputFile& file,
             Progress& progress, Seconds& seconds, DeltaReport& total)
      : ranks_(ranks),
        command_(command),
        problem_(problem),
        file_(file),
        progress_(progress),
        seconds_(seconds),
        total_(total),
        options_(options_of(command, problem)),
        rule_(ranks, problem.shape, options_, problem.sequences(), problem.counting()),
        buffers_(problem, command, options_.precision, delta_output_type(problem, command)) {}

  /// The tokens from `from` on, in windows of about `wanted` tokens a rank (0: as it seems best).
  void run(BatchRun& batch, std::int64_t index, std::int64_t from, std::int64_t wanted, std::int64_t done_before) {
    const WindowNeeds needs = needs_of(command_, problem_, rule_, ranks_.size());
    const std::int64_t tokens = choose_window(ranks_, wanted, needs);
    planned_bytes_ = needs.host(tokens), window_ = tokens;
    if (from > 0) rule_.set_state(batch.solver_state());
    WindowStages stages;
    stages.prepare = [&](TokenRange window, int slot) {
      const TokenRange part = rule_.part(window);
      buffers_.prepare(slot, file_, part, rule_.runs(window), rule_.states_before(part.begin),
                       rule_.states_before(part.end));
    };
    stages.read = [&](int slot) { buffers_.read(slot, file_); };
    SharedOutput* out = nullptr;
    stages.begin = [&] { out = &batch.output(); };
    stages.check = [&](int slot) { buffers_.check(slot); };
    stages.solve = [&](TokenRange window, int slot, const WindowStages::Writing& now) {
      progress_.at(done_before + window.begin, "solving");
      buffers_.write_when_ready(slot, *out, now);
      solve(window);
      agree(ranks_, [&] {
        file_.require_whole();
        buffers_.fetch(slot);
      });
      progress_.at(done_before + window.end, "reading and writing");
      return true;
    };
    stages.write = [&](int slot) { buffers_.write(slot, *out); };
    stages.between = [&](TokenRange solved, const std::function<void()>& written) {
      batch.between({index, solved.end, tokens, [&] { return rule_.state(); }, [&] { return to_json(total_); }},
                    written);
    };
    run_windows(ranks_, rule_.windows(tokens, from), stages, seconds_);
  }

  std::int64_t bytes_read() const { return buffers_.bytes_read(); }
  std::int64_t window() const { return window_; }
  std::int64_t planned_bytes() const { return planned_bytes_; }

 private:
  void solve(TokenRange window) {
    try {
      const DeltaReport r = rule_.solve(window, buffers_.inputs(), buffers_.outputs());
      total_ += r;
      seconds_.scan += r.seconds_scan;
    } catch (const NonFinite& e) {  // on all ranks; zeros in place of what was cut off may be why
      agree(ranks_, [&] { file_.require_whole(); });
      throw Error(ExitCode::numerical, "the recurrence overflows " + e.arithmetic + " in " +
                                           describe_token(problem_.sources, command_.solve.input, "", e.token) +
                                           ", head " + std::to_string(e.head) +
                                           "; longscan inspect counts tokens beyond the stability bound;"
                                           " --normalize-keys or --precision f64 may help");
    }
  }

  Transport& ranks_;
  const DeltaCommand& command_;
  const DeltaProblem& problem_;
  const InputFile& file_;
  Progress& progress_;
  Seconds& seconds_;
  DeltaReport& total_;
  DeltaOptions options_;
  DeltaRule rule_;
  DeltaPartBuffers buffers_;
  std::int64_t window_ = 0, planned_bytes_ = 0;
};

void say_what(Progress& progress, const std::vector<DeltaProblem>& problems, const DeltaCommand& command, int ranks) {
  for (const DeltaProblem& p : problems) {
    std::string text = std::string(name_of(p.variant)) + ", " + count_of(p.tokens(), "token") + " in " +
                       count_of(p.sequences().count(), "sequence") +
                       (p.sources.size() > 1 ? " of " + std::to_string(p.sources.size()) + " groups" : "") + ", " +
                       shape_text(p, arithmetic_of(command.solve.precision, p.widest())) + " on " +
                       count_of(ranks, "rank") + " (" + device_name() + ")";
    progress.say(text);
  }
}

}  // namespace

void run_delta(Transport& ranks, const DeltaCommand& command) {
  const auto start = Clock::now();
  require_reproducible_scan(command.solve.scan, command.solve.reproducible);
  install_stop_signals();
  std::optional<InputFile> file;
  std::string found, fingerprint;
  std::vector<FileStamp> stamps;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    if (!command.solve.resume) check_output_path(command.solve.output, command.solve.input, command.solve.force);
    check_files(command.solve);
    file.emplace(command.solve.input);
    const auto problems = find_problems(*file, command);
    fingerprint = fingerprint_text(*file, sources_of(problems));
    stamps = stamps_of(*file, sources_of(problems));
    found = to_text(problems);
  });
  const std::vector<DeltaProblem> problems = problems_from_text(broadcast(ranks, found, 0));
  agree(ranks, [&] {
    if (!file) file.emplace(command.solve.input);
  });

  std::int64_t tokens = 0;
  for (const DeltaProblem& p : problems) tokens += p.tokens();
  Progress progress(ranks.rank() == 0 && !command.solve.quiet, "longscan delta", tokens);
  say_what(progress, problems, command, ranks.size());
  if (command.state_only && command.state_every > 0)
    progress.say("note: --state-only writes final_state alone, so --state-every is set aside");
  Carrier carrier(ranks, command.solve.transport);
  if (!carrier.note().empty()) progress.say("note: " + carrier.note());

  Checkpoint identity;
  identity.command = "delta", identity.fingerprint = fingerprint, identity.options = describe(command);
  identity.attributes = {{"longscan_version", std::string(LONGSCAN_VERSION)},
                         {"command", std::string("delta")},
                         {"input", command.solve.input},
                         {"input_fingerprint", fingerprint}};
  for (const auto& [name, value] : identity.options) identity.attributes["option_" + name] = value;
  identity.options.erase("window");  // any windows will do
  identity.stamps = stamps;
  BatchRun batch(ranks, command.solve, std::move(identity), progress);
  if (batch.complete()) {
    progress.say(command.solve.output + " is complete already");
    if (command.solve.report.empty()) return;
    Seconds seconds;
    seconds.total = std::chrono::duration<double>(Clock::now() - start).count();
    std::int64_t sequences = 0;
    std::string precision;
    for (const DeltaProblem& p : problems) {
      const std::string name(name_of(options_of(command, p).precision));
      if (precision.find(name) == std::string::npos) precision += (precision.empty() ? "" : ",") + name;
      sequences += p.sequences().count();
    }
    const nlohmann::json report =
        complete_report(carrier.transport(), "delta", describe(command), seconds, tokens, sequences, precision);
    agree(ranks, [&] {
      if (ranks.rank() == 0) write_report(command.solve.report, report);
    });
    return;
  }
  batch.set_outputs(delta_outputs(problems, command));

  std::int64_t program_bytes = resident_memory();
  Seconds seconds;
  DeltaReport total;
  if (batch.resumed()) total = report_from(batch.report());
  std::int64_t done = 0, bytes_read = 0, solved = 0, window = 0, planned_bytes = 0;
  std::string precision;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const DeltaProblem& problem = problems[i];
    const auto index = static_cast<std::int64_t>(i);
    const std::string name(name_of(options_of(command, problem).precision));
    if (precision.find(name) == std::string::npos) precision += (precision.empty() ? "" : ",") + name;
    if (index >= batch.problem()) {
      DeltaSolve solve(carrier.transport(), command, problem, *file, progress, seconds, total);
      const std::int64_t from = index == batch.problem() ? batch.token() : 0;
      solve.run(batch, index, from, from > 0 ? batch.window() : command.solve.window, done);
      if (i + 1 < problems.size()) batch.between({index + 1, 0, 0, nullptr, [&] { return to_json(total); }}, [] {});
      solved += problem.tokens() - from, bytes_read += solve.bytes_read();
      window = std::max(window, solve.window()), planned_bytes = std::max(planned_bytes, solve.planned_bytes());
    }
    done += problem.tokens();
  }
  {
    const Stopwatch watch(seconds.write);
    batch.output().commit();
    batch.finish();
  }
  seconds.total = std::chrono::duration<double>(Clock::now() - start).count();
  if (total.stability_breaches > 0)
    progress.say("note: " + std::to_string(total.stability_breaches) +
                 " tokens and heads are beyond the stability bound (beta |k|^2 too large); solved all the same");
  if (total.inverse_fallbacks > 0)
    progress.say("note: " + std::to_string(total.inverse_fallbacks) +
                 " chunks and heads needed too many terms for --inverse " + std::string(name_of(command.inverse)) +
                 " and were solved by forward substitution");
  progress.done(command.solve.output);

  nlohmann::json report = common_report(carrier.transport(), "delta", describe(command), seconds, bytes_read,
                                        batch.output().bytes_written());
  if (command.solve.report.empty()) return;
  report["scan"] = std::string(name_of(total.scan.algorithm)) + (command.solve.reproducible ? " (fixed segments)" : "");
  report["scan_choice"] = scan_json(total.scan, ranks.size());
  if (total.started > 0) {  // else this run has solved nothing
    const Trace trace = gather_traces(ranks, {total}).front();
    report["trace"] = trace_json(trace), report["exchange_seconds"] = exchange_seconds(trace);
  }
  report["precision"] = precision, report["tokens"] = tokens;
  std::int64_t sequences = 0;
  for (const DeltaProblem& p : problems) sequences += p.sequences().count();
  report["sequences"] = sequences;
  report["tokens_per_second"] = static_cast<double>(solved) / std::max(1e-9, report["seconds"]["total"].get<double>());
  report["window_tokens"] = window, report["planned_memory_bytes"] = planned_bytes;
  ranks.all_reduce(&program_bytes, 1, Transport::Reduction::max);
  report["program_memory_bytes"] = program_bytes;
  if (batch.resumed()) report["resumed_at_token"] = tokens - solved;
  report["bytes"]["exchanged"] = total.bytes_exchanged;
  report["checks"] = {{"stability_breaches", total.stability_breaches},
                      {"inverse_terms_max", total.inverse_terms_max},
                      {"inverse_fallbacks", total.inverse_fallbacks},
                      {"boundaries", total.boundaries},
                      {"boundaries_forgotten", total.boundaries_forgotten},
                      {"boundaries_corrected", total.boundaries_corrected},
                      {"horizon_max", total.horizon_max},
                      {"horizons_remembered", total.horizons_remembered},
                      {"map_tokens", total.map_tokens},
                      {"segments", total.segments},
                      {"tensor_tasks", total.tensor_tasks},
                      {"general_tasks", total.general_tasks}};
  report["kernel"] = total.tensor_tasks == 0    ? "general"
                     : total.general_tasks == 0 ? "tensor cores"
                                                : "tensor cores, general where fp16 does not hold the numbers";
  agree(ranks, [&] {
    if (ranks.rank() == 0) write_report(command.solve.report, report);
  });
}

}  // namespace longscan
