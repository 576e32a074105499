// SPDX-License-Identifier: Apache-2.0
#pragma once
// The helper warpgroups with one decay a channel, d = e^log_decay. With G the sum of the logarithms since the chunk's
// start, of each channel, the state needs of a chunk
//   K̂ = k e^G and Q̂ = q e^G (in place of k and q), K~ = k e^(G_end - G), the inverse T of I - A, and M:
//   A_ts = -beta_t Σ k_t k_s e^(G_t - G_s) for s < t,   M_ts = Σ q_t k_s e^(G_t - G_s) for s <= t.
// No exponent is ever positive and no two long sums are subtracted: a pair of tokens is made where the smallest aligned
// block of 2, 4, …, 64 tokens that holds both is cut in halves, from the decay since the cut (for t) and up to it (for
// s), as products of decays; what is zero there is zero. A warp has a block of 16 tokens:
//   1. It goes through the channels, 8 at a time, in the layout of an operand of mma.sync (a thread has tokens r and
//      r + 8). Decays since and up to the cuts of 1, 2, 4 and 8 tokens come from the other half by a shuffle a level;
//      k and q times them are both operands of the products. k and q with the decay since the start of the 16 tokens,
//      and k with the decay up to their end, go to shared memory.
//   2. Pairs of blocks are products of these tiles, with the decay of the blocks between.
//   3. The tiles get the decay of the blocks before (K̂, Q̂) and after (K~).
// There are two stages, one for each helper; memory holds no more. The state leaves k and q as soon as it has R and O,
// and K~, T and M at the chunk's end. There is one place for values. K~ takes the place of logarithms of 16 bits, and
// there are four such places, so that a helper need not wait for the state before it begins; float32's have one or two
// (who has made its 16 tokens starts the next load), and K~ one a stage.
#include "local/hopper/kernel_parts.cuh"

