# SPDX-License-Identifier: BSD-3-Clause
"""Run a function on every rank, with its rank, local rank, world size, node, device, and backend.

A process becomes a rank in one of four ways, checked in this order:
  1. torchrun has started it, or a user has set all of ``VARIABLES``;
  2. it is a task of a Slurm step with several tasks (``srun --ntasks-per-node=4 python …``);
  3. otherwise ``run`` starts the ranks, as torchrun would;
  4. or, if one rank is enough, this process is the only rank.

Private PyTorch used here, and only here: ``_get_default_store``, to determine which rank failed first.
"""

import atexit
import contextlib
import ctypes
import importlib
import io
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from labkit import Diverged, UserError
from labkit.running import gpus, half_on_cpu, job_status, lab_options, preemption, progress, slurm

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RENDEZVOUS_SECONDS = 300  # how long ranks wait for one another: importing torch from a cold file system takes minutes
LINGER_SECONDS = 3  # how long a rank that lost contact waits to be ended before it exits
# Error messages of gloo and NCCL if another rank has failed
LOST_CONTACT = re.compile(r"gloo/transport|remote process exited|closed by remote peer", re.I)
LOOPBACK = "127.0.0.1"
# PyTorch looks up the host name of every connection's address. /etc/hosts seldom has this address's IPv6 form, so the
# query goes to a DNS server, and the C library waits five seconds for a lost reply (resolv.conf(5)).
QUICK_DNS = "timeout:1"
REPORTED = (UserError.exit_code, Diverged.exit_code, preemption.EXIT_REQUEUE)  # exit codes of ranks that print a reason
FAILED_KEY = "labkit/failed"  # in the store: number of ranks that have failed
REPORTED_KEY = "labkit/reported"  # in the store, once the first of them has printed the reason
LEFT_KEY = "labkit/left"  # in the store: number of failed ranks that will not ask it anything more


@dataclass(frozen=True)
class Rank:
    """One process of a distributed run."""

    rank: int  # 0 … world_size − 1, unique in the run
    local_rank: int  # 0 … (ranks on this node) − 1
    world_size: int
    node: str  # this machine's name
    device: torch.device  # where this rank computes
    backend: str  # "nccl" or "gloo"

    def say(self, *words):
        """Print on rank 0 only: N copies of a line are useless."""
        if self.rank == 0:
            print(*words, flush=True)


# Starting


def run(main, config):
    """Call ``main(config, rank)`` on every rank of the run, and start the ranks unless a launcher has.

    Never returns: the process exits with 0; with 2 after a user's error (or that error's own ``exit_code``); with 75 after
    preemption (preemption.py); with 1 after any other error.

    Args:
        main: called with ``config`` and a ``Rank``.
        config: has ``ranks`` (int or None), ``backend`` and ``device``; with ``strategy="single"`` one rank is enough.
    """
    if config.device == "cpu" or (config.backend == "gloo" and config.device == "auto"):
        gpus.hide()
    with _reporting_errors():
        place = placement(dict(os.environ))
        if getattr(config, "dry_run", False):
            _print_plan(config, place)
            _end(0)
        preemption.install_handlers(config)
        progress.report()
        if place:
            run_as_rank(place, main, config)
        else:
            device, _ = device_and_backend(config.device, config.backend)
            if (count := ranks_to_start(config, device, dict(os.environ))) > 1:
                start_here(count, device, main, config)
            else:
                rendezvous(0, 1, LOOPBACK, [0], "alone")
                run_as_rank((0, 0, 1), main, config)
    _end(0)


def _print_plan(config, place: tuple[int, int, int] | None):
    """Print the plan of the run, on one rank.

    place: this process's (rank, local rank, world size) if a launcher has started it.
    """
    device, _ = device_and_backend(config.device, config.backend)
    count = place[2] if place else ranks_to_start(config, device, dict(os.environ))
    page = lab_options.dry_run(config, count, device == "cuda")
    if not place or place[0] == 0:
        print(page, flush=True)


