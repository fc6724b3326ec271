# SPDX-License-Identifier: BSD-3-Clause
"""List what cannot be combined with a mixture of experts in gpt_fsdp.py. Imports no torch."""

from planner.parallel import muon

from labkit.running.options import GIVEN, Conflict, several

EXPERT_CONFLICTS = (
    *(
        Conflict({"experts": GIVEN}, excluded, f"--experts {{c.experts}} {why}")
        for excluded, why in (
            ({"strategy": "fsdp1"}, "is not validated with FSDP1: use --strategy fsdp2, ddp or single"),
            ({"precision": "fp16"}, "is not validated in fp16: use --precision bf16 or fp32"),
            ({"lora": GIVEN}, "is not for adapters: leave --lora out"),
            ({"compile": True}, "has tensors whose sizes change from step to step: leave --compile out"),
            ({"tp_degree": several}, "is not split by tensor parallelism: leave tensor out of --mesh"),
            (
                {"optimizer": muon.WAYS},
                "stacks matrices in one parameter, which Muon does not update: use --optimizer adamw",
            ),
            (
                {"recompute": ("selective", "alternate")},
                "needs --recompute full or none: its matmuls and exchanges are not among those saved",
            ),
        )
    ),
    Conflict(
        {"experts": GIVEN, "precision": "bf16", "weights": "fp32"},
        {"strategy": ("single", "ddp")},
        "autocast does not cast the matmuls of --experts: use --strategy fsdp2, --weights bf16, or --precision fp32",
    ),
    *(
        Conflict(
            {"experts": GIVEN, "cp_degree": several},
            excluded,
            f"--mesh {{c.mesh}} shares each sequence, and {what} counts the tokens of whole ones: leave one of them out",
        )
        for what, excluded in {
            "--capacity-factor": {"capacity_factor": GIVEN},
            "--balance loss": {"balance": "loss"},
        }.items()
    ),
    *(
        Conflict({"experts": GIVEN, "ep_degree": several}, excluded, f"--mesh {{c.mesh}} spreads experts, {why}")
        for excluded, why in (
            ({"replicas": several}, "which is not implemented with replicas: leave replicate out"),
            ({"prefetch": GIVEN}, "whose units FSDP2 gathers by its default only: leave --prefetch out"),
            ({"cpu_offload": True}, "which is not validated with --cpu-offload: leave one of them out"),
            (
                {"reshard_after_forward": str.isdecimal},
                "which has no parts to keep after forward: use --reshard-after-forward true or false",
            ),
            ({"optimizer": "adamw-bf16"}, "which is not validated with --optimizer adamw-bf16: use adamw"),
        )
    ),
)
