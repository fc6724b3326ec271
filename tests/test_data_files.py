# SPDX-License-Identifier: BSD-3-Clause
"""What decides how a file is read, and blocks of a long text for tokenizers to which a block's begin is a text's."""

import codecs
import gzip
import json

import numpy as np
import pytest
import tiny_tokenizer
from commands import refused
from labkit.training import data_files
from labkit.training.encoding import ModelTokens
from transformers import AutoTokenizer

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def rows(path, kind):
    return [row.values for row in data_files.rows(data_files.DataFile(str(path), path), kind, lambda _: None)]


def test_a_block_begins_as_a_part_of_the_text(tmp_path):
    """Also where the tokenizer puts a space before each text, as Llama 2's does."""
    tiny_tokenizer.save(tmp_path, metaspace=True, eos=False)
    file = tmp_path / "tokenizer.json"
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    both = {"type": "Sequence", "normalizers": [prepend, replace]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": both, "pre_tokenizer": None}))
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path), "What is the capital of France? " * 20
    assert tokenizer(" is")["input_ids"] != tokenizer("is")["input_ids"]  # it sees two spaces
    blocks = [text[at : at + 97] for at in range(0, len(text), 97)]
    tokens = np.concatenate(list(ModelTokens(str(tmp_path)).parts(blocks)))
    assert tokens.tolist() == tokenizer(text)["input_ids"]


def test_names_may_have_commas_spaces_and_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.txt", "c.txt"):
        (tmp_path / name).write_text("words")
    (one,) = data_files.named("a,b.txt", "--data")
    assert one.path == tmp_path / "a,b.txt"  # whole, also once a program has changed to another folder
    assert [file.path.name for file in data_files.named("c.txt, ~/c.txt", "--data")] == ["c.txt"] * 2
    with refused("~/d.txt cannot be read"):
        data_files.named("~/d.txt", "--data")


@pytest.mark.parametrize("byte_order_mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_rows_do_not_depend_on_the_files_wrapping(packed, byte_order_mark, tmp_path):
    """Nor on the name, blank lines, and keys without a value."""
    row = {"messages": TALK, "text": None, "tools": None}
    path = tmp_path / "data"
    path.write_bytes(packed(byte_order_mark + b"\n" + json.dumps(row).encode() + b"\n\n"))
    assert data_files.kind_of(data_files.DataFile("data", path)) == data_files.CHAT
    assert rows(path, data_files.CHAT) == [row]


def test_a_text_may_begin_like_json(tmp_path):
    for text in ("[1] a footnote", "42\n", '"quoted"\n', "{not json}\n"):
        file = data_files.DataFile("a.txt", content=text.encode())
        assert data_files.kind_of(file) == data_files.PLAIN
        assert "".join(data_files.blocks(file, lambda _: None)) == text


BAD = {
    "big-endian.txt": ("plain words".encode("utf-16-be"), "UTF-16"),
    "words.jsonl.gz": (gzip.compress(b"words\n"), "line 1 JSON"),
    "numbers.jsonl": (b"1\n2\n", "line 1 JSON"),
    "damaged.gz": (gzip.compress(b"text")[:10] + b"\xff" * 60, "not a whole .gz"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_refused_at_once(name, tmp_path):
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    file = data_files.DataFile(name, tmp_path / name)
    with refused(*words.split()):
        data_files.kind_of(file)
        list(data_files.blocks(file, lambda _: None))


BAD_ROWS = {
    "nested": (b'{"text": ' + b"[" * 100_000, data_files.TEXT, "not a JSON object"),
    "list": (b"[1]", data_files.TEXT, "not a JSON object"),
    "role": ({"messages": [*TALK, {"content": "a"}]}, data_files.CHAT, "has no role"),
    "content": ({"messages": [{"role": "user"}, TALK[1]]}, data_files.CHAT, "the role user has no content"),
    "words": ({"messages": ["a", "b"]}, data_files.CHAT, "list of objects"),
    "object": ({"messages": TALK[1]}, data_files.CHAT, "list of objects"),
    "tools": ({"messages": TALK, "tools": "[]"}, data_files.CHAT, "tools must be a list"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_are_refused(name, tmp_path):
    row, kind, words = BAD_ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row if isinstance(row, bytes) else json.dumps(row).encode())
    with refused("line 1", words):
        rows(path, kind)


def test_a_system_message_may_be_empty_and_an_answer_a_call(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "today"}}]}
    row = {"messages": [{"role": "system", "content": ""}, TALK[0], call]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert rows(path, data_files.CHAT) == [row]
