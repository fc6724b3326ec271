# SPDX-License-Identifier: BSD-3-Clause
"""docs/planner.md shows what plan.py answers."""

import pytest
from proofs import planner_page

PAGE = planner_page.PAGE.read_text()


@pytest.mark.parametrize("question", list(planner_page.QUESTIONS), ids=lambda question: question.rstrip("?"))
def test_the_page_has_the_planners_answer(question):
    section = PAGE.partition(f"## {question}\n\n")[2].partition("\n## ")[0].strip()
    assert section == planner_page.answered(*planner_page.QUESTIONS[question]), "run: python -m proofs.planner_page"


def test_the_page_has_every_question_in_order():
    assert [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")] == [
        *planner_page.QUESTIONS
    ]
    assert PAGE.startswith(planner_page.TOP)


def test_a_line_that_the_planner_does_not_print_is_missed():
    with pytest.raises(ValueError, match="no line"):
        planner_page.chosen("fits in 3 GiB\n", ["tight .*"])
