// SPDX-License-Identifier: Apache-2.0
#include "local/delta_tensor.hpp"

#ifdef LONGSCAN_HOPPER
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/device_memory.hpp"
#include "core/dtype.hpp"
#include "local/hopper/delta_hopper.hpp"

namespace longscan {
namespace {

hopper::Type type_of(DType type) {
  switch (type) {
    case DType::f64:
      return hopper::Type::f64;
    case DType::f32:
      return hopper::Type::f32;
    case DType::f16:
      return hopper::Type::f16;
    default:
      return hopper::Type::bf16;
  }
}

hopper::TokenVectors vectors(const TokenArray& x) { return {x.data, x.token_stride, x.head_stride}; }
/// float64 numbers a token and head are converted before a launch.
hopper::TokenScalars scalars(const TokenArray& x, bool converted = true) {
  if (!x) return {};
  return {x.data, type_of(x.type == DType::f64 && converted ? DType::f32 : x.type), x.token_stride, x.head_stride};
}

/// [T,H] numbers as float32, dense.
struct Narrow {
  TokenArray from;
  int heads;
  float* to;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    to[i] = load<float>(from.data, from.type, i / heads * from.token_stride + i % heads * from.head_stride);
  }
};

hopper::Pass describe(const DeltaPass<float>& pass) {
  hopper::Pass p;
  p.type = type_of(pass.in.k.type);
  p.k = vectors(pass.in.k), p.v = vectors(pass.in.v);
  p.tokens = pass.tokens, p.heads = pass.heads, p.group = pass.in.k.heads_per_stored;
  p.beta = scalars(pass.in.beta), p.eta = scalars(pass.in.eta);
  if (pass.rules.outputs) {
    p.q = vectors(pass.in.q);
    p.o = pass.out.data, p.o_token_stride = pass.out.token_stride, p.o_head_stride = pass.out.head_stride;
  }
  p.scale = static_cast<float>(pass.rules.scale);
  p.d_key = pass.rules.d_key, p.d_value = pass.rules.d_value;
  p.channel_decay = pass.rules.channel_decay;
  p.log_decay = scalars(pass.in.log_decay, !p.channel_decay);
  p.erase_undecayed = pass.rules.undecayed && pass.in.log_decay;
  return p;
}

const cudaDeviceProp& properties() {
  static const cudaDeviceProp found = [] {
    cudaDeviceProp p{};
    int number = 0;
    if (cudaGetDevice(&number) != cudaSuccess || cudaGetDeviceProperties(&p, number) != cudaSuccess) p.major = 0;
    return p;
  }();
  return found;
}

void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("delta rule on tensor cores: ") + cudaGetErrorString(error));
}

/// What fp16 operands resolve: root mean squares below these lose digits to its subnormal numbers.
constexpr float least_key = 1.f / 1024, least_query = 1.f / 4096, least_value = 1.f / 4096, least_state = 1.f / 16384;

/// Mean squares of keys, queries, written values.
struct Squares {
  float k = 0, q = 0, v = 0;
  KOKKOS_FUNCTION Squares& operator+=(const Squares& other) {
    k += other.k, q += other.q, v += other.v;
    return *this;
  }
};

}  // namespace
}  // namespace longscan

template <>
struct Kokkos::reduction_identity<longscan::Squares> {
  KOKKOS_FUNCTION static longscan::Squares sum() { return {}; }
};

namespace longscan {
namespace {

/// Looks at 16 tokens of each task; small numbers make it bad. A team a task.
struct ScaleCheck {
  using Member = Kokkos::TeamPolicy<Kokkos::DefaultExecutionSpace>::member_type;
  static constexpr int samples = 16;
  DeltaPass<float> pass;
  const hopper::Task* tasks;
  hopper::Counts* counts;

  KOKKOS_FUNCTION static float square(const TokenArray& x, std::int64_t t, int head, int column) {
    const float e =
        load<float>(x.data, x.type, t * x.token_stride + head / x.heads_per_stored * x.head_stride + column);
    return e * e;
  }
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    const hopper::Task& task = tasks[member.league_rank()];
    const int K = pass.rules.d_key, V = pass.rules.d_value, width = K > V ? K : V;
    const TokenArray& eta = pass.in.eta.data ? pass.in.eta : pass.in.beta;
    const std::int64_t tokens = task.end - task.begin;
    const int n = static_cast<int>(tokens < samples ? tokens : samples);
    if (n == 0) return;
    Squares mean;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(member, n * width),
        [&](int i, Squares& sum) {
          const std::int64_t t = task.begin + (i / width) * tokens / n;
          const int column = i % width;
          if (column < K) sum.k += square(pass.in.k, t, task.head, column);
          if (column < K && pass.rules.outputs) sum.q += square(pass.in.q, t, task.head, column);
          if (column < V) sum.v += square(pass.in.v, t, task.head, column) * square(eta, t, task.head, 0);
        },
        mean);
    mean.k /= static_cast<float>(n * K), mean.q /= static_cast<float>(n * K), mean.v /= static_cast<float>(n * V);
    float state = mean.k * mean.v;
    if (mean.v == 0 && task.from.data) {
      Kokkos::parallel_reduce(
          Kokkos::TeamThreadRange(member, K * V),
          [&](int i, float& s) {
            const float e = task.from.data[i / V * task.from.k_stride + i % V * task.from.v_stride];
            s += e * e;
          },
          state);
      state /= static_cast<float>(K * V);
    }
    const auto below = [](float square, float least) { return square > 0 && square < least * least; };
    if (member.team_rank() == 0 && (below(mean.k, least_key) || below(mean.q, least_query) ||
                                    below(mean.v, least_value) || below(state, least_state)))
      counts[member.league_rank()].bad = 1;
  }
};

