# SPDX-License-Identifier: BSD-3-Clause
"""Write and verify a checkpoint's manifest: its files, their lengths and checksums, and metadata. Imports no torch.

The manifest is written last and read first: a checkpoint without one is incomplete, and one that differs from it is
damaged. The checksums detect accidents: a truncated copy, a flipped bit, mixed files of two checkpoints. ``sha256sum``
computes the same.

Storage that does not respond is not damage: see ``with_retries``.
"""

import errno
import hashlib
import json
import os
import time
from pathlib import Path

from labkit import UserError

NAME = "manifest.json"
FORMAT = 1  # of the whole checkpoint; a higher one was written by a later version of this course
# Errors that mean that a file is missing or was replaced. With any other error the file may be intact.
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
WAITS = (0.5, 2.0, 8.0)  # seconds before each further attempt to read


class Damaged(UserError):
    """A checkpoint differs from its manifest, or is incomplete."""

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)  # the arguments of __init__, so that it can be pickled for other ranks
        self.path, self.reason = path, reason

    def __str__(self):
        return (
            f"the checkpoint {self.path} is damaged ({self.reason}): give --fallback to resume from the newest whole "
            "one, or remove it"
        )


class Unreadable(UserError):
    """A checkpoint cannot be read now; it may be intact."""

    exit_code = 75  # EX_TEMPFAIL: the same command may work later

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self):
        return (
            f"the checkpoint {self.path} cannot be read now ({self.reason}): try again when its storage responds, or give "
            "--fallback to resume from an older one"
        )


def with_retries(read, path: Path):
    """Return ``read()``, and retry it while the storage of a checkpoint does not respond.

    Args:
        read: called without arguments.
        path: the checkpoint, for messages.

    Raises:
        OSError: a file is missing (``LOST``).
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
    """Return {"bytes", "sha256"} of a file."""
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def write(folder: Path, files: dict[str, dict], **metadata):
    """Write the manifest of a complete checkpoint, and flush it to the disk.

    Args:
        folder: the checkpoint.
        files: {name within the folder: its ``digest``}.
        metadata: further JSON values.
    """
    content = {"format": FORMAT, "files": files} | metadata
    with open(folder / NAME, "w") as file:
        json.dump(content | {"sha256": _checksum(content)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict:
    """Read the manifest of a checkpoint, and verify its own checksum.

    Raises:
        Damaged: it is missing or damaged.
        Unreadable: the storage does not respond.
        UserError: a later version of the course wrote it.
    """
    try:
        content = json.loads(with_retries((folder / NAME).read_bytes, folder))
        intact = content.pop("sha256") == _checksum(content)
        version = content["format"]
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
    if not _is_valid(content):
        raise Damaged(folder, f"{NAME} is not what this course writes")
    return content


def _is_valid(content: dict) -> bool:
    """Return whether a manifest has the required keys: another program's may have a correct checksum, too."""
    files, maps = content.get("files"), ("files", "run", "shapes")
    return all(isinstance(content.get(part), dict) for part in maps) and all(
        name.isprintable() and isinstance(each, dict) and isinstance(each.get("bytes"), int)
        for name, each in files.items()
    )


def _checksum(content: dict) -> str:
    """Return the checksum of a manifest's content, without the checksum itself, independent of its formatting."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def difference(folder: Path, files: dict[str, dict], lengths_only: bool = False) -> str | None:
    """Compare a folder's files with their digests.

    Args:
        folder: the checkpoint.
        files: {name within the folder: its ``digest``}.
        lengths_only: compare the lengths only, without reading the files.

    Returns:
        A description of the first difference; None if there is none.

    Raises:
        Unreadable: the storage does not respond.
    """
    for name, expected in files.items():
        path = folder / name
        try:
            # The length first: it is cheap, and more informative.
            if (size := with_retries(path.stat, folder).st_size) != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if not lengths_only and with_retries(lambda path=path: digest(path), folder) != expected:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None
