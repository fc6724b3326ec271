"""Exercises of chapter 11, planning."""

from planner import networks, predict
from planner.shapes import GPT_SHAPES

from labkit.teaching.exercises import Do, Predict, unanswered

GIB = 2**30
WORLDS = [2**n for n in range(11)]


def _terms(size, ranks, batch=1, recompute="full"):
    network = networks.gpt(GPT_SHAPES[size], batch, 8192, recompute)
    strategy = "fsdp2"
    return predict.Plan(network, strategy, ranks, precision="bf16", on_gpu=True).peak()[1]


def _peak(*about) -> float:
    return predict.total(_terms(*about)) / GIB


def _halved(*categories):
    """The peak of 8B on 8 ranks, these categories halved."""
    terms = _terms("llama3-8b", 8).items()
    return sum(size / (2 if category in categories else 1) for (category, _), size in terms) / GIB


def reference_world(size, gib, batch, recompute):
    """What 11.2 asks for."""
    return next((ranks for ranks in WORLDS if _peak(size, ranks, batch, recompute) <= gib), None)


CASES = [
    ("llama3-8b", 80, 1, "full"),
    ("llama3-8b", 24, 1, "full"),
    ("llama3-8b", 80, 1, "none"),
    ("llama3-70b", 80, 1, "full"),
    ("llama3-70b", 80, 1, "none"),
    ("1b", 24, 1, "full"),
    ("llama3-8b", 141, 4, "full"),
]


def _of_state(size, gib):
    """What comes out if what stays from step to step is all that counts."""
    shape = networks.gpt(GPT_SHAPES[size], 1, 8192)
    kept = ((n, predict.total(predict.Plan(shape, "fsdp2", n, precision="bf16").persistent())) for n in WORLDS)
    return next((ranks for ranks, size in kept if size <= gib * GIB), None)


def judge_world(smallest_world) -> str:
    first = smallest_world(*CASES[0])
    if first is ... or (first is None and all(smallest_world(*case) is None for case in CASES)):
        return "not answered yet"
    for case in CASES:
        size, gib, batch, recompute = case
        given, right = smallest_world(*case), reference_world(*case)
        if given == right:
            continue
        where = f"{size} in {gib} GiB, batch {batch}, recompute {recompute}"
        if unanswered(given):
            return f"not quite: {where}: {right} ranks are enough, and yours finds none"
        if right is None:
            return f"not quite: {where}: no world fits, for activations are not shared; yours says {given}"
        if given == _of_state(size, gib):
            return f"not quite: {where}: {given} ranks hold what stays from step to step, but not the peak"
        if given not in WORLDS:
            return f"not quite: {where}: {given!r} is none of 1, 2, 4, … 1024"
        peak = _peak(size, given, batch, recompute)
        fits = "it fits, but so do fewer" if peak <= gib else f"the peak is {peak:.1f} GiB there"
        units = "; GiB are 1024³" if given == _in_decimal(case) else ""
        return f"not quite: {where}: yours says {given} ranks, and {fits}{units}"
    return "right"


def _in_decimal(case):
    """What comes out if gib is taken for a thousand million bytes each."""
    size, gib, batch, recompute = case
    return reference_world(size, gib * 1e9 / GIB, batch, recompute)


def _loss(vocabulary, tensors=3, itemsize=4, tokens=8192):
    return tensors * itemsize * tokens * vocabulary / GIB


EXERCISES = {
    "11.1": Predict(
        title="8B on 16 ranks",
        level=1,
        minutes=5,
        answer=_peak("llama3-8b", 16),
        unit="GiB",
        slips={
            "that halves everything, but activations, the loss and a gathered unit are as large as before": _peak(
                "llama3-8b", 8
            )
            / 2,
            "nothing has changed in it: sixteen ranks share parameters and optimizer state": _peak("llama3-8b", 8),
            "the parameters are shared by sixteen too, not only the optimizer state": _halved("optimizer state"),
            "Adam's two moments are shared as well, not only the parameters": _halved("parameters"),
            "gathered parameters are whole on every rank, however many there are": _halved(
                "parameters", "optimizer state", "all-gather"
            ),
        },
        hint="Go through the terms that --explain printed. Which of them says how many numbers *this rank's part* has, and which says "
        "how many numbers its batch has? Only the former are halved.",
        solution="""
# Parameters and Adam's two moments, 3 × 4 bytes a parameter, are shared by twice as many ranks. The batch's tensors, the loss
# and what is gathered stay as they are: 27.05 GiB less half of 11.22 GiB.
from planner import networks, predict
from planner.shapes import GPT_SHAPES
plan = predict.Plan(networks.gpt(GPT_SHAPES["llama3-8b"], 1, 8192, "full"), "fsdp2", 16, precision="bf16", on_gpu=True)
answer = predict.total(plan.peak()[1]) / 2**30
""",
    ),
    "11.2": Do(
        title="the smallest world that fits",
        level=2,
        minutes=15,
        judge=judge_world,
        hint="A plan needs a blueprint (batch, tokens and recomputation are in it) and a strategy: the function llama() of this notebook "
        "makes one. predict.total(plan.peak()[1]) is its peak in bytes. A loop over the ranks, from the smallest, and a return inside it; "
        "what happens after the loop answers the last sentence of the task.",
        solution="""
# The peak never grows with the ranks, so the first that fits is the smallest; but it does not go to zero either: what belongs
# to the batch stays. That is why the loop must end, and None is an answer.
from planner import networks, predict
from planner.shapes import GPT_SHAPES

def smallest_world(size, gib, batch, recompute):
    network = networks.gpt(GPT_SHAPES[size], batch, 8192, recompute)
    for ranks in [2**n for n in range(11)]:
        plan = predict.Plan(network, "fsdp2", ranks, precision="bf16", on_gpu=True)
        if predict.total(plan.peak()[1]) <= gib * 2**30:
            return ranks
    return None
""",
    ),
    "11.3": Predict(
        title="a smaller vocabulary",
        level=2,
        minutes=10,
        answer=_loss(32_000),
        unit="GiB",
        slips={
            "that is one tensor; at the highest moment there are three of that size": _loss(32_000, tensors=1),
            "that is two tensors; log-softmax, its gradient and the gradient of its input are three": _loss(
                32_000, tensors=2
            ),
            "the loss is computed in fp32: four bytes a number": _loss(32_000, itemsize=2),
            "that is the vocabulary of Llama 3": _loss(128_256),
            "that is in GB; GiB are 1024³ bytes": _loss(32_000) * GIB / 1e9,
            "the batch is not shared: each rank has all its 8192 tokens": _loss(32_000) / 8,
        },
        hint="A number for each token and each word, in fp32. How many tensors of that size did --explain show at the peak?",
        solution="""
# A token's row is as long as the vocabulary: 8192 tokens × 32,000 words × 4 bytes, three times. A quarter of before: the loss
# would no longer be the highest moment, and the peak would be in the blocks' backward.
answer = 3 * 8192 * 32_000 * 4 / 2**30
""",
    ),
}
