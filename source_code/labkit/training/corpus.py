# SPDX-License-Identifier: BSD-3-Clause
"""Tokenize data once, and map the tokens into the memory of all ranks: the ranks of a node share one copy.

The tokens of a run's files are kept in a folder, the cache, under a name that depends on everything they depend on. It is
``tokens`` in the data folder (FSDP_LABS_DATA, see datasets.py), or ``~/.cache/fsdp-labs`` if that is not writable. An entry
is written under a temporary name and then renamed, so an entry that exists is whole. Only its owner can read it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch.distributed as dist

from labkit import UserError
from labkit.training import data_files, datasets, text
from labkit.training.checkpoint_folder import wait_until_visible
from labkit.training.data_files import CHAT, COMPLETION, PLAIN, TEXT, DataFile
from labkit.training.encoding import Bytes, Document, ModelTokens

VERSION = 2  # of the entries; a new one makes all earlier ones unused
FACTS = "facts.json"  # of an entry: its kind, and the types and sizes of its files
PARTIAL = ".writing-"  # prefix of an entry that is being written
LEFTOVER_SECONDS = 24 * 3600  # after which one that nobody writes to is removed
# Files of a model's folder that its tokenizer may depend on
TOKENIZER_FILES = ("config.json", "*token*", "*.jinja", "*/*.jinja", "vocab*", "merges*", "*.model")
ROWS, CHARACTERS = 1024, 2**21  # at most in a batch that is encoded together
PATIENCE = timedelta(days=2)  # how long ranks wait for the one that tokenizes
SHOWN_FROM = 50 * 2**20  # bytes of the files from which progress is printed


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of documents, one after another, in files that are mapped into memory and read when they are used.

    Attributes:
        name: of the files, for output.
        kind: ``data_files.PLAIN``, ``TEXT``, ``COMPLETION`` or ``CHAT``.
        digest: a hash of the content.
        ends: where each document ends, int64, (documents,).
        rows: number of the row that each document is from, int64, (documents,); a conversation may be several documents.
        tokens: unsigned integers, (tokens,).
        answers: for each token, whether it is part of an answer, bool, (tokens,); None: the loss is on all tokens.
    """

    name: str
    kind: str
    digest: str
    ends: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    answers: np.ndarray | None

    @property
    def documents(self) -> np.ndarray:
        """(begin, end) of each document, int64, (documents, 2)."""
        return np.stack([np.concatenate([[0], self.ends[:-1]]), self.ends], axis=1)

    @property
    def identity(self) -> str:
        """Name and content, for a checkpoint: a run must not be resumed with other data."""
        return f"{self.name} ({self.digest})"

    def __str__(self) -> str:
        answers = "" if self.answers is None else f", {np.count_nonzero(self.answers):,} of them in answers"
        return f"{self.name}: {self.kind}, {len(self.ends):,} documents, {len(self.tokens):,} tokens{answers}"


def load(names: str | None, model: str | None, vocab_size: int, me, option: str = "--data") -> Corpus:
    """Return the tokens of files; the first run with these files and this tokenizer encodes them. Collective.

    Rank 0 encodes, then the first rank of each node that does not see its result; the others wait.

    Args:
        names: the option's value: files, separated by commas; None: the course's own text.
        model: the folder with the tokenizer; None: tokens are bytes.
        vocab_size: of the model; a larger token is an error.
        me: this rank.
        option: its name, for messages.

    Raises:
        UserError: the files cannot be trained on, or the tokens can be written nowhere.
    """
    # A group of its own: encoding may take longer than a collective of the default group may wait.
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if me.world_size > 1 and dist.is_initialized() else None
    entry = _Entry(names, model, vocab_size, option, me)
    written, *_ = _everywhere(lambda: me.rank == 0 and entry.write_if_missing(), group, me)
    _everywhere(lambda: me.local_rank == 0 and entry.write_if_missing(elsewhere=written), group, me)
    digests = _everywhere(lambda: entry.corpus().digest, group, me)
    if group:
        dist.destroy_process_group(group)
    if len(set(digests)) > 1:
        raise UserError(f"{option} {names} has other content on some of the nodes: name files that all nodes share")
    corpus = entry.corpus()
    me.say(corpus)
    return corpus


def _everywhere(function: Callable, group, me) -> list:
    """Call a function on all ranks, and return all results; an exception on one rank is raised on all. Collective."""
    try:
        result = function()
    except UserError as error:
        result = UserError(f"on {socket.gethostname()}: {error}") if me.rank else error
    except Exception as error:  # of any type, or the others would wait for this rank
        result = error
    results = [result]
    if group:
        results = [None] * me.world_size
        dist.all_gather_object(results, result, group=group)
    for error in results:
        if isinstance(error, Exception):
            raise error
    return results


