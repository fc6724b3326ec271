"""Exercises of chapter 08, precision and activation checkpointing."""

from collections import Counter
from functools import partial

import torch
from planner import predict
from planner.models.shapes import GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from labkit.measuring.trace import StepTrace, local, peak
from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training.models import ATTENTION_OPERATORS, GPT, Block, rotary

MIB = 2**20


def _plan(batch, recompute="full"):
    return Lab(ranks=4, device="cpu").plan("gpt_fsdp.py", recompute=recompute, batch_size=batch)


def _peak(batch, recompute="full"):
    return predict.total(_plan(batch, recompute).peak()[1]) / MIB


def _only_doubled(*categories):
    """Return the peak at 8 sequences, with the terms of these categories doubled."""
    terms = _plan(8).peak()[1].items()
    return sum(size * (2 if category in categories else 1) for (category, _), size in terms) / MIB


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


SMALL = GPTShape(
    num_hidden_layers=4, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=40
)


def _blocks(count):
    torch.manual_seed(2)
    return torch.nn.ModuleList(Block(SMALL) for _ in range(count))


def _run(blocks, x, rotation):
    for block in blocks:
        x = block(x, rotation)
    return x


def _gradients(blocks, x, rotation):
    x.grad = None
    _run(blocks, x, rotation).square().mean().backward()
    return {"the input": x.grad} | {name: p.grad for name, p in blocks.named_parameters()}


def judge_recompute_every(recompute_every) -> str:
    x, rotation = _inputs(SMALL, 6)
    whole = 2 * 6 * 4  # bytes of one element per token, over all tokens
    block_input = whole * SMALL.hidden_size  # bytes saved per recomputed block
    for count, n in ((4, 2), (4, 1), (5, 3), (4, 4)):
        plain, changed = _blocks(count), _blocks(count)
        returned = recompute_every(changed, n)
        where = f"{count} blocks, n = {n}"
        each = [_saved_bytes(block, x, rotation, [*block.parameters(), *rotation, x]) for block in plain]
        left = [_saved_bytes(block, x, rotation, [*block.parameters(), *rotation, x]) for block in changed]
        if returned is None and left == each and [type(b) for b in changed] == [type(b) for b in plain]:
            return "not answered yet" if (count, n) == (4, 2) else f"not quite: {where}: no block is recomputed"
        for number in range(count):
            recomputed, wanted = left[number] < each[number], number % n == 0
            if recomputed and not wanted:
                return f"not quite: {where}: block {number} is recomputed; recompute only 0, n, 2n, …"
            if wanted and not recomputed:
                kind = "saves all its tensors" if left[number] == each[number] else "saves more than before"
                return f"not quite: {where}: block {number} {kind}; it should be recomputed"
        for (name, one), other in zip(
            _gradients(plain, x, rotation).items(), _gradients(changed, x, rotation).values(), strict=True
        ):
            if other is None:
                return f"not quite: {where}: {name} gets no gradient"
            if not torch.equal(one, other):
                return f"not quite: {where}: the gradient of {name} differs"
        held = _saved_bytes(lambda y, r, b=changed: _run(b, y, r), x, rotation, [*changed.parameters(), *rotation])
        right = sum(block_input if number % n == 0 else each[number] + block_input for number in range(count))
        if held > right:
            return f"not quite: {where}: {held:,} bytes are saved for backward; {right:,} are enough"
    return "right"


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


def _budgets(me, prepare) -> tuple:
    """Run one step without recomputation and one under each budget: (plain, [(budget, step), …])."""
    x, rotation = _inputs(STACK, LENGTH)
    block = Block(STACK)
    saved = _saved_bytes(block, x, rotation, [*block.parameters(), *rotation]) * SEQUENCES // len(x)
    block_input = SEQUENCES * LENGTH * STACK.hidden_size * 4
    plain = _step(me, _plainly_sharded)
    # With several blocks, the excess is barely more than one block fewer saves: ignoring the input gives one too few
    excesses = [round((count - (0.5 if count == 1 else 0.96)) * (saved - block_input)) for count in WANTED]
    return plain, [(plain["peak"] - excess, _step(me, prepare, excess, saved, block_input)) for excess in excesses]


def judge_prepare(prepare) -> str:
    results = on_ranks(_budgets, prepare, ranks=2)
    plain, steps = results[0]
    for wanted, (budget, step) in zip(WANTED, steps, strict=True):
        if not step["sharded"] and not step["recomputed"]:
            return "not answered yet"
        if not all(step["units"]):
            return "not quite: make each block a unit, then the model: fully_shard(block), fully_shard(model)"
        if message := _over(step, budget, wanted, plain["peak"]):
            return f"not quite: {message}"
    for rank, (plain, steps) in enumerate(results):
        for name, right in plain["gradients"].items():
            if any(step["gradients"].get(name) is None for _, step in steps):
                return f"not quite: {name} gets no gradient"
            if not all(torch.equal(step["gradients"][name], right) for _, step in steps):
                return f"not quite: on rank {rank} the gradient of {name} differs"
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
        minutes=10,
        judge=judge_prepare,
        hint="A recomputed block still saves its input, so each one frees kept - given bytes: how many do you need for the excess?\n"
        "Which ones? The peak is at the start of backward, which needs the last block's tensors at once.",
        solution='''
from functools import partial
from math import ceil

from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def prepare(model, mesh, excess, kept, given):
    """Recompute as few blocks as lower the peak by excess bytes, then shard."""
    # The first ones: the last block's saved tensors are needed at the peak, recomputed or not.
    for block in model.blocks[: ceil(excess / (kept - given))]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
''',
    ),
    "08.1": Predict(
        title="peak with twice the batch",
        level=2,
        minutes=6,
        answer=_peak(16),
        unit="MiB",
        slips={
            "that is the peak of batch 8: activations and their gradients double": _peak(8),
            "that is twice the peak: the model state does not grow with the batch": 2 * _peak(8),
            "the gradients of activations (temporary) double too": _only_doubled("activations"),
            "that is without recomputation": _peak(16, "none"),
            "the activations double too, not only their gradients (temporary)": _only_doubled("temporary"),
        },
        hint="Activations, and the gradients of activations (temporary), double. Everything else depends only on the model.",
        solution="""
# The terms that depend on tokens double; parameters, optimizer state, gathered and packed buffers do not change. On
# paper, the peak is in the backward of block 2. In the plan, block 3 is slightly higher: one more input is alive, and
# less of the model.
from labkit.running.lab import Lab
from planner import predict

where, terms = Lab(ranks=4, device="cpu").plan("gpt_fsdp.py", recompute="full", batch_size=16).peak()
answer = predict.total(terms) / 2**20
""",
        tolerance=0.004,
    ),
    "08.2": Do(
        title="every n-th block recomputed",
        level=1,
        minutes=3,
        judge=judge_recompute_every,
        hint="block.forward = … replaces a block's forward: functools.partial(checkpoint, block.forward,\n"
        "use_reentrant=False) runs the old one through checkpoint. blocks[::n] is every n-th block.",
        solution='''
from functools import partial

from torch.utils.checkpoint import checkpoint

def recompute_every(blocks, n):
    """Recompute every n-th block in backward, starting with the first, instead of saving its tensors."""
    for number, block in enumerate(blocks):
        if number % n == 0:
            # partial binds this block's forward: a lambda would use the last one of the loop
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
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
