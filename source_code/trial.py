"""Put the predictions on trial: train in dozens of configurations, and compare peak memory and traffic with the arithmetic.

  python trial.py                          all of them (three minutes on two cores); a table, and a record in results/runs/
  python trial.py --every 6 --record trial.json
  python trial.py --simulated              Llama 3's shapes on 8 to 1024 ranks: predicted beside simulated

Each configuration trains for six steps on the CPU, where the meters count to the byte; those with equally many ranks
share one launch. What is compared: every category that stays between steps, the peak, every collective.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import import_module

import pandas
import torch
from labkit import UserError, holds
from labkit.measuring import records
from labkit.measuring.meters import TRACED_STEPS
from labkit.running import cells, launch, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import deepspeed_zero
from planner import predict, zero

PERSISTENT = ("parameters", "gradients", "optimizer state")
STEPS = TRACED_STEPS[-1] + 1
LLAMA = [("llama3-8b", 8), ("llama3-8b", 128), ("llama3-70b", 64), ("llama3-70b", 1024), ("llama3-405b", 512)]


def configurations() -> list[dict]:
    """[{"script", "ranks", "config"}, …]: 3 sequences of 33 tokens, and 2, 3 and 4 ranks, so that little divides evenly.

    Where matrix products are split among ranks they are 34 or 36 tokens: these must.
    """
    found = [mnist(1, strategy="single"), mnist(1, strategy="single", precision="fp64")]
    found += [mnist(n, strategy="ddp") for n in (2, 3, 4)]
    for strategy in ("fsdp1", "fsdp2"):
        found += [mnist(n, strategy=strategy) for n in (2, 3)]
        found += [mnist(n, strategy=strategy, wrap="size") for n in (2, 3, 4)]
        found += [mnist(3, strategy=strategy, wrap="size", min_num_params=300, sharding="grad-op")]
    for optimizer in ("adamw", "adamw-fused", "adamw-for-loop", "momentum", "sgd"):
        found += [gpt(1, strategy="single", optimizer=optimizer)]
        found += [gpt(2, strategy="fsdp2", optimizer=optimizer)]
    for recompute in ("none", "full", "selective"):
        found += [gpt(1, strategy="single", recompute=recompute, tied=True)]
        found += [gpt(2, strategy="ddp", recompute=recompute)]
        found += [gpt(3, strategy=strategy, recompute=recompute) for strategy in ("fsdp1", "fsdp2")]
        found += [gpt(4, strategy="fsdp2", recompute=recompute, precision="bf16")]
        found += [gpt(4, strategy="fsdp2", recompute=recompute, mesh="2x2")]
    for keep in ("false", "2"):
        found += [gpt(4, strategy="fsdp2", reshard_after_forward=keep)]
    found += [gpt(3, strategy="fsdp1", reshard_after_forward="false"), gpt(4, strategy="fsdp1", mesh="2x2")]
    found += [gpt(2, strategy="fsdp2", lora=4), gpt(3, strategy="fsdp2", lora=3, recompute="full")]
    found += [gpt(2, strategy=strategy, accumulate=3, sync="last") for strategy in ("ddp", "fsdp1", "fsdp2")]
    found += [gpt(2, strategy="fsdp2", accumulate=2), gpt(4, strategy="fsdp2", prefetch=2)]
    found += [gpt(3, strategy="fsdp2", tied=True), gpt(2, strategy="fsdp1", precision="bf16")]
    found += tensor_parallel()
    for recompute in ("none", "full", "selective"):  # by autocast; AdamW's own peak would be higher than what it does
        found += [gpt(1, strategy="single", recompute=recompute, precision="bf16", optimizer="sgd", tied=True)]
        found += [gpt(2, strategy="ddp", recompute=recompute, precision="bf16", optimizer="sgd")]
    found += [gpt(2, strategy="ddp", precision="bf16", lora=4, batch_size=9)]
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        found += [gpt(2, strategy=strategy, precision="bf16", accumulate=3, sync="last")]
        found += [mnist(3, strategy=strategy, precision="bf16")]
    found += [mnist(2, strategy="fsdp2", precision="bf16", wrap="size"), mnist(1, strategy="single", precision="bf16")]
    for schedule in ("gpipe", "1f1b"):
        found += [pipeline(2, schedule=schedule, accumulate=4)]
        found += [pipeline(4, schedule=schedule, accumulate=6, recompute="full")]
        found += [pipeline(3, schedule=schedule, accumulate=4, precision="bf16", optimizer="sgd")]
    return found + choices() + zero_configurations()


def zero_configurations() -> list[dict]:
    """Each stage of DeepSpeed's ZeRO, and of PyTorch's the one that is neither DDP nor FSDP2; see ``runnable``."""
    found = [zero_run(2, stage="1", precision="bf16", accumulate=2)]
    found += [zero_run(3, stage="1", recompute="full", tied=True)]
    found += [zero_run(3, engine="deepspeed", stage="0"), zero_run(3, engine="deepspeed", stage="1", batch_size=9)]
    found += [zero_run(3, engine="deepspeed", stage=stage, recompute="full", tied=True) for stage in ("2", "3")]
    for stage in ("0", "1", "2", "3"):
        found += [zero_run(4, engine="deepspeed", stage=stage, precision="bf16", accumulate=3)]
    return found


def choices() -> list[dict]:
    """What people choose besides: which blocks and results to recompute, bf16 throughout, a loss in parts, units."""
    fsdp1, fsdp2, bf16 = {"strategy": "fsdp1"}, {"strategy": "fsdp2"}, {"precision": "bf16"}
    alternate, apart, parts = {"recompute": "alternate"}, {"units": "apart"}, {"loss_chunks": 4}
    sgd = {"optimizer": "sgd"}  # where AdamW's own peak would be higher than what is on trial
    pure = bf16 | {"weights": "bf16"}
    found = [gpt(1, strategy="single", **alternate, **sgd), gpt(2, strategy="ddp", **alternate, **bf16, **sgd)]
    found += [gpt(3, **fsdp1, **alternate), gpt(4, **fsdp2, **alternate, **bf16), gpt(2, **fsdp2, **alternate, lora=4)]
    found += [gpt(2, **fsdp2, **alternate, **sgd, mesh="tensor=2", seq_len=34)]
    found += [gpt(3, **fsdp2, recompute=how, recompute_every=2) for how in ("full", "selective", "alternate")]
    found += [gpt(2, **fsdp1, recompute="full", recompute_every=3, preset="small", **sgd)]
    found += [gpt(1, strategy="single", **pure, **sgd), gpt(2, strategy="ddp", **pure, optimizer="adamw-fused")]
    found += [gpt(3, **fsdp1, **pure), gpt(3, **fsdp2, **pure), gpt(4, **fsdp2, **pure, mesh="2x2")]
    found += [gpt(2, **fsdp2, **pure, accumulate=3, sync="last"), gpt(2, **fsdp1, **pure, accumulate=3, sync="last")]
    found += [
        gpt(1, strategy="single", **parts, **sgd),
        gpt(1, strategy="single", **parts, **bf16, tied=True, optimizer="momentum"),
    ]
    found += [gpt(2, strategy="ddp", **parts, accumulate=2), gpt(2, strategy="ddp", **parts, **bf16, batch_size=5)]
    found += [gpt(3, **fsdp1, **parts, **bf16), gpt(3, **fsdp2, **parts), gpt(3, **fsdp2, **parts, **bf16, tied=True)]
    found += [gpt(2, **fsdp2, **parts, lora=4), gpt(4, **fsdp2, **parts, **pure, recompute="full")]
    found += [gpt(3, **strategy, **apart) for strategy in (fsdp1, fsdp2)]
    found += [gpt(2, **fsdp2, **apart, **bf16, reshard_after_forward="false"), gpt(4, **fsdp2, **apart, prefetch=2)]
    # On the CPU what is offloaded stays in the same memory: the same bytes, on two sides (chapter 06).
    found += [gpt(3, **fsdp2, cpu_offload=True), gpt(2, **fsdp2, **bf16, cpu_offload=True, accumulate=2)]
    found += [gpt(2, **fsdp1, **apart, **bf16, **parts), gpt(4, **fsdp2, **apart, **pure, **parts, recompute="full")]
    return found


def runnable(one: dict) -> bool:
    """Whether one of ``configurations`` can be tried here: DeepSpeed need not be installed."""
    return one["config"].get("engine") != "deepspeed" or holds(deepspeed_zero.check)


def tensor_parallel() -> list[dict]:
    """Products split among two ranks, beside one shard, two, or two replicas; and among four."""
    found = [gpt(2, mesh="tensor=2", seq_len=34), gpt(2, mesh="tensor=2", seq_len=34, precision="bf16", batch_size=1)]
    found += [gpt(4, mesh="shard=2,tensor=2", seq_len=34, recompute="selective", accumulate=3, sync="last")]
    found += [gpt(4, mesh="shard=2,tensor=2", seq_len=34, recompute="full", precision="bf16")]
    found += [gpt(4, mesh="replicate=2,tensor=2", seq_len=34, tied=True)]
    found += [gpt(4, mesh="tensor=4", preset="small", seq_len=36)]
    return [one | {"config": {"strategy": "fsdp2"} | one["config"]} for one in found]


def mnist(ranks: int, **config) -> dict:
    return {"script": "mnist_fsdp.py", "ranks": ranks, "batch_size": 9, "config": config}


def gpt(ranks: int, **config) -> dict:
    return {"script": "gpt_fsdp.py", "ranks": ranks, "config": {"batch_size": 3, "seq_len": 33} | config}


def pipeline(ranks: int, **config) -> dict:
    return gpt(ranks, **config) | {"script": "gpt_pipeline.py"}


def measure(me, tried: list[dict]) -> list[dict]:
    """Run on every rank: train in each configuration, and return the records' "memory" and "traffic"."""
    import gpt_fsdp

    results = []
    os.environ.pop(progress.VARIABLE, None)  # a bar that starts again with each run would say nothing
    with contextlib.redirect_stdout(io.StringIO()):  # dozens of runs would each tell their losses
        for one in tried:
            if one["script"] == "mnist_fsdp.py":
                measured = measure_mnist(me, one)
            else:
                lab = lab_of(one)
                config = lab.Config(max_steps=STEPS, device="cpu", **one["config"])
                measured = gpt_fsdp.train(config, me, lab.prepare, lab.compute_loss)
            results.append({"memory": measured["memory"], "traffic": measured["traffic"]})
    return results


