# SPDX-License-Identifier: BSD-3-Clause
"""plan.py as people use it: what it prints. What it refuses is in bad_input.py."""

import json
import re
import sys
from itertools import pairwise

import bad_input
import plan
import pytest
from commands import call, script
from labkit.running import launch, options
from planner import predict
from planner.cli import commands, report
from planner.models import networks
from planner.ops import quantization
from planner.parallel import pinned

ISSUE = "--preset llama3-8b --ranks 8 --strategy fsdp2 --seq-len 8192 --batch-size 1 --precision bf16 --recompute full --gpu-memory 80"
TINY = "--preset tiny --ranks 4 --batch-size 2 --seq-len 64 --precision fp32 --recompute none --device cpu"
LONG = "--preset llama3-8b --batch-size 1 --seq-len 8192 --precision bf16 --recompute full"  # how a large model trains


def asked(words: str) -> plan.Config:
    return options.parse(plan.Config, "", f"{LONG} {words}".split())


def answer(words: str) -> str:
    return plan.answer(asked(words))


def found(words: str) -> dict:
    return json.loads(answer(f"{words} --json"))


def test_the_command_answers():
    run = call(sys.executable, "plan.py", *ISSUE.split(), cwd=launch.SOURCE)
    assert run.returncode == 0 and not run.stderr
    for words in ("8,030,261,248 parameters", "peak of a rank", "at: backward of the loss", "tokens per second"):
        assert words in run.stdout, words
    assert "fits in 80 GiB: 45.40 GiB to spare" in run.stdout
    assert "not yet with a GPU" in run.stdout  # a GPU's kernels: no GPU has run this


def test_a_plan_for_the_cpu_does_not_say_whether_it_fits_a_gpu_unless_asked():
    run = call(sys.executable, "plan.py", "--ranks", "2", "--device", "cpu", cwd=launch.SOURCE)
    assert "0.10 GiB of the CPU's memory, on 2 ranks together" in run.stdout  # twice the peak of a rank
    assert "52.59 MiB" in run.stdout and "fits" not in run.stdout


