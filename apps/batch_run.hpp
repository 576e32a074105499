// SPDX-License-Identifier: Apache-2.0
#pragma once
// A solve as a batch job: stops when a signal asks for it, leaves checkpoints, continues from one.
#include <chrono>
#include <functional>
#include <optional>

#include "apps/checkpoint.hpp"
#include "apps/options.hpp"
#include "apps/output.hpp"
#include "apps/progress.hpp"

namespace longscan {

class BatchRun {
 public:
  /// Collective. `identity` on rank 0: command, fingerprint, stamps, options, and attributes of the output. Reads the
  /// checkpoint if there is one and --resume was given. Throws usage if there is one and neither --resume nor --force
  /// was given, bad_input if it is of another input or other options.
  BatchRun(Transport& ranks, const SolveOptions& options, Checkpoint identity, Progress& progress);

  /// The checkpoint was read; where it stopped.
  bool resumed() const { return resumed_; }
  std::int64_t problem() const { return state_.problem; }
  std::int64_t token() const { return state_.token; }
  const nlohmann::json& report() const { return state_.report; }
  /// Of the solver, on rank 0.
  const std::vector<std::byte>& solver_state() const { return state_.state; }
  /// Tokens a rank in a window: what the user said, or where the bits of the checkpoint's windows are to go on, theirs.
  std::int64_t window() const;
  /// The output was finished, but its checkpoint not removed.
  bool complete() const { return complete_; }

  /// Collective. What the output holds. It is opened at once if it takes memory, which a window's does not get.
  void set_outputs(std::vector<OutputDataset> datasets);
  /// Collective the first time, when it opens the output, new or continued.
  SharedOutput& output();

  /// What a checkpoint says beside the identity.
  struct Place {
    std::int64_t problem = 0, token = 0, window = 0;
    std::function<std::vector<std::byte>()> state;  ///< asked on rank 0; absent at the start of a problem
    std::function<nlohmann::json()> report;
  };
  /// Collective, between two windows: leaves a checkpoint if it is time for one; if a signal came, does so and throws
  /// Error(interrupted) on every rank. `written`: collective; every rank has written all windows so far.
  void between(const Place& place, const std::function<void()>& written);

  /// Collective, once the output is complete: the checkpoint goes.
  void finish();

 private:
  void find_checkpoint();
  void compare(const Checkpoint& found) const;
  bool finished_before(const Attributes& attributes) const;
  bool input_is_newer() const;
  void save(const Place& place, const std::function<void()>& written);

  Transport& ranks_;
  const SolveOptions& options_;
  Checkpoint state_;
  Progress& progress_;
  std::string path_;
  double every_ = 0;  // seconds; 0: only when a signal comes
  bool resumed_ = false, complete_ = false;
  std::vector<OutputDataset> datasets_;
  std::optional<SharedOutput> out_;
  std::chrono::steady_clock::time_point saved_ = std::chrono::steady_clock::now();
};

}  // namespace longscan
