# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 16, fault diagnosis: diagnoses, two checks to write, nodes to drain, and a drill."""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from labkit.running import gpu_errors
from labkit.teaching.exercises import Do, on_ranks, unanswered

WORLD = 3

CAUSES = {  # {name: (the cause, its symptoms)}
    "bad sample": (
        "a value that is not finite enters on one rank",
        "one rank's loss is NaN or infinite one step before that of all ranks",
    ),
    "broken GPU": (
        "a GPU or its node fails",
        "one rank raises an error of CUDA that no script causes, and the kernel log of its node has an Xid",
    ),
    "damaged data": (
        "a file cannot be read",
        "one rank raises an error while it reads, and its traceback names the file",
    ),
    "fewer batches": (
        "a rank has fewer batches than the others, and leaves the loop",
        "all collectives match, line by line, until some ranks are past their loop and the others are not",
    ),
    "killed": (
        "a process was killed from outside",
        "a process ends without a traceback, and the launcher names a signal",
    ),
    "flipped bit": (
        "a bit changes in the memory of one rank",
        "replicas that get the same gradients hold different weights",
    ),
    "kept graph": (
        "the graph of forward stays alive after its last use",
        "memory rises with each batch, and it is activations that rise",
    ),
    "learning rate": (
        "the learning rate is too low or too high",
        "the first loss makes sense; those after it creep or explode, and are the same to the last digit only at a rate of 0",
    ),
    "lone collective": (
        "some ranks call a collective that the others do not call",
        "every rank waits in some collective, and one line was reached by some ranks only, in the middle of a step",
    ),
    "no first values": (
        "parameters were given memory, but no values",
        "the very first loss makes no sense: 0, NaN, or another one in each run",
    ),
    "old parameters": (
        "the optimizer steps tensors that the model no longer uses",
        "the loss of a batch stays the same to the last digit",
    ),
    "same order": (
        "each epoch gives the same ranks the same samples, in the same order",
        "nothing fails, but two epochs give a rank the same samples in the same order",
    ),
    "straggler": (
        "a rank takes longer than the others between collectives",
        "all ranks go on, and one of them spends its time outside of collectives, where the others wait for it",
    ),
    "slow network": ("the ranks wait for bytes", "all ranks are in the same collective, and steps take long but end"),
    "stuck outside": (
        "a rank waits for something other than a collective",
        "one rank did not arrive: it is still running, in a line that calls no collective",
    ),
    "units differ": (
        "ranks wrap the model into different units",
        "the same collective, called from the same line, with a different size on some rank",
    ),
    "world of one": (
        "the ranks did not connect: each is a separate run",
        "every process reports that it is rank 0, and takes all of the data",
    ),
    "wrong device": (
        "a rank selects a device that is not visible to it",
        "an error at the start, from all ranks except the first of each node",
    ),
    "wrong pieces": (
        "a rank reads shards written for another number of ranks",
        "loading fails, or fills part of a tensor: sizes differ by the ratio of the numbers of ranks",
    ),
}


