# SPDX-License-Identifier: BSD-3-Clause
"""The census of transformers' families: a part of it is taken again, its record is complete, and the page shows it."""

import copy
import json

import pytest
import torch
import transformers
from commands import refused
from labkit.measuring.records import RESULTS
from proofs import census, families, families_page

pytestmark = pytest.mark.long
NAMES = families.names()
TRACEBACKS = set()
PART = 12  # of so many families one is taken again, and another one inspected; make nightly takes the others in turn
NUMBERS = range(len(NAMES) // PART)
MESHES = ("shard=2", "tensor=2", "shard=2,expert=2")  # four ranks are for the record


@pytest.fixture(scope="module")
def record():
    (path,) = (RESULTS / "reference").glob("census-*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def rows(record):
    """{family: its row of the record}."""
    return {row["family"]: row for row in record["rows"]}


def part(seed):
    """Every twelfth of all families, from another one on for each seed."""
    return [NAMES[(seed + PART * number) % len(NAMES)] for number in NUMBERS]


@pytest.fixture(scope="module")
def again(rows, seed):
    """{family: its row, taken again}, each in the next of its ways."""
    chosen = []
    for number, name in enumerate(part(seed)):
        ways = [way for way in census.ways_of(rows[name]) if way.mesh in MESHES]
        turn = seed // PART + number
        chosen.append((rows[name], [ways[turn % len(ways)]] if ways else []))
    return {row["family"]: row for row in census.run(chosen)}


def peaks_off(row):
    """{(family, mesh)} of a row's measured peaks that are not as planned."""
    found = families_page.peaks(row)
    return {(row["family"], mesh) for mesh, off in found.items() if not abs(off) <= families_page.PEAK}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_family_trains_on_several_ranks_as_the_record_says(number, seed, rows, again):
    name = part(seed)[number]
    for mesh, found in again[name]["ways"].items():
        recorded = rows[name]["ways"][mesh]
        assert families_page.verdict(found) == families_page.verdict(recorded)
        assert found.get("plan") == recorded.get("plan")
    assert peaks_off(again[name]) == set()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_family_is_in_one_process_what_the_record_says(number, seed, rows):
    name = part(seed + PART // 2)[number]  # not those that are trained
    assert families.inspect(name) == {key: value for key, value in rows[name].items() if key not in ("ways", "reread")}


def test_the_record_is_of_all_families_and_of_the_installed_library(record, rows):
    assert list(rows) == NAMES
    assert record["transformers"] == transformers.__version__
    for row in rows.values():
        assert list(row["ways"]) == [way.mesh for way in census.ways_of(row)]


def test_most_families_train_in_every_way_as_one_process(rows):
    equal = [row["family"] for row in rows.values() if row["ways"] and not families_page.failures(row)]
    assert len(equal) >= 100


def test_all_six_ways_are_seen(rows):
    for way in census.WAYS:
        assert sum(way.mesh in row["ways"].keys() - families_page.failures(row) for row in rows.values()) >= 40


def test_what_differs_is_refused(rows):
    """No family trains silently otherwise than one process, and none ends in a traceback but those known to."""
    of = {(name, word) for name, row in rows.items() for word in families_page.failures(row).values()}
    assert {name for name, word in of if not word.startswith("refused")} == TRACEBACKS


def test_each_family_is_planned_or_refused_and_peaks_are_as_planned(rows):
    trained = [row for row in rows.values() if row["ways"]]
    for row in trained:
        assert families_page.planned(row).startswith(("arithmetic", "simulated", "refused: "))
    assert set().union(*map(peaks_off, trained)) == set()
    assert sum("shard=2" in families_page.peaks(row) for row in trained) >= 120
    assert sum("tensor=2" in families_page.peaks(row) for row in trained) >= 60


def test_the_page_is_that_of_the_record():
    assert families_page.PAGE.read_text() == families_page.page()


def test_one_changed_element_is_found():
    model = families.build("gemma4_text")
    expected = {name: tensor.clone() for name, tensor in families.tensors_of(model).items()}
    assert census.unequal(families.tensors_of(model), expected) == []
    expected["model.layers.1.layer_scalar"] += 1e-6
    assert census.unequal(families.tensors_of(model), expected) == ["model.layers.1.layer_scalar"]
    del expected["model.norm.weight"]
    assert "model.norm.weight" in census.unequal(families.tensors_of(model), expected)


def test_a_gradient_that_is_halved_or_missing_is_found():
    model = families.build("qwen3_moe", torch.float64)
    gradients, _ = families.train(copy.deepcopy(model), 2, False)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    assert census.gradient_difference(model, gradients)[0] == 0
    halved = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    halved.grad /= 2
    assert census.gradient_difference(model, gradients) == (0.5, "model.layers.0.mlp.experts.down_proj")
    halved.grad = None
    assert census.gradient_difference(model, gradients)[0] == float("inf")


def test_a_model_that_sees_the_future_is_found():
    assert families.inspect("bert")["causal"] is False
    assert families.inspect("bert_decoder")["causal"] is True


def test_a_family_that_is_not_listed_is_refused():
    with refused("--families", "nobody"):
        census.chosen(census.Config(families="llama,nobody"))
