// SPDX-License-Identifier: Apache-2.0
#pragma once
// The few Hopper instructions that the delta kernels use, as inline functions.
//
// Fragments: the float accumulators of a m64nN product and the 16-bit A operand of a m64k16 product have the same
// thread map, so `frag[i] = pack(acc[2i], acc[2i + 1])` turns the result of one product into the left operand of the
// next. Tiles in shared memory are panels of 64 columns of 16 bits: rows of 128 bytes whose eight 16-byte pieces are
// permuted by the row (piece ^ (row & 7)), which is the 128-byte swizzle; panels start at multiples of 1024 bytes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace longscan::hopper {

__device__ __forceinline__ std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Byte offset of 16-byte piece `piece` of row `row` in a panel.
__device__ __forceinline__ std::uint32_t swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// ---- mbarriers ----

__device__ __forceinline__ void barrier_init(std::uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(std::uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/// How many lanes of a warp arrive where one could for all. compute-sanitizer's racecheck follows a barrier only from
/// the lanes that arrive; built for it, all do.
#ifdef LONGSCAN_HOPPER_RACECHECK
constexpr int arriving_lanes = 32;
#else
constexpr int arriving_lanes = 1;
#endif

/// The barrier counts `arriving_lanes` a warp.
__device__ __forceinline__ void warp_arrives(std::uint32_t bar, int lane) {
  if (lane < arriving_lanes) barrier_arrive(bar);
}

__device__ __forceinline__ void barrier_wait(std::uint32_t bar, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

/// True if the phase is over; does not wait.
__device__ __forceinline__ bool barrier_passed(std::uint32_t bar, std::uint32_t parity) {
  std::uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(passed)
      : "r"(bar), "r"(parity)
      : "memory");
  return passed;
}

/// Adds one to a counter in shared memory, after what this thread has read before. Without a fence, which would wait
/// for all that is under way in memory: it orders nothing that is written.
__device__ __forceinline__ std::uint32_t count_up(std::uint32_t counter) {
  std::uint32_t old;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(counter) : "memory");
  return old;
}

__device__ __forceinline__ void barrier_arrive_and_expect(std::uint32_t bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

template <int Threads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

/// Makes ordinary stores to shared memory visible to the tensor cores; before the barrier, in each writing thread.
__device__ __forceinline__ void fence_for_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int Registers>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- copies ----

/// A box of a tensor map at (x, y, z) to shared memory; its bytes are counted at `bar`.
__device__ __forceinline__ void copy_box(std::uint32_t to, const void* map, std::uint32_t bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// A box of shared memory to where a tensor map says; elements beyond it are left out. By one thread, whose
/// `boxes_read` waits until shared memory is free again.
__device__ __forceinline__ void store_box(const void* map, std::uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_box(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ uint4 load16(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

__device__ __forceinline__ std::uint32_t load4(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ float load_float(std::uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ float2 load_float2(std::uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from));
  return v;
}

__device__ __forceinline__ float4 load_float4(std::uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from));
  return v;
}

__device__ __forceinline__ void store16(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store4(std::uint32_t to, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void store2(std::uint32_t to, std::uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}

__device__ __forceinline__ void store_float2(std::uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

/// Four 8×8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

/// Two of them; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_two_matrices(std::uint32_t& m0, std::uint32_t& m1, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(m0), "=r"(m1) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

/// Two of them; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_two_matrices_transposed(std::uint32_t& m0, std::uint32_t& m1, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m0), "=r"(m1)
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_matrices(std::uint32_t to, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

/// Two of them; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void store_two_matrices(std::uint32_t to, std::uint32_t m0, std::uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(m0), "r"(m1) : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(std::uint32_t to, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

__device__ __forceinline__ void store_float(std::uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

__device__ __forceinline__ void store_float4(std::uint32_t to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- conversions ----

/// 2^x to 2^-22, results below 2^-126 are zero; exact for 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^-x, as the above.
__device__ __forceinline__ float inverse_power_of_two(float x) {
  float y;
  asm("{\n.reg .f32 t;\nneg.f32 t, %1;\nex2.approx.ftz.f32 %0, t;\n}" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t pack_half(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float2 unpack_half(std::uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

__device__ __forceinline__ float2 unpack_bf16(std::uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

__device__ __forceinline__ std::uint32_t bf16_to_half(std::uint32_t x) {
  const float2 f = unpack_bf16(x);
  return pack_half(f.x, f.y);
}

// ---- two halves ----

__device__ __forceinline__ std::uint32_t multiply_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

/// a · b + c, rounded once.
__device__ __forceinline__ std::uint32_t multiply_add_halves(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// x · 0 + sum, of two numbers: NaN if x is not finite.
template <bool Bf16>
__device__ __forceinline__ std::uint32_t times_zero_and_add(std::uint32_t x, std::uint32_t sum) {
  std::uint32_t d;
  if constexpr (Bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0), "r"(sum));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0), "r"(sum));
  return d;
}

// ---- mma.sync (the inverse, decays a channel) ----

__device__ __forceinline__ void mma_16x8x16(float* d, const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Operands as they came.
template <bool Bf16>
__device__ __forceinline__ void mma_16x8x16_of(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (Bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    mma_16x8x16(d, {a0, a1, a2, a3}, b0, b1);
}

__device__ __forceinline__ void mma_16x8x8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

/// Rounded to the 11 bits that a TF32 operand keeps; infinity and NaN end as anything, so others must report them.
__device__ __forceinline__ std::uint32_t to_tf32(float x) { return __float_as_uint(x) + 0x1000; }

__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- wgmma ----

/// Rows are the N (or M) index and columns the k index. A k-step of 16 is 32 bytes further.
__device__ __forceinline__ std::uint64_t row_descriptor(std::uint32_t tile) {
  return static_cast<std::uint64_t>((tile & 0x3ffff) >> 4) | (std::uint64_t{1} << 16) |
         (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 62);
}

/// Rows are the k index and columns the N index, panels of 64 columns 8192 bytes apart. A k-step of 16 is 2048 bytes
/// further. Needs the transpose bit.
__device__ __forceinline__ std::uint64_t column_descriptor(std::uint32_t tile) {
  return static_cast<std::uint64_t>((tile & 0x3ffff) >> 4) | (std::uint64_t{8192 >> 4} << 16) |
         (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 62);
}

__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes >> 4);
}

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Ties registers to this place in the program: nothing that uses them moves across.
template <int N>
__device__ __forceinline__ void hold(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(std::uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define LONGSCAN_D8(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])

// First: d is written, not added to. It is then an output only, so that its registers are free before.

/// d[64 × 32] (+)= a · Bᵀ, B in rows.
template <bool First>
__device__ __forceinline__ void product_n32(float* d, const std::uint32_t* a, std::uint64_t b) {
  if constexpr (First)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
        : LONGSCAN_D8("=f", d, 0), LONGSCAN_D8("=f", d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
        : LONGSCAN_D8("+f", d, 0), LONGSCAN_D8("+f", d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/// d[64 × 64] (+)= a · Bᵀ, B in rows.
template <bool First>
__device__ __forceinline__ void product_n64(float* d, const std::uint32_t* a, std::uint64_t b) {
  if constexpr (First)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : LONGSCAN_D8("=f", d, 0), LONGSCAN_D8("=f", d, 8), LONGSCAN_D8("=f", d, 16), LONGSCAN_D8("=f", d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : LONGSCAN_D8("+f", d, 0), LONGSCAN_D8("+f", d, 8), LONGSCAN_D8("+f", d, 16), LONGSCAN_D8("+f", d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// A, B in shared memory; `type` f16 or bf16, `set` 0 to write and 1 to add, `c` the constraint of d
#define LONGSCAN_TILES_N64(type, set, c)                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " set                                                    \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                \
               " "                                                                                        \
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "        \
               "%32, %33, p, 1, 1, 0, 0;\n}\n"                                                            \
               : LONGSCAN_D8(c, d, 0), LONGSCAN_D8(c, d, 8), LONGSCAN_D8(c, d, 16), LONGSCAN_D8(c, d, 24) \
               : "l"(a), "l"(b))

/// d[64 × 64] (+)= A · Bᵀ, both in rows.
template <bool First, bool Bf16>
__device__ __forceinline__ void product_tiles_n64(float* d, std::uint64_t a, std::uint64_t b) {
  if constexpr (Bf16 && First)
    LONGSCAN_TILES_N64("bf16", "0", "=f");
  else if constexpr (Bf16)
    LONGSCAN_TILES_N64("bf16", "1", "+f");
  else if constexpr (First)
    LONGSCAN_TILES_N64("f16", "0", "=f");
  else
    LONGSCAN_TILES_N64("f16", "1", "+f");
}
#undef LONGSCAN_TILES_N64

/// d[64 × 32] += a · B, B in columns (its rows are the k index).
__device__ __forceinline__ void product_columns_n32(float* d, const std::uint32_t* a, std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n"
      : LONGSCAN_D8("+f", d, 0), LONGSCAN_D8("+f", d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/// d[64 × 64] += a · B, B in columns (its rows are the k index).
__device__ __forceinline__ void product_columns_n64(float* d, const std::uint32_t* a, std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : LONGSCAN_D8("+f", d, 0), LONGSCAN_D8("+f", d, 8), LONGSCAN_D8("+f", d, 16), LONGSCAN_D8("+f", d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/// d[64 × 128] += a · B, B in columns (its rows are the k index).
__device__ __forceinline__ void product_columns_n128(float* d, const std::uint32_t* a, std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : LONGSCAN_D8("+f", d, 0), LONGSCAN_D8("+f", d, 8), LONGSCAN_D8("+f", d, 16), LONGSCAN_D8("+f", d, 24),
        LONGSCAN_D8("+f", d, 32), LONGSCAN_D8("+f", d, 40), LONGSCAN_D8("+f", d, 48), LONGSCAN_D8("+f", d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef LONGSCAN_D8

}  // namespace longscan::hopper
