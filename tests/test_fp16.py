# SPDX-License-Identifier: BSD-3-Clause
"""--precision fp16: the scaler of FSDP2 and FSDP1 skips a step on all ranks if one of them overflows, and is saved.

On two ranks; on four what has replicas.
"""

import dataclasses

import gpt_fsdp
import pytest
import torch
from commands import refused
from forked import by_value
from labkit.measuring import meters
from labkit.measuring.trace import local
from labkit.running import launch, notebook_ranks
from labkit.training import checkpoints, loss_scaling, text
from labkit.training.saving import save
from planner import gpus
from planner.models import shapes

HERE = launch.Cluster(launcher="local")
SHARDED = ("fsdp2", "fsdp1")
SEQUENCES = 8  # in a step, of all ranks together
CASES = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp1": {"strategy": "fsdp1"},
    "ddp": {"strategy": "ddp"},
    "single precision": {"strategy": "fsdp2", "precision": "fp32"},
    "fsdp2, two replicas": {"strategy": "fsdp2", "mesh": "2x2"},
    "fsdp2, accumulated": {"strategy": "fsdp2", "accumulate": 2, "sync": "last", "batch_size": SEQUENCES // 4},
    "fsdp2, adapters": {"strategy": "fsdp2", "lora": 2},
}
OVERFLOWS = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp2, adamw-fused": {"strategy": "fsdp2", "optimizer": "adamw-fused"},
    "ddp": {"strategy": "ddp"},
}
STEPS, SAFE, HIGH = 4, 2.0**8, 2.0**40  # scales at which these gradients do not overflow, and do


