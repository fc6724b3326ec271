"""Exercises of chapter 17, your own model."""

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from planner.models import huggingface
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from labkit.measuring import records, trace
from labkit.running import launch
from labkit.teaching.exercises import Do, Predict, on_ranks, unanswered
from labkit.training import hf_models

MIB, GIB = 2**20, 2**30
PARAMETERS = 8_030_261_248  # of Llama 3 8B
WORLD, LENGTH, BUDGET = 4, 64, 36 * MIB  # BUDGET: bytes per rank at the peak of a step, tensors only
CONFIG = json.loads((launch.SOURCE / "samples" / "llama_small.json").read_text())  # the chapter's model
SHAPE = huggingface.shape_of(CONFIG)

TRAPS = {  # {name: its symptoms}
    "units": "few units, or large ones: print them, with the parameters of each",
    "tied": "more parameters than before, and later an error about a shared one, or two weights that drift apart",
    "buffers": "a wrong loss without an error, and buffers that differ from those of from_pretrained",
    "load": "host memory of the whole model on each rank, before the first step",
    "recompute": "a peak that does not fall, although recomputation is enabled",
}


def _model(tied: bool):
    """Return the chapter's model, with random weights."""
    import transformers

    settings = {name: value for name, value in CONFIG.items() if name != "model_type"}
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | {"tie_word_embeddings": tied}))


def _shard(me, shard, tied: bool) -> dict:
    """Shard the model with ``shard``; return its units, the parameters in none, and whether the weights are still tied."""
    model = _model(tied)
    shard(model, init_device_mesh("cpu", (me.world_size,)))
    units = [name or "model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    loose = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return {"model": model, "units": units, "loose": loose, "tied": hf_models.tied(model)}


def _trained(me, shard) -> list[dict]:
    """Shard and train the model with untied, then tied weights; return the results of ``_shard``, and the untied peak."""
    torch.set_num_threads(1)
    results = []
    for tied in (False, True):
        about = _shard(me, shard, tied)
        model = about.pop("model")
        if not tied and "model" in about["units"] and not about["loose"]:
            about["peak"] = _peak(model)
        results.append(about)
    return results


def _peak(model) -> int:
    """Return the bytes alive at the peak of a step: the lower of two steps, as in every record."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    meter = trace.StepTrace(model, optimizer, torch.device("cpu"))
    peaks = []
    for _ in range(3):  # the first warms up the tracer
        ids = torch.randint(256, (1, LENGTH + 1))
        with meter:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(trace.peak(meter.timeline())[1])
    return min(peaks[1:])


def judge_shard(shard) -> str:
    untied, tied = on_ranks(_trained, shard, ranks=WORLD, timeout=90)[0]
    if not untied["units"]:
        return "not answered yet"
    if untied["loose"]:
        return f"not quite: {untied['loose'][0]} is in no unit, so it is not sharded; end with fully_shard(model, mesh=mesh)"
    if "model" not in untied["units"]:
        return "not quite: the model itself is not a unit: end with fully_shard(model, mesh=mesh), which takes the remaining parameters"
    if untied["peak"] > BUDGET:
        much = f"the peak is {untied['peak'] / MIB:.1f} MiB, the budget {BUDGET / MIB:.0f}"
        return f"not quite: {much}: {_too_large(untied['units'])}"
    if not tied["units"] or tied["loose"] or "model" not in tied["units"]:
        return "not quite: with tied weights of embedding and head, not all of the model is in a unit"
    if not tied["tied"]:
        return (
            "not quite: the tied weights of embedding and head are two weights after sharding: "
            "put both into one unit, such as the root"
        )
    return "right"


def _too_large(units: list[str]) -> str:
    blocks = [name for name in units if name.rpartition(".")[2].isdecimal()]
    if units == ["model"]:
        return "there is one unit, so all parameters are gathered at once"
    if len(blocks) < SHAPE.num_hidden_layers:
        return f"the units are {', '.join(units[:4])}, …: whose forward runs the decoder's blocks one by one?"
    return "each block is a unit; what else is large? The root stays gathered throughout the step"


def _blocks_and_ends(model, mesh):
    """Shard a model as the solution of 17.0 does."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    if not hf_models.tied(model):
        fully_shard(model.model.embed_tokens, mesh=mesh)
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)


@torch.no_grad()
def _filled(me, fill, folders: list[str]) -> list[str]:
    """Fill each folder's sharded model with ``fill``; return what is wrong with it, "" if nothing."""
    import transformers

    transformers.logging.disable_progress_bar()
    problems = []
    for folder in folders:
        architecture = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        _blocks_and_ends(model, init_device_mesh("cpu", (me.world_size,)))
        fill(model, folder)
        whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        problems.append(_difference(model, whole))
    return problems


