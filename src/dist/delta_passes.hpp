// SPDX-License-Identifier: Apache-2.0
#pragma once
// Passes of the delta rule over the tokens that one rank holds of a window: by which kernels, and what they found.
// Launches, and waits where the host needs a result. Does not communicate.
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/device_memory.hpp"
#include "local/affine_scan.hpp"
#include "local/delta_pass.hpp"
#include "local/delta_tensor.hpp"
#include "longscan/delta_rule.hpp"

namespace longscan {

/// States [slot][K][V] and maps [slot][K][K + V] in one array each, rows padded; what pads them is zero.
template <class T>
struct DeltaSlots {
  explicit DeltaSlots(const DeltaShape& shape)
      : d_key(shape.d_key),
        d_value(shape.d_value),
        state_leading(padded<T>(shape.d_value)),
        map_leading(padded<T>(shape.d_key + shape.d_value)),
        state_size(static_cast<std::int64_t>(shape.d_key) * state_leading),
        map_size(static_cast<std::int64_t>(shape.d_key) * map_leading) {}

  StateRef<T> state(const DeviceArray<T>& states, std::int64_t slot) const {
    return {states.data() + slot * state_size, state_leading, 1};
  }
  StateRef<const T> known_state(const DeviceArray<T>& states, std::int64_t slot) const {
    return {states.data() + slot * state_size, state_leading, 1};
  }
  StateRef<T> map(const DeviceArray<T>& maps, std::int64_t slot) const {
    return {maps.data() + slot * map_size, map_leading, 1};
  }
  /// L of a map.
  StateRef<T> own_constant(const DeviceArray<T>& maps, std::int64_t slot) const {
    return {maps.data() + slot * map_size + d_key, map_leading, 1};
  }
  StateRef<const T> constant(const DeviceArray<T>& maps, std::int64_t slot) const {
    return {maps.data() + slot * map_size + d_key, map_leading, 1};
  }
  AffinePoints<T> points(const DeviceArray<T>& states) const { return {states.data(), state_leading, state_size}; }
  AffinePoints<const T> known_points(const DeviceArray<T>& states) const {
    return {states.data(), state_leading, state_size};
  }
  AffineMaps<T> maps(const DeviceArray<T>& maps) const {
    return {maps.data(), d_key, d_value, map_leading, map_size, true};
  }

  int d_key, d_value, state_leading, map_leading;
  std::int64_t state_size, map_size;  ///< elements of a slot
};

/// At least `size` elements, zeros where it has to grow.
template <class T>
void reserve_zeros(DeviceArray<T>& array, const char* label, std::int64_t size) {
  if (static_cast<std::int64_t>(array.extent(0)) >= size) return;
  array = {};  // give the old memory back first
  array = DeviceArray<T>(std::string(label), size);
}

/// Host values that kernels read: copied to the device, or there already. Waits for kernels now and then only, and less
/// often if it is told when there are none.
template <class E>
class Uploaded {
 public:
  template <class Space>
  const E* operator()(const Space& space, const std::vector<E>& values) {
    if (used_ == slots_.size()) {
      space.fence();  // kernels may still read what is in the slots
      used_ = 0;
    }
    Slot& slot = slots_[used_++];
    slot.staged.assign(values.begin(), values.end());
    if constexpr (is_host_space<Space>) return slot.staged.data();
    const auto n = static_cast<std::int64_t>(values.size());
    reserve(slot.device, "longscan::tasks", n);
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    Kokkos::deep_copy(space, Kokkos::View<E*, typename Space::memory_space, Unmanaged>(slot.device.data(), n),
                      Kokkos::View<const E*, SharedSpace, Unmanaged>(slot.staged.data(), n));
    return slot.device.data();
  }

  /// No kernel reads the values any more.
  void restart() { used_ = 0; }

 private:
  struct Slot {
    SharedVector<E> staged;
    DeviceArray<E> device;
  };
  std::array<Slot, 4> slots_;
  std::size_t used_ = 0;
};

/// The first result that is not finite.
struct BadToken {
  std::int64_t token = -1;  ///< in the part; -1 is none
  int head = 0;
};

/// Totals over the tasks of a pass.
struct PassSummary {
  std::int64_t breaches = 0, fallbacks = 0, terms = 0;
  BadToken bad;
  std::vector<BadToken> all_bad;  ///< one a task that met one, to the start of its chunk
};

template <class T>
class DeltaPasses {
 public:
  using Space = Kokkos::DefaultExecutionSpace;
  using Task = DeltaTask<T>;

  DeltaPasses(const DeltaShape& shape, const DeltaOptions& options) : shape_(shape), options_(options), slots_(shape) {}

  void begin(const DeltaInputs& in, const DeltaOutputs& out, std::int64_t tokens);

  DeltaRules rules(bool outputs, bool map) const;
  /// By the fastest kernels that take the pass; tasks that they cannot hold the numbers of follow by the general ones.
  /// Waits for the results. `then` launches what looks at them, to be waited for together; again if tasks followed.
  PassSummary run(
      const std::vector<Task>& tasks, const DeltaRules& rules, const std::function<void()>& then = [] {});
  /// The same without waiting where tensor cores take the pass: `settled` waits, and says whether they held the numbers
  /// of all tasks. One at a time.
  void run_ahead(const std::vector<Task>& tasks, const DeltaRules& rules);
  bool settled();
  /// to = from for each task. Asynchronous.
  void copy(const std::vector<Task>& tasks);

  /// Tensor-core kernels take the passes of this window.
  bool on_tensor_cores() const { return tensor_side_by_side_ > 0; }
  /// Tasks that the device runs at a time.
  int side_by_side() const;
  /// At most, whatever the window's inputs are.
  int most_side_by_side() const;
  /// Tasks computed so far in this window by tensor-core kernels, and by the general ones.
  std::int64_t tensor_tasks() const { return tensor_tasks_; }
  std::int64_t general_tasks() const { return general_tasks_; }

 private:
  DeltaPass<T> describe(const DeltaRules& rules) const;
  PassSummary general_run(
      const std::vector<Task>& tasks, const DeltaRules& rules, const std::function<void()>& then = [] {});
  BadToken locate(const Task& task, std::int64_t chunk_begin);

  DeltaShape shape_;
  DeltaOptions options_;
  DeltaSlots<T> slots_;
  Space space_;
  DeltaInputs in_;
  DeltaOutputs out_;
  std::int64_t tokens_ = 0, tensor_tasks_ = 0, general_tasks_ = 0;
  int tensor_side_by_side_ = 0;  // 0: tensor cores do not take the window's passes
  DeltaTensor tensor_, ahead_;
  std::int64_t tasks_ahead_ = 0;
  DeviceArray<DeltaCounts> counts_;
  Fetched<DeltaCounts> found_;
  Uploaded<Task> tasks_;
};

}  // namespace longscan
