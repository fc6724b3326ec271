# SPDX-License-Identifier: BSD-3-Clause
"""Inject faults: disturb a run, resume it, and compare it bit by bit with an undisturbed reference run.

  python -m proofs.crash                        MNIST and GPT, under DDP and FSDP2: 60 trials; a table and a record
  python -m proofs.crash --trials 4 --seed 7    four trials of each, at other times

A trial injects one of four faults; a seed determines where, when, and with which options:

  kill         one of two ranks kills itself (SIGKILL) at the n-th event of its Python: a call or a return, in the lab's
               code, in the course's or in PyTorch's; half of these lie in saving. In some trials the newest checkpoint
               is then damaged, and the run resumes with --fallback
  second run   another run is started on the same --checkpoint folder, with the same or another seed
  NaN          a weight of one rank becomes NaN after a step
  I/O error    the storage fails to answer, once while a checkpoint is written and once while one is read

Some trials save with --async-checkpoint, some with --keep-last. Every run must end with the bits of the reference run, after
repeating no more steps than lie between two checkpoints (twice as many where the newest was still being written in the
background). No complete checkpoint may be lost, no incomplete one and none with a NaN may have a complete one's name, a
second run must be refused and change nothing, and no process may survive.
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
from labkit.running import launch, notebook_ranks, progress, ranks
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
    """Count a rank's events (``sys.setprofile``); at the event ``last`` write a note and call ``then``.

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
        return {path.name for path in checkpoints.stored(self.folder) if validation_error(path) is None}

    def end(self, frame):
        """Write a note of this rank's state for the trial; then inject the fault."""
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
    """Wait until the trial has tried to start a second run."""

    def wait():
        deadline = time.monotonic() + SECONDS
        while not goes_on.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    return wait


def train(me, lab: str, options: dict) -> int:
    """Run the lab's training, quietly and on few digits, and return the step it began at. Collective."""
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
    """Train as ``train`` does, and kill the victim, or let it wait, at its event ``last``, or at the end. Collective.

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
    """Train as ``train`` does, and set the victim's shard of a weight to NaN after a step. Collective."""
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
    """Train as ``train`` does; the victim's n-th file fails to be written, or read, at the first try. Collective."""
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
class ReferenceRun:
    """The undisturbed run.

    events: [{phase: ranges of numbers of events} of each rank]; prints: {checkpoint's name: its fingerprint}.
    """

    events: list[dict[str, list[range]]]
    prints: dict[str, str]


def validation_error(path: Path) -> str | None:
    """Return how a checkpoint differs from what was written, in a few words; None if it does not."""
    try:
        return manifest.difference(path, manifest.read(path)["files"])
    except UserError as error:
        return getattr(error, "reason", str(error))


def fingerprint(path: Path) -> str:
    """Hash the names and bits of a checkpoint's tensors, as DCP reads them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dcp_reading.tensors(path).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def faults_in(folder: str, expected: ReferenceRun) -> list[str]:
    """List the faults of the checkpoints in a folder: an incomplete one, or bits other than the reference run's."""
    faults = []
    for path in checkpoints.stored(folder):
        if reason := validation_error(path):
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
    """Return the process ids of a killed run that are still alive; the ranks wrote their ids to the folder."""
    numbers = {int(word) for file in Path(folder).glob("rank-*") for word in file.read_text().split()}
    there = []
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, 0)
            there.append(number)
    return there


# The trials


def try_run(function, *arguments) -> tuple[list, str]:
    """Call a function on every rank of a new run: return (the ranks' results, ""), or ([], the error message)."""
    here = launch.Cluster(launcher="local")
    try:
        return notebook_ranks.on_ranks(function, *arguments, ranks=RANKS, cluster=here, timeout=SECONDS), ""
    except launch.RunFailed as error:
        return [], str(error)


def temp_run_dir():
    """Make a temporary folder for a run, where runs write."""
    return tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix=".crash-")


