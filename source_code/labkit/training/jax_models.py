"""The transformer of labkit/training/models.py in JAX (flax nnx). The model is pure: it contains no parallelism.

All blocks are one block whose parameters have an additional first axis, the layers. A loop (``jax.lax.scan``) runs over
this axis, so that the compiler sees a single block. Names are those of PyTorch's modules; a linear layer's ``kernel`` is
the transposed weight, (in, out).
"""

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from planner.models.shapes import GPTShape

from labkit.training import models

STACK = "blocks"  # the part of the model whose leaves have a layer axis


def _identity(name, module):
    return module


class GPT(nnx.Module):
    """A decoder-only transformer. Input: token ids (batch, sequence). Output: logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: GPTShape, dtype=jnp.float32):
        self.shape, self.dtype, rngs = shape, dtype, nnx.Rngs(0)
        self.embedding = nnx.Embed(shape.vocab_size, shape.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(shape, dtype, rngs))(nnx.Rngs(0).fork(split=shape.num_hidden_layers))
        self.norm = _norm(shape, dtype, rngs)
        self.head = None if shape.tie_word_embeddings else _linear(shape.hidden_size, shape.vocab_size, dtype, rngs)

    def __call__(self, tokens, whole=_identity, recompute: bool = False):
        """Compute logits.

        Args:
            tokens: token ids, (batch, sequence).
            whole: called with (name, module) of each part of the model just before it runs; the returned module runs
                instead, for example with gathered parameters.
            recompute: checkpoint each block: save its input only, and recompute the rest in backward.
        """
        rotation = rotary(tokens.shape[1], self.shape, self.dtype)
        embedding = whole("embedding", self.embedding)
        x = embedding(tokens)
        block, layers = nnx.split(self.blocks)

        def one_block(x, layer):
            return whole(STACK, nnx.merge(block, layer))(x, rotation), None

        # Within a loop there is nothing that common-subexpression elimination could reuse, so it need not be prevented.
        one_block = jax.checkpoint(one_block, prevent_cse=False) if recompute else one_block
        x, _ = jax.lax.scan(one_block, x, layers)
        x = whole("norm", self.norm)(x)
        return embedding.attend(x) if self.shape.tie_word_embeddings else whole("head", self.head)(x)


class Block(nnx.Module):
    """Attention and a feed-forward network, each with a residual connection: (batch, sequence, hidden_size)."""

    def __init__(self, shape: GPTShape, dtype, rngs):
        self.attention_norm = _norm(shape, dtype, rngs)
        self.attention = Attention(shape, dtype, rngs)
        self.feed_forward_norm = _norm(shape, dtype, rngs)
        self.feed_forward = FeedForward(shape, dtype, rngs)

    def __call__(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nnx.Module):
    """Causal self-attention; each key and value head serves several query heads."""

    def __init__(self, shape: GPTShape, dtype, rngs):
        self.head_dim = shape.head_dim
        self.query = _linear(shape.hidden_size, shape.hidden_size, dtype, rngs)
        self.key = _linear(shape.hidden_size, shape.key_value_size, dtype, rngs)
        self.value = _linear(shape.hidden_size, shape.key_value_size, dtype, rngs)
        self.output = _linear(shape.hidden_size, shape.hidden_size, dtype, rngs)

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
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores), value)
        return self.output(mixed.reshape(batch, length, width))


class FeedForward(nnx.Module):
    """SwiGLU: one projection, passed through SiLU, gates another (arXiv:2002.05202)."""

    def __init__(self, shape: GPTShape, dtype, rngs):
        self.gate = _linear(shape.hidden_size, shape.intermediate_size, dtype, rngs)
        self.up = _linear(shape.hidden_size, shape.intermediate_size, dtype, rngs)
        self.down = _linear(shape.intermediate_size, shape.hidden_size, dtype, rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _linear(inputs: int, outputs: int, dtype, rngs):
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def _norm(shape: GPTShape, dtype, rngs):
    return nnx.RMSNorm(shape.hidden_size, epsilon=1e-5, dtype=dtype, param_dtype=dtype, rngs=rngs)


def rotary(length: int, shape: GPTShape, dtype):
    """Return PyTorch's ``models.rotary`` as JAX arrays, bitwise equal: cosines and sines, each (length, 1, head_dim)."""
    like = torch.empty(0, dtype=torch.float64 if dtype == jnp.float64 else torch.float32)
    return [jnp.asarray(table.numpy())[:, None] for table in models.rotary(length, shape.head_dim, like)]


def apply_rope(x, cos, sin):
    """Rotate each pair (x[i], x[i + head_dim/2]) of a head by the angle of its position.

    Args:
        x: (batch, length, heads, head_dim).
        cos, sin: as ``rotary`` returns them.
    """
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


# Parameters: a tree (``nnx.State``) of arrays, its leaves


def structure(shape: GPTShape, dtype=jnp.float32):
    """Return (graph definition, parameters as shapes) without allocating; ``nnx.merge`` of both is the model."""
    return nnx.split(nnx.eval_shape(lambda: GPT(shape, dtype)))


def names(tree) -> list[str]:
    """Return the names of a tree's leaves (blocks.attention.query.kernel), in the order of ``jax.tree.leaves``."""
    return [".".join(str(part) for part in path) for path, _ in nnx.to_flat_state(tree)]


def import_weights(model: models.GPT, shapes, shardings):
    """Convert the parameters of a PyTorch model on the CPU to sharded JAX arrays, one leaf at a time.

    Args:
        model: the PyTorch model.
        shapes: tree of shapes, as ``structure`` returns it.
        shardings: tree of JAX's shardings.
    """
    weights = dict(model.named_parameters())

    def leaf(name, shape, sharding):
        value = _stacked(weights, name) if name.startswith(f"{STACK}.") else _as_jax(weights, name)
        return jax.device_put(value.numpy().astype(shape.dtype), sharding)

    leaves = map(leaf, names(shapes), jax.tree.leaves(shapes), jax.tree.leaves(shardings))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _stacked(weights: dict, name: str) -> torch.Tensor:
    layers = {int(each.split(".")[1]) for each in weights if each.startswith(f"{STACK}.")}
    _, within = name.split(".", 1)
    return torch.stack([_as_jax(weights, f"{STACK}.{layer}.{within}") for layer in sorted(layers)])


def _as_jax(weights: dict, name: str) -> torch.Tensor:
    """Return PyTorch's weight for a JAX name (embedding.embedding, norm.scale, head.kernel), in JAX's layout."""
    module, _, kind = name.rpartition(".")
    weight = weights[f"{module}.weight"].detach()
    return weight.T if kind == "kernel" else weight
