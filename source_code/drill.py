"""The fault drill: kill a rank at a random moment, resume, and compare with the run that nothing happened to.

  python drill.py                          MNIST and GPT, under DDP and FSDP2: 60 trials; a table and a record
  python drill.py --trials 2 --seed 7      two trials of each, at other moments

In a trial one of two ranks kills itself (SIGKILL) at the n-th event of its Python: a call or a return, in the lab's
code, in the course's or in PyTorch's. Which rank and which event a seed says; half of them lie in saving. Then the run
is resumed with the same words and ``--resume``. It must end with the bits of the run that nothing happened to, after
repeating no more steps than lie between two checkpoints; no checkpoint that was whole may be lost, none half-made have
the name of a whole one, and no process may live on.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch.distributed.checkpoint as dcp
from labkit import UserError
from labkit.measuring import meters, records
from labkit.running import cells, launch, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import checkpoints, datasets, dcp_reading, manifest, saving

RANKS = 2
STEPS, EVERY = 6, 2  # of a run; from one checkpoint to the next
DIGITS = 32  # to train MNIST on: it saves after each epoch, which is thus EVERY steps of RANKS × 8
MNIST = {"data": "mnist-5k", "batch_size": 8, "epochs": STEPS // EVERY}
GPT = {"seq_len": 16, "batch_size": 2, "max_steps": STEPS, "checkpoint_every": EVERY}
CONFIGURATIONS = {
    "MNIST, DDP": ("mnist_fsdp", MNIST | {"strategy": "ddp"}),
    "MNIST, FSDP2": ("mnist_fsdp", MNIST | {"strategy": "fsdp2"}),
    "GPT, DDP": ("gpt_fsdp", GPT | {"strategy": "ddp"}),
    "GPT, FSDP2": ("gpt_fsdp", GPT | {"strategy": "fsdp2"}),
}
PHASES = {"starting": 1, "training": 2, "saving": 4, "after the last save": 1}  # how often each is drawn, of 8
SECONDS = 120  # after which a run, of two or three, hangs


# On the ranks


class Watch:
    """Counts a rank's events (``sys.setprofile``), and kills it at the event ``last``, when it has written a note.

    spans: where the phases begin, [(phase, number of the event), …].
    """

    def __init__(self, folder: str, note: Path, last: int | None):
        self.folder, self.note, self.last = folder, note, last
        self.events = self.steps = 0
        self.spans = [("starting", 0)]
        self.whole = set()  # checkpoints that have been whole at the end of a save
        self.begin, self.advance = progress.Progress.__init__.__code__, progress.Progress.advance.__code__
        # Each a span of its own, or the moments in which much can go wrong would be lost among thousands of others
        self.save = [each.__code__ for each in (saving.Saver.save, manifest.write, saving.put_in_place)]
        self.saving = {id(code) for code in self.save}

    def __call__(self, frame, event, _):
        self.events += 1
        code = frame.f_code
        if id(code) in self.saving and event in ("call", "return"):
            phase = self.phase_after(code, event)
            self.spans.append((phase, self.events))
            if phase != "saving":
                self.whole |= self.whole_now()
        elif event == "call" and code is self.begin:
            self.spans.append(("training", self.events))
        elif event == "call" and code is self.advance:
            self.steps += 1
        if self.events == self.last:
            self.end(frame)

    def phase_after(self, code, event) -> str:
        if event == "call" or code is not self.save[0]:
            return "saving"
        return "training" if self.steps < STEPS else "after the last save"

    def whole_now(self) -> set[str]:
        return {path.name for path in checkpoints.stored(self.folder) if why_not_whole(path) is None}

    def end(self, frame):
        """Write down what the drill must know of this moment, and be killed."""
        whole = sorted(self.whole | self.whole_now())
        while not Path(frame.f_code.co_filename).is_relative_to(launch.SOURCE):  # where it is in the course's own code
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        note = {"phase": self.spans[-1][0], "where": where, "steps": self.steps, "whole": whole}
        self.note.write_text(json.dumps(note))
        os.kill(os.getpid(), signal.SIGKILL)


def train(me, lab: str, options: dict) -> int:
    """Run on every rank: the lab's training, quietly and on few digits. Returns the step it began at."""
    os.environ.pop(progress.VARIABLE, None)
    meters.TRACED_STEPS = range(0)  # most events would lie in the tracer
    load = datasets.load
    datasets.load = lambda name: datasets.Digits(name, *(tensor[:DIGITS] for tensor in load(name).tensors()))
    module = import_module(lab)
    with contextlib.redirect_stdout(io.StringIO()):
        return module.train(module.Config(**options), me)["first_step"]