class _Entry:
    """An entry of the cache. Arguments: see ``load``."""

    def __init__(self, names: str | None, model: str | None, vocab_size: int, option: str, me):
        self.names, self.model, self.vocab_size, self.option, self.me = names, model, vocab_size, option, me

    @cached_property
    def files(self) -> list[DataFile]:
        """The files to encode."""
        if self.names:
            return data_files.named(self.names, self.option)
        name, content = text.read()
        return [DataFile(name, content=content)]

    @cached_property
    def key(self) -> str:
        """The name of the entry."""
        return self._key()

    def _key(self) -> str:
        tokenizer = None
        if self.model:
            parts = {path for pattern in TOKENIZER_FILES for path in Path(self.model).glob(pattern) if path.is_file()}
            tokenizer = [(str(path.relative_to(self.model)), _hash(path.read_bytes())) for path in sorted(parts)]
            tokenizer += [version(package) for package in ("transformers", "tokenizers")]
        files = [
            (str(file.path), file.size, file.path.stat().st_mtime_ns) if file.path else _hash(file.content)
            for file in self.files
        ]
        return _hash(json.dumps([VERSION, files, tokenizer, self.vocab_size]).encode())

    def find(self) -> Path | None:
        """Return the folder of this entry; None if there is none that is whole and readable."""
        return next((folder / self.key for folder in _folders() if _is_whole(folder / self.key)), None)

    def corpus(self) -> Corpus:
        """Map the entry into memory.

        Raises:
            UserError: this process does not see it.
        """
        if not (folder := self.find()):
            raise UserError(f"the tokens that another rank has written are not seen here: {_remedy()}")
        facts = json.loads((folder / FACTS).read_text())
        arrays = {
            name: np.memmap(folder / name, dtype, "r").view(np.ndarray) for name, dtype in facts["arrays"].items()
        }
        first, *others = (Path(file.name).name for file in self.files)
        name = first + (f" and {len(others)} more" if others else "")
        ends_rows_tokens = (arrays[each] for each in ("ends", "rows", "tokens"))
        return Corpus(name, facts["kind"], facts["digest"], *ends_rows_tokens, arrays.get("answers"))

    def write_if_missing(self, elsewhere: Path | None = None) -> Path:
        """Encode the files and write the entry, unless there is one, and return its folder.

        Args:
            elsewhere: the folder that another node has written, which may be shared.

        Raises:
            UserError: the files cannot be trained on, or the entry can be written nowhere.
        """
        if folder := self.find() or (elsewhere and wait_until_visible(elsewhere / FACTS) and self.find()):
            return folder
        kinds = {file.name: data_files.kind_of(file) for file in self.files}
        kind = _common_kind(kinds)
        encoder = ModelTokens(self.model) if self.model else Bytes()
        problems = []
        for folder in _folders():
            partial = None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _clear_leftovers(folder)
                if (folder / self.key).exists():  # damaged, or another user's
                    shutil.rmtree(folder / self.key)
                partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
                self._write(partial, encoder, kinds, kind)
                return _named(partial, folder / self.key)
            except OSError as error:
                problems.append(f"{folder}: {error.strerror or error}")
            finally:
                if partial:
                    shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"the tokens can be written nowhere ({'; '.join(problems)}): {_remedy()}")

    def _write(self, folder: Path, encoder, kinds: dict[str, str], kind: str):
        begin, size = time.monotonic(), sum(file.size for file in self.files)
        self.me.say(f"encoding {size / 2**20:,.1f} MiB of {self.option} {self.names or 'text'}, the first time only")
        has_answers = kind in (COMPLETION, CHAT)
        dtype = "uint8" if not self.model else "uint16" if self.vocab_size <= 2**16 else "uint32"
        with _Writer(folder, dtype, has_answers, self.vocab_size) as writer:
            before = 0
            for file in self.files:
                progress = _Progress(self.me, size, before)
                for document in _documents(file, kinds[file.name], encoder, progress):
                    writer.add(document)
                before += file.size
            if not writer.count:
                raise UserError(f"{self.files[0].name} has no text: name another file")
            writer.finish(kind)
        if self._key() != self.key:
            raise UserError(f"{self.option} {self.names} has changed while it was read: start again")
        seconds = time.monotonic() - begin
        self.me.say(f"encoded {writer.count:,} tokens in {seconds:.1f} s, kept in {folder.parent / self.key}")


