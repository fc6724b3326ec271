"""Exercises of chapter 15, beyond FSDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models.shapes import GPT_SHAPES

from labkit.teaching.exercises import Do, Predict, on_ranks

STAGES, MICRO_BATCHES = 8, 16
LLAMA, TOKENS, HALF = GPT_SHAPES["llama3-8b"], 8192, 2  # bytes per number in bf16
BETWEEN = TOKENS * LLAMA.hidden_size * HALF / 1e6  # MB of what flows between two blocks
WORLD, WIDTH, HIDDEN = 2, 6, 8


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline's time, in percent (arXiv:1811.06965, section 2.3)."""
    return 100 * (stages - 1) / (micro_batches + stages - 1)


def _multiplied(me, mlp):
    """(what ``mlp`` returned, the right result, the sum of the ranks' parts, how many collectives it called)."""
    draw = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=draw) for shape in ((5, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)))
    mine = slice(me.rank * HIDDEN // me.world_size, (me.rank + 1) * HIDDEN // me.world_size)
    part = F.linear(F.relu(F.linear(x, up[mine])), down[:, mine])
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        original = getattr(dist, name)
        setattr(dist, name, lambda *a, original=original, **k: calls.append(1) or original(*a, **k))
    given = mlp(x, up[mine].clone(), down[:, mine].clone())
    return given, F.linear(F.relu(F.linear(x, up)), down), part, len(calls)


def judge_mlp(mlp) -> str:
    found = on_ranks(_multiplied, mlp, ranks=WORLD)
    if any(given is None or given is ... for given, *_ in found):
        return "not answered yet"
    for rank, (given, right, part, calls) in enumerate(found):
        if not isinstance(given, torch.Tensor) or given.shape != right.shape:
            shape = tuple(getattr(given, "shape", ()))
            return f"not quite: rank {rank} has a result of shape {shape}, and {tuple(right.shape)} is wanted"
        if not torch.allclose(given, right, atol=1e-5):
            why = ""
            if torch.allclose(given, part):
                why = ": that is this rank's part of a sum over the ranks"
            elif torch.allclose(given * WORLD, right, atol=1e-5):
                why = ": that is the mean of the ranks' parts; their sum is wanted"
            return f"not quite: rank {rank}'s result is not that of the whole layers{why}"
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
            "that is a share; percent are wanted": bubble(STAGES, MICRO_BATCHES) / 100,
        },
        hint="How many micro-batches' time passes before the last stage begins? How many does a step take in all?",
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
            "each part gathers what comes in, and reduce-scatters what goes out": BETWEEN,
            "forward alone is wanted, and a number in bf16 is 2 bytes": 8 * BETWEEN,
            "that is what one of eight ranks sends of one collective; the whole tensors are wanted": BETWEEN / 8,
        },
        hint="Attention and the feed-forward part each begin with an all-gather along the sequence, and end with a "
        "reduce-scatter.\nThe whole tensor is tokens × width.",
        solution=f"""
tokens, width = {TOKENS}, {LLAMA.hidden_size}
answer = 4 * tokens * width * 2 / 1e6  # two all-gathers and two reduce-scatters of it, 2 bytes per number
""",
    ),
    "15.3": Do(
        title="two layers over the ranks",
        level=3,
        minutes=10,
        judge=judge_mlp,
        hint="Nothing has to be sent between the two layers: a rank's rows of up make the hidden numbers that its columns "
        "of down take.",
        solution="""
import torch.distributed as dist
import torch.nn.functional as F

def mlp(x, up, down):
    part = F.linear(F.relu(F.linear(x, up)), down)  # of a sum over all hidden numbers: this rank's share of it
    dist.all_reduce(part)
    return part
""",
    ),
}
