"""Predict what a training step needs, by arithmetic: its memory in named terms, its collectives. Imports no torch.

  plan = predict.Plan(networks.gpt(GPT_SHAPES["tiny"], batch=8, length=128), "fsdp2", ranks=4)
  plan.peak()              where in the step the highest moment is, and what is alive there
  plan.persistent()        what a rank keeps from step to step
  plan.traffic()           each collective of a step

The network's operators run on sizes (planner/operators.py), and around them happens what the strategy does (planner/strategies.py).
Sizes are bytes on ``Plan.rank``, by default rank 0, which never holds less than another rank, but under ZeRO-1 and 2;
the categories are those of the meters (labkit/measuring/trace.py).

For the CPU it was compared with the meters, and with PyTorch's own code on tensors without memory; for a GPU (on_gpu)
with that code alone, running a GPU's operators (labkit/measuring/gpu_operators.py). Known from reading their source:
what flash and memory-efficient attention allocate inside their backward, and math attention in its softmax (workspaces). Not
in it, since only a GPU can show it: cuDNN's workspaces (convolutions; attention, where it is cuDNN's), cuBLAS's (one for
each stream), what flash attention's forward splits where batch × heads is small, sorting in the embedding's backward,
NCCL's buffers, streams that let go of a gathered unit later, and what the allocator rounds up and reserves.

At the end of the file: short forms for the MNIST network, which chapters 00 to 07 use.
"""

from collections import Counter
from dataclasses import replace
from math import prod

from planner import UserError, huggingface, networks, zero
from planner.mesh import arrange
from planner.pipeline import Stage, blocks_of
from planner.plan import Plan
from planner.shapes import GPT_SHAPES, GPTShape
from planner.strategies import Unit

# Options that older records do not know, as runs were without them
ADDED_LATER = {"weights": "fp32", "recompute_every": 1, "loss_chunks": 1, "units": "blocks"}


PLANNED = ("mnist_fsdp.py", "gpt_fsdp.py", "gpt_zero.py", "gpt_pipeline.py", "hf_fsdp.py", "rank_zero.py")


def by_category(terms: dict) -> dict[str, int]:
    """{category: bytes} of named terms."""
    sums = Counter()
    for (category, _), size in terms.items():
        sums[category] += size
    return dict(sums)


def total(terms: dict) -> int:
    return sum(terms.values())


def check_planned(script: str):
    """Raise UserError if the planner does not know a lab script, such as gpt_jax.py, whose memory XLA plans."""
    if script not in PLANNED:
        raise UserError(f"{script} has no plan: the planner knows {', '.join(PLANNED)}")


def plan_of(record: dict, rank: int = 0, at_least: bool = False) -> Plan:
    """The plan of a run of one of the labs, from its record (labkit/measuring/records.py).

    Of the record it takes "script", "config" (every option), "ranks", "device", and "batch_size" of mnist_fsdp.py; the
    version of PyTorch, if it says one. What a GPU's operators allocate inside them is left out, as the meters cannot see
    it. rank: whose plan, where ranks differ: of a pipeline, and see ``Plan.rank``. at_least: whether a plan will do that
    needs less than the run, where the run itself cannot be planned. UserError where the arithmetic does not reach.
    """
    script, config, ranks = record["script"], record["config"], record["ranks"]
    check_planned(script)
    common = {"ranks": ranks, "workspaces": False}
    if "versions" in record:
        common["torch"] = tuple(map(int, record["versions"]["torch"].split(".")[:2]))
    if script == "gpt_pipeline.py":
        common["clip"] = _computes_norm(config)
        sizes = (config[name] for name in ("batch_size", "seq_len", "recompute"))
        trained = {name: config[name] for name in ("precision", "optimizer")} | {"micro_batches": config["accumulate"]}
        shape, stage = GPT_SHAPES[config["preset"]], Stage(ranks, rank, config["schedule"])
        return of_stage(shape, *sizes, stage, on_gpu=record["device"] == "cuda", **trained, **common)
    if script == "hf_fsdp.py":
        return of_hugging_face(config, on_gpu=record["device"] == "cuda", at_least=at_least, **common)
    if script == "gpt_zero.py":
        config = zero.as_gpt_fsdp(config)
    common |= {name: config[name] for name in ("strategy", "precision")}
    if script == "mnist_fsdp.py":
        wrapped = {name: config[name] for name in ("wrap", "dropout", "min_num_params", "sharding")}
        return of_mnist(batch=record["batch_size"], device=record["device"], **common, **wrapped)
    config = ADDED_LATER | config
    shape, reshard = GPT_SHAPES[config["preset"]], config["reshard_after_forward"] or "true"
    if config["tied"] is not None:
        shape = replace(shape, tied=config["tied"])
    mesh = arrange(ranks, config["mesh"], reshard)
    sizes = (config[name] for name in ("batch_size", "seq_len", "recompute", "lora"))
    choices = {name: config[name] for name in ("recompute_every", "loss_chunks")} | {
        "apart": config["units"] == "apart"
    }
    common["clip"] = _computes_norm(config)
    return Plan(
        networks.gpt(shape, *sizes, mesh.tensor, **choices),
        replicas=mesh.replicate,
        reshard=reshard,
        micro_batches=config["accumulate"],
        # On the CPU there is but one memory, and what is offloaded is in it.
        offload=config["cpu_offload"] and record["device"] == "cuda" and common["strategy"] == "fsdp2",
        **{name: config[name] for name in ("optimizer", "sync", "prefetch", "weights")},
        on_gpu=record["device"] == "cuda",
        rank=rank,
        **common,
    )


