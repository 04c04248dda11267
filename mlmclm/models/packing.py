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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

ROUND_TOKENS = 64
ROUND_LENGTH = 16
ROUND_SEQUENCES = 8
"""Groups hold a multiple of this many sequences (the last one what is left), so that shapes recur."""
COST_OF_A_GROUP = 16_000
"""What another group costs, in score elements (sequences x length^2): measured with 2 heads of width 64, where a
group's calls take about 0.1 ms in a layer's forward and backward, and a score element 6 ns."""
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
    bias: Tensor | None
    """[sequences, 1, length], 0 at real keys and -inf at padding; None where nothing is padded."""


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
    _rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

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
            return [Group(0, len(self.lengths), int(self.lengths[0]), None)], np.arange(self.tokens)
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
            bias = None
            if not real.all():
                bias = torch.zeros(real.shape).masked_fill_(torch.from_numpy(~real), float("-inf"))
                bias = bias.unsqueeze(1).to(self.device)
            groups.append(Group(start, len(members), length, bias))
            start += len(members) * length
        return groups, np.concatenate(token_of_slot)

    def rows(self, heads: int) -> tuple[Tensor, Tensor]:
        """Indices between the row's [T * heads] (token, head) vectors and the blocks' [slots * heads] vectors.

        Returns:
            int64 [slots * heads], for each block vector (laid out sequence, head, position) its row vector; int64
            [tokens * heads], for each real row vector its block vector.
        """
        if heads not in self._rows:
            groups, token_of_slot = self._layout
            gather = np.empty(len(token_of_slot) * heads, dtype=np.int64)
            for group in groups:
                size = group.sequences * group.length
                block = token_of_slot[group.start : group.start + size].reshape(group.sequences, 1, group.length)
                block = block * heads + np.arange(heads)[:, None]  # [sequences, heads, length]
                gather[group.start * heads : (group.start + size) * heads] = block.reshape(-1)
            scatter = np.empty(self.tokens * heads, dtype=np.int64)
            real = gather < self.tokens * heads
            scatter[gather[real]] = np.flatnonzero(real)
            self._rows[heads] = (torch.from_numpy(gather), torch.from_numpy(scatter))
        return self._rows[heads]


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
        output, kept = attend(query, key, value, packing, causal, scale, dropout, window)
        ctx.save_for_backward(*kept.tensors)
        ctx.settings = (packing, scale, kept.without_tensors())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packing, scale, kept = ctx.settings
        gradients = attend_backward(grad, packing, scale, kept.with_tensors(ctx.saved_tensors))
        return (*gradients, None, None, None, None, None)


@dataclass(frozen=True)
class Kept:
    """What `attend` keeps for its backward."""

    heads: int
    key_heads: int
    width: int
    tensors: tuple[Tensor, ...]
    """scale * q, k, v in blocks; softmax weights of each group; dropout masks of each group, if any."""

    def without_tensors(self) -> Kept:
        """The same without tensors, which autograd wants to hold itself."""
        return replace(self, tensors=())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Kept:
        """The inverse of `without_tensors`."""
        return replace(self, tensors=tuple(tensors))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scale: float,
    dropout: float,
    window: int | None = None,
) -> tuple[Tensor, Kept]:
    """softmax(scale q k') v within each sequence, by products of one padded block a group; no autograd by itself.

    Padding slots all hold the first padding token, whose gradient is dropped; no real query sees them, since their keys
    are masked (or, when causal, lie after every real position).

    Args:
        query: [T, heads, width]; key and value [T, key heads, width]; all of the type that is computed in.
        window: positions at this distance or more are hidden.

    Returns:
        [T, heads, width], 0 at padding; and what the backward needs.
    """
    tokens, heads, width = query.shape
    key_heads = key.shape[1]
    gather, scatter = packing.rows(heads)
    key_gather = packing.rows(key_heads)[0]
    q = query.reshape(tokens * heads, width).index_select(0, gather).mul_(scale)
    k = key.reshape(tokens * key_heads, width).index_select(0, key_gather)
    v = value.reshape(tokens * key_heads, width).index_select(0, key_gather)
    attended = torch.empty_like(q)
    weights: list[Tensor] = []
    masks: list[Tensor] = []
    for group in packing.groups:
        qs, ks, vs = _blocks(group, heads, key_heads, width, q, k, v)
        out = attended[group.start * heads : (group.start + group.sequences * group.length) * heads].view(qs.shape)
        weight = qs.new_empty(*qs.shape[:2], group.length)  # [sequences * key heads, repeat * length, length]
        mask = torch.empty_like(weight).bernoulli_(1.0 - dropout).div_(1.0 - dropout) if dropout else None
        for part in _parts(weight):
            scores = torch.bmm(qs[part], ks[part].transpose(1, 2))
            _hide(scores, group, part, key_heads, causal, window)
            torch.softmax(scores, dim=-1, out=weight[part])
            torch.bmm(weight[part] if mask is None else weight[part] * mask[part], vs[part], out=out[part])
        weights.append(weight)
        if mask is not None:
            masks.append(mask)
    output = query.new_zeros(tokens * heads, width)
    torch.index_select(attended, 0, scatter, out=output[: len(scatter)])
    return output.view(tokens, heads, width), Kept(heads, key_heads, width, (q, k, v, *weights, *masks))


