// SPDX-License-Identifier: Apache-2.0
#pragma once
// The helper warpgroups for keys of more than 128 elements. Only two chunks fit into shared memory, so what a chunk
// needs is to be there soon: one helper makes its T, with K as it came and then in fp16, the other its M, with Q in
// fp16. With the next chunk they change places.
#include "local/hopper/helper.cuh"

namespace longscan::hopper {
namespace {

/// What follows `n` tokens of a tile of `bytes` bytes belongs to others. A thread clears the pieces that it converts.
__device__ __forceinline__ void clear_rest(std::uint32_t tile, int bytes, int n, int thread) {
#pragma unroll 1
  for (int i = thread; i < bytes / 16; i += 128)
    if (((i >> 3) & 63) >= n) store16(tile + 16 * i, make_uint4(0, 0, 0, 0));
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__device__ __forceinline__ void wide_helper_role(const Pass& pass, const Task& task, const Chunks& chunks,
                                                 std::uint32_t smem, Barriers<C> bar, int w, Counts* counts) {
  static_assert(C::stages == 2 && C::slots == 2 && C::helpers == 2);
  constexpr int pieces = C::K / 16, ahead = C::K == 192 ? 6 : 8;
  const int tid = threadIdx.x & 127, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int head = task.head;

  std::uint32_t beta_bits = 0, eta_bits = 0, decay_bits = 0;  // of this thread's token, a chunk ahead; 0 is 0
  const auto load_scalars = [&](int c) {
    beta_bits = 0, eta_bits = 0, decay_bits = 0;
    if (c >= chunks.count || tid >= chunks.size(c)) return;
    const std::int64_t t = chunks.first(c) + tid;
    beta_bits = scalar_bits(pass.beta, t * pass.beta.token_stride + head * pass.beta.head_stride);
    if (pass.eta.data) eta_bits = scalar_bits(pass.eta, t * pass.eta.token_stride + head * pass.eta.head_stride);
    if (Decay)
      decay_bits = scalar_bits(pass.log_decay, t * pass.log_decay.token_stride + head * pass.log_decay.head_stride);
  };

  load_scalars(w);
  Marks marks(tid == 0 && w == 0);
#pragma unroll 1
  for (int c = 0; c < chunks.count; ++c) {
    const int stage = c & 1;  // and slot
    const std::uint32_t phase = (c >> 1) & 1;
    const std::uint32_t scratch = smem + C::at_scratch + stage * C::scratch_bytes;  // of the one that makes T
    const std::uint32_t keys = smem + C::at_K + stage * C::key_bytes, queries = smem + C::at_Q + stage * C::key_bytes;
    if (stage == w) {
      barrier_wait(bar.arrived(stage), phase);  // for all threads also the proof that the state has left the stage
      if constexpr (arriving_lanes > 1)         // the same, where racecheck sees it
        barrier_wait(Outputs ? bar.m_empty(stage) : bar.t_empty(stage), phase ^ 1);
      marks.mark(0);
      if (tid < chunk) {
        const float beta = scalar(pass.beta.type, beta_bits);
        const float eta = pass.eta.data ? scalar(pass.eta.type, eta_bits) : beta;
        if (Decay) {
          float log = 1.44269504f * scalar(pass.log_decay.type, decay_bits);
          if (log < least_decay) log = least_decay;
          store_float4(scratch + C::raw + tid * 16, beta, eta, log, 0.f);
        } else {
          store_float2(smem + C::at_scalars + stage * C::scalar_bytes + tid * 8, beta, eta);
        }
      }
      if (const int n = chunks.size(c); n < chunk) {
        clear_rest(keys, C::key_bytes, n, fresh(tid));
        clear_rest(smem + C::at_V + stage * C::value_bytes, C::value_bytes, n, fresh(tid));
        fence_for_tensor_cores();
      }
      named_barrier<128>(3 + w);  // and the blocks of the chunk before have been read
      marks.mark(1);
      float g[32];
      products_fence();
      multiply_tiles<C, Bf16>(g, keys, keys);  // as they came: exact products
      if (Decay && warp == 0)                  // which has the fewest blocks of A
        make_decays<C>(scratch, scratch, smem, stage, fresh(tid) & 31, pass.erase_undecayed);
      products_wait<0>();
      hold(g);
      if (Bf16 || Decay) named_barrier<128>(3 + w);  // all warps' products have read the tile; the decays are there
      RowDecays decays;
      float beta[2];
      const int row = (fresh(tid) & 31) >> 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (Decay) {
          const float2 x = load_float2(scratch + C::rows + warp * (16 * 8) + (row + 8 * i) * 8);
          beta[i] = x.x, decays.erase[i] = x.y;
          decays.log[i] = load_float(scratch + C::columns + warp * (chunk * 4) + (16 * warp + row + 8 * i) * 4);
        } else {
          beta[i] = load_float(smem + C::at_scalars + stage * C::scalar_bytes + (16 * warp + row + 8 * i) * 8);
        }
      }
      marks.mark(2);
      const int breaches = store_rows<C, Decay>(scratch, scratch, g, beta[0], beta[1], decays, warp, fresh(tid) & 31);
      if (breaches && counts) atomicAdd(&counts->breaches, breaches);
      marks.mark(3);
      if (Bf16) convert<pieces, ahead>(keys + 16 * fresh(tid));
      fence_for_tensor_cores();
      barrier_arrive(bar.full(stage));
      marks.mark(4);
      __syncwarp();
      invert_diagonal<C>(scratch, warp, fresh(tid) & 31);
      marks.mark(5);
      named_barrier<128>(3 + w);
      marks.mark(6);
      barrier_wait(bar.t_empty(stage), phase ^ 1);
      marks.mark(7);
      merge<C>(scratch, smem + C::at_T + stage * square_bytes, warp, fresh(tid) & 31);
      fence_for_tensor_cores();
      barrier_arrive(bar.t_full(stage));
      marks.mark(8);
      load_scalars(c + 2);
    } else if constexpr (Outputs) {
      barrier_wait(bar.arrived(stage), phase);
      marks.mark(9);
      if (const int n = chunks.size(c); n < chunk) clear_rest(queries, C::key_bytes, n, fresh(tid));
      if (Bf16) convert<pieces, ahead>(queries + 16 * fresh(tid));
      fence_for_tensor_cores();
      barrier_arrive(bar.full(stage));
      marks.mark(10);
      barrier_wait(bar.full(stage), phase);
      marks.mark(11);
      float m[32];
      __syncwarp();
      products_fence();
      multiply_tiles<C, false>(m, queries, keys);
      products_wait<0>();
      hold(m);
      marks.mark(12);
      barrier_wait(bar.m_empty(stage), phase ^ 1);
      marks.mark(13);
      RowDecays decays;  // the other's, who leaves them alone until the state has had this M
      if (Decay) {
        const int row = (fresh(tid) & 31) >> 2;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          decays.log[i] = load_float(scratch + C::columns + warp * (chunk * 4) + (16 * warp + row + 8 * i) * 4);
      }
      store_M<C, Decay>(scratch, smem + C::at_M + stage * square_bytes, m, decays, warp, fresh(tid) & 31);
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(stage));
      __syncwarp();
      marks.mark(14);
    }
  }
}

}  // namespace
}  // namespace longscan::hopper
