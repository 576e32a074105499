// SPDX-License-Identifier: Apache-2.0
#pragma once
// One chunk of the delta rule in WY form, for every variant. Device functions over a team of lanes; no launches.
//
// With Gamma(s..t) the decay from after token s to token t, and 0 the state before the chunk, all variants are
//     x_t = u_t + S_0 a^_t + sum_{s<t} A_ts x_s (+ sum_{s<t} A'_ts v_s)        a^_t = Gamma(0..t') a_t
//     o_t = S_0 q^_t + sum_{s<=t} P_ts x_s (+ sum_{s<=t} P'_ts v_s)            q^_t = Gamma(0..t) q_t
//     S_C = S_0 Gamma(0..C) + sum_s x_s (Gamma(s..C) b_s)^T (+ sum_s v_s (Gamma(s..C) k_s)^T)
//     A_ts = b_s^T Gamma(s..t') a_t      P_ts = b_s^T Gamma(s..t) q_t          A', P' the same with k for b
// delta: a = -beta k, b = k, u = eta v, no primed terms; t' = t when the erase reads the decayed state, else t - 1.
// dplr: a, b free, u = 0, primed terms; t' = t - 1.
// Decays enter only as products of factors exp(log_decay) <= 1: nothing can overflow or become 0 * infinity.
// The state is held transposed, St [K][N], so that the columns (the rows of S) are contiguous.
#include "core/dtype.hpp"
#include "core/elementary.hpp"
#include "longscan/delta_rule.hpp"

namespace longscan {

/// Tokens of a diagonal block: the substitution and the decays go block by block.
inline constexpr int delta_block = 16;
/// Leading dimensions are multiples of this many bytes.
inline constexpr int row_bytes = 64;

template <class T>
KOKKOS_INLINE_FUNCTION constexpr int padded(int n) {
  constexpr int unit = row_bytes / static_cast<int>(sizeof(T));
  return (n + unit - 1) / unit * unit;
}

/// What a pass over tokens needs to know; the same for all its chunks.
struct DeltaRules {
  int chunk = 64, d_key = 1, d_value = 1;
  bool dplr = false, undecayed = false, channel_decay = false, normalize_keys = false, round_to_bf16 = false;
  bool half_operands = false;   ///< 16-bit operands of products are allowed
  bool outputs = true;          ///< compute o
  bool map = false;             ///< carry P^T in the columns before those of S
  bool count_breaches = false;  ///< of the stability bound; once for each token
  Inverse inverse = Inverse::forward;
  double scale = 1;
  /// Columns of the state: V, or K + V with a map.
  KOKKOS_INLINE_FUNCTION int columns() const { return d_value + map_columns(); }
  /// Columns of P^T, and where those of S start.
  KOKKOS_INLINE_FUNCTION int map_columns() const { return map ? d_key : 0; }
};

/// The arrays of one rank; see DeltaInputs.
struct DeltaArrays {
  TokenArray q, k, v, beta, eta, log_decay, a, b;
};

/// Counts of one pass over one segment and head.
struct DeltaCounts {
  std::int64_t first_bad = -1;  ///< first token of the first chunk with a non-finite result; -1 is none
  std::int64_t breaches = 0;
  std::int64_t fallbacks = 0;
  std::int32_t terms = 0;
};

/// Working memory of one team.
template <class T>
struct ChunkBuffers {
  int ck, cc, cn;                // leading dimensions: rows of K, of C, of the state's columns
  T *b, *k, *a, *q;              // [C][K]; b and k are one array unless dplr
  T *bt, *kt;                    // [K][C], transposed, decayed to the end of the chunk
  T* d;                          // [C][K] decays, channel decay only
  T *A, *P, *A2, *P2;            // [C][C]; A2, P2 (the primed ones) dplr only
  T *x, *v, *o;                  // [C][N]; v dplr only
  T *inv, *inv2;                 // [C][C], series only
  T *e, *g;                      // [K] decay inside the block, and from the chunk's start
  T* row;                        // [C] scratch, one value a token
  T *beta, *eta;                 // [C]
  double *decay, *mask, *start;  // [C] head decays, one row of Gamma(s..t), and Gamma(0..t)

