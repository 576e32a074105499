// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one rank computes of the delta rule: maps of token ranges, boundary states, outputs. Owns the working memory,
// launches, and waits where the host needs a result. Does not communicate.
#include <cstdint>
#include <vector>

#include "local/affine_scan.hpp"
#include "local/delta_pass.hpp"
#include "longscan/delta_rule.hpp"

namespace longscan {

/// The first result that is not finite.
struct BadToken {
  std::int64_t token = -1;  ///< in the part; -1 is none
  int head = 0;
};

/// Totals over the tasks of a pass.
struct PassSummary {
  std::int64_t breaches = 0, fallbacks = 0, terms = 0;
  BadToken bad;
  std::vector<BadToken> all_bad;  ///< one a task that met one, to the start of its chunk
};

/// Where a run stands in the counting of `state_every`.
struct StatesPlace {
  std::int64_t position = 0;  ///< of the run's first token
  std::int64_t offset = 0;    ///< entry of `states` for count 0
};

template <class T>
class DeltaPart {
 public:
  using Space = Kokkos::DefaultExecutionSpace;
  template <class E>
  using Array = Kokkos::View<E*, typename Space::memory_space>;
  using HostArray = typename Array<T>::HostMirror;

  DeltaPart(const DeltaShape& shape, const DeltaOptions& options);

  /// The window's data, its runs, and where each stands in the counting of `state_every`.
  void begin(const DeltaInputs& in, const DeltaOutputs& out, std::vector<Run> runs, std::vector<StatesPlace> places);

  const std::vector<Run>& runs() const { return runs_; }
  int heads() const { return shape_.heads; }
  std::int64_t state_bytes() const { return state_size_ * static_cast<std::int64_t>(sizeof(T)); }

  /// States at the part's two ends, one a head, on the host: before its first token, after its last.
  HostArray incoming, outgoing;
  /// The first run continues a sequence: its state is `incoming`.
  bool first_continues() const { return !runs_.empty() && !runs_.front().starts; }

  // --- boundary states -----------------------------------------------------------------------------------------------
  /// Maps of the last tokens of the last run, extended until P vanishes or `limit` tokens are covered. For heads that
  /// forget, `outgoing` is the state at the end. Returns which heads forget.
  std::vector<char> map_until_forgotten(std::int64_t limit);
  /// For the heads not in `known`: `outgoing` from the state before the last run, which this rank has, by a pass over
  /// the tokens that the map does not cover, and the map.
  void run_to_end(const std::vector<char>& known);
  /// For heads [begin, end) not in `known`: `outgoing` = map(`incoming`), the maps covering the whole run.
  void advance(std::int64_t begin, std::int64_t end, const std::vector<char>& known);
  /// Whether the heads that forget really did, now that `outputs` has seen the state before the horizon.
  std::vector<char> not_forgotten(const std::vector<char>& forgets) const;
  /// `outgoing` becomes the state that `outputs` arrived at, for the marked heads.
  void take_true_end(const std::vector<char>& heads);
  const std::vector<std::int64_t>& horizons() const { return covered_; }

  // --- segments: the same bits for any cut ---------------------------------------------------------------------------
  /// The maps of all segments, and the states at their borders in all runs, except the first if `first_continues`.
  void map_segments();
  /// For heads [begin, end): the states at the borders of the first run's segments, from `incoming`.
  void scan_first_run(std::int64_t begin, std::int64_t end);
  /// For heads [begin, end): `outgoing` is the state at the last border of the last run.
  void take_segment_end(std::int64_t begin, std::int64_t end);

  // --- outputs -------------------------------------------------------------------------------------------------------
  /// All outputs, final and recorded states, and the state at the end of the last run (for the marked heads; all if
  /// empty).
  PassSummary outputs(const std::vector<char>& heads = {});
  std::int64_t mapped_tokens() const { return mapped_tokens_; }
  /// Bytes of working memory, with the segments of `segment_tokens` tokens.
  std::int64_t workspace_bytes(std::int64_t segmented_tokens) const;

 private:
  using Task = DeltaTask<T>;
  DeltaRules rules(bool outputs, bool map) const;
  PassSummary pass(const std::vector<Task>& tasks, const DeltaRules& rules);
  BadToken locate(const Task& task, std::int64_t chunk_begin);
  StateRef<T> state(const Array<T>& slots, std::int64_t slot) const;
  StateRef<T> map_slot(const Array<T>& slots, std::int64_t slot) const;
  AffineMaps<T> maps(const Array<T>& slots) const;
  StateRef<const T> start_of(std::int64_t run, int head) const;
  std::int64_t segments_of(const Run& run) const;
  std::vector<Task> segment_tasks(bool outputs) const;
  void scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end);

  DeltaShape shape_;
  DeltaOptions options_;
  Space space_;
  int state_leading_, map_leading_;
  std::int64_t state_size_, map_size_;
  DeltaInputs in_;
  DeltaOutputs out_;
  std::vector<Run> runs_;
  std::vector<std::int64_t> start_index_, end_index_;  // per run
  std::vector<StatesPlace> places_;
  std::int64_t mapped_tokens_ = 0, segment_breaches_ = 0;
  std::vector<std::int64_t> covered_;  // tokens that maps_[head] covers
  std::vector<double> map_norms_;      // |P|, |L| a head
  Array<T> in_states_, out_states_, end_states_, probes_;
  Array<T> maps_, new_maps_, composed_;
  Array<T> segment_maps_, segment_states_;   // reproducible: [segment][head], [border][head]
  std::vector<std::int64_t> segment_first_;  // per run: its first segment; borders start at that + run
};

/// Tokens of a segment of a sequence of `length` tokens with --reproducible: a function of the length alone.
std::int64_t segment_tokens(std::int64_t length);

}  // namespace longscan
