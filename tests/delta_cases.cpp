// SPDX-License-Identifier: Apache-2.0
#include "delta_cases.hpp"

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/random.hpp"

namespace longscan::test {

// --- numbers --------------------------------------------------------------------------------------------------------

Numbers::Numbers(DType type, std::int64_t tokens, int heads, int width)
    : type(type), tokens(tokens), heads(heads), width(width), bytes(tokens * heads * width * size_of(type)) {}

double Numbers::get(std::int64_t token, int head, int i) const {
  return load<double>(bytes.data(), type, (token * heads + head) * width + i);
}

void Numbers::set(std::int64_t token, int head, int i, double x) {
  store(bytes.data(), type, (token * heads + head) * width + i, x);
}

void Numbers::fill(double x) {
  for (std::int64_t i = 0; i < tokens * heads * width; ++i) store(bytes.data(), type, i, x);
}

TokenArray Numbers::view(int all_heads, std::int64_t first, const void* data) const {
  if (!present()) return {};
  static const std::byte nothing{};  // an array of no tokens is there, too
  const std::byte* here = bytes.empty() ? &nothing : bytes.data() + first * token_bytes();
  return {data ? data : here, type, std::int64_t{heads} * width, width, all_heads / heads};
}

DeltaInputs Case::host() const {
  const auto view = [&](const Numbers& x) { return x.view(shape.heads); };
  DeltaInputs in;
  in.q = view(q), in.k = view(k), in.v = view(v), in.beta = view(beta), in.eta = view(eta);
  in.log_decay = view(log_decay), in.a = view(a), in.b = view(b);
  return in;
}

// --- cases ----------------------------------------------------------------------------------------------------------

namespace {

enum Stream : std::uint64_t { stream_q = 10, stream_k, stream_v, stream_beta, stream_eta, stream_decay, stream_a };

/// Fills with f(index of the value).
template <class F>
Numbers make_numbers(DType type, std::int64_t tokens, int heads, int width, const F& f) {
  Numbers x(type, tokens, heads, width);
  for (std::int64_t i = 0; i < tokens * heads * width; ++i) store(x.bytes.data(), type, i, f(i));
  return x;
}

/// Divides every vector by its length.
void make_unit(Numbers& x) {
  for (std::int64_t t = 0; t < x.tokens; ++t)
    for (int h = 0; h < x.heads; ++h) {
      double squares = 0;
      for (int i = 0; i < x.width; ++i) squares += x.get(t, h, i) * x.get(t, h, i);
      const double factor = squares > 0 ? 1 / std::sqrt(squares) : 0;
      for (int i = 0; i < x.width; ++i) x.set(t, h, i, factor * x.get(t, h, i));
    }
}

void make_initial_states(Case& c, std::uint64_t seed) {
  c.initial_states.resize(c.sequences.count() * c.state_size());
  for (std::size_t i = 0; i < c.initial_states.size(); ++i)
    c.initial_states[i] = static_cast<float>(random_normal(seed, 50, i));
}

}  // namespace

Case make_case(const Recipe& r) {
  Case c;
  c.tokens = r.tokens, c.sequences.offsets = {0, r.tokens};
  c.shape = {r.heads, r.d_key, r.d_value, r.decay == Decay::channel};
  c.options.variant = r.rule.variant, c.options.erase = r.rule.erase;
  c.options.precision = r.type == DType::f64 ? Precision::f64 : Precision::f32;
  const int key_heads = r.key_heads > 0 ? r.key_heads : r.heads;
  const auto normal = [&](Stream stream) { return [=](std::int64_t i) { return random_normal(r.seed, stream, i); }; };
  const auto uniform = [&](Stream stream, double low, double high) {
    return [=](std::int64_t i) { return low + (high - low) * random_uniform(r.seed, stream, i); };
  };
  const auto key = [&](std::int64_t i) {
    if (r.key_noise >= 0) return 1 + r.key_noise * random_normal(r.seed, stream_k, i);
    if (r.key_dimensions > 0 && i % r.d_key >= r.key_dimensions) return 0.0;
    return random_normal(r.seed, stream_k, i);
  };
  c.q = make_numbers(r.type, r.tokens, key_heads, r.d_key, normal(stream_q));
  c.k = make_numbers(r.type, r.tokens, key_heads, r.d_key, key);
  c.v = make_numbers(r.type, r.tokens, r.heads, r.d_value, normal(stream_v));
  make_unit(c.q), make_unit(c.k);
  if (r.rule.variant == Variant::delta) {
    c.beta = make_numbers(r.gate_type, r.tokens, r.heads, 1, uniform(stream_beta, r.beta_low, r.beta_high));
    if (r.eta) c.eta = make_numbers(r.gate_type, r.tokens, r.heads, 1, uniform(stream_eta, 0, 1));
  } else {  // b a unit vector, a near -beta b: never far above 1
    c.b = make_numbers(r.type, r.tokens, key_heads, r.d_key, key);
    make_unit(c.b);
    c.a = c.b;
    for (std::int64_t t = 0; t < r.tokens; ++t)
      for (int h = 0; h < key_heads; ++h)
        for (int i = 0; i < r.d_key; ++i) {
          const std::int64_t at = (t * key_heads + h) * r.d_key + i;
          const double beta = uniform(stream_beta, r.beta_low, r.beta_high)(t * key_heads + h);
          c.a.set(t, h, i, -beta * (c.b.get(t, h, i) + 0.1 / std::sqrt(r.d_key) * random_normal(r.seed, stream_a, at)));
        }
  }
  if (r.decay != Decay::none)
    c.log_decay = make_numbers(
        r.gate_type, r.tokens, r.heads, r.decay == Decay::channel ? r.d_key : 1,
        [&](std::int64_t i) { return -r.log_decay_mean * std::log(random_uniform(r.seed, stream_decay, i)); });
  if (r.initial_states) make_initial_states(c, r.seed);
  return c;
}

void pack(Case& c, std::vector<std::int64_t> offsets, std::uint64_t seed) {
  const bool states = !c.initial_states.empty();
  c.sequences.offsets = std::move(offsets);
  if (states) make_initial_states(c, seed);
}

std::string describe(const Case& c) {
  std::string text = std::string(name_of(c.options.variant)) + " " + std::string(name_of(c.options.erase)) + " " +
                     std::string(name_of(c.options.inverse)) + " T=" + std::to_string(c.tokens) +
                     " H=" + std::to_string(c.shape.heads) + " K=" + std::to_string(c.shape.d_key) +
                     " V=" + std::to_string(c.shape.d_value) + " C=" + std::to_string(c.options.chunk) + " " +
                     std::string(name_of(c.k.type)) + " inputs, " + std::string(name_of(c.options.precision));
  text += !c.log_decay.present() ? ", no decay" : c.shape.channel_decay ? ", channel decay" : ", head decay";
  if (c.sequences.count() != 1) text += ", " + std::to_string(c.sequences.count()) + " sequences";
  if (c.options.reproducible) text += ", reproducible";
  return text;
}

// --- solutions ------------------------------------------------------------------------------------------------------

bool Solution::operator==(const Solution& other) const {
  return o == other.o && final_states == other.final_states && states == other.states;
}

Solution expected(const Case& c) {
  const int H = c.shape.heads, V = c.shape.d_value, K = c.shape.d_key;
  const std::int64_t every = c.options.state_every, one = std::int64_t{V} * K;
  Solution s;
  s.o.resize(c.tokens * H * V), s.final_states.resize(c.sequences.count() * c.state_size());
  // the tokens after which a state is recorded, ascending
  std::vector<std::int64_t> recorded;
  const Sequences& counting = c.counting ? *c.counting : c.sequences;
  for (std::int64_t i = 0; every > 0 && i < counting.count(); ++i)
    for (std::int64_t t = counting.offsets[i] + every; t <= counting.offsets[i + 1]; t += every) recorded.push_back(t);
  s.states.resize(recorded.size() * c.state_size());

  const reference::DeltaProblem problem = c.problem();
  std::vector<double> state(one), o;
  for (std::int64_t i = 0; i < c.sequences.count(); ++i)
    for (int h = 0; h < H; ++h) {
      std::fill(state.begin(), state.end(), 0.0);
      if (!c.initial_states.empty()) std::copy_n(c.initial_states.begin() + (i * H + h) * one, one, state.begin());
      const std::int64_t begin = c.sequences.offsets[i], end = c.sequences.offsets[i + 1];
      for (std::int64_t t = begin; t < end;) {
        const auto due = std::upper_bound(recorded.begin(), recorded.end(), t);
        const std::int64_t next = due == recorded.end() ? end : std::min(end, *due);
        o.resize((next - t) * V);
        reference::delta_rule(problem, h, t, next, 0, V, state.data(), o.data());
        for (std::int64_t j = 0; j < next - t; ++j)
          std::copy_n(o.begin() + j * V, V, s.o.begin() + ((t + j) * H + h) * V);
        if (due != recorded.end() && *due == next)
          std::copy(state.begin(), state.end(), s.states.begin() + ((due - recorded.begin()) * H + h) * one);
        t = next;
      }
      std::copy(state.begin(), state.end(), s.final_states.begin() + (i * H + h) * one);
    }
  return s;
}

namespace {

/// Results of all ranks in one array; each element must come from one rank once.
class Gathered {
 public:
  explicit Gathered(std::int64_t size) : values_(size, 0.0), times_(size, 0) {}
  void put(std::int64_t at, const void* data, DType type, std::int64_t count) {
    ASSERT_LE(at + count, static_cast<std::int64_t>(values_.size()));
    for (std::int64_t i = 0; i < count; ++i) values_[at + i] = load<double>(data, type, i) + 0.0, ++times_[at + i];
  }
  std::vector<double> gather(Transport& ranks, const char* what) {
    const auto count = static_cast<int>(values_.size());
    ranks.all_reduce(values_.data(), count, Transport::Reduction::sum);
    ranks.all_reduce(times_.data(), count, Transport::Reduction::sum);
    const auto wrong = std::find_if(times_.begin(), times_.end(), [](std::int64_t n) { return n != 1; });
    EXPECT_TRUE(wrong == times_.end()) << what << ": element " << wrong - times_.begin() << " was written " << *wrong
                                       << " times";
    return values_;
  }

