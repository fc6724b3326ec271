# SPDX-License-Identifier: BSD-3-Clause
"""Plan the memory, time, and cost of a training run before you pay for it.

  python plan.py --preset llama3-8b --ranks 8 --batch-size 1 --seq-len 8192 --precision bf16 --recompute full
  python plan.py --preset llama3-70b --precision bf16 --find ranks      the fewest ranks; or the largest batch-size, seq-len
  python plan.py --preset llama3-70b --precision bf16 --ranks 64 --sweep    all strategies, those that fit first
  python plan.py --config config.json --gpu a100 --ranks 16   a third-party model, from its Hugging Face configuration
  python plan.py --ranks 8 --tokens 15e9 --price 2.5          hours, GPU-hours and money
  python plan.py --preset llama3-8b --strategy single --lora 16 --frozen nf4 --precision bf16 --gpu rtx4090        QLoRA
  python plan.py --preset llama3-8b --ranks 8 --explain       the terms of the peak, with their sizes
  python plan.py --ranks 8 --plot plan.png                    a figure of these terms, and of the memory of a step
  python plan.py --ranks 4 --simulate                         compared with PyTorch's own code, on fake tensors
  python plan.py --config config.json --simulate              compared with the library's own code
  python plan.py --module my_model.py:build --ranks 8         your own model: see below

It takes the options of gpt_fsdp.py, with the same defaults: replace gpt_fsdp.py by plan.py in a command to see what it
needs. A plan ends with the command that runs it. Some options belong to other labs: zero1 and deepspeed-N to gpt_zero.py,
--mesh pipeline=N to gpt_pipeline.py, --config and --model to hf_fsdp.py.

A model of a family that the planner does not know by arithmetic, or some of whose operators it does not know, is simulated
with the library's own code: PyTorch and transformers must be installed. So are peft's adapters (--config with --lora), and
the tensor-parallel plans of some families. A page says so, and why.

It needs only Python otherwise, except with --simulate, --plot and --module. The result is "fits", "tight" or "does not fit", and
includes PyTorch's reserve and the other memory of a process on a GPU (planner/gpus.py has the figures and their sources).
A tight plan fits only if the allocator reserves nothing beyond the plan.

The arithmetic is in planner/predict.py. For the CPU's kernels (--device cpu) it agrees with the meters to within 1 %, as
proofs/memory.py shows. For a GPU's kernels it agrees with PyTorch's own code on fake tensors (--simulate), and is not yet
validated on a GPU. Times are bounds: the collectives' bytes over the links' published bandwidth, and FLOPs over
--efficiency of the GPU's published peak.

Your own model: a function without arguments that returns (module, inputs, loss), where loss(module, *inputs) is the
scalar to minimize, for the batch of one rank. Its FSDP units are the members of its ModuleLists, including everything
inside of them, such as a block's experts. It trains with AdamW; in bf16 with FSDP's mixed precision, without FSDP with
autocast around ``loss``. Its peak and its traffic are simulated, so its shapes and control flow must not depend on data;
its persistent memory is predicted. ZeRO-1 is --strategy zero1; PyTorch's ZeRO-3 is fsdp2, and its ZeRO-2 is fsdp2 with
--reshard-after-forward false.
"""

import dataclasses
import importlib.util
import json
import logging
import os
import shlex
import sys

from labkit import UserError
from labkit.running.lab_options import LABS, TransformerTraining
from labkit.running.options import arguments, declared, exit_with_error, parse
from labkit.running.plan_options import Config
from planner import predict
from planner.cli import report
from planner.cli.commands import costs, describe, find, fit, plan_from_options, sweep
from planner.parallel import zero

# Options that the command of a plan always states if they differ from the lab's defaults
RESTS_ON = ("ranks", "batch_size", "seq_len", "accumulate")


def answer(options: Config) -> str:
    """Return the output of the command.

    Raises:
        UserError: the options cannot be planned, simulated or drawn.
    """
    if options.sweep or options.find:
        return answer_on_several(options)
    if options.module or options.by_library:
        return answer_by_simulation(options)
    plan = plan_from_options(options)
    result = describe(options, plan)
    if options.simulate:
        result |= simulated(options)
    if options.plot:
        draw(options, plan)
    if options.json:
        return json.dumps(result | {"command": command(options)[0]}, indent=1)
    parts = [report.plan_text(options, result)]
    if options.explain:
        parts.append(report.explained(plan))
    if options.simulate:
        parts.append(
            f"simulated, with {report.KERNELS[options.on_gpu]}: {report.gib(result['simulated'])} at "
            f"{result['simulated_at']}; predicted: {report.gib(result['peak'])} "
            f"({result['peak'] / result['simulated'] - 1:+.2%})"
        )
    return "\n\n".join([*parts, how_to_run(options)])


def answer_on_several(options: Config) -> str:
    """Return the output of --sweep or --find, which compare several plans."""
    result = sweep(options) if options.sweep else find(options)
    if options.json:
        return json.dumps(result, indent=1)
    page = report.sweep_text if options.sweep else report.find_text
    if options.find and result["found"]:
        best = {result["what"]: result["found"]}
    else:
        best = next((row["options"] for row in result if row["place"]), None) if options.sweep else None
    chosen = [how_to_run(dataclasses.replace(options, find=None, sweep=False, **best))] if best else []
    return "\n\n".join([page(options, result), *chosen])


