// SPDX-License-Identifier: Apache-2.0
#include "apps/trace.hpp"

#include <algorithm>
#include <chrono>

namespace longscan {

std::vector<Trace> gather_traces(Transport& ranks, const std::vector<DeltaReport>& reports) {
  double now = 0;  // what this rank's clock is ahead of the others'
  if (ranks.local_size() < ranks.size()) {
    ranks.barrier();
    now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  std::vector<TraceRow> mine, all(reports.size() * static_cast<std::size_t>(ranks.size()));
  for (const DeltaReport& r : reports) {
    const double begins = r.started - now;
    mine.push_back({begins, begins + r.at_scan, begins + r.at_states, begins + r.at_outputs, r.known_heads});
  }
  ranks.all_gather(mine.data(), static_cast<std::int64_t>(mine.size() * sizeof(TraceRow)), all.data());
  std::vector<Trace> traces(reports.size());
  for (std::size_t i = 0; i < all.size(); ++i) traces[i % reports.size()].push_back(all[i]);
  for (Trace& trace : traces) {
    double first = trace.front().begins;
    for (const TraceRow& row : trace) first = std::min(first, row.begins);
    for (TraceRow& row : trace)
      for (double* at : {&row.begins, &row.scan_begins, &row.state_is_here, &row.outputs_done}) *at -= first;
  }
  return traces;
}

double exchange_seconds(const Trace& trace) {
  double ready = 0, there = 0;
  for (const TraceRow& row : trace)
    ready = std::max(ready, row.scan_begins), there = std::max(there, row.state_is_here);
  return there - ready;
}

nlohmann::json trace_json(const Trace& trace) {
  nlohmann::json rows = nlohmann::json::array();
  for (std::size_t i = 0; i < trace.size(); ++i)
    rows.push_back({{"rank", i},
                    {"begins", trace[i].begins},
                    {"scan_begins", trace[i].scan_begins},
                    {"state_is_here", trace[i].state_is_here},
                    {"outputs_done", trace[i].outputs_done},
                    {"heads_passed_on_at_once", trace[i].heads_at_once}});
  return rows;
}

}  // namespace longscan
