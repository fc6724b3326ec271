"""A verdict that cannot FAIL is found, and no other."""

import linecache
import shlex
import sys
from pathlib import Path

import doubts
import nbformat
import pytest
from commands import call
from labkit.running import launch

from notebooks import PATHS

ROOT = Path(__file__).resolve().parents[1]

RECORD = {"peak": 120, "kept": 40, "losses": [2.0, 1.5]}
OTHER = {"peak": 120, "kept": 40, "losses": [2.0, 1.5]}
MORE = {"losses": [2.1, 1.6]}
FAILED, APART = [], 0.0


def judged(source: str):
    """Run a cell that ends with a doubted verdict."""
    name = "<cell of the test>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names = globals() | {"verdict": doubted, "__name__": "__main__"}
    exec(compile(source, name, "exec"), names)


doubted = doubts.doubted


@pytest.mark.parametrize(
    "cell",
    [
        'verdict("peak", RECORD["peak"], predicted=OTHER["peak"], limit=0.01)',
        'verdict("losses apart", max(abs(a - b) for a, b in zip(RECORD["losses"], OTHER["losses"])), at_most=1e-6)',
        'verdict("losses differ", max(abs(a / b - 1) for a, b in zip(RECORD["losses"], MORE["losses"])), at_least=1e-4)',
        'verdict("rows that failed", len(FAILED), predicted=0)',
        'verdict("apart by", APART, at_most=0.01)',
        'verdict("both fell", int(RECORD["losses"][1] < RECORD["losses"][0]), predicted=1)',
        'kept = lambda name: RECORD[name]\nfor name in ("kept",):\n    verdict(name, kept(name), predicted=40)',
        'verdict("a number by hand", 3, at_least=1)',
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
        'rest = lambda: RECORD["peak"] - RECORD["kept"]\n'
        'verdict("the bar", RECORD["kept"] + rest(), predicted=RECORD["peak"])',
        'verdict("times as much", len(RECORD["losses"]), at_least=0)',
        'verdict("a share", min(1, abs(APART)), at_most=1)',
        'verdict("anything", RECORD["peak"], predicted=RECORD["peak"])',
    ],
)
def test_a_verdict_that_cannot_fail_stops_the_cell(cell):
    with pytest.raises(doubts.CannotFail):
        judged(cell)


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 0.9])
def test_the_run_of_the_notebooks_in_make_test_doubts(most, tmp_path):
    """A share is never above one."""
    source = f"""
import sys
sys.path.insert(0, {str(launch.SOURCE)!r})
from labkit.teaching import verdict
apart = 0.5
verdict("a share", min(1, abs(apart)), at_most={most})"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "small.ipynb")
    lines = call("make", "-n", "--no-print-directory", "test", cwd=ROOT).stdout.splitlines()
    runs = [shlex.split(line) for line in lines if "nbval" in line]
    assert sorted(ROOT / word for words in runs for word in words if word.endswith(".ipynb")) == PATHS
    first, *others = ([word for word in words if not word.endswith(".ipynb")] for words in runs)
    assert all(set(first) >= set(words) for words in others)  # the first has how many at once, too
    asked = call(sys.executable, *first[2:], tmp_path / "small.ipynb", cwd=ROOT, timeout=90)  # ranks, Python
    assert asked.returncode == ("CannotFail" in asked.stdout) == (most == 1), asked.stdout
