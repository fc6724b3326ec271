"""Who am I: rank, local rank, world size, node, device and backend, from torchrun's or Slurm's variables.

A process becomes a rank in one of four ways, looked for in this order:
  1. torchrun, or a hand that set all of ``VARIABLES``;
  2. a Slurm step of several tasks (``srun --ntasks-per-node=4 python …``), one rank a task;
  3. otherwise nobody has started the ranks, and ``run`` does, as torchrun would;
  4. or, where one rank is enough, this process is the only one.

Private PyTorch used here, and only here: ``_get_default_store``, to learn which rank failed first.
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

import torch
import torch.distributed as dist
import torch.multiprocessing

from labkit import Diverged, UserError
from labkit.running import gpus, job_status, lab_options, preemption, progress

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RENDEZVOUS_SECONDS = 300  # how long ranks wait for one another: a cold file system takes minutes to import torch
LINGER_SECONDS = 3  # how long a rank that lost contact waits to be ended before it ends itself
# What gloo and NCCL say when it was another rank that failed
LOST_CONTACT = re.compile(r"gloo/transport|remote process exited|closed by remote peer", re.I)
LOOPBACK = "127.0.0.1"
# PyTorch asks for the name behind the address of every connection. /etc/hosts seldom has this one's IPv6 form, so the
# question goes to a name server, and the C library waits five seconds for an answer that is lost (resolv.conf(5)).
QUICK_DNS = "timeout:1"
TOLD = (UserError.exit_code, Diverged.exit_code, preemption.EXIT_REQUEUE)  # exit codes of a rank that has said why
FAILED = "labkit/failed"  # at the store: how many ranks have failed
SAID = "labkit/said"  # at the store, once the first of them has said why


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
        """Print, on rank 0 only: N copies of a line help nobody."""
        if self.rank == 0:
            print(*words, flush=True)


# Starting


def run(main, config):
    """Call ``main(config, rank)`` in every rank of the run, starting the ranks where nobody has.

    config: has ``ranks`` (int or None), ``backend`` and ``device``; with ``strategy="single"`` one rank is enough.
    Never returns: the process exits with 0, with 2 after a user's error (or that error's own ``exit_code``), with 75
    where it was asked to end (preemption.py), with 1 after any other error.
    """
    if config.device == "cpu" or (config.backend == "gloo" and config.device == "auto"):
        gpus.hide()
    with _failing_tidily():
        place = placement(dict(os.environ))
        if getattr(config, "dry_run", False):
            _print_plan(config, place)
            _end(0)
        preemption.install_handlers(config)
        progress.report()
        if place:
            be_rank(place, main, config)
        else:
            device, _ = device_and_backend(config.device, config.backend)
            if (count := ranks_to_start(config, device, dict(os.environ))) > 1:
                start_here(count, device, main, config)
            else:
                rendezvous(0, 1, LOOPBACK, [0], "alone")
                be_rank((0, 0, 1), main, config)
    _end(0)


def _print_plan(config, place: tuple[int, int, int] | None):
    """Print, once, the plan of the run that ``run`` would be. place: of this process, where a launcher has started it."""
    device, _ = device_and_backend(config.device, config.backend)
    count = place[2] if place else ranks_to_start(config, device, dict(os.environ))
    page = lab_options.dry_run(config, count, device == "cuda")
    if not place or place[0] == 0:
        print(page, flush=True)


def be_rank(place: tuple[int, int, int], main, config):
    """Call ``main`` as the rank at ``place``: (rank, local rank, world size)."""
    # A line at a time, though Python was told not to buffer: the lines of several ranks would mix.
    if isinstance(sys.stdout, io.TextIOWrapper):  # nobody has put something else in its place
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
        compute_as_one_of_several()
    main(config, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_to_start(config, device: str, environ: dict) -> int:
    """How many ranks a plain ``python script.py`` starts: one per visible GPU, else --ranks (default 2)."""
    if getattr(config, "strategy", None) == "single":
        return 1
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and config.backend != "gloo" and (config.ranks or 1) > gpus:
        raise UserError(f"--ranks {config.ranks}, but {gpus} GPUs are visible: ask for at most {gpus}")
    # On the practice cluster the granted GPUs are slots without hardware; CPU ranks stand in for them.
    granted = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    return config.ranks or gpus or granted or 2


def start_here(count: int, device: str, main, config):
    """Do what ``torchrun --standalone`` does: start ``count`` ranks on this machine; exit if one of them fails.

    On Linux and the CPU the ranks are forked: they need not import torch again, which is most of a short
    run's time. CUDA and macOS do not survive a fork; there, and if ``config.spawn`` asks for it, each rank starts as a
    new process.
    """
    most = 64 * (os.cpu_count() or 1)
    if count > most:
        raise UserError(f"--ranks {count} on one machine of {os.cpu_count()} cores: give at most {most}")
    if not getattr(config, "quiet", False):
        print(f"starting {count} ranks, as torchrun --standalone --nproc-per-node {count}", *sys.argv, flush=True)
    fork = sys.platform == "linux" and device == "cpu" and not getattr(config, "spawn", False)
    if fork:  # DDP and FSDP import this when first used: once here, not once a rank
        importlib.import_module("torch._dynamo")
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)  # the report is ours to make
    job, start = uuid.uuid4().hex, random.randrange(12000, 30000)
    ranks = torch.multiprocessing.start_processes(
        _as_local_rank,
        (count, range(start, start + 8), job, os.getpid(), main, config),
        count,
        join=False,
        start_method="fork" if fork else "spawn",
    )
    if getattr(config, "checkpoint", None):
        preemption.forward_signals(ranks.pids())
    try:
        while not ranks.join():  # it ends the others when one fails
            pass
    except torch.multiprocessing.ProcessExitedException as failure:
        if failure.exit_code in TOLD:
            sys.exit(failure.exit_code)  # the rank has said what is wrong, or that it was asked to end
        if failure.signal_name:  # it could not say so itself
            job_status.note("failed", job_status.node(), failure.error_index)
        how = (
            f"was killed by {failure.signal_name}"
            if failure.signal_name
            else f"ended with exit code {failure.exit_code}"
        )
        print(f"{program()}: rank {failure.error_index} {how}; the other ranks were ended", file=sys.stderr)
        warned = [each for each in preemption.WARNINGS if each.name == failure.signal_name]  # before it could listen
        sys.exit(128 + warned[0] if warned else 1)


def _as_local_rank(rank: int, count: int, ports, job: str, launcher: int, main, config):
    """What each process that ``start_here`` makes does. launcher: its process."""
    atexit._clear()  # what the launcher is to do at its end is not this process's to do, though it was forked from it
    if os.getppid() != launcher:  # it has ended before PyTorch could see to it that this one ends with it
        _end(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every rank: end, without a traceback from each
    preemption.install_handlers(config)  # (a rank that was forked does already)
    with _failing_tidily():
        rendezvous(rank, count, LOOPBACK, ports, job)
        be_rank((rank, rank, count), main, config)


# Finding one's place


def placement(environ: dict) -> tuple[int, int, int] | None:
    """(rank, local rank, world size) of this process, or None if nobody has started the ranks.

    Half a set of variables is an error, never a world of one.
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
        if "TORCHELASTIC_RUN_ID" not in environ:  # torchrun's agents have met already
            rendezvous(rank, world_size, environ["MASTER_ADDR"], [_number(environ, "MASTER_PORT")], "by hand")
        return rank, local_rank, world_size
    if not in_step:
        return None
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    if "WORLD_SIZE" in environ and _number(environ, "WORLD_SIZE") != step_tasks:
        raise UserError(f"WORLD_SIZE is {environ['WORLD_SIZE']} but srun started {step_tasks} tasks: unset WORLD_SIZE")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    # Below the ephemeral range, and different for neighbouring jobs and steps; the next ones if it is in use.
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
    """The first name in a Slurm node list such as ``gpu[03-04,07],login1``."""
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
    """Make the ranks meet at a store on rank 0's node, and say in the environment where it is.

    Rank 0 opens it on the first free port of ``ports``; the others look through them for the store that
    carries the name of this job, so that another program, or another job, in the way does no harm.
    After it, a plain ``init_process_group(backend)`` works as it does under torchrun.
    """
    global _store
    if host == LOOPBACK:
        os.environ.setdefault("RES_OPTIONS", QUICK_DNS)
    _store = _open(world_size, ports) if rank == 0 else _find(host, ports, job)
    if rank == 0:
        _store.set("job", job)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(_store.port))


