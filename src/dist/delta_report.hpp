// SPDX-License-Identifier: Apache-2.0
#pragma once
// What all ranks found in a solve of the delta rule.
#include <cstdint>

#include "longscan/delta_rule.hpp"
#include "longscan/transport.hpp"

namespace longscan {

/// Counts become those of all ranks; times stay this rank's. Collective.
void add_over_ranks(Transport& ranks, DeltaReport& report);

/// The first bad token of all ranks, `token` (of the axis; -1 is none) and `head` being this rank's: throws NonFinite
/// on every rank. Collective.
void agree_on_bad_token(Transport& ranks, std::int64_t token, int head, const char* arithmetic);

}  // namespace longscan
