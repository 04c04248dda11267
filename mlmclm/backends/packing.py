"""Sequence packing: sequences laid end to end, without padding in the compute, and attention within each sequence.

A batch is one row of tokens, [1, T], where T is the number of real tokens rounded up to a multiple of `ROUND_TOKENS`
(oneDNN generates code for every shape that it has not seen). Embeddings, projections and feed-forward layers see only
that row. Attention is computed per sequence (`Reference.packed_attention`); on the CPU, in blocks of sequences of
similar length.

`Packing` holds what a batch's shape determines. It is built once per batch, and `encode` runs a model over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from mlmclm.backends.transfer import to_device

ROUND_TOKENS = 64
ROUND_LENGTH = 16
"""A group's padded length is a multiple of this."""
ROUND_CHOSEN = 32
"""Groups of chosen queries are padded to a multiple of this, the number that a kernel with tiles processes at once."""
ROUND_SEQUENCES = 8
"""Groups hold a multiple of this many sequences (the last one what is left), so that shapes recur."""
COST_OF_A_GROUP = 16_000
"""Cost of one more group, in score elements (sequences x length^2). Measured with 2 heads of dimension 64: a group's
calls take about 0.1 ms in a layer's forward and backward pass, a score element 6 ns."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def cut_into_groups(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Cut sequences, given by lengths int64 [S] in falling order, into groups with the lowest total cost.

    The cost is that of padding and of each further group. A group is (first, last), `last` exclusive.
    """
    step = round_up(-(-len(lengths) // 16), ROUND_SEQUENCES)  # at most 16 places to cut, however many sequences
    places = [*range(0, len(lengths), step), len(lengths)]
    padded = [round_up(int(lengths[place]), ROUND_LENGTH) for place in places[:-1]]
    groups = _cheapest(len(places) - 1, range, lambda begin, end: (places[end] - places[begin]) * padded[begin] ** 2)
    return [(places[begin], places[end]) for begin, end in groups]


def cut_finely(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Cut a few sequences of very different lengths into groups of 1, 2, 4, ... sequences; see `cut_into_groups`.

    Other group sizes would make more shapes than oneDNN remembers.
    """
    padded = [round_up(int(length), ROUND_LENGTH) for length in lengths]
    return _cheapest(
        len(lengths),
        lambda end: [end - (1 << power) for power in range(end.bit_length())],
        lambda begin, end: (end - begin) * padded[begin] ** 2,
    )


def _cheapest(
    count: int, starts: Callable[[int], Iterable[int]], elements: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Cut a range into groups with the lowest total cost, by dynamic programming.

    Args:
        starts: where a group that ends at a given place may begin.
        elements: score elements of a group; its padded length is that of its first, longest sequence.
    """
    # For each place: the lowest cost of what lies before it, and the start of its last group.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, count + 1):
        best.append(min((best[begin][0] + elements(begin, end) + COST_OF_A_GROUP, begin) for begin in starts(end)))
    groups: list[tuple[int, int]] = []
    while count:
        groups.insert(0, (best[count][1], count))
        count = best[count][1]
    return groups


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length in one padded block of attention."""

    start: int
    """First slot of the block; a slot is one (sequence, position) of a block."""
    sequences: int
    length: int
    """Padded length of the sequences."""
    keys: Tensor
    """int64 [sequences], the real length of each."""


@dataclass(frozen=True)
class Packing:
    """Layout of a batch of concatenated sequences."""

    lengths: np.ndarray[Any, Any]
    """int64 [S], number of tokens in each sequence, at least 1."""
    starts: np.ndarray[Any, Any]
    """int64 [S], index of each sequence's first token in the row."""
    tokens: int
    """Number of real tokens."""
    padded_tokens: int
    """T, greater than `tokens` unless the packing is `uniform`."""
    device: torch.device
    """Device of the index tensors."""
    fine: bool = False
    """Cut groups with `cut_finely`, for lengths that differ widely, such as documents'."""
    _places: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        lengths: Sequence[int] | np.ndarray[Any, Any], device: torch.device | str = "cpu", *, fine: bool = False
    ) -> Packing:
        """Return the packing of sequences of these lengths, in this order.

        Raises:
            ValueError: there is no sequence, or an empty one.
        """
        array = np.asarray(lengths, dtype=np.int64)
        if array.ndim != 1 or len(array) == 0 or int(array.min()) < 1:
            raise ValueError("a packing needs at least one sequence, and at least one token in each")
        tokens = int(array.sum())
        return Packing(
            lengths=array,
            starts=np.cumsum(array) - array,
            tokens=tokens,
            # One padding token at least: the padded slots of attention's blocks read it.
            padded_tokens=round_up(tokens + 1, ROUND_TOKENS),
            device=torch.device(device),
            fine=fine,
        )

    @staticmethod
    @lru_cache(maxsize=8)
    def uniform(sequences: int, length: int, device: torch.device | str = "cpu") -> Packing:
        """Return the packing of sequences of equal length, as in pretraining; nothing is padded."""
        starts = np.arange(sequences, dtype=np.int64) * length
        lengths = np.full(sequences, length, dtype=np.int64)
        return Packing(lengths, starts, sequences * length, sequences * length, torch.device(device))

    @cached_property
    def sequence_of_token(self) -> Tensor:
        """int64 [tokens]: the sequence that each real token belongs to."""
        return to_device(torch.from_numpy(np.repeat(np.arange(len(self.lengths)), self.lengths)), self.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [1, T]: positions, which restart at 0 in each sequence; 0 at padding."""
        positions = np.zeros((1, self.padded_tokens), dtype=np.int64)
        positions[0, : self.tokens] = np.arange(self.tokens) - np.repeat(self.starts, self.lengths)
        return to_device(torch.from_numpy(positions), self.device)

    @cached_property
    def cumulative(self) -> Tensor:
        """int32 [S + 2]: cumulative lengths from 0; the padding counts as one more sequence at the end."""
        ends = np.concatenate(([0], self.starts + self.lengths, [self.padded_tokens]))
        return to_device(torch.from_numpy(ends.astype(np.int32)), self.device)

    @cached_property
    def longest(self) -> int:
        """Length of the longest of `cumulative`'s sequences."""
        return max(int(self.lengths.max()), self.padded_tokens - self.tokens)

    def settle(self) -> None:
        """Compute the cached properties that kernels read, because torch.compile cannot trace their computation."""
        _ = self.cumulative, self.longest

    @cached_property
    def last_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's last token."""
        return to_device(torch.from_numpy(self.starts + self.lengths - 1), self.device)

    @cached_property
    def first_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's first token."""
        return to_device(torch.from_numpy(self.starts), self.device)

    @cached_property
    def groups(self) -> list[PaddedGroup]:
        """Blocks of attention, longest sequences first."""
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[list[PaddedGroup], np.ndarray[Any, Any]]:
        """Groups; int64 [slots], the token of each slot (for padding, the first padding token)."""
        if self.padded_tokens == self.tokens:
            # A uniform packing is its own only block.
            only = PaddedGroup(0, len(self.lengths), int(self.lengths[0]), torch.from_numpy(self.lengths))
            return [only], np.arange(self.tokens)
        order = np.argsort(-self.lengths, kind="stable")
        groups: list[PaddedGroup] = []
        token_of_slot: list[np.ndarray[Any, Any]] = []
        start = 0
        for first, last in (cut_finely if self.fine else cut_into_groups)(self.lengths[order]):
            members = order[first:last]
            length = round_up(int(self.lengths[members[0]]), ROUND_LENGTH)
            position = np.arange(length)
            real = position < self.lengths[members, None]  # [members, length]
            block = np.where(real, self.starts[members, None] + position, self.tokens)
            token_of_slot.append(block.reshape(-1))
            groups.append(PaddedGroup(start, len(members), length, torch.from_numpy(self.lengths[members])))
            start += len(members) * length
        return groups, np.concatenate(token_of_slot)

    @property
    def slots(self) -> int:
        """Number of (sequence, position) slots in all blocks, padding included."""
        return sum(group.sequences * group.length for group in self.groups)

    @cached_property
    def slot_of_token(self) -> np.ndarray[Any, Any]:
        """int64 [tokens]: the slot of each real token."""
        token_of_slot = self._layout[1]
        slots = np.empty(self.tokens, dtype=np.int64)
        real = np.flatnonzero(token_of_slot < self.tokens)
        slots[token_of_slot[real]] = real
        return slots

    def places(self, heads: int) -> Tensor:
        """Return int64 [T, heads]: each vector's place among the blocks' vectors; -1 at padding.

        Blocks' vectors are ordered by sequence, head and position.
        """
        if heads not in self._places:
            groups, token_of_slot = self._layout
            token = np.empty(len(token_of_slot) * heads, dtype=np.int64)  # token * heads + head of each place
            for group in groups:
                size = group.sequences * group.length
                block = token_of_slot[group.start : group.start + size].reshape(group.sequences, 1, group.length)
                block = block * heads + np.arange(heads)[:, None]  # [sequences, heads, length]
                token[group.start * heads : (group.start + size) * heads] = block.reshape(-1)
            places = np.full(self.padded_tokens * heads, -1, dtype=np.int64)
            real = np.flatnonzero(token < self.tokens * heads)
            places[token[real]] = real
            self._places[heads] = torch.from_numpy(places.reshape(-1, heads))
        return self._places[heads]


@dataclass(frozen=True)
class Chosen:
    """Tokens of a packing whose attention output is needed. They attend to their whole sequence."""

    packing: Packing
    tokens: Tensor
    """int64 [number], in rising order, on the packing's device."""
    _places: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Number of chosen tokens."""
        return len(self.tokens)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [T']: the tokens, followed by token 0 until their number is a multiple of `ROUND_TOKENS`."""
        return functional.pad(self.tokens, (0, -len(self.tokens) % ROUND_TOKENS))

    @cached_property
    def _layout(self) -> tuple[list[PaddedGroup], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Groups, then three arrays, int64 [number] each: every token's group, the index of its sequence in that group, and
        its position among the sequence's chosen tokens.

        The groups are the packing's, with the chosen positions only.
        """
        tokens, packing = self.tokens.numpy(), self.packing
        slots = packing.slot_of_token[tokens]
        group = np.searchsorted([group.start for group in packing.groups], slots, side="right") - 1
        sequence = packing.sequence_of_token.numpy()[tokens]
        position = np.arange(len(tokens)) - np.searchsorted(sequence, sequence)  # tokens are sorted by sequence
        groups: list[PaddedGroup] = []
        member = np.empty_like(tokens)
        start = 0
        for index, block in enumerate(packing.groups):
            mine = np.flatnonzero(group == index)
            member[mine] = (slots[mine] - block.start) // block.length
            length = round_up(1 + int(position[mine].max(initial=0)), ROUND_CHOSEN)
            groups.append(PaddedGroup(start, block.sequences, length, block.keys))
            start += block.sequences * length
        return groups, group, member, position

    @cached_property
    def groups(self) -> list[PaddedGroup]:
        """Blocks of attention's queries, one for each of the packing's groups."""
        return self._layout[0]

    @property
    def slots(self) -> int:
        """Number of (sequence, position) slots in all blocks, padding included."""
        return sum(group.sequences * group.length for group in self.groups)

    def places(self, heads: int) -> Tensor:
        """Return int64 [T', heads]: each vector's place, as in `Packing.places`."""
        if heads not in self._places:
            groups, group, member, position = self._layout
            starts = np.array([g.start for g in groups])[group]
            lengths = np.array([g.length for g in groups])[group]
            places = np.full((len(self.rows), heads), -1, dtype=np.int64)
            block = member[:, None] * heads + np.arange(heads)  # [number, heads]
            places[: self.number] = (starts * heads + position)[:, None] + block * lengths[:, None]
            self._places[heads] = torch.from_numpy(places)
        return self._places[heads]
