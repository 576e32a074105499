// SPDX-License-Identifier: Apache-2.0
// Multiple shooting. The unknowns are the states at the borders of segments. A pass runs the true recurrence in every
// segment whose start has changed; then each start is compared with the end of the segment before it. What differs is
// handed over (start_{j+1} = end_j), or, where memory is long and channels do not mix, moved by one Newton step
//     delta_{j+1} = P_j delta_j + (end_j - start_{j+1}),   P_j the product of the Jacobians in segment j,
// an affine scan over segments and ranks. Channels that do not mix are compared bit by bit and run again one by one;
// cells whose channels mix are compared within the tolerance.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "dist/newton_layer.hpp"
#include "local/affine_steps.hpp"

namespace longscan {
namespace {

constexpr int tag_warm = 320, tag_end = 321, tag_loop = 322;

/// Channels that are compared and run together where they do not mix.
constexpr int channel_group = 16;
/// A Newton step is taken where |P_j| is at most this; beyond, it would amplify what the linearisation leaves out.
constexpr double largest_product = 30;

/// A segment and its neighbours.
struct Border {
  CellSegment segment;
  std::int64_t run = 0;
  bool exact = false;        ///< the start is known for good
  std::int64_t before = -1;  ///< the segment before it in this part; -1: the rank before
};

template <class T>
class Shooting {
 public:
  Shooting(LayerSolve<T>& s) : s_(s), D_(s.kernel.channels()), k_(s.kernel.state()), size_(s.size()) {
    std::int64_t longest = 0;
    for (const Run& run : s.part.runs) longest = std::max(longest, run.size());
    s.ranks.all_reduce(&longest, 1, Transport::Reduction::max);
    plan_ = plan_segments(s.part.axis_tokens, longest, D_, s.kernel.mixes(), sizeof(T) == 8, s.options.segment);
    for (std::size_t i = 0; i < s.part.runs.size(); ++i) {
      const Run& run = s.part.runs[i];
      for (std::int64_t t = run.begin; t < run.end || t == run.begin; t += plan_.tokens) {
        Border b;
        b.segment = {t, std::min(run.end, t + plan_.tokens), static_cast<std::int64_t>(borders_.size()), 0, -1, 0, D_};
        b.run = static_cast<std::int64_t>(i);
        b.exact = t == run.begin && !(i == 0 && s.part.before >= 0);
        b.before = t == run.begin ? -1 : b.segment.slot - 1;
        if (t > run.begin) {  // warm up, back to the run's own start if that is near and known
          b.segment.warm_up = std::min(plan_.warm_up, t - run.begin);
          if (t - run.begin <= plan_.warm_up && !(i == 0 && s.part.before >= 0)) b.segment.from = first_slot_of_run(i);
        }
        borders_.push_back(b);
        if (run.size() == 0) break;
      }
    }
    starts_.assign(borders_.size() * size_, T(0)), ends_.assign(borders_.size() * size_, T(0));
    for (const Border& b : borders_)
      if (b.exact) std::copy_n(s.start(b.run), size_, start(b.segment.slot));
  }

  /// Returns whether every border agrees.
  bool solve() {
    warm_up_for_next_rank();
    std::vector<CellSegment> active;
    for (const Border& b : borders_) active.push_back(b.segment);
    std::int64_t left_before = std::numeric_limits<std::int64_t>::max();
    for (;;) {
      s_.kernel.run(s_.part.path, active, starts_.data(), ends_.data(), true);
      ++s_.report.iterations, ++passes_;
      if (passes_ == 1 || s_.kernel.mixes()) {
        // guessed starts may have blown up: the tolerance is relative to the smallest size seen
        const auto [rms, bad] = size_of_states(s_);
        rms_ = passes_ == 1 || !(rms >= rms_) ? rms : rms_, bad_ = bad;
      }
      compare(active);
      s_.report.residual_history.push_back(worst_ / std::max(rms_, 1e-300));
      if (left_ == 0) return true;
      if (!std::isfinite(worst_)) return false;
      // Few lanes left that refuse to settle belong to the token loop; a few passes more while their number halves.
      const bool halving = 2 * left_ <= left_before;
      const std::int64_t most =
          s_.options.method == NewtonMethod::automatic ? (halving ? 8 : 4) : s_.options.max_iterations;
      if (passes_ >= most) return false;
      if (passes_ >= 2 && !halving && !s_.kernel.mixes()) newton_step(active);
      left_before = left_;
    }
  }

