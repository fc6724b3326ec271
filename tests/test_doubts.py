# SPDX-License-Identifier: BSD-3-Clause
"""A verdict that cannot FAIL is found, and no other."""

import contextlib
import json
import linecache
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import doubts
import nbformat
import pytest
from commands import call
from labkit.measuring.differences import largest_difference  # noqa: F401  the cells compare with it
from labkit.running import launch
from provenance import PURE_PARTS

ROOT = Path(__file__).resolve().parents[1]

RECORD = {"peak": 120, "kept": 40, "losses": [2.0, 1.5], "accuracy": 0.5}
OTHER = {"peak": 120, "kept": 40, "losses": [2.0, 1.5], "accuracy": 0.5}
MORE = {"losses": [2.1, 1.6]}
FAILED, APART = [], 0.0
NESTED = [((1.5, 1), (2.5, 0), "refused")]
PARTS = dict.fromkeys("abcdefghijkl", 10)


def measure(what):
    """Stands for a run: what it returns was measured in this execution."""
    return what


def fail():
    """Stands for a run that fails."""
    raise ValueError("a damaged file")


@contextlib.contextmanager
def meter(path):
    """Stands for a meter that writes what it sees to a file."""
    yield
    Path(path).write_text("12")


HEAD = """
import json
record, other, more, failed, apart = map(measure, (RECORD, OTHER, MORE, FAILED, APART))
nested, parts = map(measure, (NESTED, PARTS))
committed = json.loads('{"peak": 120, "losses": [2.0, 1.5]}')
"""


def judged(source: str):
    """Run a cell that ends with a doubted verdict."""
    source = HEAD + source
    name = "<cell of the test>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names = globals() | {"verdict": doubted, "__name__": "__main__"}
    exec(compile(source, name, "exec"), names)


doubted = doubts.doubted


@pytest.mark.parametrize(
    "cell",
    [
        'verdict("peak", record["peak"], predicted=other["peak"], limit=0.01)',
        'verdict("peak", record["peak"], predicted=committed["peak"])',
        'verdict("losses apart", largest_difference(record["losses"], other["losses"]), at_most=1e-6)',
        'verdict("losses differ", largest_difference(record["losses"], more["losses"]), at_least=1e-4)',
        'verdict("losses apart", largest_difference(record["losses"], committed["losses"]), at_most=1e-6)',
        'off = largest_difference(record["losses"], other["losses"])\nverdict("apart", off, at_most=1e-6)',
        'verdict("rows that failed", len(failed), predicted=0)',
        'verdict("apart by", apart, at_most=0.01)',
        'verdict("both fell", int(record["losses"][1] < record["losses"][0]), predicted=1)',
        'verdict("right", record["accuracy"], at_least=0.4)',
        'kept = lambda name: record[name]\nfor name in ("kept",):\n    verdict(name, kept(name), predicted=40)',
        'def judge(one):\n    verdict("peak", one["peak"], predicted=120)\njudge(record)',
        'rows = []\nrows.append(record["peak"])\nverdict("peak", rows[0], predicted=120)',
        'lowest = record["peak"]\nverdict("a peak", lowest, predicted=120)\nlowest = committed["peak"]',
        'runs = {}\ndef run(name):\n    runs[name] = measure(3)\nrun("a")\nverdict("a run", runs["a"], at_least=1)',
        "import os, pathlib, tempfile\nhandle, path = tempfile.mkstemp()\nos.close(handle)\n"
        "with meter(path):\n    pass\nwritten = int(pathlib.Path(path).read_text())\n"
        'verdict("what a meter wrote", written, predicted=12)',
        'tried = {line: eval(line) for line in ("1 + 1",)}\nverdict("lines tried", tried["1 + 1"], predicted=2)',
        'def total(one):\n    return one["peak"]\nverdict("peak", total(record), predicted=120)',
        'verdict("measured in the call", measure(3), at_least=1)',
        # Few changes reach it: what is unpacked keeps its shape, one of many parts is larger than half of the others
        '(_, for_flat), (_, for_each), _ = nested[0]\nverdict("collectives", for_flat, at_least=1)',
        'share = parts["a"] / (sum(parts.values()) - parts["a"])\nverdict("over the rest", share, at_most=0.5)',
        'verdict("NaN on purpose", sum(x != x for x in map(float, measure(["nan"]))), predicted=1)',
        'loud = measure([float("nan")] * 2)\nverdict("NaN on purpose", sum(x != x for x in loud), predicted=2)',
        "try:\n    fail()\nexcept ValueError as error:\n    told = str(error)\n"
        'verdict("it fails with its own words", int("damaged" in told), predicted=1)',
    ],
)
def test_a_verdict_that_may_fail_passes(cell, capsys):
    judged(cell)
    assert capsys.readouterr().out.startswith("PASS")
    assert RECORD == OTHER  # what was changed is as it was


