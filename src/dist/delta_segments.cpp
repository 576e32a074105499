// SPDX-License-Identifier: Apache-2.0
#include "dist/delta_segments.hpp"

#include <algorithm>

namespace longscan {
namespace {

template <class T>
struct NonFiniteCount {
  const T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i, int& count) const { count += is_non_finite(data[i]) ? 1 : 0; }
};

}  // namespace

template <class T>
SegmentRules DeltaSegments<T>::rules(const DeltaShape& shape, const DeltaOptions& options,
                                     const DeltaPasses<T>& passes) {
  return {options.reproducible, options.segment, segments_at_once(passes.side_by_side(), shape.heads), options.chunk};
}

template <class T>
void DeltaSegments<T>::begin() {
  plan_ = SegmentPlan(part_.runs, rules(part_.shape, part_.options, part_.passes), part_.links.sends());
  borders_.clear();
  chains_.restart();
  joins_ = false;
  if (dirty_) Kokkos::deep_copy(part_.space, states_, T(0));
  dirty_ = true;
  chained_ = part_.options.reproducible && !part_.runs.empty();
}

template <class T>
ScanPart<T> DeltaSegments<T>::share(std::vector<char> known) const {
  if (joins_) return part_.share(std::move(known), joined_);
  ScanPart<T> share = part_.share(std::move(known), maps_);
  share.map_step = part_.shape.heads, share.each = plan_.scan_maps();
  return share;
}

// --- states at borders ----------------------------------------------------------------------------------------------

template <class T>
std::vector<char> DeltaSegments<T>::find_outgoing(Horizons horizons) {
  const std::int64_t H = part_.shape.heads, runs = static_cast<std::int64_t>(part_.runs.size());
  joins_ = false;
  map_borders(horizons);
  scan_runs(part_.first_continues() ? 1 : 0, runs, 0, H, true);
  scan_runs(0, runs, 0, H, false);
  if (part_.first_continues() && !part_.links.receives()) scan_first_run(0, H);
  if (part_.links.sends()) take_last_border(0, H);           // what is not known is replaced in `advance`
  const bool through = part_.links.receives() && runs == 1;  // what comes in decides what goes out
  return through ? first_run_forgets() : std::vector<char>(H, 1);
}

template <class T>
void DeltaSegments<T>::advance(std::int64_t begin, std::int64_t end) {
  scan_first_run(begin, end);
  take_last_border(begin, end);
}

template <class T>
void DeltaSegments<T>::arrive() {
  const std::int64_t H = part_.shape.heads;
  if (part_.links.receives()) scan_first_run(0, H);
  if (part_.options.reproducible && !part_.runs.empty()) take_last_border(0, H);
}

/// The maps of all borders, and the states at those whose map forgets: L.
template <class T>
void DeltaSegments<T>::map_borders(Horizons horizons) {
  const std::int64_t H = part_.shape.heads, runs = static_cast<std::int64_t>(part_.runs.size());
  reserve_zeros(states_, "longscan::delta::borders", plan_.borders() * H * part_.slots.state_size);
  borders_.clear();
  for (std::int64_t i = 0; i < runs; ++i)
    for (std::int64_t j = 0; j < plan_.maps_of(i); ++j)
      for (int h = 0; h < H; ++h) {
        const TokenRange tokens = plan_.segment(i, j);
        borders_.push_back({plan_.map(i, j) * H + h, tokens.end, tokens.size(), h});
      }
  const bool forgetting = horizons != Horizons::none && !part_.options.reproducible;
  if (horizons == Horizons::remembered) {
    part_.recall_borders(borders_, maps_);
  } else {
    map_breaches_ = part_.map_borders(borders_, maps_, forgetting).breaches;
  }
  // L is where it is wanted as a state by itself: before a map that does not forget, and behind the part
  std::vector<AffineTask> constants;
  for (std::int64_t i = 0; i < runs; ++i)
    for (std::int64_t j = 0; j < plan_.maps_of(i); ++j)
      for (std::int64_t h = 0; h < H; ++h) {
        const bool last = j + 1 == plan_.maps_of(i), chained = !last && !border(i, j + 1, h).forgets;
        if (border(i, j, h).forgets && (chained || (last && i + 1 == runs)))
          constants.push_back({border(i, j, h).slot, 0, plan_.border(i, j + 1) * H + h});
      }
  part_.take_constants(maps_, states_, constants);
}

