#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pictures of what longscan did, from its reports and outputs, as PNG or PDF (by the name of the output).

    plot.py convergence REPORT.json…  -o PICTURE   residual by pass of longscan newton
    plot.py influence INFLUENCE.h5    -o PICTURE   what tokens of a chunk do to each other (inspect --influence)
    plot.py states OUT.h5             -o PICTURE   size of the states along the tokens (delta --state-every N)
    plot.py phases REPORT.json        -o PICTURE   time by phase and rank
    plot.py trace REPORT.json         -o PICTURE   who waits for whom in the scan over ranks (delta, the last window)
    plot.py scaling REPORT.json…      -o PICTURE   time and speed-up by ranks, from reports of the same input

Reports are those of --report. Needs matplotlib, numpy and h5py (Debian: python3-matplotlib python3-h5py).
"""
import argparse
import json
import os
import sys

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
except ImportError as e:
    sys.exit(f"plot.py: {e}; on Debian: apt-get install python3-matplotlib python3-h5py")

# Okabe and Ito's colours, which all readers can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PHASES = dict(read="#56B4E9", solve="#0072B2", scan="#D55E00", write="#009E73", other="#DDDDDD")
plt.rcParams.update({
    "figure.dpi": 200, "savefig.dpi": 200, "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9,
    "legend.fontsize": 8, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=COLOURS), "lines.linewidth": 1.3, "figure.constrained_layout.use": True,
    "savefig.bbox": "tight", "savefig.pad_inches": 0.05})


def fail(text):
    sys.exit(f"plot.py: {text}")


def report_of(path):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError) as e:
        fail(f"{path} is not a report: {e}")


def open_hdf5(path):
    try:
        import h5py
        return h5py.File(path, "r")
    except (ImportError, OSError) as e:
        fail(f"cannot read {path}: {e}")


def label(report, path):
    n = report.get("newton", {})
    return f"{n['method_used']}, {n['status'].replace('_', ' ')}" if n else os.path.basename(path)


def convergence(a):
    fig, ax = plt.subplots(figsize=(4.2, 3))
    drawn = 0
    reports = {path: report_of(path) for path in a.files}
    labels = [label(r, path) for path, r in reports.items()]
    for i, (path, report) in enumerate(reports.items()):
        history = report.get("newton", {}).get("residual_history")
        if history is None:
            fail(f"{path} is a report of '{report.get('command')}'; convergence wants one of longscan newton")
        y = np.array([np.nan if x is None else x for x in history], float)
        if not len(y):
            continue
        drawn += 1
        floor = 1e-17  # where residuals are zero, so that they show at all
        stem = os.path.splitext(os.path.basename(path))[0]
        name = labels[i] if labels.count(labels[i]) == 1 else f"{stem}: {labels[i]}"
        ax.semilogy(np.arange(1, len(y) + 1), np.maximum(y, floor), "o-", ms=3.5, color=COLOURS[i % len(COLOURS)],
                    label=name)
        for x in np.flatnonzero(y == 0):
            ax.annotate("0", (x + 1, floor), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=7)
    if not drawn:
        fail("no report has a residual history (the token loop has none)")
    ax.set_xlabel("pass over the tokens")
    ax.set_ylabel("largest residual / RMS of h")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(True, which="major", alpha=0.25)
    ax.legend(loc="upper right")
    return fig


def influence(a):
    with open_hdf5(a.files[0]) as f:
        if "T" not in f:
            fail(f"{a.files[0]} has no dataset T; write one with: longscan inspect IN.h5 --influence CHUNK")
        heads, C = f["T"].shape[0], f["T"].shape[1]
        if not 0 <= a.head < heads:
            fail(f"--head {a.head}: there are {heads} heads")
        T, paths, left = f["T"][a.head], f["paths"][:, a.head], f["left_after"][a.head]
        M = f["output_map"][a.head] if "output_map" in f else None
        first, chunk = int(f.attrs["first_token"]), int(f.attrs["chunk"])
    maps = [("T − I: all paths", T - np.eye(C))] + [(f"paths of length {n + 1}", paths[n]) for n in range(min(2, len(paths)))]
    if M is not None:
        maps.append(("value to output", M))
    fig, axes = plt.subplots(1, len(maps) + 1, figsize=(2.05 * len(maps) + 2.4, 2.35),
                             gridspec_kw=dict(width_ratios=[1] * len(maps) + [1.1]))
    largest = max(np.abs(maps[0][1]).max(), 1e-12)
    extent = (first - 0.5, first + C - 0.5, first + C - 0.5, first - 0.5)
    for ax, (name, X) in zip(axes, maps):
        ax.set_box_aspect(1)
        own = name == "value to output"
        size = max(np.abs(X).max(), 1e-12) if own else largest
        shown = np.where(np.tril(np.ones((C, C))) > 0, X, np.nan)
        image = ax.imshow(shown, cmap="RdBu_r", vmin=-size, vmax=size, extent=extent, interpolation="nearest")
        ax.set_title(name)
        ax.set_xlabel("from token")
        ax.locator_params(nbins=3)
        if ax is not axes[0]:
            ax.set_yticklabels([])
        if own or ax is axes[len(maps) - (2 if M is not None else 1)]:
            fig.colorbar(image, ax=ax, fraction=0.05, pad=0.03).ax.tick_params(labelsize=7)
    axes[0].set_ylabel(f"to token (chunk {chunk}, head {a.head})")
    ax = axes[-1]
    left = left[:np.flatnonzero(left < 1e-16)[0] + 1] if (left < 1e-16).any() else left
    ax.semilogy(np.arange(1, len(left) + 1), np.maximum(left, 1e-17), "o-", ms=3)
    ax.set_box_aspect(1)
    ax.set_xlabel("terms of I + A + A² + …")
    ax.set_ylabel("left of T")
    ax.grid(True, alpha=0.25)
    return fig


def states(a):
    import h5py
    with open_hdf5(a.files[0]) as f:
        every = int(f.attrs.get("option_state_every", 0) or 0)
        found = []
        f.visititems(lambda n, d: found.append(n) if isinstance(d, h5py.Dataset) and n.split("/")[-1] == "states" else None)
        if not found or not every:
            fail(f"{a.files[0]} has no recorded states; solve with: longscan delta … --state-every N")
        S = f[found[0]][()].astype(float)
    if S.ndim == 5:
        S = S[0]  # the first batch entry
    norms = np.sqrt((S ** 2).sum(axis=(2, 3)))  # [records, heads]
    tokens = every * np.arange(1, len(norms) + 1)
    fig, ax = plt.subplots(figsize=(5, 2.8))
    if norms.shape[1] <= 6:
        for h in range(norms.shape[1]):
            ax.plot(tokens, norms[:, h], color=COLOURS[h], label=f"head {h}")
        ax.legend(ncol=3)
    else:
        ax.fill_between(tokens, norms.min(1), norms.max(1), alpha=0.2, lw=0, label="all heads")
        ax.plot(tokens, np.median(norms, 1), label="median head")
        ax.legend()
    ax.set_xlabel("token")
    ax.set_ylabel("Frobenius norm of the state")
    ax.set_ylim(bottom=0)
    ax.grid(True, alpha=0.25)
    return fig


def rank_axes(ranks):
    """For one bar a rank, the first on top."""
    fig, ax = plt.subplots(figsize=(5, 1.2 + 0.22 * min(len(ranks), 32)))
    ax.invert_yaxis()
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("rank")
    return fig, ax


def legend_below(ax, ranks, columns):
    ax.legend(ncol=columns, loc="upper center", bbox_to_anchor=(0.5, -0.28 if len(ranks) > 4 else -0.42),
              columnspacing=1)


def phases(a):
    report = report_of(a.files[0])
    if "seconds_by_rank" not in report:
        fail(f"{a.files[0]} has no seconds_by_rank; write it with --report")
    s = {k: np.array(v) for k, v in report["seconds_by_rank"].items()}
    parts = dict(read=s["read"], solve=np.maximum(s["solve"] - s["scan"], 0), scan=s["scan"], write=s["write"])
    parts["other"] = np.maximum(s["total"] - sum(parts.values()), 0)
    ranks = np.arange(len(s["total"]))
    fig, ax = rank_axes(ranks)
    start = np.zeros(len(ranks))
    for name, seconds in parts.items():
        ax.barh(ranks, seconds, left=start, color=PHASES[name], height=0.8,
                label="scan (waiting included)" if name == "scan" else name)
        start += seconds
    ax.set_xlabel("seconds")
    ax.set_title(f"longscan {report['command']}, {report['tokens']:,} tokens", loc="left")
    legend_below(ax, ranks, 5)
    return fig


def trace(a):
    report = report_of(a.files[0])
    rows = report.get("trace")
    if not rows:
        fail(f"{a.files[0]} has no trace; write it with longscan delta --report")
    at = {k: np.array([row[k] for row in rows]) for k in rows[0]}
    ranks = at["rank"]
    fig, ax = rank_axes(ranks)
    for name, start, end, colour in (("maps and states of its own", "begins", "scan_begins", PHASES["solve"]),
                                     ("scan (waiting included)", "scan_begins", "state_is_here", PHASES["scan"]),
                                     ("outputs", "state_is_here", "outputs_done", PHASES["write"])):
        ax.barh(ranks, at[end] - at[start], left=at[start], color=colour, height=0.8, label=name)
    for row in rows[:-1] if len(rows) <= 32 else []:
        ax.annotate(f" {row['heads_passed_on_at_once']}", (row["outputs_done"], row["rank"]), va="center", fontsize=7)
    ax.set_xlabel("seconds; behind the bars: heads whose state went on at once")
    ax.set_title(f"longscan delta, {report['tokens']:,} tokens, scan by {report['scan']}", loc="left")
    legend_below(ax, ranks, 3)
    return fig


def scaling(a):
    by_ranks = {}
    for path in a.files:
        r = report_of(path)
        by_ranks.setdefault(r["ranks"], []).append((r["seconds"]["solve"], r["seconds"]["total"]))
    if len(by_ranks) < 2:
        fail("scaling wants reports of at least two numbers of ranks")
    p = np.array(sorted(by_ranks))
    solve, total = np.array([np.median(by_ranks[n], axis=0) for n in p]).T
    fig, (left, right) = plt.subplots(1, 2, figsize=(6, 2.8))
    for values, name in ((solve, "solve"), (total, "whole command")):
        left.loglog(p, values, "o-", ms=4, label=name, base=2)
        right.plot(p, values[0] / values * p[0], "o-", ms=4, label=name)
    left.loglog(p, solve[0] * p[0] / p, ":", color="#888888", label="ideal", base=2)
    right.plot(p, p, ":", color="#888888", label="ideal")
    left.set_ylabel("seconds")
    left.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
    right.set_ylabel(f"speed-up over {p[0]} rank{'s' if p[0] > 1 else ''}, times {p[0]}" if p[0] > 1 else "speed-up over 1 rank")
    for ax in (left, right):
        ax.set_xlabel("ranks")
        ax.set_xticks(p)
        ax.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%d"))
        ax.grid(True, alpha=0.25)
    right.legend()
    return fig


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = dict(convergence=convergence, influence=influence, states=states, phases=phases, trace=trace, scaling=scaling)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="PICTURE")
    parser.add_argument("--head", type=int, default=0, help="of influence (default 0)")
    a = parser.parse_args()
    figure = kinds[a.kind](a)
    try:
        figure.savefig(a.output)
    except (OSError, ValueError) as e:
        fail(f"cannot write {a.output}: {e}")


if __name__ == "__main__":
    main()
