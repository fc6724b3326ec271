# SPDX-License-Identifier: BSD-3-Clause
"""AdamW with states in bf16: it is AdamW, it rounds without bias, alike on replicas and after a resume, and takes what is planned."""

import copy

import gpt_fsdp
import pytest
import torch
from commands import refused
from labkit.measuring.differences import largest_difference
from labkit.training.bf16_adamw import BF16AdamW
from planner import UserError, predict
from planner.models import networks
from planner.models.shapes import GPT_SHAPES

STEPS = 20


def trained(make, weight, steps=STEPS, seed=0):
    """The weight after some steps on random gradients, and the optimizer."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer, generator = make([parameter]), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        parameter.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()
    return parameter.detach(), optimizer


def test_in_fp32_it_is_adamw_but_for_the_rounding_of_states():
    weight, options = torch.linspace(-1, 1, 4000), {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95)}
    theirs, _ = trained(lambda p: torch.optim.AdamW(p, **options), weight)
    ours, optimizer = trained(lambda p: BF16AdamW(p, **options), weight)
    assert ours.dtype == torch.float32
    assert largest_difference(ours, theirs) < 0.02 * largest_difference(theirs, weight)
    (state,) = optimizer.state.values()
    assert {value.dtype for name, value in state.items() if name != "step"} == {torch.bfloat16}


def test_states_stay_in_bf16_when_they_are_loaded():
    weight, make = torch.ones(10), lambda p: BF16AdamW(p, 1e-3)
    _, optimizer = trained(make, weight, steps=1)
    again = make([torch.nn.Parameter(weight)])
    again.load_state_dict(optimizer.state_dict())
    (state,) = again.state.values()
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("stochastic", "expected"), [(False, 1.0), (True, 0.99)])
def test_small_updates_of_bf16_weights_add_up_only_if_rounded_stochastically(stochastic, expected):
    weight = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = BF16AdamW([weight], lr=1e-4, weight_decay=0.0, stochastic=stochastic)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert weight.float().mean().item() == pytest.approx(expected, abs=5e-4)


def test_replicas_round_alike_and_parameters_do_not():
    weight = torch.ones(1000, dtype=torch.bfloat16)
    one, other, third = (trained(lambda p, s=seed: BF16AdamW(p, 1e-3, seed=s), weight)[0] for seed in (1, 1, 2))
    assert torch.equal(one, other) and not torch.equal(one, third)
    pair = [torch.nn.Parameter(weight.clone()) for _ in range(2)]
    optimizer = BF16AdamW(pair, lr=1e-3)
    for parameter in pair:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(*pair)


def test_a_resumed_run_rounds_as_the_other_would_have():
    weight = torch.ones(1000, dtype=torch.bfloat16)
    halfway, optimizer = trained(lambda p: BF16AdamW(p, 1e-3), weight)
    saved = copy.deepcopy(optimizer.state_dict())

    def resumed(parameters):
        again = BF16AdamW(parameters, 1e-3)
        again.load_state_dict(saved)
        return again

    def goes_on(parameters):
        parameters[0].data.copy_(halfway)
        optimizer.param_groups[0]["params"], before = parameters, optimizer.param_groups[0]["params"]
        optimizer.state[parameters[0]] = optimizer.state.pop(before[0])
        return optimizer

    assert torch.equal(trained(resumed, halfway, seed=5)[0], trained(goes_on, halfway, seed=5)[0])


def test_the_plan_has_states_of_two_bytes():
    network = networks.gpt(GPT_SHAPES["tiny"], 1, 8)
    plain, ours = (predict.Plan(network, ranks=2, optimizer=name).persistent() for name in ("adamw", "adamw-bf16"))
    for name in ("first moments", "second moments"):
        assert ours["optimizer state", name] * 2 == plain["optimizer state", name]
    with pytest.raises(UserError):
        predict.Plan(network, strategy="zero1", ranks=2, optimizer="adamw-bf16")
    with refused("adamw-bf16", "fp64"):
        gpt_fsdp.Config(optimizer="adamw-bf16", precision="fp64")
