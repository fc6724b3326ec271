# SPDX-License-Identifier: BSD-3-Clause
"""Every number that a page for readers states comes from a record, from code, or from a source that is named here.

Pages that a proof or images/readme.py writes are compared as a whole, and so are the tables within others. Of the rest
``SOURCES`` has each number with its words, and what it is computed from, or why it needs nothing. What is quoted from a
command line is judged where such lines are run; names (a version, a chapter, a GPU) are no numbers.
"""

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from importlib import metadata

import course
import pytest
import readme
import test_gpu_plan
import test_one_rank
import torch
from conftest import SOURCE
from labkit.exam.verdicts import TOLERANCE
from labkit.measuring.differences import largest_difference
from labkit.running import gpus
from labkit.running.lab import Lab
from labkit.training import datasets, jax_world, ownership
from packaging.requirements import Requirement
from planner.gpus import GPUS
from proofs import (
    data_start,
    diagnosis,
    families_page,
    gpu,
    gpu_page,
    knobs_page,
    loading,
    long_sequences,
    parity,
    published,
    step_time,
)
from torch.distributed.constants import default_pg_nccl_timeout

from notebooks import PATHS, read

ROOT = SOURCE.parent
RECORDS = SOURCE / "results" / "reference"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "planner_form.html"]
PAGES += [ROOT / "notebooks" / "glossary.md", SOURCE / "proofs" / "README.md"]
PAGES = {str(path.relative_to(ROOT)): path for path in PAGES}

WORDS = dict(zip("one two three four five six seven eight nine ten".split(), range(1, 11), strict=True))
UNIT = r"(?:seconds?|minutes?|hours?|days?|evenings?|GB|MB|GiB|MiB|%)"
NUMBER = re.compile(
    rf"(?<![\w.,-])\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?|\b(?:{'|'.join(WORDS)})\b(?=(?: to \w+)?[ -]{UNIT}\b)"
)
CODE = re.compile(r"^( *```).*?^ *```|`[^`\n]*`|<code>.*?</code>", re.S | re.M)
COMMENT = re.compile(r"#\s.*$", re.M)  # of a line of code: prose
PRODUCTS = "Python|older than|PyTorch|torch|CUDA|NCCL|JAX|DeepSpeed|transformers|peft|CC BY|BSD|issue"
NO_NUMBER = [
    r"<!-- table: .*?<!-- end -->",  # written by images/readme.py
    r"\[\d\d\]\([^)]*\)|\]\([^)\s]*\)|https?://[^\s<)]+|<\w[^>]*>",
    r"\d\d · |(?:[Cc]hapters?|[Nn]otebooks?)\s\d\d(?:(?:, | and |, and | to )\d\d)*",
    r"\d{4}-\d\d-\d\d|^## \d\.\d|^\d\. |exit code \d+|rank 0|number from 0|\b1F1B\b",
    rf"(?:{PRODUCTS})\s+\d[\d.]*(?:\+\w+)?(?:-Clause)?(?: and \d\.\d+)?|Llama 3(?: \d+B)?",
]
NO_NUMBER = re.compile("|".join(f"(?:{each})" for each in NO_NUMBER), re.S | re.M)


def blank(found: re.Match) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def prose(text: str) -> str:
    """Return a page's text, as long as it was, with blanks for code and for what is no number."""

    def comments(found: re.Match) -> str:
        kept = [range(*each.span()) for each in COMMENT.finditer(found[0])] if found[1] else []
        return "".join(c if c == "\n" or any(i in k for k in kept) else " " for i, c in enumerate(found[0]))

    return NO_NUMBER.sub(blank, CODE.sub(comments, text))


def numbers(text: str) -> list[float]:
    """Return the numbers of a text, in order."""
    return [float(WORDS.get(found, None) or found.replace(",", "")) for found in NUMBER.findall(prose(text))]


def places(phrase: str, text: str) -> list[re.Match]:
    """Return where a phrase stands in a text, whose lines may be broken elsewhere."""
    return [*re.finditer(r"\s+".join(map(re.escape, phrase.split())), text)]


@cache
def record(name: str) -> dict:
    (path,) = RECORDS.glob(f"{name}*.json")
    return json.loads(path.read_text())


def rows(name: str) -> list[dict]:
    return record(name)["rows"]


