"""Packing of documents into shards of whole blocks. Each shard can be made again alone.

The blocks of a part are its documents' tokens, concatenated and cut, whatever the size of the shards. Each shard has
a record of the position in the documents at which it ends. The next shard starts there, if need be in another process
and on another day.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.blocks import ENDS, NUMBER, SUMS, Shard, beside, block_sums, sealed_numbers
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.storage.checksums import sealed, unsealed
from mlmclm.storage.files import disk_faults, whole_file, write_atomic


class Position(NamedTuple):
    """The position of a document in its source: the piece (often a file) that holds it, and its number there."""

    piece: int = 0
    number: int = 0


class Counts(NamedTuple):
    """Counts of the documents that were packed."""

    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of their text."""
    encoded_tokens: int = 0
    """Tokens including EOS; may be more than the blocks hold, because the last document may be cut."""
    unknown: int = 0
    """Unknown tokens: those of text that the vocabulary cannot write."""
    empty: int = 0
    """Documents without any token but EOS."""


@dataclass(frozen=True)
class Record:
    """A finished shard, and where the next one begins."""

    shard: Shard
    bytes: int
    document: Position
    """The document of the shard's last token; the next shard continues it."""
    token: int
    """Number of that document's tokens in this and earlier shards."""
    counts: Counts
    """Counts of the documents up to and including that one."""

    def to_json(self) -> dict[str, Any]:
        end = {"piece": self.document.piece, "document": self.document.number, "token": self.token}
        return {**self.shard._asdict(), "bytes": self.bytes, "end": end, "counts": self.counts._asdict()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Record:
        """Read what `to_json` returned."""
        end = value["end"]
        shard = Shard(value["file"], value["blocks"], value["sha256"])
        return cls(
            shard, value["bytes"], Position(end["piece"], end["document"]), end["token"], Counts(**value["counts"])
        )


def record_file(part: str, number: int) -> str:
    """Return the name of a shard's record file, which is removed once the corpus has its index."""
    return f"{part}-{number:05d}.json"


def read_shard_record(shelf: Shelf, part: str, number: int) -> Record | None:
    """Read a finished shard's record; None if it is missing or damaged, so that the shard must be made again."""
    try:
        return Record.from_json(unsealed(json.loads(shelf.read(record_file(part, number)) or b"")))
    except (ValueError, KeyError, TypeError):
        say(f"{shelf.where(record_file(part, number))} is damaged; its shard will be made again.")
        return None


class ShardWriter:
    """Packs the documents of one part into shards. Tokens at the end that don't fill a block are dropped.

    A context manager. At the end the blocks since the last finished shard become the last shard; after an error they are
    dropped.
    """

    def __init__(
        self,
        shelf: Shelf,
        part: str,
        block_length: int,
        dtype: np.dtype[Any],
        *,
        shard_blocks: int,
        max_blocks: int | None = None,
        max_documents: int | None = None,
        finished: list[Record] | None = None,
    ) -> None:
        """Continue after the `finished` shards, the first ones of the part.

        Args:
            shard_blocks: blocks per shard; the last shard may have fewer.
            max_blocks: limit of the part's blocks, including those of finished shards; None for no limit.
            max_documents: limit of the part's documents, counted in the same way.
        """
        self.part = part
        self.records = list(finished or ())
        self.blocks = sum(record.shard.blocks for record in self.records)
        last = self.records[-1] if self.records else None
        self.counts = last.counts if last else Counts()
        self._shelf, self._length, self._dtype = shelf, block_length, dtype
        self._shard_blocks, self._max_blocks, self._max_documents = shard_blocks, max_blocks, max_documents
        self._document = last.document if last else Position(-1)  # Before the first document.
        self._taken = last.token if last else 0  # That document's tokens in the finished shards.
        self._resumes = last is not None  # Until the rest of that document has been added.
        self._pending: list[NDArray[Any]] = []
        self._pending_tokens = 0
        self._handle: BinaryIO | None = None  # The shard that is being written.
        self._begun = 0  # Number of its blocks.
        self._stack = ExitStack()
        self._cut: tuple[Position, int, Counts] = (self._document, self._taken, self.counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._handle is not None:
            self._finish_shard()
        self._stack.__exit__(kind, error, trace)

    @property
    def full(self) -> bool:
        """True once no more documents are wanted."""
        if self._max_blocks is not None and self.blocks >= self._max_blocks:
            return True
        # The last document of the finished shards is counted already, but some of its tokens may still be missing.
        return self._max_documents is not None and self.counts.documents >= self._max_documents and not self._resumes

    @property
    def tokens(self) -> int:
        """Tokens in the blocks so far."""
        return self.blocks * self._length

    @property
    def next(self) -> Position:
        """The position of the first document that may still be needed; `add` ignores those before it."""
        if self._resumes and not self.full:
            return self._document
        return Position(self._document.piece, self._document.number + 1)

    def add(self, document: Position, tokens: NDArray[Any], *, size: int, unknown: int = 0) -> None:
        """Append a document's tokens, int [n], including EOS; ignore a document that is in the finished shards already.

        Its text has `size` UTF-8 bytes, and `unknown` of its tokens are the tokenizer's unknown token.

        Raises:
            UserError: the source no longer has the document in which the last finished shard ends.
            EnvironmentFault: the disk is full, or the address cannot be reached.
        """
        if self.full or document < self.next:
            return
        skipped = 0
        if self._resumes:
            skipped, self._resumes = self._taken, False
            if document != self._document or len(tokens) < skipped:
                raise UserError(
                    f"{self._shelf.where('')}: the source's text has changed since its first shards were made. Delete it to have the corpus prepared again."
                )
        else:
            more = Counts(1, size, len(tokens), unknown, int(len(tokens) == 1))
            self.counts = Counts(*map(sum, zip(self.counts, more, strict=True)))
            self._document = document
        self._pending.append(tokens[skipped:])
        self._pending_tokens += len(tokens) - skipped
        if self._pending_tokens >= self._length:
            self._write(tokens)

    def _write(self, last: NDArray[Any]) -> None:
        """Write the whole blocks of the pending tokens; `last` has all tokens of the last document, EOS at its end.

        Earlier documents have less than a block pending, so the first block takes all of it and every cut is in the
        last document.
        """
        stream = np.concatenate(self._pending)
        blocks = len(stream) // self._length
        if self._max_blocks is not None:
            blocks = min(blocks, self._max_blocks - self.blocks)
        end = 0
        while blocks:
            handle = self._handle or self._begin_shard()
            now = min(blocks, self._shard_blocks - self._begun)
            begin, end = end, end + now * self._length
            content = stream[begin:end].astype(self._dtype).tobytes()
            with disk_faults(self._path):
                handle.write(content)
            self._digest.update(content)  # Hashed as it is written: the shard need not be read again.
            if self._shelf.address is not None:
                self._beside[SUMS] += block_sums(content, self._length * self._dtype.itemsize)
                ends = self._begun * self._length + np.flatnonzero(stream[begin:end] == last[-1])
                self._beside[ENDS] += ends.astype(NUMBER).tobytes()
            self._begun += now
            self.blocks += now
            blocks -= now
            # After the last block come `len(stream) - end` tokens, all of the last document.
            self._cut = (self._document, len(last) - (len(stream) - end), self.counts)
            if self._begun == self._shard_blocks or self.blocks == self._max_blocks:
                self._finish_shard()
        self._pending, self._pending_tokens = [stream[end:]], len(stream) - end

    def _begin_shard(self) -> BinaryIO:
        self._path = self._shelf.local / f"{self.part}-{len(self.records):05d}.bin"
        self._handle = handle = self._stack.enter_context(whole_file(self._path))
        self._begun, self._digest = 0, hashlib.sha256()
        self._beside = {SUMS: bytearray(), ENDS: bytearray()}
        return handle

    def _finish_shard(self) -> None:
        """Give the shard its name once its content is on the disk, and only then write its record.

        A record thus proves that its shard is whole, even after a crash.
        """
        self._stack.close()
        self._handle = None
        self._shelf.put(self._path.name)
        document, token, counts = self._cut
        shard = Shard(self._path.name, self._begun, self._digest.hexdigest())
        if self._shelf.address is not None:
            for suffix, numbers in self._beside.items():
                write_atomic(self._shelf.at(beside(shard.file, suffix)), sealed_numbers(bytes(numbers), shard.sha256))
        record = Record(shard, self._begun * self._length * self._dtype.itemsize, document, token, counts)
        self._shelf.write_json(record_file(self.part, len(self.records)), sealed(record.to_json()))
        self.records.append(record)
