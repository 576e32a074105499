// SPDX-License-Identifier: Apache-2.0
#include "longscan/delta_rule.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "dist/delta_part.hpp"
#include "dist/exclusive_scan.hpp"
#include "dist/token_cuts.hpp"
#include "longscan/error.hpp"

namespace longscan {
namespace {

constexpr int tag_carry = 200;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Who passes states to whom in a window.
struct Links {
  ScanLinks chain;
  bool carries = false;  ///< this rank's last run goes on in the next window
};

}  // namespace

/// What does not depend on the type of the arithmetic.
struct DeltaRule::Impl {
  Impl(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options, Sequences sequences, Sequences counting)
      : ranks(ranks),
        shape(shape),
        options(options),
        sequences(std::move(sequences)),
        counting(std::move(counting)),
        cuts(this->sequences, ranks.size(), ranks.rank(), [this](std::int64_t token) { return cut_before(token); }) {
    count_states();
  }
  virtual ~Impl() = default;
  virtual DeltaReport solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) = 0;
  virtual std::int64_t workspace_bytes(std::int64_t tokens) const = 0;
  virtual std::vector<std::byte> state() const = 0;
  virtual void set_state(const std::vector<std::byte>& state) = 0;

  /// Where a part or window may end: anywhere, or with `reproducible` where a segment of a sequence ends.
  std::int64_t cut_before(std::int64_t token) const {
    if (!options.reproducible) return token;
    const auto& at = sequences.offsets;
    const auto next = std::upper_bound(at.begin(), at.end(), token);
    if (next == at.end()) return token;
    const std::int64_t begin = *(next - 1), segment = segment_tokens(*next - begin);
    return begin + (token - begin) / segment * segment;
  }
  /// States that `state_every` asks for before a token.
  std::int64_t states_before(std::int64_t token) const {
    if (options.state_every == 0) return 0;
    const std::int64_t i = counted_in(token);
    return states_at_[i] + (token - counting.offsets[i]) / options.state_every;
  }
  /// The counting sequence that holds a token; the last one at the end of the axis.
  std::int64_t counted_in(std::int64_t token) const {
    const auto& at = counting.offsets;
    const auto next = std::upper_bound(at.begin(), at.end(), token) - at.begin() - 1;
    return std::clamp<std::int64_t>(next, 0, std::max<std::int64_t>(0, counting.count() - 1));
  }
  void count_states() {
    states_at_.assign(1, 0);
    for (std::int64_t i = 0; i < counting.count(); ++i)
      states_at_.push_back(
          states_at_.back() +
          (options.state_every == 0 ? 0 : (counting.offsets[i + 1] - counting.offsets[i]) / options.state_every));
  }

  Transport& ranks;
  DeltaShape shape;
  DeltaOptions options;
  Sequences sequences, counting;
  TokenCuts cuts;
  std::vector<std::int64_t> states_at_;  // before each counting sequence
};

namespace {

template <class T>
class Solver final : public DeltaRule::Impl {
 public:
  using DeltaRule::Impl::Impl;

