# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 06, CPU offload."""

from functools import partial
from math import ceil, prod

import torch
import torch.nn.functional as F
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from planner.parallel import pinned
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.measuring.counted_offload import CountedBus
from labkit.measuring.trace import local
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered


class Bus:
    """Copy tensors between the two simulated sides, and count the bytes in each direction."""

    def __init__(self):
        self.bytes = {"up": 0, "down": 0}

    def up(self, tensor):
        """Return a copy on the device."""
        if isinstance(tensor, OnDevice):
            raise TypeError("bus.up was called with a tensor that is already on the device")
        self.bytes["up"] += tensor.nbytes
        return tensor.clone().as_subclass(OnDevice)

    def down(self, tensor):
        """Return a copy on the host."""
        if not isinstance(tensor, OnDevice):
            raise TypeError("bus.down was called with a tensor that is already on the host")
        self.bytes["down"] += tensor.nbytes
        return tensor.as_subclass(torch.Tensor).clone()


class OnDevice(torch.Tensor):
    """A tensor on the device: results computed from it are on the device, too, and operands on the host are refused."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(v, torch.Tensor) and not isinstance(v, OnDevice) and v.dim() for v in flat):
            raise RuntimeError(
                f"{function.__name__} was called with tensors on both sides, device and host: move them to one side first"
            )
        return super().__torch_function__(function, types, args, kwargs)


# The optimizer alone on the host, on real ranks

STEPS = 3


def _small(me):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return fully_shard(model, mesh=init_device_mesh("cpu", (me.world_size,)))


def _backward(me, model, step: int):
    model.zero_grad()
    numbers = torch.Generator().manual_seed(10 * step + me.rank)
    F.mse_loss(model(torch.randn(5, 6, generator=numbers, dtype=torch.float64)), torch.ones(5, 4).double()).backward()


def _hosted(me, host_step) -> list[dict]:
    """Run the learner's steps; return, per step, the bytes transferred and whether both sides match a plain optimizer."""
    plain, model = _small(me), _small(me)
    usual = torch.optim.Adam(plain.parameters(), lr=0.01)
    device = [local(p.detach()).as_subclass(OnDevice) for p in model.parameters()]
    host = [nn.Parameter(there.as_subclass(torch.Tensor).clone()) for there in device]
    optimizer, results = torch.optim.Adam(host, lr=0.01), []
    for step in range(STEPS):
        _backward(me, plain, step)
        usual.step()
        _backward(me, model, step)
        bus, gradients = Bus(), [local(p.grad).as_subclass(OnDevice) for p in model.parameters()]
        with torch.no_grad():
            host_step(device, gradients, host, optimizer, bus)
        pairs = zip(plain.parameters(), model.parameters(), host, strict=True)
        same = [(torch.equal(local(a), local(b)), torch.equal(local(a), c)) for a, b, c in pairs]
        about = {"device": all(there for there, _ in same), "host": all(here for _, here in same)}
        results.append(bus.bytes | about | {"shards": sum(there.nbytes for there in device)})
    return results


def judge_host_step(host_step) -> str:
    for rank, steps in enumerate(on_ranks(_hosted, host_step, ranks=2)):
        if not any(step["up"] or step["down"] or step["host"] for step in steps):
            return "not answered yet"
        for number, step in enumerate(steps, start=1):
            if message := _hosting(step, number):
                return f"not quite: rank {rank}, step {number}: {message}"
    return "right"


def _hosting(step: dict, number: int) -> str | None:
    """Describe the first error in a step, or return None."""
    down, up, shards = step["down"], step["up"], step["shards"]
    if down != shards:
        few = "the optimizer needs this step's gradients" if down < shards else "send only gradients down, and once"
        return f"{down} bytes came down, but the gradients' shards have {shards}: {few}"
    if not step["host"] and number == 1:
        return "the host's copy differs from the optimizer's result for these gradients: set host[i].grad, then call optimizer.step()"
    if not step["host"]:
        return "step 1 was right, but the host's copy is wrong now: do you replace the gradient, and use the same optimizer?"
    if up < shards:
        return f"{up} bytes went up, but the shards have {shards}: the device continues with old parameters"
    if up > shards:
        return f"{up} bytes went up, but the shards have {shards}: send only the new parameters up, and once"
    if not step["device"]:
        return "the host's copy is right, but the device's is not: change device[i] in place, with copy_"
    return None


