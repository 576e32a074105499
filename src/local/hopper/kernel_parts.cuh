// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the roles of the delta kernels share: sizes, layout, barriers, loads, the inverse of a chunk.
#include <cuda.h>

#include "local/hopper/delta_hopper.hpp"
#include "local/hopper/hopper_ops.cuh"

namespace longscan::hopper {
namespace {

constexpr int chunk = 64;
constexpr int panel_bytes = chunk * 128, square_bytes = chunk * chunk * 2;
/// P is carried times this, so that fp16 operands resolve it far below the rounding of S.
constexpr float identity_scale = 4096;
/// Logarithms to base 2 below this are taken as this: 2^-136 is zero in float32, and sums stay small enough to
/// subtract.
constexpr float least_decay = -136;

/// 16×16 blocks of halves for mma.sync, rows of 32 bytes whose two pieces are swapped in rows 4 to 7 and 12 to 15, so
/// that ldmatrix has no bank conflicts. A diagonal block of floats lies where the warp's two blocks of halves of its
/// inverse will be.
constexpr int block_bytes = 512;
__device__ __forceinline__ std::uint32_t in_block(int row, int piece) {
  return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4);
}
__device__ __forceinline__ std::uint32_t in_floats(int row, int column) {
  return row * 64 + (((column >> 2) ^ (row & 2)) << 4) + (column & 3) * 4;
}

/// Sizes and the layout of shared memory for keys and values of up to K and V elements; `GateBytes`: of a number of
/// log_decay with one a channel, else 0. Without outputs (`maps`) three helpers make T and start the loads. `Pairs`: a
/// CTA has two tasks of the same tokens and head, a warpgroup of the state each.
template <int Keys, int Values, int GateBytes = 0, bool Outputs = true, bool Pairs = false>
struct Shape {
  static constexpr int K = Keys, V = Values, gate_bytes = GateBytes;
  static constexpr bool channel = GateBytes > 0, outputs = Outputs, pairs = Pairs;
  static constexpr int parts = K > 128 ? 2 : 1;  // of the channels, see wide_kernel.cuh
  static constexpr bool small = K == 64 && V == 64 && !channel && !pairs;
  static constexpr bool maps = !outputs && !channel && !small;
  static constexpr int states = pairs ? 2 : V / 64 * parts;  // warpgroups
  static constexpr int helpers = small ? 1 : maps ? 3 : 2;   // warpgroups
  static constexpr int per_multiprocessor = small ? 2 : 1;
  static constexpr int stages = small || channel || parts > 1 ? 2 : maps ? 6 : 3;   // of K, Q, and V if with them
  static constexpr int slots = maps ? 3 : 2;                                        // of T, M
  static constexpr int numbers = channel || parts > 1 ? stages : stages + helpers;  // of beta, eta, decays
  static constexpr int tables = channel || parts > 1 ? 1 : 2;                       // of decays, see make_decays
  static constexpr int threads = 128 * (states + helpers);
  /// With outputs K = 128 needs 192: with 184 ptxas serializes every wgmma (C7512). With decays a channel O comes after
  /// R. Five warpgroups have 480 together, fewer 512.
  __host__ __device__ static constexpr int state_registers(bool outputs) {
    if (maps) return states == 1 ? 160 : K == 128 ? 144 : 128;
    if (states == 1) return K == 128 || channel ? 208 : 144;
    return K == 64 ? 160 : outputs && !channel ? 192 : 176;
  }
  __host__ __device__ static constexpr int helper_registers(bool outputs) {
    if (maps) return states == 1 ? 112 : K == 128 ? 64 : 72;
    if (states == 1) return K == 128 || channel ? 144 : 112;
    return K == 64 ? 96 : outputs && !channel ? 64 : 80;
  }
  static constexpr int key_bytes = chunk * K * 2, value_bytes = chunk * V * 2;
  static constexpr int at_K = 0;
  static constexpr int at_Q = at_K + stages * key_bytes;
  static constexpr int at_V = at_Q + (outputs ? stages * key_bytes : 0);
  static constexpr bool values_apart = channel || maps;  // loaded by themselves
  static constexpr int value_stages = channel ? 1 : maps ? 3 : stages;
  static constexpr int at_no_V = at_V + value_stages * value_bytes;  // zeros, for tasks of a pair without values
  static constexpr int at_T = at_no_V + (pairs ? value_bytes : 0);
  static constexpr int at_M = at_T + slots * square_bytes;
  static constexpr int at_O = at_M + (outputs ? slots * square_bytes : 0);
  // logarithms of decays a channel; K~, see channel_helper.cuh, takes the place of those of 16 bits
  static constexpr bool in_place = gate_bytes == 2;
  static constexpr int gate_stages = in_place ? 4 : gate_bytes == 4 && outputs && K == 128 ? 1 : 2;
  static constexpr int at_late_K = at_O + (outputs ? states * panel_bytes : 0);
  static constexpr int at_gates = at_late_K + (channel && !in_place ? stages * key_bytes : 0);
  static constexpr int at_scratch = at_gates + (channel ? gate_stages * chunk * K * gate_bytes : 0);
  // scratch of a helper
  static constexpr int A_blocks = 0;                               // (1,0) (2,0) (2,1) (3,0) (3,1) (3,2), hi then lo
  static constexpr int X_blocks = A_blocks + 2 * 6 * block_bytes;  // diagonal blocks of T, transposed; hi, lo of each
  static constexpr int decays = X_blocks + 2 * 4 * block_bytes;    // of the head or of the channels
  static constexpr int raw = decays;                               // of each token beta, eta, log2 of the decay
  static constexpr int columns = raw + chunk * 16;                 // of each warp, see make_decays
  static constexpr int rows = columns + 4 * chunk * 4;
  static constexpr int table_bytes = 4 * chunk * 4 + 4 * 16 * 8;
  static constexpr int factors = decays;  // [see Factor][channel], as halves
  static constexpr int sums = A_blocks;   // [block of 16 tokens][channel], log2 of its decay; until A is made
  static constexpr int scratch_bytes = channel ? factors + 15 * K * 2 : columns + tables * table_bytes;
  // of each chunk: 64 × {beta, eta}; with a decay also 64 × {e^G, e^(G_end - G)} and e^G_end - 1, or e^G_end - 1 of
  // each channel
  static constexpr int at_scalars = at_scratch + helpers * scratch_bytes;
  static constexpr int scalar_bytes = chunk * 8;
  static constexpr int at_decays = at_scalars + numbers * scalar_bytes;
  static constexpr int decay_bytes = channel ? K * 4 : chunk * 8 + 16;
  static constexpr int decay_slots = in_place ? gate_stages : numbers;
  static constexpr int at_barriers = at_decays + decay_slots * decay_bytes;
  // counts of warps that left a stage
  static constexpr int at_left =
      at_barriers + 8 * (3 * stages + 4 * slots + value_stages + (gate_stages == 1 ? 2 : gate_stages));
  static constexpr int at_chunks = (at_left + 4 * stages + 15) / 16 * 16;  // see Chunks
  static constexpr int total = at_chunks + 32;
  static constexpr int allocated = total + 1024;  // the start is aligned by hand
  static_assert(allocated <= (per_multiprocessor == 1 ? 232448 : 115712));
};

#ifdef LONGSCAN_HOPPER_PROFILE
__device__ unsigned profile[64];
/// Adds the cycles since the last mark of this role to entry `i`; one thread of CTA 0. In shared memory: the fences
/// would wait for what is under way elsewhere.
__shared__ unsigned marked[64];
struct Marks {
  unsigned last;
  bool on;
  __device__ explicit Marks(bool on) : last(clock()), on(on && blockIdx.x == 0) {}
  __device__ void mark(int i) {
    if (!on) return;
    const unsigned now = clock();
    atomicAdd(&marked[i], now - last);
    last = now;
  }
};
#else
struct Marks {
  __device__ explicit Marks(bool) {}
  __device__ void mark(int) {}
};
#endif

/// Addresses of the barriers of one CTA.
template <class C>
struct Barriers {
  std::uint32_t base;
  __device__ std::uint32_t full(int s) const { return base + 8 * s; }
  __device__ std::uint32_t arrived(int s) const { return base + 8 * (C::stages + s); }
  __device__ std::uint32_t t_full(int s) const { return base + 8 * (2 * C::stages + s); }
  __device__ std::uint32_t t_empty(int s) const { return base + 8 * (2 * C::stages + C::slots + s); }
  __device__ std::uint32_t m_full(int s) const { return base + 8 * (2 * C::stages + 2 * C::slots + s); }
  __device__ std::uint32_t m_empty(int s) const { return base + 8 * (2 * C::stages + 3 * C::slots + s); }
  /// All warps of the state have left a stage; where helpers load.
  __device__ std::uint32_t left(int s) const { return values(C::value_stages) + 8 * s; }
  /// Decays a channel: their logarithms are there; for a helper where there is one place.
  __device__ std::uint32_t gates(int s) const { return left(C::stages) + 8 * s; }
  /// Of values that are loaded by themselves.
  __device__ std::uint32_t values(int s) const { return base + 8 * (2 * C::stages + 4 * C::slots + s); }
};

/// Position in a ring: its slot, and the parity of its phase.
template <int N>
struct Ring {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ void next() {
    if (++slot == N) slot = 0, phase ^= 1;
  }
};

/// The chunks of a task: 64 tokens each, but one ends at the probe and one at the end.
struct Chunks {
  std::int64_t begin;
  int tokens, before_probe, to_probe, count;
  Chunks() = default;
  __device__ explicit Chunks(const Task& t) : begin(t.begin), tokens(static_cast<int>(t.end - t.begin)) {
    before_probe = t.probe_at > t.begin ? static_cast<int>(t.probe_at - t.begin) : 0;
    to_probe = (before_probe + chunk - 1) / chunk;
    count = to_probe + (tokens - before_probe + chunk - 1) / chunk;
  }
  /// To and from shared memory, for whoever has no registers to keep them in.
  __device__ void store(std::uint32_t at) const {
    const std::uint64_t b = static_cast<std::uint64_t>(begin);
    store16(at, make_uint4(static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(b >> 32), tokens, before_probe));
    store16(at + 16, make_uint4(to_probe, count, 0, 0));
  }
  __device__ static Chunks load(std::uint32_t at) {
    const uint4 a = load16(at), b = load16(at + 16);
    Chunks x;
    x.begin = static_cast<std::int64_t>(a.x | static_cast<std::uint64_t>(a.y) << 32);
    x.tokens = a.z, x.before_probe = a.w, x.to_probe = b.x, x.count = b.y;
    return x;
  }
  __device__ int offset(int c) const { return c < to_probe ? chunk * c : before_probe + chunk * (c - to_probe); }
  __device__ std::int64_t first(int c) const { return begin + offset(c); }
  __device__ int size(int c) const { return min(chunk, (c < to_probe ? before_probe : tokens) - offset(c)); }
};

/// The tensor maps of q, k, v and o, and of decays a channel.
struct Maps {
  CUtensorMap q, k, v, o, gates;
};

/// Starts the load of chunk `c`, by one thread; its stage is empty. `value`: the first of V's columns.
template <class C, bool Outputs>
__device__ __forceinline__ void load_chunk(const Maps& maps, int shared_head, int head, bool values, int first,
                                           std::uint32_t smem, std::uint32_t arrived, int stage, int value = 0) {
  barrier_arrive_and_expect(arrived, C::key_bytes * (Outputs ? 2 : 1) + (values ? C::value_bytes : 0));
#pragma unroll
  for (int p = 0; p < C::K / 64; ++p) {
    copy_box(smem + C::at_K + stage * C::key_bytes + p * panel_bytes, &maps.k, arrived, 64 * p, shared_head, first);
    if (Outputs)
      copy_box(smem + C::at_Q + stage * C::key_bytes + p * panel_bytes, &maps.q, arrived, 64 * p, shared_head, first);
  }
  if (values)
#pragma unroll
    for (int p = 0; p < C::V / 64; ++p)
      copy_box(smem + C::at_V + stage * C::value_bytes + p * panel_bytes, &maps.v, arrived, value + 64 * p, head,
               first);
}

/// Starts the load of a chunk's decays a channel to `gates`, by one thread: panels of 128 bytes a token.
template <class C>
__device__ __forceinline__ void load_gates(const Maps& maps, int head, int first, std::uint32_t gates,
                                           std::uint32_t arrived) {
  constexpr int panels = C::K * C::gate_bytes / 128;
  barrier_arrive_and_expect(arrived, panels * panel_bytes);
#pragma unroll
  for (int p = 0; p < panels; ++p)
    copy_box(gates + p * panel_bytes, &maps.gates, arrived, 128 / C::gate_bytes * p, head, first);
}

/// The values alone.
template <class C>
__device__ __forceinline__ void load_values(const Maps& maps, int head, int first, std::uint32_t smem,
                                            std::uint32_t arrived, int stage) {
  barrier_arrive_and_expect(arrived, C::value_bytes);
#pragma unroll
  for (int p = 0; p < C::V / 64; ++p)
    copy_box(smem + C::at_V + stage * C::value_bytes + p * panel_bytes, &maps.v, arrived, 64 * p, head, first);
}

/// The bits of an element, to be used later: a conversion here would wait for the load.
__device__ __forceinline__ std::uint32_t scalar_bits(const TokenScalars& a, std::int64_t i) {
  return a.type == Type::f32 ? static_cast<const std::uint32_t*>(a.data)[i]
                             : static_cast<const std::uint16_t*>(a.data)[i];
}

__device__ __forceinline__ float scalar(Type type, std::uint32_t bits) {
  if (type == Type::f32) return __uint_as_float(bits);
  if (type == Type::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<std::uint16_t>(bits)));
}

