#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times nonlinear recurrences on a GPU: one sequence, inputs projected and on the device, float32, beside the fused token
# loop; `auto` with its check on. A row is the median of the runs, none of which finds its inputs in a cache.
#   scripts/bench_gpu_newton.sh [rows] [hard] [full] [crossover]        (default: all)
# crossover fails if auto is more than 10 % (and 10 us) slower than the better of shooting and the token loop.
# LONGSCAN names the program (default: build/apps/longscan); RUNS the runs (default: 21).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
longscan=${LONGSCAN:-$here/build/apps/longscan}
[ -x "$longscan" ] || { echo "build first: scripts/build.sh with a CUDA Kokkos" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
runs=${RUNS:-21}
what=${*:-rows hard full crossover}
bench() { "$longscan" bench newton --projected --runs "$runs" "$@" || echo "failed: $*"; }

"$longscan" info
if [[ $what == *rows* ]]; then
  echo
  echo "== the rows that are stated"
  bench --cell paragru --hidden 1024 --tokens 262144 --recurrent-scale 0.5
  bench --cell paragru --hidden 64 --tokens 262144 --recurrent-scale 0.5
  bench --cell paralstm --hidden 1024 --tokens 262144 --recurrent-scale 0.5
  bench --cell gru --hidden 64 --tokens 65536 --recurrent-scale 0.577
  for products in plain three tf32; do
    echo "-- products: $products"
    bench --cell gru --hidden 1024 --tokens 65536 --recurrent-scale 0.577 --products $products
  done
fi
if [[ $what == *hard* ]]; then
  echo
  echo "== harder ones, and float64"
  for scale in 1 2 3; do bench --cell paragru --hidden 1024 --tokens 262144 --recurrent-scale $scale; done
  bench --cell paragru --hidden 1024 --tokens 262144 --recurrent-scale 0.5 --precision f64
  for scale in 1 2; do bench --cell gru --hidden 64 --tokens 65536 --recurrent-scale $scale; done
  bench --cell lstm --hidden 64 --tokens 65536 --recurrent-scale 0.577
  bench --cell gru --hidden 128 --tokens 65536 --recurrent-scale 0.577
fi
if [[ $what == *full* ]]; then
  echo
  echo "== full-trajectory methods"
  for hidden in 64 1024; do
    bench --cell paragru --hidden $hidden --tokens 262144 --recurrent-scale 0.5 --method newton quasi
  done
  bench --cell paralstm --hidden 1024 --tokens 262144 --recurrent-scale 0.5 --method newton quasi
  for precision in f32 f64; do
    bench --cell gru --hidden 64 --tokens 65536 --recurrent-scale 0.577 --method newton quasi --precision $precision
  done
  bench --cell lstm --hidden 64 --tokens 65536 --recurrent-scale 0.577 --method newton quasi
fi
if [[ $what == *crossover* ]]; then
  echo
  echo "== which way auto goes, by D, T and the size of the recurrent weights: ms"
  printf '%-8s %5s %6s %6s  %-10s %9s %10s %9s %7s %s\n' cell D T scale "auto takes" auto sequential shooting passes ratio
  for cell in paragru gru; do  # a process for each D: most of its time is that of starting
    for hidden in 16 64 256 1024; do
      "$longscan" bench newton --projected --runs "$runs" --cell $cell --hidden $hidden --tokens 64 256 512 1024 4096 65536 \
        --recurrent-scale 0.5 2 --method shooting --json
    done
  done | python3 -c '
import itertools, json, sys
text, decoder, slow, tables = sys.stdin.read(), json.JSONDecoder(), 0, []
while text.strip():
    rows, end = decoder.raw_decode(text.lstrip())
    text = text.lstrip()[end:]
    key = lambda row: (row["cell"], row["hidden"], row["tokens"], row["recurrent_scale"])
    tables += [list(table) for _, table in itertools.groupby(rows, key)]
for rows in tables:
    r = {row["name"]: row for row in rows}
    auto, loop, shooting = (r[n]["median_ms"] for n in ("auto", "sequential", "shooting"))
    settled = r["shooting"]["status"] == "converged"
    best = min(loop, shooting) if settled else loop
    bad = auto > 1.1 * best and auto > best + 0.01
    slow += bad
    a = r["auto"]
    print("%-8s %5d %6d %6g  %-10s %9.4f %10.4f %9s %7d %5.2f%s" % (
        a["cell"], a["hidden"], a["tokens"], a["recurrent_scale"], a["method_used"], auto, loop,
        "%.4f" % shooting if settled else "-", a["iterations"], auto / best, "  <- slower" if bad else ""))
print("auto slower than the better one by more than 10 %%: %d" % slow)
sys.exit(slow > 0)'
fi
