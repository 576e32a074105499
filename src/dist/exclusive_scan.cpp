// SPDX-License-Identifier: Apache-2.0
#include "dist/exclusive_scan.hpp"

#include <algorithm>
#include <cstring>

#include "local/affine_scan.hpp"
#include "local/lanes.hpp"

namespace longscan {
namespace {

constexpr int tag_marks = 100, tag_known = 101;
using Space = Kokkos::DefaultExecutionSpace;

/// Whether the pieces' ends (`&CopyPiece::from` or `to`) follow one another in memory.
template <class T, class P>
bool in_one_piece(const std::vector<CopyPiece<T>>& pieces, P CopyPiece<T>::*end) {
  for (std::size_t i = 1; i < pieces.size(); ++i)
    if (pieces[i - 1].*end + pieces[i - 1].n != pieces[i].*end) return false;
  return true;
}

/// Points through maps that stand anywhere, many walks in one launch.
template <class T>
class Walks {
 public:
  Walks(const AffineMaps<T>& shape, const AffinePoints<T>& points, std::int64_t count)
      : shape_(shape), points_(points) {
    reserve(scratch_, "longscan::scan::scratch", 2 * count * points.stride);
  }
  void start(const T* from) { walks_.push_back({static_cast<std::int64_t>(steps_.size()), 0, from}); }
  /// One map more for the walk that was started last; its result in `to`, or nowhere in particular.
  void step(const T* map, T* to) {
    auto& walk = walks_.back();
    const std::int64_t turn = 2 * (static_cast<std::int64_t>(walks_.size()) - 1) + walk.count % 2;
    steps_.push_back({map, to ? to : scratch_.data() + turn * points_.stride});
    ++walk.count;
  }
  /// Launches and waits: the lists are freed.
  void run() {
    if (steps_.empty()) return;
    const auto steps = on_device("longscan::scan::steps", steps_);
    const auto walks = on_device("longscan::scan::walks", walks_);
    affine_walk(Space(), shape_, points_.leading, steps.data(), walks.data(), static_cast<std::int64_t>(walks_.size()));
    Space().fence();
  }

 private:
  AffineMaps<T> shape_;
  AffinePoints<T> points_;
  DeviceArray<T> scratch_;
  std::vector<AffineStep<T>> steps_;
  std::vector<AffineWalk<T>> walks_;
};

}  // namespace

/// What every rank knows of every other: which elements' states depend on what comes in, and over how many maps. Ranks
/// are counted here in the order of the states.
template <class T>
struct RankScan<T>::Marks {
  int ranks = 1, here = 0;
  bool reversed = false;
  std::int64_t count = 0;
  std::vector<std::int64_t> each;
  std::vector<char> sends, bits;
  std::vector<int> reach;  // [rank][element]: how many ranks in a row before it are open
  bool any_open = false;

