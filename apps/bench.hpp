// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <functional>
#include <nlohmann/json.hpp>

namespace longscan {

/// Seconds of repeated runs.
struct Timing {
  double median = 0, least = 0, most = 0;
  int runs = 0;
  nlohmann::json json() const;  ///< median_ms, min_ms, max_ms, runs
};

/// Runs `f` once to warm up, then `runs` times. On a device the time is that between two events around it.
Timing time_runs(int runs, const std::function<void()>& f);

/// Bytes a second that a copy inside the memory of the default execution space reads and writes, median of several.
double copy_rate();

struct BenchNewton;
class Transport;
/// `bench newton --projected`, for one number of tokens and one scale: its rows.
nlohmann::json run_bench_recurrence(Transport& ranks, const BenchNewton& bench);

}  // namespace longscan
