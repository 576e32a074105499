// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sweeps of full-trajectory methods: a lane is a channel of a segment of tokens and walks along the path, evaluates
// residual and Jacobian of each token, and folds them into one map, or adds the deltas. What it keeps between tokens is
// in registers.
#include <limits>

#include "core/elementary.hpp"
#include "local/cell_kernel.hpp"

namespace longscan {

/// An input, which no kernel in flight writes. Streaming loads (evict first) of rows of neighbouring channels reach a
/// tenth less of the memory's bandwidth than these do.
template <class T>
KOKKOS_INLINE_FUNCTION T load_input(const T* p) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 2)
    return {__ldg(&p->bits)};
  else
    return __ldg(p);
#else
  return *p;
#endif
}

/// A path whose cells take `more` inputs of a token beside its own; token t is at t * stride.
template <class T>
struct SweepPath {
  CellTrajectory<T> path;
  const T* more = nullptr;
  std::int64_t more_stride = 0;
};

/// Inputs of a cell that are the path's own; the others are in SweepPath::more.
template <class Cell>
constexpr int own_inputs() {
  if constexpr (requires { Cell::own_inputs; })
    return Cell::own_inputs;
  else
    return Cell::inputs;
}

template <class Cell, class T>
struct PathLane {
  static constexpr int k = Cell::state, g = Cell::inputs, nw = Cell::weights, own = own_inputs<Cell>();
  static constexpr int bytes = (g + k) * static_cast<int>(sizeof(T));
  /// Tokens of a batch; two batches are in registers.
  static constexpr int ahead = bytes <= 16 ? 8 : bytes <= 32 ? 4 : bytes <= 64 ? 2 : 1;
  std::int64_t D;
  int d;
  T w[nw], before[k];

  KOKKOS_INLINE_FUNCTION PathLane(int D, int d) : D(D), d(d) {}
  KOKKOS_INLINE_FUNCTION PathLane(const T* weights, int D, int d) : PathLane(D, d) {
    LONGSCAN_UNROLL
    for (int i = 0; i < nw; ++i) w[i] = weights[i * D + d];
  }
  KOKKOS_INLINE_FUNCTION void take(const T* state) {
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) before[i] = state[i * D + d];
  }

  struct Token {
    T x[g], h[k];
  };
  /// Where the inputs and states of a token stand.
  struct Place {
    const T *x, *more, *h;
  };
  KOKKOS_INLINE_FUNCTION void load(const SweepPath<T>& p, Place& at, Token& to) const {
    LONGSCAN_UNROLL
    for (int i = 0; i < own; ++i) to.x[i] = load_input(at.x + i * D);
    if constexpr (g > own) {
      LONGSCAN_UNROLL
      for (int i = own; i < g; ++i) to.x[i] = load_input(at.more + (i - own) * D);
    }
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) to.h[i] = load_once(at.h + i * D);
    at.x += p.path.x_stride, at.h += p.path.h_stride;
    if constexpr (g > own) at.more += p.more_stride;
  }

  /// f(token, its inputs, its state) for tokens [t, end), `before` being the state before each.
  template <class F>
  KOKKOS_INLINE_FUNCTION void along(const SweepPath<T>& p, std::int64_t t, std::int64_t end, const F& f) {
    Place at{p.path.x + t * p.path.x_stride + d, nullptr, p.path.h + t * p.path.h_stride + d};
    if constexpr (g > own) at.more = p.more + t * p.more_stride + d;
    Token a[ahead], b[ahead];
    const auto fill = [&](Token(&to)[ahead]) {
      LONGSCAN_UNROLL
      for (int i = 0; i < ahead; ++i) load(p, at, to[i]);
    };
    const auto take = [&](const Token& token) {
      f(t++, token.x, token.h);
      LONGSCAN_UNROLL
      for (int j = 0; j < k; ++j) before[j] = token.h[j];
    };
    const auto go = [&](const Token(&from)[ahead]) {
      LONGSCAN_UNROLL
      for (int i = 0; i < ahead; ++i) take(from[i]);
    };
    std::int64_t batches = (end - t) / ahead;
    if (batches > 0) fill(a);
    for (; batches > 2; batches -= 2) fill(b), go(a), fill(a), go(b);
    if (batches == 2) fill(b), go(a), go(b);
    if (batches == 1) go(a);
    while (t < end) {
      load(p, at, a[0]);
      take(a[0]);
    }
  }
};

