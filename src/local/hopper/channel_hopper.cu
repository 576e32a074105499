// SPDX-License-Identifier: Apache-2.0
#include "local/hopper/channel_hopper.hpp"
#include "local/hopper/delta_kernel.cuh"

namespace longscan::hopper {
namespace {

template <class C>
cudaError_t launch_channel(const Pass& pass, cudaStream_t stream) {
  if (pass.type == Type::bf16)
    return pass.o ? launch<C, true, true, true>(pass, stream) : launch<C, true, false, true>(pass, stream);
  return pass.o ? launch<C, false, true, true>(pass, stream) : launch<C, false, false, true>(pass, stream);
}

template <int GateBytes>
cudaError_t launch_gates(const Pass& pass, cudaStream_t stream) {
  if (pass.d_key <= 64)
    return pass.d_value <= 64 ? launch_channel<Shape<64, 64, GateBytes>>(pass, stream)
                              : launch_channel<Shape<64, 128, GateBytes>>(pass, stream);
  return pass.d_value <= 64 ? launch_channel<Shape<128, 64, GateBytes>>(pass, stream)
                            : launch_channel<Shape<128, 128, GateBytes>>(pass, stream);
}

}  // namespace

cudaError_t run_channel_pass(const Pass& pass, cudaStream_t stream) {
  return pass.log_decay.type == Type::f32 ? launch_gates<4>(pass, stream) : launch_gates<2>(pass, stream);
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_channel_profile() {
  print_marks({"wait for data", "scalars, barrier", "diagonal products", "wait for the decays", "sums, factors",
               "16 tokens", "barrier", "pairs of blocks", "barrier", "scale the tiles", "merges"});
}
#endif

}  // namespace longscan::hopper
