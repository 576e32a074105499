// SPDX-License-Identifier: Apache-2.0
#include "local/small_gemm.hpp"

namespace longscan {
namespace {

// Vectors as wide as the machine's; a tile of rows x vectors accumulators fills its registers.
#if defined(__AVX512F__)
constexpr int vector_bytes = 64, tile_rows = 8;
#elif defined(__AVX__)
constexpr int vector_bytes = 32, tile_rows = 6;
#else
constexpr int vector_bytes = 16, tile_rows = 6;
#endif

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(vector_bytes), aligned(sizeof(T)), may_alias));
  static constexpr int size = vector_bytes / sizeof(T);
};

template <class T, int Rows, int Vectors>
void tile(int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc, bool accumulate) {
  using V = typename Vector<T>::type;
  constexpr int W = Vector<T>::size;
  V sum[Rows][Vectors];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j)
      sum[i][j] = accumulate ? *reinterpret_cast<const V*>(c + static_cast<std::int64_t>(i) * ldc + j * W) : V{};
  for (int p = 0; p < k; ++p) {
    V row[Vectors];
    for (int j = 0; j < Vectors; ++j)
      row[j] = *reinterpret_cast<const V*>(b + static_cast<std::int64_t>(p) * ldb + j * W);
    for (int i = 0; i < Rows; ++i) {
      const T x = a[static_cast<std::int64_t>(i) * lda + p];
      for (int j = 0; j < Vectors; ++j) sum[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<V*>(c + static_cast<std::int64_t>(i) * ldc + j * W) = sum[i][j];
}

/// All rows of a strip of columns, `tile_rows` at a time and then what is left.
template <class T, int Vectors, int Rows = tile_rows>
void strip(int m, int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc, bool accumulate) {
  int i = 0;
  for (; i + Rows <= m; i += Rows)
    tile<T, Rows, Vectors>(k, a + static_cast<std::int64_t>(i) * lda, lda, b, ldb,
                           c + static_cast<std::int64_t>(i) * ldc, ldc, accumulate);
  if constexpr (Rows > 1) {
    if (i < m)
      strip<T, Vectors, Rows / 2>(m - i, k, a + static_cast<std::int64_t>(i) * lda, lda, b, ldb,
                                  c + static_cast<std::int64_t>(i) * ldc, ldc, accumulate);
  }
}

template <class T>
void gemm(int m, int n, int k, const T* a, int lda, const T* b, int ldb, T* c, int ldc, bool accumulate) {
  constexpr int W = Vector<T>::size;
  int j = 0;
  if (m < 4)  // few rows: more columns at once, so that there are sums enough to hide the latency of one
    for (; j + 8 * W <= n; j += 8 * W) strip<T, 8, 1>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j + 2 * W <= n; j += 2 * W) strip<T, 2>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += W) strip<T, 1>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

/// Rows of C in `Strips` neighbouring strips of a packed B.
template <class T, int Rows, int Strips>
void packed_tile(int k, const T* a, int lda, const T* b, T* c, int ldc, bool accumulate) {
  using V = typename Vector<T>::type;
  constexpr int W = Vector<T>::size, S = strip_columns<T>, each = S / W, Vectors = Strips * each;
  V sum[Rows][Vectors];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j)
      sum[i][j] = accumulate ? *reinterpret_cast<const V*>(c + static_cast<std::int64_t>(i) * ldc + j * W) : V{};
  const std::int64_t strip = static_cast<std::int64_t>(k) * S;
  for (int p = 0; p < k; ++p) {
    V row[Vectors];
    for (int j = 0; j < Vectors; ++j) row[j] = *reinterpret_cast<const V*>(b + j / each * strip + p * S + j % each * W);
    for (int i = 0; i < Rows; ++i) {
      const T x = a[static_cast<std::int64_t>(i) * lda + p];
      for (int j = 0; j < Vectors; ++j) sum[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Vectors; ++j) *reinterpret_cast<V*>(c + static_cast<std::int64_t>(i) * ldc + j * W) = sum[i][j];
}

template <class T, int Strips, int Rows>
void packed_strip(int m, int k, const T* a, int lda, const T* b, T* c, int ldc, bool accumulate) {
  int i = 0;
  for (; i + Rows <= m; i += Rows)
    packed_tile<T, Rows, Strips>(k, a + static_cast<std::int64_t>(i) * lda, lda, b,
                                 c + static_cast<std::int64_t>(i) * ldc, ldc, accumulate);
  if constexpr (Rows > 1) {
    if (i < m)
      packed_strip<T, Strips, Rows / 2>(m - i, k, a + static_cast<std::int64_t>(i) * lda, lda, b,
                                        c + static_cast<std::int64_t>(i) * ldc, ldc, accumulate);
  }
}

template <class T>
void packed(int m, int n, int k, const T* a, int lda, const T* b, T* c, int ldc, bool accumulate) {
  constexpr int S = strip_columns<T>;
  const std::int64_t strip = static_cast<std::int64_t>(k) * S;
  int j = 0;
  if (m < 4)  // few rows: sums enough to hide the latency of one
    for (; j + 4 * S <= n; j += 4 * S) packed_strip<T, 4, 1>(m, k, a, lda, b + j / S * strip, c + j, ldc, accumulate);
  for (; j < n; j += S) packed_strip<T, 1, tile_rows>(m, k, a, lda, b + j / S * strip, c + j, ldc, accumulate);
}

}  // namespace

void packed_gemm(int m, int n, int k, const float* a, int lda, const float* b, float* c, int ldc, bool accumulate) {
  packed(m, n, k, a, lda, b, c, ldc, accumulate);
}

void packed_gemm(int m, int n, int k, const double* a, int lda, const double* b, double* c, int ldc, bool accumulate) {
  packed(m, n, k, a, lda, b, c, ldc, accumulate);
}

void small_gemm(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                bool accumulate) {
  gemm(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

void small_gemm(int m, int n, int k, const double* a, int lda, const double* b, int ldb, double* c, int ldc,
                bool accumulate) {
  gemm(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

}  // namespace longscan
