// SPDX-License-Identifier: Apache-2.0
#include "longscan/types.hpp"

namespace longscan {

std::string_view name_of(DType type) {
  constexpr std::string_view names[] = {"f64", "f32", "f16", "bf16"};
  return names[static_cast<int>(type)];
}

std::string_view name_of(Precision precision) {
  constexpr std::string_view names[] = {"auto", "f64", "f32", "bf16"};
  return names[static_cast<int>(precision)];
}

}  // namespace longscan
