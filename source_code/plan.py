"""Will it fit, and what will it cost? Plan a training run before paying for it.

  python plan.py --preset llama3-8b --ranks 8 --batch-size 1 --seq-len 8192 --precision bf16 --recompute full
  python plan.py --preset llama3-70b --precision bf16 --find ranks      the least; --find batch-size or seq-len: the most
  python plan.py --preset llama3-70b --precision bf16 --ranks 64 --sweep    every strategy, those that fit first
  python plan.py --config config.json --gpu a100 --ranks 16   a third-party model, by Hugging Face's configuration
  python plan.py --ranks 8 --tokens 15e9 --price 2.5          hours, GPU-hours and money
  python plan.py --preset llama3-8b --strategy single --lora 16 --frozen nf4 --precision bf16 --gpu rtx4090        QLoRA
  python plan.py --preset llama3-8b --ranks 8 --explain       each term of the peak with its numbers
  python plan.py --ranks 8 --plot plan.png                    the same as a picture, and the memory of a step
  python plan.py --ranks 4 --simulate                         PyTorch's own code next to it, on tensors without memory
  python plan.py --config config.json --device cpu --simulate           the library's own code next to it
  python plan.py --module my_model.py:build --ranks 8         your own: see below

It takes the options of gpt_fsdp.py, with the same defaults: write plan.py for gpt_fsdp.py in a command, and see what it
needs. A plan ends with the command that runs it. Some strategies are other labs': zero1 and deepspeed-N are gpt_zero.py's,
--mesh pipeline=N is gpt_pipeline.py's, --config and --model are hf_fsdp.py's.

It needs nothing but Python, except with --simulate, --plot and --module. The answer is "fits", "tight" or "does not fit",
for what PyTorch reserves and what else a process holds on a GPU (planner/gpus.py has the figures and their sources): tight
is what fits only if the allocator reserves nothing beyond the plan.

The arithmetic is planner/predict.py's. For the CPU's kernels (--device cpu) it agrees with the meters to within 1 %, as
proofs/memory.py shows; for a GPU's with PyTorch's own code, which runs a GPU's operators on tensors without memory (--simulate),
and not yet with a GPU. Times are bounds: the collectives' bytes over the links' published bandwidth, and operations over
--efficiency of the GPU's published peak.

Your own model: a function without arguments that returns (module, inputs, loss), where loss(module, *inputs) is the
number to minimize, for the batch of one rank. Its units are the members of its ModuleLists; what these have inside,
such as a block's experts, belongs to them. It trains with AdamW; in bf16 by FSDP's mixed precision, on a single rank by
autocast around ``loss``. Its peak is simulated, with the kernels of the CPU, so its shapes and control flow must not
depend on data; its persistent memory and its traffic are predicted.
"""

import dataclasses
import importlib.util
import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from labkit import UserError
from labkit.running.lab_options import LABS, TransformerTraining
from labkit.running.options import (
    GIVEN,
    Conflict,
    arguments,
    choices_of,
    declared,
    exit_with_error,
    flag,
    option,
    parse,
    redeclared,
)
from planner import predict
from planner.cli import report
from planner.cli.commands import STRATEGIES, describe, find, plan_from_options, sweep
from planner.gpus import GPU, GPUS
from planner.models import huggingface
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.parallel import pipeline, zero
from planner.parallel.mesh import arrange
from planner.step.plan import STATES
from planner.timing import cost

DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in range(4))
# What a plan rests on, and its command says, even where a lab's default is another
RESTS_ON = ("ranks", "batch_size", "accumulate")
TITLED = ("preset", "strategy", "mesh", "batch_size", "seq_len", "precision", "recompute", "optimizer")


def leave_out(when: dict, names: tuple, sentence: str) -> tuple[Conflict, ...]:
    """Return a row for each option that does not go together with ``when``."""
    return tuple(Conflict(when, {name: GIVEN}, sentence) for name in names)


