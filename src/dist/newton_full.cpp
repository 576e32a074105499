// SPDX-License-Identifier: Apache-2.0
// Newton's method on all states at once: r_t = h_t - f(h_{t-1}, x_t), delta_t = A_t delta_{t-1} - r_t, h <- h + delta.
// The system is streamed in stretches of tokens that fit into a small buffer: a rank that knows the delta coming in
// walks along its tokens once; the others first fold them into one map. Tokens before the first one that is not yet
// right are left alone. On a device the same goes by sweeps over segments that fill it: one folds each segment into a
// map and looks at its residuals, a scan along the segments finds the deltas between them, and one adds the deltas;
// what the host reads of an iteration is one verdict.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtype.hpp"
#include "dist/newton_layer.hpp"
#include "local/affine_steps.hpp"
#include "local/sweep_steps.hpp"

namespace longscan {
namespace {

constexpr int tag_state = 330, tag_filter = 340;

/// Bytes of maps in flight.
constexpr std::int64_t buffer_bytes = std::int64_t{64} << 20;
/// Above this relative residual Jacobians are clamped.
constexpr double guard = 0.1;
/// Weight of the step's size in elk's least squares, relative to that of the residual: where it starts, and how it
/// follows the residual down and up (Levenberg and Marquardt).
constexpr double first_damping = 1, damping_down = 0.2, damping_up = 4;
/// Residuals of so many units in the last place of the RMS may be rounding.
constexpr double rounding_units = 256;
/// Above this relative residual the far tokens start anew.
constexpr double blown_up = 1e6;
/// Fewest tokens of a segment that is swept.
constexpr std::int64_t shortest_sweep = 32;

/// What stays with a kernel from solve to solve.
template <class T>
struct SweepMemory {
  DeviceArray<T> tails, maps, deltas, delta, product;
  DeviceArray<SweepVerdict> verdicts;
  DeviceArray<SegmentRun> runs;
};

using Tokens = Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>;

/// The largest residual of each of `tokens` tokens, infinite if one is not finite. Launches
/// "longscan::newton::residual" and waits: the host looks at them.
template <class T>
std::vector<double> residuals_of(const AffineMaps<T>& maps, std::int64_t blocks, std::int64_t tokens) {
  const double infinity = std::numeric_limits<double>::infinity();
  const int n = maps.n;
  std::vector<double> host(tokens);
  DeviceArray<double> largest;
  reserve(largest, "longscan::newton::residuals", tokens);
  Kokkos::parallel_for(
      "longscan::newton::residual", Tokens(0, tokens), KOKKOS_LAMBDA(const std::int64_t t) {
        double here = 0;
        for (std::int64_t b = 0; b < blocks; ++b)
          for (int i = 0; i < n; ++i) {
            const auto r = static_cast<double>(maps.slot(t * blocks + b)[i * (n + 1) + n]), size = r < 0 ? -r : r;
            here = is_non_finite(r) ? infinity : size > here ? size : here;
          }
        largest(t) = here;
      });
  copy_to_host<double>(largest.data(), tokens, host.data());
  return host;
}

/// h += delta for `count` tokens from `t` on, element by element where the sum is finite; deltas [count][size]. Blocks
/// of `state` values, where they are such, hold [channel][value]; states are [value][channel].
/// Launches "longscan::newton::add".
template <class T>
void add_deltas(const CellTrajectory<T>& path, std::int64_t t, std::int64_t count, std::int64_t size,
                std::int64_t state, bool by_channel, const T* deltas) {
  const std::int64_t channels = size / state;
  Kokkos::parallel_for(
      "longscan::newton::add", Tokens(0, count), KOKKOS_LAMBDA(const std::int64_t i) {
        T* h = path.h + (t + i) * path.h_stride;
        for (std::int64_t j = 0; j < size; ++j) {
          const std::int64_t from = by_channel ? j % channels * state + j / channels : j;
          const T moved = h[j] + deltas[i * size + from];
          if (!is_non_finite(moved)) h[j] = moved;
        }
      });
}

/// Both <- `in`, or zero. Launches "longscan::newton::delta".
template <class T>
void copy_deltas(const T* in, std::int64_t size, T* a, T* b) {
  Kokkos::parallel_for(
      "longscan::newton::delta", Tokens(0, size),
      KOKKOS_LAMBDA(const std::int64_t i) { a[i] = b[i] = in ? in[i] : T(0); });
}

/// Tokens whose maps are in flight.
template <class T>
std::int64_t stretch_tokens(const CellKernel<T>& kernel, bool diagonal) {
  return std::max<std::int64_t>(1, buffer_bytes / kernel.map_bytes(diagonal));
}

template <class T>
class FullTrajectory {
 public:
  explicit FullTrajectory(LayerSolve<T>& s) : s_(s), size_(s.size()) {
    const NewtonMethod method = s.options.method;
    diagonal_ = method != NewtonMethod::newton;
    shape_.n = diagonal_ ? 1 : s.kernel.block();
    blocks_ = diagonal_ ? size_ : s.kernel.blocks();
    shape_.m = 1, shape_.leading = shape_.n + 1, shape_.stride = static_cast<std::int64_t>(shape_.n) * (shape_.n + 1);
    each_ = stretch_tokens(s.kernel, diagonal_);
    if (shoots_on_device() && s.kernel.sweeps(diagonal_) && method != NewtonMethod::elk) prepare_sweeps();
  }

