# SPDX-License-Identifier: BSD-3-Clause
"""The transformer of labkit/training/models.py in JAX (flax nnx). The model is pure: it contains no parallelism.

All blocks are one block whose parameters have an additional first axis, the layers. A loop (``jax.lax.scan``) runs over
this axis, so that the compiler sees a single block. Names are those of PyTorch's modules; a linear layer's ``kernel`` is
the transposed weight, (in, out).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from planner.models.shapes import GPTShape

from labkit.training import models

STACK = "blocks"  # the part of the model whose leaves have a layer axis


class Hooks(NamedTuple):
    """What a strategy changes in the model's forward, as FSDP2's hooks do; by default nothing.

    Attributes:
        gather: called with (name, module) of each part of the model just before it runs; the returned module runs
            instead, for example with gathered parameters.
        edge: called with the activations between parts; its result is used instead.
        remat: called with the function of one block; its result runs in the loop over layers.
        looked_up: sharding of the embedding's output; an Explicit mesh requires it.
    """

    gather: Callable = lambda name, module: module
    edge: Callable = lambda x: x
    remat: Callable = lambda block: block
    looked_up: object = None


NONE = Hooks()


class GPT(nnx.Module):
    """A decoder-only transformer. Input: token ids (batch, sequence). Output: logits (batch, sequence, vocabulary).

    dtype is that of the computation, param_dtype that of the parameters.
    """

    def __init__(self, shape: GPTShape, dtype=jnp.float32, param_dtype=jnp.float32):
        self.shape, self.dtype, kinds = shape, dtype, {"dtype": dtype, "param_dtype": param_dtype}
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(shape.vocab_size, shape.hidden_size, rngs=rngs, **kinds)
        self.blocks = nnx.vmap(lambda rngs: Block(shape, kinds, rngs))(nnx.Rngs(0).fork(split=shape.num_hidden_layers))
        self.norm = _norm(shape, kinds, rngs)
        self.head = None if shape.tie_word_embeddings else _linear(shape.hidden_size, shape.vocab_size, kinds, rngs)

    def __call__(self, tokens, hooks: Hooks = NONE):
        """Compute logits of token ids, (batch, sequence)."""
        rotation = rotary(tokens.shape[1], self.shape, self.dtype)
        embedding = hooks.gather("embedding", self.embedding)
        x = hooks.edge(embedding(tokens, out_sharding=hooks.looked_up))
        block, layers = nnx.split(self.blocks)

        def one_block(x, layer):
            return hooks.edge(hooks.gather(STACK, nnx.merge(block, layer))(hooks.edge(x), rotation)), None

        x, _ = jax.lax.scan(hooks.remat(one_block), x, layers)
        x = hooks.gather("norm", self.norm)(x)
        logits = embedding.attend(x) if self.shape.tie_word_embeddings else hooks.gather("head", self.head)(x)
        return hooks.edge(logits)


class Block(nnx.Module):
    """Attention and a feed-forward network, each with a residual connection: (batch, sequence, hidden_size)."""

    def __init__(self, shape: GPTShape, kinds: dict, rngs):
        self.attention_norm = _norm(shape, kinds, rngs)
        self.attention = Attention(shape, kinds, rngs)
        self.feed_forward_norm = _norm(shape, kinds, rngs)
        self.feed_forward = FeedForward(shape, kinds, rngs)

    def __call__(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nnx.Module):
    """Causal self-attention; each key and value head serves several query heads."""

    def __init__(self, shape: GPTShape, kinds: dict, rngs):
        self.head_dim = shape.head_dim
        self.query = _linear(shape.hidden_size, shape.hidden_size, kinds, rngs)
        self.key = _linear(shape.hidden_size, shape.key_value_size, kinds, rngs)
        self.value = _linear(shape.hidden_size, shape.key_value_size, kinds, rngs)
        self.output = _linear(shape.hidden_size, shape.hidden_size, kinds, rngs)

    def __call__(self, x, rotation):
        batch, length, width = x.shape
        query, key, value = (
            layer(x).reshape(batch, length, -1, self.head_dim) for layer in (self.query, self.key, self.value)
        )
        query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
        # jax.nn.dot_product_attention would work, but its softmax is always in fp32, even for fp64 inputs.
        query = query.reshape(batch, length, key.shape[2], -1, self.head_dim)  # grouped by key head
        scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key) / self.head_dim**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        shares = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))  # as PyTorch's in bf16
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", shares.astype(value.dtype), value)
        return self.output(mixed.reshape(batch, length, width))


class FeedForward(nnx.Module):
    """SwiGLU: one projection, passed through SiLU, gates another (arXiv:2002.05202)."""

    def __init__(self, shape: GPTShape, kinds: dict, rngs):
        self.gate = _linear(shape.hidden_size, shape.intermediate_size, kinds, rngs)
        self.up = _linear(shape.hidden_size, shape.intermediate_size, kinds, rngs)
        self.down = _linear(shape.intermediate_size, shape.hidden_size, kinds, rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _linear(inputs: int, outputs: int, kinds: dict, rngs):
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, **kinds)


def _norm(shape: GPTShape, kinds: dict, rngs):
    return nnx.RMSNorm(shape.hidden_size, epsilon=1e-5, rngs=rngs, **kinds)


def rotary(length: int, shape: GPTShape, dtype):
    """Return PyTorch's ``models.rotary`` as JAX arrays, bitwise equal: cosines and sines, each (length, 1, head_dim)."""
    like = torch.empty(0, dtype=torch.float64 if dtype == jnp.float64 else torch.float32)  # NumPy has no bf16
    return [jnp.asarray(table.numpy(), dtype)[:, None] for table in models.rotary(length, shape.head_dim, like)]


