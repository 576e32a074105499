// SPDX-License-Identifier: Apache-2.0
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
#include <cuda.h>

#include <cstdio>

#include "local/hopper/delta_hopper.hpp"
#include "local/hopper/hopper_ops.cuh"

namespace longscan::hopper {
namespace {

constexpr int chunk = 64;
constexpr int slots = 2;  // of T, M
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

/// Sizes and the layout of shared memory for keys and values of up to K and V elements.
template <int Keys, int Values>
struct Shape {
  static constexpr int K = Keys, V = Values;
  static constexpr int states = V / 64;                       // warpgroups
  static constexpr int helpers = K == 64 && V == 64 ? 1 : 2;  // warpgroups
  static constexpr int per_multiprocessor = helpers == 1 ? 2 : 1;
  static constexpr int stages = helpers == 1 ? 2 : 3;  // of K, Q, V
  static constexpr int threads = 128 * (states + helpers);
  /// With outputs K = 128 needs 192: with 184 ptxas serializes every wgmma (C7512).
  __host__ __device__ static constexpr int state_registers(bool outputs) {
    return K == 128 ? (states == 1 ? 208 : outputs ? 192 : 176) : (states == 1 ? 144 : 160);
  }
  __host__ __device__ static constexpr int helper_registers(bool outputs) {
    return K == 128 ? (states == 1 ? 144 : outputs ? 64 : 80) : (states == 1 ? 112 : 96);
  }
  static constexpr int key_bytes = chunk * K * 2, value_bytes = chunk * V * 2;
  static constexpr int at_K = 0;
  static constexpr int at_Q = at_K + stages * key_bytes;
  static constexpr int at_V = at_Q + stages * key_bytes;
  static constexpr int at_T = at_V + stages * value_bytes;
  static constexpr int at_M = at_T + slots * square_bytes;
  static constexpr int at_O = at_M + slots * square_bytes;
  static constexpr int at_scratch = at_O + states * panel_bytes;
  // scratch of a helper
  static constexpr int A_blocks = 0;                               // (1,0) (2,0) (2,1) (3,0) (3,1) (3,2), hi then lo
  static constexpr int X_blocks = A_blocks + 2 * 6 * block_bytes;  // diagonal blocks of T, transposed; hi, lo of each
  static constexpr int raw = X_blocks + 2 * 4 * block_bytes;       // of each token beta, eta, log2 of the decay
  static constexpr int columns = raw + chunk * 16;                 // of each warp, see Decays
  static constexpr int rows = columns + 4 * chunk * 4;
  static constexpr int scratch_bytes = rows + 4 * 16 * 8;
  // of each stage: 64 × {beta, eta}; with a decay also 64 × {e^G, e^(G_end - G)} and e^G_end - 1
  static constexpr int at_scalars = at_scratch + helpers * scratch_bytes;
  static constexpr int scalar_bytes = chunk * 8;
  static constexpr int at_decays = at_scalars + stages * scalar_bytes;
  static constexpr int decay_bytes = chunk * 8 + 16;
  static constexpr int at_barriers = at_decays + stages * decay_bytes;
  static constexpr int at_left = at_barriers + 8 * (2 * stages + 4 * slots);  // counts of warps that left a stage
  static constexpr int total = at_left + 4 * stages;
  static constexpr int allocated = total + 1024;  // the start is aligned by hand
  static_assert(allocated <= (per_multiprocessor == 1 ? 232448 : 115712));
};

#ifdef LONGSCAN_HOPPER_PROFILE
__device__ unsigned profile[64];
/// Adds the cycles since the last mark of this role to entry `i`; one thread of CTA 0.
struct Marks {
  unsigned last;
  bool on;
  __device__ explicit Marks(bool on) : last(clock()), on(on && blockIdx.x == 0) {}
  __device__ void mark(int i) {
    if (!on) return;
    const unsigned now = clock();
    atomicAdd(&profile[i], now - last);
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
  __device__ std::uint32_t t_empty(int s) const { return base + 8 * (2 * C::stages + slots + s); }
  __device__ std::uint32_t m_full(int s) const { return base + 8 * (2 * C::stages + 2 * slots + s); }
  __device__ std::uint32_t m_empty(int s) const { return base + 8 * (2 * C::stages + 3 * slots + s); }
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
  __device__ explicit Chunks(const Task& t) : begin(t.begin), tokens(static_cast<int>(t.end - t.begin)) {
    before_probe = t.probe_at > t.begin ? static_cast<int>(t.probe_at - t.begin) : 0;
    to_probe = (before_probe + chunk - 1) / chunk;
    count = to_probe + (tokens - before_probe + chunk - 1) / chunk;
  }
  __device__ int offset(int c) const { return c < to_probe ? chunk * c : before_probe + chunk * (c - to_probe); }
  __device__ std::int64_t first(int c) const { return begin + offset(c); }
  __device__ int size(int c) const { return min(chunk, (c < to_probe ? before_probe : tokens) - offset(c)); }
};

/// The tensor maps of q, k and v.
struct Maps {
  CUtensorMap q, k, v;
};

/// Starts the load of chunk `c`, by one thread; its stage is empty.
template <class C, bool Outputs>
__device__ __forceinline__ void load_chunk(const Maps& maps, int shared_head, int head, bool values, int first,
                                           std::uint32_t smem, std::uint32_t arrived, int stage) {
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

// ---- decays ----

// e^(G_t - G_s) without a difference of long sums. Of warp w, which has the rows of block w of 16 tokens: `columns[s]`
// is the decay from s to the block's start for earlier blocks, and for the block itself the log2 of the decay since its
// start; `rows[t]` is {beta, log2 of e^E since the block's start}.
template <class C>
__device__ __forceinline__ void make_decays(std::uint32_t scratch, std::uint32_t smem, int stage, int warp, int lane,
                                            bool undecayed) {
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
  const float between = (block < 1 && warp > 1 ? b1 : 0.f) + (block < 2 && warp > 2 ? b2 : 0.f);
  const bool mine = block >= warp;
  store_float2(scratch + C::columns + warp * (chunk * 4) + 8 * lane, mine ? p0 : power_of_two(u0 + between),
               mine ? p1 : power_of_two(u1 + between));
  const float e0 = undecayed ? before : p0, e1 = undecayed ? p0 : p1;
  if (block == warp) store_float4(scratch + C::rows + warp * (16 * 8) + 16 * place, x.x, e0, y.x, e1);
  if (warp == 0) {  // which has the fewest blocks of A: what the state needs
    const float start = (block > 0 ? b0 : 0.f) + (block > 1 ? b1 : 0.f) + (block > 2 ? b2 : 0.f);
    const float end = (block < 1 ? b1 : 0.f) + (block < 2 ? b2 : 0.f) + (block < 3 ? b3 : 0.f);
    store_float4(smem + C::at_scalars + stage * C::scalar_bytes + 16 * lane, x.x * power_of_two(start + e0), x.y,
                 y.x * power_of_two(start + e1), y.y);
    const std::uint32_t to = smem + C::at_decays + stage * C::decay_bytes;
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
__device__ __forceinline__ int store_rows(std::uint32_t scratch, const float (&g)[32], float beta0, float beta1,
                                          const RowDecays& decays, int warp, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3);
  const std::uint32_t columns = scratch + C::columns + warp * (chunk * 4) + 4 * col;
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

/// The inverse of the diagonal block of I - A of this warp by forward substitution, a column a lane; lanes 0 to 15
/// store its hi, 16 to 31 its lo.
template <class C>
__device__ __forceinline__ void invert_diagonal(std::uint32_t scratch, int warp, int lane) {
  const int j = lane & 15;
  const std::uint32_t rows = scratch + C::X_blocks + 2 * warp * block_bytes;
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
  std::uint32_t e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    e[i] = pack_half(x[2 * i], x[2 * i + 1]);
    const float2 h = unpack_half(e[i]);
    const std::uint32_t lo = pack_half(x[2 * i] - h.x, x[2 * i + 1] - h.y);
    if (lane >= 16) e[i] = lo;
  }
  const std::uint32_t out = rows + (lane >> 4) * block_bytes;
  __syncwarp();  // the block of floats, which this replaces, has been read
  store16(out + in_block(j, 0), make_uint4(e[0], e[1], e[2], e[3]));
  store16(out + in_block(j, 1), make_uint4(e[4], e[5], e[6], e[7]));
}

/// M = lower(Q Kᵀ), this warp's 16 rows.
template <class C, bool Decay>
__device__ __forceinline__ void store_M(std::uint32_t scratch, std::uint32_t square, const float (&m)[32],
                                        const RowDecays& decays, int warp, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3);
  const std::uint32_t columns = scratch + C::columns + warp * (chunk * 4) + 4 * col;
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

// ---- helpers ----

/// The same number, from which the compiler cannot make anything in advance: registers are short here, and values kept
/// in local memory cost more than made anew.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

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
__device__ __forceinline__ void helper_role(const Pass& pass, const Task& task, const Chunks& chunks,
                                            std::uint32_t smem, Barriers<C> bar, int w, Counts* counts) {
  constexpr bool both = C::helpers == 1;  // registers for K Kᵀ and Q Kᵀ at a time
  const int tid = threadIdx.x & 127, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int head = task.head;
  const std::uint32_t scratch = smem + C::at_scratch + w * C::scratch_bytes;

  std::uint32_t beta_bits = 0, eta_bits = 0,
                decay_bits = 0;  // of this thread's token, a chunk ahead; 0 is 0 as any type
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
  int stage = w;
  std::uint32_t phase = 0;
  Marks marks(tid == 0 && w == 0);
#pragma unroll 1
  for (int c = w; c < chunks.count; c += C::helpers) {
    const int slot = c & 1;
    const std::uint32_t slot_phase = (c >> 1) & 1;
    barrier_wait(bar.arrived(stage), phase);  // for all threads also the proof that the state has left the stage
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
    const int n = chunks.size(c);
    if (n < chunk) {  // what follows belongs to others
      const int me = fresh(tid);
#pragma unroll 1
      for (int i = me; i < 64 * (C::K > C::V ? C::K : C::V) / 8; i += 128)
        if (((i >> 3) & 63) >= n) {
          if (i < 8 * C::K) store16(smem + C::at_K + stage * C::key_bytes + 16 * i, make_uint4(0, 0, 0, 0));
          if (i < 8 * C::K && Outputs) store16(smem + C::at_Q + stage * C::key_bytes + 16 * i, make_uint4(0, 0, 0, 0));
          if (i < 8 * C::V) store16(smem + C::at_V + stage * C::value_bytes + 16 * i, make_uint4(0, 0, 0, 0));
        }
      fence_for_tensor_cores();
    }
    named_barrier<128>(3 + w);  // and the blocks of the chunk before have been read
    marks.mark(1);
    float g[32], m[both ? 32 : 1];
    {
      const std::uint32_t keys = smem + C::at_K + fresh(stage) * C::key_bytes;
      products_fence();
      multiply_tiles<C, Bf16>(g, keys, keys);  // as they came: exact products
      if constexpr (both && Outputs) multiply_tiles<C, Bf16>(m, smem + C::at_Q + stage * C::key_bytes, keys);
    }
    if (Decay) make_decays<C>(scratch, smem, stage, warp, fresh(tid) & 31, pass.erase_undecayed);
    if constexpr (Bf16 && Outputs && !both)
      convert<C::K / 16, 4>(smem + C::at_Q + stage * C::key_bytes + 16 * fresh(tid));
    RowDecays decays;
    float beta[2];
    const auto load_rows = [&] {
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
    };
    load_rows();
    products_wait<0>();
    hold(g);
    if constexpr (both && Outputs) hold(m);
    named_barrier<128>(3 + w);  // all warps' products have read the tiles
    marks.mark(2);
    {
      const int breaches = store_rows<C, Decay>(scratch, g, beta[0], beta[1], decays, warp, fresh(tid) & 31);
      if (breaches && counts) atomicAdd(&counts->breaches, breaches);
    }
    marks.mark(3);
    if constexpr (both && Outputs) {
      barrier_wait(bar.m_empty(slot), slot_phase ^ 1);
      store_M<C, Decay>(scratch, smem + C::at_M + slot * square_bytes, m, decays, warp, fresh(tid) & 31);
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
    invert_diagonal<C>(scratch, warp, fresh(tid) & 31);
    marks.mark(6);
    if (both) load_scalars(c + C::helpers);
    named_barrier<128>(3 + w);
    marks.mark(7);
    barrier_wait(bar.t_empty(slot), slot_phase ^ 1);
    marks.mark(8);
    merge<C>(scratch, smem + C::at_T + slot * square_bytes, warp, fresh(tid) & 31);
    fence_for_tensor_cores();
    barrier_arrive(bar.t_full(slot));
    marks.mark(9);
    if constexpr (!both) load_scalars(c + C::helpers);
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
      store_M<C, Decay>(scratch, smem + C::at_M + slot * square_bytes, p, decays, warp, fresh(tid) & 31);
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(slot));
      __syncwarp();
      marks.mark(12);
    }
    stage += C::helpers;
    if (stage >= C::stages) stage -= C::stages, phase ^= 1;
  }
}

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
__device__ __forceinline__ void state_role(const Pass& pass, const Maps& maps, const Task& task, const Chunks& chunks,
                                           std::uint32_t smem, Barriers<C> bar, int half, int& bad) {
  constexpr int N = C::K / 2, steps = C::K / 16;  // of S a thread; products over the channels
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  const int my_v = 64 * half + 16 * warp + (lane >> 2), my_k = 2 * (lane & 3);
  const bool identity = task.flags & from_identity, has_values = !(task.flags & without_values);
  const int head = task.head, probe_after = task.probe.data ? chunks.to_probe : -1;  // not read again for each chunk
  float S[N], R[32];
  std::uint32_t Sh[N / 2], Xh[16];
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
  const std::uint32_t values = smem + C::at_V + half * panel_bytes + lane_piece;
  const std::uint32_t staging = smem + C::at_O + half * panel_bytes;
  const float factor = identity ? 1 / identity_scale : 1.f;
  float not_finite = 0;

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
  // the last warp to leave a stage loads the chunk that comes into it next
  const auto leave = [&](int stage, int c) {
    constexpr unsigned warps = 4 * C::states;
    if ((count_up(smem + C::at_left + 4 * stage) & (warps - 1)) == warps - 1 && c + C::stages < chunks.count)
      load_chunk<C, Outputs>(maps, head / pass.group, head, has_values, static_cast<int>(chunks.first(c + C::stages)),
                             smem, bar.arrived(stage), stage);
  };

  Ring<C::stages> stage;
  Ring<slots> slot;
  pack(Sh, S);
  hold(Sh);
  barrier_wait(bar.full(0), 0);
  multiply_state(R, smem + C::at_K);
  Marks marks(tid == 0 && half == 0);
#pragma unroll 1
  for (int c = 0; c < chunks.count; ++c) {
    const std::uint32_t keys = smem + C::at_K + stage.slot * C::key_bytes;
    float O[32];
    if constexpr (Outputs) {
      multiply_state(O, smem + C::at_Q + stage.slot * C::key_bytes);
    }
    products_wait<0>();
    marks.mark(20);
    if constexpr (Outputs) hold(O);
    hold(R);
    // R = eta V - beta S Kᵀ, as left operand
    const std::uint32_t numbers = smem + C::at_scalars + stage.slot * C::scalar_bytes + my_k * 8;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t m[4];
      load_matrices_transposed(m, values + stage.slot * C::value_bytes + s * 2048);
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
    const std::uint32_t decays = smem + C::at_decays + stage.slot * C::decay_bytes + my_k * 8;
    if constexpr (Decay) {
      const float less = load_float(smem + C::at_decays + stage.slot * C::decay_bytes + chunk * 8);
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
    if (lane == 0) barrier_arrive(bar.t_empty(slot.slot));
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
    }
    hold(S);
    products_fence();
    {
      const std::uint64_t b = column_descriptor(keys);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const std::uint32_t* x = Decay ? Xd + (Decay ? 4 * s : 0) : Xh + 4 * s;
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
    const int done_stage = stage.slot;
    stage.next();
    pack(Sh, S);
    hold(Sh);
    if constexpr (Outputs) {  // by now done; its left operand's registers are needed
      products_wait<0>();
      hold(O);
      if (lane == 0) barrier_arrive(bar.m_empty(slot.slot));
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
      const std::int64_t first = chunks.first(c);
      const int n = chunks.size(c);
      named_barrier<128>(1 + half);  // the outputs before these have left
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        std::uint32_t m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = O[8 * s + 2 * i] * pass.scale, y = O[8 * s + 2 * i + 1] * pass.scale;
          m[i] = Bf16 ? pack_bf16(x, y) : pack_half(x, y);
          not_finite = fmaf(x, 0.f, fmaf(y, 0.f, not_finite));
        }
        store_matrices_transposed(staging + lane_piece + s * 2048, m);
      }
      named_barrier<128>(1 + half);
      const int row = tid >> 3, piece = tid & 7;
      char* out = static_cast<char*>(pass.o) +
                  2 * (head * pass.o_head_stride + (first + row) * pass.o_token_stride + 64 * half + 8 * piece);
      const bool inside = 64 * half + 8 * piece < pass.d_value;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = load16(staging + swizzled(row, piece) + i * 2048);
        if (row + 16 * i < n && inside) *reinterpret_cast<uint4*>(out + 32 * i * pass.o_token_stride) = x;
      }
    }
    marks.mark(27);
    slot.next();
    if (c + 1 == probe_after) store_state(pass, task.probe, S, my_v, my_k, factor);
  }
  products_wait<0>();
  hold(R);
  if (probe_after == 0) copy_start<C>(pass, task, task.probe, 64 * half, 64, tid, 128);
#pragma unroll
  for (int i = 0; i < N; ++i) not_finite = fmaf(S[i], 0.f, not_finite);
  bad = not_finite != 0.f;
  if (task.to.data) store_state(pass, task.to, S, my_v, my_k, factor);
}

template <class C, bool Bf16, bool Outputs, bool Decay>
__global__ void __launch_bounds__(C::threads, C::per_multiprocessor)
    delta_kernel(const __grid_constant__ Pass pass, const __grid_constant__ Maps maps) {
  extern __shared__ char raw[];
  const std::uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  const Barriers<C> bar{smem + C::at_barriers};
  const Task& task = pass.tasks[blockIdx.x];
  const Chunks chunks(task);
  if (chunks.count == 0) {
    if (task.to.data) copy_start<C>(pass, task, task.to, 0, C::V, threadIdx.x, C::threads);
    if (task.probe.data) copy_start<C>(pass, task, task.probe, 0, C::V, threadIdx.x, C::threads);
    return;
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::stages; ++s) {
      barrier_init(bar.full(s), 128), barrier_init(bar.arrived(s), 1);
      store4(smem + C::at_left + 4 * s, 0);
    }
    for (int s = 0; s < slots; ++s) {
      barrier_init(bar.t_full(s), 128), barrier_init(bar.t_empty(s), 4 * C::states);
      barrier_init(bar.m_full(s), 128), barrier_init(bar.m_empty(s), 4 * C::states);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // the blocks of T and M above the diagonal stay zero, and V where there is none
  for (int i = threadIdx.x; i < (C::stages * C::value_bytes + 2 * slots * square_bytes) / 16; i += C::threads)
    store16(smem + C::at_V + 16 * i, make_uint4(0, 0, 0, 0));
  fence_for_tensor_cores();
  __syncthreads();
  if (threadIdx.x == 0)
    for (int c = 0; c < min(C::stages, chunks.count); ++c)
      load_chunk<C, Outputs>(maps, task.head / pass.group, task.head, !(task.flags & without_values),
                             static_cast<int>(chunks.first(c)), smem, bar.arrived(c), c);
  __syncwarp();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // the same in a warp, and known to be
  if (role < C::helpers) {
    registers_down<C::helper_registers(Outputs)>();
    helper_role<C, Bf16, Outputs, Decay>(pass, task, chunks, smem, bar, role,
                                         pass.counts ? pass.counts + blockIdx.x : nullptr);
  } else {
    registers_up<C::state_registers(Outputs)>();
    int bad = 0;
    state_role<C, Bf16, Outputs, Decay>(pass, maps, task, chunks, smem, bar, role - C::helpers, bad);
    if (bad && pass.counts) pass.counts[blockIdx.x].bad = 1;
  }
}

// ---- small kernels ----

__global__ void norms_kernel(const float* matrices, std::int64_t stride, int elements, float* norms) {
  const float* m = matrices + blockIdx.x * stride;
  float sum = 0;
  for (int i = threadIdx.x; i < elements; i += blockDim.x) sum = fmaf(m[i], m[i], sum);
  __shared__ float part[32];
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 1; i < blockDim.x / 32; ++i) sum += part[i];
    norms[blockIdx.x] = sqrtf(sum);
  }
}

/// CTA: 4 rows of the state of one chain; thread: one column.
constexpr int chain_rows = 4;

__global__ void __launch_bounds__(128) chain_kernel(const Chain* chains, int d_key, int groups) {
  const Chain chain = chains[blockIdx.x / groups];
  const int first = blockIdx.x % groups * chain_rows, k = threadIdx.x;
  __shared__ float4 rows[128];  // [j] -> the rows' values in column j
  float s[chain_rows];
  for (int r = 0; r < chain_rows; ++r) s[r] = chain.states[(first + r) * d_key + k];
  for (int i = 0; i < chain.maps; ++i) {
    const float* P = chain.P + i * chain.map_stride + k;
    rows[k] = make_float4(s[0], s[1], s[2], s[3]);
    __syncthreads();
    for (int r = 0; r < chain_rows; ++r) s[r] = chain.L[i * chain.map_stride + (first + r) * d_key + k];
#pragma unroll 32
    for (int j = 0; j < d_key; ++j) {
      const float p = P[j * d_key];
      const float4 x = rows[j];
      s[0] = fmaf(x.x, p, s[0]), s[1] = fmaf(x.y, p, s[1]), s[2] = fmaf(x.z, p, s[2]), s[3] = fmaf(x.w, p, s[3]);
    }
    for (int r = 0; r < chain_rows; ++r) chain.states[(i + 1) * chain.state_stride + (first + r) * d_key + k] = s[r];
    __syncthreads();
  }
}

/// The tensor map of [tokens, heads, width] elements of 16 bits, in boxes of 64 tokens and 64 columns; what lies beyond
/// is read as zero.
cudaError_t make_map(CUtensorMap* map, const TokenVectors& x, std::int64_t tokens, int heads, int width) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found == cudaDriverEntryPointSuccess ? f : nullptr);
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.head_stride) * 2,
                                static_cast<cuuint64_t>(x.token_stride) * 2};
  const cuuint32_t box[] = {64, 1, chunk}, steps[] = {1, 1, 1};
  const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(x.data), sizes, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class C, bool Bf16, bool Outputs, bool Decay>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  Maps maps = {};
  const int shared_heads = pass.heads / pass.group;
  cudaError_t error = make_map(&maps.k, pass.k, pass.tokens, shared_heads, pass.d_key);
  if (error == cudaSuccess) error = make_map(&maps.v, pass.v, pass.tokens, pass.heads, pass.d_value);
  if (error == cudaSuccess && Outputs) error = make_map(&maps.q, pass.q, pass.tokens, shared_heads, pass.d_key);
  // once a kernel and device would do; the call costs about a microsecond
  const auto kernel = delta_kernel<C, Bf16, Outputs, Decay>;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::allocated);
  if (error != cudaSuccess) return error;
  kernel<<<pass.task_count, C::threads, C::allocated, stream>>>(pass, maps);
  return cudaGetLastError();
}

