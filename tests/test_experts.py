# SPDX-License-Identifier: BSD-3-Clause
"""Mixtures of experts: every way to share them equals one process, and memory and traffic are planned for a given routing."""

import dataclasses
import json
import math

import gpt_fsdp
import plan
import pytest
import torch
from forked import by_value
from labkit.measuring import meters, trace
from labkit.running import launch, notebook_ranks, options
from labkit.training import expert_parallel, experts, models
from mesh_runs import measure_with_losses, resized
from planner import predict
from planner.models import flops, networks, shapes
from planner.ops import routing
from planner.parallel.mesh import arrange
from planner.step.plan import Plan
from proofs import memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

HERE = launch.Cluster(launcher="local")
SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZE |= {"intermediate_size": 40}
SEQUENCES, LENGTH = 8, 16
# Of a peak: older versions free some buffers later (2.11: 2.3 % where gradients wait for the last micro-batch)
LATE = 0 if torch.__version__ >= "2.15" else 0.05
FP64 = {"precision": "fp64"}
PLAIN, DROPPING = FP64, FP64 | {"capacity_factor": 0.75, "shared_expert": True, "top_k": 3}
# With SGD, other than with AdamW, losses depend on the size of the gradient. The clipped norm is that of all parameters.
SGD = FP64 | {"optimizer": "sgd", "lr": 1.0, "clip": 0.2, "accumulate": 2, "balance": "loss", "sync": "last"}
BIASED = FP64 | {"balance": "bias", "optimizer": "momentum", "lr": 0.3, "recompute": "full"}
PURE = {"precision": "bf16", "weights": "bf16", "optimizer": "sgd", "wrap": "blocks+embeddings"}
# Spread over all ranks, two show what four do; over some of four, their shards too.
BOTH, EP2, EP4 = ({"mesh": mesh} for mesh in ("shard=2,expert=2", "shard=4,expert=2", "shard=4,expert=4"))
CASES = {
    1: {
        name: given | {"strategy": "single"}
        for name, given in {"plain": PLAIN, "dropping": DROPPING, "sgd": SGD, "biased": BIASED}.items()
    },
    2: {
        "plain, ddp": PLAIN | {"strategy": "ddp"},
        "dropping, fsdp": DROPPING,
        "sgd, spread": SGD | BOTH,
        "biased, ddp": BIASED | {"strategy": "ddp"},
        "fp32, recomputed": {"recompute": "full", "optimizer": "sgd"},
        "bf16, kept": {"precision": "bf16", "reshard_after_forward": "false", "optimizer": "sgd"},
        "bf16, recomputed, spread": {"precision": "bf16", "recompute": "full", "optimizer": "sgd"} | BOTH,
        "bf16 weights, spread": PURE | BOTH,
    },
    4: {
        "plain, spread over all": PLAIN | EP4,
        "dropping, spread": DROPPING | EP2,
        "sgd, spread": SGD | EP2,
        "biased, spread": BIASED | EP2,
        "plain, context": PLAIN | {"mesh": "shard=2,context=2,expert=2"},
        "biased, context": BIASED | {"mesh": "context=4,expert=4", "context_attention": "gather"},
    },
}
ALL = [(ranks, name) for ranks, cases in CASES.items() for name in cases]
IN_FP64 = [(ranks, name) for ranks, name in ALL if ranks > 1 and "fp64" in CASES[ranks][name].values()]


def as_run(ranks: int, name: str) -> dict:
    """The options of a case, with a batch that all ranks together share."""
    given = CASES[ranks][name]
    parts = arrange(ranks, given.get("mesh")).data
    batch = SEQUENCES // parts // given.get("accumulate", 1)
    return {"experts": 8, "seq_len": LENGTH, "batch_size": batch, "lr": 0.01} | given