  /// Lay the buffers out from `base` on; returns the bytes used (base may be null).
  KOKKOS_FUNCTION std::size_t place(char* base, const DeltaRules& r) {
    const int C = (r.chunk + delta_block - 1) / delta_block * delta_block, K = r.d_key;
    ck = padded<T>(K), cc = padded<T>(C), cn = padded<T>(r.columns());
    std::size_t at = 0;
    const auto take = [&](auto*& p, std::size_t n) {
      using Element = std::remove_reference_t<decltype(*p)>;
      p = reinterpret_cast<Element*>(base + at);
      at += (n * sizeof(Element) + row_bytes - 1) / row_bytes * row_bytes;
    };
    const std::size_t ckn = static_cast<std::size_t>(C) * ck, ccn = static_cast<std::size_t>(C) * cc,
                      kcn = static_cast<std::size_t>(K) * cc, cnn = static_cast<std::size_t>(C) * cn;
    const bool series = r.inverse != Inverse::forward;
    take(b, ckn), take(a, ckn), take(q, r.outputs ? ckn : 0), take(bt, kcn);
    k = b, kt = bt;
    if (r.dplr) take(k, ckn), take(kt, kcn);
    take(d, r.channel_decay ? ckn : 0);
    take(A, ccn), take(P, r.outputs ? ccn : 0), take(A2, r.dplr ? ccn : 0), take(P2, r.dplr && r.outputs ? ccn : 0);
    take(x, cnn), take(v, r.dplr ? cnn : 0), take(o, r.outputs ? cnn : 0);
    take(inv, series ? ccn : 0), take(inv2, series ? ccn : 0);
    take(e, ck), take(g, ck), take(row, 2 * cc), take(beta, cc), take(eta, cc), take(decay, cc), take(mask, cc),
        take(start, cc);
    return at;
  }
};

/// The chunk step; `Lanes` gives loops over a team and the small matrix product (local/lanes.hpp).
template <class T, class Lanes>
struct DeltaChunk {
  const Lanes& lanes;
  const DeltaRules& r;
  const DeltaArrays& in;
  ChunkBuffers<T> w;
  int head;

  /// Advance St over tokens [t0, t0 + n), n <= chunk, and write their outputs.
  KOKKOS_FUNCTION void step(std::int64_t t0, int n, T* St, const MutableTokenArray& out, DeltaCounts& counts) {
    const int rows = (n + delta_block - 1) / delta_block * delta_block, K = r.d_key, N = w.cn;
    read(t0, n, rows);
    if (r.count_breaches) count_breaches(n, counts);
    write_right_side(t0, n, rows);
    if (!in.log_decay.data)
      prepare(rows);
    else if (r.channel_decay)
      prepare_channel_decay(rows);
    else
      prepare_head_decay(rows);

    // X = (I - A)^-1 (U + A^ S_0)
    lanes.product(rows, N, K, w.a, w.ck, St, N, w.x, N, true);
    if (r.dplr) lanes.product(rows, N, rows, w.A2, w.cc, w.v, N, w.x, N, true);
    lanes.sync();
    solve(rows, n, counts);

    if (r.outputs) {  // O = Q^ S_0 + P X, before the state moves on
      lanes.product(rows, N, K, w.q, w.ck, St, N, w.o, N, false);
      lanes.sync();
      for (int i = 0; i < rows; i += delta_block) {
        lanes.product(delta_block, N, i + delta_block, w.P + i * w.cc, w.cc, w.x, N, w.o + i * N, N, true);
        if (r.dplr) lanes.product(delta_block, N, i + delta_block, w.P2 + i * w.cc, w.cc, w.v, N, w.o + i * N, N, true);
      }
      lanes.sync();
      write_outputs(t0, n, out, counts);
    }
    // S <- S Gamma + X^T B
    if (in.log_decay.data) {
      lanes.each2(K, N, [&](int k, int j) { St[k * N + j] *= w.g[k]; });
      lanes.sync();
    }
    lanes.product(K, N, rows, w.bt, w.cc, w.x, N, St, N, true);
    if (r.dplr) lanes.product(K, N, rows, w.kt, w.cc, w.v, N, St, N, true);
    lanes.sync();
  }

