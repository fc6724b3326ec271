"""Records of several configurations that take turns in one launch: watched one after the other, timed afterwards.

run, everywhere: {"config", "model", "optimizer", "batch": micro-batches, "step": a function, "flops": per token}, as
attributes.
"""

import torch

from labkit.measuring import meters, records
from labkit.running.progress import Progress
from labkit.training import text

WATCHED = 4  # steps: the fewest by which the meter has seen a peak


def watched(me, run) -> dict:
    """Run a few steps, and return a record of them without times: options, peak memory, traffic. Collective."""
    meter = meters.Meter(run.model, run.optimizer, me.device, progress=Progress(me, WATCHED))
    for _ in meter.watch([run.batch] * WATCHED):
        run.step()
    meter.finish()
    about = records.new("gpt_fsdp.py", vars(run.config), me, [me.node])
    about |= {"data": {"name": text.NAME}, "batch_size": run.config.batch_size}
    return about | meter.summary(_sequences(run, me))


def add_times(me, found: list[dict], runs: list, steps: list[dict]):
    """Complete the records ``found``. steps: {"median", "p10", "p90", "steps"} of each run, in seconds. Collective."""
    peak = meters.ceiling(torch.float32, me)
    for run, record, step in zip(runs, found, steps, strict=True):
        sequences = _sequences(run, me)
        record["time"] = {"step": step, "samples_per_second": sequences / step["median"]}
        record["tokens_per_second"] = sequences * run.config.seq_len / step["median"]
        share = record["tokens_per_second"] * run.flops / (me.world_size * peak["peak_flops"])
        record |= {"flops_per_token": run.flops, "matmul_ceiling_fraction": peak | {"value": share}}


def _sequences(run, me) -> int:
    """In a step, of all ranks."""
    return run.config.batch_size * run.config.accumulate * me.world_size