namespace longscan::hopper {
namespace {

// ---- logarithms of the decays ----

__device__ __forceinline__ void load_words(std::uint32_t (&x)[4], std::uint32_t at) {
  const uint4 v = load16(at);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void load_words(std::uint32_t (&x)[2], std::uint32_t at) {
  const float2 v = load_float2(at);
  x[0] = __float_as_uint(v.x), x[1] = __float_as_uint(v.y);
}
__device__ __forceinline__ void load_words(std::uint32_t (&x)[1], std::uint32_t at) { x[0] = load4(at); }

constexpr float log2_e = 1.44269504f;

/// The numbers in `Words` words, of float32 or of 16 bits.
template <int Words, int Channels>
__device__ __forceinline__ void unpack_gates(float (&x)[Channels], const std::uint32_t (&words)[Words], bool bf16) {
#pragma unroll
  for (int e = 0; e < Words; ++e)
    if constexpr (Words == Channels) {
      x[e] = __uint_as_float(words[e]);
    } else {
      const float2 a = unpack_bf16(words[e]), b = unpack_half(words[e]);
      x[2 * e] = bf16 ? a.x : b.x, x[2 * e + 1] = bf16 ? a.y : b.y;
    }
}

/// The log2 of the decay of each channel in this warp's block of tokens.
template <class C>
__device__ __forceinline__ void sum_decays(bool bf16, std::uint32_t gates, std::uint32_t scratch, int warp, int lane) {
  constexpr int channels = C::K / 32, words = channels * C::gate_bytes / 4;
  float sum[channels] = {};
  const int byte = 4 * words * lane, piece = (byte >> 4) & 7;
  const std::uint32_t rows = gates + (byte >> 7) * panel_bytes + 2048 * warp + (byte & 15);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    std::uint32_t x[8][words];
#pragma unroll
    for (int i = 0; i < 8; ++i) load_words(x[i], rows + 1024 * half + swizzled(i, piece));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float g[channels];
      unpack_gates(g, x[i], bf16);
#pragma unroll
      for (int e = 0; e < channels; ++e) sum[e] += g[e];
    }
  }
  const std::uint32_t to = scratch + C::sums + (warp * C::K + channels * lane) * 4;
#pragma unroll
  for (int i = 0; i < channels; i += 2) store_float2(to + 4 * i, log2_e * sum[i], log2_e * sum[i + 1]);
}

/// Decays of whole blocks of tokens, a channel; hi + lo halves where they come in pairs.
enum Factor {
  before_hi = 0,  ///< of all blocks before block 1, 2, 3
  before_lo = 3,
  after_hi = 6,  ///< of all blocks after block 0, 1, 2
  after_lo = 9,
  between = 12  ///< blocks 0 and 2, 1 and 3, 0 and 3
};

template <class C>
__device__ __forceinline__ std::uint32_t factor_row(std::uint32_t scratch, int row) {
  return scratch + C::factors + row * (C::K * 2);
}

/// From the sums of all blocks, a channel a thread. `less`: where the state finds e^G_end - 1.
template <class C>
__device__ __forceinline__ void make_factors(std::uint32_t scratch, std::uint32_t less, int channel) {
  const std::uint32_t sums = scratch + C::sums + channel * 4, to = scratch + C::factors + channel * 2;
  float b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = load_float(sums + i * C::K * 4);
  const auto store = [&](int row, float log) {
    store2(to + row * (C::K * 2), __half_as_ushort(__float2half_rn(power_of_two(log))));
  };
  const auto store_both = [&](int hi, int lo, float log) {
    const float x = power_of_two(log);
    const __half h = __float2half_rn(x);
    store2(to + hi * (C::K * 2), __half_as_ushort(h));
    store2(to + lo * (C::K * 2), __half_as_ushort(__float2half_rn(x - __half2float(h))));
  };
  store_both(before_hi, before_lo, b[0]);
  store_both(before_hi + 1, before_lo + 1, b[0] + b[1]);
  store_both(before_hi + 2, before_lo + 2, b[0] + b[1] + b[2]);
  store_both(after_hi, after_lo, b[1] + b[2] + b[3]);
  store_both(after_hi + 1, after_lo + 1, b[2] + b[3]);
  store_both(after_hi + 2, after_lo + 2, b[3]);
  store(between, b[1]);
  store(between + 1, b[2]);
  store(between + 2, b[1] + b[2]);
  // less 1, so that what decays slowly for many chunks decays at the right rate
  store_float(less + channel * 4, expm1f(0.693147181f * (b[0] + b[1] + b[2] + b[3])));
}

// ---- a block of 16 tokens ----

template <bool Bf16>
__device__ __forceinline__ float2 widen(std::uint32_t x) {
  return Bf16 ? unpack_bf16(x) : unpack_half(x);
}

/// Products of a block's tokens with decays since and up to a cut, for the pairs that the cut divides. A block is two
/// squares of 8 tokens. `eight`: {k_t k_s, k_t k_(s+1), q_t k_s, q_t k_(s+1)} with t = 8 + this thread's row, s its
/// column. The others have both squares' pairs, rows behind a cut and columns before it: of the first square in their
/// place; of the second, row t and column s are where t ^ distance and s ^ distance are, `distance` 1, 2 or 4.
struct BlockProducts {
  float one[4] = {}, two[4] = {}, four[4] = {}, eight[4] = {};
};

/// Of tokens r and r + 8 of a block, r the row of this thread.
struct OwnProducts {
  float key[2] = {}, query[2] = {};  ///< |k|², q k
  /// Two channels of k, k of the second token, q, q.
  template <bool Bf16, bool Outputs>
  __device__ __forceinline__ void add(const std::uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 k = widen<Bf16>(x[i]);
      key[i] = fmaf(k.x, k.x, fmaf(k.y, k.y, key[i]));
      if constexpr (Outputs) {
        const float2 q = widen<Bf16>(x[2 + i]);
        query[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, query[i]));
      }
    }
  }
  /// The sums over the threads that share a row.
  template <bool Outputs>
  __device__ __forceinline__ void gather() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        key[i] += __shfl_xor_sync(0xffffffffu, key[i], d);
        if constexpr (Outputs) query[i] += __shfl_xor_sync(0xffffffffu, query[i], d);
      }
  }
};

