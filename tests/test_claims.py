# SPDX-License-Identifier: BSD-3-Clause
"""Claims on trial: verdicts follow from evidence, and each condition holds in sweeps that the notebook does not show."""

from dataclasses import asdict, replace

import course
import pytest
from labkit import UserError
from labkit.measuring.trace import CATEGORIES
from labkit.running.lab_options import LABS
from labkit.teaching.claims import CONTRADICTED, HOLDS, LAWS, NEVER, UNKNOWN, WHEN, Case, Claim, on_trial, trials
from labkit.teaching.claims.sweeps import grid
from planner import predict

from notebooks import PATHS, read

CLAIMS = on_trial()
NAN = float("nan")
MEASURED = {  # as the notebook's trials return it; the last of each is the other side
    "min_num_params": {
        "units": {"MNIST net": (1.0, 320, False), "BatchNorm": (2 / 3, 32, False), "attention": (2 / 3, 128, True)}
    },
    "optimizer step": {"optimizers": {"AdamW": 0, "SGD": 0, "Muon": 71684, "ZeRO-1 with AdamW": 16384}},
    "N shards": {"loading fails": {("DCP", 1): False, ("DCP", 3): False, ("torch.save", 1): True}},
    "OffloadPolicy": {"OffloadPolicy": {"the call": False}},
    "checkpointing option": {"activation_checkpointing": {"the call": False}},
}
FOUND = dict.fromkeys(CLAIMS, WHEN)
FOUND |= {"activations": HOLDS, "130 MB": NEVER, "90 against 80": NEVER}
FOUND |= dict.fromkeys(["OffloadPolicy", "checkpointing option"], NEVER)
MODELS = ("1b", "llama3-8b", "llama3-70b")
WIDE = {  # sizes, ranks, and formats that the notebook does not show
    "1/N": grid(part=("kept", "peak"), ranks=(2, 16, 512, 2048), model=("1b", "llama3-70b"), precision=("fp32", "bf16"))
    + grid(
        part=("peak",), ranks=(2, 8, 16), model=("llama3-70b", "llama3-405b"), tokens=(64, 4096), precision=("bf16",)
    ),
    "4P": grid(
        strategy=("ddp", "fsdp1", "fsdp2"), ranks=(2, 64), model=("1b", "llama3-70b"), precision=("fp32", "bf16")
    )
    + grid(strategy=("fsdp1", "fsdp2"), ranks=(7, 512), model=("tiny", "small")),
    "activations": grid(
        ranks=(2, 16, 4096), model=("1b", "llama3-70b"), precision=("fp32", "bf16"), recompute=("none", "full")
    ),
    "one unit": grid(tokens=(16, 2048, 2**16, 2**22), model=("tiny", "1b"), ranks=(2, 64), optimizer=("adamw", "sgd")),
    "more units": grid(
        tokens=(16, 2048, 2**22),
        model=("1b", "llama3-8b"),
        ranks=(2, 64),
        strategy=("fsdp1", "fsdp2"),
        precision=("fp32",),
    )
    + grid(model=("mnist",), tokens=(1, 8), ranks=(2, 8), strategy=("fsdp1",)),
    "FSDP1 = FSDP2": grid(model=("mnist",), batch=(1, 4, 128, 1024), ranks=(2, 8))
    + grid(model=("1b", "llama3-8b"), batch=(16, 4096, 16384), ranks=(2, 64), precision=("fp32", "bf16"))
    + grid(model=("1b", "llama3-8b"), batch=(64, 16384), ranks=(2, 64), lora=(8,)),
    "bf16": grid(tokens=(16, 256, 8192, 65536), weights=("fp32", "bf16"), model=MODELS, ranks=(2, 256))
    + grid(tokens=(1024,), weights=("fp32",), model=("small", "llama3-8b"), ranks=(64, 1024))
    + grid(tokens=(8192,), weights=("fp32",), model=("llama3-405b",), ranks=(128,)),
    "50 to 80 %": grid(
        layers=(2, 6, 10, 24, 40, 60, 126), recompute=("full", "selective"), tokens=(512, 16384), ranks=(8, 256)
    ),
    "no_sync": grid(tokens=(16, 32768), ranks=(2, 4, 512), model=("1b", "llama3-8b"), recompute=("none", "full"))
    + grid(tokens=(64, 4096), ranks=(2, 4), model=("llama3-70b",))
    + grid(tokens=(16,), ranks=(2,), model=("tiny", "1b"), precision=("fp32",))
    + grid(tokens=(16, 32768), units=("one unit",), ranks=(2, 64), precision=("fp32", "bf16"))
    + grid(tokens=(16, 32768), strategy=("fsdp1",), ranks=(2, 64)),
    "full state dict": grid(
        model=("tiny", "small", "llama-65b"), what=("weights", "weights and moments"), room=("GPU", "host")
    ),
    "130 MB": grid(part=("kept", "peak"), tokens=(16, 8192), recompute=("none", "full"), weights=("fp32", "bf16")),
    "1.5x": grid(
        precision=("fp32", "bf16"),
        reshard=("true", "false"),
        micro_batches=(1, 2, 3, 4),
        backend=("ring", "gloo"),
        model=("1b", "llama3-8b"),
        ranks=(2, 256),
    )
    + grid(precision=("fp32", "bf16"), reshard=("true",), micro_batches=(1, 2), lora=(8,)),
    "4x against 2x": grid(ranks=(2, 8, 32, 512), backend=("ring", "gloo"), model=MODELS, precision=("fp32", "bf16")),
    "ZeRO-1": grid(
        library=("the paper", "PyTorch", "DeepSpeed"), weights=("fp32", "bf16"), model=MODELS, ranks=(2, 16)
    ),
    "SHARD_GRAD_OP": grid(
        what=("parameters between steps", "bytes sent"), micro_batches=(1, 2, 8), model=MODELS, ranks=(2, 64)
    ),
    "HYBRID_SHARD": grid(nodes=(2, 3, 4, 32), precision=("fp32", "bf16"), model=MODELS)
    + grid(nodes=(2, 4, 32), precision=("bf16",), weights=("bf16",), model=MODELS),
    "30 %": grid(
        gigabytes=(10, 75, 800),
        recompute=("full", "selective"),
        model=("1b", "llama3-8b"),
        tokens=(2048, 8192),
        ranks=(64,),
    )
    + grid(gigabytes=(800,), lora=(8,)),
    "offload": grid(tokens=(16, 100, 256, 1700, 6000, 65536), ranks=(2, 8, 64), model=MODELS),
    "larger batches": grid(
        strategy=("DDP", "FSDP", "HSDP", "FSDP on gloo", "tensor"), model=("llama3-8b",), gigabytes=(12.5, 50, 100, 400)
    ),
    "100 GB/s": grid(tokens=(512, 3600, 4900, 9000), model=("1b", "llama3-8b", "llama3-70b")),
    "90 against 80": grid(gigabytes=(10, 40, 60, 120, 160, 300), precision=("fp32", "bf16"), tokens=(4096, 16384)),
    "DDP when it fits": grid(
        gigabytes=(5, 25, 100, 800),
        formats=("fp32/fp32", "bf16/fp32", "bf16/bf16"),
        reshard=("true", "false"),
        tokens=(1024, 4096),
        ranks=(16, 64),
    ),
}
WIDE["twice"] = WIDE["1.5x"]
SWEPT = [key for key, found in FOUND.items() if found == WHEN and key in WIDE]


