# SPDX-License-Identifier: Apache-2.0
"""What the examples share: arrays and torch tensors into HDF5, and the command."""
import os
import shlex
import subprocess

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def put(group, name, values):
    """A numpy array, a torch tensor of any float type (bfloat16 too), or a list, as a dataset."""
    if hasattr(values, "detach"):  # torch
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has no such type: its bits, and a mark that says so
            import torch
            bits = values.contiguous().view(torch.int16).numpy().view(np.uint16)
            group.create_dataset(name, data=bits).attrs["dtype"] = "bfloat16"
            return
        values = values.numpy()
    group.create_dataset(name, data=np.ascontiguousarray(values))


def longscan(*words, ranks=1):
    """Runs the command: that in the environment's LONGSCAN, else the one built here, on `ranks` MPI ranks."""
    program = os.environ.get("LONGSCAN", os.path.join(HERE, "..", "build", "apps", "longscan"))
    launch = shlex.split(os.environ.get("MPIRUN", "mpirun --oversubscribe -n")) + [str(ranks)] if ranks > 1 else []
    env = dict(os.environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # Open MPI wants to be told
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    command = [*launch, program, *map(str, words)]
    print("$", " ".join(shlex.quote(os.path.basename(w) if w == program else w) for w in command), flush=True)
    subprocess.run(command, env=env, check=True)


def relative_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return np.abs(got - expected).max() / np.sqrt(np.mean(expected**2))
