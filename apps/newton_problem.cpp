// SPDX-License-Identifier: Apache-2.0
#include "apps/newton_problem.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace longscan {
namespace {

std::string last_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

/// Axes and shape of h0 or c0: [D], [L, D], [B, D] or [L, B, D].
void fit_state(NewtonProblem& problem, const Source& source, const std::string& role, const NetworkShape& network,
               Problems& problems) {
  const DatasetInfo& info = source.data.at(role);
  const std::int64_t L = network.layers * network.directions, B = source.sequences(), D = network.channels;
  const auto& s = info.shape;
  const bool by_layer = s.size() == 2 && B == 1 && s[0] == L && s[1] == D;
  const bool by_sequence = s.size() == 2 && L == 1 && s[0] == B && s[1] == D;
  const bool plain = s.size() == 1 && L == 1 && B == 1 && s[0] == D;
  const bool both = s.size() == 3 && s[0] == L && s[1] == B && s[2] == D;
  problem.layers_first[role] = by_layer && !(by_sequence && problem.many());
  if (plain || by_layer || by_sequence || both) return;
  problems.push_back("dataset '" + info.path + "' has shape " + shape_text(s) + "; expected " + shape_text({L, B, D}) +
                     " (layers * directions, sequences, D)" + (L == 1 ? " or " + shape_text({B, D}) : "") +
                     (B == 1 && L > 1 ? " or " + shape_text({L, D}) : "") +
                     (L == 1 && B == 1 ? " or " + shape_text({D}) : ""));
}

/// "weight_ih_l0 has shape [96, 16]"
std::string input_weights(const NetworkShape& network) {
  const bool mixes = network.type != "paragru" && network.type != "paralstm";
  const std::int64_t gates = network.type == "lstm" ? 4 : network.type.starts_with("rnn") ? 1 : 3;
  return std::string(mixes ? "weight_ih_l0" : "weight_ih") + " has shape " +
         shape_text({gates * network.channels, network.inputs});
}

NewtonProblem one_problem(const InputFile& file, const NewtonCommand& command, const std::string& group,
                          const NetworkShape& network, Problems& problems) {
  NewtonProblem problem;
  problem.sources.emplace_back();
  Source& source = problem.sources.front();
  source.group = group;
  DatasetFinder find(file, command.names, group, problems);
  const std::size_t before = problems.size();
  find.take("x", true, source);
  for (const char* role : {"h0", "c0", "cu_seqlens"}) find.take(role, false, source);
  if (network.type != "lstm" && network.type != "paralstm") source.data.erase("c0");
  if (problems.size() != before) return problem;

  const DatasetInfo& x = source.data.at("x");
  const auto fail = [&](const std::string& text) { problems.push_back("dataset '" + x.path + "' " + text); };
  if (x.shape.size() != 2 && x.shape.size() != 3) {
    fail("has shape " + shape_text(x.shape) + "; [tokens, features] or [batch, tokens, features] are needed");
    return problem;
  }
  problem.batched = x.shape.size() == 3;
  if (command.layout != "auto" && (command.layout == "BTD") != problem.batched) {
    fail("has " + std::to_string(x.shape.size()) + " axes, which --layout " + command.layout + " does not");
    return problem;
  }
  source.batch = problem.batched ? x.shape[0] : 1;
  source.tokens = x.shape[problem.batched ? 1 : 0];
  problem.inputs = static_cast<int>(x.shape.back());
  if (problem.inputs != network.inputs)
    fail("has shape " + shape_text(x.shape) + ", that is " + std::to_string(problem.inputs) + " features; the cell's " +
         input_weights(network) + ", which takes " + std::to_string(network.inputs));
  problem.packed = source.data.count("cu_seqlens") > 0;
  set_offsets(file, source, problems);
  for (const char* role : {"h0", "c0"})
    if (source.data.count(role) && problems.size() == before) fit_state(problem, source, role, network, problems);
  return problem;
}

std::string signature(const NewtonProblem& p) {
  std::string text = std::to_string(p.batched) + std::to_string(p.packed) + " " + std::string(name_of(p.type()));
  for (const auto& [role, info] : p.sources.front().data) text += " " + role;
  for (const auto& [role, first] : p.layers_first) text += " " + role + std::to_string(first);
  return text;
}

}  // namespace

std::pair<std::string, std::string> split_cell(const std::string& cell) {
  std::string path = cell, group = "/cell";
  const auto colon = cell.rfind(':');
  if (!cell.empty() && !std::filesystem::exists(cell) && colon != std::string::npos)
    path = cell.substr(0, colon), group = cell.substr(colon + 1);
  if (!group.empty() && group[0] != '/') group = "/" + group;
  return {path, group};
}

CellSource read_cell(const InputFile& input, const std::string& cell) {
  auto [path, group] = split_cell(cell);
  const bool says_group = path != cell;
  std::optional<InputFile> other;
  if (!path.empty() && path != input.path()) other.emplace(path);
  const InputFile& file = other ? *other : input;
  const auto groups = file.groups();
  if (std::find(groups.begin(), groups.end(), group) == groups.end()) {
    // a file that holds a state_dict at its root is a cell as it stands
    if (!path.empty() && !says_group && !file.datasets("/").empty()) {
      group = "/";
    } else {
      std::string text = file.path() + " has no group '" + group + "' with a cell (--cell FILE:/group)";
      std::vector<std::string> filled;
      for (const std::string& other : groups)
        if (other != "/" && !file.datasets(other).empty()) filled.push_back(other);
      const std::string near = nearest(group, filled);
      if (!near.empty() && near != group) text += "; did you mean '" + near + "'?";
      if (input.find("/v") && !input.find("/x")) text += "; q, k, v are input for longscan delta";
      throw Error(ExitCode::bad_input, text);
    }
  }
  CellSource source;
  source.where = "group '" + group + "' of " + file.path();
  source.weights.type = file.text_attribute(group, "type").value_or("");
  source.datasets = file.datasets(group);
  Problems problems;
  int bits = 0;
  for (const DatasetInfo& info : source.datasets) {
    if (!info.usable()) {
      problems.push_back(info.problem);
      continue;
    }
    source.weights.tensors[last_name(info.path)] = {info.shape, file.read_doubles(info)};
    if (significand_bits(info.type) > bits) bits = significand_bits(info.type), source.widest = info.type;
  }
  throw_problems(file.path(), problems);
  return source;
}

