"""Tokenising in processes of this machine; `ray_tokenising` does the same on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.documents import TRAIN
from mlmclm.corpora.process_map import Workers
from mlmclm.corpora.shard_writer import Position
from mlmclm.corpora.streams import Document, Stream
from mlmclm.corpora.tokenizer import text_tokenizer

BATCH_CHARACTERS = 200_000
"""Characters of text tokenised in one batch; the tokens do not depend on it."""


@dataclass(frozen=True)
class Vocabulary:
    """The content of a tokenizer.json, and the ids of its EOS and unknown token (-1 for none)."""

    tokenizer: str
    eos: int
    unknown: int

    @classmethod
    def of(cls, folder: Path, eos: int) -> Vocabulary:
        """Read the vocabulary from a prepared tokenizer's folder."""
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
        model = json.loads(content)["model"]
        token = model.get("unk_token")
        known = None if token is None else text_tokenizer(content).token_to_id(token)
        number = model.get("unk_id") if known is None else known  # Unigram models name an id instead of a token.
        return cls(content, eos, -1 if number is None else number)


@dataclass(frozen=True)
class Encoded:
    """Tokenised documents in order: position (piece and number), part, UTF-8 bytes, unknown tokens, and tokens.

    Arrays instead of objects, because batches travel between processes. The tokens of each document end with EOS.
    """

    pieces: NDArray[np.int64]
    numbers: NDArray[np.int64]
    training: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    bytes: NDArray[np.int64]
    unknown: NDArray[np.int64]
    """Like the arrays above [n], one value per document."""
    tokens: NDArray[np.uint32]
    """The documents' tokens, concatenated [sum of lengths]."""

    def documents(self) -> Iterator[tuple[Position, bool, NDArray[np.uint32], int, int]]:
        """Yield (position, whether for training, tokens, bytes, number of unknown tokens) of each document."""
        ends = np.cumsum(self.lengths).tolist()
        columns = (self.pieces, self.numbers, self.training, self.lengths, self.bytes, self.unknown)
        for end, piece, number, training, length, size, unknown in zip(
            ends, *(column.tolist() for column in columns), strict=True
        ):
            yield Position(piece, number), training, self.tokens[end - length : end], size, unknown


Encoder = Callable[[Stream, Mapping[str, Position]], Generator[Encoded]]
"""Callable that tokenises a stream's documents from each part's position on, in order. Closing the generator ends the
work."""


def plain(text: str) -> str:
    """Replace what UTF-8 cannot encode: JSON can hold lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def encode(
    vocabulary: Vocabulary, tokenizer: Any, places: Sequence[Position], training: Sequence[bool], texts: Sequence[str]
) -> Encoded:
    """Tokenise documents with `tokenizer`, which is `text_tokenizer(vocabulary.tokenizer)`."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    rows = [[*encoding.ids, vocabulary.eos] for encoding in encodings]
    tokens = np.fromiter((token for row in rows for token in row), dtype=np.uint32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    places_array = np.array(places, dtype=np.int64).reshape(-1, 2)
    return Encoded(
        pieces=places_array[:, 0],
        numbers=places_array[:, 1],
        training=np.array(training, dtype=np.bool_),
        lengths=lengths,
        bytes=np.array([len(text.encode()) for text in texts], dtype=np.int64),
        # Each document has at least EOS, so that no segment of `reduceat` is empty.
        unknown=np.add.reduceat(tokens == np.int64(vocabulary.unknown), lengths.cumsum() - lengths, dtype=np.int64),
        tokens=tokens,
    )


def batches(stream: Stream, pieces: Sequence[int], starts: Mapping[str, Position]) -> Iterator[list[Document]]:
    """Yield the documents of a stream's pieces, in text that UTF-8 can encode, about `BATCH_CHARACTERS` per batch."""
    waiting: list[Document] = []
    size = 0
    for piece in pieces:
        for document in stream.read(piece, starts):
            waiting.append(document._replace(text=plain(document.text)))
            size += len(document.text)
            if size >= BATCH_CHARACTERS:
                yield waiting
                waiting, size = [], 0
    if waiting:
        yield waiting


@contextmanager
def local_encoder(vocabulary: Vocabulary, workers: int) -> Iterator[Encoder]:
    """Tokenise in `workers` processes; a single worker is this process itself."""
    with Workers(_encode, workers=workers, setup=_set_up, setup_arguments=(vocabulary,)) as processes:

        def run(stream: Stream, starts: Mapping[str, Position]) -> Generator[Encoded]:
            return processes.map(batches(stream, stream.numbers(starts), starts))

        yield run


_worker: dict[str, Any] = {}
"""A worker process's vocabulary and tokenizer, loaded once per process."""


def _set_up(vocabulary: Vocabulary) -> None:
    """Load the tokenizer in a worker."""
    _worker.update(vocabulary=vocabulary, tokenizer=text_tokenizer(vocabulary.tokenizer))


def _encode(batch: list[Document]) -> Encoded:
    """Run `encode` in a worker."""
    return encode(
        _worker["vocabulary"],
        _worker["tokenizer"],
        [document.place for document in batch],
        [document.part == TRAIN for document in batch],
        [document.text for document in batch],
    )
