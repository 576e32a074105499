// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_part.hpp"

#include <algorithm>
#include <cmath>

namespace longscan {

template <class T>
void DeltaPart<T>::begin(const DeltaInputs& in, const DeltaOutputs& out, std::vector<Run> window_runs,
                         std::vector<StatesPlace> window_places, ScanLinks window_links) {
  if (incoming.extent(0) == 0) {  // the first window; not before, so that memory can be compared with the need
    const std::int64_t states = shape.heads * slots.state_size;
    incoming = DeviceArray<T>("longscan::delta::incoming", states);
    outgoing = DeviceArray<T>("longscan::delta::outgoing", states);
    arrived = DeviceArray<T>("longscan::delta::arrived", states);
  }
  in_ = in, out_ = out, runs = std::move(window_runs), places = std::move(window_places), links = window_links;
  start_index_.assign(runs.size(), 0), end_index_.assign(runs.size(), 0);
  std::int64_t starts = 0, ends = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    start_index_[i] = starts, end_index_[i] = ends;
    starts += runs[i].starts, ends += runs[i].ends;
  }
  space.fence();  // nothing of an earlier window is under way
  passes.begin(in, out, runs.empty() ? 0 : runs.back().end);
  mapped_tokens = 0;
  joins.restart();
}

template <class T>
StateRef<const T> DeltaPart<T>::start_of(std::int64_t run, int head) const {
  const std::int64_t K = shape.d_key, V = shape.d_value;
  if (!runs[run].starts) return slots.known_state(incoming, head);
  if (!in_.initial_states) return {};
  const auto* first = static_cast<const T*>(in_.initial_states);
  return {first + (start_index_[run] * shape.heads + head) * V * K, 1, K};
}

template <class T>
StateRef<T> DeltaPart<T>::end_of(std::int64_t run, int head) const {
  const std::int64_t K = shape.d_key, V = shape.d_value;
  if (!runs[run].ends) return slots.state(arrived, head);
  if (!out_.final_states) return {};
  return {static_cast<T*>(out_.final_states) + (end_index_[run] * shape.heads + head) * V * K, 1, K};
}

template <class T>
ScanPart<T> DeltaPart<T>::share(std::vector<char> known, const DeviceArray<T>& maps) const {
  ScanPart<T> part;
  part.links = links, part.count = shape.heads, part.known = std::move(known);
  part.in = slots.points(incoming), part.out = slots.points(outgoing), part.maps = slots.maps(maps);
  return part;
}

/// What rounding makes of a state, in parts of it: L itself has that of fp16 operands on tensor cores. |P| below a
/// sixteenth of it, `vanishing`, leaves room for states 64 times L.
template <class T>
double DeltaPart<T>::rounding() const {
  if (sizeof(T) == 8) return 1.1e-16;
  return passes.on_tensor_cores() ? 4.9e-4 / 4 : 6e-8;
}

/// `tokens` before the border, moved out to the start of a chunk.
template <class T>
std::int64_t DeltaPart<T>::aligned(const Border& b, double tokens) const {
  const auto whole = static_cast<std::int64_t>(std::min(tokens, static_cast<double>(b.limit)));
  return b.limit - (b.limit - whole) / options.chunk * options.chunk;
}

/// Unit keys with beta uniform in (0, 1) are forgotten in about 45 K tokens where fp16 operands allow more to be left
/// out, decays forget sooner.
template <class T>
std::int64_t DeltaPart<T>::first_horizon(const Border& b) const {
  return aligned(b, (in_.log_decay ? 4.0 : passes.on_tensor_cores() ? 48.0 : 16.0) * shape.d_key);
}

template <class T>
PassSummary DeltaPart<T>::map_borders(std::vector<Border>& borders, DeviceArray<T>& maps, bool forgetting) {
  std::int64_t size = 0;
  for (const Border& b : borders) size = std::max(size, b.slot + 1);
  reserve_zeros(maps, "longscan::delta::maps", size * slots.map_size);
  DeltaRules r = passes.rules(false, true);
  r.count_breaches = !forgetting && !computes_outputs();  // else the pass over outputs counts
  std::vector<std::int64_t> wanted(borders.size());
  std::vector<std::size_t> active(borders.size());
  for (std::size_t i = 0; i < borders.size(); ++i) {
    wanted[i] = forgetting ? first_horizon(borders[i]) : borders[i].limit;
    active[i] = i;
  }
  PassSummary summary;
  first_horizons_do = forgetting;
  while (!active.empty()) {
    std::vector<Task> tasks;
    std::vector<AffineTask> pairs;
    for (std::size_t i : active) {
      const Border& b = borders[i];
      const auto fresh = static_cast<std::int64_t>(pairs.size());
      Task task;
      task.head = b.head, task.begin = b.end - wanted[i], task.end = b.end - b.covered;
      if (b.covered > 0) {
        reserve_zeros(new_maps_, "longscan::delta::new_maps",
                      static_cast<std::int64_t>(active.size()) * slots.map_size);
        pairs.push_back({b.slot, fresh, fresh});
      }
      task.to = b.covered == 0 ? slots.map(maps, b.slot) : slots.map(new_maps_, fresh);
      tasks.push_back(task);
      mapped_tokens += task.end - task.begin;
    }
    const auto look = [&] {
      reserve(norms_, "longscan::delta::norms", 2 * size);
      affine_norms(space, slots.maps(maps), norms_.data(), size);
      found_norms_.fetch(space, norms_.data(), 2 * size);
    };
    const bool looks = forgetting && pairs.empty();
    summary.breaches += passes
                            .run(tasks, r,
                                 [&] {
                                   if (looks) look();
                                 })
                            .breaches;
    if (!pairs.empty()) {
      const auto count = static_cast<std::int64_t>(pairs.size());
      reserve_zeros(composed_, "longscan::delta::composed", count * slots.map_size);
      const AffineTask* joined = joins(space, pairs);
      affine_compose(space, slots.maps(new_maps_), slots.maps(maps), slots.maps(composed_), joined, count);
      affine_copy(space, slots.maps(composed_), slots.maps(maps), joined, count);
    }
    for (std::size_t i : active) borders[i].covered = wanted[i];
    if (!forgetting) return summary;
    if (!looks) {
      look();
      space.fence();  // decides what is next
    }
    std::vector<std::size_t> next;
    for (std::size_t i : active) {
      Border& b = borders[i];
      b.P = found_norms_[2 * b.slot], b.L = found_norms_[2 * b.slot + 1];
      b.forgets = b.P <= vanishing();
      first_horizons_do &= b.forgets;
      if (b.forgets || b.covered >= b.limit || !std::isfinite(b.P)) continue;
      // |P| falls about exponentially: aim where it should vanish, between 1.25 and 4 times as far; where that is
      // beyond the limit, at the limit
      const double start = std::log(std::sqrt(static_cast<double>(shape.d_key)));
      const double fallen = start - std::log(b.P), needed = start - std::log(vanishing());
      const auto covered = static_cast<double>(b.covered), limit = static_cast<double>(b.limit);
      const double aim = fallen > 0 ? 1.1 * needed / fallen * covered : limit;
      wanted[i] = aligned(b, aim >= limit ? limit : std::clamp(aim, 1.25 * covered, 4 * covered));
      next.push_back(i);
    }
    active = next;
  }
  return summary;
}

