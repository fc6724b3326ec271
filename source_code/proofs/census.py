"""Take a census of transformers' causal-LM families: does hf_fsdp.py load and train each as one process does?

  python -m proofs.census                             # all families of samples/families.json; a table and a record
  python -m proofs.census --families qwen3,gpt_oss    # these families
  python -m proofs.census --inspect                   # only what one process can find out
  python -m proofs.census --library                   # by from_pretrained(…, distributed_config=…), without the lab

Each family is a tiny model with random weights that the library has saved. On 2 and 4 ranks it is loaded and trained in
all ``WAYS`` for which the library has a plan, and compared with one process of the plain library:

  loaded      the bits of every parameter and buffer
  gradients   of the first step, as AdamW hides a wrong factor
  losses      of some steps, dropout included
"""

import re
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import hf_fsdp
import pandas
import torch
import torch.distributed as dist
import transformers
from labkit import UserError
from labkit.measuring import meters, records
from labkit.measuring.differences import largest_difference
from labkit.running import gpus, launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from labkit.training.shards import whole
from labkit.training.units import units_of
from planner.parallel.mesh import Mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from proofs import families

STEPS, LR, WEIGHT_DECAY = 3, 1e-3, 0.01
SEQUENCES, LENGTH = 4, 16  # in a step, of all ranks together; tokens of each
# Largest relative differences. Norms, softmax, and routers compute in fp32 in every precision: where rounding flips one of
# their bits, gradients differ by 1e-7.
LOSS = {"fp64": 1e-9, "fp32": 1e-4}
GRADIENT = {"fp64": 1e-5, "fp32": 1e-3}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
PATIENCE = timedelta(seconds=30)  # of a rank that waits in a collective for one that has failed
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
        return "fp32" if row["fp64"] or single else "fp64"

    def dropout(self, row: dict) -> bool:
        """Return whether dropout is on: tensor-parallel ranks draw numbers of their own."""
        return row["random"] and self.sizes.tensor == 1

    def reference(self, row: dict) -> str:
        """Return the name of the file with what one process computes."""
        return f"{self.precision(row)}-{self.sizes.shard}-{self.dropout(row)}"


WAYS = [Way("shard=2"), Way("tensor=2"), Way("shard=2,expert=2")]
WAYS += [Way("shard=4"), Way("shard=2,tensor=2"), Way("shard=4,expert=2")]


def ways_of(row: dict, ways: list[Way] = WAYS) -> list[Way]:
    """Return the ways to train a family. FSDP2 needs no plan of the library: the lab finds the blocks itself.

    Args:
        row: As ``families.inspect`` returns it.
        ways: To choose from.
    """
    planned = {"tensor": row["tensor"], "expert": row["expert"]}
    if row["error"]:
        return []
    return [way for way in ways if all(planned[name] or getattr(way.sizes, name) == 1 for name in planned)]


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
    for way in {way.reference(row): way for way in ways}.values():
        again = load(folder, way.precision(row))
        tensors = {name: tensor.clone() for name, tensor in tensors_of(again).items()}
        gradients, losses = train(again, way.sizes.shard, way.dropout(row))
        reference = {"tensors": tensors, "gradients": gradients, "losses": losses}
        torch.save(reference, folder / way.reference(row))
    return unequal(tensors_of(load(folder, "fp32")), tensors_of(model))


def load(folder: str | Path, precision: str, parallel: DistributedConfig | None = None):
    """Load a model by the library alone.

    Args:
        folder: Of the model's files.
        precision: A key of ``DTYPES``.
        parallel: How the ranks of the process group share it; None: unsharded.
    """
    about = {"dtype": DTYPES[precision], "experts_implementation": families.EXPERTS[DTYPES[precision]]}
    about["distributed_config"] = parallel
    return AutoModelForCausalLM.from_pretrained(folder, **{key: value for key, value in about.items() if value})


def tensors_of(model) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, {name: tensor}: a buffer that is in no file must have its value, too."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def draw(step: int, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a step's (inputs, targets) for each part of the global batch, each of shape (sequences, LENGTH)."""
    tokens = families.draw(SEQUENCES, LENGTH + 1, seed=step)
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(parts)]


