# SPDX-License-Identifier: BSD-3-Clause
"""One training step of one rank.

Each module may import those above it:

  simulation         run the step on sizes: every micro-batch, then the optimizer
  stage_simulation   run the step of a pipeline stage on sizes
  plan               the plan of a run: its peak, its persistent memory, its collectives
"""
