# SPDX-License-Identifier: BSD-3-Clause
"""The slow step of exercise 12.1, and a counter of what a step costs."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from labkit.measuring.trace import CATEGORIES, StepTrace, peak


def slow_step(model, optimizer, batch):
    """Run a step on this rank and return (mean loss, share of tokens predicted correctly) as floats.

    batch: (inputs, targets) of each micro-batch, of shape (sequences, tokens).
    """
    losses, rights = [], []
    for inputs, targets in batch:
        # The log comes first: a forward without backward leaves the root gathered, and after optimizer.step() that copy
        # would be out of date.
        with torch.no_grad():  # for the log
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            guesses = model(inputs).argmax(-1)
            rights.append((guesses == targets).float().mean().item())
        logits = model(inputs).double()  # float64, to be safe
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss / len(batch)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return sum(losses) / len(batch), sum(rights) / len(batch)


class Work(TorchDispatchMode):
    """Count the work that runs in its context on this rank.

    operations: floating-point operations of matmuls and attention. reads: values the host read, each of which
    synchronizes with a GPU. wide: tensors in float64. zeros: tensors filled with zeros.
    """

    def __init__(self):
        super().__init__()
        self.operations = self.reads = self.wide = self.zeros = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor turns this into operators on its local tensor, which arrive here
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name
        if count := flop_registry.get(operator.overloadpacket):
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        self.reads += name == "aten::_local_scalar_dense"
        self.wide += any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(result))
        self.zeros += len(args[0]) if name == "aten::_foreach_zero_" else name == "aten::zero_"
        return result


def work_of(step, model, optimizer, batch, device) -> dict:
    """Run ``step(model, optimizer, batch)`` six times; return its results and the cost of one step on this rank.

    {"returned": […], "forwards", "operations", "reads", "wide", "zeros": of a step; "traffic": {(kind, bytes,
    dimension): how many}, "peak": {category: bytes} at the peak, of a step that was traced}. Collective.
    """
    returned, traced, forwards = [step(model, optimizer, batch)], [], []
    trace, work = StepTrace(model, optimizer, device), Work()
    trace.batch = tree_leaves(batch)
    for _ in range(4):  # the first warms up the tracer; the lowest peak of the others counts, as in the meter
        with trace:
            returned.append(step(model, optimizer, batch))
        traced.append(peak(trace.timeline()))
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with work:
        returned.append(step(model, optimizer, batch))
    hook.remove()
    highest, _ = min(traced[1:], key=lambda snapshot: snapshot[1])
    return {
        "returned": returned,
        "forwards": len(forwards),
        "operations": work.operations,
        "reads": work.reads,
        "wide": work.wide,
        "zeros": work.zeros,
        "traffic": dict(trace.collectives),
        "peak": {category: highest[category] for category in CATEGORIES},
    }