def measure_mnist(me, one: dict) -> dict:
    """A few steps of mnist_fsdp.py's loop on random images: memory does not depend on what they show."""
    import mnist_fsdp
    from labkit.measuring.meters import Meter
    from labkit.running.progress import Progress
    from labkit.training.models import Net

    config = mnist_fsdp.Config(**one["config"])
    model = mnist_fsdp.parallelize(Net(config.dropout).to(config.dtype), config, me)
    optimizer = torch.optim.Adadelta(model.parameters())
    meter = Meter(model, optimizer, me.device, progress=Progress(me, STEPS, 0))
    size, losses = one["batch_size"], []
    batches = ((torch.rand(size, 1, 28, 28, dtype=config.dtype), torch.zeros(size).long()) for _ in range(STEPS))
    for images, labels in meter.watch(batches):
        losses.append(mnist_fsdp.train_step(model, optimizer, images, labels, config))
    meter.finish()
    return meter.summary(size)


def zero_run(ranks: int, **config) -> dict:
    return {"script": "gpt_zero.py", "ranks": ranks, "config": {"batch_size": 3, "seq_len": 33} | config}


def lab_of(one: dict):
    return import_module(one["script"].removesuffix(".py"))


def planned(one: dict, rank: int = 0) -> predict.Plan:
    """The plan of one of ``configurations``: what it does not say is as the lab script has it."""
    return predict.plan_of(one | {"device": "cpu", "config": asdict(lab_of(one).Config(**one["config"]))}, rank)


