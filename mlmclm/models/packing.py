"""Sequences laid end to end: no padding in the compute, attention within each sequence.

A batch is one row of tokens, [1, T], where T is the number of real tokens rounded up to a multiple of `ROUND_TOKENS`
(oneDNN builds code for every shape that it has not seen). Embeddings, projections and feed-forward layers see only that
row. Attention is per sequence: on a GPU torch's variable-length kernel; on the CPU the sequences, sorted by length and
cut into groups of similar length, are gathered into [sequences, heads, length, width] for two batched products, and
scattered back. Either may be local, within a window.

`Packing` holds what a batch's shape determines and is built once a batch; `encode` runs a model over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlmclm.models import kernels

ROUND_TOKENS = 64
ROUND_LENGTH = 16
ROUND_SEQUENCES = 8
"""Groups hold a multiple of this many sequences (the last one what is left), so that shapes recur."""
COST_OF_A_GROUP = 16_000
"""What another group costs, in score elements (sequences x length^2): measured with 2 heads of width 64, where a
group's calls take about 0.1 ms in a layer's forward and backward, and a score element 6 ns."""
TILE = 128
"""Queries of causal attention that are worked on together."""
SCORES_AT_ONCE = 1 << 21
"""Elements of a score matrix that are worked on at once, so that they stay in a core's cache from one product to the next
(measured with 64 heads of width 64 over 512 positions, bf16: 43 ms forward and backward, against 73 ms all at once)."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def cut_into_groups(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """(first, last) of the groups of sequences of falling lengths, so that padding and the number of groups cost least.

    Args:
        lengths: int [S], falling.
    """
    step = round_up(-(-len(lengths) // 16), ROUND_SEQUENCES)  # at most 16 places to cut, however many sequences
    places = [*range(0, len(lengths), step), len(lengths)]
    padded = [round_up(int(lengths[place]), ROUND_LENGTH) for place in places[:-1]]
    best: list[tuple[int, int]] = [(0, 0)]  # of the sequences before each place: cost, where the last group begins
    for end in range(1, len(places)):
        costs = [
            (best[begin][0] + (places[end] - places[begin]) * padded[begin] ** 2 + COST_OF_A_GROUP, begin)
            for begin in range(end)
        ]
        best.append(min(costs))
    groups: list[tuple[int, int]] = []
    end = len(places) - 1
    while end:
        begin = best[end][1]
        groups.insert(0, (places[begin], places[end]))
        end = begin
    return groups


def cut_finely(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """`cut_into_groups` with groups of 1, 2, 4, ... sequences, for a few sequences of very different lengths.

    Other numbers would make for more shapes than oneDNN remembers.
    """
    padded = [round_up(int(length), ROUND_LENGTH) for length in lengths]
    best: list[tuple[int, int]] = [(0, 0)]  # of the sequences before each: cost, where the last group begins
    for end in range(1, len(lengths) + 1):
        sizes = [1 << power for power in range(end.bit_length())]
        best.append(
            min((best[end - size][0] + size * padded[end - size] ** 2 + COST_OF_A_GROUP, end - size) for size in sizes)
        )
    groups: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        begin = best[end][1]
        groups.insert(0, (begin, end))
        end = begin
    return groups


@dataclass(frozen=True)
class Group:
    """Sequences of similar length in one padded block of attention."""

    start: int
    """First slot of the block; a slot is one (sequence, position) of a block."""
    sequences: int
    length: int
    keys: Tensor
    """int64 [sequences], the real length of each."""


@dataclass(frozen=True)
class Packing:
    """Where each sequence of a concatenated batch lies.

    Attributes:
        lengths: int64 [S], tokens of each sequence, each at least 1.
        starts: int64 [S], index of each sequence's first token in the row.
        tokens: number of real tokens.
        padded_tokens: T, greater than `tokens` unless the packing is `uniform`.
        device: where the index tensors are.
        fine: groups are cut by `cut_finely`.
    """

    lengths: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    tokens: int
    padded_tokens: int
    device: torch.device
    fine: bool = False
    _places: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        lengths: Sequence[int] | np.ndarray[Any, Any], device: torch.device | str = "cpu", *, fine: bool = False
    ) -> Packing:
        """The packing of sequences of these lengths, in this order.

        Args:
            fine: for lengths that differ widely, such as documents'.

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
            padded_tokens=round_up(tokens + 1, ROUND_TOKENS),
            device=torch.device(device),
            fine=fine,
        )

    @staticmethod
    @lru_cache(maxsize=8)
    def uniform(sequences: int, length: int, device: torch.device | str = "cpu") -> Packing:
        """The packing of sequences of one length, such as pretraining's; nothing is padded."""
        starts = np.arange(sequences, dtype=np.int64) * length
        lengths = np.full(sequences, length, dtype=np.int64)
        return Packing(lengths, starts, sequences * length, sequences * length, torch.device(device))

    @cached_property
    def sequence_of_token(self) -> Tensor:
        """int64 [tokens]: the sequence that each real token belongs to."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths)), self.lengths)).to(self.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [1, T]: restarts at 0 at each sequence; 0 at padding."""
        positions = np.zeros((1, self.padded_tokens), dtype=np.int64)
        positions[0, : self.tokens] = np.arange(self.tokens) - np.repeat(self.starts, self.lengths)
        return torch.from_numpy(positions).to(self.device)

    @cached_property
    def cumulative(self) -> Tensor:
        """int32 [S + 2]: cumulative lengths from 0, the padding as one more sequence at the end."""
        ends = np.concatenate(([0], self.starts + self.lengths, [self.padded_tokens]))
        return torch.from_numpy(ends.astype(np.int32)).to(self.device)

    @cached_property
    def longest(self) -> int:
        """The largest length of `cumulative`'s sequences."""
        return max(int(self.lengths.max()), self.padded_tokens - self.tokens)

    @cached_property
    def last_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's last token."""
        return torch.from_numpy(self.starts + self.lengths - 1).to(self.device)

    @cached_property
    def first_tokens(self) -> Tensor:
        """int64 [S]: index of each sequence's first token."""
        return torch.from_numpy(self.starts).to(self.device)

    @cached_property
    def groups(self) -> list[Group]:
        """The blocks of attention, longest sequences first."""
        return self._layout[0]

    @cached_property
    def _layout(self) -> tuple[list[Group], np.ndarray[Any, Any]]:
        """Groups; int64 [slots], the token of each slot (padding: the first padding token)."""
        if self.padded_tokens == self.tokens:
            whole = Group(0, len(self.lengths), int(self.lengths[0]), torch.from_numpy(self.lengths))
            return [whole], np.arange(self.tokens)
        order = np.argsort(-self.lengths, kind="stable")
        groups: list[Group] = []
        token_of_slot: list[np.ndarray[Any, Any]] = []
        start = 0
        for first, last in (cut_finely if self.fine else cut_into_groups)(self.lengths[order]):
            members = order[first:last]
            length = round_up(int(self.lengths[members[0]]), ROUND_LENGTH)
            position = np.arange(length)
            real = position < self.lengths[members, None]  # [members, length]
            block = np.where(real, self.starts[members, None] + position, self.tokens)
            token_of_slot.append(block.reshape(-1))
            groups.append(Group(start, len(members), length, torch.from_numpy(self.lengths[members])))
            start += len(members) * length
        return groups, np.concatenate(token_of_slot)

    @property
    def slots(self) -> int:
        """Number of (sequence, position) places in all blocks, padding included."""
        return sum(group.sequences * group.length for group in self.groups)

    def places(self, heads: int) -> Tensor:
        """int64 [T, heads]: for each vector of the row its place among the blocks' vectors (laid out sequence, head,
        position); -1 at padding."""
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


