// SPDX-License-Identifier: Apache-2.0
#pragma once
// What differs between Kokkos 3.4 and 5, and between host and device code. Includes no other Longscan header.
#include <Kokkos_Core.hpp>
#include <cstring>
#include <type_traits>

namespace longscan {

/// The same bits as another type (std::bit_cast is not usable in device code of every compiler we support).
template <class To, class From>
KOKKOS_INLINE_FUNCTION To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

/// Whether `Space` runs its kernels where host memory and host libraries are.
template <class Space>
inline constexpr bool is_host_space =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename Space::memory_space>::accessible&&
        std::is_same_v<typename Space::memory_space, Kokkos::HostSpace>;

}  // namespace longscan
