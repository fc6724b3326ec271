# SPDX-License-Identifier: BSD-3-Clause
"""Build the wheel: the course's planner as the package fsdp_plan, with the command fsdp-plan.

In the course, ``planner`` and ``labkit`` are imported from source_code/, which a script has on its path. In a Python with
other packages such names could collide, so the wheel has the same files below ``fsdp_plan``, with imports that say so.
"""

import re
from pathlib import Path
from tempfile import mkdtemp

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "fsdp_plan"
OURS = "planner|labkit|plan|gpt_fsdp|hf_fsdp"  # --simulate runs the labs' own steps
IMPORT_FROM = re.compile(rf"^(\s*)from ((?:{OURS})(?:\.[\w.]+)?) import ", re.M)
IMPORT = re.compile(rf"^(\s*)import ({OURS})(?= *(?:#.*)?$)", re.M)
BY_NAME = re.compile(rf"""(import_module\(f?["'])({OURS})\.""")
RECORDS = "results/reference/*/rows/planner.json"  # what GPUs' allocators reserved: planner/gpus.py reads them


def inside(text: str) -> str:
    """Return a module's text with the imports of our modules as those of the package."""
    text = IMPORT_FROM.sub(rf"\1from {PACKAGE}.\2 import ", text)
    return BY_NAME.sub(rf"\1{PACKAGE}.\2.", IMPORT.sub(rf"\1from {PACKAGE} import \2", text))


def write_package(source: Path, folder: Path):
    """Write the package's files into a folder. source: source_code/."""
    modules = [source / f"{name}.py" for name in OURS.split("|")[2:]]
    for path in [*modules, *source.glob("planner/**/*.py"), *source.glob("labkit/**/*.py")]:
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = inside(path.read_text())
        target.write_text(text.replace("python plan.py", "fsdp-plan") if path.name == "plan.py" else text)
    for path in source.glob(RECORDS):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    license_line = (source / "plan.py").read_text().partition("\n")[0]
    (folder / "__init__.py").write_text(
        f'{license_line}\n"""Plan the memory, traffic, time, and cost of sharded training: fsdp-plan --help"""\n'
    )


class CustomBuildHook(BuildHookInterface):
    """Put the package's files into the wheel."""

    def initialize(self, version, build_data):
        """Write them into a temporary folder, and name it to the builder. An editable installation has them, too."""
        folder = Path(mkdtemp(prefix="fsdp-plan-"))
        write_package(Path(self.root) / "source_code", folder)
        build_data["force_include"][str(folder)] = PACKAGE
