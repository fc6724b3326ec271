# SPDX-License-Identifier: BSD-3-Clause
"""Exercises of chapter 17, your own model, and the steps and the tokenizer that its cells use."""

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from planner.models import huggingface
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from labkit.measuring import records, trace
from labkit.running import launch
from labkit.teaching.exercises import Do, on_ranks, unanswered
from labkit.training import hf_models
from labkit.training.data_files import Row
from labkit.training.encoding import ModelTokens

MIB = 2**20
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


SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (  # ChatML, as Qwen's
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def loss_of(model, ids, labels=None, use_cache=False):
    """Return the mean cross-entropy of each next token in nats; in a function, so that nothing keeps the logits.

    Args:
        model: a causal language model of transformers.
        ids: int64, (sequences, tokens).
        labels: the tokens to learn, of the same shape, -100 where there is none; None: all of ``ids``.
        use_cache: transformers' option.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=use_cache).logits
    labels = ids if labels is None else labels
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def measured(me, model, length: int = LENGTH, use_cache: bool = False) -> dict:
    """Train three steps on one sequence per rank, and return a record of the last one.

    Args:
        me: this rank.
        model: a causal language model, sharded or not.
        length: tokens of a sequence.
        use_cache: transformers' option.

    Returns:
        What ``plots.memory`` draws, "losses" of all steps, and "moved", the bytes of the last step's collectives.
    """
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(me.rank)).to(me.device)
    meter, losses = trace.StepTrace(model, optimizer, me.device), []
    for step in range(3):
        with meter if step else contextlib.nullcontext():  # the first step makes the optimizer's state
            loss = loss_of(model, ids, use_cache=use_cache)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    moment, _ = trace.peak(meter.timeline())
    about = {"hardware": records.hardware(me.device), "ranks": me.world_size, "batch_size": 1}
    about |= {"data": {"name": "random tokens"}, "losses": losses}
    about["moved"] = sum(size * count for (_, size, _), count in meter.collectives.items())
    return about | {"memory": {"peak": {each: moment[each] for each in trace.CATEGORIES}}}


def peak(record: dict) -> int:
    """Return the bytes at the peak of a record's step."""
    return sum(record["memory"]["peak"].values())


@torch.no_grad()
def differing(model, whole) -> list[str]:
    """Return the names of the parameters and buffers, whole or sharded, that are not those of another model. Collective."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = []
    for name, expected in (dict(whole.named_parameters()) | dict(whole.named_buffers())).items():
        tensor = tensors.get(name)
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if tensor is None or not torch.equal(tensor, expected):
            names.append(name)
    return names


def save_tokenizer(folder):
    """Save a tokenizer with a chat template as a model's folder has it: token n is byte n, and two tokens more.

    Args:
        folder: the model's folder.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = Tokenizer(models.BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[1])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


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
    results = []
    for tied in (False, True):
        about = _shard(me, shard, tied)
        model = about.pop("model")
        if not tied and "model" in about["units"] and not about["loose"]:
            about["peak"] = peak(measured(me, model))
        results.append(about)
    return results


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
        return (
            "not quite: where embedding and head are tied, they are two weights now: model.tie_weights() makes them one"
        )
    for name in differing(model, whole):
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


CONVERSATIONS = (
    [("user", "How much is 2 + 2?"), ("assistant", "4.")],
    [("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris."), ("user", "Of Chile?"),
     ("assistant", "Santiago.")],
)  # fmt: skip


def judge_labels(chat_labels) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder)
        library = ModelTokens(folder)
        for turns in CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in turns]
            (document,) = library.chat([Row("", {"messages": messages})])
            found = chat_labels(library.tokenizer, messages)
            if unanswered(found):
                return "not answered yet"
            problem = _wrong_labels(found, document, library.tokenizer)
            if problem:
                return f"not quite: with {len(turns)} messages, {problem}"
    return "right"


def _wrong_labels(found, document, tokenizer) -> str:
    """Return the first difference between a learner's (ids, labels) and a document, "" if there is none."""
    if not isinstance(found, tuple) or len(found) != 2:
        return "the function must return two lists: ids, labels"
    ids, labels = (list(map(int, each)) for each in found)
    if ids != document.tokens.tolist():
        return "the ids are not those of apply_chat_template(messages)"
    if len(labels) != len(ids):
        return f"there are {len(ids)} ids and {len(labels)} labels"
    expected = np.where(document.answers, document.tokens, -100).tolist()
    for place, (label, right) in enumerate(zip(labels, expected, strict=True)):
        if label != right:
            text = tokenizer.decode(ids[: place + 1])[-20:]
            should = (
                "a label: it is the assistant's to write"
                if right != -100
                else "no label: the assistant does not write it"
            )
            return f"the token at the end of {text!r} needs {should}"
    return ""


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
    "17.2": Do(
        title="labels for the answers of a conversation",
        level=2,
        minutes=8,
        judge=judge_labels,
        hint="For message n of the assistant, render messages[:n] with add_generation_prompt=True, and messages[: n + 1] "
        "without. What does the second have more than the first?",
        solution="""
def chat_labels(tokenizer, messages):
    ids, labels = [], []
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
            answered = tokenizer.apply_chat_template(messages[: n + 1], return_dict=False)
            labels += [-100] * (len(prompt) - len(ids)) + answered[len(prompt) :]
            ids = answered
    return ids, labels
""",
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
