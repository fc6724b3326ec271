# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 06: its verdicts can fail, and its exercises say what is wrong."""

import gpt_fsdp
import pytest
import torch
from forked import by_value
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_06, check
from planner import predict

from notebooks import FOLDER, read, run_broken


def failed(lines, claim):
    return any(line.startswith("FAIL") and claim in line for line in lines)


@pytest.mark.breaks
def test_without_the_policy_nothing_crosses_the_bus():
    lines = run_broken("06", {"runs = [(CPUOffloadPolicy(pin_memory=False), None)": "runs = [(OffloadPolicy(), None)"})
    assert failed(lines, "up per step, parameters") and failed(lines, "down per step, gradients")
    assert not failed(lines, "computing in bf16") and not failed(lines, "largest difference")


@pytest.mark.breaks
def test_a_wrong_side_another_run_and_inputs_that_stay_are_seen():
    lines = run_broken(
        "06",
        {
            '"parameters", "gradients", "optimizer state")': '"parameters", "gradients")',
            'without = lab.run("mnist_fsdp.py", **settings, batch_size=BATCH': 'without = lab.run("mnist_fsdp.py", **settings, batch_size=16',
            '"without parameters", "block inputs") else': '"without parameters") else',
            "hooks = offload_hooks(block, bus) if": "hooks = (bus.down, bus.up) if",
            "batch in (8, 128)": "batch in (8,)",
        },
        until="all ways",
        skip=("train_by_hand",),
    )
    assert failed(lines, "peak of all tensors, with and without offload")
    assert failed(lines, "device side at its peak") and failed(lines, "host side at its peak")
    assert failed(lines, "device peak, FSDP's offload") and failed(lines, "parameters among everything saved")
    assert failed(lines, "block inputs, down") and failed(lines, "device peak, block inputs")
    assert failed(lines, "share taken off, one rank")
    assert not failed(lines, "device peak, recomputed") and not failed(lines, "all ways")


@pytest.mark.breaks
def test_weights_kept_in_the_other_micro_batches_are_noticed():
    swapped = {
        '"all except the last": (True,)': '"all except the last": (False,)',
        '"in all": (False,)': '"in all": (True,)',
    }
    cells = ("cell-01", "cell-02", "cell-05", "recipe", "break-stale", "break-stale-verdict")
    lines = run_broken("06", swapped, until="usual, right", only=cells)
    assert len(lines) == 3 and all(line.startswith("FAIL") for line in lines)


def said(number, answer, capsys):
    check(number, answer)
    return capsys.readouterr().out


def step(shards, momenta, inputs, bus, *, up=None, reduce=None, update=None):
    """The right step, with one part replaced."""
    weight = torch.cat(up(shards, momenta, bus) if up else [bus.up(shard) for shard in shards])
    gradients = [(x @ weight.T).T @ x for x in inputs]
    parts = (reduce or mean_parts)(gradients, bus)
    for shard, momentum, part in zip(shards, momenta, parts, strict=True):
        if update:
            update(shard, momentum, part)
        else:
            momentum.mul_(0.9).add_(part)
            shard.sub_(0.1 * momentum)


def mean_parts(gradients, bus):
    return [bus.down(part) for part in (sum(gradients) / len(gradients)).chunk(len(gradients))]


def sum_parts(gradients, bus):
    return [bus.down(part) for part in sum(gradients).chunk(len(gradients))]


def whole_gradients_down(gradients, bus):
    whole = [bus.down(gradient) for gradient in gradients]
    return (sum(whole) / len(whole)).chunk(len(whole))


def momenta_up_too(shards, momenta, bus):
    for momentum in momenta:
        bus.up(momentum)
    return [bus.up(shard) for shard in shards]


def first_shard_for_all(shards, momenta, bus):
    return [bus.up(shards[0])] * len(shards)


def forget_the_momentum(shard, momentum, part):
    shard.sub_(0.1 * (0.9 * momentum + part))


def forget_the_shard(shard, momentum, part):
    momentum.mul_(0.9).add_(part)


def dampen(shard, momentum, part):
    momentum.mul_(0.9).add_(part, alpha=0.1)
    shard.sub_(0.1 * momentum)


def by_the_gradient(shard, momentum, part):
    momentum.mul_(0.9).add_(part)
    shard.sub_(0.1 * part)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"reduce": sum_parts}, "summed over the ranks"),
        ({"reduce": whole_gradients_down}, "reduce on the device first"),
        ({"reduce": lambda gradients, bus: (sum(gradients) / 3).chunk(3)}, "tensors on both sides"),
        ({"reduce": lambda gradients, bus: [p * 1 for p in mean_parts(gradients, bus)][::-1]}, "rank 0's momentum"),
        ({"up": momenta_up_too}, "send only parameters up"),
        ({"up": first_shard_for_all}, "needs every rank's shard"),
        ({"up": lambda shards, momenta, bus: shards}, "tensors on both sides"),
        ({"update": forget_the_momentum}, "the momenta have not changed"),
        ({"update": forget_the_shard}, "the shards have not changed"),
        ({"update": dampen}, "do not scale the gradient"),
        ({"update": by_the_gradient}, "the weights are not"),
    ],
)
def test_a_wrong_step_is_told_what_is_wrong(change, words, capsys):
    assert words in said("06.3", lambda *given: step(*given, **change), capsys)