def _difference(model, whole) -> str:
    """Return the first difference between a sharded model and the library's, "" if there is none."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if len(empty) == len(tensors):
        return "not answered yet"
    if empty:
        return f"not quite: {empty[0]} has no memory"
    if hf_models.tied(whole) and not hf_models.tied(model):
        return "not quite: where embedding and head are tied, they are two weights now: model.tie_weights() makes them one"
    for name, expected in {**dict(whole.named_parameters()), **dict(whole.named_buffers())}.items():
        tensor = tensors.get(name)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if tensor is None or not torch.equal(tensor, expected):
            kind = "buffer, which is in no file" if name in dict(whole.named_buffers()) else "parameter"
            return f"not quite: {name} does not have the value of from_pretrained; it is a {kind}"
    return ""


def judge_fill(fill) -> str:
    folders = []
    with tempfile.TemporaryDirectory(dir=records.ensure_writable_dir(launch.RUNS), prefix="exercise-") as scratch:
        for tied in (False, True):
            folders.append(f"{scratch}/{tied}")
            with contextlib.redirect_stdout(io.StringIO()):  # if DeepSpeed is installed, it is imported, and prints
                _model(tied).bfloat16().save_pretrained(folders[-1])
        untied, tied = on_ranks(_filled, fill, folders, ranks=2, timeout=90)[0]
    return untied or tied or "right"


@dataclass(frozen=True)
class Find:
    """An exercise whose answer names a trap of ``TRAPS`` for each script: {"a": "units", …}."""

    title: str
    level: int
    minutes: int
    traps: dict[str, str]
    hint: str
    solution: str

    def judge(self, value) -> str:
        if not isinstance(value, dict) or set(value) != set(self.traps):
            return f"name a trap for each script: {{{', '.join(f'{name!r}: …' for name in self.traps)}}}"
        if all(unanswered(word) for word in value.values()):
            return "not answered yet"
        for script, word in value.items():
            if word not in TRAPS:
                return f"{word!r} is not among the traps: {', '.join(TRAPS)}"
            if word != self.traps[script]:
                return f"not quite: script {script}: with {word!r} you would see {TRAPS[word]}"
        return "right"


EXERCISES = {
    "17.0": Do(
        title="somebody else's model within a budget",
        level=2,
        minutes=12,
        judge=judge_shard,
        hint="Inner modules first, the model last. model.model.layers are the blocks; model.get_input_embeddings() and "
        "model.get_output_embeddings() return the other two large ones, in every family. `is` tests whether their "
        "weights are one tensor.",
        solution="""
from torch.distributed.fsdp import fully_shard

def shard(model, mesh):
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:  # two weights, two units; tied weights go to the root
        fully_shard(embedding, mesh=mesh)
        fully_shard(head, mesh=mesh, reshard_after_forward=False)  # backward starts with it
    fully_shard(model, mesh=mesh)  # the root: the remaining parameters
""",
    ),
    "17.1": Do(
        title="values for a model that is sharded on the meta device",
        level=2,
        minutes=10,
        judge=judge_fill,
        hint="Steps 3 to 5, one or two lines each. dcp.load fills the dictionary that it is given, and stops at a name that "
        "is in no file: which name of a tied model's state_dict() is that? The tables belong to model.model.rotary_emb; "
        "type(module)(config=model.config) builds it anew.",
        solution="""
import torch.distributed.checkpoint as dcp

def fill(model, folder):
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty may have given each name its own tensor
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]  # the file has one tensor for both
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(folder))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers are in no file
""",
    ),
    "17.2": Predict(
        title="host memory of eight ranks that each load the whole",
        level=1,
        minutes=3,
        answer=8 * 4 * PARAMETERS / GIB,
        unit="GiB",
        slips={
            "that is one rank's copy; each of the node's eight ranks makes one": 4 * PARAMETERS / GIB,
            "the file is in bf16, but the ranks load it in fp32, with 4 bytes per parameter": 8 * 2 * PARAMETERS / GIB,
            "that is the size of the file; each rank makes its own copy, in fp32": 2 * PARAMETERS / GIB,
            "1 GiB is 1024³ bytes": 8 * 4 * PARAMETERS / 1e9,
        },
        hint="Converted weights cannot be mapped from the file: each rank has its own copy. How many bytes is a parameter in fp32?",
        solution=f"answer = 8 * {PARAMETERS:_} * 4 / 2**30  # eight copies in fp32, before anything is sharded",
    ),
    "17.3": Find(
        title="which trap is in which script?",
        level=2,
        minutes=8,
        traps={"a": "recompute", "b": "units", "c": "buffers"},
        hint="For each script, check what the traps tell you to print: the units, the tied weights, the buffers, the "
        "host's memory, and the mode in which from_pretrained returns a model.",
        solution="""
answer = {
    "a": "recompute",  # from_pretrained returns the model in eval mode, in which the library recomputes nothing
    "b": "units",  # no module of this model is a "LlamaBlock": all parameters go to the root, a single unit
    "c": "buffers",  # to_empty allocates the rotary tables, but dcp.load fills only what is in state_dict()
}
""",
    ),
}
