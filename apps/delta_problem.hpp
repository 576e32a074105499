// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an input file holds for the delta rule: which datasets play which role, what their axes mean, whether they fit.
#include <map>
#include <string>
#include <vector>

#include "apps/options.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {

/// The datasets of one group, solved as a stretch of the axis of tokens.
struct DeltaSource {
  std::string group;                        ///< "/" or "/demo_0"
  std::map<std::string, DatasetInfo> data;  ///< role -> dataset
  std::int64_t batch = 1;                   ///< entries of the batch axis
  std::int64_t tokens = 0;                  ///< of each entry
  std::vector<std::int64_t> offsets;        ///< its sequences, on its own axis of batch * tokens tokens
  std::int64_t axis_tokens() const { return batch * tokens; }
  std::int64_t sequences() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
};

/// Groups that are solved together: alike but for their lengths, their tokens end to end on one axis.
struct DeltaProblem {
  Layout layout = Layout::thd;
  bool packed = false;  ///< cu_seqlens are there
  DeltaShape shape;
  Variant variant = Variant::delta;
  std::map<std::string, int> heads;  ///< stored heads of q, k, a, b, …
  std::vector<DeltaSource> sources;

  DType widest() const;
  DType type(const std::string& role) const { return sources.front().data.at(role).type; }
  bool has(const std::string& role) const { return sources.front().data.count(role) > 0; }
  Sequences sequences() const;
  /// The stretches that states are counted in: each sequence, or each source where sequences are packed.
  Sequences counting() const;
  std::int64_t tokens() const;
};

/// Axes of an array by layout; -1 is absent.
struct Axes {
  int batch, token, head, width;
};
Axes axes_of(Layout layout);

/// Where a token of a problem's axis lies in the file.
struct TokenPlace {
  std::size_t source = 0;
  std::int64_t batch = 0, token = 0;  ///< as an index into the datasets
};
TokenPlace place_of(const DeltaProblem& problem, std::int64_t token);
/// "'/demo_0/v' of IN.h5 at token 37, head 1" for messages; role may be empty.
std::string describe_place(const DeltaProblem& problem, const std::string& file, const std::string& role,
                           std::int64_t token, int head);

/// Everything the file holds that `command` asks to solve. Throws bad_input with all that is wrong.
std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command);

std::string to_text(const std::vector<DeltaProblem>& problems);
std::vector<DeltaProblem> problems_from_text(const std::string& text);

/// "[64, 2, 8]"
std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace longscan
