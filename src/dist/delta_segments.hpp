// SPDX-License-Identifier: Apache-2.0
#pragma once
// A part in segments, as a device solves it to be filled, and every rank with --reproducible. The states at the borders
// between segments come first: from maps of horizons, as long as all is forgotten before them, or of whole segments,
// one after another. With --reproducible always the latter, and segments that do not depend on how tokens are cut.
#include <vector>

#include "dist/delta_part.hpp"
#include "dist/segment_plan.hpp"

namespace longscan {

template <class T>
class DeltaSegments {
 public:
  explicit DeltaSegments(DeltaPart<T>& part) : part_(part) {}
  /// Whether parts are solved in segments: the same on all ranks.
  static bool used(const DeltaOptions& options) {
    return options.reproducible || options.segment > 0 || !is_host_space<typename DeltaPasses<T>::Space>;
  }
  /// How parts with these passes are cut.
  static SegmentRules rules(const DeltaShape& shape, const DeltaOptions& options, const DeltaPasses<T>& passes);

  void begin();

  /// The part in the scan over the ranks: the maps of the first run's segments, or one a head after `join_maps`.
  ScanPart<T> share(std::vector<char> known = {}) const;
  void join_maps();

  /// The maps before all borders, as far back as `horizons` says; with `reproducible` those of whole segments. Then the
  /// states at the borders and `outgoing`, as far as they do not depend on `incoming`. Returns for which heads that
  /// holds.
  std::vector<char> find_outgoing(Horizons horizons);
  /// For heads [begin, end): the states that depend on `incoming`.
  void advance(std::int64_t begin, std::int64_t end);
  /// `incoming` is there for all heads.
  void arrive();

  /// All outputs, final and recorded states, and the state at the end of the last run.
  PassSummary outputs();
  /// Borders that were taken to be independent of what came before, and are not, now that `outputs` has seen that.
  std::int64_t wrong();
  /// The horizons that were tried first were enough, so that the next window may take them to be.
  bool first_horizons_do() const;
  std::int64_t borders() const { return static_cast<std::int64_t>(borders_.size()); }

  /// Adds what was passed on, and from how many tokens.
  void report_boundaries(DeltaReport& report) const;
  std::int64_t segments() const { return plan_.segments() * part_.shape.heads; }
  /// For `tokens` tokens in so many runs.
  std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t runs, std::int64_t shortest) const;

 private:
  using Task = DeltaTask<T>;
  Border& border(std::int64_t run, std::int64_t j, std::int64_t head) {
    return borders_[plan_.map(run, j) * part_.shape.heads + head];
  }
  void map_borders(Horizons horizons);
  void look();
  void scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end, bool leading);
  void scan_first_run(std::int64_t begin, std::int64_t end) { scan_runs(0, 1, begin, end, true); }
  void take_last_border(std::int64_t begin, std::int64_t end);
  std::vector<char> first_run_forgets() const;
  std::vector<Task> tasks();
  std::vector<Task> end_copies() const;
  bool finite() const;

  DeltaPart<T>& part_;
  SegmentPlan plan_;
  std::vector<Border> borders_;  // [map][head], those behind the maps
  DeviceArray<T> maps_;          // [map][head]
  DeviceArray<T> states_;        // [border][head]
  DeviceArray<T> joined_, spare_;
  bool joins_ = false;    // joined_ is this part's share of the scan
  bool chained_ = false;  // some state came through maps, which may overflow where outputs do not
  bool dirty_ = false;    // a solve did not end well: states that are not written in the next one may not be finite
  std::int64_t map_breaches_ = 0;
  Uploaded<AffineChain> chains_;
};

/// Maps of a head in the scan over the ranks: of a rank that solves `tokens` tokens of a sequence of `length` tokens.
/// Depends on the types and strides of `in` and `out` and on the device; what the pointers point to is not looked at.
std::int64_t scan_maps(const DeltaShape& shape, const DeltaOptions& options, const DeltaInputs& in,
                       const DeltaOutputs& out, std::int64_t tokens, std::int64_t length);

}  // namespace longscan
