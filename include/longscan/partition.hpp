// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <vector>

namespace longscan {

/// Tokens [begin, end) of an axis.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
};

/// The part of rank `rank` when `tokens` tokens are cut over `ranks` ranks as evenly as multiples of
/// `multiple` tokens allow. Parts are contiguous, in the order of the ranks, and cover the tokens; some
/// may be empty. Pure; needs no communication.
TokenRange part_of(std::int64_t tokens, int ranks, int rank, std::int64_t multiple = 1);

/// The tokens of one sequence that one rank holds: [begin, end) counted from the rank's first token.
struct Run {
  std::int64_t sequence = 0;  ///< which sequence
  std::int64_t begin = 0;     ///< first token, in the rank's part
  std::int64_t end = 0;       ///< one past the last
  std::int64_t position = 0;  ///< of the first token in its sequence
  std::int64_t length = 0;    ///< tokens of the whole sequence
  bool starts = false;        ///< the sequence starts here; else the state comes from elsewhere
  bool ends = false;          ///< the sequence ends here; else the state goes elsewhere
  std::int64_t size() const { return end - begin; }
};

/// The sequences whose tokens are laid end to end on one axis: sequence i is [offsets[i], offsets[i+1]).
/// Sequences may be empty. `offsets` starts with 0 and does not fall.
struct Sequences {
  std::vector<std::int64_t> offsets{0};
  std::int64_t count() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t tokens() const { return offsets.back(); }
};

/// What of the sequences lies in `part`, in order. An empty sequence appears once, as an empty run that starts and
/// ends, in the part that holds its position; the part with `last` true also takes those at the end of the axis.
std::vector<Run> runs_of(const Sequences& sequences, TokenRange part, bool last);

}  // namespace longscan
