// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random numbers that are a function of (seed, stream, index) alone, so that any part of a sequence can be made
// anywhere.
#include <cmath>
#include <cstdint>

#include "core/portable.hpp"

namespace longscan {

/// 64 well-mixed bits (the finaliser of SplitMix64, applied to a Weyl sequence of the stream).
KOKKOS_INLINE_FUNCTION std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto mix = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  };
  const std::uint64_t key = mix(seed + 0x9E3779B97F4A7C15ull * (stream + 1));
  return mix(key + 0x9E3779B97F4A7C15ull * (index + 1));
}

/// Uniform in (0, 1).
KOKKOS_INLINE_FUNCTION double random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}

/// Normal with mean 0 and variance 1 (Box and Muller).
KOKKOS_INLINE_FUNCTION double random_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const std::uint64_t bits = random_bits(seed, stream, index);
  const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
  const double angle = static_cast<double>(bits & 0xFFFFFFFFull) * 0x1p-32 * 6.283185307179586;
  return sqrt(-2 * log(u)) * cos(angle);
}

}  // namespace longscan
