# SPDX-License-Identifier: BSD-3-Clause
"""Judge an answer of the exam, and name what is wrong with it. A verdict states its mistakes by name and in a sentence."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten

TOLERANCE = 0.05  # of a predicted number
TOO_FAR = f"more than {100 * TOLERANCE:g} % off"  # what is wrong with a number that no known mistake explains
MANY = 3  # times: from here on, percents are hard to read
ALIKE = 0.01  # a wrong number this close to that of a known mistake is taken for it

DECIMAL = {"GB": 1e9, "MB": 1e6}
BINARY = {"GiB": 2**30, "MiB": 2**20}
UNITS = DECIMAL | BINARY
UNIT_SCALES = {
    "bytes": 1.0,
    "KB": 1e3,
    "KiB": 2.0**10,
    "MB": 1e6,
    "MiB": 2.0**20,
    "GB": 1e9,
    "GiB": 2.0**30,
    "TB": 1e12,
}
BITS = 8
GROUPED = re.compile(r"\s*[1-9]\d{0,2}(,\d{3})+(\.\d*)?\s*")  # 1,536.5, as plan.py prints large numbers
WITH_UNIT = re.compile(r"(.*[\d.])\s*([A-Za-z]+)\s*")  # 1.5 GiB


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer.

    Attributes:
        right: whether the task is solved.
        mistakes: names of the mistakes; () if it is right.
        sentence: for the learner.
        judged_by: what the answer was compared with: "run", "plan", or "fault" (the one that was injected into the run).
    """

    right: bool
    mistakes: tuple[str, ...]
    sentence: str
    judged_by: str


def empty(given) -> bool:
    """Return whether an answer has not been filled in."""
    return given is None or (isinstance(given, str) and not given.strip())


def one_of(choices) -> str:
    """Return choices as text: "fp32 or bf16"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def quoted(given) -> str:
    """Return an answer as it may be quoted in a sentence."""
    return shorten(repr(given), 60, placeholder=" …")


def text_of(given, choices) -> tuple[str | None, str, str]:
    """Read an answer that is one of a few words: (the word or None, the mistake, the sentence)."""
    if empty(given):
        return None, "no answer", "there is no answer"
    words = {choice.casefold(): choice for choice in choices}
    word = words.get(given.replace("_", " ").strip().casefold()) if isinstance(given, str) else None
    if word is None:
        return None, "not a choice", f"it must be {one_of(choices)}, but is {quoted(given)}"
    return word, "", ""


def number_of(given, least: float = 0, included: bool = False) -> tuple[float | None, str, str]:
    """Read an answer that is a number: (the number or None, the mistake, the sentence).

    Args:
        given: the answer.
        least: its lower bound.
        included: whether it may be that bound.
    """
    if empty(given):
        return None, "no answer", "there is no answer"
    try:
        if isinstance(given, str) and GROUPED.fullmatch(given):
            given = given.replace(",", "")
        value = float(given) if not isinstance(given, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value < least or (value == least and not included):
        bound = "of at least" if included else "above"
        return None, "not a number", f"it must be a number {bound} {least:g}, but is {quoted(given)}"
    return value, "", ""


def unit_of(given, asked: str) -> tuple[object, str]:
    """Split an answer into what stands before its unit, and the unit; without one it is the unit that is asked."""
    match = WITH_UNIT.fullmatch(given) if isinstance(given, str) else None
    unit = {each.casefold(): each for each in UNIT_SCALES}.get(match[2].casefold()) if match else None
    return (match[1], unit) if unit else (given, asked)


def of_number(name: str, unit: str, given, true: float, mistaken: Callable[[], dict]) -> tuple[str, str]:
    """Judge a predicted number.

    Args:
        name: of the quantity.
        unit: a key of ``UNITS``, in which it is asked.
        given: the answer; a text may have a unit of its own.
        true: bytes.
        mistaken: returns {a mistake: the bytes to which it leads}; called for a wrong answer only.

    Returns:
        (the mistake, "" if there is none; a sentence).
    """
    number, given_unit = unit_of(given, unit)
    value, mistake, sentence = number_of(number)
    if value is None:
        return mistake, f"{name}: {sentence}" + " (write 1536.5, or 1,536.5)" * (mistake == "not a number")
    size = value * UNIT_SCALES[given_unit]
    shown = f"{name}: {value:,.6g} {given_unit}"
    if abs(size / true - 1) <= TOLERANCE:
        return "", f"{shown}, and it is {true / UNITS[unit]:,.4g} {unit}"
    near = {other: abs(size / wrong - 1) for other, wrong in mistaken().items() if wrong > 0}
    near = {other: off for other, off in near.items() if off <= ALIKE}
    wrong_units = {f"given in {other}": abs(value * scale / true - 1) for other, scale in UNIT_SCALES.items()}
    wrong_units |= {"given in bits": abs(size / BITS / true - 1)}
    units = {other: off for other, off in wrong_units.items() if off <= ALIKE}
    times = size / true
    much = (
        f"{times:,.3g} times too high" if times > MANY else f"{abs(times - 1):.0%} too {'high' if times > 1 else 'low'}"
    )
    off = f"{shown} is {much}"
    if units and min(units.values()) <= min(near.values(), default=1):
        how = min(units, key=units.get)
        return "wrong unit", f"{off}: it is right if {how}, so the unit is wrong (asked: {unit})"
    if near:
        what = min(near, key=near.get)
        return what, f"{off}, as with this mistake: {what}"
    return TOO_FAR, off
