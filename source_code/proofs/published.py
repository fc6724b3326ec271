# SPDX-License-Identifier: BSD-3-Clause
"""Compare the planner with memory figures that others have published: samples/published_memory.json has them all.

  python -m proofs.published --record ../source_code/results/reference/published-memory.json --page ../docs/published.md

Each figure goes to plan.py, with the options of the run that it is from. What the source does not state is assumed, and the
page says so. A model that arithmetic does not cover is simulated by plan.py, which takes a minute each.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, plan_options, ranks
from labkit.running.options import Options, arguments, option, parse
from planner.cli.commands import describe, plan_from_options
from planner.gpus import GIB
from tqdm import tqdm

SAMPLES = launch.SOURCE / "samples"
FILE = SAMPLES / "published_memory.json"
# {kind of figure: what it is compared with, in GiB, from a plan as ``planned`` returns it}
SIZES = {
    "allocated": lambda plan: plan["allocated"],
    "reserved": lambda plan: plan["reserved"],
    "parameters": lambda plan: plan["parameters"],
    "parameters of all ranks": lambda plan: plan["parameters"] * plan["ranks"],
}
# {kind: {the plan's answer: whether both say the same}}. "tight" can be either.
OUTCOMES = {
    "runs": {"fits": "agrees", "tight": "open", "does not fit": "**disagrees**"},
    "out of memory": {"fits": "**disagrees**", "tight": "open", "does not fit": "agrees"},
}
OUTCOMES["allocated when it failed"] = OUTCOMES["out of memory"]
INTRO = """# Published memory figures next to the plan

Every figure that we know of and can attribute, also where the plan is far off or has no answer. `python -m proofs.published`
writes this page; the plan's side of it is computed, by `plan.py` with the options shown, where --config is a model
of samples/published.json or samples/published_memory.json. Options in *italics* are assumed:
the source does not state them, or they stand for what the planner does not have.

A figure of *allocated* or *active* memory is compared with the plan's peak, a figure of *reserved* memory with the peak times
the planner's factor for the allocator ({factor}). The ratio is planned over published. "GB" is taken as 2^30 bytes, which is
what PyTorch's users mostly print; where it is 10^9, the ratio is {decimal:.0%} of the one shown. *Open*: the plan is "tight",
it fits only if the allocator reserves nothing beyond it.
[Chapter 11](../notebooks/11_plan_before_you_train.ipynb) has torchtitan's benchmarks.
"""


def sources() -> list[dict]:
    """Return the sources of all figures: {"source", "url", "date", "about", "figures": [{"published", …}, …]}."""
    return json.loads(FILE.read_text())["sources"]


def t5_3b():
    """Return T5-3B as ``plan.py --module`` takes it: 4 inputs of 512 tokens and targets of 150, which is a guess."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    settings = json.loads(FILE.read_text())["models"]["t5-3b"]
    model = T5ForConditionalGeneration(T5Config(**settings))
    inputs = torch.zeros(4, 512, dtype=torch.long), torch.zeros(4, 150, dtype=torch.long)
    return model, inputs, lambda model, tokens, labels: model(input_ids=tokens, labels=labels, use_cache=False).loss


def planned(figure: dict) -> dict:
    """Plan the run that a figure is from.

    Returns:
        {"answer", "allocated", "reserved", "parameters": GiB of a rank, "ranks", "factor": of the allocator, "how":
        "arithmetic" or "simulation"}; of a simulation, "parameters" is None. Or {"refused": the planner's sentence}.
    """
    with tempfile.TemporaryDirectory() as folder:
        chosen, path = dict(figure["options"]), Path(folder) / "config.json"
        if "model" in figure:
            path.write_text(json.dumps(settings_of(figure["model"])))
            chosen["config"] = str(path)
        try:
            options = plan_options.Config(**chosen)
            found = _simulated(chosen) if options.simulates else describe(options, plan_from_options(options))
        except UserError as error:
            return {"refused": str(error).replace(str(path), figure.get("model", ""))}
    size = found["simulated" if options.simulates else "peak"] / GIB
    return {
        "answer": found["memory"]["answer"],
        "allocated": size,
        "reserved": size * found["memory"]["reserve"],
        "parameters": None if options.simulates else found["by_category"].get("parameters", 0) / GIB,  # 0: offloaded
        "ranks": options.ranks,
        "factor": found["memory"]["reserve"],
        "how": "simulation" if options.simulates else "arithmetic",
    }


