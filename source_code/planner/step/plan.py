# SPDX-License-Identifier: BSD-3-Clause
"""One rank's training step as ``Plan`` describes it: its memory in named terms, its collectives. Imports no torch."""

from collections import Counter
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from planner import UserError
from planner.models.networks import Blueprint
from planner.ops import quantization
from planner.ops.autograd import BF16, FP32
from planner.parallel import muon, pinned, traffic, zero
from planner.parallel.pipeline import Stage
from planner.parallel.strategies import Unit
from planner.step.simulation import Step, optimizer_temporary_bytes
from planner.step.stage_simulation import StageStep

HALF = ("bf16", "fp16")  # precisions of two bytes
ALIGNMENT = 16  # bytes: where FSDP1 with use_orig_params lets a parameter begin in a flat tensor
STEP_COUNTER = 4  # bytes: the number of steps done, for each tensor that Adam or Adadelta updates
# An optimizer's state: for each element that it updates, except the counter.
ADAM = ("step counters", "first moments", "second moments")
STATES = {
    "adadelta": ("step counters", "mean squared gradients", "mean squared updates"),
    "adamw": ADAM,
    "adamw-fused": ADAM,
    "adamw-for-loop": ADAM,
    "adamw-bf16": ADAM,
    "adamw-8bit": (),  # planner/ops/quantization.py has them
    **dict.fromkeys(muon.WAYS, ()),  # planner/parallel/muon.py has them
    "lion": ("momentum",),  # not validated: no lab trains with it (google/automl, lion/lion_pytorch.py)
    "momentum": ("momentum",),
    "sgd": (),
}


class SteadyStep(NamedTuple):
    """A simulated step from the second on.

    Attributes:
        timeline: see ``Plan.timeline``.
        tensor_sizes: see ``Autograd``.
        sent: DeepSpeed's collectives: {(kind, bytes): how many}.
    """

    timeline: dict
    tensor_sizes: dict
    sent: Counter


