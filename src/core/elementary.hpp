// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elementary functions with the same polynomials on host and device, free of branches so that loops over them
// vectorise.
#include <cmath>
#include <cstdint>

#include "core/portable.hpp"

namespace longscan {

/// e^x for x <= 0 (also -infinity). Results below the smallest normal number are 0. Relative error below 2 units in
/// the last place. exp_nonpositive(0) is exactly 1.
KOKKOS_INLINE_FUNCTION float exp_nonpositive(float x) {
  const float lowest = -87.33654f;
  const float y = x < lowest ? lowest : x;
  // nearest integer of y/ln2: adding 1.5 * 2^23 leaves it in the low bits
  const float shifted = y * 1.442695041f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (y - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const auto exponent = bits_as<std::uint32_t>(shifted) << 23;
  const float result = bits_as<float>(bits_as<std::uint32_t>(p) + exponent);
  return x < lowest ? 0.0f : result;
}

KOKKOS_INLINE_FUNCTION double exp_nonpositive(double x) {
  const double lowest = -708.396;
  const double y = x < lowest ? lowest : x;
  const double shifted = y * 1.4426950408889634 + 6755399441055744.0;
  const double n = shifted - 6755399441055744.0;
  const double r = (y - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = (p * r) * r + r + 1.0;
  const auto exponent = bits_as<std::uint64_t>(shifted) << 52;
  const double result = bits_as<double>(bits_as<std::uint64_t>(p) + exponent);
  return x < lowest ? 0.0 : result;
}

}  // namespace longscan
