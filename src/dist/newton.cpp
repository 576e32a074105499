// SPDX-License-Identifier: Apache-2.0
#include "longscan/newton.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "core/cells.hpp"
#include "core/device_memory.hpp"
#include "core/dtype.hpp"
#include "dist/newton_layer.hpp"
#include "dist/token_cuts.hpp"
#include "local/block_cell_kernel.hpp"
#include "local/dense_cell_kernel.hpp"
#include "local/projection.hpp"
#include "longscan/cells.hpp"
#include "longscan/delta_rule.hpp"
#include "longscan/error.hpp"

namespace longscan {

struct Newton::Impl {
  Impl(Transport& ranks, NetworkShape shape, const NewtonOptions& options, Sequences sequences)
      : ranks(ranks),
        shape(std::move(shape)),
        options(options),
        cuts(std::move(sequences), ranks.size(), ranks.rank(), [](std::int64_t token) { return token; }) {}
  virtual ~Impl() = default;
  virtual NewtonReport solve(TokenRange window, const NewtonData& data) = 0;
  virtual std::int64_t workspace_bytes(std::int64_t tokens, DType x, bool only) const = 0;
  virtual std::vector<std::byte> state() const = 0;
  virtual void set_state(const std::vector<std::byte>& state) = 0;

  Transport& ranks;
  NetworkShape shape;
  NewtonOptions options;
  TokenCuts cuts;
};

namespace {

constexpr int tag_carry = 350;

/// Status values in the order of how bad they are.
int badness(NewtonStatus status) { return static_cast<int>(status); }

bool is_solution(NewtonStatus s) { return s != NewtonStatus::not_converged && s != NewtonStatus::non_finite; }

bool is_full(NewtonMethod m) {
  return m == NewtonMethod::newton || m == NewtonMethod::quasi || m == NewtonMethod::elk || m == NewtonMethod::picard ||
         m == NewtonMethod::jacobi;
}

/// Adds what one layer and direction found.
void merge(NewtonReport& total, const NewtonReport& one, bool first) {
  if (first) {
    total = one;
    return;
  }
  if (badness(one.status) > badness(total.status)) total.status = one.status, total.method_used = one.method_used;
  if (!one.scan.reason.empty()) total.scan = one.scan;
  total.iterations += one.iterations;
  total.residual_history.insert(total.residual_history.end(), one.residual_history.begin(), one.residual_history.end());
  total.converged_prefix = std::min(total.converged_prefix, one.converged_prefix);
  total.error_bound =
      std::min(total.error_bound, one.error_bound) < 0 ? -1 : std::max(total.error_bound, one.error_bound);
  total.bits_of_token_loop = total.bits_of_token_loop && one.bits_of_token_loop;
  total.sampled = total.sampled || one.sampled;
  total.lyapunov = std::max(total.lyapunov, one.lyapunov);
  total.log_amplification = std::max(total.log_amplification, one.log_amplification);
  if (one.first_bad_token >= 0 && (total.first_bad_token < 0 || one.first_bad_token < total.first_bad_token))
    total.first_bad_token = one.first_bad_token;
  total.tolerance_floor = std::max(total.tolerance_floor, one.tolerance_floor);
}

/// One layer in one direction: its projection and its kernel.
template <class T>
struct Direction {
  std::unique_ptr<Projection<T>> projection;
  DeviceArray<T> recurrent;  ///< weights of cells whose channels do not mix; the kernel points at them
  std::unique_ptr<CellKernel<T>> kernel;
};

template <class T>
std::vector<T> tensor(const CellWeights& weights, const std::string& name, std::size_t size) {
  const auto it = weights.tensors.find(name);
  if (it == weights.tensors.end()) return std::vector<T>(size, T(0));  // a missing bias
  return {it->second.values.begin(), it->second.values.end()};
}

template <class T>
Direction<T> make_direction(const CellWeights& weights, const NetworkShape& shape, int layer, int direction) {
  Direction<T> d;
  const int D = shape.channels;
  if (shape.type == "paragru" || shape.type == "paralstm") {
    d.projection = std::make_unique<Projection<T>>(3 * D, shape.inputs, tensor<T>(weights, "weight_ih", 0),
                                                   tensor<T>(weights, "bias", 3 * D));
    auto recurrent = tensor<T>(weights, "recurrent", 3 * D);
    if (shape.type == "paragru") {
      d.recurrent = on_device("longscan::cell::weights", recurrent);
      d.kernel = std::make_unique<BlockCellKernel<ParaGru, T>>(D, d.recurrent.data());
    } else {
      const auto peephole = tensor<T>(weights, "peephole", 2 * D);
      recurrent.insert(recurrent.end(), peephole.begin(), peephole.end());
      d.recurrent = on_device("longscan::cell::weights", recurrent);
      d.kernel = std::make_unique<BlockCellKernel<ParaLstm, T>>(D, d.recurrent.data());
    }
    return d;
  }
  const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
  const DenseCell cell = shape.type == "gru"        ? DenseCell::gru
                         : shape.type == "lstm"     ? DenseCell::lstm
                         : shape.type == "rnn_relu" ? DenseCell::rnn_relu
                                                    : DenseCell::rnn_tanh;
  const int gates = shape.type == "gru" ? 3 : shape.type == "lstm" ? 4 : 1;
  const int inputs = layer == 0 ? shape.inputs : shape.directions * D;
  d.projection = std::make_unique<Projection<T>>(gates * D, inputs, tensor<T>(weights, "weight_ih" + suffix, 0),
                                                 tensor<T>(weights, "bias_ih" + suffix, gates * D));
  d.kernel = make_dense_cell_kernel<T>(cell, D, tensor<T>(weights, "weight_hh" + suffix, 0),
                                       tensor<T>(weights, "bias_hh" + suffix, gates * D));
  return d;
}

/// One value of every channel of the states [tokens][size], into columns of `to`, `width` a token.
/// Launches "longscan::newton::gather".
template <class T>
void gather(const T* states, std::int64_t tokens, std::int64_t size, std::int64_t channels, T* to, std::int64_t width) {
  using Space = Kokkos::DefaultExecutionSpace;
  const std::int64_t together = is_host_space<Space> ? channels : 1, pieces = channels / together;
  Kokkos::parallel_for(
      "longscan::newton::gather", Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(0, tokens * pieces),
      KOKKOS_LAMBDA(const std::int64_t i) {
        const std::int64_t t = i / pieces, first = i % pieces * together;
        for (std::int64_t d = first; d < first + together; ++d) to[t * width + d] = states[t * size + d];
      });
}

/// Whether kernels work on the caller's memory, where that is of their type.
constexpr bool reaches_host = is_host_space<Kokkos::DefaultExecutionSpace>;

template <class T>
bool is_stored_as(DType type) {
  return type == (sizeof(T) == 8 ? DType::f64 : DType::f32);
}

/// Where x is as the arithmetic has it and kernels reach it: as it came, or in `to`; numbers of other types travel as
/// they are, to `stored`. Launches "longscan::newton::read".
template <class T>
const T* read_input(const NewtonData& data, std::int64_t values, DeviceArray<unsigned char>& stored,
                    DeviceArray<T>& input) {
  if (reaches_host && is_stored_as<T>(data.x_type)) return static_cast<const T*>(data.x);
  reserve(input, "longscan::newton::input", values);
  T* const to = input.data();
  if (is_stored_as<T>(data.x_type)) {
    copy_to_device(static_cast<const T*>(data.x), values, to);
    return to;
  }
  const void* from = data.x;
  if (!is_host_space<Kokkos::DefaultExecutionSpace>) {
    const std::int64_t bytes = values * static_cast<std::int64_t>(size_of(data.x_type));
    reserve(stored, "longscan::newton::stored", bytes);
    copy_to_device(static_cast<const unsigned char*>(data.x), bytes, stored.data());
    from = stored.data();
  }
  const DType type = data.x_type;
  Kokkos::parallel_for(
      "longscan::newton::read",
      Kokkos::RangePolicy<Kokkos::DefaultExecutionSpace, Kokkos::IndexType<std::int64_t>>(0, values),
      KOKKOS_LAMBDA(const std::int64_t i) { to[i] = load<T>(from, type, i); });
  return to;
}

template <class T>
class Solver final : public Newton::Impl {
 public:
  Solver(Transport& ranks, const CellWeights& weights, NetworkShape network, const NewtonOptions& options,
         Sequences sequences)
      : Impl(ranks, std::move(network), options, std::move(sequences)) {
    for (int layer = 0; layer < shape.layers; ++layer)
      for (int direction = 0; direction < shape.directions; ++direction)
        directions_.push_back(make_direction<T>(weights, shape, layer, direction));
    carry_.assign(directions_.size(), {});
  }

