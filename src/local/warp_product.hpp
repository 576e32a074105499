// SPDX-License-Identifier: Apache-2.0
#pragma once
// C = A B by the warps of a team on matrix instructions: doubles as they are (mma.m8n8k4.f64), floats as sums of two
// TF32 numbers (mma.m16n8k8.tf32; three products, as in CUTLASS's 3xTF32: Ootomo and Yokota 2022), or as one TF32
// number each where 11 bits are enough. `Warp` gives the lane's number and the instruction: CudaWarp, or an emulation.
//
// The instruction rounds its running sum towards zero. Each step's sum is therefore formed on its own and added to the
// float before by an ordinary, rounded addition; errors then do not pile up in one direction.
#include "core/portable.hpp"

namespace longscan {

/// The tiles of one instruction, and which of their elements a lane holds.
template <class T>
struct Fragment;

template <>
struct Fragment<double> {
  static constexpr int m = 8, n = 8, k = 4, a = 1, a_run = 1, b = 1, c = 2;
  KOKKOS_INLINE_FUNCTION static int a_row(int lane, int) { return lane / 4; }
  KOKKOS_INLINE_FUNCTION static int a_k(int lane, int) { return lane % 4; }
  KOKKOS_INLINE_FUNCTION static int b_k(int lane, int) { return lane % 4; }
  KOKKOS_INLINE_FUNCTION static int b_column(int lane) { return lane / 4; }
  KOKKOS_INLINE_FUNCTION static int c_row(int lane, int) { return lane / 4; }
  KOKKOS_INLINE_FUNCTION static int c_column(int lane, int i) { return 2 * (lane % 4) + i; }
};

/// The instruction's index t of k stands for 2 t, and t + 4 for 2 t + 1 (the order of a sum is free, if A and B agree),
/// so that a lane's elements of a row of A are beside each other.
template <>
struct Fragment<float> {
  static constexpr int m = 16, n = 8, k = 8, a = 4, a_run = 2, b = 2, c = 4;
  KOKKOS_INLINE_FUNCTION static int a_row(int lane, int i) { return lane / 4 + 8 * (i % 2); }
  KOKKOS_INLINE_FUNCTION static int a_k(int lane, int i) { return 2 * (lane % 4) + i / 2; }
  KOKKOS_INLINE_FUNCTION static int b_k(int lane, int i) { return 2 * (lane % 4) + i; }
  KOKKOS_INLINE_FUNCTION static int b_column(int lane) { return lane / 4; }
  KOKKOS_INLINE_FUNCTION static int c_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
  KOKKOS_INLINE_FUNCTION static int c_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }
};

#ifdef __CUDA_ARCH__
struct CudaWarp {
  int number;  ///< of the lane
  __device__ int lane() const { return number; }
  __device__ static void sync() { __syncwarp(); }
  /// x to 11 bits: the nearest TF32 number.
  __device__ static float round(float x) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
  }
  /// c += a b
  __device__ static void multiply(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
  }
  __device__ static void multiply(double (&c)[2], const double (&a)[1], const double (&b)[1]) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a[0]), "d"(b[0]));
  }
};
#endif

/// A product C = (accumulate ? C : 0) + A B of an m × k and a k × n matrix, row by row in memory.
/// A starts at, and lda is, a multiple of 8 bytes. C is neither A nor B.
template <class T>
struct WarpProduct {
  int m, n, k;
  const T* a;
  int lda;
  const T* b;
  int ldb;
  T* c;
  int ldc;
  bool accumulate;
  bool rough;  ///< floats as one TF32 number each: errors of 5e-4 of |a| |b|
};

/// sum[r][s] += a[r] b[s]
template <int R, int S, class Warp>
KOKKOS_INLINE_FUNCTION void warp_multiply(const Warp& warp, const double (&a)[R][1], const double (&b)[S][1],
                                          double (&sum)[R][S][2], bool) {
  LONGSCAN_UNROLL
  for (int r = 0; r < R; ++r) {
    LONGSCAN_UNROLL
    for (int s = 0; s < S; ++s) warp.multiply(sum[r][s], a[r], b[s]);
  }
}

template <int R, int S, class Warp>
KOKKOS_INLINE_FUNCTION void warp_multiply(const Warp& warp, const float (&a)[R][4], const float (&b)[S][2],
                                          float (&sum)[R][S][4], bool rough) {
  float a_high[R][4], a_low[R][4];
  LONGSCAN_UNROLL
  for (int r = 0; r < R; ++r) {
    LONGSCAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      a_high[r][i] = warp.round(a[r][i]);
      a_low[r][i] = warp.round(a[r][i] - a_high[r][i]);
    }
  }
  LONGSCAN_UNROLL
  for (int s = 0; s < S; ++s) {
    float b_high[2], b_low[2];
    LONGSCAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      b_high[i] = warp.round(b[s][i]);
      b_low[i] = warp.round(b[s][i] - b_high[i]);
    }
    LONGSCAN_UNROLL
    for (int r = 0; r < R; ++r) {
      float step[4] = {};
      if (!rough) {
        warp.multiply(step, a_low[r], b_high);
        warp.multiply(step, a_high[r], b_low);
      }
      warp.multiply(step, a_high[r], b_high);
      LONGSCAN_UNROLL
      for (int i = 0; i < 4; ++i) sum[r][s][i] += step[i];
    }
  }
}

