// SPDX-License-Identifier: Apache-2.0
#pragma once
// What happens between the sweeps of full-trajectory methods, on the device.
#include "local/cell_kernel.hpp"

namespace longscan {

/// All verdicts [slots][channels] as one: squares of all, the others of the slots from `first` on. Launches
/// "longscan::sweep::verdict" and waits.
SweepVerdict sum_up(const SweepVerdict* verdicts, std::int64_t slots, std::int64_t channels, std::int64_t first);

}  // namespace longscan
