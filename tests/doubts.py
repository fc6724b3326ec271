# SPDX-License-Identifier: BSD-3-Clause
"""Doubt every verdict of a notebook: change what it measured, judge again, and stop the cell if it cannot FAIL.

The kernels of the tests do so (kernel_startup.py, by PYTHONSTARTUP in conftest.py): the one run of each notebook in
``make test`` also shows that no verdict is empty. What a verdict's measured value is computed from (a record, a list
of losses) is changed under the whole call, so that a prediction taken from the same numbers changes with it: a
difference that is zero by construction stays zero, and is found. Three things stop the cell:

  CannotFail    no change of what this execution has measured (provenance.py) makes the verdict FAIL
  NotMeasured   nothing in it was measured in this execution: a plan, a formula or a committed file is compared
  PassesNaN     it says PASS although one of the numbers it depends on, or all of them, are NaN

FSDP_LABS_DOUBTS names a file: then each verdict adds a line of JSON to it, and no cell is stopped.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import linecache
import math
import os
import random
import sys
from pathlib import Path
from types import FunctionType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from labkit import teaching
from labkit.teaching import verdicts
from provenance import Provenance

NUMBERS = ("measured", "predicted", "at_most", "at_least", "limit")
# Of each trial, by what a number is multiplied, what is added, and how often a list's last part is there once more: all
# is nothing, all is one, each goes its own way.
TRIALS = [((0,), (0,), (0,)), ((0,), (1,), (0,)), *12 * [((0, 0.5, 1, 1.5, 3), (0, 1, 10**12), (0, 0, 1))]]
# Then most numbers stay, and few change: one part of many, so that it is more than the others.
RARE = 200 * [((*12 * [1], 0), (*12 * [0], 10**12), (0,))]

LEAVES = 12  # of a variable, how many single numbers are made NaN, one at a time


class Doubt(AssertionError):
    """The base of what stops a cell."""


class CannotFail(Doubt):
    """Whatever was measured, this verdict says PASS."""


class NotMeasured(Doubt):
    """Nothing that this execution has measured is judged."""


class PassesNaN(Doubt):
    """A run that diverged would PASS."""


def doubted(claim, measured, **judged):
    """``verdict``, which then must FAIL for at least one other measurement, and for NaN."""
    real(claim, measured, **judged)
    call, caller = _call(inspect.currentframe().f_back)
    doubt = _doubt(claim, measured, judged, call, caller)
    if path := os.environ.get("FSDP_LABS_DOUBTS"):
        line = {"claim": claim, "doubt": type(doubt).__name__ if doubt else None, "detail": str(doubt or "")}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
    elif doubt:
        raise doubt


real = verdicts.verdict


def _doubt(claim, measured, judged, call, caller) -> Doubt | None:
    """What is wrong with a verdict, or None. call, caller: from ``_call``."""
    if call is None:
        able = any(_fails(judged | {"measured": other}, judged) for other in _others(measured))
        return None if able else CannotFail(claim)
    arguments, codes = _arguments(call)
    known = caller.f_globals | caller.f_locals
    # In a function the cells do not say what its arguments are: they are taken for measured.
    local = frozenset(caller.f_locals) if caller.f_locals is not caller.f_globals else frozenset()
    origin = _origin(caller, known, None if local else call.lineno)
    if not origin.of(arguments["measured"], local):
        return NotMeasured(claim)
    names, _ = _sources(_data(codes["measured"], known), origin, local, known)
    _, chain = _sources(set().union(*(_data(code, known) for code in codes.values())), origin, local, known)
    evaluate = functools.partial(_evaluated, codes, caller, chain)
    passed_with_another = False
    for again in _again(evaluate, known, names):
        if _fails(again, judged):
            break
        passed_with_another |= again["measured"] != measured
    else:
        # Where no change reaches it (a measurement within the call, a narrow interval), the value itself is changed.
        if passed_with_another or not any(_fails(judged | {"measured": other}, judged) for other in _others(measured)):
            return CannotFail(claim)
    return _passes_nan(claim, judged, evaluate, known, names)


def _sources(data: set[str], origin: Provenance, local: frozenset, known: dict) -> tuple[list[str], list]:
    """(the measured variables that those in data are computed from, the statements that compute them, in order)."""
    found, done, chain = set(), set(), {}
    queue = [name for name in data if name in origin.measured | local]
    while queue:
        if (name := queue.pop()) in done:
            continue
        done.add(name)
        if name in local or not (statement := origin.computed(name)):
            found.add(name)
        else:
            code = compile(ast.Expression(statement.value), "<again>", "eval")
            reads = {each for each in _data(code, known) if each in origin.measured}
            chain[id(statement)] = _names_of(statement), reads, compile(ast.Module([statement], []), "<again>", "exec")
            queue += reads
    order = [id(statement) for statement in origin.assigned.values()]
    return sorted(found), [chain[each] for each in sorted(chain, key=order.index)]


def _names_of(statement: ast.Assign) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _origin(caller, known, line) -> Provenance:
    """Where the variables of a kernel come from, by the cells that it has executed, the last up to a line."""
    return Provenance(CELLS or ["".join(linecache.getlines(caller.f_code.co_filename))], known, line)


def _passes_nan(claim, judged, evaluate, known, names) -> PassesNaN | None:
    """The doubt about a verdict that is PASS with a NaN in what it depends on, or None."""
    for name in names:
        leaves = every = list(_leaves(known[name]))
        if not leaves:  # no number that could become NaN: it may be NaN on purpose
            continue
        if len(leaves) > LEAVES:
            leaves = leaves[:2] + leaves[-2:] + random.Random(0).sample(leaves, LEAVES - 4)
        for path in [*leaves, None]:  # one of several, and all of them
            ways = {leaf[:length] for leaf in (every if path is None else [path]) for length in range(len(leaf) + 1)}

            def changed(how, name=name, path=path, ways=ways) -> dict | None:
                """The arguments with a number (path None: each number) of the variable changed; None: not to be computed."""
                with contextlib.suppress(Exception):
                    return evaluate({name: _with_changed(known[name], path, how, ways)})

            again = changed(lambda _: math.nan)
            if again is None or _fails(again, judged):
                continue
            # It must depend on what is NaN now: another number changes it, or all of them are looked at.
            now, *others = (changed(how) for how in OTHER_NUMBERS)
            if any(each is not None and each != now for each in others) or (path is None and _looked_at(changed)):
                where = "all numbers" if path is None else "".join(f"[{key!r}]" for key in path)
                return PassesNaN(f"{claim} (NaN in {name}, {where})")
    return None


OTHER_NUMBERS = (float, lambda x: 1 - 1e6 * x, lambda x: x * 0, lambda x: 1 + 1.5 * x, lambda x: 1 + 1e6 * x)


OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow rpow lt le gt ge eq ne hash abs neg round bool".split()


def _looked_at(changed) -> bool:
    """Whether the arguments depend on the numbers that ``changed`` changes: computing with one, or comparing it, tells."""
    seen = []

    def used(self, *_):
        seen.append(self)
        raise ArithmeticError

    changed(type("Watched", (float,), dict.fromkeys((f"__{name}__" for name in OPERATORS), used)))
    return bool(seen)


def _leaves(value, path=()):
    """The paths to the floats in a value that are numbers: (key, index, …)."""
    if isinstance(value, float):
        if math.isfinite(value):
            yield path
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), (*path, field.name))
    elif _is_float_tensor(value) and math.prod(value.shape):
        yield (*path, (0,) * len(value.shape))
        yield (*path, tuple(size - 1 for size in value.shape))


def _is_float_tensor(value) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _with_changed(value, path, change, ways: set, at=()):
    """A copy of a value in which the float at a path is changed; path None: each float.

    ways: the paths of what contains what changes. All other parts, of a record most, stay what they are: not copies.
    """
    if at not in ways:
        return value
    if isinstance(value, float):
        return change(value)
    if isinstance(value, dict):
        return type(value)({k: _with_changed(v, path, change, ways, (*at, k)) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        parts = [_with_changed(v, path, change, ways, (*at, i)) for i, v in enumerate(value)]
        return type(value)(parts) if type(value) in (list, tuple) else type(value)(*parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init and (*at, field.name) in ways]
        parts = {name: _with_changed(getattr(value, name), path, change, ways, (*at, name)) for name in names}
        return dataclasses.replace(value, **parts)
    other = value.detach().clone()  # of a tensor
    if path is None:
        other.copy_(other.double().apply_(change)) if other.numel() < 1000 else other.mul_(change(1.0))
    else:
        index = path[len(at)]
        other[index] = change(float(other[index]))
    return other


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


def _arguments(call) -> tuple[dict, dict]:
    """The numbers of a call, by name: as written, and compiled."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in NUMBERS}
    if "measured" not in arguments:
        arguments["measured"] = call.args[1]
    return arguments, {name: compile(ast.Expression(node), "<again>", "eval") for name, node in arguments.items()}


