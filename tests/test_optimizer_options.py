# SPDX-License-Identifier: BSD-3-Clause
"""The learning rate follows its schedule, also in a resumed run, and weight decay spares norms under every strategy."""

import dataclasses
import functools
import shutil
from itertools import pairwise

import gpt_fsdp
import gpt_pipeline
import gpt_zero
import hf_fsdp
import pytest
import torch
from forked import by_value
from labkit.measuring import meters
from labkit.running import launch, notebook_ranks
from labkit.training import lr_schedule, weight_decay
from planner.models import shapes
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

HERE = launch.Cluster(launcher="local")
COSINE = {"lr": 1.0, "lr_schedule": "cosine", "warmup_steps": 4, "max_steps": 14, "min_lr": 0.1}
WSD = {"lr": 1.0, "lr_schedule": "wsd", "warmup_steps": 3, "max_steps": 20, "min_lr": 0.2}


def rates(**options):
    config = gpt_fsdp.Config(**options)
    return [lr_schedule.learning_rate(config, step) for step in range(config.max_steps)]


# ---- the schedule


def test_without_options_the_rate_is_constant():
    assert rates() == [gpt_fsdp.Config().lr] * gpt_fsdp.Config().max_steps


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (COSINE, {0: 0.2, 3: 0.8, 4: 1.0, 9: 0.55, 13: 0.1 + 0.9 * 0.0244717}),
        (WSD, {0: 0.25, 2: 0.75, 3: 1.0, 18: 1.0, 19: 0.6}),  # the default decay: a tenth of the steps, 18 and 19
        (WSD | {"decay_steps": 8}, {11: 1.0, 12: 1.0, 13: 0.9, 16: 0.6, 19: 0.3}),
        (WSD | {"decay_steps": 17, "min_lr": 0.0}, {2: 0.75, 3: 1.0, 4: 16 / 17, 19: 1 / 17}),  # nothing is stable
        ({"warmup_steps": 4, "lr": 1.0, "max_steps": 8}, {0: 0.2, 3: 0.8, 4: 1.0, 7: 1.0}),
        ({"warmup_steps": 9, "lr": 1.0, "max_steps": 2}, {0: 0.1, 1: 0.2}),  # a run may end in its warm-up
        ({"lr_schedule": "cosine", "lr": 1.0, "max_steps": 2}, {0: 1.0, 1: 0.5}),
    ],
)
def test_the_rate_is_the_formulas(options, values):
    found = rates(**options)
    assert {step: found[step] for step in values} == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("warmup", [1, 4])
def test_cosine_is_pytorchs_own(warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    before = LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
    after = CosineAnnealingLR(optimizer, T_max=14 - warmup, eta_min=0.05)
    scheduler, theirs = SequentialLR(optimizer, [before, after], [warmup]), []
    for _ in range(14):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(**COSINE | {"lr": 0.3, "min_lr": 0.05, "warmup_steps": warmup}) == pytest.approx(theirs)


def test_the_rate_rises_and_then_falls():
    for options in (COSINE, WSD, WSD | {"decay_steps": 10}):
        found = rates(**options)
        first = options["warmup_steps"]
        assert found[0] > 0 and all(a < b for a, b in pairwise(found[: first + 1]))
        assert all(a >= b for a, b in pairwise(found[first:])) and found[-1] > options["min_lr"]


SMALL = {"seq_len": 8, "batch_size": 1, "max_steps": 6}
CHANGING = {"lr": 1e-2, "lr_schedule": "cosine", "warmup_steps": 2, "min_lr": 1e-3, "weight_decay": 0.3}


def quick():
    meters.TRACED_STEPS = range(0)
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], hidden_size=32, intermediate_size=96)


@pytest.fixture
def watched(monkeypatch):
    """(learning rate, weight decay of each parameter group) of every step that gpt_fsdp.py trains."""
    found, real = [], gpt_fsdp.train_step

    def train_step(model, optimizer, *about):
        found.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])
        return real(model, optimizer, *about)

    monkeypatch.setattr(gpt_fsdp, "train_step", train_step)
    monkeypatch.setattr(meters, "TRACED_STEPS", range(0))
    return found


def test_a_resumed_run_continues_the_schedule(watched, world_of_one, tmp_path):
    """To the last bit: rates and losses."""
    config = gpt_fsdp.Config(
        strategy="single", checkpoint=str(tmp_path), checkpoint_every=3, resume=True, **SMALL | CHANGING
    )
    whole = gpt_fsdp.train(config, world_of_one)["losses"]
    assert watched == [[(lr_schedule.learning_rate(config, step), 0.3)] for step in range(6)]
    shutil.rmtree(tmp_path / "step-000006")  # as if the run had been interrupted after step 3
    resumed = gpt_fsdp.train(config, world_of_one)
    assert resumed["first_step"] == 3 and resumed["losses"] == whole[3:]
    assert watched[6:] == watched[3:6] and len({rate for ((rate, _),) in watched[:6]}) == 6


