"""A pipeline: the model in stages, each on a rank of its own, and a step's batch in micro-batches. Imports no torch.

``blocks_of`` splits the model, ``order`` says what a stage computes when.

Sources: GPipe (arXiv:1811.06965); 1F1B with a flush as in Megatron-LM (arXiv:2104.04473, section 2.2), first in
PipeDream (arXiv:1806.03377); torch/distributed/pipelining of PyTorch 2.11 and 2.15.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner import UserError
from planner.models.shapes import GPTShape
from planner.ops.autograd import Node, SizedTensor
from planner.parallel.mesh import Mesh
from planner.step.simulation import Step

SCHEDULES = ("gpipe", "1f1b")
FRUGAL = (2, 15)  # from this version on PyTorch receives into new memory, and lets go of an output when it is sent


def blocks_of(layers: int, stages: int) -> list[range]:
    """Which of the ``layers`` blocks each stage has: as evenly as possible, and of unequal parts the first the larger."""
    sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def check(mesh: Mesh, shape: GPTShape, schedule: str, micro_batches: int):
    """UserError for stages that the model, the schedule or gpt_pipeline.py cannot have."""
    if mesh.ranks != mesh.pipeline:
        raise UserError("a pipeline here has stages only: give --mesh pipeline=N alone, N being the number of ranks")
    if mesh.pipeline > shape.layers:
        raise UserError(f"{mesh.pipeline} stages are more than the {shape.layers} blocks: take fewer ranks")
    if shape.tied and mesh.pipeline > 1:
        raise UserError("one weight for embedding and head cannot be on two stages: take a preset that has two")
    if schedule == "1f1b" and micro_batches < mesh.pipeline:
        raise UserError(
            f"--accumulate {micro_batches} is fewer micro-batches than the {mesh.pipeline} stages need with "
            "--schedule 1f1b: give more, or take --schedule gpipe"
        )


def order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage computes in a step, in order: ("forward" or "backward", number of the micro-batch).

    "gpipe": all forwards, then all backwards. "1f1b": as many forwards as there are stages from this one on, then a
    backward and a forward by turns, and the backwards that are left.
    """
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    actions = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("backward", number))
        if number + ahead < micro_batches:
            actions.append(("forward", number + ahead))
    return actions


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step that a stage waits, where all stages take equally long: (p − 1) / (m + p − 1).

    The same for both schedules: they differ in memory, not in time. Sources: GPipe's paper, section 2.3, where it is
    O((p − 1) / (m + p − 1)); Megatron-LM's, section 2.2, has (p − 1) / m, its ratio to the ideal step instead.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def idle_share(schedule: str, seconds: dict[tuple[int, str, int], float]) -> float:
    """``bubble`` where stages and micro-batches are not equally long; to hand over takes no time here either.

    seconds: how long each (stage, "forward" or "backward", micro-batch) takes. The orders are played through: an
    action begins when its stage is done with the one before, and its neighbour has handed over what it needs.
    """
    stages = 1 + max(stage for stage, *_ in seconds)
    to_do = [order(schedule, stages, stage, len(seconds) // (2 * stages)) for stage in range(stages)]
    now, ends = [0.0] * stages, {}
    while any(to_do):
        for stage, actions in enumerate(to_do):
            while actions:
                action, number = actions[0]
                giver = stage - 1 if action == "forward" else stage + 1
                if 0 <= giver < stages and (giver, action, number) not in ends:
                    break
                begin = max(now[stage], ends.get((giver, action, number), 0.0))
                now[stage] = ends[stage, action, number] = begin + seconds[stage, action, number]
                actions.pop(0)
    return 1 - sum(seconds.values()) / (stages * max(now))


@dataclass(frozen=True)
class Stage:
    """Which stage of how many, and in which order it computes: one of ``SCHEDULES``."""

    stages: int
    stage: int
    schedule: str

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def traffic(self, plan) -> list[dict]:
        """What this rank sends and receives in a step, as ``Plan.traffic`` has it: each time a pair of ranks takes part.

        Activations go to the next stage and gradients to the one before, each once a micro-batch; all add up the norm's
        square, if gradients are clipped.
        """
        neighbours = 2 - self.first - self.last
        size = plan.blueprint.flowing * plan.itemsize
        passed = {"count": neighbours * plan.micro_batches, "bytes": size, "ranks": 2, "dimension": None}
        norm = {"kind": "all-reduce", "count": 1, "bytes": plan.itemsize, "ranks": self.stages, "dimension": None}
        sent = [{"kind": kind} | passed for kind in ("receive", "send")] if neighbours else []
        return [norm, *sent] if plan.clip else sent


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
