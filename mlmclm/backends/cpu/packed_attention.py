"""Attention within each sequence of a packed row on the CPU, forward and backward.

The sequences are sorted by length and cut into groups of similar length (`Packing.groups`). They are gathered into
[sequences, heads, length, width] for two batched products, and scattered back. Attention may be limited to a sliding
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlmclm.backends.cpu import kernels, tile_attention
from mlmclm.backends.packing import Chosen, Group, Packing

TILE = 128
"""Queries of causal attention that are processed together."""
SCORES_AT_ONCE = 1 << 21
"""Elements of a score matrix that are processed at once, so that they stay in a core's cache from one product to the
next (measured with 64 heads of width 64 over 512 positions, bf16: 43 ms forward and backward, against 73 ms all at
once)."""


class Heads(NamedTuple):
    """Some of the heads of a row of vectors: `number` of them, from `first` on."""

    rows: Tensor
    """[T, all heads, width], contiguous."""
    first: int
    number: int


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    causal: bool,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Compute `Reference.packed_attention` with compiled loops, in the compute dtype, with its own backward pass."""
    dtype = compute_type(query)
    # [T, heads, width], the order in which transformers' projections lie in memory, so nothing is copied here.
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    # The inputs are in the compute dtype now; autocast must not cast anything inside.
    with torch.autocast("cpu", enabled=False):
        apply: Any = _BlockAttention.apply
        output: Tensor = apply(query, key, value, packing, causal, scale, dropout, window)
    return output.unsqueeze(0)


def compute_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype of products with this tensor: autocast's, or its own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype


def by_tiles(query: Tensor, dropout: float) -> bool:
    """Return whether attention with these queries [..., width] runs on tiles, and so never holds a score matrix."""
    return not dropout and tile_attention.fits(compute_type(query), query.shape[-1])


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
        # autograd must own the tensors, to free them in time and to notice changes in place.
        ctx.save_for_backward(*kept.tensors)
        ctx.settings = (packing, scale, kept.without_tensors())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packing, scale, kept = ctx.settings
        query, key, value = (Heads(grad.new_empty(len(grad), count, kept.width), 0, count) for count in kept.counts)
        kept = kept.with_tensors(ctx.saved_tensors)
        attend_backward(grad.contiguous(), packing, scale, kept, query, key, value)
        return query.rows, key.rows, value.rows, None, None, None, None, None


@dataclass(frozen=True)
class Tile:
    """Queries of a group that are processed together, and the keys that they see."""

    start: int
    stop: int
    keys: int
    """Number of keys that the queries see, from the first on."""


