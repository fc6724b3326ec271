# SPDX-License-Identifier: BSD-3-Clause
"""Record when each stage of a pipeline computes, one row per rank, and the fraction of the time in which it is idle.

``recording`` records the stages of one rank; ``record_steps`` collects the rows of all ranks. ``record_waiting`` does so for
stages that sleep instead of computing: its rows show the schedule alone, on any number of cores.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

# Methods of PyTorch's stages; under a zero-bubble schedule "backward" computes the gradients of inputs only.
ACTIONS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weights"}
# {name: (class of the schedule, stages of a rank, whether the gradients of weights are computed on their own)}
SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 1, False),
    "1f1b": (pipelining.Schedule1F1B, 1, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 1, True),
}


@contextlib.contextmanager
def recording(*stages: PipelineStage) -> Iterator[list[dict]]:
    """Record what the stages of this rank compute within the context, in order.

    The loss of the last stage is not included: PyTorch computes it after the forward.

    Yields:
        A list that grows: {"action": a value of ``ACTIONS``, "stage": its index, "micro_batch": its number, "begin",
        "end"}, in seconds of ``time.perf_counter``, which the processes of one machine share.
    """
    notes, originals = [], {(stage, name): getattr(stage, name) for stage in stages for name in ACTIONS}

    def noting(stage, action, compute):
        def noted(number, *args, **kwargs):
            begin = _now(stage.device)
            result = compute(number, *args, **kwargs)
            about = {"action": action, "stage": stage.stage_index, "micro_batch": number}
            notes.append(about | {"begin": begin, "end": _now(stage.device)})
            return result

        return noted

    for (stage, name), compute in originals.items():
        setattr(stage, name, noting(stage, ACTIONS[name], compute))
    try:
        yield notes
    finally:
        for (stage, name), compute in originals.items():
            setattr(stage, name, compute)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def record_steps(step: Callable[[], object], steps: int, *stages: PipelineStage) -> list[list[list[dict]]]:
    """Run a step ``steps`` times and record when each rank computes. Collective; all ranks must be on one machine.

    Args:
        step: called without arguments; it runs the schedule.
        steps: to record.
        stages: of this rank.

    An additional first step, in which the stages exchange shapes, is not recorded.

    Returns:
        [step][rank][note], with notes as ``recording`` yields them, in seconds since the step's first forward began.
    """
    step()
    recorded = []
    for _ in range(steps):
        dist.barrier()
        with recording(*stages) as notes:
            step()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, notes)
        start = min(note["begin"] for row in every for note in row)
        for note in (note for row in every for note in row):
            note["begin"], note["end"] = note["begin"] - start, note["end"] - start
        recorded.append(every)
    return recorded


def span(step: list[list[dict]]) -> float:
    """Return the seconds from the start of the first forward to the end of the last backward of one recorded step."""
    return max(note["end"] for row in step for note in row)


def idle_share(step: list[list[dict]]) -> float:
    """Return the fraction of one recorded step in which ranks are idle: compare ``planner.parallel.pipeline.bubble``."""
    busy = sum(note["end"] - note["begin"] for row in step for note in row)
    return 1 - busy / (len(step) * span(step))


def seconds(step: list[list[dict]]) -> dict[tuple[int, str, int], float]:
    """Return the seconds of each (stage, action, micro-batch) of one recorded step: see ``planner.parallel.pipeline.idle_share``."""
    notes = [note for row in step for note in row]
    return {(note["stage"], note["action"], note["micro_batch"]): note["end"] - note["begin"] for note in notes}


class _Wait(torch.autograd.Function):
    """Wait for the given seconds in forward and backward, and compute nothing."""

    @staticmethod
    def forward(context, x, forward_seconds, backward_seconds):
        context.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None, None


class Waiting(nn.Module):
    """Sleep instead of computing. Input and output: one tensor of any shape.

    Args:
        forward_seconds: of a micro-batch.
        backward_seconds: of a micro-batch.
        skipped: how many micro-batches do not sleep; these are of the step that ``record_steps`` does not record.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float, skipped: int):
        super().__init__()
        self.seconds, self.skipped = (forward_seconds, backward_seconds), skipped
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.skipped -= 1
        return _Wait.apply(x * self.weight, *((0.0, 0.0) if self.skipped >= 0 else self.seconds))


def waiting_schedule(me, name: str, micro_batches: int, seconds: float):
    """Make a PyTorch schedule of stages that sleep instead of computing, and this rank's stages.

    A micro-batch takes a rank three times ``seconds``: one forward, and one for the gradients of inputs and of weights each.

    Args:
        me: a ``ranks.Rank``.
        name: a key of ``SCHEDULES``.
        micro_batches: in a step.
        seconds: of a rank's forward of a micro-batch, in all its stages together.

    Returns:
        (the schedule, its stages on this rank).
    """
    kind, count, split = SCHEDULES[name]
    seconds /= count
    # A stage that is given a builder of weight passes runs what it builds as the second part of a split backward.
    apart = {"dw_builder": lambda: lambda: time.sleep(seconds)} if split else {}
    stages = [
        PipelineStage(
            Waiting(seconds, seconds if split else 2 * seconds, micro_batches).to(me.device),
            me.rank + number * me.world_size,
            count * me.world_size,
            me.device,
            **apart,
        )
        for number in range(count)
    ]
    of_one = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    return kind(stages[0] if of_one else stages, micro_batches, _sum, scale_grads=False), stages


def record_waiting(me, name: str, micro_batches: int, seconds: float) -> list[list[dict]]:
    """Record one step of a ``waiting_schedule``, which has these arguments. Collective; all ranks must be on one machine.

    Returns:
        [rank][note], as ``record_steps`` returns them.
    """
    schedule, stages = waiting_schedule(me, name, micro_batches, seconds)
    x = torch.zeros(micro_batches, 1, device=me.device)
    inputs = [x] if me.rank == 0 else []
    (step,) = record_steps(lambda: schedule.step(*inputs, target=x, return_outputs=False), 1, *stages)
    return step


def _sum(output, _):
    return output.sum()
