"""Attention within each sequence of a packed row on the CPU, forward and backward.

The sequences are sorted by length and cut into groups of similar length (`Packing.groups`). They are gathered into
[sequences, heads, length, width] for two batched products, and scattered back. Attention may be limited to a sliding
window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlmclm.backends import wide_products
from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.cpu import kernels, tile_attention
from mlmclm.backends.packing import Chosen, Packing, PaddedGroup

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
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings
) -> Tensor:
    """Compute `Reference.packed_attention` with compiled loops, in the compute dtype, with its own backward pass."""
    wanted = compute_type(query)
    dtype = torch.float32 if wanted == torch.bfloat16 and not wide_products.processor_has_bf16() else wanted
    # [T, heads, width], the order in which transformers' projections lie in memory, so nothing is copied here.
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    # The inputs are in the compute dtype now; autocast must not cast anything inside.
    with torch.autocast("cpu", enabled=False):
        apply: Any = _BlockAttention.apply
        output: Tensor = apply(query, key, value, packing, settings)
    return output.to(wanted).unsqueeze(0)


def by_tiles(query: Tensor, settings: AttentionSettings) -> bool:
    """Return whether attention with these queries [..., width] runs on tiles, and so never holds a score matrix."""
    return not settings.dropout and tile_attention.fits(compute_type(query), query.shape[-1])


class _BlockAttention(torch.autograd.Function):
    """`attend` and `attend_backward` as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings
    ) -> Tensor:
        q, k, v = (Heads(rows.contiguous(), 0, rows.shape[1]) for rows in (query, key, value))
        output, kept = attend(q, k, v, packing, settings)
        # autograd must own the tensors, to free them in time and to notice changes in place.
        ctx.save_for_backward(*kept.tensors)
        ctx.kept = replace(kept, tensors=())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept: Kept = replace(ctx.kept, tensors=ctx.saved_tensors)
        counts, width = (kept.heads, kept.key_heads, kept.key_heads), grad.shape[2]
        query, key, value = (Heads(grad.new_empty(len(grad), count, width), 0, count) for count in counts)
        attend_backward(grad.contiguous(), kept, query, key, value)
        return query.rows, key.rows, value.rows, None, None


class Tile(NamedTuple):
    """Queries of a group that are processed together, and the keys that they see."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Block:
    """A group of sequences, and the part of its queries that is computed."""

    group: PaddedGroup
    asked: PaddedGroup
    heads: int
    key_heads: int

    def of_queries(self, rows: Tensor) -> Tensor:
        """Return the block's part of `rows`, which has a row for each query: [sequences * key heads, queries, ...].

        The query heads that share a key head are adjacent, so their positions form one longer matrix.
        """
        first, count = self.asked.start * self.heads, self.asked.sequences * self.asked.length * self.heads
        return rows[first : first + count].view(self.asked.sequences * self.key_heads, -1, *rows.shape[1:])

    def of_keys(self, rows: Tensor) -> Tensor:
        """Return the block's part of `rows`, which has a row for each key: [sequences * key heads, length, ...]."""
        first, count = self.group.start * self.key_heads, self.group.sequences * self.group.length * self.key_heads
        return rows[first : first + count].view(-1, self.group.length, *rows.shape[1:])

    def tiles(self, causal: bool) -> list[Tile]:
        """Return the queries as one tile, or cut by position where causal attention can skip the keys after them."""
        repeat, length = self.heads // self.key_heads, self.group.length
        if not causal or repeat > 1 or length < 2 * TILE:
            return [Tile(slice(0, repeat * self.asked.length), slice(length))]
        stops = ((start, min(start + TILE, length)) for start in range(0, length, TILE))
        return [Tile(slice(start, stop), slice(stop)) for start, stop in stops]


