// SPDX-License-Identifier: Apache-2.0
#pragma once
// What happens between two shooting passes, on the device: starts of segments are compared with what arrives there.
// `state` values of `channels` channels a slot, one after the other. Launches; those that return something wait.
#include <limits>

#include "core/device_memory.hpp"
#include "local/cell_kernel.hpp"

namespace longscan {

/// What the borders look like after a pass. Jumps are arriving - start.
struct BorderVerdict {
  std::int64_t left = 0;          ///< lanes to run again
  double worst = 0;               ///< largest jump; infinite if one is not finite
  std::int64_t first_token = -1;  ///< of the first segment whose start differs; -1: none
  double squares = 0;             ///< sum of ShootingArrays::squares
  /// Over the channels of a part that is one run, from its LaneGrowth: the largest sum of the growth, of that along
  /// consecutive tokens, and bound on the error.
  float total = -std::numeric_limits<float>::infinity(), best = 0, error_most = 0;
};

/// A stretch of slots within one run.
struct GrowthPiece {
  std::int64_t begin = 0, end = 0, run = 0;
  bool operator==(const GrowthPiece&) const = default;
};
/// Growth over a part, by channel: of the first run, of the last one if it is another, of the rest together. (Their
/// tokens are not counted.)
struct PartGrowth {
  GrowthSums first, last, rest;
};

/// A state that comes from elsewhere to the part's first segment, in memory that kernels reach; null: none does.
template <class T>
using Arriving = const T*;

/// starts of the runs' first segments <- states [runs][size]. Launches "longscan::shooting::place".
template <class T>
void place_starts(const SegmentGrid& grid, std::int64_t size, const T* states, T* starts);
/// states before and after each run, out of starts and ends, to memory that kernels reach. Launches
/// "longscan::shooting::collect".
template <class T>
void collect_states(const SegmentGrid& grid, std::int64_t size, const T* starts, const T* ends, T* before, T* after);

/// A verdict on its way to the host, which knows by the number that it is there.
struct PostedVerdict {
  BorderVerdict verdict;
  std::uint64_t number = 0;
};

/// What a verdict over a part is made in: a team leaves its share, and the last one sums all up, in a fixed order.
struct VerdictPlaces {
  std::int64_t teams = 0;
  BorderVerdict* shares = nullptr;
  int* finished = nullptr;  ///< teams; zero between launches
  PostedVerdict* posted = nullptr;
  std::uint64_t number = 0;
};
class VerdictWork {
 public:
  VerdictPlaces prepare(std::int64_t teams);
  /// Waits for what has been launched with these places. A device's kernel posts the verdict as the last thing that it
  /// does, so that the host need not wait until the stream has learnt of its end.
  BorderVerdict wait(const VerdictPlaces& places) const;

 private:
  DeviceArray<BorderVerdict> shares_;
  DeviceArray<int> finished_;
  SharedVector<PostedVerdict> posted_;
  std::uint64_t number_ = 0;
};

/// Channels that do not mix: every start that has other bits than what arrives is replaced, its lane becomes active,
/// the others do not. `jumps` [slots][size] as they were. Launches "longscan::shooting::compare" and waits.
template <class T>
BorderVerdict compare_lanes(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes,
                            Arriving<T> arriving, T* jumps);
/// The same for a part that is one run, with what else is wanted of a pass in the same launch: states as collect_states
/// leaves them, and, unless `lanes` has none, the growth over all slots: its largest values over the channels, and
/// itself by channel, in memory that kernels reach, unless `growth` is null.
template <class T>
BorderVerdict compare_run(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes,
                          Arriving<T> arriving, T* jumps, T* before, T* after, PartGrowth* growth, VerdictWork& work);

/// Channels that mix: largest jump of each slot, infinite if one is not finite; sums up squares unless that is null;
/// states as collect_states leaves them. Launches "longscan::shooting::jumps" and waits.
template <class T>
BorderVerdict measure_jumps(const SegmentGrid& grid, std::int64_t size, std::int64_t channels,
                            const ShootingArrays<T>& lanes, Arriving<T> arriving, double* jumps, T* before, T* after,
                            VerdictWork& work);
/// Starts whose jump is above `limit` are replaced and become active. Launches "longscan::shooting::hand_over" and
/// waits.
template <class T>
BorderVerdict hand_over(const SegmentGrid& grid, std::int64_t size, const ShootingArrays<T>& lanes,
                        Arriving<T> arriving, const double* jumps, double limit);

/// Starts have been handed over; here they move on by what the jumps further back will change,
///     delta_{j+1} = P_j delta_j + jump_{j+1}, delta = 0 at exact starts: start_{j+1} += P_j delta_j,
/// P_j being left out where a row of it sums up to more than `largest`. States of one or two values. `in` [channels]
/// [state]: P delta of the border before the part. Launches "longscan::shooting::newton".
template <class T>
void newton_lanes(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes, const T* jumps,
                  const T* in, double largest);
/// What the part does to that delta: the map from `in` to P delta of its last border, [A | b] of channel d in slot d;
/// b alone in `constants` [channels][state]. What overflows is zero. Launches "longscan::shooting::maps".
template <class T>
void newton_maps(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes, const T* jumps,
                 double largest, const AffineMaps<T>& maps, T* constants);

/// Of a part of several runs: `pieces` and `stretches` [count][channels] (to work in) on the device; `out` [channels]
/// in memory that kernels reach. Launches "longscan::shooting::growth" twice.
void fold_growth(const GrowthPiece* pieces, std::int64_t count, std::int64_t runs, int channels,
                 const LaneGrowth* growth, LaneGrowth* stretches, PartGrowth* out);

}  // namespace longscan
