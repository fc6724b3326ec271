"""What a chapter needs to teach: verdicts on claims, exercises that judge an answer, figures (``plots``)."""

from labkit.teaching.exercises import check, hint, solution, yours_or_ours
from labkit.teaching.verdicts import MIB, about_guess, verdict

__all__ = ["MIB", "about_guess", "check", "hint", "solution", "verdict", "yours_or_ours"]
