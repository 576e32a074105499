// SPDX-License-Identifier: Apache-2.0
#pragma once
// The helper warpgroups without a decay and with one decay a head.
#include "local/hopper/kernel_parts.cuh"

namespace longscan::hopper {
namespace {

// ---- decays ----

// e^(G_t - G_s) without a difference of long sums. Of warp w, which has the rows of block w of 16 tokens: `columns[s]`
// is the decay from s to the block's start for earlier blocks, and for the block itself the log2 of the decay since its
// start; `rows[t]` is {beta, log2 of e^E since the block's start}. One warp makes them all, and what the state needs.
template <class C>
__device__ __forceinline__ void make_decays(std::uint32_t scratch, std::uint32_t table, std::uint32_t smem, int number,
                                            int lane, bool undecayed) {
  const float4 x = load_float4(scratch + C::raw + 32 * lane), y = load_float4(scratch + C::raw + 32 * lane + 16);
  const int block = lane >> 3, place = lane & 7;  // of this lane's two tokens
  const float pair = x.z + y.z;
  float before = pair, after = pair;  // sums in the block, first with this lane's tokens
#pragma unroll
  for (int d = 1; d < 8; d *= 2) {
    const float b = __shfl_up_sync(0xffffffffu, before, d), a = __shfl_down_sync(0xffffffffu, after, d);
    if (place >= d) before += b;
    if (place + d < 8) after += a;
  }
  before = __shfl_up_sync(0xffffffffu, before, 1), after = __shfl_down_sync(0xffffffffu, after, 1);
  if (place == 0) before = 0;
  if (place == 7) after = 0;
  const float p0 = before + x.z, p1 = p0 + y.z, u1 = after, u0 = after + y.z;
  const float b0 = __shfl_sync(0xffffffffu, p1, 7), b1 = __shfl_sync(0xffffffffu, p1, 15),
              b2 = __shfl_sync(0xffffffffu, p1, 23), b3 = __shfl_sync(0xffffffffu, p1, 31);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float between = (block < 1 && w > 1 ? b1 : 0.f) + (block < 2 && w > 2 ? b2 : 0.f);
    const bool mine = block >= w;
    store_float2(table + C::columns + w * (chunk * 4) + 8 * lane, mine ? p0 : power_of_two(u0 + between),
                 mine ? p1 : power_of_two(u1 + between));
  }
  const float e0 = undecayed ? before : p0, e1 = undecayed ? p0 : p1;
  store_float4(table + C::rows + block * (16 * 8) + 16 * place, x.x, e0, y.x, e1);
  {
    const float start = (block > 0 ? b0 : 0.f) + (block > 1 ? b1 : 0.f) + (block > 2 ? b2 : 0.f);
    const float end = (block < 1 ? b1 : 0.f) + (block < 2 ? b2 : 0.f) + (block < 3 ? b3 : 0.f);
    store_float4(smem + C::at_scalars + number * C::scalar_bytes + 16 * lane, x.x * power_of_two(start + e0), x.y,
                 y.x * power_of_two(start + e1), y.y);
    const std::uint32_t to = smem + C::at_decays + number * C::decay_bytes;
    store_float4(to + 16 * lane, power_of_two(start + p0), power_of_two(u0 + end), power_of_two(start + p1),
                 power_of_two(u1 + end));
    // less 1, so that what decays slowly for many chunks decays at the right rate
    const float all = expm1f(0.693147181f * (b0 + b1 + b2 + b3));
    if (lane == 0) store_float(to + chunk * 8, all);
  }
  __syncwarp();
}

/// Of this thread's two rows of a chunk, t and t + 8, since the start of their block of 16 tokens.
struct RowDecays {
  float log[2];    ///< log2 of e^G
  float erase[2];  ///< log2 of e^E
};

/// A = -strict_lower(diag(beta) G) from this warp's 16 rows of G: the diagonal block as floats, the others as hi + lo
/// halves. Returns how many of this thread's tokens have beta |k|² > 2 (erase undecayed: > 1 + e^log_decay).
template <class C, bool Decay>
__device__ __forceinline__ int store_rows(std::uint32_t scratch, std::uint32_t table, const float (&g)[32], float beta0,
                                          float beta1, const RowDecays& decays, int warp, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3);
  const std::uint32_t columns = table + C::columns + warp * (chunk * 4) + 4 * col;
  const std::uint32_t A = scratch + C::A_blocks + pair_index(warp, 0) * block_bytes + in_block(lane & 15, lane >> 4);
  float row0 = -beta0, row1 = -beta1;
  if (Decay) row0 *= power_of_two(decays.erase[0]), row1 *= power_of_two(decays.erase[1]);
  int breaches = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b < warp) {
      float a[8];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* x = g + 8 * b + 4 * j;
        float2 f = {1, 1};
        if (Decay) f = load_float2(columns + (16 * b + 8 * j) * 4);
        a[4 * j] = row0 * (Decay ? f.x * x[0] : x[0]), a[4 * j + 1] = row0 * (Decay ? f.y * x[1] : x[1]);
        a[4 * j + 2] = row1 * (Decay ? f.x * x[2] : x[2]), a[4 * j + 3] = row1 * (Decay ? f.y * x[3] : x[3]);
      }
      SplitFragment split;
      split.set(a);
      store_matrices(A + b * block_bytes, split.hi);
      store_matrices(A + (6 + b) * block_bytes, split.lo);
    } else if (b == warp) {
      const std::uint32_t to = scratch + C::X_blocks + 2 * b * block_bytes;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* x = g + 8 * b + 4 * j;
        const int s = 8 * j + col;
        float a[4] = {-beta0 * x[0], -beta0 * x[1], -beta1 * x[2], -beta1 * x[3]};
        const int d = r + 8 * j - s;  // 0 or 1: this thread has an element of the diagonal
        const float erased = j ? (d == 0 ? a[2] : a[3]) : (d == 0 ? a[0] : a[1]);
        float limit = -2;
        if (Decay) {
          limit = -1 - power_of_two(decays.log[j] - decays.erase[j]);
          const float2 since = load_float2(columns + (16 * b + 8 * j) * 4);
          a[0] *= power_of_two(decays.erase[0] - since.x), a[1] *= power_of_two(decays.erase[0] - since.y);
          a[2] *= power_of_two(decays.erase[1] - since.x), a[3] *= power_of_two(decays.erase[1] - since.y);
        }
        breaches += (d == 0 || d == 1) && erased < limit;
        store_float2(to + in_floats(r, s), s < r ? a[0] : 0.f, s + 1 < r ? a[1] : 0.f);
        store_float2(to + in_floats(r + 8, s), s < r + 8 ? a[2] : 0.f, s + 1 < r + 8 ? a[3] : 0.f);
      }
    }
  }
  return breaches;
}

