# SPDX-License-Identifier: BSD-3-Clause
"""Measure what loading a model on several ranks costs each rank, in every way there is.

  python -m proofs.loading                  # 2 and 4 ranks, files in fp32 and in bf16; tables and a record

A model of random weights is loaded in each of ``WAYS``, for training in fp32, on new processes each time: what one way has
left to the memory allocator cannot help the next. Memory is what Linux counts as resident in each process:

  read         bytes of the file in a rank's memory at the highest: pages of the mapped file that it has touched. Linux maps
               up to 16 pages of 4 KiB at once.
  from disk    bytes that all ranks together have caused to be read from the disk, in another load with an empty page cache
  anonymous    growth of memory that is the process's own, once the model is loaded
  mapped       growth of memory that is a part of the file, once the model is loaded: the ranks share it
  peak         growth of both together, at the highest
  in use       growth of both together, once each element has been written, as an optimizer does: no part is mapped then
  storage      bytes of the storages that a rank's tensors are views of

Every parameter and buffer is compared with ``from_pretrained`` bit by bit.
"""

import gc
import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import hf_fsdp
import pandas
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from labkit import UserError
from labkit.measuring import host_memory, records
from labkit.measuring.trace import local
from labkit.running import gpus, launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from proofs import census, families

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
LARGE = SIZES | {"num_hidden_layers": 8, "vocab_size": 16384}  # 162 MiB in fp32
TINY = SIZES | {"num_hidden_layers": 1, "vocab_size": 256}
INTERVAL = 1e-3  # seconds between two looks at the memory


# The ways: (this rank, folder) -> a sharded model in fp32


def shard(model, me):
    """Shard a model: its blocks, the embedding, the head, and the rest as the root's unit."""
    mesh = dist.init_device_mesh("cpu", (me.world_size,))
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    return model


def shard_then_cast(me, folder: str):
    """Load the model as it is in the files, which maps them; shard it; then cast."""
    return shard(AutoModelForCausalLM.from_pretrained(folder), me).to(torch.float32)


def cast_then_shard(me, folder: str):
    """Load the model in the wanted dtype, then shard it."""
    return shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), me)


def by_the_library(me, folder: str):
    """Let the library shard while it loads."""
    parallel = DistributedConfig(fsdp_size=me.world_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=parallel)


def by_dcp(me, folder: str):
    """Shard the model on the meta device, and let PyTorch's distributed checkpoint read the shards."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    shard(model, me).to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers are in no file
    return model


def by_the_lab(me, folder: str):
    """Load as hf_fsdp.py does."""
    return hf_fsdp.build(hf_fsdp.Config(model=folder, device="cpu", tokens="bytes", seq_len=16), me)


WAYS = {
    "`from_pretrained`, shard, cast": shard_then_cast,
    "`from_pretrained` in fp32, shard": cast_then_shard,
    "`from_pretrained` with `distributed_config`": by_the_library,
    "`HuggingFaceStorageReader`": by_dcp,
    "hf_fsdp.py": by_the_lab,
}


# On each rank


def resident() -> dict[str, int]:
    """Return the bytes of this process's resident memory: {"anonymous", "mapped"}."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if words[0].startswith("Rss")}
    return {"anonymous": found["RssAnon:"], "mapped": found["RssFile:"] + found["RssShmem:"]}