def _again(evaluate, known: dict, data: list[str]):
    """The call's arguments, evaluated with measured variables changed; many times."""
    for names, trials in [*(([name], TRIALS) for name in data), (data, TRIALS), (data, RARE)] if data else ():
        for seed, change in enumerate(trials):
            with contextlib.suppress(Exception):  # a change may leave nothing that can be computed with
                yield evaluate({name: _shaken(known[name], random.Random(seed), *change) for name in names})


def _evaluated(codes: dict, frame, chain: list, others: dict) -> dict:
    """What the codes come to where variables have other values, also for functions of the notebook that read them.

    chain: what is computed anew from them on the way, see ``_sources``.
    """
    names, local, changed = frame.f_globals, frame.f_locals, set(others)
    before = {
        name: names[name] for name in (*others, *(each for targets, _, _ in chain for each in targets)) if name in names
    }
    names.update({name: value for name, value in others.items() if name in before})
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for targets, reads, code in chain:
                if reads & changed and not targets & set(others):
                    exec(code, names)
                    changed |= targets
            inner = {} if local is names else dict(local)
            return {argument: eval(code, names | inner | others) for argument, code in codes.items()}
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


def _shaken(value, chance: random.Random, scales: tuple, terms: tuple, more: tuple):
    """Another value of the same shape: each number scaled by a factor of its own, at times with a part too many."""
    if isinstance(value, bool):
        return bool(value * chance.choice(scales) + chance.choice(terms))
    if isinstance(value, (int, float)):
        return type(value)(value * chance.choice(scales)) + chance.choice(terms)
    if isinstance(value, str):
        return chance.choice((value, "", value + "?"))
    if isinstance(value, dict):
        return type(value)({key: _shaken(each, chance, scales, terms, more) for key, each in value.items()})
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: _shaken(getattr(value, name), chance, scales, terms, more) for name in names}
        )
    if isinstance(value, (list, tuple, set)):
        parts = [_shaken(each, chance, scales, terms, more) for each in value] or [1]
        parts += parts[-1:] * chance.choice(more)
        return type(value)(parts) if type(value) in (list, tuple, set) else type(value)(*parts)
    if hasattr(value, "shape"):
        return value * chance.choice(scales) + chance.choice(terms)
    return value


CELLS = []  # the source of every cell that the kernel has begun to execute


def install():
    from IPython import get_ipython

    verdicts.verdict = teaching.verdict = doubted
    get_ipython().events.register("pre_run_cell", lambda cell: CELLS.append(cell.raw_cell))
