# SPDX-License-Identifier: BSD-3-Clause
"""Validate the planner's step times: predict each step's time over a slow link, then train, and compare.

Inside a practice cluster with a network, as root; it changes the link's speed as it goes, and then back:

  make slurm LINK=200mbit && . .slurm/env.sh && cd source_code
  python -m proofs.step_time          three speeds, four strategies: three minutes; a table, and a record
  python -m proofs.step_time --record results/reference/step-time-intel-xeon-2-cores.json

One run calibrates: one strategy of FSDP on the link before it is slowed. PyTorch's profiler measures its collectives; the
rest of a step is compute. (FSDP blocks on each gloo call, so compute and communication are additive.) The bytes that a
rank sent in that time give the bandwidth within a node, and small all-reduces give the latency of both links. The
predictions follow from these, the link's future speeds, and the arithmetic of planner/timing/cost.py. They are written,
with a time stamp, before the first measured step. If one of them is more than 15 % off, the exit code is 1.
"""

import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise

from labkit import UserError
from labkit.measuring import records
from labkit.measuring.differences import largest
from labkit.running import options, practice_link, ranks
from labkit.running.options import option
from planner import predict
from planner.models.flops import hardware_flops
from planner.timing import cost

from proofs import link_sweep

SIZE = {"batch_size": 12, "seq_len": 128}  # computing takes about as long as the link
CALIBRATION = "FSDP2, kept"
NODE_SIZE = link_sweep.RANKS // link_sweep.NODES
WITHIN = 0.15  # of a measured step lies its prediction: what the course says of it
ROUNDS = 3  # through all strategies, so that what disturbs the machine for a while does not meet one of them only


