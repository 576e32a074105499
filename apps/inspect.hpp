// SPDX-License-Identifier: Apache-2.0
#pragma once
// What `longscan inspect` looks at and finds out. Nothing here solves for an output.
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/delta_problem.hpp"
#include "apps/newton_problem.hpp"
#include "core/reference.hpp"

namespace longscan {

struct InspectCommand {
  DeltaCommand delta;    ///< names, layout and rules, as `longscan delta` would take them
  NewtonCommand newton;  ///< the same for `longscan newton`
  bool json = false;
  bool all = false;             ///< look at every token
  std::int64_t influence = -1;  ///< write the operator of this chunk
  std::int64_t token = -1;      ///< of the chunk: whose influences are listed; -1: its last
  int head = 0;
  std::string output;  ///< of --influence
  bool force = false;

  const std::string& input() const { return delta.solve.input; }
};

/// Least, greatest and mean of values that are spread over ranks.
struct Range {
  double least = 1e300, most = -1e300, sum = 0;
  std::int64_t count = 0;
  void add(double x) { least = x < least ? x : least, most = x > most ? x : most, sum += x, ++count; }
  void reduce(Transport& ranks);
};
void to_json(nlohmann::json& j, const Range& r);  ///< {min, mean, max}, or null

/// Tokens of one batch entry as doubles, every role and head; host memory.
struct DeltaStretch {
  DeltaStretch(const InputFile& file, const DeltaProblem& problem, const DeltaCommand& command, const Source& source,
               std::int64_t batch, std::int64_t token, std::int64_t tokens);
  const std::vector<double>& values(const std::string& role) const { return memory.at(role); }

  reference::DeltaProblem problem;
  std::map<std::string, std::vector<double>> memory;
};

/// Collective. Adds a problem if a state that sequences start from is not finite; all are read, shared by the ranks.
/// `slab_of`: where the state of a sequence of its source lies.
void check_states(Transport& ranks, const InputFile& file, const std::vector<Source>& sources, const std::string& role,
                  const std::function<Slab(const DatasetInfo&, std::int64_t sequence)>& slab_of, Problems& problems);

/// Collective. How hard a delta problem is, from a bounded sample of its tokens or from all. Values that cannot be
/// solved are added to `problems`, on every rank the same.
nlohmann::json delta_difficulty(Transport& ranks, const InputFile& file, const InspectCommand& command,
                                const DeltaProblem& problem, double share, Problems& problems);
/// Collective. The same for a network: solved on the sample (or all), and the verdict kept.
nlohmann::json newton_difficulty(Transport& ranks, const InputFile& file, const InspectCommand& command,
                                 const NewtonProblem& problem, const CellSource& cell, double share,
                                 Problems& problems);

/// On one rank. The operator of a chunk into a file of its own; returns what is printed about it.
nlohmann::json write_influence(const InputFile& file, const InspectCommand& command,
                               const std::vector<DeltaProblem>& problems);

/// The tokens that are looked at, as ranges of the problem's axis: `tokens_at_most` of them in stretches of `length`
/// spread evenly from the first token to the last, or all in pieces of `length`.
std::vector<TokenRange> sample_stretches(std::int64_t tokens, std::int64_t length, std::int64_t tokens_at_most);

}  // namespace longscan
