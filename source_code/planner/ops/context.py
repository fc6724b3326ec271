# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: which tokens a rank has, what the ranks of a context group exchange, and who computes most.

The forms are described in labkit/training/context_parallel.py. Imports no torch.
"""

from collections import Counter
from dataclasses import dataclass

from planner.ops.autograd import FP32

FORMS = ("ring", "gather", "ulysses")
ORDERS = {"natural": 1, "head-tail": 2}  # parts of a sequence that each rank has


def order_of(form: str) -> str:
    """Return the order of tokens that the lab takes. (Ulysses has whole sequences in attention, in their order.)"""
    return "natural" if form == "ulysses" else "head-tail"


def chunks_of(rank: int, size: int, order: str) -> list[int]:
    """Return which of the ``ORDERS[order]`` × ``size`` parts of a sequence a rank has, in order."""
    return [rank] if order == "natural" else [rank, 2 * size - 1 - rank]


@dataclass(frozen=True)
class Context:
    """A context group, and what its ranks exchange in a micro-batch.

    Attributes:
        size: ranks that share each sequence.
        form: of attention, one of ``FORMS``.
        order: of the tokens, a key of ``ORDERS``.
        rank: whose part of attention is described.
        numel: elements of a rank's queries.
        kv_numel: elements of a rank's keys.
        layers: with attention.
        recomputed: of them, how many run their forward twice.
        frozen_keys: layers whose keys need no gradient: with LoRA, the first one.
    """

    size: int = 1
    form: str = "ring"
    order: str = "head-tail"
    rank: int = 0
    numel: int = 0
    kv_numel: int = 0
    layers: int = 0
    recomputed: int = 0
    frozen_keys: int = 0

    def parts(self) -> list[tuple[float, float] | None]:
        """Return, for each rank whose keys arrive, (share of the queries, share of the keys) that attention computes.

        The first is the rank's own, in which attention is causal; None: nothing is visible.
        """
        sources = [(self.rank - step) % self.size for step in range(1, self.size)]
        if self.order == "natural":
            return [(1.0, 1.0), *((1.0, 1.0) if source < self.rank else None for source in sources)]
        return [(1.0, 1.0), *((1.0, 0.5) if source < self.rank else (0.5, 1.0) for source in sources)]

    @property
    def slowest_share(self) -> float:
        """The attention FLOPs of the slowest rank, as a multiple of the mean over the ranks.

        In natural order the last of C ranks attends to its own tokens, causally, and to those of all C − 1 others:
        C − 1/2 parts, where the mean is C / 2. In head-tail order each rank computes half of every other rank's pairs.
        """
        return 2 - 1 / self.size if self.order == "natural" and self.form != "ulysses" else 1.0

    def packed_bytes(self, itemsize: int) -> tuple[int, int]:
        """Return the bytes of a rank's keys and values together, and of their gradients, which are in fp32 at least."""
        return 2 * self.kv_numel * itemsize, 2 * self.kv_numel * max(FP32, itemsize)

    def collectives(self, itemsize: int) -> Counter:
        """Count what a rank exchanges in a micro-batch, as planner/parallel/traffic.py does.

        The ring sends one rank's keys and values C − 1 times, in forward and again in backward, where their gradients
        follow C times.

        Args:
            itemsize: bytes per element of keys and values.
        """
        counts, size, forwards = Counter(), self.size, self.layers + self.recomputed
        if size == 1:
            return counts
        both, gradients = self.packed_bytes(itemsize)

        def count(kind, nbytes, times):
            counts[kind, nbytes, size, "context"] += times

        if self.form == "ring":
            for kind in ("send", "receive"):
                count(kind, both, (size - 1) * (forwards + self.layers))
                count(kind, gradients, size * self.layers)
        elif self.form == "gather":
            count("all-gather", size * both, forwards + self.layers)
            count("reduce-scatter", size * gradients, self.layers)
        else:
            count("all-to-all", self.numel * itemsize, 2 * (forwards + self.layers))
            count("all-to-all", self.kv_numel * itemsize, 2 * (forwards + self.layers) - self.frozen_keys)
        return counts
