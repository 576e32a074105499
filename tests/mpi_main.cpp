// SPDX-License-Identifier: Apache-2.0
// main of tests that run on several ranks: a test passes if it passes on every rank, and each exit code says so.
#include <gtest/gtest.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cstdio>

namespace {

int worst_of(int value) {
  int worst = value;
  MPI_Allreduce(&value, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return worst;
}

/// Rank 0 prints which tests run and how they end on all ranks; each rank prints its own failures.
class RankPrinter final : public ::testing::EmptyTestEventListener {
 public:
  RankPrinter() { MPI_Comm_rank(MPI_COMM_WORLD, &rank_); }

 private:
  void OnTestStart(const ::testing::TestInfo& test) override { print("RUN     ", test); }

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.passed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n%s\n", rank_, result.file_name() ? result.file_name() : "?",
                 result.line_number(), result.skipped() ? "skipped" : "failure", result.message());
    std::fflush(stderr);
  }

  void OnTestEnd(const ::testing::TestInfo& test) override {
    const bool failed = worst_of(test.result()->Failed() ? 1 : 0) != 0;
    if (failed) ++failed_;
    ++run_;
    print(failed ? " FAILED " : "      OK", test);
  }

  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    if (rank_ == 0) std::printf("%d tests ran, %d failed\n", run_, failed_);
  }

  void print(const char* what, const ::testing::TestInfo& test) const {
    if (rank_ != 0) return;
    std::printf("[ %s ] %s.%s\n", what, test.test_suite_name(), test.name());
    std::fflush(stdout);
  }

  int rank_ = 0;
  int run_ = 0;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char* argv[]) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  ::testing::InitGoogleTest(&argc, argv);
  int result = 0;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new RankPrinter);
    result = worst_of(RUN_ALL_TESTS());
  }
  MPI_Finalize();
  return result;
}
