# SPDX-License-Identifier: BSD-3-Clause
"""What ranks run for the tests of tensor and of context parallelism, and what experts' and Muon's tests measure.

The ranks cannot import a test's files: these functions travel by value (``forked.by_value``).
"""

import contextlib
import dataclasses
import shutil
from unittest import mock

from forked import by_value

STEPS, SAVED_AT, LENGTH = 4, 2, 16
BLOCKS = {"num_hidden_layers": 2}  # half of the smallest model's: each is like the others
SMALL = BLOCKS | {"hidden_size": 32, "intermediate_size": 96}  # a quarter of its width: losses do not depend on it


@contextlib.contextmanager
def resized(**sizes):
    """Give the smallest model other sizes within this context."""
    from planner.models import shapes

    tiny = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **sizes)
    with mock.patch.dict(shapes.GPT_SHAPES, tiny=tiny):
        yield


def train(me, sequences: int, **options) -> list[float]:
    """Train on ``sequences`` per step, of all ranks together, and return the losses of the steps and of the validation."""
    import gpt_fsdp

    parts = gpt_fsdp.Config(**options).arranged(me.world_size).data * options.get("accumulate", 1)
    if me.world_size == 1:
        options |= {"strategy": "single"}
    common = {"max_steps": STEPS, "seq_len": LENGTH, "batch_size": sequences // parts}
    result = gpt_fsdp.train(gpt_fsdp.Config(**common | options), me)
    return [*result["losses"], result["validation_loss"]]


@by_value
def losses_of(me, cases: dict, sequences: int, folder: str) -> dict:
    """Train every case on a small model: four ranks leave a checkpoint of "plain", which two ranks resume without a mesh.

    Args:
        cases: {name: options}.
        sequences: see ``train``.
        folder: of the checkpoint.

    Returns:
        {"losses": {name: what ``train`` returns}}, and on two ranks "resumed": the same of the resumed run.
    """
    import gpt_fsdp
    from labkit.measuring import meters

    meters.TRACED_STEPS = range(0)
    gpt_fsdp.VALIDATION_SEQUENCES = sequences
    results, checkpoint = {}, {"checkpoint": folder, "checkpoint_every": SAVED_AT}
    if me.world_size == 4:
        cases = cases | {"plain": cases["plain"] | checkpoint}
    with resized(**SMALL):
        if me.world_size == 2:
            results["resumed"] = train(me, sequences, precision="fp64", resume=True, **checkpoint)
        results["losses"] = {name: train(me, sequences, **options) for name, options in cases.items()}
    if me.world_size == 4 and me.rank == 0:
        shutil.rmtree(f"{folder}/step-{STEPS:06}")  # as if the run had been interrupted before
    return results


@by_value
def measure_with_losses(me, config: dict) -> tuple[list[float], dict]:
    """Run gpt_fsdp.py with these options; return the mean loss of each step, and what ``proofs.memory.measure`` does."""
    import gpt_fsdp
    import torch
    import torch.distributed as dist
    from proofs import memory

    step_losses, train_step = [], gpt_fsdp.train_step

    def watched(*arguments):
        own = train_step(*arguments)
        step_losses.append(sum(own).item())  # a number, which takes no memory that the trace would see
        return own

    gpt_fsdp.train_step = watched
    (measured,) = memory.measure(me, [{"script": "gpt_fsdp.py", "ranks": me.world_size, "config": config}])
    gpt_fsdp.train_step = train_step
    mean = torch.tensor(step_losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / me.world_size).tolist(), measured
