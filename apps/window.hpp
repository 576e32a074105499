// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <functional>

#include "longscan/transport.hpp"

namespace longscan {

/// Collective. Tokens a rank at a time: `wanted` if that is > 0, else as many of `all` as free memory allows. `needed`:
/// bytes for so many tokens. Throws Error(resources) with the number needed if it does not fit, not even `least`
/// tokens.
std::int64_t choose_window(Transport& ranks, std::int64_t wanted, std::int64_t all, std::int64_t least,
                           const std::function<std::int64_t(std::int64_t)>& needed);

}  // namespace longscan
