# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 03: its verdicts can fail, and its exercises judge right and wrong answers."""

import pytest
import torch
from answers import altered
from labkit.teaching.exercises import chapter_03, check

from notebooks import run_broken

FEW = {"STEPS, BATCH = 10, 8": "STEPS, BATCH = 3, 8"}


@pytest.mark.breaks
def test_a_sum_where_a_mean_belongs_fails():
    lines = run_broken("03", FEW | {"return gradient.div_(self.world)": "return gradient"})
    assert len(lines) == 1 and lines[0].startswith("FAIL  stage 0: losses"), lines


@pytest.mark.breaks
@pytest.mark.parametrize(
    "breaks",
    [
        {"torch.optim.Adam(": "torch.optim.Adafactor("},  # clips an update by the norm of the whole tensor
        {".double()": "", "torch.float64": "torch.float32"},
    ],
    ids=["optimizer that is not elementwise", "float32"],
)
def test_outside_the_claims_conditions_the_losses_fail(breaks):
    lines = run_broken("03", {"STEPS, BATCH = 10, 8": "STEPS, BATCH = 5, 8"} | breaks, until="trained = {", ranks=3)
    assert any(line.startswith("FAIL  stage 3") for line in lines), lines


@pytest.mark.breaks
def test_each_broken_stage_fails_and_no_other():
    breaks = {
        # Stage 1, and 2 after it: no rank receives an update
        "dist.all_gather_into_tensor(self.flat, self.own)": "pass",
        # Stage 3: the second gather's vector stays, and the next step's backward computes with old parameters
        "ctx.unit.full = None  #": "pass  #",
        # Stage 3: the shard is a view, and the whole vector stays alive
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


HOOKS = "with torch.autograd.graph.saved_tensors_hooks(pack, unpack):"


@pytest.mark.parametrize(
    "breaks, says",
    [
        ([(HOOKS, "if True:")], "after forward, the whole vector is still alive"),
        ([("!= address", "!= full.untyped_storage().data_ptr()")], "after forward, the whole vector is still alive"),
        ([("unit.gather()\n    address", "unit.full = unit.gather()\n    address")], "the whole vector is still alive"),
        ([("if unit.full is None:", "if True:")], "a step gathers 3 times"),
        (
            [("unit.full is None", "not hasattr(unit, 'again')"), ("unit.full", "unit.again")],
            "after backward, a whole vector is still alive",
        ),
        ([("tensor.storage_offset()", "0")], "of the shard's gradient is"),
        ([("if tensor.untyped_storage().data_ptr() != address:", "if False:")], "of the shard's gradient is"),
        ([("full = unit.gather()", "full = unit.gather().detach()")], "the shard gets no gradient"),
        ([("compute(full,", "compute(full * 2,")], "step 1: the output differs"),
        ([("return unit.compute(full, *inputs)", "return unit")], "it returns a _Unit"),
        ([("return tensor.size()", "return tensor.sizes()")], "a rank raises AttributeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_unit_is_told_its_first_difference(breaks, says, capsys):
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
    assert says in verdict_of(capsys, "03.1", altered("03.1", *breaks))


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
    assert says in verdict_of(capsys, "03.2", wrong)
