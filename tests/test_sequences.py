# SPDX-License-Identifier: BSD-3-Clause
"""Sequences: each once in an epoch, the same for any number of ranks; losses are those of a loop with the plain library."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_tokenizer
import torch
import torch.nn.functional as F
from commands import refused
from labkit.training import corpus, data_files
from labkit.training.sequences import NO_TARGET, Sequences, best_fit, hold_out, load
from transformers import AutoModelForCausalLM, LlamaConfig

ME = SimpleNamespace(rank=0, local_rank=0, world_size=1, say=lambda *_: None)
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 340, "max_position_embeddings": 256}
WORDS = tiny_tokenizer.LINES


def made(lengths, kind=data_files.TEXT, answers=None, rows=None) -> corpus.Corpus:
    """A corpus of documents of these lengths, whose tokens are 0, 1, 2, …; each is a row, unless ``rows`` says otherwise."""
    rows = np.arange(len(lengths)) if rows is None else np.array(rows)
    tokens = np.arange(sum(lengths))
    answers = None if answers is None else np.array(answers, dtype=bool)
    return corpus.Corpus("made", kind, "", np.cumsum(lengths), rows, tokens, answers)


def batches(sequences, steps, accumulate=1, batch_size=1, ranks=1) -> list:
    """All ranks' batches of some steps: a list for each step, of one batch for each rank."""
    by_rank = [sequences.training_batches(steps, accumulate, batch_size, rank, ranks, "cpu") for rank in range(ranks)]
    return list(zip(*by_rank))


def targets(batch) -> list[int]:
    return batch.targets[batch.targets != NO_TARGET].tolist()


LENGTHS = [5, 1, 9, 30, 2, 7, 16, 17, 18, 3]
# Every token but the first of its document
LEARNT = [n for end, size in zip(np.cumsum(LENGTHS), LENGTHS) for n in range(end - size + 1, end)]


@pytest.mark.parametrize("packing", ["documents", "padding", "stream"])
def test_every_target_comes_once_in_an_epoch(packing):
    """Also where an epoch ends within a batch, and in another order in the next epoch."""
    sequences = Sequences(made(LENGTHS), None, 16, packing, seed=3)
    learnt = LEARNT if packing != "stream" else list(range(1, sum(LENGTHS)))
    order = sequences.chosen(0, 3 * len(sequences)).reshape(3, -1)
    assert [sorted(epoch) for epoch in order.tolist()] == [list(range(len(sequences)))] * 3
    assert len({tuple(epoch) for epoch in order.tolist()}) == 3
    found = [batch for (batch,) in batches(sequences, range(2 * len(sequences)), 3, 1)]
    assert sum(batch.tokens for batch in found) == 6 * len(learnt)
    assert sorted(itertools.chain(*map(targets, found))) == sorted(learnt * 6)
    for batch in found:
        predicted = batch.targets != NO_TARGET
        assert batch.tokens == predicted.sum() and (batch.targets - batch.inputs)[predicted].unique().tolist() == [1]


def test_positions_restart_with_each_document():
    begins = made(LENGTHS).documents[:, 0]
    for (batch,) in batches(Sequences(made(LENGTHS), None, 64, "documents", seed=3), range(4)):
        predicted, positions = batch.targets[0, 0] != NO_TARGET, batch.positions[0, 0]
        for token, position in zip(batch.inputs[0, 0][predicted].tolist(), positions[predicted].tolist()):
            assert position == token - begins[begins <= token].max()


@pytest.mark.parametrize("ranks, accumulate, batch_size", [(2, 3, 2), (4, 1, 3), (3, 2, 2), (1, 12, 1)])
def test_a_step_is_the_same_on_any_number_of_ranks(ranks, accumulate, batch_size):
    """A run that resumes on others continues with the very next sequence."""
    sequences = Sequences(made(LENGTHS), None, 16, "documents", seed=3)
    for alone, shared in zip(
        batches(sequences, range(5, 9), 1, 12), batches(sequences, range(5, 9), accumulate, batch_size, ranks)
    ):
        parts = torch.stack([batch.targets for batch in shared], 1)  # (accumulate, ranks, batch, seq_len)
        assert torch.equal(parts.reshape(alone[0].targets.shape), alone[0].targets)
        assert {batch.tokens for batch in shared} == {alone[0].tokens}
    later = batches(sequences, [8], accumulate, batch_size, ranks)[0]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(later, shared))  # without the steps before


