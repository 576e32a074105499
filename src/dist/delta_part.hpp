// SPDX-License-Identifier: Apache-2.0
#pragma once
// What one rank computes of the delta rule: maps of token ranges, boundary states, outputs. Owns the working memory,
// launches, and waits where the host needs a result. Does not communicate.
#include <cstdint>
#include <vector>

#include "core/device_memory.hpp"
#include "dist/exclusive_scan.hpp"
#include "local/affine_scan.hpp"
#include "local/delta_pass.hpp"
#include "local/delta_tensor.hpp"
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

/// A state that is wanted before the outputs: the map of the tokens before it.
struct Border {
  std::int64_t slot = 0;   ///< of the map
  std::int64_t end = 0;    ///< the border is before this token
  std::int64_t limit = 0;  ///< tokens that the map may cover at most
  int head = 0;
  std::int64_t covered = 0;
  double P = 0, L = 0;   ///< Frobenius norms
  bool forgets = false;  ///< P vanishes: the state is L, whatever came before
};

/// Host values that kernels read: copied to the device, or there already.
template <class E>
class Uploaded {
 public:
  template <class Space>
  const E* operator()(const Space& space, const std::vector<E>& values) {
    if constexpr (is_host_space<Space>) {
      space.fence();  // kernels may still read the values before
      kept_ = values;
      return kept_.data();
    } else {
      space.fence();
      staged_.assign(values.begin(), values.end());
      const auto n = static_cast<std::int64_t>(values.size());
      if (static_cast<std::int64_t>(device_.extent(0)) < n) {
        device_ = {};
        device_ = DeviceArray<E>(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string("longscan::tasks")), n);
      }
      using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
      Kokkos::deep_copy(space, Kokkos::View<E*, typename Space::memory_space, Unmanaged>(device_.data(), n),
                        Kokkos::View<const E*, SharedSpace, Unmanaged>(staged_.data(), n));
      return device_.data();
    }
  }

 private:
  std::vector<E> kept_;
  SharedVector<E> staged_;
  DeviceArray<E> device_;
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

  DeltaPart(const DeltaShape& shape, const DeltaOptions& options);

  /// The window's data, its runs, and where each stands in the counting of `state_every`.
  /// `passes_on`: the state behind the last run is wanted before the outputs.
  void begin(const DeltaInputs& in, const DeltaOutputs& out, std::vector<Run> runs, std::vector<StatesPlace> places,
             bool passes_on);

  /// Tokens are cut into segments, which are solved side by side. The same on all ranks.
  bool segmented() const { return options_.reproducible || options_.segment > 0 || !is_host_space<Space>; }

  const std::vector<Run>& runs() const { return runs_; }
  int heads() const { return shape_.heads; }
  std::int64_t state_bytes() const { return state_size_ * static_cast<std::int64_t>(sizeof(T)); }

  /// States at the part's two ends, one a head: before its first token, after its last.
  Array<T> incoming, outgoing;
  AffinePoints<T> points(const Array<T>& states) const { return {states.data(), state_leading_, state_size_}; }
  /// This part in the scan over the ranks; the maps are those of the last run (reproducible: of its segments).
  /// `joined`: one map a head, after `join_maps`.
  ScanPart<T> share(ScanLinks links, std::vector<char> known, bool joined = false) const;
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

  // --- segments ------------------------------------------------------------------------------------------------------
  /// The maps before all borders between segments, as far back as the state there depends on tokens; with
  /// `reproducible` or without `forgetting` those of whole segments. Then the states at the borders, except those that
  /// depend on `incoming`.
  void map_segments(bool forgetting);
  /// For heads [begin, end): the states at the borders of the first run's segments that depend on `incoming`.
  void scan_first_run(std::int64_t begin, std::int64_t end);
  /// For heads [begin, end): `outgoing` is the state at the last border of the last run.
  void take_segment_end(std::int64_t begin, std::int64_t end);
  /// The maps of the first run's segments become one a head.
  void join_maps();
  /// Heads whose state at the end of the first run does not depend on `incoming`.
  std::vector<char> first_run_forgets() const;
  /// Borders that were taken to be independent of what came before, and are not, now that `outputs` has seen that.
  std::int64_t wrong_borders();
  const std::vector<Border>& borders() const { return borders_; }
  std::int64_t segments() const { return segmented() ? segment_first_.back() * shape_.heads : 0; }
  std::int64_t tensor_tasks() const { return tensor_tasks_; }
  std::int64_t general_tasks() const { return general_tasks_; }

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
  DeltaPass<T> describe(const DeltaRules& rules) const;
  PassSummary pass(const std::vector<Task>& tasks, const DeltaRules& rules);
  PassSummary general_pass(const std::vector<Task>& tasks, const DeltaRules& rules);
  BadToken locate(const Task& task, std::int64_t chunk_begin);
  StateRef<T> state(const Array<T>& slots, std::int64_t slot) const;
  StateRef<T> map_slot(const Array<T>& slots, std::int64_t slot) const;
  AffineMaps<T> maps(const Array<T>& slots) const;
  StateRef<const T> start_of(std::int64_t run, int head) const;
  void map_borders(std::vector<Border>& borders, Array<T>& slots, bool forgetting);
  std::vector<double> norms_of(const Array<T>& slots, std::int64_t count);
  bool finite(const Array<T>& slots) const;
  double vanishing() const;
  int tensor_side_by_side() const;
  void plan_segments(bool passes_on);
  std::int64_t segments_of(std::int64_t run) const { return segment_first_[run + 1] - segment_first_[run]; }
  std::int64_t maps_of(std::int64_t run) const { return map_first_[run + 1] - map_first_[run]; }
  TokenRange segment(std::int64_t run, std::int64_t j) const;
  std::vector<Task> segment_tasks();
  void scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end, bool leading);

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
  std::int64_t mapped_tokens_ = 0, segment_breaches_ = 0, tensor_tasks_ = 0, general_tasks_ = 0;
  std::vector<std::int64_t> covered_;  // tokens that maps_[head] covers
  std::vector<double> map_norms_;      // |P|, |L| a head
  Array<T> end_states_, probes_;
  Array<T> maps_, new_maps_, composed_;
  Array<double> norms_;
  Array<DeltaCounts> counts_;
  // per run, and one behind the last: its first segment, map and border. Slots are [segment or border][head].
  std::vector<std::int64_t> segment_first_, map_first_, border_first_, segment_tokens_;
  Array<T> segment_maps_, border_states_;
  std::vector<Border> borders_;  // [map][head]
  bool chained_ = false;         // some border state came through maps, which may overflow where outputs do not
  DeltaTensor tensor_;
  Uploaded<Task> tasks_;
  Uploaded<AffineTask> joins_;
  Uploaded<AffineChain> chains_;
};

/// Tokens of a segment of a sequence of `length` tokens with --reproducible: a function of the length alone.
std::int64_t segment_tokens(std::int64_t length);

}  // namespace longscan
