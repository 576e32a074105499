// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "longscan/types.hpp"

/// Stored bits to numbers, on the host. HDF5's own conversion of 16-bit floats is 60 times slower than a plain read.
namespace longscan::io {

inline double double_from_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 31  ? (mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL)
                      : exponent == 0 ? std::ldexp(mantissa, -24)
                                      : std::ldexp(mantissa + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

inline double double_from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Element `i` of an array of `type`.
inline double load_double(const void* data, DType type, std::int64_t i) {
  const auto* bytes = static_cast<const std::byte*>(data) + i * static_cast<std::int64_t>(size_of(type));
  std::uint16_t bits = 0;
  double wide = 0;
  float single = 0;
  switch (type) {
    case DType::f64:
      std::memcpy(&wide, bytes, sizeof wide);
      return wide;
    case DType::f32:
      std::memcpy(&single, bytes, sizeof single);
      return single;
    default:
      std::memcpy(&bits, bytes, sizeof bits);
      return type == DType::f16 ? double_from_half(bits) : double_from_bfloat16(bits);
  }
}

/// Reverse the bytes of `count` elements of 2, 4 or 8 bytes.
void swap_bytes(void* data, std::int64_t count, std::size_t size);

}  // namespace longscan::io
