"""Exercises of chapter 15, beyond FSDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models.shapes import GPT_SHAPES

from labkit.teaching.exercises import Do, Predict, on_ranks

STAGES, MICRO_BATCHES = 8, 16
LLAMA, TOKENS, HALF = GPT_SHAPES["llama3-8b"], 8192, 2  # bytes per element in bf16
BETWEEN = TOKENS * LLAMA.hidden_size * HALF / 1e6  # MB of the activation between two blocks
WORLD, WIDTH, HIDDEN = 2, 6, 8


def bubble(stages: int, micro_batches: int) -> float:
    """Return the idle share of a pipeline's time, in percent (arXiv:1811.06965, section 2.3)."""
    return 100 * (stages - 1) / (micro_batches + stages - 1)


def _multiplied(me, mlp):
    """Run ``mlp`` on this rank.

    Returns:
        (its result, the right result, this rank's partial sum, the number of collectives called).
    """
    draw = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=draw) for shape in ((5, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)))
    mine = slice(me.rank * HIDDEN // me.world_size, (me.rank + 1) * HIDDEN // me.world_size)
    part = F.linear(F.relu(F.linear(x, up[mine])), down[:, mine])
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        original = getattr(dist, name)
        setattr(dist, name, lambda *a, original=original, **k: calls.append(1) or original(*a, **k))
    result = mlp(x, up[mine].clone(), down[:, mine].clone())
    return result, F.linear(F.relu(F.linear(x, up)), down), part, len(calls)


def judge_mlp(mlp) -> str:
    results = on_ranks(_multiplied, mlp, ranks=WORLD)
    if any(result is None or result is ... for result, *_ in results):
        return "not answered yet"
    for rank, (result, right, part, calls) in enumerate(results):
        if not isinstance(result, torch.Tensor) or result.shape != right.shape:
            shape = tuple(getattr(result, "shape", ()))
            return f"not quite: rank {rank} has a result of shape {shape} instead of {tuple(right.shape)}"
        if not torch.allclose(result, right, atol=1e-5):
            why = ""
            if torch.allclose(result, part):
                why = ": that is this rank's partial sum"
            elif torch.allclose(result * WORLD, right, atol=1e-5):
                why = ": that is the mean of the ranks' partial sums, not their sum"
            return f"not quite: rank {rank}'s result is not that of the full layers{why}"
        if calls != 1:
            return f"not quite: the result is right, but it took {calls} collectives; one is enough"
    return "right"


EXERCISES = {
    "15.1": Predict(
        title="the bubble of eight stages",
        level=1,
        minutes=3,
        answer=bubble(STAGES, MICRO_BATCHES),
        unit="%",
        slips={
            "that is the idle time as a share of the busy time, not of all of it": 100 * (STAGES - 1) / MICRO_BATCHES,
            "eight stages wait seven times for the first micro-batch": 100 * STAGES / (MICRO_BATCHES + STAGES),
            "that is the share of time in which a stage computes": 100 - bubble(STAGES, MICRO_BATCHES),
            "that is a fraction; the question is in percent": bubble(STAGES, MICRO_BATCHES) / 100,
        },
        hint="After how many micro-batches' time does the last stage start? How many does a step take in total?",
        solution=f"""
stages, micro_batches = {STAGES}, {MICRO_BATCHES}
answer = 100 * (stages - 1) / (micro_batches + stages - 1)
""",
    ),
    "15.2": Predict(
        title="what tensor parallelism gathers in a block",
        level=2,
        minutes=6,
        answer=4 * BETWEEN,
        unit="MB",
        slips={
            "that is attention or the feed-forward part alone; a block has both": 2 * BETWEEN,
            "each part all-gathers its input and reduce-scatters its output": BETWEEN,
            "count forward only, and 2 bytes per element in bf16": 8 * BETWEEN,
            "that is the shard of one of eight ranks, in one collective; count full tensors": BETWEEN / 8,
        },
        hint="Attention and the feed-forward part each begin with an all-gather along the sequence, and end with a "
        "reduce-scatter.\nThe full tensor is tokens × width.",
        solution=f"""
tokens, width = {TOKENS}, {LLAMA.hidden_size}
answer = 4 * tokens * width * 2 / 1e6  # two all-gathers and two reduce-scatters of it, 2 bytes per element
""",
    ),
    "15.3": Do(
        title="two layers over the ranks",
        level=3,
        minutes=10,
        judge=judge_mlp,
        hint="No communication is needed between the two layers: a rank's rows of up compute the hidden elements that its "
        "columns of down take.",
        solution="""
import torch.distributed as dist
import torch.nn.functional as F

def mlp(x, up, down):
    part = F.linear(F.relu(F.linear(x, up)), down)  # this rank's partial sum over the hidden elements
    dist.all_reduce(part)
    return part
""",
    ),
}
