"""Chapter 06: CPU offload."""

import torch
import torch.nn.functional as F
from planner import predict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.measuring.trace import local
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered

MIB = 2**20


def _kept(ranks: int) -> dict:
    return predict.persistent("fsdp2", "size", ranks)


def _saved(ranks: int, batch: int) -> int:
    """Bytes that offload takes off the peak."""
    host = ("parameters", "gradients", "optimizer state")
    found = predict.snapshots("fsdp2", "size", ranks, batch).values()
    device = max(sum(size for name, size in terms.items() if name not in host) for terms in found)
    return max(map(predict.total, found)) - device


KEPT = _kept(8)
PARAMETERS, RANKS, BUS = 8_030_261_248, 8, 31.5e9
ONE_WAY = PARAMETERS / RANKS * 4 / BUS * 1e3  # milliseconds for every shard of a rank, once


class Bus:
    """Copies between the two simulated sides, and how many bytes went each way."""

    def __init__(self):
        self.bytes = {"up": 0, "down": 0}

    def up(self, tensor):
        """A copy on the device."""
        if isinstance(tensor, OnDevice):
            raise TypeError("bus.up was given a tensor that is on the device already")
        self.bytes["up"] += tensor.nbytes
        return tensor.clone().as_subclass(OnDevice)

    def down(self, tensor):
        """A copy on the host."""
        if not isinstance(tensor, OnDevice):
            raise TypeError("bus.down was given a tensor that is on the host already")
        self.bytes["down"] += tensor.nbytes
        return tensor.as_subclass(torch.Tensor).clone()


class OnDevice(torch.Tensor):
    """A tensor of the device's side: what is computed from it is on the device too, and hosts' tensors are refused."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(v, torch.Tensor) and not isinstance(v, OnDevice) and v.dim() for v in flat):
            raise RuntimeError(
                f"{function.__name__} was given tensors of both sides, device and host: bring them together first"
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
    """After each step: bytes that crossed, whether device and host have what an optimizer on the device makes."""
    plain, model = _small(me), _small(me)
    usual = torch.optim.Adam(plain.parameters(), lr=0.01)
    device = [local(p.detach()).as_subclass(OnDevice) for p in model.parameters()]
    host = [nn.Parameter(there.as_subclass(torch.Tensor).clone()) for there in device]
    optimizer, found = torch.optim.Adam(host, lr=0.01), []
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
        found.append(bus.bytes | about | {"shards": sum(there.nbytes for there in device)})
    return found


def judge_host_step(host_step) -> str:
    for rank, steps in enumerate(on_ranks(_hosted, host_step, ranks=2)):
        if not any(step["up"] or step["down"] or step["host"] for step in steps):
            return "not answered yet"
        for number, step in enumerate(steps, start=1):
            if message := _hosting(step, number):
                return f"not quite: rank {rank}, step {number}: {message}"
    return "right"


def _hosting(step: dict, number: int) -> str | None:
    """The first thing that is wrong with a step, if any."""
    down, up, shards = step["down"], step["up"], step["shards"]
    if down != shards:
        few = "the optimizer needs this step's gradients" if down < shards else "only gradients come down, and once"
        return f"{down} bytes came down, where the gradients' shards are {shards}: {few}"
    if not step["host"] and number == 1:
        return "the host's copy is not what an optimizer makes of these gradients: host[i].grad, then optimizer.step()"
    if not step["host"]:
        return "step 1 was right, the host's copy now is not: is the gradient this step's alone, and the optimizer the same?"
    if up < shards:
        return f"{up} bytes went up, where the shards are {shards}: the device goes on with the old parameters"
    if up > shards:
        return f"{up} bytes went up, where the shards are {shards}: only the new parameters do, and once"
    if not step["device"]:
        return "the host's copy is right, the device's is not: change device[i] in place, with copy_"
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
        return "not quite: a shard or its momentum ended on the device: it is kept, so it belongs on the host"
    return None


def _crossing(crossed, model: int) -> str | None:
    if crossed["up"] > model:
        return (
            f"not quite: {crossed['up']} bytes went up where the shards are {model} together: "
            "only parameters go up, and once; the momenta stay with the optimizer"
        )
    if crossed["up"] < model:
        return (
            f"not quite: {crossed['up']} of the shards' {model} bytes went up: all-gathering takes every rank's shard"
        )
    if crossed["down"] > model:
        return (
            f"not quite: {crossed['down']} bytes came down where {model} would do: "
            "reduce first, on the device; each rank sends down its own part of the mean"
        )
    if crossed["down"] < model:
        return f"not quite: {crossed['down']} of the gradient's {model} bytes came down: every rank needs its part"
    return None


def _updated(shards, momenta, whole, momentum, inputs) -> str | None:
    """The first difference to one process that has everything."""
    gradients = [(x @ whole.T).T @ x for x in inputs]
    mean = sum(gradients) / len(gradients)
    new = 0.9 * momentum + mean
    got, weight = torch.cat(momenta), torch.cat(shards)
    if torch.equal(weight, whole):
        return "not quite: the shards are as they were: change them in place (sub_, add_, copy_)"
    if torch.allclose(got, 0.9 * momentum + sum(gradients)):
        return "not quite: the gradient is summed over the ranks; the mean is wanted"
    if torch.allclose(got, momentum) and torch.allclose(weight, whole - 0.1 * new):
        return "not quite: the weights are right, but the momenta are as they were: the next step needs them"
    if torch.allclose(got, 0.9 * momentum + 0.1 * mean):
        return "not quite: the momentum takes the whole gradient: m = 0.9 m + g"
    for rank, (mine, right) in enumerate(zip(momenta, new.chunk(len(momenta)), strict=True)):
        if not torch.allclose(mine, right):
            return f"not quite: rank {rank}'s momentum differs from that of one process that has everything"
    if not torch.allclose(weight, whole - 0.1 * new):
        return "not quite: the momenta are right, the weights are not: w = w − 0.1 m, with the new m"
    return None


EXERCISES = {
    "06.0": Do(
        "Only the optimizer on the host",
        level=2,
        minutes=8,
        judge=judge_host_step,
        hint="Three things in this order, for each shard: its gradient down, into host[i].grad; then one optimizer.step() for\n"
        "all; then the new parameters up, into device[i] with copy_. Set the gradient, do not add to the last step's.",
        solution="""
