# SPDX-License-Identifier: BSD-3-Clause
"""Write docs/planner.md, the planner's manual, with what plan.py answers: python -m proofs.planner_page"""

import re
import shlex
import subprocess
import sys

from labkit.running import launch
from planner.gpus import COMMUNICATOR, REPORTED

PAGE = launch.SOURCE.parent / "docs" / "planner.md"
MODEL = "--preset llama3-8b --precision bf16"
STEP = f"{MODEL} --ranks 8 --batch-size 1 --seq-len 8192"
ANSWER, PEAK, TIME = r"(fits|tight|does not fit)\b.*", r"peak of a rank .*", r"a step takes .*"
SLOW = f"{MODEL} --ranks 16 --batch-size 1 --seq-len 8192 --recompute full --network 25gbit"
FEW = f"{MODEL} --ranks 2 --batch-size 1 --seq-len 4096 --recompute full"
QUESTIONS = {  # question: (plan.py's options, of several runs as a list; the lines that answer it; what to know)
    "Does my model fit?": (
        f"{STEP} --recompute full",
        [ANSWER, r"  [\d.]+ GiB planned.*"],
        "*Fits* includes what PyTorch's allocator reserves beyond the tensors, and what a process holds outside of PyTorch. "
        "*Tight* fits only if the allocator reserves nothing. `planner/gpus.py` has both figures and their sources.",
    ),
    "How many GPUs do I need?": (
        "--preset llama3-70b --precision bf16 --recompute full --batch-size 1 --seq-len 4096 --find ranks",
        [r"the least .*", r"\(.* needs .*"],
        "The output also lists sizes on both sides of the limit.",
    ),
    "What is the largest batch?": (
        f"{MODEL} --ranks 8 --seq-len 4096 --recompute full --find batch-size",
        [r"the most .*"],
        "All ranks together take `--ranks` times as many.",
    ),
    "What is the longest sequence?": (
        f"{MODEL} --ranks 8 --batch-size 1 --recompute full --find seq-len",
        [r"the most .*"],
        "For a longer one, split the sequence (`--mesh context=N`) or offload activations (`--offload-activations`).",
    ),
    "Which strategy should I use?": (
        "--preset llama3-70b --precision bf16 --ranks 64 --batch-size 1 --seq-len 4096 --sweep",
        [r" +strategy .*", r" +1 .*", r" +3 .*"],
        "Rows with the same place are too close for the estimate to rank. Rows that do not fit, left out here, print what they lack.",
    ),
    "Where does the memory go?": (
        f"{STEP} --recompute full --explain",
        [PEAK, r"  (parameters|optimizer state|activations|all-gather|temporary) .*"],
        "`--explain` adds each term with its size; `--plot plan.png` draws the memory over a step.",
    ),
    "What does recomputation save?": (
        f"{STEP} --recompute none",
        [ANSWER, PEAK],
        "Compare with the first question: the same step with `--recompute full`.",
    ),
    "What does DDP need?": (
        f"{STEP} --recompute full --strategy ddp",
        [ANSWER, PEAK],
        "Under DDP each rank holds the whole model, its gradients, and its optimizer state, on any number of ranks.",
    ),
    "What if I keep the gathered weights, as ZeRO-2 does?": (
        f"{STEP} --recompute full --reshard-after-forward false",
        [ANSWER, PEAK],
        "This saves the second all-gather of each block. `--reshard-after-forward 4` keeps a quarter of each block.",
    ),
    "How much is sent, and how long does a step take?": (
        f"{STEP} --recompute full",
        [r"collectives of a step .*", r" +\d+ × .*", TIME],
        "Bytes are calculated. Times are estimates: bytes over published bandwidths, and FLOPs at `--efficiency` of the GPU's peak. "
        "*Overlapped* hides as much communication as the order of the step allows; *serial* hides none.",
    ),
    "How long will training take, and what will it cost?": (
        f"{STEP} --recompute full --tokens 15e9 --price 2.5",
        [r" +.*GPU-hours.*"],
        "`--price` is the price of a GPU-hour, in any currency. The ranges are from overlapped to serial.",
    ),
    "My network between nodes is slow. Should I use HSDP?": (
        [SLOW, f"{SLOW} --mesh 2x8"],
        [ANSWER, TIME],
        "`--mesh 2x8` shards within a node and replicates over two. Here that saves time and costs memory.",
    ),
    "What does CPU offload save?": (
        [FEW, f"{FEW} --cpu-offload"],
        [ANSWER, PEAK, r"in the CPU's memory .*"],
        "The last line is what each rank pins of its node's memory.",
    ),
    "Can I fine-tune on one GPU, with LoRA?": (
        f"{MODEL} --strategy single --lora 16 --frozen nf4 --gpu rtx4090 --batch-size 1 --seq-len 2048 --recompute full",
        [ANSWER, PEAK],
        "`--lora 16` trains adapters of rank 16; `--frozen nf4` is QLoRA's four-bit base, which no lab trains.",
    ),
    "Does it fit on another GPU?": (
        f"{STEP} --recompute full --gpu a100-40",
        [ANSWER],
        "`--gpu-memory` takes any other limit, in GiB.",
    ),
    "What does tensor parallelism change?": (
        "--preset llama3-70b --precision bf16 --ranks 64 --batch-size 1 --seq-len 8192 --recompute full --mesh shard=8,tensor=8",
        [ANSWER, PEAK],
        f"Each further communicator takes memory on the GPU. The answer assumes {COMMUNICATOR:g} GiB for each; reports range from "
        f"{REPORTED[0]:g} to {REPORTED[1]:g}.",
    ),
    "And pipeline parallelism?": (
        f"{MODEL} --ranks 4 --mesh pipeline=4 --accumulate 8 --batch-size 1 --seq-len 4096 --recompute full",
        [ANSWER, r"peaks of the stages .*"],
        "`--accumulate` is the number of micro-batches.",
    ),
    "And DeepSpeed?": (
        f"{STEP} --recompute full --strategy deepspeed-3",
        [ANSWER, PEAK],
        "The stages are `deepspeed-0` to `deepspeed-3`, with the settings of `gpt_zero.py`.",
    ),
    "Can I plan a Hugging Face model?": (
        "--config samples/llama_small.json --ranks 8 --precision bf16 --batch-size 1 --seq-len 4096",
        [r"[\d,]+ parameters.*", ANSWER, PEAK],
        "[families.md](families.md) lists each family: planned by arithmetic, simulated by the library's own code, or refused. "
        "`--module my_model.py:build` simulates your own module.",
    ),
    "How do I check the plan?": (
        "--preset tiny --ranks 4 --device cpu --simulate",
        [r"simulated, .*"],
        "`--simulate` runs PyTorch's own code, on tensors without memory. Of a GPT with many equal blocks it runs only three "
        "models with few blocks, and repeats what a block adds; where these three do not predict each other to the byte, it "
        "runs all blocks. To measure, run the command in the last line of the plan: it prints the peak of rank 0.",
    ),
}
TOP = """# The planner

`plan.py` says whether a training run fits on your GPUs, what it sends, and how long it takes, before you queue it. It needs only
Python (`--simulate`, `--plot`, and `--module` need PyTorch). It takes the options of `gpt_fsdp.py`: replace that name by
`plan.py` in a command to see what the command needs. `python plan.py --help` lists all options; `--json` prints the plan as data.

Everything is predicted. For the CPU's kernels the peaks were compared with measured ones, in [listed]({reference}/memory-listed-amd-epyc-2-cores.json)
and in [drawn]({reference}/memory-drawn-amd-epyc-2-cores.json) configurations; for a GPU's kernels, with PyTorch's own code on tensors without memory. **No GPU
has been compared yet.** [What ran where](what_ran_where.md) has the details.

The answers below are lines of its output (`python -m proofs.planner_page` writes them, and a test compares them). The GPU is an
H100 unless the command names another.
""".format(reference="../source_code/results/reference")


