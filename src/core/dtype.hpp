// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stored values to arithmetic and back: float64, float32, IEEE float16, bfloat16. Round to nearest even.
#include <cstdint>

#include "core/portable.hpp"
#include "longscan/types.hpp"

namespace longscan {

KOKKOS_INLINE_FUNCTION float from_bf16(std::uint16_t bits) {
  return bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
}

KOKKOS_INLINE_FUNCTION std::uint16_t to_bf16(float x) {
  const auto u = bits_as<std::uint32_t>(x);
  const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? (u >> 16) | 0x40u : rounded);  // NaN stays NaN
}

KOKKOS_INLINE_FUNCTION float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
  // Shifted into place the exponent is 112 too small; the product mends it, for subnormal numbers too.
  const float finite = bits_as<float>(rest << 13) * bits_as<float>(std::uint32_t{0x77800000u});
  const std::uint32_t magnitude = rest >= 0x7C00u ? (rest << 13) | 0x7F800000u : bits_as<std::uint32_t>(finite);
  return bits_as<float>(sign | magnitude);
}

KOKKOS_INLINE_FUNCTION std::uint16_t to_f16(float x) {
  const auto u = bits_as<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u, rest = u & 0x7FFFFFFFu;
  std::uint32_t half;
  if (rest >= 0x47800000u) {  // at least 2^16, infinite or NaN
    half = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (rest < 0x38800000u) {  // subnormal: let an addition place and round the bits
    half = bits_as<std::uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3F000000u;
  } else {
    half = (rest + 0xC8000FFFu + ((rest >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

/// Element i of an array of `type`.
template <class Scalar>
KOKKOS_INLINE_FUNCTION Scalar load(const void* data, DType type, std::int64_t i) {
  switch (type) {
    case DType::f64:
      return static_cast<Scalar>(static_cast<const double*>(data)[i]);
    case DType::f32:
      return static_cast<Scalar>(static_cast<const float*>(data)[i]);
    case DType::f16:
      return static_cast<Scalar>(from_f16(static_cast<const std::uint16_t*>(data)[i]));
    default:
      return static_cast<Scalar>(from_bf16(static_cast<const std::uint16_t*>(data)[i]));
  }
}

template <class Scalar>
KOKKOS_INLINE_FUNCTION void store(void* data, DType type, std::int64_t i, Scalar x) {
  switch (type) {
    case DType::f64:
      static_cast<double*>(data)[i] = static_cast<double>(x);
      break;
    case DType::f32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(data)[i] = to_f16(static_cast<float>(x));
      break;
    default:
      static_cast<std::uint16_t*>(data)[i] = to_bf16(static_cast<float>(x));
  }
}

/// `n` elements from i on into `out`: one decision about the type, then a loop that compilers vectorise.
template <class Scalar>
KOKKOS_INLINE_FUNCTION void load_row(const void* data, DType type, std::int64_t i, int n, Scalar* out) {
  switch (type) {
    case DType::f64:
      for (int j = 0; j < n; ++j) out[j] = static_cast<Scalar>(static_cast<const double*>(data)[i + j]);
      break;
    case DType::f32:
      for (int j = 0; j < n; ++j) out[j] = static_cast<Scalar>(static_cast<const float*>(data)[i + j]);
      break;
    case DType::f16:
      for (int j = 0; j < n; ++j)
        out[j] = static_cast<Scalar>(from_f16(static_cast<const std::uint16_t*>(data)[i + j]));
      break;
    default:
      for (int j = 0; j < n; ++j)
        out[j] = static_cast<Scalar>(from_bf16(static_cast<const std::uint16_t*>(data)[i + j]));
  }
}

template <class Scalar>
KOKKOS_INLINE_FUNCTION void store_row(void* data, DType type, std::int64_t i, int n, const Scalar* in) {
  switch (type) {
    case DType::f64:
      for (int j = 0; j < n; ++j) static_cast<double*>(data)[i + j] = static_cast<double>(in[j]);
      break;
    case DType::f32:
      for (int j = 0; j < n; ++j) static_cast<float*>(data)[i + j] = static_cast<float>(in[j]);
      break;
    default:
      for (int j = 0; j < n; ++j) store(data, type, i + j, in[j]);
  }
}

}  // namespace longscan
