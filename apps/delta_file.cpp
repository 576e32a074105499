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
  for (const std::string& role : token_roles) {
    if (!problem.has(role) || (role == "q" && command.state_only)) continue;
    Array& array = arrays_[role];
    array.type = problem.type(role);
    array.heads = problem.heads.count(role) ? problem.heads.at(role) : problem.shape.heads;
    const bool wide = role == "q" || role == "k" || role == "a" || role == "b" ||
                      (role == "log_decay" && problem.shape.channel_decay);
    array.width = role == "v" ? problem.shape.d_value : wide ? problem.shape.d_key : 1;
  }
  o_.type = output_type, o_.heads = problem.shape.heads, o_.width = problem.shape.d_value;
}

std::int64_t DeltaPartBuffers::bytes_per_token(const DeltaProblem& problem, const DeltaCommand& command,
                                               DType output_type) {
  const DeltaPartBuffers probe(problem, command, Precision::f32, output_type);
  std::int64_t bytes = 0;
  for (const auto& [role, array] : probe.arrays_)
    bytes += array.heads * array.width * static_cast<std::int64_t>(size_of(array.type));
  if (!command.state_only) bytes += probe.o_.heads * probe.o_.width * static_cast<std::int64_t>(size_of(output_type));
  return bytes;
}

void DeltaPartBuffers::reserve(Array& array, std::int64_t bytes) {
  if (static_cast<std::int64_t>(array.device.extent(0)) >= bytes) return;
  array.device = Bytes(), array.host = {};
  array.device = Bytes(Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::part"), bytes);
  array.host = Kokkos::create_mirror_view(array.device);
}

void DeltaPartBuffers::read_array(const InputFile& file, const std::string& role, TokenRange part) {
  Array& array = arrays_.at(role);
  const std::int64_t element = static_cast<std::int64_t>(size_of(array.type)), row = array.heads * array.width;
  reserve(array, std::max<std::int64_t>(1, part.size() * row * element));
  for_pieces(problem_.sources, part,
             [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
               const DatasetInfo& info = source.data.at(role);
               if (problem_.layout != Layout::bhtd) {
                 file.read(info,
                           token_slab(problem_.layout, info.shape.size(), b, token, n, 0, array.heads, info.shape),
                           array.host.data() + at * row * element);
               } else {  // heads first in memory too
                 for (std::int64_t h = 0; h < array.heads; ++h)
                   file.read(info, token_slab(problem_.layout, info.shape.size(), b, token, n, h, 1, info.shape),
                             array.host.data() + (h * part.size() + at) * array.width * element);
               }
               bytes_read_ += n * row * element;
             });
  Kokkos::deep_copy(array.device, array.host);
}

TokenArray DeltaPartBuffers::view(const std::string& role, std::int64_t tokens) const {
  const auto it = arrays_.find(role);
  if (it == arrays_.end()) return {};
  const Array& array = it->second;
  TokenArray view;
  view.data = array.device.data(), view.type = array.type;
  const bool heads_first = problem_.layout == Layout::bhtd;
  view.token_stride = heads_first ? array.width : array.heads * array.width;
  view.head_stride = heads_first ? tokens * array.width : array.width;
  view.heads_per_stored = static_cast<std::int32_t>(problem_.shape.heads / array.heads);
  return view;
}

void DeltaPartBuffers::read(const InputFile& file, TokenRange part, const std::vector<Run>& runs, std::int64_t states) {
  for (const auto& [role, array] : arrays_) read_array(file, role, part);
  inputs_ = {};
  inputs_.q = view("q", part.size()), inputs_.k = view("k", part.size()), inputs_.v = view("v", part.size());
  inputs_.beta = view("beta", part.size()), inputs_.eta = view("eta", part.size());
  inputs_.log_decay = view("log_decay", part.size());
  inputs_.a = view("a", part.size()), inputs_.b = view("b", part.size());

  const std::int64_t one = static_cast<std::int64_t>(problem_.shape.heads) * problem_.shape.d_value *
                           problem_.shape.d_key,
                     bytes = one * static_cast<std::int64_t>(size_of(state_type_));
  const auto starts = std::count_if(runs.begin(), runs.end(), [](const Run& r) { return r.starts; });
  const auto ends = std::count_if(runs.begin(), runs.end(), [](const Run& r) { return r.ends; });
  if (problem_.has("initial_state") && starts > 0) {
    reserve(initial_, starts * bytes);
    std::vector<std::byte> raw;
    std::int64_t slot = 0;
    for (const Run& run : runs) {
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
                                               " holds a value that is not finite (sequence " +
                                               std::to_string(sequence) + ", head " +
                                               std::to_string(i / (one / problem_.shape.heads)) + ")");
        store(initial_.host.data(), state_type_, slot * one + i, x);
      }
      ++slot;
    }
    Kokkos::deep_copy(initial_.device, initial_.host);
    inputs_.initial_states = initial_.device.data();
  }

  outputs_ = {};
  if (!command_.state_only) {
    reserve(o_,
            std::max<std::int64_t>(1, part.size() * o_.heads * o_.width * static_cast<std::int64_t>(size_of(o_.type))));
    const bool heads_first = problem_.layout == Layout::bhtd;
    outputs_.o.data = o_.device.data(), outputs_.o.type = o_.type;
    outputs_.o.token_stride = heads_first ? o_.width : o_.heads * o_.width;
    outputs_.o.head_stride = heads_first ? part.size() * o_.width : o_.width;
    if (states > 0) {
      reserve(states_, states * bytes);
      outputs_.states = states_.device.data();
    }
  }
  if (ends > 0) {
    reserve(final_, ends * bytes);
    outputs_.final_states = final_.device.data();
  }
}

