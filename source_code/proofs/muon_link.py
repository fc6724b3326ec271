# SPDX-License-Identifier: BSD-3-Clause
"""Measure from how many matrices and ranks on owner-computes beats gathering, for Muon over a slow link, and compare.

Inside a practice cluster with a network, as root; it changes the link's speed as it goes, and then back:

  make slurm LINK=200mbit && . .slurm/env.sh && cd source_code
  python -m proofs.muon_link          two speeds, 2 and 4 ranks on two nodes: three minutes; a table, and a record
  python -m proofs.muon_link --record results/reference/muon-link-amd-epyc-2-cores.json

Timed is the optimizer's step alone, on equal square matrices that FSDP2 shards, with random gradients. Before a speed is
set, the time of Newton–Schulz is measured, on one rank and on all at once, and the latency; what a step should take
follows from these, the link's speed, and the collectives that planner/parallel/muon.py plans. If the way that is planned
to be faster by a fifth or more is not the faster one, the exit code is 1.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass

from labkit import UserError
from labkit.measuring import records
from labkit.running import options, practice_link, ranks
from labkit.running.lab_options import TransformerTraining
from labkit.running.options import option
from planner.parallel import muon as planned
from planner.timing import cost

from proofs import link_sweep

SIDES = (256, 384)  # the link passes smaller messages at once, whatever its speed
COUNTS = (1, 2, 4, 8)  # of matrices
CASES = [(side, count) for side in SIDES for count in COUNTS]
WAYS = ("muon", "muon-gather")
BF16 = 2
CLEAR = 1.2  # ratio of planned times from which on a winner is claimed


@dataclass(frozen=True)
class Config(options.Options):
    """Speeds and steps. The command line is made from these fields."""

    rates: str = option("400mbit,100mbit", "speeds of the link, with commas between them", form=link_sweep.RATES)
    steps: int = option(7, "steps to time in each case", least=3)
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def sharded(me, side: int, count: int) -> list:
    """Return the parameters of ``count`` square matrices that FSDP2 shards over all ranks, with random gradients."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("shard",))
    model = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(count))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # the time does not depend on the values
    return list(model.parameters())


def measure(me, steps: int) -> dict:
    """{(way, side, count): seconds of each step on this rank, from when the last rank begins}. Every rank runs it."""
    import torch
    import torch.distributed as dist
    from labkit.training import muon

    taken = {}
    for side, count in CASES:
        parameters = sharded(me, side, count)
        for way in WAYS:
            settings = {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.95, "dtype": torch.bfloat16}
            optimizer = muon.Muon(parameters, owner_computes=way == "muon", **settings)
            seconds = []
            for _ in range(steps + 1):
                dist.barrier()
                begin = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - begin)
            taken[way, side, count] = seconds[1:]  # in the first step the momentum is made
    return taken


def calibrate(me, steps: int) -> dict:
    """Measure Newton–Schulz on one rank and on all at once, and the latency. Every rank runs it."""
    import torch
    import torch.distributed as dist
    from labkit.training import muon

    def timed(side: int, computes: bool) -> float:
        seconds = []
        for _ in range(steps + 1):
            matrix = torch.randn(side, side).bfloat16()
            dist.barrier()
            begin = time.perf_counter()
            if computes:
                muon.newton_schulz(matrix)
            dist.barrier()  # the slowest rank counts
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[1:])

    found = {(side, alone): timed(side, me.rank == 0 or not alone) for side in SIDES for alone in (True, False)}
    return found | {"latency": statistics.median(link_sweep.time_all_reduces()) / (2 * (me.world_size - 1))}


