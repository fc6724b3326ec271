# SPDX-License-Identifier: BSD-3-Clause
"""--log writes what a run does as scalars that TensorBoard reads, and changes nothing else.

Where tensorboard is not installed, a stand-in takes the place of its writer, and only the file format is not tested.
"""

import dataclasses
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gpt_fsdp
import gpt_pipeline
import gpt_zero
import hf_fsdp
import mnist_fsdp
import pytest
import torch
from forked import by_value
from labkit import UserError
from labkit.measuring import event_files, meters
from labkit.running import launch, notebook_ranks, preflight
from labkit.training import datasets, lr_schedule
from planner import predict

HERE = launch.Cluster(launcher="local")
SINGLE = {"strategy": "single", "seq_len": 16, "batch_size": 1}


class StandIn:
    """A SummaryWriter that appends lines of JSON to a file of its own: [name, step, value]."""

    made = 0

    def __init__(self, folder, purge_step):
        Path(folder).mkdir(parents=True, exist_ok=True)
        type(self).made += 1
        self.path, self.lines = Path(folder) / f"events.out.tfevents.{self.made:03}", [["purge", purge_step, 0]]

    def add_scalar(self, name, value, step):
        self.lines.append([name, step, value])

    def flush(self):
        self.path.write_text("\n".join(map(json.dumps, self.lines)))


def stand_in(replace):
    """Put ``StandIn`` where tensorboard would be. replace: sets an item of a dict."""
    replace(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=StandIn))


@pytest.fixture
def writer(monkeypatch):
    if find_spec("tensorboard") is None:
        stand_in(monkeypatch.setitem)


def scalars(folder) -> dict[str, dict[int, float]]:
    """{name: {step: value}} of all event files in a folder, as TensorBoard shows them."""
    found = {}
    if find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder)).Reload()
        for name in read.Tags()["scalars"]:
            found[name] = {event.step: event.value for event in read.Scalars(name)}
        return found
    for path in sorted(Path(folder).glob("events*")):
        for name, step, value in map(json.loads, path.read_text().splitlines()):
            if name == "purge":
                found = {each: {s: v for s, v in points.items() if s < step} for each, points in found.items()}
            else:
                found.setdefault(name, {})[step] = value
    return found


def same(points: dict[int, float], values, first: int = 1):
    """Event files have fp32."""
    assert points == pytest.approx(dict(enumerate(values, first)), rel=1e-6)


def test_a_run_of_the_transformer_lab(writer, tmp_path, world_of_one):
    config = gpt_fsdp.Config(log=str(tmp_path), max_steps=12, warmup_steps=3, **SINGLE)
    record = gpt_fsdp.train(config, world_of_one)
    found = scalars(tmp_path)
    assert found.keys() == {
        *("loss", "learning_rate", "gradient_norm", "tokens_per_second", "peak_memory_gib", "validation_loss"),
        "matmul_ceiling_fraction",  # no mfu: a CPU has no data sheet here
    }
    same(found["loss"], record["losses"])
    same(found["learning_rate"], [lr_schedule.learning_rate(config, step) for step in range(12)])
    same(found["tokens_per_second"], [record["tokens_per_second"]], first=12)
    same(found["peak_memory_gib"], [sum(record["memory"]["peak"].values()) / 2**30], first=12)
    same(found["validation_loss"], [record["validation_loss"]], first=12)
    assert 0 < found["matmul_ceiling_fraction"][12] < 1
    assert record["losses"] == gpt_fsdp.train(dataclasses.replace(config, log=None), world_of_one)["losses"]