/// M = lower(Q Kᵀ), this warp's 16 rows.
template <class C, bool Decay>
__device__ __forceinline__ void store_M(std::uint32_t table, std::uint32_t square, const float (&m)[32],
                                        const RowDecays& decays, int warp, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3);
  const std::uint32_t columns = table + C::columns + warp * (chunk * 4) + 4 * col;
  const int row = 16 * warp + (lane & 15);
  float row0 = 1, row1 = 1;
  if (Decay) row0 = power_of_two(decays.log[0]), row1 = power_of_two(decays.log[1]);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > warp) break;  // zero, and set once and for all
    std::uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[4] = {m[8 * b + 4 * j], m[8 * b + 4 * j + 1], m[8 * b + 4 * j + 2], m[8 * b + 4 * j + 3]};
      float2 f = {1, 1};
      if (Decay) f = load_float2(columns + (16 * b + 8 * j) * 4);
      if (b < warp) {
        if (Decay) x[0] *= row0 * f.x, x[1] *= row0 * f.y, x[2] *= row1 * f.x, x[3] *= row1 * f.y;
      } else {
        const int s = 8 * j + col;
        if (Decay) {
          x[0] *= power_of_two(decays.log[0] - f.x), x[1] *= power_of_two(decays.log[0] - f.y);
          x[2] *= power_of_two(decays.log[1] - f.x), x[3] *= power_of_two(decays.log[1] - f.y);
        }
        if (s > r) x[0] = 0;
        if (s + 1 > r) x[1] = 0;
        if (s > r + 8) x[2] = 0;
        if (s + 1 > r + 8) x[3] = 0;
      }
      packed[2 * j] = pack_half(x[0], x[1]), packed[2 * j + 1] = pack_half(x[2], x[3]);
    }
    store_matrices(square + swizzled(row, 2 * b + (lane >> 4)), packed);
  }
}