  void solve() {
    for (const Run& run : s_.part.runs) s_.kernel.guess(s_.part.path, run.begin, run.end);
    double before = std::numeric_limits<double>::infinity();
    int stalled = 0;
    window_ = s_.part.axis_tokens;
    for (;;) {
      take_state_from_before();
      measure();
      const double relative = worst_ / std::max(rms_, 1e-300);
      s_.report.residual_history.push_back(relative);
      if (first_wrong_ == none) return finish(NewtonStatus::converged);
      if (overflow_ != none) {
        bad_ = right_to_rounding_ = overflow_;
        return finish(NewtonStatus::non_finite);
      }
      if (s_.report.iterations > s_.part.axis_tokens && beyond_rounding_ == none &&
          s_.options.method != NewtonMethod::elk)
        return finish(NewtonStatus::exact_by_prefix);
      if (s_.report.iterations >= s_.options.max_iterations) return finish(NewtonStatus::not_converged);
      // at the floor of the arithmetic the residual no longer falls
      stalled = relative > 0.5 * before ? stalled + 1 : 0;
      if (stalled >= 3 && relative <= rounding_units * unit()) {
        s_.report.tolerance_floor = relative;
        return finish(NewtonStatus::converged);
      }
      damping_ = std::clamp(damping_ * (relative < before ? damping_down : damping_up), 1e-12, 1e3);
      // tokens that blow up start anew and are left for later: the window slides with the first wrong token
      if (!std::isfinite(relative) || relative > blown_up) {
        window_ = std::max<std::int64_t>(64, window_ / 4);
        start_anew();
      }
      before = relative;
      how_ = s_.options.method == NewtonMethod::picard      ? Reshape::identity
             : s_.options.method == NewtonMethod::jacobi    ? Reshape::zero
             : relative > guard || !std::isfinite(relative) ? Reshape::clamp
                                                            : Reshape::keep;
      if (s_.options.method == NewtonMethod::elk)
        damped_step();
      else if (sweeps_)
        sweep();
      else
        step();
      ++s_.report.iterations;
    }
  }

 private:
  static constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
  static double unit() { return std::numeric_limits<T>::epsilon() / 2; }