@dataclass(frozen=True)
class Plan:
    """A network, and how it is trained.

    Attributes:
        blueprint: the network, for one rank's batch.
        strategy: "single", "ddp", "fsdp1", "fsdp2"; "zero1", "deepspeed-0" to "deepspeed-3" (planner/parallel/zero.py).
        ranks: how many train.
        replicas: HSDP: copies of the model, each sharded among ranks / replicas.
        reshard: FSDP, after forward: free gathered parameters ("true"), keep them ("false"), or keep one part in "N".
        precision: of the computation: "fp32", "fp64", "bf16", or "fp16"; without FSDP the latter two are autocast's.
        optimizer: a key of ``STATES``.
        micro_batches: in a step.
        sync: the micro-batches after which gradients are reduced: "every", or "last".
        clip: whether the gradients' norm is limited.
        prefetch: FSDP2: units that are gathered ahead; 0 leaves it to FSDP2.
        rank: whose memory it is: under zero1, deepspeed-1, and deepspeed-2 ranks hold different parts.
        on_gpu: whether it is a GPU's kernels.
        workspaces: count what these allocate inside them, as the allocator does, and a tracer cannot.
        torch: PyTorch's version, where versions differ.
        weights: the format of parameters, gradients, and optimizer state: "fp32", or "bf16" if precision is.
        offload: FSDP2: what persists is in the CPU's memory, where the optimizer steps.
        shard_dim: FSDP2: the dimension along which matrices that divide evenly are sharded (``shard_placement_fn``); the
            other parameters are sharded along their first.
        reduce_buffers: FSDP2: packed gradients that are kept (``set_reduce_scatter_max_input_buffers``).
        flash: whether the GPU runs flash attention (``gpus.GPU``).
        pipeline: the stage whose blueprint it is.

    Raises:
        UserError: such a run is not predicted.
    """

    blueprint: Blueprint
    strategy: str = "fsdp2"
    ranks: int = 1
    _: KW_ONLY
    replicas: int = 1
    reshard: str = "true"
    precision: str = "fp32"
    optimizer: str = "adamw"
    micro_batches: int = 1
    sync: str = "every"
    clip: bool = False
    prefetch: int = 0
    rank: int = 0
    on_gpu: bool = False
    workspaces: bool = True
    torch: tuple[int, int] = (2, 15)
    weights: str = "fp32"
    offload: bool = False
    shard_dim: int = 0
    reduce_buffers: int = 1
    flash: bool = True
    pipeline: Stage | None = None

    def __post_init__(self):
        if self.flat and self.shards == 1:
            raise UserError("FSDP1 on one rank shards nothing (NO_SHARD), and is not predicted: take another strategy")
        if self.tp_degree > 1 and self.strategy not in ("fsdp2", "single"):
            raise UserError(f"tensor parallelism ({self.tp_degree} ranks) goes with fsdp2, not with {self.strategy}")
        if self.cp_degree > 1 and self.strategy != "fsdp2":
            raise UserError(f"ranks that share sequences ({self.cp_degree}) go with fsdp2, not with {self.strategy}")
        if self.cp_degree > 1 and self.on_gpu and (self.precision not in HALF or not self.flash):
            raise UserError(
                "ranks that share sequences are planned for a GPU's flash attention: give --precision bf16, or another --gpu"
            )
        if self.deepspeed and self.precision == "fp64":
            raise UserError("DeepSpeed trains in fp32 or bf16: give another --precision")
        if self.deepspeed and self.optimizer == "adamw-8bit":
            raise UserError("8-bit Adam under DeepSpeed is not predicted: take another strategy or optimizer")
        if self.optimizer == "adamw-bf16" and (self.deepspeed or self.strategy == "zero1" or self.precision == "fp64"):
            raise UserError("--optimizer adamw-bf16 is not for ZeRO's optimizers, nor for fp64: take adamw")
        if any(m.quantized for m in self.blueprint.modules) and (
            self.strategy not in ("single", "ddp") or self.precision != "bf16" or self.weights != "fp32"
        ):
            raise UserError("weights in 4 bits are predicted for single and ddp, with --precision bf16, not for this")
        scaled = self.strategy in ("single", "ddp", "fsdp1", "fsdp2") and self.tp_degree == 1 and not self.pipeline
        if self.precision == "fp16" and (not scaled or self.offload):
            raise UserError(
                "--precision fp16 is planned for single, ddp, fsdp1 and fsdp2, without offload, not for this"
            )
        if self.offload and self.strategy != "fsdp2":
            raise UserError(f"offload is predicted for fsdp2, not for {self.strategy}")
        if self.shard_dim and (self.tp_degree > 1 or self.reshard_degree or self.optimizer in muon.WAYS):
            raise UserError("another dimension to shard is not predicted with tensor parallelism, reshard N, or Muon")
        if self.shard_dim and 1 < self.ep_degree < self.shards:
            raise UserError("another dimension to shard is not predicted for experts that are spread and sharded")
        if self.optimizer in muon.WAYS:
            muon.check(self)
        if self.weights == "bf16" and (self.tp_degree > 1 or self.precision != "bf16"):
            raise UserError("--weights bf16 goes with --precision bf16, and without tensor parallelism")

    @property
    def shards_parameters(self) -> bool:
        """Whether the strategy is FSDP."""
        return self.strategy in ("fsdp1", "fsdp2")

    @property
    def deepspeed(self) -> bool:
        """Whether the strategy is one of DeepSpeed's."""
        return self.strategy.startswith("deepspeed")

    @property
    def tp_degree(self) -> int:
        """The number of ranks that split every weight."""
        return self.blueprint.tensor_parallel.tp_degree

    @property
    def cp_degree(self) -> int:
        """The number of ranks that share each sequence; FSDP shards parameters among them, too."""
        return self.blueprint.context.size

    @property
    def ep_degree(self) -> int:
        """The number of ranks that have different experts."""
        return self.blueprint.spread.ep_degree

    @property
    def flat(self) -> bool:
        """Whether a unit's parameters are sharded as one flat tensor."""
        return self.strategy == "fsdp1"

    @property
    def shards(self) -> int:
        """The number of ranks among which FSDP shards the parameters."""
        return self.ranks // self.replicas // self.tp_degree if self.shards_parameters else 1

    @property
    def reshard_degree(self) -> int | None:
        """N, if one part in N of the gathered parameters stays after forward; None if only the shard does, or everything."""
        return int(self.reshard) if self.reshard.isdecimal() and int(self.reshard) != self.shards else None

    @property
    def reductions(self) -> int:
        """The number of a step's micro-batches after which gradients are reduced."""
        waits = self.sync == "last" or self.strategy in ("deepspeed-0", "deepspeed-1")
        return 1 if waits else self.micro_batches

    @property
    def optimizer_numels(self) -> list[int]:
        """The elements of each tensor that the optimizer updates on this rank."""
        if self.deepspeed or self.strategy == "zero1":
            return zero.optimizer_numels(self)
        return [numel for unit in self.unit_sizes for numel in unit.updated_numels(self.rank)]

    @property
    def optimizer_groups(self) -> list[list[int]]:
        """``optimizer_numels`` in the groups that the optimizer updates one after another.

        Those of each device mesh are a group. transformers' tensor parallelism distributes the parameters that it splits on
        another one than the rest; expert parallelism has one for experts.
        """
        if self.ep_degree > 1:
            units = self.unit_sizes
            return [
                [n for u in units if (u.kind == "experts") == own for n in u.shard_numels(True)]
                for own in (False, True)
            ]
        if not self.blueprint.tensor_parallel.logits:
            return [self.optimizer_numels]
        groups = ([], [])
        for unit in self.unit_sizes:
            trained = [parameter for parameter in unit.parameters.values() if parameter.trained]
            for parameter, numel in zip(trained, unit.shard_numels(trained=True), strict=True):
                groups[parameter in unit.replicated].append(numel)
        return list(groups)

    @property
    def itemsize(self) -> int:
        """Bytes per element of parameters, reduced gradients, and optimizer state."""
        if self.weights == "bf16":
            return 2
        return 8 if self.precision == "fp64" else 4

    @property
    def loss_itemsize(self) -> int:
        """Bytes per element of the loss."""
        return max(FP32, self.itemsize)

    @property
    def compute_itemsize(self) -> int:
        """Bytes per element of the parameters that a module computes with."""
        return 2 if self.precision in HALF and not self.autocast else self.itemsize

    @property
    def parameter_itemsize(self) -> int:
        """Bytes per element of the parameters that a rank stores. FSDP casts what it gathers, DeepSpeed the model."""
        return self.compute_itemsize if self.deepspeed else self.itemsize

    @property
    def autocast(self) -> bool:
        """Whether autocast casts to bf16 or fp16, operator by operator. FSDP and DeepSpeed cast parameters."""
        casts = self.precision in HALF and self.weights == "fp32"
        return casts and not self.shards_parameters and not self.deepspeed

    @cached_property
    def units(self) -> list[list]:
        """The modules of each unit: the root's first, the others in the order of forward."""
        units, grouped = [[]], []
        for module in self.blueprint.modules:
            if module.grouped_with_next and self.strategy == "fsdp2":
                grouped.append(module)
            elif module.wrapped and self.shards_parameters:
                units.append([*grouped, module])
                grouped = []
            else:
                units[0].append(module)
        return units

    @cached_property
    def unit_sizes(self) -> list[Unit]:
        """The units, nested ones too, for their sizes: a simulated step needs units of its own, which it changes."""
        return [each for unit in self.make_units() for each in (unit, unit.nested) if each]

    def make_units(self) -> list[Unit]:
        """Return new units, the root first. With frozen parameters the labs give FSDP1 ``use_orig_params``, which aligns."""
        aligned = self.flat and any(module.frozen for module in self.blueprint.modules)
        alignment = ALIGNMENT // self.compute_itemsize if aligned else 1
        shared = self.blueprint.tied, self.shards, self.flat, self.compute_itemsize, alignment, self.shard_dim
        units = [Unit(modules, *shared) for modules in self.units]
        for unit in units if self.ep_degree > 1 else ():
            if any(module.spread for module in unit.modules):
                own = self.shards // self.ep_degree
                unit.nested = Unit(unit.modules, {}, own, False, self.compute_itemsize, 1, self.shard_dim, spread=True)
        return units

    def persistent(self) -> dict[tuple[str, str], int]:
        """Return what a rank stores from step to step on its device: {(category, name): bytes}."""
        return {} if self.offload else self._persistent_state()

    def host_memory(self) -> dict[tuple[str, str], int]:
        """Return what a rank needs of the CPU's memory with offload: {(category, name): bytes}.

        Shards and gradients count while the optimizer steps. Offloaded activations count in addition, although
        they are freed before it: they are pinned, and PyTorch caches freed pinned memory.
        """
        terms = self._offloaded_activations()
        if not self.offload:
            return terms
        numels = self.optimizer_numels
        terms |= self._persistent_state()
        terms["gradients", "gradients, this rank's part"] = sum(numels) * self.itemsize
        stored = [numel for unit in self.unit_sizes for numel in unit.shard_numels()]
        for category, sizes in (("parameters", stored), ("gradients", numels)) if self.on_gpu else ():
            terms[category, pinned.ROUNDING] = pinned.rounding(numel * self.itemsize for numel in sizes)
        if "step counters" in STATES[self.optimizer]:
            terms["optimizer state", "step counters"] = len(numels) * STEP_COUNTER
        temporary = optimizer_temporary_bytes(self, numels)
        return terms | {("temporary", "intermediate results"): temporary}

    def _offloaded_activations(self) -> dict[tuple[str, str], int]:
        """Return the inputs of blocks that a rank stores in the CPU's memory between forward and backward."""
        if not (blocks := self.blueprint.offloaded_inputs):
            return {}
        # Of tensor-parallel blocks, sequence parallelism leaves a rank a part of the tokens.
        size = self.blueprint.boundary_numel // self.tp_degree * self.compute_itemsize
        terms = {("activations", "inputs of blocks"): blocks * size}
        return terms | {("activations", pinned.ROUNDING): blocks * pinned.rounding([size])}

    def _persistent_state(self) -> dict[tuple[str, str], int]:
        """Return what a rank stores from step to step, on whichever device; of counters, those that its device has."""
        units, updated = self.unit_sizes, self.optimizer_numels
        held = sum(unit.shard_numel() for unit in units) * self.itemsize
        quantized = [p.numel for unit in units for p in unit.parameters.values() if p.quantized]
        held += sum(quantization.nf4_bytes(numel) - numel * self.itemsize for numel in quantized)
        moments = sum(updated) * (BF16 if self.optimizer == "adamw-bf16" else self.itemsize)
        terms = zero.persistent_state(self) if self.deepspeed else {("parameters", "parameters"): held}
        if self.blueprint.buffers:
            terms["parameters", "buffers"] = self.blueprint.buffers
        if self.strategy in ("ddp", "zero1"):
            unsharded = sum(unit.shard_numel(trained=True) for unit in units) * self.itemsize
            terms["all-reduce buckets", "all-reduce buckets"] = unsharded
        if self.optimizer == "adamw-8bit":
            terms |= {("optimizer state", name): size for name, size in quantization.adam_states(updated).items()}
        if self.optimizer in muon.WAYS:
            terms |= {("optimizer state", name): size for name, size in muon.states(self).items()}
        for name in STATES[self.optimizer]:
            if name != "step counters":
                terms["optimizer state", name] = moments
            elif not self.on_gpu or self.optimizer == "adamw-fused":  # other counters stay in the CPU's memory
                terms["optimizer state", name] = len(updated) * STEP_COUNTER
        return terms

    def timeline(self, first: bool = False) -> dict[str, tuple[int, dict]]:
        """Return the peak of each phase of a step: {phase: (bytes, {(category, name): bytes})}, in order.

        Args:
            first: take the step in which the optimizer creates its state.
        """
        return self._step(first).run() if first else self.steady_step.timeline

    @cached_property
    def steady_step(self) -> SteadyStep:
        """A step from the second on, simulated once."""
        step = self._step(first=False)
        return SteadyStep(step.run(), step.tape.tensor_sizes, getattr(step.rules, "sent", None) or Counter())

    def _step(self, first: bool) -> Step:
        return StageStep(self, first) if self.pipeline else Step(self, first)

    def peak(self, first: bool = False) -> tuple[str, dict]:
        """Return the peak of a step: (phase, {(category, name): bytes}); the last one of equal peaks.

        Args:
            first: take the step in which the optimizer creates its state.
        """
        timeline = self.timeline(first)
        phase = max(reversed(timeline), key=lambda phase: timeline[phase][0])
        return phase, timeline[phase][1]

    def for_peak_rank(self) -> "Plan":
        """Return the plan of the rank with the highest peak: see ``rank``, and ``zero.peak_rank_candidates``."""
        candidates = zero.peak_rank_candidates(self)
        plans = [self if rank == self.rank else replace(self, rank=rank) for rank in candidates]
        return max(plans, key=lambda plan: sum(plan.peak()[1].values())) if len(plans) > 1 else plans[0]

    def explain(self) -> list[tuple]:
        """Return the terms of the peak, the largest first: [((category, name), bytes, its factors as text), …]."""
        sizes = self.steady_step.tensor_sizes
        largest_first = sorted(self.peak()[1].items(), key=lambda item: -item[1])
        return [(term, size, self._factors(size, *sizes[term])) for term, size in largest_first]

    def _factors(self, size: int, numel: int, itemsize: int, per_sample: bool) -> str:
        samples = self.blueprint.samples
        count = size // (numel * itemsize)
        many = f"{count} × " if count > 1 else ""
        if per_sample and itemsize > 1 and numel > samples and numel % samples == 0:
            return f"{many}{samples:,} samples × {numel // samples:,} elements × {itemsize} bytes"
        return f"{many}{numel:,} elements × {itemsize} bytes" if itemsize > 1 else f"{many}{numel:,} bytes"

    def traffic(self) -> list[dict]:
        """Return a step's collectives: [{"kind", "count", "bytes", "ranks", "dimension"}, …].

        "bytes" are those of the unsharded tensor, as labkit/measuring/trace.py counts. "ranks" take part in one
        collective. "dimension" is that of FSDP2's mesh, along which they lie; None for the groups of reshard N, and
        under the other strategies.
        """
        return self.pipeline.traffic(self) if self.pipeline else traffic.step_collectives(self)
