# SPDX-License-Identifier: BSD-3-Clause
"""The models of the course. They are pure: they contain no parallelism."""

import hashlib

import torch
import torch.nn.functional as F
from planner.models.shapes import GPTShape
from torch import nn

from labkit.training.chunked_loss import chunked_loss
from labkit.training.experts import Experts, MixtureOfExperts, Router


class Net(nn.Module):
    """The MNIST network: two convolutions, two linear layers, 1,199,882 parameters.

    ``fc1`` has 1,179,776 of them (98.3 %), which makes this small network a good example for sharding: there is one layer
    that is worth sharding, and it is easy to see which.

    Input: float images of shape (batch, 1, 28, 28). Output: log-probabilities of shape (batch, 10).
    """

    def __init__(self, dropout: bool = True):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)  # 28×28 → 26×26
        self.conv2 = nn.Conv2d(32, 64, 3)  # 26×26 → 24×24
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        """Return log-probabilities (batch, 10) of images (batch, 1, 28, 28)."""
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)  # 24×24 → 12×12
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


# The operators of attention, depending on device, dtype, and PyTorch's version
ATTENTION_OPERATORS = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class GPT(nn.Module):
    """A decoder-only transformer like Llama 3: pre-norm, rotary embeddings, grouped-query attention, SwiGLU.

    Input: token ids of shape (batch, sequence). Output: logits of shape (batch, sequence, vocabulary). With targets, which
    have the input's shape, the output is their mean cross-entropy: see ``Head``.

    Attributes:
        positions: positions(tokens, device=…) → the positions of so many tokens; by default they are a whole sequence.
    """

    positions = staticmethod(torch.arange)

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.head = Head(shape.hidden_size, shape.vocab_size, bias=False)
        self.tie()
        self.reset_parameters()

    def tie(self):
        """Share one parameter between embedding and head if the shape has tied embeddings.

        Repeat this after ``to_empty``, which gives every module its own parameter.
        """
        if self.shape.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def reset_parameters(self):
        """Draw every weight from N(0, 0.02²), and set the norms to one."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Experts):
                for parameter in module.parameters():
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets=None, chunks: int = 1):
        """Compute logits, or the loss.

        Args:
            tokens: token ids, (batch, sequence).
            targets: int64, (batch, sequence); None: return logits.
            chunks: number of chunks of tokens in which to compute the loss.

        Returns:
            Logits (batch, sequence, vocabulary), or the mean cross-entropy in nats per token, a scalar.
        """
        x = self.embedding(tokens)
        rotation = rotary(tokens.shape[1], self.shape.head_dim, x, self.positions(tokens.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x), targets, chunks)


class Head(nn.Linear):
    """Compute logits from hidden states; with targets, their mean cross-entropy, in ``chunks`` chunks of tokens.

    The loss is computed inside this module, where FSDP has gathered the weight.
    """

    def forward(self, x, targets=None, chunks: int = 1):
        """Return logits or the loss of x (batch, sequence, hidden_size): see ``GPT.forward``."""
        return super().forward(x) if targets is None else chunked_loss(x, self.weight, targets, chunks)


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.feed_forward = FeedForward(shape) if shape.experts is None else mixture(shape)

    def forward(self, x, rotation):
        """Return the block's output, of x's shape.

        Args:
            x: (batch, sequence, hidden_size).
            rotation: (cos, sin), as ``rotary`` returns them.
        """
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


def causal_attention(query, key, value):
    """Return softmax(query · keyᵀ) · value, causally: as query, (batch, heads, sequence, head_dim)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves several query heads.

    Attributes:
        attend: attend(query, key, value) → their attention, see ``causal_attention``.
    """

    attend = staticmethod(causal_attention)

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.key = nn.Linear(shape.hidden_size, shape.key_value_size, bias=False)
        self.value = nn.Linear(shape.hidden_size, shape.key_value_size, bias=False)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x, rotation):
        """Return attention's output, of x's shape. Arguments: see ``Block.forward``."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
        mixed = self.attend(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection, passed through SiLU, gates another (arXiv:2002.05202)."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(shape: GPTShape) -> MixtureOfExperts:
    """Return a mixture of experts for a block, each as large as the feed-forward network that it replaces."""
    shared = FeedForward(shape) if shape.experts.shared_size else None
    return MixtureOfExperts(shape.hidden_size, shape.experts, shared)


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trainable low-rank adapter, LoRA (arXiv:2106.09685): x Wᵀ + (x downᵀ) upᵀ.

    ``up`` starts at zero, so that the layer initially computes exactly what the frozen layer does.
    """

    def __init__(self, layer: nn.Linear, rank: int):
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        super().__init__(layer.in_features, layer.out_features, bias=False, **like)
        self.weight = layer.weight
        self.down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        self.up = nn.Parameter(torch.empty(layer.out_features, rank, **like))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(model: GPT, rank: int):
    """Freeze a GPT, and add a LoRA adapter of that rank to the query and value projections of each block.

    The frozen parameters keep their names. The adapters are not initialized: see ``init_weights``.
    """
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attention, name, LoRALinear(getattr(block.attention, name), rank))


DRAWN_AT_ONCE = 2**16  # elements of a matrix that one generator draws, in whole rows: some hundreds of kilobytes


def whole_parameter(parameter):
    """Return an unsharded parameter and, for each dimension, all of its indices."""
    return parameter, [torch.arange(size) for size in parameter.shape]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, part_of=whole_parameter):
    """Initialize the parameters of a model, or this rank's shards of them.

    Each element is a function of the seed, the parameter's name, and its position in the unsharded parameter: the same
    for every strategy, number of ranks, and device. A rank draws only the blocks of rows that its shard overlaps, one at a
    time. The time is therefore proportional to the shard, and the model need not fit on one rank.

    Args:
        model: contains only modules of this file and of experts.py. Parameters of any other kind are left as they are.
        seed: any integer.
        part_of: maps a parameter to the tensor to fill and, for each dimension, the indices that this tensor holds of
            the unsharded parameter (a 1-D integer tensor on the CPU).
    """
    filled = set()
    for module_name, module in model.named_modules():
        if isinstance(module, Router) and module.bias_for_choice is not None:
            module.bias_for_choice.zero_()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:  # tied
                continue
            filled.add(parameter)
            part, indices = part_of(parameter)
            if isinstance(module, nn.RMSNorm):
                part.fill_(1)
            elif isinstance(module, LoRALinear) and name == "up":
                part.fill_(0)
            elif isinstance(module, Experts):
                for expert, matrix in zip(indices[0].tolist(), part, strict=True):
                    _draw(matrix, *indices[1:], parameter.shape[1:], f"{seed} {module_name}.{name} {expert}")
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                _draw(part, *indices, parameter.shape, f"{seed} {module_name}.{name}")


def _draw(part, rows, columns, shape, key: str):
    """Fill ``part``, these rows and columns of a matrix of that shape, from N(0, 0.02²). key: names the matrix."""
    per_block = max(1, DRAWN_AT_ONCE // shape[1])
    blocks, counts = torch.unique_consecutive(rows // per_block, return_counts=True)
    pieces = zip(blocks.tolist(), rows.split(counts.tolist()), part.split(counts.tolist()), strict=True)
    for block, mine, piece in pieces:
        first = block * per_block
        # A hash, because the CPU's generator uses 32 bits of a seed, and consecutive seeds could collide between matrices.
        mixed = hashlib.sha256(f"{key} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:4]))
        values = torch.empty(min(per_block, shape[0] - first), shape[1]).normal_(std=0.02, generator=generator)
        piece.copy_(values[mine - first].index_select(1, columns))


def rotary(length: int, width: int, like, positions=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of rotary position embedding (RoPE, arXiv:2104.09864).

    Args:
        length: number of positions.
        width: head_dim.
        like: a tensor with the device and the dtype of the result.
        positions: (length,); None: 0 to length − 1.

    Returns:
        (cos, sin), each (length, head_dim).
    """
    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device=like.device) / width)  # Llama 3's base
    positions = torch.arange(length, device=like.device) if positions is None else positions
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rope(x, cos, sin):
    """Rotate each pair (x[i], x[i + head_dim/2]) of a head by the angle of its position.

    Args:
        x: (batch, heads, length, head_dim).
        cos, sin: (length, head_dim), as ``rotary`` returns them.

    Returns:
        As x.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
