# SPDX-License-Identifier: BSD-3-Clause
"""What every notebook stands on: its settings, functions on ranks, verdicts, guesses."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from commands import refused
from labkit.measuring.replaced import replaced
from labkit.running import launch
from labkit.running.lab import Lab
from labkit.teaching import exercises
from labkit.teaching.verdicts import about_guess, comparison, verdict

HERE = Lab(ranks=3, launcher="local")


def test_settings_come_from_the_environment_or_the_cell(monkeypatch):
    monkeypatch.setenv("FSDP_LABS_RANKS", "8")
    monkeypatch.setenv("FSDP_LABS_PARTITION", "a100")
    assert (Lab().ranks, Lab().partition, Lab(ranks=2).ranks) == (8, "a100", 2)
    assert "a100" in repr(Lab())


@pytest.mark.parametrize(
    ("value", "words"), [("four", ("FSDP_LABS_RANKS", "'four'")), ("1", ("1 rank ", "at least 2"))]
)
def test_bad_number_of_ranks_is_a_sentence(monkeypatch, value, words):
    monkeypatch.setenv("FSDP_LABS_RANKS", value)
    with refused(*words):
        Lab()


def test_function_runs_on_every_rank_with_a_process_group():
    offset = 10  # travels with the function

    def add(me, factor):
        tensor = torch.tensor([factor * me.rank + offset])
        dist.all_reduce(tensor)
        return me.rank, me.world_size, tensor

    returned = HERE.on_ranks(add, 2)
    assert [(rank, world) for rank, world, _ in returned] == [(0, 3), (1, 3), (2, 3)]
    assert all(tensor.item() == 2 * (0 + 1 + 2) + 30 for _, _, tensor in returned)


@pytest.mark.parametrize(("mine", "theirs"), [(None, "timeout:1"), ("timeout:9", "timeout:9")])
def test_ranks_here_do_not_wait_long_for_a_name_server(mine, theirs, monkeypatch):
    """PyTorch asks for a name at each connection; the C library reads the variable before its first question."""
    monkeypatch.setenv("RES_OPTIONS", mine) if mine else monkeypatch.delenv("RES_OPTIONS", raising=False)
    assert HERE.on_ranks(lambda me: os.environ.get("RES_OPTIONS")) == [theirs] * 3


def test_what_ranks_print_is_printed(capsys):
    HERE.on_ranks(lambda me: me.say("from rank 0"))
    assert capsys.readouterr().out == "from rank 0\n"


def test_first_error_comes_back_as_text(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "RUNS", tmp_path)

    def fail(me):
        if me.rank == 1:
            raise ValueError("a bad day")
        dist.barrier()

    with pytest.raises(launch.RunFailed, match="(?s)rank 1 failed.*ValueError: a bad day"):
        HERE.on_ranks(fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("measured", "options", "word"),
    [
        (100, {"predicted": 100}, "PASS"),
        (101, {"predicted": 100}, "FAIL"),
        (101, {"predicted": 100, "limit": 0.01}, "PASS"),
        (102, {"predicted": 100, "limit": 0.01}, "FAIL"),
        (98, {"predicted": 100, "limit": 0.01}, "FAIL"),
        (0, {"predicted": 0}, "PASS"),
        (1, {"predicted": 0, "limit": 0.5}, "FAIL"),
        (math.nan, {"predicted": 1.0, "limit": 9.0}, "FAIL"),
        (1e-12, {"at_most": 1e-10}, "PASS"),
        (1e-9, {"at_most": 1e-10}, "FAIL"),
        (math.nan, {"at_most": 1.0}, "FAIL"),
        (5, {"at_least": 5}, "PASS"),
        (4, {"at_least": 5}, "FAIL"),
        (math.nan, {"at_least": 5}, "FAIL"),
        (math.inf, {"at_least": 5}, "FAIL"),
        (-math.inf, {"at_most": 5}, "FAIL"),
        (5, {"predicted": math.inf, "limit": 0.1}, "FAIL"),
        (5, {"at_most": math.inf}, "FAIL"),
        (5, {"at_most": math.nan}, "FAIL"),
    ],
)
def test_verdict(measured, options, word, capsys):
    verdict("the claim", measured, otherwise="the usual cause", **options)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{word}  the claim: measured ")
    assert ("the usual cause" in printed) == (word == "FAIL")


def test_verdict_needs_one_thing_to_compare_with():
    with pytest.raises(TypeError):
        verdict("the claim", 1)
    with pytest.raises(TypeError):
        verdict("the claim", 1, predicted=1, at_most=2)


def test_two_numbers_that_nobody_measured_are_compared_without_a_verdict(capsys):
    comparison("torchtitan, 8B", 7.52, 7.48, how="published", reference="planned", unit="GiB")
    assert capsys.readouterr().out == "----  torchtitan, 8B: published 7.52 GiB, planned 7.48 GiB (+0.53%)\n"


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (None, "No guess yet"),
        (10, "that is it"),
        (7, "size of gradients: left out?"),
        (13, "size of gradients: counted twice?"),
        (4, "parameters and gradients: left out?"),
        (0.2, "activations, parameters and gradients: left out?"),
        (100, "the terms are parameters 30%, gradients 30%, activations 40%"),
    ],
)
def test_guess_is_explained(guess, words, capsys):
    terms = {"gradients": 3 * 2**20, "parameters": 3 * 2**20, "activations": 4 * 2**20}
    if "30%" in words:
        terms = {"parameters": 3 * 2**20, "gradients": 3 * 2**20, "activations": 4 * 2**20}
    about_guess(guess, terms)
    assert words in capsys.readouterr().out


def test_what_nobody_leaves_out_explains_no_gap(capsys):
    terms = {"parameters": 3 * 2**20, "gradients": 2 * 2**20, "activations": 5 * 2**20}
    about_guess(7, terms, sure=("parameters",))
    assert "the terms are gradients 20%, activations 50%" in capsys.readouterr().out


def test_unknown_exercise_is_a_sentence():
    with refused("'99.1'"):
        exercises.check("99.1", 3)


def test_what_was_replaced_is_restored_also_after_an_error():
    class Owner:
        kept, other = 1, 2

    with pytest.raises(ZeroDivisionError), replaced(Owner, kept=3, other=4):
        assert (Owner.kept, Owner.other) == (3, 4)
        raise ZeroDivisionError
    assert (Owner.kept, Owner.other) == (1, 2)
    with pytest.raises(AttributeError), replaced(Owner, missing=3):
        pytest.fail("an attribute that was not there cannot be replaced")
