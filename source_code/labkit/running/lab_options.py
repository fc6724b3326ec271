# SPDX-License-Identifier: BSD-3-Clause
"""Declare the options of all training labs, each once, and plan the runs made with them. Imports no torch.

A lab's ``Config`` derives from its class here, plan.py's from ``TransformerTraining``: they share names, defaults, and
conflicts. A class is registered for the name of a script (``of_lab``), so that records of that script
(``planner.predict.plan_of``) and runs in a notebook (``Lab.plan``) can be planned.

To add an option, declare it in its class. Labs that do not take it see its default. tests/test_lab_options.py draws a value
of each (``VALUES``), tests/bad_input.py a wrong one.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from planner import predict
from planner.cli import coverage, report
from planner.models import huggingface, networks
from planner.models.shapes import GPT_SHAPES, Experts, GPTShape, Layer
from planner.ops import context, routing
from planner.parallel import muon, pipeline, zero
from planner.parallel.mesh import FORM, Mesh, arrange
from planner.parallel.pipeline import Stage
from planner.step.plan import Plan

from labkit import UserError
from labkit.running.expert_conflicts import EXPERT_CONFLICTS
from labkit.running.options import GIVEN, SHARDED, Conflict, Training, option, redeclared, several

LABS: dict[str, type[Training]] = {}  # {script of a lab: the class of its options}

# Options and values of earlier records, {name: (current name, {value: current value})}
FORMER = {
    "units": ("wrap", {"apart": "blocks+embeddings"}),
    "sharding": ("reshard_after_forward", {"full": "true", "grad-op": "false"}),
    "reshard_after_forward": ("reshard_after_forward", {None: "true"}),
    "fall_back": ("fallback", {}),
    "keep": ("keep_last", {}),
    "on_failed_save": ("on_save_error", {"go-on": "continue"}),
}


def translated(values: dict) -> dict:
    """Translate the options of a record to their current names and values.

    Args:
        values: a record's "config", of this version or an earlier one.
    """
    current = {}
    for name, value in values.items():
        current_name, current_values = FORMER.get(name, (name, {}))
        current[current_name] = current_values.get(value, value) if current_values else value
    return current


def of_lab(*scripts: str):
    """Register a class as the options of a lab, and its ``plan`` as the planner of these scripts' records.

    Args:
        scripts: the lab's file name, then those of other scripts with the same options.
    """

    def register(options_class):
        def plan_record(record: dict, **how) -> Plan:
            values = translated(record["config"])
            if values.get("batch_size") is None and "batch_size" in record:  # MNIST's --global-batch-size
                values["batch_size"] = record["batch_size"]
            options = options_class.restored(values)
            if "routing" in record:
                how["routing"] = routing.recorded(record["routing"], how["rank"], options.ep_degree)
            return options.plan(record["ranks"], **how)

        options_class.script = scripts[0]
        for script in scripts:
            LABS[script] = options_class
            predict.PLANNERS[script] = plan_record
        return options_class

    return register


def dry_run(config: Training, ranks: int, on_gpu: bool) -> str:
    """Return the output of a lab's --dry-run: the plan of the rank with the highest peak memory.

    Args:
        config: a lab's options.
        ranks: the number of ranks that would train.
        on_gpu: whether they would compute on GPUs.

    Raises:
        UserError: the model cannot be sharded among these ranks, or the planner does not cover these options.
    """
    if hasattr(config, "arranged"):
        config.arranged(ranks)
    stages = range(ranks) if config.strategy == "pipeline" else [0]
    plans = [config.plan(ranks, on_gpu=on_gpu, rank=stage).for_peak_rank() for stage in stages]
    largest = max(plans, key=lambda plan: predict.total(plan.peak()[1]))
    kernels = report.KERNELS[on_gpu]
    return report.run_text(f"{config.script}: {ranks} ranks, {config.strategy}, {kernels}; none was started", largest)


@of_lab("mnist_fsdp.py")
@dataclass(frozen=True)
class MNISTTraining(Training):
    """The options of mnist_fsdp.py."""

    takes_dataset: ClassVar[bool] = True

    conflicts = (
        Conflict(
            {"batch_size": GIVEN},
            {"global_batch_size": GIVEN},
            "--batch-size and --global-batch-size both set the batch size: give one of them",
        ),
    )

    strategy: Literal["single", "ddp", "fsdp1", "fsdp2"] = option("fsdp2", "one process, or a data-parallel strategy")
    wrap: Literal["unit", "size"] = option(
        "unit", "FSDP's wrapping policy: the whole model as one unit, or each large layer as a unit", only=SHARDED
    )
    min_num_params: int = option(
        20000, "--wrap size: wrap layers with at least this many parameters", least=1, only=SHARDED
    )
    reshard_after_forward: Literal["true", "false"] = option(
        "true",
        "FSDP: true frees a unit's gathered parameters after forward, false keeps them; the root's are always kept",
        only=SHARDED,
    )
    cpu_offload: bool = option(
        False, "FSDP: keep shards, gradients and optimizer state in the CPU's memory", only=SHARDED
    )
    precision: Literal["fp32", "bf16", "fp64"] = option("fp32", "dtype of the computation", resumed="print")
    epochs: int = option(4, "passes over the training set, including those before a resume", least=1)
    max_steps: int | None = option(None, "stop after this many steps, including those before a resume", least=1)
    batch_size: int | None = option(None, "images per step on each rank (default: 64)", least=1)
    global_batch_size: int | None = option(
        None, "images per step on all ranks together, instead of --batch-size", least=1
    )
    lr: float = option(1.0, "Adadelta's learning rate in the first epoch", above=0, resumed="print")
    gamma: float = option(0.7, "factor on the learning rate after each epoch", above=0, resumed="print")
    dropout: bool = option(
        True,
        "use dropout layers; without them, and with a fixed --global-batch-size, losses do not depend on --ranks",
        resumed="print",
    )
    seed: int = option(1, "seed of the initial weights, the order of the images and the dropout", resumed=True)
    data: Literal["auto", "mnist", "mnist-5k"] = option("auto", "data set; auto: MNIST if it is available")
    loader: Literal["memory", "torchvision"] = option("memory", "keep the data set on the device, or load each image")

    def batch_size_of(self, world_size: int) -> int:
        """Return the images per step on each rank.

        Raises:
            UserError: --global-batch-size is not divisible by the number of ranks.
        """
        if self.global_batch_size is None:
            return self.batch_size or 64
        if self.global_batch_size % world_size:
            raise UserError(
                f"--global-batch-size {self.global_batch_size} cannot be shared evenly by {world_size} ranks"
            )
        return self.global_batch_size // world_size

    def plan(self, ranks: int, *, on_gpu: bool, at_least: bool = False, **how) -> Plan:
        """Plan a run with these options. how: further fields of ``Plan``."""
        return predict.mnist_plan(
            self.strategy,
            self.wrap,
            ranks,
            self.batch_size or self.batch_size_of(ranks),
            self.dropout,
            self.min_num_params,
            self.reshard_after_forward,
            "cuda" if on_gpu else "cpu",
            precision=self.precision,
            offload=self.cpu_offload and on_gpu and self.strategy == "fsdp2",  # a CPU has only one memory
            **how,
        )


@of_lab("gpt_fsdp.py", "one_rank.py")
@dataclass(frozen=True)
class TransformerTraining(Training):
    """The options of gpt_fsdp.py and plan.py; the other transformer labs take some of them."""

    conflicts = (
        Conflict(
            {"weights": "bf16"},
            {"precision": ("fp32", "fp16", "fp64")},
            "--weights bf16 computes in bf16, too: give --precision bf16",
        ),
        # FSDP2's scaler reduces the flag for an overflow along the dimensions in which the first gradient is sharded, so
        # with tensor parallelism ranks could disagree. With offload it would reduce CPU tensors, which no GPU has shown.
        *(
            Conflict(
                {"precision": "fp16"},
                excluded,
                f"--precision fp16 scales the loss, which is not validated with {what}: use --precision bf16 or fp32",
            )
            for what, excluded in {
                "tensor parallelism": {"tp_degree": several},
                "--cpu-offload": {"cpu_offload": True},
            }.items()
        ),
        Conflict(
            {"precision": "fp16", "strategy": "fsdp1"},
            {"optimizer": "adamw-fused"},
            "FSDP1's gradient scaler does not work with --optimizer adamw-fused (its kernel needs the flag for an overflow "
            "as a scalar): use adamw",
        ),
        Conflict(
            {"recompute": "none"},
            {"recompute_every": several},
            "--recompute-every needs --recompute full, selective or alternate: give both, or neither",
        ),
        # What "selective" saves inside a block passes by the hooks of saved tensors (PyTorch warns of it in 2.15).
        Conflict(
            {"recompute": ("none", "selective", "alternate")},
            {"offload_activations": True},
            "--offload-activations offloads what --recompute full saves, the inputs of blocks: give both, or neither",
        ),
        Conflict(
            {"compile": True},
            {"offload_activations": True},
            "--offload-activations copies between compiled blocks, which is not tested: leave --compile out",
        ),
        Conflict(
            {"wrap": "blocks+embeddings"},
            {"tied_weights": True},
            "--wrap blocks+embeddings wraps embedding and head separately, and they share one weight here: leave it out",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"mesh": GIVEN, "reshard_after_forward": "false"},
            "FSDP1 on a --mesh frees parameters after forward: leave --reshard-after-forward out",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"reshard_after_forward": str.isdecimal},
            "--reshard-after-forward {c.reshard_after_forward} needs FSDP2: use true or false with FSDP1",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"cpu_offload": True, "accumulate": several, "sync": "every"},
            "FSDP1 with --cpu-offload loses all micro-batches but the last: use --sync last",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"clip": GIVEN, "precision": "fp64"},
            "FSDP1 computes the norm that --clip needs in fp32: leave --precision fp64 out",
        ),
        # Compiled blocks run, but their gradients are wrong: the losses differ from the second step on (PyTorch 2.15).
        *(
            Conflict(
                {"tp_degree": several},
                excluded,
                f"--mesh {{c.mesh}} uses tensor parallelism, which does not support {what}: leave it out",
            )
            for what, excluded in {
                "--strategy {c.strategy}": {"strategy": ("single", "ddp", "fsdp1")},
                "--lora": {"lora": GIVEN},
                "--compile": {"compile": True},
                "--wrap blocks+embeddings": {"wrap": "blocks+embeddings"},
                "--loss-chunks": {"loss_chunks": several},
                "--weights bf16": {"weights": "bf16"},
            }.items()
        ),
        Conflict(
            {"cp_degree": 1},
            {"context_attention": GIVEN},
            "--context-attention is for ranks that share each sequence: give --mesh context=N, too",
        ),
        *(
            Conflict(
                {"cp_degree": several},
                excluded,
                f"--mesh {{c.mesh}} shares each sequence, which does not support {what}: leave it out",
            )
            for what, excluded in {
                "--strategy {c.strategy}": {"strategy": ("single", "ddp", "fsdp1")},
                "--compile": {"compile": True},
            }.items()
        ),
        Conflict(
            {"cp_degree": several, "context_attention": ("ring", "gather")},
            {"recompute": ("selective", "alternate")},
            "--recompute {c.recompute} would save each part of attention under --context-attention {c.context_attention}: use "
            "--recompute full, or --context-attention ulysses",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"mesh": GIVEN, "shards": 1},
            "FSDP1 on --mesh {c.mesh} has nothing to shard: use --strategy ddp",
        ),
        Conflict(
            {"has_experts": False},
            {"ep_degree": several},
            "--mesh {c.mesh} spreads experts, and this model has none: leave expert out",
        ),
        Conflict(
            {"lr_schedule": "constant"},
            {"min_lr": GIVEN},
            "--min-lr is where a decay ends: give --lr-schedule cosine or wsd, too",
        ),
        Conflict(
            {"lr_schedule": ("constant", "cosine")},
            {"decay_steps": GIVEN},
            "--decay-steps goes with --lr-schedule wsd: leave it out",
        ),
        Conflict({}, {"decays_upwards": True}, "--min-lr {c.min_lr:g} is above --lr {c.lr:g}: give a lower one"),
        Conflict(
            {},
            {"decay_fits": False},
            "warm-up and decay do not fit into --max-steps {c.max_steps}: give a smaller --warmup-steps or --decay-steps",
        ),
        *(
            Conflict(
                {"uses_adamw": False},
                changed,
                "--weight-decay and --no-decay-1d are AdamW's: leave them out with other optimizers",
            )
            for changed in ({"weight_decay": GIVEN}, {"decay_1d": False})
        ),
        *(
            Conflict({"optimizer": muon.WAYS}, excluded, f"--optimizer {{c.optimizer}} {why}")
            for excluded, why in (
                (
                    {"strategy": "fsdp1"},
                    "needs matrices, and FSDP1 flattens them: use --strategy fsdp2, ddp or single",
                ),
                (
                    {"tp_degree": several},
                    "gathers rows, and --mesh {c.mesh} splits columns, too: leave tensor out, or use adamw",
                ),
                ({"cpu_offload": True}, "would multiply matrices on the CPU: leave --cpu-offload out, or use adamw"),
                ({"lora": GIVEN}, "is for whole matrices, not for adapters: leave --lora out, or use adamw"),
            )
        ),
        Conflict(
            {"optimizer": "adamw-bf16"},
            {"precision": "fp64"},
            "--optimizer adamw-bf16 computes in fp32: leave --precision fp64 out, or use adamw",
        ),
        Conflict(
            {"optimizer": muon.WAYS[1:]},
            {"strategy": ("single", "ddp", "pipeline")},
            "--optimizer {c.optimizer} is for matrices that FSDP2 shards, and here none is: use --optimizer muon",
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"decay_1d": False},
            "--no-decay-1d identifies norms and biases by their shape, which FSDP1 flattens: use --strategy fsdp2 or ddp",
        ),
        *EXPERT_CONFLICTS,
    )
    imbalance: ClassVar[float] = 1.0  # of the rows of a rank's experts; only plan.py has other values
    frozen: ClassVar[str] = "fp32"  # dtype of LoRA's frozen matrices; only plan.py has other values

    preset: Literal[tuple(GPT_SHAPES)] = option("tiny", "size of the model", resumed=True)
    experts: int | None = option(
        None, "mixture of experts: replace each block's feed-forward network by N of its size", least=2, resumed=True
    )
    top_k: int = option(2, "experts that compute a token", least=1, needs="experts", resumed=True)
    shared_expert: bool = option(False, "one more expert, which computes every token", needs="experts", resumed=True)
    capacity_factor: float | None = option(
        None,
        "drop a sequence's tokens above N times an expert's mean share (default: drop none)",
        above=0,
        needs="experts",
        resumed="print",
    )
    balance: Literal["none", "loss", "bias"] = option(
        "none",
        "keep experts equally busy: by an auxiliary loss, or by a bias that each step adjusts",
        needs="experts",
        resumed=True,
    )
    tied: bool | None = option(
        None, "share one weight between embedding and head (default: the preset's)", resumed=True
    )
    strategy: Literal["single", "ddp", "fsdp1", "fsdp2"] = option("fsdp2", "one process, or a data-parallel strategy")
    max_steps: int = option(20, "steps to train, including those before a resume", least=1)
    batch_size: int = option(8, "sequences in a micro-batch on each rank", least=1)
    seq_len: int = option(128, "tokens in a sequence", least=1, resumed=True)
    reshard_after_forward: str = option(
        "true",
        "FSDP: true frees a block's gathered parameters after forward, false keeps them, N keeps 1/N of them",
        form=(r"true|false|[2-9]|[1-9]\d{1,8}", "true, false or a number from 2 on"),
        only=SHARDED,
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = option(
        "fp32", "dtype of the computation; fp16 scales the loss", resumed="print"
    )
    weights: Literal["fp32", "bf16"] = option(
        "fp32", "dtype of parameters (LoRA's frozen ones, too), gradients and optimizer state", resumed="print"
    )
    recompute: Literal[networks.RECOMPUTE] = option(
        "none",
        "activation checkpointing: none, full (save a block's input), selective (save matmuls and attention too), "
        "alternate (save every second matmul, and attention)",
    )
    recompute_every: int = option(1, "recompute every N-th block, starting with the first", least=1)
    offload_activations: bool = option(False, "keep the inputs of recomputed blocks in CPU memory until backward")
    loss_chunks: int = option(1, "compute logits and loss in N chunks of the tokens", least=1)
    wrap: Literal["blocks", "blocks+embeddings"] = option(
        "blocks",
        "FSDP's wrapping policy: each block and the root with the rest; or embedding and head separately, too",
        only=SHARDED,
    )
    cpu_offload: bool = option(False, "FSDP: shards, gradients and optimizer state in CPU memory", only=SHARDED)
    mesh: str | None = option(
        None,
        "device mesh: 2x4 (HSDP: 2 replicas, 4 shards each), or named: shard=4,tensor=2; shard=4,expert=2 spreads the "
        "experts of these 4 ranks over 2",
        form=FORM,
        only=SHARDED,
    )
    context_attention: Literal[context.FORMS] = option(
        "ring",
        "--mesh context=N: how attention sees whole sequences; ring passes keys and values on, for any number of heads and "
        "without holding all of them; gather all-gathers them; ulysses exchanges tokens for heads",
        only=("fsdp2",),
    )
    prefetch: int = option(0, "FSDP2: all-gather N units ahead; 0: FSDP2's default", least=0, only=("fsdp2",))
    accumulate: int = option(1, "micro-batches in a step", least=1, at_most=10_000)
    sync: Literal["every", "last"] = option("every", "after which micro-batch of a step the ranks average gradients")
    clip: float | None = option(None, "maximum global norm of the gradient", above=0, resumed="print")
    compile: bool = option(False, "compile each block's forward")
    optimizer: Literal["adamw", "adamw-fused", "adamw-for-loop", "adamw-bf16", "momentum", "sgd", *muon.WAYS] = option(
        "adamw",
        "optimizer; adamw is PyTorch's foreach implementation; adamw-bf16 has states in bf16, and rounds them, and weights "
        "in bf16, stochastically; muon updates the blocks' matrices, and AdamW the rest: under "
        "FSDP2 each on its owner; muon-gather: on all ranks; muon-dtensor: by torch.optim.Muon",
        resumed=True,
    )
    lora: int | None = option(
        None, "freeze the model, and train LoRA adapters of this rank on query and value", least=1, resumed=True
    )
    lr: float = option(1e-3, "learning rate", above=0, resumed="print")
    warmup_steps: int = option(
        0, "raise the learning rate linearly to --lr over the first N steps", least=0, resumed="print"
    )
    lr_schedule: Literal["constant", "cosine", "wsd"] = option(
        "constant",
        "learning rate after the warm-up: constant, cosine decay, or warmup-stable-decay (constant, then linear decay)",
        resumed="print",
    )
    decay_steps: int | None = option(
        None,
        "--lr-schedule wsd: decay over the last N steps (default: a tenth of --max-steps)",
        least=1,
        resumed="print",
    )
    min_lr: float = option(0.0, "learning rate at which the decay ends", least=0, resumed="print")
    weight_decay: float = option(0.01, "AdamW's weight decay; the default is PyTorch's", least=0, resumed="print")
    decay_1d: bool = option(
        True, "AdamW: apply weight decay to norms and biases, too; --no-decay-1d: to matrices only", resumed="print"
    )
    seed: int = option(1, "seed of the initial weights and the order of the text", resumed=True)
    checkpoint_every: int | None = option(None, "also save every N steps", least=1, needs="checkpoint")

    @property
    def shape(self) -> GPTShape:
        """The shape of the model."""
        shape = GPT_SHAPES[self.preset]
        if self.tied is not None:
            shape = dataclasses.replace(shape, tie_word_embeddings=self.tied)
        return with_experts(shape, self) if self.experts else shape

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts, so that --mesh may have a dimension for them."""
        return bool(self.experts)

    @property
    def tied_weights(self) -> bool:
        """Whether embedding and head share one weight."""
        return self.shape.tie_word_embeddings

    @property
    def wraps_embeddings(self) -> bool:
        """Whether embedding and head are FSDP units of their own."""
        return self.wrap == "blocks+embeddings"

    @property
    def _dimensions(self) -> Mesh:
        return Mesh.parse(self.mesh) if self.mesh else Mesh()

    @property
    def tp_degree(self) -> int:
        """Tensor-parallel degree: the number of ranks that share each matmul."""
        return self._dimensions.tensor

    @property
    def cp_degree(self) -> int:
        """Context-parallel degree: the number of ranks that share each sequence."""
        return self._dimensions.context

    @property
    def ep_degree(self) -> int:
        """Expert-parallel degree: the number of ranks that have different experts."""
        return self._dimensions.expert

    @property
    def shards(self) -> int:
        """Number of shards of one copy of the model, according to --mesh."""
        return self._dimensions.shard

    @property
    def replicas(self) -> int:
        """Number of copies of the model, according to --mesh."""
        return self._dimensions.replicate

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self._dimensions.pipeline

    @property
    def mixed(self) -> bool:
        """Whether to compute in mixed precision: in bf16 or fp16 with weights in fp32."""
        return self.precision in ("bf16", "fp16") and self.weights == "fp32"

    @property
    def reshard(self) -> bool | int:
        """``fully_shard``'s argument ``reshard_after_forward``."""
        value = self.reshard_after_forward
        return int(value) if value.isdecimal() else value == "true"

    @property
    def decay_begin(self) -> int:
        """Index of the step at which the learning rate starts to decay; ``max_steps`` if it never does."""
        decay_steps = self.decay_steps or math.ceil(self.max_steps / 10)
        begin = {"cosine": self.warmup_steps, "wsd": self.max_steps - decay_steps}
        return begin.get(self.lr_schedule, self.max_steps)

    @property
    def decay_fits(self) -> bool:
        """Whether the decay starts after the warm-up and before the end, or there is no decay."""
        if self.lr_schedule == "constant" or self.max_steps is None:  # of --epochs, whose steps the data decide
            return True
        return self.warmup_steps <= self.decay_begin < self.max_steps

    @property
    def decays_upwards(self) -> bool:
        """Whether the decay would end at a higher learning rate than it starts with."""
        return self.min_lr > self.lr

    @property
    def uses_adamw(self) -> bool:
        """Whether the optimizer is AdamW, in any implementation, or Muon, which leaves some parameters to it."""
        return self.optimizer.startswith(("adamw", "muon"))

    @property
    def planned_strategy(self) -> str:
        """The planner's name of the strategy (``Plan.strategy``)."""
        return self.strategy

    def arranged(self, world_size: int) -> Mesh:
        """Return the device mesh of ``world_size`` ranks.

        Raises:
            UserError: the options, or the dimensions of the model, do not fit this number of ranks.
        """
        mesh = arrange(world_size, self.mesh, self.reshard_after_forward)
        if mesh.context > 1:
            self.shape.check_context_parallel(mesh.context, mesh.tensor, self.context_attention, self.seq_len)
        if mesh.tensor > 1:
            self.shape.check_tensor_parallel(mesh.tensor, self.seq_len // mesh.context)
        if self.experts:
            self.shape.check_expert_parallel(mesh.expert)
        return mesh

    def plan(self, ranks: int, *, on_gpu: bool, at_least: bool = False, **how) -> Plan:
        """Plan the memory, collectives, and time of one rank of a run with these options.

        Args:
            ranks: the number of ranks.
            on_gpu: whether to plan for a GPU's kernels instead of the CPU's.
            at_least: whether a lower bound is acceptable if the run itself cannot be planned.
            how: further fields of ``Plan``.

        Raises:
            UserError: the planner does not cover these options.
        """
        return predict.transformer_plan(self, ranks, on_gpu=on_gpu, **how)


def with_experts(shape: GPTShape, options: TransformerTraining) -> GPTShape:
    """Return the shape of a mixture of experts, each as large as the feed-forward network of ``shape``.

    Raises:
        UserError: --top-k is larger than --experts.
    """
    size = shape.intermediate_size
    experts = Experts(
        options.experts,
        options.top_k,
        size,
        shared_size=size if options.shared_expert else 0,
        capacity_factor=options.capacity_factor,
        balance=options.balance,
    )
    return dataclasses.replace(shape, experts=experts, layers=(Layer(routed=True),) * shape.num_hidden_layers)


UNSCALED = "dtype of the computation"  # --help of labs without fp16, which would have to scale the loss

# The options above that all transformer labs take
COMMON = ("max_steps", "batch_size", "seq_len", "precision", "recompute", "accumulate", "clip", "lr", "seed")
COMMON += ("checkpoint_every", "warmup_steps", "lr_schedule", "decay_steps", "min_lr", "weight_decay", "decay_1d")


@of_lab("gpt_zero.py")
@dataclass(frozen=True)
class ZeroTraining(TransformerTraining, takes=(*COMMON, "preset", "tied", "recompute_every", "cpu_offload")):
    """The options of gpt_zero.py: --stage and --engine determine gpt_fsdp.py's strategy, sync, and resharding."""

    conflicts = (
        Conflict(
            {"engine": "deepspeed"},
            {"cpu_offload": True, "stage": "0"},
            "--cpu-offload goes with --stage 1, 2 or 3; with {c.stage} leave it out",
        ),
        Conflict(
            {"engine": "torch"},
            {"cpu_offload": True, "stage": ("0", "1")},
            "--cpu-offload goes with --stage 2 or 3, or --engine deepspeed from 1 on; with {c.stage} leave it out",
        ),
        Conflict(
            {"engine": "deepspeed"},
            {"precision": "fp64"},
            "DeepSpeed reduces gradients and steps in fp32: leave --precision fp64 out, or use --engine torch",
        ),
        Conflict(
            {"engine": "deepspeed"},
            {"checkpoint": GIVEN},
            "DeepSpeed's checkpoints have a format of their own: leave --checkpoint out, or use --engine torch",
        ),
        Conflict(
            {"engine": "torch", "stage": "1"},
            {"checkpoint": GIVEN},
            "ZeroRedundancyOptimizer saves its state on one rank only: leave --checkpoint out, or take another --stage",
        ),
    )

    stage: Literal["0", "1", "2", "3"] = option(
        "3", "what is partitioned: nothing, optimizer state, gradients too, parameters too"
    )
    precision: Literal["fp32", "bf16", "fp64"] = redeclared(TransformerTraining, "precision", help=UNSCALED)
    engine: Literal["torch", "deepspeed"] = option("torch", "which library partitions it")
    cpu_offload: bool = option(
        False, "optimizer state and step on the CPU; with --engine torch, parameters and gradients are there, too"
    )

    @property
    def strategy(self) -> str:
        """gpt_fsdp.py's name of the strategy."""
        return "deepspeed" if self.engine == "deepspeed" else "ddp" if self.stage in ("0", "1") else "fsdp2"

    @property
    def planned_strategy(self) -> str:
        return zero.STRATEGIES[self.engine, self.stage]

    @property
    def reshard_after_forward(self) -> str:
        return "false" if (self.engine, self.stage) == ("torch", "2") else "true"

    @property
    def sync(self) -> str:
        """When to reduce gradients: unsharded ones after a step's last micro-batch, sharded ones after each."""
        return "last" if self.stage in ("0", "1") else "every"

    def plan(self, ranks: int, **how) -> Plan:
        if self.cpu_offload and self.engine == "deepspeed":
            raise UserError("the memory of DeepSpeed's --cpu-offload is not predicted: leave it out")
        return super().plan(ranks, **how)


@of_lab("gpt_pipeline.py")
@dataclass(frozen=True)
class PipelineTraining(TransformerTraining, takes=(*COMMON, "preset", "optimizer")):
    """The options of gpt_pipeline.py."""

    strategy: ClassVar[str] = "pipeline"

    precision: Literal["fp32", "bf16", "fp64"] = redeclared(TransformerTraining, "precision", help=UNSCALED)
    mesh: str | None = option(None, "number of stages: pipeline=4 (default: every rank is a stage)", form=FORM)
    schedule: Literal[tuple(pipeline.SCHEDULES)] = option("1f1b", "order of a stage's forwards and backwards")
    batch_size: int = redeclared(TransformerTraining, "batch_size", default=2, help="sequences in a micro-batch")
    accumulate: int = redeclared(TransformerTraining, "accumulate", default=8)

    def arranged(self, world_size: int) -> Mesh:
        """Return the device mesh of ``world_size`` ranks; every rank is a stage.

        Raises:
            UserError: the options do not fit this number of ranks.
        """
        mesh = arrange(world_size, self.mesh or f"pipeline={world_size}")
        pipeline.check(mesh, self.shape, self.schedule, self.accumulate)
        return mesh

    def plan(self, ranks: int, *, on_gpu: bool, rank: int = 0, at_least: bool = False, **how) -> Plan:
        """Plan the stage of ``rank``."""
        return predict.stage_plan(self, Stage(ranks, rank, self.schedule), on_gpu=on_gpu, **how)


@of_lab("hf_fsdp.py")
@dataclass(frozen=True)
class HuggingFaceTraining(
    TransformerTraining,
    takes=(*COMMON, "strategy", "lora", "weights", "cpu_offload", "mesh", "prefetch", "sync", "compile", "loss_chunks"),
):
    """The options of hf_fsdp.py."""

    has_experts: ClassVar[bool] = True

    conflicts = (
        Conflict(
            {"model": GIVEN},
            {"config": GIVEN},
            "give --model FOLDER for a model with weights, or --config FILE for random ones",
        ),
        Conflict(
            {"model": None},
            {"config": None},
            "give --model FOLDER for a model with weights, or --config FILE for random ones",
        ),
        Conflict(
            {"cp_degree": several},
            {"mesh": GIVEN},
            "--mesh {c.mesh} shares each sequence, which gpt_fsdp.py does: leave context out",
        ),
        Conflict(
            {"tokens": "model"},
            {"model": None},
            "--tokens model needs --model: the tokenizer is in the folder of the weights",
        ),
        Conflict(
            {"max_steps": GIVEN},
            {"epochs": GIVEN},
            "--epochs and --max-steps both set when training ends: give one of them",
        ),
        Conflict(
            {"validation_share": lambda share: share is not None and not 0 < share < 1},
            {},
            "--validation {c.validation} is no share between 0 and 1: give 0.05, or name a file",
        ),
        Conflict(
            {"adapters": GIVEN},
            {"lora": GIVEN},
            "--adapters continues with its own rank, alpha, dropout and targets: leave --lora out",
        ),
        Conflict(
            {"merge": True},
            {"adapts": False},
            "--merge adds adapters to the weights of their model: give --lora or --adapters, too",
        ),
        Conflict(
            {"tp_degree": several},
            {"adapters": GIVEN},
            "--mesh {c.mesh} uses tensor parallelism, which does not support --adapters: leave it out",
        ),
    )

    model: str | None = option(None, "a model's folder: config.json, safetensors, tokenizer.json", resumed=True)
    config: str | None = option(None, "a config.json, or its folder: train from random weights", resumed=True)
    data: str | None = option(
        None,
        "files to train on, separated by commas: text, or JSON lines with text, prompt and completion, or messages; "
        "or any of these as .gz (default: the text of Python's help())",
    )
    packing: Literal["stream", "documents", "padding"] | None = option(
        None,
        "a sequence is: stream, the next tokens of all documents (default for text); documents, as many as fit, none of "
        "which sees another (default for conversations); padding, one document",
        resumed=True,
    )
    epochs: float = option(1.0, "passes over --data; without --data, --max-steps is 20", above=0, resumed="print")
    max_steps: int | None = option(None, "stop after this many steps instead, including those before a resume", least=1)
    validation: str | None = option(
        None,
        "held-out data: files as --data, or the share of --data that is never trained on, such as 0.05",
        resumed=True,
    )
    validate_every: int | None = option(
        None, "also compute the loss on --validation every N steps, not only at the end", least=1, needs="validation"
    )
    tokens: Literal["bytes", "model"] | None = option(
        None, "tokenizer: one token per byte, or the model's own (default with --model)", resumed=True
    )
    save: str | None = option(None, "folder for the trained model (with --lora: the adapters), in the library's format")
    save_every: int | None = option(
        None, "also save every N steps, as FOLDER-step-N next to --save FOLDER", least=1, needs="save"
    )
    merge: bool = option(False, "save the whole model with the adapters added to its weights", needs="save")
    precision: Literal["fp32", "bf16", "fp64"] = redeclared(TransformerTraining, "precision", help=UNSCALED)
    strategy: Literal["single", "ddp", "fsdp2"] = redeclared(TransformerTraining, "strategy")
    batch_size: int = redeclared(TransformerTraining, "batch_size", default=2)
    recompute: Literal["none", "full", "selective"] = redeclared(
        TransformerTraining,
        "recompute",
        help="activation checkpointing: none, full (save a block's input), selective (save matmuls and attention too)",
    )
    reshard_after_forward: Literal["true", "false"] = option(
        "true", "FSDP: true frees a unit's gathered parameters after forward, false keeps them", only=SHARDED
    )
    mesh: str | None = redeclared(
        TransformerTraining,
        "mesh",
        help="device mesh: shard=4,tensor=2; replicate=2 for HSDP; expert=4 spreads a mixture's experts over these ranks",
    )
    lora: int | None = redeclared(
        TransformerTraining, "lora", help="freeze the model, and train peft's adapters of this rank"
    )
    lora_alpha: float | None = option(
        None, "scale of the adapters (default: 2 x --lora)", above=0, needs="lora", resumed=True
    )
    lora_dropout: float = option(
        0.0, "dropout before the adapters", least=0, at_most=0.9, needs="lora", resumed="print"
    )
    lora_targets: str = option(
        "all-linear",
        "adapted modules: all-linear (except the head and experts), or NAME,NAME",
        needs="lora",
        resumed=True,
    )
    adapters: str | None = option(
        None,
        "instead of --lora: continue training the adapters in this folder, which peft or --save has written",
        needs="model",
        resumed=True,
    )
    save_dtype: Literal["fp32", "bf16"] | None = option(
        None, "dtype of the saved model (default: that of --model's files)", needs="save"
    )
    seq_len: int | None = redeclared(
        TransformerTraining, "seq_len", default=None, help="tokens in a sequence (default: 1024 with --data, else 128)"
    )
    lr: float | None = redeclared(
        TransformerTraining,
        "lr",
        default=None,
        help="learning rate (default: 2e-5, small as the weights of --model are trained already; 2e-4 for adapters, "
        "which start at zero; 1e-4 from random weights)",
    )
    seed: int = redeclared(
        TransformerTraining, "seed", help="seed of the initial weights, the order of the text and the dropout"
    )

    def __post_init__(self):
        usual = {"lr": 2e-4 if self.adapts else 2e-5 if self.model else 1e-4, "seq_len": 1024 if self.data else 128}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def shape(self) -> GPTShape:
        """The shape of the model.

        Raises:
            UserError: its configuration cannot be read, or the planner does not know its family.
        """
        return huggingface.load(self.model or self.config, "--model" if self.model else "--config")

    @property
    def wraps_embeddings(self) -> bool:
        return not self.shape.tie_word_embeddings

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained instead of the model."""
        return bool(self.lora or self.adapters)

    @property
    def validation_share(self) -> float | None:
        """The share of --data that is held out; None if --validation names files."""
        try:
            return float(self.validation)
        except (TypeError, ValueError):
            return None

    def with_steps(self, epochs: int):
        """Return these options with the number of steps in which the run ends, ``epochs`` if that decides."""
        return dataclasses.replace(self, epochs=1.0, max_steps=self.max_steps or (epochs if self.data else 20))

    def arranged(self, world_size: int) -> Mesh:
        """Return the device mesh of ``world_size`` ranks; the library checks whether it fits the model."""
        return arrange(world_size, self.mesh)

    def plan(self, ranks: int, *, at_least: bool = False, **how) -> Plan:
        """Plan a run. at_least: plan the course's LoRA adapters instead of peft's, which cover more layers."""
        if self.adapts and not at_least:
            raise UserError("peft's adapters, on every linear layer, are not planned: train a few steps with --record")
        if self.ep_degree > 1:
            raise UserError(
                f"--mesh {self.mesh}: what a rank needs depends on the experts that tokens choose: leave expert out"
            )
        if uncovered := networks.gpt(self.shape, 1, 1, tp_degree=self.tp_degree).unmodeled or (
            not self.adapts and coverage.uncovered_options(self)
        ):
            raise UserError(f"arithmetic does not cover {uncovered}: plan.py simulates it")
        changes = {"strategy": "single"} if ranks == 1 and self.strategy == "fsdp2" else {}
        if self.adapters:  # at least of rank 1
            changes |= {"adapters": None, "merge": False, "lora": 1}
        if self.adapts and self.precision == "bf16":  # the frozen base is in bf16, and adapters are few
            changes["weights"] = "bf16"
        return super(HuggingFaceTraining, dataclasses.replace(self, **changes)).plan(ranks, **how)
