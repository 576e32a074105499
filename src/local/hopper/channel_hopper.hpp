// SPDX-License-Identifier: Apache-2.0
#pragma once
// The passes with one decay a channel, compiled apart.
#include "local/hopper/delta_hopper.hpp"

namespace longscan::hopper {

/// run_pass for pass.channel_decay.
cudaError_t run_channel_pass(const Pass& pass, cudaStream_t stream);

}  // namespace longscan::hopper
