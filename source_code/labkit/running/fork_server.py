# SPDX-License-Identifier: BSD-3-Clause
"""Start Python programs fast: fork them from a fork server, a process that has already imported torch.

Importing torch and FSDP takes most of a short run's time. ``start`` keeps one fork server running. Each fork executes
the program with the argv, environment, working directory, and output passed to ``start``, in a session of its own, and
ends with the process that started it. The fork server imports third-party modules only: each program imports scripts,
labkit, and planner itself, so that an edit takes effect at once. Of the rest of a short run the first step takes much,
so in forks DTensor propagates shardings once for parameters that are alike (labkit/measuring/foreach_sharding.py).

  FSDP_LABS_WARM     0: never fork, always start a new Python. Or the address of a fork server to share (tests
                     set it). Otherwise the first ``start`` starts one, which ends with this process.

Not used for programs that may compute on a GPU, because CUDA does not survive a fork, or that srun starts.
This file is also the program that the fork server runs.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from labkit import UserError

VARIABLE = "FSDP_LABS_WARM"
MODULES = (
    "cloudpickle",
    "tqdm",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.profiler",
    "torchvision.datasets",
)
# Also imported if the process that starts the fork server has them, since its ranks will: they take longer than torch.
IF_IMPORTED = ("peft", "transformers.modeling_utils")
# Variables that Python and libraries read at import: a program with other values must import them itself.
READ_AT_IMPORT = (
    "PYTHON",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "ATEN_",
    "DNNL_",
    "ONEDNN_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH_",
    "TORCHDYNAMO_",
    "HF_",
    "TRANSFORMERS_",
)
READ_LATER = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_DIST_NAN_CHECK")  # not only at import
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
PREFIX = "fsdp-labs-"  # of all addresses
END_SECONDS = 20  # how long a program may take to end after SIGTERM
NUMBER = struct.Struct("!q")


def _read_at_import(environ) -> dict:
    return {
        name: value for name, value in environ.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }


IMPORTED_WITH = _read_at_import(os.environ)


def possible(environ=os.environ) -> bool:
    """Return whether a program with this environment can be forked here."""
    no_gpus = not any(Path(file).exists() for file in GPU_FILES) or environ.get("CUDA_VISIBLE_DEVICES") == ""
    return sys.platform == "linux" and environ.get(VARIABLE) != "0" and no_gpus and _can_watch()


@functools.cache
def _can_watch() -> bool:
    """Return whether a process can wait for another by a file descriptor: some containers and Pythons do not allow it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def start(words: list[str], cwd, env: dict, stdout, stderr) -> "Process":
    """Start a Python program in a fork.

    Args:
        words: the command; words[0] is this Python.
        cwd: its working directory.
        env: its environment.
        stdout, stderr: open files with descriptors.

    Raises:
        UserError: the fork server ended while it was starting. Its output is on this process's stderr.
    """
    request = pickle.dumps((words, str(cwd), dict(env)))
    try:
        connection = _connected()
        socket.send_fds(connection, [NUMBER.pack(len(request))], [stdout.fileno(), stderr.fileno()])
        connection.sendall(request)
        return Process(words, connection)
    except ConnectionError:
        raise UserError(
            "the fork server ended while it imported PyTorch: see its error above, or set "
            f"{VARIABLE}=0 to start every program without it"
        ) from None


def _connected() -> socket.socket:
    connection, shared = socket.socket(socket.AF_UNIX), os.environ.get(VARIABLE, "")
    try:
        connection.connect("\0" + (shared if shared.startswith(PREFIX) else address()))
    except ConnectionRefusedError:  # it was killed
        address.cache_clear()
        connection.connect("\0" + address())
    return connection


