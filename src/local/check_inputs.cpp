// SPDX-License-Identifier: Apache-2.0
#include "local/check_inputs.hpp"

#include <limits>

namespace longscan {
namespace {

template <class T>
KOKKOS_INLINE_FUNCTION bool outside(T x, Domain domain) {
  return domain == Domain::finite ? is_non_finite(x) : !(x <= T(0));
}

/// One row of memory, decided by its type once.
KOKKOS_INLINE_FUNCTION bool row_outside(const void* data, DType type, std::int64_t i, int n, Domain domain) {
  int bad = 0;
  switch (type) {
    case DType::f64:
      for (int j = 0; j < n; ++j) bad |= outside(static_cast<const double*>(data)[i + j], domain);
      break;
    case DType::f32:
      for (int j = 0; j < n; ++j) bad |= outside(static_cast<const float*>(data)[i + j], domain);
      break;
    case DType::f16:
      for (int j = 0; j < n; ++j) bad |= outside(from_f16(static_cast<const std::uint16_t*>(data)[i + j]), domain);
      break;
    default:
      for (int j = 0; j < n; ++j) bad |= outside(from_bf16(static_cast<const std::uint16_t*>(data)[i + j]), domain);
  }
  return bad != 0;
}

/// Row i of [tokens][heads], as the number of its first value outside if that is below `least`.
KOKKOS_INLINE_FUNCTION void look_at_row(const TokenArray& a, std::int64_t i, int heads, int width, Domain domain,
                                        std::int64_t& least) {
  const std::int64_t at = i / heads * a.token_stride + i % heads * a.head_stride;
  if (i * width >= least || !row_outside(a.data, a.type, at, width, domain)) return;
  for (int j = 0; j < width; ++j)
    if (outside(load<double>(a.data, a.type, at + j), domain)) {
      least = i * width + j;
      return;
    }
}

constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();

}  // namespace

std::int64_t first_outside(const TokenArray& x, std::int64_t tokens, int heads, int width, Domain domain) {
  using Space = Kokkos::DefaultExecutionSpace;
  std::int64_t first = none;
  const TokenArray a = x;
  Kokkos::parallel_reduce(
      "longscan::check::domain", Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(0, tokens * heads),
      KOKKOS_LAMBDA(const std::int64_t i, std::int64_t& least) { look_at_row(a, i, heads, width, domain, least); },
      Kokkos::Min<std::int64_t>(first));
  return first == none ? -1 : first;
}

std::int64_t first_outside_on_host(const TokenArray& x, std::int64_t tokens, int heads, int width, Domain domain) {
  std::int64_t first = none;
  for (std::int64_t i = 0; i < tokens * heads && first == none; ++i) look_at_row(x, i, heads, width, domain, first);
  return first == none ? -1 : first;
}

}  // namespace longscan
