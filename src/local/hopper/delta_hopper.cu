// SPDX-License-Identifier: Apache-2.0
// One CTA carries one head's state through a run of tokens, a chunk of 64 tokens at a time. Four warpgroups:
//   state 0, 1    64 rows of S each, as fp32 accumulators; every product with S on the left takes it from registers
//   helper 0, 1   every other chunk: K, Q, V into shared memory by tensor maps, bf16 to fp16 there,
//                 T = (I - A)⁻¹ with A = -strict_lower(diag(beta) K Kᵀ), and M = lower(Q Kᵀ)
// A chunk, with everything transposed so that rows are rows of S:
//   R = eta V - beta S Kᵀ,  X = R Tᵀ,  O = S Qᵀ + X Mᵀ,  S += X K.
// None of the helpers' work depends on S: they run up to `stages` chunks ahead of the state.
#include <cuda.h>

#include <cstdio>

#include "local/hopper/delta_hopper.hpp"
#include "local/hopper/hopper_ops.cuh"

namespace longscan::hopper {
namespace {

constexpr int chunk = 64, width = 128;
constexpr int stages = 3;  // of K, Q, V
constexpr int slots = 2;   // of T, M
constexpr int threads = 512;
constexpr int tile_bytes = chunk * width * 2, square_bytes = chunk * chunk * 2;
/// P is carried times this, so that fp16 operands resolve it far below the rounding of S.
constexpr float identity_scale = 4096;

/// 16×16 blocks of halves for mma.sync: rows of 48 bytes, so that ldmatrix has no bank conflicts.
constexpr int block_pitch = 48, block_bytes = 16 * block_pitch;
/// 16×16 blocks of floats for the substitution, where the warp's two blocks of halves of the result will be.
constexpr int diagonal_pitch = 80, diagonal_bytes = 16 * diagonal_pitch;
static_assert(diagonal_bytes <= 2 * block_bytes);

namespace at {  // bytes from the start of shared memory
constexpr int K = 0;
constexpr int Q = K + stages * tile_bytes;
constexpr int V = Q + stages * tile_bytes;
constexpr int T = V + stages * tile_bytes;
constexpr int M = T + slots * square_bytes;
constexpr int O = M + slots * square_bytes;
constexpr int scratch = O + 2 * square_bytes;             // of each helper:
constexpr int A_blocks = 0;                               //   (1,0) (2,0) (2,1) (3,0) (3,1) (3,2), hi then lo
constexpr int X_blocks = A_blocks + 2 * 6 * block_bytes;  //   diagonal blocks of T, transposed; hi and lo of each
constexpr int scratch_bytes = X_blocks + 2 * 4 * block_bytes;
constexpr int scalars = scratch + 2 * scratch_bytes;  // stages × 64 × {beta, eta}
constexpr int barriers = scalars + stages * chunk * 8;
constexpr int total = barriers + 8 * (3 * stages + 4 * slots);
constexpr int allocated = total + 1024;  // the start is aligned by hand
}  // namespace at
static_assert(at::allocated <= 232448);

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
struct Barriers {
  std::uint32_t base;
  __device__ std::uint32_t full(int s) const { return base + 8 * s; }
  __device__ std::uint32_t empty(int s) const { return base + 8 * (stages + s); }
  __device__ std::uint32_t t_full(int s) const { return base + 8 * (2 * stages + s); }
  __device__ std::uint32_t t_empty(int s) const { return base + 8 * (2 * stages + slots + s); }
  __device__ std::uint32_t m_full(int s) const { return base + 8 * (2 * stages + 2 * slots + s); }
  __device__ std::uint32_t m_empty(int s) const { return base + 8 * (2 * stages + 3 * slots + s); }
  __device__ std::uint32_t arrived(int s) const { return base + 8 * (2 * stages + 4 * slots + s); }
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

__device__ __forceinline__ void store_block(std::uint32_t square, int i, int j, const std::uint32_t (&hi)[4],
                                            int lane) {
  const int t = 16 * i + (lane >> 2);
  const std::uint32_t offset = 4 * (lane & 3);
  store4(square + swizzled(t, 2 * j) + offset, hi[0]);
  store4(square + swizzled(t, 2 * j) + 1024 + offset, hi[1]);
  store4(square + swizzled(t, 2 * j + 1) + offset, hi[2]);
  store4(square + swizzled(t, 2 * j + 1) + 1024 + offset, hi[3]);
}

__host__ __device__ constexpr int pair_index(int i, int j) { return i * (i - 1) / 2 + j; }

/// Block row I of A = -strict_lower(diag(beta) G) from this warp's rows of G: the diagonal block as floats, the others
/// as hi + lo halves. Returns how many of this thread's tokens have beta |k|² > 2.
template <int I>
__device__ __forceinline__ int store_row(std::uint32_t smem, const float (&g)[32], float beta0, float beta1, int lane) {
  const int r = lane >> 2, col = 2 * (lane & 3);
  int breaches = 0;
#pragma unroll
  for (int j = 0; j < 2 * I + 2; ++j) {
    const float a0 = -beta0 * g[4 * j], a1 = -beta0 * g[4 * j + 1];
    const float a2 = -beta1 * g[4 * j + 2], a3 = -beta1 * g[4 * j + 3];
    if (j >= 2 * I) {
      const int s = 8 * (j & 1) + col;
      const std::uint32_t p = smem + at::X_blocks + I * 2 * block_bytes + r * diagonal_pitch + s * 4;
      store_float2(p, s < r ? a0 : 0.f, s + 1 < r ? a1 : 0.f);
      store_float2(p + 8 * diagonal_pitch, s < r + 8 ? a2 : 0.f, s + 1 < r + 8 ? a3 : 0.f);
      const int d = r + 8 * (j & 1) - s;  // 0 or 1: this thread has an element of the diagonal
      const float erased = j & 1 ? (d == 0 ? a2 : a3) : (d == 0 ? a0 : a1);
      breaches += (d == 0 || d == 1) && erased < -2.f;
    } else {
      const std::uint32_t p =
          smem + at::A_blocks + pair_index(I, j >> 1) * block_bytes + r * block_pitch + (j & 1) * 16 + 4 * (lane & 3);
      const std::uint32_t h0 = pack_half(a0, a1), h1 = pack_half(a2, a3);
      const float2 f0 = unpack_half(h0), f1 = unpack_half(h1);
      store4(p, h0);
      store4(p + 8 * block_pitch, h1);
      store4(p + 6 * block_bytes, pack_half(a0 - f0.x, a1 - f0.y));
      store4(p + 6 * block_bytes + 8 * block_pitch, pack_half(a2 - f1.x, a3 - f1.y));
    }
  }
  return breaches;
}

/// The blocks of T below the diagonal: from 16 to 32 tokens (a pair of warps a block, half of the columns each), then
/// to 64 (a block a warp). All warps run the same code, which the instruction caches like better than a row of T a
/// warp.
__device__ __forceinline__ void merge(std::uint32_t scratch, std::uint32_t square, int warp, int lane, int barrier) {
  // A is stored as it is, the diagonal blocks of T transposed
  const std::uint32_t A = scratch + at::A_blocks + (lane & 15) * block_pitch + (lane >> 4) * 16;
  const std::uint32_t X =
      scratch + at::X_blocks + ((lane & 7) + (lane >> 4) * 8) * block_pitch + ((lane >> 3) & 1) * 16;
  const int pair = warp >> 1, half = warp & 1;
  const int first = pair ? pair_index(3, 2) : pair_index(1, 0);
  std::uint32_t hi[4], lo[4];
  {  // T_10 = T_11 A_10 T_00, T_32 = T_33 A_32 T_22; stored over A_10 and A_32
    SplitFragment left;
    load_matrices_transposed(left.hi, X + (4 * pair + 2) * block_bytes);
    load_matrices_transposed(left.lo, X + (4 * pair + 3) * block_bytes);
    load_matrices_transposed(hi, A + first * block_bytes);
    load_matrices_transposed(lo, A + (6 + first) * block_bytes);
    float sum[2][8] = {};
    block_product(sum, left, hi, lo);
    load_matrices(hi, X + 4 * pair * block_bytes);
    load_matrices(lo, X + (4 * pair + 1) * block_bytes);
    add_up(left, sum);
    const std::uint32_t h0 = half ? hi[2] : hi[0], h1 = half ? hi[3] : hi[1];
    float out[2][4] = {};
    mma_16x8x16(out[0], left.hi, h0, h1);
    mma_16x8x16(out[1], left.lo, h0, h1);
    mma_16x8x16(out[1], left.hi, half ? lo[2] : lo[0], half ? lo[3] : lo[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[0][i] += out[1][i];
    hi[0] = pack_half(out[0][0], out[0][1]), hi[1] = pack_half(out[0][2], out[0][3]);
    const float2 f0 = unpack_half(hi[0]), f1 = unpack_half(hi[1]);
    lo[0] = pack_half(out[0][0] - f0.x, out[0][1] - f0.y), lo[1] = pack_half(out[0][2] - f1.x, out[0][3] - f1.y);
    load_matrices_transposed(left.hi, X + 2 * warp * block_bytes);
    named_barrier<128>(barrier);  // A_10 and A_32 have been read
    const std::uint32_t to =
        scratch + at::A_blocks + first * block_bytes + (lane >> 2) * block_pitch + half * 16 + 4 * (lane & 3);
    store4(to, hi[0]);
    store4(to + 8 * block_pitch, hi[1]);
    store4(to + 6 * block_bytes, lo[0]);
    store4(to + 6 * block_bytes + 8 * block_pitch, lo[1]);
    const std::uint32_t t = square + swizzled(16 * (2 * pair + 1) + (lane >> 2), 4 * pair + half) + 4 * (lane & 3);
    store4(t, hi[0]);
    store4(t + 1024, hi[1]);
    store_block(square, warp, warp, left.hi, lane);
    named_barrier<128>(barrier);
  }
  // T_ij = sum over n of (sum over k of T_ik A_kn) T_nj, k = 2 .. i, n = j .. 1; i = 2 + pair, j = half
  SplitFragment left, last;
  if (pair == 0) {
    load_matrices_transposed(left.hi, X + 4 * block_bytes);
    load_matrices_transposed(left.lo, X + 5 * block_bytes);
  } else {
    load_matrices(left.hi, A + pair_index(3, 2) * block_bytes);
    load_matrices(left.lo, A + (6 + pair_index(3, 2)) * block_bytes);
    load_matrices_transposed(last.hi, X + 6 * block_bytes);
    load_matrices_transposed(last.lo, X + 7 * block_bytes);
  }
  float out[2][8] = {};
#pragma unroll
  for (int n = 1; n >= 0; --n) {
    if (n < half) continue;
    float sum[2][8] = {};
    load_matrices_transposed(hi, A + pair_index(2, n) * block_bytes);
    load_matrices_transposed(lo, A + (6 + pair_index(2, n)) * block_bytes);
    block_product(sum, left, hi, lo);
    if (pair == 1) {
      load_matrices_transposed(hi, A + pair_index(3, n) * block_bytes);
      load_matrices_transposed(lo, A + (6 + pair_index(3, n)) * block_bytes);
      block_product(sum, last, hi, lo);
    }
    if (n == half) {
      load_matrices(hi, X + 2 * n * block_bytes);
      load_matrices(lo, X + (2 * n + 1) * block_bytes);
    } else {
      load_matrices_transposed(hi, A);
      load_matrices_transposed(lo, A + 6 * block_bytes);
    }
    SplitFragment s;
    add_up(s, sum);
    block_product(out, s, hi, lo);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) hi[i] = pack_half(out[0][2 * i] + out[1][2 * i], out[0][2 * i + 1] + out[1][2 * i + 1]);
  store_block(square, 2 + pair, half, hi, lane);
}

// ---- helpers ----

/// The same number, from which the compiler cannot make anything in advance: registers are short here, and values kept
/// in local memory cost more than made anew.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// The tensor maps of q, k and v.
struct Maps {
  CUtensorMap q, k, v;
};

template <bool Bf16, bool Outputs>
__device__ __forceinline__ void helper_role(const Maps& maps, const Pass& pass, const Task& task, const Chunks& chunks,
                                            std::uint32_t smem, Barriers bar, int w, Counts* counts) {
  const int tid = threadIdx.x & 127, warp = __shfl_sync(0xffffffffu, tid >> 5, 0);
  const int head = task.head;
  const bool values = !(task.flags & without_values);
  const std::uint32_t scratch = smem + at::scratch + w * at::scratch_bytes;

  const auto issue = [&](int c) {  // one thread; the stage is empty
    const int s = c % stages, shared_head = head / pass.group, t = static_cast<int>(chunks.first(c));
    const std::uint32_t to = smem + s * tile_bytes, done = bar.arrived(s);
    barrier_arrive_and_expect(done, tile_bytes * (1 + (Outputs ? 1 : 0) + (values ? 1 : 0)));
    copy_box(to + at::K, &maps.k, done, 0, shared_head, t);
    copy_box(to + at::K + tile_bytes / 2, &maps.k, done, 64, shared_head, t);
    if (values) {
      copy_box(to + at::V, &maps.v, done, 0, head, t);
      copy_box(to + at::V + tile_bytes / 2, &maps.v, done, 64, head, t);
    }
    if (Outputs) {
      copy_box(to + at::Q, &maps.q, done, 0, shared_head, t);
      copy_box(to + at::Q + tile_bytes / 2, &maps.q, done, 64, shared_head, t);
    }
    if (c + 1 < chunks.count) {  // the other helper's next, on its way into L2
      const int next = static_cast<int>(chunks.first(c + 1));
      for (int x = 0; x < width; x += 64) {
        prefetch_box(&maps.k, x, shared_head, next);
        if (values) prefetch_box(&maps.v, x, head, next);
        if (Outputs) prefetch_box(&maps.q, x, shared_head, next);
      }
    }
  };
  std::uint32_t beta_bits = 0, eta_bits = 0;  // of this thread's token, a chunk ahead; 0 is 0 in every type
  const auto load_scalars = [&](int c) {
    beta_bits = 0, eta_bits = 0;
    if (c >= chunks.count || tid >= chunks.size(c)) return;
    const std::int64_t t = chunks.first(c) + tid;
    beta_bits = scalar_bits(pass.beta, t * pass.beta.token_stride + head * pass.beta.head_stride);
    if (pass.eta.data) eta_bits = scalar_bits(pass.eta, t * pass.eta.token_stride + head * pass.eta.head_stride);
  };

  int stage = w;
  std::uint32_t phase = 0, slot_phase = 0;
  Marks marks(tid == 96 && w == 0);
#pragma unroll 1
  for (int c = w - 2; c < chunks.count; c += 2) {
    if (c >= 0) {
      marks.mark(0);
      barrier_wait(bar.arrived(stage), phase);  // for all threads also the proof that the state has left the stage
      if (tid < chunk)
        store_float2(smem + at::scalars + (stage * chunk + tid) * 8, scalar(pass.beta.type, beta_bits),
                     pass.eta.data ? scalar(pass.eta.type, eta_bits) : scalar(pass.beta.type, beta_bits));
      marks.mark(1);
      const int me = fresh(tid);
      const std::uint32_t tile =
          smem + stage * tile_bytes + swizzled(me >> 4, me & 7) + ((me >> 3) & 1) * (tile_bytes / 2);
      if (Bf16) {
#pragma unroll
        for (int i = 0; i < (Outputs ? 16 : 8); i += 4) {
          const std::uint32_t p = tile + (i < 8 ? at::K + i * 1024 : at::Q + (i - 8) * 1024);
          uint4 x[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = load16(p + e * 1024);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[e].x = bf16_to_half(x[e].x), x[e].y = bf16_to_half(x[e].y);
            x[e].z = bf16_to_half(x[e].z), x[e].w = bf16_to_half(x[e].w);
            store16(p + e * 1024, x[e]);
          }
        }
      }
      const int n = chunks.size(c);
      if (n < chunk) {  // what follows belongs to others
#pragma unroll 1
        for (int i = 0; i < 8; ++i)
          if ((me >> 4) + 8 * i >= n) {
            store16(tile + at::K + i * 1024, make_uint4(0, 0, 0, 0));
            store16(tile + at::V + i * 1024, make_uint4(0, 0, 0, 0));
            if (Outputs) store16(tile + at::Q + i * 1024, make_uint4(0, 0, 0, 0));
          }
      }
      fence_for_tensor_cores();
      barrier_arrive(bar.full(stage));
      named_barrier<128>(3 + w);  // all is converted; and the blocks of the chunk before have been read
      marks.mark(2);
      {
        const int lane = fresh(tid) & 31;
        float g[32];
        const std::uint64_t keys = row_descriptor(smem + at::K + fresh(stage) * tile_bytes);
        products_fence();
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          const int step = (s >> 2) * (tile_bytes / 2) + (s & 3) * 32;
          if (s == 0)
            product_tiles_n64<true>(g, keys, keys);
          else
            product_tiles_n64<false>(g, advance(keys, step), advance(keys, step));
        }
        products_commit();
        float beta[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          asm volatile("ld.shared.f32 %0, [%1];"
                       : "=f"(beta[i])
                       : "r"(smem + at::scalars + (stage * chunk + 16 * warp + (lane >> 2) + 8 * i) * 8));
        products_wait<0>();
        hold(g);
        marks.mark(3);
        int breaches;
        if (warp == 0)
          breaches = store_row<0>(scratch, g, beta[0], beta[1], lane);
        else if (warp == 1)
          breaches = store_row<1>(scratch, g, beta[0], beta[1], lane);
        else if (warp == 2)
          breaches = store_row<2>(scratch, g, beta[0], beta[1], lane);
        else
          breaches = store_row<3>(scratch, g, beta[0], beta[1], lane);
        if (breaches && counts) atomicAdd(&counts->breaches, breaches);
      }
      __syncwarp();
      marks.mark(4);
      {  // the diagonal block by forward substitution, a column a lane; lanes 0 to 15 store its hi, 16 to 31 its lo
        const int lane = fresh(tid) & 31, j = lane & 15;
        const std::uint32_t rows = scratch + at::X_blocks + warp * 2 * block_bytes;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float sum = i == j ? 1.f : 0.f;
#pragma unroll
          for (int s = 0; s < i; s += 4) {
            const float4 a = load_float4(rows + i * diagonal_pitch + s * 4);
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
        const std::uint32_t out = scratch + at::X_blocks + (2 * warp + (lane >> 4)) * block_bytes + j * block_pitch;
        __syncwarp();  // the block of floats, which this replaces, has been read
        store16(out, make_uint4(e[0], e[1], e[2], e[3]));
        store16(out + 16, make_uint4(e[4], e[5], e[6], e[7]));
      }
      marks.mark(5);
      named_barrier<128>(3 + w);
      marks.mark(6);
      barrier_wait(bar.t_empty(w), slot_phase ^ 1);
      marks.mark(7);
      const std::uint32_t square = smem + at::T + w * square_bytes;
      const int lane = fresh(tid) & 31;
      merge(scratch, square, warp, lane, 3 + w);
      __syncwarp();
      fence_for_tensor_cores();
      barrier_arrive(bar.t_full(w));
      marks.mark(8);
    }  // c >= 0
    if (Outputs && c >= 0) {
      float m[32];
      const std::uint64_t left = row_descriptor(smem + at::Q + fresh(stage) * tile_bytes);
      const std::uint64_t right = row_descriptor(smem + at::K + fresh(stage) * tile_bytes);
      products_fence();
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        const int step = (s >> 2) * (tile_bytes / 2) + (s & 3) * 32;
        if (s == 0)
          product_tiles_n64<true>(m, left, right);
        else
          product_tiles_n64<false>(m, advance(left, step), advance(right, step));
      }
      products_commit();
      products_wait<0>();
      hold(m);
      marks.mark(9);
      barrier_wait(bar.m_empty(w), slot_phase ^ 1);
      marks.mark(10);
      const int me = fresh(tid), t = 16 * warp + ((me & 31) >> 2);
      const std::uint32_t to = smem + at::M + w * square_bytes + 4 * (me & 3);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((j >> 1) > warp) continue;  // zero, and set once and for all
        const int s = 8 * j + 2 * (me & 3);
        const std::uint32_t p = to + swizzled(t, j);
        store4(p, pack_half(s <= t ? m[4 * j] : 0.f, s + 1 <= t ? m[4 * j + 1] : 0.f));
        store4(p + 1024, pack_half(s <= t + 8 ? m[4 * j + 2] : 0.f, s + 1 <= t + 8 ? m[4 * j + 3] : 0.f));
      }
      fence_for_tensor_cores();
      barrier_arrive(bar.m_full(w));
      marks.mark(11);
    }
    if (c + 2 < chunks.count && tid == 0) {  // after M, which must not wait for the state
      barrier_wait(bar.empty((c + 2) % stages), ((c + 2) / stages & 1) ^ 1);
      issue(c + 2);
    }
    __syncwarp();
    load_scalars(c + 2);
    if (c < 0) continue;
    marks.mark(12);
    stage += 2;
    if (stage >= stages) stage -= stages, phase ^= 1;
    slot_phase ^= 1;
  }
}

// ---- state ----

template <int N>
__device__ __forceinline__ void pack(std::uint32_t (&to)[N], const float (&from)[2 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = pack_half(from[2 * i], from[2 * i + 1]);
}

__device__ __forceinline__ void store_state(State to, const float (&S)[64], int v, int k, float factor) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      to.data[(8 * j + k + (e & 1)) * to.k_stride + (v + 8 * (e >> 1)) * to.v_stride] = S[4 * j + e] * factor;
}

template <bool Bf16, bool Outputs>
__device__ __forceinline__ void state_role(const Pass& pass, const Task& task, const Chunks& chunks, std::uint32_t smem,
                                           Barriers bar, int half, int& bad) {
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  const int my_v = 64 * half + 16 * warp + (lane >> 2), my_k = 2 * (lane & 3);
  const bool identity = task.flags & from_identity;
  const int head = task.head, probe_after = task.probe.data ? chunks.to_probe : -1;  // not read again for each chunk
  float S[64], R[32];
  const State from = task.from;
  std::uint32_t Sh[32], Xh[16];
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = 8 * j + my_k + (e & 1), v = my_v + 8 * (e >> 1);
      float x = 0;
      if (identity)
        x = k == v ? identity_scale : 0.f;
      else if (from.data)
        x = from.data[k * from.k_stride + v * from.v_stride];
      S[4 * j + e] = x;
    }
  // where this lane's row of the four 8×8 matrices (token, v), (token, v + 8), (token + 8, v), … lies
  const int lane_token = (lane >> 4) * 8 + (lane & 7);
  const std::uint32_t lane_piece = swizzled(lane_token, 2 * warp + ((lane >> 3) & 1));
  const std::uint32_t values = smem + at::V + half * (tile_bytes / 2) + lane_piece;
  const std::uint32_t staging = smem + at::O + half * square_bytes;
  const float factor = identity ? 1 / identity_scale : 1.f;
  float not_finite = 0;

  const auto multiply_state = [&](float(&to)[32], std::uint32_t tile) {
    const std::uint64_t b = row_descriptor(tile);
    products_fence();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      if (s == 0)
        product_n64<true>(to, Sh, b);
      else
        product_n64<false>(to, Sh + 4 * s, advance(b, (s >> 2) * (tile_bytes / 2) + (s & 3) * 32));
    }
    products_commit();
  };

