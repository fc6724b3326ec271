# SPDX-License-Identifier: BSD-3-Clause
"""Trials of what gathers parameters, frees them, and in which order."""

import torch
from labkit.training.fsdp2_internals import AllGather
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method, share_comm_ctx
from torch.nn import functional as F

from proofs.knob_trials.bench import (
    BATCH,
    HEAD,
    LAYER,
    LAYERS,
    WEIGHTS,
    WIDTH,
    Chain,
    batch_of,
    mesh_of,
    order_of,
    planned,
    raised,
    sharded,
    step,
    trace,
    traffic,
    trial,
    watch,
)


def evaluate(model):
    """Run a forward without gradients."""
    with torch.no_grad():
        model(torch.ones(BATCH, WIDTH))


# By hand


@trial("FSDPModule.reshard", "after an evaluation, on the root")
def reshard(me):
    model = sharded(me)
    measured = {"left by an evaluation": watch(model, lambda: evaluate(model)).left}
    measured["left by reshard()"] = measured["left by an evaluation"] + watch(model, model.reshard).left
    return {"left by an evaluation": HEAD, "left by reshard()": 0}, measured


@trial("FSDPModule.unshard", "on each layer before forward")
def unshard(me):
    """All layers are whole at once, and forward gathers the root alone."""
    model, seen = sharded(me), {}

    def code():
        for layer in model.layers:
            layer.unshard()

    seen["gathered"] = watch(model, code).left
    seen |= watch(model, lambda: evaluate(model)).traffic
    return {"gathered": LAYERS * LAYER} | traffic(all_gather={HEAD: 1}), seen


@trial("UnshardHandle.wait", "of unshard(async_op=True) of each layer, all called before")
def wait(me):
    """A pending gather holds its buffer. Waiting copies the parameters out of it, and frees it: one more at the highest."""
    model = sharded(me)
    evaluate(model)
    model.reshard()

    def code():
        for handle in [layer.unshard(async_op=True) for layer in model.layers]:
            handle.wait()

    found = watch(model, code)
    predicted = {"left": LAYERS * LAYER, "highest": (LAYERS + 1) * LAYER}
    return predicted, {"left": found.left, "highest": found.highest("all-gather")}


@trial("FSDPModule.set_keep_unsharded_storage", "True")
def keep(me):
    """Nothing is freed that was gathered; everything is gathered again all the same."""
    model = sharded(me)
    model.set_keep_unsharded_storage(True)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), batch_of(me)
    first = watch(model, lambda: step(model, optimizer, [batch]) and None)
    usual = {key: count for key, count in planned(me.world_size).items() if " of " in key}
    return usual | {"left by a step": WEIGHTS}, first.traffic | {"left by a step": first.left}


# When FSDP does it


@trial("FSDPModule.set_reshard_after_forward", "True, on the root alone")
def root_reshards(me):
    model = sharded(me)
    model.set_reshard_after_forward(True, recurse=False)
    return planned(me.world_size) | traffic(all_gather={HEAD: 2}), trace(me, model).summary


@trial("FSDPModule.set_reshard_after_forward", "False, on the root and all below")
def no_unit_reshards(me):
    model = sharded(me)
    model.set_reshard_after_forward(False)
    return planned(me.world_size, reshard="false"), trace(me, model).summary


def _reshard_at_the_end(model, is_last):
    model.set_reshard_after_backward(is_last)


@trial("FSDPModule.set_reshard_after_backward", "False, except after the last of 2 micro-batches")
def reshard_at_the_end(me):
    """The second micro-batch's forward finds all units whole."""
    model = sharded(me)
    found = trace(me, model, 2, lambda *of: step(*of, before=_reshard_at_the_end))
    usual = planned(me.world_size, micro_batches=2)
    predicted = {"between steps": usual["between steps"]}
    predicted |= traffic(all_gather={LAYER: 3 * LAYERS, HEAD: 1}, reduce_scatter={LAYER: 2 * LAYERS, HEAD: 2})
    return predicted, {"between steps": found.between} | found.traffic