/// acc += products of k, q times `w` of tokens behind the cuts with k times `w` of tokens before them.
template <bool Outputs>
__device__ __forceinline__ void add_level(float (&acc)[4], const std::uint32_t (&x)[4], const float (&w)[4],
                                          bool behind, int distance) {
  const std::uint32_t first = pack_half(w[0], w[1]), second = pack_half(w[2], w[3]);
  const std::uint32_t k = multiply_halves(x[0], first),
                      other = __shfl_xor_sync(0xffffffffu, multiply_halves(x[1], second), 4 * distance);
  std::uint32_t q = 0;
  if constexpr (Outputs) {
    q = multiply_halves(x[2], first);
    const std::uint32_t other_q = __shfl_xor_sync(0xffffffffu, multiply_halves(x[3], second), 4 * distance);
    q = behind ? q : other_q;
  }
  mma_16x8x8(acc, behind ? k : other, q, behind ? other : k);
}

__device__ __forceinline__ std::uint32_t scaled(std::uint32_t x, float a, float b) {
  const float2 f = unpack_half(x);
  return pack_half(f.x * a, f.y * b);
}

/// Step 1 of the above. `at`: where lane l's row of an 8×8 matrix lies, l / 8 = 0, 1 for k and 2, 3 for q, of the first
/// 8 channels but for the swizzle by `flip`.
template <class C, bool Bf16, bool Outputs>
__device__ __forceinline__ void block_products(BlockProducts& p, OwnProducts& own, std::uint32_t at, int flip,
                                               std::uint32_t to_late, bool bf16, std::uint32_t gates, int warp,
                                               int lane) {
  const bool second = lane & 4, third = lane & 8, fourth = lane & 16;  // this token is behind the cut
#pragma unroll 1
  for (int j = 0; j < C::K / 8; ++j) {
    const std::uint32_t in_panels = (j >> 3) * panel_bytes + (((j & 7) ^ flip) << 4), place = at + in_panels;
    std::uint32_t x[4], bits[2][C::gate_bytes / 2];
    load_matrices(x, place);
    own.add<Bf16, Outputs>(x);
    if constexpr (C::gate_bytes == 2) {
      load_two_matrices(bits[0][0], bits[1][0], gates + (16 * warp + (lane & 15)) * 128 + in_panels);
    } else {
      const int piece = 2 * (j & 3) + ((lane >> 1) & 1);
      const std::uint32_t from =
          gates + (j >> 2) * panel_bytes + 2048 * warp + swizzled(lane >> 2, piece) + 8 * (lane & 1);
      load_words(bits[0], from);
      load_words(bits[1], from + 1024);
    }
#pragma unroll
    for (int i = 0; i < (Outputs ? 4 : 2); ++i)
      if (Bf16) x[i] = bf16_to_half(x[i]);
    // decays of token r, two channels, and of token r + 8: since the cut including this token, up to it from after this
    // token, of all tokens of this side
    float since[4], until[4], all[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float g[2];
      unpack_gates(g, bits[i], bf16);
      all[2 * i] = power_of_two(log2_e * g[0]), all[2 * i + 1] = power_of_two(log2_e * g[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) since[i] = all[i], until[i] = 1;
    const auto level = [&](float(&acc)[4], bool behind, int distance) {
      float f[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i] = behind ? since[i] : until[i];
      add_level<Outputs>(acc, x, f, behind, distance);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, all[i], 4 * distance);
        all[i] *= other;
        if (behind)
          since[i] *= other;
        else
          until[i] *= other;
      }
    };
    level(p.one, second, 1);
    level(p.two, third, 2);
    level(p.four, fourth, 4);
    const std::uint32_t f = pack_half(since[2], since[3]);
    mma_16x8x8(p.eight, multiply_halves(x[1], f), Outputs ? multiply_halves(x[3], f) : 0,
               multiply_halves(x[0], pack_half(until[0], until[1])));
#pragma unroll
    for (int i = 0; i < 2; ++i) since[2 + i] *= all[i], until[i] *= all[2 + i];
    store_two_matrices(place + to_late, scaled(x[0], until[0], until[1]),
                       scaled(x[1], until[2], until[3]));  // lanes 0 to 15 have k
    x[0] = scaled(x[0], since[0], since[1]), x[1] = scaled(x[1], since[2], since[3]);
    if constexpr (Outputs) {
      x[2] = scaled(x[2], since[0], since[1]), x[3] = scaled(x[3], since[2], since[3]);
      store_matrices(place, x);
    } else {
      store_two_matrices(place, x[0], x[1]);
    }
  }
}

