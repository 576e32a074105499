#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check_gpus.sh [RANKS]        (default 2: one rank per GPU)
# On a node with so many GPUs and a build for them, in some minutes: that one GPU, and several through NCCL and through
# MPI, give the same bits with --reproducible and the same answer without; how much faster they are; what the scan costs,
# for every algorithm and beside its model (rows for README.md where there is a python3). Ends with a line for each check
# and 1 if one failed.
# LONGSCAN names the program, TOKENS the length of what is timed, TRANSPORTS what carries the states ("nccl mpi"; "mpi"
# alone tries the script where there is no GPU), PARTS what is done ("bits scan speed model").
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
longscan=${LONGSCAN:-$here/build/apps/longscan}
ranks=${1:-2}
tokens=${TOKENS:-1048576}
read -ra transports <<< "${TRANSPORTS:-nccl mpi}"
parts=" ${PARTS:-bits scan speed model} "
[ -x "$longscan" ] || { echo "build first: scripts/build.sh" >&2; exit 2; }
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$here/scripts/lib.sh"
allow_mpi_anywhere
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
verdicts=()
SECONDS=0

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
on() { timeout -k 5 120 mpirun -n "$1" "$longscan" "${@:2}" < /dev/null; }  # stdin is the list of cases
# The last number after "KEY": in a file of JSON.
number() { sed -n "s/.*\"$1\": *\([-+0-9.eE]*\),*$/\1/p" "$2" | tail -1; }
# shellcheck disable=SC2317  # called by check
at_least() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a + 0 >= b + 0) }'; }
# shellcheck disable=SC2317
says() { grep -q "$1" "$2"; }
nccl() { [[ " ${transports[*]} " == *" nccl "* ]]; }
wanted() { [[ $parts == *" $1 "* ]]; }
part() { echo; echo "== $1 (after $SECONDS s)"; }

"$longscan" info
nvidia-smi --query-gpu=index,name --format=csv,noheader 2> /dev/null

# same_data A B BYTES: equal but for what is not surely among the BYTES of one dataset. The verdict of newton stands in
# attributes and depends on the ranks.
# shellcheck disable=SC2317
same_data() {
  local headers=$(($(stat -c %s "$1") - $3))
  [ "$headers" -ge 0 ] && [ "$(stat -c %s "$1")" = "$(stat -c %s "$2")" ] || return 1
  { cmp -l "$1" "$2" || true; } | awk -v m="$headers" -v n="$3" '$1 > m && $1 <= n { bad = 1 } END { exit bad }'
}

# solve_each NAME COMMAND [BYTES]: one rank and all of them through each transport, with and without --reproducible.
solve_each() {
  local name=$1 command=$2 bytes=${3:-} mode transport flag
  for mode in plain reproducible; do
    flag=()
    [ $mode = plain ] || flag=(--reproducible)
    check "$name, $mode: one GPU: solved" on 1 "$command" "$work/$name.h5" -o "$work/$name-1-$mode.h5" --force --quiet "${flag[@]}"
    for transport in "${transports[@]}"; do
      local out=$work/$name-$transport-$mode
      check "$name, $mode: $ranks through $transport: solved" on "$ranks" "$command" "$work/$name.h5" -o "$out.h5" \
        --force --quiet --transport "$transport" --report "$out.json" "${flag[@]}"
      check "$name, $mode: $ranks through $transport: it was" says "\"transport\": \"$transport\"" "$out.json"
      if [ $mode = reproducible ]; then
        check "$name: $ranks through $transport have the bits of one" same_data "$work/$name-1-$mode.h5" "$out.h5" \
          "${bytes:-$(stat -c %s "$out.h5")}"
      else
        check "$name, $mode: $ranks through $transport: verified" timeout -k 5 120 "$longscan" verify "$work/$name.h5" "$out.h5" \
          --sample 8 --quiet
      fi
    done
    check "$name, $mode: one GPU: verified" timeout -k 5 120 "$longscan" verify "$work/$name.h5" "$work/$name-1-$mode.h5" \
      --sample 8 --quiet
  done
}

python=$(command -v python3 || true)