@dataclass(frozen=True)
class Config(options.Options):
    """Speeds and steps. The command line is made from these fields."""

    rates: str = option(
        "400mbit,200mbit,100mbit", "speeds of the link, with commas between them", form=link_sweep.RATES
    )
    steps: int = option(4, f"steps to time in each of {ROUNDS} rounds", least=2)
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def calibrate(me, steps: int) -> dict:
    """Measure on this rank, over a link that is not slowed: the calibration's steps, and small calls. Every rank runs it."""
    import torch.distributed as dist

    groups = [dist.new_group(range(first, first + NODE_SIZE)) for first in range(0, me.world_size, NODE_SIZE)]
    small = {
        "among all": link_sweep.time_all_reduces(),
        "within": link_sweep.time_all_reduces(group=groups[me.rank // NODE_SIZE]),
    }
    return link_sweep.measure(me, steps, SIZE, [CALIBRATION])[CALIBRATION] | small


def calibration(steps: int) -> dict:
    """Run it: {"record", and in seconds "step", "communication", "compute", the latencies; "node bandwidth"}."""
    ((_, of_ranks),) = link_sweep.at_each_speed(["none"], calibrate, steps)
    record = link_sweep.summary(CALIBRATION, "none", of_ranks)
    step, communication = (statistics.median(record["link"][name]) for name in ("steps", "communication"))
    latency, within = (  # of a step of a ring: an all-reduce takes 2 (n − 1)
        median_of_fastest_rank(of_ranks, name) / (2 * (n - 1))
        for name, n in (("among all", link_sweep.RANKS), ("within", NODE_SIZE))
    )
    return {
        "record": record,
        "step": step,
        "communication": communication,
        "compute": step - communication,
        "network latency": latency,
        "node latency": within,
        "node bandwidth": intra_node_bandwidth(record, communication, latency),
    }


def intra_node_bandwidth(record: dict, communication: float, latency: float) -> float:
    """Bytes a second that a rank sends where no link is slowed: as fast as the machine hands messages over."""
    plan = predict.plan_of(record)
    calls = [(c["count"], cost.ring_bytes(c, plan, NODE_SIZE, "gloo")) for c in plan.traffic()]
    sent, steps = (sum(count * call[what] for count, call in calls) for what in ("rank", "steps"))
    return sent / (communication - steps * latency)


def median_of_fastest_rank(of_ranks: list[dict], name: str) -> float:
    """The median of the calls. One begins when the last rank makes it, so that rank's time counts."""
    return statistics.median(map(min, zip(*(rank[name] for rank in of_ranks), strict=True)))


def predicted(calibrated: dict, name: str, rate: str) -> dict:
    """The row of one strategy at one speed, before it is measured: ``cost.step_time``'s terms, and when they were found."""
    about = calibrated["record"]
    plan = predict.plan_of(about | {"config": about["config"] | config_of(name)})
    within = cost.Link(calibrated["node bandwidth"], calibrated["node latency"], "measured")
    network = cost.Link(practice_link.bytes_per_second(rate), calibrated["network latency"], "set; latency measured")
    speed = hardware_flops(plan) / calibrated["compute"]
    times = cost.step_time(plan, NODE_SIZE, within, network, speed, backend="gloo")
    return {"strategy": name, "rate": rate, "predicted": times, "predicted_at": now()}


def config_of(name: str) -> dict:
    import gpt_fsdp

    return asdict(gpt_fsdp.Config(**SIZE | link_sweep.STRATEGIES[name]))


def measure(me, steps: int) -> dict:
    """{strategy: seconds of each of its steps on this rank}. Every rank runs it."""
    import gpt_fsdp

    taken = {name: [] for name in link_sweep.STRATEGIES}
    for _ in range(ROUNDS):
        for name, given in link_sweep.STRATEGIES.items():
            seen = link_sweep.observe(me, gpt_fsdp, gpt_fsdp.Config(**SIZE | given), steps, watched=0)
            taken[name] += [after - before for before, after in pairwise(seen["ends"])]
    return taken


def compared(row: dict, of_ranks: list[dict]) -> dict:
    """The row with what was measured: of a step, the time of the slowest rank; of the steps, the median counts."""
    steps = [max(of_step) for of_step in zip(*(rank[row["strategy"]] for rank in of_ranks), strict=True)]
    measured = statistics.median(steps)
    difference = row["predicted"]["overlapped"] / measured - 1
    return row | {"measured_at": now(), "measured": measured, "difference": difference, "steps": steps}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def line(row: dict) -> str:
    times = row["predicted"]
    lowest, highest = min(row["steps"]), max(row["steps"])
    shown = f"{times['overlapped']:9.3f} s{row['measured']:10.3f} s   {lowest:.3f} to {highest:.3f} s"
    return f"{row['rate']:>8}  {row['strategy']:12}{shown}{row['difference']:+9.1%}{times['exposed']:11.3f} s"


def main(config: Config):
    path, rates = records.new_path("step-time", config.record), config.rates.split(",")
    about = {"calibration": calibration(ROUNDS * config.steps)}
    rows = [predicted(about["calibration"], name, rate) for rate in rates for name in link_sweep.STRATEGIES]
    records.write_rows(path, rows, **about)
    print(f"a step computes for {about['calibration']['compute']:.3f} s; {len(rows)} predictions are in {path}")
    print("    link  strategy    predicted  measured   from … to         difference  exposed", flush=True)
    about["measured_from"] = now()
    for rate, of_ranks in link_sweep.at_each_speed(rates, measure, config.steps):
        for number, row in enumerate(rows):
            if row["rate"] == rate:
                rows[number] = compared(row, of_ranks)
                print(line(rows[number]), flush=True)
    records.write_rows(path, rows, **about)
    worst = largest(abs(row["difference"]) for row in rows)
    print(f"the largest difference is {worst:.1%}; record: {path}")
    if not worst <= WITHIN:
        sys.exit(
            f"proofs/step_time.py: {worst:.1%} is more than {WITHIN:.0%}: was the machine busy, or is the planner wrong?"
        )


if __name__ == "__main__":
    try:
        main(options.parse(Config, __doc__))
    except UserError as error:
        ranks.exit_with_error(str(error))
