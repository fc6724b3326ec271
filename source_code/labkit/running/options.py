"""Declare a command's options once: what each accepts and with what it goes stands beside it.

  @dataclass(frozen=True)
  class Config(Options):
      strategy: Literal["single", "ddp", "fsdp2"] = option("fsdp2", "how the ranks share")
      prefetch: int = option(0, "gather this many blocks ahead", least=0, only=("fsdp2",))

  config = parse(Config, __doc__)        from the command line; Config(prefetch=-1) is refused in the same words

It imports no torch, and nothing that has to be installed.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import types
import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

from labkit import UserError

SHARDED = ("fsdp1", "fsdp2")
LARGEST = {int: 10**9, float: 1e18}  # of any number: a larger one is a slip, whose products would fit no 64 bits
RESHARD = (r"true|false|[2-9]|[1-9]\d{1,8}", "true, false or a number from 2 on")


def option(default, help: str, *, least=None, above=None, at_most=None, form=None, only=(), needs=None, resumed=False):
    """A dataclass field with its default value and the sentence that ``--help`` shows.

    least, above, at_most: bounds of a number. form: (regular expression, in words) of a text. only: the strategies
    under which it may differ from its default. needs: the name of the option that must be given with it. resumed:
    True if a run that goes on from a checkpoint must have the same, "print" if a change is printed.
    """
    bounds = {"least": least, "above": above, "at_most": at_most, "form": form}
    company = {"only": only, "needs": needs}
    return dataclasses.field(default=default, metadata={"help": help, "resumed": resumed} | bounds | company)


@dataclass(frozen=True)
class Options:
    """The base of every command's options: checks each field by what is declared beside it. UserError."""

    launched: ClassVar[bool] = False  # whether torchrun or srun may start this command as many ranks

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check_value(flag(field.name), value, **_rules(field, "least", "above", "at_most", "form"))
            if value != field.default:
                self._check_company(field, value, **_rules(field, "only", "needs"))

    def _check_company(self, field, value, only, needs):
        if only and self.strategy not in only:
            shown = f"{flag(field.name)} {value}" if typing.get_origin(field.type) is Literal else flag(field.name)
            raise UserError(f"{shown} goes with --strategy {' or '.join(only)}; with {self.strategy} leave it out")
        if needs and not getattr(self, needs):
            raise UserError(f"{flag(field.name)} needs {flag(needs)}: give both, or neither")


@dataclass(frozen=True)
class Start(Options):
    """How a lab is started."""

    ranks: int | None = option(
        None, "ranks to start, where neither torchrun nor srun does (default: one per GPU, or 2)", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "how to communicate; gloo alone means on the CPU")

    launched: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if getattr(self, "strategy", None) == "single" and self.ranks not in (None, 1):
            raise UserError("--strategy single is one rank: leave --ranks out, or choose another strategy")


@dataclass(frozen=True)
class Training(Start):
    """What every run that trains can be told besides: what to keep of it."""

    checkpoint: str | None = option(None, "folder for checkpoints, the last one at the end of training")
    resume: bool = option(
        False, "go on from the newest checkpoint in --checkpoint, if there is one", needs="checkpoint"
    )
    fall_back: bool = option(False, "if that one is damaged, go on from the newest whole one", needs="resume")
    keep: int | None = option(
        None, "how many checkpoints to keep, the newest (default: all)", least=1, needs="checkpoint"
    )
    keep_every: int | None = option(
        None, "of the older checkpoints, also keep one every N steps, for good", least=1, needs="keep"
    )
    allow_narrowing: bool = option(
        False, "resume weights in a number format with fewer bits than they were saved in", needs="resume"
    )
    async_checkpoint: bool = option(
        False, "write checkpoints while training goes on, from a copy in the CPU's memory", needs="checkpoint"
    )
    on_failed_save: Literal["stop", "go-on"] = option(
        "stop", "what becomes of training if a checkpoint cannot be written", needs="checkpoint"
    )
    record: str | None = option(None, "write what was measured to this JSON file")
    profile: str | None = option(None, "folder for a trace of a few steps, for Perfetto or TensorBoard")
    log: str | None = option(
        None,
        "folder for TensorBoard event files: loss, learning rate, speed, memory; of transformers, gradient norm and MFU",
    )