  /// What is left, segment after segment and rank after rank, until the stored starts agree with what arrives.
  void token_loop() {
    looped_ = true;
    std::vector<T> arriving;
    if (s_.part.before >= 0) {
      arriving.resize(size_);
      s_.ranks.receive(arriving.data(), bytes(), s_.part.before, tag_loop);
    }
    for (Border& b : borders_) {
      if (b.exact) continue;
      const T* from = b.before >= 0 ? end(b.before) : arriving.data();
      std::vector<CellSegment> again;
      for_groups([&](int c0, int c1) {
        // starts that were handed over after the last pass have not been run from yet
        const bool stale = changed_[b.segment.slot * groups() + c0 / width()] != 0;
        if (!stale && !differs(from, start(b.segment.slot), c0, c1)) return;
        copy(from, start(b.segment.slot), c0, c1);
        again.push_back({b.segment.begin, b.segment.end, b.segment.slot, 0, -1, c0, c1});
      });
      if (!again.empty()) s_.kernel.run(s_.part.path, merged(again), starts_.data(), ends_.data(), true);
    }
    if (s_.part.after >= 0) s_.ranks.send(end(borders_.size() - 1), bytes(), s_.part.after, tag_loop)->wait();
  }

  /// End states of the runs, the starts as they turned out, and the verdict on the prefix.
  void finish() {
    if (passes_ != 1 || looped_) std::tie(rms_, bad_) = size_of_states(s_);  // else as they were seen
    for (std::size_t j = 0; j < borders_.size(); ++j) {
      const Border& b = borders_[j];
      if (b.segment.begin == s_.part.runs[b.run].begin) std::copy_n(start(j), size_, s_.start(b.run));
      if (b.segment.end == s_.part.runs[b.run].end) std::copy_n(end(j), size_, s_.end(b.run));
    }
    s_.report.first_bad_token = bad_;
    s_.report.converged_prefix = prefix_;
  }

  std::int64_t passes() const { return passes_; }
  bool finite() const { return bad_ < 0; }
  double contraction() const { return contraction_; }
  double worst() const { return worst_; }
  double rms() const { return rms_; }
  const SegmentPlan& plan() const { return plan_; }

 private:
  T* start(std::int64_t slot) { return &starts_[slot * size_]; }
  T* end(std::int64_t slot) { return &ends_[slot * size_]; }
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(T)); }
  std::int64_t first_slot_of_run(std::size_t run) const {
    for (const Border& b : borders_)
      if (b.run == static_cast<std::int64_t>(run)) return b.segment.slot;
    return static_cast<std::int64_t>(borders_.size());
  }

  /// Channels that are looked at together, and how many such groups there are.
  int width() const { return s_.kernel.mixes() ? D_ : channel_group; }
  int groups() const { return (D_ + width() - 1) / width(); }
  template <class F>
  void for_groups(const F& f) {
    for (int c = 0; c < D_; c += width()) f(c, std::min(D_, c + width()));
  }
  /// The segments, and channels of them, whose start has changed.
  std::vector<CellSegment> changed_segments() {
    std::vector<CellSegment> list;
    for (const Border& b : borders_)
      for_groups([&](int c0, int c1) {
        if (changed_[b.segment.slot * groups() + c0 / width()])
          list.push_back({b.segment.begin, b.segment.end, b.segment.slot, 0, -1, c0, c1});
      });
    return merged(list);
  }
  bool differs(const T* a, const T* b, int c0, int c1) const {
    for (int i = 0; i < k_; ++i)
      if (std::memcmp(a + i * D_ + c0, b + i * D_ + c0, (c1 - c0) * sizeof(T)) != 0) return true;
    return false;
  }
  void copy(const T* from, T* to, int c0, int c1) const {
    for (int i = 0; i < k_; ++i) std::copy(from + i * D_ + c0, from + i * D_ + c1, to + i * D_ + c0);
  }
  /// Neighbouring channel groups of one segment as one.
  static std::vector<CellSegment> merged(const std::vector<CellSegment>& list) {
    std::vector<CellSegment> out;
    for (const CellSegment& s : list)
      if (!out.empty() && out.back().slot == s.slot && out.back().channel_end == s.channel_begin)
        out.back().channel_end = s.channel_end;
      else
        out.push_back(s);
    return out;
  }

