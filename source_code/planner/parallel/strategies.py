# SPDX-License-Identifier: BSD-3-Clause
"""Simulate how DDP and FSDP gather and free units, and reduce gradients: rules for planner/step/simulation.py.

``Replicated`` (one process, DDP), ``FSDP1``, and ``FSDP2`` (and those in planner/parallel/deepspeed.py) are called around
each unit's forward and backward, where PyTorch calls its own hooks. Imports no torch.

Sources: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py (FSDP1), torch/distributed/fsdp/_fully_shard/
(FSDP2), and traces of real steps.
"""

from math import ceil, prod

from planner.ops.autograd import AbstractParameter, AbstractTensor, Storage
from planner.ops.operators import Tape


class Unit:
    """Parameters that are gathered together. The root has those that belong to no other unit.

    Attributes:
        modules: whose parameters they are.
        shards: ranks among which they are sharded.
        flat: sharded as one flat tensor (FSDP1), or each parameter along one dimension (FSDP2); both are padded to equal
            shards.
        alignment: elements to a multiple of which a flat tensor pads what lies before each parameter; 1: no padding.
        shard_dim: see ``Plan``.
        kind: the name that terms have of its tensors.
        parameters: {(module, name): AbstractParameter}, without those tied to another. FSDP1 computes gradients of all
            parameters of a flat tensor if one of them is trained.
        updated: those that the optimizer updates.
        replicated: those that every rank of a tensor group has whole.
        gathered: the storage of the gathered parameters, while it is alive.
        retained: the storage of the part that stays after forward, with --reshard-after-forward N.
        nested: the unit of the rank's experts, if they are spread over ranks; its parameters are no others' here.
    """

    def __init__(
        self,
        modules: list,
        tied: dict,
        shards: int,
        flat: bool,
        itemsize: int,
        alignment: int = 1,
        shard_dim: int = 0,
        spread: bool = False,
    ):
        self.shards, self.flat, self.modules, self.alignment = shards, flat, modules, alignment
        self.shard_dim = shard_dim
        wrapped = len(modules) == 1 or (modules and modules[0].grouped_with_next)
        self.kind = "experts" if spread else modules[-1].kind if wrapped else "root"
        self.parameters = {
            (module, name): AbstractParameter(
                name, shape, itemsize, trained=name not in module.frozen, quantized=name in module.quantized
            )
            for module in modules
            for name, shape in module.parameters.items()
            if name not in tied and (name in module.spread) == spread
        }
        self.nested: Unit | None = None
        self.updated = [parameter for parameter in self.parameters.values() if parameter.trained]
        if flat and self.updated:
            for parameter in self.parameters.values():
                parameter.trained = True
        self.replicated = [p for (module, name), p in self.parameters.items() if name in module.replicated]
        self.gathered: Storage | None = None
        self.retained: Storage | None = None

    def numel(self, trained: bool = False) -> int:
        """Return the elements of all parameters, or of those that have gradients, a flat tensor's padding included."""
        if self.flat:
            return self._flat()[1] if self._chosen(trained) else 0
        return sum(parameter.numel for parameter in self._chosen(trained))

    def shard_numel(self, trained: bool = False) -> int:
        """Return the elements that one rank holds of all parameters, or of those that have gradients, padding included."""
        return sum(self.shard_numels(trained))

    def shard_numels(self, trained: bool = False) -> list[int]:
        """Return the elements of each tensor that one rank holds, or holds a gradient of, padding included."""
        if self.flat:
            return [ceil(self._flat()[1] / self.shards)] if self._chosen(trained) else []
        return [self._shard_numel_of(parameter) for parameter in self._chosen(trained)]

    def _shard_numel_of(self, parameter: AbstractParameter) -> int:
        if self.dim_of(parameter):
            return parameter.numel // self.shards
        return ceil(parameter.shape[0] / self.shards) * prod(parameter.shape[1:])

    def dim_of(self, parameter: AbstractParameter) -> int:
        """Return the dimension along which FSDP2 shards a parameter. Only the first may be padded."""
        dim, shape = self.shard_dim, parameter.shape
        return dim if dim < len(shape) and shape[dim] % self.shards == 0 and self.shards > 1 else 0

    def updated_numels(self, rank: int) -> list[int]:
        """Return the elements of each tensor that the optimizer of a rank updates.

        They are those of ``shard_numels``, unless a flat tensor has frozen parameters, too: then (with
        ``use_orig_params``) they are what lies in this rank's shard of each parameter that is trained.
        """
        if not self.flat or len(self.updated) in (0, len(self.parameters)):
            return self.shard_numels(trained=True)
        (shard,), (begins, _) = self.shard_numels(), self._flat()
        first = rank % self.shards * shard
        ends = [min(begins[p] + p.numel, first + shard) - max(begins[p], first) for p in self.updated]
        return [numel for numel in ends if numel > 0]

    def _flat(self) -> tuple[dict, int]:
        """Return ({parameter: its first element in the flat tensor}, elements of the flat tensor).

        As ``FlatParamHandle._init_flat_param_and_metadata`` does (torch/distributed/fsdp/_flat_param.py).
        """
        begins, total = {}, 0
        for parameter in self.parameters.values():
            total += -total % self.alignment
            begins[parameter] = total
            total += parameter.numel
        return begins, total + (-total % self.shards if self.alignment > 1 else 0)

    def _chosen(self, trained):
        return [parameter for parameter in self.parameters.values() if parameter.trained or not trained]


