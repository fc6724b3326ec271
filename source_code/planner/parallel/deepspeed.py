"""What DeepSpeed's stages do around each operator and micro-batch, on sizes: the rules of planner/step/simulation.py. No torch.

Sources: DeepSpeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, linear.py and partition_parameters.py,
runtime/engine.py, runtime/fp16/unfused_optimizer.py; and traces of real steps. What each keeps: planner/parallel/zero.py.
"""

from collections import Counter
from itertools import groupby
from math import ceil
from operator import itemgetter

from planner.ops.autograd import FP32, FP64
from planner.ops.operators import Tape
from planner.parallel import zero
from planner.parallel.strategies import Replicated

FLATTENED = 500_000_000  # numbers: how many gradients stage 0 flattens at most, by DeepSpeed's default


class DeepSpeed(Replicated):
    """Stage 0, and what the stages have in common. ``sent``: a step's collectives, {(kind, bytes): how many}."""

    def __init__(self, plan, tape, units):
        super().__init__(plan, tape, units)
        self.parameters = list(units[0].parameters.values())
        self.itemsize = plan.parameter_itemsize
        self.sent = Counter()

    def send(self, kind: str, size: int):
        self.sent[kind, size] += 1

    def hold(self, category: str, name: str, numel: int, itemsize: int | None = None):
        itemsize = itemsize or self.itemsize
        return self.tape.hold(category, name, numel * itemsize, itemsize)

    def after_micro_batch(self):
        """After the last, the gradients are copied into one tensor, reduced and copied back."""
        super().after_micro_batch()
        if self.syncs:
            for numel in zero.sums([parameter.numel for parameter in self.parameters], FLATTENED):
                flat = self.hold("all-reduce buckets", "gradients, flattened", numel)
                self.send("all-reduce", flat.size)
                del flat

    def before_optimizer(self):
        if self.itemsize != FP32:
            self.held = self.hold("temporary", "gradients in fp32", sum(p.numel for p in self.parameters), FP32)
        elif self.plan.clip:
            self.send("all-reduce", FP32)  # the norm: the mean of those of all ranks


class Bucketed(DeepSpeed):
    """Stages 1 to 3: gradients are copied into a bucket, which is reduced when the next does not fit."""

    gradients_as = "temporary"

    def __init__(self, plan, tape, units):
        super().__init__(plan, tape, units)
        self.capacity, self.bucket = zero.bucket(plan), None
        self.waiting = []  # the parameters whose gradients are in the bucket, or are too large for it

    def put(self, parameter):
        """What fits into the bucket is copied, and its own storage goes."""
        if self.waiting and sum(p.numel for p in self.waiting) + parameter.numel > self.capacity:
            self.reduce()
        if parameter.numel <= self.capacity:
            self.gradients.pop(parameter, None)
            parameter.gradient = None
        self.waiting.append(parameter)

    def update(self, largest: int, mine: int):
        """What a step makes of this rank's gradients, of ``mine`` numbers; the largest tensor of them has ``largest``."""
        norm = self.hold("temporary", "a gradient in fp64, for its norm", largest, FP64)
        del norm
        self.held = self.hold("temporary", "gradients of this rank's part, flat", mine)
        if self.itemsize != FP32:
            self.held = self.hold("temporary", "gradients of this rank's part, in fp32", mine, FP32)

    def empty(self):
        for parameter in self.waiting:
            self.gradients.pop(parameter, None)
            parameter.gradient = None
        self.waiting.clear()


