# SPDX-License-Identifier: BSD-3-Clause
"""plan.py of any model: simulated steps are the measured ones, also of mixtures of experts, frozen models, DDP, and ZeRO."""

import json

import plan
import pytest
from commands import refused
from forked import by_value, forked
from labkit.running import launch, notebook_ranks
from planner.cli import config_files
from planner.cli.commands import link_of
from planner.cli.report import gib

HERE = launch.Cluster(launcher="local")
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "mixtral": SIZES | EXPERTS,
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 16, "moe_intermediate_size": 32},
    "olmo2": SIZES,
    "qwen3": SIZES | {"head_dim": 16},
    "stablelm": SIZES,
    "gemma3": {
        "text_config": SIZES | {"head_dim": 16},
        "vision_config": TOWER | {"image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
}
RUNS = [  # on two ranks; the peaks of all families, without options, are the census's
    ("mixtral", {"recompute": "full"}),
    ("qwen3_moe", {}),
    ("gemma3", {}),
    ("olmo2", {"lora": 4, "precision": "bf16"}),
    ("stablelm", {"strategy": "ddp"}),
    ("mixtral", {"mesh": "tensor=2"}),
    ("qwen3", {"mesh": "tensor=2", "accumulate": 2}),
    ("olmo2", {"mesh": "tensor=2"}),
]
SPREAD = ("mixtral", {"mesh": "shard=2,expert=2"})  # not planned: what tokens choose decides the peak
OWN = """
import copy, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)

def build():
    return Net(), (torch.zeros(16, 64),), lambda module, x: module(x).mean()

def head():
    net = Net()
    net.layers.requires_grad_(False)
    return net, (torch.zeros(16, 64),), lambda module, x: module(x).mean()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.reference = Net(), Net().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            reference = self.reference(x)
        return (self.policy(x) - reference).square().mean()

def dpo():
    return Pair(), (torch.zeros(16, 64),), lambda module, x: module(x)

def frozen():
    return Net().requires_grad_(False), (torch.zeros(16, 64),), lambda module, x: module(x).mean()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of configurations, and of modules of one's own."""
    import transformers

    path = tmp_path_factory.mktemp("any")
    transformers.logging.set_verbosity_error()
    for family, values in FAMILIES.items():
        transformers.AutoConfig.for_model(family, **values).save_pretrained(path / family)
    (path / "own.py").write_text(OWN)
    return path


def lab_config(folder, family, options):
    import hf_fsdp

    return hf_fsdp.Config(config=f"{folder}/{family}", device="cpu", batch_size=2, seq_len=48, **options)


def answers(folder, runs):
    """plan.py's facts about runs on two ranks, from one process."""
    found = []
    for what, options in runs:
        size = {"config": f"{folder}/{what}", "batch_size": 2, "seq_len": 48, "simulate": True}
        size = {} if what == "module" else size
        found.append(
            json.loads(plan.answer(plan.Config(**{"ranks": 2, "device": "cpu", "json": True} | size | options)))
        )
    return found


def traced(me, model, optimizer, batch, train):
    """The lowest peak of three steps on this rank, its collectives, and what persists."""
    from labkit.measuring.trace import StepTrace, listed, peak

    trace = StepTrace(model, optimizer, me.device)
    kept, peaks = [train()], []
    for _ in range(3):
        trace.batch = batch
        with trace:
            kept = [kept[-1], train()]
        timeline = trace.timeline()
        peaks.append(peak(timeline)[1])
    names = ("parameters", "optimizer state", "all-reduce buckets")
    return min(peaks), listed(trace.collectives), sum(timeline[0][name] for name in names)


def trained(me, folder, runs):
    """``traced`` of each run of ``RUNS``."""
    import hf_fsdp
    import torch
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for family, options in runs:
        config = lab_config(folder, family, options)
        torch.manual_seed(0)
        model = hf_fsdp.unsharded(config)
        model = DistributedDataParallel(model) if config.strategy == "ddp" else hf_fsdp.fsdp2(model, config, me)
        optimizer = hf_fsdp.make_optimizer(model, config)
        batch = tuple(torch.randint(0, 256, (config.accumulate, 2, 48)) for _ in range(2))
        step = lambda: hf_fsdp.train_step(model, optimizer, *batch, config)  # noqa: B023, E731 - called at once
        found.append(traced(me, model, optimizer, batch, step))
    return found


def own_trained(me, folder, runs):
    """``traced`` of functions of own.py: under DDP, with AdamW or ZeroRedundancyOptimizer, or under FSDP2."""
    import torch
    from labkit.training import own_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for name, strategy in runs:
        model, inputs, loss_of = own_model.load(f"{folder}/own.py:{name}")()
        if strategy == "fsdp2":
            mesh = init_device_mesh("cpu", (me.world_size,))
            model = own_model.sharded(model, strategy, "fp32", "true", mesh)
        else:
            model = DistributedDataParallel(model)
        trained, adamw = [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW
        optimizer = adamw(trained, foreach=True)
        if strategy == "zero1":
            optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=adamw, foreach=True)

        def train(model=model, optimizer=optimizer, inputs=inputs, loss_of=loss_of):
            loss_of(model, *inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        found.append(traced(me, model, optimizer, inputs, train))
    return found


OWN_RUNS = [("build", "ddp"), ("build", "zero1"), ("build", "fsdp2"), ("head", "fsdp2"), ("dpo", "fsdp2")]


def everything(me, folder):

    return trained(me, folder, [*RUNS, SPREAD]), own_trained(me, folder, OWN_RUNS)


@pytest.fixture(scope="module")
def measured(folder):
    """What each rank has measured."""
    return notebook_ranks.on_ranks(by_value(everything), str(folder), ranks=2, cluster=HERE, timeout=240)


NAMES = {"tp": "tensor", "fsdp": "shard"}  # mesh dimensions: {the library's name: ours}


def sent(collectives: list[dict]) -> dict:
    """{(kind, bytes, dimension): count}."""
    return {(c["kind"], c["bytes"], NAMES.get(c["dimension"], c["dimension"])): c["count"] for c in collectives}


@pytest.mark.long
def test_planned_and_simulated_steps_of_any_family_are_the_measured_ones(folder, measured):
    simulated, planned = forked(answers, folder, RUNS, timeout=240), set()
    for (family, options), found, *ranks in zip(RUNS, simulated, *(rank[0][:-1] for rank in measured), strict=True):
        peaks, collectives, persistent = zip(*ranks, strict=True)
        assert found["simulated"] == pytest.approx(max(peaks), rel=2e-3), (family, options)
        assert sent(found["collectives"]) == sent(collectives[0]), (family, options)
        if "peak" in found:  # by arithmetic, too
            planned.add((family, options.get("mesh")))
            assert found["peak"] == pytest.approx(max(peaks), rel=2e-3), (family, options)
            assert sent(found["traffic"]) == sent(collectives[0]), (family, options)
            assert sum(found["persistent"].values()) == persistent[0], (family, options)
        else:
            assert found["persistent"] == persistent[0], (family, options)
    assert planned == {("mixtral", None), ("qwen3_moe", None), ("mixtral", "tensor=2"), ("qwen3", "tensor=2")}


@pytest.mark.long
def test_the_refusal_of_spread_experts_says_what_they_store(folder, measured):
    persistent = {rank[0][-1][2] for rank in measured}
    family, options = SPREAD
    with refused(f"stores {gib(persistent.pop())}", "--record"):
        plan.Config(config=f"{folder}/{family}", ranks=2, device="cpu", **options)
    assert not persistent  # all ranks store as much


def test_what_is_split_and_sharded_is_planned_as_it_is_simulated(folder):
    """On four ranks: the gradient that the library makes for a whole vocabulary, and the optimizer's two groups."""
    options = {"ranks": 4, "mesh": "shard=2,tensor=2", "recompute": "full", "precision": "bf16"}
    for found in forked(answers, folder, [("qwen3", options)]):
        assert found["peak"] == pytest.approx(found["simulated"], rel=2e-3)
        assert sent(found["traffic"]) == sent(found["collectives"])


@pytest.mark.long
def test_simulated_steps_of_ones_own_model_are_the_measured_ones(folder, measured):
    """Under DDP and ZeRO-1, too; and a frozen part is gathered only as often as it is used."""
    runs = [("module", {"module": f"{folder}/own.py:{name}", "strategy": strategy}) for name, strategy in OWN_RUNS]
    gathers = {}
    for run, found, *ranks in zip(
        OWN_RUNS, forked(answers, folder, runs), *(rank[1] for rank in measured), strict=True
    ):
        peaks, collectives, persistent = zip(*ranks, strict=True)
        assert found["simulated"] == pytest.approx(max(peaks), abs=16), run
        assert found["persistent"] == max(persistent), run
        assert sent(found["collectives"]) == sent(collectives[0]), run
        gathers[run] = sum(c["count"] for c in found["collectives"] if c["kind"] == "all-gather")
    assert gathers["build", "fsdp2"] == 2 * 4 + 1  # the root, which has the head, once
    assert gathers["head", "fsdp2"] <= 4 + 1 + 1  # no backward reaches the layers; FSDP2 prefetches one all the same
    assert gathers["dpo", "fsdp2"] < 2 * 4 + 2 * 4 + 1  # nor the reference


def pages(folder):
    found = []
    for options in ({"config": f"{folder}/stablelm"}, {"module": f"{folder}/own.py:build"}):
        found.append(plan.answer(plan.Config(**({"seq_len": 48} if "config" in options else {}), **options)))
    try:
        plan.answer(plan.Config(module=f"{folder}/own.py:frozen"))
    except plan.UserError as error:
        found.append(str(error))
    return found


def test_a_page_says_what_was_simulated_and_with_whose_kernels(folder):
    unknown, own, refusal = forked(pages, folder)
    for page in (unknown, own):
        assert "simulated with a GPU's kernels" in page and "not yet compared with a GPU" in page
    assert "the library's own code, as its family 'stablelm' is not one that the planner knows" in unknown
    assert "to train it:\n  python hf_fsdp.py" in unknown
    assert "no parameter of it is trained" in refusal


def attention_operators(version):
    """The operators that a GPU's attention runs, by case."""
    import torch
    from labkit.measuring.gpu_operators import GpuOperators
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.names.append(operator._schema.name.removeprefix("aten::"))
            return operator(*args, **(kwargs or {}))

    found = {}
    for name, (dtype, head, mask) in {
        "bf16": (torch.bfloat16, 64, None),
        "bf16, masked": (torch.bfloat16, 64, torch.bool),
        "bf16, wide": (torch.bfloat16, 512, None),
        "bf16, odd": (torch.bfloat16, 60, torch.bool),
        "fp32": (torch.float32, 64, None),
        "fp64": (torch.float64, 64, None),
    }.items():
        tensors = [torch.empty(2, 4, 30, head, dtype=dtype, device="meta") for _ in range(3)]
        masked = None if mask is None else torch.ones(1, 1, 30, 30, dtype=mask, device="meta")
        with Names() as names:
            out = GpuOperators(version).attention(*tensors, attn_mask=masked, is_causal=mask is None, scale=0.5)
        assert out.shape == tensors[0].shape
        kinds = ("flash", "efficient", "bmm")
        found[name] = next(kind for kind in kinds if any(kind in operator for operator in names.names))
    return found


def test_a_gpu_attends_with_a_mask_by_the_operator_that_takes_one():
    assert attention_operators((2, 15)) == {
        "bf16": "flash",
        "bf16, masked": "efficient",
        "bf16, wide": "efficient",
        "bf16, odd": "bmm",
        "fp32": "efficient",
        "fp64": "bmm",
    }


def test_files_of_other_libraries_are_recognized(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "fsdp_config": {}}')
    config_files.check(str(tmp_path), "--config")  # a model's, whatever else it has
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    with refused("DeepSpeed", "deepspeed-0"):
        config_files.check(str(tmp_path / "ds.json"), "--config")


def test_a_link_may_be_named_in_bits():
    links = [link_of(text, {}, 0.0, "--network").bandwidth for text in ("1.25", "10gbit", "10 Gbit/s")]
    assert links == [1.25e9] * 3
    with refused("10gbit"):
        link_of("10gibt", {}, 0.0, "--network")


def test_a_known_family_with_all_its_operators_is_not_simulated(folder):
    options = plan.Config(config=f"{folder}/olmo2", seq_len=48)
    assert options.shape and not options.by_library
    with_adapters = plan.Config(config=f"{folder}/olmo2", seq_len=48, lora=4)  # peft's, as the lab trains
    assert with_adapters.by_library and "peft's adapters" in with_adapters.why_simulated
    with refused("peft's adapters", "without --sweep"):
        plan.Config(config=f"{folder}/olmo2", seq_len=48, lora=4, sweep=True)


def test_split_weights_are_swept_and_searched_where_arithmetic_covers_them(folder):
    def asked(family, **options):
        return json.loads(plan.answer(plan.Config(config=f"{folder}/{family}", seq_len=48, json=True, **options)))

    rows = {row["strategy"]: row for row in asked("qwen3", sweep=True)}
    assert rows["fsdp2, tensor 2"]["place"] and "divided evenly" in rows["fsdp2, tensor 4"]["why"]
    rows = {row["strategy"]: row for row in asked("olmo2", sweep=True)}
    assert "tensor-parallel plan of this family" in rows["fsdp2, tensor 2"]["why"]
    assert asked("mixtral", find="batch-size", mesh="shard=4,tensor=2")["found"] > 1
    with refused("tensor-parallel plan of this family", "only be simulated"):
        asked("olmo2", find="batch-size", mesh="shard=4,tensor=2")