  Ring<stages> stage;
  Ring<slots> slot;
  pack(Sh, S);
  hold(Sh);
  barrier_wait(bar.full(0), 0);
  multiply_state(R, smem + at::K);
  Marks marks(tid == 0 && half == 0);
#pragma unroll 1
  for (int c = 0; c < chunks.count; ++c) {
    const std::uint32_t keys = smem + at::K + stage.slot * tile_bytes;
    float O[32];
    if constexpr (Outputs) {
      multiply_state(O, smem + at::Q + stage.slot * tile_bytes);
    }
    products_wait<0>();
    marks.mark(20);
    if constexpr (Outputs) hold(O);
    hold(R);
    // R = eta V - beta S Kᵀ, as left operand
    const std::uint32_t numbers = smem + at::scalars + stage.slot * (chunk * 8) + my_k * 8;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t m[4];
      load_matrices_transposed(m, values + stage.slot * tile_bytes + s * 2048);
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
      const std::uint64_t t = row_descriptor(smem + at::T + slot.slot * square_bytes);
      products_fence();
      product_n32<true>(early, Xh, t);
      product_n32<true>(late, Xh, advance(t, 4096));
      product_n32<false>(early, Xh + 4, advance(t, 32));
      product_n32<false>(late, Xh + 4, advance(t, 4096 + 32));
      product_n32<false>(late, Xh + 8, advance(t, 4096 + 64));
      product_n32<false>(late, Xh + 12, advance(t, 4096 + 96));
      products_commit();
    }
    products_wait<0>();
    marks.mark(23);
    hold(early);
    hold(late);
    if (lane == 0) barrier_arrive(bar.t_empty(slot.slot));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Xh[i] = pack_half(early[2 * i], early[2 * i + 1]);
      Xh[8 + i] = pack_half(late[2 * i], late[2 * i + 1]);
    }
    hold(Xh);
    hold(S);
    products_fence();
    {
      const std::uint64_t b = column_descriptor(keys);
#pragma unroll
      for (int s = 0; s < 4; ++s) product_columns_n128(S, Xh + 4 * s, advance(b, s * 2048));
      products_commit();
    }
    if constexpr (Outputs) {
      barrier_wait(bar.m_full(slot.slot), slot.phase);
      products_fence();
      const std::uint64_t m = row_descriptor(smem + at::M + slot.slot * square_bytes);
#pragma unroll
      for (int s = 0; s < 4; ++s) product_n64<false>(O, Xh + 4 * s, advance(m, s * 32));
      products_commit();
      products_wait<1>();
    } else {
      products_wait<0>();
      if (lane == 0) barrier_arrive(bar.empty(stage.slot));
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
      if (lane == 0) {
        barrier_arrive(bar.empty(done_stage));
        barrier_arrive(bar.m_empty(slot.slot));
      }
    }
    marks.mark(25);
    // after the last chunk the product is of no use, and of an old tile, but the loop stays simple
    if (c + 1 < chunks.count) barrier_wait(bar.full(stage.slot), stage.phase);
    marks.mark(26);
    multiply_state(R, smem + at::K + stage.slot * tile_bytes);
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
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = load16(staging + swizzled(row, piece) + i * 2048);
        if (row + 16 * i < n) *reinterpret_cast<uint4*>(out + 32 * i * pass.o_token_stride) = x;
      }
    }
    marks.mark(27);
    slot.next();
    if (c + 1 == probe_after) store_state(task.probe, S, my_v, my_k, factor);
  }
  products_wait<0>();
  hold(R);
  if (probe_after == 0) {
    // nothing before the probe: it is the state at the start
    const State start = task.from, probe = task.probe;
#pragma unroll 1
    for (int i = 0; i < 64; ++i) {
      const int k = 8 * (i >> 2) + my_k + (i & 1), v = my_v + 8 * ((i >> 1) & 1);
      float x = identity && k == v ? 1.f : 0.f;
      if (!identity && start.data) x = start.data[k * start.k_stride + v * start.v_stride];
      probe.data[k * probe.k_stride + v * probe.v_stride] = x;
    }
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) not_finite = fmaf(S[i], 0.f, not_finite);
  bad = not_finite != 0.f;
  if (task.to.data) store_state(task.to, S, my_v, my_k, factor);
}

