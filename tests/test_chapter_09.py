# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 09: its verdicts fail when what it claims is broken, its exercises judge fairly."""

import pytest
import torch
from answers import altered
from forked import by_value
from labkit.running import notebook_ranks
from labkit.teaching import fsdp1_to_fsdp2, fsdp2_methods
from labkit.teaching.exercises import check
from torch.distributed.fsdp import fully_shard

from notebooks import run_broken


@pytest.mark.breaks
def test_verdicts_notice_a_root_that_is_not_sharded_and_a_loop_that_frees_parameters_between_micro_batches():
    """With such a root, embedding, norm and head are whole on every rank: no DTensors. One run for both: it takes long."""
    lines = run_broken(
        "09",
        {
            "    import gpt_fsdp\n\n    model, _ = gpt_fsdp.build(gpt_fsdp.Config(lora=2), me)": (
                "    import gpt_fsdp\n\n    gpt_fsdp.fsdp2 = lambda model, config, me: [fully_shard(b) for b in model.blocks]\n"
                "    model, _ = gpt_fsdp.build(gpt_fsdp.Config(lora=2), me)"
            ),
            "reshard_after_forward=how": "reshard_after_forward=True",
            "ran = dict(zip(RUNS": 'RUNS = {"every": RUNS["every"]}\nran = dict(zip(RUNS',
            ', "sync last": ran["last"]': "",
            'accumulate = yours_or_ours("09.0", accumulate)': (
                'from answers import altered\n\naccumulate = altered("09.0", ("set_reshard_after_backward(last)", "train()"))'
            ),
        },
        until="kept_last =",
        only=("cell-01", "cell-07", "cell-08", "cell-12", "cell-23", "cell-28", "cell-28-runs", "cell-48c", "cell-48d"),
    )
    failed = [line.split(":")[0].split("  ")[1] for line in lines if line.startswith("FAIL")]
    assert failed == [
        "of 71 parameters and gradients, not sharded as torch.chunk does",
        "rows on rank 3 between forward and backward, reshard_after_forward=2",
        "rows on rank 3 between forward and backward, reshard_after_forward=False",
        "traffic of a step, each unit gathered and reduced once",
        "peak of a rank, each unit gathered and reduced once",
    ]


ACCUMULATES = {  # what is said to 09.0: what is changed in its solution
    "the gradient is 3 times that of the mean loss": (" / len(micro_batches)", ""),
    "12 reduce-scatters; 4 units need one each": ("set_requires_gradient_sync(last)", "train()"),
    "13 all-gathers; 4 units need one each": ("model.set_reshard_after_forward(False)", "pass"),
    "is still whole after the step": ("set_reshard_after_backward(last)", "set_reshard_after_backward(False)"),
    "step 1, of 3 micro-batches: the shard of": ("sync(last)", "sync(False)"),
    "a list with one loss per micro-batch": ("return losses", "return losses[0]"),
}


@pytest.mark.parametrize("said", ACCUMULATES)
def test_a_loop_is_told_its_first_difference(said, capsys):
    check("09.0", altered("09.0", ACCUMULATES[said]))
    assert said in capsys.readouterr().out


CHOICES = {  # what is said to 09.2: what is changed in its solution
    "8B, little room, a mesh per unit": (" + communicators * communicator", ""),
    "8B, little room, one mesh for all units": ("1 if shared else units", "units"),
    "8B, much room": ("if units * unit_bytes <= room:\n        return False", "if False:\n        pass"),
    "large blocks, a mesh per unit": ("1 if shared else units", "1 if shared else 2 * units"),
    "8B, room for the eighths alone": ("1 if shared", "0 if shared"),
}


@pytest.mark.parametrize("said", CHOICES)
def test_a_choice_is_told_the_case_that_it_misses(said, capsys):
    check("09.2", altered("09.2", CHOICES[said]))
    assert f"not quite: {said}" in capsys.readouterr().out


