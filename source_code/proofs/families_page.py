# SPDX-License-Identifier: BSD-3-Clause
"""Write docs/families.md from the record of ``census``: python -m proofs.families_page"""

import json
from collections import defaultdict

import pandas
from labkit.measuring.records import RESULTS
from labkit.running import launch

PAGE = launch.SOURCE.parent / "docs" / "families.md"
# Largest relative differences. Norms, softmax, and routers compute in fp32 in every precision: where rounding flips one of
# their bits, gradients differ by 1e-7.
LOSS = {"fp64": 1e-9, "fp32": 1e-4}
GRADIENT = {"fp64": 1e-5, "fp32": 1e-3}
PEAK = 2e-3
MESHES = ("shard=2", "tensor=2", "shard=2,expert=2", "shard=4", "shard=2,tensor=2", "shard=4,expert=2")
GROUPS = {  # title: the dimensions of the meshes for which the library has plans
    "Mixtures of experts, with plans for tensor and expert parallelism": ("tensor", "expert"),
    "With a plan for tensor parallelism": ("tensor",),
    "With a plan for expert parallelism": ("expert",),
    "FSDP2 only": (),
}
TOP = """# Model families

This page is written by `python -m proofs.families_page`, from [the record]({record}) of a census of {date} with transformers
{version}: {counts}.

`hf_fsdp.py` trains causal language models of Hugging Face's transformers. The census shows with which families that works.
Each is a tiny model with random weights, saved by the library, and trained by `hf_fsdp.py` on 2 and 4 ranks in all ways for
which the library has a plan. FSDP2 needs none: the lab adds units where the library's rules name no blocks.

A run equals one process of the plain library if every parameter and buffer has the same bits after loading, every gradient
of the first step agrees to 1e-5 (1e-3 in fp32), and every loss of three steps to 1e-9 (1e-4 in fp32). The tables show the
largest relative difference of a loss, in float64 where the model runs in it, and else in fp32, marked fp32.

*Plan* says how `plan.py --model FOLDER` plans the memory of a step with FSDP2: by arithmetic, or by simulating the library's
own code. *Peak* is the peak measured on 2 ranks in fp32 over the planned one, minus one: the worse of FSDP2 and tensor
parallelism. With expert parallelism, what a rank receives depends on the data, and peaks are not compared.

To check one family, or your own version of the library: `python -m proofs.census --families qwen3`.
"""
LEFT_OUT = """
## What is left out

The census does not take all causal language models of the library: not the decoders of encoder-decoder models, further
descendants of BERT, and models of images and speech around a language model that is in a table. They may train all the
same. `mllama` is left out as the library does not read what it saves as its language model.
"""


def verdict(found: dict) -> str:
    """Return in a few words how a run went: "equal", or what is wrong.

    Args:
        found: One of the "ways" of ``census.run``.
    """
    if found["error"]:
        kind, _, reason = found["error"].partition(": ")
        return f"refused: {reason}" if kind == "UserError" else found["error"]
    if found["unequal"]:
        return f"loaded otherwise: {found['unequal'][0]}"
    # In a record, NaN and infinity are null.
    gradient, loss = (float("inf") if found[key] is None else found[key] for key in ("gradient", "loss"))
    if not gradient <= GRADIENT[found["precision"]]:
        return f"gradient differs: {found['of']}"
    return "equal" if loss <= LOSS[found["precision"]] else "losses differ"


def failures(row: dict) -> dict[str, str]:
    """Return {mesh: what is wrong} of the runs in which a family differs from one process."""
    words = {mesh: verdict(found) for mesh, found in row.get("ways", {}).items()}
    return {mesh: word for mesh, word in words.items() if word != "equal"}


def peaks(row: dict) -> dict[str, float]:
    """Return {mesh: measured peak over the planned one, minus one} of a family's runs that have both."""
    both = {mesh: found for mesh, found in row.get("ways", {}).items() if found.get("planned") and found.get("peak")}
    return {mesh: found["peak"] / found["planned"] - 1 for mesh, found in both.items()}


