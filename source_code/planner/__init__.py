# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of a training step: its memory, its collectives, and its time, from sizes alone.

It needs only the standard library, and imports nothing of this course. Each part may import those above it:

  ops        abstract autograd: operators that compute sizes instead of values
  models     shapes, operation counts, and the networks as blueprints
  parallel   DDP, FSDP, ZeRO, tensor and pipeline parallelism: what they shard, gather, and reduce
  step       one training step of one rank, and its plan
  predict    the plan of a run from its record, and short forms for the MNIST network
  timing     how long a step takes, and which communication is hidden
  gpus       memory and peak operations of GPUs, and whether a plan fits
  cli        plans, sweeps, and searches for plan.py, and their text
"""


class UserError(Exception):
    """An error that the user can correct. Its text is one sentence: what is wrong, and what to do.

    Every command of the course prints only that sentence, without a traceback, and exits with ``exit_code``.
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows of it in a notebook."""
        return [str(self)]
