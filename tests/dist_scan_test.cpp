// SPDX-License-Identifier: Apache-2.0
// The exclusive scan over ranks, all algorithms against walking through all maps one by one. Runs on 1 to 16 ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "core/random.hpp"
#include "dist/exclusive_scan.hpp"
#include "local/affine_scan.hpp"
#include "local/lanes.hpp"
#include "longscan/error.hpp"
#include "longscan/transport.hpp"

namespace longscan {
namespace {

constexpr ScanAlgorithm all_algorithms[] = {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather,
                                            ScanAlgorithm::doubling, ScanAlgorithm::mpi};
constexpr ScanAlgorithm same_bits[] = {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather};

/// A scan that every rank knows all of. Numbers are functions of the seed and the place.
template <class T>
struct Whole {
  int ranks = 1;
  std::uint64_t seed = 1;
  std::int64_t count = 1;
  int n = 1, m = 1;
  bool padded = false;
  bool exact = true;    ///< signed permutations and small integers: no rounding, and they do not commute
  int cut_every = 0;    ///< about one boundary in so many passes no state; 0: none
  int known_every = 0;  ///< about one element in so many is known
  int most_maps = 1;    ///< of an element and rank
  bool reversed = false;

  std::uint64_t bits(int stream, std::int64_t at) const { return random_bits(seed, stream, at); }
  int leading_map() const { return padded ? (n + m + 15) / 16 * 16 : n + m; }
  int leading_point() const { return padded ? (m + 15) / 16 * 16 : m; }
  std::int64_t map_size() const { return static_cast<std::int64_t>(n) * leading_map(); }
  std::int64_t point_size() const { return static_cast<std::int64_t>(n) * leading_point(); }
  // places: ranks in the order of the states
  bool receives(int place) const { return place > 0 && !(cut_every > 0 && bits(1, place) % cut_every == 0); }
  bool sends(int place) const { return place + 1 < ranks && receives(place + 1); }
  bool known(int place, std::int64_t i) const {
    return !receives(place) || (known_every > 0 && bits(2, place * count + i) % known_every == 0);
  }
  std::int64_t each(int place) const { return 1 + static_cast<std::int64_t>(bits(3, place) % most_maps); }
  T number(int stream, std::int64_t at) const {
    return exact ? static_cast<T>(static_cast<int>(bits(stream, at) % 7) - 3)
                 : static_cast<T>(random_normal(seed, stream, at));
  }
  std::vector<T> point(int place, std::int64_t i) const {  // known
    std::vector<T> x(point_size(), T(0));
    for (int r = 0; r < n; ++r)
      for (int c = 0; c < m; ++c) x[r * leading_point() + c] = number(4, ((place * count + i) * n + r) * m + c);
    return x;
  }
  std::vector<T> map(int place, std::int64_t i, std::int64_t j) const {
    const std::int64_t at = (place * count + i) * 64 + j;
    std::vector<T> a(map_size(), T(0));
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    for (int r = n - 1; r > 0; --r) std::swap(order[r], order[bits(5, at * 64 + r) % (r + 1)]);
    for (int r = 0; r < n; ++r) {
      if (exact)
        a[r * leading_map() + order[r]] = bits(6, at * 64 + r) % 2 == 0 ? T(1) : T(-1);
      else
        for (int c = 0; c < n; ++c)
          a[r * leading_map() + c] = static_cast<T>(0.9 / std::sqrt(n)) * number(7, (at * n + r) * n + c);
      for (int c = 0; c < m; ++c) a[r * leading_map() + n + c] = number(8, (at * n + r) * m + c);
    }
    return a;
  }
  AffineMaps<T> shape() const { return {nullptr, n, m, leading_map(), map_size(), padded}; }
  /// What `place` starts element i from; `apply` as the solvers do.
  std::vector<T> in(int place, std::int64_t i) const {
    int start = place - 1;
    while (!known(start, i)) --start;
    std::vector<T> x = point(start, i), y(point_size());
    for (int q = start + 1; q < place; ++q)
      for (std::int64_t j = 0; j < each(q); ++j) {
        const std::vector<T> a = map(q, i, j);
        affine_apply(HostLanes<T>{}, shape(), a.data(), x.data(), y.data(), leading_point());
        x.swap(y);
      }
    return x;
  }
};

class DistScan : public ::testing::Test {
 protected:
  int size() const { return ranks_->size(); }

