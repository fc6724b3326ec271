# SPDX-License-Identifier: BSD-3-Clause
"""proofs/ratios.py: the runs of a pair take turns in going first, ratios are the right way up, and the labs have what it reads."""

import re

import pytest
from proofs import ratios

DATA = "mnist-5k"
BENCHES = {  # its arguments; what tells the numerator of the ratio from the denominator
    "loaders": ((DATA,), {"loader": "memory"}),
    "fsdp_on_one_rank": ((DATA,), {"strategy": "fsdp2"}),
    "saving": ((), {"async_checkpoint": True}),
}


@pytest.mark.parametrize("name", BENCHES)
def test_in_every_second_pair_the_other_run_goes_first(name, monkeypatch, capsys):
    arguments, above = BENCHES[name]
    order = []

    def run(lab, **options):
        """Take twice as long, or be twice as fast, if the result is to be above the line."""
        order.append(above.items() <= options.items())
        size = 2.0 if order[-1] else 1.0
        return {
            "time": {"samples_per_second": size, "step": {"median": size}},
            "accuracy": {"correct": 9, "total": 10},
            "checkpoints": {"stall": size},
        }

    monkeypatch.setattr(ratios, "run", run)
    monkeypatch.setattr(ratios.plots, "caption", lambda record: "where")
    getattr(ratios, name)(*arguments, pairs=3)
    assert order in ([True, False, False, True, True, False], [False, True, True, False, False, True])
    assert ": 2.00 (2.00–2.00, 3 pairs)\n" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_one_pair_of_short_runs(name, monkeypatch, capsys):
    """The labs themselves, for as few steps as are timed and saved."""
    real, arguments = ratios.run, BENCHES[name][0]
    short = {"max_steps": 10} | ({"preset": "tiny"} if name == "saving" else {"batch_size": 4, "epochs": 1})
    monkeypatch.setattr(ratios, "run", lambda lab, **options: real(lab, **options | short))
    getattr(ratios, name)(*arguments, pairs=1)
    printed = capsys.readouterr().out
    assert re.search(r": (\d+\.\d\d) \(\1–\1, 1 pairs\)\n", printed), printed
