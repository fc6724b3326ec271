# SPDX-License-Identifier: BSD-3-Clause
"""Check answers to exercises with ``check("05.1", 12.3)``; print help with ``hint("05.1")`` and ``solution("05.1")``.

Each chapter has a file, such as chapter_05.py, with a dict {"05.1": Predict(…), "05.2": Do(…)}. The exercise in the
middle of a chapter has the number 0, and later cells use its answer: ``yours_or_ours("05.0", f)``. An answer of None or
``...``, or a function that returns one of them, counts as "not answered yet".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from labkit import UserError
from labkit.running import launch, notebook_ranks

DOTS = {1: "●○○", 2: "●●○", 3: "●●●"}


@dataclass(frozen=True)
class Predict:
    """An exercise whose answer is a number.

    answer: computed, never typed by hand. unit: unit of the answer ("MiB", "bytes", …).
    slips: {description of a mistake: the number it leads to}, at least two plausible ones.
    tolerance: accepted relative error of a right answer. solution: code that sets ``answer``.
    """

    title: str
    level: int
    minutes: int
    answer: float
    unit: str
    slips: dict[str, float]
    hint: str
    solution: str
    tolerance: float = 0.01

    def judge(self, value) -> str:
        try:
            value = float(value)
        except (TypeError, ValueError):
            return f"the answer must be a number, in {self.unit}; {value!r} is not one"
        if self._near(value, self.answer):
            return "right"
        for slip, number in self.slips.items():
            if self._near(value, number):
                return f"not quite: {slip}"
        factor = value / self.answer if self.answer else float("inf")
        if factor <= 0:
            return f"not quite: {value:g} {self.unit} is not possible; look at the hint"
        far = f"too large by a factor of {factor:.2g}" if factor > 1 else f"too small by a factor of {1 / factor:.2g}"
        return f"not quite: {far}; look at the hint"

    def _near(self, value, number) -> bool:
        return abs(value - number) <= self.tolerance * abs(number)


@dataclass(frozen=True)
class Do:
    """An exercise whose answer is a function.

    judge: takes the learner's function; returns "right", "not answered yet", or a description of the first difference.
    If the function raises, the last line of the error is reported. solution: code that defines the function.
    """

    title: str
    level: int
    minutes: int
    judge: Callable[[Callable], str]
    hint: str
    solution: str


def _find(number: str):
    chapters = [path.stem for path in sorted(Path(__file__).parent.glob("chapter_*.py"))]
    chapter = f"chapter_{number[:2]}"
    known = import_module(f"labkit.teaching.exercises.{chapter}").EXERCISES if chapter in chapters else {}
    if number not in known:
        raise UserError(f"there is no exercise {number!r}: there are {', '.join(known) or ', '.join(chapters)}")
    return known[number]


def on_ranks(function, *answer, ranks: int, timeout: float = 60, spawn: bool = False) -> list:
    """Run ``function(me, *answer)`` on local ranks and return the list of their results, for checking answers.

    The ranks are processes on this machine even if the labs run under Slurm, so that a check takes seconds.

    Args:
        function: what to run; ``answer``: its arguments, usually the learner's function.
        ranks: number of ranks.
        timeout: seconds.
        spawn: as in ``notebook_ranks.on_ranks``.
    """
    here = launch.Cluster(launcher="local")
    return notebook_ranks.on_ranks(function, *answer, ranks=ranks, cluster=here, timeout=timeout, spawn=spawn)


_RIGHT = {}  # {number: the last answer that check accepted}


def check(number: str, answer):
    """Print whether the answer to an exercise is right, and if not, what is wrong with it."""
    exercise = _find(number)
    if unanswered(answer):
        verdict = "not answered yet"
    elif isinstance(exercise, Do):
        verdict = _judged(exercise, answer)
    else:
        verdict = exercise.judge(answer)
    if verdict == "right":
        _RIGHT[number] = answer
    print(f"{number} {DOTS[exercise.level]} {exercise.title}: {verdict}")


def yours_or_ours(number: str, answer):
    """Return the learner's function if ``check`` accepted it; otherwise print a note and return the course's solution."""
    if answer is not None and _RIGHT.get(number) is answer:
        return answer
    print(f"what follows is computed with the course's solution of {number}")
    names = {"__name__": "__main__"}  # as if a cell had defined it, so that it travels to the ranks
    exec(_find(number).solution, names)
    return names[answer.__name__]


def unanswered(value) -> bool:
    return value is None or value is ...


def _judged(exercise: Do, answer) -> str:
    if not callable(answer):
        return f"the answer must be a function; {answer!r} is not one"
    try:
        return exercise.judge(answer)
    except launch.RunFailed as error:
        if "not finished" in str(error):
            return "not quite: it hangs. Does every rank call the same collectives?"
        raised = [line for line in str(error).splitlines() if re.match(r"[A-Z][\w.]*: ", line)]
        return f"not quite: a rank raises {(raised or str(error).strip().splitlines())[-1]}"
    except Exception as error:  # the learner's function may do anything
        return (
            f"not quite: it raises {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )


def hint(number: str):
    """Print a hint."""
    print(_find(number).hint)


def solution(number: str):
    """Print a solution: code, with comments that explain it."""
    print(_find(number).solution.strip())