/// Products of a block's tokens, each {k_t k_s, k_t k_(s+1), q_t k_s, q_t k_(s+1)}: t and s in the same square of 8
/// tokens, this thread's row and column of it, those above the diagonal of no meaning; and t in the second, s in the
/// first.
struct DiagonalBlock {
  float square[2][4] = {}, below[4] = {};
};

template <bool Outputs>
__device__ __forceinline__ void gather(DiagonalBlock& d, OwnProducts& own, const BlockProducts& p, int lane) {
  own.gather<Outputs>();
  const int r = lane >> 2, col = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int x = 0; x < (Outputs ? 4 : 2); ++x) {
      const int apart = r ^ (col + (x & 1));
      const float one = i == 0 ? p.one[x] : __shfl_xor_sync(0xffffffffu, p.one[x ^ 1], 4);
      const float two = i == 0 ? p.two[x] : __shfl_xor_sync(0xffffffffu, p.two[x], 9);
      const float four = i == 0 ? p.four[x] : __shfl_xor_sync(0xffffffffu, p.four[x], 18);
      d.square[i][x] = apart >= 4 ? four : apart >= 2 ? two : apart == 0 && x > 1 ? own.query[i] : one;
    }
#pragma unroll
  for (int x = 0; x < 4; ++x) d.below[x] = p.eight[x];
}

/// The diagonal blocks of A, as floats, and of M. Returns how many of this thread's tokens have beta |k|² > 2.
template <class C, bool Outputs>
__device__ __forceinline__ int store_diagonal(const DiagonalBlock& d, const OwnProducts& own, std::uint32_t scratch,
                                              std::uint32_t scalars, std::uint32_t square, int warp, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3), t = 16 * warp + r;
  const std::uint32_t to = scratch + C::X_blocks + 2 * warp * block_bytes;
  const float beta[2] = {load_float(scalars + 8 * t), load_float(scalars + 8 * (t + 8))};
  std::uint32_t m[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float a[2], b[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      a[e] = col + e < r ? -beta[i] * d.square[i][e] : 0.f;
      b[e] = col + e <= r ? d.square[i][2 + e] : 0.f;
    }
    store_float2(to + in_floats(r + 8 * i, 8 * i + col), a[0], a[1]);
    m[3 * i] = pack_half(b[0], b[1]);
  }
  store_float2(to + in_floats(r, 8 + col), 0, 0);
  store_float2(to + in_floats(r + 8, col), -beta[1] * d.below[0], -beta[1] * d.below[1]);
  if constexpr (Outputs) {
    m[1] = pack_half(d.below[2], d.below[3]), m[2] = 0;
    store_matrices(square + swizzled(16 * warp + (lane & 15), 2 * warp + (lane >> 4)), m);
  }
  return (lane & 3) == 0 ? (beta[0] * own.key[0] > 2) + (beta[1] * own.key[1] > 2) : 0;
}

// ---- pairs of blocks ----

