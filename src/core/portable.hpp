// SPDX-License-Identifier: Apache-2.0
#pragma once
// What differs between Kokkos 3.4 and 5, and between host and device code. Includes no other Longscan header.
#include <Kokkos_Core.hpp>
#include <cstdint>
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

/// Infinite or NaN; written with integers so that no compiler flag can remove it.
KOKKOS_INLINE_FUNCTION bool is_non_finite(double x) {
  return (bits_as<std::uint64_t>(x) & 0x7FF0000000000000ull) == 0x7FF0000000000000ull;
}
KOKKOS_INLINE_FUNCTION bool is_non_finite(float x) { return (bits_as<std::uint32_t>(x) & 0x7F800000u) == 0x7F800000u; }

/// Before a loop with a constant number of turns whose arrays have to live in registers.
#ifdef __CUDA_ARCH__
#define LONGSCAN_UNROLL _Pragma("unroll")
#else
#define LONGSCAN_UNROLL
#endif

/// A function that would make every kernel that calls it often too large if it were inlined.
#ifdef __CUDACC__
#define LONGSCAN_NOINLINE __noinline__
#else
#define LONGSCAN_NOINLINE
#endif

/// Whether `Space` runs its kernels where host memory and host libraries are.
template <class Space>
inline constexpr bool is_host_space =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename Space::memory_space>::accessible&&
        std::is_same_v<typename Space::memory_space, Kokkos::HostSpace>;

/// Memory that the host and kernels both reach (pinned host memory where there is a device).
#ifdef KOKKOS_HAS_SHARED_HOST_PINNED_SPACE
using SharedSpace = Kokkos::SharedHostPinnedSpace;
#else
using SharedSpace = Kokkos::HostSpace;
#endif

/// A value that no kernel in flight writes and that is wanted once: it need not stay in the caches.
template <class T>
KOKKOS_INLINE_FUNCTION T load_once(const T* p) {
#ifdef __CUDA_ARCH__
  return __ldcs(p);
#else
  return *p;
#endif
}
/// The same for a value that is not read again soon.
template <class T>
KOKKOS_INLINE_FUNCTION void store_once(T* p, T value) {
#ifdef __CUDA_ARCH__
  __stcs(p, value);
#else
  *p = value;
#endif
}

/// Bytes of the device's memory that are free now; -1 where kernels run in the host's.
inline std::int64_t free_device_memory() {
#ifdef KOKKOS_ENABLE_CUDA
  std::size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<std::int64_t>(free) : 0;
#else
  return -1;
#endif
}

}  // namespace longscan
