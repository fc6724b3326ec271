# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that several test files share."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "source_code"
SCRIPT = SOURCE / "slurm" / "practice_cluster.sh"
sys.path[:0] = [str(SOURCE), str(SOURCE.with_name("images"))]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # the tests are of the CPU, on every machine
os.environ["PYTHONSTARTUP"] = str(Path(__file__).with_name("kernel_startup.py"))  # which doubts verdicts

# Started in a shell's background, as a CI may do, Python ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from labkit.running import fork_server  # noqa: E402

# One fork server for all tests, and for the workers, kernels and ranks that they start: most tests are not about
# starting.
# As notebook 17 has it: with other variables than the fork server's, each of its ranks would import transformers anew.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
if fork_server.VARIABLE not in os.environ and fork_server.possible():
    often = ("matplotlib.pyplot", "pandas", "IPython.display", "ipywidgets", *fork_server.IF_IMPORTED)
    often += ("deepspeed",) * (find_spec("deepspeed") is not None)  # a second for each rank of chapter 13's many
    os.environ[fork_server.VARIABLE] = fork_server.address(*often)


def pytest_configure(config):
    """Fork nbval's kernels, which saves four seconds per notebook. In CI they start as a learner's do."""
    forks = os.environ.get(fork_server.VARIABLE, "0") != "0" and os.environ.get("FSDP_LABS_REQUIRE_ALL") != "1"
    if forks and config.getoption("nbval_lax", False):
        folders = [str(Path(__file__).with_name("jupyter")), os.environ.get("JUPYTER_PATH", "")]
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, folders))


# Files side by side: notebooks and what else takes longest begin first, so that no worker is left with it when the others
# are done.
LONGEST = (
    "crash parity class_installation gpt predict saving gpt_equality equality hf_fsdp diagnose_hang gpu_plan".split()
)
LONGEST += "tensor_parallel context_parallel signals one_rank resume_elsewhere gpt_jax".split()
LONGEST = [f"test_{name}" for name in LONGEST]


def _place(name: str) -> int:
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


# Files that only make nightly runs. In make test, less of the same is covered by notebook 14's verdicts (test_gpt_jax),
# test_equality and test_gpt_equality (test_parity), test_families (test_census), and test_saving, test_resume_elsewhere, and
# notebook 7 (test_crash); a read-only installation is tested in the nightly only.
NIGHTLY = ("test_gpt_jax", "test_parity", "test_census", "test_class_installation", "test_crash")
MARKERS = {"slurm_installed": "slurm", "seed": "drawn"}  # what uses the fixture has the marker


def _one_in(number: int, items: list) -> list:
    """Return the items without most of those that repeat one another.

    Of the tests that break a notebook, and of each long test's sets of parameters, it keeps the first of every ``number``.
    """
    repeated = defaultdict(list)
    for item in items:
        if item.get_closest_marker("breaks"):
            repeated["breaks"].append(item)
        elif item.get_closest_marker("long") and hasattr(item, "callspec"):
            repeated[item.path, item.originalname].append(item)
    left_out = {item for alike in repeated.values() for index, item in enumerate(alike) if index % number}
    return [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config, items):
    """Order the files, and mark tests by their fixtures: ``make test`` leaves a Slurm to CI, ``make nightly`` takes seeds.

    FSDP_LABS_ONE_IN=16 takes the first of every sixteen tests that repeat one another (``_one_in``), and leaves out the others.
    """
    items.sort(key=lambda item: (item.path.suffix != ".ipynb", _place(item.path.stem)))
    for item in items:
        for fixture in set(MARKERS) & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKERS[fixture])
        if item.get_closest_marker("breaks"):
            item.add_marker("long")
        if item.path.stem in NIGHTLY:
            item.add_marker("nightly")
    taken = _one_in(int(os.environ.get("FSDP_LABS_ONE_IN", "1")), items)
    config.hook.pytest_deselected(items=list(set(items) - set(taken)))
    items[:] = taken