def _computes_norm(config: dict) -> bool:
    """Whether each step computes the gradient's norm: to clip by it, or, but for DeepSpeed, for --log's event files."""
    logged = config.get("log") is not None and config.get("engine") != "deepspeed"
    return logged or config["clip"] is not None


def of_hugging_face(config: dict, on_gpu: bool, at_least: bool = False, **common) -> Plan:
    """The plan of a run of hf_fsdp.py with these options, as far as the course's operators are the model's own.

    at_least: plan the course's adapters in the place of peft's, which are on more layers, and need more. UserError:
    peft's adapters otherwise, or a family that is not known.
    """
    if config["lora"] and not at_least:
        raise UserError("peft's adapters, on every product, are not planned: train a few steps with --record")
    shape = huggingface.load(config["model"] or config["config"])
    sizes = (config[name] for name in ("batch_size", "seq_len", "recompute", "lora"))
    common |= {name: config[name] for name in ("strategy", "precision")}
    common |= {"micro_batches": config["accumulate"], "clip": _computes_norm(config)}
    return Plan(networks.gpt(shape, *sizes, apart=not shape.tied), optimizer="adamw", on_gpu=on_gpu, **common)


def of_stage(shape: GPTShape, batch: int, length: int, recompute: str, stage: Stage, **options) -> Plan:
    """The plan of one stage of a GPT. batch: sequences of a micro-batch, of ``length`` tokens. options: ``Plan``'s."""
    blocks = blocks_of(shape.layers, stage.stages)[stage.stage]
    network = networks.gpt(replace(shape, tied=False), batch, length, recompute, blocks=blocks)
    return Plan(network, "single", **{"ranks": stage.stages} | options, pipeline=stage)


def peak_of(record: dict) -> tuple[str, dict]:
    """(place, {category: bytes}) of the highest moment of a run, from its record: for its device's kernels."""
    where, terms = plan_of(record).peak()
    return where, by_category(terms)


# Short forms for the MNIST network, as mnist_fsdp.py trains it. wrap: "unit" or "size".

SHAPES = {layer: list(parameters.values()) for layer, parameters in networks.LAYERS.items()}

# Numbers per image: the input, and what the layers put out.
IMAGE, CONV1, CONV2, POOLED, HIDDEN, CLASSES = 28 * 28, 32 * 26 * 26, 64 * 24 * 24, 64 * 12 * 12, 128, 10


def numel(layers) -> int:
    """How many parameters the layers have together."""
    return sum(prod(shape) for layer in layers for shape in SHAPES[layer])


def units_of(wrap: str, min_num_params: int = 20000) -> list[list[str]]:
    """The groups of layers that FSDP gathers together, the root (what no other unit took) last."""
    wrapped = [layer for layer in SHAPES if wrap == "size" and numel([layer]) >= min_num_params]
    return [[layer] for layer in wrapped] + [[layer for layer in SHAPES if layer not in wrapped]]


def shard(strategy: str, layers, ranks: int) -> int:
    """How many numbers of a unit's parameters one rank holds: see ``strategies.Unit``."""
    modules = [module for module in networks.mnist().modules if module.name in layers]
    return Unit(modules, {}, ranks, strategy == "fsdp1", itemsize=4).shard() if modules else 0


def of_mnist(
    strategy,
    wrap="unit",
    ranks=1,
    batch=64,
    dropout=True,
    min_num_params=20000,
    sharding="full",
    device="cpu",
    **options,
) -> Plan:
    """The plan of a run of mnist_fsdp.py.

    batch: images on each rank. sharding: "grad-op" keeps gathered parameters from forward to backward. device: whose
    kernels, "cpu" or "cuda", as a record has it. options: ``Plan``'s.
    """
    network = networks.mnist(batch, dropout, min_num_params if wrap == "size" else None)
    reshard = "true" if sharding == "full" else "false"
    options |= {"on_gpu": device == "cuda", "optimizer": "adadelta"}
    return Plan(network, strategy, ranks, reshard=reshard, **options)


def persistent(strategy: str, wrap: str, ranks: int, **options) -> dict:
    """What a rank holds from step to step: {"parameters", "optimizer state", "all-reduce buckets"}."""
    return by_category(of_mnist(strategy, wrap, ranks, 1, **options).persistent())


def moments(*args, **options) -> dict[str, dict]:
    """The highest moment of each place of a step, {place: {category: bytes}}; takes the arguments of ``of_mnist``."""
    timeline = of_mnist(*args, **options).timeline()
    return {place: by_category(terms) for place, (_, terms) in timeline.items()}


def peak(*args, **options) -> tuple[str, dict]:
    """(which moment, {category: bytes}) of the highest of ``moments``; takes the arguments of ``of_mnist``."""
    where, terms = of_mnist(*args, **options).peak()
    return where, by_category(terms)