def evidence_of(key: str) -> list[Case]:
    return CLAIMS[key].cases(MEASURED.get(key))


@pytest.mark.parametrize("key", CLAIMS)
def test_a_verdict_follows_from_its_evidence(key):
    """The same cases with other values are judged otherwise, and one NaN leaves no verdict."""
    claim, cases = CLAIMS[key], evidence_of(key)
    assert claim.verdict(cases) == FOUND[key]
    lowest, highest = claim.range
    inside, outside = max(lowest, min(highest, 1e-3)), highest + 1 if highest < float("inf") else lowest - 1
    for value, expected in ((inside, HOLDS), (outside, NEVER), (NAN, UNKNOWN)):
        assert claim.verdict([case._replace(value=value) for case in cases]) == expected
    assert claim.verdict([*cases[:-1], cases[-1]._replace(value=NAN)]) == UNKNOWN


@pytest.mark.parametrize("key", [key for key, found in FOUND.items() if found == WHEN])
def test_the_sweep_has_cases_on_both_sides_and_a_careless_condition_is_contradicted(key):
    claim, cases = CLAIMS[key], evidence_of(key)
    true, false = claim.boundary(cases)
    assert claim.holds(true) and not claim.holds(false)
    for condition in (lambda **_: True, lambda **_: False):
        assert replace(claim, when=condition).verdict(cases) == CONTRADICTED
    assert replace(claim, when=None).verdict(cases) == CONTRADICTED


@pytest.mark.parametrize("key", WIDE)
def test_a_condition_holds_in_other_sizes_on_other_ranks_and_in_other_formats(key):
    claim = replace(CLAIMS[key], settings=WIDE[key])
    cases = claim.cases()
    wrong = [(case.setting, case.value) for case in cases if claim.stated(case) not in (None, claim.holds(case))]
    assert wrong == []
    if FOUND[key] != WHEN:
        assert claim.verdict(cases) == FOUND[key]
    else:
        careless = replace(claim, when=lambda **_: True)
        assert careless.verdict(cases) == CONTRADICTED, "without its condition, this sweep would not refute it"