def compare_ranks(one: dict, measured: list[dict]) -> dict:
    """The row of one configuration: of rank 0, or where ranks differ of the one that agrees least."""
    differ = one["script"] == "gpt_pipeline.py" or planned(one).strategy in zero.UNEVEN
    rows = [compare(one, measured[rank], rank) for rank in range(one["ranks"] if differ else 1)]
    return max(rows, key=lambda r: (not r["persistent equal"], not r["traffic equal"], abs(r["difference"])))


def compare(one: dict, measured: dict, rank: int = 0) -> dict:
    """One row of the table: bytes measured and predicted, and whether they agree."""
    plan = planned(one | {"versions": {"torch": torch.__version__}}, rank)
    where, terms = plan.peak()
    predicted, peak = predict.by_category(terms), measured["memory"]["peak"]
    # Beside the peak's: what is there as a step begins, of which every byte must be right.
    kept = predict.by_category(plan.persistent())
    started = {name: measured["memory"]["start"][name] for name in kept}
    return one | {
        "rank": rank,
        "measured": {name: size for name, size in peak.items() if size},
        "predicted": predicted,
        "where": where,
        "difference": predict.total(predicted) / sum(peak.values()) - 1,
        "persistent equal": started == kept and all(peak[name] == predicted.get(name, 0) for name in PERSISTENT),
        "traffic equal": counted(measured["traffic"]) == counted(plan.traffic()),
    }


