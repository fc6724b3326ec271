"""Numbers in fewer bits, by the layouts that are published: bytes, from sizes alone. Not on trial: no lab trains so. No torch.

8-bit Adam   bitsandbytes.optim.AdamW8bit: two states of a byte a number, and in fp32 the largest of each block of 256,
             from version 0.44 on (2048 before); tensors below 4,096 numbers keep states in fp32; one code of 256
             numbers in fp32 for each state (bitsandbytes/optim/optimizer.py, arXiv:2110.02861)
NF4          QLoRA's weights: 4 bits per number, and of each block of 64 the largest, of which all but their mean is in
             8 bits with, of each 256 of them, the largest in fp32 (arXiv:2305.14314, section 3)
"""

from math import ceil

from planner.ops.autograd import FP32

SMALLEST, ADAM_BLOCK, CODE = 4096, 256, 256
BLOCK, BLOCKS_OF_BLOCK = 64, 256


def adam_states(sizes: list[int]) -> dict[str, int]:
    """{name: bytes} of what 8-bit Adam keeps for tensors of so many numbers."""
    wide = [numel for numel in sizes if numel < SMALLEST]
    narrow = [numel for numel in sizes if numel >= SMALLEST]
    moments = FP32 * sum(wide) + sum(narrow)
    return {
        "first moments": moments,
        "second moments": moments,
        "largest of each block": 2 * FP32 * sum(ceil(numel / ADAM_BLOCK) for numel in narrow),
        "codes": 2 * FP32 * CODE if narrow else 0,
    }


def blocks(numel: int) -> int:
    """Of a weight of so many numbers, those that share a constant."""
    return ceil(numel / BLOCK)


def nf4(numel: int) -> int:
    """Bytes of a weight of so many numbers, with its doubly quantised constants: 4.127 bits per number."""
    constants = blocks(numel)
    return ceil(numel / 2) + constants + FP32 * ceil(constants / BLOCKS_OF_BLOCK) + FP32