  /// This rank's states before its part, by `algorithm`; those of elements that it does not receive stay -77.
  template <class T>
  std::vector<T> solve(const Whole<T>& w, ScanAlgorithm algorithm, std::vector<T>* out = nullptr,
                       std::optional<int> poisoned = {}) {
    const int place = w.reversed ? size() - 1 - ranks_->rank() : ranks_->rank(), next = w.reversed ? -1 : 1;
    const std::int64_t each = w.each(place);
    std::vector<T> maps, points(w.count * w.point_size(), T(0));
    for (std::int64_t i = 0; i < w.count; ++i)
      for (std::int64_t j = 0; j < each; ++j) {
        auto a = w.map(place, i, j);
        if (poisoned && *poisoned == place && i == 0) a[0] = std::numeric_limits<T>::quiet_NaN();
        maps.insert(maps.end(), a.begin(), a.end());
      }
    ScanPart<T> part;
    part.links = {w.receives(place) ? ranks_->rank() - next : -1, w.sends(place) ? ranks_->rank() + next : -1,
                  w.reversed};
    part.count = w.count, part.known.assign(w.count, 0);
    for (std::int64_t i = 0; i < w.count; ++i)
      if (w.known(place, i)) {
        const auto x = w.point(place, i);
        std::copy(x.begin(), x.end(), points.begin() + i * w.point_size());
        part.known[i] = 1;
      }
    const DeviceArray<T> device_maps = on_device("maps", maps), device_out = on_device("out", points);
    const DeviceArray<T> device_in = on_device("in", std::vector<T>(w.count * w.point_size(), T(-77)));
    part.maps = w.shape(), part.maps.data = device_maps.data();
    part.element_step = each, part.each = each;
    part.in = {device_in.data(), w.leading_point(), w.point_size()}, part.out = part.in,
    part.out.data = device_out.data();
    RankScan<T>(*ranks_).run(algorithm, part);
    std::vector<T> in(w.count * w.point_size());
    copy_to_host<T>(device_in.data(), static_cast<std::int64_t>(in.size()), in.data());
    if (out)
      out->resize(in.size()), copy_to_host<T>(device_out.data(), static_cast<std::int64_t>(in.size()), out->data());
    return in;
  }

  template <class T>
  std::vector<T> expected(const Whole<T>& w) const {
    const int place = w.reversed ? size() - 1 - ranks_->rank() : ranks_->rank();
    std::vector<T> all;
    for (std::int64_t i = 0; i < w.count; ++i) {
      const auto x = w.receives(place) ? w.in(place, i) : std::vector<T>(w.point_size(), T(-77));
      all.insert(all.end(), x.begin(), x.end());
    }
    return all;
  }

  std::unique_ptr<Transport> ranks_ = make_mpi_transport();
};

template <class T>
std::string text(const Whole<T>& w, ScanAlgorithm algorithm) {
  return std::string(name_of(algorithm)) + ", " + std::to_string(w.count) + " elements of " + std::to_string(w.n) +
         " x " + std::to_string(w.m) + ", seed " + std::to_string(w.seed) + ", cut " + std::to_string(w.cut_every) +
         ", known " + std::to_string(w.known_every) + ", maps " + std::to_string(w.most_maps) +
         (w.reversed ? ", reversed" : "") + ", " + std::to_string(w.ranks) + " ranks";
}

/// Heads fewer and more than ranks, K != V, diagonal, blocks of two, dense; one sequence, cut ones, known states.
TEST_F(DistScan, EveryAlgorithmWalksThroughAllMaps) {
  struct Shape {
    std::int64_t count;
    int n, m;
    bool padded;
  };
  for (const Shape& s : {Shape{1, 3, 2, true}, Shape{3, 5, 18, true}, Shape{20, 17, 3, true}, Shape{33, 1, 1, false},
                         Shape{70, 2, 1, false}, Shape{1, 9, 1, false}})
    for (int cut : {0, 3})
      for (int known : {0, 4, 1})
        for (int most : {1, 3})
          for (bool reversed : {false, true}) {
            Whole<double> w{size(), static_cast<std::uint64_t>(s.n + most), s.count, s.n, s.m, s.padded};
            w.cut_every = cut, w.known_every = known, w.most_maps = most, w.reversed = reversed;
            const auto right = expected(w);
            for (const ScanAlgorithm algorithm : all_algorithms) {
              if (most > 1 && (algorithm == ScanAlgorithm::doubling || algorithm == ScanAlgorithm::mpi)) continue;
              EXPECT_EQ(solve(w, algorithm), right) << text(w, algorithm);
            }
          }
}

TEST_F(DistScan, AnyLinksInFloat) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    Whole<float> w{size(), seed, static_cast<std::int64_t>(1 + seed * 3 % 11), 4, 3, seed % 2 == 0};
    w.cut_every = static_cast<int>(seed % 4) * 2, w.known_every = static_cast<int>(seed % 5) * 2;
    const auto right = expected(w);
    for (const ScanAlgorithm algorithm : all_algorithms) EXPECT_EQ(solve(w, algorithm), right) << text(w, algorithm);
  }
}

