# SPDX-License-Identifier: BSD-3-Clause
"""ZeRO, by PyTorch alone and by DeepSpeed: the losses of every stage are those of one process; what each refuses."""

import dataclasses
import importlib.metadata
import os
import shlex
import sys

import cloudpickle
import gpt_fsdp
import gpt_zero
import pytest
import torch.nn.functional as functional
from commands import call, refused
from labkit import UserError
from labkit.measuring import meters, records
from labkit.running import launch, notebook_ranks, options
from labkit.training import deepspeed_zero
from planner.models import shapes

HERE = launch.Cluster(launcher="local")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file

# The losses: plain stages are in the matrix (test_parity.py); here is what it leaves out.

STEPS, SEQUENCES = 5, 8
DEEPSPEED = {"engine": "deepspeed"}
FP64 = {"precision": "fp64"}
SUMMED = {"accumulate": 2, "clip": 0.4}  # below most of the norms that occur
CASES = {
    "torch 0, accumulated, clipped": FP64 | SUMMED | {"stage": "0"},
    "torch 1, accumulated, clipped": FP64 | SUMMED | {"stage": "1"},
    **{f"deepspeed {stage}, accumulated, clipped": DEEPSPEED | SUMMED | {"stage": stage} for stage in "0123"},
    "deepspeed 2, tied, offloaded": DEEPSPEED | {"stage": "2", "tied": True, "cpu_offload": True},
    "deepspeed 3, tied, recomputed": DEEPSPEED | {"stage": "3", "tied": True, "recompute": "full"},
    "deepspeed 0, bf16": DEEPSPEED | {"stage": "0", "precision": "bf16"},
}


def reference_of(options: dict) -> tuple:
    return tuple((name, options[name]) for name in ("tied", "clip") if name in options)


def train_all(me, cases):
    """{case: the losses of the steps, then the validation loss}, one after the other."""
    meters.TRACED_STEPS = range(0)  # here the losses are asked for
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], hidden_size=32, intermediate_size=96)
    common = {"max_steps": STEPS, "seq_len": 16}
    if me.world_size == 1:
        keys = {reference_of(options) for options in cases.values()}
        plain = {"strategy": "single", "batch_size": SEQUENCES} | FP64 | common
        results = {key: gpt_fsdp.train(gpt_fsdp.Config(**plain | dict(key)), me) for key in keys}
    else:
        results = {}
        for name, case in cases.items():
            batch = SEQUENCES // me.world_size // case.get("accumulate", 1)
            config = gpt_zero.Config(batch_size=batch, **common | case)
            results[name] = gpt_fsdp.train(config, me, gpt_zero.prepare)
    return {key: [*result["losses"], result["validation_loss"]] for key, result in results.items()}


@pytest.fixture(scope="module")
def losses(selected):
    """{number of ranks: what ``train_all`` found on rank 0}"""
    cases = {name: CASES[name] for name in selected(CASES)}
    return {
        count: notebook_ranks.on_ranks(train_all, cases, ranks=count, cluster=HERE, timeout=300)[0] for count in (1, 2)
    }


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process(name, losses):
    reference, tolerance = losses[1][reference_of(CASES[name])], {"fp64": 1e-9, "bf16": 5e-3}
    assert len(reference) == STEPS + 1 and reference[STEPS - 1] < reference[0]
    expected = pytest.approx(reference, rel=tolerance.get(CASES[name].get("precision"), 1e-4))
    assert losses[2][name] == expected


# Starting


@pytest.mark.long
def test_torchrun_and_its_record(tmp_path):
    """One line a step range from the lab, none from DeepSpeed, and no compiler called."""
    path, nowhere = tmp_path / "run.json", tmp_path / "bin"
    nowhere.mkdir()
    words = f"-m torch.distributed.run --standalone --nproc-per-node 2 gpt_zero.py --engine deepspeed --record {path}"
    env = os.environ | {"PATH": str(nowhere)}
    few = ["--max-steps", "6", "--seq-len", "16", "--batch-size", "2"]
    done = call(sys.executable, *shlex.split(words), *few, env=env, cwd=launch.SOURCE, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed" not in done.stdout and len(done.stdout.splitlines()) < 10, done.stdout
    record = records.load(path)
    assert record["script"] == "gpt_zero.py"
    assert {name: record["config"][name] for name in ("stage", "engine")} == {"stage": "3", "engine": "deepspeed"}
    assert {entry["kind"] for entry in record["traffic"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    kept, parameters = record["memory"]["start"], 853_120
    assert kept["parameters"] == kept["gradients"] == 4 * parameters / 2
    assert kept["optimizer state"] == pytest.approx(3 * 4 * parameters / 2, abs=8)  # and Adam's count of steps


# What a user gets wrong

BAD = {
    "--stage 4": "argument --stage: invalid choice: '4'",
    "--engine zero": "argument --engine: invalid choice: 'zero'",
    "--strategy ddp": "unrecognized arguments: --strategy ddp",
    "--mesh 2x2": "unrecognized arguments: --mesh 2x2",
    "--stage 1 --cpu-offload": "--cpu-offload goes with --stage 2 or 3, or --engine deepspeed from 1 on; with 1",
    "--stage 0 --engine deepspeed --cpu-offload": "--cpu-offload goes with --stage 1, 2 or 3; with 0 leave it out",
    "--engine deepspeed --precision fp64": "DeepSpeed reduces gradients and steps in fp32: leave --precision fp64 out",
    "--engine deepspeed --checkpoint here": "DeepSpeed's checkpoints have a format of their own",
    "--stage 1 --checkpoint here": "ZeroRedundancyOptimizer saves its state on one rank only",
    "--resume": "--resume needs --checkpoint",
}


@pytest.mark.parametrize("words", BAD)
def test_one_sentence_before_anything_starts(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpt_zero.py"])
    with pytest.raises(SystemExit) as exit_:
        options.parse(gpt_zero.Config, "", words.split())
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert BAD[words] in printed and printed.startswith("gpt_zero.py: ") and len(printed.splitlines()) == 1


def test_what_deepspeed_puts_in_pytorchs_place_goes_when_it_has_run():
    """Stage 3 does it for the whole process; the next run in it would keep other tensors."""
    linear = functional.linear
    with pytest.raises(UserError), deepspeed_zero.contained():
        functional.linear = None
        raise UserError("a run that fails")
    assert functional.linear is linear


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, ("DeepSpeed", "not installed")), ("0.20.0", ("DeepSpeed 0.20.0", "0.19.8"))],
)
def test_deepspeed_that_cannot_be_used(version, said, monkeypatch):
    """It is said before anything is done with the rank, and without importing DeepSpeed; torch's engine does not care."""

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it would fail
    trained = []
    monkeypatch.setattr(gpt_fsdp, "main", lambda *given: trained.append(given))
    with refused(*said, "make deepspeed", "--engine torch"):
        gpt_zero.main(gpt_zero.Config(engine="deepspeed"), me=None)
    gpt_zero.main(gpt_zero.Config(), me=None)
    assert len(trained) == 1