def _open(world_size, ports):
    for port in ports:
        try:
            # multi_tenant: init_process_group will ask for a server on this port too, and shares this one
            return dist.TCPStore(
                "localhost", port, world_size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except (dist.DistNetworkError, RuntimeError):
            continue
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
    """The store of this job at a port, or None if there is none, another job's, or another program."""
    return _connected(host, port, lambda store: store.get("job").decode() == job)


def _connected(host, port, is_ours=lambda store: True):
    """A client of the store at a port, or None if there is none that is ours."""
    try:
        socket.create_connection((host, port), timeout=2).close()  # quicker to say no than a store, and quietly
    except OSError:
        return None
    found = []

    def ask():
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
            if is_ours(store):
                found.append(store)

    # In a thread that can be left behind: a program that accepts and never answers would hold us for ever.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    return found[0] if found else None


# Device


def device_and_backend(device: str, backend: str) -> tuple[str, str]:
    """("cuda" or "cpu", "nccl" or "gloo") for the wishes given, each of which may be "auto"."""
    wanted = device == "cuda" or (device == "auto" and backend != "gloo")
    if wanted and not torch.cuda.is_available() and (reason := gpus.why_unseen(dict(os.environ))):
        raise UserError(reason)
    if device == "auto":
        device = "cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no GPU here: use --device cpu, or start on a GPU node")
    if backend == "nccl" and device != "cuda":
        raise UserError("--backend nccl needs GPUs, and PyTorch sees none here: use --backend gloo")
    return device, ("nccl" if device == "cuda" else "gloo") if backend == "auto" else backend


