// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the Newton solver needs of a cell on one rank, whatever the cell: the recurrence over segments of tokens, and
// the linearisation along a trajectory. Launches; no communication.
//
// A layer has D channels with `state()` values each; a state is [state][D], a token's inputs are [inputs][D]. Jacobians
// are `blocks()` square blocks of `block()` rows: D blocks of `state` rows where channels do not mix, else one of all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/affine.hpp"
#include "core/portable.hpp"

namespace longscan {

/// How inputs and states are stored: as the arithmetic has them, or in 16 bits.
enum class Stored : int { as_arithmetic, bf16, f16 };

/// The inputs and states of the tokens of a part, on the device. Token t is at t * stride; a negative stride reads time
/// backwards. Where they are stored in 16 bits, x and h point at those, and strides count them; only kernels that say
/// so (CellKernel::takes_stored) are given such a path, and only for `run`, `shoot` and `walk`.
template <class T>
struct CellTrajectory {
  const T* x = nullptr;
  std::int64_t x_stride = 0;
  T* h = nullptr;
  std::int64_t h_stride = 0;
  Stored stored = Stored::as_arithmetic;
  KOKKOS_INLINE_FUNCTION T* at(std::int64_t t) const { return h + t * h_stride; }
};

/// Tokens [begin, end) from the state in `start`; before them `warm_up` tokens whose states are not kept, from the
/// state in `from` (-1: zero), which set `start`.
struct CellSegment {
  std::int64_t begin = 0, end = 0;
  std::int64_t slot = 0;  ///< of starts and ends
  std::int64_t warm_up = 0;
  std::int64_t from = -1;  ///< slot of starts where the warm-up begins, if it reaches a known state
  int channel_begin = 0, channel_end = 0;
};

/// A sequence's tokens in the part: the state before them, [state][D].
template <class T>
struct CellRun {
  std::int64_t begin = 0, end = 0;
  const T* start = nullptr;
  bool exact = false;  ///< the sequence starts here: nothing that a Newton step changes comes in
};

/// Sums along the trajectory of one channel (of the whole layer where channels mix). `log` values are of the growth of
/// a small error from token to token; prefix, suffix and best are the largest sums over tokens from the start, up to
/// the end, and anywhere, 0 for none. Neighbours combine associatively.
struct GrowthSums {
  double total = 0, prefix = 0, suffix = 0, best = 0;
  double norm_total = 0, norm_prefix = 0;  ///< the same of |A|, which bounds the growth of a bound
  double error = 0, error_most = 0;        ///< bound on the error at the end, and the largest
  std::int64_t tokens = 0;

