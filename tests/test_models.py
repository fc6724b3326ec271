"""The GPT is what its description says: sizes, causality, positions, and weights that start the same anywhere."""

import pytest
import torch
import torch.nn.functional as F
from labkit.training.models import GPT, apply_rope, rotary
from planner.shapes import GPT_SHAPES, GPTShape

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
    x = torch.randn(2, 6, TINY.width, dtype=torch.float64)
    rotation = rotary(6, attention.head_width, x)
    group = TINY.heads // TINY.kv_heads
    heads = []
    for head in range(TINY.heads):
        q = attention.query(x).unflatten(-1, (TINY.heads, -1))[:, :, head]
        k, v = (
            layer(x).unflatten(-1, (TINY.kv_heads, -1))[:, :, head // group]
            for layer in (attention.key, attention.value)
        )
        scores = apply_rope(q, *rotation) @ apply_rope(k, *rotation).mT / attention.head_width**0.5
        heads.append(scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1) @ v)
    assert torch.allclose(attention(x, rotation), attention.output(torch.cat(heads, -1)), rtol=1e-9)


def test_tied_head_is_the_embedding():
    tied = GPT(GPTShape(layers=1, width=32, heads=2, kv_heads=1, hidden=48, tied=True))
    assert tied.head.weight is tied.embedding.weight
    assert sum(1 for name, _ in tied.named_parameters() if name in ("head.weight", "embedding.weight")) == 1


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
