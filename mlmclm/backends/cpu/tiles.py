"""Products of bfloat16 matrices with the tile instructions of Intel's CPUs (AMX), as loops compiled with numba.

One instruction multiplies 16 rows of 32 values with 32 rows of 16 and adds to 16 x 16 sums in fp32. oneDNN, which
computes torch's products, keeps these instructions busy where rows of a large matrix meet columns of another. This
module has the products for which oneDNN reaches a quarter to a half of that speed: those that sum over rows, which are
the weight gradients of linear layers, and the parts of attention (`tile_attention`). Operands are brought into the
instruction's order while they lie in a core's cache, and the next part of the right-hand side is prefetched while the
one before it is multiplied.

If the CPU has no such instructions, or a shape is not a multiple of 32, torch computes the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlmclm.backends.cpu.kernels import over_threads
from mlmclm.backends.cpu.loops import compiled
from mlmclm.backends.cpu.tile_instructions import (
    BLOCK,
    LINE,
    SHAPES,
    SIDE,
    available,
    configure,
    fetch,
    load,
    multiply,
    pair,
    put_floats,
    put_turned_floats,
    release,
    store,
    turn_values,
    turn_words,
    zero,
)
from mlmclm.backends.reference import Reference

DEPTH = 8 * SIDE
"""Length of a sum that is computed at once, so that SIDE rows of the left-hand side stay in the first-level cache."""
TOGETHER = 4
"""Blocks of SIDE columns that are transposed together: whole cache lines, several side by side."""
RIGHT_AT_ONCE = 1 << 20
"""Bytes of the right-hand side that all rows of the left one are multiplied with before the next part: half of the
second-level cache."""

_TORCH = Reference()

# Loops. `first` and `last` delimit the blocks of SIDE rows (or columns) that a thread works on.


@compiled(set())
def pack_columns(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """Pack the right-hand side of a product from its columns, which lie one after the other, `stride` apart."""
    steps = depth // SIDE
    for i in range(first, last):
        for j in range(steps):
            source, target = matrix + i * SIDE * stride + j * 64, packed + (i * steps + j) * BLOCK
            turn_words(source, stride, target, 64)
            turn_words(source + 16 * stride, stride, target + BLOCK // 2, 64)


@compiled(set())
def pack_rows(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """Pack the right-hand side of a product from its rows, which lie one after the other, `stride` apart."""
    steps = depth // SIDE
    for j in range(steps):
        for i in range(first, last):
            source, target = matrix + j * SIDE * stride + i * 64, packed + (i * steps + j) * BLOCK
            for p in range(16):
                row = source + 2 * p * stride
                pair(row, row + stride, target + 64 * p, target + BLOCK // 2 + 64 * p)


@compiled(set())
def pack_left(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """Pack a left-hand side stored transposed, [depth, rows]: SIDE rows after SIDE rows, in them block after block."""
    steps = depth // SIDE
    for j in range(steps):
        for i in range(first, last):
            turn_values(matrix + j * SIDE * stride + i * 64, stride, packed + ((i - first) * steps + j) * BLOCK, 64)


@compiled(set())
def multiply_panel(
    left: int, stride: int, step: int, right: int, apart: int, steps: int, columns: int,
    sums: int, sums_stride: int, add: bool,
) -> None:  # fmt: skip
    """Multiply SIDE rows by all columns, in fp32; tiles must be configured.

    Args:
        left: address of rows `stride` apart; in a row, each SIDE values are `step` apart.
        right: address of the packed right-hand side; each SIDE columns are `apart` apart.
        steps: depth, in units of SIDE.
        columns: number of columns, in units of SIDE.
        sums: address of fp32 [SIDE, columns], rows `sums_stride` apart; the product overwrites them or, if `add`, is
            added.
    """
    # Tiles 0 to 3 hold the sums of a block of SIDE x SIDE, tiles 4 and 5 the left-hand side, 6 and 7 the right-hand
    # side.
    for j in range(columns):
        a, b, c = left, right + j * apart, sums + j * 4 * SIDE
        below = c + 16 * sums_stride
        if add:
            load(0, c, sums_stride)
            load(1, c + 64, sums_stride)
            load(2, below, sums_stride)
            load(3, below + 64, sums_stride)
        else:
            zero(0)
            zero(1)
            zero(2)
            zero(3)
        for _ in range(steps):
            # Prefetches of the next block are spread between the tile instructions, so that both proceed together.
            following = b + BLOCK
            for line in range(8):
                fetch(following + 64 * line)
            load(4, a, stride)
            for line in range(8, 16):
                fetch(following + 64 * line)
            load(6, b, 64)
            multiply(0, 4, 6)
            for line in range(16, 24):
                fetch(following + 64 * line)
            load(7, b + BLOCK // 2, 64)
            multiply(1, 4, 7)
            for line in range(24, 32):
                fetch(following + 64 * line)
            load(5, a + 16 * stride, stride)
            multiply(2, 5, 6)
            multiply(3, 5, 7)
            a += step
            b = following
        store(0, c, sums_stride)
        store(1, c + 64, sums_stride)
        store(2, below, sums_stride)
        store(3, below + 64, sums_stride)


@compiled(set())
def _sum_products(
    wide: int, wide_stride: int, packed: int, depth: int, at_once: int, columns: int,
    output: int, output_stride: int, turned: bool, add: bool, scratch: int, shapes: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute output (+)= wide' narrow.

    Args:
        wide: [depth, rows].
        packed: the narrow matrix [depth, columns], packed separately for each DEPTH of the depth.
        at_once: part of the depth that is processed at once, a multiple of DEPTH.
        columns: number of columns, in units of SIDE.
        output: fp32 [rows, columns], or its transpose if `turned`.
        scratch: room for SIDE rows of sums, followed by TOGETHER * SIDE packed rows of `wide`.
    """
    configure(shapes)
    # A line more than the sums need, see LINE.
    apart = 4 * SIDE * columns + LINE
    panels = scratch + SIDE * apart
    for begin in range(0, depth, at_once):
        part = min(at_once, depth - begin)
        for start in range(first, last, TOGETHER):
            stop = min(start + TOGETHER, last)
            pack_left(wide + begin * wide_stride, wide_stride, part, start, stop, panels)
            for i in range(start, stop):
                for k in range(0, part, DEPTH):
                    steps = min(DEPTH, part - k) // SIDE
                    left = panels + ((i - start) * (part // SIDE) + k // SIDE) * BLOCK
                    right = packed + (begin + k) * columns * 2 * SIDE
                    multiply_panel(left, 64, BLOCK, right, steps * BLOCK, steps, columns, scratch, apart, k > 0)
                more = add or begin > 0
                for j in range(columns):
                    for a in range(2):
                        for b in range(2):
                            sums = scratch + j * 4 * SIDE + 16 * a * apart + 64 * b
                            if turned:
                                target = output + (j * SIDE + 16 * b) * output_stride + i * 4 * SIDE + 64 * a
                                put_turned_floats(sums, apart, target, output_stride, more)
                            else:
                                target = output + (i * SIDE + 16 * a) * output_stride + j * 4 * SIDE + 64 * b
                                put_floats(sums, apart, target, output_stride, more)
    release()


# Functions that the rest of the package calls.


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad' x, [outputs, inputs] in `dtype`: the gradient of a linear layer's weight.

    Args:
        grad: gradient of the layer's output, [T, outputs].
        x: the layer's input, [T, inputs].
    """
    out = torch.empty(grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    add_weight_gradient(grad, x, out, first=True)
    return out


def add_weight_gradient(left: Tensor, right: Tensor, out: Tensor, *, first: bool) -> None:
    """Add left' right to `out`, for [T, outputs] and [T, inputs]; the `first` product overwrites `out` instead."""
    if not _fits(left, right, out):
        _TORCH.add_weight_gradient(left, right, out, first=first)
        return
    # The narrower matrix is the packed right-hand side, which all threads share; the wider one is divided among them.
    turned = left.shape[1] < right.shape[1]
    wide, narrow = (right, left) if turned else (left, right)
    depth, columns = narrow.shape
    at_once = max(DEPTH, RIGHT_AT_ONCE // (2 * columns) // DEPTH * DEPTH)
    packed = torch.empty(depth * columns, dtype=torch.bfloat16)

    def pack(start: int, stop: int) -> None:
        for begin in range(0, depth, DEPTH):
            rows = narrow.data_ptr() + 2 * begin * narrow.stride(0)
            part = min(DEPTH, depth - begin)
            pack_rows(rows, 2 * narrow.stride(0), part, start, stop, packed.data_ptr() + 2 * begin * columns)

    def work(start: int, stop: int) -> None:
        panels = TOGETHER * SIDE * min(depth, at_once)
        scratch = torch.empty(SIDE * (columns + LINE // 4) + panels // 2)
        _sum_products(
            wide.data_ptr(), 2 * wide.stride(0), packed.data_ptr(), depth, at_once, columns // SIDE,
            out.data_ptr(), 4 * out.stride(0), turned, not first, scratch.data_ptr(), SHAPES, start, stop,
        )  # fmt: skip

    over_threads(pack, columns // SIDE, depth * columns)
    over_threads(work, wide.shape[1] // SIDE, depth * wide.shape[1])


def _fits(left: Tensor, right: Tensor, out: Tensor) -> bool:
    return (
        left.dtype == right.dtype == torch.bfloat16
        and out.dtype == torch.float32
        and not any(size % SIDE or not size for size in (*left.shape, right.shape[1]))
        and left.stride(1) == right.stride(1) == out.stride(1) == 1
        and available()
    )
