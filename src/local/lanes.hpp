// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lanes of a Kokkos team, as core/delta_chunk.hpp uses them: loops over rows and elements, a small matrix product,
// loads and stores. A lane of `each(n)` and of `combine` has the same indices every time, so loops over the same range
// need no sync between them.
#include "core/dtype.hpp"
#include "local/small_gemm.hpp"
#include "local/warp_product.hpp"
#include "longscan/types.hpp"

namespace longscan {

/// n columns, rounded up to whole strips of a packed matrix.
template <class T>
constexpr int in_strips(int n) {
  return (n + strip_columns<T> - 1) / strip_columns<T> * strip_columns<T>;
}
/// Where element (p, j) of a packed matrix of k rows stands.
template <class T>
KOKKOS_INLINE_FUNCTION constexpr std::int64_t packed_index(int k, int p, int j) {
  constexpr int S = strip_columns<T>;
  return (static_cast<std::int64_t>(j / S) * k + p) * S + j % S;
}

/// A team of one on a host core: loops run as they stand, and vectorise.
template <class T>
struct HostLanes {
  void sync() const {}
  template <class F>
  void once(const F& f) const {
    f();
  }
  template <class F>
  void each(int n, const F& f) const {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void each2(int rows, int cols, const F& f) const {
    for (int i = 0; i < rows; ++i) {
#pragma GCC ivdep
      for (int j = 0; j < cols; ++j) f(i, j);
    }
  }
  /// f(t, s) for s <= t < n; for each s in the order of t, and by one lane.
  template <class F>
  void lower(int n, const F& f) const {
    for (int t = 0; t < n; ++t) {
#pragma GCC ivdep
      for (int s = 0; s <= t; ++s) f(t, s);
    }
  }
  /// f(lanes, i) for i < n, where those lanes work on i together: `each`, `dot` and `once` of theirs. They need no sync
  /// among themselves where a lane reads, by the same index, what it wrote.
  template <class F>
  void groups(int n, const F& f) const {
    for (int i = 0; i < n; ++i) f(*this, i);
  }
  template <class F>
  std::int64_t count(int n, const F& f) const {
    std::int64_t sum = 0;
    for (int i = 0; i < n; ++i) sum += f(i) ? 1 : 0;
    return sum;
  }
  /// Sum of f(i), in an order that depends on the kind of lanes only.
  template <class F>
  double sum(std::int64_t n, const F& f) const {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += f(i);
    return sum;
  }
  bool any_non_finite(int rows, int cols, const T* p, int ld) const {
    for (int i = 0; i < rows; ++i) {
      int bad = 0;
      for (int j = 0; j < cols; ++j) bad |= is_non_finite(p[static_cast<std::int64_t>(i) * ld + j]);
      if (bad) return true;
    }
    return false;
  }
  T dot(int n, const T* x, const T* y) const {
    constexpr int width = 16;  // partial sums, so that it vectorises
    T sums[width] = {};
    int i = 0;
    for (; i + width <= n; i += width)
      for (int j = 0; j < width; ++j) sums[j] += x[i + j] * y[i + j];
    for (int j = 0; i < n; ++i, ++j) sums[j] += x[i] * y[i];
    for (int half = width / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    return sums[0];
  }
  /// C = (accumulate ? C : 0) + A B; n a multiple of the padding.
  void product(int m, int n, int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc, bool accumulate) const {
    small_gemm(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  }
  /// The same with B packed in strips (small_gemm.hpp).
  void packed_product(int m, int n, int k, const T* a, int lda, const T* b, T* c, int ldc, bool accumulate) const {
    packed_gemm(m, n, k, a, lda, b, c, ldc, accumulate);
  }
  /// row = keep * row + sum over s in [s0, s1) of weights[s] * rows[s]
  void combine(int n, T* row, T keep, const T* weights, const T* rows, int ld, int s0, int s1) const {
    if (keep != T(1))
      for (int j = 0; j < n; ++j) row[j] *= keep;
    for (int s = s0; s < s1; ++s) {
      const T x = weights[s];
      const T* other = rows + static_cast<std::int64_t>(s) * ld;
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) row[j] += x * other[j];
    }
  }
  /// Rows [top, end) of x in place by forward substitution with the unit lower triangle I - A, of which x has the rows
  /// from `begin` on already; end - begin <= 16.
  void substitute(int n, T* x, int ld, const T* A, int lda, int begin, int top, int end) const {
    for (int t = top; t < end; ++t) combine(n, x + t * ld, T(1), A + t * lda, x, ld, begin, t);
  }
  void transpose(int rows, int cols, const T* from, int ldf, T* to, int ldt) const {
    constexpr int side = 16;
    for (int j0 = 0; j0 < cols; j0 += side)
      for (int i0 = 0; i0 < rows; i0 += side)
        for (int j = j0; j < (j0 + side < cols ? j0 + side : cols); ++j)
          for (int i = i0; i < (i0 + side < rows ? i0 + side : rows); ++i) to[j * ldt + i] = from[i * ldf + j];
  }
  /// Tokens t0, … of a head into rows of `to`; rows from n on become zero.
  void load_rows(const TokenArray& x, std::int64_t t0, int head, int n, int rows, int cols, T* to, int ld) const {
    for (int t = 0; t < rows; ++t) {
      T* row = to + static_cast<std::int64_t>(t) * ld;
      if (t < n)
        load_row(x.data, x.type, (t0 + t) * x.token_stride + head / x.heads_per_stored * x.head_stride, cols, row);
      else
        for (int j = 0; j < cols; ++j) row[j] = T(0);
    }
  }
  void store_rows(const MutableTokenArray& x, std::int64_t t0, int head, int n, int cols, const T* from, int ld) const {
    for (int t = 0; t < n; ++t)
      store_row(x.data, x.type, (t0 + t) * x.token_stride + head * x.head_stride, cols,
                from + static_cast<std::int64_t>(t) * ld);
  }
};

/// The lanes that share an index of `DeviceLanes::groups`: a warp where there are warps, else one.
template <class T>
struct GroupLanes {
#ifdef __CUDA_ARCH__
  static constexpr int size = 32;
#else
  static constexpr int size = 1;
#endif
  int lane;
  template <class F>
  KOKKOS_FUNCTION void once(const F& f) const {
    if (lane == 0) f();
  }
  template <class F>
  KOKKOS_FUNCTION void each(int n, const F& f) const {
    for (int i = lane; i < n; i += size) f(i);
  }
  /// For all lanes of the group.
  KOKKOS_FUNCTION T dot(int n, const T* x, const T* y) const {
    T sum = 0;
    each(n, [&](int i) { sum += x[i] * y[i]; });
#ifdef __CUDA_ARCH__
    for (int other = size / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
#endif
    return sum;
  }
};

/// The threads of a team on a device; with CUDA a multiple of 32.
template <class T, class Member>
struct DeviceLanes {
  Member member;
  bool rough = false;  ///< float operands of products may be rounded to 11 bits

  KOKKOS_FUNCTION void sync() const { member.team_barrier(); }
  template <class F>
  KOKKOS_FUNCTION void once(const F& f) const {
    if (member.team_rank() == 0) f();
    member.team_barrier();
  }
  template <class F>
  KOKKOS_FUNCTION void each(int n, const F& f) const {
    for (int i = member.team_rank(); i < n; i += member.team_size()) f(i);
  }
  template <class F>
  KOKKOS_FUNCTION void each2(int rows, int cols, const F& f) const {
    for (int i = member.team_rank(); i < rows * cols; i += member.team_size()) f(i / cols, i % cols);
  }
  template <class F>
  KOKKOS_FUNCTION void lower(int n, const F& f) const {
    each(n, [&](int s) {
      for (int t = s; t < n; ++t) f(t, s);
    });
  }
  template <class F>
  KOKKOS_FUNCTION void groups(int n, const F& f) const {
    using Group = GroupLanes<T>;
    const Group group{member.team_rank() % Group::size};
    for (int i = member.team_rank() / Group::size; i < n; i += member.team_size() / Group::size) f(group, i);
  }
  template <class F>
  KOKKOS_FUNCTION std::int64_t count(int n, const F& f) const {
    std::int64_t sum = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(member, n), [&](int i, std::int64_t& s) { s += f(i) ? 1 : 0; }, sum);
    return sum;
  }
  template <class F>
  KOKKOS_FUNCTION double sum(std::int64_t n, const F& f) const {
    double sum = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(member, n), [&](std::int64_t i, double& s) { s += f(i); }, sum);
    return sum;
  }
  KOKKOS_FUNCTION bool any_non_finite(int rows, int cols, const T* p, int ld) const {
    return count(rows * cols,
                 [&](int i) { return is_non_finite(p[static_cast<std::int64_t>(i / cols) * ld + i % cols]); }) > 0;
  }
  /// n a multiple of four; A, B and C, and their rows, begin at multiples of 4 elements. On matrix instructions where
  /// there are some, see warp_product.hpp; else a lane computes tiles of `rows` rows and four columns in registers.
  KOKKOS_FUNCTION void product(int m, int n, int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc,
                               bool accumulate) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    warp_product(CudaWarp{member.team_rank() % 32}, member.team_rank() / 32, member.team_size() / 32,
                 WarpProduct<T>{m, n, k, a, lda, b, ldb, c, ldc, accumulate, rough});
#else
    if (m % 8 == 0 && m / 8 * (n / 4) >= member.team_size())
      tiles<8>(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
    else
      tiles<2>(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
#endif
  }

 private:
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  template <int rows>
  KOKKOS_FUNCTION void tiles(int m, int n, int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc,
                             bool accumulate) const {
    each2((m + rows - 1) / rows, n / 4, [&](int tile, int j4) {
      const int i0 = tile * rows, j = 4 * j4;
      const auto row = [&](int i) { return i0 + i < m ? i0 + i : m - 1; };  // the last ones twice
      T sum[rows][4];
      LONGSCAN_UNROLL
      for (int i = 0; i < rows; ++i) {
        const Four old = accumulate ? *reinterpret_cast<const Four*>(c + row(i) * ldc + j) : Four{};
        LONGSCAN_UNROLL
        for (int e = 0; e < 4; ++e) sum[i][e] = old.x[e];
      }
      int p = 0;
      for (; p + 4 <= k; p += 4) {
        Four right[4];
        LONGSCAN_UNROLL
        for (int q = 0; q < 4; ++q) right[q] = *reinterpret_cast<const Four*>(b + (p + q) * ldb + j);
        LONGSCAN_UNROLL
        for (int i = 0; i < rows; ++i) {
          const Four left = *reinterpret_cast<const Four*>(a + row(i) * lda + p);
          LONGSCAN_UNROLL
          for (int q = 0; q < 4; ++q) {
            LONGSCAN_UNROLL
            for (int e = 0; e < 4; ++e) sum[i][e] += left.x[q] * right[q].x[e];
          }
        }
      }
      for (; p < k; ++p) {
        const Four right = *reinterpret_cast<const Four*>(b + p * ldb + j);
        LONGSCAN_UNROLL
        for (int i = 0; i < rows; ++i) {
          const T left = a[row(i) * lda + p];
          LONGSCAN_UNROLL
          for (int e = 0; e < 4; ++e) sum[i][e] += left * right.x[e];
        }
      }
      LONGSCAN_UNROLL
      for (int i = 0; i < rows; ++i)
        if (i0 + i < m) {
          Four out;
          LONGSCAN_UNROLL
          for (int e = 0; e < 4; ++e) out.x[e] = sum[i][e];
          *reinterpret_cast<Four*>(c + (i0 + i) * ldc + j) = out;
        }
    });
  }

 public:
  KOKKOS_FUNCTION void packed_product(int m, int n, int k, const T* a, int lda, const T* b, T* c, int ldc,
                                      bool accumulate) const {
    constexpr int S = strip_columns<T>;
    each2(m, n, [&](int i, int j) {
      T sum = accumulate ? c[i * ldc + j] : T(0);
      const T* column = b + static_cast<std::int64_t>(j / S) * k * S + j % S;
      for (int p = 0; p < k; ++p) sum += a[i * lda + p] * column[static_cast<std::int64_t>(p) * S];
      c[i * ldc + j] = sum;
    });
  }
  KOKKOS_FUNCTION void combine(int n, T* row, T keep, const T* weights, const T* rows, int ld, int s0, int s1) const {
    each(n, [&](int j) {
      T sum = row[j] * keep;
      for (int s = s0; s < s1; ++s) sum += weights[s] * rows[s * ld + j];
      row[j] = sum;
    });
  }
  KOKKOS_FUNCTION void substitute(int n, T* x, int ld, const T* A, int lda, int begin, int top, int end) const {
    constexpr int most = 16;
    each(n, [&](int j) {  // a column in registers
      T column[most];
      LONGSCAN_UNROLL
      for (int s = 0; s < most; ++s) column[s] = begin + s < end ? x[(begin + s) * ld + j] : T(0);
      LONGSCAN_UNROLL
      for (int t = 1; t < most; ++t) {
        if (begin + t < top || begin + t >= end) continue;
        LONGSCAN_UNROLL
        for (int s = 0; s < t; ++s) column[t] += A[(begin + t) * lda + begin + s] * column[s];
      }
      LONGSCAN_UNROLL
      for (int t = 0; t < most; ++t)
        if (begin + t >= top && begin + t < end) x[(begin + t) * ld + j] = column[t];
    });
  }
  KOKKOS_FUNCTION void transpose(int rows, int cols, const T* from, int ldf, T* to, int ldt) const {
    each2(cols, rows, [&](int j, int i) { to[j * ldt + i] = from[i * ldf + j]; });
  }
  KOKKOS_FUNCTION void load_rows(const TokenArray& x, std::int64_t t0, int head, int n, int rows, int cols, T* to,
                                 int ld) const {
    const std::int64_t first = t0 * x.token_stride + head / x.heads_per_stored * x.head_stride;
    each2(rows, cols, [&](int t, int j) {
      to[t * ld + j] = t < n ? load<T>(x.data, x.type, first + t * x.token_stride + j) : T(0);
    });
  }
  KOKKOS_FUNCTION void store_rows(const MutableTokenArray& x, std::int64_t t0, int head, int n, int cols, const T* from,
                                  int ld) const {
    const std::int64_t first = t0 * x.token_stride + head * x.head_stride;
    each2(n, cols, [&](int t, int j) { store(x.data, x.type, first + t * x.token_stride + j, from[t * ld + j]); });
  }
};

}  // namespace longscan
