"""Record when each stage of a pipeline computes, one row per rank, and the fraction of the time in which it is idle.

``recording`` records one stage; ``record_steps`` collects the rows of all ranks. ``waiting_stage`` makes a stage that
sleeps instead of computing: its rows show the schedule alone, on any number of cores.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage


@contextlib.contextmanager
def recording(stage: PipelineStage) -> Iterator[list[dict]]:
    """Record each forward and backward that a stage runs within the context, in order.

    The loss of the last stage is not included: PyTorch computes it after the forward.

    Yields:
        A list that grows: {"action": "forward" or "backward", "micro_batch": its number, "begin", "end"}, in seconds of
        ``time.perf_counter``, which the processes of one machine share.
    """
    notes, originals = [], (stage.forward_one_chunk, stage.backward_one_chunk)

    def noting(action, compute):
        def noted(number, *args, **kwargs):
            begin = _now(stage.device)
            result = compute(number, *args, **kwargs)
            notes.append({"action": action, "micro_batch": number, "begin": begin, "end": _now(stage.device)})
            return result

        return noted

    stage.forward_one_chunk, stage.backward_one_chunk = map(noting, ("forward", "backward"), originals)
    try:
        yield notes
    finally:
        stage.forward_one_chunk, stage.backward_one_chunk = originals


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def record_steps(stage: PipelineStage, step: Callable[[], object], steps: int) -> list[list[list[dict]]]:
    """Run a step ``steps`` times and record when each rank computes. Collective; all ranks must be on one machine.

    An additional first step, in which the stages exchange shapes, is not recorded.

    Returns:
        [step][rank][note], with notes as ``recording`` yields them, in seconds since the step's first forward began.
    """
    step()
    recorded = []
    for _ in range(steps):
        dist.barrier()
        with recording(stage) as notes:
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
    notes = [(stage, note) for stage, row in enumerate(step) for note in row]
    return {(stage, note["action"], note["micro_batch"]): note["end"] - note["begin"] for stage, note in notes}


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
    """Sleep instead of computing; a backward takes twice as long as a forward. Input and output: one tensor of any shape."""

    def __init__(self, forward_seconds: float):
        super().__init__()
        self.seconds = forward_seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Wait.apply(x * self.weight, self.seconds, 2 * self.seconds)


def waiting_stage(me, forward_seconds: float) -> PipelineStage:
    """Make this rank's stage of a pipeline that sleeps instead of computing.

    Args:
        me: a ``ranks.Rank``.
        forward_seconds: how long a forward takes; a backward takes twice as long.
    """
    return PipelineStage(Waiting(forward_seconds).to(me.device), me.rank, me.world_size, me.device)
