// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels for cells whose channels do not mix (the concept BlockCell). On a host core time is the outer loop and
// channels the inner one, several segments in step, so that the inner loop vectorises; on a device a lane is a channel
// of a segment. A template, so that a user's cell gets the same kernels.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/elementary.hpp"
#include "core/half.hpp"
#include "local/cell_kernel.hpp"
#include "local/trajectory_lanes.hpp"

namespace longscan {

/// What a step may round, in units of the last place of 1: the cell's own word, or |s'| and ten times the largest value
/// at hand.
template <class Cell, class T>
KOKKOS_INLINE_FUNCTION void rounding_of(const T* x, const T* w, const T* before, const T* after, T* rho) {
  if constexpr (requires { Cell::rounding(x, w, before, after, rho); }) {
    Cell::rounding(x, w, before, after, rho);
  } else {
    for (int i = 0; i < Cell::state; ++i) {
      const T now = magnitude(after[i]);
      rho[i] = now + T(10) * larger_of(now, magnitude(before[i]));
    }
  }
}

/// What is summed up along a lane: sizes of states, and, for cells of one or two values, growth and the product of the
/// Jacobians. Sums are closed after every few tokens, so that the growth within them does not show in `best`.
template <class Cell, class T>
struct LaneSums {
  static constexpr int k = Cell::state;
  static constexpr bool follows_growth = k <= 2;
  T M[k * k], squares_here = 0;
  T E[k] = {}, E_most = 0;                        // in units of the last place of 1
  T total = 0, prefix = 0, suffix = 0, best = 0;  // log2 of the product's largest entry
  double squares = 0;

  KOKKOS_INLINE_FUNCTION LaneSums() {
    LONGSCAN_UNROLL
    for (int i = 0; i < k * k; ++i) M[i] = T(i % (k + 1) == 0);
  }

  KOKKOS_INLINE_FUNCTION void token(const T* x, const T* w, const T* before, const T* after) {
    squares_here = fused(after[0], after[0], squares_here);
    LONGSCAN_UNROLL
    for (int i = 1; i < k; ++i) squares_here = fused(after[i], T(0), squares_here);  // not a number, if it is not
    if constexpr (follows_growth) {
      T A[k * k], rho[k], next_M[k * k], next_E[k];
      Cell::jacobian(x, w, before, A);
      rounding_of<Cell>(x, w, before, after, rho);
      LONGSCAN_UNROLL
      for (int i = 0; i < k; ++i) {
        next_E[i] = rho[i];
        LONGSCAN_UNROLL
        for (int j = 0; j < k; ++j) {
          next_E[i] = fused(magnitude(A[i * k + j]), E[j], next_E[i]);
          next_M[i * k + j] = 0;
          LONGSCAN_UNROLL
          for (int m = 0; m < k; ++m)
            next_M[i * k + j] = m == 0 ? A[i * k] * M[j] : fused(A[i * k + m], M[m * k + j], next_M[i * k + j]);
        }
      }
      LONGSCAN_UNROLL
      for (int i = 0; i < k; ++i) E[i] = next_E[i], E_most = larger_of(E_most, E[i]);
      LONGSCAN_UNROLL
      for (int i = 0; i < k * k; ++i) M[i] = next_M[i];
    }
  }
  /// After every few tokens.
  KOKKOS_INLINE_FUNCTION void close() {
    squares += static_cast<double>(squares_here), squares_here = 0;
    if constexpr (follows_growth) {
      T largest = 0;
      LONGSCAN_UNROLL
      for (int i = 0; i < k * k; ++i) largest = larger_of(largest, magnitude(M[i]));
      const T growth = log_of(largest);
      const bool usable = largest > T(0) && largest < T(1e30);
      const T scale = usable ? T(1) / largest : T(0);
      LONGSCAN_UNROLL
      for (int i = 0; i < k * k; ++i) M[i] = usable ? M[i] * scale : T(i % (k + 1) == 0);
      total += growth;
      prefix = total > prefix ? total : prefix;
      suffix = suffix + growth > T(0) ? suffix + growth : T(0);
      best = suffix > best ? suffix : best;
    }
  }
  /// log2, with a floor for what a Jacobian of zero leaves, and a ceiling for what has overflowed.
  KOKKOS_INLINE_FUNCTION static T log_of(T x) { return x > T(0) ? (x < T(1e30) ? T(log2(x)) : T(100)) : T(-1000); }
  KOKKOS_INLINE_FUNCTION LaneGrowth growth() const {
    constexpr float ln2 = 0.693147181f;
    constexpr T unit = sizeof(T) == 8 ? T(1.1102230246251565e-16) : T(5.9604644775390625e-8);
    const auto power = [](T x) { return static_cast<float>(exp2(x < T(119) ? x : T(119))); };
    LaneGrowth g;
    g.total = ln2 * float(total), g.prefix = ln2 * float(prefix), g.suffix = ln2 * float(suffix);
    g.best = ln2 * float(best);
    constexpr float row = k > 1 ? 2 : 1;  // a row of two has at most twice the largest entry
    g.factor = row * power(total), g.factor_most = row * power(prefix), g.error_most = float(unit * E_most);
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) g.error = larger_of(g.error, float(unit * E[i]));
    return g;
  }
  /// The product of the Jacobians, [state][state][D]; what is beyond the range of T is infinite or zero.
  KOKKOS_INLINE_FUNCTION void product(T* to, int D) const {
    const T power = T(exp2(total));
    LONGSCAN_UNROLL
    for (int i = 0; i < k * k; ++i) to[static_cast<std::int64_t>(i) * D] = M[i] == T(0) ? T(0) : M[i] * power;
  }
};