  /// All tokens from the first wrong one on, as they were in the beginning.
  void start_anew() {
    for (const Run& run : s_.part.runs) {
      const std::int64_t from = std::max(run.begin, first_wrong_ - s_.part.axis_begin);
      if (from < run.end) s_.kernel.guess(s_.part.path, from, run.end);
    }
    take_state_from_before();
    folded_ = false;
  }

  /// The state before the part moves as the rank before moves its last token.
  void take_state_from_before() {
    std::vector<T> last(size_);
    if (s_.part.after >= 0) copy_to_host<T>(s_.part.path.at(s_.part.runs.back().end - 1), size_, last.data());
    const std::vector<T> in = pass_on(s_, last.data(), tag_state);
    if (!in.empty()) std::copy(in.begin(), in.end(), s_.start(0));
  }

  /// f(stretch begin, end, state before, run) over the tokens of the runs that lie in [first_wrong, first_wrong +
  /// window).
  template <class F>
  void for_stretches(bool all, const F& f) {
    const std::int64_t from = all ? 0 : std::max<std::int64_t>(0, first_wrong_ - s_.part.axis_begin);
    const std::int64_t to = all ? none : first_wrong_ - s_.part.axis_begin + window_;
    for (std::size_t i = 0; i < s_.part.runs.size(); ++i) {
      const Run& run = s_.part.runs[i];
      for (std::int64_t t = std::max(run.begin, from); t < std::min(run.end, to); t += each_)
        f(t, std::min({run.end, to, t + each_}), i);
    }
  }
  const T* before(std::int64_t t, std::size_t run) {
    return t == s_.part.runs[run].begin ? s_.start(run) : s_.part.path.at(t - 1);
  }
  /// No change comes into the tokens from `t` on: the sequence starts there, or what is before is settled.
  bool settled_before(std::int64_t t, std::size_t run) {
    const bool begins = t == s_.part.runs[run].begin && !(run == 0 && s_.part.before >= 0);
    return begins || s_.part.axis_begin + t == first_wrong_;
  }

  AffineMaps<T> linearize(std::int64_t t, std::int64_t e, const T* before) {
    reserve(maps_, "longscan::newton::maps", (e - t) * blocks_ * shape_.stride);
    AffineMaps<T> maps = shape_;
    maps.data = maps_.data();
    s_.kernel.linearize(s_.part.path, t, e, before, maps, diagonal_);
    return maps;
  }

  /// Residuals along the whole path: the worst, and the first token that is not right.
  void measure() {
    if (!sweeps_ || s_.report.iterations == 0) {
      const auto [rms, bad] = size_of_states(s_);
      take_sizes(rms, bad);
    }
    double worst = 0;
    std::int64_t found[] = {none, none,
                            none};  // first token above the limit, above rounding, without a finite residual
    const auto over_ranks = [&] {
      s_.ranks.all_reduce(&worst, 1, Transport::Reduction::max);
      s_.ranks.all_reduce(found, 3, Transport::Reduction::min);
    };
    if (sweeps_) {
      look(worst, found), over_ranks();
      // the limit was that of the states before they moved: once more if that makes a difference
      if ((found[0] == none) != (worst <= limit())) look(worst, found), over_ranks();
    } else {
      for_stretches(true, [&](std::int64_t t, std::int64_t e, std::size_t run) {
        if (s_.part.axis_begin + e <= settled_) return;
        const std::vector<double> residuals = residuals_of(linearize(t, e, before(t, run)), blocks_, e - t);
        for (std::int64_t i = 0; i < e - t; ++i) {
          const double here = residuals[i];
          worst = std::max(worst, here);
          const std::int64_t token = s_.part.axis_begin + t + i;
          if (here > limit()) found[0] = std::min(found[0], token);
          if (here > rounding()) found[1] = std::min(found[1], token);
          if (!std::isfinite(here)) found[2] = std::min(found[2], token);
        }
      });
      over_ranks();
    }
    worst_ = worst, first_wrong_ = found[0], beyond_rounding_ = found[1];
    // After k iterations the first k tokens are exact but for rounding (not so where steps are damped). The k-th has
    // taken one step from a right state, h + (f - h), whose rounding is that of the h before, however large that was;
    // the step after it starts near f and leaves f to the bit. So the first k - 1 are settled, unless the residual, in
    // which such a loss shows, says that one was too far away even for that.
    right_to_rounding_ = first_wrong_;
    if (first_wrong_ != none && s_.options.method != NewtonMethod::elk) {
      const std::int64_t last = s_.part.axis_tokens - 1;
      right_to_rounding_ = std::max(first_wrong_, std::min(beyond_rounding_, s_.report.iterations));
      first_wrong_ = std::max(first_wrong_, std::min({beyond_rounding_, s_.report.iterations - 1, last}));
    }
    settled_ = first_wrong_;
    // all is right up to here, and the next step is not finite
    if (found[2] != none && found[2] == found[1] && (bad_ < 0 || bad_ > found[2])) overflow_ = found[2];
  }

