// SPDX-License-Identifier: Apache-2.0
// The product by matrix instructions, its lanes played by fibres that run in turn: which lane holds what is from the
// instruction set's manual (PTX ISA, mma.m16n8k8 and mma.m8n8k4), not from the code under test.
#include "local/warp_product.hpp"

#include <gtest/gtest.h>
#include <ucontext.h>

#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "core/random.hpp"

namespace longscan {
namespace {

/// 32 lanes; `meet` returns in none before all have called it.
class Fibres {
 public:
  void run(const std::function<void(int)>& lane) {
    lane_ = &lane, running_ = this;
    for (int i = 0; i < 32; ++i) {
      getcontext(&contexts_[i]);
      contexts_[i].uc_stack.ss_sp = stacks_[i].data(), contexts_[i].uc_stack.ss_size = stacks_[i].size();
      contexts_[i].uc_link = &scheduler_;
      makecontext(&contexts_[i], &begin, 0);
    }
    for (done_ = 0; done_ < 32;)
      for (now_ = 0; now_ < 32; ++now_) swapcontext(&scheduler_, &contexts_[now_]);
  }
  void meet() {
    const int me = now_;
    swapcontext(&contexts_[me], &scheduler_);
  }

 private:
  static void begin() {
    (*running_->lane_)(running_->now_);
    ++running_->done_;
  }
  static inline Fibres* running_ = nullptr;
  const std::function<void(int)>* lane_ = nullptr;
  int now_ = 0, done_ = 0;
  ucontext_t scheduler_{};
  std::array<ucontext_t, 32> contexts_;
  std::vector<std::vector<char>> stacks_{32, std::vector<char>(256 << 10)};
};

struct Instruction {
  Fibres lanes;
  float a[16][8], b[8][8];
  double wide_a[8][4], wide_b[4][8];
};

struct FibreWarp {
  int number;
  Instruction* shared;
  int lane() const { return number; }
  void sync() const {}
  static float round(float x) {
    const auto bits = bits_as<std::uint32_t>(x);
    return bits_as<float>((bits + 0x1000u) & ~0x1fffu);
  }
  void multiply(float (&c)[4], const float (&a)[4], const float (&b)[2]) const {
    const int group = number / 4, t = number % 4;
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(a[i], round(a[i]));
      shared->a[group + (i == 1 || i == 3 ? 8 : 0)][t + (i >= 2 ? 4 : 0)] = a[i];
    }
    shared->b[t][group] = b[0], shared->b[t + 4][group] = b[1];
    shared->lanes.meet();
    for (int i = 0; i < 4; ++i) {
      double sum = c[i];
      for (int k = 0; k < 8; ++k)
        sum += static_cast<double>(shared->a[group + (i >= 2 ? 8 : 0)][k]) * shared->b[k][2 * t + (i & 1)];
      c[i] = static_cast<float>(sum);
    }
    shared->lanes.meet();
  }
  void multiply(double (&c)[2], const double (&a)[1], const double (&b)[1]) const {
    const int group = number / 4, t = number % 4;
    shared->wide_a[group][t] = a[0], shared->wide_b[t][group] = b[0];
    shared->lanes.meet();
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 4; ++k) c[i] += shared->wide_a[group][k] * shared->wide_b[k][2 * t + i];
    shared->lanes.meet();
  }
};

template <class T>
std::vector<T> random_matrix(int rows, int ld, std::uint64_t seed) {
  std::vector<T> x(static_cast<std::size_t>(rows * ld));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(random_normal(seed, 0, i));
  return x;
}

template <class T>
void compare(int m, int n, int k, bool accumulate, bool rough, double tolerance) {
  const int lda = k + 8 - k % 4, ldb = n + 4, ldc = n + 8;
  const auto a = random_matrix<T>(m, lda, 1), b = random_matrix<T>(k, ldb, 2), before = random_matrix<T>(m, ldc, 3);
  std::vector<T> first;
  for (const int warps : {1, 3, 16}) {
    std::vector<T> c = before;
    Instruction shared;
    shared.lanes.run([&](int lane) {
      for (int index = 0; index < warps; ++index)
        warp_product(FibreWarp{lane, &shared}, index, warps,
                     WarpProduct<T>{m, n, k, a.data(), lda, b.data(), ldb, c.data(), ldc, accumulate, rough});
    });
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < ldc; ++j) {
        const T old = before[i * ldc + j];
        double expected = j >= n || accumulate ? old : 0, size = std::abs(expected);
        for (int p = 0; j < n && p < k; ++p) {
          const double term = static_cast<double>(a[i * lda + p]) * b[p * ldb + j];
          expected += term, size += std::abs(term);
        }
        ASSERT_NEAR(c[i * ldc + j], expected, j < n ? tolerance * size : 0)
            << m << "x" << n << "x" << k << ", " << warps << " warps, at " << i << ", " << j;
      }
    if (warps == 1) first = c;
    EXPECT_EQ(c, first) << warps << " warps";
  }
}

TEST(WarpProduct, EveryShape) {
  const int shapes[][3] = {{16, 8, 8}, {8, 8, 4}, {64, 64, 16}, {16, 128, 40}, {1, 4, 1}, {5, 12, 7}, {33, 36, 13}};
  for (const auto& [m, n, k] : shapes)
    for (const bool accumulate : {false, true}) {
      compare<float>(m, n, k, accumulate, false, 3e-7);
      compare<float>(m, n, k, accumulate, true, 1e-3);
      compare<double>(m, n, k, accumulate, false, 1e-15);
    }
}

}  // namespace
}  // namespace longscan