def reference_run(name: str, asynchronous: bool = False) -> ReferenceRun:
    """Run a configuration to its end without a fault. UserError if it fails."""
    lab, options = CONFIGURATIONS[name]
    with temp_run_dir() as folder:
        saved = f"{folder}/saved"
        options = options | {"checkpoint": saved, "async_checkpoint": asynchronous}
        watched, message = try_run(train_watched, lab, options, folder)
        if not watched:
            raise UserError(f"{name} does not come to its end, though no rank was killed: {message}")
        events = [by_phase(spans, count) for spans, count in watched]
        prints = {path.name: fingerprint(path) for path in checkpoints.stored(saved)}
        if sorted(prints) != [checkpoints.name_of(step) for step in range(EVERY, STEPS + 1, EVERY)]:
            raise UserError(f"{name} is to save every {EVERY} of {STEPS} steps, and left {', '.join(prints)}")
        return ReferenceRun(events, prints)


def by_phase(spans: list[tuple[str, int]], count: int) -> dict[str, list[range]]:
    """Return {phase: ranges of its event numbers}, of ``count`` events in all."""
    ranges = {phase: [] for phase in PHASES}
    for (phase, begin), (_, end) in zip(spans, [*spans[1:], ("", count)], strict=True):
        if begin < end:
            ranges[phase].append(range(begin + 1, end + 1))
    return ranges


def drawn_event(name: str, number: int, seed: int, expected: ReferenceRun, phases: dict = PHASES) -> tuple[int, int]:
    """Draw (rank, event number) of a trial: always the same for one seed. phases: {phase: its weight}."""
    chance = random.Random(f"{seed} {name} {number}")
    victim = chance.randrange(RANKS)
    (phase,) = chance.choices([*phases], phases.values())
    return victim, chance.choice(chance.choice(expected.events[victim][phase]))


def kind_of(name: str, number: int) -> str:
    return KINDS[(number + [*CONFIGURATIONS].index(name)) % len(KINDS)]


def circumstances(name: str, number: int, seed: int, kind: str) -> tuple[dict, bool]:
    """Draw (the lab's options, whether to damage the newest checkpoint before the run resumes) of a trial."""
    chance = random.Random(f"options of {seed} {name} {number}")
    damaged = kind == "kill" and chance.random() < 0.5
    options = {
        "async_checkpoint": chance.random() < 0.5,
        "keep_last": chance.choice((None, 2) if damaged else (None, 1, 2)),
    }
    return options, damaged


def trial(name: str, number: int, seed: int, reference_run=reference_run) -> dict:
    """Disturb a run, check it, resume it, check again: a row of the record, whose "failures" are sentences."""
    kind = kind_of(name, number)
    lab, options = CONFIGURATIONS[name]
    further, damaged = circumstances(name, number, seed, kind)
    row = {"configuration": name, "trial": number, "kind": kind, **further, "damaged": damaged}
    expected = reference_run(name, further["async_checkpoint"])
    with temp_run_dir() as folder:
        options = options | further | {"checkpoint": f"{folder}/saved"}
        disturb = {"kill": killed, "second run": doubled, "NaN": poisoned, "I/O error": on_bad_storage}[kind]
        return row | disturb(name, number, seed, expected, lab, options, folder, damaged)


