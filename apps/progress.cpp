// SPDX-License-Identifier: Apache-2.0
#include "apps/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace longscan {
namespace {

/// mpirun gives ranks a pseudo-terminal even when its own output goes to a file, so isatty alone does not tell: the
/// size of such a terminal is 0.
bool is_terminal() {
  const char* term = std::getenv("TERM");
  if (!isatty(STDERR_FILENO) || !term || std::strcmp(term, "dumb") == 0) return false;
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
}

std::string count_text(double n) {
  char text[32];
  if (n >= 1e9)
    std::snprintf(text, sizeof text, "%.2f G", n / 1e9);
  else if (n >= 1e6)
    std::snprintf(text, sizeof text, "%.2f M", n / 1e6);
  else if (n >= 1e3)
    std::snprintf(text, sizeof text, "%.1f k", n / 1e3);
  else
    std::snprintf(text, sizeof text, "%.0f ", n);
  return text;
}

}  // namespace

std::string count_of(std::int64_t n, const std::string& what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

Progress::Progress(bool show, std::string command, std::int64_t tokens)
    : show_(show), terminal_(show && is_terminal()), command_(std::move(command)), total_(tokens) {
  start_ = printed_ = std::chrono::steady_clock::now();
}

Progress::~Progress() {
  if (drawn_) std::fputc('\n', stderr);
}

double Progress::elapsed() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::say(const std::string& line) {
  if (!show_) return;
  if (drawn_) std::fputs("\r\033[K", stderr);
  std::fprintf(stderr, "longscan: %s\n", line.c_str());
  drawn_ = false;
  std::fflush(stderr);
}

void Progress::at(std::int64_t tokens, const std::string& doing) {
  if (!show_) return;
  tokens_ = tokens, doing_ = doing;
  const auto now = std::chrono::steady_clock::now();
  const double since = std::chrono::duration<double>(now - printed_).count();
  if (terminal_ ? drawn_ && since < 0.1 : since < 10) return;
  printed_ = now;
  draw(false);
}

void Progress::draw(bool last) {
  const double share = total_ > 0 ? static_cast<double>(tokens_) / static_cast<double>(total_) : 1;
  if (terminal_) {
    std::string bar(30, ' ');
    std::fill_n(bar.begin(), static_cast<int>(share * 30), '=');
    std::fprintf(stderr, "\r\033[K%s [%s] %3.0f %%  %stokens  %s", command_.c_str(), bar.c_str(), share * 100,
                 count_text(static_cast<double>(tokens_)).c_str(), last ? "" : doing_.c_str());
    drawn_ = true;
  } else {
    std::fprintf(stderr, "longscan: %.0f %% of %stokens, %.0f s, %s\n", share * 100,
                 count_text(static_cast<double>(total_)).c_str(), elapsed(), doing_.c_str());
  }
  std::fflush(stderr);
}

void Progress::done(const std::string& where) {
  if (!show_) return;
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
  const double seconds = elapsed();
  std::fprintf(stderr, "longscan: %stoken%s in %.2f s (%stokens/s)%s%s\n",
               count_text(static_cast<double>(total_)).c_str(), total_ == 1 ? "" : "s", seconds,
               count_text(static_cast<double>(total_) / std::max(seconds, 1e-9)).c_str(), where.empty() ? "" : " -> ",
               where.c_str());
  std::fflush(stderr);
}

}  // namespace longscan