  int rank_of(int place) const { return reversed ? ranks - 1 - place : place; }
  bool open(int place, std::int64_t i) const {
    return sends[place] && (bits[place * bytes() + i / 8] >> (i % 8) & 1) != 0;
  }
  std::int64_t bytes() const { return (count + 7) / 8; }
  /// Open ranks before `place`, up to the one whose state is known.
  int reach_of(int place, std::int64_t i) const { return reach[place * count + i]; }
};

// --- messages -------------------------------------------------------------------------------------------------------

/// Where the message lies: as it stands if it is in one piece, else in `buffer` once `copies` have been done.
template <class T>
T* RankScan<T>::packed(const Parcel& parcel, T* buffer, std::vector<CopyPiece<T>>& copies) const {
  if (in_one_piece(parcel.pieces, &CopyPiece<T>::from)) return const_cast<T*>(parcel.pieces.front().from);
  T* to = buffer;
  for (const CopyPiece<T>& piece : parcel.pieces) {
    copies.push_back({piece.from, to, piece.n});
    to += piece.n;
  }
  return buffer;
}

/// Where the message goes; from `buffer` on by `copies` if its pieces lie apart.
template <class T>
T* RankScan<T>::room(const Parcel& parcel, T* buffer, std::vector<CopyPiece<T>>& copies) const {
  if (in_one_piece(parcel.pieces, &CopyPiece<T>::to)) return parcel.pieces.front().to;
  const T* from = buffer;
  for (const CopyPiece<T>& piece : parcel.pieces) {
    copies.push_back({from, piece.to, piece.n});
    from += piece.n;
  }
  return buffer;
}

template <class T>
void RankScan<T>::exchange(const Parcels& out, const Parcels& in) {
  const auto total = [](const Parcels& parcels) {
    std::int64_t n = 0;
    for (const Parcel& p : parcels) n += p.size();
    return n;
  };
  reserve(out_, "longscan::scan::out", total(out)), reserve(in_, "longscan::scan::in", total(in));
  std::vector<CopyPiece<T>> packing, unpacking;
  std::vector<Transport::Transfer> sends, receives;
  constexpr auto element = static_cast<std::int64_t>(sizeof(T));
  std::int64_t at = 0;
  for (const Parcel& p : out) {
    const std::int64_t n = p.size();
    if (n == 0) continue;
    sends.push_back({p.rank, packed(p, out_.data() + at, packing), n * element});
    at += n;
  }
  at = 0;
  for (const Parcel& p : in) {
    const std::int64_t n = p.size();
    if (n == 0) continue;
    receives.push_back({p.rank, room(p, in_.data() + at, unpacking), n * element});
    at += n;
  }
  copy_pieces(packing);
  courier_.exchange(sends, receives);
  copy_pieces(unpacking);
}

template <class T>
void RankScan<T>::send_chosen(int to, const std::vector<char>& chosen, const AffinePoints<T>& points) {
  const auto count = static_cast<std::int64_t>(chosen.size());
  auto marks = ranks_.send(chosen.data(), count, to, tag_marks);
  Parcel parcel{to, {}};
  for (std::int64_t i = 0; i < count; ++i)
    if (chosen[i]) parcel.pieces.push_back({points.slot(i), nullptr, points.stride});
  exchange({parcel}, {});
  marks->wait();
}

template <class T>
std::vector<char> RankScan<T>::receive_chosen(int from, std::int64_t count, const AffinePoints<T>& points) {
  std::vector<char> chosen(count);
  ranks_.receive(chosen.data(), count, from, tag_marks);
  Parcel parcel{from, {}};
  for (std::int64_t i = 0; i < count; ++i)
    if (chosen[i]) parcel.pieces.push_back({nullptr, points.slot(i), points.stride});
  exchange({}, {parcel});
  return chosen;
}

/// What is known goes to the next rank. Returns which elements have come in.
template <class T>
std::vector<char> RankScan<T>::hand_over_known(const ScanPart<T>& part) {
  const ScanLinks& links = part.links;
  constexpr auto element = static_cast<std::int64_t>(sizeof(T));
  std::vector<std::unique_ptr<Transport::Request>> requests;
  Parcel out{links.after, {}}, in{links.before, {}};
  if (links.sends()) {
    requests.push_back(ranks_.send(part.known.data(), part.count, links.after, tag_marks));
    for (std::int64_t i = 0; i < part.count; ++i)
      if (part.known[i]) out.pieces.push_back({part.out.slot(i), nullptr, part.point_size()});
    // The next rank must not have to wait until this one has heard from the rank before.
    if (!out.pieces.empty() && !courier_.queues()) {
      reserve(out_, "longscan::scan::out", out.size());
      std::vector<CopyPiece<T>> copies;
      const T* message = packed(out, out_.data(), copies);
      copy_pieces(copies);
      requests.push_back(courier_.send(message, out.size() * element, links.after, tag_known));
    }
  }
  std::vector<char> here(part.count, 1);
  if (links.receives()) {
    ranks_.receive(here.data(), part.count, links.before, tag_marks);
    for (std::int64_t i = 0; i < part.count; ++i)
      if (here[i]) in.pieces.push_back({nullptr, part.in.slot(i), part.point_size()});
  }
  if (courier_.queues()) {
    exchange({out}, {in});
  } else if (!in.pieces.empty()) {
    reserve(in_, "longscan::scan::in", in.size());
    std::vector<CopyPiece<T>> copies;
    T* message = room(in, in_.data(), copies);
    courier_.receive(message, in.size() * element, links.before, tag_known);
    copy_pieces(copies);
  }
  for (auto& request : requests) request->wait();
  courier_.all_sent();
  return here;
}

// --- the chain ------------------------------------------------------------------------------------------------------

template <class T>
void RankScan<T>::chain(const ScanPart<T>& part, const std::vector<char>& here, const ScanAdvance& advance) {
  const std::int64_t each = scan_piece(part.count, part.point_size() * static_cast<std::int64_t>(sizeof(T)));
  Parcels ready;  // what the next rank waits for
  for (std::int64_t begin = 0; begin < part.count; begin += each) {
    const std::int64_t end = std::min(part.count, begin + each);
    Parcel in{part.links.before, {}}, out{part.links.after, {}};
    for (std::int64_t i = begin; i < end; ++i) {
      if (!here[i]) in.pieces.push_back({nullptr, part.in.slot(i), part.point_size()});
      if (part.open(i)) out.pieces.push_back({part.out.slot(i), nullptr, part.point_size()});
    }
    exchange(ready, {in});
    ready.clear();
    if (out.pieces.empty()) continue;
    if (advance) {
      advance(begin, end);
    } else {
      Walks<T> walks(part.maps, part.in, end - begin);
      for (std::int64_t i = begin; i < end; ++i) {
        if (!part.open(i)) continue;
        walks.start(part.in.slot(i));
        for (std::int64_t j = 0; j < part.each; ++j)
          walks.step(part.map(i, j), j + 1 == part.each ? part.out.slot(i) : nullptr);
      }
      walks.run();
    }
    ready.push_back(out);
  }
  exchange(ready, {});
}

// --- who knows what -------------------------------------------------------------------------------------------------

template <class T>
typename RankScan<T>::Marks RankScan<T>::gather_marks(const ScanPart<T>& part) {
  Marks m;
  m.ranks = ranks_.size(), m.count = part.count, m.reversed = part.links.reversed;
  m.here = m.rank_of(ranks_.rank());
  const std::int64_t own = 8 + 1 + m.bytes();
  std::vector<char> mine(own, 0), all(own * m.ranks);
  std::memcpy(mine.data(), &part.each, 8);
  mine[8] = part.links.sends() ? 1 : 0;
  for (std::int64_t i = 0; i < part.count; ++i)
    if (part.open(i)) mine[9 + i / 8] = static_cast<char>(mine[9 + i / 8] | 1 << (i % 8));
  ranks_.all_gather(mine.data(), own, all.data());
  m.each.resize(m.ranks), m.sends.resize(m.ranks), m.bits.resize(m.ranks * m.bytes());
  for (int place = 0; place < m.ranks; ++place) {
    const char* theirs = all.data() + m.rank_of(place) * own;
    std::memcpy(&m.each[place], theirs, 8);
    m.sends[place] = theirs[8];
    std::copy(theirs + 9, theirs + own, m.bits.begin() + place * m.bytes());
  }
  m.reach.assign(static_cast<std::size_t>(m.ranks) * m.count, 0);
  for (int place = 1; place < m.ranks; ++place)
    for (std::int64_t i = 0; i < m.count; ++i)
      if (m.open(place - 1, i)) m.reach[place * m.count + i] = m.reach_of(place - 1, i) + 1, m.any_open = true;
  return m;
}

// --- all to all: each element is scanned by one rank ----------------------------------------------------------------

template <class T>
void RankScan<T>::all_to_all(const ScanPart<T>& part, const Marks& m) {
  const int p = m.here;
  const std::int64_t point = part.point_size(), map = part.map_size();
  std::vector<std::int64_t> elements;  // those that somebody does not know
  for (std::int64_t i = 0; i < m.count; ++i)
    for (int q = 0; q < m.ranks; ++q)
      if (m.open(q, i)) {
        elements.push_back(i);
        break;
      }
  const auto n = static_cast<std::int64_t>(elements.size());
  const auto owner = [&](std::int64_t j) { return static_cast<int>(j * m.ranks / n); };
  // rank q's known state of element i starts a walk
  const auto starts = [&](int q, std::int64_t i) { return q + 1 < m.ranks && m.open(q + 1, i) && !m.open(q, i); };
  std::vector<std::int64_t> own;
  for (std::int64_t j = 0; j < n; ++j)
    if (owner(j) == p) own.push_back(elements[j]);

  // what this rank has goes to the owners
  Parcels out, in;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int64_t i = elements[j];
    if (owner(j) == p) continue;
    if (out.empty() || out.back().rank != m.rank_of(owner(j))) out.push_back({m.rank_of(owner(j)), {}});
    if (starts(p, i)) out.back().pieces.push_back({part.out.slot(i), nullptr, point});
    if (m.open(p, i))
      for (std::int64_t k = 0; k < part.each; ++k) out.back().pieces.push_back({part.map(i, k), nullptr, map});
  }
  // what it scans comes in
  std::int64_t room = 0, results = 0;
  for (const std::int64_t i : own)
    for (int q = 0; q < m.ranks; ++q) {
      if (q != p) room += (starts(q, i) ? point : 0) + (m.open(q, i) ? m.each[q] * map : 0);
      results += m.open(q, i) ? point : 0;
    }
  reserve(store(0), "longscan::scan::store", room), reserve(store(1), "longscan::scan::result", results);
  struct Piece {
    const T* state = nullptr;
    std::vector<const T*> maps;
  };
  std::vector<Piece> pieces(own.size() * m.ranks);
  T* next = store(0).data();
  std::int64_t rows = 0;
  for (int q = 0; q < m.ranks; ++q) {
    Parcel from{m.rank_of(q), {}};
    const auto take = [&](const T* here, std::int64_t size) {
      if (q == p) return here;
      from.pieces.push_back({nullptr, next, size});
      next += size;
      return static_cast<const T*>(next - size);
    };
    for (std::size_t e = 0; e < own.size(); ++e) {
      Piece& piece = pieces[e * m.ranks + q];
      if (starts(q, own[e])) piece.state = take(part.out.slot(own[e]), point), ++rows;
      if (m.open(q, own[e]))
        for (std::int64_t k = 0; k < m.each[q]; ++k)
          piece.maps.push_back(take(q == p ? part.map(own[e], k) : nullptr, map));
    }
    if (q != p) in.push_back(std::move(from));
  }
  exchange(out, in);

