# SPDX-License-Identifier: BSD-3-Clause
"""Count the rows that a router sends to experts: expected ones, and those of a record. Imports no torch.

A row is a token's vector on its way to one of its experts.
"""

from dataclasses import dataclass
from math import ceil, comb, sqrt
from typing import Any

from planner import UserError


@dataclass(frozen=True)
class Routing:
    """The rows of one rank: of each micro-batch, and of each block with experts.

    Attributes:
        sent: those of its own tokens, without dropped ones; the last entries stand for all further ones.
        received: those of its own experts, from all ranks.
    """

    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def uniform(self) -> bool:
        """Whether all micro-batches and blocks are alike."""
        return len(self.sent) == len(self.sent[0]) == 1

    def rows(self, micro_batch: int, block: int) -> tuple[int, int]:
        """Return (rows sent, rows received) of a block, both counted from 0."""
        sent, received = (of[min(micro_batch, len(of) - 1)] for of in (self.sent, self.received))
        return sent[min(block, len(sent) - 1)], received[min(block, len(received) - 1)]


def expected(experts, batch_size: int, seq_len: int, imbalance: float = 1.0, ep_degree: int = 1) -> Routing:
    """Return the routing that is expected if each token chooses uniformly.

    Args:
        experts: of the model, ``shapes.Experts``.
        batch_size: sequences of a rank.
        seq_len: their tokens.
        imbalance: the rows of this rank's experts, relative to the mean of all ranks.
        ep_degree: ranks among which the experts are spread.

    Raises:
        UserError: no routing is as unbalanced.
    """
    most = min(ep_degree, experts.count / experts.top_k)
    if imbalance > most:
        raise UserError(
            f"--imbalance {imbalance:g} is more than the {most:g} of a rank that computes all tokens: lower it"
        )
    sent = round(batch_size * kept_rows(experts, seq_len))
    return Routing(((sent,),), ((round(sent * imbalance),),))


def kept_rows(experts, seq_len: int) -> float:
    """Return the expected rows of a sequence that are within its experts' capacity, if each token chooses uniformly.

    The tokens that choose an expert are then binomially distributed.
    """
    if experts.capacity_factor is None:
        return seq_len * experts.top_k
    share, capacity = experts.top_k / experts.count, sequence_capacity(experts, seq_len)
    if capacity >= seq_len:
        return seq_len * experts.top_k
    chances = [comb(seq_len, n) * share**n * (1 - share) ** (seq_len - n) for n in range(capacity)]
    return experts.count * (sum(n * chance for n, chance in enumerate(chances)) + capacity * (1 - sum(chances)))


def sequence_capacity(experts, seq_len: int) -> int:
    """Return the tokens of a sequence that an expert computes at most."""
    return ceil(experts.capacity_factor * seq_len * experts.top_k / experts.count)


def received_rows(experts, tokens: int, ep_degree: int) -> tuple[float, float]:
    """Return (mean, standard deviation) of the rows that a rank's experts get, if each token chooses uniformly.

    A token chooses top_k different experts: how many of them a rank has is hypergeometrically distributed.

    Args:
        experts: of the model, ``shapes.Experts``; none of its tokens is dropped.
        tokens: of a micro-batch on each rank.
        ep_degree: ranks among which the experts are spread.
    """
    share, count, top_k = 1 / ep_degree, experts.count, experts.top_k
    variance = top_k * share * (1 - share) * (count - top_k) / (count - 1)
    return tokens * top_k, sqrt(ep_degree * tokens * variance)


def recorded(routing: dict, rank: int, ep_degree: int) -> Routing:
    """Return the routing of a rank in the step whose memory it reports.

    Args:
        routing: of a record (labkit/measuring/meters.py).
        rank: which one.
        ep_degree: of the run.
    """
    tokens = routing["tokens"][str(routing["step_by_rank"][rank])]
    first = rank // ep_degree * ep_degree
    group = tokens[first : first + ep_degree]
    mine = slice(*(len(tokens[rank][0][0]) // ep_degree * (rank - first + end) for end in (0, 1)))
    sent = tuple(tuple(map(sum, layers)) for layers in tokens[rank])
    received = tuple(
        tuple(sum(sum(counts[mine]) for counts in of_layer) for of_layer in zip(*micro_batch, strict=True))
        for micro_batch in zip(*group, strict=True)
    )
    return Routing(sent, received)


def of_rank(routing: dict, rank: int, ep_degree: int) -> dict:
    """Return the part of a record's routing that ``recorded`` needs of one rank; the arguments are as there."""
    step, first = routing["step_by_rank"][rank], rank // ep_degree * ep_degree
    tokens = routing["tokens"][str(step)]
    kept = [own if first <= number < first + ep_degree else [] for number, own in enumerate(tokens)]
    return {"step_by_rank": [step] * len(tokens), "tokens": {str(step): kept}}


@dataclass(frozen=True)
class Spread:
    """How the experts of a network are spread over ranks.

    Attributes:
        ep_degree: ranks that have different experts.
        experts: of the network, ``shapes.Experts``; None: it has none.
        routing: of the rank that is planned.
        hidden_size: elements of a row.
        batch_size: sequences of a micro-batch on a rank.
        recomputed: for each block with experts, whether backward recomputes it.
    """

    ep_degree: int = 1
    experts: Any = None  # shapes.Experts, of a module above this one
    routing: Routing | None = None
    hidden_size: int = 0
    batch_size: int = 0
    recomputed: tuple[bool, ...] = ()

    def load(self, tokens: int) -> float:
        """Return the rows that a rank's experts compute, relative to those of all its ``tokens`` with none dropped."""
        if not self.routing:
            return 1.0
        rows = [count for micro_batch in self.routing.received for count in micro_batch]
        return sum(rows) / len(rows) / (tokens * self.experts.top_k)

    @property
    def counts(self) -> int:
        """The number of counts of tokens that a micro-batch leaves: one for each block and expert."""
        return len(self.recomputed) * self.experts.count if self.experts else 0
