"""Element-wise passes of the block, of attention and of the loss on the CPU, each as one loop compiled with numba.

torch computes them operation by operation. Each operation reads and writes whole activations and, in bfloat16, converts
to fp32 and back. Here a value is read once, computed in fp32 (float64 for float64 input), rounded once and written
once. The functions take torch tensors; numba sees bfloat16 as its bits, in uint16. Values that are not finite stay so.

A loop's rows are divided among torch's threads; results don't depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlmclm.backends.cpu.loops import Array, compiled
from mlmclm.backends.cpu.scalars import FAST, ONE, SUMS, ZERO, exp, largest_of, put, wide

ROWS = 256
"""Rows whose sums are taken together, whatever the number of threads."""
ANY_DISTANCE = 1 << 40
"""More than the distance of any two positions."""
SMALL = 1 << 15
"""Elements below which a second thread costs more than it saves."""


# The loops. Their arrays have one row per token (or position), in order, unless stated otherwise. `x * ZERO` starts a
# sum in the dtype of its terms.
# The inner loops that sum don't write. When the output lies just behind the input in memory, as it may with short rows,
# LLVM leaves a loop that writes unvectorised, and its sums would be taken in another order.


@compiled(SUMS)
def _add(x: Array, y: Array, total: Array) -> None:
    for t in range(x.shape[0]):
        first, second, out = x[t], y[t], total[t]
        for i in range(x.shape[1]):
            put(out, i, wide(first[i]) + wide(second[i]))


@compiled(SUMS)
def _norm(x: Array, inverse: Array, normed: Array, weight: Array, epsilon: float) -> None:
    for t in range(x.shape[0]):
        row, out = x[t], normed[t]
        squares = wide(row[0]) * ZERO
        for i in range(x.shape[1]):
            squares += wide(row[i]) * wide(row[i])
        inverse[t] = 1 / np.sqrt(squares / x.shape[1] + epsilon)
        scale = inverse[t]
        for i in range(x.shape[1]):
            put(out, i, wide(row[i]) * scale * wide(weight[i]))


@compiled(SUMS)
def _norm_backward(
    grad: Array, x: Array, inverse: Array, residual: Array, total: Array, weight: Array, sums: Array
) -> None:
    for t in range(x.shape[0]):
        upstream, row, other, out = grad[t], x[t], residual[t], total[t]
        scale = inverse[t]
        projection = scale * ZERO
        for i in range(x.shape[1]):
            projection += wide(upstream[i]) * wide(row[i]) * scale * wide(weight[i])
        for i in range(x.shape[1]):
            sums[i] += wide(upstream[i]) * wide(row[i]) * scale
        # RMSNorm ignores the length of x (up to epsilon), so the gradient's part along x is removed.
        projection *= scale / np.float32(x.shape[1])
        for i in range(x.shape[1]):
            value = wide(upstream[i]) * wide(weight[i]) - projection * wide(row[i])
            put(out, i, value * scale + wide(other[i]))


@compiled(FAST)
def _gated(gate_up: Array, product: Array) -> None:
    half = product.shape[1]
    for t in range(product.shape[0]):
        gate, up, out = gate_up[t, :half], gate_up[t, half:], product[t]
        for i in range(half):
            value = wide(gate[i])
            put(out, i, value / (ONE + exp(-value)) * wide(up[i]))


@compiled(FAST)
def _gated_backward(gate_up: Array, grad: Array, product: Array, grad_gate_up: Array) -> None:
    half = product.shape[1]
    for t in range(product.shape[0]):
        gate, up, upstream, out = gate_up[t, :half], gate_up[t, half:], grad[t], product[t]
        grad_gate, grad_up = grad_gate_up[t, :half], grad_gate_up[t, half:]
        for i in range(half):
            value, factor, above = wide(gate[i]), wide(up[i]), wide(upstream[i])
            # d silu(x) / dx = s + x s (1 - s), where s = sigmoid(x).
            share = ONE / (ONE + exp(-value))
            active = value * share
            put(out, i, active * factor)
            put(grad_up, i, above * active)
            put(grad_gate, i, above * factor * (share + active * (ONE - share)))


@lru_cache
def _turning(half: int, heads: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `to_blocks` and `from_blocks`, compiled for this number of heads, with 2 * `half` rotated elements
    each."""

    @compiled(FAST)
    def to_blocks(index: Array, rows: Array, cos: Array, sin: Array, blocks: Array, first: int, scale: float) -> None:
        for t in range(index.shape[0]):
            for h in range(heads):
                n, head = index[t, h], first + h
                if n < 0:
                    continue
                for i in range(half):
                    a, b = wide(rows[t, head, i]) * scale, wide(rows[t, head, half + i]) * scale
                    put(blocks, (n, i), a * cos[t, i] - b * sin[t, i])
                    put(blocks, (n, half + i), b * cos[t, i] + a * sin[t, i])
                for i in range(2 * half, blocks.shape[1]):
                    put(blocks, (n, i), wide(rows[t, head, i]) * scale)

    @compiled(FAST)
    def from_blocks(index: Array, rows: Array, cos: Array, sin: Array, blocks: Array, first: int, scale: float) -> None:
        for t in range(index.shape[0]):
            for h in range(heads):
                n, head = index[t, h], first + h
                if n < 0:
                    for i in range(blocks.shape[1]):
                        rows[t, head, i] = 0
                    continue
                for i in range(half):
                    a, b = wide(blocks[n, i]) * scale, wide(blocks[n, half + i]) * scale
                    put(rows, (t, head, i), a * cos[t, i] + b * sin[t, i])
                    put(rows, (t, head, half + i), b * cos[t, i] - a * sin[t, i])
                for i in range(2 * half, blocks.shape[1]):
                    put(rows, (t, head, i), wide(blocks[n, i]) * scale)

    return to_blocks, from_blocks


