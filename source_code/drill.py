"""The fault drill: disturb a run, resume it, and compare with the run that nothing happened to.

  python drill.py                          MNIST and GPT, under DDP and FSDP2: 60 trials; a table and a record
  python drill.py --trials 4 --seed 7      four trials of each, at other moments

A trial is of one of four kinds; where, when, and with which options a seed says:

  kill         one of two ranks kills itself (SIGKILL) at the n-th event of its Python: a call or a return, in the lab's
               code, in the course's or in PyTorch's; half of these lie in saving. In some trials the newest checkpoint
               is damaged then, and the run resumes with --fall-back
  second run   another run is started on the same --checkpoint folder, with the same or another seed
  NaN          a weight of one rank becomes NaN after a step
  I/O error    the storage fails to answer, once while a checkpoint is written and once while one is read

Some trials save with --async-checkpoint, some with --keep. Every run must end with the bits of the run that nothing
happened to, after repeating no more steps than lie between two checkpoints (twice as many where the newest was still
being written in the background); no checkpoint that was whole may be lost,
none half-made or with a NaN in it may have the name of a whole one, a second run must be refused and change nothing,
and no process may live on.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from labkit import UserError
from labkit.measuring import meters, records
from labkit.measuring.trace import local
from labkit.running import cells, launch, progress, ranks
from labkit.running.options import Options, option, parse
from labkit.training import checkpoint_folder, checkpoints, datasets, dcp_reading, dcp_writing, manifest, saving

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
KINDS = ("kill", "second run", "NaN", "I/O error", "kill", "kill", "I/O error", "kill", "second run", "kill")
KINDS += ("NaN", "kill", "I/O error", "kill", "kill")  # of trial 0, 1, …: each configuration begins at another place
SECONDS = 120  # after which a run, of two or three, hangs


# On the ranks


class Watch:
    """Counts a rank's events (``sys.setprofile``), and at the event ``last`` calls ``then``, after it has written a note.

    spans: where the phases begin, [(phase, number of the event), …]. A thread that saves meanwhile is watched, too.
    """

    def __init__(self, folder: str, note: Path, last: int | None, then):
        self.folder, self.note, self.last, self.then = folder, note, last, then
        self.events = self.steps = 0
        self.spans = [("starting", 0)]
        self.whole = set()  # checkpoints that have been whole at the end of a save
        self.begin, self.advance = progress.Progress.__init__.__code__, progress.Progress.advance.__code__
        # Each a span of its own, or the moments in which much can go wrong would be lost among thousands of others
        commit = checkpoint_folder.CheckpointFolder.commit
        self.save = [each.__code__ for each in (saving.Saver.save, manifest.write, commit)]
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
        if self.last is not None and self.events >= self.last:
            self.end(frame)

    def phase_after(self, code, event) -> str:
        if event == "call" or code is not self.save[0]:
            return "saving"
        return "training" if self.steps < STEPS else "after the last save"

    def whole_now(self) -> set[str]:
        return {path.name for path in checkpoints.stored(self.folder) if why_not_whole(path) is None}

    def end(self, frame):
        """Write down what the drill must know of this moment; then do what is to be done."""
        self.last = None
        whole = self.whole_now()
        while not Path(frame.f_code.co_filename).is_relative_to(launch.SOURCE):  # where it is in the course's own code
            frame = frame.f_back or sys._current_frames()[threading.main_thread().ident]
        where = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        note = {"phase": self.spans[-1][0], "where": where, "steps": self.steps, "whole": sorted(whole)}
        note["ever_whole"] = sorted(whole | self.whole)
        newest = max(Path(self.folder).glob(".owner-*"), default=None)
        note["owned"] = newest is None or '"released"' not in newest.read_text()
        self.note.write_text(json.dumps(note))
        self.then()


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def waits(goes_on: Path):
    """Until the drill has tried to start another run."""

    def wait():
        deadline = time.monotonic() + SECONDS
        while not goes_on.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    return wait


def train(me, lab: str, options: dict) -> int:
    """Run on every rank: the lab's training, quietly and on few digits. Returns the step it began at."""
    os.environ.pop(progress.VARIABLE, None)
    meters.TRACED_STEPS = range(0)  # most events would lie in the tracer
    load = datasets.load
    datasets.load = lambda name: datasets.Digits(name, *(tensor[:DIGITS] for tensor in load(name).tensors()))
    module = import_module(lab)
    with contextlib.redirect_stdout(io.StringIO()):
        result = module.train(module.Config(**options), me)
    if not all(map(math.isfinite, result["losses"])):
        raise UserError("the loss is not finite")  # what records.report says, which is not called here
    return result["first_step"]


