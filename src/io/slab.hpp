// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "longscan/sequence_file.hpp"

/// Arithmetic of rectangular pieces. Pure: no HDF5, no files.
namespace longscan::io {

inline constexpr std::int64_t kPieceBytes = std::int64_t{1} << 30;  // HDF5 1.10 fails at 2 GiB

/// The product of the extents; -1 if one is negative or `element_bytes` times the product leaves 63 bits.
std::int64_t count_elements(const std::vector<std::int64_t>& shape, std::int64_t element_bytes = 1);

/// Throws ExitCode::internal unless `slab` lies inside `shape`; `what` names the dataset in the message.
void check_slab(const std::string& what, const std::vector<std::int64_t>& shape, const Slab& slab);

/// Cuts a slab into pieces of at most `limit` bytes (one element at least) that follow each other in its dense
/// row-major form; `visit(piece, first)` gets the index of the piece's first element there.
void for_each_piece(const Slab& slab, std::int64_t element_bytes, std::int64_t limit,
                    const std::function<void(const Slab&, std::int64_t)>& visit);

/// The longest runs of a slab that are contiguous in the dataset: `visit(in_dataset, in_slab, elements)`.
void for_each_run(const std::vector<std::int64_t>& shape, const Slab& slab,
                  const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit);

}  // namespace longscan::io
