# SPDX-License-Identifier: BSD-3-Clause
"""FSDP in JAX: every strategy trains as PyTorch does, each device holds exactly its part, and what is refused.

JAX computes in a process of its own: it makes its devices once, and its threads do not survive a fork.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import cloudpickle
import gpt_fsdp
import gpt_jax
import pytest
import torch
from commands import assert_about, refused, script
from labkit import UserError, succeeds
from labkit.measuring import meters
from labkit.measuring.differences import largest_difference
from labkit.measuring.replaced import replaced
from labkit.running import launch, notebook_ranks, preemption
from labkit.running.lab import Lab
from labkit.training import hf_files, jax_world
from planner.parallel import jax_sharding
from proofs import parity

pytestmark = pytest.mark.long
HERE = launch.Cluster(launcher="local")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the process cannot import this file

SMALL = {"seq_len": 16, "device": "cpu"}
DEVICES, STEPS, MORE, SEQUENCES = 8, 10, 9, 8
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"  # which is most of what these short runs take
# A program that several of these runs share, as those that are refused late do
COMPILE_ONCE = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
TENSOR, BF16 = "fsdp-weights 2 x tensor 2", "fsdp-explicit, HSDP, bf16"
HSDP, REPLICAS = "fsdp-shard-map, HSDP, accumulated", "replicate=2,fsdp=2"
SHORT = {"max_steps": 5, "devices": 4, "batch_size": 2}  # eight devices show no more, and compute for twice as long
REPLICATED = {"strategy": "replicated", "devices": 2, "batch_size": 4}
CASES = {
    "replicated": REPLICATED | {"max_steps": STEPS + MORE},
    "fsdp-explicit": {},
    "fsdp-activations": SHORT | {"strategy": "fsdp-activations"},
    "fsdp-weights, kept": SHORT | {"strategy": "fsdp-weights", "reshard_after_forward": "false"},
    "fsdp-shard-map, recomputed, all cut": SHORT | {"strategy": "fsdp-shard-map", "recompute": "full", "min_size": 0},
    HSDP: SHORT | {"strategy": "fsdp-shard-map", "accumulate": 2, "batch_size": 1, "mesh": REPLICAS},
    BF16: SHORT | {"precision": "bf16", "mesh": REPLICAS},
    TENSOR: SHORT | {"strategy": "fsdp-weights", "mesh": "fsdp=2,tensor=2", "batch_size": 4},
}
VALIDATED = ("replicated", "fsdp-explicit", HSDP)  # the others are not, as this too has to be compiled
CUT = [name for name in CASES if name not in ("replicated", TENSOR)]
IN_FP32 = [name for name in CASES if name != BF16]


def config_of(case: dict) -> gpt_jax.Config:
    return gpt_jax.Config(**{"batch_size": 1, "devices": DEVICES, "max_steps": STEPS} | SMALL | case)


def watched(case: dict, validated: bool) -> dict:
    """The record's part of a run, and of each array when it is over (name, elements, elements on each device)."""
    seen, prepare = [], gpt_jax.prepare
    changes = {"prepare": lambda *given: seen.append(prepare(*given)) or seen[0]}
    config = config_of(case)
    with replaced(gpt_jax, **changes | ({} if validated else {"evaluate": lambda *_: math.nan})):
        result = gpt_jax.train(config, jax_world.load(config.devices, "cpu", config.precision))
    leaves, _ = gpt_jax.jax.tree_util.tree_flatten_with_path((seen[0].params, seen[0].state))
    result["arrays"] = [
        (gpt_jax.jax.tree_util.keystr(path), leaf.size, [shard.data.size for shard in leaf.addressable_shards])
        for path, leaf in leaves
    ]
    return result


def compute(me, folder) -> dict:
    """{"alone", "bf16", "runs", "refused"}: all that is computed, in one process, as JAX takes seconds to start."""
    os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
    for name, value in COMPILE_ONCE.items():
        gpt_jax.jax.config.update(name, value)
    gpt_jax.jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    meters.TRACED_STEPS = range(0)
    alone = gpt_fsdp.train(gpt_fsdp.Config(strategy="single", batch_size=SEQUENCES, max_steps=STEPS, **SMALL), me)
    jax_world.load(DEVICES, "cpu")
    saved = {"checkpoint": f"{folder}/ckpt"}
    bf16 = {"strategy": "fsdp2", "precision": "bf16", "batch_size": SEQUENCES, "max_steps": SHORT["max_steps"]}
    bf16 = gpt_fsdp.train(gpt_fsdp.Config(**bf16, **SMALL), me)
    runs = {}
    for name, case in CASES.items():
        runs[name] = watched(case | (saved if name == "fsdp-explicit" else {}), name in VALIDATED)
    found = {"alone": alone, "bf16": bf16, "runs": runs, "refused": refuse_all(folder)}
    return found | {"weights": from_file(folder), "asked": asked(folder)}


