# SPDX-License-Identifier: BSD-3-Clause
"""Turn documents into tokens, and mark the tokens that are answers.

``Bytes`` has one token per byte, for models with random weights; ``ModelTokens`` uses the tokenizer in a model's folder.
Both have the same methods. As in TRL, a text or a completion ends with the tokenizer's EOS token if there is one and it does
not end with it already; a conversation ends as the model's chat template ends it.

The loss is on answers: the completion, or what the chat template writes for the messages of the assistant.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from labkit import UserError
from labkit.training.data_files import Row

# A long text is cut before a space between two words, where no usual tokenizer has a token across the cut.
CUT = re.compile(r"\S(?= \S)")
NEAR_END = 10_000  # characters at the end of a block in which a cut is searched
CONTEXT = 64  # characters before a cut that are encoded with the part after it
BATCH = 8  # blocks that are encoded together, on several threads; with 16 of a MiB, encoding took 1.8 GB of memory
GENERATION = re.compile(r"\{%-?\s*generation\b")  # the tag with which a chat template marks answers itself


class Document(NamedTuple):
    """The tokens of a document, or of a part of it.

    Attributes:
        where: it is, for messages.
        tokens: integers, (tokens,).
        answers: for each token, whether it is part of an answer, bool, (tokens,); None: the loss is on all tokens.
        is_whole: whether the document ends here.
    """

    where: str
    tokens: np.ndarray
    answers: np.ndarray | None
    is_whole: bool = True


class Bytes:
    """One token per byte of UTF-8. There is no EOS token."""

    def parts(self, blocks: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of a long text that is given in blocks."""
        for block in blocks:
            yield _bytes(block)

    def text(self, rows: list[Row]) -> Iterator[Document]:
        """Yield the documents of rows with ``text``."""
        for row in rows:
            yield Document(row.where, _bytes(row.values["text"]), None)

    def completion(self, rows: list[Row]) -> Iterator[Document]:
        """Yield the documents of rows with ``prompt`` and ``completion``."""
        for row in rows:
            prompt, answer = _bytes(row.values["prompt"]), _bytes(row.values["completion"])
            tokens = np.concatenate([prompt, answer])
            yield Document(row.where, tokens, np.arange(len(tokens)) >= len(prompt))

    def chat(self, rows: list[Row]) -> Iterator[Document]:
        """Raise a UserError, as bytes have no chat template."""
        raise UserError(
            f"{rows[0].where} has messages, which need a chat template: give --tokens model, and a --model that has one"
        )


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