def train(model, parts: int, dropout: bool) -> tuple[dict, list[float]]:
    """Train some steps in one process.

    Args:
        model: Unsharded.
        parts: Number of parts of the global batch. They are computed one after another, each with its own dropout.
        dropout: Whether dropout is on.

    Returns:
        ({name: gradient} of the first step, loss of each step).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model.train(dropout)
    gradients, losses = {}, []
    for step in range(STEPS):
        losses.append(0.0)
        for part, (inputs, targets) in enumerate(draw(step, parts)):
            torch.manual_seed(1000 * step + part)
            logits = families.logits_of(model, inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / parts
            loss.backward()
            losses[step] += loss.item()
        named = model.named_parameters() if not gradients else ()
        gradients |= {name: each.grad.clone() for name, each in named if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses


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
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    meters.TRACED_STEPS = range(0)
    dist.destroy_process_group()
    shared, found = dist.FileStore(store, me.world_size), []
    for number, task in enumerate([*tasks, None]):
        # A rank that has failed waits for the others, who may wait for it in a collective.
        shared.set(f"{number}-{me.rank}", "here")
        shared.wait([f"{number}-{rank}" for rank in range(me.world_size)], 3 * PATIENCE)
        group = dist.PrefixStore(f"group-{number}", shared)
        dist.init_process_group("gloo", store=group, rank=me.rank, world_size=me.world_size, timeout=PATIENCE)
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
            parameter's gradient, "of": the parameter's name, "losses": of this rank}.
    """
    reference = torch.load(Path(folder) / way.reference(row))
    config = hf_fsdp.Config(
        model=folder,
        device="cpu",
        tokens="bytes",
        seq_len=LENGTH,
        mesh=way.mesh,
        precision=way.precision(row),
        batch_size=SEQUENCES // way.sizes.shard,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
    )
    model = load_in_parallel(folder, config, way, row) if by_library else hf_fsdp.build(config, me)
    model.train(way.dropout(row))
    result["unequal"] = unequal(tensors_of(model), reference["tensors"])
    part = way.sizes.data_part(me.rank)
    inputs, targets = draw(0, way.sizes.shard)[part]
    torch.manual_seed(part)
    (hf_fsdp.compute_loss(model, inputs, targets, config) / targets.numel()).backward()
    result["gradient"], result["of"] = gradient_difference(model, reference["gradients"])
    model.zero_grad()
    optimizer, result["losses"] = hf_fsdp.make_optimizer(model, config), []
    for step in range(STEPS):
        batch = [each.unsqueeze(0) for each in draw(step, way.sizes.shard)[part]]
        torch.manual_seed(1000 * step + part)
        result["losses"].append(sum(hf_fsdp.train_step(model, optimizer, *batch, config)).item())


def load_in_parallel(folder: str, config, way: Way, row: dict):
    """Load a model by the library's own parallelism. Arguments: see ``try_way``."""
    sizes, plan = way.sizes, None
    if not row["fsdp"]:
        model = AutoModelForCausalLM.from_config(families.configuration(row["family"]))
        blocks = set(units_of(model.base_model))
        names = (name for name, module in model.named_modules() if module in blocks)
        plan = {re.sub(r"\.\d+$", ".*", name): "free_full_weight" for name in names}
    parallel = {"fsdp_size": sizes.shard, "tp_size": sizes.tensor, "ep_size": sizes.expert, "fsdp_plan": plan}
    return load(folder, config.precision, DistributedConfig(**parallel))


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
    least = 1e-6 * max(gradient.abs().max().item() for gradient in expected.values())
    worst, of = 0.0, ""
    for name in sorted(found.keys() | expected.keys()):
        pair = [gradients.get(name) for gradients in (found, expected)]
        there = [gradient for gradient in pair if gradient is not None and gradient.any()]
        if len(there) == 1 and there[0].abs().max() > least:
            return float("inf"), name
        if None not in [gradients.get(name) for gradients in (found, expected)]:
            size = max(pair[1].abs().max().item(), least)
            if not (difference := largest_difference(*pair) / size) <= worst:  # NaN is worst
                worst, of = difference, name
    return worst, of


# All together


def run(rows: list[dict], ways: list[Way], by_library: bool = False) -> list[dict]:
    """Load and train families in some ways.

    Args:
        rows: As ``families.inspect`` returns them.
        ways: In which to train those that have a plan for it.
        by_library: See ``try_ways``.

    Returns:
        The rows, with "reread", see ``prepare``, and "ways": {mesh: {"precision", "error", "unequal", "gradient", "of",
        "loss": the largest relative difference of a loss, "seconds"}}.
    """
    here, done = launch.Cluster(launcher="local"), []
    for first in range(0, len(rows), TOGETHER):
        with tempfile.TemporaryDirectory() as folder:
            some = []
            for row in rows[first : first + TOGETHER]:
                mine = Path(folder) / row["family"]
                reread = prepare(row, ways_of(row, ways), mine) if ways_of(row, ways) else []
                some.append(row | {"reread": reread, "ways": {}})
            for count in sorted({way.sizes.ranks for way in ways}):
                tasks = [
                    (row, way, f"{folder}/{row['family']}")
                    for row in some
                    for way in ways_of(row, ways)
                    if way.sizes.ranks == count
                ]
                arguments = tasks, f"{folder}/store-{count}", by_library
                found = notebook_ranks.on_ranks(try_ways, *arguments, ranks=count, cluster=here, timeout=1800)
                for (row, way, mine), *results in zip(tasks, *found, strict=True):
                    row["ways"][way.mesh] = summary(row, way, results, torch.load(f"{mine}/{way.reference(row)}"))
            done += some
    return done