/// Columns of the state that tasks of their own take: a kernel holds 64 to 128; for more than 128 keys it cuts them
/// itself. Columns do not depend on each other.
struct Tile {
  int begin = 0, columns = 0;
};
std::vector<Tile> tiles_of(int d_key, int d_value) {
  constexpr int least = 64, most = 128, unit = 8;
  if (d_key > most) return {{0, d_value}};
  std::vector<Tile> tiles;
  for (int begin = 0; begin < d_value;) {
    const int left = d_value - begin;
    const bool halves = left > most && left < most + least;
    const int columns = halves ? (left / 2 + unit - 1) / unit * unit : std::min(left, most);
    tiles.push_back({begin, columns});
    begin += columns;
  }
  return tiles;
}

/// The pass over a tile's columns.
hopper::Pass part_of(hopper::Pass p, const Tile& tile) {
  constexpr int bytes = 2;  // of an element
  p.v.data = static_cast<const char*>(p.v.data) + tile.begin * bytes;
  if (p.o) p.o = static_cast<char*>(p.o) + tile.begin * bytes;
  p.d_value = tile.columns;
  return p;
}

hopper::State columns_from(const StateRef<const float>& state, int column) {
  float* const data = const_cast<float*>(state.data);
  return {data ? data + column * state.v_stride : nullptr, state.k_stride, state.v_stride};
}
hopper::State columns_from(const StateRef<float>& state, int column) {
  return {state.data ? state.data + column * state.v_stride : nullptr, state.k_stride, state.v_stride};
}

}  // namespace

struct DeltaTensor::Memory {
  SharedVector<hopper::Task> tasks;
  SharedVector<hopper::Counts> counts;
  DeviceArray<hopper::Task> device_tasks;
  DeviceArray<hopper::Counts> device_counts;
  DeviceArray<float> beta, eta, log_decay;
  void narrow(const Space& space, const DeltaPass<float>& pass, const TokenArray& from, DeviceArray<float>& memory,
              hopper::TokenScalars& to) {
    if (!from || from.type != DType::f64) return;
    const std::int64_t n = pass.tokens * pass.heads;
    reserve(memory, "longscan::delta::tensor_gates", n);
    Kokkos::parallel_for("longscan::delta::narrow",
                         Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(space, 0, n),
                         Narrow{from, pass.heads, memory.data()});
    to.data = memory.data(), to.token_stride = pass.heads, to.head_stride = 1;
  }
  std::size_t launched = 0;
  std::size_t per_task = 1;  // tiles, and P
  std::int64_t breaches = 0;
};

DeltaTensor::DeltaTensor() : memory_(std::make_unique<Memory>()) {}
DeltaTensor::~DeltaTensor() = default;

bool DeltaTensor::applies(const DeltaPass<float>& pass) const {
  const DeltaRules& r = pass.rules;
  const auto& in = pass.in;
  const hopper::Pass p = describe(pass);
  hopper::Pass square = p;  // P
  square.d_value = r.d_key, square.v = p.k;
  const std::vector<Tile> tiles = tiles_of(r.d_key, r.d_value);
  return r.chunk == 64 && !r.dplr && !r.normalize_keys && !r.round_to_bf16 && r.inverse == Inverse::forward &&
         r.half_operands && in.log_decay.heads_per_stored == 1 && !(r.outputs && pass.state_every > 0) &&
         size_of(in.k.type) == 2 && in.v.type == in.k.type && in.v.heads_per_stored == 1 &&
         in.beta.heads_per_stored == 1 && (!in.eta || in.eta.heads_per_stored == 1) &&
         (!r.outputs || (in.q.type == in.k.type && in.q.heads_per_stored == in.k.heads_per_stored && pass.out.data &&
                         pass.out.type == in.k.type)) &&
         std::all_of(tiles.begin(), tiles.end(),
                     [&](const Tile& tile) {
                       return hopper::applies(properties().major, r.d_key, tile.columns, part_of(p, tile));
                     }) &&
         (!r.map || hopper::applies(properties().major, r.d_key, r.d_key, square));
}

