# SPDX-License-Identifier: BSD-3-Clause
"""Preflight checks: refuse a run that this machine cannot execute before anything is allocated, with one sentence."""

import dataclasses
import os
import shutil
import sys

import torch
from planner import predict

from labkit import UserError
from labkit.measuring import event_files, meters, records
from labkit.running.options import choices_of


def check(config, me):
    """Check a lab's options against this rank's device, compiler, and disk.

    Args:
        config: the lab's options.
        me: a ``ranks.Rank``.

    Raises:
        UserError: an option is not supported here.
    """
    on_cpu = me.device.type == "cpu"
    if config.precision == "bf16" and not on_cpu and torch.cuda.get_device_capability(me.device) < (8, 0):
        fp16 = " or fp16" if "fp16" in choices_of(type(config).__dataclass_fields__["precision"]) else ""
        raise UserError(f"{torch.cuda.get_device_name(me.device)} does not compute in bf16: use --precision fp32{fp16}")
    if config.strategy == "fsdp1" and config.cpu_offload and on_cpu:
        raise UserError(
            "FSDP1's --cpu-offload needs a GPU (it page-locks memory); --strategy fsdp2 shows it on the CPU"
        )
    if getattr(config, "compile", False):
        _check_compiler(on_cpu)
    if config.record and me.rank == 0:
        records.check_writable(config.record)
    if config.log:
        event_files.check(config.log, me.rank)


def _check_compiler(on_cpu: bool):
    """Check for the compiler that torch.compile needs: C++ for the CPU; C for a GPU, because of Triton.

    Raises:
        UserError: there is none.
    """
    default = ["clang++" if sys.platform == "darwin" else "g++"] if on_cpu else ["gcc", "clang"]
    chosen = os.environ.get("CXX" if on_cpu else "CC")
    tried = [chosen] if chosen else default
    if not any(map(shutil.which, tried)):
        what = "C++ compiler for the CPU" if on_cpu else "C compiler for a GPU"
        raise UserError(f"--compile needs a {what}, and there is no {' or '.join(tried)} here: leave it out")


def refuse_if_too_big(config, me):
    """Refuse a run whose planned peak exceeds the free memory; do nothing if the planner does not cover it. Collective.

    Args:
        config: the lab's options.
        me: a ``ranks.Rank``.

    Raises:
        UserError: the run needs too much memory; on every rank.
    """
    run = {"script": config.script, "ranks": me.world_size, "device": me.device.type}
    run["config"] = dataclasses.asdict(config)
    stages = config.arranged(me.world_size).pipeline if hasattr(config, "arranged") else 1
    try:
        plans = [predict.plan_of(run, stage, at_least=True) for stage in range(stages)]
        # With offload, persistent memory is the CPU's.
        needed = max(
            predict.total(plan.host_memory() or plan.persistent() if config.cpu_offload else plan.peak()[1])
            for plan in plans
        )
    except UserError:  # not planned
        return
    free = meters.free_memory_of_a_rank(me, torch.device("cpu") if config.cpu_offload else me.device)
    if needed > free:
        how = f"--stage {config.stage}" if hasattr(config, "stage") else f"--strategy {config.strategy}"
        how = f"{len(plans)} stages" if len(plans) > 1 else how
        named = ((name, getattr(config, name, None)) for name in ("model", "config", "preset"))
        model = next(f"--{name} {value}" for name, value in named if value)
        raise UserError(
            f"{model} with {how} needs {needed / 2**30:.1f} GiB on each of "
            f"{me.world_size} ranks, and {free / 2**30:.1f} GiB are free: take a smaller model or more ranks "
            "(plan.py shows the parts of the memory)"
        )
