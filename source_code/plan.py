"""Will it fit, and what will it cost? Plan a training run before paying for it.

  python plan.py --model llama3-8b --ranks 8 --strategy fsdp2 --seq 8192 --batch 1 --precision bf16 --recompute full
  python plan.py --model llama3-70b --find ranks              the least that fits; --find batch, --find seq: the most
  python plan.py --model llama3-70b --ranks 64 --sweep        every strategy, those that fit first
  python plan.py --config config.json --gpu a100 --ranks 16   a model of others, by Hugging Face's configuration
  python plan.py --ranks 8 --tokens 15e9 --price 2.5          hours, GPU-hours and money
  python plan.py --ranks 1 --strategy single --lora 16 --frozen nf4 --loss-chunks 8 --gpu rtx4090        QLoRA
  python plan.py --model llama3-8b --ranks 8 --explain        each term of the peak with its numbers
  python plan.py --ranks 8 --plot plan.png                    the same as a picture, and the memory of a step
  python plan.py --model tiny --ranks 4 --simulate            the real PyTorch code beside it, on tensors without memory
  python plan.py --config config.json --device cpu --units apart --simulate          the library's own code beside it
  python plan.py --model my_model.py:build --ranks 8          your own: see below

It needs nothing but Python, --simulate, --plot and models of your own excepted. The answer is "fits", "tight" or "does
not fit", for what PyTorch reserves and what else a process holds on a GPU (planner/gpus.py has the figures and their
sources): tight is what fits only if the allocator reserves nothing beyond the plan.

The arithmetic is planner/predict.py's. For the CPU's kernels (--device cpu) it agrees with the meters to within 1 %, as
proofs/memory.py shows; for a GPU's with PyTorch's own code, which runs a GPU's operators on tensors without memory (--simulate),
and not yet with a GPU. Times are bounds: the collectives' bytes over the links' published bandwidth, and operations over
--efficiency of the GPU's published peak.

Your own model: a function without arguments that returns (module, inputs, loss), where loss(module, *inputs) is the
number to minimise, for the batch of one rank. Its units are the members of its ModuleLists; what these have inside,
such as a block's experts, belongs to them. It trains with AdamW; in bf16 by FSDP's mixed precision, on a single rank by
autocast around ``loss``. Its peak is simulated, with the kernels of the CPU, so its shapes and control flow must not
depend on data; what stays from step to step and what is sent is predicted.
"""

import dataclasses
import importlib.util
import json
import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from labkit import UserError
from labkit.running.options import RESHARD, SHARDED, check_choices, flag, leave, option, parse
from labkit.running.options import Options as Base
from planner import predict
from planner.cli import report
from planner.cli.commands import STRATEGIES, describe, find, plan_from_options, sweep
from planner.gpus import GPU, GPUS
from planner.models import huggingface, networks
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.parallel import pipeline
from planner.parallel.mesh import FORM, arrange
from planner.step.plan import STATES
from planner.timing import cost

MODEL = "llama3-8b"  # unless --model or --config names another
TORCHS = ("single", "ddp", "zero1", "fsdp1", "fsdp2")  # what DeepSpeed makes of some choices is not predicted
SIMULATED = ("single", "fsdp1", "fsdp2")
# What is not planned of the stages of a pipeline
ALONE = ("sync", "prefetch", "weights", "recompute_every", "loss_chunks", "units", "lora", "cpu_offload")
# What is not simulated of models of others
NOT_IN_HF = (
    "mesh",
    "reshard_after_forward",
    "optimizer",
    "sync",
    "prefetch",
    "weights",
    "recompute_every",
    "loss_chunks",
)
NOT_IN_HF += ("lora", "cpu_offload")