@pytest.mark.parametrize(
    "cell",
    [
        # The rest is what is left over: the sum is the peak by construction
        'rest = lambda: record["peak"] - record["kept"]\n'
        'verdict("the bar", record["kept"] + rest(), predicted=record["peak"])',
        'verdict("times as much", len(record["losses"]), at_least=0)',
        'verdict("a share", min(1, abs(apart)), at_most=1)',
        'verdict("anything", record["peak"], predicted=record["peak"])',
        'peak = record["peak"]\nexpected = record["peak"]\nverdict("twice the same", peak, predicted=expected)',
    ],
)
def test_a_verdict_that_cannot_fail_stops_the_cell(cell):
    with pytest.raises(doubts.CannotFail):
        judged(cell)


@pytest.mark.parametrize(
    "cell",
    [
        'verdict("a number by hand", 3, at_least=1)',
        'verdict("a file", committed["peak"], predicted=120)',
        'verdict("a file against a file", largest_difference(committed["losses"], [2.0, 1.5]), at_most=1e-6)',
        'from planner import predict\nplan = predict.persistent("fsdp2", "unit", 4)\n'
        'verdict("a plan", sum(plan.values()), at_least=1)',
        'def planned(ranks):\n    from planner import predict\n    return predict.persistent("fsdp2", "unit", ranks)\n'
        'few, many = planned(2), planned(4)\nverdict("two plans", sum(many.values()), at_most=sum(few.values()))',
        "from planner import predict\n"
        'record = json.loads(\'{"script": "mnist_fsdp.py"}\')\n'
        "plan_of = lambda record: 12\n"
        'verdict("the plan of a record", plan_of(other), predicted=12)',
        # A name that held a measurement, and now does not
        'worst = record["peak"]\nworst = max(committed["losses"])\nverdict("a file", worst, at_most=9)',
        'unit, others = 4, []\nothers.append(record["peak"])\nsorted(others, key=unit.__mul__)\n'
        'verdict("a file", committed["peak"] * unit, at_least=1)',
        "import statistics\nothers = []\nothers.append(record['peak'])\nstatistics.mean(others)\n"
        'verdict("a file", statistics.mean(committed["losses"]), at_least=1)',
        'found = committed["peak"]\nverdict("a file against a run", found, predicted=record["peak"])',
        'def row():\n    return measure(1)\nrows = [row for row in committed["losses"]]\n'
        'verdict("a file", rows[0], at_least=1)',
        'rows = record["losses"]\ndef read():\n    rows = committed["losses"]\n    return rows\n'
        'verdict("a file", read()[0], at_least=1)',
        'for name in ("peak",):\n    found = record[name]\n'
        'for name in ("peak",):\n    found = committed[name]\n    verdict("a file", found, at_least=1)',
        'kept = record["peak"]\nfor kept in committed["losses"]:\n    verdict("a file", kept, at_most=9)',
        'kept = record["peak"]\nsizes = [kept for kept in committed["losses"]]\nverdict("a file", sizes[0], at_most=9)',
        "import plan\nasked = plan.Config()\nfound = plan.describe(asked, plan.plan_from_options(asked))\n"
        'verdict("an answer of plan.py", found["peak"], at_least=1)',
    ],
)
def test_what_this_execution_has_not_measured_is_no_verdict(cell):
    with pytest.raises(doubts.NotMeasured):
        judged(cell)


