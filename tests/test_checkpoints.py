"""Which checkpoint a run goes on from: one for all ranks, whatever a file system shows to each of them."""

from forked import by_value
from labkit.running.lab import Lab


def resumed_by_a_rank_with_a_stale_listing(me, folder):
    """Two checkpoints are saved; then rank 1 still sees only the first, as a cache of NFS may show it."""
    from pathlib import Path
    from types import SimpleNamespace

    import torch
    from labkit.training import checkpoints

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        checkpoints.save(folder, step, model, optimizer, {})
    if me.rank == 1:
        checkpoints.latest = lambda folder: min(Path(folder).glob("step-*"))
    config = SimpleNamespace(checkpoint=folder, resume=True)
    return checkpoints.resume(config, model, optimizer, {}, 9)


def test_one_rank_looks_for_the_newest_checkpoint_and_all_take_it(tmp_path):
    lab = Lab(launcher="local", ranks=2, device="cpu")
    assert lab.on_ranks(by_value(resumed_by_a_rank_with_a_stale_listing), str(tmp_path)) == [2, 2]
