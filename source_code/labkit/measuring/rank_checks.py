# SPDX-License-Identifier: BSD-3-Clause
"""Name the rank on which numbers go wrong: the first value that is not finite, and replicas whose bits differ.

  check = FirstNonFinite(device)
  for step in range(steps):
      check.see(step, loss)                   every step: no collective, and the device is not waited for
      if step % 100 == 0:
          check.raise_if_any()                a collective: every rank raises if any rank has seen one
          raise_if_replicas_differ(model)     a collective, where every rank holds the same parameters (DDP)

A NaN spreads to all ranks with the next reduction of gradients. The rank and the step at which it began can be named
afterwards only if each rank has looked at its own loss before that.

Replicas are updated with the same gradients, so their bits stay equal. A bit that flips in the memory of one rank makes
them differ from then on. A wrong gradient does not: it is averaged into all replicas. Shards without a replica (FSDP on
one mesh dimension) cannot be compared.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from labkit.measuring.trace import local

NEVER = torch.iinfo(torch.int64).max
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {bytes per element: type to read bits as}


class NotFinite(RuntimeError):
    """A rank has seen a value that is NaN or infinite."""


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold the same bits do not."""


class FirstNonFinite:
    """Remember the step at which a value of this rank first was not finite."""

    def __init__(self, device: torch.device | str):
        self.first = torch.full((), NEVER, dtype=torch.int64, device=device)

    def see(self, step: int, *values: torch.Tensor):
        """Look at this rank's values of a step, such as its loss before it is reduced."""
        finite = torch.stack([value.detach().isfinite().all() for value in values]).all()
        self.first = torch.where(finite, self.first, self.first.clamp(max=step))

    def origin(self, group: dist.ProcessGroup | None = None) -> tuple[int, list[int]] | None:
        """Return (the first step, the ranks whose value was not finite at that step), or None. Collective."""
        firsts = self.first.new_empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(firsts, self.first.reshape(1), group=group)
        firsts = firsts.tolist()
        if min(firsts) == NEVER:
            return None
        members = dist.get_process_group_ranks(group)
        return min(firsts), [rank for rank, first in zip(members, firsts, strict=True) if first == min(firsts)]

    def raise_if_any(self, group: dist.ProcessGroup | None = None):
        """Raise ``NotFinite`` on every rank, with the rank and the step, if any rank has seen a bad value. Collective."""
        if found := self.origin(group):
            step, some = found
            what = "all ranks at once, so look at the weights" if len(some) == dist.get_world_size(group) else ""
            raise NotFinite(f"the first value that is not finite was at step {step} on {what or _ranks(some)}")


def digests(model: torch.nn.Module) -> torch.Tensor:
    """Return one integer per parameter: the sum of this rank's elements, whose bits are read as integers.

    Integers add up to the same sum in any order. One flipped bit always changes it.
    """
    parts = (local(parameter).detach().contiguous() for parameter in model.parameters())
    return torch.stack([part.view(INTEGERS[part.element_size()]).sum(dtype=torch.int64) for part in parts])


def differing(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, list[list[int]]]:
    """Return {parameter: ranks with equal bits, the largest set first} of parameters that differ. Collective.

    Args:
        model: the same on all ranks.
        group: ranks that hold the same parameters, or the same shard of them (HSDP: the replicate dimension's group).
    """
    mine = digests(model)
    all_digests = mine.new_empty(dist.get_world_size(group) * len(mine))
    dist.all_gather_into_tensor(all_digests, mine, group=group)
    members, found = dist.get_process_group_ranks(group), {}
    for (name, _), sums in zip(model.named_parameters(), all_digests.reshape(-1, len(mine)).T.tolist(), strict=True):
        alike = defaultdict(list)
        for rank, total in zip(members, sums, strict=True):
            alike[total].append(rank)
        if len(alike) > 1:
            found[name] = sorted(alike.values(), key=lambda some: -len(some))
    return found


def raise_if_replicas_differ(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None, everyone: dist.ProcessGroup | None = None
):
    """Raise ``ReplicasDiffer`` on every rank if any replicas differ. Collective.

    Args:
        model, group: as for ``differing``.
        everyone: all ranks of the run (default: the default group).
    """
    found = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(found, differing(model, group), group=everyone)
    if sentences := sorted({_sentence(of_rank) for of_rank in found if of_rank}):
        raise ReplicasDiffer("; ".join(sentences))


def _sentence(found: dict) -> str:
    name, (usual, *others) = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    if len(usual) > sum(map(len, others)):
        odd = [rank for some in others for rank in some]
        return f"{_ranks(odd)} holds other bits than {len(usual)} replicas: {name}{more}"
    some = sorted(rank for some in (usual, *others) for rank in some)
    return f"{_ranks(some)} hold different bits, and there is no majority: {name}{more}"


def _ranks(some: list[int]) -> str:
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
