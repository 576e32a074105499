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
#include "apps/progress.hpp"
#include "apps/report.hpp"
#include "apps/setup.hpp"
#include "core/delta_chunk.hpp"
#include "core/device_memory.hpp"
#include "core/dtype.hpp"
#include "dist/delta_segments.hpp"
#include "dist/exclusive_scan.hpp"
#include "local/cell_kernel.hpp"

namespace longscan {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr double largest_state = 1ll << 40;  ///< bytes; beyond, no rank holds it and its size may not fit 64 bits

/// One problem, reduced to what a plan needs.
struct Outline {
  std::string what, solver;
  std::int64_t tokens = 0, sequences = 0;
  double read_bytes = 0, written_bytes = 0;
  WindowNeeds needs;
  std::vector<std::shared_ptr<const void>> kept;  ///< what `needs` asks
  ScanSize scan;
  double apply = 0, compose = 0;                      ///< multiplications of a scan's A x + b; of A2 A1, A2 b1 + b2
  std::function<ScanCosts()> measure_maps;            ///< seconds of these here
  double passes = 1;                                  ///< that send a state to the next rank
  double layers = 1;                                  ///< and directions, each of which does
  std::function<double(std::int64_t)> further_bytes;  ///< that a rank sends with a part of so many tokens; absent: none
  /// Maps of an element that a rank with windows of so many tokens brings; absent: one.
  std::function<std::int64_t(std::int64_t)> scan_maps;
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

std::int64_t longest(const Sequences& s) {
  std::int64_t most = 1;
  for (std::size_t i = 1; i < s.offsets.size(); ++i) most = std::max(most, s.offsets[i] - s.offsets[i - 1]);
  return most;
}

/// Seconds a token of one head of this shape, on synthetic tokens.
double measure_delta(const DeltaShape& shape, DeltaOptions options, DType type, bool decay, bool maps) {
  const auto alone = make_single_transport();
  const double work = 4.0 * shape.d_key * shape.d_value + 2.0 * options.chunk * (shape.d_key + shape.d_value);
  const auto tokens = static_cast<std::int64_t>(std::clamp(1e9 / work, 256.0, 65536.0));
  DeltaShape one = shape;
  one.heads = 1;
  options.reproducible = maps, options.state_every = 0, options.scan = ScanAlgorithm::automatic;
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

/// A scan of maps [n][n + m] and points [n][m]; rows are padded in the delta rule.
template <class T>
void set_scan(Outline& o, std::int64_t elements, int n, int m, bool pad) {
  const int point_row = pad ? padded<T>(m) : m, map_row = pad ? padded<T>(n + m) : n + m;
  ScanPart<T> part;
  part.count = elements;
  part.in = {nullptr, point_row, static_cast<std::int64_t>(n) * point_row};
  part.maps = {nullptr, n, m, map_row, static_cast<std::int64_t>(n) * map_row, pad};
  const auto bytes = static_cast<std::int64_t>(sizeof(T));
  o.scan = {elements, part.point_size() * bytes, part.map_size() * bytes, 1};
  o.apply = static_cast<double>(n) * n * m, o.compose = static_cast<double>(n) * n * (n + m);
  o.measure_maps = [part, quick = o.compose < 1e8] {
    const auto alone = make_single_transport();
    return measure_scan(*alone, part, quick);
  };
}

Outline outline_of(const DeltaProblem& p, const PlanCommand& plan) {
  const DeltaCommand& c = plan.delta;
  const DType out_type = delta_output_type(p, c);
  const Precision arithmetic = arithmetic_of(c.solve.precision, p.widest());
  const DeltaOptions options = options_of(c, p);
  if (const double bytes = state_bytes(p.shape.heads, p.shape.d_key, p.shape.d_value); bytes > largest_state)
    throw Error(ExitCode::resources, "states and maps of these heads, d_key and d_value take " + bytes_text(bytes) +
                                         ": more than a rank can hold");
  Outline o;
  o.solver = "delta", o.tokens = p.tokens(), o.sequences = p.sequences().count();
  o.what = std::string(name_of(p.variant)) + ", " + shape_text(p, arithmetic);
  const std::int64_t token_bytes = DeltaPartBuffers::bytes_per_token(p, c, out_type);
  const auto element = static_cast<std::int64_t>(size_of(state_type_of(arithmetic)));
  const std::int64_t K = p.shape.d_key, V = p.shape.d_value, H = p.shape.heads, state = H * K * V * element;
  const double out = c.state_only ? 0 : static_cast<double>(H * V) * static_cast<double>(size_of(out_type));
  const double states =
      static_cast<double>(o.sequences) + (c.state_every > 0 ? static_cast<double>(o.tokens / c.state_every) : 0.0);
  o.read_bytes = (static_cast<double>(token_bytes) - out) * static_cast<double>(o.tokens);
  o.written_bytes = out * static_cast<double>(o.tokens) + states * static_cast<double>(state);

  const std::shared_ptr<Transport> alone = make_single_transport();
  const auto rule = std::make_shared<DeltaRule>(*alone, p.shape, options, p.sequences(), p.counting());
  o.needs = needs_of(c, p, *rule, plan.ranks), o.kept = {alone, rule};
  if (arithmetic == Precision::f64)
    set_scan<double>(o, H, p.shape.d_key, p.shape.d_value, true);
  else
    set_scan<float>(o, H, p.shape.d_key, p.shape.d_value, true);
  o.scan_maps = [p, c, options, arithmetic, out_type](std::int64_t window) {
    alignas(64) std::byte nothing[64] = {};
    const std::int64_t length = longest(p.sequences()), tokens = std::min(window, length);
    const DeltaPartBuffers part(p, c, arithmetic, out_type);
    DeltaOutputs out;
    out.o = part.output_in(tokens, nothing);
    return scan_maps(p.shape, options, part.inputs_in(tokens, [&](const std::string&) { return nothing; }), out, tokens,
                     length);
  };
  o.tokens_factor = static_cast<double>(H), o.reproducible = options.reproducible;
  o.seconds = plan.solve_rate > 0 ? 1 / plan.solve_rate
                                  : measure_delta(p.shape, options, p.type("v"), p.has("log_decay"), o.reproducible);
  o.seconds_maps = plan.solve_rate > 0 ? o.seconds * (2 + static_cast<double>(K) / static_cast<double>(V))
                   : o.reproducible    ? o.seconds
                                       : measure_delta(p.shape, options, p.type("v"), p.has("log_decay"), true);
  return o;
}

Outline outline_of(const NewtonProblem& p, const CellWeights& weights, Precision arithmetic, const PlanCommand& plan) {
  const NetworkShape network = network_shape(weights, -1);
  const NewtonCommand& c = plan.newton;
  const DType x = p.type();
  const std::int64_t tokens = p.tokens(), inputs = p.inputs;
  Outline o;
  o.solver = "newton", o.tokens = tokens, o.sequences = p.sequences().count();
  o.what = network.type + ", " + shape_text(network) + ", " + std::string(name_of(arithmetic));
  NewtonOptions options = options_of(c, arithmetic);
  o.reproducible = options.reproducible;
  const auto element = static_cast<std::int64_t>(size_of(state_type_of(arithmetic)));
  const std::int64_t values = network.state * network.directions * network.channels;
  o.read_bytes = static_cast<double>(tokens * inputs) * static_cast<double>(size_of(x));
  o.written_bytes = static_cast<double>(tokens * values) * static_cast<double>(size_of(newton_output_type(p, c))) +
                    static_cast<double>(o.sequences * network.layers * values * element);
  const std::shared_ptr<Transport> alone = make_single_transport();
  const auto solver = std::make_shared<Newton>(*alone, weights, p.inputs, options, p.sequences());
  o.needs = needs_of(c, p, *solver, arithmetic, plan.ranks), o.kept = {alone, solver};
  const double D = network.channels;
  const bool mixes = network.type != "paragru" && network.type != "paralstm";
  const int blocks = mixes ? 1 : network.channels, n = network.state * (mixes ? network.channels : 1);
  if (arithmetic == Precision::f64)
    set_scan<double>(o, blocks, n, 1, false);
  else
    set_scan<float>(o, blocks, n, 1, false);
  o.passes = c.method == NewtonMethod::sequential ? 1 : 2;
  o.layers = network.layers * network.directions;
  const std::int64_t size = static_cast<std::int64_t>(network.state) * network.channels;
  o.further_bytes = [mixes, size, entries = mixes ? 1 : network.channels](std::int64_t part) {
    return looks_at_all(mixes, size, part) ? static_cast<double>(entries) * sizeof(GrowthSums) : 0.0;
  };
  const double gates = network.type == "lstm" ? 4 : network.type.starts_with("rnn") ? 1 : 3;
  const double work =
      gates * D * (static_cast<double>(inputs) + (mixes ? D : 30)) * network.layers * network.directions;
  const auto few = static_cast<std::int64_t>(std::clamp(1e8 / work, 32.0, 16384.0));
  if (plan.solve_rate > 0) {
    o.seconds = 1 / plan.solve_rate;
  } else {
    options.method = NewtonMethod::sequential;
    std::vector<std::byte> numbers(few * inputs * size_of(x)), h(few * network.directions * network.channels * element),
        cs(h.size());
    fill_normal(1, 1, 1.0, 0, few * inputs, x, numbers.data());
    o.seconds = seconds_of([&] {
                  Newton fresh(*alone, weights, p.inputs, options, Sequences{{0, few}});
                  NewtonData data;
                  data.x = numbers.data(), data.x_type = x, data.h = h.data();
                  if (network.state > 1) data.c = cs.data();
                  fresh.solve({0, few}, data);
                }) /
                static_cast<double>(few);
  }
  return o;
}

// Problems of these sizes, without a file.

Source synthetic_source(const PlanCommand& plan) {
  Source s;
  s.group = "/", s.tokens = plan.sizes.tokens;
  for (std::int64_t i = 0; i <= plan.sequences; ++i) s.offsets.push_back(s.tokens * i / plan.sequences);
  return s;
}

DatasetInfo synthetic_dataset(const std::string& role, std::vector<std::int64_t> shape, DType type) {
  DatasetInfo d;
  d.path = "/" + role, d.shape = std::move(shape), d.storage = Storage::floating, d.type = type;
  return d;
}

DeltaProblem synthetic_delta(const PlanCommand& plan) {
  const GenerateDelta& g = plan.sizes;
  DeltaProblem p;
  p.shape = {g.heads, g.d_key, g.d_value, g.decay == "channel"};
  p.sources.push_back(synthetic_source(plan));
  const auto add = [&](const char* role, std::int64_t width) {
    p.sources.front().data[role] = synthetic_dataset(role, {g.tokens, g.heads, width}, g.type);
    p.heads[role] = g.heads;
  };
  add("q", g.d_key), add("k", g.d_key), add("v", g.d_value), add("beta", 1);
  if (g.decay != "none") add("log_decay", p.shape.channel_decay ? g.d_key : 1);
  p.packed = plan.sequences > 1;
  return p;
}

NewtonProblem synthetic_newton(const PlanCommand& plan) {
  NewtonProblem p;
  p.packed = plan.sequences > 1, p.inputs = plan.cell.inputs;
  p.sources.push_back(synthetic_source(plan));
  p.sources.front().data["x"] = synthetic_dataset("x", {plan.sizes.tokens, plan.cell.inputs}, plan.sizes.type);
  return p;
}

std::vector<Outline> outlines(const PlanCommand& plan) {
  std::vector<Outline> all;
  const std::string& path = plan.delta.solve.input;
  std::string solver = plan.solver;
  if (path.empty()) {
    if (!plan.newton.cell.empty())
      throw Error(ExitCode::usage,
                  "--cell is for a file; without one the cell is said by --cell-type, --hidden, --d-in and --layers");
    if (solver != "newton") return {outline_of(synthetic_delta(plan), plan)};
    const GenerateNewton& g = plan.cell;
    const SyntheticCell cell{g.cell, g.hidden, g.inputs, g.layers, g.bidirectional, g.recurrent_scale};
    check(cell);
    const double D = g.hidden, bytes = 32 * D * (D + g.inputs) * g.layers;  // four gates in double precision
    if (bytes > largest_state)
      throw Error(ExitCode::resources,
                  "weights of these sizes take " + bytes_text(bytes) + ": more than a rank can hold");
    const NewtonProblem p = synthetic_newton(plan);
    return {outline_of(p, synthetic_weights(cell, 1, plan.sizes.type),
                       newton_arithmetic(plan.newton, {p}, plan.sizes.type), plan)};
  }
  const InputFile file(path);
  if (solver == "auto") {
    std::vector<std::string> groups;
    for (const std::string& pattern : plan.delta.solve.groups)
      for (const std::string& group : file.match_groups(pattern)) groups.push_back(group);
    if (plan.delta.solve.groups.empty()) groups = file.groups();
    Problems ignored;
    bool x = false, v = false;
    for (const std::string& group : groups) {
      x = x || DatasetFinder(file, plan.newton.names, group, ignored).there("x");
      v = v || DatasetFinder(file, plan.delta.names, group, ignored).there("v");
    }
    solver = x && !v ? "newton" : "delta";
  }
  if (solver == "delta") {
    for (const DeltaProblem& p : find_problems(file, plan.delta)) all.push_back(outline_of(p, plan));
  } else {
    const CellSource cell = read_cell(file, plan.newton.cell);
    const NetworkShape network = shape_of(cell);
    const auto problems = find_newton_problems(file, plan.newton, network);
    const Precision arithmetic = newton_arithmetic(plan.newton, problems, cell.widest);
    for (const NewtonProblem& p : problems) all.push_back(outline_of(p, cell.weights, arithmetic, plan));
  }
  return all;
}

// --- the plan -------------------------------------------------------------------------------------------------------

/// What a scan costs: the machine's as it is said to be, the maps' as they are said or measured.
ScanCosts costs_of(const Outline& o, const PlanCommand& plan) {
  ScanCosts costs;
  if (plan.apply_rate > 0)
    costs.apply = o.apply / plan.apply_rate, costs.compose = o.compose / plan.apply_rate;
  else if (plan.ranks > 2)  // else no rank applies one
    costs = o.measure_maps();
  costs.latency = plan.latency, costs.byte = 1 / plan.bandwidth;
  return costs;
}

json plan_of(const Outline& o, const PlanCommand& plan, const WindowRoom& room, std::int64_t program_bytes) {
  const std::int64_t P = plan.ranks, all = std::max<std::int64_t>(1, o.needs.all);
  const auto [window, fits] = window_in(room, plan.delta.solve.window, o.needs);
  const std::int64_t windows = std::max<std::int64_t>(1, (o.tokens + P * window - 1) / (P * window));

  ScanSize size = o.scan;
  if (o.scan_maps) size.maps = o.scan_maps(window);
  const ScanCosts costs = costs_of(o, plan);
  const ScanChoice choice = choose_scan(plan.delta.solve.scan, size, plan.ranks, costs, o.reproducible);
  json scans = json::object();
  if (P > 1)
    for (const ScanAlgorithm a : {ScanAlgorithm::chain, ScanAlgorithm::all_to_all, ScanAlgorithm::all_gather,
                                  ScanAlgorithm::doubling, ScanAlgorithm::mpi}) {
      const bool composes = a == ScanAlgorithm::doubling || a == ScanAlgorithm::mpi;
      if (!composes || !o.reproducible) scans[std::string(name_of(a))] = predict(a, size, plan.ranks, costs);
    }
  const double points = static_cast<double>(size.elements * size.point_bytes);
  // a state to the next rank each pass, and from the last one to the first for the next window
  double traffic = static_cast<double>(P - 1) * points * static_cast<double>(windows) * o.passes;
  if (P > 1) traffic += points * static_cast<double>(windows - 1);
  if (o.further_bytes) {
    const std::int64_t last =
        (o.tokens - (windows - 1) * P * window + P - 1) / P;  // tokens of a part of the last window
    traffic += static_cast<double>(P - 1) *
               (static_cast<double>(windows - 1) * o.further_bytes(window) + o.further_bytes(last));
  }
  traffic *= o.layers;

  const double mine = static_cast<double>(o.tokens) * o.tokens_factor / static_cast<double>(P);
  const double scan = static_cast<double>(windows) * predict(choice.algorithm, size, plan.ranks, costs);
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
             {{"usable_bytes", room.host},
              {"needed_bytes", o.needs.host(window)},
              {"program_bytes", program_bytes},
              {"in_and_out_bytes", window * o.needs.in_and_out},
              {"all_at_once_bytes", o.needs.host(all)},
              {"device_usable_bytes", room.device},
              {"device_needed_bytes", o.needs.device(window)}}},
            {"window", window},
            {"windows", windows},
            {"bytes", {{"read", o.read_bytes}, {"written", o.written_bytes}, {"exchanged", traffic}}},
            {"scan",
             {{"best", P > 1 ? std::string(name_of(choice.algorithm)) : "none"},
              {"reason", choice.reason},
              {"elements", size.elements},
              {"maps_per_element", size.maps},
              {"point_bytes", size.point_bytes},
              {"map_bytes", size.map_bytes},
              {"maps_measured_here", plan.apply_rate <= 0 && P > 2},
              {"seconds", scans}}},
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
  std::printf("%s: %s; %s in %s on %s\n", j.at("solver").get<std::string>().c_str(),
              j.at("what").get<std::string>().c_str(), count_of(j.at("tokens"), "token").c_str(),
              count_of(j.at("sequences"), "sequence").c_str(), count_of(ranks, "rank").c_str());
  const json& m = j.at("memory");
  line("memory per rank", bytes_of(m.at("needed_bytes")) + " (" + bytes_of(m.at("in_and_out_bytes")) +
                              " of it inputs and outputs) beside " + bytes_of(m.at("program_bytes")) +
                              " of the program itself; " + bytes_of(m.at("usable_bytes")) + " may be used (" +
                              (plan.memory > 0 ? "--memory" : "nine tenths of what is free here") + ")" +
                              (j.at("fits") ? "" : ": DOES NOT FIT"));
  if (m.at("device_needed_bytes") > 0)
    line("device memory",
         bytes_of(m.at("device_needed_bytes")) + "; " + bytes_of(m.at("device_usable_bytes")) + " may be used");
  line("windows",
       std::to_string(windows) + " of " + std::to_string(j.at("window").get<std::int64_t>()) + " tokens per rank" +
           (windows > 1 ? "; all at once would take " + bytes_of(m.at("all_at_once_bytes")) + " per rank" : ""));
  line("files", "read " + bytes_of(j.at("bytes").at("read")) + ", write " + bytes_of(j.at("bytes").at("written")));
  std::string text;
  for (const auto& [name, seconds] : j.at("scan").at("seconds").items())
    text += (text.empty() ? "" : ", ") + name + " " + seconds_text(seconds);
  const char* how = plan.delta.solve.scan == ScanAlgorithm::automatic ? " by the model" : ", as asked";
  line("scan", ranks < 2 ? "none: one rank" : j.at("scan").at("best").get<std::string>() + how + " (" + text + ")");
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
  std::snprintf(rate, sizeof rate, "%.3g tokens%s per second and rank, %s",
                j.at("rate").at("tokens_per_second_and_rank").get<double>(),
                j.at("solver") == "delta" ? " times heads" : "",
                plan.solve_rate > 0 ? "--solve-rate" : "measured here on synthetic tokens");
  line("rate", rate);
}

}  // namespace

void run_plan(Transport& ranks, const PlanCommand& asked) {
  agree(ranks, [&] {
    if (ranks.rank() != 0) return;
    PlanCommand plan = asked;
    const SolveOptions& said = plan.delta.solve;
    plan.newton.solve.window = said.window, plan.newton.solve.output_type = said.output_type;
    plan.newton.solve.scan = said.scan, plan.newton.solve.reproducible = said.reproducible;
    require_reproducible_scan(said.scan, said.reproducible);
    const auto cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int on_node = plan.ranks_per_node > 0 ? plan.ranks_per_node : std::min(plan.ranks, cores);
    WindowRoom room = room_here(on_node);
    const std::int64_t program_bytes = resident_memory();
    if (plan.memory > 0) room.host = room.device = static_cast<std::int64_t>(plan.memory);
    json all = json::array();
    std::string wrong;
    for (const Outline& o : outlines(plan)) {
      all.push_back(plan_of(o, plan, room, program_bytes));
      const json& j = all.back();
      if (!plan.json) print(j, plan);
      const json& m = j.at("memory");
      const bool on_host = m.at("needed_bytes") > m.at("usable_bytes");
      if (!j.at("fits"))
        wrong = "will not fit: a window of " + std::to_string(j.at("window").get<std::int64_t>()) +
                " tokens per rank needs " + bytes_of(m.at(on_host ? "needed_bytes" : "device_needed_bytes")) +
                (on_host ? " of memory per rank, but " : " of device memory per rank, but ") +
                bytes_of(m.at(on_host ? "usable_bytes" : "device_usable_bytes")) +
                " may be used; use more nodes, fewer ranks a node, or a smaller --window";
    }
    if (plan.json) std::printf("%s\n", printable(all).c_str());
    std::fflush(stdout);
    if (!wrong.empty()) throw Error(ExitCode::resources, wrong);
  });
}

}  // namespace longscan
