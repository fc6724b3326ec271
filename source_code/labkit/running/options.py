"""Declare a command's options once: their limits stand beside them, their conflicts in a table.

  @dataclass(frozen=True)
  class Config(Options):
      conflicts = (Conflict({"strategy": "ddp"}, {"clip": GIVEN}, "--clip {c.clip} needs a sharded strategy"),)

      strategy: Literal["single", "ddp", "fsdp2"] = option("fsdp2", "how the ranks share the model")
      prefetch: int = option(0, "gather this many blocks ahead", least=0, only=("fsdp2",))
      clip: float | None = option(None, "largest global norm of the gradient", above=0)

  config = parse(Config, __doc__)        from the command line; Config(prefetch=-1) is refused in the same words

A class derives from another and adds options, redeclares some (``redeclared``), or takes only some of them
(``class Config(Base, takes=("strategy", "clip"))``). It imports no torch, and nothing that has to be installed.
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
from functools import cached_property
from typing import ClassVar, Literal

from labkit import UserError

SHARDED = ("fsdp1", "fsdp2")
GIVEN = object()  # in a conflict: the option differs from its default
LARGEST = {int: 10**9, float: 1e18}  # of any number: a larger one is a slip, whose products would fit no 64 bits


def option(default, help: str, *, least=None, above=None, at_most=None, form=None, only=(), needs=None, resumed=False):
    """A dataclass field with its default value and the sentence that ``--help`` shows.

    least, above, at_most: bounds of a number. form: (regular expression, in words) of a text. only: the strategies
    under which it may differ from its default. needs: the name of the option that must be given with it. resumed:
    True if a run that goes on from a checkpoint must have the same, "print" if a change is printed.
    """
    bounds = {"least": least, "above": above, "at_most": at_most, "form": form}
    company = {"only": only, "needs": needs}
    return dataclasses.field(default=default, metadata={"help": help, "resumed": resumed} | bounds | company)


def redeclared(base: type, name: str, **changes):
    """Return the field ``name`` of the options class ``base``, with what a derived class changes of it.

    Args:
        base: an options class.
        name: one of its options.
        changes: arguments of ``option``. The annotation of the new field is up to the derived class.
    """
    field = base.__dataclass_fields__[name]
    return option(**{"default": field.default} | field.metadata | changes)


class Conflict(typing.NamedTuple):
    """A row of a table of conflicts: choices that do not go together.

    when, excludes: {option or property: its value, a tuple of values, a function of it, or GIVEN}. There is a conflict
    if all of both hold; they are two for the reader. sentence: what the user is told; ``{c.mesh}`` is the value given.
    """

    when: dict
    excludes: dict
    sentence: str

    def found_in(self, chosen) -> bool:
        return all(_is(chosen, name, value) for name, value in (self.when | self.excludes).items())


def _is(chosen, name: str, wanted) -> bool:
    """Return whether a condition of a conflict holds. An option that the class does not have fulfills none."""
    value, default = getattr(chosen, name, None), getattr(type(chosen), name, None)
    if wanted is GIVEN:
        return bool(value) if isinstance(default, (property, cached_property)) else value != default
    if callable(wanted):
        return wanted(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


@dataclass(frozen=True)
class Options:
    """The base of every command's options: checks each by what is declared. UserError."""

    launched: ClassVar[bool] = False  # whether torchrun or srun may start this command as many ranks
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # those of the class itself; its bases' hold too

    def __init_subclass__(cls, takes: tuple[str, ...] | None = None, **others):
        """takes: which options the class has of those that its base declares itself. The others are constants, at
        their defaults, so that code shared with the base may read them."""
        super().__init_subclass__(**others)
        if takes is not None:
            left_out = [name for name in declared(cls.__base__) if name not in (*takes, *cls.__annotations__)]
            cls.__annotations__ |= dict.fromkeys(left_out, ClassVar)  # for dataclass: no field

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check_value(flag(field.name), value, **_rules(field, "least", "above", "at_most", "form"))
                _check_choice(flag(field.name), value, choices_of(field))
            if value != field.default:
                self._check_company(field, value, **_rules(field, "only", "needs"))
        for conflict in all_conflicts(type(self)):
            if conflict.found_in(self):
                raise UserError(conflict.sentence.format(c=self))

    @classmethod
    def restored(cls, values: dict):
        """Return the options of a run that has been, from its record.

        Args:
            values: as the record has them. What it does not have is at its default; what the class does not have is
                left out. Nothing is checked: the run has been accepted when it started.
        """
        found = object.__new__(cls)
        known = {field.name: values.get(field.name, field.default) for field in dataclasses.fields(cls)}
        found.__dict__.update(known)
        return found

    def _check_company(self, field, value, only, needs):
        if only and self.strategy not in only:
            shown = f"{flag(field.name)} {value}" if choices_of(field) else flag(field.name)
            raise UserError(f"{shown} goes with --strategy {' or '.join(only)}; with {self.strategy} leave it out")
        if needs and not getattr(self, needs):
            raise UserError(f"{flag(field.name)} needs {flag(needs)}: give both, or neither")


