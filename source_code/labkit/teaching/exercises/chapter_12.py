"""Exercises of chapter 12, speed."""

import torch
import torch.nn.functional as F
from planner.models.shapes import GPTShape
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from labkit.measuring.trace import CATEGORIES, StepTrace, peak
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import models

MICRO, LESS = 4, 1.5  # of 12.0: micro-batches per step, and the required reduction of operations
SHAPE = GPTShape(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=256,
)
TOKENS = 32  # in a sequence

ONE, EIGHT, RANKS = 1.28, 0.20, 8  # seconds per step for the same work, and on how many ranks
SMALL, LARGE = (2, 0.030), (8, 0.060)  # sequences per step, seconds
EACH = (LARGE[1] - SMALL[1]) / (LARGE[0] - SMALL[0])
FIXED = SMALL[1] - EACH * SMALL[0]
BATCH, LENGTH = 32, 128

CASES = [  # what it is, communication, compute
    ("one collective, nothing computes", [(0, 4)], []),
    ("a collective that ends after the compute", [(2, 9)], [(0, 3)]),
    ("one collective, fully overlapped by compute", [(2, 4)], [(0, 6)]),
    ("a collective over a gap between two operators", [(1, 9)], [(0, 3), (5, 12)]),
    ("two collectives in flight at the same time", [(0, 4), (2, 6)], []),
    ("a collective inside another one", [(0, 8), (2, 4)], [(6, 10)]),
    ("operators that overlap, as nested ones do in a trace", [(0, 10)], [(1, 7), (2, 4)]),
    ("intervals in no order", [(10, 14), (0, 4)], [(11, 12), (1, 2)]),
    ("intervals that only touch", [(0, 4)], [(4, 8)]),
    ("no communication", [], [(0, 5)]),
]

GROWN = {  # {category that has grown at the peak: the likely mistake}, in 12.0
    "activations": "more activations wait for backward: do you run several micro-batches at once?",
    "reduce-scatter": "unsharded gradients wait for a later reduction, instead of one shard per rank",
    "all-gather": "parameters stay gathered, but could be freed",
}


def slow_step(model, optimizer, batch):
    """Run a step on this rank and return (mean loss, share of tokens predicted correctly) as floats.

    batch: (inputs, targets) of each micro-batch, of shape (sequences, tokens).
    """
    losses, rights = [], []
    for inputs, targets in batch:
        # The log comes first: a forward without backward leaves the root gathered, and after optimizer.step() that copy
        # would be out of date.
        with torch.no_grad():  # for the log
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            guesses = model(inputs).argmax(-1)
            rights.append((guesses == targets).float().mean().item())
        logits = model(inputs).double()  # float64, to be safe
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss / len(batch)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return sum(losses) / len(batch), sum(rights) / len(batch)


class Work(TorchDispatchMode):
    """Count the work that runs in its context on this rank.

    operations: floating-point operations of matmuls and attention. reads: values the host read, each of which
    synchronizes with a GPU. wide: tensors in float64. zeros: tensors filled with zeros.
    """

    def __init__(self):
        super().__init__()
        self.operations = self.reads = self.wide = self.zeros = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor turns this into operators on its local tensor, which arrive here
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name
        if count := flop_registry.get(operator.overloadpacket):
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        self.reads += name == "aten::_local_scalar_dense"
        self.wide += any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(result))
        self.zeros += len(args[0]) if name == "aten::_foreach_zero_" else name == "aten::zero_"
        return result


def work_of(step, model, optimizer, batch, device) -> dict:
    """Run ``step(model, optimizer, batch)`` six times; return its results and the cost of one step on this rank.

    {"returned": […], "forwards", "operations", "reads", "wide", "zeros": of a step; "traffic": {(kind, bytes,
    dimension): how many}, "peak": {category: bytes} at the peak, of a step that was traced}. Collective.
    """
    returned, traced, forwards = [step(model, optimizer, batch)], [], []
    trace, work = StepTrace(model, optimizer, device), Work()
    trace.batch = tree_leaves(batch)
    for _ in range(4):  # the first warms up the tracer; the lowest peak of the others counts, as in the meter
        with trace:
            returned.append(step(model, optimizer, batch))
        traced.append(peak(trace.timeline()))
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with work:
        returned.append(step(model, optimizer, batch))
    hook.remove()
    highest, _ = min(traced[1:], key=lambda snapshot: snapshot[1])
    return {
        "returned": returned,
        "forwards": len(forwards),
        "operations": work.operations,
        "reads": work.reads,
        "wide": work.wide,
        "zeros": work.zeros,
        "traffic": dict(trace.collectives),
        "peak": {category: highest[category] for category in CATEGORIES},
    }


