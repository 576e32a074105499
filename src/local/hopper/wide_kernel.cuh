// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keys of 136 to 256 elements. One CTA carries 64 rows of one head's state through a run of tokens; the order of a
// chunk is that of delta_kernel.cuh. Two helper warpgroups (wide_helper.cuh) and two of the state, each with its half
// of the channels (its part):
//   R and S Qᵀ are sums of two parts. Each warpgroup sends the other its sums for the other's 32 tokens of the chunk as
//   fp32, adds what it gets, makes R of its own tokens and sends that as fp16, the operand that it is anyway. So both
//   have all of R, X is made twice, S += X K is each part's own, and O each one's 32 tokens.
// What is sent goes from a thread to the one with the same number: both hold the same places of [64 rows × 64 tokens].
// Registers of the state at K = 256: S 64, its fp16 copy 32, R 32, S Qᵀ 32. Shared memory: two stages of 72 KB.
#include "local/hopper/delta_kernel.cuh"
#include "local/hopper/wide_helper.cuh"

namespace longscan::hopper {
namespace {

constexpr int both_parts = 5;  // a named barrier

/// The first `n` tokens of 32, rows [first, first + 64) of S.
__device__ __forceinline__ void store_few(const Pass& pass, std::uint32_t from, int n, std::int64_t token, int head,
                                          int first, int thread) {
#pragma unroll 1
  for (int i = thread; i < 8 * n; i += 128) {
    const int row = i >> 3, column = first + 8 * (i & 7);
    if (column < pass.d_value)
      *reinterpret_cast<uint4*>(static_cast<char*>(pass.o) +
                                2 * (head * pass.o_head_stride + (token + row) * pass.o_token_stride + column)) =
          load16(from + swizzled(row, i & 7));
  }
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__device__ __forceinline__ void wide_state_role(const Pass& pass, const Maps& maps, const Task& task,
                                                const Chunks& chunks, std::uint32_t smem, Barriers<C> bar, int tile,
                                                int part, int& bad) {
  static_assert((C::K == 192 || C::K == 256) && C::V == 64 && C::stages == C::slots);
  constexpr int N = C::K / 4, steps = C::K / 32;  // of S a thread; products over the part's channels
  const int tid = threadIdx.x & 127, lane = tid & 31;
  // registers are short: places are made again from the thread's number where they are needed
  const auto my_row = [&] {
    const int t = fresh(tid);
    return 64 * tile + 16 * (t >> 5) + ((t & 31) >> 2);
  };
  const auto my_column = [&] { return 2 * (fresh(tid) & 3); };
  // where this lane's row of the four 8×8 matrices (token, v), (token, v + 8), (token + 8, v), … lies
  const auto lane_piece = [&] {
    const int t = fresh(tid), l = t & 31;
    return swizzled((l >> 4) * 8 + (l & 7), 2 * (t >> 5) + ((l >> 3) & 1));
  };
  const bool identity = task.flags & from_identity, has_values = !(task.flags & without_values);
  const int head = task.head, probe_after = task.probe.data ? chunks.to_probe : -1;  // not read again for each chunk
  // the part's channels: a panel of 64, and one of 64 or half of one
  const std::uint32_t first_panel = part * 2 * panel_bytes;
  const std::uint32_t second_panel = panel_bytes + part * (C::K == 256 ? 2 * panel_bytes : 64);
  const auto channel = [&](int j, int k) {  // number k of the part's group j of 8
    return (j < 8 ? 128 * part : 64 + part * (C::K == 256 ? 128 : 32)) + 8 * (j & 7) + k;
  };

  float S[N], R[32];
  std::uint32_t Sh[N / 2], Xh[16];
  const int my_v = my_row(), my_k = my_column();
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = channel(j, my_k + (e & 1)), v = my_v + 8 * (e >> 1);
      float x = 0;
      if (v < pass.d_value && k < pass.d_key) x = start_element(task, v, k);
      S[4 * j + e] = identity ? x * identity_scale : x;
    }
  const float factor = identity ? 1 / identity_scale : 1.f;
  const auto store_part = [&](State to) {
    const int row = my_row(), column = my_column();
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = channel(j, column + (e & 1)), v = row + 8 * (e >> 1);
        if (v < pass.d_value && k < pass.d_key) to.data[k * to.k_stride + v * to.v_stride] = S[4 * j + e] * factor;
      }
  };
  // a place a part, of 8 KB: first its sums for the other; then the other's R; then O as R; then the other's outputs
  const std::uint32_t ours = smem + C::at_O + part * panel_bytes, theirs = smem + C::at_O + (part ^ 1) * panel_bytes;
  float not_finite = 0;

