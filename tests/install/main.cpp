// SPDX-License-Identifier: Apache-2.0
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <longscan/delta_rule.hpp>

int main(int argc, char* argv[]) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  float one[3] = {1, 1, 1}, v[3] = {1, 2, 3}, beta[3] = {0.5, 0.5, 0.5}, o[3] = {};
  auto alone = longscan::make_single_transport();
  longscan::DeltaRule rule(*alone, {.heads = 1, .d_key = 1, .d_value = 1}, {}, {{0, 3}});
  auto tokens = [](const float* data) { return longscan::TokenArray{data, longscan::DType::f32, 1, 1}; };
  rule.solve({0, 3}, {.q = tokens(one), .k = tokens(one), .v = tokens(v), .beta = tokens(beta)},
             {.o = {o, longscan::DType::f32, 1, 1}});
  std::printf("o = %g %g %g\n", o[0], o[1], o[2]);  // S <- S / 2 + v / 2
  return o[0] == 0.5f && o[1] == 1.25f && o[2] == 2.125f ? 0 : 1;
}
