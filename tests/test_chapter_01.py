"""Chapter 01: its verdicts can fail, and its exercises know right from wrong."""

import pytest
from answers import altered
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_01 import EXERCISES

from notebooks import run_broken

SYNCED = "synced = flat_gradient(ddp, x, y, reduction)"


def failed(lines, claim):
    return any(line.startswith(f"FAIL  {claim}") for line in lines)


@pytest.mark.long
def test_a_bypassed_wrapper_is_seen():
    lines = run_broken("01", {SYNCED: "synced = flat_gradient(ddp.module, x, y, reduction)"})
    assert not failed(lines, "each other rank's own gradient")
    assert failed(lines, "after backward, before any step()")


@pytest.mark.long
def test_a_sum_one_slice_for_all_and_a_step_on_every_rank_are_seen():
    mine = "mine = slice(me.rank * EACH, (me.rank + 1) * EACH)"
    breaks = {SYNCED: f"{SYNCED} * me.world_size", mine: "mine = slice(EACH)", "if me.rank == 0:": "if me.rank >= 0:"}
    lines = run_broken("01", breaks)
    assert not failed(lines, "after backward, before any step()")
    for claim in (
        "each other rank's own gradient",
        "and from the whole batch on one process",
        "after step() on rank 0 alone",
    ):
        assert failed(lines, claim)


@pytest.mark.long
def test_memory_that_is_not_as_predicted_is_seen():
    """Another strategy has fewer parameters, another batch fewer activations."""
    breaks = {'strategy="ddp", batch_size=32': 'strategy="fsdp2", batch_size=24'}
    lines = run_broken(
        "01",
        breaks,
        until="between steps, {name}",
        skip=("apart(", "images_per_second", "learn(", "figures.", "same_lr"),
    )
    assert failed(lines, "between steps, parameters") and failed(lines, "at the peak, activations")


def said(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


WRAPPED, SAMPLED, UNWRAPPED = "DistributedDataParallel(model.to(me.device))", "sampler=sampler", "model.module"
ONLY = "if me.rank == 0:"


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (
            [(WRAPPED, "model"), (SAMPLED, "shuffle=True"), (UNWRAPPED, "model"), (ONLY, "if True:")],
            "each rank takes all 24 images in every epoch",
        ),
        ([(".to(me.device)", "")], "me.device is never used"),
        ([(WRAPPED, "model"), (UNWRAPPED, "model")], "the ranks have diverged: each trained alone"),
        ([("nll_loss(model(", "nll_loss(model.module(")], "do you call the wrapper to compute the loss?"),
        ([(SAMPLED, "shuffle=True")], "each rank takes all 24 images in every epoch"),
        ([("sampler.set_epoch(epoch)", "pass")], "epoch 1 has the order of epoch 0"),
        ([("(data)", "(data, num_replicas=3)")], "times, summed over ranks"),
        ([("lr=lr", "lr=lr * me.world_size")], "their steps are 2 times too long"),
        ([("loss.backward()", "(loss / me.world_size).backward()")], "their steps are 2 times too short"),
        (
            [("batch_size=batch_size", "batch_size=batch_size // 2")],
            "not with one process that takes their 2 × 4 images",
        ),
        ([(f"    {ONLY}  # all", "    if True:  # all")], "rank 1 saves as well"),
        ([(f"    {ONLY}  # all", "    if False:  # all")], "no rank saves"),
        ([(".module", "")], "the saved state has the key 'module.0.weight'"),
        ([(f"    {ONLY}\n", "    if True:\n")], "rank 1 logs as well"),
        ([("lr=lr)", "lr=rate)")], "a rank raises NameError: name 'rate' is not defined"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_conversion_is_told_its_first_difference(breaks, words, capsys):
    assert words in said("01.0", altered("01.0", *breaks), capsys)


def test_two_digits_after_the_point_are_enough(capsys):
    assert "right" in said("01.1", round(EXERCISES["01.1"].answer, 1), capsys)
    assert "right" in said("01.2", round(EXERCISES["01.2"].answer, 2), capsys)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda gradients, counts: ..., "not answered yet"),
        (lambda gradients, counts: sum(gradients) / len(gradients), "each rank counts the same"),
        (lambda gradients, counts: sum(gradients), "without any division"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)), "the number of all images"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)) / 3, "the number of ranks"),
        (lambda gradients, counts: gradients[0], "rank 0 alone"),
        (lambda gradients, counts: sum(g * n for g, n in zip(gradients, counts)) / 7, "not for 1 and 3"),
        (lambda gradients, counts: gradients[0] * 2, "the first element is"),
        (lambda gradients, counts: gradients, "must be one tensor of shape"),
        (lambda gradients, counts: gradients / counts, "raises TypeError"),
    ],
)
def test_a_wrong_average_is_told_what_is_wrong(wrong, words, capsys):
    assert words in said("01.3", wrong, capsys)
