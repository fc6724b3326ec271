# SPDX-License-Identifier: BSD-3-Clause
"""Run one rank of a simulated world: the memory and computation of one rank of gpt_fsdp.py, with real tensors on one GPU.

  python one_rank.py --preset llama3-8b --ranks 64 --precision bf16 --recompute full --batch-size 1 --seq-len 8192
  python one_rank.py --ranks 4 --device cpu --record run.json

Tensors, kernels, the allocator and compute time are real. Collectives send nothing: PyTorch's fake process group copies
this rank's own shard in place of the other ranks' shards. Tensors therefore have their true sizes, but wrong values, and
the losses are meaningless. The time of a step includes those copies instead of communication, and its memory has no NCCL
buffers. The options are gpt_fsdp.py's; --ranks is the size of the simulated world.
"""

import socket
import time
from dataclasses import dataclass
from typing import ClassVar

import gpt_fsdp
import torch
from labkit import UserError
from labkit.measuring import meters, records, simulate
from labkit.running import gpus, lab_options, options, preflight, progress, ranks
from labkit.running.options import GIVEN, Conflict, exit_with_error, option, redeclared, several
from labkit.training import text
from planner import predict

GIB = 2**30


@dataclass(frozen=True)
class Config(gpt_fsdp.Config):
    """gpt_fsdp.py's options, except those that need the other ranks."""

    conflicts = (
        Conflict(
            {},
            {"strategy": ("single", "ddp")},
            "--strategy {c.strategy} needs no simulated world: a rank holds the whole model, so run "
            "gpt_fsdp.py --strategy single (DDP adds the gradients' buckets, which plan.py counts)",
        ),
        Conflict(
            {},
            {"ep_degree": several},
            "--mesh {c.mesh} exchanges rows whose number other ranks determine: leave expert out, or use plan.py",
        ),
        Conflict(
            {}, {"checkpoint": GIVEN}, "--checkpoint would save the wrong values of a simulated world: leave it out"
        ),
    )
    launched: ClassVar[bool] = False
    log: ClassVar[None] = None  # the losses are wrong

    ranks: int = option(8, "size of the simulated world", least=2, at_most=16_384)
    max_steps: int = redeclared(
        gpt_fsdp.Config,
        "max_steps",
        default=12,
        least=3,
        help="steps to train: the first 7 measure memory, the others are timed",
    )


def simulated_rank(config) -> ranks.Rank:
    """Return this process as rank 0 of the simulated world, on its device."""
    device, _ = ranks.device_and_backend(config.device, config.backend)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        ranks.configure_cpu()
        # Wrong values soon become denormal numbers, with which a CPU computes far more slowly.
        torch.set_flush_denormal(True)
    return ranks.Rank(0, 0, config.ranks, socket.gethostname(), torch.device(device), "fake")


def train(config, me) -> dict:
    """Train as gpt_fsdp.py does, and return the meter's measurements for a record."""
    tokens = text.load(me.device).train
    model, optimizer, step = gpt_fsdp.prepare(config, me)
    bar = progress.Progress(me, config.max_steps)
    meter = meters.Meter(model, optimizer, me.device, progress=bar, profile=config.profile, compiled=config.compile)
    losses = []  # retained, as in the lab
    for inputs, targets in meter.watch(gpt_fsdp.training_batches(tokens, config, me, range(config.max_steps))):
        losses += step(inputs, targets)
    meter.finish()
    measured = meter.summary(config.batch_size * config.accumulate * me.world_size)
    measured["time"]["samples_per_second"] = None  # the rate of all ranks is unknown
    if measured["memory"]:
        measured["memory"]["peak_by_rank"] = None
    return {"data": {"name": text.NAME}, "batch_size": config.batch_size, **measured}


def page(record: dict) -> str:
    """Format the measured memory, traffic and time, compared with the plan."""
    plan = predict.plan_of(record)
    where, terms = predict.peak_of(record)
    memory, step = record["memory"] or {}, record["time"]["step"]
    lines = [
        f"rank 0 of {record['ranks']} on {record['hardware']}; the other ranks are simulated, and nothing is sent",
        "",
    ]
    if peak := memory.get("peak"):
        names = [name for name, size in peak.items() if size or terms.get(name)]
        rows = [(name, peak[name], terms.get(name, 0)) for name in names]
        rows.append(("all of it", sum(peak.values()), predict.total(terms)))
        lines += [f"{'at the peak, bytes':20}{'measured':>18}{'planned':>18}{'difference':>14}"]
        lines += [f"{name:20}{measured:18,}{planned:18,}{measured - planned:+14,}" for name, measured, planned in rows]
        lines += [f"at: {memory['peak_phase']}, {memory['peak_operator']}; planned: {where}", ""]
    if allocator := memory.get("allocator"):
        sizes = ", ".join(f"{name} {allocator[name] / GIB:,.2f} GiB" for name in ("allocated", "active", "reserved"))
        lines.append(f"the allocator, at most: {sizes}; {allocator['retries']} retries")
    counted = [(entry["kind"], entry["count"], entry["bytes"]) for entry in record["traffic"]]
    same = sorted(counted) == sorted((entry["kind"], entry["count"], entry["bytes"]) for entry in plan.traffic())
    lines.append(f"the collectives of a step are {'those planned' if same else 'NOT those planned'}")
    if step:
        lines.append(
            f"a step computes for {step['median']:.3g} s (10th to 90th percentile: {step['p10']:.3g} to {step['p90']:.3g})"
        )
    return "\n".join(lines)


def main():
    config = options.parse(Config, __doc__)
    begin = time.perf_counter()
    if config.device == "cpu":
        gpus.hide()
    try:
        me = simulated_rank(config)
        if config.dry_run:
            print(lab_options.dry_run(config, me.world_size, me.device.type == "cuda"))
            return
        config.arranged(me.world_size)
        preflight.check(config, me)
        simulate.join(config.ranks)
        result = train(config, me)
    except UserError as error:
        exit_with_error(str(error))
    except torch.OutOfMemoryError as error:
        exit_with_error(f"a rank of this run does not fit: {str(error).splitlines()[0]}")
    result["time"]["elapsed"] = time.perf_counter() - begin
    record = records.new(__file__, vars(config), me, [me.node]) | result
    if config.record:
        records.write(config.record, record)
    print(page(record))


if __name__ == "__main__":
    main()