def run_as_rank(place: tuple[int, int, int], main, config):
    """Call ``main`` as the rank at ``place``: (rank, local rank, world size)."""
    # Buffer lines, even with python -u, so that the lines of several ranks do not mix.
    if isinstance(sys.stdout, io.TextIOWrapper):  # it has not been replaced
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    device, backend = device_and_backend(config.device, config.backend)
    rank = Rank(*place, socket.gethostname(), _own_device(device, local_rank=place[1]), backend)
    if getattr(config, "strategy", None) == "single" and rank.world_size > 1:
        raise UserError(f"--strategy single is one rank, but {rank.world_size} were started: choose another strategy")
    if config.ranks not in (None, rank.world_size):
        raise UserError(f"--ranks {config.ranks}, but {rank.world_size} ranks were started: leave --ranks out")
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
        if backend == "nccl" and rank.world_size > 1 and (store := _store_of_the_run()):
            gpus.check_one_each(rank, store, RENDEZVOUS_SECONDS)
    else:
        configure_cpu()
    main(config, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_to_start(config, device: str, environ: dict) -> int:
    """Return the number of ranks that a plain ``python script.py`` starts: --ranks, else one per visible GPU, else 2."""
    if getattr(config, "strategy", None) == "single":
        return 1
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and config.backend != "gloo" and (config.ranks or 1) > gpus:
        raise UserError(f"--ranks {config.ranks}, but {gpus} GPUs are visible: ask for at most {gpus}")
    # On the practice cluster, allocated GPUs are slots without hardware; each stands for a rank on the CPU.
    return config.ranks or gpus or slurm.gpus_granted(environ) or 2


def start_here(count: int, device: str, main, config):
    """Start ``count`` ranks on this machine, as ``torchrun --standalone`` does; exit if one of them fails.

    On Linux with the CPU the ranks are forked, so that they need not import torch again, which takes most of a short run's
    time. CUDA and macOS do not support forks; there, and with ``config.spawn``, each rank starts as a new process.
    """
    most = 64 * (os.cpu_count() or 1)
    if count > most:
        raise UserError(f"--ranks {count} on one machine of {os.cpu_count()} cores: give at most {most}")
    if not getattr(config, "quiet", False):
        print(f"starting {count} ranks, as torchrun --standalone --nproc-per-node {count}", *sys.argv, flush=True)
    fork = sys.platform == "linux" and device == "cpu" and not getattr(config, "spawn", False)
    if fork:  # DDP and FSDP import this when first used: import it once here instead of once per rank
        importlib.import_module("torch._dynamo")
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)  # failures are reported below
    job, start = uuid.uuid4().hex, random.randrange(12000, 30000)
    # Delay Ctrl-C until the forked ranks can handle it: Python ignores an exception that is raised while it forks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if fork else ())
    ranks = torch.multiprocessing.start_processes(
        _as_local_rank,
        (count, range(start, start + 8), job, os.getpid(), fork, main, config),
        count,
        join=False,
        start_method="fork" if fork else "spawn",
    )
    if getattr(config, "checkpoint", None):
        preemption.forward_signals(ranks.pids())
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while not ranks.join():  # it ends the others when one fails
            pass
    except KeyboardInterrupt:
        for pid in ranks.pids():  # one that was forked after Ctrl-C did not get it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        raise
    except torch.multiprocessing.ProcessExitedException as failure:
        if failure.exit_code in REPORTED:
            sys.exit(failure.exit_code)
        if failure.signal_name:  # it could not report that itself
            job_status.note("failed", job_status.node(), failure.error_index)
        how = (
            f"was killed by {failure.signal_name}"
            if failure.signal_name
            else f"ended with exit code {failure.exit_code}"
        )
        print(f"{program()}: rank {failure.error_index} {how}; the other ranks were ended", file=sys.stderr)
        warned = [each for each in preemption.WARNINGS if each.name == failure.signal_name]  # before its handlers
        sys.exit(128 + warned[0] if warned else 1)


