# SPDX-License-Identifier: BSD-3-Clause
"""Read the files people have for training: plain text, or JSON lines with text, prompt and completion, or messages.

The content determines the format, not the file's name: a file whose first line is a JSON object is JSON lines, and gzip is
recognized. A file that is neither text nor JSON lines is refused, because training on its bytes would fail silently.
"""

import codecs
import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from labkit import UserError

PLAIN, TEXT, COMPLETION, CHAT = "plain text", "JSON lines of text", "prompts with completions", "conversations"
KEYS = {CHAT: ("messages",), COMPLETION: ("prompt", "completion"), TEXT: ("text",)}  # of a row, by its kind
LF = b"\n"
GZIP = b"\x1f\x8b"
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # JSON can escape half of an emoji, which UTF-8 cannot encode
HEAD = 4096  # bytes that determine the format
BLOCK = 2**18  # bytes that are read at a time
CONVERT = "convert it with iconv -f {} -t utf-8"
# {first bytes of a file: what it is and what to do}
REFUSED = {
    b"PAR1": "is parquet: write it as JSON lines (pandas: read_parquet(…).to_json(…, orient='records', lines=True))",
    b"ARROW1": "is an Arrow file: write it as JSON lines (datasets: load_dataset(…).to_json(…))",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"BZh": "is packed with bzip2: unpack it, or pack it with gzip",
    b"\xfd7zXZ": "is packed with xz: unpack it, or pack it with gzip",
    b"\x28\xb5\x2f\xfd": "is packed with zstd: unpack it, or pack it with gzip",
    GZIP: "is packed with gzip twice: unpack it once",
    b"\xff\xfe": f"is UTF-16: {CONVERT.format('utf-16')}",
    b"\xfe\xff": f"is UTF-16: {CONVERT.format('utf-16')}",
    b"version https://git-lfs": "is a git-lfs pointer, and not the file itself: fetch it with git lfs pull",
}


class Row(NamedTuple):
    """An object of a file of JSON lines.

    Attributes:
        where: it is, for messages.
        values: the object.
        size: number of characters.
    """

    where: str
    values: dict
    size: int = 0


