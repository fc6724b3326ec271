"""Chapter 10: its verdicts fail on a wrong mesh, its exercises judge fairly, and real steps on a real link obey its law."""

import json
import os
import sys

import links
import pytest
from commands import call
from labkit import UserError
from labkit.measuring import practice_link, records
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_10, check
from planner import cost, predict
from test_practice_network import linked, networks_allowed  # noqa: F401  (fixtures)

from notebooks import FOLDER, run_broken

SOURCE = FOLDER.parent / "source_code"


@pytest.mark.long
def test_the_bytes_that_leave_a_node_tell_a_swapped_mesh():
    swap = {'"HSDP 2x2": grid(2, 2)}': '"HSDP 2x2": [[0, 2], [1, 3]]}'}
    failed = [line for line in run_broken("10", swap, skip=("where_am_i", "lab.run(")) if line.startswith("FAIL")]
    assert len(failed) == 1 and "HSDP 2x2: what leaves a node" in failed[0]


# What leaves a node, by planner.cost


def plan(ranks, **config):
    return Lab(device="cpu").plan("gpt_fsdp.py", ranks=ranks, **config)


@pytest.mark.parametrize("nodes, size", [(2, 2), (2, 8), (4, 2), (16, 8)])
def test_a_node_sends_what_the_formulas_say(nodes, size):
    ranks, parameters = nodes * size, plan(1).blueprint.numel * 4
    share = (ranks - 1) / ranks
    hybrid, ddp = plan(ranks, mesh=f"{nodes}x{size}"), plan(ranks, strategy="ddp")
    assert cost.inter_node_bytes(ddp.traffic(), ddp, size) == pytest.approx(2 * share * parameters)
    # a part of each parameter is padded so that all ranks have as many rows: at most by 3 % here
    assert cost.inter_node_bytes(hybrid.traffic(), hybrid, size) == pytest.approx(
        2 * (nodes - 1) / nodes * parameters, rel=0.03
    )
    kept = plan(ranks, reshard_after_forward="false")
    whole = sum(c["count"] * c["bytes"] for c in kept.traffic())  # gathered once, reduced once
    assert cost.inter_node_bytes(kept.traffic(), kept, size) == pytest.approx(share * whole)
    assert cost.inter_node_bytes(kept.traffic(), kept, size, "gloo") == pytest.approx(
        1.5 * cost.inter_node_bytes(kept.traffic(), kept, size)
    )


@pytest.mark.parametrize("config", [{"mesh": "2x4"}, {"strategy": "ddp"}, {"strategy": "fsdp1"}, {}], ids=str)
def test_a_records_traffic_leaves_a_node_as_the_plans_does(config):
    """A record does not say how many ranks take part in a collective."""
    planned = plan(8, **config)
    recorded = [{key: value for key, value in call.items() if key != "ranks"} for call in planned.traffic()]
    for size in (2, 4):
        assert cost.inter_node_bytes(recorded, planned, size) == cost.inter_node_bytes(planned.traffic(), planned, size)


def test_records_come_with_the_course():
    found = {(record["link"]["strategy"], record["link"]["rate"]) for record in links.recorded()}
    assert found == {(name, rate) for name in links.STRATEGIES for rate in links.Config().rates.split(",")}


