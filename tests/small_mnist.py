# SPDX-License-Identifier: BSD-3-Clause
"""A small, valid MNIST: 40 digits of random pixels in its format, which a test can put in the place of the real files."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
from labkit.training import datasets


def idx(array):
    """The bytes of a gzipped IDX file."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes(), mtime=0)


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def files() -> dict[str, bytes]:
    """Return {file: its bytes}: 30 training and 10 test digits."""
    random = np.random.RandomState(1)
    arrays = []
    for count in (30, 10):
        arrays += [random.randint(0, 256, (count, 28, 28), dtype=np.uint8), (np.arange(count) % 10).astype(np.uint8)]
    return {file: idx(array) for (file, _), array in zip(datasets.RESOURCES, arrays)}


def fill(root: Path, contents: dict[str, bytes]) -> Path:
    """Write the files to where they belong under ``root``, and return that folder."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file, data in contents.items():
        (raw / file).write_bytes(data)
    return raw