/// For lanes along which nothing is summed up.
struct NoSums {
  template <class T>
  KOKKOS_INLINE_FUNCTION void token(const T*, const T*, const T*, const T*) {}
  KOKKOS_INLINE_FUNCTION void close() {}
};

/// One channel on a device: weights and state in registers, inputs read some tokens ahead.
template <class Cell, class T>
struct CellLane {
  static constexpr int k = Cell::state, g = Cell::inputs, nw = Cell::weights;
  /// Tokens of a batch; two batches are in registers.
  static constexpr int ahead = g * sizeof(T) <= 12 ? 8 : g * sizeof(T) <= 24 ? 4 : g * sizeof(T) <= 48 ? 2 : 1;
  std::int64_t D;
  int d;
  T w[nw], h[k];

  KOKKOS_INLINE_FUNCTION CellLane(const T* weights, int D, int d) : D(D), d(d) {
    LONGSCAN_UNROLL
    for (int i = 0; i < nw; ++i) w[i] = weights[i * D + d];
  }
  KOKKOS_INLINE_FUNCTION void take(const T* states, std::int64_t slot) {
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) h[i] = slot >= 0 ? states[(slot * k + i) * D + d] : T(0);
  }
  KOKKOS_INLINE_FUNCTION void put(T* states, std::int64_t slot) const {
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) states[(slot * k + i) * D + d] = h[i];
  }
  KOKKOS_INLINE_FUNCTION bool has_bits_of(const T* states, std::int64_t slot) const {
    using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
    bool same = true;
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) same = same && bits_as<Bits>(h[i]) == bits_as<Bits>(states[(slot * k + i) * D + d]);
    return same;
  }

  template <bool keep, class S, class Sums>
  KOKKOS_INLINE_FUNCTION void one(const T* x, S* out, Sums& sums) {
    T before[k];
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) before[i] = h[i];
    Cell::step(x, w, h);
    if (keep) {
      LONGSCAN_UNROLL
      for (int i = 0; i < k; ++i) store_once(out + i * D, as_stored<S>(h[i]));
    }
    sums.token(x, w, before, h);
  }

  /// Tokens [t, end) of the path, which is stored as S; their states are written if `keep`.
  template <bool keep, class S, class Sums>
  KOKKOS_INLINE_FUNCTION void run(const CellTrajectory<T>& path, std::int64_t t, std::int64_t end, Sums& sums) {
    const S* x = reinterpret_cast<const S*>(path.x) + t * path.x_stride + d;
    S* out = reinterpret_cast<S*>(path.h) + t * path.h_stride + d;
    S a[ahead][g] = {}, b[ahead][g] = {};
    const auto load = [&](S(&to)[ahead][g]) {
      LONGSCAN_UNROLL
      for (int i = 0; i < ahead; ++i) {
        LONGSCAN_UNROLL
        for (int j = 0; j < g; ++j) to[i][j] = load_input(x + j * D);
        x += path.x_stride;
      }
    };
    const auto go = [&](const S(&from)[ahead][g]) {
      LONGSCAN_UNROLL
      for (int i = 0; i < ahead; ++i) {
        T xs[g];
        LONGSCAN_UNROLL
        for (int j = 0; j < g; ++j) xs[j] = as_arithmetic(from[i][j]);
        one<keep>(xs, out, sums);
        out += path.h_stride;
      }
      sums.close();
    };
    std::int64_t batches = (end - t) / ahead;
    t += batches * ahead;
    if (batches > 0) load(a);
    for (; batches > 2; batches -= 2) load(b), go(a), load(a), go(b);
    if (batches == 2) load(b), go(a), go(b);
    if (batches == 1) go(a);
    if (t == end) return;
    for (; t < end; ++t, x += path.x_stride, out += path.h_stride) {
      T xs[g];
      LONGSCAN_UNROLL
      for (int j = 0; j < g; ++j) xs[j] = as_arithmetic(x[j * D]);
      one<keep>(xs, out, sums);
    }
    sums.close();
  }
};

