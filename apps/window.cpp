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
constexpr std::int64_t cache_bytes = 8 << 20;  // a processor's, and enough for a disk to read at a time
constexpr std::int64_t round_tokens = 256;

}  // namespace

WindowNeeds::Parts WindowNeeds::parts(std::int64_t tokens) const {
  if (parts_of) return parts_of(tokens);
  return {tokens, tokens + std::clamp<std::int64_t>(all - tokens, 0, tokens)};
}

std::int64_t WindowNeeds::host(std::int64_t tokens) const {
  const Parts p = parts(tokens);
  return p.two * in_and_out + (has_device ? 0 : work(p.longest));
}

std::int64_t WindowNeeds::device(std::int64_t tokens) const {
  const std::int64_t longest = parts(tokens).longest;
  return has_device ? longest * in_and_out + work(longest) : 0;
}

WindowRoom room_here(int ranks_of_node) {
  // every rank of a node takes the same share of what is free now
  return {available_memory(ranks_of_node) / 10 * 9, has_device ? free_device_memory() / ranks_of_node / 10 * 9 : 0};
}

WindowChoice window_in(const WindowRoom& room, std::int64_t wanted, const WindowNeeds& needs) {
  const auto fits = [&](std::int64_t n) { return needs.host(n) <= room.host && needs.device(n) <= room.device; };
  const std::int64_t all = std::max<std::int64_t>(1, needs.all);
  const std::int64_t least = needs.whole ? all : std::min(needs.least, all);
  if (wanted > 0 && !needs.whole) {
    const std::int64_t tokens = std::min(wanted, all);
    return {tokens, fits(tokens)};
  }
  std::int64_t tokens = all;
  const std::int64_t each = std::max<std::int64_t>(1, needs.in_and_out);
  const auto share = [all](std::int64_t windows) { return (all + windows - 1) / windows; };
  if (needs.overlaps && needs.cut_tokens > 0 && !has_device) {
    tokens =
        std::min(all, std::max({round_tokens, cache_bytes / each / round_tokens * round_tokens, needs.cut_tokens}));
  } else if (needs.overlaps && needs.horizon > 0 && !has_device) {
    const std::int64_t most = std::max({share(windows_to_overlap), 4 * needs.horizon, cache_bytes / each});
    tokens = share((all + most - 1) / most);
  } else if (needs.overlaps) {
    tokens =
        std::min(all, std::max({share(windows_to_overlap), least_overlapping_tokens, least_overlapping_bytes / each}));
  }
  tokens = std::max(tokens, least);
  while (!fits(tokens) && tokens > least) tokens = std::max(least, (tokens + 1) / 2);
  return {tokens, fits(tokens)};
}

std::int64_t choose_window(Transport& ranks, std::int64_t wanted, const WindowNeeds& needs) {
  const WindowRoom here = room_here(ranks.local_size());
  std::int64_t free[] = {here.host, here.device};
  ranks.all_reduce(free, 2, Transport::Reduction::min);
  const WindowRoom room{free[0], free[1]};
  const auto [tokens, fits] = window_in(room, wanted, needs);
  if (fits) return tokens;
  const bool on_host = needs.host(tokens) > room.host;
  throw Error(ExitCode::resources,
              (wanted > 0 ? "a window of " : "even a window of ") + std::to_string(tokens) + " tokens per rank needs " +
                  bytes_text(static_cast<double>(on_host ? needs.host(tokens) : needs.device(tokens))) +
                  (on_host ? " of memory per rank, but " : " of device memory per rank, but ") +
                  bytes_text(static_cast<double>(on_host ? room.host : room.device)) +
                  " are free; use more nodes or a smaller --window");
}

}  // namespace longscan