def host_step(device, gradients, host, optimizer, bus):
    for mine, gradient in zip(host, gradients):
        mine.grad = bus.down(gradient)
    optimizer.step()  # its state is made like its parameters, so it is on the host and never crosses
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
            "those are the parameters alone; Adadelta's state moves with them": KEPT["parameters"] / MIB,
            "you counted the gradients' shards too: at that moment none has been reduced yet": (
                predict.total(KEPT) + KEPT["parameters"]
            )
            / MIB,
            "that is one number of state a parameter; Adadelta keeps two": 2 * KEPT["parameters"] / MIB,
            "that is the whole model's; a rank keeps an eighth": predict.total(_kept(1)) / MIB,
        },
        hint="Which of a rank's bytes are there at that moment and move? Its shard of the parameters, and the two "
        "numbers that Adadelta keeps for each of them. Rounding up to whole rows adds a little.",
        solution="""
# With and without offload the peak is at the same moment, so the difference is what moves: before the first
# reduce-scatter a rank keeps its parameters, and two numbers of Adadelta's for each.
fc1 = 16 * (9216 + 1)  # 16 of its 128 rows: 9,216 weights and a bias each
conv1, conv2 = 4 * (9 + 1), 8 * (32 * 9 + 1)  # 4 of 32 rows, 8 of 64
fc2 = 2 * (128 + 1)  # 2 of 10 rows: rounded up
numbers = fc1 + conv1 + conv2 + fc2  # 150,082
counters = 4 * 8  # the optimizer's step, for each of the eight tensors
answer = (4 * 3 * numbers + counters) / 2**20
""",
    ),
    "06.2": Predict(
        "The bus under eight billion parameters",
        level=2,
        minutes=5,
        answer=3 * ONE_WAY,
        unit="milliseconds",
        slips={
            "that is one trip up and none of the others: what is freed goes up twice, and gradients come down": ONE_WAY,
            "two trips: either the second gather of a freed unit or the gradients' way down is missing": 2 * ONE_WAY,
            "that is the whole model's on one bus; a rank moves its shard": 3 * RANKS * ONE_WAY,
            "numbers, not bytes: each has 4": 3 * ONE_WAY / 4,
            "those are seconds; milliseconds are wanted": 3 * ONE_WAY / 1e3,
        },
        hint="How many times does each number of a rank's shard cross the bus in a step? Up before forward, up again "
        "before backward because it was freed, and its gradient down.",
        solution="""
shard = 8_030_261_248 / 8 * 4  # bytes of parameters on one rank
crossed = shard + shard + shard  # up for forward, up for backward, the gradient down
answer = crossed / 31.5e9 * 1e3
# Twelve bytes for each number of the shard, over the bus's speed. What the optimizer takes, only a run on your machine says.
""",
    ),
    "06.3": Do(
        "A step with offload, by hand",
        level=3,
        minutes=12,
        judge=_judge,
        hint="Send every shard up and concatenate: that is the all-gather. Each rank computes y and y.T @ x. Average "
        "these on the device, cut the mean by rows, send each part down to its rank, and update there, in place.",
        solution="""
import torch


def answer(shards, momenta, inputs, bus):
    weight = torch.cat([bus.up(shard) for shard in shards])  # shards go up, then the all-gather
    gradients = []
    for x in inputs:  # on every rank, on the device
        y = x @ weight.T
        gradients.append(y.T @ x)
    # Reduce on the device: W gradients become one, and only a part of it comes down to each rank.
    mean = sum(gradients) / len(gradients)
    for shard, momentum, part in zip(shards, momenta, mean.chunk(len(shards))):
        momentum.mul_(0.9).add_(bus.down(part))  # the optimizer's state never leaves the host
        shard.sub_(0.1 * momentum)
""",
    ),
}
