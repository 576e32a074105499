// SPDX-License-Identifier: Apache-2.0
// Multiple shooting (newton_shooting.cpp has the method and the host's way) where kernels run on a device: enough
// segments to fill it, and starts, ends, jumps and marks of what has to run again stay there. A pass is two launches,
// the recurrence and the comparison at the borders, and what the host reads of it is one small verdict.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dist/exclusive_scan.hpp"
#include "dist/newton_layer.hpp"
#include "local/shooting_steps.hpp"

namespace longscan {
namespace {

constexpr int tag_warm = 320, tag_end = 321, tag_loop = 322, tag_growth = 323;

/// A Newton step is taken where |P_j| is at most this; beyond, it would amplify what the linearisation leaves out.
constexpr double largest_product = 30;
/// Stretches of slots whose growth is summed up side by side, and at most so many runs.
constexpr std::int64_t growth_lanes = 2048, growth_runs = 4096;
/// Work of the look along a path whose channels mix, in products of W_hh.
constexpr std::int64_t look_products = std::int64_t{1} << 15;

constexpr std::int64_t warm_up_step = 4;

/// What stays with a kernel from solve to solve.
template <class T>
struct ShootingMemory {
  DeviceArray<T> starts, ends, products, jumps, part_maps, delta_in, delta_out;
  DeviceArray<unsigned char> active;
  DeviceArray<double> squares, slot_jumps;
  DeviceArray<LaneGrowth> growth, stretches;
  DeviceArray<SegmentRun> runs;
  DeviceArray<GrowthPiece> pieces;
  VerdictWork verdict;
  std::vector<GrowthPiece> pieces_there;            ///< what `pieces` holds
  std::int64_t warm_up_factor = 1;                  ///< grows when too many lanes have not forgotten their start
  std::int64_t passes = 1;                          ///< of the last solve that had several segments
  std::int64_t solves = 0;                          ///< while one of these two was more than 1
  std::int64_t patience = 16;                       ///< solves until less of them is tried again
  std::int64_t usual_factor = 0, usual_passes = 0;  ///< before less was tried in this solve; 0: it is not
};

template <class T>
ShootingMemory<T>& memory_of(const CellKernel<T>& kernel) {
  if (!kernel.kept) kernel.kept = std::make_shared<ShootingMemory<T>>();
  return *static_cast<ShootingMemory<T>*>(kernel.kept.get());
}

template <class T>
class DeviceShooting {
 public:
  ~DeviceShooting() {
    try {
      s_.kernel.wait_for_look();  // it writes into memory that ends here
    } catch (...) {               // a device that fails now has failed before, which is on its way to the user
    }
  }
  explicit DeviceShooting(LayerSolve<T>& s)
      : s_(s), m_(memory_of(s.kernel)), D_(s.kernel.channels()), k_(s.kernel.state()), size_(s.size()) {
    const SegmentPlan plan = plan_device_segments(s);
    grid_ = cut_into_segments(s.part, plan.tokens, table_);
    grid_.warm_up = plan.warm_up;
    if (table_.size() > 1) {
      reserve(m_.runs, "longscan::newton::runs", grid_.runs);
      copy_to_device(table_.data(), grid_.runs, m_.runs.data());
      grid_.table = m_.runs.data();
    }
    // at least one, so that ranks without tokens go the same way as the others
    const std::int64_t slots = std::max<std::int64_t>(1, grid_.slots), values = slots * size_, lanes = slots * D_;
    reserve(m_.starts, "longscan::newton::starts", values), reserve(m_.ends, "longscan::newton::ends", values);
    reserve(m_.active, "longscan::newton::active", lanes);
    arrays_.starts = m_.starts.data(), arrays_.ends = m_.ends.data(), arrays_.active = m_.active.data();
    if (s.kernel.shoots_squares()) {
      reserve(m_.squares, "longscan::newton::squares", lanes);
      arrays_.squares = m_.squares.data();
    }
    if (s.kernel.shoots_growth()) {
      reserve(m_.products, "longscan::newton::products", lanes * k_ * k_);
      reserve(m_.growth, "longscan::newton::growth", lanes);
      arrays_.products = m_.products.data(), arrays_.growth = m_.growth.data();
      plan_growth(table_);
    }
    if (s.kernel.mixes())
      reserve(m_.slot_jumps, "longscan::newton::jumps", slots);
    else
      reserve(m_.jumps, "longscan::newton::jumps", values);
    if (s.part.before >= 0) arriving_.assign(size_, T(0));
    arrays_.initial = s.part.starts.data();
  }

