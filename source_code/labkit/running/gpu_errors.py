# SPDX-License-Identifier: BSD-3-Clause
"""Tell a failing GPU from a failing script: CUDA's messages, and the Xid lines of the NVIDIA driver.

  dmesg -T | python -m labkit.running.gpu_errors          the kernel log of a node: what each Xid means, what to do

NVIDIA's driver writes an Xid line into the kernel log of the node when a GPU reports an error. The codes were compared with
NVIDIA's catalog for Ampere and newer GPUs (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) in November
2026; an action summarizes its "immediate action", here in capitals, and its "trigger conditions". 63 and 64 are explained in
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/user-visible-statistics.html. Messages are those of CUDA 13's runtime
library. No GPU has failed here: the tests use lines in the documented form.
"""

import re
import sys
from typing import NamedTuple

SCRIPT, RESTART = "debug the script first", "restart the job"
LATER = "restart the job; reset the GPU when convenient"
RESET, REBOOT = "drain the node and reset the GPU", "drain the node and reboot it"
ACTIONS = (SCRIPT, RESTART, LATER, RESET, REBOOT)  # from the mildest

XIDS = {  # {code: (meaning, action)}
    13: ("exception in a kernel, typically an index out of bounds", SCRIPT),  # RESTART_APP, then check the application
    31: ("a kernel accessed an illegal address", SCRIPT),  # RESTART_APP, then check the application
    43: ("a program met a fault of its own and was stopped; the GPU is healthy", SCRIPT),  # IGNORE
    45: (
        "a program was ended; follow the other Xid, if there is one",
        RESTART,
    ),  # alone: RESTART_FM (the fabric manager)
    48: ("uncorrectable (double-bit) memory error", RESET),  # alone: RESET_GPU; with 63 or 64: DRAIN_AND_RESET
    63: ("a bad memory row is marked for replacement at the next reset", LATER),  # IGNORE
    64: ("a bad memory row could not be marked for replacement", RESET),  # RESET_GPU
    74: ("NVLink error, here or at the other end of the link", RESET),  # "a GPU reset or node reboot is needed"
    79: ("the GPU has fallen off the bus", REBOOT),  # RESTART_BM (bare metal)
    94: ("uncorrectable memory error, contained: only the program that met it is affected", LATER),  # RESTART_APP
    95: ("uncorrectable memory error, not contained: several programs are affected", RESET),  # RESET_GPU
    119: ("the GPU's own processor (GSP) did not answer in time", RESET),  # RESET_GPU
}
HARDWARE = re.compile(  # CUDA errors that a script does not cause
    "uncorrectable ECC error encountered|uncorrectable NVLink error|hardware stack error"
    "|Invalid access of peer GPU memory over nvlink or a hardware error|device\\(s\\) is/are busy or unavailable"
)
LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?P<rest>.*)")
HINT = (
    "this is a GPU or its node, not the script: read that node's kernel log (dmesg -T | grep Xid) and "
    "nvidia-smi -q -d ECC,ROW_REMAPPER; have the node drained; resume without it"
)


class Xid(NamedTuple):
    """An error that the driver has logged. gpu: its PCI address."""

    gpu: str
    code: int
    meaning: str
    action: str


def read(log: str) -> list[Xid]:
    """Return the Xid errors in a node's kernel log. A code that is not in ``XIDS`` has no action."""
    unknown = "not in this table: see NVIDIA's catalog", ""
    return [
        Xid(match["gpu"], int(match["code"]), *XIDS.get(int(match["code"]), unknown)) for match in LINE.finditer(log)
    ]


def advice(log: str) -> str:
    """Return the strongest action that a node's Xid errors call for, or "" if there is none."""
    return max((each.action for each in read(log) if each.action), key=ACTIONS.index, default="")


def is_hardware(message: str) -> bool:
    """Return whether an error message of CUDA is about the GPU or its connection, and not about the script."""
    return bool(HARDWARE.search(message))


if __name__ == "__main__":
    lines = sys.stdin.read()
    for each in read(lines):
        print(f"GPU {each.gpu}: Xid {each.code}, {each.meaning}")
    print(f"what to do: {advice(lines) or 'nothing: no Xid calls for an action'}")