 private:
  std::vector<double> values_;
  std::vector<std::int64_t> times_;
};

}  // namespace

Solution solve(Transport& ranks, const Case& c, std::int64_t window_tokens) {
  DeltaRule rule(ranks, c.shape, c.options, c.sequences, c.counting);
  const DType type = c.state_type();
  const std::int64_t H = c.shape.heads, V = c.shape.d_value, row = H * V, size = c.state_size();
  const std::int64_t element = static_cast<std::int64_t>(size_of(type));
  Gathered o(c.tokens * row), final_states(c.sequences.count() * size), states(rule.states_before(c.tokens) * size);
  Solution s;
  for (const TokenRange& window : rule.windows(window_tokens > 0 ? window_tokens : c.tokens + 1)) {
    const TokenRange part = rule.part(window);
    const std::vector<Run> runs = rule.runs(window);
    Memory memory;
    DeltaInputs in = memory.inputs(c, part.begin, part.end);
    DeltaOutputs out;
    std::vector<std::byte> start;
    std::vector<std::int64_t> ends;
    for (const Run& run : runs) {
      if (run.ends) ends.push_back(run.sequence);
      if (!run.starts || c.initial_states.empty()) continue;
      const std::size_t at = start.size();
      start.resize(at + size * element);
      for (std::int64_t i = 0; i < size; ++i)
        store(start.data() + at, type, i, c.initial_states[run.sequence * size + i]);
    }
    if (!start.empty()) in.initial_states = memory.copy(start);
    const std::int64_t first_state = rule.states_before(part.begin);
    const std::int64_t recorded = rule.states_before(part.end) - first_state;
    const DType o_type = c.output.value_or(type);
    const std::int64_t o_bytes = part.size() * row * static_cast<std::int64_t>(size_of(o_type));
    out.o = {memory.room(std::max<std::int64_t>(1, o_bytes)), o_type, row, V};
    if (!ends.empty()) out.final_states = memory.room(ends.size() * size * element);
    if (recorded > 0) out.states = memory.room(recorded * size * element);
    s.report += rule.solve(window, in, out);

    std::vector<std::byte> bytes(
        std::max<std::int64_t>(o_bytes, std::max<std::int64_t>(ends.size(), recorded) * size * element));
    memory.fetch(bytes.data(), out.o.data, o_bytes);
    o.put(part.begin * row, bytes.data(), o_type, part.size() * row);
    if (out.final_states) memory.fetch(bytes.data(), out.final_states, ends.size() * size * element);
    for (std::size_t i = 0; i < ends.size(); ++i)
      final_states.put(ends[i] * size, bytes.data() + i * size * element, type, size);
    if (recorded > 0) memory.fetch(bytes.data(), out.states, recorded * size * element);
    states.put(first_state * size, bytes.data(), type, std::max<std::int64_t>(0, recorded) * size);
  }
  s.o = o.gather(ranks, "o"), s.final_states = final_states.gather(ranks, "final states");
  s.states = states.gather(ranks, "states");
  return s;
}

Difference difference(const std::vector<double>& got, const std::vector<double>& expected) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (got.size() != expected.size()) return {infinite, infinite};
  double squares = 0, size = 0, worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = got[i] - expected[i];
    if (!std::isfinite(d)) return {infinite, infinite};
    squares += d * d, size += expected[i] * expected[i], worst = std::max(worst, std::abs(d));
  }
  if (worst == 0) return {};
  const double rms = std::sqrt(size / static_cast<double>(got.size()));
  return {std::sqrt(squares / static_cast<double>(got.size())) / rms, worst / rms};
}

