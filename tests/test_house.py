# SPDX-License-Identifier: BSD-3-Clause
"""The map of the source holds: imports go from proofs and tools to labs, from labs to labkit, from labkit to planner."""

import ast
import re
import sys
from pathlib import Path

import planner
import pytest

SOURCE = Path(planner.__file__).resolve().parents[1]
# Not what runs have left in results/
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "results")
LABS = {  # {lab: the labs that it may import}
    "hello": (),
    "mnist_fsdp": (),
    "gpt_fsdp": (),
    "hf_fsdp": (),
    "gpt_zero": ("gpt_fsdp",),
    "gpt_pipeline": ("gpt_fsdp",),
    "gpt_jax": ("gpt_fsdp",),
    "faults": (),
}
TOOLS = ("plan", "ladder", "one_rank", "prepare_data", "class_check", "export", "diagnose_hang")
ROOMS = ("measuring", "running", "training", "teaching")  # of labkit; each may import those before it
OURS = {*LABS, *TOOLS, "proofs", "minimal", "labkit", "planner"}

# {function: which argument says what is imported}
IMPORTERS = {"import_module": 0, "__import__": 0, "run_module": 0, "run_path": 0, "spec_from_file_location": 1}
DYNAMIC = {  # files that import what a variable names, and what that is
    "labkit/running/fork_server.py": "third-party modules, and the program that it becomes",
    "labkit/teaching/exercises/__init__.py": "an exercise's chapter, in its own folder",
    "labkit/training/own_model.py": "the learner's own file",
    "proofs/configurations.py": "the lab of a configuration",
    "proofs/crash.py": "the lab of a configuration",
    "proofs/parity.py": "the lab of a variant",
}


def planner_modules() -> list[str]:
    """Return the planner's modules, such as "ops.autograd", in the order of its docstring and of its packages'."""

    def listed(init: Path) -> list[str]:
        return re.findall(r"^  (\w+) {3}", ast.get_docstring(ast.parse(init.read_text()), clean=False), re.MULTILINE)

    order = []
    for name in listed(SOURCE / "planner" / "__init__.py"):
        init = SOURCE / "planner" / name / "__init__.py"
        order += [f"{name}.{module}" for module in listed(init)] if init.exists() else [name]
    return order


PLANNER = planner_modules()  # each may import those before it
PACKAGES = {module.split(".")[0] for module in PLANNER if "." in module}  # their __init__ import nothing


def imported_by_calls(path: Path) -> list[ast.expr]:
    """Return what a file hands to the functions that import: a constant names a module, a variable may name any."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
    return [call.args[IMPORTERS[name]] for call, name in zip(calls, names, strict=True) if name in IMPORTERS]


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, also in its functions: "torch", "labkit.running.ranks"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # "from . import x", "from ..y import x"
            package = path.relative_to(SOURCE).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            found.add(module)
            inside = SOURCE / module.replace(".", "/")
            names = {alias.name for alias in node.names}
            found |= {f"{module}.{n}" for n in names if (inside / n).exists() or (inside / f"{n}.py").exists()}
    return found | {e.value.removesuffix(".py") for e in imported_by_calls(path) if isinstance(e, ast.Constant)}


def dynamic(path: Path) -> list[str]:
    """Return a file's imports of what only a variable names, and new names for the functions that import."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    renamed = [alias.name for node in nodes for alias in node.names if alias.asname and alias.name in IMPORTERS]
    return [ast.unparse(each) for each in imported_by_calls(path) if not isinstance(each, ast.Constant)] + renamed


def allowed(path: Path) -> set[str]:
    """Return which of ``OURS`` a file may import."""
    top = path.relative_to(SOURCE).with_suffix("").parts[0]
    library = {"labkit", "planner"}
    return {
        "minimal": set(),
        "planner": {"planner"},
        "labkit": library,
        "proofs": {"proofs", "plan", "diagnose_hang", "minimal", *LABS} | library,
        **{lab: {*others} | library for lab, others in LABS.items()},
        **{tool: {*LABS} | library for tool in TOOLS},
    }[top]


