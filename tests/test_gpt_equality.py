# SPDX-License-Identifier: BSD-3-Clause
"""The transformer lab computes the same training however it is shared: the losses of 4 ranks are those of one process.

What is combined with a way of sharing: recomputing, accumulating, clipping, adapters, tied weights, optimizers. The
plain ways are in test_parity.py. Within 1e-9 in float64; in fp32 a handful, within 1e-5.
Starting four ranks takes longer than a configuration: so all of them run one after the other in the same ranks, and the
model is narrow and has three blocks, a first one, a last one and one between: what is tested does not depend on more.
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
STEPS, SEQUENCES, RANKS = 6, 16, 4
SMALL = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3}  # a quarter of the smallest model's width
LORA = {"lora": 4, "lr": 0.02}
CLIPPED = {"clip": 0.4}  # below most of the norms that occur
FOUR = {"accumulate": 4}
LAST = FOUR | {"sync": "last"}
FULL, SELECTIVE, ALTERNATE = ({"recompute": how} for how in ("full", "selective", "alternate"))
EVERY_SECOND = {"recompute_every": 2}
CHUNKS = {"loss_chunks": 3}  # of unequal length
APART = {"wrap": "blocks+embeddings"}
TIED = {"tied": True}
DDP, FSDP1, FSDP2 = ({"strategy": strategy} for strategy in ("ddp", "fsdp1", "fsdp2"))
KEEP = {"reshard_after_forward": "false"}
PAIRS = {"reshard_after_forward": "2"}
HYBRID = {"mesh": "2x2"}

FP64 = {
    "ddp, tied, accumulate 4 with the last's sum, clipped": DDP | TIED | LAST | CLIPPED,
    "ddp, recompute full, frozen base": DDP | FULL | LORA,
    "ddp, recompute selective": DDP | SELECTIVE,
    "ddp, recompute alternate, loss in chunks, accumulate 4, clipped": DDP | ALTERNATE | CHUNKS | FOUR | CLIPPED,
    "fsdp1, tied, recompute full": FSDP1 | TIED | FULL,
    "fsdp1, kept after forward, recompute selective": FSDP1 | KEEP | SELECTIVE,
    "fsdp1, kept after forward, accumulate 4 with the last's sum": FSDP1 | KEEP | LAST,
    "fsdp1, frozen base": FSDP1 | LORA,
    "fsdp1, 2x2, tied": FSDP1 | HYBRID | TIED,
    "fsdp1, every second block recomputed, tied, loss in chunks": FSDP1 | FULL | EVERY_SECOND | TIED | CHUNKS,
    "fsdp1, apart, recompute alternate, accumulate 4 with the last's sum": FSDP1 | APART | ALTERNATE | LAST,
    "fsdp2, tied, recompute full, accumulate 4": FSDP2 | TIED | FULL | FOUR,
    "fsdp2, accumulate 4 with the last's sum, clipped": FSDP2 | LAST | CLIPPED,
    "fsdp2, frozen base, recompute selective": FSDP2 | LORA | SELECTIVE,
    "fsdp2, frozen base, kept after forward, accumulate 4 with the last's sum": FSDP2 | LORA | KEEP | LAST,
    "fsdp2, kept after forward, tied, recompute full": FSDP2 | KEEP | TIED | FULL,
    "fsdp2, kept by pairs, tied, recompute selective": FSDP2 | PAIRS | TIED | SELECTIVE,
    "fsdp2, 2x2, tied, recompute full, clipped": FSDP2 | HYBRID | TIED | FULL | CLIPPED,
    "fsdp2, 2x2, accumulate 4 with the last's sum": FSDP2 | HYBRID | LAST,
    "fsdp2, 2x2, frozen base, kept by pairs": FSDP2 | HYBRID | LORA | PAIRS,
    "fsdp2, prefetch 2": FSDP2 | {"prefetch": 2},
    "fsdp2, apart, prefetch 2, loss in chunks": FSDP2 | APART | {"prefetch": 2} | CHUNKS,
    "fsdp2, apart, 2x2, kept by pairs, recompute alternate, frozen base": FSDP2
    | APART
    | HYBRID
    | PAIRS
    | ALTERNATE
    | LORA,
    "fsdp2, every second block recomputed, tied, loss in chunks": FSDP2 | SELECTIVE | EVERY_SECOND | TIED | CHUNKS,
    "fsdp2, loss in chunks, frozen base, accumulate 4 with the last's sum": FSDP2 | CHUNKS | LORA | LAST,
    "fsdp2, offloaded, clipped": FSDP2 | {"cpu_offload": True} | CLIPPED,
    "fsdp2, adamw-fused": FSDP2 | {"optimizer": "adamw-fused"},
    "fsdp2, adamw-for-loop": FSDP2 | {"optimizer": "adamw-for-loop"},
    "fsdp2, momentum": FSDP2 | {"optimizer": "momentum", "lr": 0.1},
    "fsdp2, sgd, tied": FSDP2 | {"optimizer": "sgd", "lr": 0.1} | TIED,
}
FP32 = {
    name: FP64[name]
    for name in (
        "fsdp2, frozen base, recompute selective",
        "fsdp2, kept after forward, tied, recompute full",
        "fsdp1, kept after forward, accumulate 4 with the last's sum",
    )
} | {"fsdp1, clipped": FSDP1 | CLIPPED}  # not in float64: FSDP1 computes the norm in fp32
CASES = [("fp64", name) for name in FP64] + [("fp32", name) for name in FP32]
# One process: what recomputes or accumulates must be the plain loop too.
ALONE = {
    "single, recompute full": FULL,
    "single, recompute selective": SELECTIVE,
    "single, accumulate 4": FOUR,
    "single, every second block recomputed, alternate": ALTERNATE | EVERY_SECOND,
    "single, loss in chunks, accumulate 4, tied": CHUNKS | FOUR | TIED,
    "single, accumulate 4 with the last's sum, frozen base, tied": LAST | LORA | TIED,
}
# bf16 throughout rounds what each strategy adds up otherwise, so that losses are near, not equal.
PURE = {"precision": "bf16", "weights": "bf16"}
NEAR = {"ddp": DDP, "fsdp1": FSDP1, "fsdp2": FSDP2, "fsdp2, apart, loss in chunks": FSDP2 | APART | CHUNKS}
SAME_LOSSES = ("tied", "clip", "lora", "lr", "optimizer", "precision")  # a reference is a plain run with these


def reference_of(options: dict) -> str:
    kept = {name: options[name] for name in SAME_LOSSES if name in options}
    if kept.get("optimizer", "").startswith("adamw"):
        del kept["optimizer"]  # its implementations compute the same
    return json.dumps(kept, sort_keys=True)


def jobs(ranks: int) -> dict[str, dict]:
    """What the program does on that many ranks: {key: options}."""
    cases = {str((precision, name)): (FP64 | FP32)[name] | {"precision": precision} for precision, name in CASES}
    alone = {str(("fp64", name)): options | {"precision": "fp64"} for name, options in ALONE.items()}
    if ranks > 1:
        return cases | {str(("pure", name)): options | PURE for name, options in NEAR.items()}
    return {"pure": PURE} | alone | {key: json.loads(key) for key in map(reference_of, (cases | alone).values())}


def train_all(me):
    """{key: the losses of the steps, then the validation loss} of every job, one after the other."""
    sizes = shapes.GPT_SHAPES
    sizes["tiny"] = dataclasses.replace(sizes["tiny"], **SMALL)
    meters.TRACED_STEPS = range(0)  # tracing takes much of a short run's time, and here the losses are asked for
    losses = {}
    for key, options in jobs(me.world_size).items():
        batch = SEQUENCES // me.world_size // options.get("accumulate", 1)
        options = {"strategy": "single", "max_steps": STEPS, "seq_len": 32, "batch_size": batch} | options
        result = gpt_fsdp.train(gpt_fsdp.Config(**options), me)
        losses[key] = [*result["losses"], result["validation_loss"]]
    return losses


@pytest.fixture(scope="module")
def losses():
    alone, shared = (
        notebook_ranks.on_ranks(by_value(train_all), ranks=ranks, cluster=HERE, timeout=900)[0] for ranks in (1, RANKS)
    )
    return alone | shared


@pytest.mark.parametrize(("precision", "name"), [*CASES, *(("fp64", name) for name in ALONE)])
def test_losses_are_those_of_one_process(precision, name, losses):
    options = (FP64 | FP32 | ALONE)[name] | {"precision": precision}
    reference = losses[reference_of(options)]
    assert len(reference) == STEPS + 1
    assert reference[STEPS - 1] < reference[0]
    assert losses[str((precision, name))] == pytest.approx(reference, rel=1e-9 if precision == "fp64" else 1e-5)


@pytest.mark.parametrize("name", NEAR)
def test_bf16_weights_learn_alike(name, losses):
    assert losses["pure"][STEPS - 1] < losses["pure"][0] - 0.1
    assert losses[str(("pure", name))] == pytest.approx(losses["pure"], rel=3e-3)
