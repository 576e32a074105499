// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_part.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace longscan {
namespace {

/// |P| below this is below the rounding of L, with room for states 64 times L.
double vanishing_map(double rounding) { return rounding / 16; }
/// Zeros, so that what pads the rows of maps and states is zero.
template <class A>
void reserve_zeros(A& array, const char* label, std::int64_t size) {
  if (static_cast<std::int64_t>(array.extent(0)) >= size) return;
  array = A();  // give the old memory back first
  array = A(std::string(label), size);
}

template <class T>
struct NonFiniteCount {
  const T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i, int& count) const { count += is_non_finite(data[i]) ? 1 : 0; }
};

/// Segments shorter than this many chunks would spend their time on maps and starts.
constexpr std::int64_t least_chunks = 16;

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
                         std::vector<StatesPlace> places, bool passes_on) {
  if (incoming.extent(0) == 0) {  // the first window; not before, so that memory can be compared with the need
    const std::int64_t states = shape_.heads * state_size_;
    incoming = Array<T>("longscan::delta::incoming", states);
    outgoing = Array<T>("longscan::delta::outgoing", states);
    end_states_ = Array<T>("longscan::delta::end", states);
  }
  in_ = in, out_ = out, runs_ = std::move(runs), places_ = std::move(places);
  start_index_.assign(runs_.size(), 0), end_index_.assign(runs_.size(), 0);
  std::int64_t starts = 0, ends = 0;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    start_index_[i] = starts, end_index_[i] = ends;
    starts += runs_[i].starts, ends += runs_[i].ends;
  }
  plan_segments(passes_on);
  std::fill(covered_.begin(), covered_.end(), 0);
  borders_.clear();
  chained_ = options_.reproducible && !runs_.empty();
  mapped_tokens_ = tensor_tasks_ = general_tasks_ = 0;
}

template <class T>
DeltaRules DeltaPart<T>::rules(bool outputs, bool map) const {
  DeltaRules r;
  r.chunk = options_.chunk, r.d_key = shape_.d_key, r.d_value = shape_.d_value;
  r.dplr = options_.variant == Variant::dplr, r.undecayed = options_.erase == Erase::undecayed;
  r.channel_decay = shape_.channel_decay && in_.log_decay, r.normalize_keys = options_.normalize_keys;
  r.round_to_bf16 = options_.precision == Precision::bf16 &&
                    (size_of(in_.k.type) > 2 || size_of(in_.v.type) > 2 || (in_.q && size_of(in_.q.type) > 2));
  r.half_operands = options_.precision == Precision::bf16;
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
    const StateRef<T> s = state(incoming, head);
    return {s.data, s.k_stride, s.v_stride};
  }
  if (!in_.initial_states) return {};
  const auto* first = static_cast<const T*>(in_.initial_states);
  return {first + (start_index_[run] * shape_.heads + head) * V * K, 1, K};
}

template <class T>
ScanPart<T> DeltaPart<T>::share(ScanLinks links, std::vector<char> known, bool joined) const {
  ScanPart<T> part;
  part.links = links, part.count = shape_.heads, part.known = std::move(known);
  part.in = points(incoming), part.out = points(outgoing), part.maps = maps(maps_);
  if (segmented() && !joined) {
    part.maps = maps(segment_maps_);
    part.map_step = shape_.heads, part.each = runs_.empty() ? 1 : std::max<std::int64_t>(1, maps_of(0));
  }
  return part;
}

template <class T>
DeltaPass<T> DeltaPart<T>::describe(const DeltaRules& rules) const {
  DeltaPass<T> pass;
  pass.rules = rules;
  pass.in = {in_.q, in_.k, in_.v, in_.beta, in_.eta, in_.log_decay, in_.a, in_.b};
  pass.heads = shape_.heads, pass.tokens = runs_.empty() ? 0 : runs_.back().end;
  if (rules.outputs) {
    pass.out = out_.o;
    pass.state_every = options_.state_every, pass.states = static_cast<T*>(out_.states);
  }
  return pass;
}

