// SPDX-License-Identifier: Apache-2.0
#include "local/sweep_steps.hpp"

namespace longscan {

SweepVerdict sum_up(const SweepVerdict* verdicts, std::int64_t slots, std::int64_t channels, std::int64_t first) {
  using Range = Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  using First = Kokkos::Min<std::int64_t>;
  SweepVerdict all;
  const std::int64_t begin = first * channels;
  Kokkos::parallel_reduce(
      "longscan::sweep::verdict", Range(0, slots * channels),
      KOKKOS_LAMBDA(const std::int64_t i, double& squares, double& worst, std::int64_t& wrong, std::int64_t& beyond,
                    std::int64_t& lost, std::int64_t& bad) {
        const SweepVerdict v = verdicts[i];
        squares += v.squares;
        bad = v.bad < bad ? v.bad : bad;
        if (i < begin) return;
        worst = v.worst > worst ? v.worst : worst;
        wrong = v.wrong < wrong ? v.wrong : wrong, beyond = v.beyond < beyond ? v.beyond : beyond;
        lost = v.lost < lost ? v.lost : lost;
      },
      Kokkos::Sum<double>(all.squares), Kokkos::Max<double>(all.worst), First(all.wrong), First(all.beyond),
      First(all.lost), First(all.bad));
  all.worst = all.worst > 0 ? all.worst : 0;  // what the reduction starts from is none
  return all;
}

}  // namespace longscan