def planned(row: dict) -> str:
    """Return how FSDP2's step is planned, see ``peaks.plan``; "" for a family that does not train."""
    return row.get("ways", {}).get("shard=2", {}).get("plan", "")


def counts(rows: list[dict]) -> str:
    """Return how many families and runs there are, and how many are as they shall be."""
    runs = [found for row in rows for found in row.get("ways", {}).values()]
    equal = sum(verdict(found) == "equal" for found in runs)
    refused = sum(verdict(found).startswith("refused") for found in runs)
    return f"{len(rows)} families, {equal} of {len(runs)} runs equal to one process, {refused} refused"


def tables(rows: list[dict]) -> str:
    """Return the census as Markdown: a table for each of ``GROUPS``, and what is not equal, with reasons."""
    parts = []
    for title, planned_for in GROUPS.items():
        members = [row for row in rows if row.get("ways") and _plans(row) == planned_for]
        if members:
            shown = [mesh for mesh in MESHES if any(mesh in row["ways"] for row in members)]
            table = pandas.DataFrame([_line(row, shown) for row in members])
            parts.append(f"## {title}\n\n{table.to_markdown(index=False, disable_numparse=True)}\n")
    return "\n".join([*parts, *_lists(rows)])


def _plans(row: dict) -> tuple[str, ...]:
    return tuple(name for name in ("tensor", "expert") if row[name])


def _line(row: dict, meshes: list[str]) -> dict:
    cells = {mesh: _cell(row["ways"][mesh]) if mesh in row["ways"] else "" for mesh in meshes}
    off = max(peaks(row).values(), key=abs, default=None)
    return {"family": row["family"], "plan": planned(row).partition(":")[0]} | cells | {"peak": _percent(off)}


def _cell(found: dict) -> str:
    word = verdict(found)
    if word == "equal":
        return f"{found['loss']:.0e}".replace("0e+00", "0") + (" fp32" if found["precision"] == "fp32" else "")
    return "refused" if word.startswith("refused") else "**no**"


def _percent(off: float | None) -> str:
    if off is None:
        return ""
    return f"{round(off, 5) + 0:.3%}" if abs(off) <= PEAK else f"**{off:.1%}**"


def _lists(rows: list[dict]) -> list[str]:
    """Return the reasons for all that is refused or differs, each with its families."""
    runs, plans, alone = defaultdict(dict), defaultdict(list), []
    for row in rows:
        for mesh, why in failures(row).items():
            why = why.replace(row["model_type"], "FAMILY").removeprefix("refused: ").removeprefix("--model FOLDER: ")
            runs[why].setdefault(row["family"], []).append(mesh)
        if planned(row).startswith("refused"):
            why = planned(row).removeprefix("refused: ").removeprefix("FOLDER cannot be simulated: ")
            plans[why.replace(row["model_type"], "FAMILY")].append(row["family"])
        if row["error"]:
            alone.append(f"- {row['family']}: {row['error']}")
    parts = ["## Runs that are refused or differ\n"]
    for why, of in runs.items():
        parts.append(f"- {why}: " + ", ".join(f"{family} ({'; '.join(meshes)})" for family, meshes in of.items()))
    parts += ["\n## Plans that are refused\n"] if plans else []
    parts += [f"- {why}: {', '.join(of)}" for why, of in plans.items()]
    return [*parts, *(["\n## What does not train in one process\n", *alone] if alone else [])]


def page() -> str:
    """Return the page of the committed record."""
    (path,) = (RESULTS / "reference").glob("census-*.json")
    record = json.loads(path.read_text())
    about = {"record": f"../{path.relative_to(launch.SOURCE.parent)}", "date": record["date"]}
    top = TOP.format(counts=counts(record["rows"]), version=record["transformers"], **about)
    return f"{top}\n{tables(record['rows'])}\n{LEFT_OUT}"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