// ---- the role ----

/// bf16 to fp16 in place, `Pieces` pieces of 16 bytes 2048 bytes apart, `Ahead` of them at a time.
template <int Pieces, int Ahead>
__device__ __forceinline__ void convert(std::uint32_t tile) {
#pragma unroll
  for (int i = 0; i < Pieces; i += Ahead) {
    uint4 x[Ahead];
#pragma unroll
    for (int e = 0; e < Ahead; ++e) x[e] = load16(tile + (i + e) * 2048);
#pragma unroll
    for (int e = 0; e < Ahead; ++e) {
      x[e].x = bf16_to_half(x[e].x), x[e].y = bf16_to_half(x[e].y);
      x[e].z = bf16_to_half(x[e].z), x[e].w = bf16_to_half(x[e].w);
      store16(tile + (i + e) * 2048, x[e]);
    }
  }
}

/// to[64 × 64] = A Bᵀ of two tiles of 64 tokens.
template <class C, bool Bf16>
__device__ __forceinline__ void multiply_tiles(float (&to)[32], std::uint32_t a, std::uint32_t b) {
  const std::uint64_t left = row_descriptor(a), right = row_descriptor(b);
#pragma unroll
  for (int s = 0; s < C::K / 16; ++s) {
    const int step = (s >> 2) * panel_bytes + (s & 3) * 32;
    if (s == 0)
      product_tiles_n64<true, Bf16>(to, left, right);
    else
      product_tiles_n64<false, Bf16>(to, advance(left, step), advance(right, step));
  }
  products_commit();
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__device__ __forceinline__ void helper_role(const Pass& pass, const Maps& maps, const Task& task, const Chunks& chunks,
                                            std::uint32_t smem, Barriers<C> bar, int w, bool has_values,
                                            Counts* counts) {
  constexpr bool both = C::helpers == 1;  // registers for K Kᵀ and Q Kᵀ at a time
  const int tid = threadIdx.x & 127, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int head = task.head;
  const std::uint32_t scratch = smem + C::at_scratch + w * C::scratch_bytes;

  // Of tokens `lane` and `lane` + 32 of a chunk, by one warp; bits of 0 are 0 as any type.
  struct Scalars {
    std::uint32_t beta[2] = {}, eta[2] = {}, decay[2] = {};
  };
  const auto load_scalars = [&](int c, int lane) {
    Scalars x;
    if (c >= chunks.count) return x;
    const int n = chunks.size(c);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane + 32 * i >= n) continue;
      const std::int64_t t = chunks.first(c) + lane + 32 * i;
      x.beta[i] = scalar_bits(pass.beta, t * pass.beta.token_stride + head * pass.beta.head_stride);
      if (pass.eta.data) x.eta[i] = scalar_bits(pass.eta, t * pass.eta.token_stride + head * pass.eta.head_stride);
      if (Decay)
        x.decay[i] = scalar_bits(pass.log_decay, t * pass.log_decay.token_stride + head * pass.log_decay.head_stride);
    }
    return x;
  };

  // Starts the load of this helper's next chunk, once the state has left its stage; by one warp. `stage`, `phase` are
  // of chunk c.
  const auto load_next = [&](int c, int stage, std::uint32_t phase) {
    static_assert(!C::values_apart || C::value_stages == C::stages - C::helpers);
    const int next = c + C::helpers;
    if (next < C::stages) return;
    const bool wraps = stage + C::helpers >= C::stages;
    const int next_stage = stage + C::helpers - (wraps ? C::stages : 0);
    // nothing of this is worth a register in between
    const std::uint32_t smem_now = fresh(smem);
    const int head_now = fresh(head);
    const Barriers<C> bar{smem_now + C::at_barriers};
    barrier_wait(bar.left(next_stage), phase ^ (wraps ? 0 : 1));
    if ((fresh(tid) & 31) == 0) {
      const Chunks chunks = Chunks::load(smem_now + C::at_chunks);
      if (next < chunks.count)
        load_chunk<C, Outputs>(maps, head_now / pass.group, head_now, false, static_cast<int>(chunks.first(next)),
                               smem_now, bar.arrived(next_stage), next_stage);
      if (has_values)  // of chunk c, in the place of those of the chunk that has been left
        load_values<C>(maps, head_now, static_cast<int>(chunks.first(c)), smem_now, bar.values(c % C::value_stages),
                       c % C::value_stages);
    }
    __syncwarp();
  };

  // Without a decay to where the helper and the state find them, else to where make_decays does.
  const auto store_scalars = [&](const Scalars& x, int number, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = lane + 32 * i;
      const float beta = scalar(pass.beta.type, x.beta[i]);
      const float eta = pass.eta.data ? scalar(pass.eta.type, x.eta[i]) : beta;
      if (Decay) {
        float log = 1.44269504f * scalar(pass.log_decay.type, x.decay[i]);
        if (log < least_decay) log = least_decay;
        store_float4(scratch + C::raw + t * 16, beta, eta, log, 0.f);
      } else {
        store_float2(smem + C::at_scalars + number * C::scalar_bytes + t * 8, beta, eta);
      }
    }
  };

  int stage = w, slot = w % C::slots, number = w;
  std::uint32_t phase = 0, slot_phase = 0, table = scratch;
  if (warp == 3) {
    const int lane = fresh(tid) & 31;
    store_scalars(load_scalars(w, lane), number, lane);
    if (Decay) {
      __syncwarp();
      make_decays<C>(scratch, table, smem, number, lane, pass.erase_undecayed);
      store_scalars(load_scalars(w + C::helpers, lane), 0, lane);
    }
  }
  Marks marks(tid == 0 && w == 0);