template <bool Bf16, bool Outputs>
__global__ void __launch_bounds__(threads, 1)
    delta_kernel(const __grid_constant__ Pass pass, const __grid_constant__ Maps maps) {
  extern __shared__ char raw[];
  const std::uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  const Barriers bar{smem + at::barriers};
  const Task& task = pass.tasks[blockIdx.x];
  const Chunks chunks(task);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s)
      barrier_init(bar.full(s), 128), barrier_init(bar.empty(s), 8), barrier_init(bar.arrived(s), 1);
    for (int s = 0; s < slots; ++s) {
      barrier_init(bar.t_full(s), 128), barrier_init(bar.t_empty(s), 8);
      barrier_init(bar.m_full(s), 128), barrier_init(bar.m_empty(s), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // the blocks of T and M above the diagonal stay zero, and V where there is none
  for (int i = threadIdx.x; i < (stages * tile_bytes + 2 * slots * square_bytes) / 16; i += threads)
    store16(smem + at::V + 16 * i, make_uint4(0, 0, 0, 0));
  fence_for_tensor_cores();
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // the same in a warp, and known to be
  if (role < 2) {
    registers_down<64>();
    helper_role<Bf16, Outputs>(maps, pass, task, chunks, smem, bar, role,
                               pass.counts ? pass.counts + blockIdx.x : nullptr);
  } else {
    registers_up<192>();
    int bad = 0;
    state_role<Bf16, Outputs>(pass, task, chunks, smem, bar, role - 2, bad);
    if (bad && pass.counts) pass.counts[blockIdx.x].bad = 1;
  }
}

// ---- small kernels ----

__global__ void norms_kernel(const float* matrices, std::int64_t stride, float* norms) {
  const auto* m = reinterpret_cast<const float4*>(matrices + blockIdx.x * stride);
  float sum = 0;
  for (int i = threadIdx.x; i < width * width / 4; i += blockDim.x) {
    const float4 x = m[i];
    sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
  }
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

__global__ void __launch_bounds__(width) chain_kernel(const Chain* chains) {
  const Chain chain = chains[blockIdx.x / (width / chain_rows)];
  const int first = blockIdx.x % (width / chain_rows) * chain_rows, k = threadIdx.x;
  __shared__ float4 rows[width];  // [j] -> the rows' values in column j
  float s[chain_rows];
  for (int r = 0; r < chain_rows; ++r) s[r] = chain.states[(first + r) * width + k];
  for (int i = 0; i < chain.maps; ++i) {
    const float* P = chain.P + i * chain.map_stride + k;
    rows[k] = make_float4(s[0], s[1], s[2], s[3]);
    __syncthreads();
    for (int r = 0; r < chain_rows; ++r) s[r] = chain.L[i * chain.map_stride + (first + r) * width + k];
#pragma unroll 32
    for (int j = 0; j < width; ++j) {
      const float p = P[j * width];
      const float4 x = rows[j];
      s[0] = fmaf(x.x, p, s[0]), s[1] = fmaf(x.y, p, s[1]), s[2] = fmaf(x.z, p, s[2]), s[3] = fmaf(x.w, p, s[3]);
    }
    for (int r = 0; r < chain_rows; ++r) chain.states[(i + 1) * chain.state_stride + (first + r) * width + k] = s[r];
    __syncthreads();
  }
}

/// The tensor map of [tokens, heads, 128] elements of 16 bits, in boxes of 64 tokens and 64 columns.
cudaError_t make_map(CUtensorMap* map, const TokenVectors& x, std::int64_t tokens, int heads) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found == cudaDriverEntryPointSuccess ? f : nullptr);
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {width, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.head_stride) * 2,
                                static_cast<cuuint64_t>(x.token_stride) * 2};
  const cuuint32_t box[] = {64, 1, chunk}, steps[] = {1, 1, 1};
  const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(x.data), sizes, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <bool Bf16, bool Outputs>