def _as_local_rank(rank: int, count: int, ports, job: str, launcher: int, forked: bool, main, config):
    """Run one of the ranks that ``start_here`` has started. launcher: process id of the parent."""
    if forked:
        atexit._clear()  # the exit handlers of the launcher, inherited
    if os.getppid() != launcher:  # it ended before PyTorch could make this process end with it
        _end(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every rank: end without a traceback from each
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    preemption.install_handlers(config)  # (forked ranks inherit them)
    with _reporting_errors():
        rendezvous(rank, count, LOOPBACK, ports, job)
        run_as_rank((rank, rank, count), main, config)


# Rank and rendezvous


def placement(environ: dict) -> tuple[int, int, int] | None:
    """Return (rank, local rank, world size) of this process; None if no launcher has started it.

    Under a launcher that has no store of its own, this includes the rendezvous.

    Raises:
        UserError: the variables are incomplete or inconsistent: that is never a world of one.
    """
    step_tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1)
    # In an sbatch script and in salloc's shell SLURM_NTASKS is set too, but only a step has a step id.
    in_step = "SLURM_STEP_ID" in environ and step_tasks > 1
    present = [v for v in VARIABLES if v in environ]
    if "RANK" in environ or (present and not in_step):
        missing = [v for v in VARIABLES if v not in environ]
        if missing:
            raise UserError(
                f"{', '.join(present)} set but {', '.join(missing)} not: start with torchrun or srun, or unset them all"
            )
        rank, world_size, local_rank = (_number(environ, v) for v in VARIABLES[:3])
        if not 0 <= rank < world_size:
            raise UserError(f"RANK is {rank} and WORLD_SIZE {world_size}: a rank lies between 0 and the world size − 1")
        if "TORCHELASTIC_RUN_ID" not in environ:  # torchrun has its own rendezvous
            rendezvous(rank, world_size, environ["MASTER_ADDR"], [_number(environ, "MASTER_PORT")], "by hand")
        return rank, local_rank, world_size
    if not in_step:
        return None
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") != step_tasks:
        raise UserError(f"WORLD_SIZE is {environ['WORLD_SIZE']} but srun started {step_tasks} tasks: unset WORLD_SIZE")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    # Below the ephemeral range, and different for consecutive jobs and steps; the following ports if one is in use.
    start = 12000 + (job * 37 + step * 8) % 18000
    ports = [_number(environ, "MASTER_PORT")] if "MASTER_PORT" in environ else range(start, start + 8)
    rendezvous(rank, step_tasks, host, ports, f"slurm-{job}.{step}")
    return rank, local_rank, step_tasks


def _number(environ, name) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UserError(f"{name} must be a whole number, but is {environ.get(name)!r}") from None


def first_host(nodelist: str) -> str:
    """Return the first host name in a Slurm node list such as ``gpu[03-04,07],login1``."""
    if shutil.which("scontrol"):
        names = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, timeout=30)
        if names.stdout.split():
            return names.stdout.split()[0]
    # scontrol may be missing inside a container
    first = re.match(r"(?:[^][,]|\[[^][]+\])+(?=,|$)", nodelist)
    if not first:
        raise UserError(f"cannot read a host name from Slurm's node list {nodelist!r}: set MASTER_ADDR")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


_store = None  # rank 0's server lives as long as the process


def rendezvous(rank: int, world_size: int, host: str, ports, job: str):
    """Connect the ranks to a store on rank 0's node, and set the environment variables for it.

    Rank 0 opens the store on the first free port of ``ports``; the others try these ports until they find the store with
    the name of this job, so that other programs and jobs cannot interfere. Afterwards a plain
    ``init_process_group(backend)`` works as under torchrun.

    Args:
        rank, world_size: of this process.
        host: rank 0's node.
        ports: to try, in this order.
        job: a name that is unique to this run.

    Raises:
        UserError: no port is free, or rank 0 does not respond.
    """
    global _store
    if host == LOOPBACK:
        os.environ.setdefault("RES_OPTIONS", QUICK_DNS)
    _store = _open(world_size, ports) if rank == 0 else _find(host, ports, job)
    if rank == 0:
        _store.set("job", job)
    if host == LOOPBACK:
        _meet(rank, world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(_store.port))


