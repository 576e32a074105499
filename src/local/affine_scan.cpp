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

template <class T>
struct Apply {
  AffineMaps<T> maps;
  AffinePoints<const T> x;
  AffinePoints<T> out;
  const AffineTask* tasks;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    affine_apply(lanes, maps, static_cast<const T*>(maps.slot(tasks[i].map)), x.slot(tasks[i].x),
                 out.slot(tasks[i].out), out.leading);
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

template <class T>
struct Scan {
  AffineMaps<T> maps;
  AffinePoints<T> points;
  const AffineChain* chains;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    const AffineChain& c = chains[i];
    for (std::int64_t j = 0; j < c.length; ++j)
      affine_apply(lanes, maps, static_cast<const T*>(maps.slot(c.map + j * c.map_step)),
                   static_cast<const T*>(points.slot(c.point + j * c.point_step)),
                   points.slot(c.point + (j + 1) * c.point_step), points.leading);
  }
};

template <class T>
struct Norms {
  AffineMaps<T> maps;
  double* norms;
  template <class Lanes>
  KOKKOS_FUNCTION void operator()(const Lanes& lanes, std::int64_t i) const {
    lanes.once([&] {
      const T* map = maps.slot(i);
      double a = 0, b = 0;
      for (int row = 0; row < maps.n; ++row) {
        for (int j = 0; j < maps.n; ++j) a += double(map[row * maps.leading + j]) * double(map[row * maps.leading + j]);
        for (int j = maps.n; j < maps.n + maps.m; ++j)
          b += double(map[row * maps.leading + j]) * double(map[row * maps.leading + j]);
      }
      norms[2 * i] = sqrt(a), norms[2 * i + 1] = sqrt(b);
    });
  }
};

}  // namespace

template <class Space, class T>
void affine_apply(const Space& space, const AffineMaps<T>& maps, const AffinePoints<const T>& x,
                  const AffinePoints<T>& out, const AffineTask* tasks, std::int64_t count) {
  for_teams<T>("longscan::affine::apply", space, count, maps.n * maps.m, Apply<T>{maps, x, out, tasks});
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
  for_teams<T>("longscan::affine::scan", space, count, maps.n * maps.m, Scan<T>{maps, points, chains});
}

template <class Space, class T>
void affine_norms(const Space& space, const AffineMaps<T>& maps, double* norms, std::int64_t count) {
  for_teams<T>("longscan::affine::norms", space, count, 1, Norms<T>{maps, norms});
}

#define LONGSCAN_INSTANTIATE(T)                                                                                        \
  template void affine_apply(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<const T>&, \
                             const AffinePoints<T>&, const AffineTask*, std::int64_t);                                 \
  template void affine_compose(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffineMaps<T>&,       \
                               const AffineMaps<T>&, const AffineTask*, std::int64_t);                                 \
  template void affine_scan(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, const AffinePoints<T>&,        \
                            const AffineChain*, std::int64_t);                                                         \
  template void affine_norms(const Kokkos::DefaultExecutionSpace&, const AffineMaps<T>&, double*, std::int64_t);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
