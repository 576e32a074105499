// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "longscan/newton.hpp"

namespace longscan {

/// A synthetic network: sizes, and the size of its recurrent weights.
struct SyntheticCell {
  std::string type = "gru";
  int hidden = 64, inputs = 64, layers = 1;
  bool bidirectional = false;
  double recurrent_scale = 1;
};

/// Throws Error(usage): an unknown type (naming the nearest), layers of a cell that has one.
void check(const SyntheticCell& cell);

/// Normal numbers with mean 0: weight_ih has variance 1 / (its inputs), weight_hh scale^2 / D, recurrent and peephole
/// scale^2, biases 0.1^2. Each tensor has a stream of random numbers of its own.
struct SyntheticTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  double deviation = 1;
  std::uint64_t stream = 0;
};
std::vector<SyntheticTensor> synthetic_tensors(const SyntheticCell& cell);

/// Elements [begin, begin + count) of a stream, times `deviation`.
void fill_normal(std::uint64_t seed, std::uint64_t stream, double deviation, std::int64_t begin, std::int64_t count,
                 DType type, void* out);
/// The stream of x.
inline constexpr std::uint64_t synthetic_x = 64;

/// The same weights in memory, rounded to `type`.
CellWeights synthetic_weights(const SyntheticCell& cell, std::uint64_t seed, DType type);

}  // namespace longscan
