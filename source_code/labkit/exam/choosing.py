# SPDX-License-Identifier: BSD-3-Clause
"""Tasks 9 to 12: choose a mesh, a wrapping policy, and formats for a budget. Any answer that fits is right.

Task 9 is small: the judge runs the chosen configuration. The others need GPUs: the judge plans them. A budget is drawn
around a configuration that computes in bf16, so that the options' defaults, whose traffic is in fp32, do not fit.
"""

import re
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import ClassVar

from labkit import UserError
from labkit.exam import plans
from labkit.exam.verdicts import UNITS, Verdict, empty, one_of, quoted

CHOICES = {
    "strategy": ("ddp", "fsdp1", "fsdp2"),
    "mesh": (None, "REPLICASxSHARDS"),
    "wrap": ("blocks", "blocks+embeddings"),
    "precision": ("fp32", "bf16"),
    "weights": ("fp32", "bf16"),
    "recompute": ("none", "selective", "full"),
    "reshard_after_forward": ("true", "false"),
    "loss_chunks": (1, 8),
}
NOTES = {"mesh": "; null is no mesh, and a mesh is written such as 2x4"}
DEFAULTS = {"strategy": "fsdp2", "mesh": None, "wrap": "blocks", "precision": "fp32", "weights": "fp32"}
DEFAULTS |= {"recompute": "none", "reshard_after_forward": "true", "loss_chunks": 1}
NO_MESH = ("", "null", "none")
ROOM = (1.02, 1.08)  # how much more a budget is than the drawn configuration needs
LARGEST = 76 * 2**30  # bytes of a budget: an H100's, less what a process has there besides tensors


@dataclass(frozen=True)
class Choose:
    """A task: a model and its ranks, and a budget.

    Attributes:
        number: of the task.
        one: what is given, without what is to be chosen.
        memory, traffic: the budget, in ``units``.
        allowed: {option: the values that may be chosen}, of those that are restricted.
    """

    number: int
    one: dict
    memory: float
    traffic: float
    allowed: dict

    fields: ClassVar[dict] = dict.fromkeys(CHOICES)

    @property
    def runs_here(self) -> bool:
        """Whether the judge runs it."""
        return self.one["script"] != plans.PLANNED

    @property
    def over_nodes(self) -> bool:
        """Whether traffic counts where it leaves a node."""
        return over_nodes(self.one)

    @property
    def units(self) -> tuple[str, str]:
        """The units of memory and traffic."""
        return ("MiB", "MB") if self.runs_here else ("GiB", "GB")

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        config, (memory, traffic) = self.one["config"], self.units
        where = "ranks on the CPU" if self.runs_here else "H100 GPUs"
        how = "runs your choice here, and measures" if self.runs_here else "plans your choice"
        counted = (
            f"that leave a node of {plans.NODE} GPUs, with rings (a plan's *leave a node, in all*, added up)"
            if self.over_nodes
            else "of whole tensors (the count × size each of all collectives in a plan, added up)"
        )
        limits = [f"- `{name}` must be {one_of(map(_shown, some))}" for name, some in self.allowed.items()]
        return [
            f"Train the transformer {config['preset']} with AdamW on {self.one['ranks']} {where}; a step has one micro-batch, "
            f"of {config['batch_size']} × {config['seq_len']:,} tokens on each rank. Budget:",
            "",
            f"- memory: a peak of at most {self.memory:,.6g} {memory} of live tensors on rank 0, in a step after the first",
            f"- traffic of a step: at most {self.traffic:,.6g} {traffic} {counted}",
            *limits,
            "",
            f"Choose a value of each option, as of `{self.one['script']}`; any choice that fits is right:",
            "",
            *(f"- `{name}`: {one_of(map(_shown, some))}{NOTES.get(name, '')}" for name, some in CHOICES.items()),
            "",
            f"The judge {how}.",
        ]

    def chosen(self, answer: dict) -> tuple[dict | None, str, str]:
        """Return (the chosen configuration or None, the mistake, the sentence)."""
        if unanswered := [name for name in CHOICES if empty(answer.get(name)) and name != "mesh"]:
            return None, "no answer", f"there is no answer for {', '.join(unanswered)}"
        chosen = {}
        for name, choices in CHOICES.items():
            value = answer.get(name)
            word = _word(value)
            if name == "mesh" and (word in NO_MESH or re.fullmatch(r"\d+x\d+", word)):
                chosen[name] = None if word in NO_MESH else word
            elif name != "mesh" and word in map(str, choices):
                chosen[name] = next(choice for choice in choices if str(choice) == word)
            else:
                return None, "not a choice", f"{name} must be {one_of(map(_shown, choices))}, but is {quoted(value)}"
        for name, some in self.allowed.items():
            if chosen[name] not in some:
                rule = f"{name} must be {one_of(map(_shown, some))} in this task, but is {_shown(chosen[name])}"
                return None, "against the rules", rule
        one = configured(self.one, chosen)
        try:
            plans.plan_of(one)
        except UserError as error:
            return None, "cannot be combined", str(error)
        return one, "", ""

    def to_run(self, answer: dict) -> dict | None:
        """Return the configuration that the judge runs; None: it plans, or the answer is none."""
        return self.chosen(answer)[0] if self.runs_here else None

    def judge(self, answer: dict, measured: dict | None) -> Verdict:
        """Judge an answer: see ``predicting.Predict.judge``."""
        one, mistake, sentence = self.chosen(answer)
        how = "run" if measured else "plan"
        if one is None:
            return Verdict(False, (mistake,), sentence, how)
        found = []
        for mistake, size, most, unit in zip(
            ("does not fit", "too much traffic"),
            needs(one, measured),
            (self.memory, self.traffic),
            self.units,
            strict=True,
        ):
            value = size / UNITS[unit]
            verdict = "fits" if value <= most else mistake
            found.append((mistake if value > most else "", f"{value:,.6g} of {most:,.6g} {unit}: {verdict}"))
        mistakes = tuple(mistake for mistake, _ in found if mistake)
        return Verdict(not mistakes, mistakes, "; ".join(sentence for _, sentence in found), how)