def _simulated(options: dict) -> dict:
    """Return what plan.py finds by simulation, in a process of its own: a simulated world lasts as long as its process.

    Raises:
        UserError: plan.py refuses the options.
    """
    command = [sys.executable, "plan.py", *arguments(options), "--json"]
    ended = subprocess.run(command, cwd=launch.SOURCE, capture_output=True, text=True)
    if not ended.returncode:
        return json.loads(ended.stdout)
    sentence = ended.stderr.strip().splitlines()[-1]
    if not sentence.startswith("plan.py: "):
        raise RuntimeError(ended.stderr)
    raise UserError(sentence.removeprefix("plan.py: "))


def settings_of(model: str) -> dict:
    """Return the configuration of a model that published.json or the file of figures has."""
    models = json.loads((SAMPLES / "published.json").read_text())["models"] | json.loads(FILE.read_text())["models"]
    return models[model]


def compared(figure: dict, plan: dict) -> str:
    """Return a figure and its plan in a word: the ratio, "agrees", "open", "**disagrees**", or "" if there is nothing to compare."""
    kind = figure.get("kind")
    if kind is None or "refused" in plan:
        return ""
    if kind in OUTCOMES:
        return OUTCOMES[kind][plan["answer"]]
    return f"{SIZES[kind](plan) / figure['value']:.2f}"


def page(rows: list[dict]) -> str:
    """Return the page of all rows, as Markdown.

    Args:
        rows: {"source", "figure", "plan"} of each figure, as ``main`` records them.
    """
    factors = sorted({row["plan"]["factor"] for row in rows if "factor" in row["plan"]})
    intro = INTRO.format(factor=", ".join(f"{factor:g}" for factor in factors), decimal=GIB / 1e9)
    parts = [intro, tally(rows)]
    for source in sources():
        link = f"[{source['source']}]({source['url']}), {source['date']}" if source["url"] else source["source"]
        parts.append(f"## {link}\n\n{source['about']}\n")
        parts += ["| published | plan | ratio | options |", "|---|---|---|---|"]
        own = [row for row in rows if row["source"] == source["source"]]
        parts += [_line(row) for row in own]
        reasons = dict.fromkeys(row["figure"].get("why") for row in own)
        parts.append("\n" + "\n".join(f"- {reason}" for reason in reasons if reason) + "\n" if any(reasons) else "")
    return "\n".join(parts).rstrip() + "\n"


def tally(rows: list[dict]) -> str:
    """Return one sentence that counts how figures and plans compare."""
    words = [compared(row["figure"], row["plan"]) for row in rows if "kind" in row["figure"]]
    ratios = sorted(float(word) for word in words if word[:1].isdecimal())
    agree, open_, disagree = (words.count(word) for word in ("agrees", "open", "**disagrees**"))
    return (
        f"{len(words)} comparisons with published figures: {len(ratios)} sizes, with ratios of {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}; {agree} outcomes agree, {disagree} disagree, {open_} open; the planner refuses {words.count('')}. "
        f"{len(rows) - len(words)} further rows answer questions for which no figure was published.\n"
    )


def _line(row: dict) -> str:
    figure, plan = row["figure"], row["plan"]
    said = figure["published"] + (f" ({figure['how']})" if "how" in figure else "")
    if "refused" in plan:
        answer = f"refused: {plan['refused']}"
    else:
        answer = f"{plan['answer']}: {plan['allocated']:.1f} GiB, {plan['reserved']:.1f} reserved"
        answer += " (simulated)" if plan["how"] == "simulation" else ""
    named = {"config": figure["model"]} if "model" in figure else {}
    assumed = {"config" if name == "model" else name for name in figure.get("assumed", ())}
    options = {name: " ".join(arguments({name: value})) for name, value in (named | figure["options"]).items()}
    words = [f"*{words}*" if name in assumed else words for name, words in options.items()]
    return f"| {said} | {answer} | {compared(figure, plan)} | {' '.join(words)} |"


def rows_of(chosen: list[dict]) -> list[dict]:
    """Return a row for each figure of some sources: {"source", "figure", "plan"}."""
    rows, plans = [], {}
    for source in tqdm(chosen):
        for figure in source["figures"]:
            run = json.dumps([figure.get("model"), figure["options"]])  # there may be several figures of one run
            plans[run] = plans.get(run) or planned(figure)
            rows.append({"source": source["source"], "figure": figure, "plan": plans[run]})
    return rows


@dataclass(frozen=True)
class Config(Options):
    """Where to write. The command line is made from these fields."""

    record: str | None = option(None, "where the record goes (default: results/runs/)")
    page: str | None = option(None, "also write the page to this file")


def main():
    config = parse(Config, __doc__)
    try:
        path = records.new_path("published-memory", config.record)
        rows = rows_of(sources())
        records.write_rows(path, rows)
    except UserError as error:
        ranks.exit_with_error(str(error))
    text = page(rows)
    if config.page:
        Path(config.page).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