  // element by element over the ranks: the state behind each open rank is what the next one starts from
  Parcels back(m.ranks), home;
  for (int q = 0; q < m.ranks; ++q) back[q].rank = m.rank_of(q);
  Walks<T> walks(part.maps, part.in, rows);
  next = store(1).data();
  for (std::size_t e = 0; e < own.size(); ++e)
    for (int q = 0; q < m.ranks; ++q) {
      const Piece& piece = pieces[e * m.ranks + q];
      if (piece.state) walks.start(piece.state);
      if (!m.open(q, own[e])) continue;
      T* to = q + 1 == p ? part.in.slot(own[e]) : next;
      for (std::size_t k = 0; k < piece.maps.size(); ++k)
        walks.step(piece.maps[k], k + 1 == piece.maps.size() ? to : nullptr);
      if (q + 1 == p) continue;
      back[q + 1].pieces.push_back({to, nullptr, point});
      next += point;
    }
  walks.run();
  for (std::int64_t j = 0; j < n; ++j) {
    if (owner(j) == p || m.reach_of(p, elements[j]) == 0) continue;
    const int from = m.rank_of(owner(j));
    if (home.empty() || home.back().rank != from) home.push_back({from, {}});
    home.back().pieces.push_back({nullptr, part.in.slot(elements[j]), point});
  }
  exchange(back, home);
}

