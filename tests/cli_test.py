#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line, from files to files: exit codes, messages, what is left behind, and answers.

    cli_test.py --longscan build/apps/longscan [--only CLASS[.TEST]…] --launch mpirun --oversubscribe -n

Everything after --launch starts a job; the number of ranks follows it. One rank runs without it.
"""
import argparse
import atexit
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import h5py
    import numpy as np
except ImportError as e:
    print(f"skipped: {e}; on Debian: apt-get install python3-h5py")
    sys.exit(77)

LONGSCAN, MOMENT, LAUNCH = "longscan", "", ["mpirun", "-n"]
TIMEOUT = 300  # seconds; a job that takes longer hangs
SESSIONS = tempfile.mkdtemp(prefix="longscan_mpi_")  # Open MPI's own: tests side by side would remove each other's
atexit.register(shutil.rmtree, SESSIONS, ignore_errors=True)
USAGE, BAD_INPUT, FILE_IO, RESOURCES, NUMERICAL = 2, 3, 4, 5, 6
REPORT_FIELDS = ("version command options ranks devices transport scan precision tokens sequences seconds "
                 "tokens_per_second bytes peak_memory_bytes checks").split()


def contents(path):
    with open(path, "rb") as f:
        return f.read()


def reference(q, k, v, beta, eta=None, log_decay=None, initial_state=None, scale=1.0):
    """S_t = S_{t-1} D_t (I - beta k k^T) + eta v k^T, o_t = scale S_t q_t, with matrices as the equation has them."""
    T, H, K = k.shape
    q, k, v, beta = (np.asarray(x, np.float64) for x in (q, k, v, beta))
    eta = beta if eta is None else eta
    S = np.zeros((H, v.shape[2], K)) if initial_state is None else np.array(initial_state, np.float64)
    o, states = np.zeros(v.shape), []
    for t in range(T):
        for h in range(H):
            decay = np.eye(K) if log_decay is None else np.diag(np.exp(log_decay[t, h]) * np.ones(K))
            S[h] = S[h] @ decay @ (np.eye(K) - beta[t, h] * np.outer(k[t, h], k[t, h]))
            S[h] += eta[t, h] * np.outer(v[t, h], k[t, h])
            o[t, h] = scale * S[h] @ q[t, h]
        states.append(S.copy())
    return o, S, states


def numbers(tokens=64, heads=2, d_key=8, d_value=8, seed=1, dtype=np.float64):
    r = np.random.default_rng(seed)
    q, k = r.normal(size=(2, tokens, heads, d_key))
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = r.normal(size=(tokens, heads, d_value)), r.uniform(size=(tokens, heads))
    return {n: a.astype(dtype) for n, a in dict(q=q, k=k, v=v, beta=beta).items()}


def resize(path, name, axis, size):
    """Cuts or repeats a dataset; its shapes before and after."""
    with h5py.File(path, "a") as f:
        data = f[name][()]
        shape = list(data.shape)
        shape[axis] = size
        del f[name]
        f[name] = np.resize(data, shape)
    return list(data.shape), shape


class Command(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="longscan_cli_")
        self.addCleanup(shutil.rmtree, self.folder)

    def at(self, name):
        return os.path.join(self.folder, name)

    def write(self, name="in.h5", groups=None, **datasets):
        with h5py.File(self.at(name), "w") as f:
            for group, content in (groups or {"/": datasets}).items():
                for n, a in content.items():
                    f.create_dataset(f"{group}/{n}", data=a)
        return self.at(name)

    def run_longscan(self, *words, ranks=1, limit=None, folder=None, resource_of_limit=resource.RLIMIT_AS):
        """Exit code, stdout, stderr."""
        env = dict(os.environ, TERM="xterm", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_pml="ob1", OMPI_MCA_ess_singleton_isolated="1",  # starts a fraction of a second earlier
                   OMPI_MCA_orte_tmpdir_base=SESSIONS)
        start = [*LAUNCH, str(ranks)] if ranks > 1 else []
        set_limit = limit and (lambda: resource.setrlimit(resource_of_limit, (limit, limit)))
        p = subprocess.run([*start, LONGSCAN, *map(str, words)], env=env, timeout=TIMEOUT, capture_output=True,
                           text=True,
                           preexec_fn=set_limit, cwd=folder or self.folder)
        return p.returncode, p.stdout, p.stderr

    def succeed(self, *words, ranks=1):
        code, out, err = self.run_longscan(*words, ranks=ranks)
        self.assertEqual(code, 0, err)
        return out, err

    def fail_with(self, expected, words, *texts, ranks=1, **kw):
        """The command ends with this code and one message that has these texts, and leaves no new file."""
        before = sorted(os.listdir(self.folder))
        code, out, err = self.run_longscan(*words, ranks=ranks, **kw)
        self.assertEqual(code, expected, err)
        self.assertEqual(out, "")
        messages = [line for line in err.splitlines()
                    if line.startswith("longscan: ") and not line.startswith("longscan: note: ")]
        started = [m for m in messages if f" on {ranks} rank" in m]  # "delta, 64 tokens in … on 3 ranks (Serial)"
        self.assertEqual(len(messages) - len(started), 1, err)
        for text in texts:
            self.assertIn(text, err)
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return err

    def delta(self, path, *words, ranks=1):
        """Solves, verifies, and returns all datasets of the output."""
        out = self.at("out.h5")
        self.succeed("delta", path, "-o", out, "--force", *words, ranks=ranks)
        self.succeed("verify", path, out)
        found = {}
        with h5py.File(out) as f:
            f.visititems(lambda n, d: found.update({n: d[()]}) if isinstance(d, h5py.Dataset) else None)
        return found

    def close(self, got, expected, tolerance=1e-10):
        self.assertEqual(got.shape, expected.shape)
        worst = np.max(np.abs(np.float64(got) - expected), initial=0)
        self.assertLessEqual(worst, tolerance * max(np.sqrt(np.mean(expected**2)), 1e-300) if expected.size else 0)


class BadInput(Command):
    """Exit 3 on one and three ranks, with the file, the dataset, and the place where there is one."""

    def refuse(self, *texts, words=(), group=None, **changes):
        data = numbers()
        for name, a in changes.items():
            if a is None:
                data.pop(name)
            else:
                data[name] = a
        path = self.write(groups=group or {"/": data})
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.fail_with(BAD_INPUT, ("delta", path, "-o", self.at("out.h5"), *words), path, *texts, ranks=ranks)

    def test_dataset_missing(self):
        self.refuse("no dataset 'k'", "There are: beta q v", k=None)

    def test_lengths_differ(self):
        self.refuse("'/v' has 61", "64 tokens", v=numbers()["v"][:-3])

    def test_heads_differ(self):
        self.refuse("'/beta' has 3 heads", "'/v' has 2", beta=np.ones((64, 3)))

    def test_heads_do_not_divide(self):
        self.refuse("'/k' has 3 heads", "divide", k=np.ones((64, 3, 8)))

    def test_key_sizes_differ(self):
        self.refuse("'/q' has 5 key channels", "'/k' has 8", q=numbers()["q"][..., :5])

    def test_nan(self):
        v = numbers()["v"]
        v[37, 1, 3] = np.nan
        self.refuse("'/v'", "token 37, head 1", "NaN", v=v)

    def test_first_of_several_nans(self):
        v, beta = numbers()["v"], numbers()["beta"]
        v[[12, 13, 60], 1, 3] = np.nan
        v[12, 1, 5] = beta[50, 0] = np.nan
        self.refuse("'/v'", "token 12, head 1", v=v, beta=beta)

    def test_infinity(self):
        beta = numbers()["beta"]
        beta[12, 0] = np.inf
        self.refuse("'/beta'", "token 12, head 0", "infinite", beta=beta)

    def test_nan_in_every_type_and_window(self):
        for dtype in (np.float32, np.float16):
            k = numbers(dtype=dtype)["k"]
            k[63, 1, 7] = np.nan
            self.refuse("'/k'", "token 63, head 1", k=k, words=("--window", "7"))

    def test_nan_in_the_initial_state(self):
        s = np.zeros((2, 8, 8))
        s[1, 2, 3] = np.nan
        self.refuse("'/initial_state'", "head 1", initial_state=s)

    def test_offsets_fall(self):
        self.refuse("'/cu_seqlens' decreases at entry 2", cu_seqlens=np.array([0, 40, 20, 64]))

    def test_offsets_end_early(self):
        self.refuse("'/cu_seqlens' ends at 60", "64 tokens", cu_seqlens=np.array([0, 20, 60]))

    def test_offsets_start_late(self):
        self.refuse("'/cu_seqlens'", "starts with 0", cu_seqlens=np.array([1, 20, 64]))

    def test_offsets_are_no_integers(self):
        self.refuse("'/cu_seqlens' must hold integers", cu_seqlens=np.array([0.0, 64.0]))

    def test_positive_log_decay(self):
        g = -np.abs(numbers()["beta"])
        g[5, 1] = 0.25
        self.refuse("'/log_decay'", "token 5, head 1", "0.25", "linear gate", log_decay=g)

    def test_nan_in_log_decay(self):
        g = np.full((64, 2, 8), -np.inf)
        g[33, 0, 2] = np.nan
        self.refuse("'/log_decay'", "token 33, head 0", log_decay=g)

    def test_integers(self):
        self.refuse("'/q' holds 32-bit integers", q=np.ones((64, 2, 8), np.int32))

    def test_unmarked_uint16(self):
        self.refuse("'/q'", "bfloat16", q=np.ones((64, 2, 8), np.uint16))

    def test_text(self):
        self.refuse("'/beta' holds text", beta=np.array([b"x"] * 64))

    def test_axes(self):
        self.refuse("'/q'", "axes", q=numbers()["q"][:, 0])
        self.refuse("'/v'", "axes", v=numbers()["v"][:, 0])

    def test_state_shape(self):
        self.refuse("'/initial_state'", "[2, 8, 9]", "[2, 8, 8]", initial_state=np.zeros((2, 8, 9)))

    def test_layout_does_not_fit(self):
        self.refuse("'/v'", "BHTD", words=("--layout", "BHTD"))

    def test_several_problems_at_once(self):
        self.refuse("'/q' has 5 key channels", "'/beta' has 3 heads", q=numbers()["q"][..., :5], beta=np.ones((64, 3)))

    def test_filter_missing(self):
        data = numbers()
        path = self.write(**{n: data[n] for n in ("q", "k", "beta")})
        with h5py.File(path, "a") as f:
            f.create_dataset("v", data=np.zeros((64, 2, 8)), chunks=(16, 2, 8), compression="lzf")
        for ranks in (1, 3):
            self.fail_with(BAD_INPUT, ("delta", path, "-o", self.at("out.h5")), path, "'/v'", "lzf", ranks=ranks)

    def test_no_hdf5_and_half_a_file(self):
        with open(self.at("text.h5"), "w") as f:
            f.write("not an HDF5 file at all\n" * 50)
        path = self.write("half.h5", **numbers())
        with open(path, "r+b") as f:
            f.truncate(os.path.getsize(path) // 2)
        for name in ("text.h5", "half.h5"):
            for ranks in (1, 3):
                self.fail_with(BAD_INPUT, ("delta", self.at(name), "-o", self.at("out.h5")), self.at(name), ranks=ranks)

    def test_groups_in_brackets(self):
        """As words of the command line and in a file of options."""
        path = self.write(groups={f"/{n}": numbers() for n in "abx"})
        files = []
        for line in ('group = "[ab]"', "group = [ab]", "group = [ab]*", 'group = ["a", "b"]', "group = [a, b]",
                     "group = [ab] # both", "delta.group = [!x]", "group=[ab] ; both"):
            files.append(("--config", self.at(f"c{len(files)}.conf")))
            with open(files[-1][1], "w") as f:
                f.write(f"chunk = 32\n{line}\nwindow = 16\n")
        for words in (("--group", "[ab]"), ("--group=[ab]",), ("--group", "b", "[a]"), *files):
            self.succeed("delta", path, "-o", self.at("out.h5"), "--force", *words)
            with h5py.File(self.at("out.h5")) as f:
                self.assertEqual(sorted(f), ["a", "b"], words)

    def test_groups_that_match_nothing(self):
        self.refuse("--group /demo_*", words=("--group", "/demo_*"))
        self.refuse("--group /nowhere", words=("--group", "/nowhere"))

    def test_bad_group_is_named_in_natural_order(self):
        groups = {f"/demo_{i}": numbers(tokens=10, seed=i) for i in (1, 2, 10)}
        for i, token in ((10, 0), (2, 7)):  # demo_2 is solved before demo_10
            groups[f"/demo_{i}"]["v"][token, 1, 0] = np.nan
        self.refuse("'/demo_2/v'", "token 7, head 1", words=("--group", "/demo_*"), group=groups)

    def test_overflow(self):
        # doubles from 0.6 of the largest float32 over 2^20: finite after token 19, not after token 20
        data = {n: a.astype(np.float32) for n, a in numbers(heads=1).items()}
        data["k"][:] = np.eye(8)[2]
        data["q"][:] = 1
        data["beta"][:] = 3
        state = np.zeros((1, 8, 8), np.float32)
        state[..., 2] = np.float32(0.6 * np.finfo(np.float32).max / 2**20)
        path = self.write(**data, eta=np.zeros((64, 1), np.float32), initial_state=state)
        for words in ((), ("--state-only",), ("--reproducible",), ("--reproducible", "--state-only")):
            for ranks in (1, 3):
                with self.subTest(words=words, ranks=ranks):
                    self.fail_with(NUMERICAL, ("delta", path, "-o", self.at("out.h5"), *words), path, "float32",
                                   "token 20, head 0", ranks=ranks)


    def test_output_type_overflows(self):
        """The sums reach 9e4 in head 1 at token 22, and later in head 0: float16 ends at 65504."""
        def sums(dtype, v, heads_first=False):
            q = np.zeros((40, 2, 4), dtype)
            q[:, :, 0] = 1
            values = np.zeros((40, 2, 4), dtype)
            values[20:, 1, 2] = values[30:, 0, 1] = v
            data = dict(q=q, k=q, v=values, beta=np.zeros((40, 2), dtype), eta=np.ones((40, 2), dtype))
            return self.write(**{n: a[None].swapaxes(1, 2) if heads_first else a for n, a in data.items()})

        out = self.at("out.h5")
        for words, dtype, v, heads_first, told in (
                ((), np.float16, 3e4, False, ("f16", "--output-dtype f32")),
                (("--window", 8), np.float16, 3e4, False, ("f16", "--output-dtype f32")),
                (("--layout", "BHTD"), np.float16, 3e4, True, ("f16", "--output-dtype f32")),
                (("--output-dtype", "f16"), np.float32, 3e4, False, ("f16", "--output-dtype f32")),
                (("--output-dtype", "f32"), np.float64, 1.5e38, False, ("f32", "--output-dtype f64"))):
            path = sums(dtype, v, heads_first)
            for ranks in (1, 3):
                with self.subTest(words=words, ranks=ranks):
                    self.fail_with(NUMERICAL, ("delta", path, "-o", out, *words), "'/o' overflows", "token 22",
                                   "head 1, channel 2", *told, ranks=ranks)
        self.succeed("delta", sums(np.float16, 3e4), "-o", out, "--output-dtype", "f32", ranks=3)
        with h5py.File(out) as f:
            self.assertEqual(f["o"][-1, 1, 2], 6e5)


class Files(Command):
    """Where files cannot be opened, made or written; memory that is not there."""

    def setUp(self):
        super().setUp()
        self.input = self.write(**numbers())
        self.out = self.at("out.h5")

    def test_input_missing(self):
        for ranks in (1, 3):
            self.fail_with(FILE_IO, ("delta", self.at("none.h5"), "-o", self.out), self.at("none.h5"), ranks=ranks)
        self.fail_with(FILE_IO, ("delta", self.folder, "-o", self.out), self.folder)
        self.fail_with(FILE_IO, ("verify", self.input, self.at("none.h5")), self.at("none.h5"))

    def test_output_exists(self):
        with open(self.out, "w") as f:
            f.write("precious")
        for ranks in (1, 3):
            self.fail_with(USAGE, ("delta", self.input, "-o", self.out), self.out, "--force", ranks=ranks)
        self.fail_with(USAGE, ("generate", "delta", "-o", self.out, "--tokens", "8"), self.out, "--force")
        self.assertEqual(contents(self.out), b"precious")
        self.succeed("delta", self.input, "-o", self.out, "--force", ranks=3)
        self.succeed("verify", self.input, self.out)
        self.succeed("generate", "delta", "-o", self.out, "--tokens", "8", "--force")

    def test_output_stays_when_a_solve_fails(self):
        self.succeed("delta", self.input, "-o", self.out)
        before = contents(self.out)
        bad = numbers()
        bad["v"][60, 0, 0] = np.nan
        path = self.write("bad.h5", **bad)
        self.fail_with(BAD_INPUT, ("delta", path, "-o", self.out, "--force", "--window", "10"), "token 60", ranks=3)
        self.assertEqual(contents(self.out), before)

    def test_output_is_the_input(self):
        before = contents(self.input)
        os.symlink(self.input, self.at("link.h5"))
        for out in (self.input, os.path.join(self.folder, ".", "in.h5"), self.at("link.h5")):
            self.fail_with(USAGE, ("delta", self.input, "-o", out, "--force"), "is the input", ranks=3)
        self.assertEqual(contents(self.input), before)

    def test_output_folder(self):
        for ranks in (1, 3):
            self.fail_with(FILE_IO, ("delta", self.input, "-o", self.at("none/out.h5")), self.at("none"), ranks=ranks)
            self.fail_with(FILE_IO, ("delta", self.input, "-o", self.at("in.h5/out.h5")), self.at("in.h5"), ranks=ranks)
        self.fail_with(USAGE, ("delta", self.input, "-o", self.folder), "directory")
        if os.geteuid() == 0:
            print("a folder without write permission is not tried: root may write anywhere")
        else:
            os.mkdir(self.at("closed"), 0o500)
            self.fail_with(FILE_IO, ("delta", self.input, "-o", self.at("closed/out.h5")), self.at("closed"))

    def test_special_files(self):
        os.mkfifo(self.at("pipe"))
        for ranks in (1, 3):
            self.fail_with(FILE_IO, ("delta", self.at("pipe"), "-o", self.out), "not a regular file", ranks=ranks)
            self.fail_with(USAGE, ("delta", self.input, "-o", self.at("pipe"), "--force"), "not a regular file",
                           ranks=ranks)
        self.fail_with(USAGE, ("generate", "delta", "-o", self.at("pipe"), "--force"), "not a regular file")
        self.fail_with(USAGE, ("delta", self.input, "-o", self.out, "--checkpoint", self.at("pipe")), "not a regular file")
        self.fail_with(USAGE, ("delta", self.input, "-o", ""), "empty")
        out, _ = self.succeed("delta", self.input, "-o", self.out, "--report", "/dev/stdout")
        self.assertEqual(json.loads(out)["tokens"], 64)

    def test_report_and_checkpoint_are_looked_at_first(self):
        """Nothing is computed for a report or checkpoint that cannot be left; neither replaces another file."""
        before = contents(self.input)
        solve = ("delta", self.input, "-o", self.out)
        for option in ("--report", "--checkpoint"):
            for ranks in (1, 3):
                self.fail_with(FILE_IO, (*solve, option, self.at("none/file")), self.at("none/file"), ranks=ranks)
            self.fail_with(USAGE, (*solve, option, self.folder), self.folder)
            for other in (self.input, os.path.join(self.folder, ".", "in.h5")):
                self.fail_with(USAGE, (*solve, option, other, "--force"), "is the input", ranks=3)
            self.fail_with(USAGE, (*solve, option, self.out), "the output")
        self.assertEqual(contents(self.input), before)

    def test_disk_full(self):
        small = self.at("small")
        os.mkdir(small)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True,
                                 text=True)
        if mounted.returncode != 0:
            self.skipTest(f"mounting a tmpfs is not permitted: {mounted.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", small])
        path = self.write("large.h5", **numbers(tokens=3000))
        for ranks in (1, 3):
            self.fail_with(FILE_IO, ("delta", path, "-o", small + "/out.h5"), small + "/out.h5", ranks=ranks)
            self.fail_with(FILE_IO, ("generate", "delta", "-o", small + "/g.h5", "--tokens", "3000"), small + "/g.h5",
                           ranks=ranks)
            self.assertEqual(os.listdir(small), [])
        self.succeed("delta", self.input, "-o", small + "/fits.h5", ranks=3)

    def test_limit_of_file_sizes(self):
        path = self.write("large.h5", **numbers(tokens=2048, heads=1, d_key=64, d_value=64, dtype=np.float32))
        limit = 16 << 20  # the states take 32 MiB, q, k and v 24 MiB
        states = ("delta", path, "-o", self.out, "--state-every", 1)
        generate = ("generate", "delta", "-o", self.at("g.h5"), "--tokens", 8192, "--heads", 4)
        for ranks in (1, 2):
            for words in (states, generate):
                with self.subTest(ranks=ranks, command=words[0]):
                    err = self.fail_with(FILE_IO, words, words[words.index("-o") + 1], "ulimit -f", str(limit),
                                         ranks=ranks, limit=limit, resource_of_limit=resource.RLIMIT_FSIZE)
                    self.assertRegex(err, r"takes up to \d{8,} bytes")
            code, _, err = self.run_longscan("delta", path, "-o", self.at("fits.h5"), "--force", ranks=ranks,
                                             limit=limit, resource_of_limit=resource.RLIMIT_FSIZE)
            self.assertEqual(code, 0, err)

    def test_window_larger_than_memory(self):
        tokens = 1 << 40  # without storage: nothing was written
        path = self.at("huge.h5")
        with h5py.File(path, "w") as f:
            for name, shape in dict(q=(tokens, 1, 1), k=(tokens, 1, 1), v=(tokens, 1, 1), beta=(tokens, 1)).items():
                f.create_dataset(name, shape, np.float32)
        for ranks in (1, 3):
            err = self.fail_with(RESOURCES, ("delta", path, "-o", self.out, "--state-only", "--window", tokens),
                                 "window of", "TiB", "--window", ranks=ranks)
            self.assertRegex(err, r"needs [\d.]+ TiB.* but [\d.]+ [KMGT]iB are free")

    def test_little_memory(self):
        # a state of 8 x 2048 x 2048 float32 is 128 MiB, and several of them and of their maps are needed
        r = np.random.default_rng(1)
        wide = lambda: r.normal(size=(4, 8, 2048)).astype(np.float32) / 45  # noqa: E731
        path = self.write("wide.h5", q=wide(), k=wide(), v=wide(), beta=np.ones((4, 8), np.float32))
        for limit in (1 << 30, 600 << 20):
            with self.subTest(limit=limit):
                err = self.fail_with(RESOURCES, ("delta", path, "-o", self.out), "GiB", limit=limit)
                self.assertRegex(err, r"needs [\d.]+ GiB.* but [\d.]+ [KMGT]iB are free")


class Options(Command):
    """What is printed where, unknown words, the options themselves."""

    def setUp(self):
        super().setUp()
        self.data = numbers()
        self.input = self.write(**self.data)
        self.out = self.at("out.h5")

    def test_unknown_words_name_the_nearest(self):
        solve = ("delta", self.input, "-o", self.out)
        for code, words, texts in (
                (USAGE, (*solve, "--chunks", "3"), ("'--chunks'", "'--chunk'")),
                (USAGE, (*solve, "--reproducable"), ("'--reproducable'", "'--reproducible'")),
                (USAGE, ("dleta", self.input, "-o", self.out), ("'dleta'", "'delta'")),
                (USAGE, ("generate", "dleta", "-o", self.out), ("'dleta'", "'delta'")),
                (USAGE, (*solve, "--inverse", "newman"), ("'newman'", "'neumann'")),
                (USAGE, (*solve, "--erase", "decayd"), ("'decayd'", "'decayed'")),
                (USAGE, (*solve, "--layout", "THB"), ("'THB'", "'THD'")),
                (USAGE, (*solve, "--precision", "fp32"), ("'fp32'", "'f32'")),
                (USAGE, (*solve, "--output-dtype", "bf61"), ("'bf61'", "'bf16'")),
                (USAGE, (*solve, "--variant", "dlpr"), ("'dlpr'", "'dplr'")),
                (BAD_INPUT, (*solve, "--beta", "beat"), ("'beat'", "'beta'")),
                (BAD_INPUT, (*solve, "--log-decay", "bta"), ("'bta'", "'beta'")),
                (USAGE, (*solve, "--chunk", "0"), ("--chunk", "256")),
                (USAGE, (*solve, "--chunk", "257"), ("--chunk", "256")),
                (USAGE, (*solve, "--scale", "2x"), ("2x", "rsqrt")),
                (USAGE, (*solve, "--window", "0"), ("--window",)),
                (USAGE, (*solve, "--state-every", "-3"), ("--state-every",)),
                (USAGE, ("delta", self.input), ("--output",)),
                (USAGE, (*solve, "stray"), ("'stray'",)),
                (USAGE, (), ("--help",))):
            with self.subTest(words=words):
                self.fail_with(code, words, *texts)
        self.fail_with(USAGE, (*solve, "--chunks", "3"), "'--chunk'", ranks=3)

    def test_help_and_version_are_on_stdout(self):
        for words in (("--help",), ("delta", "--help"), ("generate", "delta", "--help"), ("verify", "--help"),
                      ("info",)):
            out, err = self.succeed(*words)
            self.assertGreater(len(out.splitlines()), 5)
            self.assertEqual(err, "")
        self.assertRegex(self.succeed("--version", ranks=3)[0], r"^longscan \d+\.\d+\.\d+\n$")

    def test_messages_go_to_stderr_as_plain_lines(self):
        for ranks in (1, 3):
            out, err = self.succeed("delta", self.input, "-o", self.out, "--force", ranks=ranks)
            self.assertEqual(out, "")
            self.assertIn("64 tokens in 1 sequence, H = 2, K = 8, V = 8, no decay, f64", err)
            self.assertIn("tokens/s) -> " + self.out, err)
            self.assertNotRegex(err, r"[\r\x1b]|\[[ =]+\]", "no bar in a log")
            out, err = self.succeed("delta", self.input, "-o", self.out, "--force", "--quiet", ranks=ranks)
            self.assertEqual((out, err), ("", ""))
            out, err = self.succeed("generate", "delta", "-o", self.at("g.h5"), "--tokens", "9", "--force", "--quiet",
                                    ranks=ranks)
            self.assertEqual((out, err), ("", ""))
        self.assertIn("token", self.fail_with(BAD_INPUT, ("delta", self.bad(), "-o", self.at("o2.h5"), "--quiet")))

    def bad(self):
        data = numbers()
        data["q"][3, 0, 0] = np.nan
        return self.write("bad.h5", **data)

    def test_report(self):
        data = numbers(tokens=400)
        data["beta"][:] = 0.001
        path = self.write("r.h5", **data, cu_seqlens=np.array([0, 100, 400]))
        for ranks in (1, 3):
            self.succeed("delta", path, "-o", self.out, "--force", "--report", self.at("r.json"),
                         "--inverse", "neumann", ranks=ranks)
            report = json.loads(contents(self.at("r.json")))
            for field in REPORT_FIELDS:
                self.assertIn(field, report)
            self.assertEqual(set(report["seconds"]), {"read", "solve", "scan", "write", "total"})
            self.assertGreaterEqual(report["seconds"]["total"], report["seconds"]["solve"])
            self.assertEqual((report["command"], report["ranks"], report["tokens"]), ("delta", ranks, 400))
            self.assertEqual((report["sequences"], report["transport"]), (2, "mpi"))
            self.assertEqual((report["precision"], report["options"]["inverse"]), ("f64", "neumann"))
            values = sum(a.size for a in data.values())
            self.assertEqual(report["bytes"]["read"], 8 * values)
            self.assertEqual(report["bytes"]["written"], 8 * (400 * 2 * 8 + 2 * 2 * 8 * 8))
            self.assertGreater(report["peak_memory_bytes"], 1 << 20)
            checks = report["checks"]
            self.assertEqual((checks["stability_breaches"], checks["inverse_fallbacks"]), (0, 0))
            self.assertTrue(0 < checks["inverse_terms_max"] < 32)
            self.assertEqual(checks["boundaries"], 2 * (ranks - 1))
            self.assertEqual(report["bytes"]["exchanged"] > 0, ranks > 1)
            self.assertFalse([n for n in os.listdir(self.folder) if n.endswith(".part")])

    def test_breaches_and_fallbacks_are_said(self):
        data = numbers()
        data["beta"][:] = 0.999
        data["beta"][[3, 9], 1] = 2.5
        data["k"][:] = np.eye(8)[0]
        path = self.write("b.h5", **data)
        for words in ((), ("--state-only",), ("--reproducible", "--state-only")):
            _, err = self.succeed("delta", path, "-o", self.out, "--force", "--report", self.at("r.json"), *words,
                                  ranks=3)
            self.assertIn("note: 2 tokens and heads are beyond the stability bound", err)
            self.assertEqual(json.loads(contents(self.at("r.json")))["checks"]["stability_breaches"], 2)
        _, err = self.succeed("delta", path, "-o", self.out, "--force", "--inverse", "richardson")
        self.assertIn("forward substitution", err)

    def test_config_file(self):
        with open(self.at("options.ini"), "w") as f:
            f.write('chunk = 16\nscale = "rsqrt"\ninverse = "richardson"\nreproducible = true\nstate-every = 10\n')
        self.succeed("delta", self.input, "-o", self.out, "--config", self.at("options.ini"), "--chunk", "32", ranks=3)
        with h5py.File(self.out) as f:
            got = {n: f.attrs["option_" + n] for n in ("chunk", "scale", "inverse", "reproducible", "state_every")}
            got = {n: a.decode() if isinstance(a, bytes) else a for n, a in got.items()}
            self.assertEqual(f["states"].shape, (6, 2, 8, 8))
        expected = dict(chunk="32", scale="rsqrt", inverse="richardson", reproducible="yes", state_every="10")
        self.assertEqual(got, expected)
        with open(self.at("sections.ini"), "w") as f:
            f.write(f'[delta]\noutput = "{self.at("o2.h5")}"\nquiet = true\n[newton]\nhidden = 3\n')
        self.assertEqual(self.succeed("delta", self.input, "--config", self.at("sections.ini")), ("", ""))
        self.assertTrue(os.path.exists(self.at("o2.h5")))
        for text, texts in (("chunks = 16", ("'--chunks'", "'--chunk'")), ("config = 3", ("'config' is for the command line alone",)),
                            ('inverse = "newman"', ("'newman'", "'neumann'"))):
            with open(self.at("bad.ini"), "w") as f:
                f.write(text + "\n")
            self.fail_with(USAGE, ("delta", self.input, "-o", self.at("o3.h5"), "--config", self.at("bad.ini")), *texts)
        self.fail_with(FILE_IO, ("delta", self.input, "-o", self.at("o3.h5"), "--config", self.at("none.ini")),
                       "none.ini")

    def test_generate(self):
        words = ("generate", "delta", "--tokens", "1000", "--heads", "3", "--d-key", "5", "--d-value", "7", "--quiet")
        for decay in ("none", "head", "channel"):
            for dtype in ("f64", "bf16"):
                for ranks in (1, 3):
                    self.succeed(*words, "-o", self.at(f"g{ranks}.h5"), "--force", "--decay", decay, "--dtype", dtype,
                                 ranks=ranks)
                self.assertEqual(contents(self.at("g1.h5")), contents(self.at("g3.h5")))
        with h5py.File(self.at("g1.h5")) as f:
            shapes = dict(q=(1000, 3, 5), k=(1000, 3, 5), v=(1000, 3, 7), beta=(1000, 3), log_decay=(1000, 3, 5))
            self.assertEqual({n: f[n].shape for n in f}, shapes)
            self.assertTrue(np.all(np.float32(f["log_decay"][()]) <= 0))
            np.testing.assert_allclose(np.linalg.norm(np.float32(f["k"][()]), axis=-1), 1, atol=0.02)
        self.succeed(*words, "-o", self.at("other.h5"), "--seed", "2")
        self.assertNotEqual(contents(self.at("other.h5")), contents(self.at("g1.h5")))
        self.succeed("generate", "delta", "-o", self.at("none.h5"), "--tokens", "0", ranks=3)
        self.delta(self.at("none.h5"), ranks=3)
        self.fail_with(USAGE, ("generate", "delta", "-o", self.at("x.h5"), "--decay", "hed"), "'hed'", "'head'")

    def test_verify(self):
        path, out = self.at("g.h5"), self.out
        self.succeed("generate", "delta", "-o", path, "--tokens", "700", "--decay", "head", "--dtype", "f64",
                     "--d-key", "8", "--d-value", "6", "--heads", "2")
        for words in ((), ("--state-every", "100"), ("--state-only",), ("--output-dtype", "bf16")):
            self.succeed("delta", path, "-o", out, "--force", *words)
            for sample in ((), ("--sample", "20")):
                for ranks in (1, 3):
                    self.succeed("verify", path, out, *sample, ranks=ranks)
        for name, place, where in (("o", (300, 1, 4), ("'/o'", "token 300", "head 1", "value 4")),
                                   ("final_state", (1, 2, 3), ("'/final_state'", "head 1")),
                                   ("states", (2, 0, 1, 1), ("'/states'", "head 0", "entry 2"))):
            self.succeed("delta", path, "-o", out, "--force", "--state-every", "100")
            with h5py.File(out, "a") as f:
                f[name][place] += 1e-3
            for ranks in (1, 3):
                code, _, err = self.run_longscan("verify", path, out, ranks=ranks)
                self.assertEqual(code, NUMERICAL, err)
                for text in where:
                    self.assertIn(text, err)
        with h5py.File(out, "a") as f:
            f["o"][300, 1, 4] = np.nan
        for ranks in (1, 3):
            code, _, err = self.run_longscan("verify", path, out, ranks=ranks)
            self.assertEqual(code, NUMERICAL, err)
            self.assertIn("'/o' at token 300, head 1, value 4 is not finite", err)
        other = self.write("other.h5", **numbers(seed=5))
        self.fail_with(BAD_INPUT, ("verify", other, out), "another input", ranks=3)
        self.fail_with(BAD_INPUT, ("verify", path, other), other)

    def test_verify_values_much_larger_than_the_rms(self):
        data = numbers(tokens=3000, dtype=np.float32)
        data["log_decay"] = np.full((3000, 2), -0.3, np.float32)
        data["v"][1000:1005] *= 1e3
        path = self.write(**data)
        for stored, wrong in (("f32", 1e-3), ("bf16", 0.1), ("f16", 0.1)):
            self.succeed("delta", path, "-o", self.out, "--force", "--output-dtype", stored)
            self.succeed("verify", path, self.out)
            self.succeed("verify", path, self.out, "--sample", "20")
            with h5py.File(self.out, "a") as f:
                f["o"][1004, 1, 3] += wrong * np.abs(np.float32(f["o"][1004, 1])).max()
            code, _, err = self.run_longscan("verify", path, self.out)
            self.assertEqual(code, NUMERICAL, err)
            self.assertIn("'/o' at token 1004, head 1, value 3", err)

    def test_verify_other_shapes(self):
        path = self.write(**numbers())
        for name, axis in (("o", 0), ("final_state", 1)):
            for size in (4, 128):
                self.succeed("delta", path, "-o", self.out, "--force")
                was, now = resize(self.out, name, axis, size)
                for ranks in (1, 3):
                    self.fail_with(BAD_INPUT, ("verify", path, self.out), f"'/{name}' has shape {now}; expected {was}",
                                   ranks=ranks)


class Solve(Command):
    """Answers, against the equation written with matrices; each also by `longscan verify`."""

    def check(self, data, *words, expected=None, tolerance=1e-10, ranks=(1, 3)):
        path = self.write(**data)
        if expected is None:
            o, S, _ = reference(**data)
            expected = dict(o=o, final_state=S)
        for n in ranks:
            with self.subTest(words=words, ranks=n):
                got = self.delta(path, *words, ranks=n)
                self.assertEqual(set(got), set(expected))
                for name, a in expected.items():
                    self.close(got[name], a, tolerance)
        return got

    def test_everything_optional(self):
        r = np.random.default_rng(3)
        data = numbers(tokens=133, d_value=12)
        self.check(data, "--chunk", "16", "--window", "20")
        data.update(eta=r.uniform(size=(133, 2)), log_decay=-r.exponential(0.1, size=(133, 2, 8)),
                    initial_state=r.normal(size=(2, 12, 8)))
        for words in ((), ("--reproducible",), ("--inverse", "neumann")):
            self.check(data, *words)
        data["log_decay"] = -r.exponential(0.1, size=(133, 2))
        data["log_decay"][50:53] = [[-np.inf], [-200], [-1000]]
        self.check(data)

    def test_scale(self):
        data = numbers()
        for text, scale in (("rsqrt", 8**-0.5), ("2.5", 2.5), ("-1e-3", -1e-3)):
            o, S, _ = reference(**data, scale=scale)
            self.check(data, f"--scale={text}", expected=dict(o=o, final_state=S), ranks=(1,))

    def test_states(self):
        data = numbers(tokens=65)
        o, S, states = reference(**data)
        self.check(data, "--state-only", expected=dict(final_state=S))
        self.check(data, "--state-every", "10", "--window", "7",
                   expected=dict(o=o, final_state=S, states=np.array(states[9::10])))
        expected = dict(o=o, final_state=S, states=np.zeros((0, 2, 8, 8)))
        self.check(data, "--state-every", "66", expected=expected, ranks=(1,))
        del data["q"]
        self.check(data, "--state-only", expected=dict(final_state=S))

    def test_normalized_keys(self):
        data = numbers()
        o, S, _ = reference(**data)
        data["k"] *= np.random.default_rng(1).uniform(1, 9, size=(64, 2, 1))
        self.check(data, "--normalize-keys", expected=dict(o=o, final_state=S))

    def test_types(self):
        exact = numbers(tokens=100)
        for dtype, tolerance in ((np.float32, 1e-5), (np.dtype(">f4"), 1e-5), (np.float16, 4e-3)):
            data = {n: a.astype(dtype) for n, a in exact.items()}
            o, S, _ = reference(**data)
            got = self.check(data, expected=dict(o=o, final_state=S), tolerance=tolerance, ranks=(3,))
            self.assertEqual(got["o"].dtype, np.dtype(dtype).newbyteorder("="))
            self.assertEqual(got["final_state"].dtype, np.float32)

    def test_output_types(self):
        data = numbers()
        o, S, _ = reference(**data)
        for word, dtype, tolerance in (("f64", np.float64, 1e-12), ("f32", np.float32, 1e-6), ("f16", np.float16, 4e-3),
                                       ("bf16", np.float32, 3e-2)):  # h5py reads bfloat16 as float32
            got = self.check(data, "--output-dtype", word, expected=dict(o=o, final_state=S), tolerance=tolerance,
                             ranks=(3,))
            self.assertEqual(got["o"].dtype, dtype)
            self.assertEqual(got["final_state"].dtype, np.float64)
            with h5py.File(self.at("out.h5")) as f:
                self.assertEqual(f["o"].id.get_type().get_size(), {"f64": 8, "f32": 4}.get(word, 2))

    def test_precision(self):
        data = numbers()
        for word, tolerance, state in (("f64", 1e-12, np.float64), ("f32", 1e-5, np.float32),
                                       ("bf16", 5e-2, np.float32)):
            got = self.check(data, "--precision", word, tolerance=tolerance, ranks=(3,))
            self.assertEqual((got["o"].dtype, got["final_state"].dtype), (np.float64, state))

    def test_packed_sequences(self):
        cu = np.array([0, 0, 20, 21, 21, 64, 64])
        data = numbers()
        states = np.random.default_rng(2).normal(size=(6, 2, 8, 8))
        parts = [reference(**{n: a[i:j] for n, a in data.items()}, initial_state=s)
                 for i, j, s in zip(cu, cu[1:], states)]
        expected = dict(o=np.concatenate([p[0] for p in parts]), final_state=np.array([p[1] for p in parts]))
        for dtype in (np.int32, np.uint64):
            for words in ((), ("--window", "5"), ("--reproducible",)):
                self.check(dict(data, cu_seqlens=cu.astype(dtype), initial_state=states), *words, expected=expected)

    def test_batches_and_grouped_heads(self):
        batch = [numbers(tokens=30, heads=4, seed=s) for s in (1, 2, 3)]
        answers = [reference(**x) for x in batch]
        data = {n: np.array([x[n] for x in batch]) for n in batch[0]}
        o, S = (np.array([a[i] for a in answers]) for i in (0, 1))
        self.check(data, expected=dict(o=o, final_state=S))
        self.check({n: np.moveaxis(a, 1, 2) for n, a in data.items()}, "--layout", "BHTD",
                   expected=dict(o=np.moveaxis(o, 1, 2), final_state=S))
        grouped = numbers(heads=2)
        v, beta = numbers(heads=4)["v"], numbers(heads=4)["beta"]
        o, S, _ = reference(np.repeat(grouped["q"], 2, 1), np.repeat(grouped["k"], 2, 1), v, beta)
        self.check(dict(q=grouped["q"], k=grouped["k"], v=v, beta=beta[..., None]), expected=dict(o=o, final_state=S))

    def test_diagonal_plus_low_rank(self):
        data = numbers()
        # a = -beta k, b = k, and v scaled by beta is the delta rule
        o, S, _ = reference(**data)
        free = dict(q=data["q"], k=data["k"], v=data["beta"][..., None] * data["v"],
                    a=-data["beta"][..., None] * data["k"],
                    b=data["k"])
        self.check(free, expected=dict(o=o, final_state=S))
        self.check(dict(free, beta=data["beta"]), "--variant", "dplr", expected=dict(o=o, final_state=S))

    def test_groups_and_names(self):
        parts = {f"/demo_{i}": numbers(tokens=20 + 7 * i, seed=i) for i in (0, 1, 2, 10)}
        path = self.write(groups={**parts, "/other": dict(x=np.zeros(3))})
        for words in (("--group", "/demo_*"), ("--group", "demo_*", "--window", "11"), ("--group", *parts)):
            for ranks in (1, 3):
                got = self.delta(path, *words, ranks=ranks)
                self.assertEqual(len(got), 8)
                for group, data in parts.items():
                    o, S, _ = reference(**data)
                    self.close(got[group[1:] + "/o"], o)
                    self.close(got[group[1:] + "/final_state"], S)
        self.assertEqual(set(self.delta(path, "--group", "/demo_1")), {"demo_1/o", "demo_1/final_state"})
        odd = {"/a b": numbers(tokens=9), "/it's": numbers(tokens=7), os.fsdecode(b"/\xff"): numbers(tokens=5)}
        with h5py.File(self.at("odd.h5"), "w") as f:  # names with spaces and quotes; one that is not UTF-8
            for group, arrays in odd.items():
                for n, a in arrays.items():
                    f[os.fsencode(group + "/" + n)] = a
        for ranks in (1, 3):
            self.assertEqual(len(self.delta(self.at("odd.h5"), "--group", *odd, ranks=ranks)), 6)
        data = numbers()
        o, S, _ = reference(**data)
        named = dict(query=data["q"], keys=data["k"], v=data["v"], strength=data["beta"])
        self.check(named, "--q", "query", "--k", "keys", "--beta", "strength", expected=dict(o=o, final_state=S))

    def test_few_tokens_and_many_ranks(self):
        for tokens in (0, 1, 2):
            data = numbers(tokens=tokens)
            data["initial_state"] = np.random.default_rng(1).normal(size=(2, 8, 8))
            for words in ((), ("--reproducible",)):
                self.check(data, *words, ranks=(1, 4))

    def test_reproducible_bytes(self):
        path = self.at("g.h5")
        self.succeed("generate", "delta", "-o", path, "--tokens", "4000", "--decay", "channel", "--d-key", "8",
                     "--d-value", "8")
        found = [self.delta(path, "--reproducible", *words, ranks=ranks)
                 for ranks, words in ((1, ()), (2, ()), (3, ("--window", "700")), (4, ()), (1, ("--window", "1500")))]
        for other in found[1:]:
            for name in ("o", "final_state"):
                self.assertEqual(other[name].tobytes(), found[0][name].tobytes())

    def test_attributes(self):
        path = self.write(**numbers())
        self.delta(path, "--chunk", "32")
        with h5py.File(self.at("out.h5")) as f:
            text = {n: a.decode() if isinstance(a, bytes) else a for n, a in f.attrs.items()}
        self.assertEqual((text["command"], text["option_chunk"], text["input"]), ("delta", "32", path))
        self.assertRegex(text["input_fingerprint"], "^[0-9a-f]{16}$")
        self.assertRegex(text["longscan_version"], r"^\d+\.\d+\.\d+$")


def main(description):
    """Runs the tests of the calling script on the program and launcher of the command line."""
    global LONGSCAN, MOMENT, LAUNCH
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longscan", required=True)
    parser.add_argument("--moment", default="", help="the library of moment.cpp")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--launch", nargs=argparse.REMAINDER, required=True)
    options = parser.parse_args()
    LONGSCAN, MOMENT, LAUNCH = os.path.abspath(options.longscan), os.path.abspath(options.moment), options.launch
    unittest.main(argv=[sys.argv[0], "-v", *options.only])


if __name__ == "__main__":
    main(__doc__)