  std::int64_t workspace_bytes(std::int64_t tokens, DType x, bool only) const override {
    const std::int64_t D = shape.channels, h = shape.directions * D, between = std::min(2, shape.layers - 1);
    const std::int64_t input = reaches_host && is_stored_as<T>(x) ? 0 : shape.inputs;
    const std::int64_t projected = directions_.front().kernel->inputs() * D;
    const std::int64_t states = in_place() ? 0 : shape.state * D;
    // on their way to the host
    const std::int64_t last = reaches_host ? 0 : (shape.layers < 3 ? h : 0) + (shape.state > 1 ? h : 0);
    const std::int64_t values = input + projected + states + between * h + last;
    const std::int64_t bytes = static_cast<std::int64_t>(sizeof(T)) * tokens * values;
    if (!is_full(options.method)) return bytes;
    const std::int64_t method = full_workspace_bytes(*directions_.front().kernel, options.method, tokens);
    // the caller's h and c are touched when the method is through and has given back what it took
    const bool waits = only && reaches_host && !in_place();
    const std::int64_t outputs = static_cast<std::int64_t>(sizeof(T)) * tokens * h * shape.state;
    return bytes + (waits ? std::max<std::int64_t>(0, method - outputs) : method);
  }

  std::vector<std::byte> state() const override {
    std::vector<std::byte> all;
    if (ranks.rank() != 0) return all;
    for (const std::vector<T>& carry : carry_) {
      const auto bytes = std::as_bytes(std::span(carry));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }

  void set_state(const std::vector<std::byte>& state) override {
    const std::size_t each = static_cast<std::size_t>(shape.state) * shape.channels;
    const std::size_t expected = state.empty() ? 0 : carry_.size() * each * sizeof(T);
    if (state.size() != expected)
      throw Error(ExitCode::bad_input, "states of " + std::to_string(state.size()) + " bytes were given, " +
                                           std::to_string(expected) + " are needed");
    for (std::size_t i = 0; i < carry_.size(); ++i) {
      carry_[i].resize(state.empty() ? 0 : each);
      std::memcpy(carry_[i].data(), state.data() + i * each * sizeof(T), carry_[i].size() * sizeof(T));
    }
  }

  NewtonReport solve(TokenRange window, const NewtonData& data) override {
    const std::int64_t sent_before = ranks.bytes_sent();
    const TokenRange here = cuts.part(window);
    const std::vector<Run> runs = cuts.runs(window);
    const std::int64_t n = here.size(), D = shape.channels, k = shape.state, dirs = shape.directions;
    const T* input = read_input(data, n * shape.inputs, stored_, input_);

    NewtonReport report;
    double projecting = 0;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const bool last = layer + 1 == shape.layers, wants_cells = last && data.c && k > 1;
      // h and c of the layer, [tokens][directions][D]: where the caller wants them, or on the way
      T *outputs = static_cast<T*>(data.h), *cells = static_cast<T*>(data.c);
      if (!last || !reaches_host || !outputs) {
        reserve(outputs_[layer % 2], "longscan::newton::outputs", n * dirs * D);
        outputs = outputs_[layer % 2].data();
      }
      if (wants_cells && !reaches_host) {
        reserve(cells_, "longscan::newton::cells", n * dirs * D);
        cells = cells_.data();
      }
      for (int direction = 0; direction < dirs; ++direction) {
        Direction<T>& d = directions_[layer * dirs + direction];
        const std::int64_t inputs = d.kernel->inputs();
        reserve(projected_, "longscan::newton::projected", n * inputs * D);
        T* const projected = projected_.data();
        T* states = outputs;
        if (!in_place()) {
          reserve(states_, "longscan::newton::states", n * k * D);
          states = states_.data();
        }
        const auto start = std::chrono::steady_clock::now();
        d.projection->apply(input, n, projected);
        Kokkos::DefaultExecutionSpace().fence();  // so that its time is its own
        projecting += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        LayerPart<T> part = make_part(window, here, runs, direction == 1, projected, inputs * D, states, k * D);
        set_starts(part, runs, data, layer * dirs + direction, direction == 1, window);
        const auto deliver = [&](NewtonStatus status) {
          take_ends(part, runs, data, layer * dirs + direction, direction == 1);
          if (direction == 0) pass_carry(window, part, layer * dirs);
          if (!in_place()) gather(states, n, k * D, D, outputs + direction * D, dirs * D);
          if (wants_cells) gather(states + D, n, k * D, D, cells + direction * D, dirs * D);
          if (reaches_host && last && direction + 1 == dirs && data.ready && is_solution(status)) data.ready();
        };
        NewtonReport one = run(*d.kernel, part, deliver);
        if (direction == 1 && one.first_bad_token >= 0)  // tokens are counted from the end there
          one.first_bad_token = window.size() - 1 - one.first_bad_token;
        merge(report, one, layer == 0 && direction == 0);
        report.projection_seconds = projecting;
        if (!is_solution(one.status)) {
          report.status = one.status;
          return report;
        }
      }
      if (wants_cells && cells != data.c) copy_to_host(cells, n * dirs * D, static_cast<T*>(data.c));
      if (last && data.h && outputs != data.h) copy_to_host(outputs, n * dirs * D, static_cast<T*>(data.h));
      input = outputs;
    }
    report.bytes_exchanged = ranks.bytes_sent() - sent_before;
    ranks.all_reduce(&report.bytes_exchanged, 1, Transport::Reduction::sum);
    return report;
  }

