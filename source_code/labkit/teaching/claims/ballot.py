# SPDX-License-Identifier: BSD-3-Clause
"""The ballot of chapter 21: print the claims, refuse to judge before all votes are cast, judge, and keep the score."""

import textwrap
from collections import Counter

from labkit.teaching.claims import HOLDS, NEVER, VOTES, WHEN, Case, Claim

SKIPPED = "skip"  # a vote that is neither right nor wrong
WIDTH = 110


def ballot(claims: dict[str, Claim]):
    """Print the sentences to vote on, each with the kind of source that repeats it."""
    for key, claim in claims.items():
        print(f"{key:21} {claim.quote} ({claim.source})")


def missing(votes: dict) -> list[str]:
    """Return the keys of claims without a valid vote."""
    return [key for key, vote in votes.items() if not valid(vote)]


def valid(vote) -> bool:
    """Return whether it is a vote. One for "when" states the condition: "when: the network is slow"."""
    if not isinstance(vote, str):
        return False
    word, _, condition = vote.partition(":")
    return bool(condition.strip()) if word == "when" else vote in (*VOTES, SKIPPED)


def judge(claims: dict[str, Claim], votes: dict[str, str | None], evidence: dict) -> dict[str, list[Case]] | None:
    """Print the verdict on each claim, the score, and the chapters to revisit.

    Args:
        claims: the ballot.
        votes: {key: "holds", "never", "skip", or "when: " and a condition}.
        evidence: what the notebook has measured, see ``Claim.cases``.

    Returns:
        {key: the cases}; None, and no verdict, as long as a vote is missing.
    """
    if open_votes := missing(votes):
        print(
            f"{len(open_votes)} of {len(votes)} votes are missing, and nothing is judged before: {_some(open_votes)}."
        )
        print('A vote is "holds", "never", "skip", or "when: " and your condition.')
        return None
    cases = {key: claim.cases(evidence) for key, claim in claims.items()}
    found = {key: claim.verdict(cases[key]) for key, claim in claims.items()}
    for key, claim in claims.items():
        _print_verdict(key, claim, cases[key], found[key], votes[key])
    _print_score(claims, found, votes)
    return cases


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:4]) + (", …" if len(keys) > 4 else "")


def right(vote: str, found: str) -> bool | None:
    """Return whether a vote was right; None if it was skipped."""
    return None if vote == SKIPPED else VOTES[vote.partition(":")[0]] == found


def _print_verdict(key: str, claim: Claim, cases: list[Case], found: str, vote: str):
    mark = {True: "right", False: "wrong", None: "skipped"}[right(vote, found)]
    joined = {HOLDS: "holds:", WHEN: "holds when", NEVER: "does not hold:"}.get(found, f"{found}:")
    hows = ", ".join(f"{count} {how}" for how, count in Counter(case.how for case in cases).items())
    text = f"{mark:7} “{claim.quote}” {joined} {claim.condition}. [{claim.unit}: {_range(claim)}; {hows}]"
    print(textwrap.fill(text, WIDTH, subsequent_indent=" " * 8))
    if condition := vote.partition(":")[2].strip():
        print(textwrap.fill(f"Your condition: {condition}", WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8))


def _range(claim: Claim) -> str:
    lowest, highest = claim.range
    if lowest == highest:
        return f"{lowest:g}"
    return f"{lowest:g} or more" if highest == float("inf") else f"{max(0, lowest):g} to {highest:g}"


def _print_score(claims, found, votes):
    judged = {key: right(vote, found[key]) for key, vote in votes.items() if vote != SKIPPED}
    always = sum(found[key] == WHEN for key in judged)
    print(f"\nYour score: the right word for {sum(judged.values())} of {len(judged)}; “when” throughout has {always}.")
    print("So now count the “when”s whose condition draws the line that the verdict draws: that is what you knew.")
    revisit = {}
    for key, was_right in judged.items():
        if not was_right:
            revisit.setdefault(claims[key].chapter, []).append(key)
    for chapter, keys in sorted(revisit.items()):
        print(f"Revisit chapter {chapter} for {', '.join(keys)}.")