def train_watched(me, lab: str, options: dict, folder: str, victim: int | None = None, last: int | None = None):
    """Run on every rank: the same; the victim is killed at its event ``last``, or at the end. Returns (spans, events)."""
    (Path(folder) / f"rank-{me.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    watch = Watch(options["checkpoint"], Path(folder) / "note", last if me.rank == victim else None)
    if victim in (None, me.rank):  # watching takes time
        sys.setprofile(watch)
    try:
        train(me, lab, options)
    finally:
        sys.setprofile(None)
    if me.rank == victim:  # a few events sooner than the undisturbed run: they are not always equally many
        watch.end(sys._getframe())
    return watch.spans, watch.events


# What is compared


@dataclass(frozen=True)
class Undisturbed:
    """The run that nothing happens to.

    events: [{phase: ranges of numbers of events} of each rank]; prints: {checkpoint's name: its fingerprint}.
    """

    events: list[dict[str, list[range]]]
    prints: dict[str, str]


def why_not_whole(path: Path) -> str | None:
    """Why a checkpoint is not what was written, in a few words; None if it is."""
    try:
        return manifest.difference(path, manifest.read(path)["files"])
    except UserError as error:
        return getattr(error, "reason", str(error))


def fingerprint(path: Path) -> str:
    """One for all tensors of a checkpoint, read as DCP reads them: of their names and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dcp_reading.tensors(path).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def faults_in(folder: str, expected: Undisturbed) -> list[str]:
    """What is wrong with the checkpoints in a folder: one is not whole, or has not the undisturbed run's bits."""
    faults = []
    for path in checkpoints.stored(folder):
        if reason := why_not_whole(path):
            faults.append(f"{path.name} is not whole: {reason}")
            continue
        try:
            if fingerprint(path) != expected.prints.get(path.name):
                faults.append(f"{path.name} has other weights than the undisturbed run's")
        except (Exception, dcp.CheckpointException) as error:  # DCP's own is no Exception
            faults.append(f"{path.name} is whole and cannot be read: {error}")
    return faults


def living(folder: str) -> list[int]:
    """The processes of a killed run that are still there; the ranks have left their numbers in the folder."""
    numbers = {int(word) for file in Path(folder).glob("rank-*") for word in file.read_text().split()}
    there = []
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, 0)
            there.append(number)
    return there


# The drill


def attempt(function, *arguments) -> tuple[list, str]:
    """Call a function on every rank of a new run: (what each returned, ""), or ([], what the run said as it failed)."""
    here = launch.Cluster(launcher="local")
    try:
        return cells.on_ranks(function, *arguments, ranks=RANKS, cluster=here, timeout=SECONDS), ""
    except launch.RunFailed as error:
        return [], str(error)


def room():
    """A folder for a run, where runs write; it goes with all that is in it."""
    return tempfile.TemporaryDirectory(dir=records.made(launch.RUNS), prefix=".drill-")


def undisturbed(name: str) -> Undisturbed:
    """Run a configuration to its end. UserError if it does not come to it."""
    lab, options = CONFIGURATIONS[name]
    with room() as folder:
        saved = f"{folder}/saved"
        watched, said = attempt(train_watched, lab, options | {"checkpoint": saved}, folder)
        if not watched:
            raise UserError(f"{name} does not come to its end, though no rank was killed: {said}")
        events = [by_phase(spans, count) for spans, count in watched]
        prints = {path.name: fingerprint(path) for path in checkpoints.stored(saved)}
        if sorted(prints) != [checkpoints.name_of(step) for step in range(EVERY, STEPS + 1, EVERY)]:
            raise UserError(f"{name} is to save every {EVERY} of {STEPS} steps, and left {', '.join(prints)}")
        return Undisturbed(events, prints)


def by_phase(spans: list[tuple[str, int]], count: int) -> dict[str, list[range]]:
    """{phase: ranges of the numbers of its events}, of ``count`` events in all."""
    found = {phase: [] for phase in PHASES}
    for (phase, begin), (_, end) in zip(spans, [*spans[1:], ("", count)], strict=True):
        if begin < end:
            found[phase].append(range(begin + 1, end + 1))
    return found