/// Step 2: block (i, j) of A as hi + lo halves and of M. `factor`: the row of the decay between, or -1.
template <class C, bool Outputs>
__device__ __forceinline__ void pair_products(std::uint32_t scratch, std::uint32_t keys, std::uint32_t queries,
                                              std::uint32_t late, std::uint32_t scalars, std::uint32_t square, int i,
                                              int j, int factor, int lane) {
  float a[8] = {}, b[8] = {};
  const std::uint32_t row = (lane & 15) * 128, left = 2048 * i + row, right = 2048 * j + row;
  const std::uint32_t decay = factor_row<C>(scratch, factor) + 4 * (lane & 3);
#pragma unroll 4
  for (int s = 0; s < C::K / 16; ++s) {
    const std::uint32_t place = (s >> 2) * panel_bytes + ((((2 * s + (lane >> 4)) & 7) ^ (lane & 7)) << 4);
    std::uint32_t k[4], q[4], x[4];
    load_matrices(k, keys + left + place);
    load_matrices(x, late + right + place);
    if constexpr (Outputs) load_matrices(q, queries + left + place);
    if (factor >= 0) {
      const std::uint32_t low = load4(decay + 32 * s), high = load4(decay + 32 * s + 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        k[e] = multiply_halves(k[e], e < 2 ? low : high);
        if constexpr (Outputs) q[e] = multiply_halves(q[e], e < 2 ? low : high);
      }
    }
    mma_16x8x16(a, k, x[0], x[2]), mma_16x8x16(a + 4, k, x[1], x[3]);
    if constexpr (Outputs) mma_16x8x16(b, q, x[0], x[2]), mma_16x8x16(b + 4, q, x[1], x[3]);
  }
  const int r = 16 * i + (lane >> 2);
  const float beta0 = -load_float(scalars + 8 * r), beta1 = -load_float(scalars + 8 * (r + 8));
  a[0] *= beta0, a[1] *= beta0, a[4] *= beta0, a[5] *= beta0;
  a[2] *= beta1, a[3] *= beta1, a[6] *= beta1, a[7] *= beta1;
  SplitFragment split;
  split.set(a);
  const std::uint32_t to = scratch + C::A_blocks + pair_index(i, j) * block_bytes + in_block(lane & 15, lane >> 4);
  store_matrices(to, split.hi);
  store_matrices(to + 6 * block_bytes, split.lo);
  if constexpr (Outputs) {
    std::uint32_t m[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) m[e] = pack_half(b[2 * e], b[2 * e + 1]);
    store_matrices(square + swizzled(16 * i + (lane & 15), 2 * j + (lane >> 4)), m);
  }
}

/// The pairs of blocks of a warp: (1,0) and (3,0), (2,1) and (3,1), (2,0), (3,2); the last two invert the diagonal
/// blocks.
template <class C, bool Outputs>
__device__ __forceinline__ void all_pairs(std::uint32_t scratch, std::uint32_t keys, std::uint32_t queries,
                                          std::uint32_t late, std::uint32_t scalars, std::uint32_t square, int warp,
                                          int lane) {
#pragma unroll 1
  for (int n = 0; n < (warp < 2 ? 2 : 1); ++n) {
    const int i = n == 1 || warp == 3 ? 3 : warp == 0 ? 1 : 2;
    const int j = warp == 0 || warp == 2 ? 0 : warp == 1 ? 1 : 2;
    const int factor = i - j == 3 ? between + 2 : i - j == 2 ? between + j : -1;
    pair_products<C, Outputs>(scratch, keys, queries, late, scalars, square, i, j, factor, lane);
  }
  if (warp >= 2) invert_diagonal<C, true>(scratch, warp - 2, lane);
}

// ---- the tiles ----

