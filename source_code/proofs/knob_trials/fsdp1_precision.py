# SPDX-License-Identifier: BSD-3-Clause
"""Trials of FSDP1's number formats: the fields of its MixedPrecision."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from proofs.knob_trials.bench import CPU, raised, trace, trial
from proofs.knob_trials.fsdp1 import plan, wrapped
from proofs.knob_trials.precision import BF16, FP32, GATHERED, REDUCED, halves


@trial("FullyShardedDataParallel: mixed_precision", "MixedPrecision(param_dtype=bf16, reduce_dtype=fp32)")
@trial("MixedPrecision.reduce_dtype", "fp32, with param_dtype=bf16")
def reduced_in_fp32(me):
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    return plan(me, precision="bf16"), trace(me, wrapped(mixed_precision=policy)).summary


@trial("MixedPrecision.param_dtype", "bf16, and reduce_dtype not given")
def bf16(me):
    """Gradients are reduced in bf16; under FSDP2 since PyTorch 2.15 in fp32."""
    found = trace(me, wrapped(mixed_precision=MixedPrecision(param_dtype=BF16))).traffic
    return halves(all_gather=GATHERED, reduce_scatter=REDUCED), found


def _one(**options):
    """Return a linear layer of 4 × 4 elements, with a buffer, computing in a policy's formats."""
    layer = nn.Linear(4, 4, bias=False)
    layer.register_buffer("scale", torch.ones(4))
    policy = MixedPrecision(param_dtype=BF16, **options)
    return FullyShardedDataParallel(layer, device_id=CPU, mixed_precision=policy, use_orig_params=True)


@trial("MixedPrecision.buffer_dtype", "bf16, then not given")
def buffers(me):
    measured = {}
    for name, dtype in (("bf16", BF16), ("not given", None)):
        model = _one(buffer_dtype=dtype)
        model(torch.ones(1, 4))
        measured[name] = str(model.scale.dtype)
    return {"bf16": "torch.bfloat16", "not given": "torch.float32"}, measured


@trial("MixedPrecision.keep_low_precision_grads", "True, then False")
def low_precision_gradients(me):
    measured = {}
    for keep in (True, False):
        model = _one(keep_low_precision_grads=keep)
        model(torch.ones(1, 4)).sum().backward()
        gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
        measured[str(keep)] = str(gradient.dtype)
    return {"True": "torch.bfloat16", "False": "torch.float32"}, measured


@trial("MixedPrecision.cast_root_forward_inputs", "True, the default; then False, with an input in fp32")
def root_inputs(me):
    measured = {
        str(cast): raised(lambda cast=cast: _one(cast_root_forward_inputs=cast)(torch.ones(1, 4)))
        for cast in (True, False)
    }
    return {"True": "nothing", "False": "RuntimeError"}, measured


@trial("MixedPrecision.cast_forward_inputs", "False, then True, of a unit whose input is in fp32")
def unit_inputs(me):
    """The root's inputs are not a unit's: these are cast if it says so."""
    measured = {}
    for cast in (False, True):

        def build(cast=cast):
            policy = MixedPrecision(param_dtype=BF16, cast_forward_inputs=cast)
            unit = FullyShardedDataParallel(nn.Linear(4, 4, bias=False), device_id=CPU, mixed_precision=policy)
            root = FullyShardedDataParallel(nn.Sequential(nn.Identity(), unit), device_id=CPU)
            root(torch.ones(1, 4))

        measured[str(cast)] = raised(build)
    return {"False": "RuntimeError", "True": "nothing"}, measured


@trial("MixedPrecision._module_classes_to_ignore", "not given: batch norms are units of their own, in fp32")
def ignored_classes(me):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    policy = ModuleWrapPolicy({nn.Linear})
    options = {"device_id": CPU, "mixed_precision": MixedPrecision(param_dtype=BF16), "auto_wrap_policy": policy}
    model = FullyShardedDataParallel(model, **options)
    seen = []
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    norm.register_forward_pre_hook(lambda module, _: seen.append(str(module.weight.dtype)))
    model(torch.ones(2, 4))
    return {"computes with": ["torch.float32"]}, {"computes with": seen}
