// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an input file holds for the delta rule: which datasets play which role, what their axes mean, whether they fit.
#include <map>
#include <string>
#include <vector>

#include "apps/sources.hpp"

namespace longscan {

/// Groups that are solved together: alike but for their lengths, their tokens end to end on one axis.
struct DeltaProblem {
  Layout layout = Layout::thd;
  bool packed = false;  ///< cu_seqlens are there
  DeltaShape shape;
  Variant variant = Variant::delta;
  std::map<std::string, int> heads;  ///< stored heads of q, k, a, b, …
  std::vector<Source> sources;

  DType widest() const;
  DType type(const std::string& role) const { return sources.front().data.at(role).type; }
  bool has(const std::string& role) const { return sources.front().data.count(role) > 0; }
  Sequences sequences() const { return sequences_of(sources); }
  /// The stretches that states are counted in: each sequence, or each source where sequences are packed.
  Sequences counting() const;
  std::int64_t tokens() const;
};

/// Axes of an array by layout; -1 is absent.
struct Axes {
  int batch, token, head, width;
};
Axes axes_of(Layout layout);

/// Everything the file holds that `command` asks to solve. Throws bad_input with all that is wrong.
std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command);
/// The same, but adds what is wrong to `problems`; returns the groups that nothing is wrong with.
std::vector<DeltaProblem> find_problems(const InputFile& file, const DeltaCommand& command, Problems& problems);

std::string to_text(const std::vector<DeltaProblem>& problems);
std::vector<DeltaProblem> problems_from_text(const std::string& text);

}  // namespace longscan