@pytest.mark.parametrize("named", [False, True])
def test_a_sweep_writes_over_the_courses_records_only_where_told_to(named, monkeypatch, tmp_path, capsys):
    made = links.recorded()[:2]
    monkeypatch.setattr(links, "sweep", lambda rates, steps: made)
    monkeypatch.setattr(links.launch, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(links, "REFERENCE", tmp_path / "reference")
    links.main(links.Config(folder=str(tmp_path / "reference" / "links-here") if named else None))
    (place,) = tmp_path.iterdir()
    assert place.name == ("reference" if named else "runs")
    (folder,) = place.glob("links-*")
    assert [records.load(path) for path in sorted(folder.iterdir())] == made
    assert str(folder) in capsys.readouterr().out


def test_a_sweep_into_a_folder_that_cannot_be_is_refused_before_it_begins(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(links, "sweep", lambda rates, steps: pytest.fail("it began"))
    with pytest.raises(UserError, match="name another --folder"):
        links.main(links.Config(folder=str(tmp_path / "file" / "folder")))


def test_time_on_the_link_is_counted_once():
    def seen(*spans):
        return [("gloo:all_reduce", begin, end) for begin, end in spans]

    whole = plan(2, strategy="ddp")
    # rank 1 comes late to the first call; the second overlaps it; the third is apart
    assert links.busy((seen((0, 5), (3, 7), (10, 11)), seen((2, 5), (3, 7), (10, 11))), whole, 3) == 6
    # HSDP: the first reduction of each two is within a node; ranks 0 and 2 are done before 1 and 3 begin
    early, late = seen((0, 1), (1, 3), (6, 7), (7, 8)), seen((0, 4), (4, 6), (6, 8), (8, 9))
    gathers = [("gloo:all_gather", 0, 100)]
    of_ranks = (gathers + early, gathers + late, gathers + early, gathers + late)
    assert links.busy(of_ranks, plan(4, mesh="2x2"), 2) == 2 + 2 + 1 + 1


# Exercises


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda r, s: chapter_10.reference_groups(r, s)[::-1], "the two are swapped"),
        (lambda r, s: ([list(range(i, r, r // s)) for i in range(r // s)], [list(range(r))]), "[0, 2] is no shard"),
        (lambda r, s: (chapter_10.reference_groups(r, s)[0], [list(range(r))]), "is no replicate group"),
        (lambda r, s: (chapter_10.reference_groups(r, s)[0][:1], []), "every rank is in one shard group"),
        (lambda r, s: chapter_10.reference_groups(r, s)[0][0], "return two lists of groups"),
        (lambda r, s: ..., "not answered yet"),
    ],
)
def test_wrong_groups_hear_why(wrong, said, capsys):
    check("10.2", wrong)
    assert said in capsys.readouterr().out


# On a real link


RATES = ("200mbit", "100mbit")


@pytest.fixture(scope="module")
def swept(linked):  # noqa: F811
    """{(strategy, speed): record} of steps of gpt_fsdp.py at two speeds of the link."""
    code = f"import json, links; print(json.dumps(list(links.sweep({RATES!r}, steps=8))))"
    run = call(sys.executable, "-c", code, env=linked, cwd=SOURCE, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    return {(record["link"]["strategy"], record["link"]["rate"]): record for record in found}


def leaving(record):
    made = predict.plan_of(record)
    return cost.inter_node_bytes(made.traffic(), made, record["link"]["node_size"], "gloo")


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("strategy", links.STRATEGIES)
def test_no_communication_is_shorter_than_latency_and_bytes_over_bandwidth(swept, strategy, rate):
    """How much longer it takes depends on what else the machine does: that is links.py's to say, not a test's."""
    record = swept[strategy, rate]
    latency = min(each["link"]["latency"] for each in swept.values())
    predicted = record["link"]["crossings"] * latency + leaving(record) / practice_link.bytes_per_second(rate)
    assert min(record["link"]["communication"]) > 0.85 * predicted


@pytest.mark.parametrize("strategy", links.STRATEGIES)
def test_bytes_of_a_step_at_the_interface(swept, strategy):
    for rate in RATES:
        link = swept[strategy, rate]["link"]
        for moved in (*link["sent"], *link["received"]):
            assert moved == pytest.approx(leaving(swept[strategy, rate]), rel=0.05)


def test_the_notebook_runs_on_two_hosts(linked):  # noqa: F811
    env = linked | {"FSDP_LABS_LAUNCHER": "slurm", "FSDP_LABS_PARTITION": "gpu"}
    (name,) = FOLDER.glob("10_*.ipynb")
    words = (sys.executable, "-m", "pytest", "--nbval-lax", "-q", "-p", "no:cacheprovider", name)
    run = call(*words, env=env, cwd=FOLDER.parent, timeout=400)
    assert run.returncode == 0, run.stdout[-4000:]


def test_a_sweep_where_there_is_no_link():
    env = {name: value for name, value in os.environ.items() if name != practice_link.VARIABLE}
    run = call(sys.executable, "links.py", env=env, cwd=SOURCE)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "there is no link to change" in run.stderr
