#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A torch.nn.GRU, LSTM or RNN over a long sequence: weights and x into one file, longscan newton, states back.

    torch_rnn.py [--cell gru|lstm|rnn_tanh|rnn_relu] [--tokens T] [--layers L] [--bidirectional] [--ranks P]

Without torch, numpy makes weights with the names and shapes of a state_dict and plays torch's part in the comparison.
"""
import argparse

import h5py
import numpy as np

from files import longscan, put, relative_error

try:
    import torch
except ImportError:
    torch = None

GATES = dict(gru=3, lstm=4, rnn_tanh=1, rnn_relu=1)


def write_input(path, cell, state_dict, x, h0=None, c0=None):
    """x [T, D_in] or [B, T, D_in] (torch's batch_first=True; else transpose the first two axes before).
    state_dict: as torch names it. h0, c0: as torch takes them, [layers * directions, B, D]."""
    with h5py.File(path, "w") as f:
        put(f, "x", x)
        for name, state in (("h0", h0), ("c0", c0)):
            if state is not None:
                put(f, name, state)
        f.create_group("cell").attrs["type"] = cell
        for name, weight in state_dict.items():
            put(f["cell"], name, weight)


def read_output(path):
    """h [B, T, directions * D] or [T, …], and h_final [layers * directions, B, D] or [layers * directions, D]; for lstm
    c and c_final too."""
    with h5py.File(path) as f:
        return {name: f[name][()] for name in ("h", "h_final", "c", "c_final") if name in f}


def with_torch(a):
    kind = dict(gru=torch.nn.GRU, lstm=torch.nn.LSTM, rnn_tanh=torch.nn.RNN, rnn_relu=torch.nn.RNN)[a.cell]
    words = dict(nonlinearity="relu") if a.cell == "rnn_relu" else {}
    torch.manual_seed(0)
    module = kind(a.inputs, a.hidden, num_layers=a.layers, bidirectional=a.bidirectional, batch_first=True, **words)
    x, directions = torch.randn(a.batch, a.tokens, a.inputs), 2 if a.bidirectional else 1
    h0, c0 = torch.randn(2, a.layers * directions, a.batch, a.hidden)
    c0 = c0 if a.cell == "lstm" else None
    with torch.no_grad():
        h, final = module(x, (h0, c0) if a.cell == "lstm" else h0)
    return module.state_dict(), x, h0, c0, h, final[0] if a.cell == "lstm" else final


def with_numpy(a):
    """One layer, one direction, float64: the loop that torch runs."""
    r, D = np.random.default_rng(0), a.hidden
    bound, rows = 1 / np.sqrt(D), GATES[a.cell] * D
    w = dict(weight_ih_l0=(rows, a.inputs), weight_hh_l0=(rows, D), bias_ih_l0=(rows,), bias_hh_l0=(rows,))
    w = {n: r.uniform(-bound, bound, shape) for n, shape in w.items()}
    x, (h0, c0) = r.normal(size=(a.batch, a.tokens, a.inputs)), r.normal(size=(2, 1, a.batch, D))
    sigma = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    s, c, h = h0[0], c0[0], np.zeros((a.batch, a.tokens, D))
    for t in range(a.tokens):
        gi, gh = x[:, t] @ w["weight_ih_l0"].T + w["bias_ih_l0"], s @ w["weight_hh_l0"].T + w["bias_hh_l0"]
        if a.cell == "gru":
            (ir, iz, i_n), (hr, hz, hn) = np.split(gi, 3, -1), np.split(gh, 3, -1)
            z = sigma(iz + hz)
            s = (1 - z) * np.tanh(i_n + sigma(ir + hr) * hn) + z * s
        elif a.cell == "lstm":
            i, f, g, o = np.split(gi + gh, 4, -1)
            c = sigma(f) * c + sigma(i) * np.tanh(g)
            s = sigma(o) * np.tanh(c)
        else:
            s = np.tanh(gi + gh) if a.cell == "rnn_tanh" else np.maximum(gi + gh, 0)
        h[:, t] = s
    return w, x, h0, c0 if a.cell == "lstm" else None, h, s[None]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cell", choices=GATES, default="gru")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--inputs", type=int, default=16)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--bidirectional", action="store_true")
    p.add_argument("--ranks", type=int, default=2)
    a = p.parse_args()
    if torch is None:
        print("torch is not installed: numpy makes the weights and the expected states")
        if a.layers > 1 or a.bidirectional:
            p.error("without torch there is one layer and one direction")
    weights, x, h0, c0, h, h_final = (with_torch if torch else with_numpy)(a)

    write_input("rnn.h5", a.cell, weights, x, h0, c0)
    longscan("inspect", "rnn.h5")
    longscan("newton", "rnn.h5", "-o", "rnn-out.h5", "--force", ranks=a.ranks)
    found = read_output("rnn-out.h5")
    errors = [relative_error(found["h"], h), relative_error(found["h_final"], h_final)]
    print(f"h {found['h'].shape}, h_final {found['h_final'].shape}: largest difference from "
          f"{'torch' if torch else 'the numpy loop'} {max(errors):.1e} of the RMS")
    assert max(errors) < 1e-4


if __name__ == "__main__":
    main()
