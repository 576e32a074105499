// SPDX-License-Identifier: Apache-2.0
#include "apps/scan_plan.hpp"

#include <algorithm>
#include <cmath>

namespace longscan {

std::vector<ScanCost> scan_costs(const ScanWork& w, int ranks, const ScanModel& model) {
  const double p = ranks, n = static_cast<double>(w.elements), s = static_cast<double>(w.point_bytes),
               m = static_cast<double>(w.map_bytes), apply = model.multiply * w.apply,
               compose = model.multiply * w.compose;
  if (ranks < 2) return {{"none", 0}};
  const double steps = std::ceil(std::log2(p)), mine = std::ceil(n / p);
  double chain = 1e300;
  for (double pieces = 1; pieces <= std::max(1.0, n) && pieces <= 64; pieces *= 2) {
    const double travel = model.latency + model.byte * n * s / pieces, work = n * apply / pieces;
    chain =
        std::min(chain, (p - 1) * travel + (p - 2) * work + (pieces - 1) * (p > 2 ? std::max(travel, work) : travel));
  }
  return {{"chain", chain},
          {"alltoall", 2 * (p - 1) * model.latency + model.byte * (p - 1) * mine * (m + s) + mine * (p - 2) * apply},
          {"allgather", steps * model.latency + model.byte * (p - 1) * n * m + (p - 2) * n * apply},
          {"doubling", steps * (model.latency + model.byte * n * m + n * compose)},
          {"mpi", (p - 1) * (model.latency + model.byte * n * m) + (p - 2) * n * compose}};
}

}  // namespace longscan