  /// Returns whether every border agrees.
  bool solve() {
    most_slots_ = grid_.slots;
    s_.ranks.all_reduce(&most_slots_, 1, Transport::Reduction::max);
    warm_up_for_next_rank();
    std::int64_t left_before = std::numeric_limits<std::int64_t>::max();
    double best = std::numeric_limits<double>::infinity();
    std::int64_t stalled = 0;
    for (;;) {
      const bool looks = passes_ == 0 && s_.kernel.mixes();
      if (looks) s_.kernel.begin_look();
      s_.kernel.shoot(s_.part.path, grid_, arrays_, passes_ == 0);
      ++s_.report.iterations, ++passes_;
      if (looks) look();
      arrive();
      compare();
      s_.report.residual_history.push_back(worst_ / std::max(rms_, 1e-300));
      if (passes_ == 1) adapt_warm_up();
      if (left_ == 0) return true;
      if (!std::isfinite(worst_)) return false;
      const bool halving = 2 * left_ <= left_before;
      stalled = worst_ > 0.5 * best && !halving ? stalled + 1 : 0;
      best = std::min(best, worst_);
      if (passes_ >= most_passes(halving, stalled)) return false;
      if (passes_ >= 2 && !halving && arrays_.products) newton_step();
      left_before = left_;
    }
  }

  /// What is left, segment after segment and rank after rank, until the stored starts agree with what arrives.
  void token_loop() {
    if (s_.part.before >= 0) s_.ranks.receive(arriving_.data(), bytes(), s_.part.before, tag_loop);
    if (s_.kernel.mixes()) {
      run_whole();
      collect();
    } else {
      s_.kernel.walk(s_.part.path, grid_, arrays_, arriving());
      compare_channels();  // for growth and states
    }
    if (s_.part.after >= 0) {
      const std::vector<T> last = last_end();
      s_.ranks.send(last.data(), bytes(), s_.part.after, tag_loop)->wait();
    }
    walked_ = true;
  }

  /// End states of the runs, the starts as they turned out, and the verdict.
  void finish() {
    if (grid_.slots > grid_.runs) m_.passes = passes_;
    if (m_.usual_passes > 0) give_up_hope();
    if (walked_) std::tie(rms_, bad_) = size_of_states(s_);
    s_.report.first_bad_token = bad_;
    s_.report.converged_prefix = prefix_;
    if (arrays_.growth && bad_ < 0) report_growth();
    if (s_.kernel.mixes() && !walked_ && bad_ < 0) report_look();
  }

  std::int64_t passes() const { return passes_; }
  bool finite() const { return bad_ < 0; }
  double contraction() const { return contraction_; }
  double worst() const { return worst_; }
  double rms() const { return rms_; }

 private:
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(T)); }
  const T* arriving() const { return s_.part.before >= 0 ? arriving_.data() : nullptr; }
  std::vector<T> last_end() const {
    std::vector<T> end(size_);
    if (grid_.slots > 0) copy_to_host<T>(arrays_.ends + (grid_.slots - 1) * size_, size_, end.data());
    return end;
  }

  /// The rank after has no tokens before its part: its first start is what the last tokens here make of a zero state.
  void warm_up_for_next_rank() {
    if (s_.part.before < 0 && s_.part.after < 0) return;
    SharedVector<T> from(size_, T(0)), out(size_, T(0));
    if (s_.part.after >= 0) {
      const Run& run = s_.part.runs.back();
      const std::int64_t tokens = std::min(grid_.warm_up, run.size());
      const bool whole = tokens == run.size() && (run.starts || s_.part.runs.size() > 1 || s_.part.before < 0);
      if (whole) std::copy_n(s_.start(s_.part.runs.size() - 1), size_, from.data());
      s_.kernel.run(s_.part.path, {{run.end - tokens, run.end, 0, 0, -1, 0, D_}}, from.data(), out.data(), false);
    }
    const std::vector<T> in = pass_on(s_, out.data(), tag_warm);
    if (!in.empty()) copy_to_device(in.data(), size_, arrays_.starts);
  }

  /// What the rank before ends with now.
  void arrive() {
    if (s_.part.before < 0 && s_.part.after < 0) return;
    const std::vector<T> last = last_end();
    const std::vector<T> in = pass_on(s_, last.data(), tag_end);
    std::copy(in.begin(), in.end(), arriving_.begin());
  }

