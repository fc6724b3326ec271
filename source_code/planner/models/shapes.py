"""The sizes of the course's GPTs, as numbers: what labkit/training/models.py builds and planner/models/networks.py reckons with."""

from dataclasses import dataclass

from planner import UserError


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT, and in what its blocks differ from those of Llama.

    Queries have ``heads`` heads, keys and values ``kv_heads``: fewer is grouped-query attention, in which several
    heads of queries share one of keys and values. ``hidden`` is the width inside the feed-forward part. ``tied``:
    the embedding's weight is the head's too. UserError where the sizes do not go together.

    The rest is for the models of others (planner/models/huggingface.py): the course's labs have it as it is by default.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 256  # bytes
    tied: bool = False
    head_width: int | None = None  # numbers of a head, where not width / heads
    biases: frozenset = frozenset()  # of "query" (key and value too), "output", "feed_forward", "head"
    normed_heads: bool = False  # queries and keys are normed, head by head
    gated: bool = True  # the feed-forward part has a gate
    norm: str = "rms"  # or "layer", which has a bias
    norms: int = 2  # a block: 1 for both its parts side by side, 4 for one before and one after each
    positions: int = 0  # learned positions; 0: they are turned (rotary)
    window: int | None = None  # tokens that a token sees, in ``windowed`` of the layers
    windowed: float = 1.0
    softcap: bool = False  # logits are squashed by a tanh
    dropout: bool = False  # training drops elements, whose masks are not planned

    def __post_init__(self):
        if self.head_width is None and self.width % self.heads:
            raise UserError(f"a width of {self.width} cannot be shared evenly by {self.heads} heads")
        if self.in_head % 2:
            raise UserError(f"a head of {self.in_head} numbers is odd: rotary positions turn pairs of them")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads of queries cannot share {self.kv_heads} of keys and values evenly")

    def check_split(self, tensor: int, length: int):
        """UserError where ``tensor`` ranks cannot share a model of this shape, and sequences of ``length`` tokens, evenly."""
        parts = {
            "heads of keys and values": self.kv_heads,  # which divide those of queries
            "hidden numbers": self.hidden,
            "tokens of a sequence": length,
        }
        for what, count in parts.items():
            if count % tensor:
                raise UserError(
                    f"the {count} {what} cannot be shared evenly by the {tensor} ranks of --mesh tensor={tensor}"
                )

    @property
    def in_head(self) -> int:
        """Numbers of a head."""
        return self.head_width or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Numbers of all heads of queries: the width, unless a head has a width of its own."""
        return self.in_head * self.heads

    @property
    def kv_width(self) -> int:
        return self.in_head * self.kv_heads

    def seen(self, length: int) -> float:
        """How many tokens of ``length`` each token is compared with, masked ones included, on average over the layers."""
        if not self.window or self.window >= length:
            return length
        return self.windowed * self.window + (1 - self.windowed) * length


def product_parameters(shape: GPTShape, name: str, outs: int, ins: int, bias: str = "") -> dict[str, tuple]:
    """Of a product, with its bias where the shape has one: of the kind ``bias``, or of that name."""
    found = {f"{name}.weight": (outs, ins)}
    return found | {f"{name}.bias": (outs,)} if (bias or name) in shape.biases else found


def norm_parameters(shape: GPTShape, name: str) -> dict[str, tuple]:
    """Of a norm of that name."""
    found = {f"{name}.weight": (shape.width,)}
    return found | {f"{name}.bias": (shape.width,)} if shape.norm == "layer" else found


def block_parameters(shape: GPTShape, lora: int | None, tensor: int = 1) -> dict[str, tuple]:
    """Of a block; of a rank's part of it, where the columns of all products are split but for the last rows'."""
    width, hidden = shape.width, shape.hidden // tensor

    def projection(name, outs):
        found = product_parameters(shape, name, outs, width, "query")
        if lora and name in ("query", "value"):
            found |= {f"{name}.down": (lora, width), f"{name}.up": (outs, lora)}
        if shape.normed_heads and name != "value":
            found |= {f"{name}_norm.weight": (shape.in_head,)}
        return found

    def norm(name, present=True):
        return norm_parameters(shape, name) if present else {}

    return {
        **norm("attention_norm"),
        **projection("query", shape.query_width // tensor),
        **projection("key", shape.kv_width // tensor),
        **projection("value", shape.kv_width // tensor),
        **product_parameters(shape, "output", width, shape.query_width // tensor),
        **norm("after_attention_norm", shape.norms == 4),
        **norm("feed_forward_norm", shape.norms > 1),
        **(product_parameters(shape, "gate", hidden, width, "feed_forward") if shape.gated else {}),
        **product_parameters(shape, "up", hidden, width, "feed_forward"),
        **product_parameters(shape, "down", width, hidden, "feed_forward"),
        **norm("after_feed_forward_norm", shape.norms == 4),
    }


# The course's sizes, and those published for Llama 3 (arXiv:2407.21783, table 3) with its vocabulary.
GPT_SHAPES = {
    "tiny": GPTShape(layers=4, width=128, heads=4, kv_heads=2, hidden=384),
    "small": GPTShape(layers=8, width=512, heads=8, kv_heads=4, hidden=1408),
    "1b": GPTShape(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, vocabulary=128256, tied=True),
    "llama3-8b": GPTShape(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocabulary=128256),
    "llama3-70b": GPTShape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256),
    "llama3-405b": GPTShape(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256),
}