  /// The size that tolerances are relative to: that of the states, but not of states that are blowing up.
  void take_sizes(double rms, std::int64_t bad) {
    if (s_.report.iterations == 0) first_rms_ = rms;
    rms_ = std::isfinite(rms) ? std::min(rms, 4 * first_rms_) : first_rms_;
    bad_ = bad;
  }
  double limit() const { return s_.options.tolerance * std::max(rms_, 1e-300); }
  double rounding() const { return std::max(limit(), rounding_units * unit() * std::max(rms_, 1e-300)); }

  // --- by sweeps

  void prepare_sweeps() {
    if (!s_.kernel.kept_by_sweeps) s_.kernel.kept_by_sweeps = std::make_shared<SweepMemory<T>>();
    m_ = static_cast<SweepMemory<T>*>(s_.kernel.kept_by_sweeps.get());
    std::int64_t tokens = 0;
    for (const Run& run : s_.part.runs) tokens += run.size();
    const std::int64_t at_once = s_.kernel.sweeps_at_once(diagonal_);
    std::int64_t each = std::max((tokens + at_once - 1) / at_once, shortest_sweep);
    each = std::max<std::int64_t>(1, std::min(each, s_.kernel.longest_sweep(diagonal_)));
    grid_ = cut_into_segments(s_.part, s_.options.segment > 0 ? s_.options.segment : each, table_);
    if (table_.size() > 1) {
      reserve(m_->runs, "longscan::newton::runs", grid_.runs);
      copy_to_device(table_.data(), grid_.runs, m_->runs.data());
      grid_.table = m_->runs.data();
    }
    const std::int64_t slots = std::max<std::int64_t>(1, grid_.slots);
    reserve(m_->tails, "longscan::newton::tails", slots * size_);
    reserve(m_->maps, "longscan::newton::maps", slots * blocks_ * shape_.stride);
    reserve(m_->deltas, "longscan::newton::deltas", (slots + 1) * size_);
    reserve(m_->delta, "longscan::newton::delta", size_);
    reserve(m_->verdicts, "longscan::newton::verdicts", slots * s_.kernel.channels());
    arrays_.starts = s_.part.starts.data(), arrays_.tails = m_->tails.data(), arrays_.deltas = m_->deltas.data();
    arrays_.maps = shape_, arrays_.maps.data = m_->maps.data(), arrays_.verdicts = m_->verdicts.data();
    sweeps_ = true;
  }

  /// The segment that holds a token of the axis; those of a part that is passed by then or not reached: all, none.
  std::int64_t slot_of(std::int64_t token) const {
    const std::int64_t t = token - s_.part.axis_begin;
    if (t <= 0 || grid_.runs == 0) return 0;
    if (t >= table_.back().end) return grid_.slots;
    const SegmentRun& run = table_[grid_.index_of(grid_.slots - 1, table_.data())];
    const SegmentRun* at = &run;
    while (at->begin > t) --at;
    return at->slot + (t - at->begin) / grid_.tokens;
  }

