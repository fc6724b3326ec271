# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 14: its exercises judge fairly, its verdicts fail when what it claims is broken, without JAX it says so."""

import importlib.metadata
import re
import sys
from types import ModuleType

import pytest
from forked import by_value
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from labkit.running import launch, notebook_ranks
from labkit.teaching.exercises import chapter_14, check
from labkit.teaching.exercises.chapter_14 import DEVICES

from notebooks import FOLDER, code_cells, read, run_broken

(PATH,) = FOLDER.glob("14_*.ipynb")


def all_at_once(shards, x):
    import jax
    import jax.numpy as jnp

    weights = jax.lax.all_gather(shards, "fsdp", axis=1, tiled=True)
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def own_rows_alone(shards, x):
    return x


def all_first(shards, x):
    import jax
    import jax.numpy as jnp

    weights = [jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True) for shard in shards]
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def without_tanh(shards, x):
    import jax

    def layer(x, shard):
        return x @ jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True), None

    return jax.lax.scan(layer, x, shards)[0]


def whole_batch(shards, x):
    import jax

    return jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)


FORWARDS = {
    all_at_once: "all layers are gathered at once",
    all_first: "outside of the loop",
    own_rows_alone: "nothing is gathered",
    without_tanh: "the result is not that of the full layers",
    whole_batch: "the shape of x",
}


def shared_all(me, forwards, flags) -> tuple[list, dict, set]:
    """What becomes of each forward, {flag: the scheduled program with it}, and which old names JAX still has."""
    outcomes = [chapter_14._shared(me, forward) for forward in forwards]
    import jax

    old = {"jax.tree_map": (jax, "tree_map")}
    old |= {name: (jax.sharding, name) for name in ("PositionalSharding", "use_mesh")}
    still = {name for name, (module, attribute) in old.items() if hasattr(module, attribute)}
    return outcomes, scheduled(flags), still


def scheduled(flags) -> dict[str, str]:
    """{flag: the text of four resharded layers in a scan, compiled with it}, or the error; "" stands for no flag."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, texts = jax.make_mesh((DEVICES,), ("fsdp",)), {}

    def arrays(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ jax.reshard(weight, P(None, None))), None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    for flag in ("", *flags):  # from one line of code: a program's text has its position
        options = {flag: 1 if flag.endswith("_bytes") else True} if flag else None
        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss))
            lowered = step.lower(arrays((4, 64, 64), None, "fsdp", None), arrays((16, 64), "fsdp", None))
        try:
            texts[flag] = lowered.compile(compiler_options=options).as_text()
        except Exception as error:
            texts[flag] = str(error)
    return texts


def overlap_flags() -> list[str]:
    """The flags in the chapter's table."""
    text = "\n".join(cell.source for cell in read(PATH).cells if cell.cell_type == "markdown")
    return re.findall(r"^\| `--(xla_gpu_\w+)` \|", text, flags=re.MULTILINE)


MISSPELLED = "xla_gpu_enable_latency_hiding"


@pytest.fixture(scope="module")
def found():
    """What a process with JAX makes of all that needs one; each process would take seconds to start."""
    work = by_value(shared_all), [by_value(forward) for forward in FORWARDS], [*overlap_flags(), MISSPELLED]
    here = launch.Cluster(launcher="local")
    outcomes, programs, still = notebook_ranks.on_ranks(*work, ranks=1, cluster=here, timeout=120)[0]
    return dict(zip(FORWARDS, outcomes, strict=True)) | {"programs": programs, "still": still}


@pytest.mark.long
def test_a_forward_is_told_its_first_difference(found, capsys, monkeypatch):
    for forward, difference in FORWARDS.items():
        monkeypatch.setattr(chapter_14, "on_ranks", lambda *_, forward=forward, **__: [found[forward]])
        check("14.1", forward)
        assert difference in capsys.readouterr().out, forward.__name__


@pytest.mark.long
def test_on_the_cpu_the_flags_of_overlap_are_known_and_change_nothing(found):
    """As the chapter says; a compiler for CPUs that heeds them would have something to show there."""
    programs, flags = found["programs"], overlap_flags()
    assert len(flags) == 4
    for flag in flags:
        assert programs[flag] == programs[""], flag
    assert "is_scheduled=true" in programs[""] and "all-gather" in programs[""]
    assert "No such compile option" in programs[MISSPELLED]


@pytest.mark.long
def test_what_it_calls_gone_from_jax_is_gone(found):
    assert not found["still"]


def sent(program, *kinds):
    return sum(each["bytes"] * each["count"] for each in program if each["kind"] in kinds)


def gathers_alone(small, large, parameters):
    """The mistake of not asking whether gradients are summed."""
    times = sent(small, "all-gather") / parameters
    constant = sent(small, "all-gather") == sent(large, "all-gather")
    return "replicated" if not times else "not FSDP" if not constant else "kept" if times < 1.1 else "resharded"


def one_batch(small, large, parameters):
    """The mistake of looking at one batch."""
    if abs(sent(small, "all-reduce", "reduce-scatter") / parameters - 1) > 0.1:
        return "not FSDP"
    times = sent(small, "all-gather") / parameters
    return "replicated" if not times else "kept" if times < 1.1 else "resharded"


def of_gpus(small, large, parameters):
    """The mistake of looking for reduce-scatters only."""
    if not sent(small, "all-gather"):
        return "replicated"
    if sent(small, "reduce-scatter") < 0.9 * parameters:
        return "not FSDP"
    return "kept" if sent(small, "all-gather") < 1.1 * parameters else "resharded"


def without_counts(small, large, parameters):
    gathered = sum(each["bytes"] for each in small if each["kind"] == "all-gather")
    return "replicated" if not gathered else "kept" if gathered > 0.9 * parameters else "not FSDP"


