# SPDX-License-Identifier: BSD-3-Clause
"""Simulate which communication of a step is hidden: DDP's and FSDP's collectives, each on its link's stream.

A stream does one thing at a time, in order. There is one for compute, one for the links within a node, and one for the
network between nodes.

  FSDP  A unit is gathered while the one before it computes, in forward and in backward (with --prefetch N: up to N
        before); nothing hides the first gather. A unit's gradients are reduced while backward goes on with the units
        before it; nothing hides the last reduction, which is the root's.
  DDP   A bucket is reduced as soon as its last gradient is ready; the last bucket is full when backward ends.

Under gloo, FSDP waits for each collective, as PyTorch issues them without a stream: nothing is hidden. DDP hands its
buckets to gloo's own threads.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; ``traffic.ddp_buckets``. Not
modeled: NCCL's kernels take a share of the GPU from the compute they run next to, and FSDP's gathers and reductions may
share a link instead of queueing. Imports no torch.
"""

from collections.abc import Callable
from itertools import accumulate, groupby
from math import fsum

from planner.models.flops import module_flops
from planner.parallel import zero
from planner.parallel.strategies import Unit
from planner.parallel.traffic import ddp_buckets

MAX_SIMULATED_MICRO_BATCHES = 4  # each further one takes as long as the last


class Streams:
    """The times at which compute and each link become free.

    Attributes:
        seconds_of: seconds_of(collective) → (stream, seconds); a collective as in ``Plan.traffic``, without its count.
        blocking: whether compute waits for each collective.
        now: seconds from the start of the step to the end of compute so far.
        free: {stream: seconds from the start of the step}.
        calls: the collectives so far.
    """

    def __init__(self, seconds_of: Callable[[dict], tuple[str, float]], blocking: bool = False):
        self.seconds_of, self.blocking = seconds_of, blocking
        self.now, self.free = 0.0, {}
        self.calls = []

    def compute(self, seconds: float, after: float = 0.0):
        """Compute for ``seconds``, not before the time ``after``."""
        self.now = max(self.now, after) + seconds

    def send(self, call: dict, ready: float) -> float:
        """Queue a collective that can begin at ``ready``, and return when it ends."""
        self.calls.append(call)
        stream, seconds = self.seconds_of(call)
        end = self.free[stream] = max(ready, self.free.get(stream, 0.0)) + seconds
        if self.blocking:
            self.now = end
        return end

    @property
    def end(self) -> float:
        """When everything is done."""
        return max([self.now, *self.free.values()])


def step_end(plan, seconds_of: Callable[[dict], tuple[str, float]], compute: float, blocking: bool = False) -> float:
    """Return the seconds that a step of one process, DDP, ZeRO-1, or FSDP takes.

    Args:
        plan: the ``Plan``.
        seconds_of: see ``Streams``.
        compute: seconds of computation in all modules and micro-batches together.
        blocking: whether FSDP's compute waits for each collective.
    """
    each = compute / plan.micro_batches
    if plan.micro_batches <= MAX_SIMULATED_MICRO_BATCHES:
        return simulate(plan, seconds_of, each, blocking, plan.micro_batches).end
    counts = (MAX_SIMULATED_MICRO_BATCHES - 1, MAX_SIMULATED_MICRO_BATCHES)
    before, last = (simulate(plan, seconds_of, each, blocking, count).end for count in counts)
    return last + (plan.micro_batches - MAX_SIMULATED_MICRO_BATCHES) * (last - before)


def simulate(
    plan, seconds_of: Callable[[dict], tuple[str, float]], compute: float, blocking: bool, micro_batches: int
) -> Streams:
    """Return the streams after a step.

    Args:
        plan: the ``Plan``.
        seconds_of: see ``Streams``.
        compute: seconds of computation in a micro-batch.
        blocking: whether FSDP's compute waits for each collective.
        micro_batches: how many the step has.
    """
    streams = Streams(seconds_of, blocking and plan.shards_parameters)
    seconds = split_by_flops(compute, module_flops(plan))
    step = (Sharded if plan.shards_parameters else Replicated)(plan, streams, seconds)
    for number in range(micro_batches):
        step.forward()
        step.backward(syncs=plan.reductions > 1 or number == micro_batches - 1)
    step.after_optimizer()
    return streams


