"""Predict what a training step needs, by arithmetic: its memory in named terms, its collectives. Imports no torch.

  network = networks.gpt(GPT_SHAPES["tiny"], batch_size=8, seq_len=128)
  plan = predict.Plan(network, strategy="fsdp2", ranks=4)
  plan.peak()              the phase of a step with the most memory, and what is alive then
  plan.persistent()        what a rank stores from step to step
  plan.traffic()           each collective of a step

The network's operators run on sizes (planner/ops/operators.py), and the strategy acts around them
(planner/parallel/strategies.py). Sizes are bytes on ``Plan.rank``, by default rank 0, which never holds less than another
rank, except under ZeRO-1 and 2. The categories are those of the meters (labkit/measuring/trace.py).

For the CPU, predictions were compared with the meters, and with PyTorch's own code on tensors without memory; for a GPU
(on_gpu) with that code alone, running a GPU's operators (labkit/measuring/gpu_operators.py). Known from reading their
source: what flash and memory-efficient attention allocate inside their backward, and math attention in its softmax
(workspaces). Not modeled, since only a GPU can show it: cuDNN's workspaces (convolutions; attention, where it is cuDNN's),
cuBLAS's (one for each stream), what flash attention's forward splits where batch × heads is small, sorting in the
embedding's backward, NCCL's buffers, streams that free a gathered unit later, and what the allocator rounds up and
reserves.

At the end of the file: short forms for the MNIST network, which chapters 00 to 07 use.
"""

from collections import Counter
from dataclasses import replace
from math import prod

from planner import UserError
from planner.models import huggingface, networks
from planner.models.shapes import GPT_SHAPES, GPTShape
from planner.parallel import zero
from planner.parallel.mesh import arrange
from planner.parallel.pipeline import Stage, split_blocks
from planner.parallel.strategies import Unit
from planner.step.plan import Plan

# Options that older records do not have, with the values that those runs had
ADDED_LATER = {"weights": "fp32", "recompute_every": 1, "loss_chunks": 1, "units": "blocks"}
PLANNED = ("mnist_fsdp.py", "gpt_fsdp.py", "gpt_zero.py", "gpt_pipeline.py", "hf_fsdp.py", "one_rank.py")


def by_category(terms: dict) -> dict[str, int]:
    """Return {category: bytes} of named terms, {(category, name): bytes}."""
    sums = Counter()
    for (category, _), size in terms.items():
        sums[category] += size
    return dict(sums)


def total(terms: dict) -> int:
    """Return the sum of terms, in bytes."""
    return sum(terms.values())


def check_planned(script: str):
    """Check that the planner knows a lab script. (It does not know gpt_jax.py, whose memory XLA plans.)

    Raises:
        UserError: it does not.
    """
    if script not in PLANNED:
        raise UserError(f"{script} has no plan: the planner knows {', '.join(PLANNED)}")


def plan_of(record: dict, rank: int = 0, at_least: bool = False) -> Plan:
    """Return the plan of a run of one of the labs.

    What a GPU's operators allocate inside them is left out, as the meters cannot see it.

    Args:
        record: of the run (labkit/measuring/records.py): "script", "config" (every option), "ranks", "device",
            "batch_size" of mnist_fsdp.py, and "versions", if it has them.
        rank: whose plan, where ranks differ: the stage of a pipeline; else see ``Plan.rank``.
        at_least: accept a plan that needs less than the run, if the run itself cannot be planned.

    Raises:
        UserError: such a run is not predicted.
    """
    script, config, ranks = record["script"], record["config"], record["ranks"]
    check_planned(script)
    common = {"ranks": ranks, "workspaces": False}
    if "versions" in record:
        common["torch"] = tuple(map(int, record["versions"]["torch"].split(".")[:2]))
    if script == "gpt_pipeline.py":
        common["clip"] = config["clip"] is not None
        sizes = (config[name] for name in ("batch_size", "seq_len", "recompute"))
        trained = {name: config[name] for name in ("precision", "optimizer")} | {"micro_batches": config["accumulate"]}
        shape, stage = GPT_SHAPES[config["preset"]], Stage(ranks, rank, config["schedule"])
        return stage_plan(shape, *sizes, stage, on_gpu=record["device"] == "cuda", **trained, **common)
    if script == "hf_fsdp.py":
        return hugging_face_plan(config, on_gpu=record["device"] == "cuda", at_least=at_least, **common)
    if script == "gpt_zero.py":
        config = zero.as_gpt_fsdp(config)
    common |= {name: config[name] for name in ("strategy", "precision")}
    if script == "mnist_fsdp.py":
        wrapped = {name: config[name] for name in ("wrap", "dropout", "min_num_params", "sharding")}
        return mnist_plan(batch=record["batch_size"], device=record["device"], **common, **wrapped)
    config = ADDED_LATER | config
    shape, reshard = GPT_SHAPES[config["preset"]], config["reshard_after_forward"] or "true"
    if config["tied"] is not None:
        shape = replace(shape, tie_word_embeddings=config["tied"])
    mesh = arrange(ranks, config["mesh"], reshard)
    sizes = (config[name] for name in ("batch_size", "seq_len", "recompute", "lora"))
    choices = {name: config[name] for name in ("recompute_every", "loss_chunks")} | {
        "wrap_embeddings": config["units"] == "apart"
    }
    common["clip"] = config["clip"] is not None
    return Plan(
        networks.gpt(shape, *sizes, tp_degree=mesh.tensor, **choices),
        replicas=mesh.replicate,
        reshard=reshard,
        micro_batches=config["accumulate"],
        # On the CPU there is only one memory, and what is offloaded is in it.
        offload=config["cpu_offload"] and record["device"] == "cuda" and common["strategy"] == "fsdp2",
        **{name: config[name] for name in ("optimizer", "sync", "prefetch", "weights")},
        on_gpu=record["device"] == "cuda",
        rank=rank,
        **common,
    )