@dataclass(frozen=True)
class Kept:
    """Intermediate results that `attend` keeps for its backward pass."""

    counts: tuple[int, int, int]
    """Numbers of query, key and value heads."""
    width: int
    causal: bool
    turns: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]
    """Cosines and sines of the rotary embedding, of queries and of keys."""
    window: int | None
    normalised: bool
    """The logarithms of the softmax's denominators are kept in place of its weights (`tile_attention`)."""
    tensors: tuple[Tensor, ...]
    """scale * q, k, v in blocks; softmax weights of each tile; dropout masks of each tile, if any. If `normalised`:
    scale * q, k, v, the output in blocks and the logarithms, fp32 in the order of q's rows."""

    def without_tensors(self) -> Kept:
        """Return a copy without tensors, which autograd must hold itself."""
        return replace(self, tensors=())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Kept:
        """Return a copy with these tensors; the inverse of `without_tensors`."""
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
    chosen: Chosen | None = None,
) -> tuple[Tensor, Kept]:
    """Compute softmax(scale q k') v within each sequence, with one padded block per group.

    Not differentiable by itself: `attend_backward` computes the gradients.

    Args:
        query, key, value: vectors in the compute dtype.
        chosen: compute the output of these tokens only; `query` then holds `chosen.rows`. Neither causal nor windowed.
        turn: cosines and sines, [T, width / 2] each, of the rotary embedding of queries and keys; None if it has been
            applied.
        window: hide positions at this distance or more.

    Returns:
        [T, heads, width] (T' if `chosen`), 0 at padding; and what the backward pass needs.

    Raises:
        ValueError: `chosen` with causal or windowed attention.
    """
    heads, key_heads, width = query.number, key.number, query.rows.shape[2]
    asked = chosen or packing
    places, key_places, slots = asked.places(heads), packing.places(key_heads), packing.slots
    query_turn = turn
    if chosen is not None:
        if causal or window is not None:
            raise ValueError("causal or local attention needs the queries of all tokens")
        query_turn = None if turn is None else (turn[0][chosen.rows], turn[1][chosen.rows])
    # The scale and the rotary embedding cost no pass of their own: they are applied while the vectors are gathered.
    q = kernels.to_blocks(query.rows, query.first, places, asked.slots * heads, scale, query_turn)
    k = kernels.to_blocks(key.rows, key.first, key_places, slots * key_heads, 1.0, turn)
    v = kernels.to_blocks(value.rows, value.first, key_places, slots * key_heads, 1.0, None)
    attended = torch.empty_like(q)
    output = q.new_empty(len(query.rows), heads, width)
    counts = (heads, key_heads, key_heads)
    if not dropout and tile_attention.fits(q.dtype, width):
        normalisers = torch.empty(len(q))
        for group, some in zip(packing.groups, asked.groups, strict=True):
            qs, ks, vs = _blocks(group, some, heads, key_heads, width, q, k, v)
            out = _queries(some, heads, qs, attended)
            tile_attention.forward(
                qs, ks, vs, group.keys, causal, window, out, _queries(some, heads, qs[:, :, 0], normalisers)
            )
        kernels.from_blocks(attended, output, 0, places, 1.0, None)
        return output, Kept(counts, width, causal, (query_turn, turn), window, True, (q, k, v, attended, normalisers))
    weights: list[Tensor] = []
    masks: list[Tensor] = []
    for group, some in zip(packing.groups, asked.groups, strict=True):
        qs, ks, vs = _blocks(group, some, heads, key_heads, width, q, k, v)
        out = _queries(some, heads, qs, attended)
        keys = group.keys.repeat_interleave(key_heads)  # [sequences * key heads]
        for tile in _tiles(group, some, heads // key_heads, causal):
            rows, seen = slice(tile.start, tile.stop), slice(tile.keys)
            weight = qs.new_empty(len(qs), tile.stop - tile.start, tile.keys)
            mask = torch.empty_like(weight).bernoulli_(1.0 - dropout).div_(1.0 - dropout) if dropout else None
            # Part by part, so that the softmax finds its scores in the cache.
            for part in _parts(weight):
                torch.bmm(qs[part, rows], ks[part, seen].transpose(1, 2), out=weight[part])
                kernels.softmax(weight[part], keys[part], group.length, tile.start, causal, window)
                used = weight[part] if mask is None else weight[part] * mask[part]
                _product(used, vs[part, seen], out[part, rows])
            weights.append(weight)
            if mask is not None:
                masks.append(mask)
    kernels.from_blocks(attended, output, 0, places, 1.0, None)
    return output, Kept(counts, width, causal, (query_turn, turn), window, False, (q, k, v, *weights, *masks))


def attend_backward(
    grad: Tensor,
    packing: Packing,
    scale: float,
    kept: Kept,
    query: Heads,
    key: Heads,
    value: Heads,
    chosen: Chosen | None = None,
) -> None:
    """Write the gradients of `attend`'s inputs into `query`, `key` and `value`, given the gradient of its output.

    The output at padding is constant, so the values of `grad` [T, heads, width] there have no effect.
    """
    (heads, key_heads, _), width = kept.counts, kept.width
    q, k, v, *rest = kept.tensors
    asked = chosen or packing
    groups = list(zip(packing.groups, asked.groups, strict=True))
    tiles = [(pair, tile) for pair in groups for tile in _tiles(*pair, heads // key_heads, kept.causal)]
    weights, masks = rest[: len(tiles)], rest[len(tiles) :]
    places = asked.places(heads)
    upstream = kernels.to_blocks(grad, 0, places, len(q), 1.0, None)
    grad_q = torch.empty_like(q)
    # The tile kernels recompute the softmax from the logarithms of its denominators, so there are no weights to read.
    if kept.normalised:
        attended, normalisers = rest
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        for group, some in groups:
            qs, ks, vs = _blocks(group, some, heads, key_heads, width, q, k, v)
            tile_attention.backward(
                qs, ks, vs, group.keys, kept.causal, kept.window,
                _queries(some, heads, qs, attended), _queries(some, heads, qs[:, :, 0], normalisers),
                _queries(some, heads, qs, upstream),
                *_blocks(group, some, heads, key_heads, width, grad_q, grad_k, grad_v),
            )  # fmt: skip
        _scatter(grad_q, grad_k, grad_v, places, packing, scale, kept, query, key, value)
        return
    # Several tiles add to the gradients of the same keys, so these are summed in fp32.
    sums = torch.promote_types(k.dtype, torch.float32) if len(tiles) > len(groups) else k.dtype
    grad_k, grad_v = torch.empty_like(k, dtype=sums), torch.empty_like(v, dtype=sums)
    for index, ((group, some), tile) in enumerate(tiles):
        qs, ks, vs = _blocks(group, some, heads, key_heads, width, q, k, v)
        gq, gk, gv = _blocks(group, some, heads, key_heads, width, grad_q, grad_k, grad_v)
        up = _queries(some, heads, qs, upstream)
        rows, seen = slice(tile.start, tile.stop), slice(tile.keys)
        weight = weights[index]
        for part in _parts(weight):
            used = weight[part]
            grad_weight = torch.bmm(up[part, rows], vs[part, seen].transpose(1, 2))
            if masks:
                used = used * masks[index][part]
                grad_weight.mul_(masks[index][part])
            _gather_up(gv[part], torch.bmm(used.transpose(1, 2), up[part, rows]), tile)
            # In place: `grad_weight` becomes the gradient of the scores.
            kernels.softmax_backward(grad_weight, weight[part])
            _product(grad_weight, ks[part, seen], gq[part, rows])
            _gather_up(gk[part], torch.bmm(grad_weight.transpose(1, 2), qs[part, rows]), tile)
    _scatter(grad_q, grad_k, grad_v, places, packing, scale, kept, query, key, value)


def _scatter(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, places: Tensor, packing: Packing, scale: float, kept: Kept,
    query: Heads, key: Heads, value: Heads,
) -> None:  # fmt: skip
    """Scatter gradients from blocks to their places in rows."""
    key_places = packing.places(key.number)
    # `scale` is applied to q alone, so its gradient is scaled too.
    kernels.from_blocks(grad_q, query.rows, query.first, places, scale, kept.turns[0])
    kernels.from_blocks(grad_k, key.rows, key.first, key_places, 1.0, kept.turns[1])
    kernels.from_blocks(grad_v, value.rows, value.first, key_places, 1.0, None)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write a batched product into `out`, which may be a part of a tensor."""
    if out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def _gather_up(sums: Tensor, part: Tensor, tile: Tile) -> None:
    """Add a tile's share of the gradients of the keys it sees to `sums`.

    A group's tiles come in order, and each sees more keys than those before it: the gradients of its new keys are
    written, not added, so `sums` needs no zeros at the start.
    """
    before = tile.start
    sums[:, before : tile.keys] = part[:, before:]
    if before:
        sums[:, :before] += part[:, :before]


def _blocks(
    group: Group, asked: Group, heads: int, key_heads: int, width: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a group's views of q, [sequences * key heads, repeat * asked length, width], and of k and v, [sequences *
    key heads, length, width].

    The query heads that share a key head are adjacent, so their positions form one longer matrix.
    """
    end = group.start + group.sequences * group.length
    batch, repeat = group.sequences * key_heads, heads // key_heads
    last = asked.start + asked.sequences * asked.length
    return (
        q[asked.start * heads : last * heads].view(batch, repeat * asked.length, width),
        k[group.start * key_heads : end * key_heads].view(batch, group.length, width),
        v[group.start * key_heads : end * key_heads].view(batch, group.length, width),
    )


def _queries(group: Group, heads: int, like: Tensor, rows: Tensor) -> Tensor:
    """Return a group's part of `rows`, which has a row for each query, in the shape of `like`."""
    return rows[group.start * heads : (group.start + group.sequences * group.length) * heads].view(like.shape)


def _parts(weights: Tensor) -> list[slice]:
    """Return slices of the first dimension of `weights`, each of at most `SCORES_AT_ONCE` elements (or one row)."""
    rows = len(weights)
    step = max(1, SCORES_AT_ONCE // (weights.shape[1] * weights.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _tiles(group: Group, asked: Group, repeat: int, causal: bool) -> list[Tile]:
    """Return a group's queries as one tile, or cut by position where causal attention can skip the keys after them."""
    if not causal or repeat > 1 or group.length < 2 * TILE:
        return [Tile(0, repeat * asked.length, group.length)]
    return [
        Tile(start, min(start + TILE, group.length), min(start + TILE, group.length))
        for start in range(0, group.length, TILE)
    ]