@dataclass(frozen=True)
class Config(TransformerTraining):
    """What to plan: gpt_fsdp.py's options, some of them with more choices, and what else decides whether it fits."""

    conflicts = (
        *(
            Conflict(
                {"strategy": DEEPSPEED},
                {name: GIVEN},
                f"what DeepSpeed makes of {flag(name)} is not predicted: leave it out, or take another --strategy",
            )
            for name in ("weights", "loss_chunks", "lora")
        ),
        Conflict(
            {"strategy": "fsdp1"},
            {"cpu_offload": True},
            "what FSDP1 does with --cpu-offload is not predicted: take --strategy fsdp2",
        ),
        Conflict(
            {"wrap": "blocks+embeddings"},
            {"strategy": ("single", "ddp", "zero1", *DEEPSPEED)},
            "--wrap blocks+embeddings goes with --strategy fsdp1 or fsdp2; with {c.strategy} leave it out",
        ),
        Conflict(
            {"flops": None},
            {"peak_known": False},
            "no peak is known of {c.gpu} in {c.precision}: give --flops, or another --precision",
        ),
        *leave_out(
            {"sweep": True},
            ("simulate", "explain", "module"),
            "--sweep compares predictions of the course's models: leave --simulate, --explain and --module out",
        ),
        Conflict(
            {"module": GIVEN},
            {"explain": True},
            "--explain shows predicted terms, and the peak of --module is simulated: leave it out",
        ),
        Conflict(
            {"simulates": True},
            {"strategy": ("ddp", "zero1", *DEEPSPEED)},
            "--strategy {c.strategy} cannot be simulated: take single, fsdp1 or fsdp2",
        ),
        Conflict(
            {"module": GIVEN},
            {"decided_by_module": GIVEN},
            "{c.decided_by_module[0]} is for the course's models, and your own function decides it: leave it out",
        ),
        Conflict(
            {"module": GIVEN},
            {"precision": "fp64"},
            "--precision fp64 is for the course's models: your own function makes its tensors",
        ),
        *(
            Conflict(
                {"simulate": True},
                excluded,
                "neither --cpu-offload, adamw-8bit nor nf4 is simulated: leave --simulate out",
            )
            for excluded in ({"cpu_offload": True}, {"optimizer": "adamw-8bit"}, {"frozen": "nf4"})
        ),
        Conflict(
            {"third_party": True},
            {"tied": GIVEN},
            "--tied is for the course's models, and a model's configuration says it itself: leave it out",
        ),
        Conflict(
            {"third_party": True},
            {"splits_model": True},
            "--mesh {c.mesh} is planned for the course's models alone: leave --config and --model out",
        ),
        Conflict(
            {"third_party": True},
            {"too_long": True},
            "--seq-len {c.seq_len} is longer than the {c.longest} positions that this model has learned",
        ),
        Conflict(
            {"third_party": True},
            {"simulate": True, "on_gpu": True},
            "third-party models are simulated with the CPU's kernels: give --device cpu too",
        ),
        Conflict(
            {"third_party": True},
            {"simulate": True, "lacking": GIVEN},
            "hf_fsdp.py, which is simulated, has no {c.lacking[0]}: leave it out",
        ),
        Conflict(
            {"pipelined": True},
            {"lacking": GIVEN},
            "a pipeline is not planned together with {c.lacking[0]}: leave one of them out",
        ),
        *leave_out(
            {"pipelined": True},
            ("sweep", "simulate"),
            "--mesh {c.mesh} is neither swept nor simulated: leave --sweep and --simulate out",
        ),
        Conflict(
            {"pipelined": False},
            {"schedule": GIVEN},
            "--schedule is a pipeline's: give --mesh pipeline=STAGES too",
        ),
        *leave_out(
            {"find": GIVEN},
            ("sweep", "simulate", "explain", "module", "plot", "tokens"),
            "--find compares predictions: leave --sweep, --simulate, --explain, --module, --plot and --tokens out",
        ),
        *(
            Conflict(
                {"find": "ranks"},
                excluded,
                "--find ranks tries any number of them: leave --mesh, --strategy single and a part to keep out",
            )
            for excluded in ({"mesh": GIVEN}, {"reshard_after_forward": str.isdecimal}, {"strategy": "single"})
        ),
        *(
            Conflict(
                asked,
                {"cpu_offload": True},
                f"{what} asks for the GPUs' memory, and --cpu-offload for the CPUs': leave one of them out",
            )
            for what, asked in {"--sweep": {"sweep": True}, "--find ranks": {"find": "ranks"}}.items()
        ),
        *leave_out(
            {"plot": GIVEN},
            ("sweep", "module", "pipelined", "json"),
            "--plot draws the plan of one rank: leave --sweep, --json, --module and a pipeline out",
        ),
        *leave_out({"tokens": GIVEN}, ("sweep", "module"), "--tokens is for one plan: leave --sweep and --module out"),
    )
    launched: ClassVar[bool] = False
    dry_run: ClassVar[bool] = False  # a plan is no run

    preset: Literal[tuple(GPT_SHAPES)] | None = redeclared(
        TransformerTraining, "preset", default=None, help="size of the model (default: tiny)"
    )
    config: str | None = option(None, "instead of --preset: a config.json of Hugging Face's, or its folder")
    model: str | None = option(None, "instead of --preset: a model's folder, with its config.json")
    module: str | None = option(
        None, "instead of --preset: your own nn.Module, from FILE.py:function", form=(r".+\.py:\w+", "FILE.py:function")
    )
    ranks: int | None = option(
        None, "how many ranks train (default: 8; with --strategy single, 1)", least=1, at_most=1_000_000
    )
    strategy: Literal[STRATEGIES] = redeclared(
        TransformerTraining,
        "strategy",
        help="one process, or how the ranks share; zero1 is PyTorch's ZeroRedundancyOptimizer",
    )
    mesh: str | None = redeclared(
        TransformerTraining, "mesh", help="2x4 (HSDP); or named, as shard=4,tensor=2; or pipeline=STAGES"
    )
    schedule: Literal[tuple(pipeline.SCHEDULES)] = option("1f1b", "pipeline: the order of forwards and backwards")
    wrap: Literal["blocks", "blocks+embeddings"] | None = redeclared(
        TransformerTraining,
        "wrap",
        default=None,
        only=(),  # but see the table: "blocks", typed, is no choice
        help="FSDP's units: blocks, and the root with the rest; or embedding and head too (default: as the lab does)",
    )
    frozen: Literal["fp32", "nf4"] = option(
        "fp32", "number format of the blocks' frozen matrices; nf4 is QLoRA's (not validated)", needs="lora"
    )
    optimizer: Literal[tuple(STATES)] = redeclared(
        TransformerTraining,
        "optimizer",
        help="optimizer; adamw is PyTorch's foreach implementation; adamw-8bit is bitsandbytes' (not validated)",
    )
    device: Literal["auto", "cpu", "cuda"] = redeclared(
        TransformerTraining, "device", help="whose kernels: they save different tensors for backward; auto: a GPU's"
    )
    node_size: int = option(8, "ranks on a node", least=1)
    gpu: Literal[tuple(GPUS)] = option(
        "h100",
        "the GPU, with the GiB that PyTorch finds on it: "
        + ", ".join(f"{name} {gpu.memory:g}" for name, gpu in GPUS.items()),
    )
    gpu_memory: float | None = option(None, "GiB that a rank may use (default: the GPU's)", above=0, at_most=1e9)
    flops: float | None = option(
        None, "operations per second a rank does at best (default: of the GPU's data sheet, for --precision)", least=1
    )
    efficiency: float = option(0.4, "share of these that training attains", least=1e-6, at_most=1)
    link: str | None = option(None, f"within a node: {', '.join(cost.LINKS)}, or GB/s per rank (default: the GPU's)")
    network: str = option(
        "infiniband",
        "between nodes: "
        + ", ".join(f"{name} ({link.bandwidth / 1e9:g} GB/s per node)" for name, link in cost.NETWORKS.items())
        + ", or GB/s per node",
    )
    find: Literal["ranks", "batch-size", "seq-len"] | None = option(
        None, "search for the least --ranks, or the most of the others, that fits"
    )
    tokens: float | None = option(None, "how many tokens to train on, such as 15e9: prints the hours", least=1)
    price: float | None = option(None, "of a GPU for an hour, in any currency", above=0, needs="tokens")
    sweep: bool = option(False, "list every strategy: what fits, the fastest first, then what does not")
    explain: bool = option(False, "show each term of the peak with its numbers")
    plot: str | None = option(
        None, "draw the memory of a step and the terms of its peak into this file (.png, .svg, .pdf)"
    )
    simulate: bool = option(False, "run PyTorch's own code next to it, on tensors without memory")
    json: bool = option(False, "print JSON instead of tables")

    def __post_init__(self):
        sources = [name for name in ("preset", "config", "model", "module") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise UserError(f"{flag(sources[0])} and {flag(sources[1])} both name a model: leave one of them out")
        # Not the fields' defaults: what is given must be told from what is not.
        if not sources:
            object.__setattr__(self, "preset", TransformerTraining.preset)
        if self.ranks is None:
            object.__setattr__(self, "ranks", 1 if self.strategy == "single" else 8)
        _ = self.shape  # refuses a configuration that cannot be read, which other checks look into
        super().__post_init__()
        arrange(self.ranks, self.mesh, self.reshard_after_forward)

    @cached_property
    def shape(self) -> GPTShape | None:
        """Of the model; None if it is one's own. UserError: --config or --model cannot be read."""
        if self.module:
            return None
        if self.third_party:
            return huggingface.load(self.named, "--config" if self.config else "--model")
        return super().shape

    @property
    def tied_weights(self) -> bool:
        return bool(self.shape and self.shape.tie_word_embeddings)

    @property
    def wraps_embeddings(self) -> bool:
        """As hf_fsdp.py wraps them, if nothing else is asked for."""
        if self.wrap is None and self.third_party:
            return not self.shape.tie_word_embeddings
        return super().wraps_embeddings

    @property
    def third_party(self) -> bool:
        """Whether the model is planned from a configuration of Hugging Face's."""
        return bool(self.config or self.model)

    @property
    def named(self) -> str:
        """The model, as it was asked for."""
        return self.config or self.model or self.module or self.preset

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most: as many as there are learned positions."""
        return self.shape.learned_positions or 10**9

    @property
    def too_long(self) -> bool:
        return self.seq_len > self.longest

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's kernels are planned: as in a lab, gloo alone means on the CPU."""
        return self.device == "cuda" or (self.device == "auto" and self.backend != "gloo")

    @property
    def booked(self) -> GPU:
        return GPUS[self.gpu]

    @property
    def peak_known(self) -> bool:
        return self.precision in self.booked.flops

    @property
    def memory(self) -> float:
        """GiB that a rank may use."""
        return self.gpu_memory or self.booked.memory

    @property
    def peak_flops(self) -> float:
        """Operations a second that a rank does at best."""
        return self.flops or self.booked.flops[self.precision]

    @property
    def pipelined(self) -> bool:
        return self.stages > 1

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds a part of each layer, or some of the layers."""
        return self.pipelined or self.tp_degree > 1

    @property
    def simulates(self) -> bool:
        return bool(self.simulate or self.module)

    @property
    def lab(self) -> str:
        """The lab that trains so, or comes nearest."""
        if self.third_party:
            return "hf_fsdp.py"
        if self.pipelined:
            return "gpt_pipeline.py"
        return "gpt_zero.py" if self.strategy in ("zero1", *DEEPSPEED) else "gpt_fsdp.py"

    @property
    def besides(self) -> dict:
        """The training options that a title names because they differ from their defaults, with their values."""
        return {name: value for name, value in self._changed().items() if name not in TITLED}

    @property
    def decided_by_module(self) -> list[str]:
        """The options given of those that the function of one's own model decides, or that it cannot have."""
        free = ("strategy", "precision", "reshard_after_forward", "max_steps", "lr", "warmup_steps", "lr_schedule")
        free += ("decay_steps", "min_lr", "weight_decay", "decay_1d", "seed", "checkpoint_every")
        return [flag(name) for name in self._changed() if name not in free]

    @property
    def lacking(self) -> list[str]:
        """The training options given that the lab does not take, or not with this value."""
        taken = {field.name: field for field in dataclasses.fields(LABS[self.lab])}
        stands_for_stage = ("strategy",) if self.lab == "gpt_zero.py" else ()
        found = []
        for name, value in self._changed().items():
            if name in stands_for_stage or (name == "wrap" and self._wraps_as_the_lab()):
                continue
            if name not in taken:
                found.append(flag(name))
            elif (choices := choices_of(taken[name])) and value not in choices:
                found.append(f"{flag(name)} {value}")
        return found

    def _wraps_as_the_lab(self) -> bool:
        return self.third_party and self.wraps_embeddings != self.shape.tie_word_embeddings

    def _changed(self) -> dict:
        """The training options that differ from their defaults."""
        names = (*declared(TransformerTraining), "schedule", "frozen")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(type(self), name)}


