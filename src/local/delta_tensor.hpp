// SPDX-License-Identifier: Apache-2.0
#pragma once
// Passes of the delta rule on tensor cores, where the build and the device have kernels for them
// (hopper/delta_hopper.hpp); everything else is delta_pass.
#include <cstdint>
#include <memory>
#include <vector>

#include "local/delta_pass.hpp"

namespace longscan {

/// Products of fp16 operands with fp32 sums and fp32 states, for 16-bit inputs. Owns the memory that a launch needs, so
/// one object serves one launch at a time.
class DeltaTensor {
 public:
  using Space = Kokkos::DefaultExecutionSpace;

  DeltaTensor();
  ~DeltaTensor();
  /// Whether there are kernels for such passes: depends on the device, and on shapes, types, strides and rules only.
  bool applies(const DeltaPass<float>& pass) const;
  /// Tasks that the device runs side by side in a pass that `applies`; 0 where there are no kernels.
  static int side_by_side(const DeltaPass<float>& pass);

  /// Asynchronous. `pass.tasks` and `pass.counts` are not looked at. Whether numbers are too small for fp16 is found by
  /// a look at some of them with `samples`, else only by those who look at the results.
  void launch(const Space& space, const DeltaPass<float>& pass, const std::vector<DeltaTask<float>>& tasks,
              bool samples = true);
  /// Waits for the launch. One a task: whether its results must not be used, because the range of fp16 does not hold
  /// its numbers.
  std::vector<char> rejected(const Space& space);
  /// Tokens of the launch beyond the stability bound, rejected tasks left out; after `rejected`.
  std::int64_t breaches() const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace longscan