  DeltaReport solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) override {
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t sent_before = ranks.bytes_sent();
    report_ = {};
    const Links links = begin(window, in, out);
    plan_.choose(ranks, part_.share(links.chain, {}));
    report_.scan = plan_.choice();

    solve_start_ = std::chrono::steady_clock::now();
    if (part_.segmented())
      pass_states_by_segments(links, true);
    else
      pass_states(links);

    PassSummary found = part_.outputs();
    report_.at_outputs = seconds_since(solve_start_);
    if (part_.segmented())
      confirm_segments(links, found);
    else
      confirm(links, found);
    carry(window, links);
    report_.bytes_exchanged = ranks.bytes_sent() - sent_before;
    finish(found);
    report_.seconds_solve = seconds_since(start);
    return report_;
  }

  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    return part_.workspace_bytes(options.reproducible ? tokens : 0);
  }

  std::vector<std::byte> state() const override {
    if (ranks.rank() != 0) return {};
    const auto bytes = std::as_bytes(std::span(carry_));
    return {bytes.begin(), bytes.end()};
  }

  void set_state(const std::vector<std::byte>& state) override {
    const std::size_t expected = state.empty() ? 0 : static_cast<std::size_t>(shape.heads * part_.state_bytes());
    if (state.size() != expected)
      throw Error(ExitCode::bad_input, "a state of " + std::to_string(state.size()) + " bytes was given, one of " +
                                           std::to_string(expected) + " is needed");
    carry_.resize(state.size() / sizeof(T));
    std::memcpy(carry_.data(), state.data(), state.size());
  }

 private:
  Links begin(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) {
    here_ = cuts.part(window);
    auto runs = cuts.runs(window);
    std::vector<StatesPlace> places;
    for (const Run& run : runs) {
      const std::int64_t token = here_.begin + run.begin, start = counting.offsets[counted_in(token)];
      places.push_back({token - start, states_before(start) - states_before(here_.begin) - 1});
    }
    const bool continues = !runs.empty() && !runs.front().starts, goes_on = !runs.empty() && !runs.back().ends;
    const bool first = here_.begin == window.begin, last = here_.end == window.end;
    const Links links{{continues && !first ? ranks.rank() - 1 : -1, goes_on && !last ? ranks.rank() + 1 : -1},
                      goes_on && last};
    part_.begin(in, out, std::move(runs), std::move(places), links.chain.sends());
    if (continues && first)
      copy_to_device(carry_.data(), static_cast<std::int64_t>(carry_.size()), part_.incoming.data());
    return links;
  }

  /// Boundary states: from the horizon where a head forgets; else run on from a known state, or from the map of the
  /// whole part and the state that comes in.
  void pass_states(const Links& links) {
    const int H = shape.heads;
    forgets_.assign(H, 0);
    std::vector<char> known(H, 1);
    if (links.chain.sends()) {
      const Run& last = part_.runs().back();
      const bool state_known = !links.chain.receives() || part_.runs().size() > 1;
      const std::int64_t tokens = last.size();
      // From a known state a pass over all tokens costs about half as much as their map; a quarter of them is tried.
      const std::int64_t limit = state_known ? tokens / 4 : tokens;
      if (limit >= 16 * shape.d_key || !state_known) forgets_ = part_.map_until_forgotten(limit);
      if (state_known)
        part_.run_to_end(forgets_);
      else
        known = forgets_;
      for (int h = 0; h < H; ++h) {
        report_.boundaries += 1, report_.boundaries_forgotten += forgets_[h];
        report_.horizon_max = std::max(report_.horizon_max, forgets_[h] ? part_.horizons()[h] : tokens);
      }
    }
    known_ = known;
    scan(links.chain, known, [&](std::int64_t b, std::int64_t e) { part_.advance(b, e, known_); });
  }

  /// Boundary states inside and between parts from the maps of segments: those of horizons, as long as all is forgotten
  /// before them, or of whole segments, one after another. With `reproducible` always the latter, and segments that do
  /// not depend on how tokens are cut.
  void pass_states_by_segments(const Links& links, bool forgetting) {
    const std::int64_t H = shape.heads;
    part_.map_segments(forgetting);
    if (part_.first_continues() && !links.chain.receives()) part_.scan_first_run(0, H);
    const bool through = links.chain.receives() && part_.runs().size() == 1;  // what comes in decides what goes out
    const std::vector<char> known = through ? part_.first_run_forgets() : std::vector<char>(H, 1);
    if (links.chain.sends()) {
      part_.take_segment_end(0, H);  // what is not known is replaced below
      count_boundaries();
    }
    scan(links.chain, known, [&](std::int64_t b, std::int64_t e) {
      part_.scan_first_run(b, e);
      part_.take_segment_end(b, e);
    });
    if (links.chain.receives()) part_.scan_first_run(0, H);
    if (options.reproducible && !part_.runs().empty()) part_.take_segment_end(0, H);
  }

  void count_boundaries() {
    const std::size_t H = shape.heads;
    report_.boundaries += H;
    for (std::size_t i = part_.borders().size() - std::min(part_.borders().size(), H); i < part_.borders().size();
         ++i) {
      report_.boundaries_forgotten += part_.borders()[i].forgets;
      report_.horizon_max = std::max(report_.horizon_max, part_.borders()[i].covered);
    }
  }

  /// After the outputs every rank knows the true states before its horizons. If one was too large to be forgotten, all
  /// ranks start again from the maps of whole segments.
  void confirm_segments(const Links& links, PassSummary& found) {
    if (options.reproducible) return;
    std::int64_t wrong = part_.wrong_borders();
    ranks.all_reduce(&wrong, 1, Transport::Reduction::sum);
    if (wrong == 0) return;
    if (ranks.rank() == 0) report_.boundaries_corrected += wrong;
    pass_states_by_segments(links, false);
    found = part_.outputs();
  }

  void scan(ScanLinks links, const std::vector<char>& known, const ScanAdvance& advance) {
    report_.at_scan = seconds_since(solve_start_);
    const ScanAlgorithm algorithm = plan_.choice().algorithm;
    const bool composes = algorithm == ScanAlgorithm::doubling || algorithm == ScanAlgorithm::mpi;
    if (composes && part_.segmented()) part_.join_maps();
    scan_.run(algorithm, part_.share(links, known, composes), advance);
    report_.at_states = seconds_since(solve_start_);
    report_.seconds_scan = report_.at_states - report_.at_scan;
  }

  /// After the outputs every rank knows the true state before its horizon. Where that state was too large to be
  /// forgotten, the true end state follows, and whoever used the other one computes again.
  void confirm(const Links& links, PassSummary& found) {
    const int H = shape.heads;
    // seldom is one wrong: then the true states walk from rank to rank
    std::int64_t any = 0;
    if (links.chain.sends()) {
      const std::vector<char> wrong = part_.not_forgotten(forgets_);
      any = std::count(wrong.begin(), wrong.end(), 1);
    }
    ranks.all_reduce(&any, 1, Transport::Reduction::max);
    if (any == 0) return;
    std::vector<char> changed(H, 0);
    if (links.chain.receives()) {
      changed = scan_.receive_chosen(links.chain.before, H, part_.points(part_.incoming));
      if (std::count(changed.begin(), changed.end(), 1) > 0) {
        const PassSummary again = part_.outputs(changed);
        if (found.bad.token >= 0 && changed[found.bad.head]) {  // what the other heads met still stands
          found.bad = {};
          for (const BadToken& other : found.all_bad)
            if (!changed[other.head] && (found.bad.token < 0 || other.token < found.bad.token)) found.bad = other;
        }
        if (again.bad.token >= 0 && (found.bad.token < 0 || again.bad.token < found.bad.token)) found.bad = again.bad;
      }
    }
    if (!links.chain.sends()) return;
    std::vector<char> wrong = part_.not_forgotten(forgets_);
    if (links.chain.receives() && part_.runs().size() == 1)
      for (int h = 0; h < H; ++h)
        if (changed[h] && !known_[h]) wrong[h] = 1;
    part_.take_true_end(wrong);
    report_.boundaries_corrected += std::count(wrong.begin(), wrong.end(), 1);
    scan_.send_chosen(links.chain.after, wrong, part_.points(part_.outgoing));
  }

  /// The state at the end of the window goes to rank 0, which starts the next one.
  void carry(TokenRange window, const Links& links) {
    if (window.end == sequences.tokens()) return;
    const int last = cuts.last_holder(window);
    if (links.carries) {
      if (!options.reproducible) part_.take_true_end(std::vector<char>(shape.heads, 1));
      carry_.resize(part_.outgoing.size());
      copy_to_host(part_.outgoing.data(), static_cast<std::int64_t>(carry_.size()), carry_.data());
    } else {
      carry_.assign(part_.outgoing.size(), T(0));
    }
    const auto bytes = static_cast<std::int64_t>(carry_.size() * sizeof(T));
    if (last == 0) return;
    if (ranks.rank() == last) ranks.send(carry_.data(), bytes, 0, tag_carry)->wait();
    if (ranks.rank() == 0) ranks.receive(carry_.data(), bytes, last, tag_carry);
  }

  /// Totals over the ranks, and agreement on the outcome.
  void finish(const PassSummary& found) {
    std::int64_t sums[] = {found.breaches,
                           found.fallbacks,
                           report_.boundaries,
                           report_.boundaries_forgotten,
                           report_.boundaries_corrected,
                           part_.mapped_tokens(),
                           report_.bytes_exchanged,
                           part_.segments(),
                           part_.tensor_tasks(),
                           part_.general_tasks()};
    ranks.all_reduce(sums, 10, Transport::Reduction::sum);
    std::int64_t largest[] = {found.terms, report_.horizon_max};
    ranks.all_reduce(largest, 2, Transport::Reduction::max);
    report_.stability_breaches = sums[0], report_.inverse_fallbacks = sums[1], report_.boundaries = sums[2];
    report_.boundaries_forgotten = sums[3], report_.boundaries_corrected = sums[4], report_.map_tokens = sums[5];
    report_.bytes_exchanged = sums[6], report_.segments = sums[7], report_.tensor_tasks = sums[8];
    report_.general_tasks = sums[9], report_.inverse_terms_max = largest[0], report_.horizon_max = largest[1];

    constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
    std::int64_t token = found.bad.token < 0 ? none : here_.begin + found.bad.token;
    const std::int64_t mine = token;
    ranks.all_reduce(&token, 1, Transport::Reduction::min);
    if (token == none) return;
    std::int64_t head = mine == token ? found.bad.head : none;
    ranks.all_reduce(&head, 1, Transport::Reduction::min);
    throw NonFinite(token, static_cast<int>(head), sizeof(T) == 8 ? "float64" : "float32");
  }

  DeltaPart<T> part_{shape, options};
  RankScan<T> scan_{ranks};
  ScanPlan plan_{options.scan, options.reproducible};
  std::chrono::steady_clock::time_point solve_start_;
  DeltaReport report_;
  TokenRange here_;
  std::vector<char> forgets_, known_;
  std::vector<T> carry_;
};