/// By the fastest kernels that take the pass; tasks that they cannot hold the numbers of follow by the general ones.
template <class T>
PassSummary DeltaPart<T>::pass(const std::vector<Task>& tasks, const DeltaRules& rules) {
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules);
    if (!tasks.empty() && tensor_.applies(pass)) {
      tensor_.launch(space_, pass, tasks);
      const std::vector<char> rejected = tensor_.rejected(space_);  // waits: the host needs to know
      std::vector<Task> again;
      for (std::size_t i = 0; i < tasks.size(); ++i)
        if (rejected[i]) again.push_back(tasks[i]);
      tensor_tasks_ += static_cast<std::int64_t>(tasks.size() - again.size());
      PassSummary summary = general_pass(again, rules);
      if (rules.count_breaches) summary.breaches += tensor_.breaches();
      return summary;
    }
  }
  return general_pass(tasks, rules);
}

template <class T>
PassSummary DeltaPart<T>::general_pass(const std::vector<Task>& tasks, const DeltaRules& rules) {
  PassSummary summary;
  if (tasks.empty()) return summary;
  const auto n = static_cast<std::int64_t>(tasks.size());
  reserve(counts_, "longscan::delta::counts", n);
  DeltaPass<T> pass = describe(rules);
  pass.tasks = tasks_(space_, tasks), pass.task_count = n, pass.counts = counts_.data();
  delta_pass(space_, pass);
  // waits: the host needs the counts
  std::vector<DeltaCounts> found(n);
  copy_to_host(counts_.data(), n, found.data());
  general_tasks_ += n;
  const Task* worst = nullptr;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const DeltaCounts& c = found[i];
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
  general_pass({to_chunk}, r);
  Task chunk = task;
  chunk.begin = chunk_begin, chunk.to = {}, chunk.probe_at = -1;
  chunk.from = {before.data(), state_leading_, 1};
  chunk.end = std::min(task.end, chunk_begin + options_.chunk);
  r.chunk = 1, r.outputs = static_cast<bool>(in_.q);
  const BadToken found = general_pass({chunk}, r).bad;
  out_ = kept;
  return found.token >= 0 ? found : BadToken{chunk_begin, task.head};
}

template <class T>
double DeltaPart<T>::vanishing() const {
  if (sizeof(T) == 8) return vanishing_map(1.1e-16);
  const bool halves = tensor_side_by_side() > 0;  // then L itself has the rounding of fp16 operands
  return vanishing_map(halves ? 4.9e-4 / 4 : 6e-8);
}

