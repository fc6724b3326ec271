# SPDX-License-Identifier: BSD-3-Clause
"""Fill DTensor's cache of shardings in a process, so that the ranks that are forked from it take a fast first step.

For every operator on sharded parameters, DTensor computes how its result is sharded, and stores that: the same on every
rank and in every run of a model, and 0.75 s of CPU in a rank's first step of ``gpt_fsdp.py`` (measured on an AMD EPYC,
PyTorch 2.15). The fork server (fork_server.py) fills the cache for the runs in ``LABS`` while nobody waits for it.
"""

import contextlib
import importlib
import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist

SOURCE = Path(__file__).resolve().parents[2]
LABS = [(lab, ranks) for ranks in (4, 2) for lab in ("gpt_fsdp", "mnist_fsdp")]


def fill(lab: str, ranks: int):
    """Take an optimizer step with a lab's model and its defaults, as rank 0 of a simulated world.

    It starts no threads, which would not survive a fork: nothing is computed, and there is no backward pass.
    Whatever goes wrong is the lab's own error, which its runs will report; here it only leaves the cache empty.

    Args:
        lab: name of its module.
        ranks: of the world.
    """
    imported, excepthook = set(sys.modules), sys.excepthook
    try:
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
            _step(importlib.import_module(lab), ranks)
    except (Exception, SystemExit):
        pass
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = excepthook  # a process group's would begin every line of a traceback with "[rank0]:"
        for name in (
            set(sys.modules) - imported
        ):  # each program imports the course's own modules itself: they are edited
            if name == lab or SOURCE in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
                del sys.modules[name]


def _step(lab, ranks: int):
    from labkit.measuring import simulate
    from labkit.running import simulated_lab

    simulate.optimizer_step(simulated_lab.setup(lab, lab.Config(strategy="fsdp2"), ranks))
