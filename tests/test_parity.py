# SPDX-License-Identifier: BSD-3-Clause
"""The matrix: however a training is shared, by whichever library, it is the same training."""

import dataclasses
import json
import math

import pytest
from labkit.measuring.differences import largest_difference
from labkit.measuring.records import RESULTS
from proofs import parity

pytestmark = pytest.mark.long
# The command takes more. A forgotten weight decay is seen in these in float64, and of DeepSpeed, which knows only fp32, in
# test_optimizer_options.py.
STEPS = 4
# In float64 where a library knows it: what is not the same training differs there most clearly. The record has fp32 too.
FP64 = ("fp64",)
# Each on one number of ranks: on the other, test_gpt_equality.py has FSDP and DDP, test_gpt_zero.py has ZeRO, with more
# combined. Four stages have two between the ends. The record has both.
RANKS = {"gpt_fsdp": (2,), "gpt_zero": (4,), "gpt_pipeline": (4,), parity.JAX: (4,)}
# JAX compiles for long: test_gpt_jax.py has all of it in fp32 and on more devices, the record too.
LEFT_OUT = ("JAX, replicated", "JAX, fsdp")


def cut(way):
    ranks = RANKS[way.lab] if len(way.ranks) > 1 else way.ranks
    return dataclasses.replace(way, ranks=ranks, precisions=FP64 if "fp64" in way.precisions else way.precisions)


WAYS = [cut(way) for way in parity.VARIANTS if way.name not in LEFT_OUT]
RUNS = [(w.name, count, precision) for w in WAYS for count in w.ranks for precision in w.precisions]


@pytest.fixture(scope="module")
def rows():
    return {(row["way"], row["ranks"], row["precision"]): row for row in parity.run(WAYS, STEPS)}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}, {run[1]} ranks, {run[2]}")
def test_its_losses_are_those_of_one_process(run, rows):
    row, tolerance = rows[run], parity.TOLERANCE[run[2]]
    assert len(row["losses"]) == STEPS
    assert row["difference"] <= tolerance
    assert math.isclose(row["losses"][-1], rows["one process", 1, run[2]]["losses"][-1], rel_tol=tolerance)


def test_the_training_learns(rows):
    """A loss that stands still would be equal however wrong the gradients are."""
    losses = rows["one process", 1, "fp64"]["losses"]
    assert losses[-1] < 0.95 * losses[0]


def test_the_committed_record_is_of_one_training():
    """Chapter 15 runs three of its ways again."""
    (path,) = (RESULTS / "reference").glob("parity-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["way"] for row in rows} == {way.name for way in [parity.BASELINE, *parity.VARIANTS]}
    alone = {row["precision"]: row["losses"] for row in rows if row["way"] == parity.BASELINE.name}
    for row in rows:
        difference = largest_difference(row["losses"], alone[row["precision"]], relative=True)
        assert difference == row["difference"] <= parity.TOLERANCE[row["precision"]], row["way"]


def test_no_ranks_are_started_for_nothing(monkeypatch):
    started = []

    def on_ranks(function, runs, steps, ranks, **about):
        started.append(ranks)
        return [[[1.0] * steps for _ in runs]]

    monkeypatch.setattr(parity.notebook_ranks, "on_ranks", on_ranks)
    rows = parity.run([dataclasses.replace(parity.VARIANTS[0], ranks=(2,))], STEPS)
    assert started == [1, 2] and {row["ranks"] for row in rows} == {1, 2}