/// The maps of the last tokens before each border. With `forgetting` as few as let P vanish, else as many as the
/// border's limit allows: maps of the tokens before are joined to those that there are.
template <class T>
void DeltaPart<T>::map_borders(std::vector<Border>& borders, Array<T>& slots, bool forgetting) {
  const std::int64_t C = options_.chunk;
  std::int64_t size = 0;
  for (const Border& b : borders) size = std::max(size, b.slot + 1);
  // `tokens` before the border, moved out to the start of a chunk
  const auto aligned = [&](const Border& b, double tokens) {
    const auto whole = static_cast<std::int64_t>(std::min(tokens, static_cast<double>(b.limit)));
    return b.limit - (b.limit - whole) / C * C;
  };
  reserve_zeros(slots, "longscan::delta::maps", size * map_size_);
  DeltaRules r = rules(false, true);
  r.count_breaches = !forgetting && !out_.o && !out_.states;  // else `outputs` counts
  segment_breaches_ = 0;
  // Unit keys with beta uniform in (0, 1) are forgotten in about 45 K tokens where fp16 operands allow more to be left
  // out, decays forget sooner.
  const double guess = (in_.log_decay ? 4.0 : tensor_side_by_side() > 0 ? 48.0 : 16.0) * shape_.d_key;
  std::vector<std::int64_t> wanted(borders.size());
  std::vector<std::size_t> active(borders.size());
  for (std::size_t i = 0; i < borders.size(); ++i) {
    wanted[i] = forgetting ? aligned(borders[i], guess) : borders[i].limit;
    active[i] = i;
  }
  while (!active.empty()) {
    std::vector<Task> tasks;
    std::vector<AffineTask> joins;
    for (std::size_t i : active) {
      const Border& b = borders[i];
      const auto fresh = static_cast<std::int64_t>(joins.size());
      Task task;
      task.head = b.head, task.begin = b.end - wanted[i], task.end = b.end - b.covered;
      if (b.covered > 0) {
        reserve_zeros(new_maps_, "longscan::delta::new_maps", static_cast<std::int64_t>(active.size()) * map_size_);
        joins.push_back({b.slot, fresh, fresh});
      }
      task.to = b.covered == 0 ? map_slot(slots, b.slot) : map_slot(new_maps_, fresh);
      tasks.push_back(task);
      mapped_tokens_ += task.end - task.begin;
    }
    segment_breaches_ += pass(tasks, r).breaches;
    if (!joins.empty()) {
      reserve_zeros(composed_, "longscan::delta::composed", static_cast<std::int64_t>(joins.size()) * map_size_);
      const auto count = static_cast<std::int64_t>(joins.size());
      const AffineTask* tasks = joins_(space_, joins);
      affine_compose(space_, maps(new_maps_), maps(slots), maps(composed_), tasks, count);
      affine_copy(space_, maps(composed_), maps(slots), tasks, count);
    }
    for (std::size_t i : active) borders[i].covered = wanted[i];
    if (!forgetting) return;
    reserve(norms_, "longscan::delta::norms", 2 * size);
    affine_norms(space_, maps(slots), norms_.data(), size);
    std::vector<double> found(2 * size);
    copy_to_host(norms_.data(), 2 * size, found.data());  // waits: decides what is next
    std::vector<std::size_t> next;
    for (std::size_t i : active) {
      Border& b = borders[i];
      b.P = found[2 * b.slot], b.L = found[2 * b.slot + 1];
      b.forgets = b.P <= vanishing();
      if (b.forgets || b.covered >= b.limit || !std::isfinite(b.P)) continue;
      // |P| falls about exponentially: aim where it should vanish, between 1.25 and 4 times as far
      const double start = std::log(std::sqrt(static_cast<double>(shape_.d_key)));
      const double fallen = start - std::log(b.P), needed = start - std::log(vanishing());
      const double factor = fallen > 0 ? std::clamp(1.1 * needed / fallen, 1.25, 4.0) : 4.0;
      wanted[i] = aligned(b, factor * static_cast<double>(b.covered));
      next.push_back(i);
    }
    active = next;
  }
}

template <class T>
std::vector<char> DeltaPart<T>::map_until_forgotten(std::int64_t limit) {
  const int H = shape_.heads;
  const Run run = runs_.back();
  reserve_zeros(probes_, "longscan::delta::probes", H * state_size_);
  std::vector<Border> ends(H);
  for (int h = 0; h < H; ++h) ends[h] = {h, run.end, std::min(limit, run.size()), h};
  map_borders(ends, maps_, true);
  // the state at the end of a head that forgets is L, the map of zero
  std::vector<char> forgets(H, 0);
  std::vector<AffineTask> constants;
  for (int h = 0; h < H; ++h) {
    covered_[h] = ends[h].covered, map_norms_[2 * h] = ends[h].P, map_norms_[2 * h + 1] = ends[h].L;
    forgets[h] = ends[h].forgets;
    if (forgets[h]) constants.push_back({h, h, h});
  }
  affine_constants(space_, maps(maps_), points(outgoing), joins_(space_, constants),
                   static_cast<std::int64_t>(constants.size()));
  return forgets;
}

