// SPDX-License-Identifier: Apache-2.0
// Which method solves a layer, and what is to be said about it.
#include <algorithm>

#include "dist/newton_layer.hpp"

namespace longscan {
namespace {

/// Tolerance below which the jumps of cells whose channels mix do not fall.
double shooting_floor(bool doubles) { return doubles ? 1e-12 : 2e-6; }

template <class T>
SegmentPlan plan(LayerSolve<T>& s) {
  if (shoots_on_device()) return plan_device_segments(s);
  const std::int64_t longest = (s.part.axis_tokens + s.ranks.size() - 1) / s.ranks.size();
  return plan_segments(s.part.axis_tokens, longest, s.kernel.channels(), s.kernel.mixes(), sizeof(T) == 8,
                       s.options.segment);
}

template <class T>
std::int64_t longest_run(const LayerSolve<T>& s) {
  std::int64_t longest = 1;
  for (const Run& run : s.part.runs) longest = std::max(longest, run.size());
  return longest;
}

/// Whether the token loop is as fast as segments on one rank: there is but one, or, on a device, as many passes as the
/// last solve took last longer. A pass takes as long as its tokens and some more. Solves before this one do not count
/// where channels mix: there the bits depend on the way.
template <class T>
bool too_few_tokens(LayerSolve<T>& s) {
  const SegmentPlan p = plan(s);
  if (s.ranks.size() > 1) return false;
  if (s.part.axis_tokens < 2 * p.tokens) return true;
  if (!shoots_on_device() || s.kernel.mixes()) return false;
  const std::int64_t more = 100 + s.kernel.channels(), passes = passes_to_expect(s.kernel);
  return passes > 1 && longest_run(s) < p.warm_up + passes * (p.tokens + more);
}

template <class T>
void run_shooting(LayerSolve<T>& s, double wanted, bool automatic) {
  const double floor = shooting_floor(sizeof(T) == 8);
  if (s.kernel.mixes() && s.options.tolerance < floor) {
    if (wanted > 0) s.report.tolerance_floor = floor;
    s.options.tolerance = floor;
  }
  const SegmentPlan segments = plan(s);
  if (automatic)
    s.report.reason = "segments of " + std::to_string(segments.tokens) + " tokens after a warm-up of " +
                      std::to_string(segments.warm_up) + "; what does not settle goes to the token loop";
  shoots_on_device() ? solve_shooting_on_device(s, automatic) : solve_shooting(s, automatic);
  s.report.method_used = NewtonMethod::shooting;
}

template <class T>
void run_sequential(LayerSolve<T>& s) {
  if (shoots_on_device() && s.ranks.size() == 1 && !s.kernel.mixes()) {
    // a shooting pass of one segment a sequence: nothing is guessed, and growth comes with it
    s.options.segment = longest_run(s);
    solve_shooting_on_device(s, false);
    s.report.method_used = NewtonMethod::sequential;
    if (s.report.first_bad_token >= 0) s.report.converged_prefix = s.report.first_bad_token;
    return;
  }
  solve_sequential(s);
  s.report.method_used = NewtonMethod::sequential;
  const std::int64_t bad = size_of_states(s).second;
  s.report.first_bad_token = bad;
  if (bad >= 0) s.report.status = NewtonStatus::non_finite, s.report.converged_prefix = bad;
}

}  // namespace

template <class T>
void solve_layer(LayerSolve<T>& s) {
  const double wanted = s.options.tolerance;
  s.options.tolerance = wanted > 0 ? wanted : sizeof(T) == 8 ? 1e-10 : 1e-6;
  const bool automatic = s.options.method == NewtonMethod::automatic;
  if (automatic && shoots_on_device()) hope_again(s.kernel);
  if (automatic && s.options.reproducible && s.kernel.mixes()) {
    s.report.reason = "channels mix, and --reproducible asks for the bits of the token loop";
    run_sequential(s);
  } else if (automatic && too_few_tokens(s)) {
    if (shoots_on_device() && s.kernel.mixes()) {  // a pass of one segment a sequence; its verdict costs least
      s.options.segment = longest_run(s);
      run_shooting(s, wanted, true);
    } else {
      run_sequential(s);
    }
    s.report.reason = "too few tokens for more than one segment";
  } else if (automatic || s.options.method == NewtonMethod::shooting) {
    run_shooting(s, wanted, automatic);
  } else if (s.options.method == NewtonMethod::sequential) {
    run_sequential(s);
  } else {
    solve_full(s);
    s.report.method_used = s.options.method;
  }
  if (s.solved) s.solved();
  if (s.report.status != NewtonStatus::non_finite && !s.looked) look_along(s);
}

template void solve_layer(LayerSolve<float>&);
template void solve_layer(LayerSolve<double>&);

}  // namespace longscan