def all_conflicts(options_class: type) -> list[Conflict]:
    """Return the rows of a class's table of conflicts, its bases' first."""
    return [row for cls in reversed(options_class.__mro__) for row in vars(cls).get("conflicts", ())]


def declared(options_class: type) -> list[str]:
    """Return the names of the options that a class declares itself, without those of its bases."""
    own = options_class.__annotations__
    return [field.name for field in dataclasses.fields(options_class) if field.name in own]


def several(value) -> bool:
    return value is not None and value > 1


@dataclass(frozen=True)
class Start(Options):
    """How a lab is started."""

    conflicts = (
        Conflict(
            {"strategy": "single"},
            {"ranks": several},
            "--strategy single is one rank: leave --ranks out, or choose another strategy",
        ),
    )

    ranks: int | None = option(
        None, "ranks to start, where neither torchrun nor srun does (default: one per GPU, or 2)", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "how to communicate; gloo alone means on the CPU")

    launched: ClassVar[bool] = True


@dataclass(frozen=True)
class Training(Start):
    """What every lab that trains has besides: what to keep of a run, or only its plan."""

    takes_dataset: ClassVar[bool] = False  # whether --data is one of the course's data sets

    checkpoint: str | None = option(None, "folder for checkpoints, the last one at the end of training")
    resume: bool = option(
        False, "go on from the newest checkpoint in --checkpoint, if there is one", needs="checkpoint"
    )
    fallback: bool = option(False, "if that one is damaged, go on from the newest whole one", needs="resume")
    keep_last: int | None = option(
        None, "how many checkpoints to keep, the newest (default: all)", least=1, needs="checkpoint"
    )
    keep_every: int | None = option(
        None, "of the older checkpoints, also keep one every N steps, for good", least=1, needs="keep_last"
    )
    allow_narrowing: bool = option(
        False, "resume weights in a number format with fewer bits than they were saved in", needs="resume"
    )
    async_checkpoint: bool = option(
        False, "write checkpoints while training goes on, from a copy in the CPU's memory", needs="checkpoint"
    )
    on_save_error: Literal["stop", "continue"] = option(
        "stop", "whether to train on if a checkpoint cannot be written", needs="checkpoint"
    )
    record: str | None = option(None, "write what was measured to this JSON file")
    profile: str | None = option(None, "folder for a trace of a few steps, for Perfetto or TensorBoard")
    log: str | None = option(
        None,
        "folder for TensorBoard event files: loss, learning rate, speed, memory; of transformers, gradient norm and MFU",
    )
    dry_run: bool = option(False, "print the plan of this run and exit: no rank is started")


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


def _check_choice(name: str, value, choices: tuple):
    """argparse checks this of a command line; here it is checked of what a notebook or a test gives."""
    if choices and value not in choices:
        raise UserError(f"{name} is one of {', '.join(choices)}, not {value!r}")


def _kind(field):
    """The type of an option's values: of ``int | None``, an int that may be left out, int."""
    several_types = typing.get_origin(field.type) in (types.UnionType, typing.Union)
    return typing.get_args(field.type)[0] if several_types else field.type


def choices_of(field) -> tuple:
    """The words that an option accepts; () if it is not of a few words."""
    return typing.get_args(_kind(field)) if typing.get_origin(_kind(field)) is Literal else ()


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
    kind = _kind(field)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if choices_of(field):
        return {"choices": choices_of(field)}
    return {"type": kind, "metavar": kind.__name__.upper()}


def _own_first(options_class) -> list:
    """Return a class's fields as --help lists them: its own options as they are declared, then those of each base."""
    derived_first = (cls for cls in options_class.__mro__ if issubclass(cls, Options))
    names = dict.fromkeys(name for cls in derived_first for name in cls.__annotations__)  # each at its first place
    fields = {field.name: field for field in dataclasses.fields(options_class)}
    return [fields[name] for name in names if name in fields]


def parse(options_class, description: str, argv: list[str] | None = None):
    """Read ``options_class`` from the command line. On bad input: one sentence and exit code 2."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.launched = options_class.launched
    for field in _own_first(options_class):
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
