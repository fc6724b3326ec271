# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: attention over sequences that ranks share, its losses, gradients, traffic, memory, and balance.

Starting ranks takes as long as several runs: one launch for each number of ranks makes all that is looked at here.
"""

import itertools
import json
import tempfile
from collections import Counter

import plan
import pytest
import torch
import torch.distributed as dist
from commands import refused
from forked import by_value
from labkit.measuring.differences import largest_difference
from labkit.running import launch, notebook_ranks, options
from labkit.training import attention_kernels as kernels
from labkit.training import context_parallel, models
from labkit.training.context_parallel import Context
from mesh_runs import BLOCKS, SAVED_AT, STEPS, losses_of, resized
from planner import predict
from planner.cli.commands import fit, plan_from_options
from planner.models import flops, networks, shapes
from planner.ops.context import FORMS, ORDERS
from planner.ops.context import Context as Exchanged
from planner.timing import cost
from proofs import long_sequences
from proofs import memory as memory_proof

SEQUENCES = 4
FP64 = {"precision": "fp64"}
RING, GATHER, ULYSSES = ({"context_attention": form} for form in FORMS)
TRAINED = {
    1: {"plain": FP64, "clipped": FP64 | {"clip": 0.4, "loss_chunks": 3}},
    2: {
        "plain": FP64 | ULYSSES | {"mesh": "context=2", "recompute": "selective"},
        "clipped": FP64 | RING | {"mesh": "context=2", "clip": 0.4, "loss_chunks": 3, "recompute": "full"},
    },
    4: {
        "plain": FP64 | GATHER | {"mesh": "context=2,tensor=2"},
        "clipped": FP64 | RING | {"mesh": "shard=2,context=2", "clip": 0.4, "accumulate": 2, "sync": "last"},
    },
}
MEASURED = {"script": "gpt_fsdp.py", "ranks": 4, "config": {"batch_size": 3, "seq_len": 32, "mesh": "context=4"}}
EVERY = [(form, order) for form in FORMS[:2] for order in ORDERS] + [("ulysses", "natural")]


def heads(query_heads=8, kv_heads=4):
    """Queries, keys, values, and a gradient of the output, (2, heads, 16 tokens, 8), the same wherever they are drawn."""
    draws = torch.Generator().manual_seed(3)
    sizes = (query_heads, kv_heads, kv_heads, query_heads)
    return [torch.randn(2, n, 16, 8, dtype=torch.float64, generator=draws) for n in sizes]


def of_one_process():
    """Attention of ``heads``, and the gradients of queries, keys, and values."""
    *inputs, gradient = heads()
    inputs = [x.requires_grad_() for x in inputs]
    out = models.causal_attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def largest_errors(me):
    """{(form, order): the largest error of attention and of the three gradients, of this rank's tokens}."""
    found, group = {}, dist.new_group(range(me.world_size))
    for form, order in EVERY:
        context = Context(group, me.rank, me.world_size, order)
        mine = context.positions(16 // me.world_size)
        *inputs, gradient = (x[:, :, mine] for x in heads())
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = context_parallel.FORMS[form](*inputs, context)
        results = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
        expected = [x[:, :, mine] for x in of_one_process()]
        found[form, order] = largest_difference(results, expected)
    return found


def everything(me, folder, names):
    """Return all that the tests look at. names: the runs of TRAINED to train."""
    several, runs = {}, {name: TRAINED[me.world_size][name] for name in names}
    if me.world_size == 4:
        with resized(**BLOCKS):
            several["measured"] = memory_proof.measure(me, [MEASURED])[0]
    if me.world_size > 1:
        several["errors"] = largest_errors(me)
    return several | losses_of(me, runs, SEQUENCES, folder)


@pytest.fixture(scope="module")
def found(selected):
    """{ranks: what ``everything`` found}; four ranks write the checkpoint, and two read it after them."""
    here, names = launch.Cluster(launcher="local"), sorted({"plain", *selected(TRAINED[1])})
    with tempfile.TemporaryDirectory() as folder:
        return {
            ranks: notebook_ranks.on_ranks(by_value(everything), folder, names, ranks=ranks, cluster=here, timeout=300)
            for ranks in (1, 4, 2)
        }


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 4) for name in TRAINED[ranks]])
def test_losses_are_those_of_one_process(ranks, name, found):
    reference = found[1][0]["losses"][name]
    assert len(reference) == STEPS + 1 and reference[-1] < reference[0]
    assert found[ranks][0]["losses"][name] == pytest.approx(reference, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_and_its_gradients_are_those_of_one_process(ranks, found):
    for each in found[ranks]:
        assert each["errors"].keys() == {*EVERY}
        assert max(each["errors"].values()) < 1e-12, each["errors"]


@pytest.mark.long
def test_checkpoint_resumes_without_context(found):
    reference = found[1][0]["losses"]["plain"]
    assert found[2][0]["resumed"] == pytest.approx(reference[SAVED_AT:], rel=1e-9)


def by_dimension(traffic):
    return {(entry["kind"], entry["bytes"], entry["dimension"]): entry["count"] for entry in traffic}


@pytest.mark.long
def test_memory_is_the_planners_and_traffic_in_each_dimension(found, blocks):
    measured = found[4][0]["measured"]
    row = memory_proof.compare(MEASURED, measured)
    assert row["persistent equal"] and abs(row["difference"]) < 0.0001
    assert by_dimension(measured["traffic"]) == by_dimension(memory_proof.planned(MEASURED).traffic())


@pytest.mark.long
def test_traffic_by_hand(found, blocks):
    """FSDP shards among all four ranks; keys and values of 3 x 8 tokens, 2 heads of 32, travel around the ring."""
    sent = by_dimension(found[4][0]["measured"]["traffic"])
    keys_and_values = 4 * 2 * (3 * 8) * (2 * 32)
    # Three times in forward and in backward, and their gradients, in fp32 as they are, four times: in each block
    assert (
        sent["send", keys_and_values, "context"] == sent["receive", keys_and_values, "context"] == blocks * (3 + 3 + 4)
    )
    a_block = 4 * (2 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128)
    assert sent["reduce-scatter", a_block, "shard"] == blocks


# Without ranks


@pytest.mark.parametrize(("size", "order"), list(itertools.product((2, 3, 4), ORDERS)))
def test_every_pair_of_tokens_is_computed_once_and_by_the_rank_of_its_query(size, order):
    tokens, computed = 4, Counter()
    places = [Context(None, rank, size, order) for rank in range(size)]
    where = [context.positions(tokens).tolist() for context in places]
    assert sorted(itertools.chain(*where)) == list(range(size * tokens))
    work = []
    for context in places:
        pairs = []
        for source in range(size):
            if part := context.visible(source, tokens):
                queries, keys, causal = part
                mine, theirs = range(tokens)[queries], range(tokens)[keys]
                pairs += [(i, j, source) for i in mine for j in theirs if not causal or j <= i]
        computed.update((where[context.rank][i], where[source][j]) for i, j, source in pairs)
        work.append(len(pairs))
    assert computed == {(i, j): 1 for i in range(size * tokens) for j in range(i + 1)}
    if order == "head-tail":
        assert len(set(work)) == 1
    else:  # the diagonal's own halves, which a kernel computes, count half: (size − 1/2) parts of tokens × tokens
        assert max(work) == work[-1] == (size - 0.5) * tokens**2 + tokens / 2


@pytest.mark.parametrize(("size", "order"), list(itertools.product((2, 3, 4), ORDERS)))
def test_the_planners_parts_are_what_the_lab_computes(size, order):
    for rank in range(size):
        lab = Context(None, rank, size, order)
        parts = [lab.visible(lab.source(step), 8) for step in range(size)]
        shares = [part and tuple(len(range(8)[some]) / 8 for some in part[:2]) for part in parts]
        assert Exchanged(size, "ring", order, rank).parts() == shares


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_agree_with_the_scores_in_memory(causal):
    query, key, value, gradient = heads()
    fused, plain = (forward(query, key, value, causal) for forward in (kernels.forward, kernels.in_steps))
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want)
    both = (
        backward(gradient, query, key, value, *fused, causal)
        for backward in (kernels.backward, kernels.backward_in_steps)
    )
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def planned(size, form="ring", order="head-tail", *, seq_len=131_072, ranks=None, **fields):
    context = Exchanged(size, form, order, rank=size - 1)
    network = networks.gpt(shapes.GPT_SHAPES["llama3-8b"], 1, seq_len, "full", loss_chunks=64, context=context)
    return predict.Plan(network, ranks=ranks or size, precision="bf16", on_gpu=True, **fields)


