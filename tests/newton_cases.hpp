// SPDX-License-Identifier: Apache-2.0
// Random networks and sequences for the tests of nonlinear recurrences.
#pragma once
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "core/random.hpp"
#include "longscan/newton.hpp"

namespace longscan::test {

inline const std::vector<std::string> all_cells = {"rnn_tanh", "rnn_relu", "gru", "lstm", "paragru", "paralstm"};

inline std::vector<double> normals(std::int64_t count, std::uint64_t seed, std::uint64_t stream, double deviation = 1) {
  std::vector<double> v(count);
  for (std::int64_t i = 0; i < count; ++i)  // values that float32 holds too
    v[i] = static_cast<float>(deviation * random_normal(seed, stream, static_cast<std::uint64_t>(i)));
  return v;
}

struct RandomCell {
  std::string_view type;  ///< a literal, or one of all_cells
  std::int64_t D = 5, inputs = 3;
  double scale = 1;
  int layers = 1, directions = 1;
  std::uint64_t seed = 1;
  bool long_memory = false;  ///< of paragru and paralstm: gates nearly shut
};

inline CellWeights make_weights(const RandomCell& c) {
  CellWeights weights;
  weights.type = std::string(c.type);
  std::uint64_t stream = 100;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, double deviation) {
    std::int64_t size = 1;
    for (std::int64_t n : shape) size *= n;
    weights.tensors[name] = {shape, normals(size, c.seed, ++stream, deviation)};
  };
  if (c.type == "paragru" || c.type == "paralstm") {
    add("weight_ih", {3 * c.D, c.inputs}, 1 / std::sqrt(c.inputs));
    add("bias", {3 * c.D}, 0.1);
    add("recurrent", {3, c.D}, c.scale);
    if (c.long_memory)  // z of paragru near 0, f of paralstm near 1
      for (std::int64_t d = 0; d < c.D; ++d) weights.tensors["bias"].values[d] += c.type == "paragru" ? -6 : 4;
    if (c.type == "paralstm") add("peephole", {2, c.D}, c.scale);
    return weights;
  }
  const std::int64_t rows = (c.type == "gru" ? 3 : c.type == "lstm" ? 4 : 1) * c.D;
  for (int layer = 0; layer < c.layers; ++layer)
    for (int direction = 0; direction < c.directions; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
      const std::int64_t in = layer == 0 ? c.inputs : c.directions * c.D;
      // a relu network only forgets if its weights are small
      const double scale = c.type == "rnn_relu" ? 0.6 * c.scale : c.scale;
      add("weight_ih" + suffix, {rows, in}, 1 / std::sqrt(in));
      add("weight_hh" + suffix, {rows, c.D}, scale / std::sqrt(c.D));
      add("bias_ih" + suffix, {rows}, 0.1);
      add("bias_hh" + suffix, {rows}, 0.1);
    }
  return weights;
}

}  // namespace longscan::test