def summary(row: dict, way: Way, results: list[dict], reference: dict) -> dict:
    """Return what all ranks have found of one way, see ``run``."""
    about = {"precision": way.precision(row), "error": next((r["error"] for r in results if r["error"]), None)}
    first = results[0]
    about |= {key: first.get(key) for key in ("unequal", "gradient", "of", "seconds")}
    if about["error"] is None:
        losses = [sum(step) / len(results) for step in zip(*(each["losses"] for each in results), strict=True)]
        about["loss"] = largest_difference(losses, reference["losses"], relative=True)
    return about | {"seconds": round(about["seconds"], 2)}


def verdict(found: dict) -> str:
    """Return in a few words how a way went: "equal", or what is wrong.

    Args:
        found: One of the "ways" of ``run``.
    """
    if found["error"]:
        return (
            f"refused: {found['error'].partition(': ')[2]}"
            if found["error"].startswith("UserError")
            else found["error"]
        )
    if found["unequal"]:
        return f"loaded otherwise: {found['unequal'][0]}"
    if not found["gradient"] <= GRADIENT[found["precision"]]:
        return f"gradient differs: {found['of']}"
    return "equal" if found["loss"] <= LOSS[found["precision"]] else "losses differ"


def tables(rows: list[dict]) -> str:
    """Return the census as Markdown: a table, and a sentence for all that is not equal."""
    shown = [{**_one_process(row), **{way.mesh: _cell(row, way) for way in WAYS}} for row in rows]
    failed = [
        f"- {row['family']}, {mesh}: {found['error'] or verdict(found)}"
        for row in rows
        for mesh, found in row.get("ways", {}).items()
        if verdict(found) != "equal"
    ]
    failed += [f"- {row['family']}: does not train in one process: {row['error']}" for row in rows if row["error"]]
    table = pandas.DataFrame(shown).to_markdown(index=False, disable_numparse=True)
    return "\n".join([table, "", *failed]) + "\n"


def _one_process(row: dict) -> dict:
    yes = {True: "yes", False: "**no**"}
    return {
        "family": row["family"],
        "parameters": f"{row['parameters']:,}",
        "float64": "no" if row["fp64"] else "yes",
        "causal": yes[row["causal"]] if "causal" in row else "",
        "packs documents": {True: "yes", False: "no"}.get(row.get("packed"), "refuses"),
        "random": "yes" if row.get("random") else "",
        "persistent buffers": ", ".join(row["buffers"]),
    }


def _cell(row: dict, way: Way) -> str:
    found = row.get("ways", {}).get(way.mesh)
    if not found:
        return ""
    word = verdict(found)
    return f"{found['loss']:.0e}" if word == "equal" else "refused" if word.startswith("refused") else "**no**"


@dataclass(frozen=True)
class Config(Options):
    """Which families, and what about them. The command line is made from these fields."""

    families: str | None = option(None, "NAME,NAME of samples/families.json (default: all)")
    inspect: bool = option(False, "only inspect them, in one process")
    library: bool = option(False, "load by the library's own parallelism, without the lab")
    record: str | None = option(None, "where the record goes (default: results/runs/); the table is put next to it")


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
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        path = records.new_path("census", config.record)
        rows = [families.inspect(name) for name in chosen(config)]
        if not config.inspect:
            rows = run(rows, WAYS, config.library)
    except UserError as error:
        ranks.exit_with_error(str(error))
    records.write_rows(path, rows, transformers=transformers.__version__)
    path.with_suffix(".md").write_text(page := tables(rows))
    print(page)
    ways = [found for row in rows for found in row.get("ways", {}).values()]
    equal = sum(verdict(found) == "equal" for found in ways)
    print(f"{len(rows)} families; {equal} of {len(ways)} runs on several ranks equal one process; record: {path}")


if __name__ == "__main__":
    main()
