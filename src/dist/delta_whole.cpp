// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_whole.hpp"

#include <algorithm>

#include "core/dtype.hpp"

namespace longscan {

template <class T>
void DeltaWhole<T>::begin() {
  const int H = part_.shape.heads;
  ends_.assign(H, {});
  known_.assign(H, 1);
  for (int h = 0; h < H && !part_.runs.empty(); ++h)
    ends_[h].slot = ends_[h].head = h, ends_[h].end = part_.runs.back().end;
}

template <class T>
std::vector<char> DeltaWhole<T>::find_outgoing(Horizons) {
  if (!part_.links.sends()) return known_;
  const int H = part_.shape.heads;
  const std::int64_t tokens = part_.runs.back().size();
  const bool state_known = !part_.links.receives() || part_.runs.size() > 1;
  // From a known state a pass over all tokens costs about half as much as their map; half of them is tried.
  const std::int64_t limit = state_known ? tokens / 2 : tokens;
  if (!state_known || limit >= 16 * part_.shape.d_key) {
    reserve_zeros(part_.probes, "longscan::delta::probes", H * part_.slots.state_size);
    for (Border& end : ends_) end.limit = limit;
    part_.map_borders(ends_, maps_, true);
    std::vector<AffineTask> constants;
    for (int h = 0; h < H; ++h)
      if (ends_[h].forgets) constants.push_back({h, h, h});
    part_.take_constants(maps_, part_.outgoing, constants);
  }
  if (state_known) {
    run_to_end();
  } else {
    for (int h = 0; h < H; ++h) known_[h] = ends_[h].forgets;
  }
  return known_;
}

/// For the heads that do not forget: from the state before the last run, which this rank has, by a pass over the tokens
/// that the map does not cover, and the map.
template <class T>
void DeltaWhole<T>::run_to_end() {
  const auto last = static_cast<std::int64_t>(part_.runs.size()) - 1;
  std::vector<Task> tasks;
  std::vector<AffineTask> ends;
  for (const Border& end : ends_) {
    if (end.forgets) continue;
    Task task;
    task.head = end.head, task.begin = part_.runs[last].begin, task.end = end.end - end.covered;
    task.from = part_.start_of(last, end.head);
    task.to = part_.slots.state(end.covered > 0 ? part_.arrived : part_.outgoing, end.head);
    tasks.push_back(task);
    part_.mapped_tokens += task.end - task.begin;
    if (end.covered > 0) ends.push_back({end.head, end.head, end.head});
  }
  part_.passes.run(tasks, part_.passes.rules(false, false));
  if (!ends.empty())
    affine_apply(part_.space, part_.slots.maps(maps_), part_.slots.known_points(part_.arrived),
                 part_.slots.points(part_.outgoing), part_.joins(part_.space, ends),
                 static_cast<std::int64_t>(ends.size()));
  part_.space.fence();  // the tasks are freed on return
}

template <class T>
void DeltaWhole<T>::advance(std::int64_t begin, std::int64_t end) {
  std::vector<AffineTask> tasks;
  for (std::int64_t h = begin; h < end; ++h)
    if (!known_[h]) tasks.push_back({h, h, h});
  affine_apply(part_.space, part_.slots.maps(maps_), part_.slots.known_points(part_.incoming),
               part_.slots.points(part_.outgoing), part_.joins(part_.space, tasks),
               static_cast<std::int64_t>(tasks.size()));
  part_.space.fence();  // it is sent
}

template <class T>
PassSummary DeltaWhole<T>::outputs(const std::vector<char>& heads) {
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < part_.runs.size(); ++i) {
    const Run& run = part_.runs[i];
    if (!heads.empty() && i > 0) break;  // the others do not depend on `incoming`
    for (int h = 0; h < part_.shape.heads; ++h) {
      if (!heads.empty() && !heads[h]) continue;
      Task task;
      task.head = h, task.begin = run.begin, task.end = run.end;
      task.from = part_.start_of(i, h), task.to = part_.end_of(i, h);
      if (i + 1 == part_.runs.size() && !run.ends && ends_[h].covered > 0)
        task.probe_at = run.end - ends_[h].covered, task.probe = part_.slots.state(part_.probes, h);
      task.position = part_.places[i].position, task.states_offset = part_.places[i].offset;
      tasks.push_back(task);
    }
  }
  const std::int64_t at_a_time = heads.empty() ? tokens_at_a_time() : 0;
  if (at_a_time > 0) return run_in_pieces(tasks, at_a_time);
  const PassSummary summary = part_.passes.run(tasks, output_rules(), [&] { part_.look_at_probes(ends_, maps_); });
  part_.space.fence();  // the caller reads the outputs
  return summary;
}

template <class T>
DeltaRules DeltaWhole<T>::output_rules() const {
  DeltaRules rules = part_.passes.rules(part_.computes_outputs(), false);
  rules.count_breaches = true;
  return rules;
}

