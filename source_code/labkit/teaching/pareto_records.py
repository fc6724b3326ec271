# SPDX-License-Identifier: BSD-3-Clause
"""Make the records of a Pareto plot: trace the memory of several configurations in one launch, then time them in rounds.

A run has these attributes: config, model, optimizer, batch (micro-batches), step (a function), and flops
(floating-point operations per token).
"""

import torch

from labkit.measuring import meters, records
from labkit.running.progress import Progress
from labkit.training import text

TRACED_STEPS = 4  # fewest steps after which the meter has seen a peak


def memory_record(me, run) -> dict:
    """Run a few steps, and return a record of them without times: options, peak memory, traffic. Collective."""
    meter = meters.Meter(run.model, run.optimizer, me.device, progress=Progress(me, TRACED_STEPS))
    for _ in meter.watch([run.batch] * TRACED_STEPS):
        run.step()
    meter.finish()
    about = records.new(run.config.script, vars(run.config), me, [me.node])
    about |= {"data": {"name": text.NAME}, "batch_size": run.config.batch_size}
    return about | meter.summary(_sequences(run, me))


def add_times(me, memory_records: list[dict], runs: list, steps: list[dict]):
    """Add step times and throughput to the records of ``memory_record``. Collective.

    Args:
        me: a ``ranks.Rank``.
        memory_records: the records, changed in place.
        runs: the run of each record.
        steps: {"median", "p10", "p90", "steps"} of each run's step times, in seconds.
    """
    peak = meters.ceiling(torch.float32, me)
    for run, record, step in zip(runs, memory_records, steps, strict=True):
        sequences = _sequences(run, me)
        record["time"] = {"step": step, "samples_per_second": sequences / step["median"]}
        record["tokens_per_second"] = sequences * run.config.seq_len / step["median"]
        share = record["tokens_per_second"] * run.flops / (me.world_size * peak["peak_flops"])
        record |= {"flops_per_token": run.flops, "matmul_ceiling_fraction": peak | {"value": share}}


def _sequences(run, me) -> int:
    """Return the number of sequences per step, summed over ranks."""
    return run.config.batch_size * run.config.accumulate * me.world_size