def check_choices(chosen, tied: bool):
    """UserError for choices that do not go together, of a lab or of a plan. tied: one weight for embedding and head."""
    if chosen.weights == "bf16" and chosen.precision != "bf16":
        raise UserError("--weights bf16 computes in bf16, too: give --precision bf16")
    if chosen.recompute == "none" and chosen.recompute_every > 1:
        raise UserError("--recompute-every needs --recompute full, selective or alternate: give both, or neither")
    if chosen.units == "apart" and tied:
        raise UserError("--units apart cannot part embedding and head where they share one weight: leave it out")


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")


def _rules(field, *names) -> dict:
    return {name: field.metadata[name] for name in names}


def _check_value(name: str, value, least, above, at_most, form):
    if isinstance(value, str) and not value.strip():  # of a variable that is not set: nothing would be kept, silently
        raise UserError(f"{name} is empty: give it a value, or leave it out")
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{name} must be one line of text, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, but is {value}")
    if type(value) in LARGEST and abs(value) > LARGEST[type(value)]:
        most = LARGEST[type(value)]
        raise UserError(f"{name} must lie between {-most:,} and {most:,}")
    if least is not None and value < least:
        raise UserError(f"{name} must be at least {least}, but is {value}")
    if above is not None and not value > above:
        raise UserError(f"{name} must be above {above}, but is {value}")
    if at_most is not None and value > at_most:
        raise UserError(f"{name} must be at most {at_most}, but is {value}")
    if form and not re.fullmatch(form[0], value):
        raise UserError(f"{name} is {form[1]}, not {value!r}")


def leave(sentence: str, launched: bool = False):
    """Exit with code 2 after a user's error, and print the sentence that says what is wrong.

    Args:
        sentence: to print on stderr, after the name of the command.
        launched: whether this process may be one of several ranks, which all make the same error. Then rank 0 alone
            prints it. (``ranks.leave`` is for errors that one rank alone may make.) A command that nobody launches
            prints it in any case: a RANK in its environment is a leftover.
    """
    rank = os.environ.get("RANK" if "WORLD_SIZE" in os.environ else "SLURM_PROCID", "0")
    if rank == "0" or not launched:
        print(f"{os.path.basename(sys.argv[0])}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    launched = False

    def error(self, message):
        """Exit with one sentence instead of a page of usage."""
        leave(f"{message} (see --help)", self.launched)


def _argument(field) -> dict:
    """What argparse must be told of one field: its type, choices or switch."""
    kind = field.type
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # ``int | None``: an int that may be left out
        kind = typing.get_args(kind)[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    return {"type": kind, "metavar": kind.__name__.upper()}


def parse(options_class, description: str, argv: list[str] | None = None):
    """Read ``options_class`` from the command line. On bad input: one sentence and exit code 2."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.launched = options_class.launched
    own = options_class.__annotations__
    for field in sorted(dataclasses.fields(options_class), key=lambda field: field.name not in own):
        shown = "" if field.default is None else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + shown
        parser.add_argument(flag(field.name), default=field.default, help=text, **_argument(field))
    given = vars(parser.parse_args(argv))
    for name in (name for name, value in given.items() if isinstance(value, list)):  # as argparse reads "--ranks=--"
        parser.error(f"argument {flag(name)}: expected one value")
    try:
        return options_class(**given)
    except UserError as error:
        leave(str(error), options_class.launched)


def arguments(options: dict) -> list[str]:
    """The command line that gives ``options``: {"wrap": "size", "dropout": False} → --wrap size --no-dropout."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        elif value is not None:
            words += [flag(name), str(value)]
    return words