class ModelTokens:
    """The tokenizer and the chat template in a model's folder.

    Args:
        folder: the model's folder.

    Raises:
        UserError: it has no tokenizer that AutoTokenizer can read.
    """

    def __init__(self, folder: str):
        from transformers import AutoTokenizer  # takes seconds, and is not needed where the tokens are in the cache

        self.folder = folder
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # each class of tokenizers has its own checks
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"AutoTokenizer cannot read the tokenizer of {folder} ({why}): put the model's tokenizer files there, or "
                "give --tokens bytes"
            ) from None
        if not self.tokenizer.is_fast:
            raise UserError(
                f"there is no {folder}/tokenizer.json: write it with AutoTokenizer.from_pretrained(…).save_pretrained(…), "
                "or give --tokens bytes"
            )
        self.eos = self.tokenizer.eos_token_id

    def parts(self, blocks: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the tokens of a long text that is given in blocks, as if it were encoded at once."""
        batch, is_begin = [], True
        last = None
        for part in _parts(blocks):
            batch.append(part)
            if is_begin or len(batch) == BATCH:
                for tokens in self._encoded(batch, is_begin):
                    last = tokens[-1] if len(tokens) else last
                    yield tokens
                batch, is_begin = [], False
        for tokens in self._encoded(batch, is_begin):
            last = tokens[-1] if len(tokens) else last
            yield tokens
        if self.eos not in (None, last):
            yield np.array([self.eos])

    def _encoded(self, parts: list[tuple[str, str]], is_begin: bool) -> Iterator[np.ndarray]:
        """Yield the tokens of (context, text), without those of the context."""
        if not parts:
            return
        # Only the begin has a BOS token; an EOS token comes at the end of the whole text.
        encoded = self._encode([context + text for context, text in parts], add_special_tokens=is_begin)
        for encoding, (context, _) in zip(encoded.encodings, parts, strict=True):
            ids, first = encoding.ids, 0
            while context and first < len(ids) and encoding.token_to_chars(first)[0] < len(context):
                first += 1
            yield np.array(ids[first : -1 if is_begin and ids and ids[-1] == self.eos else None], dtype=np.int64)

    def _encode(self, texts: list[str], **options):
        return self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options)

    def text(self, rows: list[Row]) -> Iterator[Document]:
        """Yield the documents of rows with ``text``."""
        encoded = self._encode([row.values["text"] for row in rows])
        for row, tokens in zip(rows, encoded["input_ids"], strict=True):
            yield self._ended(row.where, tokens, None)

    def completion(self, rows: list[Row]) -> Iterator[Document]:
        """Yield the documents of rows with ``prompt`` and ``completion``.

        Both are encoded as one text. A token that begins in the prompt and ends in the completion is part of the answer.
        """
        prompts = [row.values["prompt"] for row in rows]
        texts = [prompt + row.values["completion"] for prompt, row in zip(prompts, rows, strict=True)]
        encoded = self._encode(texts, return_offsets_mapping=True)
        for n, row in enumerate(rows):
            answers = np.array(encoded["offset_mapping"][n])[:, 1] > len(prompts[n])
            yield self._ended(row.where, encoded["input_ids"][n], answers)

    def _ended(self, where: str, tokens: list[int], answers: np.ndarray | None) -> Document:
        """Return a document that ends with EOS, which is part of the answer."""
        if self.eos is not None:
            if not tokens or tokens[-1] != self.eos:
                tokens = [*tokens, self.eos]
            if answers is not None:
                answers = np.resize(answers, len(tokens))
                answers[-1] = True
        return Document(where, np.array(tokens), answers)

    def chat(self, rows: list[Row]) -> Iterator[Document]:
        """Yield the documents of rows with ``messages``, and ``tools`` if the assistant may call some.

        If the chat template marks answers with ``{% generation %}``, a row is one document. Otherwise the place of an answer
        is found by rendering the messages up to it, with and without it. Some templates render an answer differently once
        another one follows it (Qwen3 leaves out its thoughts): such an answer is a document of its own, with all messages
        before it, as the model sees them when it answers.
        """
        texts, places, wheres = [], [], []
        for row in rows:
            self._check_parts(row)
            if GENERATION.search(self._template(row)):
                yield self._marked(row)
                continue
            for text, ranges in self._turns(row):
                texts.append(text)
                places.append(ranges)
                wheres.append(row.where)
        if not texts:
            return
        encoded = self._encode(texts, add_special_tokens=False, return_offsets_mapping=True)
        for n, where in enumerate(wheres):
            begins, ends = np.array(encoded["offset_mapping"][n]).T
            answers = np.zeros(len(begins), dtype=bool)
            for begin, end in places[n]:
                answers |= (ends > begin) & (begins < end)
            yield Document(where, np.array(encoded["input_ids"][n]), answers)

    def _check_parts(self, row: Row):
        """Refuse a template that writes a message's parts as Python writes a list, instead of their text."""
        parts = [str(each["content"]) for each in row.values["messages"] if isinstance(each.get("content"), list)]
        if parts and any(part in self._rendered(row, row.values["messages"], tokenize=False) for part in parts):
            raise UserError(
                f"{row.where} has a message of several parts, which the chat template of {self.folder} does not know: write "
                "its content as one string"
            )

    def _template(self, row: Row) -> str:
        try:
            return self.tokenizer.get_chat_template(None, row.values.get("tools"))
        except ValueError:
            raise UserError(
                f"{row.where} has messages, and {self.folder} has no chat template: take an instruction-tuned model, put a "
                "chat_template.jinja there, or write prompt and completion"
            ) from None

    def _rendered(self, row: Row, messages: list[dict], **options):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=row.values.get("tools"), **options)
        except Exception as error:  # templates raise errors of their own, and Jinja's
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{row.where}: the chat template of {self.folder} refuses the messages ({why})") from None

    def _marked(self, row: Row) -> Document:
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = self._rendered(row, row.values["messages"], **options)
        answers = np.array(encoded["assistant_masks"], dtype=bool)
        if not answers.any():
            raise UserError(f"{row.where}: the chat template of {self.folder} marks no answer of the assistant")
        return Document(row.where, np.array(encoded["input_ids"]), answers)

    def _turns(self, row: Row) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return the texts of a conversation, each with the (begin, end) of its answers; usually there is one text."""
        messages, documents = row.values["messages"], []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if n == 0:
                raise UserError(f"{row.where}: the first message is the assistant's, and answers nothing: remove it")
            prompt = self._rendered(row, messages[:n], tokenize=False, add_generation_prompt=True)
            text = self._rendered(row, messages[: n + 1], tokenize=False)
            if not text.startswith(prompt) or text == prompt:
                raise UserError(
                    f"{row.where}: the chat template of {self.folder} does not write message {n + 1} after its own prompt "
                    "for it, so where the answer begins is unknown: mark answers with {% generation %} in the template"
                )
            continues = documents and text.startswith(documents[-1][0])
            answers = documents.pop()[1] if continues else []
            documents.append((text, [*answers, (len(prompt), len(text))]))
        return documents


def _parts(blocks: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (context, text) of the parts of a long text: what precedes the part, if it must be encoded with it."""
    context = rest = ""
    for block in blocks:
        text = rest + block
        cuts = [match.end() for match in CUT.finditer(text, max(0, len(text) - NEAR_END))]
        cut = cuts[-1] if cuts else len(text)
        if cut:
            yield context, text[:cut]
        rest = text[cut:]
        context = text[max(0, cut - CONTEXT) : cut] if cuts else ""
    if rest:
        yield context, rest
