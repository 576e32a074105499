// SPDX-License-Identifier: Apache-2.0
#pragma once
// The helper warpgroups with one decay a channel, d = e^log_decay. With G the sum of the logarithms since the chunk's
// start, of each channel, the state needs of a chunk
//   K̂ = k e^G and Q̂ = q e^G (in place of k and q), K~ = k e^(G_end - G), the inverse T of I - A, and M:
//   A_ts = -beta_t Σ k_t k_s e^(G_t - G_s) for s < t,   M_ts = Σ q_t k_s e^(G_t - G_s) for s <= t.
// Between blocks of 16 tokens, and within one where decays are strong, no exponent is ever positive and no two long
// sums are subtracted: a pair of tokens is made where the smallest aligned block of 2, 4, …, 64 tokens that holds both
// is cut in halves, from the decay since the cut (for t) and up to it (for s), as products of decays; what is zero
// there is zero. A warp has a block of 16 tokens:
//   1. It goes through the channels, 8 at a time, in the layout of an operand of mma.sync (a thread has tokens r and
//      r + 8). Where the decay since the block's start stays above 2^-100, the products are of k e^G, q e^G and k e^-G,
//      in TF32 (`mild_products`). From the first token on where it does not, decays since and up to the cuts of 1, 2, 4
//      and 8 tokens come from the other half by a shuffle a level; k and q times them are both operands of the products
//      (`block_products`). k and q with the decay since the start of the 16 tokens, and k with the decay up to their
//      end, go to shared memory.
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

/// A token is mild if the decays of its block of 16 up to and with it are at least two to this in every channel: what
/// grows where they fall stays in float32's range, and so do its products with keys and queries that float16 holds.
/// Whether it is does not depend on later tokens, nor does any bit made of it and of earlier ones.
constexpr float mild_decay = -100;

/// Where lane l has its logarithms of a block's tokens if all have as many channels, first to last.
template <class C>
struct OwnChannels {
  static constexpr int count = C::K / 32, words = count * C::gate_bytes / 4;
  std::uint32_t rows;
  int piece;
  __device__ __forceinline__ OwnChannels(std::uint32_t gates, int warp, int lane) {
    const int byte = 4 * words * lane;
    rows = gates + (byte >> 7) * panel_bytes + 2048 * warp + (byte & 15), piece = (byte >> 4) & 7;
  }
  __device__ __forceinline__ void load(std::uint32_t (&x)[words], int token) const {
    load_words(x, rows + 1024 * (token >> 3) + swizzled(token & 7, piece));
  }
  static __device__ __forceinline__ void add(float (&sum)[count], const std::uint32_t (&x)[words], bool bf16) {
    float g[count];
    unpack_gates(g, x, bf16);
#pragma unroll
    for (int e = 0; e < count; ++e) sum[e] += g[e];
  }
  /// Of all lanes.
  static __device__ __forceinline__ bool mild(const float (&sum)[count]) {
    bool all = true;
#pragma unroll
    for (int e = 0; e < count; ++e) all = all && log2_e * sum[e] >= mild_decay;  // not NaN
    return __all_sync(0xffffffffu, all);
  }
};

/// How many of this warp's block of tokens are mild, one token after the other.
template <class C>
__device__ __forceinline__ int count_mild(bool bf16, std::uint32_t gates, int warp, int lane) {
  using Own = OwnChannels<C>;
  const Own own(gates, warp, lane);
  float sum[Own::count] = {};
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    std::uint32_t x[Own::words];
    own.load(x, i);
    Own::add(sum, x, bf16);
    if (!Own::mild(sum)) return i;
  }
  return 16;
}

/// The log2 of the decay of each channel in this warp's block of tokens. Returns how many of them are mild.
template <class C>
__device__ __forceinline__ int sum_decays(bool bf16, std::uint32_t gates, std::uint32_t scratch, int warp, int lane) {
  using Own = OwnChannels<C>;
  const Own own(gates, warp, lane);
  float sum[Own::count] = {};
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    std::uint32_t x[8][Own::words];
#pragma unroll
    for (int i = 0; i < 8; ++i) own.load(x[i], 8 * half + i);
#pragma unroll
    for (int i = 0; i < 8; ++i) Own::add(sum, x[i], bf16);
  }
  const std::uint32_t to = scratch + C::sums + (warp * C::K + Own::count * lane) * 4;