def moment(name: str, number: int, seed: int, expected: Undisturbed) -> tuple[int, int]:
    """(rank, number of the event at which it is killed) of a trial: always the same for one seed."""
    chance = random.Random(f"{seed} {name} {number}")
    victim = chance.randrange(RANKS)
    (phase,) = chance.choices([*PHASES], PHASES.values())
    return victim, chance.choice(chance.choice(expected.events[victim][phase]))


def trial(name: str, number: int, seed: int, expected: Undisturbed) -> dict:
    """Kill a rank, look, resume, look again: a row of the record, with "failures": sentences, none if all is well."""
    victim, last = moment(name, number, seed, expected)
    row = {"configuration": name, "trial": number, "victim": victim, "event": last}
    lab, options = CONFIGURATIONS[name]
    with room() as folder:
        options = options | {"checkpoint": f"{folder}/saved"}
        _, said = attempt(train_watched, lab, options, folder, victim, last)
        if f"rank {victim} was killed by SIGKILL" not in said:
            return row | {"failures": [f"rank {victim} was not killed: {said}"]}
        row |= json.loads((Path(folder) / "note").read_text())
        failures = [f"process {each} lives on" for each in living(folder)]
        failures += faults_in(options["checkpoint"], expected)
        return row | after(lab, options, row, expected, failures)


def after(lab: str, options: dict, killed: dict, expected: Undisturbed, failures: list[str]) -> dict:
    """Resume a run of which a rank was killed: what the row says of it. killed: what it says already."""
    left = [path.name for path in checkpoints.stored(options["checkpoint"])]
    lost = [each for each in killed["whole"] if each not in left]
    failures += [f"{each} was whole and is lost" for each in lost]
    begun, said = attempt(train, lab, options | {"resume": True})
    if not begun and "nothing left to train" in said:  # it was killed after its last save
        begun = [STEPS]
    if not begun:
        return {"lost": len(lost), "failures": [*failures, f"it cannot be resumed: {said}"]}
    if (redone := killed["steps"] - begun[0]) > EVERY:
        failures.append(f"{redone} steps are done again, and {EVERY} lie between two checkpoints")
    found = sorted(path.name for path in Path(options["checkpoint"]).iterdir())
    if found != sorted(expected.prints):
        failures.append(f"it ends with {', '.join(found)}, and the undisturbed run with {', '.join(expected.prints)}")
    faults = faults_in(options["checkpoint"], expected)
    failures += [fault for fault in faults if fault not in failures]
    ended = {"equal": not faults, "resumed_at": begun[0], "redone": redone}
    return ended | {"lost": len(lost), "failures": failures}


def run(trials: int, seed: int) -> list[dict]:
    """So many trials of each configuration: the rows of the record."""
    rows = []
    for name in CONFIGURATIONS:
        expected = undisturbed(name)
        rows += [trial(name, number, seed, expected) for number in range(trials)]
    return rows


def table(rows: list[dict]):
    """A pandas.DataFrame with a line for each configuration."""
    import pandas  # here, as every rank of every trial imports this file

    lines = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        phases = Counter(row.get("phase") for row in mine)
        lines.append(
            {"configuration": name, "trials": len(mine)}
            | {f"killed {phase}": phases[phase] for phase in PHASES}
            | {
                "steps done again, at most": max(row.get("redone", 0) for row in mine),
                "weights bitwise equal": f"{sum(row.get('equal', False) for row in mine)} of {len(mine)}",
                "checkpoints lost": sum(row.get("lost", 0) for row in mine),
            }
        )
    return pandas.DataFrame(lines)


@dataclass(frozen=True)
class Drill(Options):
    """The command line is made from these fields."""

    trials: int = option(15, "trials of each configuration", least=1)
    seed: int = option(1, "of the ranks and the moments")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Drill, __doc__)
    try:
        path = records.new_path("drill", options.record)
        rows = run(options.trials, options.seed)
    except UserError as error:
        ranks.leave(str(error))
    print(table(rows).to_markdown(index=False))
    records.write_rows(path, rows, seed=options.seed)
    failed = [row for row in rows if row["failures"]]
    for row in failed:
        print(f"\n{row['configuration']}, trial {row['trial']}, {row.get('where')}:", *row["failures"], sep="\n  ")
    print(f"\n{len(rows)} trials, {len(failed)} failed; record: {path}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
