// SPDX-License-Identifier: Apache-2.0
// How hard a delta problem is: sizes of keys, strengths and decays, the chunk matrices' norms, how fast states are
// forgotten.
#include <algorithm>
#include <cmath>

#include "apps/inspect.hpp"
#include "core/chunk_operator.hpp"
#include "core/dtype.hpp"
#include "core/random.hpp"

namespace longscan {
namespace {

const std::vector<std::string> token_roles = {"q", "k", "v", "beta", "eta", "log_decay", "a", "b"};
constexpr double isolated_below = 1e-3;  ///< beta |k|^2 of a token that erases nothing to speak of
constexpr double sample_work = 1e9;      ///< multiplications
constexpr double sample_bytes = 64 << 20;

/// Sizes on a logarithmic scale, eight bins an octave: quantiles to 5 %.
class SizeBins {
 public:
  SizeBins() : bins_(8 * 128, 0) {}
  void add(double x) {
    const double at = x > 0 ? 8 * (std::log2(x) + 64) : 0;
    ++bins_[static_cast<std::size_t>(std::clamp(at, 0.0, static_cast<double>(bins_.size() - 1)))];
    most_ = std::max(most_, x);
  }
  void reduce(Transport& ranks) {
    ranks.all_reduce(bins_.data(), static_cast<int>(bins_.size()), Transport::Reduction::sum);
    ranks.all_reduce(&most_, 1, Transport::Reduction::max);
  }
  double median() const {
    std::int64_t all = 0, seen = 0;
    for (std::int64_t n : bins_) all += n;
    for (std::size_t i = 0; i < bins_.size(); ++i)
      if (2 * (seen += bins_[i]) >= all) return i == 0 ? 0 : std::exp2((static_cast<double>(i) + 0.5) / 8 - 64);
    return 0;
  }
  double most() const { return most_; }

 private:
  std::vector<std::int64_t> bins_;
  double most_ = 0;
};

/// The first value of a role that cannot be solved.
struct BadValue {
  std::int64_t token = std::numeric_limits<std::int64_t>::max(), count = 0;
  std::string text;
};

class DeltaSurvey {
 public:
  DeltaSurvey(const InputFile& file, const InspectCommand& command, const DeltaProblem& problem)
      : file_(file),
        command_(command.delta),
        problem_(problem),
        precision_(arithmetic_of(command.delta.solve.precision, problem.widest())),
        rounding_(precision_ == Precision::f64 ? 1.1e-16 : 6e-8),
        terms_(command_.chunk + 1, 0),
        log_sums_(problem.shape.heads, 0.0),
        decay_sums_(problem.shape.heads, 0.0),
        log_tokens_(problem.shape.heads, 0),
        decay_tokens_(problem.shape.heads, 0) {}

  void look(TokenRange range) {
    for_pieces(problem_.sources, range,
               [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                 const DeltaStretch stretch(file_, problem_, command_, source, b, token, n);
                 if (!sound(stretch, range.begin + at, n)) return;
                 // sequences inside the piece
                 const std::int64_t first = b * source.tokens + token;
                 auto next = std::upper_bound(source.offsets.begin(), source.offsets.end(), first);
                 for (std::int64_t t = 0; t < n;) {
                   const std::int64_t end = next == source.offsets.end() ? n : std::min(n, *next++ - first);
                   for (int head = 0; head < problem_.shape.heads && end > t; ++head) run(stretch, head, t, end);
                   t = std::max(t, end);
                 }
                 tokens_ += n;
               });
  }

