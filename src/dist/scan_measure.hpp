// SPDX-License-Identifier: Apache-2.0
#pragma once
// What measuring the costs of a scan takes, for those who count memory.
#include <cstdint>

namespace longscan {

/// Bytes of the large message that goes from every rank to the next; a rank holds two.
constexpr std::int64_t measured_message_bytes = std::int64_t{1} << 20;
/// Whether costs are measured at all: on fewer ranks, or for an algorithm that was asked for, nothing depends on them.
constexpr bool measures_scan(bool automatic, int ranks) { return automatic && ranks > 2; }

}  // namespace longscan