 private:
  /// Whether a layer's states are its h as they stand.
  bool in_place() const { return reaches_host && shape.state == 1 && shape.directions == 1; }

  /// The part in the order of the direction.
  LayerPart<T> make_part(TokenRange window, TokenRange here, const std::vector<Run>& runs, bool reversed, const T* x,
                         std::int64_t x_stride, T* h, std::int64_t h_stride) {
    LayerPart<T> part;
    const std::int64_t n = here.size(), back = std::max<std::int64_t>(0, n - 1);
    part.path = reversed ? CellTrajectory<T>{x + back * x_stride, -x_stride, h + back * h_stride, -h_stride}
                         : CellTrajectory<T>{x, x_stride, h, h_stride};
    part.reversed = reversed, part.axis_tokens = window.size();
    part.axis_begin = reversed ? window.end - here.end : here.begin - window.begin;
    part.runs = runs;
    if (reversed) {
      std::reverse(part.runs.begin(), part.runs.end());
      for (Run& run : part.runs) {
        const std::int64_t begin = run.begin;
        run.position = run.length - run.position - run.size();
        run.begin = n - run.end, run.end = n - begin;
        std::swap(run.starts, run.ends);
      }
    }
    if (part.runs.empty()) return part;
    const int ahead = ranks.rank() + 1, behind = ranks.rank() - 1;
    const bool from_behind = !runs.front().starts && here.begin != window.begin;
    const bool to_ahead = !runs.back().ends && here.end != window.end;
    part.before = reversed ? (to_ahead ? ahead : -1) : (from_behind ? behind : -1);
    part.after = reversed ? (from_behind ? behind : -1) : (to_ahead ? ahead : -1);
    return part;
  }