  /// Compares all borders, hands over what differs. Sets left_, worst_, prefix_, and what is known of sizes.
  void compare() {
    BorderVerdict v;
    if (s_.kernel.mixes()) {
      v = measure_jumps(grid_, size_, D_, arrays_, arriving(), m_.slot_jumps.data(), s_.part.starts.data(),
                        s_.part.ends.data(), m_.verdict);
      sizes(v.squares);
      s_.ranks.all_reduce(&v.worst, 1, Transport::Reduction::max);
      const double limit = s_.options.tolerance * std::max(rms_, 1e-300);
      if (v.worst > limit) {
        const double worst = v.worst;
        if (s_.part.before >= 0) s_.kernel.wait_for_look();  // it may start from what arrives here
        v = hand_over(grid_, size_, arrays_, arriving(), static_cast<const double*>(m_.slot_jumps.data()), limit);
        v.worst = worst;
      }
    } else {
      v = compare_channels();
      sizes(v.squares);
      s_.ranks.all_reduce(&v.worst, 1, Transport::Reduction::max);
    }
    std::int64_t first =
        v.first_token < 0 ? std::numeric_limits<std::int64_t>::max() : s_.part.axis_begin + v.first_token;
    s_.ranks.all_reduce(&v.left, 1, Transport::Reduction::sum);
    s_.ranks.all_reduce(&first, 1, Transport::Reduction::min);
    if (passes_ > 1 && worst_ > 0) contraction_ = v.worst / worst_;
    left_ = v.left, worst_ = v.worst;
    prefix_ = first == std::numeric_limits<std::int64_t>::max() ? s_.part.axis_tokens : first;
  }

  /// Compares the borders of channels that do not mix; growth and the states at the ends of runs come with it.
  BorderVerdict compare_channels() {
    if (grid_.runs == 1)
      return grown_ = compare_run(grid_, k_, D_, arrays_, arriving(), m_.jumps.data(), s_.part.starts.data(),
                                  s_.part.ends.data(), by_channel_.empty() ? nullptr : by_channel_.data(), m_.verdict);
    fold(), collect();  // done by the time that the verdict is read
    return compare_lanes(grid_, k_, D_, arrays_, arriving(), m_.jumps.data());
  }

  /// The RMS that tolerances are relative to: the smallest seen, since guessed starts may have blown up.
  void sizes(double squares) {
    double rms = 0;
    if (arrays_.squares) {
      s_.ranks.all_reduce(&squares, 1, Transport::Reduction::sum);
      rms = std::sqrt(squares / static_cast<double>(std::max<std::int64_t>(1, s_.part.axis_tokens)) / D_);
      bad_ = -1;
    }
    if (!arrays_.squares || !std::isfinite(squares)) std::tie(rms, bad_) = size_of_states(s_);
    rms_ = passes_ == 1 || !(rms >= rms_) ? rms : rms_;
  }

  /// More than one lane in twenty has not forgotten its start: the next solve warms up for longer.
  void adapt_warm_up() {
    std::int64_t lanes = grid_.slots * D_;
    s_.ranks.all_reduce(&lanes, 1, Transport::Reduction::sum);
    if (!s_.kernel.mixes() && 20 * left_ > lanes && m_.warm_up_factor < 64) m_.warm_up_factor *= warm_up_step;
  }

  /// Few lanes left that refuse to settle belong to the token loop; a few passes more while their number halves, or,
  /// where channels mix, as long as that or the worst jump does within three passes, or within a time that is small
  /// beside the token loop's. The same on all ranks.
  std::int64_t most_passes(bool halving, std::int64_t stalled) const {
    if (s_.options.method != NewtonMethod::automatic) return s_.options.max_iterations;
    if (!s_.kernel.mixes()) return halving ? 8 : 4;
    const bool goes_on = stalled < std::max<std::int64_t>(3, most_slots_ / 64);
    return goes_on ? std::max<std::int64_t>(4, most_slots_ / 4) : 0;
  }

  /// After a solve that tried less warm-up and fewer passes than usual: if that took longer, back to what is usual, for
  /// twice as many solves as before.
  void give_up_hope() {
    const bool tried = grid_.slots > grid_.runs, longer = tried && passes_ > m_.usual_passes;
    if (!tried || longer) m_.warm_up_factor = m_.usual_factor, m_.passes = m_.usual_passes;
    if (longer) m_.patience = std::min<std::int64_t>(1024, 2 * m_.patience);
    m_.usual_passes = 0;
  }

