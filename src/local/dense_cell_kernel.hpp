// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels for torch's recurrent cells, whose channels mix through W_hh. Segments go in step, so that a token of all of
// them is one matrix product.
#include <memory>
#include <vector>

#include "local/cell_kernel.hpp"

namespace longscan {

enum class DenseCell : int { rnn_tanh, rnn_relu, gru, lstm };

/// weight_hh [gates * D][D] and bias_hh [gates * D] as torch stacks them, on the host.
template <class T>
std::unique_ptr<CellKernel<T>> make_dense_cell_kernel(DenseCell cell, int channels, const std::vector<T>& weight_hh,
                                                      const std::vector<T>& bias_hh);

}  // namespace longscan
