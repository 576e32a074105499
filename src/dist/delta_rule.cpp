// SPDX-License-Identifier: Apache-2.0
// The delta rule over ranks. One window is solved so:
//   1. What the tokens of a part do to a state is a map S -> S P + L. Where P vanishes over the last of them the state
//      behind the part is L; else it follows from a state that the rank has, or from the map and what comes in.
//   2. An exclusive scan over the ranks brings every part the state that it starts from.
//   3. One pass from there writes the outputs.
//   4. It also shows the states that were taken not to matter; where one does, what depends on it is done again.
// DeltaWhole and DeltaSegments are the two ways to do 1, 3 and 4 inside a rank.
#include "longscan/delta_rule.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <string>

#include "dist/delta_axis.hpp"
#include "dist/delta_report.hpp"
#include "dist/delta_segments.hpp"
#include "dist/delta_whole.hpp"
#include "dist/exclusive_scan.hpp"
#include "longscan/error.hpp"

namespace longscan {

/// What does not depend on the type of the arithmetic.
struct DeltaRule::Impl {
  Impl(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options, Sequences sequences, Sequences counting)
      : ranks(ranks),
        shape(shape),
        options(options),
        axis(std::move(sequences), std::move(counting), options.reproducible, options.state_every, ranks.size(),
             ranks.rank()) {}
  virtual ~Impl() = default;
  virtual DeltaReport solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) = 0;
  virtual std::int64_t workspace_bytes(std::int64_t tokens) const = 0;
  virtual std::vector<std::byte> state() const = 0;
  virtual void set_state(const std::vector<std::byte>& state) = 0;

  Transport& ranks;
  const DeltaShape shape;
  const DeltaOptions options;
  const DeltaAxis axis;
};

namespace {

constexpr int tag_carry = 200;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Whether a window takes the horizons that were enough in the one before to be enough again.
enum class Reliance : std::uint8_t {
  none,  ///< not known whether they were
  now,
  never  ///< they once were not
};

/// `Way`: DeltaWhole<T> or DeltaSegments<T>.
template <class T, class Way>
class Solver final : public DeltaRule::Impl {
 public:
  using DeltaRule::Impl::Impl;

  DeltaReport solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) override {
    const auto start = Clock::now();
    const std::int64_t sent_before = ranks.bytes_sent();
    report_ = {};
    begin(window, in, out);
    plan_.choose(ranks, way_.share());
    report_.scan = plan_.choice();

    solve_start_ = Clock::now();
    report_.started = std::chrono::duration<double>(solve_start_.time_since_epoch()).count();
    pass_states(relies() ? Horizons::remembered : Horizons::measured);
    way_.report_boundaries(report_);
    PassSummary found = way_.outputs();
    report_.at_outputs = seconds_since(solve_start_);
    confirm(found);
    carry(window);

    report_.bytes_exchanged = ranks.bytes_sent() - sent_before;
    finish(found);
    report_.seconds_solve = seconds_since(start);
    return report_;
  }

  std::int64_t workspace_bytes(std::int64_t tokens) const override {
    const Sequences& all = axis.cuts().sequences();  // at worst spread as the tokens are
    const double runs = static_cast<double>(all.count()) * static_cast<double>(tokens) /
                        static_cast<double>(std::max<std::int64_t>(1, all.tokens()));
    std::int64_t shortest = all.tokens();
    for (std::int64_t i = 0; i < all.count(); ++i)
      if (const std::int64_t length = all.offsets[i + 1] - all.offsets[i]; length > 0)
        shortest = std::min(shortest, length);
    return way_.workspace_bytes(tokens, static_cast<std::int64_t>(runs) + 1, shortest);
  }

  std::vector<std::byte> state() const override {
    if (ranks.rank() != 0) return {};
    if (carried_.empty()) return {};
    const auto bytes = std::as_bytes(std::span(carried_));
    std::vector<std::byte> state(bytes.begin(), bytes.end());
    state.push_back(static_cast<std::byte>(reliance_));
    return state;
  }

  void set_state(const std::vector<std::byte>& state) override {
    const std::size_t expected = state.empty() ? 0 : static_cast<std::size_t>(shape.heads * part_.state_bytes()) + 1;
    if (state.size() != expected)
      throw Error(ExitCode::bad_input, "a state of " + std::to_string(state.size()) + " bytes was given, one of " +
                                           std::to_string(expected) + " is needed");
    carried_.resize(state.size() / sizeof(T));
    std::memcpy(carried_.data(), state.data(), carried_.size() * sizeof(T));
    reliance_ = state.empty() ? Reliance::none : static_cast<Reliance>(state.back());
  }