  /// h0, c0 of runs that start here in this direction; the carry of the window before.
  void set_starts(LayerPart<T>& part, const std::vector<Run>& runs, const NewtonData& data, int index, bool reversed,
                  TokenRange window) {
    const std::int64_t D = shape.channels, k = shape.state, all = shape.layers * shape.directions;
    part.starts.assign(part.runs.size() * k * D, T(0)), part.ends = part.starts;
    for (std::size_t i = 0; i < part.runs.size(); ++i) {
      T* start = &part.starts[i * k * D];
      if (part.runs[i].starts) {
        const std::size_t given = reversed ? runs.size() - 1 - i : i;
        const std::int64_t offset = (static_cast<std::int64_t>(given) * all + index) * D;
        if (data.h0) std::copy_n(static_cast<const T*>(data.h0) + offset, D, start);
        if (data.c0 && k > 1) std::copy_n(static_cast<const T*>(data.c0) + offset, D, start + D);
      } else if (part.before < 0 && !carry_[index].empty()) {
        std::copy(carry_[index].begin(), carry_[index].end(), start);
      }
    }
    (void)window;
  }

  void take_ends(const LayerPart<T>& part, const std::vector<Run>& runs, const NewtonData& data, int index,
                 bool reversed) {
    const std::int64_t D = shape.channels, k = shape.state, all = shape.layers * shape.directions;
    for (std::size_t i = 0; i < part.runs.size(); ++i) {
      if (!part.runs[i].ends) continue;
      const std::size_t given = reversed ? runs.size() - 1 - i : i;
      const std::int64_t offset = (static_cast<std::int64_t>(given) * all + index) * D;
      const T* end = &part.ends[i * k * D];
      if (data.h_final) std::copy_n(end, D, static_cast<T*>(data.h_final) + offset);
      if (data.c_final && k > 1) std::copy_n(end + D, D, static_cast<T*>(data.c_final) + offset);
    }
  }