template <class C, bool Bf16>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  if (pass.log_decay.data)
    return pass.o ? launch<C, Bf16, true, true>(pass, stream) : launch<C, Bf16, false, true>(pass, stream);
  return pass.o ? launch<C, Bf16, true, false>(pass, stream) : launch<C, Bf16, false, false>(pass, stream);
}

template <class C>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  return pass.type == Type::bf16 ? launch<C, true>(pass, stream) : launch<C, false>(pass, stream);
}

}  // namespace

bool applies(int device_major, int d_key, int d_value, const Pass& pass) {
  const auto aligned = [](const void* p, std::int64_t token_stride, std::int64_t head_stride) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
  };
  const auto narrow = [](const TokenScalars& a) { return !a.data || (a.type != Type::f64 && a.type != Type::none); };
  const auto fits = [](int d) { return d >= 64 && d <= 128 && d % 8 == 0; };
  return narrow(pass.beta) && narrow(pass.eta) && narrow(pass.log_decay) && device_major == 9 && fits(d_key) &&
         fits(d_value) && d_key == pass.d_key && d_value == pass.d_value &&
         (pass.type == Type::bf16 || pass.type == Type::f16) &&
         aligned(pass.k.data, pass.k.token_stride, pass.k.head_stride) &&
         aligned(pass.v.data, pass.v.token_stride, pass.v.head_stride) &&
         (!pass.o || (aligned(pass.q.data, pass.q.token_stride, pass.q.head_stride) &&
                      aligned(pass.o, pass.o_token_stride, pass.o_head_stride)));
}