@compiled(SUMS)
def _softmax(scores: Array, keys: Array, length: int, origin: int, causal: bool, window: int, like: Array) -> None:
    values = np.empty(scores.shape[2], like.dtype)
    for n in range(scores.shape[0]):
        for r in range(scores.shape[1]):
            position = origin + r % length
            stop = min(keys[n], position + (1 if causal else window))
            start = max(0, min(position - window + 1, stop - 1))  # padding sees a key too, or it would divide by 0
            row = scores[n, r, start:stop]
            largest = largest_of(row)
            total = largest * ZERO
            for i in range(stop - start):
                values[i] = exp(wide(row[i]) - largest)
            for i in range(stop - start):
                total += values[i]
            share = ONE / total
            for i in range(stop - start):
                put(row, i, values[i] * share)
            scores[n, r, :start] = 0
            scores[n, r, stop:] = 0


@compiled(SUMS)
def _softmax_backward(grad: Array, weights: Array) -> None:
    for n in range(grad.shape[0]):
        for r in range(grad.shape[1]):
            row, weight = grad[n, r], weights[n, r]
            dot = wide(row[0]) * ZERO
            for i in range(row.shape[0]):
                dot += wide(row[i]) * wide(weight[i])
            for i in range(row.shape[0]):
                put(row, i, (wide(row[i]) - dot) * wide(weight[i]))


@compiled(SUMS)
def _cross_entropy(logits: Array, labels: Array, losses: Array, vocabulary: int) -> None:
    values = np.empty(vocabulary, losses.dtype)
    for n in range(logits.shape[0]):
        row = logits[n, :vocabulary]
        largest = largest_of(row)
        chosen = wide(row[labels[n]])
        total = largest * ZERO
        for i in range(row.shape[0]):
            values[i] = exp(wide(row[i]) - largest)
        for i in range(row.shape[0]):
            total += values[i]
        losses[n] = math.log(total) + largest - chosen
        share = ONE / total
        # From the unrounded probability: where that is close to 1, rounding it first would lose the difference.
        own = values[labels[n]] * share - ONE
        for i in range(row.shape[0]):
            put(row, i, values[i] * share)
        put(row, labels[n], own)