def train_watched(
    me, lab: str, options: dict, folder: str, victim: int | None = None, last: int | None = None, then: str = "killed"
):
    """Run on every rank: the same; the victim is killed, or waits, at its event ``last``, or at the end.

    Returns (spans, events).
    """
    (Path(folder) / f"rank-{me.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    act = be_killed if then == "killed" else waits(Path(folder) / "goes on")
    watch = Watch(options["checkpoint"], Path(folder) / "note", last if me.rank == victim else None, act)
    if victim in (None, me.rank):  # watching takes time
        threading.setprofile(watch)
        sys.setprofile(watch)
    try:
        train(me, lab, options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if me.rank == victim and watch.last is not None:
        # a few events sooner than the undisturbed run: they are not always equally many
        watch.end(sys._getframe())
    return watch.spans, watch.events


def train_poisoned(me, lab: str, options: dict, folder: str, victim: int, step: int) -> int:
    """Run on every rank: the same; the victim's part of a weight becomes NaN after a step."""
    module, calls = import_module(lab), iter(range(1, 10**6))
    train_step = module.train_step

    def poisoned(model, *given):
        loss = train_step(model, *given)
        if next(calls) == step and me.rank == victim:
            with torch.no_grad():
                parts = [local(parameter) for parameter in model.parameters()]
                next(part for part in parts if part.numel()).view(-1)[0] = math.nan
        return loss

    module.train_step = poisoned
    return train(me, lab, options)


def train_on_bad_storage(me, lab: str, options: dict, folder: str, victim: int, writing: int, reading: int) -> int:
    """Run on every rank: the same; the victim's n-th file to be written, or read, cannot be, the first time."""
    written, read = iter(range(1, 10**6)), iter(range(1, 10**6))
    create, digest = dcp_writing._Hashing.create_stream, manifest.digest

    def fails(number, at):
        if me.rank == victim and number == at:
            (Path(folder) / f"failed-{me.rank}-{number}").touch()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        fails(next(written), writing)
        with create(self, path, mode) as stream:
            yield stream

    def digest_of(path):
        fails(next(read), reading)
        return digest(path)

    dcp_writing._Hashing.create_stream, manifest.digest = create_stream, digest_of
    saving.WAITS = manifest.WAITS = (0, 0)
    return train(me, lab, options)


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
            if any(not each.isfinite().all() for each in dcp_reading.tensors(path).values()):
                faults.append(f"{path.name} has numbers that are not finite")
            elif fingerprint(path) != expected.prints.get(path.name):
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


def undisturbed(name: str, asynchronous: bool = False) -> Undisturbed:
    """Run a configuration to its end. UserError if it does not come to it."""
    lab, options = CONFIGURATIONS[name]
    with room() as folder:
        saved = f"{folder}/saved"
        options = options | {"checkpoint": saved, "async_checkpoint": asynchronous}
        watched, said = attempt(train_watched, lab, options, folder)
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


def moment(name: str, number: int, seed: int, expected: Undisturbed, phases: dict = PHASES) -> tuple[int, int]:
    """(rank, number of the event) of a trial: always the same for one seed. phases: how often each is drawn."""
    chance = random.Random(f"{seed} {name} {number}")
    victim = chance.randrange(RANKS)
    (phase,) = chance.choices([*phases], phases.values())
    return victim, chance.choice(chance.choice(expected.events[victim][phase]))


def kind_of(name: str, number: int) -> str:
    return KINDS[(number + [*CONFIGURATIONS].index(name)) % len(KINDS)]


def circumstances(name: str, number: int, seed: int, kind: str) -> tuple[dict, bool]:
    """(options of the lab, whether the newest checkpoint is damaged while nobody runs) of a trial."""
    chance = random.Random(f"options of {seed} {name} {number}")
    damaged = kind == "kill" and chance.random() < 0.5
    options = {"async_checkpoint": chance.random() < 0.5, "keep": chance.choice((None, 2) if damaged else (None, 1, 2))}
    return options, damaged


def trial(name: str, number: int, seed: int, undisturbed=undisturbed) -> dict:
    """Disturb a run, look, resume, look again: a row of the record, with "failures": sentences, none if all is well."""
    kind = kind_of(name, number)
    lab, options = CONFIGURATIONS[name]
    further, damaged = circumstances(name, number, seed, kind)
    row = {"configuration": name, "trial": number, "kind": kind, **further, "damaged": damaged}
    expected = undisturbed(name, further["async_checkpoint"])
    with room() as folder:
        options = options | further | {"checkpoint": f"{folder}/saved"}
        disturb = {"kill": killed, "second run": doubled, "NaN": poisoned, "I/O error": on_bad_storage}[kind]
        return row | disturb(name, number, seed, expected, lab, options, folder, damaged)


def killed(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    victim, last = moment(name, number, seed, expected)
    row = {"victim": victim, "event": last}
    _, said = attempt(train_watched, lab, options, folder, victim, last)
    if f"rank {victim} was killed by SIGKILL" not in said:
        return row | {"failures": [f"rank {victim} was not killed: {said}"]}
    row |= json.loads((Path(folder) / "note").read_text())
    failures = [f"process {each} lives on" for each in living(folder)]
    failures += faults_in(options["checkpoint"], expected)
    whole = row["ever_whole"] if options["keep"] is None else row["whole"][-1:]
    left = [path.name for path in checkpoints.stored(options["checkpoint"])]
    lost = [each for each in whole if each not in left]
    newest = checkpoints.latest(options["checkpoint"])
    # One that is whole but for its name is the newest then: it gets its name when the run resumes.
    unnamed = any(why_not_whole(path) is None for path in Path(options["checkpoint"]).glob("*.partial"))
    if damaged and len(left) > 1 and not unnamed:
        part = max(newest.glob("__*"), key=lambda path: path.stat().st_size)
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        return row | after_damage(lab, options, row, expected, failures, lost, newest, left)
    return row | after(lab, options, row["steps"], expected, failures, lost)


def after_damage(lab, options, row, expected, failures, lost, newest: Path, left: list[str]) -> dict:
    """Resume with --fall-back for as long as to the next save: the one resumed from must still be there."""
    before = next(each for each in left if each != newest.name)
    step = int(before.removeprefix("step-")) + EVERY
    length = {"max_steps": step}
    begun, said = attempt(train, lab, options | length | {"resume": True, "fall_back": True})
    if not begun or begun[0] != step - EVERY:
        return {"lost": len(lost), "failures": [*failures, f"it cannot fall back to {before}: {said or begun}"]}
    there = [path.name for path in checkpoints.stored(options["checkpoint"])]
    lost += [each for each in (before, checkpoints.name_of(step)) if each not in there]
    if not newest.with_suffix(".damaged").exists():
        failures.append(f"{newest.name} was not set aside")
    ended = after(lab, options, step, expected, failures, lost, aside=[f"{newest.name}.damaged"])
    return ended | {"resumed_at": begun[0], "redone": row["steps"] - begun[0]}


def doubled(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    phases = {phase: PHASES[phase] for phase in ("training", "saving")}  # while it owns the folder
    _, last = moment(name, number, seed, expected, phases)
    chance = random.Random(f"second of {seed} {name} {number}")
    other = {"seed": chance.choice((1, 2)), "resume": chance.choice((True, False))}
    row = {"victim": 0, "event": last, "second": other}
    saved, note = Path(options["checkpoint"]), Path(folder) / "note"
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(attempt, train_watched, lab, options, folder, 0, last, "waits")
        while not note.exists() and not first.done():
            time.sleep(0.02)
        before = listing(saved)
        _, said = attempt(train, lab, options | other)
        changed = listing(saved) != before
        (Path(folder) / "goes on").touch()
        ended, told = first.result()
    row |= json.loads(note.read_text()) if note.exists() else {}
    failures = []
    over = not row.get("owned", True) and row["steps"] == STEPS  # released after the last step: free for the second run
    refused = "is in use by" in said or "give --resume to go on from it" in said
    if not (refused or over):
        failures.append(f"the second run was not refused: {said or 'it trained'}")
    if changed and not over:
        failures.append("the second run changed the folder")
    if not ended:
        failures.append(f"the first run did not come to its end: {told}")
    taken = {"silent_takeovers": int(not (refused or over))}
    return row | taken | at_the_end(options, expected, failures, [])


def listing(folder: Path) -> dict:
    """{path: its size} of what is in a folder of checkpoints, without what a run is writing."""
    return {str(path): path.stat().st_size for path in folder.rglob("*") if ".partial" not in str(path)}


def poison(name: str, number: int, seed: int) -> tuple[int, int]:
    """(rank, step after which one of its weights is NaN) of a trial."""
    chance = random.Random(f"NaN of {seed} {name} {number}")
    return chance.randrange(RANKS), chance.randint(1, STEPS)


def poisoned(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    victim, step = poison(name, number, seed)
    row = {"victim": victim, "steps": step}
    ended, said = attempt(train_poisoned, lab, options, folder, victim, step)
    failures = ["a run with a NaN came to its end as if it were well"] if ended else []
    if not ended and "not finite" not in said:
        failures.append(f"it ended for another reason: {said}")
    failures += faults_in(options["checkpoint"], expected)
    whole = [checkpoints.name_of(each) for each in range(EVERY, step, EVERY)]  # saved before
    whole = whole if options["keep"] is None else whole[-1:]
    left = [path.name for path in checkpoints.stored(options["checkpoint"])]
    return row | after(lab, options, step, expected, failures, [each for each in whole if each not in left])


def on_bad_storage(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    chance = random.Random(f"storage of {seed} {name} {number}")
    victim, writing, reading = chance.randrange(RANKS), chance.randint(1, 2), 1
    half = 2 * EVERY
    row = {"victim": victim, "steps": half}
    failures = []
    for number, more in ((half, {}), (STEPS, {"resume": True})):
        length = {"max_steps": number}
        begun, said = attempt(train_on_bad_storage, lab, options | length | more, folder, victim, writing, reading)
        if not begun:
            failures.append(f"an error that passes ended the run: {said}")
    if not list(Path(folder).glob("failed-*")):
        failures.append("no error was injected")
    return (
        row
        | {"resumed_at": begun[0] if begun else None, "redone": half - begun[0] if begun else 0}
        | at_the_end(options, expected, failures, [])
    )


def after(lab, options, steps, expected, failures, lost, aside=()) -> dict:
    """Resume a run that was disturbed, to its end. steps: how many it had made."""
    begun, said = attempt(train, lab, options | {"resume": True})
    if not begun and "nothing left to train" in said:  # it was killed after its last save
        begun = [STEPS]
    if not begun:
        return {"lost": len(lost), "failures": [*failures, f"it cannot be resumed: {said}"]}
    most = 2 * EVERY if options["async_checkpoint"] else EVERY
    if (redone := steps - begun[0]) > most:
        failures.append(f"{redone} steps are done again, and at most {most} should be")
    return {"resumed_at": begun[0], "redone": redone} | at_the_end(options, expected, failures, lost, aside)


def at_the_end(options, expected, failures: list[str], lost: list[str], aside=()) -> dict:
    """What the row says of the folder that a run has left. aside: names of what was damaged, and may be there."""
    failures += [f"{each} was whole and is lost" for each in lost]
    found = [path.name for path in Path(options["checkpoint"]).iterdir() if not path.name.startswith(".owner-")]
    whole = sorted(expected.prints)[-(options["keep"] or STEPS) :]
    if sorted(found) != sorted([*whole, *aside]):
        failures.append(f"it ends with {', '.join(sorted(found))}, and should with {', '.join([*whole, *aside])}")
    faults = faults_in(options["checkpoint"], expected)
    failures += [fault for fault in faults if fault not in failures]
    return {"equal": not faults, "lost": len(lost), "failures": failures}


def run(trials: int, seed: int, done=lambda rows: None) -> list[dict]:
    """So many trials of each configuration: the rows of the record. done: is given those there are, after each trial."""
    rows = []
    for name in CONFIGURATIONS:
        once = functools.cache(undisturbed)
        for number in range(trials):
            rows.append(trial(name, number, seed, once))
            done(rows)
    return rows


def table(rows: list[dict]):
    """A pandas.DataFrame with a line for each configuration."""
    import pandas  # here, as every rank of every trial imports this file

    lines = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        kinds = Counter(row["kind"] for row in mine)
        lines.append(
            {"configuration": name, "trials": len(mine)}
            | {kind: kinds[kind] for kind in dict.fromkeys(KINDS)}
            | {
                "killed while saving": sum(row["kind"] == "kill" and row.get("phase") == "saving" for row in mine),
                "asynchronous": sum(row["async_checkpoint"] for row in mine),
                "with --keep": sum(row["keep"] is not None for row in mine),
                "damaged, --fall-back": sum(row["damaged"] for row in mine),
                "steps done again, at most": max(row.get("redone", 0) for row in mine),
                "weights bitwise equal": f"{sum(row.get('equal', False) for row in mine)} of {len(mine)}",
                "checkpoints lost": sum(row.get("lost", 0) for row in mine),
                "silent takeovers": sum(row.get("silent_takeovers", 0) for row in mine),
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
        rows = run(options.trials, options.seed, lambda rows: records.write_rows(path, rows, seed=options.seed))
    except UserError as error:
        ranks.leave(str(error))
    print(table(rows).to_markdown(index=False))
    failed = [row for row in rows if row["failures"]]
    for row in failed:
        print(f"\n{row['configuration']}, trial {row['trial']}, {row.get('where')}:", *row["failures"], sep="\n  ")
    print(f"\n{len(rows)} trials, {len(failed)} failed; record: {path}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
