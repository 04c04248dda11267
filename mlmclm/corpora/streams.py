"""Streams of a source's documents: those that become blocks, in an order that is the same on every read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlmclm.corpora.chosen_documents import is_held_out, smallest_hashes
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Piece, Source
from mlmclm.corpora.shard_writer import Position

MORE = -1
"""Number of a marker in place of a document: the stream's limit of characters has left documents out."""


class Document(NamedTuple):
    """A text, its part of the corpus, and its position in the source."""

    place: Position
    part: str
    text: str


@dataclass(frozen=True)
class Stream:
    """The documents of one part, or of both parts as they come, in order and without empty ones. Picklable."""

    parts: tuple[str, ...]
    pieces: tuple[Piece, ...]
    corpus: CorpusConfig
    below: int | None
    """If the pieces hold both parts: the hash below which a document belongs to the validation part."""
    characters: int | None = None
    documents: int | None = None
    """Limits, `characters` and `documents`. If one is set, the stream holds the documents with the smallest hashes, as
    many as fit, in the order of their hashes."""

    @property
    def chosen(self) -> bool:
        """True if documents are chosen by hash: all pieces are then read as one, and the choice is held in memory."""
        return self.characters is not None or self.documents is not None

    def numbers(self, starts: Mapping[str, Position]) -> range:
        """Return the indices of pieces with documents from each part's position in `starts` on, to be `read`."""
        if self.chosen:
            return range(1)  # The choice is one piece: it needs all documents.
        return range(max(0, min(place.piece for part, place in starts.items() if part in self.parts)), len(self.pieces))

    def read(self, piece: int, starts: Mapping[str, Position]) -> Iterator[Document]:
        """Yield a piece's documents from their part's position in `starts` on; none of a part that `starts` lacks."""
        documents = self._choose() if self.chosen else self._piece(piece)
        for document in documents:
            start = starts.get(document.part)
            # The marker's negative number may sort before the start.
            if start is not None and (document.place >= start or document.place.number == MORE):
                yield document

    def _piece(self, number: int) -> Iterator[Document]:
        for position, text in enumerate(self.pieces[number]()):
            if text.strip():
                part = self.parts[0]
                if self.below is not None:
                    part = VALIDATION if is_held_out(text, below=self.below, seed=self.corpus.seed) else TRAIN
                if part in self.parts:
                    yield Document(Position(number, position), part, text)

    def _choose(self) -> Iterator[Document]:
        (part,) = self.parts
        texts = (document.text for number in range(len(self.pieces)) for document in self._piece(number))
        hashed, left_out = smallest_hashes(
            texts, characters=self.characters, documents=self.documents, purpose="selection", seed=self.corpus.seed
        )
        # Up to the first text that is left out, so that larger limits only append texts.
        chosen = [text for key, text in hashed if left_out is None or key <= left_out]
        for position, text in enumerate(chosen):
            yield Document(Position(0, position), part, text)
        # If `documents` is reached, nothing more is wanted, whatever was left out.
        if left_out is not None and (self.documents is None or len(chosen) < self.documents):
            yield Document(Position(0, MORE), part, "")


def streams(corpus: CorpusConfig, source: Source, below: int | None, characters_a_token: float) -> list[Stream]:
    """Return the streams that a corpus is made from.

    Args:
        below: the hash below which a document is held out; None if the source has validation documents of its own.
        characters_a_token: characters of text to choose for each wanted token. If they turn out to be too few, the
            caller asks again with more.
    """
    training = tuple(source.pieces(TRAIN))
    validation = tuple(source.pieces(VALIDATION))
    # One pass over the stream serves both parts: reading it twice would download it twice.
    if corpus.streaming and below is not None:
        return [Stream((TRAIN, VALIDATION), training, corpus, below)]
    selected = []
    for part, tokens, documents in (
        (TRAIN, corpus.max_tokens, corpus.max_documents),
        (VALIDATION, corpus.max_validation_tokens, None),
    ):
        pieces = training if part == TRAIN or below is not None else validation
        if corpus.streaming:
            # Documents are used in the order of the stream, which ends when the shard writers are full.
            tokens = documents = None
        characters = None if tokens is None else int(tokens * characters_a_token)
        selected.append(Stream((part,), pieces, corpus, below, characters, documents))
    return selected
