# SPDX-License-Identifier: BSD-3-Clause
"""Measure a training loop's peak memory, step time, and collectives, on CPU and CUDA.

Memory and time are measured in different steps, because tracing slows a step down:

  step 0        nothing: the optimizer creates its state, and caches fill
  step 1        CUDA only: the allocator's peaks
  steps 2 to 4  every storage and collective is traced (``labkit.measuring.trace``). The first of these steps warms up the
                tracer. Of the other two, the one with the lower peak counts: a communication backend's thread may free a
                buffer late, which can only raise a peak
  step 7 on     time: from the end of one step to the end of the next, including fetching the batch
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
from labkit.measuring.trace import CATEGORIES, StepTrace, listed, peak, total

ALLOCATOR_STEP = 1
TRACED_STEPS = range(2, 5)
FIRST_TIMED_STEP = 7
PROFILED = {"wait": 7, "warmup": 1, "active": 3}


class Meter:
    """Measure a loop ``for batch in meter.watch(batches): …``; ``summary()`` returns the results.

    Args:
        model, optimizer, device: what is trained, and where.
        progress: an object whose ``advance()`` is called after every step, and ``close()`` by ``finish()``
            (running/progress.py).
        profile: a folder for a profiler trace of a few steps, for Perfetto or TensorBoard; None for no trace.
        compiled: whether parts of the step are compiled. PyTorch runs them uncompiled while they are traced, with the
            same collectives but other storages, so that memory is then reported by the allocator only.
    """

    def __init__(self, model, optimizer, device, *, progress, profile: str | None = None, compiled=False):
        self.model, self.device, self.progress, self.compiled = model, device, progress, compiled
        self.step = 0
        self.timed = []  # (begin, end) of each step to time
        self.trace = StepTrace(model, optimizer, device)
        self.timeline = self.collectives = self.allocator = self.kept = self.kept_step = None
        self.routing = {}  # {traced step: tokens of each micro-batch, layer, and expert}
        self.profiler = _profiler(profile, progress.total - progress.step) if profile else None
        # Profiled steps are slower, so they are not timed.
        self.first_timed = sum(PROFILED.values()) + 1 if profile else FIRST_TIMED_STEP

    def watch(self, batches: Iterable) -> Iterator:
        """Yield the batches; everything that the caller does until it takes the next batch is one step."""
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
        """Return the current time in seconds; on a GPU a CUDA event, so that the CPU can still run ahead."""
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
        """Return this rank's peak memory in bytes, for a log entry between two steps.

        Returns:
            On a GPU the allocator's peak of allocated bytes since the last call; on the CPU the peak of the traced
            steps; None before there is one.
        """
        if self.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)  # ALLOCATOR_STEP resets it itself
            return allocated
        return peak(self.timeline)[1] if self.timeline and not self.compiled else None

    def _keep_trace(self):
        self.trace.batch = ()
        timeline = self.trace.timeline()
        if self.step == TRACED_STEPS[0]:
            return
        if hasattr(self.model, "routing"):  # of a mixture of experts (labkit/training/experts.py)
            self.routing[self.step] = [tokens.tolist() for tokens in self.model.routing]
        # A step that loss scaling has skipped counts only alone. Among equal peaks, keep the step in which gloo's threads
        # freed their buffers sooner (trace.py).
        order = not self.trace.stepped, peak(timeline)[1], sum(map(total, timeline))
        if self.timeline is None or order < self.kept:
            self.kept, self.timeline, self.collectives = order, timeline, dict(self.trace.collectives)
            self.kept_step = self.step

    def finish(self):
        """Stop the profiler, which writes its trace, and close the progress bar."""
        if self.profiler:
            self.profiler.stop()
        self.progress.close()

    def summary(self, global_batch: int) -> dict:
        """Return what was measured, for a record. Collective: every rank must call it.

        Args:
            global_batch: samples per step, of all ranks together.

        Returns:
            {"memory", "time", "traffic"}, and "routing" of a mixture of experts (``_routing``). ``time`` is as ``times``
            returns it, ``traffic`` as ``trace.listed`` does, or None if the run was too short. ``memory`` is None if the run
            was too short or the step is compiled and on the CPU; else it has these keys, which are all None, except
            "allocator", if the step is compiled:

            - "peak": {category: bytes} at rank 0's peak; "peak_phase" and "peak_operator": when it occurs
            - "start": {category: bytes} of rank 0 at the start of a step
            - "timeline": [[phase, bytes by category …], …] of one step of rank 0
            - "peak_by_rank": [total bytes of each rank]
            - "allocator": peaks of CUDA's allocator on rank 0, in bytes; None on the CPU
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
        measured = {"memory": memory, "time": times(self.step_times(), global_batch), "traffic": traffic}
        return measured | ({"routing": self._routing()} if self.routing else {})

    def _routing(self) -> dict:
        """Return the tokens that each expert has computed in the traced steps. Collective.

        Returns:
            {"step_by_rank": [the traced step whose memory and traffic each rank reports], "tokens": {step: [of each rank
            [of each micro-batch [of each mixture [of each expert]]]]}}.
        """
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.kept_step, self.routing))
        tokens = {str(step): [routing[step] for _, routing in gathered] for step in self.routing}
        return {"step_by_rank": [step for step, _ in gathered], "tokens": tokens}


