// SPDX-License-Identifier: Apache-2.0
#include "apps/window.hpp"

#include <algorithm>

#include "apps/memory.hpp"
#include "core/portable.hpp"
#include "longscan/error.hpp"

namespace longscan {

std::int64_t choose_window(Transport& ranks, std::int64_t wanted, std::int64_t all, std::int64_t least,
                           const std::function<std::int64_t(std::int64_t)>& needed) {
  // every rank of a node takes the same share of what is free now
  std::int64_t free = available_memory() / ranks.local_size();
  if (const std::int64_t device = free_device_memory(); device >= 0) free = std::min(free, device / ranks.local_size());
  ranks.all_reduce(&free, 1, Transport::Reduction::min);
  const std::int64_t usable = free / 10 * 9;
  const auto too_much = [&](std::int64_t tokens, const std::string& what) {
    return Error(ExitCode::resources, what + std::to_string(tokens) + " tokens a rank needs " +
                                          bytes_text(static_cast<double>(needed(tokens))) + " of memory a rank, but " +
                                          bytes_text(static_cast<double>(usable)) +
                                          " are free; use more nodes or a smaller --window");
  };
  all = std::max<std::int64_t>(1, all);
  if (wanted > 0) {
    const std::int64_t tokens = std::min(wanted, all);
    if (needed(tokens) > usable) throw too_much(tokens, "a window of ");
    return tokens;
  }
  std::int64_t tokens = all;
  while (needed(tokens) > usable) {
    if (tokens <= std::min(least, all)) throw too_much(tokens, "even a window of ");
    tokens = std::max(std::min(least, all), (tokens + 1) / 2);
  }
  return tokens;
}

}  // namespace longscan