def _two_works(me, step):
    """Run the learner's step and the slow one on a small GPT under FSDP2, from equal weights; return the work of both."""
    drawn = torch.randint(SHAPE.vocab_size, (MICRO, 2, TOKENS + 1), generator=torch.Generator().manual_seed(me.rank))
    batch = [(part[:, :-1], part[:, 1:]) for part in drawn]
    works = []
    for this in (step, slow_step):
        torch.manual_seed(1)
        model = models.GPT(SHAPE)
        for unit in (*model.blocks, model):
            fully_shard(unit)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, foreach=True
        )  # AdamW would read one value per parameter
        works.append(work_of(this, model, optimizer, batch, me.device))
        if unanswered(works[0]["returned"][0]):
            return None
    return works


def judge_step(step) -> str:
    results = on_ranks(_two_works, step, ranks=2)
    if None in results:
        return "not answered yet"
    for rank, (mine, slow) in enumerate(results):
        if difference := _returns_other(mine["returned"], slow["returned"]) or works_more(mine, slow):
            return f"not quite: rank {rank}: {difference}"
    return "right"


def _returns_other(mine, slow) -> str | None:
    for number, (given, wanted) in enumerate(zip(mine, slow, strict=True), 1):
        for what, got, right in zip(("mean loss", "share guessed right"), given, wanted, strict=True):
            if isinstance(got, torch.Tensor):
                return f"the {what} is returned as a tensor; the slow script returns floats: call .item()"
            if abs(float(got) - right) > 1e-4 * right:
                about = f"the {what} in step {number} is {float(got):.4f}, the slow script's {right:.4f}"
                if abs(float(got) - MICRO * right) < 1e-3 * right:
                    return f"{about}; that is the sum over the micro-batches, not their mean"
                same = "; step 1 is right, so the update differs: does it use the mean, and only this step's gradients?"
                return about + same * (number > 1)
    return None


def works_more(mine, slow) -> str | None:
    fewer, (before, now) = slow["operations"] / mine["operations"], (sum(w["peak"].values()) for w in (slow, mine))
    if fewer < LESS:
        times = f"{mine['forwards']} times a step, with {MICRO} micro-batches"
        return f"{fewer:.2f} × fewer operations; {LESS} × is required. The network runs forward {times}"
    if now > before:
        grown = max(CATEGORIES, key=lambda category: mine["peak"][category] - slow["peak"][category])
        why = GROWN.get(grown, f"what has grown most: {grown}")
        return f"the peak is {now / 1e3:.0f} kB, the slow script's {before / 1e3:.0f}; {why}"
    if mine["reads"] > 2:
        return f"the host reads {mine['reads']} values per step; two are returned. On a GPU, each read waits for the device"
    if mine["wide"]:
        return f"{mine['wide']} results per step are in float64; the returned values do not need it"
    if mine["zeros"] >= slow["zeros"]:
        return "the gradients are filled with zeros, then added to; without set_to_none=False they are freed"
    return None


def _ticks(intervals) -> set:
    """Return the unit ticks that the intervals cover; their bounds are integers."""
    return {tick for begin, end in intervals for tick in range(begin, end)}


def judge_exposed(exposed) -> str:
    for what, communication, compute in CASES:
        result = exposed(list(communication), list(compute))
        if unanswered(result):
            return "not answered yet"
        sent, busy = _ticks(communication), _ticks(compute)
        right = len(sent - busy)
        if abs(result - right) > 1e-9:
            where = f"{what}: communication {communication}, compute {compute}: {result:g}, but {right} are exposed"
            return f"not quite: {where}{_why(result, communication, compute, sent, busy)}"
    return "right"


