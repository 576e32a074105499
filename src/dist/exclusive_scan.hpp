// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exclusive scan over the ranks that both solvers use. Knows bytes and who needs whom; the maths is in `advance`.
#include <cstdint>
#include <functional>
#include <vector>

#include "longscan/transport.hpp"

namespace longscan {

/// The ranks that a state comes from and goes to; -1: none. Neighbours agree on it.
struct ScanLinks {
  int before = -1;
  int after = -1;
  bool receives() const { return before >= 0; }
  bool sends() const { return after >= 0; }
};

/// One rank's share of a scan over `count` independent elements (heads) of `element_bytes` bytes, in host memory.
struct ScanBuffers {
  std::int64_t count = 0;
  std::int64_t element_bytes = 0;
  char* in = nullptr;           ///< filled from the rank before
  char* out = nullptr;          ///< goes to the rank after
  std::vector<char> out_known;  ///< out[i] is there already and does not depend on in[i]
};

/// Collective over the linked ranks. A pipelined chain: what is known goes out at once; the other elements follow in
/// pieces of consecutive elements, each as soon as the same piece has come in and `advance(begin, end)` has computed
/// out from in for those of them that are not known. Messages: at most 1 + pieces to the next rank; maps stay where
/// they are. Deterministic: the order of the ranks is the order of the operations.
void exclusive_scan_chain(Transport& ranks, ScanLinks links, ScanBuffers& buffers,
                          const std::function<void(std::int64_t begin, std::int64_t end)>& advance);

/// Pieces that `count` elements travel in: consecutive ranges [begin, end).
std::vector<std::pair<std::int64_t, std::int64_t>> scan_pieces(std::int64_t count, std::int64_t element_bytes);

/// Send, and receive, the elements that `chosen` marks: the marks first, then their bytes in one message.
std::vector<std::unique_ptr<Transport::Request>> send_chosen(Transport& ranks, int to, int tag,
                                                             const std::vector<char>& chosen,
                                                             std::int64_t element_bytes, const char* elements,
                                                             std::vector<char>& staging);
std::vector<char> receive_chosen(Transport& ranks, int from, int tag, std::int64_t count, std::int64_t element_bytes,
                                 char* elements);

}  // namespace longscan
