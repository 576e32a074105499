// SPDX-License-Identifier: Apache-2.0
#pragma once
// One CTA carries one head's state through a run of tokens, a chunk of 64 tokens at a time. Its warpgroups:
//   state     64 rows of S each, as fp32 accumulators; every product with S on the left takes it from registers
//   helper    every chunk (K = V = 64) or every other chunk (two of them): bf16 to fp16 in shared memory,
//             T = (I - A)⁻¹ with A = -strict_lower(diag(beta) K Kᵀ), and M = lower(Q Kᵀ)
// A chunk, with everything transposed so that rows are rows of S:
//   R = eta V - beta S Kᵀ,  X = R Tᵀ,  O = S Qᵀ + X Mᵀ,  S += X K.
// With a decay, G the sum of its logarithms since the chunk's start, E = G (erase undecayed: of the token before):
//   R = eta V - beta e^E S Kᵀ,  A_ts *= e^(E_t - G_s),  M_ts *= e^(G_t - G_s),  O = e^G S Qᵀ + X Mᵀ,
//   S = e^G_end S + (e^(G_end - G) X) K.
// None of the helpers' work depends on S: they run ahead of the state. K, Q, V come by tensor maps; the last warp of
// the state to leave a stage starts the next load into it.
#ifdef LONGSCAN_HOPPER_PROFILE
#include <algorithm>
#include <cstdio>
#include <initializer_list>
#endif

#include "local/hopper/channel_helper.cuh"
#include "local/hopper/helper.cuh"

namespace longscan::hopper {
namespace {

// ---- state ----

template <int N>
__device__ __forceinline__ void pack(std::uint32_t (&to)[N], const float (&from)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = pack_half(from[2 * i], from[2 * i + 1]);
}

/// Places outside d_key × d_value are left alone.
template <int N>
__device__ __forceinline__ void store_state(const Pass& pass, State to, const float (&S)[N], int v, int k,
                                            float factor) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = v + 8 * (e >> 1), column = 8 * j + k + (e & 1);
      if (row < pass.d_value && column < pass.d_key)
        to.data[column * to.k_stride + row * to.v_stride] = S[4 * j + e] * factor;
    }
}

__device__ __forceinline__ float start_element(const Task& task, int v, int k) {
  if (task.flags & from_identity) return k == v ? 1.f : 0.f;
  return task.from.data ? task.from.data[k * task.from.k_stride + v * task.from.v_stride] : 0.f;
}

