// SPDX-License-Identifier: Apache-2.0
#pragma once
// Host memory in large pages.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace longscan {

/// Asks for large pages, where the system has them for the asking: with small ones the first touch of new memory
/// spends more time on them than on the bytes.
inline void want_large_pages(void* data, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < 2 << 20) return;
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(data), begin = (first + page - 1) / page * page;
  const std::uintptr_t end = (first + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace longscan
