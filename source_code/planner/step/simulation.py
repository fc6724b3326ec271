"""Walk through one training step on sizes: every micro-batch's forward and backward, then the optimizer. No torch."""

from collections import Counter

from planner.ops.operators import Tape
from planner.parallel import deepspeed, strategies

RULES = strategies.RULES | deepspeed.RULES

WALKED = 3  # of a row of equal modules, so many are walked through at each end


def _middle(blueprint) -> list:
    """Of a row of many equal modules, those in the middle; if only each n-th is equal, whole periods of n.

    From one period to the next every term grows or shrinks by the same, in forward and in backward. So the highest
    of their moments is at one end of the row, and what the middle ones leave behind can be taken from a neighbour.
    """
    row = [module for module in blueprint.modules if module.wrapped and module.kind == "block"]
    ends = WALKED * blueprint.period
    return row[ends : ends + max(0, len(row) - 2 * ends) // blueprint.period * blueprint.period]


class Step:
    """One step on sizes: forward and backward of each micro-batch, then the optimizer."""

    def __init__(self, plan, first: bool):
        self.plan, self.first = plan, first
        rules = RULES[plan.strategy]
        self.tape = getattr(rules, "Tape", Tape)(
            plan.on_gpu, 2 if plan.autocast else None, plan.on_gpu and plan.workspaces, plan.torch
        )
        self.units = plan.make_units()
        # DeepSpeed's bucket does not end where a module does: no two do the same.
        self.skipped = [] if plan.deepspeed else self.left_out_of(plan.blueprint)
        pairs = zip(self.units, plan.units, strict=True)
        walked = [unit for unit, modules in pairs if not modules or modules[0] not in self.skipped]
        self.rules = rules(plan, self.tape, walked)
        self.unit_of = {
            module: unit for unit, modules in zip(self.units, plan.units, strict=True) for module in modules
        }

    left_out_of = staticmethod(_middle)

    def run(self) -> dict:
        plan, tape = self.plan, self.tape
        terms = plan.persistent().items()
        of_state = 1 if plan.optimizer == "adamw-8bit" else plan.itemsize
        held = [
            tape.hold(*term, size, of_state if term[0] == "optimizer state" else plan.parameter_itemsize)
            for term, size in terms
            if not (self.first and term[0] == "optimizer state")
        ]
        self.held = [tape.given("losses of the step before", 1, plan.loss_itemsize, plan.micro_batches)]
        self.batch = plan.blueprint.batch(tape, plan.micro_batches, plan.itemsize)
        self.walk()
        tape.go_to("optimizer")
        self.rules.before_optimizer()
        if self.first:
            held += [tape.hold(*term, size) for term, size in terms if term[0] == "optimizer state"]
        # PyTorch's default for Adadelta: all tensors of a GPU at once, DTensors too; the CPU's one after the other.
        numel = 0 if plan.offload else optimizer_temporary(plan.optimizer, plan.updated, at_once=plan.on_gpu)
        temporary = numel * plan.itemsize
        held.append(tape.hold("temporary", "intermediate results", temporary))
        return tape.moments

    def walk(self):
        """Every micro-batch; the third does what the second did."""
        walked = min(self.plan.micro_batches, 3)
        for number in range(walked):
            self.rules.syncs = self.plan.reductions > 1 or number == walked - 1
            if number == 2:
                left_out = self.plan.micro_batches - walked
                self.held.append(self.tape.given("losses of other micro-batches", 1, self.plan.itemsize, left_out))
            self.forward_and_backward()
            self.rules.after_micro_batch()

    def forward_and_backward(self):
        tape, rules, root = self.tape, self.rules, self.units[0]
        tape.go_to("forward")
        rules.before_forward(root)
        tape.when_backward_passes(lambda: rules.after_backward(root))
        flowing = [self.batch[0]]  # the tensor between two modules, in a list so that no name here keeps it alive
        self.left_out = {}  # what the skipped modules leave behind in forward
        self.entered, after = [], []  # what was alive when each module's backward began, and after its forward
        for module in self.plan.blueprint.modules:
            if module not in self.skipped:
                self.call(module, flowing)
                after.append(Counter(tape.live))
            elif module is self.skipped[0]:
                self.leave_out(grown=after[-1] - after[-1 - self.plan.blueprint.period])
        rules.after_forward(root)
        self.leave_forward()
        tape.when_backward_passes(lambda: self.enter("backward", root))
        tape.go_to("loss")
        output = flowing.pop()
        if self.plan.blueprint.holds_output:
            output = tape.to(output, self.plan.itemsize, "output")
            self.held.append(output)
        self.held.append(self.plan.blueprint.loss(tape, output, self.batch[1], self.plan.loss_itemsize))
        del output
        tape.go_to("backward of the loss")
        tape.backward(self.held[-1])

    def call(self, module, flowing):
        """One module's forward, with its unit's hooks before and after, and the same for its backward."""
        tape, rules, unit = self.tape, self.rules, self.unit_of[module]
        wrapped = unit is not self.units[0]
        begins, ends = (wrapped and unit.modules[end] is module for end in (0, -1))
        tape.go_to(f"forward of {module.name}")
        if begins:
            rules.before_forward(unit)
            tape.when_backward_passes(lambda: rules.after_backward(unit))
        tape.module = f"{module.kind}: "
        flowing.append(module.forward(tape, flowing.pop(), self.parameters(module, unit)))
        tape.module = ""
        if ends:
            rules.after_forward(unit)
        tape.when_backward_passes(lambda: self.enter(f"backward of {module.name}", unit if ends else None, module.kind))

    def leave_forward(self):
        """Autocast's casts and the tables go, but for what backward needs; the skipped modules' casts as the others' do."""
        self.tape.casts, self.tape.tables = {}, ()
        for term, storage in list(self.left_out.items()):
            if self.tape.live[term] == storage.size:
                del self.left_out[term]

    def leave_out(self, grown: Counter):
        """Do for all the skipped modules at once what the one before them did: in forward, and later in backward."""
        tape, period = self.tape, self.plan.blueprint.period
        count = len(self.skipped) // period
        self.left_out = {term: tape.hold(*term, size * count) for term, size in grown.items()}

        def backward():
            self.left_out.clear()
            gradients = self.entered[-1] - self.entered[-1 - period]
            self.held += [tape.hold(*term, size * count) for term, size in gradients.items()]

        tape.when_backward_passes(backward)

    def enter(self, place: str, unit, kind: str = ""):
        self.entered.append(Counter(self.tape.live))
        self.tape.go_to(place)
        self.tape.module = f"{kind}: " if kind else ""
        if unit:
            self.rules.before_backward(unit)

    def parameters(self, module, unit) -> dict:
        tied = self.plan.blueprint.tied
        of_root = {name: parameter for (_, name), parameter in self.units[0].parameters.items()}
        return {
            name: of_root[tied[name]] if name in tied else unit.parameters[module, name] for name in module.parameters
        }


def optimizer_temporary(optimizer: str, sizes: list[int], at_once: bool = False) -> int:
    """Numbers in the optimizer's intermediate results at their most. sizes: of the tensors it updates, in order.

    at_once: whether Adadelta updates them together (foreach).
    """
    if optimizer == "adadelta" and at_once:  # the roots of both means, of all tensors
        return 2 * sum(sizes)
    pairs = list(zip([0, *sizes], sizes, strict=False))  # (the tensor before, this one)
    if optimizer == "adadelta":  # two a tensor, each of which takes the place of the one before only when it is there
        return max(max(2 * before + size, before + 2 * size) for before, size in pairs)
    if optimizer == "adamw":  # foreach: the denominators of all tensors at once
        return sum(sizes)
    if optimizer == "adamw-for-loop":  # the square root and the denominator of one, beside the denominator before
        return max((before + 2 * size for before, size in pairs), default=0)
    return 0
