#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicted time of the delta rule on P = 1 … 4096 ranks (solve, scan, files), as a table and a picture.

  scripts/model_scaling.py [--costs FILE.json] [--solve-ns X] [--io-gbs X] [--tokens T …] [-o scaling.png]
  scripts/model_scaling.py --measure 1 2 4 8 [--longscan build/apps/longscan] -o scaling.png
  scripts/model_scaling.py --measure 1 2 --launch "mpirun -n" --precision bf16 --measure-tokens 1048576    (two GPUs)

Costs are those of a row of `longscan bench scan --json` (alpha, beta, apply, compose, launch) and the time of a token
and head of `longscan bench delta --json`. --measure runs both here, on each of the numbers of ranks, and puts what it
found beside the model: the check of the model. The formulas of the scan are those of src/dist/scan_model.cpp.
"""
import argparse
import json
import math
import os
import subprocess
import sys

SAME_BITS = ("chain", "alltoall", "allgather")


def scan_piece(count, point_bytes):
    return max(1, min(max(1, (256 << 10) // max(1, point_bytes)), (count + 7) // 8))


def scan_seconds(algorithm, p, n, point, map_, maps, c):
    """Seconds of the exclusive scan; c: alpha, beta, apply, compose, launch in seconds."""
    if p < 2 or n < 1:
        return 0.0
    steps = math.ceil(math.log2(p))
    compose = c["compose"] or c["apply"] * map_ / point
    before = c["alpha"] + n * point * c["beta"] + (0 if algorithm == "chain" else steps * c["alpha"])
    if p == 2:
        return before
    if algorithm == "chain":
        each = scan_piece(n, point)
        travel, work = c["alpha"] + each * point * c["beta"], c["launch"] + each * maps * c["apply"]
        return before + (p - 2) * (travel + work) + (math.ceil(n / each) - 1) * max(travel, work)
    if algorithm == "alltoall":
        mine = math.ceil(n / p)
        return (before + 2 * (p - 1) * c["alpha"] + (p - 2) * mine * (maps * map_ + point) * c["beta"] + c["launch"]
                + (p - 2) * mine * maps * c["apply"])
    if algorithm == "allgather":
        return (before + steps * c["alpha"] + (p - 2) * n * maps * map_ * c["beta"] + c["launch"]
                + (p - 2) * n * maps * c["apply"])
    if algorithm == "doubling":
        return before + (steps + 1) * (c["alpha"] + n * map_ * c["beta"]) + steps * (c["launch"] + n * compose)
    if algorithm == "mpi":
        return before + (p - 1) * (c["alpha"] + n * map_ * c["beta"]) + (p - 2) * n * compose
    raise ValueError(algorithm)


def choose(p, n, point, map_, maps, c, same_bits=False):
    """What --scan auto takes: doubling by nominal costs alone, else the best of the three with the same bits."""
    nominal = {"alpha": 2e-6, "beta": 1e-10, "apply": map_ * 1e-10 + 1e-7, "compose": 0, "launch": 0}
    best = lambda costs: min(SAME_BITS, key=lambda a: scan_seconds(a, p, n, point, map_, maps, costs))
    if p <= 2:
        return "chain"
    doubling = scan_seconds("doubling", p, n, point, map_, maps, nominal)
    if not same_bits and 2 * doubling < scan_seconds(best(nominal), p, n, point, map_, maps, nominal):
        return "doubling"
    return best(c)


class Problem:
    def __init__(self, o, tokens):
        self.tokens, self.heads, self.key, self.value, self.element = tokens, o.heads, o.d_key, o.d_value, o.element_bytes
        self.state_element = 8 if o.element_bytes == 8 else 4
        self.point = self.key * self.value * self.state_element
        self.map = self.key * (self.key + self.value) * self.state_element

    def file_bytes(self):
        return self.tokens * self.heads * (2 * self.key + 2 * self.value + 1) * self.element

    def solve_seconds(self, p, ns, map_factor):
        """The outputs of a rank's part; all ranks but the first also need the map of what their successor waits for."""
        part = self.tokens / p * self.heads * ns * 1e-9
        return part * (1 + (map_factor if p > 1 else 0))

    def factor_of(self, map_tokens):
        """What so many tokens of maps cost beside the outputs: a map has K columns more than a state."""
        return (1 + self.key / self.value) * map_tokens / (self.tokens * self.heads)


