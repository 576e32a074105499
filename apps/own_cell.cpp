// SPDX-License-Identifier: Apache-2.0
// Solves two recurrences that the library does not have, over the ranks that it is started on:
//     mpirun -n 3 longscan_own_cell
// A driven, damped pendulum forgets where it started, so all ranks work at once. A logistic map is chaotic: nothing can
// be solved from both ends, and the verdict has to say so; its states are right all the same. Exit code 0 if the
// verdicts and the states are what they have to be.
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

#include "longscan/cells.hpp"

namespace {

using longscan::fused;

/// theta'' = -friction theta' - sin(theta) + x, with steps of `dt`: first the velocity, then, with the new one, the
/// angle.
struct Pendulum {
  static constexpr int state = 2, inputs = 1, weights = 2;  // (theta, omega); the force; (friction, dt)

  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    using std::sin;
    const T force = fused(-w[0], s[1], x[0] - sin(s[0]));
    s[1] = fused(w[1], force, s[1]);
    s[0] = fused(w[1], s[1], s[0]);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T*, const T* w, const T* s, T* A) {
    using std::cos;
    A[2] = -w[1] * cos(s[0]), A[3] = T(1) - w[1] * w[0];  // omega' by theta, by omega
    A[0] = fused(w[1], A[2], T(1)), A[1] = w[1] * A[3];   // theta' by theta, by omega
  }
};

/// s' = 1 - a s^2 + x, kept within [-1, 1]. (Where it is cut off it forgets everything; x <= 0 leaves it chaotic.)
struct Logistic {
  static constexpr int state = 1, inputs = 1, weights = 1;

  template <class T>
  KOKKOS_INLINE_FUNCTION static T before_clip(const T* x, const T* w, const T* s) {
    return fused(-w[0] * s[0], s[0], T(1) + x[0]);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void step(const T* x, const T* w, T* s) {
    const T y = before_clip(x, w, s);
    s[0] = y > T(1) ? T(1) : y < T(-1) ? T(-1) : y;
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* w, const T* s, T* A) {
    const T y = before_clip(x, w, s);
    A[0] = y > T(1) || y < T(-1) ? T(0) : T(-2) * w[0] * s[0];
  }
};

/// Solves `tokens` tokens of `channels` channels and compares with the plain loop, which every rank runs by itself.
/// `drive(t, channel)` is the input; its bits must not depend on who asks, so it writes fused too.
template <class Cell, class Drive>
longscan::NewtonReport solve(longscan::Transport& ranks, const char* name, int channels,
                             const std::vector<double>& weights, std::int64_t tokens, const Drive& drive,
                             double& error) {
  using Array = Kokkos::View<double*>;
  const longscan::Sequences sequences{{0, tokens}};
  const longscan::TokenRange part = longscan::cell_part(ranks, sequences);
  const std::int64_t size = std::int64_t{Cell::state} * channels;
  Array w("weights", weights.size()), x("x", part.size() * channels), states("states", part.size() * size);
  const auto w_host = Kokkos::create_mirror_view(w), x_host = Kokkos::create_mirror_view(x);
  for (std::size_t i = 0; i < weights.size(); ++i) w_host(i) = weights[i];
  for (std::int64_t t = 0; t < part.size(); ++t)
    for (int d = 0; d < channels; ++d) x_host(t * channels + d) = drive(part.begin + t, d);
  Kokkos::deep_copy(w, w_host), Kokkos::deep_copy(x, x_host);

  const longscan::CellCheck check = longscan::check_cell<Cell>();
  const longscan::NewtonReport report =
      longscan::solve_cells<Cell, double>(ranks, channels, w.data(), sequences, {x.data(), states.data()});

  const auto solved = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), states);
  error = 0;
  for (int d = 0; d < channels; ++d) {
    double s[Cell::state] = {}, c[Cell::weights];
    for (int i = 0; i < Cell::weights; ++i) c[i] = weights[i * channels + d];
    for (std::int64_t t = 0; t < part.end; ++t) {
      const double force = drive(t, d);
      Cell::step(&force, c, s);
      for (int i = 0; i < Cell::state && t >= part.begin; ++i)
        error = std::max(error, std::abs(s[i] - solved((t - part.begin) * size + i * channels + d)));
    }
  }
  ranks.all_reduce(&error, 1, longscan::Transport::Reduction::max);
  if (ranks.rank() == 0)
    std::printf(
        "%s: %s by %s in %lld passes on %d rank%s%s; Lyapunov exponent %.3f; largest difference from the plain "
        "loop %.1e; Jacobian right to %.0e at %d points\n",
        name, std::string(name_of(report.status)).c_str(), std::string(name_of(report.method_used)).c_str(),
        static_cast<long long>(report.iterations), ranks.size(), ranks.size() == 1 ? "" : "s",
        report.bits_of_token_loop ? ", the bits of the token loop" : "", report.lyapunov, error, check.worst,
        check.points);
  return report;
}

int run(longscan::Transport& ranks) {
  const int channels = 8;
  const std::int64_t tokens = 40000;
  std::vector<double> pendulum, logistic;
  for (int d = 0; d < channels; ++d) pendulum.push_back(1 + 0.1 * d), logistic.push_back(1.75 + 0.01 * d);
  pendulum.insert(pendulum.end(), channels, 0.1);  // dt

  double pendulum_error = 0, logistic_error = 0;
  const auto first = solve<Pendulum>(
      ranks, "pendulum", channels, pendulum, tokens,
      [](std::int64_t t, int d) { return 0.5 * std::sin(fused(0.037, static_cast<double>(t), d)); }, pendulum_error);
  const auto second = solve<Logistic>(
      ranks, "logistic map", channels, logistic, tokens,
      [](std::int64_t t, int d) { return 0.01 * std::sin(fused(0.1, static_cast<double>(t), d)) - 0.01; },
      logistic_error);
  const bool forgets = first.status == longscan::NewtonStatus::converged && first.lyapunov < 0 && pendulum_error < 1e-9;
  const bool chaotic =
      second.status == longscan::NewtonStatus::fell_back && second.lyapunov > 0 && logistic_error < 1e-9;
  if (ranks.rank() == 0)
    std::printf("%s\n", forgets && chaotic ? "As it has to be." : "This is not what it has to be.");
  return forgets && chaotic ? 0 : 6;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int code = 1;
  try {
    Kokkos::ScopeGuard kokkos(argc, argv);
    code = run(*longscan::make_mpi_transport());
  } catch (const longscan::Error& e) {
    std::fprintf(stderr, "longscan_own_cell: %s\n", e.what());
    code = static_cast<int>(e.code());
  }
  MPI_Finalize();
  return code;
}