// --- all gather: every rank gets what is before it, from 1, 2, 4, … ranks before ------------------------------------

template <class T>
void RankScan<T>::all_gather(const ScanPart<T>& part, const Marks& m) {
  const int p = m.here;
  const std::int64_t point = part.point_size(), map = part.map_size();
  // What rank q does to element i, once it is here: its maps, or the state that it knows.
  struct Piece {
    const T* state = nullptr;
    const T* maps = nullptr;
  };
  std::vector<std::vector<Piece>> before(m.count);  // [element][ranks back - 1]
  for (std::int64_t i = 0; i < m.count; ++i) before[i].resize(m.reach_of(p, i) + 1);
  // The state known by the rank before came in already.
  for (std::int64_t i = 0; i < m.count; ++i)
    if (m.reach_of(p, i) == 0) before[i][0].state = part.in.slot(i);

  // Rank `to` wants of rank q what is not known in between.
  const auto wanted = [&](int to, int q, std::int64_t i) { return q >= 0 && to - 1 - q <= m.reach_of(to, i); };
  const auto for_wanted = [&](int from, int to, int distance, const auto& f) {
    for (std::int64_t i = 0; i < m.count; ++i) {
      if (m.reach_of(to, i) == 0) continue;
      for (int q = from; q > from - distance && wanted(to, q, i); --q) f(q, i);
    }
  };
  for (int distance = 1, step = 0; distance < m.ranks; distance *= 2, ++step) {
    Parcels out, in;
    if (const int to = p + distance; to < m.ranks) {
      Parcel parcel{m.rank_of(to), {}};
      for_wanted(p, to, distance, [&](int q, std::int64_t i) {
        if (q == p && !m.open(p, i)) {
          parcel.pieces.push_back({part.out.slot(i), nullptr, point});
        } else if (q == p) {
          for (std::int64_t k = 0; k < part.each; ++k) parcel.pieces.push_back({part.map(i, k), nullptr, map});
        } else {
          const Piece& piece = before[i][p - 1 - q];
          if (piece.state)
            parcel.pieces.push_back({piece.state, nullptr, point});
          else
            parcel.pieces.push_back({piece.maps, nullptr, m.each[q] * map});
        }
      });
      out.push_back(std::move(parcel));
    }
    if (const int from = p - distance; from >= 0) {
      std::int64_t room = 0;
      for_wanted(from, p, distance, [&](int q, std::int64_t i) { room += m.open(q, i) ? m.each[q] * map : point; });
      reserve(store(step), "longscan::scan::store", room);
      T* next = store(step).data();
      Parcel parcel{m.rank_of(from), {}};
      for_wanted(from, p, distance, [&](int q, std::int64_t i) {
        Piece& piece = before[i][p - 1 - q];
        const std::int64_t size = m.open(q, i) ? m.each[q] * map : point;
        (m.open(q, i) ? piece.maps : piece.state) = next;
        parcel.pieces.push_back({nullptr, next, size});
        next += size;
      });
      in.push_back(std::move(parcel));
    }
    exchange(out, in);
  }
  Walks<T> walks(part.maps, part.in, m.count);
  for (std::int64_t i = 0; i < m.count; ++i) {
    const int reach = m.reach_of(p, i);
    if (reach == 0) continue;
    walks.start(before[i][reach].state);
    for (int back = reach - 1; back >= 0; --back) {
      const std::int64_t each = m.each[p - 1 - back];
      for (std::int64_t k = 0; k < each; ++k)
        walks.step(before[i][back].maps + k * map, back == 0 && k + 1 == each ? part.in.slot(i) : nullptr);
    }
  }
  walks.run();
}

