# SPDX-License-Identifier: BSD-3-Clause
"""Group the methods of FSDP2's modules by what they choose (chapter 09's table; docs/knobs.md has one row for each)."""

CHOOSE = {  # {what its methods choose: their names}
    "**when a parameter is whole** (memory against traffic, or time)": [
        "reshard",
        "unshard",
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_unshard_in_backward",
        "set_keep_unsharded_storage",
        "set_modules_to_forward_prefetch",
        "set_modules_to_backward_prefetch",
    ],
    "**when a gradient is whole** (memory against traffic)": ["set_requires_gradient_sync"],
    "when replicas reduce, under HSDP (traffic; what waits is a shard)": ["set_requires_all_reduce"],
    "how collectives run (time, and memory of buffers and groups)": [
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_all_reduce_hook",
        "set_separate_reduce_scatter_group",
        "set_reduce_scatter_max_input_buffers",
        "set_symm_mem_for_comm",
        "set_allocate_memory_from_process_group_for_comm",
    ],
    "what a reduction computes (numerics)": [
        "set_gradient_divide_factor",
        "set_reduce_scatter_divide_factor",
        "set_force_sum_reduction_for_comms",
        "set_reduce_scatter_unused_params",
    ],
    "a step's bookkeeping (order)": [
        "set_is_last_backward",
        "set_manual_backward_finalization",
        "finalize_backward",
        "set_post_optim_event",
        "reset_iter_state",
    ],
}


def names(me=None) -> list[str]:
    """Return the public methods of the installed ``FSDPModule``. me: this rank, if run on ranks."""
    from torch.distributed.fsdp import FSDPModule

    return [name for name in vars(FSDPModule) if not name.startswith("_")]


def missing(installed: list[str]) -> list[str]:
    """Return the installed methods that are in no group."""
    known = {name for methods in CHOOSE.values() for name in methods}
    return [name for name in installed if name not in known]


def table(installed: list[str]) -> str:
    """Return the groups as a Markdown table. installed: the methods of the PyTorch in use; others are newer."""
    lines = ["| what they choose | methods |", "|---|---|"]
    for choice, methods in CHOOSE.items():
        shown = [f"`{name}`" + " (in a newer PyTorch)" * (name not in installed) for name in methods]
        lines.append(f"| {choice} | {', '.join(shown)} |")
    return "\n".join(lines)