TEST_F(DistScan, TheSameOperationsGiveTheSameBits) {
  for (int most : {1, 4}) {
    Whole<float> w{size(), 5, 6, 24, 16, true};
    w.exact = false, w.most_maps = most, w.known_every = 7;
    const auto right = expected(w);
    for (const ScanAlgorithm algorithm : same_bits) EXPECT_EQ(solve(w, algorithm), right) << text(w, algorithm);
    if (most > 1) continue;
    for (const ScanAlgorithm algorithm : {ScanAlgorithm::doubling, ScanAlgorithm::mpi}) {
      const auto got = solve(w, algorithm);
      double worst = 0;
      for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(double{got[i]} - right[i]));
      EXPECT_LT(worst, 1e-4) << text(w, algorithm);
    }
  }
}

TEST_F(DistScan, ChainLeavesTheStatesAfterThePart) {
  Whole<double> w{size(), 3, 9, 3, 2, true};
  w.known_every = 5, w.most_maps = 3;
  std::vector<double> out;
  solve(w, ScanAlgorithm::chain, &out);
  const int place = ranks_->rank();
  if (!w.sends(place)) return;
  Whole<double> longer = w;  // what the next rank starts from
  for (std::int64_t i = 0; i < w.count; ++i) {
    const auto x = longer.in(place + 1, i);
    EXPECT_TRUE(std::equal(x.begin(), x.end(), out.begin() + i * w.point_size())) << "element " << i;
  }
}

/// A map that is not finite ends at the next known state: nothing is multiplied by a zero that stands for "known".
TEST_F(DistScan, ABadMapStopsAtAKnownState) {
  if (size() < 4) return;
  Whole<double> w{size(), 9, 2, 3, 2, true};
  int poisoned = -1;
  for (w.seed = 1; poisoned < 0 && w.seed < 1000; ++w.seed) {
    w.known_every = 3;
    for (int q = 1; q + 2 < size() && poisoned < 0; ++q)
      if (!w.known(q, 0) && w.known(q + 1, 0)) poisoned = q;
    if (poisoned >= 0) break;
  }
  ASSERT_GE(poisoned, 0);
  for (const ScanAlgorithm algorithm : all_algorithms) {
    const auto got = solve<double>(w, algorithm, nullptr, poisoned), right = expected(w);
    if (ranks_->rank() == poisoned + 1)
      EXPECT_TRUE(std::isnan(got[0]) || std::isnan(got[w.leading_point()])) << text(w, algorithm);
    else
      EXPECT_EQ(got, right) << text(w, algorithm);
  }
}

/// Where all is known, a rank has what it needs as soon as the rank before it has spoken: rank 0 says nothing before
/// the last rank is through.
TEST_F(DistScan, NobodyWaitsForARankFurtherBack) {
  if (size() < 3) return;
  constexpr int tag = 900;
  Whole<double> w{size(), 1, 4, 64, 64, true};
  w.known_every = 1;
  char word = 0;
  if (ranks_->rank() == 0) ranks_->receive(&word, 1, size() - 1, tag);
  const auto got = solve(w, ScanAlgorithm::chain);
  if (ranks_->rank() == size() - 1) ranks_->send(&word, 1, 0, tag)->wait();
  EXPECT_EQ(got, expected(w));
}

TEST_F(DistScan, TransfersOfManyRanksAtOnce) {
  const int p = size(), rank = ranks_->rank();
  std::vector<std::vector<char>> out(p), in(p);
  std::vector<Transport::Transfer> sends, receives;
  for (int to = 0; to < p; ++to) {
    out[to].assign(to == rank ? 0 : 1000 * (to + rank), static_cast<char>(rank * 16 + to));
    in[to].assign(out[to].size(), 0);
    if (to == rank) continue;
    sends.push_back({to, out[to].data(), static_cast<std::int64_t>(out[to].size())});
    receives.push_back({to, in[to].data(), static_cast<std::int64_t>(in[to].size())});
  }
  ranks_->exchange(sends, receives);
  for (int from = 0; from < p; ++from)
    EXPECT_EQ(std::count(in[from].begin(), in[from].end(), static_cast<char>(from * 16 + rank)),
              static_cast<std::int64_t>(in[from].size()));
  std::vector<std::int64_t> all(2 * p);
  const std::int64_t mine[] = {rank, rank * rank};
  ranks_->all_gather(mine, sizeof mine, all.data());
  for (int from = 0; from < p; ++from) EXPECT_EQ(all[2 * from + 1], from * from);
}