def from_file(folder) -> tuple[bool, bool]:
    """Whether parameters read from a file are those that it was written from, and those of the seed."""
    config = config_of({"weights": f"{folder}/model.safetensors"})
    hf_files.save(gpt_jax.jax_models.initial_weights(config.shape, seed=2), Path(config.weights))
    _, shapes = gpt_jax.jax_models.structure(config.shape)
    placed = gpt_jax.jax_partition.shardings(
        shapes, config.min_size, gpt_jax.device_mesh(config, jax_world.load(DEVICES, "cpu"))
    )
    read, *others = (
        gpt_jax.jax.tree.leaves(gpt_jax.initial_parameters(config_of(case), shapes, placed))
        for case in ({"weights": config.weights}, {"seed": 2}, {"seed": 1})
    )
    return tuple(all(bool((a == b).all()) for a, b in zip(read, other, strict=True)) for other in others)


def asked(folder) -> list[str]:
    """The checkpoints of a run that receives a signal in its first step."""
    config = config_of(REPLICATED | {"checkpoint": f"{folder}/asked"})
    preemption.install_handlers(config)
    os.kill(os.getpid(), signal.SIGUSR1)
    with contextlib.suppress(preemption.Preempted):
        gpt_jax.train(config, jax_world.load(config.devices, "cpu"))
    return [path.name for path in Path(config.checkpoint).iterdir() if ".owner-" not in path.name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jax")


@pytest.fixture(scope="module")
def computed(folder):
    return notebook_ranks.on_ranks(compute, str(folder), ranks=1, cluster=HERE, timeout=900)[0]


@pytest.fixture(scope="module")
def runs(computed):
    return computed["runs"]


@pytest.fixture(scope="module")
def alone(computed):
    return computed["alone"]


@pytest.mark.parametrize("name", IN_FP32)
def test_losses_are_those_of_pytorch_and_of_the_replicated_run(name, runs, alone):
    """A forgotten weight decay shows in float64 (test_parity.py); optax's own is a hundredth of PyTorch's."""
    losses = runs[name]["losses"][:STEPS]
    steps = len(losses)
    assert steps == min(STEPS, config_of(CASES[name]).max_steps) and losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(runs["replicated"]["losses"][:steps], rel=1e-5)
    assert losses == pytest.approx(alone["losses"][:steps], rel=1e-5)
    if name != "replicated" and steps == STEPS:  # as many as PyTorch's
        assert runs[name]["validation_loss"] == pytest.approx(alone["validation_loss"], rel=1e-5)


def test_in_bf16_jax_is_as_near_to_pytorch_as_pytorchs_bf16_to_its_fp32(runs, computed, alone):
    """And bf16 was computed in: the losses are not those of fp32."""
    jax, pytorch = runs[BF16]["losses"], computed["bf16"]["losses"]
    steps = len(jax)
    assert pytorch != pytest.approx(alone["losses"][:steps], rel=1e-5)
    limit = largest_difference(pytorch, alone["losses"][:steps], relative=True)
    assert largest_difference(jax, pytorch, relative=True) <= limit
    assert largest_difference(jax, alone["losses"][:steps], relative=True) > 1e-5


@pytest.mark.parametrize("name", CUT)
def test_each_device_holds_exactly_its_part(name, runs):
    """Of every parameter and moment of at least --min-size elements; the smaller ones are whole."""
    config = config_of(CASES[name])
    arrays = runs[name]["arrays"]
    assert len(arrays) == 3 * 12 + 1  # a parameter and its two moments; the count of steps
    for array, size, parts in arrays:
        cut = size >= config.min_size and size > 1
        shards = config.axes(config.devices)["fsdp"]
        assert parts == [size // shards if cut else size] * config.devices, array
    assert any(size < config.min_size for _, size, _ in arrays) == (config.min_size > 0)


def test_on_the_grid_each_device_holds_its_part(runs):
    cut = [size // part for _, size, (part, *_) in runs[TENSOR]["arrays"] if size >= 2**14]
    assert set(cut) == {2, 4}  # the embedding, of which a row is looked up, has no dimension along tensor
    assert cut.count(2) == 3


@pytest.mark.parametrize("name", ["replicated", *CUT])
def test_persistent_bytes_are_the_planners(name, runs):
    config, start = config_of(CASES[name]), runs[name]["memory"]["start"]
    devices = 1 if name == "replicated" else config.axes(config.devices)["fsdp"]
    kept = jax_sharding.persistent(config.shape, devices, config.min_size)
    for category in ("parameters", "optimizer state"):
        assert start[category] == sum(size for (group, _), size in kept.items() if group == category)
    # The rest of what the program is given is the device's part of the batch: inputs and targets, as int32
    assert start["activations"] == 2 * 4 * config.accumulate * config.batch_size * config.seq_len
    assert len(set(runs[name]["memory"]["peak_by_rank"])) == 1


def test_donated_arrays_are_not_there_twice(runs):
    compiled = runs["fsdp-explicit"]["memory"]["compiled"]
    persistent = compiled["arguments"] - runs["fsdp-explicit"]["memory"]["start"]["activations"]
    assert compiled["aliased"] == persistent


def planned(name) -> dict:
    config = config_of(CASES[name])
    axes = config.axes(config.devices)
    again = config.recompute == "full" or config.reshard_after_forward == "true"
    about = {"replicas": axes.get("replicate", 1), "scatters": config.strategy == "fsdp-shard-map"}
    traffic = jax_sharding.traffic(config.shape, axes["fsdp"], config.min_size, again, config.accumulate, **about)
    return jax_sharding.bytes_by_kind(traffic)


COUNTED = [name for name in CUT if name not in ("fsdp-activations", BF16)]


@pytest.mark.parametrize("name", COUNTED)
def test_collectives_are_those_predicted(name, runs):
    """In bf16 the compiler for the CPU widens what it sends; constrained activations have a test of their own."""
    counted, expected = jax_sharding.bytes_by_kind(runs[name]["traffic"]), planned(name)
    reduced = ("all-reduce", "replicate+fsdp" if "HSDP" in name else "fsdp")
    accumulate = config_of(CASES[name]).accumulate
    assert counted.pop(reduced) == pytest.approx(expected.pop(reduced), abs=8 * accumulate)  # the loss
    assert counted == expected


def test_constrained_activations_leave_few_tokens_to_the_compiler(runs):
    """128 tokens are fewer bytes than a block: it sends activations instead of weights, as nothing forbids it."""
    name = "fsdp-activations"
    assert jax_sharding.bytes_by_kind(runs[name]["traffic"]) != planned(name)


def test_weights_come_from_a_file_of_export(computed):
    assert computed["weights"] == (True, False)  # those of the file, and not those of --seed


def test_a_signal_saves_the_step_and_ends_the_run(computed, monkeypatch):
    assert computed["asked"] == ["step-000001"]

    def main(config, world):
        raise preemption.Preempted

    monkeypatch.setattr(jax_world, "load", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        jax_world.run(main, config_of({}))
    assert ended.value.code == preemption.EXIT_REQUEUE


# What a user gets wrong (and bad_input.py)

OTHER_SHAPES = "one of other shapes"
SAVED = f"step-{STEPS:06}"
RESUMED = {"resume": True, "max_steps": 30}
REFUSED = {
    "a mesh for others": ({"mesh": "replicate=4,fsdp=4"}, ("--mesh replicate=4,fsdp=4", "16", "8")),
    "heads": ({"mesh": "fsdp=2,tensor=4", "strategy": "fsdp-weights"}, ("2 heads",)),
    "a dimension": ({"devices": 5}, ("blocks.attention.key.kernel", "(4, 128, 64)", "5")),
    "a long text": ({"seq_len": 10**6}, ("--seq-len",)),
    "a big model": (
        {"preset": "llama3-405b"},
        ("--preset llama3-405b", "--strategy fsdp-explicit", "8 devices", "756.0 GiB"),
    ),
    "a big batch": ({"batch_size": 10**9}, ("1 x 1,000,000,000", "8 devices", "GiB")),
    "many micro-batches": (  # only the compiled step shows what it needs
        {"accumulate": 10**9, "devices": 2},
        ("1,000,000,000 x 1", "2 devices", "GiB"),
    ),
    "more devices": ({"devices": 9}, ("--devices 9", "8 devices")),
    "no such weights": ({"weights": "none.safetensors"}, ("--weights none.safetensors", "export.py")),
    "another model's weights": (
        {"weights": "other.safetensors"},
        ("--weights", "--preset", "blocks.0.feed_forward.up.weight", "(8, 8)", "(384, 128)"),
    ),
    "no GPU": ({"device": "cuda"}, ("--device cuda", "JAX")),
    "another model's checkpoint": (
        {"preset": "small", "resume": True},
        ("--preset tiny", "small"),
    ),
    "another batch": ({"devices": 4, "resume": True}, ("global batch of 8", "4")),
    "a used folder": ({}, (SAVED, "--resume")),
    "nothing left": ({"resume": True}, (f"step {STEPS} of {STEPS}",)),
    "a damaged one": (RESUMED | {"checkpoint": "damaged"}, (SAVED, "damaged", "state/d", "0 bytes", "--fallback")),
    OTHER_SHAPES: (RESUMED, (SAVED, "another model")),
}


def refuse_all(folder) -> dict:
    """{name: what is said of it}"""
    shutil.copytree(f"{folder}/ckpt", f"{folder}/damaged")
    for file in Path(folder, "damaged").rglob("d/*"):
        file.write_bytes(b"")
    config = config_of({})
    weights = gpt_jax.jax_models.initial_weights(config.shape, seed=2)
    weights["blocks.0.feed_forward.up.weight"] = torch.zeros(8, 8)
    hf_files.save(weights, Path(folder, "other.safetensors"))
    found = {}
    for name, (case, _) in REFUSED.items():
        if case.get("weights") == "other.safetensors":
            case = case | {"weights": f"{folder}/other.safetensors"}
        if "resume" in case or name == "a used folder":
            case = {"checkpoint": f"{folder}/ckpt"} | case
        if "checkpoint" in case:
            case = case | {"checkpoint": os.path.join(folder, case["checkpoint"])}
        if name == OTHER_SHAPES:  # those of this version of the course, and of the one that saved
            shapes = gpt_jax.GPT_SHAPES
            shapes["tiny"] = dataclasses.replace(shapes["tiny"], intermediate_size=256)
        config = config_of(case | {"record": f"{folder}/refused.json"})
        try:
            gpt_jax.main(config, jax_world.load(config.devices, config.device))
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_and_nothing_written(name, computed, folder):
    said = computed["refused"][name]
    assert len(said.splitlines()) == 1
    assert_about(said, *REFUSED[name][1])
    assert not (folder / "refused.json").exists()
    assert [path.name for path in (folder / "ckpt").iterdir() if ".owner-" not in path.name] == [SAVED]


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, ("jax", "not installed")),
        ({"jax": "0.9.2"}, ("JAX 0.9.2", "0.10")),
        ({"jax": "0.10.0", "flax": "1"}, ("optax", "not installed")),
        (dict.fromkeys(jax_world.PACKAGES, "1.2.3"), None),
    ],
)
def test_jax_that_cannot_be_used(versions, said, monkeypatch):
    def installed(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert succeeds(jax_world.check) == (said is None)
    if said:
        with refused(*said, "make jax"):
            jax_world.check()
        assert not any(way.lab == parity.JAX for way in parity.runnable())


WITHOUT = """
import importlib.metadata, runpy, sys
found = importlib.metadata.version
def version(name):
    if name == "jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
sys.modules["jax"] = None  # importing it fails
sys.argv = ["gpt_jax.py"]
runpy.run_path("gpt_jax.py", run_name="__main__")
"""


def test_without_jax_the_script_says_so(tmp_path):
    program = tmp_path / "without.py"
    program.write_text("import sys\nsys.path.insert(0, '.')\n" + WITHOUT)
    done = script(program)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpt_jax.py: ") and done.stderr.count("\n") == 1
    assert_about(done.stderr, "jax", "not installed", "make jax")


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "2"}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}])
def test_several_processes_never_become_several_runs(environ):
    with refused("2 processes"):
        jax_world.refuse_several(environ)
    jax_world.refuse_several({"SLURM_STEP_NUM_TASKS": "2"})  # of the job around a shell: nobody started any


