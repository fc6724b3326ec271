"""Will it fit, and what will it cost? Plan a training run before paying for it.

  python plan.py --model llama3-8b --ranks 8 --strategy fsdp2 --seq 8192 --batch 1 --precision bf16 \\
                 --recompute full --gpu-memory 80
  python plan.py --model llama3-70b --ranks 64 --sweep        every strategy that fits, the fastest first
  python plan.py --model llama3-8b --ranks 8 --explain        each term of the peak with its numbers
  python plan.py --model tiny --ranks 4 --simulate            the real PyTorch code beside it, on tensors without memory
  python plan.py --model my_model.py:build --ranks 8          your own: see below

The arithmetic is planner/predict.py's. For the CPU's kernels (--device cpu) it agrees with the meters to within 1 %, as
trial.py shows; for a GPU's with PyTorch's own code, which runs a GPU's operators on tensors without memory (--simulate),
and not yet with a GPU. Memory is what tensors take, and what attention allocates inside its backward: not the CUDA
context, nor buffers of the communication library, nor cuDNN's and cuBLAS's workspaces, nor what the allocator rounds up
and reserves beyond what is in use.

Your own model: a function without arguments that returns (module, inputs, loss), where loss(module, *inputs) is the
number to minimise, for the batch of one rank. Its units are the members of its ModuleLists; what these have inside,
such as a block's experts, belongs to them. It trains with AdamW. Its peak is simulated, with the kernels of the CPU;
what stays from step to step and what is sent is predicted.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
from dataclasses import dataclass
from itertools import product
from typing import Literal

from labkit import UserError
from labkit.running.options import RESHARD, SHARDED, check_choices, flag, leave, option, parse
from labkit.running.options import Options as Base
from planner import cost, networks, pipeline, predict, report
from planner.mesh import FORM, arrange
from planner.report import GIB
from planner.shapes import GPT_SHAPES

STRATEGIES = ("single", "ddp", "zero1", *(f"deepspeed-{stage}" for stage in range(4)), "fsdp1", "fsdp2")
TORCHS = ("single", "ddp", "zero1", "fsdp1", "fsdp2")  # what DeepSpeed makes of some choices is not predicted
SIMULATED = ("single", "fsdp1", "fsdp2")
# What is planned of one run at a time, and not of the stages of a pipeline
ALONE = ("sync", "prefetch", "weights", "recompute_every", "loss_chunks", "units", "lora", "cpu_offload")
SLOWEST, FASTEST = 1e-6, 1e6  # GB/s of a link


@dataclass(frozen=True)
class Options(Base):
    """What to plan. The command line is made from these fields."""

    model: str = option("llama3-8b", f"{', '.join(GPT_SHAPES)}, or FILE.py:function")
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
        "fp32", "number format of parameters, gradients and optimizer state", only=TORCHS
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
    optimizer: Literal[tuple(predict.STATES)] = option(
        "adamw", "optimizer; adamw is PyTorch's foreach implementation; adamw-8bit is bitsandbytes' (not on trial)"
    )
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels: they keep different tensors for backward")
    gpu_memory: float = option(80.0, "GiB that a rank may use", above=0, at_most=1e9)
    flops: float = option(989e12, "operations a second a rank does at best (default: H100's data sheet, bf16)", least=1)
    efficiency: float = option(0.4, "share of these that training attains", least=1e-6, at_most=1)
    link: str = option("nvlink", f"within a node: {', '.join(cost.LINKS)}, or GB/s a rank")
    network: str = option("infiniband", f"between nodes: {', '.join(cost.NETWORKS)}, or GB/s a node")
    sweep: bool = option(False, "list every strategy that fits, the fastest first")
    explain: bool = option(False, "show each term of the peak with its numbers")
    simulate: bool = option(False, "run PyTorch's own code beside it, on tensors without memory")
    json: bool = option(False, "print JSON instead of tables")

    def __post_init__(self):
        super().__post_init__()
        if self.model == "mnist":
            raise UserError(
                "--model mnist: ladder.py predicts the MNIST lab and measures it; plan.py is for transformers"
            )
        if self.model not in GPT_SHAPES and not self.own:
            raise UserError(f"--model {self.model} is unknown: take {', '.join(GPT_SHAPES)}, or FILE.py:function")
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
        check_choices(self, self.model in GPT_SHAPES and GPT_SHAPES[self.model].tied)
        changed = [f.name for f in dataclasses.fields(self) if f.name in ALONE and getattr(self, f.name) != f.default]
        if changed and (self.sweep or self.stages > 1):
            what = "--sweep" if self.sweep else "a pipeline"
            raise UserError(f"{what} is not planned together with {flag(changed[0])}: leave one of them out")
        if self.stages > 1 and (self.sweep or self.simulate):
            raise UserError(f"--mesh {self.mesh} is neither swept nor simulated: leave --sweep and --simulate out")
        if self.stages == 1 and self.schedule != "1f1b":
            raise UserError("--schedule is a pipeline's: give --mesh pipeline=STAGES too")

    @property
    def stages(self) -> int:
        """Of a pipeline; 1 where there is none."""
        return arrange(self.ranks, self.mesh, self.reshard_after_forward).pipeline

    @property
    def own(self) -> bool:
        """Whether the model is one's own."""
        return ":" in self.model

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


