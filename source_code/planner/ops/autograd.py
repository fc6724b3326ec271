"""Autograd on sizes: which tensors are alive at each moment, and why. Tensors have a size and a name, and nothing else.

To predict peak memory one must know what is alive, and most of that autograd decides: which tensors wait for
backward, when they go, how many gradients are there at once. ``Autograd`` is that bookkeeping, recomputation
included; the operators are in planner/ops/operators.py. Imports no torch.

A tensor lives as long as something refers to it. Python's own reference counting sees to that, here as in
PyTorch; so a blueprint (planner/models/networks.py) lets go of its names where the real network does.

Sources: torch.utils.checkpoint (what recomputation keeps), and traces of real steps (labkit/measuring/trace.py).
"""

from collections import Counter
from contextlib import suppress
from math import prod

INT64, FP64, FP32, BF16 = 8, 8, 4, 2  # bytes per number


class Storage:
    """Bytes that are alive as long as this object is."""

    __slots__ = ("size", "tape", "term")

    def __init__(self, tape, category: str, name: str, size: int):
        self.tape, self.term, self.size = tape, (category, name), size
        tape.change(self.term, size)

    def __del__(self):
        self.tape.change(self.term, -self.size)


class SizedTensor:
    """What operators take and make. A view is the same SizedTensor: nothing is copied, so nothing is counted.

    node: the operator whose backward wants its gradient; None if nobody wants it.
    """

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage, numel: int, itemsize: int):
        self.storage, self.numel, self.itemsize, self.node = storage, numel, itemsize, None


class SizedParameter:
    """A leaf: backward leaves its gradient here, whole. packed: it is kept in 4 bits (planner/ops/quantization.py)."""

    def __init__(self, name: str, shape: tuple, itemsize: int, trained: bool = True, packed: bool = False):
        self.name, self.shape, self.itemsize, self.trained, self.packed = name, shape, itemsize, trained, packed
        self.numel = prod(shape)
        self.uses = 0  # by how many operators: each will send a part of the gradient
        self.parts = 0  # so many have come
        self.gradient = None
        self.times = 1  # its gradient is so many times as large as it is, until it is reduced


class Node:
    """One operator's backward. run(gradient) → [(receiver, gradient), …]; ``saved`` goes when it has run.

    before: is called first of all, before anything is recomputed for it.
    """

    __slots__ = ("before", "gradient", "run", "saved")

    def __init__(self, run, saved=()):
        self.run, self.saved, self.gradient, self.before = run, saved, None, None


class Saved:
    """A tensor that autograd keeps, or, under recomputation, the place where it will be put back."""

    __slots__ = ("frame", "storage")

    def __init__(self, storage, frame=None):
        self.storage, self.frame = storage, frame


class Recomputed:
    """What recomputation knows of one call: the places to fill, and the results that it kept."""

    def __init__(self, again, kind: str):
        self.again, self.kind, self.tables = again, kind, ()
        self.places, self.filled, self.kept, self.running = [], 0, [], False
        self.products = 0  # matrix products so far, in forward; then in recomputation

    def keeps(self, product: bool) -> bool:
        """Whether the next of the expensive results is kept: of attention, or of a ``product`` with a weight."""
        self.products += product
        if product and self.kind == "alternate":
            return self.products % 2 == 1
        return self.kind != "full"


class AllPutBack(Exception):
    """Recomputation stops as soon as the last saved tensor is there again."""


def _drop(node: Node):
    """Let go of what an operator has saved; in a function, so that no name of the caller keeps the last of it."""
    for saved in node.saved:
        saved.storage = None
    node.saved = ()


WANTED = object()  # stands for an operator, where all that counts is that there is one


