#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Solves as batch jobs: checkpoints, signals, and what breaks while they run.

    cli_batch_test.py --longscan build/apps/longscan --moment build/tests/liblongscan_moment.so [--only CLASS[.TEST]…]
        --launch mpirun --oversubscribe -n

Jobs are stopped, killed and hindered while they run. Each must end by itself, with one message and the right code;
--resume must then finish as if nothing had happened. What happens does so at a moment of the solve (moment.cpp), however
fast that is; limits of time are for those that hang.
"""
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time

import cli_test
from cli_test import BAD_INPUT, FILE_IO, RESOURCES, USAGE, Command, contents

import h5py
import numpy as np

INTERNAL, INTERRUPTED = 1, 75
WAIT = 0  # as the action of a Moment


class Moment:
    """What is done to a rank (-1: to each), see moment.cpp."""

    def __init__(self, event, action, count=1, rank=-1, microseconds=0):
        self.rank = rank
        self.words = ("env", f"LD_PRELOAD={cli_test.MOMENT}",
                      f"LONGSCAN_MOMENT={event} {count} {int(action)} {rank} {microseconds}")


class Job:
    """A command under way on some ranks."""

    def __init__(self, words, ranks, folder, moment=None):
        env = dict(os.environ, TERM="xterm", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_pml="ob1", OMPI_MCA_ess_singleton_isolated="1",
                   OMPI_MCA_orte_tmpdir_base=cli_test.SESSIONS)
        self.log = tempfile.TemporaryFile("w+")
        start = [*cli_test.LAUNCH, str(ranks)] if ranks > 1 else []
        self.ranks, self.folder, self.moment = ranks, folder, moment
        self.began = time.monotonic()
        self.process = subprocess.Popen([*start, *(moment.words if moment else ()), cli_test.LONGSCAN, *map(str, words)],
                                        env=env, cwd=folder, stdout=self.log, stderr=self.log)

    def rank_pids(self):
        """Process numbers by rank, once all have started."""
        if self.ranks == 1:
            return [self.process.pid]
        found, above = {}, {self.process.pid}
        parents = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{pid}/stat") as f:
                    parents[int(pid)] = int(f.read().rsplit(")", 1)[1].split()[1])
        for _ in range(4):
            above |= {pid for pid, parent in parents.items() if parent in above}
        for pid in above:
            with contextlib.suppress(OSError):
                if os.path.samefile(f"/proc/{pid}/exe", cli_test.LONGSCAN):
                    with open(f"/proc/{pid}/environ", "rb") as f:
                        rank = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", f.read())
                    if rank:
                        found[int(rank[1])] = pid
        return [found[r] for r in range(self.ranks)] if len(found) == self.ranks else []

    def is_stopped(self, pid):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "T"
        return False

    @contextlib.contextmanager
    def held(self, but=()):
        """Once a rank has stopped itself at its moment all others are, for things to happen to them; then they go on,
        `but` some. The others cannot have got far: they wait for it between two windows."""
        first = max(self.moment.rank, 0)
        self.wait_for(lambda: self.rank_pids() and self.is_stopped(self.rank_pids()[first]), "a rank that stops itself")
        pids = self.rank_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.wait_for(lambda: all(map(self.is_stopped, pids)), "ranks that are stopped")
        yield pids
        for rank, pid in enumerate(pids):
            if rank not in but:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def wait_for(self, condition, what, seconds=300):
        """Of something that stays."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{what}: not seen\n" + self.end()[1])
            time.sleep(0.01)

    def survivors(self):
        """Ranks that are left, also of a launcher that is gone."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if (os.path.samefile(f"/proc/{pid}/exe", cli_test.LONGSCAN) and
                        os.path.samefile(f"/proc/{pid}/cwd", self.folder)):
                    found.append(pid)
        return found

    def end(self, seconds=280):
        """Exit code, and what was printed."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.survivors():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            code = "it hangs"
        self.seconds = time.monotonic() - self.began
        self.log.seek(0)
        with self.log:
            return code, self.log.read()


