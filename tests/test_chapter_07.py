# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 07: its verdicts can fail, and its exercises judge as they should."""

import ast
import os
import pickle
import signal
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import by_value
from labkit.running import launch
from labkit.teaching.exercises import check
from minimal import checkpoint
from proofs import recipe
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from notebooks import run_broken

SETTINGS = ("cell-01", "cell-02", "cell-06", "cell-07")
NOT_RUN = {"whole = lab.run(": "whole = None and lab.run(", 'whole["data"]["name"]': '"mnist-5k"'}
# What is broken, in which further cells, and the claims that must then fail
BREAKS = {
    "the optimizer has no state": (
        NOT_RUN | {"torch.optim.Adadelta(model.parameters(), lr=config.lr)": "torch.optim.SGD(model.parameters())"},
        ("cell-10", "cell-17"),
        ["checkpoint of 4 ranks"],
    ),
    "other images after the seam": (
        {
            "resume=True, **same": "resume=True, seed=2, **same",
            "for ranks in (2, 3)": "for ranks in (2,)",  # and few steps, to be quick
            "steps, saved_at, killed_at = 16, 8, 12": "steps, saved_at, killed_at = 4, 2, 3",
        },
        ("cell-10", "cell-17", "cell-22", "cell-23"),
        ["on 2 ranks: losses apart by"],
    ),
    "a step before the asynchronous save is called": (
        NOT_RUN | {"before = snapshot()": "before = snapshot(); train()"},
        ("cell-31a", "cell-32", "cell-33", "cell-34"),
        ["parameters read back, against those at the call"],
    ),
    "each step has its own folder, so the killed save leaves one state": (
        NOT_RUN
        | {
            "checkpoint_id=where, process_group=saving_group": "checkpoint_id=where / str(step), process_group=saving_group",
            'checkpoint_id=folder / "same"': 'checkpoint_id=folder / "same" / "1"',
        },
        ("cell-35l", "cell-35m"),
        ["states in one checkpoint"],
    ),
    "a warning comes a step later, and the loader is not restored": (
        NOT_RUN
        | {
            "step == warn_in": "step - 1 == warn_in",
            "    done = Recipe.load(where, model, optimizer, scheduler, loader)\n": "    done = Recipe.load(where, model, "
            "optimizer, scheduler, loader)\n    loader = StatefulDataLoader(samples, batch_sampler=GlobalBatches(me))\n",
        },
        ("ex-0-answer", "cell-35c", "cell-35k", "cell-35e", "cell-35g", "cell-35t", "cell-35h", "cell-35i"),
        [
            "the first rank ends after step",
            "the last rank ends after step",
            "the next day begins, at the earliest, with step",
            "the next day begins, at the latest, with step",
            "fp64, on 2 ranks: losses apart by",
            "fp32, on 2 ranks: losses apart by",
            "fp32, on 4 ranks as before: losses apart by",
        ],
    ),
    "on fewer ranks nothing is loaded": (
        NOT_RUN
        | {
            "notes, losses = [], {}": 'notes, losses, where = [], {}, where if me.world_size == 4 else where / "empty"',
            '("fp64", "fp32")': '("fp64",)',  # to be quick
            "fp32, 2 ranks": "fp64, 2 ranks",
            "fp32, 4 ranks": "fp64, 4 ranks",
            'each["fp32"]': 'each["fp64"]',
        },
        ("ex-0-answer", "cell-35c", "cell-35k", "cell-35e", "cell-35g", "cell-35t", "cell-35h", "cell-35i"),
        ["the next day begins, at the earliest, with step"],
    ),
    "rank 0 decides alone whether all are finite": (
        NOT_RUN | {"dist.all_reduce(flag, dist.ReduceOp.MIN)": "dist.broadcast(flag, 0)"},
        ("cell-35r", "cell-35u", "cell-35s"),
        ["keep=2, with the check: newest finite one"],
    ),
}


@pytest.mark.breaks
@pytest.mark.parametrize("what", BREAKS)
def test_verdicts_can_fail(what):
    breaks, cells, claims = BREAKS[what]
    failed = [
        line for line in run_broken("07", breaks, "no such cell", only=SETTINGS + cells) if line.startswith("FAIL")
    ]
    assert [line.removeprefix("FAIL  ").split(": measured")[0] for line in failed] == claims


def test_the_recipe_has_at_most_30_lines():
    """Of code, without imports, docstrings, comments, and blank lines; and none is longer than the formatter lets it be."""
    text = (launch.SOURCE / "minimal" / "checkpoint.py").read_text()
    nodes = [*ast.walk(ast.parse(text))]
    apart = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    apart += [each for each in nodes if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
    left_out = {number for node in apart for number in range(node.lineno, node.end_lineno + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in left_out]
    assert len([line for line in lines if line and not line.startswith("#")]) <= 30
    assert max(map(len, text.splitlines())) <= 120


def test_the_loop_around_the_recipe_saves_ends_and_goes_on(world_of_one, tmp_path, monkeypatch):
    """The loop of its docstring, warned in step 2."""
    loop = textwrap.dedent(checkpoint.__doc__.partition("\n\n")[2].partition("\n\n")[0])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 5), Batches()
    names = {name: getattr(checkpoint, name) for name in ("os", "torch", "dist", "save", "load")} | {"signal": signal}
    names |= {"folder": tmp_path, "model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    seen = []

    def train_step(batch):
        seen.append(batch)
        if batch == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit, match="75"):
            exec(loop, names | {"train_step": train_step, "device": "cpu"})
        exec(loop, names | {"train_step": seen.append, "device": "cpu"})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1, 2, 3, 4]


