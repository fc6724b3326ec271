# SPDX-License-Identifier: BSD-3-Clause
"""The sizes of transformers, which labkit/training/models.py builds and planner/models/networks.py simulates. No torch.

Fields have the names of Hugging Face's configurations where these have them.
"""

from dataclasses import dataclass

from planner import UserError
from planner.ops import context


def check_divides(tp_degree: int, count: int, what: str):
    """Check that the ranks of a tensor group can divide ``count`` of something evenly.

    Raises:
        UserError: they cannot.
    """
    if count % tp_degree:
        raise UserError(
            f"the {count} {what} cannot be divided evenly among the {tp_degree} ranks of --mesh tensor={tp_degree}"
        )


@dataclass(frozen=True)
class Layer:
    """How a block differs from the other blocks of its model.

    Attributes:
        windowed: it attends to ``GPTShape.sliding_window`` tokens only.
        rotary: positions rotate its queries and keys.
        routed: its feed-forward layer is ``GPTShape.experts``.
        parameters: ((name, shape), …) of a block whose operators are not modeled; empty: ``block_parameters`` states them.
        query_size: elements of all its query heads, if not the model's; 0: attention that is linear in the length.
    """

    windowed: bool = False
    rotary: bool = True
    routed: bool = False
    parameters: tuple = ()
    query_size: int | None = None


