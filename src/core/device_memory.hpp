// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that kernels reach, for drivers on the host. Arrays of tokens live on the device; the few values that host and
// kernels hand to each other between launches live where both reach them.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/portable.hpp"

namespace longscan {

template <class T>
using DeviceArray = Kokkos::View<T*, Kokkos::DefaultExecutionSpace::memory_space>;

/// At least `size` elements; the old ones are lost where it has to grow.
template <class T>
void reserve(DeviceArray<T>& array, const char* label, std::int64_t size) {
  if (static_cast<std::int64_t>(array.extent(0)) >= size) return;
  array = {};  // give the old memory back first
  array = DeviceArray<T>(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), size);
}

/// Raw pointers as Kokkos sees them, `from` of device memory and `to` of the host's, or the other way round. Waits for
/// the kernels launched before.
template <class T>
void copy_to_host(const T* from, std::int64_t n, T* to) {
  using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
  Kokkos::deep_copy(Kokkos::View<T*, Kokkos::HostSpace, Unmanaged>(to, n),
                    Kokkos::View<const T*, typename DeviceArray<T>::memory_space, Unmanaged>(from, n));
}
template <class T>
void copy_to_device(const T* from, std::int64_t n, T* to) {
  using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
  Kokkos::deep_copy(Kokkos::View<T*, typename DeviceArray<T>::memory_space, Unmanaged>(to, n),
                    Kokkos::View<const T*, Kokkos::HostSpace, Unmanaged>(from, n));
}

template <class T>
DeviceArray<T> on_device(const char* label, const std::vector<T>& host) {
  DeviceArray<T> array;
  reserve(array, label, std::max<std::int64_t>(1, static_cast<std::int64_t>(host.size())));
  copy_to_device(host.data(), static_cast<std::int64_t>(host.size()), array.data());
  return array;
}

/// For std::vector. Kernels may use the vector's data; the host looks at it once they have been waited for.
template <class T>
struct SharedAllocator {
  using value_type = T;
  SharedAllocator() = default;
  template <class U>
  SharedAllocator(const SharedAllocator<U>&) {}
  T* allocate(std::size_t n) {
    return static_cast<T*>(Kokkos::kokkos_malloc<SharedSpace>("longscan::shared", n * sizeof(T)));
  }
  void deallocate(T* p, std::size_t) { Kokkos::kokkos_free<SharedSpace>(p); }
  template <class U>
  bool operator==(const SharedAllocator<U>&) const {
    return true;
  }
};
template <class T>
using SharedVector = std::vector<T, SharedAllocator<T>>;

}  // namespace longscan