class Batch(Command):
    """A solve in many small windows, and what an undisturbed one gives."""
    # With --reproducible parts of the delta rule end where segments of 1024 tokens do.
    words = {"delta": ("--window", "4096", "--reproducible"), "newton": ("--window", "1500", "--reproducible")}

    @classmethod
    def setUpClass(cls):
        cls.inputs = tempfile.mkdtemp(prefix="longscan_batch_")
        cls.addClassCleanup(shutil.rmtree, cls.inputs)
        cls.made = {}

    def command(self, name):
        return {"delta": "delta", "newton": "newton"}[name.split("_")[0]]

    def input_of(self, name):
        """The path of an input, and of its result."""
        if name not in self.made:
            path, out = (os.path.join(self.inputs, f"{name}{end}.h5") for end in ("", "-out"))
            sizes = {"delta": ("--tokens", 1000000, "--heads", 1, "--d-key", 8, "--d-value", 8),
                     "delta_large": ("--tokens", 1500000, "--heads", 1, "--d-key", 16, "--d-value", 16),
                     "newton": ("--tokens", 100000, "--cell", "paralstm", "--hidden", 16, "--input", 16),
                     "newton_gru": ("--tokens", 40000, "--cell", "gru", "--hidden", 16, "--input", 16)}[name]
            self.succeed("generate", self.command(name), "-o", path, "--seed", "3", *sizes)
            self.succeed(self.command(name), path, "-o", out, "--reproducible")
            self.made[name] = path, out
        return self.made[name]

    def job(self, name, *words, ranks=3, path=None, out="out.h5", moment=None):
        """`words` come beside those of every job; a window of theirs wins."""
        own = self.words[self.command(name)]
        if "--window" in words:
            own = own[2:]
        return Job((self.command(name), path or self.input_of(name)[0], "-o", self.at(out), "--checkpoint",
                    self.at("checkpoint"), *own, *words), ranks, self.folder, moment)

    def stopped(self, name, *words, ranks=3, **kw):
        """A job that was stopped by a signal after some windows."""
        job = self.job(name, "--checkpoint-every", "0.000001", *words, ranks=ranks,
                       moment=Moment("checkpoint", signal.SIGSTOP), **kw)
        with job.held() as pids:
            os.kill(pids[-1], signal.SIGUSR1)
        code, err = job.end()
        self.assertEqual(code, INTERRUPTED, err)
        return err

    def resume(self, name, *words, ranks=3, **kw):
        code, err = self.job(name, "--resume", "--window", "20000", *words, ranks=ranks, **kw).end()
        self.assertEqual(code, 0, err)
        return err

    def same(self, name, out="out.h5"):
        with h5py.File(self.at(out)) as found, h5py.File(self.input_of(name)[1]) as expected:
            for n in expected:
                self.assertEqual(found[n][()].tobytes(), expected[n][()].tobytes(), n)

    def left(self):
        return sorted(os.listdir(self.folder))

    def one_message(self, err, *texts):
        messages = [line for line in err.splitlines()
                    if line.startswith("longscan: ") and "note: " not in line and " tokens in " not in line and
                    not re.match(r"longscan: \d+ % of", line)]
        self.assertEqual(len(messages), 1, err)
        for text in texts:
            self.assertIn(text, messages[0])