// --- doubling -------------------------------------------------------------------------------------------------------

/// Each rank has the maps of 1, 2, 4, … ranks before it as one, until a state that is known ends the row.
template <class T>
void RankScan<T>::doubling(const ScanPart<T>& part, const Marks& m) {
  const int p = m.here;
  const std::int64_t point = part.point_size(), map = part.map_size();
  for (int i = 0; i < 3; ++i) reserve(store(i), "longscan::scan::maps", m.count * map);
  DeviceArray<T>&rows = store(0), &come = store(1), &joined = store(2);  // one map an element
  {
    Parcels out, in;
    if (p + 1 < m.ranks) {
      out.push_back({m.rank_of(p + 1), {}});
      for (std::int64_t i = 0; i < m.count; ++i)
        if (m.open(p, i)) out.back().pieces.push_back({part.map(i, 0), nullptr, map});
    }
    if (p > 0) {
      in.push_back({m.rank_of(p - 1), {}});
      for (std::int64_t i = 0; i < m.count; ++i)
        if (m.open(p - 1, i)) in.back().pieces.push_back({nullptr, rows.data() + i * map, map});
    }
    exchange(out, in);
  }
  AffineMaps<T> shape = part.maps;
  const auto of = [&](const DeviceArray<T>& maps) {
    AffineMaps<T> all = shape;
    all.data = maps.data();
    return all;
  };
  for (int distance = 1; distance < m.ranks; distance *= 2) {
    Parcels out, in;
    if (const int to = p + distance; to < m.ranks) {
      out.push_back({m.rank_of(to), {}});
      for (std::int64_t i = 0; i < m.count; ++i) {
        if (m.reach_of(to, i) < distance) continue;
        if (m.reach_of(p, i) < distance)
          out.back().pieces.push_back({part.in.slot(i), nullptr, point});
        else
          out.back().pieces.push_back({rows.data() + i * map, nullptr, map});
      }
    }
    std::vector<AffineTask> joins;
    Walks<T> walks(part.maps, part.in, m.count);
    if (const int from = p - distance; from >= 0) {
      in.push_back({m.rank_of(from), {}});
      for (std::int64_t i = 0; i < m.count; ++i) {
        if (m.reach_of(p, i) < distance) continue;
        T* slot = come.data() + i * map;
        const bool state = m.reach_of(from, i) < distance;
        in.back().pieces.push_back({nullptr, slot, state ? point : map});
        if (state) {
          walks.start(slot);
          walks.step(rows.data() + i * map, part.in.slot(i));
        } else {
          joins.push_back({i, i, i});
        }
      }
    }
    exchange(out, in);
    walks.run();
    if (joins.empty()) continue;
    const auto tasks = on_device("longscan::scan::joins", joins);
    affine_compose(Space(), of(come), of(rows), of(joined), tasks.data(), static_cast<std::int64_t>(joins.size()));
    Space().fence();  // the tasks are freed
    std::swap(rows, joined);
  }
}

