// SPDX-License-Identifier: Apache-2.0
#include "apps/window.hpp"

#include <algorithm>
#include <string>

#include "apps/memory.hpp"
#include "apps/staging.hpp"
#include "longscan/error.hpp"

namespace longscan {

namespace {

constexpr bool has_device = !kernels_reach_host;
constexpr std::int64_t windows_to_overlap = 16, least_overlapping_tokens = 32768, least_overlapping_bytes = 64 << 20;

}  // namespace

std::int64_t WindowNeeds::host(std::int64_t tokens) const {
  return (tokens < all ? 2 : 1) * tokens * in_and_out + (has_device ? 0 : work(tokens));
}

std::int64_t WindowNeeds::device(std::int64_t tokens) const {
  return has_device ? tokens * in_and_out + work(tokens) : 0;
}

std::int64_t choose_window(Transport& ranks, std::int64_t wanted, const WindowNeeds& needs) {
  // every rank of a node takes the same share of what is free now
  std::int64_t free[] = {available_memory() / ranks.local_size(),
                         has_device ? free_device_memory() / ranks.local_size() : 0};
  ranks.all_reduce(free, 2, Transport::Reduction::min);
  const std::int64_t host = free[0] / 10 * 9, device = free[1] / 10 * 9;
  const auto fits = [&](std::int64_t n) { return needs.host(n) <= host && needs.device(n) <= device; };
  const auto too_much = [&](std::int64_t tokens, const std::string& what) {
    const bool on_host = needs.host(tokens) > host;
    return Error(ExitCode::resources,
                 what + std::to_string(tokens) + " tokens a rank needs " +
                     bytes_text(static_cast<double>(on_host ? needs.host(tokens) : needs.device(tokens))) +
                     (on_host ? " of memory a rank, but " : " of device memory a rank, but ") +
                     bytes_text(static_cast<double>(on_host ? host : device)) +
                     " are free; use more nodes or a smaller --window");
  };
  const std::int64_t all = std::max<std::int64_t>(1, needs.all), least = std::min(needs.least, all);
  if (wanted > 0) {
    const std::int64_t tokens = std::min(wanted, all);
    if (!fits(tokens)) throw too_much(tokens, "a window of ");
    return tokens;
  }
  std::int64_t tokens = all;
  if (needs.overlaps)
    tokens = std::min(all, std::max({(all + windows_to_overlap - 1) / windows_to_overlap, least_overlapping_tokens,
                                     least_overlapping_bytes / std::max<std::int64_t>(1, needs.in_and_out)}));
  tokens = std::max(tokens, least);
  while (!fits(tokens)) {
    if (tokens <= least) throw too_much(tokens, "even a window of ");
    tokens = std::max(least, (tokens + 1) / 2);
  }
  return tokens;
}

}  // namespace longscan
