// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>

namespace longscan {

/// Bytes of host memory that each of so many processes of this node may still take: its share of what the machine has
/// free and its control group allows, and no more than its own address-space limit leaves.
std::int64_t available_memory(int processes = 1);
/// What this process holds now: before a solve, what the program and its libraries take by themselves.
std::int64_t resident_memory();
/// The most this process has held at once.
std::int64_t peak_memory();
/// Throws Error(resources) unless this process may take so many bytes more; `what` takes them.
void require_memory(double bytes, const std::string& what);
/// Bytes of the states of all heads, and as many of their maps, in double precision: the least that a solve takes.
double state_bytes(int heads, int d_key, int d_value);
/// "3.2 GiB"
std::string bytes_text(double bytes);

}  // namespace longscan
