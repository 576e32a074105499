// SPDX-License-Identifier: Apache-2.0
// Weights on the device, and how many segments it runs side by side.
#include "local/dense_cell_layouts.hpp"

namespace longscan {

using namespace dense;

template <class Gates, class T>
DenseCellCuda<Gates, T>::DenseCellCuda(int D, const std::vector<T>& W, const std::vector<T>& bias) : D_(D) {
  constexpr int g = Gates::gates;
  bias_ = on_device("longscan::cell::bias", bias);
  const auto packed = [&](auto layout) {
    using L = decltype(layout);
    std::vector<T> to(static_cast<std::size_t>(g) * L::columns * L::threads, T(0));
    for (int q = 0; q < g; ++q)
      for (int unit = 0; unit < D; ++unit)
        for (int e = 0; e < D; ++e) {
          const int thread = unit * L::parts_of_unit + e / L::columns;
          to[(static_cast<std::size_t>(q) * L::columns + e % L::columns) * L::threads + thread] =
              W[(static_cast<std::size_t>(q) * D + unit) * D + e];
        }
    return on_device("longscan::cell::weights", to);
  };
  in_registers_ = with_layouts<T, g>(D, [&](auto layouts) {
    together_ = packed(typename decltype(layouts)::Many());
    alone_ = packed(typename decltype(layouts)::Few());
  });
  if (folds()) {
    std::vector<T> padded(static_cast<std::size_t>(g) * fold_width * fold_width, T(0));
    for (int q = 0; q < g; ++q)
      for (int d = 0; d < D; ++d)
        for (int e = 0; e < D; ++e)
          padded[(static_cast<std::size_t>(q) * fold_width + e) * fold_width + d] =
              W[(static_cast<std::size_t>(q) * D + d) * D + e];
    by_input_ = on_device("longscan::cell::weights", padded);
    no_bias_ = on_device("longscan::cell::bias", std::vector<T>(static_cast<std::size_t>(g) * D, T(0)));
  }
  if (in_registers_) return;
  std::vector<T> by_input(W.size());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D; ++i)
    for (std::int64_t e = 0; e < D; ++e) by_input[e * g * D + i] = W[i * D + e];
  W_ = on_device("longscan::cell::weights", by_input);
  W_by_output_ = on_device("longscan::cell::weights", W);
  if constexpr (sizeof(T) == 4) {
    std::vector<float> split(static_cast<std::size_t>(g) * D * 3 * D);
    const auto rounded = [](float x) {
      return std::isfinite(x) ? bits_as<float>((bits_as<std::uint32_t>(x) + 0x1000u) & 0xffffe000u) : x;
    };
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D; ++i)
      for (int e = 0; e < D; ++e) {
        const float w = W[i * D + e], high = rounded(w), low = rounded(w - high);
        float* row = &split[i * 3 * D + e];
        row[0] = high, row[D] = high, row[2 * D] = low;
      }
    W_split_ = on_device("longscan::cell::weights", split);
  }
}

template <class Gates, class T>
std::int64_t DenseCellCuda<Gates, T>::side_by_side() const {
  std::int64_t segments = 0;
  with_layouts<T, Gates::gates>(D_, [&](auto layouts) {
    using L = typename decltype(layouts)::Many;
    segments = processors() * L::segments_of_block * L::blocks_of_processor;
  });
  if (segments > 0) return segments;
  // in step: as many rows as leave the fewest multiprocessors without a tile of the product, in cuBLAS's usual sizes
  const bool tf32 = sizeof(T) == 4 && batch_products() != BatchProducts::plain;
  const std::int64_t tall = tf32 ? 128 : 256, wide = tf32 ? 128 : 64;
  const std::int64_t across = (Gates::gates * D_ + tall - 1) / tall;
  double most = 0;
  for (std::int64_t rows = 256; rows <= 1024; rows += wide) {
    const std::int64_t tiles = across * rows / wide, waves = (tiles + processors() - 1) / processors();
    const double busy = static_cast<double>(tiles) / static_cast<double>(waves * processors());
    if (busy > most + 0.02) most = busy, segments = rows;
  }
  return segments;
}

#define LONGSCAN_INSTANTIATE(Gates, T)                                                                \
  template DenseCellCuda<Gates, T>::DenseCellCuda(int, const std::vector<T>&, const std::vector<T>&); \
  template std::int64_t DenseCellCuda<Gates, T>::side_by_side() const;
LONGSCAN_FOR_DENSE_CELLS(LONGSCAN_INSTANTIATE)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
