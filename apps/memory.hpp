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
/// Throws Error(resources) unless this process may take so many bytes more; `what` takes them.
void require_memory(double bytes, const std::string& what);
/// Bytes of the states of all heads, and as many of their maps, in double precision: the least that a solve takes.
double state_bytes(int heads, int d_key, int d_value);
/// "3.2 GiB"
std::string bytes_text(double bytes);

}  // namespace longscan
