# SPDX-License-Identifier: BSD-3-Clause
"""Tasks 1 to 4: predict a configuration's peak memory of a rank, and a step's traffic, within 5 %.

Tasks 1 and 2 are small: the judge runs them, and measures with the course's meters. Tasks 3 and 4 need GPUs: the judge
plans them.
"""

from dataclasses import dataclass
from functools import partial
from random import Random

from planner import predict
from planner.step.plan import Plan

from labkit.exam import plans
from labkit.exam.verdicts import TOLERANCE, Verdict, of_number


@dataclass(frozen=True)
class Predict:
    """A task: a configuration whose peak and traffic are to be predicted."""

    number: int
    one: dict

    @property
    def runs_here(self) -> bool:
        """Whether the judge runs it."""
        return self.one["script"] != plans.PLANNED

    @property
    def units(self) -> tuple[str, str]:
        """The units of peak and traffic."""
        return ("MiB", "MB") if self.runs_here else ("GiB", "GB")

    @property
    def fields(self) -> dict:
        """The answer to fill in."""
        peak, traffic = self.units
        return {f"peak_{peak}": None, f"traffic_{traffic}": None}

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        peak, traffic = self.units
        how = "runs this here, and measures" if self.runs_here else "plans this for GPUs"
        return [
            *(f"- {line}" for line in plans.in_words(self.one)),
            "",
            f"Predict two numbers, each within {100 * TOLERANCE:g} %:",
            "",
            f"- the peak memory of rank 0 in {peak}: live tensors, in a step after the first",
            f"- the traffic of a step in {traffic}: the whole tensor of each collective that rank 0 calls (count × size each, as "
            "plans and records list them), added up; not what a rank sends, and not times the ranks",
            "",
            f"The judge {how}.",
        ]

    def to_run(self, answer: dict) -> dict | None:
        """Return the configuration that the judge runs; None: it plans."""
        return self.one if self.runs_here else None

    def judge(self, answer: dict, measured: dict | None) -> Verdict:
        """Judge an answer.

        Args:
            answer: with the keys of ``fields``.
            measured: a rank's "memory" and "traffic", as a record has them; None: plan instead.
        """
        peak, traffic = plans.measured_or_planned(self.one, measured)
        (first, unit), (second, other) = zip(self.fields, self.units, strict=True)
        found = [
            of_number("peak", unit, answer.get(first), peak, partial(mistaken_peaks, self.one)),
            of_number("traffic", other, answer.get(second), traffic, partial(mistaken_traffic, self.one)),
        ]
        mistakes = tuple(mistake for mistake, _ in found if mistake)
        sentence = "; ".join(sentence for _, sentence in found)
        return Verdict(not mistakes, mistakes, sentence, "run" if measured else "plan")


def mistaken_peaks(one: dict) -> dict[str, float]:
    """Return the peaks to which mistakes lead: {mistake: bytes}."""
    plan = plans.plan_of(one)
    terms = predict.by_category(plan.peak()[1])
    peak, persistent = sum(terms.values()), predict.total(plan.persistent())
    found = {
        "not divided by the ranks": peak + (plan.shards - 1) * persistent,
        "the sum of all ranks": peak * plan.ranks,
        "everything divided by the ranks": peak / plan.ranks,
        "optimizer state forgotten": peak - terms.get("optimizer state", 0),
        "gathered parameters forgotten": peak - terms.get("all-gather", 0),
        "gradients forgotten": peak - terms.get("gradients", 0) - terms.get("reduce-scatter", 0),
        "activations forgotten": peak - terms.get("activations", 0),
        "only the persistent memory": persistent,
    }
    return found | _of_other_formats(one, plans.peak_bytes)


def mistaken_traffic(one: dict) -> dict[str, float]:
    """Return the traffic to which mistakes lead: {mistake: bytes}."""
    plan = plans.plan_of(one)
    collectives = plan.traffic()
    total = plans.traffic_bytes(collectives)
    gathers = plans.traffic_bytes([each for each in collectives if each["kind"] == "all-gather"])
    found = {}  # of mistakes that lead to the same number, the first counts
    if plan.micro_batches > 1:
        found["only one micro-batch"] = _changed(one, {"accumulate": 1, "sync": "every"}, _traffic)
    if plan.shards_parameters and plan.reshard == "true":
        found["backward's all-gathers forgotten"] = _changed(one, {"reshard_after_forward": "false"}, _traffic)
    found |= {
        "only what one rank sends in a ring": plans.sent_bytes(plan),
        "divided by the ranks": total / plan.shards,
        "counted once for each rank": total * plan.ranks,
        "all-gathers forgotten": total - gathers,
        "only the all-gathers": gathers,
    }
    return found | _of_other_formats(one, _traffic) | {"half of the traffic": total / 2, "twice the traffic": total * 2}


