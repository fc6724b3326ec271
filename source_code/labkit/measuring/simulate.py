"""Simulate one rank of a larger world: the real PyTorch code, on tensors that have shapes but no memory.

  simulate.join(128)                       this process becomes rank 0 of a simulated world of 128; collectives send nothing
  memory = simulate.step(setup)            trace one training step by the tracer that also measures real ones
  memory = simulate.step(setup, gpu)       with a GPU's operators (gpu_operators.py)
  with simulate.real_tensors(): …          inside setup, around what makes device meshes

The result is *simulated*, never measured: FSDP, autograd and the optimizer ran, and allocated nothing.
DDP cannot be simulated: its reducer reads the tensors' elements.

Private PyTorch used here, and only here: ``FakeTensorMode`` and its switch, the process group of the kind "fake",
how FSDP2 cuts a parameter, how DTensor decides whether to use its cache, and ``FSDPMemTracker``.
"""

import contextlib
import os
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
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
from labkit.measuring.gpu_operators import GpuOperators, GpuTrace
from labkit.measuring.replaced import replaced
from labkit.measuring.trace import CATEGORIES, StepTrace, listed, peak


def join(world_size: int):
    """Make this process rank 0 of a simulated world of ``world_size`` (PyTorch's fake process group), leaving any earlier one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def step(setup, gpu: GpuOperators | None = None, workspaces: bool = True) -> dict:
    """Trace a steady training step on rank 0 of the simulated world.

    Args:
        setup: called without arguments, on tensors without memory; returns (model, optimizer, batch, train). ``batch``
            is a tuple of tensors, and ``train(*batch)`` is one step, forward to ``zero_grad``. It must make its tensors
            itself, and its device meshes (``fully_shard`` may make one too) before, outside, or in ``real_tensors()``.
        gpu: a GPU's operators instead of the CPU's.
        workspaces: whether to count what a GPU's operators allocate inside them.

    Returns:
        What a record has under "memory" and "traffic": {"peak": {category: bytes}, "peak_phase", "peak_operator",
        "start", "timeline", "traffic": [{"kind", "count", "bytes", "dimension"}, …]}.
    """
    with _fake_tensors() as counters:
        model, optimizer, batch, train = setup()
        counters.optimizer = optimizer
        about = model, optimizer, torch.device("meta")  # where fake tensors have their storage
        trace = GpuTrace(gpu, workspaces, *about) if gpu else StepTrace(*about)
        with gpu or contextlib.nullcontext():
            train(*batch)  # makes the optimizer's state
            trace.batch = batch
            with trace:
                train(*batch)
    timeline = trace.timeline()
    highest, _ = peak(timeline)
    return {
        "peak": {category: highest[category] for category in CATEGORIES},
        "peak_phase": highest["phase"],
        "peak_operator": highest["operator"],
        "start": {category: timeline[0][category] for category in CATEGORIES},
        "timeline": [[moment["phase"], *(moment[category] for category in CATEGORIES)] for moment in timeline],
        "traffic": listed(trace.collectives),
    }


def tracked_peak(setup) -> int:
    """Return the bytes alive at the peak of two steps, by PyTorch's own tracker for ``fully_shard``. setup: see ``step``."""
    with _fake_tensors() as counters:
        model, optimizer, batch, train = setup()
        counters.optimizer = optimizer
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            train(*batch)
            tracker.reset_mod_stats()
            train(*batch)
    return sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())


@contextlib.contextmanager
def _fake_tensors():
    # The first step fills DTensor's cache of what its operators return, as it does in a real run. On tensors without
    # memory DTensor would think that it is being compiled, and work it out each time, on whole parameters.
    cached = replaced(_dispatch, _are_we_tracing=lambda: False)
    with FakeTensorMode(allow_non_fake_inputs=True), _Counters() as counters, cached, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP1 asks whether there is one
        try:
            yield counters
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"{_innermost_line(error)} reads a tensor's elements, and simulated tensors have none: "
                "shapes or control flow that depend on data cannot be planned"
            ) from error


def _innermost_line(error: Exception) -> str:
    """Return "FILE, line N" of the innermost code outside PyTorch and labkit that an error came through."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "PyTorch"


@contextlib.contextmanager
def real_tensors():
    """Make new tensors real within the context: a device mesh has its ranks in a tensor, and reads them."""
    with unset_fake_temporarily(), replaced(_fsdp_param, _chunk_with_empty=_Parts):
        yield


class _Parts:
    """A tensor's parts, one per rank, each cut when it is asked for.

    FSDP2 cuts every parameter into as many tensors as there are ranks and keeps one. For a thousand ranks, making
    tensors that are only thrown away took most of a simulation's time.
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
    """Return 1 where the optimizer reads one of its step counters, which have no memory either.

    Every other read of a tensor's element reaches ``FakeTensorMode``, which refuses it unless the element is known.
    """

    optimizer = None  # the one that is simulated, once there is one

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator._schema.name == "aten::_local_scalar_dense" and self.optimizer:
            if any(state.get("step") is args[0] for state in self.optimizer.state.values()):
                return 1.0
        return operator(*args, **(kwargs or {}))
