// SPDX-License-Identifier: Apache-2.0
#pragma once
// Affine maps of consecutive tokens, for blocks side by side: map of token t and block b in slot t * blocks + b
// (AffineMaps with m = 1). The same operator as affine_scan.hpp, laid out for many small blocks.
#include <cstdint>

#include "core/affine.hpp"

namespace longscan {

/// y_t = A_t y_{t-1} + b_t for t in [0, count): `y` [blocks][n] enters as y_{-1} and leaves as y_{count-1}; each y_t
/// goes to `out` [count][blocks][n] unless that is null. Launches "longscan::affine::trace".
template <class T>
void affine_trace(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, T* y, T* out);

/// folded[b] <- maps of all `count` tokens after folded[b]; folded has the maps' shape, one slot a block.
/// Launches "longscan::affine::fold".
template <class T>
void affine_fold(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t count, const AffineMaps<T>& folded);

/// Every map's A as `how` says. Launches "longscan::affine::reshape".
template <class T>
void affine_reshape(const AffineMaps<T>& maps, std::int64_t slots, Reshape how);

}  // namespace longscan