check_bits() {
  part "the same bits and the same answer"
  # keys that forget, heads of another size than K; 16-bit inputs; a state that is never forgotten (T small); channel decay
  while read -r name words; do
    # shellcheck disable=SC2086 # the words are options
    "$longscan" generate delta -o "$work/$name.h5" $words --force --quiet
    solve_each "$name" delta
    report=$work/$name-${transports[0]}
    check "$name: none forgets with --reproducible" says '"boundaries_forgotten": 0' "$report-reproducible.json"
    echo "$name, ${transports[0]}: seconds of each rank"
    sed -n '/"trace"/,/\]/p' "$report-plain.json" | tr -d '\n {}[]' && echo
    grep -h '"staged"' "$work/$name"-*-plain.json | sort | uniq -c
  done << ROWS
forgets --tokens 32768 --heads 8 --d-key 64 --d-value 96 --dtype f32
bf16 --tokens 32768 --heads 4 --d-key 128 --d-value 128 --dtype bf16
remembers --tokens 2048 --heads 3 --d-key 128 --d-value 64 --dtype f32
gates --tokens 8192 --heads 8 --d-key 128 --d-value 128 --decay channel --dtype f32
ROWS
  for cell in paragru gru; do
    "$longscan" generate newton -o "$work/$cell.h5" --tokens 16384 --cell $cell --hidden 64 --input 32 --dtype f32 --force --quiet
    solve_each $cell newton $((16384 * 64 * 4))
  done
  # carries on the device, by every algorithm
  "$longscan" generate newton -o "$work/carries.h5" --tokens 4096 --cell paralstm --hidden 64 --input 32 --recurrent-scale 0.5 \
    --dtype f64 --force --quiet
  for scan in chain alltoall allgather doubling mpi; do
    check "newton's carries by $scan" on "$ranks" newton "$work/carries.h5" -o "$work/carries-$scan.h5" --method newton \
      --scan $scan --transport "${transports[0]}" --force --quiet
    check "newton's carries by $scan: verified" timeout -k 5 120 "$longscan" verify "$work/carries.h5" "$work/carries-$scan.h5" --quiet
  done

  if nccl; then
    part "ranks that share a GPU: MPI, and a line that says so"
    CUDA_VISIBLE_DEVICES=0 on 2 delta "$work/forgets.h5" -o "$work/shared.h5" --force --transport nccl 2> "$work/shared.log"
    check "two ranks on one GPU: solved" test -s "$work/shared.h5"
    check "two ranks on one GPU: one line" test "$(grep -c 'share a GPU' "$work/shared.log")" = 1
  fi
}

check_scan() {
  part "every algorithm of the scan"
  for transport in "${transports[@]}"; do
    i=0
    while read -r words; do
      i=$((i + 1))
      rows=$work/scan-$i-$transport.json
      # shellcheck disable=SC2086 # the words are options
      on "$ranks" bench scan --transport "$transport" $words --json > "$rows"
      check "bench scan, $transport $words" says '"algorithm": "chain"' "$rows"
      check "bench scan, $transport $words: the same bits by chain, alltoall, allgather" \
        test "$(grep -c '"difference_from_chain": 0.0,' "$rows")" -ge 3
    done << 'ROWS'
--heads 16 --d-key 128 --d-value 128
--heads 4 --d-key 64 --d-value 64
--heads 16 --d-key 128 --d-value 128 --segments 64
--maps diagonal --hidden 4096
--maps block --hidden 1024
--maps dense --hidden 512
ROWS
    echo "$transport:"
    if [ -n "$python" ]; then
      "$python" "$here/scripts/scan_table.py" "$work"/scan-*-"$transport".json
    else
      cat "$work"/scan-*-"$transport".json
    fi
  done
}

check_speed() {
  part "speed: T = $tokens, H = 16, K = V = 128, bf16"
  bench() { # RANKS TRANSPORT NAME WORDS…
    local json=$work/speed-$1-$2-$3.json
    on "$1" bench delta --tokens "$tokens" --heads 16 --d-key 128 --d-value 128 --precision bf16 --runs 11 --transport "$2" \
      --check --json "${@:4}" > "$json"
    printf '| %s | %d | %s | %.4g | %.3g | %.2g | %.3g |\n' "$3" "$1" "$2" "$(number median_ms "$json")" "$(number scan_ms "$json")" \
      "$(number scan_share "$json")" "$(number error "$json")"
}
echo "| keys | GPUs | transport | ms | scan, ms | its share | error |"
echo "|---|---|---|---|---|---|---|"
while read -r name words; do
  # shellcheck disable=SC2086 # the words are options
  bench 1 mpi "$name" $words
  for transport in "${transports[@]}"; do
    # shellcheck disable=SC2086
    bench "$ranks" "$transport" "$name" $words
  done
done << 'ROWS'
forgets
reproducible --reproducible
remembers --key-dimensions 64
ROWS
for name in forgets reproducible remembers; do
  for transport in "${transports[@]}"; do
    one=$work/speed-1-mpi-$name.json many=$work/speed-$ranks-$transport-$name.json
    factor=$(awk -v a="$(number median_ms "$one")" -v b="$(number median_ms "$many")" 'BEGIN { print (b > 0 ? a / b : 0) }')
    if [ $name = forgets ] && [ "$transport" = "${transports[0]}" ]; then
      check "$ranks GPUs are $factor times as fast as one (wanted: 0.95 a GPU)" at_least "$factor" "$(awk -v r="$ranks" 'BEGIN { print 0.95 * r }')"
      share=$(number scan_share "$many")
      check "the scan takes $share of the time (wanted: at most 0.02)" at_least 0.02 "$share"
    else
      verdicts+=("        $name, $transport: $factor times as fast as one")
    fi
  done
done
}

check_model() {
  if [ -n "$python" ]; then
    part "the model beside the measurement"
    "$python" "$here/scripts/model_scaling.py" --measure 1 "$ranks" --launch "mpirun -n" --longscan "$longscan" \
      --precision bf16 --measure-tokens "$tokens" --tokens "$tokens" --output ''
  fi
}

if wanted bits; then check_bits; fi
if wanted scan; then check_scan; fi
if wanted speed; then check_speed; fi
if wanted model; then check_model; fi

echo
printf '%s\n' "${verdicts[@]}"
echo "$SECONDS s"
exit $failed
