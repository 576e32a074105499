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
#include <vector>

#include "core/affine.hpp"

namespace longscan {

/// The inputs and states of the tokens of a part, on the device. Token t is at t * stride; a negative stride reads time
/// backwards.
template <class T>
struct CellTrajectory {
  const T* x = nullptr;
  std::int64_t x_stride = 0;
  T* h = nullptr;
  std::int64_t h_stride = 0;
  T* at(std::int64_t t) const { return h + t * h_stride; }
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
inline GrowthSums combine(const GrowthSums& a, const GrowthSums& b) {
  GrowthSums c;
  c.total = a.total + b.total, c.norm_total = a.norm_total + b.norm_total, c.tokens = a.tokens + b.tokens;
  c.prefix = std::max(a.prefix, a.total + b.prefix), c.suffix = std::max(b.suffix, b.total + a.suffix);
  c.best = std::max({a.best, b.best, a.suffix + b.prefix});
  c.norm_prefix = std::max(a.norm_prefix, a.norm_total + b.norm_prefix);
  c.error = std::exp(b.norm_total) * a.error + b.error;
  c.error_most = std::max(a.error_most, std::exp(b.norm_prefix) * a.error + b.error_most);
  return c;
}

template <class T>
class CellKernel {
 public:
  virtual ~CellKernel() = default;
  virtual int channels() const = 0;
  virtual int state() const = 0;
  virtual int inputs() const = 0;
  virtual bool mixes() const = 0;  ///< channels mix (dense Jacobian)
  int block() const { return mixes() ? state() * channels() : state(); }
  int blocks() const { return mixes() ? 1 : channels(); }
  std::int64_t state_size() const { return static_cast<std::int64_t>(state()) * channels(); }

  /// The recurrence over segments, side by side. starts, ends: slots of `state_size` values that kernels reach. Writes
  /// the states of the segments' tokens where `keep`. The bits of a token depend on its inputs and the state before
  /// alone. Waits: the host looks at ends.
  virtual void run(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
                   bool keep) const = 0;
  /// h_t = f(0, x_t) for tokens [begin, end): where full-trajectory methods start.
  virtual void guess(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end) const = 0;
  /// For tokens [begin, end) of a run: slot (t - begin) * blocks + b of `maps` becomes [A_t | -r_t] with
  /// r_t = h_t - f(h_{t-1}, x_t), A_t the Jacobian at h_{t-1}; `before` is the state before token begin.
  /// `diagonal`: the diagonal of A alone, as blocks of one row.
  virtual void linearize(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                         AffineMaps<T> maps, bool diagonal) const = 0;
  /// Growth along tokens [begin, end) of a path: one entry a channel, or one in all where channels mix (then without an
  /// error bound).
  virtual std::vector<GrowthSums> look(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                                       const T* before) const = 0;
  /// Bytes that linearize needs for a token.
  std::int64_t map_bytes(bool diagonal) const {
    const std::int64_t n = diagonal ? 1 : block(), count = diagonal ? state_size() : blocks();
    return count * n * (n + 1) * static_cast<std::int64_t>(sizeof(T));
  }
};

}  // namespace longscan
