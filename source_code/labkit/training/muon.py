# SPDX-License-Identifier: BSD-3-Clause
"""Muon: AdamW's counterpart for matrices, which needs them whole, on matrices that FSDP2 shards.

The update of a matrix is its momentum, made orthogonal by Newton–Schulz iterations: that takes all of its rows. Momentum
and parameters stay sharded. What is exchanged is the update, in the format in which Newton–Schulz computes (bf16, as in
torch.optim.Muon; fp64 with --precision fp64). planner/parallel/muon.py describes the three ways, and plans them.

Private PyTorch used here, and only here: ``torch.optim._muon._zeropower_via_newtonschulz``, which computes in bf16. With
--precision fp64 it is replaced, so that muon-dtensor can be compared with one process.
"""

import math
from itertools import islice

import torch
import torch.distributed as dist
from planner.parallel import muon as planned
from torch.distributed.tensor import DTensor

from labkit.measuring.replaced import replaced
from labkit.measuring.trace import local
from labkit.training.weight_decay import groups_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial, torch.optim.Muon's (kellerjordan.github.io/posts/muon)
EPS = 1e-7
MOMENTUM = 0.95


def make(model, config) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the blocks, and AdamW for the other parameters, as one optimizer.

    Both have the learning rate of ``--lr``: Muon's update is scaled to the size of AdamW's (arXiv:2502.16982, section
    2.2; torch.optim.Muon's "match_rms_adamw").

    Args:
        model: on any strategy but FSDP1, whose flat parameters are no matrices.
        config: has ``optimizer``, ``lr``, ``weight_decay``, ``decay_1d``, and ``precision``.

    Raises:
        UserError: torch.optim.Muon would fail on the shards of this many ranks.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in trained if "blocks" in name.split(".") and parameter.ndim == 2]
    chosen = set(matrices)
    others = [parameter for _, parameter in trained if parameter not in chosen]
    settings = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": MOMENTUM}
    dtype = torch.float64 if config.precision == "fp64" else torch.bfloat16
    if config.optimizer == "muon-dtensor":
        shards = shard_group(matrices)
        planned.check_dtensor([tuple(matrix.shape) for matrix in matrices], shards.size() if shards else 1)
        muon = TorchMuon(matrices, dtype=dtype, adjust_lr_fn="match_rms_adamw", **settings)
    else:
        muon = Muon(matrices, owner_computes=config.optimizer == "muon", dtype=dtype, **settings)
    return Combined(muon, torch.optim.AdamW(groups_of(others, config), lr=config.lr, foreach=True))


