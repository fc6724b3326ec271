"""What each strategy adds to a step's memory: when a unit's parameters are gathered and freed, and its gradients reduced.

``Replicated`` (one process, DDP), ``FSDP1`` and ``FSDP2`` (and those in planner/parallel/deepspeed.py) are called around each
unit's forward and backward, where PyTorch calls its own hooks. Sizes only (planner/ops/autograd.py). Imports no torch.

Sources: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py (FSDP1), torch/distributed/fsdp/_fully_shard/
(FSDP2), and traces of real steps.
"""

from math import ceil, prod

from planner.ops.autograd import Autograd, SizedParameter


class Unit:
    """What is gathered together. The root takes what no other unit did.

    parts: among how many ranks it is cut. flat: as one flat tensor (FSDP1), or each parameter along its first
    dimension (FSDP2); both round up to whole parts.
    """

    def __init__(self, modules, tied: dict, parts: int, flat: bool, itemsize: int):
        self.parts, self.flat, self.modules = parts, flat, modules
        together = len(modules) == 1 or (modules and modules[0].with_next)
        self.kind = modules[-1].kind if together else "root"
        self.parameters = {
            (module, name): SizedParameter(name, shape, itemsize, name not in module.frozen, name in module.packed)
            for module in modules
            for name, shape in module.parameters.items()
            if name not in tied
        }
        self.everywhere = [p for (module, name), p in self.parameters.items() if name in module.everywhere]
        self.whole = None  # the gathered parameters, while they are there
        self.part = None  # what is kept of them after forward, where only a part is

    def numel(self, trained: bool = False) -> int:
        return sum(parameter.numel for parameter in self._chosen(trained))

    def shard(self, trained: bool = False, parts: int | None = None) -> int:
        """How many numbers of its parameters (or of those trained) one rank holds."""
        return sum(self.tensors(trained, parts))

    def tensors(self, trained: bool = False, parts: int | None = None) -> list[int]:
        """The numbers of each tensor that one rank holds of it: these the optimizer updates."""
        parts = parts or self.parts
        shapes = [parameter.shape for parameter in self._chosen(trained)]
        if self.flat:
            return [ceil(sum(map(prod, shapes)) / parts)] if shapes else []
        return [ceil(shape[0] / parts) * prod(shape[1:]) for shape in shapes]

    def _chosen(self, trained):
        return [parameter for parameter in self.parameters.values() if parameter.trained or not trained]


class Replicated:
    """Every rank holds the whole model, and each parameter its gradient."""

    gradients_as = "gradients"

    def __init__(self, plan, tape: Autograd, units: list[Unit]):
        self.plan, self.tape, self.units, self.root = plan, tape, units, units[0]
        self.syncs = True  # whether this micro-batch's gradients are reduced
        self.gradients = {}  # what stays of a gradient until the optimizer: parameter or unit → storage
        tape.gradients_as, tape.when_whole = self.gradients_as, self.when_whole

    def when_whole(self, parameter):
        """The first micro-batch's gradient stays; the others' are added to it where it is."""
        self.gradients.setdefault(parameter, parameter.gradient)
        parameter.gradient = None

    # What a unit's hooks do, as PyTorch calls them: here nothing. unit: a ``Unit``.

    def before_forward(self, unit):
        pass

    after_forward = before_backward = after_backward = before_forward

    def after_micro_batch(self):
        """What the first has left are the gradients; what the others make is added to them, and goes."""
        self.tape.gradients_as = "temporary"

    def before_optimizer(self):
        pass


