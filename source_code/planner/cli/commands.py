# SPDX-License-Identifier: BSD-3-Clause
"""Compute what plan.py prints: a plan from its options, its needs and costs, a sweep over strategies, a search.

options: plan.py's ``Config``. Imports no torch.
"""

import dataclasses
import re
from functools import cache
from importlib.util import find_spec
from math import lcm
from pathlib import Path

from planner import UserError, gpus, predict
from planner.cli import search
from planner.models import networks
from planner.ops import context
from planner.parallel import expert_parallel, groups, pipeline
from planner.parallel.mesh import arrange
from planner.timing import cost

STRATEGIES = ("single", "ddp", "zero1", *(f"deepspeed-{stage}" for stage in range(4)), "fsdp1", "fsdp2")
SLOWEST, FASTEST = 1e-6, 1e6  # GB/s of a link
FITTING, NOT_PLANNED = ("fits", "tight"), "not planned"
ORDER = (*FITTING, "does not fit", NOT_PLANNED)
EMPTY_ROW = {"peak": None, "samples_per_second": 0.0, "samples_per_second_at_least": 0.0, "needs": None, "least": None}
TIE = 0.02  # throughputs that differ by less share a place: no prediction here is better than that
RECOMPUTE_BY_MEMORY = ("full", "alternate", "selective", "none")  # by what is saved for backward
LAST = {"ranks": 65_536, "batch_size": 65_536, "seq_len": 2**24}  # where a search ends


def plan_from_options(options, network: networks.Blueprint | None = None) -> predict.Plan:
    """Return the plan of the rank, or the stage, that needs most.

    Args:
        options: of plan.py.
        network: the user's own; by default the one that the options name.

    Raises:
        UserError: the options do not go together.
    """
    if options.stages > 1:
        return max(stage_plans(options), key=lambda plan: predict.total(plan.peak()[1]))
    return first_rank_plan(options, network).for_peak_rank()


def first_rank_plan(options, network: networks.Blueprint | None = None) -> predict.Plan:
    """Return the plan of rank 0, without a pipeline: see ``plan_from_options``."""
    if options.tp_degree > 1 and options.simulate and not options.third_party:
        raise UserError("tensor parallelism is not simulated: leave --simulate out, or take one_rank.py")
    if options.cp_degree > 1 and options.simulate:
        raise UserError("ranks that share sequences are not simulated: leave --simulate out, or take one_rank.py")
    fields = {"on_gpu": options.on_gpu, "torch": installed_torch(), "flash": options.booked.flash}
    return predict.transformer_plan(options, options.ranks, network, **fields)


def stage_plans(options) -> list[predict.Plan]:
    """Return the plan of each stage of a pipeline."""
    mesh = arrange(options.ranks, options.mesh)
    pipeline.check(mesh, options.shape, options.schedule, options.accumulate)
    stages = (pipeline.Stage(mesh.pipeline, number, options.schedule) for number in range(mesh.pipeline))
    return [predict.stage_plan(options, stage, on_gpu=options.on_gpu, torch=installed_torch()) for stage in stages]


