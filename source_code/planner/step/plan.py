"""One rank's training step, as ``Plan`` has it: its memory in named terms, its collectives. No torch; see predict.py."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from planner import UserError
from planner.models.networks import Blueprint
from planner.ops import quantization
from planner.ops.autograd import FP32
from planner.parallel import traffic, zero
from planner.parallel.pipeline import Stage
from planner.parallel.strategies import Unit
from planner.step.simulation import Step, optimizer_temporary
from planner.step.stage_simulation import StageStep

STEP_COUNTER = 4  # bytes: the number of steps done, one for each tensor that Adam or Adadelta updates
# What an optimizer keeps, for each number it updates unless it is a counter.
ADAM = ("step counters", "first moments", "second moments")
STATES = {
    "adadelta": ("step counters", "mean squared gradients", "mean squared updates"),
    "adamw": ADAM,
    "adamw-fused": ADAM,
    "adamw-for-loop": ADAM,
    "adamw-8bit": (),  # planner/ops/quantization.py has them
    "momentum": ("momentum",),
    "sgd": (),
}


@dataclass(frozen=True)
class Plan:
    """A network, and how it is trained. UserError where the arithmetic does not reach."""

    blueprint: Blueprint
    strategy: str = "fsdp2"  # single, ddp, fsdp1, fsdp2; zero1, deepspeed-0 to deepspeed-3: planner/parallel/zero.py
    ranks: int = 1
    replicas: int = 1  # HSDP: the model is there so many times, each time shared by ranks / replicas
    reshard: str = "true"  # FSDP, after forward: free what was gathered ("true"), keep it, or keep one part in N
    precision: str = "fp32"  # fp32, fp64, or bf16: gathered parameters and activations; without FSDP, by autocast
    optimizer: str = "adamw"  # a key of STATES
    micro_batches: int = 1  # in a step
    sync: str = "every"  # after which micro-batch the gradients are reduced: every, or last
    clip: bool = False  # whether the gradients' norm is limited
    prefetch: int = 0  # FSDP2: so many units are gathered ahead; 0 leaves it to FSDP2
    rank: int = 0  # whose bytes: under zero1, deepspeed-1 and deepspeed-2 ranks hold different parts
    on_gpu: bool = False  # a GPU's kernels
    workspaces: bool = True  # count what these allocate inside them, as the allocator does, and a tracer cannot
    torch: tuple[int, int] = (2, 15)  # the version, where versions differ
    weights: str = "fp32"  # of parameters, gradients and optimizer state; or bf16, where precision is bf16
    offload: bool = False  # FSDP2: what persists is in the CPU's memory, where the optimizer steps, not in the device's
    pipeline: Stage | None = None  # the blueprint is that of one stage, and this says which

    def __post_init__(self):
        if self.flat and any(module.frozen for module in self.blueprint.modules):
            raise UserError("frozen parameters in FSDP1's flat tensors are not predicted: take FSDP2")
        if self.flat and self.shards == 1:
            raise UserError("FSDP1 on one rank shards nothing (NO_SHARD), and is not predicted: take another strategy")
        if self.tensor > 1 and self.strategy != "fsdp2":
            raise UserError(f"matrix products split among {self.tensor} ranks go with fsdp2, not with {self.strategy}")
        if self.deepspeed and self.precision == "fp64":
            raise UserError("DeepSpeed trains in fp32 or bf16: give another --precision")
        if self.deepspeed and self.optimizer == "adamw-8bit":
            raise UserError("what DeepSpeed makes of 8-bit Adam is not predicted: take another strategy or optimizer")
        if any(m.packed for m in self.blueprint.modules) and (
            self.strategy not in ("single", "ddp") or self.precision != "bf16" or self.weights != "fp32"
        ):
            raise UserError("weights in 4 bits are predicted for single and ddp, with --precision bf16, not for this")
        if self.offload and self.strategy != "fsdp2":
            raise UserError(f"offload is predicted for fsdp2, not for {self.strategy}")
        if self.weights == "bf16" and (self.tensor > 1 or self.precision != "bf16"):
            raise UserError("--weights bf16 goes with --precision bf16, and without products split among ranks")

    @property
    def shards_parameters(self) -> bool:
        return self.strategy in ("fsdp1", "fsdp2")

    @property
    def deepspeed(self) -> bool:
        return self.strategy.startswith("deepspeed")

    @property
    def tensor(self) -> int:
        """Among how many ranks each matrix product is split."""
        return self.blueprint.tensor.parts

    @property
    def flat(self) -> bool:
        """Whether a unit's parameters are cut as one flat tensor."""
        return self.strategy == "fsdp1"

    @property
    def shards(self) -> int:
        """Among how many ranks the parameters are cut."""
        return self.ranks // self.replicas // self.tensor if self.shards_parameters else 1

    @property
    def part_kept(self) -> int | None:
        """FSDP2: after forward one part in so many stays of what was gathered; None where that is but the shard, or all."""
        return int(self.reshard) if self.reshard.isdecimal() and int(self.reshard) != self.shards else None

    @property
    def reductions(self) -> int:
        """After how many of a step's micro-batches gradients are reduced."""
        waits = self.sync == "last" or self.strategy in ("deepspeed-0", "deepspeed-1")
        return 1 if waits else self.micro_batches

    @property
    def updated(self) -> list[int]:
        """The numbers of each tensor that the optimizer updates on this rank."""
        if self.deepspeed or self.strategy == "zero1":
            return zero.updated(self)
        return [size for unit in self.resting for size in unit.tensors(trained=True)]

    @property
    def itemsize(self) -> int:
        """Bytes a number of parameters, reduced gradients and optimizer state."""
        if self.weights == "bf16":
            return 2
        return 8 if self.precision == "fp64" else 4

    @property
    def loss_itemsize(self) -> int:
        """Bytes a number of the loss."""
        return max(FP32, self.itemsize)

    @property
    def compute_itemsize(self) -> int:
        """Bytes a number of the parameters that a module computes with."""
        return 2 if self.precision == "bf16" and not self.autocast else self.itemsize

    @property
    def parameter_itemsize(self) -> int:
        """Bytes a number of the parameters that a rank keeps. FSDP casts what it gathers, DeepSpeed the model."""
        return self.compute_itemsize if self.deepspeed else self.itemsize

    @property
    def autocast(self) -> bool:
        """Whether autocast casts to bf16, operator by operator. FSDP and DeepSpeed cast parameters."""
        casts = self.precision == "bf16" and self.weights == "fp32"
        return casts and not self.shards_parameters and not self.deepspeed

    @cached_property
    def units(self) -> list[list]:
        """The modules of each unit: the root first, the others in the order of forward."""
        units, joined = [[]], []
        for module in self.blueprint.modules:
            if module.with_next and self.strategy == "fsdp2":
                joined.append(module)
            elif module.wrapped and self.shards_parameters:
                units.append([*joined, module])
                joined = []
            else:
                units[0].append(module)
        return units

    @cached_property
    def resting(self) -> list[Unit]:
        """The units before a step, for their sizes: a step needs units of its own, which it changes."""
        return self.make_units()

    def make_units(self) -> list[Unit]:
        return [Unit(m, self.blueprint.tied, self.shards, self.flat, self.compute_itemsize) for m in self.units]

    def persistent(self) -> dict[tuple[str, str], int]:
        """What a rank keeps from step to step on its device: {(category, name): bytes}."""
        return {} if self.offload else self._kept()

    def on_host(self) -> dict[tuple[str, str], int]:
        """With offload, what a rank has in the CPU's memory as the optimizer steps, where that is most: likewise."""
        if not self.offload:
            return {}
        numel = sum(self.updated)
        terms = self._kept() | {("gradients", "gradients, this rank's part"): numel * self.itemsize}
        if "step counters" in STATES[self.optimizer]:
            terms["optimizer state", "step counters"] = len(self.updated) * STEP_COUNTER
        temporary = optimizer_temporary(self.optimizer, self.updated) * self.itemsize
        return terms | {("temporary", "intermediate results"): temporary}

    def _kept(self) -> dict[tuple[str, str], int]:
        """What a rank keeps from step to step, wherever it is; of counters, those that its device has."""
        units, updated = self.resting, self.updated
        held = sum(unit.shard() for unit in units) * self.itemsize
        packed = [p.numel for unit in units for p in unit.parameters.values() if p.packed]
        held += sum(quantization.nf4(numel) - numel * self.itemsize for numel in packed)
        trained = sum(updated) * self.itemsize
        terms = zero.kept(self) if self.deepspeed else {("parameters", "parameters"): held}
        if self.strategy in ("ddp", "zero1"):
            whole = sum(unit.shard(trained=True) for unit in units) * self.itemsize
            terms["all-reduce buckets", "all-reduce buckets"] = whole
        if self.optimizer == "adamw-8bit":
            terms |= {("optimizer state", name): size for name, size in quantization.adam_states(updated).items()}
        for name in STATES[self.optimizer]:
            if name != "step counters":
                terms["optimizer state", name] = trained
            elif not self.on_gpu or self.optimizer == "adamw-fused":  # other counters stay in the CPU's memory
                terms["optimizer state", name] = len(updated) * STEP_COUNTER
        return terms

    def timeline(self, first: bool = False) -> dict[str, tuple[int, dict]]:
        """The highest moment of each place of a step: {place: (bytes, {(category, name): bytes})}, in order.

        first: the step in which the optimizer makes its state.
        """
        return self._step(first).run() if first else self.steady[0]

    @cached_property
    def steady(self) -> tuple[dict, dict, Counter]:
        """Of a steady step, walked through once: (its timeline, what each term is made of, what DeepSpeed has sent)."""
        step = self._step(first=False)
        return step.run(), step.tape.each, getattr(step.rules, "sent", Counter())

    def _step(self, first: bool) -> Step:
        return StageStep(self, first) if self.pipeline else Step(self, first)

    def peak(self, first: bool = False) -> tuple[str, dict]:
        """(place, {(category, name): bytes}) of the highest moment of a step; of equal ones the last."""
        moments = self.timeline(first)
        where = max(reversed(moments), key=lambda place: moments[place][0])
        return where, moments[where][1]

    def of_fullest_rank(self) -> "Plan":
        """The same for the rank with the highest peak, where ranks differ: see ``rank``, and ``zero.fullest``."""
        plans = [self if rank == self.rank else replace(self, rank=rank) for rank in zero.fullest(self)]
        return max(plans, key=lambda plan: sum(plan.peak()[1].values())) if len(plans) > 1 else plans[0]

    def explain(self) -> list[tuple]:
        """The terms of the peak, the largest first: [((category, name), bytes, its numbers as text), …]."""
        _, each, _ = self.steady
        largest_first = sorted(self.peak()[1].items(), key=lambda item: -item[1])
        return [(term, size, self._numbers(size, *each[term])) for term, size in largest_first]

    def _numbers(self, size: int, numel: int, itemsize: int, of_samples: bool) -> str:
        samples = self.blueprint.samples
        times = size // (numel * itemsize)
        many = f"{times} × " if times > 1 else ""
        if of_samples and itemsize > 1 and numel > samples and numel % samples == 0:
            return f"{many}{samples:,} samples × {numel // samples:,} numbers × {itemsize} bytes"
        return f"{many}{numel:,} numbers × {itemsize} bytes" if itemsize > 1 else f"{many}{numel:,} bytes"

    def traffic(self) -> list[dict]:
        """A step's collectives: [{"kind", "count", "bytes", "ranks", "dimension"}, …].

        bytes: of the whole tensor, as labkit/measuring/trace.py counts. ranks: how many take part in one. dimension: of
        FSDP2's mesh, along which these lie; None for the pairs and the like of reshard N, and for the other strategies.
        """
        return self.pipeline.traffic(self) if self.pipeline else traffic.of_step(self)
