# SPDX-License-Identifier: BSD-3-Clause
"""Judge an answer of the exam, and name what is wrong with it. A verdict states its mistakes by name and in a sentence."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten

TOLERANCE = 0.05  # of a predicted number
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


@dataclass(frozen=True)
class Verdict:
    """What the judge says of an answer.

    Attributes:
        right: whether the task is solved.
        mistakes: names of what is wrong; () if it is right.
        sentence: for the learner.
        judged_by: "run", "plan", or "fault" (the one that was put into the run): what the answer was compared with.
    """

    right: bool
    mistakes: tuple[str, ...]
    sentence: str
    judged_by: str


def text_of(given, choices) -> tuple[str | None, str, str]:
    """Read an answer that is one of a few words: (the word or None, the mistake, the sentence)."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return None, "no answer", "there is no answer"
    words = {choice.casefold(): choice for choice in choices}
    word = words.get(given.strip().casefold()) if isinstance(given, str) else None
    if word is None:
        return None, "not a choice", f"{shorten(repr(given), 60, placeholder=' …')} is none of {', '.join(choices)}"
    return word, "", ""


def number_of(given, least: float = 0, included: bool = False) -> tuple[float | None, str, str]:
    """Read an answer that is a number: (the number or None, the mistake, the sentence).

    Args:
        given: the answer.
        least: its lower bound.
        included: whether it may be that bound.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return None, "no answer", "there is no answer"
    try:
        value = float(given) if not isinstance(given, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value < least or (value == least and not included):
        shown = shorten(repr(given), 60, placeholder=" …")
        return None, "not a number", f"{shown} is not a number {'from' if included else 'above'} {least:g}"
    return value, "", ""


def of_number(name: str, unit: str, given, true: float, mistaken: Callable[[], dict]) -> tuple[str, str]:
    """Judge a predicted number.

    Args:
        name: of the quantity.
        unit: a key of ``UNITS``, in which it is asked.
        given: the answer.
        true: bytes.
        mistaken: returns {a mistake: the bytes to which it leads}; called for a wrong answer only.

    Returns:
        (the mistake, "" if there is none; a sentence).
    """
    value, mistake, sentence = number_of(given)
    if value is None:
        return mistake, f"{name}: {sentence}"
    size = value * UNITS[unit]
    shown = f"{name}: {value:,.6g} {unit}"
    if abs(size / true - 1) <= TOLERANCE:
        return "", f"{shown}, it is {true / UNITS[unit]:,.4g} {unit}"
    near = {other: abs(size / wrong - 1) for other, wrong in mistaken().items() if wrong > 0}
    near = {other: off for other, off in near.items() if off <= ALIKE}
    wrong_units = {f"given in {other}": abs(value * scale / true - 1) for other, scale in UNITS.items()}
    wrong_units |= {"given in bits": abs(size / BITS / true - 1)}
    units = {other: off for other, off in wrong_units.items() if off <= ALIKE}
    off = f"{shown} is {abs(size / true - 1):.0%} too {'high' if size > true else 'low'}"
    if units and min(units.values()) <= min(near.values(), default=1):
        how = min(units, key=units.get)
        return "wrong unit", f"{off}: it is right if {how}, so the unit is wrong (asked: {unit})"
    if near:
        what = min(near, key=near.get)
        return what, f"{off}: {what}"
    return "another number", off
