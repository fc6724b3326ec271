# SPDX-License-Identifier: BSD-3-Clause
"""A program forked from a fork server is the program that a new Python would be, and ends when it should."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import nbformat
import psutil
import pytest
from conftest import SOURCE
from labkit import UserError
from labkit.running import fork_server, launch
from nbclient import NotebookClient

pytestmark = pytest.mark.skipif(not fork_server.possible(), reason="programs are not forked here (no Linux, or GPUs)")

SHOW = """
import os, random, sys
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("GIVEN"), os.getsid(0) == os.getpid(), flush=True)
print("to stderr", file=sys.stderr, flush=True)
print(sys.stdin.read() + "read", "forked" if "torch" in sys.modules else "started")
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path):
    """A function: write a program, start it, and return (process, function that reads its stdout and stderr)."""
    path, outputs = tmp_path / "program.py", [tmp_path / "out", tmp_path / "err"]
    started = []

    def start(code, *words, python=sys.executable, **env):
        path.write_text(code)
        with outputs[0].open("w") as out, outputs[1].open("w") as err:
            process = fork_server.start([python, "-u", str(path), *words], SOURCE, os.environ | env, out, err)
        started.append(process)
        return process, lambda: [output.read_text() for output in outputs]

    yield start
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)


def test_it_is_what_python_would_have_started(program, tmp_path):
    process, read = program(SHOW, "a word", "--flag", GIVEN="for it")
    assert process.wait(60) == 3 == process.poll()
    forked, said = read()
    new = subprocess.run(
        [sys.executable, "-u", tmp_path / "program.py", "a word", "--flag"],
        cwd=SOURCE,
        env=os.environ | {"GIVEN": "for it"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    assert new.returncode == 3 and new.stdout.endswith("started\n")
    assert (forked.replace("forked", "started"), said) == (new.stdout, new.stderr)
    assert "forked" in forked


@pytest.mark.parametrize(
    "when", ["as Python starts", pytest.param("after it has imported torch", marks=pytest.mark.long)]
)
def test_a_warm_process_that_cannot_start_is_one_sentence(when, program, monkeypatch):
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)  # that of all tests
    if when == "as Python starts":
        monkeypatch.setattr(sys, "executable", "/bin/false")
    else:
        monkeypatch.setitem(sys.modules, "no_such_module", ModuleType("no_such_module"))
        monkeypatch.setattr(fork_server, "IF_IMPORTED", ("no_such_module",))
    fork_server.address.cache_clear()
    try:
        with pytest.raises(UserError, match="ended while it imported PyTorch: .* FSDP_LABS_WARM=0"):
            program("print('never')")
    finally:
        fork_server.address.cache_clear()


def test_what_is_edited_counts_at_once(program):
    for number in (1, 2):
        process, read = program(f"print({number})")
        assert process.wait(60) == 0 and read()[0] == f"{number}\n"
    process, read = program("import sys; print([name for name in sys.modules if name.startswith('labkit')])")
    assert process.wait(60) == 0 and read()[0] == "[]\n"  # no part of labkit is older than the program


def test_each_draws_numbers_of_its_own(program):
    drawn = []
    for _ in range(2):
        process, read = program("import random; print(random.random())")
        process.wait(60)
        drawn.append(read()[0])
    assert drawn[0] != drawn[1] != f"{random.random()}\n"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONHASHSEED"])
def test_what_is_read_at_import_starts_a_new_python(program, name):
    """A fork would keep what the fork server was started with."""
    process, read = program("import sys; print('torch' in sys.modules)", **{name: "3"})
    assert process.wait(60) == 0 and read()[0] == "False\n"


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_the_level_of_distributed_checks_is_read_again(program, level):
    code = "import sys; forked = 'torch' in sys.modules; import torch.distributed as dist; print(forked, dist.get_debug_level())"
    process, read = program(code, TORCH_DISTRIBUTED_DEBUG=level)
    assert process.wait(60) == 0 and read()[0] == f"True DebugLevel.{level}\n"


def test_python_by_a_roundabout_path_is_the_same_python(program):
    """As in ``cd source_code && ../.venv/bin/python ladder.py``."""
    folder, name = os.path.split(sys.executable)
    process, read = program("import sys; print('torch' in sys.modules)", python=f"{folder}/../bin/{name}")
    assert process.wait(60) == 0 and read()[0] == "True\n"


def test_an_error_is_a_traceback_and_exit_code_1(program):
    process, read = program("raise ValueError('a bad day')")
    assert process.wait(60) == 1
    assert read()[1].startswith("Traceback") and read()[1].endswith("ValueError: a bad day\n")


LAST = """
import atexit, concurrent.futures, threading
atexit.register(print, "at the exit")
atexit.pool = concurrent.futures.ThreadPoolExecutor(1)  # whose thread waits for work until Python ends
atexit.pool.submit(int)
said = threading.Event()
threading.Thread(target=lambda: (said.wait(), threading.Event().wait(0.1), print("a thread"))).start()
print("the last line", end=" ")
said.set()
"""


def test_what_is_to_be_done_at_its_end_is_done(program):
    process, read = program(LAST)
    assert process.wait(60) == 0 and read() == ["the last line a thread\nat the exit\n", ""]


LEAVES = [("", 0, ""), ("None", 0, ""), ("True", 1, ""), ("3", 3, ""), ("'a sentence'", 1, "a sentence\n")]


@pytest.mark.parametrize("given, code, said", LEAVES, ids=[leave[0] or "nothing" for leave in LEAVES])
def test_it_leaves_as_python_does(given, code, said, program):
    process, read = program(f"{LAST}import sys; sys.exit({given})")
    assert process.wait(60) == code and read() == ["the last line a thread\nat the exit\n", said]


WAIT = "import time; print('here', flush=True); time.sleep(600)"


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_can_be_told_to_end(program):
    process, read = program(WAIT)
    wait_for(lambda: read()[0])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert not psutil.pid_exists(process.pid)


ASK = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from labkit.running import fork_server
process = fork_server.start([sys.executable, "-u", sys.argv[1]], ".", __import__("os").environ, sys.stdout, sys.stderr)
print(process.pid, fork_server.address() if sys.argv[2] == "own" else "", flush=True)
process.wait()
"""


@pytest.mark.long
@pytest.mark.parametrize("whose", ["own", "shared"])
def test_it_ends_with_who_asked_for_it_however_that_ends(whose, tmp_path):
    """And so does the fork server, if it was made for who asked."""
    (tmp_path / "wait.py").write_text(WAIT.replace("print('here', flush=True); ", ""))
    env = {name: value for name, value in os.environ.items() if whose == "shared" or name != fork_server.VARIABLE}
    words = [sys.executable, "-c", ASK, tmp_path / "wait.py", whose]
    asking = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    pid, *address = asking.stdout.readline().split()
    assert psutil.pid_exists(int(pid))
    asking.kill()
    asking.communicate(timeout=60)
    wait_for(lambda: not psutil.pid_exists(int(pid)))
    if address:
        wait_for(lambda: not [p for p in psutil.process_iter(["cmdline"]) if address[0] in (p.info["cmdline"] or ())])


def test_only_its_user_may_ask(program):
    if os.getuid():
        pytest.skip("it takes root to be another user")
    another = ["setpriv", "--reuid=65534", "/usr/bin/env", "python3", "-c"]
    if subprocess.run([*another, ""], capture_output=True, timeout=60).returncode:
        pytest.skip("no Python that another user may start")
    ask = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({chr(0) + os.environ[fork_server.VARIABLE]!r}); print(s.recv(1))"
    asked = subprocess.run([*another, ask], capture_output=True, timeout=60)
    assert asked.stdout.strip() in (b"b''", b""), asked
    assert b"b''" in asked.stdout or b"ConnectionReset" in asked.stderr, asked.stderr


def test_a_notebooks_kernel_is_forked_shows_figures_and_can_be_interrupted(monkeypatch):
    """In ``make test``; CI's kernels start as a learner's do (conftest.py)."""
    monkeypatch.setenv("JUPYTER_PATH", str(Path(__file__).with_name("jupyter")))
    seconds = {
        "import sys; print('torchvision' in sys.modules)": 60,
        "import matplotlib.pyplot as plt; plt.plot([1, 2]);": 60,
        "while True: pass": 1,
        "print('goes on')": 60,
    }
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in seconds])
    limits = {"timeout_func": lambda cell: seconds[cell.source], "interrupt_on_timeout": True, "allow_errors": True}
    NotebookClient(notebook, kernel_name="python3", **limits).execute()
    forked, figure, endless, last = ([dict(output) for output in cell.outputs] for cell in notebook.cells)
    assert forked[0]["text"] == "True\n" and any("image/png" in output["data"] for output in figure)
    assert endless[0]["ename"] == "KeyboardInterrupt" and last[0]["text"] == "goes on\n"


def test_where_it_is_never_used(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server, "GPU_FILES", ())
    assert fork_server.possible({}) and not fork_server.possible({fork_server.VARIABLE: "0"})
    monkeypatch.setattr(fork_server, "GPU_FILES", (str(tmp_path),))
    assert not fork_server.possible({}) and not fork_server.possible({"CUDA_VISIBLE_DEVICES": "0"})
    assert fork_server.possible({"CUDA_VISIBLE_DEVICES": ""})  # it is meant for the CPU
    refused = OSError(1, "as in some containers")
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(refused))
    fork_server._can_watch.cache_clear()
    assert not fork_server.possible({"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.undo()
    fork_server._can_watch.cache_clear()


def test_on_a_machine_with_gpus_runs_on_the_cpu_are_forked_and_no_others(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server, "GPU_FILES", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    forked = []
    monkeypatch.setattr(fork_server, "start", lambda words, *rest: forked.append(words) or subprocess.Popen(["true"]))
    for device in ("cpu", "cuda", "auto"):
        launch.follow([sys.executable, "-c", "print()"], device=device)
    assert len(forked) == 1


@pytest.mark.long
@pytest.mark.parametrize("value", ["fsdp-labs-that-has-ended", "1"])
def test_without_one_to_share_there_is_one_of_its_own(value, program, monkeypatch):
    """The second value uses the fork server that the first has started."""
    monkeypatch.setenv(fork_server.VARIABLE, value)
    process, read = program("import sys; print('torch' in sys.modules)")
    assert process.wait(60) == 0 and read()[0] == "True\n"


@pytest.mark.parametrize("setting", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_lab_says_the_same_command_either_way(setting, monkeypatch, capsys, tmp_path):
    if setting == "0":
        monkeypatch.setenv(fork_server.VARIABLE, "0")
    forks = []
    monkeypatch.setattr(
        fork_server, "start", lambda *given, real=fork_server.start: forks.append(given) or real(*given)
    )
    cluster = launch.Cluster(launcher="local")
    options = {"cluster": cluster, "record": tmp_path / "run.json", "on_progress": lambda *_: None, "max_steps": 2}
    launch.run("gpt_fsdp.py", device="cpu", ranks=2, **options)
    assert len(forks) == int(setting)
    assert capsys.readouterr().out.startswith("$ python gpt_fsdp.py --ranks 2 --device cpu --max-steps 2 \\\n")