# Activations on the host, on real ranks: without the parameters that FSDP gathers again


def _activations_only(block, bus):
    def pack(tensor):
        gathered = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        return tensor if tensor.untyped_storage().data_ptr() in gathered else bus.down(tensor)

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else bus.up(packed)


def _under(hooks, forward, x):
    with saved_tensors_hooks(*hooks):
        return forward(x)


def _with_hooks(me, offload_hooks) -> dict | None:
    """Run forward and backward of two units under hooks: {"bytes", "gradients"}; None if there are no hooks."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2))).double()
    mesh, bus = init_device_mesh("cpu", (me.world_size,)), CountedBus()
    for block in model:
        hooks = offload_hooks(block, bus)
        if unanswered(hooks):
            return None
        block.forward = partial(_under, hooks, block.forward)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    numbers = torch.Generator().manual_seed(me.rank)
    F.mse_loss(model(torch.randn(5, 6, generator=numbers, dtype=torch.float64)), torch.ones(5, 6).double()).backward()
    return {"bytes": bus.bytes, "gradients": [local(parameter.grad) for parameter in model.parameters()]}


def _compared(me, offload_hooks) -> str:
    """Describe what is wrong with the learner's hooks on this rank."""
    if (found := _with_hooks(me, offload_hooks)) is None:
        return "not answered yet"
    right = _with_hooks(me, _activations_only)
    down, up, least = found["bytes"]["down"], found["bytes"]["up"], right["bytes"]["down"]
    if down == 0:
        return "not quite: nothing came down: pack returns bus.down(tensor) for what the block has computed"
    if down > least:
        return (
            f"not quite: {down - least} of {down} bytes are gathered parameters, which FSDP brings back without this bus "
            "(pack receives views of them, such as weight.t(), which are no nn.Parameter)"
        )
    if down < least:
        return f"not quite: {least - down} of {least} bytes of activations stayed on the device"
    if up != down:
        return f"not quite: {down} bytes came down and {up} went up: each saved tensor is unpacked once here"
    pairs = zip(found["gradients"], right["gradients"], strict=True)
    return "right" if all(torch.equal(a, b) for a, b in pairs) else "not quite: the gradients differ"


def judge_offload_hooks(offload_hooks) -> str:
    results = on_ranks(_compared, offload_hooks, ranks=2)
    return next((result for result in results if result != "right"), "right")


# The host's memory

NODES = (("tiny", 3, 3), ("llama3-8b", 8, 8), ("llama3-8b", 12, 4))  # (model, ranks, ranks on a node)


def shapes_of(preset: str) -> list[tuple]:
    """Return the shape of each parameter of a preset."""
    return [shape for module in networks.gpt(GPT_SHAPES[preset], 1, 8).modules for shape in module.parameters.values()]


def host_bytes(shapes, ranks, on_node, *, pin=pinned.allocated, pin_state=int, gradients=True, rows=ceil) -> int:
    """Return the bytes of parameters, gradients and Adam's two moments of the ranks on a node."""
    each = [4 * int(rows(shape[0] / ranks) * prod(shape[1:])) for shape in shapes]
    return on_node * sum((1 + gradients) * pin(size) + 2 * pin_state(size) for size in each)


def rounding(ranks: int) -> float:
    """Return how many times the exact bytes the host needs, for Llama 3 8B with all ranks on one node."""
    job = shapes_of("llama3-8b"), ranks, ranks
    return host_bytes(*job) / host_bytes(*job, pin=int)


WORST = max(range(2, 17), key=rounding)


