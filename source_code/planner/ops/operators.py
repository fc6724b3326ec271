"""The operators of the course's networks, on sizes (planner/ops/autograd.py): what each makes, keeps, and does in backward.

They agree with PyTorch's on the CPU, and with those that it chooses for a GPU, to within a few numbers. Imports no torch.

Sources: PyTorch's derivatives.yaml (what is saved), autocast's lists of operators (what is cast), and traces of real
steps (labkit/measuring/trace.py).
"""

from functools import partial

from planner.ops import attention, norms, quantization
from planner.ops.attention import Heads
from planner.ops.autograd import FP32, INT64, Autograd, Saved, SizedParameter, SizedTensor, Storage


class Cast(SizedTensor):
    """A parameter in autocast's number format. Its backward casts the gradient back, for the parameter."""

    __slots__ = ("name", "shape", "trained")

    def __init__(self, parameter: SizedParameter, storage: Storage, itemsize: int):
        super().__init__(storage, parameter.numel, itemsize)
        self.name, self.shape, self.trained = parameter.name, parameter.shape, parameter.trained


def result_of(weight) -> str:
    """What a layer's result is called: "gate's result" of gate.weight."""
    return f"{weight.name.removesuffix('.weight')}'s result"


class Tape(Autograd):
    """Each operator makes its result and says what its backward needs, makes, and in which order.

    They remember their inputs' nodes and sizes, never the inputs: what autograd does not save must go. A result that
    depends on nothing trained gets no backward, and nothing is saved for it. A tensor here is so many numbers in so many
    bytes; where a docstring gives shapes, they are those of the operator's tensors in PyTorch.
    """

    saves_last = False  # whether a product keeps its factors after it has made its result

    def __init__(self, fused=False, autocast: int | None = None, workspaces=False, torch: tuple[int, int] = (2, 15)):
        """fused: a GPU's kernels, where a norm and its backward are one operator each.

        autocast: bytes per number in which autocast multiplies matrices; None: there is no autocast. workspaces: count
        what these kernels allocate inside them. torch: the version whose choice of attention it is.
        """
        super().__init__()
        self.fused, self.autocast, self.workspaces, self.torch = fused, autocast, workspaces, torch
        self.casts = {}  # parameter → its Cast: autocast keeps those of trained parameters until it is left
        self.wide_gradients = False  # whether a norm's weight gets its gradient as it is computed, in fp32

    def put_back(self, frame):
        super().put_back(frame)
        self.casts = {}  # recomputation has an autocast of its own

    def to(self, x: SizedTensor, itemsize: int, name: str = "cast") -> SizedTensor:
        """Another number format; nothing happens where it is the same."""
        if x.itemsize == itemsize:
            return x
        out = self.make(name, x.numel, itemsize)
        return self.passing_on(x, out, f"gradient of {name}")

    def passing_on(self, x: SizedTensor, out: SizedTensor, name: str, saved=()) -> SizedTensor:
        """Give ``out`` the backward that makes one new gradient, as big as ``x``, for ``x``."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        if node is None:
            return out
        return self.record(out, lambda _: [(node, self.make(name, numel, itemsize))], saved)

    def embedding(self, tokens: SizedTensor, weight: SizedParameter) -> SizedTensor:
        """Tokens (…,) and weight (vocabulary, width) → (…, width). Keeps the tokens."""
        out = self.make("embedding", tokens.numel * weight.shape[1], weight.itemsize)
        if not weight.trained:
            return out
        self.use(weight)
        return self.record(out, lambda _: [(weight, self.gradient_of(weight))], self.save(tokens))

    def rows(self, x: SizedTensor, table: SizedParameter, count: int) -> SizedTensor:
        """The first ``count`` rows of a table (rows, width), to be added to x: learned positions. Keeps their numbers."""
        self.use(table)
        numbers = self.given("numbers of positions", count, INT64)
        out = self.make("positions", count * table.shape[1], x.itemsize)
        return self.record(out, lambda _: [(table, self.gradient_of(table))], self.save(numbers))

    def cast(self, parameter: SizedParameter | None) -> SizedParameter | Cast | None:
        """A parameter as an operator gets it that autocast gives a narrower format; itself without autocast."""
        if parameter is None or not self.autocast:
            return parameter
        if parameter not in self.casts:
            name = f"{parameter.name} in bf16"
            out = Cast(
                parameter, self.make(name, parameter.numel, self.autocast, of_samples=False).storage, self.autocast
            )
            if not parameter.trained:
                return out
            self.use(parameter)
            self.casts[parameter] = self.record(out, lambda _: [(parameter, self.gradient_of(parameter))])
        return self.casts[parameter]

    def _in_one_format(self, x: SizedTensor, weight: SizedParameter, bias: SizedParameter | None):
        """What a product multiplies: autocast casts all three, the last first; FSDP has cast the parameters."""
        bias, weight = self.cast(bias), self.cast(weight)
        return self.to(x, weight.itemsize), weight, bias

    def leaf(self, weight: SizedParameter | Cast) -> tuple:
        """(who receives a weight's gradient, a function that makes it)"""
        if isinstance(weight, Cast):
            name = f"gradient of {weight.name}"
            return weight.node, partial(self.make, name, weight.numel, weight.itemsize, of_samples=False)
        self.use(weight)
        return weight, partial(self.gradient_of, weight)

    def _save_factors(self, x: SizedTensor, weight) -> list[Saved]:
        """Each factor of a product is kept for the other's gradient. A Parameter is there anyway."""
        kept_weight = [weight] if isinstance(weight, Cast) and x.node else []
        return self.save(*([x] if weight.trained else []), *kept_weight)

    def linear(self, x: SizedTensor, weight: SizedParameter, bias: SizedParameter | None = None) -> SizedTensor:
        """x (…, in) and weight (out, in) → x @ weight.T + bias, (…, out). Keeps x."""
        if weight.packed:
            return self._linear_unpacking(self.to(x, self.autocast or x.itemsize), weight)
        x, weight, bias = self._in_one_format(x, weight, bias)
        outs, ins = weight.shape
        rows, itemsize = x.numel // ins, x.itemsize
        saved = None if self.saves_last else self._save_factors(x, weight)
        out = self.kept(lambda: [self.make(result_of(weight), rows * outs, itemsize)], product=True)[0]
        if self.saves_last:
            saved = self._save_factors(x, weight)
        return self.weighed(x, out, weight, bias, saved)

    def _linear_unpacking(self, x: SizedTensor, weight: SizedParameter) -> SizedTensor:
        """The same with a frozen weight in 4 bits, unpacked for this product, and once more for that of its backward.

        Keeps nothing. Source: bitsandbytes/autograd/_functions.py, MatMul4Bit; functional.py, dequantize_4bit.
        """
        numel, itemsize, node, name, size = x.numel, x.itemsize, x.node, weight.name, weight.numel
        outs, ins = weight.shape

        def unpack():
            largest = self.make(f"{name}: largest of each block", quantization.blocks(size), FP32)
            unpacked = self.make(f"{name}, unpacked", size, itemsize)
            del largest
            return unpacked

        def compute():
            unpacked = unpack()
            out = self.make(name, numel // ins * outs, itemsize)
            del unpacked
            return [out]

        def run(_):
            unpacked = unpack()
            of_input = self.make(f"gradient of {name}'s input", numel, itemsize)
            del unpacked
            return [(node, of_input)]

        out = self.kept(compute, product=True)[0]
        return self.record(out, run) if node else out

    def convolution(self, x: SizedTensor, weight: SizedParameter, bias: SizedParameter, places: int) -> SizedTensor:
        """x (images, in, height, width), weight (out, in, 3, 3) → (images, out, height', width'). Keeps x and weight.

        places: images × height' × width'.
        """
        x, weight, bias = self._in_one_format(x, weight, bias)
        saved = self.save(x, *([weight] if isinstance(weight, Cast) else []))  # a Parameter is there anyway
        return self.weighed(x, self.make(result_of(weight), places * weight.shape[0], x.itemsize), weight, bias, saved)

    def weighed(self, x, out, weight: SizedParameter | Cast, bias: SizedParameter | Cast | None, saved) -> SizedTensor:
        """Backward of a layer with a weight: the gradients of weight, bias and input."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        leaves = [self.leaf(leaf) for leaf in (weight, bias) if leaf and leaf.trained]
        if not leaves and node is None:
            return out
        of_input = f"gradient of {weight.name}'s input"

        def run(_):
            made = [(receiver, make()) for receiver, make in leaves]
            if node:
                made.append((node, self.make(of_input, numel, itemsize)))
            return made

        return self.record(out, run, saved)

    def add(self, x: SizedTensor, y: SizedTensor, name: str = "sum") -> SizedTensor:
        """Elementwise. Of two number formats the result has the wider; each input's gradient is in its own. Keeps nothing."""
        inputs = [(tensor.node, tensor.numel, tensor.itemsize) for tensor in (x, y) if tensor.node]
        out = self.make(name, x.numel, max(x.itemsize, y.itemsize))

        def run(gradient):
            return [
                (node, gradient if itemsize == gradient.itemsize else self.make(f"gradient of {name}", numel, itemsize))
                for node, numel, itemsize in inputs
            ]

        return self.record(out, run) if inputs else out

    def multiply(self, x: SizedTensor, y: SizedTensor, name: str = "product") -> SizedTensor:
        """Elementwise. Keeps each factor for the other's gradient."""
        nodes, numel, itemsize = [node for node in (x.node, y.node) if node], x.numel, x.itemsize
        saved = self.save(*([y] if x.node else []), *([x] if y.node else []))

        def run(_):
            return [(node, self.make(f"gradient of {name}", numel, itemsize)) for node in nodes]

        out = self.like(x, name)
        return self.record(out, run, saved) if nodes else out

    def silu(self, x: SizedTensor, name: str = "silu") -> SizedTensor:
        """Elementwise, as are GELU and others of its kind. Keeps its input."""
        saved = self.save(x) if x.node else []
        return self.passing_on(x, self.like(x, name), f"gradient of {name}", saved)

    def softcap(self, x: SizedTensor) -> SizedTensor:
        """c · tanh(x / c), elementwise. Keeps the tanh."""
        out = self.divide(x, "logits / cap")
        squashed = self.like(out, "tanh of logits")
        squashed = self.passing_on(out, squashed, "gradient of tanh's input", self.save(squashed))
        return self.divide(squashed, "logits, capped")

    def relu(self, x: SizedTensor, name: str = "relu") -> SizedTensor:
        """Elementwise. Keeps its result, which the next operator often keeps too."""
        out = self.like(x, name)
        return self.passing_on(x, out, f"gradient of {name}", self.save(out))

    def max_pool(self, x: SizedTensor, numel: int) -> SizedTensor:
        """x (images, channels, height, width) → ``numel`` numbers. Keeps its input and, for each result, where it came from."""
        saved = self.save(x)
        out, indices = self.make("pooled", numel, x.itemsize), self.make("pooling's indices", numel, INT64)
        return self.passing_on(x, out, "gradient of pooling's input", saved + self.save(indices))

    def dropout(self, x: SizedTensor, name: str) -> SizedTensor:
        """Elementwise. Keeps a mask: on the CPU as big as its input, on a GPU a byte a number."""
        mask = self.make(f"{name}'s mask", x.numel, 1 if self.fused else x.itemsize)
        saved = self.save(mask)
        return self.passing_on(x, self.like(x, name), f"gradient of {name}", saved)

    def log_softmax(self, x: SizedTensor) -> SizedTensor:
        """(rows, classes) → the same, in fp32 at least under autocast. Keeps its result."""
        x = self.to(x, FP32 if self.autocast else x.itemsize)
        out = self.like(x, "log-softmax")
        return self.passing_on(x, out, "gradient of log-softmax's input", self.save(out))

    def nll_loss(self, x: SizedTensor, targets: SizedTensor) -> SizedTensor:
        """x (rows, classes) and targets (rows,) → a number: minus the mean of the targets' log-probabilities.

        Keeps both, and the targets' weight, another number.
        """
        saved = self.save(x, targets)
        out, weight = self.make("loss", 1, x.itemsize), self.make("loss: weight", 1, x.itemsize)
        return self.passing_on(x, out, "gradient of log-softmax", saved + self.save(weight))

    def divide(self, x: SizedTensor, name: str) -> SizedTensor:
        """By a number. Keeps nothing."""
        return self.passing_on(x, self.like(x, name), f"gradient of {name}")

    def rms_norm(self, x: SizedTensor, weight: SizedParameter) -> SizedTensor:
        """x (…, width) and weight (width,) → x · 1/rms(x) · weight, as x."""
        return norms.rms_norm(self, x, weight)

    def layer_norm(self, x: SizedTensor, weight: SizedParameter, bias: SizedParameter) -> SizedTensor:
        """x (…, width), weight and bias (width,) → as x."""
        return norms.layer_norm(self, x, weight, bias)

    def rotate(self, x: SizedTensor, name: str) -> SizedTensor:
        """Rotary positions of x (batch, heads, length, width) → as x."""
        return attention.rotate(self, x, name)

    def view(self, x: SizedTensor) -> SizedTensor:
        """The same storage, for an operator's backward of its own."""
        return SizedTensor(x.storage, x.numel, x.itemsize)

    def split_heads(self, x: SizedTensor, heads: Heads) -> SizedTensor:
        """(batch, length, heads · width) → (batch, heads, length, width): a view. Math returns gradients head by head."""
        if self._attention_kernel(x.itemsize, heads) != "math":
            return x
        return self.passing_on(x, self.view(x), "gradient of heads, side by side")

    def attention(self, query: SizedTensor, key: SizedTensor, value: SizedTensor, heads: Heads) -> SizedTensor:
        """Causal, of query (batch, heads, length, width), key and value (batch, kv heads, length, width) → as query."""
        query, key, value = (self.to(tensor, self.autocast or tensor.itemsize) for tensor in (query, key, value))
        kernel = self._attention_kernel(query.itemsize, heads)
        if kernel == "math":
            return attention.math(self, query, key, value, heads)
        return attention.fused(self, kernel, query, key, value, heads)

    def join_heads(self, x: SizedTensor, heads: Heads) -> SizedTensor:
        """(batch, heads, length, width) → (batch, length, heads · width): a view, but of what math returns a copy."""
        if self._attention_kernel(x.itemsize, heads) != "math":
            return x
        out, node = self.like(x, "attention, heads side by side"), x.node
        return self.record(out, lambda gradient: [(node, gradient)]) if node else out

    def _attention_kernel(self, itemsize: int, heads: Heads) -> str:
        return attention.kernel(self.fused, itemsize, heads.grouped, self.torch)
