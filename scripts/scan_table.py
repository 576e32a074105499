#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rows of `longscan bench scan --json` as a Markdown table: algorithm x ranks x size, measured and by the model.

    scan_table.py ROWS.json…

Files in the order of their names, numbers in them as numbers.
"""
import json
import re
import sys

ALGORITHMS = ("chain", "alltoall", "allgather", "doubling", "mpi")


def size_of(row):
    state = f"{row['elements']} heads, {row['n']} x {row['m']}"
    maps = {"delta": state, "diagonal": f"{row['elements']} numbers", "block": f"{row['elements']} blocks of {row['n']} x {row['n']}",
            "dense": f"one of {row['n']} x {row['n']}"}[row["maps"]]
    return maps + (f", {row['segments']} maps a rank" if row["segments"] > 1 else "")


def cell(row):
    if not row:
        return ""
    text = f"{row['median_ms']:.3g} / {row['model_ms']:.3g}"
    return f"**{text}**" if row["chosen_by_auto"] else text


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| maps | ranks | " + " | ".join(ALGORITHMS) + " |")
    print("|---" * (2 + len(ALGORITHMS)) + "|")
    for path in sorted(sys.argv[1:], key=lambda p: [int(n) for n in re.findall(r"\d+", p.rsplit("/", 1)[-1])]):
        with open(path) as f:
            rows = json.load(f)
        by_name = {row["algorithm"]: row for row in rows}
        print(f"| {size_of(rows[0])} | {rows[0]['ranks']} | " + " | ".join(cell(by_name.get(a)) for a in ALGORITHMS) + " |")
    print("\nMilliseconds, measured / by the model with the costs measured in the same run; bold: what auto takes.")


if __name__ == "__main__":
    main()