def test_the_head_tail_order_lowers_the_slowest_ranks_attention():
    """By 2 − 1/C: of what all ranks compute together, nothing changes."""
    for size in (2, 8):
        natural, balanced = (flops.attention_flops(planned(size, order=order))[0] for order in ORDERS)
        assert natural / balanced == pytest.approx(2 - 1 / size)
        whole = planned(1, ranks=size)
        assert balanced * size == pytest.approx(flops.attention_flops(whole)[0])


def times(plan, bandwidth):
    link = cost.Link(bandwidth, 0.0, "test")
    return cost.step_time(plan, 8, link, link, flops=4e14)


def test_a_ring_hides_behind_attention_what_the_other_forms_do_not():
    fast = {form: times(planned(8, form), 450e9) for form in FORMS}
    ring, gather = fast["ring"], fast["gather"]
    assert ring["exposed"] < gather["exposed"]
    # Nothing is hidden of what is sent in no time by attention, and at most what attention takes is
    slow = times(planned(8), 1e6)
    hidden = cost.ring_hidden_seconds(planned(8), 8, *[cost.Link(1e6, 0.0, "test")] * 2, 4e14)
    forward, backward = flops.attention_flops(planned(8))
    assert hidden == pytest.approx(32 * 7 / 8 * (2 * forward + backward) / 4e14)
    assert slow["serial"] - slow["overlapped"] >= hidden
    assert cost.ring_hidden_seconds(planned(8, "gather"), 8, *[cost.LINKS["nvlink"]] * 2, 4e14) == 0