cudaError_t launch(const Pass& pass, cudaStream_t stream) {
  Maps maps = {};
  const int shared_heads = pass.heads / pass.group;
  cudaError_t error = make_map(&maps.k, pass.k, pass.tokens, shared_heads);
  if (error == cudaSuccess) error = make_map(&maps.v, pass.v, pass.tokens, pass.heads);
  if (error == cudaSuccess && Outputs) error = make_map(&maps.q, pass.q, pass.tokens, shared_heads);
  // once a kernel and device would do; the call costs about a microsecond
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(delta_kernel<Bf16, Outputs>, cudaFuncAttributeMaxDynamicSharedMemorySize, at::allocated);
  if (error != cudaSuccess) return error;
  delta_kernel<Bf16, Outputs><<<pass.task_count, threads, at::allocated, stream>>>(pass, maps);
  return cudaGetLastError();
}

}  // namespace

bool applies(int device_major, int d_key, int d_value, const Pass& pass) {
  const auto aligned = [](const void* p, std::int64_t token_stride, std::int64_t head_stride) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
  };
  const auto narrow = [](const TokenScalars& a) { return a.type != Type::f64; };
  return narrow(pass.beta) && narrow(pass.eta) && device_major == 9 && d_key == width && d_value == width &&
         (pass.type == Type::bf16 || pass.type == Type::f16) &&
         aligned(pass.k.data, pass.k.token_stride, pass.k.head_stride) &&
         aligned(pass.v.data, pass.v.token_stride, pass.v.head_stride) &&
         (!pass.o || (aligned(pass.q.data, pass.q.token_stride, pass.q.head_stride) &&
                      aligned(pass.o, pass.o_token_stride, pass.o_head_stride)));
}

