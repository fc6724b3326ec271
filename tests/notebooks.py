# SPDX-License-Identifier: BSD-3-Clause
"""Run notebooks in tests, whole or with something in them broken."""

import os
import re
import sys
from pathlib import Path

import nbformat
from forked import forked

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MIDDLE = re.compile(r'^check\("(\d\d\.0|06\.1|07\.4|12\.1)".*$', re.MULTILINE)  # judges what later cells compute with


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell) -> str:
    """What a cell printed."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def lines_of_verdicts(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("PASS  ", "FAIL  "))]


def verdicts(notebook) -> list[str]:
    """The lines of the verdicts, in order."""
    return [line for cell in code_cells(notebook) for line in lines_of_verdicts(text_of(cell))]


def run_broken(
    name: str,
    breaks: dict[str, str],
    until: str = "NBVAL_CHECK_OUTPUT",
    skip: tuple = (),
    ranks: int = 2,
    only: tuple = (),
) -> list[str]:
    """Run a notebook with ``breaks`` (text: what replaces it) in its code, and return the verdicts it came to.

    Every text must occur. It runs to the first cell with ``until``, if any, without the cells that contain a
    text of ``skip`` or only draw (plots) or ask (exercises), which do not bear on the verdict. An exercise in the middle
    (05.0) is left unanswered, so the course's solution serves what follows. ranks: of its labs.
    only: ids of the cells to run, if not all.
    """
    (path,) = FOLDER.glob(f"{name}*.ipynb")
    notebook = read(path)
    cells = []
    for cell in code_cells(notebook):
        cell.source = MIDDLE.sub("", cell.source)
        if only and cell.id not in only:
            continue
        silent = not any(text in cell.source for text in ("plots.", "hint(", "check(", *skip))
        if only or silent or "import" in cell.source:
            cells.append(cell)
        if until in cell.source:
            break
    sources = [cell.source for cell in cells]
    for text, replacement in breaks.items():
        assert any(text in source for source in sources), f"{text!r} is not in {path.name}"
        sources = [source.replace(text, replacement) for source in sources]
    env = os.environ | {"FSDP_LABS_RANKS": str(ranks)}
    return lines_of_verdicts(forked(run_cells, sources, str(FOLDER), env=env, timeout=600))


def run_cells(sources: list[str], folder: str) -> str:
    """Run the cells as a kernel would, but for what only shows something; return what they print."""
    import contextlib
    import io
    import linecache

    os.chdir(folder)
    printed = io.StringIO()
    names = vars(sys.modules["__main__"])
    with contextlib.redirect_stdout(printed):
        for number, source in enumerate(sources):
            name = f"<cell {number}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for inspect.getsource
            exec(compile(source, name, "exec"), names)
    return printed.getvalue()
