"""Chapter 17: its exercises judge fairly, its scripts have the traps they are said to have, its verdicts can fail."""

import pytest
import torch
from forked import by_value
from labkit.measuring import simulate
from labkit.teaching.exercises import check
from labkit.teaching.exercises.chapter_17 import BUDGET, CONFIG, EXERCISES, MIB, TRAPS, _model
from labkit.training import hf_models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from notebooks import run_broken


def whole(model, mesh):
    fully_shard(model, mesh=mesh)


def blocks(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def inside_blocks(model, mesh):
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=mesh)
    fully_shard(model, mesh=mesh)


def no_root(model, mesh):
    for block in (*model.model.layers, model.model.embed_tokens, model.lm_head, model.model.norm):
        fully_shard(block, mesh=mesh)


def some_left(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)


def never_tied(model, mesh):
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)


def as_a_group(model, mesh):
    """Right, too, where embedding and head are one weight; apart otherwise."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    if hf_models.tied(model):
        fully_shard([model.model.embed_tokens, model.lm_head], mesh=mesh)
    else:
        fully_shard(model.model.embed_tokens, mesh=mesh)
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def not_where_tied(model, mesh):
    if not hf_models.tied(model):
        never_tied(model, mesh)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (whole, f"the budget {BUDGET / MIB:.0f}: there is one unit, so all parameters are gathered at once"),
        (blocks, "each block is a unit; what else is large? The root stays gathered throughout the step"),
        (inside_blocks, "whose forward runs the decoder's blocks one by one?"),
        (no_root, "the model itself is not a unit"),
        (some_left, "model.embed_tokens.weight is in no unit"),
        (never_tied, "the tied weights of embedding and head are two"),
        (not_where_tied, "not all of the model is in a unit"),
        (as_a_group, ": right"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cut_is_told_what_is_wrong_with_it(shard, said, capsys):
    check("17.0", by_value(shard))
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"a": ..., "b": ..., "c": ...}, "not answered yet"),
        ({"a": "recompute"}, "name a trap for each script"),
        ({"a": "recompute", "b": "units", "c": "memory"}, "'memory' is not among the traps"),
        ({"a": "recompute", "b": "tied", "c": "buffers"}, f"script b: with 'tied' you would see {TRAPS['tied']}"),
        ({"a": "recompute", "b": "units", "c": "buffers"}, ": right"),
        ("recompute", "name a trap for each script"),
    ],
)
def test_a_wrong_trap_is_told_what_it_would_look_like(answer, said, capsys):
    check("17.2", answer)
    assert said in capsys.readouterr().out


@pytest.fixture
def world():
    simulate.join(4)
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def test_the_scripts_have_their_traps(world, tmp_path):
    """a: nothing is recomputed in eval mode; b: no module has that name; c: read_into gives buffers no value."""
    AutoConfig.for_model(**CONFIG).save_pretrained(tmp_path)
    model = _model(tied=False)
    assert EXERCISES["17.2"].traps == {"a": "recompute", "b": "units", "c": "buffers"}
    model.save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).training
    assert not any(type(module).__name__ == "LlamaBlock" for module in model.modules())
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert dict(empty.named_buffers()) and not set(dict(empty.named_buffers())) & set(dict(empty.named_parameters()))


LEFT = "parameters that are not those of from_pretrained"


def failed(lines):
    return [line.split(":")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


@pytest.mark.long
def test_a_model_cut_elsewhere_and_weights_that_were_not_read_are_noticed():
    """The cut changes no weight, and the weights no peak."""
    breaks = {'shard = yours_or_ours("17.0", shard)': "def shard(model, mesh):\n    fully_shard(model, mesh=mesh)"}
    breaks |= {"load_checkpoint(model.state_dict(), storage_reader=HuggingFaceStorageReader(folder))  # 4": (
        "torch.manual_seed(2); [torch.nn.init.normal_(p, std=0.02) for p in model.parameters()]"
    )}  # fmt: skip
    lines = run_broken("17", breaks, until="that are not those of from_pretrained", ranks=4)
    assert sorted(failed(lines)) == sorted(
        [
            "peak, cut by blocks",
            "the same, against the budget",
            "largest difference of the losses, from those of the one line",
            LEFT,
        ]
    )
