# SPDX-License-Identifier: BSD-3-Clause
"""Run a fault for a notebook, and shorten its output: the program's own lines, and the error."""

import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

from labkit.measuring import flight_recorder, records
from labkit.running import launch

NOISE = ("  ", "starting ", "Traceback ", "srun: launch", "srun: Force", "slurmstepd-")
FINGERPRINT = re.compile(r"OpType=(\w+), TensorShape=\[([\d, ]+)\]")
OWN = re.compile(r'  File ".*?/?(?P<file>\w+\.py)", line (?P<line>\d+), in (?P<function>.*)')


def folded(printed: str, own: tuple[str, ...], width: int = 108, most: int = 14) -> str:
    """Return the last lines of an output, keeping only the traceback frames in files of the program.

    Args:
        printed: the output.
        own: names of the program's files.
        width: most characters per line.
        most: most lines.
    """
    lines, frames = [], printed.splitlines()
    for line, below in zip(frames, [*frames[1:], ""], strict=True):
        frame = OWN.match(line)
        if frame and frame["file"] in own:
            lines.append(f"  {frame['file']}:{frame['line']} in {frame['function']}:  {below.strip()}")
        elif line.startswith("  what():") or (line.strip() and not line.startswith(NOISE)):
            lines.append(re.sub(r"(?<![\w.…])/[\w./-]+/", "…/", line.strip()))
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines[-most:])


def own_collective(error: str) -> str:
    """Return the collective that the failing rank was about to call, or "".

    error: the message of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which names the rank's own collective first.
    """
    match = FINGERPRINT.search(error)
    return f"{match[1]} of {match[2]} numbers" if match else ""


class Bench:
    """Run faults of faults.py for a notebook, each with a folder of its own for what its ranks leave behind.

    Args:
        lab: the notebook's ``Lab``.
        patience: seconds that a collective may take.
    """

    def __init__(self, lab, patience: float):
        self.lab, self.patience = lab, patience
        self._scratch = tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix="faults-")
        self.close = self._scratch.cleanup

    def folder(self, fault: int) -> str:
        """Return the folder of a fault, with its ranks' flight records once it has run."""
        path = Path(self._scratch.name) / f"fault-{fault}"
        path.mkdir(exist_ok=True, parents=True)  # after close(), if a cell is run again
        return str(path)

    def calls(self, fault: int) -> dict[int, str]:
        """Return the collective that each rank was about to call, where the run was started with DETAIL."""
        places = flight_recorder.read(self.folder(fault)).places
        return {rank: own_collective(place.left or "") for rank, place in sorted(places.items())}

    def meet(self, fault: int, **environ: str) -> dict:
        """Run a fault, print its command and its output, shortened, and return what rank 0 found, with the hardware.

        environ: environment variables to set.
        """
        record, device = Path(self.folder(fault)) / "record.json", self.lab.device_of(self.lab.ranks)
        words = f"faults.py --fault {fault} --ranks {self.lab.ranks} --device {device} --timeout {self.patience}"
        print("$", *(f"{name}={value}" for name, value in environ.items()), "python", words)
        words = [*words.split(), "--flight", self.folder(fault), "--record", str(record)]
        with patch.dict(os.environ, environ):
            command = launch.build_command(words, self.lab.ranks, 1, device, self.lab)
            try:
                printed = launch.follow(command, timeout=10 * self.patience, device=device)
            except launch.RunFailed as failure:
                printed = str(failure)
        print(folded(printed, own=("faults.py",)))
        of_run = records.load(record) if record.exists() else {"found": {}, "hardware": "?"}
        return of_run["found"] | {"hardware": of_run["hardware"]}
