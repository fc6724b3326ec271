"""How the ranks are arranged: a grid with named dimensions. Imports no torch."""

import re
from dataclasses import dataclass, fields
from math import prod

from planner import UserError

# What --mesh accepts: the two dimensions of HSDP without their names, or any by name.
FORM = (r"[1-9]\d*x[1-9]\d*|\w+=[1-9]\d*(,\w+=[1-9]\d*)*", "REPLICASxSHARDS, such as 2x4, or NAME=SIZE,NAME=SIZE")


@dataclass(frozen=True)
class Mesh:
    """The sizes of the dimensions, from the outermost to the innermost: the last counts neighbouring ranks.

    pipeline: stages, each with its part of the layers. replicate: copies of the model. shard: ranks that share a
    copy, as FSDP shares it. tensor: ranks that share each matrix product.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @classmethod
    def read(cls, text: str) -> "Mesh":
        """Read what --mesh accepts (``FORM``); what it does not name has one rank. UserError: a name is not known."""
        if re.fullmatch(r"\d+x\d+", text):
            replicas, shards = map(int, text.split("x"))
            return cls(replicate=replicas, shard=shards)
        pairs = [pair.split("=") for pair in text.split(",")]
        known, given = list(cls().sizes), [name for name, _ in pairs]
        for name in given:
            if name not in known or given.count(name) > 1:
                raise UserError(f"--mesh {text}: its dimensions are {', '.join(known)}, each named once at most")
        return cls(**{name: int(size) for name, size in pairs})

    @property
    def sizes(self) -> dict[str, int]:
        """{name: size} of all dimensions, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @property
    def data(self) -> int:
        """How many parts a batch has: ranks that see different sequences."""
        return self.replicate * self.shard

    def data_part(self, rank: int) -> int:
        """Which part of a batch ``rank`` sees."""
        return rank // self.tensor % self.data


def arrange(ranks: int, mesh: str | None = None, reshard: str = "true") -> Mesh:
    """The mesh that --mesh describes: "2x4", or "shard=4,tensor=2"; without it, all ranks share one model.

    reshard: "true", "false", or "N". UserError where they do not fit the number of ranks.
    """
    found = Mesh.read(mesh) if mesh else Mesh(shard=ranks)
    if found.ranks != ranks:
        raise UserError(f"--mesh {mesh} is for {found.ranks} ranks, but there are {ranks}")
    if reshard.isdecimal() and found.shard % int(reshard):
        raise UserError(f"--reshard-after-forward {reshard} does not divide the {found.shard} ranks of a model")
    return found