class Replicated:
    """Every rank holds the whole model, and each parameter's whole gradient.

    Attributes:
        plan: the ``Plan`` whose step runs.
        tape: counts what is alive.
        units: those that the step simulates; the first is the ``root``.
        syncs: whether this micro-batch's gradients are reduced.
        gradients: what stays of a gradient until the optimizer steps: {parameter or unit: storage or tensor}.
    """

    gradient_category = "gradients"

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        self.plan, self.tape, self.units, self.root = plan, tape, units, units[0]
        self.syncs = True
        self.gradients = {}
        tape.gradient_category, tape.on_gradient_ready = self.gradient_category, self.on_gradient_ready

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Keep the first micro-batch's gradient; the others' are added to it in place."""
        self.gradients.setdefault(parameter, parameter.gradient)
        parameter.gradient = None

    # A unit's hooks, as PyTorch calls them: here they do nothing.

    def pre_forward(self, unit: Unit):
        """Run before a unit's forward."""

    post_forward = pre_backward = post_backward = pre_forward

    def after_micro_batch(self):
        """Count later micro-batches' gradients as temporary: they are added to the first one's, and freed."""
        self.tape.gradient_category = "temporary"

    def before_optimizer(self):
        """Run before the optimizer steps."""


class Sharded(Replicated):
    """The common part of FSDP1 and FSDP2: units are gathered, freed, and gathered again for backward, one ahead."""

    gradient_category = "reduce-scatter"

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Do nothing: the unit takes its parameters' gradients together."""

    def after_micro_batch(self):
        """Do nothing: reduced gradients are counted where they are made."""

    @property
    def mixed_precision(self) -> bool:
        """Whether modules compute in another number format than the parameters have."""
        return self.plan.compute_itemsize != self.plan.itemsize

    def gathered_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gathered parameters, padding included, in the format of the computation."""
        return unit.shard_numel() * unit.shards * self.plan.compute_itemsize

    def hold(self, category: str, unit: Unit, name: str, size: int) -> Storage:
        """Return new storage of ``size`` bytes, named after the unit's kind."""
        itemsize = self.plan.compute_itemsize if category == "all-gather" else self.plan.itemsize
        return self.tape.hold(category, f"{unit.kind}: {name}", size, itemsize)

    def stays_gathered(self, unit: Unit) -> bool:
        """Return whether a unit's gathered parameters stay from forward to backward."""
        return self.plan.reshard == "false" or unit is self.root  # backward begins with the root

    def unshard(self, unit: Unit):
        """Gather a unit, unless it is gathered."""
        raise NotImplementedError

    def prefetch(self, unit: Unit):
        """Gather a unit ahead."""
        raise NotImplementedError

    def pre_backward(self, unit: Unit):
        """Gather the unit, and prefetch those whose backward follows: one, or as many as --prefetch says."""
        self.unshard(unit)
        index = self.units.index(unit) or len(self.units)  # in backward the last unit follows the root
        ahead = self.plan.prefetch if self.plan.prefetch and unit is not self.root else 1
        for following in self.units[max(1, index - ahead) : index][::-1]:
            self.prefetch(following)

    def keep_reduced(self, unit: Unit):
        """Allocate this rank's shard of a unit's reduced gradient: it stays, or is added to the one that does."""
        category = "temporary" if unit in self.gradients else "gradients"
        size = unit.shard_numel(trained=True) * self.plan.itemsize
        shard = self.hold(category, unit, "gradients, this rank's part", size)
        if not self.plan.offload:  # offloaded, it goes to the CPU's memory
            self.gradients.setdefault(unit, shard)