def record_of(ranks: int, options: dict) -> tuple[dict, object]:
    """What a run of the notebook would record if it were as planned, and its plan."""
    config = asdict(LABS["gpt_fsdp.py"](batch_size=1, seq_len=64, max_steps=4, **options))
    plan = predict.plan_of({"script": "gpt_fsdp.py", "config": config, "ranks": ranks, "device": "cpu"})
    phases = {phase: predict.by_category(terms) for phase, (_, terms) in plan.timeline().items()}
    start = dict.fromkeys(CATEGORIES, 0) | predict.by_category(plan.persistent())
    timeline = [[phase, *(terms.get(name, 0) for name in CATEGORIES)] for phase, terms in phases.items()]
    memory = {"start": start, "peak_by_rank": [predict.total(plan.peak()[1])] * ranks, "timeline": timeline}
    return {"memory": memory, "traffic": plan.traffic()}, plan


@pytest.fixture(scope="module")
def evidence() -> dict:
    """What the notebook gathers."""
    found = {name: record_of(*run) for name, run in trials.RUNS.items()}
    gathered = {"runs": {name: record for name, (record, _) in found.items()}, "categories": CATEGORIES}
    gathered |= {"plans": {name: plan for name, (_, plan) in found.items()}, "state": {False: 1.25, True: 1.0}}
    for more in MEASURED.values():
        gathered |= more
    return gathered


def test_runs_and_sweeps_agree_on_every_verdict(evidence):
    assert {key: claim.verdict(claim.cases(evidence)) for key, claim in CLAIMS.items()} == FOUND


SWAPPED = {  # a run that does not do what its name says: the claims whose evidence it spoils
    ("FSDP, 4 ranks", "FSDP, kept"): {"1.5x": CONTRADICTED, "twice": CONTRADICTED},
    ("FSDP, 4 ranks", "one process"): {"1/N": CONTRADICTED},
    ("one process", "FSDP, 4 ranks"): {"1/N": CONTRADICTED},
}


@pytest.mark.parametrize("swap", SWAPPED)
def test_a_run_that_does_something_else_changes_the_verdict(swap, evidence):
    name, other = swap
    spoiled = evidence | {"runs": evidence["runs"] | {name: evidence["runs"][other]}}
    for key, expected in SWAPPED[swap].items():
        assert CLAIMS[key].verdict(CLAIMS[key].cases(spoiled)) == expected


def test_trials_that_end_otherwise_change_the_verdict(evidence):
    others = {
        "4P": {"state": {False: 1.0, True: 1.0}},
        "min_num_params": {"units": {"MNIST net": (0.5, 320, False)}},
        "optimizer step": {"optimizers": {"AdamW": 1, "SGD": 0, "Muon": 1}},
        "N shards": {"loading fails": {("DCP", 1): True, ("torch.save", 1): True}},
        "OffloadPolicy": {"OffloadPolicy": {"the call": True}},
        "checkpointing option": {"activation_checkpointing": {"the call": True}},
    }
    for key, other in others.items():
        assert CLAIMS[key].verdict(CLAIMS[key].cases(evidence | other)) != FOUND[key], key


def test_a_condition_says_something():
    """Of most cases: one that says nothing about any could not be contradicted."""
    for key in SWEPT:
        said = [CLAIMS[key].when(**setting) is not None for setting in CLAIMS[key].settings]
        assert sum(said) >= 0.7 * len(said), key


def test_every_claim_is_one_line_with_a_kind_of_source_and_a_chapter():
    chapters = {path.stem[:2] for path in PATHS}
    for key, claim in CLAIMS.items():
        assert "\n" not in claim.quote and len(claim.quote) < 90, key
        assert claim.source in ("documentation", "blog", "course", "paper"), key
        assert claim.chapter in chapters, key
        assert claim.settings or key in MEASURED, key


def test_a_chapter_says_what_the_verdict_says():
    """The words of the course's map and of the verdict have one source, and the chapter's claim box has the sentence."""
    for number, law in LAWS.items():
        assert course.LAWS[number].startswith(law)
        assert [key for key, claim in CLAIMS.items() if claim.condition.endswith(law)], number
    (box,) = (read(path).cells[0].source for path in PATHS if path.stem.startswith("18"))
    assert CLAIMS["optimizer step"].quote.removeprefix("There is ").rstrip(".") in box


def test_without_evidence_nothing_is_judged():
    with pytest.raises(UserError, match="run the cells above"):
        CLAIMS["N shards"].verdict(CLAIMS["N shards"].cases())


def test_a_condition_may_say_nothing_of_a_case():
    claim = Claim("q", "blog", "00", "", (0, 1), "", when=lambda x: None if x == 2 else x > 2)
    assert claim.verdict([Case({"x": 1}, 2), Case({"x": 2}, 1), Case({"x": 3}, 1)]) == WHEN
    assert claim.verdict([Case({"x": 1}, 1), Case({"x": 2}, 2), Case({"x": 3}, 1)]) == CONTRADICTED