def within(limit: float, name: str) -> float:
    """Return the limit if no row of a record differs by more, else the largest difference."""
    found = [row["difference"] for row in rows(name)]
    largest = largest_difference(found, [0.0] * len(found))
    return 100 * limit if largest <= limit else 100 * largest


def shorter_within(limit: float, name: str) -> float:
    """Return ``within``, if no prediction of the record is longer than what was measured."""
    assert all(row["difference"] < 0 for row in rows(name))
    return within(limit, name)


def minutes_of_the_ladder() -> float:
    """Return the minutes from the beginning of make run's first recorded run to the end of its last."""
    runs = [json.loads(path.read_text()) for path in sorted(readme.REFERENCE.glob("*.json"))]
    begin = re.search(r"runs/(\d{8}-\d{6})", runs[0]["command"])[1]
    seconds = datetime.fromisoformat(runs[-1]["date"]) - datetime.strptime(begin + "+0000", "%Y%m%d-%H%M%S%z")
    return round(seconds.total_seconds() / 60, 1)


@cache
def installed_gb() -> int:
    """Return the whole GB of the files of the packages that requirements.txt needs."""
    lines = [line.partition("#")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()]
    todo, sizes = [Requirement(line) for line in lines if line], {}
    while todo:
        needed = todo.pop()
        if (needed.marker and not needed.marker.evaluate({"extra": ""})) or needed.name in sizes:
            continue
        found = metadata.distribution(needed.name)
        sizes[needed.name] = sum(file.size or 0 for file in found.files)
        todo += [Requirement(each) for each in found.requires or ()]
    return int(sum(sizes.values()) / 1e9)


def signal_minutes() -> set[float]:
    found = [re.findall(r"--signal=USR1@(\d+)", path.read_text()) for path in SOURCE.glob("slurm/*.sbatch")]
    return {int(seconds) / 60 for each in found for seconds in each}


def faults_of_chapter_16() -> int:
    (chapter,) = [path for path in PATHS if path.name.startswith("16_")]
    return int(re.search(r"each of the (\d+) faults", read(chapter).cells[0].source)[1])


def digits() -> tuple[int, int]:
    """Return the numbers of digits of mnist-5k, (for training, for the test)."""
    data = datasets.load("mnist-5k", None)
    return len(data.train_images), len(data.test_images)


def of_the_load(stored: str, ranks: int, way: Callable, key: str) -> int:
    (way,) = [name for name, function in loading.WAYS.items() if function is way]
    (row,) = [row for row in rows("loading") if (row["stored"], row["ranks"], row["way"]) == (stored, ranks, way)]
    return int(loading._mib(loading._largest(row, key)))


def neighbors() -> list[int]:
    """Return the least and the most MiB that a rank reads beyond its part of the file, in the ways that read that part."""
    found = []
    for row in rows("loading"):
        read, part = loading._largest(row, "read"), row["file"] / row["ranks"]
        if part <= read < row["file"]:  # not nothing yet, and not the whole file
            found.append(round((read - part) / loading.MIB))
    return [min(found), max(found)]


def more_in_use() -> list[int]:
    """Return by how many MiB at least and at most the library's shards of an fp32 file take more in use than other ways."""
    used = {}
    for row in rows("loading"):
        if row["stored"] == "fp32":
            used[row["ranks"], row["way"]] = loading._largest(row, "in use")
    (library,) = [name for name, function in loading.WAYS.items() if function is loading.by_the_library]
    found = [used[ranks, library] - size for (ranks, way), size in used.items() if way != library]
    return [round(size / loading.MIB) for size in (min(found), max(found))]


def minutes_of(number: str) -> tuple[int, int]:
    (chapter,) = [each for each in course.chapters() if each.number == number]
    return chapter.minutes, chapter.exercises


def limits_of_chapter_14() -> list[float]:
    """Return the limits, in percent, of its verdicts on temporary memory."""
    (chapter,) = [path for path in PATHS if path.name.startswith("14_")]
    found = re.findall(r"temporary memory of a device: [^;]*; limit ([\d.]+)%", chapter.read_text())
    return [*{float(each) for each in found}]


