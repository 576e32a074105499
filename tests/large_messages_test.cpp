// SPDX-License-Identifier: Apache-2.0
// Messages above 2 GiB, the largest that one MPI call takes. Runs on 2 ranks; needs 5 GiB of memory.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

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

TEST(LargeMessages, ArriveWhole) {
  const auto ranks = make_mpi_transport();
  double free = free_memory();
  ranks->all_reduce(&free, 1, Transport::Reduction::min);
  if (free < 8) GTEST_SKIP() << "only " << free << " GiB of memory are free";
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

}  // namespace
}  // namespace longscan