def test_planning_imports_no_torch():
    program = """
import sys, plan
for changes in ({}, {"sweep": True}, {"explain": True}, {"json": True}):
    plan.answer(plan.Config(**changes))
assert "torch" not in sys.modules
"""
    run = call(sys.executable, "-c", program, cwd=launch.SOURCE, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_page_says_what_was_found():
    page, facts = answer(ISSUE), found(ISSUE)
    for name, size in facts["by_category"].items():
        assert re.search(rf"^  {name} +{re.escape(report.gib(size))}$", page, re.MULTILINE), name
    assert sum(facts["by_category"].values()) == facts["peak"]
    assert sum(facts["persistent"].values()) == pytest.approx(3 * 4 * facts["parameters"] / 8, rel=1e-3)
    assert f"communication {facts['seconds']['communication']:.3g} s" in page
    for c in facts["traffic"]:
        assert f"{c['count']:4} × {c['kind']}" in page


@pytest.mark.parametrize("words", [ISSUE, TINY, "--preset 1b --mesh 2x4"])
def test_explained_terms_add_up_to_the_peak(words):
    planned = plan.plan_from_options(asked(words))
    lines = report.explained(planned).splitlines()
    shown = [(float(number.replace(",", "")), unit) for number, unit in (line.split()[:2] for line in lines)]
    peak = predict.total(planned.peak()[1])
    units = {"GiB": 2**30, "MiB": 2**20}
    rounded = sum(0.006 * units[unit] for _, unit in shown)
    assert sum(n * units[unit] for n, unit in shown) == pytest.approx(peak, abs=rounded)
    small = [line for line in lines if "smaller term" in line]
    terms = re.findall(r"(\d+) smaller terms", "".join(small))
    assert len(lines) - len(small) + sum(map(int, terms)) == len(planned.explain())


def test_explained_numbers_multiply_to_the_terms_size():
    for (_, name), size, text in plan.plan_from_options(asked(ISSUE)).explain():
        factors = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", text)]
        product = 1
        for factor in factors:
            product *= factor
        assert product == size, (name, text)


def test_the_sweep_is_sorted_and_whole():
    rows = found("--preset llama3-70b --ranks 64 --sweep")
    kinds = [commands.ORDER.index(row["answer"]) for row in rows]
    assert kinds == sorted(kinds) and {0, 2} <= set(kinds)
    for kind in (0, 1):
        speeds = [row["samples_per_second"] for row in rows if row["answer"] == commands.ORDER[kind]]
        assert speeds == sorted(speeds, reverse=True)
    lacking = [row["least"] for row in rows if row["answer"] == "does not fit"]
    assert lacking == sorted(lacking)
    kinds = {row["recompute"] for row in rows}
    assert kinds == {"full", "alternate", "any"}  # what keeps more than "alternate" is left out
    assert (
        {*commands.RECOMPUTE_BY_MEMORY} == {*networks.RECOMPUTE} == {r["recompute"] for r in found(f"{TINY} --sweep")}
    )
    for row in rows:
        if row["recompute"] == "any" and "," not in row["strategy"]:  # its state is too much, whatever is recomputed
            alone = found(f"--preset llama3-70b --ranks 64 --strategy {row['strategy']} --recompute none")
            assert row["peak"] == pytest.approx(sum(alone["persistent"].values()), rel=0.01)  # that of the fullest rank
    names = {row["strategy"] for row in rows}
    known = {"ddp", "zero1", "fsdp1", "fsdp2", "fsdp2, HSDP 8x8", "fsdp2, HSDP 2x32"}
    assert known | {f"deepspeed-{stage}" for stage in (0, 2, 3)} <= names
    text = answer("--preset llama3-70b --ranks 64 --sweep")
    assert len(text.splitlines()) == len(rows) + 8
    assert text.count("does not fit:") == len(lacking)


def test_the_sweep_says_why_a_strategy_is_not_planned():
    words = "--preset llama3-70b --ranks 16 --lora 16 --recompute full --recompute-every 2"
    rows = {(row["strategy"], row["recompute"]): row for row in found(f"{words} --sweep")}
    assert rows["deepspeed-3", "any"]["answer"] == "not planned" and "--lora" in rows["deepspeed-3", "any"]["why"]
    assert rows["deepspeed-3", "any"]["place"] is None
    assert rows["fsdp2", "full"]["peak"] == found(words)["peak"]
    lines = answer(f"{words} --sweep").splitlines()
    assert "not planned: --lora is not predicted" in lines[-1] and "not planned" not in lines[5]


@pytest.mark.parametrize(
    "how", ["ddp", "fsdp2", "deepspeed-3", "fsdp2 --reshard-after-forward false", "zero1 --device cpu"]
)
@pytest.mark.parametrize("model", ["tiny", "small --batch-size 1 --seq-len 16", "llama3-8b"])
def test_what_is_left_out_of_the_sweep_keeps_more(how, model):
    words = f"--preset {model} --ranks 8 --strategy {how} --recompute "
    peaks = [found(words + recompute)["peak"] for recompute in commands.RECOMPUTE_BY_MEMORY]
    assert peaks == sorted(peaks)


def test_what_is_equally_fast_shares_a_place():
    rows = [row for row in found("--gpu a100 --ranks 8 --sweep") if row["place"]]
    for one, other in pairwise(rows):
        if one["place"] == other["place"]:
            assert one["answer"] == other["answer"]
            first = next(row for row in rows if row["place"] == one["place"])
            assert other["samples_per_second"] >= (1 - commands.TIE) * first["samples_per_second"]
    assert len({row["place"] for row in rows}) < len(rows)  # some do: fsdp1 and fsdp2 send and compute the same


def test_a_row_of_the_sweep_is_that_plan():
    row = next(row for row in found(f"{TINY} --sweep") if (row["strategy"], row["recompute"]) == ("fsdp2", "full"))
    assert row["peak"] == found(TINY.replace("--recompute none", "--recompute full"))["peak"]


def test_8_bit_adam_keeps_bytes_and_a_number_for_each_block_of_256():
    """Tensors below 4,096 numbers keep their moments in fp32, and both codes have 256 numbers."""
    sizes = quantization.adam_states([10_000, 4_095])
    assert sizes["first moments"] == sizes["second moments"] == 10_000 + 4 * 4_095
    assert sizes["largest of each block"] == 2 * 4 * 40 and sizes["codes"] == 2 * 4 * 256
    assert quantization.adam_states([4_095])["codes"] == 0
    planned, plain = found("--optimizer adamw-8bit"), found("")
    state = planned["by_category"]["optimizer state"] / plain["by_category"]["optimizer state"]
    assert state == pytest.approx((1 + 4 / 256) / 4, rel=1e-3)
    assert plain["peak"] - planned["peak"] == pytest.approx(8 * 8.03e9 / 8 * (1 - state), rel=1e-3)


def test_qloras_weights_take_little_more_than_half_a_byte():
    """And none of them waits for backward in bf16, as autocast's casts do: each is unpacked twice."""
    words = "--ranks 1 --strategy single --lora 16 --recompute none --loss-chunks 8"
    packed, plain = plan.plan_from_options(asked(f"{words} --frozen nf4")), plan.plan_from_options(asked(words))
    matrices = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest = (2 * 128_256 + 65) * 4096 + 32 * 16 * (3 * 4096 + 1024)
    each = 4096 * 4096  # of a weight, in bytes: half a one per number, one per block, four for 256 blocks, and four
    assert quantization.nf4_bytes(each) == each / 2 + each / 64 + 4 * each / 64 / 256 + 4
    assert packed.persistent()["parameters", "parameters"] == pytest.approx(matrices * 4.127 / 8 + 4 * rest, rel=1e-5)
    assert plain.persistent()["parameters", "parameters"] == 4 * (matrices + rest)
    in_bf16 = ("activations", "block: gate.weight in bf16")
    assert in_bf16 in plain.peak()[1] and in_bf16 not in packed.peak()[1]


def test_what_is_offloaded_is_not_on_the_device():
    offloaded, planned = plan.plan_from_options(asked("--cpu-offload")), plan.plan_from_options(asked(""))
    assert offloaded.persistent() == {} and planned.host_memory() == {}
    less = predict.total(planned.peak()[1]) - predict.total(offloaded.peak()[1])
    assert less == pytest.approx(predict.total(planned.persistent()), rel=0.05)
    on_host = predict.by_category({t: size for t, size in offloaded.host_memory().items() if t[1] != pinned.ROUNDING})
    numel = sum(planned.optimizer_numels)
    assert on_host == {
        "parameters": 4 * numel,
        "gradients": 4 * numel,
        "optimizer state": 8 * numel + 4 * len(planned.optimizer_numels),
        "temporary": 4 * numel,
    }


def test_a_slower_network_costs_time_and_no_memory():
    near, far = found("--ranks 16"), found("--ranks 16 --network 1")
    assert far["peak"] == near["peak"]
    assert far["seconds"]["communication"] > 5 * near["seconds"]["communication"]


@pytest.mark.long
@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--strategy fsdp1 --reshard-after-forward false",
        "--precision bf16 --mesh 2x2",
        "--device cuda --precision bf16",
        "--recompute alternate --recompute-every 2 --precision bf16 --weights bf16 --loss-chunks 3 --wrap blocks+embeddings --prefetch 1",
        "--device cuda --lora 4 --recompute alternate --accumulate 2 --sync last",
    ],
)
def test_simulated_beside_predicted(extra):
    run = script("plan.py", *TINY.split(), *extra.split(), "--simulate", "--json")
    facts = json.loads(run.stdout)
    assert facts["simulated"] == pytest.approx(facts["peak"], rel=1e-3)
    assert sum(facts["simulated_by_category"].values()) == facts["simulated"]