/// A as a Newton-like step uses it; of a diagonal method the diagonal alone counts.
template <int k, bool diagonal, class T>
KOKKOS_INLINE_FUNCTION void reshape_block(T* A, Reshape how) {
  if (how == Reshape::keep) return;
  const auto size = [](T x) { return x < T(0) ? -x : x; };
  if (how == Reshape::identity || how == Reshape::zero) {
    LONGSCAN_UNROLL
    for (int i = 0; i < k * k; ++i) A[i] = T(how == Reshape::identity && i % (k + 1) == 0);
  } else if (diagonal) {
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i)
      if (!(size(A[i * k + i]) <= T(1))) A[i * k + i] *= T(1) / size(A[i * k + i]);
  } else {
    T norm = 0;
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) {
      T sum = 0;
      LONGSCAN_UNROLL
      for (int j = 0; j < k; ++j) sum += size(A[i * k + j]);
      norm = sum > norm ? sum : norm;
    }
    const T factor = norm <= T(1) ? T(1) : T(1) / norm;
    LONGSCAN_UNROLL
    for (int i = 0; i < k * k; ++i) A[i] *= factor;
  }
}

/// f - h and the reshaped Jacobian of one token.
template <class Cell, bool diagonal, class T>
KOKKOS_INLINE_FUNCTION void linearize_token(const T* x, const T* w, const T* before, const T* h, Reshape how, T* A,
                                            T* minus_r) {
  constexpr int k = Cell::state;
  Cell::jacobian(x, w, before, A);
  reshape_block<k, diagonal>(A, how);
  LONGSCAN_UNROLL
  for (int i = 0; i < k; ++i) minus_r[i] = before[i];
  Cell::step(x, w, minus_r);
  LONGSCAN_UNROLL
  for (int i = 0; i < k; ++i) minus_r[i] -= h[i];
}

/// y <- A y + b
template <int k, bool diagonal, class T>
KOKKOS_INLINE_FUNCTION void apply_block(const T* A, const T* b, T* y) {
  T next[k];
  LONGSCAN_UNROLL
  for (int i = 0; i < k; ++i) {
    next[i] = b[i];
    LONGSCAN_UNROLL
    for (int j = 0; j < k; ++j)
      if (!diagonal || i == j) next[i] = fused(A[i * k + j], y[j], next[i]);
  }
  LONGSCAN_UNROLL
  for (int i = 0; i < k; ++i) y[i] = next[i];
}

/// Sums up what a lane sees.
template <int k, class T>
struct LaneVerdict {
  T limit, rounding, worst = 0, squares_here = 0;
  SweepVerdict v;

  KOKKOS_INLINE_FUNCTION explicit LaneVerdict(const SweepOptions& o)
      : limit(static_cast<T>(o.limit)), rounding(static_cast<T>(o.rounding)) {}
  KOKKOS_INLINE_FUNCTION void token(std::int64_t t, const T* minus_r, const T* h) {
    bool small = true;
    LONGSCAN_UNROLL
    for (int i = 0; i < k; ++i) {
      const T size = minus_r[i] < T(0) ? -minus_r[i] : minus_r[i];
      small = small && size <= limit;  // what is not a number is not
      worst = size > worst ? size : worst;
    }
    if (small) {
      squares_here = fused(h[0], h[0], squares_here);
    } else {
      bool lost = false, bad = false, large = false;
      LONGSCAN_UNROLL
      for (int i = 0; i < k; ++i) {
        const T size = minus_r[i] < T(0) ? -minus_r[i] : minus_r[i];
        lost = lost || is_non_finite(minus_r[i]), bad = bad || is_non_finite(h[i]);
        large = large || size > rounding;
      }
      if (!bad) squares_here = fused(h[0], h[0], squares_here);
      v.wrong = t < v.wrong ? t : v.wrong;
      v.beyond = (lost || large) && t < v.beyond ? t : v.beyond;
      v.lost = lost && t < v.lost ? t : v.lost, v.bad = bad && t < v.bad ? t : v.bad;
    }
    if ((t & 7) == 7) v.squares += static_cast<double>(squares_here), squares_here = 0;
  }
  KOKKOS_INLINE_FUNCTION SweepVerdict done() {
    v.squares += static_cast<double>(squares_here);
    v.worst = v.lost != SweepVerdict::none ? SweepVerdict::infinite : static_cast<double>(worst);
    return v;
  }
};

template <class Cell, class T>
using SweepLanes = Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::LaunchBounds<256, sizeof(T) == 4 ? 2 : 1>,
                                       Kokkos::IndexType<std::int64_t>>;

