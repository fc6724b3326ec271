"""Measure a training loop: peak memory, step time, collectives; on CPU and CUDA alike.

Memory and time are measured on different steps, because a tracer slows what it watches:

  step 0        nothing: the optimizer's state is made here, and caches fill
  step 1        CUDA only: the allocator's peaks
  steps 2 to 4  every storage and collective traced (``labkit.measuring.trace``). The first of them only makes the tracer
                acquainted; of the others the one with the lower peak is kept, because a backend's thread
                can let go of a buffer a moment late, which adds to a peak but never takes from it
  step 7 on     time: from the end of one step to the end of the next, fetching the batch included
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from planner import gpus

from labkit import UserError
from labkit.measuring import host_memory
from labkit.measuring.trace import CATEGORIES, StepTrace, listed, peak

ALLOCATOR_STEP = 1
TRACED_STEPS = range(2, 5)
FIRST_TIMED_STEP = 7
PROFILED = {"wait": 7, "warmup": 1, "active": 3}


class Meter:
    """Watches a loop: ``for batch in meter.watch(batches): train on it``. What it saw is in ``summary()``.

    progress: is told of every step by ``advance()``, and closed by ``finish()`` (running/progress.py).
    profile: a folder for a trace of a few steps that Perfetto and TensorBoard open, or None.
    compiled: the step has compiled parts. PyTorch runs them uncompiled while it is watched: the collectives are
    the same, the storages are not, so that memory is then the allocator's alone.
    """

    def __init__(self, model, optimizer, device, *, progress, profile: str | None = None, compiled=False):
        self.device, self.progress, self.compiled = device, progress, compiled
        self.step = 0
        self.timed = []  # (begin, end) of each step to time
        self.trace = StepTrace(model, optimizer, device)
        self.timeline = self.collectives = self.allocator = None
        self.profiler = _profiler(profile, progress.total - progress.step) if profile else None
        # A profiled step is no step to time.
        self.first_timed = sum(PROFILED.values()) + 1 if profile else FIRST_TIMED_STEP

    def watch(self, batches: Iterable) -> Iterator:
        """Yield the batches; what the caller does between one and the next is a step."""
        end = self._now()
        for batch in batches:
            if self.step == ALLOCATOR_STEP and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.trace.batch = batch
            with self.trace if self.step in TRACED_STEPS else contextlib.nullcontext():
                yield batch
            if self.step in TRACED_STEPS:
                self._keep_trace()
            if self.step == ALLOCATOR_STEP and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self.allocator = _allocator_peaks(self.device)
            start, end = end, self._now()
            if self.step >= self.first_timed:
                self.timed.append((start, end))
            if self.profiler:
                self.profiler.step()
            self.step += 1
            self.progress.advance()

    def _now(self):
        """This moment: seconds, or on a GPU an event in its stream, so that the CPU may run ahead as it does unwatched."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_times(self, skipped: int = 0) -> list[float]:
        """Return the seconds of each step timed so far, without the first ``skipped`` of them."""
        if self.device.type != "cuda":
            return [end - start for start, end in self.timed[skipped:]]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in self.timed[skipped:]]

    def peak_memory(self) -> int | None:
        """Return the peak memory of this rank in bytes, between two steps: for a log while the run goes on.

        Returns:
            On a GPU the allocator's peak of allocated bytes since the last call; on the CPU the peak of the traced
            steps; None before there is one.
        """
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)  # the step that measures it resets it, too
            return allocated
        return peak(self.timeline)[1] if self.timeline and not self.compiled else None

    def _keep_trace(self):
        self.trace.batch = ()
        timeline = self.trace.timeline()
        if self.step == TRACED_STEPS[0]:
            return
        if self.timeline is None or peak(timeline)[1] < peak(self.timeline)[1]:
            self.timeline, self.collectives = timeline, dict(self.trace.collectives)

    def finish(self):
        """Close what is open: the profiler's trace and the progress bar."""
        if self.profiler:
            self.profiler.stop()
        self.progress.close()

    def summary(self, global_batch: int) -> dict:
        """{"memory", "time", "traffic"} for a record. Collective: every rank must call it.

        memory is None if the run was too short; else its keys are as follows, of a compiled step on CUDA with None
        for all but the allocator's, on the CPU None.
          "peak": bytes by category at the peak, "peak_phase" and "peak_operator": where it is,
          "start": bytes by category as a step begins, "timeline": [phase, bytes by category …] of one step,
          all of rank 0; "peak_by_rank": total bytes per rank; "allocator": CUDA's figures of rank 0, or None.
        """
        highest, size = peak(self.timeline) if self.timeline else (None, None)
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, size)
        memory = traffic = None
        if self.timeline and self.compiled:
            keys = ("peak", "peak_phase", "peak_operator", "start", "timeline", "peak_by_rank")
            memory = self.allocator and dict.fromkeys(keys) | {"allocator": self.allocator}
        elif self.timeline:
            memory = {
                "peak": _bytes(highest),
                "peak_phase": highest["phase"],
                "peak_operator": highest["operator"],
                "start": _bytes(self.timeline[0]),
                "timeline": [[m["phase"], *_bytes(m).values()] for m in self.timeline],
                "peak_by_rank": sizes,
                "allocator": self.allocator,
            }
        if self.timeline:
            traffic = listed(self.collectives)
        return {"memory": memory, "time": times(self.step_times(), global_batch), "traffic": traffic}


