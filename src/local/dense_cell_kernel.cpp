// SPDX-License-Identifier: Apache-2.0
#include "local/dense_cell_kernel.hpp"

#include <cmath>

#include "core/cells.hpp"
#include "local/dense_cell_cuda.hpp"
#include "local/dense_cell_sweeps.hpp"
#include "local/dense_cell_teams.hpp"
#include "local/projection.hpp"
#include "local/shooting_steps.hpp"
#ifdef KOKKOS_ENABLE_CUDA
#include "local/cuda_blas.hpp"
#endif

namespace longscan {
namespace {

/// Bytes of what sweeps keep of the tokens of some segments.
constexpr std::int64_t sweep_bytes = is_host_space<Kokkos::DefaultExecutionSpace> ? 1 << 20 : 256 << 20;

template <class Gates, class T>
class DenseCellKernel final : public CellKernel<T> {
 public:
  using Team = DenseTeam<Gates, T>;
  using Space = typename Team::Space;
  using Memory = typename Team::Memory;
  using Array = typename Team::Array;
  using Policy = typename Team::Policy;
  static constexpr int k = Team::k, g = Team::g, rows = Team::rows;

  DenseCellKernel(int D, const std::vector<T>& W, const std::vector<T>& bias)
      : D_(D),
        width_(in_strips<T>(g * D)),
        Wt_("longscan::cell::weights", static_cast<std::int64_t>(D) * width_),
        W_("longscan::cell::weights", static_cast<std::int64_t>(g) * D * D),
        bias_("longscan::cell::bias", static_cast<std::int64_t>(g) * D)
#ifdef KOKKOS_ENABLE_CUDA
        ,
        cuda_(D, W, bias)
#endif
  {
    const auto Wt = Kokkos::create_mirror_view(Wt_), Wh = Kokkos::create_mirror_view(W_),
               b = Kokkos::create_mirror_view(bias_);
    for (int i = 0; i < g * D; ++i) {
      b(i) = bias[i];
      for (int j = 0; j < D; ++j) {
        Wh(static_cast<std::int64_t>(i) * D + j) = W[static_cast<std::size_t>(i) * D + j];
        Wt(packed_index<T>(D, j, i)) = W[static_cast<std::size_t>(i) * D + j];
      }
    }
    Kokkos::deep_copy(Wt_, Wt), Kokkos::deep_copy(W_, Wh), Kokkos::deep_copy(bias_, b);
  }

  int channels() const override { return D_; }
  int state() const override { return k; }
  int inputs() const override { return g; }
  bool mixes() const override { return true; }

  void run(const CellTrajectory<T>& path, const std::vector<CellSegment>& segments, T* starts, T* ends,
           bool keep) const override {
    const auto count = static_cast<std::int64_t>(segments.size());
    if (count == 0) return;
    reserve(list_, "longscan::cell::segments", count);
    copy_to_device(segments.data(), count, list_.data());
    const Kokkos::View<CellSegment*, Memory> list = list_;
#ifdef KOKKOS_ENABLE_CUDA
    if (cuda_.in_registers())
      cuda_.run(path, {.list = list.data(), .count = count}, starts, ends, nullptr, keep, true);
    else
      cuda_.run_in_step(path, list.data(), segments, starts, ends, keep, true);
    Space().fence();  // the host looks at ends
    return;
#endif
    const std::int64_t groups = (count + rows - 1) / rows;
    const DenseRun<Gates, T> run{path, list, count, starts, ends, keep, D_, width_, Wt_, bias_};
    auto policy = Policy(Space(), groups, is_host_space<Space> ? 1 : 256)
                      .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(run.bytes() + 2 * row_bytes)));
    Kokkos::parallel_for("longscan::cell::run", policy, run);
    Space().fence();  // the host looks at ends
  }

#ifdef KOKKOS_ENABLE_CUDA
  bool shoots_squares() const override { return cuda_.in_registers(); }
  std::int64_t side_by_side() const override { return cuda_.side_by_side(); }
  std::int64_t usual_warm_up() const override { return sizeof(T) == 8 ? 128 : cuda_.in_registers() ? 64 : 48; }
#else
  std::int64_t side_by_side() const override { return 32; }
#endif