@trial("FSDPModule.set_reshard_after_backward", "False, then an optimizer step without reshard()")
def stale_weights(me):
    """The optimizer updates the shards; forward computes with the parameters gathered before."""
    x, y = batch_of(me)
    losses = {}
    for resharded in (False, True):
        model = sharded(me)
        model.set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = F.nll_loss(model(x), y)
        before.backward()
        if resharded:
            for unit in (*model.layers, model):
                unit.reshard()
        optimizer.step()
        losses[resharded] = F.nll_loss(model(x), y).item() != before.item()
    names = ("loss changed by the step", "loss changed by the step, after reshard()")
    return dict(zip(names, (False, True), strict=True)), dict(zip(names, losses.values(), strict=True))


@trial("FSDPModule.set_unshard_in_backward", "False, on an embedding")
def embedding_stays_sharded(me):
    counts = {}
    for gathered in (True, False):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8, bias=False))
        for module in (*model, model):
            fully_shard(module, mesh=mesh_of(me))
        model[0].set_unshard_in_backward(gathered)
        counts[gathered] = watch(model, lambda model=model: model(torch.arange(16)).sum().backward()).traffic
    embedding, linear = 16 * 8 * 4, 8 * 8 * 4
    predicted = traffic(all_gather={embedding: 1, linear: 2}, reduce_scatter={embedding: 1, linear: 1})
    saved = counts[True][f"all-gather of {embedding}"] - counts[False][f"all-gather of {embedding}"]
    return predicted | {"gathers saved": 1}, counts[False] | {"gathers saved": saved}


# Order


def chain(me):
    """Return a sharded ``Chain``."""
    model = Chain()
    for name in "abc":
        fully_shard(model.get_submodule(name), mesh=mesh_of(me))
    return fully_shard(model, mesh=mesh_of(me))


FORWARD = "gather d, gather a, forward a, gather b, forward b, gather c, forward c, forward d"
# The input needs no gradient, so that nothing runs after a's backward: it ends with the root's, in a final callback.
BACKWARD = "gather c, backward d, gather b, backward c, reduce c, gather a, backward b, reduce b, backward a, reduce d, reduce a"


@trial("FSDPModule.set_modules_to_forward_prefetch", "not called")
def no_prefetch(me):
    return {"order": f"{FORWARD}, {BACKWARD}"}, {"order": order_of(chain(me))}


@trial("FSDPModule.set_modules_to_forward_prefetch", "a: [b, c]")
def forward_prefetch(me):
    model = chain(me)
    model.a.set_modules_to_forward_prefetch([model.b, model.c])
    forward = "gather d, gather a, gather b, gather c, forward a, forward b, forward c, forward d"
    return {"order": f"{forward}, {BACKWARD}"}, {"order": order_of(model)}


@trial("FSDPModule.set_modules_to_backward_prefetch", "c: [b, a]")
def backward_prefetch(me):
    model = chain(me)
    model.c.set_modules_to_backward_prefetch([model.b, model.a])
    backward = BACKWARD.replace("gather a, ", "").replace("gather b, ", "gather b, gather a, ")
    return {"order": f"{FORWARD}, {backward}"}, {"order": order_of(model)}


@trial("FSDPModule.set_modules_to_forward_prefetch", "the next 2, and set_modules_to_backward_prefetch the 2 before")
def two_ahead(me):
    model = sharded(me)
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - 2) : number][::-1])
    model.set_modules_to_forward_prefetch(layers[:2])
    return planned(me.world_size, prefetch=2), trace(me, model).summary


# Who gathers


