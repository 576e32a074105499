// SPDX-License-Identifier: Apache-2.0
#pragma once
// One layer in one direction over all ranks: what the methods share, and the methods. Collective functions.
#include <functional>
#include <vector>

#include "core/device_memory.hpp"
#include "dist/exclusive_scan.hpp"
#include "local/cell_kernel.hpp"
#include "longscan/newton.hpp"

namespace longscan {

/// A rank's part of a layer. Tokens and runs in the order of the direction; neighbours are the ranks that hold the
/// tokens before and after (-1: none, or no state passes there).
template <class T>
struct LayerPart {
  CellTrajectory<T> path;
  std::vector<Run> runs;
  int before = -1, after = -1;
  bool reversed = false;  ///< the direction's first tokens are on the last rank
  /// States before the runs, [runs][state_size]; that of a run that comes from `before` is filled in.
  SharedVector<T> starts;
  SharedVector<T> ends;          ///< states after the runs
  std::int64_t axis_begin = 0;   ///< the part's first token on the (direction's) axis
  std::int64_t axis_tokens = 0;  ///< tokens of the whole window
  bool continues() const { return before >= 0; }
  ScanLinks links() const { return {before, after, reversed}; }
};

template <class T>
struct LayerSolve {
  Transport& ranks;
  const CellKernel<T>& kernel;
  LayerPart<T>& part;
  NewtonOptions options;  ///< tolerance decided, but for solve_layer
  NewtonReport report;
  ScanPlan& plan;
  /// Called by solve_layer when the states are there for good, before growth along them is looked at.
  std::function<void()> solved = {};
  bool looked = false;  ///< growth and error bound are in the report
  double share = 1;     ///< of all tokens, that the window has

  std::int64_t size() const { return kernel.state_size(); }
  bool empty() const { return part.runs.empty(); }
  T* start(std::size_t run) { return &part.starts[run * size()]; }
  T* end(std::size_t run) { return &part.ends[run * size()]; }
};

/// Solves the layer by the method of `options`, whose tolerance of 0 is the usual one, and fills in the report.
template <class T>
void solve_layer(LayerSolve<T>& s);

/// The token loop, rank after rank; where channels do not mix, ranks work on different channels at the same time.
template <class T>
void solve_sequential(LayerSolve<T>& s);

/// Multiple shooting; falls back to the token loop if `may_fall_back`.
template <class T>
void solve_shooting(LayerSolve<T>& s, bool may_fall_back);

/// The same with all work between passes on the device. Statuses and verdicts as solve_shooting's.
template <class T>
void solve_shooting_on_device(LayerSolve<T>& s, bool may_fall_back);
/// Whether solve_shooting goes that way: where kernels run on a device; tests switch it on elsewhere.
inline bool& shoots_on_device() {
  static bool on_device = !is_host_space<Kokkos::DefaultExecutionSpace>;
  return on_device;
}

/// newton, quasi, elk, picard, jacobi. On a device by sweeps (CellKernel::sweeps) where the kernel has them.
template <class T>
void solve_full(LayerSolve<T>& s);
/// Bytes that it takes beside the path, for a part of so many tokens in one run.
template <class T>
std::int64_t full_workspace_bytes(const CellKernel<T>& kernel, NewtonMethod method, std::int64_t tokens);

/// Growth and error bound along the solved path; fills in the report.
template <class T>
void look_along(LayerSolve<T>& s);

/// Root mean square of h over all ranks' tokens, and the first token (of the axis) whose state is not finite, or -1.
template <class T>
std::pair<double, std::int64_t> size_of_states(LayerSolve<T>& s);

/// The state at the end of the part goes to the rank after; returns what came from the rank before.
template <class T>
std::vector<T> pass_on(LayerSolve<T>& s, const T* out, int tag);

/// All segments of the part, `tokens` each: the runs are appended to `table`, which the grid points to on the host.
template <class T>
SegmentGrid cut_into_segments(const LayerPart<T>& part, std::int64_t tokens, std::vector<SegmentRun>& table);

/// Length of a shooting segment and of its warm-up.
struct SegmentPlan {
  std::int64_t tokens = 0, warm_up = 0;
};
SegmentPlan plan_segments(std::int64_t axis_tokens, std::int64_t longest_part, int channels, bool mixes, bool doubles,
                          std::int64_t wanted);
/// The same for a device that runs `side_by_side` segments at once; collective, and the rule behind it.
template <class T>
SegmentPlan plan_device_segments(LayerSolve<T>& s);
/// Passes that the last solve with this kernel took on a device, where it had several segments; 1 if there was none.
template <class T>
std::int64_t passes_to_expect(const CellKernel<T>& kernel);
/// To be called once a solve: every sixteenth time that long warm-ups or several passes are expected, fewer are, since
/// inputs change.
template <class T>
void hope_again(const CellKernel<T>& kernel);
SegmentPlan plan_device_segments(std::int64_t tokens, std::int64_t longest, std::int64_t side_by_side,
                                 std::int64_t warm_up, std::int64_t wanted);

}  // namespace longscan
