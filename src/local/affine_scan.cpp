// SPDX-License-Identifier: Apache-2.0
#include "local/affine_scan.hpp"

#include "local/lanes.hpp"

namespace longscan {
namespace {

/// f(lanes, index) for the team's index.
template <class T, class Space, class F>
struct OnTeam {
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>>;
  using Member = typename Policy::member_type;
  F f;
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    if constexpr (is_host_space<Space>)
      f(HostLanes<T>{}, static_cast<std::int64_t>(member.league_rank()));
    else
      f(DeviceLanes<T, Member>{member}, static_cast<std::int64_t>(member.league_rank()));
  }
};

/// Launch f(lanes, index) on a team for each index below `count`.
template <class T, class Space, class F>
void for_teams(const char* label, const Space& space, std::int64_t count, int elements, const F& f) {
  if (count == 0) return;
  using Work = OnTeam<T, Space, F>;
  const int team = is_host_space<Space> ? 1 : elements >= 256 ? 256 : 32;
  Kokkos::parallel_for(label, typename Work::Policy(space, count, team), Work{f});
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
    affine_apply(lanes, maps, static_cast<const T*>(maps.slot(task.map)), x.slot(task.x), out.slot(task.out),
                 out.leading, begin, end);
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
    for (std::int64_t j = 0; j < c.length; ++j)
      affine_apply(lanes, maps, static_cast<const T*>(maps.slot(c.map + j * c.map_step)),
                   static_cast<const T*>(points.slot(c.point + j * c.point_step)),
                   points.slot(c.point + (j + 1) * c.point_step), points.leading, begin, end);
  }
};

template <class T>
struct Walk {
  AffineMaps<T> shape;
  int leading;
  const AffineStep<T>* steps;
  const AffineWalk<T>* walks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const AffineWalk<T>& w = walks[i];
    const T* from = w.from;
    for (std::int64_t j = w.first; j < w.first + w.count; ++j) {
      affine_apply(lanes, shape, steps[j].map, from, steps[j].to, leading);
      from = steps[j].to;
    }
  }
};

template <class T>
struct Constants {
  AffineMaps<T> maps;
  AffinePoints<T> out;
  const AffineTask* tasks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const T* map = maps.slot(tasks[i].map);
    T* to = out.slot(tasks[i].out);
    lanes.each2(maps.n, out.leading, [&](int row, int j) {
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

/// norms[i * step] = Frobenius norm of columns [begin, end) of n rows in slot i.
template <class T>
struct Norms {
  AffinePoints<const T> slots;
  int n, begin, end;
  double* norms;
  int step;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const T* slot = slots.slot(i);
    const int width = end - begin;
    const double squares = lanes.sum(static_cast<std::int64_t>(n) * width, [&](std::int64_t e) {
      const double x = slot[e / width * slots.leading + begin + e % width];
      return x * x;
    });
    lanes.once([&] { norms[i * step] = sqrt(squares); });
  }
};

}  // namespace

template <class Space, class T>
void affine_apply(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& x,
                  const AffinePoints<T>& out, const AffineTask* tasks, std::int64_t count) {
  const ColumnBlocks<Space> blocks(out.leading);
  for_teams<T>("longscan::affine::apply", space, count * blocks.count, maps.n * blocks.width,
               Apply<T, Space>{maps, x, out, tasks, blocks});
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
               Scan<T, Space>{maps, points, chains, blocks});
}

template <class Space, class T>
void affine_walk(const Space& space, const AffineMaps<T>& shape, int leading, const AffineStep<T>* steps,
                 const AffineWalk<T>* walks, std::int64_t count) {
  for_teams<T>("longscan::affine::walk", space, count, shape.n * shape.m, Walk<T>{shape, leading, steps, walks});
}

template <class Space, class T>
void affine_norms(const Space& space, const AffineMaps<T>& maps, double* norms, std::int64_t count) {
  const AffinePoints<const T> slots{maps.data, maps.leading, maps.stride};
  for_teams<T>("longscan::affine::norms", space, count, maps.n * maps.n, Norms<T>{slots, maps.n, 0, maps.n, norms, 2});
  for_teams<T>("longscan::affine::norms", space, count, maps.n * maps.m,
               Norms<T>{slots, maps.n, maps.n, maps.n + maps.m, norms + 1, 2});
}

template <class Space, class T>
void affine_norms(const Space& space, const AffinePoints<const T>& points, int n, double* norms, std::int64_t count) {
  for_teams<T>("longscan::affine::norms", space, count, n * points.leading,
               Norms<T>{points, n, 0, points.leading, norms, 1});
}

template <class Space, class T>
void affine_constants(const Space& space, const AffineMaps<T>& maps, const AffinePoints<T>& out,
                      const AffineTask* tasks, std::int64_t count) {
  for_teams<T>("longscan::affine::constants", space, count, maps.n * maps.m, Constants<T>{maps, out, tasks});
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
  template void affine_copy(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffineMaps<T>&,          \
                            const AffineTask*, std::int64_t);                                                          \
  template void affine_constants(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<T>&,   \
                                 const AffineTask*, std::int64_t);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