template <class T>
void DeltaPart<T>::run_to_end(const std::vector<char>& known) {
  const auto last = static_cast<std::int64_t>(runs_.size()) - 1;
  std::vector<Task> tasks;
  std::vector<AffineTask> ends;
  for (int h = 0; h < shape_.heads; ++h) {
    if (known[h]) continue;
    Task task;
    task.head = h, task.begin = runs_[last].begin, task.end = runs_[last].end - covered_[h];
    task.from = start_of(last, h);
    task.to = state(covered_[h] > 0 ? end_states_ : outgoing, h);
    tasks.push_back(task);
    mapped_tokens_ += task.end - task.begin;
    if (covered_[h] > 0) ends.push_back({h, h, h});
  }
  pass(tasks, rules(false, false));
  if (!ends.empty()) {
    affine_apply(space_, maps(maps_), AffinePoints<const T>{end_states_.data(), state_leading_, state_size_},
                 points(outgoing), joins_(space_, ends), static_cast<std::int64_t>(ends.size()));
  }
  space_.fence();  // the tasks are freed on return
}

template <class T>
void DeltaPart<T>::advance(std::int64_t begin, std::int64_t end, const std::vector<char>& known) {
  std::vector<AffineTask> tasks;
  for (std::int64_t h = begin; h < end; ++h)
    if (!known[h]) tasks.push_back({h, h, h});
  affine_apply(space_, maps(maps_), AffinePoints<const T>{incoming.data(), state_leading_, state_size_},
               points(outgoing), joins_(space_, tasks), static_cast<std::int64_t>(tasks.size()));
  space_.fence();  // it is sent
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
    wrong[h] = !(map_norms_[2 * h] * std::sqrt(squares) <= 64 * vanishing() * map_norms_[2 * h + 1]);
  }
  return wrong;
}

template <class T>
void DeltaPart<T>::take_true_end(const std::vector<char>& heads) {
  std::vector<CopyPiece<T>> pieces;
  for (std::size_t h = 0; h < heads.size(); ++h)
    if (heads[h])
      pieces.push_back({end_states_.data() + h * state_size_, outgoing.data() + h * state_size_, state_size_});
  copy_pieces(pieces);
}

// --- segments
// ----------------------------------------------------------------------------------------------------------

template <class T>
int DeltaPart<T>::tensor_side_by_side() const {
  if constexpr (sizeof(T) == 4) {
    const DeltaPass<T> pass = describe(rules(static_cast<bool>(out_.o), false));
    if (tensor_.applies(pass)) return DeltaTensor::side_by_side(pass);
  }
  return 0;
}

/// Runs are cut into segments of equal length, as many as the device takes at a time; with `reproducible` into segments
/// that depend on the sequence alone. Maps are made where a state is wanted before the outputs: between segments, and
/// behind the last run if it goes to another rank.
template <class T>
void DeltaPart<T>::plan_segments(bool passes_on) {
  const std::int64_t C = options_.chunk, H = shape_.heads;
  std::int64_t tokens = 0;
  for (const Run& run : runs_) tokens += run.size();
  const int tensor = tensor_side_by_side();
  const std::int64_t lanes = std::max<std::int64_t>(1, (tensor > 0 ? tensor : delta_side_by_side(space_)) / H);
  const std::int64_t planned =
      options_.segment > 0 ? options_.segment : std::max((tokens + lanes - 1) / lanes, least_chunks * C);
  segment_first_.assign(1, 0), map_first_.assign(1, 0), border_first_.assign(1, 0), segment_tokens_.clear();
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const std::int64_t size = runs_[i].size();
    std::int64_t each = size;  // one segment
    if (options_.reproducible) {
      each = segment_tokens(runs_[i].length);
    } else if (segmented() && size > planned) {
      const std::int64_t count = (size + planned - 1) / planned;
      each = ((size + count - 1) / count + C - 1) / C * C;
    }
    each = std::max<std::int64_t>(1, each);
    const std::int64_t segments = (size + each - 1) / each;
    const bool wants_end = options_.reproducible || (passes_on && i + 1 == runs_.size());
    const std::int64_t maps = !segmented() ? 0 : std::max<std::int64_t>(0, wants_end ? segments : segments - 1);
    segment_tokens_.push_back(each);
    segment_first_.push_back(segment_first_.back() + segments);
    map_first_.push_back(map_first_.back() + maps);
    border_first_.push_back(border_first_.back() + (segmented() && (maps > 0 || wants_end) ? maps + 1 : 0));
  }
}

