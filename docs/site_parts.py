# SPDX-License-Identifier: BSD-3-Clause
"""Write what the site is made of besides its sources: the planner's page, API pages, the gallery of records, Pyodide.

``make site`` runs it before Sphinx. Pages go to docs/generated/, files for the browser to build/static/.
"""

import hashlib
import html
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import fields
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
PAGES, STATIC, CACHE = ROOT / "docs" / "generated", ROOT / "build" / "static", ROOT / "build" / "cache"
RECORDS = SOURCE / "results" / "reference"
sys.path.insert(0, str(SOURCE))

from labkit.running.options import choices_of  # noqa: E402
from labkit.running.plan_options import Config  # noqa: E402
from planner import predict  # noqa: E402
from planner.gpus import GPUS  # noqa: E402

# Python for WebAssembly. Only its core is needed: the planner imports nothing but the standard library.
PYODIDE = "pyodide-314.0.7.tgz"
SHA512 = "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
REGISTRY = os.environ.get("npm_config_registry", "https://registry.npmjs.org").rstrip("/")

# What the labs import and the site does not: pages about them are written from their source.
NOT_INSTALLED = [
    "torch",
    "matplotlib",
    "pandas",
    "numpy",
    "IPython",
    "transformers",
    "tqdm",
    "filelock",
    "submitit",
    "cloudpickle",
]
METERS = ("measuring.meters", "measuring.trace", "measuring.host_memory", "measuring.records", "measuring.hlo")
FIGURES = {"ladder-amd-epyc-2-cores": "ladder.png", "tiny-intel-xeon-2-cores": "will_it_fit.png"}
# What the planner's page asks at first; its choices are those of plan.py.
FIRST = {
    "preset": "llama3-8b",
    "gpu": "h100",
    "ranks": 8,
    "strategy": "fsdp2",
    "precision": "bf16",
    "recompute": "full",
}
FIRST |= {"batch_size": 1, "seq_len": 8192}
LABELS = {
    "preset": "model",
    "ranks": "GPUs",
    "gpu": "kind of GPU",
    "batch_size": "sequences per GPU",
    "seq_len": "tokens per sequence",
}