  KOKKOS_INLINE_FUNCTION void add(double log_growth, double log_norm) {
    total += log_growth, norm_total += log_norm, ++tokens;
    prefix = total > prefix ? total : prefix;
    norm_prefix = norm_total > norm_prefix ? norm_total : norm_prefix;
    suffix = suffix + log_growth > 0 ? suffix + log_growth : 0;
    best = suffix > best ? suffix : best;
  }
};

/// `a`, then `b`.
KOKKOS_INLINE_FUNCTION GrowthSums combine(const GrowthSums& a, const GrowthSums& b) {
  const auto larger = [](double x, double y) { return x < y ? y : x; };
  GrowthSums c;
  c.total = a.total + b.total, c.norm_total = a.norm_total + b.norm_total, c.tokens = a.tokens + b.tokens;
  c.prefix = larger(a.prefix, a.total + b.prefix), c.suffix = larger(b.suffix, b.total + a.suffix);
  c.best = larger(larger(a.best, b.best), a.suffix + b.prefix);
  c.norm_prefix = larger(a.norm_prefix, a.norm_total + b.norm_prefix);
  c.error = exp(b.norm_total) * a.error + b.error;
  c.error_most = larger(a.error_most, exp(b.norm_prefix) * a.error + b.error_most);
  return c;
}

/// Tokens times numbers that `look` is asked for at most. `quick`: on a device a walk token by token is slow beside a
/// solve that needs none.
inline std::int64_t look_budget(bool mixes, std::int64_t size, bool quick) {
  const std::int64_t cost = mixes ? size * size : size;
  return quick ? (mixes ? 16 : 64) * cost : std::int64_t{1} << (mixes ? 22 : 16);
}
/// Whether growth is looked at along every token of a part of so many (else along a stretch at the start of each run),
/// and its sums pass from rank to rank.
inline bool looks_at_all(bool mixes, std::int64_t size, std::int64_t tokens) {
  const bool quick = !is_host_space<Kokkos::DefaultExecutionSpace>;
  return tokens * (mixes ? size * size : size) <= look_budget(mixes, size, quick);
}

/// GrowthSums as devices sum them up along segments: in float32, `factor` and `factor_most` being what a bound on an
/// error is multiplied with, up to the end and at most, so that neighbours combine without an exponential.
struct alignas(16) LaneGrowth {
  float total = 0, prefix = 0, suffix = 0, best = 0, factor = 1, factor_most = 1, error = 0, error_most = 0;
};
KOKKOS_INLINE_FUNCTION LaneGrowth combine(const LaneGrowth& a, const LaneGrowth& b) {
  const auto larger = [](float x, float y) { return x < y ? y : x; };
  const auto product = [](float x, float y) { return x * y < 1e36f ? x * y : 1e36f; };  // 0 times infinity is neither
  LaneGrowth c;
  c.total = a.total + b.total, c.prefix = larger(a.prefix, a.total + b.prefix);
  c.suffix = larger(b.suffix, b.total + a.suffix);
  c.best = larger(larger(a.best, b.best), a.suffix + b.prefix);
  c.factor = product(a.factor, b.factor), c.factor_most = larger(a.factor_most, product(a.factor, b.factor_most));
  c.error = product(b.factor, a.error) + b.error;
  c.error_most = larger(a.error_most, product(b.factor_most, a.error) + b.error_most);
  return c;
}

/// A sequence's tokens [begin, end) of a part, cut into segments: slots from `slot` on.
struct SegmentRun {
  std::int64_t begin = 0, end = 0, slot = 0;
  bool exact = false;  ///< the state before it is known for good
};

/// All segments of a part: `tokens` tokens each, but for the last of a run; slots count them in order. A run without
/// tokens has one segment without tokens.
struct SegmentGrid {
  std::int64_t tokens = 1, warm_up = 0, slots = 0, runs = 0;
  SegmentRun first;                     ///< the first run
  const SegmentRun* table = nullptr;    ///< all of them, for kernels; not needed for one
  const SegmentRun* on_host = nullptr;  ///< the same for the host
  KOKKOS_INLINE_FUNCTION SegmentRun run_of(std::int64_t slot) const {
    return runs == 1 ? first : table[index_of(slot)];
  }
  /// Of the run that a slot is in.
  KOKKOS_INLINE_FUNCTION std::int64_t index_of(std::int64_t slot) const { return index_of(slot, table); }
  KOKKOS_INLINE_FUNCTION std::int64_t index_of(std::int64_t slot, const SegmentRun* table) const {
    std::int64_t low = 0, high = runs;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      if (table[middle].slot <= slot)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t begin(const SegmentRun& run, std::int64_t slot) const {
    return run.begin + (slot - run.slot) * tokens;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t end(const SegmentRun& run, std::int64_t slot) const {
    const std::int64_t e = begin(run, slot) + tokens;
    return e < run.end ? e : run.end;
  }
};

/// What a shooting pass over a grid reads and leaves, on the device. A lane is what is run again by itself: a channel
/// of a segment, or, where channels mix, a segment.
template <class T>
struct ShootingArrays {
  /// [runs][state][channels], in memory that kernels reach: states before the runs, where those are exact.
  const T* initial = nullptr;
  T *starts = nullptr, *ends = nullptr;  ///< [slots][state][channels]
  unsigned char* active = nullptr;       ///< [slots][channels], or [slots]: lanes to run
  double* squares = nullptr;             ///< [slots][channels]: sum of h^2; not finite if a state is not
  T* products = nullptr;                 ///< [slots][state][state][channels]: of the Jacobians
  LaneGrowth* growth = nullptr;          ///< [slots][channels]
};

/// What a sweep of a full-trajectory method finds on one channel of a segment. Tokens are the part's.
struct SweepVerdict {
  static constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
  static constexpr double infinite = std::numeric_limits<double>::infinity();
  double squares = 0;  ///< sum of h^2 over tokens whose states are finite
  double worst = 0;    ///< largest residual; infinite if one is not finite
  /// First token with a residual above the limit, above what may be rounding, that is not finite; whose state is not.
  std::int64_t wrong = none, beyond = none, lost = none, bad = none;
};

struct SweepOptions {
  Reshape how = Reshape::keep;
  bool diagonal = false;  ///< the diagonal of A alone, as in linearize
  bool maps = true;       ///< a fold leaves maps
  double limit = 0, rounding = 0;
};

/// What sweeps over a grid read and leave, on the device. Blocks as in linearize, deltas of a state [blocks][rows].
template <class T>
struct SweepArrays {
  const T* starts = nullptr;         ///< [runs][state_size]: states before the runs
  T* tails = nullptr;                ///< [slots][state_size]: a fold leaves the last state of each segment
  AffineMaps<T> maps;                ///< what a segment does to a delta, block b in slot * blocks + b
  const T* deltas = nullptr;         ///< [slots][state_size]: the delta that arrives, for a move
  SweepVerdict* verdicts = nullptr;  ///< [slots][channels]
};

template <class T>
class CellKernel {
 public:
  virtual ~CellKernel() = default;
  virtual int channels() const = 0;
  virtual int state() const = 0;
  virtual int inputs() const = 0;
  virtual bool mixes() const = 0;  ///< channels mix (dense Jacobian)
  virtual bool takes_stored() const { return false; }
  int block() const { return mixes() ? state() * channels() : state(); }
  int blocks() const { return mixes() ? 1 : channels(); }
  std::int64_t state_size() const { return static_cast<std::int64_t>(state()) * channels(); }

  /// The recurrence over segments, side by side. starts, ends: slots of `state_size` values that kernels reach. Writes
  /// the states of the segments' tokens where `keep`. The bits of a token depend on its inputs and the state before
  /// alone. Waits: the host looks at ends.
  virtual void run(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
                   bool keep) const = 0;
  /// A shooting pass: all segments, from initial states or after their warm-ups, which set their starts, if `first`,
  /// else the active lanes from their starts. Does not wait.
  virtual void shoot(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
                     bool first) const = 0;
  /// Which of ShootingArrays `shoot` fills in beside starts and ends.
  virtual bool shoots_squares() const { return false; }
  virtual bool shoots_growth() const { return false; }
  /// Segments that a device runs at once, and the tokens that it warms up unless told otherwise.
  virtual std::int64_t side_by_side() const { return 1; }
  virtual std::int64_t usual_warm_up() const { return sizeof(T) == 8 ? 256 : 128; }
  /// Channel after channel through the segments of each run, from the first that is active or starts from other bits
  /// than arrive (`arriving`: at the first run, null if its start is exact). For channels that do not mix.
  virtual void walk(const CellTrajectory<T>&, const SegmentGrid&, const ShootingArrays<T>&,
                    const T* /*arriving*/) const {}
  /// h_t = f(0, x_t) for tokens [begin, end): where full-trajectory methods start.
  virtual void guess(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end) const = 0;
  /// For tokens [begin, end) of a run: slot (t - begin) * blocks + b of `maps` becomes [A_t | -r_t] with
  /// r_t = h_t - f(h_{t-1}, x_t), A_t the Jacobian at h_{t-1}; `before` is the state before token begin.
  /// `diagonal`: the diagonal of A alone, as blocks of one row.
  virtual void linearize(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                         AffineMaps<T> maps, bool diagonal) const = 0;
  /// Whether full-trajectory methods go by sweeps over segments, which keep no Jacobian: a fold evaluates residuals and
  /// leaves the product of (reshaped) Jacobians and what residuals add up to, a move adds the deltas.
  virtual bool sweeps(bool /*diagonal*/) const { return false; }
  /// Segments that are swept at once, and the most tokens that one may have.
  virtual std::int64_t sweeps_at_once(bool /*diagonal*/) const { return side_by_side(); }
  virtual std::int64_t longest_sweep(bool /*diagonal*/) const { return std::numeric_limits<std::int64_t>::max(); }
  /// Slots [first, last) of the grid: tails, maps, verdicts. At the exact start of a run A is zero.
  virtual void fold(const CellTrajectory<T>&, const SegmentGrid&, std::int64_t /*first*/, std::int64_t /*last*/,
                    const SweepArrays<T>&, const SweepOptions&) const {}
  /// h += delta in slots [first, last) after a fold, value by value where the sum is finite; the first slot takes no
  /// delta where its run starts exactly.
  virtual void move(const CellTrajectory<T>&, const SegmentGrid&, std::int64_t /*first*/, std::int64_t /*last*/,
                    const SweepArrays<T>&, const SweepOptions&) const {}
  /// Growth along tokens [begin, end) of a path: one entry a channel, or one in all where channels mix (then without an
  /// error bound).
  virtual std::vector<GrowthSums> look(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                                       const T* before) const = 0;
  /// The same for channels that mix, without waiting, beside what is launched after `begin_look`: the states are made
  /// here, and only the inputs of the path are read. `before` and `out` in memory that kernels reach.
  virtual void begin_look() const {}
  virtual void look_ahead(const CellTrajectory<T>&, std::int64_t /*begin*/, std::int64_t /*end*/, const T* /*before*/,
                          GrowthSums* /*out*/) const {}
  virtual void wait_for_look() const {}
  /// Bytes that linearize needs for a token.
  std::int64_t map_bytes(bool diagonal) const {
    const std::int64_t n = diagonal ? 1 : block(), count = diagonal ? state_size() : blocks();
    return count * n * (n + 1) * static_cast<std::int64_t>(sizeof(T));
  }
  /// What a method keeps from solve to solve: memory that is slow to get.
  mutable std::shared_ptr<void> kept, kept_by_sweeps;
};

}  // namespace longscan
