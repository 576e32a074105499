// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs as they were read: is every value one that can be solved?
#include <cstdint>

#include "core/dtype.hpp"

namespace longscan {

enum class Domain : int {
  finite,      ///< no NaN, no infinity
  nonpositive  ///< <= 0; -infinity is allowed, NaN is not
};

/// The first element of x [tokens, heads, width], in the order of memory of one token after another, that is outside
/// `domain`: (token * heads + head) * width + i, or -1. x in memory of the default execution space; heads are stored
/// ones. Launches "longscan::check::domain" and waits for it: the answer is needed.
std::int64_t first_outside(const TokenArray& x, std::int64_t tokens, int heads, int width, Domain domain);
/// The same for the host's memory, on the thread that calls it: beside kernels if need be.
std::int64_t first_outside_on_host(const TokenArray& x, std::int64_t tokens, int heads, int width, Domain domain);

}  // namespace longscan
