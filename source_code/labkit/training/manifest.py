"""A checkpoint's manifest: which files it has, their lengths and checksums, and what they are of. Imports no torch.

It is written last and read first: a folder without one was never finished, and what differs from it is damaged. The
checksums are against accidents: a truncated copy, a flipped bit, files of two checkpoints mixed up. In a terminal
``sha256sum`` gives the same.

Storage that does not answer is not damage: see ``patiently``.
"""

import errno
import hashlib
import json
import os
import time
from pathlib import Path

from labkit import UserError

NAME = "manifest.json"
FORMAT = 1  # of the checkpoint as a whole; a higher one was written by a later version of this course
# A file that is missing or of another kind was lost or replaced. Any other error says nothing about what is stored.
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
WAITS = (0.5, 2.0, 8.0)  # seconds before each further attempt to read


class Damaged(UserError):
    """A checkpoint is not what was written, or was not written to its end."""

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)  # as it came: one rank sends it to the others, where it is made again
        self.path, self.reason = path, reason

    def __str__(self):
        return (
            f"the checkpoint {self.path} is damaged ({self.reason}): give --fallback to go on from the newest whole "
            "one, or remove it"
        )


class Unreadable(UserError):
    """A checkpoint cannot be read now; it may be whole."""

    exit_code = 75  # EX_TEMPFAIL: the same command may work later

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self):
        return (
            f"the checkpoint {self.path} cannot be read now ({self.reason}): try again when its storage answers, or give "
            "--fallback to go on from an older one"
        )


def patiently(read, path: Path):
    """Return ``read()``, called again after a while where the storage of a checkpoint fails to answer.

    Raises:
        OSError: a file is not there (``LOST``).
        Unreadable: it still fails after the last of ``WAITS``.
    """
    for wait in (*WAITS, None):
        try:
            return read()
        except OSError as error:
            if error.errno in LOST:
                raise
            if wait is None:
                raise Unreadable(path, error.strerror or str(error)) from None
            time.sleep(wait)


def digest(path: Path) -> dict:
    """{"bytes", "sha256"} of a file."""
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def write(folder: Path, files: dict[str, dict], **about):
    """Write the manifest of a checkpoint whose files are all there, and see to it that it is on the disk.

    files: {name within the folder: its ``digest``}. about: what else is to be known of it, as JSON has it.
    """
    content = {"format": FORMAT, "files": files} | about
    with open(folder / NAME, "w") as file:
        json.dump(content | {"sha256": _checksum(content)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict:
    """Return what ``write`` wrote.

    Raises:
        Damaged: there is none, or it is not what was written.
        Unreadable: the storage does not answer.
        UserError: a later version of the course wrote it.
    """
    try:
        found = json.loads(patiently((folder / NAME).read_bytes, folder))
        intact = found.pop("sha256") == _checksum(found)
        version = found["format"]
    except FileNotFoundError:
        raise Damaged(folder, f"it has no {NAME}, which is written last") from None
    except OSError as error:
        raise Damaged(folder, f"{NAME}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(folder, f"{NAME} is not what this course writes") from None
    if not intact:
        raise Damaged(folder, f"{NAME} is not what was written: its checksum differs")
    if version != FORMAT:
        raise UserError(
            f"the checkpoint {folder} has format {version}, and this version knows {FORMAT}: update the course"
        )
    if not _has_its_parts(found):
        raise Damaged(folder, f"{NAME} is not what this course writes")
    return found


def _has_its_parts(found: dict) -> bool:
    """Whether a manifest says what the course reads in it. One made elsewhere may have a right checksum over nonsense."""
    files, maps = found.get("files"), ("files", "run", "shapes")
    return all(isinstance(found.get(part), dict) for part in maps) and all(
        name.isprintable() and isinstance(each, dict) and isinstance(each.get("bytes"), int)
        for name, each in files.items()
    )


def _checksum(content: dict) -> str:
    """Of the manifest itself, without this: of its content, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def difference(folder: Path, files: dict[str, dict], lengths_only: bool = False) -> str | None:
    """Say in what a folder's files first differ from their digests.

    Args:
        folder: the checkpoint.
        files: {name within the folder: its ``digest``}.
        lengths_only: compare how long they are and do not read them.

    Returns:
        A few words, or None if they do not differ.

    Raises:
        Unreadable: the storage does not answer.
    """
    for name, expected in files.items():
        path = folder / name
        try:
            # The length first: it costs nothing, and says more.
            if (size := patiently(path.stat, folder).st_size) != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if not lengths_only and patiently(lambda path=path: digest(path), folder) != expected:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None