 private:
  /// q, k (a, b), beta, eta and decays of the chunk; rows beyond n are neutral (zeros, decay 1).
  KOKKOS_FUNCTION void read(std::int64_t t0, int n, int rows) {
    const int K = r.d_key;
    lanes.load_rows(in.k, t0, head, n, rows, K, w.k, w.ck);
    if (r.dplr) {
      lanes.load_rows(in.a, t0, head, n, rows, K, w.a, w.ck);
      lanes.load_rows(in.b, t0, head, n, rows, K, w.b, w.ck);
    }
    if (r.outputs) lanes.load_rows(in.q, t0, head, n, rows, K, w.q, w.ck);
    if (r.channel_decay) lanes.load_rows(in.log_decay, t0, head, n, rows, K, w.d, w.ck);
    lanes.each(rows, [&](int t) {
      const auto one = [&](const TokenArray& array) {
        return load<T>(array.data, array.type,
                       (t0 + t) * array.token_stride + head / array.heads_per_stored * array.head_stride);
      };
      w.beta[t] = t < n && in.beta.data ? one(in.beta) : T(0);
      w.eta[t] = t < n && in.eta.data ? one(in.eta) : w.beta[t];
      if (in.log_decay.data && !r.channel_decay) {
        const TokenArray& g = in.log_decay;
        const auto at = (t0 + t) * g.token_stride + head / g.heads_per_stored * g.head_stride;
        w.decay[t] = t < n ? exp_nonpositive(load<double>(g.data, g.type, at)) : 1.0;
      }
    });
    lanes.sync();
    if (r.channel_decay)
      lanes.each2(rows, w.ck, [&](int t, int k) { w.d[t * w.ck + k] = exp_nonpositive(w.d[t * w.ck + k]); });
    if (r.round_to_bf16) {
      const auto round = [&](T* p) {
        lanes.each2(rows, w.ck,
                    [&](int t, int k) { p[t * w.ck + k] = from_bf16(to_bf16(static_cast<float>(p[t * w.ck + k]))); });
      };
      round(w.k);
      if (r.outputs) round(w.q);
      if (r.dplr) round(w.a), round(w.b);
    }
    if (r.normalize_keys) {
      lanes.sync();
      lanes.groups(rows, [&](const auto& group, int t) {
        T* row = w.k + t * w.ck;
        const T norm = sqrt(group.dot(K, row, row)), factor = norm > T(0) ? T(1) / norm : T(0);
        group.each(K, [&](int k) { row[k] *= factor; });
      });
    }
    lanes.sync();
    if (!r.dplr) lanes.each2(rows, w.ck, [&](int t, int k) { w.a[t * w.ck + k] = -w.beta[t] * w.k[t * w.ck + k]; });
    if (!r.channel_decay) {  // otherwise block by block, decayed
      lanes.transpose(rows, K, w.b, w.ck, w.bt, w.cc);
      if (r.dplr) lanes.transpose(rows, K, w.k, w.ck, w.kt, w.cc);
    }
    lanes.sync();
  }

  /// x = u: eta v in the columns of S, zero in those of P (dplr: zero, and v beside it).
  KOKKOS_FUNCTION void write_right_side(std::int64_t t0, int n, int rows) {
    const int N = w.cn, first = r.map_columns();
    T* values = r.dplr ? w.v : w.x;
    lanes.load_rows(in.v, t0, head, n, rows, r.d_value, values + first, N);
    if (r.round_to_bf16)
      lanes.each2(rows, r.d_value, [&](int t, int j) {
        T& value = values[t * N + first + j];
        value = from_bf16(to_bf16(static_cast<float>(value)));
      });
    if (r.dplr) lanes.each2(rows, N, [&](int t, int j) { w.x[t * N + j] = T(0); });
    lanes.each2(rows, first, [&](int t, int j) { values[t * N + j] = T(0); });
    if (!r.dplr) lanes.each2(rows, r.d_value, [&](int t, int j) { w.x[t * N + first + j] *= w.eta[t]; });
    lanes.sync();
  }