template <class Cell, class T>
class BlockCellKernel final : public CellKernel<T> {
 public:
  using Space = Kokkos::DefaultExecutionSpace;
  using Lanes =
      Kokkos::RangePolicy<Space, Kokkos::LaunchBounds<256, sizeof(T) == 4 ? 2 : 1>, Kokkos::IndexType<std::int64_t>>;
  static constexpr int k = Cell::state, g = Cell::inputs, nw = Cell::weights;

  /// weights [Cell::weights][channels], in memory of the default execution space; must outlive the kernel.
  BlockCellKernel(int channels, const T* weights) : channels_(channels), weights_(weights) {}
  int channels() const override { return channels_; }
  int state() const override { return k; }
  int inputs() const override { return g; }
  bool mixes() const override { return false; }
  bool takes_stored() const override { return !is_host_space<Space> && sizeof(T) == 4; }

  /// f(S()) for the type S that a path is stored as.
  template <class F>
  static void as_it_is_stored(Stored stored, const F& f) {
    if constexpr (!is_host_space<Space> && sizeof(T) == 4) {
      if (stored == Stored::bf16) return f(StoredBf16());
      if (stored == Stored::f16) return f(StoredF16());
    }
    f(T());
  }

  /// One token for channels [c0, c1): the state [k][D] in place. Vectorised over channels on a host.
  KOKKOS_FUNCTION static void row(const T* x, const T* weights, T* s, int D, int c0, int c1) {
#pragma GCC ivdep
    for (int d = c0; d < c1; ++d) channel(x, weights, s, D, d);
  }

