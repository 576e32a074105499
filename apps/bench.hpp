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

/// Runs `f` once to warm up, then `runs` times.
Timing time_runs(int runs, const std::function<void()>& f);

}  // namespace longscan