class Stage2(Bucketed):
    """The bucket is there from the first gradient of a backward to the end of it."""

    def __init__(self, plan, tape, units):
        super().__init__(plan, tape, units)
        self.size = zero.partition(plan)
        self.owned = {}  # parameter → {rank: numbers of it in that rank's part}
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel
            ranks = range(start // self.size, (end - 1) // self.size + 1)
            self.owned[parameter] = {r: min(end, (r + 1) * self.size) - max(start, r * self.size) for r in ranks}
            start = end
        self.touched = [parameter.numel for parameter in self.parameters if plan.rank in self.owned[parameter]]
        self.mine = None  # the gradients that this rank keeps of this micro-batch
        self.summed = None  # and of those before

    def when_whole(self, parameter):
        self.open()
        self.put(parameter)

    def open(self):
        self.bucket = self.bucket or self.hold("all-reduce buckets", "bucket", self.capacity)

    def reduce(self):
        """What belongs to several ranks is cut and put together again; all of it is all-reduced nevertheless."""
        slices = self.slices()
        for numel in zero.sums(slices, self.capacity):
            together = self.hold("all-reduce buckets", "bucket, rank after rank", numel) if len(slices) > 1 else None
            self.send("all-reduce", numel * self.itemsize)
            del together
        if self.mine is None and any(self.plan.rank in self.owned[parameter] for parameter in self.waiting):
            category = "temporary" if self.summed else "gradients"  # these are added to those of the first micro-batch
            self.mine = self.hold(category, "gradients of parameters in this rank's part", sum(self.touched))
        self.empty()

    def slices(self) -> list[int]:
        """The bucket's numbers, cut where the rank changes to which they belong."""
        owned = [item for parameter in self.waiting for item in self.owned[parameter].items()]
        return [sum(numel for _, numel in slice_) for _, slice_ in groupby(owned, key=itemgetter(0))]

    def after_micro_batch(self):
        self.reduce()
        self.bucket = None
        self.summed, self.mine = self.summed or self.mine, None

    def before_optimizer(self):
        """The norm is computed in fp64; then this rank's part is put together, in fp32."""
        of_largest = min(max(self.touched, default=0), self.size)
        self.update(of_largest, self.size)
        self.send("all-reduce", FP32)  # the norm
        if self.itemsize != FP32:
            self.send("all-reduce", 1)  # whether a number has overflowed
        self.summed = None
        if self.plan.ranks > 1:
            self.send("all-gather", self.size * self.plan.ranks * self.itemsize)


class Stage1(Stage2):
    """Whole gradients are summed up until the last backward has ended; then they are reduced, the first parameter's first."""

    def __init__(self, plan, tape, units):
        super().__init__(plan, tape, units)
        if plan.micro_batches > 1:
            tape.gradients_as = "gradients"  # they outlive a backward

    def when_whole(self, parameter):
        self.open()
        Replicated.when_whole(self, parameter)

    def after_micro_batch(self):
        """Until then the bucket stays, too."""
        Replicated.after_micro_batch(self)
        if self.syncs:
            for parameter in self.parameters:
                self.put(parameter)
            super().after_micro_batch()


class Gathering(Tape):
    """Gathers a parameter for an operator that uses it, and again for the operator's backward.

    Under recomputation an operator saves the gathered parameter, as any other tensor: so it stays, beside the one that
    is gathered for backward, until that is done.
    """

    saves_last = True  # its products are a torch.autograd.Function, which keeps its factors when its forward is done
    gather = None  # the rules' function: a parameter → its storage
    gathered = None, None  # in backward: a parameter and its storage

    def __init__(self, *about):
        super().__init__(*about)
        self.saved_whole = {}  # parameter → its storage

    def linear(self, x, weight, bias=None):
        return self._around(super().linear, x, weight)

    def rms_norm(self, x, weight):
        return self._around(super().rms_norm, x, weight)

    def embedding(self, tokens, weight):
        return self._around(super().embedding, tokens, weight)

    def _around(self, operator, x, weight):
        parameter, whole = self.gathered
        if parameter is not weight:
            whole = self.gather(weight)
        if self.frame and self.frame.running:
            self.saved_whole[weight] = whole
        recorded = len(self.nodes)
        out = operator(x, weight)
        del whole
        if len(self.nodes) > recorded:
            self._wrap(self.nodes[-1], weight)
        return out

    def _wrap(self, node, weight):
        def before():
            self.gathered = None, None
            self.gathered = weight, self.gather(weight)

        def run(gradient, run=node.run):
            made = run(gradient)
            self.saved_whole.pop(weight, None)
            return made

        node.before, node.run = before, run


class Stage3(Bucketed):
    """A parameter is whole only while its operator runs. The bucket stays from step to step: see ``zero.kept``."""

    Tape = Gathering

    def __init__(self, plan, tape, units):
        super().__init__(plan, tape, units)
        tape.gather = self.gather

    def padded(self, parameter) -> int:
        return ceil(parameter.numel / self.plan.ranks) * self.plan.ranks

    def gather(self, parameter):
        """On one rank its part is the whole."""
        if self.plan.ranks == 1:
            return None
        whole = self.hold("all-gather", f"{parameter.name}, gathered", self.padded(parameter))
        self.send("all-gather", whole.size)
        return whole

    def when_whole(self, parameter):
        self.put(parameter)
        self.tape.gathered = None, None

    def reduce(self):
        """The bucket's gradients are packed rank after rank, but for one alone that needs no padding."""
        numel = sum(self.padded(parameter) for parameter in self.waiting)
        alone = len(self.waiting) == 1 and numel == self.waiting[0].numel
        packed = None if alone else self.hold("reduce-scatter", "packed gradients", numel)
        self.send("reduce-scatter", numel * self.itemsize)
        del packed
        self.empty()

    def after_micro_batch(self):
        self.reduce()

    def before_optimizer(self):
        """The norm is computed in fp64; then the gradients are put together, group by group, in fp32."""
        self.update(max(map(self.padded, self.parameters)) // self.plan.ranks, max(zero.updated(self.plan)))
        self.send("all-reduce", FP64)  # the norm


RULES = {
    "deepspeed-0": DeepSpeed,
    "deepspeed-1": Stage1,
    "deepspeed-2": Stage2,
    "deepspeed-3": Stage3,
}