def newton_schulz(matrix):
    """Return a matrix with the singular vectors of ``matrix``, and singular values near 1. ``matrix`` is overwritten.

    The operations are those of torch.optim.Muon, in the matrix's own dtype.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # so that A is the smaller of the two products
    x.div_(x.norm().clamp(min=EPS))  # no singular value is above 1
    for _ in range(planned.ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon, on whole matrices or on those that FSDP2 shards by rows.

    Args:
        matrices: parameters with two dimensions; DTensors along a mesh dimension "shard", or plain tensors.
        owner_computes: each rank computes the matrices that it owns, instead of gathering all of them.
        dtype: of Newton–Schulz, and of what is exchanged.
        lr, weight_decay, momentum: as of torch.optim.Muon.
    """

    def __init__(self, matrices, *, owner_computes: bool, dtype: torch.dtype, lr, weight_decay, momentum):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.owner_computes, self.dtype = owner_computes, dtype

    @torch.no_grad()
    def step(self, closure=None):
        """Update all matrices. Collective among the ranks that shard them."""
        for group in self.param_groups:
            matrices, shards = group["params"], shard_group(group["params"])
            if shards and self.owner_computes:
                shapes = [tuple(matrix.shape) for matrix in matrices]
                for members in planned.rounds(shapes, shards.size()):
                    self._step_round([matrices[index] for index in members], group, shards)
            else:
                for matrix in matrices:
                    self._step_alone(matrix, group, shards)

    def _step_round(self, matrices: list, group: dict, shards: dist.ProcessGroup):
        """Update as many matrices as there are ranks, or fewer, each on its owner."""
        mine = exchange_to_owner(self._updates(matrices, group["momentum"]), matrices, shards)
        if mine.numel():
            mine.copy_(newton_schulz(mine))
        returned = exchange_from_owner(mine, matrices, shards)
        for matrix, piece in zip(matrices, pieces_of(returned, matrices), strict=True):
            self._apply(matrix, piece, group)

    def _updates(self, matrices: list, momentum: float):
        """Return this rank's shards of the matrices' updates, one after another in one buffer."""
        numel, device = sum(local(matrix).numel() for matrix in matrices), local(matrices[0]).device
        buffer = torch.empty(numel, dtype=self.dtype, device=device)
        for matrix, piece in zip(matrices, pieces_of(buffer, matrices), strict=True):
            self._write_update(matrix, piece, momentum)
        return buffer

    def _step_alone(self, matrix, group: dict, shards: dist.ProcessGroup | None):
        """Update one matrix; if it is sharded, gather it, and use this rank's rows of the result."""
        mine, ranks = local(matrix), shards.size() if shards else 1
        rows = math.ceil(matrix.shape[0] / ranks)
        shard = torch.zeros(rows, matrix.shape[1], dtype=self.dtype, device=mine.device)  # padded: all are equally long
        self._write_update(matrix, shard[: len(mine)], group["momentum"])
        if shards:
            gathered = torch.empty(rows * ranks, matrix.shape[1], dtype=self.dtype, device=mine.device)
            dist.all_gather_into_tensor(gathered, shard, group=shards)
            shard = gathered[: matrix.shape[0]]  # only the last rows are padding
            del gathered
        begin = shards.rank() * rows if shards else 0
        self._apply(matrix, newton_schulz(shard)[begin : begin + len(mine)], group)

    def _write_update(self, matrix, into, momentum: float):
        """Add the gradient to this rank's part of the momentum, and write the update (Nesterov's) into a buffer."""
        state, gradient = self.state[matrix], local(matrix.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        buffer = local(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        into.copy_(gradient.lerp(buffer, momentum))

    def _apply(self, matrix, orthogonal, group: dict):
        """Subtract this rank's part of the orthogonal matrix, and decay the weights."""
        scale = 0.2 * math.sqrt(max(matrix.shape))  # match_rms_adamw
        parameter = local(matrix)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal, alpha=-group["lr"] * scale)


def shard_group(matrices: list) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that shard these matrices; None if each rank has them whole."""
    if not matrices or not isinstance(matrices[0], DTensor):
        return None
    group = matrices[0].device_mesh.get_group("shard")
    return group if group.size() > 1 else None


def pieces_of(buffer, matrices: list) -> list:
    """Return views of a buffer of this rank's shards of the matrices, one after another."""
    shards = [local(matrix) for matrix in matrices]
    pieces = buffer.split([shard.numel() for shard in shards])
    return [piece.view(shard.shape) for piece, shard in zip(pieces, shards, strict=True)]


def exchange_to_owner(send, matrices: list, shards: dist.ProcessGroup):
    """Bring each owner all rows of its matrix. Collective.

    Args:
        send: this rank's shards of the matrices, one after another; the n-th matrix belongs to rank n.
        matrices: at most as many as there are ranks.
        shards: their process group.

    Returns:
        This rank's matrix, whole; a tensor without elements if it owns none.
    """
    shape, of_owner, of_others = split_sizes(matrices, shards)
    received = send.new_empty(shape)
    dist.all_to_all_single(received.view(-1), send, of_owner, of_others, group=shards)
    return received


def exchange_from_owner(mine, matrices: list, shards: dist.ProcessGroup):
    """Bring each rank its shards of all matrices, one after another, from their owners. Collective."""
    _, of_owner, of_others = split_sizes(matrices, shards)
    received = mine.new_empty(sum(of_others))
    dist.all_to_all_single(received, mine.view(-1), of_others, of_owner, group=shards)
    return received


def split_sizes(matrices: list, shards: dist.ProcessGroup) -> tuple[tuple[int, int], list[int], list[int]]:
    """Return (shape of this rank's own matrix, elements of it on each rank, elements of its shard of each rank's matrix)."""
    me, ranks = shards.rank(), shards.size()
    shape = tuple(matrices[me].shape) if me < len(matrices) else (0, 0)
    of_owner = [rows * shape[1] for rows in planned.shard_rows(shape[0], ranks)]
    of_others = [local(matrix).numel() for matrix in matrices] + [0] * (ranks - len(matrices))
    return shape, of_owner, of_others


class TorchMuon(torch.optim.Muon):
    """torch.optim.Muon, unchanged unless its Newton–Schulz has to compute in another dtype than bf16."""

    def __init__(self, matrices, *, dtype: torch.dtype, **settings):
        super().__init__(matrices, **settings)
        self.dtype = dtype

    def step(self, closure=None):
        if self.dtype == torch.bfloat16:
            return super().step(closure)
        with replaced(torch.optim._muon, _zeropower_via_newtonschulz=lambda update, *_: newton_schulz(update)):
            return super().step(closure)


class Combined(torch.optim.Optimizer):
    """Several optimizers, each with its parameters, as one: one state, one list of parameter groups, one step.

    Args:
        parts: the optimizers.
    """

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure=None):
        """Step each optimizer, on this one's groups and state: loading a checkpoint replaces both."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state
            part.step()