/// CellKernel::fold for a cell that is evaluated value by value. Launches "longscan::cell::fold".
template <class Cell, class T, bool diagonal>
void fold_lanes(const SweepPath<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
                const T* weights, int D, const SweepArrays<T>& arrays, const SweepOptions& options) {
  constexpr int k = Cell::state, n = diagonal ? 1 : k;
  const std::int64_t size = static_cast<std::int64_t>(k) * D;
  Kokkos::parallel_for(
      "longscan::cell::fold", SweepLanes<Cell, T>(first * D, last * D), KOKKOS_LAMBDA(const std::int64_t lane_index) {
        const std::int64_t slot = lane_index / D, r = grid.runs == 1 ? 0 : grid.index_of(slot);
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const std::int64_t begin = grid.begin(run, slot), end = grid.end(run, slot);
        PathLane<Cell, T> lane(weights, D, static_cast<int>(lane_index - slot * D));
        lane.take(slot > run.slot ? path.path.at(begin - 1) : arrays.starts + r * size);
        LaneVerdict<k, T> verdict(options);
        T P[n * k], q[k] = {};  // rows of a block; of a diagonal the entries
        LONGSCAN_UNROLL
        for (int i = 0; i < n * k; ++i) P[i] = T(diagonal || i % (k + 1) == 0);
        lane.along(path, begin, end, [&](std::int64_t t, const T* x, const T* h) {
          T A[k * k], minus_r[k];
          linearize_token<Cell, diagonal>(x, lane.w, lane.before, h, options.how, A, minus_r);
          verdict.token(t, minus_r, h);
          apply_block<k, diagonal>(A, minus_r, q);
          if constexpr (diagonal) {
            LONGSCAN_UNROLL
            for (int i = 0; i < k; ++i) P[i] *= A[i * k + i];
          } else {
            T next[k * k];
            LONGSCAN_UNROLL
            for (int i = 0; i < k * k; ++i) {
              next[i] = A[i / k * k] * P[i % k];
              LONGSCAN_UNROLL
              for (int m = 1; m < k; ++m) next[i] = fused(A[i / k * k + m], P[m * k + i % k], next[i]);
            }
            LONGSCAN_UNROLL
            for (int i = 0; i < k * k; ++i) P[i] = next[i];
          }
        });
        arrays.verdicts[lane_index] = verdict.done();
        const bool exact = slot == run.slot && run.exact;
        LONGSCAN_UNROLL
        for (int i = 0; i < k; ++i) {
          arrays.tails[slot * size + i * D + lane.d] = lane.before[i];
          T* row = diagonal ? arrays.maps.slot(slot * size + i * D + lane.d)
                            : arrays.maps.slot(slot * D + lane.d) + i * (k + 1);
          LONGSCAN_UNROLL
          for (int j = 0; j < n; ++j) row[j] = exact ? T(0) : P[i * n + j];
          row[n] = q[i];
        }
      });
}

/// CellKernel::move likewise. Launches "longscan::cell::move".
template <class Cell, class T, bool diagonal>
void move_lanes(const SweepPath<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
                const T* weights, int D, const SweepArrays<T>& arrays, const SweepOptions& options) {
  constexpr int k = Cell::state;
  const std::int64_t size = static_cast<std::int64_t>(k) * D;
  Kokkos::parallel_for(
      "longscan::cell::move", SweepLanes<Cell, T>(first * D, last * D), KOKKOS_LAMBDA(const std::int64_t lane_index) {
        const std::int64_t slot = lane_index / D, r = grid.runs == 1 ? 0 : grid.index_of(slot);
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const bool exact = slot == run.slot && run.exact;
        PathLane<Cell, T> lane(weights, D, static_cast<int>(lane_index - slot * D));
        // the states before may be on the move
        lane.take(slot > run.slot ? arrays.tails + (slot - 1) * size : arrays.starts + r * size);
        T delta[k];
        LONGSCAN_UNROLL
        for (int i = 0; i < k; ++i)
          delta[i] = exact ? T(0) : arrays.deltas[slot * size + (diagonal ? i * D + lane.d : lane.d * k + i)];
        lane.along(path, grid.begin(run, slot), grid.end(run, slot), [&](std::int64_t t, const T* x, const T* h) {
          T A[k * k], minus_r[k];
          linearize_token<Cell, diagonal>(x, lane.w, lane.before, h, options.how, A, minus_r);
          apply_block<k, diagonal>(A, minus_r, delta);
          T* out = path.path.at(t) + lane.d;
          LONGSCAN_UNROLL
          for (int i = 0; i < k; ++i) {
            const T moved = h[i] + delta[i];
            if (!is_non_finite(moved)) out[i * D] = moved;
          }
        });
      });
}

}  // namespace longscan
