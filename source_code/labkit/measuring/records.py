"""One JSON record a run: what was run, on what, and what was measured. Figures are made from records only.

A record is a dict with these keys (sizes in bytes, times in seconds):

  schema       this file's version of the layout
  script, config, command      what was run, and how
  ranks, nodes, device, backend, hardware, versions, date      where and with what
  data         {"name", "train", "test"}: the data set and how many images, or tokens, of it
  batch_size   images, or sequences of a micro-batch, on each rank
  units        how many groups of parameters are gathered together (FSDP)
  first_step   how many steps an earlier run had made
  memory       see ``meters.Meter.summary``; under JAX with "compiled", what the compiler plans (``hlo.memory``)
  compile_seconds              how long XLA took to compile a step (JAX, whose devices are the ranks here)
  time         {"step": {"median", "p10", "p90", "steps"}, "samples_per_second", "elapsed"}
  traffic      [{"kind", "count", "bytes", "dimension"}, …] of one step: bytes is the size of the whole tensor; dimension
               that of the mesh along which the ranks lie that take part, where the parameters know of one (FSDP2, tensor
               parallelism), else None. Earlier records do not have it
  checkpoints  None where nothing was saved, else {"asynchronous", "saves": how many, "stall": seconds for which each held
               up training (median)}; what the end of the run waited for the last one is not in it
  losses       the loss of every step, averaged over the global batch; NaN where it was not finite (in the file: null)
  accuracy     {"correct", "total"} on the test set (MNIST)
  test_loss    mean loss on the test set (MNIST)
  validation_loss              mean loss on the text kept for it, in nats per token (GPT)
  tokens_per_second            of all ranks together (GPT)
  flops_per_token              floating-point operations that training on a token takes (GPT)
  matmul_ceiling_fraction      {"peak_flops", "peak_of", "value"}: operations per second that a matmul reached on a rank in
               this run, in words, and the share of them that goes into the model (GPT; None if no step was timed)
  mfu          model FLOPs utilization, likewise: the share of the peak in the GPU's data sheet; None where it is not known

Records, and whatever else runs write, go to ``RUNS``, which every node must see: to the folder that FSDP_LABS_RUNS
names; without it to results/runs, or where that belongs to somebody else, as when a class shares one installation, to
my-fsdp-labs/runs in the home.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from labkit import Diverged, UserError

SCHEMA = 1
PROBE = bytes(2**16)  # what is written to see whether there is room: an empty file fits on a full disk
LOSSES = ("losses", "test_loss", "validation_loss")
RESULTS = Path(__file__).resolve().parents[2] / "results"


def _runs() -> Path:
    if chosen := os.environ.get("FSDP_LABS_RUNS"):
        return Path(chosen).expanduser().absolute()
    beside = RESULTS / "runs"
    ours = os.access(beside if beside.exists() else RESULTS, os.W_OK)
    return beside if ours else Path.home() / "my-fsdp-labs" / "runs"


RUNS = _runs()


def made(folder: Path) -> Path:
    """A folder for runs, made if it is not there. UserError: it cannot be made, or not be written to, or it is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"runs cannot be written to {folder} ({error.strerror}): {'make room, or ' * full}"
            "set FSDP_LABS_RUNS to a folder of yours that every node can see"
        ) from None
    return folder


def why_full(folder: Path) -> str | None:
    """A sentence if nothing more can be written to a folder for runs, else None."""
    try:
        _probe(folder)
    except OSError as error:
        return f"Nothing more can be written to {folder} ({error.strerror}): make room there, or set FSDP_LABS_RUNS"
    return None


