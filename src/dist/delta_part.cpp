// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_part.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace longscan {
namespace {

template <class E, class Space>
Kokkos::View<E*, typename Space::memory_space> upload(const Space& space, const std::vector<E>& from) {
  Kokkos::View<E*, typename Space::memory_space> to(Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::tasks"),
                                                    from.size());
  Kokkos::View<const E*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> host(from.data(), from.size());
  Kokkos::deep_copy(space, to, host);
  return to;
}

template <class A>
void reserve(A& array, const char* label, std::int64_t size) {
  if (static_cast<std::int64_t>(array.extent(0)) >= size) return;
  array = A();  // give the old memory back first
  array = A(std::string(label), size);
}

template <class A>
bool finite(const A& array) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), array);
  for (std::size_t i = 0; i < host.extent(0); ++i)
    if (is_non_finite(host(i))) return false;
  return true;
}

/// |P| below this is below the rounding of L, with room for states 64 times L.
template <class T>
constexpr double vanishing = (sizeof(T) == 8 ? 1.1e-16 : 6e-8) / 16;

}  // namespace

std::int64_t segment_tokens(std::int64_t length) {
  std::int64_t tokens = 1024;
  while (tokens * 512 < length) tokens *= 2;
  return tokens;
}

template <class T>
DeltaPart<T>::DeltaPart(const DeltaShape& shape, const DeltaOptions& options)
    : shape_(shape),
      options_(options),
      state_leading_(padded<T>(shape.d_value)),
      map_leading_(padded<T>(shape.d_key + shape.d_value)),
      state_size_(static_cast<std::int64_t>(shape.d_key) * state_leading_),
      map_size_(static_cast<std::int64_t>(shape.d_key) * map_leading_) {
  covered_.assign(shape.heads, 0);
  map_norms_.assign(2 * shape.heads, 0);
}

template <class T>
void DeltaPart<T>::begin(const DeltaInputs& in, const DeltaOutputs& out, std::vector<Run> runs,
                         std::vector<StatesPlace> places) {
  if (incoming.extent(0) == 0) {  // the first window; not before, so that memory can be compared with the need
    const std::int64_t states = shape_.heads * state_size_;
    in_states_ = Array<T>("longscan::delta::incoming", states);
    out_states_ = Array<T>("longscan::delta::outgoing", states);
    end_states_ = Array<T>("longscan::delta::end", states);
    incoming = Kokkos::create_mirror_view(in_states_);
    outgoing = Kokkos::create_mirror_view(out_states_);
  }
  in_ = in, out_ = out, runs_ = std::move(runs), places_ = std::move(places);
  start_index_.assign(runs_.size(), 0), end_index_.assign(runs_.size(), 0);
  std::int64_t starts = 0, ends = 0, segments = 0;
  segment_first_.clear();
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    start_index_[i] = starts, end_index_[i] = ends;
    starts += runs_[i].starts, ends += runs_[i].ends;
    segment_first_.push_back(segments);
    segments += segments_of(runs_[i]);
  }
  segment_first_.push_back(segments);
  std::fill(covered_.begin(), covered_.end(), 0);
  mapped_tokens_ = 0;
}

template <class T>
DeltaRules DeltaPart<T>::rules(bool outputs, bool map) const {
  DeltaRules r;
  r.chunk = options_.chunk, r.d_key = shape_.d_key, r.d_value = shape_.d_value;
  r.dplr = options_.variant == Variant::dplr, r.undecayed = options_.erase == Erase::undecayed;
  r.channel_decay = shape_.channel_decay && in_.log_decay, r.normalize_keys = options_.normalize_keys;
  r.round_to_bf16 = options_.precision == Precision::bf16 &&
                    (size_of(in_.k.type) > 2 || size_of(in_.v.type) > 2 || (in_.q && size_of(in_.q.type) > 2));
  r.outputs = outputs, r.map = map, r.inverse = options_.inverse, r.scale = options_.scale;
  return r;
}

template <class T>
StateRef<T> DeltaPart<T>::state(const Array<T>& slots, std::int64_t slot) const {
  return {slots.data() + slot * state_size_, state_leading_, 1};
}

template <class T>
StateRef<T> DeltaPart<T>::map_slot(const Array<T>& slots, std::int64_t slot) const {
  return {slots.data() + slot * map_size_, map_leading_, 1};
}

template <class T>
AffineMaps<T> DeltaPart<T>::maps(const Array<T>& slots) const {
  return {slots.data(), shape_.d_key, shape_.d_value, map_leading_, map_size_, true};
}

