# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 01: its verdicts can fail, and its exercises know right from wrong."""

import pytest
from answers import altered
from labkit.teaching.exercises import check

from notebooks import run_broken

SYNCED = "synced = flat_gradient(ddp, x, y, reduction)"


def failed(lines, claim):
    return any(line.startswith(f"FAIL  {claim}") for line in lines)


@pytest.mark.breaks
def test_a_bypassed_wrapper_is_seen():
    lines = run_broken("01", {SYNCED: "synced = flat_gradient(ddp.module, x, y, reduction)"})
    assert not failed(lines, "each other rank's own gradient")
    assert failed(lines, "after backward, before any step()")


@pytest.mark.breaks
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


@pytest.mark.breaks
def test_a_parameter_without_a_gradient_is_outside_the_claim():
    """Its bucket, which in the first step has all gradients, is never reduced."""
    unused = "net.unused = torch.nn.Parameter(torch.zeros(1))"
    breaks = {
        "return Net(dropout=False).double()": f"net = Net(dropout=False); {unused}; return net.double()",
        "for p in net.parameters()]": "for p in net.parameters() if p.grad is not None]",
    }
    assert failed(run_broken("01", breaks), "after backward, before any step()")


@pytest.mark.breaks
def test_buckets_that_average_nothing_or_are_too_large_are_seen():
    """``finish`` is not called; all gradients fit into one bucket, as they do if the limit is left to DDP's 25 MiB."""
    until, skip = "largest difference of the gradients", ()
    assert failed(run_broken("01", {"    finish()\n": "    pass\n"}, until, skip), until)
    lines = run_broken("01", {"limit=2**20 // 4": "limit=25 * 2**20 // 4"}, until, skip)
    assert failed(lines, "gradients still to come") and not failed(lines, until)


SKIPPED = ("relative_difference(", "by_hooks", "figures.", "learn(")


@pytest.mark.breaks
def test_memory_that_is_not_as_predicted_is_seen():
    """Another strategy has fewer parameters, another batch fewer activations."""
    breaks = {'strategy="ddp", batch_size=8': 'strategy="fsdp2", batch_size=24'}
    lines = run_broken("01", breaks, until="between steps, {name}", skip=SKIPPED)
    assert failed(lines, "between steps, parameters") and failed(lines, "at the peak, activations")


@pytest.mark.breaks
def test_other_precisions_are_outside_the_claim():
    breaks = {
        'strategy="ddp", batch_size=8': 'strategy="ddp", precision="fp64", batch_size=8',
        'strategy="ddp", batch_size=each': 'strategy="ddp", precision="bf16", batch_size=each',
    }
    lines = run_broken("01", breaks, until="all-reduced per step", skip=SKIPPED)
    for claim in (
        "between steps, all-reduce buckets",
        "at the peak, gradients",
        "peak at 8",
        "peak at 32",
        "peak at 64",
    ):
        assert failed(lines, claim), claim
    assert failed(lines, "all-reduced per step, 8") and not failed(lines, "all-reduced per step, 64")


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


NEVER_FULL, NO_REST = (">= limit", ">= 10**9"), ("if bucket:", "if False:")
BIASES_LOST = "p.grad.copy_(part.view_as(p) if p.ndim > 1 else 0 * p)"
IN_FINISH = """while bucket:
            rest = bucket[3:]
            del bucket[3:]
            start()
            bucket.extend(rest)
        if False:"""
UNHOOKED = "started.clear(); [p._post_accumulate_grad_hooks.popitem() for p in model.parameters()]"


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        ([("parameter.register_post_accumulate_grad_hook(collect)", "pass")], "collect is not registered"),
        ([NEVER_FULL, NO_REST], "no all-reduce starts"),
        ([(", async_op=True", ""), ("work.wait()", "pass")], "without async_op=True"),
        (
            [("started.append(", "work.wait(); started.append("), ("            work.wait()\n", "")],
            "a hook calls wait()",
        ),
        ([("            work.wait()\n", "")], "3 all-reduces start, and wait() is called 0 times"),
        ([("        started.clear()\n", "")], "in the second 3 all-reduces start, and wait() is called 6 times"),
        ([("p.grad.copy_(part.view_as(p))", "pass")], "all gradients are still the rank's own after finish()"),
        ([("flat /= dist.get_world_size()", "pass")], "the gradients are 3 times DDP's"),
        ([("/= dist.get_world_size()", "/= 2")], "the gradients are 1.5 times DDP's"),
        ([NO_REST], "is still the rank's own: does finish() start the last bucket"),
        ([("p.grad.copy_(part.view_as(p))", BIASES_LOST)], "differs from DDP's by"),
        ([("started.clear()", UNHOOKED)], "in the second all gradients are still the rank's own"),
        ([NEVER_FULL], "one all-reduce for all gradients"),
        ([(">= limit", ">= 0")], "one all-reduce per gradient"),
        ([NEVER_FULL, ("if bucket:", IN_FINISH)], "the first all-reduce starts when backward has ended"),
        ([("bucket.copy()", "bucket")], "a rank raises RuntimeError"),
        (
            [
                (
                    "            start()\n        for",
                    "            start()\n            bucket.append(model[0].bias)\n        for",
                )
            ],
            "the second raises AttributeError",
        ),
        ([("register_post_accumulate_grad_hook", "register_hook")], "a rank raises"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_buckets_are_told_what_is_wrong(breaks, words, capsys):
    assert words in said("01.1", altered("01.1", *breaks), capsys)


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
    assert words in said("01.2", wrong, capsys)
