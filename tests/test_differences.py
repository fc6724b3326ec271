# SPDX-License-Identifier: BSD-3-Clause
"""Two runs are compared by one function, which NaN and infinity cannot pass; nothing else in the project does it."""

import ast
import math
import re

import jax.numpy as jnp
import pytest
import torch
from labkit.measuring.differences import largest, largest_difference, smallest
from labkit.running import launch

from notebooks import PATHS, code_cells, read

ROOT = launch.SOURCE.parent
REDUCTIONS = {"max", "min", "sorted"}  # Python's: each of them skips a NaN, or may
DIFFERENCES = re.compile(r"differ|apart|deviation")
HOME = launch.SOURCE / "labkit" / "measuring" / "differences.py"


@pytest.mark.parametrize(
    ("measured", "reference", "relative", "expected"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.5, 4.25], False, 0.5),
        ([1.0, 2.0, 4.0], [1.0, 2.5, 2.0], True, 1.0),
        ([0.0, 1.0], [0.0, 1.0], True, 0.0),
        ([1.0], [0.0], True, math.inf),
        ([math.inf, 1.0], [1.0, 1.0], False, math.inf),
        ([-2.0], [2.0], True, 2.0),
        (3, 5, False, 2.0),
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0], [7.0]], False, 4.0),
        (torch.tensor([1.0, 2.0]), [1.0, 4.0], False, 2.0),
        ([torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)], False, 1.0),
        (jnp.array([1.0, 2.0]), torch.tensor([1.0, 5.0], dtype=torch.bfloat16), False, 3.0),
        ((x for x in (1.0, 2.0)), (1.0, 2.0), False, 0.0),
    ],
)
def test_the_largest_difference(measured, reference, relative, expected):
    assert largest_difference(measured, reference, relative) == expected


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_nan_is_found_wherever_it_is(place, relative):
    run, other = [2.0, 1.9, 1.8], [2.0, 1.9, 1.8]
    run[place] = math.nan
    for pair in ((run, other), (other, run), (run, run)):
        assert math.isnan(largest_difference(*pair, relative))
        assert math.isnan(largest_difference(*map(torch.tensor, pair), relative))
    assert math.isnan(largest(run)) and math.isnan(largest([run, [math.inf]]))
    assert math.isnan(smallest(run)) and math.isnan(smallest([run, [-math.inf]]))


def test_the_largest_and_the_smallest():
    assert (largest([[2.0], [3, -1]]), smallest([[2.0], [3, -1]]), smallest([7])) == (3.0, -1.0, 7.0)


def test_two_infinities_are_no_equality():
    assert math.isnan(largest_difference([1.0, math.inf], [1.0, math.inf]))


@pytest.mark.parametrize("pair", [([1.0], [1.0, 2.0]), ([], []), (torch.ones(2), torch.ones(3))])
def test_what_cannot_be_compared_raises(pair):
    with pytest.raises(ValueError):
        largest_difference(*pair)


# Nothing else reduces differences


def reductions(source: str) -> list[str]:
    """The expressions in a program that reduce differences and may lose a NaN."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        inside = [each for argument in node.args for each in ast.walk(argument)]
        function = getattr(node.func, "id", None)
        above = any(isinstance(each, (ast.Gt, ast.GtE)) for each in inside)  # which no NaN is
        by_name = function in REDUCTIONS or (function == "any" and above)
        if by_name and (any(map(_is_abs, inside)) or any(map(_is_named_difference, node.args))):
            found.append(ast.unparse(node))
        # PyTorch's max keeps a NaN, but one way to compare is enough
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "amax"):
            if any(_is_abs(each) and _subtracts(each) for each in ast.walk(node.func.value)):
                found.append(ast.unparse(node))
    return found


def _is_abs(node) -> bool:
    names = (getattr(node.func, "id", None), getattr(node.func, "attr", None)) if isinstance(node, ast.Call) else ()
    return "abs" in names or (isinstance(node, ast.Name) and node.id == "abs")


def _subtracts(node) -> bool:
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) for each in ast.walk(node))


def _is_named_difference(node) -> bool:
    return isinstance(node, ast.Name) and bool(DIFFERENCES.search(node.id))


@pytest.mark.parametrize(
    "line",
    [
        "max(abs(a - b) for a, b in zip(x, y))",
        "max([abs(a / b - 1) for a, b in pairs])",
        "max(map(abs, now.values()))",
        "max(differences)",
        "assert not any(abs(a - b) > 1e-6 for a, b in pairs)",
        "sorted(abs(a - b) for a, b in pairs)[-1]",
        "(a - b).abs().max().item()",
        "abs(there - here).max()",
    ],
)
def test_another_reduction_is_found(line):
    assert reductions(line)


@pytest.mark.parametrize(
    "line",
    [
        "largest_difference(a, b, relative=True)",
        "all(abs(a - b) < 1e-6 for a, b in pairs)",  # a NaN is not less
        "abs(a - b) < 1e-6",
        "reference.abs().max()",  # a magnitude
        "max(sizes)",
    ],
)
def test_what_keeps_a_nan_is_none(line):
    assert not reductions(line)


def sources():
    for path in [*launch.SOURCE.rglob("*.py"), *(ROOT / "tests").glob("*.py"), *(ROOT / "images").glob("*.py")]:
        if path not in (HOME, ROOT / "tests" / "test_differences.py") and "results" not in path.parts:
            yield path, path.read_text()
    for path in PATHS:
        for number, cell in enumerate(code_cells(read(path))):
            yield (
                f"{path.name}, code cell {number}",
                "".join(
                    line for line in cell.source.splitlines(keepends=True) if not line.lstrip().startswith(("!", "%"))
                ),
            )


def test_two_runs_are_compared_by_one_function():
    found = [f"{where}: {line}" for where, source in sources() for line in reductions(source)]
    assert not found, "\n".join(["use labkit.measuring.differences.largest_difference for", *found])