@pytest.fixture(scope="module")
def selected(request):
    """Return a function that filters parameter values: it keeps those with which tests of this file run (``_one_in``).

    Only tests that use ``selected`` count, directly or through another fixture.
    """
    items = [item for item in request.session.items if item.path == request.path and "selected" in item.fixturenames]
    values = [value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    return lambda candidates: [each for each in candidates if each in values]


def pytest_report_header() -> str | None:
    """Show a seed that is not the fixed one, with the command that repeats these tests."""
    if seed := os.environ.get("FSDP_LABS_SEED"):
        return f"FSDP_LABS_SEED={seed}; to repeat: make nightly SEED={seed}"
    return None


@pytest.fixture(scope="session")
def seed() -> int:
    """Return the seed of whatever a test draws at random: a fixed one, except in ``make nightly``."""
    return int(os.environ.get("FSDP_LABS_SEED", "1"))


@pytest.fixture(autouse=True)
def environment_kept():
    """A variable that a test left behind would have later tests' programs started anew instead of forked."""

    def read_at_import():
        return {name: value for name, value in os.environ.items() if name.startswith(fork_server.READ_AT_IMPORT)}

    before = read_at_import()
    yield
    assert read_at_import() == before, "the test has changed the environment of those after it"


@pytest.fixture(scope="session")
def require_all() -> bool:
    """Whether everything must be tested, as in CI: nothing skipped."""
    return os.environ.get("FSDP_LABS_REQUIRE_ALL") == "1"


@pytest.fixture(scope="session")
def slurm_installed(require_all):
    """Skip where there is no Slurm to start; fail instead where everything must be tested."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [command for command in ("slurmctld", "slurmd", "munged", "srun") if not shutil.which(command, path=path)]
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        if require_all:
            pytest.fail(f"FSDP_LABS_REQUIRE_ALL=1, but {reason}")
        pytest.skip(reason)


@contextlib.contextmanager
def practice_cluster(folder: Path, *link: str):
    """Bring up a practice cluster, and take it down at the end.

    Args:
        folder: Where it lives.
        link: ``--link``, and a speed, for a network between its nodes.

    Yields:
        The environment (a dict for subprocess's ``env``) of commands that use it. ``python`` and ``torchrun`` are
        those that run the tests.
    """
    try:
        up = subprocess.run(["bash", SCRIPT, "up", *link, folder], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stderr
        source = subprocess.run(
            ["bash", "-c", '. "$1" && env -0', "bash", folder / "env.sh"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        env = dict(line.split("=", 1) for line in source.stdout.split("\0") if line)
        yield env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    finally:
        subprocess.run(["bash", SCRIPT, "down", folder], capture_output=True, timeout=120, check=True)


@pytest.fixture(scope="session")
def slurm(slurm_installed, tmp_path_factory):
    """Yield the environment of commands that use a practice cluster, see ``practice_cluster``.

    All tests share the one cluster: two nodes, four GPU slots each, nothing running on it. Leave it like that.
    """
    with practice_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as env:
        yield env


@pytest.fixture(scope="module")
def networks_allowed(slurm_installed, require_all):
    """Skip where no network may be made; fail instead where everything must be tested."""
    tried = ["unshare", "--net", "--mount", "sh", "-c", "ip link add eth0 type veth && tc qdisc show"]
    if os.geteuid() or subprocess.run(tried, capture_output=True, check=False).returncode:
        reason = "no network can be made: it takes root, iproute2, and in a container NET_ADMIN and SYS_ADMIN"
        if require_all:
            pytest.fail(f"FSDP_LABS_REQUIRE_ALL=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="module")
def linked(networks_allowed):
    """Yield the environment of commands that use a cluster with a link, which a file's tests share. 200mbit at first."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as parent:
        with practice_cluster(Path(parent) / "cluster", "--link", "200mbit") as env:
            yield env


@pytest.fixture
def world_of_one():
    """The test's own process as the only rank."""
    import torch
    import torch.distributed as dist
    from labkit.running import ranks

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks.Rank(0, 0, 1, "here", torch.device("cpu"), "gloo")
    dist.destroy_process_group()


@pytest.fixture
def blocks():
    """The number of blocks of the small model that mesh_runs.py measures, which --preset tiny now names here, too."""
    import mesh_runs

    with mesh_runs.resized(**mesh_runs.BLOCKS):
        yield mesh_runs.BLOCKS["num_hidden_layers"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a folder with a stand-in for Slurm in bin/, first in PATH: commands that write their words to NAME.words."""
    from commands import command
    from labkit.running import launch, site

    commands = {
        "sinfo": "echo 'gpu* 2'",
        "sbatch": "echo 'Submitted batch job 7'",
        # One task, which runs here
        "srun": 'while case $1 in -*) true;; *) false;; esac; do shift; done; SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 exec "$@"',
    }
    for name, does in commands.items():
        command(tmp_path / "bin" / name, f"""printf '%s\\n' "$@" > '{tmp_path}/{name}.words'\n{does}""")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "FSDP_LABS_LAUNCHER"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(site, "SLURM_CONFS", ())
    monkeypatch.setattr(launch, "RUNS", tmp_path / "runs")
    return tmp_path


@pytest.fixture(scope="session")
def small_files():
    """Return {file: bytes} of a small, valid MNIST."""
    import small_mnist

    return small_mnist.files()


@pytest.fixture
def small(small_files, monkeypatch):
    """``small_files``, which from now on are what labkit takes for MNIST."""
    import small_mnist
    from labkit.training import datasets

    md5s = ((file, small_mnist.md5(data)) for file, data in small_files.items())
    monkeypatch.setattr(datasets, "RESOURCES", tuple(md5s))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*")
    return small_files


@pytest.fixture
def small_disk(tmp_path, require_all):
    """A file system of 8 MB. Only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True, text=True)
    if made.returncode:
        if require_all and os.geteuid() == 0:
            pytest.fail(made.stderr)
        pytest.skip("no file system can be made here")
    yield folder
    subprocess.run(["umount", folder], check=True)