@dataclass(frozen=True)
class Kept:
    """Settings and intermediate results that `attend` keeps for its backward pass."""

    packing: Packing
    chosen: Chosen | None
    settings: AttentionSettings
    heads: int
    key_heads: int
    turns: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]
    """Cosines and sines of the rotary embedding, of queries and of keys."""
    normalised: bool
    """The logarithms of the softmax's denominators are kept in place of its weights (`tile_attention`)."""
    tensors: tuple[Tensor, ...] = ()
    """scale * q, k, v in blocks; softmax weights of each tile; dropout masks of each tile, if any. If `normalised`:
    scale * q, k, v, the output in blocks and the logarithms, fp32 in the order of q's rows."""

    @property
    def asked(self) -> Packing | Chosen:
        """The layout of the queries."""
        return self.chosen or self.packing

    def blocks(self) -> list[Block]:
        """Return the blocks of attention."""
        pairs = zip(self.packing.groups, self.asked.groups, strict=True)
        return [Block(group, asked, self.heads, self.key_heads) for group, asked in pairs]


def attend(
    query: Heads,
    key: Heads,
    value: Heads,
    packing: Packing,
    settings: AttentionSettings,
    turn: tuple[Tensor, Tensor] | None = None,
    chosen: Chosen | None = None,
) -> tuple[Tensor, Kept]:
    """Compute softmax(scale q k') v within each sequence, with one padded block per group.

    Not differentiable by itself: `attend_backward` computes the gradients.

    Args:
        query, key, value: vectors in the compute dtype.
        turn: cosines and sines, [T, width / 2] each, of the rotary embedding of queries and keys; None if it has been
            applied.
        chosen: compute the output of these tokens only; `query` then holds `chosen.rows`.

    Returns:
        [T, heads, width] (T' if `chosen`), 0 at padding; and what the backward pass needs.

    Raises:
        ValueError: `chosen` with causal or windowed attention.
    """
    causal, scale, dropout, window, _ = settings
    heads, key_heads, width = query.number, key.number, query.rows.shape[2]
    if chosen is not None and (causal or window is not None):
        raise ValueError("causal or local attention needs the queries of all tokens")
    query_turn = turn if turn is None or chosen is None else (turn[0][chosen.rows], turn[1][chosen.rows])
    normalised = not dropout and tile_attention.fits(query.rows.dtype, width)
    kept = Kept(packing, chosen, settings, heads, key_heads, (query_turn, turn), normalised)
    places, key_places, slots = kept.asked.places(heads), packing.places(key_heads), packing.slots
    # The scale and the rotary embedding cost no pass of their own: they are applied while the vectors are gathered.
    q = kernels.to_blocks(query.rows, query.first, places, kept.asked.slots * heads, scale, query_turn)
    k = kernels.to_blocks(key.rows, key.first, key_places, slots * key_heads, 1.0, turn)
    v = kernels.to_blocks(value.rows, value.first, key_places, slots * key_heads, 1.0, None)
    attended = torch.empty_like(q)
    output = q.new_empty(len(query.rows), heads, width)
    if normalised:
        normalisers = torch.empty(len(q))
        for block in kept.blocks():
            tile_attention.forward(
                block.of_queries(q), block.of_keys(k), block.of_keys(v), block.group.keys, causal, window,
                block.of_queries(attended), block.of_queries(normalisers),
            )  # fmt: skip
        kernels.from_blocks(attended, output, 0, places, 1.0, None)
        return output, replace(kept, tensors=(q, k, v, attended, normalisers))
    weights: list[Tensor] = []
    masks: list[Tensor] = []
    for block in kept.blocks():
        qs, ks, vs, out = block.of_queries(q), block.of_keys(k), block.of_keys(v), block.of_queries(attended)
        keys = block.group.keys.repeat_interleave(key_heads)  # [sequences * key heads]
        for rows, seen in block.tiles(causal):
            weight = qs.new_empty(len(qs), rows.stop - rows.start, seen.stop)
            mask = torch.empty_like(weight).bernoulli_(1.0 - dropout).div_(1.0 - dropout) if dropout else None
            # Part by part, so that the softmax finds its scores in the cache.
            for part in _parts(weight):
                torch.bmm(qs[part, rows], ks[part, seen].transpose(1, 2), out=weight[part])
                kernels.softmax(weight[part], keys[part], block.group.length, rows.start, causal, window)
                used = weight[part] if mask is None else weight[part] * mask[part]
                _product(used, vs[part, seen], out[part, rows])
            weights.append(weight)
            if mask is not None:
                masks.append(mask)
    kernels.from_blocks(attended, output, 0, places, 1.0, None)
    return output, replace(kept, tensors=(q, k, v, *weights, *masks))


