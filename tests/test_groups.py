# SPDX-License-Identifier: BSD-3-Clause
"""The process groups that the planner counts are those that PyTorch makes, and a plan has room for their communicators."""

import contextlib
import dataclasses
import json

import plan
import pytest
from forked import by_value, forked
from labkit import UserError
from labkit.running import launch, notebook_ranks, options
from planner import gpus
from planner.cli.commands import describe, fit
from planner.parallel import groups
from planner.parallel.mesh import arrange

EXPERTS = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "num_local_experts": 8}
GPT, ZERO, PIPELINE, HF = "gpt_fsdp.py", "gpt_zero.py", "gpt_pipeline.py", "hf_fsdp.py"
RUNS = [  # (lab, ranks, options)
    *((GPT, ranks, {}) for ranks in (1, 2, 8, 12)),
    *((GPT, 4, {"strategy": strategy}) for strategy in ("single", "ddp", "fsdp1")),
    (GPT, 4, {"reshard_after_forward": "false"}),
    *((GPT, 8, {"mesh": mesh}) for mesh in ("2x4", "4x2", "1x8", "8x1", "replicate=8", "tensor=2,shard=4")),
    (GPT, 2, {"mesh": "tensor=2"}),
    *((GPT, 8, {"mesh": mesh}) for mesh in ("context=8", "replicate=2,context=2,tensor=2", "shard=2,context=4")),
    (GPT, 8, {"mesh": "shard=2,context=4", "reshard_after_forward": "2"}),
    *((GPT, 8, {"experts": 8, "mesh": f"shard=8,expert={expert}"}) for expert in (2, 8)),
    *((GPT, 8, {"mesh": mesh}) for mesh in ("replicate=2,shard=2,tensor=2", "replicate=4,tensor=2")),
    *((GPT, 8, {"strategy": "fsdp1", "mesh": mesh}) for mesh in ("2x4", "4x2")),
    *((GPT, 8, {"reshard_after_forward": kept}) for kept in ("2", "4", "8")),
    *((GPT, 16, {"mesh": "2x8", "reshard_after_forward": kept}) for kept in ("2", "4", "8")),
    (GPT, 8, {"reshard_after_forward": "2", "wrap": "blocks+embeddings"}),
    *((ZERO, 4, {"stage": stage}) for stage in ("0", "1", "2", "3")),
    (PIPELINE, 4, {}),
    *((HF, 4, {"strategy": strategy}) for strategy in ("single", "ddp", "fsdp2")),
    (HF, 1, {}),
    *((HF, 8, {"mesh": mesh}) for mesh in ("replicate=2,shard=4", "shard=4,tensor=2", "tensor=4,replicate=2")),
    *((HF, 8, {"mesh": f"{mesh},expert={expert}"}) for mesh in ("shard=8", "shard=4,tensor=2") for expert in (2, 4, 8)),
    (HF, 8, {"mesh": "replicate=2,shard=4,expert=2"}),
]
USES = [  # those whose steps are simulated
    (GPT, ranks, chosen)
    for ranks, chosen in (
        (8, {"mesh": "8x1"}),
        (8, {"mesh": "replicate=2,shard=2,tensor=2"}),
        (8, {"mesh": "shard=2,context=4", "context_attention": "gather"}),
        (16, {"mesh": "2x8", "reshard_after_forward": "4"}),
    )
]


def sizes() -> list[int]:
    """The ranks in each of this process's groups. (PyTorch offers no list of them.)"""
    from torch.distributed import distributed_c10d

    return sorted(group.size() for group in distributed_c10d._world.pg_map)


def in_simulated_worlds(runs, folder):
    """The sizes of the groups that each run's lab makes, building its model on rank 0."""
    import importlib

    import torch
    from labkit.measuring import simulate
    from labkit.running.ranks import Rank

    found = []
    for name, ranks, chosen in runs:
        lab = importlib.import_module(name.removesuffix(".py"))
        if name == HF:
            chosen = chosen | {"config": f"{folder}/config.json"}
        config = lab.Config(**chosen)
        simulate.join(ranks)
        me = Rank(0, 0, ranks, "simulated", torch.device("cpu"), "fake")
        if name == HF or getattr(config, "strategy", "") == "fsdp1":
            with torch.device("meta") if name == HF else contextlib.nullcontext():
                model = lab.unsharded(config)
            getattr(lab, "fsdp1" if name == GPT else "parallelize")(model, config, me)
        else:
            (lab.prepare if name != GPT else lab.build)(config, me)
        found.append(sizes())
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory, selected):
    """Return a function that returns the sizes of the groups that one of RUNS makes."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(EXPERTS))
    runs = selected(RUNS)
    sizes = forked(by_value(in_simulated_worlds), runs, str(folder))
    return lambda run: sizes[runs.index(run)]


def counted(name, ranks, chosen):
    if name == ZERO:
        chosen = {"strategy": "fsdp2" if chosen["stage"] in "23" else "ddp"}
    mesh = f"pipeline={ranks}" if name == PIPELINE else chosen.get("mesh")
    return groups.of_training(
        name, ranks, chosen.get("strategy", "fsdp2"), arrange(ranks, mesh), chosen.get("reshard_after_forward", "true")
    )


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[1]} {' '.join(map(str, run[2].values()))}")
def test_the_groups_are_those_that_pytorch_makes(run, made):
    planned = [group.ranks for group in counted(*run) for _ in range(group.count)]
    assert sorted(planned) == made(run)


def communicating(runs):
    """The sizes of the groups on which each run's step has collectives."""
    import gpt_fsdp
    from labkit.measuring import trace
    from labkit.running import simulated_lab

    found, members = [], trace.members
    for _, ranks, chosen in runs:
        used = set()
        trace.members = lambda arguments, used=used: used.add(members(arguments)) or members(arguments)
        simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(**chosen | {"seq_len": 32, "clip": 1.0}), ranks)
        found.append(sorted(len(each) for each in used if len(each) > 1))
    return found


