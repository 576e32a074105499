// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "longscan/sequence_file.hpp"

namespace longscan {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The end of the run of digits that starts at `i`.
std::size_t end_of_digits(const std::string& s, std::size_t i) {
  while (i < s.size() && is_digit(s[i])) ++i;
  return i;
}

/// Three-way comparison of two runs of digits as numbers of any length.
int compare_numbers(std::string a, std::string b) {
  a.erase(0, std::min(a.find_first_not_of('0'), a.size()));
  b.erase(0, std::min(b.find_first_not_of('0'), b.size()));
  if (a.size() != b.size()) return a.size() < b.size() ? -1 : 1;
  return a.compare(b);
}

}  // namespace

bool natural_less(const std::string& a, const std::string& b) {
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::size_t end_a = end_of_digits(a, i), end_b = end_of_digits(b, j);
      const int order = compare_numbers(a.substr(i, end_a - i), b.substr(j, end_b - j));
      if (order != 0) return order < 0;
      i = end_a;
      j = end_b;
    } else if (a[i] != b[j]) {
      return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
    } else {
      ++i;
      ++j;
    }
  }
  const bool a_done = i == a.size(), b_done = j == b.size();
  if (a_done != b_done) return a_done;
  return a < b;  // equal but for leading zeros: still a total order
}

}  // namespace longscan