template <class T>
TokenRange DeltaPart<T>::segment(std::int64_t run, std::int64_t j) const {
  const std::int64_t begin = runs_[run].begin + j * segment_tokens_[run];
  return {begin, std::min(runs_[run].end, begin + segment_tokens_[run])};
}

template <class T>
void DeltaPart<T>::map_segments(bool forgetting) {
  const std::int64_t H = shape_.heads, all_runs = static_cast<std::int64_t>(runs_.size());
  reserve_zeros(border_states_, "longscan::delta::borders", border_first_.back() * H * state_size_);
  borders_.clear();
  for (std::int64_t i = 0; i < all_runs; ++i)
    for (std::int64_t j = 0; j < maps_of(i); ++j)
      for (int h = 0; h < H; ++h) {
        const TokenRange tokens = segment(i, j);
        borders_.push_back({(map_first_[i] + j) * H + h, tokens.end, tokens.size(), h});
      }
  map_borders(borders_, segment_maps_, forgetting && !options_.reproducible);
  std::vector<AffineTask> constants;  // where the map forgets, the state is L
  for (std::int64_t i = 0; i < all_runs; ++i)
    for (std::int64_t j = 0; j < maps_of(i); ++j)
      for (std::int64_t h = 0; h < H; ++h) {
        const std::int64_t map = (map_first_[i] + j) * H + h;
        if (borders_[map].forgets) constants.push_back({map, 0, (border_first_[i] + j + 1) * H + h});
      }
  if (!constants.empty())
    affine_constants(space_, maps(segment_maps_), points(border_states_), joins_(space_, constants),
                     static_cast<std::int64_t>(constants.size()));
  scan_runs(first_continues() ? 1 : 0, all_runs, 0, H, true);
  scan_runs(0, all_runs, 0, H, false);
}

/// States at the borders of runs [first_run, last_run), heads [begin, end), from maps that do not forget: those that
/// follow from the state before the run (`leading`), or the others.
template <class T>
void DeltaPart<T>::scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end,
                             bool leading) {
  const std::int64_t H = shape_.heads;
  std::vector<Task> starts;
  std::vector<AffineChain> chains;
  for (std::int64_t i = first_run; i < last_run; ++i) {
    if (border_first_[i + 1] == border_first_[i]) continue;
    for (std::int64_t h = begin; h < end; ++h) {
      const auto forgets = [&](std::int64_t j) { return borders_[(map_first_[i] + j) * H + h].forgets; };
      if (leading) {
        Task start;
        start.head = static_cast<int>(h), start.from = start_of(i, start.head);
        start.to = state(border_states_, border_first_[i] * H + h);
        starts.push_back(start);
      }
      for (std::int64_t j = 0; j < maps_of(i);) {
        std::int64_t next = j;
        while (next < maps_of(i) && !forgets(next)) ++next;
        if (next > j && leading == (j == 0))
          chains.push_back({(map_first_[i] + j) * H + h, H, (border_first_[i] + j) * H + h, H, next - j});
        if (leading) break;
        j = next + 1;
      }
    }
  }
  if (!starts.empty())
    copy_states(space_, tasks_(space_, starts), static_cast<std::int64_t>(starts.size()), shape_.d_key, shape_.d_value);
  chained_ = chained_ || !chains.empty();
  if (!chains.empty())
    affine_scan(space_, maps(segment_maps_), points(border_states_), chains_(space_, chains),
                static_cast<std::int64_t>(chains.size()));
}