/// The state before the task to `to`, rows [first, first + rows).
template <class C>
__device__ __forceinline__ void copy_start(const Pass& pass, const Task& task, State to, int first, int rows,
                                           int thread, int threads) {
#pragma unroll 1
  for (int i = thread; i < rows * C::K; i += threads) {
    const int v = first + i / C::K, k = i % C::K;
    if (v < pass.d_value && k < pass.d_key) to.data[k * to.k_stride + v * to.v_stride] = start_element(task, v, k);
  }
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__device__ __forceinline__ void state_role(const Pass& pass, const Maps& maps, const Task& task, const Chunks& all,
                                           std::uint32_t smem, Barriers<C> bar, int half, bool loads_values, int& bad) {
  constexpr int N = C::K / 2, steps = C::K / 16;  // of S a thread; products over the channels
  constexpr bool head_decay = Decay && !C::channel;
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  const int first_v = C::pairs ? 0 : 64 * half, my_v = first_v + 16 * warp + (lane >> 2), my_k = 2 * (lane & 3);
  const bool identity = task.flags & from_identity, has_values = !(task.flags & without_values);
  const int head = task.head, probe_after = task.probe.data ? all.to_probe : -1, count = all.count;
  float S[N], R[32];
  std::uint32_t Sh[C::maps ? 8 : N / 2], Xh[16];
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * j + my_k + (e & 1), v = my_v + 8 * (e >> 1);
      float x = 0;
      if (v < pass.d_value && k < pass.d_key) x = start_element(task, v, k);
      S[4 * j + e] = identity ? x * identity_scale : x;
    }
  // where this lane's row of the four 8×8 matrices (token, v), (token, v + 8), (token + 8, v), … lies
  const int lane_token = (lane >> 4) * 8 + (lane & 7);
  const std::uint32_t lane_piece = swizzled(lane_token, 2 * warp + ((lane >> 3) & 1));
  const bool none = C::pairs && !has_values;
  const std::uint32_t values = smem + (none ? C::at_no_V : C::at_V + (C::pairs ? 0 : half) * panel_bytes) + lane_piece;
  const std::uint32_t values_step = none ? 0 : C::value_bytes;
  const std::uint32_t staging = smem + C::at_O + half * panel_bytes;
  const float factor = identity ? 1 / identity_scale : 1.f;
  float not_finite = 0;
  std::uint32_t outputs_not_finite = 0;  // two numbers of 16 bits, NaN if any was not finite

  // R without O: packs S a step at a time, which takes fewer registers
  const auto pack_and_multiply = [&](std::uint32_t tile) {
    const std::uint64_t b = row_descriptor(tile);
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      std::uint32_t* const now = Sh + 4 * (s & 1);
      if (s > 0) products_wait<1>();  // the product that had these registers
#pragma unroll
      for (int i = 0; i < 4; ++i) now[i] = pack_half(S[8 * s + 2 * i], S[8 * s + 2 * i + 1]);
      hold(Sh);
      products_fence();
      if (s == 0)
        product_n64<true>(R, now, b);
      else
        product_n64<false>(R, now, advance(b, (s >> 2) * panel_bytes + (s & 3) * 32));
      products_commit();
    }
  };
  const auto multiply_state = [&](float(&to)[32], std::uint32_t tile) {
    const std::uint64_t b = row_descriptor(tile);
    products_fence();
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      if (s == 0)
        product_n64<true>(to, Sh, b);
      else
        product_n64<false>(to, Sh + 4 * s, advance(b, (s >> 2) * panel_bytes + (s & 3) * 32));
    }
    products_commit();
  };
  const auto chunks_now = [&] { return Chunks::load(smem + C::at_chunks); };
  // The last warp to leave a stage loads the chunk that comes into it next: helpers have most to do. Not in maps, where
  // the state has.
  const auto leave = [&](int stage, int c) {
    if constexpr (C::maps) {
      warp_arrives(bar.left(stage), lane);
    } else if (lane == 0) {
      constexpr unsigned warps = 4 * C::states;
      if ((count_up(smem + C::at_left + 4 * stage) & (warps - 1)) != warps - 1) return;
      const Chunks chunks = chunks_now();
      if (c + C::stages < chunks.count)
        load_chunk<C, Outputs>(maps, head / pass.group, head, loads_values && !C::values_apart,
                               static_cast<int>(chunks.first(c + C::stages)), smem, bar.arrived(stage), stage);
      if constexpr (C::values_apart)
        if (loads_values && c + 1 < chunks.count)
          load_values<C>(maps, head, static_cast<int>(chunks.first(c + 1)), smem, bar.values(0), 0);
    }
  };

  Ring<C::stages> stage;
  Ring<C::slots> slot;
  Ring<C::value_stages> value;
  Ring<C::numbers> number;
  if constexpr (!C::maps) {
    pack(Sh, S);
    hold(Sh);
    barrier_wait(bar.full(0), 0);
    multiply_state(R, smem + C::at_K);
  }
  Marks marks(tid == 0 && half == 0);