class Batches:
    """Yield 1 to 4 once, from where its state is."""

    read = 0

    def __iter__(self):
        while self.read < 4:
            self.read += 1
            yield self.read

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


@pytest.mark.long
def test_the_recipe_survives_kills(tmp_path, monkeypatch):
    """A few of the proof's: the record in results/reference has 60."""
    monkeypatch.setattr(launch, "RUNS", tmp_path)
    rows = recipe.run(2, 3)
    assert [row["phase"] for row in rows] == ["saving", "elsewhere"]
    assert [row["failures"] for row in rows] == [[], []]


def judged(number, answer, capsys) -> str:
    check(number, answer)
    return capsys.readouterr().out


def joined(pieces):
    return torch.cat([piece for _, piece in sorted(pieces.items())])


WRONG = {
    "order [2, 1, 0]": lambda pieces, begin, end: torch.stack([joined(pieces)[r] for r in reversed(range(begin, end))]),
    "too many": lambda pieces, begin, end: torch.cat(
        [p for f, p in sorted(pieces.items()) if f < end and begin < f + len(p)]
    ),
    "are missing": lambda pieces, begin, end: next(
        p[begin - f : end - f] for f, p in pieces.items() if f <= begin < f + len(p)
    ),
    "indices inside a piece start at its first row": lambda pieces, begin, end: torch.cat(
        [p[begin:end] for _, p in sorted(pieces.items())]
    ),
    "must be a tensor": lambda pieces, begin, end: list(joined(pieces)[begin:end]),
    "has the shape (6,)": lambda pieces, begin, end: joined(pieces)[begin:end].flatten(),
    "raises KeyError": lambda pieces, begin, end: pieces[begin + 1],
    "not answered yet": lambda pieces, begin, end: ...,
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_readers_are_told_why(message, capsys):
    assert message in judged("07.2", WRONG[message], capsys)


def own(warned, device):
    return warned


def never(warned, device):
    reduced(warned, torch.distributed.ReduceOp.MAX)
    return False


def everyone(warned, device):
    return reduced(warned, torch.distributed.ReduceOp.MIN)


def anyone(warned, device):
    return reduced(warned, torch.distributed.ReduceOp.MAX)


def reduced(warned, how) -> bool:
    votes = torch.tensor(int(warned))
    torch.distributed.all_reduce(votes, how)
    return bool(votes)


VOTES = {
    own: "with rank 0 warned, rank 0 returns True and rank 1 False: they diverge",
    never: "with rank 0 warned, the ranks return False; one is enough",
    everyone: "one is enough: take the maximum",
    anyone: "right",
    lambda warned, device: ...: "not answered yet",
}


@pytest.mark.parametrize("vote", VOTES)
def test_votes_are_judged(vote, capsys):
    assert VOTES[vote] in judged("07.4", by_value(vote), capsys)


class Copied:
    """The course's recipe, as someone has changed it."""

    def __init__(self, **changed):
        self.changed = changed

    def __call__(self):  # check takes what can be called: a learner's class
        return self

    def save(self, folder, step, model, optimizer, *others):
        tensors, state = get_state_dict(model, optimizer)
        found = {"model": tensors, "optimizer": state, "step": step}
        found["others"] = pickle.dumps([each.state_dict() for each in others])
        where = folder / self.changed.get("name", f"step-{step:08d}")
        partial = where.with_suffix(".partial") if self.changed.get("renames", True) else where
        dcp.save(found, checkpoint_id=partial)
        if torch.distributed.get_rank() == 0 and partial != where:
            partial.rename(where)
        torch.distributed.barrier()

    def load(self, folder, model, optimizer, *others):
        names = sorted(path for path in folder.glob(self.changed.get("pattern", "step-????????")))
        if not names:
            return self.changed.get("at_first", 0)
        tensors, state = get_state_dict(model, optimizer)
        parts = {"model": tensors, "optimizer": state, "others": b"", "step": 0}
        found = {part: parts[part] for part in self.changed.get("parts", parts)} | {"step": 0}
        dcp.load(found, checkpoint_id=names[self.changed.get("which", -1)])
        set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=found.get("optimizer", state))
        if not self.changed.get("moments", True):
            optimizer.state.clear()
        states = pickle.loads(found["others"]) if "others" in found else [None] * len(others)
        for each, its, kept in zip(others, states, self.changed.get("restored", (True, True))):
            if kept:
                each.load_state_dict(its)
        return found["step"]


CHANGED = {
    "in step 3 batch 1 is read, and should be 3: the loader's state is not restored": {"restored": (True, False)},
    "in step 4 the learning rate is": {"restored": (False, True)},
    "in step 3 the learning rate is 0.1000, and 0.0950": {"parts": ("model", "others")},
    "in step 4 the loss is": {"moments": False},
    "these are not the parameters of step 2": {"name": "same", "pattern": "same", "renames": False},
    "not quite: a rank raises": {"pattern": "step-*", "renames": False},
    "without a checkpoint load returns 7": {"at_first": 7},
    "load returns 2": {"which": 0},
    "right": {},
}


@pytest.mark.parametrize("message", CHANGED)
def test_recipes_are_judged(message, capsys):
    assert message in judged("07.0", by_value(Copied)(**CHANGED[message]), capsys)


def test_a_recipe_without_dcp_is_told(capsys):
    class Nothing:
        def save(*_):
            pass

        def load(*_):
            return 0

    assert "save did not write a file by dcp.save" in judged("07.0", Nothing, capsys)
    assert "the functions save and load; save is missing" in judged("07.0", dict, capsys)