  const auto multiply_state = [&](float(&to)[32], std::uint32_t tile) {
    const std::uint64_t first = row_descriptor(tile + first_panel), second = row_descriptor(tile + second_panel);
    products_fence();
    product_n64<true>(to, Sh, first);
#pragma unroll
    for (int s = 1; s < steps; ++s) product_n64<false>(to, Sh + 4 * s, advance(s < 4 ? first : second, (s & 3) * 32));
    products_commit();
  };
  // the last warp to leave a stage loads the chunk that comes into it next
  const auto leave = [&](int stage, int c) {
    constexpr unsigned warps = 4 * C::states;
    if ((count_up(smem + C::at_left + 4 * stage) & (warps - 1)) != warps - 1) return;
    if (c + C::stages < chunks.count)
      load_chunk<C, Outputs>(maps, head / pass.group, head, has_values, static_cast<int>(chunks.first(c + C::stages)),
                             smem, bar.arrived(stage), stage, 64 * tile);
  };
  // keeps this part's tokens of `all`, sends the rest
  const auto send = [&](float(&kept)[16], const float(&all)[32]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = part ? all[4 * i + e] : all[16 + 4 * i + e];
        kept[4 * i + e] = part ? all[16 + 4 * i + e] : all[4 * i + e];
      }
      store_float4(ours + tid * 16 + i * 2048, x[0], x[1], x[2], x[3]);
    }
  };
  const auto add_sent = [&](float(&to)[16]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = load_float4(theirs + tid * 16 + i * 2048);
      to[4 * i] += x.x, to[4 * i + 1] += x.y, to[4 * i + 2] += x.z, to[4 * i + 3] += x.w;
    }
  };

  Ring<C::stages> stage;
  pack(Sh, S);
  hold(Sh);
  barrier_wait(bar.full(0), 0);
  multiply_state(R, smem + C::at_K);
  Marks marks(tid == 0 && part == 0);
