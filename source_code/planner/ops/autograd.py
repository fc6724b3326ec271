# SPDX-License-Identifier: BSD-3-Clause
"""Abstract autograd: which tensors are alive in each phase of a step, and why. A tensor here has a size and a name only.

Peak memory depends on what is alive, and autograd decides most of that: which tensors are saved for backward, when they
are freed, how many gradients exist at once. ``Autograd`` does this bookkeeping, activation checkpointing included; the
operators are in planner/ops/operators.py. Imports no torch.

A tensor lives as long as something refers to it: Python's reference counting frees it, here as in PyTorch. So ``del x``
is part of the model: a blueprint (planner/models/networks.py) drops its references where the real network does.

Sources: torch.utils.checkpoint, and traces of real steps (labkit/measuring/trace.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import TypeVar

INT64, FP64, FP32, BF16 = 8, 8, 4, 2  # bytes per element


class Storage:
    """Bytes that are alive as long as this object is.

    Attributes:
        tape: the ``Autograd`` that counts them.
        term: (category, name), under which they are counted.
        size: bytes.
    """

    __slots__ = ("size", "tape", "term")

    def __init__(self, tape, category: str, name: str, size: int):
        self.tape, self.term, self.size = tape, (category, name), size
        tape.count(self.term, size)

    def __del__(self):
        self.tape.count(self.term, -self.size)


class AbstractTensor:
    """An input or output of an operator. A view is the same AbstractTensor: it copies nothing, so it counts nothing.

    Attributes:
        storage: the bytes behind it.
        numel: elements.
        itemsize: bytes per element.
        node: the operator whose backward takes this tensor's gradient; None if it needs none.
    """

    __slots__ = ("itemsize", "node", "numel", "storage")

    def __init__(self, storage: Storage, numel: int, itemsize: int):
        self.storage, self.numel, self.itemsize = storage, numel, itemsize
        self.node: Node | None = None


class AbstractParameter:
    """A leaf of the graph: backward leaves its gradient here.

    Attributes:
        name: within its module, such as "query.weight".
        shape: its dimensions; ``numel`` is their product.
        itemsize: bytes per element.
        trained: whether it gets a gradient.
        quantized: whether it is stored in 4 bits (planner/ops/quantization.py).
        uses: operators that each contribute to the gradient.
        received: contributions so far.
        gradient: their sum, an AbstractTensor.
        gradient_copies: the gradient is this many times as large as the parameter until it is reduced.
    """

    def __init__(self, name: str, shape: tuple, itemsize: int, trained: bool = True, quantized: bool = False):
        self.name, self.shape, self.itemsize, self.trained, self.quantized = name, shape, itemsize, trained, quantized
        self.numel = prod(shape)
        self.uses = self.received = 0
        self.gradient: AbstractTensor | None = None
        self.gradient_copies = 1


class Node:
    """The backward of one operator.

    Attributes:
        run: run(gradient) → [(receiver, gradient), …]; a receiver is a Node, an AbstractParameter, or None.
        saved: the ``Saved`` tensors, which are dropped when it has run.
        gradient: the gradient of the operator's output, once it has arrived.
        pre_hook: is called before anything else, also before recomputation.
    """

    __slots__ = ("gradient", "pre_hook", "run", "saved")

    def __init__(self, run, saved=()):
        self.run: Callable[..., list] = run
        self.saved: Sequence[Saved] = saved
        self.gradient: AbstractTensor | None = None
        self.pre_hook: Callable[[], None] | None = None


class Saved:
    """A tensor saved for backward; under activation checkpointing an empty holder, which recomputation fills.

    Attributes:
        storage: the saved bytes; None while a holder is empty.
        frame: the ``CheckpointFrame`` that fills it; None outside of checkpointing.
    """

    __slots__ = ("frame", "storage")

    def __init__(self, storage, frame=None):
        self.storage, self.frame = storage, frame


class CheckpointFrame:
    """One checkpointed call: the holders to fill, and the outputs that were saved nevertheless.

    Attributes:
        kind: what is saved, see ``Autograd.checkpoint``.
        call: (function, its input, whether that needs a gradient).
        rope_tables: the constants that the call uses.
        holders: the empty ``Saved`` in order; ``filled`` of them are filled.
        outputs: the saved outputs, a list for each operator.
        recomputing: whether the call runs for the second time.
        matmuls: linear layers so far, in forward; then in recomputation.
    """

    def __init__(self, kind: str):
        self.kind, self.rope_tables = kind, ()
        self.call: tuple[Callable, AbstractTensor, bool]  # once it has run
        self.holders, self.filled, self.outputs = [], 0, []
        self.recomputing, self.matmuls = False, 0

    def saves_output(self, is_linear: bool) -> bool:
        """Count an expensive operator, and return whether its output is saved.

        Args:
            is_linear: it is a linear layer; otherwise it is attention.
        """
        self.matmuls += is_linear
        if is_linear and self.kind == "alternate":
            return self.matmuls % 2 == 1
        return self.kind != "full"


class StopRecomputation(Exception):
    """The last saved tensor has been recomputed; the rest of the call need not run."""


def _free(node: Node):
    """Drop what an operator saved. (A function of its own, so that no local variable of the caller holds the last one.)"""
    for saved in node.saved:
        saved.storage = None
    node.saved = ()


Out = TypeVar("Out", bound=AbstractTensor)
NEEDS_GRADIENT = Node(None)  # where only its existence counts


class Autograd:
    """Count live bytes by (category, name), and take a snapshot of the peak of each phase of a step.

    Attributes:
        live: {(category, name): bytes alive}; ``total`` is their sum.
        phase: the phase that runs, such as "backward of block 3".
        tensor_sizes: {(category, name): (elements, bytes per element, whether they scale with samples)} of one tensor.
        nodes: the operators whose backward has not run.
        category: of new tensors: "activations", or "temporary" inside backward.
        gradient_category: of parameters' gradients before they are reduced.
        on_gradient_ready: called with a parameter when its gradient is complete.
        prefix: put before the names of new tensors.
        frame: the ``CheckpointFrame`` whose call is running, or None.
        rope_tables: constants of this forward that every block takes.
    """

    def __init__(self):
        self.live, self.total = Counter(), 0
        self.phase, self._snapshots = "start", {}
        self._phase_peak, self._peak_pending = 0, False  # pending: the peak is now, and its snapshot is not yet taken
        self.tensor_sizes = {}
        self.nodes = []
        self.category = "activations"
        self.gradient_category = "gradients"
        self.on_gradient_ready = lambda parameter: None
        self.prefix = ""
        self.frame = None
        self.rope_tables = ()

    # What is alive

    @property
    def snapshots(self) -> dict[str, tuple[int, dict]]:
        """The peak of each phase: {phase: (bytes, {(category, name): bytes})}, the last one of equal peaks."""
        if self._peak_pending:
            self._take_snapshot()
        return self._snapshots

    def count(self, term: tuple[str, str], size: int):
        """Add ``size`` bytes, which may be negative, to a term: (category, name)."""
        if size < 0 and self._peak_pending:
            self._take_snapshot()
        self.live[term] += size
        self.total += size
        if size > 0 and self.total >= self._phase_peak:
            self._phase_peak, self._peak_pending = self.total, True

    def _take_snapshot(self):
        """Write down the peak. (Of peaks that rise one after another, only the last is written.)"""
        self._peak_pending = False
        self._snapshots[self.phase] = (self.total, {term: size for term, size in self.live.items() if size})

    def enter_phase(self, phase: str):
        """Name the phase that begins here; its first state counts toward its peak."""
        if self._peak_pending:
            self._take_snapshot()
        self.phase, self._phase_peak = phase, self._snapshots.get(phase, (0,))[0]
        if self.total >= self._phase_peak:
            self._phase_peak, self._peak_pending = self.total, True

    def hold(self, category: str, name: str, size: int, itemsize: int = 1) -> Storage:
        """Return new storage of ``size`` bytes, alive as long as the caller holds it."""
        self.tensor_sizes.setdefault((category, name), (size // itemsize, itemsize, False))
        return Storage(self, category, name, size)

    def make(
        self, name: str, numel: int, itemsize: int, category: str | None = None, per_sample: bool = True
    ) -> AbstractTensor:
        """Return a new tensor.

        Args:
            name: without the module's prefix.
            numel: elements.
            itemsize: bytes per element.
            category: by default ``self.category``.
            per_sample: whether its size scales with the samples.
        """
        storage = Storage(self, category or self.category, self.prefix + name, numel * itemsize)
        self.tensor_sizes[storage.term] = numel, itemsize, per_sample
        return AbstractTensor(storage, numel, itemsize)

    def like(self, tensor: AbstractTensor, name: str) -> AbstractTensor:
        """Return a new tensor of the same size."""
        return self.make(name, tensor.numel, tensor.itemsize)

    def constant(self, name: str, numel: int, itemsize: int, count: int = 1) -> AbstractTensor:
        """Return a tensor that needs no gradient: a batch, or a constant of the network.

        Args:
            name: without the module's prefix, which it does not get.
            numel: elements of one.
            itemsize: bytes per element.
            count: tensors of this size that are alive together.
        """
        return AbstractTensor(self.hold("activations", name, count * numel * itemsize, itemsize), numel, itemsize)

    def gradient_of(self, parameter: AbstractParameter, itemsize: int | None = None) -> AbstractTensor:
        """Return a new gradient of a parameter.

        Args:
            parameter: whose.
            itemsize: bytes per element, if not the parameter's.
        """
        category = self.gradient_category if parameter.uses == 1 else None  # else the sum of contributions is it
        if self.category == "activations" and category != "gradients":  # already in forward: see chunked_loss.py
            category = None
        return self.make(
            f"gradient of {parameter.name}", parameter.numel, itemsize or parameter.itemsize, category, False
        )

    # What is saved for backward

    def save(self, *tensors: AbstractTensor) -> list[Saved]:
        """Save tensors for backward. Under checkpointing: make holders for them, or fill the holders."""
        frame = self.frame
        if frame is None:
            return [Saved(tensor.storage) for tensor in tensors]
        if not frame.recomputing:
            holders = [Saved(None, frame) for _ in tensors]
            frame.holders += holders
            return holders
        for tensor in tensors:
            frame.holders[frame.filled].storage = tensor.storage
            frame.filled += 1
        if tensors and frame.filled == len(frame.holders):
            raise StopRecomputation
        return []

    def record(self, out: Out, run: Callable, saved=()) -> Out:
        """Return ``out``, with a backward.

        Args:
            out: an operator's output.
            run: its backward, see ``Node``.
            saved: what that needs, from ``save``.
        """
        if self.frame and self.frame.recomputing:  # the nodes of the first forward will run
            out.node = NEEDS_GRADIENT
        else:
            out.node = Node(run, saved)
            self.nodes.append(out.node)
        return out

    def maybe_saved(self, compute: Callable, is_linear: bool = False) -> list[AbstractTensor]:
        """Return the outputs of an expensive operator; checkpointing may have saved them.

        Args:
            compute: compute() → the outputs.
            is_linear: it is a linear layer; otherwise it is attention.
        """
        frame = self.frame
        if frame is None or not frame.saves_output(is_linear):
            return compute()
        if frame.recomputing:
            return frame.outputs.pop(0)
        outputs = compute()
        frame.outputs.append([AbstractTensor(out.storage, out.numel, out.itemsize) for out in outputs])
        return outputs

    def checkpoint(self, function: Callable, x: AbstractTensor, kind: str, offload: bool = False) -> AbstractTensor:
        """Return ``function(x)``, whose saved tensors are dropped, and recomputed when backward needs them.

        Args:
            function: takes and returns a tensor.
            x: its input.
            kind: what is saved nevertheless: "full", nothing; "selective", the outputs of linear layers and attention;
                "alternate", of every second linear layer, and of attention.
            offload: keep x in CPU memory until recomputation needs it.
        """
        frame = self.frame = CheckpointFrame(kind)
        out = function(x)
        kept = AbstractTensor(x.storage, x.numel, x.itemsize)
        if offload:
            kept.storage = None  # pyright: ignore[reportAttributeAccessIssue]  # until it is recomputed
        frame.call = function, kept, x.node is not None
        frame.rope_tables = self.rope_tables
        self.frame = None
        return out

    def recompute(self, frame: CheckpointFrame):
        """Run a checkpointed call again, until all its holders are filled."""
        category, prefix, self.rope_tables = self.category, self.prefix, frame.rope_tables
        self.category, self.frame, frame.recomputing, frame.matmuls = "activations", frame, True, 0
        function, x, needs_gradient = frame.call
        if x.storage is None:  # offloaded: the copy lives as long as recomputation, or what that saves of it
            x = self.like(x, "block's input, from the CPU")
        x.node = NEEDS_GRADIENT if needs_gradient else None
        with suppress(StopRecomputation):
            function(x)
        frame.holders = []  # the frame holds the call's input until the last of its saved tensors is freed
        self.category, self.prefix, self.frame, self.rope_tables = category, prefix, None, ()

    # Backward

    def accumulate(self, receiver: Node | AbstractParameter, gradient: AbstractTensor):
        """Deliver a gradient. A second one for the same receiver is added to the first, into a new tensor."""
        if receiver.gradient is not None:
            (category, name), size = gradient.storage.term, gradient.numel * gradient.itemsize
            category = self.gradient_category if isinstance(receiver, AbstractParameter) else category
            total = self.hold(category, f"sum of {name}", size, gradient.itemsize)
            gradient = AbstractTensor(total, gradient.numel, gradient.itemsize)
        receiver.gradient = gradient
        if isinstance(receiver, AbstractParameter):
            receiver.received += 1
            if receiver.received == receiver.uses:
                receiver.received = receiver.uses = 0
                self.on_gradient_ready(receiver)

    def backward(self, loss: AbstractTensor):
        """Run the backward of every recorded operator, the last first."""
        # A loss depends on something that is trained.
        self.backward_from(loss.node, self.like(loss, "gradient of loss"))  # pyright: ignore[reportArgumentType]

    def backward_from(self, last: Node, output_gradient: AbstractTensor):
        """Run the backward of every recorded operator from ``last`` on, which need not be a loss.

        Args:
            last: the operator to begin with.
            output_gradient: the gradient of its output, which is alive until backward is done.
        """
        last.gradient = output_gradient
        self.category = "temporary"
        while self.nodes:
            node = self.nodes.pop()
            if node.pre_hook:
                node.pre_hook()
            if any(saved.storage is None for saved in node.saved):
                self.recompute(next(saved.frame for saved in node.saved if saved.frame))
            gradient, node.gradient = node.gradient, None
            # PyTorch delivers, and adds up, gradients of other operators before a parameter gets its own.
            made = sorted(node.run(gradient) or [], key=lambda item: isinstance(item[0], AbstractParameter))
            del gradient
            _free(node)
            while made:
                receiver, gradient = made.pop(0)
                if receiver is not None:
                    self.accumulate(receiver, gradient)
                del gradient, receiver
        self.category = "activations"

    def count_use(self, parameter: AbstractParameter):
        """Count one more operator that will contribute to a parameter's gradient. (Recomputation adds none.)"""
        if self.frame is None or not self.frame.recomputing:
            parameter.uses += 1

    def call_in_backward(self, action: Callable):
        """Call ``action()`` when backward passes this point of forward: between two modules."""
        self.nodes.append(Node(lambda _: action()))
