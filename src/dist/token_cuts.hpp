// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the tokens of an axis are cut into windows, and windows into one part a rank. Pure; every rank knows every part.
#include <algorithm>
#include <functional>
#include <vector>

#include "longscan/partition.hpp"

namespace longscan {

class TokenCuts {
 public:
  /// `cut_before(token)`: the nearest place at or before a token where a part or window may end.
  TokenCuts(Sequences sequences, int ranks, int rank, std::function<std::int64_t(std::int64_t)> cut_before)
      : sequences_(std::move(sequences)), ranks_(ranks), rank_(rank), cut_before_(std::move(cut_before)) {}

  const Sequences& sequences() const { return sequences_; }
  std::int64_t tokens() const { return sequences_.tokens(); }

  /// Windows of at most about `each` tokens, in order, of the tokens from `begin` on.
  std::vector<TokenRange> windows(std::int64_t each, std::int64_t begin = 0) const {
    const std::int64_t total = tokens();
    each = std::max<std::int64_t>(1, each);
    std::vector<TokenRange> windows;
    do {
      std::int64_t end = each >= total - begin ? total : cut_before_(begin + each);
      for (std::int64_t more = each; end <= begin && end < total; more *= 2) {  // at least to the first place to cut
        end = cut_before_(std::min(begin + more, total - 1));
        if (end <= begin && more >= total - begin) end = total;
      }
      windows.push_back({begin, end});
      begin = end;
    } while (begin < total);
    return windows;
  }

  /// The parts of a window that are not empty, for ranks 0, 1, … in turn: as even as the cuts allow. At least one.
  std::vector<TokenRange> parts(TokenRange window) const {
    std::vector<TokenRange> parts;
    std::int64_t begin = window.begin;
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::int64_t even = window.begin + part_of(window.size(), ranks_, rank).end;
      const std::int64_t end = even == window.end ? even : cut_before_(even);
      if (end <= begin) continue;
      parts.push_back({begin, end});
      begin = end;
    }
    if (parts.empty()) parts.push_back(window);  // no tokens: rank 0 holds what sequences there are
    return parts;
  }
  TokenRange part(TokenRange window) const {
    const auto all = parts(window);
    return rank_ < static_cast<int>(all.size()) ? all[rank_] : TokenRange{window.end, window.end};
  }
  /// The last rank that holds tokens of the window.
  int last_holder(TokenRange window) const { return static_cast<int>(parts(window).size()) - 1; }
  std::vector<Run> runs(TokenRange window) const {
    const int last = last_holder(window);
    if (rank_ > last) return {};
    return runs_of(sequences_, part(window), rank_ == last && window.end == tokens());
  }

 private:
  Sequences sequences_;
  int ranks_, rank_;
  std::function<std::int64_t(std::int64_t)> cut_before_;
};

}  // namespace longscan
