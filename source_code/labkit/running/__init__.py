# SPDX-License-Identifier: BSD-3-Clause
"""Start and monitor ranks from a notebook, a command line, or a Slurm job."""
