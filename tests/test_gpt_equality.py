# SPDX-License-Identifier: BSD-3-Clause
"""The transformer lab computes the same training however it is shared: the losses of all ranks are those of one process.

What is combined with a way of sharing: recomputing, accumulating, clipping, adapters, tied weights, optimizers. The
plain ways are in test_parity.py, adamw-for-loop in test_optimizer_options.py. Within 1e-9 in float64; in fp32 a few,
within 1e-5.
Two ranks show what four do; these have the meshes that need them, and one more of each strategy. Starting ranks takes
longer than a configuration: so all of them run one after the other in the same ranks. The model is narrow and has three
blocks, and a step up to three micro-batches, a first one, a last one and one between: what is tested does not depend on more.
"""

import dataclasses
import json

import gpt_fsdp
import pytest
from forked import by_value
from labkit.measuring import meters
from labkit.running import launch, notebook_ranks
from planner.models import shapes

pytestmark = pytest.mark.long
HERE = launch.Cluster(launcher="local")
STEPS, SEQUENCES, EVALUATED = 4, 12, 8
SMALL = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3}  # a quarter of the smallest model's width
LORA = {"lora": 4, "lr": 0.05}
CLIPPED = {"clip": 0.4}  # below most of the norms that occur
THREE = {"accumulate": 3}
LAST = THREE | {"sync": "last"}
FULL, SELECTIVE, ALTERNATE = ({"recompute": how} for how in ("full", "selective", "alternate"))
EVERY_SECOND = {"recompute_every": 2}
CHUNKS = {"loss_chunks": 3}  # of unequal length
APART = {"wrap": "blocks+embeddings"}
TIED = {"tied": True}
DDP, FSDP1, FSDP2 = ({"strategy": strategy} for strategy in ("ddp", "fsdp1", "fsdp2"))
KEEP = {"reshard_after_forward": "false"}
PAIRS = {"reshard_after_forward": "2"}
HYBRID = {"mesh": "2x2"}
AHEAD = FSDP2 | {"prefetch": 2} | CHUNKS
FUSED = {"optimizer": "adamw-fused"}
SGD, MOMENTUM = ({"optimizer": name, "lr": 0.1} for name in ("sgd", "momentum"))

FP64 = {
    2: {
        "ddp, recompute full, frozen base": DDP | FULL | LORA,
        "ddp, recompute selective": DDP | SELECTIVE,
        "ddp, recompute alternate, loss in chunks, accumulate 3, clipped": DDP | ALTERNATE | CHUNKS | THREE | CLIPPED,
        "fsdp1, kept after forward, recompute selective": FSDP1 | KEEP | SELECTIVE,
        "fsdp1, frozen base, recompute full": FSDP1 | LORA | FULL,
        "fsdp1, every second block recomputed, tied, loss in chunks": FSDP1 | FULL | EVERY_SECOND | TIED | CHUNKS,
        "fsdp1, apart, recompute alternate, accumulate 3 with the last's sum": FSDP1 | APART | ALTERNATE | LAST,
        "fsdp2, tied, recompute full, accumulate 3": FSDP2 | TIED | FULL | THREE,
        "fsdp2, frozen base, recompute selective": FSDP2 | LORA | SELECTIVE,
        "fsdp2, frozen base, kept after forward, accumulate 3 with the last's sum": FSDP2 | LORA | KEEP | LAST,
        "fsdp2, kept after forward, tied, recompute full, adamw-fused": FSDP2 | KEEP | TIED | FULL | FUSED,
        "fsdp2, apart, prefetch 2, loss in chunks, momentum": AHEAD | APART | MOMENTUM,
        "fsdp2, every second block recomputed, tied, loss in chunks": FSDP2 | SELECTIVE | EVERY_SECOND | TIED | CHUNKS,
        "fsdp2, prefetch 2, loss in chunks, frozen base, accumulate 3 with the last's sum": AHEAD | LORA | LAST,
        "fsdp2, offloaded, clipped": FSDP2 | {"cpu_offload": True} | CLIPPED,
        "fsdp2, sgd, tied": FSDP2 | SGD | TIED,
    },
    4: {
        "ddp, tied, accumulate 3 with the last's sum, clipped": DDP | TIED | LAST | CLIPPED,
        "fsdp1, kept after forward, accumulate 3 with the last's sum": FSDP1 | KEEP | LAST,
        "fsdp1, 2x2, tied": FSDP1 | HYBRID | TIED,
        "fsdp2, accumulate 3 with the last's sum, clipped": FSDP2 | LAST | CLIPPED,
        "fsdp2, kept by pairs, tied, recompute selective": FSDP2 | PAIRS | TIED | SELECTIVE,
        "fsdp2, 2x2, tied, recompute full, clipped": FSDP2 | HYBRID | TIED | FULL | CLIPPED,
        "fsdp2, 2x2, accumulate 3 with the last's sum": FSDP2 | HYBRID | LAST,
        "fsdp2, apart, 2x2, kept by pairs, recompute alternate, frozen base": FSDP2
        | APART
        | HYBRID
        | PAIRS
        | ALTERNATE
        | LORA,
    },
}
FP32 = {
    2: {
        "fsdp1, kept after forward, accumulate 3 with the last's sum, clipped": FSDP1 | KEEP | LAST | CLIPPED,
        "fsdp2, frozen base, recompute selective": FSDP2 | LORA | SELECTIVE,
        "fsdp2, kept after forward, tied, recompute full": FSDP2 | KEEP | TIED | FULL,
    }
}  # FSDP1 clips only here: it computes the norm in fp32
# One process: what recomputes or accumulates must be the plain loop too.
ALONE = {
    "single, recompute full": FULL,
    "single, recompute selective": SELECTIVE,
    "single, accumulate 3": THREE,
    "single, every second block recomputed, alternate": ALTERNATE | EVERY_SECOND,
    "single, loss in chunks, accumulate 3, tied": CHUNKS | THREE | TIED,
    "single, accumulate 3 with the last's sum, frozen base, tied": LAST | LORA | TIED,
}
BY_PRECISION = {"fp64": FP64 | {1: ALONE}, "fp32": FP32}
CASES = [(precision, n, name) for precision, of in BY_PRECISION.items() for n, cases in of.items() for name in cases]
# bf16 throughout rounds what each strategy adds up otherwise, so that losses are near, not equal.
PURE = {"precision": "bf16", "weights": "bf16"}
NEAR = {"ddp": DDP, "fsdp1": FSDP1, "fsdp2": FSDP2, "fsdp2, apart, loss in chunks": FSDP2 | APART | CHUNKS}
SAME_LOSSES = ("tied", "clip", "lora", "lr", "optimizer", "precision")  # a reference is a plain run with these


