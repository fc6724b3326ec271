# SPDX-License-Identifier: BSD-3-Clause
"""Third-party models as blueprints: what the modules of Hugging Face's transformers compute, operator by operator.

Compared with steps of the library's own code, with the CPU's kernels (tests/test_families.py). Imports no torch.
"""

from dataclasses import replace
from functools import partial

from planner import UserError
from planner.models.gpt import GPT
from planner.models.shapes import Experts
from planner.ops import attention, experts, norms, tensor_parallel
from planner.ops.autograd import FP32
from planner.ops.tensor_parallel import Exchange

# Activations that are one operator, and save its input
ONE_STEP = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")


class LibraryGPT(GPT):
    """A third-party transformer, trained in a given way."""

    def __post_init__(self):
        self.check_loss()
        self.shape.check_split_heads(self.tp_degree)
        if self.loss_chunks > 1 and "logits" in self.shape.scales:
            raise UserError("the loss in chunks is not planned for a model that scales its logits: leave it out")
        if self.lora and (self.shape.latent or self.shape.unmodeled):
            raise UserError("adapters are not planned for this family's attention: leave --lora out")

    @property
    def unmodeled(self) -> str:
        shape = self.shape
        if shape.activation not in (*ONE_STEP, "gelu_new"):
            return f"the activation {shape.activation}"
        if shape.latent:
            return "multi-head latent attention"
        if shape.experts and shape.experts.router not in ("softmax", "sigmoid"):
            return "experts that this router chooses"
        return shape.unmodeled or (self.unsplit if self.tp_degree > 1 else "")

    @property
    def unsplit(self) -> str:
        """Why tensor parallelism is not modeled, which is that of transformers' plan for the family; "": it is."""
        shape = self.shape
        if shape.fused or shape.learned_positions or shape.qk_norm == "projection":
            return "the tensor-parallel plan of this family"
        experts = [shape.experts.intermediate_size, shape.experts.shared_size] if shape.experts else []
        if any(size % self.tp_degree for size in (shape.vocab_size, shape.intermediate_size, *experts)):
            return f"layers that {self.tp_degree} ranks cannot divide evenly"
        return ""

    @property
    def splits_shared(self) -> bool:
        """Whether a tensor group splits the shared expert; transformers' plan leaves one with a gate as it is."""
        return bool(self.shape.experts) and not self.shape.experts.gates_shared

    def split_by(self, name: str) -> str:
        """Return how a tensor group splits a layer's weight: by "columns" (of the output), by "rows", or not at all, "".

        Source: the models' base_model_tp_plan, and transformers/distributed/tensor_parallel.py.
        """
        if name.startswith("shared."):
            name = name.removeprefix("shared.") if self.splits_shared else ""
        if name in ("query", "key", "value", "gate", "up", "head"):
            return "columns"
        return "rows" if name in ("output", "down") else ""

    @property
    def exchange(self) -> Exchange:
        """What the ranks of a tensor group exchange: all-reduces around each layer, and the logits."""
        if self.tp_degree == 1:
            return Exchange()
        shape, tokens, experts = self.shape, self.tokens, self.shape.experts
        of_matmuls, others, routed = 0, 2, 0  # others: the embedding's output, and the gradient of the head's input
        for number in self.stage:
            repeated = 2 if self.is_recomputed(number) else 1
            ends_with_norm = shape.norms in ("after", "around")  # which needs the last layer's output, recomputed
            last = repeated if ends_with_norm else 1
            of_matmuls += repeated  # attention's output
            others += 3  # gradients of the inputs of query, key, and value
            if shape.layer(number).routed:
                has_shared = bool(experts and experts.shared_size)
                routed += 1
                others += 1 + (repeated if has_shared else last)
                if has_shared and self.splits_shared:
                    of_matmuls, others = of_matmuls + last, others + 2
            else:
                of_matmuls, others = of_matmuls + last, others + (2 if shape.gated else 1)
        return Exchange(
            self.tp_degree,
            numel=tokens * shape.hidden_size,
            matmul_sums=of_matmuls,
            sums=others,
            logits=tokens * shape.vocab_size,
            routing_weights=tokens * experts.top_k if experts and routed else 0,
            routing_in_fp32=bool(experts and routed and experts.weighs_in_fp32),
            routing_sums=routed,
        )

    def module(self, name, parameters, forward, **options):
        module = super().module(name, parameters, forward, **options)
        return replace(module, replicated=frozenset(filter(self.is_replicated, parameters)))

    def is_replicated(self, parameter: str) -> bool:
        """Return whether every rank of a tensor group has a parameter whole."""
        layer, _, kind = parameter.rpartition(".")
        if layer in ("embedding", "experts.gate_up", "experts.down"):
            return False
        return self.split_by(layer) == "" or (self.split_by(layer) == "rows" and kind == "bias")

    @property
    def buffers(self) -> int:
        """Bytes of the buffers: frequencies of rotary positions, twice; the biases by which sigmoid routers choose."""
        shape = self.shape
        if shape.learned_positions:
            return 0
        kinds = {shape.layer(number).windowed for number in range(shape.num_hidden_layers)}
        frequencies = min(len(kinds), shape.rotary_tables) * 2 * (self.rotary_dim // 2) * FP32
        routed = sum(shape.layer(number).routed for number in range(shape.num_hidden_layers))
        chosen = routed * shape.experts.count * FP32 if shape.experts and shape.experts.router == "sigmoid" else 0
        return frequencies + chosen + shape.other_buffers

    def embedding(self, tape, x, p):
        """Embed tokens (batch, length) → (batch, length, hidden size)."""
        x = tensor_parallel.embedding(tape, x, p["embedding.weight"], self.tp_degree)
        x = tensor_parallel.summed(tape, x, self.tp_degree)
        if "embedding" in self.shape.scales:
            x = tape.divide(x, "embedding, scaled")
        if self.shape.learned_positions:
            positions = tape.position_embedding(x, p["positions.weight"], self.seq_len)
            x = tape.add(x, positions, "embedding, with positions")
        if "embedding" in self.shape.dropout:
            x = tape.dropout(x, "embedding, dropped")
        return self.positions(tape, x, p)

    def positions(self, tape, x, _):
        """Make the tables of cosines and sines, and the mask of windows, which all blocks take; return x."""
        shape, seq_len = self.shape, self.seq_len
        matrix, windowed = seq_len * seq_len, {shape.windowed(number, seq_len) for number in self.stage}
        constants = {False: {}, True: {}}  # of layers without and with a window
        if shape.attention != "fused":
            size = self.batch_size * matrix, x.itemsize
            constants[False]["mask"] = tape.constant("mask", *size)
            constants[True]["mask"] = tape.constant("mask of windows", *size)
        elif True in windowed:
            constants[True]["mask"] = tape.constant("mask of windows", matrix, 1)
        if not shape.learned_positions:
            size = seq_len * self.rotary_dim, max(FP32, x.itemsize) if "tables" in shape.in_fp32 else x.itemsize
            for own in (constants[False], constants[True])[: shape.rotary_tables]:
                own["tables"] = [tape.constant(name, *size) for name in ("cosines", "sines")]
            if shape.rotary_tables == 1:
                constants[True]["tables"] = constants[False]["tables"]
        tape.rope_tables = constants
        return x

    def block_module(self, number):
        module = super().block_module(number)
        return replace(
            module, forward=partial(self.with_own_constants, module.forward, self.shape.layer(number).windowed)
        )

    def with_own_constants(self, forward, windowed, tape, x, p):
        """Run a block with only the constants that it takes, which activation checkpointing holds. FSDP casts its tables."""
        everything = tape.rope_tables
        own = dict(everything[windowed])
        if tape.casts_inputs and "tables" in own:
            own["tables"] = [tape.to(table, x.itemsize, "cosines or sines, cast") for table in own["tables"]]
        tape.rope_tables = {windowed: own}
        del own
        out = forward(tape, x, p)
        tape.rope_tables = everything
        return out

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that positions rotate."""
        return int(self.shape.head_dim * self.shape.rotary_share)

    @property
    def rotates_in_part(self) -> bool:
        """Whether the part of a head that positions rotate is cut out; Phi-3 does so even if it is all of it."""
        return self.shape.rotary_share < 1 or "gate_up" in self.shape.fused

    def block(self, tape, x, p, number):
        """Add attention and feed-forward layer to x (batch, length, hidden size).

        Raises:
            UserError: its operators are not modeled.
        """
        if self.unmodeled:
            raise UserError(f"no peak is planned by arithmetic for {self.unmodeled}: simulate it with --simulate")
        norm = partial(self.norm, tape, p)
        attend = self.dropping(tape, partial(self.attention, tape, p=p, number=number), "attention")
        routed = self.shape.layer(number).routed
        feed = self.dropping(
            tape, partial(self.experts if routed else self.feed_forward, tape, p=p), "feed-forward layer"
        )
        placed = self.shape.norms
        if placed == "shared":
            normal = norm("attention_norm", x)
            attended, fed = attend(normal), feed(normal)
            del normal
            return tape.add(x, tape.add(attended, fed, "both layers"), "block's output")
        if placed == "parallel":
            attended = attend(norm("attention_norm", x))
            fed = feed(norm("feed_forward_norm", x))
            return tape.add(x, tape.add(attended, fed, "both layers"), "block's output")
        x = self.with_layer(tape, p, x, "attention", attend, "after attention")
        return self.with_layer(tape, p, x, "feed_forward", feed, "block's output")

    def dropping(self, tape, layer, name):
        """Return a layer that drops elements of its output, if the model does."""
        return (lambda x: tape.dropout(layer(x), name)) if "residual" in self.shape.dropout else layer

    def with_layer(self, tape, p, x, name, layer, out):
        """Return x plus what a layer computes of it, with the norms before and after."""
        placed = self.shape.norms
        y = x if placed == "after" else self.norm(tape, p, f"{name}_norm", x)
        y = layer(y)
        if placed in ("after", "around"):
            y = self.norm(tape, p, f"after_{name}_norm", y)
        if "residual" in self.shape.scales:
            y = tape.divide(y, f"{name}, scaled")
        return tape.add(x, y, out)

    def norm(self, tape, p, name, x):
        """Normalize x (…, features)."""
        weight = p[f"{name}.weight"]
        if self.shape.norm == "layer" and f"{name}.bias" in p:
            return tape.layer_norm(x, weight, p[f"{name}.bias"])
        if self.shape.norm == "unbiased layer":
            return norms.layer_norm_in_steps(tape, x, weight)
        plus_one = self.shape.norm == "rms plus one"
        return norms.rms_norm_in_steps(tape, x, weight, "norm" in self.shape.in_fp32, plus_one)

    def linear(self, tape, p, name, x):
        """Apply a linear layer; those of a tensor group are split by rows or by columns."""
        split, ranks = self.split_by(name), self.tp_degree
        x = tensor_parallel.replicated(tape, x, ranks) if split == "columns" else x
        out = tape.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
        return tensor_parallel.summed(tape, out, ranks) if split == "rows" else out

    def attention(self, tape, x, p, number):
        """Attend causally over x (batch, length, hidden size)."""
        shape, heads = self.shape, self.heads
        query, key, value = self.projections(tape, x, p)
        del x
        if shape.qk_norm in ("head", "projection"):
            query, key = self.norm(tape, p, "query_norm", query), self.norm(tape, p, "key_norm", key)
        if shape.layer(number).rotary and not shape.learned_positions:
            tables = tape.rope_tables[shape.layer(number).windowed]["tables"]
            rotated_query = self.rotate(tape, query, "query", tables)
            rotated_key = self.rotate(tape, key, "key", tables)
            query, key = rotated_query, rotated_key
            del rotated_query, rotated_key
        if "query" in shape.scales:
            query = tape.divide(query, "query, scaled")
        mixed = self.mix(tape, query, key, value, number)
        del query, key, value
        if self.rotates_in_part:  # the output has the layout of the queries, which were concatenated head by head
            mixed = tape.pass_on(mixed, "attention, contiguous")
        return self.linear(tape, p, "output", tape.join_heads(mixed, heads))

    def projections(self, tape, x, p):
        """Return queries, keys, and values, each (batch, heads, length, head dimension)."""
        shape, tokens = self.shape, self.tokens
        if "query_key_value.weight" not in p:
            return (self.projection(tape, x, p, name) for name in ("query", "key", "value"))
        together = self.linear(tape, p, "query_key_value", x)
        names = ("query", "key", "value")
        numels = [tokens * size for size in (shape.query_size, shape.key_value_size, shape.key_value_size)]
        if "gate_up" in shape.fused:  # Phi-3 indexes
            return [tape.part(together, numel, name) for numel, name in zip(numels, names, strict=True)]
        return tape.split(together, numels, "query, key, value")

    def projection(self, tape, x, p, name):
        """Apply a linear layer, with its adapter if it has one."""
        out = self.linear(tape, p, name, x)
        if f"{name}.down" not in p:
            return out
        return tape.add(out, tape.linear(tape.linear(x, p[f"{name}.down"]), p[f"{name}.up"]), f"{name}, adapted")

    def rotate(self, tape, x, name, tables):
        """Rotate the first elements of each head of x by their positions, or all."""
        itemsize = x.itemsize
        if not self.rotates_in_part:
            if "rotary" in self.shape.in_fp32:
                x = tape.to(x, max(FP32, itemsize), f"{name} in fp32")
            return tape.to(tape.apply_rope(x, name, tables), itemsize, f"{name}, rotated")
        numel = x.numel // self.shape.head_dim * self.rotary_dim
        rotating, other = tape.part(x, numel, f"{name}, rotating"), tape.part(x, x.numel - numel, f"{name}, other")
        rotated = tape.apply_rope(rotating, name, tables)
        del rotating
        return tape.concatenate([rotated, other], f"{name}, rotated in part")

    def mix(self, tape, query, key, value, number):
        """Attend with queries, keys, and values, each (batch, heads, length, head dimension)."""
        shape, heads = self.shape, self.heads
        if shape.attention != "fused":
            return attention.in_steps(tape, query, key, value, heads, shape.attention == "softcapped")
        if not shape.windowed(number, self.seq_len):
            return tape.attention(query, key, value, heads)
        if heads.kv_heads == 1 < heads.query_heads:  # a single head is expanded, not copied
            key, value = (
                tape.record_unary(x, tape.view(x, query.numel), f"gradient of {of}")
                for x, of in ((key, "key"), (value, "value"))
            )
        elif heads.grouped:
            key = attention.repeat_kv(tape, key, query.numel, "key")
            value = attention.repeat_kv(tape, value, query.numel, "value")
        each = replace(heads, kv_heads=heads.query_heads)
        return tape.attention(query, key, value, each, tape.rope_tables[True]["mask"])

    def feed_forward(self, tape, x, p):
        """Compute down(activation(gate(x)) · up(x)); without a gate, down(activation(up(x)))."""
        linear = partial(self.linear, tape, p)
        if "gate_up" in self.shape.fused:
            both = linear("gate_up", x)
            gate, up = tape.split(both, [both.numel // 2] * 2, "gate, up")
            del both
            return linear("down", tape.multiply(up, tape.silu(gate)))
        if self.shape.gated:
            return linear("down", tape.multiply(tape.silu(linear("gate", x)), linear("up", x)))
        return linear("down", self.activation(tape, linear("up", x)))

    def experts(self, tape, x, p):
        """Compute the experts that the router chooses for each token, and the shared one."""
        # Only a block that has experts comes here.
        settings: Experts = self.shape.experts  # pyright: ignore[reportAssignmentType]
        shares_first = settings.gates_shared  # Qwen2-MoE computes the shared expert first, the others last
        shared = self.shared_expert(tape, x, p) if shares_first else None
        if settings.router == "sigmoid":  # in fp32
            rows = tape.to(x, max(FP32, x.itemsize), "router: input in fp32")
            weight = p["router.weight"]
            logits = tape.linear(rows, weight if weight.itemsize >= FP32 else tape.cast_to(weight, FP32))
            del rows, weight
        else:
            logits = self.linear(tape, p, "router", x)
        weights, indices = experts.choose(tape, logits, settings)
        gate_up, down = p["experts.gate_up.weight"], p["experts.down.weight"]
        out = experts.compute(tape, x, weights, indices, gate_up, down, self.shape.hidden_size)
        if shares_first:
            shared = self.gated(tape, x, p, shared)
        elif settings.shared_size:
            shared = self.shared_expert(tape, x, p)
        return tape.add(out, shared, "experts and shared expert") if shared else out

    def shared_expert(self, tape, x, p):
        """Compute the expert that every token uses."""
        linear = partial(self.linear, tape, p)
        product = tape.multiply(tape.silu(linear("shared.gate", x)), linear("shared.up", x))
        return linear("shared.down", product)

    def gated(self, tape, x, p, shared):
        """Weigh the shared expert's output by a number for each token."""
        gate = self.linear(tape, p, "shared_gate", x)
        gate = tape.tanh(gate, "shared gate: sigmoid")  # which saves its output, too
        return experts.weighed(tape, shared, gate)

    def activation(self, tape, x):
        """Apply the activation elementwise."""
        if self.shape.activation in ONE_STEP:
            return tape.silu(x, self.shape.activation)
        # gelu_new: 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))
        half = tape.divide(x, "gelu: x / 2")
        inner = tape.record_unary(x, tape.like(x, "gelu: x³"), "gelu: gradient of x³", tape.save(x))
        inner = tape.divide(inner, "gelu: x³, scaled")
        inner = tape.add(x, inner, "gelu: sum")
        inner = tape.divide(inner, "gelu: sum, scaled")
        inner = tape.tanh(inner, "gelu: tanh")
        inner = tape.pass_on(inner, "gelu: 1 + tanh")
        return tape.multiply(half, inner, "gelu")

    def last_modules(self) -> list:
        """Return the last norm and the head: one FSDP unit, unless transformers' plan leaves the norm to the root."""
        modules = super().last_modules()
        return modules if self.shape.norm_with_head else [replace(m, grouped_with_next=False) for m in modules]

    def last_norm(self, tape, x, p):
        """Normalize x (batch, length, hidden size)."""
        return self.norm(tape, p, "norm", x)

    def loss(self, tape, output, targets, itemsize):
        """Return the mean cross-entropy of the head's output, divided by the number of micro-batches."""
        if self.loss_chunks == 1:
            output = tape.nll_loss(tape.log_softmax(tape.to(output, itemsize, "logits")), targets)
        return tape.divide(output, "loss, divided by micro-batches")

    def head(self, tape, x, p):
        """Return logits (batch, length, vocabulary)."""
        if self.loss_chunks > 1:
            return super().head(tape, x, p)
        x = tensor_parallel.gather_columns(tape, self.linear(tape, p, "head", x), self.tp_degree)
        if "logits" in self.shape.scales:
            x = tape.divide(x, "logits, scaled")
        if self.shape.softcaps_logits:
            x = tape.divide(x, "logits / cap")
            x = tape.tanh(x, "tanh of logits")
            x = tape.divide(x, "logits, capped")
        return x
