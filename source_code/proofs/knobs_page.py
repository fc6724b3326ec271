# SPDX-License-Identifier: BSD-3-Clause
"""Write docs/knobs.md from samples/knobs.json and the record of ``knobs``: python -m proofs.knobs_page"""

import json

import pandas
from labkit.measuring.records import RESULTS
from labkit.running import launch

from proofs import knobs

PAGE = launch.SOURCE.parent / "docs" / "knobs.md"
GROUPS = {  # title: how the names of its knobs begin
    "`fully_shard`": ("fully_shard", "DataParallelMeshDims", "ShardPlacementResult"),
    "Methods of `FSDPModule`, and functions": (
        "FSDPModule",
        "UnshardHandle",
        "GradientReductionHandle",
        "share_",
        "register_",
    ),
    "Policies": ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"),
    "FSDP1: the constructor": ("FullyShardedDataParallel",),
    "FSDP1: strategies, prefetch, number formats, offload": (
        "ShardingStrategy",
        "BackwardPrefetch",
        "MixedPrecision.",
        "CPUOffload.",
    ),
}
TOP = """# Knobs of FSDP2 and FSDP1

This page is written by `python -m proofs.knobs_page`, from [samples/knobs.json]({rows}) and [the record]({record}) of
`python -m proofs.knobs`, {date}, on {hardware}, with torch {torch}: {counts}. Chapter
[09](../notebooks/09_fsdp2.ipynb) shows what to do with them.

The names are those that the installed PyTorch has; a test fails if one has no row here. *Since* is 2.11, the oldest PyTorch
that the course supports, if that has the knob; all of FSDP1's are in it.

Each setting ran on 2 to 4 ranks with gloo, on a network of four linear layers of 4,096 bytes, each a unit, and a head of 2,048,
the root's, in fp32, with SGD. Where a trial is of something else, such as the value of a gradient, its network is smaller. The
prediction is the planner's or, where it does not cover the setting, a few lines of arithmetic (`proofs/knob_trials/`); the
measurement is that of the course's meters. *between steps* and *peak* are bytes of a rank; "8 × all-gather of 4,096" are a
step's collectives, by the bytes of the whole tensor; *order* is what happens in a forward and backward of units a, b, c, and
the root's layer d.

A CPU has no streams, and gloo has no communicators in a GPU's memory: a row that says so names its source in PyTorch.
"""


def cell(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def explained(names: list[str], rows: dict[str, dict], fsdp1: bool) -> str:
    """Return the table of rows of some knobs; fsdp1: with the counterparts in FSDP2."""
    lines = []
    for name in names:
        row = rows[name]
        since = row["since"] + (f" ({row['pull']})" if "pull" in row else "")
        source = f" Source: {row['source']}." if "source" in row else ""
        line = {"knob": f"`{name}`", "changes": ", ".join(row["changes"]), "what it does": cell(row["text"] + source)}
        line["trap"] = cell(row.get("trap", ""))
        lines.append(line | ({"FSDP2": cell(row.get("fsdp2", ""))} if fsdp1 else {"since": since}))
    return pandas.DataFrame(lines).to_markdown(index=False, disable_numparse=True)


def page() -> str:
    """Return the page of the committed record."""
    (path,) = (RESULTS / "reference").glob("knobs-*.json")
    record, rows = json.loads(path.read_text()), knobs.rows()
    links = {
        name: f"../{file.relative_to(launch.SOURCE.parent)}" for name, file in (("record", path), ("rows", knobs.ROWS))
    }
    about = {key: record[key] for key in ("date", "hardware", "torch")}
    parts = [TOP.format(**links, **about, counts=knobs.counts(record["rows"]))]
    for title, beginnings in GROUPS.items():
        names = [name for name in rows if name.startswith(beginnings)]
        found = [row for row in record["rows"] if row["knob"] in names]
        parts += [
            f"## {title}",
            explained(names, rows, "FSDP1" in title),
            f"### {title}: predicted = measured",
            knobs.table(found),
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
