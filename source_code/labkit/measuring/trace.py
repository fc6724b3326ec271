# SPDX-License-Identifier: BSD-3-Clause
"""Trace one training step: every tensor storage by category, every collective by size.

``StepTrace`` is a ``TorchDispatchMode``: it sees each operator that PyTorch runs, including the backward pass and the
collectives of DDP and FSDP. It records when a storage is allocated, resized, and freed, and assigns its category when
its role is known: a tensor allocated during backward may turn out to be a gradient. Sizes are exact, so the result can
be compared with arithmetic to the byte.

Counted: storages allocated by the operators of the step, parameters, gradients, optimizer state, the batch, and every
buffer passed to a collective. Not counted: memory outside tensors, such as internal copies of a communication backend
(gloo, NCCL), kernel workspaces, and Python's own memory.

Private PyTorch used here, and only here: ``torch._C._current_graph_task_id`` (to detect the backward pass), the names of
c10d's operators, ``_resolve_process_group``, and ``UntypedStorage.resize_``, by which FSDP frees parameters.
"""

import os
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# The order in which figures stack the categories, with persistent memory first.
CATEGORIES = (
    "parameters",  # as the optimizer sees them: whole under DDP, this rank's shard under FSDP
    "gradients",  # of these parameters
    "optimizer state",
    "activations",  # allocated in forward (some are saved for backward), and the batch; gathered ones, too
    "all-gather",  # gathered parameters, and the buffers of the all-gather
    "reduce-scatter",  # unsharded gradients, packed for the reduce-scatter
    "all-reduce buckets",  # DDP's
    "temporary",  # the rest: gradients of activations, the optimizer's intermediate results
)

# Operator → (kind, index of the argument whose size counts, or None for the result, category or None). Tensor
# parallelism uses those of _c10d_functional: their results are activations, or gradients of activations.
COLLECTIVES = {
    "c10d::allreduce_": ("all-reduce", 0, "all-reduce buckets"),
    "c10d::_allgather_base_": ("all-gather", 0, "all-gather"),
    "c10d::allgather_": ("all-gather", 0, "all-gather"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, "reduce-scatter"),
    "c10d::reduce_scatter_": ("reduce-scatter", 1, "reduce-scatter"),
    "c10d::alltoall_base_": ("all-to-all", 0, None),  # the larger of output and input: see _count
    "c10d::broadcast_": ("broadcast", 0, None),
    "c10d::reduce_": ("reduce", 0, None),
    "_c10d_functional::all_reduce": ("all-reduce", 0, None),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", None, None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0, None),
    "c10d::send": ("send", 0, None),
    "c10d::recv_": ("receive", 0, "activations"),  # a stage's input, or the gradient of its output
}
# Operators by which FSDP1 (cat, pad) and FSDP2 (chunk_cat) pack a unit's gradients for the reduce-scatter
PACKING = {"aten::cat", "aten::constant_pad_nd", "fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype", "aten::_chunk_cat"}