@dataclass(frozen=True)
class Options(Base):
    """What to plan. The command line is made from these fields."""

    model: str | None = option(None, f"{', '.join(GPT_SHAPES)}, or FILE.py:function (default: {MODEL})")
    config: str | None = option(None, "instead of --model: a config.json of Hugging Face's, or its folder")
    ranks: int = option(8, "how many ranks train", least=1, at_most=1_000_000)
    node_size: int = option(8, "ranks on a node", least=1)
    strategy: Literal[STRATEGIES] = option("fsdp2", "how the ranks share: zero1 is PyTorch's ZeroRedundancyOptimizer")
    mesh: str | None = option(
        None,
        "HSDP: REPLICASxSHARDS, such as 2x4; or named, as shard=8,tensor=8; or pipeline=STAGES",
        form=FORM,
        only=SHARDED,
    )
    schedule: Literal[tuple(pipeline.SCHEDULES)] = option("1f1b", "pipeline: the order of forwards and backwards")
    reshard_after_forward: str = option(
        "true",
        "FSDP: free gathered parameters, keep them (false), or keep one part in N",
        form=RESHARD,
        only=SHARDED,
    )
    batch: int = option(1, "sequences in a micro-batch on each rank", least=1)
    seq: int = option(8192, "tokens in a sequence", least=1)
    accumulate: int = option(1, "micro-batches in a step", least=1, at_most=10_000)
    precision: Literal["fp32", "bf16", "fp64"] = option("bf16", "number format of the computation")
    sync: Literal["every", "last"] = option("every", "after which micro-batch of a step the ranks average gradients")
    prefetch: int = option(0, "FSDP2: gather this many units ahead; 0 leaves it to FSDP2", least=0, only=("fsdp2",))
    weights: Literal["fp32", "bf16"] = option(
        "fp32", "number format of parameters (LoRA's frozen ones too), gradients and optimizer state", only=TORCHS
    )
    recompute: Literal[networks.RECOMPUTE] = option(
        "full",
        "what backward computes again: nothing, blocks, or all but (every second of their) products and attention",
    )
    recompute_every: int = option(1, "recompute the first block, and each so many blocks further on", least=1)
    loss_chunks: int = option(
        1, "compute logits and loss for one in so many parts of the tokens at a time", least=1, only=TORCHS
    )
    units: Literal["blocks", "apart"] = option(
        "blocks", "FSDP: what is gathered together, each block and the rest; or embedding and head apart", only=SHARDED
    )
    lora: int | None = option(
        None, "freeze the model, and train LoRA adapters of this width on queries and values", least=1, only=TORCHS
    )
    frozen: Literal["fp32", "nf4"] = option(
        "fp32", "number format of the blocks' frozen matrices; nf4 is QLoRA's (not on trial)", needs="lora"
    )
    cpu_offload: bool = option(
        False, "shards, gradients and optimizer state in CPU memory; its copies are not in the time", only=("fsdp2",)
    )
    optimizer: Literal[tuple(STATES)] = option(
        "adamw", "optimizer; adamw is PyTorch's foreach implementation; adamw-8bit is bitsandbytes' (not on trial)"
    )
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels: they keep different tensors for backward")
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
    find: Literal["ranks", "batch", "seq"] | None = option(
        None, "search for the least --ranks, or the most of the others, that fits"
    )
    tokens: float | None = option(None, "how many tokens to train on, such as 15e9: says the hours", least=1)
    price: float | None = option(None, "of a GPU for an hour, in any currency", above=0, needs="tokens")
    sweep: bool = option(False, "list every strategy: what fits, the fastest first, then what does not")
    explain: bool = option(False, "show each term of the peak with its numbers")
    plot: str | None = option(
        None, "draw the memory of a step and the terms of its peak into this file (.png, .svg, .pdf)"
    )
    simulate: bool = option(False, "run PyTorch's own code beside it, on tensors without memory")
    json: bool = option(False, "print JSON instead of tables")

    def __post_init__(self):
        super().__post_init__()
        if not self.model and not self.config:
            object.__setattr__(self, "model", MODEL)  # not the field's default: what is given must show beside --config
        if self.model == "mnist":
            raise UserError(
                "--model mnist: ladder.py predicts the MNIST lab and measures it; plan.py is for transformers"
            )
        if self.model and self.model not in GPT_SHAPES and not self.own:
            raise UserError(f"--model {self.model} is unknown: take {', '.join(GPT_SHAPES)}, or FILE.py:function")
        if self.config:
            self.check_config()
        if self.precision not in self.booked.flops and not self.flops:
            raise UserError(f"no peak is known of {self.gpu} in {self.precision}: give --flops, or another --precision")
        if self.strategy == "single" and self.ranks > 1:
            raise UserError("--strategy single is one rank: give --ranks 1")
        if self.strategy == "fsdp1" and self.reshard_after_forward.isdecimal():
            raise UserError("--reshard-after-forward N is FSDP2's; FSDP1 knows true and false")
        if self.sweep and (self.simulate or self.explain or self.own):
            raise UserError("--sweep compares predictions of the course's models: leave --simulate and --explain out")
        if self.explain and self.own:
            raise UserError(
                "--explain shows predicted terms, and the peak of your own model is simulated: leave it out"
            )
        if (self.simulate or self.own) and self.strategy not in SIMULATED:
            raise UserError(f"--strategy {self.strategy} cannot be simulated: take {' or '.join(SIMULATED)}")
        if self.own:
            self.check_own()
        if self.simulate and (self.cpu_offload or self.optimizer == "adamw-8bit" or self.frozen == "nf4"):
            raise UserError("neither --cpu-offload, adamw-8bit nor nf4 is simulated: leave --simulate out")
        check_choices(self, bool(self.shape and self.shape.tie_word_embeddings))
        changed = [f.name for f in dataclasses.fields(self) if f.name in ALONE and getattr(self, f.name) != f.default]
        if changed and self.stages > 1:
            raise UserError(f"a pipeline is not planned together with {flag(changed[0])}: leave one of them out")
        self.check_answers()
        if self.stages > 1 and (self.sweep or self.simulate):
            raise UserError(f"--mesh {self.mesh} is neither swept nor simulated: leave --sweep and --simulate out")
        if self.stages == 1 and self.schedule != "1f1b":
            raise UserError("--schedule is a pipeline's: give --mesh pipeline=STAGES too")

    def check_config(self):
        """UserError where another model is asked for, too, or what is not planned of models of others."""
        if self.model:
            raise UserError("--config and --model both name a model: leave one of them out")
        if self.simulate:
            self.check_hugging_face()
        mesh = arrange(self.ranks, self.mesh, self.reshard_after_forward) if self.mesh else None
        if mesh and (mesh.tensor > 1 or mesh.pipeline > 1):
            raise UserError(f"--mesh {self.mesh} is planned for the course's models alone: leave --config out")
        if self.seq > self.longest:
            raise UserError(f"--seq {self.seq} is longer than the {self.longest} positions that this model has learned")

    def check_hugging_face(self):
        """UserError where hf_fsdp.py, whose step is simulated then, has no such option."""
        if self.device != "cpu":
            raise UserError("models of others are simulated with the CPU's kernels: give --device cpu too")
        for field in dataclasses.fields(self):
            if field.name in NOT_IN_HF and getattr(self, field.name) != field.default:
                raise UserError(f"hf_fsdp.py, which is simulated, has no {flag(field.name)}: leave it out")
        if self.recompute not in ("none", "full"):
            raise UserError(f"hf_fsdp.py, which is simulated, has no --recompute {self.recompute}: take none or full")
        if self.strategy == "fsdp1":
            raise UserError("hf_fsdp.py, which is simulated, shards by FSDP2 alone: take --strategy fsdp2 or single")
        if self.strategy == "fsdp2" and (self.units == "apart") == self.shape.tie_word_embeddings:
            theirs = (
                "one unit with the rest, as they share a weight"
                if self.shape.tie_word_embeddings
                else "units of their own"
            )
            raise UserError(
                f"in hf_fsdp.py, which is simulated, embedding and head are {theirs}: "
                f"give --units {'blocks' if self.shape.tie_word_embeddings else 'apart'}"
            )

    def check_answers(self):
        """UserError where two kinds of answer are asked for at once."""
        if self.find and (self.sweep or self.simulate or self.explain or self.own or self.plot or self.tokens):
            raise UserError(
                "--find compares predictions: leave --sweep, --simulate, --explain, --plot and --tokens out"
            )
        if self.find == "ranks" and (self.mesh or self.reshard_after_forward.isdecimal() or self.strategy == "single"):
            raise UserError(
                "--find ranks tries any number of them: leave --mesh, --strategy single and a part to keep out"
            )
        if (self.find == "ranks" or self.sweep) and self.cpu_offload:
            which = "--sweep" if self.sweep else "--find ranks"
            raise UserError(
                f"{which} asks for the GPUs' memory, and --cpu-offload for the CPUs': leave one of them out"
            )
        if self.plot and (self.sweep or self.own or self.stages > 1 or self.json):
            raise UserError(
                "--plot draws the plan of one rank: leave --sweep, --json, a pipeline and your own model out"
            )
        if self.tokens and (self.sweep or self.own):
            raise UserError("--tokens is for one plan: leave --sweep and your own model out")

    @cached_property
    def shape(self) -> GPTShape | None:
        """Of the model; None if it is one's own. UserError: --config cannot be read."""
        return huggingface.load(self.config) if self.config else GPT_SHAPES.get(self.model)

    @property
    def named(self) -> str:
        """The model, as it was asked for."""
        return self.config or self.model

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most: as many as there are learned positions."""
        return self.shape.learned_positions or 10**9

    @property
    def booked(self) -> GPU:
        return GPUS[self.gpu]

    @property
    def memory(self) -> float:
        """GiB that a rank may use."""
        return self.gpu_memory or self.booked.memory

    @property
    def peak_flops(self) -> float:
        """Operations a second that a rank does at best."""
        return self.flops or self.booked.flops[self.precision]

    @property
    def stages(self) -> int:
        """Of a pipeline; 1 where there is none."""
        return arrange(self.ranks, self.mesh, self.reshard_after_forward).pipeline

    @property
    def own(self) -> bool:
        """Whether the model is one's own."""
        return ":" in (self.model or "")

    def check_own(self):
        """UserError where an option asks for what the function of one's own model says itself, or cannot have."""
        for field in dataclasses.fields(self):
            fixed = ("batch", "seq", "accumulate", "recompute", "optimizer", "mesh", *ALONE)
            if field.name in fixed and getattr(self, field.name) != field.default:
                raise UserError(
                    f"{flag(field.name)} is for the course's models; your own function decides: leave it out"
                )
        if self.precision == "fp64":
            raise UserError("--precision fp64 is for the course's models: your own function makes its tensors")