void require(bool good, const std::string& message) {
  if (!good) throw Error(ExitCode::usage, message);
}

}  // namespace

DeltaReport& DeltaReport::operator+=(const DeltaReport& r) {
  stability_breaches += r.stability_breaches, inverse_fallbacks += r.inverse_fallbacks;
  inverse_terms_max = std::max(inverse_terms_max, r.inverse_terms_max);
  horizon_max = std::max(horizon_max, r.horizon_max);
  boundaries += r.boundaries, boundaries_forgotten += r.boundaries_forgotten;
  boundaries_corrected += r.boundaries_corrected, map_tokens += r.map_tokens;
  segments += r.segments, tensor_tasks += r.tensor_tasks, general_tasks += r.general_tasks;
  bytes_exchanged += r.bytes_exchanged;
  scan = r.scan, at_scan = r.at_scan, at_states = r.at_states, at_outputs = r.at_outputs;
  seconds_scan += r.seconds_scan, seconds_solve += r.seconds_solve;
  return *this;
}

DeltaRule::DeltaRule(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options, Sequences sequences,
                     std::optional<Sequences> counting) {
  require(options.chunk >= 1 && options.chunk <= 256,
          "--chunk is " + std::to_string(options.chunk) + "; it takes 1 to 256");
  require(shape.heads >= 1 && shape.d_key >= 1 && shape.d_value >= 1, "heads, d_key and d_value must be at least 1");
  require(options.precision != Precision::automatic, "the arithmetic must be decided before a solve");
  require_reproducible_scan(options.scan, options.reproducible);
  Sequences states = counting ? *counting : sequences;
  if (options.precision == Precision::f64)
    impl_ = std::make_unique<Solver<double>>(ranks, shape, options, std::move(sequences), std::move(states));
  else
    impl_ = std::make_unique<Solver<float>>(ranks, shape, options, std::move(sequences), std::move(states));
}

DeltaRule::~DeltaRule() = default;

std::vector<TokenRange> DeltaRule::windows(std::int64_t tokens, std::int64_t from) const {
  if (from != impl_->sequences.tokens() && impl_->cut_before(from) != from)
    throw Error(ExitCode::bad_input, "a window cannot start at token " + std::to_string(from));
  return impl_->cuts.windows(std::max<std::int64_t>(1, tokens) * impl_->ranks.size(), from);
}
TokenRange DeltaRule::part(TokenRange window) const { return impl_->cuts.part(window); }
std::vector<Run> DeltaRule::runs(TokenRange window) const { return impl_->cuts.runs(window); }
std::int64_t DeltaRule::workspace_bytes(std::int64_t tokens) const { return impl_->workspace_bytes(tokens); }
std::int64_t DeltaRule::states_before(std::int64_t token) const { return impl_->states_before(token); }

std::vector<std::byte> DeltaRule::state() const { return impl_->state(); }
void DeltaRule::set_state(const std::vector<std::byte>& state) { impl_->set_state(state); }

DeltaReport DeltaRule::solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) {
  return impl_->solve(window, in, out);
}

}  // namespace longscan