 private:
  void begin(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) {
    here_ = axis.cuts().part(window);
    auto runs = axis.cuts().runs(window);
    std::vector<StatesPlace> places;
    for (const Run& run : runs) places.push_back(axis.place_of(here_.begin + run.begin, here_.begin));
    const bool continues = !runs.empty() && !runs.front().starts, goes_on = !runs.empty() && !runs.back().ends;
    const bool first = here_.begin == window.begin, last = here_.end == window.end;
    carries_ = goes_on && last;
    part_.begin(in, out, std::move(runs), std::move(places),
                {continues && !first ? ranks.rank() - 1 : -1, goes_on && !last ? ranks.rank() + 1 : -1});
    way_.begin();
    if (continues && first)
      copy_to_device(carried_.data(), static_cast<std::int64_t>(carried_.size()), part_.incoming.data());
  }

  /// Every rank gets the state that its part starts from; so does every segment.
  void pass_states(Horizons horizons) {
    const ScanAlgorithm algorithm = plan_.choice().algorithm;
    const bool joins = algorithm == ScanAlgorithm::doubling || algorithm == ScanAlgorithm::mpi;
    if (joins && horizons == Horizons::remembered) horizons = Horizons::measured;  // P is wanted
    horizons_ = horizons;
    const std::vector<char> known = way_.find_outgoing(horizons);
    report_.at_scan = seconds_since(solve_start_);
    if (joins) way_.join_maps();
    const ScanPart<T> share = way_.share(known);
    report_.known_heads = share.links.sends() ? std::count(known.begin(), known.end(), 1) : 0;
    scan_.run(algorithm, share, [&](std::int64_t begin, std::int64_t end) { way_.advance(begin, end); });
    report_.at_states = seconds_since(solve_start_);
    report_.seconds_scan = report_.at_states - report_.at_scan;
    way_.arrive();
  }

  /// After the outputs every rank knows the true states before its horizons. Seldom is one too large to be forgotten.
  void confirm(PassSummary& found) {
    if (options.reproducible) return;  // nothing was taken to be forgotten
    const std::int64_t wrong = wrong_borders();
    if (wrong > 0) mend(way_, wrong, found);
  }

  /// Of all ranks; and whether the next window relies on the same horizons.
  std::int64_t wrong_borders() {
    std::int64_t counts[] = {way_.wrong(), way_.first_horizons_do() ? 0 : 1, way_.borders()};
    ranks.all_reduce(counts, 3, Transport::Reduction::sum);
    if (horizons_ == Horizons::remembered) {
      if (counts[0] > 0) reliance_ = Reliance::never;
    } else if (reliance_ != Reliance::never) {
      reliance_ = counts[0] + counts[1] == 0 && counts[2] > 0 ? Reliance::now : Reliance::none;
    }
    return counts[0];
  }

  /// Whether this window relies on what was enough in the one before: what rank 0 says, where a state may have been
  /// set.
  bool relies() {
    if constexpr (std::is_same_v<Way, DeltaWhole<T>>) return false;
    if (options.reproducible) return false;
    std::int64_t first = ranks.rank() == 0 ? static_cast<std::int64_t>(reliance_) : 0;
    ranks.all_reduce(&first, 1, Transport::Reduction::max);
    reliance_ = static_cast<Reliance>(first);
    return reliance_ == Reliance::now;
  }

  /// All ranks start again: from horizons measured in this window where they were remembered, else, or if that does not
  /// do, from the maps of whole segments.
  void mend(DeltaSegments<T>& segments, std::int64_t wrong, PassSummary& found) {
    const auto again = [&](Horizons horizons) {
      pass_states(horizons);
      found = segments.outputs();
    };
    if (ranks.rank() == 0) report_.boundaries_corrected += wrong;
    if (horizons_ == Horizons::remembered) {
      again(Horizons::measured);
      if (wrong_borders() == 0) return;
    }
    again(Horizons::none);
  }

  /// The true states walk from rank to rank; whoever started from another one computes those heads again.
  void mend(DeltaWhole<T>& whole, std::int64_t, PassSummary& found) {
    std::vector<char> changed(shape.heads, 0);
    if (part_.links.receives()) {
      changed = scan_.receive_chosen(part_.links.before, shape.heads, part_.slots.points(part_.incoming));
      found = whole.outputs_again(changed, found);
    }
    if (!part_.links.sends()) return;
    const std::vector<char> mended = whole.mend_outgoing(changed);
    report_.boundaries_corrected += std::count(mended.begin(), mended.end(), 1);
    scan_.send_chosen(part_.links.after, mended, part_.slots.points(part_.outgoing));
  }

