# SPDX-License-Identifier: BSD-3-Clause
"""The options of the labs, declared once: what derives from them, what plan.py makes of a lab's command line, old records."""

import dataclasses
import json
import os
import random
import re
import shlex
import sys

import gpt_fsdp
import gpt_pipeline
import gpt_zero
import hf_fsdp
import mnist_fsdp
import plan
import pytest
from commands import call, refused, script
from labkit import UserError
from labkit.measuring import meters, records
from labkit.running import lab_options, launch, options
from labkit.running.lab import Lab
from labkit.running.lab_options import LABS, TransformerTraining, of_lab
from labkit.running.options import Conflict, option
from planner import predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES
from proofs import configurations

REFERENCE = launch.SOURCE / "results" / "reference"

# Declarations


@pytest.mark.parametrize("lab", [gpt_fsdp, gpt_zero, gpt_pipeline, hf_fsdp, mnist_fsdp], ids=lambda lab: lab.__name__)
def test_a_labs_options_are_those_declared(lab):
    script_name = f"{lab.__name__}.py"
    assert issubclass(lab.Config, LABS[script_name]) and lab.Config.script == script_name
    assert dataclasses.fields(lab.Config) == dataclasses.fields(LABS[script_name])


def test_planning_has_the_words_and_the_defaults_of_training():
    """Where plan.py's default is another, it says that nothing was given, and stands for the lab's."""
    ours = {field.name: field for field in dataclasses.fields(plan.Config)}
    for field in dataclasses.fields(gpt_fsdp.Config):
        if field.name != "dry_run":
            assert ours[field.name].default in (field.default, None), field.name
            theirs = options.choices_of(field)
            assert set(theirs) <= set(options.choices_of(ours[field.name])), field.name
    assert plan.Config().preset == gpt_fsdp.Config().preset
    assert not plan.Config().wraps_embeddings and not gpt_fsdp.Config().wraps_embeddings


def test_the_declarations_need_no_torch():
    program = "import sys, labkit.running.lab_options; assert 'torch' not in sys.modules"
    assert call(sys.executable, "-c", program, cwd=launch.SOURCE).returncode == 0


def test_an_option_is_added_in_one_place(monkeypatch):
    """Declared for gpt_fsdp.py, it is plan.py's too, stands in its command, and is no option of labs that do not take it."""

    def with_one_more(base):
        namespace = {"__annotations__": {"z_loss": float | None}, "z_loss": option(None, "weight of it", above=0)}
        return dataclasses.dataclass(frozen=True)(type("More", (base,), namespace))

    more = with_one_more(TransformerTraining)
    planned = with_one_more(plan.Config)
    monkeypatch.setitem(LABS, "gpt_fsdp.py", more)
    monkeypatch.setattr(plan, "TransformerTraining", more)
    words, _ = plan.command(options.parse(planned, "", ["--z-loss", "0.1"]))
    assert "--z-loss 0.1" in words
    narrow = type("Narrow", (more,), {"__annotations__": {}}, takes=())
    assert "z_loss" not in {field.name for field in dataclasses.fields(dataclasses.dataclass(frozen=True)(narrow))}
    assert narrow().z_loss is None


def test_of_a_base_a_class_takes_some_options_and_the_others_are_constants():
    taken = {field.name for field in dataclasses.fields(hf_fsdp.Config)}
    assert "accumulate" in taken and "ranks" in taken and not taken & {"preset", "tied", "wrap", "optimizer"}
    config = hf_fsdp.Config(config="x", accumulate=2)
    assert (config.preset, config.wrap, config.optimizer) == ("tiny", "blocks", "adamw")
    with pytest.raises(TypeError):
        hf_fsdp.Config(config="x", wrap="blocks")


@pytest.mark.parametrize(
    ("given", "lr", "seq_len"),
    [
        ({"config": "x"}, 1e-4, 128),
        ({"model": "x"}, 2e-5, 128),
        ({"model": "x", "data": "y"}, 2e-5, 1024),
        ({"model": "x", "lora": 8}, 2e-4, 128),
        ({"model": "x", "adapters": "z", "data": "y"}, 2e-4, 1024),
        ({"model": "x", "data": "y", "lr": 1e-6, "seq_len": 7}, 1e-6, 7),
    ],
)
def test_defaults_of_fine_tuning_depend_on_what_is_trained(given, lr, seq_len):
    config = hf_fsdp.Config(**given).with_steps(3)
    assert (config.lr, config.seq_len) == (lr, seq_len)