# Functions that the rest of the package calls.


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the dtype of x; both are [T, hidden]."""
    total = torch.empty_like(x)
    _over_rows(_add, [x, y, total])
    return total


def norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of x [T, hidden] in `dtype`, and 1 / sqrt(mean(x^2) + epsilon), [T]."""
    normed, inverse = torch.empty(x.shape, dtype=dtype), torch.empty(len(x), dtype=_at_least_single(x))
    _over_rows(_norm, [x, inverse, normed], weight, epsilon)
    return normed, inverse


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return RMSNorm's gradients: for its input [T, hidden], with `residual` added, and for its weight [hidden]."""
    total = torch.empty_like(x)
    # A row of sums for every ROWS tokens, so that the order of summation is the same with any number of threads.
    sums = torch.zeros(-(-len(x) // ROWS), x.shape[1], dtype=inverse.dtype)
    _over_rows(_norm_backward, [grad, x, inverse, residual, total], weight, sums=sums)
    return total, sums.sum(0).to(weight.dtype)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, intermediate], of gate and up side by side, [T, 2 * intermediate]."""
    product = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _over_rows(_gated, [gate_up, product])
    return product


def gated_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gated` again, and the gradient of its input, given that of its output."""
    product, grad_gate_up = torch.empty_like(grad), torch.empty_like(gate_up)
    _over_rows(_gated_backward, [gate_up, grad, product, grad_gate_up])
    return product, grad_gate_up


def to_blocks(
    rows: Tensor, first: int, index: Tensor, slots: int, scale: float, turn: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gather the vectors of some heads in another order, [slots, width], times `scale`; slots that get none are 0.

    Args:
        rows: [T, all heads, width].
        first: the first of the heads that are taken.
        index: int64 [T, heads], the slot of each vector; -1 for none.
        turn: cosines and sines, [T, width / 2] each, of the rotary embedding, which pairs a vector's two halves; None
            for no rotation.
    """
    # Zeros are needed only if some slot gets no vector.
    full = slots == index.numel() and int(index.min()) >= 0
    blocks = (torch.empty if full else torch.zeros)(slots, rows.shape[2], dtype=rows.dtype)
    cos, sin = _angles(rows, turn)
    loop = _turning(cos.shape[1], index.shape[1])[0]
    _over_rows(loop, [index, rows, cos, sin], blocks, first, _scalar(rows, scale))
    return blocks


def from_blocks(
    blocks: Tensor, rows: Tensor, first: int, index: Tensor, scale: float, turn: tuple[Tensor, Tensor] | None
) -> None:
    """Scatter blocks back into `rows`, a vector for each token and head, rotated back and times `scale`.

    Vectors whose index is -1 become 0.
    """
    cos, sin = _angles(rows, turn)
    loop = _turning(cos.shape[1], index.shape[1])[1]
    _over_rows(loop, [index, rows, cos, sin], blocks, first, _scalar(blocks, scale))


def softmax(scores: Tensor, keys: Tensor, length: int, origin: int, causal: bool, window: int | None = None) -> None:
    """Compute softmax over the keys that a row sees (`AttentionSettings`), in place; 0 for the others.

    Args:
        scores: [sequences, rows, keys]; row r is the query at position `origin` + r modulo `length`.
        keys: int64 [sequences], number of real keys.
    """
    window = ANY_DISTANCE if window is None else window
    like = np.empty(0, np.float64 if scores.dtype == torch.float64 else np.float32)
    _over_rows(_softmax, [scores, keys], length, origin, causal, window, like)


def softmax_backward(grad: Tensor, weights: Tensor) -> None:
    """Replace the gradient of softmax's output by that of its input, both [sequences, rows, keys]."""
    _over_rows(_softmax_backward, [grad, weights])


def cross_entropy(logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
    """Compute `Reference.losses` in one pass over contiguous logits; columns beyond the vocabulary stay as they are."""
    losses = torch.empty(len(labels), dtype=_at_least_single(logits))
    _over_rows(_cross_entropy, [logits, labels, losses], vocabulary)
    return losses.sum()


def _angles(rows: Tensor, turn: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if turn is not None:
        return turn
    none = torch.empty(len(rows), 0, dtype=_at_least_single(rows))  # no angles, so nothing is rotated
    return none, none


def _at_least_single(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scalar(like: Tensor, value: float) -> Any:
    """Return the number in a type that keeps numba's arithmetic with fp32 arrays in fp32."""
    return value if like.dtype == torch.float64 else np.float32(value)


def as_array(x: Any) -> Any:
    """Return a tensor's memory as an array, bfloat16 as its bits; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return (x.detach().view(torch.uint16) if x.dtype == torch.bfloat16 else x.detach()).numpy()


def _over_rows(
    kernel: Callable[..., None], tensors: Sequence[Tensor], *others: Any, sums: Tensor | None = None
) -> None:
    """Call a loop on the same rows of all `tensors`, on as many threads as torch has.

    The last argument is one row of `sums` per `ROWS` rows, which the loop adds to.
    """
    arrays, rest = [as_array(tensor) for tensor in tensors], [as_array(other) for other in others]
    partial = None if sums is None else as_array(sums)

    def work(first: int, last: int) -> None:
        if partial is None:
            kernel(*(array[first:last] for array in arrays), *rest)
            return
        for part in range(first, last):
            kernel(*(array[part * ROWS : (part + 1) * ROWS] for array in arrays), *rest, partial[part])

    count = len(arrays[0]) if partial is None else len(partial)
    over_threads(work, count, max(tensor.numel() for tensor in tensors))


def over_threads(work: Callable[[int, int], None], count: int, elements: int) -> None:
    """Call work(first, last) for ranges that cover `count`, on as many threads as torch has; on one for few
    elements."""
    threads = torch.get_num_threads() if elements >= SMALL else 1
    step = max(1, -(-count // threads))
    if step >= count:
        work(0, count)
    else:
        list(_pool(threads).map(lambda first: work(first, min(first + step, count)), range(0, count, step)))


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    # Python's threads do: the loops run without the GIL.
    return ThreadPoolExecutor(threads, thread_name_prefix="mlmclm-kernels")