template <class T>
void DeltaPart<T>::recall_borders(std::vector<Border>& borders, DeviceArray<T>& maps) {
  reserve_zeros(maps, "longscan::delta::maps", static_cast<std::int64_t>(borders.size()) * slots.map_size);
  std::vector<Task> tasks;
  for (Border& b : borders) {
    b.covered = first_horizon(b);
    Task task;
    task.head = b.head, task.begin = b.end - b.covered, task.end = b.end;
    task.to = slots.own_constant(maps, b.slot);
    tasks.push_back(task);
    mapped_tokens += b.covered;
    b.forgets = b.remembered = true;
  }
  passes.run_ahead(tasks, passes.rules(false, false));
}

template <class T>
void DeltaPart<T>::look_at_probes(const std::vector<Border>& borders, const DeviceArray<T>& maps) {
  if (std::none_of(borders.begin(), borders.end(), [](const Border& b) { return b.forgets; })) return;
  const auto count = static_cast<std::int64_t>(borders.size());
  const bool remembered = borders.front().remembered;
  const std::int64_t norms = remembered ? 2 * count : count;
  reserve(probe_norms_, "longscan::delta::norms", norms);
  if (remembered) {
    affine_distances(space, slots.maps(maps), slots.known_points(probes), probe_norms_.data(), count);
  } else {
    affine_norms(space, slots.known_points(probes), shape.d_key, probe_norms_.data(), count);
  }
  found_probes_.fetch(space, probe_norms_.data(), norms);
}

template <class T>
std::vector<char> DeltaPart<T>::not_forgotten(const std::vector<Border>& borders) {
  constexpr double agreement = 16;  // of states that came to a border from different starts, in their rounding
  if (!passes.settled()) return std::vector<char>(borders.size(), 1);
  std::vector<char> wrong(borders.size(), 0);
  for (std::size_t i = 0; i < borders.size(); ++i) {
    const Border& b = borders[i];
    const auto at = static_cast<std::int64_t>(i);
    if (!b.forgets) continue;
    const double off = b.remembered ? found_probes_[2 * at] : b.P * found_probes_[at];
    const double most = b.remembered ? agreement * rounding() * found_probes_[2 * at + 1] : 64 * vanishing() * b.L;
    wrong[i] = !(off <= most && std::isfinite(off));
  }
  return wrong;
}

template <class T>
void DeltaPart<T>::take_constants(const DeviceArray<T>& maps, const DeviceArray<T>& points,
                                  const std::vector<AffineTask>& tasks) {
  if (tasks.empty()) return;
  affine_constants(space, slots.maps(maps), slots.points(points), joins(space, tasks),
                   static_cast<std::int64_t>(tasks.size()));
}

template <class T>
void DeltaPart<T>::take_arrived(const std::vector<char>& heads) {
  std::vector<CopyPiece<T>> pieces;
  for (std::size_t h = 0; h < heads.size(); ++h)
    if (heads[h])
      pieces.push_back(
          {arrived.data() + h * slots.state_size, outgoing.data() + h * slots.state_size, slots.state_size});
  copy_pieces(pieces);
}

template <class T>
std::int64_t DeltaPart<T>::workspace_bytes(std::int64_t states, std::int64_t maps) const {
  const std::int64_t elements = states * slots.state_size + maps * slots.map_size;
  return elements * shape.heads * static_cast<std::int64_t>(sizeof(T)) +
         static_cast<std::int64_t>(delta_scratch_bytes<T>(passes.rules(true, true))) * space.concurrency() /
             delta_team<typename DeltaPasses<T>::Space>;
}

template class DeltaPart<float>;
template class DeltaPart<double>;

}  // namespace longscan