def apply_rope(x, cos, sin):
    """Rotate each pair (x[i], x[i + head_dim/2]) of a head by the angle of its position.

    Args:
        x: (batch, length, heads, head_dim).
        cos, sin: as ``rotary`` returns them.
    """
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


# Parameters: a tree (``nnx.State``) of arrays, its leaves


def structure(shape: GPTShape, dtype=jnp.float32, param_dtype=jnp.float32):
    """Return (graph definition, parameters as shapes) without allocating; ``nnx.merge`` of both is the model."""
    return nnx.split(nnx.eval_shape(lambda: GPT(shape, dtype, param_dtype)))


def names(tree) -> list[str]:
    """Return the names of a tree's leaves (blocks.attention.query.kernel), in the order of ``jax.tree.leaves``."""
    return [".".join(str(part) for part in path) for path, _ in nnx.to_flat_state(tree)]


def initial_weights(shape: GPTShape, seed: int) -> dict:
    """Return gpt_fsdp.py's initial weights, {name in PyTorch: tensor}, in CPU memory."""
    with torch.device("meta"):
        model = models.GPT(shape)
    model.to_empty(device="cpu")
    model.tie()
    models.init_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def import_weights(weights: dict, shapes, shardings):
    """Make sharded JAX arrays of PyTorch's weights; each device reads only its own part.

    Args:
        weights: {name in PyTorch: a tensor, or safetensors' slice of a file}, whose elements are read by index.
        shapes: tree of shapes, as ``structure`` returns it.
        shardings: tree of JAX's shardings.
    """

    def leaf(name, shape, sharding):
        def part(index):
            return _part(weights, name, index).astype(shape.dtype)

        return jax.make_array_from_callback(shape.shape, sharding, part)

    leaves = map(leaf, names(shapes), jax.tree.leaves(shapes), jax.tree.leaves(shardings))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _part(weights: dict, name: str, index: tuple):
    """Return a part of a leaf as a NumPy array. index: a slice for each of the leaf's dimensions."""
    if not name.startswith(f"{STACK}."):
        return _read(weights, name, index)
    _, within = name.split(".", 1)
    layers = range(sum(each.startswith(f"{STACK}.") and each.endswith(".attention_norm.weight") for each in weights))
    return np.stack([_read(weights, f"{STACK}.{layer}.{within}", index[1:]) for layer in layers[index[0]]])


def _read(weights: dict, name: str, index: tuple):
    """Return a part of PyTorch's weight for a JAX name (embedding.embedding, norm.scale, head.kernel), in JAX's layout."""
    weight, transposed = weights[in_pytorch(name)], name.endswith(".kernel")
    part = weight[index[::-1] if transposed else index]
    part = part.to(torch.promote_types(part.dtype, torch.float32)).numpy()  # NumPy has no bf16
    return part.T if transposed else part


def in_pytorch(name: str) -> str:
    """Return PyTorch's name of a leaf, or of one layer's part of it."""
    return f"{name.rpartition('.')[0]}.weight"


def in_files(shapes) -> dict[str, tuple[int, ...]]:
    """Return {name in PyTorch: its dimensions there} of all tensors of a model.

    shapes: tree of shapes, as ``structure`` returns it.
    """
    found = {}
    for name, leaf in zip(names(shapes), jax.tree.leaves(shapes), strict=True):
        stacked, dims = name.startswith(f"{STACK}."), tuple(leaf.shape)
        _, _, within = name.partition(".")
        each = [f"{STACK}.{layer}.{within}" for layer in range(dims[0])] if stacked else [name]
        dims = dims[1:] if stacked else dims
        found |= {in_pytorch(one): dims[::-1] if name.endswith(".kernel") else dims for one in each}
    return found
