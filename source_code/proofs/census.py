# SPDX-License-Identifier: BSD-3-Clause
"""Take a census of transformers' causal-LM families: does hf_fsdp.py load and train each as one process does?

  python -m proofs.census                             # all families of samples/families.json; a table and a record
  python -m proofs.census --families qwen3,gpt_oss    # these families; with --record, the others of that record are kept
  python -m proofs.census --inspect                   # only what one process can find out
  python -m proofs.census --library                   # by from_pretrained(…, distributed_config=…), without the lab

Each family is a tiny model with random weights that the library has saved. On 2 and 4 ranks it is loaded and trained in
all ``WAYS`` for which the library has a plan, and compared with one process of the plain library:

  loaded      the bits of every parameter and buffer
  gradients   of the first step, as AdamW hides a wrong factor
  losses      of some steps, dropout included
"""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import hf_fsdp
import torch
import torch.distributed as dist
import transformers
from labkit import UserError
from labkit.measuring import records
from labkit.measuring.differences import largest, largest_difference
from labkit.running import gpus, launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from labkit.training.shards import whole
from labkit.training.units import units_of
from planner.parallel.mesh import Mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from proofs import families, families_page, peaks

PATIENCE = timedelta(seconds=30)  # of a rank that waits in a collective for one that has failed
# Families some of whose operators round to fp32 in every precision, otherwise if tensor-parallel ranks add their parts:
# their losses differ by up to 6e-8 in float64
ROUNDED = ("axk1", "bailing_hybrid", "minimax_m3_vl_text")
TOGETHER = 40  # families for which ranks are started once


@dataclass(frozen=True)
class Way:
    """One way to share a model. mesh: as hf_fsdp.py's --mesh."""

    mesh: str

    @property
    def sizes(self) -> Mesh:
        return Mesh.parse(self.mesh)

    def precision(self, row: dict) -> str:
        """Return the number format that shows most: float64, where it runs.

        FSDP2 divides float64 gradients twice where each expert is on one rank only (torch 2.15; fp32 and bf16 once).
        """
        single = self.sizes.expert > 1 and self.sizes.expert == self.sizes.ranks
        rounded = self.sizes.tensor > 1 and row["model_type"] in ROUNDED
        return "fp32" if row["fp64"] or single or rounded else "fp64"

    def dropout(self, row: dict) -> bool:
        """Return whether dropout is on: tensor-parallel ranks draw numbers of their own."""
        return row["random"] and self.sizes.tensor == 1

    def reference(self, row: dict) -> str:
        """Return the name of the file with what one process computes."""
        return f"{self.precision(row)}-{self.sizes.shard}-{self.dropout(row)}"


WAYS = [Way("shard=2"), Way("tensor=2"), Way("shard=2,expert=2")]
WAYS += [Way("shard=4"), Way("shard=2,tensor=2"), Way("shard=4,expert=2")]


def ways_of(row: dict) -> list[Way]:
    """Return the ways to train a family. FSDP2 needs no plan of the library: the lab finds the blocks itself.

    Args:
        row: As ``families.inspect`` returns it.
    """
    planned = {"tensor": row["tensor"], "expert": row["expert"]}
    if row["error"]:
        return []
    return [way for way in WAYS if all(planned[name] or getattr(way.sizes, name) == 1 for name in planned)]


# In one process


def prepare(row: dict, ways: list[Way], folder: Path) -> list[str]:
    """Save a family's model, and what loading and training it in some ways must give.

    Args:
        row: As ``families.inspect`` returns it.
        ways: To prepare for.
        folder: Where to save: the model's files, and the references, {"tensors", "gradients", "losses"}.

    Returns:
        The names of the tensors that the library itself reads otherwise than it has saved them.
    """
    model = families.build(row["family"])
    model.save_pretrained(folder)
    saved = families.tensors_of(model)
    reread = unequal(families.tensors_of(families.load(folder, "fp32")), saved)
    for way in {way.reference(row): way for way in ways}.values():
        again = families.load(folder, way.precision(row))
        for name, tensor in families.tensors_of(again).items():
            if name in reread and name in saved:  # the files are right
                tensor.data.copy_(saved[name])
        tensors = {name: tensor.clone() for name, tensor in families.tensors_of(again).items()}
        gradients, losses = families.train(again, way.sizes.shard, way.dropout(row))
        reference = {"tensors": tensors, "gradients": gradients, "losses": losses}
        torch.save(reference, folder / way.reference(row))
    return reread


# On several ranks


