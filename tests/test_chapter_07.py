"""Chapter 07: its verdicts can fail, and its exercises judge as they should."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import by_value
from labkit.teaching.exercises import check
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from notebooks import run_broken

# What is broken, up to which cell, without which cells, and the claims that must then fail
BREAKS = {
    "the optimizer has no state": (
        {
            "torch.optim.Adadelta(model.parameters(), lr=config.lr)": "torch.optim.SGD(model.parameters())",
            'whole["data"]["name"]': '"mnist-5k"',
        },
        "checkpoint of 4 ranks",
        ("lab.run(",),
        ["checkpoint of 4 ranks"],
    ),
    "other images after the seam": (
        {
            "resume=True, **same": "resume=True, seed=2, **same",
            "for ranks in (2, 3)": "for ranks in (2,)",  # and few steps, to be quick
            "steps, saved_at, killed_at = 16, 8, 12": "steps, saved_at, killed_at = 4, 2, 3",
        },
        "on {ranks} ranks: losses apart by",
        ("on_disk",),
        ["on 2 ranks: losses apart by"],
    ),
    "a step before the asynchronous save is called": (
        {"before = snapshot()": "before = snapshot(); train()"},
        "against those at the call",
        ("lab.run(", "preempted", "sizes(", "metadata", "def apart", "resumed", "def state_dicts", "state_dicts,"),
        ["parameters read back, against those at the call"],
    ),
    "a warning comes a step later, and nothing is loaded": (
        {
            "step == warn_in": "step == warn_in + 1",
            'go_on = yours_or_ours("07.0", go_on)': "go_on = lambda where, *_: 12 if where.exists() else 0",
            'whole["data"]["name"]': '"mnist-5k"',
            'whole["losses"][first - 1 :]': "after[1:] + after[:1]",
        },
        "gone on with two ranks",
        ("lab.run(", "preempted", "sizes(", "metadata", "apart(", "resumed", "state_dicts(", "extra", "on_disk")
        + ("save_both_ways", "from_call"),
        ["the first rank ends after step", "the last rank ends after step", "gone on with two ranks: losses apart by"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("what", BREAKS)
def test_verdicts_can_fail(what):
    breaks, until, skip, claims = BREAKS[what]
    failed = [line for line in run_broken("07", breaks, until, skip) if line.startswith("FAIL")]
    assert [line.removeprefix("FAIL  ").split(": measured")[0] for line in failed] == claims


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


def going_on(where, model, optimizer, parts=("model", "optimizer"), put_back=True, step=None, at_first=0):
    """The right function, and the ways to spoil it."""
    if not where.exists():
        return at_first
    tensors, state = get_state_dict(model, optimizer)
    found = {"model": tensors, "optimizer": state}
    found = {part: found[part] for part in parts} | {"step": 0}
    dcp.load(found, checkpoint_id=where)
    if put_back:
        optim_state = found.get("optimizer", state)
        set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=optim_state)
    return found["step"] if step is None else step


SPOILED = {
    "the parameters are right, so the optimizer state is wrong": {"parts": ("model",), "rate": True},
    "the learning rate is 0.1, that of a new optimizer": {"put_back": False},
    "the parameters are not the saved ones": {"parts": ()},
    "it returns 0, but step 3 was saved": {"step": 0},
    "without a checkpoint it returns None": {"at_first": None},
}


@pytest.mark.parametrize("message", SPOILED)
def test_who_goes_on_wrongly_is_told_why(message, capsys):
    how = dict(SPOILED[message])
    lowered = how.pop("rate", False)

    def go_on(where, model, optimizer):
        if lowered:
            optimizer.param_groups[0]["lr"] = 0.02
        return going_on(where, model, optimizer, **how)

    assert message in judged("07.0", by_value(go_on), capsys)


def only_the_first_loads(where, model, optimizer):
    return going_on(where, model, optimizer) if torch.distributed.get_rank() == 0 else 3 * where.exists()


def test_a_load_by_one_rank_is_told(capsys):
    said = judged("07.0", by_value(only_the_first_loads), capsys)
    assert "not quite: it hangs" in said or "not quite: a rank raises" in said