def over_nodes(one: dict) -> bool:
    """Return whether a configuration's ranks are on several nodes, whose links are the scarce ones."""
    return one["script"] == plans.PLANNED and one["ranks"] > plans.NODE


def needs(one: dict, measured: dict | None = None) -> tuple[float, float]:
    """Return what a budget limits, in bytes: (peak of rank 0; traffic of a step, over nodes only what leaves one)."""
    if over_nodes(one):  # which is planned only
        plan = plans.plan_of(one)
        return plans.peak_bytes(plan), plans.leaving_bytes(plan)
    return plans.measured_or_planned(one, measured)


def _word(value) -> str:
    """Return a chosen value as an option has it: "fsdp2" for " FSDP2", "true" for true, "8" for 8.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip().casefold()


def _shown(value) -> str:
    """Return a value as it is written in answers.json."""
    return "null" if value is None else str(value)


def configured(one: dict, options: dict) -> dict:
    """Return a configuration with chosen options; those that a strategy does not have stay out if they are defaults."""
    left_out = {name for name, value in options.items() if value == DEFAULTS[name] and name not in ("strategy", "wrap")}
    return one | {"config": one["config"] | {name: value for name, value in options.items() if name not in left_out}}


# The draw

SMALL = [(length, batch) for length in (48, 64, 96) for batch in (2, 4)]
MODELS = {  # {task: [(preset, GPUs, sequences, tokens)]}
    10: [("1b", ranks, 4, 2048) for ranks in (4, 8)],
    11: [("llama3-8b", ranks, 1, 8192) for ranks in (16, 24, 32)],
    12: [("llama3-8b", ranks, 1, 16384) for ranks in (64, 128, 256)],
}
RULES = (  # which options are restricted, and to what
    {"weights": ("fp32",)},
    {"recompute": ("none", "selective")},
    {"weights": ("fp32",), "loss_chunks": (1,)},
    {"recompute": ("none",)},
    {"strategy": ("fsdp2",), "mesh": (None,)},
)


def given(number: int, turn: int) -> dict:
    """Return what task ``number`` gives; ``turn`` selects it."""
    if number == 9:
        length, batch = SMALL[turn % len(SMALL)]
        config = {"preset": "tiny", "batch_size": batch, "seq_len": length}
        return {"script": "gpt_fsdp.py", "ranks": 4, "config": config}
    preset, ranks, batch, length = MODELS[number][turn % len(MODELS[number])]
    config = {"preset": preset, "batch_size": batch, "seq_len": length}
    return {"script": plans.PLANNED, "ranks": ranks, "config": config}


def meshes(ranks: int) -> tuple:
    """Return the meshes that are drawn for a number of ranks."""
    return (None, f"{ranks // 8}x8") if ranks > 8 else (None, f"2x{ranks // 2}")


def around(one: dict, options: dict, rules: dict, place: float, random: Random) -> tuple[float, float] | None:
    """Return a budget that options meet, bytes of (memory, traffic).

    None: the options cannot be combined, or need too much; or a configuration fits that saves memory in every way, so that
    nothing would have to be weighed. place: from 0 to 1, which of ``saving`` must not fit.
    """
    try:
        need = needs(configured(one, options))
    except UserError:  # such as a wrapped embedding that shares its weight
        return None
    budget = tuple(size * random.uniform(*ROOM) for size in need)
    if budget[0] > LARGEST:
        return None
    savers = saving(one, rules)
    excluded = needs(savers[int(place * len(savers))])
    return budget if any(size > most for size, most in zip(excluded, budget, strict=True)) else None


def saving(one: dict, rules: dict) -> list[dict]:
    """Return the configurations that save memory in every way that the rules allow, for each mesh and reshard_after_forward."""
    saved = {"strategy": "fsdp2", "wrap": "blocks", "precision": "bf16", "weights": "bf16", "recompute": "full"}
    saved |= {"loss_chunks": 8}
    saved = {
        name: value if value in rules.get(name, CHOICES[name]) else rules[name][-1] for name, value in saved.items()
    }
    some = meshes(one["ranks"]) if over_nodes(one) else (None,)  # within a node, replicas only take more memory
    every = rules.get("mesh", some), CHOICES["reshard_after_forward"]
    names = "mesh", "reshard_after_forward"
    return [configured(one, saved | dict(zip(names, values, strict=True))) for values in product(*every)]


def draw(number: int, random: Random, turn: int) -> Choose:
    """Draw task ``number``, 9 to 12. turn: the seed, which sets what must differ between consecutive seeds."""
    one, budget, place = given(number, turn), None, random.random()
    while budget is None:
        rules = random.choice(RULES)
        options = {name: random.choice(rules.get(name, CHOICES[name])) for name in CHOICES}
        mesh = random.choice(rules.get("mesh", meshes(one["ranks"])))
        options |= {"strategy": "fsdp2", "wrap": "blocks", "precision": "bf16", "mesh": mesh}
        budget = around(one, options, rules, place, random)
    memory, traffic = ("MiB", "MB") if number == 9 else ("GiB", "GB")
    shown = [float(f"{size / UNITS[unit]:.4g}") for size, unit in zip(budget, (memory, traffic), strict=True)]
    return Choose(number, one, *shown, rules)