@pytest.mark.parametrize(("lab", "first"), [(mnist_fsdp, "--strategy"), (gpt_zero, "--stage"), (plan, "--preset")])
def test_help_lists_a_commands_own_options_first(lab, first, capsys):
    with pytest.raises(SystemExit):
        options.parse(lab.Config, "", ["--help"])
    page = capsys.readouterr().out.partition("options:")[2]
    listed = re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)
    assert listed[0] == first and listed.index("--batch-size") < listed.index("--checkpoint")


def test_a_choice_that_is_none_is_refused_in_a_notebook_too():
    with refused("--recompute", "none, full, selective, alternate", "'most'"):
        gpt_fsdp.Config(recompute="most")


@pytest.mark.parametrize(
    ("when", "excludes", "found"),
    [
        ({"lr": options.GIVEN}, {}, False),
        ({"seed": options.GIVEN}, {}, True),
        ({"seed": 2}, {"strategy": ("ddp", "fsdp2")}, True),
        ({"seed": 2}, {"strategy": ("ddp", "fsdp1")}, False),
        ({"seed": lambda value: value > 2}, {}, False),
        ({"no_such_option": options.GIVEN}, {}, False),
    ],
)
def test_a_row_of_a_table_of_conflicts(when, excludes, found):
    assert Conflict(when, excludes, "").found_in(gpt_fsdp.Config(seed=2)) == found


# Records


def test_a_lab_says_how_its_records_are_planned(monkeypatch):
    """So can a lab that the course does not have."""
    monkeypatch.setattr(predict, "PLANNERS", dict(predict.PLANNERS))
    monkeypatch.setattr(lab_options, "LABS", dict(LABS))

    @of_lab("my_lab.py")
    @dataclasses.dataclass(frozen=True)
    class MyTraining(options.Training):
        width: int = option(8, "of the model")

        def plan(self, ranks, *, on_gpu, at_least=False, **how):
            network = networks.gpt(GPT_SHAPES["tiny"], self.width, 16)
            return predict.Plan(network, ranks=ranks, on_gpu=on_gpu, **how)

    record = {"script": "my_lab.py", "config": {"width": 3}, "ranks": 2, "device": "cpu"}
    assert predict.plan_of(record).blueprint.samples == 3 * 16


@pytest.mark.parametrize("name", ["gpt_jax.py", "hello.py"])
def test_a_record_that_nobody_plans_is_refused(name):
    with refused(name, "gpt_fsdp.py"):
        predict.plan_of({"script": name, "config": {}, "ranks": 2, "device": "cpu"})


def test_old_names_and_values_are_todays():
    before = {"units": "apart", "reshard_after_forward": None, "keep": 2, "fall_back": True, "on_failed_save": "go-on"}
    assert lab_options.translated(before) == {
        "wrap": "blocks+embeddings",
        "reshard_after_forward": "true",
        "keep_last": 2,
        "fallback": True,
        "on_save_error": "continue",
    }
    assert lab_options.translated({"wrap": "size", "sharding": "grad-op"}) == {
        "wrap": "size",
        "reshard_after_forward": "false",
    }
    for base in LABS.values():  # no name of today is one that is translated
        names = {field.name for field in dataclasses.fields(base)} - {"reshard_after_forward"}
        assert not names & lab_options.FORMER.keys()


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("tiny-*/*.json")), ids=lambda path: path.stem)
def test_a_committed_record_with_old_names_is_planned_as_before(path):
    record = records.load(path)
    assert "units" in record["config"]  # an old one
    planned = predict.total(predict.plan_of(record).peak()[1])
    assert planned == pytest.approx(sum(record["memory"]["peak"].values()), rel=1e-4)


def test_embeddings_that_were_apart_are_planned_so():
    config = dataclasses.asdict(gpt_fsdp.Config())
    config.pop("wrap")
    common = {"script": "gpt_fsdp.py", "ranks": 4, "device": "cpu"}
    old = predict.plan_of(common | {"config": config | {"units": "apart"}})
    assert len(old.units) == 7 and len(predict.plan_of(common | {"config": config | {"units": "blocks"}}).units) == 5
    assert old.peak() == Lab(device="cpu").plan("gpt_fsdp.py", ranks=4, wrap="blocks+embeddings").peak()