def answer(options: Options) -> str:
    """What the command prints."""
    if options.sweep or options.find:
        found = sweep(options) if options.sweep else find(options)
        page = report.sweep_text if options.sweep else report.find_text
        return json.dumps(found, indent=1) if options.json else page(options, found)
    if options.own:
        return answer_on_own(options)
    plan = plan_from_options(options)
    found = describe(options, plan)
    if options.simulate:
        found |= simulated(options)
    if options.plot:
        draw(options, plan)
    if options.json:
        return json.dumps(found, indent=1)
    parts = [report.plan_text(options, found)]
    if options.explain:
        parts.append(report.explained(plan))
    if options.simulate:
        parts.append(
            f"simulated, with {report.KERNELS[options.device]}: {report.gib(found['simulated'])} at "
            f"{found['simulated_at']}; predicted: {report.gib(found['peak'])} ({found['peak'] / found['simulated'] - 1:+.2%})"
        )
    return "\n\n".join(parts)


def draw(options: Options, plan: predict.Plan):
    """Write --plot's file. UserError: what draws is not installed, there is no such format, or it cannot be written."""
    for module in ("matplotlib", "torch"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"--plot draws with the course's figures, and this Python has no {module}: install it")
    from labkit.teaching.plots import planner

    planner.save(planner.step(plan, report.title(options)), options.plot)


