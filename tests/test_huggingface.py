# SPDX-License-Identifier: BSD-3-Clause
"""Models of others: the planner counts their parameters as ``transformers`` does, and plans what their blocks do otherwise."""

import json
from pathlib import Path

import plan
import pytest
import transformers
from commands import refused
from planner import predict
from planner.models import huggingface, networks

PUBLISHED = json.loads((Path(huggingface.__file__).parents[2] / "samples" / "published.json").read_text())["models"]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LONG = {"precision": "bf16", "recompute": "full", "batch_size": 1}
GROUPED = SMALL | {"num_key_value_heads": 2}


def test_a_window_saves_operations_and_no_parameters():
    wide = PUBLISHED["mistral-7b"] | {"sliding_window": None}
    shapes = [huggingface.shape_of(config) for config in (wide, PUBLISHED["mistral-7b"])]
    everything, near = (networks.gpt(shape, 1, 16384) for shape in shapes)
    assert everything.numel == near.numel
    saved = 12 * 32 * 4096 * (16384 - 4096)  # layers, width, tokens that none looks at
    assert everything.flops - near.flops == saved


def test_gemma_2_has_windows_in_every_other_layer_and_gemma_3_in_five_of_six():
    second, third = (huggingface.shape_of(PUBLISHED[name]) for name in ("gemma-2-9b", "gemma-3-1b"))
    for shape, tokens in ((second, 21 * (4096 + 8192)), (third, 22 * 512 + 4 * 8192)):
        attended = sum(shape.attended_elements(number, 8192) for number in range(shape.num_hidden_layers))
        assert attended == tokens * shape.query_size


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "phi-4", "gpt2-xl", "smollm3-3b", "gemma-3-27b"])
def test_each_can_be_planned_under_fsdp(name):
    shape = huggingface.shape_of(PUBLISHED[name])
    length = min(shape.learned_positions or 2048, 2048)
    for recompute in ("none", "full"):
        network = networks.gpt(shape, 1, length, recompute)
        planned = predict.Plan(network, "fsdp2", 8, precision="bf16", on_gpu=True)
        kept = 12 * network.numel / 8
        assert kept <= predict.total(planned.persistent()) <= 1.01 * kept
        assert predict.total(planned.peak()[1]) > kept


@pytest.mark.parametrize("family", huggingface.FAMILIES)
def test_dropout_is_seen_by_whatever_name_the_family_has_for_it(family):
    """Each probability of the library's configuration alone, except those of heads for other tasks."""
    theirs = {"head_dim": 128} | transformers.AutoConfig.for_model(family).to_dict()
    names = [name for name in theirs if "drop" in name and not name.startswith(("summary_", "classifier_"))]
    assert names
    without = theirs | dict.fromkeys(names, 0.0)
    assert not huggingface.shape_of(without).dropout
    for name in names:
        seen = huggingface.shape_of(without | {name: 0.1}).dropout
        assert seen if (family, name) != ("phi3", "embd_pdrop") else not seen, (
            name
        )  # which the library's module ignores
    left_to_the_default = {name: value for name, value in theirs.items() if name not in names}
    assert bool(huggingface.shape_of(left_to_the_default).dropout) == any(theirs[name] for name in names)


def test_an_answer_without_dropout_says_so(tmp_path):
    """A GPU's attention draws the mask itself, the CPU's stores it, which is not planned."""

    def answers(**options):
        given = {"config": str(tmp_path), "ranks": 2, "seq_len": 512, "gpu": "rtx4090", "device": "cpu"} | options
        return plan.answer(plan.Config(**LONG | given))

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gpt2"]))
    for options in ({}, {"find": "batch-size"}):
        assert ", this model's dropout" in answers(**options)
    assert ", this model's dropout" in answers(sweep=True)
    assert json.loads(answers(json=True))["not_modelled"] == ["dropout"]
    assert "its dropout" not in answers(device="cuda")
    none = PUBLISHED["gpt2"] | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    (tmp_path / "config.json").write_text(json.dumps(none))
    assert "its dropout" not in answers() and "model's dropout" not in answers()
    assert json.loads(answers(json=True))["not_modelled"] == []


def test_a_family_that_is_not_known_is_refused():
    with refused("model_type 'rwkv'"):
        huggingface.shape_of(GROUPED | {"model_type": "rwkv"})
    with refused("n_positions"):
        huggingface.shape_of({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100})


def test_a_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-0.6b"]))
    answer = plan.answer(plan.Config(**LONG, config=str(tmp_path), gpu="rtx4090", ranks=2, seq_len=2048))
    assert "596,049,920 parameters" in answer and "fits in 23.5 GiB of rtx4090" in answer