  LONGSCAN_INLINE_FUNCTION static void channel(const T* x, const T* weights, T* s, int D, int d) {
    T xs[g], ws[nw], h[k];
    for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
    for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + d];
    for (int i = 0; i < k; ++i) h[i] = s[i * D + d];
    Cell::step(xs, ws, h);
    for (int i = 0; i < k; ++i) s[i * D + d] = h[i];
  }

  void run(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
           bool keep) const override {
    if constexpr (is_host_space<Space>) {
      // Enough channels in step to hide the latency of one channel's chain.
      const int wanted = 256, width = segments.empty() ? 1 : segments[0].channel_end - segments[0].channel_begin;
      const std::int64_t group = std::max(1, wanted / std::max(1, width));
      const std::int64_t count = static_cast<std::int64_t>(segments.size());
      const CellSegment* list = segments.data();
      const int D = channels_;
      const T* weights = weights_;
      Kokkos::parallel_for(
          "longscan::cell::run", Kokkos::RangePolicy<Space>(0, (count + group - 1) / group), [=](const std::int64_t i) {
            in_step(path, list + i * group, std::min(group, count - i * group), weights, D, starts, ends, keep);
          });
    } else {
      as_it_is_stored(path.stored, [&](auto s) { run_lanes<decltype(s)>(path, segments, starts, ends, keep); });
    }
  }

  /// Device: one lane a channel of a segment, so that a warp reads neighbouring channels.
  template <class S>
  void run_lanes(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
                 bool keep) const {
    if (list_.extent(0) < segments.size())
      list_ =
          decltype(list_)(Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::cell::segments"), segments.size());
    const auto list = Kokkos::subview(list_, Kokkos::pair<std::size_t, std::size_t>(0, segments.size()));
    Kokkos::deep_copy(list,
                      Kokkos::View<const CellSegment*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
                          segments.data(), segments.size()));
    const int D = channels_;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::run", Lanes(0, static_cast<std::int64_t>(segments.size()) * D),
        KOKKOS_LAMBDA(const std::int64_t i) {
          const CellSegment s = list(i / D);
          const int d = static_cast<int>(i % D);
          if (d < s.channel_begin || d >= s.channel_end) return;
          CellLane<Cell, T> lane(weights, D, d);
          NoSums none;
          lane.take(starts, s.warm_up > 0 ? s.from : s.slot);
          if (s.warm_up > 0) {
            lane.template run<false, S>(path, s.begin - s.warm_up, s.begin, none);
            lane.put(starts, s.slot);
          }
          if (keep)
            lane.template run<true, S>(path, s.begin, s.end, none);
          else
            lane.template run<false, S>(path, s.begin, s.end, none);
          lane.put(ends, s.slot);
        });
    Space().fence();  // the host looks at ends
  }

  bool shoots_squares() const override { return true; }
  bool shoots_growth() const override { return LaneSums<Cell, T>::follows_growth; }
  std::int64_t side_by_side() const override {  // 512 lanes a multiprocessor hide a step's latency
    return std::max<std::int64_t>(1, std::max(1024, Space().concurrency() / 4) / channels_);
  }

  void shoot(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
             bool first) const override {
    as_it_is_stored(path.stored, [&](auto s) { shoot_stored<decltype(s)>(path, grid, lanes, first); });
  }
  template <class S>
  void shoot_stored(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
                    bool first) const {
    const int D = channels_;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::shoot", Lanes(0, grid.slots * D), KOKKOS_LAMBDA(const std::int64_t i) {
          if (!first && !lanes.active[i]) return;
          const std::int64_t slot = i / D;
          const std::int64_t r = grid.runs == 1 ? 0 : grid.index_of(slot);
          const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
          const std::int64_t begin = grid.begin(run, slot);
          CellLane<Cell, T> lane(weights, D, static_cast<int>(i - slot * D));
          if (first && (slot > run.slot || run.exact)) {
            const bool reaches = begin - run.begin <= grid.warm_up;  // back to the run's own start, if that is known
            NoSums none;
            lane.take(lanes.initial, reaches && run.exact ? r : -1);
            if (slot > run.slot)
              lane.template run<false, S>(path, reaches ? run.begin : begin - grid.warm_up, begin, none);
            lane.put(lanes.starts, slot);
          } else {
            lane.take(lanes.starts, slot);
          }
          finish<S>(lane, path, grid, lanes, run, slot);
        });
  }

  void walk(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
            const T* arriving) const override {
    as_it_is_stored(path.stored, [&](auto s) { walk_stored<decltype(s)>(path, grid, lanes, arriving); });
  }
  template <class S>
  void walk_stored(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
                   const T* arriving) const {
    const int D = channels_;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::walk", Lanes(0, grid.runs * D), KOKKOS_LAMBDA(const std::int64_t i) {
          const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[i / D];
          const std::int64_t last = i / D + 1 < grid.runs ? grid.table[i / D + 1].slot : grid.slots;
          CellLane<Cell, T> lane(weights, D, static_cast<int>(i % D));
          for (std::int64_t slot = run.slot; slot < last; ++slot) {
            if (slot == run.slot && !run.exact) lane.take(arriving, 0);
            const bool known = slot == run.slot && run.exact;
            if (known || (!lanes.active[slot * D + lane.d] && lane.has_bits_of(lanes.starts, slot))) {
              lane.take(lanes.ends, slot);
              continue;
            }
            lane.put(lanes.starts, slot);
            finish<S>(lane, path, grid, lanes, run, slot);
          }
        });
  }

  /// A lane over its segment, and what it leaves.
  template <class S>
  KOKKOS_INLINE_FUNCTION static void finish(CellLane<Cell, T>& lane, const CellTrajectory<T>& path,
                                            const SegmentGrid& grid, const ShootingArrays<T>& lanes,
                                            const SegmentRun& run, std::int64_t slot) {
    LaneSums<Cell, T> sums;
    const std::int64_t begin = grid.begin(run, slot), end = grid.end(run, slot), at = slot * lane.D + lane.d;
    lane.template run<true, S>(path, begin, end, sums);
    lane.put(lanes.ends, slot);
    lanes.squares[at] = sums.squares;
    if constexpr (LaneSums<Cell, T>::follows_growth) {
      lanes.growth[at] = sums.growth();
      sums.product(lanes.products + slot * k * k * lane.D + lane.d, static_cast<int>(lane.D));
    }
  }

  void guess(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end) const override {
    const int D = channels_, width = is_host_space<Space> ? D : 1, pieces = D / width;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::guess",
        Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(begin * pieces, end * pieces),
        KOKKOS_LAMBDA(const std::int64_t i) {
          const std::int64_t t = i / pieces;
          const int c0 = static_cast<int>(i % pieces) * width;
          T* s = path.h + t * path.h_stride;
          for (int j = 0; j < k; ++j)
            for (int d = c0; d < c0 + width; ++d) s[j * D + d] = T(0);
          row(path.x + t * path.x_stride, weights, s, D, c0, c0 + width);
        });
  }

  void linearize(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                 AffineMaps<T> maps, bool diagonal) const override {
    const int D = channels_, width = is_host_space<Space> ? D : 1, pieces = D / width;
    const T* weights = weights_;
    Kokkos::parallel_for(
        "longscan::cell::linearize",
        Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(begin * pieces, end * pieces),
        KOKKOS_LAMBDA(const std::int64_t index) {
          const std::int64_t t = index / pieces;
          const int c0 = static_cast<int>(index % pieces) * width;
          const T* x = path.x + t * path.x_stride;
          const T* s = t == begin ? before : path.h + (t - 1) * path.h_stride;
          const T* after = path.h + t * path.h_stride;
          for (int d = c0; d < c0 + width; ++d) {
            T xs[g], ws[nw], h[k], A[k * k];
            for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
            for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + d];
            for (int i = 0; i < k; ++i) h[i] = s[i * D + d];
            Cell::jacobian(xs, ws, h, A);
            Cell::step(xs, ws, h);
            for (int i = 0; i < k; ++i) {
              const T minus_r = h[i] - after[i * D + d];
              if (diagonal) {
                T* map = maps.slot((t - begin) * k * D + i * D + d);
                map[0] = A[i * k + i], map[1] = minus_r;
              } else {
                T* map = maps.slot((t - begin) * D + d) + i * (k + 1);
                for (int j = 0; j < k; ++j) map[j] = A[i * k + j];
                map[k] = minus_r;
              }
            }
          }
        });
  }

  bool sweeps(bool) const override { return true; }
  void fold(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
            const SweepArrays<T>& arrays, const SweepOptions& options) const override {
    if (k == 1 || options.diagonal)
      fold_lanes<Cell, T, true>({path}, grid, first, last, weights_, channels_, arrays, options);
    else
      fold_lanes<Cell, T, k == 1>({path}, grid, first, last, weights_, channels_, arrays, options);
  }
  void move(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
            const SweepArrays<T>& arrays, const SweepOptions& options) const override {
    if (k == 1 || options.diagonal)
      move_lanes<Cell, T, true>({path}, grid, first, last, weights_, channels_, arrays, options);
    else
      move_lanes<Cell, T, k == 1>({path}, grid, first, last, weights_, channels_, arrays, options);
  }

  std::vector<GrowthSums> look(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                               const T* before) const override;

 private:
  /// `count` segments token by token, all at the same distance from their start.
  static void in_step(const CellTrajectory<T>& path, const CellSegment* segments, std::int64_t count, const T* weights,
                      int D, T* starts, T* ends, bool keep) {
    const std::int64_t size = static_cast<std::int64_t>(k) * D;
    std::vector<T> states(count * size, T(0));
    std::int64_t longest = 0, warmest = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      const CellSegment& s = segments[j];
      longest = std::max(longest, s.end - s.begin), warmest = std::max(warmest, s.warm_up);
      const std::int64_t from = s.warm_up > 0 ? s.from : s.slot;
      if (from >= 0) copy(starts + from * size, &states[j * size], D, s);
    }
    for (std::int64_t i = -warmest; i < longest; ++i)
      for (std::int64_t j = 0; j < count; ++j) {
        const CellSegment& s = segments[j];
        const std::int64_t t = s.begin + i;
        if (i < -s.warm_up || t >= s.end) continue;
        T* state = &states[j * size];
        if (i == 0 && s.warm_up > 0) copy(state, starts + s.slot * size, D, s);
        row(path.x + t * path.x_stride, weights, state, D, s.channel_begin, s.channel_end);
        if (keep && i >= 0) copy(state, path.h + t * path.h_stride, D, s);
      }
    for (std::int64_t j = 0; j < count; ++j) copy(&states[j * size], ends + segments[j].slot * size, D, segments[j]);
  }

  static void copy(const T* from, T* to, int D, const CellSegment& s) {
    for (int i = 0; i < k; ++i)
      std::copy(from + i * D + s.channel_begin, from + i * D + s.channel_end, to + i * D + s.channel_begin);
  }

  int channels_;
  const T* weights_;
  mutable Kokkos::View<CellSegment*, typename Space::memory_space> list_;
};