#pragma unroll
  for (int i = 0; i < Own::count; i += 2) store_float2(to + 4 * i, log2_e * sum[i], log2_e * sum[i + 1]);
  return Own::mild(sum) ? 16 : count_mild<C>(bf16, gates, warp, lane);
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

/// The logarithms of 8 channels of a block of 16 tokens, as right operands of a product over the tokens: of float32 as
/// sums of two numbers of bfloat16. `j`: the group of channels.
template <class C>
__device__ __forceinline__ void load_logarithms(std::uint32_t (&x)[C::gate_bytes], std::uint32_t gates, int j, int flip,
                                                int warp, int lane) {
  if constexpr (C::gate_bytes == 2) {
    load_two_matrices_transposed(
        x[0], x[1], gates + (16 * warp + (lane & 15)) * 128 + (j >> 3) * panel_bytes + (((j & 7) ^ flip) << 4));
  } else {
    const int r = lane >> 2, col = 2 * (lane & 3), piece = 2 * (j & 3) + (r >> 2);
    const std::uint32_t from = gates + (j >> 2) * panel_bytes + 2048 * warp + 4 * (r & 3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = load_float(from + 1024 * i + swizzled(col, piece)),
                  b = load_float(from + 1024 * i + swizzled(col + 1, piece));
      x[i] = pack_bf16(a, b);
      const float2 h = unpack_bf16(x[i]);
      x[2 + i] = pack_bf16(a - h.x, b - h.y);
    }
  }
}

/// G, the logarithm of the decay since the block's start, of tokens r and r + 8 and two channels each: a product of the
/// logarithms with ones where s <= t, `triangle` those of this thread in a square of 8 tokens.
template <class C, bool BfGates>
__device__ __forceinline__ void sum_logarithms(float (&g)[4], std::uint32_t triangle,
                                               const std::uint32_t (&logs)[C::gate_bytes]) {
  constexpr std::uint32_t ones = BfGates ? 0x3f803f80 : 0x3c003c00;
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] = 0;
#pragma unroll
  for (int i = 0; i < C::gate_bytes; i += 2)
    mma_16x8x16_of<BfGates>(g, triangle, ones, 0, triangle, logs[i], logs[i + 1]);
}
template <bool BfGates>
__device__ __forceinline__ std::uint32_t triangle_of_ones(int lane) {
  constexpr std::uint32_t one = BfGates ? 0x3f80 : 0x3c00;
  const int r = lane >> 2, col = 2 * (lane & 3);
  return (col <= r ? one : 0) | (col + 1 <= r ? one << 16 : 0);
}

/// Two channels of mild tokens r and r + 8: e^(G_t - G_s) as e^G_t times e^-G_s.
struct MildStep {
  float decay[4];                 ///< e^G
  float left[2][4], right[2][2];  ///< {k, q, k, q} e^G, k e^-G
  __device__ __forceinline__ MildStep(const float (&g)[4], const float2 (&k)[2], const float2 (&q)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) decay[i] = power_of_two(g[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left[i][0] = k[i].x * decay[2 * i], left[i][2] = k[i].y * decay[2 * i + 1];
      left[i][1] = q[i].x * decay[2 * i], left[i][3] = q[i].y * decay[2 * i + 1];
      right[i][0] = k[i].x * inverse_power_of_two(g[2 * i]);
      right[i][1] = k[i].y * inverse_power_of_two(g[2 * i + 1]);
    }
  }
  __device__ __forceinline__ std::uint32_t key(int i) const { return pack_half(left[i][0], left[i][2]); }
  __device__ __forceinline__ std::uint32_t query(int i) const { return pack_half(left[i][1], left[i][3]); }
  /// Adds to the products, in TF32.
  __device__ __forceinline__ void add_to(DiagonalBlock& d) const {
    std::uint32_t l[2][4], r[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int x = 0; x < 4; ++x) l[i][x] = to_tf32(left[i][x]);
      r[i][0] = to_tf32(right[i][0]), r[i][1] = to_tf32(right[i][1]);
    }
    mma_16x8x8_tf32(d.square[0], l[0], r[0][0], r[0][1]);
    mma_16x8x8_tf32(d.below, l[1], r[0][0], r[0][1]);
    mma_16x8x8_tf32(d.square[1], l[1], r[1][0], r[1][1]);
  }
};

