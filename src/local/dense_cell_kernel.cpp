// SPDX-License-Identifier: Apache-2.0
#include "local/dense_cell_kernel.hpp"

#include <cmath>

#include "core/cells.hpp"
#include "core/delta_chunk.hpp"
#include "core/device_memory.hpp"
#include "local/dense_cell_cuda.hpp"
#include "local/lanes.hpp"

namespace longscan {
namespace {

template <class Gates, class T>
class DenseCellKernel final : public CellKernel<T> {
 public:
  using Space = Kokkos::DefaultExecutionSpace;
  using Memory = typename Space::memory_space;
  using Array = Kokkos::View<T*, Memory>;
  using Policy = Kokkos::TeamPolicy<Space, Kokkos::IndexType<std::int64_t>>;
  using Member = typename Policy::member_type;
  static constexpr int k = Gates::state, g = Gates::gates;
  /// Segments in step: rows of one product.
  static constexpr int rows = is_host_space<Space> ? 32 : 1;

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
    Kokkos::View<CellSegment*, Memory> list(Kokkos::view_alloc(Kokkos::WithoutInitializing, "longscan::cell::segments"),
                                            count);
    Kokkos::deep_copy(list,
                      Kokkos::View<const CellSegment*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
                          segments.data(), count));
#ifdef KOKKOS_ENABLE_CUDA
    if (cuda_.in_registers())
      cuda_.run(path, {list.data(), {}, nullptr, count}, starts, ends, nullptr, keep, true);
    else
      cuda_.run_in_step(path, list.data(), segments, starts, ends, keep, true);
    Space().fence();  // the list is freed on return
    return;
#endif
    const std::int64_t groups = (count + rows - 1) / rows;
    const Run run{path, list, count, starts, ends, keep, D_, width_, Wt_, bias_};
    auto policy = Policy(Space(), groups, is_host_space<Space> ? 1 : 256)
                      .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(run.bytes() + 2 * row_bytes)));
    Kokkos::parallel_for("longscan::cell::run", policy, run);
    Space().fence();  // the list is freed on return
  }

#ifdef KOKKOS_ENABLE_CUDA
  bool shoots_squares() const override { return cuda_.in_registers(); }
  std::int64_t side_by_side() const override { return cuda_.side_by_side(); }
  std::int64_t usual_warm_up() const override { return sizeof(T) == 8 ? 128 : 64; }
#else
  std::int64_t side_by_side() const override { return 32; }