class Heads(NamedTuple):
    """Some of the heads of a row of vectors."""

    rows: Tensor
    """[T, all heads, width], contiguous."""
    first: int
    number: int


def near(length: int, causal: bool, window: int, device: torch.device) -> Tensor:
    """bool [length, length], True where a query (row) sees a key: at a distance below `window`, and if causal not later."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance < window) & (distance >= 0) if causal else distance.abs() < window


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Attention within each sequence of a packed row.

    Args:
        query: [1, heads, T, width]; key and value [1, key-value heads, T, width].
        window: positions at this distance or more are hidden.

    Returns:
        [1, T, heads, width]; what stands at padding is unspecified but finite, and must not enter a loss.
    """
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    # [T, heads, width]; transformers' projections have this order in memory, so that no copy is made here
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if query.device.type == "cuda":
        return _on_gpu(query, key, value, packing, causal, scale, dropout, window).unsqueeze(0)
    with torch.autocast(query.device.type, enabled=False):
        apply: Any = _BlockAttention.apply
        output: Tensor = apply(query, key, value, packing, causal, scale, dropout, window)
    return output.unsqueeze(0)


class _BlockAttention(torch.autograd.Function):
    """`attend` and `attend_backward` as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
        causal: bool,
        scale: float,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        q, k, v = (Heads(rows.contiguous(), 0, rows.shape[1]) for rows in (query, key, value))
        output, kept = attend(q, k, v, packing, causal, scale, dropout, window=window)
        ctx.save_for_backward(*kept.tensors)
        ctx.settings = (packing, scale, kept.without_tensors())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packing, scale, kept = ctx.settings
        grads = [Heads(grad.new_empty(len(grad), count, kept.width), 0, count) for count in kept.counts]
        kept = kept.with_tensors(ctx.saved_tensors)
        attend_backward(grad.contiguous(), packing, scale, kept, *grads)
        return (*(heads.rows for heads in grads), None, None, None, None, None)


@dataclass(frozen=True)
class Tile:
    """Positions of a group whose queries are worked on together, and the keys that they see."""

    start: int
    stop: int
    keys: int
    """The first so many keys."""


@dataclass(frozen=True)
class Kept:
    """What `attend` keeps for its backward."""

    counts: tuple[int, int, int]
    """Heads of query, key and value."""
    width: int
    causal: bool
    turn: tuple[Tensor, Tensor] | None
    tensors: tuple[Tensor, ...]
    """scale * q, k, v in blocks; softmax weights of each tile; dropout masks of each tile, if any."""

    def without_tensors(self) -> Kept:
        """The same without tensors, which autograd wants to hold itself."""
        return replace(self, tensors=())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Kept:
        """The inverse of `without_tensors`."""
        return replace(self, tensors=tuple(tensors))


def attend(
    query: Heads,
    key: Heads,
    value: Heads,
    packing: Packing,
    causal: bool,
    scale: float,
    dropout: float,
    turn: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> tuple[Tensor, Kept]:
    """softmax(scale q k') v within each sequence, by products of one padded block a group; no autograd by itself.

    Args:
        query, key, value: vectors of the type that is computed in.
        turn: cosines and sines, [T, width / 2] each, of the rotary embedding of queries and keys; None where they have theirs.
        window: positions at this distance or more are hidden.

    Returns:
        [T, heads, width], 0 at padding; and what the backward needs.
    """
    heads, key_heads, width = query.number, key.number, query.rows.shape[2]
    places, key_places, slots = packing.places(heads), packing.places(key_heads), packing.slots
    q = kernels.to_blocks(query.rows, query.first, places, slots * heads, scale, turn)
    k = kernels.to_blocks(key.rows, key.first, key_places, slots * key_heads, 1.0, turn)
    v = kernels.to_blocks(value.rows, value.first, key_places, slots * key_heads, 1.0, None)
    attended = torch.empty_like(q)
    weights: list[Tensor] = []
    masks: list[Tensor] = []
    for group in packing.groups:
        qs, ks, vs = _blocks(group, heads, key_heads, width, q, k, v)
        out = attended[group.start * heads : (group.start + group.sequences * group.length) * heads].view(qs.shape)
        keys = group.keys.repeat_interleave(key_heads)  # [sequences * key heads]
        for tile in _tiles(group, heads // key_heads, causal):
            rows, seen = slice(tile.start, tile.stop), slice(tile.keys)
            weight = qs.new_empty(len(qs), tile.stop - tile.start, tile.keys)
            mask = torch.empty_like(weight).bernoulli_(1.0 - dropout).div_(1.0 - dropout) if dropout else None
            for part in _parts(weight):
                torch.bmm(qs[part, rows], ks[part, seen].transpose(1, 2), out=weight[part])
                kernels.softmax(weight[part], keys[part], group.length, tile.start, causal, window)
                used = weight[part] if mask is None else weight[part] * mask[part]
                _product(used, vs[part, seen], out[part, rows])
            weights.append(weight)
            if mask is not None:
                masks.append(mask)
    output = q.new_empty(len(query.rows), heads, width)
    kernels.from_blocks(attended, output, 0, places, 1.0, None)
    counts = (heads, key_heads, key_heads)
    return output, Kept(counts, width, causal, turn, (q, k, v, *weights, *masks))


def attend_backward(
    grad: Tensor, packing: Packing, scale: float, kept: Kept, query: Heads, key: Heads, value: Heads
) -> None:
    """Writes the gradients of `attend`'s input into `query`, `key` and `value`, given that of its output.

    The output at padding is a constant, so whatever `grad` [T, heads, width] says about it moves nothing.
    """
    (heads, key_heads, _), width = kept.counts, kept.width
    q, k, v, *rest = kept.tensors
    tiles = [(group, tile) for group in packing.groups for tile in _tiles(group, heads // key_heads, kept.causal)]
    weights, masks = rest[: len(tiles)], rest[len(tiles) :]
    places, key_places = packing.places(heads), packing.places(key_heads)
    upstream = kernels.to_blocks(grad, 0, places, len(q), 1.0, None)
    grad_q = torch.empty_like(q)
    # A tile's share of these is added to those before it, in fp32.
    sums = torch.promote_types(k.dtype, torch.float32) if len(tiles) > len(packing.groups) else k.dtype
    grad_k, grad_v = torch.empty_like(k, dtype=sums), torch.empty_like(v, dtype=sums)
    for index, (group, tile) in enumerate(tiles):
        qs, ks, vs = _blocks(group, heads, key_heads, width, q, k, v)
        gq, gk, gv = _blocks(group, heads, key_heads, width, grad_q, grad_k, grad_v)
        up = upstream[group.start * heads : (group.start + group.sequences * group.length) * heads].view(qs.shape)
        rows, seen = slice(tile.start, tile.stop), slice(tile.keys)
        weight = weights[index]
        for part in _parts(weight):
            used = weight[part]
            grad_weight = torch.bmm(up[part, rows], vs[part, seen].transpose(1, 2))
            if masks:
                used = used * masks[index][part]
                grad_weight.mul_(masks[index][part])
            _gather_up(gv[part], torch.bmm(used.transpose(1, 2), up[part, rows]), tile)
            kernels.softmax_backward(grad_weight, weight[part])
            _product(grad_weight, ks[part, seen], gq[part, rows])
            _gather_up(gk[part], torch.bmm(grad_weight.transpose(1, 2), qs[part, rows]), tile)
    kernels.from_blocks(grad_q, query.rows, query.first, places, scale, kept.turn)
    kernels.from_blocks(grad_k, key.rows, key.first, key_places, 1.0, kept.turn)
    kernels.from_blocks(grad_v, value.rows, value.first, key_places, 1.0, None)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Batched product into `out`, which may be a part of a tensor."""
    if out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def _gather_up(sums: Tensor, part: Tensor, tile: Tile) -> None:
    """Adds a tile's share of the gradients of the keys it sees to `sums`; the first tile of a group comes before the others."""
    before = tile.start
    sums[:, before : tile.keys] = part[:, before:]
    if before:
        sums[:, :before] += part[:, :before]


def _blocks(
    group: Group, heads: int, key_heads: int, width: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A group's views: q [sequences * key heads, repeat * length, width]; k, v [sequences * key heads, length, width].

    The query heads that share a key head follow one another, so their positions form one longer matrix.
    """
    end = group.start + group.sequences * group.length
    batch, repeat = group.sequences * key_heads, heads // key_heads
    return (
        q[group.start * heads : end * heads].view(batch, repeat * group.length, width),
        k[group.start * key_heads : end * key_heads].view(batch, group.length, width),
        v[group.start * key_heads : end * key_heads].view(batch, group.length, width),
    )


def _parts(weights: Tensor) -> list[slice]:
    """Slices of the first dimension of a group's weights, each of at most `SCORES_AT_ONCE` elements (or one row)."""
    rows = len(weights)
    step = max(1, SCORES_AT_ONCE // (weights.shape[1] * weights.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _tiles(group: Group, repeat: int, causal: bool) -> list[Tile]:
    """A group's queries, together, or by position where causal ones don't need the keys after them."""
    if not causal or repeat > 1 or group.length < 2 * TILE:
        return [Tile(0, repeat * group.length, group.length)]
    return [
        Tile(start, min(start + TILE, group.length), min(start + TILE, group.length))
        for start in range(0, group.length, TILE)
    ]


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """[T, heads, width] by the variable-length kernel; in fp32, or with dropout, by torch's padded attention."""
    grouped = query.shape[1] != key.shape[1]
    if query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        from torch.nn.attention.varlen import varlen_attn

        reach = -1 if window is None else window - 1  # the kernel's windows include their ends; -1 is no end
        ends, longest = packing.cumulative, packing.longest
        attended: Tensor = varlen_attn(  # type: ignore[assignment]
            query.contiguous(), key.contiguous(), value.contiguous(), ends, ends, longest, longest,
            scale=scale, window_size=(reach, 0 if causal else reach), enable_gqa=grouped,
        )  # fmt: skip
        return attended
    longest = int(packing.lengths.max())
    position = torch.arange(longest, device=query.device)
    lengths = torch.from_numpy(packing.lengths).to(query.device)
    real = position < lengths[:, None]  # [S, longest]
    index = torch.where(real, packing.first_tokens[:, None] + position, packing.tokens)
    q, k, v = (tensor[index].transpose(1, 2) for tensor in (query, key, value))  # [S, heads, longest, width]
    mask = real[:, None, None, :]
    if causal or window is not None:
        seen = near(longest, causal, longest if window is None else window, query.device)
        # Padding sees itself, so that every row of the softmax has a term.
        mask = (mask & seen) | torch.eye(longest, dtype=torch.bool, device=query.device)
    attended = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return query.new_zeros(query.shape).index_put((index[real],), attended.transpose(1, 2)[real])