@pytest.fixture
def own(tmp_path):
    return bad_input.files(tmp_path)


@pytest.mark.long
def test_a_model_of_ones_own(own):
    run = script("plan.py", "--module", f"{own}/own.py:build", "--ranks", "4", "--device", "cpu")
    assert run.returncode == 0, run.stderr
    parameters = 3 * (96 * 96 + 96)
    assert f"{parameters:,} parameters in 4 units" in run.stdout
    persistent = 3 * 4 * parameters / 4 + 4 * 6
    assert f"predicted, between steps  {report.gib(int(persistent)):>14}" in run.stdout
    words = ("--module", f"{own}/own.py:build", "--ranks", "4", "--device", "cpu")
    facts = json.loads(script("plan.py", *words, "--json").stdout)
    kept = ("parameters", "optimizer state")
    assert sum(facts["simulated_by_category"][name] for name in kept) == persistent


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_experts_inside_blocks_are_counted_once(own, strategy):
    words = ("--module", f"{own}/own.py:experts", "--ranks", "4", "--strategy", strategy, "--device", "cpu")
    run = script("plan.py", *words)
    assert run.returncode == 0, run.stderr
    linear = 8 * 8 + 8  # divides by four ranks: nothing is padded
    parameters = 2 * 5 * linear + linear
    assert f"{parameters:,} parameters in 3 units, {strategy}" in run.stdout
    facts = json.loads(script("plan.py", *words, "--json").stdout)["simulated_by_category"]
    steps = 4 * (22 if strategy == "fsdp2" else 3)  # a counter for each parameter; FSDP1's are one a unit
    assert facts["parameters"] == 4 * parameters / 4
    assert facts["optimizer state"] == 2 * 4 * parameters / 4 + steps


def test_units_are_the_members_of_the_outermost_lists():
    from labkit.training.units import units_of
    from torch import nn

    layers = [nn.Linear(2, 2) for _ in range(5)]
    block = nn.Sequential(layers[0], nn.ModuleList(layers[1:3]))  # a list inside
    grid = nn.ModuleList([nn.ModuleList([layers[3]]), nn.ModuleList([layers[4]])])  # a list of lists
    encoder = nn.ModuleDict({"blocks": nn.ModuleList([block, block]), "grid": grid, "head": nn.Linear(2, 2)})
    assert units_of(encoder) == [block, layers[3], layers[4]]
    assert units_of(nn.ModuleList(layers)) == layers
    assert units_of(layers[0]) == []


def test_a_model_that_cannot_be_simulated_is_one_sentence(own):
    run = script("plan.py", "--module", f"{own}/own.py:broken")
    assert run.returncode == 2 and run.stdout == ""
    assert "own.py:broken cannot be simulated: RuntimeError: " in run.stderr
    assert len(run.stderr.splitlines()) == 1
