# SPDX-License-Identifier: BSD-3-Clause
"""hf_fsdp.py trains on conversations as a loop of the plain library does, on any number of ranks, and goes on where it was."""

import json
import sys

import cloudpickle
import hf_fsdp
import pytest
import torch
from labkit import UserError
from labkit.measuring import meters
from labkit.running import launch, notebook_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

HERE = launch.Cluster(launcher="local")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
WORDS = "<s> </s> user: assistant: one two three four five six seven eight nine ten is more than less and".split()
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}{{ ' </s> ' }}"
    "{% else %}{{ ' ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
OPTIONS = {"device": "cpu", "precision": "fp64", "seq_len": 24, "batch_size": 1, "lr": 1e-2}
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of words and a chat template, and conversations of several lengths."""
    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    with open(path / "chat.jsonl", "w") as file:
        for n in range(12):
            question = {"role": "user", "content": " ".join(WORDS[4 + n % 10 : 6 + n % 10] + ["and"] * (n % 3))}
            answer = {"role": "assistant", "content": " ".join(WORDS[8 : 9 + n % 5])}
            more = [question, {"role": "assistant", "content": "less"}] if n % 2 else []
            file.write(json.dumps({"messages": [question, answer, *more]}) + "\n")
    return path


VALIDATED = {"validation": "0.25", "validate_every": 1}
RUNS = {  # on two ranks; "begun" is resumed on one
    "answers": {"accumulate": 2, "packing": "padding", "max_steps": 3},
    "in chunks": {"accumulate": 2, "packing": "padding", "max_steps": 3, "loss_chunks": 2},
    "whole": VALIDATED | {"epochs": 4.0},
    "begun": VALIDATED | {"max_steps": 2, "checkpoint": "CHECKPOINT"},
}


def train(me, folder, options):
    """(losses, validation losses by step) of a run."""
    options = {name: f"{folder}/c" if value == "CHECKPOINT" else value for name, value in options.items()}
    config = hf_fsdp.Config(model=folder, data=f"{folder}/chat.jsonl", **(OPTIONS | options))
    record = hf_fsdp.train(config, me)
    return record["losses"], record["validation_losses"]


def _trained(me, folder):
    meters.TRACED_STEPS = range(0)  # tracing takes long
    return {name: train(me, folder, options) for name, options in RUNS.items()}


@pytest.fixture(scope="module")
def on_two(folder):
    return notebook_ranks.on_ranks(_trained, str(folder), ranks=2, cluster=HERE, timeout=120)[0]


def reference(folder, steps, per_step):
    """The losses of a loop with the plain library: one conversation at a time, answers alone, in the lab's order."""
    from labkit.running.ranks import Rank
    from labkit.training import corpus, sequences

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"])
    chats = [json.loads(line)["messages"] for line in open(folder / "chat.jsonl")]
    me = Rank(0, 0, 1, "here", torch.device("cpu"), "gloo")
    data = corpus.load(f"{folder}/chat.jsonl", str(folder), 64, me)
    order = sequences.Sequences(data, None, OPTIONS["seq_len"], "padding", 1)
    begins = data.documents[:, 0].tolist()
    losses = []
    for step in range(steps):
        total, count = 0.0, 0
        for place in order.chosen(step * per_step, per_step):
            messages = chats[begins.index(order.begins[place])]
            ids, labels = [], []
            for n, message in enumerate(messages):  # each answer is what the template adds after its prompt
                if message["role"] != "assistant":
                    continue
                prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
                all_so_far = tokenizer.apply_chat_template(messages[: n + 1], return_dict=False)
                labels += [-100] * (len(prompt) - len(ids)) + all_so_far[len(prompt) :]
                ids = all_so_far
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            wanted = torch.tensor(labels)[1:]
            total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
            count += int((wanted != -100).sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


@pytest.mark.long
def test_losses_on_answers_are_those_of_a_plain_loop(folder, on_two):
    alone = reference(folder, 3, 4)
    assert on_two["answers"][0] == pytest.approx(alone, rel=0, abs=1e-9)
    assert on_two["in chunks"][0] == pytest.approx(alone, rel=0, abs=1e-9)
    assert alone[-1] < alone[0]


@pytest.mark.long
def test_an_epoch_is_the_same_on_any_ranks_and_goes_on_elsewhere(folder, on_two, world_of_one):
    (whole, validated), (begun, first) = on_two["whole"], on_two["begun"]
    assert len(whole) >= 4 and len(validated) == len(whole) and len(begun) == 2
    goes_on = {"resume": True, "max_steps": len(whole), "batch_size": 2, "strategy": "single"}
    resumed, second = train(world_of_one, str(folder), RUNS["begun"] | goes_on)
    assert begun + resumed == pytest.approx(whole, rel=0, abs=1e-9)
    assert {**first, **second} == pytest.approx(validated, rel=0, abs=1e-9)


def test_a_model_that_sees_what_it_predicts_is_refused(tmp_path, world_of_one):
    bert = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 256,
    }
    AutoConfig.for_model("bert", **bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="bert sees the tokens that it shall predict"):
        hf_fsdp.train(hf_fsdp.Config(config=str(tmp_path), strategy="single", device="cpu", seq_len=16), world_of_one)


def test_a_model_that_mixes_documents_is_refused(tmp_path, world_of_one):
    AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    config = hf_fsdp.Config(config=str(tmp_path), strategy="single", device="cpu", seq_len=16, packing="documents")
    with pytest.raises(UserError, match="mamba mixes the documents of a sequence: give --packing padding"):
        hf_fsdp.train(config, world_of_one)