def answer(options: Config) -> str:
    """What the command prints."""
    if options.sweep or options.find:
        return answer_on_several(options)
    if options.module:
        return answer_on_own(options)
    plan = plan_from_options(options)
    found = describe(options, plan)
    if options.simulate:
        found |= simulated(options)
    if options.plot:
        draw(options, plan)
    if options.json:
        return json.dumps(found | {"command": command(options)[0]}, indent=1)
    parts = [report.plan_text(options, found)]
    if options.explain:
        parts.append(report.explained(plan))
    if options.simulate:
        parts.append(
            f"simulated, with {report.KERNELS[options.on_gpu]}: {report.gib(found['simulated'])} at "
            f"{found['simulated_at']}; predicted: {report.gib(found['peak'])} ({found['peak'] / found['simulated'] - 1:+.2%})"
        )
    return "\n\n".join([*parts, how_to_run(options)])


def answer_on_several(options: Config) -> str:
    """What it prints of several plans, for --sweep and --find."""
    found = sweep(options) if options.sweep else find(options)
    if options.json:
        return json.dumps(found, indent=1)
    page = report.sweep_text if options.sweep else report.find_text
    if options.find and found["found"]:
        best = {found["what"]: found["found"]}
    else:
        best = next((row["options"] for row in found if row["place"]), None) if options.sweep else None
    chosen = [how_to_run(dataclasses.replace(options, find=None, sweep=False, **best))] if best else []
    return "\n\n".join([page(options, found), *chosen])


