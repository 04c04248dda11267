"""Tokenising of a stream's documents, by the same functions in processes of this machine and on a cluster.

Documents and tokens are Arrow tables, one document per row, because batches travel between processes. Both have the
columns `piece` and `number` (a `Position`) and `training` (the part). Documents have `text`. Tokens have `bytes` (of
UTF-8), `unknown` (number of unknown tokens) and `tokens`, which end with EOS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.documents import TRAIN
from mlmclm.corpora.process_map import worker_processes
from mlmclm.corpora.shard_writer import Position
from mlmclm.corpora.streams import Document, Stream
from mlmclm.corpora.tokenizer import text_tokenizer

if TYPE_CHECKING:
    import pyarrow

BATCH_CHARACTERS = 200_000
"""Characters of text tokenised in one batch; the tokens do not depend on it."""

Encoder = Callable[[Stream, Mapping[str, Position]], "Generator[pyarrow.Table]"]
"""Callable that yields the tokens of a stream's documents from each part's position on, in order. Closing the generator
ends the work."""

# Loaded once per process; an earlier corpus's tokenizer must not stay in the memory of a worker that is used again.
_loaded = lru_cache(maxsize=1)(text_tokenizer)


@dataclass(frozen=True)
class Tokeniser:
    """A function from documents to tokens. Picklable: each process loads the tokenizer for itself."""

    content: str
    """The text of tokenizer.json."""
    eos: int
    unknown: int
    """Id of the unknown token; -1 for none."""

    @classmethod
    def of(cls, folder: Path, eos: int) -> Tokeniser:
        """Read a prepared tokenizer's folder."""
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
        model = json.loads(content)["model"]
        token = model.get("unk_token")
        by_token = None if token is None else text_tokenizer(content).token_to_id(token)
        number = model.get("unk_id") if by_token is None else by_token  # Unigram models name an id instead of a token.
        return cls(content, eos, -1 if number is None else number)

    def __call__(self, documents: pyarrow.Table) -> pyarrow.Table:
        """Tokenise a batch."""
        import pyarrow

        texts = documents["text"].to_pylist()
        encodings = _loaded(self.content).encode_batch_fast(texts, add_special_tokens=False)
        rows = [[*encoding.ids, self.eos] for encoding in encodings]
        tokens = np.fromiter(chain.from_iterable(rows), dtype=np.uint32)
        ends = np.cumsum([0, *map(len, rows)])
        # Each document has at least EOS, so that no segment of `reduceat` is empty.
        unknown = np.add.reduceat(tokens == np.int64(self.unknown), ends[:-1], dtype=np.int64)
        return pyarrow.table(
            {
                **{name: documents[name] for name in ("piece", "number", "training")},
                "bytes": [len(text.encode()) for text in texts],
                "unknown": unknown,
                "tokens": pyarrow.LargeListArray.from_arrays(ends, tokens),
            }
        )


def without_surrogates(text: str) -> str:
    """Replace what UTF-8 cannot encode: JSON can hold lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def text_batches(stream: Stream, pieces: Sequence[int], starts: Mapping[str, Position]) -> Iterator[pyarrow.Table]:
    """Yield the documents of a stream's pieces, in text that UTF-8 can encode, about `BATCH_CHARACTERS` per batch."""
    waiting: list[Document] = []
    size = 0
    for document in chain.from_iterable(stream.read(piece, starts) for piece in pieces):
        waiting.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield _to_table(waiting)
            waiting, size = [], 0
    if waiting:
        yield _to_table(waiting)


def _to_table(documents: Sequence[Document]) -> pyarrow.Table:
    import pyarrow

    return pyarrow.table(
        {
            "piece": [document.place.piece for document in documents],
            "number": [document.place.number for document in documents],
            "training": [document.part == TRAIN for document in documents],
            "text": [without_surrogates(document.text) for document in documents],
        }
    )


def tokenised(encoded: pyarrow.Table) -> Iterator[tuple[Position, bool, NDArray[np.uint32], int, int]]:
    """Yield (position, whether for training, tokens, bytes, number of unknown tokens) of each document."""
    for batch in encoded.to_batches():
        tokens = batch["tokens"].flatten().to_numpy()
        bounds = pairwise([0, *np.cumsum(batch["tokens"].value_lengths()).tolist()])
        columns = (batch[name].to_pylist() for name in ("piece", "number", "training", "bytes", "unknown"))
        for (begin, end), piece, number, training, size, unknown in zip(bounds, *columns, strict=True):
            yield Position(piece, number), training, tokens[begin:end], size, unknown


@contextmanager
def local_encoder(tokeniser: Tokeniser) -> Iterator[Encoder]:
    """Tokenise in processes of this machine."""
    with worker_processes(tokeniser) as tokenise:
        yield lambda stream, starts: tokenise(text_batches(stream, stream.numbers(starts), starts))
