"""A pipeline: the model in stages, each on a rank of its own, and a step's batch in micro-batches. Imports no torch.

``blocks_of`` splits the model, ``order`` says what a stage computes when.

Sources: GPipe (arXiv:1811.06965); 1F1B with a flush as in Megatron-LM (arXiv:2104.04473, section 2.2), first in
PipeDream (arXiv:1806.03377); torch/distributed/pipelining of PyTorch 2.15.
"""

from itertools import accumulate, pairwise

from planner import UserError
from planner.mesh import Mesh


def blocks_of(layers: int, stages: int) -> list[range]:
    """Which of the ``layers`` blocks each stage has: as evenly as possible, and of unequal parts the first the larger."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def check(mesh: Mesh, layers: int, schedule: str, micro_batches: int):
    """UserError for stages that the model, the schedule or gpt_pipeline.py cannot have."""
    if mesh.ranks != mesh.pipeline:
        raise UserError("gpt_pipeline.py has stages only: give --mesh pipeline=N alone, N being the number of ranks")
    if mesh.pipeline > layers:
        raise UserError(f"{mesh.pipeline} stages are more than the {layers} blocks of the model: take fewer ranks")
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

    The same for both schedules: they differ in memory, not in time.
    """
    return (stages - 1) / (micro_batches + stages - 1)
