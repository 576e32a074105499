// SPDX-License-Identifier: Apache-2.0
#include "apps/batch_run.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "apps/stop_request.hpp"
#include "apps/watchdog.hpp"
#include "io/posix_file.hpp"

namespace longscan {
namespace {

namespace fs = std::filesystem;

std::string signal_name(int signal) {
  return signal == SIGTERM ? "SIGTERM" : signal == SIGUSR1 ? "SIGUSR1" : signal == SIGUSR2 ? "SIGUSR2" : "a signal";
}

}  // namespace

BatchRun::BatchRun(Transport& ranks, const SolveOptions& options, Checkpoint identity, Progress& progress)
    : ranks_(ranks), options_(options), state_(std::move(identity)), progress_(progress) {
  path_ = checkpoint_path(options);
  if (options.checkpoint_every)
    every_ = *options.checkpoint_every;
  else if (!options.checkpoint.empty())
    every_ = 600;
  if (!start_watchdog(options.stall_timeout) && options.stall_timeout > 0)
    progress_.say("note: this MPI has no MPI_THREAD_MULTIPLE, so nothing watches for ranks that are stuck");

  const nlohmann::json solve = {state_.command, state_.fingerprint, state_.options};
  state_.attributes["solve_fingerprint"] =
      text_hash(solve.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  std::string text;
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    find_checkpoint();
    if (!complete_ && !options.checkpoint.empty()) check_checkpoint_path(path_);
    nlohmann::json j = {to_text(state_), resumed_, complete_};
    text = j.dump();
  });
  text = broadcast(ranks, text, 0);
  if (ranks.rank() != 0) {
    const nlohmann::json j = nlohmann::json::parse(text);
    state_ = checkpoint_from_text(j[0]), resumed_ = j[1], complete_ = j[2];
  }
}

void BatchRun::find_checkpoint() {
  std::error_code ignored;
  const bool there = fs::exists(path_, ignored);
  if (there && !fs::is_regular_file(path_, ignored))
    throw Error(ExitCode::usage, "the checkpoint " + path_ + " is not a regular file; give another name");
  if (!options_.checkpoint.empty()) check_folder_of(path_, "checkpoint");
  if (!options_.resume) {
    if (there && !options_.force)
      throw Error(ExitCode::usage, "there is a checkpoint " + path_ +
                                       ": --resume continues from it, --force starts anew (and removes it)");
    if (there) check_is_checkpoint(path_);  // nothing else is removed
    return;
  }
  if (!there && !options_.force && finished_before(state_.attributes) && !input_is_newer()) {
    complete_ = true;
    return;
  }
  if (!there) {
    progress_.say("note: there is no checkpoint " + path_ + " yet; starting from the beginning");
    return;
  }
  Checkpoint found = read_checkpoint(path_);
  compare(found);
  if (finished_before(found.attributes)) {
    complete_ = true;
    return;
  }
  if (!fs::exists(OutputFile::temporary_name(options_.output), ignored))
    throw Error(ExitCode::bad_input, "cannot resume from '" + path_ + "': the partial output '" +
                                         OutputFile::temporary_name(options_.output) + "' is gone");
  state_ = std::move(found);
  resumed_ = true;
}

void BatchRun::compare(const Checkpoint& found) const {
  const auto refuse = [&](const std::string& why) {
    throw Error(ExitCode::bad_input, "cannot resume from '" + path_ + "': " + why);
  };
  if (found.command != state_.command)
    refuse("it is of longscan " + found.command + ", this is longscan " + state_.command);
  for (const auto& [name, value] : state_.options) {
    const auto it = found.options.find(name);
    if (it == found.options.end() || it->second != value)
      refuse("it was made with other options: " + name + " was " +
             (it == found.options.end() ? "not given" : it->second) + " and is " + value);
  }
  for (const auto& [name, value] : found.options)
    if (!state_.options.count(name)) refuse("it was made with other options: " + name + " was " + value);
  if (found.fingerprint != state_.fingerprint) refuse("it is of another input than " + options_.input);
  if (found.stamps != state_.stamps)
    refuse("the input " + options_.input +
           " or a file that it takes data from was written again since (size or time of change differ)");
}

