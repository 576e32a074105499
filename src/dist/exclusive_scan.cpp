// SPDX-License-Identifier: Apache-2.0
#include "dist/exclusive_scan.hpp"

#include <algorithm>
#include <cstring>

namespace longscan {
namespace {

constexpr int tag_known = 100, tag_piece = 102;

/// The elements of [begin, end) that `chosen` does not mark, packed.
std::vector<char> pack_unmarked(const std::vector<char>& marks, std::int64_t begin, std::int64_t end,
                                std::int64_t element_bytes, const char* elements) {
  std::vector<char> packed;
  for (std::int64_t i = begin; i < end; ++i)
    if (!marks[i]) packed.insert(packed.end(), elements + i * element_bytes, elements + (i + 1) * element_bytes);
  return packed;
}

}  // namespace

std::vector<std::pair<std::int64_t, std::int64_t>> scan_pieces(std::int64_t count, std::int64_t element_bytes) {
  // Large enough that a message's fixed cost is small, and at least eight pieces where there are elements for it.
  constexpr std::int64_t wanted = std::int64_t{256} << 10;
  const std::int64_t by_bytes = std::max<std::int64_t>(1, wanted / std::max<std::int64_t>(1, element_bytes));
  const std::int64_t each = std::max<std::int64_t>(1, std::min(by_bytes, (count + 7) / 8));
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (std::int64_t i = 0; i < count; i += each) pieces.emplace_back(i, std::min(count, i + each));
  return pieces;
}

std::vector<std::unique_ptr<Transport::Request>> send_chosen(Transport& ranks, int to, int tag,
                                                             const std::vector<char>& chosen,
                                                             std::int64_t element_bytes, const char* elements,
                                                             std::vector<char>& staging) {
  const auto count = static_cast<std::int64_t>(chosen.size());
  staging = chosen;
  for (std::int64_t i = 0; i < count; ++i)
    if (chosen[i]) staging.insert(staging.end(), elements + i * element_bytes, elements + (i + 1) * element_bytes);
  std::vector<std::unique_ptr<Transport::Request>> requests;
  requests.push_back(ranks.send(staging.data(), count, to, tag));
  if (static_cast<std::int64_t>(staging.size()) > count)
    requests.push_back(
        ranks.send(staging.data() + count, static_cast<std::int64_t>(staging.size()) - count, to, tag + 1));
  return requests;
}

std::vector<char> receive_chosen(Transport& ranks, int from, int tag, std::int64_t count, std::int64_t element_bytes,
                                 char* elements) {
  std::vector<char> chosen(count);
  ranks.receive(chosen.data(), count, from, tag);
  const auto marked = std::count_if(chosen.begin(), chosen.end(), [](char c) { return c != 0; });
  if (marked == 0) return chosen;
  std::vector<char> packed(marked * element_bytes);
  ranks.receive(packed.data(), static_cast<std::int64_t>(packed.size()), from, tag + 1);
  const char* next = packed.data();
  for (std::int64_t i = 0; i < count; ++i) {
    if (!chosen[i]) continue;
    std::memcpy(elements + i * element_bytes, next, element_bytes);
    next += element_bytes;
  }
  return chosen;
}

void exclusive_scan_chain(Transport& ranks, ScanLinks links, ScanBuffers& buffers,
                          const std::function<void(std::int64_t, std::int64_t)>& advance) {
  const int before = links.before, after = links.after;
  const std::int64_t bytes = buffers.element_bytes;
  std::vector<std::unique_ptr<Transport::Request>> requests;
  std::vector<char> staging;
  if (links.sends()) requests = send_chosen(ranks, after, tag_known, buffers.out_known, bytes, buffers.out, staging);
  std::vector<char> here(buffers.count, 1);  // in[i] has arrived
  if (links.receives()) here = receive_chosen(ranks, before, tag_known, buffers.count, bytes, buffers.in);

  std::vector<std::vector<char>> sent;
  const auto pieces = scan_pieces(buffers.count, bytes);
  sent.reserve(pieces.size());
  for (const auto& [begin, end] : pieces) {
    const auto missing = std::count(here.begin() + begin, here.begin() + end, char{0});
    if (links.receives() && missing > 0) {
      std::vector<char> packed(missing * bytes);
      ranks.receive(packed.data(), static_cast<std::int64_t>(packed.size()), before, tag_piece);
      const char* next = packed.data();
      for (std::int64_t i = begin; i < end; ++i) {
        if (here[i]) continue;
        std::memcpy(buffers.in + i * bytes, next, bytes);
        next += bytes;
      }
    }
    if (!links.sends()) continue;
    if (std::count(buffers.out_known.begin() + begin, buffers.out_known.begin() + end, char{0}) == 0) continue;
    advance(begin, end);
    sent.push_back(pack_unmarked(buffers.out_known, begin, end, bytes, buffers.out));
    requests.push_back(ranks.send(sent.back().data(), static_cast<std::int64_t>(sent.back().size()), after, tag_piece));
  }
  for (auto& request : requests) request->wait();
}

}  // namespace longscan
