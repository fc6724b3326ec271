"""Autograd on sizes: a network's operators, run on tensors that have a size and a name, and nothing else.

To predict peak memory one must know what is alive at each moment, and most of that autograd decides: which tensors
an operator saves for its backward, when they go, how many gradients are there at once. This file says it for each
operator of the course's networks, as PyTorch does it; ``Tape`` adds it up. Imports no torch.

A tensor lives as long as something refers to it. Python's own reference counting does that bookkeeping, here as in
PyTorch; so a blueprint (labkit/blueprints.py) lets go of its names where the real network does.

Sources: PyTorch's derivatives.yaml (what is saved), torch.utils.checkpoint (what recomputation keeps), and traces
of real steps (labkit/trace.py), with which this agrees on the CPU to within a few numbers.
"""

from collections import Counter
from contextlib import suppress
from math import prod

INT64, FP32 = 8, 4


class Storage:
    """Bytes that are alive as long as this object is."""

    __slots__ = ("size", "tape", "term")

    def __init__(self, tape, category: str, name: str, size: int):
        self.tape, self.term, self.size = tape, (category, name), size
        tape.change(self.term, size)

    def __del__(self):
        self.tape.change(self.term, -self.size)


class Tensor:
    """What operators take and make. A view is the same Tensor: nothing is copied, so nothing is counted.

    node: the operator whose backward wants its gradient; None if nobody wants it.
    """

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage, numel: int, itemsize: int):
        self.storage, self.numel, self.itemsize, self.node = storage, numel, itemsize, None


class Parameter:
    """A leaf: backward leaves its gradient here, whole."""

    def __init__(self, name: str, shape: tuple, itemsize: int, trained: bool = True):
        self.name, self.shape, self.itemsize, self.trained = name, shape, itemsize, trained
        self.numel = prod(shape)
        self.uses = 0  # by how many operators: each will send a part of the gradient
        self.parts = 0  # so many have come
        self.gradient = None


class Node:
    """One operator's backward. run(gradient) → [(receiver, gradient), …]; ``saved`` goes when it has run."""

    __slots__ = ("gradient", "run", "saved")

    def __init__(self, run, saved=()):
        self.run, self.saved, self.gradient = run, saved, None


class Saved:
    """A tensor that autograd keeps, or, under recomputation, the place where it will be put back."""

    __slots__ = ("frame", "storage")

    def __init__(self, storage, frame=None):
        self.storage, self.frame = storage, frame


class Recomputed:
    """What recomputation knows of one call: the places to fill, and what the selective kind kept."""

    def __init__(self, again, selective: bool):
        self.again, self.selective = again, selective
        self.places, self.filled, self.kept, self.running = [], 0, [], False


class AllPutBack(Exception):
    """Recomputation stops as soon as the last saved tensor is there again."""


def _drop(node: Node):
    """Let go of what an operator has saved; in a function, so that no name of the caller keeps the last of it."""
    for saved in node.saved:
        saved.storage = None
    node.saved = ()


WANTED = object()  # stands for an operator, where all that counts is that there is one


