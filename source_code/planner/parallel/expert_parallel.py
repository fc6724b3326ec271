# SPDX-License-Identifier: BSD-3-Clause
"""Plan expert parallelism: its traffic, and its FSDP units. Imports no torch.

Each block with experts exchanges rows twice in forward (dispatch, combine), twice in backward, and with activation
checkpointing twice more; the numbers of rows go first. Sources: labkit/training/experts.py and expert_parallel.py, and
traces of real steps (PyTorch 2.15).
"""

from collections import Counter

from planner.ops.autograd import INT64
from planner.ops.routing import received_rows
from planner.parallel.strategies import FSDP2, Unit


def collectives(plan) -> Counter:
    """Count the all-to-alls of a step: {(kind, bytes, ranks, mesh dimension): how many}; and the sum of tokens for biases.

    The bytes are those of the larger of the rank's two buffers, its own rows included, as
    labkit/measuring/trace.py counts.
    """
    spread, counts = plan.blueprint.spread, Counter()
    if spread.experts and spread.experts.balance == "bias" and plan.ranks > 1:
        counts["all-reduce", spread.counts * INT64, plan.ranks, "shard" if plan.strategy == "fsdp2" else None] += 1
    if spread.ep_degree == 1:
        return counts
    group = spread.ep_degree, dimension(plan)
    for micro_batch in range(plan.micro_batches):
        for block, recomputed in enumerate(spread.recomputed):
            size = max(spread.routing.rows(micro_batch, block)) * spread.hidden_size * plan.compute_itemsize
            counts["all-to-all", size, *group] += 6 if recomputed else 4
            counts["all-to-all", spread.experts.count * INT64, *group] += 2 if recomputed else 1
    return counts


def describe(plan) -> dict | None:
    """Return what a rank's experts receive of a micro-batch in a block, if each token chooses uniformly; None without them.

    Returns:
        {"rows", "deviation", "bytes", "deviation_bytes"}: of one all-to-all, the rank's own rows included; "planned_rows",
        those of the plan, with its imbalance; and "dropped", the share of rows above the capacity.
    """
    spread = plan.blueprint.spread
    if not spread.experts:
        return None
    rows, deviation = received_rows(spread.experts, plan.blueprint.samples, spread.ep_degree)
    each = spread.hidden_size * plan.compute_itemsize
    sent, received = spread.routing.rows(0, 0)
    found = {"rows": rows, "deviation": deviation, "bytes": rows * each, "deviation_bytes": deviation * each}
    return found | {"planned_rows": received, "dropped": 1 - sent / rows}


def dimension(plan) -> str:
    """Return the mesh dimension that an all-to-all is counted under: with all ranks, they have the group of "shard"."""
    return "shard" if plan.blueprint.spread.ep_degree == plan.shards else "expert"


class SpreadFSDP2(FSDP2):
    """FSDP2 with a unit inside each block's unit, for the rank's experts.

    Attributes:
        order: units in the order in which their forwards ended, also those of recomputation. Backward prefetches the unit
            whose forward ended before.
    """

    def __init__(self, plan, tape, units: list[Unit]):
        super().__init__(plan, tape, units)
        self.order, self.ended = [], {}

    def post_forward(self, unit: Unit):
        """Free the unit; recomputation leaves the rank's experts gathered, as their backward follows."""
        if self.tape.frame and self.tape.frame.recomputing:
            self.all_gather_state = None
            return
        self.ended.setdefault(unit, []).append(len(self.order))
        self.order.append(unit)
        super().post_forward(unit)

    def pre_backward(self, unit: Unit):
        """Gather the unit, and prefetch one."""
        self.unshard(unit)
        index = self.ended[unit].pop() - 1
        if index >= 0:
            self.prefetch(self.order[index])

    def post_backward(self, unit: Unit):
        """Reduce the unit's gradients."""
        super().post_backward(unit)
        if unit is self.root:
            self.order.clear()
            self.ended.clear()

    def keep_reduced(self, unit: Unit):
        """Hold experts' gradients that are added to an earlier micro-batch's until backward ends: their hook's input."""
        if unit.kind == "experts" and unit in self.gradients:
            size = unit.shard_numel(trained=True) * self.plan.itemsize
            self.all_reduce_states.append(self.hold("temporary", unit, "gradients, divided", size))
        else:
            super().keep_reduced(unit)