def test_the_order_is_the_seeds():
    one, same, other = (
        Sequences(made(LENGTHS), None, 4, "padding", seed).chosen(0, 30).tolist() for seed in (3, 3, -4)
    )
    assert one == same != other


@pytest.mark.parametrize("capacity", [10, 100])
def test_best_fit_packs_tightly(capacity, seed):
    lengths = np.random.RandomState(seed).randint(1, capacity + 1, size=500)
    order, bounds = best_fit(lengths, capacity)
    assert sorted(order.tolist()) == list(range(500))
    filled = np.add.reduceat(lengths[order], bounds[:-1])
    assert filled.max() <= capacity and filled.sum() == lengths.sum()
    assert len(filled) <= 1.23 * np.ceil(lengths.sum() / capacity) + 1  # the bound of best-fit decreasing is 11/9


def test_long_conversations_are_truncated_and_counted():
    """One whose answers are all cut off is left out: a sequence without a target would be worth nothing."""
    answers = [0, 0, 1, 1] + [0] * 6 + [1] * 2 + [0] * 2 + [1] * 6
    sequences = Sequences(made([4, 8, 8], data_files.CHAT, answers), None, 5, None, seed=1)
    assert (sequences.packing, sequences.truncated, sequences.skipped) == ("documents", 2, 1)
    (batch,) = batches(sequences, [0], 1, len(sequences))[0]
    assert sorted(targets(batch)) == [2, 3, 14, 15, 16, 17]
    with refused("made", "--seq-len 5"):
        Sequences(made([8], data_files.CHAT, [0] * 7 + [1]), None, 5, None, seed=1)
    with refused("made", "--packing stream"):
        Sequences(made([8], data_files.CHAT, [1] * 8), None, 5, "stream", seed=1)


@pytest.mark.parametrize("kind", [data_files.TEXT, data_files.PLAIN])
@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_held_out_documents_are_never_trained_on(kind, packing):
    lengths = [7] * 40
    train, held_out = hold_out(made(lengths, kind), 0.2, seed=3)
    assert np.array_equal(hold_out(made(lengths, kind), 0.2, seed=3)[1], held_out)
    both = np.concatenate([train, held_out])
    assert sorted(itertools.chain(*(range(*each) for each in both))) == list(range(280))
    sequences = Sequences(made(lengths, kind), train, 8, packing, seed=3)
    seen = set(itertools.chain(*(targets(batch) for (batch,) in batches(sequences, range(len(sequences))))))
    assert not seen & set(itertools.chain(*(range(*each) for each in held_out)))
    assert sum(end - begin for begin, end in held_out) == pytest.approx(56, abs=16)
    if kind == data_files.TEXT:
        with refused("--validation"):
            hold_out(made([7] * 4), 0.05, seed=3)


