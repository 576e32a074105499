// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_report.hpp"

#include <algorithm>
#include <limits>

#include "longscan/error.hpp"

namespace longscan {

DeltaReport& DeltaReport::operator+=(const DeltaReport& r) {
  stability_breaches += r.stability_breaches, inverse_fallbacks += r.inverse_fallbacks;
  inverse_terms_max = std::max(inverse_terms_max, r.inverse_terms_max);
  horizon_max = std::max(horizon_max, r.horizon_max);
  boundaries += r.boundaries, boundaries_forgotten += r.boundaries_forgotten;
  boundaries_corrected += r.boundaries_corrected, map_tokens += r.map_tokens;
  horizons_remembered += r.horizons_remembered;
  segments += r.segments, tensor_tasks += r.tensor_tasks, general_tasks += r.general_tasks;
  bytes_exchanged += r.bytes_exchanged;
  scan = r.scan, started = r.started, known_heads = r.known_heads, at_scan = r.at_scan, at_states = r.at_states,
  at_outputs = r.at_outputs;
  seconds_scan += r.seconds_scan, seconds_solve += r.seconds_solve;
  return *this;
}

void add_over_ranks(Transport& ranks, DeltaReport& r) {
  std::int64_t* const sums[] = {
      &r.stability_breaches,   &r.inverse_fallbacks, &r.boundaries,         &r.boundaries_forgotten,
      &r.boundaries_corrected, &r.map_tokens,        &r.segments,           &r.tensor_tasks,
      &r.general_tasks,        &r.bytes_exchanged,   &r.horizons_remembered};
  std::int64_t* const largest[] = {&r.inverse_terms_max, &r.horizon_max};
  const auto reduce = [&](std::int64_t* const* values, int n, Transport::Reduction how) {
    std::int64_t all[std::size(sums)];
    for (int i = 0; i < n; ++i) all[i] = *values[i];
    ranks.all_reduce(all, n, how);
    for (int i = 0; i < n; ++i) *values[i] = all[i];
  };
  reduce(sums, static_cast<int>(std::size(sums)), Transport::Reduction::sum);
  reduce(largest, static_cast<int>(std::size(largest)), Transport::Reduction::max);
}

void agree_on_bad_token(Transport& ranks, std::int64_t token, int head, const char* arithmetic) {
  constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
  const std::int64_t mine = token < 0 ? none : token;
  std::int64_t first = mine;
  ranks.all_reduce(&first, 1, Transport::Reduction::min);
  if (first == none) return;
  std::int64_t first_head = mine == first ? head : none;
  ranks.all_reduce(&first_head, 1, Transport::Reduction::min);
  throw NonFinite(first, static_cast<int>(first_head), arithmetic);
}

}  // namespace longscan
