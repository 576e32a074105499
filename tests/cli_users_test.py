#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What people meet: inspect, plan, presets of generate, --config, man page and completions, pictures, and messages.

    cli_users_test.py --longscan build/apps/longscan [--only CLASS[.TEST]…] --launch mpirun --oversubscribe -n
"""
import json
import os
import re
import subprocess
import sys

import cli_test
from cli_test import BAD_INPUT, FILE_IO, RESOURCES, USAGE, Command, contents, numbers

import h5py
import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def chunk_operator(k, beta, log_decay=None):
    """A and T of a chunk of one head from the equation, decays of a head."""
    C = len(k)
    A = np.zeros((C, C))
    for t in range(C):
        for s in range(t):
            decay = 1 if log_decay is None else np.exp(log_decay[s + 1:t + 1].sum())
            A[t, s] = -beta[t] * decay * (k[t] @ k[s])
    return A, np.linalg.inv(np.eye(C) - A)


class Inspect(Command):
    def inspect(self, *words, ranks=1, expected=0):
        code, out, err = self.run_longscan("inspect", *words, "--json", ranks=ranks)
        self.assertEqual(code, expected, err)
        return json.loads(out), err

    def test_delta(self):
        d = numbers(tokens=300, heads=2)
        d["beta"][7:20] = 0
        d["beta"][50, 1] = 2.5
        d["log_decay"] = np.full((300, 2), -0.01)
        path = self.write(**d)
        found, _ = self.inspect(path, "--chunk", "32")
        one = found["solvable"][0]
        self.assertEqual((one["solver"], one["tokens"], one["heads"], one["d_key"]), ("delta", 300, 2, 8))
        self.assertEqual({x["role"] for x in one["datasets"]}, {"q", "k", "v", "beta", "log_decay"})
        hard = one["difficulty"]
        self.assertEqual((hard["tokens_read"], hard["token_heads"]), (300, 600))
        self.assertAlmostEqual(hard["key_norm"]["min"], 1)
        self.assertAlmostEqual(hard["beta"]["max"], 2.5)
        self.assertAlmostEqual(hard["beta"]["mean"], d["beta"].mean())
        self.assertAlmostEqual(hard["decay"]["min"], np.exp(-0.01))
        self.assertAlmostEqual(hard["half_life_tokens"]["longest"], np.log(2) / 0.01)
        self.assertEqual(hard["stability_breaches"], 1)
        self.assertEqual(hard["isolated_tokens"], int((d["beta"] < 1e-3).sum()))
        bounds, terms = [], []
        for h in range(2):
            for t in range(0, 300, 32):
                at = slice(t, t + 32)
                A, _ = chunk_operator(d["k"][at, h], d["beta"][at, h], d["log_decay"][at, h])
                bounds.append(min(np.abs(A).sum(1).max(), np.linalg.norm(A)))
                m = bounds[-1]
                terms.append(len(A) - 1 if m >= 1 else min(len(A) - 1, max(1, int(np.ceil(np.log(1.1e-16 * (1 - m)) / np.log(m))) - 1)))
        self.assertAlmostEqual(hard["norm_A"]["max"], max(bounds))
        self.assertAlmostEqual(hard["norm_A"]["median"] / np.median(bounds), 1, delta=0.12)
        self.assertEqual(hard["neumann_terms"]["max"], max(terms))
        self.assertEqual(hard["neumann_terms"]["chunks"], len(terms))
        # a state whose keys span the space is forgotten; by decay alone it would take 3,674 tokens
        self.assertLess(hard["forgetting"]["tokens_to_rounding"], 3000)
        text, _ = self.succeed("inspect", path)
        for words in ("delta rule", "K = 8", "beta |k|^2 <= 2 is broken by 1 of 600", "run:  longscan delta"):
            self.assertIn(words, text)
        # the command line that it prints works
        line = re.search(r"run:  longscan (.*)", text).group(1).replace("OUT.h5", self.at("o.h5")).split()
        self.succeed(*line, "--quiet")

    def test_ranks_and_sample(self):
        path = self.at("g.h5")
        self.succeed("generate", "delta", "-o", path, "--tokens", "60000", "--heads", "1", "--d-key", "16", "--d-value",
                     "128", "--preset", "realistic", "--quiet")
        sample, _ = self.inspect(path)
        self.assertLess(sample["solvable"][0]["difficulty"]["tokens_read"], 60000)
        one, _ = self.inspect(path, "--all")
        three, _ = self.inspect(path, "--all", ranks=3)
        a, b = (x["solvable"][0]["difficulty"] for x in (one, three))
        self.assertEqual(a["tokens_read"], 60000)
        for name in ("norm_A", "neumann_terms", "isolated_tokens", "stability_breaches", "token_heads"):
            self.assertEqual(a[name], b[name])
        self.assertAlmostEqual(a["beta"]["mean"], b["beta"]["mean"])
        # one bad value far inside is found by --all, by any number of ranks
        with h5py.File(path, "r+") as f:
            f["v"][31234, 0, 3] = np.nan
        for ranks in (1, 3):
            found, err = self.inspect(path, "--all", ranks=ranks, expected=BAD_INPUT)
            self.assertIn("token 31234", err)
            self.assertIn("head 0 is NaN", found["problems"][0])

    def test_every_problem(self):
        d = numbers()
        d["q"] = d["q"][..., :5]
        d["log_decay"] = np.full((64, 3), -1.0)
        d["cu_seqlens"] = np.array([0, 40, 20, 64])
        del d["beta"]
        _, err = self.inspect(self.write(**d), expected=BAD_INPUT)
        for text in ("4 problems", "no dataset 'beta'", "'/q' has 5 key channels", "'/log_decay' has 3 heads",
                     "'/cu_seqlens' decreases at entry 2"):
            self.assertIn(text, err)
        good = numbers()
        path = self.write(name="two.h5", groups={"/a": good, "/b": {n: x for n, x in good.items() if n != "k"}})
        found, err = self.inspect(path, expected=BAD_INPUT)
        self.assertEqual([s["groups"] for s in found["solvable"]], [["/a"]])
        self.assertIn("no dataset 'k' in group '/b'", err)
        _, err = self.inspect(self.write(name="none.h5", something=np.zeros(3)), expected=BAD_INPUT)
        self.assertIn("/something", err)
        self.fail_with(FILE_IO, ("inspect", self.at("absent.h5")), "absent.h5")

    def test_layouts_and_groups(self):
        d = numbers(tokens=40, heads=3)
        heads_first = {n: x.swapaxes(0, 1)[None] for n, x in d.items()}  # [1, H, T, …]
        text, _ = self.succeed("inspect", self.write(name="bhtd.h5", **heads_first))
        self.assertIn("say --layout BHTD", text)
        text, _ = self.succeed("inspect", self.at("bhtd.h5"), "--layout", "BHTD")
        self.assertIn("H = 3", text)
        self.assertIn("--layout BHTD", text)
        path = self.write(name="many.h5", groups={f"/demo_{i}": numbers(tokens=10 + i) for i in range(12)})
        found, _ = self.inspect(path)
        self.assertEqual(found["solvable"][0]["groups"], [f"/demo_{i}" for i in range(12)])
        self.assertIn("--group '/demo_*'", found["solvable"][0]["command_line"])

    def test_states_that_are_not_finite(self):
        d = numbers(heads=2)
        d["cu_seqlens"] = np.array([0, 20, 40, 64])
        d["initial_state"] = np.zeros((3, 2, d["v"].shape[-1], d["k"].shape[-1]))
        self.inspect(self.write(**d), "--all")
        d["initial_state"][1:, 1, 0, 2] = np.nan
        path = self.write(name="bad.h5", **d)
        for ranks in (1, 3):
            found, _ = self.inspect(path, ranks=ranks, expected=BAD_INPUT)
            self.assertEqual(len(found["problems"]), 1)
            self.assertIn("/initial_state", found["problems"][0])
            self.assertIn("not finite (sequence 1) (and in 1 more", found["problems"][0])
        path = self.at("n.h5")
        self.succeed("generate", "newton", "-o", path, "--tokens", "300", "--cell", "lstm", "--hidden", "8", "--quiet")
        with h5py.File(path, "r+") as f:
            f["h0"], f["c0"] = np.zeros((1, 8)), np.zeros((1, 8))
        self.inspect(path)
        for role, value in (("h0", np.inf), ("c0", np.nan)):
            with h5py.File(path, "r+") as f:
                f[role][0, 3] = value
            found, err = self.inspect(path, expected=BAD_INPUT)
            self.assertIn(f"'/{role}'", err)
            self.assertIn("not finite (sequence 0)", found["problems"][-1])

    def test_newton(self):
        path = self.at("n.h5")
        for scale, fate in (("0.5", "errors shrink"), ("4", "errors grow")):
            self.succeed("generate", "newton", "-o", path, "--tokens", "3000", "--cell", "gru", "--hidden", "24",
                         "--recurrent-scale", scale, "--force", "--quiet")
            text, _ = self.succeed("inspect", path)
            self.assertIn(fate, text)
            self.assertIn("gru of group '/cell'", text)
        found, _ = self.inspect(path, "--all", ranks=2)
        hard = found["solvable"][0]["difficulty"]
        self.assertEqual(hard["tokens_read"], 3000)
        self.assertGreater(hard["lyapunov"], 0)
        with h5py.File(path, "r+") as f:
            f.move("cell", "my_rnn")
        found, _ = self.inspect(path)
        self.assertIn("--cell", found["solvable"][0]["command_line"])
        with h5py.File(path, "r+") as f:
            f["x"][5, 2] = np.inf
            del f["my_rnn/weight_hh_l0"]
        _, err = self.inspect(path, expected=BAD_INPUT)
        self.assertIn("weight_hh_l0", err)

    def test_influence(self):
        d = numbers(tokens=150, heads=2)
        d["log_decay"] = -np.random.default_rng(5).uniform(0, 0.1, size=(150, 2))
        d["cu_seqlens"] = np.array([0, 70, 150])
        path, out = self.write(**d), self.at("i.h5")
        # chunks of 32: 0 to 2 of the first sequence (70 tokens), 3 to 5 of the second
        text, _ = self.succeed("inspect", path, "--chunk", "32", "--influence", "4", "-o", out, "--head", "1", "--token", "110")
        self.assertIn("tokens 102 to 133, sequence 1", text)
        with h5py.File(out) as f:
            T, paths, M = f["T"][()], f["paths"][()], f["output_map"][()]
            ranking, left = f["ranking"][()], f["left_after"][()]
            self.assertEqual((int(f.attrs["first_token"]), ranking.dtype.kind), (102, "i"))
        at = slice(102, 134)
        for h in range(2):
            A, expected = chunk_operator(d["k"][at, h], d["beta"][at, h], d["log_decay"][at, h])
            np.testing.assert_allclose(T[h], expected, atol=1e-12)
            np.testing.assert_allclose(paths[0, h], A, atol=1e-14)
            np.testing.assert_allclose(paths[2, h], A @ A @ A, atol=1e-12)
            np.testing.assert_allclose(np.eye(32) + paths[:, h].sum(0), expected, atol=1e-9)
            rest = np.linalg.norm(expected - np.eye(32) - A) / np.linalg.norm(expected)
            self.assertAlmostEqual(left[h, 0], rest)
        # v of token 105 in the output of token 110, by the recurrence itself
        moved = {n: x[at].copy() for n, x in d.items() if n != "cu_seqlens"}
        base = cli_test.reference(**moved)[0]
        moved["v"][3, 1] += 1
        np.testing.assert_allclose(cli_test.reference(**moved)[0][8, 1] - base[8, 1], M[1, 8, 3], atol=1e-12)
        order = np.argsort(-np.abs(M[1, 8, :8]), kind="stable") + 102
        self.assertEqual(list(ranking[1, 8, :8]), list(order))
        self.assertIn(f"    {order[0]} ", text)
        code, _, err = self.run_longscan("inspect", path, "--influence", "99", "-o", self.at("j.h5"))
        self.assertEqual((code, "there are 4 chunks of 64" in err), (USAGE, True), err)


class Plan(Command):
    def plan(self, *words, ranks=1, expected=0):
        code, out, err = self.run_longscan("plan", *words, "--json", ranks=ranks)
        self.assertEqual(code, expected, err)
        return json.loads(out)[0]

    SIZES = ("--tokens", "1000000", "--heads", "8", "--d-key", "64", "--d-value", "32")

    def test_sizes(self):
        p = self.plan(*self.SIZES, "--ranks", "4", "--memory", "8GB", "--solve-rate", "1e6", "--file-rate", "1e9")
        # windows that are long enough to be read and written beside the solve
        self.assertEqual((p["windows"], p["window"], p["fits"]), (8, 31250, True))
        token = 4 * 8 * (64 + 64 + 32 + 1)
        self.assertEqual(p["bytes"]["read"], 1000000 * token)
        self.assertEqual(p["bytes"]["written"], 1000000 * 4 * 8 * 32 + 4 * 8 * 64 * 32)
        state = 4 * 8 * 64 * 32  # to the next rank in each window, and from the last one to the first for the next
        self.assertEqual(p["bytes"]["exchanged"], 8 * 3 * state + 7 * state)
        self.assertEqual(p["memory"]["in_and_out_bytes"], 31250 * (token + 4 * 8 * 32))
        self.assertGreaterEqual(p["memory"]["needed_bytes"], 2 * 31250 * (token + 4 * 8 * 32))
        whole = self.plan(*self.SIZES, "--ranks", "4", "--memory", "8GB", "--solve-rate", "1e6", "--window", "250000")
        self.assertEqual((whole["windows"], whole["window"]), (1, 250000))
        self.assertEqual(whole["memory"]["needed_bytes"], p["memory"]["all_at_once_bytes"])
        self.assertAlmostEqual(p["seconds"]["solve_least"], 1e6 * 8 / 4 / 1e6, delta=0.01)
        self.assertAlmostEqual(p["seconds"]["read"], token * 1e6 / 1e9)
        small = self.plan(*self.SIZES, "--ranks", "4", "--memory", "100MB", "--solve-rate", "1e6")
        self.assertGreater(small["windows"], p["windows"])
        self.assertLessEqual(small["memory"]["needed_bytes"], 100 << 20)
        code, out, err = self.run_longscan("plan", *self.SIZES, "--ranks", "4", "--memory", "1MB", "--solve-rate", "1e6")
        self.assertEqual(code, RESOURCES)
        self.assertIn("DOES NOT FIT", out)
        self.assertIn("will not fit", err)

    def test_sizes_that_nothing_holds(self):
        most = str(2**31 - 1)
        for words, text in ((("plan", "--heads", most, "--d-key", most), "more than a rank can hold"),
                            (("plan", "--solver", "newton", "--hidden", most), "more than a rank can hold"),
                            (("bench", "delta", "--tokens", str(2**63 - 1)), "are free"),
                            (("bench", "newton", "--hidden", most), "are free"),
                            (("bench", "newton", "--tokens", str(10**13)), "are free"),
                            (("bench", "scan", "--segments", str(10**13)), "are free")):
            for ranks in (1, 2):
                with self.subTest(words=words, ranks=ranks):
                    self.fail_with(RESOURCES, words, "TiB", text, ranks=ranks)
        self.fail_with(FILE_IO, ("generate", "delta", "-o", self.at("x.h5"), "--tokens", str(2**63 - 1)), "64 bits")

    def test_scan_model(self):
        def scans(ranks, heads, width, *words):
            p = self.plan("--tokens", "1000000", "--heads", str(heads), "--d-key", str(width), "--d-value", str(width),
                          "--ranks", str(ranks), "--memory", "64GB", "--solve-rate", "1e6", *words)
            return p["scan"]["best"], p["scan"]["seconds"]

        rate = ("--apply-rate", "1e10")
        self.assertEqual(scans(1, 4, 16), ("none", {}))
        self.assertEqual(scans(2, 4, 128)[0], "chain")  # one message
        self.assertEqual(scans(4096, 1, 16, *rate)[0], "doubling")  # latency rules
        self.assertEqual(scans(64, 64, 128, *rate)[0], "alltoall")  # every rank scans a head
        best, s = scans(4096, 1, 16, "--reproducible", *rate)
        self.assertIn(best, s)
        self.assertEqual(set(s), {"chain", "alltoall", "allgather"})  # those that do not compose
        self.assertEqual(scans(64, 64, 128, "--scan", "allgather", *rate)[0], "allgather")
        # by hand: P = 5, H = 3, K = V = 8 in float32, rows padded to 64 bytes; alpha = 1 s, a second a byte, a second a
        # multiplication
        _, s = scans(5, 3, 8, "--latency", "1", "--bandwidth", "1", "--apply-rate", "1")
        state, maps, apply, compose = 8 * 64, 8 * 64, 8 ** 3, 2 * 8 ** 3
        first = 1 + 3 * state  # to the second rank, which then is like the others; who knows what takes 3 steps more
        self.assertAlmostEqual(s["chain"], first + 3 * (1 + state + apply) + 2 * (1 + state))
        self.assertAlmostEqual(s["alltoall"], first + 3 + 8 + 3 * (maps + state) + 3 * apply)
        self.assertAlmostEqual(s["allgather"], first + 3 + 3 + 3 * 3 * maps + 3 * 3 * apply)
        self.assertAlmostEqual(s["doubling"], first + 3 + 4 * (1 + 3 * maps) + 3 * 3 * compose)
        self.assertAlmostEqual(s["mpi"], first + 3 + 4 * (1 + 3 * maps) + 3 * 3 * compose)
        # measured here
        p = self.plan("--tokens", "4096", "--d-key", "16", "--d-value", "16", "--ranks", "8", "--solve-rate", "1e6")
        self.assertTrue(p["scan"]["maps_measured_here"])
        self.assertTrue(all(seconds > 0 for seconds in p["scan"]["seconds"].values()))

    def test_is_what_the_solve_takes(self):
        """Window, memory, and what the scan moves, as the report says them."""
        delta, newton, both = self.at("delta.h5"), self.at("newton.h5"), self.at("both.h5")
        self.succeed("generate", "delta", "-o", delta, "--tokens", "150000", "--heads", "2", "--d-key", "8",
                     "--d-value", "24", "--quiet")
        self.succeed("generate", "newton", "-o", newton, "--tokens", "150000", "--cell", "paralstm", "--hidden", "3",
                     "--input", "2", "--quiet")
        self.succeed("generate", "newton", "-o", both, "--tokens", "5000", "--cell", "gru", "--hidden", "4", "--input",
                     "2", "--bidirectional", "--quiet")
        for solver, path, words in (
                ("delta", delta, ()), ("delta", delta, ("--window", "7001", "--state-every", "100")),
                ("delta", delta, ("--reproducible", "--precision", "f64", "--output-dtype", "f64")),
                ("newton", newton, ()), ("newton", newton, ("--window", "7001", "--output-dtype", "f64")),
                ("newton", newton, ("--method", "elk", "--precision", "f64")), ("newton", both, ("--window", "1000",))):
            for ranks in (1, 3):
                with self.subTest(solver=solver, words=words, ranks=ranks):
                    p = self.plan(path, "--ranks", str(ranks), "--solve-rate", "1e6", "--apply-rate", "1e9", *words)
                    self.succeed(solver, path, "-o", self.at("o.h5"), "--report", self.at("r.json"), "--force",
                                 "--quiet", *words, ranks=ranks)
                    with open(self.at("r.json")) as f:
                        report = json.load(f)
                    self.assertEqual((p["window"], p["memory"]["needed_bytes"]),
                                     (report["window_tokens"], report["planned_memory_bytes"]))
                    self.assertEqual((p["bytes"]["read"], p["bytes"]["written"]),
                                     (report["bytes"]["read"], report["bytes"]["written"]))
                    choice = report.get("scan_choice", {})
                    if ranks > 1 and choice.get("elements") == p["scan"]["elements"]:
                        for size in ("point_bytes", "map_bytes"):
                            self.assertEqual(p["scan"][size], choice[size])
                        # parts end where segments do
                        self.assertAlmostEqual(p["scan"]["maps_per_element"], choice["maps_per_element"], delta=1)

    def test_traffic_is_what_the_solve_sends(self):
        delta, lstm, gru, deep = (self.at(f"{n}.h5") for n in ("delta", "lstm", "gru", "deep"))
        self.succeed("generate", "newton", "-o", deep, "--tokens", "3000", "--cell", "lstm", "--hidden", "8", "--layers", "2",
                     "--bidirectional")
        self.succeed("generate", "delta", "-o", delta, "--tokens", "30000", "--heads", "2", "--d-key", "8", "--d-value", "24")
        for path, cell in ((lstm, "paralstm"), (gru, "gru")):
            self.succeed("generate", "newton", "-o", path, "--tokens", "30000", "--cell", cell, "--hidden", "8")
        for solver, path, words in (("delta", delta, ("--scan", "chain")),
                                    ("delta", delta, ("--scan", "chain", "--window", "3000")), ("newton", lstm, ()),
                                    ("newton", lstm, ("--window", "3000")), ("newton", gru, ("--window", "3000")),
                                    ("newton", lstm, ("--window", "3000", "--method", "sequential")), ("newton", deep, ())):
            for ranks in (1, 2, 3):
                with self.subTest(solver=solver, words=words, ranks=ranks):
                    p = self.plan(path, "--ranks", str(ranks), "--solve-rate", "1e6", "--apply-rate", "1e9", *words)
                    self.succeed(solver, path, "-o", self.at("o.h5"), "--report", self.at("r.json"), "--force", *words,
                                 ranks=ranks)
                    with open(self.at("r.json")) as f:
                        sent = json.load(f)["bytes"]["exchanged"]
                    # the delta rule also says which heads are known
                    self.assertTrue(0 <= sent - p["bytes"]["exchanged"] <= (100 if solver == "delta" else 0), (sent, p))

    def test_file(self):
        self.fail_with(USAGE, ("plan", "--cell", "x.h5"), "--cell is for a file", "--cell-type")
        path = self.at("in.h5")
        self.succeed("generate", "delta", "-o", path, "--tokens", "20000", "--heads", "2", "--quiet")
        p = self.plan(path, "--ranks", "2")
        self.assertGreater(p["memory"]["program_bytes"], 1 << 20)
        self.assertEqual((p["tokens"], p["tokens_per_rank"], p["solver"]), (20000, 10000, "delta"))
        self.assertGreaterEqual(p["seconds"]["solve_most"], p["seconds"]["solve_least"])
        # what it says will be read is what is read
        self.succeed("delta", path, "-o", self.at("o.h5"), "--report", self.at("r.json"), ranks=2)
        with open(self.at("r.json")) as f:
            report = json.load(f)
        self.assertEqual(report["bytes"]["read"], p["bytes"]["read"])
        self.assertEqual(report["bytes"]["written"], p["bytes"]["written"])
        self.assertEqual(len(report["seconds_by_rank"]["solve"]), 2)
        self.assertEqual(max(report["seconds_by_rank"]["total"]), report["seconds"]["total"])
        self.succeed("generate", "newton", "-o", path, "--tokens", "2000", "--force", "--quiet")
        p = self.plan(path, "--ranks", "3", ranks=2)
        self.assertEqual((p["solver"], p["tokens"]), ("newton", 2000))
        p = self.plan("--solver", "newton", "--cell-type", "paralstm", "--ranks", "2")
        self.assertEqual(p["solver"], "newton")


class Generate(Command):
    def test_presets(self):
        for preset in ("gated", "bursts", "packed", "realistic"):
            files = []
            for ranks in (1, 3):
                files.append(self.at(f"{preset}{ranks}.h5"))
                self.succeed("generate", "delta", "-o", files[-1], "--tokens", "5000", "--heads", "2", "--d-key", "16",
                             "--d-value", "8", "--preset", preset, "--shortest", "20", "--quiet", ranks=ranks)
            self.assertEqual(contents(files[0]), contents(files[1]))
            with h5py.File(files[0]) as f:
                k = f["k"][()]
                np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1, rtol=1e-5)
                self.assertEqual("log_decay" in f, preset in ("gated", "realistic"))
                self.assertEqual("cu_seqlens" in f, preset in ("packed", "realistic"))
                if "log_decay" in f:
                    self.assertLessEqual(f["log_decay"][()].max(), 0)
                    self.assertGreater(np.exp(f["log_decay"][()]).mean(), 0.85)
                if "cu_seqlens" in f:
                    at = f["cu_seqlens"][()]
                    self.assertEqual((at[0], at[-1], at.dtype), (0, 5000, np.int64))
                    lengths = np.diff(at)
                    self.assertGreaterEqual(lengths[:-1].min(), 20)
                    self.assertGreater(lengths.max(), 5 * np.median(lengths))  # a heavy tail
                if preset == "bursts":
                    beta = f["beta"][()]
                    self.assertLess(np.median(beta), 0.1)
                    self.assertGreater((beta > 0.9).mean(), 0.02)
                    both = (beta[1:, 0] > 0.9) & (beta[:-1, 0] > 0.9)
                    self.assertGreater((k[1:, 0] * k[:-1, 0]).sum(-1)[both].mean(), 0.7)
            self.delta(files[0], "--quiet", ranks=2)
        self.fail_with(USAGE, ("generate", "delta", "-o", self.at("x.h5"), "--preset", "burst"), "did you mean 'bursts'")

    def test_newton_preset(self):
        files = []
        for ranks in (1, 2):
            files.append(self.at(f"n{ranks}.h5"))
            self.succeed("generate", "newton", "-o", files[-1], "--tokens", "4000", "--input", "8", "--hidden", "8",
                         "--preset", "realistic", "--quiet", ranks=ranks)
        self.assertEqual(contents(files[0]), contents(files[1]))
        with h5py.File(files[0]) as f:
            x = f["x"][()]
        self.assertGreater(np.corrcoef(x[1:, 0], x[:-1, 0])[0, 1], 0.7)


class Tools(Command):
    def test_config(self):
        config = self.at("all.conf")
        with open(config, "w") as f:
            f.write("[generate.delta]\ntokens = 128\nheads = 2\nd-key = 8\nd-value = 8\nquiet = true\n"
                    "[delta]\nchunk = 16\nquiet = true\n[verify]\nsample = 3\n[inspect]\nchunk = 16\njson = true\n"
                    "[plan]\nranks = 3\n[generate.newton]\ntokens = 99\nhidden = 4\n[bench.delta]\ntokens = 256\n"
                    "d-key = 8\nd-value = 8\nruns = 1\njson = true\n")
        c = ("--config", config)
        self.succeed("generate", "delta", "-o", self.at("in.h5"), *c)
        self.succeed("delta", self.at("in.h5"), "-o", self.at("out.h5"), *c)
        with h5py.File(self.at("out.h5")) as f:
            self.assertEqual((f["o"].shape, f.attrs["option_chunk"]), ((128, 2, 8), b"16" if isinstance(f.attrs["option_chunk"], bytes) else "16"))
        out, _ = self.succeed("verify", self.at("in.h5"), self.at("out.h5"), *c)
        self.assertIn("a sample", out)
        out, _ = self.succeed("inspect", self.at("in.h5"), *c)
        self.assertEqual(json.loads(out)["solvable"][0]["difficulty"]["chunk"], 16)
        out, _ = self.succeed("plan", self.at("in.h5"), *c)
        self.assertIn("on 3 ranks", out)
        self.succeed("generate", "newton", "-o", self.at("n.h5"), *c)
        with h5py.File(self.at("n.h5")) as f:
            self.assertEqual(f["x"].shape[0], 99)
        out, _ = self.succeed("bench", "delta", *c)
        self.assertEqual(json.loads(out)[0]["runs"], 1)
        with open(config, "a") as f:
            f.write("[plan]\nrankz = 3\n")
        self.fail_with(USAGE, ("plan", self.at("in.h5"), *c), "--rankz", "did you mean '--ranks'")

    def leaves(self, *path):
        """Every command that takes options, with its help."""
        out, _ = self.succeed(*path, "--help")
        found = re.search(r"^Subcommands:\n((?:  .*\n)+)", out, re.M)
        if not found:
            return {path: out}
        return {p: text for name in re.findall(r"^  (\S+)", found.group(1), re.M)
                for p, text in self.leaves(*path, name).items()}

    def test_config_takes_every_option(self):
        for path, text in self.leaves().items():
            options = re.findall(r"^  (?:-\w, )?--([a-z0-9-]+)(?:, --\w+)?(?: (\S+))?", text, re.M)
            lines = []
            for name, kind in options:
                if name in ("help", "config"):
                    continue
                flag = re.search(rf"--{name} {{2,}}", text) or kind == ""
                value = "true" if flag else '"' + (kind.split("|")[0] if "|" in kind else "1") + '"'
                lines.append(f"{name} = {'rsqrt' if kind == 'X|rsqrt' else value}\n")
            if path == ("info",):
                self.assertEqual(lines, [])
                continue
            self.assertGreater(len(lines), 2, path)
            config = self.at("every.conf")
            with open(config, "w") as f:
                f.write("[" + ".".join(path) + "]\n" + "".join(lines) + "nonsense = 1\n")
            self.fail_with(USAGE, (*path, "--config", config), f"unknown option in {config} '--nonsense'")

    def test_config_of_lists_and_what_is_wrong_with_a_file(self):
        self.write(name="in.h5", groups={g: numbers(tokens=9) for g in ("/my a", "/b", "/c")})
        config = self.at("c.conf")

        def options(text):
            with open(config, "w") as f:
                f.write(text)
            return "--config", config
        self.succeed("delta", self.at("in.h5"), "-o", self.at("o.h5"), *options('group = ["/my a", "/b"]\nstate_every = 3\n'))
        with h5py.File(self.at("o.h5")) as f:
            self.assertEqual((set(f), f["my a/states"].shape), ({"my a", "b"}, (3, 2, 8, 8)))
        self.succeed("verify", self.at("in.h5"), self.at("o.h5"))
        out, _ = self.succeed("bench", "newton", *options('tokens = 99\nhidden = 2\nruns = 1\nmethod = ["quasi", "jacobi"]\njson = true\n'))
        self.assertEqual([row["name"] for row in json.loads(out)][-2:], ["quasi", "jacobi"])
        solve = ("delta", self.at("in.h5"), "-o", self.at("o2.h5"))
        for text, said in (("[dleta]\nchunk = 3\n", "unknown section in c.conf 'dleta'; did you mean 'delta'?"),
                           ("[generate]\ntokens = 3\n", "did you mean 'generate.delta'?"),
                           ("chunk = 999\n", "c.conf: --chunk: '999' is not a whole number from 1 to 256"),
                           ("scan = cain\n", "c.conf: unknown value of --scan 'cain'; did you mean 'chain'?"),
                           ("chunk = [3, 4]\n", "c.conf: --chunk: At Most 1 required but received 2")):
            options(text)
            self.fail_with(USAGE, (*solve, "--config", "c.conf"), said)
        self.fail_with(FILE_IO, (*solve, "--config", self.folder), self.folder)

    def test_spack_environment(self):
        try:
            import yaml
        except ImportError:
            self.skipTest("no yaml; on Debian: apt-get install python3-yaml")
        with open(os.path.join(ROOT, "scripts", "spack.yaml")) as f:
            environment = yaml.safe_load(f)
        self.assertEqual(set(environment), {"spack"})
        self.assertEqual(set(environment["spack"]), {"specs", "concretizer", "view"})
        self.assertEqual({type(spec) for spec in environment["spack"]["specs"]}, {str})  # "cmake@3.25:" wants quotes

    def test_man_page_and_completion(self):
        with open(os.path.join(ROOT, "CMakeLists.txt")) as f:
            version = re.search(r"project\(longscan VERSION ([0-9.]+)", f.read()).group(1)
        with open(os.path.join(ROOT, "CHANGELOG.md")) as f:
            self.assertEqual(re.search(r"^## ([0-9.]+)", f.read(), re.M).group(1), version)
        for words in ((), ("delta",), ("generate", "newton"), ("info",)):
            out, _ = self.succeed(*words, "--version")
            self.assertEqual(out, f"longscan {version}\n")
        everything, _ = self.succeed("--help-all")
        for path in self.leaves():
            self.assertIn(f"Usage: longscan {' '.join(path)} ", everything)
        self.assertLessEqual(max(len(line) for line in everything.splitlines()), 120)
        # MPI is not needed for these: neither by builds nor by shells
        page, _ = self.succeed("--man-page")
        self.assertIn(f'"longscan {version}"', page)
        script, _ = self.succeed("--completion", "bash")
        for command in ("delta", "newton", "inspect", "plan", "generate delta", "bench newton", "verify"):
            out, _ = self.succeed(*command.split(), "--help")
            self.assertIn(f".SS longscan {command}\n", page)
            for option in re.findall(r"(--[a-z][a-z0-9-]+)", out[:out.find("Example")]):
                self.assertIn(option.replace("-", "\\-"), page)
                self.assertIn(option, script)

        def complete(*words):
            line = " ".join(f"'{w}'" for w in words)
            p = subprocess.run(["bash", "-c", f"source /dev/stdin\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
                                              "_longscan; echo ${COMPREPLY[@]}"], input=script, text=True,
                               capture_output=True)
            self.assertEqual(p.stderr, "")
            return p.stdout.split()
        self.assertEqual(complete("longscan", "gen"), ["generate"])
        self.assertEqual(complete("longscan", "generate", ""), ["delta", "newton"])
        self.assertEqual(complete("longscan", "delta", "in"), [])  # file names are the shell's own business
        self.assertIn("complete -o default -F", script)
        self.assertEqual(complete("longscan", "delta", "--inverse", "n"), ["neumann"])
        self.assertEqual(complete("longscan", "generate", "delta", "--pre"), ["--preset"])

    def test_pictures(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("no matplotlib; on Debian: apt-get install python3-matplotlib")
        plot = os.path.join(ROOT, "scripts", "plot.py")

        def draw(*words, code=0):
            p = subprocess.run([sys.executable, "-B", plot, *words], capture_output=True, text=True, cwd=self.folder)
            self.assertEqual(p.returncode, code, p.stderr)
            return p.stderr

        self.succeed("generate", "delta", "-o", self.at("in.h5"), "--tokens", "512", "--heads", "2", "--d-key", "8",
                     "--d-value", "8", "--quiet")
        for ranks in (1, 2):
            self.succeed("delta", self.at("in.h5"), "-o", self.at("out.h5"), "--state-every", "32", "--force", "--quiet",
                         "--report", self.at(f"{ranks}.json"), ranks=ranks)
        self.succeed("inspect", self.at("in.h5"), "--influence", "1", "-o", self.at("i.h5"))
        self.succeed("generate", "newton", "-o", self.at("n.h5"), "--tokens", "256", "--hidden", "8", "--quiet")
        self.succeed("newton", self.at("n.h5"), "-o", self.at("no.h5"), "--method", "newton", "--report", self.at("n.json"),
                     "--quiet")
        for words in (("convergence", "n.json"), ("influence", "i.h5", "--head", "1"), ("states", "out.h5"),
                      ("phases", "2.json"), ("trace", "2.json"), ("scaling", "1.json", "2.json")):
            draw(*words, "-o", words[0] + ".png")
            with open(self.at(words[0] + ".png"), "rb") as f:
                self.assertEqual(f.read(8), b"\x89PNG\r\n\x1a\n")
        self.assertIn("--state-every", draw("states", "no.h5", "-o", "x.png", code=1))
        self.assertIn("wants one of longscan newton", draw("convergence", "1.json", "-o", "x.png", code=1))
        self.assertIn("has no trace", draw("trace", "n.json", "-o", "x.png", code=1))
        self.assertIn("two numbers of ranks", draw("scaling", "1.json", "-o", "x.png", code=1))


class Messages(Command):
    """What is said about a bad file, word by word."""

    def say(self, expected, text, words=(), ranks=1, raw=None, **changes):
        d = numbers()
        d.update(changes)
        path = self.at("in.h5")
        if raw is None:
            self.write(**{n: x for n, x in d.items() if x is not None})
        else:
            with open(path, "wb") as f:
                f.write(raw)
        code, out, err = self.run_longscan("delta", path, "-o", self.at("out.h5"), *words, ranks=ranks)
        lines = err.split("\n-----")[0].splitlines()  # mpirun adds words of its own
        said = "\n".join(line for line in lines if not re.match(r"longscan: delta, \d+ tokens", line))
        self.assertEqual((code, out, said.replace(path, "IN")), (expected, "", "longscan: " + text))
        self.assertFalse(os.path.exists(self.at("out.h5")))

    def test_shapes(self):
        d = numbers()
        self.say(BAD_INPUT, "IN: no dataset 'k' in group '/'. There are: beta q v", k=None)
        self.say(BAD_INPUT, "IN: no dataset 'beta' in group '/'; did you mean 'betas' (--beta betas)? There are: betas k q v",
                 beta=None, betas=d["beta"])
        self.say(BAD_INPUT, "IN: dataset '/k' has 64 tokens, '/v' has 61; they must be equal\n"
                            "  dataset '/q' has 64 tokens, '/v' has 61; they must be equal\n"
                            "  dataset '/beta' has 64 tokens, '/v' has 61; they must be equal", v=d["v"][:-3])
        self.say(BAD_INPUT, "IN: dataset '/beta' has 3 heads, '/v' has 2; they must be equal",
                 beta=d["beta"][:, :1].repeat(3, 1))
        self.say(BAD_INPUT, "IN: dataset '/q' has 5 key channels, '/k' has 8; they must be equal", q=d["q"][..., :5])
        self.say(BAD_INPUT, "IN: dataset '/q' has shape [64, 8]; it needs as many axes as '/v' [64, 2, 8]", q=d["q"][:, 0])
        self.say(BAD_INPUT, "IN: dataset '/initial_state' has shape [2, 8, 9]; expected [2, 8, 8] (heads, d_value, d_key)",
                 initial_state=np.zeros((2, 8, 9)))
        self.say(BAD_INPUT, "IN: dataset '/cu_seqlens' decreases at entry 2: 20 after 40", cu_seqlens=np.array([0, 40, 20, 64]))
        self.say(BAD_INPUT, "IN: dataset '/cu_seqlens' ends at 60, but there are 64 tokens", cu_seqlens=np.array([0, 20, 60]))

    def test_values(self):
        d = numbers()
        v = d["v"].copy()
        v[37, 1, 3] = np.nan
        for ranks in (1, 3):
            self.say(BAD_INPUT, "dataset '/v' of IN at token 37, head 1 is NaN; every input must be finite", v=v, ranks=ranks)
        beta = d["beta"].copy()
        beta[12, 0] = np.inf
        self.say(BAD_INPUT, "dataset '/beta' of IN at token 12, head 0 is infinite; every input must be finite", beta=beta)
        self.say(BAD_INPUT, "dataset '/log_decay' of IN at token 0, head 0 is 0.250000; log_decay is a natural logarithm and "
                            "must be <= 0 (was a linear gate written?)", log_decay=np.full((64, 2), 0.25))

    def test_types(self):
        d = numbers()
        self.say(BAD_INPUT, "IN: dataset '/q' holds 32-bit integers; floating-point numbers are needed",
                 q=(100 * d["q"]).astype(np.int32))
        self.say(BAD_INPUT, "IN: dataset '/q' holds unmarked uint16; if these are bfloat16 bit patterns, say so with an "
                            "attribute dtype = 'bfloat16'", q=np.zeros(d["q"].shape, np.uint16))
        self.say(BAD_INPUT, "IN: dataset '/beta' holds text; floating-point numbers are needed", beta=np.array([b"x"] * 64))

    def test_links(self):
        def link(path, target):
            self.write(**numbers())
            with h5py.File(self.at("in.h5"), "r+") as f:
                del f["k"]
                f["k"] = target
            code, _, err = self.run_longscan("delta", "in.h5", "-o", "out.h5")
            self.assertEqual((code, err), (BAD_INPUT, f"longscan: in.h5: dataset '/k' is a link to {path}\n"))
        link("'/gone', which cannot be opened (component not found)", h5py.SoftLink("/gone"))
        link("'/k' of the file 'gone.h5', which cannot be opened (unable to open file, file name = 'gone.h5', "
             "temp_file_name = 'gone.h5')", h5py.ExternalLink("gone.h5", "/k"))

    def test_where_things_are(self):
        for groups, text in (({"/a b": numbers()}, "group '/a b' does: --group '/a b'"),
                             ({f"/demo_{i}": numbers() for i in (1, 2, 10)},
                              "3 groups do, '/demo_1' to '/demo_10': name them with --group")):
            self.write(groups=groups)
            code, _, err = self.run_longscan("delta", "in.h5", "-o", "out.h5")
            self.assertEqual((code, err), (BAD_INPUT, "longscan: in.h5: group '/' does not hold the datasets q, k, v, "
                                                      f"but {text}\n"))
        self.write(x=np.zeros((9, 3)))
        self.fail_with(BAD_INPUT, ("delta", self.at("in.h5"), "-o", self.at("out.h5")), "input for longscan newton")
        self.write(**numbers())
        self.fail_with(BAD_INPUT, ("newton", self.at("in.h5"), "-o", self.at("out.h5")), "input for longscan delta")

    def test_command_lines(self):
        path = self.write(**numbers())
        solve = ("delta", path, "-o", self.at("out.h5"))
        for words, text in (((), "a command is missing: delta, newton, inspect, plan, generate, verify, bench, info; "
                                 "see longscan --help"),
                            (("generate",), "a command is missing: delta, newton; see longscan generate --help"),
                            (("delta",), "IN.h5 and --output OUT.h5 are missing; see longscan delta --help"),
                            (("verify", path), "OUT.h5 is missing; see longscan verify --help"),
                            ((*solve, "--group"), "--group needs a value; see longscan delta --help"),
                            ((*solve, "--window", "1e3"),
                             "--window: '1e3' is not a whole number of 1 or more; see longscan delta --help"),
                            ((*solve, "--window", "9" * 20), f"--window: '{'9' * 20}' is not a whole number of 1 or more "
                                                             "that fits 64 bits; see longscan delta --help"),
                            ((*solve, "--chunk", "257"),
                             "--chunk: '257' is not a whole number from 1 to 256; see longscan delta --help"),
                            ((*solve, "--scale", "nan"),
                             "--scale: 'nan' is neither a finite number nor rsqrt; see longscan delta --help"),
                            ((*solve, "--stall-timeout", "-1"),
                             "--stall-timeout: '-1' is not a number of zero or more; see longscan delta --help"),
                            (("newton", path, "-o", "o", "--tolerance", "0"),
                             "--tolerance: '0' is not a number above zero; see longscan newton --help"),
                            (("plan", "--memory", "lots"),
                             "--memory: 'lots' is not a size such as 512MB or 64GB; see longscan plan --help"),
                            ((*solve, "-x"), "unknown option '-x'; see --help"),
                            (("dleta",), "unknown command 'dleta'; did you mean 'delta'? (known: delta newton inspect "
                                         "plan generate verify bench info)")):
            with self.subTest(words=words):
                code, out, err = self.run_longscan(*words)
                self.assertEqual((code, out, err), (USAGE, "", f"longscan: {text}\n"))

    def test_files(self):
        self.say(BAD_INPUT, "'IN' is not an HDF5 file", raw=b"not an HDF5 file at all\n" * 50)
        self.write(name="whole.h5", **numbers())
        whole = contents(self.at("whole.h5"))
        half = len(whole) // 2
        self.say(BAD_INPUT, "'IN' is not a whole HDF5 file (cut short, damaged, or not closed by its writer): truncated file: "
                            f"eof = {half}, sblock->base_addr = 0, stored_eof = {len(whole)}", raw=whole[:half])
        path = self.at("lzf.h5")
        with h5py.File(path, "w") as f:
            for n, x in numbers().items():
                f.create_dataset(n, data=x, **(dict(chunks=(16, 2, 8), compression="lzf") if n == "v" else {}))
        _, _, err = self.run_longscan("delta", path, "-o", self.at("out.h5"))
        self.assertEqual(err, f"longscan: {path}: dataset '/v' is compressed with the filter lzf (32000), which this HDF5 does "
                              "not have; name the folder of its plugin in HDF5_PLUGIN_PATH, or rewrite the dataset with "
                              "gzip where the filter is at hand (h5py has lzf; hdf5plugin has most others)\n")


if __name__ == "__main__":
    cli_test.main(__doc__)
