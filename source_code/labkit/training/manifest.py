"""A checkpoint's manifest: which files it has, their lengths and checksums, and what they are of. Imports no torch.

It is written last and read first: a folder without one was never finished, and what differs from it is damaged. The
checksums are against accidents: a truncated copy, a flipped bit, files of two checkpoints mixed up. In a terminal
``sha256sum`` gives the same.
"""

import hashlib
import json
import os
from pathlib import Path

from labkit import UserError

NAME = "manifest.json"
FORMAT = 1  # of the checkpoint as a whole; a higher one was written by a later version of this course


class Damaged(UserError):
    """A checkpoint is not what was written, or was not written to its end."""

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)  # as it came: one rank sends it to the others, where it is made again
        self.path, self.reason = path, reason

    def __str__(self):
        return (
            f"the checkpoint {self.path} is damaged ({self.reason}): give --fall-back to go on from the newest whole "
            "one, or remove it"
        )


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
    """What ``write`` wrote. Damaged: there is none, or it cannot be read. UserError: of a later version."""
    try:
        found = json.loads((folder / NAME).read_bytes())
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


def difference(folder: Path, files: dict[str, dict]) -> str | None:
    """In what the folder's files first differ from their digests, in a few words; None if in nothing."""
    for name, expected in files.items():
        try:
            # The length first: it costs nothing, and says more.
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if digest(folder / name) != expected:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None
