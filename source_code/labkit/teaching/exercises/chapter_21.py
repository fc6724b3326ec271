# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 21, claims on trial."""

import math

from labkit.teaching.claims import CONTRADICTED, HOLDS, NEVER, UNKNOWN, WHEN, timing, traffic
from labkit.teaching.exercises import Do, unanswered

NAN = float("nan")
# (values, lowest, highest, what the condition says of each): the verdict, and what a wrong one has overlooked
TRIALS = [
    ([1.0, 1.2], 0.9, 1.5, [True, True], HOLDS, "every value is in the range"),
    ([2.0, 1.6], 0.9, 1.5, [False, False], NEVER, "no value is in the range"),
    ([1.0, 2.0], 0.9, 1.5, [True, False], WHEN, "the condition says in which case the value is in the range"),
    ([1.0, 2.0], 0.9, 1.5, [True, True], CONTRADICTED, "the condition promises a case that is not in the range"),
    ([1.0, 2.0], 0.9, 1.5, [False, False], CONTRADICTED, "the condition excludes a case that is in the range"),
    ([1.0, 2.0, 1.4], 0.9, 1.5, [True, False, None], WHEN, "None says nothing, so nothing contradicts it"),
    ([1.0, NAN], 0.9, 1.5, [True, False], UNKNOWN, "NaN proves nothing"),
    ([NAN, NAN], 0.9, 1.5, [False, False], UNKNOWN, "NaN proves nothing"),
    ([1.0, 1.5], 1.0, 1.5, [True, True], HOLDS, "the ends of the range belong to it"),
]


def judge_judge(judge) -> str:
    for values, lowest, highest, stated, expected, why in TRIALS:
        found = judge(list(values), lowest, highest, list(stated))
        if unanswered(found):
            return "not answered yet"
        if found != expected:
            return f"not quite: {values} in [{lowest}, {highest}], condition {stated}: {found!r}, but {why}"
    return "right"


BANDWIDTHS = (25, 60, 110)  # GB/s per GPU


def judge_fewest_tokens(fewest_tokens) -> str:
    for gigabytes in BANDWIDTHS:
        found = fewest_tokens(gigabytes)
        if unanswered(found):
            return "not answered yet"
        if not (isinstance(found, (int, float)) and math.isfinite(found) and found >= 1):
            return f"not quite: for {gigabytes} GB/s it returns {found!r}, which is no number of tokens"
        found = max(64, round(found / 64) * 64)
        enough = timing.needed(found + 128) <= 1.02 * gigabytes
        fewer = found <= 256 or timing.needed(found - 128) >= 0.98 * gigabytes
        if not enough:
            return f"not quite: with {found:,} tokens, {gigabytes} GB/s leave more than a tenth of the step exposed"
        if not fewer:
            return f"not quite: with {gigabytes} GB/s, fewer than {found:,} tokens are enough"
    return "right"


MORE = 1.001  # a ratio above this is more, and not rounding


def judge_from_when(from_when) -> str:
    for precision in ("fp32", "bf16"):
        for reshard in ("true", "false"):
            found = from_when(precision, reshard)
            if unanswered(found):
                return "not answered yet"
            expected = next(k for k in range(1, 9) if traffic.over_ddp(precision, reshard, k) > MORE)
            if found != expected:
                about = f"in {precision}, reshard_after_forward={reshard.capitalize()}"
                return f"not quite: {about}, you say {found!r}; {_hint_about(found, expected)}"
    return "right"


def _hint_about(found, expected) -> str:
    if isinstance(found, int) and found < expected:
        return "with so few, FSDP sends at most what DDP sends. How many bytes does a gathered element have?"
    return "FSDP sends more with fewer already. How often does a micro-batch gather?"


EXERCISES = {
    "21.0": Do(
        title="a verdict from evidence",
        level=2,
        minutes=10,
        judge=judge_judge,
        hint="First: in which cases is the value in the range? Write lowest <= value <= highest. NaN fails both comparisons,\n"
        "so look for it before that: it is the only number that differs from itself.\n"
        "All, none, or some. Only of some do you need the condition: it must agree in each case of which it says something.",
        solution="""
def judge(values, lowest, highest, stated):
    if any(value != value for value in values):  # only NaN differs from itself
        return "no verdict"
    found = [lowest <= value <= highest for value in values]
    if all(found):
        return "holds"
    if not any(found):
        return "does not hold"
    agrees = all(says is None or says == true for says, true in zip(stated, found))
    return "holds when" if agrees else "contradicts its condition"
""",
    ),
    "21.1": Do(
        title="how many tokens hide FSDP",
        level=3,
        minutes=12,
        judge=judge_fewest_tokens,
        hint="exposed_share(tokens, gigabytes) falls as tokens grow. Bisect: keep a number that is too few, and one that is\n"
        "enough. More than 64 tokens too many, or too few, is wrong.",
        solution="""
from labkit.teaching.claims.sweeps import plan, step

def fewest_tokens(gigabytes):
    few, enough = 64, 2**16
    while enough - few > 16:
        tokens = (few + enough) // 2
        times = step(plan(tokens=tokens, ranks=64), gigabytes, node=1)
        if times["exposed"] <= 0.1 * times["overlapped"]:
            enough = tokens
        else:
            few = tokens
    return enough
""",
    ),
    "21.2": Do(
        title="from when FSDP sends more",
        level=2,
        minutes=8,
        judge=judge_from_when,
        hint="Per parameter, with rings: DDP all-reduces 4 bytes, which is two passes. FSDP reduce-scatters 4 bytes once, and\n"
        "gathers 4 bytes or 2, once or twice in each micro-batch. (Root and head are gathered once; can that decide?)",
        solution="""
def from_when(precision, reshard):
    gathered = (4 if precision == "fp32" else 2) * (2 if reshard == "true" else 1)  # bytes per micro-batch
    micro_batches = 1
    while gathered * micro_batches + 4 <= 2 * 4:  # one reduce-scatter, against an all-reduce
        micro_batches += 1
    return micro_batches
""",
    ),
}