CUTS = {  # what is said to 09.3: what is changed in its solution
    "block 0 stays gathered after forward": ("fully_shard(block, mesh=mesh, reshard_after_forward=True)",
                                             "fully_shard(block, mesh=mesh, reshard_after_forward=False)"),
    "norm and head is freed after forward": ("[model.norm, model.head], mesh=mesh, reshard_after_forward=False",
                                             "[model.norm, model.head], mesh=mesh, reshard_after_forward=True"),
    "the embedding stays gathered after forward": ("model.embedding, mesh=mesh, reshard_after_forward=True",
                                                   "model.embedding, mesh=mesh, reshard_after_forward=False"),
    "head.weight is not gathered together with the rest": ("fully_shard([model.norm, model.head]",
        "fully_shard(model.head, mesh=mesh)\n        fully_shard(model.norm"),
    "fully_shard was not called on the model itself": ("fully_shard(model, mesh=mesh)", "pass"),
    "block 0 is no unit of its own": ("fully_shard(block, mesh", "fully_shard(block.feed_forward, mesh"),
    "is shared with a parameter already managed": ("model.head.weight is model.embedding.weight", "False"),
    "embedding, norm and head is freed after forward, but backward needs it at once: keep it gathered (tied weights)": (
        "[model.embedding, model.norm, model.head], mesh=mesh, reshard_after_forward=False",
        "[model.embedding, model.norm, model.head], mesh=mesh, reshard_after_forward=True"),
}  # fmt: skip


@pytest.mark.parametrize("said", CUTS)
def test_a_cut_is_told_its_first_difference(said, capsys):
    check("09.3", altered("09.3", CUTS[said]))
    assert said in capsys.readouterr().out


TUNES = {  # what is said to 09.1: what is changed in its solution
    "there are 1 units instead of 4": ("[*model.blocks, model]", "[model]"),
    "a norm is a DTensor": ("norm.full_tensor().item()", "norm"),
    "norm in step 2 is": ("        optimizer.zero_grad()\n", ""),
    "were the gradients clipped": ("trained.values(), 0.05", "trained.values(), 1e9"),
    "key.weight is frozen": ("for name, p in trained.items()}", "for name, p in model.named_parameters()}"),
}


@pytest.mark.parametrize("said", TUNES)
def test_a_fine_tune_is_told_its_first_difference(said, capsys):
    check("09.1", altered("09.1", TUNES[said]))
    assert said in capsys.readouterr().out


def test_each_row_of_the_table_does_what_it_says():
    found = notebook_ranks.on_ranks(fsdp1_to_fsdp2.try_rows, ranks=4)
    assert len(found[0]) == len(fsdp1_to_fsdp2.ROWS) > 15
    failed = {name for rows in found for (name, _, _), (done, _) in zip(fsdp1_to_fsdp2.ROWS, rows) if not done}
    assert not failed


def test_a_method_without_a_row_is_found():
    installed = fsdp2_methods.names()
    assert not fsdp2_methods.missing(installed)
    assert fsdp2_methods.missing([*installed, "set_something_new"]) == ["set_something_new"]
    assert "`set_something_new`" not in fsdp2_methods.table(installed)
    assert "`reshard` (in a newer PyTorch)" in fsdp2_methods.table(installed[1:])


@pytest.mark.parametrize(("wide", "done"), [(fsdp1_to_fsdp2.WIDE, True), (not fsdp1_to_fsdp2.WIDE, False)])
def test_the_row_of_mixed_precision_looks_at_the_data_types(wide, done):
    assert notebook_ranks.on_ranks(by_value(reductions), wide, ranks=2)[0][0] is done


def reductions(me, wide) -> tuple[bool, str]:
    from labkit.teaching import fsdp1_to_fsdp2

    fsdp1_to_fsdp2.WIDE = wide
    return fsdp1_to_fsdp2.mixed_precision(torch.ones(3, 6, device=me.device))


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
