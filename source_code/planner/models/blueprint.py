# SPDX-License-Identifier: BSD-3-Clause
"""What a network is to the planner: modules with parameters, and their operators on sizes. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from planner.ops.attention import Heads
from planner.ops.autograd import AbstractParameter, AbstractTensor
from planner.ops.context import Context
from planner.ops.operators import Tape
from planner.ops.routing import Spread
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
        spread: the parameters of this rank's experts, of which other ranks have others.
        active: {parameter: the share of its elements that a token multiplies}, where that is not all.
        heads: of its attention, which is quadratic in the length; None: there is none.
    """

    name: str
    parameters: dict[str, tuple]
    forward: Callable[[Tape, AbstractTensor, dict[str, AbstractParameter]], AbstractTensor]
    wrapped: bool = False
    frozen: frozenset = frozenset()
    replicated: frozenset = frozenset()
    quantized: frozenset = frozenset()
    grouped_with_next: bool = False
    recomputed: tuple[float, bool] = (0, False)
    spread: frozenset = frozenset()
    active: dict[str, float] = field(default_factory=dict)
    heads: Heads | None = None

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
        context: what the ranks that share each sequence exchange.
        spread: how its experts are spread over ranks.
        period: each wrapped module is like the one this many before it.
        boundary_numel: elements of a micro-batch between two blocks, and so between two stages of a pipeline.
        holds_output: whether the training loop holds the network's output until it has the next step's.
        unmodeled: what of its operators is not modeled, for messages; "": all are. Then ``forward`` raises a UserError,
            and only what persists, and the traffic, can be planned.
        buffers: bytes that each rank stores in addition to parameters, in fp32.
        offloaded_inputs: blocks whose input is in CPU memory from forward to backward.
    """

    name: str
    modules: tuple[AbstractModule, ...]
    batch: Callable[[Tape, int, int], tuple[AbstractTensor, AbstractTensor]]
    loss: Callable[[Tape, AbstractTensor, AbstractTensor, int], AbstractTensor]
    samples: int
    flops: float
    tied: dict[str, str] = field(default_factory=dict)
    tensor_parallel: Exchange = field(default_factory=Exchange)
    context: Context = field(default_factory=Context)
    spread: Spread = field(default_factory=Spread)
    period: int = 1
    boundary_numel: int = 0
    holds_output: bool = False
    unmodeled: str = ""
    buffers: int = 0
    offloaded_inputs: int = 0

    @property
    def numel(self) -> int:
        """The number of parameters, on all ranks of a tensor group together."""
        return sum(numel for numel, _ in self._parameters())

    @property
    def active_numel(self) -> int:
        """The number of parameters that a token uses: with a mixture of experts, without those it is not routed to."""
        return round(sum(numel * share for numel, share in self._parameters()))

    def _parameters(self):
        """Yield (elements on all ranks of a tensor group, the share that a token uses) of each parameter."""
        for module in self.modules:
            for name, shape in module.parameters.items():
                if name not in self.tied:
                    ranks = 1 if name in module.replicated else self.tensor_parallel.tp_degree
                    ranks *= self.spread.ep_degree if name in module.spread else 1
                    yield prod(shape) * ranks, module.active.get(name, 1)