Precision newton_arithmetic(Precision wanted, DType x, DType weights) {
  const DType widest = significand_bits(x) > significand_bits(weights) ? x : weights;
  return arithmetic_of(wanted, widest) == Precision::f64 ? Precision::f64 : Precision::f32;
}

std::vector<NewtonProblem> find_newton_problems(const InputFile& file, const NewtonCommand& command,
                                                const NetworkShape& network, Problems& problems) {
  const auto solvable = [&](const std::string& group) {
    return DatasetFinder(file, command.names, group, problems).there("x");
  };
  std::vector<NewtonProblem> found;
  std::map<std::string, std::size_t> by_signature;
  for (const std::string& group : select_groups(file, command.solve.groups, solvable, "the dataset x", problems)) {
    const std::size_t before = problems.size();
    NewtonProblem problem = one_problem(file, command, group, network, problems);
    if (problems.size() != before) continue;
    const auto [it, added] = by_signature.emplace(signature(problem), found.size());
    if (added)
      found.push_back(std::move(problem));
    else
      found[it->second].sources.push_back(std::move(problem.sources.front()));
  }
  return found;
}

std::vector<NewtonProblem> find_newton_problems(const InputFile& file, const NewtonCommand& command,
                                                const NetworkShape& network) {
  Problems problems;
  auto found = find_newton_problems(file, command, network, problems);
  throw_problems(file.path(), problems);
  return found;
}

Slab state_slab(const std::vector<std::int64_t>& shape, bool layers_first, std::int64_t sequence) {
  Slab slab{std::vector<std::int64_t>(shape.size(), 0), shape};
  if (shape.size() == 3) slab.begin[1] = sequence, slab.count[1] = 1;
  if (shape.size() == 2 && !layers_first) slab.begin[0] = sequence, slab.count[0] = 1;
  return slab;
}

// --- as text, for the other ranks
// -------------------------------------------------------------------------------------

static void to_json(nlohmann::json& j, const NewtonProblem& p) {
  j = {{"batched", p.batched},
       {"packed", p.packed},
       {"inputs", p.inputs},
       {"sources", p.sources},
       {"layers", p.layers_first}};
}
static void from_json(const nlohmann::json& j, NewtonProblem& p) {
  p.batched = j.at("batched"), p.packed = j.at("packed"), p.inputs = j.at("inputs");
  p.sources = j.at("sources").get<std::vector<Source>>();
  p.layers_first = j.at("layers").get<std::map<std::string, bool>>();
}

std::string to_text(const std::vector<NewtonProblem>& problems) {
  const auto bytes = nlohmann::json::to_cbor(problems);  // names need not be UTF-8
  return {bytes.begin(), bytes.end()};
}
std::vector<NewtonProblem> newton_problems_from_text(const std::string& text) {
  return nlohmann::json::from_cbor(text).get<std::vector<NewtonProblem>>();
}

NetworkShape shape_of(const CellSource& cell) {
  try {
    return network_shape(cell.weights, -1);
  } catch (const Error& e) {
    throw Error(e.code(), cell.where + ": " + e.what());
  }
}

// The bytes of a description, it, and the numbers of all tensors as they stand: weights are many, and every bit counts.

std::string to_text(const CellSource& cell) {
  nlohmann::json j = {{"type", cell.weights.type}, {"widest", static_cast<int>(cell.widest)}, {"where", cell.where}};
  for (const auto& [name, tensor] : cell.weights.tensors)
    j["tensors"].push_back({name, tensor.shape, tensor.values.size()});
  const auto description = nlohmann::json::to_cbor(j);
  const std::uint64_t bytes = description.size();
  std::string text(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  text.append(description.begin(), description.end());
  for (const auto& [name, tensor] : cell.weights.tensors)
    text.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * sizeof(double));
  return text;
}
CellSource cell_from_text(const std::string& text) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, text.data(), sizeof bytes);
  const char* next = text.data() + sizeof bytes;
  const auto j = nlohmann::json::from_cbor(next, next + bytes);
  next += bytes;
  CellSource cell;
  cell.weights.type = j.at("type"), cell.widest = static_cast<DType>(j.at("widest").get<int>());
  cell.where = j.at("where");
  if (!j.contains("tensors")) return cell;
  for (const auto& tensor : j.at("tensors")) {
    CellTensor& to = cell.weights.tensors[tensor.at(0)];
    to.shape = tensor.at(1).get<std::vector<std::int64_t>>();
    to.values.resize(tensor.at(2).get<std::size_t>());
    if (!to.values.empty()) std::memcpy(to.values.data(), next, to.values.size() * sizeof(double));
    next += to.values.size() * sizeof(double);
  }
  return cell;
}

}  // namespace longscan
