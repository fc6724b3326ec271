# SPDX-License-Identifier: BSD-3-Clause
"""Find the fewest GPUs that train Llama 3 405B on a sequence of 131,072 tokens, for each way to divide the work.

  python -m proofs.long_sequences                    a table: 80 GiB, bf16, one sequence on each context group
  python -m proofs.long_sequences --gpu-memory 139.7

Every plan recomputes blocks in full; without tensor parallelism, whose loss is sharded, it computes the loss in 64 chunks.
Predicted, not run. Llama 3's authors trained with TP 8 x CP 16 x PP 16, so 2,048 GPUs for each of eight data-parallel
groups (arXiv:2407.21783, table 4); the planner does not combine a pipeline with other dimensions.
"""

from dataclasses import dataclass
from functools import cache

import pandas
from labkit.running.options import Options, option, parse
from labkit.running.plan_options import Config as PlanOptions
from planner import predict
from planner.cli.commands import fit, plan_from_options, throughput

MOST = 16_384  # ranks
GIB = 2**30
# {name: (may a context group have several ranks, ranks of a tensor group, are inputs of blocks in the CPU's memory)}
WAYS = {
    f"FSDP{' + tensor 8' * (tensor > 1)}{' + context' * context}{' + offloaded activations' * offload}": (
        context,
        tensor,
        offload,
    )
    for tensor in (1, 8)
    for context in (False, True)
    for offload in (False, True)
}


@dataclass(frozen=True)
class Config(Options):
    """Which model, sequence, and GPU. The command line is made from these fields."""

    preset: str = option("llama3-405b", "size of the model")
    seq_len: int = option(131_072, "tokens of a sequence, a power of two", least=2)
    gpu_memory: float = option(80.0, "GiB that a rank may use", above=0)


def options_of(asked: Config, shards: int, context: int, tensor: int, offload: bool) -> PlanOptions:
    """Return the options of plan.py for these dimensions of a mesh."""
    mesh = {"shard": shards, "context": context, "tensor": tensor}
    return PlanOptions(
        preset=asked.preset,
        ranks=shards * context * tensor,
        mesh=",".join(f"{name}={size}" for name, size in mesh.items()),
        batch_size=1,
        seq_len=asked.seq_len,
        precision="bf16",
        recompute="full",
        offload_activations=offload,
        loss_chunks=64 if tensor == 1 else 1,
        gpu_memory=asked.gpu_memory,
    )


def fewest(asked: Config, context: int, tensor: int, offload: bool, most: int = MOST) -> PlanOptions | None:
    """Return the options with the fewest ranks that fit, up to ``most``, for a size of context and tensor groups."""

    @cache
    def fits(shards: int) -> bool:
        options = options_of(asked, shards, context, tensor, offload)
        return fit(options, predict.total(plan_from_options(options).peak()[1]))["answer"] == "fits"

    low, high = 0, most // (context * tensor)
    if high == 0 or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return options_of(asked, high, context, tensor, offload)


def fewest_of_way(asked: Config, several: bool, tensor: int, offload: bool) -> PlanOptions | None:
    """Return the options with the fewest ranks over all sizes of context groups; None: none fits."""
    best, context = None, 1
    while context * tensor <= (best.ranks if best else MOST) and (several or context == 1):
        found = fewest(asked, context, tensor, offload, best.ranks - 1 if best else MOST)
        best, context = found or best, 2 * context
    return best


def row(asked: Config, way: str) -> dict:
    """Return what is predicted of a way: its fewest ranks, or, where none fits, what the most ranks lack."""
    several, tensor, offload = WAYS[way]
    options = fewest_of_way(asked, several, tensor, offload)
    shown = options or options_of(asked, MOST // tensor, 1, tensor, offload)
    plan = plan_from_options(shown)
    where, terms = plan.peak()
    sizes = predict.by_category(terms)
    times = throughput(shown, plan)[0]
    return {
        "way": way,
        "ranks": options and options.ranks,
        "mesh": shown.mesh,
        "needs": fit(shown, predict.total(terms))["needs"],
        "peak at": where,
        "largest": max(sizes, key=sizes.get),
        "categories": sizes,
        "host": predict.total(plan.host_memory()),
        "seconds": times["overlapped"],
    }


def table(rows: list[dict]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "way": row["way"],
            "fewest ranks": row["ranks"] or f"none up to {MOST:,}",
            "mesh": row["mesh"],
            "needs [GiB]": f"{row['needs']:.1f}",
            "peak at": row["peak at"],
            "its largest part [GiB]": f"{row['largest']}, {row['categories'][row['largest']] / GIB:.1f}",
            "CPU memory of a rank [GiB]": f"{row['host'] / GIB:.0f}",
            "step [s]": f"{row['seconds']:.0f}",
        }
        for row in rows
    )


def main():
    asked = parse(Config, __doc__)
    print(table([row(asked, way) for way in WAYS]).to_markdown(index=False, disable_numparse=True))


if __name__ == "__main__":
    main()