def ranks_of(*words: str) -> list[int]:
    """Return the fewest and the most ranks of listed configurations that have one of the words."""
    listed = [row for row in rows("memory-listed") if any(word in row["script"] + str(row["config"]) for word in words)]
    found = {row["ranks"] for row in listed} - {1}
    return [min(found), max(found)]


def ranks_in(name: str) -> list[int]:
    return sorted({row["ranks"] for row in rows(name)})


def ranks_of_the_census() -> list[int]:
    meshes = {mesh for row in rows("census") for mesh in row["ways"]}
    # The expert groups are among the ranks that shard.
    sizes = [re.findall(r"(?:shard|tensor)=(\d)", mesh) for mesh in meshes]
    return sorted({math.prod(map(int, each)) for each in sizes})


def as_real_ranks() -> list[int]:
    """Return the worlds in which a test compares one rank with real ones."""
    marks = test_one_rank.test_peaks_and_traffic_are_those_of_real_ranks.pytestmark
    return [ranks for ranks, _ in next(mark.args[1] for mark in marks if mark.name == "parametrize")]


RATES = sorted({int(row["rate"].removesuffix("mbit")) for row in rows("step-time")})
START = rows("data-start")[0]
EXAMPLE = "an example of an option, which the same sentence has"
COMMAND = "a part of a command"
BUFFER = "PyTorch: TORCH_FR_BUFFER_SIZE, in its documentation of the flight recorder"
FAULT_AROUND = "Linux maps 64 KiB around a fault, in pages of 4 KiB: fault_around_bytes in mm/memory.c"
RESOLVER = "resolv.conf(5), which the page links"
UNITS = "a definition"
RULE = "a rule for contributors: nothing is said to be so"
COUNTED = "tests/test_chapter_07.py counts them"