def forbidden(path: Path) -> list[str]:
    """Return what a file imports that the map does not allow."""
    top, *inside = path.relative_to(SOURCE).parts
    found = []
    for module in imported(path):
        first, second = (module.split(".") + [""])[:2]
        bad = first in OURS - allowed(path)
        if top == "planner":
            name, wanted = (
                ".".join(path.relative_to(SOURCE / "planner").with_suffix("").parts),
                module.partition(".")[2],
            )
            order = PLANNER[: PLANNER.index(name)] if name in PLANNER else []
            bad |= first not in sys.stdlib_module_names and first != "planner"
            bad |= first == "planner" and bool(wanted) and wanted not in PACKAGES and wanted not in order
        elif top == "labkit" and first == "labkit" and second in ROOMS and inside[0] in ROOMS:
            bad |= ROOMS.index(second) > ROOMS.index(inside[0])
        if bad:
            found.append(module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_what_the_map_allows(path):
    assert forbidden(path) == []
    assert path.relative_to(SOURCE).as_posix() in DYNAMIC or dynamic(path) == []


def test_every_file_has_a_room():
    assert {path.stem for path in SOURCE.glob("*.py")} == {*LABS, *TOOLS}
    assert {path.relative_to(SOURCE).parts[0] for path in FILES if path.parent != SOURCE} == OURS - {*LABS, *TOOLS}
    assert {path.name for path in (SOURCE / "labkit").iterdir() if path.name != "__pycache__"} == {
        "__init__.py",
        *ROOMS,
    }
    files = {path.relative_to(SOURCE / "planner") for path in (SOURCE / "planner").rglob("*.py")}
    modules = {".".join(path.with_suffix("").parts) for path in files if path.name != "__init__.py"}
    assert modules == set(PLANNER)
    assert [name for name in DYNAMIC if not dynamic(SOURCE / name)] == []  # none is listed without need


def test_the_pages_name_every_lab_tool_and_proof():
    page = (SOURCE.parent / "docs" / "source.md").read_text()
    names = [path.relative_to(SOURCE) for path in FILES if path.stem in (*LABS, *TOOLS) or path.parts[-2] == "minimal"]
    assert [str(name) for name in names if name.name not in page] == []
    proofs = (SOURCE / "proofs" / "README.md").read_text()
    assert [path.stem for path in SOURCE.glob("proofs/[a-z]*.py") if f"`{path.stem}" not in proofs] == []


@pytest.mark.parametrize(
    "place, text",
    [
        ("planner/timing/cost.py", "import numpy"),
        ("planner/timing/cost.py", "from labkit import UserError"),
        ("planner/ops/autograd.py", "from planner.ops.operators import Tape"),
        ("planner/parallel/zero.py", "from planner.timing import cost"),
        ("planner/ops/autograd.py", "from . import operators"),
        ("labkit/running/ranks.py", "def late():\n    import gpt_fsdp"),
        ("labkit/running/ranks.py", "from proofs import memory"),
        ("labkit/running/ranks.py", 'from importlib import import_module\nimport_module("gpt_fsdp")'),
        ("labkit/running/lab.py", 'import runpy\nrunpy.run_path("gpt_fsdp.py")'),
        ("labkit/measuring/trace.py", "from labkit.running import ranks"),
        ("labkit/measuring/trace.py", "from ..running import ranks"),
        ("labkit/measuring/trace.py", 'import importlib\nimportlib.import_module("labkit.running.ranks")'),
        ("mnist_fsdp.py", "import gpt_fsdp"),
        ("hf_fsdp.py", "from gpt_fsdp import train_step"),
        ("gpt_zero.py", "import mnist_fsdp"),
        ("gpt_fsdp.py", "import plan"),
        ("gpt_fsdp.py", "from proofs import parity"),
        ("plan.py", "import ladder"),
        ("one_rank.py", "from proofs import memory"),
        ("proofs/memory.py", "import ladder"),
        ("minimal/ddp.py", "from labkit.running import ranks"),
    ],
)
def test_a_forbidden_import_is_seen(place, text, tmp_path, monkeypatch):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(text)
    for path in FILES:
        (tmp_path / path.relative_to(SOURCE)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(SOURCE)).touch()
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert forbidden(tmp_path / place)


@pytest.mark.parametrize(
    "text",
    [
        "from importlib import import_module\nimport_module(script.removesuffix('.py'))",
        "import importlib\nimportlib.import_module(name)",
        "import runpy\nrunpy.run_path(script)",
        "__import__(name)",
        "from importlib import import_module as load\nload('gpt_fsdp')",
    ],
)
def test_an_import_by_a_variable_is_seen(text, tmp_path):
    (tmp_path / "file.py").write_text(text)
    assert dynamic(tmp_path / "file.py")


LICENSED = "# SPDX-License-Identifier: BSD-3-Clause"
WITHOUT = {  # files that have no such line, and why
    "source_code/minimal/": "a learner copies them into a project of their own",
    "source_code/faults.py": "chapter 16's outputs name its lines, by number",
    "source_code/proofs/diagnosis.py": "chapter 16's outputs name its lines, by number",
}


def unlicensed(path: Path) -> bool:
    """Return whether a file's first line, or the one after its interpreter's, does not name the license."""
    first, _, rest = path.read_text().partition("\n")
    return (rest.partition("\n")[0] if first.startswith("#!") else first) != LICENSED


def test_every_file_names_its_license():
    root = SOURCE.parent
    folders = [path for name in ("tests", "images", "docs", ".ci") for path in sorted((root / name).rglob("*.py"))]
    found = {path.relative_to(root).as_posix() for path in [*FILES, *folders] if unlicensed(path)}
    assert {path for path in found if not path.startswith(tuple(WITHOUT))} == set()
    assert [name for name in WITHOUT if not any(path.startswith(name) for path in found)] == []


@pytest.mark.parametrize(
    "text", ["", '"""A file."""\n', "#!/usr/bin/env python3\n", f"\n{LICENSED}\n", f"{LICENSED}-Clear\n"]
)
def test_a_file_without_its_license_is_seen(text, tmp_path):
    (tmp_path / "file.py").write_text(text)
    assert unlicensed(tmp_path / "file.py")


def test_no_test_draws_by_the_day():
    """The same tests say the same every day; `make nightly` gives them a new seed (the fixture of that name)."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"today", "toordinal", "todays_seed"}, path.name