void DeltaPartBuffers::check(const std::string& file, TokenRange part) const {
  std::int64_t first_token = -1;
  std::string first;
  for (const auto& [role, array] : arrays_) {
    const bool decay = role == "log_decay";
    TokenArray x = view(role, part.size());
    int heads = static_cast<int>(array.heads), width = static_cast<int>(array.width);
    const bool dense = x.token_stride == array.heads * array.width;  // then a token is one row of memory
    if (dense) heads = 1, width = static_cast<int>(array.heads * array.width), x.head_stride = width;
    const std::int64_t at = first_outside(x, part.size(), heads, width, decay ? Domain::nonpositive : Domain::finite);
    if (at < 0) continue;
    const std::int64_t token = at / (array.heads * array.width);
    const int head = static_cast<int>(at / array.width % array.heads);
    if (first_token >= 0 && token >= first_token) continue;
    first_token = token;
    const auto place = dense ? token * x.token_stride + at % (array.heads * array.width)
                             : token * x.token_stride + head * x.head_stride + at % array.width;
    Bytes::HostMirror host = array.host;
    Kokkos::deep_copy(host, array.device);
    const auto value = load<double>(host.data(), array.type, place);
    first = describe_token(problem_.sources, file, role, part.begin + token) + ", head " + std::to_string(head) +
            " is " +
            (value != value         ? "NaN"
             : is_non_finite(value) ? (value > 0 ? "infinite" : "-infinite")
                                    : std::to_string(value)) +
            (decay ? "; log_decay is a natural logarithm and must be <= 0 (was a linear gate written?)"
                   : "; every input must be finite");
  }
  if (first_token >= 0) throw Error(ExitCode::bad_input, first);
}

void DeltaPartBuffers::write(SharedOutput& out, TokenRange part, const std::vector<Run>& runs,
                             std::int64_t states_before) {
  const std::int64_t H = problem_.shape.heads, V = problem_.shape.d_value, K = problem_.shape.d_key;
  if (outputs_.o && !part.empty()) {
    Kokkos::deep_copy(o_.host, o_.device);
    const std::int64_t element = static_cast<std::int64_t>(size_of(o_.type));
    for_pieces(problem_.sources, part,
               [&](const Source& source, std::int64_t b, std::int64_t token, std::int64_t at, std::int64_t n) {
                 const auto& shape = source.data.at("v").shape;
                 const bool heads_first = problem_.layout == Layout::bhtd;
                 for (std::int64_t h = 0; h < (heads_first ? H : 1); ++h)
                   out.write(output_path(source, "o"),
                             token_slab(problem_.layout, shape.size(), b, token, n, h, heads_first ? 1 : H, shape),
                             o_.host.data() + (heads_first ? (h * part.size() + at) * V : at * H * V) * element);
               });
  }
  const std::int64_t bytes = H * V * K * static_cast<std::int64_t>(size_of(state_type_));
  if (outputs_.final_states) {
    Kokkos::deep_copy(final_.host, final_.device);
    std::int64_t slot = 0;
    for (const Run& run : runs) {
      if (!run.ends) continue;
      const auto [source, sequence] = source_of_sequence(problem_.sources, run.sequence);
      Slab slab{{0, 0, 0}, {H, V, K}};
      if (has_batch_of_states(problem_)) slab = {{sequence, 0, 0, 0}, {1, H, V, K}};
      out.write(output_path(problem_.sources[source], "final_state"), slab, final_.host.data() + slot++ * bytes);
    }
  }
  if (outputs_.states) {
    Kokkos::deep_copy(states_.host, states_.device);
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
        out.write(output_path(source, "states"), slab, states_.host.data() + (entry + from - states_before) * bytes);
      }
    }
  }
}

}  // namespace longscan