def _why(result, communication, compute, sent, busy) -> str:
    if result < 0:
        return "; a time cannot be negative: you subtracted an overlap twice"
    if result == len(sent & busy) != len(sent - busy):
        return "; that is the hidden part"
    if result == len(sent):
        return "; that is all communication, hidden or not"
    if result == sum(end - begin for begin, end in communication) - len(sent & busy):
        return "; count time with two collectives in flight only once"
    if result == max(0, len(sent) - len(busy)):
        return "; compute hides nothing when no communication is in flight"
    return ""


EXERCISES = {
    "12.0": Do(
        title="the same step, 1.5 × fewer operations",
        level=2,
        minutes=12,
        judge=judge_step,
        hint="One forward per micro-batch gives the logits; compute loss and predictions from them. Sum up detached\n"
        "tensors, and read them once, at the end. Delaying the reduction of gradients, or joining micro-batches, is\n"
        "faster, too, but needs more memory.",
        solution="""
import torch
import torch.nn.functional as F

def step(model, optimizer, batch):
    loss, right = 0.0, 0.0
    for inputs, targets in batch:
        logits = model(inputs)  # once: enough for both training and the log
        part = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batch)
        right += (logits.detach().argmax(-1) == targets).float().mean() / len(batch)
        part.backward()
        loss += part.detach()  # still a tensor: the host does not wait
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), right.item()
""",
    ),
    "12.1": Predict(
        title="strong-scaling efficiency",
        level=1,
        minutes=3,
        answer=100 * ONE / (RANKS * EIGHT),
        unit="%",
        slips={
            "that is the speedup in percent; efficiency divides it by the ranks": 100 * ONE / EIGHT,
            "that is the speedup, 6.4 times; efficiency divides it by the ranks, in percent": ONE / EIGHT,
            "that is the share lost": 100 * (1 - ONE / (RANKS * EIGHT)),
            "that is the time on eight ranks over the time on one: the share of time left": 100 * EIGHT / ONE,
            "upside down: eight ranks' seconds together over one rank's": 100 * RANKS * EIGHT / ONE,
        },
        hint="Eight ranks work for 0.20 s each. How many rank-seconds is that, and how many does one rank need?",
        solution="""
# One rank needs 1.28 rank-seconds. Eight ranks spend 8 × 0.20 = 1.6 on the same work.
answer = 100 * 1.28 / (8 * 0.20)
""",
    ),
    "12.2": Predict(
        title="throughput at a larger batch",
        level=2,
        minutes=5,
        answer=BATCH * LENGTH / (FIXED + EACH * BATCH),
        unit="tokens/s",
        slips={
            "that is batch 8's rate, as if the step grew fourfold; its fixed part stays": LENGTH * LARGE[0] / LARGE[1],
            "you scaled the 30 ms of batch 2: its fixed part does not grow": BATCH * LENGTH / (SMALL[1] * 16),
            "that is the ceiling 1/b: the fixed part is still there at batch 32": LENGTH / EACH,
            "that counts sequences; each has 128 tokens": BATCH / (FIXED + EACH * BATCH),
            "that is the step in seconds; divide the tokens by it": FIXED + EACH * BATCH,
        },
        hint="t = a + b · batch has two unknowns, and you have two points. Find b, then a, then t at batch 32.",
        solution="""
# From batch 2 to 8 the step grows by 30 ms: b = 5 ms per sequence. Then a = 30 − 2 × 5 = 20 ms.
b = (0.060 - 0.030) / (8 - 2)
a = 0.030 - 2 * b
answer = 32 * 128 / (a + b * 32)
""",
    ),
    "12.3": Do(
        title="exposed communication",
        level=2,
        minutes=12,
        judge=judge_exposed,
        hint="Write an inner function that returns the length of a union of intervals: sort them, and count each from the end\n"
        "of the previous ones. Then: exposed = length(communication and compute together) − length(compute).",
        solution='''
def exposed(communication, compute):
    def length(intervals):
        """Return the length of the union: overlaps count once."""
        total, reached = 0, float("-inf")
        for begin, end in sorted(intervals):
            total += max(0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    # The time that communication adds to the time with compute
    return length([*communication, *compute]) - length(compute)
''',
    ),
}
