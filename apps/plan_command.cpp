// SPDX-License-Identifier: Apache-2.0
// What a solve will take, from shapes alone: nothing of the input's data is read and nothing of it is solved. Rates are
// measured on a few synthetic tokens of the same shape.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/delta_file.hpp"
#include "apps/generate_delta.hpp"
#include "apps/generate_newton.hpp"
#include "apps/inspect.hpp"
#include "apps/memory.hpp"
#include "apps/plan.hpp"
#include "core/device_memory.hpp"
#include "core/dtype.hpp"

namespace longscan {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

/// One problem, reduced to what a plan needs.
struct Outline {
  std::string what, solver;
  std::int64_t tokens = 0, sequences = 0;
  std::int64_t token_bytes = 0;  ///< in memory: inputs and outputs
  double read_bytes = 0, written_bytes = 0;
  std::function<std::int64_t(std::int64_t)> needed;  ///< bytes of a window of so many tokens a rank
  std::int64_t least = 1024;
  ScanWork scan;
  double tokens_factor = 1;              ///< heads, where rates count tokens and heads
  double seconds = 0, seconds_maps = 0;  ///< of one token (and head) on one rank: with the state known; with maps
  bool reproducible = false;
};

double seconds_of(const std::function<void()>& work) {
  double best = 1e300;
  for (int i = 0; i < 3; ++i) {
    const auto start = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

/// Seconds a token of one head of this shape, on synthetic tokens.
double measure_delta(const DeltaShape& shape, DeltaOptions options, DType type, bool decay, bool maps) {
  const auto alone = make_single_transport();
  const double work = 4.0 * shape.d_key * shape.d_value + 2.0 * options.chunk * (shape.d_key + shape.d_value);
  const auto tokens = static_cast<std::int64_t>(std::clamp(1e9 / work, 256.0, 65536.0));
  DeltaShape one = shape;
  one.heads = 1;
  options.reproducible = maps, options.state_every = 0;
  DeltaRule rule(*alone, one, options, {{0, tokens}});
  const int K = one.d_key, V = one.d_value, wide = one.channel_decay ? K : 1;
  std::vector<DeviceArray<std::byte>> memory;
  const auto array = [&](DeltaStream stream, int width, double factor = 1) {
    std::vector<std::byte> values(tokens * width * size_of(type));
    fill_delta_array(stream, 1, 0, tokens, 1, width, type, values.data());
    if (factor != 1)
      for (std::int64_t i = 0; i < tokens * width; ++i)
        store(values.data(), type, i, factor * load<double>(values.data(), type, i));
    memory.push_back(on_device("longscan::plan", values));
    return TokenArray{memory.back().data(), type, width, width, 1};
  };
  DeltaInputs in;
  in.q = array(DeltaStream::q, K), in.k = array(DeltaStream::k, K), in.v = array(DeltaStream::v, V);
  if (options.variant == Variant::dplr)
    in.a = array(DeltaStream::k, K, -0.5), in.b = in.k;
  else
    in.beta = array(DeltaStream::beta, 1);
  if (decay) in.log_decay = array(DeltaStream::log_decay, wide);
  DeviceArray<std::byte> o = on_device("longscan::plan", std::vector<std::byte>(tokens * V * size_of(type)));
  DeltaOutputs out;
  out.o = {o.data(), type, V, V};
  const double seconds = seconds_of([&] {
    DeltaRule fresh(*alone, one, options, {{0, tokens}});
    fresh.solve({0, tokens}, in, out);
  });
  return seconds / static_cast<double>(tokens);
}

Outline outline_of(const DeltaProblem& p, const PlanCommand& plan) {
  const DeltaCommand& c = plan.delta;
  const DType out_type = delta_output_type(p, c);
  const Precision arithmetic = arithmetic_of(c.solve.precision, p.widest());
  Outline o;
  o.solver = "delta", o.tokens = p.tokens(), o.sequences = p.sequences().count();
  o.what = std::string(name_of(p.variant)) + ", H = " + std::to_string(p.shape.heads) +
           ", K = " + std::to_string(p.shape.d_key) + ", V = " + std::to_string(p.shape.d_value) + ", " +
           (!p.has("log_decay")     ? "no decay"
            : p.shape.channel_decay ? "channel decay"
                                    : "head decay") +
           ", " + std::string(name_of(arithmetic));
  o.token_bytes = DeltaPartBuffers::bytes_per_token(p, c, out_type);
  const auto element = static_cast<std::int64_t>(size_of(state_type_of(arithmetic)));
  const std::int64_t K = p.shape.d_key, V = p.shape.d_value, H = p.shape.heads, state = H * K * V * element;
  const double out = c.state_only ? 0 : static_cast<double>(H * V) * static_cast<double>(size_of(out_type));
  const double states =
      static_cast<double>(o.sequences) + (c.state_every > 0 ? static_cast<double>(o.tokens / c.state_every) : 0.0);
  o.read_bytes = (static_cast<double>(o.token_bytes) - out) * static_cast<double>(o.tokens);
  o.written_bytes = out * static_cast<double>(o.tokens) + states * static_cast<double>(state);

  DeltaOptions options;
  options.variant = p.variant, options.erase = c.erase, options.inverse = c.inverse, options.chunk = c.chunk;
  options.precision = arithmetic, options.reproducible = c.solve.reproducible, options.state_every = c.state_every;
  options.normalize_keys = c.normalize_keys;
  const std::shared_ptr<Transport> alone = make_single_transport();
  const auto rule = std::make_shared<DeltaRule>(*alone, p.shape, options, p.sequences(), p.counting());
  const double a_token =
      2.0 * static_cast<double>(o.sequences) / static_cast<double>(std::max<std::int64_t>(1, o.tokens)) +
      (c.state_every > 0 ? 1.0 / static_cast<double>(c.state_every) : 0.0);
  o.needed = [alone, rule, a_token, state, bytes = o.token_bytes](std::int64_t n) {
    return n * bytes + static_cast<std::int64_t>(a_token * static_cast<double>(n)) * state + 2 * state +
           rule->workspace_bytes(n);
  };
  const auto k = static_cast<double>(K), v = static_cast<double>(V);
  o.scan = {H, K * V * element, (K * K + K * V) * element, k * k * v, k * k * (k + v)};
  o.tokens_factor = static_cast<double>(H), o.reproducible = c.solve.reproducible;
  o.seconds = plan.solve_rate > 0 ? 1 / plan.solve_rate
                                  : measure_delta(p.shape, options, p.type("v"), p.has("log_decay"), o.reproducible);
  o.seconds_maps = plan.solve_rate > 0 ? o.seconds * (2 + k / v)
                   : o.reproducible    ? o.seconds
                                       : measure_delta(p.shape, options, p.type("v"), p.has("log_decay"), true);
  return o;
}

Outline outline_of(std::int64_t tokens, std::int64_t sequences, int inputs, DType x, const CellWeights& weights,
                   DType widest, const PlanCommand& plan) {
  const NetworkShape network = network_shape(weights, -1);
  const NewtonCommand& c = plan.newton;
  const Precision arithmetic = newton_arithmetic(c.solve.precision, x, widest);
  Outline o;
  o.solver = "newton", o.tokens = tokens, o.sequences = sequences;
  o.what = network.type + ", D = " + std::to_string(network.channels) + ", D_in = " + std::to_string(inputs) +
           (network.layers > 1 ? ", " + std::to_string(network.layers) + " layers" : "") +
           (network.directions > 1 ? ", both directions" : "") + ", " + std::string(name_of(arithmetic));
  NewtonOptions options;
  options.method = c.method, options.precision = arithmetic, options.reproducible = c.solve.reproducible;
  const auto element = static_cast<std::int64_t>(size_of(state_type_of(arithmetic)));
  const DType out_type = c.solve.output_type.value_or(x);
  const std::int64_t values = network.state * network.directions * network.channels;
  o.token_bytes = inputs * static_cast<std::int64_t>(size_of(x)) +
                  values * (element + static_cast<std::int64_t>(size_of(out_type)));
  o.read_bytes = static_cast<double>(tokens) * inputs * static_cast<double>(size_of(x));
  o.written_bytes = static_cast<double>(tokens) * static_cast<double>(values) * static_cast<double>(size_of(out_type)) +
                    static_cast<double>(sequences * network.layers * values * element);
  const std::shared_ptr<Transport> alone = make_single_transport();
  const auto solver = std::make_shared<Newton>(*alone, weights, inputs, options, Sequences{{0, tokens}});
  o.needed = [alone, solver, bytes = o.token_bytes](std::int64_t n) { return n * bytes + solver->workspace_bytes(n); };
  if (network.directions > 1) o.least = tokens;
  const double D = network.channels, s = network.state;
  const bool mixes = network.type != "paragru" && network.type != "paralstm";
  o.scan = {mixes ? 1 : network.channels, (mixes ? network.channels : 1) * network.state * element,
            static_cast<std::int64_t>(mixes ? s * D * s * D : s * s) * element, mixes ? s * D * s * D : s * s,
            mixes ? s * D * s * D * s * D : s * s * s};
  const double gates = network.type == "lstm" ? 4 : network.type.starts_with("rnn") ? 1 : 3;
  const double work = gates * D * (inputs + (mixes ? D : 30)) * network.layers * network.directions;
  const auto n = static_cast<std::int64_t>(std::clamp(1e8 / work, 32.0, 16384.0));
  if (plan.solve_rate > 0) {
    o.seconds = 1 / plan.solve_rate;
  } else {
    options.method = NewtonMethod::sequential;
    std::vector<std::byte> numbers(n * inputs * size_of(x)), h(n * network.directions * network.channels * element),
        cs(h.size());
    fill_normal(1, 1, 1.0, 0, n * inputs, x, numbers.data());
    o.seconds = seconds_of([&] {
                  Newton fresh(*alone, weights, inputs, options, Sequences{{0, n}});
                  NewtonData data;
                  data.x = numbers.data(), data.x_type = x, data.h = h.data();
                  if (network.state > 1) data.c = cs.data();
                  fresh.solve({0, n}, data);
                }) /
                static_cast<double>(n);
  }
  return o;
}

/// A problem of these sizes, without a file.
DeltaProblem synthetic(const PlanCommand& plan) {
  const GenerateDelta& g = plan.sizes;
  DeltaProblem p;
  p.shape = {g.heads, g.d_key, g.d_value, g.decay == "channel"};
  p.sources.emplace_back();
  Source& s = p.sources.front();
  s.group = "/", s.tokens = g.tokens;
  for (std::int64_t i = 0; i <= plan.sequences; ++i) s.offsets.push_back(g.tokens * i / plan.sequences);
  const auto add = [&](const char* role, std::int64_t width) {
    DatasetInfo d;
    d.path = std::string("/") + role, d.shape = {g.tokens, g.heads, width}, d.storage = Storage::floating,
    d.type = g.type;
    s.data[role] = d, p.heads[role] = g.heads;
  };
  add("q", g.d_key), add("k", g.d_key), add("v", g.d_value), add("beta", 1);
  if (g.decay != "none") add("log_decay", p.shape.channel_decay ? g.d_key : 1);
  p.packed = plan.sequences > 1;
  return p;
}

std::vector<Outline> outlines(const PlanCommand& plan) {
  std::vector<Outline> all;
  const std::string& path = plan.delta.solve.input;
  std::string solver = plan.solver;
  if (path.empty()) {
    if (solver != "newton") return {outline_of(synthetic(plan), plan)};
    const GenerateNewton& g = plan.cell;
    const SyntheticCell cell{g.cell, g.hidden, g.inputs, g.layers, g.bidirectional, g.recurrent_scale};
    check(cell);
    return {outline_of(plan.sizes.tokens, plan.sequences, g.inputs, plan.sizes.type,
                       synthetic_weights(cell, 1, plan.sizes.type), plan.sizes.type, plan)};
  }
  const InputFile file(path);
  if (solver == "auto") {
    const auto here = file.datasets("/");
    const bool x = std::any_of(here.begin(), here.end(), [](const DatasetInfo& d) { return d.path == "/x"; });
    const bool v = std::any_of(here.begin(), here.end(), [](const DatasetInfo& d) { return d.path == "/v"; });
    solver = x && !v ? "newton" : "delta";
  }
  if (solver == "delta") {
    for (const DeltaProblem& p : find_problems(file, plan.delta)) all.push_back(outline_of(p, plan));
  } else {
    const CellSource cell = read_cell(file, plan.newton.cell);
    const NetworkShape network = network_shape(cell.weights, -1);
    for (const NewtonProblem& p : find_newton_problems(file, plan.newton, network))
      all.push_back(outline_of(p.tokens(), p.sequences().count(), p.inputs, p.type(), cell.weights, cell.widest, plan));
  }
  return all;
}

// --- the plan -------------------------------------------------------------------------------------------------------

json plan_of(const Outline& o, const PlanCommand& plan, std::int64_t memory) {
  const std::int64_t P = plan.ranks, all = std::max<std::int64_t>(1, (o.tokens + P - 1) / P);
  const std::int64_t wanted = plan.delta.solve.window, least = std::min(o.least, all);
  std::int64_t window = wanted > 0 ? std::min(wanted, all) : all;
  if (wanted == 0)
    while (o.needed(window) > memory && window > least) window = std::max(least, (window + 1) / 2);
  const std::int64_t windows = std::max<std::int64_t>(1, (o.tokens + P * window - 1) / (P * window));
  const bool fits = o.needed(window) <= memory;

  std::vector<ScanCost> costs = scan_costs(o.scan, plan.ranks, plan.model);
  const auto best = std::min_element(costs.begin(), costs.end(),
                                     [](const ScanCost& a, const ScanCost& b) { return a.seconds < b.seconds; });
  json scans = json::object();
  for (const ScanCost& c : costs) scans[c.algorithm] = c.seconds;
  const double points = static_cast<double>(o.scan.elements * o.scan.point_bytes);
  // newton: a state to the next rank each pass; about two passes
  const double passes = o.solver == "newton" ? 2 : 1;
  const double traffic = static_cast<double>(P - 1) * points * static_cast<double>(windows) * passes;

  const double mine = static_cast<double>(o.tokens) * o.tokens_factor / static_cast<double>(P);
  const double scan = static_cast<double>(windows) * best->seconds;
  const double quick = mine * o.seconds + scan;
  double slow = quick;
  if (o.solver == "newton")
    slow = static_cast<double>(P) * mine * o.seconds + quick;  // the token loop, rank after rank, after a try
  else if (P > 1)
    slow = mine * std::max(o.seconds, o.seconds_maps) + scan;
  json j = {{"solver", o.solver},
            {"what", o.what},
            {"tokens", o.tokens},
            {"sequences", o.sequences},
            {"ranks", P},
            {"tokens_per_rank", all},
            {"fits", fits},
            {"memory",
             {{"usable_bytes", memory},
              {"needed_bytes", o.needed(window)},
              {"in_and_out_bytes", window * o.token_bytes},
              {"all_at_once_bytes", o.needed(all)}}},
            {"window", window},
            {"windows", windows},
            {"bytes", {{"read", o.read_bytes}, {"written", o.written_bytes}, {"exchanged", traffic}}},
            {"scan", {{"best", best->algorithm}, {"seconds", scans}}},
            {"seconds",
             {{"read", o.read_bytes / plan.file_rate},
              {"write", o.written_bytes / plan.file_rate},
              {"solve_least", quick},
              {"solve_most", slow}}},
            {"rate",
             {{"tokens_per_second_and_rank", 1 / o.seconds},
              {"counts_heads", o.solver == "delta"},
              {"measured_here", plan.solve_rate <= 0}}}};
  json& s = j["seconds"];
  const double files = s["read"].get<double>() + s["write"].get<double>();
  s["total_least"] = quick + files, s["total_most"] = slow + files;
  return j;
}

std::string seconds_text(double s) {
  char text[32];
  if (s < 1e-3)
    std::snprintf(text, sizeof text, "%.3g us", s * 1e6);
  else if (s < 1)
    std::snprintf(text, sizeof text, "%.3g ms", s * 1e3);
  else if (s < 300)
    std::snprintf(text, sizeof text, "%.3g s", s);
  else if (s < 2e4)
    std::snprintf(text, sizeof text, "%.3g min", s / 60);
  else
    std::snprintf(text, sizeof text, "%.3g h", s / 3600);
  return text;
}

void line(const char* what, const std::string& text) { std::printf("  %-16s %s\n", what, text.c_str()); }
std::string bytes_of(const json& j) { return bytes_text(j.get<double>()); }

void print(const json& j, const PlanCommand& plan) {
  const std::int64_t windows = j.at("windows"), ranks = j.at("ranks");
  std::printf("%s: %s; %lld tokens in %lld sequence%s on %lld rank%s\n", j.at("solver").get<std::string>().c_str(),
              j.at("what").get<std::string>().c_str(), j.at("tokens").get<long long>(),
              j.at("sequences").get<long long>(), j.at("sequences") == 1 ? "" : "s", static_cast<long long>(ranks),
              ranks == 1 ? "" : "s");
  const json& m = j.at("memory");
  line("memory a rank", bytes_of(m.at("needed_bytes")) + " (" + bytes_of(m.at("in_and_out_bytes")) +
                            " of it inputs and outputs); " + bytes_of(m.at("usable_bytes")) + " may be used (" +
                            (plan.memory > 0 ? "--memory" : "nine tenths of what is free here") + ")" +
                            (j.at("fits") ? "" : ": DOES NOT FIT"));
  line("windows",
       std::to_string(windows) + " of " + std::to_string(j.at("window").get<std::int64_t>()) + " tokens a rank" +
           (windows > 1 ? "; all at once would take " + bytes_of(m.at("all_at_once_bytes")) + " a rank" : ""));
  line("files", "read " + bytes_of(j.at("bytes").at("read")) + ", write " + bytes_of(j.at("bytes").at("written")));
  std::string text;
  for (const auto& [name, seconds] : j.at("scan").at("seconds").items())
    text += (text.empty() ? "" : ", ") + name + " " + seconds_text(seconds);
  line("scan",
       ranks < 2 ? "none: one rank" : j.at("scan").at("best").get<std::string>() + " by the model (" + text + ")");
  line("traffic", bytes_of(j.at("bytes").at("exchanged")) + " between ranks, if states alone travel (chain)");
  const json& s = j.at("seconds");
  const double least = s.at("solve_least"), most = s.at("solve_most");
  std::string range = seconds_text(least);
  if (most > 1.05 * least)
    range += j.at("solver") == "delta"
                 ? " if states are forgotten, " + seconds_text(most) + " if whole parts need maps"
                 : " if the cell forgets, " + seconds_text(most) + " if it ends in the token loop";
  line("solve", range);
  line("read and write", seconds_text(s.at("read").get<double>() + s.at("write").get<double>()) + " at " +
                             bytes_text(plan.file_rate) + "/s (--file-rate)");
  char rate[96];
  std::snprintf(rate, sizeof rate, "%.3g tokens%s a second and rank, %s",
                j.at("rate").at("tokens_per_second_and_rank").get<double>(),
                j.at("solver") == "delta" ? " and heads" : "",
                plan.solve_rate > 0 ? "--solve-rate" : "measured here on synthetic tokens");
  line("rate", rate);
}

}  // namespace

void run_plan(Transport& ranks, const PlanCommand& plan) {
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    const auto cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int on_node = plan.ranks_per_node > 0 ? plan.ranks_per_node : std::min(plan.ranks, cores);
    std::int64_t memory = static_cast<std::int64_t>(plan.memory);
    if (plan.memory <= 0) {
      memory = available_memory() / on_node / 10 * 9;
      if (const std::int64_t device = free_device_memory(); device >= 0) memory = std::min(memory, device / 10 * 9);
    }
    json all = json::array();
    std::string wrong;
    for (const Outline& o : outlines(plan)) {
      all.push_back(plan_of(o, plan, memory));
      const json& j = all.back();
      if (!plan.json) print(j, plan);
      if (!j.at("fits"))
        wrong = "will not fit: a window of " + std::to_string(j.at("window").get<std::int64_t>()) +
                " tokens a rank needs " + bytes_of(j.at("memory").at("needed_bytes")) + " of memory a rank, but " +
                bytes_text(static_cast<double>(memory)) +
                " may be used; use more nodes, fewer ranks a node, or a smaller --window";
    }
    if (plan.json) std::printf("%s\n", all.dump(2).c_str());
    std::fflush(stdout);
    if (!wrong.empty()) throw Error(ExitCode::resources, wrong);
  });
}

}  // namespace longscan