class Sharded(Replicated):
    """What FSDP1 and FSDP2 have in common: a unit is gathered, freed, and gathered again, one ahead, for backward."""

    gradients_as = "reduce-scatter"

    def when_whole(self, parameter):
        pass  # the unit takes its parameters' gradients together

    def after_micro_batch(self):
        pass

    @property
    def mixed(self) -> bool:
        """Whether modules compute in another number format than the parameters have."""
        return self.plan.compute_itemsize != self.plan.itemsize

    def gathered_size(self, unit) -> int:
        """Bytes of a unit's parameters when they are whole, padded to equal parts, in the format of the computation."""
        return unit.shard() * unit.parts * self.plan.compute_itemsize

    def hold(self, category, unit, name, size):
        """A storage of ``size`` bytes that lives as long as what is returned; its term has the unit's kind in its name."""
        itemsize = self.plan.compute_itemsize if category == "all-gather" else self.plan.itemsize
        return self.tape.hold(category, f"{unit.kind}: {name}", size, itemsize)

    def stays_after_forward(self, unit) -> bool:
        """Whether a unit's gathered parameters wait for backward."""
        return self.plan.reshard == "false" or unit is self.root  # backward begins with the root

    def before_backward(self, unit):
        """Gather the unit, and ahead of time those whose backward follows: one, or as many as --prefetch says."""
        self.gather_again(unit)
        index = self.units.index(unit) or len(self.units)  # in backward the last unit follows the root
        ahead = self.plan.prefetch if self.plan.prefetch and unit is not self.root else 1
        for following in self.units[max(1, index - ahead) : index][::-1]:
            self.gather_ahead(following)

    def reduced(self, unit):
        """This rank's part of a unit's gradient: it stays, or is added to what is there."""
        category = "temporary" if unit in self.gradients else "gradients"
        part = self.hold(category, unit, "gradients, this rank's part", unit.shard(trained=True) * self.plan.itemsize)
        if not self.plan.offload:  # then it goes to the CPU's memory
            self.gradients.setdefault(unit, part)


class FSDP1(Sharded):
    """A unit is one flat tensor: gathered in place, its gradients packed into another."""

    def before_forward(self, unit):
        self.gather_again(unit)

    def after_forward(self, unit):
        if not self.stays_after_forward(unit):
            unit.whole = None

    def gather_again(self, unit):
        """The whole flat tensor is new; in mixed precision the shard is cast first, and the cast goes when it is there."""
        if unit.whole is None:
            size = unit.shard() * self.plan.compute_itemsize
            cast = self.hold("all-gather", unit, "shard, cast", size) if self.mixed else None
            unit.whole = self.hold("all-gather", unit, "gathered parameters", self.gathered_size(unit))
            del cast

    gather_ahead = gather_again

    def after_backward(self, unit):
        """Pack the gradients, cast and pad where it must be, reduce; without synchronisation they wait whole."""
        size = unit.numel(trained=True)
        packed = self.hold("reduce-scatter", unit, "packed gradients", size * self.plan.compute_itemsize)
        for parameter in unit.parameters.values():
            parameter.gradient = None
        if not self.syncs:
            self.gradients.setdefault((unit, "whole"), packed)
            if self.plan.reshard != "false":  # what is not freed after forward stays until gradients are reduced
                unit.whole = None
            return
        unit.whole = None
        held = [packed]  # has been added to the one that waited, and is still there
        if self.mixed:
            held.append(self.hold("reduce-scatter", unit, "packed gradients, in fp32", size * self.plan.itemsize))
        if unit.shard(trained=True) * unit.parts != size:
            padded = unit.shard(trained=True) * unit.parts * self.plan.itemsize
            held.append(self.hold("reduce-scatter", unit, "packed gradients, padded", padded))
        self.reduced(unit)
        self.gradients.pop((unit, "whole"), None)


WIDE_GRADIENTS = (2, 15)  # from this PyTorch on, FSDP2 leaves norms' gradients in fp32, where the norms are computed