SLIPS = {
    "that is one rank; every rank of the node has its shards there": lambda *job: host_bytes(*job) / job[2],
    "each pinned tensor takes the next power of two": lambda *job: host_bytes(*job, pin=int),
    "the optimizer's state is not pinned, so nothing rounds it up": lambda *job: host_bytes(
        *job, pin_state=pinned.allocated
    ),
    "the shards of the gradients come down, too, and are pinned": lambda *job: host_bytes(*job, gradients=False),
    "FSDP2 cuts whole rows: a shard has ceil(rows / ranks) of them": lambda *job: host_bytes(*job, rows=float),
}


def judge_host_bytes(answer) -> str:
    for preset, ranks, on_node in NODES:
        job = shapes_of(preset), ranks, on_node
        found = answer(*job)
        if unanswered(found):
            return "not answered yet"
        if found == (right := host_bytes(*job)):
            continue
        about = f"{preset} on {ranks} ranks, {on_node} of them on the node"
        slip = next((slip for slip, wrong in SLIPS.items() if abs(wrong(*job) - found) < 1), None)
        return f"not quite: {about}: {slip or f'{found:,.0f} bytes, and it should be {right:,}'}"
    return "right"


def _judge(answer) -> str:
    ranks, rows, columns = 3, 6, 4
    numbers = torch.Generator().manual_seed(6)
    whole, momentum = (torch.randn(rows, columns, generator=numbers, dtype=torch.float64) for _ in range(2))
    inputs = [torch.randn(2, columns, generator=numbers, dtype=torch.float64) for _ in range(ranks)]
    shards, momenta = ([t.clone() for t in full.chunk(ranks)] for full in (whole, momentum))
    bus = Bus()
    if unanswered(answer(shards, momenta, [x.as_subclass(OnDevice) for x in inputs], bus)) and not any(
        bus.bytes.values()
    ):
        return "not answered yet"
    return (
        _sides(shards + momenta)
        or _crossing(bus.bytes, whole.nbytes)
        or _updated(shards, momenta, whole, momentum, inputs)
        or "right"
    )


def _sides(kept) -> str | None:
    if any(isinstance(tensor, OnDevice) for tensor in kept):
        return "not quite: a shard or its momentum ended on the device: they are persistent and belong on the host"
    return None


def _crossing(crossed, model: int) -> str | None:
    if crossed["up"] > model:
        return (
            f"not quite: {crossed['up']} bytes went up, but all shards have {model}: "
            "send only parameters up, and once; the momenta stay with the optimizer"
        )
    if crossed["up"] < model:
        return (
            f"not quite: {crossed['up']} of the shards' {model} bytes went up: an all-gather needs every rank's shard"
        )
    if crossed["down"] > model:
        return (
            f"not quite: {crossed['down']} bytes came down, but {model} are enough: "
            "reduce on the device first; then each rank sends down its shard of the mean"
        )
    if crossed["down"] < model:
        return f"not quite: {crossed['down']} of the gradient's {model} bytes came down: every rank needs its shard"
    return None


def _updated(shards, momenta, whole, momentum, inputs) -> str | None:
    """Describe the first difference from training in one process, or return None."""
    gradients = [(x @ whole.T).T @ x for x in inputs]
    mean = sum(gradients) / len(gradients)
    new = 0.9 * momentum + mean
    got, weight = torch.cat(momenta), torch.cat(shards)
    if torch.equal(weight, whole):
        return "not quite: the shards have not changed: update them in place (sub_, add_, copy_)"
    if torch.allclose(got, 0.9 * momentum + sum(gradients)):
        return "not quite: the gradient is summed over the ranks, not averaged"
    if torch.allclose(got, momentum) and torch.allclose(weight, whole - 0.1 * new):
        return "not quite: the weights are right, but the momenta have not changed: the next step needs them"
    if torch.allclose(got, 0.9 * momentum + 0.1 * mean):
        return "not quite: do not scale the gradient: m = 0.9 m + g"
    for rank, (mine, right) in enumerate(zip(momenta, new.chunk(len(momenta)), strict=True)):
        if not torch.allclose(mine, right):
            return f"not quite: rank {rank}'s momentum differs from that of one process with all data"
    if not torch.allclose(weight, whole - 0.1 * new):
        return "not quite: the momenta are right, but the weights are not: w = w − 0.1 m, with the new m"
    return None