/// Growth and error bound of one channel while a path is walked along.
template <class Cell, class T>
struct ChannelLook {
  static constexpr int k = Cell::state;
  GrowthSums sums;
  double E[k] = {}, v[k];  // bound on the error of each value, and a tangent vector

  KOKKOS_INLINE_FUNCTION ChannelLook() {
    for (int i = 0; i < k; ++i) v[i] = 1;
  }

  /// One token: the state before, and the state that the path has after it.
  KOKKOS_INLINE_FUNCTION void walk(const T* x, const T* w, const T* before, const T* path) {
    T after[k], A[k * k], rho[k];
    for (int i = 0; i < k; ++i) after[i] = before[i];
    Cell::jacobian(x, w, before, A);
    Cell::step(x, w, after);
    rounding_of<Cell>(x, w, before, after, rho);
    const double unit = sizeof(T) == 8 ? 1.1102230246251565e-16 : 5.9604644775390625e-8;
    double next_E[k], next_v[k], size_before = 0, size = 0, norm = 0;
    for (int i = 0; i < k; ++i) {
      const double r = static_cast<double>(path[i]) - static_cast<double>(after[i]);
      double row = 0;
      next_E[i] = unit * static_cast<double>(rho[i]) + (r < 0 ? -r : r), next_v[i] = 0;
      for (int j = 0; j < k; ++j) {
        const double a = static_cast<double>(A[i * k + j]), size_a = a < 0 ? -a : a;
        next_E[i] += size_a * E[j], next_v[i] += a * v[j], row += size_a;
      }
      norm = row > norm ? row : norm;
      size_before += v[i] * v[i], size += next_v[i] * next_v[i];
    }
    constexpr double nothing = -700;  // log of what a Jacobian of zero leaves
    sums.add(size > 0 ? 0.5 * log(size / size_before) : nothing, norm > 0 ? log(norm) : nothing);
    const double rescale = size > 0 ? 1 / sqrt(size) : 0;
    sums.error = 0;
    for (int i = 0; i < k; ++i) {
      E[i] = next_E[i];
      v[i] = size > 0 ? next_v[i] * rescale : 1.0;
      sums.error = E[i] > sums.error ? E[i] : sums.error;
    }
    sums.error_most = sums.error > sums.error_most ? sums.error : sums.error_most;
  }
};

