#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damaged input files: whatever their bytes, the program ends by itself with a code of its own and writes no output that
is not complete.

    tests/fuzz_reader.py --longscan build/apps/longscan [--seconds 30] [--seed 1] [--keep FOLDER]

Each round takes a good file, overwrites, cuts or repeats some of its bytes (most of them where HDF5 keeps its structure)
and runs a command on it. A file that makes the program crash or hang is kept if --keep names a folder.
"""
import argparse
import atexit
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

try:
    import h5py
    import numpy as np
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

# done, bad input, file I/O, not enough memory, numerical; never a crash (negative) or an internal error (1)
ALLOWED = {0, 3, 4, 5, 6}
TIMEOUT = 300


def good_files(longscan, folder):
    """(file, command words) of small valid inputs of several kinds."""
    delta, newton = os.path.join(folder, "delta.h5"), os.path.join(folder, "newton.h5")
    run = lambda *words: subprocess.run([longscan, "generate", *words, "--quiet"], check=True)
    run("delta", "-o", delta, "--tokens", "40", "--heads", "2", "--d-key", "4", "--d-value", "3", "--decay", "head")
    run("newton", "-o", newton, "--tokens", "40", "--cell", "gru", "--hidden", "3", "--input", "2")
    packed = os.path.join(folder, "packed.h5")
    with h5py.File(delta) as source, h5py.File(packed, "w") as f:
        for name in source:
            f.create_dataset("a/" + name, data=source[name][()], chunks=True, compression="gzip", shuffle=True)
        f["a/cu_seqlens"] = np.array([0, 10, 10, 40])
        f["b/x"] = np.float16(1)
    return [(delta, ["delta"]), (newton, ["newton"]), (packed, ["delta", "--group", "a"]), (delta, ["inspect"]),
            (newton, ["inspect"]), (packed, ["inspect"])]


def damage(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(min(len(data), 4096) if rng.random() < 0.7 else len(data))
        kind = rng.random()
        if kind < 0.4:
            data[at] = rng.randrange(256)
        elif kind < 0.6:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            n = rng.choice((2, 4, 8))
            data[at:at + n] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * n
        elif kind < 0.9:
            n = rng.randrange(1, 64)
            data[at:at + n] = data[at // 2:at // 2 + n]
        elif len(data) > 64:
            del data[rng.randrange(64, len(data)):]
    return bytes(data)


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--longscan", required=True)
    a.add_argument("--seconds", type=float, default=30)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--keep")
    words = a.parse_args()
    rng = random.Random(words.seed)
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_pml="ob1",
               OMPI_MCA_ess_singleton_isolated="1")
    env["OMPI_MCA_orte_tmpdir_base"] = tempfile.mkdtemp(prefix="longscan_mpi_")  # not shared with tests beside this one
    atexit.register(shutil.rmtree, env["OMPI_MCA_orte_tmpdir_base"], ignore_errors=True)
    codes, wrong, start = {}, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longscan_fuzz_") as folder:
        files = [(open(path, "rb").read(), command) for path, command in good_files(words.longscan, folder)]
        bad, out = os.path.join(folder, "in.h5"), os.path.join(folder, "out.h5")
        rounds = 0
        while time.monotonic() - start < words.seconds:
            data, command = files[rounds % len(files)]
            rounds += 1
            with open(bad, "wb") as f:
                f.write(damage(data, rng))
            line = [words.longscan, command[0], bad, *command[1:]]
            if command[0] != "inspect":
                line += ["-o", out, "--force", "--quiet"]
            try:
                p = subprocess.run(line, env=env, timeout=TIMEOUT, capture_output=True, text=True, errors="replace")
                code, said = p.returncode, p.stderr
            except subprocess.TimeoutExpired:
                code, said = "hang", ""
            codes[code] = codes.get(code, 0) + 1
            if code not in ALLOWED or (command[0] != "inspect" and (code == 0) != os.path.exists(out)):
                wrong += 1
                print(f"round {rounds}, {' '.join(command)}: {code}\n{said[-600:]}")
                if words.keep:
                    shutil.copy(bad, os.path.join(words.keep, f"{words.seed}-{rounds}-{command[0]}.h5"))
            for left in os.listdir(folder):
                if left.startswith("out.h5"):
                    if left != "out.h5" and code != "hang":
                        wrong += 1
                        print(f"round {rounds}: {left} was left behind")
                    os.remove(os.path.join(folder, left))
    print(f"{rounds} damaged files in {time.monotonic() - start:.0f} s, exit codes "
          + ", ".join(f"{c}: {n}" for c, n in sorted(codes.items(), key=str)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