  /// Residuals of what is not settled, by the limits as they are known; with them the maps of the segments, unless
  /// those are dear.
  void look(double& worst, std::int64_t* found) {
    const std::int64_t first = slot_of(settled_);
    const bool dear = s_.kernel.mixes() && !diagonal_;
    fold(first, !dear);
    const SweepVerdict v = sum_up(arrays_.verdicts, grid_.slots, s_.kernel.channels(), first);
    const auto on_axis = [&](std::int64_t t) { return t == SweepVerdict::none ? none : s_.part.axis_begin + t; };
    worst = v.worst, found[0] = on_axis(v.wrong), found[1] = on_axis(v.beyond), found[2] = on_axis(v.lost);
    double squares = v.squares;
    std::int64_t bad = on_axis(v.bad);
    s_.ranks.all_reduce(&squares, 1, Transport::Reduction::sum);
    s_.ranks.all_reduce(&bad, 1, Transport::Reduction::min);
    const double values = static_cast<double>(std::max<std::int64_t>(1, s_.part.axis_tokens)) * s_.kernel.channels();
    take_sizes(std::sqrt(squares / values), bad == none ? -1 : bad);
  }

  void fold(std::int64_t first, bool maps) {
    const Reshape how = s_.options.method == NewtonMethod::picard   ? Reshape::identity
                        : s_.options.method == NewtonMethod::jacobi ? Reshape::zero
                                                                    : how_;
    if (first < grid_.slots)
      s_.kernel.fold(s_.part.path, grid_, first, grid_.slots, arrays_, {how, diagonal_, maps, limit(), rounding()});
    folded_ = maps, folded_as_ = how;
  }

  /// delta_t = A_t delta_{t-1} - r_t over segments and ranks, and h <- h + delta, from the segment of the first wrong
  /// token on.
  void sweep() {
    const std::int64_t first = slot_of(first_wrong_);
    const std::int64_t past = window_ < none - first_wrong_ ? first_wrong_ + window_ : none;
    const std::int64_t last = past == none ? grid_.slots
                              : past <= s_.part.axis_begin
                                  ? first
                                  : std::max(first, std::min(grid_.slots, slot_of(past - 1) + 1));
    if (!folded_ || folded_as_ != how_) fold(first, true);
    const bool open = !s_.part.runs.empty() && s_.part.before >= 0 && first_wrong_ < s_.part.axis_begin;
    const bool through = open && s_.part.runs.size() == 1;
    AffineMaps<T> maps = arrays_.maps;
    maps.data = arrays_.maps.slot(first * blocks_);
    const auto trace = [&](const T* in) {
      T* const arriving = m_->deltas.data() + first * size_;
      copy_deltas(in, size_, m_->delta.data(), arriving);
      affine_trace(maps, blocks_, last - first, m_->delta.data(), arriving + size_);
    };
    const DeviceArray<T> in("longscan::newton::delta", s_.ranks.size() > 1 ? size_ : 0);
    if (s_.ranks.size() > 1) {
      ScanPart<T> share;
      share.links = s_.part.links(), share.count = blocks_, share.known.assign(blocks_, through ? 0 : 1);
      share.maps = shape_;
      if (s_.part.after >= 0 && through) {
        std::vector<T> identity(blocks_ * shape_.stride, T(0));
        for (std::int64_t b = 0; b < blocks_; ++b)
          for (int i = 0; i < shape_.n; ++i) identity[b * shape_.stride + i * (shape_.n + 1) + i] = T(1);
        reserve(m_->product, "longscan::newton::folded", blocks_ * shape_.stride);
        copy_to_device(identity.data(), blocks_ * shape_.stride, m_->product.data());
        share.maps.data = m_->product.data();
        affine_fold(maps, blocks_, last - first, share.maps);
      }
      if (!through) trace(nullptr);  // what goes out is known here
      share.in = {in.data(), 1, shape_.n}, share.out = {m_->delta.data(), 1, shape_.n};
      const ScanAlgorithm algorithm = s_.plan.choose(s_.ranks, share);
      s_.report.scan = s_.plan.choice();
      RankScan<T>(s_.ranks).run(algorithm, share);
    }
    trace(open ? in.data() : nullptr);
    if (first < last)
      s_.kernel.move(s_.part.path, grid_, first, last, arrays_, {how_, diagonal_, true, limit(), rounding()});
    folded_ = false;
  }