def _probe(folder: Path):
    """OSError if not even a small file can be written to a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(PROBE)
        file.flush()
        os.fsync(file.fileno())


def new(script: str, config: dict, rank, nodes: list[str]) -> dict:
    """The part of a record that is known when the run starts. rank: a ``ranks.Rank``."""
    return {
        "schema": SCHEMA,
        "script": Path(script).name,
        "config": config,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "ranks": rank.world_size,
        "nodes": len(nodes),
        "device": rank.device.type,
        "backend": rank.backend,
        "hardware": hardware(rank.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(script: str, config, me, result: dict, elapsed: float):
    """Print what a run has measured, and write its record if --record says where. Collective.

    result: the run's part of the record. me: a ``ranks.Rank``. elapsed: seconds since the run began.

    Raises:
        Diverged: a loss is not finite. The record is written all the same.
    """
    nodes = [me.node]
    if dist.is_initialized():  # not under JAX, where one process is the whole run
        nodes = [None] * dist.get_world_size()
        dist.all_gather_object(nodes, me.node)
    result["time"]["elapsed"] = elapsed
    memory, rate = result["memory"], result.get("tokens_per_second")
    for speed in filter(None, (result.get("matmul_ceiling_fraction"), result.get("mfu"))):
        me.say(f"{rate:,.0f} tokens/s, {speed['value']:.1%} of the {speed['peak_of']}")
    if memory and memory["peak"]:
        me.say(f"peak memory of rank 0: {sum(memory['peak'].values()) / 2**20:.2f} MiB of tensors")
    me.say(f"elapsed {elapsed:.1f} s")
    if config.record and me.rank == 0:
        about = new(script, dataclasses.asdict(config), me, sorted(set(nodes)))
        write(config.record, about | result)
    losses, first = result["losses"], result["first_step"] + 1
    if bad := [number for number, loss in enumerate(losses) if not math.isfinite(loss)]:
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves ends the others: not before the record is written
        raise Diverged(
            f"the loss is {losses[bad[0]]} in step {first + bad[0]}: the run ends there, and no checkpoint was saved after "
            "it; a lower --lr, or a look at that step's data, may help"
        )


def place(me) -> str:
    """How many ranks compute, and on what: "4 ranks on cpu (gloo), AMD EPYC, 2 cores". me: a ``ranks.Rank``."""
    return f"{me.world_size} rank{'s' * (me.world_size > 1)} on {me.device.type} ({me.backend}), {hardware(me.device)}"


def hardware(device: torch.device) -> str:
    """What computed, in a few words for a figure's caption: "NVIDIA H200" or "AMD EPYC, 2 cores"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_writable(path: str | Path, option: str = "--record"):
    """Before hours of training: can a record be written to ``path``, which ``option`` named? UserError if not."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        _probe(path.parent)
    except OSError as error:
        raise UserError(
            f"the record cannot be written to {path} ({error.strerror or error}): name another {option}"
        ) from None


def new_path(command: str, given: str | None) -> Path:
    """Where the record of a command goes that makes many runs: where it was told, or among the learner's.

    UserError: it cannot be written there.
    """
    path = Path(given or RUNS / f"{command}-{datetime.now():%Y%m%d-%H%M%S}.json")
    check_writable(path)
    return path


def write_rows(path: Path, rows: list[dict], **about):
    """Write such a record: {"hardware", "torch", …, "date", "rows"}."""
    here = {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__}
    write(path, here | about | {"date": f"{datetime.now():%Y-%m-%d}", "rows": rows})


def write(path: str | Path, record: dict):
    """Write a record so that ``path`` is either whole or not there.

    JSON has no NaN and no infinity: both become null.

    Raises:
        UserError: it cannot be written. It has been printed instead, so that what was measured is not lost.
    """
    path = Path(path)
    text = json.dumps(_finite(record), indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        print(text, flush=True)
        raise UserError(
            f"the record cannot be written to {path} ({error.strerror}): it is printed above; make room, and save it from there"
        ) from None


def _finite(value):
    """The same with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def load(path: str | Path) -> dict:
    """Read a record. UserError if it is not there, is no record, or has another layout."""
    try:
        record = json.loads(Path(path).read_text())
        schema = record["schema"]
    except OSError as error:
        raise UserError(f"no record at {path} ({error.strerror}): run the lab first") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        record = schema = None
    if type(schema) is int and schema != SCHEMA:
        raise UserError(f"{path} has layout {schema}, this version reads {SCHEMA}: run the lab again")
    if type(schema) is not int or not _is_of_a_run(record):
        raise UserError(f"{path} is not a record of a run: delete it and run the lab again")
    for name in LOSSES:
        if isinstance(record.get(name), list):
            record[name] = [math.nan if loss is None else loss for loss in record[name]]
        elif name in record and record[name] is None:
            record[name] = math.nan
    earlier = record.pop("model_flops_utilisation", None)  # the name that it had, though its peak is a measured one
    if isinstance(earlier, dict):
        record["flops_per_token"] = earlier.pop("flops_per_token", None)
        record["matmul_ceiling_fraction"] = earlier if earlier.get("value") else None
    return record


def _is_of_a_run(record: dict) -> bool:
    """Whether a record says what was run, as ``new`` does, and on a number of ranks that there may be."""
    ranks = record.get("ranks")
    known = isinstance(record.get("script"), str) and isinstance(record.get("config"), dict)
    return known and type(ranks) is int and 1 <= ranks <= 10**6
