"""A simulated step says what the arithmetic says, also for worlds that no test could start."""

import pytest
from forked import forked
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