def test_longer_rings_hold_fewer_activations():
    peaks = [predict.by_category(planned(size, ranks=8).peak()[1])["activations"] for size in (2, 4, 8)]
    assert peaks[0] > 1.8 * peaks[1] > 3.2 * peaks[2]
    # On many ranks all keys and values are more than the feed-forward layer's activations
    ring, gathered = (predict.total(planned(64, form).peak()[1]) for form in ("ring", "gather"))
    assert gathered > ring


def test_what_is_not_planned_is_refused():
    network = planned(2).blueprint
    with refused("fsdp2", "ddp"):
        predict.Plan(network, "ddp", ranks=2)
    with refused("--precision bf16"):
        predict.Plan(network, ranks=2, on_gpu=True)


def found_by(words):
    return json.loads(plan.answer(options.parse(plan.Config, "", [*words.split(), "--json"])))


LONG = "--preset llama3-8b --ranks 8 --batch-size 1 --precision bf16"


def test_the_longest_sequence_can_be_shared():
    """By 8 ranks that have two parts each; it is the longest of those, and longer than what each rank has alone."""
    searched = found_by(f"{LONG} --recompute full --find seq-len --mesh context=8")
    alone = found_by(f"{LONG} --recompute full --find seq-len")
    assert searched["unit"] == 16 and searched["found"] % 16 == 0 and searched["found"] > 2 * alone["found"]
    answers = {row["seq_len"]: row["answer"] for row in searched["rows"]}
    assert answers[searched["found"]] == "fits" and answers[searched["found"] + 16] != "fits"


def test_a_sweep_compares_the_forms_of_attention_with_strategies_that_share_nothing():
    rows = found_by(f"{LONG} --seq-len 65536 --mesh context=8 --sweep")
    names = {row["strategy"] for row in rows}
    assert {"ddp", "fsdp2", *(f"fsdp2, context 8, {form}" for form in FORMS)} <= names
    kinds = {form: {row["recompute"] for row in rows if row["strategy"].endswith(form)} for form in FORMS}
    assert "alternate" in kinds["ulysses"] and not kinds["ring"] & {"alternate", "selective"}


def test_405b_on_131072_tokens():
    """Neither shards nor offloaded activations suffice without a group that shares a sequence's activations."""
    rows = {way: long_sequences.row(long_sequences.Config(), way) for way in long_sequences.WAYS}
    ranks = {way: row["ranks"] for way, row in rows.items()}
    assert ranks["FSDP"] is ranks["FSDP + offloaded activations"] is ranks["FSDP + tensor 8"] is None
    assert ranks["FSDP + tensor 8 + context"] < ranks["FSDP + context"]
    assert ranks["FSDP + context + offloaded activations"] <= ranks["FSDP + context"]
    fitting = [row for row in rows.values() if row["ranks"]]
    assert all(row["needs"] <= 80 for row in fitting)
    # The ranks of a table are the fewest of their mesh
    one_fewer = long_sequences.options_of(long_sequences.Config(), 5, 64, 1, False)
    assert rows["FSDP + context"]["mesh"] == "shard=6,context=64,tensor=1"
    assert fit(one_fewer, predict.total(plan_from_options(one_fewer).peak()[1]))["answer"] != "fits"
