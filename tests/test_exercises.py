# SPDX-License-Identifier: BSD-3-Clause
"""Every exercise of every chapter: its solution is right, no answer is no failure, each slip is told its cause.

What plausible wrong functions are told is in the chapters' own tests.
"""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from labkit.running import launch
from labkit.teaching import exercises
from labkit.teaching.exercises import Do, Predict, check

NOTEBOOKS = launch.SOURCE.parent / "notebooks"
CHAPTERS = sorted(path.stem for path in Path(exercises.__file__).parent.glob("chapter_*.py"))
EXERCISES = {
    number: exercise
    for chapter in CHAPTERS
    for number, exercise in import_module(f"labkit.teaching.exercises.{chapter}").EXERCISES.items()
}
ASKED = dict(  # {number of an exercise: the name that its cell gives to check}
    found
    for path in NOTEBOOKS.glob("*.ipynb")
    for cell in json.loads(path.read_text())["cells"]
    for found in re.findall(r'check\("([\d.]+)", (\w+)\)', "".join(cell["source"]))
)
SLIPS = [(n, slip) for n, exercise in EXERCISES.items() if isinstance(exercise, Predict) for slip in exercise.slips]


def said(number, answer, capsys) -> str:
    check(number, answer)
    return capsys.readouterr().out


@pytest.mark.parametrize("number", EXERCISES)
def test_solution_is_right(number, capsys):
    """Put into its cell as it is: it gives the answer the name that the cell asks for."""
    names = {}
    exec(EXERCISES[number].solution, names)
    assert ": right" in said(number, names[ASKED[number]], capsys)


@pytest.mark.parametrize("number", EXERCISES)
def test_no_answer_is_no_failure(number, capsys):
    stub = [lambda *_, **__: None] if isinstance(EXERCISES[number], Do) else []
    for nothing in (None, ..., *stub):
        assert said(number, nothing, capsys).endswith(": not answered yet\n")


@pytest.mark.parametrize(("number", "slip"), SLIPS)
def test_slip_is_told_its_cause(number, slip, capsys):
    assert slip in said(number, EXERCISES[number].slips[slip], capsys)


def test_what_follows_a_wrong_answer_is_computed_with_the_courses(capsys):
    def to_owner(parameter, owner, me): ...

    assert exercises.yours_or_ours("13.2", to_owner) is not to_owner
    assert "with the course's solution of 13.2" in capsys.readouterr().out


def test_what_follows_a_right_answer_is_computed_with_it(capsys):
    names = {}
    exec(EXERCISES["13.2"].solution, names)
    said("13.2", names["to_owner"], capsys)
    assert exercises.yours_or_ours("13.2", names["to_owner"]) is names["to_owner"]
    assert capsys.readouterr().out == ""


def test_what_a_rank_raises_is_told(capsys):
    def to_owner(parameter, owner, me):
        raise ValueError("no owner here")

    assert "a rank raises ValueError: no owner here" in said("13.2", to_owner, capsys)