/// Of the outputs, whole chunks that are worth a write; 0: all at once.
template <class T>
std::int64_t DeltaWhole<T>::tokens_at_a_time() const {
  constexpr std::int64_t bytes = 4 << 20;
  const DeltaOutputs& out = part_.out();
  if (!out.ready || !out.o || part_.runs.size() != 1 || out.states) return 0;
  const auto size = static_cast<std::int64_t>(size_of(out.o.type));
  const std::int64_t token = size * part_.shape.heads * part_.shape.d_value;
  const std::int64_t chunk = part_.options.chunk;
  return std::max<std::int64_t>(1, bytes / token / chunk) * chunk;
}

/// The tasks of the only run, one a head, about `tokens` tokens at a time. They end where chunks do, which start anew
/// at a probe: the same chunks, and so the same bits.
template <class T>
PassSummary DeltaWhole<T>::run_in_pieces(const std::vector<Task>& tasks, std::int64_t tokens) {
  const Run& run = part_.runs.front();
  for (DeviceArray<T>& states : between_)
    reserve_zeros(states, "longscan::delta::between", part_.shape.heads * part_.slots.state_size);
  const std::int64_t chunk = part_.options.chunk;
  const auto start_of_chunk = [&](const Task& whole, std::int64_t token) {
    const std::int64_t grid = whole.probe_at >= 0 && token >= whole.probe_at ? whole.probe_at : run.begin;
    return grid + (token - grid) / chunk * chunk;
  };
  PassSummary all;
  std::size_t piece = 0;
  for (std::int64_t begin = run.begin; piece == 0 || begin < run.end; begin += tokens, ++piece) {
    const bool first = piece == 0, last = begin + tokens >= run.end;
    std::int64_t end = run.end;
    std::vector<Task> now = tasks;
    for (Task& task : now) {
      const Task whole = task;
      if (!first) task.begin = start_of_chunk(whole, begin);
      if (!last) task.end = start_of_chunk(whole, begin + tokens);
      if (!first) task.from = part_.slots.known_state(between_[piece % 2], task.head);
      if (!last) task.to = part_.slots.state(between_[(piece + 1) % 2], task.head);
      if (task.probe_at < task.begin || task.probe_at >= task.end) task.probe_at = -1;
      task.position += task.begin - whole.begin;
      end = std::min(end, task.end);
    }
    const PassSummary found = part_.passes.run(now, output_rules(), [&] {
      if (last) part_.look_at_probes(ends_, maps_);
    });
    part_.space.fence();  // the caller reads the outputs
    all.breaches += found.breaches, all.fallbacks += found.fallbacks, all.terms = std::max(all.terms, found.terms);
    if (all.bad.token < 0) all.bad = found.bad;
    all.all_bad.insert(all.all_bad.end(), found.all_bad.begin(), found.all_bad.end());
    if (!last) part_.out().ready(end);
  }
  return all;
}

template <class T>
std::int64_t DeltaWhole<T>::wrong() {
  if (!part_.links.sends()) return 0;
  const std::vector<char> wrong = part_.not_forgotten(ends_);
  return std::count(wrong.begin(), wrong.end(), 1);
}

template <class T>
PassSummary DeltaWhole<T>::outputs_again(const std::vector<char>& changed, const PassSummary& found) {
  if (std::count(changed.begin(), changed.end(), 1) == 0) return found;
  if (part_.out().ready) part_.out().ready(0);
  PassSummary all = found;
  const PassSummary again = outputs(changed);
  if (all.bad.token >= 0 && changed[all.bad.head]) {  // what the other heads met still stands
    all.bad = {};
    for (const BadToken& other : all.all_bad)
      if (!changed[other.head] && (all.bad.token < 0 || other.token < all.bad.token)) all.bad = other;
  }
  if (again.bad.token >= 0 && (all.bad.token < 0 || again.bad.token < all.bad.token)) all.bad = again.bad;
  return all;
}

template <class T>
std::vector<char> DeltaWhole<T>::mend_outgoing(const std::vector<char>& changed) {
  std::vector<char> wrong = part_.not_forgotten(ends_);
  if (part_.links.receives() && part_.runs.size() == 1)
    for (std::size_t h = 0; h < wrong.size(); ++h)
      if (changed[h] && !known_[h]) wrong[h] = 1;
  part_.take_arrived(wrong);
  return wrong;
}

template <class T>
void DeltaWhole<T>::report_boundaries(DeltaReport& report) const {
  if (!part_.links.sends()) return;
  for (const Border& end : ends_) {
    report.boundaries += 1, report.boundaries_forgotten += end.forgets;
    report.horizon_max = std::max(report.horizon_max, end.forgets ? end.covered : part_.runs.back().size());
  }
}

template class DeltaWhole<float>;
template class DeltaWhole<double>;

}  // namespace longscan