def test_a_resumed_run_is_told_what_has_changed(watched, world_of_one, tmp_path, capsys):
    """A decay ends with the run, so that more steps are another schedule; and one group of parameters may become two."""
    common = {"strategy": "single", "checkpoint": str(tmp_path)} | SMALL | CHANGING
    gpt_fsdp.train(gpt_fsdp.Config(**common | {"max_steps": 3}), world_of_one)
    capsys.readouterr()
    again = gpt_fsdp.Config(**common | {"resume": True, "weight_decay": 0.1, "decay_1d": False})
    gpt_fsdp.train(again, world_of_one)
    said = capsys.readouterr().out
    assert "--max-steps was 3 up to step-000003, and is 6 from here on" in said
    assert "--weight-decay was 0.3 up to" in said and "--decay-1d was on up to" in said
    assert watched[3:] == [[(lr_schedule.learning_rate(again, s), wd) for wd in (0.1, 0.0)] for s in (3, 4, 5)]


# ---- weight decay


def decayed_of(model, config):
    """{name: its weight decay} of the trained parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = weight_decay.parameter_groups(model, config)
    return {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_norms_are_not_decayed(strategy, world_of_one):
    config = gpt_fsdp.Config(strategy=strategy, weight_decay=0.3, decay_1d=False)
    model, _ = gpt_fsdp.build(config, world_of_one)
    found = decayed_of(model, config)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert {name for name, decay in found.items() if decay == 0} == {name for name in found if "norm" in name}
    assert set(found.values()) == {0.0, 0.3}
    assert set(decayed_of(model, gpt_fsdp.Config(weight_decay=0.3)).values()) == {0.3}


def test_biases_are_not_decayed_and_frozen_parameters_are_in_no_group():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    model[2].weight.requires_grad = False
    found = decayed_of(model, gpt_fsdp.Config(decay_1d=False))
    assert found == {"0.weight": 0.01, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.bias": 0.0}
    model.requires_grad_(False)[0].weight.requires_grad = True
    assert len(weight_decay.parameter_groups(model, gpt_fsdp.Config(decay_1d=False))) == 1  # no empty group


STEPS, SEQUENCES = 4, 8
TRAINED = {"lr": 2e-2, "lr_schedule": "cosine", "warmup_steps": 2, "min_lr": 2e-3, "weight_decay": 0.5}
SPARED = TRAINED | {"decay_1d": False}
FP64 = {"precision": "fp64"}
DEEPSPEED = SPARED | {"engine": "deepspeed"}
CASES = {
    1: {
        "spared": SPARED | FP64,
        "decayed": TRAINED | FP64,
        "constant": {name: value for name, value in (SPARED | FP64).items() if name not in ("lr_schedule", "min_lr")},
    },
    2: {
        "ddp": SPARED | FP64 | {"strategy": "ddp"},
        "fsdp1, norms decayed": TRAINED | FP64 | {"strategy": "fsdp1"},
        "fsdp2": SPARED | FP64,
        "fsdp2, adamw-for-loop": SPARED | FP64 | {"optimizer": "adamw-for-loop"},
        **{f"zero {stage}": SPARED | FP64 | {"stage": stage} for stage in "0123"},
        **{f"deepspeed {stage}": DEEPSPEED | {"stage": stage} for stage in "0123"},
    },
    4: {
        "fsdp2 and tensor": SPARED | FP64 | {"mesh": "shard=2,tensor=2"},
        "hsdp": SPARED | FP64 | {"mesh": "2x2"},
    },
}


def train_all(me, cases):
    """{case: the losses of its steps, then the validation loss}."""
    quick()
    gpt_fsdp.VALIDATION_SEQUENCES = SEQUENCES
    losses = {}
    for name, case in cases.items():
        lab = gpt_zero if "stage" in case else gpt_fsdp
        parts = me.world_size // (2 if "tensor" in case.get("mesh", "") else 1)
        case = {"max_steps": STEPS, "seq_len": 16, "batch_size": SEQUENCES // parts} | case
        if me.world_size == 1:
            case["strategy"] = "single"
        result = gpt_fsdp.train(lab.Config(**case), me, lab.prepare)
        losses[name] = [*result["losses"], result["validation_loss"]]
    return losses


@pytest.fixture(scope="module")
def losses(selected):
    """{number of ranks: what ``train_all`` found on rank 0}"""
    cases = {n: {name: CASES[n][name] for name in (selected(CASES[n]) if n > 1 else CASES[n])} for n in CASES}
    run = functools.partial(notebook_ranks.on_ranks, by_value(train_all), cluster=HERE, timeout=400)
    return {n: run(some, ranks=n)[0] for n, some in cases.items()}


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 4) for name in CASES[ranks]])
def test_losses_are_those_of_one_process(ranks, name, losses):
    """With a decay and a schedule that show: without either, the losses are others."""
    case = CASES[ranks][name]
    reference = losses[1]["decayed" if case.get("decay_1d", True) else "spared"]
    assert len(reference) == STEPS + 1
    assert losses[ranks][name] == pytest.approx(reference, rel=1e-9 if "precision" in case else 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("other", ["decayed", "constant"])
def test_options_change_the_losses(other, losses):
    """Else the test above would show nothing."""
    assert losses[1][other] != pytest.approx(losses[1]["spared"], rel=1e-4)


# ---- the labs (what does not go together is in bad_input.py)


@pytest.mark.parametrize("lab", [gpt_fsdp, gpt_zero, gpt_pipeline, hf_fsdp], ids=lambda lab: lab.__name__)
def test_every_transformer_lab_has_the_options(lab):
    model = {"config": "a config.json", "max_steps": 20} if lab is hf_fsdp else {}
    options = {"lr_schedule": "wsd", "warmup_steps": 2, "decay_steps": 18, "min_lr": 1e-5, "decay_1d": False}
    assert lab.Config(**model | options).decay_begin == 2