TEST_F(DistScan, CostsAreMeasuredAndTheSameEverywhere) {
  Whole<float> w{size(), 1, 4, 16, 16, true};
  ScanPart<float> part;
  part.count = 4, part.maps = w.shape(), part.in = {nullptr, w.leading_point(), w.point_size()};
  const ScanCosts costs = measure_scan(*ranks_, part, true);
  EXPECT_TRUE(costs.measured);
  EXPECT_GT(costs.apply, 0);
  EXPECT_GT(costs.compose, 0);
  double same[] = {costs.latency, costs.byte, costs.apply, costs.launch}, least[4];
  std::copy(same, same + 4, least);
  ranks_->all_reduce(least, 4, Transport::Reduction::min);
  EXPECT_TRUE(std::equal(same, same + 4, least));
  ScanPlan plan(ScanAlgorithm::automatic, false);
  const ScanAlgorithm chosen = plan.choose(*ranks_, part);
  std::int64_t number = static_cast<std::int64_t>(chosen), most = number;
  ranks_->all_reduce(&most, 1, Transport::Reduction::max);
  EXPECT_EQ(number, most);
  if (size() <= 2) {
    EXPECT_EQ(chosen, ScanAlgorithm::chain);
  }
}

// --- the choice, without messages -----------------------------------------------------------------------------------

TEST(ScanModel, ChoosesByCosts) {
  ScanCosts costs;
  costs.measured = true;
  const ScanSize heads{16, 128 * 128 * 4, 128 * 256 * 4, 1};
  const auto choose = [&](const ScanSize& size, int ranks, bool bits = false) {
    return choose_scan(ScanAlgorithm::automatic, size, ranks, costs, bits).algorithm;
  };
  EXPECT_EQ(choose(heads, 2), ScanAlgorithm::chain);
  costs.apply = 4e-6, costs.latency = 2e-6, costs.byte = 1e-10;
  EXPECT_EQ(choose(heads, 4), ScanAlgorithm::chain);
  EXPECT_NE(choose(heads, 1024), ScanAlgorithm::chain);
  // many ranks, small maps: composing them is worth it; not where bits must be the same
  const ScanSize diagonal{64, 4, 8, 1};
  EXPECT_EQ(choose(diagonal, 4096), ScanAlgorithm::doubling);
  EXPECT_NE(choose(diagonal, 4096, true), ScanAlgorithm::doubling);
  EXPECT_NE(choose(diagonal, 4096, true), ScanAlgorithm::chain);
  costs.shared_cores = true;
  EXPECT_EQ(choose(diagonal, 4096, true), ScanAlgorithm::chain);
  costs.shared_cores = false;
  // doubling is a matter of sizes, not of what was measured
  costs.apply = 1;
  EXPECT_EQ(choose(diagonal, 4096), ScanAlgorithm::doubling);
  for (const ScanAlgorithm asked : all_algorithms)
    EXPECT_EQ(choose_scan(asked, heads, 7, costs, false).algorithm, asked);
}

TEST(ScanModel, GrowsWithWhatItMoves) {
  const ScanCosts costs;
  for (const ScanAlgorithm a : all_algorithms)
    for (int ranks : {2, 3, 8, 100}) {
      const ScanSize small{8, 1000, 2000, 1}, large{8, 100000, 200000, 1}, more{64, 1000, 2000, 1};
      EXPECT_EQ(predict(a, small, 1, costs), 0);
      EXPECT_GT(predict(a, small, ranks, costs), 0);
      EXPECT_LT(predict(a, small, ranks, costs), predict(a, large, ranks, costs));
      EXPECT_LE(predict(a, small, ranks, costs), predict(a, more, ranks, costs));
      EXPECT_LE(predict(a, small, ranks, costs), predict(a, small, 2 * ranks, costs));
    }
}

TEST(ScanModel, ComposingIsNotReproducible) {
  for (const ScanAlgorithm a : {ScanAlgorithm::doubling, ScanAlgorithm::mpi}) {
    EXPECT_THROW(require_reproducible_scan(a, true), Error);
    EXPECT_NO_THROW(require_reproducible_scan(a, false));
  }
  for (const ScanAlgorithm a : same_bits) EXPECT_NO_THROW(require_reproducible_scan(a, true));
  EXPECT_NO_THROW(require_reproducible_scan(ScanAlgorithm::automatic, true));
}

TEST(ScanModel, PiecesMakeAPipeline) {
  for (std::int64_t count : {1, 2, 8, 9, 100, 100000})
    for (std::int64_t bytes : {std::int64_t{1}, std::int64_t{65536}, std::int64_t{1} << 20, std::int64_t{1} << 33}) {
      const std::int64_t each = scan_piece(count, bytes);
      EXPECT_GE(each, 1);
      EXPECT_GE((count + each - 1) / each, std::min<std::int64_t>(count, 5));
    }
}

}  // namespace
}  // namespace longscan
