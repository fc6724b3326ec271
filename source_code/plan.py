"""Will it fit, and what will it cost? Plan a training run before paying for it.

  python plan.py --model llama3-8b --ranks 8 --strategy fsdp2 --seq 8192 --batch 1 --precision bf16 \\
                 --recompute full --gpu-memory 80
  python plan.py --model llama3-70b --ranks 64 --sweep        every strategy that fits, the fastest first
  python plan.py --model llama3-8b --ranks 8 --explain        each term of the peak with its numbers
  python plan.py --model tiny --ranks 4 --simulate            the real PyTorch code beside it, on tensors without memory
  python plan.py --model my_model.py:build --ranks 8          your own: see below

The arithmetic is labkit/predict.py's. For the CPU's kernels (--device cpu) it agrees with the meters to within 1 %, as
trial.py shows; for a GPU's it has not been compared with a GPU yet. Memory is what tensors take: not the CUDA context,
nor buffers of the communication library, nor what the allocator reserves beyond what is in use.

Your own model: a function without arguments that returns (module, inputs, loss), where loss(module, *inputs) is the
number to minimise, for the batch of one rank. Its units are the members of its ModuleLists. It trains with AdamW. Its
peak is simulated, with the kernels of the CPU; what stays from step to step and what is sent is predicted.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from labkit import UserError, blueprints, cost, predict
from labkit.options import option, parse
from labkit.shapes import GPT_SHAPES

GIB = 2**30
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
SIMULATED = ("single", "fsdp1", "fsdp2")
KERNELS = {"cuda": "a GPU's kernels", "cpu": "the CPU's kernels"}
SMALL = 1e-3  # terms below this share of the peak are explained together


@dataclass(frozen=True)
class Options:
    """What to plan. The command line is made from these fields."""

    model: str = option("llama3-8b", f"mnist, {', '.join(GPT_SHAPES)}, or FILE.py:function")
    ranks: int = option(8, "how many ranks train")
    node_size: int = option(8, "ranks on a node")
    strategy: Literal[STRATEGIES] = option("fsdp2", "how the ranks share")
    mesh: str | None = option(None, "HSDP: REPLICASxSHARDS, such as 2x4")
    reshard_after_forward: str = option(
        "true", "FSDP: free gathered parameters, keep them (false), or keep one part in N"
    )
    batch: int = option(1, "sequences (or images) in a micro-batch on each rank")
    seq: int = option(8192, "tokens in a sequence")
    accumulate: int = option(1, "micro-batches in a step")
    precision: Literal["fp32", "bf16", "fp64"] = option("bf16", "number format of the computation")
    recompute: Literal["none", "full", "selective"] = option("full", "what backward computes again, in each block")
    optimizer: Literal[tuple(predict.STATES)] = option("adamw", "optimizer; adamw is PyTorch's foreach implementation")
    device: Literal["cuda", "cpu"] = option("cuda", "whose kernels: they keep different tensors for backward")
    gpu_memory: float = option(80.0, "GiB that a rank may use")
    flops: float = option(989e12, "operations a second a rank does at best (default: H100's data sheet, bf16)")
    efficiency: float = option(0.4, "share of these that training attains")
    link: str = option("nvlink", f"within a node: {', '.join(cost.LINKS)}, or GB/s a rank")
    network: str = option("infiniband", f"between nodes: {', '.join(cost.NETWORKS)}, or GB/s a node")
    sweep: bool = option(False, "list every strategy that fits, the fastest first")
    explain: bool = option(False, "show each term of the peak with its numbers")
    simulate: bool = option(False, "run PyTorch's own code beside it, on tensors without memory")
    json: bool = option(False, "print JSON instead of tables")

    def __post_init__(self):
        for name in ("ranks", "node_size", "batch", "seq", "accumulate", "gpu_memory", "flops", "efficiency"):
            if not getattr(self, name) > 0:
                raise UserError(f"{flag(name)} must be above 0, but is {getattr(self, name)}")
        if self.efficiency > 1:
            raise UserError(f"--efficiency is a share, at most 1, but is {self.efficiency}")
        if self.model not in ("mnist", *GPT_SHAPES) and ":" not in self.model:
            raise UserError(
                f"--model {self.model} is unknown: take mnist, {', '.join(GPT_SHAPES)}, or FILE.py:function"
            )
        if self.sweep and (self.simulate or self.explain or self.own):
            raise UserError("--sweep compares predictions of the course's models: leave --simulate and --explain out")
        if self.explain and self.own:
            raise UserError(
                "--explain shows predicted terms, and the peak of your own model is simulated: leave it out"
            )
        if self.simulate and self.strategy not in SIMULATED:
            raise UserError(f"--strategy {self.strategy} cannot be simulated: take {' or '.join(SIMULATED)}")
        if self.own:
            self.check_own()

    @property
    def own(self) -> bool:
        """Whether the model is one's own."""
        return ":" in self.model

    def check_own(self):
        """UserError where an option asks for what the function of one's own model says itself, or cannot have."""
        if self.strategy not in SIMULATED:
            raise UserError(f"--strategy {self.strategy}: your own model is simulated, as {' or '.join(SIMULATED)}")
        for field in dataclasses.fields(self):
            fixed = ("batch", "seq", "accumulate", "recompute", "optimizer", "mesh")
            if field.name in fixed and getattr(self, field.name) != field.default:
                raise UserError(
                    f"{flag(field.name)} is for the course's models; your own function decides: leave it out"
                )
        if self.precision == "fp64":
            raise UserError("--precision fp64 is for the course's models: your own function makes its tensors")

    @property
    def replicas(self) -> int:
        if not self.mesh:
            return 1
        try:
            replicas, shards = (int(part) for part in self.mesh.split("x"))
        except ValueError:
            raise UserError(f"--mesh is REPLICASxSHARDS, such as 2x4, not {self.mesh!r}") from None
        if replicas < 1 or shards < 1:
            raise UserError(f"--mesh is REPLICASxSHARDS, both at least 1, not {self.mesh}")
        if replicas * shards != self.ranks:
            raise UserError(f"--mesh {self.mesh} is for {replicas * shards} ranks, but --ranks is {self.ranks}")
        return replicas


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def blueprint(options: Options) -> blueprints.Blueprint:
    if options.model == "mnist":
        return blueprints.mnist(options.batch, min_num_params=20000)
    return blueprints.gpt(GPT_SHAPES[options.model], options.batch, options.seq, options.recompute)


