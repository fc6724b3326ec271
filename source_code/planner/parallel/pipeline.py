# SPDX-License-Identifier: BSD-3-Clause
"""Pipeline parallelism: the model in stages, each on a rank of its own, and a step's batch in micro-batches. No torch.

Sources: GPipe (arXiv:1811.06965); 1F1B with a flush as in Megatron-LM (arXiv:2104.04473, section 2.2), first in
PipeDream (arXiv:1806.03377).
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner import UserError
from planner.models.shapes import GPTShape
from planner.parallel.mesh import Mesh

SCHEDULES = ("gpipe", "1f1b")


def split_blocks(layers: int, stages: int) -> list[range]:
    """Return the blocks of each stage: as evenly as possible; the first stages have one more if they do not divide.

    Args:
        layers: blocks of the model.
        stages: of the pipeline.
    """
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def check(mesh: Mesh, shape: GPTShape, schedule: str, micro_batches: int):
    """Check that the model, the schedule, and gpt_pipeline.py can have these stages.

    Args:
        mesh: how the ranks are arranged.
        shape: the model.
        schedule: one of ``SCHEDULES``.
        micro_batches: in a step.

    Raises:
        UserError: they cannot.
    """
    if mesh.ranks != mesh.pipeline:
        raise UserError("a pipeline here has stages only: give --mesh pipeline=N alone, N being the number of ranks")
    if mesh.pipeline > shape.num_hidden_layers:
        raise UserError(f"{mesh.pipeline} stages are more than the {shape.num_hidden_layers} blocks: take fewer ranks")
    if shape.tie_word_embeddings and mesh.pipeline > 1:
        raise UserError("one weight for embedding and head cannot be on two stages: take a preset that has two")
    if schedule == "1f1b" and micro_batches < mesh.pipeline:
        raise UserError(
            f"--accumulate {micro_batches} is fewer micro-batches than the {mesh.pipeline} stages need with "
            "--schedule 1f1b: give more, or take --schedule gpipe"
        )


def order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return what a stage computes in a step, in order: [("forward" or "backward", number of the micro-batch), …].

    "gpipe": all forwards, then all backwards. "1f1b": as many forwards as there are stages from this one on, then
    alternately a backward and a forward, and the remaining backwards.

    Args:
        schedule: one of ``SCHEDULES``.
        stages: of the pipeline.
        stage: which of them.
        micro_batches: in a step.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    actions = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("backward", number))
        if number + ahead < micro_batches:
            actions.append(("forward", number + ahead))
    return actions


def bubble(stages: int, micro_batches: int, chunks: int = 1, split_backward: bool = False) -> float:
    """Return the share of a step that a rank is idle, if all stages take equally long: (p − 1) / (m + p − 1).

    GPipe and 1F1B have the same: they differ in memory, not in time. Sources: GPipe's paper, section 2.3, where it is
    O((p − 1) / (m + p − 1)); Megatron-LM's, section 2.2, has (p − 1) / m, the ratio to the ideal step instead.

    Args:
        stages: p, the ranks of the pipeline.
        micro_batches: m.
        chunks: stages of a rank, among which its blocks are divided ("interleaved"): it divides the wait (Megatron-LM's
            paper, section 2.2).
        split_backward: whether the gradients of weights are computed in what would be idle time (ZB-H1 of zero bubble,
            arXiv:2401.10241, section 2): of forward, input gradients, and weight gradients, equally long, one is waited for.
    """
    wait = (stages - 1) / chunks / (3 if split_backward else 1)
    return wait / (micro_batches + wait)


def idle_share(schedule: str, seconds: dict[tuple[int, str, int], float]) -> float:
    """Return the share of a step that stages are idle, if stages and micro-batches do not take equally long.

    The schedule is simulated: an action begins when its stage has finished the one before, and its neighbor has sent
    what it needs. Sending takes no time.

    Args:
        schedule: one of ``SCHEDULES``.
        seconds: {(stage, "forward" or "backward", micro-batch): how long it takes}.
    """
    stages = 1 + max(stage for stage, *_ in seconds)
    to_do = [order(schedule, stages, stage, len(seconds) // (2 * stages)) for stage in range(stages)]
    now, ends = [0.0] * stages, {}
    while any(to_do):
        for stage, actions in enumerate(to_do):
            while actions:
                action, number = actions[0]
                sender = stage - 1 if action == "forward" else stage + 1
                if 0 <= sender < stages and (sender, action, number) not in ends:
                    break
                begin = max(now[stage], ends.get((sender, action, number), 0.0))
                now[stage] = ends[stage, action, number] = begin + seconds[stage, action, number]
                actions.pop(0)
    return 1 - sum(seconds.values()) / (stages * max(now))


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        stages: of the pipeline.
        stage: which of them.
        schedule: one of ``SCHEDULES``.
    """

    stages: int
    stage: int
    schedule: str

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the head and the loss."""
        return self.stage == self.stages - 1

    def traffic(self, plan) -> list[dict]:
        """Return what this stage sends and receives in a step, in the form of ``Plan.traffic``: a pair of ranks each time.

        Activations go to the next stage and gradients to the one before, once per micro-batch each. If gradients are
        clipped, all stages sum the squared norm.
        """
        neighbors = 2 - self.first - self.last
        size = plan.blueprint.boundary_numel * plan.itemsize
        passed = {"count": neighbors * plan.micro_batches, "bytes": size, "ranks": 2, "dimension": None}
        norm = {"kind": "all-reduce", "count": 1, "bytes": plan.itemsize, "ranks": self.stages, "dimension": None}
        sent = [{"kind": kind} | passed for kind in ("receive", "send")] if neighbors else []
        return [norm, *sent] if plan.clip else sent
