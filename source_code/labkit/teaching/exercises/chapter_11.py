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
    """The peak of 8B on 8 ranks, these categories quartered."""
    terms = _terms("llama3-8b", 8).items()
    return sum(size / (4 if category in categories else 1) for (category, _), size in terms) / GIB


def reference_world(plan_of, room, most=64, needs=lambda plan: predict.total(plan.peak()[1])):
    """What 11.0 asks for. needs: of a plan, in bytes; the wrong answers have others."""
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
SLIPS = {  # what was taken for the need of a plan
    "holds what stays between steps, but not the peak": lambda plan: predict.total(plan.persistent()),
    "holds the peak of the first step, when there is no optimizer state yet": lambda plan: predict.total(
        plan.peak(True)[1]
    ),
}


def _counted(plan_of, asked: list, most=64):
    """plan_of, which notes what it is asked for, and ends a search that does not end by itself."""

    def plan(ranks):
        if not 1 <= ranks <= most:
            raise ValueError(
                f"plan_of was asked for {ranks} ranks, and most is {most}: for some models no number is enough"
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
    if all(unanswered(given) for given in answers):
        if asked:
            return f"not quite: yours looks at {len(asked)} worlds and finds none; is a return None inside the loop?"
        return "not answered yet"
    for (what, plan_of, room), given in zip(cases, answers, strict=True):
        right = reference_world(plan_of, room)
        if given != right:
            return f"not quite: {what}, {room / GIB:.1f} GiB: {_difference(plan_of, room, given, right)}"
    return "right"


def _room(plan_of, gib) -> float:
    return gib * GIB if gib else predict.total(plan_of(64).peak()[1])


def _difference(plan_of, room, given, right) -> str:
    if unanswered(given):
        return f"{right} ranks are enough, and yours finds none"
    if right is None:
        return f"no world of 64 ranks or fewer fits, for activations are not shared; yours says {given}"
    for slip, needs in SLIPS.items():
        if given == reference_world(plan_of, room, needs=needs):
            return f"a world of {given} {slip}"
    if not isinstance(given, int) or not 1 <= given <= 64:
        return f"{given!r} is no number of ranks from 1 to 64"
    peak = predict.total(plan_of(given).peak()[1])
    if peak > room:
        return f"yours says {given} ranks, and the peak is {peak / GIB:.1f} GiB there"
    powers = "; not only powers of two are numbers" if given & (given - 1) == 0 else ""
    return f"yours says {given} ranks, and they fit, but so do {right}{powers}"


def _loss(vocabulary, tensors=3, itemsize=4, tokens=8192):
    return tensors * itemsize * tokens * vocabulary / GIB


EXERCISES = {
    "11.0": Do(
        title="the smallest world that fits",
        level=2,
        minutes=15,
        judge=judge_world,
        hint="predict.total(plan_of(ranks).peak()[1]) is the peak of a world in bytes. A loop over the ranks, from 1 to most, and a "
        "return inside it; what happens after the loop answers for a model that no world holds.",
        solution="""
# One rank after the other, from below: the first that fits is the least. What belongs to the batch is not shared, so the
# loop must end, and None is an answer.
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
            "that quarters everything, but activations, the loss and a gathered unit are as large as before": _peak(
                "llama3-8b", 8
            )
            / 4,
            "nothing has changed in it: thirty-two ranks share parameters and optimizer state": _peak("llama3-8b", 8),
            "that is 16 ranks; or only the optimizer state is shared by thirty-two, but the parameters are, too": _quartered(
                "optimizer state"
            ),
            "Adam's two moments are shared as well, not only the parameters": _quartered("parameters"),
            "gathered parameters are whole on every rank, however many there are": _quartered(
                "parameters", "optimizer state", "all-gather"
            ),
        },
        hint="Go through the terms that --explain printed. Which of them says how many elements *this rank's part* has, and which says "
        "how many elements its batch has? Only the former are quartered.",
        solution="""
# Parameters and Adam's two moments, 3 × 4 bytes per parameter, are shared by four times as many ranks. The batch's tensors,
# the loss and what is gathered stay as they are: 27.05 GiB less three quarters of 11.22 GiB.
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
            "that is one tensor; at the highest moment there are three of that size": _loss(32_000, tensors=1),
            "that is two tensors; log-softmax, its gradient and the gradient of its input are three": _loss(
                32_000, tensors=2
            ),
            "the loss is computed in fp32: four bytes per number": _loss(32_000, itemsize=2),
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
