#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the numbers that README.md states, on this machine: accuracy of the delta rule against float64, speed on one
# and two ranks, the methods of `longscan newton`, the scan over ranks (the table as it stands there; wants a python3),
# and from file to file. Takes some minutes; wants an otherwise idle machine.
#   scripts/measure.sh [accuracy] [speed] [newton] [scan] [io]        (default: all five)
#   scripts/measure.sh pictures        makes examples/pictures again (wants python3-matplotlib and python3-h5py)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
longscan=$here/build/apps/longscan
[ -x "$longscan" ] || { echo "build first: scripts/build.sh" >&2; exit 2; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
what=${*:-accuracy speed newton scan io}

echo "machine: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(env -u OMP_NUM_THREADS nproc) cores; $(date +%F)"
"$longscan" info

if [[ $what == *accuracy* ]]; then
  echo
  echo "== accuracy: relative RMS difference from float64, T = 65536, H = 2, K = V = 128, unit keys"
  for type in f64 f32 f16 bf16; do
    for decay in none head channel; do
      "$longscan" generate delta -o "$work/in.h5" --tokens 65536 --heads 2 --d-key 128 --d-value 128 --decay "$decay" \
        --dtype "$type" --force --quiet
      "$longscan" delta "$work/in.h5" -o "$work/out.h5" --force --quiet
      echo "$type, decay $decay: $("$longscan" verify "$work/in.h5" "$work/out.h5" --sample 16 | grep outputs)"
    done
  done
fi

if [[ $what == *speed* ]]; then
  echo
  echo "== speed: one rank"
  for words in "" "--decay head" "--decay channel" "--reproducible" "--precision f64" "--precision bf16"; do
    # shellcheck disable=SC2086 # the words are options
    "$longscan" bench delta --tokens 65536 --heads 2 --runs 9 $words
  done
  echo
  echo "== speed: one and two ranks, the same tokens"
  for ranks in 1 2; do
    mpirun --oversubscribe -n "$ranks" "$longscan" bench delta --tokens 1048576 --heads 1 --runs 5
  done
fi

if [[ " $what " == *" io "* ]]; then
  echo
  echo "== file to file beside a copy of the same bytes and a solve in memory"
  for ranks in 1 2; do
    mpirun --oversubscribe -n "$ranks" "$longscan" bench io --tokens 524288 --heads 2 --folder "$work"
  done
fi

if [[ $what == *newton* ]]; then
  echo
  echo "== newton: recurrent weights of size 0.5, 1, 2, 4; auto and the full-trajectory methods beside the token loop"
  # cell, D, T, methods beside auto and the token loop
  while read -r cell hidden tokens methods; do
    for scale in 0.5 1 2 4; do
      # shellcheck disable=SC2086 # the methods are words
      "$longscan" bench newton --cell "$cell" --tokens "$tokens" --hidden "$hidden" --recurrent-scale "$scale" \
        --runs 3 --max-iterations 20 ${methods:+--method $methods}
    done
  done <<'ROWS'
paragru 64 16384 newton
paragru 1024 4096
gru 64 4096 newton
gru 256 4096
gru 1024 1024
ROWS
fi

if [[ $what == *scan* ]]; then
  echo
  echo "== scan: every algorithm, measured and by the model; more ranks than cores share them"
  for ranks in 2 4 8 16; do
    while read -r name words; do
      # shellcheck disable=SC2086 # the words are options
      timeout 120 mpirun --oversubscribe --bind-to none -n "$ranks" "$longscan" bench scan $words --json \
        < /dev/null > "$work/scan-$name-$ranks.json" ||
        { echo "longscan: $words on $ranks ranks did not end well" >&2; exit 1; }
    done << 'ROWS'
1 --heads 16 --d-key 128 --d-value 128
2 --heads 4 --d-key 64 --d-value 64
3 --heads 16 --d-key 128 --d-value 128 --segments 8
4 --maps diagonal --hidden 1024
5 --maps block --hidden 1024
6 --maps dense --hidden 128
ROWS
  done
  python3 "$here/scripts/scan_table.py" "$work"/scan-*.json
fi

if [[ $what == *pictures* ]]; then
  python=$(command -v /usr/bin/python3 || command -v python3)
  "$longscan" generate delta -o "$work/in.h5" --tokens 4096 --heads 4 --d-key 64 --d-value 64 --preset bursts --quiet
  "$longscan" inspect "$work/in.h5" --influence 9 -o "$work/influence.h5" > "$work/influence.txt"
  "$python" "$here/scripts/plot.py" influence "$work/influence.h5" -o "$here/examples/pictures/influence.png"
  "$longscan" generate newton -o "$work/n.h5" --tokens 4096 --cell gru --hidden 32 --input 16 --recurrent-scale 1.5 --quiet
  for method in newton quasi jacobi shooting; do
    "$longscan" newton "$work/n.h5" -o "$work/n-out.h5" --method $method --force --quiet --report "$work/$method.json"
  done
  "$python" "$here/scripts/plot.py" convergence "$work"/{newton,quasi,jacobi,shooting}.json \
    -o "$here/examples/pictures/convergence.png"
  ls -l "$here"/examples/pictures
fi
