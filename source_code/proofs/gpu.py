# SPDX-License-Identifier: BSD-3-Clause
"""The GPU hour: what only a machine with GPUs can show, in parts of at most eight minutes.

  python -m proofs.gpu                    (make gpu) every part, on all GPUs of this machine
  python -m proofs.gpu --part smoke       (make gpu PART=smoke) one of them
  python -m proofs.gpu --dry-run          (make gpu DRY=1) what it would run, and which sentence each step would change
  python -m proofs.gpu --device cpu       a rehearsal of the same steps on the CPU, with small shapes

It needs no network, and the packages of the tests (make .venv/test-ready). Records go to results/reference/<gpu>/ (a rehearsal's to
results/runs/gpu-hour/), or to --folder; a table says what holds, what does not, and by how much. Started again, a part
goes on with what is not done, then with what has failed, until nothing is left. The steps are in gpu_parts.py.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit import UserError
from labkit.measuring import records
from labkit.running import site
from labkit.running.options import Options, exit_with_error, option, parse

from proofs.gpu_parts import PARTS
from proofs.gpu_rows import records_folder, row

SECONDS, MIN_STEP_SECONDS = 8 * 60, 60  # that a part may take; that a step needs to begin
FAILS = "fails"


@dataclass(frozen=True)
class Config(Options):
    """Which parts to run, and where. The command line is made from these fields."""

    part: Literal[tuple(PARTS)] | None = option(None, "which part (default: one after the other)")
    dry_run: bool = option(False, "print what would run, and run nothing")
    force: bool = option(False, "start over, even where records exist")
    device: Literal["cuda", "cpu"] = option("cuda", "cpu: a rehearsal with small shapes")
    folder: str | None = option(
        None, "where records go (default: results/reference/<gpu>; of a rehearsal, results/runs/gpu-hour)"
    )

    @property
    def gpus(self) -> int:
        return site.gpus_here()

    @property
    def ranks(self) -> int:
        """World size of runs on all GPUs (at least 1); of a rehearsal, 2."""
        return max(1, self.gpus) if self.device == "cuda" else 2


def run_part(name: str, config) -> list[dict]:
    """Run what is not done yet of a part, while its time lasts. Returns the rows of all that is done."""
    path, deadline = records_folder(config) / "rows" / f"{name}.json", time.monotonic() + SECONDS
    rows = earlier(path) if path.exists() and not config.force else []
    done, failed = ({each["step"] for each in rows if (each["what"] == FAILS) is bad} for bad in (False, True))
    steps = [step for step in PARTS[name](config) if step.name not in done]
    steps.sort(key=lambda step: step.name in failed)
    for number, step in enumerate(steps):
        left = deadline - time.monotonic()
        if left < MIN_STEP_SECONDS:
            note = f"{len(steps) - number} steps of {name} are left: start it again"
            return [*rows, about(name, step, row("not run, as the part's time is up", holds=False, note=note))]
        print(f"{name}: {step.name}", flush=True)
        try:
            seen = step.do(config, left)
        except UserError as error:  # a failed run is one, too: the others are worth having all the same
            seen = [row(FAILS, holds=False, note=str(error)[-2000:])]
        rows = [each for each in rows if each["step"] != step.name] + [about(name, step, each) for each in seen]
        records.write(path, rows)
    return rows


def earlier(path: Path) -> list[dict]:
    """The rows of what is done already. UserError: they are none."""
    try:
        rows = json.loads(path.read_text())
        if isinstance(rows, list) and all(
            {"step", "what", "holds", "measured", "expected", "off", "note"} <= row.keys() for row in rows
        ):
            return rows
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is not what proofs/gpu.py writes: remove it, or give --force")


def about(part: str, step, seen: dict) -> dict:
    return {"part": part, "step": step.name} | seen


def table(rows: list[dict]) -> str:
    """Print which rows hold, which do not, and by how much."""
    lines = [f"{'step':32} {'what':44} {'measured':>16} {'expected':>16} {'off':>10}  holds"]
    for each in rows:
        sizes = [shown(each[name]) for name in ("measured", "expected")]
        off = "" if each["off"] is None else f"{each['off']:+.4%}"
        holds = {True: "yes", False: "NO"}.get(each["holds"], "")
        note = (each["note"].strip().splitlines() or [""])[-1]
        lines.append(
            f"{each['step']:32} {each['what']:44} {sizes[0]:>16} {sizes[1]:>16} {off:>10}  {holds:5} {note}".rstrip()
        )
    failed = sum(each["holds"] is False for each in rows)
    held = sum(each["holds"] is True for each in rows)
    return "\n".join([*lines, "", f"{held} hold, {failed} do not, {len(rows) - held - failed} are facts"])


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"


def main(config) -> int:
    names = [config.part] if config.part else list(PARTS)
    if config.dry_run:
        for name in names:
            print(f"{name}:")
            for step in PARTS[name](config):
                print(f"  {step.name}", *(f"      {line}" for line in step.lines(config)), sep="\n")
                print(f"    changes {step.changes}")
        return 0
    if config.device == "cuda" and not config.gpus:
        raise UserError("PyTorch sees no GPU here: --dry-run (make gpu DRY=1) prints what it would run on one")
    records.check_writable(records_folder(config) / "rows.json", "--folder")
    os.environ.setdefault("FSDP_LABS_DEVICE", "auto" if config.device == "cuda" else "cpu")
    rows = [each for name in names for each in run_part(name, config)]
    print(table(rows))
    return 1 if any(each["holds"] is False for each in rows) else 0


if __name__ == "__main__":
    asked = parse(Config, __doc__)
    try:
        sys.exit(main(asked))
    except UserError as error:
        exit_with_error(str(error))
