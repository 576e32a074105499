// SPDX-License-Identifier: Apache-2.0
#include "apps/generate_newton.hpp"

#include <algorithm>
#include <cmath>

#include "apps/generate_preset.hpp"
#include "apps/options.hpp"
#include "apps/output.hpp"
#include "apps/progress.hpp"
#include "core/dtype.hpp"
#include "core/random.hpp"

namespace longscan {
namespace {

bool is_diagonal(const SyntheticCell& cell) { return cell.type == "paragru" || cell.type == "paralstm"; }

}  // namespace

void check(const SyntheticCell& cell) {
  const std::vector<std::string> types = {"rnn_tanh", "rnn_relu", "gru", "lstm", "paragru", "paralstm"};
  if (std::find(types.begin(), types.end(), cell.type) == types.end()) throw_unknown("cell", cell.type, types);
  if (is_diagonal(cell) && (cell.layers > 1 || cell.bidirectional))
    throw Error(ExitCode::usage, "a " + cell.type + " has one layer and one direction");
}

std::vector<SyntheticTensor> synthetic_tensors(const SyntheticCell& cell) {
  std::vector<SyntheticTensor> tensors;
  const std::int64_t D = cell.hidden;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, double deviation) {
    tensors.push_back({name, std::move(shape), deviation, synthetic_x + 1 + tensors.size()});
  };
  const auto of_inputs = [](std::int64_t inputs) { return 1 / std::sqrt(static_cast<double>(inputs)); };
  constexpr double bias = 0.1;
  if (is_diagonal(cell)) {
    add("weight_ih", {3 * D, cell.inputs}, of_inputs(cell.inputs));
    add("bias", {3 * D}, bias);
    add("recurrent", {3, D}, cell.recurrent_scale);
    if (cell.type == "paralstm") add("peephole", {2, D}, cell.recurrent_scale);
    return tensors;
  }
  const std::int64_t rows = (cell.type == "gru" ? 3 : cell.type == "lstm" ? 4 : 1) * D;
  const int directions = cell.bidirectional ? 2 : 1;
  for (int layer = 0; layer < cell.layers; ++layer)
    for (int direction = 0; direction < directions; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
      const std::int64_t inputs = layer == 0 ? cell.inputs : directions * D;
      add("weight_ih" + suffix, {rows, inputs}, of_inputs(inputs));
      add("weight_hh" + suffix, {rows, D}, cell.recurrent_scale * of_inputs(D));
      add("bias_ih" + suffix, {rows}, bias);
      add("bias_hh" + suffix, {rows}, bias);
    }
  return tensors;
}

void fill_normal(std::uint64_t seed, std::uint64_t stream, double deviation, std::int64_t begin, std::int64_t count,
                 DType type, void* out) {
  for (std::int64_t i = 0; i < count; ++i)
    store(out, type, i, deviation * random_normal(seed, stream, static_cast<std::uint64_t>(begin + i)));
}

CellWeights synthetic_weights(const SyntheticCell& cell, std::uint64_t seed, DType type) {
  CellWeights weights;
  weights.type = cell.type;
  for (const SyntheticTensor& t : synthetic_tensors(cell)) {
    std::int64_t elements = 1;
    for (std::int64_t n : t.shape) elements *= n;
    std::vector<std::byte> raw(elements * size_of(type));
    fill_normal(seed, t.stream, t.deviation, 0, elements, type, raw.data());
    CellTensor& tensor = weights.tensors[t.name];
    tensor.shape = t.shape, tensor.values.resize(elements);
    for (std::int64_t i = 0; i < elements; ++i) tensor.values[i] = load<double>(raw.data(), type, i);
  }
  return weights;
}

void run_generate_newton(Transport& ranks, const GenerateNewton& g) {
  const SyntheticCell cell{g.cell, g.hidden, g.inputs, g.layers, g.bidirectional, g.recurrent_scale};
  check(cell);
  const Preset preset = preset_of(g.preset);
  std::vector<SyntheticTensor> tensors = {{"/x", {g.tokens, g.inputs}, 1, synthetic_x}};
  for (SyntheticTensor& t : synthetic_tensors(cell)) {
    t.name = "/cell/" + t.name;
    tensors.push_back(std::move(t));
  }
  std::vector<OutputDataset> datasets;
  for (const SyntheticTensor& t : tensors) datasets.push_back({t.name, t.shape, g.type});
  const std::vector<std::int64_t> offsets = add_offsets(preset, g.seed, g.tokens, g.shortest, datasets);
  SharedOutput out(ranks, g.output, "", g.force, datasets,
                   {{"longscan_version", std::string(LONGSCAN_VERSION)},
                    {"seed", static_cast<std::int64_t>(g.seed)},
                    {"preset", g.preset},
                    {"/cell/type", g.cell}});
  Progress progress(ranks.rank() == 0 && !g.quiet, "longscan generate", g.tokens);
  std::vector<std::byte> buffer;
  agree(ranks, [&] {
    write_offsets(ranks, out, offsets);
    for (const SyntheticTensor& t : tensors) {  // each rank writes a part of the rows, piece by piece
      const std::int64_t width = t.shape.size() > 1 ? t.shape[1] : 1;
      const TokenRange part = part_of(t.shape[0], ranks.size(), ranks.rank());
      const std::int64_t each = std::max<std::int64_t>(1, (std::int64_t{4} << 20) / width);
      for (std::int64_t row = part.begin; row < part.end; row += each) {
        const std::int64_t n = std::min(each, part.end - row);
        buffer.resize(n * width * size_of(g.type));
        if (t.stream == synthetic_x)
          fill_preset_features(preset, g.seed, t.stream, row, n, static_cast<int>(width), g.type, buffer.data());
        else
          fill_normal(g.seed, t.stream, t.deviation, row * width, n * width, g.type, buffer.data());
        Slab slab{{row}, {n}};
        if (t.shape.size() > 1) slab.begin.push_back(0), slab.count.push_back(width);
        out.write(t.name, slab, buffer.data());
        if (t.stream == synthetic_x) progress.at((row - part.begin + n) * ranks.size(), "writing");
      }
    }
  });
  out.commit();
  progress.done(g.output);
}

}  // namespace longscan
