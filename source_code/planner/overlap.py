"""What hides behind what in a step: DDP's and FSDP's collectives, each on the lane of its link, beside compute. No torch.

A lane does one thing at a time, in the order in which things are handed to it. There is one for compute, one for the
links within a node, one for the network between nodes. In the order of a step:

  FSDP  A unit is gathered while the one before it computes, in forward and in backward (with --prefetch N: up to N
        before); the first has nothing to hide behind. A unit's gradients are reduced while the backward of the units
        before it goes on; the last unit's, which is the root, have nothing left to hide behind.
  DDP   A bucket is reduced from when its last gradient is there; the last bucket is full when backward is over.

Under gloo FSDP waits for each call, as PyTorch makes them without a stream to put them on: nothing hides. DDP hands
its buckets to gloo's own threads.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; planner/traffic.py's
``buckets`` for DDP. Not in it: NCCL's kernels take a share of the GPU from the compute beside which they run, and
FSDP's gathers and reductions may share a link instead of queueing up.
"""

from itertools import accumulate, groupby

from planner import zero
from planner.flops import of_modules
from planner.strategies import Unit
from planner.traffic import buckets

WALKED = 4  # micro-batches; from then on one more takes as long as the last


class Lanes:
    """When compute and each link are free again: seconds since the step began.

    seconds_of(call) → (lane, seconds) of a collective as ``Plan.traffic`` describes it, without a count.
    blocking: compute waits for each collective.
    """

    def __init__(self, seconds_of, blocking: bool = False):
        self.seconds_of, self.blocking = seconds_of, blocking
        self.now, self.free = 0.0, {}
        self.calls = []

    def compute(self, seconds: float, after: float = 0.0):
        self.now = max(self.now, after) + seconds

    def send(self, call: dict, ready: float) -> float:
        """When it is done. ready: from when on it can begin."""
        self.calls.append(call)
        lane, seconds = self.seconds_of(call)
        end = self.free[lane] = max(ready, self.free.get(lane, 0.0)) + seconds
        if self.blocking:
            self.now = end
        return end

    @property
    def end(self) -> float:
        return max([self.now, *self.free.values()])


def step_end(plan, seconds_of, compute: float, blocking: bool = False) -> float:
    """Seconds that a step of one process, DDP, ZeRO-1 or FSDP takes, of which ``compute`` in all its modules together."""
    each = compute / plan.micro_batches
    if plan.micro_batches <= WALKED:
        return walked(plan, seconds_of, each, blocking, plan.micro_batches).end
    before, last = (walked(plan, seconds_of, each, blocking, count).end for count in (WALKED - 1, WALKED))
    return last + (plan.micro_batches - WALKED) * (last - before)


def walked(plan, seconds_of, compute: float, blocking: bool, micro_batches: int) -> Lanes:
    """The lanes after a step of so many micro-batches, each of which computes for so many seconds."""
    lanes = Lanes(seconds_of, blocking and plan.shards_parameters)
    seconds = shared_out(compute, of_modules(plan))
    walk = (Sharded if plan.shards_parameters else Replicated)(plan, lanes, seconds)
    for number in range(micro_batches):
        walk.forward()
        walk.backward(syncs=plan.reductions > 1 or number == micro_batches - 1)
    walk.after_optimizer()
    return lanes


