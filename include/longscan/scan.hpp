// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace longscan {

/// How states pass over the ranks: an exclusive scan of affine maps y = A x + b, one an element (a head, a channel).
/// The operator does not commute. p ranks, n elements, s bytes a point, m bytes a map, L maps an element and rank.
enum class ScanAlgorithm : int {
  automatic = 0,
  chain,       ///< points travel from rank to rank, in pieces; maps stay: p + pieces messages, n s bytes
  all_to_all,  ///< maps go to the rank that scans their element, points come back: 2 p messages, 2 n L m bytes
  all_gather,  ///< every rank gets all maps before its own: log2 p messages, p n L m bytes
  doubling,    ///< maps are composed with those 1, 2, 4, … ranks before: log2 p messages and compositions
  mpi          ///< MPI_Exscan with composition as its operator
};
std::string_view name_of(ScanAlgorithm);

/// What a scan moves.
struct ScanSize {
  std::int64_t elements = 1;
  std::int64_t point_bytes = 0;  ///< of one element
  std::int64_t map_bytes = 0;    ///< of one element
  std::int64_t maps = 1;         ///< L: more than one where maps must not be composed (reproducible)
};

/// Seconds; measured between neighbouring ranks, all at once.
struct ScanCosts {
  double latency = 2e-6;  ///< alpha: of a message
  double byte = 1e-10;    ///< beta: of a byte more
  double apply = 1e-5;    ///< c: of one element's A x + b
  double compose = 0;     ///< of one element's A2 A1, A2 b1 + b2; 0: by the size of the maps
  double launch = 0;      ///< of starting any such computation
  bool measured = false;
  bool shared_cores = false;  ///< ranks of a node take turns on its cores: alpha is the scheduler's
};

/// Pieces that `count` elements travel in along a chain: consecutive elements, so many each.
std::int64_t scan_piece(std::int64_t count, std::int64_t element_bytes);

/// Seconds from the last rank's being ready to every rank's having its state. Pure.
double predict(ScanAlgorithm algorithm, const ScanSize& size, int ranks, const ScanCosts& costs);

/// Which algorithm, and why.
struct ScanChoice {
  ScanAlgorithm algorithm = ScanAlgorithm::chain;
  ScanCosts costs;
  ScanSize size;
  std::string reason;
};

/// Automatic: chain, all_to_all and all_gather do the same operations in the same order, so that the choice between
/// them may follow measured costs without touching a bit of the result; where cores are shared those say nothing, and
/// it is the chain, which wakes each rank once. doubling rounds differently: it is taken by the sizes alone, where
/// nominal costs put it ahead of the others by more than a factor of two. Never with `same_bits`. Pure.
ScanChoice choose_scan(ScanAlgorithm asked, const ScanSize& size, int ranks, const ScanCosts& costs, bool same_bits);

/// Throws Error(usage) if `reproducible` cannot hold with this algorithm.
void require_reproducible_scan(ScanAlgorithm algorithm, bool reproducible);

}  // namespace longscan
