# SPDX-License-Identifier: BSD-3-Clause
"""Write docs/gpu_hour.md: what make gpu would run, and which sentence or limit each number would change: python -m proofs.gpu_page"""

from itertools import groupby

from labkit.running import launch

from proofs.gpu_parts import PARTS

PAGE = launch.SOURCE.parent / "docs" / "gpu_hour.md"
TOP = """# The GPU hour

This page is written by `python -m proofs.gpu_page`, from the steps of [`make gpu`](../source_code/proofs/gpu_parts.py). No GPU
has run them yet. They were rehearsed on a CPU (`python -m proofs.gpu --device cpu`), except the 1B shape compiled, those that
need accelerate, and `check context`, `check groups`, and `check pinned`, whose subject no CPU has. The last column names the sentence
or the limit that a part's results would correct.

`make gpu` runs all parts, one after another, each in at most eight minutes; started again, it goes on where it stopped.
`make gpu PART=smoke` runs one of them; `make gpu DRY=1` prints the commands. It needs no network. One GPU leaves out what needs
several, except for the parts in which it is a rank of a larger world (`worlds`, `planner`).

| part | steps | would change |
|---|---|---|
"""


class AnyMachine:
    """A machine with two GPUs: it has every step."""

    device, ranks, gpus, folder = "cuda", 2, 2, "records"


def lines() -> list[str]:
    """Return a row for each part and what its steps would change."""
    found = []
    for name, part in PARTS.items():
        for changes, steps in groupby(part(AnyMachine), key=lambda step: step.changes):
            path, _, said = changes.partition(": ")
            label = f"[`{path.rpartition('/')[2]}`](../{path}): “{said}”"
            found.append(f"| `{name}` | {', '.join(step.name for step in steps)} | {label} |")
    return found


def page() -> str:
    return TOP + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