template <class T>
void DeltaPart<T>::scan_first_run(std::int64_t begin, std::int64_t end) {
  scan_runs(0, 1, begin, end, true);
}

template <class T>
std::vector<char> DeltaPart<T>::first_run_forgets() const {
  std::vector<char> any(shape_.heads, 0);
  if (!runs_.empty())
    for (std::int64_t i = 0; i < maps_of(0) * shape_.heads; ++i)
      if (borders_[i].forgets) any[borders_[i].head] = 1;
  return any;
}

template <class T>
void DeltaPart<T>::take_segment_end(std::int64_t begin, std::int64_t end) {
  const std::int64_t H = shape_.heads, border = border_first_.back() - 1;
  Kokkos::deep_copy(
      Kokkos::subview(outgoing, std::pair(begin * state_size_, end * state_size_)),
      Kokkos::subview(border_states_, std::pair((border * H + begin) * state_size_, (border * H + end) * state_size_)));
}

template <class T>
void DeltaPart<T>::join_maps() {
  const std::int64_t H = shape_.heads, count = runs_.empty() ? 0 : maps_of(0);
  reserve_zeros(maps_, "longscan::delta::maps", H * map_size_);
  reserve_zeros(composed_, "longscan::delta::composed", H * map_size_);
  for (std::int64_t j = 0; j < count; ++j) {
    std::vector<AffineTask> tasks;
    for (std::int64_t h = 0; h < H; ++h) tasks.push_back(j == 0 ? AffineTask{h, h, h} : AffineTask{j * H + h, h, h});
    if (j == 0) {
      affine_copy(space_, maps(segment_maps_), maps(maps_), joins_(space_, tasks), H);
    } else {
      affine_compose(space_, maps(maps_), maps(segment_maps_), maps(composed_), joins_(space_, tasks), H);
      std::swap(maps_, composed_);
    }
  }
}

template <class T>
std::vector<double> DeltaPart<T>::norms_of(const Array<T>& slots, std::int64_t count) {
  reserve(norms_, "longscan::delta::norms", count);
  affine_norms(space_, AffinePoints<const T>{slots.data(), state_leading_, state_size_}, shape_.d_key, norms_.data(),
               count);
  std::vector<double> norms(count);
  copy_to_host(norms_.data(), count, norms.data());
  return norms;
}

template <class T>
std::int64_t DeltaPart<T>::wrong_borders() {
  if (std::none_of(borders_.begin(), borders_.end(), [](const Border& b) { return b.forgets; })) return 0;
  const std::vector<double> before = norms_of(probes_, static_cast<std::int64_t>(borders_.size()));
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < borders_.size(); ++i) {
    const Border& b = borders_[i];
    wrong += b.forgets && !(b.P * before[i] <= 64 * vanishing() * b.L);
  }
  return wrong;
}

/// All segments, from the states at the borders; with `reproducible` every segment's end is a border too.
template <class T>
std::vector<DeltaTask<T>> DeltaPart<T>::segment_tasks() {
  const std::int64_t H = shape_.heads, K = shape_.d_key, V = shape_.d_value;
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < runs_.size(); ++i)
    for (std::int64_t j = 0; j < segments_of(i); ++j)
      for (int h = 0; h < H; ++h) {
        const TokenRange tokens = segment(i, j);
        Task task;
        task.head = h, task.begin = tokens.begin, task.end = tokens.end;
        const StateRef<T> from = state(border_states_, (border_first_[i] + j) * H + h);
        task.from = border_first_[i + 1] == border_first_[i]
                        ? start_of(i, h)
                        : StateRef<const T>{from.data, from.k_stride, from.v_stride};
        if (!options_.reproducible && j + 1 == segments_of(i)) {
          if (!runs_[i].ends)
            task.to = state(end_states_, h);
          else if (out_.final_states)
            task.to = {static_cast<T*>(out_.final_states) + (end_index_[i] * H + h) * V * K, 1, K};
        }
        if (j < maps_of(i)) {
          const std::int64_t map = (map_first_[i] + j) * H + h;
          if (borders_[map].forgets)
            task.probe_at = tokens.end - borders_[map].covered, task.probe = state(probes_, map);
        }
        task.position = places_[i].position + tokens.begin - runs_[i].begin, task.states_offset = places_[i].offset;
        tasks.push_back(task);
      }
  return tasks;
}

