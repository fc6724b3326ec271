"""What a user gets wrong is answered with one sentence and exit code 2, and leaves nothing half-written."""

import sys
import types

import mnist_fsdp
import plan
import pytest
import rank_zero
import torch
from commands import script
from labkit import UserError
from labkit.measuring import records
from labkit.running import options, ranks
from labkit.training import checkpoints

BAD = {
    "--strategy zero": "argument --strategy: invalid choice: 'zero'",
    "--strategy ddp --cpu-offload": "--cpu-offload goes with --strategy fsdp1 or fsdp2; with ddp leave it out",
    "--strategy single --wrap size": "--wrap size goes with --strategy fsdp1 or fsdp2",
    "--strategy ddp --sharding grad-op": "--sharding grad-op goes with --strategy fsdp1 or fsdp2",
    "--strategy single --ranks 2": "--strategy single is one rank",
    "--ranks 0": "--ranks must be at least 1",
    "--epochs -1": "--epochs must be at least 1",
    "--ranks two": "argument --ranks: invalid int value: 'two'",
    "--batch-size 8 --global-batch-size 16": "give one of them",
    "--resume": "--resume needs --checkpoint",
    "--lr nan": "--lr must be a finite number, but is nan",
    "--lr inf": "--lr must be a finite number",
    "--gamma -3": "--gamma must be above 0, but is -3.0",
    "--max-steps 0": "--max-steps must be at least 1",
    "--no-such-option": "unrecognized arguments: --no-such-option",
}


@pytest.mark.parametrize("words", BAD)
def test_one_sentence_before_anything_starts(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mnist_fsdp.py"])
    with pytest.raises(SystemExit) as exit_:
        options.parse(mnist_fsdp.Config, "", words.split())
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert BAD[words] in printed.err
    assert printed.err.startswith("mnist_fsdp.py: ")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}
