// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matrix products of the size of a chunk, on one host core. Host only.
#include <cstdint>

namespace longscan {

/// C[m,n] = (accumulate ? C : 0) + A[m,k] B[k,n], row-major with leading dimensions lda, ldb, ldc.
/// n, ldb, ldc are multiples of 64 bytes' worth of elements. Every element is summed in the order of k with one
/// accumulator, so its bits depend on its own row of A and column of B only, not on m or n.
void small_gemm(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                bool accumulate);
void small_gemm(int m, int n, int k, const double* a, int lda, const double* b, int ldb, double* c, int ldc,
                bool accumulate);

/// Columns of a strip of `packed_gemm`. Read in device code too, where functions of the host are not to be had.
template <class T>
inline constexpr int strip_columns = 128 / static_cast<int>(sizeof(T));

/// The same for a B that is used again and again, packed in strips of `strip_columns` columns: element (p, j) at
/// (j / strip * k + p) * strip + j % strip; n a multiple of the strip. The same bits as small_gemm.
void packed_gemm(int m, int n, int k, const float* a, int lda, const float* b, float* c, int ldc, bool accumulate);
void packed_gemm(int m, int n, int k, const double* a, int lda, const double* b, double* c, int ldc, bool accumulate);

}  // namespace longscan
