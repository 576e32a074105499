// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cell of one's own: its step and its Jacobian are compiled into the solver's kernels. The headers in quotes are
// installed with the others and are found where this one is.
#include <concepts>
#include <memory>
#include <string>

#include "core/elementary.hpp"
#include "local/block_cell_kernel.hpp"
#include "longscan/error.hpp"
#include "longscan/newton.hpp"

namespace longscan {

/// A recurrence whose channels do not mix: each has `state` values s that one token's `inputs` values x move on, with
/// `weights` constants w of the channel.
///
///     struct Leaky {  // s' = a s + x
///       static constexpr int state = 1, inputs = 1, weights = 1;
///       template <class T>
///       KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) { s[0] = longscan::fused(w[0], s[0],
///       x[0]); } template <class T> KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* w, const T* s, T*
///       A) { A[0] = w[0]; }
///     };
///
/// `step` replaces s by the next state. `jacobian` writes A [state][state] = d step / d s, row by row, at the state s
/// before the step. Both run on host and device (KOKKOS_INLINE_FUNCTION), in float and in double, and depend on their
/// arguments alone. Products followed by sums are written fused(a, b, c) = a b + c: the compiler then has no choice
/// between one rounding and two, and the bits of a token are the same in every kernel; the token loop's bits, which the
/// solver promises for such cells, rest on that. core/elementary.hpp has exp, sigmoid and tanh that vectorise.
///
/// Optional: `rounding(x, w, before, after, rho)` writes for each value what a step may round, in units of the last
/// place of 1; the error bound sums it up along the path. Without it, |s'| and ten times the larger of |s| and |s'|.
template <class Cell>
concept BlockCell = Cell::state >= 1 && Cell::inputs >= 1 && Cell::weights >= 1 &&
                    requires(const double* in, double* out, const float* in32, float* out32) {
  Cell::step(in, in, out);
  Cell::step(in32, in32, out32);
  Cell::jacobian(in, in, in, out);
  Cell::jacobian(in32, in32, in32, out32);
};

/// The points where check_cell looks: all values normal, with these deviations.
struct CellCheckRange {
  int points = 200;
  double inputs = 1, weights = 1, states = 1;
  double tolerance = 1e-5;  ///< on |A - difference|, relative to 1 + |A|
  std::uint64_t seed = 1;
};

struct CellCheck {
  double worst = 0;   ///< largest |A - difference| / (1 + |A|)
  std::string where;  ///< of the worst: entry and values
  int points = 0;     ///< looked at
  int kinks = 0;      ///< points left out, because step is not smooth there
};

namespace detail {

/// A cell behind pointers, so that the checks are compiled once.
struct CellFunctions {
  int state, inputs, weights;
  void (*step)(const double* x, const double* w, double* s);
  void (*jacobian)(const double* x, const double* w, const double* s, double* A);
  /// The state of `channels` channels after a token, all at once or one by one: their bits have to agree.
  void (*rows)(bool one_by_one, int channels, const double* x, const double* w, double* s);
  void (*rows32)(bool one_by_one, int channels, const float* x, const float* w, float* s);
};
CellCheck check_cell(const CellFunctions& cell, const CellCheckRange& range);

template <class Cell, class T>
void step_rows(bool one_by_one, int channels, const T* x, const T* w, T* s) {
  if (!one_by_one) return BlockCellKernel<Cell, T>::row(x, w, s, channels, 0, channels);
  for (int d = 0; d < channels; ++d) BlockCellKernel<Cell, T>::row(x, w, s, channels, d, d + 1);
}

}  // namespace detail

/// Compares a cell's Jacobian with central differences of its step at random points, and its step with itself: alone,
/// again, and among other channels it has to give the same bits. Not collective; on the host. Throws Error(numerical)
/// naming the entry and the values where something is wrong. Cost: microseconds a point.
template <BlockCell Cell>
CellCheck check_cell(const CellCheckRange& range = {}) {
  return detail::check_cell(
      {Cell::state, Cell::inputs, Cell::weights,
       [](const double* x, const double* w, double* s) { Cell::step(x, w, s); },
       [](const double* x, const double* w, const double* s, double* A) { Cell::jacobian(x, w, s, A); },
       &detail::step_rows<Cell, double>, &detail::step_rows<Cell, float>},
      range);
}

/// This rank's part of the sequences, and its runs: the sequences in it. Not collective.
TokenRange cell_part(const Transport& ranks, const Sequences& sequences);
std::vector<Run> cell_runs(const Transport& ranks, const Sequences& sequences);

/// One rank's part, in memory of Kokkos' default execution space (host memory, unless Kokkos has a GPU backend).
template <class T>
struct CellArrays {
  const T* x = nullptr;               ///< [tokens][inputs][channels]
  T* states = nullptr;                ///< [tokens][state][channels], out
  const T* initial_states = nullptr;  ///< [runs][state][channels] of runs that start here, on the host; nullptr: zero
  T* final_states = nullptr;          ///< the same of runs that end here, out, on the host; nullptr: not wanted
  /// x and states are numbers of 16 bits, which the pointers point at, and T is float: the arithmetic is float's, and
  /// what goes from token to token is not rounded to 16 bits. A device reads and writes them as they are where channels
  /// do not mix (auto, shooting, sequential); else copies in float are made.
  Stored stored = Stored::as_arithmetic;
};

/// Solves sequences whose states a kernel moves on; what solve_cells calls. T is float or double.
template <class T>
NewtonReport solve_cell_kernel(Transport& ranks, const CellKernel<T>& kernel, const Sequences& sequences,
                               const CellArrays<T>& data, const NewtonOptions& options);

/// A cell of the library for solve_cell_kernel: one layer in one direction, for inputs that are projected already,
/// x_t = W_ih x + b_ih, [tokens][gates][channels]. Not collective. Throws Error(bad_input).
template <class T>
std::shared_ptr<const CellKernel<T>> make_cell_kernel(const CellWeights& weights, int layer = 0, int direction = 0);

/// Solves s_t = step(x_t, w, s_{t-1}) for all tokens of all sequences, over the ranks.
///
/// Shapes: `weights` [Cell::weights][channels], in memory of the default execution space; the other arrays as in
/// CellArrays. Precision: T, float or double; options.precision is not looked at. Collective; the same options on every
/// rank. Cost, messages and determinism: as longscan::Newton says of channels that do not mix; with the methods auto,
/// shooting and sequential the result has the bits of the token loop. A recurrence that amplifies errors
/// (report.lyapunov > 0) cannot be shot at: auto then ends with the token loop, exact all the same, and says so
/// (status fell_back). An outcome that is not a solution is in the report's status. Throws Error(usage) for options
/// that do not fit.
template <BlockCell Cell, class T>
NewtonReport solve_cells(Transport& ranks, int channels, const T* weights, const Sequences& sequences,
                         const CellArrays<T>& data, const NewtonOptions& options = {}) {
  return solve_cell_kernel<T>(ranks, BlockCellKernel<Cell, T>(channels, weights), sequences, data, options);
}

}  // namespace longscan