def how_to_run(options: Config) -> str:
    """The last lines of a page: the command that trains what is planned, or why there is none."""
    words, why = command(options)
    return f"to train it:\n  {words}" if words else f"(no lab of the course trains it: {why})"


def command(options: Config) -> tuple[str | None, str]:
    """Return the command line that trains what is planned, quoted for a shell; or None, and why there is none.

    It has the options that differ from the lab's defaults. Ranks on several nodes are started by Slurm.
    """
    if options.lacking:
        return None, f"{options.lab} has no {options.lacking[0]}"
    lab, words = LABS[options.lab], {}
    names = {field.name for field in dataclasses.fields(TransformerTraining)} | {"schedule", "config", "model"}
    for field in dataclasses.fields(lab):
        if field.name in names - {"wrap", "dry_run"} or (field.name == "wrap" and options.wrap):
            value, default = getattr(options, field.name), getattr(type(options), field.name)
            if value != field.default and (value != default or field.name in RESTS_ON):
                words[field.name] = value
    if options.lab == "gpt_zero.py":
        engine, stage = next(which for which, name in zero.STRATEGIES.items() if name == options.strategy)
        words |= {"stage": stage} | ({"engine": engine} if engine != "torch" else {})
    try:
        lab(**words).arranged(options.ranks)
    except UserError as error:
        return None, f"{options.lab}: {error}"
    return shlex.join([*starter(options), options.lab, *arguments(words)]), ""