  nlohmann::json reduce(Transport& ranks, Problems& problems) {
    for (Range* r : {&key_norm_, &beta_, &eta_, &decay_}) r->reduce(ranks);
    norms_.reduce(ranks);
    ranks.all_reduce(terms_.data(), static_cast<int>(terms_.size()), Transport::Reduction::sum);
    std::int64_t counts[] = {tokens_, zero_keys_, negative_, breaches_, isolated_, token_heads_, forget_all_};
    ranks.all_reduce(counts, 7, Transport::Reduction::sum);
    const int H = problem_.shape.heads;
    ranks.all_reduce(log_sums_.data(), H, Transport::Reduction::sum);
    ranks.all_reduce(decay_sums_.data(), H, Transport::Reduction::sum);
    ranks.all_reduce(log_tokens_.data(), H, Transport::Reduction::sum);
    ranks.all_reduce(decay_tokens_.data(), H, Transport::Reduction::sum);
    for (const std::string& role : token_roles) report_bad(ranks, bad_[role], problems);

    nlohmann::json j = {{"tokens_read", counts[0]},
                        {"tokens", problem_.tokens()},
                        {"arithmetic", std::string(name_of(precision_))},
                        {"chunk", command_.chunk}};
    if (problem_.variant == Variant::delta) {
      j["key_norm"] = key_norm_, j["zero_keys"] = counts[1];
      j["beta"] = beta_, j["negative_beta"] = counts[2];
      if (problem_.has("eta")) j["eta"] = eta_;
      j["stability_bound"] = problem_.has("log_decay") && command_.erase == Erase::undecayed
                                 ? "beta |k|^2 <= 1 + the smallest decay"
                                 : "beta |k|^2 <= 2";
      j["stability_breaches"] = counts[3];
    }
    j["isolated_tokens"] = counts[4], j["token_heads"] = counts[5];
    if (problem_.has("log_decay")) {
      j["decay"] = decay_, j["forget_all"] = counts[6];
      double fastest = 0, slowest = -1e300;
      for (int h = 0; h < H; ++h) {
        if (decay_tokens_[h] == 0) continue;
        const double mean = decay_sums_[h] / static_cast<double>(decay_tokens_[h]);
        fastest = std::min(fastest, mean), slowest = std::max(slowest, mean);
      }
      if (slowest > -1e300) j["half_life_tokens"] = {{"shortest", half_life(fastest)}, {"longest", half_life(slowest)}};
    }
    std::int64_t chunks = 0, seen = 0, median = 0;
    for (std::int64_t n : terms_) chunks += n;
    for (std::size_t i = 0; i < terms_.size(); ++i)
      if (2 * (seen += terms_[i]) >= chunks) {
        median = static_cast<std::int64_t>(i);
        break;
      }
    std::size_t most = terms_.size() - 1;
    while (most > 0 && terms_[most] == 0) --most;
    std::int64_t too_many = 0;  // the solver takes the series below half of C
    for (std::size_t i = 0; i < terms_.size(); ++i)
      if (2 * static_cast<int>(i) >= command_.chunk) too_many += terms_[i];
    j["norm_A"] = {{"median", norms_.median()}, {"max", norms_.most()}};
    j["neumann_terms"] = {{"median", median}, {"max", most}, {"chunks", chunks}, {"chunks_by_forward", too_many}};
    j["forgetting"] = forgetting();
    return j;
  }

 private:
  /// Whether every value can be solved; notes those that cannot.
  bool sound(const DeltaStretch& stretch, std::int64_t first, std::int64_t n) {
    bool good = true;
    for (const auto& [role, values] : stretch.memory) {
      if (role == "identity") continue;
      const auto each = static_cast<std::int64_t>(values.size()) / std::max<std::int64_t>(1, n);
      const bool decay = role == "log_decay";
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double x = values[i];
        if (decay ? x <= 0 : !is_non_finite(x)) continue;
        good = false;
        // where heads come first in memory, so do they here
        const bool heads_first = problem_.layout == Layout::bhtd;
        const std::int64_t heads = problem_.heads.count(role) ? problem_.heads.at(role) : problem_.shape.heads;
        const std::int64_t width = each / heads, at = static_cast<std::int64_t>(i);
        const std::int64_t token = first + (heads_first ? at / width % n : at / each);
        const std::int64_t head = heads_first ? at / width / n : at % each / width;
        BadValue& bad = bad_[role];
        ++bad.count;
        if (token >= bad.token) continue;
        bad.token = token;
        bad.text = describe_token(problem_.sources, file_.path(), role, token) + ", head " + std::to_string(head) +
                   " is " +
                   (x != x             ? "NaN"
                    : is_non_finite(x) ? (x > 0 ? "infinite" : "-infinite")
                                       : std::to_string(x)) +
                   (decay ? "; log_decay is a natural logarithm and must be <= 0 (was a linear gate written?)"
                          : "; every input must be finite");
      }
    }
    return good;
  }

