# SPDX-License-Identifier: BSD-3-Clause
"""Every public knob of FSDP has a row, every trial is as predicted, and the page shows both."""

import json
from collections import Counter

import pytest
from labkit.measuring.records import RESULTS
from proofs import knobs, knobs_page
from proofs.knob_trials import bench
from torch.distributed import fsdp

NOTHING = {"no row": [], "no such knob": [], "neither tried nor sourced": []}
(RECORD,) = (RESULTS / "reference").glob("knobs-*.json")
FOUND = json.loads(RECORD.read_text())
POSSIBLE = knobs.possible()
EVERY = 8  # every eighth trial runs again here; by another seed (make nightly), others


def test_every_knob_has_a_row():
    assert knobs.unexplained(knobs.names(), knobs.rows()) == NOTHING


def new_method(monkeypatch):
    monkeypatch.setattr(fsdp.FSDPModule, "set_something_new", lambda self: None, raising=False)
    return "FSDPModule.set_something_new"


def new_function(monkeypatch):
    monkeypatch.setattr(fsdp, "__all__", [*fsdp.__all__, "something_new"])
    monkeypatch.setattr(fsdp, "something_new", lambda: None, raising=False)
    return "something_new"


def new_argument(monkeypatch):
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, *, something_new=None: module)
    return "fully_shard: something_new"


@pytest.mark.parametrize("add", [new_method, new_function, new_argument])
def test_a_new_knob_is_seen(add, monkeypatch):
    added = add(monkeypatch)
    assert knobs.unexplained(knobs.names(), knobs.rows())["no row"] == [added]


def test_a_row_that_is_missing_is_seen_and_so_is_one_of_no_knob():
    rows = knobs.rows()
    row = rows.pop("FSDPModule.reshard")
    rows["FSDPModule.gone"] = row
    wrong = {"no row": ["FSDPModule.reshard"], "no such knob": ["FSDPModule.gone"]}
    assert knobs.unexplained(knobs.names(), rows) == wrong | {"neither tried nor sourced": ["FSDPModule.gone"]}


def test_a_row_says_what_the_knob_changes_and_of_fsdp1_what_replaces_it():
    words = Counter(word for row in knobs.rows().values() for word in row["changes"])
    assert set(words) <= {
        "memory between steps",
        "peak",
        "traffic",
        "order",
        "numerics",
        "process groups",
        "interface",
        "nothing on a CPU",
    }
    fsdp1 = [title for title in knobs_page.GROUPS if "FSDP1" in title]
    for name, row in knobs.rows().items():
        groups = [title for title, beginnings in knobs_page.GROUPS.items() if name.startswith(beginnings)]
        assert len(groups) == 1, name  # and so it is on the page, once
        assert row["text"].endswith(".") and ("fsdp2" in row) == (groups[0] in fsdp1), name


def check(found):
    wrong = {(row["knob"], row["setting"], row["ranks"]): (row["predicted"], row["measured"]) for row in found}
    assert {key: pair for key, pair in wrong.items() if pair[0] != pair[1]} == {}
    assert all(row["equal"] for row in found)


@pytest.mark.long
def test_a_part_of_the_trials_is_as_predicted_again(seed):
    chosen = POSSIBLE[seed % EVERY :: EVERY]
    found = list(knobs.run(chosen))
    check(found)
    assert len(found) == len(chosen)


def test_a_difference_on_one_rank_is_seen(monkeypatch):
    pairs = [[({"peak": 1}, {"peak": 1})], [({"peak": 1}, {"peak": 2})]]
    monkeypatch.setattr(knobs.notebook_ranks, "on_ranks", lambda *_, **__: pairs)
    (row,) = knobs.run([next(each for each in POSSIBLE if each.ranks == 2)])
    assert not row["equal"] and row["measured"] == {"peak": 2}
    assert "**predicted** peak: 1; **measured** peak: 2" in knobs.table([row])


def test_the_record_has_all_trials_and_all_as_predicted():
    check(FOUND["rows"])
    recorded = Counter((row["knob"], row["setting"], row["ranks"]) for row in FOUND["rows"])
    assert recorded == Counter((each.knob, each.setting, each.ranks) for each in knobs.trials())
    assert set(FOUND["knobs"]) == set(knobs.rows())


def test_the_page_is_that_of_the_record():
    assert knobs_page.PAGE.read_text() == knobs_page.page()


def test_the_planner_has_the_trials_network():
    shapes = [shape for module in bench.blueprint().modules for shape in module.parameters.values()]
    assert shapes == [tuple(parameter.shape) for parameter in bench.Net().parameters()]
    assert sum(parameter.nbytes for parameter in bench.Net().parameters()) == bench.WEIGHTS


def test_an_unknown_text_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["knobs.py", "--only", "no such knob"])
    with pytest.raises(SystemExit) as exit_:
        knobs.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "knobs.py: no knob and no setting has 'no such knob': give another --only\n"