class Resume(Batch):
    def test_on_other_numbers_of_ranks(self):
        for name in ("delta", "newton"):
            for before, after in ((3, 2), (1, 3), (3, 4)):
                with self.subTest(name=name, before=before, after=after):
                    err = self.stopped(name, ranks=before)
                    self.one_message(err, "SIGUSR1", "checkpoint", "--resume")
                    self.assertEqual(self.left(), ["checkpoint", "out.h5.part"])
                    self.resume(name, ranks=after)
                    self.assertEqual(self.left(), ["out.h5"])
                    self.same(name)
                    os.remove(self.at("out.h5"))

    def test_every_byte_on_the_same_ranks(self):
        """Attributes of the output too; stopped twice. Not reproducible: bits depend on ranks and windows alone."""
        for name in ("delta", "newton", "newton_gru"):
            self.words = {"delta": ("--window", "16000"), "newton": ("--window", "2000")}
            code, err = self.job(name, out="whole.h5").end()
            self.assertEqual(code, 0, err)
            self.stopped(name)
            code, err = self.job(name, "--resume", "--checkpoint-every", "0.3").end()
            self.assertEqual(code, 0, err)
            self.assertEqual(contents(self.at("out.h5")), contents(self.at("whole.h5")))
            os.remove(self.at("out.h5")), os.remove(self.at("whole.h5"))

    def test_groups(self):
        """A place between groups of unlike shape, and inside the second."""
        parts = {f"/g{i}": cli_test.numbers(tokens=100, d_key=8 + i, seed=i) for i in range(3)}
        path = self.write(groups=parts)
        words = ("delta", path, "--group", "/g*", "--window", "20")
        self.succeed(*words, "-o", self.at("whole.h5"), ranks=2)
        places, code = [], INTERRUPTED
        while code != 0:  # after the second window of each start
            code, err = Job((*words, "-o", self.at("out.h5"), "--checkpoint", self.at("checkpoint"), "--resume",
                             "--checkpoint-every", "0.000001"), 2, self.folder,
                            Moment("checkpoint", signal.SIGUSR2)).end()
            self.assertIn(code, (0, INTERRUPTED), err)
            places += map(int, re.findall(r"stopped at token (\d+)", err))
        self.assertEqual(places, [80, 40, 0, 80])
        self.assertEqual(contents(self.at("out.h5")), contents(self.at("whole.h5")))

    def test_nothing_to_resume(self):
        err = self.resume("delta")
        self.assertIn("starting from the beginning", err)
        self.assertEqual(self.left(), ["out.h5"])
        self.same("delta")

    def test_killed_while_the_checkpoint_was_written(self):
        """The first one, then a later one."""
        part = self.at("checkpoint.part")
        for before in (lambda: None, lambda: self.stopped("delta")):
            before()
            with open(part, "w") as f:
                f.write("longscan checkpoint 3")
            self.resume("delta")
            self.assertEqual(self.left(), ["out.h5"])
            self.same("delta")
            os.remove(self.at("out.h5"))

    def test_killed_after_the_output_was_complete(self):
        self.stopped("delta")
        shutil.copy(self.at("checkpoint"), self.at("kept"))
        self.resume("delta")
        shutil.move(self.at("kept"), self.at("checkpoint"))
        self.assertIn("complete already", self.resume("delta"))
        self.same("delta")

    def test_once_more_after_the_end(self):
        path = shutil.copy2(self.input_of("delta")[0], self.at("in.h5"))
        self.resume("delta", path=path)
        before = contents(self.at("out.h5"))
        self.assertIn("complete already", self.resume("delta", "--report", self.at("r.json"), path=path))
        with open(self.at("r.json")) as f:
            report = json.load(f)
        self.assertEqual(set(cli_test.REPORT_FIELDS) - set(report), set())
        self.assertEqual((report["complete_already"], report["tokens"], report["bytes"]["written"]), (True, 1000000, 0))
        os.remove(self.at("r.json"))
        code, err = self.job("delta", "--resume", "--window", "30000", path=path, ranks=2).end()
        self.assertEqual(code, 0, err)
        self.assertIn("complete already", err)
        for words in (("--chunk", "32"), ("--output-dtype", "f64")):
            self.refuse(USAGE, ("--resume", *words), "out.h5", "exists", path=path)
        os.utime(path)
        self.refuse(USAGE, ("--resume",), "out.h5", "exists", path=path)
        self.assertEqual(contents(self.at("out.h5")), before)

    def refuse(self, code, words, *texts, path=None):
        before = self.left()
        found, err = self.job("delta", *words, path=path).end()
        self.assertEqual(found, code, err)
        self.one_message(err, *texts)
        self.assertEqual(self.left(), before)

    def test_refusals(self):
        path, _ = self.input_of("delta")
        self.stopped("delta")
        checkpoint, part = self.at("checkpoint"), self.at("out.h5.part")
        good, states = contents(checkpoint), os.stat(part)
        self.refuse(USAGE, (), "--resume", "--force")
        self.refuse(BAD_INPUT, ("--resume", "--chunk", "32"), "other options", "chunk")
        self.refuse(BAD_INPUT, ("--resume", "--normalize-keys"), "other options", "normalize_keys")
        # one value in the middle, which no sample of the file holds
        other = shutil.copy(path, self.at("other.h5"))
        with h5py.File(other, "r+") as f:
            f["v"][70001, 0, 3] += 1
        self.refuse(BAD_INPUT, ("--resume",), "written again", path=other)
        with h5py.File(other, "r+") as f:
            f["v"][0, 0, 0] += 1
        self.refuse(BAD_INPUT, ("--resume",), "another input", path=other)
        os.remove(other)
        middle = len(good) // 2
        for text, damaged in (("damaged", good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1:]),
                              ("cut short", good[:-1]), ("cut short", good[:middle]), ("not a checkpoint", b"checkpoint"),
                              ("empty", b""), ("another version", good.replace(b"checkpoint 3\n", b"checkpoint 4\n", 1))):
            with open(checkpoint, "wb") as f:
                f.write(damaged)
            self.refuse(BAD_INPUT, ("--resume",), text)
        with open(checkpoint, "wb") as f:
            f.write(good)
        os.rename(part, self.at("away"))
        self.refuse(BAD_INPUT, ("--resume",), "partial output", "is gone")
        for content in (b"", b"\0" * states.st_size):
            with open(part, "wb") as f:
                f.write(content)
            self.refuse(BAD_INPUT, ("--resume",), "is not the partial output")
        os.rename(self.at("away"), part)
        self.resume("delta")
        self.same("delta")
        with open(checkpoint, "wb") as f:
            f.write(good[:middle])
        code, err = self.job("delta", "--force").end()
        self.assertEqual(code, 0, err)
        self.same("delta")
        shutil.copy(self.at("out.h5"), checkpoint)
        self.refuse(BAD_INPUT, ("--resume", "--force"), "not a checkpoint")
        self.refuse(BAD_INPUT, ("--force",), "not a checkpoint")
        code, err = Job(("delta", path, "-o", self.at("b.h5"), "--checkpoint", path), 1, self.folder).end()
        self.assertEqual(code, USAGE, err)
        # before anything is solved
        code, err = Job(("delta", path, "-o", self.at("b.h5"), "--checkpoint", self.at("no/c")), 2, self.folder).end()
        self.assertEqual(code, FILE_IO, err)
        self.one_message(err, "no/c", "there is no directory")

    def test_files_that_are_one(self):
        """A temporary name is never a file that is read, written or somebody else's."""
        path, _ = self.input_of("delta")
        mine = {name: shutil.copy2(path, self.at(name)) for name in ("a.h5", "a.h5.part", "y.part", "r.part")}
        before = contents(path)
        for words in (("a.h5.part", "-o", "a.h5", "--force"), ("a.h5.part", "-o", "a.h5", "--resume"),
                      ("y.part", "-o", "o.h5", "--checkpoint", "y"), ("r.part", "-o", "o.h5", "--report", "r"),
                      ("a.h5", "-o", "x.part", "--checkpoint", "x"), ("a.h5", "-o", "x.part", "--report", "x"),
                      ("a.h5", "-o", "x.h5", "--checkpoint", "x.h5.part"), ("a.h5", "-o", "x.h5", "--report", "x.h5.part"),
                      ("a.h5", "-o", "x.h5", "--report", "x.h5.checkpoint")):
            code, err = Job(("delta", *words), 1, self.folder).end()
            self.assertEqual(code, USAGE, err)
            self.one_message(err, "give another name")
        with open(self.at("x.h5.part"), "w") as f:
            f.write("precious")
        code, err = Job(("delta", "a.h5", "-o", "x.h5"), 1, self.folder).end()
        self.assertEqual(code, USAGE, err)
        self.one_message(err, "x.h5.part", "in the way")
        code, err = Job(("inspect", "a.h5.part", "--influence", "0", "-o", "a.h5", "--force"), 1, self.folder).end()
        self.assertEqual(code, USAGE, err)
        self.assertEqual(self.left(), ["a.h5", "a.h5.part", "r.part", "x.h5.part", "y.part"])
        for name in mine:
            self.assertEqual(contents(self.at(name)), before)

    def test_data_of_other_files(self):
        """Data behind a virtual dataset, in an external file, and behind an external link."""
        source = shutil.copy(self.input_of("delta")[0], self.at("source.h5"))
        path, raw, linked = self.at("in.h5"), self.at("beta.raw"), self.at("linked.h5")
        with h5py.File(source) as s, h5py.File(path, "w") as f, h5py.File(linked, "w") as other:
            for name in s:
                if name not in ("v", "beta", "k"):
                    s.copy(name, f)
            virtual = h5py.VirtualLayout(s["v"].shape, s["v"].dtype)
            virtual[...] = h5py.VirtualSource("source.h5", "v", s["v"].shape, s["v"].dtype)
            f.create_virtual_dataset("v", virtual)
            f.create_dataset("beta", data=s["beta"][()], external=raw)
            s.copy("k", other)
            f["k"] = h5py.ExternalLink("linked.h5", "k")
        self.stopped("delta", path=path)
        for changed in (source, raw, linked):
            times = os.stat(changed)
            os.utime(changed)
            self.refuse(BAD_INPUT, ("--resume",), "written again", path=path)
            os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
        self.resume("delta", path=path)
        self.assertIn("complete already", self.resume("delta", path=path))
        os.utime(source)
        self.refuse(USAGE, ("--resume",), "out.h5", "exists", path=path)

    def test_starting_anew(self):
        self.stopped("delta")
        code, err = self.job("delta", "--force").end()
        self.assertEqual(code, 0, err)
        self.assertEqual(self.left(), ["out.h5"])
        self.same("delta")