template <class Cell, class T>
std::vector<GrowthSums> BlockCellKernel<Cell, T>::look(const CellTrajectory<T>& path, std::int64_t begin,
                                                       std::int64_t end, const T* before) const {
  constexpr int width = is_host_space<Space> ? 16 : 1;  // channels side by side: neighbours in memory
  const int D = channels_;
  const T* weights = weights_;
  Kokkos::View<GrowthSums*, typename Space::memory_space> sums("longscan::cell::sums", D);
  Kokkos::parallel_for(
      "longscan::cell::look", Kokkos::RangePolicy<Space>(0, (D + width - 1) / width), KOKKOS_LAMBDA(const int group) {
        const int first = group * width, count = D - first < width ? D - first : width;
        ChannelLook<Cell, T> looks[width];
        for (std::int64_t t = begin; t < end; ++t) {
          const T* x = path.x + t * path.x_stride + first;
          const T* s = (t == begin ? before : path.h + (t - 1) * path.h_stride) + first;
          const T* after = path.h + t * path.h_stride + first;
          for (int d = 0; d < count; ++d) {
            T xs[g], ws[nw], hs[k], ps[k];
            for (int i = 0; i < g; ++i) xs[i] = x[i * D + d];
            for (int i = 0; i < nw; ++i) ws[i] = weights[i * D + first + d];
            for (int i = 0; i < k; ++i) hs[i] = s[i * D + d], ps[i] = after[i * D + d];
            looks[d].walk(xs, ws, hs, ps);
          }
        }
        for (int d = 0; d < count; ++d) sums(first + d) = looks[d].sums;
      });
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), sums);
  return {host.data(), host.data() + D};
}

}  // namespace longscan