  /// The state at the end of the window goes to rank 0, which starts the next one.
  void carry(TokenRange window) {
    if (window.end == axis.cuts().tokens()) return;
    if (carries_) {
      if (!options.reproducible) part_.take_arrived(std::vector<char>(shape.heads, 1));
      carried_.resize(part_.outgoing.size());
      copy_to_host(part_.outgoing.data(), static_cast<std::int64_t>(carried_.size()), carried_.data());
    } else {
      carried_.assign(part_.outgoing.size(), T(0));
    }
    const int last = axis.cuts().last_holder(window);
    const auto bytes = static_cast<std::int64_t>(carried_.size() * sizeof(T));
    if (last == 0) return;
    if (ranks.rank() == last) ranks.send(carried_.data(), bytes, 0, tag_carry)->wait();
    if (ranks.rank() == 0) ranks.receive(carried_.data(), bytes, last, tag_carry);
  }

  /// Totals over the ranks, and agreement on the outcome.
  void finish(const PassSummary& found) {
    report_.stability_breaches = found.breaches, report_.inverse_fallbacks = found.fallbacks;
    report_.inverse_terms_max = found.terms, report_.map_tokens = part_.mapped_tokens;
    report_.segments = way_.segments(), report_.tensor_tasks = part_.passes.tensor_tasks();
    report_.general_tasks = part_.passes.general_tasks();
    add_over_ranks(ranks, report_);
    agree_on_bad_token(ranks, found.bad.token < 0 ? -1 : here_.begin + found.bad.token, found.bad.head,
                       sizeof(T) == 8 ? "float64" : "float32");
  }

  DeltaPart<T> part_{shape, options};
  Way way_{part_};
  RankScan<T> scan_{ranks};
  ScanPlan plan_{options.scan, options.reproducible};
  Clock::time_point solve_start_;
  DeltaReport report_;
  TokenRange here_;
  Horizons horizons_ = Horizons::measured;  // of this solve
  Reliance reliance_ = Reliance::none;
  bool carries_ = false;    // this rank's last run goes on in the next window
  std::vector<T> carried_;  // the state at the end of the window before
};

template <class T>
std::unique_ptr<DeltaRule::Impl> make_solver(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options,
                                             Sequences sequences, Sequences counting) {
  if (DeltaSegments<T>::used(options))
    return std::make_unique<Solver<T, DeltaSegments<T>>>(ranks, shape, options, std::move(sequences),
                                                         std::move(counting));
  return std::make_unique<Solver<T, DeltaWhole<T>>>(ranks, shape, options, std::move(sequences), std::move(counting));
}

void require(bool good, const std::string& message) {
  if (!good) throw Error(ExitCode::usage, message);
}

}  // namespace

DeltaRule::DeltaRule(Transport& ranks, const DeltaShape& shape, const DeltaOptions& options, Sequences sequences,
                     std::optional<Sequences> counting) {
  require(options.chunk >= 1 && options.chunk <= 256,
          "--chunk is " + std::to_string(options.chunk) + "; it takes 1 to 256");
  require(shape.heads >= 1 && shape.d_key >= 1 && shape.d_value >= 1, "heads, d_key and d_value must be at least 1");
  require(options.precision != Precision::automatic, "the arithmetic must be decided before a solve");
  require_reproducible_scan(options.scan, options.reproducible);
  Sequences states = counting ? *counting : sequences;
  impl_ = options.precision == Precision::f64
              ? make_solver<double>(ranks, shape, options, std::move(sequences), std::move(states))
              : make_solver<float>(ranks, shape, options, std::move(sequences), std::move(states));
}

DeltaRule::~DeltaRule() = default;

std::vector<TokenRange> DeltaRule::windows(std::int64_t tokens, std::int64_t from) const {
  const DeltaAxis& axis = impl_->axis;
  if (from != axis.cuts().tokens() && axis.cut_before(from) != from)
    throw Error(ExitCode::bad_input, "a window cannot start at token " + std::to_string(from));
  return axis.cuts().windows(std::max<std::int64_t>(1, tokens) * impl_->ranks.size(), from);
}
TokenRange DeltaRule::part(TokenRange window) const { return impl_->axis.cuts().part(window); }
std::vector<Run> DeltaRule::runs(TokenRange window) const { return impl_->axis.cuts().runs(window); }
std::int64_t DeltaRule::workspace_bytes(std::int64_t tokens) const { return impl_->workspace_bytes(tokens); }
std::int64_t DeltaRule::states_before(std::int64_t token) const { return impl_->axis.states_before(token); }

std::vector<std::byte> DeltaRule::state() const { return impl_->state(); }
void DeltaRule::set_state(const std::vector<std::byte>& state) { impl_->set_state(state); }

DeltaReport DeltaRule::solve(TokenRange window, const DeltaInputs& in, const DeltaOutputs& out) {
  return impl_->solve(window, in, out);
}

}  // namespace longscan
