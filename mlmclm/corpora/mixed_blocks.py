"""The blocks of several sources, numbered consecutively."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.chunks import Chunks, Rows, chunk_table
from mlmclm.corpora.mixes import Mix, turns_of
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.errors import UserError


class MixedBlocks:
    """Blocks or chunks of several sources, of one length, in the order of the sources' names: [n, block_length]."""

    def __init__(self, sources: Mapping[str, Blocks | Chunks]) -> None:
        self.sources = dict(sorted(sources.items()))
        ends = list(accumulate(map(len, self.sources.values())))
        self.first = dict(zip(self.sources, [0, *ends], strict=False))
        """Number of each source's first block."""
        self._ends = np.array(ends, dtype=np.int64)
        self.block_length = next(iter(self.sources.values())).block_length

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of all sources."""
        return tuple(shard for blocks in self.sources.values() for shard in blocks.shards)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the blocks `rows` (int64 [n]) as int64 [n, block_length]; raises what `Blocks.take` does."""
        taken = np.empty((len(rows), self.block_length), dtype=np.int64)
        numbers = np.searchsorted(self._ends, rows, side="right")  # [n]
        for number, (name, blocks) in enumerate(self.sources.items()):
            mask = numbers == number
            if mask.any():
                taken[mask] = blocks.take(rows[mask] - self.first[name])
        return taken


@dataclass(frozen=True)
class InTurns:
    """The blocks of a mix's sources in the mix's turns, each source from its first block on; for validation.

    A source that has too few blocks for its share begins again.
    """

    blocks: MixedBlocks
    mix: Mix

    def __len__(self) -> int:
        return sum(len(self.blocks.sources[name]) for name, _ in self.mix)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the blocks with the turns `rows` (int64 [n]) as int64 [n, block_length]."""
        sources, numbers = turns_of(self.mix).at(rows)
        names = [name for name, _ in self.mix]
        sizes = np.array([len(self.blocks.sources[name]) for name in names], dtype=np.int64)
        first = np.array([self.blocks.first[name] for name in names], dtype=np.int64)
        return self.blocks.take(first[sources] + numbers % sizes[sources])


def is_elsewhere(blocks: Blocks | Chunks | MixedBlocks) -> bool:
    """Return whether blocks are at an address, so that reading them can take long."""
    return any(part.shelf.address is not None for part in stored(blocks))


def stored(blocks: Blocks | Chunks | MixedBlocks | InTurns) -> list[Blocks]:
    """Return the stored blocks from which these are read."""
    if isinstance(blocks, Blocks):
        return [blocks]
    parts = blocks.sources.values() if isinstance(blocks, MixedBlocks) else [blocks.blocks]
    return [leaf for part in parts for leaf in stored(part)]


def in_turns(blocks: Blocks | Chunks | MixedBlocks, mix: Mix | None) -> Blocks | Chunks | InTurns:
    """Return the blocks of a single corpus as they are, or those of a mix's sources in the mix's turns."""
    if mix is None:
        return cast("Blocks | Chunks", blocks)  # The study file gives a mix wherever there are several sources.
    assert isinstance(blocks, MixedBlocks)
    return InTurns(blocks, mix)


def rows_of_length(
    blocks: Blocks | Chunks | MixedBlocks, length: int, rows: Rows, tokenizer: Path, mix: Mix | None = None
) -> Blocks | Chunks | MixedBlocks:
    """Return the rows that a stage trains on.

    Args:
        length: tokens of a row.
        tokenizer: folder of the corpus's prepared tokenizer.
        mix: the mix of the stage. Chunks are counted only in the mix's sources, since counting reads a whole source.

    Raises:
        UserError: rows are chunks, and the tokenizer's BOS is also its EOS.
    """
    if isinstance(blocks, MixedBlocks):
        names = list(blocks.sources) if mix is None or rows == "joined" else [name for name, _ in mix]
        sources = {name: rows_of_length(blocks.sources[name], length, rows, tokenizer) for name in names}
        return MixedBlocks(cast("dict[str, Blocks | Chunks]", sources))
    assert isinstance(blocks, Blocks), "a corpus stores blocks"
    if rows == "joined":
        return blocks.at_length(length)
    ids = special_ids(tokenizer)
    if ids["bos"] == ids["eos"]:
        raise UserError(
            f"recipe.rows: chunks: a chunk lies between BOS and EOS, and the tokenizer in {tokenizer} has one token for both (id {ids['eos']}). "
            "Use a tokenizer with two, or rows: joined."
        )
    return Chunks(blocks, length, chunk_table(blocks, length, ids["eos"]), ids["bos"], ids["eos"])