/// Step 3: this warp's 16 rows of a tile, times the decays in rows `hi`, `lo` of the factors.
template <class C>
__device__ __forceinline__ void scale_rows(std::uint32_t scratch, std::uint32_t tile, int hi, int lo, int warp,
                                           int lane) {
  constexpr int pieces = C::K / 8, rows = 32 / pieces;
  const int piece = lane % pieces, row = lane / pieces;
  const uint4 h = load16(factor_row<C>(scratch, hi) + 16 * piece), l = load16(factor_row<C>(scratch, lo) + 16 * piece);
  const auto times = [](std::uint32_t x, std::uint32_t hi, std::uint32_t lo) {
    return multiply_add_halves(x, hi, multiply_halves(x, lo));
  };
  tile += (piece >> 3) * panel_bytes + 2048 * warp;
#pragma unroll 4
  for (int i = 0; i < 16 / rows; ++i) {
    const std::uint32_t at = tile + swizzled(row + rows * i, piece & 7);
    uint4 x = load16(at);
    x.x = times(x.x, h.x, l.x), x.y = times(x.y, h.y, l.y), x.z = times(x.z, h.z, l.z), x.w = times(x.w, h.w, l.w);
    store16(at, x);
  }
}

// ---- the role ----

template <class C, bool Bf16, bool Outputs>
__device__ __forceinline__ void channel_helper_role(const Pass& pass, const Maps& maps, const Task& task,
                                                    const Chunks& chunks, std::uint32_t smem, Barriers<C> bar, int w,
                                                    Counts* counts) {
  const int tid = threadIdx.x & 127, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int head = task.head;
  // what is not in a ring of this helper's own is always in the same place
  const std::uint32_t scratch = smem + C::at_scratch + w * C::scratch_bytes;
  const std::uint32_t keys = smem + C::at_K + w * C::key_bytes, queries = smem + C::at_Q + w * C::key_bytes;
  const std::uint32_t scalars = smem + C::at_scalars + w * C::scalar_bytes;
  const std::uint32_t T = smem + C::at_T + w * square_bytes, M = smem + C::at_M + w * square_bytes;
  const bool bf16 = pass.log_decay.type == Type::bf16;
  std::uint32_t beta_bits = 0, eta_bits = 0;  // of this thread's token, a chunk ahead
  const auto load_scalars = [&](int c) {
    beta_bits = 0, eta_bits = 0;
    if (c >= chunks.count || tid >= chunks.size(c)) return;
    const std::int64_t t = chunks.first(c) + tid;
    beta_bits = scalar_bits(pass.beta, t * pass.beta.token_stride + head * pass.beta.head_stride);
    if (pass.eta.data) eta_bits = scalar_bits(pass.eta, t * pass.eta.token_stride + head * pass.eta.head_stride);
  };
  load_scalars(w);
  std::uint32_t phase = 0;
  Marks marks(tid == 0 && w == 0);
#pragma unroll 1
  for (int c = w; c < chunks.count; c += 2, phase ^= 1) {
    // the logarithms are there before the rest
    const int place = C::in_place ? c % C::gate_stages : w;
    const std::uint32_t gates = smem + C::at_gates + (C::gate_stages == 1 ? 0 : place) * (chunk * C::K * C::gate_bytes);
    const std::uint32_t late = C::in_place ? gates : smem + C::at_late_K + w * C::key_bytes;
    barrier_wait(bar.gates(place), C::in_place ? c / C::gate_stages & 1 : phase);
    marks.mark(0);
    const int n = chunks.size(c);  // what follows belongs to others
    const auto clear = [&](std::uint32_t panel) {
      for (int i = fresh(tid); i < 512; i += 128)
        if ((i >> 3) >= n) store16(panel + 16 * i, make_uint4(0, 0, 0, 0));
    };
    if (n < chunk) {
#pragma unroll 1
      for (int p = 0; p < C::K * C::gate_bytes / 128; ++p) clear(gates + p * panel_bytes);
      fence_for_tensor_cores();  // the next load writes there too
    }
    named_barrier<128>(3 + w);  // and all of the chunk before is done
    sum_decays<C>(bf16, gates, scratch, warp, fresh(tid) & 31);
    named_barrier<128>(3 + w);
    if constexpr (!C::in_place || arriving_lanes > 1) barrier_wait(bar.m_empty(w), phase ^ 1);
    marks.mark(1);
    if (tid < C::K) make_factors<C>(scratch, smem + C::at_decays + (C::in_place ? place : w) * C::decay_bytes, tid);
    marks.mark(2);
    barrier_wait(bar.arrived(w), phase);  // also the proof that the state is done with the scalars of two chunks before
    marks.mark(3);
    if (tid < chunk) {
      const float beta = scalar(pass.beta.type, beta_bits);
      store_float2(scalars + tid * 8, beta, pass.eta.data ? scalar(pass.eta.type, eta_bits) : beta);
    }
    if (n < chunk) {
#pragma unroll 1
      for (int p = 0; p < C::K / 64; ++p) {
        clear(keys + p * panel_bytes);
        if (Outputs) clear(queries + p * panel_bytes);
      }
      fence_for_tensor_cores();
    }
    named_barrier<128>(3 + w);
    marks.mark(4);
    {
      const int lane = fresh(tid) & 31, row = 16 * warp + (lane & 15);
      const std::uint32_t at = (Outputs && lane >= 16 ? queries : keys) + 128 * row, to_late = late - keys;
      DiagonalBlock d;
      OwnProducts own;
      BlockProducts p;
      block_products<C, Bf16, Outputs>(p, own, at, lane & 7, to_late, bf16, gates, warp, lane);
      gather<Outputs>(d, own, p, lane);
      __syncwarp();
      if constexpr (C::in_place) {
        barrier_wait(bar.m_empty(w), phase ^ 1);  // the state has left everything of two chunks before
        const int next = c + 2;
        if (tid == 0 && next >= C::gate_stages && next < chunks.count)
          load_gates<C>(maps, head, static_cast<int>(chunks.first(next)),
                        smem + C::at_gates + next % C::gate_stages * C::key_bytes, bar.gates(next % C::gate_stages));
        __syncwarp();
      }
      const int breaches = store_diagonal<C, Outputs>(d, own, scratch, scalars, M, warp, lane);
      if (breaches && counts) atomicAdd(&counts->breaches, breaches);
    }
    marks.mark(5);
    named_barrier<128>(3 + w);
    if constexpr (!C::in_place)
      if (tid == 0 && c + C::gate_stages < chunks.count)
        load_gates<C>(maps, head, static_cast<int>(chunks.first(c + C::gate_stages)), gates,
                      bar.gates((w + C::gate_stages) & 1));
    __syncwarp();
    marks.mark(6);
    const int part = (warp + c) & 3;  // another warp, and quarter of the multiprocessor, has most to do each time
    all_pairs<C, Outputs>(scratch, keys, queries, late, scalars, M, part, fresh(tid) & 31);
    if constexpr (Outputs) {
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(w));
    }
    marks.mark(7);
    named_barrier<128>(3 + w);  // the tiles have been read
    marks.mark(8);
    {
      const int lane = fresh(tid) & 31;
      if (warp > 0) {
        scale_rows<C>(scratch, keys, before_hi + warp - 1, before_lo + warp - 1, warp, lane);
        if (Outputs) scale_rows<C>(scratch, queries, before_hi + warp - 1, before_lo + warp - 1, warp, lane);
      }
      if (warp < 3) scale_rows<C>(scratch, late, after_hi + warp, after_lo + warp, warp, lane);
    }
    fence_for_tensor_cores();
    barrier_arrive(bar.full(w));
    marks.mark(9);
    load_scalars(c + 2);
    merge<C>(scratch, T, part, fresh(tid) & 31);
    fence_for_tensor_cores();
    barrier_arrive(bar.t_full(w));
    marks.mark(10);
  }
}

}  // namespace
}  // namespace longscan::hopper