class FSDP1(Sharded):
    """A unit is one flat tensor: gathered in place, its gradients packed into another."""

    def pre_forward(self, unit: Unit):
        """Gather the unit."""
        self.unshard(unit)

    def post_forward(self, unit: Unit):
        """Free the unit, unless it stays until backward."""
        if not self.stays_gathered(unit):
            unit.gathered = None

    def unshard(self, unit: Unit):
        """Allocate the gathered flat tensor; in mixed precision the shard is cast first, and the cast freed afterwards."""
        if unit.gathered is None:
            size = unit.shard_numel() * self.plan.compute_itemsize
            cast = self.hold("all-gather", unit, "shard, cast", size) if self.mixed_precision else None
            unit.gathered = self.hold("all-gather", unit, "gathered parameters", self.gathered_bytes(unit))
            del cast

    def prefetch(self, unit: Unit):
        """Gather ahead, unless the unit's output needs no gradient: see ``needed_in_backward``."""
        if needed_in_backward(unit):
            self.unshard(unit)

    def post_backward(self, unit: Unit):
        """Pack the gradients, cast and pad them if necessary, and reduce them; without sync they wait unsharded."""
        size, itemsize = unit.numel(trained=True), self.plan.compute_itemsize
        padding = size - sum(parameter.numel for parameter in unit.parameters.values()) if size else 0
        zeros = self.hold("reduce-scatter", unit, "gradients of padding", padding * itemsize) if padding else None
        packed = self.hold("reduce-scatter", unit, "packed gradients", size * itemsize)
        del zeros
        for parameter in unit.parameters.values():
            parameter.gradient = None
        if not self.syncs:
            self.gradients.setdefault((unit, "unsharded"), packed)
            if self.plan.reshard != "false":  # what is not freed after forward stays until gradients are reduced
                unit.gathered = None
            return
        unit.gathered = None
        held = [packed]  # was added to the one that waited, and is still alive
        if self.mixed_precision:
            held.append(self.hold("reduce-scatter", unit, "packed gradients, in fp32", size * self.plan.itemsize))
        if unit.shard_numel(trained=True) * unit.shards != size:
            padded = unit.shard_numel(trained=True) * unit.shards * self.plan.itemsize
            held.append(self.hold("reduce-scatter", unit, "packed gradients, padded", padded))
        self.keep_reduced(unit)
        self.gradients.pop((unit, "unsharded"), None)


def needed_in_backward(unit: Unit) -> bool:
    """Return whether FSDP1 gathers a unit for backward: not embeddings that are frozen, whose output needs no gradient."""
    return bool(unit.updated) or unit.kind != "embedding"


# From this PyTorch on, FSDP2 leaves norms' gradients in the format of their computation
NORM_GRADIENTS_IN_FP32 = (2, 15)