  /// An affine scan over the parts of the ranks, then along the borders of each.
  void newton_step() {
    ScanPart<T> share;
    share.links = s_.part.links(), share.count = D_;
    const bool known = s_.part.before < 0 || grid_.runs > 1;  // the last run starts from an exact state
    share.known.assign(D_, known ? 1 : 0);
    share.maps.n = k_, share.maps.m = 1, share.maps.leading = k_ + 1, share.maps.stride = k_ * (k_ + 1);
    reserve(m_.part_maps, "longscan::newton::folded", D_ * share.maps.stride);
    reserve(m_.delta_in, "longscan::newton::delta", size_), reserve(m_.delta_out, "longscan::newton::delta", size_);
    share.maps.data = m_.part_maps.data();
    share.in = {m_.delta_in.data(), 1, k_}, share.out = {m_.delta_out.data(), 1, k_};
    const T* jumps = m_.jumps.data();
    Kokkos::deep_copy(m_.delta_in, T(0));
    newton_maps(grid_, k_, D_, arrays_, jumps, largest_product, share.maps, m_.delta_out.data());
    const ScanAlgorithm algorithm = s_.plan.choose(s_.ranks, share);
    s_.report.scan = s_.plan.choice();
    RankScan<T>(s_.ranks).run(algorithm, share);
    newton_lanes(grid_, k_, D_, arrays_, jumps, static_cast<const T*>(m_.delta_in.data()), largest_product);
  }

  /// Channels that mix: all runs token by token. (Settled segments are within the tolerance, not bit by bit, what the
  /// loop leaves.)
  void run_whole() {
    if (s_.part.before >= 0) copy_to_device(arriving_.data(), size_, arrays_.starts);
    std::vector<CellSegment> runs;
    std::int64_t slot = 0;
    for (const Run& run : s_.part.runs) {
      const std::int64_t last = slot + std::max<std::int64_t>(1, (run.size() + grid_.tokens - 1) / grid_.tokens) - 1;
      if (last > slot) {  // start and end of a segment share their slot
        std::vector<T> from(size_);
        copy_to_host<T>(arrays_.starts + slot * size_, size_, from.data());
        copy_to_device(from.data(), size_, arrays_.starts + last * size_);
      }
      runs.push_back({run.begin, run.end, last, 0, -1, 0, D_});
      slot = last + 1;
    }
    if (!runs.empty()) s_.kernel.run(s_.part.path, runs, arrays_.starts, arrays_.ends, true);
  }

  /// States before and after the runs, for the host.
  void collect() {
    collect_states(grid_, size_, static_cast<const T*>(arrays_.starts), static_cast<const T*>(arrays_.ends),
                   s_.part.starts.data(), s_.part.ends.data());
  }

  // --- growth

  /// One run on one rank: its largest values come with the verdict.
  bool growth_is_summed() const { return grid_.runs == 1 && s_.ranks.size() == 1; }

  void plan_growth(const std::vector<SegmentRun>& table) {
    const auto runs = std::min<std::int64_t>(growth_runs, static_cast<std::int64_t>(table.size()));
    for (std::int64_t r = 0; r < runs; ++r) looked_ += table[r].end - table[r].begin;
    s_.report.sampled = runs < grid_.runs;
    if (grid_.slots == 0 || growth_is_summed()) return;
    by_channel_.resize(D_);
    if (grid_.runs == 1) return;
    const std::int64_t wanted = std::max<std::int64_t>(1, growth_lanes / D_);
    const std::int64_t each = std::max<std::int64_t>(4, (grid_.slots + wanted - 1) / wanted);
    std::vector<GrowthPiece> pieces;
    for (std::int64_t r = 0; r < runs; ++r) {
      const std::int64_t end = r + 1 < grid_.runs ? table[r + 1].slot : grid_.slots;
      for (std::int64_t b = table[r].slot; b < end; b += each) pieces.push_back({b, std::min(end, b + each), r});
    }
    pieces_ = static_cast<std::int64_t>(pieces.size());
    if (pieces != m_.pieces_there) {
      reserve(m_.pieces, "longscan::newton::pieces", pieces_);
      copy_to_device(pieces.data(), pieces_, m_.pieces.data());
      m_.pieces_there = std::move(pieces);
    }
    reserve(m_.stretches, "longscan::newton::stretches", pieces_ * D_);
  }
  /// Growth along what the last pass has left; read once the borders agree.
  void fold() {
    if (arrays_.growth && pieces_ > 0)
      fold_growth(m_.pieces.data(), pieces_, grid_.runs, D_, arrays_.growth, m_.stretches.data(), by_channel_.data());
  }

