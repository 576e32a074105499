#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""q, k, v, beta (and log-decays g) as flash-linear-attention has them, into a file, longscan delta, results back.

    linear_attention.py [--tokens T] [--decay none|head|channel] [--packed] [--ranks P]

flash-linear-attention (fla.ops.delta_rule, gated_delta_rule, kda) has q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV],
g [B, T, HV] or [B, T, HV, K] (natural logarithms, as log_decay is here), scale K^-0.5 unless told otherwise, states
[N, HV, K, V], and cu_seqlens for sequences packed into one batch entry. Only states differ here: [N, HV, V, K].
The arrays may be torch tensors; without torch they are numpy's.
"""
import argparse

import h5py
import numpy as np

from files import longscan, put, relative_error

try:
    import torch
except ImportError:
    torch = None


def write_input(path, q, k, v, beta, g=None, initial_state=None, cu_seqlens=None):
    """Arguments as flash-linear-attention takes them."""
    with h5py.File(path, "w") as f:
        for name, values in dict(q=q, k=k, v=v, beta=beta, log_decay=g, cu_seqlens=cu_seqlens).items():
            if values is not None:
                put(f, name, values)
        if initial_state is not None:
            put(f, "initial_state", initial_state.swapaxes(-1, -2))  # [N, HV, K, V] -> [N, HV, V, K]


def solve(path, out, scale=None, use_qk_l2norm=False, ranks=1):
    """use_qk_l2norm normalizes k here; q has to be normalized before it is written."""
    words = ["--scale", "rsqrt" if scale is None else scale]
    if use_qk_l2norm:
        words.append("--normalize-keys")
    longscan("delta", path, "-o", out, "--force", *words, ranks=ranks)


def read_output(path):
    """o [B, T, HV, V] and the final state [N, HV, K, V], as flash-linear-attention returns them."""
    with h5py.File(path) as f:
        return f["o"][()], f["final_state"][()].swapaxes(-1, -2)


def token_loop(q, k, v, beta, g, state, offsets):
    """fla's naive recurrence in float64, state [N, HV, K, V]."""
    q, k, v, beta = (np.asarray(a, np.float64) for a in (q, k, v, beta))
    B, T, HV, V = v.shape
    share = HV // k.shape[2]
    o, S = np.zeros(v.shape), np.array(state, np.float64)
    for n, (b, begin, end) in enumerate(offsets):
        for t in range(begin, end):
            qt, kt = (np.repeat(a[b, t], share, 0) for a in (q, k))  # [HV, K]
            if g is not None:
                S[n] *= np.exp(np.asarray(g[b, t], np.float64)).reshape(HV, -1, 1)
            x = beta[b, t][:, None] * (v[b, t] - np.einsum("hkv,hk->hv", S[n], kt))
            S[n] += np.einsum("hk,hv->hkv", kt, x)
            o[b, t] = np.einsum("hkv,hk->hv", S[n], qt) * qt.shape[-1] ** -0.5
    return o, S


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--decay", choices=("none", "head", "channel"), default="head")
    p.add_argument("--packed", action="store_true", help="one batch entry that packs three sequences")
    p.add_argument("--ranks", type=int, default=2)
    a = p.parse_args()
    B, T, H, HV, K, V = 1 if a.packed else 2, a.tokens, 2, 4, 32, 16
    r = np.random.default_rng(0)
    q, k = r.normal(size=(2, B, T, H, K)).astype("f4")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = r.normal(size=(B, T, HV, V)).astype("f4"), r.uniform(size=(B, T, HV)).astype("f4")
    g = None if a.decay == "none" else np.log(r.uniform(0.9, 1, size=(B, T, HV) + ((K,) if a.decay == "channel" else ())))
    cu_seqlens = np.array([0, T // 3, T // 2, T]) if a.packed else None
    pieces = [(0, b, e) for b, e in zip(cu_seqlens, cu_seqlens[1:])] if a.packed else [(b, 0, T) for b in range(B)]
    state = r.normal(size=(len(pieces), HV, K, V)).astype("f4")
    arrays = dict(q=q, k=k, v=v, beta=beta, g=None if g is None else g.astype("f4"), initial_state=state)
    if torch:
        arrays = {n: None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for n, x in arrays.items()}
    else:
        print("torch is not installed: the arrays are numpy's")

    write_input("attention.h5", **arrays, cu_seqlens=cu_seqlens)
    longscan("inspect", "attention.h5")
    solve("attention.h5", "attention-out.h5", ranks=a.ranks)
    longscan("verify", "attention.h5", "attention-out.h5", "--sample", 8)
    o, final_state = read_output("attention-out.h5")
    expected_o, expected_state = token_loop(q, k, v, beta, arrays["g"] if g is not None else None, state, pieces)
    errors = [relative_error(o, expected_o), relative_error(final_state, expected_state)]
    print(f"o {o.shape}, final_state {final_state.shape} as [N, HV, K, V]: largest difference from the token loop "
          f"{max(errors):.1e} of the RMS")
    assert max(errors) < 1e-4


if __name__ == "__main__":
    main()
