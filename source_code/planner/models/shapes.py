"""The sizes of transformers, which labkit/training/models.py builds and planner/models/networks.py simulates. No torch.

Fields have the names of Hugging Face's configurations.
"""

from dataclasses import dataclass

from planner import UserError


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a transformer, and how its blocks differ from Llama's.

    The fields from ``explicit_head_dim`` on describe third-party models (planner/models/huggingface.py); the course's
    own models have their defaults.

    Attributes:
        num_hidden_layers: number of blocks.
        hidden_size: elements of a token's vector between blocks.
        num_attention_heads: query heads.
        num_key_value_heads: heads of keys and of values; fewer than query heads is grouped-query attention.
        intermediate_size: elements of a token's vector inside the feed-forward layer.
        vocab_size: rows of the embedding; the course's tokens are bytes.
        tie_word_embeddings: whether the head's weight is the embedding's.
        explicit_head_dim: elements of a head, if not hidden_size / num_attention_heads.
        biases: which linear layers have one: "query" (and key and value), "output", "feed_forward", "head".
        qk_norm: whether queries and keys are normalized, head by head.
        gated: whether the feed-forward layer has a gate.
        norm: "rms", or "layer", which has a bias.
        norms_per_block: 2; 1 if attention and feed-forward layer share one; 4 if each is also followed by one.
        learned_positions: rows of the position embedding; 0: positions are rotary.
        sliding_window: tokens that a token attends to in ``windowed_share`` of the layers; None: all.
        windowed_share: from 0 to 1.
        softcaps_logits: whether the logits pass through a scaled tanh.
        dropout: whether training drops elements; their masks are not planned.

    Raises:
        UserError: the sizes do not fit together.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 256
    tie_word_embeddings: bool = False
    explicit_head_dim: int | None = None
    biases: frozenset = frozenset()
    qk_norm: bool = False
    gated: bool = True
    norm: str = "rms"
    norms_per_block: int = 2
    learned_positions: int = 0
    sliding_window: int | None = None
    windowed_share: float = 1.0
    softcaps_logits: bool = False
    dropout: bool = False

    def __post_init__(self):
        if self.explicit_head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"a hidden size of {self.hidden_size} cannot be divided evenly among {self.num_attention_heads} heads"
            )
        if self.head_dim % 2:
            raise UserError(f"a head of {self.head_dim} elements is odd: rotary positions rotate pairs of elements")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} heads of queries cannot share {self.num_key_value_heads} of keys and "
                "values evenly"
            )

    def check_tensor_parallel(self, tp_degree: int, seq_len: int):
        """Check that ``tp_degree`` ranks can split this model, and sequences of ``seq_len`` tokens, evenly.

        Raises:
            UserError: they cannot.
        """
        parts = {
            "heads of keys and values": self.num_key_value_heads,  # which divide those of queries
            "intermediate elements": self.intermediate_size,
            "tokens of a sequence": seq_len,
        }
        for what, count in parts.items():
            if count % tp_degree:
                raise UserError(
                    f"the {count} {what} cannot be divided evenly among the {tp_degree} ranks of "
                    f"--mesh tensor={tp_degree}"
                )

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.explicit_head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Elements of all query heads: the hidden size, unless the head dimension is explicit."""
        return self.head_dim * self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Elements of all heads of keys, or of values."""
        return self.head_dim * self.num_key_value_heads

    def attended_tokens(self, seq_len: int) -> float:
        """Return how many tokens of ``seq_len`` a token's query meets, masked ones included: the mean over the layers."""
        if not self.sliding_window or self.sliding_window >= seq_len:
            return seq_len
        return self.windowed_share * self.sliding_window + (1 - self.windowed_share) * seq_len


def linear_parameters(shape: GPTShape, name: str, outs: int, ins: int, bias: str = "") -> dict[str, tuple]:
    """Return {name: shape} of a linear layer's weight (outs, ins), and of its bias (outs,) if the model has one there.

    Args:
        shape: the model.
        name: of the layer.
        outs: output features.
        ins: input features.
        bias: which member of ``GPTShape.biases`` decides; by default the layer's name.
    """
    weight = {f"{name}.weight": (outs, ins)}
    return weight | {f"{name}.bias": (outs,)} if (bias or name) in shape.biases else weight


def norm_parameters(shape: GPTShape, name: str) -> dict[str, tuple]:
    """Return {name: shape} of a norm's weight (hidden size,), and of its bias if the model's norms have one."""
    weight = {f"{name}.weight": (shape.hidden_size,)}
    return weight | {f"{name}.bias": (shape.hidden_size,)} if shape.norm == "layer" else weight


def block_parameters(shape: GPTShape, lora: int | None, tp_degree: int = 1) -> dict[str, tuple]:
    """Return {name: shape} of a block's parameters in the order of registration, as one rank of a tensor group has them.

    Args:
        shape: the model.
        lora: the rank of adapters on queries and values; None: there are none.
        tp_degree: ranks that split each weight: "output" and "down" by columns, the others by rows.
    """
    hidden_size, intermediate_size = shape.hidden_size, shape.intermediate_size // tp_degree

    def projection(name, outs):
        parameters = linear_parameters(shape, name, outs, hidden_size, "query")
        if lora and name in ("query", "value"):
            parameters |= {f"{name}.down": (lora, hidden_size), f"{name}.up": (outs, lora)}
        if shape.qk_norm and name != "value":
            parameters |= {f"{name}_norm.weight": (shape.head_dim,)}
        return parameters

    def norm(name, present=True):
        return norm_parameters(shape, name) if present else {}

    def feed_forward(name, outs, ins):
        return linear_parameters(shape, name, outs, ins, "feed_forward")

    return {
        **norm("attention_norm"),
        **projection("query", shape.query_size // tp_degree),
        **projection("key", shape.key_value_size // tp_degree),
        **projection("value", shape.key_value_size // tp_degree),
        **linear_parameters(shape, "output", hidden_size, shape.query_size // tp_degree),
        **norm("after_attention_norm", shape.norms_per_block == 4),
        **norm("feed_forward_norm", shape.norms_per_block > 1),
        **(feed_forward("gate", intermediate_size, hidden_size) if shape.gated else {}),
        **feed_forward("up", intermediate_size, hidden_size),
        **feed_forward("down", hidden_size, intermediate_size),
        **norm("after_feed_forward_norm", shape.norms_per_block == 4),
    }


# The course's sizes, and those published for Llama 3 (arXiv:2407.21783, table 3) with its vocabulary.
LLAMA3_VOCABULARY = 128256
GPT_SHAPES = {
    "tiny": GPTShape(
        num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
    ),
    "small": GPTShape(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408
    ),
    "1b": GPTShape(
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=LLAMA3_VOCABULARY,
        tie_word_embeddings=True,
    ),
    "llama3-8b": GPTShape(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=LLAMA3_VOCABULARY,
    ),
    "llama3-70b": GPTShape(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=LLAMA3_VOCABULARY,
    ),
    "llama3-405b": GPTShape(
        num_hidden_layers=126,
        hidden_size=16384,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=LLAMA3_VOCABULARY,
    ),
}
