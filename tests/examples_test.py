#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what is printed: the examples of README.md, of examples/README.md and of every command's --help.

    examples_test.py --longscan build/apps/longscan --source . [--only CLASS[.TEST]…]

Code of README.md runs block after block in one folder. Lines that build (scripts/…, cmake, …) are left out: they made
the program that is tested.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import h5py  # noqa: F401
    import numpy  # noqa: F401
except ImportError as e:
    print(f"skipped: {e}; on Debian: apt-get install python3-h5py")
    sys.exit(77)

LONGSCAN = SOURCE = ""
BUILDS = re.compile(r"^(scripts/|cmake |LONGSCAN_NO_PACKAGES)")


class Examples(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="longscan_examples_")
        self.addCleanup(shutil.rmtree, self.folder)
        programs = os.path.join(self.folder, "build", "apps")
        os.makedirs(programs)
        os.symlink(LONGSCAN, os.path.join(programs, "longscan"))
        for name in ("examples", "scripts"):
            os.symlink(os.path.join(SOURCE, name), os.path.join(self.folder, name))
        # python3 is the one that runs this, as Debian's may not be first
        os.symlink(sys.executable, os.path.join(programs, "python3"))
        self.env = dict(os.environ, PATH=programs + os.pathsep + os.environ["PATH"], LONGSCAN=LONGSCAN,
                        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                        OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none",
                        OMPI_MCA_ess_singleton_isolated="1", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH="",
                        OMPI_MCA_orte_tmpdir_base=self.folder)  # tests side by side would remove each other's files

    def run_words(self, *words, **kw):
        p = subprocess.run(words, cwd=self.folder, env=self.env, text=True, capture_output=True, timeout=300, **kw)
        self.assertEqual(p.returncode, 0, f"{words}\n{p.stdout}{p.stderr}")
        return p.stdout

    def run_blocks(self, path):
        with open(os.path.join(SOURCE, path)) as f:
            blocks = re.findall(r"^```(sh|python)\n(.*?)^```", f.read(), re.M | re.S)
        self.assertTrue(blocks)
        python, ran = "", 0
        for language, code in blocks:
            if language == "python":
                python += code  # later blocks use names of earlier ones
                self.run_words(sys.executable, "-c", python)
                ran += 1
                continue
            lines = [line for line in code.splitlines() if line.strip() and not BUILDS.match(line)]
            if lines:
                self.run_words("bash", "-euo", "pipefail", "-c", "\n".join(lines))
                ran += len(lines)
        return ran

    def test_readme(self):
        self.assertGreater(self.run_blocks("README.md"), 5)

    def test_python_examples(self):
        self.assertGreater(self.run_blocks("examples/README.md"), 3)

    def commands(self, *path):
        """Every command, by its path."""
        out = self.run_words("longscan", *path, "--help")
        found = re.search(r"^Subcommands:\n((?:  .*\n)+)", out, re.M)
        if not found:
            return {path: out}
        all_commands = {}
        for line in re.findall(r"^  (\S+)", found.group(1), re.M):
            all_commands.update(self.commands(*path, line))
        return all_commands

    def test_help(self):
        commands = self.commands()
        self.assertIn(("generate", "delta"), commands)
        self.assertIn(("inspect",), commands)
        # generate first; names stand for the same files in all examples
        order = sorted(commands.items(), key=lambda c: (c[0][0] != "generate", c[0][0] == "verify", c[0]))
        for path, text in order:
            self.assertIn("Example", text, path)
            lines = [x.strip() for x in text[text.index("Example"):].splitlines()[1:] if x.startswith("  ")]
            self.assertTrue(lines, path)
            for line in lines:
                for name in re.findall(r"-o (\S+)", line):  # examples do not replace files
                    if os.path.exists(os.path.join(self.folder, name)):
                        os.remove(os.path.join(self.folder, name))
                if path == ("verify",):
                    self.run_words("bash", "-c", "longscan generate delta -o in.h5 --tokens 512 --force --quiet && "
                                                 "longscan delta in.h5 -o out.h5 --force --quiet")
                self.run_words("bash", "-c", line)
        out = self.run_words("longscan", "--help")
        lines = [x.strip() for x in out[out.index("Example"):].splitlines()[1:] if x.startswith("  ")]
        self.assertGreaterEqual(len(lines), 3)
        for name in ("in.h5", "out.h5"):
            os.remove(os.path.join(self.folder, name))
        for line in lines:
            self.run_words("bash", "-c", line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longscan", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    LONGSCAN, SOURCE = os.path.abspath(options.longscan), os.path.abspath(options.source)
    unittest.main(argv=[sys.argv[0], "-v", *options.only])
