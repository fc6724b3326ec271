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
from collections.abc import Callable
from dataclasses import replace
from math import prod

from planner import UserError, networks
from planner.mesh import arrange
from planner.pipeline import Stage, blocks_of
from planner.plan import Plan
from planner.strategies import Unit

# {script of a lab: a function of one of its records that plans the run}. Who declares the options of labs fills it
# (labkit/running/lab_options.py). Each takes the record, and by name ``at_least`` (see ``plan_of``), ``on_gpu``, and more of ``Plan``'s fields.
PLANNERS: dict[str, Callable[..., Plan]] = {}


def by_category(terms: dict) -> dict[str, int]:
    """{category: bytes} of named terms."""
    sums = Counter()
    for (category, _), size in terms.items():
        sums[category] += size
    return dict(sums)


def total(terms: dict) -> int:
    return sum(terms.values())


def check_planned(script: str):
    """Raise UserError if no lab has said how its runs are planned, such as gpt_jax.py, whose memory XLA plans."""
    if script not in PLANNERS:
        raise UserError(f"{script} has no plan: the planner knows {', '.join(PLANNERS)}")


def plan_of(record: dict, rank: int = 0, at_least: bool = False) -> Plan:
    """Return the plan of a run of one of the labs, from its record (labkit/measuring/records.py).

    What a GPU's operators allocate inside them is left out, as the meters cannot see it.

    Args:
        record: of it are taken "script", "config" (the options), "ranks", "device", and "batch_size" of mnist_fsdp.py;
            the version of PyTorch, if it has one.
        rank: whose plan, where ranks differ: of a pipeline, and see ``Plan.rank``.
        at_least: whether a plan will do that needs less than the run, where the run itself cannot be planned.

    Raises:
        UserError: the script has no plan, or the arithmetic does not reach.
    """
    check_planned(record["script"])
    how = {"rank": rank, "on_gpu": record["device"] == "cuda", "workspaces": False}
    if "versions" in record:
        how["torch"] = tuple(map(int, record["versions"]["torch"].split(".")[:2]))
    return PLANNERS[record["script"]](record, at_least=at_least, **how)


def of_transformer(options, ranks: int, network: networks.Blueprint | None = None, *, on_gpu: bool, **how) -> Plan:
    """Plan the training of a transformer.

    Args:
        options: of a lab or of plan.py, as ``TransformerTraining`` has them (labkit/running/lab_options.py).
        ranks: the number of ranks.
        network: one's own instead of the course's.
        on_gpu: whose kernels.
        how: more of ``Plan``'s fields.
    """
    mesh = arrange(ranks, options.mesh, options.reshard_after_forward)
    network = network or networks.gpt(
        options.shape,
        options.batch_size,
        options.seq_len,
        options.recompute,
        options.lora,
        mesh.tensor,
        recompute_every=options.recompute_every,
        loss_chunks=options.loss_chunks,
        apart=options.wraps_embeddings,
        packed=options.frozen == "nf4",
    )
    return Plan(
        network,
        strategy=options.planned_strategy,
        ranks=ranks,
        replicas=mesh.replicate,
        reshard=options.reshard_after_forward,
        precision=options.precision,
        optimizer=options.optimizer,
        micro_batches=options.accumulate,
        sync=options.sync,
        clip=options.clip is not None,
        prefetch=options.prefetch,
        weights=options.weights,
        # On the CPU there is but one memory, and what is offloaded is in it.
        offload=options.cpu_offload and on_gpu and options.planned_strategy == "fsdp2",
        on_gpu=on_gpu,
        **how,
    )


def of_stage(options, stage: Stage, **how) -> Plan:
    """Plan one stage of a pipeline.

    Args:
        options: as in ``of_transformer``.
        stage: which of how many, and their schedule.
        how: more of ``Plan``'s fields.
    """
    shape = options.shape
    blocks = blocks_of(shape.layers, stage.stages)[stage.stage]
    sizes = options.batch_size, options.seq_len, options.recompute
    network = networks.gpt(replace(shape, tied=False), *sizes, blocks=blocks)
    return Plan(
        network,
        "single",
        ranks=stage.stages,
        precision=options.precision,
        optimizer=options.optimizer,
        micro_batches=options.accumulate,
        clip=options.clip is not None,
        pipeline=stage,
        **how,
    )


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
    reshard_after_forward="true",
    device="cpu",
    **options,
) -> Plan:
    """The plan of a run of mnist_fsdp.py.

    batch: images on each rank. reshard_after_forward: "false" keeps gathered parameters from forward to backward.
    device: whose kernels, "cpu" or "cuda", as a record has it. options: ``Plan``'s.
    """
    network = networks.mnist(batch, dropout, min_num_params if wrap == "size" else None)
    options |= {"on_gpu": device == "cuda", "optimizer": "adadelta"}
    return Plan(network, strategy, ranks, reshard=reshard_after_forward, **options)


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
