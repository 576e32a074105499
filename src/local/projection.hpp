// SPDX-License-Identifier: Apache-2.0
#pragma once
// Input projections: y_t = W x_t + b for many tokens at once.
#include <cstdint>
#include <vector>

#include "core/portable.hpp"

namespace longscan {

/// A matrix and a bias, laid out for `apply`. The bits of a token's projection depend on that token alone, so that
/// cutting tokens over ranks and windows changes nothing; a library's product makes no such promise. (cuBLAS, which
/// makes the products on NVIDIA devices, is therefore given the same shape every time.)
template <class T>
class Projection {
 public:
  /// weight [rows][columns] row-major, bias [rows], on the host.
  Projection(int rows, int columns, const std::vector<T>& weight, const std::vector<T>& bias);
  int rows() const { return rows_; }
  int columns() const { return columns_; }
  /// x [tokens][columns] to y [tokens][rows], dense, in memory of the default execution space.
  /// Launches "longscan::projection".
  void apply(const T* x, std::int64_t tokens, T* y) const;
  /// The same where bits may depend on how many tokens there are.
  void apply_at_once(const T* x, std::int64_t tokens, T* y) const;

 private:
  using Array = Kokkos::View<T*, Kokkos::DefaultExecutionSpace::memory_space>;
  int rows_, columns_, width_;
  Array transposed_, bias_;
#ifdef KOKKOS_ENABLE_CUDA
  void apply_by_cublas(const T* x, std::int64_t tokens, T* y) const;
  Array weight_;
  mutable Array x_rest_, y_rest_;
#endif
};

}  // namespace longscan
