// SPDX-License-Identifier: Apache-2.0
#pragma once
// Passes over the tokens of one rank: outputs, end states, maps. One launch each, asynchronous, no allocation.
#include <cstdint>

#include "core/delta_chunk.hpp"

namespace longscan {

/// A state in memory: element S[v][k] is at k * k_stride + v * v_stride. With a map, P^T is in the columns before those
/// of S: element P^T[k][j] at k * k_stride + j * v_stride, and S[v][k] follows at column K + v. nullptr: none.
template <class T>
struct StateRef {
  T* data = nullptr;
  std::int64_t k_stride = 1, v_stride = 1;
};

/// One piece of work: tokens [begin, end) of one head, from one state to the next.
template <class T>
struct DeltaTask {
  std::int64_t begin = 0, end = 0;
  std::int32_t head = 0;
  StateRef<const T> from;      ///< the state before; nullptr is zero
  StateRef<T> to;              ///< the state (and map) after
  std::int64_t probe_at = -1;  ///< token before which the state is copied to `probe`; a chunk ends there
  StateRef<T> probe;
  std::int64_t position = 0;       ///< of `begin`, in the counting of `state_every`
  std::int64_t states_offset = 0;  ///< entry of `states` for the state after token 0 * state_every, minus one
};

/// One pass. `rules.outputs` writes `out`; `rules.map` also carries P, from P = I on.
template <class T>
struct DeltaPass {
  DeltaRules rules;
  DeltaArrays in;
  MutableTokenArray out;
  const DeltaTask<T>* tasks = nullptr;  ///< reachable by the execution space
  std::int64_t task_count = 0;
  std::int64_t state_every = 0;  ///< 0 is never
  T* states = nullptr;           ///< [state, H, V, K], the states after every `state_every` tokens
  int heads = 1;
  std::int64_t tokens = 0;        ///< of the arrays; no task goes beyond
  DeltaCounts* counts = nullptr;  ///< one a task
};

/// Threads that work on a task together.
template <class Space>
inline constexpr int delta_team = is_host_space<Space> ? 1 : 512;

/// Tasks that a device runs side by side at full speed.
template <class Space>
int delta_side_by_side(const Space& space);

/// Bytes of scratch memory a team needs.
template <class T>
std::size_t delta_scratch_bytes(const DeltaRules& rules);

/// Launches "longscan::delta::pass". Tasks run in any order.
template <class Space, class T>
void delta_pass(const Space& space, const DeltaPass<T>& pass);

/// to = from for each task, whose tokens are not looked at; K × V values. Launches "longscan::delta::copy_states".
template <class Space, class T>
void copy_states(const Space& space, const DeltaTask<T>* tasks, std::int64_t count, int d_key, int d_value);

}  // namespace longscan