  /// |eigenvalues| <= 1 needs beta |k|^2 <= 2 where the decay acts first, <= 1 + min D for the undecayed erase.
  KOKKOS_FUNCTION void count_breaches(int n, DeltaCounts& counts) {
    if (r.dplr) return;
    lanes.groups(n, [&](const auto& group, int t) {
      const T squared = group.dot(r.d_key, w.k + t * w.ck, w.k + t * w.ck);
      group.once([&] { w.row[t] = squared; });
    });
    lanes.sync();
    counts.breaches += lanes.count(n, [&](int t) {
      T bound = 2;
      if (r.undecayed && in.log_decay.data) {
        T least = 1;
        if (r.channel_decay)
          for (int j = 0; j < r.d_key; ++j) least = w.d[t * w.ck + j] < least ? w.d[t * w.ck + j] : least;
        else
          least = static_cast<T>(w.decay[t]);
        bound = 1 + least;
      }
      // a key normalised to 1 and beta = 2 are within the bound; leave room for the rounding of |k|^2
      return w.beta[t] * w.row[t] > bound * (1 + T(1e-5)) || w.beta[t] < 0;
    });
  }

  /// M [t][s] = left_t . right_s for s up to the end of t's block.
  KOKKOS_FUNCTION void lower_products(int rows, const T* left, const T* right_t, T* M) {
    for (int i = 0; i < rows; i += delta_block)
      lanes.product(delta_block, padded<T>(i + delta_block), r.d_key, left + i * w.ck, w.ck, right_t, w.cc,
                    M + i * w.cc, w.cc, false);
  }

  /// Each of A (strictly lower) and P (lower), with factor(t, s) the decay between; zeros up to the block's end.
  KOKKOS_FUNCTION void all_products(int rows) {
    lower_products(rows, w.a, w.bt, w.A);
    if (r.dplr) lower_products(rows, w.a, w.kt, w.A2);
    if (r.outputs) lower_products(rows, w.q, w.bt, w.P);
    if (r.outputs && r.dplr) lower_products(rows, w.q, w.kt, w.P2);
    lanes.sync();
  }

  KOKKOS_FUNCTION void mask(int rows, T* M, bool strict) {
    lanes.each2(rows, w.cc, [&](int t, int s) {
      if (s > t || (strict && s == t)) M[t * w.cc + s] = T(0);
    });
  }

  KOKKOS_FUNCTION void mask_all(int rows) {
    mask(rows, w.A, true);
    if (r.dplr) mask(rows, w.A2, true);
    if (r.outputs) mask(rows, w.P, false);
    if (r.outputs && r.dplr) mask(rows, w.P2, false);
    lanes.sync();
  }

  KOKKOS_FUNCTION void prepare(int rows) {
    all_products(rows);
    mask_all(rows);
  }

  /// One decay a head: Gamma(s..t) is a number, multiplied up in double from token to token.
  KOKKOS_FUNCTION void prepare_head_decay(int rows) {
    all_products(rows);
    mask_all(rows);
    const bool reads_before = r.undecayed || r.dplr;  // t' = t - 1
    lanes.lower(rows, [&](int t, int s) {
      const double before = s == t ? 1.0 : w.mask[s], now = s == t ? 1.0 : before * w.decay[t];
      const T factor_a = static_cast<T>(reads_before ? before : now), factor = static_cast<T>(now);
      const int at = t * w.cc + s;
      w.mask[s] = now;
      w.A[at] *= factor_a;
      if (r.dplr) w.A2[at] *= factor_a;
      if (r.outputs) w.P[at] *= factor;
      if (r.outputs && r.dplr) w.P2[at] *= factor;
    });
    lanes.once([&] {
      double now = 1;
      for (int t = 0; t < rows; ++t) w.start[t] = now *= w.decay[t];
    });
    lanes.each2(rows, r.d_key, [&](int t, int k) {
      const double now = w.start[t], before = t > 0 ? w.start[t - 1] : 1.0;
      w.a[t * w.ck + k] *= static_cast<T>(reads_before ? before : now);
      if (r.outputs) w.q[t * w.ck + k] *= static_cast<T>(now);
    });
    lanes.each2(r.d_key, rows, [&](int k, int s) {
      w.bt[k * w.cc + s] *= static_cast<T>(w.mask[s]);
      if (r.dplr) w.kt[k * w.cc + s] *= static_cast<T>(w.mask[s]);
    });
    lanes.each(r.d_key, [&](int k) { w.g[k] = static_cast<T>(w.start[rows - 1]); });
    lanes.sync();
  }