def try_ways(me, tasks: list[tuple[dict, Way, str]], store: str, by_library: bool) -> list[dict]:
    """Try each task in a process group of its own, so that a failure on one rank cannot disturb the next task.

    Args:
        me: This rank.
        tasks: (row, way, folder), as ``prepare`` takes them.
        store: Path of a file for the ranks' rendezvous.
        by_library: Whether to load by the library alone, without the lab.

    Returns:
        For each task, see ``try_way``; with "error", a reason or None, and "seconds".
    """
    families.quiet()
    shared, found = dist.FileStore(store, me.world_size), []

    def wait(where):
        """Wait for the other ranks, by the store."""
        shared.set(f"{where}-{me.rank}", "here")
        shared.wait([f"{where}-{rank}" for rank in range(me.world_size)], 3 * PATIENCE)

    wait("begin")
    dist.destroy_process_group()
    for number, task in enumerate([*tasks, None]):
        wait(f"before {number}")  # a rank that has failed waits for the others, who may wait for it in a collective
        group = dist.PrefixStore(f"group-{number}", shared)
        dist.init_process_group("gloo", store=group, rank=me.rank, world_size=me.world_size, timeout=PATIENCE)
        wait(f"in {number}")  # a rank that fails at once would leave while others join
        if task is None:  # the last group is the one that the caller expects to be there
            return found
        begin, result = time.perf_counter(), {}
        result["error"] = families.reason(lambda task=task, result=result: try_way(me, *task, by_library, result))
        found.append(result | {"seconds": time.perf_counter() - begin})
        dist.destroy_process_group()
    return found


def try_way(me, row: dict, way: Way, folder: str, by_library: bool, result: dict):
    """Load and train one family in one way, and compare it with one process. Collective.

    Args:
        me: This rank.
        row, way, folder: As ``prepare`` takes them.
        by_library: See ``try_ways``.
        result: Where the findings go: {"unequal": names of tensors, "gradient": the largest relative difference of a
            parameter's gradient, "of": the parameter's name, "losses": of this rank, "peak": of its memory, in bytes}.
    """
    reference = torch.load(Path(folder) / way.reference(row))
    config = hf_fsdp.Config(
        model=folder,
        device="cpu",
        tokens="bytes",
        seq_len=families.LENGTH,
        mesh=way.mesh,
        precision=way.precision(row),
        batch_size=families.SEQUENCES // way.sizes.shard,
        lr=families.LR,
        weight_decay=families.WEIGHT_DECAY,
    )
    model = load_in_parallel(folder, config, way, row) if by_library else hf_fsdp.build(config, me)
    model.train(way.dropout(row))
    result["unequal"] = unequal(families.tensors_of(model), reference["tensors"])
    part = way.sizes.data_part(me.rank)
    inputs, targets = families.batches(0, way.sizes.shard)[part]
    torch.manual_seed(part)
    (hf_fsdp.compute_loss(model, inputs, targets, config) / targets.numel()).backward()
    result["gradient"], result["of"] = gradient_difference(model, reference["gradients"])
    model.zero_grad()
    optimizer, result["losses"] = hf_fsdp.make_optimizer(model, config), []
    for step in range(families.STEPS):
        batch = [each.unsqueeze(0) for each in families.batches(step, way.sizes.shard)[part]]
        torch.manual_seed(1000 * step + part)
        result["losses"].append(sum(hf_fsdp.train_step(model, optimizer, *batch, config)).item())
    if way.mesh in peaks.MESHES and not by_library:
        result["peak"] = peaks.measured(me, folder, way.mesh)


def load_in_parallel(folder: str, config, way: Way, row: dict):
    """Load a model by the library's own parallelism. Arguments: see ``try_way``."""
    sizes, plan = way.sizes, None
    if not row["fsdp"]:
        model = AutoModelForCausalLM.from_config(families.configuration(row["family"]))
        blocks = set(units_of(model.base_model))
        names = (name for name, module in model.named_modules() if module in blocks)
        plan = {re.sub(r"\.\d+$", ".*", name): "free_full_weight" for name in names}
    parallel = {"fsdp_size": sizes.shard, "tp_size": sizes.tensor, "ep_size": sizes.expert, "fsdp_plan": plan}
    return families.load(folder, config.precision, DistributedConfig(**parallel))


def unequal(tensors: dict, expected: dict) -> list[str]:
    """Return the names of the tensors that are missing, unexpected, or have other bits than expected. Collective."""
    wrong = sorted(tensors.keys() ^ expected.keys())
    for name in sorted(tensors.keys() & expected.keys()):
        tensor = whole(tensors[name].detach())
        if tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name]):
            wrong.append(name)
    return wrong


