"""Chapter 09: its verdicts fail when what it claims is broken, its exercises judge fairly."""

import pytest
import torch
from forked import by_value
from labkit.running import notebook_ranks
from labkit.teaching import fsdp1_to_fsdp2
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


@pytest.mark.long
def test_parameters_that_do_not_wait_are_noticed():
    """They are freed after each micro-batch's backward, and gathered for the next one."""
    lines = run_broken(
        "09",
        {
            '"set_requires_gradient_sync", "set_reshard_after_backward")': '"set_requires_gradient_sync",)',
            "ran = launch(two": 'freed = launch(freed={})["freed"]\nran = launch(two',  # its own cell draws
            'ahead_2={"prefetch": 2},\n    ahead_3={"prefetch": 3},': "",
        },
        until="kept_last =",
        skip=("placed", "for_flat", "lora_plan", "two_ahead"),
    )
    failed = [line.split(":")[0].split("  ")[1] for line in lines if line.startswith("FAIL")]
    assert failed == ["traffic of a step, parameters wait", "peak of a rank, parameters wait"]


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
        (cut(others_stay=True), "block 0 stays gathered after forward"),
        (cut(norm_stays=False), "norm and head is freed after forward"),
        (cut(together=False), "head.weight is not gathered together with the rest of norm and head"),
        (cut(root=False), "embedding.weight is in no unit"),
        (cut(blocks=False), "block 0 is not a unit"),
        (root_first, "it raises"),
        (lambda model, mesh: ..., "not answered yet"),
    ],
)
def test_a_cut_is_told_its_first_difference(function, said, capsys):
    check("09.3", function)
    assert said in capsys.readouterr().out


TUNES = {  # what is said to 09.0: how its solution is broken
    "there are 1 units instead of 4": {"[*model.blocks, model]": "[model]"},
    "a norm is a DTensor": {"norm.full_tensor().item()": "norm"},
    "norm in step 2 is": {"        optimizer.zero_grad()\n": ""},
    "were the gradients clipped": {"trained.values(), 0.05": "trained.values(), 1e9"},
    "key.weight is frozen": {"for name, p in trained.items()}": "for name, p in model.named_parameters()}"},
}


@pytest.mark.parametrize("said", TUNES)
def test_a_fine_tune_is_told_its_first_difference(said, capsys):
    code, names = chapter_09.EXERCISES["09.0"].solution, {"torch": torch, "__name__": "__main__"}
    for text, replacement in TUNES[said].items():
        assert text in code
        code = code.replace(text, replacement)
    exec(code, names)
    check("09.0", names["fine_tune"])
    assert said in capsys.readouterr().out


def test_each_row_of_the_table_does_what_it_says():
    found = notebook_ranks.on_ranks(fsdp1_to_fsdp2.try_rows, ranks=4)
    assert len(found[0]) == len(fsdp1_to_fsdp2.ROWS) > 15
    failed = {name for rows in found for (name, _, _), (done, _) in zip(fsdp1_to_fsdp2.ROWS, rows) if not done}
    assert not failed


def test_the_numbers_are_those_of_the_published_shape():
    assert chapter_09.BLOCK == 218_112_000  # 2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14336 + 2 · 4096
    assert chapter_09.EXERCISES["09.2"].answer == 32 * 218_112_000 * 2 / 8 / 2**30


def trained(me, evaluate: bool, reshard: bool) -> list[float]:
    """Losses of steps with a forward without backward between backward and the optimizer's step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        if evaluate:
            model(torch.ones(3, 4)).detach()
        if reshard:
            model.reshard()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_root_left_whole_by_a_forward_alone_grows_stale_unless_resharded():
    ways = {"not evaluated": (False, False), "evaluated": (True, False), "and resharded": (True, True)}
    found = {name: notebook_ranks.on_ranks(by_value(trained), *way, ranks=2)[0] for name, way in ways.items()}
    assert found["not evaluated"] == found["and resharded"]
    assert found["evaluated"][0] == found["not evaluated"][0]
    assert found["evaluated"][1] != found["not evaluated"][1]
