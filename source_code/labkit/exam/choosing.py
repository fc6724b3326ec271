"""Tasks 9 to 12: choose a mesh, a wrapping policy, and formats for a budget. Any answer that fits is right.

Task 9 is small: the judge runs the chosen configuration. The others need GPUs: the judge plans them. A budget is drawn
around a configuration that fits, and so that the options' defaults do not.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from labkit import UserError
from labkit.exam import plans
from labkit.exam.verdicts import UNITS, Verdict

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
DEFAULTS = {"strategy": "fsdp2", "mesh": None, "wrap": "blocks", "precision": "fp32", "weights": "fp32"}
DEFAULTS |= {"recompute": "none", "reshard_after_forward": "true", "loss_chunks": 1}
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
    def units(self) -> tuple[str, str]:
        """The units of memory and traffic."""
        return ("MiB", "MB") if self.runs_here else ("GiB", "GB")

    def statement(self) -> list[str]:
        """Return the lines of the task."""
        config, (memory, traffic) = self.one["config"], self.units
        where = "ranks on the CPU" if self.runs_here else "H100 GPUs"
        how = "runs your choice here and measures" if self.runs_here else "plans your choice"
        limits = [f"- `{name}` must be {' or '.join(map(_shown, some))}" for name, some in self.allowed.items()]
        return [
            f"Train the transformer {config['preset']} with AdamW on {self.one['ranks']} {where}; a micro-batch has "
            f"{config['batch_size']} × {config['seq_len']:,} tokens on each rank. Budget:",
            "",
            f"- a peak of at most {self.memory:,.6g} {memory} of tensors on rank 0",
            f"- at most {self.traffic:,.6g} {traffic} of traffic in a step (the whole tensors of all collectives, added up)",
            *limits,
            "",
            "Choose every option; any choice that fits is right:",
            "",
            *(f"- `{name}`: {', '.join(map(_shown, some))}" for name, some in CHOICES.items()),
            "",
            f"The judge {how}.",
        ]

    def chosen(self, answer: dict) -> tuple[dict | None, str, str]:
        """Return (the chosen configuration or None, the mistake, the sentence)."""
        given = {name: answer.get(name) for name in CHOICES}
        if isinstance(given["reshard_after_forward"], bool):  # JSON has true and false, too
            given["reshard_after_forward"] = str(given["reshard_after_forward"]).lower()
        if empty := [name for name, value in given.items() if value is None and name != "mesh"]:
            return None, "no answer", f"{empty[0]}: there is no answer"
        for name, value in given.items():
            if name != "mesh" and (isinstance(value, (bool, float)) or value not in CHOICES[name]):
                return None, "not a choice", f"{name}: {value!r} is none of {', '.join(map(_shown, CHOICES[name]))}"
        if given["mesh"] is not None and not re.fullmatch(r"\d+x\d+", str(given["mesh"])):
            return None, "not a choice", f'mesh: {given["mesh"]!r} is not null, nor REPLICASxSHARDS such as "2x4"'
        for name, some in self.allowed.items():
            if given[name] not in some:
                return None, "against the rules", f"{name} must be {' or '.join(map(_shown, some))}, not {given[name]}"
        one = configured(self.one, given)
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
        peak, traffic = plans.measured_or_planned(one, measured)
        found = []
        for mistake, size, most, unit in zip(
            ("does not fit", "too much traffic"), (peak, traffic), (self.memory, self.traffic), self.units, strict=True
        ):
            value = size / UNITS[unit]
            verdict = "fits" if value <= most else mistake
            found.append((mistake if value > most else "", f"{value:,.6g} of {most:,.6g} {unit}: {verdict}"))
        mistakes = tuple(mistake for mistake, _ in found if mistake)
        return Verdict(not mistakes, mistakes, "; ".join(sentence for _, sentence in found), how)


def _shown(value) -> str:
    """Return a value as it is written in answers.json."""
    return "null" if value is None else str(value)


def configured(one: dict, options: dict) -> dict:
    """Return a configuration with chosen options; those that a strategy does not have stay out if they are defaults."""
    left_out = {name for name, value in options.items() if value == DEFAULTS[name] and name not in ("strategy", "wrap")}
    return one | {"config": one["config"] | {name: value for name, value in options.items() if name not in left_out}}


# The draw

SMALL = [(length, batch) for length in (48, 64, 96, 128) for batch in (2, 4, 6)]
MODELS = {  # {task: [(preset, GPUs, sequences, tokens)]}
    10: [("1b", ranks, *sizes) for ranks in (4, 8, 16) for sizes in ((2, 4096), (4, 2048))],
    11: [("llama3-8b", ranks, *sizes) for ranks in (8, 16, 32) for sizes in ((1, 8192), (2, 4096))],
    12: [("llama3-70b", ranks, 1, 4096) for ranks in (64, 128, 256)],
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


def around(one: dict, options: dict, random: Random) -> tuple[float, float] | None:
    """Return a budget, bytes of (memory, traffic), that options meet and the defaults do not; None: there is none."""
    try:
        needs = plans.measured_or_planned(configured(one, options))
    except UserError:  # options that cannot be combined, such as a wrapped embedding that shares its weight
        return None
    budget = tuple(need * random.uniform(*ROOM) for need in needs)
    if budget[0] > LARGEST:
        return None
    plain = plans.measured_or_planned(configured(one, DEFAULTS))
    return budget if any(need > most for need, most in zip(plain, budget, strict=True)) else None


def draw(number: int, random: Random, turn: int) -> Choose:
    """Draw task ``number``, 9 to 12. turn: the seed, which sets what must differ between consecutive seeds."""
    one, budget = given(number, turn), None
    while budget is None:
        rules = random.choice(RULES)
        options = {name: random.choice(rules.get(name, CHOICES[name])) for name in CHOICES}
        mesh = random.choice(rules.get("mesh", meshes(one["ranks"])))
        budget = around(one, options | {"strategy": "fsdp2", "precision": "bf16", "mesh": mesh}, random)
    memory, traffic = ("MiB", "MB") if number == 9 else ("GiB", "GB")
    shown = [float(f"{size / UNITS[unit]:.4g}") for size, unit in zip(budget, (memory, traffic), strict=True)]
    return Choose(number, one, *shown, rules)
