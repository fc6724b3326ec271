"""Put predicted step times on trial: say what a step will take over a slow link, then train, and compare.

Inside a practice cluster with a network, as root; it changes the link's speed as it goes, and then back:

  make slurm LINK=200mbit && . .slurm/env.sh && cd source_code
  python step_trial.py                     three speeds, four strategies: three minutes; a table, and a record
  python step_trial.py --record results/reference/step-times-intel-xeon-2-cores.json

One run is for calibration: one strategy on the link before it is slowed. Its step less its communication is what a
step computes. (It is one of FSDP's, which under gloo waits for each call, so that the two add up.) The latency of both
links, and the bandwidth within a node, are all-reduces of two sizes there. From these, the speeds that the link will be
given, and the arithmetic of planner/cost.py, come the predictions. They are in the record, with their time, before the
first measured step.
"""

import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import links
from labkit import UserError
from labkit.measuring import practice_link, records
from labkit.running import options, ranks
from labkit.running.options import option
from planner import cost, predict
from planner.flops import of_hardware

SIZE = {"batch_size": 12, "seq_len": 128}  # computing takes about as long as the link
CALIBRATION = "FSDP2, kept"
NODE_SIZE = links.RANKS // links.NODES
LARGE = 2**18  # numbers in fp32: 1 MiB, about as much as a unit sends


@dataclass(frozen=True)
class Config(options.Options):
    """What to try. The command line is made from these fields."""

    rates: str = option("400mbit,200mbit,100mbit", "speeds of the link, with commas between them", form=links.RATES)
    steps: int = option(10, "steps to time; half as many more are watched by the profiler", least=5)
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def calibrate(me, steps: int) -> dict:
    """What this rank sees on a link that is not slowed: the calibration's steps, and all-reduces. Every rank runs it."""
    import torch.distributed as dist

    groups = [dist.new_group(range(first, first + NODE_SIZE)) for first in range(0, me.world_size, NODE_SIZE)]
    mine = groups[me.rank // NODE_SIZE]
    within = {"within": links.shortest_call(group=mine), "large within": links.shortest_call(LARGE, mine)}
    return links.measure(me, steps, SIZE, [CALIBRATION])[CALIBRATION] | within


def calibration(steps: int) -> dict:
    """Run it: {"strategy", "size", "config", …, seconds that a step computes, the links}."""
    ((_, of_ranks),) = links.at_each_speed(["none"], calibrate, steps)
    record = links.summary(CALIBRATION, "none", of_ranks)
    step, communication = (statistics.median(record["link"][name]) for name in ("steps", "communication"))
    small, large = (max(rank[name] for rank in of_ranks) for name in ("within", "large within"))
    sent = 2 * (NODE_SIZE - 1) / NODE_SIZE * 4 * LARGE  # by each rank, to all-reduce
    return {
        "record": record,
        "step": step,
        "communication": communication,
        "compute": step - communication,
        # of a step of a ring: an all-reduce takes 2 (n − 1)
        "network latency": record["link"]["latency"] / (2 * (links.RANKS - 1)),
        "node latency": small / (2 * (NODE_SIZE - 1)),
        "node bandwidth": sent / (large - small),
    }


def predicted(calibrated: dict, name: str, rate: str) -> dict:
    """The row of one strategy at one speed, before it is measured: ``cost.step_time``'s terms, and when they were found."""
    about = calibrated["record"]
    plan = predict.plan_of(about | {"config": about["config"] | config_of(name)})
    within = cost.Link(calibrated["node bandwidth"], calibrated["node latency"], "measured")
    network = cost.Link(practice_link.bytes_per_second(rate), calibrated["network latency"], "set; latency measured")
    speed = of_hardware(plan) / calibrated["compute"]
    times = cost.step_time(plan, NODE_SIZE, within, network, speed, backend="gloo")
    return {"strategy": name, "rate": rate, "predicted": times, "predicted_at": now()}


def config_of(name: str) -> dict:
    import gpt_fsdp

    return asdict(gpt_fsdp.Config(**SIZE | links.STRATEGIES[name]))


def compared(row: dict, record: dict) -> dict:
    """The row with what was measured, of which the median counts."""
    measured = statistics.median(record["link"]["steps"])
    known = {name: record["link"][name] for name in ("steps", "communication")}
    difference = row["predicted"]["overlapped"] / measured - 1
    return row | {"measured_at": record["date"], "measured": measured, "difference": difference} | known


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def line(row: dict) -> str:
    times = row["predicted"]
    lowest, highest = min(row["steps"]), max(row["steps"])
    shown = f"{times['overlapped']:9.3f} s{row['measured']:10.3f} s   {lowest:.3f} to {highest:.3f} s"
    return f"{row['rate']:>8}  {row['strategy']:12}{shown}{row['difference']:+9.1%}{times['exposed']:11.3f} s"


def main(config: Config):
    path, rates = records.new_path("step-times", config.record), config.rates.split(",")
    calibrated = calibration(config.steps)
    rows = {(rate, name): predicted(calibrated, name, rate) for rate in rates for name in links.STRATEGIES}
    about = {"calibration": calibrated, "predictions_written_at": now()}
    records.write_rows(path, [*rows.values()], **about)
    print(f"a step computes for {calibrated['compute']:.3f} s; {len(rows)} predictions are in {path}")
    print("    link  strategy    predicted  measured   from … to         difference  exposed", flush=True)
    about["measured_from"] = now()
    for record in links.sweep(rates, config.steps, size=SIZE):
        place = record["link"]["rate"], record["link"]["strategy"]
        rows[place] = compared(rows[place], record)
        print(line(rows[place]), flush=True)
    records.write_rows(path, [*rows.values()], **about)
    print(f"the largest difference is {max(abs(row['difference']) for row in rows.values()):.1%}; record: {path}")


if __name__ == "__main__":
    try:
        main(options.parse(Config, __doc__))
    except UserError as error:
        ranks.leave(str(error))
