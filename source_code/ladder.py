"""Climb the ladder: train the same network in eight ways on this machine, and show what each costs.

  python ladder.py                         (or: make run)
  python ladder.py --data mnist-5k --epochs 1 --ranks 4

Each rung is a run of mnist_fsdp.py in processes of its own. At the end: a table and a picture, in
results/runs/, with the peak memory measured on each rung beside what the arithmetic predicts.
"""

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pandas
import torch
from labkit import UserError, datasets, launch, plots, predict, ranks, records
from labkit.options import option, parse
from labkit.trace import CATEGORIES
from tqdm import tqdm

# (what it is called, options of mnist_fsdp.py)
RUNGS = [
    ("one process", {"strategy": "single"}),
    ("DDP", {"strategy": "ddp"}),
    ("FSDP1, one unit", {"strategy": "fsdp1"}),
    ("FSDP1, by size", {"strategy": "fsdp1", "wrap": "size"}),
    ("FSDP2, one unit", {"strategy": "fsdp2"}),
    ("FSDP2, by size", {"strategy": "fsdp2", "wrap": "size"}),
    ("FSDP2, CPU offload", {"strategy": "fsdp2", "wrap": "size", "cpu_offload": True}),
    ("FSDP2, resumed", {"strategy": "fsdp2", "wrap": "size"}),
]
EPOCHS = {"mnist": 1, "mnist-5k": 4}


@dataclass(frozen=True)
class Climb:
    """The whole ladder. The command line is made from these fields."""

    data: str = option("auto", "mnist, mnist-5k, or auto: MNIST if it can be had")
    epochs: int | None = option(None, "passes over the training set (default: 1 of mnist, 4 of mnist-5k)")
    ranks: int | None = option(None, "ranks of each rung but the first (default: one per GPU, or 4 on the CPU)")
    batch_size: int = option(32, "images a step on each rank")

    def __post_init__(self):
        if self.data not in ("auto", *EPOCHS):
            raise UserError(f"--data {self.data} is no data set: choose auto, mnist or mnist-5k")
        for name in ("epochs", "ranks", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, but is {value}")


def climb(config: Climb) -> list[dict]:
    """Run every rung and return [{"label", "record", "predicted"}, …]."""
    data = datasets.prepare(config.data)
    epochs = config.epochs or EPOCHS[data]
    gpus = torch.cuda.device_count()
    if gpus and (config.ranks or 1) > gpus:
        raise UserError(f"--ranks {config.ranks}, but {gpus} GPUs are visible: ask for at most {gpus}")
    common = {
        "ranks": config.ranks or gpus or 4,
        "cluster": launch.Cluster(launcher="local"),
        "quiet": True,
        "data": data,
        "epochs": epochs,
        "batch_size": config.batch_size,
    }
    runs = []
    with tqdm(total=len(RUNGS), unit="rung", position=0) as rungs:
        for label, options in RUNGS:
            rungs.set_description(f"{label:18}")
            with tqdm(total=0, unit="step", position=1, leave=False) as steps:

                def show(step, total, bar=steps):
                    bar.total = total
                    bar.update(step - bar.n)

                run = run_and_resume if label.endswith("resumed") else launch.run
                record = run("mnist_fsdp.py", on_progress=show, **common, **options)
            runs.append({"label": label, "record": record, "predicted": predicted_peak(record)})
            rungs.update()
    return runs


def run_and_resume(script, **options) -> dict:
    """Stop half-way, start again from the checkpoint, and return the record of the second run."""
    folder = launch.RUNS / f"checkpoints-{datetime.now():%Y%m%d-%H%M%S-%f}"
    sizes = {"mnist": 60000, "mnist-5k": 4000}
    steps = options["epochs"] * (sizes[options["data"]] // (options["ranks"] * options["batch_size"]))
    try:
        launch.run(script, checkpoint=folder, max_steps=max(1, steps // 2), **options)
        return launch.run(script, checkpoint=folder, resume=True, **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def predicted_peak(record: dict) -> int | None:
    """Bytes, by the arithmetic of labkit/predict.py; None on a GPU, with which that has not been compared yet."""
    if record["device"] != "cpu" or not record["memory"]:
        return None
    return predict.total(predict.plan_of(record).peak()[1])


def memory_table(runs: list[dict]) -> pandas.DataFrame:
    """Peak memory of rank 0 by category in MiB; the total, measured and predicted, in bytes."""
    used = [c for c in CATEGORIES if any(run["record"]["memory"]["peak"][c] for run in runs)]
    rows = []
    for run in runs:
        peak = run["record"]["memory"]["peak"]
        row = {"rung": run["label"], "ranks": run["record"]["ranks"], "units": run["record"]["units"] or "–"}
        row |= {category: f"{peak[category] / plots.MIB:.1f}" if peak[category] else "–" for category in used}
        row |= {
            "measured": f"{sum(peak.values()):,}",
            "predicted": f"{run['predicted']:,}" if run["predicted"] else "–",
        }
        rows.append(row)
    return pandas.DataFrame(rows)


def speed_table(runs: list[dict]) -> pandas.DataFrame:
    """Step time, throughput, traffic and accuracy of each rung."""
    return pandas.DataFrame([{"rung": run["label"], **_speed(run["record"])} for run in runs])


def _speed(record: dict) -> dict:
    step, accuracy = record["time"]["step"], record["accuracy"]
    row = {"step [ms]": "–", "samples/s": "–"}
    if step:
        median, low, high = (step[k] * 1e3 for k in ("median", "p10", "p90"))
        row = {
            "step [ms]": f"{median:.0f} ({low:.0f}–{high:.0f})",
            "samples/s": f"{record['time']['samples_per_second']:.0f}",
        }
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        size = sum(t["count"] * t["bytes"] for t in record["traffic"] if t["kind"] == kind)
        row[f"{kind} [MB]"] = f"{size / 1e6:.2f}" if size else "–"
    row["accuracy"] = f"{accuracy['correct']}/{accuracy['total']} ({accuracy['correct'] / accuracy['total']:.2%})"
    return row


def as_markdown(table: pandas.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True)


def tables(runs: list[dict]) -> str:
    """Both tables as text that is also Markdown."""
    return "\n\n".join(
        [
            plots.caption(runs[-1]["record"]),
            "Peak memory of rank 0 by category [MiB]; all of it, measured and predicted [bytes]:",
            as_markdown(memory_table(runs)),
            "Step time (10th–90th percentile), throughput, size of the tensors in a step's collectives, test accuracy:",
            as_markdown(speed_table(runs)),
        ]
    )


def read(folder: Path) -> list[dict]:
    """The runs of a ladder climbed earlier, from its records."""
    loaded = [records.load(path) for path in sorted(folder.glob("*.json"))]
    return [
        {"label": label, "record": record, "predicted": predicted_peak(record)}
        for (label, _), record in zip(RUNGS, loaded, strict=True)
    ]


def main():
    config = parse(Climb, __doc__)
    try:
        runs = climb(config)
    except UserError as error:
        ranks.leave(str(error))
    folder = launch.RUNS / f"ladder-{datetime.now():%Y%m%d-%H%M%S}"
    for number, run in enumerate(runs):
        records.write(
            folder / f"{number}-{run['label'].lower().replace(', ', '-').replace(' ', '-')}.json", run["record"]
        )
    text = tables(runs)
    (folder / "ladder.md").write_text(text + "\n")
    plots.ladder(runs, folder / "ladder.png")
    print(f"\n{text}\n\nTable, picture and records: {folder}")


if __name__ == "__main__":
    main()
