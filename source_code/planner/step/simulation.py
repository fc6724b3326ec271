# SPDX-License-Identifier: BSD-3-Clause
"""Run one training step on sizes: every micro-batch's forward and backward, then the optimizer. Imports no torch."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from planner.models.networks import AbstractModule, Blueprint
from planner.ops.autograd import FP32, INT64, AbstractTensor
from planner.ops.operators import Tape
from planner.parallel import deepspeed, expert_parallel, muon, strategies
from planner.parallel.strategies import Unit

RULES = strategies.RULES | deepspeed.RULES

SIMULATED_ENDS = 3  # of a stack of equal modules, those that are simulated at each end
TOKENS = "tokens of each expert"
MAX_SIMULATED_MICRO_BATCHES = 3  # each further one does what the last one does


def skippable_blocks(blueprint: Blueprint) -> list[AbstractModule]:
    """Return the interior blocks of a repeated stack; whole periods, if the pattern repeats every N blocks.

    From one period to the next every term grows or shrinks by the same amount, in forward and in backward. So the
    highest peak is at one end of the stack, and what the interior blocks leave behind can be taken from a neighbor.
    """
    stack = [module for module in blueprint.modules if module.wrapped and module.kind == "block"]
    ends = SIMULATED_ENDS * blueprint.period
    return stack[ends : ends + max(0, len(stack) - 2 * ends) // blueprint.period * blueprint.period]


class Step:
    """One step on sizes: forward and backward of each micro-batch, then the optimizer.

    Attributes:
        plan: the ``Plan`` whose step it is.
        first: whether the optimizer creates its state in this step.
        tape: counts what is alive.
        rules: what the strategy does, see planner/parallel/strategies.py.
        units: in the order of ``plan.units``.
        skipped: modules that are not simulated.
        held: what is alive until the step ends.
    """

    def __init__(self, plan, first: bool):
        self.plan, self.first = plan, first
        rules = expert_parallel.SpreadFSDP2 if plan.ep_degree > 1 else RULES[plan.strategy]
        self.tape = getattr(rules, "Tape", Tape)(
            plan.on_gpu, 2 if plan.autocast else None, plan.on_gpu and plan.workspaces, plan.torch
        )
        self.tape.flash = plan.flash
        self.units = plan.make_units()
        # DeepSpeed's buckets do not end where a module does: no two modules do the same.
        self.skipped = [] if plan.deepspeed else self.find_skipped(plan.blueprint)
        pairs = zip(self.units, plan.units, strict=True)
        simulated = [unit for unit, modules in pairs if not modules or modules[0] not in self.skipped]
        self.rules = rules(plan, self.tape, simulated)
        self.unit_of = {
            module: unit for unit, modules in zip(self.units, plan.units, strict=True) for module in modules
        }

    find_skipped = staticmethod(skippable_blocks)

    def run(self) -> dict[str, tuple[int, dict]]:
        """Run the step, and return the peak of each phase: {phase: (bytes, {(category, name): bytes})}."""
        plan, tape = self.plan, self.tape
        terms = plan.persistent().items()
        smaller = {"adamw-8bit": 1, "adamw-bf16": 2}
        state_itemsize = smaller[plan.optimizer] if plan.optimizer in smaller else plan.itemsize
        held = [
            tape.hold(kind, name, size, state_itemsize if kind == "optimizer state" else plan.parameter_itemsize)
            for (kind, name), size in terms
            if not (self.first and kind == "optimizer state")
        ]
        self.held = [tape.constant("losses of the step before", 1, plan.loss_itemsize, plan.micro_batches)]
        if counts := plan.blueprint.spread.counts:  # of the last micro-batch, and of all of them, for the record
            self.held.append(tape.constant(TOKENS, counts, INT64, 1 + plan.micro_batches))
        self.batch = plan.blueprint.batch(tape, plan.micro_batches, plan.itemsize)
        if plan.precision == "fp16" and plan.flat and not plan.on_gpu:  # a GPU's kernel counts in place
            held.append(tape.constant("steps since the last overflow", 1, FP32))
        self.run_micro_batches()
        tape.enter_phase("optimizer")
        if plan.precision == "fp16":  # fused AdamW takes a flag that is the sum over devices
            held.append(tape.constant("flag for an overflow", 1, FP32, 2 if plan.optimizer == "adamw-fused" else 1))
        self.rules.before_optimizer()
        if self.first:
            held += [tape.hold(kind, name, size) for (kind, name), size in terms if kind == "optimizer state"]
        if plan.optimizer in muon.WAYS:
            temporary = muon.temporary(plan).items()
            held += [tape.hold(kind, name, size, muon.itemsize(plan)) for (kind, name), size in temporary]
            return tape.snapshots
        size = 0 if plan.offload else max(optimizer_temporary_bytes(plan, group) for group in plan.optimizer_groups)
        held.append(tape.hold("temporary", "intermediate results", size))
        return tape.snapshots

    def run_micro_batches(self):
        """Run forward and backward of the micro-batches that are simulated."""
        routing = self.plan.blueprint.spread.routing
        most = MAX_SIMULATED_MICRO_BATCHES if not routing or routing.uniform else self.plan.micro_batches
        simulated = min(self.plan.micro_batches, most)
        for number in range(simulated):
            self.tape.micro_batch = number
            self.rules.syncs = self.plan.reductions > 1 or number == simulated - 1
            if number == 2 and simulated == MAX_SIMULATED_MICRO_BATCHES:
                others = self.plan.micro_batches - simulated
                self.held.append(self.tape.constant("losses of other micro-batches", 1, self.plan.itemsize, others))
                self.held.append(self.tape.constant(TOKENS, self.plan.blueprint.spread.counts, INT64, others))
            self.forward_and_backward()
            self.rules.after_micro_batch()

    def forward_and_backward(self):
        """Run one micro-batch."""
        tape, rules, root = self.tape, self.rules, self.units[0]
        tape.enter_phase("forward")
        rules.pre_forward(root)
        tape.call_in_backward(lambda: rules.post_backward(root))
        carried = [self.batch[0]]  # the tensor between two modules, in a list so that no variable here holds it
        self.skipped_terms = {}  # what the skipped modules leave behind in forward
        self.live_at_backward, live_after = [], []  # as each module's backward began, and after its forward
        for module in self.plan.blueprint.modules:
            if module not in self.skipped:
                self.forward_module(module, carried)
                live_after.append(Counter(tape.live))
            elif module is self.skipped[0]:
                self.skip(grown=live_after[-1] - live_after[-1 - self.plan.blueprint.period])
        rules.post_forward(root)
        self.end_forward()
        tape.call_in_backward(lambda: self.begin_backward("backward", root))
        tape.enter_phase("loss")
        output = carried.pop()
        if self.plan.blueprint.holds_output:
            output = tape.to(output, self.plan.itemsize, "output")
            self.held.append(output)
        self.held.append(self.plan.blueprint.loss(tape, output, self.batch[1], self.plan.loss_itemsize))
        del output
        if counts := self.plan.blueprint.spread.counts:
            self.held.insert(0, tape.constant(TOKENS, counts, INT64))
        tape.enter_phase("backward of the loss")
        scaled = tape.constant("loss, scaled", 1, FP32) if self.plan.precision == "fp16" else None
        tape.backward(self.held[-1])
        del scaled

    def forward_module(self, module: AbstractModule, carried: list):
        """Run one module's forward with its unit's hooks, and schedule those of its backward.

        Args:
            module: which one.
            carried: the input, in a list of one; it is replaced by the output.
        """
        tape, rules, unit = self.tape, self.rules, self.unit_of[module]
        wrapped = unit is not self.units[0]
        begins, ends = (wrapped and unit.modules[end] is module for end in (0, -1))
        tape.enter_phase(f"forward of {module.name}")
        if begins:
            rules.pre_forward(unit)
            tape.call_in_backward(lambda: rules.post_backward(unit))
        tape.prefix, tape.experts_unit = f"{module.kind}: ", partial(self.run_nested, unit.nested)
        carried.append(module.forward(tape, carried.pop(), self.parameters(module, unit)))
        tape.prefix = ""
        if ends:
            rules.post_forward(unit)
        unit_to_gather = unit if ends else None
        tape.call_in_backward(
            lambda: self.begin_backward(f"backward of {module.name}", unit_to_gather, f"{module.kind}: ")
        )

    def run_nested(self, unit: Unit | None, compute: Callable, x: AbstractTensor) -> AbstractTensor:
        """Return ``compute(x)``, with the hooks of a unit inside a module around it; None: there is none."""
        if unit is None:
            return compute(x)
        again = bool(self.tape.frame and self.tape.frame.recomputing)
        self.rules.pre_forward(unit)
        if not again:
            self.tape.call_in_backward(lambda: self.rules.post_backward(unit))
        out = compute(x)
        self.rules.post_forward(unit)
        if not again:
            self.tape.call_in_backward(lambda: self.rules.pre_backward(unit))
        return out

    def end_forward(self):
        """Free autocast's casts and the rotary tables, except what is saved for backward."""
        self.tape.casts, self.tape.rope_tables = {}, ()
        for term, storage in list(self.skipped_terms.items()):  # the skipped modules' casts, too
            if self.tape.live[term] == storage.size:
                del self.skipped_terms[term]

    def skip(self, grown: Counter):
        """Do for all skipped modules at once what the one before them did, in forward and later in backward.

        Args:
            grown: {(category, name): bytes} by which the period before them has grown.
        """
        tape, period = self.tape, self.plan.blueprint.period
        count = len(self.skipped) // period
        self.skipped_terms = {term: tape.hold(term[0], term[1], size * count) for term, size in grown.items()}

        def backward():
            self.skipped_terms.clear()
            gradients = self.live_at_backward[-1] - self.live_at_backward[-1 - period]
            self.held += [tape.hold(kind, name, size * count) for (kind, name), size in gradients.items()]

        tape.call_in_backward(backward)

    def begin_backward(self, phase: str, unit: Unit | None, prefix: str = ""):
        """Enter the backward of a module, and gather its unit.

        Args:
            phase: its name.
            unit: None if it is gathered already.
            prefix: of the names of tensors in it.
        """
        self.live_at_backward.append(Counter(self.tape.live))
        self.tape.enter_phase(phase)
        self.tape.prefix = prefix
        if unit and unit.nested:  # for recomputation
            self.tape.experts_unit = partial(self.run_nested, unit.nested)
        if unit:
            self.rules.pre_backward(unit)

    def parameters(self, module: AbstractModule, unit: Unit) -> dict:
        """Return a module's parameters, {name: AbstractParameter}; those tied to another are the root's."""
        tied = self.plan.blueprint.tied
        of_root = {name: parameter for (_, name), parameter in self.units[0].parameters.items()}
        nested = unit.nested or unit
        return {
            name: of_root[tied[name]]
            if name in tied
            else (nested if name in module.spread else unit).parameters[module, name]
            for name in module.parameters
        }