def by_hand(device, gradients, host, optimizer, bus, *, down=None, step=None, up=None):
    """The right one, with one part replaced."""
    for mine, gradient in zip(host, gradients, strict=True):
        if down:
            down(mine, gradient, bus)
        else:
            mine.grad = bus.down(gradient)
    (step or optimizer.step)()
    if not up:
        for there, mine in zip(device, host, strict=True):
            there.copy_(bus.up(mine))
    else:
        up(device, host, bus)


def gradients_add_up(mine, gradient, bus):
    gradient = bus.down(gradient)
    mine.grad = gradient if mine.grad is None else mine.grad + gradient


def the_parameters_twice(device, host, bus):
    for there, mine in zip(device, host, strict=True):
        bus.up(mine)
        there.copy_(bus.up(mine))


def new_optimizer(device, gradients, host, optimizer, bus):
    by_hand(device, gradients, host, torch.optim.Adam(host, lr=0.01), bus)


def names_only(device, host, bus):
    for place, mine in enumerate(host):
        device[place] = bus.up(mine)


@pytest.mark.parametrize(
    "answer, words",
    [
        ({"down": gradients_add_up}, "step 2: step 1 was right, but the host's copy is wrong now"),
        (new_optimizer, "step 2: step 1 was right, but the host's copy is wrong now"),
        ({"step": lambda: None}, "differs from the optimizer's result"),
        ({"up": lambda device, host, bus: None}, "the device continues with old parameters"),
        ({"up": the_parameters_twice}, "send only the new parameters up, and once"),
        ({"up": names_only}, "change device[i] in place"),
        ({"down": lambda mine, gradient, bus: bus.down(bus.down(gradient))}, "already on the host"),
    ],
)
def test_a_wrong_host_step_is_told_what_is_wrong(answer, words, capsys):
    if isinstance(answer, dict):
        changes = answer

        def answer(*given):
            by_hand(*given, **changes)

    assert words in said("06.0", by_value(answer), capsys)


def on_leaves(block, bus):
    """Leaves parameters on the device, but not their views."""
    stays = torch.nn.Parameter
    pack = lambda tensor: tensor if isinstance(tensor, stays) else bus.down(tensor)  # noqa: E731
    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else bus.up(packed)


def first_only(block, bus):
    """Moves one tensor."""

    def pack(tensor):
        return tensor if bus.bytes["down"] else bus.down(tensor)

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else bus.up(packed)


def twice_up(block, bus):
    pack, _ = chapter_06._activations_only(block, bus)
    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else (bus.up(packed), bus.up(packed))[1]


def doubled(block, bus):
    pack, unpack = chapter_06._activations_only(block, bus)
    return pack, lambda packed: 2 * unpack(packed)


@pytest.mark.parametrize(
    "hooks, words",
    [
        (lambda block, bus: (lambda tensor: tensor, lambda packed: packed), "nothing came down"),
        (lambda block, bus: (bus.down, bus.up), "are gathered parameters"),
        (on_leaves, "are gathered parameters"),
        (first_only, "bytes of activations stayed"),
        (twice_up, "unpacked once here"),
        (doubled, "the gradients differ"),
        (lambda block, bus: None, "not answered yet"),
    ],
)
def test_wrong_hooks_are_told_what_is_wrong(hooks, words, capsys):
    assert words in said("06.1", by_value(hooks), capsys)


@pytest.mark.parametrize("slip", chapter_06.SLIPS)
def test_wrong_host_bytes_are_told_what_is_wrong(slip, capsys):
    assert slip in said("06.2", lambda *job: chapter_06.SLIPS[slip](*job), capsys)


@pytest.mark.parametrize("ranks", [8, 12])
def test_the_exercises_host_bytes_are_the_planners(ranks):
    options = {"preset": "llama3-8b", "batch_size": 1, "seq_len": 8, "optimizer": "adamw-fused", "cpu_offload": True}
    plan = predict.transformer_plan(gpt_fsdp.Config(**options), ranks, on_gpu=True)
    counters = plan.host_memory()["optimizer state", "step counters"]
    host = chapter_06.host_bytes(chapter_06.shapes_of("llama3-8b"), ranks, 1)
    assert predict.total(plan.host_memory()) - counters == host


def test_what_the_solution_says_of_rounding_is_so(capsys):
    factors = {ranks: f"{chapter_06.rounding(ranks):.2f}" for ranks in range(2, 17)}
    assert len({factors[ranks] for ranks in (2, 4, 8, 16)}) == len({factors[ranks] for ranks in (3, 6, 12)}) == 1
    assert factors[8] < factors[3] < factors[chapter_06.WORST]
    for ranks, words in ((chapter_06.WORST, ": right"), (16, "powers of two again"), (3, "another number of ranks")):
        assert words in said("06.4", ranks, capsys)


@pytest.mark.parametrize(("ranks", "said"), [(1, "{:.1f} MB less on one rank"), (4, "and {:.1f} on four")])
def test_what_a_gpu_should_save_is_what_the_planner_says(ranks, said):
    gpus = Lab(device="cuda")
    options = {"strategy": "fsdp2", "wrap": "size", "batch_size": 8}
    plans = [gpus.plan("mnist_fsdp.py", ranks=ranks, cpu_offload=offloads, **options) for offloads in (False, True)]
    assert plans[1].host_memory()
    peaks = [predict.total(plan.peak()[1]) for plan in plans]
    text = "".join(cell.source for cell in read(next(FOLDER.glob("06_*.ipynb"))).cells)
    assert said.format((peaks[0] - peaks[1]) / 1e6) in text
