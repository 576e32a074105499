#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""longscan newton, generate newton, verify and bench newton on the command line.

    cli_newton_test.py --longscan build/apps/longscan [--only CLASS[.TEST]…] --launch mpirun --oversubscribe -n
"""
import json
import os

import cli_test
from cli_test import BAD_INPUT, FILE_IO, NUMERICAL, USAGE, Command, contents, resize

import h5py
import numpy as np

CELLS = "rnn_tanh rnn_relu gru lstm paragru paralstm".split()
GATES = dict(rnn_tanh=1, rnn_relu=1, gru=3, lstm=4)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def step(cell, w, suffix, x, h, c):
    """The next h and c, as torch.nn and ParaRNN define them."""
    if cell in ("paragru", "paralstm"):
        a, p = w["recurrent"], w.get("peephole")
        x0, x1, x2 = np.split(w["weight_ih"] @ x + w["bias"], 3)
        if cell == "paragru":
            z, r = sigmoid(a[0] * h + x0), sigmoid(a[1] * h + x1)
            return (1 - z) * h + z * np.tanh(a[2] * (h * r) + x2), c
        f, g = sigmoid(a[0] * h + p[0] * c + x0), np.tanh(a[1] * h + x1)
        c = f * c + (1 - f) * g
        return sigmoid(a[2] * h + p[1] * c + x2) * np.tanh(c), c
    gi = w["weight_ih" + suffix] @ x + w["bias_ih" + suffix]
    gh = w["weight_hh" + suffix] @ h + w["bias_hh" + suffix]
    if cell == "rnn_tanh":
        return np.tanh(gi + gh), c
    if cell == "rnn_relu":
        return np.maximum(gi + gh, 0), c
    if cell == "gru":
        (ir, iz, inn), (hr, hz, hn) = np.split(gi, 3), np.split(gh, 3)
        r, z = sigmoid(ir + hr), sigmoid(iz + hz)
        n = np.tanh(inn + r * hn)
        return (1 - z) * n + z * h, c
    i, f, g, o = np.split(gi + gh, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def network(cell, w, x, h0=None, c0=None, layers=1, directions=1):
    """h, c [T, directions * D] of the last layer, h_final, c_final [L, D]; h0, c0 [L, D]."""
    D = w["recurrent"].shape[1] if "recurrent" in w else w["weight_hh_l0"].shape[1]
    finals = []
    for layer in range(layers):
        outs = []
        for d in range(directions):
            n = layer * directions + d
            h = np.zeros(D) if h0 is None else h0[n]
            c = np.zeros(D) if c0 is None else c0[n]
            states = np.zeros((len(x), 2, D))
            for t in range(len(x))[:: -1 if d else 1]:
                h, c = step(cell, w, f"_l{layer}" + ("_reverse" if d else ""), x[t], h, c)
                states[t] = h, c
            finals.append((h, c))
            outs.append(states)
        states = np.concatenate(outs, axis=2)
        x = states[:, 0]
    finals = np.array(finals)
    return states[:, 0], states[:, 1], finals[:, 0], finals[:, 1]


def weights(cell, D=5, inputs=3, layers=1, directions=1, scale=0.8, seed=1, dtype=np.float64):
    r = np.random.default_rng(seed)
    w = {}
    if cell in ("paragru", "paralstm"):
        w = dict(weight_ih=r.normal(size=(3 * D, inputs)) / inputs**0.5, bias=0.1 * r.normal(size=3 * D),
                 recurrent=scale * r.normal(size=(3, D)))
        if cell == "paralstm":
            w["peephole"] = scale * r.normal(size=(2, D))
    for layer in range(layers if cell in GATES else 0):
        for d in range(directions):
            s, n = f"_l{layer}" + ("_reverse" if d else ""), GATES[cell] * D
            size = inputs if layer == 0 else directions * D
            w["weight_ih" + s] = r.normal(size=(n, size)) / size**0.5
            w["weight_hh" + s] = scale * r.normal(size=(n, D)) / D**0.5
            w["bias_ih" + s], w["bias_hh" + s] = 0.1 * r.normal(size=(2, n))
    return {n: a.astype(dtype) for n, a in w.items()}


def inputs(tokens=60, features=3, seed=2):
    return np.random.default_rng(seed).normal(size=(tokens, features))


class NewtonCommand(Command):
    def write_cell(self, cell, w, name="in.h5", group="cell", typed=True, **datasets):
        with h5py.File(self.at(name), "w") as f:
            for n, a in datasets.items():
                f[n] = a
            g = f.require_group(group)
            for n, a in w.items():
                g[n] = a
            if typed:
                g.attrs["type"] = cell
        return self.at(name)

    def solve(self, path, *words, ranks=1, verify=True):
        out = self.at("out.h5")
        _, self.log = self.succeed("newton", path, "-o", out, "--force", *words, ranks=ranks)
        if verify:
            said, _ = self.succeed("verify", path, out, ranks=ranks)
            self.assertIn("verified", said)
        with h5py.File(out) as f:
            return {n: f[n][()] for n in f}


class Refuse(NewtonCommand):
    """Exit 3 on one and three ranks, with what is wrong and where."""

    def refuse(self, *texts, cell="gru", change=None, words=(), x=None, typed=True, code=BAD_INPUT):
        w = weights(cell, layers=2 if cell in GATES else 1)
        if change:
            change(w)
        path = self.write_cell(cell, w, x=inputs() if x is None else x, typed=typed)
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.fail_with(code, ("newton", path, "-o", self.at("out.h5"), *words), *texts, ranks=ranks)

    def test_weights_that_do_not_fit(self):
        self.refuse("'/x' has shape [60, 4]", "weight_ih_l0 has shape [15, 3]", x=inputs(features=4))
        self.refuse("weight_ih_l0", "[14, 3]", "[15, any]", change=lambda w: w.update(weight_ih_l0=np.ones((14, 3))))
        self.refuse("weight_hh_l1", "[15, 4]", "[15, 5]", change=lambda w: w.update(weight_hh_l1=np.ones((15, 4))))
        self.refuse("bias_hh_l0", "[14]", "[15]", change=lambda w: w.update(bias_hh_l0=np.ones(14)))
        self.refuse("weight_hh_l0", "[15, 5]", "[20, 5]", "lstm",
                    words=("--cell", self.write_cell("lstm", weights("gru"), "other.h5") + ":/cell"))
        self.refuse("peephole", "[2, 6]", "[2, 5]", cell="paralstm", change=lambda w: w.update(peephole=np.ones((2, 6))))
        self.refuse("no tensor 'recurrent'", "weight_ih", cell="paragru", change=lambda w: w.pop("recurrent"))

    def test_unknown_type(self):
        self.refuse("grru", "gru, lstm", words=("--cell", self.write_cell("grru", weights("gru"), "other.h5")))
        self.refuse("no attribute 'type'", "[10, 5]", typed=False, change=lambda w: w.update(weight_hh_l0=np.ones((10, 5))))

    def test_not_finite(self):
        def spoil(w):
            w["weight_hh_l1"][3, 2] = np.nan
        self.refuse("weight_hh_l1", "NaN at [3, 2]", change=spoil)
        for value, word in ((np.nan, "NaN"), (np.inf, "infinite")):
            x = inputs()
            x[37, 2] = x[50, 0] = value
            self.refuse("'/x'", "token 37", "feature 2", word, x=x)
            self.refuse("'/x'", "token 37", "feature 2", word, x=x, words=("--window", "7"))

    def test_cell_that_is_not_there(self):
        path = self.write(x=inputs())
        self.fail_with(BAD_INPUT, ("newton", path, "-o", self.at("out.h5")), "no group '/cell'", path)
        path = self.write_cell("gru", weights("gru"), group="cells/one", x=inputs())
        self.fail_with(BAD_INPUT, ("newton", path, "-o", self.at("out.h5"), "--cell", path + ":/cells/on"),
                       "/cells/on", "did you mean '/cells/one'")
        self.solve(path, "--cell", path + ":/cells/one")
        moved, out = self.at("moved.h5"), self.at("out.h5")
        with h5py.File(path) as f, h5py.File(moved, "w") as g:
            f.copy("x", g)
        self.succeed("newton", moved, "-o", out, "--force", "--cell", path + ":/cells/one")
        os.rename(path, self.at("elsewhere.h5"))
        self.fail_with(FILE_IO, ("verify", moved, out), path, "--cell", ranks=3)
        self.succeed("verify", moved, out, "--cell", self.at("elsewhere.h5") + ":/cells/one")
        before = contents(self.at("elsewhere.h5"))
        for words in (("-o", self.at("elsewhere.h5")), ("-o", self.at("new.h5"), "--report", self.at("elsewhere.h5"))):
            self.fail_with(USAGE, ("newton", moved, *words, "--force", "--cell", self.at("elsewhere.h5") + ":/cells/one"),
                           "is the cell's file", ranks=3)
        self.assertEqual(contents(self.at("elsewhere.h5")), before)
        self.fail_with(USAGE, ("newton", path, "-o", self.at("out2.h5"), "--method", "newtn"), "newtn", "newton")

    def test_overflow(self):
        w = weights("rnn_relu")
        w["weight_hh_l0"] = 3 * np.eye(5)
        path = self.write_cell("rnn_relu", {n: a.astype(np.float32) for n, a in w.items()},
                               x=np.abs(inputs(300)).astype(np.float32))
        for ranks in (1, 3):
            for method in ("auto", "sequential", "newton"):
                self.fail_with(NUMERICAL, ("newton", path, "-o", self.at("out.h5"), "--method", method), "non_finite",
                               "at token ", ranks=ranks)

        # the token is the first of the whole input, whatever window it is found in, and the input's from both ends
        x = np.abs(inputs(300)).astype(np.float32)
        w = weights("rnn_relu", directions=2, dtype=np.float32)
        for grows, stays in (("", "_reverse"), ("_reverse", "")):
            w["weight_hh_l0" + grows], w["weight_hh_l0" + stays] = 3 * np.eye(5, dtype=np.float32), np.zeros((5, 5))
            states = network("rnn_relu", {n: a.astype(np.float64) for n, a in w.items()}, x.astype(np.float64), directions=2)[0]
            too_large = np.flatnonzero(states.max(axis=1) > np.finfo(np.float32).max)
            token = too_large[-1] if grows else too_large[0]
            both = self.write_cell("rnn_relu", {n: a.astype(np.float32) for n, a in w.items()}, x=x)
            for ranks in (1, 3):
                self.fail_with(NUMERICAL, ("newton", both, "-o", self.at("out.h5")), "non_finite", f"at token {token} ",
                               ranks=ranks)
            if grows:
                continue
            one = {n: a.astype(np.float32) for n, a in w.items() if "reverse" not in n}
            for window in ("7", "30", "1000"):
                self.fail_with(NUMERICAL, ("newton", self.write_cell("rnn_relu", one, x=x), "-o", self.at("out.h5"), "--window",
                                           window), "non_finite", f"at token {token} ", ranks=ranks)
        x, w = inputs(300), weights("rnn_relu")
        w["weight_hh_l0"] = 3 * np.eye(5)
        out = self.solve(self.write_cell("rnn_relu", w, x=x), "--method", "sequential", verify=False)  # 3^300 fits
        self.close(out["h"], network("rnn_relu", w, x)[0])

    def test_tolerance_below_the_floor(self):
        path = self.write_cell("gru", weights("gru", dtype=np.float32), x=inputs(3000).astype(np.float32))
        err = self.fail_with(NUMERICAL, ("newton", path, "-o", self.at("out.h5"), "--method", "shooting", "--tolerance",
                                         "1e-12"), "below what", "2e-06")
        self.assertIn("1e-12", err)
        self.solve(path, "--tolerance", "1e-12")
        self.assertIn("below what", self.log)

    def test_not_converged(self):
        path = self.write_cell("paragru", weights("paragru", scale=4), x=inputs(4000))
        self.fail_with(NUMERICAL, ("newton", path, "-o", self.at("out.h5"), "--method", "jacobi",
                                   "--max-iterations", "30"), "not converged", "right up to token", "raise --max-iterations")


    def test_output_type_overflows(self):
        w = {n: np.zeros_like(a) for n, a in weights("rnn_relu").items()}
        w["weight_ih_l0"][3, 1], w["weight_hh_l0"][3, 3] = 1, 1
        x = np.zeros((40, 3))
        x[20:, 1] = 3e4  # h is 9e4 at token 22, and float16 ends at 65504
        for words, dtype in (((), np.float16), (("--output-dtype", "f16", "--window", 8), np.float32)):
            path = self.write_cell("rnn_relu", {n: a.astype(dtype) for n, a in w.items()}, x=x.astype(dtype))
            for ranks in (1, 3):
                with self.subTest(words=words, ranks=ranks):
                    self.fail_with(NUMERICAL, ("newton", path, "-o", self.at("out.h5"), *words), "'/h' overflows", "f16",
                                   "token 22", "channel 3", "--output-dtype f32", ranks=ranks)
        self.assertEqual(self.solve(path, "--output-dtype", "f32", ranks=3)["h"][-1, 3], 6e5)


class Answers(NewtonCommand):
    def test_every_cell_and_method(self):
        for cell in CELLS:
            w, x = weights(cell), inputs(80)
            h, c, h_final, c_final = network(cell, w, x)
            path = self.write_cell(cell, w, x=x)
            for method in "auto shooting newton quasi elk picard jacobi sequential".split():
                if cell == "rnn_relu" and method == "elk":
                    continue
                out = self.solve(path, "--method", method, ranks=2 if method in ("auto", "newton") else 1)
                self.close(out["h"], h, 1e-8)
                self.close(out["h_final"], h_final, 1e-8)
                self.assertEqual("c" in out, cell in ("lstm", "paralstm"))
                if "c" in out:
                    self.close(out["c"], c, 1e-8)
                    self.close(out["c_final"], c_final, 1e-8)

    def test_layers_directions_batches_states(self):
        r = np.random.default_rng(5)
        for cell in ("gru", "lstm"):
            w = weights(cell, layers=2, directions=2)
            x = np.array([inputs(40, seed=s) for s in (1, 2, 3)])
            h0, c0 = r.normal(size=(2, 4, 3, 5))
            states = dict(h0=h0, c0=c0) if cell == "lstm" else dict(h0=h0)
            expected = [network(cell, w, x[b], h0[:, b], c0[:, b] if cell == "lstm" else None, 2, 2) for b in range(3)]
            path = self.write_cell(cell, w, x=x, **states)
            for ranks in (1, 3):
                out = self.solve(path, ranks=ranks)
                self.close(out["h"], np.array([e[0] for e in expected]), 1e-9)
                self.close(out["h_final"], np.stack([e[2] for e in expected], 1), 1e-9)

    def test_packed_sequences(self):
        cu = np.array([0, 0, 20, 21, 21, 60])
        for cell in ("paralstm", "rnn_tanh"):
            w, x = weights(cell), inputs(60)
            h0 = np.random.default_rng(3).normal(size=(1, 5, 5))
            parts = [network(cell, w, x[i:j], h0[:, n]) for n, (i, j) in enumerate(zip(cu, cu[1:]))]
            path = self.write_cell(cell, w, x=x, h0=h0, cu_seqlens=cu)
            for ranks, words in ((1, ()), (3, ()), (2, ("--window", "7"))):
                out = self.solve(path, *words, ranks=ranks)
                self.close(out["h"], np.concatenate([p[0] for p in parts]), 1e-9)
                self.close(out["h_final"], np.stack([p[2] for p in parts], 1), 1e-9)

    def test_type_from_the_shapes(self):
        for cell in ("rnn_tanh", "gru", "lstm", "paragru", "paralstm"):
            w, x = weights(cell), inputs()
            out = self.solve(self.write_cell(cell, w, typed=False, x=x))
            self.close(out["h"], network(cell, w, x)[0], 1e-9)
            self.assertIn(f"{cell} (", self.log)

    def test_no_biases(self):
        w, x = {n: a for n, a in weights("gru").items() if "bias" not in n}, inputs()
        out = self.solve(self.write_cell("gru", w, x=x))
        zeros = dict(bias_ih_l0=np.zeros(15), bias_hh_l0=np.zeros(15))
        self.close(out["h"], network("gru", {**w, **zeros}, x)[0], 1e-9)

    def test_types(self):
        for cell in ("gru", "paralstm"):
            w = weights(cell, dtype=np.float32)
            x = inputs().astype(np.float16)
            h = network(cell, {n: np.float64(a) for n, a in w.items()}, np.float64(x))[0]
            path = self.write_cell(cell, w, x=x)
            out = self.solve(path)
            self.assertEqual((out["h"].dtype, out["h_final"].dtype), (np.float16, np.float32))
            self.close(out["h"], h, 2e-3)
            out = self.solve(path, "--output-dtype", "f32")
            self.assertEqual(out["h"].dtype, np.float32)
            self.close(out["h"], h, 2e-5)
            out = self.solve(path, "--precision", "f64", "--output-dtype", "f64")
            self.assertEqual((out["h"].dtype, out["h_final"].dtype), (np.float64, np.float64))
            self.close(out["h"], h, 1e-9)

    def test_groups_and_report(self):
        w, x = weights("lstm"), [inputs(30 + 7 * i, seed=i) for i in range(3)]
        self.write_cell("lstm", w, name="cell.h5", group="model")
        path = self.write(groups={f"/demo_{i}": dict(x=x[i]) for i in range(3)})
        out, report = self.at("out.h5"), self.at("report.json")
        self.succeed("newton", path, "-o", out, "--group", "/demo_*", "--cell", self.at("cell.h5") + ":/model", "--report",
                     report, ranks=2)
        self.succeed("verify", path, out)
        with h5py.File(out) as f:
            for i in range(3):
                self.close(f[f"demo_{i}/h"][()], network("lstm", w, x[i])[0], 1e-9)
        with open(report) as f:
            said = json.load(f)
        verdict = said["newton"]
        self.assertGreater(said["projection_seconds"], 0)
        self.assertLessEqual(said["projection_seconds"], said["seconds"]["solve"])
        for field in ("status", "iterations", "residual_history", "converged_prefix", "error_bound", "lyapunov",
                      "log_amplification", "method_used"):
            self.assertIn(field, verdict)

    def test_more_passes_than_an_attribute_holds(self):
        path, out, report = self.at("in.h5"), self.at("out.h5"), self.at("report.json")
        self.succeed("generate", "newton", "-o", path, "--tokens", "6000", "--cell", "gru", "--hidden", "2", "--input", "1")
        self.succeed("newton", path, "-o", out, "--method", "picard", "--window", "1", "--report", report)
        with open(report) as f:
            history = json.load(f)["newton"]["residual_history"]
        self.assertGreater(len(history), 8192)
        with h5py.File(out) as f:
            self.assertEqual(list(f.attrs["newton_residual_history"]), history[-4096:])


class Tools(NewtonCommand):
    def test_verify_finds_changes(self):
        for cell, words in (("gru", ()), ("paralstm", ()), ("lstm", ("--bidirectional", "--layers", "2"))):
            path, out = self.at("in.h5"), self.at("out.h5")
            self.succeed("generate", "newton", "-o", path, "--force", "--tokens", "500", "--cell", cell, "--hidden", "8",
                         "--input", "4", *words)
            self.succeed("newton", path, "-o", out, "--force")
            said, _ = self.succeed("verify", path, out, ranks=3)
            self.assertIn("verified", said)
            for dataset, place in (("h", (317, 5)), ("h_final", (0, 3)), ("c", (499, 1)) if cell != "gru" else ("h", (0, 0))):
                with h5py.File(out, "r+") as f:
                    was = f[dataset][place]
                    f[dataset][place] = was + 0.01
                code, said, err = self.run_longscan("verify", path, out)
                self.assertEqual(code, NUMERICAL, err)
                self.assertNotIn("verified", said)
                self.assertIn(f"'/{dataset}'", err)
                with h5py.File(out, "r+") as f:
                    f[dataset][place] = was
            with h5py.File(path, "r+") as f:
                f["x"][3, 2] += 1
            self.fail_with(BAD_INPUT, ("verify", path, out), "another input")

    def test_verify_says_where_a_nan_is(self):
        path, out = self.at("in.h5"), self.at("out.h5")
        self.succeed("generate", "newton", "-o", path, "--tokens", "500", "--cell", "gru", "--hidden", "8", "--input", "4")
        self.succeed("newton", path, "-o", out)
        with h5py.File(out, "r+") as f:
            f["h"][317, 5] = np.nan
        for ranks in (1, 3):
            code, said, err = self.run_longscan("verify", path, out, ranks=ranks)
            self.assertEqual(code, NUMERICAL, err)
            self.assertIn("'/h' at token 317, channel 5 is not finite", err)
            self.assertNotIn("nan", said)

    def test_verify_other_shapes(self):
        path, out = self.at("in.h5"), self.at("out.h5")
        self.succeed("generate", "newton", "-o", path, "--tokens", "50", "--cell", "lstm", "--hidden", "8", "--input", "4")
        for name, axis in (("h", 0), ("c", 1), ("h_final", 1), ("c_final", 0)):
            for size in (0, 100):
                self.succeed("newton", path, "-o", out, "--force")
                was, now = resize(out, name, axis, size)
                self.fail_with(BAD_INPUT, ("verify", path, out), f"'/{name}' has shape {now}; expected {was}")

    def test_verify_a_chaotic_run(self):
        path, out = self.at("in.h5"), self.at("out.h5")
        self.succeed("generate", "newton", "-o", path, "--tokens", "6000", "--cell", "paragru", "--hidden", "16", "--input",
                     "4", "--recurrent-scale", "5")
        self.succeed("newton", path, "-o", out, ranks=3)
        self.succeed("verify", path, out)
        self.succeed("verify", path, out, "--sample", "3", ranks=2)
        with h5py.File(out, "r+") as f:
            f["h"][5000, 3] += 1e-3
        code, _, err = self.run_longscan("verify", path, out)
        self.assertEqual(code, NUMERICAL)
        self.assertIn("token 500", err)

    def test_generate(self):
        for cell in CELLS:
            words = ("--tokens", "100", "--cell", cell, "--hidden", "7", "--input", "3", "--dtype", "f64", "--seed", "9")
            if cell == "lstm":
                words += ("--layers", "2", "--bidirectional")
            for name, ranks in (("a.h5", 1), ("b.h5", 3)):
                self.succeed("generate", "newton", "-o", self.at(name), "--force", *words, ranks=ranks)
            self.assertEqual(contents(self.at("a.h5")), contents(self.at("b.h5")))
            with h5py.File(self.at("a.h5")) as f:
                w, x = {n: a[()] for n, a in f["cell"].items()}, f["x"][()]
                self.assertEqual((x.shape, x.dtype, f["cell"].attrs["type"]), ((100, 3), np.float64, cell))
            deep = cell == "lstm"
            h = network(cell, w, x, layers=2 if deep else 1, directions=2 if deep else 1)[0]
            self.close(self.solve(self.at("a.h5"))["h"], h, 1e-8)
        self.succeed("generate", "newton", "-o", self.at("big.h5"), "--tokens", "20000", "--hidden", "64", "--input", "16",
                     "--recurrent-scale", "2")
        with h5py.File(self.at("big.h5")) as f:
            self.assertAlmostEqual(np.std(f["x"][()]), 1, delta=0.01)
            self.assertAlmostEqual(np.std(f["cell/weight_ih_l0"][()]), 1 / 4, delta=0.01)
            self.assertAlmostEqual(np.std(f["cell/weight_hh_l0"][()]), 2 / 8, delta=0.01)
        self.fail_with(USAGE, ("generate", "newton", "-o", self.at("c.h5"), "--cell", "gruu"), "gruu", "gru")
        self.fail_with(USAGE, ("generate", "newton", "-o", self.at("c.h5"), "--cell", "paragru", "--layers", "2"), "one layer")

    def test_bench(self):
        words = ("bench", "newton", "--tokens", "2000", "--hidden", "16", "--runs", "3")
        for ranks, more in ((1, ("--cell", "gru")), (2, ("--precision", "f64"))):
            out, _ = self.succeed(*words, "--method", "newton", "--json", *more, ranks=ranks)
            rows = {r["name"]: r for r in json.loads(out)}
            self.assertEqual(list(rows), ["sequential", "auto", "newton"])
            for row in rows.values():
                for field in ("median_ms", "min_ms", "max_ms", "runs", "floor_ms", "iterations", "ns_per_token_channel"):
                    self.assertIn(field, row)
                self.assertLess(row["error"], 1e-4)
                self.assertGreater(row["projection_ms"], 0)
                self.assertLess(row["projection_ms"], row["max_ms"])
            self.assertEqual(rows["auto"]["ranks"], ranks)
        for more in ((), ("--projected",)):
            out, _ = self.succeed("bench", "newton", "--tokens", "50", "300", "--recurrent-scale", "0.5", "2", "--hidden",
                                  "4", "--runs", "2", "--json", *more)
            rows = [(r["name"], r["tokens"], r["recurrent_scale"]) for r in json.loads(out)]
            self.assertEqual(rows, [(name, tokens, scale) for tokens in (50, 300) for scale in (0.5, 2)
                                    for name in ("sequential", "auto")])
        for cell, ranks in (("paralstm", 1), ("gru", 2)):
            out, _ = self.succeed("bench", "io", "--cell", cell, "--tokens", "3000", "--hidden", "16", "--input", "4",
                                  "--runs", "2", "--window", "700", "--folder", self.folder, "--json", ranks=ranks)
            rows = {r["name"]: r for r in json.loads(out)}
            self.assertEqual(list(rows), ["copy", "solve", "file to file"])
            for row in rows.values():
                self.assertEqual((row["solver"], row["window_tokens"], row["ranks"]), ("newton", 700, ranks))
                # x and the states, and at most some kilobytes of structure and weights
                self.assertTrue(0 <= row["bytes"] - 3000 * 4 * (4 + 16 * (2 if cell == "paralstm" else 1)) < 50000)
            whole = rows["file to file"]
            self.assertAlmostEqual(whole["share_of_floor_rate"], whole["floor_ms"] / whole["median_ms"])
            self.assertEqual(os.listdir(self.folder), [])
        self.fail_with(USAGE, ("bench", "io", "--cell", "gru", "--dtype", "bf16"), "f32 or f64")
        out, _ = self.succeed(*words, "--cell", "paragru", "--recurrent-scale", "4")
        self.assertRegex(out, r"auto .* 0\.0e\+00")

    def test_examples_of_the_help(self):
        for command in ("newton", "generate newton", "bench newton"):
            out, _ = self.succeed(*command.split(), "--help")
            lines = out[out.index("Example:"):].splitlines()[1:]
            for line in (x.strip() for x in lines if x.strip()):
                words = line.split()
                ranks = 2 if words[0] == "mpirun" else 1
                self.succeed(*words[words.index("longscan") + 1:], *(("--force",) if "generate" in words else ()),
                             ranks=ranks)


if __name__ == "__main__":
    cli_test.main(__doc__)
