#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The templates of scripts/slurm on a Slurm of one node, which the test starts: a job, an array, scancel, a time limit,
preemption and requeue, exit codes. As root, with slurm-wlm and munge; skipped without.

    slurm_test.py --longscan build/apps/longscan --scripts scripts/slurm
"""
import argparse
import contextlib
import os
import re
import shutil
import signal
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

LONGSCAN = SCRIPTS = None


def run(*words, **kw):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=120, **kw)


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="longscan_slurm_")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        os.environ["PATH"] += ":/usr/sbin"
        local = os.path.join(SCRIPTS, "local.sh"), os.path.join(cls.folder, "slurm")
        cls.addClassCleanup(run, local[0], "stop", local[1])
        started = run(local[0], "start", local[1])
        if started.returncode:
            raise AssertionError(started.stdout + started.stderr)
        os.environ.update(SLURM_CONF=os.path.join(local[1], "slurm.conf"), LONGSCAN=LONGSCAN, LONGSCAN_CHECKPOINT_EVERY="60",
                          OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_pml="ob1",
                          OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none",
                          OMPI_MCA_btl_vader_single_copy_mechanism="none")
        # long enough to be caught in the middle: the token loop in windows
        cls.long = ("newton", cls.at("long.h5"), "-o", cls.at("out.h5"), "--method", "sequential", "--window", "3000")
        made = run(LONGSCAN, "generate", "newton", "-o", cls.at("long.h5"), "--tokens", 400000, "--cell", "gru",
                   "--hidden", 48, "--input", 4)
        short = run(LONGSCAN, "generate", "delta", "-o", cls.at("short.h5"), "--tokens", 3000)
        whole = run(LONGSCAN, *cls.long[:2], "-o", cls.at("whole.h5"), "--method", "sequential")
        assert made.returncode == short.returncode == whole.returncode == 0, made.stderr + short.stderr + whole.stderr

    @classmethod
    def at(cls, name):
        return os.path.join(cls.folder, name)

    def tearDown(self):
        for name in os.listdir(self.folder):
            if name.startswith("out.h5") or name.endswith(".log"):
                os.remove(self.at(name))

    def submit(self, template, *words, options=()):
        sent = run("sbatch", "--parsable", *options, os.path.join(SCRIPTS, template), *words, cwd=self.folder)
        self.assertEqual(sent.returncode, 0, sent.stderr)
        return sent.stdout.strip()

    def show(self, job):
        text = run("scontrol", "show", "job", job).stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait(self, job, *states, seconds=150):
        end = time.monotonic() + seconds
        while self.show(job)["JobState"] not in states:
            self.assertLess(time.monotonic(), end, f"{self.show(job)}\n{self.log(job)}")
            time.sleep(0.2)
        return self.show(job)

    def log(self, job):
        with contextlib.suppress(OSError), open(self.at(f"longscan-{job}.log")) as f:
            return f.read()
        return ""

    def ranks(self):
        """Process numbers of the solve's ranks."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/cmdline") as f:
                    if os.path.samefile(f"/proc/{pid}/exe", LONGSCAN) and self.folder in f.read():
                        found.append(int(pid))
        return found

    def hold(self, job, count=2):
        """Stops the ranks in the middle; Slurm's signals wake them."""
        end = time.monotonic() + 60
        while len(self.ranks()) < count or not os.path.exists(self.at("out.h5.part")):
            self.assertLess(time.monotonic(), end, self.log(job))
            time.sleep(0.02)
        time.sleep(0.3)
        for pid in self.ranks():
            os.kill(pid, signal.SIGSTOP)

    def same(self):
        with h5py.File(self.at("out.h5")) as found, h5py.File(self.at("whole.h5")) as expected:
            for n in ("h", "h_final"):
                self.assertEqual(found[n][()].tobytes(), expected[n][()].tobytes(), n)

    def test_job_and_exit_code(self):
        for launcher in ("srun", "mpirun"):
            options = ("--ntasks=2", f"--export=ALL,LONGSCAN_LAUNCHER={launcher}")
            job = self.submit("job.sbatch", "delta", self.at("short.h5"), "-o", self.at("out.h5"), "--force", options=options)
            self.assertEqual(self.wait(job, "COMPLETED", "FAILED")["ExitCode"], "0:0", self.log(job))
            self.assertIn("on 2 ranks", self.log(job))
            self.assertNotIn("\r", self.log(job))
            self.assertNotIn("\033", self.log(job))
            job = self.submit("job.sbatch", "delta", self.at("long.h5"), "-o", self.at("bad.h5"), options=options)
            self.assertEqual(self.wait(job, "COMPLETED", "FAILED")["ExitCode"], "3:0", self.log(job))
            self.assertIn("no dataset 'k'", self.log(job))

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
                self.assertEqual(self.wait(f"{job}_{i + 1}", "COMPLETED", "FAILED")["ExitCode"], "0:0")
                self.assertIn(expected, self.log(f"{job}_{i + 1}"))
        self.assertEqual(sorted(os.listdir(self.at("results"))), ["0.h5", "1.h5", "2.h5"])

    def test_scancel(self):
        job = self.submit("job.sbatch", *self.long, options=("--ntasks=2",))
        self.hold(job)
        run("scancel", job)
        self.wait(job, "CANCELLED")
        end = time.monotonic() + 30
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.1)
        self.assertTrue(os.path.exists(self.at("out.h5.checkpoint")), self.log(job))
        self.assertIn("SIGTERM: stopped", self.log(job))
        job = self.submit("job.sbatch", *self.long, options=("--ntasks=3",))
        self.assertEqual(self.wait(job, "COMPLETED", "FAILED")["ExitCode"], "0:0", self.log(job))
        self.same()

    def test_time_limit(self):
        for launcher in ("srun", "mpirun"):
            job = self.submit("job.sbatch", *self.long, "--force", options=(
                "--ntasks=2", "--time=1", "--signal=B:USR2@48", f"--export=ALL,LONGSCAN_LAUNCHER={launcher}"))
            self.wait(job, "RUNNING")
            running = True
            while running:  # slow enough to be there when the signal comes: the ranks run for a moment a second
                pids = self.ranks()
                for sent, seconds in ((signal.SIGSTOP, 1.0), (signal.SIGCONT, 0.05)):
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, sent)
                    if sent == signal.SIGSTOP:
                        running = self.show(job)["JobState"] == "RUNNING"
                    time.sleep(seconds)
            self.assertEqual(self.wait(job, "COMPLETED", "FAILED", "TIMEOUT")["ExitCode"], "75:0", self.log(job))
            self.assertIn("SIGUSR2: stopped", self.log(job))
            job = self.submit("job.sbatch", *self.long, options=("--ntasks=2",))
            self.assertEqual(self.wait(job, "COMPLETED", "FAILED")["ExitCode"], "0:0", self.log(job))
            self.same()
            os.remove(self.at("out.h5"))

    def test_preempted_and_requeued(self):
        job = self.submit("preemptible.sbatch", *self.long, options=("--ntasks=2", "--partition=low"))
        self.hold(job)
        other = run("sbatch", "--parsable", "--partition=high", "--exclusive", "--wrap", "sleep 1", cwd=self.folder)
        other = other.stdout.strip()
        self.wait(job, "PENDING")
        self.assertIn("SIGTERM: stopped", self.log(job))
        self.wait(other, "COMPLETED")
        end = time.monotonic() + 100
        while self.show(job)["JobState"] == "PENDING" and time.monotonic() < end:
            run("scontrol", "update", f"jobid={job}", "StartTime=now")  # else it waits two minutes
            time.sleep(0.5)
        self.assertEqual(self.wait(job, "COMPLETED", "FAILED")["ExitCode"], "0:0", self.log(job))
        self.assertIn("start 1 of", self.log(job))
        self.assertIn("start 2 of", self.log(job))
        self.same()

    def test_separate_worlds(self):
        """srun without PMIx starts programs that know nothing of each other; Open MPI 4 does not even start them."""
        started = run("srun", "--ntasks=2", LONGSCAN, "info", cwd=self.folder)
        self.assertNotEqual(started.returncode, 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longscan", required=True)
    parser.add_argument("--scripts", required=True)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    LONGSCAN, SCRIPTS = os.path.abspath(options.longscan), os.path.abspath(options.scripts)
    unittest.main(argv=[sys.argv[0], "-v", *options.only])
