// SPDX-License-Identifier: Apache-2.0
#include "longscan/delta_rule.hpp"

namespace longscan {

std::string_view name_of(Variant variant) { return variant == Variant::delta ? "delta" : "dplr"; }
std::string_view name_of(Erase erase) { return erase == Erase::decayed ? "decayed" : "undecayed"; }
std::string_view name_of(Inverse inverse) {
  constexpr std::string_view names[] = {"forward", "neumann", "richardson"};
  return names[static_cast<int>(inverse)];
}

Precision arithmetic_of(Precision wanted, DType widest) {
  if (wanted != Precision::automatic) return wanted;
  return widest == DType::f64 ? Precision::f64 : widest == DType::f32 ? Precision::f32 : Precision::bf16;
}

DType state_type_of(Precision arithmetic) { return arithmetic == Precision::f64 ? DType::f64 : DType::f32; }

}  // namespace longscan
