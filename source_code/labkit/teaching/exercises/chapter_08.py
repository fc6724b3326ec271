"""Exercises of chapter 08, precision and recomputation."""

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
    return {"what came in": x.grad} | {name: p.grad for name, p in blocks.named_parameters()}


def judge_recompute_every(recompute_every) -> str:
    x, rotation = _inputs(SMALL, 6)
    whole = 2 * 6 * 4  # bytes a number of a token takes, for all tokens
    given = whole * SMALL.hidden_size  # what recomputation keeps of a block
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


# As few blocks as bring the peak under a budget, on real ranks

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


def _step(me, prepare, *given) -> dict:
    """One step of a small model that ``prepare`` has changed: its peak in bytes, gradients, which blocks ran twice."""
    calls, forward = Counter(), Block.forward
    Block.forward = lambda block, *inputs: calls.update([block]) or forward(block, *inputs)
    torch.manual_seed(4)
    model = GPT(STACK)
    blocks = list(model.blocks)
    prepare(model, init_device_mesh("cpu", (me.world_size,)), *given)
    optimizer = torch.optim.SGD(model.parameters())
    trace = StepTrace(model, optimizer, me.device)
    tokens = torch.randint(STACK.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(me.rank))
    peaks = []
    for _ in range(3):  # the first makes the tracer acquainted; of the others the lower counts, as in every record
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
            for name, p in model.named_parameters()  # also where PyTorch's checkpoint_wrapper was used
        },
        "recomputed": [number for number, block in enumerate(blocks) if calls[block] > 1],
        "units": [isinstance(block, FSDPModule) for block in model.blocks] + [isinstance(model, FSDPModule)],
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


def _budgets(me, prepare) -> tuple:
    """What one step says with nothing recomputed, and one under each budget: (plain, [(budget, step), …])."""
    x, rotation = _inputs(STACK, LENGTH)
    block = Block(STACK)
    kept = _kept(block, x, rotation, [*block.parameters(), *rotation]) * SEQUENCES // len(x)
    given = SEQUENCES * LENGTH * STACK.hidden_size * 4
    plain = _step(me, _plainly_sharded)
    # Where it is several, so little more than one fewer brings that whoever forgets what comes in has one too few
    excesses = [round((count - (0.5 if count == 1 else 0.96)) * (kept - given)) for count in WANTED]
    return plain, [(plain["peak"] - excess, _step(me, prepare, excess, kept, given)) for excess in excesses]


def judge_prepare(prepare) -> str:
    found = on_ranks(_budgets, prepare, ranks=2)
    plain, steps = found[0]
    for wanted, (budget, step) in zip(WANTED, steps, strict=True):
        if not step["sharded"] and not step["recomputed"]:
            return "not answered yet"
        if not all(step["units"]):
            return "not quite: each block is to be a unit, and then the model: fully_shard(block), fully_shard(model)"
        if message := _over(step, budget, wanted, plain["peak"]):
            return f"not quite: {message}"
    for rank, (plain, steps) in enumerate(found):
        for name, right in plain["gradients"].items():
            if any(step["gradients"].get(name) is None for _, step in steps):
                return f"not quite: {name} gets no gradient"
            if not all(torch.equal(step["gradients"][name], right) for _, step in steps):
                return f"not quite: on rank {rank} the gradient of {name} differs"
    return "right"


def _over(step, budget, wanted, before) -> str:
    """What is wrong with the blocks that were recomputed, or nothing."""
    chosen, last = step["recomputed"], STACK.num_hidden_layers - 1
    about = f"{before:,} bytes without, budget {budget:,}: with blocks {chosen or 'none'} recomputed"
    if step["peak"] > budget:
        why = "more of them are needed"
        if last in chosen and len(chosen) >= wanted:
            why = "backward begins with the last block and wants its tensors at once, so recomputing it saves nothing"
        return f"{about} the peak is {step['peak']:,}; {why}"
    if len(chosen) > wanted:
        return f"{about} the peak is {step['peak']:,}; {wanted} of them would do"
    return ""


# A selective policy that keeps no more than is needed


class _Products(TorchDispatchMode):
    """Counts matrix products and attention, where they are really computed."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            self.counted["a matrix product"] += 1
        if operator in ATTENTION_OPERATORS:
            self.counted["attention"] += 1
        return operator(*args, **kwargs or {})


def _selective(keep, shape) -> dict:
    """A block under the policy ``keep``: bytes kept of a token, what was computed in backward, and the answers."""
    torch.manual_seed(5)
    block = Block(shape)
    x, rotation = _inputs(shape, 6)
    said = []

    def policy(context, operator, *arguments, **_):
        said.append(keep(operator, arguments, shape))
        return CheckpointPolicy.MUST_SAVE if said[-1] else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    trace = StepTrace(block, torch.optim.SGD(block.parameters()), torch.device("cpu"))
    trace.batch = [x, *rotation]
    with trace:
        y = checkpoint(block, x, rotation, use_reentrant=False, context_fn=context)
    held = trace.timeline()[-1]["activations"] - y.nbytes - sum(tensor.nbytes for tensor in rotation)
    with _Products() as products:
        y.square().mean().backward()
    return {"kept": held // x[..., 0].numel(), "computed": products.counted, "said": said}


def the_labs(operator, arguments, shape):
    return operator in [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, *ATTENTION_OPERATORS]


def all_but_down(operator, arguments, shape):
    return the_labs(operator, arguments, shape) and not (
        operator is torch.ops.aten.mm.default and arguments[0].shape[-1] == shape.intermediate_size
    )


def judge_keep(keep) -> str:
    for what, shape in SHAPES.items():
        given, best, labs = (_selective(policy, shape) for policy in (keep, all_but_down, the_labs))
        if all(unanswered(one) for one in given["said"]):
            return "not answered yet"
        about = f"{what}: {given['kept']:,} bytes per token are kept"
        for which, count in given["computed"].items():
            if more := count - best["computed"][which]:
                return f"not quite: {about}, and in backward {which} is computed again, {more} times"
        if given["kept"] == labs["kept"]:
            return f"not quite: {about}, as by the lab's policy: whose result is asked for neither by a gradient nor on the way to one?"
        if given["kept"] > best["kept"]:
            return f"not quite: {about} where {best['kept']:,} would do: keep only what is expensive to compute again"
    return "right"


SHAPES = {  # the first: no two tensors of a block are of one size
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
        hint="A recomputed block keeps what comes in, so one saves kept - given: how many are needed for the excess?\n"
        "Which: the peak is where backward begins. It begins with the last block, and wants that block's tensors at once.",
        solution='''
from functools import partial
from math import ceil

from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def prepare(model, mesh, excess, kept, given):
    """Recompute as few blocks as lower the peak by excess bytes, then shard."""
    # The first ones: what the last block keeps is wanted at the highest moment, recomputed or not.
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
        level=1,
        minutes=3,
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
        title="a better selective policy",
        level=3,
        minutes=12,
        judge=judge_keep,
        hint="Which product's result is only added to something, with nothing after it in the block that needs the sum?\n"
        "You know it by what goes in: arguments[0].shape[-1] of a matrix product is the number of columns of its input.",
        solution='''
import torch
from labkit.training.models import ATTENTION_OPERATORS


def keep(operator, arguments, shape):
    """Whether to keep what the operator returns, instead of computing it again in backward."""
    if operator is torch.ops.aten.mm.default:
        # down is the product that takes hidden numbers in. Its result is only added to the block's last sum, and nothing that
        # backward needs comes after it.
        return arguments[0].shape[-1] != shape.intermediate_size
    return operator in ATTENTION_OPERATORS
''',
    ),
}
