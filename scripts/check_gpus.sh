#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check_gpus.sh [RANKS]        (default 2: one rank per GPU)
# On a node with so many GPUs and a build for them: that one GPU, and several through NCCL and through MPI, give the same
# bits with --reproducible and the same answer without; how much faster they are; and what the scan costs.
# LONGSCAN names the program, TOKENS the length of what is timed. Ends with a line for each check and 1 if one failed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
longscan=${LONGSCAN:-$here/build/apps/longscan}
ranks=${1:-2}
tokens=${TOKENS:-1048576}
[ -x "$longscan" ] || { echo "build first: scripts/build.sh" >&2; exit 2; }
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$here/scripts/lib.sh"
allow_mpi_anywhere
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
verdicts=()

# check WHAT COMMAND…
check() {
  local what=$1
  shift
  if "$@"; then
    verdicts+=("ok      $what")
  else
    verdicts+=("FAILED  $what")
    failed=1
  fi
}
on() { timeout 300 mpirun -n "$1" "$longscan" "${@:2}" < /dev/null; }  # stdin is the list of cases
# The last number after "KEY": in a file of JSON.
number() { sed -n "s/.*\"$1\": *\([-+0-9.eE]*\),*$/\1/p" "$2" | tail -1; }
# shellcheck disable=SC2317  # called by check
at_least() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a >= b) }'; }
# shellcheck disable=SC2317
says() { grep -q "$1" "$2"; }

"$longscan" info
nvidia-smi --query-gpu=index,name --format=csv,noheader 2> /dev/null

echo "== the same bits and the same answer"
# keys that forget, packed heads of another size than K, float32 and bfloat16; and a state that is never forgotten (T small)
while read -r name words; do
  # shellcheck disable=SC2086 # the words are options
  "$longscan" generate delta -o "$work/$name.h5" $words --force --quiet
  for way in "1 mpi" "$ranks nccl" "$ranks mpi"; do
    read -r n transport <<< "$way"
    for mode in plain reproducible; do
      flag=()
      [ $mode = plain ] || flag=(--reproducible)
      out=$work/$name-$n-$transport-$mode
      check "$name: $n ranks, $transport, $mode: solved" on "$n" delta "$work/$name.h5" -o "$out.h5" --force --quiet \
        --transport "$transport" --report "$out.json" "${flag[@]}"
      check "$name: $n ranks, $transport, $mode: verified" on 1 verify "$work/$name.h5" "$out.h5" --sample 16 --quiet
    done
  done
  for transport in nccl mpi; do
    check "$name: $ranks ranks through $transport have the bits of one, --reproducible" \
      cmp -s "$work/$name-1-mpi-reproducible.h5" "$work/$name-$ranks-$transport-reproducible.h5"
  done
  check "$name: NCCL was used" says '"transport": "nccl"' "$work/$name-$ranks-nccl-plain.json"
  check "$name: none forgets with --reproducible" says '"boundaries_forgotten": 0' "$work/$name-$ranks-nccl-reproducible.json"
  sed -n '/"trace"/,/\]/p' "$work/$name-$ranks-nccl-plain.json"
done << ROWS
forgets --tokens 65536 --heads 8 --d-key 64 --d-value 96 --dtype f32
bf16 --tokens 65536 --heads 4 --d-key 128 --d-value 128 --dtype bf16
remembers --tokens 2048 --heads 3 --d-key 128 --d-value 64 --dtype f32
gates --tokens 40000 --heads 16 --d-key 128 --d-value 128 --decay channel --dtype f32
ROWS

echo "== every algorithm of the scan"
for transport in nccl mpi; do
  for words in "" "--segments 64" "--maps diagonal --hidden 4096" "--maps block --hidden 1024" "--maps dense --hidden 512"; do
    # shellcheck disable=SC2086 # the words are options
    check "bench scan, $transport $words" on "$ranks" bench scan --transport "$transport" $words
  done
done

echo "== ranks that share a GPU, and one rank: MPI, and a line that says so"
check "two ranks on one GPU: solved" env CUDA_VISIBLE_DEVICES=0 timeout 300 mpirun -n 2 "$longscan" delta "$work/forgets.h5" \
  -o "$work/shared.h5" --force --transport nccl 2> "$work/shared.log"
check "two ranks on one GPU: one line" says "share a GPU" "$work/shared.log"

echo "== speed: T = $tokens, H = 16, K = V = 128, bf16"
for way in "1 mpi" "$ranks nccl" "$ranks mpi"; do
  read -r n transport <<< "$way"
  for flag in "" --reproducible; do
    on "$n" bench delta --tokens "$tokens" --heads 16 --d-key 128 --d-value 128 --precision bf16 --runs 7 \
      --transport "$transport" $flag --json > "$work/speed-$n-$transport$flag.json"
    echo "$n ranks, $transport $flag: $(number median_ms "$work/speed-$n-$transport$flag.json") ms," \
      "scan $(number scan_ms "$work/speed-$n-$transport$flag.json") ms"
  done
done
for flag in "" --reproducible; do
  one=$(number median_ms "$work/speed-1-mpi$flag.json") many=$(number median_ms "$work/speed-$ranks-nccl$flag.json")
  factor=$(awk -v a="$one" -v b="$many" 'BEGIN { print (b > 0 ? a / b : 0) }')
  check "$ranks GPUs are $factor times as fast as one $flag (wanted: 0.95 a GPU)" at_least "$factor" "$(awk -v r="$ranks" 'BEGIN { print 0.95 * r }')"
done
check "the scan takes $(number scan_share "$work/speed-$ranks-nccl.json") of the time (wanted: at most 0.02)" \
  at_least 0.02 "$(number scan_share "$work/speed-$ranks-nccl.json")"

echo
printf '%s\n' "${verdicts[@]}"
exit $failed
