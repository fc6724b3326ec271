# SPDX-License-Identifier: BSD-3-Clause
"""What one books by: whether it fits, the least or the most that does, what it costs; with nothing but Python installed."""

import json
import math
import os
import re
import subprocess
import venv

import plan
import pytest
from labkit.running import launch, options
from planner import gpus, predict
from planner.cli import commands, search
from planner.timing import cost
from proofs import gpu_rows as gpu_proof

EXAMPLES = re.findall(r"^  python plan\.py (.*?)(?:   .*)?$", plan.__doc__, re.MULTILINE)
GIB = 2**30
LONG = "--preset llama3-8b --batch-size 1 --seq-len 8192 --precision bf16 --recompute full"  # how a large model trains


def asked(words: str) -> plan.Config:
    return options.parse(plan.Config, "", f"{LONG} {words}".split())


def found(words: str):
    return json.loads(plan.answer(asked(f"{words} --json")))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python without packages, and a config.json."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False)
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 32, "vocab_size": 32000}))
    return folder


def run_bare(bare, words: str):
    command = [bare / "venv/bin/python", launch.SOURCE / "plan.py", *words.split()]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=bare, env=alone, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", EXAMPLES)
def test_the_examples_need_nothing_but_python(bare, words):
    run = run_bare(bare, words)
    if any(needy in words for needy in ("--simulate", "--plot", ":build")):
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and "install" in run.stderr
    else:
        assert run.returncode == 0 and run.stdout and not run.stderr, run.stderr


@pytest.mark.parametrize(
    "words",
    [
        "--ranks x",
        "--seq-len 0",
        "--config none.json",
        "--mesh 3x3",
        "--gpu tpu",
        "--find ranks --mesh 2x4",
        "--nothing",
    ]
    + ["--preset large", "--link slow"],
)
def test_errors_need_nothing_but_python(bare, words):
    run = run_bare(bare, words)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and "Traceback" not in run.stderr


def test_help_has_examples_of_all_it_answers():
    assert len(EXAMPLES) >= 8
    for word in ("--find", "--sweep", "--config", "--tokens", "--explain", "--plot", "--simulate"):
        assert any(word in line for line in EXAMPLES), word


@pytest.mark.parametrize(
    ("memory", "answer"), [(40.0, "fits"), (34.7, "fits"), (34.5, "tight"), (28.7, "tight"), (28.6, "does not fit")]
)
def test_it_fits_is_tight_or_does_not_fit(memory, answer):
    """Of 27.05 GiB planned: with 1.6 outside of PyTorch 28.65, and with the reserve 34.60."""
    memory_ = found(f"--ranks 8 --gpu-memory {memory}")["memory"]
    assert memory_["answer"] == answer
    assert memory_["least"] == pytest.approx(27.05 + 1.6, abs=0.01)
    assert memory_["needs"] == pytest.approx(27.05 * 1.22 + 1.6, abs=0.01)
    text = plan.answer(asked(f"--ranks 8 --gpu-memory {memory}"))
    assert f"\n{answer} in {memory:g} GiB: " in text and text.index(answer) < text.index("peak of a rank")


def test_one_rank_has_no_buffers_to_communicate():
    assert gpus.outside(1) == gpus.CONTEXT < gpus.outside(2)


def test_a_measured_reserve_takes_the_place_of_the_published(tmp_path):
    rows = [{"what": "reserved over the plan", "measured": factor} for factor in (1.08, 1.13)]
    (tmp_path / "nvidia-h100-80gb-hbm3-1-gpu" / "rows").mkdir(parents=True)
    (tmp_path / "nvidia-h100-80gb-hbm3-1-gpu" / "rows" / "planner.json").write_text(json.dumps(rows))
    assert gpus.reserve("h100", tmp_path) == (1.13, "measured: nvidia-h100-80gb-hbm3-1-gpu")
    assert gpus.reserve("a100", tmp_path)[0] == gpus.RESERVE[1]


NAMES = {  # as torch.cuda.get_device_name has them
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": None,
    "NVIDIA H100 NVL": None,
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": None,
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "AMD EPYC, 2 cores": None,
}


def test_every_gpu_has_a_name():
    assert set(gpus.GPUS) == {*NAMES.values()} - {None}


@pytest.mark.parametrize("name", NAMES)
def test_a_measured_reserve_is_of_that_gpu(name, tmp_path):
    folder = tmp_path / gpu_proof.slug(name)
    (folder / "rows").mkdir(parents=True)
    (folder / "rows" / "planner.json").write_text('[{"what": "reserved over the plan", "measured": 9.0}]')
    assert [gpu for gpu in gpus.GPUS if gpus.reserve(gpu, tmp_path)[0] == 9.0] == [NAMES[name]] * bool(NAMES[name])


@pytest.mark.parametrize("what", ["ranks", "batch-size", "seq-len"])
def test_what_is_found_fits_and_its_neighbour_does_not(what):
    words = "--preset llama3-8b --gpu a100-40"
    number = found(f"{words} --find {what}")["found"]
    beyond = number - 1 if what == "ranks" else number + 1
    assert found(f"{words} --{what} {number}")["memory"]["answer"] == "fits"
    assert found(f"{words} --{what} {beyond}")["memory"]["answer"] != "fits"


def test_the_least_ranks_need_not_be_a_power_of_two():
    rows = {row["ranks"]: row["answer"] for row in found("--preset llama3-70b --gpu-memory 80 --find ranks")["rows"]}
    least = min(ranks for ranks, answer in rows.items() if answer == "fits")
    assert math.log2(least) % 1 and rows[least - 1] != "fits"
    assert any(ranks % 8 == 0 for ranks in rows)  # nodes are booked whole


