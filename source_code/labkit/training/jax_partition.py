# SPDX-License-Identifier: BSD-3-Clause
"""Choose how each array of gpt_jax.py is sharded, and read its weights from a file.

The arithmetic of the same rule, without JAX: planner/parallel/jax_sharding.py.
"""

from contextlib import contextmanager
from math import prod
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from labkit import UserError
from labkit.training import hf_files, jax_models

# The dimension of a weight, (in, out), that is sharded along the axis "tensor": the first matmul of a pair is
# column-parallel, the second row-parallel (arXiv:1909.08053).
TENSOR = {name: -1 for name in ("query", "key", "value", "gate", "up", "head")} | {"output": -2, "down": -2}


def partition(name: str, shape: tuple, min_size: float, axes: dict) -> P:
    """Return the partition spec of a leaf: P(None, "fsdp") shards the second dimension, P() none.

    The axis fsdp shards the largest dimension that it divides, except the layer axis, over which the model's loop runs.
    The axis tensor shards the dimension in ``TENSOR``.

    Args:
        name: of the leaf.
        shape: of the leaf.
        min_size: leaves of fewer elements are replicated: there is little to save, and each would need a collective.
        axes: {axis of the mesh: number of devices along it}.

    Raises:
        UserError: no dimension of a large leaf is divisible. It is not replicated silently, so that each device has
            exactly its share of all sharded leaves.
    """
    if prod(shape) < min_size:
        return P()
    free = set(range(1 if name.startswith(jax_models.STACK) else 0, len(shape)))
    where = dict.fromkeys(range(len(shape)))
    if axes.get("tensor", 1) > 1 and (rule := TENSOR.get(name.split(".")[-2])):
        where[len(shape) + rule] = "tensor"
        free.discard(len(shape) + rule)
    dividable = [dim for dim in sorted(free) if shape[dim] % axes["fsdp"] == 0]
    if not dividable:
        raise UserError(
            f"no dimension of {name}, {shape}, can be cut into {axes['fsdp']} equal parts: "
            f"take another number of devices, or --min-size {prod(shape) + 1}, which leaves it whole"
        )
    where[max(dividable, key=lambda dim: shape[dim])] = "fsdp"
    return P(*where.values())


def shardings(shapes, min_size: float, mesh):
    """Return the shardings of a tree of shapes, such as the parameters, by ``partition``."""
    leaves, structure = jax.tree.flatten(shapes)
    named = zip(jax_models.names(shapes), leaves, strict=True)
    specs = [partition(name, leaf.shape, min_size, dict(mesh.shape)) for name, leaf in named]
    return jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])


@contextmanager
def weights(file: str, shapes):
    """Open a file that export.py has written, and yield {name in PyTorch: slice of the file}; nothing is read yet.

    Args:
        file: of safetensors.
        shapes: tree of shapes that it must have, as ``jax_models.structure`` returns it.

    Raises:
        UserError: it is not whole, or of another model.
    """
    if not Path(file).is_file():
        raise UserError(f"--weights {file} is not there: name a file that export.py has written")
    wanted = jax_models.in_files(shapes)
    with hf_files.opened(Path(file)) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}
        for name in wanted | slices:
            found = tuple(slices[name].get_shape()) if name in slices else None
            if found != wanted.get(name):
                raise UserError(
                    f"--weights {file} is of another model than --preset: its {name} is {found or 'missing'}, and "
                    f"{wanted.get(name) or 'no such tensor'} is expected"
                )
        yield slices