TASK_1 = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("command", "environment", "printed"),
    [
        # A command is started once: what it finds of a launcher is left over from another one.
        *(
            (command, environment, True)
            for command in (plan.Options, rank_zero.Config)
            for environment in ({"RANK": "1"}, RANK_1, TASK_1)
        ),
        (mnist_fsdp.Config, {"RANK": "1"}, True),  # no launcher sets this alone
        (mnist_fsdp.Config, RANK_1 | {"RANK": "0"}, True),
        (mnist_fsdp.Config, RANK_1, False),  # rank 0 prints the same
        (mnist_fsdp.Config, TASK_1, False),
    ],
)
@pytest.mark.parametrize("words", ["--no-such-option", "--ranks 0"], ids=["argparse's", "ours"])
def test_a_sentence_is_printed_once(command, environment, printed, words, capsys, monkeypatch):
    """By one process of those that make the same error; never by none."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        options.parse(command, "", words.split())
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == printed


def lab(words: str, tmp_path):
    return script("mnist_fsdp.py", "--data", "mnist-5k", "--max-steps", "2", *words.format(tmp=tmp_path).split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--ranks 2 --global-batch-size 97", "--global-batch-size 97 cannot be shared evenly by 2 ranks"),
        ("--strategy single --batch-size 5000", "a global batch of 5000 is more than mnist-5k's 4000 images"),
        ("--strategy fsdp1 --cpu-offload --ranks 2", "FSDP1's --cpu-offload needs a GPU"),
        ("--strategy single --record {tmp}/file/run.json", "the record cannot be written to"),
        ("--strategy single --record {tmp}", "the record cannot be written to"),
        ("--strategy single --checkpoint {tmp}/file/ckpt", "checkpoints cannot be written to"),
        ("--strategy single --max-steps 11 --profile {tmp}/file/trace", "traces cannot be written to"),
        ("--strategy single --profile {tmp}/trace", "--profile watches the last of 11 steps, and this run has 2"),
        ("--ranks 100000", "--ranks 100000 on one machine of"),
        ("--device cuda", "--device cuda, but PyTorch sees no GPU here"),
        ("--backend nccl", "--backend nccl needs GPUs"),
    ],
)
def test_one_sentence_from_the_ranks(words, sentence, tmp_path):
    if torch.cuda.is_available() and "cuda" in words + sentence:
        pytest.skip("this machine has a GPU")
    (tmp_path / "file").write_text("in the way")
    run = lab(words, tmp_path)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert run.stderr.startswith("mnist_fsdp.py: ")
    assert len(run.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


OTHER_RUNS = {
    "--global-batch-size 16": "was made with a global batch of 8, and this run has 16",
    "--global-batch-size 8 --seed 2": "was made with --seed 1, and this run has 2",
}


@pytest.mark.long
def test_a_checkpoint_belongs_to_its_run(tmp_path):
    """Another run neither overwrites it nor takes it for its own; the same run goes on with any number of ranks."""
    first = "--strategy single --global-batch-size 8 --max-steps 2 --checkpoint {tmp}"
    assert lab(first, tmp_path).returncode == 0
    again = lab(first, tmp_path)
    assert again.returncode == 2
    assert f"{tmp_path} holds the checkpoint step-000002: give --resume to go on from it" in again.stderr
    for words, sentence in OTHER_RUNS.items():
        other = lab("--strategy single --resume --max-steps 4 --checkpoint {tmp} " + words, tmp_path)
        assert other.returncode == 2 and sentence in other.stderr, other.stderr
        assert len(other.stderr.strip().splitlines()) == 1
    resumed = lab("--ranks 2 --strategy ddp --global-batch-size 8 --max-steps 4 --resume --checkpoint {tmp}", tmp_path)
    assert resumed.returncode == 0 and "resumed at step 2 of 4" in resumed.stdout
    (checkpoints.latest(tmp_path) / "manifest.json").write_text("{")
    again = "--strategy single --global-batch-size 8 --max-steps 6 --resume --checkpoint {tmp}"
    damaged = lab(again, tmp_path)
    assert damaged.returncode == 2 and "is damaged (manifest.json is not what this course writes)" in damaged.stderr
    before = lab(again + " --fall-back --keep 1", tmp_path)
    assert "trying the one before" in before.stdout and "resumed at step 2 of 6" in before.stdout
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000004.damaged", "step-000006"]


def test_an_error_without_words_is_told_by_its_name(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError

    monkeypatch.setattr(checkpoints, "get_state_dict", lambda *_: ({}, {"param_groups": []}))
    monkeypatch.setattr(checkpoints, "checked", lambda *_: {"shapes": {}})
    monkeypatch.setattr(checkpoints.dcp_reading.Reader, "read_metadata", broken)
    with pytest.raises(UserError, match=r"cannot be read \(KeyError\)"):
        checkpoints.load(tmp_path, None, None)


def test_each_seed_has_orders_of_its_own():
    digits = types.SimpleNamespace(train_images=torch.zeros(40, 28, 28), train_labels=torch.arange(40))
    me = types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    orders = {
        tuple(
            label
            for _, labels in mnist_fsdp.training_batches(digits, mnist_fsdp.Config(seed=seed), me, epoch, 4)
            for label in labels.tolist()
        )
        for seed in (1, 2, 3)
        for epoch in range(4)
    }
    assert len(orders) == 12


def test_damaged_checkpoint_is_named(tmp_path):
    assert lab(f"--strategy single --checkpoint {tmp_path}", tmp_path).returncode == 0
    saved = checkpoints.latest(tmp_path)
    for part in saved.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    run = lab(f"--strategy single --resume --epochs 1 --checkpoint {tmp_path}", tmp_path)
    assert run.returncode == 2
    assert f"the checkpoint {saved} is damaged (__0_0.distcp has 100 bytes instead of" in run.stderr


def test_checkpoint_being_written_is_never_the_latest(tmp_path):
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000009.partial").mkdir()
    (tmp_path / "step-000010").write_text("not a folder")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-000004"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "no record at"), ("{", "is not a record"), ("[1]", "is not a record"), ('{"schema": 0}', "has layout 0")],
)
def test_records_say_what_is_wrong(text, sentence, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        records.load(path)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 2)
    config = mnist_fsdp.Config(ranks=4)
    with pytest.raises(UserError, match="--ranks 4, but 2 GPUs are visible"):
        ranks.ranks_to_start(config, "cuda", {})
    assert ranks.ranks_to_start(mnist_fsdp.Config(), "cuda", {}) == 2


def test_help_is_a_page_a_learner_can_read(capsys):
    with pytest.raises(SystemExit) as exit_:
        options.parse(mnist_fsdp.Config, mnist_fsdp.__doc__, ["--help"])
    assert exit_.value.code == 0
    page = capsys.readouterr().out
    assert "srun -p gpu -N 1 --gres=gpu:4 --cpus-per-task=16 python mnist_fsdp.py" in page
    assert "(default: fsdp2)" in page