def options_of(precision: str, ranks: int, name: str) -> dict:
    return BY_PRECISION[precision][ranks][name] | {"precision": precision}


def reference_of(options: dict) -> str:
    kept = {name: options[name] for name in SAME_LOSSES if name in options}
    if kept.get("optimizer", "").startswith("adamw"):
        del kept["optimizer"]  # its implementations compute the same
    return json.dumps(kept, sort_keys=True)


def jobs(ranks: int, cases: list, near: list) -> dict[str, dict]:
    """What the program does on that many ranks, of some of CASES and of NEAR: {key: options}."""
    mine = {str(case): options_of(*case) for case in cases if case[1] == ranks}
    if ranks == 1:
        references = {reference_of(options_of(*case)) for case in cases}
        return mine | {"pure": PURE} | {key: json.loads(key) for key in references}
    return mine | ({str(("pure", name)): NEAR[name] | PURE for name in near} if ranks == 2 else {})


def train_all(me, cases, near):
    """{key: the losses of the steps, then the validation loss} of every job, one after the other."""
    sizes = shapes.GPT_SHAPES
    sizes["tiny"] = dataclasses.replace(sizes["tiny"], **SMALL)
    meters.TRACED_STEPS = range(0)  # tracing takes much of a short run's time, and here the losses are asked for
    gpt_fsdp.VALIDATION_SEQUENCES = EVALUATED
    losses = {}
    for key, options in jobs(me.world_size, cases, near).items():
        batch = SEQUENCES // me.world_size // options.get("accumulate", 1)
        options = {"strategy": "single", "max_steps": STEPS, "seq_len": 32, "batch_size": batch} | options
        result = gpt_fsdp.train(gpt_fsdp.Config(**options), me)
        losses[key] = [*result["losses"], result["validation_loss"]]
    return losses


@pytest.fixture(scope="module")
def losses(selected):
    some, found = (selected(CASES), selected(NEAR)), {}
    for ranks in (1, 2, 4):
        found |= notebook_ranks.on_ranks(by_value(train_all), *some, ranks=ranks, cluster=HERE, timeout=900)[0]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}, {case[1]} ranks, {case[0]}")
def test_losses_are_those_of_one_process(case, losses):
    reference = losses[reference_of(options_of(*case))]
    assert len(reference) == STEPS + 1
    assert reference[STEPS - 1] < reference[0]
    assert losses[str(case)] == pytest.approx(reference, rel=1e-9 if case[0] == "fp64" else 1e-5)


@pytest.mark.parametrize("name", NEAR)
def test_bf16_weights_learn_alike(name, losses):
    assert losses["pure"][STEPS - 1] < losses["pure"][0] - 0.1
    assert losses[str(("pure", name))] == pytest.approx(losses["pure"], rel=3e-3)
