# SPDX-License-Identifier: BSD-3-Clause
"""Abstract autograd: operators that compute sizes instead of values.

Each module may import those above it:

  autograd           which tensors are alive when, and why
  context            context groups: which tokens a rank has, what is exchanged, and who computes most
  quantization       8-bit Adam's states and 4-bit weights, by their published layouts
  attention          what each attention kernel saves for backward, and allocates
  norms              what a norm saves and allocates, on each device
  operators          what every other operator saves and allocates
  experts            what a mixture of experts saves and allocates
  routing            which rows a rank sends to experts, and receives
  mixture            what the course's mixture of experts saves and allocates, spread over ranks, too
  chunked_loss       the head and the loss, computed in chunks of tokens
  tensor_parallel    what tensor parallelism gathers, scatters, and allocates
  context_parallel   what attention over shared sequences saves and allocates
"""
