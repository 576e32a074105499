// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keys of more than 128 elements, compiled apart.
#include "local/hopper/delta_hopper.hpp"

namespace longscan::hopper {

/// run_pass for 128 < pass.d_key <= 256.
cudaError_t run_wide_pass(const Pass& pass, cudaStream_t stream);

}  // namespace longscan::hopper
