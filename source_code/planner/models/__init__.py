"""Models: their sizes, their floating-point operations, and their forward passes on sizes.

Each module may import those above it:

  shapes        the sizes of a transformer, and the course's models
  huggingface   the sizes of third-party models, from their config.json
  flops         the operations of a step: the model's, and the hardware's
  networks      the course's networks as blueprints: parameters and operators
"""
