# SPDX-License-Identifier: BSD-3-Clause
"""List what cannot be combined among the options of plan.py. Imports no torch."""

from labkit.running.options import GIVEN, Conflict, flag, several

DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in range(4))


def leave_out(when: dict, names: tuple, sentence: str) -> tuple[Conflict, ...]:
    """Return a conflict with ``when`` for each of these options."""
    return tuple(Conflict(when, {name: GIVEN}, sentence) for name in names)


CONFLICTS = (
    *(
        Conflict(
            {"strategy": DEEPSPEED},
            {name: GIVEN},
            f"{flag(name)} is not predicted for DeepSpeed: leave it out, or take another --strategy",
        )
        for name in ("weights", "loss_chunks", "lora")
    ),
    Conflict(
        {"strategy": "fsdp1"},
        {"cpu_offload": True},
        "--cpu-offload is not predicted for FSDP1: take --strategy fsdp2",
    ),
    Conflict(
        {"wrap": "blocks+embeddings"},
        {"strategy": ("single", "ddp", "zero1", *DEEPSPEED)},
        "--wrap blocks+embeddings goes with --strategy fsdp1 or fsdp2; with {c.strategy} leave it out",
    ),
    Conflict(
        {"flops": None},
        {"lacks_bf16": True},
        "{c.gpu} has no bf16: use --precision fp16, which takes as much memory, and scales the loss",
    ),
    Conflict(
        {"flops": None},
        {"peak_known": False},
        "no peak is known of {c.gpu} in {c.precision}: give --flops, or another --precision",
    ),
    Conflict(
        {"precision": "fp16"},
        {"simulates": True},
        "--precision fp16 is not simulated: use bf16, which takes as much memory",
    ),
    *leave_out(
        {"sweep": True},
        ("simulate", "explain", "module"),
        "--sweep compares predictions of the course's models: leave --simulate, --explain and --module out",
    ),
    Conflict(
        {"module": GIVEN},
        {"explain": True},
        "--explain shows predicted terms, and the peak of --module is simulated: leave it out",
    ),
    Conflict(
        {"simulates": True},
        {"strategy": DEEPSPEED},
        "--strategy {c.strategy} cannot be simulated: take fsdp2 (ZeRO-3; with --reshard-after-forward false, ZeRO-2)",
    ),
    Conflict(
        {"simulate": True},
        {"strategy": "zero1"},
        "--strategy zero1 is simulated with --module only: take single, ddp, fsdp1 or fsdp2",
    ),
    Conflict(
        {"module": GIVEN},
        {"decided_by_module": GIVEN},
        "{c.decided_by_module[0]} is for the course's models; your own function determines it: leave it out",
    ),
    Conflict(
        {"module": GIVEN},
        {"precision": "fp64"},
        "--precision fp64 is for the course's models: your own function creates its tensors",
    ),
    *(
        Conflict(
            {"simulate": True},
            excluded,
            "neither --cpu-offload, adamw-8bit, lion nor nf4 is simulated: leave --simulate out",
        )
        for excluded in ({"cpu_offload": True}, {"optimizer": ("adamw-8bit", "lion")}, {"frozen": "nf4"})
    ),
    *leave_out(
        {"offload_activations": True},
        ("simulate", "sweep"),
        "--offload-activations is neither simulated nor swept: leave --simulate and --sweep out",
    ),
    Conflict(
        {"experts": GIVEN},
        {"strategy": ("zero1", *DEEPSPEED)},
        "--experts {c.experts} is planned for gpt_fsdp.py: take --strategy fsdp2, ddp or single",
    ),
    Conflict(
        {"experts": GIVEN},
        {"simulate": True},
        "--experts {c.experts} is not simulated, as fake tensors choose no experts: leave --simulate out",
    ),
    Conflict(
        {"ep_degree": 1, "sweep": False},
        {"imbalance": GIVEN},
        "--imbalance is the load of a rank that has some of the experts: give --mesh shard={c.ranks},expert=N, too",
    ),
    Conflict(
        {"third_party": True},
        {"experts": GIVEN},
        "--experts is for the course's models; a model's configuration determines them: leave it out",
    ),
    Conflict(
        {"third_party": True},
        {"tied": GIVEN},
        "--tied is for the course's models; a model's configuration determines it: leave it out",
    ),
    Conflict(
        {"third_party": True},
        {"cp_degree": several},
        "--mesh {c.mesh} shares each sequence, which is planned for the course's models only: leave context out",
    ),
    Conflict(
        {"third_party": True},
        {"pipelined": True},
        "--mesh {c.mesh} is planned for the course's models only: leave --config and --model out, or the pipeline",
    ),
    Conflict(
        {"third_party": True},
        {"too_long": True},
        "--seq-len {c.seq_len} is longer than the {c.longest} learned positions of this model",
    ),
    Conflict(
        {"library_simulated": True},
        {"lacking": GIVEN},
        "hf_fsdp.py, which is simulated, has no {c.lacking[0]}: leave it out",
    ),
    Conflict(
        {"shape": None, "third_party": True},
        {"ep_degree": several},
        "--mesh {c.mesh}: what ranks exchange depends on the experts that tokens choose: plan shard without expert, or "
        "measure it with hf_fsdp.py --record",
    ),
    Conflict(
        {"third_party": True},
        {"ep_degree": several},
        "--mesh {c.mesh} stores {c.stored_with_experts} on a rank between steps, and its peak depends on the experts that "
        "tokens choose: plan shard without expert, or measure it with hf_fsdp.py --record",
    ),
    *leave_out(
        {"by_library": True},
        ("sweep", "find", "explain", "plot"),
        "{c.why_simulated}: it can only be simulated, without --sweep, --find, --explain and --plot",
    ),
    Conflict(
        {"by_library": True, "shape": None},
        {"tokens": GIVEN},
        "no time is planned of this model, as {c.why_simulated}: leave --tokens out",
    ),
    Conflict(
        {"pipelined": True},
        {"lacking": GIVEN},
        "a pipeline is not planned together with {c.lacking[0]}: leave one of them out",
    ),
    *leave_out(
        {"pipelined": True},
        ("sweep", "simulate"),
        "--mesh {c.mesh} is neither swept nor simulated: leave --sweep and --simulate out",
    ),
    Conflict(
        {"pipelined": False},
        {"schedule": GIVEN},
        "--schedule is a pipeline's: give --mesh pipeline=STAGES too",
    ),
    *leave_out(
        {"find": GIVEN},
        ("sweep", "simulate", "explain", "module", "plot", "tokens"),
        "--find compares predictions: leave --sweep, --simulate, --explain, --module, --plot and --tokens out",
    ),
    *(
        Conflict(
            {"find": "ranks"},
            excluded,
            "--find ranks tries all numbers of ranks: leave out --mesh, --strategy single and a number in "
            "--reshard-after-forward",
        )
        for excluded in ({"mesh": GIVEN}, {"reshard_after_forward": str.isdecimal}, {"strategy": "single"})
    ),
    *(
        Conflict(
            searching,
            {"cpu_offload": True},
            f"{what} compares GPU memory, and --cpu-offload needs CPU memory: leave one of them out",
        )
        for what, searching in {"--sweep": {"sweep": True}, "--find ranks": {"find": "ranks"}}.items()
    ),
    *leave_out(
        {"plot": GIVEN},
        ("sweep", "module", "pipelined", "json"),
        "--plot draws the plan of one rank: leave --sweep, --json, --module and a pipeline out",
    ),
    *leave_out({"tokens": GIVEN}, ("sweep", "module"), "--tokens is for one plan: leave --sweep and --module out"),
)
