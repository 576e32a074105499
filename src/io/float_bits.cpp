// SPDX-License-Identifier: Apache-2.0
#include "io/float_bits.hpp"

namespace longscan::io {
namespace {

template <class Word, class Swap>
void swap_words(void* data, std::int64_t count, Swap swap) {
  auto* bytes = static_cast<std::byte*>(data);
  for (std::int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + i * sizeof(Word), sizeof(Word));
    word = swap(word);
    std::memcpy(bytes + i * sizeof(Word), &word, sizeof(Word));
  }
}

}  // namespace

void swap_bytes(void* data, std::int64_t count, std::size_t size) {
  if (size == 2) swap_words<std::uint16_t>(data, count, [](std::uint16_t w) { return __builtin_bswap16(w); });
  if (size == 4) swap_words<std::uint32_t>(data, count, [](std::uint32_t w) { return __builtin_bswap32(w); });
  if (size == 8) swap_words<std::uint64_t>(data, count, [](std::uint64_t w) { return __builtin_bswap64(w); });
}

}  // namespace longscan::io
