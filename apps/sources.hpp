// SPDX-License-Identifier: Apache-2.0
#pragma once
// Groups of an input file as stretches of one axis of tokens: what the solvers' inputs have in common.
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/options.hpp"
#include "longscan/partition.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

/// The datasets of one group, solved as a stretch of the axis of tokens.
struct Source {
  std::string group;                        ///< "/" or "/demo_0"
  std::map<std::string, DatasetInfo> data;  ///< role -> dataset
  std::int64_t batch = 1;                   ///< entries of the batch axis
  std::int64_t tokens = 0;                  ///< of each entry
  std::vector<std::int64_t> offsets;        ///< its sequences, on its own axis of batch * tokens tokens
  std::int64_t axis_tokens() const { return batch * tokens; }
  std::int64_t sequences() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
};

/// Everything wrong that was found, for one message.
using Problems = std::vector<std::string>;
/// Throws bad_input if there is any, naming up to eight.
void throw_problems(const std::string& file, const Problems& problems);

/// "/v" or "/demo_0/v"
std::string dataset_path(const std::string& group, const std::string& name);

/// Finds datasets of a group by their role; `names`: role -> name where the user gave one.
class DatasetFinder {
 public:
  DatasetFinder(const InputFile& file, const std::map<std::string, std::string>& names, const std::string& group,
                Problems& problems);
  std::string name(const std::string& role) const;
  bool there(const std::string& role) const;
  /// Adds the dataset to `source`, or says what is wrong with it. cu_seqlens holds integers, all others floats.
  void take(const std::string& role, bool required, Source& source);

 private:
  const InputFile& file_;
  const std::map<std::string, std::string>& given_;
  std::string group_;
  Problems& problems_;
  std::vector<std::string> there_;
};

/// The groups that `patterns` name (the root if there are none); `solvable` decides whether a group that a shell
/// pattern matches counts.
std::vector<std::string> select_groups(const InputFile& file, const std::vector<std::string>& patterns,
                                       const std::function<bool(const std::string&)>& solvable,
                                       const std::string& needed, Problems& problems);

/// Fills in the offsets of the sequences, from cu_seqlens or one a batch entry.
void set_offsets(const InputFile& file, Source& source, Problems& problems);

Sequences sequences_of(const std::vector<Source>& sources);

/// Where a token of the axis lies in the file, and which source a sequence is of.
struct TokenPlace {
  std::size_t source = 0;
  std::int64_t batch = 0, token = 0;  ///< as an index into the datasets
};
TokenPlace place_of(const std::vector<Source>& sources, std::int64_t token);
std::pair<std::size_t, std::int64_t> source_of_sequence(const std::vector<Source>& sources, std::int64_t sequence);
/// "dataset '/demo_0/v' of IN.h5 at token 37"; with the batch entry and packed sequence where there are such.
std::string describe_token(const std::vector<Source>& sources, const std::string& file, const std::string& role,
                           std::int64_t token);

/// f(source, batch, first token in the file, first token in the part, tokens) for each contiguous piece of a part.
template <class F>
void for_pieces(const std::vector<Source>& sources, TokenRange part, const F& f) {
  std::int64_t base = 0;
  for (const Source& source : sources)
    for (std::int64_t b = 0; b < source.batch; ++b, base += source.tokens) {
      const std::int64_t begin = std::max(part.begin, base), end = std::min(part.end, base + source.tokens);
      if (begin < end) f(source, b, begin - base, begin - part.begin, end - begin);
    }
}

/// Those of all problems, in order.
template <class Problem>
std::vector<const Source*> sources_of(const std::vector<Problem>& problems) {
  std::vector<const Source*> all;
  for (const Problem& problem : problems)
    for (const Source& source : problem.sources) all.push_back(&source);
  return all;
}

/// 16 hexadecimal digits that change when an input changes.
std::string fingerprint_text(const InputFile& file, const std::vector<const Source*>& sources,
                             const std::vector<DatasetInfo>& others = {});

/// Of all files that the sources are read from, the input itself first.
std::vector<FileStamp> stamps_of(const InputFile& file, const std::vector<const Source*>& sources);

/// "[64, 2, 8]"
std::string shape_text(const std::vector<std::int64_t>& shape);

/// For the other ranks.
void to_json(nlohmann::json& j, const DatasetInfo& d);
void from_json(const nlohmann::json& j, DatasetInfo& d);
void to_json(nlohmann::json& j, const Source& s);
void from_json(const nlohmann::json& j, Source& s);

}  // namespace longscan
