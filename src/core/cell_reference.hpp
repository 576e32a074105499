// SPDX-License-Identifier: Apache-2.0
#pragma once
// The recurrent cells token by token in double precision, with the standard library's functions: slow, obviously right,
// independent of cells.hpp and of everything that solves. Tests and `longscan verify` compare with these.
#include <cstdint>
#include <functional>
#include <vector>

#include "longscan/newton.hpp"

namespace longscan::reference {

/// One layer in one direction. A state is [state][D]: h, and c after it where the cell has one.
class CellLayer {
 public:
  CellLayer(const CellWeights& weights, const NetworkShape& shape, int layer, int direction);

  int inputs() const { return inputs_; }
  std::int64_t state_size() const { return static_cast<std::int64_t>(shape_.state) * shape_.channels; }
  /// The next state, in place; x has `inputs()` features.
  void step(const double* x, double* state);

 private:
  /// sums += W x
  static void multiply(const std::vector<double>& transposed, const double* x, int columns, std::vector<double>& sums);
  /// Weights as [columns][rows], so that sums over rows run along memory.
  static std::vector<double> transposed(const CellTensor& weight);

  NetworkShape shape_;
  int inputs_;
  std::vector<double> input_weights_, input_bias_, recurrent_weights_, recurrent_bias_;
  std::vector<double> recurrent_, peephole_;  ///< of paragru and paralstm
  std::vector<double> from_x_, from_h_;       ///< W_ih x + b_ih, W_hh h + b_hh
};

/// All layers of a network that runs forwards alone, token by token: what it needs does not grow with the tokens.
class CellStack {
 public:
  /// States start at zero. Throws Error(bad_input) for a network of two directions.
  CellStack(const CellWeights& weights, const NetworkShape& shape);
  /// The state of a layer, [state][D], to read or to set.
  double* state(int layer) { return states_[layer].data(); }
  void step(const double* x, const std::function<double(double)>& change = {});

 private:
  std::vector<CellLayer> layers_;
  std::vector<std::vector<double>> states_;
};

/// What a network makes of one sequence.
struct NetworkStates {
  std::vector<double> h, c;              ///< of the last layer, [T][directions][D]; c is empty for cells without one
  std::vector<double> h_final, c_final;  ///< [layers * directions][D]
};

/// A whole network over one sequence, x [tokens][D_in]. h0, c0 [layers * directions][D]; nullptr is zero. `change`, if
/// given, is applied to every state after its step: what rounding does to the result is seen that way.
NetworkStates network(const CellWeights& weights, const NetworkShape& shape, const double* x, std::int64_t tokens,
                      const double* h0, const double* c0, const std::function<double(double)>& change = {});

}  // namespace longscan::reference