def dimensions(model) -> dict[tuple, str]:
    """Map this rank's process groups to mesh dimensions, {ranks of the group: name of the dimension}.

    Args:
        model: a module; the device meshes of its DTensor parameters count. One whose process groups are not a mesh's
            defines ``process_group_names``, which returns such a map.
    """
    if hasattr(model, "process_group_names"):
        return model.process_group_names()
    # In the parameters' order, not a set's: of two meshes with a group of the same ranks, the first one names it.
    meshes = dict.fromkeys(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    named = [(mesh.get_group(name), name) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    return {tuple(dist.get_process_group_ranks(group)): name for group, name in reversed(named)}


def context_groups(model) -> set[str]:
    """Return the names of the process groups that share sequences (labkit/training/context_parallel.py).

    A name, since FSDP's group may have the same ranks.
    """
    forms = (getattr(module, "attend", None) for module in model.modules())
    return {form.keywords["context"].group.group_name for form in forms if hasattr(form, "keywords")}


def group_name(arguments) -> str | None:
    """Return the name of the process group of a collective, from the operator's arguments; None if there is none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).group_name
    return None


def members(arguments) -> tuple:
    """Return the ranks of the process group of a collective, from the operator's arguments; () if there is none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    names = [argument for argument in arguments if isinstance(argument, str)]
    return tuple(dist.get_process_group_ranks(_resolve_process_group(names[-1]))) if names else ()


def tensors_in(value) -> list[torch.Tensor]:
    """Return the tensors in an operator's arguments or results, in nested lists and tuples, too."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, list | tuple) else []


def local(tensor):
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()  # a DTensor then returns its shard without an operator
def persistent_tensors(model, optimizer):
    """Yield (category, local tensor) for the persistent memory of this rank: tensors that outlive a step.

    A model whose persistent tensors are not its parameters and the optimizer's state defines a method of this name.
    """
    if hasattr(model, "persistent_tensors"):
        yield from model.persistent_tensors()
        return
    for parameter in model.parameters():
        yield "parameters", local(parameter)
        if parameter.grad is not None:
            yield "gradients", local(parameter.grad)
    for buffer in model.buffers():
        yield "parameters", local(buffer)
    # ZeroRedundancyOptimizer wraps the optimizer of this rank's parameters.
    for state in getattr(optimizer, "optim", optimizer).state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield "optimizer state", local(value)


class StepTrace(TorchDispatchMode):
    """Trace everything that runs within this context, normally one step, forward to ``zero_grad``.

    Enter it for two consecutive steps. The first registers buffers that existed before (DDP's buckets), so that the
    second counts them from its start. ``timeline()`` and ``collectives`` are those of the last step.

    Args:
        model, optimizer: what is trained.
        device: storages on other devices are ignored.

    Attributes:
        batch: the input tensors of the step, to be set before entering.
        collectives: {(kind, bytes of the whole tensor, mesh dimension or None): number of calls}.
        stepped: whether the optimizer stepped.
    """

    def __init__(self, model, optimizer, device: torch.device):
        super().__init__()
        self.model, self.optimizer, self.device = model, optimizer, device
        self.batch = ()
        self._on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
        self.collectives = Counter()
        self._dimensions, self._context_groups = dimensions(model), context_groups(model)
        self._number = {}  # address of a live storage → its number; addresses are reused, numbers are not
        self._category = []  # by number; a known role overrides the phase in which the storage was allocated
        self._size = []  # by number, bytes
        self._events = []  # (number, change in bytes, phase, operator)
        self._packed_from = {}  # number → numbers of the storages that were packed into it
        self._in_optimizer = False
        self.stepped = False
        self._operator = "start"

    def __enter__(self):
        self._see_persistent()
        for tensor in filter(torch.is_tensor, self.batch):  # a batch may have counts, too
            self._see(tensor, "activations")
        self._baseline = {number: self._size[number] for number in self._number.values()}
        self._events.clear()
        self.collectives.clear()
        self.stepped = False
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._before_optimizer),
            self.optimizer.register_step_post_hook(self._after_optimizer),
        )
        self._unwatch_resize = self._watch_resize()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._unwatch_resize()
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # they call operators on local tensors, which are traced
        self._operator = name = operator._schema.name
        inputs = tensors_in((args, *(kwargs or {}).values()))
        result = operator(*args, **(kwargs or {}))
        addresses = {t.untyped_storage()._cdata for t in inputs}
        for tensor in tensors_in(result):
            if isinstance(tensor, AsyncCollectiveTensor):
                continue  # a wrapper of a collective's result, which has been traced
            if tensor.untyped_storage()._cdata not in addresses:
                self._see(tensor)
        if name in COLLECTIVES:
            self._count(name, args, result)
        elif name in PACKING:
            packed = result if isinstance(result, torch.Tensor) else kwargs["out"]
            self._packed_from[self._numbers([packed])[0]] = self._numbers(inputs)
        elif name == "aten::clone" and [self._category[n] for n in self._numbers(inputs)] == ["all-gather"]:
            self._see(result, "all-gather")  # the shard of a unit that reshard_after_forward=N retains
        return result

    # Recording while the step runs

    def _phase(self):
        if self._in_optimizer:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    def _category_of_new(self):
        if self._in_optimizer:
            return "temporary"
        # Within backward, gradients are enabled only while forward is recomputed.
        return "activations" if self._phase() == "forward" or torch.is_grad_enabled() else "temporary"

    def _see(self, tensor, category=None):
        if tensor.device.type == "meta" and not self._on_meta:  # one for its shape, beside fake tensors of a device
            return
        if hasattr(
            tensor, "__tensor_flatten__"
        ):  # a wrapper (labkit/training/quantized_gather.py) has no memory itself
            for name in tensor.__tensor_flatten__()[0]:
                self._see(getattr(tensor, name), category)
            return
        self._see_storage(tensor.untyped_storage(), category)

    def _see_storage(self, storage, category):
        """Register a storage if it is new, and record its size, and its category if it is known."""
        if storage.device.type != self.device.type:
            return
        number = self._number.get(storage._cdata)
        if number is None:
            number = self._number[storage._cdata] = len(self._size)
            self._size.append(0)
            self._category.append(self._category_of_new())
            # A weak reference: a storage that outlives the trace must not keep it, and with it the model, alive.
            weakref.finalize(storage, _freed, weakref.ref(self), number, storage._cdata).atexit = False
        self._change(number, storage.nbytes())
        if category:
            self._category[number] = category

    def _change(self, number, size):
        if size > self._size[number]:
            # gloo's threads hold a collective's buffers slightly longer than the work takes, and need the interpreter
            # lock to free them. Without this yield, about every second peak includes an unused buffer.
            os.sched_yield()
        if size != self._size[number]:
            event = (number, size - self._size[number], self._phase(), self._operator)
            self._events.append(event)
            self._size[number] = size

    def _watch_resize(self):
        """Trace ``resize_`` of storages, by which FSDP frees and restores gathered parameters: it is no operator."""
        original = torch.UntypedStorage.resize_

        def resize(storage, size):
            result = original(storage, size)
            self._see_storage(storage, "all-gather")
            return result

        torch.UntypedStorage.resize_ = resize
        return lambda: setattr(torch.UntypedStorage, "resize_", original)

    def _count(self, name, args, result):
        kind, position, category = COLLECTIVES[name]
        whole = result if position is None else args[position]
        tensors = tensors_in(whole)
        size = sum(t.nbytes for t in tensors)
        if kind == "all-to-all":  # a rank may receive more than it sends, or less
            size = max(size, args[1].nbytes)
        in_context, ranks = group_name(args) in self._context_groups, members(args)
        dimension = "context" if in_context else self._dimensions.get(ranks)
        self.collectives[kind, size, dimension] += 1
        category = None if in_context else category  # keys, values, and their gradients are no parameters
        for tensor in tensors:
            self._see(tensor, category)
            if category == "reduce-scatter":
                self._mark_sources(self._numbers([tensor])[0])

    def _mark_sources(self, number):
        """Assign the category of a reduce-scatter's input to the temporary tensors that were packed into it."""
        for source in self._packed_from.pop(number, ()):
            if self._category[source] == "temporary":
                self._category[source] = "reduce-scatter"
                self._mark_sources(source)

    def _numbers(self, tensors):
        addresses = [t.untyped_storage()._cdata for t in tensors]
        return [self._number[a] for a in addresses if a in self._number]

    def _before_optimizer(self, *_):
        self._see_persistent()  # the gradients are complete
        self._in_optimizer = self.stepped = True

    def _after_optimizer(self, *_):
        self._see_persistent()  # state that this step created
        self._in_optimizer = False

    def _see_persistent(self):
        for category, tensor in persistent_tensors(self.model, self.optimizer):
            self._see(tensor, category)

    # Results

    def traced(self) -> tuple[dict, list[tuple], Counter]:
        """Return ({category: live bytes at the start}, [(phase, operator, category, change in bytes), …], collectives)."""
        start = dict.fromkeys(CATEGORIES, 0)
        for number, size in self._baseline.items():
            start[self._category[number]] += size
        events = [(phase, operator, self._category[number], change) for number, change, phase, operator in self._events]
        return start, events, self.collectives

    def timeline(self) -> list[dict]:
        """Return ``snapshots`` of the step."""
        return snapshots(*self.traced()[:2])


def snapshots(start: dict, events: list[tuple]) -> list[dict]:
    """Return a snapshot of the live bytes by category at the start of a step and after each change.

    Args:
        start, events: as ``StepTrace.traced`` returns them.

    Returns:
        [{"phase", "operator", category: bytes, …}, …]; phase is "start", "forward", "backward", or "optimizer".
    """
    live = dict(start)
    timeline = [{"phase": "start", "operator": "start", **live}]
    for phase, operator, category, change in events:
        live[category] += change
        timeline.append({"phase": phase, "operator": operator, **live})
    return timeline


def listed(collectives: dict) -> list[dict]:
    """Convert ``StepTrace.collectives`` to the form of a record: [{"kind", "bytes", "dimension", "count"}, …]."""
    ordered = sorted(collectives.items(), key=lambda item: (*item[0][:2], item[0][2] or ""))
    return [{"kind": k, "bytes": b, "dimension": d, "count": n} for (k, b, d), n in ordered]


def _freed(trace, number: int, address: int):
    """Record that a storage has been freed, if its trace (a weak reference) still exists."""
    if trace := trace():
        trace._change(number, 0)
        trace._number.pop(address, None)


def peak(timeline: list[dict]) -> tuple[dict, int]:
    """Return the peak snapshot of a timeline and its bytes.

    Of several equal peaks the last counts: an earlier one may include a gathered buffer that its backend freed late.

    Args:
        timeline: as ``StepTrace.timeline`` returns it.
    """
    highest = max(reversed(timeline), key=total)
    return highest, total(highest)


def total(snapshot: dict) -> int:
    """Return the live bytes of one snapshot of a timeline, of all categories."""
    return sum(snapshot[category] for category in CATEGORIES)