int tasks_at_once(int d_key, int d_value) {
  return d_key <= 64 && d_value <= 64 ? Shape<64, 64>::per_multiprocessor : Shape<128, 128>::per_multiprocessor;
}

cudaError_t run_pass(const Pass& pass, cudaStream_t stream) {
  if (pass.task_count == 0) return cudaSuccess;
  if (pass.d_key <= 64)
    return pass.d_value <= 64 ? launch<Shape<64, 64>>(pass, stream) : launch<Shape<64, 128>>(pass, stream);
  return pass.d_value <= 64 ? launch<Shape<128, 64>>(pass, stream) : launch<Shape<128, 128>>(pass, stream);
}

cudaError_t matrix_norms(const float* matrices, std::int64_t stride, int count, float* norms, cudaStream_t stream,
                         int elements) {
  if (count == 0) return cudaSuccess;
  norms_kernel<<<count, 256, 0, stream>>>(matrices, stride, elements, norms);
  return cudaGetLastError();
}

cudaError_t run_chains(const Chain* chains, int count, cudaStream_t stream, int d_key, int d_value) {
  if (count == 0) return cudaSuccess;
  const int groups = d_value / chain_rows;
  chain_kernel<<<count * groups, d_key, 0, stream>>>(chains, d_key, groups);
  return cudaGetLastError();
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_profile() {
  unsigned p[64];
  cudaMemcpyFromSymbol(p, profile, sizeof p);
  const char* names[64] = {};
  const char* helper[] = {"wait for data",
                          "scalars, barrier",
                          "K Kᵀ, decays, convert Q",
                          "store A",
                          "store M (early)",
                          "convert",
                          "diagonal",
                          "barrier",
                          "wait for an empty T",
                          "merges",
                          "Q Kᵀ",
                          "wait for an empty M",
                          "store M"};
  for (int i = 0; i < 13; ++i) names[i] = helper[i];
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

Segments plan_segments(std::int64_t tokens, int heads, int multiprocessors) {
  Segments s;
  const std::int64_t least = 16 * chunk;  // below this the fixed costs of a segment show
  std::int64_t n = multiprocessors / (heads > 0 ? heads : 1);
  if (n > tokens / least) n = tokens / least;
  if (n < 1) n = 1;
  s.tokens = ((tokens + n - 1) / n + chunk - 1) / chunk * chunk;
  if (s.tokens < chunk) s.tokens = chunk;
  s.count = static_cast<std::int32_t>((tokens + s.tokens - 1) / s.tokens);
  if (s.count < 1) s.count = 1;
  return s;
}

}  // namespace longscan::hopper
