# SPDX-License-Identifier: BSD-3-Clause
"""Kill a training that saves with minimal/checkpoint.py, resume it, and compare it with an undisturbed run, bit by bit.

  python -m proofs.recipe                   60 kills, 30 of them during a save; a table and a record
  python -m proofs.recipe --kills 6 --seed 7

The training: a small network with dropout, sharded by FSDP2 over two ranks, in fp32; AdamW with warmup and cosine decay;
shuffled batches from torchdata's StatefulDataLoader. It saves every few steps. Each trial starts new processes; one rank
kills itself (SIGKILL) at the n-th event of its Python (a call or a return, also of a C function), drawn from those of the
saves or from all others. Then the training is resumed in new processes. Every loss and every learning rate of both lives, and
the final weights, must be those of the undisturbed run; no checkpoint with a final name may be lost or incomplete; and no more
steps are repeated than lie between two saves.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from labkit import UserError
from labkit.measuring import records
from labkit.running import launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from minimal import checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS, STEPS, EVERY = 2, 12, 3
KEEP = {"keep": 2, "keep_every": 6}
KEPT = ["step-00000006", "step-00000009", "step-00000012"]  # the newest two, and a sparse old one
ROWS, BATCH, LR = 40, 8, 0.01  # five steps per epoch, so that saves and epochs end at different steps
SECONDS = 120


class GlobalBatches:
    """Shuffle in each epoch, and give each rank its part of every global batch, on any number of ranks that divides it."""

    epoch = 0

    def __len__(self):
        return -(-ROWS // BATCH)

    def __iter__(self):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))
        for batch in order.split(BATCH):
            yield batch.chunk(dist.get_world_size())[dist.get_rank()].tolist()


def data_loader(batches: GlobalBatches):
    """Return a StatefulDataLoader over random rows and labels."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows[:, :4].argmax(1))
    # Its own generator: each new iterator draws a number, and a resumed run begins one more than an undisturbed one
    return StatefulDataLoader(data, batch_sampler=batches, generator=torch.Generator())


def train(me, folder: str, save=checkpoint.save, load=checkpoint.load, steps: int = STEPS) -> dict:
    """Train to the last step, from the newest checkpoint if there is one. Collective.

    Returns:
        {"first": the step from which it trained, "losses", "rates": {step: this rank's}, "weights": hash of its shards}.
    """
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
    folder = Path(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    torch.manual_seed(me.rank)  # for dropout: each rank its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
    batches = GlobalBatches()
    loader = data_loader(batches)
    step = first = load(folder, model, optimizer, scheduler, loader)
    losses, rates = {}, {}
    while step < steps:
        batches.epoch = step // len(batches)
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            step += 1
            losses[step], rates[step] = loss.item(), optimizer.param_groups[0]["lr"]
            with open(folder / f"losses-{me.rank}", "a") as file:  # survives a kill
                print(step, losses[step].hex(), rates[step].hex(), file=file)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % EVERY == 0:
                save(folder, step, model, optimizer, scheduler, loader, **KEEP)
            if step == steps:
                break
    shards = b"".join(each.to_local().detach().numpy().tobytes() for each in model.parameters())
    return {"first": first, "losses": losses, "rates": rates, "weights": hashlib.sha256(shards).hexdigest()}


class Watch:
    """Count this rank's events (``sys.setprofile``) in saves and outside, and kill the process at one of them."""

    def __init__(self, phase: str | None = None, last: int = 0):
        self.phase, self.last = phase, last
        self.counts = {"saving": 0, "elsewhere": 0}
        self.saving = False

    def __call__(self, frame, event, _):
        if frame.f_code is checkpoint.save.__code__ and event in ("call", "return"):
            self.saving = event == "call"
        phase = "saving" if self.saving else "elsewhere"
        self.counts[phase] += 1
        if phase == self.phase and self.counts[phase] == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def train_watched(me, folder: str, victim: int | None = None, phase: str | None = None, last: int = 0) -> dict:
    """Train as ``train`` does, and kill the victim at its n-th event of a phase; without a victim, count. Collective."""
    watch = Watch(phase, last)
    if victim in (None, me.rank):
        sys.setprofile(watch)
    try:
        return train(me, folder) | {"events": watch.counts}
    finally:
        sys.setprofile(None)


def on_ranks(function, *arguments) -> tuple[list, str]:
    """Call a function on every rank of new processes: return (the ranks' results, ""), or ([], the error message)."""
    here = launch.Cluster(launcher="local")
    try:
        return notebook_ranks.on_ranks(function, *arguments, ranks=RANKS, cluster=here, timeout=SECONDS), ""
    except launch.RunFailed as error:
        return [], str(error)


def new_folder():
    return tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix=".recipe-")


def undisturbed() -> list[dict]:
    """Train without a kill, and return each rank's result and number of events. UserError if it fails."""
    with new_folder() as folder:
        result, message = on_ranks(train_watched, folder)
        if not result:
            raise UserError(f"the training does not come to its end, though no rank was killed: {message}")
        if (names := stored(folder)) != KEPT:
            raise UserError(f"it should leave {', '.join(KEPT)}, and left {', '.join(names)}")
        return result