SOURCES: dict[str, dict[str, str | Callable[[], list]]] = {
    "README.md": {
        "predicted for Llama 3 8B on 8 ranks": lambda: [readme.LLAMA["ranks"]],
        "8 ranks with one sequence of 4,096 tokens each": lambda: [readme.LLAMA["ranks"], readme.LLAMA["seq_len"]],
        "a tiny GPT on 4 ranks": lambda: [*{run["ranks"] for run in readme.measured().values()}],
        "an H100 sold as 80 GB": lambda: [int(re.search(r"(\d+)gb", GPUS["h100"].named)[1])],
        "more than 5 GB on disk": lambda: [installed_gb()],
        "on two CPU cores, in 2.7 minutes": lambda: [minutes_of_the_ladder()],
        "4,000 digits": lambda: [digits()[0]],
        "the whole workflow in one hour": lambda: [round(sum(minutes_of("00")) / 60)],
    },
    "CONTRIBUTING.md": {
        "allows 120 minutes": lambda: numbers(
            (ROOT / ".github/workflows/ci.yml").read_text().partition("timeout-minutes:")[2].splitlines()[0]
        ),
        "At most 90 s under nbval": RULE,
    },
    "docs/cluster.md": {
        "more than 5 GB in .venv": lambda: [installed_gb()],
        "ranks of a run (default: 4)": lambda: [Lab().ranks],
        "`USR1` two minutes before": lambda: [*signal_minutes()],
        "fit into the two minutes": lambda: [*signal_minutes()],
        "a driver of 580 or newer": lambda: [gpus.OLDEST_DRIVER[13]],
        "Drivers from 525 on": lambda: [gpus.OLDEST_DRIVER[12]],
        "ssh -L 8888:localhost:8888": COMMAND,
        "one every 10,000 steps": EXAMPLE,
        "the last 2,000 calls": BUFFER,
        "by default after ten minutes": lambda: [default_pg_nccl_timeout.total_seconds() / 60],
        "14 faults and a drill": lambda: [faults_of_chapter_16()],
    },
    "docs/loading.md": {
        "2 cores, with torch": lambda: numbers(record("loading")["hardware"]),
        "A model, on 2 and 4 ranks": lambda: sorted({row["ranks"] for row in rows("loading")}),
        "A Llama of 42.5 million parameters": lambda: [round(rows("loading")[0]["model"] / 4e6, 1)],
        "up to 16 pages of 4 KiB at once": FAULT_AROUND,
        "so 3 to 8 MiB are more": neighbors,
        "On 4 ranks its peak is 244 MiB for a shard of 41": lambda: [
            4,
            *(of_the_load("bf16", 4, loading.cast_then_shard, key) for key in ("peak", "shard")),
        ],
        "and 3 to 8 MiB of neighboring pages": neighbors,
        "finds 162 MiB for a shard of 41": lambda: [
            of_the_load("fp32", 4, loading.by_the_library, key) for key in ("storage", "shard")
        ],
        "then has 7 to 10 MiB more than": more_in_use,
        "## 300 MB of text, on 4 ranks": lambda: [round(START["text"] / 1e6), data_start.RANKS],
        "a byte-level BPE of 32,000 tokens": lambda: [data_start.VOCABULARY],
        "| text | 300 MB |": lambda: [round(START["text"] / 1e6)],
        "| tokens | 90,488,693, in a file of 181 MB |": lambda: [
            START["by rank"][0]["tokens"],
            round(START["by rank"][0]["file"] / 1e6),
        ],
        "the first time | 137 s |": lambda: [round(START["first"])],
        "the second time | 7.3 s |": lambda: [round(START["second"], 1)],
        "all read | 181, 181, 181, 181 MB |": lambda: [round(each["resident"] / 1e6) for each in START["by rank"]],
        "of all 4 ranks together | 181 MB |": lambda: [
            data_start.RANKS,
            round(sum(each["proportional"] for each in START["by rank"]) / 1e6),
        ],
    },
    "docs/measuring.md": {
        "MiB (1024²), traffic in MB (1000²)": UNITS,
        "its 10th and 90th percentile": lambda: [
            int(key[1:])
            for key in json.loads(next(readme.REFERENCE.glob("0*")).read_text())["time"]["step"]
            if key[0] == "p"
        ],
    },
    "docs/one_gpu.md": {
        "parts of at most eight minutes": lambda: [gpu.SECONDS / 60],
        "5,000 real MNIST digits": lambda: [sum(digits())],
        "(4,000 for training, 1,000 for the test)": lambda: [*digits()],
    },
    "docs/source.md": {
        "saving and resuming in 30 lines": COUNTED,
        "hold and compute as one of 64": EXAMPLE,
    },
    "docs/instructor.md": {
        'bsub -Is -n 16 -R "span[hosts=1]" -gpu "num=4" -W 2:00': COMMAND,
        "a step's traffic within 5 %": lambda: [100 * TOLERANCE],
    },
    "docs/troubleshooting.md": {
        "starting ranks takes five seconds more": RESOLVER,
        "waits five seconds": RESOLVER,
        "on another node, wait two minutes": lambda: [ownership.STALE_SECONDS / 60],
    },
    "docs/what_ran_where.md": {
        "a shaped network, 100 Mbit/s and up": lambda: RATES[:1],
        "more than 50 configurations, equal to the byte": lambda: [50] if len(test_gpu_plan.TRIED) > 50 else [],
        "as 2, 4 and 64 ranks | as 2 and 4, peaks": lambda: [*as_real_ranks(), 64, *as_real_ranks()],
        "tensor and pipeline parallelism; gloo | CPU, 2 to 4 ranks": lambda: ranks_of("zero", "pipeline", "tensor"),
        "peft 0.21; gloo | CPU, 2 and 4 ranks": ranks_of_the_census,
        "CPU, 8 virtual devices": lambda: [jax_world.VIRTUAL],
        "temporary memory to 15 %": limits_of_chapter_14,
        "parallelism in `gpt_fsdp.py`; gloo | CPU, 2 to 4 ranks": lambda: ranks_of("expert", "context"),
        "with what 1 to 4 ranks measure to within 0.001 %": lambda: [
            min(ranks_in("memory-listed")),
            max(ranks_in("memory-listed")),
            within(1e-5, "memory-listed"),
        ],
        "and to within 0.01 % in": lambda: [within(1e-4, "memory-drawn")],
        "shapes on up to 1,024 ranks": lambda: [max(ranks_in("memory-simulated"))],
        "shorter than the measured medians by at most 14 %": lambda: [shorter_within(0.14, "step-time")],
        "at 100, 200 and 400 Mbit/s": lambda: RATES,
    },
    "notebooks/glossary.md": {
        "a number in 2 bytes": lambda: [torch.bfloat16.itemsize],
        "singular values of a matrix near 1": UNITS,
    },
    "source_code/proofs/README.md": {
        "within 0.001 % of the measured peak on 1 to 4 ranks": lambda: [
            within(1e-5, "memory-listed"),
            min(ranks_in("memory-listed")),
            max(ranks_in("memory-listed")),
        ],
        "the same, within 0.01 %, for": lambda: [within(1e-4, "memory-drawn")],
        "shapes on up to 1,024 ranks": lambda: [max(ranks_in("memory-simulated"))],
        "are within 15 % of the measured medians": lambda: [within(step_time.WITHIN, "step-time")],
        "faster than gathering on 2 and 4 ranks": lambda: ranks_in("muon-link"),
        "to 1e-9 in float64 and 1e-5 in fp32": lambda: [*parity.TOLERANCE.values()],
        "all variants, 20 steps": lambda: [record("parity")["steps"]],
        "families on 2 and 4 ranks": ranks_of_the_census,
        "planned within 0.2 % of its measured peak": lambda: [100 * families_page.PEAK],
        "loading a model on 2 and 4 ranks": lambda: ranks_in("loading"),
        "measured on 2 to 4 ranks, to the byte": lambda: [min(ranks_in("knobs")), max(ranks_in("knobs"))],
        "starts on 300 MB of text on 4 ranks in at most 30 s": lambda: [
            round(START["text"] / 1e6),
            data_start.RANKS,
            max(30, START["second"]),
        ],
        "[300 MB]": lambda: [round(START["text"] / 1e6)],
        "[60 trials]": lambda: [len(rows("crash"))],
        "killed 60 times, 30 of them during a save": lambda: [
            len(rows("recipe")),
            sum(row["phase"] == "saving" for row in rows("recipe")),
        ],
        "[60 kills]": lambda: [len(rows("recipe"))],
        "drawn at random on 4 ranks and on a mesh of 2 x 2": lambda: [diagnosis.WORLD, 2, diagnosis.WORLD // 2],
        "[240 draws]": lambda: [len(rows("diagnosis"))],
        "Llama 3 405B on 131,072 tokens": lambda: [long_sequences.Config().seq_len],
    },
}
WHOLE = {  # pages that a proof writes: {page: what it writes now}
    "docs/families.md": families_page.page,
    "docs/gpu_hour.md": gpu_page.page,
    "docs/knobs.md": knobs_page.page,
    "docs/published.md": lambda: published.page(rows("published-memory")),
    "docs/planner.md": None,  # question by question: tests/test_planner_page.py
}


def text_of(page: str) -> str:
    text = PAGES[page].read_text()
    return text.replace(loading.tables(rows("loading")), "") if page == "docs/loading.md" else text


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WHOLE])
def test_every_number_has_a_source(page):
    text = text_of(page)
    left = prose(text)
    for phrase in SOURCES.get(page, ()):
        for found in places(phrase, text):
            left = left[: found.start()] + blank(found) + left[found.end() :]
    lines = {left.count("\n", 0, found.start()) for found in NUMBER.finditer(left)}
    assert [text.splitlines()[line] for line in sorted(lines)] == []


LISTED = [(page, phrase) for page, phrases in SOURCES.items() for phrase in phrases]


@pytest.mark.parametrize(("page", "phrase"), LISTED, ids=[phrase for _, phrase in LISTED])
def test_a_number_is_what_its_source_says(page, phrase):
    source = SOURCES[page][phrase]
    assert places(phrase, text_of(page)), "the page does not say so any more"
    assert isinstance(source, str) or numbers(phrase) == pytest.approx([*source()])


@pytest.mark.parametrize("page", [page for page, written in WHOLE.items() if written])
def test_a_page_that_a_proof_writes_is_what_it_writes_now(page):
    assert PAGES[page].read_text() == WHOLE[page]()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("at most eight minutes; two to three hours", [8, 2, 3]),
        ("1,024 ranks, 1e-5, 14 %, or three and 7 GB, in 2.5 minutes.", [1024, 1e-5, 14, 7, 2.5]),
        ("```\nrun 4  # 5 GB\n```", [5]),
        ("Python 3.11, chapter 07, FSDP2, `--ranks 8`, [05](05_x.ipynb), 2026-11-27, Llama 3 8B", []),
    ],
)
def test_numbers_are_found(text, found):
    assert numbers(text) == found
