// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who waits for whom in the scan over ranks.
#include <nlohmann/json.hpp>
#include <vector>

#include "longscan/delta_rule.hpp"
#include "longscan/transport.hpp"

namespace longscan {

/// When one rank was how far with a window: seconds from when the first rank started it.
struct TraceRow {
  double begins = 0, scan_begins = 0, state_is_here = 0, outputs_done = 0;
  std::int64_t heads_at_once = 0;  ///< whose state it passed on without waiting
};
using Trace = std::vector<TraceRow>;  ///< of all ranks

/// Collective. The traces of windows, from each rank's reports of them; as many on every rank. Clocks of different
/// nodes are compared at a barrier, so that they may differ by what that takes.
std::vector<Trace> gather_traces(Transport& ranks, const std::vector<DeltaReport>& reports);
/// Seconds from the last rank's being ready for the scan to every rank's having its state.
double exchange_seconds(const Trace& trace);
nlohmann::json trace_json(const Trace& trace);

}  // namespace longscan
