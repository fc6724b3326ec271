"""Chapter 00: its verdicts can fail, its exercises judge, hello says what is wrong, and the machine is described."""

import os
import re
import sys

import pytest
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


@pytest.mark.long
def test_a_wrong_reduction_fails():
    lines = run_broken("00", {"dist.ReduceOp.SUM": "dist.ReduceOp.MAX"}, skip=("show(",))
    assert fails(lines, "the smallest sum on any rank") and fails(lines, "the largest sum on any rank")


@pytest.mark.long
@pytest.mark.parametrize(
    ("good", "bad", "claim"),
    [
        ("big.fill_(1)", "big[: 64 * MIB].fill_(1)", "RSS grows by a written tensor"),
        ("big = torch.empty(128 * MIB)  #", "big = torch.ones(128 * MIB)  #", "RSS grows by torch.empty"),
        ("pieces = [torch.ones(MIB)", "pieces = [torch.empty(MIB)", "RSS with the pieces deleted"),
    ],
)
def test_a_tensor_written_by_half_or_too_early_fails(good, bad, claim):
    skipped = ("show(", "sums")
    assert fails(run_broken("00", {good: bad}, until="one_percent", skip=skipped), claim)


@pytest.mark.long
def test_a_forgotten_layer_and_another_precision_fail():
    breaks = {"numbers = sum(layers.values())": 'numbers = sum(layers.values()) - layers["fc2"]'}
    breaks |= {"max_steps=6)": 'max_steps=6, precision="fp64")'}
    skipped = ("show(", "sums", "grown")
    lines = run_broken("00", breaks, until='start["parameters"]', skip=skipped)
    assert fails(lines, "parameters of one process") and fails(lines, "live tensors at the peak")


@pytest.mark.long
@pytest.mark.parametrize(
    ("times", "claims"),
    [
        (2, ["resident memory's growth, 64 to 256 images"]),
        (0.5, ["the same, not far above", "the most that the three parts leave unexplained"]),
    ],
    ids=["twice", "half"],
)
def test_a_tracer_that_counts_twice_or_half_parts_from_resident_memory(times, claims):
    breaks = {"return before, peak(trace.timeline())[1]": f"return before, {times} * peak(trace.timeline())[1]"}
    breaks |= {"record['hardware']": "hardware", "for batch in (1, 64, 128, 256)}": "for batch in (1, 64, 256)}"}
    skipped = ("show(", "sums", "lab.run(", "record.items", 'record["')  # all but the last step of the chapter
    lines = run_broken("00", breaks, until="largest(rest)", skip=skipped)
    assert all(fails(lines, claim) for claim in claims)


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
    assert words in said(capsys, "00.3", wrong)


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
    before = host_memory.resident()
    block = bytearray(b"x") * 2**26
    assert 0.95 * len(block) < host_memory.resident() - before < 1.2 * len(block)
    peak = host_memory.resident(peak=True)
    del block
    assert peak >= before + 0.95 * 2**26 and host_memory.resident(peak=True) >= host_memory.resident()