int DeltaTensor::side_by_side(const DeltaPass<float>& pass) {
  const DeltaRules& r = pass.rules;
  const int columns = tiles_of(r.d_key, r.d_value).front().columns;
  const int tasks = properties().multiProcessorCount * hopper::tasks_at_once(r.d_key, columns, r.channel_decay);
  return std::max(1, tasks / hopper::ctas_of_task(r.d_key, columns));
}

void DeltaTensor::launch(const Space& space, const DeltaPass<float>& pass, const std::vector<DeltaTask<float>>& tasks,
                         bool samples) {
  Memory& m = *memory_;
  const auto n = static_cast<std::int64_t>(tasks.size());
  const int K = pass.rules.d_key;
  const std::vector<Tile> tiles = tiles_of(pass.rules.d_key, pass.rules.d_value);
  m.launched = tasks.size(), m.per_task = tiles.size() + (pass.rules.map ? 1 : 0);
  m.tasks.clear();
  const auto add = [&](const DeltaTask<float>& from, int state_column, int to_column, std::int32_t flags) {
    hopper::Task t;
    t.begin = from.begin, t.end = from.end, t.head = from.head, t.flags = flags;
    t.from = columns_from(from.from, state_column), t.to = columns_from(from.to, to_column);
    t.probe_at = from.probe_at, t.probe = columns_from(from.probe, state_column);
    m.tasks.push_back(t);
  };
  for (const Tile& tile : tiles)
    for (const DeltaTask<float>& task : tasks) add(task, tile.begin, pass.rules.map_columns() + tile.begin, 0);
  if (pass.rules.map)
    for (const DeltaTask<float>& task : tasks) add(task, 0, 0, hopper::from_identity | hopper::without_values);
  const auto total = static_cast<std::int64_t>(m.tasks.size());
  m.counts.resize(total);
  reserve(m.device_tasks, "longscan::delta::tensor_tasks", total);
  reserve(m.device_counts, "longscan::delta::tensor_counts", total);
  if (n == 0) return;
  const cudaStream_t stream = space.cuda_stream();
  check(cudaMemcpyAsync(m.device_tasks.data(), m.tasks.data(), total * sizeof(hopper::Task), cudaMemcpyHostToDevice,
                        stream));
  check(cudaMemsetAsync(m.device_counts.data(), 0, total * sizeof(hopper::Counts), stream));
  hopper::Pass p = describe(pass);
  m.narrow(space, pass, pass.in.beta, m.beta, p.beta);
  m.narrow(space, pass, pass.in.eta, m.eta, p.eta);
  if (!p.channel_decay) m.narrow(space, pass, pass.in.log_decay, m.log_decay, p.log_decay);
  p.tasks = m.device_tasks.data(), p.counts = m.device_counts.data();
  if (pass.rules.map && tiles.size() == 1 && K == pass.rules.d_value) {  // P and L side by side
    p.task_count = static_cast<std::int32_t>(total), p.pair_distance = static_cast<std::int32_t>(n);
    check(hopper::run_pass(p, stream));
  } else {
    p.task_count = static_cast<std::int32_t>(n);
    for (const Tile& tile : tiles) {
      check(hopper::run_pass(part_of(p, tile), stream));
      p.tasks += n, p.counts += n;
    }
    p.d_value = K, p.v = p.k;  // no v is read
    if (pass.rules.map) check(hopper::run_pass(p, stream));
  }
  if (samples)
    Kokkos::parallel_for("longscan::delta::scale_check", Kokkos::TeamPolicy<Space>(space, static_cast<int>(n), 512),
                         ScaleCheck{pass, m.device_tasks.data(), m.device_counts.data()});
  check(cudaMemcpyAsync(m.counts.data(), m.device_counts.data(), total * sizeof(hopper::Counts), cudaMemcpyDeviceToHost,
                        stream));
}

std::vector<char> DeltaTensor::rejected(const Space& space) {
  Memory& m = *memory_;
  if (m.launched > 0) check(cudaStreamSynchronize(space.cuda_stream()));
  std::vector<char> rejected(m.launched, 0);
  m.breaches = 0;
  for (std::size_t i = 0; i < m.launched; ++i) {
    for (std::size_t j = 0; j < m.per_task; ++j) rejected[i] |= m.counts[j * m.launched + i].bad != 0;
    if (!rejected[i]) m.breaches += m.counts[i].breaches;
  }
  return rejected;
}

std::int64_t DeltaTensor::breaches() const { return memory_->breaches; }

}  // namespace longscan

#else

namespace longscan {

struct DeltaTensor::Memory {};
DeltaTensor::DeltaTensor() = default;
DeltaTensor::~DeltaTensor() = default;
bool DeltaTensor::applies(const DeltaPass<float>&) const { return false; }
int DeltaTensor::side_by_side(const DeltaPass<float>&) { return 0; }
void DeltaTensor::launch(const Space&, const DeltaPass<float>&, const std::vector<DeltaTask<float>>&, bool) {}
std::vector<char> DeltaTensor::rejected(const Space&) { return {}; }
std::int64_t DeltaTensor::breaches() const { return 0; }

}  // namespace longscan

#endif
