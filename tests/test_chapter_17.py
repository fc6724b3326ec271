# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 17: its exercises judge fairly, its scripts have the traps they are said to have, its verdicts can fail."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import by_value
from labkit.running import launch, notebook_ranks
from labkit.teaching.exercises import chapter_17, check
from labkit.teaching.exercises.chapter_17 import BUDGET, EXERCISES, MIB, TRAPS, WORLD, _model
from labkit.training import hf_models
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

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


CUTS = {
    whole: f"the budget {BUDGET / MIB:.0f}: there is one unit, so all parameters are gathered at once",
    blocks: "each block is a unit; what else is large? The root stays gathered throughout the step",
    inside_blocks: "whose forward runs the decoder's blocks one by one?",
    no_root: "the model itself is not a unit",
    some_left: "model.embed_tokens.weight is in no unit",
    never_tied: "the tied weights of embedding and head are two",
    not_where_tied: "not all of the model is in a unit",
    as_a_group: ": right",
}


def each_alone(me, function, answers, *arguments):
    """Run what an exercise runs on ranks for each of some answers: starting ranks for each takes longer."""
    return [function(me, answer, *arguments) for answer in answers]


def on_ranks(function, answers, *arguments, ranks):
    """{answer: the results of all ranks}, as the exercise gets them."""
    work = by_value(each_alone), function, [by_value(answer) for answer in answers], *arguments
    here = launch.Cluster(launcher="local")
    results = notebook_ranks.on_ranks(*work, ranks=ranks, cluster=here, timeout=300)
    return dict(zip(answers, zip(*results, strict=True), strict=True))


@pytest.fixture(scope="module")
def cut(selected):
    return on_ranks(chapter_17._trained, selected(CUTS), ranks=WORLD)


@pytest.mark.long
@pytest.mark.parametrize("shard", CUTS, ids=lambda shard: shard.__name__)
def test_a_cut_is_told_what_is_wrong_with_it(shard, cut, capsys, monkeypatch):
    monkeypatch.setattr(chapter_17, "on_ranks", lambda *_, **__: cut[shard])
    check("17.0", shard)
    assert CUTS[shard] in capsys.readouterr().out


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
    check("17.3", answer)
    assert said in capsys.readouterr().out


def no_tables(model, folder):
    model.to_empty(device="cpu")
    model.tie_weights()
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(folder))


def tables_only(model, folder):
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tables(model)


def tables(model):
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def as_solved(model, folder):
    no_tables(model, folder)
    tables(model)


def separated(model, folder):
    as_solved(model, folder)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def nothing(model, folder):
    pass


def no_memory(model, folder):
    tables(model)


FILLS = {
    nothing: "not answered yet",
    no_memory: "has no memory",
    separated: "they are two weights now",
    no_tables: "model.rotary_emb.inv_freq does not have the value of from_pretrained; it is a buffer",
    tables_only: "it is a parameter",
    as_solved: ": right",
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory, selected):
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("untied", "tied")]
    for folder in folders:
        _model(tied=folder is folders[1]).bfloat16().save_pretrained(folder)
    return on_ranks(chapter_17._filled, selected(FILLS), folders, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_a_filled_model_is_compared_with_the_library(fill, filled, capsys, monkeypatch):
    monkeypatch.setattr(chapter_17, "on_ranks", lambda *_, **__: filled[fill])
    check("17.1", fill)
    assert FILLS[fill] in capsys.readouterr().out


def answered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, return_dict=False)


def all_of_it(tokenizer, messages):
    return answered(tokenizer, messages), answered(tokenizer, messages)


def without_its_end(tokenizer, messages):
    ids, labels = by_solution(tokenizer, messages)
    return ids, [-100 if token == tokenizer.eos_token_id else token for token in labels]


def last_answer(tokenizer, messages):
    ids = answered(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    return ids, [-100] * len(prompt) + ids[len(prompt) :]


def shifted(tokenizer, messages):
    ids, labels = by_solution(tokenizer, messages)
    return ids, labels[1:]


def by_solution(tokenizer, messages):
    names = {}
    exec(EXERCISES["17.2"].solution, names)
    return names["chat_labels"](tokenizer, messages)


@pytest.mark.parametrize(
    ("chat_labels", "said"),
    [
        (lambda tokenizer, messages: None, "not answered yet"),
        (answered, "the function must return two lists"),
        (lambda tokenizer, messages: ([1], [1]), "the ids are not those of apply_chat_template"),
        (all_of_it, "with 2 messages, the token at the end of '<|im_start|>' needs no label"),
        (without_its_end, "4.<|im_end|>' needs a label"),
        (last_answer, "assistant\\nP' needs a label"),
        (shifted, "there are 41 ids and 40 labels"),
        (by_solution, ": right"),
    ],
    ids=["nothing", "one list", "no ids", "all", "no end", "last", "shifted", "right"],
)
def test_labels_are_those_that_the_lab_trains_on(chat_labels, said, capsys):
    check("17.2", chat_labels)
    assert said in capsys.readouterr().out


def test_the_scripts_have_their_traps(tmp_path):
    """a: nothing is recomputed in eval mode; b: no module has that name; c: state_dict() lacks the buffers."""
    model = _model(tied=False)
    assert EXERCISES["17.3"].traps == {"a": "recompute", "b": "units", "c": "buffers"}
    model.save_pretrained(tmp_path)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path).training
    assert not any(type(module).__name__ == "LlamaBlock" for module in model.modules())
    assert dict(model.named_buffers()) and not set(dict(model.named_buffers())) & set(model.state_dict())


def failed(lines):
    return [line.split(": measured")[0].removeprefix("FAIL  ") for line in lines if line.startswith("FAIL")]


@pytest.mark.breaks
def test_a_model_sharded_elsewhere_and_weights_that_were_not_read_are_noticed():
    """Other units change no weight, and the weights no peak."""
    breaks = {'shard = yours_or_ours("17.0", shard)': "def shard(model, mesh):\n    fully_shard(model, mesh=mesh)"}
    breaks |= {'fill = yours_or_ours("17.1", fill)': (
        "def fill(model, folder):\n    model.to_empty(device='cpu')\n"
        "    [torch.nn.init.normal_(p, std=0.02) for p in model.parameters()]\n"
        "    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)"
    )}  # fmt: skip
    breaks |= {'"max_steps": 20': '"max_steps": 2', '("not sharded", "one line")': '("one line",)'}
    lines = run_broken("17", breaks, until="the highest peak, against the budget")
    assert sorted(failed(lines)) == sorted(
        [
            "shard, then cast: peak",
            "shard, then cast: all-gathered and reduce-scattered",
            "by hand: peak",
            "by hand: all-gathered and reduce-scattered",
            "by hand: tensors that are not those of from_pretrained",
            "largest difference of the losses, from those of the one line",
            "the highest peak, against the budget",
        ]
    )
