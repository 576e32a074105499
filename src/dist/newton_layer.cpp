// SPDX-License-Identifier: Apache-2.0
#include "dist/newton_layer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/elementary.hpp"
#include "core/half.hpp"

namespace longscan {
namespace {

constexpr int tag_piece = 300, tag_growth = 310;

/// Weights of a cell that a core's own cache holds beside the states.
constexpr std::int64_t cached_weight_bytes = 256 << 10;
/// Tokens of a window that growth is looked at along, at least.
constexpr std::int64_t fewest_looks = 128;

/// Channels [b, e) of states, packed and unpacked.
template <class T>
std::vector<T> take(const T* state, int k, int D, int b, int e) {
  std::vector<T> packed;
  for (int i = 0; i < k; ++i) packed.insert(packed.end(), state + i * D + b, state + i * D + e);
  return packed;
}
template <class T>
void put(const std::vector<T>& packed, T* state, int k, int D, int b, int e) {
  for (int i = 0; i < k; ++i)
    std::copy(packed.begin() + i * (e - b), packed.begin() + (i + 1) * (e - b), state + i * D + b);
}

}  // namespace

template <class T>
std::vector<T> pass_on(LayerSolve<T>& s, const T* out, int tag) {
  const auto bytes = static_cast<std::int64_t>(s.size() * sizeof(T));
  std::unique_ptr<Transport::Request> request;
  if (s.part.after >= 0) request = s.ranks.send(out, bytes, s.part.after, tag);
  std::vector<T> in;
  if (s.part.before >= 0) {
    in.resize(s.size());
    s.ranks.receive(in.data(), bytes, s.part.before, tag);
  }
  if (request) request->wait();
  return in;
}

template <class T>
void solve_sequential(LayerSolve<T>& s) {
  const int D = s.kernel.channels(), k = s.kernel.state();
  // Channels that do not mix travel in pieces: the next rank works on one while this one works on the next.
  const bool pieces = !s.kernel.mixes() && s.ranks.size() > 1 && (s.part.before >= 0 || s.part.after >= 0);
  const int width = pieces ? std::max(16, (D / 16 + 15) / 16 * 16) : D;
  std::vector<std::unique_ptr<Transport::Request>> requests;
  std::vector<std::vector<T>> sent;
  sent.reserve(D / width + 1);
  for (int b = 0; b < D; b += width) {
    const int e = std::min(D, b + width);
    if (s.part.before >= 0) {
      std::vector<T> packed(static_cast<std::size_t>(k) * (e - b));
      s.ranks.receive(packed.data(), static_cast<std::int64_t>(packed.size() * sizeof(T)), s.part.before, tag_piece);
      put(packed, s.start(0), k, D, b, e);
    }
    std::vector<CellSegment> segments;
    for (std::size_t i = 0; i < s.part.runs.size(); ++i)
      segments.push_back({s.part.runs[i].begin, s.part.runs[i].end, static_cast<std::int64_t>(i), 0, -1, b, e});
    s.kernel.run(s.part.path, segments, s.part.starts.data(), s.part.ends.data(), true);
    if (s.part.after >= 0) {
      sent.push_back(take(s.end(s.part.runs.size() - 1), k, D, b, e));
      requests.push_back(s.ranks.send(sent.back().data(), static_cast<std::int64_t>(sent.back().size() * sizeof(T)),
                                      s.part.after, tag_piece));
    }
  }
  for (auto& request : requests) request->wait();
  s.report.iterations += 1;
  s.report.bits_of_token_loop = true;
  s.report.converged_prefix = s.part.axis_tokens;
  s.report.status = NewtonStatus::converged;
}

namespace {

/// Sum of the squares of h over tokens [begin, end), value by value, and the first token whose state is not finite; the
/// states stored as S. Launches "longscan::newton::size" and waits.
template <class S, class T>
void size_by_values(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, std::int64_t n,
                    std::int64_t channels, double& sum, std::int64_t& first) {
  constexpr int together = 16;  // tokens of a value; neighbours read neighbours
  const S* states = reinterpret_cast<const S*>(path.h);
  const std::int64_t pieces = (end - begin + together - 1) / together;
  Kokkos::parallel_reduce(
      "longscan::newton::size",
      Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(0, pieces * n),
      KOKKOS_LAMBDA(const std::int64_t index, double& squares_here, std::int64_t& first_here) {
        const std::int64_t piece = index / n, j = index - piece * n, t = begin + piece * together;
        const S* from = states + t * path.h_stride + j;
        double here = 0;  // not finite if one is not
        LONGSCAN_UNROLL
        for (int i = 0; i < together; ++i) {
          const double h = t + i < end ? static_cast<double>(as_arithmetic(from[i * path.h_stride])) : 0.0;
          here = fused(h, h, here);
        }
        if (!is_non_finite(here)) {
          if (j < channels) squares_here += here;
          return;
        }
        for (int i = 0; i < together && t + i < end; ++i) {
          const auto h = as_arithmetic(from[i * path.h_stride]);
          if (is_non_finite(h))
            first_here = t + i < first_here ? t + i : first_here;
          else if (j < channels)
            squares_here += static_cast<double>(h) * static_cast<double>(h);
        }
      },
      Kokkos::Sum<double>(sum), Kokkos::Min<std::int64_t>(first));
}

}  // namespace

template <class T>
std::pair<double, std::int64_t> size_of_states(LayerSolve<T>& s) {
  double squares = 0;
  std::int64_t bad = std::numeric_limits<std::int64_t>::max();
  const CellTrajectory<T> path = s.part.path;
  const std::int64_t n = s.size(), channels = s.kernel.channels();
  for (const Run& run : s.part.runs) {
    double sum = 0;
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    if (!is_host_space<Kokkos::DefaultExecutionSpace>) {  // value by value
      if (path.stored == Stored::bf16)
        size_by_values<StoredBf16>(path, run.begin, run.end, n, channels, sum, first);
      else if (path.stored == Stored::f16)
        size_by_values<StoredF16>(path, run.begin, run.end, n, channels, sum, first);
      else
        size_by_values<T>(path, run.begin, run.end, n, channels, sum, first);
    } else {
      Kokkos::parallel_reduce(
          "longscan::newton::size",
          Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(run.begin, run.end),
          KOKKOS_LAMBDA(const std::int64_t t, double& squares_here, std::int64_t& first_here) {
            const T* h = path.h + t * path.h_stride;
            double here = 0;
            bool finite = true;
            for (std::int64_t i = 0; i < n; ++i) {
              finite = finite && !is_non_finite(h[i]);
              if (i < channels) here += static_cast<double>(h[i]) * static_cast<double>(h[i]);
            }
            if (!finite)
              first_here = t < first_here ? t : first_here;
            else
              squares_here += here;
          },
          Kokkos::Sum<double>(sum), Kokkos::Min<std::int64_t>(first));
    }
    squares += sum;
    if (first != std::numeric_limits<std::int64_t>::max()) bad = std::min(bad, s.part.axis_begin + first);
  }
  s.ranks.all_reduce(&squares, 1, Transport::Reduction::sum);
  s.ranks.all_reduce(&bad, 1, Transport::Reduction::min);
  const double count =
      static_cast<double>(std::max<std::int64_t>(1, s.part.axis_tokens)) * static_cast<double>(channels);
  return {std::sqrt(squares / count), bad == std::numeric_limits<std::int64_t>::max() ? -1 : bad};
}

template <class T>
void look_along(LayerSolve<T>& s) {
  // All of it where that is little work beside the solve, else a stretch at the start of each run.
  const std::int64_t cost = s.kernel.mixes() ? s.size() * s.size() : s.size();
  std::int64_t tokens = 0;
  for (const Run& run : s.part.runs) tokens += run.size();
  const bool quick = !is_host_space<Kokkos::DefaultExecutionSpace> && s.report.status == NewtonStatus::converged;
  const std::int64_t budget = look_budget(s.kernel.mixes(), s.size(), quick);
  std::int64_t sampled = tokens * cost > budget;
  s.ranks.all_reduce(&sampled, 1, Transport::Reduction::max);
  // what is sampled is the same for all windows together, if they are not too many
  const std::int64_t looks = std::max(std::min(budget / cost, fewest_looks),
                                      static_cast<std::int64_t>(static_cast<double>(budget / cost) * s.share));
  const auto each = static_cast<std::int64_t>(
      sampled ? std::max<std::int64_t>(1, looks / std::max<std::size_t>(1, s.part.runs.size())) : tokens);

  const std::size_t entries = s.kernel.mixes() ? 1 : s.kernel.channels();
  std::vector<GrowthSums> worst(entries);  // of sequences that are through
  std::vector<GrowthSums> open(entries);   // of the sequence at hand
  const auto close = [&] {
    for (std::size_t i = 0; i < entries; ++i) {
      worst[i].total += open[i].total, worst[i].tokens += open[i].tokens;
      worst[i].best = std::max(worst[i].best, open[i].best);
      worst[i].error_most = std::max(worst[i].error_most, open[i].error_most);
      open[i] = {};
    }
  };
  const auto bytes = static_cast<std::int64_t>(entries * sizeof(GrowthSums));
  if (s.part.before >= 0 && !sampled) s.ranks.receive(open.data(), bytes, s.part.before, tag_growth);
  for (std::size_t i = 0; i < s.part.runs.size(); ++i) {
    const Run& run = s.part.runs[i];
    if (run.starts || sampled) close();
    if (run.size() == 0) continue;
    const std::int64_t end = std::min(run.end, run.begin + each);
    const auto here = s.kernel.look(s.part.path, run.begin, end, s.start(i));
    for (std::size_t j = 0; j < entries; ++j) open[j] = combine(open[j], here[j]);
  }
  if (s.part.after >= 0 && !sampled) {
    s.ranks.send(open.data(), bytes, s.part.after, tag_growth)->wait();
    open.assign(entries, {});
  }
  close();
  std::vector<double> sums(entries), most;
  std::int64_t looked = 0;
  double best = 0, error = 0;
  for (std::size_t i = 0; i < entries; ++i) {
    sums[i] = worst[i].total, looked = worst[i].tokens;
    best = std::max(best, worst[i].best);
    error = std::max(error, worst[i].error_most);
  }
  s.ranks.all_reduce(sums.data(), static_cast<int>(entries), Transport::Reduction::sum);
  s.ranks.all_reduce(&looked, 1, Transport::Reduction::sum);
  double largest[] = {best, error};
  s.ranks.all_reduce(largest, 2, Transport::Reduction::max);
  s.report.sampled = sampled != 0;
  s.report.lyapunov = looked > 0 ? *std::max_element(sums.begin(), sums.end()) / static_cast<double>(looked) : 0;
  s.report.log_amplification = largest[0];
  const double unit = std::numeric_limits<T>::epsilon() / 2;
  if (!s.kernel.mixes()) {
    // beyond this the linearisation that the bound stands on no longer holds
    s.report.error_bound = largest[1] <= 0.1 ? largest[1] : -1;
  } else if (s.report.error_bound >= 0) {
    // an estimate: what is left of the jumps, and a step's rounding summed up over the memory
    s.report.error_bound += 10 * unit / std::max(1e-3, 1 - std::exp(std::min(0.0, s.report.lyapunov)));
  }
}

template <class T>
SegmentGrid cut_into_segments(const LayerPart<T>& part, std::int64_t tokens, std::vector<SegmentRun>& table) {
  SegmentGrid grid;
  grid.tokens = tokens, grid.runs = static_cast<std::int64_t>(part.runs.size());
  for (std::size_t i = 0; i < part.runs.size(); ++i) {
    const Run& run = part.runs[i];
    table.push_back({run.begin, run.end, grid.slots, !(i == 0 && part.before >= 0)});
    grid.slots += std::max<std::int64_t>(1, (run.size() + tokens - 1) / tokens);
  }
  if (!table.empty()) grid.first = table[0];
  grid.on_host = table.data();
  return grid;
}

SegmentPlan plan_segments(std::int64_t axis_tokens, std::int64_t longest_part, int channels, bool mixes, bool doubles,
                          std::int64_t wanted) {
  SegmentPlan plan;
  plan.warm_up = doubles ? 256 : 128;
  if (wanted > 0) {
    plan.tokens = wanted;
  } else if (mixes) {
    // Segments of a rank go in step as one matrix product, none shorter than four warm-ups: 32, so that the weights are
    // fetched seldom; few, where a cache holds them.
    const std::int64_t weights = std::int64_t{4} * channels * channels * (doubles ? 8 : 4);
    const std::int64_t in_step = weights <= cached_weight_bytes ? 4 : 32;
    plan.tokens = std::max<std::int64_t>((longest_part + in_step - 1) / in_step, 4 * plan.warm_up);
  } else {
    // on a host core one segment is enough as soon as its channels fill the vector units
    const std::int64_t side_by_side = std::max<std::int64_t>(1, 256 / channels);
    plan.tokens = std::max<std::int64_t>((longest_part + side_by_side - 1) / side_by_side, 4 * plan.warm_up);
  }
  plan.tokens = std::max<std::int64_t>(1, std::min(plan.tokens, std::max<std::int64_t>(1, axis_tokens)));
  plan.warm_up = std::min(plan.warm_up, plan.tokens);
  return plan;
}

#define LONGSCAN_INSTANTIATE(T)                                                                        \
  template SegmentGrid cut_into_segments(const LayerPart<T>&, std::int64_t, std::vector<SegmentRun>&); \
  template std::vector<T> pass_on(LayerSolve<T>&, const T*, int);                                      \
  template void solve_sequential(LayerSolve<T>&);                                                      \
  template std::pair<double, std::int64_t> size_of_states(LayerSolve<T>&);                             \
  template void look_along(LayerSolve<T>&);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
