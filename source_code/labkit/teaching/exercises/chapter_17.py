"""Exercises of chapter 17, your own model."""

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from planner.models import huggingface
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labkit.measuring import trace
from labkit.running import launch
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import hf_models

MIB, GIB = 2**20, 2**30
PARAMETERS = 8_030_261_248  # of Llama 3 8B
WORLD, LENGTH, BUDGET = 4, 64, 36 * MIB  # bytes on a rank at the peak of a step, tensors only
CONFIG = json.loads((launch.SOURCE / "samples" / "llama_small.json").read_text())  # the chapter's model
SHAPE = huggingface.shape_of(CONFIG)

TRAPS = {  # a word for it: what one would see
    "units": "few units, or large ones: print them, with the parameters of each",
    "tied": "more parameters than before, and later an error about a shared one, or two weights that drift apart",
    "buffers": "a loss that is wrong without saying so, and buffers unlike those of from_pretrained",
    "load": "host memory of the whole model on each rank, before the first step",
    "recompute": "a peak that does not fall, although recomputation was asked for",
}


def _model(tied: bool):
    """The chapter's model, with random weights."""
    import transformers

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"tie_word_embeddings": tied}))


def _cut(me, shard, tied: bool) -> dict:
    """What has become of a model that ``shard`` has cut: its units, what is in none, whether the weight is still shared."""
    model = _model(tied)
    shard(model, init_device_mesh("cpu", (me.world_size,)))
    units = [name or "model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    loose = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return {"model": model, "units": units, "loose": loose, "tied": hf_models.tied(model)}


def _trained(me, shard) -> list[dict]:
    """Of the model with two weights for embedding and head, and of the one with a shared one: what ``_cut`` finds, and the peak."""
    torch.set_num_threads(1)
    found = []
    for tied in (False, True):
        about = _cut(me, shard, tied)
        model = about.pop("model")
        if not tied and "model" in about["units"] and not about["loose"]:
            about["peak"] = _peak(model)
        found.append(about)
    return found


def _peak(model) -> int:
    """Bytes alive at the peak of a step: the lower of two, as in every record."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    meter = trace.StepTrace(model, optimizer, torch.device("cpu"))
    peaks = []
    for _ in range(3):  # the first makes the meter acquainted with what is there
        ids = torch.randint(256, (1, LENGTH + 1))
        with meter:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(trace.peak(meter.timeline())[1])
    return min(peaks[1:])


def judge_shard(shard) -> str:
    apart, tied = on_ranks(_trained, shard, ranks=WORLD, timeout=90)[0]
    if not apart["units"]:
        return "not answered yet"
    if apart["loose"]:
        return f"not quite: {apart['loose'][0]} is in no unit: nobody shards it; end with fully_shard(model, mesh=mesh)"
    if "model" not in apart["units"]:
        return (
            "not quite: the model itself is no unit: end with fully_shard(model, mesh=mesh), which takes what is left"
        )
    if apart["peak"] > BUDGET:
        much = f"the peak is {apart['peak'] / MIB:.1f} MiB, the budget {BUDGET / MIB:.0f}"
        return f"not quite: {much}: {_too_large(apart['units'])}"
    if not tied["units"] or tied["loose"] or "model" not in tied["units"]:
        return "not quite: where embedding and head share their weight, not all of the model is in a unit"
    if not tied["tied"]:
        return (
            "not quite: where embedding and head share their weight, they are two weights afterwards: "
            "leave both to one unit, such as the root"
        )
    return "right"


def _too_large(units: list[str]) -> str:
    blocks = [name for name in units if name.rpartition(".")[2].isdecimal()]
    if units == ["model"]:
        return "all is one unit, which is whole at once"
    if len(blocks) < SHAPE.num_hidden_layers:
        return f"the units are {', '.join(units[:4])}, …: whose forward runs the decoder's blocks one by one?"
    return "each block is a unit; what else is large? The root is whole all through the step"


@dataclass(frozen=True)
class Find:
    """An exercise whose answer names a trap: {"a": "units", …}, a word of ``TRAPS`` for each script."""

    title: str
    level: int
    minutes: int
    traps: dict[str, str]
    hint: str
    solution: str

    def judge(self, given) -> str:
        if not isinstance(given, dict) or set(given) != set(self.traps):
            return f"a trap for each script is wanted: {{{', '.join(f'{name!r}: …' for name in self.traps)}}}"
        if all(unanswered(word) for word in given.values()):
            return "not answered yet"
        for script, word in given.items():
            if word not in TRAPS:
                return f"{word!r} is none of the traps: {', '.join(TRAPS)}"
            if word != self.traps[script]:
                return f"not quite: script {script}: with {word!r} one would see {TRAPS[word]}"
        return "right"


EXERCISES = {
    "17.0": Do(
        title="somebody else's model within a budget",
        level=2,
        minutes=12,
        judge=judge_shard,
        hint="Inner modules first, the model last. model.model.layers are the blocks; model.get_input_embeddings() and "
        "model.get_output_embeddings() find the other two large ones, in every family. If their weights are one tensor, "
        "`is` says so.",
        solution="""
from torch.distributed.fsdp import fully_shard

def shard(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:  # two weights, two units; a weight that both use is the root's
        fully_shard(embedding, mesh=mesh)
        fully_shard(head, mesh=mesh, reshard_after_forward=False)  # backward begins with it
    fully_shard(model, mesh=mesh)  # the root: what is left
""",
    ),
    "17.1": Predict(
        title="host memory of eight ranks that each load the whole",
        level=1,
        minutes=3,
        answer=8 * 4 * PARAMETERS / GIB,
        unit="GiB",
        slips={
            "that is one rank's copy; all eight ranks of the node make one": 4 * PARAMETERS / GIB,
            "in bf16 it lies in the file; the ranks ask for fp32, 4 bytes per parameter": 8 * 2 * PARAMETERS / GIB,
            "that is the size of the file; each rank makes a copy of its own, in fp32": 2 * PARAMETERS / GIB,
            "1 GiB is 1024³ bytes": 8 * 4 * PARAMETERS / 1e9,
        },
        hint="Converted numbers cannot lie in the file: each rank has its own. How many bytes has one in fp32?",
        solution=f"answer = 8 * {PARAMETERS:_} * 4 / 2**30  # eight copies in fp32, before anything is sharded",
    ),
    "17.2": Find(
        title="which trap is in which script?",
        level=2,
        minutes=8,
        traps={"a": "recompute", "b": "units", "c": "buffers"},
        hint="For each script, ask what trap 1 to 5 would have you print: the units, the weights shared, the buffers, the "
        "host's memory, and the mode that from_pretrained leaves a model in.",
        solution="""
answer = {
    "a": "recompute",  # from_pretrained leaves the model in eval mode, in which the library recomputes nothing
    "b": "units",  # no module of this model is a "LlamaBlock": all is left to the root, one unit
    "c": "buffers",  # to_empty gives the rotary tables memory, and read_into knows parameters only
}
""",
    ),
}
