# SPDX-License-Identifier: BSD-3-Clause
"""Validate the planner's memory and traffic: train in dozens of configurations, and compare measured with predicted.

  python -m proofs.memory                        all listed configurations: five minutes on two cores
  python -m proofs.memory --every 6 --record sixth.json
  python -m proofs.memory --random 60 --seed 7   60 configurations drawn from all that the labs accept; lists what is refused
  python -m proofs.memory --simulated            Llama 3's shapes on 8 to 1,024 ranks: predicted and simulated

It prints a table and writes a record to results/runs/. Each configuration trains for five steps on the CPU, where the
meters count to the byte; configurations with the same number of ranks share launches. The record gets its rows at the
end of each launch. Compared are the peak, each category of persistent memory, every collective, and the process groups.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date

import pandas
import torch
from labkit import UserError, succeeds
from labkit.measuring import process_groups, records
from labkit.measuring.differences import largest
from labkit.measuring.meters import TRACED_STEPS
from labkit.running import launch, notebook_ranks, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import deepspeed_zero
from planner import predict
from planner.ops import routing
from planner.parallel import groups, zero
from planner.parallel.mesh import arrange

from proofs import configurations, knob_settings
from proofs.configurations import lab_of

PERSISTENT = ("parameters", "gradients", "optimizer state")
STEPS = TRACED_STEPS[-1] + 1
PER_LAUNCH = 25  # configurations: a launch takes as long as two or three of them, and one that fails loses them all
LLAMA = [("llama3-8b", 8), ("llama3-8b", 128), ("llama3-70b", 64), ("llama3-70b", 1024), ("llama3-405b", 512)]


def runnable(one: dict) -> bool:
    """Return whether a configuration can be trained here: DeepSpeed need not be installed."""
    return supported(one) and (one["config"].get("engine") != "deepspeed" or succeeds(deepspeed_zero.check))


def supported(one: dict) -> bool:
    """Return whether the installed PyTorch has a configuration's knobs."""
    return succeeds(lambda: knob_settings.check(one.get("knobs", {})))


def measure(me, configs: list[dict]) -> list[dict]:
    """Train in each configuration, and return the records' "memory" and "traffic", of experts "routing", and new "groups".

    Collective.
    """
    results = []
    os.environ.pop(progress.VARIABLE, None)  # a progress bar for dozens of short runs would mean nothing
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints a lot
        for one in configs:
            with deepspeed_zero.contained():
                measured = (measure_mnist if one["script"] == "mnist_fsdp.py" else measure_gpt)(me, one)
            kept = "memory", "traffic", "groups", "routing"  # the last only of a mixture of experts
            results.append({name: measured[name] for name in kept if name in measured})
    return results


def measure_gpt(me, one: dict) -> dict:
    """Train a few steps as gpt_fsdp.py does, without its validation."""
    import gpt_fsdp
    from labkit.measuring.meters import Meter
    from labkit.running.progress import Progress
    from labkit.training import loss_scaling, text

    lab, before = lab_of(one), process_groups.count()
    config = lab.Config(max_steps=STEPS, device="cpu", **one["config"])
    with knob_settings.sharding(one.get("knobs", {})) as set_methods:
        model, optimizer, train_one = lab.prepare(config, me)
    set_methods(model)
    groups = process_groups.count() - before
    meter = Meter(model, optimizer, me.device, progress=Progress(me, STEPS, 0))
    loss_scaling.set_scale(optimizer, 1.0)  # a step that overflows would be skipped
    losses, tokens = [], text.load(me.device).train
    for inputs, targets in meter.watch(gpt_fsdp.training_batches(tokens, config, me, range(STEPS))):
        losses += train_one(inputs, targets)
    meter.finish()
    return meter.summary(config.batch_size) | {"groups": groups}


def measure_mnist(me, one: dict) -> dict:
    """Train a few steps as mnist_fsdp.py does, on random images: memory does not depend on their content."""
    import mnist_fsdp
    from labkit.measuring.meters import Meter
    from labkit.running.progress import Progress
    from labkit.training.models import Net

    config, before = mnist_fsdp.Config(**one["config"]), process_groups.count()
    model = mnist_fsdp.parallelize(Net(config.dropout).to(config.dtype), config, me)
    optimizer = torch.optim.Adadelta(model.parameters())
    meter = Meter(model, optimizer, me.device, progress=Progress(me, STEPS, 0))
    size, losses = one["batch_size"], []
    batches = ((torch.rand(size, 1, 28, 28, dtype=config.dtype), torch.zeros(size).long()) for _ in range(STEPS))
    for images, labels in meter.watch(batches):
        losses.append(mnist_fsdp.train_step(model, optimizer, images, labels, config))
    meter.finish()
    return meter.summary(size) | {"groups": process_groups.count() - before}


