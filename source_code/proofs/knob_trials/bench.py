# SPDX-License-Identifier: BSD-3-Clause
"""What the trials of knobs share: a network and its plan, a traced step, and the list of trials."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from labkit.measuring.trace import StepTrace, local, peak, tensors_in, total
from planner.models.blueprint import AbstractModule, Blueprint
from planner.ops.autograd import INT64
from planner.step.plan import Plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, CLASSES, LAYERS, BATCH = 32, 16, 4, 2
FP32 = 4
LAYER, HEAD = WIDTH * WIDTH * FP32, CLASSES * WIDTH * FP32  # bytes of a layer's parameters, and of the root's
WEIGHTS = LAYERS * LAYER + HEAD
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """One setting of a knob.

    Attributes:
        knob: a name of ``knobs.names()``.
        setting: how it is set, in code.
        ranks: how many run it.
        function: function(this rank) → (predicted, measured): two dicts with the same keys. The prediction takes nothing
            from the run.
    """

    knob: str
    setting: str
    ranks: int
    function: Callable


TRIALS: list[Trial] = []


def trial(knob: str, setting: str, ranks: int = 2):
    """Add the decorated function to ``TRIALS``."""

    def add(function):
        TRIALS.append(Trial(knob, setting, ranks, function))
        return function

    return add


# The network: linear layers, each a unit, and a head, which is the root's


class Net(nn.Module):
    """Linear layers and ReLUs, then a head and a log-softmax; equal weights on every rank."""

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.log_softmax(self.head(x), dim=1)


def blueprint(wrapped: bool = True, pair: int | None = None) -> Blueprint:
    """Return ``Net`` for the planner.

    Args:
        wrapped: whether each layer is a unit.
        pair: the first of two layers that are one unit.
    """

    def layer(name, shape, **how):
        return AbstractModule(name, {"weight": shape}, lambda t, x, p: t.linear(x, p["weight"], None), **how)

    modules = []
    for number in range(LAYERS):
        modules.append(layer(f"layer {number}", (WIDTH, WIDTH), wrapped=wrapped, grouped_with_next=number == pair))
        modules.append(AbstractModule(f"relu {number}", {}, lambda t, x, _: t.relu(x, "relu")))
    modules.append(layer("top", (CLASSES, WIDTH)))
    modules.append(AbstractModule("log-softmax", {}, lambda t, x, _: t.log_softmax(x)))
    return Blueprint(
        name="Net",
        modules=tuple(modules),
        batch=lambda t, count, size: (
            t.constant("x", BATCH * WIDTH, size, count),
            t.constant("y", BATCH, INT64, count),
        ),
        loss=lambda t, x, y, size: t.nll_loss(t.to(x, size), y),
        samples=BATCH,
        flops=0.0,
    )


def planned(ranks: int, network: Blueprint | None = None, **options) -> dict:
    """Return the planner's prediction in the form of ``Traced.summary``; options: fields of ``Plan``."""
    plan = Plan(network or blueprint(), ranks=ranks, optimizer="sgd", torch=installed(), **options)
    traffic = Counter()
    for each in plan.traffic():
        traffic[f"{each['kind']} of {each['bytes']}"] += each["count"]
    return {"between steps": sum(plan.persistent().values()), "peak": sum(plan.peak()[1].values()), **traffic}


def installed() -> tuple[int, int]:
    """Return PyTorch's version: (2, 15)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# Sharding and training it


def mesh_of(me, *shape: int):
    """Return a device mesh: one dimension of all ranks, or (replicate, shard)."""
    shape = shape or (me.world_size,)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(me, model=None, mesh=None, **options) -> nn.Module:
    """Shard each layer as a unit of its own, then the root."""
    model, mesh = model or Net(), mesh or mesh_of(me)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch_of(me) -> tuple:
    """Return this rank's batch: (x, y)."""
    torch.manual_seed(1 + me.rank)
    return torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))


def step(model, optimizer, batches, before: Callable = lambda model, is_last: None) -> list:
    """Train for one step on some micro-batches, and return their losses.

    Args:
        model, optimizer: what is trained.
        batches: one for each micro-batch.
        before: before(model, whether it is the last one) runs before each micro-batch.
    """
    losses = []
    for number, (x, y) in enumerate(batches):
        before(model, number == len(batches) - 1)
        losses.append(F.nll_loss(model(x).float(), y))
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses


