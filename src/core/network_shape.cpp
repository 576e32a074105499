// SPDX-License-Identifier: Apache-2.0
// What a state_dict is, and whether its tensors fit each other.
#include <algorithm>
#include <cmath>

#include "longscan/error.hpp"
#include "longscan/newton.hpp"

namespace longscan {
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

class Reader {
 public:
  explicit Reader(const CellWeights& weights) : weights_(weights) {}

  bool there(const std::string& name) const { return weights_.tensors.count(name) > 0; }

  const CellTensor& need(const std::string& name) const {
    const auto it = weights_.tensors.find(name);
    if (it != weights_.tensors.end()) return it->second;
    std::string text = "the cell has no tensor '" + name + "'; there are:";
    for (const auto& [other, tensor] : weights_.tensors) text += " " + other;
    if (weights_.tensors.empty()) text += " none";
    throw Error(ExitCode::bad_input, text);
  }

  /// A tensor of this shape; -1 takes any extent. `because`: what the extents follow from.
  const CellTensor& fit(const std::string& name, const std::vector<std::int64_t>& shape,
                        const std::string& because) const {
    const CellTensor& t = need(name);
    bool good = t.shape.size() == shape.size();
    for (std::size_t i = 0; good && i < shape.size(); ++i) good = shape[i] < 0 || t.shape[i] == shape[i];
    if (!good) {
      std::string wanted = shape_text(shape);
      for (std::size_t at; (at = wanted.find("-1")) != std::string::npos;) wanted.replace(at, 2, "any");
      throw Error(ExitCode::bad_input, "the cell's tensor '" + name + "' has shape " + shape_text(t.shape) +
                                           "; expected " + wanted + ", because " + because);
    }
    return t;
  }
  void fit_bias(const std::string& name, std::int64_t size, const std::string& because) const {
    if (there(name)) fit(name, {size}, because);
  }

  void all_finite() const {
    for (const auto& [name, tensor] : weights_.tensors)
      for (std::size_t i = 0; i < tensor.values.size(); ++i) {
        if (std::isfinite(tensor.values[i])) continue;
        std::string index = "[";
        std::size_t rest = tensor.values.size(), at = i;
        for (std::size_t a = 0; a < tensor.shape.size(); ++a) {
          rest /= static_cast<std::size_t>(std::max<std::int64_t>(1, tensor.shape[a]));
          index += (a ? ", " : "") + std::to_string(at / rest);
          at %= rest;
        }
        throw Error(ExitCode::bad_input, "the cell's tensor '" + name + "' is " +
                                             (std::isnan(tensor.values[i]) ? "NaN" : "infinite") + " at " + index +
                                             "]");
      }
  }

 private:
  const CellWeights& weights_;
};

int gates_of(const std::string& type) { return type == "gru" ? 3 : type == "lstm" ? 4 : 1; }

/// The type from the shapes: torch stacks 1, 3 or 4 gates of D rows over D columns.
std::string guess_type(const Reader& read, std::string& reason) {
  if (read.there("recurrent")) {
    reason = read.there("peephole") ? "it has a peephole" : "it has 'recurrent' and no peephole";
    return read.there("peephole") ? "paralstm" : "paragru";
  }
  const CellTensor& w = read.need("weight_hh_l0");
  if (w.shape.size() == 2 && w.shape[1] > 0)
    for (const char* type : {"rnn_tanh", "gru", "lstm"})
      if (w.shape[0] == gates_of(type) * w.shape[1]) {
        reason = "weight_hh_l0 has shape " + shape_text(w.shape);
        return type;
      }
  throw Error(ExitCode::bad_input, "the cell has no attribute 'type', and its weight_hh_l0 of shape " +
                                       shape_text(w.shape) +
                                       " is that of no known cell ([D, D], [3 D, D] or [4 D, D])");
}

}  // namespace

std::string_view name_of(NewtonMethod method) {
  constexpr std::string_view names[] = {"auto", "shooting", "newton", "quasi", "elk", "picard", "jacobi", "sequential"};
  return names[static_cast<int>(method)];
}

std::string_view name_of(NewtonStatus status) {
  constexpr std::string_view names[] = {"converged", "exact_by_prefix", "fell_back", "not_converged", "non_finite"};
  return names[static_cast<int>(status)];
}

NetworkShape network_shape(const CellWeights& weights, int inputs) {
  const Reader read(weights);
  NetworkShape shape;
  shape.type = weights.type.empty() ? guess_type(read, shape.reason) : weights.type;
  const std::string x = inputs >= 0 ? "x has " + std::to_string(inputs) + " features" : "of the inputs";
  if (shape.type == "paragru" || shape.type == "paralstm") {
    const CellTensor& a = read.fit("recurrent", {3, -1}, "a row of each gate is needed");
    const std::int64_t D = a.shape[1];
    const std::string because = "recurrent has shape " + shape_text(a.shape) + " and " + x;
    const CellTensor& w = read.fit("weight_ih", {3 * D, inputs}, because);
    read.fit_bias("bias", 3 * D, because);
    if (shape.type == "paralstm") read.fit("peephole", {2, D}, because);
    shape.channels = static_cast<int>(D), shape.inputs = static_cast<int>(w.shape[1]);
    shape.state = shape.type == "paralstm" ? 2 : 1;
  } else if (shape.type == "rnn_tanh" || shape.type == "rnn_relu" || shape.type == "gru" || shape.type == "lstm") {
    const int gates = gates_of(shape.type);
    const CellTensor& hh = read.fit("weight_hh_l0", {-1, -1}, "of its " + std::to_string(gates) + " gates");
    const std::int64_t D = hh.shape[1];
    read.fit("weight_hh_l0", {gates * D, D},
             shape.type + " stacks " + std::to_string(gates) + " gates of D = " + std::to_string(D) + " rows");
    shape.channels = static_cast<int>(D), shape.state = shape.type == "lstm" ? 2 : 1;
    while (read.there("weight_hh_l" + std::to_string(shape.layers))) ++shape.layers;
    shape.directions = read.there("weight_hh_l0_reverse") ? 2 : 1;
    shape.inputs = static_cast<int>(
        read.fit("weight_ih_l0", {gates * D, inputs}, "weight_hh_l0 has shape " + shape_text(hh.shape) + " and " + x)
            .shape[1]);
    for (int layer = 0; layer < shape.layers; ++layer)
      for (int direction = 0; direction < shape.directions; ++direction) {
        const std::string suffix = "_l" + std::to_string(layer) + (direction ? "_reverse" : "");
        const std::int64_t in = layer == 0 ? shape.inputs : shape.directions * D;
        const std::string because = "weight_hh_l0 has shape " + shape_text(hh.shape) + " and the layer's input has " +
                                    std::to_string(in) + " features";
        read.fit("weight_hh" + suffix, {gates * D, D}, because);
        read.fit("weight_ih" + suffix, {gates * D, in}, because);
        read.fit_bias("bias_ih" + suffix, gates * D, because);
        read.fit_bias("bias_hh" + suffix, gates * D, because);
      }
  } else {
    throw Error(ExitCode::bad_input,
                "the cell's type is '" + shape.type + "'; known are rnn_tanh, rnn_relu, gru, lstm, paragru, paralstm");
  }
  if (shape.channels < 1 || shape.inputs < 1)
    throw Error(ExitCode::bad_input, "the cell has no channels or no inputs (D = " + std::to_string(shape.channels) +
                                         ", D_in = " + std::to_string(shape.inputs) + ")");
  read.all_finite();
  return shape;
}

}  // namespace longscan