@cache
def installed_torch() -> tuple[int, int]:
    """Return the version of the installed PyTorch, which is not imported; without one, the version the planner assumes."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return predict.Plan.torch
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return predict.Plan.torch
    found = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else predict.Plan.torch


def link_of(text: str, known: dict, latency: float, name: str) -> cost.Link:
    """Return the link that an option describes.

    Args:
        text: a key of ``known``, a bandwidth in GB/s, or one in Gbit/s such as "10gbit".
        known: {name: link}.
        latency: seconds, for a bandwidth.
        name: of the option.

    Raises:
        UserError: it is neither.
    """
    if text in known:
        return known[text]
    bits = re.fullmatch(r"([\d.]+) ?gbit(?:/?s)?", text.lower())
    try:
        bandwidth = float(bits[1]) / 8 if bits else float(text)
    except ValueError:
        bandwidth = 0.0
    if not SLOWEST <= bandwidth <= FASTEST:
        raise UserError(
            f"{name} is {', '.join(known)}, a number of GB/s between {SLOWEST:g} and {FASTEST:g}, or of Gbit/s as 10gbit, "
            f"not {text!r}"
        )
    return cost.Link(bandwidth * 1e9, latency, f"{name} {bandwidth:g} GB/s")


def describe(options, plan: predict.Plan) -> dict:
    """Return everything that is predicted of a plan, ready for JSON: bytes, and seconds."""
    where, terms = plan.peak()
    peak = predict.total(terms)
    plans = stages_of(options, plan)
    return {
        "parameters": sum(one.blueprint.numel for one in plans),
        "active_parameters": sum(one.blueprint.active_numel for one in plans),
        "routing": expert_parallel.describe(plan),
        "stages": [predict.total(one.peak()[1]) for one in plans],
        "persistent": {name: size for (_, name), size in plan.persistent().items()},
        "peak": peak,
        "where": where,
        "rank": plan.rank,
        "by_category": predict.by_category(terms),
        "first_step_peak": predict.total(plan.peak(first=True)[1]),
        "memory": fit(options, peak),
        "not_modelled": ["dropout"]
        if options.shape.unplanned_dropout(options.on_gpu)
        else [],  # of what this model has
        **costs(options, plan),
    }


def fit(options, peak: int, units: int = 1) -> dict:
    """Return whether a run fits: ``gpus.verdict``, and how many process groups it makes.

    Args:
        options: of plan.py.
        peak: bytes.
        units: FSDP units of --module, without the root.

    Returns:
        The keys of ``gpus.verdict``, "process_groups", and "post_forward_meshes": of --reshard-after-forward N.
    """
    # The course's labs share one post-forward mesh (labkit/training/post_forward_mesh.py).
    lab, meshes = ("", units) if options.module else (options.lab, 1)
    mesh = arrange(options.ranks, options.mesh)
    made = groups.of_training(
        lab, options.ranks, options.strategy, mesh, options.reshard_after_forward, post_forward_meshes=meshes
    )
    memory = gpus.verdict(peak, options.memory, options.gpu, options.ranks, groups.communicators(made))
    kept = sum(group.count for group in made if group.name == groups.POST_FORWARD)
    return memory | {"process_groups": groups.total(made), "post_forward_meshes": kept}


def costs(options, plan: predict.Plan) -> dict:
    """Return what is predicted of a plan's traffic and time, ready for JSON: bytes, and seconds. It needs no peak."""
    times, samples_per_second = throughput(options, plan)
    return {
        "traffic": [c | cost.ring_bytes(c, plan, options.node_size) for c in plan.traffic()],
        "seconds": times,
        "tokens_of_a_step": tokens_of_a_step(options, plan),
        **samples_per_second,
        "flops_utilisation": cost.utilization(plan, times["overlapped"], options.peak_flops),
        "booking": training_cost(options, tokens_of_a_step(options, plan), times) if options.tokens else None,
        "host": predict.by_category(plan.host_memory()),
    }


def stages_of(options, plan: predict.Plan) -> list[predict.Plan]:
    """Return the plans of all stages; without a pipeline there is one."""
    return stage_plans(options) if options.stages > 1 else [plan]


