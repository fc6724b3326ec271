# SPDX-License-Identifier: BSD-3-Clause
"""Files people have become tokens, once, in memory that the ranks share; what is neither text nor JSON lines is refused."""

import gzip
import json
import os
import signal
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import tiny_tokenizer
import torch
from commands import refused
from forked import forked
from labkit.running import launch, notebook_ranks
from labkit.training import corpus, data_files, encoding
from transformers import AutoTokenizer

ME = SimpleNamespace(rank=0, local_rank=0, world_size=1, say=lambda *_: None)
VOCABULARY = 340
QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris is the capital."}
THANKS = {"role": "user", "content": "How are you today?"}
FINE = {"role": "assistant", "content": "I am fine."}
SYSTEM = {"role": "system", "content": "You are the capital of France."}
TALK = [SYSTEM, QUESTION, ANSWER, THANKS, FINE]
TOOL = {"type": "function", "function": {"name": "today", "description": "the day", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the cache, empty."""
    monkeypatch.setenv("FSDP_LABS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "data" / "tokens"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{template: the folder of a model's tokenizer}."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in ("CHATML", "MARKED", "THINKING", "UNRELATED"):
        tiny_tokenizer.save(folder / name, getattr(tiny_tokenizer, name))
    tiny_tokenizer.save(folder / "none")
    tiny_tokenizer.save(folder / "bos", bos=True)
    tiny_tokenizer.save(folder / "metaspace", metaspace=True, eos=False)
    return folder


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(path, model=None, vocab_size=VOCABULARY, me=ME) -> corpus.Corpus:
    return corpus.load(str(path), model and str(model), vocab_size, me)


def documents(found: corpus.Corpus) -> list[list[int]]:
    return [found.tokens[begin:end].tolist() for begin, end in found.documents]


def answers(found: corpus.Corpus, tokenizer) -> list[str]:
    """The text that is trained on, of each document."""
    return [tokenizer.decode(found.tokens[b:e][found.answers[b:e]].tolist()) for b, e in found.documents]


def test_bytes_are_the_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffFrançais\r\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    found = load(f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt.gz'}")
    assert found.kind == data_files.PLAIN
    assert [bytes(each).decode() for each in documents(found)] == ["Français\r\n", "second"]  # no byte-order mark
    assert isinstance(found.tokens.base, np.memmap) and found.tokens.dtype == np.uint8


def test_the_course_has_a_text():
    found = corpus.load(None, None, 256, ME)
    assert found.name == "pydoc-topics" and b"import" in bytes(found.tokens)


@pytest.mark.parametrize("name", ["none", "bos", "metaspace"])
def test_a_long_text_is_encoded_as_at_once(name, models, tmp_path, monkeypatch):
    """Also where a block ends within a word, a character, or between newlines."""
    monkeypatch.setattr(data_files, "BLOCK", 97)
    monkeypatch.setattr(encoding, "BATCH", 3)
    words = ["Paris", "is", "the\n\n", "capital,", "  of", "123", "Françe?\n", "How", "are", "y"]
    text = " ".join(words[n * n % 7 + n % 4] for n in range(300))
    (tmp_path / "long.txt").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    expected = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if tokenizer.eos_token else [])
    assert documents(load(tmp_path / "long.txt", models / name)) == [expected]


def test_text_rows_end_with_eos_once(models, tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines({"text": "Paris", "id": 1}, {"text": "France</s>"}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(models / "bos")
    found = load(tmp_path / "rows.jsonl", models / "bos")
    assert found.kind == data_files.TEXT and found.answers is None
    assert [tokenizer.decode(each) for each in documents(found)] == ["<s>Paris</s>", "<s>France</s>"]


def test_the_loss_is_on_the_completion(models, tmp_path):
    """Including a token that begins in the prompt, and EOS."""
    rows = [{"prompt": "What is", "completion": " the capital"}, {"prompt": "What is ", "completion": "the capital"}]
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    tokenizer = AutoTokenizer.from_pretrained(models / "bos")
    found = load(tmp_path / "rows.jsonl", models / "bos")
    assert documents(found) == [[*tokenizer("What is the capital")["input_ids"], tokenizer.eos_token_id]] * 2
    assert answers(found, tokenizer) == [" the capital</s>"] * 2
    by_bytes = load(tmp_path / "rows.jsonl")
    assert bytes(by_bytes.tokens[by_bytes.answers]) == b" the capitalthe capital"


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_the_loss_is_on_the_answers(template, models, tmp_path):
    """Whether the template marks them, or they are found by rendering: as the library does it, with tools, too."""
    (tmp_path / "chat.jsonl").write_text(lines({"messages": TALK, "source": "x"}, {"messages": [QUESTION, ANSWER]}))
    tokenizer = AutoTokenizer.from_pretrained(models / template)
    found = load(tmp_path / "chat.jsonl", models / template)
    both = [TALK, [QUESTION, ANSWER]]
    assert documents(found) == [tokenizer.apply_chat_template(each)["input_ids"] for each in both]
    first = "Paris is the capital.<|im_end|>\n"
    assert answers(found, tokenizer) == [f"{first}I am fine.<|im_end|>\n", first]
    marks = AutoTokenizer.from_pretrained(models / "MARKED").apply_chat_template(
        both, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    assert [found.answers[begin:end].tolist() for begin, end in found.documents] == marks


def test_tools_are_rendered(models, tmp_path):
    call = {"role": "assistant", "content": "I am today", "tool_calls": []}
    messages = [THANKS, call, {"role": "tool", "content": "fine"}, FINE]
    (tmp_path / "chat.jsonl").write_text(lines({"messages": messages, "tools": [TOOL]}))
    tokenizer = AutoTokenizer.from_pretrained(models / "CHATML")
    found = load(tmp_path / "chat.jsonl", models / "CHATML")
    assert documents(found) == [tokenizer.apply_chat_template(messages, tools=[TOOL])["input_ids"]]
    assert answers(found, tokenizer) == ["I am today<|im_end|>\nI am fine.<|im_end|>\n"]


def test_an_answer_that_is_rendered_differently_later_is_a_document_of_its_own(models, tmp_path):
    (tmp_path / "chat.jsonl").write_text(lines({"messages": TALK}, {"messages": TALK}))
    tokenizer = AutoTokenizer.from_pretrained(models / "THINKING")
    found = load(tmp_path / "chat.jsonl", models / "THINKING")
    assert documents(found) == [tokenizer.apply_chat_template(TALK[:count])["input_ids"] for count in (3, 5, 3, 5)]
    assert found.rows.tolist() == [0, 0, 1, 1]  # held out, or trained on, together
    thought = "<think>\n\n</think>\n\n"
    assert answers(found, tokenizer) == 2 * [
        f"{thought}Paris is the capital.<|im_end|>\n",
        f"{thought}I am fine.<|im_end|>\n",
    ]


PARTS = [{"type": "text", "text": "What is it?"}]
GOOD, PAIR = {"messages": [QUESTION, ANSWER]}, {"prompt": "a", "completion": "b"}
BAD_FILES = {
    "utf16.txt": ("Où?".encode("utf-16"), "UTF-16"),
    "utf16le.txt": ("plain words".encode("utf-16-le"), "UTF-16"),
    "latin1.txt": (b"one\ntwo\ncaf\xe9\n", "line 3 Latin-1"),
    "late.txt": (b"a line\n" * 300_000 + b"caf\xe9\n", "line 300001 Latin-1"),
    "latin1.jsonl": (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2 Latin-1"),
    "rows.parquet": (b"PAR1\x15\x04", "parquet"),
    "rows.zip": (b"PK\x03\x04....", "zip"),
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "binary.bin": (b"text at first" + bytes(3), "line 1 binary"),
    "torn.txt.gz": (gzip.compress(b"text" * 9999)[:-9], "not a whole .gz"),
    "twice.gz": (gzip.compress(gzip.compress(b"text")), "gzip twice"),
    "empty.txt": (b"", "empty"),
    "blank.txt": (b" \n\n", "empty"),
    "array.json": (json.dumps([GOOD]).encode(), "array one object per line"),
    "array.txt": (json.dumps([GOOD], indent=1).encode(), "array"),
    "pretty.json": (json.dumps(GOOD, indent=1).encode(), "line 1 one object per line"),
    "words.jsonl": (b"words\n", "line 1 JSON"),
    "torn.jsonl": (lines(GOOD).encode() + b'{"messages"', "line 2 JSON"),
    "mixed.jsonl": (lines(GOOD, PAIR).encode(), "line 2 messages prompt and completion"),
    "both.jsonl": (lines(GOOD | {"text": "a"}).encode(), "line 1 messages text"),
    "sharegpt.jsonl": (lines({"conversations": []}).encode(), "line 1 conversations messages"),
    "half.jsonl": (lines(PAIR, {"prompt": "a"}).encode(), "line 2 completion"),
    "no-completion.jsonl": (lines(PAIR, {"prompt": "a", "completion": ""}).encode(), "line 2 empty"),
    "lists.jsonl": (lines({"prompt": [QUESTION], "completion": [ANSWER]}).encode(), "line 1 string messages"),
    "no-answer.jsonl": (lines(GOOD, {"messages": [QUESTION]}).encode(), "line 2 assistant"),
    "empty-answer.jsonl": (lines({"messages": [QUESTION, ANSWER | {"content": ""}]}).encode(), "line 1 empty"),
    "from.jsonl": (lines({"messages": [{"from": "human", "value": "a"}]}).encode(), "line 1 role"),
    "null.jsonl": (lines({"text": None}).encode(), "line 1 text null"),
    "emoji.jsonl": (b'{"text": "one half: \\ud83d"}\n', "line 1 surrogate"),
    "parts.jsonl": (lines({"messages": [QUESTION | {"content": PARTS}, ANSWER]}).encode(), "line 1 one string"),
    "greeting.jsonl": (lines({"messages": [ANSWER, QUESTION]}).encode(), "line 1 first"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_would_fail_silently_is_refused(name, models, tmp_path, cache):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path / name)) as caught:
        load(tmp_path / name, models / "CHATML")
    for word in words.split():
        assert word in str(caught.value), (word, str(caught.value))
    assert not cache.exists() or not list(cache.iterdir())  # nothing half-written


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text(lines(PAIR))
    for names, words in {
        tmp_path: "is a folder",
        tmp_path / "nowhere.txt": "cannot be read",
        f"{tmp_path}/a.txt,{tmp_path}/c.txt": "c.txt cannot be read",
        f"{tmp_path}/a.txt,{tmp_path}/a.txt": "twice",
        f"{tmp_path}/a.txt,{tmp_path}/b.jsonl": "several kinds",
        os.devnull: "no regular file",
    }.items():
        with refused(words):
            load(names)


def test_tokenizers_that_do_not_fit(models, tmp_path):
    (tmp_path / "chat.jsonl").write_text(lines(GOOD))
    (tmp_path / "text.jsonl").write_text(lines({"text": "a"}, {"text": "<|im_end|>"}))
    with refused("chat.jsonl, line 1", "chat template"):
        load(tmp_path / "chat.jsonl", models / "none")
    with refused("chat.jsonl, line 1", "chat template"):
        load(tmp_path / "chat.jsonl")
    with refused("chat.jsonl, line 1", "message 2", "{% generation %}"):
        load(tmp_path / "chat.jsonl", models / "UNRELATED")
    with refused("text.jsonl, line 1", "vocabulary"):
        load(tmp_path / "text.jsonl", models / "none", vocab_size=10)
    (tmp_path / "empty").mkdir()
    with refused(str(tmp_path / "empty"), "tokenizer", "--tokens bytes"):
        load(tmp_path / "text.jsonl", tmp_path / "empty")


def _count_encodings(monkeypatch) -> list:
    count, write = [], corpus._Entry._write
    monkeypatch.setattr(corpus._Entry, "_write", lambda *words: (count.append(1), write(*words)))
    return count


def test_what_was_encoded_once_is_found(models, tmp_path, monkeypatch, cache):
    """Unless the file, the tokenizer or its template have changed."""
    count = _count_encodings(monkeypatch)
    file, model = tmp_path / "chat.jsonl", tmp_path / "model"
    file.write_text(lines(GOOD))
    tiny_tokenizer.save(model, tiny_tokenizer.CHATML)
    first = load(file, model)
    again = load(file, model)
    assert len(count) == 1 and again.digest == first.digest and documents(again) == documents(first)
    (model / "chat_template.jinja").write_text(tiny_tokenizer.MARKED.replace("<|im_start|>", "<s>"))
    assert load(file, model).digest != first.digest and len(count) == 2
    file.write_text(lines(GOOD, GOOD))
    assert len(load(file, model).ends) == 2 and len(count) == 3
    assert {path.stat().st_mode & 0o77 for path in cache.iterdir()} == {0}  # nobody else's to read


def test_a_damaged_entry_is_written_again(tmp_path, monkeypatch):
    count = _count_encodings(monkeypatch)
    (tmp_path / "a.txt").write_text("words")
    load(tmp_path / "a.txt")
    (tokens,) = (tmp_path / "data").glob("tokens/*/tokens")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    assert bytes(load(tmp_path / "a.txt").tokens) == b"words" and len(count) == 2


def test_a_writer_that_is_killed_leaves_nothing_that_is_taken_for_whole(tmp_path, monkeypatch, cache):
    (tmp_path / "a.txt").write_text("words")

    def killed(path):
        corpus._Writer.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        load(path)

    with pytest.raises(AssertionError):  # its process has not returned
        forked(killed, tmp_path / "a.txt")
    (partial,) = cache.iterdir()
    assert bytes(load(tmp_path / "a.txt").tokens) == b"words" and partial.exists()
    monkeypatch.setattr(corpus, "LEFTOVER_SECONDS", -1)  # nobody has written to it for long
    (tmp_path / "a.txt").write_text("other words")
    load(tmp_path / "a.txt")
    assert not partial.exists()


def test_the_home_folder_is_used_where_the_data_folder_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "data").write_text("a file: no folder can be made here")
    assert bytes(load(tmp_path / "a.txt").tokens) == b"words" and list((tmp_path / "home" / "fsdp-labs").iterdir())
    (tmp_path / "elsewhere").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    with refused("can be written nowhere", "FSDP_LABS_DATA"):
        load(tmp_path / "a.txt")


def _two_nodes(me, file, folders, is_shared):
    """Load on two ranks that are the first ones of two nodes. Return who has encoded, and the digests or the error."""
    node = 0 if is_shared else me.rank
    os.environ.update(FSDP_LABS_DATA=str(folders[node]), XDG_CACHE_HOME=str(folders[node]))
    encoded, write = [], corpus._Entry._write
    corpus._Entry._write = lambda self, *words: (encoded.append(me.rank), write(self, *words))
    corpus.wait_until_visible = lambda path: path.exists()  # without waiting
    first = SimpleNamespace(rank=me.rank, local_rank=0, world_size=2, say=me.say)
    try:
        digest = corpus.load(str(file), None, 256, first).digest
    except corpus.UserError as error:
        digest = str(error)
    finally:
        corpus._Entry._write = write
    found = [None] * 2
    torch.distributed.all_gather_object(found, (encoded, digest))
    return found


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_node_that_does_not_see_the_entry_encodes_for_itself(is_shared, tmp_path):
    (tmp_path / "a.txt").write_text("words")
    folders = [tmp_path / "one", tmp_path / "two"]
    cloudpickle.register_pickle_by_value(__import__("test_corpus"))
    here = launch.Cluster(launcher="local")
    found = notebook_ranks.on_ranks(
        _two_nodes, tmp_path / "a.txt", folders, is_shared, ranks=2, cluster=here, timeout=60
    )[0]
    assert [encoded for encoded, _ in found] == ([[0], []] if is_shared else [[0], [1]])
    assert found[0][1] == found[1][1] and " " not in found[0][1]
    (tmp_path / "a.txt").write_text("zip")
    (tmp_path / "a.txt").write_bytes(b"PK\x03\x04")
    found = notebook_ranks.on_ranks(
        _two_nodes, tmp_path / "a.txt", folders, is_shared, ranks=2, cluster=here, timeout=60
    )[0]
    assert ["zip archive" in message for _, message in found] == [True, True]  # both end, neither waits
