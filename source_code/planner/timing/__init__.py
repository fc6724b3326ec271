# SPDX-License-Identifier: BSD-3-Clause
"""How long a step takes.

Each module may import those above it:

  overlap   which communication hides behind computation
  cost      collectives and computation in seconds
"""
