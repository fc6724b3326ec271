# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of the tests begin with this: they doubt every verdict, and keep no other name of it."""

import os

import doubts
from IPython import get_ipython

# Four ranks take twice as long on two cores, and a notebook's verdicts hold on two as on four.
os.environ.setdefault("FSDP_LABS_RANKS", "4" if (os.cpu_count() or 1) >= 4 else "2")
get_ipython().enable_matplotlib("inline")  # a kernel that imports Matplotlib does so itself; a fork already has it
doubts.install()
del doubts, get_ipython, os
