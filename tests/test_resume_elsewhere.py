# SPDX-License-Identifier: BSD-3-Clause
"""A run goes on as if nothing had happened on another number of ranks, and under another strategy, than it was saved by.

At one global batch, without dropout, in float64, where the order of a sum is all that differs (test_equality.py says
why): the losses after resuming are those of the run that was never interrupted. At the same place nothing may differ
at all, in any number format: that is what proofs/crash.py shows.
"""

import os
import shutil
from dataclasses import dataclass
from importlib import import_module

import few_digits
import pytest
from forked import by_value
from labkit.measuring.differences import largest_difference
from labkit.running import launch, notebook_ranks, progress

pytestmark = pytest.mark.long
HERE = launch.Cluster(launcher="local")
STEPS, GLOBAL_BATCH, DIGITS = 5, 12, 40  # 3 steps of 12 are an epoch
MIDDLE, END_OF_EPOCH = 2, 3


@dataclass(frozen=True)
class Place:
    """How a run is shared: options of its lab, as a command line has them, and on how many ranks."""

    words: str
    ranks: int

    def options(self, lab: str, **given) -> dict:
        """Of a run here: the same work in a step as everywhere."""
        if lab == "mnist_fsdp":
            work = {"data": "mnist-5k", "dropout": False, "global_batch_size": GLOBAL_BATCH, "epochs": 2}
        else:
            work = {"seq_len": 16, "batch_size": GLOBAL_BATCH // self.ranks}
        return work | {"precision": "fp64", "max_steps": STEPS} | dict(w.split("=") for w in self.words.split()) | given


ALONE = Place("strategy=single", 1)
FSDP2, HSDP = (Place(f"strategy=fsdp2{mesh}", 4) for mesh in ("", " mesh=2x2"))
ON_2, ON_3 = (Place(FSDP2.words, ranks) for ranks in (2, 3))
DDP, FSDP1 = (Place(f"strategy={name}", 2) for name in ("ddp", "fsdp1"))
MOVES = [  # lab, saved after the step, by whom, and who goes on
    (lab, MIDDLE, before, then)
    for lab in ("mnist_fsdp", "gpt_fsdp")
    for before, then in ((FSDP2, ON_2), (ON_2, FSDP2), (FSDP2, ON_3), (DDP, ON_2), (FSDP1, ON_2), (FSDP2, DDP))
] + [("gpt_fsdp", MIDDLE, HSDP, FSDP2), ("mnist_fsdp", END_OF_EPOCH, FSDP2, ON_2)]


narrow, small_gpt = by_value(few_digits.narrow), few_digits.small_gpt


def train_all(me, runs: list[tuple[str, dict]]) -> list[dict]:
    """On each rank: what the training of each (lab, options) returns, on few digits."""
    from labkit.measuring import meters
    from labkit.training import datasets

    os.environ.pop(progress.VARIABLE, None)  # a bar that starts again with each run would say nothing
    meters.TRACED_STEPS = range(0)  # tracing takes much of a short run's time, and here the losses are asked for
    narrow()
    small_gpt()
    few = [tensor[:DIGITS] for tensor in datasets.load("mnist-5k").tensors()]
    datasets.load = lambda name: datasets.Digits(name, *few)
    found = []
    for lab, options in runs:
        module = import_module(lab)
        found.append(module.train(module.Config(**options), me))
    return found


def trained(runs: dict) -> dict:
    """{key: result} of runs {key: (lab, place, further options)}; those on equally many ranks share a launch."""
    results = {}
    for ranks in sorted({place.ranks for _, place, _ in runs.values()}):
        mine = {
            key: (lab, place.options(lab, **given)) for key, (lab, place, given) in runs.items() if place.ranks == ranks
        }
        done = notebook_ranks.on_ranks(by_value(train_all), [*mine.values()], ranks=ranks, cluster=HERE, timeout=300)[0]
        results |= zip(mine, done)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory, selected):
    """(the run of each lab that was never interrupted, that of each move after resuming)."""
    folder = tmp_path_factory.mktemp("moves")
    moves = selected(MOVES)
    saved = {move[:3]: folder / str(number) for number, move in enumerate(moves)}  # once for all that go on from it

    def begun(move) -> str:
        return shutil.copytree(saved[move[:3]], folder / "gone on" / str(MOVES.index(move)))

    whole = {lab: (lab, ALONE, {}) for lab in ("mnist_fsdp", "gpt_fsdp")}
    first = {m: (m[0], m[2], {"max_steps": m[1], "checkpoint": str(to)}) for m, to in saved.items()}
    done = trained(whole | first)
    resumed = trained({m: (m[0], m[3], {"resume": True, "checkpoint": str(begun(m))}) for m in moves})
    return {lab: done[lab] for lab in whole}, resumed


@pytest.mark.parametrize(
    "move", MOVES, ids=lambda m: f"{m[0]}, step {m[1]}, {m[2].words} on {m[2].ranks} to {m[3].words} on {m[3].ranks}"
)
def test_it_goes_on_as_if_nothing_had_happened(move, results):
    lab, at, _, _ = move
    whole, resumed = results[0][lab], results[1][move]
    assert resumed["first_step"] == at
    difference = largest_difference(resumed["losses"], whole["losses"][at:], relative=True)
    print(f"largest difference {difference:.1e}")  # pytest -rP shows it
    assert difference < 1e-9
    assert resumed.get("accuracy") == whole.get("accuracy")
    assert whole["losses"][-1] < whole["losses"][0]  # a loss that stands still would agree with anything
