# SPDX-License-Identifier: BSD-3-Clause
"""A simulated step says what the arithmetic says, also for worlds that no test could start."""

import pytest
from forked import forked
from labkit.running import fork_server
from planner import predict


def simulated_step(strategy, wrap, ranks, batch):
    """In a process of its own: it can join one world only."""
    import torch
    import torch.nn.functional as F
    from labkit.measuring import simulate
    from labkit.training.models import Net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    simulate.join(ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def setup():
        model = Net()
        if strategy == "fsdp1":
            model = FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))
        else:
            for module in [model.fc1, model] if wrap == "size" else [model]:
                fully_shard(module, mesh=mesh)
        optimizer = torch.optim.Adadelta(model.parameters())

        def train(images, labels):
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, (torch.rand(batch, 1, 28, 28), torch.zeros(batch, dtype=torch.long)), train

    return simulate.step(setup)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "wrap", "ranks", "batch"),
    [("fsdp1", "unit", 4, 32), ("fsdp2", "unit", 3, 8), ("fsdp2", "size", 4, 32), ("fsdp2", "size", 64, 64)],
)
def test_simulated_peak_is_the_predicted_one(strategy, wrap, ranks, batch):
    simulated = forked(simulated_step, strategy, wrap, ranks, batch)
    _, predicted = predict.peak(strategy, wrap, ranks, batch)
    # The lab script's loop keeps the network's output and one loss longer than the loop above.
    predicted["activations"] -= 4 * (batch * predict.CLASSES + 1)
    assert {category: size for category, size in simulated["peak"].items() if size} == predicted
    persistent = predict.persistent(strategy, wrap, ranks)
    assert {name: simulated["start"][name] for name in persistent} == persistent
    gathered = 4 * ranks * sum(predict.shard(strategy, unit, ranks) for unit in predict.units_of(wrap))
    reduced = [entry for entry in simulated["traffic"] if entry["kind"] == "reduce-scatter"]
    assert sum(entry["count"] * entry["bytes"] for entry in reduced) == gathered


def simulated_alone(layers, lengths_of, precision="fp32"):
    """The peak by category of an own model that reads its batch as ``lengths_of(x, lengths)`` does, or the error's words."""
    import torch
    from labkit import UserError
    from labkit.training import own_model
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

        def forward(self, x, lengths):
            x = lengths_of(x, lengths)
            for layer in self.layers:
                x = layer(x).relu()
            return x

    def build():
        return Net(), (torch.ones(256, 16), torch.full((256,), 9)), lambda module, *batch: module(*batch).float().mean()

    try:
        return own_model.step(build, 1, "single", precision)["peak"]
    except UserError as error:
        return str(error)


def routed(x, lengths):
    """A mixture of experts sends each expert its tokens."""
    import torch

    tokens_per_expert = torch.bincount(lengths % 4, minlength=4)
    return torch.cat([part * 2 for part in x.split(tokens_per_expert.tolist())])


def read_in_backward(x, _):
    import torch

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * x

        @staticmethod
        def backward(context, gradient):
            return gradient * gradient.sum().item()

    return Square.apply(x.requires_grad_())


DATA_DEPENDENT = {
    "item": lambda x, lengths: x[: int(lengths.max().item())],
    "int": lambda x, lengths: x[: int(lengths[0])],
    "float": lambda x, lengths: x * float(lengths[0]),
    "bool": lambda x, lengths: x if bool(lengths[0] > 3) else 2 * x,
    "if any": lambda x, lengths: 2 * x if (lengths > 3).any() else x,
    "tolist": lambda x, lengths: x[: int(lengths.tolist()[0])],
    "torch.equal": lambda x, lengths: x if lengths.equal(2 * lengths) else 2 * x,
    "nonzero": lambda x, lengths: x[(lengths > 3).nonzero()[:, 0]],
    "boolean index": lambda x, lengths: x[lengths > 3],
    "unique": lambda x, lengths: x + lengths.unique().sum(),
    "repeat": lambda x, lengths: x.repeat_interleave(lengths, 0),
    "routing": routed,
    "in backward": read_in_backward,
}