def _documents(file: DataFile, kind: str, encoder, progress) -> Iterator[Document]:
    """Yield the documents of a file; a plain text is one, which is yielded in parts."""
    if kind == PLAIN:
        for tokens in encoder.parts(data_files.blocks(file, progress)):
            yield Document(file.name, tokens, None, is_whole=False)
        yield Document(file.name, np.array([], dtype=np.uint8), None)
        return
    encode = {TEXT: encoder.text, COMPLETION: encoder.completion, CHAT: encoder.chat}[kind]
    for batch in _batches(data_files.rows(file, kind, progress)):
        yield from encode(batch)


def _batches(rows: Iterable[data_files.Row]) -> Iterator[list]:
    """Yield rows in lists that are encoded together."""
    batch, characters = [], 0
    for row in rows:
        batch.append(row)
        characters += row.size
        if len(batch) == ROWS or characters > CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _common_kind(kinds: dict[str, str]) -> str:
    """Return the kind of a corpus of these files, {name: kind}."""
    found = set(kinds.values())
    if len(found) == 1:
        return found.pop()
    if found == {PLAIN, TEXT}:
        return TEXT
    shown = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
    raise UserError(f"the files are of several kinds ({shown}): train on one kind at a time")


class _Writer:
    """Write the arrays of an entry.

    Args:
        folder: exists.
        dtype: of the tokens.
        has_answers: whether to write which tokens are part of answers.
        vocab_size: of the model.
    """

    def __init__(self, folder: Path, dtype: str, has_answers: bool, vocab_size: int):
        self.folder, self.vocab_size, self.count = folder, vocab_size, 0
        self.row, self.where = -1, None  # of the last document
        self.dtypes = {"tokens": dtype, "ends": "int64", "rows": "int64"} | ({"answers": "bool"} if has_answers else {})
        self.digest = hashlib.blake2b(digest_size=8)

    def __enter__(self):
        self.files = {name: (self.folder / name).open("wb") for name in self.dtypes}
        return self

    def __exit__(self, *_):
        for file in self.files.values():
            file.close()

    def add(self, document: Document):
        """Append a document's tokens, and its end if they are the last."""
        tokens = document.tokens
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise UserError(
                f"{document.where} has a token {largest}, and the model's vocabulary ends at {self.vocab_size - 1}: take "
                "the tokenizer that belongs to it"
            )
        self.count += len(tokens)
        self._append("tokens", tokens)
        if "answers" in self.files:
            self._append("answers", document.answers)
        if document.is_whole:
            self.row += document.where != self.where
            self.where = document.where
            self._append("ends", np.array([self.count]))
            self._append("rows", np.array([self.row]))

    def _append(self, name: str, values: np.ndarray):
        raw = values.astype(self.dtypes[name]).tobytes()
        self.files[name].write(raw)
        self.digest.update(raw)

    def finish(self, kind: str):
        """Flush all files to the disk, and write what ``_is_whole`` and ``_Entry.corpus`` read."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        facts = {"kind": kind, "digest": self.digest.hexdigest(), "arrays": self.dtypes, "sizes": sizes}
        (self.folder / FACTS).write_text(json.dumps(facts))


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is an entry whose files have their sizes, and can be read here."""
    try:
        sizes = json.loads((folder / FACTS).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _named(partial: Path, final: Path) -> Path:
    """Give a written entry its name, and return it; an entry that another process has written meanwhile is as good."""
    try:
        return partial.rename(final)
    except OSError:
        if not _is_whole(final):
            raise
        return final


def _clear_leftovers(folder: Path):
    """Remove what writers that have ended early left behind."""
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            if time.time() - newest > LEFTOVER_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _folders() -> list[Path]:
    """Return the folders in which the cache may be."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return [datasets.root() / "tokens", Path(home) / "fsdp-labs"]


def _remedy() -> str:
    return "set FSDP_LABS_DATA to a folder of yours with enough room, one that all nodes share"


class _Progress:
    """Print how much of the files has been read, every tenth of it. size, before: bytes of all files, of those before."""

    def __init__(self, me, size: int, before: int):
        self.me, self.size, self.before = me, size, before
        self.tenth = 10 * before // size

    def __call__(self, opened):
        position = self.before + getattr(opened, "fileobj", opened).tell()
        if self.size >= SHOWN_FROM and 10 * position // self.size > self.tenth:
            self.tenth = 10 * position // self.size
            self.me.say(f"encoding: {10 * self.tenth} %")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