def answer_on_own(options: Options) -> str:
    """What it prints of a model of one's own."""
    prepare_to_simulate()
    from labkit.training import own_model

    build = own_model.load(options.model)
    plan = plan_from_options(options, own_model.blueprint(options.model, build))
    # Its error is told as a sentence; PyTorch would log it too, with a page of where it came from.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with own_model.as_user_error(f"{options.model} cannot be simulated"):
        keep = options.reshard_after_forward
        found = peak_of(own_model.step(build, options.ranks, options.strategy, options.precision, keep))
    return json.dumps(found, indent=1) if options.json else report.own_text(options, plan, found)


def prepare_to_simulate():
    """Hide GPUs, as tensors without memory need none. UserError where there is no PyTorch: planning does without."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("simulating runs PyTorch's own code, and this Python has none: pip install torch")
    from labkit.running import gpus

    gpus.hide()


def simulated(options: Options) -> dict:
    """The peak of PyTorch's own code: see ``peak_of``."""
    prepare_to_simulate()
    from labkit.measuring.gpu_operators import GpuOperators
    from labkit.running import simulated_lab

    given = {name: getattr(options, name) for name in ("strategy", "accumulate", "precision", "recompute")}
    given |= {"batch_size": options.batch, "seq_len": options.seq}
    if options.config:
        import hf_fsdp  # and with it transformers, which takes seconds

        config = hf_fsdp.Config(config=options.config, device="cpu", **given)
        return peak_of(simulated_lab.step(hf_fsdp, config, options.ranks))
    import gpt_fsdp

    gpu = GpuOperators() if options.device == "cuda" else None
    given |= {name: getattr(options, name) for name in ("mesh", "optimizer", *ALONE)}
    given["reshard_after_forward"] = options.reshard_after_forward if options.strategy in SHARDED else None
    config = gpt_fsdp.Config(preset=options.model, **given)
    return peak_of(simulated_lab.step(gpt_fsdp, config, options.ranks, gpu))


def peak_of(memory: dict) -> dict:
    """{"simulated": bytes, "simulated_at", "simulated_by_category"} of what ``simulate.step`` has returned."""
    peak = {name: size for name, size in memory["peak"].items() if size}
    where = f"{memory['peak_phase']}, {memory['peak_operator']}"
    return {"simulated": sum(peak.values()), "simulated_at": where, "simulated_by_category": peak}


def main():
    options = parse(Options, __doc__)
    try:
        print(answer(options))
    except UserError as error:
        leave(str(error))
    except BrokenPipeError:  # whoever read has seen enough: plan.py … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
