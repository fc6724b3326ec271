# SPDX-License-Identifier: BSD-3-Clause
"""Declare a command's options once, with their bounds next to them and their conflicts in a table.

  @dataclass(frozen=True)
  class Config(Options):
      conflicts = (Conflict({"strategy": "ddp"}, {"clip": GIVEN}, "--clip {c.clip} needs a sharded strategy"),)

      strategy: Literal["single", "ddp", "fsdp2"] = option("fsdp2", "how the ranks share the model")
      prefetch: int = option(0, "gather this many blocks ahead", least=0, only=("fsdp2",))
      clip: float | None = option(None, "largest global norm of the gradient", above=0)

  config = parse(Config, __doc__)        from the command line; Config(prefetch=-1) raises the same error

A derived class adds options, redeclares some (``redeclared``), or takes only some of its base's
(``class Config(Base, takes=("strategy", "clip"))``). This file imports neither torch nor any third-party package.
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
LARGEST = {int: 10**9, float: 1e18}  # {type: largest value}: anything larger is a typo, and could overflow 64 bits


def option(default, help: str, *, least=None, above=None, at_most=None, form=None, only=(), needs=None, resumed=False):
    """Return the dataclass field of an option.

    Args:
        default: its default value.
        help: the text of ``--help``.
        least, above, at_most: bounds of a number.
        form: (regular expression, description) of a string.
        only: the strategies with which it may differ from its default.
        needs: name of another option that it requires.
        resumed: True if a resumed run must have the same value; "print" if a change is printed.
    """
    bounds = {"least": least, "above": above, "at_most": at_most, "form": form}
    company = {"only": only, "needs": needs}
    return dataclasses.field(default=default, metadata={"help": help, "resumed": resumed} | bounds | company)


def redeclared(base: type, name: str, **changes):
    """Return the field ``name`` of the options class ``base``, with the changes of a derived class.

    Args:
        base: an options class.
        name: one of its options.
        changes: arguments of ``option``. The derived class sets the annotation.
    """
    field = base.__dataclass_fields__[name]
    return option(**{"default": field.default} | field.metadata | changes)


class Conflict(typing.NamedTuple):
    """A row of a table of conflicts: values that cannot be combined.

    There is a conflict if all conditions of ``when`` and ``excludes`` hold; they are separate for readability only.

    Attributes:
        when, excludes: {option or property: its value, a tuple of values, a predicate, or GIVEN}.
        sentence: the error message; ``{c.mesh}`` is replaced by the option's value.
    """

    when: dict
    excludes: dict
    sentence: str

    def found_in(self, chosen) -> bool:
        """Return whether the options ``chosen`` have this conflict."""
        return all(_is(chosen, name, value) for name, value in (self.when | self.excludes).items())


def _is(chosen, name: str, wanted) -> bool:
    """Return whether a condition of a conflict holds; False for an option that the class does not have."""
    value, default = getattr(chosen, name, None), getattr(type(chosen), name, None)
    if wanted is GIVEN:
        return bool(value) if isinstance(default, (property, cached_property)) else value != default
    if callable(wanted):
        return wanted(value)
    return value in wanted if isinstance(wanted, tuple) else value == wanted


@dataclass(frozen=True)
class Options:
    """Base class of every command's options, which checks them against their declaration.

    Raises:
        UserError: a value is invalid, or the options conflict.
    """

    launched: ClassVar[bool] = False  # whether torchrun or srun may start this command on several ranks
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # of the class itself; those of its bases also apply

    def __init_subclass__(cls, takes: tuple[str, ...] | None = None, **others):
        """Restrict the options inherited from the base.

        takes: names of the base's own options that the class has. The others become constants with their defaults, so
        that shared code can read them.
        """
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
        """Restore the options of an earlier run from its record, without checks: they were checked when it started.

        Args:
            values: from the record. Missing options get their defaults, unknown ones are ignored.
        """
        options = object.__new__(cls)
        known = {field.name: values.get(field.name, field.default) for field in dataclasses.fields(cls)}
        options.__dict__.update(known)
        return options

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
    """Return whether a number is given and above 1: a condition for conflicts."""
    return value is not None and value > 1


@dataclass(frozen=True)
class Start(Options):
    """Options of every launched command."""

    conflicts = (
        Conflict(
            {"strategy": "single"},
            {"ranks": several},
            "--strategy single is one rank: leave --ranks out, or choose another strategy",
        ),
    )

    ranks: int | None = option(None, "ranks to start without torchrun or srun (default: one per GPU, or 2)", least=1)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device to compute on")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "communication backend; gloo with --device auto: the CPU")

    launched: ClassVar[bool] = True


@dataclass(frozen=True)
class Training(Start):
    """Options of every training lab: checkpoints, records, logs, and --dry-run."""

    takes_dataset: ClassVar[bool] = False  # whether --data is one of the course's data sets

    checkpoint: str | None = option(None, "folder for checkpoints, the last one at the end of training")
    resume: bool = option(
        False, "resume from the newest checkpoint in --checkpoint, if there is one", needs="checkpoint"
    )
    fallback: bool = option(False, "if that one is damaged, resume from the newest intact one", needs="resume")
    keep_last: int | None = option(
        None, "number of checkpoints to keep, the newest ones (default: all)", least=1, needs="checkpoint"
    )
    keep_every: int | None = option(
        None, "also keep every older checkpoint of a step divisible by N", least=1, needs="keep_last"
    )
    allow_narrowing: bool = option(
        False, "resume weights in a dtype with fewer bits than they were saved in", needs="resume"
    )
    async_checkpoint: bool = option(
        False, "write checkpoints while training goes on, from a copy in the CPU's memory", needs="checkpoint"
    )
    on_save_error: Literal["stop", "continue"] = option(
        "stop", "whether to continue training if a checkpoint cannot be written", needs="checkpoint"
    )
    record: str | None = option(None, "write the measurements to this JSON file")
    profile: str | None = option(None, "folder for a trace of a few steps, for Perfetto or TensorBoard")
    log: str | None = option(
        None,
        "folder for TensorBoard event files: loss, learning rate, speed, memory; for transformers, gradient norm and MFU",
    )
    dry_run: bool = option(False, "print the plan of this run and exit, without starting ranks")


def flag(name: str) -> str:
    """Return an option's name on the command line."""
    return "--" + name.replace("_", "-")


