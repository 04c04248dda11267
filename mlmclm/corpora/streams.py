"""Which documents of a source become blocks, and in which order: the same wherever and however often they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlmclm.corpora.chosen_documents import held_out, prefix
from mlmclm.corpora.config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Piece, Source
from mlmclm.corpora.shard_writer import Position

MORE = -1
"""The number of what a stream ends with instead of a document if there were more documents than it was to give."""


class Document(NamedTuple):
    """One text, the part that it belongs to, and where it comes from."""

    place: Position
    part: str
    text: str


@dataclass(frozen=True)
class Stream:
    """The documents of one part, or of both as they come, in order; empty ones are left out. Picklable."""

    parts: tuple[str, ...]
    pieces: tuple[Piece, ...]
    corpus: CorpusConfig
    below: int | None
    """Where the pieces hold both parts: the hash of the text below which a document is one of validation."""
    characters: int | None = None
    documents: int | None = None
    """If one of these is given: the documents with the smallest hashes, as many as fit, in the order of their hashes."""

    @property
    def chosen(self) -> bool:
        """Whether documents are chosen by hash: all pieces are read at once, and memory holds what is chosen."""
        return self.characters is not None or self.documents is not None

    def numbers(self, starts: Mapping[str, Position]) -> range:
        """Which pieces `read` takes that hold a document at or behind `starts`, part by part."""
        if self.chosen:
            return range(1)
        return range(max(0, min(place.piece for part, place in starts.items() if part in self.parts)), len(self.pieces))

    def read(self, piece: int, starts: Mapping[str, Position]) -> Iterator[Document]:
        """A piece's documents at or behind their part's place in `starts`; of a part that isn't in it, none."""
        documents = self._choose() if self.chosen else self._piece(piece)
        for document in documents:
            start = starts.get(document.part)
            if start is not None and (document.place >= start or document.place.number == MORE):
                yield document

    def _piece(self, number: int) -> Iterator[Document]:
        for position, text in enumerate(self.pieces[number]()):
            if text.strip():
                part = self.parts[0]
                if self.below is not None:
                    part = VALIDATION if held_out(text, below=self.below, seed=self.corpus.seed) else TRAIN
                if part in self.parts:
                    yield Document(Position(number, position), part, text)

    def _choose(self) -> Iterator[Document]:
        (part,) = self.parts
        texts = (document.text for number in range(len(self.pieces)) for document in self._piece(number))
        chosen, left_out = prefix(
            texts, characters=self.characters, documents=self.documents, purpose="selection", seed=self.corpus.seed
        )
        for position, text in enumerate(chosen):
            yield Document(Position(0, position), part, text)
        if left_out and (self.documents is None or len(chosen) < self.documents):
            yield Document(Position(0, MORE), part, "")


def streams(corpus: CorpusConfig, source: Source, below: int | None, characters_a_token: float) -> list[Stream]:
    """The streams that a corpus is made from.

    Args:
        below: the hash below which a document is held out; None where the source has validation documents of its own.
        characters_a_token: text to choose for each token that is wanted; what turns out short is chosen again with more.
    """
    training = tuple(source.pieces(TRAIN) or ())
    own = tuple(source.pieces(VALIDATION) or ())
    if corpus.streaming and below is not None:
        return [Stream((TRAIN, VALIDATION), training, corpus, below)]
    found = []
    for part, tokens, documents in (
        (TRAIN, corpus.max_tokens, corpus.max_documents),
        (VALIDATION, corpus.max_validation_tokens, None),
    ):
        pieces = training if part == TRAIN or below is not None else own
        if corpus.streaming:
            tokens = documents = None
        characters = None if tokens is None else int(tokens * characters_a_token)
        found.append(Stream((part,), pieces, corpus, below, characters, documents))
    return found
