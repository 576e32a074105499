// SPDX-License-Identifier: Apache-2.0
#include "longscan/partition.hpp"

#include <algorithm>

namespace longscan {

TokenRange part_of(std::int64_t tokens, int ranks, int rank, std::int64_t multiple) {
  // Units of `multiple` tokens, the last one perhaps shorter; the first (units mod ranks) parts get one more.
  const std::int64_t units = (tokens + multiple - 1) / multiple;
  const std::int64_t each = units / ranks, more = units % ranks;
  const auto first = [&](std::int64_t r) { return (r * each + std::min(r, more)) * multiple; };
  return {std::min(first(rank), tokens), std::min(first(rank + 1), tokens)};
}

std::vector<Run> runs_of(const Sequences& sequences, TokenRange part, bool last) {
  const auto& at = sequences.offsets;
  std::vector<Run> runs;
  if (sequences.count() == 0) return runs;
  // The first sequence that ends after the part's first token, or is empty at it.
  auto i = std::lower_bound(at.begin() + 1, at.end(), part.begin) - at.begin() - 1;
  for (; i < sequences.count(); ++i) {
    const std::int64_t begin = at[i], end = at[i + 1];
    if (begin > part.end || (begin == part.end && !last)) break;
    if (begin == end) {  // empty: at its position, once
      if (begin >= part.begin && (begin < part.end || last)) {
        const std::int64_t here = begin - part.begin;
        runs.push_back({i, here, here, 0, 0, true, true});
      }
      continue;
    }
    const std::int64_t from = std::max(begin, part.begin), to = std::min(end, part.end);
    if (from >= to) continue;
    runs.push_back({i, from - part.begin, to - part.begin, from - begin, end - begin, from == begin, to == end});
  }
  return runs;
}

}  // namespace longscan
