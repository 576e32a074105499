// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of bench_hopper: bench_checks.cu and bench_times.cu.
#include <string>
#include <vector>

namespace bench {

inline int failures = 0;
inline std::vector<std::string> only;  // names of the rows to time; none: all

void test_operands();
void check(bool small);
void check_channels(bool small);
void check_wide(bool small);
void check_least();
void check_least_wide();

void check_segments();
void time_all(bool check_long, bool brief);
void time_channels(bool check_long, bool brief);
void time_wide(bool check_long, bool brief);
#ifdef LONGSCAN_HOPPER_PROFILE
/// Cycles by role and place.
void profile_all();
#endif

}  // namespace bench
