# SPDX-License-Identifier: BSD-3-Clause
"""Train on two nodes over a link of several speeds: step time, communication time, bytes at the interface.

Inside a practice cluster with a network, as root; it changes the link's speed as it goes, and then back:

  make slurm LINK=200mbit && . .slurm/env.sh && cd source_code
  python -m proofs.link_sweep         five speeds, four strategies, one record each
  python -m proofs.link_sweep --rates 200mbit,100mbit --steps 30
  python -m proofs.link_sweep --folder results/reference/link-sweep-amd-epyc-2-cores    replaces chapter 10's records

A record has the keys of labkit/measuring/records.py that apply, and "link", with times in seconds:

  strategy            its name in STRATEGIES
  rate, node_size     the link's speed, and how many ranks are on each of the two nodes
  steps               of each timed step: from the end of the one before to its own, of the slowest rank
  communication       of each step that PyTorch's profiler watched: while a collective crossed the link. One begins when
                      the last rank calls it, and ends when the last rank has it
  crossings           how many collectives of a step cross the link
  latency             of an all-reduce of 256 bytes among all ranks: the shortest
  sent, received      bytes per step at the interface of each rank's node, the kernel's count
"""

import os
import re
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, notebook_ranks, options, practice_link, ranks
from labkit.running.options import option
from planner import predict
from planner.timing import cost

STRATEGIES = {
    "DDP": {"strategy": "ddp"},
    "FSDP2": {},
    "FSDP2, kept": {"reshard_after_forward": "false"},
    "HSDP 2x2": {"mesh": "2x2"},
}
SMALL = {"batch_size": 1, "seq_len": 64}  # little to compute, so that the link decides
RANKS, NODES = 4, 2
WARM_UP = 2
RATES = (r"(none|\d+[mg]bit)(,(none|\d+[mg]bit))*", "speeds such as none,1gbit,200mbit")
REFERENCE = records.RESULTS / "reference"


@dataclass(frozen=True)
class Config(options.Options):
    """Speeds and steps. The command line is made from these fields."""

    rates: str = option(
        "none,1gbit,400mbit,200mbit,100mbit", "speeds of the link, with commas between them", form=RATES
    )
    steps: int = option(20, "steps to time; half as many more are watched by the profiler", least=2)
    folder: str | None = option(None, "where the records go (default: a new folder in results/runs)")


def sweep(rates: list[str], steps: int, cluster=None):
    """Yield the record of each speed and strategy."""
    for rate, of_ranks in at_each_speed(rates, measure, steps, SMALL, [*STRATEGIES], cluster=cluster):
        for name in STRATEGIES:
            yield summary(name, rate, [rank[name] for rank in of_ranks])


def at_each_speed(rates, function, *arguments, cluster=None):
    """Yield (speed, [what ``function(me, *arguments)`` returned on each rank]). The link has its old speed afterwards."""
    old = practice_link.link()
    os.environ["KINETO_LOG_LEVEL"] = "9"  # the profiler would tell each rank that it sees no GPU
    settings = {"ranks": RANKS, "nodes": NODES, "cluster": cluster or launch.Cluster(launcher="slurm")}
    try:
        for rate in rates:
            practice_link.change_link(rate)
            yield rate, notebook_ranks.on_ranks(function, *arguments, timeout=600, **settings)
    finally:
        if old:
            practice_link.change_link(old)


