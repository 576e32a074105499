// SPDX-License-Identifier: Apache-2.0
// Fails on rank 1 alone; tests/CMakeLists.txt checks that this is seen.
#include <gtest/gtest.h>
#include <mpi.h>

namespace {

TEST(Harness, OnlyRank1Fails) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  EXPECT_NE(rank, 1);
}

TEST(Harness, NothingFails) {}

}  // namespace
