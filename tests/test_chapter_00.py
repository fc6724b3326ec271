# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 00: its verdicts can fail, its exercises judge, hello says what is wrong, and the machine is described."""

import mmap
import os
import re
import sys

import pytest
from answers import altered
from commands import call
from conftest import SOURCE
from labkit import UserError
from labkit.measuring import host_memory
from labkit.running import site
from labkit.running.lab import Lab
from labkit.teaching.exercises import check

from notebooks import run_broken


def fails(lines: list[str], claim: str) -> bool:
    return any(line.startswith(f"FAIL  {claim}") for line in lines)


@pytest.mark.breaks
def test_a_wrong_reduction_fails():
    lines = run_broken("00", {"dist.ReduceOp.SUM": "dist.ReduceOp.MAX"})
    assert fails(lines, "the sum over all ranks")


@pytest.mark.breaks
def test_another_batch_than_the_predicted_one_fails():
    other = 'ladder.predicted_peak(record | {"config": record["config"] | {"batch_size": 31}})'
    breaks = {"ladder.predicted_peak(record)": other}
    lines = run_broken("00", breaks, until='compare("one process", "DDP")', skip=("sums[",))
    assert len(lines) == 2 and all(line.startswith("FAIL") for line in lines)


@pytest.mark.breaks
def test_a_resume_at_another_learning_rate_and_another_bias_fail():
    breaks = {"resume=True, ranks=other": "resume=True, ranks=other, lr=0.1"}
    breaks |= {"model.load_state_dict(load_file(file))": "model.load_state_dict({**load_file(file), **other_bias})"}
    breaks |= {"model = Net()": 'model = Net(); other_bias = {"fc2.bias": torch.arange(10.0)}'}
    skipped = ("sums[", "climb(", "compare(", "rungs[", "on_gpu", "yours_or_ours", "by_size)", "_table(")
    lines = run_broken("00", breaks, until="of the exported model", skip=skipped)
    assert fails(lines, "largest difference of the five losses") and fails(lines, "test loss of the exported model")


# Exercises


def said(capsys, number, answer) -> str:
    check(number, answer)
    return capsys.readouterr().out


def by_address(tensors):
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda tensors: ..., "not answered yet"),
        (lambda tensors: sum(4 * t.numel() for t in tensors), "not every element takes 4 bytes"),
        (lambda tensors: sum(t.nbytes for t in tensors), "share one storage"),
        (lambda tensors: sum({t.data_ptr(): t.nbytes for t in tensors}.values()), "keeps the whole storage alive"),
        (lambda tensors: sum({t.untyped_storage().nbytes() for t in tensors}), "not the same storage"),
        (by_address, "different offsets of the same storage"),
        (lambda tensors: tensors[0].nothing, "AttributeError"),
    ],
)
def test_a_wrong_tracer_is_told_its_first_difference(wrong, words, capsys):
    assert words in said(capsys, "00.1", wrong)


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda model, mesh, min_num_params: model, "not answered yet"),
        (altered("00.0", ("return fully_shard(model, mesh=mesh)", "return model")), "the model itself is no unit"),
        (altered("00.0", (">= min", "> min")), "exactly 1,290"),
        (altered("00.0", ("sum(p.numel() for p in child.parameters())", "1")), "count the elements"),
        (
            altered("00.0", ("    for child", "    fully_shard(model, mesh=mesh)\n    for child")),
            "not quite: a rank raises",
        ),
        (altered("00.0"), "right"),
    ],
    ids=["empty", "no root", "strict", "tensors", "root first", "solution"],
)
def test_a_wrapping_is_told_its_first_difference(answer, words, capsys):
    assert words in said(capsys, "00.0", answer)


# Hello, and the machine


def hello(*words, **variables):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return call(sys.executable, "hello.py", "--device", "cpu", *words, env=clean | variables, cwd=SOURCE)


@pytest.mark.long
def test_hello_names_every_rank_and_adds_them_up():
    run = hello("--ranks", "3")
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"rank +(\d) of 3: local rank \1", run.stdout)) == ["0", "1", "2"]
    assert "1 … 3 over all ranks, by gloo: 6" in run.stdout


@pytest.mark.long
def test_hello_with_half_a_rendezvous_is_no_world_of_one():
    run = hello(RANK="0")
    assert run.returncode == 2 and "WORLD_SIZE" in run.stderr and "Traceback" not in run.stderr
    assert "rank" not in run.stdout


def test_the_machine_is_described_without_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    text = site.describe_machine(Lab(launcher="local", ranks=3, device="auto"))
    assert "none that PyTorch sees" in text
    assert "3 ranks on this machine, started by python, computing on its CPU" in text


def test_what_a_lab_would_do_is_what_it_does(monkeypatch):
    monkeypatch.setattr(Lab, "uses_slurm", lambda lab: lab.launcher == "slurm")
    for where in ("gpus_here", "gpus_of_a_node"):
        monkeypatch.setattr(site, where, lambda *partition: 4)
    said = site.launch_description(Lab(launcher="slurm", partition="gpu", device="auto"))
    assert said == "4 ranks, started by srun on partition gpu, computing on the nodes' GPUs"
    assert "its GPUs" in site.launch_description(Lab(launcher="local", device="auto"))
    assert "its CPU" in site.launch_description(Lab(launcher="local", device="auto", ranks=5))
    with pytest.raises(UserError):
        Lab(ranks=1)


def test_resident_memory_follows_what_is_written():
    """A mapping of its own: what malloc returns may be pages that the process already holds."""
    before, size = host_memory.resident(), 2**26
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        assert host_memory.resident() - before < 0.05 * size
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        assert 0.95 * size < host_memory.resident() - before < 1.2 * size
        peak = host_memory.resident(peak=True)
    assert peak >= before + 0.95 * size and host_memory.resident(peak=True) > host_memory.resident() + size // 2
