# SPDX-License-Identifier: BSD-3-Clause
"""Set arguments and methods of FSDP2 that no lab has an option for, while a lab shards its model (configurations.KNOBS)."""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

from labkit import UserError
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

BUFFERS = "set_reduce_scatter_max_input_buffers"


def check(knobs: dict):
    """Raise UserError if the installed PyTorch lacks a setting."""
    if knobs.get("reduce_buffers", 1) > 1 and not hasattr(fsdp.FSDPModule, BUFFERS):
        raise UserError(f"this PyTorch has no {BUFFERS}: use a newer one")


@contextmanager
def sharding(knobs: dict) -> Callable:
    """Shard with these settings in this context; yields a function that sets on the sharded model what has a method.

    Args:
        knobs: by the names of ``Plan``'s fields: "shard_dim", "reduce_buffers".
    """
    chosen = functools.partial(_fully_shard, fsdp.fully_shard, knobs.get("shard_dim", 0))
    with mock.patch.object(fsdp, "fully_shard", chosen):
        yield functools.partial(_set_buffers, knobs.get("reduce_buffers", 1))


def _fully_shard(original: Callable, dim: int, module, *, mesh, **options):
    """Call fully_shard with a placement along ``dim`` for parameters that divide evenly along it: others it refuses."""

    def placement(parameter):
        return Shard(dim if parameter.ndim > dim and parameter.shape[dim] % mesh.size(-1) == 0 else 0)

    return original(module, mesh=mesh, shard_placement_fn=placement if dim else None, **options)


def _set_buffers(count: int, model):
    if count > 1:
        getattr(model, BUFFERS)(count)
