// SPDX-License-Identifier: Apache-2.0
// The solvers with every algorithm of the scan: the answer of one rank, and the same bits where operations are the
// same.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "delta_cases.hpp"
#include "dist/newton_layer.hpp"
#include "longscan/error.hpp"
#include "newton_cases.hpp"

namespace longscan {
namespace {

using test::Case;
using test::Decay;
using test::Recipe;
using test::Solution;

constexpr ScanAlgorithm all_algorithms[] = {ScanAlgorithm::chain,      ScanAlgorithm::all_to_all,
                                            ScanAlgorithm::all_gather, ScanAlgorithm::doubling,
                                            ScanAlgorithm::mpi,        ScanAlgorithm::automatic};

class DistScanDelta : public ::testing::Test {
 protected:
  /// Solves by every algorithm. Those without composition give the bits of the chain.
  void expect_right(Case c, std::int64_t window) {
    const bool judges = ranks_->rank() == 0;
    Solution right;
    if (judges) right = test::expected(c);
    Solution chain;
    for (const ScanAlgorithm algorithm : all_algorithms) {
      const bool composes = algorithm == ScanAlgorithm::doubling || algorithm == ScanAlgorithm::mpi;
      if (composes && c.options.reproducible) continue;
      c.options.scan = algorithm;
      const Solution got = test::solve(*ranks_, c, window);
      if (algorithm == ScanAlgorithm::chain) chain = got;
      if (!judges) continue;
      const std::string what = test::describe(c) + ", " + std::string(name_of(algorithm)) + ", window " +
                               std::to_string(window) + ", " + std::to_string(ranks_->size()) + " ranks";
      EXPECT_EQ(test::too_far(got, right, c.state_type()), "") << what;
      if (!composes && algorithm != ScanAlgorithm::automatic) {
        EXPECT_TRUE(got == chain) << what;
      }
    }
  }
  std::unique_ptr<Transport> ranks_ = make_mpi_transport(), alone_ = make_single_transport();
};

TEST_F(DistScanDelta, KeysThatNeverForget) {
  for (int heads : {1, 3, 9}) {
    Recipe r;
    r.tokens = 700, r.heads = heads, r.d_key = 10, r.d_value = 7, r.key_dimensions = 6;
    r.type = heads == 9 ? DType::f32 : DType::f64, r.initial_states = true;
    r.decay = heads == 3 ? Decay::channel : Decay::none, r.log_decay_mean = -0.001;
    expect_right(test::make_case(r), heads == 3 ? 60 : 0);
  }
}

TEST_F(DistScanDelta, MapsOfSegments) {
  for (std::int64_t segment : {40, 130}) {
    Recipe r;
    r.tokens = 700, r.heads = 3, r.d_key = 10, r.d_value = 7, r.key_dimensions = 6, r.initial_states = true;
    Case c = test::make_case(r);
    c.options.segment = segment, c.options.chunk = 16;
    expect_right(c, segment == 40 ? 120 : 0);
  }
}

TEST_F(DistScanDelta, SomeHeadsForget) {
  Recipe r;
  r.tokens = 9000, r.heads = 5, r.d_key = 4, r.d_value = 6, r.decay = Decay::head, r.log_decay_mean = -0.05;
  Case c = test::make_case(r);
  for (std::int64_t t = 0; t < r.tokens; ++t)  // heads 1 and 3 remember all
    for (int h : {1, 3}) c.log_decay.set(t, h, 0, 0), c.beta.set(t, h, 0, 1e-3);
  expect_right(c, 0);
}

TEST_F(DistScanDelta, PackedSequences) {
  Recipe r;
  r.tokens = 400, r.heads = 3, r.initial_states = true;
  for (const auto& offsets : {std::vector<std::int64_t>{0, 0, 70, 71, 71, 200, 333, 400},
                              std::vector<std::int64_t>{0, 390, 400}, std::vector<std::int64_t>{0, 150, 400, 400}}) {
    Case c = test::make_case(r);
    test::pack(c, offsets);
    expect_right(c, offsets.size() == 3 ? 40 : 0);
  }
}

TEST_F(DistScanDelta, ReproducibleBitsOfOneRank) {
  Recipe r;
  r.tokens = 9000, r.heads = 3, r.d_key = 6, r.d_value = 5, r.type = DType::f32, r.initial_states = true;
  Case c = test::make_case(r);
  c.options.reproducible = true;
  const Solution one = test::solve(*alone_, c);
  for (const ScanAlgorithm algorithm :
       {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather, ScanAlgorithm::automatic})
    for (std::int64_t window : {0, 2100}) {
      c.options.scan = algorithm;
      const Solution got = test::solve(*ranks_, c, window);
      EXPECT_TRUE(got == one) << name_of(algorithm) << ", window " << window;
      EXPECT_EQ(got.report.boundaries_forgotten, 0);
    }
  for (const ScanAlgorithm algorithm : {ScanAlgorithm::doubling, ScanAlgorithm::mpi}) {
    c.options.scan = algorithm;
    EXPECT_THROW(DeltaRule(*ranks_, c.shape, c.options, c.sequences), Error);
  }
}

/// Before rank 0 sends anything it waits until the last rank's scan is through; or, to see whether that waits for it,
/// a moment.
class Withheld final : public Transport {
 public:
  Withheld(Transport& ranks, bool until_all_are_through) : ranks_(ranks), waits_(until_all_are_through) {}
  /// On rank 0: the last rank was through before rank 0 had sent anything.
  bool overtaken() {
    if (rank() == 0 && !heard_) hear();
    return overtaken_;
  }

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  int local_rank() const override { return ranks_.local_rank(); }
  int local_size() const override { return ranks_.local_size(); }
  std::string name() const override { return ranks_.name(); }
  std::unique_ptr<Request> send(const void* data, std::int64_t bytes, int to, int tag) override {
    if (rank() == 0 && !spoken_) withhold();
    return ranks_.send(data, bytes, to, tag);
  }
  void receive(void* data, std::int64_t bytes, int from, int tag) override { ranks_.receive(data, bytes, from, tag); }
  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) override {
    ranks_.exchange(sends, receives);
  }
  void settle() override {
    ranks_.settle();
    if (rank() + 1 == size() && !spoken_) MPI_Send(nullptr, 0, MPI_BYTE, 0, tag_through, MPI_COMM_WORLD);
    spoken_ = true;
  }
  void broadcast(void* data, std::int64_t bytes, int root) override { ranks_.broadcast(data, bytes, root); }
  void all_reduce(std::int64_t* values, int count, Reduction r) override { ranks_.all_reduce(values, count, r); }
  void all_reduce(double* values, int count, Reduction r) override { ranks_.all_reduce(values, count, r); }
  void all_gather(const void* mine, std::int64_t bytes, void* all) override { ranks_.all_gather(mine, bytes, all); }
  void exclusive_scan(const void* mine, void* result, std::int64_t count, std::int64_t element_bytes,
                      const Operator& combine, bool reversed) override {
    ranks_.exclusive_scan(mine, result, count, element_bytes, combine, reversed);
  }
  void barrier() override { ranks_.barrier(); }
  std::int64_t bytes_sent() const override { return ranks_.bytes_sent(); }