# From a notebook


def test_a_notebook_goes_on_with_four_devices_where_eight_have_saved(runs, folder, monkeypatch):
    """And it runs this lab as the others."""
    monkeypatch.setenv("XLA_FLAGS", QUICK_TO_COMPILE)
    shutil.copytree(folder / "ckpt", folder / "resumed")
    more = {"checkpoint": str(folder / "resumed"), "resume": True, "max_steps": STEPS + MORE}
    record = Lab(ranks=2, launcher="local").run("gpt_jax.py", devices=4, batch_size=2, seq_len=16, **more)
    assert record["first_step"] == STEPS
    assert record["losses"] == pytest.approx(runs["replicated"]["losses"][STEPS:], rel=1e-5)
    assert record["config"]["devices"] == record["ranks"] == len(record["memory"]["peak_by_rank"]) == 4
    assert record["device"] == "cpu" and record["time"]["step"]["steps"] == 2
    assert record["versions"]["jax"] and record["memory"]["peak"]["temporary"] > 0
    assert {entry["kind"] for entry in record["traffic"]} == {"all-gather", "all-reduce"}


def test_to_slurm_it_is_one_task_with_all_gpus():
    words, ranks = launch.script_argv("gpt_jax.py", 4, launch.RUNS / "x.json", {"devices": 8})
    assert ranks == 8 and words[1:3] == ["--devices", "8"]
    request = launch.Cluster().request(ranks, 1, "cuda", launch.tasks_of("gpt_jax.py", 1))
    assert (request["ntasks"], request["ntasks-per-node"], request["gres"]) == (1, 1, "gpu:8")
    with refused("gpt_jax.py", "one node"):
        launch.tasks_of("gpt_jax.py", 2)
