// SPDX-License-Identifier: Apache-2.0
#pragma once
// The library's cells, one channel at a time. Weight names, stacking and gate orders are those of torch.nn and of
// ParaRNN (arXiv:2510.21450). Every product-plus-sum is an explicit `fused`.
#include "core/elementary.hpp"

namespace longscan {

// --- channels that do not mix: the concept BlockCell of longscan/cells.hpp
// --------------------------------------------

/// z = sig(a_z h + x_z), r = sig(a_r h + x_r), c = tanh(a_c (h r) + x_c), h' = (1 - z) h + z c; weights a_z, a_r, a_c.
struct ParaGru {
  static constexpr int state = 1, inputs = 3, weights = 3;

  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* a, T* h) {
    const T z = sigmoid(fused(a[0], h[0], x[0])), r = sigmoid(fused(a[1], h[0], x[1]));
    const T c = hyperbolic_tangent(fused(a[2], h[0] * r, x[2]));
    h[0] = fused(z, c - h[0], h[0]);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* a, const T* h, T* A) {
    const T z = sigmoid(fused(a[0], h[0], x[0])), r = sigmoid(fused(a[1], h[0], x[1]));
    const T c = hyperbolic_tangent(fused(a[2], h[0] * r, x[2]));
    const T dz = a[0] * z * (T(1) - z), dr = a[1] * r * (T(1) - r);
    const T dc = a[2] * fused(h[0], dr, r) * (T(1) - c) * (T(1) + c);
    A[0] = fused(z, dc, fused(c - h[0], dz, T(1) - z));
  }
  /// What one step may round, in units of the last place of 1: |h| and ten times what the gate lets in.
  template <class T>
  KOKKOS_INLINE_FUNCTION static void rounding(const T* x, const T* a, const T* h, const T* after, T* rho) {
    const T z = sigmoid(fused(a[0], h[0], x[0]));
    rho[0] = fused(T(10), z, magnitude(after[0]));
  }
};

/// f = sig(a_f h + p_f c + x_f), g = tanh(a_g h + x_g), c' = f c + (1 - f) g, o = sig(a_o h + p_o c' + x_o), h' = o
/// tanh(c'); state (h, c); weights a_f, a_g, a_o, p_f, p_o.
struct ParaLstm {
  static constexpr int state = 2, inputs = 3, weights = 5;

  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* a, T* s) {
    const T f = sigmoid(fused(a[0], s[0], fused(a[3], s[1], x[0]))), g = hyperbolic_tangent(fused(a[1], s[0], x[1]));
    const T c = fused(f, s[1] - g, g);
    const T o = sigmoid(fused(a[2], s[0], fused(a[4], c, x[2])));
    s[0] = o * hyperbolic_tangent(c), s[1] = c;
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void jacobian(const T* x, const T* a, const T* s, T* A) {
    const T f = sigmoid(fused(a[0], s[0], fused(a[3], s[1], x[0]))), g = hyperbolic_tangent(fused(a[1], s[0], x[1]));
    const T c = fused(f, s[1] - g, g);
    const T o = sigmoid(fused(a[2], s[0], fused(a[4], c, x[2]))), t = hyperbolic_tangent(c);
    const T df = (s[1] - g) * f * (T(1) - f), dg = (T(1) - f) * (T(1) - g) * (T(1) + g);
    const T c_h = fused(df, a[0], dg * a[1]), c_c = fused(df, a[3], f);
    const T d_o = t * o * (T(1) - o), dt = o * (T(1) - t) * (T(1) + t);
    A[0] = fused(d_o, fused(a[4], c_h, a[2]), dt * c_h);
    A[1] = fused(d_o * a[4], c_c, dt * c_c);
    A[2] = c_h, A[3] = c_c;
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void rounding(const T*, const T*, const T*, const T* after, T* rho) {
    for (int i = 0; i < 2; ++i) rho[i] = magnitude(after[i]) + T(10);
  }
};

// --- channels that mix through p = W_hh h + b_hh: the elementwise rest, and its derivatives
// ---------------------------

/// h' = tanh(x + p)
struct RnnTanhGates {
  static constexpr int state = 1, gates = 1;
  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* p, T* s) {
    s[0] = hyperbolic_tangent(x[0] + p[0]);
  }
  /// dp [state][gates] = ds'/dp, ds [state][state] = ds'/ds at fixed p; s is the state before.
  template <class T>
  KOKKOS_INLINE_FUNCTION static void derivatives(const T* x, const T* p, const T*, T* dp, T* ds) {
    const T h = hyperbolic_tangent(x[0] + p[0]);
    dp[0] = (T(1) - h) * (T(1) + h), ds[0] = T(0);
  }
};

/// h' = max(0, x + p)
struct RnnReluGates {
  static constexpr int state = 1, gates = 1;
  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* p, T* s) {
    const T v = x[0] + p[0];
    s[0] = v < T(0) ? T(0) : v;  // NaN stays NaN
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void derivatives(const T* x, const T* p, const T*, T* dp, T* ds) {
    dp[0] = x[0] + p[0] > T(0) ? T(1) : T(0), ds[0] = T(0);
  }
};

/// r, z, n in torch's order: n = tanh(x_n + r p_n) with p_n = W_hn h + b_hn, h' = (1 - z) n + z h
struct GruGates {
  static constexpr int state = 1, gates = 3;
  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* p, T* s) {
    const T r = sigmoid(x[0] + p[0]), z = sigmoid(x[1] + p[1]), n = hyperbolic_tangent(fused(r, p[2], x[2]));
    s[0] = fused(z, s[0] - n, n);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void derivatives(const T* x, const T* p, const T* s, T* dp, T* ds) {
    const T r = sigmoid(x[0] + p[0]), z = sigmoid(x[1] + p[1]), n = hyperbolic_tangent(fused(r, p[2], x[2]));
    const T dn = (T(1) - z) * (T(1) - n) * (T(1) + n);
    dp[0] = dn * p[2] * r * (T(1) - r), dp[1] = (s[0] - n) * z * (T(1) - z), dp[2] = dn * r, ds[0] = z;
  }
};

/// i, f, g, o in torch's order; state (h, c): c' = f c + i g, h' = o tanh(c')
struct LstmGates {
  static constexpr int state = 2, gates = 4;
  template <class T>
  LONGSCAN_INLINE_FUNCTION static void step(const T* x, const T* p, T* s) {
    const T i = sigmoid(x[0] + p[0]), f = sigmoid(x[1] + p[1]), g = hyperbolic_tangent(x[2] + p[2]),
            o = sigmoid(x[3] + p[3]);
    s[1] = fused(f, s[1], i * g);
    s[0] = o * hyperbolic_tangent(s[1]);
  }
  template <class T>
  KOKKOS_INLINE_FUNCTION static void derivatives(const T* x, const T* p, const T* s, T* dp, T* ds) {
    const T i = sigmoid(x[0] + p[0]), f = sigmoid(x[1] + p[1]), g = hyperbolic_tangent(x[2] + p[2]),
            o = sigmoid(x[3] + p[3]);
    const T t = hyperbolic_tangent(fused(f, s[1], i * g)), dt = o * (T(1) - t) * (T(1) + t);
    dp[4] = g * i * (T(1) - i), dp[5] = s[1] * f * (T(1) - f), dp[6] = i * (T(1) - g) * (T(1) + g), dp[7] = T(0);
    for (int j = 0; j < 3; ++j) dp[j] = dt * dp[4 + j];
    dp[3] = t * o * (T(1) - o);
    ds[0] = T(0), ds[1] = dt * f, ds[2] = T(0), ds[3] = f;
  }
};

}  // namespace longscan