/// Killed between renaming the output and removing the checkpoint, or started once more.
bool BatchRun::finished_before(const Attributes& attributes) const {
  std::error_code ignored;
  if (fs::exists(OutputFile::temporary_name(options_.output), ignored) || !fs::exists(options_.output, ignored))
    return false;
  try {
    const InputFile output(options_.output);
    for (const auto& [name, value] : attributes)
      if (const auto* text = std::get_if<std::string>(&value);
          text && name != "option_window" && output.text_attribute("/", name) != *text &&
          !(name == "input" && same_file(*text, output.text_attribute("/", name).value_or(""))))
        return false;
    return true;
  } catch (const Error&) {  // not of ours
    return false;
  }
}

/// Than the output: the fingerprint does not see every value.
bool BatchRun::input_is_newer() const {
  const std::int64_t output = InputFile(options_.output).stamps().front().nanoseconds;
  return std::any_of(state_.stamps.begin(), state_.stamps.end(),
                     [&](const FileStamp& input) { return input.nanoseconds > output; });
}

std::int64_t BatchRun::window() const {
  if (options_.window > 0 || !resumed_ || state_.ranks != ranks_.size()) return options_.window;
  return state_.window;
}

void BatchRun::set_outputs(std::vector<OutputDataset> datasets) {
  datasets_ = std::move(datasets);
  std::int64_t at_once = io::takes_memory(io::folder_of(options_.output));
  ranks_.all_reduce(&at_once, 1, Transport::Reduction::max);
  if (at_once) output();
}

SharedOutput& BatchRun::output() {
  if (out_) return *out_;
  out_.emplace(ranks_, options_.output, options_.input, options_.force, datasets_, state_.attributes, state_.mark);
  if (resumed_) {
    out_->keep();
    return *out_;
  }
  agree(ranks_, [&] {
    if (ranks_.rank() != 0) return;
    state_.mark = out_->mark();
    remove_checkpoint(path_);  // of a solve that --force gave up
  });
  return *out_;
}

void BatchRun::between(const Place& place, const std::function<void()>& written) {
  enum : std::int64_t { go_on, save_it, stop };
  const double since = std::chrono::duration<double>(std::chrono::steady_clock::now() - saved_).count();
  const bool due = ranks_.rank() == 0 && every_ > 0 && since >= every_;
  std::int64_t wanted[] = {stop_requested() ? stop : due ? save_it : go_on, stop_requested()};
  ranks_.all_reduce(wanted, 2, Transport::Reduction::max);
  if (wanted[0] == go_on) return;
  save(place, written);
  if (wanted[0] == stop)
    throw Error(ExitCode::interrupted, signal_name(static_cast<int>(wanted[1])) + ": stopped at token " +
                                           std::to_string(place.token) + " after the checkpoint " + path_ +
                                           "; the same command with --resume continues");
}

void BatchRun::save(const Place& place, const std::function<void()>& written) {
  note_phase("writing a checkpoint", place.token);
  written();
  out_->sync();
  agree(ranks_, [&] {
    if (ranks_.rank() != 0) return;
    state_.problem = place.problem, state_.token = place.token, state_.window = place.window;
    state_.ranks = ranks_.size(), state_.report = place.report();
    state_.state = place.state ? place.state() : std::vector<std::byte>();
    write_checkpoint(path_, state_);
  });
  out_->keep();
  saved_ = std::chrono::steady_clock::now();
}

void BatchRun::finish() {
  agree(ranks_, [&] {
    if (ranks_.rank() == 0) remove_checkpoint(path_);
  });
}

}  // namespace longscan