def table(problem, ranks, costs, o):
    rows = []
    for p in ranks:
        scans = {a: scan_seconds(a, p, problem.heads, problem.point, problem.map, 1, costs) for a in SAME_BITS + ("doubling",)}
        best = choose(p, problem.heads, problem.point, problem.map, 1, costs)
        solve = problem.solve_seconds(p, o.solve_ns, o.map_factor)
        files = problem.file_bytes() / (min(p * o.io_gbs, o.io_most_gbs) * 1e9)
        rows.append({"ranks": p, "solve": solve, "scan": scans[best], "algorithm": best, "scans": scans, "files": files,
                     "total": solve + scans[best] + files})
    return rows


def print_table(problem, rows):
    print(f"T = {problem.tokens:,}, H = {problem.heads}, K = {problem.key}, V = {problem.value}: seconds")
    print(f"{'P':>5} {'solve':>10} {'scan':>10} {'by':>9} {'files':>10} {'total':>10} {'scan share':>10} {'speed-up of solve + scan':>24}")
    base = rows[0]["solve"] + rows[0]["scan"]
    for r in rows:
        work = r["solve"] + r["scan"]
        print(f"{r['ranks']:>5} {r['solve']:>10.4g} {r['scan']:>10.3g} {r['algorithm']:>9} {r['files']:>10.4g} "
              f"{r['total']:>10.4g} {100 * r['scan'] / work:>9.1f}% {base / work:>24.1f}")


def run_json(o, ranks, *words):
    command = [*o.launch.split(), str(ranks), o.longscan, *words, "--json"]
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    return json.loads(out)


def costs_of(row):
    return {"alpha": row["alpha_us"] * 1e-6, "beta": row["beta_ns_per_byte"] * 1e-9, "apply": row["apply_us"] * 1e-6,
            "compose": row.get("compose_us", 0) * 1e-6, "launch": row.get("launch_us", 0) * 1e-6}


def measure(o):
    """Rows of bench scan and bench delta for each number of ranks."""
    sizes = ["--heads", str(o.heads), "--d-key", str(o.d_key), "--d-value", str(o.d_value)]
    found = {}
    for p in o.measure:
        scan = run_json(o, p, "bench", "scan", *sizes, "--runs", str(o.runs)) if p > 1 else []
        delta = run_json(o, p, "bench", "delta", *sizes, "--tokens", str(o.measure_tokens), "--precision", o.precision,
                         "--runs", "3")[0]
        found[p] = {"scan": scan, "delta": delta}
    return found


def print_check(found, o):
    cores = os.cpu_count()
    device = next(iter(found.values()))["delta"]["device"]
    on_host = not device.startswith("Cuda")
    where = f"{cores} cores; more ranks than cores share them" if on_host else f"{device}; one rank a GPU"
    print(f"\nmeasured here ({where}), H = {o.heads}, K = {o.d_key}, V = {o.d_value}")
    print(f"{'P':>4} {'algorithm':>10} {'measured ms':>12} {'model ms':>10} {'measured / model':>17}")
    for p, f in found.items():
        for row in f["scan"]:
            ratio = row["median_ms"] / max(row["model_ms"], 1e-9)
            auto = "  <- auto" if row["chosen_by_auto"] else ""
            print(f"{p:>4} {row['algorithm']:>10} {row['median_ms']:>12.4g} {row['model_ms']:>10.4g} {ratio:>17.2f}{auto}")
    problem = Problem(o, o.measure_tokens)
    base = found[min(found)]["delta"]
    base_p = min(min(found), cores) if on_host else min(found)
    alone = base["ns_per_token_head"] * base_p / (1 + problem.factor_of(base["map_tokens"]))
    print(f"\nthe whole solve, T = {o.measure_tokens:,}; model: {alone:.4g} ns a token and head, (1 + K/V) of that for one of a map, the scan")
    print(f"{'P':>4} {'measured ms':>12} {'model ms':>10} {'measured / model':>17} {'tokens in maps':>15} {'scan ms':>9} {'its share':>10}")
    for p, f in found.items():
        d = f["delta"]
        scan = next((row["model_ms"] for row in f["scan"] if row["chosen_by_auto"]), 0)
        factor = problem.factor_of(d["map_tokens"])
        model = 1e3 * problem.solve_seconds(min(p, cores) if on_host else p, alone, 0) * (1 + factor) + scan
        print(f"{p:>4} {d['median_ms']:>12.4g} {model:>10.4g} {d['median_ms'] / model:>17.2f} "
              f"{100 * d['map_tokens'] / (d['tokens'] * d['heads']):>14.1f}% {d['scan_ms']:>9.3g} {100 * d['scan_share']:>9.2f}%")