class FSDP2(Sharded):
    """Parameters are gathered into a buffer and copied out of it; gradients are packed into another.

    Attributes:
        prefetched: {unit: the buffer that was gathered ahead for it}.
        all_gather_state: in forward, the last unit's buffer.
        reduce_scatter_states: the last units' packed gradients, ``Plan.reduce_buffers`` of them.
        all_reduce_states: gradients that were added to those of earlier micro-batches.
    """

    def __init__(self, plan, tape: Tape, units: list[Unit]):
        if plan.shards == 1:  # nothing is gathered, but parameters are copied all the same
            self.gradient_category = "temporary"
        super().__init__(plan, tape, units)
        self.tape.casts_inputs = self.mixed_precision
        self.tape.norm_gradients_in_fp32 = self.mixed_precision and plan.torch >= NORM_GRADIENTS_IN_FP32
        self.prefetched = {}
        self.all_gather_state = None
        self.reduce_scatter_states, self.all_reduce_states = [], []

    def stays_gathered(self, unit: Unit) -> bool:
        """Return whether a unit stays gathered until backward; a head that is a unit of its own does, too."""
        return super().stays_gathered(unit) or unit.kind == "head"

    def on_gradient_ready(self, parameter: AbstractParameter):
        """Without sync, keep the unsharded gradient, in fp32 at least; later ones are added to it in place."""
        if not self.syncs and parameter not in self.gradients:
            name, numel = f"gradient of {parameter.name}, waiting", parameter.gradient_copies * parameter.numel
            size = numel * self.plan.itemsize
            mixed = self.mixed_precision
            waiting = self.tape.hold("reduce-scatter", name, size, self.plan.itemsize) if mixed else None
            self.gradients[parameter] = waiting or parameter.gradient
        if parameter in self.gradients:
            parameter.gradient = None

    def keep_reduced(self, unit: Unit):
        """Allocate this rank's shard of a reduced gradient. One summed over replicas waits for the end of backward."""
        if self.plan.replicas > 1 and unit in self.gradients:
            size = unit.shard_numel(trained=True) * self.plan.itemsize
            summed = self.hold("all-reduce buckets", unit, "gradients, summed over replicas", size)
            self.all_reduce_states.append(summed)
        else:
            super().keep_reduced(unit)

    def redistribute_gradients(self, unit: Unit):
        """Reduce or cut the gradients that a tensor group does not hold as it holds the parameters: into new tensors."""
        for parameter in unit.parameters.values():
            replicated = parameter in unit.replicated and not self.plan.blueprint.tensor_parallel.logits
            if replicated or parameter.gradient_copies > 1:
                waiting = self.gradients.pop(parameter, None)
                gradient = parameter.gradient
                itemsize = gradient.itemsize if gradient and not waiting else self.plan.itemsize
                name = f"gradient of {parameter.name}, redistributed"
                redistributed = self.hold(self.gradient_category, unit, name, parameter.numel * itemsize)
                parameter.gradient = AbstractTensor(redistributed, parameter.numel, itemsize)
                del gradient, redistributed, waiting

    def all_gather_copy_in(self, unit: Unit) -> Storage | None:
        """Return the buffer that a unit's parameters are gathered into, all ranks' shards one after another."""
        if unit.shards == 1:
            return None
        size = unit.shard_numel() * self.plan.compute_itemsize
        how = "cast" if self.mixed_precision else "copied to the device" if self.plan.offload else None
        cast = self.hold(self.tape.category, unit, f"shard, {how}", size) if how else None
        buffer = self.hold("all-gather", unit, "all-gather buffer", self.gathered_bytes(unit))
        del cast
        return buffer

    def all_gather_copy_out(self, unit: Unit):
        """Copy each parameter out of the buffer; from its cast, if there is no buffer."""
        if unit.shards == 1 and self.mixed_precision:
            copies, cast = [], None  # the last parameter's cast is freed when the next one exists
            for numel in unit.shard_numels():
                size = numel * self.plan.compute_itemsize
                cast = self.hold(self.tape.category, unit, "parameter, cast", size)
                copies.append(self.hold("all-gather", unit, "gathered parameters", cast.size))
            del copies, cast
        unit.gathered = self.hold("all-gather", unit, "gathered parameters", self.gathered_bytes(unit))
        # What is sharded along another dimension than the first is copied once more, to be put together along it.
        pieces = sum(parameter.numel for parameter in unit.parameters.values() if unit.dim_of(parameter))
        if pieces:
            self.hold("all-gather", unit, "gathered pieces", pieces * self.plan.compute_itemsize)

    def pre_forward(self, unit: Unit):
        """Gather the unit, unless it was prefetched, and prefetch as many as --prefetch says."""
        if unit.gathered is None:
            buffer = self.prefetched.pop(unit, None) or self.all_gather_copy_in(unit)
            self.all_gather_state = buffer  # the unit before's is freed when this one's exists
            del buffer
            self.all_gather_copy_out(unit)
        if not self.plan.prefetch:
            return
        index = self.units.index(unit)
        for following in self.units[index + 1 : index + 1 + self.plan.prefetch]:
            self.prefetch(following)

    def post_forward(self, unit: Unit):
        """Free the gathered parameters, except the part that --reshard-after-forward N retains."""
        if not self.stays_gathered(unit):
            unit.gathered = None
            if self.plan.reshard_degree:
                size = self.gathered_bytes(unit) // self.plan.reshard_degree
                unit.retained = self.hold("all-gather", unit, "part retained after forward", size)
        if unit is self.root:
            self.all_gather_state = None

    def prefetch(self, unit: Unit):
        """Gather into the buffer; it is copied out when the unit's turn comes."""
        if unit.gathered is None and unit not in self.prefetched:
            self.prefetched[unit] = self.all_gather_copy_in(unit)

    def unshard(self, unit: Unit):
        """Gather a unit for its backward."""
        if unit.gathered is None:
            self.prefetch(unit)
            self.all_gather_copy_out(unit)
            del self.prefetched[unit]
            unit.retained = None

    def cut_gradients(self, unit: Unit):
        """Copy each gradient that is reduced along another dimension than the first, so that a rank's part is contiguous."""
        for parameter in filter(unit.dim_of, unit.parameters.values()):
            waiting = self.gradients.pop(parameter, None)
            if waiting or parameter.gradient:
                gradient = parameter.gradient
                itemsize = gradient.itemsize if gradient and not waiting else self.plan.itemsize
                name = f"gradient of {parameter.name}, cut"
                cut = self.hold(self.gradient_category, unit, name, parameter.numel * itemsize)
                parameter.gradient = AbstractTensor(cut, parameter.numel, itemsize)
                del gradient, cut, waiting

    def post_backward(self, unit: Unit):
        """Free the parameters; pack the gradients into one buffer, which is alive until later units need room for theirs."""
        if self.syncs and self.plan.tp_degree > 1:
            self.redistribute_gradients(unit)
        unit.gathered = None
        if not self.syncs:
            return
        size = unit.shard_numel(trained=True) * unit.shards * self.plan.itemsize
        if size:
            del self.reduce_scatter_states[: -(self.plan.reduce_buffers - 1) or None]  # the oldest are freed first
            self.cut_gradients(unit)
            packed = self.hold(self.gradient_category, unit, "packed gradients", size)
            self.reduce_scatter_states.append(packed)
            del packed
            for parameter in unit.parameters.values():
                parameter.gradient = None
                self.gradients.pop(parameter, None)
            self.keep_reduced(unit)
        if unit is self.root:
            self.reduce_scatter_states.clear()
            self.all_reduce_states.clear()


RULES = {
    "single": Replicated,
    "ddp": Replicated,
    "zero1": Replicated,
    "fsdp1": FSDP1,
    "fsdp2": FSDP2,
}
