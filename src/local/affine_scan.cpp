// SPDX-License-Identifier: Apache-2.0
#include "local/affine_scan.hpp"

#include "local/affine_rows.hpp"
#include "local/lanes.hpp"

namespace longscan {
namespace {

/// f(lanes, index) for the team's index.
template <class T, class Space, class F>
struct OnTeam {
  // without the bound a thread has a quarter of the registers
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>, Kokkos::LaunchBounds<AffineRows::team, 1>>;
  using Member = typename Policy::member_type;
  F f;
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    if constexpr (is_host_space<Space>)
      f(HostLanes<T>{}, static_cast<std::int64_t>(member.league_rank()));
    else
      f(DeviceLanes<T, Member>{member}, static_cast<std::int64_t>(member.league_rank()));
  }
};

/// Launch f(lanes, index) on a team for each index below `count`, with `scratch` bytes of shared memory on a device.
template <class T, class Space, class F>
void for_teams(const char* label, const Space& space, std::int64_t count, int elements, const F& f,
               std::size_t scratch = 0) {
  if (count == 0) return;
  using Work = OnTeam<T, Space, F>;
  const int team = is_host_space<Space> ? 1 : elements >= AffineRows::team || scratch > 0 ? AffineRows::team : 32;
  auto policy = typename Work::Policy(space, count, team);
  if (!is_host_space<Space>) policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(scratch)));
  Kokkos::parallel_for(label, policy, Work{f});
}

/// Columns that one team takes: points' columns do not depend on each other, so a device works on several blocks of
/// them at a time.
template <class Space>
struct ColumnBlocks {
  int width, count;
  explicit ColumnBlocks(int leading) {
    width = is_host_space<Space> || leading < 32 ? leading : 16;
    count = (leading + width - 1) / width;
  }
};

/// Columns [begin, end) of `from` through `count` maps, one after another; map(j), target(j): the j-th, and where its
/// result goes.
template <class T, class Lanes, class Map, class Target>
KOKKOS_FUNCTION void affine_steps(const Lanes& lanes, const AffineMaps<T>& shape, const T* from, int leading, int begin,
                                  int end, std::int64_t count, const Map& map, const Target& target) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    if (AffineRows::takes(shape) && end - begin == AffineRows::width)
      return AffineRows::run(lanes.member, shape, from, leading, begin, count, map, target);
  }
#endif
  for (std::int64_t j = 0; j < count; ++j) {
    T* to = target(j);
    affine_apply(lanes, shape, map(j), from, to, leading, begin, end);
    from = to;
  }
}

template <class T, class Space>
struct Apply {
  AffineMaps<T> maps;
  AffinePoints<const T> x;
  AffinePoints<T> out;
  const AffineTask* tasks;
  ColumnBlocks<Space> blocks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t team) const {
    const AffineTask& task = tasks[team / blocks.count];
    const int begin = static_cast<int>(team % blocks.count) * blocks.width;
    const int end = begin + blocks.width < out.leading ? begin + blocks.width : out.leading;
    affine_steps(
        lanes, maps, x.slot(task.x), out.leading, begin, end, 1,
        [&](std::int64_t) { return static_cast<const T*>(maps.slot(task.map)); },
        [&](std::int64_t) { return out.slot(task.out); });
  }
};

template <class T>
struct Compose {
  AffineMaps<T> first, second, out;
  const AffineTask* tasks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    affine_compose(lanes, out, static_cast<const T*>(first.slot(tasks[i].x)),
                   static_cast<const T*>(second.slot(tasks[i].map)), out.slot(tasks[i].out));
  }
};

template <class T, class Space>
struct Scan {
  AffineMaps<T> maps;
  AffinePoints<T> points;
  const AffineChain* chains;
  ColumnBlocks<Space> blocks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t team) const {
    const AffineChain& c = chains[team / blocks.count];
    const int begin = static_cast<int>(team % blocks.count) * blocks.width;
    const int end = begin + blocks.width < points.leading ? begin + blocks.width : points.leading;
    affine_steps(
        lanes, maps, static_cast<const T*>(points.slot(c.point)), points.leading, begin, end, c.length,
        [&](std::int64_t j) { return static_cast<const T*>(maps.slot(c.map + j * c.map_step)); },
        [&](std::int64_t j) { return points.slot(c.point + (j + 1) * c.point_step); });
  }
};