// --- MPI_Exscan -----------------------------------------------------------------------------------------------------

template <class T>
void RankScan<T>::by_mpi(const ScanPart<T>& part, const Marks& m) {
  // An element: whether it is a state, then the state or the map. In host memory, where MPI calls the operator.
  const std::int64_t point = part.point_size(), map = part.map_size();
  constexpr std::int64_t head = 64;
  const std::int64_t element = head + map * static_cast<std::int64_t>(sizeof(T));
  const auto is_state = [](const void* e) { return static_cast<const char*>(e)[0] != 0; };
  const auto values = [](void* e) { return reinterpret_cast<T*>(static_cast<char*>(e) + head); };
  std::vector<char> mine(m.count * element, 0), result(m.count * element, 0);
  for (std::int64_t i = 0; i < m.count; ++i) {
    char* to = mine.data() + i * element;
    to[0] = m.open(m.here, i) ? 0 : 1;
    if (m.open(m.here, i))
      copy_to_host<T>(part.map(i, 0), map, values(to));
    else if (part.links.sends())
      copy_to_host<T>(part.out.slot(i), point, values(to));
  }
  AffineMaps<T> shape = part.maps;
  const int leading = part.in.leading;
  std::vector<T> scratch(std::max(map, point));
  const Transport::Operator combine = [&](const void* earlier, void* later, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      auto* a = static_cast<char*>(const_cast<void*>(earlier)) + i * element;
      auto* b = static_cast<char*>(later) + i * element;
      if (is_state(b)) continue;
      if (is_state(a)) {
        affine_apply(HostLanes<T>{}, shape, static_cast<const T*>(values(b)), static_cast<const T*>(values(a)),
                     scratch.data(), leading);
        std::copy_n(scratch.data(), point, values(b)), b[0] = 1;
      } else {
        affine_compose(HostLanes<T>{}, shape, static_cast<const T*>(values(a)), static_cast<const T*>(values(b)),
                       scratch.data());
        std::copy_n(scratch.data(), map, values(b));
      }
    }
  };
  ranks_.exclusive_scan(mine.data(), result.data(), m.count, element, combine, m.reversed);
  for (std::int64_t i = 0; i < m.count; ++i)
    if (m.reach_of(m.here, i) > 0) copy_to_device<T>(values(result.data() + i * element), point, part.in.slot(i));
}

template <class T>
void RankScan<T>::run(ScanAlgorithm algorithm, const ScanPart<T>& part, const ScanAdvance& advance) {
  if (ranks_.size() == 1) return;
  const std::vector<char> here = hand_over_known(part);
  if (algorithm == ScanAlgorithm::chain || algorithm == ScanAlgorithm::automatic) {
    chain(part, here, advance);
  } else {
    const Marks marks = gather_marks(part);
    if (marks.any_open) {
      if (algorithm == ScanAlgorithm::all_to_all) all_to_all(part, marks);
      if (algorithm == ScanAlgorithm::all_gather) all_gather(part, marks);
      if (algorithm == ScanAlgorithm::doubling) doubling(part, marks);
      if (algorithm == ScanAlgorithm::mpi) by_mpi(part, marks);
    }
  }
  ranks_.settle();
}

template class RankScan<float>;
template class RankScan<double>;

}  // namespace longscan