class Process:
    """A forked program, with the interface of ``subprocess.Popen``: pid (leader of its group), poll, wait."""

    def __init__(self, words, connection):
        self.args, self.returncode = words, None
        self._connection = connection
        self.pid = _received(connection)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program and return its exit code, as ``Popen.wait`` does.

        Args:
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = _received(self._connection)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def _received(connection) -> int:
    data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(data) < NUMBER.size:
        raise ConnectionError(f"the fork server has ended (set {VARIABLE}=0 to run without one)")
    return NUMBER.unpack(data)[0]


@functools.cache
def address(*modules: str) -> str:
    """Return the address of this process's own fork server; the first call starts it.

    Args:
        modules: further modules for it to import.
    """
    name = PREFIX + secrets.token_hex(16)
    words = [sys.executable, "-u", "-m", "labkit.running.fork_server", name, *modules]
    words += [module for module in IF_IMPORTED if module in sys.modules]
    # It ends when its standard input is closed, which happens whenever this process ends. Its own session shields it
    # from Ctrl-C.
    folder = Path(__file__).resolve().parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # or an import might initialize CUDA, which forks could not use
    process = subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **pipes)
    process.stdout.readline()  # wait until it listens
    _started.append(process)
    return name


_started = []  # a Popen without references closes its pipes


# The fork server


def serve(name: str, *modules: str) -> tuple:
    """Import the modules, listen, and fork for every request. Returns only in the forks: the request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)  # an abstract name: no file to clean up; the user of a connection is checked below
    listener.listen(64)
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    for module in (*MODULES, *modules):
        importlib.import_module(module)
    _drop_exit_handlers()
    gc.freeze()  # garbage collection in the forks skips these objects, so that their pages stay shared
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            listener.close()
            return supervise(connection)
        connection.close()


def _drop_exit_handlers():
    """Remove the exit handlers of the imported modules: each fork would spend 25 ms on cleaning up before it ends anyway.

    PyTorch unregisters each operator that Python has added, and logs what it has compiled. Private: the registry of
    finalizers, and the name of the logging function. Where one is missing, its handlers run.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    atexit.unregister(getattr(sys.modules.get("torch._dynamo.utils"), "dump_compile_times", None))


def supervise(connection) -> tuple:
    """Fork the program, report its exit code, and end it if its starter ends. Returns only in the program: the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, outputs, _, _ = socket.recv_fds(connection, NUMBER.size, 2)
    (size,) = NUMBER.unpack(header)
    request = pickle.loads(connection.recv(size, socket.MSG_WAITALL))
    program = os.fork()
    if program == 0:
        os.setsid()
        connection.sendall(NUMBER.pack(os.getpid()))
        connection.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in zip((null, *outputs), (0, 1, 2), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        return request
    for descriptor in outputs:
        os.close(descriptor)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, connection], [], [])[0]:  # its starter has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGTERM)
            if not select.select([ended], [], [], END_SECONDS)[0]:
                os.killpg(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def exec_program(words: list[str], cwd: str, env: dict):
    """Execute the program: in this process if its environment allows the same imports, else in a new Python."""
    os.chdir(cwd)
    python, unbuffered, *rest = words
    if os.path.normpath(python) != sys.executable or unbuffered != "-u" or _read_at_import(env) != IMPORTED_WITH:
        os.execve(python, words, env)
    os.environ.clear()
    os.environ.update(env)
    importlib.import_module("torch.distributed").set_debug_level_from_env()
    atexit.register(gc.unfreeze)  # objects still frozen at exit count as leaked
    quick = importlib.import_module("labkit.measuring.foreach_sharding").once_for_alike()
    for module in [name for name in sys.modules if name.partition(".")[0] in ("labkit", "planner")]:
        del sys.modules[module]
    code = 0
    try:
        with quick:
            if rest[0] == "-m":
                sys.argv, sys.path[0] = rest[1:], cwd
                runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv, sys.path[0] = rest, str(Path(rest[0]).resolve().parent)
                runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code
    end(code)


def end(code):
    """Exit as Python does after ``sys.exit(code)``, without spending a second on torch's teardown."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # private: notifies thread pools, and waits for all threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    exec_program(*serve(*sys.argv[1:]))