EXERCISES = {
    "06.0": Do(
        "Only the optimizer on the host",
        level=2,
        minutes=8,
        judge=judge_host_step,
        hint="Three things, in this order: send each shard's gradient down, into host[i].grad; call optimizer.step() once;\n"
        "send the new parameters up, into device[i], with copy_. Replace the gradient; do not add to the last step's.",
        solution="""
def host_step(device, gradients, host, optimizer, bus):
    for mine, gradient in zip(host, gradients):
        mine.grad = bus.down(gradient)
    optimizer.step()  # it allocates its state on the parameters' device, the host, so the state never crosses the bus
    for there, mine in zip(device, host):
        there.copy_(bus.up(mine))
""",
    ),
    "06.1": Do(
        "Offload what a block saves, except its parameters",
        level=2,
        minutes=14,
        judge=judge_offload_hooks,
        hint="In forward, block.parameters() are the gathered parameters. Autograd may save a view of one, so compare\n"
        "tensor.untyped_storage().data_ptr() with theirs. What pack returns, unpack receives: leave a tensor as it is.",
        solution="""
import torch


def offload_hooks(block, bus):
    def pack(tensor):  # called in forward, when block.parameters() are the gathered ones
        gathered = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        return tensor if tensor.untyped_storage().data_ptr() in gathered else bus.down(tensor)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else bus.up(packed)

    return pack, unpack
""",
    ),
    "06.2": Do(
        "The host memory of a node",
        level=2,
        minutes=10,
        judge=judge_host_bytes,
        hint="Per parameter: a shard has ceil(rows / ranks) whole rows, of 4 bytes per element. Parameter and gradient are\n"
        "pinned, each in a block of 1 << (size - 1).bit_length() bytes; the two moments are ordinary memory.",
        solution="""
from math import ceil, prod


def host_bytes(shapes, ranks, on_node):
    total = 0
    for shape in shapes:
        size = 4 * ceil(shape[0] / ranks) * prod(shape[1:])
        block = 1 << (size - 1).bit_length()  # the next power of two
        total += 2 * block + 2 * size  # parameter and gradient are pinned, Adam's two moments are not
    return on_node * total
""",
    ),
    "06.4": Predict(
        "Where rounding costs most",
        level=1,
        minutes=3,
        answer=WORST,
        unit="ranks",
        slips={
            "sizes that are powers of two, divided by a power of two, are powers of two again: little is rounded up": 16,
            "close: a third of a power of two is rounded up by a third, but another number of ranks is worse": 3,
        },
        hint="Divide host_bytes by the same sum without rounding, for each number of ranks, and compare.",
        solution=f"""
# The host needs {rounding(8):.2f} times the exact bytes on 8 ranks, and on each other power of two; {rounding(3):.2f} times on 3, 6 or 12;
# and {rounding(WORST):.2f} times on {WORST}, where most shards are slightly larger than a power of two.
worst = {WORST}
""",
    ),
    "06.3": Do(
        "A step with offload, by hand",
        level=3,
        minutes=12,
        judge=_judge,
        hint="Send every shard up and concatenate: that is the all-gather. Each rank computes y and y.T @ x. Average "
        "these on the device, split the mean by rows, send each part down to its rank, and update there, in place.",
        solution="""
import torch


def answer(shards, momenta, inputs, bus):
    weight = torch.cat([bus.up(shard) for shard in shards])  # shards go up, then the all-gather
    gradients = []
    for x in inputs:  # on every rank, on the device
        y = x @ weight.T
        gradients.append(y.T @ x)
    # Reduce on the device: W gradients become one, and each rank sends down only its part of it.
    mean = sum(gradients) / len(gradients)
    for shard, momentum, part in zip(shards, momenta, mean.chunk(len(shards))):
        momentum.mul_(0.9).add_(bus.down(part))  # the optimizer's state never leaves the host
        shard.sub_(0.1 * momentum)
""",
    ),
}
