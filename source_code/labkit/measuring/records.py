# SPDX-License-Identifier: BSD-3-Clause
"""Write and read one JSON record per run: its configuration, environment, and measurements. All figures use records.

A record is a dict with these keys (sizes in bytes, times in seconds):

  schema       version of this layout
  script, config, command      the program and its options
  ranks, nodes, device, backend, hardware, versions, date      the environment
  data         {"name", "train", "test"}: the data set, and its numbers of images or tokens
  batch_size   images, or sequences of a micro-batch, per rank
  units        number of FSDP units: parameters that are gathered together
  first_step   number of steps completed by earlier runs (after a resume)
  memory       see ``meters.Meter.summary``; under JAX with "compiled", which XLA plans (``hlo.memory``)
  compile_seconds              time that XLA took to compile a step (JAX, whose devices are the ranks here)
  time         {"step": {"median", "p10", "p90", "steps"}, "samples_per_second", "elapsed"}
  traffic      [{"kind", "count", "bytes", "dimension"}, …] of one step. bytes: size of the whole tensor. dimension: the
               mesh dimension along which the collective runs if parameters are DTensors (FSDP2, tensor parallelism), else
               None; missing in earlier records
  checkpoints  None if nothing was saved, else {"asynchronous", "saves": number of saves, "stall": median time for which
               one blocked training}, without the wait for the last save at the end of the run
  losses       loss of every step, averaged over the global batch; NaN if it is not finite (in the file: null)
  accuracy     {"correct", "total"} on the test set (MNIST)
  test_loss    mean loss on the test set (MNIST)
  validation_loss              mean loss on the held-out text, in nats per token (GPT)
  tokens_per_second            of all ranks together (GPT)
  flops_per_token              model FLOPs of training on one token (GPT)
  matmul_ceiling_fraction      {"peak_flops", "peak_of", "value"}: the FLOP/s of a large matmul per rank, measured in this
               run; a description of it; the fraction of it that the model reaches (GPT; None if no step was timed)
  mfu          model FLOPs utilization, with the same keys, against the GPU's data sheet; None if the peak is unknown

Records and other output of runs go to ``RUNS``, a folder that every node must see: FSDP_LABS_RUNS if it is set, else
results/runs, or my-fsdp-labs/runs in the home directory if the installation is not writable (a shared installation).
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
RENAMED_SCRIPTS = {"rank_zero.py": "one_rank.py"}  # {script in older records: its name now}
PROBE = bytes(2**16)  # content of a test file: an empty file fits on a full disk
LOSSES = ("losses", "test_loss", "validation_loss")
RESULTS = Path(__file__).resolve().parents[2] / "results"


def _runs() -> Path:
    if chosen := os.environ.get("FSDP_LABS_RUNS"):
        return Path(chosen).expanduser().absolute()
    default = RESULTS / "runs"
    writable = os.access(default if default.exists() else RESULTS, os.W_OK)
    return default if writable else Path.home() / "my-fsdp-labs" / "runs"


RUNS = _runs()


def ensure_writable_dir(folder: Path) -> Path:
    """Create a folder for runs unless it exists, check that it is writable, and return it.

    Raises:
        UserError: it cannot be created or written to, or the disk is full.
    """
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
    """Return the reason why nothing more can be written to a folder for runs, as a sentence; None if it is writable."""
    try:
        _probe(folder)
    except OSError as error:
        return f"Nothing more can be written to {folder} ({error.strerror}): make room there, or set FSDP_LABS_RUNS"
    return None


def _probe(folder: Path):
    """Write a small file to a folder and delete it.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(PROBE)
        file.flush()
        os.fsync(file.fileno())


def new(script: str, config: dict, rank, nodes: list[str]) -> dict:
    """Return the part of a record that is known when a run starts.

    Args:
        script: path of the program.
        config: its options.
        rank: a ``ranks.Rank``.
        nodes: names of the nodes, each once.
    """
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
    """Print the measurements of a run, and write its record to --record. Collective.

    Args:
        script: path of the program.
        config: its options.
        me: a ``ranks.Rank``.
        result: the measurements, as keys of the record.
        elapsed: seconds since the run began.

    Raises:
        Diverged: a loss is not finite. The record is written first.
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
            dist.barrier()  # a rank that exits ends the others: wait until the record is written
        raise Diverged(
            f"the loss is {losses[bad[0]]} in step {first + bad[0]}: the run ends there, and no checkpoint was saved after "
            "it; a lower --lr, or a look at that step's data, may help"
        )


def hardware_summary(me) -> str:
    """Return the ranks and their hardware in words: "4 ranks on cpu (gloo), AMD EPYC, 2 cores". me: a ``ranks.Rank``."""
    return f"{me.world_size} rank{'s' * (me.world_size > 1)} on {me.device.type} ({me.backend}), {hardware(me.device)}"


def hardware(device: torch.device) -> str:
    """Return the name of a device for a figure's caption: "NVIDIA H200" or "AMD EPYC, 2 cores"."""
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
    """Check before training that a record can be written.

    Args:
        path: where to write it.
        option: the option that set ``path``, for the message.

    Raises:
        UserError: it cannot be written there.
    """
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


def new_path(command: str, requested: str | None) -> Path:
    """Return the path for the record of a command that makes many runs: the requested one, or a new name in ``RUNS``.

    Raises:
        UserError: the record cannot be written there.
    """
    path = Path(requested or RUNS / f"{command}-{datetime.now():%Y%m%d-%H%M%S}.json")
    check_writable(path)
    return path


def write_rows(path: Path, rows: list[dict], **metadata):
    """Write the record of a command that makes many runs: {"hardware", "torch", …metadata, "date", "rows"}.

    Args:
        path: as ``new_path`` returns it.
        rows: one dict per run.
        metadata: further keys of the record.
    """
    environment = {"hardware": hardware(torch.device("cpu")), "torch": torch.__version__}
    write(path, environment | metadata | {"date": f"{datetime.now():%Y-%m-%d}", "rows": rows})


def write(path: str | Path, record: dict):
    """Write a record atomically. JSON has no NaN and no infinity: both become null.

    Raises:
        UserError: it cannot be written. The record has been printed instead, so that no measurement is lost.
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
    """Replace every number that is not finite by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def load(path: str | Path) -> dict:
    """Read a record; earlier layouts of this schema are converted.

    Raises:
        UserError: there is no such file, it is not a record, or it has another schema.
    """
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
    record["script"] = RENAMED_SCRIPTS.get(record["script"], record["script"])
    for name in LOSSES:
        if isinstance(record.get(name), list):
            record[name] = [math.nan if loss is None else loss for loss in record[name]]
        elif name in record and record[name] is None:
            record[name] = math.nan
    earlier = record.pop("model_flops_utilisation", None)  # its name in earlier records, whose peak is a measured one
    if isinstance(earlier, dict):
        record["flops_per_token"] = earlier.pop("flops_per_token", None)
        record["matmul_ceiling_fraction"] = earlier if earlier.get("value") else None
    return record


def _is_of_a_run(record: dict) -> bool:
    """Return whether a record has the script, options, and a valid number of ranks, as ``new`` writes them."""
    ranks = record.get("ranks")
    known = isinstance(record.get("script"), str) and isinstance(record.get("config"), dict)
    return known and type(ranks) is int and 1 <= ranks <= 10**6