  void shoot(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
             bool first) const override {
    if (grid.slots == 0) return;
#ifdef KOKKOS_ENABLE_CUDA
    if (cuda_.in_registers()) {
      DenseWork<T> work{.grid = grid, .count = grid.slots};
      if (first)
        work.initial = lanes.initial;
      else
        work.active = lanes.active;
      cuda_.run(path, work, lanes.starts, lanes.ends, lanes.squares, true, grid.slots <= cuda_.processors());
      return;
    }
#endif
    if (first) place_starts(grid, static_cast<std::int64_t>(k) * D_, lanes.initial, lanes.starts);
    std::vector<unsigned char> active(grid.slots, 1);
    if (!first) copy_to_host<unsigned char>(lanes.active, grid.slots, active.data());
    std::vector<CellSegment> segments;
    std::int64_t r = 0;
    for (std::int64_t slot = 0; slot < grid.slots; ++slot) {
      if (r + 1 < grid.runs && grid.on_host[r + 1].slot == slot) ++r;
      if (!active[slot]) continue;
      const SegmentRun& run = grid.on_host[r];
      CellSegment s{grid.begin(run, slot), grid.end(run, slot), slot, 0, -1, 0, D_};
      if (first && slot > run.slot) {
        s.warm_up = std::min(grid.warm_up, s.begin - run.begin);
        if (s.begin - run.begin <= grid.warm_up && run.exact) s.from = run.slot;
      }
      segments.push_back(s);
    }
    if (segments.empty()) return;
#ifdef KOKKOS_ENABLE_CUDA
    reserve(list_, "longscan::cell::segments", static_cast<std::int64_t>(segments.size()));
    copy_to_device(segments.data(), static_cast<std::int64_t>(segments.size()), list_.data());
    cuda_.run_in_step(path, list_.data(), segments, lanes.starts, lanes.ends, true, false);
#else
    run(path, segments, lanes.starts, lanes.ends, true);
#endif
  }

  void guess(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end) const override {
    const int D = D_, width = is_host_space<Space> ? D : 1, pieces = D / width;
    const Array bias = bias_;
    Kokkos::parallel_for(
        "longscan::cell::guess",
        Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>(begin * pieces, end * pieces),
        KOKKOS_LAMBDA(const std::int64_t index) {
          const std::int64_t t = index / pieces;
          const int c0 = static_cast<int>(index % pieces) * width;
          T* s = path.h + t * path.h_stride;
          for (int d = c0; d < c0 + width; ++d) {
            T xs[g], ps[g], h[k];
            for (int i = 0; i < g; ++i) xs[i] = path.x[t * path.x_stride + i * D + d], ps[i] = bias(i * D + d);
            for (int i = 0; i < k; ++i) h[i] = T(0);
            Gates::step(xs, ps, h);
            for (int i = 0; i < k; ++i) s[i * D + d] = h[i];
          }
        });
  }

