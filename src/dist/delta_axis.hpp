// SPDX-License-Identifier: Apache-2.0
#pragma once
// The token axis of a solve of the delta rule: where parts and windows may end, and how recorded states are counted.
// Pure; every rank knows all of it.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "dist/segment_plan.hpp"
#include "dist/token_cuts.hpp"

namespace longscan {

/// Where a run stands in the counting of `state_every`.
struct StatesPlace {
  std::int64_t position = 0;  ///< of the run's first token
  std::int64_t offset = 0;    ///< entry of `states` for count 0
};

class DeltaAxis {
 public:
  /// `counting`: the stretches of the axis in which every `state_every` tokens a state is recorded; 0 is never.
  DeltaAxis(Sequences sequences, Sequences counting, bool reproducible, std::int64_t state_every, int ranks, int rank)
      : cuts_(std::move(sequences), ranks, rank, [this](std::int64_t token) { return cut_before(token); }),
        counting_(std::move(counting)),
        reproducible_(reproducible),
        every_(state_every) {
    for (std::int64_t i = 0; i < counting_.count(); ++i)
      recorded_.push_back(recorded_.back() +
                          (every_ == 0 ? 0 : (counting_.offsets[i + 1] - counting_.offsets[i]) / every_));
  }
  DeltaAxis(const DeltaAxis&) = delete;
  DeltaAxis& operator=(const DeltaAxis&) = delete;

  const TokenCuts& cuts() const { return cuts_; }

  /// Where a part or window may end: anywhere, or with `reproducible` where a segment of a sequence ends.
  std::int64_t cut_before(std::int64_t token) const {
    if (!reproducible_) return token;
    const auto& at = cuts_.sequences().offsets;
    const auto next = std::upper_bound(at.begin(), at.end(), token);
    if (next == at.end()) return token;
    const std::int64_t begin = *(next - 1), segment = segment_tokens(*next - begin);
    return begin + (token - begin) / segment * segment;
  }

  /// States that are recorded before a token.
  std::int64_t states_before(std::int64_t token) const {
    if (every_ == 0) return 0;
    const std::int64_t i = counted_in(token);
    return recorded_[i] + (token - counting_.offsets[i]) / every_;
  }

  /// Of a run whose first token is `token`, in a part that starts with token `part_begin`.
  StatesPlace place_of(std::int64_t token, std::int64_t part_begin) const {
    const std::int64_t start = counting_.offsets[counted_in(token)];
    return {token - start, states_before(start) - states_before(part_begin) - 1};
  }

 private:
  /// The stretch that holds a token; the last one at the end of the axis.
  std::int64_t counted_in(std::int64_t token) const {
    const auto& at = counting_.offsets;
    const auto next = std::upper_bound(at.begin(), at.end(), token) - at.begin() - 1;
    return std::clamp<std::int64_t>(next, 0, std::max<std::int64_t>(0, counting_.count() - 1));
  }

  TokenCuts cuts_;
  Sequences counting_;
  bool reproducible_;
  std::int64_t every_;
  std::vector<std::int64_t> recorded_{0};  // before each stretch
};

}  // namespace longscan
