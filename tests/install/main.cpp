// SPDX-License-Identifier: Apache-2.0
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <longscan/cells.hpp>
#include <longscan/delta_rule.hpp>

/// A cell of one's own: s' = s / 2 + x.
struct Half {
  static constexpr int state = 1, inputs = 1, weights = 1;
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    s[0] = longscan::fused(w[0], s[0], x[0]);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T*, const T* w, const T*, T* A) {
    A[0] = w[0];
  }
};

int main(int argc, char* argv[]) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  auto alone = longscan::make_single_transport();

  float one[3] = {1, 1, 1}, v[3] = {1, 2, 3}, beta[3] = {0.5, 0.5, 0.5}, o[3] = {};
  longscan::DeltaRule rule(*alone, {.heads = 1, .d_key = 1, .d_value = 1}, {}, {{0, 3}});
  auto tokens = [](const float* data) { return longscan::TokenArray{data, longscan::DType::f32, 1, 1}; };
  rule.solve({0, 3}, {.q = tokens(one), .k = tokens(one), .v = tokens(v), .beta = tokens(beta)},
             {.o = {o, longscan::DType::f32, 1, 1}});
  std::printf("o = %g %g %g\n", o[0], o[1], o[2]);  // S <- S / 2 + v / 2

  using Values = Kokkos::View<float*>;  // where kernels run
  const Values half("half", 1), x("x", 3), states("states", 3);
  Kokkos::deep_copy(half, 0.5f);
  Kokkos::deep_copy(x, Kokkos::View<float*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(v, 3));
  longscan::check_cell<Half>();
  longscan::solve_cells<Half, float>(*alone, 1, half.data(), {{0, 3}}, {x.data(), states.data()});
  const auto s = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), states);
  std::printf("s = %g %g %g\n", s[0], s[1], s[2]);
  const bool delta = o[0] == 0.5f && o[1] == 1.25f && o[2] == 2.125f, cell = s[0] == 1 && s[1] == 2.5f && s[2] == 4.25f;
  return delta && cell ? 0 : 1;
}
