# SPDX-License-Identifier: BSD-3-Clause
"""Cut a corpus into sequences, and hand out this rank's micro-batches of each step.

  packing     what a sequence is
  stream      the next seq_len tokens of all documents, one after another: the practice in pretraining
  documents   whole documents, as many as fit; no token attends to another document
  padding     one document, padded on the right

Positions restart at 0 with each packed document. That is how transformers recognizes them, and masks attention between
them, if a model gets position_ids and no attention_mask. Padding needs no mask: it comes after all other tokens, which
therefore do not attend to it, and it has no targets.

A document of n tokens has n − 1 inputs and targets: each token but the first is the target of the one before it. Longer
texts are split without losing a target. Longer conversations are truncated, since what follows could not be answered
without its begin.

Batches are functions of the step: nothing has to be saved to resume. All sequences of an epoch come once, in an order that
depends on the seed and the epoch, and not on the number of ranks or micro-batches. Those of the next epoch follow at once,
in the same batch if need be.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from labkit import UserError
from labkit.training import corpus
from labkit.training.corpus import Corpus
from labkit.training.data_files import CHAT, COMPLETION, PLAIN, TEXT

DEFAULT = {PLAIN: "stream", TEXT: "stream", COMPLETION: "documents", CHAT: "documents"}  # packing of each kind
NO_TARGET = -100  # the value that cross_entropy ignores


class Batch(NamedTuple):
    """A rank's micro-batches of a step.

    Attributes:
        inputs, targets: int64, (accumulate, batch_size, seq_len). A target is the token after its input, or ``NO_TARGET``.
        positions: of the inputs in their documents, of the same shape; None: 0 to seq_len − 1 in each sequence.
        tokens: number of targets of the whole step, in all micro-batches of all ranks: the loss is the sum over them,
            divided by this.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    tokens: int


def load(config, vocab_size: int, me) -> tuple["Sequences", "Sequences | None"]:
    """Return the sequences to train on, and those for validation (None without --validation). Collective.

    Args:
        config: hf_fsdp.py's options.
        vocab_size: of the model.
        me: this rank.

    Raises:
        UserError: the data cannot be used.
    """
    tokenizer = config.model if (config.tokens or "model") == "model" else None  # without --model: bytes
    settings = config.seq_len, config.packing, config.seed
    data = corpus.load(config.data, tokenizer, vocab_size, me)
    if config.validation is None:
        train, held_out = Sequences(data, None, *settings), None
    elif config.validation_share:
        documents, held_out = hold_out(data, config.validation_share, config.seed)
        train, held_out = Sequences(data, documents, *settings), Sequences(data, held_out, *settings)
    else:
        other = corpus.load(config.validation, tokenizer, vocab_size, me, "--validation")
        train, held_out = Sequences(data, None, *settings), Sequences(other, None, *settings)
    me.say(f"training: {train}" + (f"\nvalidation: {held_out}" if held_out else ""))
    return train, held_out