def attend_backward(grad: Tensor, packing: Packing, scale: float, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` with respect to query, key and value, given that of its output [T, heads, width]."""
    heads, key_heads, width = kept.heads, kept.key_heads, kept.width
    q, k, v, *rest = kept.tensors
    weights, masks = rest[: len(packing.groups)], rest[len(packing.groups) :]
    gather, scatter = packing.rows(heads)
    key_scatter = packing.rows(key_heads)[1]
    tokens = len(grad)
    rows = grad.reshape(tokens * heads, width)
    if bool(rows[len(scatter) :].any()):
        # The output at padding is a constant, so whatever is said about it moves nothing.
        rows = rows.clone()
        rows[len(scatter) :] = 0
    upstream = rows.index_select(0, gather)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for index, group in enumerate(packing.groups):
        qs, ks, vs = _blocks(group, heads, key_heads, width, q, k, v)
        gq, gk, gv = _blocks(group, heads, key_heads, width, grad_q, grad_k, grad_v)
        up = upstream[group.start * heads : (group.start + group.sequences * group.length) * heads].view(qs.shape)
        weight = weights[index]
        for part in _parts(weight):
            used = weight[part]
            grad_weight = torch.bmm(up[part], vs[part].transpose(1, 2))
            if masks:
                used = used * masks[index][part]
                grad_weight.mul_(masks[index][part])
            torch.bmm(used.transpose(1, 2), up[part], out=gv[part])
            grad_scores = torch._softmax_backward_data(grad_weight, weight[part], -1, weight.dtype)
            torch.bmm(grad_scores, ks[part], out=gq[part])
            torch.bmm(grad_scores.transpose(1, 2), qs[part], out=gk[part])

    def back(grads: Tensor, index: Tensor, count: int) -> Tensor:
        """Block vectors back to the row; padding gets no gradient."""
        row = grads.new_zeros(tokens * count, width)
        torch.index_select(grads, 0, index, out=row[: len(index)])
        return row.view(tokens, count, width)

    return (
        back(grad_q.mul_(scale), scatter, heads),
        back(grad_k, key_scatter, key_heads),
        back(grad_v, key_scatter, key_heads),
    )


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


def _hide(scores: Tensor, group: Group, part: slice, key_heads: int, causal: bool, window: int | None) -> None:
    """Sets the scores of hidden keys to -inf, in place; every query keeps at least one key.

    Args:
        scores: the rows `part` of a group's [sequences * key heads, repeat * length, length].
    """
    square = scores.view(-1, group.length, group.length)
    local = window is not None and window < group.length
    if window is not None and local:
        seen = near(group.length, causal, window, scores.device)
        square.add_(torch.zeros(seen.shape, dtype=scores.dtype).masked_fill_(~seen, float("-inf")))
    elif causal:
        later = torch.full((group.length, group.length), float("-inf"), dtype=scores.dtype).triu_(1)
        square.add_(later)
    if not causal and group.bias is not None:
        bias = group.bias.to(scores.dtype)  # [sequences, 1, length]
        scores.add_(bias[torch.arange(part.start, part.stop) // key_heads])
        if local:
            # A padding query whose window ends behind the sequence sees itself.
            own = square.diagonal(dim1=1, dim2=2)
            own.masked_fill_(own == float("-inf"), 0)


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