#pragma unroll 1
  for (int c = 0; c < count; ++c) {
    const std::uint32_t keys = smem + C::at_K + stage.slot * C::key_bytes;
    if constexpr (C::maps) {
      barrier_wait(bar.full(stage.slot), stage.phase);
      marks.mark(26);
      pack_and_multiply(keys);
    }
    float O[32];
    // with decays a channel the helpers take longest and get the registers: R and O are not there together
    constexpr bool together = Outputs && !C::channel;
    if constexpr (together) multiply_state(O, smem + C::at_Q + stage.slot * C::key_bytes);
    products_wait<0>();
    marks.mark(20);
    if constexpr (together) hold(O);
    hold(R);
    // R = eta V - beta S Kᵀ, as left operand
    const std::uint32_t values_now = values + (C::values_apart ? value.slot : stage.slot) * values_step;
    if constexpr (C::values_apart)
      if (has_values) {
        barrier_wait(bar.values(value.slot), value.phase);
        const int n = chunks_now().size(c);
        if (n < chunk) {  // what follows belongs to others; this warp's 16 columns
          const std::uint32_t panel =
              smem + C::at_V + value.slot * C::value_bytes + (C::pairs ? 0 : half) * panel_bytes;
#pragma unroll 1
          for (int row = lane; row < chunk; row += 32)
            if (row >= n) {
              store16(panel + swizzled(row, 2 * warp), make_uint4(0, 0, 0, 0));
              store16(panel + swizzled(row, 2 * warp + 1), make_uint4(0, 0, 0, 0));
            }
          fence_for_tensor_cores();  // the next load writes there too
          __syncwarp();
        }
      }
    const std::uint32_t numbers = smem + C::at_scalars + number.slot * C::scalar_bytes + my_k * 8;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t m[4];
      load_matrices_transposed(m, values_now + s * 2048);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 f = load_float4(numbers + (16 * s + 8 * e) * 8);  // beta, eta, beta, eta of two tokens
        const float2 v0 = Bf16 ? unpack_bf16(m[2 * e]) : unpack_half(m[2 * e]);
        const float2 v1 = Bf16 ? unpack_bf16(m[2 * e + 1]) : unpack_half(m[2 * e + 1]);
        const float* r = R + 8 * s + 4 * e;
        Xh[4 * s + 2 * e] = pack_half(fmaf(-f.x, r[0], f.y * v0.x), fmaf(-f.z, r[1], f.w * v0.y));
        Xh[4 * s + 2 * e + 1] = pack_half(fmaf(-f.x, r[2], f.y * v1.x), fmaf(-f.z, r[3], f.w * v1.y));
      }
    }
    hold(Xh);
    if constexpr (C::channel) {
      if constexpr (Outputs) {
        multiply_state(O, smem + C::at_Q + stage.slot * C::key_bytes);
        products_wait<0>();
        hold(O);
      }
      // what the loads bring is done with, the rest of what the helper makes is not
      __syncwarp();
      leave(stage.slot, c);
      __syncwarp();
    }
    marks.mark(21);
    barrier_wait(bar.t_full(slot.slot), slot.phase);
    marks.mark(22);
    float early[16], late[16];  // X of the first and of the last 32 tokens
    {                           // X = R Tᵀ; the later tokens' block of T is zero for the first half of the tokens
      const std::uint64_t t = row_descriptor(smem + C::at_T + slot.slot * square_bytes);
      products_fence();
      product_n32<true>(early, Xh, t);
      product_n32<true>(late, Xh, advance(t, 4096));
      product_n32<false>(early, Xh + 4, advance(t, 32));
      product_n32<false>(late, Xh + 4, advance(t, 4096 + 32));
      product_n32<false>(late, Xh + 8, advance(t, 4096 + 64));
      product_n32<false>(late, Xh + 12, advance(t, 4096 + 96));
      products_commit();
    }
    const std::uint32_t decays = smem + C::at_decays + number.slot * C::decay_bytes + my_k * 8;
    if constexpr (C::channel) {
      const std::uint32_t less = smem + C::at_decays + c % C::decay_slots * C::decay_bytes + my_k * 4;
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const float2 f = load_float2(less + 32 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) S[4 * j + e] = fmaf(S[4 * j + e], e & 1 ? f.y : f.x, S[4 * j + e]);
      }
    } else if constexpr (Decay) {
      const float less = load_float(smem + C::at_decays + number.slot * C::decay_bytes + chunk * 8);
#pragma unroll
      for (int i = 0; i < N; ++i) S[i] = fmaf(S[i], less, S[i]);
      if constexpr (Outputs)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float4 f = load_float4(decays + 64 * j);
          O[4 * j] *= f.x, O[4 * j + 1] *= f.z, O[4 * j + 2] *= f.x, O[4 * j + 3] *= f.z;
        }
    }
    products_wait<0>();
    marks.mark(23);
    hold(early);
    hold(late);
    if constexpr (!Decay) warp_arrives(bar.t_empty(slot.slot), lane);
    if constexpr (Outputs || !head_decay) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Xh[i] = pack_half(early[2 * i], early[2 * i + 1]);
        Xh[8 + i] = pack_half(late[2 * i], late[2 * i + 1]);
      }
      hold(Xh);
    }
    std::uint32_t Xd[head_decay ? 16 : 1];  // with the decay to the end of the chunk
    if constexpr (head_decay) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 f = load_float4(decays + 64 * j);
        const float* x = j < 4 ? early + 4 * j : late + 4 * (j - 4);
        Xd[2 * j] = pack_half(x[0] * f.y, x[1] * f.w), Xd[2 * j + 1] = pack_half(x[2] * f.y, x[3] * f.w);
      }
      hold(Xd);
      warp_arrives(bar.t_empty(slot.slot), lane);
    }
    hold(S);
    products_fence();
    {
      const std::uint64_t b = column_descriptor(C::in_place  ? smem + C::at_gates + c % C::gate_stages * C::key_bytes
                                                : C::channel ? smem + C::at_late_K + stage.slot * C::key_bytes
                                                             : keys);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const std::uint32_t* x = head_decay ? Xd + (head_decay ? 4 * s : 0) : Xh + 4 * s;
        if constexpr (C::K == 128)
          product_columns_n128(S, x, advance(b, s * 2048));
        else
          product_columns_n64(S, x, advance(b, s * 2048));
      }
      products_commit();
    }
    if constexpr (Outputs) {
      barrier_wait(bar.m_full(slot.slot), slot.phase);
      products_fence();
      const std::uint64_t m = row_descriptor(smem + C::at_M + slot.slot * square_bytes);
#pragma unroll
      for (int s = 0; s < 4; ++s) product_n64<false>(O, Xh + 4 * s, advance(m, s * 32));
      products_commit();
      products_wait<1>();
    } else {
      products_wait<0>();
    }
    marks.mark(24);
    hold(S);
    if (c + 1 == probe_after) store_state(pass, task.probe, S, my_v, my_k, factor);
    [[maybe_unused]] const int done_stage = stage.slot;
    stage.next();
    if constexpr (!C::maps) {
      pack(Sh, S);
      hold(Sh);
    }
    if constexpr (Outputs) {  // by now done; its left operand's registers are needed
      products_wait<0>();
      hold(O);
    }
    if (Outputs || C::channel) warp_arrives(bar.m_empty(slot.slot), lane);
    if constexpr (!C::channel) {
      __syncwarp();  // all lanes have read
      leave(done_stage, c);
      __syncwarp();
    }
    marks.mark(25);
    const auto next_R = [&] {
      // after the last chunk the product is of no use, and of an old tile, but the loop stays simple
      if (c + 1 < count) barrier_wait(bar.full(stage.slot), stage.phase);
      marks.mark(26);
      multiply_state(R, smem + C::at_K + stage.slot * C::key_bytes);
    };
    if constexpr (!C::channel && !C::maps) next_R();
    if constexpr (Outputs) {
      const Chunks chunks = chunks_now();
      const std::int64_t first = chunks.first(c);
      const int n = chunks.size(c);
      if (tid == 0) boxes_read();
      named_barrier<128>(1 + half);  // the outputs before these have left
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        std::uint32_t m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = O[8 * s + 2 * i] * pass.scale, y = O[8 * s + 2 * i + 1] * pass.scale;
          m[i] = Bf16 ? pack_bf16(x, y) : pack_half(x, y);
          outputs_not_finite = times_zero_and_add<Bf16>(m[i], outputs_not_finite);
        }
        store_matrices_transposed(staging + lane_piece + s * 2048, m);
      }
      fence_for_tensor_cores();
      named_barrier<128>(1 + half);
      if (n == chunk) {
        if (tid == 0) store_box(&maps.o, staging, 64 * half, head, static_cast<int>(first));
      } else {
        const int row = tid >> 3, piece = tid & 7;
        char* out = static_cast<char*>(pass.o) +
                    2 * (head * pass.o_head_stride + (first + row) * pass.o_token_stride + 64 * half + 8 * piece);
        const bool inside = 64 * half + 8 * piece < pass.d_value;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
          const uint4 x = load16(staging + swizzled(row, piece) + i * 2048);
          if (row + 16 * i < n && inside) *reinterpret_cast<uint4*>(out + 32 * i * pass.o_token_stride) = x;
        }
      }
    }
    marks.mark(27);
    if constexpr (C::channel) next_R();
    slot.next(), number.next();
    if constexpr (C::values_apart) value.next();
  }
  products_wait<0>();
  hold(R);
  if (Outputs && tid == 0) boxes_read();
  if (probe_after == 0) copy_start<C>(pass, task, task.probe, first_v, 64, tid, 128);
