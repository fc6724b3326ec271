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
    return [key for key, vote in votes.items() if vote not in (*VOTES, SKIPPED)]


def judge(claims: dict[str, Claim], votes: dict[str, str | None], evidence: dict) -> dict[str, list[Case]] | None:
    """Print the verdict on each claim, the score, and the chapters to revisit.

    Args:
        claims: the ballot.
        votes: {key: "holds", "when", "never", or "skip"}.
        evidence: what the notebook has measured, see ``Claim.cases``.

    Returns:
        {key: the cases}; None, and no verdict, as long as a vote is missing.
    """
    if open_votes := missing(votes):
        print(
            f"{len(open_votes)} of {len(votes)} votes are missing, and nothing is judged before: {_some(open_votes)}."
        )
        print(f"A vote is one of {', '.join(map(repr, (*VOTES, SKIPPED)))}.")
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
    return None if vote == SKIPPED else VOTES[vote] == found


def _print_verdict(key: str, claim: Claim, cases: list[Case], found: str, vote: str):
    mark = {True: "right", False: "wrong", None: "skipped"}[right(vote, found)]
    joined = {HOLDS: "holds:", WHEN: "holds when", NEVER: "does not hold:"}.get(found, f"{found}:")
    hows = ", ".join(f"{count} {how}" for how, count in Counter(case.how for case in cases).items())
    text = f"{key} {joined} {claim.condition} [{mark}; {hows}]"
    print(textwrap.fill(text, WIDTH, subsequent_indent="    "))


def _print_score(claims, found, votes):
    judged = {key: right(vote, found[key]) for key, vote in votes.items() if vote != SKIPPED}
    print(f"\nYour score: {sum(judged.values())} of {len(judged)}.")
    revisit = {}
    for key, was_right in judged.items():
        if not was_right:
            revisit.setdefault(claims[key].chapter, []).append(key)
    for chapter, keys in sorted(revisit.items()):
        print(f"Revisit chapter {chapter} for {', '.join(keys)}.")
