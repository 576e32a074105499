// SPDX-License-Identifier: Apache-2.0
#include "local/shooting_steps.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>

#include "core/dtype.hpp"

namespace longscan {
namespace {

using Space = Kokkos::DefaultExecutionSpace;
using Range = Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>;

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
KOKKOS_INLINE_FUNCTION auto bits_of(T x) {
  return bits_as<std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>>(x);
}

/// Where the state that arrives at a slot stands; null at exact starts.
template <class T>
KOKKOS_INLINE_FUNCTION const T* arriving_at(const SegmentRun& run, std::int64_t slot, std::int64_t size, const T* ends,
                                            const T* arriving) {
  if (slot > run.slot) return ends + (slot - 1) * size;
  return run.exact ? nullptr : arriving;
}

template <class T>
KOKKOS_INLINE_FUNCTION double size_of_jump(T jump) {
  const auto d = static_cast<double>(jump);
  return is_non_finite(jump) ? infinity : d < 0 ? -d : d;
}

KOKKOS_INLINE_FUNCTION GrowthSums as_sums(const LaneGrowth& g) {
  GrowthSums sums;
  sums.total = g.total, sums.prefix = g.prefix, sums.suffix = g.suffix, sums.best = g.best;
  sums.norm_total = g.factor > 0 ? log(g.factor) : -700.f;
  sums.norm_prefix = g.factor_most > 1 ? log(g.factor_most) : 0.f;
  sums.error = g.error, sums.error_most = g.error_most;
  return sums;
}

}  // namespace

template <class T>
void place_starts(const SegmentGrid& grid, std::int64_t size, const T* states, T* starts) {
  Kokkos::parallel_for(
      "longscan::shooting::place", Range(0, grid.runs * size), KOKKOS_LAMBDA(const std::int64_t i) {
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[i / size];
        if (run.exact) starts[run.slot * size + i % size] = states[i];
      });
}

template <class T>
void collect_states(const SegmentGrid& grid, std::int64_t size, const T* starts, const T* ends, T* before, T* after) {
  Kokkos::parallel_for(
      "longscan::shooting::collect", Range(0, grid.runs * size), KOKKOS_LAMBDA(const std::int64_t i) {
        const std::int64_t r = i / size;
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const std::int64_t next = r + 1 < grid.runs ? grid.table[r + 1].slot : grid.slots;
        before[i] = starts[run.slot * size + i % size];
        after[i] = ends[(next - 1) * size + i % size];
      });
}

template <class T>
BorderVerdict compare_lanes(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes,
                            Arriving<T> arriving, T* jumps) {
  const std::int64_t D = channels, size = state * D;
  BorderVerdict verdict;
  Kokkos::parallel_reduce(
      "longscan::shooting::compare", Range(0, grid.slots * D),
      KOKKOS_LAMBDA(const std::int64_t lane, std::int64_t& left, double& worst, std::int64_t& first, double& squares) {
        const std::int64_t slot = lane / D, d = lane % D;
        const SegmentRun run = grid.run_of(slot);
        const T* from = arriving_at<T>(run, slot, size, lanes.ends, arriving);
        bool differs = false;
        for (int i = 0; i < state; ++i) {
          const std::int64_t at = i * D + d;
          T& start = lanes.starts[slot * size + at];
          T jump = 0;
          if (from && bits_of(from[at]) != bits_of(start)) {
            differs = true, jump = from[at] - start, start = from[at];
            const double here = size_of_jump(jump);
            worst = here > worst ? here : worst;
          }
          jumps[slot * size + at] = jump;
        }
        lanes.active[lane] = differs;
        squares += lanes.squares[lane];
        if (!differs) return;
        ++left;
        const std::int64_t token = grid.begin(run, slot);
        first = token < first ? token : first;
      },
      Kokkos::Sum<std::int64_t>(verdict.left), Kokkos::Max<double>(verdict.worst),
      Kokkos::Min<std::int64_t>(verdict.first_token), Kokkos::Sum<double>(verdict.squares));
  if (verdict.left == 0) verdict.worst = 0, verdict.first_token = -1;  // what the reductions start from
  return verdict;
}

namespace {

constexpr std::int64_t no_token = std::numeric_limits<std::int64_t>::max();

KOKKOS_INLINE_FUNCTION BorderVerdict nothing_found() {
  BorderVerdict v;
  v.first_token = no_token;
  return v;
}
KOKKOS_INLINE_FUNCTION void take(BorderVerdict& into, const BorderVerdict& v) {
  const auto larger = [](auto x, auto y) { return x < y ? y : x; };
  into.left += v.left, into.squares += v.squares, into.worst = larger(into.worst, v.worst);
  into.first_token = v.first_token < into.first_token ? v.first_token : into.first_token;
  into.total = larger(into.total, v.total), into.best = larger(into.best, v.best);
  into.error_most = larger(into.error_most, v.error_most);
}

/// What a thread of a team has found in the slots that are its, which are neighbours.
struct Found {
  BorderVerdict verdict = nothing_found();
  LaneGrowth growth;
};
KOKKOS_INLINE_FUNCTION void take(Found& into, const Found& next) {
  take(into.verdict, next.verdict), into.growth = combine(into.growth, next.growth);
}

/// `mine` of every thread of a team (a power of two), one after another, into the first thread's.
template <class Member, class F>
KOKKOS_INLINE_FUNCTION void sum_up_team(const Member& member, F* shared, F& mine) {
  const int rank = member.team_rank(), size = member.team_size();
  shared[rank] = mine;
  for (int step = 1; step < size; step *= 2) {
    member.team_barrier();
    if ((rank & (2 * step - 1)) == 0) take(mine, shared[rank + step]), shared[rank] = mine;
  }
}

/// All that this thread has written, and has seen that others have, is there for the host before what it writes next.
KOKKOS_INLINE_FUNCTION void fence_for_host() {
#ifdef __CUDA_ARCH__
  __threadfence_system();
#else
  Kokkos::memory_fence();
#endif
}

/// The team's share is in its first thread's `mine`; the last team to come posts the sum.
template <class Member>
KOKKOS_INLINE_FUNCTION void leave_share(const Member& member, BorderVerdict* shared, BorderVerdict mine,
                                        const VerdictPlaces& places) {
  const int rank = member.team_rank(), size = member.team_size();
  int last = 0;
  if (rank == 0) {
    places.shares[member.league_rank()] = mine;
    Kokkos::memory_fence();  // the share before the count
    last = Kokkos::atomic_fetch_add(places.finished, 1) == static_cast<int>(places.teams) - 1;
  }
  member.team_broadcast(last, 0);
  if (!last) return;
  Kokkos::memory_fence();
  mine = nothing_found();
  for (std::int64_t i = rank; i < places.teams; i += size) take(mine, places.shares[i]);
  member.team_barrier();  // the shared memory is used again
  sum_up_team(member, shared, mine);
  if (rank != 0) return;
  places.posted->verdict = mine, *places.finished = 0;
  fence_for_host();
  *static_cast<volatile std::uint64_t*>(&places.posted->number) = places.number;
}

using Teams = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>>;

}  // namespace

VerdictPlaces VerdictWork::prepare(std::int64_t teams) {
  reserve(shares_, "longscan::shooting::verdicts", teams);
  if (finished_.extent(0) == 0) finished_ = DeviceArray<int>("longscan::shooting::finished", 1);
  if (posted_.empty()) posted_.resize(1);
  return {teams, shares_.data(), finished_.data(), posted_.data(), ++number_};
}

BorderVerdict VerdictWork::wait(const VerdictPlaces& places) const {
#ifdef KOKKOS_ENABLE_CUDA
  const Space space;
  const volatile std::uint64_t& number = places.posted->number;
  constexpr std::uint64_t turns = 4096;  // between looks at the stream, which ends if a kernel has failed
  for (std::uint64_t turn = 1; number != places.number; ++turn)
    if (turn % turns == 0 && cudaStreamQuery(space.cuda_stream()) != cudaErrorNotReady) break;
  if (number != places.number) space.fence("longscan::shooting::verdict");
  std::atomic_thread_fence(std::memory_order_acquire);
#else
  Space().fence();
#endif
  BorderVerdict v = places.posted->verdict;
  if (v.first_token == no_token) v.first_token = -1;
  return v;
}

template <class T>
BorderVerdict compare_run(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes,
                          Arriving<T> arriving, T* jumps, T* before, T* after, PartGrowth* growth, VerdictWork& work) {
  constexpr int most = is_host_space<Space> ? 1 : 256, together = 4;
  int team = 1;
  while (team < most && 2 * team <= grid.slots) team *= 2;
  team = is_host_space<Space> ? 1 : std::max(team, 32);
  const std::int64_t D = channels, size = state * D, slots = grid.slots, each = (slots + team - 1) / team;
  const VerdictPlaces places = work.prepare(D);
  const auto policy =
      Teams(Space(), D, team).set_scratch_size(0, Kokkos::PerTeam(team * sizeof(Found) + alignof(Found)));
  Kokkos::parallel_for(
      "longscan::shooting::compare", policy, KOKKOS_LAMBDA(const typename Teams::member_type& member) {
        auto* there =
            static_cast<Found*>(member.team_scratch(0).get_shmem_aligned(team * sizeof(Found), alignof(Found)));
        const std::int64_t d = member.league_rank();
        const int rank = member.team_rank();
        Found mine;
        BorderVerdict& verdict = mine.verdict;
        const std::int64_t begin = rank * each, end = begin + each < slots ? begin + each : slots;
        for (std::int64_t slot = begin; slot < end; slot += together) {
          // reads first, as nothing that is written may be read before
          LaneGrowth growths[together];
          double squares[together] = {};
          bool differs[together] = {};
          LONGSCAN_UNROLL
          for (int i = 0; i < together; ++i) {
            if (slot + i >= end) continue;
            squares[i] = lanes.squares[(slot + i) * D + d];
            if (lanes.growth) growths[i] = lanes.growth[(slot + i) * D + d];
          }
          for (int value = 0; value < state; ++value) {
            const std::int64_t at = value * D + d;
            T starts[together] = {}, arrived[together] = {};
            LONGSCAN_UNROLL
            for (int i = 0; i < together; ++i) {
              if (slot + i >= end) continue;
              const T* from = arriving_at<T>(grid.first, slot + i, size, lanes.ends, arriving);
              starts[i] = lanes.starts[(slot + i) * size + at];
              arrived[i] = from ? from[at] : starts[i];
            }
            LONGSCAN_UNROLL
            for (int i = 0; i < together; ++i) {
              if (slot + i >= end) continue;
              T jump = 0;
              if (bits_of(arrived[i]) != bits_of(starts[i])) {
                differs[i] = true, jump = arrived[i] - starts[i], lanes.starts[(slot + i) * size + at] = arrived[i];
                const double here = size_of_jump(jump);
                verdict.worst = here > verdict.worst ? here : verdict.worst;
              }
              jumps[(slot + i) * size + at] = jump;
              if (slot + i == 0) before[at] = arrived[i];
              if (slot + i + 1 == slots) after[at] = lanes.ends[(slot + i) * size + at];
            }
          }
          LONGSCAN_UNROLL
          for (int i = 0; i < together; ++i) {
            if (slot + i >= end) continue;
            lanes.active[(slot + i) * D + d] = differs[i];
            verdict.squares += squares[i];
            if (lanes.growth) mine.growth = combine(mine.growth, growths[i]);
            if (!differs[i]) continue;
            ++verdict.left;
            const std::int64_t token = grid.begin(grid.first, slot + i);
            verdict.first_token = token < verdict.first_token ? token : verdict.first_token;
          }
        }
        sum_up_team(member, there, mine);
        if (rank == 0 && lanes.growth) {
          const LaneGrowth& sums = mine.growth;
          verdict.total = sums.total, verdict.best = sums.best, verdict.error_most = sums.error_most;
          if (growth) growth[d] = {as_sums(sums), {}, {}};
        }
        leave_share(member, &there->verdict, verdict, places);
      });
  return work.wait(places);
}

template <class T>
BorderVerdict measure_jumps(const SegmentGrid& grid, std::int64_t size, std::int64_t channels,
                            const ShootingArrays<T>& lanes, Arriving<T> arriving, double* jumps, T* before, T* after,
                            VerdictWork& work) {
  const int threads = is_host_space<Space> ? 1 : size < 512 ? 64 : 256;
  const double* squares = lanes.squares;
  if (grid.slots == 0) return {};
  const VerdictPlaces places = work.prepare(grid.slots);
  const auto policy =
      Teams(Space(), grid.slots, threads).set_scratch_size(0, Kokkos::PerTeam(threads * sizeof(BorderVerdict)));
  Kokkos::parallel_for(
      "longscan::shooting::jumps", policy, KOKKOS_LAMBDA(const typename Teams::member_type& member) {
        auto* there = static_cast<BorderVerdict*>(member.team_scratch(0).get_shmem(threads * sizeof(BorderVerdict)));
        const std::int64_t slot = member.league_rank();
        const int rank = member.team_rank();
        const std::int64_t r = grid.runs == 1 ? 0 : grid.index_of(slot);
        const SegmentRun run = grid.runs == 1 ? grid.first : grid.table[r];
        const bool first = slot == run.slot;
        const bool last = slot + 1 == (r + 1 < grid.runs ? grid.table[r + 1].slot : grid.slots);
        const T* from = arriving_at<T>(run, slot, size, lanes.ends, arriving);
        BorderVerdict mine = nothing_found();
        for (std::int64_t i = rank; i < size; i += threads) {
          const T start = lanes.starts[slot * size + i];
          const double jump = from ? size_of_jump<T>(from[i] - start) : 0;
          mine.worst = jump > mine.worst ? jump : mine.worst;
          if (first) before[r * size + i] = start;
          if (last) after[r * size + i] = lanes.ends[slot * size + i];
        }
        for (std::int64_t d = rank; d < channels && squares; d += threads) mine.squares += squares[slot * channels + d];
        sum_up_team(member, there, mine);
        if (rank == 0) jumps[slot] = mine.worst;
        leave_share(member, there, mine, places);
      });
  return work.wait(places);
}

template <class T>
BorderVerdict hand_over(const SegmentGrid& grid, std::int64_t size, const ShootingArrays<T>& lanes,
                        Arriving<T> arriving, const double* jumps, double limit) {
  BorderVerdict verdict;
  Kokkos::parallel_reduce(
      "longscan::shooting::hand_over", Range(0, grid.slots * size),
      KOKKOS_LAMBDA(const std::int64_t i, std::int64_t& left, std::int64_t& first) {
        const std::int64_t slot = i / size, at = i % size;
        const SegmentRun run = grid.run_of(slot);
        const bool moves = jumps[slot] > limit;
        if (moves) lanes.starts[i] = arriving_at<T>(run, slot, size, lanes.ends, arriving)[at];
        if (at != 0) return;
        lanes.active[slot] = moves;
        if (!moves) return;
        ++left;
        const std::int64_t token = grid.begin(run, slot);
        first = token < first ? token : first;
      },
      Kokkos::Sum<std::int64_t>(verdict.left), Kokkos::Min<std::int64_t>(verdict.first_token));
  if (verdict.left == 0) verdict.first_token = -1;
  return verdict;
}

namespace {

/// P of a lane's segment; false where it is too large to be trusted.
template <class T, int n>
KOKKOS_INLINE_FUNCTION bool load_product(const ShootingArrays<T>& lanes, std::int64_t slot, std::int64_t D,
                                         std::int64_t d, T limit, T* P) {
  bool usable = true;
  for (int i = 0; i < n; ++i) {
    T row = 0;
    for (int j = 0; j < n; ++j) {
      const T p = lanes.products[(slot * n * n + i * n + j) * D + d];
      P[i * n + j] = p, row += p < T(0) ? -p : p;
    }
    usable = usable && row <= limit;
  }
  return usable;
}

template <class T, int n>
void newton_lanes_of(const SegmentGrid& grid, std::int64_t D, const ShootingArrays<T>& lanes, const T* jumps,
                     const T* in, double largest) {
  constexpr T unit = std::numeric_limits<T>::epsilon();
  const T limit = static_cast<T>(largest);
  Kokkos::parallel_for(
      "longscan::shooting::newton", Range(0, D), KOKKOS_LAMBDA(const std::int64_t d) {
        T delta[n];  // P delta of the border before
        for (int i = 0; i < n; ++i) delta[i] = in[d * n + i];
        SegmentRun run = grid.first;
        for (std::int64_t slot = 0; slot < grid.slots; ++slot) {
          if (grid.runs > 1) run = grid.run_of(slot);
          const bool exact = slot == run.slot && run.exact;
          for (int i = 0; i < n; ++i) {
            const std::int64_t at = (slot * n + i) * D + d;
            if (exact) {
              delta[i] = T(0);
              continue;
            }
            T& value = lanes.starts[at];
            const T step = delta[i], moved = value + step;
            const T size = value < T(0) ? -value : value, step_size = step < T(0) ? -step : step;
            // steps of rounding size are left out, so that equal bits can be reached
            if (step_size > 4 * unit * size && !is_non_finite(moved)) {
              value = moved;
              lanes.active[slot * D + d] = 1;
            }
            delta[i] = step + jumps[at];
          }
          T P[n * n], next[n];
          const bool usable = load_product<T, n>(lanes, slot, D, d, limit, P);
          for (int i = 0; i < n; ++i) {
            next[i] = T(0);
            for (int j = 0; j < n && usable; ++j) next[i] += P[i * n + j] * delta[j];
          }
          for (int i = 0; i < n; ++i) delta[i] = next[i];
        }
      });
}

template <class T, int n>
void newton_maps_of(const SegmentGrid& grid, std::int64_t D, const ShootingArrays<T>& lanes, const T* jumps,
                    double largest, const AffineMaps<T>& maps, T* constants) {
  const T limit = static_cast<T>(largest);
  Kokkos::parallel_for(
      "longscan::shooting::maps", Range(0, D), KOKKOS_LAMBDA(const std::int64_t d) {
        constexpr int width = n + 1;
        T rows[n * width], next[n * width];
        for (int i = 0; i < n; ++i)
          for (int j = 0; j < width; ++j) rows[i * width + j] = i == j ? T(1) : T(0);
        SegmentRun run = grid.first;
        for (std::int64_t slot = 0; slot < grid.slots; ++slot) {
          if (grid.runs > 1) run = grid.run_of(slot);
          const bool exact = slot == run.slot && run.exact;
          for (int i = 0; i < n * width && exact; ++i) rows[i] = T(0);
          for (int i = 0; i < n && !exact; ++i) rows[i * width + n] += jumps[(slot * n + i) * D + d];
          T P[n * n];
          const bool usable = load_product<T, n>(lanes, slot, D, d, limit, P);
          for (int i = 0; i < n; ++i)
            for (int j = 0; j < width; ++j) {
              T sum = 0;
              for (int k = 0; k < n && usable; ++k) sum += P[i * n + k] * rows[k * width + j];
              next[i * width + j] = sum;
            }
          for (int i = 0; i < n * width; ++i) rows[i] = next[i];
        }
        T* to = maps.slot(d);
        for (int i = 0; i < n; ++i) {
          for (int j = 0; j < width; ++j)
            to[i * maps.leading + j] = is_non_finite(rows[i * width + j]) ? T(0) : rows[i * width + j];
          constants[d * n + i] = to[i * maps.leading + n];
        }
      });
}

}  // namespace

template <class T>
void newton_lanes(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes, const T* jumps,
                  const T* in, double largest) {
  if (state == 1) newton_lanes_of<T, 1>(grid, channels, lanes, jumps, in, largest);
  if (state == 2) newton_lanes_of<T, 2>(grid, channels, lanes, jumps, in, largest);
}

template <class T>
void newton_maps(const SegmentGrid& grid, int state, int channels, const ShootingArrays<T>& lanes, const T* jumps,
                 double largest, const AffineMaps<T>& maps, T* constants) {
  if (state == 1) newton_maps_of<T, 1>(grid, channels, lanes, jumps, largest, maps, constants);
  if (state == 2) newton_maps_of<T, 2>(grid, channels, lanes, jumps, largest, maps, constants);
}

void fold_growth(const GrowthPiece* pieces, std::int64_t count, std::int64_t runs, int channels,
                 const LaneGrowth* growth, LaneGrowth* stretches, PartGrowth* out) {
  const std::int64_t D = channels;
  Kokkos::parallel_for(
      "longscan::shooting::growth", Range(0, count * D), KOKKOS_LAMBDA(const std::int64_t i) {
        const GrowthPiece piece = pieces[i / D];
        LaneGrowth sums;
        for (std::int64_t slot = piece.begin; slot < piece.end; ++slot) sums = combine(sums, growth[slot * D + i % D]);
        stretches[i] = sums;
      });
  Kokkos::parallel_for(
      "longscan::shooting::growth", Range(0, D), KOKKOS_LAMBDA(const std::int64_t d) {
        PartGrowth part;
        LaneGrowth open;
        for (std::int64_t p = 0; p < count; ++p) {
          const std::int64_t run = pieces[p].run;
          open = combine(open, stretches[p * D + d]);
          if (p + 1 < count && pieces[p + 1].run == run) continue;
          if (run == 0) {
            part.first = as_sums(open);
          } else if (run == runs - 1) {
            part.last = as_sums(open);
          } else {
            part.rest.total += open.total;
            part.rest.best = open.best > part.rest.best ? open.best : part.rest.best;
            part.rest.error_most = open.error_most > part.rest.error_most ? open.error_most : part.rest.error_most;
          }
          open = LaneGrowth{};
        }
        out[d] = part;
      });
}

#define LONGSCAN_INSTANTIATE(T)                                                                                    \
  template void place_starts(const SegmentGrid&, std::int64_t, const T*, T*);                                      \
  template void collect_states(const SegmentGrid&, std::int64_t, const T*, const T*, T*, T*);                      \
  template BorderVerdict compare_lanes(const SegmentGrid&, int, int, const ShootingArrays<T>&, const T*, T*);      \
  template BorderVerdict compare_run(const SegmentGrid&, int, int, const ShootingArrays<T>&, const T*, T*, T*, T*, \
                                     PartGrowth*, VerdictWork&);                                                   \
  template BorderVerdict measure_jumps(const SegmentGrid&, std::int64_t, std::int64_t, const ShootingArrays<T>&,   \
                                       const T*, double*, T*, T*, VerdictWork&);                                   \
  template BorderVerdict hand_over(const SegmentGrid&, std::int64_t, const ShootingArrays<T>&, const T*,           \
                                   const double*, double);                                                         \
  template void newton_lanes(const SegmentGrid&, int, int, const ShootingArrays<T>&, const T*, const T*, double);  \
  template void newton_maps(const SegmentGrid&, int, int, const ShootingArrays<T>&, const T*, double,              \
                            const AffineMaps<T>&, T*);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
