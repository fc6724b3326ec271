# SPDX-License-Identifier: BSD-3-Clause
"""Simulate DeepSpeed's stages around each operator and micro-batch: rules for planner/step/simulation.py. No torch.

Sources: DeepSpeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, linear.py and partition_parameters.py,
runtime/engine.py, runtime/fp16/unfused_optimizer.py; and traces of real steps. What each stage stores:
planner/parallel/zero.py.
"""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from math import ceil
from operator import itemgetter

from planner.ops.autograd import FP32, FP64, AbstractParameter, AbstractTensor, Node, Storage
from planner.ops.operators import Tape
from planner.parallel import zero
from planner.parallel.strategies import Replicated, Unit

FLATTENED = 500_000_000  # elements of gradients that stage 0 flattens at most, by DeepSpeed's default


class DeepSpeed(Replicated):
    """Stage 0, and what the stages have in common.

    Attributes:
        parameters: of the model, in order.
        itemsize: bytes per element of the stored parameters.
        sent: a step's collectives: {(kind, bytes): how many}.
    """

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        super().__init__(plan, tape, units)
        self.parameters = list(units[0].parameters.values())
        self.itemsize = plan.parameter_itemsize
        self.sent = Counter()

    def send(self, kind: str, size: int):
        """Count a collective of ``size`` bytes."""
        self.sent[kind, size] += 1

    def hold(self, category: str, name: str, numel: int, itemsize: int | None = None) -> Storage:
        """Return new storage of ``numel`` elements, by default in the parameters' format."""
        itemsize = itemsize or self.itemsize
        return self.tape.hold(category, name, numel * itemsize, itemsize)

    def after_micro_batch(self):
        """After the last one, copy the gradients into one tensor, reduce it, and copy them back."""
        super().after_micro_batch()
        if self.syncs:
            for numel in zero.grouped_sums([parameter.numel for parameter in self.parameters], FLATTENED):
                flat = self.hold("all-reduce buckets", "gradients, flattened", numel)
                self.send("all-reduce", flat.size)
                del flat

    def before_optimizer(self):
        """Cast the gradients to fp32, if the parameters are in bf16."""
        if self.itemsize != FP32:
            self.held = self.hold("temporary", "gradients in fp32", sum(p.numel for p in self.parameters), FP32)
        elif self.plan.clip:
            self.send("all-reduce", FP32)  # the norm: the mean of all ranks' norms


class Bucketed(DeepSpeed):
    """Stages 1 to 3: gradients are copied into a bucket, which is reduced when the next one does not fit.

    Attributes:
        capacity: elements of the bucket; ``bucket`` is its storage, while it is alive.
        waiting: the parameters whose gradients are in the bucket, or are too large for it.
    """

    gradient_category = "temporary"

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        super().__init__(plan, tape, units)
        self.capacity, self.bucket = zero.bucket_numel(plan), None
        self.waiting = []

    def add_to_bucket(self, parameter: AbstractParameter):
        """Copy a gradient into the bucket, if it fits, and free its own storage."""
        if self.waiting and sum(p.numel for p in self.waiting) + parameter.numel > self.capacity:
            self.reduce()
        if parameter.numel <= self.capacity:
            self.gradients.pop(parameter, None)
            parameter.gradient = None
        self.waiting.append(parameter)

    def reduce(self):
        """Reduce the gradients of the bucket, and empty it."""
        raise NotImplementedError

    def hold_for_update(self, largest: int, mine: int):
        """Allocate what the optimizer makes of this rank's gradients.

        Args:
            largest: elements of the largest of them.
            mine: elements of all of them.
        """
        norm = self.hold("temporary", "a gradient in fp64, for its norm", largest, FP64)
        del norm
        self.held = self.hold("temporary", "gradients of this rank's part, flat", mine)
        if self.itemsize != FP32:
            self.held = self.hold("temporary", "gradients of this rank's part, in fp32", mine, FP32)

    def clear_bucket(self):
        """Free the gradients that were reduced."""
        for parameter in self.waiting:
            self.gradients.pop(parameter, None)
            parameter.gradient = None
        self.waiting.clear()