def run_all(me, folder):
    """{case: (its losses, what was measured)} of this number of ranks; "resumed", "names of groups": see these functions."""
    with resized(**SIZE):
        results = {name: measure_with_losses(me, as_run(me.world_size, name)) for name in CASES[me.world_size]}
        results["resumed"] = resumed(me, folder)
    if me.world_size == 2:
        results["names of groups"] = names_of_groups(me)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{ranks: [what ``run_all`` found on each]}; two ranks go on from the checkpoint that four have saved."""
    folder = str(tmp_path_factory.mktemp("experts") / "saved")
    return {
        n: notebook_ranks.on_ranks(by_value(run_all), folder, ranks=n, cluster=HERE, timeout=240) for n in (4, 2, 1)
    }


@pytest.fixture
def small(monkeypatch):
    tiny = shapes.GPT_SHAPES["tiny"]
    monkeypatch.setitem(shapes.GPT_SHAPES, "tiny", dataclasses.replace(tiny, **SIZE))


@pytest.mark.parametrize(("ranks", "name"), IN_FP64)
def test_losses_are_those_of_one_process(ranks, name, results):
    reference, losses = (results[n][0][which][0] for n, which in ((1, name.split(",")[0]), (ranks, name)))
    assert len(losses) == memory.STEPS
    assert min(reference) < reference[0]  # on the text of some Pythons the last step's is not the least
    assert losses == pytest.approx(reference, rel=1e-9)


def test_each_case_trains_something_else(results):
    """Else dropping, balancing, and clipping would not show in the losses."""
    losses = [results[1][0][name][0][-1] for name in CASES[1]]
    assert len({round(loss, 6) for loss in losses}) == len(losses)


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_memory_and_traffic_are_those_of_the_plan_for_the_same_routing(ranks, name, small, results):
    """On every rank. Of a step that is not the first one traced, the losses before it are alive, too: some bytes."""
    one = {"script": "gpt_fsdp.py", "ranks": ranks, "config": as_run(ranks, name)}
    for rank in range(ranks):
        measured = results[ranks][rank][name][1]
        row = memory.compare(one, measured, rank)
        assert row["persistent equal"] and row["traffic equal"], (rank, row)
        later = measured["routing"]["step_by_rank"][rank] > meters.TRACED_STEPS[1]
        losses = one["config"].get("accumulate", 1) * (8 if name in IN_FP64 or ranks == 1 else 4) if later else 0
        peak = sum(row["measured"].values())
        assert 0 <= peak - predict.total(row["predicted"]) <= max(losses, 16 * later, LATE * peak), (rank, row)


def test_peaks_depend_on_the_routing(small, results):
    """Else the test above would say less: the fullest rank needs more than the plan for uniform choices."""
    one = {"script": "gpt_fsdp.py", "ranks": 4, "config": as_run(4, "plain, spread over all")}
    measured = [results[4][rank]["plain, spread over all"][1] for rank in range(4)]
    peaks = [sum(each["memory"]["peak"].values()) for each in measured]
    uniform = predict.total(memory.planned(one).peak()[1])
    assert min(peaks) < 0.98 * uniform and max(peaks) > 1.02 * uniform


def test_each_all_to_all_has_the_bytes_of_the_routing(results):
    """Counted by hand from the tokens of each expert: a rank receives the rows of its own experts."""
    name, ranks, row_bytes = "plain, spread over all", 4, 64 * 8
    for rank in range(ranks):
        measured = results[ranks][rank][name][1]
        tokens = torch.tensor(measured["routing"]["tokens"][str(measured["routing"]["step_by_rank"][rank])])[:, 0]
        assert tokens.shape == (ranks, 2, 8) and (tokens.sum(-1) == 2 * 2 * LENGTH).all()
        own = tokens.unflatten(-1, (ranks, 2))
        larger = torch.maximum(own[rank].sum((-2, -1)), own[:, :, rank].sum((0, -1)))
        found = sorted(c["bytes"] for c in measured["traffic"] for _ in range(c["count"]) if c["kind"] == "all-to-all")
        assert found == sorted([*(larger * row_bytes).tolist() * 4, 64, 64])


def test_every_token_is_computed_unless_it_is_dropped(small, results):
    kept = results[4][0]["dropping, spread"][1]["routing"]["tokens"]["3"]
    capacity = math.ceil(0.75 * LENGTH * 3 / 8)
    assert all(count <= 2 * capacity for micro in kept[0] for layer in micro for count in layer)
    assert sum(map(sum, kept[0][0])) < 2 * 2 * LENGTH * 3


# The layer itself


def layer(**settings) -> experts.MixtureOfExperts:
    torch.manual_seed(1)
    settings = shapes.Experts(**({"count": 8, "top_k": 2, "intermediate_size": 12} | settings))
    made = experts.MixtureOfExperts(16, settings).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_layer_is_the_weighted_sum_of_the_chosen_experts(dtype):
    """By the definition, token by token: a loop over the experts in fp64, PyTorch's grouped matmul in fp32."""
    mixture = layer().to(dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    scores = (x @ mixture.router.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    for place in ((b, t) for b in range(2) for t in range(5)):
        weights, chosen = scores[place].topk(2)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (mixture.experts.gate_up[expert] @ x[place]).chunk(2)
            expected[place] += weight * (mixture.experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(mixture(x), expected)


def test_an_expert_without_tokens_gets_a_gradient_of_zeros():
    mixture = layer(top_k=1)
    mixture(torch.ones(1, 3, 16, dtype=torch.float64)).sum().backward()
    used = [bool(gradient.any()) for gradient in mixture.experts.down.grad]
    assert sum(used) == 1 and mixture.counts.tolist() == [3 * each for each in used]


def test_of_a_sequence_the_last_tokens_are_dropped():
    """Each sequence has its own capacity, so that other sequences do not matter."""
    mixture = layer(top_k=1, capacity_factor=2.0)  # of 8 tokens an expert computes 2
    x = torch.ones(2, 8, 16, dtype=torch.float64)
    out = mixture(x)
    assert mixture.counts.sum() == 2 * 2
    assert out[:, :2].any(-1).all() and not out[:, 2:].any()
    assert torch.equal(mixture(torch.cat([x, -x]))[:2], out)


def test_the_loss_for_balance_is_smallest_for_equal_shares():
    uniform = torch.full((1, 4, 4), 0.25)
    equal = experts.balance_loss(uniform, torch.arange(4).view(1, 4, 1))
    assert equal == pytest.approx(1.0)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 4, 4)
    assert experts.balance_loss(skewed, torch.zeros(1, 4, 1, dtype=torch.int64)) == pytest.approx(2.8)


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_balancing_balances(balance, monkeypatch):
    """A router that prefers one expert learns not to, with either method, and not without one."""
    monkeypatch.setattr(experts, "BIAS_RATE", 0.02)
    monkeypatch.setattr(experts, "AUXILIARY_COEFFICIENT", 1.0)
    x = torch.randn(4, 32, 16, dtype=torch.float64) + 0.5
    share = {}
    for how in ("none", balance):
        mixture = layer(balance=how)
        with torch.no_grad():
            mixture.router.weight[0] += 0.4
        model = torch.nn.Sequential(mixture)
        experts.prepare(model, 1)
        optimizer = torch.optim.SGD(mixture.router.parameters(), lr=0.5)
        for _ in range(40):
            (mixture(x) * 0).sum().backward()  # only what balances has a gradient
            optimizer.step()
            experts.after_step(model, experts.tokens_of(model))
            optimizer.zero_grad()
        mixture(x)
        share[how] = mixture.counts.max().item() / mixture.counts.sum().item()
    assert share[balance] < 0.75 * share["none"]


# Checkpoints


# Steps of one run: of four ranks with different experts, of two, and of two that have all experts
LEGS = {4: [(2, EP4["mesh"])], 2: [(4, BOTH["mesh"]), (6, None)], 1: [(6, None)]}


def resumed(me, folder) -> list[float]:
    """The losses of the legs of this number of ranks; each goes on from the one before, one process from the beginning."""
    meters.TRACED_STEPS = range(0)
    common = as_run(me.world_size, next(iter(CASES[me.world_size]))) | {"optimizer": "adamw", "balance": "bias"}
    common |= {"strategy": "single"} if me.world_size == 1 else {"strategy": "fsdp2", "checkpoint": folder}
    losses = []
    for steps, mesh in LEGS[me.world_size]:
        given = {"max_steps": steps, "mesh": mesh, "resume": me.world_size == 2}
        losses += gpt_fsdp.train(gpt_fsdp.Config(**common | given), me)["losses"]
    return losses


def test_a_checkpoint_is_resumed_with_other_spreads_and_with_none(results):
    """Experts, their moments, and the routers' biases are saved whole: 4 ranks with different experts, 2, none."""
    losses, expected = results[4][0]["resumed"] + results[2][0]["resumed"], results[1][0]["resumed"]
    assert len(expected) == 6 and losses == pytest.approx(expected, rel=1e-9)


# Plans (what does not go together is in bad_input.py)


def blueprint(experts_of=None, **how):
    shape = gpt_fsdp.Config(preset="tiny", **experts_of or {}).shape
    return networks.gpt(shape, 2, 16, **how)


@pytest.mark.parametrize("shared", [False, True])
def test_total_and_active_parameters_are_the_models(shared):
    config = gpt_fsdp.Config(experts=8, top_k=2, shared_expert=shared)
    with torch.device("meta"):
        model, dense = models.GPT(config.shape), models.GPT(shapes.GPT_SHAPES["tiny"])
    total = sum(parameter.numel() for parameter in model.parameters())
    spread = sum(parameter.numel() for layer in experts.layers(model) for parameter in layer.experts.parameters())
    for ep_degree in (1, 4):
        of_run = networks.gpt(config.shape, 2, 16, ep_degree=ep_degree)
        assert of_run.numel == total and of_run.active_numel == total - spread * 6 // 8
    feed_forward = sum(parameter.numel() for block in dense.blocks for parameter in block.feed_forward.parameters())
    routers = sum(layer.router.weight.numel() for layer in experts.layers(model))
    more = routers + (1 + shared) * feed_forward
    assert of_run.active_numel == sum(parameter.numel() for parameter in dense.parameters()) + more
    assert of_run.flops == networks.gpt(shapes.GPT_SHAPES["tiny"], 2, 16).flops + 6 * more


def test_expected_rows_are_those_of_random_choices():
    """Mean and standard deviation of what a rank receives, and the share that is dropped, against 4,000 draws."""
    settings, sequences, length, ep_degree, draws = shapes.Experts(8, 3, 12, capacity_factor=1.0), 2, 10, 4, 4000
    torch.manual_seed(1)
    tokens = ep_degree * sequences * length
    chosen = torch.rand(draws, tokens, 8).topk(3).indices
    received = (chosen < 2).sum((1, 2)).double()  # rank 0 has the first two experts
    mean, deviation = routing.received_rows(settings, sequences * length, ep_degree)
    assert received.mean().item() == pytest.approx(mean, abs=4 * deviation / math.sqrt(draws))
    assert received.std().item() == pytest.approx(deviation, rel=0.05)
    counts = torch.nn.functional.one_hot(chosen.unflatten(1, (-1, length)), 8).sum((2, 3))  # of each sequence
    kept = counts.clamp(max=math.ceil(length * 3 / 8)).sum(-1).double()
    assert kept.mean().item() == pytest.approx(routing.kept_rows(settings, length), rel=0.005)


def asked(*words: str) -> Plan:
    return plan.plan_from_options(options.parse(plan.Config, "", ["--experts", "8", "--device", "cpu", *words]))


def test_an_unbalanced_rank_needs_more_memory_and_time():
    words = "--ranks", "4", "--mesh", "shard=4,expert=4", "--optimizer", "sgd"
    even, full = (asked(*words, "--imbalance", load) for load in ("1", "3"))
    assert full.persistent() == even.persistent()
    assert predict.total(full.peak()[1]) > 1.2 * predict.total(even.peak()[1])
    computed = 3 * 2 * 3 * 128 * 384 * 2 * 4 * even.blueprint.samples  # of experts: 2 of them, 3 matrices, 4 blocks
    assert flops.hardware_flops(full) - flops.hardware_flops(even) == pytest.approx(2 * computed)


def test_spreading_experts_gathers_less_and_exchanges_rows():
    """A block's unit has 8 experts; spread over 4 ranks, no expert is gathered at all."""
    sizes = {}
    for mesh in ("shard=4", "shard=4,expert=2", "shard=4,expert=4"):
        traffic = asked("--ranks", "4", "--mesh", mesh).traffic()
        sizes[mesh] = {
            kind: sum(c["bytes"] * c["count"] for c in traffic if c["kind"] == kind)
            for kind in ("all-gather", "all-to-all")
        }
    gathered = [each["all-gather"] for each in sizes.values()]
    exchanged = [each["all-to-all"] for each in sizes.values()]
    experts_of = 8 * 3 * 128 * 384 * 4 * 4 * 2  # bytes, 4 blocks, forward and backward
    assert gathered == [gathered[2] + experts_of, gathered[2] + experts_of // 2, gathered[2]]
    assert exchanged[0] == 0 < exchanged[1] == exchanged[2]


def test_a_plan_says_what_is_active_and_prints_the_command(capsys):
    words = ["--experts", "8", "--ranks", "4", "--mesh", "shard=4,expert=2", "--capacity-factor", "1.25"]
    config = options.parse(plan.Config, "", words)
    assert "active per token" in plan.answer(config) and "dropped" in plan.answer(config)
    answer = json.loads(plan.answer(dataclasses.replace(config, json=True)))
    assert answer["command"].endswith("--experts 8 --capacity-factor 1.25 --mesh shard=4,expert=2")
    assert answer["active_parameters"] < answer["parameters"]


def searched(*words: str):
    return json.loads(plan.answer(options.parse(plan.Config, "", ["--experts", "4", "--ranks", "4", *words, "--json"])))


def test_a_sweep_tries_all_spreads_each_with_the_imbalance():
    even, full = (searched("--sweep", "--imbalance", load, "--batch-size", "512") for load in ("1", "2"))
    peaks, fullest = (
        {row["strategy"]: row["peak"] for row in rows if row["recompute"] == "full"} for rows in (even, full)
    )
    assert fullest["fsdp2"] == peaks["fsdp2"]
    assert all(fullest[f"fsdp2, expert {ranks}"] > peaks[f"fsdp2, expert {ranks}"] for ranks in (2, 4))


def test_a_search_is_for_the_fullest_rank_and_for_ranks_that_share_sequences_too():
    words = "--find", "seq-len", "--precision", "bf16", "--mesh"
    alone, full = (searched(*words, "shard=4,expert=4", "--imbalance", load)["found"] for load in ("1", "2"))
    shared = searched(*words, "shard=2,context=2,expert=4")["found"]
    assert full < alone < shared


def names_of_groups(me):
    """Names of the group of all ranks, if dense parameters or experts come first."""
    meshes = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), expert_parallel.expert_mesh(2, 2, "cpu")
    parts = [torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)] * mesh.ndim)) for mesh in meshes]
    orders = torch.nn.ParameterList(parts), torch.nn.ParameterList(parts[::-1])
    return [trace.dimensions(order)[0, 1] for order in orders]


def test_of_two_meshes_with_the_same_group_the_first_one_names_it(results):
    """Not the one that a set happens to have last: then the same run would have other names in its record."""
    assert [found["names of groups"] for found in results[2]] == [["shard", "expert"]] * 2
