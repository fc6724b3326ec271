# SPDX-License-Identifier: BSD-3-Clause
"""make coverage lists the lines that only a GPU executes, each with its condition, and no others."""

import gpu_branches
import pytest

CASES = {
    "a branch": (
        "if device.type == 'cuda':\n    a()\n    b()\nelse:\n    c()\n",
        {2, 3},
        [(2, 3, "if device.type == 'cuda'")],
    ),
    "after a guard": (
        "def f(me):\n    if me.device.type != 'cuda':\n        return 0\n    return a()\n",
        {4},
        [(4, 4, "after if me.device.type != 'cuda'")],
    ),
    "a refusal on a GPU is no guard": (
        "def f(backend):\n    if backend == 'nccl':\n        raise E\n    a()\n",
        {4},
        [],
    ),
    "a call": ("def f():\n    torch.cuda.synchronize()\n    a()\n", {2, 3}, [(2, 2, "")]),
    "within": ("if on_gpu:\n    for i in x:\n        with y:\n            a()\n", {2, 3, 4}, [(2, 4, "if on_gpu")]),
    "executed": ("if device.type == 'cuda':\n    a()\n", set(), []),
    "not for a GPU": ("if x:\n    a()\n", {2}, []),
}


@pytest.mark.parametrize("case", list(CASES))
def test_lines_for_a_gpu_are_listed(case, tmp_path):
    text, missing, expected = CASES[case]
    (tmp_path / "file.py").write_text(text)
    assert gpu_branches.unexecuted(tmp_path / "file.py", missing) == expected