def _meet(rank: int, world_size: int):
    """Let rank 0 go on when the others have found its store: if it refused the options before, they would lose it and say so."""
    if rank:
        _store.add("found", 1)
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while rank == 0 and _store.add("found", 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.005)


def _open(world_size, ports):
    for port in ports:
        try:
            # multi_tenant: init_process_group will also open a server on this port, and shares this one
            return dist.TCPStore(
                "localhost", port, world_size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except (dist.DistNetworkError, RuntimeError):
            continue
    if len(ports) > 1:  # this file's own choice
        raise UserError(f"ports {ports[0]} to {ports[-1]} are in use on {socket.gethostname()}: start the run again")
    raise UserError(f"port {ports[0]} is in use on {socket.gethostname()}: set MASTER_PORT to a free one")


def _find(host, ports, job):
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while time.monotonic() < deadline:
        for port in ports:
            store = _store_at(host, port, job)
            if store:
                return store
        time.sleep(0.1)
    raise UserError(
        f"rank 0 was not found at {host}, ports {list(ports)}, within {RENDEZVOUS_SECONDS} s: is it running?"
    )


def _store_at(host, port, job):
    """Return the store of this job at a port; None if the port is closed, another job's, or another program's."""
    return _connected(host, port, lambda store: store.get("job").decode() == job)


def _connected(host, port, is_ours=lambda store: True):
    """Return a client of the store at a port; None if there is none, or it is not ours."""
    try:
        socket.create_connection((host, port), timeout=2).close()  # fails faster than a store, and without a warning
    except OSError:
        return None
    stores = []

    def connect():
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
            if is_ours(store):
                stores.append(store)

    # In a daemon thread: a program that accepts connections and never replies would block forever.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(10)
    return stores[0] if stores else None


# Device


def device_and_backend(device: str, backend: str) -> tuple[str, str]:
    """Resolve --device and --backend to ("cuda" or "cpu", "nccl" or "gloo").

    Args:
        device: "auto", "cpu" or "cuda".
        backend: "auto", "nccl" or "gloo".

    Raises:
        UserError: they are not available here, or PyTorch does not see the machine's GPUs.
    """
    wants_gpu = device == "cuda" or (device == "auto" and backend != "gloo")
    if wants_gpu and not torch.cuda.is_available() and (reason := gpus.diagnose_missing_gpu(dict(os.environ))):
        raise UserError(reason)
    if device == "auto":
        device = "cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no GPU here: use --device cpu, or start on a GPU node")
    if backend == "nccl" and device != "cuda":
        raise UserError("--backend nccl needs GPUs, and PyTorch sees none here: use --backend gloo")
    return device, ("nccl" if device == "cuda" else "gloo") if backend == "auto" else backend


def _own_device(device: str, local_rank: int) -> torch.device:
    """Return the local rank's device. The modulo is for sites where each task sees only its own GPU, as number 0."""
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")


