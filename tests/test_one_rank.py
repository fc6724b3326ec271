# SPDX-License-Identifier: BSD-3-Clause
"""Rank 0 of a simulated world holds and sends what rank 0 of a real one does."""

import contextlib
import dataclasses
import re

import pytest
from commands import script
from forked import by_value, forked
from labkit.measuring import records
from labkit.running.lab import Lab
from planner.models import shapes

COMMON = {"device": "cpu", "batch_size": 2, "seq_len": 32, "max_steps": 3}
CONFIGS = {
    "FSDP2": {},
    "FSDP2, kept": {"reshard_after_forward": "false"},
    "FSDP2, recomputed in bf16": {"precision": "bf16", "recompute": "full"},
    "FSDP2, LoRA": {"lora": 4},
    "FSDP1": {"strategy": "fsdp1"},
    "FSDP1, two micro-batches": {"strategy": "fsdp1", "accumulate": 2, "sync": "last"},
}
# What depends on the number of ranks is the size of a shard, the same in every variant of a strategy
ON_4 = {name: CONFIGS[name] for name in ("FSDP2", "FSDP1")} | {"HSDP": {"mesh": "2x2"}}


def made_small():
    """A small model, traced a step sooner and one step less, and hardly evaluated: both sides do the same."""
    import gpt_fsdp
    from labkit.measuring import meters

    small = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **small)
    gpt_fsdp.VALIDATION_SEQUENCES = 4
    meters.TRACED_STEPS = range(1, 3)


def real(me, configs):
    import gpt_fsdp

    made_small()
    with contextlib.redirect_stdout(None):
        return {name: gpt_fsdp.train(gpt_fsdp.Config(**COMMON | config), me) for name, config in configs.items()}


def alone(ranks, configs):
    import one_rank
    from labkit.measuring import simulate

    made_small()
    simulate.join(ranks)
    found = {}
    for name, config in configs.items():
        about = one_rank.Config(ranks=ranks, **COMMON | config)
        found[name] = one_rank.train(about, one_rank.simulated_rank(about))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "configs"), [(2, CONFIGS), (4, ON_4)], ids=["2 ranks", "4 ranks"])
def test_peaks_and_traffic_are_those_of_real_ranks(ranks, configs):
    measured = Lab(launcher="local", ranks=ranks, device="cpu").on_ranks(by_value(real), configs)[0]
    simulated = forked(alone, ranks, configs)
    for name in configs:
        for key in ("peak", "start", "peak_phase", "peak_operator"):
            assert simulated[name]["memory"][key] == measured[name]["memory"][key], (name, key)
        assert simulated[name]["traffic"] == measured[name]["traffic"], name


def test_the_command_shows_the_plan_beside_it_and_writes_a_record(tmp_path):
    words = "one_rank.py --ranks 64 --device cpu --batch-size 2 --seq-len 64 --max-steps 10 --record".split()
    run = script(*words, tmp_path / "run.json", timeout=60)
    assert run.returncode == 0, run.stderr
    measured, planned = re.search(r"all of it +([\d,]+) +([\d,]+) +\+0\n", run.stdout).groups()
    assert measured == planned and "are those planned" in run.stdout and "a step computes for" in run.stdout
    record = records.load(tmp_path / "run.json")
    assert (record["ranks"], record["nodes"], record["backend"]) == (64, 1, "fake")
    assert record["memory"]["peak_by_rank"] is None and record["time"]["samples_per_second"] is None  # of one only
    assert f"{sum(record['memory']['peak'].values()):,}" == measured


def test_a_record_with_the_commands_earlier_name_is_read(tmp_path):
    path = tmp_path / "record.json"
    records.write(path, {"schema": records.SCHEMA, "script": "rank_zero.py", "config": {}, "ranks": 8})
    assert records.load(path)["script"] == "one_rank.py"
