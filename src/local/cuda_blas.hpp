// SPDX-License-Identifier: Apache-2.0
#pragma once
// cuBLAS on Kokkos' stream. For files that are compiled for CUDA alone.
#include <cublas_v2.h>

#include <string>

#include "core/portable.hpp"
#include "longscan/error.hpp"

namespace longscan {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(ExitCode::internal, std::string(what) + ": " + cudaGetErrorString(status));
}
inline void check_cuda(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ExitCode::internal, std::string(what) + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
}

/// One for the process; given back before Kokkos ends.
inline cublasHandle_t cublas() {
  static cublasHandle_t handle = nullptr;
  static cudaStream_t on = nullptr;
  if (!handle) {
    check_cuda(cublasCreate(&handle), "starting cuBLAS");
    Kokkos::push_finalize_hook([] { cublasDestroy(handle), handle = nullptr, on = nullptr; });
  }
  const cudaStream_t stream = Kokkos::Cuda().cuda_stream();
  if (stream != on) check_cuda(cublasSetStream(handle, stream), "cuBLAS");
  on = stream;
  return handle;
}

/// How the second factor of a product lies in memory.
enum class Factor : int { by_output, by_input };  ///< [m][depth], or [depth][m]: a little faster in float32

/// Row-major C [n][m] = A [n][depth] B^T + beta C, in the precision of T, or, `tf32`, with float operands rounded to
/// TF32.
inline void products(int m, int n, int depth, const float* b, Factor lies, const float* a, float beta, float* c,
                     bool tf32 = false) {
  const float one = 1;
  const bool by_output = lies == Factor::by_output;
  const cublasHandle_t blas = cublas();
  check_cuda(cublasSetMathMode(blas, tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH), "cuBLAS");
  check_cuda(cublasSgemm(blas, by_output ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, m, n, depth, &one, b,
                         by_output ? depth : m, a, depth, &beta, c, m),
             "a matrix product");
}
inline void products(int m, int n, int depth, const double* b, Factor lies, const double* a, double beta, double* c,
                     bool = false) {
  const double one = 1;
  const bool by_output = lies == Factor::by_output;
  check_cuda(cublasDgemm(cublas(), by_output ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, m, n, depth, &one, b,
                         by_output ? depth : m, a, depth, &beta, c, m),
             "a matrix product");
}

}  // namespace longscan