def gradient_difference(model, expected: dict) -> tuple[float, str]:
    """Return the largest difference of a gradient, relative to the largest element of its parameter's. Collective.

    Returns:
        (difference, name of the parameter); infinity where only one of both has a gradient.
    """
    found = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    least = 1e-6 * largest([gradient.abs() for gradient in expected.values()])
    worst, of = 0.0, ""
    for name in sorted(found.keys() | expected.keys()):
        pair = [gradients.get(name) for gradients in (found, expected)]
        there = [gradient for gradient in pair if gradient is not None and gradient.any()]
        if len(there) == 1 and largest(there[0].abs()) > least:
            return float("inf"), name
        if None not in [gradients.get(name) for gradients in (found, expected)]:
            size = largest([least, largest(pair[1].abs())])
            if not (difference := largest_difference(*pair) / size) <= worst:  # NaN is worst
                worst, of = difference, name
    return worst, of


# All together


def run(chosen: list[tuple[dict, list[Way]]], by_library: bool = False) -> Iterator[dict]:
    """Load and train families, each in some ways.

    Args:
        chosen: (row, ways), as ``prepare`` takes them.
        by_library: See ``try_ways``.

    Yields:
        Each row, with "reread", see ``prepare``; "ways": {mesh: {"precision", "error", "unequal", "gradient", "of",
        "loss": the largest relative difference of a loss, "peak": of a rank's memory in a step, in bytes, "plan" and
        "planned": see ``peaks.plan``, "seconds"}}.
    """
    here = launch.Cluster(launcher="local")
    for first in range(0, len(chosen), TOGETHER):
        with tempfile.TemporaryDirectory() as parent:
            some, tasks = [], []
            for row, ways in chosen[first : first + TOGETHER]:
                folder = Path(parent) / row["family"]
                some.append(row | {"reread": prepare(row, ways, folder) if ways else [], "ways": {}})
                tasks += [(some[-1], way, str(folder)) for way in ways]
            for count in sorted({way.sizes.ranks for _, way, _ in tasks}):
                mine = [task for task in tasks if task[1].sizes.ranks == count]
                arguments = mine, f"{parent}/store-{count}", by_library
                found = notebook_ranks.on_ranks(try_ways, *arguments, ranks=count, cluster=here, timeout=1800)
                for (row, way, folder), *results in zip(mine, *found, strict=True):
                    row["ways"][way.mesh] = summary(row, way, folder, results)
            measured = [] if by_library else [task for task in tasks if task[1].mesh in peaks.MESHES]
            plans = peaks.plan([(folder, way.mesh) for _, way, folder in measured], here)
            for (row, way, _), (how, planned) in zip(measured, plans, strict=True):
                row["ways"][way.mesh] |= {"plan": how, "planned": planned}
            yield from some


def summary(row: dict, way: Way, folder: str, results: list[dict]) -> dict:
    """Return what all ranks have found of one way, see ``run``."""
    reference = torch.load(f"{folder}/{way.reference(row)}")
    first, error = results[0], next((each["error"] for each in results if each["error"]), None)
    about = {"precision": way.precision(row), "error": error and error.replace(folder, "FOLDER")}
    about |= {key: first.get(key) for key in ("unequal", "gradient", "of", "seconds")}
    if about["error"] is None:
        losses = [sum(step) / len(results) for step in zip(*(each["losses"] for each in results), strict=True)]
        about["loss"] = largest_difference(losses, reference["losses"], relative=True)
    if peak := [each["peak"] for each in results if "peak" in each]:
        about["peak"] = max(peak)
    return about | {"seconds": round(about["seconds"], 2)}


@dataclass(frozen=True)
class Config(Options):
    """Which families, and what about them. The command line is made from these fields."""

    families: str | None = option(None, "NAME,NAME of samples/families.json (default: all)")
    inspect: bool = option(False, "only inspect them, in one process")
    library: bool = option(False, "load by the library's own parallelism, without the lab")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def chosen(config: Config) -> list[str]:
    """Return the names of the families to take.

    Raises:
        UserError: there is no such family.
    """
    known = families.names()
    names = config.families.split(",") if config.families else known
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--families {unknown[0]}: samples/families.json has no such family")
    return names


def main():
    config = parse(Config, __doc__)
    gpus.hide()
    families.quiet()
    try:
        path = records.new_path("census", config.record)
        inspected, known = (families.inspect(name) for name in chosen(config)), {}
        if config.families and path.exists():
            known = {row["family"]: row for row in json.loads(path.read_text())["rows"]}
        for row in inspected if config.inspect else run([(row, ways_of(row)) for row in inspected], config.library):
            known[row["family"]] = row
            rows = [known[name] for name in families.names() if name in known]
            records.write_rows(path, rows, transformers=transformers.__version__)
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(families_page.tables(rows))
    print(f"{families_page.counts(rows)}; record: {path}")


if __name__ == "__main__":
    main()