def write(path: Path, text: str):
    """Write a file unless it has this text already: Sphinx reads again what has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def fetch_pyodide() -> bytes:
    """Return Pyodide's archive, from the cache or from the npm registry.

    Raises:
        SystemExit: it cannot be fetched, or is another file.
    """
    cached = CACHE / PYODIDE
    address = f"{REGISTRY}/pyodide/-/{PYODIDE}"
    try:
        data = cached.read_bytes() if cached.exists() else urllib.request.urlopen(address, timeout=60).read()
    except OSError as error:
        sys.exit(
            f"make site: the planner's page needs {address}, which cannot be fetched ({error}): put it into {cached}"
        )
    if hashlib.sha512(data).hexdigest() != SHA512:
        sys.exit(
            f"make site: {cached if cached.exists() else address} has another checksum than the Pyodide that was tested: remove it"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    cached.write_bytes(data)
    return data


def write_runtime():
    """Write what the planner's page loads: Pyodide's core, and the wheel."""
    fetch_pyodide()
    folder = STATIC / "pyodide"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(CACHE / PYODIDE) as archive:
        for name in CORE:
            (folder / name).write_bytes(archive.extractfile(f"package/{name}").read())
    for old in STATIC.glob("*.whl"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", STATIC],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )


def planner_page() -> str:
    """Return the page that plans in the browser. planner.js makes it work."""
    declared = {field.name: field for field in fields(Config)}
    with mock(NOT_INSTALLED):
        colours = importlib.import_module("labkit.teaching.plots").COLOURS
    controls = []
    for name, first in FIRST.items():
        if choices := choices_of(declared[name]):
            gib = {gpu: f' data-gib="{GPUS[gpu].memory:g}"' for gpu in choices} if name == "gpu" else {}
            options = "".join(f"<option{gib.get(c, '')}{' selected' * (c == first)}>{c}</option>" for c in choices)
            options += "<option value=''>your config.json</option>" if name == "preset" else ""
            control = f'<select name="{name}">{options}</select>'
        else:
            control = f'<input name="{name}" type="number" min="1" value="{first}">'
        controls.append(f"<label>{LABELS.get(name, name)} {control}</label>")
    (wheel,) = STATIC.glob("*.whl")
    form = (ROOT / "docs" / "planner_form.html").read_text()
    form = form.replace("CONTROLS", "\n".join(controls)).replace("WHEEL", wheel.name)
    form = form.replace("COLOURS", html.escape(json.dumps(colours)))
    return f"# Try the planner\n\n```{{raw}} html\n{form}```\n"


def modules(name: str) -> list[str]:
    """Return the modules of a package, in the order of its docstring."""
    package = importlib.import_module(name)
    listed = re.findall(r"^  (\w+) {3}", package.__doc__, re.M)
    return [f"{name}.{module}" for module in listed]


def api_page(title: str, names: list[str]) -> str:
    """Return a page with the documentation of modules, from their docstrings."""
    parts = [f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n" for name in names]
    return f"# {title}\n\n" + "\n".join(parts)


def write_api():
    """Write a page for each package of the planner, and one for the meters."""
    single = []
    for name in modules("planner"):
        inside = modules(name) if (SOURCE / name.replace(".", "/")).is_dir() else []
        if inside:
            write(PAGES / f"api_{name.replace('.', '_')}.md", api_page(f"API: {name}", [name, *inside]))
        else:
            single.append(name)
    write(PAGES / "api_planner.md", api_page("API: planner", ["planner", *single]))
    write(PAGES / "api_meters.md", api_page("API: meters", [f"labkit.{name}" for name in METERS]))


def link(path: Path, text: str) -> str:
    return f"[{text}](../../{path.relative_to(ROOT)})"


def run_rows(paths: list[Path]) -> list[str]:
    """Return a table of recorded runs: the command, and the peak of a rank, measured and predicted."""
    rows = ["| record | command | measured peak | predicted |", "|---|---|--:|--:|"]
    for path in paths:
        record = json.loads(path.read_text())
        measured = predicted = "–"
        if peak := record.get("memory", {}).get("peak"):
            measured, predicted = (
                f"{sum(peak.values()):,} bytes",
                f"{predict.total(predict.plan_of(record).peak()[1]):,} bytes",
            )
        command = "`" + re.sub(r" --record \S+", "", record["command"]) + "`"
        command = "a notebook's cell" if record["script"] == "cells.py" else command
        rows.append(f"| {link(path, path.stem)} | {command} | {measured} | {predicted} |")
    return rows


def records_page() -> str:
    """Return the gallery of the committed records: what each shows, and on which hardware it was measured."""
    claims = re.findall(
        r"^\| .*? \| (.*?): `python -m .*?\| (.*) \|$", (SOURCE / "proofs" / "README.md").read_text(), re.M
    )
    lines = [
        "# Gallery of records\n\nEach record is a file that a command of the course has written. Its hardware is in it."
    ]
    for path in sorted(RECORDS.iterdir()):
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        first = json.loads(files[0].read_text())
        claim = next((f"Claim: {text}." for text, where in claims if path.name in where), "Runs of a lab.")
        torch = first.get("torch") or first["versions"]["torch"]
        lines += [
            "",
            f"## {path.stem}",
            "",
            f"**Hardware: {first['hardware']}.** PyTorch {torch}, {first['date'][:10]}. {claim}",
            "",
        ]
        if path.name in FIGURES:
            readme = (ROOT / "README.md").read_text()
            alt = re.search(rf"!\[([^\]]*)\]\(images/{FIGURES[path.name]}\)", readme)[1]
            lines += [f"![{alt}](../../images/{FIGURES[path.name]})", ""]
        lines += run_rows(files) if path.is_dir() else [f"{link(path, path.name)}, {len(first['rows']):,} rows"]
    return "\n".join(lines) + "\n"


def scripts_page() -> str:
    """Return a page with the files of the folders that other pages name."""
    lines = ["# Scripts to copy"]
    for folder in ("minimal", "slurm"):
        lines += ["", f"## source_code/{folder}", ""]
        lines += [f"- {link(path, path.name)}" for path in sorted((SOURCE / folder).iterdir()) if path.is_file()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_runtime()
    write(PAGES / "try_the_planner.md", planner_page())
    write(PAGES / "records.md", records_page())
    write(PAGES / "scripts.md", scripts_page())
    write_api()
