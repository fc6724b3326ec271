# SPDX-License-Identifier: BSD-3-Clause
"""Chapter 10: its verdicts fail on a wrong mesh, its exercises judge fairly, and real steps on a real link obey its law."""

import json
import os
import sys

import pytest
from commands import call, refused
from forked import forked
from labkit.measuring import records
from labkit.running import practice_link
from labkit.running.fault_injection import kill_one_rank
from labkit.running.lab import Lab
from labkit.teaching.exercises import chapter_10, check
from planner import predict
from planner.timing import cost
from proofs import link_sweep

from notebooks import FOLDER, code_cells, lines_of_verdicts, read, run_broken, run_cells

SOURCE = FOLDER.parent / "source_code"


@pytest.mark.breaks
def test_the_bytes_that_leave_a_node_tell_a_swapped_mesh():
    swap = {'"HSDP 2x2": grid(2, 2)}': '"HSDP 2x2": [[0, 2], [1, 3]]}'}
    failed = [line for line in run_broken("10", swap, skip=("where_am_i", "lab.run(")) if line.startswith("FAIL")]
    assert len(failed) == 1 and "HSDP 2x2: leaves a node" in failed[0]


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


def chapters_text() -> str:
    return " ".join(cell.source for cell in read(next(FOLDER.glob("10_*.ipynb"))).cells)


def steps_over_their_prediction(rate, backend="gloo") -> dict[str, float]:
    """Return {strategy: its shortest recorded step at this speed, over what chapter 10 predicts for it}."""
    of = {(each["link"]["strategy"], each["link"]["rate"]): each for each in link_sweep.recorded()}
    latency = min(each["link"]["latency"] for each in of.values())
    result = {}
    for name in link_sweep.STRATEGIES:
        fast, record = of[name, "none"]["link"], of[name, rate]
        intercept = min(fast["steps"]) - min(fast["communication"]) + fast["crossings"] * latency
        predicted = intercept + leaving(record, backend) / practice_link.bytes_per_second(rate)
        result[name] = min(record["link"]["steps"]) / predicted
    return result


def test_recorded_steps_on_the_slowest_link_take_what_is_predicted_and_the_limit_sees_a_wrong_count():
    found = steps_over_their_prediction("100mbit")
    assert all(abs(ratio - 1) < 0.12 for ratio in found.values())
    in_one_pass = steps_over_their_prediction("100mbit", backend="ring")
    assert in_one_pass["DDP"] == found["DDP"] and in_one_pass["FSDP2"] > 1.12
    text = chapters_text()
    assert f"would be {in_one_pass['FSDP2'] - 1:.0%} above".replace("%", " %") in text
    assert abs(found["FSDP2"] - 1) < 0.01 and f"HSDP's {1 - found['HSDP 2x2']:.0%} below".replace("%", " %") in text


def test_what_chapter_10_says_of_the_other_links():
    shorter = [1 - steps_over_their_prediction(rate)["HSDP 2x2"] for rate in ("100mbit", "200mbit", "400mbit", "1gbit")]
    assert f"{100 * min(shorter):.0f} to {100 * max(shorter):.0f} % shorter" in chapters_text()
    longer = [ratio - 1 for ratio in steps_over_their_prediction("none").values()]
    assert f"{100 * min(longer):.0f} to {100 * max(longer):.0f} % longer" in chapters_text()


def test_what_chapter_10_says_of_the_planners_links():
    within = [cost.LINKS[name].bandwidth for name in ("nvlink", "pcie")]
    network = [cost.NETWORKS[name].bandwidth / 8 for name in ("infiniband", "ethernet")]
    (nvlink, pcie) = (
        [f"{one / each:.2g}" if one / each < 10 else f"{one / each:.0f}" for each in network] for one in within
    )
    text = chapters_text()
    assert f"{nvlink[0]} times as fast as a 400 Gbit/s adapter, and {nvlink[1]} times" in text
    assert f"PCI Express, {pcie[0]} and {pcie[1]} times" in text


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


NAMES = ("replicate", "shard")


@pytest.mark.parametrize(
    ("nodes", "mesh", "said"),
    [
        ("ABABAB", (NAMES, [[0, 2, 4], [1, 3, 5]]), None),
        ("ABAABA", (NAMES, [[5, 0], [1, 4], [3, 2]]), None),
        ("AAAAAB", (NAMES, [[0], [1], [2], [3], [4], [5]]), None),
        ("ABABAB", (NAMES, [[0, 1, 2], [3, 4, 5]]), "row [0, 1, 2] spans the nodes A and B"),
        ("ABAABA", (NAMES, [[0], [1], [2], [3], [4], [5]]), "so do rows of 2"),
        ("ABABAB", (NAMES, [[0, 2], [1, 3]]), "rank 4 is in no row"),
        ("ABABAB", (NAMES[::-1], [[0, 1], [2, 3], [4, 5]]), "replicates along the first"),
        ("ABABAB", "[[0, 2, 4], [1, 3, 5]]", "should return a DeviceMesh, not [[0, 2, 4]"),
    ],
)
def test_a_mesh_hears_what_is_wrong_with_it(nodes, mesh, said):
    difference = chapter_10.mesh_differs(nodes, mesh)
    assert difference is None if said is None else said in difference