// ---- inverse ----

/// Two 8-column accumulators as hi + lo left operands.
struct SplitFragment {
  std::uint32_t hi[4], lo[4];
  __device__ void set(const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      hi[i] = pack_half(x[2 * i], x[2 * i + 1]);
      const float2 h = unpack_half(hi[i]);
      lo[i] = pack_half(x[2 * i] - h.x, x[2 * i + 1] - h.y);
    }
  }
};

/// acc[0] + acc[1] += a · B, B as hi and lo fragments of two 8-column tiles.
__device__ __forceinline__ void block_product(float (&acc)[2][8], const SplitFragment& a, const std::uint32_t (&hi)[4],
                                              const std::uint32_t (&lo)[4]) {
  mma_16x8x16(acc[0], a.hi, hi[0], hi[1]);
  mma_16x8x16(acc[0] + 4, a.hi, hi[2], hi[3]);
  mma_16x8x16(acc[1], a.lo, hi[0], hi[1]);
  mma_16x8x16(acc[1] + 4, a.lo, hi[2], hi[3]);
  mma_16x8x16(acc[1], a.hi, lo[0], lo[1]);
  mma_16x8x16(acc[1] + 4, a.hi, lo[2], lo[3]);
}

__device__ __forceinline__ void add_up(SplitFragment& to, const float (&acc)[2][8]) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = acc[0][i] + acc[1][i];
  to.set(sum);
}