template <class T, class Space>
struct Walk {
  AffineMaps<T> shape;
  int leading;
  const AffineStep<T>* steps;
  const AffineWalk<T>* walks;
  ColumnBlocks<Space> blocks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t team) const {
    const AffineWalk<T>& w = walks[team / blocks.count];
    const int begin = static_cast<int>(team % blocks.count) * blocks.width;
    const int end = begin + blocks.width < leading ? begin + blocks.width : leading;
    affine_steps(
        lanes, shape, w.from, leading, begin, end, w.count,
        [&](std::int64_t j) { return static_cast<const T*>(steps[w.first + j].map); },
        [&](std::int64_t j) { return steps[w.first + j].to; });
  }
};

template <class T, class Space>
struct Constants {
  AffineMaps<T> maps;
  AffinePoints<T> out;
  const AffineTask* tasks;
  ColumnBlocks<Space> blocks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t team) const {
    const AffineTask& task = tasks[team / blocks.count];
    const int begin = static_cast<int>(team % blocks.count) * blocks.width;
    const int end = begin + blocks.width < out.leading ? begin + blocks.width : out.leading;
    const T* map = maps.slot(task.map);
    T* to = out.slot(task.out);
    lanes.each2(maps.n, end - begin, [&](int row, int column) {
      const int j = begin + column;
      to[row * out.leading + j] = j < maps.m ? map[row * maps.leading + maps.n + j] : T(0);
    });
  }
};

template <class T>
struct Copy {
  AffineMaps<T> from, to;
  const AffineTask* tasks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const T* source = from.slot(tasks[i].out);
    T* target = to.slot(tasks[i].map);
    lanes.each(from.n * from.leading, [&](int e) { target[e] = source[e]; });
  }
};

/// Frobenius norms of n rows in each slot: of all columns, or with `parts` = 2 of those before `split` and of the
/// others.
/// Frobenius norm of the n x width matrix with elements `at(row, column)`.
template <class Lanes, class F>
KOKKOS_FUNCTION double frobenius(const Lanes& lanes, int n, int width, const F& at) {
  constexpr int strip = 8;  // rows that a lane reads at once
  return sqrt(lanes.sum((n + strip - 1) / strip * width, [&](std::int64_t e) {
    const int row = static_cast<int>(e) / width * strip, column = static_cast<int>(e) % width;
    double sum = 0;
    LONGSCAN_UNROLL
    for (int r = 0; r < strip; ++r) {
      const double x = row + r < n ? at(row + r, column) : 0.0;
      sum += x * x;
    }
    return sum;
  }));
}

template <class T>
struct Norms {
  AffinePoints<const T> slots;
  int n, split, end, parts;
  double* norms;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const int begin = i % parts == 0 ? 0 : split, width = (parts == 2 && begin == 0 ? split : end) - begin;
    const T* slot = slots.slot(i / parts) + begin;
    const double norm =
        frobenius(lanes, n, width, [&](int row, int column) -> double { return slot[row * slots.leading + column]; });
    lanes.once([&] { norms[i] = norm; });
  }
};

template <class T>
struct Distances {
  AffineMaps<T> maps;
  AffinePoints<const T> points;
  double* norms;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const T* b = maps.data + i / 2 * maps.stride + maps.n;
    const T* x = points.slot(i / 2);
    const double of_x = i % 2 == 0 ? 1 : 0;
    const double norm = frobenius(lanes, maps.n, maps.m, [&](int row, int column) -> double {
      return b[row * maps.leading + column] - of_x * x[row * points.leading + column];
    });
    lanes.once([&] { norms[i] = norm; });
  }
};

}  // namespace

template <class Space, class T>
void affine_apply(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& x,
                  const AffinePoints<T>& out, const AffineTask* tasks, std::int64_t count) {
  const ColumnBlocks<Space> blocks(out.leading);
  for_teams<T>("longscan::affine::apply", space, count * blocks.count, maps.n * blocks.width,
               Apply<T, Space>{maps, x, out, tasks, blocks}, AffineRows::scratch_bytes(maps));
}

