// SPDX-License-Identifier: Apache-2.0
#pragma once
// Messages from and to memory that kernels reach: as they are where the transport reaches it too, else by way of pinned
// memory of the host. Knows nothing of what they mean.
#include <deque>
#include <memory>
#include <vector>

#include "core/device_memory.hpp"
#include "longscan/transport.hpp"

namespace longscan {

class Courier {
 public:
  explicit Courier(Transport& ranks) : ranks_(ranks) {}

  /// Whether the host may go on while an exchange waits for its turn among the kernels.
  bool queues() const { return !is_host && ranks_.reach() == Transport::Reach::stream; }

  /// Transport::exchange after all kernels launched so far and before those launched from now on.
  void exchange(const std::vector<Transport::Transfer>& sends, const std::vector<Transport::Transfer>& receives) {
    if (sends.empty() && receives.empty()) return;
    if (direct()) {
      if (!queues()) wait_for_kernels();
      ranks_.exchange(sends, receives);
      return;
    }
    const std::vector<Transport::Transfer> from = stage(sends, true), to = stage(receives, false);
    ranks_.exchange(from, to);
    for (std::size_t i = 0; i < to.size(); ++i)
      copy_to_device(static_cast<const char*>(to[i].data), to[i].bytes, static_cast<char*>(receives[i].data));
  }

  /// Transport::send of what kernels launched so far have written. Not where `queues`.
  std::unique_ptr<Transport::Request> send(const void* data, std::int64_t bytes, int to, int tag) {
    if (direct()) {
      wait_for_kernels();
      return ranks_.send(data, bytes, to, tag);
    }
    if (lent_ == staged_.size()) staged_.emplace_back();
    SharedVector<char>& staging = grown(staged_[lent_++], bytes);
    copy_to_host(static_cast<const char*>(data), bytes, staging.data());
    return ranks_.send(staging.data(), bytes, to, tag);
  }
  /// All sends so far have been waited for.
  void all_sent() { lent_ = 0; }
  void receive(void* data, std::int64_t bytes, int from, int tag) {
    if (direct()) return ranks_.receive(data, bytes, from, tag);
    SharedVector<char>& staging = grown(in_, bytes);
    ranks_.receive(staging.data(), bytes, from, tag);
    copy_to_device(staging.data(), bytes, static_cast<char*>(data));
  }
  Transport& ranks() const { return ranks_; }

 private:
  static constexpr bool is_host = is_host_space<Kokkos::DefaultExecutionSpace>;
  bool direct() const { return is_host || ranks_.reach() != Transport::Reach::host; }
  static void wait_for_kernels() { Kokkos::DefaultExecutionSpace().fence(); }
  static SharedVector<char>& grown(SharedVector<char>& staging, std::int64_t bytes) {
    if (static_cast<std::int64_t>(staging.size()) < bytes) staging = SharedVector<char>(bytes);
    return staging;
  }
  std::vector<Transport::Transfer> stage(const std::vector<Transport::Transfer>& transfers, bool out) {
    std::int64_t bytes = 0;
    for (const Transport::Transfer& t : transfers) bytes += t.bytes;
    SharedVector<char>& staging = grown(out ? out_ : in_, bytes);
    std::vector<Transport::Transfer> staged;
    std::int64_t at = 0;
    for (const Transport::Transfer& t : transfers) {
      if (out) copy_to_host(static_cast<const char*>(t.data), t.bytes, staging.data() + at);
      staged.push_back({t.rank, staging.data() + at, t.bytes});
      at += t.bytes;
    }
    return staged;
  }

  Transport& ranks_;
  SharedVector<char> out_, in_;
  std::deque<SharedVector<char>> staged_;  // of sends under way, `lent_` of them
  std::size_t lent_ = 0;
};

}  // namespace longscan