  void linearize(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                 AffineMaps<T> maps, bool diagonal) const override {
    const DenseLinearize<Gates, T> work{path, begin, before, maps, diagonal, D_, width_, Wt_, W_, bias_};
    auto policy = Policy(Space(), end - begin, is_host_space<Space> ? 1 : 256)
                      .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(width_ * sizeof(T) + 2 * row_bytes)));
    if (end > begin) Kokkos::parallel_for("longscan::cell::linearize", policy, work);
    Space().fence();
  }

  // Sweeps: W_hh h of the tokens of some segments is one product, the rest goes value by value; where Jacobians are
  // not diagonal, what they are made of is kept, and D^3 a token are spent on their products.

  bool sweeps(bool diagonal) const override {
#ifdef KOKKOS_ENABLE_CUDA
    return diagonal || cuda_.folds();
#else
    return diagonal;
#endif
  }
  std::int64_t sweeps_at_once(bool diagonal) const override {
    const std::int64_t lanes = std::max(1024, Space().concurrency() / 4);  // a quarter of the threads hide the latency
    return std::max<std::int64_t>(1, diagonal ? lanes / D_ : lanes / 256);
  }
  std::int64_t longest_sweep(bool diagonal) const override {
    return std::max<std::int64_t>(1, sweep_bytes / token_bytes(diagonal) / sweeps_at_once(diagonal));
  }
  void fold(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
            const SweepArrays<T>& arrays, const SweepOptions& options) const override {
    for_stretches(path, grid, first, last, arrays, options, false);
  }
  void move(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
            const SweepArrays<T>& arrays, const SweepOptions& options) const override {
    for_stretches(path, grid, first, last, arrays, options, true);
  }

  std::int64_t token_bytes(bool diagonal) const {
    return static_cast<std::int64_t>(sizeof(T)) * D_ * (diagonal ? g + 1 : g + 1 + k * (g + k + 2));
  }

  /// A sweep over slots [first, last), as many together as memory is spent on.
  void for_stretches(const CellTrajectory<T>& path, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
                     const SweepArrays<T>& arrays, const SweepOptions& options, bool moving) const {
    if (!recurrent_) begin_sweeps();
    const std::int64_t size = static_cast<std::int64_t>(k) * D_;
    const std::int64_t most = std::max<std::int64_t>(1, sweep_bytes / token_bytes(options.diagonal));
    const auto run_of = [&](std::int64_t slot) {
      return grid.runs == 1 ? grid.first : grid.on_host[grid.index_of(slot, grid.on_host)];
    };
    for (std::int64_t slot = first; slot < last;) {
      const SegmentRun run = run_of(slot);
      const std::int64_t from = grid.begin(run, slot);
      std::int64_t end = grid.end(run, slot), next = slot + 1;
      for (; next < last; ++next) {
        const std::int64_t e = grid.end(run_of(next), next);
        if (e - from > most) break;
        end = e;
      }
      const std::int64_t tokens = end - from;
      reserve(before_, "longscan::cell::before", tokens * D_), reserve(p_, "longscan::cell::products", tokens * g * D_);
      gather_before(path, grid, slot, next, from, arrays.starts,
                    moving ? static_cast<const T*>(arrays.tails) : static_cast<const T*>(nullptr), size, D_,
                    before_.data());
      recurrent_->apply_at_once(before_.data(), tokens, p_.data());
      const SweepPath<T> sweep{path, p_.data() - from * g * D_, static_cast<std::int64_t>(g) * D_};
      if (options.diagonal && moving)
        move_lanes<DiagonalOf<Gates>, T, true>(sweep, grid, slot, next, diagonals_.data(), D_, arrays, options);
      else if (options.diagonal)
        fold_lanes<DiagonalOf<Gates>, T, true>(sweep, grid, slot, next, diagonals_.data(), D_, arrays, options);
      else
        full_stretch(sweep, grid, slot, next, from, tokens, arrays, options, moving);
      slot = next;
    }
  }

  void full_stretch(const SweepPath<T>& sweep, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
                    std::int64_t from, std::int64_t tokens, const SweepArrays<T>& arrays, const SweepOptions& options,
                    bool moving) const {
#ifdef KOKKOS_ENABLE_CUDA
    const std::int64_t size = static_cast<std::int64_t>(k) * D_, n = size;
    reserve(tangents_, "longscan::cell::tangents", tokens * tangent_values<Gates> * D_);
    reserve(ends_, "longscan::cell::ends", grid.slots * size),
        reserve(zeros_, "longscan::cell::ends", grid.slots * size);
    note_tangents<Gates, T>(sweep, grid, first, last, D_, arrays, options, moving, from, tangents_.data());
    if (!options.maps) return;
    if (options.how == Reshape::clamp) cuda_.clamp(tangents_.data(), tokens);
    T* const starts = zeros_.data();
    T* const ends = ends_.data();
    const T* const arriving = arrays.deltas;
    Kokkos::parallel_for(
        "longscan::cell::starts", Values(first * size, last * size), KOKKOS_LAMBDA(const std::int64_t i) {
          const std::int64_t slot = i / size;
          const SegmentRun run = grid.run_of(slot);
          starts[i] = !moving || (slot == run.slot && run.exact) ? T(0) : arriving[i];
        });
    if (!moving) {
      const AffineMaps<T> maps = arrays.maps;
      cuda_.fold(tangents_.data(), from, grid, first, last, maps);
      cuda_.run_tangents(tangents_.data(), from, grid, first, last, starts, ends, nullptr);
      Kokkos::parallel_for(
          "longscan::cell::ends", Values(first * size, last * size),
          KOKKOS_LAMBDA(const std::int64_t i) { maps.slot(i / size)[i % size * (n + 1) + n] = ends[i]; });
      return;
    }
    reserve(deltas_, "longscan::cell::deltas", tokens * size);
    cuda_.run_tangents(tangents_.data(), from, grid, first, last, starts, ends, deltas_.data());
    const T* const deltas = deltas_.data();
    const CellTrajectory<T> path = sweep.path;
    Kokkos::parallel_for(
        "longscan::cell::add", Values(0, tokens * size), KOKKOS_LAMBDA(const std::int64_t i) {
          const std::int64_t t = i / size;
          T* h = path.at(from + t) + (i - t * size);
          const T moved = *h + deltas[i];
          if (!is_non_finite(moved)) *h = moved;
        });
#else
    (void)sweep, (void)grid, (void)first, (void)last, (void)from, (void)tokens, (void)arrays, (void)options,
        (void)moving;
#endif
  }

  void begin_sweeps() const {
    const auto W = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), W_);
    const auto bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bias_);
    recurrent_ = std::make_unique<Projection<T>>(g * D_, D_, std::vector<T>(W.data(), W.data() + W.size()),
                                                 std::vector<T>(bias.data(), bias.data() + bias.size()));
    std::vector<T> diagonals(static_cast<std::size_t>(g) * D_);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(g) * D_; ++i) diagonals[i] = W(i * D_ + i % D_);
    diagonals_ = on_device("longscan::cell::weights", diagonals);
  }

  std::vector<GrowthSums> look(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                               const T* before) const override {
    // One tangent vector along the path: v <- A v / |A v|.
    GrowthSums sums;
    if (begin == end) return {sums};
    if (!is_host_space<Space>) return {look_on_device(path, begin, end, before)};
    // in double on the host
    const std::int64_t n = static_cast<std::int64_t>(k) * D_, tokens = end - begin;
    // one copy, from the lowest address on; token t is then at (t - lowest) * stride
    const auto to_host = [&](const T* from, std::int64_t stride, std::int64_t size) {
      std::vector<T> host((tokens - 1) * std::abs(stride) + size);
      copy_to_host<T>(from + (stride < 0 ? end - 1 : begin) * stride, static_cast<std::int64_t>(host.size()),
                      host.data());
      return host;
    };
    const std::vector<T> h = to_host(path.h, path.h_stride, n), x = to_host(path.x, path.x_stride, g * D_);
    const auto at = [&](const std::vector<T>& host, std::int64_t stride, std::int64_t t) {
      return host.data() + (stride < 0 ? t - (tokens - 1) : t) * stride;
    };
    std::vector<T> first(n);
    copy_to_host<T>(before, n, first.data());
    const auto Wt = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), Wt_);
    const auto bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bias_);
    constexpr int together = strip_columns<T>;
    const int strips = (g * D_ + together - 1) / together;
    std::vector<double> v(n), next(n), p(strips * together), Wv(p);
    for (std::int64_t i = 0; i < n; ++i) v[i] = 1 / std::sqrt(static_cast<double>(n)) * (i % 3 == 1 ? -1 : 1);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const T *s = t == 0 ? first.data() : at(h, path.h_stride, t - 1), *x_t = at(x, path.x_stride, t);
      for (int strip = 0; strip < strips; ++strip) {  // of W's rows, whose sums go side by side
        const T* column = &Wt(packed_index<T>(D_, 0, strip * together));
        double sum[together] = {}, tangent[together] = {};
        for (int j = 0; j < D_; ++j, column += together)
          for (int i = 0; i < together; ++i)
            sum[i] += double(column[i]) * double(s[j]), tangent[i] += double(column[i]) * v[j];
        std::copy_n(sum, together, &p[strip * together]), std::copy_n(tangent, together, &Wv[strip * together]);
      }
      for (int i = 0; i < g * D_; ++i) p[i] += double(bias(i));
      double size = 0;
      for (int d = 0; d < D_; ++d) {
        double xs[g], ps[g], hs[k], dp[k * g], ds[k * k];
        for (int i = 0; i < g; ++i) xs[i] = double(x_t[i * D_ + d]), ps[i] = p[i * D_ + d];
        for (int i = 0; i < k; ++i) hs[i] = double(s[i * D_ + d]);
        Gates::derivatives(xs, ps, hs, dp, ds);
        for (int i = 0; i < k; ++i) {
          double sum = 0;
          for (int j = 0; j < g; ++j) sum += dp[i * g + j] * Wv[j * D_ + d];
          for (int j = 0; j < k; ++j) sum += ds[i * k + j] * v[j * D_ + d];
          next[i * D_ + d] = sum, size += sum * sum;
        }
      }
      const double growth = size > 0 ? 0.5 * std::log(size) : -700;
      sums.add(growth, growth);
      for (std::int64_t i = 0; i < n; ++i)
        v[i] = size > 0 ? next[i] / std::sqrt(size) : 1 / std::sqrt(static_cast<double>(n));
    }
    return {sums};
  }

  GrowthSums look_on_device(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end,
                            const T* before) const {
    SharedVector<GrowthSums> sums(1);
    this->begin_look();
    look_ahead(path, begin, end, before, sums.data());
    Space().fence(), wait_for_look();  // the host reads the sums
    return sums[0];
  }

  void look_ahead(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                  GrowthSums* out) const override {
    const std::size_t bytes = sizeof(T) * (2 * g + 3 * k) * static_cast<std::size_t>(D_);
    const int level = bytes < (std::size_t{40} << 10) ? 0 : 1;
#ifdef KOKKOS_ENABLE_CUDA
    check_cuda(cudaStreamWaitEvent(stream_, ready_, 0), "an event");
    if (cuda_.folds()) {
      cuda_.look(stream_, path, begin, end, before, out);
      check_cuda(cudaEventRecord(looked_, stream_), "looking along a path");
      return;
    }
    const Space& space = *beside_;
#else
    const Space space;
#endif
    const auto policy = Policy(space, 1, is_host_space<Space> ? 1 : 256)
                            .set_scratch_size(level, Kokkos::PerTeam(static_cast<int>(bytes + 2 * row_bytes)));
    Kokkos::parallel_for("longscan::cell::look", policy,
                         DenseLook<Gates, T>{path, begin, end, before, D_, level, bytes, Wt_, bias_, out});
#ifdef KOKKOS_ENABLE_CUDA
    check_cuda(cudaEventRecord(looked_, stream_), "looking along a path");
#endif
  }
  void wait_for_look() const override {
#ifdef KOKKOS_ENABLE_CUDA
    if (looked_) check_cuda(cudaEventSynchronize(looked_), "looking along a path");
#endif
  }

