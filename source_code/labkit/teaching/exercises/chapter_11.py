"""Exercises of chapter 11, planning."""

from functools import cache

from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES

from labkit.teaching.exercises import Do, Predict, unanswered

GIB = 2**30


def _terms(size, ranks, batch=1, recompute="full"):
    network = networks.gpt(GPT_SHAPES[size], batch, 8192, recompute)
    strategy = "fsdp2"
    return predict.Plan(network, strategy, ranks, precision="bf16", on_gpu=True).peak()[1]


def _peak(*about) -> float:
    return predict.total(_terms(*about)) / GIB


def _quartered(*categories):
    """Return the peak of 8B on 8 ranks, with these categories divided by 4."""
    terms = _terms("llama3-8b", 8).items()
    return sum(size / (4 if category in categories else 1) for (category, _), size in terms) / GIB


def reference_world(plan_of, room, most=64, needs=lambda plan: predict.total(plan.peak()[1])):
    """Return the smallest world that 11.0 asks for. needs: bytes a plan needs; wrong answers use other functions."""
    return next((ranks for ranks in range(1, most + 1) if needs(plan_of(ranks)) <= room), None)


def _llama(batch, recompute):
    return lambda ranks: predict.Plan(
        networks.gpt(GPT_SHAPES["llama3-8b"], batch, 8192, recompute), "fsdp2", ranks, precision="bf16", on_gpu=True
    )


CASES = [  # (what, plan_of, GiB of room)
    ("8B, one sequence, everything recomputed", _llama(1, "full"), 64.3),
    ("8B, one sequence, everything recomputed", _llama(1, "full"), 18.7),
    ("8B, one sequence, everything recomputed", _llama(1, "full"), 36.0),
    ("8B, one sequence, nothing recomputed", _llama(1, "none"), 50.0),
    ("8B, one sequence, everything recomputed", _llama(1, "full"), 150.0),
    ("8B, one sequence, everything recomputed", _llama(1, "full"), None),  # what 64 ranks need, to the byte
]
SLIPS = {  # bytes mistaken for the need of a plan
    "holds the persistent memory, but not the peak": lambda plan: predict.total(plan.persistent()),
    "holds the peak of the first step, when there is no optimizer state yet": lambda plan: predict.total(
        plan.peak(True)[1]
    ),
}


def _counted(plan_of, asked: list, most=64):
    """Wrap plan_of to record its calls and to stop an endless search."""

    def plan(ranks):
        if not 1 <= ranks <= most:
            raise ValueError(
                f"plan_of was called with {ranks} ranks, but most is {most}: for some models no world is large enough"
            )
        asked.append(ranks)
        return plan_of(ranks)

    return plan


def judge_world(smallest_world) -> str:
    answers, asked = [], []
    cases = [(what, cache(plan_of), room) for what, plan_of, room in CASES]
    cases = [(what, plan_of, _room(plan_of, room)) for what, plan_of, room in cases]
    for _, plan_of, room in cases:
        answers.append(smallest_world(_counted(plan_of, asked), room, most=64))
    if all(unanswered(result) for result in answers):
        if asked:
            return f"not quite: your function tries {len(asked)} worlds and finds none; is there a return None inside the loop?"
        return "not answered yet"
    for (what, plan_of, room), result in zip(cases, answers, strict=True):
        right = reference_world(plan_of, room)
        if result != right:
            return f"not quite: {what}, {room / GIB:.1f} GiB: {_difference(plan_of, room, result, right)}"
    return "right"


def _room(plan_of, gib) -> float:
    return gib * GIB if gib else predict.total(plan_of(64).peak()[1])