def test_the_gradients_norm_is_that_before_clipping(writer, tmp_path, world_of_one, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def noted(parameters, limit):
        every = list(parameters)
        norms.append(torch.cat([parameter.grad.flatten() for parameter in every]).double().norm().item())
        return clip(every, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    for limit in (None, 0.5):
        folder = tmp_path / str(limit)
        gpt_fsdp.train(gpt_fsdp.Config(log=str(folder), max_steps=3, clip=limit, **SINGLE), world_of_one)
        found = scalars(folder)["gradient_norm"]
        assert found == pytest.approx(dict(enumerate(norms[-3:], 1)), rel=1e-4) and min(found.values()) > 0.5


def test_a_run_of_the_mnist_lab(writer, tmp_path, world_of_one, monkeypatch):
    monkeypatch.setattr(meters, "TRACED_STEPS", range(0))
    few = [tensor[:400] for tensor in datasets.load("mnist-5k").tensors()]
    monkeypatch.setattr(datasets, "load", lambda name: datasets.Digits(name, *few))
    config = mnist_fsdp.Config(strategy="single", data="mnist-5k", batch_size=200, epochs=2, log=str(tmp_path))
    record = mnist_fsdp.train(config, world_of_one)
    found = scalars(tmp_path)
    assert found.keys() == {"loss", "learning_rate", "test_loss", "accuracy"}  # too few steps to be timed
    same(found["loss"], record["losses"])
    same(found["learning_rate"], [1.0, 1.0, 0.7, 0.7])
    assert found["accuracy"].keys() == {2, 4} and found["test_loss"][4] == pytest.approx(record["test_loss"])


def test_a_run_of_the_hugging_face_lab(writer, tmp_path, world_of_one):
    sample = str(launch.SOURCE / "samples" / "llama_small.json")
    config = hf_fsdp.Config(config=sample, log=str(tmp_path), max_steps=9, **SINGLE)
    record = hf_fsdp.train(config, world_of_one)
    found = scalars(tmp_path)
    same(found["loss"], record["losses"])
    assert {"gradient_norm", "tokens_per_second", "peak_memory_gib", "matmul_ceiling_fraction"} <= found.keys()


def test_a_resumed_run_replaces_the_steps_that_it_repeats(writer, tmp_path, world_of_one):
    common = {"log": str(tmp_path / "log"), "checkpoint": str(tmp_path / "ckpt"), "checkpoint_every": 2} | SINGLE
    whole = gpt_fsdp.train(gpt_fsdp.Config(max_steps=4, **common), world_of_one)
    (tmp_path / "ckpt" / "step-000004").rename(tmp_path / "gone")
    again = gpt_fsdp.Config(max_steps=4, resume=True, lr=0.1, **common)
    resumed = gpt_fsdp.train(again, world_of_one)["losses"]
    assert resumed[0] == whole["losses"][2] and resumed[1] != whole["losses"][3]
    same(scalars(tmp_path / "log")["loss"], whole["losses"][:2] + resumed)


def test_what_is_not_finite_is_left_out(writer, tmp_path):
    files = event_files.EventFiles(str(tmp_path), 0)
    files.write({"loss": [(1, 2.0), (2, math.nan), (3, math.inf)], "mfu": [(3, None)]})
    assert scalars(tmp_path) == {"loss": {1: 2.0}}


def test_a_full_disk_ends_the_log_and_not_the_training(writer, tmp_path, capsys, monkeypatch):
    files = event_files.EventFiles(str(tmp_path), 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.writer, "flush", full)
    for step in (1, 2):
        files.write({"loss": [(step, 1.0)]})
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "No space left on device): training goes on without" in said


def test_without_tensorboard_the_run_is_refused(tmp_path, monkeypatch, world_of_one):
    monkeypatch.setattr(event_files, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--log needs tensorboard: python -m pip install tensorboard"):
        preflight.check(gpt_fsdp.Config(log=str(tmp_path / "log")), world_of_one)
    assert not (tmp_path / "log").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, world_of_one):
    monkeypatch.setattr(event_files, "find_spec", lambda name: True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="event files cannot be written to .*file.*: name another --log"):
        preflight.check(mnist_fsdp.Config(log=str(tmp_path / "file")), world_of_one)
    preflight.check(mnist_fsdp.Config(log=str(tmp_path / "new")), world_of_one)


# ---- several ranks: the norm is of all shards, and one rank writes

SEQUENCES = 4
SHARED = {
    "ddp": (gpt_fsdp, {"strategy": "ddp"}),
    "fsdp1": (gpt_fsdp, {"strategy": "fsdp1"}),
    "fsdp2": (gpt_fsdp, {}),
    "tensor": (gpt_fsdp, {"mesh": "tensor=2", "batch_size": SEQUENCES}),
    "zero 1": (gpt_zero, {"stage": "1"}),
    # DeepSpeed has stages 1 and 2 in one file (runtime/zero/stage_1_and_2.py)
    **{f"deepspeed {stage}": (gpt_zero, {"stage": stage, "engine": "deepspeed"}) for stage in "23"},
    "pipeline": (gpt_pipeline, {"batch_size": SEQUENCES // 2, "accumulate": 2}),
}


def train_all(me, folder, names):
    """{case: (record, its config)}."""
    if find_spec("tensorboard") is None:
        stand_in(dict.__setitem__)
    cases, found = SHARED | {"single": (gpt_fsdp, {"strategy": "single"})}, {}
    for name in names:
        lab, options = cases[name]
        common = {"batch_size": SEQUENCES // me.world_size, "seq_len": 16, "max_steps": 4, "log": f"{folder}/{name}"}
        config = lab.Config(**common | options)
        result = gpt_fsdp.train(config, me, lab.prepare, lab.compute_loss)
        found[name] = result, dataclasses.asdict(config)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory, selected):
    folder, cases = tmp_path_factory.mktemp("logs"), {1: ["single"], 2: selected(SHARED)}
    alone, shared = (
        notebook_ranks.on_ranks(by_value(train_all), folder, names, ranks=n, cluster=HERE, timeout=300)[0]
        for n, names in cases.items()
    )
    return folder, alone | shared


@pytest.mark.long
@pytest.mark.parametrize("name", SHARED)
def test_every_strategy_logs_the_same(name, trained):
    folder, _ = trained
    found, alone = scalars(folder / name), scalars(folder / "single")
    assert len(list((folder / name).iterdir())) == 1
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert found["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "tensor", "deepspeed 2", "pipeline"])
def test_what_the_norm_costs_is_planned(name, trained):
    """Without --clip, too: as many collectives, and the memory but for the norms that wait to be written."""
    result, config = trained[1][name]
    script = SHARED[name][0].__name__ + ".py"
    plan = predict.plan_of({"script": script, "config": config, "ranks": 2, "device": "cpu"})
    assert sorted((t["kind"], t["count"], t["bytes"]) for t in result["traffic"]) == sorted(
        (t["kind"], t["count"], t["bytes"]) for t in plan.traffic()
    )
    assert sum(result["memory"]["peak"].values()) == pytest.approx(predict.total(plan.peak()[1]), abs=200)
