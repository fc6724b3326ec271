"""The course's networks as blueprints: their parameters, and their operators on sizes. Imports no torch.

A blueprint states what labkit/training/models.py computes, line for line; tests hold the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod

from planner import UserError
from planner.models import flops
from planner.models.shapes import GPTShape, block_parameters, linear_parameters, norm_parameters
from planner.ops import chunked_loss, tensor_parallel
from planner.ops.attention import Heads
from planner.ops.autograd import INT64, AbstractParameter, AbstractTensor
from planner.ops.operators import Tape
from planner.ops.tensor_parallel import Exchange


@dataclass(frozen=True, eq=False)
class AbstractModule:
    """A part of a network that runs once in forward.

    Attributes:
        name: such as "block 3".
        parameters: {name: shape}, in the order of registration.
        forward: forward(tape, x, {name: parameter}) → the output.
        wrapped: whether FSDP makes a unit of it; the rest belongs to the root.
        frozen: the parameters that are not trained.
        replicated: the parameters that every rank of a tensor group has whole; of the others each has a part.
        quantized: the frozen parameters that are stored in 4 bits.
        grouped_with_next: FSDP2 makes one unit of it and the module that follows; under FSDP1 it belongs to the root.
        recomputed: see ``flops.recomputed_operations``.
    """

    name: str
    parameters: dict[str, tuple]
    forward: Callable[[Tape, AbstractTensor, dict[str, AbstractParameter]], AbstractTensor]
    wrapped: bool = False
    frozen: frozenset = frozenset()
    replicated: frozenset = frozenset()
    quantized: frozenset = frozenset()
    grouped_with_next: bool = False
    recomputed: tuple[int, bool] = (0, False)

    @property
    def kind(self) -> str:
        """The name that terms have of its tensors: "block" for each of a GPT's."""
        return self.name.split()[0]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A network with its loss, for one rank's batch; under tensor parallelism, one rank's part of it.

    Attributes:
        name: of the network.
        modules: in the order of forward.
        batch: batch(tape, micro-batches, bytes per element) → (input, targets).
        loss: loss(tape, output, targets, bytes per element) → the loss.
        samples: images or tokens in a micro-batch on a rank.
        flops: operations of forward and backward of one sample, without recomputation.
        tied: {parameter: the one whose tensor it shares}.
        tensor_parallel: what the ranks of a tensor group exchange.
        period: each wrapped module is like the one this many before it.
        boundary_numel: elements of a micro-batch between two blocks, and so between two stages of a pipeline.
        holds_output: whether the training loop holds the network's output until it has the next step's.
    """

    name: str
    modules: tuple[AbstractModule, ...]
    batch: Callable[[Tape, int, int], tuple[AbstractTensor, AbstractTensor]]
    loss: Callable[[Tape, AbstractTensor, AbstractTensor, int], AbstractTensor]
    samples: int
    flops: float
    tied: dict[str, str] = field(default_factory=dict)
    tensor_parallel: Exchange = field(default_factory=Exchange)
    period: int = 1
    boundary_numel: int = 0
    holds_output: bool = False

    @property
    def numel(self) -> int:
        """The number of parameters, on all ranks of a tensor group together."""
        return sum(
            prod(shape) * (1 if name in module.replicated else self.tensor_parallel.tp_degree)
            for module in self.modules
            for name, shape in module.parameters.items()
            if name not in self.tied
        )


# The MNIST network (labkit/training/models.py: Net)

LAYERS = {
    "conv1": {"conv1.weight": (32, 1, 3, 3), "conv1.bias": (32,)},
    "conv2": {"conv2.weight": (64, 32, 3, 3), "conv2.bias": (64,)},
    "fc1": {"fc1.weight": (128, 9216), "fc1.bias": (128,)},
    "fc2": {"fc2.weight": (10, 128), "fc2.bias": (10,)},
}
IMAGE, POOLED = 28 * 28, 64 * 12 * 12  # elements per image


def mnist(batch: int = 64, dropout: bool = True, min_num_params: int | None = None) -> Blueprint:
    """Return the blueprint of the MNIST network.

    Args:
        batch: images on each rank.
        dropout: whether training drops elements.
        min_num_params: layers with at least this many parameters are units of their own; None: no layer is.
    """

    def layer(name, forward):
        numel = sum(map(prod, LAYERS[name].values()))
        wrapped = min_num_params is not None and numel >= min_num_params
        return AbstractModule(name, LAYERS[name], forward, wrapped=wrapped)

    def pooling(tape, x, _):
        x = tape.max_pool(x, batch * POOLED)
        return tape.dropout(x, "dropout1") if dropout else x

    def hidden(tape, x, _):
        x = tape.relu(x, "relu3")
        return tape.dropout(x, "dropout2") if dropout else x

    def make_batch(tape, count, itemsize):
        return tape.constant("images", batch * IMAGE, itemsize, count), tape.constant("labels", batch, INT64, count)

    modules = (
        layer("conv1", lambda tape, x, p: tape.convolution(x, p["conv1.weight"], p["conv1.bias"], batch * 26 * 26)),
        AbstractModule("relu1", {}, lambda tape, x, _: tape.relu(x, "relu1")),
        layer("conv2", lambda tape, x, p: tape.convolution(x, p["conv2.weight"], p["conv2.bias"], batch * 24 * 24)),
        AbstractModule("relu2", {}, lambda tape, x, _: tape.relu(x, "relu2")),
        AbstractModule("pooling", {}, pooling),
        layer("fc1", lambda tape, x, p: tape.linear(x, p["fc1.weight"], p["fc1.bias"])),
        AbstractModule("relu3", {}, hidden),
        layer("fc2", lambda tape, x, p: tape.linear(x, p["fc2.weight"], p["fc2.bias"])),
        AbstractModule("log-softmax", {}, lambda tape, x, _: tape.log_softmax(x)),
    )
    return Blueprint(
        name="MNIST net",
        modules=modules,
        batch=make_batch,
        loss=lambda tape, x, targets, itemsize: tape.nll_loss(tape.to(x, itemsize), targets),
        samples=batch,
        flops=0.0,
        holds_output=True,
    )


# The GPT (labkit/training/models.py: GPT)

# What backward recomputes in a block: nothing; everything; everything except matmuls and attention; everything except
# every second matmul, and attention.
RECOMPUTE = ("none", "full", "selective", "alternate")


@dataclass(frozen=True)
class GPT:
    """A transformer, trained in a given way: ``gpt`` describes the fields, ``blueprint`` returns it as modules."""

    shape: GPTShape
    batch_size: int
    seq_len: int
    recompute: str
    lora: int | None
    tp_degree: int
    stage: range
    recompute_every: int
    loss_chunks: int
    wrap_embeddings: bool
    quantized: bool

    def __post_init__(self):
        self.shape.check_tensor_parallel(self.tp_degree, self.seq_len)
        if self.tp_degree > 1 and (self.lora or self.wrap_embeddings or self.loss_chunks > 1):
            raise UserError(
                "tensor parallelism goes without --lora, --wrap blocks+embeddings, and --loss-chunks: leave them out"
            )
        if self.loss_chunks > 1 and (self.shape.softcaps_logits or "head" in self.shape.biases):
            raise UserError(
                "the loss in chunks is planned for a head without bias and soft-capping: leave --loss-chunks out"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.batch_size * self.seq_len

    def is_recomputed(self, block: int) -> bool:
        """Return whether a block is recomputed in backward."""
        return self.recompute != "none" and block % self.recompute_every == 0

    def blueprint(self) -> Blueprint:
        """Return the modules of this rank, with batch and loss."""
        shape, stage = self.shape, self.stage
        recomputed = sum(map(self.is_recomputed, stage))
        return Blueprint(
            name="GPT",
            modules=(
                self.first_module(),
                *map(self.block_module, stage),
                *(self.last_modules() if stage.stop == shape.num_hidden_layers else ()),
            ),
            batch=self.batch,
            loss=self.loss,
            samples=self.tokens,
            flops=flops.per_token(shape, self.seq_len, self.lora, stage),
            tied={"head.weight": "embedding.weight"} if shape.tie_word_embeddings else {},
            tensor_parallel=tensor_parallel.exchange(
                self.tp_degree, shape.num_hidden_layers, self.tokens, shape.hidden_size, recomputed
            ),
            period=self.recompute_every if self.recompute != "none" else 1,
            boundary_numel=self.tokens * shape.hidden_size,
        )

    # The modules, with their parameters

    def module(self, name: str, parameters: dict, forward: Callable, **options) -> AbstractModule:
        """Return a module; with adapters, everything except them is frozen."""
        frozen = frozenset(n for n in parameters if self.lora and not n.endswith((".down", ".up")))
        replicated = frozenset(n for n in parameters if n.endswith("norm.weight"))
        return AbstractModule(name, parameters, forward, frozen=frozen, replicated=replicated, **options)

    def first_module(self) -> AbstractModule:
        """Return the embedding; on a later pipeline stage, what computes the positions."""
        if self.stage.start > 0:
            return self.module("positions", {}, self.positions)
        shape = self.shape
        parameters = {"embedding.weight": (shape.vocab_size // self.tp_degree, shape.hidden_size)}
        if shape.learned_positions:
            parameters["positions.weight"] = (shape.learned_positions, shape.hidden_size)
        return self.module("embedding", parameters, self.embedding, wrapped=self.wrap_embeddings)

    def block_module(self, number: int) -> AbstractModule:
        """Return a block."""
        parameters = block_parameters(self.shape, self.lora, self.tp_degree)
        options = {"wrapped": True}
        if self.quantized and self.lora:
            matrices = (n for n, size in parameters.items() if len(size) > 1 and not n.endswith((".down", ".up")))
            options["quantized"] = frozenset(matrices)
        if not self.is_recomputed(number):
            return self.module(f"block {number}", parameters, self.block, **options)
        options["recomputed"] = flops.recomputed_operations(self.shape, self.recompute, self.lora)
        return self.module(f"block {number}", parameters, self.checkpointed_block, **options)

    def last_modules(self) -> list[AbstractModule]:
        """Return the last norm and the head: one module, unless FSDP wraps the head."""
        shape = self.shape
        norm = norm_parameters(shape, "norm")
        head = linear_parameters(shape, "head", shape.vocab_size // self.tp_degree, shape.hidden_size)
        if not self.wrap_embeddings:
            return [self.module("head", norm | head, self.norm_and_head)]
        return [
            self.module("norm", norm, self.last_norm, grouped_with_next=True),
            self.module("head", head, self.head, wrapped=True),
        ]

    # Their operators. tape: records them; x: the input; p: {name: parameter}. Shapes are those under tp_degree 1.

    def batch(self, tape, count, _):
        """Return tokens and targets, both (batch, length), for ``count`` micro-batches."""
        tokens = self.tokens
        return tape.constant("tokens", tokens, INT64, count), tape.constant("targets", tokens, INT64, count)

    def embedding(self, tape, x, p):
        """Embed tokens (batch, length) → (batch, length, hidden size)."""
        x = tensor_parallel.embedding(tape, x, p["embedding.weight"], self.tp_degree)
        if self.shape.learned_positions:
            table = p["positions.weight"]
            return tape.add(x, tape.position_embedding(x, table, self.seq_len), "embedding, with positions")
        return self.positions(tape, tensor_parallel.scatter(tape, x, self.tp_degree, self.batch_size), p)

    def positions(self, tape, x, _):
        """Make the tables of cosines and sines, (length, head dimension) each, and return x."""
        size = self.seq_len * self.shape.head_dim, x.itemsize
        tape.rope_tables = [tape.constant(name, *size) for name in ("cosines", "sines")]
        return x

    def checkpointed_block(self, tape, x, p):
        """Run ``block`` under activation checkpointing."""
        return tape.checkpoint(partial(self.block, tape, p=p), x, self.recompute)

    def block(self, tape, x, p):
        """Add attention and feed-forward layer to x (batch, length, hidden size)."""
        if self.shape.norms_per_block == 1:  # attention and feed-forward layer take the same input
            normal = _norm(tape, x, p, "attention_norm")
            both = [layer(tape, normal, p) for layer in (self.attention, self.feed_forward)]
            return tape.add(x, tape.add(*both, "both layers"), "block's output")
        attended = tape.add(x, self.sublayer(tape, x, p, "attention"), "after attention")
        return tape.add(attended, self.sublayer(tape, attended, p, "feed_forward"), "block's output")

    def sublayer(self, tape, x, p, name):
        """Apply norm and layer; a tensor group gathers the tokens in between, and sums and scatters the output."""
        layer = {"attention": self.attention, "feed_forward": self.feed_forward}[name]
        x = tensor_parallel.gather(tape, _norm(tape, x, p, f"{name}_norm"), self.tp_degree, self.batch_size)
        x = tensor_parallel.scatter(tape, layer(tape, x, p), self.tp_degree, self.batch_size)
        return _norm(tape, x, p, f"after_{name}_norm") if self.shape.norms_per_block == 4 else x

    def attention(self, tape, x, p):
        """Attend causally over x (batch, length, hidden size), with rotary positions unless they are learned."""
        shape, tp_degree = self.shape, self.tp_degree
        heads = Heads(
            self.batch_size,
            query_heads=shape.num_attention_heads // tp_degree,
            kv_heads=shape.num_key_value_heads // tp_degree,
            seq_len=self.seq_len,
        )
        projected = (_projection(tape, x, p, name) for name in ("query", "key", "value"))
        query, key, value = (tape.split_heads(projection, heads) for projection in projected)
        if shape.qk_norm:
            query, key = tape.rms_norm(query, p["query_norm.weight"]), tape.rms_norm(key, p["key_norm.weight"])
        if shape.learned_positions:
            mixed = tape.attention(query, key, value, heads)
        else:
            rotated_query, rotated_key = tape.apply_rope(query, "query"), tape.apply_rope(key, "key")
            del query, key
            mixed = tape.attention(rotated_query, rotated_key, value, heads)
        return tape.linear(tape.join_heads(mixed, heads), p["output.weight"], p.get("output.bias"))

    def feed_forward(self, tape, x, p):
        """Compute down(silu(gate(x)) · up(x)); without a gate, down(gelu(up(x)))."""
        linear = partial(_linear, tape, p)
        if self.shape.gated:
            return linear("down", tape.multiply(tape.silu(linear("gate", x)), linear("up", x)))
        return linear("down", tape.silu(linear("up", x), "gelu"))

    def norm_and_head(self, tape, x, p):
        """Run ``last_norm`` and ``head`` as one module."""
        return self.head(tape, self.last_norm(tape, x, p), p)

    def last_norm(self, tape, x, p):
        """Normalize x (batch, length, hidden size), all tokens of it."""
        return tensor_parallel.gather(tape, _norm(tape, x, p, "norm"), self.tp_degree, self.batch_size)

    def head(self, tape, x, p):
        """Return logits (batch, length, vocabulary); with ``loss_chunks`` the loss, of which no logits stay."""
        if self.loss_chunks > 1:
            return chunked_loss.chunked_loss(tape, x, p["head.weight"], self.loss_chunks)
        x = _linear(tape, p, "head", x)
        return tape.softcap(x) if self.shape.softcaps_logits else x

    def loss(self, tape, output, targets, itemsize):
        """Return the mean cross-entropy of the head's output, divided by the number of micro-batches."""
        if self.loss_chunks == 1:
            output = tensor_parallel.cross_entropy(tape, tape.to(output, itemsize, "logits"), targets, self.tp_degree)
        return tape.divide(output, "loss, divided by micro-batches")