def _own_device(device: str, local_rank: int) -> torch.device:
    """The local rank's. Where a site gives each task one GPU, every rank calls its own 0: hence the modulo."""
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")


def compute_as_one_of_several():
    """On the CPU: with one thread unless told otherwise, as the ranks of one machine share its cores."""
    told = re.match(r"\s*0*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))  # may be empty, or a list: 4,1
    torch.set_num_threads(int(told[1]) if told else 1)
    _keep_freed_memory()


def _keep_freed_memory():
    """Ask glibc to keep what is freed, as PyTorch's allocator for GPUs does.

    Left alone, it returns big tensors to the kernel (which ones depends on thresholds that it moves as it runs) and
    faults their pages in again a step later, which took a fifth of the plain loop's time where it was measured.
    Elsewhere (macOS, musl) there is nothing to ask.
    """
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**25)  # 32 MiB, the most that every glibc takes
        mallopt(trim_threshold, 2**30)


# Failing


@contextlib.contextmanager
def _failing_tidily():
    """End the process with a sentence or one traceback, and the right exit code, when something goes wrong."""
    try:
        yield
    except UserError as error:
        leave(str(error), error.exit_code)
    except preemption.Preempted:
        _end(preemption.EXIT_REQUEUE)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _fail(error)


def program() -> str:
    """The name of the running script, for messages."""
    return os.path.basename(sys.argv[0])


def leave(sentence: str, code: int = UserError.exit_code):
    """End after a user's error: the sentence once, whatever the number of ranks, and its exit code."""
    store = _store_of_the_run()
    with contextlib.suppress(RuntimeError):  # the store goes with rank 0
        if _first_to_fail():
            print(f"{program()}: {sentence}", file=sys.stderr, flush=True)
            if event := {UserError.exit_code: "refused", Diverged.exit_code: "diverged"}.get(code):
                job_status.note(event)
            if store is not None:
                store.set(SAID, "")
        elif store is not None:  # the launcher ends all when it sees one end: not before there is something to read
            store.wait([SAID], timedelta(seconds=LINGER_SECONDS))
    _outlive_the_others()
    _exit(code)


def _fail(error: Exception):
    """End after any other error. The first rank to fail shows why; those that then lose contact are quiet."""
    first = _first_to_fail()
    lost_contact = not first or isinstance(error, dist.DistNetworkError) or LOST_CONTACT.search(str(error))
    if first:
        rank = os.environ.get("RANK", "0")
        if lost_contact:
            message = f"rank {rank} lost contact with another rank: {str(error).strip().splitlines()[0]}"
            if "connectFullMesh" in str(error):
                message += (
                    "\nIf none of them has failed, gloo may have taken a network on which the nodes do not reach each other: "
                    "set GLOO_SOCKET_IFNAME to the right one's name (ip -br addr lists them)"
                )
        else:
            message = f"rank {rank} failed:\n{traceback.format_exc()}"
            job_status.note("failed", job_status.node(), rank)
        print(f"{program()}: {message}", file=sys.stderr, flush=True)
    if lost_contact:  # the launcher must find the rank that failed first; then it ends this one
        time.sleep(LINGER_SECONDS)
    _exit(1)


def _first_to_fail() -> bool:
    """Whether no rank of this run has failed before this one (asked once a rank, when it fails)."""
    store = _store_of_the_run()
    if store is None:  # the ranks have not met: nobody else can say what is wrong with this one
        return True
    try:
        return store.add(FAILED, 1) == 1
    except RuntimeError:  # the store went with rank 0, which had its say
        return False


def _store_of_the_run():
    """The store at which the ranks have met; None if they have not."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if _store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agents share theirs
        found = _connected(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return found and dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", found)
    return _store


def _outlive_the_others():
    """On rank 0, which has the store: wait a little for ranks that fail with it, or they would warn that it is gone."""
    store = _store_of_the_run()
    if store is not None and os.environ.get("RANK") == "0":
        deadline = time.monotonic() + LINGER_SECONDS
        while store.add(FAILED, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
            time.sleep(0.01)


def _exit(code: int):
    """Leave after a failure; at once, if other ranks know this one: waiting for them, a tidy exit can hang."""
    sys.exit(code) if _store_of_the_run() is None else _end(code)


def _end(code: int):
    """End this process now, after what was registered for its end (a logger's last lines, a folder's release).

    Python's own way out spends a second on taking torch apart besides.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
