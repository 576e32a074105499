// SPDX-License-Identifier: Apache-2.0
#pragma once
// The delta rule on Hopper's tensor cores (sm_90a): 16-bit inputs, K and V of 64 to 128, or K of 136 to 256 and V from
// 64 on without decays a channel; chunks of 64 tokens. Raw pointers and a stream only, so that any caller can use it.
// All calls are asynchronous unless they say otherwise; none allocates.
//
//     S_t = S_(t-1) D_t (I - beta_t k_t k_tᵀ) + eta_t v_t k_tᵀ,   o_t = scale S_t q_t
//
// D_t is one decay a head or a channel, e^log_decay, or 1.
//
// Products have fp16 operands and fp32 sums, the state is fp32, the inverse of a chunk is fp32 or hi + lo halves. bf16
// inputs are converted to fp16: exact for 6e-5 <= |x| <= 65504. What overflows ends as infinity or NaN in the state or
// the outputs and is reported in HopperCounts::bad; the caller then takes another path.
#include <cuda_runtime_api.h>

#include <cstdint>

namespace longscan::hopper {

enum class Type : std::int32_t { none, f64, f32, f16, bf16 };

/// Element [t][h][i] is at data + t * token_stride + h * head_stride + i, in elements. Vectors must start at multiples
/// of 16 bytes.
struct TokenVectors {
  const void* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
};

/// Element [t][h], or [t][h][i] behind it; none: not there.
struct TokenScalars {
  const void* data = nullptr;
  Type type = Type::none;
  std::int64_t token_stride = 0, head_stride = 0;
};

/// Element S[v][k] is at data + k * k_stride + v * v_stride; nullptr: none.
struct State {
  float* data = nullptr;
  std::int64_t k_stride = 1, v_stride = 1;
};

enum TaskFlags : std::int32_t {
  from_identity = 1,  ///< starts from S = I, not from `from`: the result is P, element P[v][k]
  without_values = 2  ///< v = 0
};

/// One piece of work: tokens [begin, end) of one head, from one state to the next.
struct Task {
  std::int64_t begin = 0, end = 0;
  std::int32_t head = 0;
  std::int32_t flags = 0;
  State from;                  ///< the state before; nullptr is zero
  State to;                    ///< the state after
  std::int64_t probe_at = -1;  ///< token before which the state is also copied to `probe`
  State probe;
};

struct Counts {
  std::int32_t bad = 0;       ///< 1: something was not finite
  std::int32_t breaches = 0;  ///< tokens with beta |k|² > 2; with erase_undecayed > 1 + e^log_decay
};

struct Pass {
  Type type = Type::bf16;  ///< of q, k, v, o
  TokenVectors q, k, v;
  std::int64_t tokens = 0;  ///< of the arrays; no task goes beyond
  std::int32_t heads = 0;   ///< of v
  TokenScalars beta, eta;   ///< eta: none is beta
  void* o = nullptr;        ///< nullptr: no outputs
  std::int64_t o_token_stride = 0, o_head_stride = 0;
  std::int32_t group = 1;  ///< heads of v to one head of q and k
  float scale = 1;
  const Task* tasks = nullptr;  ///< on the device
  std::int32_t task_count = 0;
  Counts* counts = nullptr;                 ///< on the device, one a task; nullptr: not wanted
  std::int32_t d_key = 128, d_value = 128;  ///< of 64 to 128; what is not 64 or 128 is padded on chip
  TokenScalars log_decay;                   ///< natural logarithms, <= 0, also -infinity (forgets all); none: no decay
  bool channel_decay = false;  ///< log_decay[t][h] has a number a channel; rows must start at multiples of 16 bytes
  bool erase_undecayed = false;  ///< with log_decay a head: S (D - beta k kᵀ) for S D (I - beta k kᵀ), D = e^log_decay
  /// d > 0 says that in each run of 2 d tasks, numbers i and i + d have the same begin, end, head and probe_at (a map's
  /// P and L, say), so that they can share their work on the keys: without outputs, K, V <= 64 and decays a channel
  /// they do.
  std::int32_t pair_distance = 0;
};

/// True if the current device and these shapes can take this path; d_key and d_value must be the pass's.
bool applies(int device_major, int d_key, int d_value, const Pass& pass);

/// In any order. A task without tokens copies its state.
cudaError_t run_pass(const Pass& pass, cudaStream_t stream);

/// norms[i] = Frobenius norm of matrix i, of `elements` floats in a row; matrices are `stride` floats apart.
cudaError_t matrix_norms(const float* matrices, std::int64_t stride, int count, float* norms, cudaStream_t stream,
                         int elements = 128 * 128);

/// A run of maps: states[i + 1] = states[i] P[i] + L[i], i < maps. Matrices [V][K], K contiguous.
struct Chain {
  const float *P, *L;
  float* states;  ///< maps + 1 of them; the first is given
  std::int64_t map_stride, state_stride;
  std::int32_t maps;
};
cudaError_t run_chains(const Chain* chains, int count, cudaStream_t stream, int d_key = 128, int d_value = 128);

/// Tasks that one multiprocessor works on at a time: `plan_segments` wants their number in all.
/// With more than one CTA a task, divide by these.
int tasks_at_once(int d_key, int d_value, bool channel_decay = false);

/// CTAs that share the rows of one task's state: more than one only for keys of more than 128 elements.
int ctas_of_task(int d_key, int d_value);

/// How one head's T tokens are cut so that every multiprocessor (every place for a task) has one segment.
struct Segments {
  std::int64_t tokens = 0;  ///< in a segment, a multiple of 64
  std::int32_t count = 1;
};
#ifdef LONGSCAN_HOPPER_PROFILE
/// Cycles by role and place, of CTA 0, since the last call.
void print_profile();
void print_channel_profile();
void print_wide_profile();
#endif

Segments plan_segments(std::int64_t tokens, int heads, int multiprocessors);

}  // namespace longscan::hopper