def planned_seconds(way: str, side: int, count: int, world_size: int, rate: str, calibrated: dict) -> float:
    """Return the planned seconds of a step.

    Args:
        way: one of ``WAYS``.
        side, count: of the matrices.
        world_size: ranks, half of them on each node.
        rate: of the link.
        calibrated: what ``calibrate`` measured on rank 0.
    """
    network = cost.Link(practice_link.bytes_per_second(rate), calibrated["latency"], "set; latency measured")
    within = cost.Link(float("inf"), calibrated["latency"], "not slowed")
    of_run = TransformerTraining().plan(world_size, on_gpu=False)
    size, node_size = BF16 * side * side, world_size // link_sweep.NODES
    if way == "muon-gather":
        collective = {"kind": "all-gather", "bytes": size, "ranks": world_size, "dimension": "shard"}
        gathering = cost.collective_seconds(collective, of_run, node_size, within, network, "gloo")
        return count * (gathering + calibrated[side, False])
    seconds = 0.0
    for members in map(len, planned.rounds([(side, side)] * count, world_size)):
        crossing = crossing_bytes(members, size, node_size)
        exchanging = (world_size - 1) * network.latency + crossing / network.bandwidth
        seconds += 2 * exchanging + calibrated[side, members == 1]
    return seconds


def crossing_bytes(members: int, size: int, node_size: int) -> float:
    """Return the bytes that one node sends to the other in an all-to-all of a round, whose first owners share a node.

    Args:
        members: matrices in the round.
        size: bytes of each.
        node_size: ranks on each of the two nodes.
    """
    return min(members, node_size) * size / link_sweep.NODES


def run(config: Config, world_size: int):
    """Yield the rows of a number of ranks: planned and measured seconds of each way in each case."""
    saved, link_sweep.RANKS = link_sweep.RANKS, world_size
    try:
        ((_, calibrated),) = link_sweep.at_each_speed(["none"], calibrate, config.steps)
        for rate, of_ranks in link_sweep.at_each_speed(config.rates.split(","), measure, config.steps):
            for side, count in CASES:
                row = {"ranks": world_size, "rate": rate, "side": side, "matrices": count}
                for way in WAYS:
                    steps = [max(each) for each in zip(*(rank[way, side, count] for rank in of_ranks), strict=True)]
                    expected = planned_seconds(way, side, count, world_size, rate, calibrated[0])
                    row[way] = {"planned": expected, "measured": statistics.median(steps), "steps": steps}
                yield row
    finally:
        link_sweep.RANKS = saved


def faster(row: dict, which: str) -> float:
    """Return how many times as long gathering takes as owner-computes, "planned" or "measured"."""
    return row["muon-gather"][which] / row["muon"][which]


def is_wrong(row: dict) -> bool:
    """Return whether the way that is planned to be clearly faster is not."""
    return (faster(row, "planned") > CLEAR and not faster(row, "measured") > 1) or (
        faster(row, "planned") < 1 / CLEAR and not faster(row, "measured") < 1
    )


def recorded() -> list[dict]:
    """Return the rows of the record that comes with the course."""
    (path,) = link_sweep.REFERENCE.glob("muon-link-*.json")
    return json.loads(path.read_text())["rows"]


def line(row: dict) -> str:
    times = "".join(f"{1e3 * row[way]['planned']:9.1f}{1e3 * row[way]['measured']:10.1f}" for way in WAYS)
    ratio = f"{faster(row, 'planned'):8.2f}{faster(row, 'measured'):9.2f}{'   WRONG' * is_wrong(row)}"
    return f"{row['rate']:>8}{row['ranks']:6}{row['side']:6}{row['matrices']:9} {times} {ratio}"


def main(config: Config):
    path, rows = records.new_path("muon-link", config.record), []
    print("    link ranks  side matrices  owner: planned, measured [ms]; gather; gather / owner", flush=True)
    for world_size in (2, 4):
        for row in run(config, world_size):
            rows.append(row)
            print(line(row), flush=True)
    records.write_rows(path, rows)
    print(f"record: {path}")
    if wrong := sum(map(is_wrong, rows)):
        sys.exit(f"proofs/muon_link.py: in {wrong} cases the other way is faster than planned: was the machine busy?")


if __name__ == "__main__":
    try:
        main(options.parse(Config, __doc__))
    except UserError as error:
        ranks.exit_with_error(str(error))