  /// The state at the end of the window goes to rank 0, which starts the next one.
  void pass_carry(TokenRange window, const LayerPart<T>& part, int index) {
    if (window.end == cuts.tokens()) return;
    const std::int64_t size = static_cast<std::int64_t>(shape.state) * shape.channels;
    std::vector<T>& carry = carry_[index];
    carry.assign(size, T(0));
    const int last = cuts.last_holder(window);
    if (ranks.rank() == last && !part.runs.empty())
      std::copy_n(&part.ends[(part.runs.size() - 1) * size], size, carry.data());
    const auto bytes = static_cast<std::int64_t>(size * sizeof(T));
    if (last == 0) return;
    if (ranks.rank() == last) ranks.send(carry.data(), bytes, 0, tag_carry)->wait();
    if (ranks.rank() == 0) ranks.receive(carry.data(), bytes, last, tag_carry);
  }

  /// `deliver`: called when the states are there.
  template <class F>
  NewtonReport run(const CellKernel<T>& kernel, LayerPart<T>& part, const F& deliver) {
    LayerSolve<T> s{ranks, kernel, part, options, {}, plan_};
    s.solved = [&] { deliver(s.report.status); };
    s.share = static_cast<double>(part.axis_tokens) / static_cast<double>(std::max<std::int64_t>(1, cuts.tokens()));
    solve_layer(s);
    return s.report;
  }

  ScanPlan plan_{options.scan, options.reproducible};
  DeviceArray<unsigned char> stored_;
  // kept from window to window, as new memory is dear
  DeviceArray<T> input_, outputs_[2], cells_, projected_, states_;
  std::vector<Direction<T>> directions_;
  std::vector<std::vector<T>> carry_;  // per layer and direction: the state before the window
};

}  // namespace

template <class T>
std::shared_ptr<const CellKernel<T>> make_cell_kernel(const CellWeights& weights, int layer, int direction) {
  const auto all =
      std::make_shared<Direction<T>>(make_direction<T>(weights, network_shape(weights, -1), layer, direction));
  return {all, all->kernel.get()};
}
template std::shared_ptr<const CellKernel<float>> make_cell_kernel(const CellWeights&, int, int);
template std::shared_ptr<const CellKernel<double>> make_cell_kernel(const CellWeights&, int, int);

Newton::Newton(Transport& ranks, const CellWeights& weights, int inputs, const NewtonOptions& options,
               Sequences sequences) {
  const NetworkShape shape = network_shape(weights, inputs);
  const bool mixes = shape.type != "paragru" && shape.type != "paralstm";
  require_reproducible_scan(options.scan, options.reproducible);
  if (options.reproducible && is_full(options.method))
    throw Error(ExitCode::usage, "--reproducible cannot hold with --method " + std::string(name_of(options.method)) +
                                     ", whose scans depend on how tokens are cut; use auto, sequential, or shooting");
  if (options.reproducible && mixes && options.method == NewtonMethod::shooting)
    throw Error(ExitCode::usage, "--reproducible cannot hold with --method shooting for '" + shape.type +
                                     "', whose segments depend on the ranks; use auto or sequential");
  if (options.precision == Precision::f64)
    impl_ = std::make_unique<Solver<double>>(ranks, weights, shape, options, std::move(sequences));
  else
    impl_ = std::make_unique<Solver<float>>(ranks, weights, shape, options, std::move(sequences));
}

Newton::~Newton() = default;

const NetworkShape& Newton::shape() const { return impl_->shape; }
std::vector<std::byte> Newton::state() const { return impl_->state(); }
void Newton::set_state(const std::vector<std::byte>& state) { impl_->set_state(state); }
std::vector<TokenRange> Newton::windows(std::int64_t tokens, std::int64_t from) const {
  if (impl_->shape.directions > 1) return {{0, impl_->cuts.tokens()}};
  return impl_->cuts.windows(std::max<std::int64_t>(1, tokens) * impl_->ranks.size(), from);
}
TokenRange Newton::part(TokenRange window) const { return impl_->cuts.part(window); }
std::vector<Run> Newton::runs(TokenRange window) const { return impl_->cuts.runs(window); }
std::int64_t Newton::workspace_bytes(std::int64_t tokens, DType x, bool only) const {
  // weights, and states of segments
  return impl_->workspace_bytes(tokens, x, only) + (std::int64_t{2} << 20);
}
NewtonReport Newton::solve(TokenRange window, const NewtonData& data) { return impl_->solve(window, data); }

}  // namespace longscan
