# SPDX-License-Identifier: BSD-3-Clause
"""The wheel: its size, its names, and that it plans as plan.py does, without torch and from any folder."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import plan
import pytest
from conftest import SOURCE

ROOT = SOURCE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {
    "labs": ROOT / "requirements.txt",
    "deepspeed": SOURCE / "requirements-deepspeed.txt",
    "jax": SOURCE / "requirements-jax.txt",
    "test": ROOT / "tests" / "requirements.txt",
    "site": ROOT / "docs" / "requirements.txt",
}
EXAMPLES = re.findall(r"^  python plan\.py (.*?)(?:   .*)?$", plan.__doc__, re.M)
NEED_TORCH = ("--simulate", "--plot", "--module")
ALIKE = [
    "--preset llama3-8b --ranks 8 --batch-size 1 --seq-len 8192 --precision bf16 --recompute full",
    "--preset llama3-70b --precision bf16 --mesh shard=8,tensor=8 --ranks 64 --batch-size 1 --seq-len 4096 --json",
    "--ranks 4 --mesh pipeline=2 --accumulate 4 --device cpu",
    "--ranks 4 --strategy deepspeed-2 --device cpu --explain",
    "--ranks 0",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """fsdp-plan in a Python that has nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True, timeout=120)
    return folder / "bin" / "fsdp-plan"


def run(words: list[str], folder: Path, **environ) -> tuple[int, str, str]:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240, env=environ or None)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("extra", FILES)
def test_an_extra_is_what_its_file_of_requirements_says(extra):
    lines = [line.partition("#")[0].strip() for line in FILES[extra].read_text().splitlines()]
    assert PROJECT["optional-dependencies"][extra] == [line for line in lines if line]


def test_what_a_simulation_needs_is_a_part_of_what_the_labs_need():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["simulate"]) < set(extras["labs"]) and PROJECT["dependencies"] == []


def test_the_wheel_is_one_small_package(wheel):
    assert wheel.stat().st_size <= 2**20
    names = {name.partition("/")[0] for name in ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fsdp_plan"}


@pytest.mark.parametrize("words", ALIKE)
def test_it_answers_as_plan_py_does(words, command, tmp_path):
    code, said, error = run([str(command), *shlex.split(words)], tmp_path)
    beside = run([sys.executable, "plan.py", *shlex.split(words)], SOURCE)
    assert (code, said, error.replace("fsdp-plan", "plan.py")) == beside


@pytest.mark.parametrize("words", [each for each in EXAMPLES if not any(name in each for name in NEED_TORCH)])
def test_an_example_of_its_help_runs(words, command, tmp_path):
    (tmp_path / "config.json").write_text((SOURCE / "samples" / "llama_small.json").read_text())
    code, said, error = run([str(command), *shlex.split(words)], tmp_path)
    assert code == 0 and said and not error


@pytest.mark.parametrize("words", [each for each in EXAMPLES if any(name in each for name in NEED_TORCH)])
def test_without_torch_an_example_that_needs_it_says_so(words, command, tmp_path):
    (tmp_path / "config.json").write_text((SOURCE / "samples" / "llama_small.json").read_text())
    (tmp_path / "my_model.py").write_text("import torch\n")
    code, said, error = run([str(command), *shlex.split(words)], tmp_path)
    assert code == 2 and not said and len(error.strip().splitlines()) == 1
    assert "torch" in error or "matplotlib" in error


SIMULATED = """
import json, sys
sys.argv = ["fsdp-plan", "--ranks", "4", "--simulate", "--json"]
from fsdp_plan.plan import main
main()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & {"planner", "labkit", "plan", "gpt_fsdp"})))
"""


@pytest.mark.long
def test_it_simulates_where_there_is_torch_and_takes_no_name_of_others(wheel, tmp_path):
    ZipFile(wheel).extractall(tmp_path)
    code, said, error = run([sys.executable, "-c", SIMULATED], tmp_path)
    assert code == 0, error
    found, end = json.JSONDecoder().raw_decode(said)
    assert json.loads(said[end:]) == []
    assert abs(found["simulated"] / found["peak"] - 1) < 1e-4
