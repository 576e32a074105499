// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "apps/generate_delta.hpp"
#include "apps/generate_preset.hpp"
#include "apps/output.hpp"
#include "apps/progress.hpp"
#include "core/dtype.hpp"
#include "core/random.hpp"

namespace longscan {

void fill_delta_array(DeltaStream stream, std::uint64_t seed, std::int64_t begin, std::int64_t count, int heads,
                      int width, DType type, void* out) {
  std::vector<double> row(width);
  for (std::int64_t i = 0; i < count * heads; ++i) {
    const std::uint64_t first = static_cast<std::uint64_t>((begin * heads + i) * width);
    double norm = 0;
    for (int j = 0; j < width; ++j) {
      row[j] = delta_value(stream, seed, first + j);
      norm += row[j] * row[j];
    }
    const double factor = stream == DeltaStream::q || stream == DeltaStream::k ? 1 / std::sqrt(norm) : 1;
    for (int j = 0; j < width; ++j) store(out, type, i * width + j, row[j] * factor);
  }
}

void run_generate_delta(Transport& ranks, const GenerateDelta& asked) {
  const Preset preset = preset_of(asked.preset);
  GenerateDelta g = asked;
  if (preset.gated && g.decay == "none") g.decay = "head";
  struct Dataset {
    const char* name;
    DeltaStream stream;
    int width;
  };
  std::vector<Dataset> arrays = {{"/q", DeltaStream::q, g.d_key},
                                 {"/k", DeltaStream::k, g.d_key},
                                 {"/v", DeltaStream::v, g.d_value},
                                 {"/beta", DeltaStream::beta, 1}};
  if (g.decay != "none") arrays.push_back({"/log_decay", DeltaStream::log_decay, g.decay == "head" ? 1 : g.d_key});
  std::vector<OutputDataset> datasets;
  std::int64_t token_values = 0;
  for (const Dataset& a : arrays) {
    const bool narrow = a.stream == DeltaStream::beta || (a.stream == DeltaStream::log_decay && g.decay == "head");
    std::vector<std::int64_t> shape = {g.tokens, g.heads};
    if (!narrow) shape.push_back(a.width);
    datasets.push_back({a.name, shape, g.type});
    token_values += static_cast<std::int64_t>(g.heads) * a.width;
  }
  const std::vector<std::int64_t> offsets = add_offsets(preset, g.seed, g.tokens, g.shortest, datasets);
  SharedOutput out(ranks, g.output, "", g.force, datasets,
                   {{"longscan_version", std::string(LONGSCAN_VERSION)},
                    {"seed", static_cast<std::int64_t>(g.seed)},
                    {"preset", g.preset}});
  Progress progress(ranks.rank() == 0 && !g.quiet, "longscan generate", g.tokens);
  const TokenRange part = part_of(g.tokens, ranks.size(), ranks.rank());
  const std::int64_t each = std::max<std::int64_t>(1, (std::int64_t{4} << 20) / token_values);
  std::vector<std::byte> buffer;
  agree(ranks, [&] {
    write_offsets(ranks, out, offsets);
    for (std::int64_t t = part.begin; t < part.end; t += each) {
      const std::int64_t n = std::min(each, part.end - t);
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        buffer.resize(n * g.heads * arrays[i].width * size_of(g.type));
        fill_preset_array(preset, arrays[i].stream, g.seed, t, n, g.heads, arrays[i].width, g.type, buffer.data());
        Slab slab{{t, 0}, {n, g.heads}};
        if (datasets[i].shape.size() == 3) slab.begin.push_back(0), slab.count.push_back(arrays[i].width);
        out.write(arrays[i].name, slab, buffer.data());
      }
      progress.at((t - part.begin + n) * ranks.size(), "writing");
    }
  });
  out.commit();
  progress.done(g.output);
}

}  // namespace longscan
