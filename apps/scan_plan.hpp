// SPDX-License-Identifier: Apache-2.0
#pragma once
// What passing states between ranks costs, by a model. Pure: no messages, nothing measured.
#include <cstdint>
#include <string>
#include <vector>

namespace longscan {

/// Seconds. The defaults are those of an ordinary cluster's network and core.
struct ScanModel {
  double latency = 2e-6;    ///< alpha: of a message
  double byte = 1e-10;      ///< beta: of a byte more (10 GB/s)
  double multiply = 1e-10;  ///< c: of a multiplication and addition of S P + L (10 Gflop/s each)
};

/// A scan of n elements (heads, channels): points are states, maps are (P, L).
struct ScanWork {
  std::int64_t elements = 1, point_bytes = 0, map_bytes = 0;
  double apply = 0, compose = 0;  ///< multiplications of S P + L, of P1 P2 and L1 P2 + L2; one element
};

/// What each algorithm costs on p ranks, from the last rank's map being ready to every rank's knowing its state. The
/// first rank knows the state at its end and the last one has nobody to send to, so that p - 2 ranks apply maps.
///   chain      (p - 1) (alpha + beta n s / b) + (p - 2) c n apply / b + (b - 1) max(alpha + beta n s / b, c n apply /
///   b)
///              in the best number b of pieces; maps stay where they are
///   alltoall   2 (p - 1) alpha + beta (p - 1) ceil(n / p) (m + s) + c (p - 2) ceil(n / p) apply
///   allgather  log2 p alpha + beta (p - 1) n m + c (p - 2) n apply
///   doubling   log2 p (alpha + beta n m + c n compose)
///   mpi        (p - 1) (alpha + beta n m) + c (p - 2) n compose: MPI_Exscan as an unsegmented chain of maps
struct ScanCost {
  std::string algorithm;
  double seconds = 0;
};
std::vector<ScanCost> scan_costs(const ScanWork& work, int ranks, const ScanModel& model);

}  // namespace longscan
