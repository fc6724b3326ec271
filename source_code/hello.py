# SPDX-License-Identifier: BSD-3-Clause
"""Print each rank's identity and device, and check one all-reduce over all ranks.

  python hello.py                                        # starts one rank per GPU, or two on the CPU
  torchrun --standalone --nproc-per-node 4 hello.py
  srun -p gpu -N 2 --ntasks-per-node=4 --gres=gpu:4 python hello.py

Run it first on every new machine, and check that it starts as many ranks as you requested: a problem that shows here
would also occur, at a higher cost, in a training run.
"""

import torch
import torch.distributed as dist
from labkit import UserError
from labkit.running import options, ranks


def main(config, me):
    """Run the lab on one rank. me: this rank (labkit/running/ranks.py)."""
    dist.init_process_group(me.backend, device_id=me.device if me.device.type == "cuda" else None)
    place = f"rank {me.rank:2} of {me.world_size}: local rank {me.local_rank} on node {me.node}, device {me.device}"
    print(place, flush=True)

    number = torch.tensor(me.rank + 1, device=me.device)
    dist.all_reduce(number)  # the sum over all ranks, on every rank
    expected = me.world_size * (me.world_size + 1) // 2
    if number.item() != expected:
        raise UserError(f"1 + … + {me.world_size} came out as {number.item()}, not {expected}: do not train on this")
    dist.barrier()
    me.say(f"the sum of 1 … {me.world_size} over all ranks, by {me.backend}: {number.item()}, as it should be")


if __name__ == "__main__":
    ranks.run(main, options.parse(options.Start, __doc__))
