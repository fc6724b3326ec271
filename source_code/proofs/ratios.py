# SPDX-License-Identifier: BSD-3-Clause
"""Measure the course's claims about speed as ratios of paired runs.

  python -m proofs.ratios        (or: make bench)

1. Data loading: the data set in memory over the usual per-sample loader with two workers per rank (samples/s, accuracy).
2. FSDP's overhead where it cannot help: FSDP2 in one unit on one rank over the plain loop (step time).
3. Training stalled by a save: with --async-checkpoint over without (seconds).

The runs of a pair follow each other immediately, in alternating order, and each pair gives one ratio. So the result does
not depend on a machine that slows down or speeds up, or on what the first run leaves behind, such as the page cache.
It prints the median ratio, the lowest and the highest.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from labkit import UserError
from labkit.running import launch, ranks, site
from labkit.running.options import Options, option, parse
from labkit.teaching import plots
from labkit.training import datasets
from tqdm import tqdm


@dataclass(frozen=True)
class Config(Options):
    """How long to measure. The command line is made from these fields."""

    data: Literal[("auto", *datasets.NAMES)] = option("auto", "data set; auto: MNIST if it can be had")
    pairs: int = option(3, "how many pairs of runs for each ratio", least=1)


def run(lab, **options) -> dict:
    cluster = launch.Cluster(launcher="local")
    return launch.run(lab, cluster=cluster, quiet=True, on_progress=lambda *_: None, **options)


def in_pairs(pairs: int, name: str, first, second) -> Iterator[tuple[dict, dict]]:
    """Run both functions in each of ``pairs`` pairs, and yield what they return.

    Args:
        pairs: how many. The first function goes first in the first pair, in the third and so on.
        name: for the progress bar.
        first, second: take no arguments.
    """
    for number in tqdm(range(pairs), desc=name, leave=False):
        if number % 2:
            later = second()
            yield first(), later
        else:
            yield first(), second()


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}, {len(ratios)} pairs)"


def loaders(data: str, pairs: int):
    """Samples/s of --loader memory over those of --loader torchvision, and both accuracies."""
    common = {"strategy": "fsdp1", "ranks": 2, "batch_size": 64, "epochs": 1 if data == "mnist" else 4}
    common["device"] = "cpu" if site.gpus_here() < 2 else "cuda"
    ratios, accuracies = [], []
    both = (partial(run, "mnist_fsdp.py", data=data, loader=loader, **common) for loader in ("memory", "torchvision"))
    for memory, usual in in_pairs(pairs, "loaders", *both):
        ratios.append(memory["time"]["samples_per_second"] / usual["time"]["samples_per_second"])
        accuracies.append([r["accuracy"]["correct"] / r["accuracy"]["total"] for r in (memory, usual)])
    print(plots.caption(memory))
    print(f"samples/s, memory over torchvision: {spread(ratios)}")
    print(f"accuracy, memory and torchvision: {', '.join(f'{a:.2%} and {b:.2%}' for a, b in accuracies)}")


def fsdp_on_one_rank(data: str, pairs: int):
    """Step time of FSDP2 in one unit on one rank over that of the plain loop."""
    common = {"batch_size": 64, "max_steps": 60}
    ratios = []
    both = (
        partial(run, "mnist_fsdp.py", data=data, ranks=1, strategy=strategy, **common)
        for strategy in ("single", "fsdp2")
    )
    for plain, sharded in in_pairs(pairs, "one rank", *both):
        ratios.append(sharded["time"]["step"]["median"] / plain["time"]["step"]["median"])
    print(plots.caption(sharded))
    print(f"step time, FSDP2 on one rank over the plain loop: {spread(ratios)}")


def saving(pairs: int):
    """Seconds that training stands still for a save with --async-checkpoint over those without."""
    common = {"preset": "small", "ranks": 2, "batch_size": 1, "seq_len": 64, "max_steps": 12, "checkpoint_every": 4}
    common["device"] = "cpu" if site.gpus_here() < 2 else "cuda"

    def save(meanwhile: bool) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return run("gpt_fsdp.py", checkpoint=folder, keep_last=1, async_checkpoint=meanwhile, **common)

    ratios = []
    for meanwhile, at_once in in_pairs(pairs, "saving", partial(save, True), partial(save, False)):
        ratios.append(meanwhile["checkpoints"]["stall"] / at_once["checkpoints"]["stall"])
    print(plots.caption(at_once))
    print(f"a save at once holds up training for {at_once['checkpoints']['stall']:.2f} s (the last run's median)")
    print(f"how long a save holds up training, meanwhile over at once: {spread(ratios)}")


def main():
    config = parse(Config, __doc__)
    try:
        data = datasets.prepare(config.data)
        fsdp_on_one_rank(data, config.pairs)
        loaders(data, config.pairs)
        saving(config.pairs)
    except UserError as error:
        ranks.exit_with_error(str(error))


if __name__ == "__main__":
    main()
