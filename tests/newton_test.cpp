// SPDX-License-Identifier: Apache-2.0
// Nonlinear recurrences over ranks: every method beside the token loop on one rank.
#include "longscan/error.hpp"
#include "newton_solve.hpp"

namespace longscan {
namespace {

using namespace test;

TEST(Newton, TheTokenLoopOverRanks) {
  for (const std::string& type : all_cells)
    for (std::int64_t tokens : {0, 1, 2, 6, 61}) {
      expect_bits<float>({{type}, {{0, tokens}}, NewtonMethod::sequential});
      expect_bits<double>({{type, 37}, {{0, tokens}}, NewtonMethod::sequential, 9});
    }
}

TEST(Newton, ShootingHasTheBitsOfTheTokenLoop) {
  for (std::int64_t tokens = 1; tokens <= 70; ++tokens) expect_bits_of_so_many(tokens);
  for (std::int64_t tokens : {127, 1001, 3000})
    for (std::int64_t segment : {40, 300, 0})
      for (const char* type : {"paragru", "paralstm"}) {
        expect_bits<float>({{type, 17, 2}, {{0, tokens}}, NewtonMethod::shooting, 0, segment});
        expect_bits<double>({{type, 17, 2}, {{0, tokens}}, NewtonMethod::automatic, 301, segment});
      }
}

TEST(Newton, MethodsAreTheTokenLoopToRounding) {
  for (const std::string& type : all_cells)
    for (NewtonMethod method :
         {NewtonMethod::automatic, NewtonMethod::newton, NewtonMethod::quasi, NewtonMethod::elk}) {
      expect_close<float>({{type, 5, 3, 0.7}, {{0, 61}}, method});
      expect_close<double>({{type, 5, 3, 0.7}, {{0, 43}}, method, method == NewtonMethod::newton ? 7 : 0});
    }
  for (const std::string& type : all_cells) {
    expect_close<float>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::picard});
    expect_close<double>({{type, 5, 3, 0.7}, {{0, 23}}, NewtonMethod::jacobi});
  }
}

TEST(Newton, ShootingOfCellsThatMix) {
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (std::int64_t segment : {24, 300, 0}) {
      expect_close<float>({{type, 16, 3, 0.5}, {{0, 1501}}, NewtonMethod::automatic, 0, segment});
      expect_close<double>({{type, 16, 3, 0.5}, {{0, 1501}}, NewtonMethod::automatic, 333, segment});
    }
}

TEST(Newton, PackedSequencesAndEmptyOnes) {
  const Sequences sequences{{0, 0, 20, 21, 21, 21, 64, 90, 90}}, nothing{{0, 0, 0, 0}};
  for (const std::string& type : all_cells) {
    Case test;
    test.cell = {type, 5, 3, 0.7}, test.sequences = sequences, test.method = NewtonMethod::elk;
    expect_close<double>(test);
    for (std::int64_t window : {0, 5}) {
      test.window = window, test.method = NewtonMethod::sequential;
      expect_bits<double>(test);
      test.method = NewtonMethod::newton;
      expect_close<float>(test);
      test.method = NewtonMethod::automatic, test.segment = 8;
      expect_close<double>(test);
    }
    test.sequences = nothing, test.method = NewtonMethod::newton;
    expect_close<double>(test);
  }
  for (const char* type : {"paragru", "paralstm"})
    for (std::int64_t window : {0, 5, 33})
      expect_bits<float>({{type, 9}, sequences, NewtonMethod::shooting, window, 8});
}

TEST(Newton, LayersAndDirections) {
  const Sequences sequences{{0, 30, 30, 31, 75}};
  for (const char* type : {"rnn_tanh", "rnn_relu", "gru", "lstm"})
    for (int directions : {1, 2}) {
      const RandomCell cell{type, 6, 3, 0.7, 2, directions};
      expect_bits<double>({cell, sequences, NewtonMethod::sequential, directions == 1 ? 11 : 0});
      expect_close<float>({cell, sequences, NewtonMethod::automatic, 0, 8}, 5e-5);
      expect_close<double>({cell, sequences, NewtonMethod::newton});
      expect_close<double>({cell, {{0, 3}}, NewtonMethod::quasi});
    }
}

TEST(Newton, ReproducibleIsTheTokenLoop) {
  for (const std::string& type : all_cells)
    for (std::int64_t window : {0, 70}) {
      Case test{{type, 9, 3, 1}, {{0, 800}}, NewtonMethod::automatic, window};
      test.reproducible = true;
      expect_bits<float>(test);
    }
  NewtonOptions options;
  options.method = NewtonMethod::quasi, options.reproducible = true;
  EXPECT_THROW(Newton(world(), test::make_weights({"gru"}), 3, options, {{0, 4}}), Error);
}

TEST(Newton, HardAndChaoticByAuto) {
  for (double scale : {1.0, 2.0, 3.0, 5.0})
    for (const char* type : {"paragru", "paralstm"}) {
      Case test{{type, 24, 4, scale}, {{0, 6000}}};
      test.segment = 200;
      const Result<float> got = solve<float>(world(), test);
      EXPECT_TRUE(got.report.bits_of_token_loop);
      EXPECT_EQ(got.report.converged_prefix, 6000);
      expect_token_loop(test, 0, got);
      test.segment = 0, test.window = 700;
      expect_bits<double>(test);
    }
  for (double scale : {2.0, 4.0})
    for (const char* type : {"rnn_tanh", "gru", "lstm"}) {
      Case test{{type, 24, 4, scale}, {{0, 3000}}};
      test.segment = 200;
      const Result<double> got = solve<double>(world(), test);
      if (scale > 3 && type[0] != 'l') {
        EXPECT_EQ(got.report.status, NewtonStatus::fell_back) << type;
        EXPECT_GT(got.report.lyapunov, 0) << type;
      }
      expect_token_loop(test, got.report.bits_of_token_loop ? 0 : 1e-9, got);
    }
}

void expect_overflow_found() {
  // h' = relu(3 h + …) grows threefold a token
  const std::int64_t tokens = 300;
  CellWeights weights = test::make_weights({"rnn_relu", 2, 1});
  weights.tensors["weight_hh_l0"].values = {3, 0, 0, 3};
  weights.tensors["weight_ih_l0"].values = {1, 1};
  std::vector<float> x(tokens, 1.0f), h(tokens * 2);
  float state = 0;
  std::int64_t bad = 0;
  const auto bias = weights.tensors["bias_ih_l0"].values[0] + weights.tensors["bias_hh_l0"].values[0];
  for (; std::isfinite(state); ++bad) state = 3 * state + 1 + static_cast<float>(bias);
  for (NewtonMethod method : {NewtonMethod::automatic, NewtonMethod::sequential, NewtonMethod::newton,
                              NewtonMethod::quasi, NewtonMethod::jacobi}) {
    NewtonOptions options;
    options.method = method, options.segment = 20, options.max_iterations = 2 * tokens;
    Newton newton(world(), weights, 1, options, {{0, tokens}});
    NewtonData data;
    data.x = x.data(), data.h = h.data();
    const NewtonReport report = newton.solve({0, tokens}, data);
    EXPECT_EQ(report.status, NewtonStatus::non_finite) << name_of(method);
    EXPECT_NEAR(static_cast<double>(report.first_bad_token), static_cast<double>(bad - 1), 1) << name_of(method);
  }
}
TEST(Newton, OverflowIsFound) { expect_overflow_found(); }
TEST_F(AsOnADevice, OverflowIsFound) { expect_overflow_found(); }

}  // namespace
}  // namespace longscan
