// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <vector>

namespace longscan::test {

/// The items of a list. With LONGSCAN_TEST_STRIDE=n in the environment every n-th and the last: sanitizers make a test
/// a thousand times as long.
template <class List>
auto some_of(const List& list) {
  const char* text = std::getenv("LONGSCAN_TEST_STRIDE");
  const std::size_t stride = text && std::atoi(text) > 1 ? static_cast<std::size_t>(std::atoi(text)) : 1;
  std::vector<std::decay_t<decltype(*std::begin(list))>> items;
  std::size_t i = 0;
  const std::size_t last = std::size(list) - 1;
  for (const auto& item : list) {
    if (i % stride == 0 || i == last) items.push_back(item);
    ++i;
  }
  return items;
}
template <class T>
auto some_of(std::initializer_list<T> list) {
  return some_of(std::vector<T>(list));
}
/// The same of [begin, end).
inline std::vector<int> some_of(int begin, int end) {
  std::vector<int> all;
  for (int i = begin; i < end; ++i) all.push_back(i);
  return some_of(all);
}

}  // namespace longscan::test
