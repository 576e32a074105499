// SPDX-License-Identifier: Apache-2.0
#pragma once
// A part as one piece, as a host core solves it: one state a head at its end, from the tokens that it depends on.
#include <vector>

#include "dist/delta_part.hpp"

namespace longscan {

template <class T>
class DeltaWhole {
 public:
  explicit DeltaWhole(DeltaPart<T>& part) : part_(part) {}

  void begin();

  /// The part in the scan over the ranks.
  ScanPart<T> share(std::vector<char> known = {}) const { return part_.share(std::move(known), maps_); }
  /// Maps are one a head as they are.
  void join_maps() {}

  /// `outgoing`, as far as it does not depend on `incoming`: L where a head forgets, else run on from a state that this
  /// rank has. Returns for which heads it is there; the others have the map of the whole part.
  std::vector<char> find_outgoing(Horizons horizons);
  /// For heads [begin, end) whose state was not there: `outgoing` from `incoming`.
  void advance(std::int64_t begin, std::int64_t end);
  /// `incoming` is there for all heads.
  void arrive() {}

  /// All outputs, final and recorded states, and the state at the end of the last run.
  PassSummary outputs() { return outputs({}); }
  /// Heads that were taken to forget what came before their horizon and do not, now that `outputs` has seen that.
  std::int64_t wrong();
  bool first_horizons_do() const { return false; }  // none are remembered
  std::int64_t borders() const { return 0; }

  /// The first run again for the marked heads, whose `incoming` was not right; `found` is of the pass before.
  PassSummary outputs_again(const std::vector<char>& changed, const PassSummary& found);
  /// `outgoing` becomes the true state for the heads that it was wrong for, because they do not forget or because
  /// `incoming` has changed. Returns which these are.
  std::vector<char> mend_outgoing(const std::vector<char>& changed);

  /// Adds what was passed on, and from how many tokens.
  void report_boundaries(DeltaReport& report) const;
  std::int64_t segments() const { return 0; }
  std::int64_t workspace_bytes(std::int64_t, std::int64_t, std::int64_t) const { return part_.workspace_bytes(8, 3); }

 private:
  using Task = DeltaTask<T>;
  void run_to_end();
  PassSummary outputs(const std::vector<char>& heads);
  std::int64_t tokens_at_a_time() const;
  PassSummary run_in_pieces(const std::vector<Task>& tasks, std::int64_t tokens);
  DeltaRules output_rules() const;

  DeltaPart<T>& part_;
  std::vector<Border> ends_;  // the end of the last run, one a head, with the tokens that maps_ covers
  std::vector<char> known_;
  DeviceArray<T> maps_;        // of the last run, one a head
  DeviceArray<T> between_[2];  // states, one a head, from one piece of the outputs to the next
};

}  // namespace longscan
