# SPDX-License-Identifier: BSD-3-Clause
"""Draw the pictures of README.md from committed records, and write its tables and those of docs/: python images/readme.py

The records of the first picture are those of three runs on two cores, without their timelines:
torchrun --standalone --nproc-per-node 4 gpt_fsdp.py --device cpu --max-steps 6 --strategy ddp --record …/0-ddp.json,
the same with --strategy fsdp2, and with --strategy fsdp2 --recompute full.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

import course  # noqa: E402
import ladder  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import plan  # noqa: E402
from labkit import UserError  # noqa: E402
from labkit.measuring.trace import CATEGORIES  # noqa: E402
from labkit.running import options  # noqa: E402
from labkit.teaching import plots  # noqa: E402
from labkit.teaching.plots import planner as look_of  # noqa: E402
from planner import gpus, predict  # noqa: E402

RESULTS = ROOT / "source_code" / "results" / "reference"
REFERENCE = RESULTS / "ladder-amd-epyc-2-cores"
TINY = RESULTS / "tiny-intel-xeon-2-cores"
PAGES = [ROOT / "README.md", ROOT / "docs" / "measuring.md", ROOT / "docs" / "instructor.md"]
GIB = 2**30
LLAMA = {"preset": "llama3-8b", "ranks": 8, "batch_size": 1, "seq_len": 4096, "precision": "bf16", "gpu": "h100"}
WAYS = {  # what the first picture shows, of both models
    "DDP": {"strategy": "ddp", "recompute": "none"},
    "FSDP": {"strategy": "fsdp2", "recompute": "none"},
    "FSDP,\nrecomputed": {"strategy": "fsdp2", "recompute": "full"},
}


def planned() -> dict[str, dict]:
    """{way: {category: bytes}} of Llama 3 8B; a GPU's kernels."""
    found = {}
    for way, given in WAYS.items():
        asked = plan.Config(**LLAMA, **given)
        found[way] = predict.by_category(plan.plan_from_options(asked).peak()[1])
    return found


def measured() -> dict[str, dict]:
    """{way: record} of the tiny GPT."""
    return dict(zip(WAYS, [json.loads(path.read_text()) for path in sorted(TINY.glob("*.json"))], strict=True))


def expected(record: dict) -> int:
    """The predicted peak of a record's run, in bytes."""
    return predict.total(predict.plan_of(record).peak()[1])


def first_picture(path: Path):
    """A plan that everybody knows, and the same three ways measured here, each bar in the outline of its prediction."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for place, terms in enumerate(planned().values()):
        start = 0
        for category in [each for each in CATEGORIES if terms.get(each, 0) > 0.002 * sum(terms.values())]:
            width = terms[category] / GIB
            outline = look_of.look("predicted", plots.COLOURS[category])
            left.barh(place, width - 0.6, left=start + 0.3, height=0.62, **outline)  # outlines beside each other
            start += width
        left.text(start + 2.5, place, f"{start:.1f}", va="center")
    room = gpus.GPUS["h100"].memory
    left.axvline(room, color="black", linestyle="--", linewidth=1.3)
    left.text(room + 1.5, 2.42, f"one H100: {room:.1f}", va="center")
    left.set(yticks=range(len(WAYS)), yticklabels=WAYS, ylim=(2.62, -0.5), xlim=(0, 205))
    left.set_xlabel("peak memory per rank [GiB]")
    left.set_title("Llama 3 8B on 8 ranks · 4,096 tokens per rank · bf16\noutlined: predicted", fontsize=11)
    runs = measured()
    plots.memory_bars(right, [(way, run["memory"]["peak"], expected(run)) for way, run in runs.items()])
    under = f"tiny GPT on 4 ranks · {runs['DDP']['hardware']}\nsolid: measured, outlined: predicted"
    right.set_title(under, fontsize=11)
    figure.suptitle("Will it fit? Peak memory, planned and measured\n", x=0.01, ha="left", fontweight="bold")
    plots.category_legend(figure, plots.handles_of(right))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def first_table() -> str:
    """What the first picture shows, in numbers."""
    rows = ["| | Llama 3 8B, predicted | tiny GPT, predicted | tiny GPT, measured |", "|:--|--:|--:|--:|"]
    runs = measured()
    for way, terms in planned().items():
        sizes = expected(runs[way]), sum(runs[way]["memory"]["peak"].values())
        cells = [" ".join(way.split()), f"{sum(terms.values()) / GIB:.1f} GiB", *(f"{size:,} bytes" for size in sizes)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def kept(runs: list[dict]) -> list[dict]:
    """Return the ladder's runs if they hold what README says of them.

    Raises:
        UserError: A rung has learned too little or was not measured as predicted, or the order of the rungs by peak
            memory is another.
    """
    for run in runs:
        accuracy, peak = run["record"]["accuracy"], sum(run["record"]["memory"]["peak"].values())
        if accuracy["correct"] < 0.95 * accuracy["total"]:
            raise UserError(
                f"{run['label']}: {accuracy['correct']} of {accuracy['total']} images are right, below 95 %"
            )
        if peak != run["predicted"]:
            raise UserError(f"{run['label']}: the measured peak, {peak}, is not the predicted one, {run['predicted']}")
    size = {run["label"]: run["predicted"] for run in runs}
    if max(size, key=size.get) != "DDP":
        raise UserError("README says that DDP takes the most memory")
    if min(size, key=size.get) != "FSDP2, by size" or size["FSDP1, by size"] < size["FSDP1, one unit"]:
        raise UserError("README says that FSDP2 by size takes the least memory, and that FSDP1 gains nothing by size")
    return runs


def with_tables(page: str) -> str:
    """A page's text with its tables made from the records and from the notebooks' heads. UserError: see ``kept``."""
    tables = {
        "first": first_table(),
        "memory": ladder.as_markdown(ladder.memory_table(kept(ladder.read(REFERENCE)))),
        "chapters": course.table(),
        **{f"{name} day": course.day(name) for name in course.DAYS},
    }
    for name, table in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    try:
        pages = {path: with_tables(path.read_text()) for path in PAGES}
    except UserError as error:
        options.exit_with_error(str(error))
    first_picture(ROOT / "images" / "will_it_fit.png")
    plots.ladder(ladder.read(REFERENCE), ROOT / "images" / "ladder.png")
    course.course_map().save("course_map")
    for path, page in pages.items():
        path.write_text(page)