@pytest.mark.parametrize(
    ("strategy_of", "said"),
    [
        (gathers_alone, "gradients not summed: 'kept', and it is 'not FSDP'"),
        (one_batch, "grow with the batch: 'kept', and it is 'not FSDP'"),
        (of_gpus, "FSDP on the CPU, kept: 'not FSDP', and it is 'kept'"),
        (without_counts, "FSDP on GPUs, kept: 'not FSDP', and it is 'kept'"),
        (lambda small, large, parameters: "kept", "tiny, all gradients all-reduced: 'kept', and it is 'replicated'"),
    ],
)
def test_a_reader_of_programs_is_told_the_first_that_it_takes_for_another(strategy_of, said, capsys):
    check("14.2", strategy_of)
    assert said in capsys.readouterr().out


def failed(lines):
    return [
        re.split(": (?:measured|planned|counted)", line)[0].removeprefix("FAIL  ")
        for line in lines
        if line.startswith("FAIL")
    ]


RUN = ("01", "02", "04", "06", "11", "09", "cures", "cures-run", "14", "57a", "22", "22-run", "32")
RUN += ("60", "bf16-run", "53", "55", "56")


@pytest.mark.breaks
def test_what_is_not_sharded_gathered_or_refused_is_noticed():
    """Each strategy's program is another's; the activations are not constrained; the trap is not on the Explicit mesh."""
    breaks = {
        'run("fsdp-weights", strategy="fsdp-weights", reshard_after_forward="false")': "runs.update({"
        '"fsdp-weights": runs["nothing said"]})',
        'run("fsdp-activations", strategy="fsdp-activations")': 'runs["fsdp-activations"] = runs["replicated"]',
        'run("fsdp-shard-map", strategy="fsdp-shard-map")': 'runs["fsdp-shard-map"] = runs["fsdp-explicit"]',
        'nothing_said("nothing said, batch 8", steps=0, batch_size=8)': "runs.update({"
        '"nothing said, batch 8": runs["nothing said"]})',
        "with_sharding_constraint(x @ weight, rows)": "with_sharding_constraint(x @ weight, columns)",
        "outcome(typed_weight, typed_batch)": "outcome(by_columns, batch(64))",
        "[square] * 2, batch(64))": "[square] * 2, batch(2048))",
        'jax.jit(optimizer.init)(runs["fsdp-activations"].params)': 'jax.tree.map(jnp.zeros_like, runs["fsdp-explicit"].state)',
        "counted = sum(": "counted = 1 + sum(",
    }
    lines = run_broken("14", breaks, until="no cell", only=tuple(f"cell-{name}" for name in RUN))
    assert failed(lines) == [
        "constrained: bytes all-gathered, those of the weight",
        "Explicit mesh: layouts of three that are an error",
        "two layers by rows, nothing said: bytes all-gathered, in those of both weights",
        "fsdp-weights: bytes all-gathered",
        "fsdp-weights: temporary memory of a device",
        "fsdp-activations: bytes all-gathered",
        "fsdp-shard-map: bytes reduce-scattered",
        "nothing said: gathered with a batch of 8, over 2",
        "fsdp-activations: stored between two steps",
        "optimizer state on device 0, Auto mesh without shardings, in shares of a device",
        "all-gather: times it ran, by the profile",
        "reduce-scatter: times it ran, by the profile",
        "all-reduce: times it ran, by the profile",
    ]


def test_without_jax_its_first_cell_says_so_in_a_sentence(monkeypatch, capsys):
    there = importlib.metadata.version

    def version(name):
        if name == "jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it fails, with other words
    monkeypatch.setattr(sys, "path", sys.path.copy())  # which the cell changes
    monkeypatch.setattr(HistoryManager, "enabled", False)
    InteractiveShell(colors="nocolor", user_module=ModuleType("cells")).run_cell(code_cells(read(PATH))[0].source)
    assert capsys.readouterr().out.strip() == "jax is not installed, which FSDP in JAX needs: run make jax"


def sections(notebook) -> dict[str, str]:
    """{heading: the code below it, up to the next}."""
    found, heading = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found[heading] += cell.source + "\n"
        elif headings := re.findall(r"^##?#? (.+)$", cell.source, flags=re.MULTILINE):
            heading = headings[-1]
            found.update(dict.fromkeys(headings, ""))
    return found


def test_the_table_of_concepts_points_at_sections_that_ran():
    """Each row's section shows what the row's column on JAX names."""
    notebook = read(PATH)
    (table,) = (cell.source for cell in notebook.cells if "| JAX | where on this page |" in cell.source)
    rows = re.findall(r"^\| ([a-z`].+) \| (.+) \| (.+) \| (.+) \|$", table, flags=re.MULTILINE)
    code = sections(notebook)
    words = {  # what the row is about, in the code of its section
        "devices as a grid": 'jax.make_mesh((DEVICES,), ("fsdp",)',
        "gathered while it computes": "jax.reshard",
        "reduce-scatter in backward": "jax.lax.all_gather",
        "`reshard_after_forward=True`": 'strategy="fsdp-activations"',
        "mixed precision": "cast, then gather",
        "activation checkpointing": 'recompute="full"',
        "small parameters stay whole": "min_size",
    }
    rows = [row for row in rows if "not on this page" not in row[3]]
    assert {row[0] for row in rows} == set(words)
    for about, _, _, heading in rows:
        assert words[about] in code[heading]


def test_devices_of_its_exercise_are_those_of_the_chapter():
    assert any(f"DEVICES = {DEVICES}" in cell.source for cell in code_cells(read(PATH)))