#pragma unroll 1
  for (int c = 0; c < chunks.count; ++c) {
    const std::uint32_t keys = smem + C::at_K + stage.slot * C::key_bytes;
    float all_O[32], O[16];
    products_wait<0>();
    hold(R);
    if constexpr (Outputs) multiply_state(all_O, smem + C::at_Q + stage.slot * C::key_bytes);
    marks.mark(20);
    if (Outputs && c > 0) {
      if (tid == 0) boxes_read();
      named_barrier<256>(both_parts);  // the other's outputs have left `ours`
    }
    {
      // R = eta V - beta S Kᵀ of this part's tokens, as left operand
      float r[16];
      send(r, R);
      named_barrier<256>(both_parts);
      add_sent(r);
      std::uint32_t own[8];
      const std::uint32_t values = smem + C::at_V + stage.slot * C::value_bytes + part * 2 * 2048 + lane_piece();
      const std::uint32_t numbers = smem + C::at_scalars + stage.slot * C::scalar_bytes + (32 * part + my_column()) * 8;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        std::uint32_t m[4];
        load_matrices_transposed(m, values + s * 2048);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 f = load_float4(numbers + (16 * s + 8 * e) * 8);  // beta, eta, beta, eta of two tokens
          const float2 v0 = Bf16 ? unpack_bf16(m[2 * e]) : unpack_half(m[2 * e]);
          const float2 v1 = Bf16 ? unpack_bf16(m[2 * e + 1]) : unpack_half(m[2 * e + 1]);
          const float* x = r + 8 * s + 4 * e;
          own[4 * s + 2 * e] = pack_half(fmaf(-f.x, x[0], f.y * v0.x), fmaf(-f.z, x[1], f.w * v0.y));
          own[4 * s + 2 * e + 1] = pack_half(fmaf(-f.x, x[2], f.y * v1.x), fmaf(-f.z, x[3], f.w * v1.y));
        }
        // this thread's place, which it has read
        store16(theirs + tid * 16 + s * 2048, make_uint4(own[4 * s], own[4 * s + 1], own[4 * s + 2], own[4 * s + 3]));
      }
      named_barrier<256>(both_parts);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint4 x = load16(ours + tid * 16 + s * 2048);
        const std::uint32_t other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          Xh[4 * s + e] = part ? other[e] : own[4 * s + e];
          Xh[8 + 4 * s + e] = part ? own[4 * s + e] : other[e];
        }
      }
    }
    hold(Xh);
    if constexpr (Outputs) {
      products_wait<0>();
      hold(all_O);
      send(O, all_O);
    }
    marks.mark(21);
    barrier_wait(bar.t_full(stage.slot), stage.phase);
    marks.mark(22);
    float early[16], late[16];  // X of the first and of the last 32 tokens
    {                           // X = R Tᵀ; the later tokens' block of T is zero for the first half of the tokens
      const std::uint64_t t = row_descriptor(smem + C::at_T + stage.slot * square_bytes);
      products_fence();
      product_n32<true>(early, Xh, t);
      product_n32<true>(late, Xh, advance(t, 4096));
      product_n32<false>(early, Xh + 4, advance(t, 32));
      product_n32<false>(late, Xh + 4, advance(t, 4096 + 32));
      product_n32<false>(late, Xh + 8, advance(t, 4096 + 64));
      product_n32<false>(late, Xh + 12, advance(t, 4096 + 96));
      products_commit();
    }
    const std::uint32_t decays = smem + C::at_decays + stage.slot * C::decay_bytes + my_column() * 8;
    if constexpr (Decay) {
      const float less = load_float(smem + C::at_decays + stage.slot * C::decay_bytes + chunk * 8);
#pragma unroll
      for (int i = 0; i < N; ++i) S[i] = fmaf(S[i], less, S[i]);
    }
    if constexpr (Outputs) {
      named_barrier<256>(both_parts);
      add_sent(O);
      if constexpr (Decay)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 f = load_float4(decays + 64 * (4 * part + j));
          O[4 * j] *= f.x, O[4 * j + 1] *= f.z, O[4 * j + 2] *= f.x, O[4 * j + 3] *= f.z;
        }
    }
    products_wait<0>();
    marks.mark(23);
    hold(early);
    hold(late);
    if constexpr (!Decay) warp_arrives(bar.t_empty(stage.slot), lane);
    if constexpr (Outputs || !Decay) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Xh[i] = pack_half(early[2 * i], early[2 * i + 1]);
        Xh[8 + i] = pack_half(late[2 * i], late[2 * i + 1]);
      }
      hold(Xh);
    }
    std::uint32_t Xd[Decay ? 16 : 1];  // with the decay to the end of the chunk
    if constexpr (Decay) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 f = load_float4(decays + 64 * j);
        const float* x = j < 4 ? early + 4 * j : late + 4 * (j - 4);
        Xd[2 * j] = pack_half(x[0] * f.y, x[1] * f.w), Xd[2 * j + 1] = pack_half(x[2] * f.y, x[3] * f.w);
      }
      hold(Xd);
      warp_arrives(bar.t_empty(stage.slot), lane);
    }
    hold(S);
    if constexpr (Outputs) hold(O);
    products_fence();
    {
      const std::uint64_t first = column_descriptor(keys + first_panel),
                          second = column_descriptor(keys + second_panel);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const std::uint32_t* x = Decay ? Xd + (Decay ? 4 * s : 0) : Xh + 4 * s;
        if constexpr (C::K == 256) {
          product_columns_n128(S, x, advance(first, s * 2048));
        } else {
          product_columns_n64(S, x, advance(first, s * 2048));
          product_columns_n32(S + 32, x, advance(second, s * 2048));
        }
      }
      products_commit();
    }
    if constexpr (Outputs) {
      barrier_wait(bar.m_full(stage.slot), stage.phase);
      products_fence();
      const std::uint64_t m = row_descriptor(smem + C::at_M + stage.slot * square_bytes + part * 4096);
#pragma unroll
      for (int s = 0; s < 4; ++s) product_n32<false>(O, Xh + 4 * s, advance(m, s * 32));
      products_commit();
      products_wait<1>();
    } else {
      products_wait<0>();
    }
    marks.mark(24);
    hold(S);
    const int done_stage = stage.slot;
    stage.next();
    pack(Sh, S);
    hold(Sh);
    [[maybe_unused]] std::uint32_t out[8];
    if constexpr (Outputs) {  // by now done; its left operand's registers are needed
      products_wait<0>();
      hold(O);
      warp_arrives(bar.m_empty(done_stage), lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = O[2 * i] * pass.scale, y = O[2 * i + 1] * pass.scale;
        out[i] = Bf16 ? pack_bf16(x, y) : pack_half(x, y);
        not_finite = fmaf(x, 0.f, fmaf(y, 0.f, not_finite));
      }
      hold(out);
    }
    __syncwarp();  // all lanes have read
    if (lane == 0) leave(done_stage, c);
    __syncwarp();
    marks.mark(25);
    // after the last chunk the product is of no use, and of an old tile, but the loop stays simple
    if (c + 1 < chunks.count) barrier_wait(bar.full(stage.slot), stage.phase);
    marks.mark(26);
    multiply_state(R, smem + C::at_K + stage.slot * C::key_bytes);
    if constexpr (Outputs) {
      named_barrier<128>(1 + part);  // all have read what they were sent
      const std::uint32_t staging = theirs + lane_piece();
#pragma unroll
      for (int s = 0; s < 2; ++s)
        store_matrices_transposed(staging + s * 2048, {out[4 * s], out[4 * s + 1], out[4 * s + 2], out[4 * s + 3]});
      fence_for_tensor_cores();
      named_barrier<128>(1 + part);
      const int n = chunks.size(c) - 32 * part;
      if (n >= 32) {
        if (tid == 0) store_box(&maps.o, theirs, 64 * tile, head, static_cast<int>(chunks.first(c)) + 32 * part);
      } else {
        store_few(pass, theirs, n, chunks.first(c) + 32 * part, head, 64 * tile, fresh(tid));
      }
    }
    marks.mark(27);
    if (c + 1 == probe_after) store_part(task.probe);
  }
  products_wait<0>();
  hold(R);
  if (Outputs && tid == 0) boxes_read();
  if (probe_after == 0 && part == 0) copy_start<C>(pass, task, task.probe, 64 * tile, 64, tid, 128);