def test_a_mesh_that_trusts_the_order_of_ranks_is_found_on_real_ranks(capsys):
    def node_mesh(me, node):
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(me.device.type, (2, 3), mesh_dim_names=("replicate", "shard"))

    check("10.1", node_mesh)
    assert "dealt to two nodes in turn: row [0, 1, 2] spans the nodes A and B" in capsys.readouterr().out


def test_a_run_that_fails_before_a_rank_is_killed_shows_what_it_printed():
    with pytest.raises(RuntimeError, match="no such option"):
        kill_one_rank(["-c", "raise SystemExit('no such option')", "lab.py"], ready=lambda: False)


def test_bytes_by_the_law_of_10_0_are_the_planners_where_the_root_is_kept_or_stays_at_home():
    for nodes, per_node, _ in chapter_10.CLUSTERS:
        for way in chapter_10.ways(nodes, per_node):
            if way.kept or way.replicas > 1:
                by_law = chapter_10.law(way, nodes, per_node) * chapter_10.plan_of(way).blueprint.numel / 1e9
                assert chapter_10.gigabytes(way, per_node) == pytest.approx(by_law, rel=1e-6)


def test_what_chapter_10_says_of_when_gradients_are_sent():
    """In the last bullet of "Choose for a network": demands within backward, and steps at 100 Gbit/s."""
    demands, steps = [], []
    for nodes, per_node, limit in chapter_10.CLUSTERS[:2]:
        way = chapter_10._least(chapter_10.law, nodes, per_node, limit)
        links_of = cost.LINKS["nvlink"], cost.NETWORKS["ethernet"]
        took = cost.step_time(chapter_10.plan_of(way), per_node, *links_of, cost.EFFICIENCY * 989e12)
        reductions = way.micro_batches if way.sync == "every" else 1
        to_hide_behind = 3 / 4 * reductions / way.micro_batches * took["compute"]
        demands.append(8 * chapter_10.gigabytes(way, per_node) / to_hide_behind)
        steps.append(took["overlapped"])
    text = chapters_text()
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
    (last,) = (number for number, source in enumerate(sources) if "step on the slowest link" in source)
    elsewhere = ("where_am_i", "lab.run(", "def trained", "ran[")
    sources = [source for source in sources[: last + 1] if not any(word in source for word in elsewhere)]
    tell = "import json\nprint(json.dumps(runs))"
    printed = forked(run_cells, [*sources, tell], str(FOLDER), env=env, timeout=400)
    found = json.loads(printed.splitlines()[-1])
    return lines_of_verdicts(printed), {(one["link"]["strategy"], one["link"]["rate"]): one for one in found}


def leaving(record, backend="gloo"):
    made = predict.plan_of(record)
    return cost.inter_node_bytes(made.traffic(), made, record["link"]["node_size"], backend)


@pytest.mark.long
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("strategy", link_sweep.STRATEGIES)
def test_no_communication_is_shorter_than_what_a_full_bucket_leaves_over_bandwidth(live, strategy, rate):
    """How much longer it takes depends on what else the machine does: that is proofs/link_sweep.py's to say, not a test's."""
    record = live[1][strategy, rate]
    left = leaving(record) - record["link"]["crossings"] * practice_link.burst_bytes(rate)
    assert min(record["link"]["communication"]) > 0.85 * left / practice_link.bytes_per_second(rate)


@pytest.mark.long
@pytest.mark.parametrize("strategy", link_sweep.STRATEGIES)
def test_bytes_of_a_step_at_the_interface(live, strategy):
    for rate in RATES:
        record = live[1][strategy, rate]
        for moved in (*record["link"]["sent"], *record["link"]["received"]):
            assert moved == pytest.approx(leaving(record), rel=0.05)


@pytest.mark.long
def test_the_notebook_measures_on_two_hosts(live):
    lines, _ = live
    assert sum("at its interface" in line for line in lines) == len(link_sweep.STRATEGIES)
    seconds = ("slowest link", "the faster of")  # what else the machine does is in them: the notebook's to judge
    judged = [line for line in lines if not any(words in line for words in seconds)]
    assert len(judged) == len(lines) - len(link_sweep.STRATEGIES) - 1
    assert [line for line in judged if line.startswith("FAIL")] == []


def test_a_sweep_where_there_is_no_link():
    env = {name: value for name, value in os.environ.items() if name != practice_link.VARIABLE}
    run = call(sys.executable, "-m", "proofs.link_sweep", env=env, cwd=SOURCE)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "make slurm" in run.stderr