  /// One decay a key channel, block by block: the columns of bt are kept decayed to the start of the block at hand, so
  /// that products across blocks are matrix products; inside the block decays are multiplied up token by token.
  KOKKOS_FUNCTION void prepare_channel_decay(int rows) {
    const int K = r.d_key;
    const bool reads_before = r.undecayed || r.dplr;
    lanes.each(K, [&](int k) { w.g[k] = T(1); });
    lanes.sync();
    for (int i = 0; i < rows; i += delta_block) {
      // inside the block, before a and q are scaled
      diagonal_block(i, w.b, w.bt, w.A, w.P, reads_before);
      if (r.dplr) diagonal_block(i, w.k, w.kt, w.A2, w.P2, reads_before);
      for (int t = i; t < i + delta_block; ++t)
        lanes.each(K, [&](int k) {
          const T before = t == i ? T(1) : w.e[k], after = before * w.d[t * w.ck + k];
          w.a[t * w.ck + k] *= reads_before ? before : after;
          if (r.outputs) w.q[t * w.ck + k] *= after;
          w.e[k] = after;
        });
      lanes.sync();
      if (i > 0) {
        const auto across = [&](const T* left, const T* right_t, T* M) {
          lanes.product(delta_block, i, K, left + i * w.ck, w.ck, right_t, w.cc, M + i * w.cc, w.cc, false);
        };
        across(w.a, w.bt, w.A);
        if (r.dplr) across(w.a, w.kt, w.A2);
        if (r.outputs) across(w.q, w.bt, w.P);
        if (r.outputs && r.dplr) across(w.q, w.kt, w.P2);
        lanes.sync();
      }
      lanes.each2(K, i, [&](int k, int s) {
        w.bt[k * w.cc + s] *= w.e[k];
        if (r.dplr) w.kt[k * w.cc + s] *= w.e[k];
      });
      lanes.each2(delta_block, K, [&](int t, int k) {
        w.a[(i + t) * w.ck + k] *= w.g[k];
        if (r.outputs) w.q[(i + t) * w.ck + k] *= w.g[k];
      });
      lanes.sync();
      lanes.each(K, [&](int k) { w.g[k] *= w.e[k]; });
      lanes.sync();
    }
  }

  /// A and P inside one block. Row s of b is decayed in place from token to token, then becomes a column of bt.
  KOKKOS_FUNCTION void diagonal_block(int i, T* b, T* bt, T* A, T* P, bool reads_before) {
    const int K = r.d_key, end = i + delta_block;
    lanes.groups(delta_block, [&](const auto& group, int j) {
      const int s = i + j;
      T* row = b + s * w.ck;
      const auto product = [&](T* M, int t, const T* left) {
        const T value = group.dot(K, row, left + t * w.ck);
        group.once([&] { M[t * w.cc + s] = value; });
      };
      group.each(j + 1, [&](int t) { A[(i + t) * w.cc + s] = T(0); });
      if (r.outputs) {
        group.each(j, [&](int t) { P[(i + t) * w.cc + s] = T(0); });
        product(P, s, w.q);
      }
      for (int t = s + 1; t < end; ++t) {
        if (reads_before) product(A, t, w.a);
        group.each(K, [&](int k) { row[k] *= w.d[t * w.ck + k]; });
        if (!reads_before) product(A, t, w.a);
        if (r.outputs) product(P, t, w.q);
      }
    });
    lanes.sync();
    lanes.transpose(delta_block, K, b + i * w.ck, w.ck, bt + i, w.cc);
    lanes.sync();
  }