#ifdef KOKKOS_ENABLE_CUDA
  ~DenseCellKernel() override {
    if (!looked_) return;
    beside_.reset();
    cudaEventDestroy(ready_), cudaEventDestroy(looked_), cudaStreamDestroy(stream_);
  }
  DenseCellKernel(const DenseCellKernel&) = delete;
  DenseCellKernel& operator=(const DenseCellKernel&) = delete;
  /// What is looked at goes to a stream of its own, which waits for the kernels launched by now.
  void begin_look() const override {
    if (!looked_) {
      check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
      check_cuda(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "an event");
      check_cuda(cudaEventCreateWithFlags(&looked_, cudaEventDisableTiming), "an event");
      if (!cuda_.folds()) beside_ = std::make_unique<Space>(stream_);
    }
    check_cuda(cudaEventRecord(ready_, Space().cuda_stream()), "an event");
  }
#endif

 private:
  using Values = Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>>;
  int D_, width_;
  Array Wt_, W_, bias_;
  mutable DeviceArray<CellSegment> list_;
  mutable std::unique_ptr<Projection<T>> recurrent_;  ///< W_hh h + b_hh of many tokens
  mutable DeviceArray<T> diagonals_, before_, p_, tangents_, ends_, zeros_, deltas_;
#ifdef KOKKOS_ENABLE_CUDA
  mutable cudaStream_t stream_ = nullptr;
  mutable std::unique_ptr<Space> beside_;  ///< on that stream; kept, since making one allocates and ending it waits
  mutable cudaEvent_t ready_ = nullptr, looked_ = nullptr;
  DenseCellCuda<Gates, T> cuda_;
#endif
};

}  // namespace

template <class T>
std::unique_ptr<CellKernel<T>> make_dense_cell_kernel(DenseCell cell, int channels, const std::vector<T>& weight_hh,
                                                      const std::vector<T>& bias_hh) {
  switch (cell) {
    case DenseCell::rnn_tanh:
      return std::make_unique<DenseCellKernel<RnnTanhGates, T>>(channels, weight_hh, bias_hh);
    case DenseCell::rnn_relu:
      return std::make_unique<DenseCellKernel<RnnReluGates, T>>(channels, weight_hh, bias_hh);
    case DenseCell::gru:
      return std::make_unique<DenseCellKernel<GruGates, T>>(channels, weight_hh, bias_hh);
    default:
      return std::make_unique<DenseCellKernel<LstmGates, T>>(channels, weight_hh, bias_hh);
  }
}

template std::unique_ptr<CellKernel<float>> make_dense_cell_kernel(DenseCell, int, const std::vector<float>&,
                                                                   const std::vector<float>&);
template std::unique_ptr<CellKernel<double>> make_dense_cell_kernel(DenseCell, int, const std::vector<double>&,
                                                                    const std::vector<double>&);

}  // namespace longscan