std::string too_far(const Solution& got, const Solution& expected, DType arithmetic, double factor) {
  const Tolerance allowed = tolerance_of(arithmetic);
  std::string text;
  const auto compare = [&](const char* what, const std::vector<double>& x, const std::vector<double>& y) {
    const Difference d = difference(x, y);
    if (d.rms <= factor * allowed.rms && d.worst <= factor * allowed.worst) return;
    text += std::string(what) + " (" + std::to_string(x.size()) + " values, " + std::to_string(y.size()) +
            " expected) off by " + testing::PrintToString(d.rms) + " rms, " + testing::PrintToString(d.worst) +
            " at worst; ";
  };
  compare("o", got.o, expected.o);
  compare("final states", got.final_states, expected.final_states);
  compare("states", got.states, expected.states);
  return text;
}

// --- memory ---------------------------------------------------------------------------------------------------------

struct Memory::Impl {
  Kokkos::View<std::byte*, Kokkos::DefaultExecutionSpace::memory_space> view;
};

Memory::Memory() = default;
Memory::~Memory() = default;

void* Memory::room(std::size_t bytes) {
  blocks_.push_back({decltype(Impl::view)("longscan::tests", bytes)});
  return blocks_.back().view.data();
}

void* Memory::copy(const void* host, std::size_t bytes) {
  void* data = room(bytes);
  Kokkos::View<const std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> from(
      static_cast<const std::byte*>(host), bytes);
  Kokkos::deep_copy(blocks_.back().view, from);
  return data;
}

void Memory::fetch(void* host, const void* device, std::size_t bytes) const {
  Kokkos::View<std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> to(static_cast<std::byte*>(host),
                                                                                          bytes);
  Kokkos::View<const std::byte*, Kokkos::DefaultExecutionSpace::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      from(static_cast<const std::byte*>(device), bytes);
  Kokkos::deep_copy(to, from);
}

DeltaInputs Memory::inputs(const Case& c, std::int64_t begin, std::int64_t end) {
  const auto upload = [&](const Numbers& x) -> TokenArray {
    if (!x.present()) return {};
    const std::size_t bytes = (end - begin) * x.token_bytes();
    void* data = bytes > 0 ? copy(x.bytes.data() + begin * x.token_bytes(), bytes) : room(64);
    return x.view(c.shape.heads, begin, data);
  };
  DeltaInputs in;
  in.q = upload(c.q), in.k = upload(c.k), in.v = upload(c.v), in.beta = upload(c.beta), in.eta = upload(c.eta);
  in.log_decay = upload(c.log_decay), in.a = upload(c.a), in.b = upload(c.b);
  return in;
}

}  // namespace longscan::test
