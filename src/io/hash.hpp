// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace longscan::io {

/// As FNV-1a, but by words, whose upper bits are brought down each time, and with a last stir so that all bits depend
/// on all input. Tells files apart; no protection against intent.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* next = static_cast<const unsigned char*>(data);
    std::uint64_t word = 0;
    if (bytes >= kLaneBytes) {  // side by side, as each step waits for the one before
      std::uint64_t lanes[kLanes];
      for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(state_, static_cast<std::uint64_t>(i));
      for (; bytes >= sizeof lanes; next += sizeof lanes, bytes -= sizeof lanes)
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(&word, next + i * sizeof word, sizeof word);
          lanes[i] = mixed(lanes[i], word);
        }
      for (const std::uint64_t lane : lanes) stir(lane);
    }
    for (; bytes >= sizeof word; next += sizeof word, bytes -= sizeof word) {
      std::memcpy(&word, next, sizeof word);
      stir(word);
    }
    for (; bytes > 0; ++next, --bytes) stir(*next);
  }
  void add(std::int64_t value) { add(&value, sizeof value); }
  std::uint64_t result() const {
    const std::uint64_t x = (state_ ^ state_ >> 32) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
  }

 private:
  static constexpr int kLanes = 4;
  static constexpr std::size_t kLaneBytes = 1024;  // from which on there are lanes
  static std::uint64_t mixed(std::uint64_t state, std::uint64_t word) {
    const std::uint64_t x = (state ^ word) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 32;
  }
  void stir(std::uint64_t word) { state_ = mixed(state_, word); }
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longscan::io