def hugging_face_plan(config: dict, on_gpu: bool, at_least: bool = False, **common) -> Plan:
    """Return the plan of a run of hf_fsdp.py, as if the model were written with the course's operators.

    Args:
        config: every option.
        on_gpu: whether it runs on a GPU.
        at_least: plan the course's adapters instead of peft's, which are on more layers, and need more.
        common: further fields of ``Plan``.

    Raises:
        UserError: peft's adapters, unless ``at_least``; or a family that is not known.
    """
    if config["lora"] and not at_least:
        raise UserError("peft's adapters, on every linear layer, are not planned: train a few steps with --record")
    shape = huggingface.load(config["model"] or config["config"])
    sizes = (config[name] for name in ("batch_size", "seq_len", "recompute", "lora"))
    common |= {name: config[name] for name in ("strategy", "precision")}
    common |= {"micro_batches": config["accumulate"], "clip": config["clip"] is not None}
    network = networks.gpt(shape, *sizes, wrap_embeddings=not shape.tie_word_embeddings)
    return Plan(network, optimizer="adamw", on_gpu=on_gpu, **common)


def stage_plan(shape: GPTShape, batch_size: int, seq_len: int, recompute: str, stage: Stage, **options) -> Plan:
    """Return the plan of one stage of a pipelined GPT.

    Args:
        shape: the model.
        batch_size: sequences of a micro-batch.
        seq_len: tokens of a sequence.
        recompute: one of ``networks.RECOMPUTE``.
        stage: which one.
        options: further fields of ``Plan``.
    """
    blocks = split_blocks(shape.num_hidden_layers, stage.stages)[stage.stage]
    network = networks.gpt(replace(shape, tie_word_embeddings=False), batch_size, seq_len, recompute, blocks=blocks)
    return Plan(network, strategy="single", **{"ranks": stage.stages} | options, pipeline=stage)


def peak_of(record: dict) -> tuple[str, dict]:
    """Return the peak of a run from its record, with its device's kernels: (phase, {category: bytes})."""
    phase, terms = plan_of(record).peak()
    return phase, by_category(terms)


# Short forms for the MNIST network, as mnist_fsdp.py trains it. wrap: "unit" or "size".

SHAPES = {layer: list(parameters.values()) for layer, parameters in networks.LAYERS.items()}

# Elements per image: the input, and the outputs of the layers.
IMAGE, CONV1, CONV2, POOLED, HIDDEN, CLASSES = 28 * 28, 32 * 26 * 26, 64 * 24 * 24, 64 * 12 * 12, 128, 10


def numel(layers) -> int:
    """Return how many parameters the layers, names in ``SHAPES``, have together."""
    return sum(prod(shape) for layer in layers for shape in SHAPES[layer])


def units_of(wrap: str, min_num_params: int = 20000) -> list[list[str]]:
    """Return the layers of each FSDP unit; the root, which has those of no other unit, is the last.

    Args:
        wrap: "unit": the root only; "size": large layers are units of their own.
        min_num_params: parameters from which a layer is large.
    """
    wrapped = [layer for layer in SHAPES if wrap == "size" and numel([layer]) >= min_num_params]
    return [[layer] for layer in wrapped] + [[layer for layer in SHAPES if layer not in wrapped]]


def shard(strategy: str, layers, ranks: int) -> int:
    """Return the elements that one rank holds of a unit with these layers, padding included: see ``strategies.Unit``."""
    modules = [module for module in networks.mnist().modules if module.name in layers]
    if not modules:
        return 0
    return Unit(modules, tied={}, shards=ranks, flat=strategy == "fsdp1", itemsize=4).shard_numel()


def mnist_plan(
    strategy: str,
    wrap: str = "unit",
    ranks: int = 1,
    batch: int = 64,
    dropout: bool = True,
    min_num_params: int = 20000,
    sharding: str = "full",
    device: str = "cpu",
    **options,
) -> Plan:
    """Return the plan of a run of mnist_fsdp.py.

    Args:
        strategy: see ``Plan``.
        wrap: see ``units_of``.
        ranks: how many train.
        batch: images on each rank.
        dropout: whether training drops elements.
        min_num_params: see ``units_of``.
        sharding: "full", or "grad-op", which keeps gathered parameters from forward to backward.
        device: whose kernels, "cpu" or "cuda".
        options: further fields of ``Plan``.
    """
    network = networks.mnist(batch, dropout, min_num_params if wrap == "size" else None)
    reshard = "true" if sharding == "full" else "false"
    options |= {"on_gpu": device == "cuda", "optimizer": "adadelta"}
    return Plan(network, strategy=strategy, ranks=ranks, reshard=reshard, **options)


def persistent(strategy: str, wrap: str, ranks: int, **options) -> dict:
    """Return what a rank stores from step to step: {"parameters", "optimizer state", "all-reduce buckets": bytes}.

    The arguments are those of ``mnist_plan``.
    """
    return by_category(mnist_plan(strategy, wrap, ranks, batch=1, **options).persistent())


def snapshots(*args, **options) -> dict[str, dict]:
    """Return the peak of each phase of a step, {phase: {category: bytes}}; the arguments are those of ``mnist_plan``."""
    timeline = mnist_plan(*args, **options).timeline()
    return {phase: by_category(terms) for phase, (_, terms) in timeline.items()}


def peak(*args, **options) -> tuple[str, dict]:
    """Return the peak of a step, (phase, {category: bytes}); the arguments are those of ``mnist_plan``."""
    phase, terms = mnist_plan(*args, **options).peak()
    return phase, by_category(terms)