def configured(**given):
    """The options of a small run, of which only losses are asked."""
    meters.TRACED_STEPS = range(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    shapes.GPT_SHAPES["tiny"] = dataclasses.replace(shapes.GPT_SHAPES["tiny"], **sizes)
    return gpt_fsdp.Config(**{"precision": "fp16", "seq_len": 16, "batch_size": 2} | given)


class Run:
    """A run whose steps the test takes one by one."""

    def __init__(self, me, config, scale=SAFE):
        self.config, self.me, self.tokens = config, me, text.load(me.device).train
        self.model, self.optimizer, self.step = gpt_fsdp.prepare(config, me)
        self.scaler = loss_scaling.scaler_of(self.optimizer)
        loss_scaling.set_scale(self.optimizer, scale)

    def train(self, steps):
        """This rank's loss of each of these steps."""
        batches = gpt_fsdp.training_batches(self.tokens, self.config, self.me, steps)
        return [sum(self.step(*batch)).item() for batch in batches]

    def weights(self):
        return torch.cat([local(parameter.detach()).flatten().clone() for parameter in self.model.parameters()])


def overflowing(me, given):
    """Per step: whether this rank's weights moved, and the scale. In step 1 a gradient of the last rank overflows."""
    run = Run(me, configured(**given))
    unscale, found = run.scaler.unscale_, []

    def with_overflow(optimizer):
        if step == 1 and me.rank == me.world_size - 1:
            local(next(p.grad for p in run.model.parameters() if p.grad is not None)).view(-1)[0] = torch.inf
        unscale(optimizer)

    run.scaler.unscale_ = with_overflow
    for step in range(3):
        before = run.weights()
        run.train([step])
        found.append((not torch.equal(before, run.weights()), run.scaler.get_scale()))
    return found, loss_scaling.summary(run.optimizer)


def resumed(me, strategy, folder):
    """(Losses of the steps after a checkpoint, those of a run that resumes from it, its scaler, and the other's)."""
    run = Run(me, configured(strategy=strategy), scale=1024.0)
    run.train(range(3))
    run.scaler.update(512.0)  # what is saved is neither the default, nor what the run began with
    save(folder, 3, run.model, run.optimizer)
    again = Run(me, configured(strategy=strategy))
    checkpoints.load(checkpoints.latest(folder), again.model, again.optimizer)
    states = again.scaler.state_dict(), run.scaler.state_dict()
    if strategy == "fsdp2":
        fp32 = Run(me, configured(strategy=strategy, precision="fp32"))  # another format takes the weights alone
        checkpoints.load(checkpoints.latest(folder), fp32.model, fp32.optimizer)
    return run.train(range(3, STEPS)), again.train(range(3, STEPS)), *states


def resumed_in_bf16(me, strategy, folder):
    """(Losses of the steps after a checkpoint, those of a run that resumes from it, the dtypes of its states)."""
    given = {"strategy": strategy, "precision": "bf16", "optimizer": "adamw-bf16"}
    run, again = (Run(me, configured(**given)) for _ in range(2))
    run.train(range(3))
    save(folder, 3, run.model, run.optimizer)
    checkpoints.load(checkpoints.latest(folder), again.model, again.optimizer)
    dtypes = {value.dtype for state in again.optimizer.state.values() for value in state.values() if value.ndim}
    return run.train(range(3, STEPS)), again.train(range(3, STEPS)), dtypes


def clipped_norm(me, scale):
    """The norm of the first step's gradient that clipping sees, with the loss scaled by ``scale``."""
    run, clip, norms = Run(me, configured(strategy="fsdp2", clip=0.4), scale), gpt_fsdp.clip, []
    gpt_fsdp.clip = lambda *given: norms.append(clip(*given)) or norms[-1]
    run.train(range(1))
    gpt_fsdp.clip = clip
    return getattr(norms[0], "full_tensor", lambda: norms[0])().item()


def ranks_of(given: dict) -> int:
    return 4 if "mesh" in given else 2


def trained(me):
    """{("losses", case): (this rank's losses, what was skipped)} of the cases of so many ranks."""
    found = {}
    for name, given in CASES.items():
        if me.world_size == ranks_of(given):
            run = Run(me, configured(**{"batch_size": SEQUENCES // me.world_size} | given))
            found["losses", name] = run.train(range(STEPS)), loss_scaling.summary(run.optimizer)
    return found


def everything(me, folder):
    """All that is asked of two ranks: starting them takes longer than each of these runs."""
    found = trained(me) | {("overflow", name): overflowing(me, given) for name, given in OVERFLOWS.items()}
    found |= {("resumed", strategy): resumed(me, strategy, f"{folder}/{strategy}") for strategy in SHARDED}
    found |= {("bf16", s): resumed_in_bf16(me, s, f"{folder}/bf16-{s}") for s in SHARDED}
    found["norms"] = [clipped_norm(me, scale) for scale in (SAFE, 4 * SAFE)]
    attach = loss_scaling.attach

    def attach_with_high_scale(optimizer, *given):
        attach(optimizer, *given)
        loss_scaling.set_scale(optimizer, HIGH)

    loss_scaling.attach = attach_with_high_scale
    found["record"] = gpt_fsdp.train(configured(strategy="fsdp2", max_steps=STEPS), me)["loss_scaling"]
    return found


@pytest.fixture(scope="module")
def on_four():
    return notebook_ranks.on_ranks(by_value(trained), ranks=4, cluster=HERE, timeout=100)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    for strategy in SHARDED:
        (folder / strategy).mkdir()
        (folder / f"bf16-{strategy}").mkdir()
    return notebook_ranks.on_ranks(by_value(everything), folder, ranks=2, cluster=HERE, timeout=100)


@pytest.mark.parametrize("name", [name for name in OVERFLOWS if name != "ddp"])
def test_an_overflow_on_one_rank_makes_all_skip(name, results):
    for steps, summary in (rank["overflow", name] for rank in results):
        assert steps == [(True, SAFE), (False, SAFE / 2), (True, SAFE / 2)]
        assert summary == {"skipped_steps": 1, "scale": SAFE / 2}


def test_the_plain_scaler_would_skip_on_one_rank_only(results):
    """What DDP's scaler does with a gradient that the ranks do not share: so FSDP1 needs another one."""
    assert [rank["overflow", "ddp"][0][1][0] for rank in results] == [True, False]


def losses(results, name):
    """The mean of the ranks' losses."""
    return torch.tensor([rank["losses", name][0] for rank in results]).mean(0).tolist()


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("single precision", "fsdp2, adapters")])
def test_losses_are_near_those_of_fp32(name, results, on_four):
    found = on_four if "mesh" in CASES[name] else results
    assert losses(found, name) == pytest.approx(losses(results, "single precision"), rel=1e-3)
    assert all(rank["losses", name][1]["skipped_steps"] == 0 for rank in found)


def test_losses_of_fsdp2_are_those_of_fsdp1_with_its_scaler(results):
    assert losses(results, "fsdp2") == pytest.approx(losses(results, "fsdp1"), rel=1e-4)
    assert losses(results, "fsdp2") != losses(results, "single precision")


def test_clipping_sees_unscaled_gradients(results):
    """AdamW would hardly notice gradients clipped while scaled, so the norms are compared, at two scales."""
    for rank in results:
        assert rank["norms"][0] == pytest.approx(rank["norms"][1], rel=1e-3)


def test_adapters_train(results):
    found = losses(results, "fsdp2, adapters")
    assert len(set(found)) == STEPS and results[0]["losses", "fsdp2, adapters"][1]["skipped_steps"] == 0


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_resumed_run_has_the_scale_and_the_losses_of_the_other(strategy, results):
    for rank in results:
        ahead, again, loaded, saved = rank["resumed", strategy]
        assert loaded == saved and saved["scale"] == 512.0 and saved["_growth_tracker"] == 3
        assert again == ahead


@pytest.mark.parametrize("strategy", SHARDED)
def test_optimizer_states_in_bf16_resume_equally(strategy, results):
    for rank in results:
        ahead, again, dtypes = rank["bf16", strategy]
        assert again == ahead and dtypes == {torch.bfloat16}


def test_a_record_counts_the_skipped_steps(results):
    counted = results[0]["record"]
    assert counted["skipped_steps"] > 0 and counted["scale"] == HIGH / 2 ** counted["skipped_steps"]


def test_the_sentence_says_how_many_were_skipped():
    sentence = loss_scaling.sentence({"skipped_steps": 2, "scale": 16384.0}, 8)
    assert "2 of 8 steps skipped" in sentence and "16384" in sentence


def test_what_is_not_validated_is_refused():
    for given in ({"cpu_offload": True}, {"mesh": "tensor=2"}, {"strategy": "fsdp1", "optimizer": "adamw-fused"}):
        with refused("--precision fp16" if "optimizer" not in given else "adamw-fused"):
            gpt_fsdp.Config(precision="fp16", **given)


def test_gpus_without_bf16_have_fp16():
    for name, gpu in gpus.GPUS.items():
        assert "fp16" in gpu.flops, name
        assert gpu.flash == ("bf16" in gpu.flops), name
