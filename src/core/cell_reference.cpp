// SPDX-License-Identifier: Apache-2.0
#include "core/cell_reference.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "longscan/error.hpp"

namespace longscan::reference {
namespace {

double sigma(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }

void apply(const std::function<double(double)>& change, std::vector<double>& state) {
  if (change)
    for (double& value : state) value = change(value);
}

/// A tensor's values, or zeros where it is missing.
std::vector<double> values_of(const CellWeights& weights, const std::string& name, std::int64_t size) {
  const auto it = weights.tensors.find(name);
  return it == weights.tensors.end() ? std::vector<double>(size, 0.0) : it->second.values;
}

}  // namespace

std::vector<double> CellLayer::transposed(const CellTensor& weight) {
  const std::int64_t rows = weight.shape[0], columns = weight.shape[1];
  std::vector<double> t(weight.values.size());
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) t[j * rows + i] = weight.values[i * columns + j];
  return t;
}

void CellLayer::multiply(const std::vector<double>& transposed, const double* x, int columns,
                         std::vector<double>& sums) {
  const std::size_t rows = sums.size();
  for (int j = 0; j < columns; ++j)
    for (std::size_t i = 0; i < rows; ++i) sums[i] += transposed[j * rows + i] * x[j];
}

CellLayer::CellLayer(const CellWeights& weights, const NetworkShape& shape, int layer, int direction) : shape_(shape) {
  const std::int64_t D = shape.channels;
  if (shape.type == "paragru" || shape.type == "paralstm") {
    inputs_ = shape.inputs;
    input_weights_ = transposed(weights.tensors.at("weight_ih"));
    input_bias_ = values_of(weights, "bias", 3 * D);
    recurrent_ = values_of(weights, "recurrent", 3 * D);
    peephole_ = values_of(weights, "peephole", 2 * D);
    return;
  }
  const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
  const CellTensor& recurrent = weights.tensors.at("weight_hh" + suffix);
  inputs_ = layer == 0 ? shape.inputs : shape.directions * shape.channels;
  input_weights_ = transposed(weights.tensors.at("weight_ih" + suffix));
  recurrent_weights_ = transposed(recurrent);
  input_bias_ = values_of(weights, "bias_ih" + suffix, recurrent.shape[0]);
  recurrent_bias_ = values_of(weights, "bias_hh" + suffix, recurrent.shape[0]);
}

void CellLayer::step(const double* x, double* state) {
  const int D = shape_.channels;
  double* h = state;
  double* c = shape_.state > 1 ? state + D : nullptr;
  from_x_ = input_bias_;
  multiply(input_weights_, x, inputs_, from_x_);
  from_h_ = recurrent_bias_;
  if (!recurrent_weights_.empty()) multiply(recurrent_weights_, h, D, from_h_);

  for (int d = 0; d < D; ++d) {
    const auto given = [&](int gate) { return from_x_[gate * D + d]; };
    const auto both = [&](int gate) { return from_x_[gate * D + d] + from_h_[gate * D + d]; };
    const auto a = [&](int gate) { return recurrent_[gate * D + d]; };
    if (shape_.type == "rnn_tanh") {
      h[d] = std::tanh(both(0));
    } else if (shape_.type == "rnn_relu") {
      h[d] = std::max(0.0, both(0));
    } else if (shape_.type == "gru") {
      const double r = sigma(both(0)), z = sigma(both(1)), n = std::tanh(given(2) + r * from_h_[2 * D + d]);
      h[d] = (1 - z) * n + z * h[d];
    } else if (shape_.type == "lstm") {
      c[d] = sigma(both(1)) * c[d] + sigma(both(0)) * std::tanh(both(2));
      h[d] = sigma(both(3)) * std::tanh(c[d]);
    } else if (shape_.type == "paragru") {
      const double z = sigma(a(0) * h[d] + given(0)), r = sigma(a(1) * h[d] + given(1));
      h[d] = (1 - z) * h[d] + z * std::tanh(a(2) * (h[d] * r) + given(2));
    } else {  // paralstm
      const double f = sigma(a(0) * h[d] + peephole_[d] * c[d] + given(0)), g = std::tanh(a(1) * h[d] + given(1));
      c[d] = f * c[d] + (1 - f) * g;
      h[d] = sigma(a(2) * h[d] + peephole_[D + d] * c[d] + given(2)) * std::tanh(c[d]);
    }
  }
}

CellStack::CellStack(const CellWeights& weights, const NetworkShape& shape) {
  if (shape.directions > 1)
    throw Error(ExitCode::bad_input, "a network of two directions cannot be run token by token, all layers at once");
  for (int layer = 0; layer < shape.layers; ++layer) {
    layers_.emplace_back(weights, shape, layer, 0);
    states_.emplace_back(layers_.back().state_size(), 0.0);
  }
}

void CellStack::step(const double* x, const std::function<double(double)>& change) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    layers_[layer].step(x, states_[layer].data());
    apply(change, states_[layer]);
    x = states_[layer].data();  // h comes first
  }
}

NetworkStates network(const CellWeights& weights, const NetworkShape& shape, const double* x, std::int64_t tokens,
                      const double* h0, const double* c0, const std::function<double(double)>& change) {
  const std::int64_t D = shape.channels, dirs = shape.directions;
  NetworkStates out;
  std::vector<double> input(x, x + tokens * shape.inputs);
  for (int layer = 0; layer < shape.layers; ++layer) {
    out.h.assign(tokens * dirs * D, 0.0), out.c.assign(shape.state > 1 ? tokens * dirs * D : 0, 0.0);
    for (int direction = 0; direction < dirs; ++direction) {
      CellLayer cell(weights, shape, layer, direction);
      const std::int64_t index = layer * dirs + direction;
      std::vector<double> state(cell.state_size(), 0.0);
      if (h0) std::copy_n(h0 + index * D, D, state.begin());
      if (c0 && shape.state > 1) std::copy_n(c0 + index * D, D, state.begin() + D);
      for (std::int64_t i = 0; i < tokens; ++i) {
        const std::int64_t t = direction == 1 ? tokens - 1 - i : i;
        cell.step(&input[t * cell.inputs()], state.data());
        apply(change, state);
        std::copy_n(state.begin(), D, &out.h[(t * dirs + direction) * D]);
        if (shape.state > 1) std::copy_n(state.begin() + D, D, &out.c[(t * dirs + direction) * D]);
      }
      out.h_final.insert(out.h_final.end(), state.begin(), state.begin() + D);
      if (shape.state > 1) out.c_final.insert(out.c_final.end(), state.begin() + D, state.end());
    }
    input = out.h;
  }
  return out;
}

}  // namespace longscan::reference