  /// The rank after has no tokens before its part: its first start is what the last tokens here make of a zero state.
  void warm_up_for_next_rank() {
    SharedVector<T> from(size_, T(0)), out(size_, T(0));
    if (s_.part.after >= 0) {
      const Border& last = borders_.back();
      const Run& run = s_.part.runs.back();
      const std::int64_t tokens = std::min(plan_.warm_up, run.size());
      const bool whole = tokens == run.size() && (run.starts || s_.part.runs.size() > 1 || s_.part.before < 0);
      if (whole) std::copy_n(s_.start(last.run), size_, from.data());
      s_.kernel.run(s_.part.path, {{run.end - tokens, run.end, 0, 0, -1, 0, D_}}, from.data(), out.data(), false);
    }
    const std::vector<T> in = pass_on(s_, out.data(), tag_warm);
    if (!in.empty()) std::copy(in.begin(), in.end(), start(0));
  }

  /// Compare all borders, hand over what differs, list the segments to run again. Sets left_, worst_, prefix_.
  void compare(std::vector<CellSegment>& active) {
    const bool mixes = s_.kernel.mixes();
    const double tolerance = s_.options.tolerance * std::max(rms_, 1e-300);
    const std::vector<T> arriving = pass_on(s_, borders_.empty() ? nullptr : end(borders_.size() - 1), tag_end);
    jumps_.assign(borders_.size() * size_, T(0)), changed_.assign(borders_.size() * groups(), 0);
    std::int64_t left = 0, first = std::numeric_limits<std::int64_t>::max();
    double worst = 0;
    bool strange = false;
    for (const Border& b : borders_) {
      if (b.exact) continue;
      const std::int64_t slot = b.segment.slot;
      const T* from = b.before >= 0 ? end(b.before) : arriving.data();
      for_groups([&](int c0, int c1) {
        if (!differs(from, start(slot), c0, c1)) return;
        double jump = 0;
        for (int i = 0; i < k_; ++i)
          for (int c = c0; c < c1; ++c) {
            const T d = from[i * D_ + c] - start(slot)[i * D_ + c];
            jumps_[slot * size_ + i * D_ + c] = d;
            strange = strange || !std::isfinite(static_cast<double>(d));
            jump = std::max(jump, std::abs(static_cast<double>(d)));
          }
        worst = std::max(worst, jump);
        if (mixes && jump <= tolerance) return;
        copy(from, start(slot), c0, c1);
        changed_[slot * groups() + c0 / width()] = 1;
        ++left;
        first = std::min(first, s_.part.axis_begin + b.segment.begin);
      });
    }
    active = changed_segments();
    if (strange) worst = std::numeric_limits<double>::infinity();
    s_.ranks.all_reduce(&left, 1, Transport::Reduction::sum);
    s_.ranks.all_reduce(&worst, 1, Transport::Reduction::max);
    s_.ranks.all_reduce(&first, 1, Transport::Reduction::min);
    if (passes_ > 1 && worst_ > 0) contraction_ = worst / worst_;
    left_ = left, worst_ = worst;
    prefix_ = first == std::numeric_limits<std::int64_t>::max() ? s_.part.axis_tokens : first;
  }

