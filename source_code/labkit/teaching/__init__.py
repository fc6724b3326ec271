# SPDX-License-Identifier: BSD-3-Clause
"""Tools of the chapters: verdicts on claims, exercises that check an answer, figures (``plots``)."""

from labkit.measuring.differences import largest, largest_difference, smallest
from labkit.teaching.exercises import check, hint, solution, yours_or_ours
from labkit.teaching.verdicts import MIB, about_guess, comparison, verdict

__all__ = [
    "MIB",
    "about_guess",
    "check",
    "comparison",
    "hint",
    "largest",
    "largest_difference",
    "smallest",
    "solution",
    "verdict",
    "yours_or_ours",
]
