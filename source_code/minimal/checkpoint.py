"""Save and resume a training so that no kill can cost more than the steps since the last save. To copy, and to change.

  notes = []
  signal.signal(signal.SIGUSR1, lambda *_: notes.append(1))  # Slurm's warning
  done = load(folder, model, optimizer, scheduler, loader)  # 0 on the first day
  for step, batch in enumerate(loader, done + 1):
      train_step(batch)
      scheduler.step()
      warned = torch.tensor(len(notes), device=device)
      dist.all_reduce(warned, dist.ReduceOp.MAX)  # so that every rank ends after the same step
      if step % 1000 == 0 or warned:
          save(folder, step, model, optimizer, scheduler, loader)
      if warned:
          dist.barrier()  # srun --kill-on-bad-exit kills the others when the first rank ends
          os._exit(75)  # a code for "try again", without a clean-up that may wait for other ranks

Every rank calls ``load`` and ``save`` at the same steps. One run per folder. After the scheduler and the loader come
any others that have state_dict and load_state_dict. The number of ranks may change if the loader counts global batches,
which it divides; random numbers continue if it does not change. To go back to an older checkpoint, move the newer ones
away first: ``load`` takes the newest.
"""

import os
import pickle
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

GENERATORS = [torch] + [torch.cuda] * torch.cuda.is_available()  # add numpy and random if your data uses them


def save(folder, step, model, optimizer, *others, keep=3, keep_every=1000, group=None):
    """Write step-…; keep the newest ``keep`` and multiples of ``keep_every``. group: gloo, with a time-out of hours."""
    every, partial = [None] * dist.get_world_size(), folder / f"step-{step:08d}.partial"
    dist.all_gather_object(every, ([o.state_dict() for o in others], [g.get_rng_state() for g in GENERATORS]), group)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state | {"step": step, "ranks": pickle.dumps(every)}, checkpoint_id=partial, process_group=group)
    if dist.get_rank() == 0:  # DCP has returned, so every rank's file is complete
        partial.rename(partial.with_suffix(""))
        os.sync()  # the names, too: DCP has flushed the contents only
        for old in sorted(folder.glob("step-????????"))[:-keep]:
            if int(old.name[5:]) % keep_every:
                old.rename(old.with_suffix(".partial"))  # a half-removed one must not look complete
        for left in folder.glob("*.partial"):
            shutil.rmtree(left)
    dist.barrier(group)


def load(folder, model, optimizer, *others):
    """Load the newest complete checkpoint, and return its step; 0 if there is none."""
    newest = [max(folder.glob("step-????????"), default=None)]
    dist.broadcast_object_list(newest)  # rank 0's: a file server may show another node an older list
    if newest[0] is None:
        return 0
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)) | {"step": 0, "ranks": b""}
    dcp.load(state, checkpoint_id=newest[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    every = pickle.loads(state["ranks"])
    theirs, numbers = every[dist.get_rank() % len(every)]
    for each, its in zip(others, theirs, strict=True):
        each.load_state_dict(its)
    for each, its in zip(GENERATORS, numbers, strict=True) if len(every) == dist.get_world_size() else ():
        each.set_rng_state(its)
    return state["step"]
