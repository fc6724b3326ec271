"""A pipeline: the model in stages, each on a rank of its own, and a step's batch in micro-batches. Imports no torch.

``blocks_of`` splits the model, ``order`` says what a stage computes when.

Sources: GPipe (arXiv:1811.06965); 1F1B with a flush as in Megatron-LM (arXiv:2104.04473, section 2.2), first in
PipeDream (arXiv:1806.03377).
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner import UserError
from planner.models.shapes import GPTShape
from planner.parallel.mesh import Mesh

SCHEDULES = ("gpipe", "1f1b")


def blocks_of(layers: int, stages: int) -> list[range]:
    """Which of the ``layers`` blocks each stage has: as evenly as possible, and of unequal parts the first the larger."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def check(mesh: Mesh, shape: GPTShape, schedule: str, micro_batches: int):
    """UserError for stages that the model, the schedule or gpt_pipeline.py cannot have."""
    if mesh.ranks != mesh.pipeline:
        raise UserError("a pipeline here has stages only: give --mesh pipeline=N alone, N being the number of ranks")
    if mesh.pipeline > shape.layers:
        raise UserError(f"{mesh.pipeline} stages are more than the {shape.layers} blocks: take fewer ranks")
    if shape.tied and mesh.pipeline > 1:
        raise UserError("one weight for embedding and head cannot be on two stages: take a preset that has two")
    if schedule == "1f1b" and micro_batches < mesh.pipeline:
        raise UserError(
            f"--accumulate {micro_batches} is fewer micro-batches than the {mesh.pipeline} stages need with "
            "--schedule 1f1b: give more, or take --schedule gpipe"
        )


def order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage computes in a step, in order: ("forward" or "backward", number of the micro-batch).

    "gpipe": all forwards, then all backwards. "1f1b": as many forwards as there are stages from this one on, then a
    backward and a forward by turns, and the backwards that are left.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    actions = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("backward", number))
        if number + ahead < micro_batches:
            actions.append(("forward", number + ahead))
    return actions


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step that a stage waits, where all stages take equally long: (p − 1) / (m + p − 1).

    The same for both schedules: they differ in memory, not in time. Sources: GPipe's paper, section 2.3, where it is
    O((p − 1) / (m + p − 1)); Megatron-LM's, section 2.2, has (p − 1) / m, its ratio to the ideal step instead.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def idle_share(schedule: str, seconds: dict[tuple[int, str, int], float]) -> float:
    """``bubble`` where stages and micro-batches are not equally long; to hand over takes no time here either.

    seconds: how long each (stage, "forward" or "backward", micro-batch) takes. The orders are played through: an
    action begins when its stage is done with the one before, and its neighbour has handed over what it needs.
    """
    stages = 1 + max(stage for stage, *_ in seconds)
    to_do = [order(schedule, stages, stage, len(seconds) // (2 * stages)) for stage in range(stages)]
    now, ends = [0.0] * stages, {}
    while any(to_do):
        for stage, actions in enumerate(to_do):
            while actions:
                action, number = actions[0]
                giver = stage - 1 if action == "forward" else stage + 1
                if 0 <= giver < stages and (giver, action, number) not in ends:
                    break
                begin = max(now[stage], ends.get((giver, action, number), 0.0))
                now[stage] = ends[stage, action, number] = begin + seconds[stage, action, number]
                actions.pop(0)
    return 1 - sum(seconds.values()) / (stages * max(now))


@dataclass(frozen=True)
class Stage:
    """Which stage of how many, and in which order it computes: one of ``SCHEDULES``."""

    stages: int
    stage: int
    schedule: str

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def traffic(self, plan) -> list[dict]:
        """What this rank sends and receives in a step, as ``Plan.traffic`` has it: each time a pair of ranks takes part.

        Activations go to the next stage and gradients to the one before, each once a micro-batch; all add up the norm's
        square, if gradients are clipped.
        """
        neighbours = 2 - self.first - self.last
        size = plan.blueprint.flowing * plan.itemsize
        passed = {"count": neighbours * plan.micro_batches, "bytes": size, "ranks": 2, "dimension": None}
        norm = {"kind": "all-reduce", "count": 1, "bytes": plan.itemsize, "ranks": self.stages, "dimension": None}
        sent = [{"kind": kind} | passed for kind in ("receive", "send")] if neighbours else []
        return [norm, *sent] if plan.clip else sent
