"""Make a command line from a frozen dataclass, so that a run's configuration is written down once."""

import argparse
import dataclasses
import types
import typing

from labkit import UserError


def option(default, help: str):
    """A dataclass field with its default value and the sentence that ``--help`` shows."""
    return dataclasses.field(default=default, metadata={"help": help})


def _leave(message: str):
    from labkit import ranks  # here, because it imports torch, and the planner does without

    ranks.leave(message)


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence, from one rank, instead of a page of usage from each."""
        _leave(f"{message} (see --help)")


def _argument(field) -> dict:
    """What argparse must be told of one field: its type, choices or switch."""
    kind = field.type
    if isinstance(kind, types.UnionType):  # ``int | None``: an int that may be left out
        kind = typing.get_args(kind)[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": typing.get_args(kind)}
    return {"type": kind, "metavar": kind.__name__.upper()}


def parse(config_class, description: str, argv: list[str] | None = None):
    """Read ``config_class`` from the command line. On bad input: one sentence and exit code 2."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for field in dataclasses.fields(config_class):
        shown = "" if field.default is None else f" (default: {field.default})"
        name = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].replace("%", "%%") + shown
        parser.add_argument(name, default=field.default, help=text, **_argument(field))
    try:
        return config_class(**vars(parser.parse_args(argv)))
    except UserError as error:
        _leave(str(error))


def arguments(options: dict) -> list[str]:
    """The command line that gives ``options``: {"wrap": "size", "dropout": False} → --wrap size --no-dropout."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