class OneBuffer(AllGather):
    """Gather into one buffer that stays."""

    def __init__(self):
        self.buffer, self.calls = torch.empty(LAYER // 4), 0

    def allocate(self, size, *, dtype, device):
        return self.buffer[: size[0]]

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@trial("FSDPModule.set_custom_all_gather", "one buffer that stays, for the gathers of a layer")
def one_buffer(me):
    """A step allocates less: the buffer of each of the layer's gathers."""
    usual = trace(me, sharded(me)).allocated
    model, comm = sharded(me), OneBuffer()
    model.layers[-1].set_custom_all_gather(comm)
    found = trace(me, model)
    sizes = {key: value for key, value in planned(me.world_size).items() if " of " in key}
    predicted = sizes | {"allocated less": 2 * LAYER, "calls in 4 steps": 8}
    return predicted, found.traffic | {"allocated less": usual - found.allocated, "calls in 4 steps": comm.calls}


@trial("FSDPModule.set_allocate_memory_from_process_group_for_comm", "True, on every unit, with gloo")
def allocated_by_the_group(me):
    """gloo has no allocator of its own."""
    model = sharded(me)
    for unit in (*model.layers, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return planned(me.world_size), trace(me, model).summary


def _pending(me, shared: bool) -> int:
    """Return the bytes that two roots' reductions retain after backwards that are not the last."""
    models = [fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh_of(me)) for _ in range(2)]
    both = nn.ModuleList(models)
    if shared:
        share_comm_ctx(models)

    def code():
        for model in models:
            model.set_is_last_backward(False)
            model(torch.ones(BATCH, WIDTH)).sum().backward()

    return watch(both, code).snapshots[-1]["reduce-scatter"]


@trial("share_comm_ctx", "two roots, after backwards that are not the last")
def shared_context(me):
    """A context retains one packed gradient: two roots retain two, or together one."""
    names = ("retained, each with its own", "retained, shared")
    measured = [_pending(me, shared) for shared in (False, True)]
    return dict(zip(names, (2 * LAYER, LAYER), strict=True)), dict(zip(names, measured, strict=True))


class Encoder(nn.Linear):
    """A layer with a second way to compute."""

    def encode(self, x):
        return F.linear(x, self.weight)


@trial("register_fsdp_forward_method", '(model, "encode"), with a method that is not forward')
def forward_method(me):
    model = fully_shard(Encoder(WIDTH, WIDTH, bias=False), mesh=mesh_of(me))
    before = raised(lambda: model.encode(torch.ones(BATCH, WIDTH)))
    register_fsdp_forward_method(model, "encode")
    found = watch(model, lambda: model.encode(torch.ones(BATCH, WIDTH)).sum().backward())
    predicted = traffic(all_gather={LAYER: 1}, reduce_scatter={LAYER: 1}) | {"before": "RuntimeError"}
    return predicted, found.traffic | {"before": before}


@trial("FSDPModule.reset_iter_state", "after a forward that raised in layers[2]")
def reset(me):
    """What was gathered when the exception came stays gathered until then; the next step is as if nothing had been."""
    model, other = sharded(me), sharded(me)
    x, y = batch_of(me)

    def fail(*_):
        raise ValueError("a bad batch")

    def code():
        hook = model.layers[2].register_forward_hook(fail, prepend=True)
        raised(lambda: model(x))
        hook.remove()

    stays = watch(model, code).left
    model.reset_iter_state()
    for each in (model, other):
        F.nll_loss(each(x), y).backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    equal = all(torch.equal(one.grad.to_local(), two.grad.to_local()) for one, two in pairs)
    # The root, the layer, and the layer's buffer, which forward keeps for the overlap
    return {"stays gathered": HEAD + 2 * LAYER, "next gradients equal": True}, {
        "stays gathered": stays,
        "next gradients equal": equal,
    }


@trial("FSDPModule.set_post_optim_event", "an event, before each step")
def post_optim_event(me):
    """The root waits for it once; on a CPU it orders nothing."""
    model = sharded(me)

    def run(*of):
        model.set_post_optim_event(torch.cpu.Event() if hasattr(torch.cpu, "Event") else torch.Event("cpu"))
        return step(*of)

    return planned(me.world_size), trace(me, model, run=run).summary