def picture(all_rows, found, path):
    if not path:
        return
    try:
        import matplotlib
    except ImportError:
        sys.exit("no matplotlib for " + sys.executable + ", so no picture; on Debian: apt-get install python3-matplotlib, and /usr/bin/python3")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(all_rows) + 1, figsize=(5.2 * (len(all_rows) + 1), 4.4), constrained_layout=True)
    for axis, (problem, rows) in zip(axes, all_rows):
        p = [r["ranks"] for r in rows]
        for what in ("solve", "scan", "files", "total"):
            axis.loglog(p, [r[what] or math.nan for r in rows], label=what, base=10, marker=".")
        axis.set_title(f"T = {problem.tokens:,}, H = {problem.heads}, K = {problem.key}, V = {problem.value}")
        axis.set_xlabel("ranks"), axis.set_ylabel("seconds (model)"), axis.grid(True, alpha=0.3), axis.legend()
    axis = axes[-1]
    problem, rows = all_rows[0]
    for i, a in enumerate(SAME_BITS + ("doubling",)):
        axis.loglog([r["ranks"] for r in rows if r["ranks"] > 1], [r["scans"][a] for r in rows if r["ranks"] > 1],
                    label=a, color=f"C{i}")
        points = [(p, row["median_ms"] * 1e-3) for p, f in (found or {}).items() for row in f["scan"] if row["algorithm"] == a]
        if points:
            axis.loglog(*zip(*points), "o", color=f"C{i}", mfc="none")
    axis.set_title("the scan: model (lines)" + (", measured (circles)" if found else ""))
    axis.set_xlabel("ranks"), axis.set_ylabel("seconds"), axis.grid(True, alpha=0.3), axis.legend()
    figure.savefig(path, dpi=110)
    print(f"\npicture: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 20, 1 << 26], metavar="T")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--d-key", type=int, default=128)
    parser.add_argument("--d-value", type=int, default=128)
    parser.add_argument("--element-bytes", type=int, default=2, help="of q, k, v, o in the file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2**i for i in range(13)])
    parser.add_argument("--costs", help="JSON of `longscan bench scan --json`; its first row's costs")
    parser.add_argument("--solve-ns", type=float, default=2400, help="nanoseconds a token and head for the outputs on one rank")
    parser.add_argument("--map-factor", type=float, default=0.5,
                        help="what the maps of a part cost beside its outputs (0: keys that forget, 2: full maps on a core)")
    parser.add_argument("--io-gbs", type=float, default=1.0, help="file bandwidth a rank, GB/s")
    parser.add_argument("--io-most-gbs", type=float, default=100.0, help="file bandwidth of all, GB/s")
    parser.add_argument("--measure", type=int, nargs="+", metavar="P", help="measure here on so many ranks and compare")
    parser.add_argument("--measure-tokens", type=int, default=32768, metavar="T", help="of the solves that are measured")
    parser.add_argument("--precision", default="f32", help="arithmetic of the solves that are measured (f64, f32, bf16)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--launch", default="mpirun --oversubscribe -n", help="command before the number of ranks")
    parser.add_argument("--longscan", default="build/apps/longscan")
    parser.add_argument("-o", "--output", default="scaling.png", help="the picture; '' for none")
    o = parser.parse_args()

    costs = {"alpha": 2e-6, "beta": 1e-10, "apply": 2e-4, "compose": 4e-4, "launch": 1e-6}
    found = None
    if o.measure:
        found = measure(o)
        with_scan = [f["scan"][0] for f in found.values() if f["scan"]]
        if with_scan:
            costs = costs_of(with_scan[0])
        if 1 in found:
            o.solve_ns = found[1]["delta"]["ns_per_token_head"]
    if o.costs:
        with open(o.costs) as f:
            costs = costs_of(json.load(f)[0])
    print("alpha {alpha:.3g} s, beta {beta:.3g} s a byte, apply {apply:.3g} s, compose {compose:.3g} s, launch {launch:.3g} s".format(**costs),
          f"\nsolve {o.solve_ns:.4g} ns per token and head, maps {o.map_factor:g} of that, files {o.io_gbs:g} GB/s per rank, {o.io_most_gbs:g} in all\n")
    all_rows = []
    for tokens in o.tokens:
        problem = Problem(o, tokens)
        rows = table(problem, o.ranks, costs, o)
        print_table(problem, rows)
        print()
        all_rows.append((problem, rows))
    if found:
        print_check(found, o)
    picture(all_rows, found, o.output)


if __name__ == "__main__":
    sys.exit(main())
