"""Exercises of chapter 12, speed."""

from labkit.teaching.exercises import Do, Predict, unanswered

ONE, EIGHT, RANKS = 1.28, 0.20, 8  # seconds a step for the same work, and on how many ranks
SMALL, LARGE = (2, 0.030), (8, 0.060)  # sequences a step, seconds
EACH = (LARGE[1] - SMALL[1]) / (LARGE[0] - SMALL[0])
FIXED = SMALL[1] - EACH * SMALL[0]
BATCH, LENGTH = 32, 128

CASES = [  # what it is, communication, compute
    ("one collective, nothing computes", [(0, 4)], []),
    ("a collective that ends after the compute", [(2, 9)], [(0, 3)]),
    ("one collective, wholly behind compute", [(2, 4)], [(0, 6)]),
    ("a collective over a gap between two operators", [(1, 9)], [(0, 3), (5, 12)]),
    ("two collectives on their way at once", [(0, 4), (2, 6)], []),
    ("a collective inside another one", [(0, 8), (2, 4)], [(6, 10)]),
    ("operators that overlap, as nested ones do in a trace", [(0, 10)], [(1, 7), (2, 4)]),
    ("intervals in no order", [(10, 14), (0, 4)], [(11, 12), (1, 2)]),
    ("intervals that only touch", [(0, 4)], [(4, 8)]),
    ("no communication", [], [(0, 5)]),
]


def _ticks(intervals) -> set:
    """The unit ticks that the intervals, of whole numbers, cover."""
    return {tick for begin, end in intervals for tick in range(begin, end)}


def judge_exposed(exposed) -> str:
    for what, communication, compute in CASES:
        given = exposed(list(communication), list(compute))
        if unanswered(given):
            return "not answered yet"
        sent, busy = _ticks(communication), _ticks(compute)
        right = len(sent - busy)
        if abs(given - right) > 1e-9:
            where = f"{what}: communication {communication}, compute {compute}: {given:g}, but {right} are exposed"
            return f"not quite: {where}{_why(given, communication, compute, sent, busy)}"
    return "right"


def _why(given, communication, compute, sent, busy) -> str:
    if given < 0:
        return "; a time cannot be negative: what is covered twice was taken off twice"
    if given == len(sent & busy) != len(sent - busy):
        return "; that is what is hidden"
    if given == len(sent):
        return "; that is all of it, hidden or not"
    if given == sum(end - begin for begin, end in communication) - len(sent & busy):
        return "; a moment in which two collectives are on their way is one moment"
    if given == max(0, len(sent) - len(busy)):
        return "; compute that runs when nothing is on its way hides nothing"
    return ""


EXERCISES = {
    "12.1": Predict(
        title="strong-scaling efficiency",
        level=1,
        minutes=3,
        answer=100 * ONE / (RANKS * EIGHT),
        unit="%",
        slips={
            "that is the speed-up in percent; efficiency asks for it a rank": 100 * ONE / EIGHT,
            "that is the speed-up, 6.4 times; efficiency divides it by the ranks": ONE / EIGHT,
            "that is what is lost": 100 * (1 - ONE / (RANKS * EIGHT)),
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
# From batch 2 to 8 the step grows by 30 ms: b = 5 ms a sequence. Then a = 30 − 2 × 5 = 20 ms.
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
        hint="Write an inner function that returns the length of a union of intervals: sort them, and go on from where\n"
        "the last one ended. Then: exposed = length(communication and compute together) − length(compute).",
        solution='''
def exposed(communication, compute):
    def length(intervals):
        """Of the union: what two intervals both cover counts once."""
        total, reached = 0, float("-inf")
        for begin, end in sorted(intervals):
            total += max(0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    # What communication adds to the moments in which something computes
    return length([*communication, *compute]) - length(compute)
''',
    ),
}