def _rules(field, *names) -> dict:
    return {name: field.metadata[name] for name in names}


def _check_value(name: str, value, least, above, at_most, form):
    if isinstance(value, str) and not value.strip():  # from an unset variable: nothing would be saved, silently
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
    """Check a choice that comes from a notebook or a test; argparse checks the command line's."""
    if choices and value not in choices:
        raise UserError(f"{name} is one of {', '.join(choices)}, not {value!r}")


def _kind(field):
    """Return the type of an option's values: int for ``int | None``."""
    several_types = typing.get_origin(field.type) in (types.UnionType, typing.Union)
    return typing.get_args(field.type)[0] if several_types else field.type


def choices_of(field) -> tuple:
    """Return the values that an option accepts; () if they are not enumerated."""
    return typing.get_args(_kind(field)) if typing.get_origin(_kind(field)) is Literal else ()


def exit_with_error(sentence: str, launched: bool = False):
    """Print an error message on stderr and exit with code 2.

    Args:
        sentence: the message, printed after the name of the command.
        launched: whether this process may be one of several ranks that all have the same error. Then only rank 0 prints
            it. (``ranks.exit_with_error`` is for errors of a single rank.) Other commands always print it: a RANK in
            their environment is a leftover.
    """
    rank = os.environ.get("RANK" if "WORLD_SIZE" in os.environ else "SLURM_PROCID", "0")
    if rank == "0" or not launched:
        print(f"{os.path.basename(sys.argv[0])}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    launched = False

    def error(self, message):
        """Exit with one sentence instead of the usage."""
        exit_with_error(f"{message} (see --help)", self.launched)


def _argument(field) -> dict:
    """Return the arguments of ``add_argument`` for a field: its type, choices, or action."""
    kind = _kind(field)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if choices_of(field):
        return {"choices": choices_of(field)}
    return {"type": kind, "metavar": kind.__name__.upper()}


def _own_first(options_class) -> list:
    """Return a class's fields in the order of --help: its own options as declared, then those of each base."""
    derived_first = (cls for cls in options_class.__mro__ if issubclass(cls, Options))
    names = dict.fromkeys(name for cls in derived_first for name in cls.__annotations__)  # each where it first occurs
    fields = {field.name: field for field in dataclasses.fields(options_class)}
    return [fields[name] for name in names if name in fields]


def parse(options_class, description: str, argv: list[str] | None = None):
    """Parse the command line into ``options_class``; on invalid input print one sentence and exit with code 2.

    Args:
        options_class: a subclass of ``Options``.
        description: the text above the options in --help.
        argv: the arguments (default: ``sys.argv[1:]``).
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.launched = options_class.launched
    for field in _own_first(options_class):
        default = "" if field.default is None else f" (default: {field.default})"
        text = field.metadata["help"].replace("%", "%%") + default
        parser.add_argument(flag(field.name), default=field.default, help=text, **_argument(field))
    values = vars(parser.parse_args(argv))
    for name in (
        name for name, value in values.items() if isinstance(value, list)
    ):  # argparse's result of "--ranks=--"
        parser.error(f"argument {flag(name)}: expected one value")
    try:
        return options_class(**values)
    except UserError as error:
        exit_with_error(str(error), options_class.launched)


def arguments(options: dict) -> list[str]:
    """Return options as command-line arguments: {"wrap": "size", "dropout": False} → --wrap size --no-dropout."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        elif value is not None:
            words += [flag(name), str(value)]
    return words
