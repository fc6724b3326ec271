# SPDX-License-Identifier: BSD-3-Clause
"""AdamW whose states are in bf16, and which also updates weights in bf16: both rounded stochastically.

bf16 has 8 significant bits: a change of less than 1/512 of a number is lost if the sum is rounded to the nearest. AdamW's
second moment changes by 1/1,000 of itself per step, and a weight by --lr: rounded to the nearest, both may stand still.
Stochastic rounding goes up or down with the probability that keeps the expected value: 1 + 1/1,024 becomes 1 + 1/128 in one
case of eight, and 1 in the others. So small changes add up, with noise (arXiv:2010.06192).

The noise is a function of the seed, the step, and the parameter's number: a resumed run continues equally, and ranks that
hold the same parameter (DDP, HSDP) round it alike. torchao has such an optimizer, too (``torchao.optim._AdamW`` with
``bf16_stochastic_round``).
"""

import hashlib

import torch

from labkit.measuring.trace import local


class BF16AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with states in bf16. It computes in fp32, one tensor after another.

    Args:
        params: parameters or groups, in fp32 or bf16; DTensors keep their shards.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        seed: of the noise.
        stochastic: whether to round stochastically; False: to the nearest.
    """

    def __init__(
        self, params, lr: float, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, seed: int = 0, stochastic: bool = True
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed, self.stochastic, self.generators = seed, stochastic, {}

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have gradients."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                self._update(local(parameter), local(parameter.grad), state, group, number)

    def load_state_dict(self, state_dict: dict):
        """Load a state as every optimizer does, except that the moments stay in bf16: others cast them as the weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].to(torch.bfloat16) for name in ("exp_avg", "exp_avg_sq") if name in state}

    def _update(self, weight, gradient, state, group, number: int):
        """Update a tensor; number: of the parameter."""
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        generator = self._generator(weight.device, f"{self.seed} {step} {number}")
        gradient = gradient.float()
        first = local(state["exp_avg"]).float().lerp_(gradient, 1 - beta1)
        self._round_to(local(state["exp_avg"]), first, generator)
        second = local(state["exp_avg_sq"]).float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._round_to(local(state["exp_avg_sq"]), second, generator)
        del gradient
        denominator = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        updated = weight.float()  # the weight itself, if it is in fp32
        updated.mul_(1 - group["lr"] * group["weight_decay"])
        updated.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))
        if weight.dtype == torch.bfloat16:
            self._round_to(weight, updated, generator)

    def _round_to(self, rounded, values, generator):
        """Write fp32 ``values``, which are changed, to a tensor in bf16."""
        if self.stochastic:
            bits = values.view(torch.int32)
            # bf16 is the upper half of fp32: a random number is added to the lower half, which is then cut off.
            bits.add_(torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator))
            bits.bitwise_and_(-(2**16))
        rounded.copy_(values)

    def _generator(self, device, key: str) -> torch.Generator:
        generator = self.generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]))