def _difference(plan_of, room, result, right) -> str:
    if unanswered(result):
        return f"{right} ranks are enough, but your function finds none"
    if right is None:
        return f"no world of up to 64 ranks fits, because activations are not sharded; yours returns {result}"
    for slip, needs in SLIPS.items():
        if result == reference_world(plan_of, room, needs=needs):
            return f"a world of {result} {slip}"
    if not isinstance(result, int) or not 1 <= result <= 64:
        return f"{result!r} is not a number of ranks from 1 to 64"
    peak = predict.total(plan_of(result).peak()[1])
    if peak > room:
        return f"yours returns {result} ranks, but the peak is {peak / GIB:.1f} GiB there"
    powers = "; try numbers that are not powers of two, too" if result & (result - 1) == 0 else ""
    return f"yours returns {result} ranks, which fit, but so do {right}{powers}"


def _loss(vocabulary, tensors=3, itemsize=4, tokens=8192):
    return tensors * itemsize * tokens * vocabulary / GIB


EXERCISES = {
    "11.0": Do(
        title="the smallest world that fits",
        level=2,
        minutes=15,
        judge=judge_world,
        hint="predict.total(plan_of(ranks).peak()[1]) is the peak of a world in bytes. A loop over the ranks, from 1 to most, and a "
        "return inside it; after the loop, return the answer for a model that fits no world.",
        solution="""
# Try 1, 2, 3, … ranks: the first world that fits is the smallest. The batch's tensors are not sharded, so possibly no
# world fits: the loop must end, and return None.
from planner import predict

def smallest_world(plan_of, room, most=1024):
    for ranks in range(1, most + 1):
        if predict.total(plan_of(ranks).peak()[1]) <= room:
            return ranks
    return None
""",
    ),
    "11.1": Predict(
        title="8B on 32 ranks",
        level=1,
        minutes=5,
        answer=_peak("llama3-8b", 32),
        unit="GiB",
        slips={
            "that divides everything by 4, but activations, the loss and a gathered unit are as large as before": _peak(
                "llama3-8b", 8
            )
            / 4,
            "that has not changed: parameters and optimizer state are sharded over thirty-two ranks now": _peak(
                "llama3-8b", 8
            ),
            "that is 16 ranks; or you sharded only the optimizer state over thirty-two, but not the parameters": _quartered(
                "optimizer state"
            ),
            "Adam's two moments are sharded as well, not only the parameters": _quartered("parameters"),
            "gathered parameters have full size on every rank, regardless of the number of ranks": _quartered(
                "parameters", "optimizer state", "all-gather"
            ),
        },
        hint="Go through the terms that --explain printed. Which of them count elements of *this rank's shard*, and which count "
        "elements of its batch? Only the terms of the shard are divided by 4.",
        solution="""
# Parameters and Adam's two moments, 3 × 4 bytes per parameter, are sharded over four times as many ranks. The batch's
# tensors, the loss and the gathered unit do not change: 27.05 GiB less three quarters of 11.22 GiB.
from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
plan = predict.Plan(networks.gpt(GPT_SHAPES["llama3-8b"], 1, 8192, "full"), "fsdp2", 32, precision="bf16", on_gpu=True)
answer = predict.total(plan.peak()[1]) / 2**30
""",
    ),
    "11.2": Predict(
        title="a smaller vocabulary",
        level=2,
        minutes=10,
        answer=_loss(32_000),
        unit="GiB",
        slips={
            "that is one tensor; at the peak there are three of that size": _loss(32_000, tensors=1),
            "that is two tensors; log-softmax, its gradient and the gradient of its input are three": _loss(
                32_000, tensors=2
            ),
            "the loss is computed in fp32: four bytes per element": _loss(32_000, itemsize=2),
            "that is the vocabulary of Llama 3": _loss(128_256),
            "that is in GB; GiB are 1024³ bytes": _loss(32_000) * GIB / 1e9,
            "the batch is not sharded: each rank has all its 8192 tokens": _loss(32_000) / 8,
        },
        hint="One element for each token and each vocabulary entry, in fp32. How many tensors of that size did --explain show at the peak?",
        solution="""
# A token's row is as long as the vocabulary: 8192 tokens × 32,000 entries × 4 bytes, three times. That is a quarter of
# before: the peak would no longer be in the loss, but in the blocks' backward.
answer = 3 * 8192 * 32_000 * 4 / 2**30
""",
    ),
}
