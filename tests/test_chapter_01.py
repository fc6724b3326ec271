"""Chapter 01: its verdicts can fail, and its exercises know right from wrong."""

import pytest
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_01 import EXERCISES

from notebooks import run_broken

SYNCED = "synced = flat_gradient(ddp, x, y, reduction)"


def failed(lines, claim):
    return any(line.startswith(f"FAIL  {claim}") for line in lines)


@pytest.mark.long
def test_a_bypassed_wrapper_is_seen():
    lines = run_broken("01", {SYNCED: "synced = flat_gradient(ddp.module, x, y, reduction)"})
    assert not failed(lines, "each rank's own gradient")
    assert failed(lines, "after backward, before any step()")


@pytest.mark.long
def test_a_sum_one_slice_for_all_and_a_step_on_every_rank_are_seen():
    mine = "mine = slice(me.rank * EACH, (me.rank + 1) * EACH)"
    breaks = {SYNCED: f"{SYNCED} * me.world_size", mine: "mine = slice(EACH)", "if me.rank == 0:": "if me.rank >= 0:"}
    lines = run_broken("01", breaks)
    assert not failed(lines, "after backward, before any step()")
    for claim in (
        "each rank's own gradient",
        "and from the whole batch on one process",
        "after step() on rank 0 alone",
    ):
        assert failed(lines, claim)


@pytest.mark.long
@pytest.mark.parametrize(
    ("launch", "claim"),
    [
        ('strategy="fsdp2", batch_size=32', "between steps, parameters"),
        ('strategy="ddp", batch_size=24', "at the peak, activations"),
    ],
)
def test_memory_that_is_not_as_predicted_is_seen(launch, claim):
    breaks = {'strategy="ddp", batch_size=32': launch}
    lines = run_broken("01", breaks, until="between steps, gradients", skip=("apart(",))
    assert failed(lines, claim)


def said(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


def test_two_digits_after_the_point_are_enough(capsys):
    assert "right" in said("01.1", round(EXERCISES["01.1"].answer, 1), capsys)
    assert "right" in said("01.2", round(EXERCISES["01.2"].answer, 2), capsys)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda gradients, counts: ..., "not answered yet"),
        (lambda gradients, counts: sum(gradients) / len(gradients), "each rank counts the same"),
        (lambda gradients, counts: sum(gradients), "divides by nothing"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)), "the number of all images"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)) / 3, "the number of ranks"),
        (lambda gradients, counts: gradients[0], "rank 0 alone"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)) / 7, "not for 1 and 3"),
        (lambda gradients, counts: gradients[0] * 2, "the first number is"),
        (lambda gradients, counts: gradients, "one tensor of shape"),
        (lambda gradients, counts: gradients / counts, "raises TypeError"),
    ],
)
def test_a_wrong_average_is_told_what_is_wrong(wrong, words, capsys):
    assert words in said("01.3", wrong, capsys)