/// Step 1 where all tokens are mild. The next channels' are on their way while these are worked on. `at`: where lane
/// l's row of an 8×8 matrix lies, l / 8 = 0, 1 for k and 2, 3 for q, of the first 8 channels but for the swizzle by
/// `flip`.
template <class C, bool Bf16, bool Outputs, bool BfGates>
__device__ __forceinline__ void mild_products(DiagonalBlock& d, OwnProducts& own, std::uint32_t at, int flip,
                                              std::uint32_t to_late, std::uint32_t gates, int warp, int lane) {
  constexpr int steps = C::K / 8;
  const std::uint32_t triangle = triangle_of_ones<BfGates>(lane);
  std::uint32_t x[4], logs[C::gate_bytes];
  float g[4];  // log2 of the decays of the step at hand
  const auto place_of = [&](int j) { return (j >> 3) * panel_bytes + (((j & 7) ^ flip) << 4); };
  std::uint32_t place = at + place_of(0);
  load_logarithms<C>(logs, gates, 0, flip, warp, lane);
  load_matrices(x, place);
  sum_logarithms<C, BfGates>(g, triangle, logs);
  load_logarithms<C>(logs, gates, 1, flip, warp, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] *= log2_e;
#pragma unroll 1
  for (int j = 0; j < steps; ++j) {
    const float2 k[2] = {widen<Bf16>(x[0]), widen<Bf16>(x[1])};
    const float2 q[2] = {Outputs ? widen<Bf16>(x[2]) : float2{}, Outputs ? widen<Bf16>(x[3]) : float2{}};
    own.add<Bf16, false>(x);  // q k are on the diagonal of the products
    // the last steps read what they have again
    const std::uint32_t next = at + place_of(min(j + 1, steps - 1));
    load_matrices(x, next);
    float sums[4];
    sum_logarithms<C, BfGates>(sums, triangle, logs);
    load_logarithms<C>(logs, gates, min(j + 2, steps - 1), flip, warp, lane);
    const MildStep step(g, k, q);
    // k with the decay up to the block's end; lanes 0 to 15 have the addresses of k
    const float all[2] = {__shfl_sync(0xffffffffu, step.decay[2], 28 | (lane & 3)),
                          __shfl_sync(0xffffffffu, step.decay[3], 28 | (lane & 3))};
    step.add_to(d);
    if constexpr (Outputs)
      store_matrices(place, {step.key(0), step.key(1), step.query(0), step.query(1)});
    else
      store_two_matrices(place, step.key(0), step.key(1));
    store_two_matrices(place + to_late, pack_half(step.right[0][0] * all[0], step.right[0][1] * all[1]),
                       pack_half(step.right[1][0] * all[0], step.right[1][1] * all[1]));
    place = next;
#pragma unroll
    for (int i = 0; i < 4; ++i) g[i] = log2_e * sums[i];
  }
  own.gather<false>();
}

/// Step 1 where not all tokens are mild, by halves. `SomeMild`: rows of the first `mild` tokens are made as above, from
/// their logarithms alone, bit by bit as if all were mild.
template <class C, bool Bf16, bool Outputs, bool SomeMild>
__device__ __forceinline__ void block_products(DiagonalBlock& d, OwnProducts& own, std::uint32_t at, int flip,
                                               std::uint32_t to_late, bool bf16, std::uint32_t gates, int mild,
                                               int warp, int lane) {
  const int row = lane >> 2, col = 2 * (lane & 3);
  const bool is_mild[2] = {row < mild, row + 8 < mild};
  std::uint32_t kept[2];  // of the logarithms of tokens col, col + 1, and of 8 tokens further
#pragma unroll
  for (int i = 0; i < 2; ++i) kept[i] = (col + 8 * i < mild ? 0xffffu : 0) | (col + 8 * i + 1 < mild ? 0xffff0000u : 0);
  BlockProducts p;
  const bool second = lane & 4, third = lane & 8, fourth = lane & 16;  // this token is behind the cut
#pragma unroll 1
  for (int j = 0; j < C::K / 8; ++j) {
    const std::uint32_t in_panels = (j >> 3) * panel_bytes + (((j & 7) ^ flip) << 4), place = at + in_panels;
    std::uint32_t x[4], bits[2][C::gate_bytes / 2];
    load_matrices(x, place);
    own.add<Bf16, Outputs>(x);
    std::uint32_t mild_rows[4] = {};
    if constexpr (SomeMild) {
      std::uint32_t logs[C::gate_bytes];
      load_logarithms<C>(logs, gates, j, flip, warp, lane);
#pragma unroll
      for (int i = 0; i < C::gate_bytes; ++i) logs[i] &= kept[i & 1];
      float g[4];
      if (C::gate_bytes == 4 || bf16)
        sum_logarithms<C, true>(g, triangle_of_ones<true>(lane), logs);
      else
        sum_logarithms<C, false>(g, triangle_of_ones<false>(lane), logs);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] *= log2_e;
      const float2 k[2] = {widen<Bf16>(x[0]), widen<Bf16>(x[1])};
      const float2 q[2] = {Outputs ? widen<Bf16>(x[2]) : float2{}, Outputs ? widen<Bf16>(x[3]) : float2{}};
      const MildStep step(g, k, q);
      step.add_to(d);
#pragma unroll
      for (int i = 0; i < 2; ++i) mild_rows[i] = step.key(i), mild_rows[2 + i] = step.query(i);
    }
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
#pragma unroll
    for (int i = 0; i < (Outputs ? 4 : 2); ++i)
      x[i] = SomeMild && is_mild[i & 1] ? mild_rows[i] : scaled(x[i], since[2 * (i & 1)], since[2 * (i & 1) + 1]);
    if constexpr (Outputs)
      store_matrices(place, x);
    else
      store_two_matrices(place, x[0], x[1]);
  }
  DiagonalBlock by_halves;
  gather<Outputs>(by_halves, own, p, lane);
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    d.square[0][x] = SomeMild && is_mild[0] ? d.square[0][x] : by_halves.square[0][x];
    d.square[1][x] = SomeMild && is_mild[1] ? d.square[1][x] : by_halves.square[1][x];
    d.below[x] = SomeMild && is_mild[1] ? d.below[x] : by_halves.below[x];
  }
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

