// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes between files, which are read and written beside the solve, and the memory that kernels reach.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/large_pages.hpp"
#include "core/portable.hpp"

namespace longscan {

using HostBytes = Kokkos::View<std::byte*, SharedSpace>;
using DeviceBytes = Kokkos::View<std::byte*, Kokkos::DefaultExecutionSpace::memory_space>;
/// Kernels work on what was read where it was read to.
inline constexpr bool kernels_reach_host = std::is_same_v<HostBytes, DeviceBytes>;

/// At least `bytes` bytes, and at least one; the old ones are lost where it has to grow.
/// They start at a page, as writes past the system's cache want them.
template <class Bytes>
void reserve_bytes(Bytes& array, std::int64_t bytes) {
  constexpr std::int64_t page = 4096;
  bytes = std::max<std::int64_t>(1, bytes);
  if (static_cast<std::int64_t>(array.extent(0)) >= bytes) return;
  array = Bytes();  // give the old memory back first
  const Bytes all(Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::part"), bytes + page);
  if constexpr (std::is_same_v<typename Bytes::memory_space, Kokkos::HostSpace>) want_large_pages(all.data(), bytes);
  const auto skip = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(all.data()) % page);
  array = Kokkos::subview(all, std::make_pair(skip, skip + bytes));
}

/// One array of a window on the device; on a host the slot's own memory.
class DeviceArea {
 public:
  /// Where the kernels find what is in `host`.
  std::byte* upload(const HostBytes& host, std::int64_t bytes) {
    if constexpr (!kernels_reach_host) {
      reserve_bytes(memory_, bytes);
      if (bytes > 0) Kokkos::deep_copy(part(memory_, bytes), part(host, bytes));
      return memory_.data();
    }
    return host.data();
  }
  /// Where the kernels leave what `download` then brings to `host`.
  std::byte* target(const HostBytes& host, std::int64_t bytes) {
    if constexpr (!kernels_reach_host) {
      reserve_bytes(memory_, bytes);
      return memory_.data();
    }
    return host.data();
  }
  /// Waits for the kernels launched before.
  void download(const HostBytes& host, std::int64_t bytes) const {
    if constexpr (!kernels_reach_host)
      if (bytes > 0) Kokkos::deep_copy(part(host, bytes), part(memory_, bytes));
  }

 private:
  template <class Bytes>
  static Bytes part(const Bytes& bytes, std::int64_t n) {
    return Kokkos::subview(bytes, std::make_pair(std::int64_t{0}, n));
  }
  DeviceBytes memory_;
};

}  // namespace longscan