#pragma unroll
  for (int i = 0; i < N; ++i) not_finite = fmaf(S[i], 0.f, not_finite);
  bad = not_finite != 0.f || (outputs_not_finite & 0x7fff7fff) != 0;
  if (task.to.data) store_state(pass, task.to, S, my_v, my_k, factor);
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__global__ void __launch_bounds__(C::threads, C::per_multiprocessor)
    delta_kernel(const __grid_constant__ Pass pass, const __grid_constant__ Maps maps) {
  extern __shared__ char raw[];
  const std::uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  const Barriers<C> bar{smem + C::at_barriers};
#ifdef LONGSCAN_HOPPER_PROFILE
  if (threadIdx.x < 64) marked[threadIdx.x] = 0;
#endif
  constexpr int tasks = C::pairs ? 2 : 1;
  const int distance = C::pairs ? pass.pair_distance : 0;  // of the CTA's tasks
  const int first = C::pairs ? blockIdx.x / distance * 2 * distance + blockIdx.x % distance : blockIdx.x;
  const Task& task = pass.tasks[first];
  const Chunks chunks(task);
  if (chunks.count == 0) {
    for (int i = 0; i < tasks; ++i) {
      const Task& t = pass.tasks[first + i * distance];
      if (t.to.data) copy_start<C>(pass, t, t.to, 0, C::V, threadIdx.x, C::threads);
      if (t.probe.data) copy_start<C>(pass, t, t.probe, 0, C::V, threadIdx.x, C::threads);
    }
    return;
  }
  if (threadIdx.x == 0) {
    constexpr int leaving = 4 * C::states * arriving_lanes;
    for (int s = 0; s < C::stages; ++s) {
      barrier_init(bar.full(s), 128), barrier_init(bar.arrived(s), 1), barrier_init(bar.left(s), leaving);
      store4(smem + C::at_left + 4 * s, 0);
    }
    for (int s = 0; s < C::slots; ++s) {
      barrier_init(bar.t_full(s), 128), barrier_init(bar.t_empty(s), C::channel ? 1 : leaving);
      barrier_init(bar.m_full(s), 128), barrier_init(bar.m_empty(s), leaving);
    }
    if (C::values_apart)
      for (int s = 0; s < C::value_stages; ++s) barrier_init(bar.values(s), 1);
    if (C::channel)
      for (int s = 0; s < (C::gate_stages == 1 ? 2 : C::gate_stages); ++s) barrier_init(bar.gates(s), 1);
    chunks.store(smem + C::at_chunks);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // the blocks of T and M above the diagonal stay zero, and V where there is none
  constexpr int zeros = C::at_T - C::at_V + (Outputs ? 2 : 1) * C::slots * square_bytes;
  for (int i = threadIdx.x; i < zeros / 16; i += C::threads) store16(smem + C::at_V + 16 * i, make_uint4(0, 0, 0, 0));
  fence_for_tensor_cores();
  __syncthreads();
  // of a pair with values in one task only: the other's are at_no_V
  const bool has_values = !(task.flags & pass.tasks[first + distance].flags & without_values);
  if (threadIdx.x == 0) {
    for (int c = 0; c < min(C::stages, chunks.count); ++c)
      load_chunk<C, Outputs>(maps, task.head / pass.group, task.head, has_values && !C::values_apart,
                             static_cast<int>(chunks.first(c)), smem, bar.arrived(c), c);
    if constexpr (C::channel)
      for (int c = 0; c < min(C::gate_stages, chunks.count); ++c)
        load_gates<C>(maps, task.head, static_cast<int>(chunks.first(c)),
                      smem + C::at_gates + c * (chunk * C::K * C::gate_bytes), bar.gates(c));
    if (C::values_apart && has_values)
      for (int c = 0; c < min(C::value_stages, chunks.count); ++c)
        load_values<C>(maps, task.head, static_cast<int>(chunks.first(c)), smem, bar.values(c), c);
  }
  __syncwarp();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // the same in a warp, and known to be
  if (role < C::helpers) {
    registers_down<C::helper_registers(Outputs)>();
    Counts* counts = pass.counts ? pass.counts + first : nullptr;
    if constexpr (C::channel)
      channel_helper_role<C, Bf16, Outputs>(pass, maps, task, chunks, smem, bar, role, counts);
    else
      helper_role<C, Bf16, Outputs, Decay>(pass, maps, task, chunks, smem, bar, role, has_values, counts);
  } else {
    registers_up<C::state_registers(Outputs)>();
    int bad = 0;
    const int half = role - C::helpers, number = first + (C::pairs ? half : 0) * distance;
    state_role<C, Bf16, Outputs, Decay>(pass, maps, pass.tasks[number], chunks, smem, bar, half, has_values, bad);
    if (bad && pass.counts) pass.counts[number].bad = 1;
  }
#ifdef LONGSCAN_HOPPER_PROFILE
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x < 64) profile[threadIdx.x] += marked[threadIdx.x];
#endif
}

