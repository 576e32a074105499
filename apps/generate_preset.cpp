// SPDX-License-Identifier: Apache-2.0
#include "apps/generate_preset.hpp"

#include <algorithm>
#include <cmath>

#include "apps/options.hpp"
#include "core/dtype.hpp"
#include "core/random.hpp"

namespace longscan {
namespace {

enum Stream : std::uint64_t { burst_stream = 32, centre_stream, scale_stream, step_stream, length_stream };
constexpr std::int64_t episode = 256;  ///< tokens; each may hold a burst

double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Whether a token of a head (of `heads`) is in a burst.
bool in_burst(std::uint64_t seed, std::int64_t token, int head, int heads) {
  const std::int64_t e = token / episode;
  const std::uint64_t i = 3 * static_cast<std::uint64_t>(e * heads + head);
  if (random_uniform(seed, burst_stream, i) > 0.3) return false;
  const auto length = static_cast<std::int64_t>(16 * std::exp2(3 * random_uniform(seed, burst_stream, i + 1)));
  const auto start =
      static_cast<std::int64_t>(static_cast<double>(episode - length) * random_uniform(seed, burst_stream, i + 2));
  return token % episode >= start && token % episode < start + length;
}

/// The step of a head (channel) without noise.
double mean_step(std::uint64_t seed, std::uint64_t at) {
  return 1e-3 * std::pow(50.0, random_uniform(seed, step_stream, at));
}

}  // namespace

Preset preset_of(const std::string& name) {
  if (name == "plain") return {};
  if (name == "gated") return {.gated = true};
  if (name == "bursts") return {.bursts = true};
  if (name == "packed") return {.packed = true};
  if (name == "realistic") return {true, true, true};
  throw_unknown("value of --preset", name, preset_names);
}

void fill_preset_array(const Preset& preset, DeltaStream stream, std::uint64_t seed, std::int64_t begin,
                       std::int64_t count, int heads, int width, DType type, void* out) {
  const auto number = static_cast<std::uint64_t>(stream);
  const bool changed = (preset.gated && stream == DeltaStream::log_decay) ||
                       (preset.bursts && (stream == DeltaStream::k || stream == DeltaStream::beta));
  if (!changed) return fill_delta_array(stream, seed, begin, count, heads, width, type, out);
  std::vector<double> row(width);
  for (std::int64_t i = 0; i < count * heads; ++i) {
    const std::int64_t token = begin + i / heads;
    const int head = static_cast<int>(i % heads);
    const auto first = static_cast<std::uint64_t>((begin * heads + i) * width);
    const bool burst = preset.bursts && in_burst(seed, token, head, heads);
    double norm = 0;
    for (int j = 0; j < width; ++j) {
      const double noise = random_normal(seed, number, first + j);
      if (stream == DeltaStream::log_decay) {
        const double A = 1 + 3 * random_uniform(seed, scale_stream, head);
        const double step = mean_step(seed, static_cast<std::uint64_t>(head) * width + j);
        row[j] = -A * softplus(std::log(std::expm1(step)) + 0.5 * noise);
      } else if (stream == DeltaStream::beta) {
        row[j] = burst ? 1 - 0.1 * sigmoid(noise) : sigmoid(1.5 * noise - 3.5);
      } else {
        const auto centre = static_cast<std::uint64_t>((token / episode * heads + head) * width + j);
        row[j] = burst ? random_normal(seed, centre_stream, centre) + 0.2 * noise : noise;
        norm += row[j] * row[j];
      }
    }
    const double factor = stream == DeltaStream::k ? 1 / std::sqrt(norm) : 1;
    for (int j = 0; j < width; ++j) store(out, type, i * width + j, row[j] * factor);
  }
}

void fill_preset_features(const Preset& preset, std::uint64_t seed, std::uint64_t stream, std::int64_t begin,
                          std::int64_t count, int width, DType type, void* out) {
  // the last 32 of white noise, weighted as an autoregressive process of first order weights them
  constexpr int memory = 32;
  constexpr double keep = 0.85;
  const double size = std::sqrt(1 - keep * keep);
  for (std::int64_t t = 0; t < count; ++t) {
    const bool loud = preset.bursts && in_burst(seed, begin + t, 0, 1);
    for (int j = 0; j < width; ++j) {
      double sum = 0, weight = size;
      const int lags = preset.bursts ? memory : 1;
      for (int lag = 0; lag < lags && begin + t >= lag; ++lag, weight *= keep)
        sum += (preset.bursts ? weight : 1) *
               random_normal(seed, stream, static_cast<std::uint64_t>((begin + t - lag) * width + j));
      store(out, type, t * width + j, loud ? 3 * sum : sum);
    }
  }
}

std::vector<std::int64_t> add_offsets(const Preset& preset, std::uint64_t seed, std::int64_t tokens,
                                      std::int64_t shortest, std::vector<OutputDataset>& datasets) {
  if (!preset.packed) return {};
  std::vector<std::int64_t> offsets{0};
  while (offsets.back() < tokens) {
    const double u = random_uniform(seed, length_stream, offsets.size());
    const double length = std::min(static_cast<double>(shortest) * std::pow(u, -1 / 1.2), 1e15);
    offsets.push_back(std::min(tokens, offsets.back() + static_cast<std::int64_t>(length)));
  }
  datasets.push_back({"/cu_seqlens", {static_cast<std::int64_t>(offsets.size())}, DType::f64});
  datasets.back().integers = true;
  return offsets;
}

void write_offsets(const Transport& ranks, SharedOutput& out, const std::vector<std::int64_t>& offsets) {
  if (offsets.empty() || ranks.rank() != 0) return;
  out.write("/cu_seqlens", {{0}, {static_cast<std::int64_t>(offsets.size())}}, offsets.data());
}

}  // namespace longscan
