#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/bench_gpu.sh [FOLDER]
# Times the delta rule on one GPU: every row of README's table, with the floor, the error against float64 arithmetic and
# the kernels used. Writes a JSON file a row into FOLDER if one is given. Wants an idle GPU; some minutes.
# LONGSCAN=PROGRAM takes another program than build/apps/longscan.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '3,6s/^# //p' "$0"
  exit
fi
longscan=${LONGSCAN:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/build/apps/longscan}
[[ -x $longscan ]] || { echo "build first: scripts/build.sh" >&2; exit 2; }
folder=${1:-}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
"$longscan" info

number=0
row() {
  number=$((number + 1))
  if [[ -n $folder ]]; then
    "$longscan" bench delta "$@" --json > "$folder/delta-$number.json"
    python3 - "$folder/delta-$number.json" << 'PY'
import json, sys
r = json.load(open(sys.argv[1]))[0]
print(f"T {r['tokens']:8d} H {r['heads']:2d} K {r['d_key']:3d} V {r['d_value']:3d} {r['dtype']:4s} {r['precision']:4s} "
      f"decay {r['decay']:7s} dims {r['key_dimensions']:3d} {'repr ' if r['reproducible'] else ''}"
      f"| {r['median_ms']:9.3f} ms ({r['min_ms']:.3f} to {r['max_ms']:.3f}), floor {r['floor_ms']:.3f}, "
      f"{r['gb_per_second']:.0f} GB/s, {r['gflops_per_rank'] / 1e3:.1f} TFLOP/s, maps {100 * r['map_tokens'] / r['tokens'] / r['heads']:.1f} %, "
      f"{r['kernel']}, error {r.get('error', float('nan')):.2e}")
PY
  else
    "$longscan" bench delta "$@"
  fi
}

half="--precision bf16 --runs 21 --check"
# shellcheck disable=SC2086 # the options are words
{
  row $half --tokens 1048576 --heads 16                         # keys that forget
  row $half --tokens 1048576 --heads 16 --key-dimensions 64     # keys that never do: full maps
  row $half --tokens 1048576 --heads 16 --reproducible
  row $half --tokens 1048576 --heads 16 --decay head
  row $half --tokens 1048576 --heads 4
  row $half --tokens 1048576 --heads 4 --key-dimensions 64
  row $half --tokens 1048576 --heads 4 --d-key 64 --d-value 64
  row $half --tokens 1048576 --heads 16 --dtype f16
  row $half --tokens 1048576 --heads 16 --decay channel
  row $half --tokens 524288 --heads 8 --d-value 256             # columns in tiles
  row $half --tokens 1048576 --heads 8 --d-key 256 --d-value 256 # channels in two parts
  row $half --tokens 1048576 --heads 8 --d-key 256 --d-value 256 --decay head
  row $half --tokens 1048576 --heads 8 --d-key 192 --d-value 192
  row $half --tokens 131072 --heads 8 --d-key 256 --d-value 256
  row --precision f32 --runs 5 --tokens 131072 --heads 16 --check
  row --precision f32 --runs 5 --tokens 131072 --heads 16 --decay head --check
  row --precision f64 --runs 3 --tokens 65536 --heads 16
}
