# SPDX-License-Identifier: BSD-3-Clause
"""The course's GPT as a blueprint: it states what labkit/training/models.py computes, line for line. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

from planner import UserError
from planner.models import flops
from planner.models.blueprint import AbstractModule, Blueprint
from planner.models.parameters import active_shares, block_parameters, linear_parameters, norm_parameters
from planner.models.shapes import GPTShape
from planner.ops import chunked_loss, context_parallel, mixture, tensor_parallel
from planner.ops.attention import Heads
from planner.ops.autograd import FP32, INT64
from planner.ops.context import Context
from planner.ops.routing import Routing, Spread, expected


@dataclass(frozen=True)
class GPT:
    """A transformer, trained in a given way: ``networks.gpt`` describes the fields, ``blueprint`` returns it as modules."""

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
    offload_activations: bool
    context: Context
    ep_degree: int = 1
    routing: Routing | None = None

    def __post_init__(self):
        if self.context.size > 1:
            self.shape.check_context_parallel(self.context.size, self.tp_degree, self.context.form, self.seq_len)
        self.shape.check_tensor_parallel(self.tp_degree, self.local_len)
        self.shape.check_expert_parallel(self.ep_degree)
        self.check_loss()
        if self.tp_degree > 1 and (self.lora or self.wrap_embeddings or self.loss_chunks > 1):
            raise UserError(
                "tensor parallelism goes without --lora, --wrap blocks+embeddings, and --loss-chunks: leave them out"
            )

    def check_loss(self):
        """Check that --loss-chunks is planned for this head.

        Raises:
            UserError: it is not.
        """
        if self.loss_chunks > 1 and (self.shape.softcaps_logits or "head" in self.shape.biases):
            raise UserError(
                "the loss in chunks is planned for a head without bias and soft-capping: leave --loss-chunks out"
            )

    @property
    def local_len(self) -> int:
        """Tokens of a sequence on a rank."""
        return self.seq_len // self.context.size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.batch_size * self.local_len

    @property
    def heads(self) -> Heads:
        """A rank's heads of attention, and the sequences they attend over."""
        shape, ranks = self.shape, self.tp_degree
        return Heads(
            self.batch_size, shape.num_attention_heads // ranks, shape.num_key_value_heads // ranks, self.local_len
        )

    @property
    def exchanged(self) -> Context:
        """The context group, with what its ranks exchange."""
        heads, shape = self.heads, self.shape
        return replace(
            self.context,
            numel=heads.rows * shape.head_dim,
            kv_numel=heads.batch_size * heads.kv_heads * heads.seq_len * shape.head_dim,
            layers=len(self.stage),
            recomputed=sum(map(self.is_recomputed, self.stage)),
            frozen_keys=int(bool(self.lora) and self.stage.start == 0),
        )

    @property
    def unmodeled(self) -> str:
        """What of the operators is not modeled, see ``Blueprint.unmodeled``."""
        return self.shape.unmodeled

    @property
    def buffers(self) -> int:
        """Bytes of the buffers: routers' biases, if they balance experts."""
        experts = self.shape.experts
        return self.shape.num_hidden_layers * experts.count * FP32 if experts and experts.balance == "bias" else 0

    @property
    def exchange(self) -> tensor_parallel.Exchange:
        """What the ranks of a tensor group exchange."""
        shape, recomputed = self.shape, sum(map(self.is_recomputed, self.stage))
        sizes = shape.num_hidden_layers, self.tokens, shape.hidden_size
        return tensor_parallel.exchange(self.tp_degree, *sizes, recomputed)

    def is_recomputed(self, block: int) -> bool:
        """Return whether a block is recomputed in backward."""
        return self.recompute != "none" and block % self.recompute_every == 0

    def blueprint(self) -> Blueprint:
        """Return the modules of this rank, with batch and loss."""
        shape, stage = self.shape, self.stage
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
            tensor_parallel=self.exchange,
            context=self.exchanged,
            spread=self.spread,
            period=self.period,
            boundary_numel=self.tokens * shape.hidden_size,
            unmodeled=self.unmodeled,
            buffers=self.buffers,
            offloaded_inputs=sum(map(self.is_recomputed, stage)) if self.offload_activations else 0,
        )

    @property
    def period(self) -> int:
        """See ``Blueprint.period``: no block is like another if each has rows of its own."""
        if self.spread.routing and not self.spread.routing.uniform:
            return self.shape.num_hidden_layers
        return lcm(self.shape.period, self.recompute_every if self.recompute != "none" else 1)

    @property
    def spread(self) -> Spread:
        """How the experts are spread over ranks; by default each token is expected to choose uniformly."""
        settings = self.shape.experts
        if not settings or self.shape.library:
            return Spread()
        routing = self.routing or expected(settings, self.batch_size, self.local_len)
        recomputed = tuple(map(self.is_recomputed, self.stage))
        return Spread(self.ep_degree, settings, routing, self.shape.hidden_size, self.batch_size, recomputed)

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
        parameters |= dict(shape.other_parameters)
        return self.module("embedding", parameters, self.embedding, wrapped=self.wrap_embeddings)

    def block_module(self, number: int) -> AbstractModule:
        """Return a block."""
        shape = self.shape
        parameters = block_parameters(shape, self.lora, self.tp_degree, number)
        options = {"wrapped": True, "active": active_shares(shape, parameters)}
        if self.ep_degree > 1:
            own = {
                name: (size[0] // self.ep_degree, *size[1:])
                for name, size in parameters.items()
                if name in options["active"]
            }
            parameters |= own
            options["spread"] = frozenset(own)
        if shape.layer(number).query_size != 0:
            options["heads"] = self.heads
        if self.quantized and self.lora:
            matrices = (n for n, size in parameters.items() if len(size) > 1 and not n.endswith((".down", ".up")))
            options["quantized"] = frozenset(matrices)
        if not self.is_recomputed(number):
            return self.module(f"block {number}", parameters, partial(self.block, number=number), **options)
        options["recomputed"] = flops.recomputed_operations(shape, self.recompute, self.lora, number)
        return self.module(f"block {number}", parameters, partial(self.checkpointed_block, number=number), **options)

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
        return self.positions(tape, tensor_parallel.scatter(tape, x, self.tp_degree, self.batch_size), p)

    def positions(self, tape, x, _):
        """Make the tables of cosines and sines, (length, head dimension) each, and return x."""
        size = self.local_len * self.shape.head_dim, x.itemsize
        tape.rope_tables = [tape.constant(name, *size) for name in ("cosines", "sines")]
        return x

    def checkpointed_block(self, tape, x, p, number):
        """Run ``block`` under activation checkpointing."""
        return tape.checkpoint(
            partial(self.block, tape, p=p, number=number), x, self.recompute, self.offload_activations
        )

    def block(self, tape, x, p, number):
        """Add attention and feed-forward layer to x (batch, length, hidden size). All blocks do the same."""
        attended = tape.add(x, self.sublayer(tape, x, p, "attention", number), "after attention")
        return tape.add(attended, self.sublayer(tape, attended, p, "feed_forward", number), "block's output")

    def sublayer(self, tape, x, p, name, number):
        """Apply norm and layer; a tensor group gathers the tokens in between, and sums and scatters the output."""
        layer = {"attention": self.attention, "feed_forward": self.feed_forward}[name]
        x = tensor_parallel.gather(tape, _norm(tape, x, p, f"{name}_norm"), self.tp_degree, self.batch_size)
        if name == "feed_forward" and self.shape.experts:
            return self.mixture(tape, x, p, number)
        return tensor_parallel.scatter(tape, layer(tape, x, p), self.tp_degree, self.batch_size)

    def attention(self, tape, x, p):
        """Attend causally over x (batch, length, hidden size), with rotary positions."""
        heads = self.heads
        projected = (_projection(tape, x, p, name) for name in ("query", "key", "value"))
        query, key, value = (tape.split_heads(projection, heads) for projection in projected)
        rotated_query, rotated_key = tape.apply_rope(query, "query"), tape.apply_rope(key, "key")
        del query, key
        if self.context.size > 1:
            mixed = context_parallel.attend(tape, rotated_query, rotated_key, value, heads, self.context)
        else:
            mixed = tape.attention(rotated_query, rotated_key, value, heads)
        return tape.linear(tape.join_heads(mixed, heads), p["output.weight"], p.get("output.bias"))

    def feed_forward(self, tape, x, p):
        """Compute down(silu(gate(x)) · up(x))."""
        linear = partial(_linear, tape, p)
        return linear("down", tape.multiply(tape.silu(linear("gate", x)), linear("up", x)))

    def mixture(self, tape, x, p, number):
        """Compute a few experts for each token, and the shared one for all."""
        experts = self.shape.experts
        shared = partial(self.shared_expert, tape, p) if experts and experts.shared_size else None
        return mixture.mixture(tape, x, p, number, self.spread, shared)

    def shared_expert(self, tape, p, x):
        """Compute the expert that every token uses."""
        own = {name.removeprefix("shared."): parameter for name, parameter in p.items() if name.startswith("shared.")}
        return self.feed_forward(tape, x, own)

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
        return _linear(tape, p, "head", x)

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