def trace(me, model, micro_batches: int = 1, run: Callable = step) -> StepTrace:
    """Train for some steps, and return the trace of one. A backend may free a buffer late: the lowest peak counts.

    Args:
        me: this rank.
        model: what is trained.
        micro_batches: in a step.
        run: run(model, optimizer, batches) → losses; by default ``step``.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    batches = [batch_of(me) for _ in range(micro_batches)]
    losses = run(model, optimizer, batches)
    recorder, found = StepTrace(model, optimizer, CPU), []
    for _ in range(3):
        recorder.batch = tuple(tensor for batch in batches for tensor in batch)
        with recorder:
            losses = run(model, optimizer, batches)  # those of the step before are alive until then
        recorder.batch = ()
        found.append(Traced(recorder.timeline(), dict(recorder.collectives)))
    del losses
    return min(found[1:], key=lambda traced: peak(traced.snapshots)[1])


@dataclass(frozen=True)
class Traced:
    """A traced step.

    Attributes:
        snapshots: see ``StepTrace.timeline``.
        collectives: see ``StepTrace``.
    """

    snapshots: list[dict]
    collectives: dict

    @property
    def traffic(self) -> dict[str, int]:
        """The step's collectives: {"kind of bytes": how many}."""
        found = Counter()
        for (kind, size, _), count in self.collectives.items():
            found[kind, size] += count
        return {f"{kind} of {size}": found[kind, size] for kind, size in sorted(found)}

    @property
    def between(self) -> int:
        """Bytes that stay from step to step: all but the batch, and the losses of the step before."""
        return total(self.snapshots[0]) - self.snapshots[0]["activations"]

    @property
    def summary(self) -> dict:
        """{"between steps", "peak": bytes, "kind of bytes": number of such collectives in the step}."""
        return {"between steps": self.between, "peak": peak(self.snapshots)[1], **self.traffic}

    @property
    def allocated(self) -> int:
        """Bytes that the step allocated, all together."""
        totals = [total(snapshot) for snapshot in self.snapshots]
        return sum(max(0, after - before) for before, after in pairwise(totals))

    @property
    def left(self) -> int:
        """Bytes that are alive at the end, and were not at the beginning."""
        return total(self.snapshots[-1]) - total(self.snapshots[0])

    def highest(self, category: str) -> int:
        """Return the largest number of bytes that a category has at any time of the step."""
        return max(snapshot[category] for snapshot in self.snapshots)


def watch(model, code: Callable) -> Traced:
    """Run code() while storages and collectives are traced, as part of no step."""
    recorder = StepTrace(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    with recorder:
        code()
        recorder.snapshots = recorder.timeline()
    return Traced(recorder.snapshots, dict(recorder.collectives))


def traffic(**kinds: dict[int, int]) -> dict[str, int]:
    """Return {"all-gather of 4096": 2, …} of all_gather={4096: 2}, …, without what does not happen."""
    each = ((kind.replace("_", "-"), size, count) for kind, sizes in kinds.items() for size, count in sizes.items())
    return {f"{kind} of {size}": count for kind, size, count in each if count}


def raised(code: Callable) -> str:
    """Return the name of the exception that code() raises; "nothing" if there is none."""
    try:
        code()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def agree(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same values. Collective."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(each, tensor) for each in every)


# The order of gathers: layers of different sizes, so that a gather's size names its unit


class Chain(nn.Module):
    """Layers a, b, c, then d, which is the root's."""

    WIDTHS = (8, 16, 24, 32, 40)
    NAMES = "abcd"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, before, after in zip(self.NAMES, self.WIDTHS, self.WIDTHS[1:], strict=False):
            self.add_module(name, nn.Linear(before, after, bias=False))

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


CHAIN = {
    before * after * FP32: n for n, before, after in zip(Chain.NAMES, Chain.WIDTHS, Chain.WIDTHS[1:], strict=False)
}
OPERATORS = {
    "c10d::_allgather_base_": ("gather", 0),
    "c10d::allgather_": ("gather", 0),  # FSDP1's, on a CPU
    "c10d::_reduce_scatter_base_": ("reduce", 1),
    "c10d::reduce_scatter_": ("reduce", 1),
}


class Order(TorchDispatchMode):
    """Record the order of a ``Chain``'s gathers, forwards, backwards, and reductions."""

    def __init__(self, model):
        super().__init__()
        self.events = []
        for name in Chain.NAMES:
            layer = model.get_submodule(name)
            layer.register_forward_hook(lambda *_, name=name: self.events.append(f"forward {name}"))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._schema.name in OPERATORS:
            kind, position = OPERATORS[operator._schema.name]
            size = sum(tensor.nbytes for tensor in tensors_in(args[position]))
            self.events.append(f"{kind} {CHAIN[size]}")
        result = operator(*args, **(kwargs or {}))
        if operator._schema.name == "aten::mm" and result.nbytes in CHAIN:  # the gradient of a layer's weight
            self.events.append(f"backward {CHAIN[result.nbytes]}")
        return result


def order_of(model, steps: int = 1) -> str:
    """Run forward and backward, and return the events of the last of some steps."""
    recorder = Order(model)
    for _ in range(steps):
        recorder.events.clear()
        with recorder:
            model(torch.ones(2, Chain.WIDTHS[0])).sum().backward()
    return ", ".join(recorder.events)


# Exact gradients: of a layer whose input is the rank's number plus one, so that each element's is that number


def linear(model=None, **options) -> nn.Module:
    """Return a sharded linear layer of 4 × 4 elements, or ``model``."""
    return fully_shard(model or nn.Linear(4, 4, bias=False), **options)


def gradient(me, model, rows: int = 1, scale: float = 1.0) -> float:
    """Return the first element of the gradient that this rank keeps, after a backward of scale × the sum of outputs.

    Before it is reduced, the gradient has rows × scale × (rank + 1) in each element.
    """
    (model(torch.full((rows, 4), me.rank + 1.0)).float().sum() * scale).backward()
    return local(model.weight.grad).flatten()[0].item()


@contextmanager
def quiet():
    """Run without warnings, and free what has cycles afterwards: the next trial shall not see it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.collect()


def run_here(me, trials: list[Trial]) -> list[tuple[dict, dict]]:
    """Run trials on this rank, one after another, and return what each predicts and measures. Collective."""
    torch.set_num_threads(1)
    found = []
    for each in trials:
        dist.barrier()
        with quiet():
            found.append(each.function(me))
    return found
