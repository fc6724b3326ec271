# SPDX-License-Identifier: BSD-3-Clause
"""Xid lines of a kernel log are read as NVIDIA documents them, and CUDA's messages about hardware are told from a script's."""

import pytest
from labkit.running import gpu_errors

LOG = """[Fri Nov 27 03:12:01 2026] NVRM: Xid (PCI:0000:86:00): 48, pid=812, name=python, DBE
[Fri Nov 27 03:12:01 2026] NVRM: Xid (PCI:0000:86:00): 45, pid=812, name=python, Ch 00000010
[Fri Nov 27 03:12:02 2026] eth0: link is up
[Fri Nov 27 03:12:09 2026] NVRM: Xid (0000:3b:00.0): 9999, something new
"""


def test_each_line_has_its_gpu_and_its_code_and_the_strongest_action_counts():
    assert [(each.gpu, each.code) for each in gpu_errors.read(LOG)] == [
        ("0000:86:00", 48),
        ("0000:86:00", 45),
        ("0000:3b:00.0", 9999),
    ]
    assert gpu_errors.advice(LOG) == gpu_errors.RESET
    assert gpu_errors.advice(LOG + "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.") == gpu_errors.REBOOT
    assert gpu_errors.advice("NVRM: Xid (PCI:0000:18:00): 9999, something new") == gpu_errors.advice("") == ""


@pytest.mark.parametrize("code", gpu_errors.XIDS)
def test_every_code_has_a_known_action(code):
    meaning, action = gpu_errors.XIDS[code]
    assert meaning and gpu_errors.advice(f"NVRM: Xid (PCI:0000:18:00): {code}, x") == action in gpu_errors.ACTIONS


@pytest.mark.parametrize(
    ("message", "hardware"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_what_a_script_can_cause_is_no_hardware_error(message, hardware):
    assert gpu_errors.is_hardware(message) is hardware
