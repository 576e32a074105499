#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Times nonlinear recurrences on a GPU: one sequence, inputs projected and on the device, float32, beside the fused token
# loop; `auto` with its check on. A row is the median of the runs, none of which finds its inputs in a cache.
#   scripts/bench_gpu_newton.sh [rows] [hard] [crossover]        (default: all)
# LONGSCAN names the program (default: build/apps/longscan); RUNS the runs (default: 21).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
longscan=${LONGSCAN:-$here/build/apps/longscan}
[ -x "$longscan" ] || { echo "build first: scripts/build.sh with a CUDA Kokkos" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
runs=${RUNS:-21}
what=${*:-rows hard crossover}
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
if [[ $what == *crossover* ]]; then
  echo
  echo "== which way auto goes, by D, T and the size of the recurrent weights"
  for cell in paragru gru; do
    for hidden in 16 64 256; do
      for tokens in 256 1024 4096 65536; do
        for scale in 0.5 2; do
          bench --cell $cell --hidden $hidden --tokens $tokens --recurrent-scale $scale | grep -E "^(paragru|gru|sequential|auto)"
        done
      done
    done
  done
fi