def shared_out(seconds: float, flops: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(forward, backward) of each module: its share by its operations."""
    a_flop = seconds / (sum(map(sum, flops)) or 1.0)
    return [(forward * a_flop, backward * a_flop) for forward, backward in flops]


class Replicated:
    """Each rank has the whole model: one process, DDP. seconds: (forward, backward) of each module."""

    def __init__(self, plan, lanes: Lanes, seconds: list[tuple[float, float]]):
        self.plan, self.lanes, self.seconds = plan, lanes, seconds

    def forward(self):
        self.lanes.compute(sum(forward for forward, _ in self.seconds))

    def backward(self, syncs: bool):
        """A bucket is full when so many bytes of gradients are there; within a module they come evenly."""
        plan, lanes = self.plan, self.lanes
        full = list(accumulate(buckets(plan))) if syncs and plan.strategy != "single" else []
        sizes, there = iter(buckets(plan)), 0
        for module, (_, seconds) in reversed([*zip(plan.blueprint.modules, self.seconds, strict=True)]):
            arriving = plan.itemsize * Unit([module], plan.blueprint.tied, 1, False, plan.itemsize).numel(trained=True)
            while full and full[0] <= there + arriving:
                share = (full.pop(0) - there) / arriving
                call = {"kind": "all-reduce", "bytes": next(sizes), "ranks": plan.ranks, "dimension": None}
                lanes.send(call, ready=lanes.now + share * seconds)
            there += arriving
            lanes.compute(seconds)

    def after_optimizer(self):
        """ZeRO-1: each rank hands round the parameters that it has updated."""
        for size in zero.numels(self.plan) if self.plan.strategy == "zero1" else ():
            call = {
                "kind": "broadcast",
                "bytes": size * self.plan.itemsize,
                "ranks": self.plan.ranks,
                "dimension": None,
            }
            self.lanes.send(call, ready=self.lanes.end)


class Sharded:
    """FSDP: units are gathered and reduced. seconds: (forward, backward) of each module."""

    def __init__(self, plan, lanes: Lanes, seconds: list[tuple[float, float]]):
        self.plan, self.lanes = plan, lanes
        self.units = plan.make_units()
        modules = plan.blueprint.modules
        number_of = {module: number for number, unit in enumerate(plan.units) for module in unit}
        timed = zip((number_of[module] for module in modules), seconds, strict=True)
        self.order = [  # what of a unit comes together: (its number, seconds of forward, of backward)
            (number, *map(sum, zip(*(times for _, times in together), strict=True)))
            for number, together in groupby(timed, key=lambda one: one[0])
        ]
        self.ahead = max(1, plan.prefetch)
        self.arrived = {}  # number of a unit that is gathered, or will be → when it is there
        self.names = ("shard", "replicate") if plan.strategy == "fsdp2" else (None, None)

    def forward(self):
        entered = 0  # the last unit but for the root, which comes before and after all others
        for number, seconds, _ in self.order:
            entered = number or entered
            self.compute(number, seconds, self.units_after(entered), self.plan.shards)
            if not self.stays(number):
                del self.arrived[number]

    def stays(self, number: int) -> bool:
        """From forward to backward: the root, which comes last and first, and but for FSDP1's a head that is apart."""
        head = not self.plan.flat and self.units[number].kind == "head"
        return number == 0 or head or self.plan.reshard == "false"

    def backward(self, syncs: bool):
        among = int(self.plan.reshard) if self.plan.reshard.isdecimal() else self.plan.shards
        entered = len(self.units)
        for number, _, seconds in reversed(self.order):
            entered = number or entered
            self.compute(number, seconds, self.units_before(entered, ahead=self.ahead if number else 1), among)
            if number:
                self.leave(number, syncs)
        self.leave(0, syncs)

    def compute(self, number: int, seconds: float, following: range, among: int):
        """A module of the unit, which is gathered if that was not done ahead; while it computes, those that follow."""
        self.gather(number, among)
        self.lanes.compute(0.0, after=self.arrived[number])
        for later in following:
            self.gather(later, among)
        self.lanes.compute(seconds)

    def units_after(self, number: int) -> range:
        return range(number + 1, min(number + 1 + self.ahead, len(self.units)))

    def units_before(self, number: int, ahead: int) -> range:
        return range(number - 1, max(0, number - 1 - ahead), -1)

    def gather(self, number: int, among: int):
        if number in self.arrived:
            return
        along = self.names[0] if among == self.plan.shards else None
        size = self.units[number].shard() * self.plan.shards * self.plan.compute_itemsize
        self.arrived[number] = self.send("all-gather", size, among, along)

    def leave(self, number: int, syncs: bool):
        """Free a unit after its backward, and reduce its gradients: within its shards, then among the replicas."""
        self.arrived.pop(
            number, None
        )  # --wrap blocks+embeddings leaves the root without parameters, so it was never gathered
        if syncs:
            part = self.units[number].shard(trained=True) * self.plan.itemsize
            done = self.send("reduce-scatter", part * self.plan.shards, self.plan.shards, self.names[0])
            self.send("all-reduce", part, self.plan.replicas, self.names[1], ready=done)

    def after_optimizer(self):
        pass

    def send(self, kind: str, size: int, ranks: int, dimension, ready: float = 0.0) -> float:
        ready = max(ready, self.lanes.now)
        if not size or (ranks == 1 and (kind == "all-reduce" or self.plan.strategy == "fsdp2")):
            return ready  # FSDP1 calls a group of one rank all the same
        return self.lanes.send({"kind": kind, "bytes": size, "ranks": ranks, "dimension": dimension}, ready)