def plan_of(options: Options, network=None) -> predict.Plan:
    """UserError where the options do not go together."""
    keep = options.reshard_after_forward
    if keep not in ("true", "false") and not keep.isdecimal():
        raise UserError(f"--reshard-after-forward is true, false or a number of ranks, not {keep!r}")
    if keep.isdecimal() and (int(keep) < 2 or options.ranks // options.replicas % int(keep)):
        raise UserError(f"--reshard-after-forward {keep} does not divide the ranks that share a model")
    if (options.mesh or keep != "true") and not options.strategy.startswith("fsdp"):
        raise UserError(
            f"--mesh and --reshard-after-forward are FSDP's; with --strategy {options.strategy} leave them out"
        )
    if options.strategy == "fsdp1" and keep.isdecimal():
        raise UserError("--reshard-after-forward N is FSDP2's; FSDP1 knows true and false")
    if options.strategy == "single" and options.ranks > 1:
        raise UserError("--strategy single is one rank: give --ranks 1")
    return predict.Plan(
        network or blueprint(options),
        options.strategy,
        options.ranks,
        options.replicas,
        keep,
        options.precision,
        options.optimizer,
        options.accumulate,
        on_gpu=options.device == "cuda",
    )


def link_of(text: str, known: dict, latency: float, name: str) -> cost.Link:
    if text in known:
        return known[text]
    try:
        bandwidth = float(text)
    except ValueError:
        bandwidth = 0.0
    if not bandwidth > 0:
        raise UserError(f"{name} is {', '.join(known)}, or a number of GB/s above 0, not {text!r}")
    return cost.Link(bandwidth * 1e9, latency, f"{name} {text} GB/s")


def describe(options: Options, plan: predict.Plan) -> dict:
    """All that is predicted of a plan, ready for JSON: bytes, and seconds."""
    where, terms = plan.peak()
    links = (
        link_of(options.link, cost.LINKS, cost.LINKS["nvlink"].latency, "--link"),
        link_of(options.network, cost.NETWORKS, cost.NETWORKS["infiniband"].latency, "--network"),
    )
    times = cost.step_time(plan, options.node_size, *links, options.flops * options.efficiency)
    samples = plan.blueprint.samples * plan.micro_batches * plan.ranks
    peak = predict.total(terms)
    return {
        "parameters": plan.blueprint.numel,
        "persistent": {name: size for (_, name), size in plan.persistent().items()},
        "peak": peak,
        "where": where,
        "by_category": predict.by_category(terms),
        "first_step_peak": predict.total(plan.peak(first=True)[1]),
        "traffic": [c | cost.spread(c, plan, options.node_size) for c in plan.traffic()],
        "seconds": times,
        "samples_per_second": samples / times["overlapped"],
        "room": options.gpu_memory * GIB - peak,
    }


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def as_text(options: Options, found: dict) -> str:
    """A page for people."""
    unit = "images" if options.model == "mnist" else "tokens"
    lines = [
        (
            f"{options.model}: {found['parameters']:,} parameters, {options.strategy} on {options.ranks} ranks, "
            f"{options.precision}, recompute {options.recompute}, {options.optimizer}; {KERNELS[options.device]}"
        ),
        "",
        f"peak of a rank      {gib(found['peak']):>14}   at: {found['where']}",
        *(f"  {name:18}{gib(size):>14}" for name, size in found["by_category"].items()),
        f"kept between steps  {gib(sum(found['persistent'].values())):>14}",
        f"peak of step 1      {gib(found['first_step_peak']):>14}   before it there is no optimizer state",
        "",
        "collectives of a step           size each   a rank sends   leave a node, in all",
    ]
    for c in found["traffic"]:
        sizes = [f"{size / 1e6:,.1f} MB" for size in (c["bytes"], c["count"] * c["rank"], c["count"] * c["node"])]
        lines.append(f"  {c['count']:4} × {c['kind']:16}{sizes[0]:>17}{sizes[1]:>15}{sizes[2]:>23}")
    times = found["seconds"]
    lines += [
        "",
        (
            f"compute {times['compute']:.3g} s at {options.efficiency:.0%} of {options.flops / 1e12:g} TFLOP/s, "
            f"communication {times['communication']:.3g} s"
        ),
        f"a step takes {times['in turn']:.3g} s one after the other, {times['overlapped']:.3g} s overlapped",
        f"{found['samples_per_second']:,.0f} {unit} a second at best, all ranks together",
        "",
        verdict(options, found["room"]),
    ]
    if options.device == "cuda":
        lines.append("(predicted for a GPU's kernels, which this arithmetic has not been compared with yet)")
    return "\n".join(lines)


def verdict(options: Options, room: float) -> str:
    if room >= 0:
        return f"fits in {options.gpu_memory:g} GiB, with {gib(room)} to spare"
    return f"does not fit in {options.gpu_memory:g} GiB: {gib(-room)} too much"


def explained(plan: predict.Plan) -> str:
    """Each term of the peak, the largest first, with its numbers; the small ones together. They add up to the peak."""
    terms = plan.explain()
    peak = sum(size for _, size, _ in terms)
    large = [term for term in terms if term[1] >= SMALL * peak]
    small = terms[len(large) :]
    width = max(len(name) for (_, name), _, _ in large)
    lines = [f"{gib(size):>12}  {category:16} {name:{width}}  {text}" for (category, name), size, text in large]
    if small:
        lines.append(f"{gib(sum(size for _, size, _ in small)):>12}  {len(small)} smaller terms")
    return "\n".join(lines)


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
    found = [(name, plain | {"strategy": name}) for name in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")]
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


def sweep_text(options: Options, rows: list[dict]) -> str:
    unit = "images/s" if options.model == "mnist" else "tokens/s"
    lines = [
        (
            f"{options.model} on {options.ranks} ranks, {options.gpu_memory:g} GiB each, {options.precision}; "
            f"predicted, at {options.efficiency:.0%} of {options.flops / 1e12:g} TFLOP/s"
        ),
        "",
        f"{'strategy':30}{'recompute':11}{'peak':>18}{unit:>11}",
    ]
    for row in rows:
        fits = "" if row["room"] >= 0 else "does not fit"
        numbers = f"{gib(row['peak']):>18}{row['samples_per_second']:>11,.0f}"
        lines.append(f"{row['strategy']:30}{row['recompute']:11}{numbers}   {fits}".rstrip())
    return "\n".join(lines)


def answer(options: Options) -> str:
    """What the command prints."""
    if options.sweep:
        rows = sweep(options)
        return json.dumps(rows, indent=1) if options.json else sweep_text(options, rows)
    own = load(options.model) if options.own else None
    plan = plan_of(options, of_module(options, own) if own else None)
    found = {} if own else describe(options, plan)
    if own or options.simulate:
        found |= simulated(options, own)
    if options.json:
        return json.dumps(found, indent=1)
    parts = [own_text(options, plan, found)] if own else [as_text(options, found)]
    if options.explain and not own:
        parts.append(explained(plan))
    if "simulated" in found and not own:
        here = predict.total(plan_of(dataclasses.replace(options, device="cpu")).peak()[1])
        parts.append(
            f"simulated, with the kernels of the CPU: {gib(found['simulated'])} at {found['simulated_at']}; "
            f"predicted for these: {gib(here)} ({here / found['simulated'] - 1:+.2%})"
        )
    return "\n\n".join(parts)


def load(text: str):
    """The function that FILE.py:function names."""
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"--model {text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("own_model", path)
    if spec is None:
        raise UserError(f"--model {text}: {path} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    with told(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise UserError(f"--model {text}: {path} has no function {name}")
    return getattr(module, name)


@contextlib.contextmanager
def told(what: str):
    """Tell an error of the user's own code as a sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # it may raise anything
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{what}: {type(error).__name__}: {first_line}") from error


def of_module(options: Options, build) -> blueprints.Blueprint:
    """A network of one's own as far as its parameters go: enough for what stays between steps and what is sent."""
    import imagine
    import torch

    with told(f"{options.model} fails"), torch.device("meta"):
        returned = build()
        if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], torch.nn.Module)):
            raise UserError("it must return (module, inputs, loss)")
    module = returned[0]
    units = imagine.units_of(module)
    taken = {parameter for unit in units for parameter in unit.parameters()}
    groups = [(f"unit {i}", list(unit.parameters()), True) for i, unit in enumerate(units)]
    groups.insert(0, ("root", [p for p in module.parameters() if p not in taken], False))
    modules = tuple(
        blueprints.Module(
            name,
            {str(i): tuple(p.shape) for i, p in enumerate(parameters)},
            forward=None,
            apart=apart,
            frozen=frozenset(str(i) for i, p in enumerate(parameters) if not p.requires_grad),
        )
        for name, parameters, apart in groups
    )
    return blueprints.Blueprint(options.model, modules, batch=None, loss=None, samples=1, flops=0.0)


