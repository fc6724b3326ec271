"""Chapter 10: its verdicts fail on a wrong mesh, its exercises judge fairly, and real steps on a real link obey its law."""

import json
import os
import sys

import pytest
from commands import call, refused
from forked import forked
from labkit.measuring import records
from labkit.running import practice_link
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_10, check
from planner import predict
from planner.timing import cost
from proofs import link_sweep

from notebooks import FOLDER, code_cells, lines_of_verdicts, read, run_broken, run_cells

SOURCE = FOLDER.parent / "source_code"


@pytest.mark.long
def test_the_bytes_that_leave_a_node_tell_a_swapped_mesh():
    swap = {'"HSDP 2x2": grid(2, 2)}': '"HSDP 2x2": [[0, 2], [1, 3]]}'}
    failed = [line for line in run_broken("10", swap, skip=("where_am_i", "lab.run(")) if line.startswith("FAIL")]
    assert len(failed) == 1 and "HSDP 2x2: what leaves a node" in failed[0]


# What leaves a node, by planner.timing.cost


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
    found = {(record["link"]["strategy"], record["link"]["rate"]) for record in link_sweep.recorded()}
    assert found == {(name, rate) for name in link_sweep.STRATEGIES for rate in link_sweep.Config().rates.split(",")}


def by_law(record) -> float:
    """Seconds of a step's communication: latency, and bytes over the link's speed."""
    latency = min(each["link"]["latency"] for each in link_sweep.recorded())
    link = record["link"]
    return link["crossings"] * latency + leaving(record) / practice_link.bytes_per_second(link["rate"])


@pytest.mark.parametrize(
    "record", link_sweep.recorded(), ids=lambda record: "{strategy}, {rate}".format(**record["link"])
)
def test_the_courses_records_obey_the_law(record):
    """Where the page does not measure, it shows these beside the law, and makes no verdict of them."""
    link = record["link"]
    for moved in (*link["sent"], *link["received"]):
        assert moved == pytest.approx(leaving(record), rel=0.05)
    if link["rate"] == "none":
        return
    shortest, speed = min(link["communication"]), practice_link.bytes_per_second(link["rate"])
    if link["rate"] == "100mbit":
        assert shortest == pytest.approx(by_law(record), rel=0.12)
    in_a_full_bucket = link["crossings"] * practice_link.burst_bytes(link["rate"])
    assert 0.9 * (leaving(record) - in_a_full_bucket) / speed < shortest < 1.15 * by_law(record)


@pytest.mark.parametrize("named", [False, True])
def test_a_sweep_writes_over_the_courses_records_only_where_told_to(named, monkeypatch, tmp_path, capsys):
    made = link_sweep.recorded()[:2]
    monkeypatch.setattr(link_sweep, "sweep", lambda rates, steps: made)
    monkeypatch.setattr(link_sweep.launch, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(link_sweep, "REFERENCE", tmp_path / "reference")
    link_sweep.main(link_sweep.Config(folder=str(tmp_path / "reference" / "link-sweep-here") if named else None))
    (place,) = tmp_path.iterdir()
    assert place.name == ("reference" if named else "runs")
    (folder,) = place.glob("link-sweep-*")
    assert [records.load(path) for path in sorted(folder.iterdir())] == made
    assert str(folder) in capsys.readouterr().out


def test_a_sweep_into_a_folder_that_cannot_be_is_refused_before_it_begins(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(link_sweep, "sweep", lambda rates, steps: pytest.fail("it began"))
    with refused("--folder"):
        link_sweep.main(link_sweep.Config(folder=str(tmp_path / "file" / "folder")))


def test_time_on_the_link_is_counted_once():
    def seen(*spans):
        return [("gloo:all_reduce", begin, end) for begin, end in spans]

    whole = plan(2, strategy="ddp")
    # rank 1 comes late to the first call; the second overlaps it; the third is apart
    assert link_sweep.link_busy_seconds((seen((0, 5), (3, 7), (10, 11)), seen((2, 5), (3, 7), (10, 11))), whole, 3) == 6
    # HSDP: the first reduction of each two is within a node; ranks 0 and 2 are done before 1 and 3 begin
    early, late = seen((0, 1), (1, 3), (6, 7), (7, 8)), seen((0, 4), (4, 6), (6, 8), (8, 9))
    gathers = [("gloo:all_gather", 0, 100)]
    of_ranks = (gathers + early, gathers + late, gathers + early, gathers + late)
    assert link_sweep.link_busy_seconds(of_ranks, plan(4, mesh="2x2"), 2) == 2 + 2 + 1 + 1


# Exercises


def least(cost):
    """A function for 10.0 that takes, of the ways that fit, the one with the least ``cost(way, nodes, per_node)``."""
    return lambda ways, nodes, per_node, limit: min(
        (way for way in ways if way.peak <= limit), key=lambda way: cost(way, nodes, per_node)
    )


def law(**change):
    return lambda way, nodes, per_node: chapter_10.law(way._replace(**change), nodes, per_node)


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (least(law()), ": right"),
        (
            least(lambda *about: chapter_10.law(*about, gather=4)),
            "Hybrid sharding does not always send the fewest bytes",
        ),
        (least(chapter_10._gathered_by_replicas), "With replicas, all-gathers stay within a node"),
        (least(law(sync="last")), "the gradients are reduced after each micro-batch"),
        (least(lambda way, *_: way.peak), "not the memory"),
        (
            least(lambda way, *to: law(**({"micro_batches": 1} if way.sync == "last" else {}))(way, *to)),
            "another way that fits sends 60.2 GB. Each micro-batch gathers again",
        ),
        (lambda ways, *about: min(ways, key=lambda way: law()(way, *about[:2])), "Its peak is 69 GiB"),
        (lambda ways, *about: ways[0].peak, "return one of the ways"),
        (lambda *about: ..., "not answered yet"),
    ],
)
def test_a_choice_hears_what_it_costs(choose, said, capsys):
    check("10.0", choose)
    assert said in capsys.readouterr().out


