#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The templates of scripts/slurm on a Slurm of one node, which the test starts: a job, an array, scancel, a time limit,
preemption and requeue, exit codes. Ranks that are to be asked to stop wait for that in their first window (moment.cpp).
As root, with slurm-wlm and munge; skipped without.

    slurm_test.py --longscan build/apps/longscan --moment build/tests/liblongscan_moment.so --scripts scripts/slurm
"""
import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import h5py
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
if os.geteuid() != 0 or not all(shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") for p in
                                ("slurmctld", "slurmd", "munged", "srun", "python3")):
    print("skipped: needs root, and on Debian: apt-get install slurm-wlm munge")
    sys.exit(77)

LONGSCAN = MOMENT = SCRIPTS = None
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


def run(*words, **kw):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=900, **kw)


def processes(text):
    """The numbers of those whose command lines have it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as f:
            if text.encode() in f.read():
                found.append(int(pid))
    return found


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="longscan_slurm_")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        os.environ["PATH"] += ":/usr/sbin"
        cls.slurm = cls.at("slurm")
        local = os.path.join(SCRIPTS, "local.sh")
        os.environ.update(SLURM_CONF=os.path.join(cls.slurm, "slurm.conf"), LONGSCAN_SLURM_CPUS="8", LONGSCAN=LONGSCAN,
                          LONGSCAN_CHECKPOINT_EVERY="0",  # only when asked to stop
                          OMPI_ALLOW_RUN_AS_ROOT="1",
                          OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_pml="ob1", OMPI_MCA_rmaps_base_oversubscribe="1",
                          OMPI_MCA_hwloc_base_binding_policy="none", OMPI_MCA_btl_vader_single_copy_mechanism="none")
        cls.addClassCleanup(run, local, "stop", cls.slurm)
        started = run(local, "start", cls.slurm)
        if started.returncode:
            raise AssertionError(started.stdout + started.stderr)
        made = run(LONGSCAN, "generate", "newton", "-o", cls.at("long.h5"), "--tokens", 500000, "--cell", "gru",
                   "--hidden", 16, "--input", 4)
        short = run(LONGSCAN, "generate", "delta", "-o", cls.at("short.h5"), "--tokens", 3000)
        whole = run(LONGSCAN, *cls.long("whole.h5", window=100000))
        assert made.returncode == short.returncode == whole.returncode == 0, made.stderr + short.stderr + whole.stderr

    @classmethod
    def at(cls, name):
        return os.path.join(cls.folder, name)

    @classmethod
    def long(cls, out, window=20000):
        """A solve of many windows; the token loop has the same bits in any."""
        return ("newton", cls.at("long.h5"), "-o", cls.at(out), "--method", "sequential", "--window", str(window),
                "--stall-timeout", "0")

    def program(self, name, *lines):
        """A program that is longscan after these lines; the options that have a template take it."""
        path = self.at(name)
        with open(path, "w") as f:
            f.write("\n".join(["#!/bin/sh", *lines, f'exec {LONGSCAN} "$@"', ""]))
        os.chmod(path, 0o755)
        return f"--export=ALL,LONGSCAN={path}"

    def waiting(self):
        """The ranks of a job's first start stay in their first window until they are asked to stop."""
        return self.program("waiting", '[ "$SLURM_RESTART_COUNT" ] ||',
                            f'  export LD_PRELOAD={MOMENT} LONGSCAN_MOMENT="window 1 0 -1 0"')

    def tearDown(self):
        run("scancel", "--quiet", "--full", "--user=root")
        self.until(lambda: not run("squeue", "--noheader").stdout.strip(), "an empty queue")
        for name in os.listdir(self.folder):
            if name.startswith("out"):
                os.remove(self.at(name))

    def until(self, condition, what, seconds=400):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                jobs = re.findall(r"^JobId=(\d+)", run("scontrol", "show", "jobs").stdout, re.MULTILINE)
                self.fail(f"in vain: {what}\n" + "\n".join(f"job {j}:\n{self.story(j)}" for j in jobs))
            time.sleep(0.1)

    def text(self, name):
        with contextlib.suppress(OSError), open(self.at(name)) as f:
            return f.read()
        return ""

    def log(self, job):
        return self.text(f"longscan-{job}.log")

    def story(self, job):
        """For a failed test: the job's log, and what Slurm says about it."""
        slurm = "".join(self.text(os.path.join(self.slurm, f"log/{name}.log")) for name in ("slurmctld", "slurmd"))
        about = re.compile(rf"(?i)job(id=| ){job}\b|\[{job}\.|StepId={job}\.")
        return "\n".join([self.log(job), *filter(about.search, slurm.splitlines())])

    def submit(self, template, *words, options=()):
        path = os.path.join(SCRIPTS, template)
        sent = run("sbatch", "--parsable", *options, *([path] if template else []), *words, cwd=self.folder)
        self.assertEqual(sent.returncode, 0, sent.stderr)
        return sent.stdout.strip()

    def show(self, job, field="JobState"):
        found = re.search(rf"\b{field}=(\S+)", run("scontrol", "show", "job", job).stdout)
        return found and found[1]

    def ends(self, job, code=0):
        self.until(lambda: self.show(job) in ENDED, f"the end of job {job}")
        self.assertEqual((self.show(job, "ExitCode"), self.show(job)),
                         (f"{code}:0", "FAILED" if code else "COMPLETED"), self.story(job))

    def starts_again(self, job):
        """A requeued job waits two minutes, or, here, until Slurm has cleared the traces of its first start: else the step
        that has the same name again finds the socket of the first, and what starts in the second in which the job was
        ended is taken for that start."""
        ask = None

        def again():
            nonlocal ask
            state, now = self.show(job), time.monotonic()
            if state == "PENDING" and not processes(f"slurmstepd: [{job}."):
                if ask and now > ask:
                    run("scontrol", "update", f"jobid={job}", "StartTime=now", "TimeLimit=60")
                if not ask or now > ask:
                    ask = now + 3
            return self.show(job, "Restarts") == "1" and state not in ("PENDING", "COMPLETING")
        self.until(again, f"the second start of job {job}")

    def are_in_their_first_window(self, *jobs):
        """(output, job): once the output is there every rank waits for a signal, or will."""
        for out, job in jobs:
            self.until(lambda: os.path.exists(self.at(out + ".part")) or self.show(job) in ENDED, f"the start of job {job}")
            self.assertTrue(os.path.exists(self.at(out + ".part")), self.story(job))

    def same(self, out):
        with h5py.File(self.at(out)) as found, h5py.File(self.at("whole.h5")) as expected:
            for n in ("h", "h_final"):
                self.assertEqual(found[n][()].tobytes(), expected[n][()].tobytes(), n)

    def test_job_and_exit_code(self):
        for launcher in ("srun", "mpirun"):
            options = ("--ntasks=2", f"--export=ALL,LONGSCAN_LAUNCHER={launcher}")
            job = self.submit("job.sbatch", "delta", self.at("short.h5"), "-o", self.at("out.h5"), "--force", options=options)
            self.ends(job)
            self.assertIn("on 2 ranks", self.log(job))
            self.assertNotIn("\r", self.log(job))
            self.assertNotIn("\033", self.log(job))
            job = self.submit("job.sbatch", "delta", self.at("long.h5"), "-o", self.at("bad.h5"), options=options)
            self.ends(job, code=3)
            self.assertIn("no dataset 'k'", self.log(job))

    def test_ranks_that_did_not_start(self):
        """srun ends with 0 then; here PMIx finds its socket taken."""
        with open(self.at("files"), "w") as f:
            f.write(self.at("short.h5") + "\n")
        solve = ("delta", self.at("short.h5"), "-o", self.at("out.h5"))
        for template, words, options in (("job.sbatch", solve, ()), ("preemptible.sbatch", solve, ()),
                                         ("array.sbatch", (self.at("files"), self.at("none"), "delta"), ("--array=1",))):
            with self.subTest(template):
                job = self.submit(template, *words, options=("--ntasks=1", "--hold", "--output=longscan-%j.log", *options))
                with socket.socket(socket.AF_UNIX) as taken:
                    taken.bind(os.path.join(self.slurm, f"spool/stepd.slurm.pmix.{job}.0"))
                    run("scontrol", "release", job)
                    self.ends(job, code=1)
                self.assertIn("Slurm did not start longscan", self.log(job))
                self.assertIn("Address already in use", self.text(os.path.join(self.slurm, "log/slurmd.log")))

    def test_array(self):
        os.makedirs(self.at("data"), exist_ok=True)
        for i in range(3):
            shutil.copy(self.at("short.h5"), self.at(f"data/{i}.h5"))
        with open(self.at("files"), "w") as f:
            f.writelines(self.at(f"data/{i}.h5") + "\n" for i in range(3))
        for expected in ("-> ", "is there"):
            job = self.submit("array.sbatch", self.at("files"), self.at("results"), "delta", "--chunk", "32",
                              options=("--array=1-3",))
            for i in range(3):
                self.ends(f"{job}_{i + 1}")
                self.assertIn(expected, self.log(f"{job}_{i + 1}"))
        self.assertEqual(sorted(os.listdir(self.at("results"))), ["0.h5", "1.h5", "2.h5"])

    def test_scancel(self):
        """Also of a job that would requeue itself."""
        for template in ("job.sbatch", "preemptible.sbatch"):
            with self.subTest(template):
                job = self.submit(template, *self.long("out.h5"), options=("--ntasks=2", self.waiting()))
                self.are_in_their_first_window(("out.h5", job))
                run("scancel", job)
                self.until(lambda: self.show(job) in ENDED, f"the end of job {job}")
                self.assertEqual(self.show(job), "CANCELLED", self.story(job))
                self.until(lambda: not processes(self.at("out.h5")), "the end of the ranks")
                self.assertTrue(os.path.exists(self.at("out.h5.checkpoint")), self.log(job))
                self.assertIn("SIGTERM: stopped", self.log(job))
                self.assertEqual(self.show(job, "Restarts"), "0")
                job = self.submit(template, *self.long("out.h5", window=50000), options=("--ntasks=3",))
                self.ends(job)
                self.same("out.h5")
                os.remove(self.at("out.h5"))

    def test_time_limit(self):
        """Slurm looks at the time every 30 seconds. The limit becomes near once the ranks are there."""
        jobs = {}
        for out, template, options in (
                ("out-srun.h5", "job.sbatch", ("--signal=B:USR2@540",)),
                ("out-mpirun.h5", "job.sbatch", ("--signal=B:USR2@540", self.waiting() + ",LONGSCAN_LAUNCHER=mpirun")),
                ("out-requeue.h5", "preemptible.sbatch", ("--signal=USR2@540",))):
            jobs[out] = self.submit(template, *self.long(out), options=("--ntasks=2", self.waiting(), *options))
        self.are_in_their_first_window(*jobs.items())
        for job in jobs.values():
            changed = run("scontrol", "update", f"jobid={job}", "TimeLimit=9")
            self.assertEqual(changed.returncode, 0, changed.stderr)
        for out, job in jobs.items():
            if "requeue" in out:
                self.starts_again(job)
            else:
                self.ends(job, code=75)
                jobs[out] = self.submit("job.sbatch", *self.long(out, window=50000), options=("--ntasks=2",))
            self.assertIn("SIGUSR2: stopped", self.log(job))
        for out, job in jobs.items():
            self.ends(job)
            self.same(out)

    def test_preempted_and_requeued(self):
        job = self.submit("preemptible.sbatch", *self.long("out.h5"),
                          options=("--ntasks=2", "--partition=low", self.waiting()))
        self.are_in_their_first_window(("out.h5", job))
        other = self.submit("", options=("--partition=high", "--exclusive", "--output=/dev/null", "--wrap", "true"))
        self.until(lambda: self.show(job) in (*ENDED, "PENDING"), f"the end of job {job}")
        self.assertIn("SIGTERM: stopped", self.log(job), self.story(job))
        self.ends(other)
        self.starts_again(job)
        self.ends(job)
        self.assertIn("start 1 of", self.log(job))
        self.assertIn("start 2 of", self.log(job))
        self.same("out.h5")

    def test_a_signal_before_longscan_is_ready(self):
        """It ends the ranks."""
        early = self.program("early", '[ "$SLURM_RESTART_COUNT" ] || kill -TERM $$')
        job = self.submit("preemptible.sbatch", "delta", self.at("short.h5"), "-o", self.at("out.h5"),
                          options=("--ntasks=2", early))
        self.starts_again(job)
        self.ends(job)
        self.assertTrue(os.path.exists(self.at("out.h5")), self.log(job))

    def test_separate_worlds(self):
        """srun without PMIx starts programs that know nothing of each other; Open MPI 4 does not even start them."""
        started = run("srun", "--ntasks=2", LONGSCAN, "info", cwd=self.folder)
        self.assertNotEqual(started.returncode, 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longscan", required=True)
    parser.add_argument("--moment", required=True)
    parser.add_argument("--scripts", required=True)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    LONGSCAN, MOMENT, SCRIPTS = map(os.path.abspath, (options.longscan, options.moment, options.scripts))
    unittest.main(argv=[sys.argv[0], "-v", *options.only])