def starter(options: Config) -> list[str]:
    """What comes before the lab's name: Python starts the ranks of a node, Slurm those of several."""
    nodes = -(-options.ranks // options.node_size)
    if nodes == 1:
        return ["python"]
    gpus = [f"--gres=gpu:{options.node_size}"] if options.on_gpu else []
    return ["srun", f"--nodes={nodes}", f"--ntasks={options.ranks}", *gpus, "python"]


def draw(options: Config, plan: predict.Plan):
    """Write --plot's file. UserError: what draws is not installed, there is no such format, or it cannot be written."""
    for module in ("matplotlib", "torch"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"--plot draws with the course's figures, and this Python has no {module}: install it")
    from labkit.teaching.plots import planner

    planner.save(planner.step(plan, report.title(options)), options.plot)


def answer_on_own(options: Config) -> str:
    """What it prints of a model of one's own."""
    prepare_to_simulate()
    from labkit.training import own_model

    build = own_model.load(options.module)
    plan = plan_from_options(options, own_model.blueprint(options.module, build))
    # Its error is told as a sentence; PyTorch would log it too, with a page of where it came from.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with own_model.as_user_error(f"{options.module} cannot be simulated"):
        keep = options.reshard_after_forward
        found = peak_of(own_model.step(build, options.ranks, options.strategy, options.precision, keep))
    return json.dumps(found, indent=1) if options.json else report.own_text(options, plan, found)


def prepare_to_simulate():
    """Hide GPUs, as tensors without memory need none. UserError where there is no PyTorch: planning does without."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("simulating runs PyTorch's own code, and this Python has none: pip install torch")
    from labkit.running import gpus

    gpus.hide()


def simulated(options: Config) -> dict:
    """The peak of PyTorch's own code: see ``peak_of``."""
    prepare_to_simulate()
    from labkit.measuring.gpu_operators import GpuOperators
    from labkit.running import simulated_lab

    unseen = {"compile": False, "checkpoint_every": None}  # by a simulation
    given = {name: getattr(options, name) for name in (*declared(TransformerTraining), "log")} | unseen
    if options.third_party:
        import hf_fsdp  # and with it transformers, which takes seconds

        names = {field.name for field in dataclasses.fields(hf_fsdp.Config)} & given.keys()
        given = {name: given[name] for name in names} | {"model": options.model, "config": options.config}
        return peak_of(simulated_lab.step(hf_fsdp, hf_fsdp.Config(device="cpu", **given), options.ranks))
    import gpt_fsdp

    gpu = GpuOperators() if options.on_gpu else None
    given["wrap"] = options.wrap or TransformerTraining.wrap
    return peak_of(simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(**given), options.ranks, gpu))


def peak_of(memory: dict) -> dict:
    """{"simulated": bytes, "simulated_at", "simulated_by_category"} of what ``simulate.step`` has returned."""
    peak = {name: size for name, size in memory["peak"].items() if size}
    where = f"{memory['peak_phase']}, {memory['peak_operator']}"
    return {"simulated": sum(peak.values()), "simulated_at": where, "simulated_by_category": peak}


def main():
    options = parse(Config, __doc__)
    try:
        print(answer(options))
    except UserError as error:
        exit_with_error(str(error))
    except BrokenPipeError:  # whoever read has seen enough: plan.py … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