def configure_cpu():
    """Configure a rank on the CPU: its threads, bf16 and fp16 in fp32 where that is faster, and cached memory.

    It has OMP_NUM_THREADS threads, by default 1, since ranks share the cores.
    """
    threads = re.match(r"\s*0*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))  # may be empty, or a list: 4,1
    torch.set_num_threads(int(threads[1]) if threads else 1)
    half_on_cpu.compute_in_fp32()
    _cache_freed_memory()


def _cache_freed_memory():
    """Configure glibc to cache freed memory, as PyTorch's CUDA allocator does.

    By default it returns the memory of large tensors to the kernel, depending on dynamic thresholds, and the next step
    causes page faults again, which took a fifth of the time of a plain training loop. Without glibc (macOS, musl) this
    does nothing.
    """
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # 32 MiB, the most that every glibc takes
        mallopt(trim_threshold, 2**30)


def deprioritize_gloo_threads():
    """Keep gloo's threads, those of the process groups created so far, from preempting others (SCHED_BATCH; Linux only).

    When data arrives, gloo's thread tries the connection's lock, and polls until it gets it (gloo/transport/tcp/pair.cc).
    If its wakeup has preempted the thread that holds the lock, it polls for its whole time slice: a small all-gather of
    four ranks on two cores took 4 ms, and takes 0.9 ms with SCHED_BATCH. The ranks' own threads keep their policy: with
    SCHED_BATCH for them, too, ranks of healthy runs were named stragglers. PyTorch 2.11 does not name gloo's threads, so
    nothing changes there.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread has ended, or a sandbox forbids it
            if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


# Failing


@contextlib.contextmanager
def _reporting_errors():
    """Convert exceptions to one sentence or one traceback of the whole run, and to the exit code."""
    try:
        yield
    except UserError as error:
        exit_with_error(str(error), error.exit_code)
    except preemption.Preempted:
        _end(preemption.EXIT_REQUEUE)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _fail(error)


def program() -> str:
    """Return the name of the running script, for messages."""
    return os.path.basename(sys.argv[0])


def exit_with_error(sentence: str, code: int = UserError.exit_code):
    """Exit after a user's error, and print the message once for all ranks.

    Args:
        sentence: the message.
        code: the exit code.
    """
    store = _store_of_the_run()
    with contextlib.suppress(RuntimeError):  # the store ends with rank 0
        if _first_to_fail():
            print(f"{program()}: {sentence}", file=sys.stderr, flush=True)
            if event := {UserError.exit_code: "refused", Diverged.exit_code: "diverged"}.get(code):
                job_status.note(event)
            if store is not None:
                store.set(REPORTED_KEY, "")
        elif store is not None:  # the launcher ends all ranks when one exits: first the message must be printed
            store.wait([REPORTED_KEY], timedelta(seconds=LINGER_SECONDS))
    _leave_store()
    _exit(code)


def _fail(error: Exception):
    """Exit after any other error. The first rank to fail prints the reason; ranks that then lose contact print nothing."""
    first = _first_to_fail()
    lost_contact = not first or isinstance(error, dist.DistNetworkError) or LOST_CONTACT.search(str(error))
    if first:
        rank = os.environ.get("RANK", "0")
        if lost_contact:
            message = f"rank {rank} lost contact with another rank: {str(error).strip().splitlines()[0]}"
            if "connectFullMesh" in str(error):
                message += (
                    "\nIf no rank has failed, gloo may have chosen a network on which the nodes do not reach each other: "
                    "set GLOO_SOCKET_IFNAME to the right interface (ip -br addr lists them)"
                )
        else:
            message = f"rank {rank} failed:\n{traceback.format_exc()}"
            job_status.note("failed", job_status.node(), rank)
        print(f"{program()}: {message}", file=sys.stderr, flush=True)
    _leave_store()
    if lost_contact:  # the launcher must see the rank that failed first; then it ends this one
        time.sleep(LINGER_SECONDS)
    _exit(1)


def _first_to_fail() -> bool:
    """Return whether no other rank of this run has failed before. Call it once per rank, when it fails."""
    store = _store_of_the_run()
    if store is None:  # before the rendezvous: only this rank can report its error
        return True
    try:
        return store.add(FAILED_KEY, 1) == 1
    except RuntimeError:  # the store ended with rank 0, which has reported its error
        return False


def _store_of_the_run():
    """Return the store of the rendezvous; None before it."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if _store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agents share theirs
        store = _connected(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return store and dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    return _store


def _leave_store():
    """Leave the store of the run after a failure; rank 0, which hosts it, waits briefly until the others have left, too.

    A rank that asks a store which has ended prints a warning of some 50 lines, below the reason of the failure.
    """
    store = _store_of_the_run()
    if store is None:
        return
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
        left = store.add(LEFT_KEY, 1)
        while os.environ.get("RANK") == "0" and left < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(LEFT_KEY, 0)


def _exit(code: int):
    """Exit after a failure; immediately if there are other ranks, since a regular exit could wait for them forever."""
    sys.exit(code) if _store_of_the_run() is None else _end(code)


def _end(code: int):
    """Run the exit handlers (a logger's flush, the release of a folder) and end this process immediately.

    Python's regular exit would also spend a second on torch's teardown.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