@pytest.mark.parametrize(
    "cell",
    [
        # A NaN in the first place is found by all of these, in the second by none
        'verdict("losses apart", max(abs(a - b) for a, b in zip(record["losses"], other["losses"])), at_most=1e-6)',
        'off = max(abs(a - b) for a, b in zip(record["losses"], other["losses"]))\n'
        'worst = 2 * off\nverdict("losses apart", worst, at_most=1e-6)',
        'verdict("losses off", sum(abs(x - 2) > 9 for x in record["losses"]), predicted=0)',
        'verdict("not near", int(abs(record["losses"][0] - 9) < 1), predicted=0)',
        'verdict("accuracies above 1", sum(x > 1 for x in (record["accuracy"],)), predicted=0)',
        # The same NaN, not a number like any other: a set of it has one element
        'verdict("different losses", len(set(measure([1.5, 1.5]))), predicted=1)\n'
        'still = measure([1.5, 1.5, 1.5])\nverdict("different losses", len(set(still)), predicted=1)',
    ],
)
def test_a_verdict_that_a_diverged_run_would_pass_stops_the_cell(cell):
    with pytest.raises(doubts.PassesNaN):
        judged(cell)


def test_what_is_computed_again_for_each_trial_starts_no_run():
    """Calls of these modules are repeated some hundred times; judges of exercises are not among what is judged."""
    paths = [path for part in PURE_PARTS for path in (launch.SOURCE / part.replace(".", "/")).glob("**/*.py")]
    paths += [launch.SOURCE / (part.replace(".", "/") + ".py") for part in PURE_PARTS]
    texts = [path.read_text() for path in paths if path.exists() and "exercises" not in path.parts]
    assert len(texts) > 10
    assert not [text for text in texts if "running import launch" in text or "notebook_ranks" in text]


def test_doubts_can_be_counted_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_LABS_DOUBTS", str(tmp_path / "doubts"))
    judged('verdict("peak", record["peak"], predicted=120)\nverdict("by hand", 3, at_least=1)')
    lines = [json.loads(line) for line in (tmp_path / "doubts").read_text().splitlines()]
    assert [(line["claim"], line["doubt"]) for line in lines] == [("peak", None), ("by hand", "NotMeasured")]


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 0.9])
def test_the_run_of_the_notebooks_in_make_test_doubts(most, tmp_path):
    """A share is never above one."""
    source = f"""
import sys
sys.path.insert(0, {str(launch.SOURCE)!r})
from labkit.teaching import verdict
import time
apart = min(0.5, time.perf_counter())
verdict("a share", min(1, abs(apart)), at_most={most})"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "small.ipynb")
    lines = call("make", "-n", "--no-print-directory", "test", cwd=ROOT).stdout.splitlines()
    (words,) = (shlex.split(line) for line in lines if "nbval" in line)
    assert words[-2:] == ["notebooks", "tests"]
    words[-2:] = ["-p", "tests.conftest", tmp_path / "small.ipynb"]
    asked = call(sys.executable, *words[1:], cwd=ROOT, timeout=90)
    assert asked.returncode == ("CannotFail" in asked.stdout) == (most == 1), asked.stdout


class Item(SimpleNamespace):
    """A test, as pytest describes it to conftest.py."""

    __hash__ = object.__hash__


def test_of_what_repeats_one_another_every_fourth_is_taken_and_of_each_test_the_first():
    def alike(function: str, count: int, *markers: str) -> list:
        marker = {name: name for name in markers}.get
        return [
            Item(path="x", originalname=function, callspec=place, get_closest_marker=marker) for place in range(count)
        ]

    breaks = alike("a", 3, "breaks") + alike("b", 3, "breaks")
    long, once, short = alike("c", 5, "long"), alike("d", 1, "long"), alike("e", 5)
    taken = conftest._one_in(4, breaks + long + once + short)
    assert taken == [breaks[0], breaks[4], long[0], long[4], *once, *short]
    assert conftest._one_in(1, breaks + long) == breaks + long