template <class Space, class T>
void affine_compose(const Space& space, const AffineMaps<T>& first, const AffineMaps<T>& second,
                    const AffineMaps<T>& out, const AffineTask* tasks, std::int64_t count) {
  for_teams<T>("longscan::affine::compose", space, count, out.n * (out.n + out.m),
               Compose<T>{first, second, out, tasks});
}

template <class Space, class T>
void affine_scan(const Space& space, const AffineMaps<T>& maps, const AffinePoints<T>& points,
                 const AffineChain* chains, std::int64_t count) {
  const ColumnBlocks<Space> blocks(points.leading);
  for_teams<T>("longscan::affine::scan", space, count * blocks.count, maps.n * blocks.width,
               Scan<T, Space>{maps, points, chains, blocks}, AffineRows::scratch_bytes(maps));
}

template <class Space, class T>
void affine_walk(const Space& space, const AffineMaps<T>& shape, int leading, const AffineStep<T>* steps,
                 const AffineWalk<T>* walks, std::int64_t count) {
  const ColumnBlocks<Space> blocks(leading);
  for_teams<T>("longscan::affine::walk", space, count * blocks.count, shape.n * blocks.width,
               Walk<T, Space>{shape, leading, steps, walks, blocks}, AffineRows::scratch_bytes(shape));
}

template <class Space, class T>
void affine_norms(const Space& space, const AffineMaps<T>& maps, double* norms, std::int64_t count) {
  const AffinePoints<const T> slots{maps.data, maps.leading, maps.stride};
  for_teams<T>("longscan::affine::norms", space, 2 * count, maps.n * maps.n,
               Norms<T>{slots, maps.n, maps.n, maps.n + maps.m, 2, norms});
}

template <class Space, class T>
void affine_norms(const Space& space, const AffinePoints<const T>& points, int n, double* norms, std::int64_t count) {
  for_teams<T>("longscan::affine::norms", space, count, n * points.leading,
               Norms<T>{points, n, 0, points.leading, 1, norms});
}

template <class Space, class T>
void affine_distances(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& points, double* norms,
                      std::int64_t count) {
  for_teams<T>("longscan::affine::norms", space, 2 * count, maps.n * maps.m, Distances<T>{maps, points, norms});
}

template <class Space, class T>
void affine_constants(const Space& space, const AffineMaps<T>& maps, const AffinePoints<T>& out,
                      const AffineTask* tasks, std::int64_t count) {
  const ColumnBlocks<Space> blocks(out.leading);
  for_teams<T>("longscan::affine::constants", space, count * blocks.count, maps.n * blocks.width,
               Constants<T, Space>{maps, out, tasks, blocks});
}

template <class Space, class T>
void affine_copy(const Space& space, const AffineMaps<T>& from, const AffineMaps<T>& to, const AffineTask* tasks,
                 std::int64_t count) {
  for_teams<T>("longscan::affine::copy", space, count, from.n * from.leading, Copy<T>{from, to, tasks});
}

#define LONGSCAN_INSTANTIATE(T)                                                                                        \
  template void affine_apply(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<const T>&, \
                             const AffinePoints<T>&, const AffineTask*, std::int64_t);                                 \
  template void affine_compose(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffineMaps<T>&,       \
                               const AffineMaps<T>&, const AffineTask*, std::int64_t);                                 \
  template void affine_scan(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<T>&,        \
                            const AffineChain*, std::int64_t);                                                         \
  template void affine_walk(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, int, const AffineStep<T>*,     \
                            const AffineWalk<T>*, std::int64_t);                                                       \
  template void affine_norms(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, double*, std::int64_t);       \
  template void affine_norms(const Kokkos::DefaultExecutionSpace&, const AffinePoints<const T>&, int, double*,         \
                             std::int64_t);                                                                            \
  template void affine_distances(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&,                           \
                                 const AffinePoints<const T>&, double*, std::int64_t);                                 \
  template void affine_copy(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffineMaps<T>&,          \
                            const AffineTask*, std::int64_t);                                                          \
  template void affine_constants(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<T>&,   \
                                 const AffineTask*, std::int64_t);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