def simulated_each(readers):
    return {name: simulated_alone(2, reader) for name, reader in readers.items()}


def test_a_model_that_reads_its_data_is_refused():
    """Whatever it reads, with the line that reads it; constants, and the optimizer's own counters, are no data."""
    found = forked(simulated_each, DATA_DEPENDENT)
    for name, words in found.items():
        assert "shapes or control flow that depend on data cannot be planned" in words, (name, words)
        assert "test_simulate.py, line " in words, (name, words)


def test_what_is_known_without_data_is_simulated():
    import torch

    known = {
        "nothing": lambda x, _: x,
        "a constant": lambda x, _: x * torch.tensor(3.0).item(),
        "a mask": lambda x, lengths: x.masked_fill((lengths > 3)[:, None], 0.0),
    }
    found = forked(simulated_each, known)
    assert all(peak["optimizer state"] > 0 for peak in found.values())


def test_bf16_on_a_single_rank_is_autocast_as_in_the_labs():
    layers = 8

    def both():
        return [simulated_alone(layers, lambda x, _: x, precision) for precision in ("fp32", "bf16")]

    fp32, bf16 = forked(both)
    rows = 256 * 16  # a layer keeps its input, and ReLU its result, which is the next one's input
    assert fp32["activations"] >= 4 * rows * layers
    assert bf16["activations"] < 0.75 * fp32["activations"]
    assert bf16["parameters"] == fp32["parameters"]


def foreach_shardings():
    """The shardings and shapes of foreach operators' results, and how many elements of their lists were expanded."""
    import torch
    from labkit.measuring import simulate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, _sharding_prop
    from torch.distributed.tensor._op_schema import TupleStrategy

    simulate.join(4)
    mesh, expanded, expand = init_device_mesh("cpu", (4,)), [], _sharding_prop._expand_single_dim_strategy_to_mesh

    def watched(mesh, schema, *rest):
        expanded.extend(len(one.children) for one in schema.args_schema if isinstance(one, TupleStrategy))
        return expand(mesh, schema, *rest)

    _sharding_prop._expand_single_dim_strategy_to_mesh = watched
    kinds = [((8, 3), Shard(0)), ((5, 3), Shard(0)), ((8, 4), Shard(1)), ((8, 3), Replicate())]
    tensors = [DTensor.from_local(torch.ones(size), mesh, [placed], run_check=False) for size, placed in 3 * kinds]
    others = [tensor.clone() for tensor in tensors]
    results = [*torch._foreach_mul(tensors, others), *torch._foreach_addcdiv(tensors, others, others, [2.0] * 12)]
    torch._foreach_lerp_(tensors, others, 0.5)
    moved = torch._foreach_add(tensors, [other.redistribute(mesh, [Replicate()]) for other in others])
    shardings = [(each.placements, each.shape, each.to_local().shape) for each in [*results, *tensors, *moved]]
    return shardings, [float(each.to_local().sum()) for each in [*results, *moved]], set(expanded)


def test_alike_tensors_of_a_foreach_operator_are_sharded_alike(monkeypatch):
    """In a fork as in a new Python, with one expansion of each kind, except where inputs must be sharded anew."""
    quick, same, one = forked(foreach_shardings)
    monkeypatch.setenv(fork_server.VARIABLE, "0")
    plain, values, every = forked(foreach_shardings)
    assert quick == plain and same == values
    assert every == {12} and one == {4, 12}


def sharded_by_another_pytorch():
    """What a foreach operator returns where PyTorch has no cache by that name."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, _sharding_prop

    del _sharding_prop.LocalLRUCache  # before labkit looks for it
    from labkit.measuring import foreach_sharding, simulate

    simulate.join(4)
    tensor = DTensor.from_local(torch.ones(8, 3), init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False)
    with foreach_sharding.once_for_alike():
        return [float(each.to_local().sum()) for each in torch._foreach_mul([tensor, tensor], 2.0)]


def test_with_a_pytorch_that_has_other_private_names_nothing_is_replaced():
    assert forked(sharded_by_another_pytorch) == [48.0, 48.0]