class Signals(Batch):
    def test_each_signal(self):
        for ranks, sent in ((3, signal.SIGTERM), (2, signal.SIGUSR1), (1, signal.SIGUSR2), (1, signal.SIGTERM)):
            with self.subTest(signal=sent, ranks=ranks):
                job = self.job("delta", ranks=ranks, moment=Moment("window", WAIT))
                job.wait_for(lambda: job.rank_pids() and os.path.exists(self.at("out.h5.part")), "the start")
                if sent == signal.SIGTERM:  # as srun and Slurm do; mpirun would end the job a second later
                    for pid in job.rank_pids():
                        os.kill(pid, sent)
                else:
                    job.process.send_signal(sent)  # mpirun passes it on
                code, err = job.end()
                self.assertEqual(code, INTERRUPTED, err)
                self.one_message(err, sent.name)
                self.resume("delta")
                self.same("delta")
                os.remove(self.at("out.h5"))

    def test_default_name(self):
        path, _ = self.input_of("newton")
        words = ("newton", path, "-o", self.at("out.h5"), "--reproducible")
        code, err = Job((*words, "--window", "1000"), 2, self.folder, Moment("window", signal.SIGTERM, rank=0)).end()
        self.assertEqual(code, INTERRUPTED, err)
        self.assertEqual(self.left(), ["out.h5.checkpoint", "out.h5.part"])
        self.assertEqual(Job((*words, "--resume", "--window", "20000"), 3, self.folder).end()[0], 0)
        self.assertEqual(self.left(), ["out.h5"])
        self.same("newton")

    def test_a_second_one_ends_at_once(self):
        job = self.job("delta", "--checkpoint-every", "0", ranks=2, moment=Moment("window", signal.SIGSTOP, rank=0))
        with job.held(but=(0,)) as (_, last):  # so that no window ends
            os.kill(last, signal.SIGUSR1)
            os.kill(last, signal.SIGUSR2)  # at the same moment: once
        time.sleep(0.5)
        self.assertIsNone(job.process.poll())
        for _ in range(100):  # the first may have been late
            if job.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(last, signal.SIGTERM)
                time.sleep(0.5)
        code, err = job.end()
        self.assertNotIn(code, (0, INTERRUPTED, "it hangs"), err)
        self.assertEqual(self.left(), ["out.h5.part"])
        self.assertIn("starting from the beginning", self.resume("delta"))
        self.assertEqual(self.left(), ["out.h5"])
        self.same("delta")


