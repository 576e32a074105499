#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The templates of scripts/slurm on a Slurm of one node, which the test starts: a job, an array, scancel, a time limit,
preemption and requeue, exit codes. What Slurm does is awaited, and the ranks are stopped meanwhile. As root, with slurm-wlm and munge; skipped without.

    slurm_test.py --longscan build/apps/longscan --scripts scripts/slurm
"""
import argparse
import contextlib
import os
import re
import shutil
import signal
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

LONGSCAN = SCRIPTS = None
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")


def run(*words, **kw):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, **kw)


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
                          LONGSCAN_CHECKPOINT_EVERY="0", OMPI_ALLOW_RUN_AS_ROOT="1",
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
    def long(cls, out, window=300):
        """A solve of many windows; the token loop has the same bits in any."""
        return "newton", cls.at("long.h5"), "-o", cls.at(out), "--method", "sequential", "--window", str(window)

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
        """A requeued job waits two minutes. By then Slurm has cleared the traces of its first start; if it has not, the
        step that has the same name again finds the socket of the first."""
        self.until(lambda: (self.show(job), self.show(job, "Restarts")) == ("PENDING", "1"), f"job {job} in the queue again")
        self.until(lambda: not processes(f"slurmstepd: [{job}."), "the end of the first start")
        self.until(lambda: run("scontrol", "update", f"jobid={job}", "StartTime=now") and self.show(job) != "PENDING",
                   "the second start")

    def ranks(self, out):
        found = []
        for pid in processes(self.at(out)):
            with contextlib.suppress(OSError):
                if os.path.samefile(f"/proc/{pid}/exe", LONGSCAN):
                    found.append(pid)
        return found

    def send(self, out, sent):
        for pid in self.ranks(out):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    def stop_in_the_middle(self, jobs):
        for out in jobs:
            self.until(lambda: len(self.ranks(out)) == 2 and os.path.exists(self.at(out + ".part")), f"the middle of {out}")
            self.send(out, signal.SIGSTOP)

    def signalled(self, out):
        """A signal waits for a stopped rank, or Slurm woke it, which it does just before it sends some signals."""
        for pid in self.ranks(out):
            status = self.text(f"/proc/{pid}/status")
            if status and not re.search(r"^State:\s*T", status, re.MULTILINE):
                return True
            if any(int(bits, 16) & 1 << (n - 1) for bits in re.findall(r"^(?:Shd|Sig)Pnd:\s*(\w+)", status, re.MULTILINE)
                   for n in (signal.SIGTERM, signal.SIGUSR2)):
                return True
        return False

    def go_on(self, jobs):
        """Until each of the jobs {output: job} is over or in the queue again. Its ranks stay stopped until Slurm does
        something to them; then they run now and then, as the signal may still be under way."""
        met = set()

        def over():
            left = [out for out, job in jobs.items() if self.show(job) not in (*ENDED, "PENDING")]
            met.update(out for out in left if self.signalled(out))
            for sent, seconds in ((signal.SIGCONT, 0.02), (signal.SIGSTOP, 0)):
                for out in met:
                    self.send(out, sent)
                time.sleep(seconds)
            return not left
        self.until(over, f"the end of {jobs}")

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
                job = self.submit(template, *self.long("out.h5"), options=("--ntasks=2",))
                self.stop_in_the_middle(["out.h5"])
                run("scancel", job)
                self.go_on({"out.h5": job})
                self.assertEqual(self.show(job), "CANCELLED", self.story(job))
                self.until(lambda: not self.ranks("out.h5"), "the end of the ranks")
                self.assertTrue(os.path.exists(self.at("out.h5.checkpoint")), self.log(job))
                self.assertIn("SIGTERM: stopped", self.log(job))
                self.assertEqual(self.show(job, "Restarts"), "0")
                job = self.submit(template, *self.long("out.h5", window=50000), options=("--ntasks=3",))
                self.ends(job)
                self.same("out.h5")
                os.remove(self.at("out.h5"))

    def test_time_limit(self):
        """Slurm looks at the time every 30 seconds, and sends its signal up to 60 seconds early."""
        limit = ("--ntasks=2", "--time=10")
        jobs = {}
        for out, template, options in (
                ("out-srun.h5", "job.sbatch", ("--signal=B:USR2@540",)),
                ("out-mpirun.h5", "job.sbatch", ("--signal=B:USR2@540", "--export=ALL,LONGSCAN_LAUNCHER=mpirun")),
                ("out-requeue.h5", "preemptible.sbatch", ("--signal=USR2@540",))):
            jobs[out] = self.submit(template, *self.long(out), options=(*limit, *options))
        self.stop_in_the_middle(jobs)
        self.go_on(jobs)
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
        job = self.submit("preemptible.sbatch", *self.long("out.h5"), options=("--ntasks=2", "--partition=low"))
        self.stop_in_the_middle(["out.h5"])
        other = self.submit("", options=("--partition=high", "--exclusive", "--output=/dev/null", "--wrap", "true"))
        self.go_on({"out.h5": job})
        self.assertIn("SIGTERM: stopped", self.log(job), self.story(job))
        self.ends(other)
        self.starts_again(job)
        self.ends(job)
        self.assertIn("start 1 of", self.log(job))
        self.assertIn("start 2 of", self.log(job))
        self.same("out.h5")

    def test_a_signal_before_longscan_is_ready(self):
        """It ends the ranks."""
        early = self.at("early")
        with open(early, "w") as f:
            f.write(f'#!/bin/sh\n[ "$SLURM_RESTART_COUNT" ] || kill -TERM $$\nexec {LONGSCAN} "$@"\n')
        os.chmod(early, 0o755)
        job = self.submit("preemptible.sbatch", "delta", self.at("short.h5"), "-o", self.at("out.h5"),
                          options=("--ntasks=2", f"--export=ALL,LONGSCAN={early}"))
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
    parser.add_argument("--scripts", required=True)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    LONGSCAN, SCRIPTS = os.path.abspath(options.longscan), os.path.abspath(options.scripts)
    unittest.main(argv=[sys.argv[0], "-v", *options.only])
