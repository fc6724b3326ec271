# SPDX-License-Identifier: BSD-3-Clause
"""What a user gets wrong is answered with one sentence and exit code 2, and leaves nothing half-written.

Bad command lines are in bad_input.py.
"""

import types
from pathlib import Path

import bad_input
import mnist_fsdp
import one_rank
import plan
import pytest
import torch
from commands import assert_about, commands, options_class, refused, script
from labkit.measuring import records
from labkit.running import options, ranks
from labkit.training import checkpoints

FEW_DIGITS = Path(__file__).with_name("few_digits.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bad_input.files(tmp_path_factory.mktemp("wrong"))


@pytest.mark.parametrize(
    ("command", "words", "said"), bad_input.all_rows(), ids=[" ".join(row[:2]) for row in bad_input.all_rows()]
)
def test_a_bad_command_line_is_refused_in_one_sentence(command, words, said, folder):
    """Its words are those that the sentence is about; for the rest of it see the next test."""
    sentence = bad_input.refusal(command, words, folder)
    assert_about(sentence, *bad_input.in_place(said, folder))


def test_the_sentences_are_those_that_were_reviewed(folder):
    assert bad_input.page(folder) == bad_input.MESSAGES.read_text(), (
        "python tests/bad_input.py writes them anew: review what git diff shows"
    )


def test_each_row_of_a_table_of_conflicts_is_violated_and_gives_its_sentence(folder, monkeypatch, capsys):
    """By one of the command lines of bad_input.py, of the command itself or of one whose options are derived from it."""
    found_in, last, violated = options.Conflict.found_in, [], {}

    def watched(row, chosen):
        found = found_in(row, chosen)
        last[:] = [(row, chosen)] if found else last
        return found

    monkeypatch.setattr(options.Conflict, "found_in", watched)
    for command, words, _ in bad_input.all_rows():
        last.clear()
        try:
            options.parse(options_class(command), "", bad_input.in_place(words, folder))
        except SystemExit as exit_:
            assert exit_.code == 2
        printed = capsys.readouterr().err
        for row, chosen in last:
            assert printed.endswith(f": {row.sentence.format(c=chosen)}\n"), (words, printed)
            violated[id(row)] = words
    tables = {command: options.all_conflicts(options_class(command)) for command in commands()}
    assert sum(map(len, tables.values())) > 100
    left = [(command, row) for command, table in tables.items() for row in table if id(row) not in violated]
    assert left == []


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}
TASK_1 = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("command", "environment", "printed"),
    [
        # A command is started once: what it finds of a launcher is left over from another one.
        *(
            (command, environment, True)
            for command in (plan.Config, one_rank.Config)
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
    return script(
        FEW_DIGITS, 400, "mnist_fsdp", "--data", "mnist-5k", "--max-steps", "2", *words.format(tmp=tmp_path).split()
    )


OTHER_RUNS = {
    "--global-batch-size 16": ("global batch", "8", "16"),
    "--global-batch-size 8 --seed 2": ("--seed 1", "2"),
}


@pytest.mark.long
def test_a_checkpoint_belongs_to_its_run(tmp_path):
    """Another run neither overwrites it nor takes it for its own; the same run goes on with any number of ranks."""
    first = "--strategy single --global-batch-size 8 --max-steps 2 --checkpoint {tmp}"
    assert lab(first, tmp_path).returncode == 0
    again = lab(first, tmp_path)
    assert again.returncode == 2
    assert_about(again.stderr, tmp_path, "step-000002", "--resume")
    for words, said in OTHER_RUNS.items():
        other = lab("--strategy single --resume --max-steps 4 --checkpoint {tmp} " + words, tmp_path)
        assert other.returncode == 2, other.stderr
        assert_about(other.stderr, *said)
        assert len(other.stderr.strip().splitlines()) == 1
    resumed = lab("--ranks 2 --strategy ddp --global-batch-size 8 --max-steps 4 --resume --checkpoint {tmp}", tmp_path)
    assert resumed.returncode == 0 and "resumed at step 2 of 4" in resumed.stdout
    (checkpoints.latest(tmp_path) / "manifest.json").write_text("{")
    again = "--strategy single --global-batch-size 8 --max-steps 6 --resume --checkpoint {tmp}"
    damaged = lab(again, tmp_path)
    assert damaged.returncode == 2
    assert_about(damaged.stderr, "damaged", "manifest.json")
    before = lab(again + " --fallback --keep-last 1", tmp_path)
    assert "trying the one before" in before.stdout and "resumed at step 2 of 6" in before.stdout
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000004.damaged", "step-000006"]


def test_an_error_without_words_is_told_by_its_name(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError

    monkeypatch.setattr(checkpoints, "get_state_dict", lambda *_, **__: ({}, {"param_groups": []}))
    monkeypatch.setattr(checkpoints, "checked", lambda *_: {"shapes": {}})
    monkeypatch.setattr(checkpoints.dcp_reading.Reader, "read_metadata", broken)
    with refused("(KeyError)"):
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
    assert_about(run.stderr, saved, "damaged", "__0_0.distcp", "100 bytes")


def test_checkpoint_being_written_is_never_the_latest(tmp_path):
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000009.partial").mkdir()
    (tmp_path / "step-000010").write_text("not a folder")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-000004"


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, ["no record"]), ("{", ["not a record"]), ("[1]", ["not a record"]), ('{"schema": 0}', ["layout", "0"])],
)
def test_records_say_what_is_wrong(text, words, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with refused(path, *words):
        records.load(path)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 2)
    config = mnist_fsdp.Config(ranks=4)
    with refused("--ranks 4", "2 GPUs"):
        ranks.ranks_to_start(config, "cuda", {})
    assert ranks.ranks_to_start(mnist_fsdp.Config(), "cuda", {}) == 2


def test_help_is_a_page_a_learner_can_read(capsys):
    with pytest.raises(SystemExit) as exit_:
        options.parse(mnist_fsdp.Config, mnist_fsdp.__doc__, ["--help"])
    assert exit_.value.code == 0
    page = capsys.readouterr().out
    assert "srun -p gpu -N 1 --gres=gpu:4 --cpus-per-task=16 python mnist_fsdp.py" in page
    assert "(default: fsdp2)" in " ".join(page.split())  # lines are wrapped
