// SPDX-License-Identifier: Apache-2.0
#include "local/copy_pieces.hpp"

#include <algorithm>

#include "core/device_memory.hpp"

namespace longscan {

template <class T>
void copy_pieces(const std::vector<CopyPiece<T>>& pieces) {
  if (pieces.empty()) return;
  if constexpr (is_host_space<Kokkos::DefaultExecutionSpace>) {
    for (const CopyPiece<T>& piece : pieces) std::copy_n(piece.from, piece.n, piece.to);
  } else {
    using Policy = Kokkos::TeamPolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>;
    const DeviceArray<CopyPiece<T>> list = on_device("longscan::copy_pieces", pieces);
    Kokkos::parallel_for(
        "longscan::copy_pieces", Policy(static_cast<std::int64_t>(pieces.size()), 256),
        KOKKOS_LAMBDA(const typename Policy::member_type& team) {
          const CopyPiece<T>& piece = list(team.league_rank());
          for (std::int64_t i = team.team_rank(); i < piece.n; i += team.team_size()) piece.to[i] = piece.from[i];
        });
    Kokkos::DefaultExecutionSpace().fence();  // the list is freed on return
  }
}

template void copy_pieces(const std::vector<CopyPiece<float>>&);
template void copy_pieces(const std::vector<CopyPiece<double>>&);

}  // namespace longscan