  /// Where channels mix: a tangent vector along the first tokens.
  void look() {
    if (grid_.runs == 0) return;
    const std::int64_t tokens =
        std::min(grid_.first.end - grid_.first.begin, std::clamp<std::int64_t>(look_products / (size_ * size_), 1, 8));
    looked_at_.assign(1, GrowthSums{});
    if (tokens > 0)
      s_.kernel.look_ahead(s_.part.path, grid_.first.begin, grid_.first.begin + tokens,
                           grid_.first.exact ? arrays_.initial : arrays_.starts, looked_at_.data());
  }
  void report_look() {
    s_.kernel.wait_for_look();
    double largest[] = {-1e300, 0};
    if (!looked_at_.empty() && looked_at_[0].tokens > 0)
      largest[0] = looked_at_[0].total / static_cast<double>(looked_at_[0].tokens), largest[1] = looked_at_[0].best;
    s_.ranks.all_reduce(largest, 2, Transport::Reduction::max);
    s_.report.lyapunov = largest[0] > -1e300 ? largest[0] : 0, s_.report.log_amplification = largest[1];
    s_.report.sampled = s_.looked = true;
  }

  void report_growth() {
    const std::size_t channels = D_;
    double total = grown_.total, largest[] = {grown_.best, grown_.error_most};
    std::int64_t looked = looked_;
    if (!growth_is_summed()) {
      std::vector<GrowthSums> in(channels), out(channels);
      const auto size = static_cast<std::int64_t>(channels * sizeof(GrowthSums));
      if (s_.part.before >= 0) s_.ranks.receive(in.data(), size, s_.part.before, tag_growth);
      std::vector<double> sums(channels, 0.0);
      largest[0] = largest[1] = 0;
      const auto take = [&](std::size_t c, const GrowthSums& g) {
        sums[c] += g.total;
        largest[0] = std::max(largest[0], g.best), largest[1] = std::max(largest[1], g.error_most);
      };
      for (std::size_t c = 0; c < by_channel_.size(); ++c) {
        const PartGrowth& part = by_channel_[c];
        const GrowthSums first = s_.part.before >= 0 ? combine(in[c], part.first) : part.first;
        const bool one = grid_.runs == 1;
        const GrowthSums& last = one ? first : part.last;
        if (!one) take(c, first), take(c, part.rest);
        if (s_.part.after >= 0)
          out[c] = last;
        else
          take(c, last);
      }
      if (s_.part.after >= 0) s_.ranks.send(out.data(), size, s_.part.after, tag_growth)->wait();
      s_.ranks.all_reduce(sums.data(), static_cast<int>(channels), Transport::Reduction::sum);
      s_.ranks.all_reduce(&looked, 1, Transport::Reduction::sum);
      s_.ranks.all_reduce(largest, 2, Transport::Reduction::max);
      total = *std::max_element(sums.begin(), sums.end());
    }
    s_.report.lyapunov = looked > 0 ? total / static_cast<double>(looked) : 0;
    s_.report.log_amplification = largest[0];
    // beyond this the linearisation that the bound stands on no longer holds
    s_.report.error_bound = largest[1] <= 0.1 ? largest[1] : -1;
    s_.looked = true;
  }

  LayerSolve<T>& s_;
  ShootingMemory<T>& m_;
  int D_, k_;
  std::int64_t size_;
  std::vector<SegmentRun> table_;
  SegmentGrid grid_;
  ShootingArrays<T> arrays_;
  SharedVector<T> arriving_;
  SharedVector<PartGrowth> by_channel_;
  BorderVerdict grown_;
  SharedVector<GrowthSums> looked_at_;
  std::int64_t passes_ = 0, left_ = 0, prefix_ = 0, bad_ = -1, pieces_ = 0, looked_ = 0;
  std::int64_t most_slots_ = 0;  // of all ranks
  bool walked_ = false;
  double rms_ = 0, worst_ = 0, contraction_ = 0;
};

}  // namespace

