// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>

namespace longscan {

/// Bytes of host memory this process may still take: the least of what the machine has free, its control group
/// allows, and its address-space limit leaves. Divide by the ranks of the node.
std::int64_t available_memory();
/// The most this process has held at once.
std::int64_t peak_memory();
/// "3.2 GiB"
std::string bytes_text(double bytes);

}  // namespace longscan
