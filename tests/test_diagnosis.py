# SPDX-License-Identifier: BSD-3-Clause
"""The drill of the diagnosis: its committed record, what it reads off a report, and that its draws happen."""

import json
from collections import Counter
from itertools import product

import pytest
from labkit.running import launch
from proofs import diagnosis

(RECORD,) = (launch.SOURCE / "results" / "reference").glob("diagnosis-*.json")


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


def test_the_record_is_of_enough_draws_of_every_kind_on_both_layouts_of_four_ranks(record):
    rows = record["rows"]
    drawn = [diagnosis.Draw(*(row[name] for name in ("kind", "layout", "rank", "step"))) for row in rows]
    assert drawn == diagnosis.draws(len(rows), record["seed"])  # none is left out
    kinds = Counter(row["kind"] for row in rows)
    assert len(rows) >= 200 and set(kinds) == set(diagnosis.FAULTS) and min(kinds.values()) >= 10
    assert len(set(kinds) - set(diagnosis.CONTROLS)) >= 12
    assert {row["layout"] for row in rows} == set(diagnosis.LAYOUTS)
    assert record["hardware"] and record["torch"] and record["date"]


def test_the_kinds_of_the_exercise_were_always_named_and_most_faults_were(record):
    """As chapter 16 claims: in nine of ten faults the kind."""
    frame = diagnosis.table([row for row in record["rows"] if row["kind"] not in diagnosis.CONTROLS]).set_index("kind")
    total = frame.loc["all"]
    assert total["fault"] >= 0.9 * total["draws"]
    always = frame[frame["fault and rank"] == frame["draws"]].index
    assert set(always) == set(diagnosis.KINDS)


def test_what_the_record_calls_right_is_right(record):
    for row in record["rows"]:
        control = row["kind"] in diagnosis.CONTROLS
        assert row["kind_right"] == (row["named"] == (diagnosis.NOTHING if control else row["kind"]))
        assert row["rank_right"] == (row["ranks_named"] == ([] if control else [row["rank"]]))
        if "report" in row:
            assert diagnosis.named("\n".join(row["report"])) == (row["named"], row["ranks_named"])
            assert not (row["kind_right"] and row["rank_right"])


def test_the_share_that_the_chapter_claims_is_in_the_record(record):
    faults = [row for row in record["rows"] if row["kind"] not in diagnosis.CONTROLS]
    assert sum(row["kind_right"] for row in faults) >= 0.9 * len(faults)
    assert sum(row["rank_among"] for row in faults) >= 0.9 * len(faults)
    controls = [row for row in record["rows"] if row["kind"] in diagnosis.CONTROLS]
    assert all(row["kind_right"] for row in controls)  # nothing is named where nothing has failed


def test_the_table_counts_per_kind_and_in_all():
    row = {"kind": "killed", "kind_right": True, "rank_right": True, "rank_among": True}
    rows = [row, row | {"rank_right": False}, row | {"kind": "stopped", "kind_right": False}]
    table = diagnosis.table(rows).set_index("kind")
    assert table.loc["killed"].tolist() == [2, 2, 2, 1, 1] and table.loc["all"].tolist() == [3, 2, 3, 2, 1]


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ("rank 2 is dead: process 7 on n1 ended without a word", ("killed", [2])),
        ("ranks 0-3 failed: NotFinite: the first value that is not finite was at step 2 on rank 1", ("bad sample", [1])),
        ("ranks 0-3 failed: NotFinite: … was at step 2 on all ranks at once, so look at the weights", ("exception", [0, 1, 2, 3])),
        ("ranks 0-3 failed: ReplicasDiffer: ranks 0, 2 hold different bits", ("flipped bit", [0, 2])),
        ("rank 3 failed: RuntimeError: CUDA error: uncorrectable ECC error encountered", ("broken GPU", [3])),
        ("rank 3 did not arrive at collective 5\n  rank 3 had left (finished)", ("fewer batches", [3])),
        ("rank 3 did not arrive at collective 5\n  rank 3 is at\n      a.py:1", ("stuck outside", [3])),
        ("rank 1 and ranks 0, 2-3 differ in the shape of the tensors at collective 5", ("other shape", [1])),
        ("rank 1 and ranks 0, 2-3 differ in the shape of … (ranks 0-3), called from different lines", ("lone collective", [1])),
        ("deadlock: ranks 0-1 wait for each other, in a circle", ("other order", [0, 1])),
        ("rank 0 is a straggler: of 2 s", ("straggler", [0])),
        ("no rank is missing: in each group", ("nothing", [])),
        ("something else", ("?", [])),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_kind_and_ranks_are_read_off_the_first_lines(report, named):
    assert diagnosis.named(report) == named


def test_draws_repeat_with_their_seed_and_fit_their_layouts():
    assert {draw.kind for draw in diagnosis.draws(18, seed=3, kinds=diagnosis.KINDS)} == {*diagnosis.KINDS}
    drawn = diagnosis.draws(64, seed=3)
    assert drawn == diagnosis.draws(64, seed=3) != diagnosis.draws(64, seed=4)
    assert all(draw.layout in diagnosis.FAULTS[draw.kind] for draw in drawn)
    assert Counter(draw.kind for draw in drawn) == dict.fromkeys(diagnosis.FAULTS, 4)
    assert {(draw.rank, draw.step) for draw in diagnosis.draws(2000, seed=1)} == {*product(range(4), range(1, 6))}


@pytest.mark.long
def test_faults_that_no_traceback_shows_are_named_and_without_them_nothing_is():
    """The straggler is one by its own delay only: the same draw as a control names nobody.

    One after the other: with twelve ranks on two busy cores, a rank of the healthy run was once named as a straggler.
    """
    rows = [diagnosis.judged(diagnosis.Draw(kind, "mesh", 3, 2)) for kind in ("straggler", "bad sample", "healthy")]
    named = [(row["named"], row["ranks_named"]) for row in rows]
    assert named == [("straggler", [3]), ("bad sample", [3]), ("nothing", [])]
