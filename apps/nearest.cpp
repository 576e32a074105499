// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "apps/options.hpp"

namespace longscan {
namespace {

/// Insertions, deletions, substitutions and swaps of neighbours between two words.
int distance(const std::string& a, const std::string& b) {
  const std::size_t m = a.size(), n = b.size();
  std::vector<std::vector<int>> d(m + 1, std::vector<int>(n + 1));
  for (std::size_t i = 0; i <= m; ++i) d[i][0] = static_cast<int>(i);
  for (std::size_t j = 0; j <= n; ++j) d[0][j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= m; ++i)
    for (std::size_t j = 1; j <= n; ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[m][n];
}

}  // namespace

std::string nearest(const std::string& text, const std::vector<std::string>& names) {
  std::string best;
  int least = static_cast<int>(std::max<std::size_t>(1, text.size() / 2)) + 1;
  for (const std::string& name : names) {
    // a word that starts with the other is near whatever its length
    const bool prefix =
        !text.empty() && text != "/" && name.size() > 1 && (name.rfind(text, 0) == 0 || text.rfind(name, 0) == 0);
    const int d = prefix ? 1 : distance(text, name);
    if (d < least) least = d, best = name;
  }
  return best;
}

void throw_unknown(const std::string& what, const std::string& text, const std::vector<std::string>& names,
                   ExitCode code) {
  std::string message = "unknown " + what + " '" + text + "'";
  const std::string near = nearest(text, names);
  if (!near.empty()) message += "; did you mean '" + near + "'?";
  if (near.empty() && names.size() > 24) message += "; see --help";
  if (!names.empty() && names.size() <= 24) {
    message += " (known:";
    for (const std::string& name : names) message += " " + name;
    message += ")";
  }
  throw Error(code, message);
}

}  // namespace longscan
