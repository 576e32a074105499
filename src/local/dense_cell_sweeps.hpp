// SPDX-License-Identifier: Apache-2.0
#pragma once
// What sweeps of full-trajectory methods need of cells whose channels mix.
#include "local/trajectory_lanes.hpp"

namespace longscan {
namespace {

/// A cell whose products p = W_hh h + b_hh are inputs, and whose other channels are left alone: the diagonal of its
/// Jacobian. Weights: the diagonals of W_hh.
template <class Gates>
struct DiagonalOf {
  static constexpr int state = Gates::state, own_inputs = Gates::gates, inputs = 2 * Gates::gates,
                       weights = Gates::gates;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T*, T* s) {
    Gates::step(x, x + own_inputs, s);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* w, const T* s, T* A) {
    T dp[state * own_inputs];
    Gates::derivatives(x, x + own_inputs, s, dp, A);
    LONGSCAN_UNROLL
    for (int q = 0; q < own_inputs; ++q) A[0] = fused(dp[q], w[q], A[0]);
  }
};

/// The state h before each token of slots [first, last), whose first token is `from`: to [token][channel]. A move
/// takes those before segments from `tails` (null: from the path). Launches "longscan::cell::gather".
template <class T>
void gather_before(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
                   std::int64_t from, const T* starts, const T* tails, std::int64_t size, int D, T* to) {
  Kokkos::parallel_for(
      "longscan::cell::gather",
      Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(first * grid.tokens * D,
                                                                                          last * grid.tokens * D),
      KOKKOS_LAMBDA(const std::int64_t index) {
        const std::int64_t place = index / D, d = index - place * D, slot = place / grid.tokens;
        const std::int64_t r = grid.runs == 1 ? 0 : grid.index_of(slot);
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const std::int64_t begin = grid.begin(run, slot), t = begin + (place - slot * grid.tokens);
        if (t >= grid.end(run, slot)) return;
        const T* before = t > begin || (slot > run.slot && !tails) ? path.h + (t - 1) * path.h_stride
                          : slot > run.slot                        ? tails + (slot - 1) * size
                                                                   : starts + r * size;
        to[(t - from) * D + d] = before[d];
      });
}

/// Evaluates the tokens of slots [first, last) as a fold does, and keeps what their deltas need: numbers [token]
/// [tangent_values][channels] from token `from` on. Launches "longscan::cell::tangents".
template <class Gates, class T>
void note_tangents(const SweepPath<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last, int D,
                   const SweepArrays<T>& arrays, const SweepOptions& options, bool moving, std::int64_t from, T* to) {
  using Cell = DiagonalOf<Gates>;
  constexpr int k = Gates::state, g = Gates::gates, values = k * (g + k + 1);
  const std::int64_t size = static_cast<std::int64_t>(k) * D;
  Kokkos::parallel_for(
      "longscan::cell::tangents", SweepLanes<Cell, T>(first * D, last * D), KOKKOS_LAMBDA(const std::int64_t index) {
        const std::int64_t slot = index / D, r = grid.runs == 1 ? 0 : grid.index_of(slot);
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const std::int64_t begin = grid.begin(run, slot);
        const int d = static_cast<int>(index - slot * D);
        PathLane<Cell, T> lane(D, d);
        lane.take(slot == run.slot ? arrays.starts + r * size
                  : moving         ? arrays.tails + (slot - 1) * size
                                   : path.path.at(begin - 1));
        LaneVerdict<k, T> verdict(options);
        lane.along(path, begin, grid.end(run, slot), [&](std::int64_t t, const T* x, const T* h) {
          T dp[k * g], ds[k * k], minus_r[k];
          Gates::derivatives(x, x + g, lane.before, dp, ds);
          LONGSCAN_UNROLL
          for (int i = 0; i < k; ++i) minus_r[i] = lane.before[i];
          Gates::step(x, x + g, minus_r);
          LONGSCAN_UNROLL
          for (int i = 0; i < k; ++i) minus_r[i] -= h[i];
          verdict.token(t, minus_r, h);
          T* out = to + (t - from) * values * D + d;
          LONGSCAN_UNROLL
          for (int i = 0; i < k * g; ++i) out[i * D] = dp[i];
          LONGSCAN_UNROLL
          for (int i = 0; i < k * k; ++i) out[(k * g + i) * D] = ds[i];
          LONGSCAN_UNROLL
          for (int i = 0; i < k; ++i) out[(k * (g + k) + i) * D] = minus_r[i];
        });
        if (moving) return;
        arrays.verdicts[index] = verdict.done();
        LONGSCAN_UNROLL
        for (int i = 0; i < k; ++i) arrays.tails[slot * size + i * D + d] = lane.before[i];
      });
}

}  // namespace
}  // namespace longscan
