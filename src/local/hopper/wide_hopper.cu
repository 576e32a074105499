// SPDX-License-Identifier: Apache-2.0
#include "local/hopper/wide_hopper.hpp"
#include "local/hopper/wide_kernel.cuh"

namespace longscan::hopper {
namespace {

template <class C, bool Bf16>
cudaError_t launch_wide(const Pass& pass, cudaStream_t stream) {
  if (pass.log_decay.data)
    return pass.o ? launch_wide<C, Bf16, true, true>(pass, stream) : launch_wide<C, Bf16, false, true>(pass, stream);
  return pass.o ? launch_wide<C, Bf16, true, false>(pass, stream) : launch_wide<C, Bf16, false, false>(pass, stream);
}

template <class C>
cudaError_t launch_wide(const Pass& pass, cudaStream_t stream) {
  return pass.type == Type::bf16 ? launch_wide<C, true>(pass, stream) : launch_wide<C, false>(pass, stream);
}

}  // namespace

cudaError_t run_wide_pass(const Pass& pass, cudaStream_t stream) {
  return pass.d_key <= 192 ? launch_wide<Shape<192, 64>>(pass, stream) : launch_wide<Shape<256, 64>>(pass, stream);
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_wide_profile() {
  print_marks({"T: wait for data", "scalars, barrier", "K Kᵀ, decays", "store A", "convert K", "diagonal", "barrier",
               "wait for an empty T", "merges", "M: wait for data", "convert Q", "wait for K", "Q Kᵀ",
               "wait for an empty M", "store M"});
}
#endif

}  // namespace longscan::hopper
