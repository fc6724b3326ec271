"""The networks of the course. They are pure: nothing here knows that there is more than one rank."""

import hashlib

import torch
import torch.nn.functional as F
from planner.models.shapes import GPTShape
from torch import nn

from labkit.training.chunked_loss import chunked_loss


class Net(nn.Module):
    """The MNIST network: two convolutions, two linear layers, 1,199,882 parameters.

    ``fc1`` holds 1,179,776 of them (98.3 %), which is what makes this small network a good subject
    for sharding: there is one thing worth splitting, and everybody can see which.

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
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)  # 24×24 → 12×12
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


# What computes attention, by device, number format and version of PyTorch
ATTENTION_OPERATORS = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class GPT(nn.Module):
    """A decoder-only transformer in the form of Llama 3: pre-norm, rotary positions, grouped-query attention, SwiGLU.

    Input: token numbers of shape (batch, sequence). Output: logits of shape (batch, sequence, vocabulary). With
    targets, of the input's shape, it is their mean cross-entropy: see ``Head``.
    """

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
        """Make one parameter of the embedding's weight and the head's, if the shape says so.

        To be repeated after ``to_empty``, which gives every module a parameter of its own.
        """
        if self.shape.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def reset_parameters(self):
        """Give every parameter its first value: a normal distribution for the weights, ones for the norms."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens, targets=None, chunks: int = 1):
        x = self.embedding(tokens)
        rotation = rotary(tokens.shape[1], self.shape.head_dim, x)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x), targets, chunks)


class Head(nn.Linear):
    """Hidden states to logits; with targets, to their mean cross-entropy, of one in ``chunks`` parts of the tokens at a
    time. It is computed in here, where FSDP has gathered the weight.
    """

    def forward(self, x, targets=None, chunks: int = 1):
        return super().forward(x) if targets is None else chunked_loss(x, self.weight, targets, chunks)


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what comes in. Shape in and out: (batch, sequence, width)."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nn.Module):
    """Causal self-attention; each key and value head serves several query heads."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.key = nn.Linear(shape.hidden_size, shape.key_value_size, bias=False)
        self.value = nn.Linear(shape.hidden_size, shape.key_value_size, bias=False)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x, rotation):
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
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


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained low-rank addition, LoRA (arXiv:2106.09685): x Wᵀ + (x downᵀ) upᵀ.

    ``up`` starts at zero, so that training starts from exactly what the frozen layer computes.
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
    """Freeze a GPT, and give the query and value projections of each block an adapter of that rank to train.

    The frozen parameters keep their names. The adapters have no values yet: see ``init_weights``.
    """
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attention, name, LoRALinear(getattr(block.attention, name), rank))


DRAWN_AT_ONCE = 2**16  # elements of a matrix that one generator draws, in whole rows: some hundreds of kilobytes


def whole_parameter(parameter):
    """Return a parameter that no other rank shares, and its indices along each dimension: all of them."""
    return parameter, [torch.arange(size) for size in parameter.shape]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, part_of=whole_parameter):
    """Fill the parameters of a model, or this rank's parts of them, with their initial weights.

    Each element is a function of the seed, the parameter's name and its position in the whole parameter: the same for
    every strategy, every number of ranks and every device. A rank draws only the blocks of rows that it has a part in,
    one at a time. So the time is that of its part, and a model that fits on no rank as a whole can be initialized.

    Args:
        model: contains only modules of this file. Parameters of any other kind are left as they are.
        seed: any integer.
        part_of: maps a parameter to the tensor to fill and, for each dimension, the indices that this tensor holds of
            the whole parameter (a 1-D integer tensor on the CPU).
    """
    filled = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:  # tied
                continue
            filled.add(parameter)
            part, indices = part_of(parameter)
            if isinstance(module, nn.RMSNorm):
                part.fill_(1)
            elif isinstance(module, LoRALinear) and name == "up":
                part.fill_(0)
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                _draw(part, *indices, parameter.shape, f"{seed} {module_name}.{name}")


def _draw(part, rows, columns, shape, key: str):
    """Fill ``part``, these rows and columns of a matrix of that shape, from N(0, 0.02²). key: names the matrix."""
    per_block = max(1, DRAWN_AT_ONCE // shape[1])
    blocks, counts = torch.unique_consecutive(rows // per_block, return_counts=True)
    pieces = zip(blocks.tolist(), rows.split(counts.tolist()), part.split(counts.tolist()), strict=True)
    for block, mine, piece in pieces:
        first = block * per_block
        # A hash, as the CPU's generator takes 32 bits of a seed, and and nearby numbers could meet those of another matrix.
        mixed = hashlib.sha256(f"{key} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:4]))
        values = torch.empty(min(per_block, shape[0] - first), shape[1]).normal_(std=0.02, generator=generator)
        piece.copy_(values[mine - first].index_select(1, columns))


def rotary(length: int, width: int, like) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of rotary position embedding, each (length, width), on ``like``'s device (arXiv:2104.09864)."""
    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device=like.device) / width)  # Llama 3's base
    angles = torch.outer(torch.arange(length, device=like.device), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rope(x, cos, sin):
    """Each pair of numbers of a head, (x[i], x[i + width/2]), turned by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
