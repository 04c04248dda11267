"""Rows that are chunks of one document each, between BOS and EOS, read from the blocks of a corpus.

A corpus is stored as one stream of tokens, in which each document ends with EOS. The same shards therefore give chunks
of any length, and nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.blocks import ENDS, Blocks, Shard
from mlmclm.corpora.row_lengths import row_lengths
from mlmclm.progress import bars
from mlmclm.storage.checksums import parse_sealed, sealed

Rows = Literal["joined", "chunks"]
"""Content of a row: the stream of all documents end to end, or a part of one document."""

FRAME = 2
"""Number of tokens around each chunk: BOS and EOS."""
REMEMBERED = 4096
"""Number of shards whose chunk positions a process remembers: 130 kB each, for chunks of 1,024 tokens in 64 MiB."""
TOGETHER = 64
"""Number of shards whose document ends are read in parallel to count chunks: some 10 MB."""


class ChunkTable(NamedTuple):
    """Index of the chunks: their number, which shuffling needs, and how to find them."""

    rows: tuple[int, ...]
    """Chunks that begin in each shard."""
    offsets: tuple[int, ...]
    """By shard: number of tokens, in earlier shards, of the chunk that continues at its beginning; 0 if none does."""
    tokens: int
    """Tokens of all chunks, with BOS and EOS."""


def chunk_starts(ends: NDArray[np.int64], size: int, room: int, offset: int) -> tuple[NDArray[np.int64], int]:
    """Return where the chunks of a shard start.

    Args:
        ends: positions of EOS in the shard, int64 [documents].
        size: tokens of the shard.
        room: number of document tokens that fit into a chunk.
        offset: number of tokens, in earlier shards, of the chunk that continues at the shard's beginning; 0 if none does.

    Returns:
        Positions in the shard, int64 [chunks], and the `offset` of the next shard.
    """
    begins = np.concatenate(([-offset], ends + 1))
    counts = -(-(np.append(ends, size) - begins) // room)  # a document without tokens has no chunk
    first = np.cumsum(counts) - counts
    starts = np.repeat(begins, counts) + room * (np.arange(counts.sum()) - np.repeat(first, counts))
    return starts[starts >= 0], int(size - begins[-1]) % room


class Chunks:
    """The chunks of a part's documents, as one array [n, length], with the interface of `Blocks`.

    A document is cut every `length - 2` tokens. A row is BOS, the tokens and EOS, filled up with EOS: everything
    after its first EOS is filling. Chunks don't depend on how the corpus is divided into shards. Picklable, like `Blocks`.
    """

    def __init__(self, blocks: Blocks, length: int, table: ChunkTable, start: int, end: int) -> None:
        """Describe the chunks of a part with this `chunk_table`; `start` and `end` are the ids of BOS and EOS. Opens nothing yet."""
        self.blocks, self.block_length, self.table, self.start, self.end = blocks, length, table, start, end
        self._ends = list(accumulate(table.rows))
        self._starts: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __reduce__(self) -> tuple[type[Chunks], tuple[Blocks, int, ChunkTable, int, int]]:
        """Pickle the description, not the data."""
        return Chunks, (self.blocks, self.block_length, self.table, self.start, self.end)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that chunks are read from."""
        return self.blocks.shards

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the chunks `rows` (int64 [n]) as int64 [n, length]; raises what `Blocks.take` does."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows must be in [0, {len(self)}), got {rows.min()} to {rows.max()}")
        taken = np.full((len(rows), self.block_length), self.end, dtype=np.int64)
        taken[:, 0] = self.start
        shards = np.searchsorted(self._ends, rows, side="right").tolist()
        self.blocks.bring(ENDS, set(shards) - self._starts.keys())
        # `row - self._ends[shard]` is negative: it counts back from the shard's last chunk.
        chunks = [
            list(self._parts(shard, row - self._ends[shard])) for shard, row in zip(shards, rows.tolist(), strict=True)
        ]
        read = iter(self.blocks.parts([part for parts in chunks for part in parts]))
        for index, parts in enumerate(chunks):
            tokens = np.concatenate(list(islice(read, len(parts))))
            ends = np.flatnonzero(tokens == self.end)
            tokens = tokens[: ends[0]] if len(ends) else tokens
            taken[index, 1 : 1 + len(tokens)] = tokens
        return taken

    def _parts(self, shard: int, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of shards in which a chunk lies, as `Blocks.parts` reads them, up to the next chunk's start.

        The chunk is number `row` of those that begin in the shard, and may go on in the next ones.
        """
        first, *following = self._starts_in(shard)[row:][:2].tolist()
        left = self.block_length - FRAME
        while True:
            size = self.blocks.tokens_in(shard)
            end = min(first + left, *following, size)
            yield shard, first, end
            left -= end - first
            shard += 1
            if end < size or shard == len(self.shards) or not self.table.offsets[shard]:
                return
            first, following = 0, self._starts_in(shard)[:1].tolist()

    def _starts_in(self, shard: int) -> NDArray[np.int32]:
        cached = self._starts.get(shard)
        if cached is None:
            if len(self._starts) >= REMEMBERED:
                del self._starts[next(iter(self._starts))]  # the one found first
            ends, size = self.blocks.ends(shard, self.end), self.blocks.tokens_in(shard)
            starts, _ = chunk_starts(ends, size, self.block_length - FRAME, self.table.offsets[shard])
            cached = self._starts[shard] = starts.astype(np.int32)
        return cached


def chunk_table(blocks: Blocks, length: int, end: int) -> ChunkTable:
    """Count the chunks of a corpus part, or read an earlier count from the file beside the shards."""
    file = f"chunks-{Path(blocks.shards[0].file).stem}-{length}.json"
    content = blocks.shelf.read(file)
    if content is not None:
        where = blocks.shelf.where(file)
        value = parse_sealed(content, where, f"Delete {where}: it will be made again.")
        return ChunkTable(tuple(value["rows"]), tuple(value["offsets"]), value["tokens"])
    rows, offsets, tokens, offset = list[int](), list[int](), 0, 0
    with bars() as report:
        for number in range(len(blocks.shards)):
            if number % TOGETHER == 0:
                blocks.bring(ENDS, range(number, min(number + TOGETHER, len(blocks.shards))))
            ends, size = blocks.ends(number, end), blocks.tokens_in(number)
            offsets.append(offset)
            starts, offset = chunk_starts(ends, size, length - FRAME, offset)
            rows.append(len(starts))
            tokens += size - len(ends) + FRAME * len(starts)
            report("counting chunks of documents", number + 1, len(blocks.shards), "shards")
    table = ChunkTable(tuple(rows), tuple(offsets), tokens)
    blocks.shelf.write_json(file, sealed(table._asdict()))
    return table


def without_filling(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], end: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens and labels of chunks, int64 [n, length] each, as one row without filling: [1, tokens] each."""
    real = np.arange(tokens.shape[1]) < row_lengths(tokens, end)[:, None]
    return tokens[real][None], labels[real][None]