template <class T>
bool DeltaPart<T>::finite(const Array<T>& slots) const {
  int bad = 0;
  const T* data = slots.data();
  Kokkos::parallel_reduce("longscan::delta::finite",
                          Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(
                              space_, 0, border_first_.back() * shape_.heads * state_size_),
                          NonFiniteCount<T>{data}, bad);
  return bad == 0;
}

// --- outputs
// -----------------------------------------------------------------------------------------------------------

template <class T>
PassSummary DeltaPart<T>::outputs(const std::vector<char>& heads) {
  const std::int64_t H = shape_.heads, K = shape_.d_key, V = shape_.d_value;
  const auto wanted = [&](int h) { return heads.empty() || heads[h]; };
  const auto user_final = [&](std::size_t run, int h) -> StateRef<T> {
    if (!runs_[run].ends || !out_.final_states) return {};
    return {static_cast<T*>(out_.final_states) + (end_index_[run] * H + h) * V * K, 1, K};
  };
  const bool computes = out_.o || out_.states;
  std::vector<Task> tasks, copies;
  if (segmented()) {
    reserve_zeros(probes_, "longscan::delta::probes", map_first_.back() * H * state_size_);
    tasks = segment_tasks();
    for (std::size_t i = 0; i < runs_.size(); ++i)
      for (int h = 0; h < H; ++h) {
        // with `reproducible` the state at the last border is the final one, else that of a run without tokens
        if (!options_.reproducible && segments_of(i) > 0) continue;
        Task copy;
        copy.head = h, copy.from = start_of(i, h);
        if (border_first_[i + 1] > border_first_[i]) {
          const StateRef<T> from = state(border_states_, (border_first_[i + 1] - 1) * H + h);
          copy.from = {from.data, from.k_stride, from.v_stride};
        }
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
    summary.bad = finite(border_states_) ? BadToken{} : pass(tasks, r).bad;
    summary.breaches = segment_breaches_;
  }
  if (!copies.empty())
    copy_states(space_, tasks_(space_, copies), static_cast<std::int64_t>(copies.size()), shape_.d_key, shape_.d_value);
  // a map may overflow where the outputs do not: the state behind the last token shows it
  if (segmented() && chained_ && summary.bad.token < 0 && !finite(border_states_))
    summary.bad = {std::max<std::int64_t>(0, runs_.back().end - 1), 0};
  space_.fence();
  return summary;
}

template <class T>
std::int64_t DeltaPart<T>::workspace_bytes(std::int64_t tokens) const {
  std::int64_t maps = 0;  // of segments
  if (options_.reproducible)
    maps = (tokens + 1023) / 1024;
  else if (segmented())
    maps =
        std::min<std::int64_t>(delta_side_by_side(space_) / shape_.heads + 1, tokens / (least_chunks * options_.chunk));
  if (options_.segment > 0 && !options_.reproducible) maps = tokens / options_.segment + 1;
  const std::int64_t joined = options_.reproducible ? 0 : 2 * maps;
  const std::int64_t elements =
      6 * state_size_ + 3 * map_size_ + maps * (2 * state_size_ + map_size_) + joined * map_size_;
  return elements * shape_.heads * static_cast<std::int64_t>(sizeof(T)) +
         static_cast<std::int64_t>(delta_scratch_bytes<T>(rules(true, true))) * Space().concurrency() /
             delta_team<Space>;
}

template class DeltaPart<float>;
template class DeltaPart<double>;

}  // namespace longscan
