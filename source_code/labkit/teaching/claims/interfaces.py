# SPDX-License-Identifier: BSD-3-Clause
"""Claims about PyTorch's interfaces, each tried on the PyTorch that is installed."""

from labkit.teaching.claims import Case, Claim


def tried(name: str):
    """Return a function that makes cases of what was tried under a name: 1 where it worked, 0 where it did not."""

    def cases(evidence) -> list[Case]:
        return [Case({"tried": what}, float(worked), "measured") for what, worked in evidence[name].items()]

    return cases


def loading(evidence) -> list[Case]:
    """Return a case for each way to save on 4 ranks, and each number of ranks that have tried to load it."""
    failed = evidence["loading fails"].items()
    return [Case({"way": way, "ranks": ranks}, float(fails), "measured") for (way, ranks), fails in failed]


CLAIMS = {
    "N shards": Claim(
        "N shards need N ranks to load.",
        "blog",
        "07",
        "1: another number of ranks cannot load",
        (1, 1),
        "each rank has saved its own shard with torch.save; torch.distributed.checkpoint reads its shards for any ranks",
        when=lambda way, **_: way == "torch.save",
        measured=loading,
    ),
    "OffloadPolicy": Claim(
        'OffloadPolicy(offload_type="cpu") offloads to the CPU.',
        "course",
        "06",
        "1: it exists",
        (1, 1),
        "FSDP2 has CPUOffloadPolicy(); OffloadPolicy() is its base class, and offloads nothing",
        measured=tried("OffloadPolicy"),
    ),
    "checkpointing option": Claim(
        "FSDP(model, activation_checkpointing=True) recomputes activations.",
        "course",
        "08",
        "1: it exists",
        (1, 1),
        "it is a setting of Accelerate's plugin; in PyTorch, torch.utils.checkpoint and apply_activation_checkpointing do it",
        measured=tried("activation_checkpointing"),
    ),
}