def tokens_of_a_step(options, plan: predict.Plan) -> int:
    """Return the tokens of a step, on all ranks together."""
    return plan.blueprint.samples * plan.micro_batches * (plan.ranks // options.stages // plan.tp_degree)


def throughput(options, plan: predict.Plan) -> tuple[dict, dict]:
    """Return (``cost.step_time`` of the slowest stage, {"samples_per_second", "samples_per_second_at_least"}).

    Samples are tokens, of all ranks together; the first number is that of an overlapped step, the second of a serial one.
    """
    links = (
        link_of(options.link or options.booked.link, cost.LINKS, cost.LINKS["nvlink"].latency, "--link"),
        link_of(options.network, cost.NETWORKS, cost.NETWORKS["infiniband"].latency, "--network"),
    )
    times = max(  # the slowest stage sets the pace of all
        (
            cost.step_time(one, options.node_size, *links, options.peak_flops * options.efficiency)
            for one in stages_of(options, plan)
        ),
        key=lambda times: times["overlapped"],
    )
    tokens = tokens_of_a_step(options, plan)
    names = {"samples_per_second": "overlapped", "samples_per_second_at_least": "serial"}
    return times, {ours: tokens / times[name] for ours, name in names.items()}


def training_cost(options, samples: int, times: dict) -> dict:
    """Return what training on --tokens takes: {"steps", "hours": [least, most], "gpu_hours": …, "money": …}.

    Args:
        options: of plan.py; without --price, "money" is None.
        samples: tokens of a step.
        times: see ``cost.step_time``.
    """
    steps = options.tokens / samples
    hours = [steps * times[name] / 3600 for name in ("overlapped", "serial")]
    gpu_hours = [options.ranks * each for each in hours]
    money = None if options.price is None else [options.price * each for each in gpu_hours]
    return {"steps": steps, "hours": hours, "gpu_hours": gpu_hours, "money": money}


def sweep(options) -> list[dict]:
    """Return a row for every strategy with every kind of recomputation.

    Rows that fit come first, by throughput; then the others, by the memory they lack. Of the kinds of recomputation that
    do not fit, there is only the one that saves least. If the persistent memory does not fit already, one row stands for
    all kinds ("any"); so does one that is "not planned" with the other options, which has the reason in "why". "place" is
    that of rows that fit; rows whose throughputs differ by less than ``TIE`` share one. "options" are those that make the
    row.
    """
    rows = []
    for name, changes in variants(options):
        try:
            for row in recompute_rows(dataclasses.replace(options, **changes)):
                rows.append({"strategy": name} | row | {"options": changes | row["options"]})
        except UserError as error:  # such as FSDP1 with adapters
            rows.append(
                {"strategy": name, "recompute": "any", "answer": NOT_PLANNED, "why": str(error), "options": changes}
                | EMPTY_ROW
            )
    rows.sort(key=_first_what_fits)
    best, place, answer = 0.0, 0, None
    for number, row in enumerate(rows, 1):
        if row["answer"] != answer or row["samples_per_second"] < (1 - TIE) * best:
            best, place, answer = row["samples_per_second"], number, row["answer"]
        row["place"] = place if answer in FITTING else None
    return rows


def recompute_rows(options) -> list[dict]:
    """Return the rows of one strategy: see ``sweep``.

    Raises:
        UserError: it does not go together with the other options.
    """
    state = predict.total(first_rank_plan(options).persistent())
    if fit(options, state)["answer"] == "does not fit":
        return [{"recompute": "any", "options": {}} | row_summary(options, state)]
    rows, refusal = [], None
    for kind in RECOMPUTE_BY_MEMORY:
        every = options.recompute_every if kind != "none" else 1
        changes = {"recompute": kind, "recompute_every": every}
        try:
            summary = row_summary(dataclasses.replace(options, **changes))
        except UserError as error:  # of this kind alone, such as what only a simulation covers
            refusal = error
            continue
        rows.append({"recompute": kind, "options": changes} | summary)
        if summary["answer"] == "does not fit":
            break
    if refusal and not rows:
        raise refusal
    return rows


def _first_what_fits(row: dict) -> tuple:
    lacking = row["least"] if row["answer"] == "does not fit" else 0
    return ORDER.index(row["answer"]), lacking, -row["samples_per_second"]


def row_summary(options, state: int | None = None) -> dict:
    """Return a row of a table: {"peak": bytes, "answer", "needs", "least": GiB, "samples_per_second", "…_at_least"}.

    What does not fit has 0 samples per second.

    Args:
        options: of plan.py.
        state: bytes to take for the peak, if these alone do not fit.
    """
    plan = first_rank_plan(options)
    peak = state or predict.total(plan.for_peak_rank().peak()[1])
    memory = fit(options, peak)
    needs = {name: memory[name] for name in ("answer", "needs", "least")}
    if memory["answer"] == "does not fit":
        return EMPTY_ROW | {"peak": peak} | needs
    return {"peak": peak} | throughput(options, plan)[1] | needs


def variants(options) -> list[tuple[str, dict]]:
    """Return (name, {option: value}) of every strategy for this number of ranks.

    Of a third-party model these include tensor groups, and of a mixture of experts expert groups. Those of the course's
    models are planned for one --mesh at a time; with one that shares sequences, each form of attention stands next to the
    strategies that share none.
    """
    if options.ranks == 1:
        return [("one process", {"strategy": "single"})]
    plain = {"mesh": None, "reshard_after_forward": "true", "context_attention": "ring", "imbalance": 1.0}
    found = [(name, plain | {"strategy": name}) for name in STRATEGIES if name != "single"]
    found += [
        (f"{name}, parameters kept", plain | {"strategy": name, "reshard_after_forward": "false"})
        for name in ("fsdp1", "fsdp2")
    ]
    if options.cp_degree > 1:
        shared = {"strategy": "fsdp2", "reshard_after_forward": "true", "mesh": options.mesh}
        spread = f", expert {options.ep_degree}" if options.ep_degree > 1 else ""
        found += [
            (f"fsdp2, context {options.cp_degree}{spread}, {form}", shared | {"context_attention": form})
            for form in context.FORMS
        ]
    size = options.node_size
    for degree in (2, 4, 8) if options.third_party else ():  # within a node
        if options.ranks % degree == 0 and size % degree == 0:
            mesh = f"shard={options.ranks // degree},tensor={degree}"
            found.append((f"fsdp2, tensor {degree}", plain | {"strategy": "fsdp2", "mesh": mesh}))
    for degree in range(2, 1 + (options.experts or 0)):
        if options.experts % degree == 0 and options.ranks % degree == 0:
            mesh = f"shard={options.ranks},expert={degree}"
            spread = {"strategy": "fsdp2", "mesh": mesh, "imbalance": options.imbalance}
            found.append((f"fsdp2, expert {degree}", plain | spread))
    if options.ranks > size and options.ranks % size == 0:
        fsdp2 = plain | {"strategy": "fsdp2"}
        for replicas in sorted(
            {options.ranks // size, 2} if options.ranks % (2 * size) == 0 else {options.ranks // size}
        ):
            mesh = f"{replicas}x{options.ranks // replicas}"
            found.append((f"fsdp2, HSDP {mesh}", fsdp2 | {"mesh": mesh}))
        found.append((f"fsdp2, one part in {size} kept", fsdp2 | {"reshard_after_forward": str(size)}))
    return found


def find(options) -> dict:
    """Search for the least --ranks, or the most --batch-size or --seq-len, that fits; the other two are as in the options.

    Returns:
        {"what", "found": number or None, "tight": the same if "tight" suffices, "rows": of its neighbors}.
    """
    what = options.find.replace("-", "_")
    last = LAST[what]
    unit = 1
    if what == "seq_len":
        unit = sequence_unit(options)
        last = min(last, options.longest) // unit

    @cache
    def memory(number: int) -> dict:
        tried = dataclasses.replace(options, **{what: number * unit})
        return fit(tried, predict.total(plan_from_options(tried).peak()[1]))

    extreme = search.least if what == "ranks" else search.most
    found, tight = (
        extreme(lambda number, kind=kind: memory(number)[kind], options.memory, last) for kind in ("needs", "least")
    )
    numbers = [n * unit for n in neighbors(what, found or tight, last, options.node_size)]
    rows = [{what: n} | row_summary(dataclasses.replace(options, **{what: n})) for n in numbers]
    return {"what": what, "found": found and found * unit, "tight": tight and tight * unit, "unit": unit, "rows": rows}


def sequence_unit(options) -> int:
    """Return what --seq-len must be divisible by, so that the ranks of context and tensor groups can share a sequence."""
    parts = options.cp_degree * context.ORDERS[context.order_of(options.context_attention)]
    return lcm(parts if options.cp_degree > 1 else 1, options.cp_degree * options.tp_degree)


def neighbors(what: str, number: int | None, last: int, node_size: int) -> list[int]:
    """Return the numbers worth comparing with the one found; of ranks, also whole nodes."""
    if number is None:
        return [last] if what == "ranks" else [1]
    near = {number - 1, number, number + 1, 2 * number}
    if what == "ranks":
        nodes = -(-number // node_size)
        near |= {nodes * node_size, (nodes + 1) * node_size}
    return [n for n in sorted(near) if 1 <= n <= last]
