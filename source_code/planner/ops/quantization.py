# SPDX-License-Identifier: BSD-3-Clause
"""Quantized optimizer states and weights, by their published layouts. Not validated: no lab trains with them. No torch.

8-bit Adam   bitsandbytes.optim.AdamW8bit: two states of one byte per element, and in fp32 the largest of each block of
             256 (2048 before version 0.44); tensors below 4,096 elements keep their states in fp32; one code of 256
             elements in fp32 for each state (bitsandbytes/optim/optimizer.py, arXiv:2110.02861)
NF4          QLoRA's weights: 4 bits per element, and a constant for each block of 64, the block's largest. The constants
             are quantized to 8 bits, with the largest of each 256 of them in fp32, and their mean (arXiv:2305.14314,
             section 3)
"""

from math import ceil

from planner.ops.autograd import FP32

SMALLEST, ADAM_BLOCK, CODE = 4096, 256, 256  # elements
BLOCK, BLOCKS_OF_BLOCK = 64, 256  # elements of a block; blocks that share a constant of the second level


def adam_states(sizes: list[int]) -> dict[str, int]:
    """Return {name: bytes} of 8-bit Adam's states.

    Args:
        sizes: elements of each tensor that the optimizer updates.
    """
    unquantized = [numel for numel in sizes if numel < SMALLEST]
    quantized = [numel for numel in sizes if numel >= SMALLEST]
    state = FP32 * sum(unquantized) + sum(quantized)
    return {
        "first moments": state,
        "second moments": state,
        "largest of each block": 2 * FP32 * sum(ceil(numel / ADAM_BLOCK) for numel in quantized),
        "codes": 2 * FP32 * CODE if quantized else 0,
    }


def nf4_blocks(numel: int) -> int:
    """Return the number of blocks, each with a constant, of an NF4 weight of ``numel`` elements."""
    return ceil(numel / BLOCK)


def nf4_bytes(numel: int) -> int:
    """Return the bytes of an NF4 weight of ``numel`` elements with its doubly quantized constants: 4.127 bits each."""
    constants = nf4_blocks(numel)
    return ceil(numel / 2) + constants + FP32 * ceil(constants / BLOCKS_OF_BLOCK) + FP32
