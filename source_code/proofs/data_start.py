# SPDX-License-Identifier: BSD-3-Clause
"""Measure how long hf_fsdp.py takes to start on a long text, and how much memory its tokens take on all ranks.

  python -m proofs.data_start                  # 300 MB of text on 4 ranks: some minutes, 1 GB of disk

The text is that of the files of the installed Python packages. A byte-level BPE with 32,000 tokens is trained on its begin.
Times are those of the whole command with a single step of a small model: the first one encodes the text, the second one
finds the tokens. Then each rank reads all tokens, and counts the pages of their file that it has mapped:

  resident        bytes of them in the rank's memory
  proportional    the same, with each page divided by the number of processes that share it: the sum over the ranks is what
                  they take together
"""

import os
import random
import site
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hf_fsdp
import torch.distributed as dist
from labkit import UserError
from labkit.measuring import records
from labkit.running import fork_server, gpus, launch, notebook_ranks, ranks
from labkit.running.options import Options, option, parse
from labkit.training import sequences
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

RANKS = 4
VOCABULARY = 32_000
SAMPLE = 10_000_000  # bytes on which the tokenizer is trained
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".json", ".h", ".hpp")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def texts() -> Iterator[bytes]:
    """Yield the text files of the installed packages in random order, over and over."""
    found = sorted(path for path in Path(site.getsitepackages()[0]).rglob("*") if path.suffix in SUFFIXES)
    random.Random(0).shuffle(found)
    while True:
        for path in found:
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if "\0" not in text:
                yield text.encode()


def write_text(path: Path, size: int):
    """Write a text of at least ``size`` bytes."""
    with path.open("wb") as file:
        for text in texts():
            file.write(text)
            if file.tell() >= size:
                return


def save_model(folder: Path, text: Path):
    """Save a small model of random weights, with a tokenizer that is trained on the begin of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["</s>"], initial_alphabet=alphabet)
    with text.open("rb") as file:
        sample = file.read(SAMPLE).decode(errors="ignore")
    tokenizer.train_from_iterator(sample.splitlines(keepends=True), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def seconds(options: dict) -> float:
    """Return the seconds that hf_fsdp.py takes for a step."""
    begin = time.perf_counter()
    launch.run("hf_fsdp.py", ranks=RANKS, cluster=launch.Cluster(launcher="local"), max_steps=1, **options)
    return time.perf_counter() - begin


def pages(me, options: dict) -> dict[str, int]:
    """Read all tokens, and return their bytes and what of them is in memory. Collective.

    Returns:
        {"tokens": their number, "file": bytes of their file, "resident", "proportional": see this file's docstring}.
    """
    data = sequences.load(hf_fsdp.Config(**options), VOCABULARY, me)[0].corpus
    data.tokens.sum()
    dist.barrier()
    found = mapped(str(data.tokens.base.filename))
    dist.barrier()  # a rank that ends shares no page any more
    return {"tokens": len(data.tokens), "file": data.tokens.nbytes} | found


def mapped(path: str) -> dict[str, int]:
    """Return the bytes of this process's mapping of a file: {"resident", "proportional"}."""
    found, inside = {"resident": 0, "proportional": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # the header of the next mapping, which ends with its file
            inside = line.endswith(path)
        elif inside and first in ("Rss:", "Pss:"):
            found["resident" if first == "Rss:" else "proportional"] += int(rest[0]) * 1024
    return found


def run(size: int) -> dict:
    """Start twice on a text of ``size`` bytes, and return {"text": its bytes, "first", "second": seconds, "by rank"}."""
    with tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS)) as folder:
        text, model = Path(folder) / "text.txt", Path(folder) / "model"
        write_text(text, size)
        save_model(model, text)
        os.environ["FSDP_LABS_DATA"] = f"{folder}/data"  # where the tokens go: nothing is there yet
        os.environ[fork_server.VARIABLE] = "0"  # each command imports its libraries, as in a shell
        options = {"model": str(model), "data": str(text), "device": "cpu", "seq_len": 128}
        row = {"text": text.stat().st_size, "ranks": RANKS, "first": seconds(options), "second": seconds(options)}
        here = launch.Cluster(launcher="local")
        return row | {"by rank": notebook_ranks.on_ranks(pages, options, ranks=RANKS, cluster=here)}


def table(row: dict) -> str:
    """Return what was measured as a Markdown table."""
    found = row["by rank"]
    lines = {
        "text": f"{row['text'] / 1e6:.0f} MB",
        "tokens": f"{found[0]['tokens']:,}, in a file of {found[0]['file'] / 1e6:.0f} MB",
        "command with one step, the first time": f"{row['first']:.0f} s",
        "the second time": f"{row['second']:.1f} s",
        "tokens in each rank's memory, all read": ", ".join(f"{rank['resident'] / 1e6:.0f}" for rank in found) + " MB",
        f"tokens in the memory of all {row['ranks']} ranks together": (
            f"{sum(rank['proportional'] for rank in found) / 1e6:.0f} MB"
        ),
    }
    return "\n".join(["| | |", "|:--|:--|", *(f"| {name} | {value} |" for name, value in lines.items())]) + "\n"


@dataclass(frozen=True)
class Config(Options):
    """How much text. The command line is made from these fields."""

    megabytes: int = option(300, "size of the text, in MB", least=1)
    record: str | None = option(None, "where the record goes (default: results/runs/)")


def main():
    config = parse(Config, __doc__)
    gpus.hide()
    try:
        path = records.new_path("data-start", config.record)
        row = run(config.megabytes * 10**6)
        records.write_rows(path, [row])
    except UserError as error:
        ranks.exit_with_error(str(error))
    print(table(row))
    print(f"record: {path}")


if __name__ == "__main__":
    main()