def test_find_says_why_and_shows_the_neighbours():
    text = plan.answer(asked("--preset llama3-70b --gpu-memory 80 --find ranks"))
    head, why, *rest = text.splitlines()
    facts = found("--preset llama3-70b --gpu-memory 80 --find ranks")
    assert head.startswith(f"the least --ranks that fits in 80 GiB: {facts['found']}")
    assert why.startswith(f"({facts['found'] - 1} needs ") and "of 80)" in why
    assert sum(line.endswith(("fits", "tight")) or ": lacks " in line for line in rest) == len(facts["rows"])


def test_where_nothing_fits_it_says_so():
    facts = found("--preset llama3-405b --seq-len 131072 --find ranks")
    assert facts["found"] is None and facts["tight"] is None
    assert plan.answer(asked("--preset llama3-405b --seq-len 131072 --find ranks")).startswith(
        "no number of --ranks fits"
    )


def test_search_finds_the_boundary_wherever_it_is():
    for boundary in (1, 2, 3, 7, 100, 1000, 1023):
        assert search.least(lambda n, b=boundary: 1 / n, 1 / boundary, 5000) == boundary
        assert search.most(lambda n: n * n, boundary**2 + 0.5, 5000) == boundary
        assert search.most(lambda n: float(n), boundary, 1000) == min(boundary, 1000)
    assert search.least(lambda n: 1 / n, 1e-9, 100) is None
    assert search.most(lambda n: float(n), 0.5, 100) is None


def test_the_search_looks_a_little_below():
    """Padding: 13 ranks fit, 14 and 15 do not, 16 and all above do."""
    assert search.least(lambda n: 2.0 if n < 13 or n in (14, 15) else 1.0, 1.0, 1000) == 13


def test_a_straight_line_is_found_in_few_steps():
    tried = []

    def needs(number):
        tried.append(number)
        return 10.0 + 0.001 * number

    assert search.most(needs, 40.0005, 2**24) == 30000
    assert len(set(tried)) < 25


def test_money_is_hours_times_ranks_times_price():
    facts = found("--ranks 8 --tokens 15e9 --price 2.5")
    booked, seconds = facts["booking"], facts["seconds"]
    assert booked["steps"] == 15e9 / (8 * 8192)
    for number, name in enumerate(("overlapped", "serial")):
        hours = booked["steps"] * seconds[name] / 3600
        assert booked["hours"][number] == pytest.approx(hours)
        assert booked["gpu_hours"][number] == pytest.approx(8 * hours)
        assert booked["money"][number] == pytest.approx(2.5 * 8 * hours)
    text = plan.answer(asked("--ranks 8 --tokens 15e9"))
    assert "GPU-hours" in text and "money" not in text


def test_throughput_is_a_range():
    facts = found("--ranks 16 --network 1")
    assert facts["samples_per_second_at_least"] < facts["samples_per_second"]
    assert facts["samples_per_second_at_least"] == pytest.approx(16 * 8192 / facts["seconds"]["serial"])


@pytest.mark.parametrize(
    ("ranks", "how", "published"),
    [(8, "", 5762), (128, "", 5605), (8, "--efficiency 0.39", 6667), (128, "--efficiency 0.39", 6514)],
)
def test_planned_throughput_is_near_the_published(ranks, how, published):
    """torchtitan, December 2024: Llama 3.1 8B, batch 2, every second matmul saved; the last two compiled."""
    words = f"--ranks {ranks} --batch-size 2 --recompute alternate --optimizer adamw-fused {how}"
    ratio = found(words)["samples_per_second"] / ranks / published
    print(f"{ranks} GPUs {how}: planned over published tokens per second {ratio:.3f}")
    assert ratio == pytest.approx(1, abs=0.05)


def test_recomputing_counts_for_the_hardware_and_not_for_the_model():
    shares = {kind: found(f"--ranks 8 --recompute {kind}")["flops_utilisation"] for kind in ("none", "full")}
    for share in shares.values():
        assert share["HFU"] == pytest.approx(cost.EFFICIENCY, rel=0.02)  # --efficiency, where compute is nearly all
    assert shares["full"]["MFU"] < 0.85 * shares["none"]["MFU"]


def test_a_gpu_brings_its_memory_its_peak_and_its_link():
    for name, gpu in gpus.GPUS.items():
        precision = "bf16" if "bf16" in gpu.flops else "fp32"
        chosen = asked(f"--gpu {name} --precision {precision}")
        assert (chosen.memory, chosen.peak_flops, chosen.booked.link) == (gpu.memory, gpu.flops[precision], gpu.link)
    assert asked("--gpu l4 --gpu-memory 20 --flops 1e12").memory == 20
    near, far = (
        found(f"--ranks 8 --gpu {name} --seq-len 512")["seconds"]["communication"] for name in ("a100", "l40s")
    )
    assert far > 3 * near  # PCI Express, not NVLink


def test_what_is_not_modelled_is_said_first():
    for words in ("--ranks 8", "--sweep", "--find batch-size"):
        assert any("not modelled: " in line for line in plan.answer(asked(words)).splitlines()[:4]), words


def test_a_figure_is_drawn(tmp_path):
    file = tmp_path / "plan.svg"
    plan.answer(asked(f"--preset tiny --ranks 4 --seq-len 128 --plot {file}"))
    drawn = file.read_text()
    _, terms = plan.plan_from_options(asked("--preset tiny --ranks 4 --seq-len 128")).peak()
    largest = max(terms, key=terms.get)[1]
    assert largest in drawn and "backward of block 3" in drawn


def test_planning_is_the_same_walked_once_or_twice():
    one = plan.plan_from_options(asked("--ranks 8"))
    assert one.peak() == one.peak() and predict.total(one.peak()[1]) == commands.row_summary(asked("--ranks 8"))["peak"]