__host__ __device__ constexpr int pair_index(int i, int j) { return i * (i - 1) / 2 + j; }

/// Block column `warp` of T below the diagonal, from T = inverse of (I - A): T_ik = T_ii sum over m of A_im T_mk,
/// m = k .. i - 1. Everything is transposed, so that each product is the left operand of the next, in registers; no
/// warp waits for another.
template <class C>
__device__ __forceinline__ void merge(std::uint32_t scratch, std::uint32_t square, int warp, int lane) {
  // A is stored as it is, the diagonal blocks of T transposed
  const std::uint32_t X = scratch + C::X_blocks + in_block(lane & 15, lane >> 4);
  const std::uint32_t A =
      scratch + C::A_blocks + warp * block_bytes + in_block((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
  const std::uint32_t to = square + swizzled((lane & 7) + (lane >> 4) * 8, 2 * warp + ((lane >> 3) & 1));
  SplitFragment Z[3];  // T_kk, T_(k+1)k, T_(k+2)k, transposed
  load_matrices(Z[0].hi, X + 2 * warp * block_bytes);
  load_matrices(Z[0].lo, X + (2 * warp + 1) * block_bytes);
  store_matrices_transposed(to + warp * 2048, Z[0].hi);
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    const int i = warp + d;
    if (i > 3) break;
    SplitFragment left;
    std::uint32_t hi[4], lo[4];
    {
      float sum[2][8] = {};
#pragma unroll
      for (int m = 0; m < d; ++m) {
        const std::uint32_t block = A + (pair_index(i, m)) * block_bytes;
        load_matrices(hi, block);
        load_matrices(lo, block + 6 * block_bytes);
        block_product(sum, Z[m], hi, lo);
      }
      add_up(left, sum);
    }
    load_matrices_transposed(hi, X + 2 * i * block_bytes);
    load_matrices_transposed(lo, X + (2 * i + 1) * block_bytes);
    float out[2][8] = {};
    block_product(out, left, hi, lo);
    if (d < 3) {
      add_up(Z[d], out);
      store_matrices_transposed(to + i * 2048, Z[d].hi);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        hi[e] = pack_half(out[0][2 * e] + out[1][2 * e], out[0][2 * e + 1] + out[1][2 * e + 1]);
      store_matrices_transposed(to + i * 2048, hi);
    }
  }
}

/// The inverse of the diagonal block of I - A of this warp by forward substitution, a column a lane; lanes 0 to 15
/// store its hi, 16 to 31 its lo. `Two`: of blocks 2 · warp and 2 · warp + 1, one of them each.
template <class C, bool Two = false>
__device__ __forceinline__ void invert_diagonal(std::uint32_t scratch, int warp, int lane) {
  const int j = lane & 15;
  const std::uint32_t rows = scratch + C::X_blocks + 2 * (Two ? 2 * warp + (lane >> 4) : warp) * block_bytes;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == j ? 1.f : 0.f;
#pragma unroll
    for (int s = 0; s < i; s += 4) {
      const float4 a = load_float4(rows + i * 64 + (((s >> 2) ^ (i & 2)) << 4));
      sum = fmaf(a.x, x[s], sum);
      if (s + 1 < i) sum = fmaf(a.y, x[s + 1], sum);
      if (s + 2 < i) sum = fmaf(a.z, x[s + 2], sum);
      if (s + 3 < i) sum = fmaf(a.w, x[s + 3], sum);
    }
    x[i] = sum;
  }
  std::uint32_t e[8], f[8];  // hi, lo
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    e[i] = pack_half(x[2 * i], x[2 * i + 1]);
    const float2 h = unpack_half(e[i]);
    f[i] = pack_half(x[2 * i] - h.x, x[2 * i + 1] - h.y);
    if (!Two && lane >= 16) e[i] = f[i];
  }
  const std::uint32_t out = rows + (Two ? 0 : lane >> 4) * block_bytes;
  __syncwarp();  // the block of floats, which this replaces, has been read
  store16(out + in_block(j, 0), make_uint4(e[0], e[1], e[2], e[3]));
  store16(out + in_block(j, 1), make_uint4(e[4], e[5], e[6], e[7]));
  if (Two) {
    store16(out + block_bytes + in_block(j, 0), make_uint4(f[0], f[1], f[2], f[3]));
    store16(out + block_bytes + in_block(j, 1), make_uint4(f[4], f[5], f[6], f[7]));
  }
}

/// The same number, from which the compiler cannot make anything in advance: registers are short here, and values kept
/// in local memory cost more than made anew.
template <class T>
__device__ __forceinline__ T fresh(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace
}  // namespace longscan::hopper
