# SPDX-License-Identifier: BSD-3-Clause
"""Run a fault for a notebook page, and shorten its output: the program's own lines, and the error."""

import os
import re
from pathlib import Path
from unittest.mock import patch

from labkit.measuring import records
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


def meet(lab, fault: int, folder: str, patience: float, **environ: str) -> dict:
    """Run a fault of faults.py, and print its command and its output, shortened.

    Args:
        lab: the notebook's ``Lab``.
        fault: its number.
        folder: of the ranks' flight records.
        patience: seconds that a collective may take.
        environ: environment variables to set.

    Returns:
        What rank 0 found, with the hardware's name.
    """
    record, device = Path(folder) / "record.json", lab.device_of(lab.ranks)
    words = f"faults.py --fault {fault} --ranks {lab.ranks} --device {device} --timeout {patience}"
    print("$", *(f"{name}={value}" for name, value in environ.items()), "python", words)
    words = [*words.split(), "--flight", folder, "--record", str(record)]
    with patch.dict(os.environ, environ):
        command = launch.build_command(words, lab.ranks, 1, device, lab)
        try:
            printed = launch.follow(command, timeout=10 * patience, device=device)
        except launch.RunFailed as failure:
            printed = str(failure)
    print(folded(printed, own=("faults.py",)))
    of_run = records.load(record) if record.exists() else {"found": {}, "hardware": "?"}
    return of_run["found"] | {"hardware": of_run["hardware"]}