def _traffic(plan: Plan) -> int:
    return plans.traffic_bytes(plan.traffic())


def _of_other_formats(one: dict, measure) -> dict[str, float]:
    """Return the figure of the other precision."""
    other = "fp32" if one["config"].get("precision") == "bf16" else "bf16"
    return {f"computed for {other}": _changed(one, {"precision": other, "weights": "fp32"}, measure)}


def _changed(one: dict, changes: dict, measure) -> float:
    """Return a figure of a configuration with other options; 0 where its lab refuses them."""
    if one["script"] == "mnist_fsdp.py":
        changes = {name: value for name, value in changes.items() if name != "weights"}
    return measure(plans.plan_of(one | {"config": one["config"] | changes}))


# The draw. What ``turn`` selects differs from one seed to the next, so that no two consecutive seeds share a task.


def mnist(random: Random, turn: int) -> dict:
    """Draw a run of the MNIST network on 2 to 4 ranks."""
    strategy = random.choice(("ddp", "fsdp1", "fsdp2", "fsdp2"))
    config = {"strategy": strategy, "precision": random.choice(("fp32", "fp32", "bf16"))}
    if strategy != "ddp":
        config |= {"wrap": random.choice(("unit", "size")), "reshard_after_forward": random.choice(("true", "false"))}
    size = 8 + 3 * (turn % 17)
    return {"script": "mnist_fsdp.py", "ranks": random.choice((2, 4)), "batch_size": size, "config": config}


def tiny_gpt(random: Random, turn: int) -> dict:
    """Draw a run of the smallest transformer on 2 or 4 ranks."""
    ranks, strategy = random.choice((2, 4)), random.choice(("ddp", "fsdp1", "fsdp2", "fsdp2"))
    config = {"preset": "tiny", "strategy": strategy, "batch_size": random.choice((2, 3, 4, 6))}
    config |= {"seq_len": 32 + 8 * (turn % 11), "precision": random.choice(("fp32", "bf16"))}
    config |= {"recompute": random.choice(("none", "full", "selective"))}
    config |= {"optimizer": random.choice(("adamw", "adamw", "momentum", "sgd"))}
    config |= {"accumulate": random.choice((1, 2, 3))}
    if config["accumulate"] > 1:
        config["sync"] = random.choice(("every", "last"))
    if strategy != "ddp":
        config["wrap"] = random.choice(("blocks", "blocks+embeddings"))
        hybrid = ranks == 4 and random.random() < 0.3
        config |= {"mesh": "2x2"} if hybrid else {"reshard_after_forward": random.choice(("true", "false"))}
    return {"script": "gpt_fsdp.py", "ranks": ranks, "config": config}


def large_gpt(random: Random, turn: int, preset: str, ranks: tuple, sizes: tuple) -> dict:
    """Draw a run of a large transformer, which is planned for GPUs.

    Args:
        random, turn: of the draw.
        preset: the transformer.
        ranks: numbers of GPUs; ``turn`` selects.
        sizes: (sequences, tokens) of a micro-batch.
    """
    count, (batch, length) = ranks[turn % len(ranks)], random.choice(sizes)
    config = {"preset": preset, "strategy": "fsdp2", "batch_size": batch, "seq_len": length, "precision": "bf16"}
    config |= {"recompute": random.choice(("none", "full", "selective")), "weights": random.choice(("fp32", "bf16"))}
    config |= {"wrap": random.choice(("blocks", "blocks+embeddings")), "loss_chunks": random.choice((1, 8))}
    hybrid = count > 8 and random.random() < 0.4
    config |= {"mesh": f"{count // 8}x8"} if hybrid else {"reshard_after_forward": random.choice(("true", "false"))}
    return {"script": plans.PLANNED, "ranks": count, "config": config}


def draw(number: int, random: Random, turn: int) -> Predict:
    """Draw task ``number``, 1 to 4. turn: the seed, which sets what must differ between consecutive seeds."""
    if number == 1:
        return Predict(number, mnist(random, turn))
    if number == 2:
        return Predict(number, tiny_gpt(random, turn))
    if number == 3:
        return Predict(number, large_gpt(random, turn, "llama3-8b", (8, 16, 32, 24), ((1, 4096), (1, 8192), (2, 4096))))
    return Predict(number, large_gpt(random, turn, "llama3-70b", (64, 128, 96, 256), ((1, 8192),)))
