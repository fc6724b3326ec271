"""Exercises of chapter 06, CPU offload."""

import torch
import torch.nn.functional as F
from planner import predict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.measuring.trace import local
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

MIB = 2**20


def _persistent(ranks: int) -> dict:
    return predict.persistent("fsdp2", "size", ranks)


def _saved(ranks: int, batch: int) -> int:
    """Return how many bytes offload removes from the peak."""
    host = ("parameters", "gradients", "optimizer state")
    snapshots = predict.snapshots("fsdp2", "size", ranks, batch).values()
    device = max(sum(size for name, size in terms.items() if name not in host) for terms in snapshots)
    return max(map(predict.total, snapshots)) - device


PERSISTENT = _persistent(8)
PARAMETERS, RANKS, BUS = 8_030_261_248, 8, 31.5e9
ONE_WAY = PARAMETERS / RANKS * 4 / BUS * 1e3  # milliseconds to transfer a rank's shards once


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
    "06.1": Predict(
        "What offload takes off eight ranks' peak",
        level=1,
        minutes=4,
        answer=_saved(8, 8) / MIB,
        unit="MiB",
        slips={
            "that is the parameters alone; Adadelta's state moves with them": PERSISTENT["parameters"] / MIB,
            "you counted the gradients' shards, too: at the peak none has been reduced yet": (
                predict.total(PERSISTENT) + PERSISTENT["parameters"]
            )
            / MIB,
            "that is one element of state per parameter; Adadelta has two": 2 * PERSISTENT["parameters"] / MIB,
            "that is the whole model; a rank has an eighth of it": predict.total(_persistent(1)) / MIB,
        },
        hint="Which of a rank's bytes at the peak does offload move? Its shard of the parameters, and two elements of "
        "Adadelta's state for each of them. Rounding up to whole rows adds a little.",
        solution="""
# The peak is at the same point of the step with and without offload, before the first reduce-scatter. The difference
# is therefore what offload moves: the rank's parameters, and two elements of Adadelta's state for each.
fc1 = 16 * (9216 + 1)  # 16 of its 128 rows: 9,216 weights and a bias each
conv1, conv2 = 4 * (9 + 1), 8 * (32 * 9 + 1)  # 4 of 32 rows, 8 of 64
fc2 = 2 * (128 + 1)  # 2 of 10 rows: rounded up
elements = fc1 + conv1 + conv2 + fc2  # 150,082
counters = 4 * 8  # the optimizer's step counter for each of the eight tensors
answer = (4 * 3 * elements + counters) / 2**20
""",
    ),
    "06.2": Predict(
        "The bus under eight billion parameters",
        level=2,
        minutes=5,
        answer=3 * ONE_WAY,
        unit="milliseconds",
        slips={
            "that is one transfer; freed parameters go up twice, and gradients come down": ONE_WAY,
            "that is two transfers; the second gather of a freed unit, or the gradients, are missing": 2 * ONE_WAY,
            "that is the whole model on one bus; a rank moves its shard": 3 * RANKS * ONE_WAY,
            "that counts elements, not bytes: each has 4": 3 * ONE_WAY / 4,
            "that is in seconds; the question is in milliseconds": 3 * ONE_WAY / 1e3,
        },
        hint="How many times does each element of a rank's shard cross the bus in a step? Up before forward, up again "
        "before backward because it was freed, and its gradient down.",
        solution="""
shard = 8_030_261_248 / 8 * 4  # bytes of parameters on one rank
crossed = shard + shard + shard  # up for forward, up for backward, the gradient down
answer = crossed / 31.5e9 * 1e3
# Twelve bytes per element of the shard, divided by the bus's bandwidth. The optimizer's time has to be measured on your machine.
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