/// States at the borders of runs [first_run, last_run), heads [begin, end), from maps that do not forget: those that
/// follow from the state before the run (`leading`), or the others.
template <class T>
void DeltaSegments<T>::scan_runs(std::int64_t first_run, std::int64_t last_run, std::int64_t begin, std::int64_t end,
                                 bool leading) {
  const std::int64_t H = part_.shape.heads;
  std::vector<Task> starts;
  std::vector<AffineChain> chains;
  for (std::int64_t i = first_run; i < last_run; ++i) {
    if (!plan_.has_borders(i)) continue;
    for (std::int64_t h = begin; h < end; ++h) {
      if (leading && (plan_.maps_of(i) == 0 || !border(i, 0, h).forgets)) {
        Task start;
        start.head = static_cast<int>(h), start.from = part_.start_of(i, start.head);
        start.to = part_.slots.state(states_, plan_.border(i, 0) * H + h);
        starts.push_back(start);
      }
      for (std::int64_t j = 0; j < plan_.maps_of(i);) {
        std::int64_t next = j;
        while (next < plan_.maps_of(i) && !border(i, next, h).forgets) ++next;
        if (next > j && leading == (j == 0))
          chains.push_back({plan_.map(i, j) * H + h, H, plan_.border(i, j) * H + h, H, next - j});
        if (leading) break;
        j = next + 1;
      }
    }
  }
  part_.passes.copy(starts);
  if (chains.empty()) return;
  chained_ = true;
  affine_scan(part_.space, part_.slots.maps(maps_), part_.slots.points(states_), chains_(part_.space, chains),
              static_cast<std::int64_t>(chains.size()));
}

/// `outgoing` is the state at the last border of the last run.
template <class T>
void DeltaSegments<T>::take_last_border(std::int64_t begin, std::int64_t end) {
  const std::int64_t size = part_.slots.state_size, first = (plan_.borders() - 1) * part_.shape.heads;
  Kokkos::deep_copy(part_.space, Kokkos::subview(part_.outgoing, std::pair(begin * size, end * size)),
                    Kokkos::subview(states_, std::pair((first + begin) * size, (first + end) * size)));
}

/// Heads whose state at the end of the first run does not depend on `incoming`.
template <class T>
std::vector<char> DeltaSegments<T>::first_run_forgets() const {
  std::vector<char> any(part_.shape.heads, 0);
  for (std::int64_t i = 0; i < plan_.maps_of(0) * part_.shape.heads; ++i)
    if (borders_[i].forgets) any[borders_[i].head] = 1;
  return any;
}

/// For the scans that compose: the maps of the first run's segments become one a head.
template <class T>
void DeltaSegments<T>::join_maps() {
  const std::int64_t H = part_.shape.heads, count = part_.runs.empty() ? 0 : plan_.maps_of(0);
  const DeltaSlots<T>& slots = part_.slots;
  reserve_zeros(joined_, "longscan::delta::joined", H * slots.map_size);
  reserve_zeros(spare_, "longscan::delta::joined", H * slots.map_size);
  for (std::int64_t j = 0; j < count; ++j) {
    std::vector<AffineTask> tasks;
    for (std::int64_t h = 0; h < H; ++h) tasks.push_back({j * H + h, h, h});
    if (j == 0) {
      affine_copy(part_.space, slots.maps(maps_), slots.maps(joined_), part_.joins(part_.space, tasks), H);
    } else {
      affine_compose(part_.space, slots.maps(joined_), slots.maps(maps_), slots.maps(spare_),
                     part_.joins(part_.space, tasks), H);
      std::swap(joined_, spare_);
    }
  }
  joins_ = true;
}

// --- outputs --------------------------------------------------------------------------------------------------------

/// All segments, from the states at the borders; with `reproducible` every segment's end is a border too.
template <class T>
std::vector<DeltaTask<T>> DeltaSegments<T>::tasks() {
  const std::int64_t H = part_.shape.heads;
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < part_.runs.size(); ++i)
    for (std::int64_t j = 0; j < plan_.segments_of(i); ++j)
      for (int h = 0; h < H; ++h) {
        const TokenRange tokens = plan_.segment(i, j);
        Task task;
        task.head = h, task.begin = tokens.begin, task.end = tokens.end;
        task.from = j == 0                        ? part_.start_of(i, h)
                    : border(i, j - 1, h).forgets ? part_.slots.constant(maps_, border(i, j - 1, h).slot)
                                                  : part_.slots.known_state(states_, plan_.border(i, j) * H + h);
        if (!part_.options.reproducible && j + 1 == plan_.segments_of(i)) task.to = part_.end_of(i, h);
        if (j < plan_.maps_of(i) && border(i, j, h).remembered) {
          if (!task.to.data) task.to = part_.slots.state(part_.probes, border(i, j, h).slot);
        } else if (j < plan_.maps_of(i) && border(i, j, h).forgets) {
          task.probe_at = tokens.end - border(i, j, h).covered;
          task.probe = part_.slots.state(part_.probes, border(i, j, h).slot);
        }
        task.position = part_.places[i].position + tokens.begin - part_.runs[i].begin;
        task.states_offset = part_.places[i].offset;
        tasks.push_back(task);
      }
  return tasks;
}

/// The states behind runs that no task brings: with `reproducible` all, from the last border; else those behind runs
/// without tokens.
template <class T>
std::vector<DeltaTask<T>> DeltaSegments<T>::end_copies() const {
  const std::int64_t H = part_.shape.heads;
  std::vector<Task> copies;
  for (std::size_t i = 0; i < part_.runs.size(); ++i)
    for (int h = 0; h < H; ++h) {
      if (!part_.options.reproducible && plan_.segments_of(i) > 0) continue;
      Task copy;
      copy.head = h, copy.to = part_.end_of(i, h);
      copy.from =
          plan_.has_borders(i) ? part_.slots.known_state(states_, plan_.last_border(i) * H + h) : part_.start_of(i, h);
      copies.push_back(copy);
    }
  return copies;
}

