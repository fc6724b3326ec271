"""Run notebooks in tests, whole or with something in them broken."""

from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell) -> str:
    """What a cell printed."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def verdicts(notebook) -> list[str]:
    """The lines of the verdicts, in order."""
    lines = [line for cell in code_cells(notebook) for line in text_of(cell).splitlines()]
    return [line for line in lines if line.startswith(("PASS  ", "FAIL  "))]


def run_broken(name: str, breaks: dict[str, str], until: str = "NBVAL_CHECK_OUTPUT", skip: tuple = ()) -> list[str]:
    """Run a notebook with ``breaks`` (text: what replaces it) in its code, and return the verdicts it came to.

    Every text must occur. It runs to the first cell with ``until``, if any, without the cells that contain a
    text of ``skip`` or only draw (plots) or ask (exercises), which do not bear on the verdict.
    """
    (path,) = FOLDER.glob(f"{name}*.ipynb")
    notebook = read(path)
    cells = []
    for cell in code_cells(notebook):
        if not any(text in cell.source for text in ("plots.", "hint(", "check(", *skip)) or "import" in cell.source:
            cells.append(cell)
        if until in cell.source:
            break
    source = "\n".join(cell.source for cell in cells)
    for text, replacement in breaks.items():
        assert text in source, f"{text!r} is not in {path.name}"
        for cell in cells:
            cell.source = cell.source.replace(text, replacement)
    notebook.cells = cells
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    ).execute()
    return verdicts(notebook)