#endif

  void shoot(const CellTrajectory<T>& path, const SegmentGrid& grid, const ShootingArrays<T>& lanes,
             bool first) const override {
    if (grid.slots == 0) return;
#ifdef KOKKOS_ENABLE_CUDA
    if (cuda_.in_registers()) {
      cuda_.run(path, {nullptr, grid, first ? nullptr : lanes.active, grid.slots}, lanes.starts, lanes.ends,
                lanes.squares, true, false);
      return;
    }
#endif
    std::vector<SegmentRun> runs(grid.runs, grid.first);
    if (grid.runs > 1) copy_to_host<SegmentRun>(grid.table, grid.runs, runs.data());
    std::vector<unsigned char> active(grid.slots, 1);
    if (!first) copy_to_host<unsigned char>(lanes.active, grid.slots, active.data());
    std::vector<CellSegment> segments;
    std::int64_t r = 0;
    for (std::int64_t slot = 0; slot < grid.slots; ++slot) {
      if (r + 1 < grid.runs && runs[r + 1].slot == slot) ++r;
      if (!active[slot]) continue;
      const SegmentRun& run = runs[r];
      CellSegment s{grid.begin(run, slot), grid.end(run, slot), slot, 0, -1, 0, D_};
      if (first && slot > run.slot) {
        s.warm_up = std::min(grid.warm_up, s.begin - run.begin);
        if (s.begin - run.begin <= grid.warm_up && run.exact) s.from = run.slot;
      }
      segments.push_back(s);
    }
    if (segments.empty()) return;
#ifdef KOKKOS_ENABLE_CUDA
    const auto list = on_device("longscan::cell::segments", segments);
    cuda_.run_in_step(path, list.data(), segments, lanes.starts, lanes.ends, true, false);
    Space().fence();  // the list is freed on return
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
    const Linearize work{path, begin, before, maps, diagonal, D_, width_, Wt_, W_, bias_};
    auto policy = Policy(Space(), end - begin, is_host_space<Space> ? 1 : 256)
                      .set_scratch_size(1, Kokkos::PerTeam(static_cast<int>(width_ * sizeof(T) + 2 * row_bytes)));
    if (end > begin) Kokkos::parallel_for("longscan::cell::linearize", policy, work);
    Space().fence();
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
    const auto W = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), W_);
    const auto bias = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bias_);
    std::vector<double> v(n), next(n), p(g * D_), Wv(g * D_);
    for (std::int64_t i = 0; i < n; ++i) v[i] = 1 / std::sqrt(static_cast<double>(n)) * (i % 3 == 1 ? -1 : 1);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const T *s = t == 0 ? first.data() : at(h, path.h_stride, t - 1), *x_t = at(x, path.x_stride, t);
      for (int i = 0; i < g * D_; ++i) {
        double sum = 0, tangent = 0;
        const T* row = W.data() + static_cast<std::int64_t>(i) * D_;
        for (int j = 0; j < D_; ++j) sum += double(row[j]) * double(s[j]), tangent += double(row[j]) * v[j];
        p[i] = sum + double(bias(i)), Wv[i] = tangent;
      }
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
    look_ahead(path, begin, end, before, sums.data());
    Space().fence();  // the host reads the sums
    return sums[0];
  }

  void look_ahead(const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
                  GrowthSums* out) const override {
    const std::size_t bytes = sizeof(T) * (2 * g + 3 * k) * static_cast<std::size_t>(D_);
    const int level = bytes < (std::size_t{40} << 10) ? 0 : 1;
    const auto policy = Policy(Space(), 1, is_host_space<Space> ? 1 : 256)
                            .set_scratch_size(level, Kokkos::PerTeam(static_cast<int>(bytes + 2 * row_bytes)));
    Kokkos::parallel_for("longscan::cell::look", policy,
                         Look{path, begin, end, before, D_, level, bytes, Wt_, bias_, out});
  }

  /// On one team.
  struct Look {
    CellTrajectory<T> path;
    std::int64_t begin, end;
    const T* before;
    int D, level;
    std::size_t bytes;
    Array Wt, bias;
    GrowthSums* out;

    KOKKOS_FUNCTION void operator()(const Member& member) const {
      T* p = static_cast<T*>(member.team_scratch(level).get_shmem_aligned(bytes, row_bytes));
      T *Wv = p + g * D, *v = Wv + g * D, *next = v + k * D, *s = next + k * D;
      const int rank = member.team_rank(), team = member.team_size();
      const T even = T(1) / T(sqrt(static_cast<double>(k * D)));
      for (int i = rank; i < k * D; i += team) v[i] = i % 3 == 1 ? -even : even;
      GrowthSums sums;
      for (std::int64_t t = begin; t < end; ++t) {
        const T *from = t == begin ? before : path.h + (t - 1) * path.h_stride, *x = path.x + t * path.x_stride;
        for (int i = rank; i < k * D; i += team) s[i] = from[i];
        member.team_barrier();
        for (int j = rank; j < g * D; j += team) {
          const T* column = &Wt[packed_index<T>(D, 0, j)];
          constexpr int together = 8;  // loads in flight
          T sum[together] = {bias[j]}, tangent[together] = {};
          int e = 0;
          for (; e + together <= D; e += together) {
            LONGSCAN_UNROLL
            for (int i = 0; i < together; ++i) {
              const T weight = column[(e + i) * strip_columns<T>];
              sum[i] = fused(weight, s[e + i], sum[i]), tangent[i] = fused(weight, v[e + i], tangent[i]);
            }
          }
          for (; e < D; ++e) {
            const T weight = column[e * strip_columns<T>];
            sum[0] = fused(weight, s[e], sum[0]), tangent[0] = fused(weight, v[e], tangent[0]);
          }
          LONGSCAN_UNROLL
          for (int half = together / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) sum[i] += sum[i + half], tangent[i] += tangent[i + half];
          p[j] = sum[0], Wv[j] = tangent[0];
        }
        member.team_barrier();
        T size = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(member, D),
            [&](const int d, T& squares) {
              T xs[g], ps[g], hs[k], dp[k * g], ds[k * k];
              for (int i = 0; i < g; ++i) xs[i] = x[i * D + d], ps[i] = p[i * D + d];
              for (int i = 0; i < k; ++i) hs[i] = s[i * D + d];
              Gates::derivatives(xs, ps, hs, dp, ds);
              for (int i = 0; i < k; ++i) {
                T sum = 0;
                for (int j = 0; j < g; ++j) sum += dp[i * g + j] * Wv[j * D + d];
                for (int j = 0; j < k; ++j) sum += ds[i * k + j] * v[j * D + d];
                next[i * D + d] = sum, squares += sum * sum;
              }
            },
            size);
        const double growth = size > T(0) ? 0.5 * static_cast<double>(log(size)) : -700;
        const T scale = size > T(0) ? T(1) / T(sqrt(size)) : T(0);
        sums.add(growth, growth);
        member.team_barrier();
        for (int i = rank; i < k * D; i += team) v[i] = size > T(0) ? next[i] * scale : even;
      }
      if (rank == 0) *out = sums;
    }
  };

  struct Run {
    CellTrajectory<T> path;
    Kokkos::View<CellSegment*, Memory> list;
    std::int64_t count;
    T *starts, *ends;
    bool keep;
    int D, width;
    Array Wt, bias;

    KOKKOS_FUNCTION std::size_t bytes() const {
      return sizeof(T) * rows * (static_cast<std::size_t>(k) * D + width) + row_bytes;
    }

    KOKKOS_FUNCTION void operator()(const Member& member) const {
      if constexpr (is_host_space<Space>)
        work(HostLanes<T>{}, member);
      else
        work(DeviceLanes<T, Member>{member}, member);
    }

    template <class Lanes>
    KOKKOS_FUNCTION void work(const Lanes& lanes, const Member& member) const {
      const std::int64_t first = member.league_rank() * rows;
      const int n = static_cast<int>(count - first < rows ? count - first : rows);
      const int size = k * D;
      T* states = static_cast<T*>(member.team_scratch(1).get_shmem_aligned(bytes(), row_bytes));
      T* p = states +
             (static_cast<std::int64_t>(rows) * size * sizeof(T) + row_bytes - 1) / row_bytes * row_bytes / sizeof(T);
      std::int64_t longest = 0, warmest = 0;
      for (int j = 0; j < n; ++j) {
        const CellSegment& s = list(first + j);
        longest = s.end - s.begin > longest ? s.end - s.begin : longest;
        warmest = s.warm_up > warmest ? s.warm_up : warmest;
        const std::int64_t from = s.warm_up > 0 ? s.from : s.slot;
        lanes.each(size, [&](int i) { states[j * size + i] = from >= 0 ? starts[from * size + i] : T(0); });
      }
      lanes.sync();
      for (std::int64_t i = -warmest; i < longest; ++i) {
        lanes.packed_product(n, width, D, states, size, Wt.data(), p, width, false);
        lanes.sync();
        for (int j = 0; j < n; ++j) {
          const CellSegment& s = list(first + j);
          const std::int64_t t = s.begin + i;
          if (i < -s.warm_up || t >= s.end) continue;
          T* state = states + j * size;
          if (i == 0 && s.warm_up > 0) lanes.each(size, [&](int m) { starts[s.slot * size + m] = state[m]; });
          const T* x = path.x + t * path.x_stride;
          T* out = path.h + t * path.h_stride;
          const bool write = keep && i >= 0;
          const T* pre = p + j * width;
          const T* b = bias.data();
          lanes.sync();
          lanes.each(D, [&](int d) {
            T xs[g], ps[g], h[k];
            for (int m = 0; m < g; ++m) xs[m] = x[m * D + d], ps[m] = pre[m * D + d] + b[m * D + d];
            for (int m = 0; m < k; ++m) h[m] = state[m * D + d];
            Gates::step(xs, ps, h);
            for (int m = 0; m < k; ++m) state[m * D + d] = h[m];
            if (write)
              for (int m = 0; m < k; ++m) out[m * D + d] = h[m];
          });
          if (t + 1 == s.end) {
            lanes.sync();
            lanes.each(size, [&](int m) { ends[s.slot * size + m] = state[m]; });
          }
        }
        lanes.sync();
      }
      for (int j = 0; j < n; ++j) {  // a segment of no tokens passes its state on
        const CellSegment& s = list(first + j);
        if (s.end == s.begin) lanes.each(size, [&](int m) { ends[s.slot * size + m] = states[j * size + m]; });
      }
    }
  };

  struct Linearize {
    CellTrajectory<T> path;
    std::int64_t begin;
    const T* before;
    AffineMaps<T> maps;
    bool diagonal;
    int D, width;
    Array Wt, W, bias;

    KOKKOS_FUNCTION void operator()(const Member& member) const {
      if constexpr (is_host_space<Space>)
        work(HostLanes<T>{}, member);
      else
        work(DeviceLanes<T, Member>{member}, member);
    }

    template <class Lanes>
    KOKKOS_FUNCTION void work(const Lanes& lanes, const Member& member) const {
      T* p = static_cast<T*>(member.team_scratch(1).get_shmem_aligned(width * sizeof(T), row_bytes));
      const std::int64_t i = member.league_rank(), t = begin + i;
      const T* s = i == 0 ? before : path.h + (t - 1) * path.h_stride;
      const T* x = path.x + t * path.x_stride;
      const T* after = path.h + t * path.h_stride;
      const int n = k * D;
      lanes.packed_product(1, width, D, s, n, Wt.data(), p, width, false);
      lanes.sync();
      lanes.each(D, [&](int d) {
        T xs[g], ps[g], h[k], dp[k * g], ds[k * k];
        for (int m = 0; m < g; ++m) xs[m] = x[m * D + d], ps[m] = p[m * D + d] + bias(m * D + d);
        for (int m = 0; m < k; ++m) h[m] = s[m * D + d];
        Gates::derivatives(xs, ps, h, dp, ds);
        Gates::step(xs, ps, h);
        for (int m = 0; m < k; ++m) {
          const T minus_r = h[m] - after[m * D + d];
          const auto entry = [&](int e) {  // of W_hh seen through the gates
            T sum = 0;
            for (int q = 0; q < g; ++q) sum += dp[m * g + q] * W((static_cast<std::int64_t>(q) * D + d) * D + e);
            return sum;
          };
          if (diagonal) {
            T* map = maps.slot(i * n + m * D + d);
            map[0] = (m == 0 ? entry(d) : T(0)) + ds[m * k + m], map[1] = minus_r;
          } else {
            T* row = maps.slot(i) + static_cast<std::int64_t>(m * D + d) * (n + 1);
            for (int e = 0; e < D; ++e) row[e] = entry(e);
            for (int e = D; e < n; ++e) row[e] = T(0);
            for (int q = 0; q < k; ++q) row[q * D + d] += ds[m * k + q];
            row[n] = minus_r;
          }
        }
      });
    }
  };

 private:
  int D_, width_;
  Array Wt_, W_, bias_;
#ifdef KOKKOS_ENABLE_CUDA
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