template <class T>
PassSummary DeltaSegments<T>::outputs() {
  const bool computes = part_.computes_outputs();
  reserve_zeros(part_.probes, "longscan::delta::probes", plan_.maps() * part_.shape.heads * part_.slots.state_size);
  DeltaRules rules = part_.passes.rules(computes, false);
  rules.count_breaches = true;
  PassSummary summary;
  if (computes || !part_.options.reproducible) {
    summary = part_.passes.run(tasks(), rules, [&] { look(); });
  } else {
    // the states at the borders are all there is: only a bad one needs a pass, to name the token
    if (!finite()) summary.bad = part_.passes.run(tasks(), rules).bad;
    summary.breaches = map_breaches_;
  }
  part_.passes.copy(end_copies());
  // a map may overflow where the outputs do not: the state behind the last token shows it
  if (chained_ && summary.bad.token < 0 && !finite())
    summary.bad = {std::max<std::int64_t>(0, part_.runs.back().end - 1), 0};
  part_.space.fence();  // the caller reads the outputs
  dirty_ = summary.bad.token >= 0;
  return summary;
}

template <class T>
bool DeltaSegments<T>::finite() const {
  int bad = 0;
  using Policy = Kokkos::RangePolicy<typename DeltaPasses<T>::Space, Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_reduce("longscan::delta::finite",
                          Policy(part_.space, 0, plan_.borders() * part_.shape.heads * part_.slots.state_size),
                          NonFiniteCount<T>{states_.data()}, bad);
  return bad == 0;
}

/// Launches the look at what the outputs saw at the borders.
template <class T>
void DeltaSegments<T>::look() {
  if (!borders_.empty() && borders_.front().remembered &&
      part_.links.sends()) {  // the state behind the part is where the next rank or window wants it
    const auto last = static_cast<std::int64_t>(part_.runs.size()) - 1, H = std::int64_t{part_.shape.heads};
    std::vector<Task> copies;
    for (int h = 0; h < H; ++h) {
      Task copy;
      copy.head = h, copy.from = part_.slots.known_state(part_.arrived, h);
      copy.to = part_.slots.state(part_.probes, border(last, plan_.maps_of(last) - 1, h).slot);
      copies.push_back(copy);
    }
    part_.passes.copy(copies);
  }
  part_.look_at_probes(borders_, maps_);
}

template <class T>
std::int64_t DeltaSegments<T>::wrong() {
  const std::vector<char> wrong = part_.not_forgotten(borders_);
  return std::count(wrong.begin(), wrong.end(), 1);
}

template <class T>
bool DeltaSegments<T>::first_horizons_do() const {
  const bool held = part_.passes.general_tasks() == 0 || !part_.passes.on_tensor_cores();  // by fp16
  return borders_.empty() || (part_.first_horizons_do && held);
}

template <class T>
void DeltaSegments<T>::report_boundaries(DeltaReport& report) const {
  for (const Border& b : borders_) report.horizons_remembered += b.remembered;
  if (!part_.links.sends()) return;
  const std::size_t H = part_.shape.heads;
  report.boundaries += part_.shape.heads;
  for (std::size_t i = borders_.size() - std::min(borders_.size(), H); i < borders_.size(); ++i) {
    report.boundaries_forgotten += borders_[i].forgets;
    report.horizon_max = std::max(report.horizon_max, borders_[i].covered);
  }
}

template <class T>
std::int64_t DeltaSegments<T>::workspace_bytes(std::int64_t tokens, std::int64_t runs, std::int64_t shortest) const {
  const DeltaOptions& o = part_.options;
  // A run has a map less than segments, the last one has one more; with `reproducible` each has as many.
  const SegmentRules most{false, o.segment, segments_at_once(part_.passes.most_side_by_side(), part_.shape.heads),
                          o.chunk};
  const std::int64_t maps = o.reproducible ? std::max<std::int64_t>(0, tokens - 1) / segment_tokens(shortest) + runs
                                           : tokens / most.planned(tokens) + 2;
  // A map has a border and a probe, a run one border more; maps that are extended have two for the while.
  return part_.workspace_bytes(6 + 2 * maps + std::min(runs, maps), 3 + (o.reproducible ? 1 : 3) * maps);
}

std::int64_t scan_maps(const DeltaShape& shape, const DeltaOptions& options, const DeltaInputs& in,
                       const DeltaOutputs& out, std::int64_t tokens, std::int64_t length) {
  const auto count = [&](auto arithmetic) -> std::int64_t {
    using T = decltype(arithmetic);
    if (!DeltaSegments<T>::used(options)) return 1;
    DeltaPasses<T> passes(shape, options);
    passes.begin(in, out, tokens);
    const Run run{0, 0, tokens, 0, length};
    return SegmentPlan({run}, DeltaSegments<T>::rules(shape, options, passes), true).scan_maps();
  };
  return options.precision == Precision::f64 ? count(double{}) : count(float{});
}

template class DeltaSegments<float>;
template class DeltaSegments<double>;

}  // namespace longscan
