"""What a user gets wrong is answered with one sentence and exit code 2, and leaves nothing half-written."""

import sys

import mnist_fsdp
import pytest
from commands import script
from labkit import UserError, checkpoints, options, ranks, records

BAD = {
    "--strategy zero": "argument --strategy: invalid choice: 'zero'",
    "--strategy ddp --cpu-offload": "--cpu-offload is FSDP's",
    "--strategy single --wrap size": "--wrap size is FSDP's",
    "--strategy ddp --sharding grad-op": "--sharding grad-op is FSDP's",
    "--strategy single --ranks 2": "--strategy single is one rank",
    "--ranks 0": "--ranks must be at least 1",
    "--epochs -1": "--epochs must be at least 1",
    "--ranks two": "argument --ranks: invalid int value: 'two'",
    "--batch-size 8 --global-batch-size 16": "give one of them",
    "--resume": "--resume needs --checkpoint",
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
        ("--strategy single --profile {tmp}/file/trace", "traces cannot be written to"),
        ("--device cuda", "--device cuda, but PyTorch sees no GPU here"),
        ("--backend nccl", "--backend nccl needs GPUs"),
    ],
)
def test_one_sentence_from_the_ranks(words, sentence, tmp_path):
    import torch

    if torch.cuda.is_available() and "cuda" in words + sentence:
        pytest.skip("this machine has a GPU")
    (tmp_path / "file").write_text("in the way")
    run = lab(words, tmp_path)
    assert run.returncode == 2
    assert sentence in run.stderr
    assert run.stderr.startswith("mnist_fsdp.py: ")
    assert len(run.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_damaged_checkpoint_is_named(tmp_path):
    assert lab(f"--strategy single --checkpoint {tmp_path}", tmp_path).returncode == 0
    saved = checkpoints.latest(tmp_path)
    for part in saved.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    run = lab(f"--strategy single --resume --epochs 1 --checkpoint {tmp_path}", tmp_path)
    assert run.returncode == 2
    assert f"the checkpoint {saved} cannot be read" in run.stderr


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
    assert "srun -p gpu -N 1 --gres=gpu:4 python mnist_fsdp.py" in page
    assert "(default: fsdp2)" in page