def test_bytes_by_the_law_of_10_0_are_the_planners_where_the_root_is_kept_or_stays_at_home():
    for nodes, per_node, _ in chapter_10.CLUSTERS:
        for way in chapter_10.ways(nodes, per_node):
            if way.kept or way.replicas > 1:
                by_law = chapter_10.law(way, nodes, per_node) * chapter_10.plan_of(way).blueprint.numel / 1e9
                assert chapter_10.gigabytes(way, per_node) == pytest.approx(by_law, rel=1e-6)


def test_what_chapter_10_says_of_when_gradients_are_sent():
    """In the last bullet of "Choose for a network": demands within backward, and steps at 100 Gbit/s."""
    text = " ".join(cell.source for cell in read(next(FOLDER.glob("10_*.ipynb"))).cells)
    demands, steps = [], []
    for nodes, per_node, limit in chapter_10.CLUSTERS[:2]:
        way = chapter_10._least(chapter_10.law, nodes, per_node, limit)
        links_of = cost.LINKS["nvlink"], cost.NETWORKS["ethernet"]
        took = cost.step_time(chapter_10.plan_of(way), per_node, *links_of, 0.40 * 989e12)
        reductions = way.micro_batches if way.sync == "every" else 1
        to_hide_behind = 3 / 4 * reductions / way.micro_batches * took["compute"]
        demands.append(8 * chapter_10.gigabytes(way, per_node) / to_hide_behind)
        steps.append(took["overlapped"])
    assert f"needs some {demands[0]:.0f} Gbit/s" in text and demands[1] == pytest.approx(demands[0] / 2, rel=1e-3)
    assert f"gives {steps[0]:.1f} s for the first line and {steps[1]:.1f} s for the second" in text


# On a real link


RATES = ("400mbit", "100mbit")  # those of the notebook that are slowed


@pytest.fixture(scope="module")
def live(linked):
    """(lines of verdicts, {(strategy, speed): record}) of the notebook's measurement on two hosts.

    Its functions on ranks of two hosts, and its jobs, are in test_practice_network.py.
    """
    env = linked | {"FSDP_LABS_LAUNCHER": "slurm", "FSDP_LABS_PARTITION": "gpu"}
    sources = [cell.source for cell in code_cells(read(next(FOLDER.glob("10_*.ipynb"))))]
    (last,) = (number for number, source in enumerate(sources) if "crossings × latency" in source)
    elsewhere = ("where_am_i", "lab.run(", "def trained", "ran[")
    sources = [source for source in sources[: last + 1] if not any(word in source for word in elsewhere)]
    tell = "import json\nprint(json.dumps(runs))"
    printed = forked(run_cells, [*sources, tell], str(FOLDER), env=env, timeout=400)
    found = json.loads(printed.splitlines()[-1])
    return lines_of_verdicts(printed), {(one["link"]["strategy"], one["link"]["rate"]): one for one in found}


def leaving(record):
    made = predict.plan_of(record)
    return cost.inter_node_bytes(made.traffic(), made, record["link"]["node_size"], "gloo")


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("strategy", link_sweep.STRATEGIES)
def test_no_communication_is_shorter_than_what_a_full_bucket_leaves_over_bandwidth(live, strategy, rate):
    """How much longer it takes depends on what else the machine does: that is proofs/link_sweep.py's to say, not a test's."""
    record = live[1][strategy, rate]
    left = leaving(record) - record["link"]["crossings"] * practice_link.burst_bytes(rate)
    assert min(record["link"]["communication"]) > 0.85 * left / practice_link.bytes_per_second(rate)


@pytest.mark.parametrize("strategy", link_sweep.STRATEGIES)
def test_bytes_of_a_step_at_the_interface(live, strategy):
    for rate in RATES:
        record = live[1][strategy, rate]
        for moved in (*record["link"]["sent"], *record["link"]["received"]):
            assert moved == pytest.approx(leaving(record), rel=0.05)


def test_the_notebook_measures_on_two_hosts(live):
    lines, _ = live
    assert sum("at its interface" in line for line in lines) == len(link_sweep.STRATEGIES)
    seconds = "communication over"  # what else the machine does is in them: the notebook judges them, not a test
    assert [line for line in lines if line.startswith("FAIL") and seconds not in line] == []


def test_a_sweep_where_there_is_no_link():
    env = {name: value for name, value in os.environ.items() if name != practice_link.VARIABLE}
    run = call(sys.executable, "-m", "proofs.link_sweep", env=env, cwd=SOURCE)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "make slurm" in run.stderr
