# SPDX-License-Identifier: BSD-3-Clause
"""The operators of the course's networks, on sizes: each one's allocations, saved tensors, and backward.

They agree with PyTorch's on the CPU, and with those that it chooses for a GPU, to within a few elements. No torch.

Sources: PyTorch's derivatives.yaml (what is saved), autocast's lists of operators (what is cast), and traces of real
steps (labkit/measuring/trace.py).
"""

from collections.abc import Callable
from functools import partial

from planner.ops import attention, norms, quantization
from planner.ops.attention import Heads
from planner.ops.autograd import (
    FP32,
    INT64,
    AbstractParameter,
    AbstractTensor,
    Autograd,
    CheckpointFrame,
    Saved,
    Storage,
)


class CastParameter(AbstractTensor):
    """A parameter in autocast's number format. Its backward casts the gradient back, for the parameter."""

    __slots__ = ("name", "shape", "trained")
    quantized = False

    def __init__(self, parameter: AbstractParameter, storage: Storage, itemsize: int):
        super().__init__(storage, parameter.numel, itemsize)
        self.name, self.shape, self.trained = parameter.name, parameter.shape, parameter.trained


def output_name(weight) -> str:
    """Return the name of a layer's output: "gate's output" for gate.weight."""
    return f"{weight.name.removesuffix('.weight')}'s output"