/// The state before a run: given by the user, come in from elsewhere, or zero.
template <class T>
StateRef<const T> DeltaPart<T>::start_of(std::int64_t run, int head) const {
  const std::int64_t K = shape_.d_key, V = shape_.d_value;
  if (!runs_[run].starts) {
    const StateRef<T> s = state(in_states_, head);
    return {s.data, s.k_stride, s.v_stride};
  }
  if (!in_.initial_states) return {};
  const auto* first = static_cast<const T*>(in_.initial_states);
  return {first + (start_index_[run] * shape_.heads + head) * V * K, 1, K};
}

template <class T>
PassSummary DeltaPart<T>::pass(const std::vector<Task>& tasks, const DeltaRules& rules) {
  const auto device_tasks = upload(space_, tasks);
  Array<DeltaCounts> counts("longscan::delta::counts", tasks.size());
  DeltaPass<T> pass;
  pass.rules = rules;
  pass.in = {in_.q, in_.k, in_.v, in_.beta, in_.eta, in_.log_decay, in_.a, in_.b};
  pass.tasks = device_tasks.data(), pass.task_count = static_cast<std::int64_t>(tasks.size());
  pass.heads = shape_.heads, pass.counts = counts.data();
  if (rules.outputs) {
    pass.out = out_.o;
    pass.state_every = options_.state_every, pass.states = static_cast<T*>(out_.states);
  }
  delta_pass(space_, pass);
  // waits: the host needs the counts
  const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), counts);
  PassSummary summary;
  const Task* worst = nullptr;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const DeltaCounts& c = found(i);
    summary.breaches += c.breaches, summary.fallbacks += c.fallbacks;
    summary.terms = std::max<std::int64_t>(summary.terms, c.terms);
    if (c.first_bad >= 0) summary.all_bad.push_back({c.first_bad, tasks[i].head});
    if (c.first_bad >= 0 && (!worst || c.first_bad < summary.bad.token)) {
      worst = &tasks[i];
      summary.bad = {c.first_bad, tasks[i].head};
    }
  }
  if (worst && rules.chunk > 1) summary.bad = locate(*worst, summary.bad.token);
  return summary;
}

/// The first bad token of a task whose chunk at `chunk_begin` has one: that chunk again, token by token.
template <class T>
BadToken DeltaPart<T>::locate(const Task& task, std::int64_t chunk_begin) {
  DeltaRules r = rules(true, false);
  r.outputs = static_cast<bool>(in_.q);
  const DeltaOutputs kept = out_;
  out_ = {};  // nothing is to be written
  Array<T> before("longscan::delta::locate", state_size_);
  Task to_chunk = task;
  to_chunk.end = chunk_begin, to_chunk.to = state(before, 0), to_chunk.probe_at = -1;
  r.outputs = false;
  pass({to_chunk}, r);
  Task chunk = task;
  chunk.begin = chunk_begin, chunk.to = {}, chunk.probe_at = -1;
  chunk.from = {before.data(), state_leading_, 1};
  chunk.end = std::min(task.end, chunk_begin + options_.chunk);
  r.chunk = 1, r.outputs = static_cast<bool>(in_.q);
  const BadToken found = pass({chunk}, r).bad;
  out_ = kept;
  return found.token >= 0 ? found : BadToken{chunk_begin, task.head};
}

