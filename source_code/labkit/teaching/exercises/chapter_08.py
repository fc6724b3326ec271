# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 08, precision and activation checkpointing."""

from collections import Counter
from functools import partial

import torch
from planner.models.shapes import GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from labkit.measuring.trace import StepTrace, local, peak
from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.teaching.exercises.int8_gather import judge_int8_gather
from labkit.training.models import ATTENTION_OPERATORS, GPT, Block, rotary

# Bytes that autograd saves for backward in a real block


def _saved_bytes(function, x, rotation, but) -> int:
    """Return the bytes of the storages that autograd saves for backward, except those of the tensors in ``but``."""
    own = {tensor.untyped_storage().data_ptr() for tensor in but}
    storages = {}

    def keep(tensor):
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x, rotation)
    return sum(tensor.nbytes for address, tensor in storages.items() if address not in own)


def _inputs(shape, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, shape.hidden_size, generator=generator).to(dtype).requires_grad_()
    return x, rotary(length, shape.head_dim, x)


def reference_kept(shape, itemsize) -> int:
    """Return the bytes per token that autograd saves for backward in a real block."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    block = Block(shape).to(dtype)
    x, rotation = _inputs(shape, 6, dtype)
    return _saved_bytes(block, x, rotation, [*block.parameters(), *rotation]) // (2 * 6)


# The fewest recomputed blocks that bring the peak under a budget, on real ranks

STACK = GPTShape(
    num_hidden_layers=5,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=96,
    vocab_size=64,
)
SEQUENCES, LENGTH = 4, 64
WANTED = (1, 3, 2)  # how many blocks must be recomputed


def _plainly_sharded(model, mesh, *_):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _step(me, prepare, *about) -> dict:
    """Run a step of a small model changed by ``prepare``; return its peak in bytes, gradients, and recomputed blocks."""
    calls, forward = Counter(), Block.forward
    Block.forward = lambda block, *inputs: calls.update([block]) or forward(block, *inputs)
    torch.manual_seed(4)
    model = GPT(STACK)
    blocks = list(model.blocks)
    prepare(model, init_device_mesh("cpu", (me.world_size,)), *about)
    optimizer = torch.optim.SGD(model.parameters())
    trace = StepTrace(model, optimizer, me.device)
    tokens = torch.randint(STACK.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(me.rank))
    peaks = []
    for _ in range(3):  # the first warms up the tracer; the lower of the others counts, as in every record
        optimizer.zero_grad()
        calls.clear()
        with trace:
            model(tokens).square().mean().backward()
        peaks.append(peak(trace.timeline())[1])
    Block.forward = forward
    return {
        "peak": min(peaks[1:]),
        "gradients": {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad if p.grad is None else local(p.grad)
            for name, p in model.named_parameters()  # with PyTorch's checkpoint_wrapper, too
        },
        "recomputed": [number for number, block in enumerate(blocks) if calls[block] > 1],
        "units": [isinstance(block, FSDPModule) for block in model.blocks] + [isinstance(model, FSDPModule)],
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


def _all_recomputed(model, mesh):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    _plainly_sharded(model, mesh)


def _refuses(me, prepare, *about) -> bool:
    try:
        _step(me, prepare, *about)
    except ValueError:
        return True
    return False


def _budgets(me, prepare) -> dict:
    """Run one step without recomputation, and one under each budget."""
    x, rotation = _inputs(STACK, LENGTH)
    block = Block(STACK)
    saved = _saved_bytes(block, x, rotation, [*block.parameters(), *rotation]) * SEQUENCES // len(x)
    block_input = SEQUENCES * LENGTH * STACK.hidden_size * 4
    plain = _step(me, _plainly_sharded)
    most = plain["peak"] - _step(me, _all_recomputed)["peak"]
    # With several blocks, the excess is barely more than one block fewer saves: ignoring the input gives one too few
    excesses = [round((count - (0.5 if count == 1 else 0.96)) * (saved - block_input)) for count in WANTED]
    about = (saved, block_input, most)
    return {
        "plain": plain,
        "steps": [(plain["peak"] - excess, _step(me, prepare, excess, *about)) for excess in excesses],
        "most": most,
        # More than all blocks save, although the division asks for no more blocks than there are
        "refused": {excess: _refuses(me, prepare, excess, *about) for excess in (most + 1, round(1.1 * most))},
    }


def judge_prepare(prepare) -> str:
    results = on_ranks(_budgets, prepare, ranks=2)
    plain, steps = results[0]["plain"], results[0]["steps"]
    for wanted, (budget, step) in zip(WANTED, steps, strict=True):
        if not step["sharded"] and not step["recomputed"]:
            return "not answered yet"
        if not all(step["units"]):
            return "not quite: make each block a unit, then the model: fully_shard(block), fully_shard(model)"
        if message := _over(step, budget, wanted, plain["peak"]):
            return f"not quite: {message}"
    for rank, result in enumerate(results):
        for name, right in result["plain"]["gradients"].items():
            if any(step["gradients"].get(name) is None for _, step in result["steps"]):
                return f"not quite: {name} gets no gradient"
            if not all(torch.equal(step["gradients"][name], right) for _, step in result["steps"]):
                return f"not quite: on rank {rank} the gradient of {name} differs"
    for excess, refused in results[0]["refused"].items():
        if not refused:
            return (
                f"not quite: excess {excess:,} bytes: all blocks together save {results[0]['most']:,}; raise ValueError"
            )
    return "right"


def _over(step, budget, wanted, before) -> str:
    """Describe what is wrong with the choice of recomputed blocks, or return ""."""
    chosen, last = step["recomputed"], STACK.num_hidden_layers - 1
    about = f"peak without recomputation {before:,} bytes, budget {budget:,}: with blocks {chosen or 'none'} recomputed"
    if step["peak"] > budget:
        why = "recompute more of them"
        if last in chosen and len(chosen) >= wanted:
            why = "backward starts with the last block and needs its tensors at once, so recomputing it saves nothing"
        return f"{about} the peak is {step['peak']:,}; {why}"
    if len(chosen) > wanted:
        return f"{about} the peak is {step['peak']:,}; {wanted} of them are enough"
    return ""


# Operations of a step, with some weights frozen

TOKENS = 3
MLP = ((16, 40), (40, 16))  # (columns, rows) of a block's two matrices
PATTERNS = {  # which weights of each block are trained
    "all weights trained": ((True, True), (True, True), (True, True)),
    "all trained, one block": ((True, True),),
    "a frozen base, its first matrix trained": ((True, False), (False, False), (False, False)),
    "the first two blocks frozen": ((False, False), (False, False), (True, True), (False, True)),
    "the second matrix of each block trained": ((False, True), (False, True), (False, True)),
    "a frozen block between trained ones": ((False, True), (False, False), (True, False)),
}


def counted_operations(pattern, recompute) -> int:
    """Return the operations of a forward and a backward of MLP blocks, as PyTorch counts them while they run."""
    torch.manual_seed(6)
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(TOKENS, MLP[0][0])
        for trained in pattern:
            layers = [torch.nn.Linear(*size, bias=False) for size in MLP]
            for layer, one in zip(layers, trained, strict=True):
                layer.requires_grad_(one)
            # tanh saves its output, so that recomputation needs the block's last matmul, too
            block = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x.sum().backward()
    return counter.get_total_flops()


def judge_operations(operations) -> str:
    for what, pattern in PATTERNS.items():
        blocks = [
            [(rows * columns, one) for (columns, rows), one in zip(MLP, trained, strict=True)] for trained in pattern
        ]
        for recompute in (False, True):
            answer, right = operations(blocks, TOKENS, recompute), counted_operations(pattern, recompute)
            if unanswered(answer):
                return "not answered yet"
            if answer != right:
                where = f"{what}, {'full recomputation' if recompute else 'nothing recomputed'}"
                return f"not quite: {where}: {answer:,} operations; PyTorch counts {right:,}, {right / answer if answer else 0:.3f} times as many"
    return "right"


# A selective policy that saves no more than needed


class _MatmulCounter(TorchDispatchMode):
    """Count the matmuls and attention operators that are executed."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            self.counted["a matmul"] += 1
        if operator in ATTENTION_OPERATORS:
            self.counted["attention"] += 1
        return operator(*args, **kwargs or {})