OURS = {  # {fault: (symptom, first tool, usual cause)}
    1: ("hangs, then a time-out", "`diagnose_hang.py`, or `torchfrtrace`", "a collective under `if rank == 0`"),
    2: ("a rank is gone, no traceback", "the launcher's last lines, `sacct`, `dmesg`", "the node's memory was full"),
    3: (
        "out of memory, later than expected",
        "a timeline or snapshot of memory, by category",
        "something keeps graphs: `losses.append(loss)`",
    ),
    4: (
        "the loss does not move at all",
        "compare the optimizer's tensors with the model's",
        "the optimizer was made before `fully_shard`",
    ),
    5: (
        "an abort or a hang in the first forward",
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL`",
        "ranks wrap the model differently",
    ),
    6: (
        "all is well; every epoch has the same batches",
        "the samples' numbers, two epochs side by side",
        "`set_epoch` forgotten",
    ),
    7: ("the first loss makes no sense", "ln of the number of classes", "no first values after `to_empty`"),
    8: (
        "a resume fails, or resumes worse",
        "sizes in the file against sizes wanted",
        "a file per rank, another number of ranks",
    ),
    9: (
        "every line comes W times, nothing is faster",
        "each rank's first line: rank r of W",
        "a default for `WORLD_SIZE`",
    ),
    10: (
        "`invalid device ordinal`",
        "which ranks? what is `CUDA_VISIBLE_DEVICES`?",
        "`LOCAL_RANK` where each task sees one GPU",
    ),
    11: (
        "hangs, one rank in no collective",
        "its stack: `where_…`, or `py-spy dump`",
        "a loader, a lock, a file system",
    ),
    12: ("hangs at the end of an epoch", "`diagnose_hang.py`", "fewer batches on some rank"),
    13: (
        "slow, no error",
        "own time per rank: `diagnose_hang.py` after the run",
        "storage, a throttled GPU, a noisy node",
    ),
    14: ("NaN on all ranks", "each rank's loss *before* it is reduced", "one bad sample, or a division by zero"),
    15: ("replicas disagree", "parameter sums across replicas", "memory or an arithmetic unit that fails"),
    16: ("`CUDA error: … ECC`", "the node's kernel log: Xid", "the GPU; drain, resume without the node"),
    17: (
        "hangs on a mesh; many ranks wait",
        "`diagnose_hang.py`: who waits for whom",
        "the one rank that waits for nobody",
    ),
}


def table() -> str:
    """Return a Markdown table of each fault's number, symptom, first tool, and usual cause."""
    lines = ["| fault | you see | look first at | most often it is |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {fault} | {' | '.join(ours)} |" for fault, ours in OURS.items()])


@dataclass(frozen=True)
class Diagnose:
    """An exercise whose answer is one of ``CAUSES``; or a cause and a rank, if ``rank`` is a number.

    An answer is "killed", or ("killed", 2). whose: hint printed if the rank is wrong. also: {another accepted cause:
    the text printed after "right; "}.
    """

    title: str
    level: int
    minutes: int
    cause: str
    hint: str
    solution: str
    rank: int | None = None
    whose: str = ""
    also: dict[str, str] = field(default_factory=dict)

    def judge(self, value) -> str:
        cause, rank = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if unanswered(cause):
            return "not answered yet"
        if not isinstance(cause, str) or cause not in CAUSES:
            return f"{cause!r} is not among the causes: {', '.join(CAUSES)}"
        if cause != self.cause and cause not in self.also:
            return f"not quite: with {cause!r}, {CAUSES[cause][1]}"
        if self.rank is None or rank == self.rank:
            return f"right; {self.also[cause]}" if cause in self.also else "right"
        if rank is None:
            return f"the cause is right; on which rank? Write {cause!r}, and its number"
        return f"the cause is right, but not on rank {rank!r}: {self.whose}"


def units(model) -> dict[str, list[str]]:
    """Return {name of a unit's module: names of the parameters that FSDP2 gathers with it}; "" is the whole model.

    A parameter belongs to the nearest enclosing module passed to ``fully_shard``. model: was passed to it, too.
    """
    by_module = {}
    for name, _ in model.named_parameters():
        above = name.rpartition(".")[0]
        while not isinstance(model.get_submodule(above), FSDPModule):
            above = above.rpartition(".")[0]
        by_module.setdefault(above, []).append(name)
    return by_module


def _agreements(me, agree):
    """Return the results of ``agree`` with the same units on all ranks, and with different units on rank 1."""
    answers = []
    for odd in (False, True):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (me.world_size,))
        if odd and me.rank == 1:
            fully_shard(model[0], mesh=mesh)
        answers.append(agree(units(fully_shard(model, mesh=mesh)), me))
        dist.barrier()
    return answers


def judge_agreement(agree) -> str:
    verdict = _first_difference(on_ranks(_agreements, agree, ranks=WORLD))
    # Those ranks were forked from one process and share its state, such as the seed of Python's hash().
    if (
        verdict == "right"
        and _first_difference(on_ranks(_agreements, agree, ranks=2, timeout=120, spawn=True)) != "right"
    ):
        return (
            "not quite: ranks started as separate processes, as by torchrun, do not agree although they have the "
            "same units. hash() differs between processes (and with it the order of a set): use hashlib, or gather "
            "the units themselves"
        )
    return verdict


LOSSES = {  # {case: the losses of each rank, step by step}
    "all losses are finite": [[2.0, 1.9, 1.8]] * WORLD,
    "rank 1's loss is NaN at step 1, all ranks' at step 2": [[2.0, 1.9, float("nan")]] * 1
    + [[2.0, float("nan"), float("nan")]]
    + [[2.0, 1.9, float("nan")]],
    "rank 2's loss is infinite at step 0, and finite after that": [[2.0, 1.9, 1.8]] * 2 + [[float("inf"), 1.9, 1.8]],
    "ranks 0 and 2 begin at step 1": [[2.0, float("nan"), float("nan")], [2.0, 1.9, float("nan")]]
    + [[2.0, float("-inf"), float("nan")]],
}
ORIGINS = (None, (1, [1]), (0, [2]), (1, [0, 2]))


def _origins(me, function):
    """Return what ``function`` says of each case of ``LOSSES``."""
    answers = []
    for losses in LOSSES.values():
        answers.append(function(losses[me.rank], me))
        dist.barrier()
    return answers


def judge_origin(function) -> str:
    by_rank = on_ranks(_origins, function, ranks=WORLD)
    if not any(any(answers) for answers in by_rank):
        return "not answered yet"
    for case, wanted, answers in zip(LOSSES, ORIGINS, zip(*by_rank, strict=True), strict=True):
        for rank, answer in enumerate(answers):
            found = None if answer is None else (int(answer[0]), sorted(map(int, answer[1])))
            if found != wanted:
                return f"not quite: {case}; rank {rank} returns {answer!r} instead of {wanted!r}"
    return "right"


KERNEL_LOGS = {  # lines in the form of NVIDIA's driver, written by hand
    "n01": "NVRM: Xid (PCI:0000:3b:00): 31, pid=4100, name=python, Ch 00000008, MMU Fault",
    "n02": "NVRM: Xid (PCI:0000:86:00): 48, pid=812, name=python, DBE (double bit error)\n"
    "NVRM: Xid (PCI:0000:86:00): 45, pid=812, name=python, Ch 00000010",
    "n03": "NVRM: Xid (PCI:0000:18:00): 63, pid='N/A', Row Remapper: New row marked for remapping\n"
    "NVRM: Xid (PCI:0000:18:00): 94, pid=2977, name=python, Contained ECC error",
    "n04": "NVRM: Xid (PCI:0000:af:00): 79, pid='N/A', GPU has fallen off the bus.",
    "n05": "NVRM: Xid (PCI:0000:5e:00): 43, pid=5012, name=python, Ch 00000010\n"
    "NVRM: Xid (PCI:0000:5e:00): 45, pid=5012, name=python, Ch 00000011",
}


@dataclass(frozen=True)
class Drain:
    """An exercise whose answer is the set of the nodes in ``KERNEL_LOGS`` that must be drained before the job resumes."""

    title: str
    level: int
    minutes: int
    hint: str
    solution: str

    def judge(self, value) -> str:
        if not isinstance(value, (set, list, tuple)) or not set(value) <= set(KERNEL_LOGS):
            return f"the answer is a set of nodes: some of {', '.join(KERNEL_LOGS)}"
        for node, log in KERNEL_LOGS.items():
            action = gpu_errors.advice(log)
            if (node in value) != (action in (gpu_errors.RESET, gpu_errors.REBOOT)):
                errors = "; ".join(f"Xid {each.code}, {each.meaning}" for each in gpu_errors.read(log))
                return f"not quite: {node} has {errors}: {action}"
        return "right"


@dataclass(frozen=True)
class Drill:
    """An exercise whose answer is a list of ((kind, rank) that the learner names, (kind, rank) that was drawn)."""

    title: str
    level: int
    minutes: int
    hint: str
    solution: str

    def judge(self, value) -> str:
        try:
            pairs = [(tuple(answer), tuple(truth)) for answer, truth in value if not unanswered(answer)]
        except (TypeError, ValueError):
            return 'write each diagnosis as a kind and a rank: ("killed", 2)'
        if len(pairs) < len(list(value)) or not pairs:
            return "not answered yet"
        for number, (answer, truth) in enumerate(pairs):
            if answer[0] != truth[0]:
                return f"not quite: report {number} is not of the kind {answer[0]!r}"
            if answer != truth:
                return f"report {number}: the kind is right, but it was not rank {answer[1:]}"
        return "right"


def _first_difference(by_rank: list) -> str:
    """Check the answers of all ranks, [(with equal units, with different units), …]."""
    if any(unanswered(answer) for answers in by_rank for answer in answers):
        answered = [rank for rank, answers in enumerate(by_rank) if not any(map(unanswered, answers))]
        return (
            f"not quite: only rank {answered[0]} knows; all ranks must, to stop together"
            if answered
            else "not answered yet"
        )
    for rank, (alike, odd) in enumerate(by_rank):
        if alike is not True:
            return f"not quite: all ranks had the same units, but rank {rank} returns {alike!r} instead of True"
        if odd is not False:
            return (
                f"not quite: rank 1 had different units, but rank {rank} returns {odd!r}; every rank must return False"
            )
    return "right"


EXERCISES = {
    "16.1": Diagnose(
        title="an accuracy of 161 %, then a hang",
        level=2,
        minutes=5,
        cause="lone collective",
        rank=0,
        whose="which rank's last line is in a different function?",
        hint="The report has two parts. In the second, one rank calls from a different line. Under which `if` is that call?",
        solution='diagnosis = "lone collective", 0  # accuracy() all-reduces, but is called under `if me.rank == 0`',
    ),
    "16.2": Diagnose(
        title="gone without a traceback",
        level=1,
        minutes=2,
        cause="killed",
        rank=2,
        whose="the launcher names it",
        hint="Python had no time to print anything. What can end a process like that?",
        solution='diagnosis = "killed", 2  # SIGKILL cannot be caught: under Slurm often exit code 137 = 128 + 9, or OUT_OF_MEMORY',
    ),
    "16.3": Diagnose(
        title="out of memory, but not in training",
        level=2,
        minutes=4,
        cause="kept graph",
        hint="Which category rises from batch to batch, and does not fall? What would backward have done with it?",
        solution='diagnosis = "kept graph"  # backward is never called, and `losses` keeps every tensor saved for it alive',
    ),
    "16.4": Diagnose(
        title="a loss that does not move",
        level=1,
        minutes=3,
        cause="old parameters",
        also={
            "learning rate": "a rate of 0 prints the same; here it is 0.01, and `len(optimizer.state)` stays 0 after a step"
        },
        hint="To the last digit: were the parameters changed at all? After a step of AdamW, `len(optimizer.state)` is 8; here 0.",
        solution='diagnosis = "old parameters"  # fully_shard replaced the parameters after the optimizer had been made',
    ),
    "16.5": Diagnose(
        title="data of a size that nobody expected",
        level=2,
        minutes=5,
        cause="units differ",
        rank=1,
        whose="which rank's size differs from the rest?",
        hint="66 elements per rank, or 858: 4 × 66 = 264 are in the head, 4 × 858 = 3,432 in the whole network.",
        solution='diagnosis = "units differ", 1  # it wraps each block; on the other ranks the model is one unit',
    ),
    "16.6": Diagnose(
        title="64 of 256 samples",
        level=1,
        minutes=4,
        cause="same order",
        hint="Compare two epochs side by side. What should differ if they are shuffled?",
        solution='diagnosis = "same order"  # the sampler shuffles by seed + epoch, but set_epoch was never called',
    ),
    "16.7": Diagnose(
        title="wrong from the first loss on",
        level=1,
        minutes=3,
        cause="no first values",
        hint="Before the first step nothing has been trained. What is the loss of 8 classes then? (ln 8 = 2.08)",
        solution='diagnosis = "no first values"  # to_empty allocates memory without initializing it',
    ),
    "16.11": Diagnose(
        title="the first mystery",
        level=3,
        minutes=6,
        cause="stuck outside",
        rank=3,
        whose="who did not arrive?",
        also={
            "damaged data": "that is the root: rank 3 waits, outside of any collective, for a batch that cannot be read"
        },
        hint="It hangs. Which rank is missing, and in which line of the program is it?",
        solution='diagnosis = "stuck outside", 3  # it waits at queue.get() for a batch; the thread that loads them has ended',
    ),
    "16.12": Diagnose(
        title="the second mystery",
        level=3,
        minutes=6,
        cause="fewer batches",
        also={
            "lone collective": "that is what the report shows; and why? two ranks ran out of batches before the others"
        },
        hint="Compare the lines of the program. Which ranks are past the loop?",
        solution='diagnosis = "fewer batches"  # 30 batches for 4 ranks: two ranks have 8 and two have 7',
    ),
    "16.18": Do(
        title="do all ranks have the same units?",
        level=2,
        minutes=8,
        judge=judge_agreement,
        hint="`dist.all_gather_object(all_units, units)` fills a list with one entry per rank, on every rank.",
        solution="""
import torch.distributed as dist

def agree(units, me):
    all_units = [None] * me.world_size
    dist.all_gather_object(all_units, units)  # a collective: every rank calls it
    return all(other == units for other in all_units)
""",
    ),
    "16.13": Diagnose(
        title="slow, without an error",
        level=2,
        minutes=3,
        cause="straggler",
        rank=2,
        whose="whose own time is the longest?",
        hint="A rank that waits in a collective is innocent. Which one spends its time outside of them?",
        solution='diagnosis = "straggler", 2  # it loads its batches slowly, and the others wait for it in their all-reduce',
    ),
    "16.14": Do(
        title="where did the NaN begin?",
        level=3,
        minutes=10,
        judge=judge_origin,
        hint="Each rank finds its own first bad step (math.isfinite). Gather these, and take the smallest.",
        solution="""
import math
import torch.distributed as dist

def origin(losses, me):
    mine = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    firsts = [None] * me.world_size
    dist.all_gather_object(firsts, mine)
    steps = [step for step in firsts if step is not None]
    if not steps:
        return None
    return min(steps), [rank for rank, step in enumerate(firsts) if step == min(steps)]
""",
    ),
    "16.15": Diagnose(
        title="four validations of the same samples",
        level=2,
        minutes=3,
        cause="flipped bit",
        rank=2,
        whose="which rank differs from the other three?",
        hint="DDP gives all ranks the same gradients, and they began with the same weights. What may differ after that?",
        solution='diagnosis = "flipped bit", 2  # its weights are not those of the other three replicas',
    ),
    "16.16": Drain(
        title="which nodes must be drained?",
        level=2,
        minutes=4,
        hint="Three of the five nodes keep their job, or get it back at once. What does each Xid say about the GPU itself?",
        solution='drain = {"n02", "n04"}  # 94 is contained, with 63 it asks for a reset later; 31 and 43 are the script; 45 is a consequence',
    ),
    "16.17": Diagnose(
        title="a hang on a mesh",
        level=2,
        minutes=4,
        cause="stuck outside",
        rank=1,
        whose="who waits for nobody?",
        hint="Three ranks wait in collectives, in two kinds of groups. Follow who waits for whom to its end.",
        solution='diagnosis = "stuck outside", 1  # rank 0 and rank 3 wait for it, and rank 2 waits for rank 0',
    ),
    "16.19": Drill(
        title="the drill",
        level=3,
        minutes=6,
        hint="The first line of a report names the rank, and its words the kind. Where calls come from different lines, one rank made "
        "a call that the others did not make, whatever else differs.",
        solution="from proofs import diagnosis\n"
        "drawn = diagnosis.draws(2, seed=16, kinds=diagnosis.KINDS)  # your seed\n"
        "answers = [((each.kind, each.rank), (each.kind, each.rank)) for each in drawn]",
    ),
}