def stored(folder: str) -> list[str]:
    """Return the names of a folder's checkpoints: all that does not say that it is partial."""
    return sorted(path.name for path in Path(folder).glob("step-*") if path.suffix != ".partial")


def trial(number: int, seed: int, expected: list[dict]) -> dict:
    """Kill a training, resume it, and compare: a row of the record, whose "failures" are sentences."""
    chance = random.Random(f"{seed} {number}")
    phase, victim = ("saving", "elsewhere")[number % 2], chance.randrange(RANKS)
    # A few events fewer than counted, as their number varies a little from run to run
    last = chance.randint(1, expected[victim]["events"][phase] * 98 // 100)
    row = {"trial": number, "phase": phase, "victim": victim, "event": last}
    with new_folder() as folder:
        _, message = on_ranks(train_watched, folder, victim, phase, last)
        if f"rank {victim} was killed by SIGKILL" not in message:
            return row | {"failures": [f"rank {victim} was not killed: {message}"]}
        before, made = stored(folder), [printed(folder, rank) for rank in range(RANKS)]
        row |= {"left": sorted(path.name for path in Path(folder).glob("step-*")), "steps": max(map(len, made))}
        result, message = on_ranks(train, folder)
        if not result:
            return row | {"failures": [f"it cannot be resumed: {message}"]}
        first = result[0]["first"]
        row |= {"resumed_at": first, "repeated": row["steps"] - first}
        return row | {"failures": faults(result, expected, made, before, row) + left_over(folder)}


def faults(result: list[dict], expected: list[dict], made: list[dict], before: list[str], row: dict) -> list[str]:
    """Compare a killed and resumed training with the undisturbed one."""
    found = []
    for rank, (mine, right, first_life) in enumerate(zip(result, expected, made, strict=True)):
        truth = {step: (right["losses"][step].hex(), right["rates"][step].hex()) for step in right["losses"]}
        second_life = {step: (mine["losses"][step].hex(), mine["rates"][step].hex()) for step in mine["losses"]}
        for life, steps in (("before the kill", first_life), ("after it", second_life)):
            wrong = [step for step, value in steps.items() if truth[step] != value]
            found += [f"rank {rank}, {life}: loss or rate of step {wrong[0]} differs"] if wrong else []
        if {*range(1, mine["first"] + 1)} - {*first_life} or {*range(mine["first"] + 1, STEPS + 1)} != {*second_life}:
            found.append(f"rank {rank} left out steps")
        if mine["weights"] != right["weights"]:
            found.append(f"rank {rank} ends with other weights")
    if before and result[0]["first"] != int(before[-1][5:]):
        found.append(f"it resumed at {result[0]['first']}, not from {before[-1]}")
    if row["repeated"] > EVERY:
        found.append(f"{row['repeated']} steps are repeated")
    return found


def printed(folder: str, rank: int) -> dict:
    """Return {step: (loss, rate)} that a rank wrote before it was killed; the last line may be incomplete."""
    path = Path(folder) / f"losses-{rank}"
    lines = [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return {int(step): (loss, rate) for step, loss, rate in lines}


def left_over(folder: str) -> list[str]:
    names = sorted(path.name for path in Path(folder).glob("step-*"))
    return [] if names == KEPT else [f"it ends with {', '.join(names)}"]


def run(kills: int, seed: int, done=lambda rows: None) -> list[dict]:
    """Run the trials, every second one with a kill during a save. done: called with the rows after each trial."""
    rows, expected = [], undisturbed()
    for number in range(kills):
        rows.append(trial(number, seed, expected))
        done(rows)
    return rows


@dataclass(frozen=True)
class Config(Options):
    """How many kills. The command line is made from these fields."""

    kills: int = option(60, "trials, half of them with a kill during a save", least=1)
    seed: int = option(1, "of the ranks and the moments")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Config, __doc__)
    try:
        path = records.new_path("recipe", options.record)
        rows = run(options.kills, options.seed, lambda rows: records.write_rows(path, rows, seed=options.seed))
    except UserError as error:
        ranks.exit_with_error(str(error))
    for phase in ("saving", "elsewhere"):
        mine = [row for row in rows if row["phase"] == phase]
        equal = sum(not row["failures"] for row in mine)
        repeated = max((row.get("repeated", 0) for row in mine), default=0)
        partial = sum(any(name.endswith(".partial") for name in row.get("left", ())) for row in mine)
        print(
            f"killed {phase}: {len(mine)}, {partial} left an incomplete folder, {repeated} steps repeated at most, ",
            end="",
        )
        print(f"{equal} equal to the undisturbed run")
    failed = [row for row in rows if row["failures"]]
    for row in failed:
        print(f"\ntrial {row['trial']}:", *row["failures"], sep="\n  ")
    print(f"{len(rows)} kills, {len(failed)} failed; record: {path}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