class FSDP2(Sharded):
    """Parameters arrive in one buffer and are copied out of it; gradients are packed into another."""

    def __init__(self, plan, *about):
        self.alone = plan.shards == 1  # a mesh with one shard: nothing is gathered, but copied all the same
        if self.alone:
            self.gradients_as = "temporary"
        super().__init__(plan, *about)
        self.tape.wide_gradients = self.mixed and plan.torch >= WIDE_GRADIENTS
        self.ahead = {}  # unit → the buffer of what was gathered ahead for it
        self.arrived = None  # in forward, the last unit's buffer
        self.packed = None  # the last unit's packed gradients
        self.all_reduced = []  # gradients that have been added to those of earlier micro-batches

    def stays_after_forward(self, unit):
        """So does a head that is apart."""
        return super().stays_after_forward(unit) or unit.kind == "head"

    def when_whole(self, parameter):
        """Without synchronisation, whole gradients wait, in fp32 at least, and those to come are added in place."""
        if not self.syncs and parameter not in self.gradients:
            name, numel = f"gradient of {parameter.name}, waiting", parameter.times * parameter.numel
            size = numel * self.plan.itemsize
            waiting = self.tape.hold("reduce-scatter", name, size, self.plan.itemsize) if self.mixed else None
            self.gradients[parameter] = waiting or parameter.gradient
        if parameter in self.gradients:
            parameter.gradient = None

    def reduced(self, unit):
        """HSDP sums it up among the replicas; what is then added to what is there waits for the end of backward."""
        if self.plan.replicas > 1 and unit in self.gradients:
            size = unit.shard(trained=True) * self.plan.itemsize
            self.all_reduced.append(self.hold("all-reduce buckets", unit, "gradients, summed over replicas", size))
        else:
            super().reduced(unit)

    def settle(self, unit):
        """Make this rank's part of a gradient of what a tensor group has: add up, or cut; each in a new tensor."""
        for parameter in unit.parameters.values():
            if parameter in unit.everywhere or parameter.times > 1:
                waiting = self.gradients.pop(parameter, None)
                itemsize = self.plan.itemsize if waiting else parameter.gradient.itemsize
                size = parameter.numel * itemsize
                settled = self.hold(self.gradients_as, unit, f"gradient of {parameter.name}, settled", size)
                parameter.gradient, settled, waiting = settled, None, None

    def arrive(self, unit):
        """The buffer in which a unit's parameters arrive, all ranks' parts one after the other."""
        if self.alone:
            return None
        size = unit.shard() * self.plan.compute_itemsize
        how = "cast" if self.mixed else "copied to the device" if self.plan.offload else None
        cast = self.hold(self.tape.made_as, unit, f"shard, {how}", size) if how else None
        buffer = self.hold("all-gather", unit, "arriving parameters", self.gathered_size(unit))
        del cast
        return buffer

    def copy_out(self, unit):
        """The parameters as modules see them: each whole, copied from the buffer; from its cast, where there is no buffer."""
        if self.alone and self.mixed:
            copies, cast = [], None  # the last parameter's cast goes when there is the next
            for size in unit.tensors():
                cast = self.hold(self.tape.made_as, unit, "parameter, cast", size * self.plan.compute_itemsize)
                copies.append(self.hold("all-gather", unit, "gathered parameters", cast.size))
            del copies, cast
        unit.whole = self.hold("all-gather", unit, "gathered parameters", self.gathered_size(unit))

    def before_forward(self, unit):
        """Gather the unit, unless it was gathered ahead, and as many ahead as --prefetch says."""
        if unit.whole is None:
            arriving = self.ahead.pop(unit, None) or self.arrive(unit)
            self.arrived = arriving  # the unit before's goes when this one's is there
            del arriving
            self.copy_out(unit)
        index = self.units.index(unit)
        for following in self.units[index + 1 : index + 1 + self.plan.prefetch]:
            self.gather_ahead(following)

    def after_forward(self, unit):
        """Free what was gathered, but for the part that --reshard-after-forward N keeps."""
        if not self.stays_after_forward(unit):
            unit.whole = None
            if self.plan.part_kept:
                part = self.gathered_size(unit) // self.plan.part_kept
                unit.part = self.hold("all-gather", unit, "part kept after forward", part)
        if unit is self.root:
            self.arrived = None

    def gather_ahead(self, unit):
        """Only the buffer: it is copied out of it when the unit's turn comes."""
        if unit.whole is None and unit not in self.ahead:
            self.ahead[unit] = self.arrive(unit)

    def gather_again(self, unit):
        if unit.whole is None:
            self.gather_ahead(unit)
            self.copy_out(unit)
            del self.ahead[unit]
            unit.part = None

    def after_backward(self, unit):
        """Free the parameters; pack the gradients into one buffer, which is there until the next unit has packed its own."""
        if self.syncs and self.plan.tensor > 1:
            self.settle(unit)
        unit.whole = None
        if not self.syncs:
            return
        size = unit.shard(trained=True) * unit.parts * self.plan.itemsize
        if size:
            self.packed = None  # the unit before's goes first
            self.packed = self.hold(self.gradients_as, unit, "packed gradients", size)
            for parameter in unit.parameters.values():
                parameter.gradient = None
                self.gradients.pop(parameter, None)
            self.reduced(unit)
        if unit is self.root:
            self.packed = None
            self.all_reduced.clear()


RULES = {
    "single": Replicated,
    "ddp": Replicated,
    "zero1": Replicated,
    "fsdp1": FSDP1,
    "fsdp2": FSDP2,
}
