// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which threads hold which part of W_hh where a small cell stays in registers, and what the CUDA files of dense cells
// share. For files that are compiled for CUDA alone.
#include "core/cells.hpp"
#include "local/cuda_blas.hpp"
#include "local/dense_cell_cuda.hpp"

namespace longscan::dense {

inline cudaStream_t stream() { return Kokkos::Cuda().cuda_stream(); }

/// Threads of a segment: `parts` neighbours a unit, each with a part of the unit's rows in registers.
template <class T, int width, int parts, int segments, int blocks>
struct Layout {
  static constexpr int units = width, parts_of_unit = parts, segments_of_block = segments, blocks_of_processor = blocks;
  static constexpr int threads = width * parts, columns = width / parts;
};

/// The layouts of a cell: many segments at once, and few as fast as can be. A width of 0: not in registers.
template <class T, int gates, int width>
struct Layouts {
  using Many = Layout<T, 0, 1, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<float, 1, 64> {
  using Many = Layout<float, 64, 1, 4, 2>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<float, 1, 128> {
  using Many = Layout<float, 128, 1, 2, 1>;
  using Few = Layout<float, 128, 4, 1, 1>;
};
template <>
struct Layouts<float, 3, 64> {
  using Many = Layout<float, 64, 1, 4, 1>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<float, 3, 128> {
  using Many = Layout<float, 128, 2, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<float, 4, 64> {
  using Many = Layout<float, 64, 2, 2, 1>;
  using Few = Layout<float, 64, 4, 1, 1>;
};
template <>
struct Layouts<double, 1, 64> {
  using Many = Layout<double, 64, 2, 2, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 1, 128> {
  using Many = Layout<double, 128, 4, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 3, 64> {
  using Many = Layout<double, 64, 4, 1, 1>;
  using Few = Many;
};
template <>
struct Layouts<double, 4, 64> {
  using Many = Layout<double, 64, 4, 1, 1>;
  using Few = Many;
};

/// f(layouts) for the narrowest that D fits into; false if there is none.
template <class T, int gates, class F>
bool with_layouts(int D, const F& f) {
  if (D <= 64) return f(Layouts<T, gates, 64>()), true;
  if constexpr (Layouts<T, gates, 128>::Many::units > 0)
    if (D <= 128) return f(Layouts<T, gates, 128>()), true;
  return false;
}

template <class T>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};

}  // namespace longscan::dense

/// For each cell and type that there is.
#define LONGSCAN_FOR_DENSE_CELLS(f)                                                                                \
  f(RnnTanhGates, float) f(RnnTanhGates, double) f(RnnReluGates, float) f(RnnReluGates, double) f(GruGates, float) \
      f(GruGates, double) f(LstmGates, float) f(LstmGates, double)
