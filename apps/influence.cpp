// SPDX-License-Identifier: Apache-2.0
// `longscan inspect --influence CHUNK`: what the tokens of one chunk do to each other.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/inspect.hpp"
#include "apps/output.hpp"
#include "core/chunk_operator.hpp"

namespace longscan {
namespace {

constexpr double paths_bytes = 256 << 20;

/// A chunk by its number: chunks of each sequence in turn, as the solver cuts them.
struct Place {
  const Source* source = nullptr;
  std::int64_t batch = 0, token = 0;  ///< of its first token, in the datasets
  int tokens = 0;
  std::int64_t sequence = 0, position = 0;  ///< of its first token in the sequence
};

Place find_chunk(const DeltaProblem& problem, int C, std::int64_t chunk) {
  std::int64_t left = chunk, all = 0;
  for (const Source& source : problem.sources)
    for (std::int64_t i = 0; i < source.sequences(); ++i) {
      const std::int64_t begin = source.offsets[i], length = source.offsets[i + 1] - begin,
                         chunks = (length + C - 1) / C;
      all += chunks;
      if (left < chunks) {
        const std::int64_t at = begin + left * C, each = std::max<std::int64_t>(1, source.tokens);
        return {&source, at / each, at % each, static_cast<int>(std::min<std::int64_t>(C, length - left * C)),
                i,       left * C};
      }
      left -= chunks;
    }
  throw Error(ExitCode::usage, "--influence " + std::to_string(chunk) + ": there are " + std::to_string(all) +
                                   " chunks of " + std::to_string(C) + " tokens, counted from 0");
}

double frobenius(const std::vector<double>& X) {
  return std::sqrt(std::inner_product(X.begin(), X.end(), X.begin(), 0.0));
}

/// Earlier tokens of row t by the size of their entries, largest first.
std::vector<int> ranked(const std::vector<double>& M, int C, int t) {
  std::vector<int> order(t);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return std::abs(M[static_cast<std::size_t>(t) * C + a]) > std::abs(M[static_cast<std::size_t>(t) * C + b]);
  });
  return order;
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

nlohmann::json write_influence(const InputFile& file, const InspectCommand& command,
                               const std::vector<DeltaProblem>& problems) {
  if (problems.empty()) throw Error(ExitCode::bad_input, "--influence: " + file.path() + " has no delta rule to solve");
  const DeltaProblem& problem = problems.front();
  const Place place = find_chunk(problem, command.delta.chunk, command.influence);
  const int C = place.tokens, H = problem.shape.heads;
  if (command.head < 0 || command.head >= H)
    throw Error(ExitCode::usage,
                "--head " + std::to_string(command.head) + ": there are " + std::to_string(H) + " heads");
  const std::int64_t token = command.token < 0 ? place.token + C - 1 : command.token;
  if (token < place.token || token >= place.token + C)
    throw Error(ExitCode::usage, "--token " + std::to_string(token) + " is not in chunk " +
                                     std::to_string(command.influence) + ", tokens " + std::to_string(place.token) +
                                     " to " + std::to_string(place.token + C - 1));
  const DeltaStretch stretch(file, problem, command.delta, *place.source, place.batch, place.token, C);

  const int longest =
      static_cast<int>(std::clamp(paths_bytes / (8.0 * H * C * C), 1.0, static_cast<double>(std::max(1, C - 1))));
  std::vector<double> A, T, M, left(static_cast<std::size_t>(H) * longest), norms(left.size());
  std::vector<std::vector<double>> paths(longest);  // of each length, all heads
  std::vector<std::int64_t> ranking;
  std::vector<double> weights;
  int used = 1;
  nlohmann::json listed = nlohmann::json::array();
  for (int h = 0; h < H; ++h) {
    const auto a = reference::chunk_matrix(stretch.problem, h, 0, C), t = reference::propagation(a, C);
    std::vector<double> power = a, sum(a.size(), 0.0), rest(a.size());
    for (int i = 0; i < C; ++i) sum[static_cast<std::size_t>(i) * C + i] = 1;
    const double size = std::max(frobenius(t), 1e-300);
    for (int l = 0; l < longest; ++l) {
      if (l > 0) power = reference::lower_product(power, a, C);
      append(paths[l], power);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += power[i], rest[i] = t[i] - sum[i];
      norms[static_cast<std::size_t>(h) * longest + l] = frobenius(power);
      left[static_cast<std::size_t>(h) * longest + l] = frobenius(rest) / size;
      if (frobenius(power) > 1e-12 * size) used = std::max(used, l + 1);
    }
    append(A, a), append(T, t);
    std::vector<double> m;
    if (problem.has("q")) append(M, m = reference::output_map(stretch.problem, h, 0, C));
    const std::vector<double>& by = m.empty() ? t : m;
    for (int i = 0; i < C; ++i) {
      const auto order = ranked(by, C, i);
      for (int s = 0; s < C; ++s) {
        const bool there = s < static_cast<int>(order.size());
        ranking.push_back(there ? place.token + order[s] : -1);
        weights.push_back(there ? by[static_cast<std::size_t>(i) * C + order[s]] : 0);
      }
    }
    if (h != command.head) continue;
    const auto row = static_cast<std::size_t>(token - place.token);
    for (int s : ranked(by, C, static_cast<int>(row))) {
      if (listed.size() == 8) break;
      nlohmann::json one = {{"token", place.token + s}, {"T", t[row * C + s]}};
      if (!m.empty()) one["output"] = m[row * C + s];
      listed.push_back(one);
    }
  }
  paths.resize(used);

  const std::int64_t c = C, heads = H;
  std::vector<OutputDataset> datasets = {{"/A", {heads, c, c}, DType::f64},
                                         {"/T", {heads, c, c}, DType::f64},
                                         {"/paths", {used, heads, c, c}, DType::f64},
                                         {"/path_norm", {heads, used}, DType::f64},
                                         {"/left_after", {heads, used}, DType::f64},
                                         {"/ranking", {heads, c, c}, DType::f64},
                                         {"/ranking_weight", {heads, c, c}, DType::f64}};
  for (OutputDataset& d : datasets)
    if (d.path == "/ranking") d.integers = true;
  if (!M.empty()) datasets.push_back({"/output_map", {heads, c, c}, DType::f64});
  const std::string group = place.source->group;
  const auto alone = make_single_transport();
  SharedOutput out(*alone, command.output, file.path(), command.force, datasets,
                   {{"longscan_version", std::string(LONGSCAN_VERSION)},
                    {"command", std::string("inspect --influence")},
                    {"input", file.path()},
                    {"group", group},
                    {"chunk", command.influence},
                    {"batch", place.batch},
                    {"sequence", place.sequence},
                    {"first_token", place.token},
                    {"ranked_by", std::string(M.empty() ? "T" : "output_map")}});
  const auto whole = [](const OutputDataset& d) { return Slab{std::vector<std::int64_t>(d.shape.size(), 0), d.shape}; };
  const auto shortened = [&](const std::vector<double>& all) {  // [H][longest] -> [H][used]
    std::vector<double> some;
    for (int h = 0; h < H; ++h)
      some.insert(some.end(), all.begin() + static_cast<std::ptrdiff_t>(h) * longest,
                  all.begin() + static_cast<std::ptrdiff_t>(h) * longest + used);
    return some;
  };
  std::vector<double> all_paths;
  for (const auto& p : paths) append(all_paths, p);
  norms = shortened(norms), left = shortened(left);
  const std::map<std::string, const void*> data = {{"/A", A.data()},
                                                   {"/T", T.data()},
                                                   {"/paths", all_paths.data()},
                                                   {"/path_norm", norms.data()},
                                                   {"/left_after", left.data()},
                                                   {"/ranking", ranking.data()},
                                                   {"/ranking_weight", weights.data()},
                                                   {"/output_map", M.data()}};
  for (const OutputDataset& d : datasets) out.write(d.path, whole(d), data.at(d.path));
  out.commit();

  nlohmann::json j = {{"file", command.output},
                      {"group", group},
                      {"chunk", command.influence},
                      {"batch", place.batch},
                      {"sequence", place.sequence},
                      {"first_token", place.token},
                      {"tokens", C},
                      {"head", command.head},
                      {"token", token},
                      {"ranked_by", M.empty() ? "T" : "output"},
                      {"most_influential", listed}};
  nlohmann::json& lengths = j["paths"] = nlohmann::json::array();
  for (int l = 0; l < used; ++l)
    lengths.push_back({{"length", l + 1},
                       {"norm", norms[static_cast<std::size_t>(command.head) * used + l]},
                       {"left_after", left[static_cast<std::size_t>(command.head) * used + l]}});
  return j;
}

}  // namespace longscan