#pragma unroll
  for (int i = 0; i < N; ++i) not_finite = fmaf(S[i], 0.f, not_finite);
  bad = not_finite != 0.f;
  if (task.to.data) store_part(task.to);
}

/// CTA: 64 rows of a task, `tiles` to a task.
template <class C, bool Bf16, bool Outputs, bool Decay>
__global__ void __launch_bounds__(C::threads, 1)
    wide_kernel(const __grid_constant__ Pass pass, const __grid_constant__ Maps maps, int tiles) {
  extern __shared__ char raw[];
  const std::uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  const Barriers<C> bar{smem + C::at_barriers};
  const int number = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const Task& task = pass.tasks[number];
  const Chunks chunks(task);
  if (chunks.count == 0) {
    if (task.to.data) copy_start<C>(pass, task, task.to, 64 * tile, 64, threadIdx.x, C::threads);
    if (task.probe.data) copy_start<C>(pass, task, task.probe, 64 * tile, 64, threadIdx.x, C::threads);
    return;
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; ++s) {
      barrier_init(bar.full(s), Outputs ? 256 : 128), barrier_init(bar.arrived(s), 1);
      store4(smem + C::at_left + 4 * s, 0);
    }
    for (int s = 0; s < C::slots; ++s) {
      barrier_init(bar.t_full(s), 128), barrier_init(bar.t_empty(s), 4 * C::states * arriving_lanes);
      barrier_init(bar.m_full(s), 128), barrier_init(bar.m_empty(s), 4 * C::states * arriving_lanes);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // the blocks of T and M above the diagonal stay zero, and V where there is none
  for (int i = threadIdx.x; i < (C::stages * C::value_bytes + 2 * C::slots * square_bytes) / 16; i += C::threads)
    store16(smem + C::at_V + 16 * i, make_uint4(0, 0, 0, 0));
  fence_for_tensor_cores();
  __syncthreads();
  if (threadIdx.x == 0)
    for (int c = 0; c < min(C::stages, chunks.count); ++c)
      load_chunk<C, Outputs>(maps, task.head / pass.group, task.head, !(task.flags & without_values),
                             static_cast<int>(chunks.first(c)), smem, bar.arrived(c), c, 64 * tile);
  __syncwarp();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // the same in a warp, and known to be
  if (role < C::helpers) {
    registers_down<C::helper_registers(Outputs)>();
    Counts* counts = pass.counts && tile == 0 ? pass.counts + number : nullptr;
    wide_helper_role<C, Bf16, Outputs, Decay>(pass, task, chunks, smem, bar, role, counts);
  } else {
    registers_up<C::state_registers(Outputs)>();
    int bad = 0;
    wide_state_role<C, Bf16, Outputs, Decay>(pass, maps, task, chunks, smem, bar, tile, role - C::helpers, bad);
    if (bad && pass.counts) pass.counts[number].bad = 1;
  }
}

template <class C, bool Bf16, bool Outputs, bool Decay>
cudaError_t launch_wide(const Pass& pass, cudaStream_t stream) {
  Maps maps = {};
  const int shared_heads = pass.heads / pass.group, tiles = ctas_of_task(pass.d_key, pass.d_value);
  cudaError_t error = make_map(&maps.k, pass.k, pass.tokens, shared_heads, pass.d_key);
  if (error == cudaSuccess) error = make_map(&maps.v, pass.v, pass.tokens, pass.heads, pass.d_value);
  if (error == cudaSuccess && Outputs) error = make_map(&maps.q, pass.q, pass.tokens, shared_heads, pass.d_key);
  if (error == cudaSuccess && Outputs) {
    const TokenVectors o = {pass.o, pass.o_token_stride, pass.o_head_stride};
    error = make_map(&maps.o, o, pass.tokens, pass.heads, pass.d_value, 2, 32);
  }
  const auto kernel = wide_kernel<C, Bf16, Outputs, Decay>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::allocated);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(pass.task_count) * tiles, C::threads, C::allocated, stream>>>(pass, maps, tiles);
  return cudaGetLastError();
}

}  // namespace
}  // namespace longscan::hopper
