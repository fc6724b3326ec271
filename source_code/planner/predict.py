# SPDX-License-Identifier: BSD-3-Clause
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
from collections.abc import Callable
from dataclasses import replace
from math import prod

from planner import UserError
from planner.models import networks
from planner.ops.context import Context, order_of
from planner.ops.routing import Routing, expected
from planner.parallel.mesh import arrange
from planner.parallel.pipeline import Stage, split_blocks
from planner.parallel.strategies import Unit
from planner.step.plan import Plan

# {script of a lab: the function that plans a run of it from its record}. Filled by what declares the options of the labs
# (labkit/running/lab_options.py). A function takes the record, and by name ``at_least`` (see ``plan_of``), ``on_gpu``,
# and further fields of ``Plan``.
PLANNERS: dict[str, Callable[..., Plan]] = {}


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
    """Check that runs of a lab script can be planned. (Those of gpt_jax.py cannot: XLA plans its memory.)

    Raises:
        UserError: they cannot.
    """
    if script not in PLANNERS:
        raise UserError(f"{script} has no plan: the planner knows {', '.join(PLANNERS)}")


def plan_of(record: dict, rank: int = 0, at_least: bool = False) -> Plan:
    """Return the plan of a run of one of the labs.

    What a GPU's operators allocate inside them is left out, as the meters cannot see it.

    Args:
        record: of the run (labkit/measuring/records.py): "script", "config" (the options), "ranks", "device",
            "batch_size" of mnist_fsdp.py, and "versions", if it has them.
        rank: whose plan, where ranks differ: the stage of a pipeline; else see ``Plan.rank``.
        at_least: accept a plan that needs less than the run, if the run itself cannot be planned.

    Raises:
        UserError: such a run is not predicted.
    """
    check_planned(record["script"])
    if "zero_optimization" in record:
        raise UserError("DeepSpeed is predicted with the settings of gpt_zero.py only: this run had others")
    fields = {"rank": rank, "on_gpu": record["device"] == "cuda", "workspaces": False}
    if "versions" in record:
        fields["torch"] = tuple(map(int, record["versions"]["torch"].split(".")[:2]))
    return PLANNERS[record["script"]](record, at_least=at_least, **fields)


def transformer_plan(
    options,
    ranks: int,
    network: networks.Blueprint | None = None,
    *,
    on_gpu: bool,
    routing: Routing | None = None,
    **fields,
) -> Plan:
    """Return the plan of a transformer's training.

    Args:
        options: of a lab or of plan.py, as ``TransformerTraining`` has them (labkit/running/lab_options.py).
        ranks: how many train.
        network: the user's own; by default the one that the options name.
        on_gpu: whether a GPU's kernels run.
        routing: of the rank's tokens to experts; by default the one expected.
        fields: further fields of ``Plan``.

    Raises:
        UserError: the ranks cannot be arranged so, or cannot share the model so.
    """
    mesh = arrange(ranks, options.mesh, options.reshard_after_forward)
    # What attention needs for a moment differs among the ranks that share a sequence: the last one needs most.
    place = mesh.context_part(fields["rank"]) if "rank" in fields else mesh.context - 1
    form = options.context_attention
    spreads = bool(options.experts) and mesh.expert > 1  # else it is transformers that spreads them
    if routing is None and spreads:
        sizes = options.batch_size, options.seq_len // mesh.context
        routing = expected(options.shape.experts, *sizes, options.imbalance, mesh.expert)
    network = network or networks.gpt(
        options.shape,
        options.batch_size,
        options.seq_len,
        options.recompute,
        options.lora,
        tp_degree=mesh.tensor,
        recompute_every=options.recompute_every,
        loss_chunks=options.loss_chunks,
        wrap_embeddings=options.wraps_embeddings,
        quantized=options.frozen == "nf4",
        offload_activations=options.offload_activations and on_gpu,  # on the CPU nothing moves
        context=Context(mesh.context, form, order_of(form), place),
        ep_degree=mesh.expert if spreads else 1,
        routing=routing,
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
        clip=_computes_norm(options),
        prefetch=options.prefetch,
        weights=options.weights,
        # On the CPU there is only one memory, and what is offloaded is in it.
        offload=options.cpu_offload and on_gpu and options.planned_strategy == "fsdp2",
        on_gpu=on_gpu,
        **fields,
    )


def _computes_norm(options) -> bool:
    """Return whether each step computes the gradient's norm: to clip by it, or, except under DeepSpeed, for --log."""
    logged = options.log is not None and not options.planned_strategy.startswith("deepspeed")
    return logged or options.clip is not None


def stage_plan(options, stage: Stage, **fields) -> Plan:
    """Return the plan of one stage of a pipelined transformer.

    Args:
        options: as in ``transformer_plan``.
        stage: which one.
        fields: further fields of ``Plan``.
    """
    shape = options.shape
    blocks = split_blocks(shape.num_hidden_layers, stage.stages)[stage.stage]
    sizes = options.batch_size, options.seq_len, options.recompute
    network = networks.gpt(replace(shape, tie_word_embeddings=False), *sizes, blocks=blocks)
    return Plan(
        network,
        strategy="single",
        ranks=stage.stages,
        precision=options.precision,
        optimizer=options.optimizer,
        micro_batches=options.accumulate,
        clip=_computes_norm(options),
        pipeline=stage,
        **fields,
    )


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
    reshard_after_forward: str = "true",
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
        reshard_after_forward: "true", or "false", which keeps gathered parameters from forward to backward.
        device: whose kernels, "cpu" or "cuda".
        options: further fields of ``Plan``.
    """
    network = networks.mnist(batch, dropout, min_num_params if wrap == "size" else None)
    options |= {"on_gpu": device == "cuda", "optimizer": "adadelta"}
    return Plan(network, strategy=strategy, ranks=ranks, reshard=reshard_after_forward, **options)


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
