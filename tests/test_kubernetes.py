# SPDX-License-Identifier: BSD-3-Clause
"""The manifests for clusters without Slurm: valid by their schemas, and their commands by torchrun's and the lab's options.

tests/schemas/ has the parts of the schemas that they use; each names its source. No test starts a cluster.
"""

import json
import os
import re
from pathlib import Path

import gpt_fsdp
import jsonschema
import plan
import pytest
import yaml
from commands import call
from conftest import SOURCE
from labkit.running import options
from torch.distributed.run import get_args_parser

NAMES = ["trainjob", "skypilot"]
SCHEMAS = Path(__file__).parent / "schemas"
STUB = '#!/bin/bash\nprintf \'%s\\n\' "$PWD" "$@" > "$CALLED"\n'


def manifest(name: str) -> dict:
    return yaml.safe_load((SOURCE / "kubernetes" / f"{name}.yaml").read_text())


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def mappings(value, path="") -> list[tuple[str, dict]]:
    """Every mapping in a manifest, with its path, except those whose keys are the user's own."""
    if isinstance(value, list):
        return [each for i, item in enumerate(value) for each in mappings(item, f"{path}[{i}]")]
    if not isinstance(value, dict) or path.endswith(("/limits", "/envs")):
        return []
    return [(path, value)] + [each for key, item in value.items() for each in mappings(item, f"{path}/{key}")]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_valid(name):
    assert [error.message for error in validator(name).iter_errors(manifest(name))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_key_anywhere_in_it_is_not(name):
    text, valid = manifest(name), validator(name).is_valid
    places = mappings(text)
    assert len(places) > 1
    for path, mapping in places:
        mapping["wrongKey"] = "1"
        assert not valid(text), f"a wrong key in {path or 'the manifest'} passes"
        del mapping["wrongKey"]
    assert valid(text)


@pytest.fixture
def torchrun(monkeypatch):
    """What a node's torchrun understands of its words, where a cluster set these variables."""

    def parse(words: list[str], **variables):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        return get_args_parser().parse_args(words)

    return parse


def check_training(words: list[str], ranks: int):
    """Its words are the lab's, its mesh has as many ranks, and an H100 has room for it, by the plan."""
    assert options.parse(gpt_fsdp.Config, "", [*words, f"--ranks={ranks}"]).ranks == ranks
    planned = plan.answer(options.parse(plan.Config, "", [*words, f"--ranks={ranks}", "--gpu=h100"]))
    assert re.search(r"^fits in .* of h100", planned, re.M), planned


def test_the_trainjob_starts_the_lab_on_every_gpu_of_two_nodes(torchrun):
    trainer = manifest("trainjob")["spec"]["trainer"]
    nodes, ranks = trainer["numNodes"], trainer["numProcPerNode"]
    assert trainer["command"] == ["torchrun"] and trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == ranks == 8
    parsed = torchrun(trainer["args"], PET_NNODES=str(nodes), PET_NPROC_PER_NODE=str(ranks))
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "8")  # torchrun takes them from the runtime's variables
    assert Path(parsed.training_script).name == "gpt_fsdp.py"
    check_training(parsed.training_script_args, nodes * ranks)


def test_the_trainjob_mounts_what_it_writes_to():
    spec = manifest("trainjob")["spec"]
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]} and mounts["shm"] == "/dev/shm"
    config = options.parse(gpt_fsdp.Config, "", spec["trainer"]["args"][1:])
    assert Path(config.checkpoint).is_relative_to(mounts["shared"])


def test_skypilot_starts_the_lab_on_every_gpu_of_two_nodes(torchrun, tmp_path):
    """Its script runs as on each of its nodes, with a torchrun that writes down its words."""
    task = manifest("skypilot")
    program = tmp_path / ".venv" / "bin" / "torchrun"
    program.parent.mkdir(parents=True)
    program.write_text(STUB)
    program.chmod(0o755)
    (tmp_path / "source_code").mkdir()
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    for node in range(task["num_nodes"]):
        environ = {
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(node),
        }
        environ |= {
            "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
            "CALLED": str(tmp_path / "called"),
            "PATH": os.environ["PATH"],
        }
        done = call("bash", "-euc", task["run"], env=environ, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        folder, *words = (tmp_path / "called").read_text().splitlines()
        parsed = torchrun(words)
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("2", "8", node)
        assert (parsed.master_addr, parsed.training_script) == ("10.0.0.1", "gpt_fsdp.py")
        assert Path(folder) == tmp_path / "source_code"
    check_training(parsed.training_script_args, task["num_nodes"] * gpus)
