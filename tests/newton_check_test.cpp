// SPDX-License-Identifier: Apache-2.0
// What is said about cells and weights that are wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "longscan/cells.hpp"
#include "newton_cases.hpp"

namespace longscan {
namespace {

std::string message_of(const std::function<void()>& f, ExitCode code) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

// --- check_cell

/// s0' = s0 s1 + x, s1' = w s1 - s0; the Jacobian is wrong in one place if `wrong`.
template <bool wrong>
struct Product {
  static constexpr int state = 2, inputs = 1, weights = 1;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    const T old = s[0];
    s[0] = fused(s[0], s[1], x[0]);
    s[1] = fused(w[0], s[1], -old);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T*, const T* w, const T* s, T* A) {
    A[0] = s[1], A[1] = s[0], A[2] = wrong ? T(1) : T(-1), A[3] = w[0];
  }
};

TEST(CheckCell, FindsAWrongEntry) {
  const CellCheck right = check_cell<Product<false>>();
  EXPECT_LT(right.worst, 1e-8);
  EXPECT_EQ(right.points, 200);
  EXPECT_EQ(right.kinks, 0);
  contains(message_of([] { check_cell<Product<true>>(); }, ExitCode::numerical),
           {"entry [1][0]", "written = 1,", "differences say = -", "x = ", "w = ", "s = "});
}

/// A step that remembers how often it was called.
struct Counting {
  static constexpr int state = 1, inputs = 1, weights = 1;
  static inline int calls = 0;
  template <class T>
  static void step(const T* x, const T* w, T* s) {
    s[0] = fused(w[0], s[0], x[0]) + T(++calls) * T(1e-3);
  }
  template <class T>
  static void jacobian(const T*, const T* w, const T*, T* A) {
    A[0] = w[0];
  }
};

TEST(CheckCell, FindsAStepThatIsNoFunction) {
  contains(message_of([] { check_cell<Counting>(); }, ExitCode::numerical), {"the second time", "arguments alone"});
}

struct Cut {
  static constexpr int state = 1, inputs = 1, weights = 1;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    const T y = fused(w[0], s[0], x[0]);
    s[0] = y > T(0) ? y : T(0);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* w, const T* s, T* A) {
    A[0] = fused(w[0], s[0], x[0]) > T(0) ? w[0] : T(0);
  }
};

/// The same, where every point is a kink.
struct Kink {
  static constexpr int state = 1, inputs = 1, weights = 1;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T*, const T*, T* s) {
    s[0] = s[0] > T(0) ? s[0] : T(0);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T*, const T*, const T* s, T* A) {
    A[0] = s[0] > T(0) ? T(1) : T(0);
  }
};

TEST(CheckCell, LeavesKinksOut) {
  const CellCheck check = check_cell<Cut>({.points = 2000});
  EXPECT_LT(check.worst, 1e-8);
  EXPECT_EQ(check.points + check.kinks, 2000);
  contains(message_of([] { check_cell<Kink>({.states = 0}); }, ExitCode::numerical), {"smooth at none"});
}

// --- network_shape

TEST(NetworkShape, TypeFromTheShapes) {
  for (const std::string& type : test::all_cells) {
    CellWeights weights = test::make_weights({type, 4, 3, 1, 1, 1});
    weights.type.clear();
    const NetworkShape shape = network_shape(weights, 3);
    EXPECT_EQ(shape.type, type == "rnn_relu" ? "rnn_tanh" : type);
    EXPECT_FALSE(shape.reason.empty());
    EXPECT_EQ(shape.channels, 4);
  }
  const NetworkShape deep = network_shape(test::make_weights({"lstm", 4, 3, 1, 3, 2}), 3);
  EXPECT_EQ(deep.layers, 3);
  EXPECT_EQ(deep.directions, 2);
  EXPECT_EQ(deep.state, 2);
}

TEST(NetworkShape, BothShapesAreNamed) {
  const auto fail = [](const char* type, const std::function<void(CellWeights&)>& change) {
    CellWeights weights = test::make_weights({type, 4, 3, 1, 2, 1});
    change(weights);
    return message_of([&] { network_shape(weights, 3); }, ExitCode::bad_input);
  };
  contains(fail("gru",
                [](CellWeights& w) {
                  w.tensors["weight_ih_l0"].shape = {12, 5};
                }),
           {"weight_ih_l0", "[12, 5]", "[12, 3]", "weight_hh_l0 has shape [12, 4]", "x has 3 features"});
  contains(fail("gru",
                [](CellWeights& w) {
                  w.tensors["weight_hh_l1"].shape = {12, 5};
                }),
           {"weight_hh_l1", "[12, 5]", "[12, 4]"});
  contains(fail("lstm", [](CellWeights& w) { w.tensors["bias_hh_l1"].shape = {12}; }), {"bias_hh_l1", "[12]", "[16]"});
  contains(fail("lstm", [](CellWeights& w) { w.type = "gru"; }), {"weight_hh_l0", "[16, 4]", "[12, 4]"});
  contains(fail("paralstm",
                [](CellWeights& w) {
                  w.tensors["peephole"].shape = {3, 4};
                }),
           {"peephole", "[3, 4]", "[2, 4]"});
  contains(fail("paragru", [](CellWeights& w) { w.tensors.erase("weight_ih"); }),
           {"no tensor 'weight_ih'", "recurrent"});
  contains(fail("gru", [](CellWeights& w) { w.type = "gruu"; }), {"gruu", "gru, lstm"});
  contains(fail("gru", [](CellWeights& w) { w.tensors["weight_hh_l1"].values[7] = std::nan(""); }),
           {"weight_hh_l1", "NaN at [1, 3]"});
}

TEST(NetworkShape, MissingBiasesAreZero) {
  CellWeights with = test::make_weights({"gru", 4, 3}), without = with;
  for (const char* name : {"bias_ih_l0", "bias_hh_l0"}) {
    std::fill(with.tensors[name].values.begin(), with.tensors[name].values.end(), 0.0);
    without.tensors.erase(name);
  }
  const auto alone = make_single_transport();
  const auto x = test::normals(20 * 3, 1, 1);
  std::vector<double> h[2];
  for (int i : {0, 1}) {
    NewtonOptions options;
    options.precision = Precision::f64;
    Newton newton(*alone, i ? without : with, 3, options, {{0, 20}});
    h[i].resize(20 * 4);
    NewtonData data;
    data.x = x.data(), data.x_type = DType::f64, data.h = h[i].data();
    newton.solve({0, 20}, data);
  }
  EXPECT_EQ(h[0], h[1]);
}

}  // namespace
}  // namespace longscan
