# SPDX-License-Identifier: BSD-3-Clause
"""How the ranks are arranged: a grid with named dimensions. Imports no torch."""

import re
from dataclasses import dataclass, fields
from math import prod

from planner import UserError

# What --mesh accepts: the two dimensions of HSDP without their names, or any by name.
FORM = (r"[1-9]\d*x[1-9]\d*|\w+=[1-9]\d*(,\w+=[1-9]\d*)*", "REPLICASxSHARDS, such as 2x4, or NAME=SIZE,NAME=SIZE")


@dataclass(frozen=True)
class Mesh:
    """The sizes of the dimensions, from the outermost to the innermost: the last counts neighboring ranks.

    Attributes:
        pipeline: stages, each with its part of the layers.
        replicate: copies of the model.
        shard: ranks that see different sequences, and among which FSDP shards a copy.
        context: ranks that share each sequence; FSDP shards among them, too.
        tensor: ranks that split every weight.
        expert: ranks that have different experts of a mixture. These are some of those of ``shard``, ``context``, and
            ``tensor``: the dimension divides their product, and adds no ranks.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Parse what --mesh accepts (``FORM``); a dimension that it does not name has size 1.

        Raises:
            UserError: a name is unknown, or given twice.
        """
        if re.fullmatch(r"\d+x\d+", text):
            replicas, shards = map(int, text.split("x"))
            return cls(replicate=replicas, shard=shards)
        pairs = [pair.split("=") for pair in text.split(",")]
        known, names = list(cls().sizes), [name for name, _ in pairs]
        for name in names:
            if name not in known or names.count(name) > 1:
                raise UserError(f"--mesh {text}: its dimensions are {', '.join(known)}, each named once at most")
        return cls(**{name: int(size) for name, size in pairs})

    @property
    def sizes(self) -> dict[str, int]:
        """{name: size} of all dimensions, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values()) // self.expert

    @property
    def data(self) -> int:
        """The number of parts that a batch has: ranks that see different sequences."""
        return self.replicate * self.shard

    def data_part(self, rank: int) -> int:
        """Return which part of a batch ``rank`` sees."""
        return rank // self.tensor // self.context % self.data

    def context_part(self, rank: int) -> int:
        """Return which part of each sequence ``rank`` sees."""
        return rank // self.tensor % self.context

    @property
    def shards(self) -> int:
        """The number of ranks among which FSDP shards a copy."""
        return self.shard * self.context


def arrange(ranks: int, mesh: str | None = None, reshard: str = "true") -> Mesh:
    """Return the mesh that --mesh describes; without it, all ranks shard one model.

    Args:
        ranks: how many there are.
        mesh: "2x4", or "shard=4,tensor=2".
        reshard: --reshard-after-forward: "true", "false", or "N".

    Raises:
        UserError: they do not fit the number of ranks.
    """
    arranged = Mesh.parse(mesh) if mesh else Mesh(shard=ranks)
    if arranged.ranks != ranks:
        raise UserError(f"--mesh {mesh} is for {arranged.ranks} ranks, but there are {ranks}")
    fits = arranged.shards * arranged.tensor % arranged.expert == 0 and arranged.expert % arranged.tensor == 0
    if arranged.expert > 1 and not fits:
        raise UserError(f"--mesh {mesh}: expert must divide shard x context x tensor, and be a multiple of tensor")
    if reshard.isdecimal() and arranged.shards % int(reshard):
        raise UserError(f"--reshard-after-forward {reshard} does not divide the {arranged.shards} ranks of a model")
    if reshard.isdecimal() and arranged.tensor > 1 and int(reshard) != arranged.shards:
        # FSDP2 builds the groups of N ranks from its own part of the mesh, and each tensor rank would build others.
        raise UserError(
            f"--reshard-after-forward {reshard} with tensor in --mesh hangs (torch 2.15): leave one of them out"
        )
    return arranged
