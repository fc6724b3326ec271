# SPDX-License-Identifier: BSD-3-Clause
"""Judge exercise 08.1: weights that FSDP2 gathers in a quarter of the bytes."""

import torch
from planner.models.shapes import GPTShape
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.measuring.differences import largest, largest_difference
from labkit.measuring.trace import StepTrace
from labkit.teaching.exercises import on_ranks, unanswered
from labkit.training.models import GPT
from labkit.training.quantized_gather import Int8Gathered, quantize_gathers

SHAPE = GPTShape(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=256, vocab_size=64)  # fmt: skip
COLUMNS = 128
MOST = 0.3  # of fp32's bytes: int8, and some bytes for the scales
ROUNDING = 0.01  # of a shard's largest element: half a step of int8 is 1/254 of it


class PackedGather(Int8Gathered):
    """A weight in fp32 that FSDP2 gathers as a subclass says: by its ``pack`` and ``unpack``."""

    @staticmethod
    def pack(shard: torch.Tensor) -> tuple:
        """Return the tensors to gather instead of a shard (rows, columns)."""
        raise NotImplementedError

    @staticmethod
    def unpack(*gathered: torch.Tensor) -> torch.Tensor:
        """Return the whole weight; gathered: the tensors that ``pack`` returned, the rows of all ranks."""
        raise NotImplementedError

    def fsdp_pre_all_gather(self, mesh):
        return tuple(self.pack(self._data)), ()

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        unpacked, by_one = self.unpack(*outputs), torch.ones(())  # what the base class multiplies
        return super().fsdp_post_all_gather((unpacked, by_one), metadata, param_dtype, out=out)


def _gathered(shards: list, answer) -> torch.Tensor:
    """Return the whole matrix, packed, gathered and unpacked as FSDP2 does it."""
    packed = [tuple(answer.pack(shard)) for shard in shards]
    tensors = [
        torch.cat([tensor.reshape(-1) for tensor in parts]).view(-1, *parts[0].shape[1:])
        for parts in zip(*packed, strict=True)
    ]
    return answer.unpack(*tensors)


def _wrong_rounding(answer) -> str:
    """Describe a matrix that comes out wrong, or return ""."""
    generator = torch.Generator().manual_seed(7)
    small, large = (torch.randn(4, COLUMNS, generator=generator) * size for size in (0.02, 2.0))
    sparse = small.clone()
    sparse[1] = 0
    for what, shards in {
        "two shards": [small, small + 0.01],
        "the second rank's elements are 100 times as large": [small, large],
        "a row of zeros": [sparse, small],
    }.items():
        whole = _gathered(shards, answer)
        if whole.shape != (8, COLUMNS):
            return f"{what}: unpack returns {tuple(whole.shape)}; the whole matrix has (8, {COLUMNS})"
        for rank, (shard, part) in enumerate(zip(shards, whole.chunk(2), strict=True)):
            error = largest_difference(part, shard) / largest(shard.abs())
            if not error <= ROUNDING:
                return f"{what}: rank {rank}'s rows are off by {error:.1%} of their largest element; int8 needs 0.4%"
    return ""


def _train(me, packed) -> dict:
    """Train a small GPT for some steps; return its losses, and the bytes that a step gathers."""
    torch.manual_seed(8)
    model = GPT(SHAPE)
    if packed:
        quantize_gathers(model.blocks, packed)
    mesh = init_device_mesh("cpu", (me.world_size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = StepTrace(model, optimizer, me.device)
    tokens = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(me.rank))
    losses = []
    for _ in range(6):
        with trace:
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    gathered = sum(count * size for (kind, size, _), count in trace.collectives.items() if kind == "all-gather")
    return {"losses": losses, "gathered": gathered}


def _both(me, packed) -> tuple:
    return _train(me, None), _train(me, packed)


def judge_int8_gather(answer) -> str:
    if not (isinstance(answer, type) and issubclass(answer, PackedGather)):
        return "not answered yet" if unanswered(answer()) else "the answer must be a subclass of PackedGather"
    shard = torch.ones(4, COLUMNS)
    if unanswered(answer.pack(shard)) or unanswered(_gathered([shard, shard], answer)):
        return "not answered yet"
    if wrong := _wrong_rounding(answer):
        return f"not quite: {wrong}"
    share = sum(tensor.nbytes for tensor in answer.pack(shard)) / shard.nbytes
    if share > MOST:
        return f"not quite: a shard of {shard.nbytes:,} bytes is gathered as {share:.0%} of them; a quarter is the aim"
    for rank, (plain, packed) in enumerate(on_ranks(_both, answer, ranks=2)):
        apart = largest_difference(packed["losses"], plain["losses"], relative=True)
        if not apart <= 0.02:
            return f"not quite: on rank {rank} the losses differ from those of fp32 by up to {apart:.1%}"
        if packed["gathered"] >= plain["gathered"]:
            return f"not quite: a step gathers {packed['gathered']:,} bytes, and {plain['gathered']:,} in fp32"
    return "right"