def plan_of(options: Options, network: networks.Blueprint | None = None) -> predict.Plan:
    """Of the rank, or the stage, that needs most; network: one's own, else the course's.

    UserError where the options do not go together.
    """
    if options.stages > 1:
        return max(stage_plans(options), key=lambda plan: predict.total(plan.peak()[1]))
    mesh = arrange(options.ranks, options.mesh, options.reshard_after_forward)
    if mesh.tensor > 1 and options.simulate:
        raise UserError("products split among ranks are not simulated: leave --simulate out, or take rank_zero.py")
    shape = GPT_SHAPES.get(options.model)
    plan = predict.Plan(
        network
        or networks.gpt(
            shape,
            options.batch,
            options.seq,
            options.recompute,
            options.lora,
            mesh.tensor,
            recompute_every=options.recompute_every,
            loss_chunks=options.loss_chunks,
            apart=options.units == "apart",
            packed=options.frozen == "nf4",
        ),
        options.strategy,
        options.ranks,
        mesh.replicate,
        options.reshard_after_forward,
        options.precision,
        options.optimizer,
        options.accumulate,
        options.sync,
        options.prefetch,
        on_gpu=options.device == "cuda",
        torch=installed_torch(),
        weights=options.weights,
        offload=options.cpu_offload and options.device == "cuda",  # on the CPU there is but one memory
    )
    return plan.of_fullest_rank()


def stage_plans(options: Options) -> list[predict.Plan]:
    """The plan of each stage of a pipeline."""
    mesh, shape = arrange(options.ranks, options.mesh), GPT_SHAPES[options.model]
    pipeline.check(mesh, shape, options.schedule, options.accumulate)
    return [
        predict.of_stage(
            shape,
            options.batch,
            options.seq,
            options.recompute,
            pipeline.Stage(mesh.pipeline, stage, options.schedule),
            precision=options.precision,
            optimizer=options.optimizer,
            micro_batches=options.accumulate,
            on_gpu=options.device == "cuda",
            torch=installed_torch(),
        )
        for stage in range(mesh.pipeline)
    ]


def installed_torch() -> tuple[int, int]:
    """The version of PyTorch here, which is not imported; where there is none, that which the planner assumes."""
    try:
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return predict.Plan.torch


def link_of(text: str, known: dict, latency: float, name: str) -> cost.Link:
    if text in known:
        return known[text]
    try:
        bandwidth = float(text)
    except ValueError:
        bandwidth = 0.0
    if not SLOWEST <= bandwidth <= FASTEST:
        raise UserError(
            f"{name} is {', '.join(known)}, or a number of GB/s between {SLOWEST:g} and {FASTEST:g}, not {text!r}"
        )
    return cost.Link(bandwidth * 1e9, latency, f"{name} {text} GB/s")


