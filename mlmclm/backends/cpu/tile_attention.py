"""Attention with tile instructions (`mlmclm.backends.cpu.tiles`).

It is computed one head of a sequence at a time, so that scores never leave a core's cache.

Forward, SIDE queries at a time: compute their scores with all keys that they see, the softmax, and its product with the
values. The logarithms of the softmax's denominators are kept.

Backward, SIDE keys at a time: recompute the softmax weights from scores and those logarithms, and from them the
gradients (as in Dao et al. 2022, arXiv 2205.14135). Keys are rows here, so that no large matrix has to be transposed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlmclm.backends.cpu.kernels import ANY_DISTANCE, as_array, over_threads
from mlmclm.backends.cpu.loops import Array, compiled
from mlmclm.backends.cpu.scalars import ONE, SUMS, ZERO, exp, largest_of, put, wide
from mlmclm.backends.cpu.tile_instructions import (
    BLOCK,
    LINE,
    SHAPES,
    SIDE,
    available,
    configure,
    pair,
    put_turned_floats,
    release,
    round_row,
)
from mlmclm.backends.cpu.tiles import multiply_panel, pack_columns, pack_left, pack_rows

QUERIES = 512
"""Queries whose score gradients are held at once."""


@compiled(set())
def _at(x: Array) -> Any:
    """Return an array's address as a signed integer: numba computes mixed signed and unsigned integers in float64."""
    return np.int64(x.ctypes.data)


@compiled(set())
def _scratch(rows: int, columns: int) -> Array:
    """Return fp32 [rows, columns + some], each row aligned to a cache line."""
    wider = (columns + 15) // 16 * 16 + LINE // 4
    whole = np.empty(rows * wider + 16, np.float32)
    skip = (-_at(whole) % 64) // 4
    return whole[skip : skip + rows * wider].reshape(rows, wider)


@compiled(set())
def _whole(source: Array, room: Array) -> int:
    """Return the address of a matrix with rows of zeros added up to the height of `room`; if shorter, it is copied
    there."""
    rows = source.shape[0]
    if rows == room.shape[0]:
        return _at(source)
    for r in range(room.shape[0]):
        target = room[r]
        if r < rows:
            target[:] = source[r]
        else:
            target[:] = 0
    return _at(room)


@compiled(SUMS)
def _round(source: int, source_stride: int, target: int, target_stride: int, rows: int, columns: int) -> None:
    """Round rows of fp32 to rows of bfloat16."""
    for r in range(rows):
        for i in range(0, columns, SIDE):
            round_row(source + r * source_stride + 4 * i, target + r * target_stride + 2 * i)


