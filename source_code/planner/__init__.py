"""The arithmetic of a training step: its memory, its collectives and its time, from sizes alone.

It needs only the standard library, and imports nothing of this course. From the ground up:

  shapes       the sizes of a model, and the course's models
  huggingface   the sizes of other people's, from their config.json
  mesh         how ranks are arranged: a grid with named dimensions
  sizes        autograd on sizes: what is alive when
  fewer_bits   8-bit Adam's states and 4-bit weights, by their published layouts
  attention    what attention keeps for backward, and makes, kernel by kernel
  flops        how much a step computes: the model's operations, and the hardware's
  norms        what a norm keeps, and makes, on each device
  operators    what each other operator keeps, and makes
  chunked_loss   the head's product and the loss, for some tokens at a time
  tensor_parallel   what tensor parallelism gathers, scatters and makes of embedding and loss
  networks     the course's networks, as operators on sizes
  strategies   what DDP and FSDP gather, free and reduce around each unit
  zero         how PyTorch's ZeroRedundancyOptimizer and DeepSpeed's stages split, and what they keep
  deepspeed    what DeepSpeed's stages gather, free and reduce, and when
  jax_sharding   FSDP in JAX: what each device keeps, what is sent, what the compiler needs in between
  traffic      the collectives of a step
  step         one training step, walked through
  pipeline     stages: which blocks each has, and what it computes when
  plan         a plan: its peak, what persists, its collectives
  predict      the plan of a run from its record, and short forms for the MNIST network
  overlap      what hides behind what: a step on a lane for compute, and one for each link
  cost         a step's time
  gpus         what one can book: memory, peak operations; what a process needs beside its tensors
  search       the least or the most that fits
  answers      all of these, for what plan.py was asked
  report       what a plan says, as pages for people
"""


class UserError(Exception):
    """Something the user can put right. Its text is one sentence: what is wrong, and what to do.

    Every command of the course prints that sentence alone, without a traceback, and exits with this code.
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: IPython asks for this."""
        return [str(self)]
