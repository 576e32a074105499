// SPDX-License-Identifier: Apache-2.0
// What each algorithm of the scan costs, and which is taken. Pure: no messages, no launches.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "longscan/error.hpp"
#include "longscan/scan.hpp"

namespace longscan {
namespace {

int log2_up(int ranks) {
  int steps = 0;
  while ((std::int64_t{1} << steps) < ranks) ++steps;
  return steps;
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  return text;
}

/// Costs of a network and a core or GPU as they usually are, for decisions that must not depend on a measurement.
ScanCosts nominal_costs(const ScanSize& size) {
  ScanCosts costs;
  costs.apply = static_cast<double>(size.map_bytes) * 1e-10 + 1e-7;
  return costs;
}

constexpr ScanAlgorithm same_operations[] = {ScanAlgorithm::chain, ScanAlgorithm::all_to_all,
                                             ScanAlgorithm::all_gather};

}  // namespace

std::string_view name_of(ScanAlgorithm algorithm) {
  constexpr std::string_view names[] = {"auto", "chain", "alltoall", "allgather", "doubling", "mpi"};
  return names[static_cast<int>(algorithm)];
}

std::int64_t scan_piece(std::int64_t count, std::int64_t element_bytes) {
  // Large enough that a message's fixed cost is small, and at least eight pieces where there are elements for it.
  constexpr std::int64_t wanted = std::int64_t{256} << 10;
  const std::int64_t by_bytes = std::max<std::int64_t>(1, wanted / std::max<std::int64_t>(1, element_bytes));
  return std::max<std::int64_t>(1, std::min(by_bytes, (count + 7) / 8));
}

double predict(ScanAlgorithm algorithm, const ScanSize& size, int ranks, const ScanCosts& costs) {
  if (ranks < 2 || size.elements < 1) return 0;
  const auto p = static_cast<double>(ranks), n = static_cast<double>(size.elements);
  const auto s = static_cast<double>(size.point_bytes), m = static_cast<double>(size.map_bytes);
  const auto L = static_cast<double>(size.maps);
  const double steps = log2_up(ranks);
  const double compose = costs.compose > 0 ? costs.compose : costs.apply * m / s;
  // The first rank's states go to the second at once; then all learn who knows what. The other p - 2 ranks have maps.
  const double before =
      costs.latency + n * s * costs.byte + (algorithm == ScanAlgorithm::chain ? 0 : steps * costs.latency);
  if (ranks == 2) return before;
  switch (algorithm) {
    case ScanAlgorithm::chain: {
      const auto each = static_cast<double>(scan_piece(size.elements, size.point_bytes));
      const double pieces = std::ceil(n / each);
      const double travel = costs.latency + each * s * costs.byte;
      const double work = costs.launch + each * L * costs.apply;
      return before + (p - 2) * (travel + work) + (pieces - 1) * std::max(travel, work);
    }
    case ScanAlgorithm::all_to_all: {
      const double mine = std::ceil(n / p);
      return before + 2 * (p - 1) * costs.latency + (p - 2) * mine * (L * m + s) * costs.byte + costs.launch +
             (p - 2) * mine * L * costs.apply;
    }
    case ScanAlgorithm::all_gather:
      return before + steps * costs.latency + (p - 2) * n * L * m * costs.byte + costs.launch +
             (p - 2) * n * L * costs.apply;
    case ScanAlgorithm::doubling:
      return before + (steps + 1) * (costs.latency + n * m * costs.byte) + steps * (costs.launch + n * compose);
    case ScanAlgorithm::mpi:
      return before + (p - 1) * (costs.latency + n * m * costs.byte) + (p - 2) * n * compose;
    case ScanAlgorithm::automatic:
      break;
  }
  throw Error(ExitCode::internal, "no such scan");
}

ScanChoice choose_scan(ScanAlgorithm asked, const ScanSize& size, int ranks, const ScanCosts& costs, bool same_bits) {
  ScanChoice choice{asked, costs, size, "asked for"};
  if (asked != ScanAlgorithm::automatic) return choice;
  choice.algorithm = ScanAlgorithm::chain;
  if (ranks <= 2) {
    choice.reason = "one message to the next rank";
    return choice;
  }
  const ScanCosts nominal = nominal_costs(size);
  const auto best = [&](const ScanCosts& c) {
    return *std::min_element(
        std::begin(same_operations), std::end(same_operations),
        [&](ScanAlgorithm a, ScanAlgorithm b) { return predict(a, size, ranks, c) < predict(b, size, ranks, c); });
  };
  if (!same_bits &&
      2 * predict(ScanAlgorithm::doubling, size, ranks, nominal) < predict(best(nominal), size, ranks, nominal)) {
    choice.algorithm = ScanAlgorithm::doubling;
    choice.reason = "many ranks and small maps";
    return choice;
  }
  if (costs.shared_cores) {
    choice.reason = "ranks share cores, where messages take what the scheduler takes";
    return choice;
  }
  choice.algorithm = best(costs);
  choice.reason = costs.measured ? "by the model with measured costs:" : "by the model with nominal costs:";
  for (const ScanAlgorithm a : same_operations)
    choice.reason += (a == same_operations[0] ? " " : ", ") + std::string(name_of(a)) + " " +
                     milliseconds(predict(a, size, ranks, costs));
  return choice;
}

void require_reproducible_scan(ScanAlgorithm algorithm, bool reproducible) {
  if (!reproducible || (algorithm != ScanAlgorithm::doubling && algorithm != ScanAlgorithm::mpi)) return;
  throw Error(ExitCode::usage, "--reproducible cannot hold with --scan " + std::string(name_of(algorithm)) +
                                   ", which composes maps in an order that depends on the number of ranks; use auto, "
                                   "chain, alltoall or allgather");
}

}  // namespace longscan