def killed(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    victim, last = drawn_event(name, number, seed, expected)
    row = {"victim": victim, "event": last}
    _, message = try_run(train_watched, lab, options, folder, victim, last)
    if f"rank {victim} was killed by SIGKILL" not in message:
        return row | {"failures": [f"rank {victim} was not killed: {message}"]}
    row |= json.loads((Path(folder) / "note").read_text())
    failures = [f"process {each} lives on" for each in living(folder)]
    failures += faults_in(options["checkpoint"], expected)
    whole = row["ever_whole"] if options["keep_last"] is None else row["whole"][-1:]
    left = [path.name for path in checkpoints.stored(options["checkpoint"])]
    lost = [each for each in whole if each not in left]
    newest = checkpoints.latest(options["checkpoint"])
    # One that is whole but for its name is the newest then: it gets its name when the run resumes.
    unnamed = any(validation_error(path) is None for path in Path(options["checkpoint"]).glob("*.partial"))
    if damaged and len(left) > 1 and not unnamed:
        part = max(newest.glob("__*"), key=lambda path: path.stat().st_size)
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        return row | after_damage(lab, options, row, expected, failures, lost, newest, left)
    return row | resume_and_compare(lab, options, row["steps"], expected, failures, lost)


def after_damage(lab, options, row, expected, failures, lost, newest: Path, left: list[str]) -> dict:
    """Resume with --fallback until the next save: the checkpoint it resumed from must survive."""
    before = next(each for each in left if each != newest.name)
    step = int(before.removeprefix("step-")) + EVERY
    length = {"max_steps": step}
    begun, message = try_run(train, lab, options | length | {"resume": True, "fallback": True})
    if not begun or begun[0] != step - EVERY:
        return {"lost": len(lost), "failures": [*failures, f"it cannot fall back to {before}: {message or begun}"]}
    there = [path.name for path in checkpoints.stored(options["checkpoint"])]
    lost += [each for each in (before, checkpoints.name_of(step)) if each not in there]
    if not newest.with_suffix(".damaged").exists():
        failures.append(f"{newest.name} was not set aside")
    ended = resume_and_compare(lab, options, step, expected, failures, lost, aside=[f"{newest.name}.damaged"])
    return ended | {"resumed_at": begun[0], "redone": row["steps"] - begun[0]}


def doubled(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    phases = {phase: PHASES[phase] for phase in ("training", "saving")}  # while it owns the folder
    _, last = drawn_event(name, number, seed, expected, phases)
    chance = random.Random(f"second of {seed} {name} {number}")
    other = {"seed": chance.choice((1, 2)), "resume": chance.choice((True, False))}
    row = {"victim": 0, "event": last, "second": other}
    saved, note = Path(options["checkpoint"]), Path(folder) / "note"
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(try_run, train_watched, lab, options, folder, 0, last, "waits")
        while not note.exists() and not first.done():
            time.sleep(0.02)
        before = listing(saved)
        _, message = try_run(train, lab, options | other)
        changed = listing(saved) != before
        (Path(folder) / "goes on").touch()
        ended, first_message = first.result()
    row |= json.loads(note.read_text()) if note.exists() else {}
    failures = []
    over = not row.get("owned", True) and row["steps"] == STEPS  # released after the last step: free for the second run
    refused = "is in use by" in message or "give --resume to continue from it" in message
    if not (refused or over):
        failures.append(f"the second run was not refused: {message or 'it trained'}")
    if changed and not over:
        failures.append("the second run changed the folder")
    if not ended:
        failures.append(f"the first run did not come to its end: {first_message}")
    taken = {"silent_takeovers": int(not (refused or over))}
    return row | taken | at_the_end(options, expected, failures, [])


def listing(folder: Path) -> dict:
    """Return {path: size} of a folder of checkpoints, without files that a run is writing."""
    return {str(path): path.stat().st_size for path in folder.rglob("*") if ".partial" not in str(path)}


def poison(name: str, number: int, seed: int) -> tuple[int, int]:
    """Draw (rank, step after which one of its weights becomes NaN) of a trial."""
    chance = random.Random(f"NaN of {seed} {name} {number}")
    return chance.randrange(RANKS), chance.randint(1, STEPS)


def poisoned(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    victim, step = poison(name, number, seed)
    row = {"victim": victim, "steps": step}
    ended, message = try_run(train_poisoned, lab, options, folder, victim, step)
    failures = ["a run with a NaN came to its end as if it were well"] if ended else []
    if not ended and "not finite" not in message:
        failures.append(f"it ended for another reason: {message}")
    failures += faults_in(options["checkpoint"], expected)
    whole = [checkpoints.name_of(each) for each in range(EVERY, step, EVERY)]  # saved before
    whole = whole if options["keep_last"] is None else whole[-1:]
    left = [path.name for path in checkpoints.stored(options["checkpoint"])]
    return row | resume_and_compare(
        lab, options, step, expected, failures, [each for each in whole if each not in left]
    )


def on_bad_storage(name, number, seed, expected, lab, options, folder, damaged) -> dict:
    chance = random.Random(f"storage of {seed} {name} {number}")
    victim, writing, reading = chance.randrange(RANKS), chance.randint(1, 2), 1
    half = 2 * EVERY
    row = {"victim": victim, "steps": half}
    failures = []
    for number, more in ((half, {}), (STEPS, {"resume": True})):
        length = {"max_steps": number}
        begun, message = try_run(train_on_bad_storage, lab, options | length | more, folder, victim, writing, reading)
        if not begun:
            failures.append(f"an error that passes ended the run: {message}")
    if not list(Path(folder).glob("failed-*")):
        failures.append("no error was injected")
    return (
        row
        | {"resumed_at": begun[0] if begun else None, "redone": half - begun[0] if begun else 0}
        | at_the_end(options, expected, failures, [])
    )


def resume_and_compare(lab, options, steps, expected, failures, lost, aside=()) -> dict:
    """Resume a disturbed run to its end, and compare. steps: the number it had made."""
    begun, message = try_run(train, lab, options | {"resume": True})
    if not begun and "nothing left to train" in message:  # it was killed after its last save
        begun = [STEPS]
    if not begun:
        return {"lost": len(lost), "failures": [*failures, f"it cannot be resumed: {message}"]}
    most = 2 * EVERY if options["async_checkpoint"] else EVERY
    if (redone := steps - begun[0]) > most:
        failures.append(f"{redone} steps are done again, and at most {most} should be")
    return {"resumed_at": begun[0], "redone": redone} | at_the_end(options, expected, failures, lost, aside)


def at_the_end(options, expected, failures: list[str], lost: list[str], aside=()) -> dict:
    """Check the folder that a run has left. aside: names of damaged checkpoints, which may remain."""
    failures += [f"{each} was whole and is lost" for each in lost]
    ranges = [path.name for path in Path(options["checkpoint"]).iterdir() if not path.name.startswith(".owner-")]
    whole = sorted(expected.prints)[-(options["keep_last"] or STEPS) :]
    if sorted(ranges) != sorted([*whole, *aside]):
        failures.append(f"it ends with {', '.join(sorted(ranges))}, and should with {', '.join([*whole, *aside])}")
    faults = faults_in(options["checkpoint"], expected)
    failures += [fault for fault in faults if fault not in failures]
    return {"equal": not faults, "lost": len(lost), "failures": failures}


def run(trials: int, seed: int, done=lambda rows: None) -> list[dict]:
    """Run ``trials`` trials of each configuration, and return the rows. done: called with the rows so far, after each trial."""
    rows = []
    for name in CONFIGURATIONS:
        once = functools.cache(reference_run)
        for number in range(trials):
            rows.append(trial(name, number, seed, once))
            done(rows)
    return rows


def table(rows: list[dict]):
    """Make a pandas.DataFrame with a line for each configuration."""
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
                "with --keep-last": sum(row["keep_last"] is not None for row in mine),
                "damaged, --fallback": sum(row["damaged"] for row in mine),
                "steps done again, at most": max(row.get("redone", 0) for row in mine),
                "weights bitwise equal": f"{sum(row.get('equal', False) for row in mine)} of {len(mine)}",
                "checkpoints lost": sum(row.get("lost", 0) for row in mine),
                "silent takeovers": sum(row.get("silent_takeovers", 0) for row in mine),
            }
        )
    return pandas.DataFrame(lines)


@dataclass(frozen=True)
class Config(Options):
    """How many trials. The command line is made from these fields."""

    trials: int = option(15, "trials of each configuration", least=1)
    seed: int = option(1, "of the ranks and the moments")
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    options = parse(Config, __doc__)
    try:
        path = records.new_path("crash", options.record)
        rows = run(options.trials, options.seed, lambda rows: records.write_rows(path, rows, seed=options.seed))
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(table(rows).to_markdown(index=False))
    failed = [row for row in rows if row["failures"]]
    for row in failed:
        print(f"\n{row['configuration']}, trial {row['trial']}, {row.get('where')}:", *row["failures"], sep="\n  ")
    print(f"\n{len(rows)} trials, {len(failed)} failed; record: {path}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
