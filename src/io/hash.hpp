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
  void stir(std::uint64_t word) {
    const std::uint64_t x = (state_ ^ word) * 0x9e3779b97f4a7c15u;
    state_ = x ^ x >> 32;
  }
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace longscan::io