cudaError_t run_pass(const Pass& pass, cudaStream_t stream) {
  if (pass.task_count == 0) return cudaSuccess;
  const bool bf16 = pass.type == Type::bf16;
  if (pass.o) return bf16 ? launch<true, true>(pass, stream) : launch<false, true>(pass, stream);
  return bf16 ? launch<true, false>(pass, stream) : launch<false, false>(pass, stream);
}

cudaError_t matrix_norms(const float* matrices, std::int64_t stride, int count, float* norms, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  norms_kernel<<<count, 256, 0, stream>>>(matrices, stride, norms);
  return cudaGetLastError();
}

cudaError_t run_chains(const Chain* chains, int count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  chain_kernel<<<count*(width / chain_rows), width, 0, stream>>>(chains);
  return cudaGetLastError();
}

#ifdef LONGSCAN_HOPPER_PROFILE
void print_profile() {
  unsigned p[64];
  cudaMemcpyFromSymbol(p, profile, sizeof p);
  const char* names[64] = {};
  const char* helper[] = {"scalars",
                          "wait for data",
                          "convert",
                          "K Kᵀ",
                          "store A",
                          "diagonal",
                          "barrier",
                          "wait for an empty T",
                          "merges",
                          "Q Kᵀ",
                          "wait for an empty M",
                          "store M",
                          "issue"};
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