def attend_backward(grad: Tensor, kept: Kept, query: Heads, key: Heads, value: Heads) -> None:
    """Write the gradients of `attend`'s inputs into `query`, `key` and `value`, given the gradient of its output.

    The output at padding is constant, so the values of `grad` [T, heads, width] there have no effect.
    """
    places, key_places = kept.asked.places(kept.heads), kept.packing.places(kept.key_heads)
    upstream = kernels.to_blocks(grad, 0, places, len(kept.tensors[0]), 1.0, None)
    grad_q, grad_k, grad_v = (_backward_by_tiles if kept.normalised else _backward)(kept, upstream)
    # `scale` is applied to q alone, so its gradient is scaled too.
    kernels.from_blocks(grad_q, query.rows, query.first, places, kept.settings.scale, kept.turns[0])
    kernels.from_blocks(grad_k, key.rows, key.first, key_places, 1.0, kept.turns[1])
    kernels.from_blocks(grad_v, value.rows, value.first, key_places, 1.0, None)


def _backward_by_tiles(kept: Kept, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in blocks, given the output's.

    The tile kernels recompute the softmax from the logarithms of its denominators, so there are no weights to read.
    """
    q, k, v, attended, normalisers = kept.tensors
    grad_q, grad_k, grad_v = map(torch.empty_like, (q, k, v))
    for block in kept.blocks():
        tile_attention.backward(
            block.of_queries(q), block.of_keys(k), block.of_keys(v), block.group.keys,
            kept.settings.causal, kept.settings.window,
            block.of_queries(attended), block.of_queries(normalisers), block.of_queries(upstream),
            block.of_queries(grad_q), block.of_keys(grad_k), block.of_keys(grad_v),
        )  # fmt: skip
    return grad_q, grad_k, grad_v


def _backward(kept: Kept, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in blocks, given the output's, from the softmax's weights."""
    q, k, v, *rest = kept.tensors
    blocks = kept.blocks()
    tiles = [(block, tile) for block in blocks for tile in block.tiles(kept.settings.causal)]
    weights, masks = rest[: len(tiles)], rest[len(tiles) :]
    # Several tiles add to the gradients of the same keys, so these are summed in fp32.
    sums = torch.promote_types(k.dtype, torch.float32) if len(tiles) > len(blocks) else k.dtype
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k, dtype=sums), torch.empty_like(v, dtype=sums)
    for index, (block, tile) in enumerate(tiles):
        qs, gq, up = (block.of_queries(rows) for rows in (q, grad_q, upstream))
        ks, vs, gk, gv = (block.of_keys(rows) for rows in (k, v, grad_k, grad_v))
        weight, (rows, seen) = weights[index], tile
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
    return grad_q, grad_k, grad_v


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
    before = tile.queries.start
    sums[:, before : tile.keys.stop] = part[:, before:]
    if before:
        sums[:, :before] += part[:, :before]


def _parts(weights: Tensor) -> list[slice]:
    """Return slices of the first dimension of `weights`, each of at most `SCORES_AT_ONCE` elements (or one row)."""
    rows = len(weights)
    step = max(1, SCORES_AT_ONCE // (weights.shape[1] * weights.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
