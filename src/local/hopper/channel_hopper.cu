// SPDX-License-Identifier: Apache-2.0
#include "local/hopper/channel_hopper.hpp"
#include "local/hopper/delta_kernel.cuh"

namespace longscan::hopper {
namespace {

template <int K, int V, int GateBytes, bool Outputs>
cudaError_t launch_channel(const Pass& pass, cudaStream_t stream) {
  using C = Shape<K, V, GateBytes, Outputs>;
  return pass.type == Type::bf16 ? launch<C, true, Outputs, true>(pass, stream)
                                 : launch<C, false, Outputs, true>(pass, stream);
}

template <int K, int V, int GateBytes>
cudaError_t launch_channel(const Pass& pass, cudaStream_t stream) {
  return pass.o ? launch_channel<K, V, GateBytes, true>(pass, stream)
                : launch_channel<K, V, GateBytes, false>(pass, stream);
}

template <int GateBytes>
cudaError_t launch_gates(const Pass& pass, cudaStream_t stream) {
  if (pass.d_key <= 64)
    return pass.d_value <= 64 ? launch_channel<64, 64, GateBytes>(pass, stream)
                              : launch_channel<64, 128, GateBytes>(pass, stream);
  return pass.d_value <= 64 ? launch_channel<128, 64, GateBytes>(pass, stream)
                            : launch_channel<128, 128, GateBytes>(pass, stream);
}

}  // namespace

cudaError_t run_channel_pass(const Pass& pass, cudaStream_t stream) {
  return pass.log_decay.type == Type::f32 ? launch_gates<4>(pass, stream) : launch_gates<2>(pass, stream);
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_channel_profile() {
  print_marks({"wait for the decays", "sums, wait for the state", "factors", "wait for data", "barrier", "16 tokens",
               "barrier", "pairs of blocks", "barrier", "scale the tiles", "merges"});
}
#endif

}  // namespace longscan::hopper
