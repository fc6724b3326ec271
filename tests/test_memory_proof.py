# SPDX-License-Identifier: BSD-3-Clause
"""The command proofs/memory.py: it keeps what it has measured when a later launch fails, and draws by the seed it is given."""

import json
import sys

import pytest
from labkit.running import launch
from proofs import configurations
from proofs import memory as memory_proof


@pytest.fixture
def launches(monkeypatch):
    """[configurations of each launch]; nothing is trained, and the third launch fails."""
    made = []

    def on_ranks(function, some, *, ranks, **settings):
        if len(made) == 2:
            raise launch.RunFailed("not finished after 600 s")
        made.append(some)
        return [[f"measured {one['number']}" for one in some]] * ranks

    monkeypatch.setattr(memory_proof.notebook_ranks, "on_ranks", on_ranks)
    monkeypatch.setattr(memory_proof, "compare_ranks", lambda one, measured: one | {"measured": measured})
    return made


def test_a_failed_launch_loses_no_row_of_the_launches_before(launches, monkeypatch, tmp_path, capsys):
    two = [{"ranks": 2, "number": number} for number in range(memory_proof.PER_LAUNCH + 3)]
    monkeypatch.setattr(configurations, "listed", lambda: [*two, {"ranks": 1, "number": "alone"}])
    monkeypatch.setattr(memory_proof, "runnable", lambda one: True)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--record", str(tmp_path / "trial.json")])
    with pytest.raises(SystemExit) as exit_:
        memory_proof.main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == "memory.py: not finished after 600 s\n"
    assert f"{memory_proof.PER_LAUNCH + 1} configurations were measured before; record: " in printed.out
    rows = json.loads((tmp_path / "trial.json").read_text())["rows"]
    assert [row["number"] for row in rows] == ["alone", *range(memory_proof.PER_LAUNCH)]
    assert rows[0]["measured"] == ["measured alone"] and rows[1]["measured"] == ["measured 0"] * 2
    assert [len(some) for some in launches] == [1, memory_proof.PER_LAUNCH]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_seed_that_is_given_is_drawn_by(seed):
    tried, refused = memory_proof.chosen(memory_proof.Config(random=5, seed=seed))
    assert {one["seed"] for one in tried + refused} == {seed}
