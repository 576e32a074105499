// SPDX-License-Identifier: Apache-2.0
// Solves of the delta rule over the ranks of a test.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "delta_cases.hpp"

namespace longscan {

using test::all_decays;
using test::all_inverses;
using test::all_rules;
using test::Case;
using test::Decay;
using test::Recipe;
using test::Solution;

/// Each test has all ranks, and one that solves everything alone. Every rank has all results; rank 0 judges them, since
/// a reference on each would take as many times as long. Failures must not end a test early on one rank: the others
/// would wait for it.
class DistDelta : public ::testing::Test {
 protected:
  bool judges() const { return ranks_->rank() == 0; }
  /// Solves over the ranks and compares with the reference and with one rank, to rounding.
  Solution expect_right(const Case& c, std::int64_t window = 0, double factor = 1) {
    const Solution got = test::solve(*ranks_, c, window);
    if (!judges()) return got;
    EXPECT_EQ(test::too_far(got, test::expected(c), c.state_type(), factor), "")
        << test::describe(c) << ", window " << window << ", " << ranks_->size() << " ranks";
    EXPECT_EQ(test::too_far(got, test::solve(*alone_, c), c.state_type(), factor), "") << test::describe(c);
    return got;
  }
  int size() const { return ranks_->size(); }

  std::unique_ptr<Transport> ranks_ = make_mpi_transport(), alone_ = make_single_transport();
};

/// The same, decay by decay. A suite has a class of its own: its instances are those of all its files.
class DistDeltaWith : public DistDelta, public ::testing::WithParamInterface<Decay> {
 public:
  static std::string name(const ::testing::TestParamInfo<Decay>& info) {
    return info.param == Decay::none ? "NoDecay" : info.param == Decay::head ? "HeadDecay" : "ChannelDecay";
  }
};

}  // namespace longscan
