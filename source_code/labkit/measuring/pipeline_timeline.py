"""When each stage of a pipeline computes: a lane for each rank, and the share of the time in which it waits.

``watched`` notes when one stage computes, ``lanes`` brings the notes of all together. ``waiting_stage`` is a stage whose
computing is a timed wait, as a host waits for its GPU: its lanes show the schedule alone, on any number of cores.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage


@contextlib.contextmanager
def watched(stage: PipelineStage) -> Iterator[list[dict]]:
    """Note what a stage computes within the context, in order.

    Yields the list that fills: {"action": "forward" or "backward", "micro_batch": its number, "begin", "end"}, the
    latter in seconds of ``time.perf_counter``, which the processes of one machine share. The last stage's loss is in
    none of them: PyTorch computes it between a forward and what follows.
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


def lanes(stage: PipelineStage, step: Callable[[], object], steps: int) -> list[list[list[dict]]]:
    """Run ``step`` so many times, and note when each rank computes: for each step a lane per rank, as ``watched`` has it.

    Times are seconds since the step's first forward began. Collective; the ranks must be of one machine. The first
    step of all is not noted: the stages get to know each other in it.
    """
    step()
    found = []
    for _ in range(steps):
        dist.barrier()
        with watched(stage) as notes:
            step()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, notes)
        start = min(note["begin"] for lane in every for note in lane)
        for note in (note for lane in every for note in lane):
            note["begin"], note["end"] = note["begin"] - start, note["end"] - start
        found.append(every)
    return found


def span(step: list[list[dict]]) -> float:
    """Seconds from the first forward's begin to the last backward's end, of one step's lanes."""
    return max(note["end"] for lane in step for note in lane)


def idle_share(step: list[list[dict]]) -> float:
    """Which share of one step's lanes is empty: to be compared with ``planner.pipeline.bubble``."""
    busy = sum(note["end"] - note["begin"] for lane in step for note in lane)
    return 1 - busy / (len(step) * span(step))


def seconds(step: list[list[dict]]) -> dict[tuple[int, str, int], float]:
    """How long each (stage, action, micro-batch) of one step's lanes took: see ``planner.pipeline.idle_share``."""
    notes = [(stage, note) for stage, lane in enumerate(step) for note in lane]
    return {(stage, note["action"], note["micro_batch"]): note["end"] - note["begin"] for stage, note in notes}


class _Wait(torch.autograd.Function):
    """Forward and backward take so many seconds, and compute nothing."""

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
    """A stage's module that waits instead of computing: a backward twice as long as a forward. Shape in and out: any."""

    def __init__(self, forward_seconds: float):
        super().__init__()
        self.seconds = forward_seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Wait.apply(x * self.weight, self.seconds, 2 * self.seconds)


def waiting_stage(me, forward_seconds: float) -> PipelineStage:
    """This rank's stage of a pipeline that only waits. me: a ``ranks.Rank``."""
    return PipelineStage(Waiting(forward_seconds).to(me.device), me.rank, me.world_size, me.device)