class Faults(Batch):
    """What may happen to a job, once each; the job must end by itself and --resume must finish it."""

    def disturbed(self, name, disturb, *words, code, texts=(), stop=(), **kw):
        """A job with a checkpoint, which `disturb` is then done to, given the process numbers of its ranks. It ends
        before --stall-timeout would end it."""
        job = self.job(name, "--checkpoint-every", "0.000001", *words, moment=Moment("checkpoint", signal.SIGSTOP), **kw)
        with job.held(but=stop) as pids:
            disturb(pids)
        found, err = job.end()
        self.assertIn(found, code if isinstance(code, tuple) else (code,), err)
        if texts:
            self.one_message(err, *texts)
        return err

    def recovered(self, name, ranks=3):
        self.assertIn("out.h5.part", self.left())
        self.assertNotIn("out.h5", self.left())
        self.resume(name, ranks=ranks)
        self.assertEqual(self.left(), ["out.h5"])
        self.same(name)

    def test_a_rank_is_killed(self):
        for rank in (0, 2):
            self.disturbed("delta", lambda pids: os.kill(pids[rank], signal.SIGKILL), code=137)
            self.recovered("delta", ranks=2 + rank)
            os.remove(self.at("out.h5"))

    def test_a_rank_is_stopped(self):
        for name, rank in (("delta", 0), ("newton", 1)):
            self.disturbed(name, lambda pids: None, "--stall-timeout", "10", stop=(rank,), code=INTERNAL,
                           texts=(f"rank {rank} has not been heard of", "token", "--stall-timeout"))
            self.recovered(name)
            os.remove(self.at("out.h5"))

    def test_two_ranks_are_stopped(self):
        """Two others notice at the same moment, and one of them says so."""
        self.disturbed("delta", lambda pids: None, "--stall-timeout", "10", stop=(0, 2), ranks=4, code=INTERNAL,
                       texts=("has not been heard of", "--stall-timeout"))
        self.recovered("delta")

    def test_a_short_stop_does_no_harm(self):
        self.disturbed("delta", lambda pids: time.sleep(11), "--stall-timeout", "10", code=0)
        self.same("delta")

    def test_a_rank_has_no_memory(self):
        """It throws where others go on to the next message."""
        def choke(pids):
            resource.prlimit(pids[1], resource.RLIMIT_AS, (1 << 20, 1 << 20))
        self.disturbed("newton", choke, code=(INTERNAL, RESOURCES), texts=("memory",))
        self.recovered("newton")

    def test_a_rank_cannot_write(self):
        def limit(pids):
            resource.prlimit(pids[2], resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        # newton's go to the file while the solve still looks along them
        for name, dataset in (("delta", "/o"), ("newton", "'/")):
            with self.subTest(name=name):
                self.disturbed(name, limit, code=FILE_IO, texts=("cannot write", dataset, "File too large"))
                self.recovered(name)
                os.remove(self.at("out.h5"))

    def test_the_disk_is_full(self):
        """Where the checkpoints go: the output's room is taken first."""
        mount = tempfile.mkdtemp(prefix="longscan_full_")
        self.addCleanup(os.rmdir, mount)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], capture_output=True).returncode:
            self.skipTest("may not mount a small disk")
        self.addCleanup(subprocess.run, ["umount", mount], check=True)
        at, self.at = self.at, lambda name: os.path.join(mount, name) if name == "checkpoint" else at(name)

        def fill(pids):
            with contextlib.suppress(OSError), open(os.path.join(mount, "ballast"), "wb", buffering=0) as f:
                while True:
                    f.write(b"0" * 1000)
        self.disturbed("delta", fill, code=FILE_IO, texts=("checkpoint", "No space left"))
        os.remove(os.path.join(mount, "ballast"))
        self.recovered("delta")

    def test_the_folder_goes_away(self):
        os.mkdir(self.at("there"))
        self.disturbed("delta", lambda pids: os.rename(self.at("there"), self.at("elsewhere")), code=FILE_IO,
                       texts=("there/out.h5",), out="there/out.h5")
        os.rename(self.at("elsewhere"), self.at("there"))
        self.assertEqual(os.listdir(self.at("there")), ["out.h5.part"])
        self.resume("delta", out="there/out.h5")
        self.same("delta", out="there/out.h5")

    def test_an_earlier_output_stays(self):
        with open(self.at("out.h5"), "w") as f:
            f.write("earlier")
        self.disturbed("delta", lambda pids: os.kill(pids[1], signal.SIGKILL), "--force", code=137)
        self.assertEqual(contents(self.at("out.h5")), b"earlier")
        self.resume("delta", "--force")
        self.same("delta")

    def test_the_input_is_cut(self):
        """Also where the solve looks at it in the system's cache, which it does in large windows."""
        for name, words in (("delta", ()), ("delta_large", ("--window", "40000"))):
            with self.subTest(name=name):
                path = shutil.copy2(self.input_of(name)[0], self.at("in.h5"))
                whole, before = contents(path), os.stat(path)
                self.disturbed(name, lambda pids: os.truncate(path, before.st_size // 20), *words, code=FILE_IO,
                               texts=("in.h5", "was cut short while it was read"), path=path)
                with open(path, "wb") as f:
                    f.write(whole)
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
                self.resume(name, path=path)
                self.same(name)
                os.remove(self.at("out.h5"))

    def test_separate_worlds(self):
        env = dict(os.environ, SLURM_NTASKS="3", SLURM_STEP_ID="0")
        p = subprocess.run([cli_test.LONGSCAN, "info"], env=env, capture_output=True, text=True)
        self.assertEqual(p.returncode, USAGE, p.stderr)
        self.one_message(p.stderr, "--mpi=pmix")


class Memory(Command):
    """Bounded by the window, and as planned, where memory is less than the file."""

    def test_less_than_the_file(self):
        limit = 512 << 20  # of addresses: libraries and threads take the most of it
        path, out, report = self.at("in.h5"), self.at("out.h5"), self.at("report.json")
        for solver, sizes, windows in (
                ("delta", ("--tokens", 400000, "--heads", 2, "--d-key", 64, "--d-value", 64), ((), ("--window", 2048))),
                ("newton", ("--tokens", 700000, "--cell", "paragru", "--hidden", 8, "--input", 200),
                 (("--window", 16384), ("--window", 3000)))):
            self.succeed("generate", solver, "-o", path, "--force", *sizes)
            self.assertGreater(os.path.getsize(path), limit)
            for words in windows:
                for ranks in (1, 3):
                    with self.subTest(solver=solver, words=words, ranks=ranks):
                        code, _, err = self.run_longscan(solver, path, "-o", out, "--force", "--report", report, *words,
                                                         ranks=ranks, limit=limit)
                        self.assertEqual(code, 0, err)
                        with open(report) as f:
                            r = json.load(f)
                        planned = r["planned_memory_bytes"] + r["program_memory_bytes"]
                        self.assertLess(abs(r["peak_memory_bytes"] / planned - 1), 0.1, r)


    def test_of_the_methods_on_all_states(self):
        path, words = self.at("in.h5"), ("-o", self.at("out.h5"), "--force", "--tolerance", "1e-2")
        for cell, sizes, methods in (
                ("paragru", ("--tokens", 24000, "--hidden", 64, "--input", 16), ("newton", "quasi", "elk", "jacobi", "picard")),
                ("gru", ("--tokens", 8000, "--hidden", 40, "--input", 8), ("newton", "elk"))):
            self.succeed("generate", "newton", "-o", path, "--force", "--cell", cell, "--recurrent-scale", "0.3", *sizes)
            for method in methods:
                if method == "picard":  # converges where nothing changes
                    with h5py.File(path, "r+") as f:
                        f["cell/bias"][:64] = -25
                for ranks in (1, 3):
                    for window in ((), ("--window", 3000)):
                        with self.subTest(cell=cell, method=method, ranks=ranks, window=window):
                            self.succeed("newton", path, *words, "--method", method, "--report", self.at("r.json"), *window,
                                         ranks=ranks)
                            with open(self.at("r.json")) as f:
                                r = json.load(f)
                            self.assertGreater(r["newton"]["iterations"], 0)
                            planned = r["planned_memory_bytes"] + r["program_memory_bytes"]
                            self.assertLess(abs(r["peak_memory_bytes"] / planned - 1), 0.1, r)

    def as_planned(self, solver, path, words, ranks, more=()):
        """What the solve said, and `plan`."""
        self.succeed(solver, path, "-o", self.at("out.h5"), "--force", "--report", self.at("r.json"), *words, *more,
                     ranks=ranks)
        with open(self.at("r.json")) as f:
            r = json.load(f)
        planned = r["planned_memory_bytes"] + r["program_memory_bytes"]
        self.assertLess(abs(r["peak_memory_bytes"] / planned - 1), 0.1, r)
        text, _ = self.succeed("plan", path, "--ranks", ranks, "--json", "--solve-rate", "1e6", *words)
        self.assertEqual(json.loads(text)[0]["memory"]["needed_bytes"], r["planned_memory_bytes"], r)

    def test_of_reproducible_windows(self):
        """They end where segments do, so parts are longer or shorter than was asked for."""
        path = self.at("in.h5")
        self.succeed("generate", "delta", "-o", path, "--tokens", 6000, "--heads", 8, "--d-key", 128, "--d-value", 128)
        for ranks in (1, 2, 3):
            for words in ((), ("--window", 1000), ("--window", 1500), ("--window", 3000)):
                with self.subTest(ranks=ranks, words=words):
                    self.as_planned("delta", path, ("--reproducible", *words), ranks)

    def test_of_two_values_a_channel(self):
        """h and c of the only window wait until a method on all states has given back what it took."""
        path = self.at("in.h5")
        self.succeed("generate", "newton", "-o", path, "--tokens", 12000, "--cell", "paralstm", "--hidden", 128, "--input", 16,
                     "--recurrent-scale", 0.3)
        for ranks in (1, 3):
            for method in ("auto", "newton", "quasi", "elk"):
                for words in ((), ("--window", 1000)):
                    with self.subTest(ranks=ranks, method=method, words=words):
                        self.as_planned("newton", path, ("--method", method, *words), ranks, ("--tolerance", "1e-2"))


class Kill(Batch):
    """SIGKILL at random moments of a solve of some hundred MB: of a rank or the launcher, in any of its windows."""

    def kill_and_resume(self, moments, reproducible):
        name = "delta_large"
        path, _ = self.input_of(name)
        words = ("delta", path, "-o", self.at("out.h5"), "--checkpoint", self.at("checkpoint"), "--window", "4096",
                 *(("--reproducible",) if reproducible else ()))
        windows = 1500000 // (3 * 4096) - 1  # each rank has a segment of 4096 tokens in every one
        whole = Job(words, 3, self.folder)
        self.assertEqual(whole.end()[0], 0)
        os.rename(self.at("out.h5"), self.at("whole.h5"))
        draw = random.Random(20260101 + moments)
        for i in range(moments):
            victim = -signal.SIGKILL if i % 4 == 1 else signal.SIGKILL  # the launcher, or the rank
            window, later = draw.randrange(1, windows), draw.choice((0, draw.randrange(20000)))
            every = draw.choice(("0.000001", "0.1"))
            job = Job((*words, "--checkpoint-every", every), 3, self.folder,
                      Moment("window", victim, window, draw.randrange(3), later))
            if i % 4 == 3:  # or before that, if it comes to it
                time.sleep(draw.uniform(0, whole.seconds))
                job.process.kill()
            killed = job.end()
            while left := job.survivors():
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            code, err = Job((*words, "--resume", "--force"), draw.choice((2, 3, 4)) if reproducible else 3,
                            self.folder).end()
            self.assertEqual(code, 0, err)
            if i % 2 == 0 and later == 0:
                self.assertEqual(killed[0], 137, killed)
            if i % 2 == 0 and later == 0 and window > 1 and every != "0.1":
                self.assertNotIn("starting from the beginning", err, killed)
            self.assertEqual(contents(self.at("out.h5")), contents(self.at("whole.h5")))
            self.assertEqual(self.left(), ["out.h5", "whole.h5"])
            os.remove(self.at("out.h5"))

    def test_any_ranks(self):
        self.kill_and_resume(14, True)

    def test_same_ranks(self):
        self.kill_and_resume(6, False)


if __name__ == "__main__":
    cli_test.main(__doc__)
