// SPDX-License-Identifier: Apache-2.0
// Messages above 2 GiB, the largest that one MPI call takes: between 2 ranks (10 GiB of memory). Those of the scan over
// 3 ranks take 17 GiB and are tried by hand: mpirun -n 3 build/tests/large_messages_test
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "dist/exclusive_scan.hpp"
#include "longscan/transport.hpp"

namespace longscan {
namespace {

constexpr std::int64_t words = (std::int64_t{9} << 30) / 4 / 8;  // 2.25 GiB

/// Gibibytes that are free.
double free_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  double kilobytes = 0;
  while (file >> name)
    if (name == "MemAvailable:" && file >> kilobytes) break;
  return kilobytes / (1 << 20);
}

/// The same on every rank.
bool there_are(Transport& ranks, double gibibytes) {
  double free = free_memory();
  ranks.all_reduce(&free, 1, Transport::Reduction::min);
  return free >= gibibytes;
}

TEST(LargeMessages, ArriveWhole) {
  const auto ranks = make_mpi_transport();
  if (ranks->size() != 2) GTEST_SKIP() << "for 2 ranks";
  if (!there_are(*ranks, 10)) GTEST_SKIP() << "less than 10 GiB of memory are free";
  const std::unique_ptr<std::int64_t, decltype(&std::free)> memory(static_cast<std::int64_t*>(std::malloc(words * 8)),
                                                                   std::free);
  ASSERT_TRUE(memory);
  std::int64_t* data = memory.get();
  const auto fill = [&](std::int64_t seed) {
    for (std::int64_t i = 0; i < words; ++i) data[i] = i * 3 + seed;
  };
  const auto wrong = [&](std::int64_t seed) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < words; ++i) count += data[i] != i * 3 + seed;
    return count;
  };
  const int rank = ranks->rank();
  if (rank == 0) fill(1);
  if (rank < 2) {
    if (rank == 0) ranks->exchange({{1, data, words * 8}}, {});
    if (rank == 1) ranks->exchange({}, {{0, data, words * 8}});
    EXPECT_EQ(wrong(1), 0);
  }
  if (rank == 1) fill(2), ranks->send(data, words * 8, 0, 3)->wait();
  if (rank == 0) ranks->receive(data, words * 8, 1, 3);
  EXPECT_EQ(wrong(2), 0);
}

TEST(LargeMessages, AreScannedByMpi) {
  const auto ranks = make_mpi_transport();
  if (ranks->size() != 2) GTEST_SKIP() << "for 2 ranks";
  if (!there_are(*ranks, 10)) GTEST_SKIP() << "less than 10 GiB of memory are free";
  constexpr std::int64_t element = 24;  // a piece of 1 GiB does not hold a whole number of these
  std::vector<std::int64_t> mine(words / 3 * 3), result(ranks->rank() == 0 ? 0 : mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<std::int64_t>(i) * 5 + ranks->rank();
  const Transport::Operator never = [](const void*, void*, std::int64_t) {
  };  // the second of two ranks gets the first's
  ranks->exclusive_scan(mine.data(), result.data(), words / 3, element, never, false);
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < result.size(); ++i) wrong += result[i] != static_cast<std::int64_t>(i) * 5;
  EXPECT_EQ(wrong, 0);
}

/// Heads of 4 x 4096 whose states and maps have more than 2 GiB in all.
TEST(LargeMessages, AreScannedOverRanks) {
  const auto ranks = make_mpi_transport();
  if (ranks->size() != 3) GTEST_SKIP() << "for 3 ranks";
  if (!there_are(*ranks, 17)) GTEST_SKIP() << "less than 17 GiB of memory are free";
  constexpr std::int64_t heads = 32800, K = 4, V = 4096, leading = K + V + 12, point = K * V, map = K * leading;
  static_assert(heads * point * 4 > std::int64_t{1} << 31);
  const int rank = ranks->rank();
  // row r of head h becomes row r + 1, and h % 5 more
  const auto value = [](std::int64_t h, std::int64_t r) { return static_cast<float>((h + 3 * r) % 1021); };
  ScanPart<float> part;
  part.links = {rank - 1, rank < 2 ? rank + 1 : -1};
  part.count = heads, part.known.assign(heads, rank == 0 ? 1 : 0);
  part.maps = {nullptr, K, V, leading, map, true};
  DeviceArray<float> in, out, maps;
  part.in = part.out = {nullptr, V, point};
  if (rank > 0) reserve(in, "in", heads * point), part.in.data = in.data();
  if (rank < 2) reserve(out, "out", heads * point), part.out.data = out.data();
  if (rank == 0)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t r = 0; r < K; ++r) std::fill_n(out.data() + h * point + r * V, V, value(h, r));
  if (rank == 1) {
    reserve(maps, "maps", heads * map), part.maps.data = maps.data();
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t r = 0; r < K; ++r) {
        float* row = maps.data() + h * map + r * leading;
        for (std::int64_t c = 0; c < K; ++c) row[c] = r == (c + 1) % K ? 1.f : 0.f;
        std::fill_n(row + K, V, static_cast<float>(h % 5)), std::fill_n(row + K + V, leading - K - V, 0.f);
      }
  }
  for (const ScanAlgorithm algorithm : {ScanAlgorithm::chain, ScanAlgorithm::all_gather}) {
    if (rank > 0) Kokkos::deep_copy(in, -77.f);
    RankScan<float>(*ranks).run(algorithm, part);
    std::int64_t wrong = 0;
    for (std::int64_t h = 0; rank > 0 && h < heads; ++h)
      for (std::int64_t r = 0; r < K; ++r) {
        const float expected = rank == 1 ? value(h, r) : value(h, (r + K - 1) % K) + static_cast<float>(h % 5);
        const float* row = in.data() + h * point + r * V;
        for (std::int64_t c = 0; c < V; ++c) wrong += row[c] != expected;
      }
    EXPECT_EQ(wrong, 0) << name_of(algorithm) << ", rank " << rank;
  }
}

}  // namespace
}  // namespace longscan