def test_a_conversation_that_is_several_documents_is_held_out_whole():
    rows = [0, 0, 0, 1, 2, 2, 3, 3, 3, 4]
    data = made([7] * 10, data_files.CHAT, [1] * 70, rows)
    sides = hold_out(data, 0.4, seed=3)
    of_sides = [{rows[begin // 7] for begin, _ in side} for side in sides]
    assert [len(each) for each in of_sides] == [3, 2] and not of_sides[0] & of_sides[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_batches_are_all_sequences_once(ranks):
    sequences = Sequences(made(LENGTHS), None, 16, "documents", seed=3)
    by_rank = [list(sequences.validation_batches(2, rank, ranks, "cpu")) for rank in range(ranks)]
    assert len({len(found) for found in by_rank}) == 1  # collectives match
    found = list(itertools.chain(*by_rank))
    assert sorted(itertools.chain(*map(targets, found))) == LEARNT
    assert {batch.tokens for batch in found} == {len(LEARNT)} and {batch.inputs.shape for batch in found} == {
        (1, 2, 16)
    }


def test_validation_data_are_a_file_or_a_share(tmp_path, monkeypatch):
    """What --data and --validation name, without a row in both."""
    monkeypatch.setenv("FSDP_LABS_DATA", str(tmp_path / "data"))
    for name, letters in {"train": "abcdefghij", "other": "xyz"}.items():
        rows = [json.dumps({"text": letter * 9}) for letter in letters]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    chosen = {"model": None, "tokens": None, "seq_len": 8, "packing": "padding", "seed": 3}
    chosen |= {"data": str(tmp_path / "train.jsonl"), "validation": None, "validation_share": None}

    def letters(**changes) -> list[str | None]:
        found = load(SimpleNamespace(**chosen | changes), 256, ME)
        return [
            each and "".join(sorted({chr(n) for b in each.validation_batches(1, 0, 1, "cpu") for n in targets(b)}))
            for each in found
        ]

    assert letters() == ["abcdefghij", None]
    assert letters(validation=str(tmp_path / "other.jsonl")) == ["abcdefghij", "xyz"]
    train, held_out = letters(validation="0.2", validation_share=0.2)
    assert len(held_out) == 2 and sorted(train + held_out) == list("abcdefghij")


# Losses


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).double()


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """(a tokenizer, conversations, their corpus)."""
    monkeypatch.setenv("FSDP_LABS_DATA", str(tmp_path / "data"))
    tokenizer = tiny_tokenizer.save(tmp_path / "model", tiny_tokenizer.MARKED)
    draw = np.random.RandomState(1)
    talks = [
        [
            {"role": role, "content": " ".join(draw.choice(WORDS, draw.randint(1, 3)))}
            for role in ["user", "assistant"] * draw.randint(1, 4)
        ]
        for _ in range(20)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return tokenizer, talks, corpus.load(str(tmp_path / "chat.jsonl"), str(tmp_path / "model"), 340, ME)


def step_loss(model, batches, restart=True) -> torch.Tensor:
    """The loss of a step, as the lab computes it: the sum over micro-batches and ranks, divided by the step's tokens."""
    total = 0
    for batch in batches:
        for micro, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets)):
            positions = {"position_ids": batch.positions[micro]} if restart and batch.positions is not None else {}
            logits = model(input_ids=inputs, use_cache=False, **positions).logits
            summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=NO_TARGET)
            total = total + summed / batch.tokens
    return total


@pytest.mark.parametrize("packing", ["documents", "padding"])
def test_the_loss_on_answers_is_a_plain_loops(packing, model, chat):
    """Forward and gradient: each conversation alone, with the library's mask of its answers."""
    tokenizer, talks, found = chat
    total, count = 0, 0
    for talk in talks:
        encoded = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        inputs, mask = torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["assistant_masks"]])
        labels = inputs.masked_fill(mask == 0, -100)
        logits = model(input_ids=inputs).logits  # without labels, whose loss the library computes in fp32
        total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        count += int((labels[:, 1:] != -100).sum())
    expected = total / count
    sequences = Sequences(found, None, 250, packing, seed=1)
    assert sequences.truncated == 0 and (packing == "padding" or len(sequences) < len(talks))
    (step,) = batches(sequences, [0], len(sequences), 1, ranks=2)  # two epochs, so each sequence twice
    loss = step_loss(model, step)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    weights = list(model.parameters())
    for ours, reference in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights)):
        assert torch.allclose(ours, reference, rtol=0, atol=1e-13)


def test_packed_documents_are_separate_documents(model, chat):
    """And are not where positions do not restart: the mask between documents is made from them."""
    _, _, found = chat
    apart, packed = (Sequences(found, None, 250, packing, seed=1) for packing in ("padding", "documents"))
    expected = step_loss(model, batches(apart, [0], len(apart), 1)[0]).item()
    step = batches(packed, [0], 1, len(packed))[0]
    assert len(packed) < len(apart)
    assert step_loss(model, step).item() == pytest.approx(expected, rel=1e-12)
    assert abs(step_loss(model, step, restart=False).item() - expected) > 1e-6 * expected
