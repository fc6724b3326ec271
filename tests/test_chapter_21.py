# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 21: its exercises judge fairly, nothing is judged before all votes are cast, and the score is right."""

import re

import pytest
from answers import altered
from labkit.teaching.claims import HOLDS, NEVER, WHEN, Case, Claim, ballot, on_trial, traffic
from labkit.teaching.exercises import check
from labkit.teaching.plots import claims as figures

from notebooks import FOLDER, code_cells, read, run_broken

NOTEBOOK = read(FOLDER / "21_claims_on_trial.ipynb")
THREE = {  # one of each verdict
    "all": Claim("a", "blog", "01", "", (0, 1), "why", lambda x: 0.5, ({"x": 1},), how="calculated"),
    "some": Claim("b", "blog", "02", "", (0, 1), "x is small", lambda x: x, ({"x": 1}, {"x": 2}), lambda x: x < 2),
    "none": Claim("c", "blog", "03", "", (0, 1), "why", lambda x: 9, ({"x": 1},)),
}
RIGHT = {"all": "holds", "some": "when: x is near 1", "none": "never"}


def test_the_notebook_asks_for_a_vote_on_every_claim_in_the_order_of_the_ballot():
    names = {}
    for cell in code_cells(NOTEBOOK):
        if cell.source.startswith("votes "):
            exec(cell.source, names)
    assert list(names["votes"]) == list(on_trial()) and set(names["votes"].values()) == {None}
    printed = "".join(output.get("text", "") for cell in code_cells(NOTEBOOK) for output in cell.outputs)
    assert all(claim.quote in printed for claim in on_trial().values())


def test_nothing_is_judged_before_all_votes_are_cast(capsys):
    for vote in (None, "perhaps", ..., True, "when", "when: "):
        assert ballot.judge(THREE, RIGHT | {"some": vote}, {}) is None
        printed = capsys.readouterr().out
        assert "1 of 3 votes are missing, and nothing is judged before: some." in printed
        assert not any(word in printed for word in (WHEN, NEVER, "score", "x is small"))


def test_figures_wait_for_the_votes(capsys):
    figures.boundaries(on_trial(), None, ("1/N",), "", "")
    assert "when all votes are cast" in capsys.readouterr().out


def test_the_score_and_the_chapters_to_revisit(capsys):
    cases = ballot.judge(THREE, RIGHT, {})
    printed = capsys.readouterr().out
    assert "Your score: the right word for 3 of 3; “when” throughout has 1." in printed and "Revisit" not in printed
    assert cases["some"] == [Case({"x": 1}, 1), Case({"x": 2}, 2)]
    assert "right   “a” holds: why. [: 0 to 1; 1 calculated]" in printed
    assert (
        "right   “b” holds when x is small. [: 0 to 1; 2 predicted]\n        Your condition: x is near 1\n" in printed
    )
    assert "right   “c” does not hold: why. [: 0 to 1; 1 predicted]" in printed
    ballot.judge(THREE, {"all": "never", "some": "holds", "none": "skip"}, {})
    printed = capsys.readouterr().out
    assert "the right word for 0 of 2; “when” throughout has 1." in printed
    assert re.findall(r"Revisit chapter (\d\d) for (\w+)", printed) == [("01", "all"), ("02", "some")]
    assert "skipped “c” does not hold" in printed and "wrong   “a” holds: why" in printed


def test_every_panel_draws_its_claim(monkeypatch):
    monkeypatch.setattr(figures, "show", lambda figure: drawn.append(figure))
    drawn, claims = [], on_trial()
    keys = tuple(figures.PANELS)
    for some in (keys[:6], keys[6:12], keys[12:]):
        figures.boundaries(claims, {key: claims[key].cases() for key in some}, some, "title", "under")
    assert [len(figure.axes) for figure in drawn] == [6, 6, 6]
    for figure in drawn:
        assert all(axes.lines and axes.get_ylabel() for axes in figure.axes)


JUDGES = {
    "nan": (altered("21.0", ("value != value", "value is None")), "NaN proves nothing"),
    "ends": (altered("21.0", ("lowest <= value <= highest", "lowest < value < highest")), "the ends of the range"),
    "None": (altered("21.0", ("says is None or says == true", "bool(says) == true")), "None says nothing"),
    "careless": (
        altered("21.0", ('if agrees else "contradicts its condition"', "if agrees is not None else 0")),
        "promises",
    ),
    "one-sided": (altered("21.0", ("says == true", "true or not says")), "excludes a case"),
    "never": (altered("21.0", ('return "does not hold"', 'return "holds when"')), "no value is in the range"),
}


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_is_told_what_it_overlooks(name, capsys):
    function, said = JUDGES[name]
    check("21.0", function)
    assert said in capsys.readouterr().out


TOKENS = {
    "too many": (lambda gigabytes: 2**16, "fewer than 65,536 tokens are enough"),
    "too few": (lambda gigabytes: 64, "leave more than a tenth of the step exposed"),
    "no number": (lambda gigabytes: float("nan"), "which is no number of tokens"),
    "half hidden": (altered("21.1", ("<= 0.1 *", "<= 0.5 *")), "leave more than a tenth"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_number_of_tokens_is_told_its_mistake(name, capsys):
    function, said = TOKENS[name]
    check("21.1", function)
    assert said in capsys.readouterr().out


COUNTS = {
    "always fp32": (altered("21.2", ('(4 if precision == "fp32" else 2)', "4")), "in bf16, reshard_after_forward=True"),
    "gathered once": (altered("21.2", ('(2 if reshard == "true" else 1)', "1")), "in fp32, reshard_after_forward=True"),
    "one pass": (altered("21.2", ("2 * 4:", "4:")), "in fp32, reshard_after_forward=False"),
    "as many": (altered("21.2", ("<= 2 * 4", "< 2 * 4")), "you say 1; with so few"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_of_micro_batches_is_told_its_mistake(name, capsys):
    function, said = COUNTS[name]
    check("21.2", function)
    assert said in capsys.readouterr().out


@pytest.mark.breaks
def test_runs_that_the_planner_is_wrong_about_are_noticed():
    """They train on shorter sequences than their records say. One process peaks in the optimizer's step, whatever its tokens."""
    broken = {"gpt_fsdp.train(config, me)": "gpt_fsdp.train(replace(config, seq_len=32), me)"}
    broken |= {"if count == ranks]": "if count == ranks < 4]", "for ranks in (1, 2, 4)": "for ranks in (1, 2)"}
    broken |= {"plots.memory(": "(lambda *_: None)("}
    lines = run_broken("21", broken, only=("c21-01", "c21-02", "c21-15b", "c21-16", "c21-17"))
    assert [line[:4] for line in lines] == ["PASS", "PASS", "FAIL", "PASS"]


@pytest.mark.parametrize("vote", ["holds", "never"])
def test_votes_that_are_all_the_same_are_scored_by_the_verdicts(vote, capsys):
    """On the planned sweeps alone, without a run."""
    planned = {key: claim for key, claim in traffic.CLAIMS.items() if claim.settings}
    ballot.judge(planned, dict.fromkeys(planned, vote), {})
    expected = {"holds": HOLDS, "never": NEVER}[vote]
    right = sum(claim.verdict(claim.cases()) == expected for claim in planned.values())
    assert f"the right word for {right} of {len(planned)};" in capsys.readouterr().out
