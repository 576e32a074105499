// SPDX-License-Identifier: Apache-2.0
#include "io/slab.hpp"

#include <algorithm>

#include "longscan/error.hpp"

namespace longscan::io {

std::int64_t count_elements(const std::vector<std::int64_t>& shape, std::int64_t element_bytes) {
  std::int64_t bytes = element_bytes;
  bool empty = false, overflow = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return -1;
    if (extent == 0)
      empty = true;
    else
      overflow = overflow || __builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (empty) return 0;
  return overflow ? -1 : bytes / element_bytes;
}

void check_slab(const std::string& what, const std::vector<std::int64_t>& shape, const Slab& slab) {
  const std::size_t rank = shape.size();
  if (slab.begin.size() != rank || slab.count.size() != rank)
    throw Error(ExitCode::internal, "a slab of " + std::to_string(slab.begin.size()) + " and " +
                                        std::to_string(slab.count.size()) + " axes for " + what + ", which has " +
                                        std::to_string(rank));
  for (std::size_t i = 0; i < rank; ++i) {
    const std::int64_t begin = slab.begin[i], count = slab.count[i];
    if (begin < 0 || count < 0 || begin > shape[i] || count > shape[i] - begin)
      throw Error(ExitCode::internal, "a slab of " + std::to_string(count) + " from " + std::to_string(begin) +
                                          " along axis " + std::to_string(i) + " of " + what + ", which has " +
                                          std::to_string(shape[i]));
  }
}

void for_each_piece(const Slab& slab, std::int64_t element_bytes, std::int64_t limit,
                    const std::function<void(const Slab&, std::int64_t)>& visit) {
  const std::int64_t elements = count_elements(slab.count);
  if (elements == 0) return;
  std::size_t axis = 0;
  while (axis < slab.count.size() && slab.count[axis] == 1) ++axis;
  if (elements * element_bytes <= limit || axis == slab.count.size()) return visit(slab, 0);

  const std::int64_t row = elements / slab.count[axis];
  const std::int64_t rows = std::max<std::int64_t>(1, limit / (row * element_bytes));
  for (std::int64_t done = 0; done < slab.count[axis]; done += rows) {
    Slab part = slab;
    part.begin[axis] += done;
    part.count[axis] = std::min(rows, slab.count[axis] - done);
    for_each_piece(part, element_bytes, limit,
                   [&](const Slab& piece, std::int64_t first) { visit(piece, done * row + first); });
  }
}

void for_each_run(const std::vector<std::int64_t>& shape, const Slab& slab,
                  const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit) {
  if (count_elements(slab.count) == 0) return;
  // Axes from `outer` on belong to one run: all but the first of them are whole.
  std::size_t outer = shape.size();
  std::int64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= slab.count[outer];
    if (slab.count[outer] != shape[outer]) break;
  }
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) stride[i - 1] = stride[i] * shape[i];

  std::int64_t in_dataset = 0, in_slab = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) in_dataset += slab.begin[i] * stride[i];
  std::vector<std::int64_t> index(outer, 0);
  while (true) {
    visit(in_dataset, in_slab, run);
    in_slab += run;
    std::size_t axis = outer;
    while (axis > 0) {
      --axis;
      in_dataset += stride[axis];
      if (++index[axis] < slab.count[axis]) break;
      in_dataset -= slab.count[axis] * stride[axis];
      index[axis] = 0;
      if (axis == 0) return;
    }
    if (outer == 0) return;
  }
}

}  // namespace longscan::io
