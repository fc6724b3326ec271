"""The map of the source holds: arrows fall from commands to labs to labkit to planner, and none rises."""

import ast
import re
import sys
from pathlib import Path

import planner
import pytest

SOURCE = Path(planner.__file__).resolve().parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
LABS = ("hello", "mnist_fsdp", "gpt_fsdp", "hf_fsdp")
PAGES = {path.stem for path in SOURCE.glob("*.py")}  # labs and commands
ROOMS = ("measuring", "running", "training", "teaching")  # each may use those before it


def planner_modules() -> list[str]:
    """The planner's modules, such as "ops.autograd", in the order of its docstring and those of its packages."""

    def listed(init: Path) -> list[str]:
        return re.findall(r"^  (\w+) {3}", ast.get_docstring(ast.parse(init.read_text()), clean=False), re.MULTILINE)

    order = []
    for name in listed(SOURCE / "planner" / "__init__.py"):
        init = SOURCE / "planner" / name / "__init__.py"
        order += [f"{name}.{module}" for module in listed(init)] if init.exists() else [name]
    return order


PLANNER = planner_modules()  # each may use those before it
PACKAGES = {module.split(".")[0] for module in PLANNER if "." in module}  # their __init__ import nothing


def imported(path: Path) -> set[str]:
    """The modules that a file imports, also in its functions: "torch", "labkit.running.ranks".

    Not seen: what ``import_module`` is given by a variable.
    """
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            found |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return found


def risen(path: Path) -> list[str]:
    """What a file imports that the map does not allow it."""
    floor, room = path.relative_to(SOURCE).parts[0], path.relative_to(SOURCE).parts[1:2]
    rising = []
    for module in imported(path):
        first, second = (module.split(".") + [""])[:2]
        if floor == "planner":
            above = first not in sys.stdlib_module_names and first != "planner"
            name, wanted = (
                ".".join(path.relative_to(SOURCE / "planner").with_suffix("").parts),
                module.partition(".")[2],
            )
            order = PLANNER[: PLANNER.index(name)] if name in PLANNER else []
            above |= first == "planner" and bool(wanted) and wanted not in PACKAGES and wanted not in order
        elif floor == "labkit":
            above = first in PAGES
            if first == "labkit" and second in ROOMS and room[0] in ROOMS:
                above |= ROOMS.index(second) > ROOMS.index(room[0])
        else:
            above = path.stem in LABS and first in PAGES
        if above:
            rising.append(module)
    return rising


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_arrow_rises(path):
    assert risen(path) == []


def test_every_file_has_a_room():
    assert {path.name for path in (SOURCE / "labkit").iterdir() if path.name != "__pycache__"} == {
        "__init__.py",
        *ROOMS,
    }
    files = {path.relative_to(SOURCE / "planner") for path in (SOURCE / "planner").rglob("*.py")}
    modules = {".".join(path.with_suffix("").parts) for path in files if path.name != "__init__.py"}
    assert modules == set(PLANNER)


@pytest.mark.parametrize(
    "place, text",
    [
        ("planner/timing/cost.py", "import numpy"),
        ("planner/timing/cost.py", "from labkit import UserError"),
        ("planner/ops/autograd.py", "from planner.ops.operators import Tape"),
        ("planner/parallel/zero.py", "from planner.timing import cost"),
        ("labkit/running/ranks.py", "def late():\n    import gpt_fsdp"),
        ("labkit/measuring/trace.py", "from labkit.running import ranks"),
        ("mnist_fsdp.py", "import gpt_fsdp"),
        ("hf_fsdp.py", "from gpt_fsdp import train_step"),
        ("planner/ops/autograd.py", "from . import operators"),
        ("labkit/measuring/trace.py", "from ..running import ranks"),
        ("labkit/running/ranks.py", 'from importlib import import_module\nimport_module("gpt_fsdp")'),
        ("labkit/measuring/trace.py", 'import importlib\nimportlib.import_module("labkit.running.ranks")'),
    ],
)
def test_a_rising_arrow_is_seen(place, text, tmp_path, monkeypatch):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(text)
    for path in FILES:
        (tmp_path / path.relative_to(SOURCE)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.relative_to(SOURCE)).touch()
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert risen(tmp_path / place)


def test_no_test_draws_by_the_day():
    """The same tests say the same every day; `make nightly` gives them a new seed (the fixture of that name)."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"today", "toordinal", "todays_seed"}, path.name
