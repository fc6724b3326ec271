# SPDX-License-Identifier: BSD-3-Clause
"""Trials of number formats and offload."""

import torch
from labkit.measuring.trace import local
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from proofs.knob_trials.bench import (
    HEAD,
    LAYER,
    LAYERS,
    WIDTH,
    installed,
    linear,
    mesh_of,
    planned,
    raised,
    sharded,
    trace,
    traffic,
    trial,
    watch,
)

BF16, FP32 = torch.bfloat16, torch.float32
REDUCES_AS_STORED = (2, 15)  # from this PyTorch on, gradients are reduced in the parameters' own format by default


def halves(**kinds: dict[int, int]) -> dict[str, int]:
    """Return ``traffic`` in half the bytes."""
    return traffic(**{kind: {size // 2: count for size, count in sizes.items()} for kind, sizes in kinds.items()})


GATHERED = {LAYER: 2 * LAYERS, HEAD: 1}
REDUCED = {LAYER: LAYERS, HEAD: 1}


@trial("fully_shard: mp_policy", "MixedPrecisionPolicy(): everything in fp32")
def none(me):
    return planned(me.world_size), trace(me, sharded(me, mp_policy=MixedPrecisionPolicy())).summary


@trial("fully_shard: mp_policy", "param_dtype=bf16, reduce_dtype=fp32")
def bf16_reduced_in_fp32(me):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    return planned(me.world_size, precision="bf16"), trace(me, sharded(me, mp_policy=policy)).summary


@trial("MixedPrecisionPolicy.param_dtype", "bf16, and reduce_dtype not given")
def bf16(me):
    """Gradients are reduced in the format of the shards since PyTorch 2.15, before in param_dtype."""
    found = trace(me, sharded(me, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))).traffic
    reduces = traffic if installed() >= REDUCES_AS_STORED else halves
    return halves(all_gather=GATHERED) | reduces(reduce_scatter=REDUCED), found


@trial("MixedPrecisionPolicy.reduce_dtype", "bf16")
def reduced_in_bf16(me):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    found = trace(me, sharded(me, mp_policy=policy)).traffic
    return halves(all_gather=GATHERED, reduce_scatter=REDUCED), found


@trial("MixedPrecisionPolicy.reduce_dtype", "fp32, then bf16: gradients 256 and 1 on two ranks")
def rounding(me):
    """bf16 has 8 bits: 256 + 1 rounds to 256."""
    measured = {}
    for name, dtype in (("fp32", FP32), ("bf16", BF16)):
        model = linear(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model(torch.full((1, 4), (256.0, 1.0)[me.rank])).sum().backward()
        measured[name] = local(model.weight.grad).flatten()[0].item()
    return {"fp32": 257 / 2, "bf16": 256 / 2}, measured


@trial("MixedPrecisionPolicy.output_dtype", "fp32, with param_dtype=bf16, on the root")
def output(me):
    measured = {}
    for name, dtype in (("without", None), ("with", FP32)):
        model = linear(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=dtype))
        measured[name] = str(model(torch.ones(1, 4)).dtype)
    return {"without": "torch.bfloat16", "with": "torch.float32"}, measured


@trial("MixedPrecisionPolicy.cast_forward_inputs", "False, with param_dtype=bf16 and an input in fp32")
def inputs(me):
    """Whole numbers up to 256 have a bf16 of their own; 257 has none, and a cast rounds it to 256."""
    model = linear(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    cast = fully_shard(nn.Identity(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    measured = {
        "input in fp32": raised(lambda: model(torch.ones(1, 4))),
        "input in bf16": raised(lambda: model(torch.ones(1, 4, dtype=BF16))),
        "True makes of 257": cast(torch.tensor([257.0])).item(),
    }
    return {"input in fp32": "RuntimeError", "input in bf16": "nothing", "True makes of 257": 256.0}, measured


@trial("MixedPrecisionPolicy.param_dtype_override_fn", "norms stay in fp32, of a unit in bf16")
def override(me):
    """Two formats in one unit are gathered as bytes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=lambda p: FP32 if p.ndim == 1 else None)
    fully_shard(model, mesh=mesh_of(me), mp_policy=policy)
    norm = WIDTH * 4
    found = watch(model, model.unshard).traffic
    dtypes = [str(model[0].weight.dtype), str(model[1].weight.dtype)]
    predicted = traffic(all_gather={LAYER // 2 + norm: 1}) | {"computes with": ["torch.bfloat16", "torch.float32"]}
    return predicted, found | {"computes with": dtypes}


# Offload: on a CPU, shards are where they would be without it


@trial("OffloadPolicy", "the default: no offload")
def no_offload(me):
    return planned(me.world_size), trace(me, sharded(me, offload_policy=OffloadPolicy())).summary


@trial("fully_shard: offload_policy", "CPUOffloadPolicy(pin_memory=False), on a CPU")
def offload(me):
    policy = CPUOffloadPolicy(pin_memory=False)
    return planned(me.world_size), trace(me, sharded(me, offload_policy=policy)).summary


@trial("CPUOffloadPolicy.pin_memory", "True, the default, where there is no GPU")
def pinned(me):
    return {"raises": "RuntimeError"}, {"raises": raised(lambda: sharded(me, offload_policy=CPUOffloadPolicy()))}
