// SPDX-License-Identifier: Apache-2.0
#pragma once
// Affine maps on one rank: apply, compose, and run a state through a chain of maps. One launch each.
#include <cstdint>

#include "core/affine.hpp"

namespace longscan {

/// out = map(x), or out = second after first.
struct AffineTask {
  std::int64_t map = 0;  ///< slot of the map, or of the second map
  std::int64_t x = 0;    ///< slot of the point, or of the first map
  std::int64_t out = 0;
};

/// Points through maps, task by task; `out` slots differ from `x` slots. Launches "longscan::affine::apply".
template <class Space, class T>
void affine_apply(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& x,
                  const AffinePoints<T>& out, const AffineTask* tasks, std::int64_t count);

/// Maps after maps. Launches "longscan::affine::compose".
template <class Space, class T>
void affine_compose(const Space& space, const AffineMaps<T>& first, const AffineMaps<T>& second,
                    const AffineMaps<T>& out, const AffineTask* tasks, std::int64_t count);

/// A chain of maps: map j in slot map + j * map_step takes point j in slot point + j * point_step to point j + 1.
struct AffineChain {
  std::int64_t map = 0, map_step = 1, point = 0, point_step = 1, length = 0;
};

/// Exclusive scan along chains: point 0 of each is given. Each chain in order, chains side by side; always S P + L
/// with the same operations, whatever the chain's length. Launches "longscan::affine::scan".
template <class Space, class T>
void affine_scan(const Space& space, const AffineMaps<T>& maps, const AffinePoints<T>& points,
                 const AffineChain* chains, std::int64_t count);

/// One step of a walk: the point at hand goes through `map` to `to`.
template <class T>
struct AffineStep {
  const T* map = nullptr;
  T* to = nullptr;
};
/// A point through maps that stand anywhere: `from` through steps first, …, first + count - 1.
template <class T>
struct AffineWalk {
  std::int64_t first = 0, count = 0;
  const T* from = nullptr;
};

/// Walks side by side, each in order; maps of the shape of `shape`, points with rows `leading` apart. The operations of
/// `affine_apply` and `affine_scan`. Launches "longscan::affine::walk".
template <class Space, class T>
void affine_walk(const Space& space, const AffineMaps<T>& shape, int leading, const AffineStep<T>* steps,
                 const AffineWalk<T>* walks, std::int64_t count);

/// Frobenius norms of A and b of the maps in slots 0 … count - 1: norms[2 i], norms[2 i + 1].
/// Launches "longscan::affine::norms".
template <class Space, class T>
void affine_norms(const Space& space, const AffineMaps<T>& maps, double* norms, std::int64_t count);

/// Frobenius norms of the points of n rows in slots 0 … count - 1. Launches "longscan::affine::norms".
template <class Space, class T>
void affine_norms(const Space& space, const AffinePoints<const T>& points, int n, double* norms, std::int64_t count);

/// How far the points in slots 0 … count - 1 are from b of the maps there: norms[2 i] = |x - b|, norms[2 i + 1] = |b|,
/// Frobenius norms. Launches "longscan::affine::norms".
template <class Space, class T>
void affine_distances(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& points, double* norms,
                      std::int64_t count);

/// Slot `map` of `to` becomes slot `out` of `from`, task by task. Launches "longscan::affine::copy".
template <class Space, class T>
void affine_copy(const Space& space, const AffineMaps<T>& from, const AffineMaps<T>& to, const AffineTask* tasks,
                 std::int64_t count);

/// out = map(0) = b, task by task; x is not looked at. Launches "longscan::affine::constants".
template <class Space, class T>
void affine_constants(const Space& space, const AffineMaps<T>& maps, const AffinePoints<T>& out,
                      const AffineTask* tasks, std::int64_t count);

}  // namespace longscan