  /// delta_t = A_t delta_{t-1} - r_t over all ranks, and h <- h + delta where that is finite.
  void step() {
    std::vector<T> in(size_, T(0)), out(size_, T(0));  // [blocks][n]
    const bool open = !s_.part.runs.empty() && s_.part.before >= 0 && first_wrong_ < s_.part.axis_begin;
    const bool through = open && s_.part.runs.size() == 1;
    if (s_.part.after >= 0 && !through)  // known here: the last run alone
      walk(std::vector<T>(size_, T(0)), s_.part.runs.size() - 1, false, out);
    AffineMaps<T> folded = shape_;
    DeviceArray<T> product;
    if (s_.part.after >= 0 && through) {  // what this part does to a delta
      std::vector<T> identity(blocks_ * shape_.stride, T(0));
      for (std::int64_t b = 0; b < blocks_; ++b)
        for (int i = 0; i < shape_.n; ++i) identity[b * shape_.stride + i * (shape_.n + 1) + i] = T(1);
      product = on_device("longscan::newton::folded", identity);
      folded.data = product.data();
      for_stretches(false, [&](std::int64_t t, std::int64_t e, std::size_t run) {
        const AffineMaps<T> maps = linearize(t, e, before(t, run));
        affine_reshape(maps, (e - t) * blocks_, how_);
        affine_fold(maps, blocks_, e - t, folded);
      });
    }
    const DeviceArray<T> delta_in = on_device("longscan::newton::delta", in);
    const DeviceArray<T> delta_out = on_device("longscan::newton::delta", out);
    ScanPart<T> share;
    share.links = s_.part.links(), share.count = blocks_, share.known.assign(blocks_, through ? 0 : 1);
    share.in = {delta_in.data(), 1, shape_.n}, share.out = {delta_out.data(), 1, shape_.n}, share.maps = folded;
    const ScanAlgorithm algorithm = s_.plan.choose(s_.ranks, share);
    s_.report.scan = s_.plan.choice();
    RankScan<T>(s_.ranks).run(algorithm, share);
    copy_to_host(delta_in.data(), size_, in.data());
    for (std::size_t i = 0; i < s_.part.runs.size(); ++i)
      walk(i == 0 && open ? in : std::vector<T>(size_, T(0)), i, true, out);
  }

  /// Along one run from the delta `first` on, to `last`; moves the path if `move`.
  void walk(const std::vector<T>& first, std::size_t wanted, bool move, std::vector<T>& last) {
    const DeviceArray<T> delta = on_device("longscan::newton::delta", first);
    SharedVector<T> kept;  // the state before the next stretch, as it was
    for_stretches(false, [&](std::int64_t t, std::int64_t e, std::size_t run) {
      if (run != wanted) return;
      if (settled_before(t, run)) Kokkos::deep_copy(delta, T(0));
      const T* from = kept.empty() ? before(t, run) : kept.data();
      const AffineMaps<T> maps = linearize(t, e, from);
      affine_reshape(maps, (e - t) * blocks_, how_);
      reserve(deltas_, "longscan::newton::deltas", (e - t) * size_);
      affine_trace(maps, blocks_, e - t, delta.data(), deltas_.data());
      if (move) {
        kept.resize(size_);
        copy_to_host<T>(s_.part.path.at(e - 1), size_, kept.data());
        add(t, e);
      }
    });
    copy_to_host(delta.data(), size_, last.data());
  }