template <class T>
std::vector<char> DeltaPart<T>::map_until_forgotten(std::int64_t limit) {
  const int H = shape_.heads, C = options_.chunk;
  const Run run = runs_.back();
  limit = std::min(limit, run.size());
  for (auto* slots : {&maps_, &new_maps_, &composed_}) reserve(*slots, "longscan::delta::maps", H * map_size_);
  reserve(probes_, "longscan::delta::probes", H * state_size_);
  // `tokens` before the end, moved out to the start of a chunk
  const auto aligned = [&](double tokens) {
    const auto whole = static_cast<std::int64_t>(std::min(tokens, static_cast<double>(limit)));
    return limit - (limit - whole) / C * C;
  };
  std::vector<char> forgets(H, 0);
  std::vector<std::int64_t> wanted(H, aligned(16.0 * shape_.d_key));
  std::vector<int> active(H);
  for (int h = 0; h < H; ++h) active[h] = h;
  Array<double> norms("longscan::delta::norms", 2 * H);
  while (!active.empty()) {
    std::vector<Task> tasks;
    std::vector<AffineTask> joins;
    for (int h : active) {
      Task task;
      task.head = h, task.begin = run.end - wanted[h], task.end = run.end - covered_[h];
      task.to = map_slot(covered_[h] == 0 ? maps_ : new_maps_, h);
      tasks.push_back(task);
      mapped_tokens_ += task.end - task.begin;
      if (covered_[h] > 0) joins.push_back({h, h, h});
    }
    pass(tasks, rules(false, true));
    if (!joins.empty()) {
      const auto device = upload(space_, joins);
      affine_compose(space_, maps(new_maps_), maps(maps_), maps(composed_), device.data(),
                     static_cast<std::int64_t>(joins.size()));
      for (const AffineTask& join : joins) {
        const auto slot = std::pair(join.out * map_size_, (join.out + 1) * map_size_);
        Kokkos::deep_copy(space_, Kokkos::subview(maps_, slot), Kokkos::subview(composed_, slot));
      }
    }
    affine_norms(space_, maps(maps_), norms.data(), H);
    const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), norms);  // waits: decides what is next
    std::vector<int> next;
    for (int h : active) {
      covered_[h] = wanted[h];
      map_norms_[2 * h] = found(2 * h), map_norms_[2 * h + 1] = found(2 * h + 1);
      forgets[h] = found(2 * h) <= vanishing<T>;
      if (forgets[h] || covered_[h] >= limit || !std::isfinite(found(2 * h))) continue;
      // |P| falls about exponentially: aim where it should vanish, between 1.25 and 4 times as far
      const double start = std::log(std::sqrt(static_cast<double>(shape_.d_key)));
      const double fallen = start - std::log(found(2 * h)), needed = start - std::log(vanishing<T>);
      const double factor = fallen > 0 ? std::clamp(1.1 * needed / fallen, 1.25, 4.0) : 4.0;
      wanted[h] = aligned(factor * static_cast<double>(covered_[h]));
      next.push_back(h);
    }
    active = next;
  }
  // the state at the end of a head that forgets is L, the map of zero
  Kokkos::deep_copy(space_, end_states_, T(0));
  std::vector<AffineTask> ends;
  for (int h = 0; h < H; ++h)
    if (forgets[h]) ends.push_back({h, h, h});
  if (!ends.empty()) {
    const auto device = upload(space_, ends);
    affine_apply(space_, maps(maps_), AffinePoints<const T>{end_states_.data(), state_leading_, state_size_},
                 AffinePoints<T>{out_states_.data(), state_leading_, state_size_}, device.data(),
                 static_cast<std::int64_t>(ends.size()));
  }
  Kokkos::deep_copy(outgoing, out_states_);  // waits: it goes to the next rank
  return forgets;
}

template <class T>
void DeltaPart<T>::run_to_end(const std::vector<char>& known) {
  const auto last = static_cast<std::int64_t>(runs_.size()) - 1;
  Kokkos::deep_copy(in_states_, incoming);
  std::vector<Task> tasks;
  std::vector<AffineTask> ends;
  for (int h = 0; h < shape_.heads; ++h) {
    if (known[h]) continue;
    Task task;
    task.head = h, task.begin = runs_[last].begin, task.end = runs_[last].end - covered_[h];
    task.from = start_of(last, h);
    task.to = state(covered_[h] > 0 ? end_states_ : out_states_, h);
    tasks.push_back(task);
    mapped_tokens_ += task.end - task.begin;
    if (covered_[h] > 0) ends.push_back({h, h, h});
  }
  pass(tasks, rules(false, false));
  if (!ends.empty()) {
    const auto device = upload(space_, ends);
    affine_apply(space_, maps(maps_), AffinePoints<const T>{end_states_.data(), state_leading_, state_size_},
                 AffinePoints<T>{out_states_.data(), state_leading_, state_size_}, device.data(),
                 static_cast<std::int64_t>(ends.size()));
  }
  Kokkos::deep_copy(outgoing, out_states_);  // waits: it goes to the next rank
}