def planned(one: dict, rank: int = 0) -> predict.Plan:
    """Plan a configuration of ``configurations``; options that it leaves out have the lab's defaults."""
    plan = predict.plan_of(one | {"device": "cpu", "config": asdict(lab_of(one).Config(**one["config"]))}, rank)
    return replace(plan, **one.get("knobs", {}))


def planned_groups(one: dict) -> int:
    """Return the process groups that a rank of a configuration makes, besides the default one."""
    config, ranks = lab_of(one).Config(**one["config"]), one["ranks"]
    if one["script"] == "gpt_pipeline.py":
        strategy, mesh = "", arrange(ranks, f"pipeline={ranks}")
    else:
        strategy, mesh = planned(one).strategy, arrange(ranks, getattr(config, "mesh", None))
    reshard = getattr(config, "reshard_after_forward", "true")
    return groups.total(groups.of_training(one["script"], ranks, strategy, mesh, reshard)) - 1


def refusal(one: dict) -> str | None:
    """Return the sentence with which the lab, or the planner, refuses a configuration; None if it can be trained."""
    try:
        if one["config"].get("engine") == "deepspeed":
            deepspeed_zero.check()
        knob_settings.check(one.get("knobs", {}))
        config = lab_of(one).Config(ranks=one["ranks"], **one["config"])
        if hasattr(config, "arranged"):
            config.arranged(one["ranks"])
        planned(one)
    except UserError as error:
        return str(error)


def split_by_refusal(drawn: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return (configurations that can be trained, those refused, with the sentence under "refused")."""
    refusals = [(one, refusal(one)) for one in drawn]
    return [one for one, sentence in refusals if not sentence], [one | {"refused": why} for one, why in refusals if why]


def todays_seed() -> int:
    return int(f"{date.today():%Y%m%d}")


def compare_ranks(one: dict, measured: list[dict]) -> dict:
    """Return the row of one configuration: of rank 0, or where ranks differ, of the rank that agrees least."""
    plan = planned(one)
    differ = one["script"] == "gpt_pipeline.py" or plan.strategy in zero.UNEVEN or plan.ep_degree > 1
    rows = [compare(one, measured[rank], rank) for rank in range(one["ranks"] if differ else 1)]
    return max(rows, key=lambda r: (not r["persistent equal"], not r["traffic equal"], abs(r["difference"])))


def compare(one: dict, measured: dict, rank: int = 0) -> dict:
    """Compare one rank's measured memory and traffic with its plan: a row of the table, in bytes.

    Of a mixture of experts, the plan is for the measured routing; the row keeps its part of it.
    """
    one = one | {name: measured[name] for name in ("routing",) if name in measured}
    plan = planned(one | {"versions": {"torch": torch.__version__}}, rank)
    where, terms = plan.peak()
    predicted, peak = predict.by_category(terms), measured["memory"]["peak"]
    # Besides the peak, the memory at the start of a step must be right to the byte.
    persistent = predict.by_category(plan.persistent())
    started = {name: measured["memory"]["start"][name] for name in persistent}
    row = {
        "rank": rank,
        "measured": {name: size for name, size in peak.items() if size},
        "predicted": predicted,
        "where": where,
        "difference": predict.total(predicted) / sum(peak.values()) - 1,
        "persistent equal": started == persistent and all(peak[name] == predicted.get(name, 0) for name in PERSISTENT),
        "traffic equal": counted(measured["traffic"]) == counted(plan.traffic()),
        # DeepSpeed copies the default group once in a process, whatever it trains there
        "groups equal": plan.deepspeed or measured["groups"] == planned_groups(one),
    }
    if "routing" in one:
        row["routing"] = routing.of_rank(one["routing"], rank, plan.ep_degree)
    return one | row


def counted(traffic: list[dict]) -> Counter:
    """Return {(kind, bytes): number of collectives}."""
    return sum((Counter({(c["kind"], c["bytes"]): c["count"]}) for c in traffic), Counter())


def run(configs: list[dict]) -> Iterator[dict]:
    """Yield the row of each configuration as soon as the launch that measured it is over.

    Args:
        tried: configurations; up to PER_LAUNCH of those with equally many ranks share a launch.

    Raises:
        RunFailed: a launch failed. The rows of the launches before it have been yielded.
    """
    for count in sorted({one["ranks"] for one in configs}):
        mine = [one for one in configs if one["ranks"] == count]
        for first in range(0, len(mine), PER_LAUNCH):
            some, cluster = mine[first : first + PER_LAUNCH], launch.Cluster(launcher="local")
            measured = notebook_ranks.on_ranks(measure, some, ranks=count, cluster=cluster, timeout=600)
            for one, *results in zip(some, *measured, strict=True):
                yield compare_ranks(one, results)


def name_of(one: dict) -> str:
    """Format a configuration's options as one line."""
    how = next((name for name in ("strategy", "schedule") if name in one["config"]), None)
    options = {k: v for k, v in one["config"].items() if k not in (how, "batch_size", "seq_len")}
    return " ".join([one["config"].get(how, ""), *(f"{k}={v}" for k, v in options.items())]).strip()


def table(rows: list[dict]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "network": row["script"].split("_")[0],
            "ranks": row["ranks"],
            "configuration": name_of(row),
            "measured [bytes]": f"{sum(row['measured'].values()):,}",
            "difference": f"{row['difference']:+.3%}",
            "persistent": "equal" if row["persistent equal"] else "DIFFERS",
            "traffic": "equal" if row["traffic equal"] else "DIFFERS",
        }
        for row in rows
    )


