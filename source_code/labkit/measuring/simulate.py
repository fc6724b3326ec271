# SPDX-License-Identifier: BSD-3-Clause
"""Simulate one rank of a larger world: run PyTorch's own code on fake tensors, which have shapes but no memory.

  simulate.join(128)                       become rank 0 of a simulated world of 128 ranks; its collectives send nothing
  memory = simulate.step(setup)            trace one training step with the tracer that measures real steps
  memory = simulate.step(setup, gpu)       with a GPU's operators (gpu_operators.py)
  with simulate.real_tensors(): …          inside setup, around code that creates device meshes

The result is *simulated*, not measured: FSDP, autograd, and the optimizer run, but allocate nothing. For many equal blocks it
may be extended from few (labkit/measuring/equal_blocks.py).
DDP's reducer cannot run, as it reads the tensors' elements: its buckets are added to the step of one process.

Private PyTorch used here, and only here: ``FakeTensorMode`` and its switch, the "fake" process group, FSDP2's chunking of
a parameter, DTensor's decision whether to use its cache, and ``FSDPMemTracker``.
"""

import contextlib
import os
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from planner.parallel.traffic import bucket_sizes
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _dispatch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import UserError
from labkit.measuring import foreach_sharding
from labkit.measuring.gpu_operators import GpuOperators, GpuTrace
from labkit.measuring.replaced import replaced
from labkit.measuring.trace import CATEGORIES, StepTrace, listed, peak, snapshots


def join(world_size: int):
    """Make this process rank 0 of a simulated world of ``world_size`` ranks (PyTorch's fake process group).

    An existing process group is destroyed first.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def step(setup, gpu: GpuOperators | None = None, workspaces: bool = True, ddp_reductions: int = 0) -> dict:
    """Trace a steady training step on rank 0 of the simulated world.

    Args:
        setup: called without arguments under ``FakeTensorMode``; returns (model, optimizer, batch, train). ``batch`` is a
            tuple of tensors, and ``train(*batch)`` is one step, forward to ``zero_grad``. ``setup`` must create its
            tensors itself. Device meshes, including those that ``fully_shard`` creates, must be created before, or within
            ``real_tensors()``.
        gpu: a GPU's operators instead of the CPU's.
        workspaces: whether to count the workspaces of a GPU's operators.
        ddp_reductions: how often DDP reduces the gradients in a step, to add what DDP adds; 0: without DDP.

    Returns:
        The keys "memory" and "traffic" of a record, merged: {"peak": {category: bytes}, "peak_phase", "peak_operator",
        "start", "timeline", "traffic": [{"kind", "count", "bytes", "dimension"}, …]}.
    """
    return summary(*traced(setup, gpu, workspaces, ddp_reductions))


def traced(setup, gpu: GpuOperators | None = None, workspaces: bool = True, ddp_reductions: int = 0) -> tuple:
    """Trace a step as ``step`` does, and return what ``StepTrace.traced`` does, with what DDP adds."""
    with _fake_tensors() as counters:
        model, optimizer, batch, train = setup()
        counters.optimizer = optimizer
        watched = model, optimizer, torch.device("meta")  # the device of fake tensors' storages
        trace = GpuTrace(gpu, workspaces, *watched) if gpu else StepTrace(*watched)
        ready = []  # parameters, in the order in which their gradients are
        with gpu or contextlib.nullcontext():
            with _watch_gradients(model if ddp_reductions else None, ready):
                train(*batch)  # the optimizer creates its state
            trace.batch = batch
            with trace:
                train(*batch)
        buckets = bucket_sizes([parameter.nbytes for parameter in dict.fromkeys(ready)])
        buffers = Counter()  # by dtype: DDP broadcasts those of a dtype together
        for buffer in model.buffers() if ddp_reductions else ():
            buffers[buffer.dtype] += buffer.nbytes
    start, events, collectives = trace.traced()
    for size in buckets:
        collectives["all-reduce", size, None] += ddp_reductions
    for size in buffers.values():
        collectives["broadcast", size, None] += ddp_reductions
    start["all-reduce buckets"] += sum(buckets)
    return start, events, collectives


def summary(start: dict, events: list[tuple], collectives: Counter) -> dict:
    """Return what ``step`` does, of what ``traced`` returned."""
    timeline = snapshots(start, events)
    highest, _ = peak(timeline)
    return {
        "peak": {category: highest[category] for category in CATEGORIES},
        "peak_phase": highest["phase"],
        "peak_operator": highest["operator"],
        "start": start,
        "timeline": [[snapshot["phase"], *(snapshot[name] for name in CATEGORIES)] for snapshot in timeline],
        "traffic": listed(collectives),
    }


@contextlib.contextmanager
def _watch_gradients(model, ready: list):
    """Append each parameter of a model to ``ready`` when its gradient is accumulated; None: watch nothing."""
    trained = [p for p in model.parameters() if p.requires_grad] if model is not None else []
    handles = [parameter.register_post_accumulate_grad_hook(ready.append) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tracked_peak(setup) -> int:
    """Return the peak bytes of two steps, as PyTorch's own ``FSDPMemTracker`` reports them. setup: see ``step``."""
    with _fake_tensors() as counters:
        model, optimizer, batch, train = setup()
        counters.optimizer = optimizer
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            train(*batch)
            tracker.reset_mod_stats()
            train(*batch)
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