template <class T>
void DeltaPart<T>::advance(std::int64_t begin, std::int64_t end, const std::vector<char>& known) {
  const auto range = std::pair(begin * state_size_, end * state_size_);
  Kokkos::deep_copy(Kokkos::subview(in_states_, range), Kokkos::subview(incoming, range));
  std::vector<AffineTask> tasks;
  for (std::int64_t h = begin; h < end; ++h)
    if (!known[h]) tasks.push_back({h, h, h});
  const auto device = upload(space_, tasks);
  affine_apply(space_, maps(maps_), AffinePoints<const T>{in_states_.data(), state_leading_, state_size_},
               AffinePoints<T>{out_states_.data(), state_leading_, state_size_}, device.data(),
               static_cast<std::int64_t>(tasks.size()));
  Kokkos::deep_copy(Kokkos::subview(outgoing, range), Kokkos::subview(out_states_, range));  // waits: it is sent
}

template <class T>
std::vector<char> DeltaPart<T>::not_forgotten(const std::vector<char>& forgets) const {
  const auto probes = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), probes_);
  std::vector<char> wrong(forgets.size(), 0);
  for (std::size_t h = 0; h < forgets.size(); ++h) {
    if (!forgets[h]) continue;
    double squares = 0;
    for (std::int64_t i = 0; i < state_size_; ++i) {
      const double x = probes(h * state_size_ + i);
      squares += x * x;
    }
    wrong[h] = !(map_norms_[2 * h] * std::sqrt(squares) <= 64 * vanishing<T> * map_norms_[2 * h + 1]);
  }
  return wrong;
}

template <class T>
void DeltaPart<T>::take_true_end(const std::vector<char>& heads) {
  const auto ends = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), end_states_);
  for (std::size_t h = 0; h < heads.size(); ++h)
    if (heads[h])
      for (std::int64_t i = h * state_size_; i < static_cast<std::int64_t>(h + 1) * state_size_; ++i)
        outgoing(i) = ends(i);
}

template <class T>
std::int64_t DeltaPart<T>::segments_of(const Run& run) const {
  const std::int64_t tokens = segment_tokens(run.length);
  return (run.size() + tokens - 1) / tokens;
}

/// Segment by segment and head by head; with outputs from the states at the borders, else the maps.
template <class T>
std::vector<DeltaTask<T>> DeltaPart<T>::segment_tasks(bool outputs) const {
  std::vector<Task> tasks;
  const std::int64_t H = shape_.heads;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    const std::int64_t tokens = segment_tokens(run.length);
    for (std::int64_t j = 0; j < segments_of(run); ++j)
      for (int h = 0; h < H; ++h) {
        Task task;
        task.head = h, task.begin = run.begin + j * tokens, task.end = std::min(run.end, task.begin + tokens);
        const std::int64_t segment = segment_first_[i] + j, border = segment + static_cast<std::int64_t>(i);
        if (outputs) {
          const StateRef<T> from = state(segment_states_, border * H + h);
          task.from = {from.data, from.k_stride, from.v_stride};
          task.position = places_[i].position + j * tokens, task.states_offset = places_[i].offset;
        } else {
          task.to = map_slot(segment_maps_, segment * H + h);
        }
        tasks.push_back(task);
      }
  }
  return tasks;
}

template <class T>
void DeltaPart<T>::map_segments() {
  const std::int64_t H = shape_.heads, segments = segment_first_.back(), borders = segments + runs_.size();
  reserve(segment_maps_, "longscan::delta::segment_maps", segments * H * map_size_);
  reserve(segment_states_, "longscan::delta::segment_states", borders * H * state_size_);
  const auto tasks = segment_tasks(false);
  for (const Task& task : tasks) mapped_tokens_ += task.end - task.begin;
  DeltaRules r = rules(false, true);
  r.count_breaches = !out_.o && !out_.states;  // else `outputs` counts
  segment_breaches_ = pass(tasks, r).breaches;
  scan_runs(first_continues() ? 1 : 0, static_cast<std::int64_t>(runs_.size()), 0, H);
}

/// States at the borders of runs [first_run, last_run), heads [begin, end).
template <class T>
void DeltaPart<T>::scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end) {
  const std::int64_t H = shape_.heads;
  std::vector<Task> starts;  // no tokens: they copy
  std::vector<AffineChain> chains;
  for (std::int64_t i = first_run; i < last_run; ++i)
    for (std::int64_t h = begin; h < end; ++h) {
      Task start;
      start.head = static_cast<int>(h), start.from = start_of(i, start.head);
      start.to = state(segment_states_, (segment_first_[i] + i) * H + h);
      starts.push_back(start);
      chains.push_back({segment_first_[i] * H + h, H, (segment_first_[i] + i) * H + h, H, segments_of(runs_[i])});
    }
  if (chains.empty()) return;
  pass(starts, rules(false, false));
  const auto device = upload(space_, chains);
  affine_scan(space_, maps(segment_maps_), AffinePoints<T>{segment_states_.data(), state_leading_, state_size_},
              device.data(), static_cast<std::int64_t>(chains.size()));
  space_.fence();  // the chains are freed on return
}

