// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

/// Longscan: recurrences over sequences that are cut over MPI ranks.
///
/// Symbols, the same in every file (those of the papers):
///   T tokens, H heads, K = d_key, V = d_value, C tokens of a chunk
///   q, k [T,H,K]; v [T,H,V]; beta (erase strength), eta (write strength), log_decay
///   S [V,K] the state of a head; a run of tokens is the map S -> S P + L
namespace longscan {

/// Floating-point types that files may hold. Values are stored in native byte order in memory.
enum class DType : int { f64 = 0, f32 = 1, f16 = 2, bf16 = 3 };

/// Arithmetic. `automatic` follows the widest input: f64 -> f64, f32 -> f32, 16-bit -> bf16
/// (16-bit operands, float32 sums and states).
enum class Precision : int { automatic = 0, f64 = 1, f32 = 2, bf16 = 3 };

constexpr std::size_t size_of(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

std::string_view name_of(DType type);
std::string_view name_of(Precision precision);

/// Bits of significand, the hidden one included; the wider of two types has more.
constexpr int significand_bits(DType type) {
  return type == DType::f64 ? 53 : type == DType::f32 ? 24 : type == DType::f16 ? 11 : 8;
}

/// An array [tokens, heads, width] in memory, as it was stored: element (t, h, i) is at
/// `t * token_stride + h * head_stride + i`, counted in elements of `type`.
/// No array is `data == nullptr`. Does not own.
struct TokenArray {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int32_t heads_per_stored =
      1;  ///< so many neighbouring heads share one stored head: h means h / heads_per_stored
  explicit operator bool() const { return data != nullptr; }
};

/// The same, writable.
struct MutableTokenArray {
  void* data = nullptr;
  DType type = DType::f32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace longscan