  void report_bad(Transport& ranks, BadValue& bad, Problems& problems) const {
    std::int64_t count = bad.count, first = bad.token;
    ranks.all_reduce(&count, 1, Transport::Reduction::sum);
    ranks.all_reduce(&first, 1, Transport::Reduction::min);
    if (count == 0) return;
    std::int64_t holder = bad.count > 0 && bad.token == first ? ranks.rank() : ranks.size();
    ranks.all_reduce(&holder, 1, Transport::Reduction::min);
    std::string text = broadcast(ranks, bad.text, static_cast<int>(holder));
    if (count > 1) text += " (and " + std::to_string(count - 1) + " more values of it)";
    problems.push_back(text);
  }

  /// Tokens [begin, end) of a sequence, one head.
  void run(const DeltaStretch& stretch, int head, std::int64_t begin, std::int64_t end) {
    const reference::DeltaProblem& p = stretch.problem;
    const int K = problem_.shape.d_key;
    for (std::int64_t t = begin; t < end; ++t) token(p, head, t, K);
    const int C = command_.chunk;
    for (std::int64_t t = begin; t < end; t += C) {
      const int n = static_cast<int>(std::min<std::int64_t>(C, end - t));
      const double norm = reference::norm_bound(reference::chunk_matrix(p, head, t, n), n);
      norms_.add(norm);
      ++terms_[reference::series_terms(norm, n, rounding_)];
    }
    probe_memory(p, head, begin, end, K);
  }

  static double value(const TokenArray& x, int head, std::int64_t t, int i) {
    return load<double>(x.data, x.type, t * x.token_stride + head / x.heads_per_stored * x.head_stride + i);
  }
  static double norm(const TokenArray& x, int head, std::int64_t t, int K) {
    double sum = 0;
    for (int i = 0; i < K; ++i) {
      const double v = value(x, head, t, i);
      sum += v * v;
    }
    return std::sqrt(sum);
  }

  void token(const reference::DeltaProblem& p, int head, std::int64_t t, int K) {
    ++token_heads_;
    double least = 1;
    if (p.in.log_decay) {
      const int channels = problem_.shape.channel_decay ? K : 1;
      double sum = 0;
      for (int i = 0; i < channels; ++i) {
        const double g = value(p.in.log_decay, head, t, i);
        decay_.add(std::exp(g)), least = std::min(least, std::exp(g));
        sum += g;
        if (is_non_finite(g)) ++forget_all_;
      }
      if (!is_non_finite(sum)) decay_sums_[head] += sum / channels, ++decay_tokens_[head];
    }
    if (problem_.variant == Variant::dplr) {
      if (norm(p.in.a, head, t, K) * norm(p.in.b, head, t, K) < isolated_below) ++isolated_;
      return;
    }
    double size = norm(p.in.k, head, t, K);
    key_norm_.add(size);
    if (size == 0) ++zero_keys_;
    if (command_.normalize_keys && size > 0) size = 1;
    const double beta = value(p.in.beta, head, t, 0), strength = beta * size * size;
    beta_.add(beta);
    if (p.in.eta) eta_.add(value(p.in.eta, head, t, 0));
    if (beta < 0) ++negative_;
    const double bound = p.in.log_decay && command_.erase == Erase::undecayed ? 1 + least : 2;
    if (strength > bound * (1 + 1e-5) || beta < 0) ++breaches_;
    if (std::abs(strength) < isolated_below) ++isolated_;
  }

  /// How fast random rows shrink on their way through the tokens: the second half of the way counts, when what is
  /// forgotten at once is gone.
  void probe_memory(const reference::DeltaProblem& p, int head, std::int64_t begin, std::int64_t end, int K) {
    if (end - begin < 16) return;
    constexpr int rows = 2;
    reference::DeltaProblem q = p;
    const std::vector<double> nothing(static_cast<std::size_t>(end) * rows, 0.0);
    q.shape.d_value = rows, q.in.v = {nothing.data(), DType::f64, rows, 0, 1}, q.in.q = {};
    std::vector<double> state(static_cast<std::size_t>(rows) * K);
    for (std::size_t i = 0; i < state.size(); ++i) state[i] = random_normal(7, head, i);
    const auto size = [&] {
      double sum = 0;
      for (double x : state) sum += x * x;
      return std::log(std::max(std::sqrt(sum), 1e-280));
    };
    const std::int64_t middle = begin + (end - begin) / 2;
    reference::delta_rule(q, head, begin, middle, 0, rows, state.data(), nullptr);
    const double before = size();
    reference::delta_rule(q, head, middle, end, 0, rows, state.data(), nullptr);
    const double after = before < -600 ? before - static_cast<double>(end - middle) : size();
    log_sums_[head] += after - before, log_tokens_[head] += end - middle;
  }

