"""The arithmetic of a training step: its memory, its collectives and its time, from sizes alone.

It needs only the standard library, and imports nothing of this course. From the ground up:

  ops        abstract autograd: operators that compute sizes instead of values
  models     shapes, operation counts, and the networks as blueprints
  parallel   DDP, FSDP, ZeRO, tensor and pipeline parallelism: what they shard, gather, and reduce
  step       one training step of one rank, and its plan
  predict    the plan of a run from its record, and short forms for the MNIST network
  timing     how long a step takes, and which communication is hidden
  gpus       memory and peak operations of GPUs, and whether a plan fits
  cli        plan.py's questions and answers
"""


class UserError(Exception):
    """Something the user can put right. Its text is one sentence: what is wrong, and what to do.

    Every command of the course prints that sentence alone, without a traceback, and exits with this code.
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: IPython asks for this."""
        return [str(self)]