/// The tensor map of [tokens, heads, width] elements of `bytes` bytes, in boxes of `rows` tokens and 128 bytes; what
/// lies beyond is read as zero, and not written.
cudaError_t make_map(CUtensorMap* map, const TokenVectors& x, std::int64_t tokens, int heads, int width, int bytes = 2,
                     unsigned rows = chunk) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found == cudaDriverEntryPointSuccess ? f : nullptr);
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.head_stride) * bytes,
                                static_cast<cuuint64_t>(x.token_stride) * bytes};
  const cuuint32_t box[] = {128u / bytes, 1, rows}, steps[] = {1, 1, 1};
  const CUresult r =
      encode(map, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 3,
             const_cast<void*>(x.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class C, bool Bf16, bool Outputs, bool Decay>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  static_assert(C::outputs == Outputs);
  Maps maps = {};
  const int shared_heads = pass.heads / pass.group;
  cudaError_t error = make_map(&maps.k, pass.k, pass.tokens, shared_heads, pass.d_key);
  if (error == cudaSuccess) error = make_map(&maps.v, pass.v, pass.tokens, pass.heads, pass.d_value);
  if (error == cudaSuccess && Outputs) error = make_map(&maps.q, pass.q, pass.tokens, shared_heads, pass.d_key);
  if constexpr (C::channel) {
    const TokenVectors gates = {pass.log_decay.data, pass.log_decay.token_stride, pass.log_decay.head_stride};
    if (error == cudaSuccess) error = make_map(&maps.gates, gates, pass.tokens, pass.heads, pass.d_key, C::gate_bytes);
  }
  if (error == cudaSuccess && Outputs) {
    const TokenVectors o = {pass.o, pass.o_token_stride, pass.o_head_stride};
    error = make_map(&maps.o, o, pass.tokens, pass.heads, pass.d_value);
  }
  // once a kernel and device would do; the call costs about a microsecond
  const auto kernel = delta_kernel<C, Bf16, Outputs, Decay>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::allocated);
  if (error != cudaSuccess) return error;
  kernel<<<pass.task_count / (C::pairs ? 2 : 1), C::threads, C::allocated, stream>>>(pass, maps);
  return cudaGetLastError();
}

#ifdef LONGSCAN_HOPPER_PROFILE
/// Cycles of CTA 0 by place since the last call; `helper` names the helper's marks.
void print_marks(std::initializer_list<const char*> helper) {
  unsigned p[64];
  cudaMemcpyFromSymbol(p, profile, sizeof p);
  const char* names[64] = {};
  std::copy(helper.begin(), helper.end(), names);
  names[20] = "state: wait for R, O", names[21] = "state: R", names[22] = "state: wait for T", names[23] = "state: X";
  names[24] = "state: S", names[25] = "state: pack, wait for O", names[26] = "state: wait for K",
  names[27] = "state: O";
  double total = 0;
  for (int i = 20; i < 28; ++i) total += p[i];
  for (int i = 0; i < 64; ++i)
    if (names[i]) std::printf("  %-32s %8u cycles %5.1f %%\n", names[i], p[i], 100 * p[i] / total);
  const unsigned zero[64] = {};
  cudaMemcpyToSymbol(profile, zero, sizeof zero);
}
#endif

}  // namespace
}  // namespace longscan::hopper
