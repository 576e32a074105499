// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "longscan/transport.hpp"

namespace longscan {

/// What a solve needs of memory, for the choice of its window. All are of one rank.
struct WindowNeeds {
  std::int64_t all = 0;         ///< tokens there are
  std::int64_t least = 1024;    ///< tokens that a window must have
  std::int64_t in_and_out = 0;  ///< bytes a token that are read and written
  bool overlaps = true;         ///< the solve bears to be cut, so that files are read and written beside it
  std::int64_t cut_tokens = 0;  ///< > 0: on a host it loses next to nothing by a cut every so many tokens
  std::int64_t horizon = 0;     ///< > 0: tokens that a rank may have to look back over in every window, on a host
  bool whole = false;           ///< it cannot be cut: a wanted window is set aside
  std::function<std::int64_t(std::int64_t)> work;  ///< further bytes for a part of so many tokens
  /// Tokens of a rank's parts, in windows of so many tokens a rank: at most, and of two windows one after the other.
  struct Parts {
    std::int64_t longest = 0, two = 0;
  };
  std::function<Parts(std::int64_t)> parts_of;  ///< absent: as even as can be
  Parts parts(std::int64_t tokens) const;
  /// With more windows than one the next is read, and the one before is written, while one is solved: they take twice
  /// the memory on the host.
  std::int64_t host(std::int64_t tokens) const;
  std::int64_t device(std::int64_t tokens) const;
};

/// Bytes that a rank may use.
struct WindowRoom {
  std::int64_t host = 0, device = 0;
};
/// Of what is free here now, for one of so many ranks of this node.
WindowRoom room_here(int ranks_of_node);

struct WindowChoice {
  std::int64_t tokens = 1;  ///< of a rank at a time
  bool fits = true;
};
/// `wanted` tokens if that is > 0; else about a sixteenth of all, if that is long enough to be worth it or for four
/// horizons, or what a cache holds if any cut will do; no more than there is room for, but at least `least`.
WindowChoice window_in(const WindowRoom& room, std::int64_t wanted, const WindowNeeds& needs);

/// Collective. The same for the room that there is on every rank. Throws Error(resources) with the number needed if it
/// does not fit.
std::int64_t choose_window(Transport& ranks, std::int64_t wanted, const WindowNeeds& needs);

}  // namespace longscan