def _norm(tape, x, p, name):
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    return tape.layer_norm(x, weight, bias) if bias else tape.rms_norm(x, weight)


def _linear(tape, p, name, x):
    return tape.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _projection(tape, x, p, name):
    out = _linear(tape, p, name, x)
    if f"{name}.down" not in p:
        return out
    return tape.add(out, tape.linear(tape.linear(x, p[f"{name}.down"]), p[f"{name}.up"]), f"{name}, adapted")


def gpt(
    shape: GPTShape,
    batch_size: int,
    seq_len: int,
    recompute: str = "none",
    lora: int | None = None,
    *,
    tp_degree: int = 1,
    blocks: range | None = None,
    recompute_every: int = 1,
    loss_chunks: int = 1,
    wrap_embeddings: bool = False,
    quantized: bool = False,
) -> Blueprint:
    """Return the blueprint of a GPT for one rank's batch.

    Args:
        shape: the model's sizes.
        batch_size: sequences on each rank.
        seq_len: tokens of a sequence.
        recompute: what backward recomputes, one of ``RECOMPUTE``.
        lora: the adapters' rank; then they alone are trained.
        tp_degree: ranks that split every weight, and the sequence between the linear layers; they see the same sequences.
        blocks: those of a pipeline stage; the first stage also has the embedding, the last the head. By default all.
        recompute_every: recompute one block in this many, beginning with the first.
        loss_chunks: chunks of the tokens for which the head computes logits and loss, one after another.
        wrap_embeddings: FSDP makes units of embedding and head.
        quantized: with adapters, the matrices of the blocks are stored in 4 bits (QLoRA, arXiv:2305.14314).

    Raises:
        UserError: the model cannot be split among ``tp_degree`` ranks, or the options do not go together.
    """
    return GPT(
        shape,
        batch_size,
        seq_len,
        recompute=recompute,
        lora=lora,
        tp_degree=tp_degree,
        stage=blocks or range(shape.num_hidden_layers),
        recompute_every=recompute_every,
        loss_chunks=loss_chunks,
        wrap_embeddings=wrap_embeddings,
        quantized=quantized,
    ).blueprint()
