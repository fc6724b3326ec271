"""Doubt every verdict of a notebook: change what it measured, judge again, and stop the cell if it cannot FAIL.

The kernels of the tests do so (kernel_startup.py, by PYTHONSTARTUP in conftest.py): the one run of each notebook in
``make test`` also shows that no verdict is empty. What a verdict's measured value is computed from (a record, a list
of losses) is changed under the whole call, so that a prediction taken from the same numbers changes with it: a
difference that is zero by construction stays zero, and is found.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import linecache
import random
import sys
from pathlib import Path
from types import FunctionType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from labkit import teaching
from labkit.teaching import verdicts

NUMBERS = ("measured", "predicted", "at_most", "at_least", "limit")
# Of each trial, by what a number is multiplied and what is added: all is nothing, all is one, each goes its own way.
TRIALS = [((0,), (0,)), ((0,), (1,)), *12 * [((0, 0.5, 1, 1.5, 3), (0, 1, 10**12))]]


class CannotFail(AssertionError):
    """Whatever was measured, this verdict says PASS."""


def doubted(claim, measured, **judged):
    """``verdict``, which then must FAIL for at least one other measurement."""
    real(claim, measured, **judged)
    call, caller = _call(inspect.currentframe().f_back)
    passed_with_another = False
    for again in _again(call, caller) if call else ():
        if _fails(again, judged):
            return
        passed_with_another |= again["measured"] != measured
    if passed_with_another or not any(_fails(judged | {"measured": other}, judged) for other in _others(measured)):
        raise CannotFail(claim)


real = verdicts.verdict


def _fails(arguments: dict, judged: dict) -> bool:
    """Whether these arguments, as far as they were evaluated again, would FAIL."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(Exception):
        real(**{"claim": ""} | judged | arguments)
    return printed.getvalue().startswith("FAIL")


def _others(measured):
    return 1.5 * measured, measured + 1, measured - 1, -1e9 * abs(measured) - 1e9, 1e9 * abs(measured) + 1e9


def _call(frame):
    """The call that the frame is in, as written, and the frame; (None, None) where there is no source."""
    instruction = frame.f_lasti // 2
    line, last, column, end = list(frame.f_code.co_positions())[instruction]
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (line, last, column, end):
                return node, frame
    return None, None


def _again(call, frame):
    """The call's arguments, evaluated with something changed that the measured value is computed from; many times."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in NUMBERS}
    arguments.setdefault("measured", call.args[1] if len(call.args) > 1 else None)
    codes = {name: compile(ast.Expression(node), "<again>", "eval") for name, node in arguments.items()}
    known = frame.f_globals | frame.f_locals
    data = sorted(_data(codes["measured"], known))
    for names in [*([name] for name in data), data]:
        for seed, change in enumerate(TRIALS):
            with contextlib.suppress(Exception):  # a change may leave nothing that can be computed with
                others = {name: _shaken(known[name], random.Random(seed), *change) for name in names}
                yield _evaluated(codes, frame, others)


def _evaluated(codes: dict, frame, others: dict) -> dict:
    """What the codes come to where names have other values, also for functions of the notebook that read them."""
    names = frame.f_globals
    before = {name: names[name] for name in others if name in names}
    names.update({name: others[name] for name in before})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return {argument: eval(code, names | frame.f_locals | others) for argument, code in codes.items()}
    finally:
        names.update(before)


def _data(code, known: dict, seen=()) -> set[str]:
    """The names of what is computed with, by the functions that the notebook defines, too."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    found = set().union(*(_data(each, known, seen) for each in inner))
    for name in set(code.co_names) & set(known) - set(seen):
        if isinstance(known[name], FunctionType) and known[name].__module__ == "__main__":
            found |= _data(known[name].__code__, known, (*seen, name))
        elif not callable(known[name]) and not inspect.ismodule(known[name]):
            found.add(name)
    return found


def _shaken(value, chance: random.Random, scales: tuple, terms: tuple):
    """Another value of the same shape: each number scaled by a factor of its own, at times with a part too many."""
    if isinstance(value, bool):
        return bool(value * chance.choice(scales) + chance.choice(terms))
    if isinstance(value, (int, float)):
        return type(value)(value * chance.choice(scales)) + chance.choice(terms)
    if isinstance(value, str):
        return chance.choice((value, "", value + "?"))
    if isinstance(value, dict):
        return type(value)({key: _shaken(each, chance, scales, terms) for key, each in value.items()})
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: _shaken(getattr(value, name), chance, scales, terms) for name in names}
        )
    if isinstance(value, (list, tuple, set)):
        parts = [_shaken(each, chance, scales, terms) for each in value] or [1]
        parts += parts[-1:] * chance.choice((0, 0, 1))
        return type(value)(parts) if type(value) in (list, tuple, set) else type(value)(*parts)
    if hasattr(value, "shape"):
        return value * chance.choice(scales) + chance.choice(terms)
    return value


def install():
    verdicts.verdict = teaching.verdict = doubted
