// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <vector>

#include "apps/bench.hpp"

namespace longscan {

nlohmann::json Timing::json() const {
  return {{"median_ms", median * 1e3}, {"min_ms", least * 1e3}, {"max_ms", most * 1e3}, {"runs", runs}};
}

Timing time_runs(int runs, const std::function<void()>& f) {
  f();
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), runs};
}

}  // namespace longscan