  void add(std::int64_t t, std::int64_t e) {
    add_deltas(s_.part.path, t, e - t, size_, s_.kernel.state(), !diagonal_ && !s_.kernel.mixes(), deltas_.data());
  }

  /// elk: the delta that minimises sum |delta_t - A_t delta_{t-1} + r_t|^2 + damping |delta_t|^2, a Kalman smoother
  /// with observations of zero. A filter forward (mean m, variance P) and the smoothing pass back; channels in pieces
  /// would pipeline, here the filter's two numbers a value walk from rank to rank, and the smoother's back.
  void damped_step() {
    const std::int64_t from = std::max<std::int64_t>(0, first_wrong_ - s_.part.axis_begin);
    std::vector<T> carry(2 * size_, T(0));  // m, P
    const auto bytes = static_cast<std::int64_t>(carry.size() * sizeof(T));
    if (s_.part.before >= 0) s_.ranks.receive(carry.data(), bytes, s_.part.before, tag_filter);
    const std::int64_t tokens = s_.part.runs.empty() ? 0 : s_.part.runs.back().end;
    // what the smoother needs: A, predicted mean and variance, filtered mean and variance
    std::vector<T> A(tokens * size_), m_before(tokens * size_), P_before(tokens * size_), m(tokens * size_),
        P(tokens * size_);
    std::vector<T> host;  // the maps of a stretch
    const T observation = T(1 / damping_);
    for_stretches(true, [&](std::int64_t t, std::int64_t e, std::size_t run) {
      const AffineMaps<T> maps = linearize(t, e, before(t, run));
      affine_reshape(maps, (e - t) * blocks_, how_);
      host.resize((e - t) * blocks_ * shape_.stride);
      copy_to_host<T>(maps.data, static_cast<std::int64_t>(host.size()), host.data());
      for (std::int64_t i = t; i < e; ++i) {
        const bool reset = settled_before(i, run) || s_.part.axis_begin + i < first_wrong_;
        for (std::int64_t j = 0; j < size_; ++j) {
          const T* map = &host[((i - t) * blocks_ + j) * shape_.stride];
          const std::int64_t at = i * size_ + j;
          const bool lost = is_non_finite(map[0]) || is_non_finite(map[1]);  // moves nothing, and stays where it is
          A[at] = reset || lost ? T(0) : map[0];
          m_before[at] = A[at] * carry[j] + (lost ? T(0) : map[1]),
          P_before[at] = A[at] * A[at] * carry[size_ + j] + T(1);
          const T gain = P_before[at] / (P_before[at] + observation);
          m[at] = (T(1) - gain) * m_before[at], P[at] = (T(1) - gain) * P_before[at];
          if (is_non_finite(m[at])) m[at] = T(0);
          carry[j] = m[at], carry[size_ + j] = P[at];
        }
      }
    });
    if (s_.part.after >= 0) s_.ranks.send(carry.data(), bytes, s_.part.after, tag_filter)->wait();
    // smoothing: delta_t = m_t + G_t (delta_{t+1} - m_before_{t+1}), G_t = P_t A_{t+1} / P_before_{t+1}
    std::vector<T> next(3 * size_, T(0));  // delta, A / P_before, m_before of the token after
    const auto bytes_next = static_cast<std::int64_t>(next.size() * sizeof(T));
    if (s_.part.after >= 0) s_.ranks.receive(next.data(), bytes_next, s_.part.after, tag_filter + 1);
    std::vector<T> deltas(tokens * size_, T(0));
    for (std::size_t r = s_.part.runs.size(); r-- > 0;) {
      const Run& run = s_.part.runs[r];
      if (!(r + 1 == s_.part.runs.size() && s_.part.after >= 0)) std::fill(next.begin(), next.end(), T(0));
      for (std::int64_t i = run.end; i-- > run.begin;)
        for (std::int64_t j = 0; j < size_; ++j) {
          const std::int64_t at = i * size_ + j;
          const T delta = m[at] + P[at] * next[size_ + j] * (next[j] - next[2 * size_ + j]);
          deltas[at] = delta;
          next[j] = delta, next[size_ + j] = A[at] / P_before[at], next[2 * size_ + j] = m_before[at];
        }
    }
    if (s_.part.before >= 0) s_.ranks.send(next.data(), bytes_next, s_.part.before, tag_filter + 1)->wait();
    if (tokens > from) {
      reserve(deltas_, "longscan::newton::deltas", (tokens - from) * size_);
      copy_to_device(&deltas[from * size_], (tokens - from) * size_, deltas_.data());
      add(from, tokens);
    }
  }