@dataclass(frozen=True)
class DataFile:
    """A file, or content that is in memory."""

    name: str
    path: Path | None = None
    content: bytes = b""

    @property
    def size(self) -> int:
        """Number of bytes, packed or not."""
        return self.path.stat().st_size if self.path else len(self.content)

    def open(self):
        """Open it for reading bytes, unpacked if it is gzip."""
        if not self.path:
            return io.BytesIO(self.content)
        file = self.path.open("rb")
        packed = file.peek(2).startswith(GZIP)
        return gzip.GzipFile(fileobj=file) if packed else file

    def read(self, reader: Callable) -> Iterator:
        """Yield what ``reader(opened file)`` yields.

        Raises:
            UserError: the file cannot be read, or its gzip is damaged.
        """
        try:
            with self.open() as file:
                yield from reader(file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{self.name} is not a whole .gz file ({error}): fetch it again") from None
        except OSError as error:
            raise UserError(f"{self.name} cannot be read ({error.strerror})") from None


def named(names: str, option: str) -> list[DataFile]:
    """Return the files that an option names.

    Args:
        names: the option's value: one file, or several separated by commas.
        option: its name, for messages.

    Raises:
        UserError: one of them cannot be read, or is not a file.
    """
    paths = [names] if Path(names).exists() else names.split(",")
    if len(set(paths)) < len(paths):
        raise UserError(f"{option} {names} names a file twice: name each once")
    return [_named(path.strip(), option) for path in paths]


def _named(name: str, option: str) -> DataFile:
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{option} {name} is a folder: name its files, separated by commas")
        if not stat.S_ISREG(mode):
            raise UserError(f"{option} {name} is no regular file, and it is read more than once: write it to a file")
        path.open("rb").close()
    except OSError as error:
        raise UserError(
            f"{option} {name} cannot be read ({error.strerror}): name a file of text or JSON lines"
        ) from None
    return DataFile(name, path.absolute())


def kind_of(file: DataFile) -> str:
    """Return what a file has: ``PLAIN``, ``TEXT``, ``COMPLETION``, or ``CHAT``.

    Raises:
        UserError: it is none of these.
    """
    (head,) = file.read(lambda opened: [opened.read(HEAD)])
    for signature, why in REFUSED.items():
        if head.startswith(signature):
            raise UserError(f"{file.name} {why}")
    if head[1::2].count(0) > len(head) // 4 or head[::2].count(0) > len(head) // 4:
        raise UserError(f"{file.name} is UTF-16 without a byte-order mark, or binary: {CONVERT.format('utf-16le')}")
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text:
        raise UserError(f"{file.name} is empty: name a file of text or JSON lines")
    json_by_name = any(suffix in (".json", ".jsonl", ".ndjson") for suffix in Path(file.name).suffixes)
    if text[:1] == b"[" and (json_by_name or text[1:].lstrip()[:1] == b"{"):
        raise UserError(f"{file.name} is a JSON array: write one object per line (jq -c '.[]' FILE > FILE.jsonl)")
    first = next(((where, line) for where, line in _lines(file) if line.strip()), None)
    try:
        values = json.loads(first[1])
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        return kind_of_row(Row(first[0], values))
    if json_by_name:
        raise UserError(f"{first[0]} is not a JSON object: write one object per line (jq -c . FILE > FILE.jsonl)")
    return PLAIN


def kind_of_row(row: Row) -> str:
    """Return the kind of an object: the one all of whose keys it has.

    Raises:
        UserError: it has the keys of no kind, or of several.
    """
    kinds = [kind for kind, keys in KEYS.items() if all(row.values.get(key) is not None for key in keys)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        keys = " and ".join("/".join(KEYS[kind]) for kind in kinds)
        raise UserError(f"{row.where} has {keys}, and only one of them can be trained on: remove the others")
    known = {key for keys in KEYS.values() for key in keys}
    if empty := [key for key in row.values if key in known and row.values[key] is None]:
        raise UserError(f"{row.where} has no value for {empty[0]}, but null: remove the line")
    raise UserError(
        f"{row.where} has the keys {', '.join(sorted(row.values)[:5]) or 'of no value'}, "
        "and needs text, prompt and completion, or messages"
    )


def rows(file: DataFile, kind: str, progress: Callable) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, checked.

    Args:
        file: the file.
        kind: the kind that every object must have.
        progress: called with the opened file from time to time.

    Raises:
        UserError: an object is not JSON, of another kind, or has no answer.
    """
    for where, line in _lines(file, progress):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f"{where} is not a JSON object: write one object per line")
        if "\\ud" in line.lower() and HALF_A_PAIR.search(json.dumps(values, ensure_ascii=False)):
            raise UserError(
                f"{where} has half of a surrogate pair, such as \\ud83d alone: remove it, as it is no character"
            )
        row = Row(where, values, len(line))
        if (found := kind_of_row(row)) != kind:
            raise UserError(f"{where} has {' and '.join(KEYS[found])}, and the lines before have "
                            f"{' and '.join(KEYS[kind])}: train on one kind at a time")  # fmt: skip
        (_check_messages if kind == CHAT else _check_strings)(row, KEYS[kind])
        yield row


def _check_strings(row: Row, keys: tuple[str, ...]):
    for key in keys:
        if not isinstance(row.values[key], str):
            raise UserError(f"{row.where}: {key} must be a string; for a conversation, write messages")
    if keys == KEYS[COMPLETION] and not row.values["completion"]:
        raise UserError(f"{row.where}: the completion is empty, so there is nothing to learn: remove the line")


def _check_messages(row: Row, keys: tuple[str, ...]):
    messages, tools = row.values["messages"], row.values.get("tools")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UserError(f"{row.where}: messages must be a list of objects with role and content")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise UserError(f"{row.where}: a message has no role, such as user or assistant")
        if not message.get("content") and not message.get("tool_calls"):
            if message["role"] == "assistant":
                raise UserError(f"{row.where}: an answer of the assistant is empty: remove the line")
            if not isinstance(message.get("content"), str):
                raise UserError(f"{row.where}: a message of the role {message['role']} has no content")
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{row.where} has no message of the role assistant, so there is nothing to learn")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{row.where}: tools must be a list of JSON schemas")


def _lines(file: DataFile, progress: Callable = lambda opened: None) -> Iterator[tuple[str, str]]:
    """Yield (where it is, text) of each line."""

    def lines(opened):
        for number, line in enumerate(opened, 1):
            if number % 100 == 0:
                progress(opened)
            where = f"{file.name}, line {number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield where, _utf8(line, True, lambda _, where=where: where)[0]

    yield from file.read(lines)


def blocks(file: DataFile, progress: Callable) -> Iterator[str]:
    """Yield a plain text in blocks of ``BLOCK`` bytes that end anywhere between two characters.

    Args:
        file: the file.
        progress: called with the opened file from time to time.

    Raises:
        UserError: it is not UTF-8.
    """

    def decoded(opened):
        line, rest = 1, opened.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        block = None
        while block != b"":
            block = opened.read(BLOCK)
            progress(opened)
            raw = rest + block
            text, used = _utf8(
                raw, not block, lambda at, line=line, raw=raw: f"{file.name}, line {line + raw.count(LF, 0, at)}"
            )
            line, rest = line + text.count("\n"), raw[used:]
            yield text

    yield from file.read(decoded)


def _utf8(raw: bytes, is_end: bool, where: Callable[[int], str]) -> tuple[str, int]:
    """Decode bytes, and return (text, number of bytes used): at the end of a block, a character may be incomplete.

    Args:
        raw: the bytes.
        is_end: whether no more bytes follow.
        where: maps the index of a byte to its place in the file, for messages.

    Raises:
        UserError: they are not text in UTF-8.
    """
    if (at := raw.find(0)) >= 0:
        raise UserError(f"{where(at)} has a zero byte, so the file is binary: name a file of text or JSON lines")
    try:
        return codecs.utf_8_decode(raw, "strict", is_end)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where(error.start)} is not UTF-8 (byte {raw[error.start]:#x}): if the file is Latin-1, "
            f"{CONVERT.format('latin1')}"
        ) from None
