"""Chapter 09: its verdicts fail when what it claims is broken, its exercises judge fairly."""

import pytest
from labkit.teaching.exercises import chapter_09, check
from torch.distributed.fsdp import fully_shard

from notebooks import run_broken


@pytest.mark.long
def test_a_root_that_is_not_sharded_is_noticed():
    """Embedding, norm and head are then whole on every rank: no DTensors."""
    lines = run_broken(
        "09",
        {
            "    import gpt_fsdp\n\n    model, _ = gpt_fsdp.build(gpt_fsdp.Config(lora=2), me)": (
                "    import gpt_fsdp\n\n    gpt_fsdp.fsdp2 = lambda model, config, me: [fully_shard(b) for b in model.blocks]\n"
                "    model, _ = gpt_fsdp.build(gpt_fsdp.Config(lora=2), me)"
            ),
            "reshard_after_forward=how": "reshard_after_forward=True",
        },
    )
    failed = [line.split(":")[0].split("  ")[1] for line in lines if line.startswith("FAIL")]
    assert failed == [
        "parameters and gradients that are not a Shard(0) cut as torch.chunk cuts",
        "rows on rank 3 between forward and backward, reshard_after_forward=2",
        "rows on rank 3 between forward and backward, reshard_after_forward=False",
    ]


def cut(last_stays=True, others_stay=False, together=True, norm_stays=True, root=True, blocks=True):
    """A function for 09.3, right but for what is said."""

    def function(model, mesh):
        for block in model.blocks if blocks else ():
            stays = last_stays if block is model.blocks[-1] else others_stay
            fully_shard(block, mesh=mesh, reshard_after_forward=not stays)
        for unit in [[model.norm, model.head]] if together else [model.norm, model.head]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=not norm_stays)
        if root:
            fully_shard(model, mesh=mesh)

    return function


def root_first(model, mesh):
    fully_shard(model, mesh=mesh)
    cut(root=False)(model, mesh)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (cut(), "right"),
        (cut(last_stays=False), "block 2 is freed after forward, but backward needs it at once"),
        (cut(others_stay=True), "block 0 stays whole after forward"),
        (cut(norm_stays=False), "norm and head is freed after forward"),
        (cut(together=False), "head.weight does not become whole together with the rest of norm and head"),
        (cut(root=False), "no unit has taken embedding.weight"),
        (cut(blocks=False), "block 0 is no unit"),
        (root_first, "it raises"),
        (lambda model, mesh: ..., "not answered yet"),
    ],
)
def test_a_cut_is_told_its_first_difference(function, said, capsys):
    check("09.3", function)
    assert said in capsys.readouterr().out


def test_the_numbers_are_those_of_the_published_shape():
    assert chapter_09.BLOCK == 218_112_000  # 2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14336 + 2 · 4096
    assert chapter_09.EXERCISES["09.2"].answer == 32 * 218_112_000 * 2 / 8 / 2**30
