// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of a window that one rank holds: its runs, the states at its two ends, and the maps of the tokens before a
// border, as far back as the state there depends on them. What DeltaWhole and DeltaSegments, the two ways to find the
// states that a part starts from and leaves behind, share. Waits where the host needs a result; does not communicate.
#include <cstdint>
#include <vector>

#include "dist/delta_axis.hpp"
#include "dist/delta_passes.hpp"
#include "dist/exclusive_scan.hpp"

namespace longscan {

/// How far back the maps before borders go.
enum class Horizons {
  none,       ///< whole segments or parts: nothing is taken to be forgotten
  measured,   ///< to where P vanishes
  remembered  ///< as far as was enough for all in the window before, without P: outputs show whether the state is L
};

/// A state that is wanted before the outputs: the map of the tokens before it.
struct Border {
  std::int64_t slot = 0;   ///< of the map
  std::int64_t end = 0;    ///< the border is before this token
  std::int64_t limit = 0;  ///< tokens that the map may cover at most
  int head = 0;
  std::int64_t covered = 0;
  double P = 0, L = 0;      ///< Frobenius norms
  bool forgets = false;     ///< P vanishes: the state is L, whatever came before
  bool remembered = false;  ///< P was not made
};

template <class T>
class DeltaPart {
 public:
  using Task = DeltaTask<T>;

  DeltaPart(const DeltaShape& shape, const DeltaOptions& options)
      : shape(shape), options(options), slots(shape), passes(shape, options) {}

  /// The window's data, its runs, where each stands in the counting of `state_every`, and its neighbours.
  void begin(const DeltaInputs& in, const DeltaOutputs& out, std::vector<Run> runs, std::vector<StatesPlace> places,
             ScanLinks links);

  /// The first run continues a sequence: its state is `incoming`.
  bool first_continues() const { return !runs.empty() && !runs.front().starts; }
  /// The state before a run: given by the user, come in from elsewhere, or zero (null).
  StateRef<const T> start_of(std::int64_t run, int head) const;
  /// Where the state behind a run goes: to the user, to `arrived`, or nowhere.
  StateRef<T> end_of(std::int64_t run, int head) const;
  /// Outputs or recorded states are asked for, not final states alone.
  bool computes_outputs() const { return out_.o || out_.states; }
  const DeltaOutputs& out() const { return out_; }

  /// This part in the scan over the ranks, with the maps [head] that it has.
  ScanPart<T> share(std::vector<char> known, const DeviceArray<T>& maps) const;

  /// The maps of the last tokens before each border. With `forgetting` as few as let P vanish, else as many as the
  /// border's limit allows: maps of the tokens before are joined to those that there are.
  PassSummary map_borders(std::vector<Border>& borders, DeviceArray<T>& maps, bool forgetting);
  /// L of as many tokens before each border as are tried first, which are taken to be enough. P is not made.
  /// Asynchronous where tensor cores take it; `not_forgotten` finds all borders wrong if they did not hold the numbers.
  void recall_borders(std::vector<Border>& borders, DeviceArray<T>& maps);
  /// Launches a look at `probes`, what outputs saw of the states that were taken not to matter. Border i's is in slot
  /// i: the state before its horizon or, if that is remembered, at the border. Remembered are all of them or none.
  void look_at_probes(const std::vector<Border>& borders, const DeviceArray<T>& maps);
  /// Of the borders that were taken to forget, those that do not, by the look at `probes`, which is over.
  std::vector<char> not_forgotten(const std::vector<Border>& borders);
  /// Point out = the constant L of map `map`, task by task. Asynchronous.
  void take_constants(const DeviceArray<T>& maps, const DeviceArray<T>& points, const std::vector<AffineTask>& tasks);

  /// `outgoing` becomes the state that the outputs arrived at, for the marked heads.
  void take_arrived(const std::vector<char>& heads);

  /// Bytes of working memory with so many states and maps a head.
  std::int64_t workspace_bytes(std::int64_t states, std::int64_t maps) const;
  std::int64_t state_bytes() const { return slots.state_size * static_cast<std::int64_t>(sizeof(T)); }

  const DeltaShape shape;
  const DeltaOptions options;
  const DeltaSlots<T> slots;
  DeltaPasses<T> passes;
  typename DeltaPasses<T>::Space space;
  ScanLinks links;
  std::vector<Run> runs;
  std::vector<StatesPlace> places;
  bool first_horizons_do = false;  ///< P vanished at the first try before all borders that were last looked at
  std::int64_t mapped_tokens = 0;  ///< passed over for a map or an end state, heads counted
  /// States, one a head: before the part's first token, after its last, and that after the last as outputs find it.
  DeviceArray<T> incoming, outgoing, arrived;
  DeviceArray<T> probes;  ///< the states before horizons, or at borders, as outputs find them
  Uploaded<AffineTask> joins;

 private:
  std::int64_t aligned(const Border& border, double tokens) const;
  std::int64_t first_horizon(const Border& border) const;
  double rounding() const;
  double vanishing() const { return rounding() / 16; }

  DeltaInputs in_;
  DeltaOutputs out_;
  std::vector<std::int64_t> start_index_, end_index_;  // per run, in the user's states
  DeviceArray<T> new_maps_, composed_;
  DeviceArray<double> norms_, probe_norms_;
  Fetched<double> found_norms_, found_probes_;
};

}  // namespace longscan