def counted(traffic: list[dict]) -> Counter:
    """(kind, bytes) → how many."""
    return sum((Counter({(c["kind"], c["bytes"]): c["count"]}) for c in traffic), Counter())


def run(tried: list[dict]) -> list[dict]:
    """Measure and compare; each number of ranks in one launch."""
    rows = []
    for count in sorted({one["ranks"] for one in tried}):
        mine = [one for one in tried if one["ranks"] == count]
        cluster = launch.Cluster(launcher="local")
        measured = cells.on_ranks(measure, mine, ranks=count, cluster=cluster, timeout=600)
        rows += [compare_ranks(one, results) for one, *results in zip(mine, *measured, strict=True)]
    return rows


def table(rows: list[dict]) -> pandas.DataFrame:
    def name(row):
        how = next((name for name in ("strategy", "schedule") if name in row["config"]), None)
        options = {k: v for k, v in row["config"].items() if k not in (how, "batch_size", "seq_len")}
        return " ".join([row["config"].get(how, ""), *(f"{k}={v}" for k, v in options.items())]).strip()

    return pandas.DataFrame(
        {
            "network": row["script"].split("_")[0],
            "ranks": row["ranks"],
            "configuration": name(row),
            "measured [bytes]": f"{sum(row['measured'].values()):,}",
            "difference": f"{row['difference']:+.3%}",
            "persistent": "equal" if row["persistent equal"] else "DIFFERS",
            "traffic": "equal" if row["traffic equal"] else "DIFFERS",
        }
        for row in rows
    )


def simulate(model: str, count: int) -> dict:
    """Predicted and simulated peak, bytes, of a Llama 3 shape on so many ranks; what the simulation took."""
    words = f"--model {model} --ranks {count} --batch 1 --seq 8192 --precision bf16 --recompute full --device cpu"
    begin = time.perf_counter()
    command = [sys.executable, "plan.py", *words.split(), "--simulate", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=launch.SOURCE) as process:
        found = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)  # of this process alone
        process.returncode = 0
    return {
        "model": model,
        "ranks": count,
        "predicted": found["peak"],
        "where": found["where"],
        "simulated": found["simulated"],
        "simulated_at": found["simulated_at"],
        "difference": found["peak"] / found["simulated"] - 1,
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
class Trial(Options):
    """The trial. The command line is made from these fields."""

    every: int = option(1, "take one configuration in so many", least=1)
    simulated: bool = option(False, "compare with simulations of Llama 3's shapes instead")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Trial, __doc__)
    try:
        path = records.new_path("trial", options.record)
        rows = (
            [simulate(*one) for one in LLAMA]
            if options.simulated
            else run([*filter(runnable, configurations())][:: options.every])
        )
    except UserError as error:
        ranks.leave(str(error))
    shown = simulated_table(rows) if options.simulated else table(rows)
    print(shown.to_markdown(index=False, disable_numparse=True))
    records.write_rows(path, rows)
    worst = max(abs(row["difference"]) for row in rows)
    print(f"\n{len(rows)} configurations; the largest difference of a peak is {worst:.3%}; record: {path}")


if __name__ == "__main__":
    main()
