"""AdamW that stores weights and moments in short formats and computes in fp32, with stochastic rounding of the weights."""

from collections.abc import Iterable

import torch

from labkit.measuring.trace import local

LOST = 2**16  # values of the 16 bits of fraction that fp32 has and bf16 has not


def round_stochastically(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, up or down at random, so that the mean is x.

    Random bits are added to those that bf16 has not, and these are cut off. The distance from the lower neighbour is the
    probability of a carry.
    """
    noise = torch.randint(LOST, x.shape, dtype=torch.int32, device=x.device)
    return ((x.view(torch.int32) + noise) & -LOST).view(torch.float32).to(torch.bfloat16)


class ShortAdamW:
    """AdamW without weight decay, on this rank's shards.

    Args:
        parameters: what is trained, in the format in which it is stored.
        lr: learning rate.
        moments_dtype: in which both moments are stored.
        stochastic: round bf16 weights stochastically instead of to the nearest.
        betas, eps: as in ``torch.optim.AdamW``.

    Attributes:
        moments: a first and a second moment for each parameter.
    """

    def __init__(self, parameters: Iterable, lr, moments_dtype, stochastic=False, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps, self.steps = list(parameters), lr, betas, eps, 0
        self.round = round_stochastically if stochastic else lambda x: x
        self.moments = [torch.zeros_like(local(p.detach()), dtype=moments_dtype) for p in self.parameters for _ in "mv"]

    @torch.no_grad()
    def step(self):
        """Update the weights by their gradients, and free these."""
        self.steps += 1
        for number, parameter in enumerate(self.parameters):
            weight, gradient, now = local(parameter), local(parameter.grad).float(), []
            pairs = zip(self.moments[2 * number :][:2], (gradient, gradient**2), self.betas, strict=True)
            for moment, value, beta in pairs:
                updated = moment.float().lerp(value, 1 - beta)
                moment.copy_(updated)
                now.append(updated / (1 - beta**self.steps))
            mean, square = now
            weight.copy_(self.round(weight.float() - self.lr * mean / (square.sqrt() + self.eps)))
            parameter.grad = None