template <class T>
void DeltaPart<T>::scan_first_run(std::int64_t begin, std::int64_t end) {
  const auto range = std::pair(begin * state_size_, end * state_size_);
  Kokkos::deep_copy(Kokkos::subview(in_states_, range), Kokkos::subview(incoming, range));
  scan_runs(0, 1, begin, end);
}

template <class T>
void DeltaPart<T>::take_segment_end(std::int64_t begin, std::int64_t end) {
  const std::int64_t H = shape_.heads, border = segment_first_.back() + static_cast<std::int64_t>(runs_.size()) - 1;
  Kokkos::deep_copy(
      Kokkos::subview(outgoing, std::pair(begin * state_size_, end * state_size_)),
      Kokkos::subview(segment_states_, std::pair((border * H + begin) * state_size_,
                                                 (border * H + end) * state_size_)));  // waits: it is sent
}

template <class T>
PassSummary DeltaPart<T>::outputs(const std::vector<char>& heads) {
  Kokkos::deep_copy(in_states_, incoming);
  const std::int64_t H = shape_.heads, K = shape_.d_key, V = shape_.d_value;
  const auto wanted = [&](int h) { return heads.empty() || heads[h]; };
  const auto user_final = [&](std::size_t run, int h) -> StateRef<T> {
    if (!runs_[run].ends || !out_.final_states) return {};
    return {static_cast<T*>(out_.final_states) + (end_index_[run] * H + h) * V * K, 1, K};
  };
  const bool computes = out_.o || out_.states;
  std::vector<Task> tasks, copies;
  if (options_.reproducible) {
    tasks = segment_tasks(true);
    for (std::size_t i = 0; i < runs_.size(); ++i)
      for (int h = 0; h < H; ++h) {  // the last border of each run
        Task copy;
        const StateRef<T> from = state(segment_states_, (segment_first_[i + 1] + static_cast<std::int64_t>(i)) * H + h);
        copy.head = h, copy.from = {from.data, from.k_stride, from.v_stride};
        copy.to = runs_[i].ends ? user_final(i, h) : state(end_states_, h);
        copies.push_back(copy);
      }
  } else {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      const bool last = i + 1 == runs_.size();
      for (int h = 0; h < H; ++h) {
        // after a correction only the first run of the marked heads changes
        if (!wanted(h) || (!heads.empty() && i > 0)) continue;
        Task task;
        task.head = h, task.begin = run.begin, task.end = run.end, task.from = start_of(i, h);
        task.to = run.ends ? user_final(i, h) : state(end_states_, h);
        if (last && !run.ends && covered_[h] > 0) {
          task.probe_at = run.end - covered_[h];
          task.probe = state(probes_, h);
        }
        task.position = places_[i].position, task.states_offset = places_[i].offset;
        tasks.push_back(task);
      }
    }
  }
  DeltaRules r = rules(computes, false);
  r.count_breaches = true;
  PassSummary summary;
  if (computes || !options_.reproducible) {
    summary = pass(tasks, r);
  } else {
    // the states at the borders are all there is: only a bad one needs a pass, to name the token
    summary.bad = finite(segment_states_) ? BadToken{} : pass(tasks, r).bad;
    summary.breaches = segment_breaches_;
  }
  if (!copies.empty()) pass(copies, rules(false, false));
  // a map may overflow where the outputs do not: the state behind the last token shows it
  if (options_.reproducible && !runs_.empty() && summary.bad.token < 0 && !finite(segment_states_))
    summary.bad = {std::max<std::int64_t>(0, runs_.back().end - 1), 0};
  return summary;
}

template <class T>
std::int64_t DeltaPart<T>::workspace_bytes(std::int64_t segmented_tokens) const {
  const std::int64_t segments = (segmented_tokens + 1023) / 1024;
  const std::int64_t elements = 6 * state_size_ + 3 * map_size_ + segments * (state_size_ + map_size_);
  return elements * shape_.heads * static_cast<std::int64_t>(sizeof(T)) +
         static_cast<std::int64_t>(delta_scratch_bytes<T>(rules(true, true))) * Space().concurrency() /
             delta_team<Space>;
}

template class DeltaPart<float>;
template class DeltaPart<double>;

}  // namespace longscan