def test_a_notebook_plans_mnist_by_the_same_words():
    by_words = Lab(device="cpu").plan(
        "mnist_fsdp.py", ranks=2, wrap="size", reshard_after_forward="false", batch_size=8
    )
    assert by_words.peak() == predict.mnist_plan("fsdp2", "size", 2, 8, reshard_after_forward="false").peak()


# --dry-run


@pytest.mark.parametrize(
    "words",
    [
        # One step each: should one of them run after all, it is soon over
        "mnist_fsdp.py --wrap size --data mnist-5k --max-steps 1",
        "gpt_fsdp.py --mesh 2x2 --max-steps 1 --record FOLDER/run.json --checkpoint FOLDER/saved",
        "gpt_zero.py --stage 2 --max-steps 1",
        "gpt_pipeline.py --max-steps 1",
        "one_rank.py --device cpu --max-steps 3",
    ],
)
def test_a_dry_run_prints_the_plan_and_starts_nothing(words, tmp_path):
    run = script(*words.replace("FOLDER", str(tmp_path)).split(), "--ranks", "4", "--dry-run")
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert "4 ranks" in run.stdout and "none was started" in run.stdout and "starting" not in run.stdout
    assert "peak of a rank" in run.stdout and "collectives of a step" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_refused_like_a_run():
    run = script("gpt_fsdp.py", "--ranks", "3", "--mesh", "2x2", "--dry-run")
    assert run.returncode == 2 and "--mesh 2x2 is for 4 ranks" in run.stderr


def test_of_ranks_that_a_launcher_started_one_prints_the_plan(capsys):
    config = gpt_fsdp.Config(device="cpu", dry_run=True)
    from labkit.running import ranks

    for rank in (0, 1):
        ranks._print_plan(config, (rank, rank, 2))
        assert ("gpt_fsdp.py: 2 ranks" in capsys.readouterr().out) == (rank == 0)


# From a lab's command line to a plan, and back

VALUES = configurations.CHOICES | {
    "preset": ("tiny", "tiny", "small"),
    "wrap": ("blocks", "blocks+embeddings"),
    "max_steps": (4, 20),
    "cpu_offload": (False, False, True),
    "compile": (False, True),
    "lr": (1e-3, 3e-4),
    "warmup_steps": (0, 2),
    "lr_schedule": ("constant", "cosine", "wsd"),
    "decay_steps": (None, 1, 3),
    "min_lr": (0.0, 1e-4),
    "weight_decay": (0.01, 0.1),
    "decay_1d": (True, False),
    "log": (None, "results/runs/a folder of logs"),
    "seed": (1, 2),
    "checkpoint_every": (None, 2),
    "resume": (False, True),
    "keep_last": (None, 2),
    "checkpoint": (None, None, "results/runs/a folder; of checkpoints"),
}


def drawn(chance: random.Random, values: dict) -> list[str]:
    """A command line of gpt_fsdp.py, whose options may not go together. One in three is given."""
    ranks = chance.choice((2, 3, 4))
    given = {"ranks": ranks, "device": "cpu"}
    for name in (*options.declared(TransformerTraining), "checkpoint", "resume", "keep_last", "log"):
        known = configurations.MESHES[ranks] if name == "mesh" else values.get(name, ())
        if known and chance.random() < 1 / 3:
            given[name] = chance.choice(known)
    if given.get("strategy") == "single":
        given["ranks"] = 1
    return options.arguments(given)


def accepted(words: list[str]):
    """The lab's configuration; None where the lab refuses the words."""
    try:
        config = options.parse(gpt_fsdp.Config, "", words)
        config.arranged(config.ranks)
        return config
    except (SystemExit, UserError):
        return None


def test_every_option_of_the_lab_is_drawn():
    assert set(options.declared(TransformerTraining)) <= {*VALUES, "mesh"}


