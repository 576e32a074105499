// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that kernels reach, for drivers on the host. Arrays of tokens live on the device; the few values that host and
// kernels hand to each other between launches live where both reach them.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "core/large_pages.hpp"
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
  if constexpr (std::is_same_v<typename DeviceArray<T>::memory_space, Kokkos::HostSpace>)
    want_large_pages(array.data(), size * static_cast<std::int64_t>(sizeof(T)));
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

/// Blocks of shared memory that have been given back, by size: pinned memory is slow to get.
class SharedBlocks {
 public:
  static void* take(std::size_t bytes) {
    if (is_host_space<Kokkos::DefaultExecutionSpace>) return get(bytes);
    auto& free = blocks().free_[rounded(bytes)];
    if (free.empty()) return get(rounded(bytes));
    void* p = free.back();
    free.pop_back();
    return p;
  }
  static void give_back(void* p, std::size_t bytes) {
    if (is_host_space<Kokkos::DefaultExecutionSpace> || rounded(bytes) > most)
      Kokkos::kokkos_free<SharedSpace>(p);
    else
      blocks().free_[rounded(bytes)].push_back(p);
  }

 private:
  static constexpr std::size_t most = std::size_t{16} << 20;  ///< larger blocks are not kept
  static std::size_t rounded(std::size_t bytes) {
    std::size_t size = 256;
    while (size < bytes) size *= 2;
    return size;
  }
  static void* get(std::size_t bytes) { return Kokkos::kokkos_malloc<SharedSpace>("longscan::shared", bytes); }
  static SharedBlocks& blocks() {
    static SharedBlocks* const all = [] {
      Kokkos::push_finalize_hook([] { blocks().clear(); });
      return new SharedBlocks;
    }();
    return *all;
  }
  void clear() {
    for (const auto& [size, list] : free_)
      for (void* p : list) Kokkos::kokkos_free<SharedSpace>(p);
    free_.clear();
  }
  std::map<std::size_t, std::vector<void*>> free_;
};

/// For std::vector. Kernels may use the vector's data; the host looks at it once they have been waited for.
template <class T>
struct KeptSharedAllocator {
  using value_type = T;
  KeptSharedAllocator() = default;
  template <class U>
  KeptSharedAllocator(const KeptSharedAllocator<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(SharedBlocks::take(n * sizeof(T))); }
  void deallocate(T* p, std::size_t n) { SharedBlocks::give_back(p, n * sizeof(T)); }
  template <class U>
  bool operator==(const KeptSharedAllocator<U>&) const {
    return true;
  }
};
template <class T>
using SharedVector = std::vector<T, KeptSharedAllocator<T>>;

/// Numbers on their way from the device: there for the host after the next fence of the space.
template <class T>
class Fetched {
 public:
  template <class Space>
  void fetch(const Space& space, const T* from, std::int64_t n) {
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    if (static_cast<std::int64_t>(values_.size()) < n) values_.resize(n);
    Kokkos::deep_copy(space, Kokkos::View<T*, SharedSpace, Unmanaged>(values_.data(), n),
                      Kokkos::View<const T*, typename DeviceArray<T>::memory_space, Unmanaged>(from, n));
  }
  const T& operator[](std::int64_t i) const { return values_[i]; }

 private:
  SharedVector<T> values_;
};

}  // namespace longscan
