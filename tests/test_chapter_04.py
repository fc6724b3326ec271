"""Chapter 04: its verdicts can fail, its exercises judge."""

import pytest
import torch
from labkit.teaching.exercises import check

from notebooks import run_broken

# What is broken, and the claims that must then fail
BREAKS = {
    "not sharded at all": ({'"mnist_fsdp.py", strategy="fsdp2"': '"mnist_fsdp.py", strategy="ddp"'}, "between steps"),
    "not one unit": ({'strategy="fsdp2", batch': 'strategy="fsdp2", wrap="size", batch'}, "peak of FSDP2"),
    "a layer forgotten in the arithmetic": ({"4 * (128 * 9217 + 10 * 129)": "4 * 128 * 9217"}, "whole gradients"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BREAKS)
def test_verdicts_can_fail(case):
    breaks, claim = BREAKS[case]
    lines = run_broken("04", breaks | {"assert terms ==": "terms =="}, skip=("constructed", "walk", "held"))
    assert any(line.startswith("FAIL") and claim in line for line in lines), lines


@pytest.mark.long
def test_floor_can_be_missed():
    breaks = {"floor = 4 * P": "floor = 2 * 4 * P"}
    lines = run_broken("04", breaks, until="at_least=floor", skip=("constructed", "walk", "held"), ranks=4)
    assert all(line.startswith("FAIL") for line in lines if "lowest" in line) and "lowest" in lines[-1]


def answered(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


WRONG = [
    ("04.2", lambda rank, world, rows: (rank * (rows // world), (rank + 1) * (rows // world)), "10 rows on 4 ranks"),
    ("04.2", lambda rank, world, rows: (rank * -(-rows // world), (rank + 1) * -(-rows // world)), "that is 1"),
    ("04.2", lambda rank, world, rows: (rank, rows, world), "not quite"),
    ("04.3", lambda tensors, rank, world: torch.cat([t.flatten() for t in tensors]).chunk(world)[rank], "padding"),
    ("04.3", lambda tensors, rank, world: torch.cat([t.chunk(world)[rank].flatten() for t in tensors]), "not quite"),
    ("04.3", lambda tensors, rank, world: 1 / 0, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("number", "wrong", "words"), WRONG)
def test_wrong_function_is_told_what_is_wrong(number, wrong, words, capsys):
    said = answered(number, wrong, capsys)
    assert "not quite" in said and words in said