def test_plan_py_takes_a_labs_words_and_gives_them_back(seed, capsys):
    """To the same configuration, whatever a shell does to the words. It refuses what is not predicted, and nothing else."""
    print(f"seed {seed}")
    chance, taken, unpredicted = random.Random(seed), 0, 0
    while taken < 100:
        words = drawn(chance, VALUES)
        if not (config := accepted(words)):
            continue
        try:
            asked = options.parse(plan.Config, "", words)
            answer = json.loads(plan.answer(dataclasses.replace(asked, json=True)))
        except (SystemExit, UserError) as error:
            sentence = capsys.readouterr().err if isinstance(error, SystemExit) else str(error)
            assert "not predicted" in sentence, (words, sentence)
            unpredicted += 1
            continue
        python, lab, *given = shlex.split(answer["command"])
        assert (python, lab) == ("python", "gpt_fsdp.py")
        assert options.parse(gpt_fsdp.Config, "", given) == config, (words, given)
        taken += 1
    assert unpredicted < taken / 2


@pytest.mark.long
@pytest.mark.nightly  # in make test, test_predict's draws
def test_a_plans_command_measures_what_was_planned(seed, tmp_path):
    """Drawn command lines of gpt_fsdp.py, each through plan.py and run as it says: 2, and 20 with a new seed."""
    chance, compared, wanted = random.Random(seed), 0, 20 if "FSDP_LABS_SEED" in os.environ else 2
    steps = str(meters.TRACED_STEPS[-1] + 1)
    small = VALUES | dict.fromkeys(("preset", "max_steps", "compile", "checkpoint", "checkpoint_every", "resume"), ())
    small |= {"cpu_offload": (False,), "keep_last": (), "accumulate": (1, 2), "log": ()}
    small["decay_1d"] = ()  # the planner knows one group of parameters: see weight_decay.parameter_groups
    while compared < wanted:
        words = drawn(chance, small)
        if not accepted(words):
            continue
        try:
            planned = json.loads(plan.answer(options.parse(plan.Config, "", [*words, "--max-steps", steps, "--json"])))
        except (SystemExit, UserError):
            continue
        path = tmp_path / f"{compared}.json"
        _, *command = shlex.split(planned["command"])
        run = script(*command, "--record", path, timeout=120)
        assert run.returncode == 0, run.stderr
        measured = sum(records.load(path)["memory"]["peak"].values())
        assert measured == pytest.approx(planned["peak"], rel=1e-4), planned["command"]
        compared += 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("", "python gpt_fsdp.py --ranks 8"),
        ("--strategy single", "python gpt_fsdp.py --ranks 1 --strategy single"),
        ("--ranks 4 --strategy zero1", "python gpt_zero.py --ranks 4 --stage 1"),
        ("--ranks 4 --strategy deepspeed-2", "python gpt_zero.py --ranks 4 --stage 2 --engine deepspeed"),
        ("--ranks 4 --mesh pipeline=4 --accumulate 8", "python gpt_pipeline.py --ranks 4 --batch-size 8 --mesh pipeline=4"),
        ("--ranks 4 --config samples/llama_small.json", "python hf_fsdp.py --ranks 4 --batch-size 8 --seq-len 128 --config samples/llama_small.json"),
        ("--ranks 16", "srun --nodes=2 --ntasks=16 --gres=gpu:8 python gpt_fsdp.py --ranks 16"),
        ("--optimizer adamw-8bit", None),
        ("--strategy zero1 --ranks 4 --sync last", None),
        ("--config samples/llama_small.json --sync last", "python hf_fsdp.py --ranks 8 --batch-size 8 --seq-len 128 --sync last --config samples/llama_small.json"),
        ("--config samples/llama_small.json --optimizer sgd", None),
        ("--strategy zero1 --checkpoint ckpt", None),
    ],
)  # fmt: skip
def test_a_plan_ends_with_the_command_that_trains_it(words, command, monkeypatch):
    monkeypatch.chdir(launch.SOURCE)
    asked = options.parse(plan.Config, "", words.split())
    page = plan.answer(asked).splitlines()
    if command:
        assert page[-2:] == ["to train it:", f"  {command}"]
    else:
        assert page[-1].startswith("(no lab of the course trains it: ")


def test_what_is_found_or_comes_first_ends_with_its_command(monkeypatch):
    found = plan.answer(plan.Config(find="batch-size")).splitlines()[-1]
    number = json.loads(plan.answer(plan.Config(find="batch-size", json=True)))["found"]
    assert found == f"  python gpt_fsdp.py --ranks 8 --batch-size {number}"
    first = plan.answer(plan.Config(sweep=True, strategy="ddp")).splitlines()[-1]
    assert first.startswith("  python gpt_")