@compiled(set())
def _bits(rows: int, columns: int) -> Array:
    """Return bfloat16 [rows, columns] as bits, aligned like `_scratch` but with nothing between rows."""
    return _scratch(1, rows * columns // 2 + 1).view(np.uint16)[0, : rows * columns].reshape(rows, columns)


@compiled(set())
def _seen(row: int, length: int, real: int, causal: bool, window: int) -> tuple[int, int]:
    """Return the first key that a query sees and one past the last; padding sees one too."""
    position = row % length
    stop = min(real, position + (1 if causal else window))
    return max(0, min(position - window + 1, stop - 1)), stop


@compiled(SUMS)
def _soften(scores: Array, rows: int, columns: int, weights: Array, shares: Array, normalisers: Array) -> None:
    """Compute e^(score - largest) of each row as bfloat16, 1 / its sum, and the logarithm of softmax's denominator."""
    for r in range(rows):
        row, weight = scores[r, :columns], weights[r, :columns]
        top = largest_of(row)
        total = ZERO
        for i in range(columns):
            row[i] = exp(row[i] - top)
        for i in range(columns):
            total += row[i]
        for i in range(columns):
            put(weight, i, row[i])
        shares[r] = ONE / total
        normalisers[r] = top + np.float32(math.log(total))


@compiled(SUMS)
def _slopes(scores: Array, grads: Array, normalisers: Array, dots: Array, weights: Array, slopes: Array) -> None:
    """Compute softmax's weights from scores, and the scores' gradients from the weights', as bfloat16; a row per
    key."""
    columns = normalisers.shape[0]
    for r in range(SIDE):
        score, grad = scores[r, :columns], grads[r, :columns]
        weight, slope = weights[r, :columns], slopes[r, :columns]
        for i in range(columns):
            value = exp(score[i] - normalisers[i])
            put(weight, i, value)
            put(slope, i, value * (grad[i] - dots[i]))


@compiled(SUMS)
def _forward(
    q: Array, k: Array, v: Array, keys: Array, sharing: int, causal: bool, window: int, shapes: int,
    out: Array, normalisers: Array, first: int, last: int,
) -> None:  # fmt: skip
    """Compute `forward` for the heads `first` to `last`, counted over all sequences.

    Args:
        q, out: [n, rows, width].
        k, v: [n, length, width].
        keys: [n / sharing].
        normalisers: fp32 [n, rows].
    """
    rows, length, width = q.shape[1], k.shape[1], k.shape[2]
    tall, long = (rows + SIDE - 1) // SIDE * SIDE, (length + SIDE - 1) // SIDE * SIDE
    depth, steps = long // SIDE, width // SIDE
    key_columns, value_rows = _bits(long, width), _bits(long, width)
    room, padded = _bits(tall, width), _bits(long, width)
    scores, sums, weights = _scratch(SIDE, long), _scratch(SIDE, width), _bits(SIDE, long + LINE // 2)
    shares = np.empty(SIDE, np.float32)
    configure(shapes)
    for n in range(first, last):
        # Each head's keys and values are packed once, for all its queries.
        pack_columns(_whole(k[n], padded), 2 * width, width, 0, depth, _at(key_columns))
        pack_rows(_whole(v[n], padded), 2 * width, long, 0, steps, _at(value_rows))
        queries = _whole(q[n], room)
        real = keys[n // sharing]
        for begin in range(0, rows, SIDE):
            end = min(begin + SIDE, rows)
            # All keys that some of these queries see, in whole blocks of SIDE.
            low, high = length, 0
            for r in range(begin, end):
                start, stop = _seen(r, length, real, causal, window)
                low, high = min(low, start), max(high, stop)
            low, high = low // SIDE, (high + SIDE - 1) // SIDE
            multiply_panel(
                queries + 2 * begin * width, 2 * width, 2 * SIDE,
                _at(key_columns) + low * steps * BLOCK, steps * BLOCK, steps, high - low,
                _at(scores), scores.strides[0], False,
            )  # fmt: skip
            low, high = low * SIDE, high * SIDE
            # Only blocks at an edge of what is visible need a mask.
            hidden = False
            for r in range(begin, end):
                start, stop = _seen(r, length, real, causal, window)
                if start > low or stop < high:
                    hidden = True
                    scores[r - begin, : start - low] = -np.inf
                    scores[r - begin, stop - low : high - low] = -np.inf
            _soften(scores, end - begin, high - low, weights, shares, normalisers[n, begin:end])
            # `exp` clamps its argument, so hidden keys have a tiny weight rather than none.
            if hidden:
                for r in range(begin, end):
                    start, stop = _seen(r, length, real, causal, window)
                    weights[r - begin, : start - low] = 0
                    weights[r - begin, stop - low : high - low] = 0
            # Clear rows that hold weights of earlier queries.
            weights[end - begin :] = 0
            multiply_panel(
                _at(weights), weights.strides[0], 2 * SIDE,
                _at(value_rows) + low // SIDE * BLOCK, depth * BLOCK, (high - low) // SIDE, steps,
                _at(sums), sums.strides[0], False,
            )  # fmt: skip
            # Divided by the denominator at the end: an output row is shorter than a row of weights, and the sums are
            # still fp32.
            for r in range(end - begin):
                row, share = sums[r, :width], shares[r]
                for i in range(width):
                    row[i] *= share
            _round(_at(sums), sums.strides[0], _at(out[n, begin:]), out.strides[1], end - begin, width)
    release()


@compiled(SUMS)
def _backward(
    q: Array, k: Array, v: Array, keys: Array, sharing: int, causal: bool, window: int, shapes: int,
    out: Array, normalisers: Array, grad: Array, grad_q: Array, grad_k: Array, grad_v: Array, first: int, last: int,
) -> None:  # fmt: skip
    rows, length, width = q.shape[1], k.shape[1], k.shape[2]
    tall, long = (rows + SIDE - 1) // SIDE * SIDE, (length + SIDE - 1) // SIDE * SIDE
    depth, height, steps = long // SIDE, tall // SIDE, width // SIDE
    query_room, grad_room = _bits(tall, width), _bits(tall, width)
    key_room, value_room = _bits(long, width), _bits(long, width)
    query_columns, query_rows = _bits(tall, width), _bits(tall, width)
    grad_columns, grad_rows = _bits(tall, width), _bits(tall, width)
    key_left = _bits(long, width)
    chunk = min(tall, QUERIES)
    kept = _bits(long, chunk)  # the scores' gradients, packed
    scores, grad_scores = _scratch(SIDE, chunk), _scratch(SIDE, chunk)
    weights, slopes = _bits(SIDE, chunk + LINE // 2), _bits(SIDE, chunk + LINE // 2)
    key_sums, value_sums = _scratch(long, width), _scratch(long, width)
    sums, turned = _scratch(SIDE, SIDE), _scratch(SIDE, width)
    dots, lows, highs = np.empty(tall, np.float32), np.empty(height, np.int64), np.empty(height, np.int64)
    configure(shapes)
    for n in range(first, last):
        real = keys[n // sharing]
        queries, upstream = _whole(q[n], query_room), _whole(grad[n], grad_room)
        key_rows, value_rows = _whole(k[n], key_room), _whole(v[n], value_room)
        pack_columns(queries, 2 * width, width, 0, height, _at(query_columns))
        pack_rows(queries, 2 * width, tall, 0, steps, _at(query_rows))
        pack_columns(upstream, 2 * width, width, 0, height, _at(grad_columns))
        pack_rows(upstream, 2 * width, tall, 0, steps, _at(grad_rows))
        pack_left(key_rows, 2 * width, long, 0, steps, _at(key_left))
        # Softmax's gradient subtracts from each score's the dot product of the output and its gradient.
        for r in range(rows):
            above, result = grad[n, r], out[n, r]
            dot = ZERO
            for i in range(width):
                dot += wide(above[i]) * wide(result[i])
            dots[r] = dot
        key_sums[:] = 0
        value_sums[:] = 0
        for begin in range(0, tall, chunk):
            end = min(begin + chunk, tall)
            # Which blocks of keys each block of queries sees, for the queries' gradients below.
            lows[:], highs[:] = depth, 0
            for j in range((real + SIDE - 1) // SIDE):
                # Queries that see some of these keys; queries behind the last real one have no gradient.
                low, high = begin, min(end, rows)
                if rows == length:
                    low = max(low, j * SIDE if causal else j * SIDE - window + 1)
                    high = min(high, real, (j + 1) * SIDE + window - 1)
                if low >= high:
                    continue
                low, high = low // SIDE, (high + SIDE - 1) // SIDE
                for i in range(low, high):
                    lows[i], highs[i] = min(lows[i], j), j + 1
                multiply_panel(
                    key_rows + 2 * j * SIDE * width, 2 * width, 2 * SIDE,
                    _at(query_columns) + low * steps * BLOCK, steps * BLOCK, steps, high - low,
                    _at(scores), scores.strides[0], False,
                )  # fmt: skip
                multiply_panel(
                    value_rows + 2 * j * SIDE * width, 2 * width, 2 * SIDE,
                    _at(grad_columns) + low * steps * BLOCK, steps * BLOCK, steps, high - low,
                    _at(grad_scores), grad_scores.strides[0], False,
                )  # fmt: skip
                origin, limit = low * SIDE, min(high * SIDE, rows)
                _slopes(scores, grad_scores, normalisers[n, origin:limit], dots[origin:limit], weights, slopes)
                weights[:, limit - origin : high * SIDE - origin] = 0
                slopes[:, limit - origin : high * SIDE - origin] = 0
                # Blocks in which everything is visible need no mask.
                first_key, last_key = j * SIDE, (j + 1) * SIDE - 1
                hidden = (
                    rows != length
                    or last_key >= real
                    or (last_key > origin if causal else last_key - origin >= window)
                    or limit - 1 - first_key >= window
                )
                for key in range(first_key, last_key + 1 if hidden else first_key):
                    weight, slope = weights[key - first_key], slopes[key - first_key]
                    for base in range(origin // length * length, limit, length):
                        # Among one head's queries, those that see the key.
                        start, stop = max(origin, base), min(limit, base + length)
                        inner = max(start, base + key if causal else base + key - window + 1)
                        outer = min(stop, base + key + window)
                        if key >= real or inner >= outer:
                            inner, outer = stop, stop
                        weight[start - origin : inner - origin] = 0
                        slope[start - origin : inner - origin] = 0
                        weight[outer - origin : stop - origin] = 0
                        slope[outer - origin : stop - origin] = 0
                multiply_panel(
                    _at(weights), weights.strides[0], 2 * SIDE,
                    _at(grad_rows) + low * BLOCK, height * BLOCK, high - low, steps,
                    _at(value_sums[j * SIDE]), value_sums.strides[0], True,
                )  # fmt: skip
                multiply_panel(
                    _at(slopes), slopes.strides[0], 2 * SIDE,
                    _at(query_rows) + low * BLOCK, height * BLOCK, high - low, steps,
                    _at(key_sums[j * SIDE]), key_sums.strides[0], True,
                )  # fmt: skip
                # Pack the scores' gradients, while they are in the cache, as the right-hand side for the queries'
                # gradients.
                line = _at(slopes)
                for i in range(low, high):
                    place = _at(kept) + ((i - begin // SIDE) * depth + j) * BLOCK
                    for p in range(16):
                        row = line + 2 * p * slopes.strides[0] + 2 * SIDE * (i - low)
                        pair(row, row + slopes.strides[0], place + 64 * p, place + BLOCK // 2 + 64 * p)
            # The queries' gradients come out transposed, [width, queries], because the scores' gradients have keys as
            # rows.
            for i in range(begin // SIDE, end // SIDE):
                low, count = lows[i], highs[i] - lows[i]
                for s in range(steps):
                    if count > 0:
                        multiply_panel(
                            _at(key_left) + (s * depth + low) * BLOCK, 2 * SIDE, BLOCK,
                            _at(kept) + ((i - begin // SIDE) * depth + low) * BLOCK, BLOCK, count, 1,
                            _at(sums), sums.strides[0], False,
                        )  # fmt: skip
                    else:
                        sums[:] = 0
                    for a in range(2):
                        for b in range(2):
                            put_turned_floats(
                                _at(sums[16 * a]) + 64 * b, sums.strides[0],
                                _at(turned[16 * b]) + 4 * (s * SIDE + 16 * a), turned.strides[0], False,
                            )  # fmt: skip
                _round(
                    _at(turned), turned.strides[0], _at(grad_q[n, i * SIDE :]), grad_q.strides[1],
                    min(SIDE, rows - i * SIDE), width,
                )  # fmt: skip
        _round(_at(key_sums), key_sums.strides[0], _at(grad_k[n]), 2 * width, length, width)
        _round(_at(value_sums), value_sums.strides[0], _at(grad_v[n]), 2 * width, length, width)
    release()


def fits(dtype: torch.dtype, width: int) -> bool:
    """Return whether attention of this dtype and head dimension is computed here."""
    return dtype == torch.bfloat16 and width % SIDE == 0 and available()


def forward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, causal: bool, window: int | None, out: Tensor, normalisers: Tensor
) -> None:
    """Write softmax(q k') v into `out`, and the logarithms of softmax's denominators into `normalisers`.

    Args:
        q, out: bfloat16 [n, rows, width]; row r is a query at position r modulo length.
        k, v: [n, length, width].
        keys: int64 [sequences], number of real keys in each; n is a multiple of the number of sequences.
        causal, window: as in `AttentionSettings`.
        normalisers: fp32 [n, rows].
    """
    arrays = [as_array(tensor) for tensor in (q, k, v, keys)]
    settings = (len(q) // len(keys), causal, ANY_DISTANCE if window is None else window, SHAPES)
    written = [as_array(tensor) for tensor in (out, normalisers)]
    over_threads(
        lambda first, last: _forward(*arrays, *settings, *written, first, last), len(q), q.numel() * k.shape[1]
    )


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, causal: bool, window: int | None, out: Tensor, normalisers: Tensor,
    grad: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> None:  # fmt: skip
    """Compute the gradients of `forward`'s inputs, given that of its output; padding queries are left out."""
    arrays = [as_array(tensor) for tensor in (q, k, v, keys)]
    settings = (len(q) // len(keys), causal, ANY_DISTANCE if window is None else window, SHAPES)
    more = [as_array(tensor) for tensor in (out, normalisers, grad, grad_q, grad_k, grad_v)]
    over_threads(lambda first, last: _backward(*arrays, *settings, *more, first, last), len(q), q.numel() * k.shape[1])