def _selective(keep, shape) -> dict:
    """Run a block under the policy ``keep``; return the bytes saved per token, the operators run in backward, and its decisions."""
    torch.manual_seed(5)
    block = Block(shape)
    x, rotation = _inputs(shape, 6)
    decisions = []

    def policy(context, operator, *arguments, **_):
        decisions.append(keep(operator, arguments, shape))
        return CheckpointPolicy.MUST_SAVE if decisions[-1] else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    trace = StepTrace(block, torch.optim.SGD(block.parameters()), torch.device("cpu"))
    trace.batch = [x, *rotation]
    with trace:
        y = checkpoint(block, x, rotation, use_reentrant=False, context_fn=context)
    held = trace.timeline()[-1]["activations"] - y.nbytes - sum(tensor.nbytes for tensor in rotation)
    with _MatmulCounter() as counter:
        y.square().mean().backward()
    return {"saved": held // x[..., 0].numel(), "computed": counter.counted, "decisions": decisions}


def the_labs(operator, arguments, shape):
    return operator in [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, *ATTENTION_OPERATORS]


def all_but_down(operator, arguments, shape):
    return the_labs(operator, arguments, shape) and not (
        operator is torch.ops.aten.mm.default and arguments[0].shape[-1] == shape.intermediate_size
    )


def judge_keep(keep) -> str:
    for what, shape in SHAPES.items():
        result, best, labs = (_selective(policy, shape) for policy in (keep, all_but_down, the_labs))
        if all(unanswered(one) for one in result["decisions"]):
            return "not answered yet"
        about = f"{what}: {result['saved']:,} bytes per token are saved for backward"
        for which, count in result["computed"].items():
            if more := count - best["computed"][which]:
                return f"not quite: {about}, and backward recomputes {which}, {more} times"
        if result["saved"] == labs["saved"]:
            return f"not quite: {about}, as with the lab's policy: which result is not needed for any gradient, directly or indirectly?"
        if result["saved"] > best["saved"]:
            return (
                f"not quite: {about}; {best['saved']:,} are enough: save only results that are expensive to recompute"
            )
    return "right"


SHAPES = {  # in the first, no two tensors of a block have the same size
    "eight heads, one of keys and values": GPTShape(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=8, num_key_value_heads=1, intermediate_size=100
    ),
    "the preset tiny": GPTShape(
        num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
    ),
    "as many heads of keys as of queries": GPTShape(
        num_hidden_layers=1, hidden_size=48, num_attention_heads=4, num_key_value_heads=4, intermediate_size=80
    ),
}


EXERCISES = {
    "08.0": Do(
        title="as few blocks as the budget asks for",
        level=2,
        minutes=18,
        judge=judge_prepare,
        hint="A recomputed block still saves its input, so each one frees kept - given bytes: how many do you need for the excess?\n"
        "Which ones? The peak is at the start of backward, which needs the last block's tensors at once.\n"
        "The division stops being right once another moment becomes the peak: what does most say about an excess above it?",
        solution='''
from functools import partial
from math import ceil

from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def prepare(model, mesh, excess, kept, given, most):
    """Recompute as few blocks as lower the peak by excess bytes, then shard."""
    # Each block saves kept - given, until another moment is the highest. That moment limits all choices to `most`.
    if excess > most:
        raise ValueError(f"recomputation saves {most:,} bytes at most, not {excess:,}")
    # The first ones: the last block's saved tensors are needed at the peak, recomputed or not.
    for block in model.blocks[: ceil(excess / (kept - given))]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
''',
    ),
    "08.1": Do(
        title="a quarter of the bytes",
        level=3,
        minutes=18,
        judge=judge_int8_gather,
        hint="int8 goes from -127 to 127: divide by a scale that takes the largest element there, and round. unpack needs\n"
        "the scale again. Whose? Each rank has its own rows: gather the scales, too, one for each row. A row may be zero.",
        solution='''
import torch
from labkit.teaching.exercises.int8_gather import PackedGather


class Int8Gather(PackedGather):
    """A weight that is gathered as int8, with one fp32 scale for each row."""

    @staticmethod
    def pack(shard):
        # The scales are gathered with their rows: no rank has to know another's maximum. clamp: a row of zeros
        scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        return (shard / scales).round().to(torch.int8), scales

    @staticmethod
    def unpack(numbers, scales):
        return numbers * scales
''',
    ),
    "08.2": Do(
        title="operations with frozen weights",
        level=2,
        minutes=12,
        judge=judge_operations,
        hint="Go through the matrices from first to last, and keep track of one thing: does the input need a gradient?\n"
        "The data need none; behind the first trained matrix, everything does. Which of the three matmuls of a matrix\n"
        "run: forward, gradient of the input, gradient of the weight? Which blocks does backward never reach?",
        solution='''
def operations(blocks, tokens, recompute):
    """Return the floating-point operations of a forward and a backward; blocks: [[(elements, trained), …], …]."""
    total, needs_gradient = 0, False  # whether the input of what comes next needs a gradient: the data need none
    for block in blocks:
        forward = sum(2 * elements * tokens for elements, _ in block)
        total += forward
        for elements, trained in block:
            total += 2 * elements * tokens * (needs_gradient + trained)  # for the input, and for the weight
            needs_gradient = needs_gradient or trained
        if recompute and needs_gradient:  # backward never reaches a frozen block below the first trained matrix
            total += forward
    return total
''',
    ),
    "08.3": Do(
        title="a better selective policy",
        level=3,
        minutes=12,
        judge=judge_keep,
        hint="Which matmul's result is only added to something, and nothing later in the block needs the sum?\n"
        "Recognize it by its input: for a matmul, arguments[0].shape[-1] is the number of columns of the input.",
        solution='''
import torch
from labkit.training.models import ATTENTION_OPERATORS


def keep(operator, arguments, shape):
    """Return whether to save the operator's result instead of recomputing it in backward."""
    if operator is torch.ops.aten.mm.default:
        # down is the matmul with input of size intermediate_size. Its result is only added to the residual stream, and
        # nothing that backward needs comes after it.
        return arguments[0].shape[-1] != shape.intermediate_size
    return operator in ATTENTION_OPERATORS
''',
    ),
}