def optimizer_temporary_bytes(plan, sizes: list[int]) -> int:
    """Return the bytes of the optimizer's intermediate results at their peak.

    Args:
        plan: the ``Plan``.
        sizes: elements of the tensors that it updates, in order.
    """
    if plan.optimizer == "adamw-bf16":  # both moments, random numbers, and in bf16 the gradient or weight, all in fp32
        return (4 if plan.weights == "bf16" else 3) * FP32 * max(sizes, default=0)
    # PyTorch's default for Adadelta: all tensors of a GPU at once, DTensors too; the CPU's one after another.
    return optimizer_temporary(plan.optimizer, sizes, foreach_adadelta=plan.on_gpu) * plan.itemsize


def optimizer_temporary(optimizer: str, sizes: list[int], foreach_adadelta: bool = False) -> int:
    """Return the elements of the optimizer's intermediate results at their peak.

    Args:
        optimizer: a key of ``plan.STATES``.
        sizes: elements of the tensors that it updates, in order.
        foreach_adadelta: whether Adadelta updates them together.
    """
    if optimizer == "adadelta" and foreach_adadelta:  # the roots of both means, of all tensors
        return 2 * sum(sizes)
    pairs = list(zip([0, *sizes], sizes, strict=False))  # (the tensor before, this one)
    if optimizer == "adadelta":  # two per tensor; each replaces the one before only when it exists
        return max(max(2 * before + size, before + 2 * size) for before, size in pairs)
    if optimizer == "adamw":  # foreach: the denominators of all tensors at once
        return sum(sizes)
    if optimizer == "adamw-for-loop":  # the square root and the denominator of one, with the denominator before
        return max((before + 2 * size for before, size in pairs), default=0)
    if optimizer == "lion":  # momentum and gradient, each times its factor, and their sum, with the update before
        return max((before + 3 * size for before, size in pairs), default=0)
    return 0
