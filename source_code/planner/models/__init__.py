# SPDX-License-Identifier: BSD-3-Clause
"""Models: their sizes, their floating-point operations, and their forward passes on sizes.

Each module may import those above it:

  shapes        the sizes of a transformer, and the course's models
  parameters    the names and shapes of its parameters
  families      what each family of third-party models differs in
  huggingface   the sizes of third-party models, from their config.json
  flops         the operations of a step: the model's, and the hardware's
  blueprint     what a network is to the planner
  gpt           the course's GPT as a blueprint
  library       third-party models as blueprints, as transformers computes them
  networks      all networks by their functions
"""