  /// Starts have been handed over already; here they move on by what the jumps further back will change:
  /// delta_{j+1} = P_j delta_j + jump_{j+1}, delta = 0 at exact starts, so start_{j+1} += P_j delta_j.
  void newton_step(std::vector<CellSegment>& active) {
    const int n = k_;
    AffineMaps<T> shape{nullptr, n, 1, n + 1, static_cast<std::int64_t>(n) * (n + 1), false};
    const std::int64_t one = static_cast<std::int64_t>(D_) * shape.stride;
    std::vector<T> products(borders_.size() * one, T(0));
    for (const Border& b : borders_) product(b, shape, &products[b.segment.slot * one]);
    // what this part does to a delta, channel by channel, and the delta that comes in from the ranks before
    std::vector<T> rows(one, T(0));
    for (int c = 0; c < D_; ++c) part_map(products, shape, one, c, &rows[c * shape.stride]);
    const bool known =
        s_.part.before < 0 || std::any_of(borders_.begin(), borders_.end(), [](const Border& b) { return b.exact; });
    std::vector<T> in(size_, T(0)), out(size_, T(0));  // [D][n]
    if (known)
      for (int c = 0; c < D_; ++c)
        for (int i = 0; i < n; ++i) out[c * n + i] = rows[c * shape.stride + i * (n + 1) + n];
    const DeviceArray<T> maps = on_device("longscan::newton::folded", rows);
    const DeviceArray<T> delta_in = on_device("longscan::newton::delta", in);
    const DeviceArray<T> delta_out = on_device("longscan::newton::delta", out);
    ScanPart<T> share;
    share.links = s_.part.links(), share.count = D_, share.known.assign(D_, known ? 1 : 0);
    share.in = {delta_in.data(), 1, n}, share.out = {delta_out.data(), 1, n};
    share.maps = shape, share.maps.data = maps.data();
    const ScanAlgorithm algorithm = s_.plan.choose(s_.ranks, share);
    s_.report.scan = s_.plan.choice();
    RankScan<T>(s_.ranks).run(algorithm, share);
    copy_to_host<T>(delta_in.data(), size_, in.data());
    for (int c = 0; c < D_; ++c) move_starts(products, shape, one, c, &in[c * n]);
    active = changed_segments();
  }

  bool passes_on(const Border& b) const { return b.before >= 0 || s_.part.before >= 0; }
  T jump(const Border& b, int c, int i) const { return jumps_[b.segment.slot * size_ + i * D_ + c]; }

