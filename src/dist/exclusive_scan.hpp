// SPDX-License-Identifier: Apache-2.0
#pragma once
// The exclusive scan of affine maps over the ranks that both solvers use: for each element (a head, a channel, a block)
// the state that a rank's part starts from. All algorithms over one Transport; the maths is core/affine.hpp's.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/affine.hpp"
#include "dist/courier.hpp"
#include "local/copy_pieces.hpp"
#include "longscan/scan.hpp"

namespace longscan {

/// The ranks that a state comes from and goes to; -1: none. Neighbours agree on it. Sequences that start and end
/// between these cut the scan.
struct ScanLinks {
  int before = -1;
  int after = -1;
  bool reversed = false;  ///< states go from higher ranks to lower ones; the same on every rank
  bool receives() const { return before >= 0; }
  bool sends() const { return after >= 0; }
};

/// One rank's share, in memory that kernels reach. Sizes and shapes are the same on every rank.
template <class T>
struct ScanPart {
  ScanLinks links;
  std::int64_t count = 0;   ///< elements
  AffinePoints<T> in, out;  ///< slot i is element i; `in` is filled, `out` is there where `known`
  std::vector<char> known;  ///< out[i] does not depend on in[i]; all of them where nothing comes in
  /// What takes in[i] to out[i] where it is not known: maps 0, …, each - 1 one after another, map j of element i in
  /// slot first + i * element_step + j * map_step. Where all is known only the shape counts.
  AffineMaps<T> maps;
  std::int64_t first = 0, element_step = 1, map_step = 1, each = 1;

  std::int64_t point_size() const { return in.stride; }
  std::int64_t map_size() const { return maps.stride; }
  T* map(std::int64_t i, std::int64_t j) const { return maps.slot(first + i * element_step + j * map_step); }
  bool open(std::int64_t i) const { return links.sends() && !known[i]; }
};

/// out[i] from in[i] for those i in [begin, end) that are not known.
using ScanAdvance = std::function<void(std::int64_t begin, std::int64_t end)>;

/// The scans of one solver, with the memory they need.
template <class T>
class RankScan {
 public:
  explicit RankScan(Transport& ranks) : ranks_(ranks), courier_(ranks) {}

  /// Collective over all ranks, but for the chain: over the linked ones.
  ///
  /// What is known goes to the next rank at once, whatever the algorithm. In a chain a rank that gets all it needs that
  /// way goes on without waiting for anybody else; the other algorithms first learn who knows what.
  /// chain: each piece of elements goes on as soon as it has come in and `advance` (by default: the maps) has been
  /// done. all_to_all, all_gather: the same operations in the same order on another rank, so the same bits. doubling,
  /// mpi: maps are composed; equal to rounding. `each` is 1. Errors of one rank alone (out of memory) are not agreed
  /// on.
  void run(ScanAlgorithm algorithm, const ScanPart<T>& part, const ScanAdvance& advance = {});

  /// The elements of `points` that are marked go to the next rank, after word of which they are.
  void send_chosen(int to, const std::vector<char>& chosen, const AffinePoints<T>& points);
  std::vector<char> receive_chosen(int from, std::int64_t count, const AffinePoints<T>& points);

 private:
  struct Marks;
  /// A message in pieces: `from` is set where it is sent, `to` where it is received.
  struct Parcel {
    int rank = 0;
    std::vector<CopyPiece<T>> pieces;
    std::int64_t size() const {
      std::int64_t n = 0;
      for (const auto& piece : pieces) n += piece.n;
      return n;
    }
  };
  using Parcels = std::vector<Parcel>;

  T* packed(const Parcel& parcel, T* buffer, std::vector<CopyPiece<T>>& copies) const;
  T* room(const Parcel& parcel, T* buffer, std::vector<CopyPiece<T>>& copies) const;
  void exchange(const Parcels& out, const Parcels& in);
  std::vector<char> hand_over_known(const ScanPart<T>& part);
  void chain(const ScanPart<T>& part, const std::vector<char>& here, const ScanAdvance& advance);
  Marks gather_marks(const ScanPart<T>& part);
  void all_to_all(const ScanPart<T>& part, const Marks& marks);
  void all_gather(const ScanPart<T>& part, const Marks& marks);
  void doubling(const ScanPart<T>& part, const Marks& marks);
  void by_mpi(const ScanPart<T>& part, const Marks& marks);

  Transport& ranks_;
  Courier courier_;
  DeviceArray<T>& store(std::size_t i) {
    while (stores_.size() <= i) stores_.emplace_back();
    return stores_[i];
  }
  DeviceArray<T> out_, in_;            // messages that are packed
  std::deque<DeviceArray<T>> stores_;  // what came in; kept for the next scan
};

/// Chooses the algorithm of one solver's scans. Costs are measured the first time that they matter.
class ScanPlan {
 public:
  ScanPlan(ScanAlgorithm asked, bool same_bits) : asked_(asked), same_bits_(same_bits) {}
  /// Collective.
  template <class T>
  ScanAlgorithm choose(Transport& ranks, const ScanPart<T>& part);
  const ScanChoice& choice() const { return choice_; }

 private:
  ScanAlgorithm asked_;
  bool same_bits_, chosen_ = false;
  ScanChoice choice_;
};

/// Collective. alpha and beta between neighbours, and the time of the maps of a scan of such a part; a few
/// milliseconds. Composition is timed too if `compose`.
template <class T>
ScanCosts measure_scan(Transport& ranks, const ScanPart<T>& part, bool compose);

}  // namespace longscan
