"""Start Python programs fast: fork them from a fork server, a process that has already imported torch.

Importing torch and FSDP takes most of a short run's time. ``start`` keeps one fork server and has it fork. The fork
executes the program with the argv, environment, working directory and output that ``start`` was given, in a session of
its own, and ends with the process that started it. The fork server imports third-party modules only: scripts, labkit and
planner are read anew for each program, so that an edit takes effect at once.

  FSDP_LABS_WARM     0: never fork, always start a new Python. Or the address of a fork server to share (tests
                     set it). Otherwise the first ``start`` starts one, which ends with this process.

Never used for what may compute on a GPU, which does not survive a fork, nor for what srun starts.
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
# Imported too if whoever starts the fork server has them, as its ranks will: they take longer than torch.
IF_IMPORTED = ("peft", "transformers.modeling_utils")
# What Python and the libraries read while they are imported: a program that wants other values must import them itself.
READ_AT_IMPORT = (
    "PYTHON",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "TORCH_",
    "TORCHDYNAMO_",
    "HF_",
    "TRANSFORMERS_",
)
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
PREFIX = "fsdp-labs-"  # of every address
IMPORTED_WITH = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_IMPORT)}
END_SECONDS = 20  # how long a program may take to end after SIGTERM
NUMBER = struct.Struct("!q")


def possible(environ=os.environ) -> bool:
    """Return whether a program with this environment can be forked here."""
    none = not any(Path(file).exists() for file in GPU_FILES) or environ.get("CUDA_VISIBLE_DEVICES") == ""
    return sys.platform == "linux" and environ.get(VARIABLE) != "0" and none


def start(words: list[str], cwd, env: dict, stdout, stderr) -> "Process":
    """Start ``python words[1:]``; words[0] is this Python. stdout, stderr: open files, which need a descriptor.

    Raises:
        UserError: the fork server ended while it was starting. What it printed is on this process's stderr.
    """
    request = pickle.dumps((words, str(cwd), dict(env)))
    try:
        connection = _connected()
        socket.send_fds(connection, [NUMBER.pack(len(request))], [stdout.fileno(), stderr.fileno()])
        connection.sendall(request)
        return Process(words, connection)
    except ConnectionError:
        raise UserError(
            "the process from which programs are forked ended while it imported PyTorch: see its error, or set "
            f"{VARIABLE}=0, which starts every program by itself"
        ) from None


def _connected() -> socket.socket:
    connection, shared = socket.socket(socket.AF_UNIX), os.environ.get(VARIABLE, "")
    try:
        connection.connect("\0" + (shared if shared.startswith(PREFIX) else address()))
    except ConnectionRefusedError:  # somebody has ended it
        address.cache_clear()
        connection.connect("\0" + address())
    return connection


class Process:
    """A program that was forked, with what ``subprocess.Popen`` has: pid (leader of its group), poll, wait."""

    def __init__(self, words, connection):
        self.args, self.returncode = words, None
        self._connection = connection
        self.pid = _received(connection)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as ``Popen.wait`` does. timeout: seconds; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = _received(self._connection)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def _received(connection) -> int:
    data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(data) < NUMBER.size:
        raise ConnectionError(f"the fork server has ended (set {VARIABLE}=0 to do without one)")
    return NUMBER.unpack(data)[0]


@functools.cache
def address(*modules: str) -> str:
    """Return the address of this process's own fork server; the first call starts it. modules: more modules for it to import."""
    name = PREFIX + secrets.token_hex(16)
    words = [sys.executable, "-u", "-m", "labkit.running.fork_server", name, *modules]
    words += [module for module in IF_IMPORTED if module in sys.modules]
    # It ends when its standard input does: with this process, however that ends. A group of its own keeps Ctrl-C away.
    folder = Path(__file__).resolve().parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": ""
    }  # or what it imports might look for GPUs, which spoils them for forks
    process = subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **pipes)
    process.stdout.readline()  # it listens
    _kept.append(process)
    return name


_kept = []  # a Popen that is forgotten closes its pipes


# The fork server


def serve(name: str, *modules: str) -> tuple:
    """Import, listen, and fork for every request. Returns the request, in each fork only."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)  # an abstract name: no file to clean up; who may connect is checked
    listener.listen(64)
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks: let the kernel
    for module in (*MODULES, *modules):
        importlib.import_module(module)
    gc.freeze()  # garbage collection in the forks skips today's objects, so that their pages stay shared
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            listener.close()
            return supervise(connection)
        connection.close()


def supervise(connection) -> tuple:
    """Fork the program and supervise it: report its exit code, and end it if its starter is gone. Returns in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, outputs, _, _ = socket.recv_fds(connection, NUMBER.size, 2)
    (size,) = NUMBER.unpack(header)
    request = pickle.loads(connection.recv(size, socket.MSG_WAITALL))
    program = os.fork()
    if program == 0:
        os.setsid()
        connection.sendall(NUMBER.pack(os.getpid()))
        connection.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in zip((nothing, *outputs), (0, 1, 2), strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        return request
    for descriptor in outputs:
        os.close(descriptor)
    over = os.pidfd_open(program)
    if over not in select.select([over, connection], [], [])[0]:  # nobody waits for it any more
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGTERM)
            if not select.select([over], [], [], END_SECONDS)[0]:
                os.killpg(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def exec_program(words: list[str], cwd: str, env: dict):
    """Execute the program: in this process if its imports would be the same, else in a new Python."""
    os.chdir(cwd)
    python, unbuffered, *rest = words
    as_imported = {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)} == IMPORTED_WITH
    if os.path.normpath(python) != sys.executable or unbuffered != "-u" or not as_imported:
        os.execve(python, words, env)
    os.environ.clear()
    os.environ.update(env)
    atexit.register(gc.unfreeze)  # what is frozen as Python ends counts as leaked
    for module in [name for name in sys.modules if name.partition(".")[0] in ("labkit", "planner")]:
        del sys.modules[module]
    code = 0
    try:
        if rest[0] == "-m":
            sys.argv, sys.path[0] = rest[1:], cwd
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = rest, str(Path(rest[0]).resolve().parent)
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as left:
        code = left.code
    end(code)


def end(code):
    """Exit as Python does after ``sys.exit(code)``, without the second that it takes to tear torch down."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # private: tells pools of threads that it is over, and waits for all that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    exec_program(*serve(*sys.argv[1:]))