class Tape:
    """Knows what is alive, by (category, name), and the highest moment of each place of the step.

    ``moments``: {place: (bytes, {(category, name): bytes})}; a place is like "backward of block 3". Of equal moments
    the last.
    """

    def __init__(self, fused: bool = False):
        self.fused = fused  # a GPU's kernels: a norm and its backward are one operator each
        self.live, self.total = Counter(), 0
        self.place, self.moments = "start", {}
        self.each = {}  # term → (numbers, bytes a number) of one tensor of that name
        self.nodes = []
        self.made_as = "activations"  # the category of new tensors: "temporary" inside backward
        self.gradients_as = "gradients"  # the category of parameters' gradients before they are reduced
        self.when_whole = lambda parameter: None  # called when a parameter's gradient has all its parts
        self.module = ""  # put before names
        self.frame = None  # the call under recomputation that is running

    # What is alive

    def change(self, term: tuple[str, str], size: int):
        self.live[term] += size
        self.total += size
        if size > 0 and self.total >= self.moments.get(self.place, (0,))[0]:
            self._keep_moment()

    def _keep_moment(self):
        self.moments[self.place] = (self.total, {term: size for term, size in self.live.items() if size})

    def go_to(self, place: str):
        """Name what is computed from here on. The moment at which it begins is one of its moments."""
        self.place = place
        if self.total >= self.moments.get(place, (0,))[0]:
            self._keep_moment()

    def hold(self, category: str, name: str, size: int, itemsize: int = 1) -> Storage:
        self.each.setdefault((category, name), (size // itemsize, itemsize))
        return Storage(self, category, name, size)

    def make(self, name: str, numel: int, itemsize: int, category: str | None = None) -> Tensor:
        storage = Storage(self, category or self.made_as, self.module + name, numel * itemsize)
        self.each[storage.term] = numel, itemsize
        return Tensor(storage, numel, itemsize)

    def like(self, tensor, name: str) -> Tensor:
        return self.make(name, tensor.numel, tensor.itemsize)

    def given(self, name: str, numel: int, itemsize: int, times: int = 1) -> Tensor:
        """A tensor of the batch, or a constant that the network makes: it needs no gradient. ``times``: of them."""
        return Tensor(self.hold("activations", name, times * numel * itemsize, itemsize), numel, itemsize)

    def gradient_of(self, parameter: Parameter) -> Tensor:
        return self.make(
            f"gradient of {parameter.name}", parameter.numel, parameter.itemsize, category=self.gradients_as
        )

    # Autograd

    def save(self, *tensors: Tensor) -> list[Saved]:
        """Keep tensors for backward. Under recomputation: note their places, or put them back."""
        frame = self.frame
        if frame is None:
            return [Saved(tensor.storage) for tensor in tensors]
        if not frame.running:
            places = [Saved(None, frame) for _ in tensors]
            frame.places += places
            return places
        for tensor in tensors:
            frame.places[frame.filled].storage = tensor.storage
            frame.filled += 1
        if tensors and frame.filled == len(frame.places):
            raise AllPutBack
        return []

    def record(self, out: Tensor, run, saved=()) -> Tensor:
        if self.frame and self.frame.running:  # the operators of the first time are still there to run
            out.node = WANTED
        else:
            out.node = Node(run, saved)
            self.nodes.append(out.node)
        return out

    def kept(self, compute) -> list[Tensor]:
        """The results of a matrix multiplication or of attention: selective recomputation keeps them."""
        frame = self.frame
        if frame is None or not frame.selective:
            return compute()
        if frame.running:
            return frame.kept.pop(0)
        results = compute()
        frame.kept.append([Tensor(result.storage, result.numel, result.itemsize) for result in results])
        return results

    def recomputed(self, function, x: Tensor, selective: bool = False) -> Tensor:
        """``function(x)``, its saved tensors dropped and computed once more when backward asks for them."""
        frame = self.frame = Recomputed(None, selective)
        out = function(x)
        frame.again = function, Tensor(x.storage, x.numel, x.itemsize), x.node is not None
        self.frame = None
        return out

    def _put_back(self, frame: Recomputed):
        made_as, module = self.made_as, self.module
        self.made_as, self.frame, frame.running = "activations", frame, True
        function, x, wanted = frame.again
        x.node = WANTED if wanted else None
        with suppress(AllPutBack):
            function(x)
        frame.places = []  # the frame keeps the call's input until the last of its saved tensors has gone
        self.made_as, self.module, self.frame = made_as, module, None

    def send(self, receiver, gradient: Tensor):
        """A gradient arrives. A second one for the same tensor is added to the first, in a third."""
        if receiver.gradient is not None:
            storage = gradient.storage
            total = self.hold(storage.term[0], "sum of " + storage.term[1], storage.size, gradient.itemsize)
            gradient = Tensor(total, gradient.numel, gradient.itemsize)
        receiver.gradient = gradient
        if isinstance(receiver, Parameter):
            receiver.parts += 1
            if receiver.parts == receiver.uses:
                receiver.parts = receiver.uses = 0
                self.when_whole(receiver)

    def backward(self, loss: Tensor):
        """Run the operators' backwards, the last first."""
        one = loss.node.gradient = self.like(loss, "gradient of loss")  # its caller holds it until all is done
        self.made_as = "temporary"
        while self.nodes:
            node = self.nodes.pop()
            if any(saved.storage is None for saved in node.saved):
                self._put_back(next(saved.frame for saved in node.saved if saved.frame))
            gradient, node.gradient = node.gradient, None
            sent = node.run(gradient) or []
            del gradient
            _drop(node)
            while sent:
                receiver, gradient = sent.pop(0)
                if receiver is not None:
                    self.send(receiver, gradient)
                del gradient, receiver
        self.made_as = "activations"
        del one

    def when_backward_passes(self, action):
        """Call ``action`` when backward comes by this point: between two modules."""
        self.nodes.append(Node(lambda _: action()))

    def until_backward(self, tensor: Tensor):
        """Some operator saves this constant, which nothing else holds."""
        self.nodes.append(Node(lambda _: None, self.save(tensor)))

    # Operators. Each makes its result and says what its backward needs, makes, and in which order.
    # They remember their inputs' nodes and sizes, never the inputs: what autograd does not save must go.
    # A result that depends on nothing trained gets no backward, and nothing is saved for it.

    def to(self, x: Tensor, itemsize: int, name: str = "cast") -> Tensor:
        """Another number format; nothing happens where it is the same."""
        if x.itemsize == itemsize:
            return x
        out = self.make(name, x.numel, itemsize)
        return self._passing_on(x, out, f"gradient of {name}")

    def _passing_on(self, x: Tensor, out: Tensor, name: str, saved=()) -> Tensor:
        """Give ``out`` the backward that makes one new gradient, as big as ``x``, for ``x``."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        if node is None:
            return out
        return self.record(out, lambda _: [(node, self.make(name, numel, itemsize))], saved)

    def embedding(self, tokens: Tensor, weight: Parameter) -> Tensor:
        out = self.make("embedding", tokens.numel * weight.shape[1], weight.itemsize)
        if not weight.trained:
            return out
        weight.uses += 1
        return self.record(out, lambda _: [(weight, self.gradient_of(weight))], self.save(tokens))

    def linear(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        """x @ weight.T + bias, for weight of shape (out, in)."""
        saved = self.save(x) if weight.trained else []
        outs, ins = weight.shape
        rows, itemsize = x.numel // ins, x.itemsize
        out = self.kept(lambda: [self.make(weight.name, rows * outs, itemsize)])[0]
        return self._weighed(x, out, weight, bias, saved)

    def convolution(self, x: Tensor, weight: Parameter, bias: Parameter, places: int) -> Tensor:
        """places: images × positions of the output."""
        saved = self.save(x)
        return self._weighed(x, self.make(weight.name, places * weight.shape[0], x.itemsize), weight, bias, saved)

    def _weighed(self, x, out, weight: Parameter, bias: Parameter | None, saved) -> Tensor:
        """Backward of a layer with a weight: the gradients of weight, bias and input."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        leaves = [leaf for leaf in (weight, bias) if leaf and leaf.trained]
        if not leaves and node is None:
            return out
        if self.frame is None or not self.frame.running:
            for leaf in leaves:
                leaf.uses += 1

        def run(_):
            made = [(leaf, self.gradient_of(leaf)) for leaf in leaves]
            if node:
                made.append((node, self.make(f"gradient of {weight.name}'s input", numel, itemsize)))
            return made

        return self.record(out, run, saved)

    def add(self, x: Tensor, y: Tensor, name: str = "sum") -> Tensor:
        nodes = [node for node in (x.node, y.node) if node]
        out = self.like(x, name)
        return self.record(out, lambda gradient: [(node, gradient) for node in nodes]) if nodes else out

    def multiply(self, x: Tensor, y: Tensor, name: str = "product") -> Tensor:
        nodes, numel, itemsize = [node for node in (x.node, y.node) if node], x.numel, x.itemsize
        saved = self.save(*([y] if x.node else []), *([x] if y.node else []))

        def run(_):
            return [(node, self.make(f"gradient of {name}", numel, itemsize)) for node in nodes]

        out = self.like(x, name)
        return self.record(out, run, saved) if nodes else out

    def silu(self, x: Tensor) -> Tensor:
        saved = self.save(x) if x.node else []
        return self._passing_on(x, self.like(x, "silu"), "gradient of silu", saved)

    def relu(self, x: Tensor, name: str = "relu") -> Tensor:
        out = self.like(x, name)
        return self._passing_on(x, out, f"gradient of {name}", self.save(out))

    def max_pool(self, x: Tensor, numel: int) -> Tensor:
        """Keeps its input and, for each result, where it came from."""
        saved = self.save(x)
        out, indices = self.make("pooled", numel, x.itemsize), self.make("pooling's indices", numel, INT64)
        return self._passing_on(x, out, "gradient of pooling's input", saved + self.save(indices))

    def dropout(self, x: Tensor, name: str) -> Tensor:
        """Keeps a mask as big as its input."""
        mask = self.like(x, f"{name}'s mask")
        saved = self.save(mask)
        return self._passing_on(x, self.like(x, name), f"gradient of {name}", saved)

    def log_softmax(self, x: Tensor) -> Tensor:
        out = self.like(x, "log-softmax")
        return self._passing_on(x, out, "gradient of log-softmax's input", self.save(out))

    def nll_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """A number: minus the mean of the targets' log-probabilities. It also keeps their weight, another number."""
        saved = self.save(x, targets)
        out, weight = self.make("loss", 1, x.itemsize), self.make("loss: weight", 1, x.itemsize)
        return self._passing_on(x, out, "gradient of log-softmax", saved + self.save(weight))

    def divide(self, x: Tensor, name: str) -> Tensor:
        return self._passing_on(x, self.like(x, name), f"gradient of {name}")

    def rms_norm(self, x: Tensor, weight: Parameter) -> Tensor:
        """x · 1/rms(x) · weight."""
        if self.fused:
            return self._rms_norm_fused(x, weight)
        itemsize = x.itemsize
        x = self.to(x, max(itemsize, FP32), "norm: input in fp32")
        normal = self._normalized(x, rows=x.numel // weight.numel)
        out = self.like(x, "norm")
        del x
        return self.to(self._weigh(out, normal, weight), itemsize, "norm")

    def _rms_norm_fused(self, x, weight):
        """On a GPU: keeps its input and one fp32 number a row."""
        rows = self.make("norm: 1/rms", x.numel // weight.numel, FP32)
        out = self.like(x, "norm")
        return self._weighed(x, out, weight, None, self.save(x, rows) if x.node or weight.trained else [])

    def _normalized(self, x: Tensor, rows: int) -> Tensor:
        """On the CPU a norm is several operators, in fp32 at least: the square, its mean, 1/root, the product."""
        node, numel, wide = x.node, x.numel, x.itemsize
        saved = self.save(x) if node else []
        square = self.like(x, "norm: square")
        scale = self.make("norm: 1/rms", rows, wide)
        del square
        if node is None:
            return self.like(x, "norm: normalized")

        def square_backward(_):
            of_mean = self.make("norm: gradient of the mean", numel, wide)
            power, twice = (self.make(f"norm: gradient, {name}", numel, wide) for name in ("x", "2x"))
            of_x = self.make("norm: gradient through the mean", numel, wide)
            del of_mean, power, twice
            return [(node, of_x)]

        self.record(scale, square_backward, saved + self.save(scale))
        saved, scale_node = self.save(x, scale), scale.node

        def product_backward(_):
            of_scale = self.make("norm: gradient of 1/rms, whole", numel, wide)
            of_x = self.make("norm: gradient through the product", numel, wide)
            of_rows = self.make("norm: gradient of 1/rms", rows, wide)
            del of_scale
            return [(node, of_x), (scale_node, of_rows)]

        return self.record(self.like(x, "norm: normalized"), product_backward, saved)

    def _weigh(self, out: Tensor, normal: Tensor, weight: Parameter) -> Tensor:
        """The product with a weight for each column."""
        node, numel, wide = normal.node, normal.numel, normal.itemsize
        if node is None and not weight.trained:
            return out
        saved = self.save(normal) if weight.trained else []
        if weight.trained and (self.frame is None or not self.frame.running):
            weight.uses += 1

        def run(_):
            of_weight = self.make("norm: gradient of weight, a row each", numel, wide) if weight.trained else None
            made = [(node, self.make("norm: gradient of normalized", numel, wide))] if node else []
            if weight.trained:
                made.append((weight, self.gradient_of(weight)))
            del of_weight
            return made

        return self.record(out, run, saved)

    def rotate(self, x: Tensor, name: str) -> Tensor:
        """Rotary positions: x · cos + cat(−second half, first half) · sin. Nothing of x is kept."""
        node, numel, itemsize = x.node, x.numel, x.itemsize
        cosine = self.like(x, f"{name} · cos")
        half = self.make(f"{name}: −half", numel // 2, itemsize)
        swapped = self.like(x, f"{name}: swapped")
        del half
        sine = self.like(x, f"{name} · sin")
        del swapped
        out = self.like(x, f"{name}, rotated")
        del cosine, sine

        def run(_):
            sine = self.make(f"gradient of {name} · sin", numel, itemsize)
            half = self.make(f"gradient of {name}: −half", numel // 2, itemsize)
            cosine = self.make(f"gradient of {name} · cos", numel, itemsize)
            swapped = self.make(f"gradient of {name}: swapped", numel, itemsize)
            del sine, half
            whole = self.make(f"gradient of {name}", numel, itemsize)
            del cosine, swapped
            return [(node, whole)]

        return self.record(out, run) if node else out

    def attention(self, query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
        """Flash attention: keeps its inputs, its result and a number (fp32 at least) for each row of its matrix.

        rows: batch × heads × length.
        """
        inputs = [(tensor.node, tensor.numel, tensor.itemsize) for tensor in (query, key, value)]
        wanted = any(node for node, _, _ in inputs)
        saved = self.save(query, key, value) if wanted else []
        numel, itemsize = query.numel, query.itemsize

        def compute():
            return [
                self.make("attention", numel, itemsize),
                self.make("attention: log-sum-exp", rows, max(FP32, itemsize)),
            ]

        out, sums = self.kept(compute)
        saved += self.save(out, sums) if wanted else []

        def run(_):
            workspace = self._attention_workspace(numel, inputs[1][1], itemsize)
            names = ("query", "key", "value")
            made = [self.make(f"gradient of {name}", *size) for name, (_, *size) in zip(names, inputs, strict=True)]
            del workspace
            return [(node, gradient) for (node, _, _), gradient in zip(inputs, made, strict=True)]

        return self.record(out, run, saved) if wanted else out

    def _attention_workspace(self, queries: int, keys: int, itemsize: int) -> list[Tensor]:
        """On a GPU backward sums the queries' gradient in fp32; with fewer keys than queries it makes one for each."""
        if not self.fused:
            return []
        grouped = [self.make("attention: gradients a head", queries, itemsize) for _ in range(2 * (keys < queries))]
        return [self.make("attention: gradient of queries in fp32", queries, FP32), *grouped]
