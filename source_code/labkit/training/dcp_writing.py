# SPDX-License-Identifier: BSD-3-Clause
"""Write with torch.distributed.checkpoint (DCP), and compute the checksum of each file while it is written.

Hashing the files afterwards would read everything again while all ranks wait. Here a second thread hashes each chunk
while it is written.

Private PyTorch used here, and only here: a ``FileSystemWriter`` opens its files by ``self.fs.create_stream``.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from labkit.training.dcp_reading import METADATA

TOGETHER = 2**18  # bytes: larger chunks are hashed by another thread, for smaller ones the overhead is too large


class Writer(FileSystemWriter):
    """Write a folder as DCP's writer does, and record checksums, shapes, and errors.

    Attributes:
        digests: {name of a file that this rank has written: its ``manifest.digest``}.
        error: the OSError with which writing failed, which DCP does not always propagate; None without an error.
        shapes, formats: on the rank that wrote the metadata, {name: shape} and {name: dtype} of all saved tensors.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = _Hashing()
        self.shapes, self.formats = {}, {}

    @property
    def digests(self) -> dict[str, dict]:
        # DCP writes its metadata under another name first
        return {name.removesuffix(".tmp") if METADATA in name else name: each for name, each in self.fs.digests.items()}

    @property
    def error(self) -> OSError | None:
        return self.fs.error

    def finish(self, metadata, results):
        """Record shapes and dtypes from the metadata of all ranks, which DCP passes on one rank."""
        for name, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "size"):
                self.shapes[name] = list(entry.size)
                self.formats[name] = str(entry.properties.dtype).removeprefix("torch.")
        super().finish(metadata, results)


class _Hashing(FileSystem):
    """Create files as DCP's file system does, and record their checksums when they are closed."""

    def __init__(self):
        self.digests, self.error = {}, None

    @contextmanager
    def create_stream(self, path, mode):
        try:
            with super().create_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                with ThreadPoolExecutor(1) as thread:
                    hashed = _Hashed(stream, thread)
                    yield hashed
                self.digests[Path(path).name] = {"sha256": hashed.sha.hexdigest(), "bytes": hashed.size}
        except OSError as error:
            self.error = error
            raise


class _Hashed:
    """Hash a file that one thread writes sequentially."""

    def __init__(self, stream, thread: ThreadPoolExecutor):
        self._stream, self._thread = stream, thread
        self.sha, self.size = hashlib.sha256(), 0

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if data.nbytes < TOGETHER:
            self.sha.update(data)
            written = self._stream.write(data)
        else:  # both release the interpreter lock
            hashing = self._thread.submit(self.sha.update, data)
            try:
                written = self._stream.write(data)
            finally:
                hashing.result()  # the caller may change the memory after this returns
        self.size += data.nbytes
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)
