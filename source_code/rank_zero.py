"""Be rank 0 of a world that is not there: what one rank of gpt_fsdp.py holds and computes, with nothing to share it.

  python rank_zero.py --preset llama3-8b --ranks 64 --precision bf16 --recompute full --batch-size 1 --seq-len 8192
  python rank_zero.py --ranks 4 --device cpu --record run.json

One GPU measures what each of many would hold: tensors, kernels, the allocator and the time to compute are real. The
collectives send nothing: torch's process group of the kind "fake" puts this rank's own part where the others' would
arrive. So tensors have their sizes, values are wrong, the losses mean nothing, and of communication there is no more in
a step's time than those copies, nor are NCCL's buffers in its memory. The options are gpt_fsdp.py's; --ranks is the size of the world.
"""

import socket
import time
from dataclasses import dataclass
from typing import ClassVar

import gpt_fsdp
import torch
from labkit import UserError
from labkit.measuring import limits, meters, records, simulate
from labkit.running import gpus, options, progress, ranks
from labkit.running.options import leave, option
from labkit.training import text
from planner import predict

GIB = 2**30


@dataclass(frozen=True)
class Config(gpt_fsdp.Config):
    """gpt_fsdp.py's options, of which some need the other ranks."""

    launched: ClassVar[bool] = False
    log: ClassVar[None] = None  # there is nothing worth logging: the losses are wrong
    ranks: int = option(8, "size of the world", least=2, at_most=16_384)
    max_steps: int = option(12, "steps to train: the first 7 watch memory, the others are timed", least=3)

    def __post_init__(self):
        super().__post_init__()
        if self.strategy not in options.SHARDED:
            raise UserError(
                f"--strategy {self.strategy} needs no world that is not there: a rank holds the whole model, so run "
                "gpt_fsdp.py --strategy single (DDP adds the gradients' buckets, as plan.py says)"
            )
        if self.checkpoint:
            raise UserError("there is nothing worth keeping in a checkpoint of a world that is not there: leave it out")


def place(config) -> ranks.Rank:
    """This process as rank 0 of the world."""
    device, _ = ranks.device_and_backend(config.device, config.backend)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        ranks.compute_as_one_of_several()
        # Wrong values soon become too small for the usual format, and a CPU computes with such ones far more slowly.
        torch.set_flush_denormal(True)
    return ranks.Rank(0, 0, config.ranks, socket.gethostname(), torch.device(device), "fake")


def train(config, me) -> dict:
    """Train as gpt_fsdp.py does; returns what the meter has measured, as in its record."""
    tokens = text.load(me.device).train
    model, optimizer, step = gpt_fsdp.prepare(config, me)
    bar = progress.Progress(me, config.max_steps)
    meter = meters.Meter(model, optimizer, me.device, progress=bar, profile=config.profile, compiled=config.compile)
    kept = []  # as the lab keeps its losses
    for inputs, targets in meter.watch(gpt_fsdp.training_batches(tokens, config, me, range(config.max_steps))):
        kept += step(inputs, targets)
    meter.finish()
    measured = meter.summary(config.batch_size * config.accumulate * me.world_size)
    measured["time"]["samples_per_second"] = None  # of all ranks together, of which one was there
    if measured["memory"]:
        measured["memory"]["peak_by_rank"] = None
    return {"data": {"name": text.NAME}, "batch_size": config.batch_size, **measured}


def page(record: dict) -> str:
    """What was measured, beside what the planner says."""
    plan = predict.plan_of(record)
    where, terms = predict.peak_of(record)
    memory, step = record["memory"] or {}, record["time"]["step"]
    lines = [f"rank 0 of {record['ranks']} on {record['hardware']}; nobody else is there, and nothing is sent", ""]
    if peak := memory.get("peak"):
        names = [name for name, size in peak.items() if size or terms.get(name)]
        rows = [(name, peak[name], terms.get(name, 0)) for name in names]
        rows.append(("all of it", sum(peak.values()), predict.total(terms)))
        lines += [f"{'at the peak, bytes':20}{'measured':>18}{'planned':>18}{'difference':>14}"]
        lines += [f"{name:20}{got:18,}{told:18,}{got - told:+14,}" for name, got, told in rows]
        lines += [f"at: {memory['peak_phase']}, {memory['peak_operator']}; planned: {where}", ""]
    if found := memory.get("allocator"):
        sizes = ", ".join(f"{name} {found[name] / GIB:,.2f} GiB" for name in ("allocated", "active", "reserved"))
        lines.append(f"the allocator, at most: {sizes}; {found['retries']} retries")
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
        me = place(config)
        config.arranged(me.world_size)
        limits.check(config, me)
        simulate.join(config.ranks)
        result = train(config, me)
    except UserError as error:
        leave(str(error))
    except torch.OutOfMemoryError as error:
        leave(f"a rank of this run does not fit: {str(error).splitlines()[0]}")
    result["time"]["elapsed"] = time.perf_counter() - begin
    record = records.new(__file__, vars(config), me, [me.node]) | result
    if config.record:
        records.write(config.record, record)
    print(page(record))


if __name__ == "__main__":
    main()
