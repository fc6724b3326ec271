# SPDX-License-Identifier: BSD-3-Clause
"""Propagate the sharding of foreach operators once for tensors that are alike.

  with once_for_alike(): …          the first step of a foreach or fused optimizer takes less time, with the same result

Such optimizers pass all parameters to an operator. The first time, DTensor computes for each of them what the operator
returns, expands its possible shardings, and chooses one. A transformer's equal blocks have many parameters, but few
kinds. In a run of four steps that took 43 % of the ranks' time under py-spy (GPT, FSDP2, 4 ranks on two CPU cores), and
more than half of a simulation of Llama 3's 405B under cProfile. The sharding of a foreach operator's element depends on
nothing but its own inputs (torch/distributed/tensor/_op_schema.py, ``TupleStrategy``).

Private PyTorch used here, and only here: DTensor's sharding propagation, its cache, and the specifications it exchanges.
With a PyTorch that lacks one of them nothing is replaced, and the first step takes its time.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

from labkit.measuring.replaced import replaced

try:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
    from torch.distributed.tensor._sharding_prop import LocalLRUCache

    propagator = DTensor._op_dispatcher.sharding_propagator
except (ImportError, AttributeError):
    propagator = None

# A list's elements are independent of one another; in _amp_foreach_ operators they have a result in common.
OF_EACH_ELEMENT = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd")


@contextlib.contextmanager
def once_for_alike() -> Iterator[None]:
    """Make DTensor propagate the sharding of foreach operators once for tensors that are alike, within this context."""
    if not (hasattr(propagator, "propagate_op_sharding") and hasattr(propagator, "propagate_op_sharding_non_cached")):
        yield
        return
    quick = functools.partial(_propagated, propagator.propagate_op_sharding_non_cached)
    with replaced(propagator, propagate_op_sharding_non_cached=quick, propagate_op_sharding=LocalLRUCache(quick)):
        yield


def _propagated(propagate: Callable, schema: "OpSchema") -> "OutputSharding":
    """Return what ``propagate`` returns for an operator, which it sees with one element of each kind of its lists."""
    if not schema.op.name().startswith(OF_EACH_ELEMENT):
        return propagate(schema)
    kinds = [*zip(*filter(_is_of_tensors, schema.args_schema), strict=True)]
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    if len(first) == len(kinds):
        return propagate(schema)
    some = tuple(_elements(each, first, len(kinds)) for each in schema.args_schema)
    sharding = propagate(OpSchema(schema.op, some, schema.kwargs_schema, schema.schema_info))
    if sharding.needs_redistribute:
        return propagate(schema)  # its inputs' new shardings are those of all elements
    if sharding.output_spec is None:  # in place
        return sharding
    by_kind = dict(zip(first, sharding.output_spec, strict=True))
    return OutputSharding(tuple(by_kind[kind] for kind in kinds))


def _is_of_tensors(argument) -> bool:
    return isinstance(argument, list | tuple) and any(isinstance(each, DTensorSpec) for each in argument)


def _elements(argument, kinds: dict, length: int):
    """Return one element of each kind of an argument that is a list of that length; any other argument as it is."""
    if isinstance(argument, list | tuple) and len(argument) == length:
        return type(argument)(argument[index] for index in kinds.values())
    return argument
