# SPDX-License-Identifier: BSD-3-Clause
"""The GPT is what its description says: sizes, causality, positions, and weights that start the same anywhere."""

import gpt_fsdp
import pytest
import torch
import torch.nn.functional as F
from labkit.training.models import GPT, apply_rope, rotary
from planner.models.shapes import GPT_SHAPES, GPTShape
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TINY = GPT_SHAPES["tiny"]


@pytest.mark.parametrize(
    # As published with the models: 8.03, 70.6 and 405.9 billion, 1.24 billion with a tied head
    ("name", "parameters"),
    [
        ("1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_published_shapes_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        model = GPT(GPT_SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_no_position_sees_a_later_one():
    torch.manual_seed(0)
    model = GPT(TINY).double()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] += 1
    before, after = model(tokens), model(changed % 256)
    assert before.shape == (2, 12, 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_rotary_positions_depend_on_the_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    rotation = rotary(10, 16, query)
    queries, keys = (apply_rope(x.expand(10, 16), *rotation) for x in (query, key))
    products = queries @ keys.T
    for distance in range(-9, 10):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-6)
    assert not torch.allclose(products[0, 0], products[0, 1])


def test_grouped_queries_share_keys_and_values():
    torch.manual_seed(0)
    attention = GPT(TINY).double().blocks[0].attention
    x = torch.randn(2, 6, TINY.hidden_size, dtype=torch.float64)
    rotation = rotary(6, attention.head_dim, x)
    group = TINY.num_attention_heads // TINY.num_key_value_heads
    heads = []
    for head in range(TINY.num_attention_heads):
        q = attention.query(x).unflatten(-1, (TINY.num_attention_heads, -1))[:, :, head]
        k, v = (
            layer(x).unflatten(-1, (TINY.num_key_value_heads, -1))[:, :, head // group]
            for layer in (attention.key, attention.value)
        )
        scores = apply_rope(q, *rotation) @ apply_rope(k, *rotation).mT / attention.head_dim**0.5
        heads.append(scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1) @ v)
    assert torch.allclose(attention(x, rotation), attention.output(torch.cat(heads, -1)), rtol=1e-9)


def test_tied_head_is_the_embedding():
    tied = GPT(
        GPTShape(
            num_hidden_layers=1,
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=48,
            tie_word_embeddings=True,
        )
    )
    assert tied.head.weight is tied.embedding.weight
    assert sum(1 for name, _ in tied.named_parameters() if name in ("head.weight", "embedding.weight")) == 1


class Seen(TorchDispatchMode):
    """Notes how wide each matrix product's result is, and how many numbers the largest tensor has."""

    def __enter__(self):
        self.products, self.largest = [], 0
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator == torch.ops.aten.mm.default:
            self.products.append(result.shape[1])
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("alternate", 3), ("full", 6)])
@pytest.mark.parametrize("every", [1, 3])
def test_products_that_are_computed_again(recompute, again, every):
    """Of a block's seven "alternate" keeps query, value, gate and down; full stops before down, whose result nobody needs."""
    if recompute == "none" and every > 1:
        return
    model = GPT(TINY)
    config = gpt_fsdp.Config(recompute=recompute, recompute_every=every)
    for number, block in enumerate(model.blocks):
        gpt_fsdp.change_forward(block, config, number)
    with Seen() as seen:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    blocks = 4 if every == 1 else 2  # the first, and the fourth
    assert len(seen.products) == 3 * (4 * 7 + 1) + blocks * again


def test_alternate_keeps_the_first_product_and_the_third():
    """So backward begins, after the head's two, with those of the last block that are gone: of key, output and up."""
    model = GPT(TINY)
    for block in model.blocks:
        gpt_fsdp.change_forward(block, gpt_fsdp.Config(recompute="alternate"))
    with Seen() as seen:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert seen.products[4 * 7 + 1 :][2:5] == [TINY.key_value_size, TINY.hidden_size, TINY.intermediate_size]


@pytest.mark.parametrize("chunks", [2, 5, 100])
def test_a_loss_in_chunks_is_the_loss(chunks):
    """So are its gradients, to the last digits; and no tensor is as large as the logits."""
    shape = GPTShape(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        vocab_size=400,
    )
    model, (tokens, targets) = GPT(shape).double(), torch.randint(400, (2, 3, 11))
    whole = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    (whole / 3).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Seen() as seen:
        parts = model(tokens, targets, chunks)
        (parts / 3).backward()
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-15)
    assert seen.largest == max(400 * 16, -(-33 // chunks) * 400) < 33 * 400  # the head's weight, or a chunk's logits
    with torch.no_grad(), Seen() as seen:
        assert model(tokens, targets, chunks).item() == pytest.approx(whole.item(), rel=1e-12)
    assert len(seen.products) == 7 + min(chunks, 33)  # in validation nothing but the loss is computed


def test_weights_made_on_the_meta_device_start_the_same():
    here = GPT(TINY)
    with torch.device("meta"):
        later = GPT(TINY)
    later.to_empty(device="cpu")
    for model in (here, later):
        torch.manual_seed(3)
        model.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), later.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in later.parameters())


def test_it_learns():
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(b"to be or not to be, that is the question " * 4))[None]
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), rel=0.05)  # nothing known yet
    assert losses[-1] < losses[0] / 2
