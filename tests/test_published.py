# SPDX-License-Identifier: BSD-3-Clause
"""Published memory figures next to the plan: the page and its record are what the planner says now, and leave none out."""

import json

import pytest
from labkit.measuring.records import RESULTS
from labkit.running import launch
from proofs import published

PAGE = launch.SOURCE.parent / "docs" / "published.md"
SOURCES = ("s1#25", "llama-cookbook#100", "llama-cookbook#234", "llama-cookbook#41", "torchtitan#191", "torchtune#863")
SOURCES += ("torchtune#987", "FastChat#2322", "accelerate#1280", "pytorch#82001", "axolotl#1522")


@pytest.fixture(scope="module")
def rows():
    return json.loads((RESULTS / "reference" / "published-memory.json").read_text())["rows"]


def test_the_record_has_every_figure(rows):
    listed = [(source["source"], figure) for source in published.sources() for figure in source["figures"]]
    assert [(row["source"], row["figure"]) for row in rows] == listed
    assert {source["source"] for source in published.sources()} >= set(SOURCES)


def test_the_record_is_what_the_planner_says(rows, monkeypatch):
    """Where it is arithmetic: a simulation takes a minute, and test_plan_any.py has some."""

    class Simulation(Exception):
        pass

    def not_here(_):
        raise Simulation

    monkeypatch.setattr(published, "_simulated", not_here)
    computed = 0
    for row in rows:
        try:
            assert published.planned(row["figure"]) == pytest.approx(row["plan"]), row["figure"]["published"]
            computed += 1
        except Simulation:
            assert row["plan"].get("how") != "arithmetic", row["figure"]["published"]
    assert computed > 40


def test_the_page_is_the_records(rows):
    assert PAGE.read_text() == published.page(rows)


def test_every_figure_is_attributed_and_every_difference_has_a_reason(rows):
    for source in published.sources():
        assert source["url"] is None or (source["url"].startswith("https://github.com/") and source["date"])
    for row in rows:
        word = published.compared(row["figure"], row["plan"])
        differs = word.startswith("**") or (word[:1].isdecimal() and not 0.9 < float(word) < 1.1)
        assert row["figure"].get("why") or not differs, row["figure"]["published"]


def test_a_plan_is_compared_with_what_the_figure_is_of():
    plan = {"answer": "tight", "allocated": 30.0, "reserved": 36.0, "parameters": 5.0, "ranks": 4}
    sizes = {"allocated": "1.50", "reserved": "1.80", "parameters": "0.25", "parameters of all ranks": "1.00"}
    for kind, word in sizes.items():
        assert published.compared({"kind": kind, "value": 20}, plan) == word
    for answer, words in {"fits": ("agrees", "**disagrees**"), "does not fit": ("**disagrees**", "agrees")}.items():
        kinds = ("runs", "out of memory")
        assert tuple(published.compared({"kind": kind}, plan | {"answer": answer}) for kind in kinds) == words
    assert published.compared({"kind": "runs"}, plan) == "open"
    assert published.compared({"kind": "reserved", "value": 20}, {"refused": "why"}) == ""


def test_a_refusal_names_the_model_and_no_temporary_file():
    figure = {"model": "t5-3b", "options": {"ranks": 8, "optimizer": "shampoo"}}
    assert published.planned(figure)["refused"].startswith("--optimizer is one of")