def split_by_flops(seconds: float, flops: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Divide ``seconds`` among modules in proportion to their operations: [(forward, backward), …]."""
    seconds_per_flop = seconds / (fsum(map(fsum, flops)) or 1.0)
    return [(forward * seconds_per_flop, backward * seconds_per_flop) for forward, backward in flops]


class Replicated:
    """A step of one process, DDP, or ZeRO-1, where each rank has the whole model.

    Attributes:
        seconds: (forward, backward) of each module.
    """

    def __init__(self, plan, streams: Streams, seconds: list[tuple[float, float]]):
        self.plan, self.streams, self.seconds = plan, streams, seconds

    def forward(self):
        """Compute a micro-batch's forward."""
        self.streams.compute(fsum(forward for forward, _ in self.seconds))

    def backward(self, syncs: bool):
        """Compute a micro-batch's backward, and reduce each bucket when it is full.

        A module's gradients become ready evenly over its backward.
        """
        plan, streams = self.plan, self.streams
        full = list(accumulate(ddp_buckets(plan))) if syncs and plan.strategy != "single" else []
        sizes, ready = iter(ddp_buckets(plan)), 0
        for module, (_, seconds) in reversed([*zip(plan.blueprint.modules, self.seconds, strict=True)]):
            unit = Unit([module], plan.blueprint.tied, shards=1, flat=False, itemsize=plan.itemsize)
            arriving = plan.itemsize * unit.numel(trained=True)
            while full and full[0] <= ready + arriving:
                share = (full.pop(0) - ready) / arriving
                call = {"kind": "all-reduce", "bytes": next(sizes), "ranks": plan.ranks, "dimension": None}
                streams.send(call, ready=streams.now + share * seconds)
            ready += arriving
            streams.compute(seconds)

    def after_optimizer(self):
        """Broadcast the parameters that each rank has updated, under ZeRO-1."""
        plan = self.plan
        for numel in zero.parameter_numels(plan) if plan.strategy == "zero1" else ():
            call = {"kind": "broadcast", "bytes": numel * plan.itemsize, "ranks": plan.ranks, "dimension": None}
            self.streams.send(call, ready=self.streams.end)


class Sharded:
    """A step of FSDP, where units are gathered and reduced.

    Attributes:
        units: the root first.
        order: [(number of a unit, seconds of its forward, of its backward), …]: consecutive modules of a unit together.
        ahead: units that are gathered ahead.
        gathered_at: {number of a unit that is gathered, or will be: when it is ready}.
        dimensions: of the mesh, along which shards and replicas lie.
    """

    def __init__(self, plan, streams: Streams, seconds: list[tuple[float, float]]):
        self.plan, self.streams = plan, streams
        self.units = plan.make_units()
        modules = plan.blueprint.modules
        number_of = {module: number for number, unit in enumerate(plan.units) for module in unit}
        timed = zip((number_of[module] for module in modules), seconds, strict=True)
        self.order = [
            (number, *map(sum, zip(*(times for _, times in together), strict=True)))
            for number, together in groupby(timed, key=lambda one: one[0])
        ]
        self.ahead = max(1, plan.prefetch)
        self.gathered_at = {}
        self.dimensions = ("shard", "replicate") if plan.strategy == "fsdp2" else (None, None)

    def forward(self):
        """Compute a micro-batch's forward, gathering units ahead."""
        entered = 0  # the last unit except the root, which comes before and after all others
        for number, seconds, _ in self.order:
            entered = number or entered
            self.compute(number, seconds, self.units_after(entered), self.plan.shards)
            self.streams.compute(0.0, after=self.gather_nested(number))  # FSDP2 gathers experts when they are called
            if not self.stays_gathered(number):
                del self.gathered_at[number]

    def stays_gathered(self, number: int) -> bool:
        """Return whether a unit stays gathered until backward: the root, and, except under FSDP1, a wrapped head."""
        head = not self.plan.flat and self.units[number].kind == "head"
        return number == 0 or head or self.plan.reshard == "false"

    def backward(self, syncs: bool):
        """Compute a micro-batch's backward, gathering units ahead and reducing their gradients."""
        group = int(self.plan.reshard) if self.plan.reshard.isdecimal() else self.plan.shards
        entered = len(self.units)
        for number, _, seconds in reversed(self.order):
            entered = number or entered
            if self.plan.reshard == "true":
                self.gather_nested(number)
            self.compute(number, seconds, self.units_before(entered, ahead=self.ahead if number else 1), group)
            if number:
                self.free_unit(number, syncs)
        self.free_unit(0, syncs)

    def compute(self, number: int, seconds: float, following: range, group: int):
        """Compute modules of a unit, which is gathered unless it was prefetched; meanwhile gather those that follow.

        Args:
            number: of the unit.
            seconds: of the computation.
            following: the units to gather ahead.
            group: ranks that gather.
        """
        self.gather(number, group)
        self.streams.compute(0.0, after=self.gathered_at[number])
        for later in following:
            self.gather(later, group)
        self.streams.compute(seconds)

    def units_after(self, number: int) -> range:
        """Return the units to gather ahead in forward."""
        return range(number + 1, min(number + 1 + self.ahead, len(self.units)))

    def units_before(self, number: int, ahead: int) -> range:
        """Return the units to gather ahead in backward."""
        return range(number - 1, max(0, number - 1 - ahead), -1)

    def gather(self, number: int, group: int):
        """All-gather a unit among ``group`` ranks, unless it is gathered."""
        if number in self.gathered_at:
            return
        along = self.dimensions[0] if group == self.plan.shards else None
        size = self.units[number].shard_numel() * self.plan.shards * self.plan.compute_itemsize
        self.gathered_at[number] = self.send("all-gather", size, group, along)

    def gather_nested(self, number: int) -> float:
        """All-gather the unit of the rank's experts inside a block's unit, if there is one, and return when it ends."""
        if not (unit := self.units[number].nested):
            return 0.0
        size = unit.shard_numel() * unit.shards * self.plan.compute_itemsize
        return self.send("all-gather", size, unit.shards, "expert_shard")

    def free_unit(self, number: int, syncs: bool):
        """Free a unit after its backward, and reduce its gradients: among its shards, then among the replicas."""
        self.gathered_at.pop(number, None)  # a root without parameters was never gathered
        if syncs:
            size = self.units[number].shard_numel(trained=True) * self.plan.itemsize
            done = self.send("reduce-scatter", size * self.plan.shards, self.plan.shards, self.dimensions[0])
            self.send("all-reduce", size, self.plan.replicas, self.dimensions[1], ready=done)
            if unit := self.units[number].nested:
                size = unit.shard_numel(trained=True) * unit.shards * self.plan.itemsize
                self.send("reduce-scatter", size, unit.shards, "expert_shard")

    def after_optimizer(self):
        """Do nothing: the parameters are gathered in the next step."""

    def send(self, kind: str, size: int, ranks: int, dimension: str | None, ready: float = 0.0) -> float:
        """Queue a collective, if there is one, and return when it ends."""
        ready = max(ready, self.streams.now)
        if not size or (ranks == 1 and (kind == "all-reduce" or self.plan.strategy == "fsdp2")):
            return ready  # (FSDP1 calls a group of one rank all the same.)
        return self.streams.send({"kind": kind, "bytes": size, "ranks": ranks, "dimension": dimension}, ready)