class Tape(Autograd):
    """Record operators: each makes its output, and states what its backward needs and makes, and in which order.

    An operator remembers its inputs' nodes and sizes, never the inputs: what autograd does not save must be freed. An
    output that depends on nothing trained gets no backward, and nothing is saved for it. A tensor here is a number of
    elements and their size; where a docstring gives shapes, they are those of the operator's tensors in PyTorch.
    """

    saves_after_output = False  # whether a linear layer saves its operands after it has made its output

    def __init__(self, fused=False, autocast: int | None = None, workspaces=False, torch: tuple[int, int] = (2, 15)):
        """Start with nothing alive.

        Args:
            fused: take a GPU's kernels, where a norm and its backward are one operator each.
            autocast: bytes per element in which autocast computes matmuls; None: there is no autocast.
            workspaces: count what these kernels allocate inside them.
            torch: PyTorch's version, for its choice of attention.
        """
        super().__init__()
        self.fused, self.autocast, self.workspaces, self.torch = fused, autocast, workspaces, torch
        self.casts = {}  # parameter → its CastParameter, which autocast caches until it ends, if it is trained
        self.norm_gradients_in_fp32 = False  # whether a norm's weight gets its gradient as it is computed
        self.flash = True  # whether the GPU runs flash attention
        self.micro_batch = 0  # that runs, counted from 0
        self.experts_unit: Callable | None = (
            None  # runs a rank's experts, with the hooks of their unit: see Step.run_nested
        )
        self.casts_inputs = False  # whether FSDP casts what a block takes to the format that it computes in

    def recompute(self, frame: CheckpointFrame):
        """Run a checkpointed call again, under an autocast of its own."""
        super().recompute(frame)
        self.casts = {}

    def to(self, x: AbstractTensor, itemsize: int, name: str = "cast") -> AbstractTensor:
        """Cast to a number format of ``itemsize`` bytes per element; return x itself if that is its own."""
        if x.itemsize == itemsize:
            return x
        out = self.make(name, x.numel, itemsize)
        return self.record_unary(x, out, f"gradient of {name}")

    def record_unary(self, x: AbstractTensor, out: AbstractTensor, name: str, saved=()) -> AbstractTensor:
        """Return ``out`` with a backward that makes one new gradient, of x's size, for x.

        Args:
            x: the operator's input.
            out: its output.
            name: of the gradient.
            saved: what backward needs, from ``save``.
        """
        node, numel, itemsize = x.node, x.numel, x.itemsize
        if node is None:
            return out
        return self.record(out, lambda _: [(node, self.make(name, numel, itemsize))], saved)

    def embedding(self, tokens: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
        """Look up tokens (…,) in weight (vocabulary, hidden size) → (…, hidden size). Saves the tokens."""
        out = self.make("embedding", tokens.numel * weight.shape[1], weight.itemsize)
        if not weight.trained:
            return out
        self.count_use(weight)
        return self.record(out, lambda _: [(weight, self.gradient_of(weight))], self.save(tokens))

    def position_embedding(self, x: AbstractTensor, table: AbstractParameter, count: int) -> AbstractTensor:
        """Look up the first ``count`` rows of a table (rows, hidden size), in x's format. Saves their indices."""
        self.count_use(table)
        indices = self.constant("indices of positions", count, INT64)
        out = self.make("positions", count * table.shape[1], x.itemsize)
        return self.record(out, lambda _: [(table, self.gradient_of(table))], self.save(indices))

    def cast(self, parameter: AbstractParameter) -> AbstractParameter | CastParameter:
        """Return a parameter in autocast's number format; itself without autocast."""
        if not self.autocast:
            return parameter
        if parameter not in self.casts:
            out = self.cast_to(parameter, self.autocast)
            if not parameter.trained:
                return out
            self.casts[parameter] = out
        return self.casts[parameter]

    def cast_to(self, parameter: AbstractParameter, itemsize: int) -> CastParameter:
        """Return a parameter cast to a number format of ``itemsize`` bytes per element."""
        name = f"{parameter.name} in {'bf16' if itemsize == 2 else 'fp32'}"
        storage = self.make(name, parameter.numel, itemsize, per_sample=False).storage
        out = CastParameter(parameter, storage, itemsize)
        if not parameter.trained:
            return out
        self.count_use(parameter)
        return self.record(out, lambda _: [(parameter, self.gradient_of(parameter))])

    def _in_one_format(self, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter | None):
        """Return a layer's operands in one format: autocast casts all three, the last first; FSDP has cast parameters."""
        cast_bias, cast_weight = bias and self.cast(bias), self.cast(weight)
        return self.to(x, cast_weight.itemsize), cast_weight, cast_bias

    def gradient_target(self, weight: AbstractParameter | CastParameter) -> tuple:
        """Return (the receiver of a weight's gradient, a function that makes the gradient)."""
        if isinstance(weight, CastParameter):
            name = f"gradient of {weight.name}"
            return weight.node, partial(self.make, name, weight.numel, weight.itemsize, per_sample=False)
        self.count_use(weight)
        return weight, partial(self.gradient_of, weight)

    def _save_operands(self, x: AbstractTensor, weight) -> list[Saved]:
        """Save each operand of a matmul for the other's gradient. (A parameter is alive anyway.)"""
        saved_weight = [weight] if isinstance(weight, CastParameter) and x.node else []
        return self.save(*([x] if weight.trained else []), *saved_weight)

    def linear(
        self, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter | None = None
    ) -> AbstractTensor:
        """Compute x @ weight.T + bias of x (…, in) and weight (out, in) → (…, out). Saves x."""
        if weight.quantized:
            return self._linear_4bit(self.to(x, self.autocast or x.itemsize), weight)
        x, used, used_bias = self._in_one_format(x, weight, bias)
        outs, ins = weight.shape
        rows, itemsize = x.numel // ins, x.itemsize
        saved = [] if self.saves_after_output else self._save_operands(x, used)
        out = self.maybe_saved(lambda: [self.make(output_name(used), rows * outs, itemsize)], is_linear=True)[0]
        if self.saves_after_output:
            saved = self._save_operands(x, used)
        return self.record_layer(x, out, used, used_bias, saved)

    def _linear_4bit(self, x: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
        """Compute x @ weight.T with a frozen weight in 4 bits, dequantized for this matmul and again for its backward's.

        Saves nothing. Source: bitsandbytes/autograd/_functions.py, MatMul4Bit; functional.py, dequantize_4bit.
        """
        numel, itemsize, node, name, size = x.numel, x.itemsize, x.node, weight.name, weight.numel
        outs, ins = weight.shape

        def dequantize():
            largest = self.make(f"{name}: largest of each block", quantization.nf4_blocks(size), FP32)
            dequantized = self.make(f"{name}, dequantized", size, itemsize)
            del largest
            return dequantized

        def compute():
            dequantized = dequantize()
            out = self.make(name, numel // ins * outs, itemsize)
            del dequantized
            return [out]

        def run(_):
            dequantized = dequantize()
            of_input = self.make(f"gradient of {name}'s input", numel, itemsize)
            del dequantized
            return [(node, of_input)]

        out = self.maybe_saved(compute, is_linear=True)[0]
        return self.record(out, run) if node else out

    def convolution(
        self, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter, positions: int
    ) -> AbstractTensor:
        """Convolve x (images, in, height, width) with weight (out, in, 3, 3) → (images, out, height', width').

        Saves x and weight.

        Args:
            x: the input.
            weight: the kernels.
            bias: (out,).
            positions: images × height' × width'.
        """
        x, used, used_bias = self._in_one_format(x, weight, bias)
        saved = self.save(x, *([used] if isinstance(used, CastParameter) else []))  # a parameter is alive anyway
        out = self.make(output_name(used), positions * weight.shape[0], x.itemsize)
        return self.record_layer(x, out, used, used_bias, saved)

    def record_layer(
        self,
        x: AbstractTensor,
        out: AbstractTensor,
        weight: AbstractParameter | CastParameter,
        bias: AbstractParameter | CastParameter | None,
        saved: list[Saved],
    ) -> AbstractTensor:
        """Return a layer's output with a backward that makes the gradients of weight, bias, and input."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        leaves = [self.gradient_target(leaf) for leaf in (weight, bias) if leaf and leaf.trained]
        if not leaves and node is None:
            return out
        of_input = f"gradient of {weight.name}'s input"

        def run(_):
            made = [(receiver, make()) for receiver, make in leaves]
            if node:
                made.append((node, self.make(of_input, numel, itemsize)))
            return made

        return self.record(out, run, saved)

    def add(self, x: AbstractTensor, y: AbstractTensor, name: str = "sum") -> AbstractTensor:
        """Add elementwise, in the larger of two number formats; each input's gradient is in its own. Saves nothing."""
        inputs = [(tensor.node, tensor.numel, tensor.itemsize) for tensor in (x, y) if tensor.node]
        out = self.make(name, x.numel, max(x.itemsize, y.itemsize))

        def run(gradient):
            return [
                (node, gradient if itemsize == gradient.itemsize else self.make(f"gradient of {name}", numel, itemsize))
                for node, numel, itemsize in inputs
            ]

        return self.record(out, run) if inputs else out

    def multiply(self, x: AbstractTensor, y: AbstractTensor, name: str = "product") -> AbstractTensor:
        """Multiply elementwise. Saves each factor for the other's gradient."""
        nodes, numel, itemsize = [node for node in (x.node, y.node) if node], x.numel, x.itemsize
        saved = self.save(*([y] if x.node else []), *([x] if y.node else []))

        def run(_):
            return [(node, self.make(f"gradient of {name}", numel, itemsize)) for node in nodes]

        out = self.like(x, name)
        return self.record(out, run, saved) if nodes else out

    def silu(self, x: AbstractTensor, name: str = "silu") -> AbstractTensor:
        """Apply SiLU, GELU, or another such activation elementwise. Saves its input."""
        saved = self.save(x) if x.node else []
        return self.record_unary(x, self.like(x, name), f"gradient of {name}", saved)

    def tanh(self, x: AbstractTensor, name: str = "tanh") -> AbstractTensor:
        """Apply tanh elementwise. Saves its output."""
        out = self.like(x, name)
        return self.record_unary(x, out, f"gradient of {name}'s input", self.save(out))

    def relu(self, x: AbstractTensor, name: str = "relu") -> AbstractTensor:
        """Apply ReLU elementwise. Saves its output, which the next operator often saves too."""
        out = self.like(x, name)
        return self.record_unary(x, out, f"gradient of {name}", self.save(out))

    def max_pool(self, x: AbstractTensor, numel: int) -> AbstractTensor:
        """Pool x (images, channels, height, width) to ``numel`` elements. Saves its input, and an index for each element."""
        saved = self.save(x)
        out, indices = self.make("pooled", numel, x.itemsize), self.make("pooling's indices", numel, INT64)
        return self.record_unary(x, out, "gradient of pooling's input", saved + self.save(indices))

    def dropout(self, x: AbstractTensor, name: str) -> AbstractTensor:
        """Drop elements. Saves a mask: on the CPU of the input's size, on a GPU one byte per element."""
        mask = self.make(f"{name}'s mask", x.numel, 1 if self.fused else x.itemsize)
        saved = self.save(mask)
        return self.record_unary(x, self.like(x, name), f"gradient of {name}", saved)

    def log_softmax(self, x: AbstractTensor) -> AbstractTensor:
        """Compute the log-softmax of x (rows, classes), under autocast in fp32 at least. Saves its output."""
        x = self.to(x, FP32 if self.autocast else x.itemsize)
        out = self.like(x, "log-softmax")
        return self.record_unary(x, out, "gradient of log-softmax's input", self.save(out))

    def nll_loss(self, x: AbstractTensor, targets: AbstractTensor) -> AbstractTensor:
        """Return minus the mean of the targets' log-probabilities: a scalar, of x (rows, classes) and targets (rows,).

        Saves both, and the targets' total weight, another scalar.
        """
        saved = self.save(x, targets)
        out, weight = self.make("loss", 1, x.itemsize), self.make("loss: weight", 1, x.itemsize)
        return self.record_unary(x, out, "gradient of log-softmax", saved + self.save(weight))

    def divide(self, x: AbstractTensor, name: str) -> AbstractTensor:
        """Divide by a constant. Saves nothing."""
        return self.record_unary(x, self.like(x, name), f"gradient of {name}")

    def pass_on(self, x: AbstractTensor, name: str) -> AbstractTensor:
        """Add a constant, or copy: the gradient is passed on. Saves nothing."""
        node, out = x.node, self.like(x, name)
        return self.record(out, lambda gradient: [(node, gradient)]) if node else out

    def concatenate(self, parts: list[AbstractTensor], name: str) -> AbstractTensor:
        """Concatenate tensors; backward views the gradient. Saves nothing."""
        nodes = [(part.node, part.numel) for part in parts if part.node]
        out = self.make(name, sum(part.numel for part in parts), max(part.itemsize for part in parts))

        def run(gradient):
            return [(node, self.view(gradient, numel)) for node, numel in nodes]

        return self.record(out, run) if nodes else out

    def rms_norm(self, x: AbstractTensor, weight: AbstractParameter) -> AbstractTensor:
        """Compute x · 1/rms(x) · weight of x (…, features) and weight (features,): see ``norms.rms_norm``."""
        return norms.rms_norm(self, x, weight)

    def layer_norm(self, x: AbstractTensor, weight: AbstractParameter, bias: AbstractParameter) -> AbstractTensor:
        """Normalize x (…, features) with weight and bias (features,): see ``norms.layer_norm``."""
        return norms.layer_norm(self, x, weight, bias)

    def apply_rope(self, x: AbstractTensor, name: str, tables=None) -> AbstractTensor:
        """Rotate x (batch, heads, length, head dimension) by its positions: see ``attention.apply_rope``."""
        return attention.apply_rope(self, x, name, tables)

    def view(self, x: AbstractTensor, numel: int | None = None) -> AbstractTensor:
        """Return x's storage, or ``numel`` elements of it, as another tensor that can have a backward of its own."""
        return AbstractTensor(x.storage, x.numel if numel is None else numel, x.itemsize)

    def part(self, x: AbstractTensor, numel: int, name: str) -> AbstractTensor:
        """View ``numel`` elements of x by indexing; backward makes a gradient of all of x, with zeros."""
        return self.record_unary(x, self.view(x, numel), f"gradient of {name}, among zeros")

    def split(self, x: AbstractTensor, numels: list[int], name: str) -> list[AbstractTensor]:
        """View x as parts with ``numels`` elements; backward concatenates their gradients."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        parts, gradients = [self.view(x, size) for size in numels], []
        if node is None:
            return parts

        def join(_):
            joined = self.make(f"gradient of {name}, joined", numel, itemsize)
            gradients.clear()
            return [(node, joined)]

        self.record(self.view(x), join)
        return [self.record(part, gradients.append) for part in parts]

    def split_heads(self, x: AbstractTensor, heads: Heads) -> AbstractTensor:
        """View x (batch, length, heads · dimension) as (batch, heads, length, dimension).

        The math kernel returns gradients head by head, so that their backward copies.
        """
        if self._attention_kernel(x.itemsize, heads) != "math":
            return x
        return self.record_unary(x, self.view(x), "gradient of heads, joined")

    def attention(
        self,
        query: AbstractTensor,
        key: AbstractTensor,
        value: AbstractTensor,
        heads: Heads,
        mask: AbstractTensor | None = None,
    ) -> AbstractTensor:
        """Compute causal attention with the kernel that PyTorch chooses.

        Args:
            query: (batch, query heads, length, head dimension).
            key: (batch, kv heads, length, head dimension).
            value: as key.
            heads: these sizes.
            mask: (length, length), booleans; then heads must not be grouped.

        Returns:
            As query.
        """
        query, key, value = (self.to(tensor, self.autocast or tensor.itemsize) for tensor in (query, key, value))
        if mask:
            added = self.make("attention: mask", heads.batch_size * mask.numel, query.itemsize)
            return attention.fused(self, "efficient" if self.fused else "cpu", query, key, value, heads, added)
        kernel = self._attention_kernel(query.itemsize, heads)
        if kernel == "math":
            return attention.math(self, query, key, value, heads)
        return attention.fused(self, kernel, query, key, value, heads)

    def join_heads(self, x: AbstractTensor, heads: Heads) -> AbstractTensor:
        """View x (batch, heads, length, dimension) as (batch, length, heads · dimension); the math kernel's output is copied."""
        if self._attention_kernel(x.itemsize, heads) != "math":
            return x
        out, node = self.like(x, "attention, heads joined"), x.node
        return self.record(out, lambda gradient: [(node, gradient)]) if node else out

    def _attention_kernel(self, itemsize: int, heads: Heads) -> str:
        return attention.kernel(self.fused, itemsize, heads.grouped, self.torch, self.flash)
