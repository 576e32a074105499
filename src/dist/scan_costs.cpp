// SPDX-License-Identifier: Apache-2.0
// What a scan costs here: the messages between neighbours and the maths, measured; and the choice that follows.
#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "dist/exclusive_scan.hpp"
#include "dist/scan_measure.hpp"
#include "local/affine_scan.hpp"

namespace longscan {
namespace {

using Space = Kokkos::DefaultExecutionSpace;

/// The least seconds of `runs` calls, after one more.
template <class F>
double least_seconds(int runs, const F& f) {
  f();
  double least = 1e300;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return least;
}

struct Link {
  double latency = 0, byte = 0;
};

/// alpha and beta: messages of memory that kernels reach, from every rank to the next, around, at once. Collective.
Link measure_link(Transport& ranks) {
  constexpr std::int64_t large = measured_message_bytes;
  Courier courier(ranks);
  const DeviceArray<char> out("longscan::scan::out", large), in("longscan::scan::in", large);
  const int p = ranks.size(), next = (ranks.rank() + 1) % p, previous = (ranks.rank() + p - 1) % p;
  const auto message = [&](std::int64_t bytes) {
    courier.exchange({{next, out.data(), bytes}}, {{previous, in.data(), bytes}});
    ranks.settle();
  };
  double seconds[] = {least_seconds(1, [&] { message(8); }), least_seconds(1, [&] { message(large); })};
  ranks.all_reduce(seconds, 2, Transport::Reduction::max);
  if (seconds[0] + seconds[1] < 5e-3) {  // where ranks share cores it takes long enough as it is
    seconds[0] = least_seconds(20, [&] { message(8); }), seconds[1] = least_seconds(4, [&] { message(large); });
    ranks.all_reduce(seconds, 2, Transport::Reduction::max);
  }
  return {seconds[0], std::max(0.0, seconds[1] - seconds[0]) / large};
}

/// Measured once in the life of a program: all ranks come here in the same order.
Link link_of(Transport& ranks) {
  static std::map<std::pair<std::string, int>, Link> known;
  const auto key = std::pair(ranks.name(), ranks.size());
  auto it = known.find(key);
  if (it == known.end()) it = known.emplace(key, measure_link(ranks)).first;
  return it->second;
}

template <class T>
ScanSize size_of(const ScanPart<T>& part) {
  return {part.count, part.point_size() * static_cast<std::int64_t>(sizeof(T)),
          part.map_size() * static_cast<std::int64_t>(sizeof(T)), part.each};
}

}  // namespace

template <class T>
ScanCosts measure_scan(Transport& ranks, const ScanPart<T>& part, bool compose) {
  ScanCosts costs;
  if (ranks.size() > 1) {
    const Link link = link_of(ranks);
    costs.latency = link.latency, costs.byte = link.byte;
  }
  // as many elements as there are, but not more than some memory holds
  const std::int64_t point = part.point_size(), map = part.map_size();
  const std::int64_t n =
      std::clamp<std::int64_t>((std::int64_t{1} << 23) / map, 1, std::max<std::int64_t>(1, part.count));
  DeviceArray<T> maps("longscan::scan::maps", n * map), points("longscan::scan::points", 3 * n * point);
  const auto seconds_of_steps = [&](int steps) {
    std::vector<AffineStep<T>> list;
    std::vector<AffineWalk<T>> walks;
    for (std::int64_t i = 0; i < n; ++i) {
      walks.push_back({static_cast<std::int64_t>(list.size()), steps, points.data() + i * point});
      for (int j = 0; j < steps; ++j)
        list.push_back({maps.data() + i * map, points.data() + ((1 + j % 2) * n + i) * point});
    }
    return least_seconds(3, [&] {
      const auto device_list = on_device("longscan::scan::steps", list);
      const auto device_walks = on_device("longscan::scan::walks", walks);
      affine_walk(Space(), part.maps, part.in.leading, device_list.data(), device_walks.data(), n);
      Space().fence();  // timed
    });
  };
  const double one = seconds_of_steps(1), four = seconds_of_steps(4);
  costs.apply = std::max(four - one, 0.1 * one) / (3.0 * static_cast<double>(n));
  costs.launch = std::max(0.0, one - static_cast<double>(n) * costs.apply);
  if (compose) {
    DeviceArray<T> second("longscan::scan::maps", map), joined("longscan::scan::maps", map);
    AffineMaps<T> a = part.maps, b = part.maps, out = part.maps;
    a.data = maps.data(), b.data = second.data(), out.data = joined.data();
    const auto tasks = on_device("longscan::scan::joins", std::vector<AffineTask>{{0, 0, 0}});
    costs.compose = least_seconds(2, [&] {
      affine_compose(Space(), a, b, out, tasks.data(), 1);
      Space().fence();  // timed
    });
  }
  const unsigned cores = std::thread::hardware_concurrency();
  const bool crowded = is_host_space<Space> && cores > 0 && ranks.local_size() > static_cast<int>(cores);
  double worst[] = {costs.apply, costs.compose, costs.launch, crowded ? 1.0 : 0.0};
  ranks.all_reduce(worst, 4, Transport::Reduction::max);
  return {costs.latency, costs.byte, worst[0], worst[1], worst[2], true, worst[3] > 0};
}

template <class T>
ScanAlgorithm ScanPlan::choose(Transport& ranks, const ScanPart<T>& part) {
  if (chosen_) return choice_.algorithm;
  chosen_ = true;
  ScanSize size = size_of(part);
  if (!measures_scan(asked_ == ScanAlgorithm::automatic, ranks.size())) {
    choice_ = choose_scan(asked_, size, ranks.size(), {}, same_bits_);
  } else {
    ranks.all_reduce(&size.maps, 1, Transport::Reduction::max);
    choice_ = choose_scan(asked_, size, ranks.size(), measure_scan(ranks, part, false), same_bits_);
  }
  return choice_.algorithm;
}

template ScanCosts measure_scan(Transport&, const ScanPart<float>&, bool);
template ScanCosts measure_scan(Transport&, const ScanPart<double>&, bool);
template ScanAlgorithm ScanPlan::choose(Transport&, const ScanPart<float>&);
template ScanAlgorithm ScanPlan::choose(Transport&, const ScanPart<double>&);

}  // namespace longscan
