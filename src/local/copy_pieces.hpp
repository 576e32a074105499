// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies of many pieces of memory in one launch: what messages are packed and unpacked with.
#include <cstdint>
#include <vector>

#include "core/portable.hpp"

namespace longscan {

template <class T>
struct CopyPiece {
  const T* from = nullptr;
  T* to = nullptr;
  std::int64_t n = 0;
};

/// Pieces in memory that kernels reach; they do not overlap. Launches "longscan::copy_pieces" where that is not the
/// host's memory; takes the list to the device and frees it, and so waits.
template <class T>
void copy_pieces(const std::vector<CopyPiece<T>>& pieces);

}  // namespace longscan