def hold_out(data: Corpus, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a corpus into documents to train on and documents for validation.

    Of a plain text it is the end, otherwise rows of the files drawn at random, so that no conversation is on both sides.

    Args:
        data: the corpus.
        share: of the rows, or of a plain text's tokens, that are for validation.
        seed: of the draw.

    Returns:
        (begin, end) of the documents to train on, and of the others: int64, (documents, 2) each.

    Raises:
        UserError: there are too few rows.
    """
    documents = data.documents
    if data.kind == PLAIN:
        begins, ends = documents.T
        cuts = ends - np.round((ends - begins) * share).astype(np.int64)
        return np.stack([begins, cuts], 1), np.stack([cuts, ends], 1)
    count = int(data.rows[-1]) + 1
    chosen = _permutation(count, seed, 0)[: round(count * share)]
    held_out = np.isin(data.rows, chosen)
    if not held_out.any() or held_out.all():
        raise UserError(
            f"--validation {share:g} of {count} rows leaves nothing to train on, or to validate with: give "
            "another share, or a file"
        )
    return documents[~held_out], documents[held_out]


class Sequences:
    """The sequences of some documents.

    Args:
        data: the corpus.
        documents: (begin, end) of each document, int64, (documents, 2); None: all of them.
        seq_len: number of inputs of a sequence.
        packing: "stream", "documents", or "padding"; None: ``DEFAULT``.
        seed: of the order.

    Attributes:
        targets: number of targets of each sequence, int64, (sequences,).
        truncated: number of conversations that were too long.
        skipped: number of conversations that were left out, because none of their answers fits.

    Raises:
        UserError: there is nothing to learn, or the kind of data excludes the packing.
    """

    def __init__(self, data: Corpus, documents: np.ndarray | None, seq_len: int, packing: str | None, seed: int):
        self.corpus, self.seq_len, self.seed = data, seq_len, seed
        self.packing = packing or DEFAULT[data.kind]
        self.truncated = self.skipped = 0
        self._orders = {}
        documents = data.documents if documents is None else documents
        (self._stream if self.packing == "stream" else self._pack)(documents)
        if not len(self.targets):
            raise UserError(
                f"{data.name} has nothing to learn in sequences of --seq-len {seq_len} tokens: "
                + ("no answer begins so early" if self.skipped else "it has too few tokens")
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __str__(self) -> str:
        how = {"stream": "of one stream", "documents": "of packed documents", "padding": "of one document each"}
        filled = self.targets.sum() / (len(self) * self.seq_len)
        notes = f"; {self.truncated:,} conversations truncated" if self.truncated else ""
        notes += f"; {self.skipped:,} left out, as no answer is left" if self.skipped else ""
        return f"{len(self):,} sequences {how[self.packing]}, {filled:.1%} of the positions have a target{notes}"

    def steps(self, epochs: float, global_batch: int) -> int:
        """Return the number of steps in which each sequence comes at least this many times."""
        return int(-(-len(self) * epochs // global_batch))

    # Layout: sequence n has the pieces bounds[n] to bounds[n + 1]; a piece is a range of inputs in corpus.tokens.

    def _pack(self, documents: np.ndarray):
        begins, lengths = documents[:, 0], documents[:, 1] - documents[:, 0] - 1
        if self.corpus.answers is None:
            begins, lengths = _split(begins, lengths, self.seq_len)
            targets = lengths
        else:
            self.truncated = int((lengths > self.seq_len).sum())
            lengths = np.minimum(lengths, self.seq_len)
            ranges = zip((begins + 1).tolist(), (begins + 1 + lengths).tolist(), strict=True)
            targets = np.array([np.count_nonzero(self.corpus.answers[begin:end]) for begin, end in ranges])
        kept = targets > 0
        self.skipped = 0 if self.corpus.answers is None else int((~kept).sum())
        begins, lengths, targets = begins[kept], lengths[kept], targets[kept]
        if self.packing == "documents":
            order, self.bounds = best_fit(lengths, self.seq_len)
            begins, lengths, targets = begins[order], lengths[order], targets[order]
        else:
            self.bounds = np.arange(len(lengths) + 1)
        self.begins, self.lengths = begins, lengths
        self.targets = np.add.reduceat(targets, self.bounds[:-1]) if len(targets) else targets

    def _stream(self, documents: np.ndarray):
        if self.corpus.answers is not None:
            raise UserError(
                f"{self.corpus.name} has {self.corpus.kind}, which --packing stream would split anywhere: give --packing "
                "documents or padding"
            )
        apart = np.flatnonzero(documents[1:, 0] != documents[:-1, 1])  # ranges that follow one another become one
        self.begins = documents[np.concatenate([[0], apart + 1]), 0]
        ends = documents[np.concatenate([apart, [len(documents) - 1]]), 1]
        self.offsets = np.concatenate([[0], np.cumsum(ends - self.begins)])  # of each range in the stream
        self.targets = _split(np.array([0]), self.offsets[-1:] - 1, self.seq_len)[1]

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders = {epoch - 1: self._orders.get(epoch - 1), epoch: _permutation(len(self), self.seed, epoch)}
        return self._orders[epoch]

    def chosen(self, first: int, count: int) -> np.ndarray:
        """Return the sequences at some places in the order of all epochs, one after another: int64, (count,)."""
        places = np.arange(first, first + count)
        epochs = places // len(self)
        return np.concatenate([
            self._order(epoch)[places[epochs == epoch] % len(self)] for epoch in range(epochs[0], epochs[-1] + 1)
        ])  # fmt: skip

    def training_batches(
        self, steps: Iterable[int], accumulate: int, batch_size: int, rank: int, ranks: int, device
    ) -> Iterator[Batch]:
        """Yield a rank's batches of some steps.

        Args:
            steps: their indices.
            accumulate: micro-batches in a step.
            batch_size: sequences in a micro-batch.
            rank, ranks: this rank, and their number, among those that have different data.
            device: where the batches go.
        """
        shape = accumulate, ranks, batch_size
        for step in steps:
            chosen = self.chosen(step * int(np.prod(shape)), int(np.prod(shape))).reshape(shape)
            yield self._batch(chosen[:, rank], int(self.targets[chosen].sum()), device)

    def validation_batches(self, batch_size: int, rank: int, ranks: int, device) -> Iterator[Batch]:
        """Yield a rank's share of all sequences, each once, in batches with accumulate = 1.

        All ranks get the same number of batches, so that collectives match: the last ones are filled with sequences
        without targets. ``tokens`` is the number of targets of all batches. Arguments: see ``training_batches``.
        """
        count = -(-len(self) // (ranks * batch_size))
        places = np.arange(count * ranks * batch_size).reshape(count, ranks, batch_size)
        places[places >= len(self)] = -1
        for mine in places[:, rank]:
            yield self._batch(mine[None], int(self.targets.sum()), device)

    def _batch(self, chosen: np.ndarray, tokens: int, device) -> Batch:
        inputs = np.zeros((*chosen.shape, self.seq_len), dtype=np.int64)
        targets = np.full_like(inputs, NO_TARGET)
        positions = np.zeros_like(inputs)
        for place in np.ndindex(chosen.shape):
            if chosen[place] >= 0:
                fill = self._fill_from_stream if self.packing == "stream" else self._fill
                fill(int(chosen[place]), inputs[place], targets[place], positions[place])
        inputs, targets, positions = (torch.from_numpy(each).to(device) for each in (inputs, targets, positions))
        return Batch(inputs, targets, positions if self.packing == "documents" else None, tokens)

    def _fill(self, sequence: int, inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray):
        """Write the inputs, targets, and positions of a sequence, (seq_len,) each. Padding follows the last document."""
        tokens, answers, at = self.corpus.tokens, self.corpus.answers, 0
        for piece in range(self.bounds[sequence], self.bounds[sequence + 1]):
            begin, length = self.begins[piece], self.lengths[piece]
            here = slice(at, at + length)
            inputs[here] = tokens[begin : begin + length]
            targets[here] = tokens[begin + 1 : begin + length + 1]
            if answers is not None:
                targets[here][~answers[begin + 1 : begin + length + 1]] = NO_TARGET
            positions[at:] = np.arange(len(positions) - at)
            at += length

    def _fill_from_stream(self, sequence: int, inputs: np.ndarray, targets: np.ndarray, positions: np.ndarray):
        length, at = int(self.targets[sequence]), sequence * self.seq_len
        found, end = [], at + length + 1
        index = int(np.searchsorted(self.offsets, at, "right")) - 1
        while at < end:
            stop = min(end, self.offsets[index + 1])
            begin = self.begins[index] + at - self.offsets[index]
            found.append(self.corpus.tokens[begin : begin + stop - at])
            at, index = stop, index + 1
        tokens = np.concatenate(found)
        inputs[:length], targets[:length] = tokens[:-1], tokens[1:]


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random order of ``count`` items, with four bytes for each."""
    # RandomState, because NumPy guarantees that its stream never changes
    return np.random.RandomState([seed % 2**32, epoch]).permutation(np.arange(count, dtype=np.int32))


def _split(begins: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Split ranges, given by begins and lengths, into ranges of at most ``longest``, and return theirs."""
    lengths = np.maximum(lengths, 0)
    counts = -(-lengths // longest)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its range
    return np.repeat(begins, counts) + number * longest, np.minimum(
        np.repeat(lengths, counts) - number * longest, longest
    )


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins by best-fit decreasing: the longest first, each into the fullest bin that has room.

    Args:
        lengths: of the items, 1 to ``capacity`` each.
        capacity: of a bin.

    Returns:
        (items, ordered by bin; where each bin begins in that order, and the end): int64, (items,) and (bins + 1,).
    """
    longest_first = np.argsort(-lengths, kind="stable")
    bin_of, bins = np.empty(len(lengths), dtype=np.int64), 0
    with_room, rooms = {}, []  # {room: open bins that have it}; its keys, ascending
    for item, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            bin_of[item] = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, bin_of[item], bins = capacity, bins, bins + 1
        if room > length:
            if room - length not in with_room:
                insort(rooms, room - length)
            with_room.setdefault(room - length, []).append(int(bin_of[item]))
    order = np.argsort(bin_of, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=bins))])
