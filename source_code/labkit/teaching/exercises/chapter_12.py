# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 12, speed."""

import torch
from planner.models.shapes import GPTShape
from torch.distributed.fsdp import fully_shard

from labkit.measuring.trace import CATEGORIES
from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.teaching.exercises.slow_step import slow_step, work_of
from labkit.training import models

MICRO, LESS = 4, 1.5  # of 12.1: micro-batches per step, and the required reduction of operations
SHAPE = GPTShape(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=256,
)
TOKENS = 32  # in a sequence

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

GROWN = {  # {category that has grown at the peak: the likely mistake}, in 12.1
    "activations": "more activations wait for backward: do you run several micro-batches at once?",
    "reduce-scatter": "unsharded gradients wait for a later reduction, instead of one shard per rank",
    "all-gather": "parameters stay gathered, but could be freed",
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


# 12.2: who is late. Milliseconds; each rank's clock is off by a constant.


def _world(arrivals, transfer, offsets, noticed=()):
    """Return what each rank's trace shows of the same collectives: [[(begin, end), …], …].

    Args:
        arrivals: [[when each rank calls], …] for each collective.
        transfer: how long a collective takes once the last rank has called it.
        offsets: what each rank's clock shows at time 0.
        noticed: {(collective, rank): how much later than the others this rank notices the end}.
    """
    noticed = dict(noticed)
    traces = []
    for rank, offset in enumerate(offsets):
        ends = [max(calls) + transfer + noticed.get((number, rank), 0) for number, calls in enumerate(arrivals)]
        traces.append([(calls[rank] + offset, end + offset) for calls, end in zip(arrivals, ends, strict=True)])
    return traces


ARRIVALS = [[0, 6], [20, 29], [40, 45], [60, 68], [80, 83]]  # rank 1 is always last
IN_TURN = [[0, 5, 2], [30, 30, 34], [66, 60, 61], [90, 91, 97], [120, 128, 121]]
WORLDS = [  # (what it is, arrivals, offsets, ends noticed late)
    ("two ranks on one clock, rank 1 is last", ARRIVALS, (0, 0), {}),
    ("three ranks on one clock, each is last at some time", IN_TURN, (0, 0, 0), {}),
    ("rank 1's clock is 3.6 s ahead", ARRIVALS, (0, 3600), {}),
    ("three clocks", IN_TURN, (500, -7, 12_000), {}),
    ("two clocks, and rank 0 notices one end 50 ms late", ARRIVALS, (0, 3600), {(2, 0): 50}),
]


def judge_waits(waits) -> str:
    for what, arrivals, offsets, noticed in WORLDS:
        traces = _world(arrivals, 4, offsets, noticed)
        result = waits([list(trace) for trace in traces])
        if unanswered(result):
            return "not answered yet"
        right = [sum(max(calls) - calls[rank] for calls in arrivals) for rank in range(len(offsets))]
        if len(result) != len(right):
            return f"not quite: {len(result)} numbers; there are {len(right)} ranks"
        if any(not abs(got - wanted) <= 1e-6 for got, wanted in zip(result, right, strict=True)):
            shown = ", ".join(f"{got:g}" for got in result)
            wanted = ", ".join(f"{time:g}" for time in right)
            why = _why_waits(result, arrivals, traces, offsets, noticed)
            return f"not quite: {what}: {shown} ms; the ranks waited {wanted} ms{why}"
    return "right"


def _why_waits(result, arrivals, traces, offsets, noticed) -> str:
    def is_near(other):
        return all(abs(got - each) <= 1e-6 for got, each in zip(result, other, strict=True))

    if is_near([sum(end - begin for begin, end in trace) for trace in traces]):
        return "; that is all their time in collectives: the transfer begins when the last rank has called"
    if is_near([sum(calls[rank] - min(calls) for calls in arrivals) for rank in range(len(offsets))]):
        return "; that is how late each rank comes: who comes first waits"
    if noticed:
        return "; one end is an outlier: estimate the clock's offset from all ends, robustly"
    if len(set(offsets)) > 1:
        return "; the clocks differ: a collective ends on all ranks at the same time, so its ends show by how much"
    return ""


# 12.3: which batch. Milliseconds and MiB.

COSTS = {  # of a small model on one rank
    "once": 20,
    "per_micro_batch": 30,
    "per_sequence": 12,
    "persistent": 400,
    "saved": 100,
    "saved_recomputed": 20,
    "recompute_factor": 4 / 3,
}
PLANS = [  # (what it is, sequences, room, costs that differ)
    ("much room", 16, 4000, {}),
    ("little room", 16, 900, {}),
    ("little room, costly micro-batches", 16, 900, {"per_micro_batch": 90}),
    ("little room, cheap micro-batches", 16, 900, {"per_micro_batch": 2}),
    ("a number of sequences with few divisors", 15, 850, {"per_micro_batch": 60}),
    ("room for recomputation only", 8, 470, {}),
    ("no room", 8, 410, {}),
]


def cost_of(batch, micro_batches, recompute, costs) -> tuple[float, float]:
    """Return (milliseconds per optimizer step, MiB at the peak) of one choice."""
    factor = costs["recompute_factor"] if recompute else 1
    saved = costs["saved_recomputed" if recompute else "saved"]
    time = costs["once"] + micro_batches * (costs["per_micro_batch"] + factor * batch * costs["per_sequence"])
    return time, costs["persistent"] + batch * saved


def _best(sequences, room, costs):
    """Return the fastest choice that fits: (batch, micro-batches, recompute), or None."""
    choices = [
        (batch, sequences // batch, recompute)
        for batch in range(1, sequences + 1)
        if sequences % batch == 0
        for recompute in (False, True)
    ]
    fitting = [choice for choice in choices if cost_of(*choice, costs)[1] <= room]
    return min(fitting, key=lambda choice: cost_of(*choice, costs)[0], default=None)


def judge_fastest(fastest) -> str:
    answers = [fastest(sequences, room, dict(COSTS | other)) for _, sequences, room, other in PLANS]
    if all(unanswered(answer) for answer in answers):
        return "not answered yet"
    for (what, sequences, room, other), answer in zip(PLANS, answers, strict=True):
        if difference := _fastest_differs(answer, sequences, room, COSTS | other):
            return f"not quite: {what} ({sequences} sequences, {room} MiB): {difference}"
    return "right"


def _fastest_differs(answer, sequences, room, costs) -> str | None:
    best = _best(sequences, room, costs)
    if best is None or answer is None:
        if answer == best:
            return None
        return f"{answer} is returned, but no choice fits" if best is None else f"None is returned, but {best} fits"
    if not isinstance(answer, tuple) or len(answer) != 3:
        return f"{answer!r} is not a tuple (batch, micro-batches, recompute)"
    batch, micro_batches, _ = answer
    if batch * micro_batches != sequences:
        return f"{micro_batches} micro-batches of {batch} are {batch * micro_batches} sequences"
    (mine, memory), (least, _) = cost_of(*answer, costs), cost_of(*best, costs)
    if memory > room:
        return f"{answer} needs {memory:g} MiB at its peak"
    if mine > least + 1e-9:
        return f"{answer} fits and takes {mine:.0f} ms; {best} fits, too, and takes {least:.0f} ms"
    return None


EXERCISES = {
    "12.0": Do(
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
    "12.1": Do(
        title="the same step, 1.5 × fewer operations",
        level=2,
        minutes=15,
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
    "12.2": Do(
        title="who is late",
        level=3,
        minutes=20,
        judge=judge_waits,
        hint="First put all clocks on rank 0's: what is the difference of the ends of one collective, and which average of these\n"
        "differences does one odd end not move? Then, for each collective: who called it last?",
        solution="""
import statistics

def waits(ranks):
    # A collective ends everywhere at the same time: the median difference of its ends is the difference of the clocks.
    shifts = [
        statistics.median(end - first for (_, end), (_, first) in zip(trace, ranks[0])) for trace in ranks
    ]
    calls = [[begin - shift for begin, _ in trace] for trace, shift in zip(ranks, shifts)]
    last = [max(of_ranks) for of_ranks in zip(*calls)]  # the transfer cannot begin before
    return [sum(end - begin for begin, end in zip(of_rank, last)) for of_rank in calls]
""",
    ),
    "12.3": Do(
        title="which batch, and recompute?",
        level=2,
        minutes=10,
        judge=judge_fastest,
        hint="There are few choices: every batch that divides the sequences, with and without recomputation. Compute the peak\n"
        "and the time of each, drop what does not fit, and take the fastest. Recomputation lengthens the part per sequence only.",
        solution="""
def fastest(sequences, room, costs):
    best = None
    for batch in range(1, sequences + 1):
        for recompute in (False, True):
            saved = costs["saved_recomputed" if recompute else "saved"]
            if sequences % batch or costs["persistent"] + batch * saved > room:
                continue
            factor = costs["recompute_factor"] if recompute else 1
            micro_batches = sequences // batch
            time = costs["once"] + micro_batches * (costs["per_micro_batch"] + factor * batch * costs["per_sequence"])
            if best is None or time < best[0]:
                best = time, (batch, micro_batches, recompute)
    return best and best[1]
""",
    ),
}