def how_to_run(options: Config) -> str:
    """Return the last lines of the output: the command that trains as planned, or why there is none."""
    words, why = command(options)
    return f"to train it:\n  {words}" if words else f"(no lab of the course trains it: {why})"


def command(options: Config) -> tuple[str | None, str]:
    """Return (the command that trains as planned, quoted for a shell; or None, and the reason).

    It has the options that differ from the lab's defaults. Ranks on several nodes are started by Slurm.
    """
    if options.lacking:
        return None, f"{options.lab} has no {options.lacking[0]}"
    lab, words = LABS[options.lab], {}
    names = {field.name for field in dataclasses.fields(TransformerTraining)} | {"schedule", "config", "model"}
    for field in dataclasses.fields(lab):
        if field.name in names - {"wrap", "dry_run"} or (field.name == "wrap" and options.wrap):
            value, default = getattr(options, field.name), getattr(type(options), field.name)
            if value != field.default and (value != default or field.name in RESTS_ON):
                words[field.name] = value
    if options.lab == "gpt_zero.py":
        engine, stage = next(which for which, name in zero.STRATEGIES.items() if name == options.strategy)
        words |= {"stage": stage} | ({"engine": engine} if engine != "torch" else {})
    try:
        lab(**words).arranged(options.ranks)
    except UserError as error:
        return None, f"{options.lab}: {error}"
    return shlex.join([*starter(options), options.lab, *arguments(words)]), ""


def starter(options: Config) -> list[str]:
    """Return the part of the command before the lab's name: python for one node, srun for several."""
    nodes = -(-options.ranks // options.node_size)
    if nodes == 1:
        return ["python"]
    gpus = [f"--gres=gpu:{options.node_size}"] if options.on_gpu else []
    return ["srun", f"--nodes={nodes}", f"--ntasks={options.ranks}", *gpus, "python"]


def draw(options: Config, plan: predict.Plan):
    """Write --plot's file.

    Raises:
        UserError: Matplotlib or PyTorch is not installed, the format is unknown, or the file cannot be written.
    """
    for module in ("matplotlib", "torch"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"--plot draws with the course's figures, and this Python has no {module}: install it")
    from labkit.teaching.plots import planner

    planner.save(planner.step(plan, report.title(options)), options.plot)


def answer_by_simulation(options: Config) -> str:
    """Return the output for a model whose peak only its own code knows: --module, or a third-party model."""
    prepare_to_simulate(options)
    from labkit.training import simulated_plan

    # Errors are reported as one sentence; PyTorch would also log them with a traceback.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    if options.module:
        found = simulated_plan.of_module(options)
    else:
        found = simulated_plan.of_library(options, *library_step(options))
    found["memory"] = fit(options, found["simulated"], found.get("units", 1) - 1)
    if options.shape and not options.splits_model:
        found |= costs(options, plan_from_options(options))
    if options.json:
        return json.dumps(found if options.module else found | {"command": command(options)[0]}, indent=1)
    page = report.simulated_text(options, found)
    return page if options.module else f"{page}\n\n{how_to_run(options)}"


def prepare_to_simulate(options: Config):
    """Hide GPUs, which fake tensors do not need.

    Raises:
        UserError: PyTorch or transformers, which planning does not need, is not installed.
    """
    needed = ("torch", "transformers") if options.third_party else ("torch",)
    for library in needed:
        if importlib.util.find_spec(library) is None:
            why = f", as {options.why_simulated}" if options.by_library else ""
            raise UserError(
                f"this is simulated with the libraries' own code{why}; this Python has no {library}: pip install {library}"
            )
    from labkit.running import gpus as visible

    visible.hide()


def library_step(options: Config) -> tuple:
    """Return (the lab hf_fsdp.py, its options) for the step of a third-party model."""
    import hf_fsdp  # imports transformers, which takes seconds

    values = lab_values(options)
    names = {field.name for field in dataclasses.fields(hf_fsdp.Config)} & values.keys()
    values = {name: values[name] for name in names} | {"model": options.model, "config": options.config}
    return hf_fsdp, hf_fsdp.Config(device="cpu", **values)


def lab_values(options: Config) -> dict:
    """Return {option: value} of a lab's run, without what has no effect on a simulation."""
    ignored = {"compile": False, "checkpoint_every": None}
    return {name: getattr(options, name) for name in (*declared(TransformerTraining), "log")} | ignored


def simulated(options: Config) -> dict:
    """Simulate a step with PyTorch's own code, and return its peak as ``simulated_plan.peak_of`` does."""
    prepare_to_simulate(options)
    from labkit.measuring.gpu_operators import GpuOperators
    from labkit.running import simulated_lab
    from labkit.training import simulated_plan

    gpu = GpuOperators() if options.on_gpu else None
    if options.third_party:
        return simulated_plan.peak_of(simulated_lab.step(*library_step(options), options.ranks, gpu))
    import gpt_fsdp

    values = lab_values(options) | {"wrap": options.wrap or TransformerTraining.wrap}
    return simulated_plan.peak_of(simulated_lab.step(gpt_fsdp, gpt_fsdp.Config(**values), options.ranks, gpu))


def main():
    options = parse(Config, __doc__)
    try:
        print(answer(options))
    except UserError as error:
        exit_with_error(str(error))
    except BrokenPipeError:  # the reader has closed the pipe: plan.py … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