class Autograd:
    """Knows what is alive, by (category, name), and the highest moment of each place of the step.

    ``moments``: {place: (bytes, {(category, name): bytes})}; a place is like "backward of block 3". Of equal moments
    the last.
    """

    def __init__(self):
        self.live, self.total = Counter(), 0
        self.place, self._moments = "start", {}
        self.highest, self.rising = 0, False  # of this place; whether the highest moment is now, and not yet kept
        self.each = {}  # term → (numbers, bytes per number, whether it has some for each sample) of one tensor of that name
        self.nodes = []
        self.made_as = "activations"  # the category of new tensors: "temporary" inside backward
        self.gradients_as = "gradients"  # the category of parameters' gradients before they are reduced
        self.when_whole = lambda parameter: None  # called when a parameter's gradient has all its parts
        self.module = ""  # put before names
        self.frame = None  # the call under recomputation that is running
        self.tables = ()  # constants of this forward that every block is called with

    # What is alive

    @property
    def moments(self) -> dict:
        if self.rising:
            self._keep_moment()
        return self._moments

    def change(self, term: tuple[str, str], size: int):
        if size < 0 and self.rising:
            self._keep_moment()
        self.live[term] += size
        self.total += size
        if size > 0 and self.total >= self.highest:
            self.highest, self.rising = self.total, True

    def _keep_moment(self):
        """Of the highest moments, which come one after the other, only the last is written down."""
        self.rising = False
        self._moments[self.place] = (self.total, {term: size for term, size in self.live.items() if size})

    def go_to(self, place: str):
        """Name what is computed from here on. The moment at which it begins is one of its moments."""
        if self.rising:
            self._keep_moment()
        self.place, self.highest = place, self._moments.get(place, (0,))[0]
        if self.total >= self.highest:
            self.highest, self.rising = self.total, True

    def hold(self, category: str, name: str, size: int, itemsize: int = 1) -> Storage:
        self.each.setdefault((category, name), (size // itemsize, itemsize, False))
        return Storage(self, category, name, size)

    def make(
        self, name: str, numel: int, itemsize: int, category: str | None = None, of_samples: bool = True
    ) -> SizedTensor:
        storage = Storage(self, category or self.made_as, self.module + name, numel * itemsize)
        self.each[storage.term] = numel, itemsize, of_samples
        return SizedTensor(storage, numel, itemsize)

    def like(self, tensor, name: str) -> SizedTensor:
        return self.make(name, tensor.numel, tensor.itemsize)

    def given(self, name: str, numel: int, itemsize: int, times: int = 1) -> SizedTensor:
        """A tensor of the batch, or a constant that the network makes: it needs no gradient. ``times``: of them."""
        return SizedTensor(self.hold("activations", name, times * numel * itemsize, itemsize), numel, itemsize)

    def gradient_of(self, parameter: SizedParameter, itemsize: int | None = None) -> SizedTensor:
        """itemsize: bytes per number, where they are not the parameter's."""
        category = self.gradients_as if parameter.uses == 1 else None  # of several parts, their sum is the gradient
        if self.made_as == "activations" and category != "gradients":  # already in forward: see chunked_loss.py
            category = None
        return self.make(
            f"gradient of {parameter.name}", parameter.numel, itemsize or parameter.itemsize, category, False
        )

    # What waits for backward

    def save(self, *tensors: SizedTensor) -> list[Saved]:
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

    def record(self, out: SizedTensor, run, saved=()) -> SizedTensor:
        if self.frame and self.frame.running:  # the operators of the first time are still there to run
            out.node = WANTED
        else:
            out.node = Node(run, saved)
            self.nodes.append(out.node)
        return out

    def kept(self, compute, product: bool = False) -> list[SizedTensor]:
        """The results of a product with a weight, or of what attention computes: recomputation may keep them."""
        frame = self.frame
        if frame is None or not frame.keeps(product):
            return compute()
        if frame.running:
            return frame.kept.pop(0)
        results = compute()
        frame.kept.append([SizedTensor(result.storage, result.numel, result.itemsize) for result in results])
        return results

    def recomputed(self, function, x: SizedTensor, kind: str) -> SizedTensor:
        """``function(x)``, its saved tensors dropped and computed once more when backward asks for them.

        kind: what is kept all the same: "full", nothing; "selective", the results of matrix products and attention;
        "alternate", of every second product with a weight, and of attention.
        """
        frame = self.frame = Recomputed(None, kind)
        out = function(x)
        frame.again = function, SizedTensor(x.storage, x.numel, x.itemsize), x.node is not None
        frame.tables = self.tables
        self.frame = None
        return out

    def put_back(self, frame: Recomputed):
        made_as, module, self.tables = self.made_as, self.module, frame.tables
        self.made_as, self.frame, frame.running, frame.products = "activations", frame, True, 0
        function, x, wanted = frame.again
        x.node = WANTED if wanted else None
        with suppress(AllPutBack):
            function(x)
        frame.places = []  # the frame keeps the call's input until the last of its saved tensors has gone
        self.made_as, self.module, self.frame, self.tables = made_as, module, None, ()

    def send(self, receiver, gradient: SizedTensor):
        """A gradient arrives. A second one for the same tensor is added to the first, in a third."""
        if receiver.gradient is not None:
            (category, name), size = gradient.storage.term, gradient.numel * gradient.itemsize
            category = self.gradients_as if isinstance(receiver, SizedParameter) else category
            total = self.hold(category, f"sum of {name}", size, gradient.itemsize)
            gradient = SizedTensor(total, gradient.numel, gradient.itemsize)
        receiver.gradient = gradient
        if isinstance(receiver, SizedParameter):
            receiver.parts += 1
            if receiver.parts == receiver.uses:
                receiver.parts = receiver.uses = 0
                self.when_whole(receiver)

    def backward(self, loss: SizedTensor):
        """Run the operators' backwards, the last first."""
        self.backward_from(loss.node, self.like(loss, "gradient of loss"))

    def backward_from(self, last: Node, given: SizedTensor):
        """The same where not a loss is the last, and ``given`` its gradient: its caller holds it until all is done."""
        last.gradient = given
        self.made_as = "temporary"
        while self.nodes:
            node = self.nodes.pop()
            if node.before:
                node.before()
            if any(saved.storage is None for saved in node.saved):
                self.put_back(next(saved.frame for saved in node.saved if saved.frame))
            gradient, node.gradient = node.gradient, None
            # PyTorch hands on, and adds up, what goes to other operators before a parameter gets its gradient.
            sent = sorted(node.run(gradient) or [], key=lambda item: isinstance(item[0], SizedParameter))
            del gradient
            _drop(node)
            while sent:
                receiver, gradient = sent.pop(0)
                if receiver is not None:
                    self.send(receiver, gradient)
                del gradient, receiver
        self.made_as = "activations"

    def use(self, parameter: SizedParameter):
        """Note one more operator that will send a part of the gradient; run again for recomputation, it sends none."""
        if self.frame is None or not self.frame.running:
            parameter.uses += 1

    def when_backward_passes(self, action):
        """Call ``action`` when backward comes by this point: between two modules."""
        self.nodes.append(Node(lambda _: action()))
