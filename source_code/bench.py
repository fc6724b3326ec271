"""Measure the course's claims about speed as ratios, each pair of runs side by side.

  python bench.py                          (or: make bench)

1. The data set in memory against the usual per-sample loader with two workers a rank: samples/s and accuracy.
2. What FSDP costs where it cannot help: FSDP2 in one unit on one rank against the plain loop, step time.
3. For how long saving a checkpoint holds up training: while it goes on (--async-checkpoint) against at once.

The two runs of a pair follow each other at once, and a ratio is taken pair by pair, so that a machine that
slows down or speeds up meanwhile does not decide. Printed: the median ratio and the lowest and highest.
"""

import statistics
import tempfile
from dataclasses import dataclass
from typing import Literal

from labkit import UserError
from labkit.measuring import machine
from labkit.running import launch, ranks
from labkit.running.options import Options, option, parse
from labkit.teaching import plots
from labkit.training import datasets
from tqdm import tqdm


@dataclass(frozen=True)
class Bench(Options):
    """How long to measure. The command line is made from these fields."""

    data: Literal[("auto", *datasets.NAMES)] = option("auto", "data set; auto: MNIST if it can be had")
    pairs: int = option(3, "how many pairs of runs for each ratio", least=1)


def run(lab, **options) -> dict:
    cluster = launch.Cluster(launcher="local")
    return launch.run(lab, cluster=cluster, quiet=True, on_progress=lambda *_: None, **options)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}, {len(ratios)} pairs)"


def loaders(data: str, pairs: int):
    """Samples/s of --loader memory over those of --loader torchvision, and both accuracies."""
    common = {"strategy": "fsdp1", "ranks": 2, "batch_size": 64, "epochs": 1 if data == "mnist" else 4}
    common["device"] = "cpu" if machine.gpus_here() < 2 else "cuda"
    ratios, accuracies = [], []
    for _ in tqdm(range(pairs), desc="loaders", leave=False):
        memory, usual = (
            run("mnist_fsdp.py", data=data, loader=loader, **common) for loader in ("memory", "torchvision")
        )
        ratios.append(memory["time"]["samples_per_second"] / usual["time"]["samples_per_second"])
        accuracies.append([r["accuracy"]["correct"] / r["accuracy"]["total"] for r in (memory, usual)])
    print(plots.caption(memory))
    print(f"samples/s, memory over torchvision: {spread(ratios)}")
    print(f"accuracy, memory and torchvision: {', '.join(f'{a:.2%} and {b:.2%}' for a, b in accuracies)}")


def fsdp_on_one_rank(data: str, pairs: int):
    """Step time of FSDP2 in one unit on one rank over that of the plain loop."""
    common = {"batch_size": 64, "max_steps": 60}
    ratios = []
    for _ in tqdm(range(pairs), desc="one rank", leave=False):
        plain = run("mnist_fsdp.py", data=data, strategy="single", **common)
        sharded = run("mnist_fsdp.py", data=data, strategy="fsdp2", ranks=1, **common)
        ratios.append(sharded["time"]["step"]["median"] / plain["time"]["step"]["median"])
    print(plots.caption(sharded))
    print(f"step time, FSDP2 on one rank over the plain loop: {spread(ratios)}")


def saving(pairs: int):
    """Seconds that training stands still for a save with --async-checkpoint over those without."""
    common = {"preset": "small", "ranks": 2, "batch_size": 1, "seq_len": 64, "max_steps": 12, "checkpoint_every": 4}
    common["device"] = "cpu" if machine.gpus_here() < 2 else "cuda"
    ratios = []
    for _ in tqdm(range(pairs), desc="saving", leave=False):
        stalls = []
        for meanwhile in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                record = run("gpt_fsdp.py", checkpoint=folder, keep=1, async_checkpoint=meanwhile, **common)
            stalls.append(record["checkpoints"]["stall"])
        ratios.append(stalls[0] / stalls[1])
    print(plots.caption(record))
    print(f"a save at once holds up training for {stalls[1]:.2f} s (the last run's median)")
    print(f"how long a save holds up training, meanwhile over at once: {spread(ratios)}")


def main():
    config = parse(Bench, __doc__)
    try:
        data = datasets.prepare(config.data)
        fsdp_on_one_rank(data, config.pairs)
        loaders(data, config.pairs)
        saving(config.pairs)
    except UserError as error:
        ranks.leave(str(error))


if __name__ == "__main__":
    main()