def chosen(output: str, wanted: list[str]) -> list[str]:
    """Return the lines of plan.py's output that match one of the patterns as a whole.

    Raises:
        ValueError: a pattern matches no line.
    """
    lines = output.splitlines()
    for pattern in wanted:
        if not any(re.fullmatch(pattern, line) for line in lines):
            raise ValueError(f"no line is {pattern!r} in:\n{output}")
    return [line.rstrip() for line in lines if any(re.fullmatch(pattern, line) for pattern in wanted)]


def answered(commands: str | list[str], wanted: list[str], remark: str) -> str:
    """Return the answer to a question: one command or several, the lines that they print, and what to know of them."""
    commands = [commands] if isinstance(commands, str) else commands
    outputs = [f"$ python plan.py {command}\n{printed(command)}" for command in commands]
    return "\n".join(["```", *chosen("\n".join(outputs), [r"\$ .*", *wanted]), "```", "", remark])


def printed(command: str) -> str:
    """Return what plan.py prints with these options."""
    words = [sys.executable, "plan.py", *shlex.split(command)]
    return subprocess.run(words, cwd=launch.SOURCE, capture_output=True, text=True, check=True, timeout=300).stdout


def page() -> str:
    """Return docs/planner.md."""
    parts = [f"## {question}\n\n{answered(*how)}\n" for question, how in QUESTIONS.items()]
    return "\n".join([TOP, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