  /// The affine map of channel c from the delta that comes into the part to the one that goes out; what overflows is
  /// zero.
  void part_map(const std::vector<T>& products, const AffineMaps<T>& shape, std::int64_t one, int c, T* row) const {
    const int n = k_, ld = n + 1;
    std::vector<T> next(n * ld);
    for (int i = 0; i < n; ++i) row[i * ld + i] = T(1);
    for (const Border& b : borders_) {
      if (b.exact)
        std::fill_n(row, n * ld, T(0));
      else if (passes_on(b))
        for (int i = 0; i < n; ++i) row[i * ld + n] += jump(b, c, i);
      const T* P = &products[b.segment.slot * one + c * shape.stride];
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < ld; ++j) {
          T sum = 0;
          for (int m = 0; m < n; ++m) sum += P[i * ld + m] * row[m * ld + j];
          next[i * ld + j] = sum;
        }
      std::copy(next.begin(), next.end(), row);
    }
    for (int i = 0; i < n * ld; ++i)
      if (!std::isfinite(static_cast<double>(row[i]))) row[i] = T(0);
  }

  /// Channel c of every start moves by P_{j-1} delta_{j-1}, from the delta that comes in on.
  void move_starts(const std::vector<T>& products, const AffineMaps<T>& shape, std::int64_t one, int c, const T* in) {
    const int n = k_;
    constexpr T unit = std::numeric_limits<T>::epsilon();
    std::vector<T> delta(in, in + n), next(n);
    for (const Border& b : borders_) {
      const std::int64_t slot = b.segment.slot;
      if (b.exact) {
        std::fill(delta.begin(), delta.end(), T(0));
      } else if (passes_on(b)) {
        for (int i = 0; i < n; ++i) {
          const T step = delta[i];
          T& value = start(slot)[i * D_ + c];
          // steps of rounding size are left out, so that equal bits can be reached
          if (std::abs(step) > 4 * unit * std::abs(value) && std::isfinite(static_cast<double>(value + step))) {
            value += step;
            changed_[slot * groups() + c / width()] = 1;
          }
          delta[i] = step + jump(b, c, i);
        }
      }
      const T* P = &products[slot * one + c * shape.stride];
      for (int i = 0; i < n; ++i) {
        next[i] = 0;
        for (int j = 0; j < n; ++j) next[i] += P[i * (n + 1) + j] * delta[j];
      }
      delta = next;
    }
  }

  /// P of one segment, zero where it is too large to be trusted.
  void product(const Border& b, const AffineMaps<T>& shape, T* to) {
    const std::int64_t size = D_ * shape.stride;
    AffineMaps<T> host = shape, folded = shape, maps = shape;
    host.data = to;
    for (int c = 0; c < D_; ++c)
      for (int i = 0; i < shape.n; ++i) host.slot(c)[i * (shape.n + 1) + i] = T(1);
    reserve(folded_, "longscan::newton::folded", size);
    folded.data = folded_.data();
    copy_to_device(to, size, folded.data);
    const std::int64_t each = std::max<std::int64_t>(1, (std::int64_t{1} << 20) / size);
    reserve(maps_, "longscan::newton::maps", each * size);
    maps.data = maps_.data();
    for (std::int64_t t = b.segment.begin; t < b.segment.end; t += each) {
      const std::int64_t e = std::min(b.segment.end, t + each);
      s_.kernel.linearize(s_.part.path, t, e, t == b.segment.begin ? old_start(b) : s_.part.path.at(t - 1), maps,
                          false);
      affine_fold(maps, D_, e - t, folded);
    }
    copy_to_host(folded.data, size, to);
    for (int c = 0; c < D_; ++c) {
      double norm = 0;
      for (int i = 0; i < shape.n; ++i) {
        double row = 0;
        for (int j = 0; j < shape.n; ++j) row += std::abs(static_cast<double>(host.slot(c)[i * (shape.n + 1) + j]));
        norm = std::max(norm, row);
      }
      if (!(norm <= largest_product)) std::fill_n(host.slot(c), shape.stride, T(0));
    }
  }
  /// The state that the segment was last run from: the start before the hand-over. For kernels.
  const T* old_start(const Border& b) {
    old_start_.assign(start(b.segment.slot), start(b.segment.slot) + size_);
    if (!b.exact)
      for (std::int64_t i = 0; i < size_; ++i) old_start_[i] -= jumps_[b.segment.slot * size_ + i];
    return old_start_.data();
  }

  LayerSolve<T>& s_;
  int D_, k_;
  std::int64_t size_;
  SegmentPlan plan_;
  std::vector<Border> borders_;
  SharedVector<T> starts_, ends_, old_start_;
  std::vector<T> jumps_;
  DeviceArray<T> maps_, folded_;
  std::vector<char> changed_;
  std::int64_t passes_ = 0, left_ = 0, prefix_ = 0, bad_ = -1;
  bool looped_ = false;
  double rms_ = 0, worst_ = 0, contraction_ = 0;
};

}  // namespace

template <class T>
void solve_shooting(LayerSolve<T>& s, bool may_fall_back) {
  Shooting<T> shooting(s);
  const bool settled = shooting.solve();
  s.report.status = NewtonStatus::converged;
  if (!settled) {
    if (may_fall_back) {
      shooting.token_loop();
      s.report.status = NewtonStatus::fell_back;
    } else {
      s.report.status = NewtonStatus::not_converged;
    }
  }
  shooting.finish();
  if (!shooting.finite()) s.report.status = NewtonStatus::non_finite;
  if (s.report.status == NewtonStatus::fell_back) s.report.converged_prefix = s.part.axis_tokens;
  s.report.bits_of_token_loop = settled && !s.kernel.mixes();
  if (s.report.status == NewtonStatus::fell_back) s.report.bits_of_token_loop = true;
  if (settled && s.kernel.mixes()) {
    // A border that moved by `worst` contracts by `rho` a segment; a warm-up from zero that arrived within the
    // tolerance has shown as much itself.
    const double rho = shooting.passes() > 1 ? std::min(shooting.contraction(), 0.99)
                                             : std::max(shooting.worst() / std::max(shooting.rms(), 1e-300), 1e-300);
    s.report.error_bound = shooting.worst() / (1 - std::min(rho, 0.99));
  }
}

template void solve_shooting(LayerSolve<float>&, bool);
template void solve_shooting(LayerSolve<double>&, bool);

}  // namespace longscan
