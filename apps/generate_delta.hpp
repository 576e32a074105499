// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "longscan/types.hpp"

namespace longscan {

/// Streams of random numbers, one a role.
enum class DeltaStream : std::uint64_t { q, k, v, beta, log_decay };

/// One value before vectors are brought to length one.
KOKKOS_INLINE_FUNCTION double delta_value(DeltaStream stream, std::uint64_t seed, std::uint64_t index) {
  const auto number = static_cast<std::uint64_t>(stream);
  if (stream == DeltaStream::beta) return random_uniform(seed, number, index);
  if (stream == DeltaStream::log_decay) return 0.05 * log(random_uniform(seed, number, index));
  return random_normal(seed, number, index);
}

/// The values that `generate delta` and `bench delta` use for one array: q and k of length one, v normal, beta uniform
/// in (0, 1), log_decay exponential with mean -0.05. Tokens [begin, begin + count), dense, in `type`.
void fill_delta_array(DeltaStream stream, std::uint64_t seed, std::int64_t begin, std::int64_t count, int heads,
                      int width, DType type, void* out);

}  // namespace longscan