@contextlib.contextmanager
def _fake_tensors():
    # The first step fills DTensor's cache of sharding propagation, as in a real run. With fake tensors DTensor would
    # assume that it is being compiled, and propagate again each time, on whole parameters.
    cached = replaced(_dispatch, _are_we_tracing=lambda: False)
    quick = foreach_sharding.once_for_alike()
    with FakeTensorMode(allow_non_fake_inputs=True), _Counters() as counters, cached, quick, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP1 checks it
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor"
        )  # some modules of transformers
        try:
            yield counters
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"{_innermost_line(error)} reads a tensor's elements, and simulated tensors have none: "
                "shapes or control flow that depend on data cannot be planned"
            ) from error


def _innermost_line(error: Exception) -> str:
    """Return "FILE, line N" of the innermost frame of an error that is outside PyTorch and labkit."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "PyTorch"


@contextlib.contextmanager
def real_tensors():
    """Create real tensors within this context: a device mesh stores its ranks in a tensor and reads them."""
    with unset_fake_temporarily(), replaced(_fsdp_param, _chunk_with_empty=_LazyChunks):
        yield


def allocate(model):
    """Replace a model's tensors on the meta device by fake ones on the CPU, in place. Shared tensors stay shared.

    Some of what builds a model, such as peft, does not work on fake tensors, but does on the meta device.
    """
    made = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = torch.empty_like(tensor, device="cpu", requires_grad=False)
                    if isinstance(tensor, torch.nn.Parameter):
                        made[tensor] = torch.nn.Parameter(made[tensor], tensor.requires_grad)
                tensors[name] = tensor if tensor is None else made[tensor]


class _LazyChunks:
    """Chunk a tensor along a dimension, one chunk per rank, each created when it is indexed.

    FSDP2 chunks every parameter into one tensor per rank and uses only its own. With a thousand ranks, creating the
    unused ones took most of a simulation's time.
    """

    def __init__(self, tensor, count: int, dim: int):
        self.tensor, self.count, self.dim = tensor, count, dim

    def __getitem__(self, rank: int):
        length = self.tensor.size(self.dim)
        size = -(-length // self.count)
        if rank * size >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rank * size, min(size, length - rank * size))


class _Counters(TorchDispatchMode):
    """Return 1 where the optimizer reads one of its step counters, which are fake tensors, too.

    A functional collective's result is the tensor that is waited for, as in a real run: the fake wait would copy it. Every
    other read of a tensor's element reaches ``FakeTensorMode``, which raises unless the element is known.
    """

    optimizer = None  # set by ``setup``'s caller

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._schema.name == "aten::_local_scalar_dense" and self.optimizer:
            if any(state.get("step") is args[0] for state in self.optimizer.state.values()):
                return 1.0
        if operator._schema.name == "_c10d_functional::wait_tensor":
            return args[0]
        return operator(*args, **(kwargs or {}))
