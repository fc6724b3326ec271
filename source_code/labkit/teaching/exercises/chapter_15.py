# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 15, beyond FSDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planner.models.shapes import GPT_SHAPES

from labkit.measuring.differences import largest_difference
from labkit.teaching.exercises import Do, Predict, on_ranks

LLAMA, TOKENS, HALF = GPT_SHAPES["llama3-8b"], 8192, 2  # bytes per element in bf16
BETWEEN = TOKENS * LLAMA.hidden_size * HALF / 1e6  # MB of the activation between two blocks
WORLD, WIDTH, HIDDEN = 2, 6, 8


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


LENGTH, TINY = 16, GPT_SHAPES["tiny"]
SPLIT = {"query": 0, "key": 0, "value": 0, "output": 1}  # the dimension of each of attention's weights to shard
REPLACED = "a module of a plan is missing, or its style does not produce the layout that the next one takes"


def _block_in_parts(me, plan):
    """Apply the plan of an attention, and ours of the rest, to a block; this rank has some of the tokens.

    Returns:
        ({weight: dimension in which it is sharded, or None}, collectives of a forward, of attention's output the largest
        difference from one process, or its wrong shape).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    from labkit.training import models

    torch.manual_seed(0)
    block = models.Block(TINY).double()
    x = torch.randn(2, LENGTH, TINY.hidden_size, dtype=torch.float64)
    rotation = models.rotary(LENGTH, TINY.head_dim, x)
    right = x + block.attention(block.attention_norm(x), rotation)
    mine = slice(me.rank * LENGTH // me.world_size, (me.rank + 1) * LENGTH // me.world_size)
    parallelize_module(block, init_device_mesh(me.device.type, (me.world_size,)), plan())
    weights = {name: getattr(block.attention, name).weight for name in SPLIT}
    sharded = {
        name: next((p.dim for p in getattr(w, "placements", ()) if p.is_shard()), None) for name, w in weights.items()
    }
    with CommDebugMode() as sent:
        normed = block.attention_norm(x[:, mine].contiguous())
        part = block.attention(normed, rotation)
    part = part.to_local() if hasattr(part, "to_local") else part
    if part.shape != right[:, mine].shape:
        return sharded, sent.get_total_counts(), tuple(part.shape)
    return sharded, sent.get_total_counts(), largest_difference(x[:, mine] + part, right[:, mine])


def judge_plan(plan) -> str:
    if plan() is None or plan() is ...:
        return "not answered yet"
    sharded, collectives, apart = on_ranks(_block_in_parts, plan, ranks=WORLD)[0]
    for name, dimension in SPLIT.items():
        if sharded[name] is None:
            return f"not quite: attention.{name} is not sharded: every rank has all of it"
        if sharded[name] != dimension:
            return f"not quite: attention.{name} is sharded along dimension {sharded[name]}; look at gate and down"
    if isinstance(apart, tuple):
        return f"not quite: attention returns {apart} on a rank that has {LENGTH // WORLD} of {LENGTH} tokens"
    if not apart < 1e-9:
        return f"not quite: the result differs by {apart:.1e} from that of one process: {REPLACED}"
    if collectives != 2:
        return f"not quite: the result is right, but a forward takes {collectives} collectives instead of 2"
    return "right"


def _whole_model():
    from labkit.training import models

    torch.manual_seed(0)
    return models.GPT(TINY).double()


def _loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _staged(me, stage_of):
    """Run one step of two stages, and return (elements of this one, {parameter: gradient} of the whole model's)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    gpt = _whole_model()
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    mine = stage_of(gpt, me.rank, me.world_size)
    if not isinstance(mine, torch.nn.Module):
        return None, {}
    tokens = torch.randint(TINY.vocab_size, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    schedule = Schedule1F1B(PipelineStage(mine, me.rank, me.world_size, me.device), 4, _loss)
    schedule.step(*([tokens[:, :-1]] if me.rank == 0 else []), target=tokens[:, 1:])
    held = {names.get(id(parameter)): parameter.grad for parameter in mine.parameters()}
    return sum(parameter.numel() for parameter in mine.parameters()), held


def judge_stage(stage_of) -> str:
    gpt = _whole_model()
    tokens = torch.randint(TINY.vocab_size, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    _loss(gpt(tokens[:, :-1]), tokens[:, 1:]).backward()
    stages = on_ranks(_staged, stage_of, ranks=WORLD)
    if any(numel is None for numel, _ in stages):
        return "not answered yet"
    for name, parameter in gpt.named_parameters():
        holders = [rank for rank, (_, held) in enumerate(stages) if name in held]
        if len(holders) != 1:
            return f"not quite: {name} is on {len(holders)} stages; each parameter belongs on one"
        gradient = stages[holders[0]][1][name]
        if gradient is None or not torch.allclose(gradient, parameter.grad, atol=1e-9):
            return f"not quite: stage {holders[0]}'s gradient of {name} differs from that of one process"
    return "right"


EXERCISES = {
    "15.1": Do(
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
    "15.2": Do(
        title="a plan for attention",
        level=2,
        minutes=10,
        judge=judge_plan,
        hint="Query, key and value take the same input, as gate and up do, and output plays the part of down. Attention has "
        "two inputs, and the second\n(the rotation) is no tensor to lay out: None stands for it.",
        solution="""
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

def attention_plan():
    tokens, whole = Shard(1), Replicate()
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(tokens, None), desired_input_layouts=(whole, None)),
        "attention.query": ColwiseParallel(),  # some of the heads: of queries, and of keys and values
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=tokens),  # reduce-scatter in the place of all-reduce
    }
""",
    ),
    "15.3": Do(
        title="a stage of a pipeline",
        level=2,
        minutes=10,
        judge=judge_stage,
        hint="The first stage gets token ids and begins with the embedding; the last one ends with the norm and the head, and "
        "returns logits.\nA module registers only what is assigned to self: no rank should hold another stage's blocks.",
        solution="""
import torch
from labkit.training import models

class Part(torch.nn.Module):
    def __init__(self, gpt, index, stages):
        super().__init__()
        each = len(gpt.blocks) // stages
        self.blocks = torch.nn.ModuleList(gpt.blocks[index * each : (index + 1) * each])
        self.embedding = gpt.embedding if index == 0 else None
        self.norm, self.head = (gpt.norm, gpt.head) if index == stages - 1 else (None, None)
        self.head_dim = gpt.shape.head_dim

    def forward(self, x):
        x = self.embedding(x) if self.embedding else x
        rotation = models.rotary(x.shape[1], self.head_dim, x)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x)) if self.head else x

def stage_of(gpt, index, stages):
    return Part(gpt, index, stages)
""",
    ),
    "15.4": Predict(
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
}
