# SPDX-License-Identifier: BSD-3-Clause
"""Declare the options of plan.py: gpt_fsdp.py's, some with more choices, and those of the hardware. Imports no torch."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from planner.cli import config_files, coverage, report
from planner.cli.commands import STRATEGIES
from planner.gpus import GPU, GPUS
from planner.models import huggingface
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.parallel import pipeline
from planner.parallel.mesh import arrange
from planner.step.plan import STATES
from planner.timing import cost

from labkit import UserError
from labkit.running.lab_options import LABS, TransformerTraining
from labkit.running.options import choices_of, declared, flag, option, redeclared
from labkit.running.plan_conflicts import CONFLICTS, DEEPSPEED

TITLED = ("preset", "strategy", "mesh", "batch_size", "seq_len", "precision", "recompute", "optimizer")


@dataclass(frozen=True)
class Config(TransformerTraining):
    """The options of plan.py: gpt_fsdp.py's, some with more choices, and those of the hardware."""

    conflicts = CONFLICTS
    launched: ClassVar[bool] = False
    dry_run: ClassVar[bool] = False  # a plan is not a run

    preset: Literal[tuple(GPT_SHAPES)] | None = redeclared(
        TransformerTraining, "preset", default=None, help="size of the model (default: tiny)"
    )
    config: str | None = option(None, "instead of --preset: a config.json of Hugging Face's, or its folder")
    model: str | None = option(None, "instead of --preset: a model's folder, with its config.json")
    module: str | None = option(
        None, "instead of --preset: your own nn.Module, from FILE.py:function", form=(r".+\.py:\w+", "FILE.py:function")
    )
    ranks: int | None = option(
        None, "number of ranks (default: 8; with --strategy single, 1)", least=1, at_most=1_000_000
    )
    strategy: Literal[STRATEGIES] = redeclared(
        TransformerTraining,
        "strategy",
        help="one process, or a data-parallel strategy; zero1 is PyTorch's ZeroRedundancyOptimizer",
    )
    mesh: str | None = redeclared(
        TransformerTraining, "mesh", help="device mesh: 2x4 (HSDP); or named: shard=4,tensor=2, or pipeline=STAGES"
    )
    schedule: Literal[tuple(pipeline.SCHEDULES)] = option("1f1b", "pipeline: the order of forwards and backwards")
    wrap: Literal["blocks", "blocks+embeddings"] | None = redeclared(
        TransformerTraining,
        "wrap",
        default=None,
        only=(),  # see the table of conflicts instead: an explicit "blocks" is accepted everywhere
        help="FSDP's wrapping policy: blocks and the root; or embedding and head separately, too (default: the lab's)",
    )
    frozen: Literal["fp32", "nf4"] = option(
        "fp32", "dtype of the blocks' frozen matrices; nf4 is QLoRA's (not validated)", needs="lora"
    )
    optimizer: Literal[tuple(STATES)] = redeclared(
        TransformerTraining,
        "optimizer",
        help="optimizer; adamw is PyTorch's foreach implementation; muon: see gpt_fsdp.py; adamw-8bit is bitsandbytes', and "
        "lion its authors' (not validated)",
    )
    device: Literal["auto", "cpu", "cuda"] = redeclared(
        TransformerTraining,
        "device",
        help="kernels to plan for: they save different tensors for backward; auto: a GPU's",
    )
    imbalance: float = option(
        1.0, "rows that the planned rank's experts compute, relative to the mean of all ranks", least=1, needs="experts"
    )
    node_size: int = option(8, "ranks on a node", least=1)
    gpu: Literal[tuple(GPUS)] = option(
        "h100",
        "the GPU, with the GiB that PyTorch finds on it: "
        + ", ".join(f"{name} {gpu.memory:g}" for name, gpu in GPUS.items()),
    )
    gpu_memory: float | None = option(None, "GiB that a rank may use (default: the GPU's)", above=0, at_most=1e9)
    flops: float | None = option(
        None, "peak FLOP/s of a rank (default: from the GPU's data sheet, for --precision)", least=1
    )
    efficiency: float = option(
        cost.EFFICIENCY, "fraction of --flops that training reaches (0.39 compiled)", least=1e-6, at_most=1
    )
    link: str | None = option(None, f"within a node: {', '.join(cost.LINKS)}, or GB/s per rank (default: the GPU's)")
    network: str = option(
        "infiniband",
        "between nodes: "
        + ", ".join(f"{name} ({link.bandwidth / 1e9:g} GB/s per node)" for name, link in cost.NETWORKS.items())
        + ", or GB/s per node, or Gbit/s as 10gbit",
    )
    find: Literal["ranks", "batch-size", "seq-len"] | None = option(
        None, "search for the smallest --ranks, or the largest --batch-size or --seq-len, that fits"
    )
    tokens: float | None = option(None, "number of tokens to train on, such as 15e9: prints the hours", least=1)
    price: float | None = option(None, "price of a GPU-hour, in any currency", above=0, needs="tokens")
    sweep: bool = option(False, "compare all strategies: those that fit first, the fastest first")
    explain: bool = option(False, "show the terms of the peak, with their sizes")
    plot: str | None = option(None, "write a figure of a step's memory and the terms of its peak (.png, .svg, .pdf)")
    simulate: bool = option(False, "compare with PyTorch's own code, run on fake tensors")
    json: bool = option(False, "print JSON instead of tables")

    def __post_init__(self):
        sources = [name for name in ("preset", "config", "model", "module") if getattr(self, name)]
        if len(sources) > 1:
            raise UserError(f"{flag(sources[0])} and {flag(sources[1])} both name a model: leave one of them out")
        # These are not the fields' defaults, so that an explicit value can be distinguished.
        if not sources:
            object.__setattr__(self, "preset", TransformerTraining.preset)
        if self.ranks is None:
            object.__setattr__(self, "ranks", 1 if self.strategy == "single" else 8)
        super().__post_init__()
        arrange(self.ranks, self.mesh, self.reshard_after_forward)

    @cached_property
    def shape(self) -> GPTShape | None:
        """The shape of the model; None with --module, and of a family that the planner does not know.

        Raises:
            UserError: --config or --model cannot be read.
        """
        if self.module:
            return None
        if not self.third_party:
            return super().shape
        option = "--config" if self.config else "--model"
        config_files.check(self.named, option)
        return huggingface.load(self.named, option) if config_files.is_planned(self.named) else None

    @property
    def tied_weights(self) -> bool:
        return bool(self.shape and self.shape.tie_word_embeddings)

    @property
    def wraps_embeddings(self) -> bool:
        """Whether embedding and head are FSDP units; for a third-party model, hf_fsdp.py's policy is the default."""
        if self.wrap is None and self.third_party:
            return not self.tied_weights
        return super().wraps_embeddings

    @property
    def planned_strategy(self) -> str:
        """The strategy by the planner's name; hf_fsdp.py leaves FSDP out where there is nothing to shard or replicate."""
        alone = self.third_party and self.strategy == "fsdp2" and arrange(self.ranks, self.mesh).data == 1
        return "single" if alone else super().planned_strategy

    @property
    def third_party(self) -> bool:
        """Whether the model is planned from a Hugging Face configuration."""
        return bool(self.config or self.model)

    @property
    def named(self) -> str:
        """The value of the option that selects the model."""
        return self.config or self.model or self.module or self.preset

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a sequence, by the number of learned positions."""
        return (self.shape and self.shape.learned_positions) or 10**9

    @property
    def too_long(self) -> bool:
        return self.seq_len > self.longest

    @property
    def on_gpu(self) -> bool:
        """Whether to plan for a GPU's kernels; as in a lab, --backend gloo without --device means the CPU."""
        return self.device == "cuda" or (self.device == "auto" and self.backend != "gloo")

    @property
    def booked(self) -> GPU:
        return GPUS[self.gpu]

    @property
    def peak_known(self) -> bool:
        return self.precision in self.booked.flops

    @property
    def lacks_bf16(self) -> bool:
        """Whether to compute in bf16 on a GPU that has fp16 only."""
        return self.precision == "bf16" and not self.peak_known

    @property
    def memory(self) -> float:
        """GiB that a rank may use."""
        return self.gpu_memory or self.booked.memory

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of a rank."""
        return self.flops or self.booked.flops[self.precision]

    @property
    def pipelined(self) -> bool:
        return self.stages > 1

    @property
    def splits_model(self) -> bool:
        """Whether tensor or expert parallelism splits the model."""
        return self.tp_degree > 1 or self.ep_degree > 1

    @property
    def has_experts(self) -> bool:
        """Whether --mesh may have a dimension for experts."""
        return super().has_experts or (self.third_party and (self.shape is None or bool(self.shape.experts)))

    @cached_property
    def why_simulated(self) -> str:
        """Why the planner's arithmetic does not cover a third-party model; "": it does."""
        return coverage.why_simulated(self) if self.third_party else ""

    @property
    def stored_with_experts(self) -> str:
        """The persistent memory of a rank with expert parallelism."""
        return report.gib(coverage.persistent_with_experts(self))

    @property
    def by_library(self) -> bool:
        """Whether the peak is simulated with the library's own code, because arithmetic does not cover it."""
        return bool(self.why_simulated)

    @property
    def library_simulated(self) -> bool:
        """Whether a step of hf_fsdp.py is simulated."""
        return self.by_library or (self.third_party and self.simulate)

    @property
    def simulates(self) -> bool:
        return bool(self.simulate or self.module or self.by_library)

    @property
    def lab(self) -> str:
        """The lab that trains with these options, or with the most similar ones."""
        if self.third_party:
            return "hf_fsdp.py"
        if self.pipelined:
            return "gpt_pipeline.py"
        return "gpt_zero.py" if self.strategy in ("zero1", *DEEPSPEED) else "gpt_fsdp.py"

    @property
    def besides(self) -> dict:
        """The options that differ from their defaults and are not in ``TITLED``, with their values, for a title."""
        return {name: value for name, value in self._changed().items() if name not in TITLED}

    @property
    def decided_by_module(self) -> list[str]:
        """The explicit options that --module determines itself, or does not support."""
        free = (
            "strategy",
            "precision",
            "reshard_after_forward",
            "device",
            "backend",
            "max_steps",
            "lr",
            "warmup_steps",
        )
        free += ("lr_schedule", "decay_steps", "min_lr", "weight_decay", "decay_1d", "seed", "checkpoint_every")
        return [flag(name) for name in self._changed() if name not in free]

    @property
    def lacking(self) -> list[str]:
        """The explicit options that the lab does not take, or not with this value."""
        taken = {field.name: field for field in dataclasses.fields(LABS[self.lab])}
        stands_for_stage = ("strategy",) if self.lab == "gpt_zero.py" else ()
        lacking = []
        for name, value in self._changed().items():
            if name in stands_for_stage or (name == "wrap" and self._wraps_as_the_lab()):
                continue
            if name not in taken:
                lacking.append(flag(name))
            elif (choices := choices_of(taken[name])) and value not in choices:
                lacking.append(f"{flag(name)} {value}")
        return lacking

    def _wraps_as_the_lab(self) -> bool:
        return self.third_party and bool(self.shape) and self.wraps_embeddings != self.tied_weights

    def _changed(self) -> dict:
        """Return the training options that differ from their defaults."""
        names = (*declared(TransformerTraining), "schedule", "frozen")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(type(self), name)}