 private:
  static constexpr int tag_through = 900;
  void hear() {
    MPI_Recv(nullptr, 0, MPI_BYTE, size() - 1, tag_through, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    heard_ = true;
  }
  void withhold() {
    spoken_ = true;
    int there = 0;
    if (waits_)
      hear(), there = 1;
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (!heard_) MPI_Iprobe(size() - 1, tag_through, MPI_COMM_WORLD, &there, MPI_STATUS_IGNORE);
    overtaken_ = there != 0;
  }

  Transport& ranks_;
  bool waits_, spoken_ = false, heard_ = false, overtaken_ = false;
};

/// A part that forgets hands its end on before it has heard from the rank before; with `reproducible` it waits.
TEST_F(DistScanDelta, WhoForgetsDoesNotWait) {
  const int ranks = ranks_->size();
  if (ranks < 3) return;
  Recipe r;
  r.tokens = 3000 * ranks, r.heads = 3, r.d_key = 4, r.d_value = 6, r.decay = Decay::head, r.log_decay_mean = -0.05;
  Case c = test::make_case(r);
  c.options.scan = ScanAlgorithm::chain;
  for (bool reproducible : {false, true}) {
    c.options.reproducible = reproducible;
    Withheld withheld(*ranks_, !reproducible);
    const DeltaReport report = test::solve(withheld, c).report;
    EXPECT_EQ(report.boundaries_forgotten > 0, !reproducible);
    const bool middle = ranks_->rank() > 0 && ranks_->rank() + 1 < ranks;
    if (middle) {
      EXPECT_EQ(report.known_heads, reproducible ? 0 : 3);
    }
    const bool overtaken = withheld.overtaken();
    if (ranks_->rank() == 0) {
      EXPECT_EQ(overtaken, !reproducible);
    }
  }
}

// --- Newton's carries -----------------------------------------------------------------------------------------------

/// Diagonal, 2 x 2 and dense maps, forward and backward, against the token loop on one rank.
class DistScanNewton : public ::testing::Test {
 protected:
  NewtonReport solve(Transport& ranks, const test::RandomCell& cell, const NewtonOptions& options, std::int64_t tokens,
                     std::vector<double>& h) {
    Newton newton(ranks, test::make_weights(cell), static_cast<int>(cell.inputs), options,
                  {{0, first_ < 0 ? tokens / 5 : first_, tokens}});
    const auto x = test::normals(tokens * cell.inputs, 3, 1);
    const TokenRange window{0, tokens}, part = newton.part(window);
    const std::int64_t one = cell.D * cell.layers * cell.directions;
    std::vector<double> ends(newton.runs(window).size() * one), c_ends(ends), c(part.size() * cell.directions * cell.D);
    h.assign(part.size() * cell.directions * cell.D, 0);
    NewtonData data;
    data.x = x.data() + part.begin * cell.inputs, data.x_type = DType::f64;
    data.h = h.data(), data.c = c.data(), data.h_final = ends.data(), data.c_final = c_ends.data();
    begin_ = part.begin;
    return newton.solve(window, data);
  }
  void expect_right(const test::RandomCell& cell, NewtonOptions options, std::int64_t tokens, double limit) {
    options.precision = Precision::f64;
    NewtonOptions loop = options;
    loop.method = NewtonMethod::sequential;
    std::vector<double> expected, chain, got;
    solve(*alone_, cell, loop, tokens, expected);
    for (const ScanAlgorithm algorithm : all_algorithms) {
      options.scan = algorithm;
      const NewtonReport report = solve(*ranks_, cell, options, tokens, got);
      const std::string what = std::string(cell.type) + " by " + std::string(name_of(options.method)) + " and " +
                               std::string(name_of(algorithm)) + ", " + std::to_string(cell.directions) +
                               " directions, " + std::to_string(ranks_->size()) + " ranks";
      EXPECT_TRUE(report.status == NewtonStatus::converged || report.status == NewtonStatus::exact_by_prefix ||
                  report.status == NewtonStatus::fell_back)
          << what << ": " << name_of(report.status);
      if (!report.scan.reason.empty()) {
        ++scans_;
        EXPECT_TRUE(algorithm == ScanAlgorithm::automatic || report.scan.algorithm == algorithm) << what;
      }
      double worst = 0;
      for (std::size_t i = 0; i < got.size(); ++i)
        worst = std::max(worst, std::abs(got[i] - expected[begin_ * cell.directions * cell.D + i]));
      EXPECT_LE(worst, limit) << what;
      if (algorithm == ScanAlgorithm::chain) chain = got;
      if (algorithm == ScanAlgorithm::all_to_all || algorithm == ScanAlgorithm::all_gather) {
        EXPECT_TRUE(got == chain) << what;
      }
    }
  }
  std::unique_ptr<Transport> ranks_ = make_mpi_transport(), alone_ = make_single_transport();
  std::int64_t begin_ = 0;
  int scans_ = 0;
  std::int64_t first_ = -1;  ///< tokens of the first of two sequences; -1: a fifth
};

TEST_F(DistScanNewton, FullTrajectory) {
  NewtonOptions options;
  options.method = NewtonMethod::newton;
  for (const char* type : {"paragru", "paralstm"}) {
    test::RandomCell cell{type, 20};
    cell.scale = 0.5;
    expect_right(cell, options, 300, 1e-8);
  }
  for (const char* type : {"gru", "lstm"})
    for (int directions : {1, 2}) {
      test::RandomCell cell{type, 4};
      cell.scale = 0.5, cell.directions = directions;
      expect_right(cell, options, 200, 1e-8);
    }
  EXPECT_GT(scans_, 0);
  options.method = NewtonMethod::quasi;
  expect_right({"gru", 6}, options, 200, 1e-8);
}

TEST_F(DistScanNewton, ShootingWhereMemoryIsLong) {
  for (const char* type : {"paragru", "paralstm"}) {
    test::RandomCell cell{type, 40};
    cell.scale = 3;
    NewtonOptions options;
    options.method = NewtonMethod::shooting, options.segment = 8, options.max_iterations = 1000;
    expect_right(cell, options, 1500, 0);
  }
  EXPECT_GT(scans_, 0) << "no Newton step was taken: the test shows nothing";
}

/// Newton steps go over the ranks as they would inside one, on the way that hosts take and on that of devices.
TEST_F(DistScanNewton, StepsOverRanksAreThoseOfOneRank) {
  const bool was = shoots_on_device();
  for (const char* type : {"paragru", "paralstm"})
    for (const bool device : {false, true})
      for (const std::int64_t first : {0, 700}) {
        shoots_on_device() = device;
        test::RandomCell cell{type, 24, 2, 0.5};
        cell.long_memory = true;  // several ranks long
        NewtonOptions options;
        options.precision = Precision::f64, options.method = NewtonMethod::shooting;
        options.segment = 20, options.max_iterations = 7;
        const std::int64_t tokens = 400 * ranks_->size();
        first_ = std::min(first, tokens);
        std::vector<double> chain, got;
        const std::vector<double> alone = solve(*alone_, cell, options, tokens, got).residual_history;
        for (const ScanAlgorithm algorithm : all_algorithms) {
          options.scan = algorithm;
          const NewtonReport report = solve(*ranks_, cell, options, tokens, got);
          const std::string what = std::string(type) + (device ? " as on a device, " : ", ") +
                                   std::string(name_of(algorithm)) + ", first " + std::to_string(first);
          EXPECT_FALSE(report.scan.reason.empty()) << "no Newton step was taken: " << what;
          EXPECT_TRUE(algorithm == ScanAlgorithm::automatic || report.scan.algorithm == algorithm) << what;
          for (std::size_t i = 0; i < std::min(alone.size(), report.residual_history.size()) && alone[i] > 1e-8; ++i)
            EXPECT_NEAR(report.residual_history[i], alone[i], 1e-4 * alone[i]) << what << ", pass " << i + 1;
          if (algorithm == ScanAlgorithm::chain) chain = got;
          if (algorithm == ScanAlgorithm::all_to_all || algorithm == ScanAlgorithm::all_gather) {
            EXPECT_TRUE(got == chain) << what;
          }
        }
      }
  shoots_on_device() = was;
}

}  // namespace
}  // namespace longscan
