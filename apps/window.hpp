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
  bool overlaps = true;         ///< the solve is not worse for being cut, so that files are read and written beside it
  std::function<std::int64_t(std::int64_t)> work;  ///< further bytes for a window of so many tokens
  /// With more windows than one the next is read, and the one before is written, while one is solved: they take twice
  /// the memory on the host.
  std::int64_t host(std::int64_t tokens) const;
  std::int64_t device(std::int64_t tokens) const;
};

/// Collective. Tokens a rank at a time: `wanted` if that is > 0; else about a sixteenth of all, if that is long enough
/// to be worth it, and no more than free memory allows. Throws Error(resources) with the number needed if it does not
/// fit, not even `least` tokens.
std::int64_t choose_window(Transport& ranks, std::int64_t wanted, const WindowNeeds& needs);

}  // namespace longscan
