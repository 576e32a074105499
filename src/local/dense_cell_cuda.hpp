// SPDX-License-Identifier: Apache-2.0
#pragma once
// Recurrences whose channels mix, on NVIDIA devices. Where a cell is small, a few warps hold W_hh in their registers
// and run a segment by themselves; where it is not, all segments go in step and a token of all of them is one matrix
// product of cuBLAS. Launches on Kokkos' stream; no fence.
#include "core/device_memory.hpp"
#include "local/cell_kernel.hpp"

namespace longscan {

#ifdef KOKKOS_ENABLE_CUDA

/// How float32 products are made where cuBLAS makes them.
enum class BatchProducts : int {
  plain,     ///< float32
  three,     ///< on tensor cores, operands as sums of two TF32 numbers: what the sums round off is 3e-5 of the RMS
  one_tf32,  ///< on tensor cores, operands rounded to TF32: not float32 accuracy
};

/// Segments to run: a list on the device, or, if that is null, those of a grid.
template <class T>
struct DenseWork {
  const CellSegment* list = nullptr;
  SegmentGrid grid;
  const T* initial = nullptr;             ///< as in ShootingArrays: all slots, from there or after warm-ups; null: from
  const unsigned char* active = nullptr;  ///< starts, those that are active, or, if this is null, all
  std::int64_t count = 0;
  std::int64_t first = 0;  ///< slot of the grid that index 0 is
};

/// What a token does to a delta where channels mix: delta'_m = sum_q dp[m][q] (W_q delta_0) + sum_j ds[m][j] delta_j -
/// r_m, value by value. The numbers of a token: dp [state][gates], ds [state][state], -r [state], each [channels].
template <class Gates>
inline constexpr int tangent_values = Gates::state*(Gates::gates + Gates::state + 1);

template <class Gates, class T>
class DenseCellCuda {
 public:
  /// W [gates * D][D] row-major and bias [gates * D], on the host.
  DenseCellCuda(int D, const std::vector<T>& W, const std::vector<T>& bias);
  /// W_hh fits into registers.
  bool in_registers() const { return in_registers_; }
  /// Segments that the device runs at once, and its multiprocessors: so few are run as fast as can be.
  std::int64_t side_by_side() const;
  static std::int64_t processors() { return Kokkos::Cuda().cuda_device_prop().multiProcessorCount; }

  /// In registers. `alone`: few segments, as fast as one token after another can be, else as many tokens a second as
  /// can be (other bits). squares [slots][D] may be null.
  void run(const CellTrajectory<T>& path, const DenseWork<T>& work, T* starts, T* ends, double* squares, bool keep,
           bool alone) const;
  /// In step; `segments` is the list in `work` on the host. `alone`: the bits of a segment do not depend on how many
  /// there are.
  void run_in_step(const CellTrajectory<T>& path, const CellSegment* list, const std::vector<CellSegment>& segments,
                   T* starts, T* ends, bool keep, bool alone) const;

  /// CellKernel::look_ahead where `folds`, on `stream`.
  void look(cudaStream_t stream, const CellTrajectory<T>& path, std::int64_t begin, std::int64_t end, const T* before,
            GrowthSums* out) const;

  /// Full Jacobians: `tangents` [tokens][tangent_values][D], of the part's tokens from `from` on.
  bool folds() const { return D_ <= fold_width; }
  /// dp and ds scaled so that no row sum of a token's |A| exceeds 1.
  void clamp(T* tangents, std::int64_t tokens) const;
  /// Maps of slots [first, last) but for their constants: the products of the Jacobians.
  void fold(const T* tangents, std::int64_t from, const SegmentGrid& grid, std::int64_t first, std::int64_t last,
            AffineMaps<T> maps) const;
  /// Deltas along slots [first, last) from those in `starts` [slots][state][D] to `ends`; all of them to `deltas`
  /// [tokens][state][D], unless that is null.
  void run_tangents(const T* tangents, std::int64_t from, const SegmentGrid& grid, std::int64_t first,
                    std::int64_t last, T* starts, T* ends, T* deltas) const;

 private:
  static constexpr int fold_width = 64;

  void run_group(const CellTrajectory<T>& path, const CellSegment* list, const CellSegment* host, std::int64_t count,
                 std::int64_t padded, T* starts, T* ends, bool keep, BatchProducts made) const;

  int D_;
  bool in_registers_ = false;
  DeviceArray<T> together_, alone_, bias_;    ///< W_hh as threads take it, for many segments and for few; the bias
  DeviceArray<T> W_, W_by_output_, W_split_;  ///< for cuBLAS: of a few rows, of a batch, of split operands
  DeviceArray<T> by_input_, no_bias_;         ///< W_hh [gates][fold_width][fold_width], input before output; zeros
  mutable DeviceArray<T> states_, split_, products_;
};

/// For measurements: how float32 products are made in segments that go in step.
BatchProducts& batch_products();

#endif

}  // namespace longscan
