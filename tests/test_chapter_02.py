# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 02: its verdicts can fail, and its exercises say what is wrong."""

import pytest
import torch
from answers import altered
from labkit.teaching.exercises import check

from notebooks import run_broken

NO_SUM = "lambda me, chunks, shift: [shift(chunks[me.rank - 1]) for _ in range(me.world_size - 1)][-1]"
WHOLE = "lambda me, chunks, shift: chunks[me.rank] + shift(torch.stack(chunks))[me.rank]"  # on two ranks


@pytest.mark.breaks
@pytest.mark.parametrize(
    "breaks, failing",
    [
        # The arriving partial sum is kept instead of added
        ({'yours_or_ours("02.0", ring_reduce_scatter)': NO_SUM}, ["our ring differs"]),
        # The all-gather stops a step early
        (
            {"range(W - 1):  # send the": "range(W - 2):  # send the"},
            ["our ring differs", "ring's all-gather by all ranks"],
        ),
        # Each rank sends its whole tensor instead of a chunk: the sums are right, the bytes are not a ring's
        ({'yours_or_ours("02.0", ring_reduce_scatter)': WHOLE}, ["ring's reduce-scatter by all ranks"]),
        # PyTorch's own halves: a rank puts another rank's chunk in
        ({"dist.reduce_scatter_tensor(part, whole)\n    dist.all": "dist.all"}, ["reduce-scatter + all-gather"]),
    ],
    ids=["no sum", "a missing step", "no ring", "no reduction"],
)
def test_a_broken_all_reduce_fails(breaks, failing):
    lines = run_broken("02", breaks)
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) == len(failing)
    assert all(claim in line for claim, line in zip(failing, failed, strict=True))


@pytest.mark.breaks
def test_the_claim_fails_where_fp32_rounds_the_sums():
    """Its condition: sums that fp32 represents exactly. Our ring of four adds in another order than gloo."""
    lines = run_broken("02", {".float().to(me.device)": ".float().div(7).to(me.device)"}, ranks=4)
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) == 1 and "our ring differs" in failed[0]


@pytest.mark.breaks
def test_an_unwrapped_unit_is_gathered_once_less():
    """The lab is not wrapped as the arithmetic assumes, but the step that Linux counts is."""
    breaks = {'strategy="fsdp2", wrap="size"': 'strategy="fsdp2", wrap="unit"'}
    lines = run_broken("02", breaks, until="def step_sends", skip=("worlds",))
    failed = [line for line in lines if line.startswith("FAIL")]
    claims = ["fsdp2, all-gather in a step", "fsdp2, one step by Linux's count"]
    assert [claim in line for claim, line in zip(claims, failed, strict=True)] == [True] * 2


@pytest.mark.breaks
def test_a_collective_too_many_is_seen_by_linux():
    breaks = {
        "dist.all_gather_into_tensor(whole, part)),": "(dist.all_gather_into_tensor(whole, part), dist.all_reduce(whole))),"
    }
    lines = run_broken("02", breaks, until="by Linux's count", skip=("worlds",))
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) == 1 and "all-gather, by Linux" in failed[0]


@pytest.mark.parametrize(
    "breaks, said",
    [
        ([("chunks[theirs] + shift(", "shift(")], "rank 0 returns 10 instead of 1111: that is one rank's contribution"),
        (
            [("chunks[theirs] = chunks[theirs]", "chunks[theirs] = chunks[mine]")],
            "different chunks are mixed",
        ),
        ([("range(W - 1)", "range(W - 2)")], "after 2 steps: too few"),
        ([("- 1 - step", "- step"), ("- 2 - step", "- 1 - step")], "that is its own contribution"),
        ([("return chunks[me.rank]", "return chunks")], "rank 0 returns a list, not a chunk"),
        (
            [
                ("- 1 - step", "- step"),
                ("- 2 - step", "- 1 - step"),
                ("return chunks[me.rank]", "return chunks[theirs]"),
            ],
            "the sum of chunk 1, complete, but on the wrong rank",
        ),
        (
            [("    return chunks[", "    shift(chunks[0])\n    return chunks[")],
            "each rank sends 4 chunks; 3 are enough",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_ring_is_told_its_first_difference(breaks, said, capsys):
    check("02.0", altered("02.0", *breaks))
    assert said in capsys.readouterr().out


def pad(parts):
    longest = max(map(len, parts))
    return [torch.nn.functional.pad(part, (0, longest - len(part))) for part in parts]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda parts, all_gather: all_gather(parts), "pad them first"),
        (lambda parts, all_gather: all_gather(pad(parts)), "the padding is still in"),
        (lambda parts, all_gather: all_gather(pad(parts))[: sum(map(len, parts))], "from the middle stayed in"),
        (lambda parts, all_gather: torch.cat(parts), "called 0 times"),
        (
            lambda parts, all_gather: [all_gather(pad(parts)), torch.cat(parts)][1],
            "not of the tensor that all_gather returned",
        ),
        (lambda parts, all_gather: all_gather([p[: min(map(len, parts))] for p in parts]), "real data was cut"),
        (lambda parts, all_gather: all_gather(pad(parts[::-1]))[: sum(map(len, parts))], "order is not the ranks'"),
        (lambda parts, all_gather: all_gather(pad(parts)).tolist(), "must be a tensor"),
        (lambda parts, all_gather: ..., "not answered yet"),
    ],
)
def test_a_wrong_gather_is_told_why(wrong, said, capsys):
    check("02.2", wrong)
    assert said in capsys.readouterr().out
