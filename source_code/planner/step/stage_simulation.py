"""Run one training step of a pipeline stage on sizes: PyTorch's schedules. Imports no torch.

Source: torch/distributed/pipelining of PyTorch 2.11 and 2.15.
"""

from planner.ops.autograd import Node, SizedTensor
from planner.step.simulation import Step

FRUGAL = (2, 15)  # from this version on PyTorch receives into new memory, and lets go of an output when it is sent


class InFlight:
    """What a micro-batch leaves between its forward and its backward, beside what operators save."""

    __slots__ = ("end", "input", "loss", "nodes", "output")

    def __init__(self):
        self.nodes = []  # as in Autograd
        self.input = self.output = None  # until backward; the output only until it is sent, but for the last stage's
        self.loss = None
        self.end = None  # where backward begins: the loss, or the output without its storage


class StageStep(Step):
    """One step of a stage: PyTorch's schedules, line for line, as far as a tensor's life depends on it."""

    # With several micro-batches in flight, every block is walked through.
    left_out_of = staticmethod(lambda blueprint: [])

    def walk(self):
        self.stage, self.entered, self.left_out, self.in_flight = self.plan.pipeline, [], {}, {}
        self.frugal = self.plan.torch >= FRUGAL
        if not self.frugal:  # a place for everything that a step receives is there from the first step on
            sides = (not self.stage.first) + (not self.stage.last)
            self.held.append(self.received("all inputs and gradients", sides * self.plan.micro_batches))
        walks = {"gpipe": self.forwards_then_backwards, "1f1b": self.one_forward_one_backward}
        walks[self.stage.schedule](self.plan.micro_batches)

    def forwards_then_backwards(self, count: int):
        """GPipe. Each half ends with the wait for what it has sent, which is there until then."""
        sent = []
        for number in range(count):
            self.forward(number)
        for number in range(count):
            sent += self.let_go_of_output(number)
        for number in range(count):
            sent.append(self.backward(number, self.receive("gradient of output", self.stage.last)))

    def one_forward_one_backward(self, count: int):
        """1F1B. What is sent is waited for before the next pass; a gradient's name is taken by the next one only."""
        ahead, waited_for = min(count, self.stage.stages - self.stage.stage), []
        for number in range(ahead):
            self.forward(number)
            if number:
                waited_for = self.let_go_of_output(number - 1)
        for number in range(count):
            gradient = self.receive("gradient of output", self.stage.last)
            self.let_go_of_output(min(number + ahead, count) - 1)
            sent = self.backward(number, gradient)
            del gradient
            if number + ahead < count:
                self.forward(number + ahead)
            else:
                waited_for.clear()
        del sent

    def receive(self, name: str, at_the_end: bool) -> SizedTensor | None:
        """What a neighbour sends; ``at_the_end`` of the pipeline there is none on that side."""
        if at_the_end:
            return None
        self.tape.go_to(f"receiving: {name}")
        return self.received(name, int(self.frugal))

    def received(self, name: str, times: int) -> SizedTensor:
        numel, itemsize = self.plan.blueprint.flowing, self.plan.itemsize
        storage = self.tape.hold("activations", f"received: {name}", times * numel * itemsize, itemsize)
        return SizedTensor(storage, numel, itemsize)

    def forward(self, number: int):
        flight = self.in_flight[number] = InFlight()
        self.tape.nodes = flight.nodes
        flight.input = self.receive("input", self.stage.first)
        if flight.input:
            flight.input.node = Node(None)  # backward leaves the gradient here that the stage before waits for
        flowing = [flight.input or self.batch[0]]
        for module in self.plan.blueprint.modules:
            self.call(module, flowing)
        self.leave_forward()
        flight.output = flowing.pop()
        flight.end = flight.output.node
        if self.stage.last:
            self.tape.go_to("loss")
            flight.loss = self.plan.blueprint.loss(self.tape, flight.output, self.batch[1], self.plan.itemsize)
            flight.end = flight.loss.node
            self.held.append(flight.loss)

    def let_go_of_output(self, number: int) -> list[SizedTensor]:
        """It is sent; a last stage's stays for backward. Returns it where PyTorch keeps it with the note of its sending."""
        if self.stage.last or number not in self.in_flight:
            return []
        if not self.frugal:
            return [self.in_flight[number].output]
        self.in_flight[number].output = None
        return []

    def backward(self, number: int, gradient: SizedTensor | None) -> SizedTensor | None:
        """From the gradient of the output, or of the loss where there is none. Returns that of the input."""
        flight = self.in_flight.pop(number)
        self.tape.nodes = flight.nodes
        for parameter in self.units[0].parameters.values():
            parameter.uses = 1  # in one backward, though several forwards have counted theirs
        if self.rules.gradients:  # the first backward's stay, and those to come are added to them
            self.tape.gradients_as = "temporary"
        self.tape.go_to("backward of the loss" if self.stage.last else "backward")
        self.tape.backward_from(flight.end, gradient or self.tape.like(flight.loss, "gradient of loss"))
        if self.stage.first:
            return None
        if self.stage.last:  # its loss is kept until the step ends, and with it autograd's leaves: the inputs
            self.held.append(flight.input.storage)
        gradient, flight.input.node.gradient = flight.input.node.gradient, None
        return gradient