  static nlohmann::json half_life(double mean_log) {
    return mean_log < 0 ? nlohmann::json(std::log(0.5) / mean_log) : nlohmann::json();
  }

  nlohmann::json forgetting() const {
    double slowest = -1e300;
    int head = -1;
    for (int h = 0; h < problem_.shape.heads; ++h)
      if (log_tokens_[h] > 0 && log_sums_[h] / static_cast<double>(log_tokens_[h]) > slowest)
        slowest = log_sums_[h] / static_cast<double>(log_tokens_[h]), head = h;
    if (head < 0) return nullptr;
    nlohmann::json j = {{"slowest_head", head}, {"log_a_token", slowest}};
    // a state that shrinks by less than a tenth over the whole sequence is kept
    j["tokens_to_rounding"] = slowest * static_cast<double>(problem_.tokens()) < -0.1
                                  ? nlohmann::json(std::ceil(std::log(rounding_) / slowest))
                                  : nlohmann::json();
    return j;
  }

  const InputFile& file_;
  const DeltaCommand& command_;
  const DeltaProblem& problem_;
  Precision precision_;
  double rounding_;
  Range key_norm_, beta_, eta_, decay_;
  std::int64_t tokens_ = 0, zero_keys_ = 0, negative_ = 0, breaches_ = 0, isolated_ = 0, token_heads_ = 0;
  std::int64_t forget_all_ = 0;
  SizeBins norms_;
  std::vector<std::int64_t> terms_;
  std::vector<double> log_sums_, decay_sums_;  ///< a head: of the probe's size, of log_decay
  std::vector<std::int64_t> log_tokens_, decay_tokens_;
  std::map<std::string, BadValue> bad_;
};

}  // namespace

void Range::reduce(Transport& ranks) {
  ranks.all_reduce(&least, 1, Transport::Reduction::min);
  ranks.all_reduce(&most, 1, Transport::Reduction::max);
  ranks.all_reduce(&sum, 1, Transport::Reduction::sum);
  ranks.all_reduce(&count, 1, Transport::Reduction::sum);
}

void to_json(nlohmann::json& j, const Range& r) {
  if (r.count > 0) j = {{"min", r.least}, {"mean", r.sum / static_cast<double>(r.count)}, {"max", r.most}};
}

DeltaStretch::DeltaStretch(const InputFile& file, const DeltaProblem& found, const DeltaCommand& command,
                           const Source& source, std::int64_t batch, std::int64_t token, std::int64_t tokens) {
  problem.shape = found.shape;
  problem.options.variant = found.variant, problem.options.erase = command.erase;
  problem.options.normalize_keys = command.normalize_keys;
  problem.options.scale =
      command.scale == "rsqrt" ? 1 / std::sqrt(static_cast<double>(found.shape.d_key)) : std::stod(command.scale);
  const Axes at = axes_of(found.layout);
  const auto array = [&](const char* role) -> TokenArray {
    const auto it = source.data.find(role);
    if (it == source.data.end()) return {};
    const DatasetInfo& info = it->second;
    Slab slab{std::vector<std::int64_t>(info.shape.size(), 0), info.shape};
    if (at.batch >= 0) slab.begin[at.batch] = batch, slab.count[at.batch] = 1;
    slab.begin[at.token] = token, slab.count[at.token] = tokens;
    std::int64_t elements = 1;
    for (std::int64_t n : slab.count) elements *= n;
    std::vector<std::byte> raw(static_cast<std::size_t>(elements) * size_of(info.type));
    file.read(info, slab, raw.data());
    std::vector<double>& values = memory[role];
    values.resize(elements);
    for (std::int64_t i = 0; i < elements; ++i) values[i] = load<double>(raw.data(), info.type, i);
    const int heads = found.heads.count(role) ? found.heads.at(role) : found.shape.heads;
    const std::int64_t width = tokens > 0 ? elements / tokens / heads : 0;
    const bool heads_first = found.layout == Layout::bhtd;
    return {values.data(), DType::f64, heads_first ? width : heads * width, heads_first ? tokens * width : width,
            found.shape.heads / heads};
  };
  problem.in.q = array("q"), problem.in.k = array("k"), problem.in.v = array("v");
  problem.in.beta = array("beta"), problem.in.eta = array("eta"), problem.in.log_decay = array("log_decay");
  problem.in.a = array("a"), problem.in.b = array("b");
}

