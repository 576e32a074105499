#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/quickstart.sh
# From a bare Debian 12 machine to a solved sequence: installs what is missing, builds, generates a sequence, solves it
# on two ranks and verifies the result. Leaves its files in quickstart/.
set -euo pipefail
export LC_ALL=C.UTF-8
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '3,5s/^# //p' "$0"
  exit
fi
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

out=$root/quickstart
longscan=$build/apps/longscan
mpirun=(mpirun)
if ((EUID == 0)); then mpirun+=(--allow-run-as-root); fi
if (($(cores) < 2)); then mpirun+=(--oversubscribe); fi
steps=5
step=0
mkdir -p "$out"
echo '*' > "$out/.gitignore"

ticker=
trap '[[ -z $ticker ]] || kill "$ticker" 2> /dev/null || true' EXIT

# run WHAT COMMAND…: one line for the reader; what the command prints goes to a log and is shown if it fails.
run() {
  local what=$1 log began status=0
  shift
  step=$((step + 1))
  log=$out/step$step.log
  began=$EPOCHREALTIME
  printf '%s/%s  %s … ' "$step" "$steps" "$what"
  # Seconds tick on a terminal, except where sudo may ask for a password.
  if [[ -t 1 ]] && ((EUID == 0 || step > 1)); then
    while sleep 1; do
      printf '\r%s/%s  %s … %s s ' "$step" "$steps" "$what" "$((EPOCHSECONDS - ${began%.*}))"
    done &
    ticker=$!
  fi
  ("$@") > "$log" 2>&1 || status=$?
  if [[ -n $ticker ]]; then
    kill "$ticker"
    wait "$ticker" 2> /dev/null || true
    ticker=
    printf '\r%s/%s  %s … ' "$step" "$steps" "$what"
  fi
  if ((status)); then
    printf 'failed (exit code %s)\n\n' "$status"
    tail -n 30 "$log" >&2
    printf '\nAll of it: %s\n' "$log" >&2
    exit "$status"
  fi
  awk -v a="$began" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s  \n", b - a }'
}

allow_mpi_anywhere
run "Installing what is missing" need_build_packages
run "Building (minutes the first time, seconds later)" "$root/scripts/build.sh"
rm -f "$out/in.h5" "$out/out.h5" "$out/report.json"
run "Generating 65,536 tokens, 4 heads of 64 x 64" \
  "$longscan" generate delta -o "$out/in.h5" --tokens 65536 --heads 4 --d-key 64 --d-value 64 --dtype f32 --seed 1
run "Solving on 2 ranks" "${mpirun[@]}" -n 2 "$longscan" delta "$out/in.h5" -o "$out/out.h5" --report "$out/report.json" \
  --force
run "Verifying, token by token in float64" "$longscan" verify "$out/in.h5" "$out/out.h5"

echo
sed 's/^/  /' "$out/step4.log" "$out/step5.log"
cat << END

What solved it, in $root:
  ${mpirun[*]} -n 2 build/apps/longscan delta quickstart/in.h5 -o quickstart/out.h5 --report quickstart/report.json --force
In quickstart/:
  in.h5        the input: q, k, v, beta
  out.h5       the result: o, final_state (h5py reads it)
  report.json  times, ranks, traffic
More: build/apps/longscan --help, and README.md
END
