"""The exercises: ``check("05.1", 12.3)`` judges an answer, ``hint("05.1")`` helps, ``solution("05.1")`` shows one.

Each chapter's exercises are in a file of their own, chapter_05.py: a dict {"05.1": Predict(…), "05.2": Do(…)}.
The one in the middle of a chapter, whose answer the cells after it use, has the number 0: ``yours_or_ours("05.0", f)``.
An answer of None or ``...``, and a function that returns one of them, mean "not answered yet".
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

    answer: computed, never typed by hand. unit: what the learner's number counts ("MiB", "bytes", …).
    slips: {what went wrong, in words: the number it leads to}, at least two plausible ones.
    tolerance: the share of the answer by which a right one may be off. solution: code that sets ``answer``.
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

    def judge(self, given) -> str:
        try:
            given = float(given)
        except (TypeError, ValueError):
            return f"a number is wanted, in {self.unit}; {given!r} is none"
        if self._near(given, self.answer):
            return "right"
        for slip, number in self.slips.items():
            if self._near(given, number):
                return f"not quite: {slip}"
        factor = given / self.answer if self.answer else float("inf")
        if factor <= 0:
            return f"not quite: {given:g} {self.unit} cannot be; look at the hint"
        far = f"{factor:.2g} times too much" if factor > 1 else f"{1 / factor:.2g} times too little"
        return f"not quite: {far}; look at the hint"

    def _near(self, given, number) -> bool:
        return abs(given - number) <= self.tolerance * abs(number)


@dataclass(frozen=True)
class Do:
    """An exercise whose answer is a function.

    judge: takes the learner's function; returns "right", "not answered yet", or the first difference in words.
    An exception that the function raises is told as its last line. solution: code that defines ``answer``.
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
    """[what ``function(me, *answer)`` returned on rank 0, on rank 1, …], for judges. timeout: seconds.

    The ranks are real processes of this machine, also where the labs are sent to Slurm: an answer comes in seconds.
    spawn: as for ``notebook_ranks.on_ranks``.
    """
    here = launch.Cluster(launcher="local")
    return notebook_ranks.on_ranks(function, *answer, ranks=ranks, cluster=here, timeout=timeout, spawn=spawn)


_RIGHT = {}  # {number: the answer that check has last found right}


def check(number: str, answer):
    """Print whether the answer to an exercise is right, and if it is not, what is wrong with it."""
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
    """The learner's function, if ``check`` has found it right; else the course's, which is said."""
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
        return f"a function is wanted; {answer!r} is none"
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
    """Print a solution: code with a reason."""
    print(_find(number).solution.strip())
