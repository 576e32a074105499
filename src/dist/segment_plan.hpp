// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the runs of a part are cut into segments that are solved side by side, and which of them need a map. Pure: solves
// and `longscan plan` count by it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "longscan/partition.hpp"

namespace longscan {

/// Tokens of a segment of a sequence of `length` tokens with --reproducible: a function of the length alone.
inline std::int64_t segment_tokens(std::int64_t length) {
  std::int64_t tokens = 1024;
  while (tokens * 512 < length) tokens *= 2;
  return tokens;
}

/// Segments of one head that a device takes at a time which takes `side_by_side` segments of `heads` heads. Places that
/// are left when each head has as many whole segments hold shorter ones, one after another: 132 places and 16 heads are
/// 8 whole segments a head on 128 places and 16 quarters on 4, so 8 1/4.
inline double segments_at_once(std::int64_t side_by_side, std::int64_t heads) {
  const std::int64_t whole = side_by_side / heads, left = side_by_side % heads;
  if (whole == 0) return 1;
  return static_cast<double>(whole) + (left > 0 ? 1.0 / static_cast<double>((heads + left - 1) / left) : 0.0);
}

struct SegmentRules {
  bool reproducible = false;  ///< segments that depend on the sequence alone, and a map of each
  std::int64_t tokens = 0;    ///< of a segment; 0: so many that `lanes` segments hold the part
  double lanes = 1;           ///< `segments_at_once`
  int chunk = 64;

  /// Tokens of a segment at most, of a part of `all` tokens; not with `reproducible`.
  std::int64_t planned(std::int64_t all) const {
    if (tokens > 0) return tokens;
    constexpr std::int64_t least_chunks = 16;  // shorter segments would spend their time on maps and starts
    const auto each = static_cast<std::int64_t>(std::ceil(static_cast<double>(all) / std::max(1.0, lanes)));
    return std::max(each, least_chunks * chunk);
  }
};

/// Runs are cut into segments of equal length; a run that is a whole part has a shorter one at its end where whole ones
/// do not fill the device. Maps are made where a state is wanted before the outputs: between segments, and behind the
/// last run if it goes to another rank; with `reproducible` behind every segment. Borders are the ends of segments
/// where a state is kept: those before and after each map of a run, if it has any.
class SegmentPlan {
 public:
  SegmentPlan() = default;
  /// `passes_on`: the state behind the last run is wanted before the outputs.
  SegmentPlan(const std::vector<Run>& runs, const SegmentRules& rules, bool passes_on) {
    std::int64_t tokens = 0;
    for (const Run& run : runs) tokens += run.size();
    const std::int64_t C = rules.chunk, planned = rules.planned(tokens);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const std::int64_t size = runs[i].size();
      std::int64_t each = size;  // one segment
      if (rules.reproducible) {
        each = segment_tokens(runs[i].length);
      } else if (size > planned) {
        const std::int64_t count = (size + planned - 1) / planned;
        const auto whole_chunks = [&](std::int64_t n) { return (n + C - 1) / C * C; };
        // what is passed on depends on the shorter one, which should hold a horizon
        const std::int64_t shorter = size - (count - 1) * whole_chunks(planned), least = passes_on ? 128 * C : 1;
        const bool fills = runs.size() == 1 && rules.tokens == 0 && static_cast<double>(count) > rules.lanes;
        each = whole_chunks(fills && shorter >= least ? planned : (size + count - 1) / count);
      }
      each = std::max<std::int64_t>(1, each);
      const std::int64_t segments = (size + each - 1) / each;
      const bool wants_end = rules.reproducible || (passes_on && i + 1 == runs.size());
      const std::int64_t maps = std::max<std::int64_t>(0, wants_end ? segments : segments - 1);
      tokens_.push_back({runs[i].begin, runs[i].end}), each_.push_back(each);
      first_segment_.push_back(first_segment_.back() + segments);
      first_map_.push_back(first_map_.back() + maps);
      first_border_.push_back(first_border_.back() + (maps > 0 || wants_end ? maps + 1 : 0));
    }
  }

  std::int64_t segments() const { return first_segment_.back(); }
  std::int64_t maps() const { return first_map_.back(); }
  std::int64_t borders() const { return first_border_.back(); }

  std::int64_t segments_of(std::int64_t run) const { return first_segment_[run + 1] - first_segment_[run]; }
  std::int64_t maps_of(std::int64_t run) const { return first_map_[run + 1] - first_map_[run]; }
  /// Maps of a head in the scan over the ranks: those of the first run, which the state that comes in goes through.
  std::int64_t scan_maps() const { return each_.empty() ? 1 : std::max<std::int64_t>(1, maps_of(0)); }
  bool has_borders(std::int64_t run) const { return first_border_[run + 1] > first_border_[run]; }

  /// Tokens of segment j of a run, its map, and the border before it.
  TokenRange segment(std::int64_t run, std::int64_t j) const {
    const std::int64_t begin = tokens_[run].begin + j * each_[run];
    return {begin, std::min(tokens_[run].end, begin + each_[run])};
  }
  std::int64_t map(std::int64_t run, std::int64_t j) const { return first_map_[run] + j; }
  std::int64_t border(std::int64_t run, std::int64_t j) const { return first_border_[run] + j; }
  /// The last border of a run that has borders.
  std::int64_t last_border(std::int64_t run) const { return first_border_[run + 1] - 1; }

 private:
  std::vector<TokenRange> tokens_;
  std::vector<std::int64_t> each_;  // tokens of a segment
  // per run, and one behind the last
  std::vector<std::int64_t> first_segment_{0}, first_map_{0}, first_border_{0};
};

}  // namespace longscan
