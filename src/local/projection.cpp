// SPDX-License-Identifier: Apache-2.0
#include "local/projection.hpp"

#include <algorithm>

#include "core/delta_chunk.hpp"
#include "core/device_memory.hpp"
#include "local/lanes.hpp"
#ifdef KOKKOS_ENABLE_CUDA
#include "local/cuda_blas.hpp"
#endif

namespace longscan {
namespace {

using Space = Kokkos::DefaultExecutionSpace;

#ifdef KOKKOS_ENABLE_CUDA
using Range = Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>;

/// y [tokens][rows] <- the bias, token after token.
template <class T>
void start_from_bias(const T* bias, std::int64_t rows, std::int64_t tokens, T* y) {
  Kokkos::parallel_for(
      "longscan::projection", Range(0, tokens * rows), KOKKOS_LAMBDA(const std::int64_t i) { y[i] = bias[i % rows]; });
}
/// to [size] <- from [given], and zeros.
template <class T>
void copy_padded(const T* from, std::int64_t given, std::int64_t size, T* to) {
  Kokkos::parallel_for(
      "longscan::projection", Range(0, size),
      KOKKOS_LAMBDA(const std::int64_t i) { to[i] = i < given ? from[i] : T(0); });
}
#endif

/// Tokens of one product: their inputs stay in the cache while the weights stream by.
constexpr int tokens_together = 64;

}  // namespace

template <class T>
Projection<T>::Projection(int rows, int columns, const std::vector<T>& weight, const std::vector<T>& bias)
    : rows_(rows),
      columns_(columns),
      width_(in_strips<T>(rows)),
      transposed_("longscan::projection::weight", static_cast<std::int64_t>(columns) * width_),
      bias_("longscan::projection::bias", rows) {
  const auto w = Kokkos::create_mirror_view(transposed_), b = Kokkos::create_mirror_view(bias_);
  for (int i = 0; i < rows; ++i) {
    b(i) = bias[i];
    for (int j = 0; j < columns; ++j)
      w(packed_index<T>(columns, j, i)) = weight[static_cast<std::size_t>(i) * columns + j];
  }
  Kokkos::deep_copy(transposed_, w), Kokkos::deep_copy(bias_, b);
#ifdef KOKKOS_ENABLE_CUDA
  weight_ = on_device("longscan::projection::weight", weight);
#endif
}

#ifdef KOKKOS_ENABLE_CUDA
template <class T>
void Projection<T>::apply_by_cublas(const T* x, std::int64_t tokens, T* y) const {
  constexpr std::int64_t together = 1024;  // of every product
  const std::int64_t rows = rows_, columns = columns_, rest = tokens % together, whole = tokens - rest;
  start_from_bias(bias_.data(), rows, whole, y);
  for (std::int64_t t = 0; t < whole; t += together)
    products(rows_, together, columns_, weight_.data(), Factor::by_output, x + t * columns, T(1), y + t * rows);
  if (rest == 0) return;
  reserve(x_rest_, "longscan::projection::x", together * columns);
  reserve(y_rest_, "longscan::projection::y", together * rows);
  copy_padded(x + whole * columns, rest * columns, together * columns, x_rest_.data());
  start_from_bias(bias_.data(), rows, together, y_rest_.data());
  products(rows_, together, columns_, weight_.data(), Factor::by_output, x_rest_.data(), T(1), y_rest_.data());
  copy_padded(y_rest_.data(), rest * rows, rest * rows, y + whole * rows);
}
#endif

template <class T>
void Projection<T>::apply(const T* x, std::int64_t tokens, T* y) const {
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>>;
  using Member = typename Policy::member_type;
  if (tokens == 0) return;
#ifdef KOKKOS_ENABLE_CUDA
  apply_by_cublas(x, tokens, y);
  return;
#endif
  const int rows = rows_, columns = columns_, width = width_;
  const Array transposed = transposed_, bias = bias_;
  const std::size_t bytes = sizeof(T) * tokens_together * static_cast<std::size_t>(width);
  auto policy = Policy(Space(), (tokens + tokens_together - 1) / tokens_together, is_host_space<Space> ? 1 : 256)
                    .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(bytes + 2 * row_bytes)));
  Kokkos::parallel_for(
      "longscan::projection", policy, KOKKOS_LAMBDA(const Member& member) {
        const auto work = [&](const auto& lanes) {
          T* p = static_cast<T*>(member.team_scratch(1).get_shmem_aligned(bytes, row_bytes));
          const std::int64_t first = static_cast<std::int64_t>(member.league_rank()) * tokens_together;
          const int n = static_cast<int>(tokens - first < tokens_together ? tokens - first : tokens_together);
          lanes.packed_product(n, width, columns, x + first * columns, columns, transposed.data(), p, width, false);
          lanes.sync();
          lanes.each2(n, rows, [&](int t, int i) { y[(first + t) * rows + i] = p[t * width + i] + bias(i); });
          lanes.sync();
        };
        if constexpr (is_host_space<Space>)
          work(HostLanes<T>{});
        else
          work(DeviceLanes<T, Member>{member});
      });
}

template <class T>
void Projection<T>::apply_at_once(const T* x, std::int64_t tokens, T* y) const {
#ifdef KOKKOS_ENABLE_CUDA
  constexpr std::int64_t most = std::int64_t{1} << 22;
  if (tokens > 0) start_from_bias(bias_.data(), static_cast<std::int64_t>(rows_), tokens, y);
  for (std::int64_t t = 0; t < tokens; t += most)
    products(rows_, static_cast<int>(std::min(most, tokens - t)), columns_, weight_.data(), Factor::by_output,
             x + t * columns_, T(1), y + t * rows_);
#else
  apply(x, tokens, y);
#endif
}

template class Projection<float>;
template class Projection<double>;

}  // namespace longscan