def measure(me, steps: int, size: dict, names) -> dict:
    """{strategy's name: what this rank saw}. Every rank runs it."""
    import gpt_fsdp  # not above: it imports torch

    latency = shortest_call()
    return {
        name: observe(me, gpt_fsdp, gpt_fsdp.Config(**size | STRATEGIES[name]), steps, (steps + 1) // 2)
        | {"latency": latency}
        for name in names
    }


def shortest_call() -> float:
    return min(time_all_reduces())


def time_all_reduces(numel: int = 64, group=None) -> list[float]:
    """Time 60 all-reduces of ``numel`` elements in fp32, among all ranks or those of a group; seconds of each."""
    import torch
    import torch.distributed as dist

    taken = []
    for _ in range(60):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(torch.zeros(numel), group=group)
        taken.append(time.perf_counter() - begin)
    return taken


def observe(me, lab, config, steps: int, watched: int) -> dict:
    """Train with the lab script's own functions: some steps timed, then some watched by the profiler."""
    import torch.distributed as dist

    data = lab.text.load(me.device)
    model, _ = lab.build(config, me)
    optimizer = lab.make_optimizer(model, config)
    batches = lab.training_batches(data.train, config, me, range(WARM_UP + steps + watched))

    def train() -> float:
        lab.train_step(model, optimizer, *next(batches), config)
        return time.perf_counter()

    def counted() -> dict:
        dist.barrier()  # what was on its way has arrived
        return practice_link.interface_bytes()

    for _ in range(WARM_UP):
        train()
    before = counted()
    ends = [time.perf_counter(), *(train() for _ in range(steps))]
    after = counted()
    about = records.new(lab.__file__, asdict(config), me, [me.node])
    about |= {"nodes": NODES, "command": "proofs/link_sweep.py"}
    about["data"] = {"name": lab.text.NAME, "train": len(data.train), "test": len(data.validation)}
    moved = {way: (after[way] - before[way]) / steps for way in ("sent", "received")}
    seen = [collectives(train) for _ in range(watched)]
    return {"about": about, "ends": ends, "watched": seen, **moved}


def collectives(step) -> list[tuple]:
    """[(gloo's name for it, begin, end), …] of a step's collectives in order; seconds of this machine's clock."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    gloo = [(e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9) for e in events if e.name().startswith("gloo:")]
    return sorted(gloo, key=lambda event: event[1])


def summary(name: str, rate: str, of_ranks: list[dict]) -> dict:
    """The record of one strategy at one speed. of_ranks: what ``measure`` returned for it on each rank."""
    first = of_ranks[0]
    plan = predict.plan_of(first["about"])
    node_size = RANKS // NODES
    crossing = sum(c["count"] for c in plan.traffic() if cost.ring_bytes(c, plan, node_size)["node"])
    taken = [[b - a for a, b in zip(r["ends"], r["ends"][1:], strict=False)] for r in of_ranks]
    link = {
        "strategy": name,
        "rate": rate,
        "node_size": node_size,
        "steps": [max(of_step) for of_step in zip(*taken, strict=True)],
        "communication": [
            link_busy_seconds(of_step, plan, crossing)
            for of_step in zip(*(r["watched"] for r in of_ranks), strict=True)
        ],
        "crossings": crossing,
        "latency": max(r["latency"] for r in of_ranks),
        **{way: [r[way] for r in of_ranks] for way in ("sent", "received")},
    }
    return first["about"] | {"batch_size": first["about"]["config"]["batch_size"], "link": link}


def link_busy_seconds(of_ranks: tuple, plan, crossing: int) -> float:
    """Seconds of a step in which a collective crossed the link. of_ranks: the ``collectives`` of each rank."""
    groups = [of_ranks]
    if plan.replicas > 1:
        # gloo makes a reduce-scatter from an all-reduce, within a node; the last reduction of a unit crosses.
        reductions = [[event for event in events if "gather" not in event[0]] for events in of_ranks]
        each = len(reductions[0]) // crossing
        groups = [[events[each - 1 :: each] for events in reductions[i :: plan.shards]] for i in range(plan.shards)]
    calls = [call for group in groups for call in zip(*group, strict=True)]  # a call: what each rank saw of it
    spans = sorted((max(begin for _, begin, _ in call), max(end for *_, end in call)) for call in calls)
    total = until = 0.0
    for begin, end in spans:  # what is on its way at once is counted once
        total, until = total + max(0.0, end - max(begin, until)), max(until, end)
    return total


def recorded() -> list[dict]:
    """The records that come with the course."""
    return [records.load(path) for path in sorted(REFERENCE.glob("link-sweep-*/*.json"))]


def main(config):
    folder = Path(config.folder or launch.RUNS / f"link-sweep-{datetime.now():%Y%m%d-%H%M%S}")
    if config.folder:  # not after minutes of training
        records.check_writable(folder / "record.json", "--folder")
    for record in sweep(config.rates.split(","), config.steps):
        link = record["link"]
        name = re.sub(r"\W+", "-", f"{link['strategy']} {link['rate']}".lower())
        records.write(folder / f"{name}.json", record)
        shown = f"{1e3 * min(link['steps']):6.0f} ms a step, {link['sent'][0] / 1e6:6.2f} MB left the first node"
        print(f"{link['rate']:>8}  {link['strategy']:12}{shown}", flush=True)
    print(f"Records: {folder}")


if __name__ == "__main__":
    try:
        main(options.parse(Config, __doc__))
    except UserError as error:
        ranks.exit_with_error(str(error))
