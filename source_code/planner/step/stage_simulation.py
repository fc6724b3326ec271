# SPDX-License-Identifier: BSD-3-Clause
"""Run one training step of a pipeline stage on sizes: PyTorch's schedules. Imports no torch.

Source: torch/distributed/pipelining of PyTorch 2.11 and 2.15.
"""

from planner.ops.autograd import AbstractTensor, Node
from planner.step.simulation import Step

# From this version on, PyTorch receives into new memory, and frees an output when it is sent.
FREES_SENT_OUTPUTS_SINCE = (2, 15)


class InFlight:
    """The tensors of a micro-batch between its forward and its backward, in addition to those that operators save.

    Attributes:
        nodes: its operators, as in ``Autograd``.
        input: until backward.
        output: until it is sent; the last stage's until backward.
        loss: of the last stage.
        end: the node where backward begins: the loss's, or the output's.
    """

    __slots__ = ("end", "input", "loss", "nodes", "output")

    def __init__(self):
        self.nodes = []
        self.input: AbstractTensor | None = None
        self.output: AbstractTensor | None = None
        self.loss: AbstractTensor | None = None
        self.end: Node | None = None


class StageStep(Step):
    """One step of a stage: PyTorch's schedules, line for line, as far as a tensor's life depends on it."""

    # With several micro-batches in flight, every block is simulated.
    find_skipped = staticmethod(lambda blueprint: [])

    def run_micro_batches(self):
        """Run the stage's forwards and backwards in the schedule's order."""
        self.stage, self.live_at_backward, self.skipped_terms, self.in_flight = self.plan.pipeline, [], {}, {}
        self.frees_sent_outputs = self.plan.torch >= FREES_SENT_OUTPUTS_SINCE
        if not self.frees_sent_outputs:  # everything that a step receives has a buffer from the first step on
            sides = (not self.stage.first) + (not self.stage.last)
            self.held.append(self.received("all inputs and gradients", sides * self.plan.micro_batches))
        schedules = {"gpipe": self.forwards_then_backwards, "1f1b": self.one_forward_one_backward}
        schedules[self.stage.schedule](self.plan.micro_batches)

    def forwards_then_backwards(self, count: int):
        """Run GPipe's schedule. Each half ends with the wait for what it has sent, which is alive until then."""
        sent = []
        for number in range(count):
            self.forward(number)
        for number in range(count):
            sent += self.release_output(number)
        for number in range(count):
            sent.append(self.backward(number, self.receive("gradient of output", self.stage.last)))

    def one_forward_one_backward(self, count: int):
        """Run 1F1B's schedule. Each pass waits for what the one before has sent; a gradient is alive until the next one."""
        ahead, waited_for, sent = min(count, self.stage.stages - self.stage.stage), [], None
        for number in range(ahead):
            self.forward(number)
            if number:
                waited_for = self.release_output(number - 1)
        for number in range(count):
            gradient = self.receive("gradient of output", self.stage.last)
            self.release_output(min(number + ahead, count) - 1)
            sent = self.backward(number, gradient)
            del gradient
            if number + ahead < count:
                self.forward(number + ahead)
            else:
                waited_for.clear()
        del sent

    def receive(self, name: str, at_the_end: bool) -> AbstractTensor | None:
        """Receive a tensor from a neighbor; there is none at that end of the pipeline."""
        if at_the_end:
            return None
        self.tape.enter_phase(f"receiving: {name}")
        return self.received(name, int(self.frees_sent_outputs))

    def received(self, name: str, count: int) -> AbstractTensor:
        """Return a boundary activation, or its gradient, that ``count`` buffers were allocated for."""
        numel, itemsize = self.plan.blueprint.boundary_numel, self.plan.itemsize
        storage = self.tape.hold("activations", f"received: {name}", count * numel * itemsize, itemsize)
        return AbstractTensor(storage, numel, itemsize)

    def forward(self, number: int):
        """Run the forward of a micro-batch."""
        flight = self.in_flight[number] = InFlight()
        self.tape.nodes = flight.nodes
        flight.input = self.receive("input", self.stage.first)
        if flight.input:
            flight.input.node = Node(None)  # backward leaves the gradient here that the stage before waits for
        carried = [flight.input or self.batch[0]]
        for module in self.plan.blueprint.modules:
            self.forward_module(module, carried)
        self.end_forward()
        flight.output = carried.pop()
        flight.end = flight.output.node
        if self.stage.last:
            self.tape.enter_phase("loss")
            loss = self.plan.blueprint.loss(self.tape, flight.output, self.batch[1], self.plan.itemsize)
            flight.loss, flight.end = loss, loss.node
            self.held.append(loss)

    def release_output(self, number: int) -> list[AbstractTensor]:
        """Send a micro-batch's output; the last stage's stays for backward.

        Returns:
            The output, if PyTorch holds it until it is sent.
        """
        if self.stage.last or number not in self.in_flight:
            return []
        if not self.frees_sent_outputs:
            return [self.in_flight[number].output]
        self.in_flight[number].output = None
        return []

    def backward(self, number: int, gradient: AbstractTensor | None) -> AbstractTensor | None:
        """Run the backward of a micro-batch.

        Args:
            number: which one.
            gradient: of the output; None on the last stage, where backward begins with the loss.

        Returns:
            The gradient of the input; None on the first stage.
        """
        flight = self.in_flight.pop(number)
        self.tape.nodes = flight.nodes
        for parameter in self.units[0].parameters.values():
            parameter.uses = 1  # in one backward, though several forwards have counted theirs
        if self.rules.gradients:  # the first backward's stay, and later ones are added to them
            self.tape.gradient_category = "temporary"
        self.tape.enter_phase("backward of the loss" if self.stage.last else "backward")
        self.tape.backward_from(flight.end, gradient or self.tape.like(flight.loss, "gradient of loss"))
        if self.stage.first:
            return None
        if self.stage.last:  # its loss is alive until the step ends, and with it autograd's leaves: the inputs
            self.held.append(flight.input.storage)
        gradient, flight.input.node.gradient = flight.input.node.gradient, None
        return gradient