def bytes_from_disk() -> int:
    """Return how many bytes this process has caused to be read from disks."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("read_bytes:") + 1])


class Highest:
    """Watch the bytes of mapped files that are resident, in a thread; ``mapped`` is their highest number."""

    def __enter__(self):
        self.mapped, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while True:
            self.mapped = max(self.mapped, resident()["mapped"])
            if self._over.wait(INTERVAL):
                break

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


def evict(folder: str, refill: bool):
    """Remove a folder's files from the page cache.

    Args:
        folder: Of the files.
        refill: Whether to read them again, in pages of 4 KiB: by itself Linux caches larger ones, and maps each as a whole.
    """
    for path in Path(folder).iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        while refill and os.read(file, 4096):
            pass
        os.close(file)


def measure(me, way: str, folder: str, tiny: str) -> dict:
    """Load a model in one way, and return what it took. Collective.

    Args:
        me: This rank.
        way: A key of ``WAYS``.
        folder: Of the model's files.
        tiny: Folder of a small model of the same family. It is loaded first, for code, threads and connections.

    Returns:
        In bytes, {"read", "from disk", "anonymous", "mapped", "peak", "in use", "storage": see this file's docstring,
        "shard": of this rank's tensors}, and "unequal": the names of the tensors that ``from_pretrained`` reads otherwise.
    """
    families.quiet()
    torch.set_num_threads(1)
    WAYS[way](me, tiny)
    prepare(me, folder, refill=True)
    before, total = resident(), host_memory.reset_peak_resident()
    with Highest() as highest:
        model = WAYS[way](me, folder)
    found = {name: value - before[name] for name, value in resident().items()}
    found |= {"read": highest.mapped - before["mapped"], "peak": host_memory.resident(peak=True) - total}
    tensors = [local(tensor) for tensor in families.tensors_of(model).values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    found |= {"storage": sum(storages.values()), "shard": sum(tensor.nbytes for tensor in tensors)}
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1)
    found["in use"] = sum(resident().values()) - sum(before.values())
    whole = families.tensors_of(families.load(folder, "fp32"))
    found["unequal"] = census.unequal(families.tensors_of(model), whole)
    del model, whole, tensors, tensor
    prepare(me, folder, refill=False)
    disk = bytes_from_disk()
    WAYS[way](me, folder)
    return found | {"from disk": bytes_from_disk() - disk}


def prepare(me, folder: str, refill: bool):
    """Set the page cache when no rank maps the files any more. Collective; arguments: see ``measure`` and ``evict``."""
    gc.collect()
    dist.barrier()
    if me.rank == 0:
        evict(folder, refill)
    dist.barrier()


# All together


def save(folder: Path, sizes: dict, stored: str) -> int:
    """Save a model of random weights, and return the number of its parameters.

    Args:
        folder: Where to.
        sizes: Of its configuration.
        stored: The files' data type, a key of ``DTYPES``.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # also norms, whose ones a loader that reads nothing has, too
            parameter += 0.02 * torch.randn_like(parameter)
    model.to(DTYPES[stored]).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(stored: str, counts: Iterable[int], ways: Iterable[str] = WAYS, sizes: dict = LARGE):
    """Load a model in some ways.

    Args:
        stored: The files' data type, a key of ``DTYPES``.
        counts: Numbers of ranks.
        ways: Keys of ``WAYS``.
        sizes: Of the model.

    Yields:
        {"stored", "ranks", "way", "file": bytes of the file, "model": bytes of its parameters in fp32, "by rank": what
        ``measure`` returns}.
    """
    here = launch.Cluster(launcher="local")
    with tempfile.TemporaryDirectory(
        dir=records.ensure_writable_dir(launch.RUNS)
    ) as parent:  # not in memory, as /tmp may be
        folder, tiny = Path(parent) / "model", Path(parent) / "tiny"
        parameters = save(folder, sizes, stored)
        save(tiny, TINY, stored)
        about = {"stored": stored, "file": (folder / "model.safetensors").stat().st_size, "model": 4 * parameters}
        for count in counts:
            for way in ways:
                found = notebook_ranks.on_ranks(measure, way, str(folder), str(tiny), ranks=count, cluster=here)
                yield {**about, "ranks": count, "way": way, "by rank": found}


def tables(rows: list[dict]) -> str:
    """Return a Markdown table, in MiB, for each number of ranks and data type of the files."""
    pages = []
    for stored, count in dict.fromkeys((row["stored"], row["ranks"]) for row in rows):
        some = [row for row in rows if (row["stored"], row["ranks"]) == (stored, count)]
        part, whole, file = (_mib(each) for each in (_largest(some[0], "shard"), some[0]["model"], some[0]["file"]))
        title = f"{count} ranks, file in {stored}: {file} MiB. In fp32, the model has {whole} MiB and a rank's shard {part}:"
        pages += [title, "", pandas.DataFrame(map(_cells, some)).to_markdown(index=False, disable_numparse=True), ""]
    return "\n".join(pages)


def _cells(row: dict) -> dict[str, str]:
    """Return a row of a table: the largest values of all ranks, and the sum of what came from the disk."""
    disk = sum(each["from disk"] for each in row["by rank"])
    names = ("anonymous", "mapped", "peak", "in use", "storage")
    return {
        "way": row["way"],
        "read": _mib(_largest(row, "read")),
        "from disk": _mib(disk),
        **{name: _mib(_largest(row, name)) for name in names},
        "equal": "yes" if not any(each["unequal"] for each in row["by rank"]) else "**no**",
    }


def _largest(row: dict, name: str) -> int:
    return max(each[name] for each in row["by rank"])


def _mib(size: int) -> str:
    return f"{size / MIB:.0f}"


@dataclass(frozen=True)
class Config(Options):
    """Where the record goes. The command line is made from these fields."""

    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    config = parse(Config, __doc__)
    gpus.hide()
    families.quiet()
    try:
        path = records.new_path("loading", config.record)
        rows = []
        for stored in DTYPES:
            for row in run(stored, (2, 4)):
                rows.append(row)
                records.write_rows(path, rows, transformers=transformers.__version__)
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(tables(rows))
    print(f"record: {path}")


if __name__ == "__main__":
    main()