def describe(options: Options, plan: predict.Plan) -> dict:
    """All that is predicted of a plan, ready for JSON: bytes, and seconds."""
    where, terms = plan.peak()
    links = (
        link_of(options.link, cost.LINKS, cost.LINKS["nvlink"].latency, "--link"),
        link_of(options.network, cost.NETWORKS, cost.NETWORKS["infiniband"].latency, "--network"),
    )
    plans = stage_plans(options) if options.stages > 1 else [plan]
    times = max(  # the slowest stage sets the pace of all
        (cost.step_time(one, options.node_size, *links, options.flops * options.efficiency) for one in plans),
        key=lambda times: times["overlapped"],
    )
    samples = plan.blueprint.samples * plan.micro_batches * (plan.ranks // len(plans) // plan.tensor)
    peak = predict.total(terms)
    return {
        "parameters": sum(one.blueprint.numel for one in plans),
        "stages": [predict.total(one.peak()[1]) for one in plans],
        "persistent": {name: size for (_, name), size in plan.persistent().items()},
        "peak": peak,
        "where": where,
        "rank": plan.rank,
        "by_category": predict.by_category(terms),
        "first_step_peak": predict.total(plan.peak(first=True)[1]),
        "traffic": [c | cost.ring_bytes(c, plan, options.node_size) for c in plan.traffic()],
        "seconds": times,
        "samples_per_second": samples / times["overlapped"],
        "room": options.gpu_memory * GIB - peak,
    }


def sweep(options: Options) -> list[dict]:
    """Every strategy with every kind of recomputation: those that fit by throughput, then the others by memory."""
    rows = []
    for (name, changes), recompute in product(variants(options), ("none", "selective", "full")):
        tried = dataclasses.replace(options, recompute=recompute, **changes)
        found = describe(tried, plan_of(tried))
        known = {key: found[key] for key in ("peak", "room", "samples_per_second")}
        rows.append({"strategy": name, "recompute": recompute} | known)
    return sorted(rows, key=lambda row: (row["room"] < 0, -row["samples_per_second"], -row["room"]))


def variants(options: Options) -> list[tuple[str, dict]]:
    """(what it is called, the options that make it) of every strategy for so many ranks."""
    if options.ranks == 1:
        return [("one process", {"strategy": "single"})]
    plain = {"mesh": None, "reshard_after_forward": "true"}
    found = [(name, plain | {"strategy": name}) for name in STRATEGIES if name != "single"]
    found += [
        (f"{name}, parameters kept", plain | {"strategy": name, "reshard_after_forward": "false"})
        for name in ("fsdp1", "fsdp2")
    ]
    size = options.node_size
    if options.ranks > size and options.ranks % size == 0:
        fsdp2 = plain | {"strategy": "fsdp2"}
        for replicas in sorted(
            {options.ranks // size, 2} if options.ranks % (2 * size) == 0 else {options.ranks // size}
        ):
            mesh = f"{replicas}x{options.ranks // replicas}"
            found.append((f"fsdp2, HSDP {mesh}", fsdp2 | {"mesh": mesh}))
        found.append((f"fsdp2, one part in {size} kept", fsdp2 | {"reshard_after_forward": str(size)}))
    return found


def answer(options: Options) -> str:
    """What the command prints."""
    if options.sweep:
        rows = sweep(options)
        return json.dumps(rows, indent=1) if options.json else report.sweep_text(options, rows)
    if options.own:
        return answer_on_own(options)
    plan = plan_of(options)
    found = describe(options, plan)
    if options.simulate:
        found |= simulated(options)
    if options.json:
        return json.dumps(found, indent=1)
    parts = [report.as_text(options, found)]
    if options.explain:
        parts.append(report.explained(plan))
    if options.simulate:
        parts.append(
            f"simulated, with {report.KERNELS[options.device]}: {report.gib(found['simulated'])} at "
            f"{found['simulated_at']}; predicted: {report.gib(found['peak'])} ({found['peak'] / found['simulated'] - 1:+.2%})"
        )
    return "\n\n".join(parts)


def answer_on_own(options: Options) -> str:
    """What it prints of a model of one's own."""
    prepare_to_simulate()
    from labkit.measuring import own_model

    build = own_model.load(options.model)
    plan = plan_of(options, own_model.blueprint(options.model, build))
    # Its error is told as a sentence; PyTorch would log it too, with a page of where it came from.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with own_model.told(f"{options.model} cannot be trained"):
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
    import imagine
    from labkit.measuring.gpu_operators import GpuOperators

    return peak_of(
        imagine.gpt(
            options.ranks,
            gpu=GpuOperators() if options.device == "cuda" else None,
            preset=options.model,
            strategy=options.strategy,
            mesh=options.mesh,
            batch_size=options.batch,
            seq_len=options.seq,
            accumulate=options.accumulate,
            precision=options.precision,
            **{name: getattr(options, name) for name in ("recompute", "optimizer", *ALONE)},
            reshard_after_forward=options.reshard_after_forward if options.strategy in SHARDED else None,
        )
    )


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


if __name__ == "__main__":
    main()
