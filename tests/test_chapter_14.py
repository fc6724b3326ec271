"""Chapter 14: its exercises judge fairly, its verdicts fail when what it claims is broken, without JAX it says so."""

import importlib.metadata
import re
import sys
from math import prod
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


def shared_all(me, forwards) -> list:
    return [chapter_14._shared(me, forward) for forward in forwards]


@pytest.fixture(scope="module")
def found():
    """{forward: what a process with JAX makes of it}; one for all, as each would take seconds to start."""
    forwards = [by_value(forward) for forward in FORWARDS]
    here = launch.Cluster(launcher="local")
    return dict(
        zip(
            FORWARDS,
            notebook_ranks.on_ranks(by_value(shared_all), forwards, ranks=1, cluster=here, timeout=120)[0],
            strict=True,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_is_told_its_first_difference(forward, found, capsys, monkeypatch):
    monkeypatch.setattr(chapter_14, "on_ranks", lambda *_, **__: [found[forward]])
    check("14.1", forward)
    assert FORWARDS[forward] in capsys.readouterr().out


def largest(shape, devices, threshold):
    """The mistake of not asking whether the devices divide it."""
    cut = shape.index(max(shape))
    return tuple("fsdp" if d == cut else None for d in range(len(shape)))


def first_that_divides(shape, devices, threshold):
    cut = next((d for d, size in enumerate(shape) if size % devices == 0), None)
    return tuple("fsdp" if d == cut else None for d in range(len(shape)))


def something_always(shape, devices, threshold):
    """The mistake of cutting the largest where the devices divide none."""
    dims = [d for d, size in enumerate(shape) if size % devices == 0] or [shape.index(max(shape))]
    cut = max(dims, key=lambda d: shape[d])
    return tuple("fsdp" if d == cut and prod(shape) >= threshold else None for d in range(len(shape)))


def without_threshold(shape, devices, threshold):
    dims = [d for d, size in enumerate(shape) if size % devices == 0]
    cut = max(dims, key=lambda d: shape[d])
    return tuple("fsdp" if d == cut else None for d in range(len(shape)))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (largest, "100 is not divisible by 8 devices"),
        (first_that_divides, "the largest divisible dimension, or the first"),
        (something_always, "25 is not divisible by 8 devices"),
        (without_threshold, "fewer than the threshold"),
        (lambda shape, devices, threshold: (None,) * len(shape), "by the rule (None, 'fsdp')"),
        (lambda shape, devices, threshold: "fsdp", "for each of the 2 dimensions"),
        (lambda shape, devices, threshold: ("fsdp",) * len(shape), "shards one dimension"),
    ],
)
def test_a_sharding_function_is_told_its_first_difference(spec, said, capsys):
    check("14.3", spec)
    assert said in capsys.readouterr().out


def failed(lines):
    return [
        re.split(": (?:measured|planned|counted)", line)[0].removeprefix("FAIL  ")
        for line in lines
        if line.startswith("FAIL")
    ]


@pytest.mark.long
def test_what_is_not_sharded_recomputed_or_multiplied_out_is_noticed():
    """fsdp is replicated in truth; what is said to be recomputed is not; a loop's body is counted once."""
    breaks = {
        "    run(strategy, strategy=strategy)": "    run(strategy, strategy=strategy) if strategy != 'fsdp' else "
        "runs.update(fsdp=runs['replicated'])",
        'run("explicit, recomputed", strategy="fsdp-explicit", recompute="full")': 'runs["explicit, recomputed"] = '
        'SimpleNamespace(**vars(runs["fsdp-explicit"]) | {"config": gpt_jax.Config(recompute="full", **SMALL)})',
        "hlo.collectives(compiled.as_text(), dict(mesh.shape))": "hlo.collectives(compiled.as_text().replace("
        '\'known_trip_count":{"n":"4"\', \'known_trip_count":{"n":"1"\'), dict(mesh.shape))',
        "apart(pytorch, ": 'apart(runs["replicated"].losses, ',
    }
    lines = run_broken("14", breaks, until="how many times less", skip=("lab.run(",))
    collectives = [f"{name}: {kind}" for name in ("fsdp-explicit", "explicit, recomputed") for kind in
                   ("all-gather", "reduce-scatter", "all-reduce")]  # fmt: skip
    assert failed(lines) == [
        "the recipe: bytes all-gathered in a step",
        "left alone: bytes all-gathered in a step",
        "fsdp: kept between two steps",
        "arrays above the threshold of which a device has not an eighth",
        *collectives,
        "the stack, all but weights kept: gathered",
        "explicit, recomputed: temporary memory of a device",
        "recomputed: how many times less by sharding",
        "how many times less temporary memory, recomputed",
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
        elif headings := re.findall(r"^##? (.+)$", cell.source, flags=re.MULTILINE):
            heading = headings[-1]
            found.update(dict.fromkeys(headings, ""))
    return found


def test_the_table_of_concepts_points_at_sections_that_ran():
    """Each row's section shows what the row's column on JAX names."""
    notebook = read(PATH)
    (table,) = (cell.source for cell in notebook.cells if "| | PyTorch | JAX | ran in |" in cell.source)
    rows = re.findall(r"^\| ([a-z].+) \| (.+) \| (.+) \| (.+) \|$", table, flags=re.MULTILINE)
    code = sections(notebook)
    words = {  # what the row is about, in the code of its section
        "devices as a grid": 'jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,)',
        "a parameter in parts": 'NamedSharding(mesh, P("fsdp", None))',
        "what this rank has": "addressable_shards",
        "whole while it computes": "jax.lax.with_sharding_constraint",
        "how much at a time": "jax.lax.scan",
        "all-gather before forward": "jax.lax.all_gather",
        "reduce-scatter in backward": "in_the_open",
        "reshard after forward": "policy=but_weights",
        "activation checkpointing": "jax.checkpoint",
        "small things stay whole": "min_size",
        "memory of a step": "hlo.memory",
        "what is sent": "collectives_of",
    }
    assert {row[0] for row in rows} == set(words)
    for about, _, _, heading in rows:
        assert words[about] in code[heading]


def test_the_page_shows_the_labs_own_lines():
    """What stands in the text as the lab's function is that function, but for its docstring."""
    import ast

    notebook, lab = read(PATH), ast.parse((FOLDER.parent / "source_code/gpt_jax.py").read_text())
    (shown,) = (
        part for cell in notebook.cells for part in re.findall(r"```python\n(def .+?)```", cell.source, re.DOTALL)
    )
    (own,) = (each for each in lab.body if getattr(each, "name", "") == "constrain_gathered")
    own.body = own.body[1:]
    assert ast.unparse(ast.parse(shown)) == ast.unparse(own)


def test_devices_of_its_exercise_are_those_of_the_chapter():
    assert any(f"DEVICES = {DEVICES}" in cell.source for cell in code_cells(read(PATH)))