template <class T>
SegmentPlan plan_device_segments(LayerSolve<T>& s) {
  std::int64_t counts[] = {0, 0};  // the longest run, all tokens of a part
  for (const Run& run : s.part.runs) counts[0] = std::max(counts[0], run.size()), counts[1] += run.size();
  s.ranks.all_reduce(counts, 2, Transport::Reduction::max);
  std::int64_t factor = memory_of(s.kernel).warm_up_factor;
  s.ranks.all_reduce(&factor, 1, Transport::Reduction::max);
  return plan_device_segments(counts[1], counts[0], s.kernel.side_by_side(), factor * s.kernel.usual_warm_up(),
                              s.options.segment);
}

SegmentPlan plan_device_segments(std::int64_t tokens, std::int64_t longest, std::int64_t side_by_side,
                                 std::int64_t warm_up, std::int64_t wanted) {
  constexpr std::int64_t batch = 8;  // tokens that kernels read together
  const auto round_up = [](std::int64_t n) { return (n + batch - 1) / batch * batch; };
  SegmentPlan plan;
  if (wanted > 0) {
    plan.tokens = wanted, plan.warm_up = std::min(warm_up, wanted);
  } else {
    // as many segments as run at once, but none shorter than two warm-ups; those of the longest run alike
    const std::int64_t each = std::max((tokens + side_by_side - 1) / side_by_side, 2 * warm_up);
    const std::int64_t pieces = std::max<std::int64_t>(1, (longest + each / 2) / each);
    plan.tokens = round_up(std::max<std::int64_t>(1, (longest + pieces - 1) / pieces));
    plan.warm_up = std::min(warm_up, round_up(3 * plan.tokens / 8));
  }
  return plan;
}

template <class T>
std::int64_t passes_to_expect(const CellKernel<T>& kernel) {
  return memory_of(kernel).passes;
}

template <class T>
void hope_again(const CellKernel<T>& kernel) {
  ShootingMemory<T>& m = memory_of(kernel);
  if ((m.passes == 1 && m.warm_up_factor == 1) || ++m.solves % m.patience != 0) return;
  m.usual_factor = m.warm_up_factor, m.usual_passes = m.passes;
  m.passes = 1, m.warm_up_factor = std::max<std::int64_t>(1, m.warm_up_factor / warm_up_step);
}

template <class T>
void solve_shooting_on_device(LayerSolve<T>& s, bool may_fall_back) {
  DeviceShooting<T> shooting(s);
  const bool settled = shooting.solve();
  if (!settled && may_fall_back) shooting.token_loop();
  shooting.finish();
  s.report.status = settled         ? NewtonStatus::converged
                    : may_fall_back ? NewtonStatus::fell_back
                                    : NewtonStatus::not_converged;
  if (s.report.status == NewtonStatus::fell_back) s.report.converged_prefix = s.part.axis_tokens;
  s.report.bits_of_token_loop = s.report.status == NewtonStatus::fell_back || (settled && !s.kernel.mixes());
  if (!shooting.finite()) {
    s.report.status = NewtonStatus::non_finite;
    if (s.report.first_bad_token >= 0)
      s.report.converged_prefix = std::min(s.report.converged_prefix, s.report.first_bad_token);
  }
  if (settled && s.kernel.mixes()) {
    // a border that moved by `worst` contracts by `rho` a segment; a warm-up from zero that arrived within the
    // tolerance has shown as much itself
    const double rho = shooting.passes() > 1 ? std::min(shooting.contraction(), 0.99)
                                             : std::max(shooting.worst() / std::max(shooting.rms(), 1e-300), 1e-300);
    // an estimate: what is left of the jumps, and a step's rounding summed up over the memory
    s.report.error_bound = shooting.worst() / (1 - std::min(rho, 0.99));
    if (s.looked)
      s.report.error_bound +=
          5 * std::numeric_limits<T>::epsilon() / std::max(1e-3, 1 - std::exp(std::min(0.0, s.report.lyapunov)));
  }
}

template SegmentPlan plan_device_segments(LayerSolve<float>&);
template SegmentPlan plan_device_segments(LayerSolve<double>&);
template std::int64_t passes_to_expect(const CellKernel<float>&);
template std::int64_t passes_to_expect(const CellKernel<double>&);
template void hope_again(const CellKernel<float>&);
template void hope_again(const CellKernel<double>&);
template void solve_shooting_on_device(LayerSolve<float>&, bool);
template void solve_shooting_on_device(LayerSolve<double>&, bool);

}  // namespace longscan