/// Step 3: 16 rows of a tile, times the decays in rows `hi`, `lo` of the factors.
template <class C>
__device__ __forceinline__ void scale_rows(std::uint32_t scratch, std::uint32_t tile, int hi, int lo, int block,
                                           int lane) {
  constexpr int pieces = C::K / 8, rows = 32 / pieces;
  const int piece = lane % pieces, row = lane / pieces;
  const uint4 h = load16(factor_row<C>(scratch, hi) + 16 * piece), l = load16(factor_row<C>(scratch, lo) + 16 * piece);
  const auto times = [](std::uint32_t x, std::uint32_t hi, std::uint32_t lo) {
    return multiply_add_halves(x, hi, multiply_halves(x, lo));
  };
  tile += (piece >> 3) * panel_bytes + 2048 * block;
  constexpr int batch = 4;
#pragma unroll 1
  for (int i = 0; i < 16 / rows; i += batch) {
    uint4 x[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) x[j] = load16(tile + swizzled(row + rows * (i + j), piece & 7));
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      x[j].x = times(x[j].x, h.x, l.x), x[j].y = times(x[j].y, h.y, l.y);
      x[j].z = times(x[j].z, h.z, l.z), x[j].w = times(x[j].w, h.w, l.w);
      store16(tile + swizzled(row + rows * (i + j), piece & 7), x[j]);
    }
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
  bool strong =
      false;  // the same 16 tokens of this helper's last chunk were hardly mild: in this one none is taken as such
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
    const int all_mild = sum_decays<C>(bf16, gates, scratch, warp, fresh(tid) & 31), mild = strong ? 0 : all_mild;
    strong = all_mild < 8;
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
      if (mild == 0)
        block_products<C, Bf16, Outputs, false>(d, own, at, lane & 7, to_late, bf16, gates, 0, warp, lane);
      else if (mild < 16)
        block_products<C, Bf16, Outputs, true>(d, own, at, lane & 7, to_late, bf16, gates, mild, warp, lane);
      else if (bf16 || C::gate_bytes == 4)
        mild_products<C, Bf16, Outputs, true>(d, own, at, lane & 7, to_late, gates, warp, lane);
      else
        mild_products<C, Bf16, Outputs, C::gate_bytes == 4>(d, own, at, lane & 7, to_late, gates, warp, lane);
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
      // the warp that has the longest column to merge has the fewest
      const int block = part == 0 ? 0 : part == 1 ? 3 : part - 1;
      if (block > 0) {
        scale_rows<C>(scratch, keys, before_hi + block - 1, before_lo + block - 1, block, lane);
        if (Outputs) scale_rows<C>(scratch, queries, before_hi + block - 1, before_lo + block - 1, block, lane);
      }
      if (block < 3) scale_rows<C>(scratch, late, after_hi + block, after_lo + block, block, lane);
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
