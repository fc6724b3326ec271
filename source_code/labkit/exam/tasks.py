# SPDX-License-Identifier: BSD-3-Clause
"""Draw the exam's twelve tasks by a seed. The same seed gives the same tasks on every machine, on every day."""

import hashlib
from random import Random

from labkit.exam import choosing, finding, predicting

EDITION = 1  # a part of each draw's seed; any other change of a seed's tasks changes their digest
KINDS = {"predict": range(1, 5), "find the fault": range(5, 9), "choose": range(9, 13)}
DRAWS = {"predict": predicting.draw, "find the fault": finding.draw, "choose": choosing.draw}


def draw(seed: int) -> list:
    """Draw the tasks of a seed, 1 to 12. No task of two consecutive seeds is the same."""
    found = []
    for kind, numbers in KINDS.items():
        found += [DRAWS[kind](number, Random(f"{EDITION}-{seed}-{number}"), seed) for number in numbers]
    return found


def kind_of(number: int) -> str:
    """Return the kind of a task."""
    return next(kind for kind, numbers in KINDS.items() if number in numbers)


def digest(drawn: list) -> str:
    """Return a short digest of tasks: answers have it, too, so that they are judged by the same tasks."""
    return hashlib.sha256("\n".join(map(repr, drawn)).encode()).hexdigest()[:16]
