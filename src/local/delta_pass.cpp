// SPDX-License-Identifier: Apache-2.0
#include "local/delta_pass.hpp"

#include "local/lanes.hpp"

namespace longscan {
namespace {

template <class Space, class T>
struct Functor {
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>, Kokkos::LaunchBounds<delta_team<Space>, 1>>;
  using Member = typename Policy::member_type;
  DeltaPass<T> pass;
  std::size_t bytes;

  KOKKOS_FUNCTION void operator()(const Member& member) const {
    char* scratch = static_cast<char*>(member.team_scratch(1).get_shmem_aligned(bytes, row_bytes));
    if constexpr (is_host_space<Space>) {
      run(HostLanes<T>{}, pass.tasks[member.league_rank()], scratch, member.league_rank());
    } else {
      run(DeviceLanes<T, Member>{member, pass.rules.half_operands}, pass.tasks[member.league_rank()], scratch,
          member.league_rank());
    }
  }

  template <class Lanes>
  KOKKOS_FUNCTION void run(const Lanes& lanes, const DeltaTask<T>& task, char* scratch, std::int64_t index) const {
    const DeltaRules& r = pass.rules;
    ChunkBuffers<T> w;
    const int K = r.d_key, V = r.d_value, first = r.map_columns();
    const auto used = static_cast<int>((w.place(scratch, r) + sizeof(T) - 1) / sizeof(T));
    lanes.each(used, [&](int i) { reinterpret_cast<T*>(scratch)[i] = T(0); });
    const int N = w.cn;
    T* St = reinterpret_cast<T*>(scratch + (used * sizeof(T) + row_bytes - 1) / row_bytes * row_bytes);
    lanes.each2(K, N, [&](int k, int j) {
      T value = j < first ? T(j == k) : T(0);
      if (j >= first && j < first + V && task.from.data)
        value = task.from.data[k * task.from.k_stride + (j - first) * task.from.v_stride];
      St[k * N + j] = value;
    });
    lanes.sync();

    DeltaCounts counts;
    DeltaChunk<T, Lanes> chunk{lanes, r, pass.in, w, task.head};
    for (std::int64_t t = task.begin; t < task.end;) {
      if (t == task.probe_at) copy_out(lanes, St + first, N, K, V, task.probe);
      std::int64_t next = t + r.chunk < task.end ? t + r.chunk : task.end;
      if (t < task.probe_at && task.probe_at < next) next = task.probe_at;
      std::int64_t counted = 0;  // how many states were due after token `next`
      if (pass.state_every > 0) {
        const std::int64_t position = task.position + t - task.begin;
        counted = position / pass.state_every + 1;
        const std::int64_t due = counted * pass.state_every - position;
        next = t + due < next ? t + due : next;
        if (t + due != next) counted = 0;
      }
      chunk.step(t, static_cast<int>(next - t), St, pass.out, counts);
      if (!r.map && counts.first_bad < 0 && lanes.any_non_finite(K, V, St, N)) counts.first_bad = t;
      if (counted > 0 && pass.states) {
        T* to = pass.states + ((counted + task.states_offset) * pass.heads + task.head) * V * K;
        lanes.each2(V, K, [&](int v, int k) { to[static_cast<std::int64_t>(v) * K + k] = St[k * N + first + v]; });
        lanes.sync();
      }
      t = next;
    }
    if (task.to.data) copy_out(lanes, St, N, K, r.columns(), task.to);
    lanes.once([&] { pass.counts[index] = counts; });
  }

  template <class Lanes>
  KOKKOS_FUNCTION static void copy_out(const Lanes& lanes, const T* St, int N, int K, int columns,
                                       const StateRef<T>& to) {
    lanes.each2(K, columns, [&](int k, int j) { to.data[k * to.k_stride + j * to.v_stride] = St[k * N + j]; });
    lanes.sync();
  }
};

template <class T>
struct CopyStates {
  const DeltaTask<T>* tasks;
  int d_key, d_value;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const int v = static_cast<int>(i % d_value), k = static_cast<int>(i / d_value % d_key);
    const DeltaTask<T>& task = tasks[i / d_value / d_key];
    if (!task.to.data) return;
    const StateRef<const T>& from = task.from;
    task.to.data[k * task.to.k_stride + v * task.to.v_stride] =
        from.data ? from.data[k * from.k_stride + v * from.v_stride] : T(0);
  }
};

}  // namespace

template <class Space, class T>
void copy_states(const Space& space, const DeltaTask<T>* tasks, std::int64_t count, int d_key, int d_value) {
  if (count == 0) return;
  Kokkos::parallel_for("longscan::delta::copy_states",
                       Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(space, 0, count * d_key * d_value),
                       CopyStates<T>{tasks, d_key, d_value});
}

template <class T>
std::size_t delta_scratch_bytes(const DeltaRules& rules) {
  ChunkBuffers<T> w;
  const std::size_t buffers = w.place(nullptr, rules);
  return buffers + row_bytes + sizeof(T) * static_cast<std::size_t>(rules.d_key) * w.cn + row_bytes;
}

template <class Space>
int delta_side_by_side(const Space& space) {
  return is_host_space<Space> ? space.concurrency()
                              : space.concurrency() / 2048;  // a multiprocessor's threads: one team fills its caches
}

template <class Space, class T>
void delta_pass(const Space& space, const DeltaPass<T>& pass) {
  if (pass.task_count == 0) return;
  using F = Functor<Space, T>;
  const std::size_t bytes = delta_scratch_bytes<T>(pass.rules);
  auto policy = typename F::Policy(space, pass.task_count, delta_team<Space>)
                    .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(bytes + row_bytes)));
  Kokkos::parallel_for("longscan::delta::pass", policy, F{pass, bytes});
}

template std::size_t delta_scratch_bytes<float>(const DeltaRules&);
template std::size_t delta_scratch_bytes<double>(const DeltaRules&);
using DefaultSpace = Kokkos::DefaultExecutionSpace;
template void delta_pass<DefaultSpace, float>(const DefaultSpace&, const DeltaPass<float>&);
template void delta_pass<DefaultSpace, double>(const DefaultSpace&, const DeltaPass<double>&);
template int delta_side_by_side(const DefaultSpace&);
template void copy_states(const DefaultSpace&, const DeltaTask<float>*, std::int64_t, int, int);
template void copy_states(const DefaultSpace&, const DeltaTask<double>*, std::int64_t, int, int);

}  // namespace longscan