def _bytes(snapshot: dict) -> dict:
    return {category: snapshot[category] for category in CATEGORIES}


def times(seconds: list[float], global_batch: int) -> dict:
    """Summarize step times by their median and their spread.

    Args:
        seconds: of each timed step.
        global_batch: samples per step, of all ranks together.

    Returns:
        {"step": {"median", "p10", "p90", "steps"} in seconds, "samples_per_second"}; both None with fewer than two steps.
        The rate is over the whole time, not from the median, so that occasional stalls of a loader show.
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
    """Return the bytes that every rank can still allocate on ``device``: the minimum over all ranks. Collective.

    Args:
        me: a ``ranks.Rank``.
        device: where to allocate. The ranks of a node share the CPU's memory evenly; each has a GPU to itself.

    Returns:
        Bytes; infinity if the kernel does not report them. In a simulated world (one_rank.py), this process's own.
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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def utilization(
    tokens_per_second: float | None, flops_per_token: float, precision: str, me, peaks: dict | None = None
) -> dict:
    """Compare a rank's model FLOP/s with two peaks: a measured matmul ceiling, and the data sheet (MFU).

    Collective if ``peaks`` is None.

    Args:
        tokens_per_second: of all ranks together; None if the run was too short to be timed.
        flops_per_token: model FLOPs per token, without recomputation.
        precision: the dtype of matmuls, a key of ``DTYPES``.
        me: a ``ranks.Rank``.
        peaks: an earlier result of ``measured_peaks``; None: measure now.

    Returns:
        {"matmul_ceiling_fraction", "mfu"}, each {"peak_flops", "peak_of", "value"} or None: the peak in FLOP/s per rank,
        its source in words, and the fraction of it that the model reaches. The ceiling is the rate of a large matmul in
        this run. MFU (model FLOPs utilization, Chowdhery et al. 2022) refers to the data sheet's peak and is None if that
        is unknown. Both are None without a rate.
    """
    if not tokens_per_second:
        return {"matmul_ceiling_fraction": None, "mfu": None}
    rate = tokens_per_second * flops_per_token / me.world_size
    known = peaks or measured_peaks(precision, me)
    return {name: peak and peak | {"value": rate / peak["peak_flops"]} for name, peak in known.items()}


def measured_peaks(precision: str, me) -> dict:
    """Return the two peaks for ``utilization``, each {"peak_flops", "peak_of"} or None. Collective."""
    return {"matmul_ceiling_fraction": ceiling(DTYPES[precision], me), "mfu": data_sheet(precision, me.device)}


def data_sheet(precision: str, device) -> dict | None:
    """Return {"peak_flops", "peak_of"} from a GPU's data sheet; None if the device or the precision is not in it."""
    gpu = gpus.known(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if not gpu or not (peak := gpus.GPUS[gpu].flops.get(precision)):
        return None
    return {"peak_flops": peak, "peak_of": f"data sheet's peak of {peak / 1e12:g} TFLOP/s ({gpu}, {precision})"}


def ceiling(dtype: torch.dtype, me) -> dict:
    """Measure the FLOP/s per rank of a large matmul. Collective.

    All ranks measure at the same time, because they also share a CPU's cores and a node's power during training.

    Returns:
        {"peak_flops": mean over the ranks, "peak_of": a description of it}.
    """
    size = 8192 if me.device.type == "cuda" else 512
    peaks = [None] * me.world_size
    dist.all_gather_object(peaks, _matmul_flops(size, me.device, dtype))
    peak = statistics.mean(peaks)
    name = str(dtype).removeprefix("torch.")
    words = f"measured matmul ceiling of {peak / 1e12:.3g} TFLOP/s per rank ({name}, {size} × {size})"
    return {"peak_flops": peak, "peak_of": words}


def _matmul_flops(size: int, device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matmul: the best of all repetitions within a short time."""
    seconds = 0.3 if device.type == "cuda" else 0.1  # about twenty repetitions on a CPU
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
        raise UserError(f"--profile records the last of {needed} steps, and this run has {steps}: train for more")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"traces cannot be written to {folder} ({error.strerror}): name another --profile") from None
    handler = tensorboard_trace_handler(folder, worker_name=f"rank{dist.get_rank()}")
    profiler = profile(schedule=schedule(**PROFILED, repeat=1), on_trace_ready=handler)
    profiler.start()
    return profiler
