// SPDX-License-Identifier: Apache-2.0
#pragma once
// Synthetic sequences that resemble real ones. Every value is a function of seed, token, head and channel alone, so
// that any rank can write any part.
#include <cstdint>
#include <string>
#include <vector>

#include "apps/generate_delta.hpp"
#include "apps/output.hpp"

namespace longscan {

/// What differs from `plain` (see fill_delta_array).
struct Preset {
  /// Decays near one, as the gates of Gated DeltaNet and Mamba-2 make them: log_decay = -A softplus(b + noise), A
  /// uniform in (1, 4) a head, softplus(b) spread evenly on a logarithmic scale from 0.001 to 0.05, a head or channel.
  bool gated = false;
  /// Quiet stretches, beta mostly below 0.1, and bursts of 16 to 128 tokens with beta near 1 and nearly equal keys: the
  /// chunk matrices are large there. For newton: features that change slowly, and loud stretches.
  bool bursts = false;
  /// cu_seqlens, with lengths by Pareto's law (exponent 1.2): most are short, a few hold most tokens.
  bool packed = false;
};

/// Throws Error(usage) naming the nearest.
Preset preset_of(const std::string& name);
inline const std::vector<std::string> preset_names = {"plain", "gated", "bursts", "packed", "realistic"};

/// fill_delta_array, of a preset.
void fill_preset_array(const Preset& preset, DeltaStream stream, std::uint64_t seed, std::int64_t begin,
                       std::int64_t count, int heads, int width, DType type, void* out);

/// x [count][width] of newton from token `begin` on.
void fill_preset_features(const Preset& preset, std::uint64_t seed, std::uint64_t stream, std::int64_t begin,
                          std::int64_t count, int width, DType type, void* out);

/// cu_seqlens of a packed preset, for sequences of at least `shortest` tokens (the last one is what is left); empty for
/// others. Adds its dataset.
std::vector<std::int64_t> add_offsets(const Preset& preset, std::uint64_t seed, std::int64_t tokens,
                                      std::int64_t shortest, std::vector<OutputDataset>& datasets);
/// By rank 0; nothing if there are none.
void write_offsets(const Transport& ranks, SharedOutput& out, const std::vector<std::int64_t>& offsets);

}  // namespace longscan