  void finish(NewtonStatus status) {
    s_.report.status = status;
    s_.report.converged_prefix = std::min(right_to_rounding_, s_.part.axis_tokens);
    s_.report.first_bad_token = bad_;
    if (bad_ >= 0) s_.report.status = NewtonStatus::non_finite;
    for (std::size_t i = 0; i < s_.part.runs.size(); ++i) {
      const Run& run = s_.part.runs[i];
      if (run.size() > 0)
        copy_to_host<T>(s_.part.path.at(run.end - 1), size_, s_.end(i));
      else
        std::copy_n(s_.start(i), size_, s_.end(i));
    }
  }

  LayerSolve<T>& s_;
  std::int64_t size_, blocks_ = 1, each_ = 1;
  AffineMaps<T> shape_;
  bool diagonal_ = true;
  Reshape how_ = Reshape::clamp;
  DeviceArray<T> maps_, deltas_;
  double worst_ = 0, rms_ = 0, first_rms_ = 0, damping_ = first_damping;
  SweepMemory<T>* m_ = nullptr;
  SweepArrays<T> arrays_;
  SegmentGrid grid_;
  std::vector<SegmentRun> table_;
  bool sweeps_ = false, folded_ = false;  ///< there are maps of the path as it is,
  Reshape folded_as_ = Reshape::keep;     ///< of Jacobians reshaped this way
  std::int64_t first_wrong_ = 0, settled_ = 0, window_ = 0, bad_ = -1, beyond_rounding_ = 0, overflow_ = none;
  std::int64_t right_to_rounding_ = 0;
};

}  // namespace

template <class T>
void solve_full(LayerSolve<T>& s) {
  FullTrajectory<T>(s).solve();
}

template <class T>
std::int64_t full_workspace_bytes(const CellKernel<T>& kernel, NewtonMethod method, std::int64_t tokens) {
  const bool diagonal = method != NewtonMethod::newton, filters = method == NewtonMethod::elk;
  const std::int64_t stretch = std::min(tokens, stretch_tokens(kernel, diagonal));
  const std::int64_t maps = stretch * kernel.map_bytes(diagonal);
  const std::int64_t deltas = kernel.state_size() * static_cast<std::int64_t>(sizeof(T));
  if (filters)
    return 2 * maps + 7 * tokens * deltas;  // maps also on the host; the filter's five numbers, and the step twice
  const std::int64_t residuals = stretch * 2 * static_cast<std::int64_t>(sizeof(double));
  const std::int64_t folded = !diagonal && kernel.mixes() ? 3 * kernel.map_bytes(false) : 0;
  return maps + stretch * deltas + std::max(residuals, folded);
}

#define LONGSCAN_INSTANTIATE(T)             \
  template void solve_full(LayerSolve<T>&); \
  template std::int64_t full_workspace_bytes(const CellKernel<T>&, NewtonMethod, std::int64_t);
LONGSCAN_INSTANTIATE(float)
LONGSCAN_INSTANTIATE(double)
#undef LONGSCAN_INSTANTIATE

}  // namespace longscan