class Stage2(Bucketed):
    """The bucket is alive from the first gradient of a backward to its end.

    Attributes:
        size: elements of a rank's part.
        owned: {parameter: {rank: elements of it in that rank's part}}.
        overlapping: elements of each parameter that overlaps this rank's part.
        micro_batch_gradients: those that this rank keeps of this micro-batch.
        summed_gradients: those of earlier micro-batches.
    """

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        super().__init__(plan, tape, units)
        self.size = zero.partition_numel(plan)
        self.owned = {}
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel
            ranks = range(start // self.size, (end - 1) // self.size + 1)
            self.owned[parameter] = {r: min(end, (r + 1) * self.size) - max(start, r * self.size) for r in ranks}
            start = end
        self.overlapping = [parameter.numel for parameter in self.parameters if plan.rank in self.owned[parameter]]
        self.micro_batch_gradients = self.summed_gradients = None

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Copy the gradient into the bucket."""
        self.allocate_bucket()
        self.add_to_bucket(parameter)

    def allocate_bucket(self):
        """Allocate the bucket, unless it is alive."""
        self.bucket = self.bucket or self.hold("all-reduce buckets", "bucket", self.capacity)

    def reduce(self):
        """Reduce the bucket. If it belongs to several ranks, it is cut and packed again, but all of it is all-reduced."""
        slices = self.slices()
        for numel in zero.grouped_sums(slices, self.capacity):
            packed = self.hold("all-reduce buckets", "bucket, rank after rank", numel) if len(slices) > 1 else None
            self.send("all-reduce", numel * self.itemsize)
            del packed
        owns_some = any(self.plan.rank in self.owned[parameter] for parameter in self.waiting)
        if self.micro_batch_gradients is None and owns_some:
            category = "temporary" if self.summed_gradients else "gradients"  # added to the first micro-batch's
            name = "gradients of parameters in this rank's part"
            self.micro_batch_gradients = self.hold(category, name, sum(self.overlapping))
        self.clear_bucket()

    def slices(self) -> list[int]:
        """Return the bucket's elements, cut where the owning rank changes."""
        owned = [item for parameter in self.waiting for item in self.owned[parameter].items()]
        return [sum(numel for _, numel in slice_) for _, slice_ in groupby(owned, key=itemgetter(0))]

    def after_micro_batch(self):
        """Reduce the rest of the bucket, and free it."""
        self.reduce()
        self.bucket = None
        self.summed_gradients = self.summed_gradients or self.micro_batch_gradients
        self.micro_batch_gradients = None

    def before_optimizer(self):
        """Compute the norm in fp64; then flatten this rank's gradients, in fp32."""
        largest = min(max(self.overlapping, default=0), self.size)
        padding = self.size - sum(ranks.get(self.plan.rank, 0) for ranks in self.owned.values())
        padding = self.hold("gradients", "padding of the last rank's part", padding) if padding else None
        self.hold_for_update(largest, self.size)
        del padding
        self.send("all-reduce", FP32)  # the norm
        if self.itemsize != FP32:
            self.send("all-reduce", 1)  # whether an element has overflowed
        self.summed_gradients = None
        if self.plan.ranks > 1:
            self.send("all-gather", self.size * self.plan.ranks * self.itemsize)


class Stage1(Stage2):
    """Whole gradients are summed until the last backward ends; then they are reduced, the first parameter's first."""

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        super().__init__(plan, tape, units)
        if plan.micro_batches > 1:
            tape.gradient_category = "gradients"  # they outlive a backward

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Allocate the bucket, and keep the gradient."""
        self.allocate_bucket()
        Replicated.on_gradient_ready(self, parameter)

    def after_micro_batch(self):
        """After the last one, reduce all gradients; until then the bucket stays alive, too."""
        Replicated.after_micro_batch(self)
        if self.syncs:
            for parameter in self.parameters:
                self.add_to_bucket(parameter)
            super().after_micro_batch()


class GatheringTape(Tape):
    """Gather a parameter for each operator that uses it, and again for the operator's backward.

    Under recomputation an operator saves the gathered parameter like any other tensor: it stays alive, next to the one
    that is gathered for backward, until that is done.

    Attributes:
        gather: the rules' function: a parameter → its storage, or None.
        gathered: in backward, (a parameter, its storage).
        saved_parameters: {parameter: its storage}, saved in recomputation.
    """

    saves_after_output = True  # a linear layer is a torch.autograd.Function, which saves when its forward is done
    gather: Callable[[AbstractParameter], Storage | None]
    gathered: tuple[AbstractParameter | None, Storage | None] = None, None

    def __init__(self, *options):
        super().__init__(*options)
        self.saved_parameters = {}

    def linear(
        self, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter | None = None
    ) -> AbstractTensor:
        """Gather the weight around ``Tape.linear``."""
        return self._around(super().linear, x, weight)

    def rms_norm(self, x: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
        """Gather the weight around ``Tape.rms_norm``."""
        return self._around(super().rms_norm, x, weight)

    def embedding(self, tokens: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
        """Gather the weight around ``Tape.embedding``."""
        return self._around(super().embedding, tokens, weight)

    def _around(self, operator, x, weight):
        parameter, gathered = self.gathered
        if parameter is not weight:
            gathered = self.gather(weight)
        if self.frame and self.frame.recomputing:
            self.saved_parameters[weight] = gathered
        recorded = len(self.nodes)
        out = operator(x, weight)
        del gathered
        if len(self.nodes) > recorded:
            self._gather_in_backward(self.nodes[-1], weight)
        return out

    def _gather_in_backward(self, node: Node, weight: AbstractParameter):
        def pre_hook():
            self.gathered = None, None
            self.gathered = weight, self.gather(weight)

        def run(gradient, run=node.run):
            made = run(gradient)
            self.saved_parameters.pop(weight, None)
            return made

        node.pre_hook, node.run = pre_hook, run


class Stage3(Bucketed):
    """A parameter is gathered only while its operator runs. The bucket persists: see ``zero.persistent_state``."""

    Tape = GatheringTape

    def __init__(self, plan, tape: GatheringTape, units: list[Unit]):
        super().__init__(plan, tape, units)
        self.tape: GatheringTape = tape
        tape.gather = self.gather

    def padded_numel(self, parameter: AbstractParameter) -> int:
        """Return a parameter's elements, padded to equal shards."""
        return ceil(parameter.numel / self.plan.ranks) * self.plan.ranks

    def gather(self, parameter: AbstractParameter) -> Storage | None:
        """All-gather a parameter. On one rank its shard is the parameter."""
        if self.plan.ranks == 1:
            return None
        gathered = self.hold("all-gather", f"{parameter.name}, gathered", self.padded_numel(parameter))
        self.send("all-gather", gathered.size)
        return gathered

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Copy the gradient into the bucket, and free the gathered parameter."""
        self.add_to_bucket(parameter)
        self.tape.gathered = None, None

    def reduce(self):
        """Reduce-scatter the bucket's gradients, packed rank after rank, except a single one that needs no padding."""
        numel = sum(self.padded_numel(parameter) for parameter in self.waiting)
        single = len(self.waiting) == 1 and numel == self.waiting[0].numel
        packed = None if single else self.hold("reduce-scatter", "packed gradients", numel)
        self.send("reduce-scatter", numel * self.itemsize)
        del packed
        self.clear_bucket()

    def after_micro_batch(self):
        """Reduce the rest of the bucket."""
        self.reduce()

    def before_optimizer(self):
        """Compute the norm in fp64; then flatten the gradients, group by group, in fp32."""
        largest = max(map(self.padded_numel, self.parameters)) // self.plan.ranks
        self.hold_for_update(largest, max(zero.optimizer_numels(self.plan)))
        self.send("all-reduce", FP64)  # the norm


RULES = {
    "deepspeed-0": DeepSpeed,
    "deepspeed-1": Stage1,
    "deepspeed-2": Stage2,
    "deepspeed-3": Stage3,
}
