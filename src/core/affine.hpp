// SPDX-License-Identifier: Apache-2.0
#pragma once
// The affine map y = A x + b of both solvers, on n values and m columns at once. Device functions; no launches.
//   delta rule: A = P^T [K,K], x = S^T [K,V]        Newton: A the Jacobian, [1,1], [2,2] or [D,D], x [n,1]
#include "core/portable.hpp"

namespace longscan {

/// Maps in slots of one array: slot s starts at s * stride and holds the rows of [A | b], n rows of n + m values,
/// `leading` apart. Values beyond n + m in a row are zero. `padded`: leading is a multiple of 64 bytes.
template <class T>
struct AffineMaps {
  T* data = nullptr;
  int n = 1, m = 1, leading = 2;
  std::int64_t stride = 2;
  bool padded = false;
  KOKKOS_INLINE_FUNCTION T* slot(std::int64_t i) const { return data + i * stride; }
};

/// How a Newton-like step changes the Jacobians before they are used.
enum class Reshape : int {
  keep,
  clamp,     ///< scale blocks so that no row sum of |A| exceeds 1
  identity,  ///< picard
  zero       ///< jacobi
};

/// Points in slots: n rows of m values, `leading` apart.
template <class T>
struct AffinePoints {
  T* data = nullptr;
  int leading = 1;
  std::int64_t stride = 1;
  KOKKOS_INLINE_FUNCTION T* slot(std::int64_t i) const { return data + i * stride; }
};

/// out = A x + b in columns [begin, end), of the m rounded up to the padding. out and x differ.
template <class T, class Lanes>
KOKKOS_FUNCTION void affine_apply(const Lanes& lanes, const AffineMaps<T>& shape, const T* map, const T* x, T* out,
                                  int leading, int begin, int end) {
  const int n = shape.n, m = end < shape.m ? end : shape.m, width = end - begin;
  lanes.each2(n, width, [&](int i, int j) {
    out[i * leading + begin + j] = begin + j < m ? map[i * shape.leading + n + begin + j] : T(0);
  });
  lanes.sync();
  if (shape.padded) {
    lanes.product(n, width, n, map, shape.leading, x + begin, leading, out + begin, leading, true);
  } else {
    lanes.each2(n, m - begin, [&](int i, int column) {
      const int j = begin + column;
      T sum = out[i * leading + j];
      for (int k = 0; k < n; ++k) sum += map[i * shape.leading + k] * x[k * leading + j];
      out[i * leading + j] = sum;
    });
  }
  lanes.sync();
}

/// The same in all columns.
template <class T, class Lanes>
KOKKOS_FUNCTION void affine_apply(const Lanes& lanes, const AffineMaps<T>& shape, const T* map, const T* x, T* out,
                                  int leading) {
  affine_apply(lanes, shape, map, x, out, leading, 0, leading);
}

/// out = `second` after `first`: A = A2 A1, b = A2 b1 + b2. out differs from both.
template <class T, class Lanes>
KOKKOS_FUNCTION void affine_compose(const Lanes& lanes, const AffineMaps<T>& shape, const T* first, const T* second,
                                    T* out) {
  const int n = shape.n, ld = shape.leading;
  lanes.each2(n, ld, [&](int i, int j) { out[i * ld + j] = j < n ? T(0) : second[i * ld + j]; });
  lanes.sync();
  if (shape.padded) {
    lanes.product(n, ld, n, second, ld, first, ld, out, ld, true);
  } else {
    lanes.each2(n, n + shape.m, [&](int i, int j) {
      T sum = out[i * ld + j];
      for (int k = 0; k < n; ++k) sum += second[i * ld + k] * first[k * ld + j];
      out[i * ld + j] = sum;
    });
  }
  lanes.sync();
}

}  // namespace longscan
