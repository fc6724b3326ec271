"""Chapter 03: its verdicts can fail, and its exercises judge right and wrong answers."""

import pytest
import torch
from labkit.teaching.exercises import check

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
        "FAIL  stage 3, a unit a layer: losses against torch's DDP",
        "FAIL  stage 3: bytes alive on a rank",
    ]
    assert sum(line.startswith("PASS") for line in lines) == 4


def verdict_of(capsys, number, answer):
    check(number, answer)
    return capsys.readouterr().out.split(": ", 1)[1].strip()


def padded(flat, world):
    return torch.nn.functional.pad(flat, (0, -len(flat) % world))


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda flat, rank, world: flat.chunk(world)[rank].clone(), "lengths [3, 3, 3, 1]"),
        (lambda flat, rank, world: flat[: len(flat) // world * world].chunk(world)[rank].clone(), "is lost"),
        (lambda flat, rank, world: padded(flat, world).chunk(world)[rank], "keeps the whole vector alive"),
        (lambda flat, rank, world: padded(flat, world)[rank::world].clone(), "rank 0 has [1.0, 5.0]"),
        (lambda flat, rank, world: padded(flat, world).clone(), "shards of 8"),
        (lambda flat, rank, world: flat.undefined, "raises AttributeError"),
    ],
)
def test_a_wrong_shard_is_explained(wrong, says, capsys):
    assert says in verdict_of(capsys, "03.2", wrong)


def scaled(shards, factor):
    return [shard * factor for shard in shards]


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda s, m: [x * min(1, m / x.norm()) for x in s], "norm of its own shard"),
        (lambda s, m: scaled(s, min(1, m / sum(x.norm() for x in s))), "norms do not add up"),
        (lambda s, m: scaled(s, m / torch.cat(s).norm()), "nothing is to be changed"),
        (lambda s, m: s, "nothing was scaled"),
        (lambda s, m: scaled(s, min(1, m / torch.cat(s).square().sum())), "rank 0 has"),
        (lambda s, m: s[:1], "1 came out"),
    ],
)
def test_a_wrong_clip_is_explained(wrong, says, capsys):
    assert says in verdict_of(capsys, "03.3", wrong)