#pragma unroll 1
  for (int c = w; c < chunks.count; c += C::helpers) {
    barrier_wait(bar.arrived(stage), phase);  // for all threads also the proof that the state has left the stage
    marks.mark(0);
    const int n = chunks.size(c);
    if (n < chunk) {  // what follows belongs to others
      const int me = fresh(tid);
#pragma unroll 1
      for (int i = me; i < 64 * (C::K > C::V ? C::K : C::V) / 8; i += 128)
        if (((i >> 3) & 63) >= n) {
          if (i < 8 * C::K) store16(smem + C::at_K + stage * C::key_bytes + 16 * i, make_uint4(0, 0, 0, 0));
          if (i < 8 * C::K && Outputs) store16(smem + C::at_Q + stage * C::key_bytes + 16 * i, make_uint4(0, 0, 0, 0));
          if (i < 8 * C::V && !C::values_apart)
            store16(smem + C::at_V + stage * C::value_bytes + 16 * i, make_uint4(0, 0, 0, 0));
        }
      fence_for_tensor_cores();
      named_barrier<128>(3 + w);
    }
    marks.mark(1);
    float g[32], m[both ? 32 : 1];
    {
      const std::uint32_t keys = smem + C::at_K + fresh(stage) * C::key_bytes;
      products_fence();
      multiply_tiles<C, Bf16>(g, keys, keys);  // as they came: exact products
      if constexpr (both && Outputs) multiply_tiles<C, Bf16>(m, smem + C::at_Q + stage * C::key_bytes, keys);
    }
    if constexpr (Bf16 && Outputs && !both)
      convert<C::K / 16, 4>(smem + C::at_Q + stage * C::key_bytes + 16 * fresh(tid));
    RowDecays decays;
    float beta[2];
    const auto load_rows = [&] {
      const int row = (fresh(tid) & 31) >> 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (Decay) {
          const float2 x = load_float2(table + C::rows + warp * (16 * 8) + (row + 8 * i) * 8);
          beta[i] = x.x, decays.erase[i] = x.y;
          decays.log[i] = load_float(table + C::columns + warp * (chunk * 4) + (16 * warp + row + 8 * i) * 4);
        } else {
          beta[i] = load_float(smem + C::at_scalars + number * C::scalar_bytes + (16 * warp + row + 8 * i) * 8);
        }
      }
    };
    products_wait<0>();
    hold(g);
    if constexpr (both && Outputs) hold(m);
    named_barrier<128>(3 + w);  // all warps' products have read the tiles, and all have read the chunk before's blocks
    load_rows();
    marks.mark(2);
    {
      const int breaches = store_rows<C, Decay>(scratch, table, g, beta[0], beta[1], decays, warp, fresh(tid) & 31);
      if (breaches && counts) atomicAdd(&counts->breaches, breaches);
    }
    marks.mark(3);
    if constexpr (both && Outputs) {
      barrier_wait(bar.m_empty(slot), slot_phase ^ 1);
      store_M<C, Decay>(table, smem + C::at_M + slot * square_bytes, m, decays, warp, fresh(tid) & 31);
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(slot));
      marks.mark(4);
    }
    if (Bf16) {
      const int me = fresh(tid);
      convert<C::K / 16, C::K / 16>(smem + C::at_K + stage * C::key_bytes + 16 * me);
      if (both && Outputs) convert<C::K / 16, C::K / 16>(smem + C::at_Q + stage * C::key_bytes + 16 * me);
    }
    fence_for_tensor_cores();
    barrier_arrive(bar.full(stage));
    marks.mark(5);
    __syncwarp();
    const int next_number = number + C::helpers < C::numbers ? number + C::helpers : number + C::helpers - C::numbers;
    invert_diagonal<C>(scratch, warp, fresh(tid) & 31);
    marks.mark(6);
    named_barrier<128>(3 + w);
    marks.mark(7);
    barrier_wait(bar.t_empty(slot), slot_phase ^ 1);
    marks.mark(8);
    const int part = (warp + c) & 3;  // another warp, and quarter of the multiprocessor, has most to do each time
    merge<C>(scratch, smem + C::at_T + slot * square_bytes, part, fresh(tid) & 31);
    fence_for_tensor_cores();
    barrier_arrive(bar.t_full(slot));
    const std::uint32_t other_table = 2 * scratch + C::table_bytes - table;
    if (part == 3) {  // while the others make T: what the next chunks need
      const int lane = fresh(tid) & 31;
      const Scalars scalars = load_scalars(c + (Decay ? 2 : 1) * C::helpers, lane);
      if constexpr (C::maps) load_next(c, stage, phase);
      if (Decay) {
        make_decays<C>(scratch, other_table, smem, next_number, lane, pass.erase_undecayed);
        __syncwarp();
      }
      store_scalars(scalars, next_number, lane);
      __syncwarp();
    }
    marks.mark(9);
    if constexpr (Outputs && !both) {
      float p[32];
      __syncwarp();
      products_fence();
      multiply_tiles<C, false>(p, smem + C::at_Q + fresh(stage) * C::key_bytes,
                               smem + C::at_K + fresh(stage) * C::key_bytes);
      products_wait<0>();
      hold(p);
      marks.mark(10);
      barrier_wait(bar.m_empty(slot), slot_phase ^ 1);
      marks.mark(11);
      if (Decay) load_rows();
      store_M<C, Decay>(table, smem + C::at_M + slot * square_bytes, p, decays, warp, fresh(tid) & 31);
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(slot));
      __syncwarp();
      marks.mark(12);
    }
    stage += C::helpers;
    if (stage >= C::stages) stage -= C::stages, phase ^= 1;
    number = next_number, table = other_table;
    slot += C::helpers;
    if (slot >= C::slots) slot -= C::slots, slot_phase ^= 1;
  }
}

}  // namespace
}  // namespace longscan::hopper