def simulate(model: str, count: int) -> dict:
    """Return the predicted and the simulated peak (bytes) of a Llama 3 shape on ``count`` ranks, and the simulation's cost."""
    words = (
        f"--preset {model} --ranks {count} --batch-size 1 --seq-len 8192 --precision bf16 --recompute full --device cpu"
    )
    begin = time.perf_counter()
    command = [sys.executable, "plan.py", *words.split(), "--simulate", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=launch.SOURCE) as process:
        answer = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)  # of this process alone
        process.returncode = 0
    return {
        "model": model,
        "ranks": count,
        "predicted": answer["peak"],
        "where": answer["where"],
        "simulated": answer["simulated"],
        "simulated_at": answer["simulated_at"],
        "difference": answer["peak"] / answer["simulated"] - 1,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_rss": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def simulated_table(rows: list[dict]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "model": row["model"],
            "ranks": row["ranks"],
            "predicted [GiB]": f"{row['predicted'] / 2**30:.2f}",
            "simulated [GiB]": f"{row['simulated'] / 2**30:.2f}",
            "difference": f"{row['difference']:+.3%}",
            "peak at": row["where"],
            "took [s]": f"{row['seconds']:.0f}",
        }
        for row in rows
    )


@dataclass(frozen=True)
class Config(Options):
    """Which configurations to train. The command line is made from these fields."""

    every: int = option(1, "train every N-th configuration only", least=1)
    random: int | None = option(None, "draw N configurations at random instead", least=1)
    seed: int | None = option(None, "seed of the draws (default: today's date, such as 20261122)", needs="random")
    simulated: bool = option(False, "compare with simulations of Llama 3's shapes instead")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def chosen(options: Config) -> tuple[list[dict], list[dict]]:
    """Return (configurations to train, those drawn that are refused, with the sentence under "refused")."""
    if not options.random:
        return [*filter(runnable, configurations.listed())][:: options.every], []
    seed = todays_seed() if options.seed is None else options.seed
    return split_by_refusal(configurations.drawn(seed, options.random))


def main():
    options, rows = parse(Config, __doc__), []
    try:
        path = records.new_path("memory", options.record)
        configs, refused = chosen(options)
        about = {"refused": refused} if options.random else {}
        for row in (simulate(*one) for one in LLAMA) if options.simulated else run(configs):
            rows.append(row)
            records.write_rows(path, rows, **about)  # at once: a later failure must not cost what was measured before
        if not rows:  # all were refused
            records.write_rows(path, rows, **about)
    except UserError as error:
        if rows:
            print(f"{len(rows)} configurations were measured before; record: {path}")
        ranks.exit_with_error(str(error))
    shown = simulated_table(rows) if options.simulated else table(rows)
    print(shown.to_markdown(index=False, disable_numparse=True))
    for one in refused:
        print(f"refused: {name_of(one)}: {one['refused']}")
    worst = largest([0.0, *(abs(row["difference"]) for row in rows)])
    print(f"\n{len(rows)} configurations; the largest difference of a peak is {worst:.3%}; record: {path}")


if __name__ == "__main__":
    main()