/// The tile of R × S fragments at (i0, j0).
template <int R, int S, class T, class Warp>
KOKKOS_INLINE_FUNCTION void warp_tile(const Warp& warp, const WarpProduct<T>& p, int i0, int j0) {
  using F = Fragment<T>;
  const int lane = warp.lane();
  const auto row = [&](int r, int i) { return i0 + r * F::m + F::c_row(lane, i); };
  const auto column = [&](int s, int i) { return j0 + s * F::n + F::c_column(lane, i); };
  T sum[R][S][F::c];
  LONGSCAN_UNROLL
  for (int r = 0; r < R; ++r) {
    LONGSCAN_UNROLL
    for (int s = 0; s < S; ++s) {
      LONGSCAN_UNROLL
      for (int i = 0; i < F::c; ++i) {
        const bool old = p.accumulate && row(r, i) < p.m && column(s, i) < p.n;
        sum[r][s][i] = old ? p.c[row(r, i) * p.ldc + column(s, i)] : T(0);
      }
    }
  }
  // Rows and columns beyond the end give what is not stored: the last ones stand in for them.
  constexpr int a_rows = F::a / F::a_run;  // of A in a lane's hands, each with a run of a_run elements
  struct alignas(F::a_run * sizeof(T)) Run {
    T x[F::a_run];
  };
  const T *left[R][a_rows], *right[S];
  LONGSCAN_UNROLL
  for (int r = 0; r < R; ++r) {
    LONGSCAN_UNROLL
    for (int i = 0; i < a_rows; ++i) {
      const int at = i0 + r * F::m + F::a_row(lane, i);
      left[r][i] = p.a + (at < p.m ? at : p.m - 1) * p.lda + F::a_k(lane, 0);
    }
  }
  LONGSCAN_UNROLL
  for (int s = 0; s < S; ++s) {
    const int at = j0 + s * F::n + F::b_column(lane);
    right[s] = p.b + (at < p.n ? at : p.n - 1);
  }
  T a[R][F::a], b[S][F::b];
  const auto multiply = [&] { warp_multiply<R, S>(warp, a, b, sum, p.rough); };
  warp.sync();  // the instruction wants all lanes at once
  int q = 0;
  for (; q + F::k <= p.k; q += F::k) {
    LONGSCAN_UNROLL
    for (int r = 0; r < R; ++r) {
      LONGSCAN_UNROLL
      for (int i = 0; i < a_rows; ++i) {
        const Run run = *reinterpret_cast<const Run*>(left[r][i] + q);
        LONGSCAN_UNROLL
        for (int j = 0; j < F::a_run; ++j) a[r][i + j * a_rows] = run.x[j];
      }
    }
    LONGSCAN_UNROLL
    for (int s = 0; s < S; ++s) {
      LONGSCAN_UNROLL
      for (int i = 0; i < F::b; ++i) b[s][i] = right[s][(q + F::b_k(lane, i)) * p.ldb];
    }
    multiply();
  }
  if (q < p.k) {
    LONGSCAN_UNROLL
    for (int r = 0; r < R; ++r) {
      LONGSCAN_UNROLL
      for (int i = 0; i < F::a; ++i) {
        const int j = i / a_rows;
        a[r][i] = q + F::a_k(lane, i) < p.k ? left[r][i % a_rows][q + j] : T(0);
      }
    }
    LONGSCAN_UNROLL
    for (int s = 0; s < S; ++s) {
      LONGSCAN_UNROLL
      for (int i = 0; i < F::b; ++i) {
        const int at = q + F::b_k(lane, i);
        b[s][i] = at < p.k ? right[s][at * p.ldb] : T(0);
      }
    }
    warp.sync();
    multiply();
  }
  LONGSCAN_UNROLL
  for (int r = 0; r < R; ++r) {
    LONGSCAN_UNROLL
    for (int s = 0; s < S; ++s) {
      LONGSCAN_UNROLL
      for (int i = 0; i < F::c; ++i)
        if (row(r, i) < p.m && column(s, i) < p.n) p.c[row(r, i) * p.ldc + column(s, i)] = sum[r][s][i];
    }
  }
}

/// What warp `index` of `warps` does of the product; an element's bits do not depend on the number of warps. Which warp
/// writes an element does: products into the same array need a sync between.
template <class T, class Warp>
LONGSCAN_NOINLINE KOKKOS_FUNCTION void warp_product(const Warp& warp, int index, int warps, const WarpProduct<T>& p) {
  using F = Fragment<T>;
  const auto rows = [&](int r) { return (p.m + r * F::m - 1) / (r * F::m); };
  const auto columns = [&](int s) { return (p.n + s * F::n - 1) / (s * F::n); };
  if (rows(2) * columns(4) >= warps) {
    for (int tile = index; tile < rows(2) * columns(4); tile += warps)
      warp_tile<2, 4>(warp, p, tile / columns(4) * 2 * F::m, tile % columns(4) * 4 * F::n);
  } else if (rows(1) * columns(2) >= warps) {
    for (int tile = index; tile < rows(1) * columns(2); tile += warps)
      warp_tile<1, 2>(warp, p, tile / columns(2) * F::m, tile % columns(2) * 2 * F::n);
  } else {
    for (int tile = index; tile < rows(1) * columns(1); tile += warps)
      warp_tile<1, 1>(warp, p, tile / columns(1) * F::m, tile % columns(1) * F::n);
  }
}

}  // namespace longscan
