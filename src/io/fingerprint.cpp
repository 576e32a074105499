// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "io/hash.hpp"
#include "io/hdf5_types.hpp"
#include "io/slab.hpp"
#include "longscan/error.hpp"
#include "longscan/sequence_file.hpp"

namespace longscan {
namespace {

constexpr std::int64_t kWholeBytes = 1 << 20;    // up to this size every value counts
constexpr std::int64_t kSampleBytes = 16 << 10;  // of one sample of a larger dataset
constexpr std::int64_t kSamples = 64;

Slab whole(const std::vector<std::int64_t>& shape) { return {std::vector<std::int64_t>(shape.size(), 0), shape}; }

/// Blocks of about kSampleBytes, evenly spread from the very first to the very last.
std::vector<Slab> choose_samples(const std::vector<std::int64_t>& shape, std::int64_t element_bytes) {
  if (io::count_elements(shape) * element_bytes <= kWholeBytes) return {whole(shape)};
  // The axis that is cut: those after it fit into a block together.
  std::size_t axis = shape.size() - 1;
  std::int64_t inner = element_bytes;
  while (axis > 0 && inner * shape[axis] <= kSampleBytes) inner *= shape[axis--];
  const std::int64_t rows = std::min(shape[axis], std::max<std::int64_t>(1, kSampleBytes / inner));
  const std::int64_t blocks_of_axis = (shape[axis] + rows - 1) / rows;
  std::int64_t blocks = blocks_of_axis;
  for (std::size_t i = 0; i < axis; ++i) blocks *= shape[i];

  std::vector<Slab> samples;
  const std::int64_t wanted = std::min(blocks, kSamples);
  const std::int64_t step = wanted > 1 ? (blocks - 1) / (wanted - 1) : 0,
                     rest = wanted > 1 ? (blocks - 1) % (wanted - 1) : 0;
  for (std::int64_t s = 0; s < wanted; ++s) {
    std::int64_t block = s * step + (wanted > 1 ? s * rest / (wanted - 1) : 0);
    Slab slab = whole(shape);
    slab.count[axis] = rows;
    slab.begin[axis] = std::min(block % blocks_of_axis * rows, shape[axis] - rows);
    block /= blocks_of_axis;
    for (std::size_t i = axis; i-- > 0; block /= shape[i]) {
      slab.begin[i] = block % shape[i];
      slab.count[i] = 1;
    }
    samples.push_back(std::move(slab));
  }
  return samples;
}

}  // namespace

std::uint64_t InputFile::fingerprint(const std::vector<DatasetInfo>& datasets) const {
  const io::Hdf5Session session(path(), io::Hdf5Session::Reads::values);  // one for all samples
  io::Hash hash;
  std::vector<std::byte> values;
  for (const DatasetInfo& dataset : datasets) {
    hash.add(static_cast<std::int64_t>(dataset.shape.size()));
    for (const std::int64_t extent : dataset.shape) hash.add(extent);
    if (dataset.storage == Storage::integer) {
      hash.add(-1);
      for (const std::int64_t value : read_integers(dataset)) hash.add(value);
      continue;
    }
    hash.add(static_cast<std::int64_t>(dataset.type));
    const auto size = static_cast<std::int64_t>(size_of(dataset.type));
    for (const Slab& sample : choose_samples(dataset.shape, size)) {
      values.resize(io::count_elements(sample.count) * size);
      read(dataset, sample, values.data());
      hash.add(values.data(), values.size());
    }
  }
  return hash.result();
}

}  // namespace longscan
