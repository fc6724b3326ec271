"""What plan.py works out: a plan from its options, what it needs and costs, a sweep over strategies, the least that fits.

options: plan.py's ``Options``. Imports no torch.
"""

import dataclasses
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from planner import UserError, cost, gpus, networks, pipeline, predict, search
from planner.mesh import arrange

STRATEGIES = ("single", "ddp", "zero1", *(f"deepspeed-{stage}" for stage in range(4)), "fsdp1", "fsdp2")
SLOWEST, FASTEST = 1e-6, 1e6  # GB/s of a link
FITTING, NOT_PLANNED = ("fits", "tight"), "not planned"
ORDER = (*FITTING, "does not fit", NOT_PLANNED)
NOTHING = {"peak": None, "samples_per_second": 0.0, "samples_per_second_at_least": 0.0, "needs": None, "least": None}
TIE = 0.02  # throughputs that differ by less are the same: no prediction here is better than that
KEEPS_MORE_AND_MORE = ("full", "alternate", "selective", "none")  # what is recomputed, by what is kept from forward
LAST = {"ranks": 65_536, "batch_size": 65_536, "seq_len": 2**24}  # where a search ends


def plan_of(options, network: networks.Blueprint | None = None) -> predict.Plan:
    """Plan the rank, or the stage, that needs most.

    Args:
        options: plan.py's.
        network: one's own; None: that of the options.

    Raises:
        UserError: the options do not go together.
    """
    if options.stages > 1:
        return max(stage_plans(options), key=lambda plan: predict.total(plan.peak()[1]))
    return of_first_rank(options, network).of_fullest_rank()


def of_first_rank(options, network: networks.Blueprint | None = None) -> predict.Plan:
    """Plan rank 0, where there is no pipeline: see ``plan_of``."""
    if options.tp_degree > 1 and options.simulate:
        raise UserError("tensor parallelism is not simulated: leave --simulate out, or take rank_zero.py")
    how = {"on_gpu": options.on_gpu, "torch": installed_torch()}
    return predict.of_transformer(options, options.ranks, network, **how)


def stage_plans(options) -> list[predict.Plan]:
    """Plan each stage of a pipeline."""
    mesh = arrange(options.ranks, options.mesh)
    pipeline.check(mesh, options.shape, options.schedule, options.accumulate)
    stages = (pipeline.Stage(mesh.pipeline, number, options.schedule) for number in range(mesh.pipeline))
    return [predict.of_stage(options, stage, on_gpu=options.on_gpu, torch=installed_torch()) for stage in stages]


@cache
def installed_torch() -> tuple[int, int]:
    """The version of PyTorch here, which is not imported; where there is none, that which the planner assumes."""
    found = find_spec("torch")
    try:
        text = Path(found.origin).with_name("version.py").read_text()
        return tuple(map(int, re.search(r"__version__ = '(\d+)\.(\d+)", text).groups()))
    except (AttributeError, TypeError, OSError):
        return predict.Plan.torch


def link_of(text: str, known: dict, latency: float, name: str) -> cost.Link:
    if text in known:
        return known[text]
    try:
        bandwidth = float(text)
    except ValueError:
        bandwidth = 0.0
    if not SLOWEST <= bandwidth <= FASTEST:
        raise UserError(
            f"{name} is {', '.join(known)}, or a number of GB/s between {SLOWEST:g} and {FASTEST:g}, not {text!r}"
        )
    return cost.Link(bandwidth * 1e9, latency, f"{name} {text} GB/s")


def describe(options, plan: predict.Plan) -> dict:
    """All that is predicted of a plan, ready for JSON: bytes, and seconds."""
    where, terms = plan.peak()
    peak = predict.total(terms)
    plans = stages_of(options, plan)
    times, throughput = pace(options, plan)
    return {
        "parameters": sum(one.blueprint.numel for one in plans),
        "stages": [predict.total(one.peak()[1]) for one in plans],
        "persistent": {name: size for (_, name), size in plan.persistent().items()},
        "host": predict.by_category(plan.on_host()) if plan.offload else {},
        "peak": peak,
        "where": where,
        "rank": plan.rank,
        "by_category": predict.by_category(terms),
        "first_step_peak": predict.total(plan.peak(first=True)[1]),
        "traffic": [c | cost.ring_bytes(c, plan, options.node_size) for c in plan.traffic()],
        "seconds": times,
        "tokens_of_a_step": tokens_of_a_step(options, plan),
        **throughput,
        "flops_utilisation": cost.utilisation(plan, times["overlapped"], options.peak_flops),
        "memory": gpus.verdict(peak, options.memory, options.gpu, options.ranks),
        "not_modelled": ["dropout"] if options.shape.dropout else [],  # of what this model has
        "booking": booking(options, tokens_of_a_step(options, plan), times) if options.tokens else None,
    }


def stages_of(options, plan: predict.Plan) -> list[predict.Plan]:
    """The plans of all stages; without a pipeline there is one."""
    return stage_plans(options) if options.stages > 1 else [plan]


