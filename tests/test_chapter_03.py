"""Chapter 03: its verdicts can fail, and its exercises judge right and wrong answers."""

import pytest
import torch
from answers import altered
from labkit.teaching.exercises import chapter_03, check

from notebooks import run_broken

FEW = {"STEPS, BATCH = 10, 8": "STEPS, BATCH = 3, 8"}


@pytest.mark.long
def test_a_sum_where_a_mean_belongs_fails():
    lines = run_broken("03", FEW | {"return gradient.div_(self.world)": "return gradient"})
    assert len(lines) == 1 and lines[0].startswith("FAIL  stage 0: losses"), lines


@pytest.mark.long
def test_each_broken_stage_fails_and_no_other():
    breaks = {
        # Stage 1, and 2 after it: nobody hears of an update
        "dist.all_gather_into_tensor(self.flat, self.own)": "pass",
        # Stage 3: there is no second gather, and backward computes with zeros
        "self.full = self.gather()": "self.full = torch.zeros_like(self.shard).repeat(self.world)",
        # Stage 3: the shard is a view, and the whole vector lives on
        ".chunk(self.world)[me.rank].clone()": ".chunk(self.world)[me.rank]",
    }
    lines = run_broken("03", FEW | breaks, until="HELD =")
    failed = [line.split(": measured")[0] for line in lines if line.startswith("FAIL")]
    assert failed == [
        "FAIL  stage 1: losses against torch's DDP",
        "FAIL  stage 2: losses against torch's DDP",
        "FAIL  stage 3, one unit: losses against torch's DDP",
        "FAIL  stage 3, a unit per layer: losses against torch's DDP",
        "FAIL  stage 3: bytes alive on a rank",
    ]
    assert sum(line.startswith("PASS") for line in lines) == 4


def verdict_of(capsys, number, answer):
    check(number, answer)
    return capsys.readouterr().out.split(": ", 1)[1].strip()


REDUCED = "dist.reduce_scatter_tensor(own, gradient)"


@pytest.mark.parametrize(
    "breaks, says",
    [
        ([(".div_(world)", "")], "that is the sum over the ranks, not the mean"),
        ([(REDUCED, "own.copy_(gradient.chunk(world)[rank] * world)")], "its slice of its own gradient"),
        ([(REDUCED, "dist.all_reduce(gradient); own = gradient")], "that is the mean of the whole gradient"),
        (
            [(REDUCED, "dist.all_reduce(gradient); own = gradient.chunk(world)[rank].clone()")],
            "all_reduce sends more bytes than a reduce-scatter",
        ),
        (
            [("gradient.new_empty(len(gradient) // world)", "gradient.chunk(world)[rank]")],
            "keeps the whole vector alive",
        ),
        ([(REDUCED, "dist.reduce_scatter_tensor(own, gradient.view(world, -1).flip(0).flatten())")], "rank 2's slice"),
        ([(".div_(world)", ".div_(world * world)")], "divided by the number of ranks once more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_reduction_is_told_its_first_difference(breaks, says, capsys):
    assert says in verdict_of(capsys, "03.0", altered("03.0", *breaks))


@pytest.mark.parametrize(
    "breaks, says",
    [
        ([("-(-sum(sizes) // world)", "sum(sizes) // world")], "with the padding, every shard has 5 elements"),
        ([("(start, stop) if", "(begin + start, begin + stop) if")], "not of the vector"),
        (
            [("(start, stop) if", "(start + begin - rank * share, stop + begin - rank * share) if")],
            "rank 1 returns (1, 5) for parameter 2 instead of (0, 4): count from the start of the parameter, not of the shard",
        ),
        ([("(start, stop) if", "(start, stop - 1) if")], "stop is one past the last"),
        ([(" if start < stop else (0, 0)", "")], "rank 1 returns (4, 4) for parameter 0 instead of (0, 0): no element"),
        ([("(start, stop) if", "start if")], "rank 0 returns 0 for parameter 0 instead of (0, 4): not a pair"),
        ([("return ranges", "return ranges[:1]")], "it must return 2 pairs, one for each parameter"),
        ([("begin += size", "begin += length")], "raises NameError"),
    ],
)
def test_wrong_pieces_are_explained(breaks, says, capsys):
    assert says in verdict_of(capsys, "03.2", altered("03.2", *breaks))


def test_the_pieces_are_those_that_fsdp1_writes_down():
    """``_ShardParamInfo`` of each rank, without a process group: the function that makes it only reads numbers."""
    from types import SimpleNamespace

    from torch.distributed.fsdp._flat_param import FlatParamHandle

    sizes, world = (5, 1, 8, 3), 4
    flat = SimpleNamespace(_numels_with_padding=(*sizes, 3), _is_padding_mask=[False] * 4 + [True])
    handle = SimpleNamespace(flat_param=flat)
    handle._get_flat_param_offsets = lambda: FlatParamHandle._get_flat_param_offsets(handle)
    for rank in range(world):
        infos = FlatParamHandle._get_shard_metadata(handle, 5 * rank, 5 * rank + 4)
        ours = chapter_03.reference_pieces(sizes, rank, world)
        theirs = [(i.intra_param_start_idx, i.intra_param_end_idx + 1) if i.in_shard else (0, 0) for i in infos]
        assert theirs == ours


def scaled(shards, factor):
    return [shard * factor for shard in shards]


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda s, m: [x * min(1, m / x.norm()) for x in s], "norm of its own shard"),
        (lambda s, m: scaled(s, min(1, m / sum(x.norm() for x in s))), "norms do not add up"),
        (lambda s, m: scaled(s, m / torch.cat(s).norm()), "change nothing"),
        (lambda s, m: s, "nothing was scaled"),
        (lambda s, m: scaled(s, min(1, m / torch.cat(s).square().sum())), "rank 0 has"),
        (lambda s, m: s[:1], "1 came out"),
    ],
)
def test_a_wrong_clip_is_explained(wrong, says, capsys):
    assert says in verdict_of(capsys, "03.3", wrong)