def _bytes(moment: dict) -> dict:
    return {category: moment[category] for category in CATEGORIES}


def times(seconds: list[float], global_batch: int) -> dict:
    """Median and spread (the 10th and 90th percentile); None for what needs more steps than there were.

    Samples/s is over the whole time, not the median: a loader that stalls now and then must show.
    """
    if len(seconds) < 2:
        return {"step": None, "samples_per_second": None}
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    median = statistics.median(seconds)
    step = {"median": median, "p10": deciles[0], "p90": deciles[-1], "steps": len(seconds)}
    return {"step": step, "samples_per_second": global_batch * len(seconds) / sum(seconds)}


def _allocator_peaks(device) -> dict:
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "active": stats["active_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


def free_memory_of_a_rank(me, device) -> float:
    """Bytes that a rank can still allocate on ``device``: the least of any rank's, infinity if nobody says.

    Collective. The ranks of a node share the CPU's memory evenly; each has a GPU to itself. me: a ``ranks.Rank``.
    In a simulated world (one_rank.py) nobody shares.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = host_memory.free()
    if me.backend == "fake":
        return free
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (me.node, free))
    nodes = [node for node, _ in every]
    return min(free if device.type == "cuda" else free / nodes.count(node) for node, free in every)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def utilisation(
    tokens_per_second: float | None, flops_per_token: float, precision: str, me, peaks: dict | None = None
) -> dict:
    """Compare the rate at which a rank computes for the model with two peaks. Collective, unless peaks are given.

    Args:
        tokens_per_second: of all ranks together; None of a run too short to be timed.
        flops_per_token: operations of the model, without what is computed a second time.
        precision: a key of ``DTYPES``, the number format of matmuls.
        me: a ``ranks.Rank``.
        peaks: what ``measured_peaks`` has returned before; None: measure now.

    Returns:
        {"matmul_ceiling_fraction", "mfu"}, each {"peak_flops", "peak_of", "value"}: operations per second and rank, how
        they are known, and the share of them. The ceiling is what a large matmul reaches here and now. MFU (model FLOPs
        utilization) is of the data sheet's peak, and None where that is not known. Without a rate, both are None.
    """
    if not tokens_per_second:
        return {"matmul_ceiling_fraction": None, "mfu": None}
    rate = tokens_per_second * flops_per_token / me.world_size
    known = peaks or measured_peaks(precision, me)
    return {name: peak and peak | {"value": rate / peak["peak_flops"]} for name, peak in known.items()}


def measured_peaks(precision: str, me) -> dict:
    """Return the two peaks that ``utilisation`` compares with, each {"peak_flops", "peak_of"} or None. Collective."""
    return {"matmul_ceiling_fraction": ceiling(DTYPES[precision], me), "mfu": data_sheet(precision, me.device)}


def data_sheet(precision: str, device) -> dict | None:
    """Return {"peak_flops", "peak_of"} of a GPU's data sheet; None for a device or a number format that it lacks."""
    gpu = gpus.known(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if not gpu or not (peak := gpus.GPUS[gpu].flops.get(precision)):
        return None
    return {"peak_flops": peak, "peak_of": f"data sheet's peak of {peak / 1e12:g} TFLOP/s ({gpu}, {precision})"}


def ceiling(dtype: torch.dtype, me) -> dict:
    """Operations per second and rank that multiplying matrices reaches here and now: {"peak_flops", "peak_of"}.

    Collective: all ranks measure at once, as what they share (a CPU's cores, a node's power) they share in training too.
    """
    size = 8192 if me.device.type == "cuda" else 512
    peaks = [None] * me.world_size
    dist.all_gather_object(peaks, _matmul_flops(size, me.device, dtype))
    peak = statistics.mean(peaks)
    name = str(dtype).removeprefix("torch.")
    words = f"measured matmul ceiling of {peak / 1e12:.3g} TFLOP/s per rank ({name}, {size} × {size})"
    return {"peak_flops": peak, "peak_of": words}


def _matmul_flops(size: int, device, dtype: torch.dtype) -> float:
    """The most operations per second that multiplying two square matrices reaches, of all tries in a short time."""
    seconds = 0.3 if device.type == "cuda" else 0.1  # a CPU tries some twenty times in it
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, deadline = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline:
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _profiler(folder: str, steps: int):
    from torch.profiler import profile, schedule, tensorboard_trace_handler

    if steps < (needed := sum(PROFILED.values())):
        raise UserError(f"--profile watches the last of {needed} steps, and this run has {steps}: train for more")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"traces cannot be written to {folder} ({error.strerror}): name another --profile") from None
    handler = tensorboard_trace_handler(folder, worker_name=f"rank{dist.get_rank()}")
    profiler = profile(schedule=schedule(**PROFILED, repeat=1), on_trace_ready=handler)
    profiler.start()
    return profiler
