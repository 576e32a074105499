// SPDX-License-Identifier: Apache-2.0
#include "apps/delta_file.hpp"

#include <algorithm>

#include "core/dtype.hpp"
#include "local/check_inputs.hpp"

namespace longscan {
namespace {

const std::vector<std::string> token_roles = {"q", "k", "v", "beta", "eta", "log_decay", "a", "b"};

std::string output_path(const Source& source, const std::string& name) { return dataset_path(source.group, name); }

/// The slab of tokens [token, token + count) of a batch entry, all heads (or one where heads come first).
Slab token_slab(Layout layout, std::size_t axes, std::int64_t batch, std::int64_t token, std::int64_t count,
                std::int64_t head, std::int64_t heads, const std::vector<std::int64_t>& shape) {
  const Axes at = axes_of(layout);
  Slab slab{std::vector<std::int64_t>(axes, 0), shape};
  if (at.batch >= 0) slab.begin[at.batch] = batch, slab.count[at.batch] = 1;
  slab.begin[at.token] = token, slab.count[at.token] = count;
  slab.begin[at.head] = head, slab.count[at.head] = heads;
  return slab;
}

std::vector<std::int64_t> with_front(std::int64_t front, std::vector<std::int64_t> shape) {
  shape.insert(shape.begin(), front);
  return shape;
}

bool has_batch_of_states(const DeltaProblem& problem) { return problem.packed || problem.layout != Layout::thd; }

}  // namespace

DType delta_output_type(const DeltaProblem& problem, const DeltaCommand& command) {
  return command.solve.output_type.value_or(problem.type("v"));
}

std::vector<OutputDataset> delta_outputs(const std::vector<DeltaProblem>& problems, const DeltaCommand& command) {
  std::vector<OutputDataset> datasets;
  for (const DeltaProblem& problem : problems) {
    const DType state = state_type_of(arithmetic_of(command.solve.precision, problem.widest()));
    const std::vector<std::int64_t> one = {problem.shape.heads, problem.shape.d_value, problem.shape.d_key};
    for (const Source& source : problem.sources) {
      if (!command.state_only)
        datasets.push_back({output_path(source, "o"), source.data.at("v").shape, delta_output_type(problem, command)});
      datasets.push_back({output_path(source, "final_state"),
                          has_batch_of_states(problem) ? with_front(source.sequences(), one) : one, state});
      if (command.state_every > 0 && !command.state_only) {
        auto shape = with_front(source.tokens / command.state_every, one);
        if (problem.layout != Layout::thd) shape = with_front(source.batch, shape);
        datasets.push_back({output_path(source, "states"), shape, state});
      }
    }
  }
  return datasets;
}

DeltaPartBuffers::DeltaPartBuffers(const DeltaProblem& problem, const DeltaCommand& command, Precision arithmetic,
                                   DType output_type)
    : problem_(problem), command_(command), state_type_(state_type_of(arithmetic)) {
  for (const std::string& name : token_roles) {
    if (!problem.has(name) || (name == "q" && command.state_only)) continue;
    Role& role = roles_[name];
    role.type = problem.type(name);
    role.heads = problem.heads.count(name) ? problem.heads.at(name) : problem.shape.heads;
    const bool wide = name == "q" || name == "k" || name == "a" || name == "b" ||
                      (name == "log_decay" && problem.shape.channel_decay);
    role.width = name == "v" ? problem.shape.d_value : wide ? problem.shape.d_key : 1;
  }
  o_.type = output_type, o_.heads = problem.shape.heads, o_.width = problem.shape.d_value;
}

std::int64_t DeltaPartBuffers::bytes_per_token(const DeltaProblem& problem, const DeltaCommand& command,
                                               DType output_type) {
  const DeltaPartBuffers probe(problem, command, Precision::f32, output_type);
  std::int64_t bytes = command.state_only ? 0 : probe.o_.token_bytes();
  for (const auto& [name, role] : probe.roles_) bytes += role.token_bytes();
  return bytes;
}

std::int64_t DeltaPartBuffers::state_bytes() const {
  return static_cast<std::int64_t>(problem_.shape.heads) * problem_.shape.d_value * problem_.shape.d_key *
         static_cast<std::int64_t>(size_of(state_type_));
}

const std::byte* DeltaPartBuffers::Slot::input(const std::string& name) const {
  const auto found = mapped.find(name);
  return found != mapped.end() ? found->second.data() : arrays.at(name).data();
}

void DeltaPartBuffers::prepare(int slot, const InputFile& file, TokenRange part, std::vector<Run> runs,
                               std::int64_t states_before, std::int64_t states_after) {
  Slot& s = slots_[slot];
  Place& p = s.in;
  p.part = part, p.runs = std::move(runs), p.states_before = states_before;
  p.starts = std::count_if(p.runs.begin(), p.runs.end(), [](const Run& r) { return r.starts; });
  p.ends = std::count_if(p.runs.begin(), p.runs.end(), [](const Run& r) { return r.ends; });
  if (!problem_.has("initial_state")) p.starts = 0;
  p.states = command_.state_only ? 0 : states_after - states_before;
  s.mapped.clear();
  for (const auto& [name, role] : roles_) {
    if (auto mapped = map_array(part, file, name, role)) {
      s.mapped.emplace(name, std::move(*mapped));
      s.arrays.erase(name);
    } else {
      reserve_bytes(s.arrays[name], part.size() * role.token_bytes());
    }
  }
  if (p.starts > 0) reserve_bytes(s.initial, p.starts * state_bytes());
}

std::optional<MappedSlab> DeltaPartBuffers::map_array(TokenRange part, const InputFile& file, const std::string& name,
                                                      const Role& role) const {
  std::optional<MappedSlab> mapped;
  if (!kernels_reach_host || problem_.layout == Layout::bhtd) return mapped;
  for_pieces(problem_.sources, part,
             [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t, std::int64_t n) {
               const DatasetInfo& info = source.data.at(name);
               if (n == part.size())  // all of it
                 mapped = file.map(
                     info, token_slab(problem_.layout, info.shape.size(), b, token, n, 0, role.heads, info.shape));
             });
  return mapped;
}

void DeltaPartBuffers::read(int slot, const InputFile& file) {
  for (const auto& [name, role] : roles_) {
    const auto mapped = slots_[slot].mapped.find(name);
    if (mapped == slots_[slot].mapped.end()) {
      read_array(slots_[slot], file, name, role);
    } else {
      file.load(mapped->second);
      bytes_read_ += slots_[slot].in.part.size() * role.token_bytes();
    }
  }
  if (slots_[slot].in.starts > 0) read_initial(slots_[slot], file);
  if (!kernels_reach_host) return;
  std::map<std::string, const void*> memory;
  for (const auto& [name, role] : roles_) memory[name] = slots_[slot].input(name);
  look(slots_[slot], memory);
}

void DeltaPartBuffers::read_array(Slot& slot, const InputFile& file, const std::string& name, const Role& role) {
  const std::int64_t element = static_cast<std::int64_t>(size_of(role.type)), row = role.heads * role.width;
  std::byte* to = slot.arrays.at(name).data();
  for_pieces(problem_.sources, slot.in.part,
             [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
               const DatasetInfo& info = source.data.at(name);
               if (problem_.layout != Layout::bhtd) {
                 file.read(info, token_slab(problem_.layout, info.shape.size(), b, token, n, 0, role.heads, info.shape),
                           to + at * row * element);
               } else {  // heads first in memory too
                 for (std::int64_t h = 0; h < role.heads; ++h)
                   file.read(info, token_slab(problem_.layout, info.shape.size(), b, token, n, h, 1, info.shape),
                             to + (h * slot.in.part.size() + at) * role.width * element);
               }
               bytes_read_ += n * row * element;
             });
}

void DeltaPartBuffers::read_initial(Slot& slot, const InputFile& file) {
  const std::int64_t one = state_bytes() / static_cast<std::int64_t>(size_of(state_type_));
  std::vector<std::byte> raw;
  std::int64_t place = 0;
  for (const Run& run : slot.in.runs) {
    if (!run.starts) continue;
    const auto [source, sequence] = source_of_sequence(problem_.sources, run.sequence);
    const DatasetInfo& info = problem_.sources[source].data.at("initial_state");
    Slab slab{std::vector<std::int64_t>(info.shape.size(), 0), info.shape};
    if (info.shape.size() == 4) slab.begin[0] = sequence, slab.count[0] = 1;
    raw.resize(one * size_of(info.type));
    file.read(info, slab, raw.data());
    bytes_read_ += static_cast<std::int64_t>(raw.size());
    for (std::int64_t i = 0; i < one; ++i) {
      const auto x = load<double>(raw.data(), info.type, i);
      if (is_non_finite(x))
        throw Error(ExitCode::bad_input, "dataset '" + info.path + "' of " + file.path() +
                                             " holds a value that is not finite (sequence " + std::to_string(sequence) +
                                             ", head " + std::to_string(i / (one / problem_.shape.heads)) + ")");
      store(slot.initial.data(), state_type_, place * one + i, x);
    }
    ++place;
  }
}

TokenArray DeltaPartBuffers::view(const std::string& name, std::int64_t tokens, const void* data) const {
  const Role& role = roles_.at(name);
  TokenArray view;
  view.data = data, view.type = role.type;
  const bool heads_first = problem_.layout == Layout::bhtd;
  view.token_stride = heads_first ? role.width : role.heads * role.width;
  view.head_stride = heads_first ? tokens * role.width : role.width;
  view.heads_per_stored = static_cast<std::int32_t>(problem_.shape.heads / role.heads);
  return view;
}

DeltaInputs DeltaPartBuffers::inputs_in(std::int64_t tokens,
                                        const std::function<const void*(const std::string&)>& memory) const {
  const auto role = [&](const char* name) {
    return roles_.count(name) > 0 ? view(name, tokens, memory(name)) : TokenArray{};
  };
  DeltaInputs in;
  in.q = role("q"), in.k = role("k"), in.v = role("v"), in.beta = role("beta"), in.eta = role("eta");
  in.log_decay = role("log_decay"), in.a = role("a"), in.b = role("b");
  return in;
}

MutableTokenArray DeltaPartBuffers::output_in(std::int64_t tokens, void* memory) const {
  if (command_.state_only) return {};
  const bool heads_first = problem_.layout == Layout::bhtd;
  return {memory, o_.type, heads_first ? o_.width : o_.heads * o_.width, heads_first ? tokens * o_.width : o_.width};
}

void DeltaPartBuffers::check(int slot) {
  Slot& s = slots_[slot];
  const Place& p = s.out = s.in;
  const std::int64_t tokens = p.part.size();
  std::map<std::string, const void*> memory;
  for (auto& [name, role] : roles_)
    memory[name] =
        s.mapped.count(name) > 0 ? s.input(name) : role.device.upload(s.arrays.at(name), tokens * role.token_bytes());
  inputs_ = inputs_in(tokens, [&](const std::string& name) { return memory.at(name); });
  if (p.starts > 0) inputs_.initial_states = initial_.upload(s.initial, p.starts * state_bytes());

  outputs_ = {};
  if (!command_.state_only) {
    reserve_bytes(s.o, tokens * o_.token_bytes());
    outputs_.o = output_in(tokens, o_.device.target(s.o, tokens * o_.token_bytes()));
    if (p.states > 0) {
      reserve_bytes(s.recorded, p.states * state_bytes());
      outputs_.states = recorded_.target(s.recorded, p.states * state_bytes());
    }
  }
  if (p.ends > 0) {
    reserve_bytes(s.final, p.ends * state_bytes());
    outputs_.final_states = final_.target(s.final, p.ends * state_bytes());
  }

  if (!kernels_reach_host) look(s, memory);
}

void DeltaPartBuffers::look(const Slot& s, const std::map<std::string, const void*>& memory) const {
  const Place& p = s.in;
  const std::int64_t tokens = p.part.size();
  std::int64_t first_token = -1;
  std::string first;
  for (const auto& [name, role] : roles_) {
    const bool decay = name == "log_decay";
    TokenArray x = view(name, tokens, memory.at(name));
    int heads = static_cast<int>(role.heads), width = static_cast<int>(role.width);
    const bool dense = x.token_stride == role.heads * role.width;  // then a token is one row of memory
    if (dense) heads = 1, width = static_cast<int>(role.heads * role.width), x.head_stride = width;
    const Domain domain = decay ? Domain::nonpositive : Domain::finite;
    const std::int64_t at = kernels_reach_host ? first_outside_on_host(x, tokens, heads, width, domain)
                                               : first_outside(x, tokens, heads, width, domain);
    if (at < 0) continue;
    const std::int64_t token = at / (role.heads * role.width);
    const int head = static_cast<int>(at / role.width % role.heads);
    if (first_token >= 0 && token >= first_token) continue;
    first_token = token;
    const auto place = dense ? token * x.token_stride + at % (role.heads * role.width)
                             : token * x.token_stride + head * x.head_stride + at % role.width;
    const auto value = load<double>(s.input(name), role.type, place);
    first = describe_token(problem_.sources, command_.solve.input, name, p.part.begin + token) + ", head " +
            std::to_string(head) + " is " +
            (value != value         ? "NaN"
             : is_non_finite(value) ? (value > 0 ? "infinite" : "-infinite")
                                    : std::to_string(value)) +
            (decay ? "; log_decay is a natural logarithm and must be <= 0 (was a linear gate written?)"
                   : "; every input must be finite");
  }
  if (first_token >= 0) throw Error(ExitCode::bad_input, first);
}

void DeltaPartBuffers::check_output(TokenRange part) const {
  const MutableTokenArray& o = outputs_.o;
  const std::int64_t H = o_.heads, V = o_.width;
  const bool dense = o.token_stride == H * V;  // then a token is one row of memory
  const std::int64_t at =
      first_outside({o.data, o.type, o.token_stride, o.head_stride, 1}, part.size(), static_cast<int>(dense ? 1 : H),
                    static_cast<int>(dense ? H * V : V), Domain::finite);
  if (at < 0) return;
  const std::int64_t token = part.begin + at / (H * V);
  const Source& source = problem_.sources[place_of(problem_.sources, token).source];
  throw overflow_of_output(output_path(source, "o"), o_.type, state_type_,
                           describe_token(problem_.sources, command_.solve.input, "", token) + ", head " +
                               std::to_string(at / V % H) + ", channel " + std::to_string(at % V));
}

void DeltaPartBuffers::fetch(int slot) {
  const Slot& s = slots_[slot];
  if (!command_.state_only && size_of(o_.type) < size_of(state_type_)) check_output(s.out.part);
  if (!command_.state_only) o_.device.download(s.o, s.out.part.size() * o_.token_bytes());
  if (s.out.states > 0) recorded_.download(s.recorded, s.out.states * state_bytes());
  if (s.out.ends > 0) final_.download(s.final, s.out.ends * state_bytes());
}

void DeltaPartBuffers::write_when_ready(int slot, SharedOutput& out, WindowStages::Writing now) {
  if (!kernels_reach_host || problem_.layout == Layout::bhtd) return;  // whose pieces are small
  outputs_.ready = [this, slot, &out, now = std::move(now)](std::int64_t tokens) {
    std::int64_t& written = slots_[slot].out.written;
    const auto job = [this, slot, &out, from = written, tokens] { write_outputs(slots_[slot], out, from, tokens); };
    if (tokens == 0) now.wait();  // o is about to change
    if (tokens == 0 || now.begin(job)) written = tokens;
  };
}

/// o of some tokens of the part.
void DeltaPartBuffers::write_outputs(const Slot& s, SharedOutput& out, std::int64_t from, std::int64_t to) const {
  const TokenRange part = s.out.part;
  const std::int64_t H = problem_.shape.heads, V = problem_.shape.d_value;
  const std::int64_t element = static_cast<std::int64_t>(size_of(o_.type));
  for_pieces(problem_.sources, {part.begin + from, part.begin + to},
             [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t piece, std::int64_t n) {
               const auto& shape = source.data.at("v").shape;
               const bool heads_first = problem_.layout == Layout::bhtd;
               const std::int64_t at = from + piece;
               for (std::int64_t h = 0; h < (heads_first ? H : 1); ++h)
                 out.write(output_path(source, "o"),
                           token_slab(problem_.layout, shape.size(), b, token, n, h, heads_first ? 1 : H, shape),
                           s.o.data() + (heads_first ? (h * part.size() + at) * V : at * H * V) * element);
             });
}

void DeltaPartBuffers::write(int slot, SharedOutput& out) const {
  const Slot& s = slots_[slot];
  const TokenRange part = s.out.part;
  const std::int64_t H = problem_.shape.heads, V = problem_.shape.d_value, K = problem_.shape.d_key;
  const std::int64_t bytes = state_bytes();
  if (!command_.state_only && !part.empty()) write_outputs(s, out, s.out.written, part.size());
  std::int64_t place = 0;
  for (const Run& run : s.out.runs) {
    if (!run.ends) continue;
    const auto [source, sequence] = source_of_sequence(problem_.sources, run.sequence);
    Slab slab{{0, 0, 0}, {H, V, K}};
    if (has_batch_of_states(problem_)) slab = {{sequence, 0, 0, 0}, {1, H, V, K}};
    out.write(output_path(problem_.sources[source], "final_state"), slab, s.final.data() + place++ * bytes);
  }
  if (s.out.states == 0) return;
  // the states of each source (of each batch entry) that fall into this part
  std::int64_t entry = 0, base = 0;  // the first state, and the first token, of the stretch
  for (const Source& source : problem_.sources) {
    const std::int64_t each = source.tokens / command_.state_every;
    for (std::int64_t b = 0; b < source.batch; ++b, entry += each, base += source.tokens) {
      const std::int64_t from =
          std::max<std::int64_t>(0, std::min(source.tokens, part.begin - base)) / command_.state_every;
      const std::int64_t to =
          std::max<std::int64_t>(0, std::min(source.tokens, part.end - base)) / command_.state_every;
      if (from >= to) continue;
      Slab slab{{from, 0, 0, 0}, {to - from, H, V, K}};
      if (problem_.layout != Layout::thd) slab = {{b, from, 0, 0, 0}, {1, to - from, H, V, K}};
      out.write(output_path(source, "states"), slab, s.recorded.data() + (entry + from - s.out.states_before) * bytes);
    }
  }
}

}  // namespace longscan