@pytest.mark.long
def test_the_groups_that_communicate_have_collectives():
    """All ranks communicate in any case, at the latest to average losses."""
    for run, used in zip(USES, forked(by_value(communicating), USES), strict=True):
        planned = [group.ranks for group in counted(*run) if group.communicates and 1 < group.ranks]
        assert sorted({*used, run[1]} - {1}) == sorted({*planned}), run


def trained_with_and_without(me):
    """Train three steps with shared post-forward meshes and with FSDP2's own: (groups beyond the default one, losses)."""
    import gpt_fsdp
    import torch
    from labkit.training import post_forward_mesh

    found = []
    for shared in (post_forward_mesh.shared, contextlib.nullcontext):
        before = len(sizes())
        gpt_fsdp.post_forward_mesh.shared = shared
        config = gpt_fsdp.Config(reshard_after_forward="2", batch_size=1, seq_len=16)
        _, _, step = gpt_fsdp.prepare(config, me)
        tokens = torch.arange(17).view(1, 1, 17) + me.rank
        losses = [step(tokens[..., :-1], tokens[..., 1:])[0].item() for _ in range(3)]
        found.append((len(sizes()) - before, losses))
    return found


@pytest.mark.long
def test_units_share_one_post_forward_mesh_and_train_as_with_their_own():
    here = launch.Cluster(launcher="local")
    for shared, alone in notebook_ranks.on_ranks(by_value(trained_with_and_without), ranks=4, cluster=here, timeout=60):
        blocks = 4
        assert (shared[0], alone[0]) == (2, 2 * blocks)
        assert shared[1] == alone[1] and len(set(shared[1])) == 3


def asked(words: str) -> plan.Config:
    return options.parse(plan.Config, "", f"--preset llama3-8b --precision bf16 {words}".split())


@pytest.mark.parametrize(
    ("words", "communicators", "process_groups"),
    [
        ("--strategy single", 0, 1),
        ("--ranks 8", 1, 1),
        ("--ranks 8 --strategy deepspeed-3", 2, 2),
        ("--ranks 16 --mesh 2x8", 3, 3),
        ("--ranks 16 --mesh shard=2,tensor=8", 3, 3),
        ("--ranks 64 --reshard-after-forward 8", 2, 3),
        ("--ranks 64 --reshard-after-forward 64", 1, 1),
        ("--ranks 16 --mesh 2x8 --reshard-after-forward 4", 4, 5),
    ],
)
def test_every_communicator_needs_memory(words, communicators, process_groups):
    config = asked(words)
    memory = fit(config, 0)
    assert (memory["communicators"], memory["process_groups"]) == (communicators, process_groups)
    further = max(0, communicators - 1) * gpus.COMMUNICATOR
    assert memory["least"] == memory["needs"] == pytest.approx(gpus.outside(config.ranks) + further)


def test_a_plan_says_what_it_assumes_of_communicators():
    texts = [plan.answer(asked(f"--ranks 16 {words}")) for words in ("", "--mesh 2x8", "--reshard-after-forward 8")]
    low, high = gpus.REPORTED
    assumed = (
        f"assumed: {gpus.COMMUNICATOR:g} GiB for each communicator after the first (reported: {low:g} to {high:g})"
    )
    assert [assumed in text for text in texts] == [False, True, True]
    for text, many in zip(texts, ("1 communicator;", "3 communicators;", "2 communicators;"), strict=True):
        assert many in text
    assert ["in gpt_fsdp.py all units share 2" in text for text in texts] == [False, False, True]


def test_searches_and_sweeps_count_them_too():
    row = next(row for row in json.loads(plan.answer(asked("--ranks 16 --sweep --json"))) if "HSDP" in row["strategy"])
    alone = describe(
        config := asked(f"--ranks 16 --mesh {row['options']['mesh']} --recompute {row['recompute']}"),
        plan.plan_from_options(config),
    )
    assert row["least"] == alone["memory"]["least"] and alone["memory"]["communicators"] == 3


OWN = """
import torch
def build():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(5))
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    return Net(), (torch.zeros(2, 16),), lambda net, x: net(x).sum()
"""


def planned_own(path):
    """The plan of a model of five units whose script calls fully_shard, and the groups of its simulation."""
    config = options.parse(plan.Config, "", f"--module {path}:build --ranks 8 --reshard-after-forward 2".split())
    return plan.answer(config), json.loads(plan.answer(dataclasses.replace(config, json=True)))["memory"], sizes()


@pytest.mark.long
def test_with_ones_own_script_every_unit_has_two(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    text, memory, simulated = forked(by_value(planned_own), str(tmp_path / "own.py"))
    assert memory["process_groups"] == len(simulated) == 1 + 2 * 5
    assert memory["communicators"] == 1 + 5
    assert "warning: fully_shard builds 2 process groups for each unit, 10 here" in text


def test_what_would_hang_is_refused():
    """Every tensor rank would build the groups of its own part of the mesh (torch 2.15)."""
    with pytest.raises(UserError, match="hangs"):
        arrange(8, "shard=4,tensor=2", "2")
    assert arrange(8, "shard=4,tensor=2", "4").shard == 4