def simulated(options: Options, own) -> dict:
    """{"simulated": bytes, "simulated_at", "simulated_by_category"}: the peak of PyTorch's own code."""
    import imagine

    if own:
        keep = options.reshard_after_forward
        # Its error is told as a sentence; PyTorch would log it too, with a page of where it came from.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        with told(f"{options.model} cannot be trained"):
            memory = imagine.network(own, options.ranks, options.strategy, options.precision, keep)
    elif options.model == "mnist":
        raise UserError("--simulate is for the GPTs and your own models; mnist_fsdp.py measures the MNIST network")
    else:
        memory = imagine.gpt(
            options.ranks,
            preset=options.model,
            strategy=options.strategy,
            mesh=options.mesh,
            batch_size=options.batch,
            seq_len=options.seq,
            accumulate=options.accumulate,
            precision=options.precision,
            recompute=options.recompute,
            optimizer=options.optimizer,
            reshard_after_forward=options.reshard_after_forward if options.strategy.startswith("fsdp") else None,
        )
    peak = {name: size for name, size in memory["peak"].items() if size}
    where = f"{memory['peak_phase']}, {memory['peak_operator']}"
    return {"simulated": sum(peak.values()), "simulated_at": where, "simulated_by_category": peak}


def own_text(options: Options, plan: predict.Plan, found: dict) -> str:
    """A page on a network of one's own: the peak simulated, the rest predicted."""
    lines = [
        (
            f"{options.model}: {plan.blueprint.numel:,} parameters in {len(plan.units)} units, {options.strategy} on "
            f"{options.ranks} ranks, {options.precision}, {options.optimizer}; the CPU's kernels"
        ),
        "",
        f"simulated peak of a rank  {gib(found['simulated']):>14}   at: {found['simulated_at']}",
        *(f"  {name:24}{gib(size):>14}" for name, size in found["simulated_by_category"].items()),
        f"predicted, between steps  {gib(predict.total(plan.persistent())):>14}",
        "predicted collectives of a step:",
        *(f"  {c['count']:4} × {c['kind']:16}{c['bytes'] / 1e6:>12,.1f} MB" for c in plan.traffic()),
        "",
        verdict(options, options.gpu_memory * GIB - found["simulated"]),
    ]
    return "\n".join(lines)


def main():
    options = parse(Options, __doc__)
    try:
        print(answer(options))
    except UserError as error:
        from labkit import ranks  # imports torch, which planning does without

        ranks.leave(str(error))


if __name__ == "__main__":
    main()