@dataclass(frozen=True)
class Experts:
    """A feed-forward layer of experts, of which a router chooses a few for each token.

    Attributes:
        count: experts.
        top_k: that compute a token.
        intermediate_size: elements of a token's vector inside an expert.
        shared_size: elements inside the expert that computes every token; 0: there is none.
        gates_shared: whether each token weighs the shared expert's output.
        biased: whether the router and the experts have biases.
        router: "softmax" over all experts, then the choice; "chosen", softmax over the chosen; "sigmoid", with
            normalization; "dense", which computes every expert on all tokens.
        normalizes: whether the weights of the chosen are divided by their sum.
        weighs_in_fp32: whether the weights of the chosen, and what they multiply, are in fp32 though the model is in bf16.
        output_first: whether an expert's weight is (out, in), else (in, out).
        capacity_factor: the course's models: tokens of a sequence above this multiple of an expert's mean share are dropped;
            None: none is.
        balance: the course's models: how experts are kept equally busy: "none", by a "loss", or by a "bias".

    Raises:
        UserError: a token cannot choose as many.
    """

    count: int
    top_k: int
    intermediate_size: int
    shared_size: int = 0
    gates_shared: bool = False
    biased: bool = False
    router: str = "softmax"
    normalizes: bool = True
    weighs_in_fp32: bool = False
    output_first: bool = True
    capacity_factor: float | None = None
    balance: str = "none"

    def __post_init__(self):
        if self.top_k > self.count:
            raise UserError(f"a token cannot choose {self.top_k} of {self.count} experts: give a smaller --top-k")

    @property
    def active_share(self) -> float:
        """The share of the experts' parameters that a token multiplies."""
        return self.top_k / self.count


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): queries, keys, and values are expanded from short vectors.

    Attributes:
        query_rank: elements of the vector that queries are expanded from; None: they are projected at once.
        key_value_rank: elements of the vector that keys and values are expanded from.
        rotary_dim: elements of a head of queries and keys that positions rotate.
        other_dim: their other elements.
        value_dim: elements of a head of values.
    """

    query_rank: int | None
    key_value_rank: int
    rotary_dim: int
    other_dim: int
    value_dim: int


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
        library: whether it is computed by transformers' modules, see planner/models/library.py.
        biases: which linear layers have one: "query" (and key and value), "output", "feed_forward", "head".
        fused: layers whose weights are one: "query_key_value", "gate_up".
        qk_norm: how queries and keys are normalized: "", "head" by head, the whole "projection", or "unweighted", head by
            head without a weight.
        gated: whether the feed-forward layer has a gate.
        activation: of the feed-forward layer, by its name in transformers.
        norm: "rms"; "rms plus one", which multiplies by 1 + weight; "layer", which has a bias; or "unbiased layer".
        norms: where they are: "before" attention and feed-forward layer, "after" them, "around" each; "parallel": before
            both, which take the same input; "shared": one for both, which take the same input.
        learned_positions: rows of the position embedding; 0: positions are rotary.
        rotary_share: of a head's elements, the part that positions rotate.
        rotary_tables: tables of cosines and sines: 2 if windowed layers have their own.
        in_fp32: what is computed in fp32 though the model is in bf16: "norm", the multiplication by a norm's weight;
            "rotary", the rotation; "tables", the cosines and sines.
        sliding_window: tokens that a token attends to in the windowed layers; None: all.
        layers: how each block differs; (): all are equal, and windowed if there is a window.
        experts: of the routed layers.
        latent: multi-head latent attention.
        attention: "fused" into one operator; "softcapped", in several; "sinks", in several, with a parameter per head.
        scales: what is multiplied by a constant: "embedding", "residual" (what is added to it), "logits", "query".
        softcaps_logits: whether the logits pass through a scaled tanh.
        other_parameters: ((name, shape), …) outside of the blocks whose operators are not modeled.
        unmodeled: what of its operators is not modeled, for messages: then no peak is planned by arithmetic.
        dropout: of what training drops elements: "embedding", "residual" (what is added to it), "attention", "other".
        other_buffers: bytes of buffers that neither positions nor routers need.
        norm_with_head: whether FSDP gathers the last norm with the head; otherwise it belongs to the root.

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
    library: bool = False
    biases: frozenset = frozenset()
    fused: frozenset = frozenset()
    qk_norm: str = ""
    gated: bool = True
    activation: str = "silu"
    norm: str = "rms"
    norms: str = "before"
    learned_positions: int = 0
    rotary_share: float = 1.0
    rotary_tables: int = 1
    in_fp32: frozenset = frozenset()
    sliding_window: int | None = None
    layers: tuple[Layer, ...] = ()
    experts: Experts | None = None
    latent: LatentAttention | None = None
    attention: str = "fused"
    scales: frozenset = frozenset()
    softcaps_logits: bool = False
    other_parameters: tuple = ()
    unmodeled: str = ""
    dropout: frozenset = frozenset()
    other_buffers: int = 0
    norm_with_head: bool = True

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
        """Check that ``tp_degree`` ranks can split the course's model evenly, and sequences of ``seq_len`` tokens.

        Raises:
            UserError: they cannot.
        """
        self.check_split_heads(tp_degree)
        check_divides(tp_degree, self.intermediate_size, "intermediate elements")
        check_divides(tp_degree, seq_len, "tokens of a sequence")

    def check_expert_parallel(self, ep_degree: int):
        """Check that ``ep_degree`` ranks can divide the experts evenly.

        Raises:
            UserError: they cannot.
        """
        if ep_degree > 1 and self.experts and self.experts.count % ep_degree:
            raise UserError(
                f"the {self.experts.count} experts cannot be divided evenly among the {ep_degree} ranks of --mesh "
                f"expert={ep_degree}"
            )

    def check_context_parallel(self, cp_degree: int, tp_degree: int, form: str, seq_len: int):
        """Check that ``cp_degree`` ranks can share sequences of ``seq_len`` tokens, and with Ulysses their heads.

        Args:
            cp_degree: ranks of a context group.
            tp_degree: ranks that split the heads before.
            form: of attention, one of ``context.FORMS``.
            seq_len: tokens of a sequence.

        Raises:
            UserError: they cannot.
        """
        parts = cp_degree * context.ORDERS[context.order_of(form)]
        if seq_len % parts:
            raise UserError(
                f"--mesh context={cp_degree} with --context-attention {form} divides a sequence into {parts} parts: give "
                f"a --seq-len divisible by {parts}, not {seq_len}"
            )
        if form == "ulysses" and self.num_key_value_heads % (cp_degree * tp_degree):
            raise UserError(
                f"ulysses divides heads, and the {self.num_key_value_heads} heads of keys and values cannot be divided "
                f"evenly among {cp_degree * tp_degree} ranks: give a smaller context in --mesh, or --context-attention ring"
            )

    def check_split_heads(self, tp_degree: int):
        """Check that ``tp_degree`` ranks can divide the heads evenly: those of keys and values, which divide those of queries.

        Raises:
            UserError: they cannot.
        """
        check_divides(tp_degree, self.num_key_value_heads, "heads of keys and values")

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

    def unplanned_dropout(self, on_gpu: bool) -> bool:
        """Return whether masks of dropout are not planned: those of attention, unless a GPU's kernel draws them itself."""
        fused = on_gpu and self.attention == "fused"
        return not self.dropout <= {"embedding", "residual"} | ({"attention"} if fused else set())

    @property
    def period(self) -> int:
        """The smallest N such that every block is like the one N before it; with no such N, the number of blocks."""
        layers = self.layers
        return next((n for n in range(1, len(layers)) if layers[n:] == layers[:-n]), max(1, len(layers)))

    def layer(self, number: int) -> Layer:
        """Return how a block differs from the others."""
        return self.layers[number] if self.layers else Layer(windowed=bool(self.sliding_window))

    def windowed(self, number: int, seq_len: int) -> bool:
        """Return whether a block attends to fewer than ``seq_len`` tokens."""
        return self.layer(number).windowed and bool(self.sliding_window) and self.sliding_window < seq_len

    def attended_elements(self, number: int, seq_len: int) -> float:
        """Return the tokens that a token's query meets in a block, masked ones included, × the elements of its heads.

        With latent attention, heads of queries and keys are larger than those of values: it is the mean of both.
        """
        size = self.layer(number).query_size
        size = self.query_size if size is None else size
        if latent := self.latent:
            size = self.num_attention_heads * (latent.rotary_dim + latent.other_dim + latent.value_dim) / 2
        window = self.sliding_window if self.windowed(number, seq_len) else None
        return size * (window or seq_len)


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
