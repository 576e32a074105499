#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--scan, --transport, bench scan and scripts/model_scaling.py on the command line.

    cli_scan_test.py --longscan build/apps/longscan [--only CLASS[.TEST]…] --launch mpirun --oversubscribe -n
"""
import json
import os
import subprocess
import sys

import cli_test
from cli_test import Command, h5py

ALGORITHMS = ("chain", "alltoall", "allgather", "doubling", "mpi")


class Scan(Command):
    def make_delta(self):
        self.succeed("generate", "delta", "-o", "in.h5", "--tokens", "2000", "--heads", "3", "--d-key", "24", "--d-value", "10",
                     "--dtype", "f64", "--force", "--quiet")

    def test_every_algorithm_answers(self):
        self.make_delta()
        seen = {}
        for scan in ALGORITHMS + ("auto",):
            self.succeed("delta", "in.h5", "-o", scan + ".h5", "--scan", scan, "--report", "r.json", "--quiet", ranks=4)
            self.succeed("verify", "in.h5", scan + ".h5", "--quiet")
            with open(self.at("r.json")) as f:
                report = json.load(f)
            self.assertIn(report["scan"], ALGORITHMS if scan == "auto" else (scan,))
            self.assertTrue(report["scan_choice"]["reason"])
            self.assertEqual([row["rank"] for row in report["trace"]], [0, 1, 2, 3])
            self.assertEqual(min(row["begins"] for row in report["trace"]), 0)
            for row in report["trace"]:
                self.assertLessEqual(row["begins"], row["scan_begins"])
                self.assertLessEqual(row["scan_begins"], row["state_is_here"])
                self.assertLessEqual(row["state_is_here"], row["outputs_done"])
            if scan == "auto":
                self.assertIn("alpha_us", report["scan_choice"]["costs"])
            with h5py.File(self.at(scan + ".h5")) as f:
                seen[scan] = f["o"][:].tobytes()
        for scan in ("alltoall", "allgather", "auto"):
            self.assertEqual(seen[scan] == seen["chain"], True, scan)

    def test_reproducible_bits_with_any_algorithm_and_ranks(self):
        self.succeed("generate", "delta", "-o", "in.h5", "--tokens", "5000", "--heads", "3", "--d-key", "8", "--d-value", "6",
                     "--dtype", "f32", "--force", "--quiet")
        seen = []
        for scan, ranks in (("auto", 1), ("chain", 4), ("alltoall", 4), ("allgather", 5), ("auto", 3)):
            self.succeed("delta", "in.h5", "-o", "o.h5", "--scan", scan, "--reproducible", "--force", "--quiet", ranks=ranks)
            with h5py.File(self.at("o.h5")) as f:
                seen.append(f["o"][:].tobytes() + f["final_state"][:].tobytes())
        self.assertEqual(len(set(seen)), 1)

    def test_the_trace_shows_who_forgets(self):
        self.succeed("generate", "delta", "-o", "in.h5", "--tokens", "8000", "--heads", "3", "--d-key", "8", "--d-value", "6",
                     "--decay", "head", "--dtype", "f32", "--force", "--quiet")
        for flag, middle in (((), 3), (("--reproducible",), 0)):
            self.succeed("delta", "in.h5", "-o", "o.h5", "--scan", "chain", *flag, "--report", "r.json", "--force", "--quiet", ranks=4)
            with open(self.at("r.json")) as f:
                report = json.load(f)
            # the first rank knows the state it starts from, the last one passes none on
            self.assertEqual([row["heads_passed_on_at_once"] for row in report["trace"]], [3, middle, middle, 0])
            self.assertEqual(report["checks"]["boundaries_forgotten"] > 0, not flag)

    def test_reproducible_refuses_composition(self):
        self.make_delta()
        self.succeed("generate", "newton", "-o", "x.h5", "--tokens", "100", "--cell", "paragru", "--hidden", "8", "--input", "4",
                     "--force", "--quiet")
        for scan in ("doubling", "mpi"):
            for words in (("delta", "in.h5"), ("newton", "x.h5")):
                message = self.fail_with(2, (*words, "-o", "o.h5", "--scan", scan, "--reproducible"), ranks=2)
                self.assertIn("--reproducible", message)
                self.assertIn("composes maps", message)

    def test_newton_by_every_algorithm(self):
        for cell in ("paragru", "paralstm", "gru"):
            self.succeed("generate", "newton", "-o", "x.h5", "--tokens", "400", "--cell", cell, "--hidden", "6", "--input", "4",
                         "--recurrent-scale", "0.5", "--dtype", "f64", "--force", "--quiet")
            for scan in ALGORITHMS:
                self.succeed("newton", "x.h5", "-o", "h.h5", "--method", "newton", "--scan", scan, "--report", "r.json", "--force",
                             "--quiet", ranks=3)
                self.succeed("verify", "x.h5", "h.h5", "--quiet")
                with open(self.at("r.json")) as f:
                    self.assertEqual(json.load(f)["scan"], scan)

    def test_nccl_where_there_is_none(self):
        self.make_delta()
        info = self.succeed("info")[0]
        if "NCCL      not built in" not in info:
            self.skipTest("this build has NCCL")
        _, err = self.succeed("delta", "in.h5", "-o", "o.h5", "--transport", "nccl", "--report", "r.json", ranks=2)
        notes = [line for line in err.splitlines() if "NCCL" in line or "nccl" in line]
        self.assertEqual(len(notes), 1, err)
        self.assertIn("this build has no NCCL; states travel by MPI", notes[0])
        with open(self.at("r.json")) as f:
            self.assertEqual(json.load(f)["transport"], "mpi")
        self.fail_with(2, ("delta", "in.h5", "-o", "p.h5", "--transport", "ncl"), "nccl")
        self.fail_with(2, ("delta", "in.h5", "-o", "p.h5", "--scan", "alltoal"), "alltoall")

    def test_bench_shows_model_and_measurement(self):
        for words, ranks in ((("--heads", "4", "--d-key", "16", "--d-value", "8"), 4),
                             (("--heads", "4", "--d-key", "16", "--d-value", "8", "--segments", "5"), 3),
                             (("--maps", "diagonal", "--hidden", "100"), 3), (("--maps", "block", "--hidden", "10"), 2),
                             (("--maps", "dense", "--hidden", "12", "--precision", "f64"), 3)):
            out, _ = self.succeed("bench", "scan", *words, "--runs", "3", "--json", ranks=ranks)
            rows = json.loads(out)
            expected = ALGORITHMS[:3] if "--segments" in words else ALGORITHMS
            self.assertEqual([row["algorithm"] for row in rows], list(expected))
            for row in rows:
                self.assertEqual(row["name"], "scan")
                self.assertGreater(row["median_ms"], 0)
                self.assertGreater(row["model_ms"], 0)
                self.assertGreater(row["floor_ms"], 0)
                self.assertLess(row["difference_from_chain"], 1e-5)
                if row["algorithm"] in ALGORITHMS[:3]:
                    self.assertEqual(row["difference_from_chain"], 0)
            self.assertEqual(sum(row["chosen_by_auto"] for row in rows), 1)
        table = self.succeed("bench", "scan", "--heads", "2", "--d-key", "8", "--d-value", "8", "--runs", "2", ranks=2)[0]
        self.assertIn("model ms", table)
        self.assertIn("<- auto", table)

    def test_the_model_of_the_script_is_that_of_the_program(self):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
        import model_scaling
        for words, ranks in ((("--heads", "5", "--d-key", "16", "--d-value", "8"), 4), (("--maps", "diagonal", "--hidden", "9"), 3)):
            for row in json.loads(self.succeed("bench", "scan", *words, "--runs", "1", "--json", ranks=ranks)[0]):
                seconds = model_scaling.scan_seconds(row["algorithm"], ranks, row["elements"], row["point_bytes"],
                                                     row["map_bytes"], row["segments"], model_scaling.costs_of(row))
                self.assertAlmostEqual(1e3 * seconds / row["model_ms"], 1, places=9, msg=row["algorithm"])

    def test_the_script_draws(self):
        if subprocess.run([sys.executable, "-c", "import matplotlib"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            self.skipTest("no matplotlib")
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "model_scaling.py")
        done = subprocess.run([sys.executable, "-B", script, "--tokens", "1048576", "-o", self.at("s.png")], check=True,
                              stdout=subprocess.PIPE, text=True)
        self.assertEqual(sum(line.split()[:1] == ["4096"] for line in done.stdout.splitlines()), 1, done.stdout)
        with open(self.at("s.png"), "rb") as f:
            self.assertEqual(f.read(4), b"\x89PNG")


if __name__ == "__main__":
    cli_test.main(__doc__)