def tokens_of_a_step(options, plan: predict.Plan) -> int:
    """Of all ranks together."""
    return plan.blueprint.samples * plan.micro_batches * (plan.ranks // options.stages // plan.tensor)


def pace(options, plan: predict.Plan) -> tuple[dict, dict]:
    """(``cost.step_time`` of the slowest stage, tokens per second at best and at least: see ``in_short``)"""
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
    names = {"samples_per_second": "overlapped", "samples_per_second_at_least": "in turn"}
    return times, {ours: tokens / times[name] for ours, name in names.items()}


def booking(options, samples: int, times: dict) -> dict:
    """What training on --tokens takes: {"steps", "hours": [least, most], "gpu_hours": …, "money": …, None without --price}."""
    steps = options.tokens / samples
    hours = [steps * times[name] / 3600 for name in ("overlapped", "in turn")]
    gpu_hours = [options.ranks * each for each in hours]
    money = None if options.price is None else [options.price * each for each in gpu_hours]
    return {"steps": steps, "hours": hours, "gpu_hours": gpu_hours, "money": money}


def sweep(options) -> list[dict]:
    """Every strategy with every kind of recomputation: what fits by throughput, the others by what they lack.

    Of the kinds of recomputation that do not fit there is the one that keeps least. Where what stays from step to step is
    too much already, one row stands for all ("any"), and says no more than that; so does one that is "not planned" with
    the other options, which has "why". "place": of those that fit; rows whose throughputs differ by less than ``TIE`` share
    one. "options": the options that make the row.
    """
    rows = []
    for name, changes in variants(options):
        try:
            for row in recomputed(dataclasses.replace(options, **changes)):
                rows.append({"strategy": name} | row | {"options": changes | row["options"]})
        except UserError as error:  # such as FSDP1 with adapters
            rows.append(
                {"strategy": name, "recompute": "any", "answer": NOT_PLANNED, "why": str(error), "options": changes}
                | NOTHING
            )
    rows.sort(key=_first_what_fits)
    best, place, answer = 0.0, 0, None
    for number, row in enumerate(rows, 1):
        if row["answer"] != answer or row["samples_per_second"] < (1 - TIE) * best:
            best, place, answer = row["samples_per_second"], number, row["answer"]
        row["place"] = place if answer in FITTING else None
    return rows


def recomputed(options) -> list[dict]:
    """The rows of one strategy, see ``sweep``. UserError where it does not go together with the other options."""
    state = predict.total(of_first_rank(options).persistent())
    if gpus.verdict(state, options.memory, options.gpu, options.ranks)["answer"] == "does not fit":
        return [{"recompute": "any", "options": {}} | in_short(options, state)]
    rows = []
    for kind in KEEPS_MORE_AND_MORE:
        every = options.recompute_every if kind != "none" else 1
        changes = {"recompute": kind, "recompute_every": every}
        rows.append({"recompute": kind, "options": changes} | in_short(dataclasses.replace(options, **changes)))
        if rows[-1]["answer"] == "does not fit":
            break
    return rows


def _first_what_fits(row: dict) -> tuple:
    lacking = row["least"] if row["answer"] == "does not fit" else 0
    return ORDER.index(row["answer"]), lacking, -row["samples_per_second"]


def in_short(options, state: int | None = None) -> dict:
    """A row of a table: {"peak": bytes, "answer", "needs", "least": GiB, "samples_per_second", "…_at_least"}.

    state: bytes to be taken for the peak, where these alone do not fit. What does not fit does 0 samples a second.
    """
    plan = of_first_rank(options)
    peak = state or predict.total(plan.of_fullest_rank().peak()[1])
    memory = gpus.verdict(peak, options.memory, options.gpu, options.ranks)
    kept = {name: memory[name] for name in ("answer", "needs", "least")}
    if memory["answer"] == "does not fit":
        return NOTHING | {"peak": peak} | kept
    return {"peak": peak} | pace(options, plan)[1] | kept


def variants(options) -> list[tuple[str, dict]]:
    """(what it is called, the options that make it) of every strategy for so many ranks."""
    if options.ranks == 1:
        return [("one process", {"strategy": "single"})]
    plain = {"mesh": None, "reshard_after_forward": "true"}
    found = [(name, plain | {"strategy": name}) for name in STRATEGIES if name != "single"]
    found += [
        (f"{name}, parameters kept", plain | {"strategy": name, "reshard_after_forward": "false"})
        for name in ("fsdp1", "fsdp2")
    ]
    size = options.node_size
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
    """The least --ranks, or the most --batch-size or --seq-len, that fits; the others of the three are as the options say.

    {"what", "found": number or None, "tight": the same if tight will do, "rows": of its neighbours}.
    """
    what = options.find.replace("-", "_")
    last = LAST[what]
    if what == "seq_len":
        last = min(last, options.longest)

    @cache
    def memory(number: int) -> dict:
        tried = dataclasses.replace(options, **{what: number})
        return gpus.verdict(predict.total(plan_of(tried).peak()[1]), options.memory, options.gpu, tried.ranks)

    extreme = search.least if what == "ranks" else search.most
    found, tight = (
        extreme(lambda number, kind=kind: memory(number)[kind], options.memory, last) for kind in ("needs", "least")
    )
    numbers = neighbours(what, found or tight, last, options.node_size)
    rows = [{what: n} | in_short(dataclasses.replace(options, **{what: n})) for n in numbers]
    return {"what": what, "found": found, "tight": tight, "rows": rows}


def neighbours(what: str, number: int | None, last: int, node_size: int) -> list[int]:
    """The numbers worth seeing beside the one found: of ranks, whole nodes too."""
    if number is None:
        return [last] if what == "ranks" else [1]
    near = {number - 1, number, number + 1, 2 * number}
    if what == "ranks":
        nodes = -(-number // node_size)
        near |= {nodes * node_size, (nodes + 1) * node_size}
    return [n for n in sorted(near) if 1 <= n <= last]