  KOKKOS_FUNCTION void solve(int rows, int n, DeltaCounts& counts) {
    if (r.inverse == Inverse::forward) {
      substitute(rows, 0);
      return;
    }
    // Bounds of the leading rows only: later tokens must not change earlier results. The norm of rows up to t is at
    // most their largest row sum, and at most their Frobenius norm; a bound m < 1 leaves m^(N+1)/(1-m) after N terms.
    const double tolerance = sizeof(T) == 8 ? 1.1e-16 : 6e-8;
    lanes.each(rows, [&](int t) {
      T sum = 0, squares = 0;
      for (int s = 0; s < t; ++s) {
        const T x = w.A[t * w.cc + s];
        sum += x < 0 ? -x : x;
        squares += x * x;
      }
      w.row[t] = sum, w.row[w.cc + t] = squares;
    });
    lanes.sync();
    int terms = 0, first_forward = rows;
    double largest = 0, squares = 0;
    for (int t = 0; t < rows; ++t) {
      largest = w.row[t] > largest ? w.row[t] : largest;
      squares += w.row[w.cc + t];
      const double frobenius = sqrt(squares), norm = frobenius < largest ? frobenius : largest;
      double needed = 0;
      if (norm >= 1) {
        needed = r.chunk;
      } else if (norm > 0) {
        needed = ceil(log(tolerance * (1 - norm)) / log(norm)) - 1;
        needed = needed < 1 ? 1 : needed;
      }
      needed = needed < t ? needed : t;  // A is nilpotent: row t has no more terms
      if (2 * needed >= r.chunk) {
        first_forward = t;
        break;
      }
      if (needed > terms) terms = static_cast<int>(needed);
      lanes.sync();
      lanes.once([&] { w.row[t] = static_cast<T>(terms); });
    }
    lanes.sync();
    terms = series(first_forward, terms, tolerance);
    if (terms > counts.terms) counts.terms = terms;
    if (first_forward < n) ++counts.fallbacks;
    // rows below first_forward: X = T R in place, from the last row up; the others by substitution
    for (int t = first_forward - 1; t > 0; --t)
      lanes.combine(w.cn, w.x + t * w.cn, T(1), w.inv + t * w.cc, w.x, w.cn, 0, t);
    lanes.sync();
    substitute(rows, first_forward);
  }

  /// inv = I + A + A^2 + ... for rows below `count`; row t gets row[t] terms (Richardson: or stops when no row up to
  /// it changes by more than the tolerance). Returns the most terms used.
  KOKKOS_FUNCTION int series(int count, int terms, double tolerance) {
    lanes.each2(count, w.cc, [&](int t, int s) { w.inv[t * w.cc + s] = T(s == t); });
    lanes.sync();
    int first = 0;  // rows below it are done
    for (int i = 1; i <= terms; ++i) {
      while (first < count && w.row[first] < i) ++first;
      if (first >= count) return i - 1;
      lanes.each2(count - first, count, [&](int j, int s) {
        const int t = first + j;
        T sum = T(s == t);
        for (int m = s; m < t; ++m) sum += w.A[t * w.cc + m] * w.inv[m * w.cc + s];
        w.inv2[t * w.cc + s] = sum;
      });
      lanes.sync();
      lanes.each(count - first, [&](int j) {
        const int t = first + j;
        T change = 0;
        for (int s = 0; s <= t; ++s) {
          const T difference = w.inv2[t * w.cc + s] - w.inv[t * w.cc + s];
          change = difference > change ? difference : -difference > change ? -difference : change;
          w.inv[t * w.cc + s] = w.inv2[t * w.cc + s];
        }
        w.row[w.cc + t] = change;
      });
      lanes.sync();
      if (r.inverse == Inverse::richardson)
        while (first < count && w.row[w.cc + first] <= tolerance) ++first;
      if (first >= count) return i;
    }
    return terms;
  }

  /// Forward substitution of X in place, rows from `first` on: block by block, inside a block row by row.
  KOKKOS_FUNCTION void substitute(int rows, int first) {
    for (int i = 0; i < rows; i += delta_block) {
      const int top = first > i ? first : i;
      if (top >= i + delta_block) continue;
      if (i > 0)
        lanes.product(i + delta_block - top, w.cn, i, w.A + top * w.cc, w.cc, w.x, w.cn, w.x + top * w.cn, w.cn, true);
      lanes.sync();
      lanes.substitute(w.cn, w.x, w.cn, w.A, w.cc, i, top > i ? top : i + 1, i + delta_block);
      lanes.sync();
    }
  }

  KOKKOS_FUNCTION void write_outputs(std::int64_t t0, int n, const MutableTokenArray& out, DeltaCounts& counts) {
    const T scale = static_cast<T>(r.scale);
    lanes.each2(n, w.cn, [&](int t, int j) { w.o[t * w.cn + j] *= scale; });
    lanes.sync();
    const T* o = w.o + r.map_columns();
    if (counts.first_bad < 0 && lanes.any_non_finite(n, r.d_value, o, w.cn)) counts.first_bad = t0;
    if (out.data) lanes.store_rows(out, t0, head, n, r.d_value, o, w.cn);
    lanes.sync();
  }
};

}  // namespace longscan
