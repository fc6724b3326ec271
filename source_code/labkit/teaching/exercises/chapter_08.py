"""Exercises of chapter 08, precision and recomputation."""

import torch
from planner import predict
from planner.shapes import GPTShape

from labkit.running.lab import Lab
from labkit.teaching.exercises import Do, Predict, unanswered
from labkit.training.models import Block, rotary

MIB = 2**20


def _plan(batch, recompute="full"):
    return Lab(ranks=4, device="cpu").plan("gpt_fsdp.py", recompute=recompute, batch_size=batch)


def _peak(batch, recompute="full"):
    return predict.total(_plan(batch, recompute).peak()[1]) / MIB


def _only_doubled(*categories):
    """The peak at 8 sequences, these categories' terms doubled."""
    terms = _plan(8).peak()[1].items()
    return sum(size * (2 if category in categories else 1) for (category, _), size in terms) / MIB


# What autograd keeps of a real block, for the two functions


def _kept(function, x, rotation, but) -> int:
    """Bytes of the storages that autograd saves, without those of ``but``."""
    own = {tensor.untyped_storage().data_ptr() for tensor in but}
    found = {}

    def keep(tensor):
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x, rotation)
    return sum(tensor.nbytes for address, tensor in found.items() if address not in own)


def _inputs(shape, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, shape.width, generator=generator).to(dtype).requires_grad_()
    return x, rotary(length, shape.width // shape.heads, x)


SMALL = GPTShape(layers=4, width=16, heads=2, kv_heads=1, hidden=40)


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
    return {"what came in": x.grad} | {name: p.grad for name, p in blocks.named_parameters()}


def judge_recompute_every(recompute_every) -> str:
    x, rotation = _inputs(SMALL, 6)
    whole = 2 * 6 * 4  # bytes a number of a token takes, for all tokens
    given = whole * SMALL.width  # what recomputation keeps of a block
    for count, n in ((4, 2), (4, 1), (5, 3), (4, 4)):
        plain, changed = _blocks(count), _blocks(count)
        returned = recompute_every(changed, n)
        where = f"{count} blocks, n = {n}"
        each = [_kept(block, x, rotation, [*block.parameters(), *rotation, x]) for block in plain]
        left = [_kept(block, x, rotation, [*block.parameters(), *rotation, x]) for block in changed]
        if returned is None and left == each and [type(b) for b in changed] == [type(b) for b in plain]:
            return "not answered yet" if (count, n) == (4, 2) else f"not quite: {where}: no block is recomputed"
        for number in range(count):
            recomputed, wanted = left[number] < each[number], number % n == 0
            if recomputed and not wanted:
                return f"not quite: {where}: block {number} is recomputed; only 0, n, 2n, … should be"
            if wanted and not recomputed:
                kind = "keeps all its tensors" if left[number] == each[number] else "keeps more than before"
                return f"not quite: {where}: block {number} {kind}; it should be recomputed"
        for (name, one), other in zip(
            _gradients(plain, x, rotation).items(), _gradients(changed, x, rotation).values(), strict=True
        ):
            if other is None:
                return f"not quite: {where}: {name} gets no gradient"
            if not torch.equal(one, other):
                return f"not quite: {where}: the gradient of {name} differs"
        held = _kept(lambda y, r, b=changed: _run(b, y, r), x, rotation, [*changed.parameters(), *rotation])
        right = sum(given if number % n == 0 else each[number] + given for number in range(count))
        if held > right:
            return f"not quite: {where}: {held:,} bytes are kept, where {right:,} would do"
    return "right"


def reference_kept(shape, itemsize) -> int:
    """Bytes a token that autograd saves in a real block."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    block = Block(shape).to(dtype)
    x, rotation = _inputs(shape, 6, dtype)
    return _kept(block, x, rotation, [*block.parameters(), *rotation]) // (2 * 6)


SHAPES = {  # first one in which no two mistakes come to the same number
    "eight heads, one of keys and values": GPTShape(layers=1, width=64, heads=8, kv_heads=1, hidden=100),
    "the preset tiny": GPTShape(layers=4, width=128, heads=4, kv_heads=2, hidden=384),
    "as many heads of keys as of queries": GPTShape(layers=1, width=48, heads=4, kv_heads=4, hidden=80),
}


def judge_kept(kept_per_token) -> str:
    for what, shape in SHAPES.items():
        for itemsize in (4, 2):
            given = kept_per_token(shape, itemsize)
            if unanswered(given):
                return "not answered yet"
            right = reference_kept(shape, itemsize)
            if given != right:
                why = _why(shape, itemsize, given - right)
                return f"not quite: {what}, {itemsize} bytes a number: {given:,} where autograd keeps {right:,}{why}"
    return "right"


def _why(shape, itemsize, gap) -> str:
    """What would explain a gap, in bytes a token."""
    d, h, heads = shape.width, shape.hidden, shape.heads
    kv = d // heads * shape.kv_heads
    causes = {
        2 * (itemsize - 4) * (2 * d + 1) + (itemsize - 4) * heads: "in bf16 the norms and the log-sum-exp stay in fp32",
        2 * (itemsize - 4) * (2 * d + 1): "in bf16 a norm keeps its input, 1/rms and the normalized input in fp32",
        (itemsize - 4) * heads: "the log-sum-exp is in fp32, whatever the format",
        -4 * heads: "attention keeps a log-sum-exp, too: a number a head",
        -itemsize * heads: "attention keeps a log-sum-exp, too: a number a head",
        -8: "each of the two norms keeps 1/rms",
        -2 * itemsize: "each of the two norms keeps 1/rms",
        itemsize * 2 * (d - kv): "keys and values are narrower than queries where heads share them",
        -itemsize * h: "between gate and down four tensors are kept",
        itemsize * d: "one tensor of the width too many: the results of output and down are not kept",
        2 * itemsize * d: "the results of output and down are not kept",
    }
    cause = causes.get(gap) if gap else None
    return f"; {cause}" if cause else ""


EXERCISES = {
    "08.1": Predict(
        title="peak with twice the batch",
        level=2,
        minutes=6,
        answer=_peak(16),
        unit="MiB",
        slips={
            "that is the peak of batch 8: activations and their gradients double": _peak(8),
            "that is twice the peak: the model's part does not grow with the batch": 2 * _peak(8),
            "the gradients of activations (temporary) double too": _only_doubled("activations"),
            "that is without recomputation": _peak(16, "none"),
            "the activations double too, not only their gradients (temporary)": _only_doubled("temporary"),
        },
        hint="Activations, and the gradients of activations (temporary), double. Everything else belongs to the model.",
        solution="""
# The terms with a token in them double; parameters, optimizer state, gathered and packed buffers stay. On paper that
# is the backward of block 2. The plan finds block 3 higher by a hair: it holds one input more, and less of the model.
from labkit.running.lab import Lab
from planner import predict

where, terms = Lab(ranks=4, device="cpu").plan("gpt_fsdp.py", recompute="full", batch_size=16).peak()
answer = predict.total(terms) / 2**20
""",
        tolerance=0.004,
    ),
    "08.2": Do(
        title="every n-th block recomputed",
        level=2,
        minutes=8,
        judge=judge_recompute_every,
        hint="block.forward = … replaces a block's forward in place: functools.partial(checkpoint, block.forward,\n"
        "use_reentrant=False) calls the old one through checkpoint. blocks[::n] is every n-th block.",
        solution='''
from functools import partial

from torch.utils.checkpoint import checkpoint

def recompute_every(blocks, n):
    """Have every n-th block, the first included, compute again in backward instead of keeping its tensors."""
    for number, block in enumerate(blocks):
        if number % n == 0:
            # partial binds this block's own forward: a lambda would see the loop's last one
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
''',
    ),
    "08.3": Do(
        title="what any block keeps of a token",
        level=3,
        minutes=12,
        judge=judge_kept,
        hint="The chapter's block_bytes, with shape's fields instead of its variables. The width of keys and values is\n"
        "width // heads * kv_heads. In fp32 whatever the format: in each norm input, 1/rms and normalized; log-sum-exp.",
        solution='''
def kept_per_token(shape, itemsize):
    """Bytes a token that a block keeps for backward on the CPU."""
    d, h = shape.width, shape.hidden
    kv = d // shape.heads * shape.kv_heads
    in_fp32 = 2 * (d + 1 + d) + shape.heads  # norms: input, 1/rms, normalized; attention: log-sum-exp
    in_format = 2 * d + (d + kv + kv) + d + 4 * h  # norms' results; query, key, value; attention; gate to product
    return 4 * in_fp32 + itemsize * in_format
''',
    ),
}
