// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>

namespace longscan::io {

/// FNV-1a, with a last stir so that all bits depend on all input. Tells files apart; no protection against intent.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* next = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) state_ = (state_ ^ next[i]) * 0x100000001b3u;
  }
  void add(std::int64_t value) { add(&value, sizeof value); }
  std::uint64_t result() const {
    const std::uint64_t x = (state_ ^ state_ >> 32) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
  }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longscan::io