void check_states(Transport& ranks, const InputFile& file, const std::vector<Source>& sources, const std::string& role,
                  const std::function<Slab(const DatasetInfo&, std::int64_t sequence)>& slab_of, Problems& problems) {
  constexpr auto none = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = none, count = 0, before = 0;
  std::string text;
  agree(ranks, [&] {
    std::vector<std::byte> raw;
    for (const Source& source : sources) {
      const auto it = source.data.find(role);
      for (std::int64_t i = 0; i < source.sequences() && it != source.data.end(); ++i) {
        if ((before + i) % ranks.size() != ranks.rank()) continue;
        const DatasetInfo& info = it->second;
        const Slab slab = slab_of(info, i);
        std::int64_t elements = 1;
        for (std::int64_t n : slab.count) elements *= n;
        raw.resize(elements * size_of(info.type));
        file.read(info, slab, raw.data());
        bool good = true;
        for (std::int64_t e = 0; e < elements && good; ++e)
          good = !is_non_finite(load<double>(raw.data(), info.type, e));
        if (good || ++count > 1) continue;
        first = before + i;
        text = "dataset '" + info.path + "' of " + file.path() + " holds a value that is not finite (sequence " +
               std::to_string(i) + ")";
      }
      before += source.sequences();
    }
  });
  ranks.all_reduce(&first, 1, Transport::Reduction::min);
  ranks.all_reduce(&count, 1, Transport::Reduction::sum);
  if (count == 0) return;
  text = broadcast(ranks, text, static_cast<int>(first % ranks.size()));
  problems.push_back(text + (count > 1 ? " (and in " + std::to_string(count - 1) + " more sequences)" : ""));
}

std::vector<TokenRange> sample_stretches(std::int64_t tokens, std::int64_t length, std::int64_t tokens_at_most) {
  std::vector<TokenRange> stretches;
  const std::int64_t count = std::max<std::int64_t>(2, tokens_at_most / length);
  if (tokens <= tokens_at_most || tokens <= count * length) {
    for (std::int64_t t = 0; t < tokens; t += length) stretches.push_back({t, std::min(tokens, t + length)});
    return stretches;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const auto begin = static_cast<std::int64_t>(static_cast<double>(tokens - length) * static_cast<double>(i) /
                                                 static_cast<double>(count - 1));
    stretches.push_back({begin, begin + length});
  }
  return stretches;
}

nlohmann::json delta_difficulty(Transport& ranks, const InputFile& file, const InspectCommand& command,
                                const DeltaProblem& problem, double share, Problems& problems) {
  const double H = problem.shape.heads, K = problem.shape.d_key, C = command.delta.chunk;
  const double work = H * K * (C / 2 + 16);
  double bytes = 0;
  for (const auto& [role, info] : problem.sources.front().data)
    if (problem.tokens() > 0 && role != "cu_seqlens" && role != "initial_state")
      bytes += static_cast<double>(info.elements()) * 8 /
               static_cast<double>(std::max<std::int64_t>(1, problem.sources.front().axis_tokens()));
  const std::int64_t most = command.all ? problem.tokens()
                                        : static_cast<std::int64_t>(std::min(
                                              share * sample_work / work, share * sample_bytes / std::max(1.0, bytes)));
  // long enough to see what is forgotten, short enough to keep in memory
  const auto length =
      static_cast<std::int64_t>(std::clamp(8 * sample_bytes / std::max(1.0, bytes), 2 * C, std::max(2048.0, 4 * C)));
  const auto stretches = sample_stretches(
      problem.tokens(), command.all ? length : std::min(length, std::max<std::int64_t>(512, 2 * command.delta.chunk)),
      std::max<std::int64_t>(most, 0));
  DeltaSurvey survey(file, command, problem);
  agree(ranks, [&] {
    for (std::size_t i = ranks.rank(); i < stretches.size(); i += ranks.size()) survey.look(stretches[i]);
  });
  nlohmann::json j = survey.reduce(ranks, problems);
  const auto state = [](const DatasetInfo& info, std::int64_t sequence) {
    Slab slab{std::vector<std::int64_t>(info.shape.size(), 0), info.shape};
    if (info.shape.size() == 4) slab.begin[0] = sequence, slab.count[0] = 1;
    return slab;
  };
  check_states(ranks, file, problem.sources, "initial_state", state, problems);
  return j;
}

}  // namespace longscan
