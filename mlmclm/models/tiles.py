"""Products of bfloat16 matrices by the tile instructions of Intel's CPUs (AMX), as loops that numba compiles.

One instruction multiplies 16 rows of 32 values with 32 rows of 16 and adds to 16 x 16 sums in fp32. oneDNN, whose products torch calls, keeps
these instructions busy where rows of a large matrix meet columns of another. Here is what it does at a quarter to a half of that: products
that sum over rows, which are a linear layer's weight gradients, and the parts that attention (`tile_attention`) is made of. What is
multiplied is brought into the order that the instruction wants while it lies in a core's cache, and the next part of the right-hand
side is asked for while the one before it is multiplied.

Where the CPU has no such instructions, or a shape is no multiple of 32, products are torch's.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from mlmclm.models.kernels import BFloat, compiled, over_threads

SIDE = 32
"""Rows and columns of the sums that are kept in registers, and values that are multiplied at once."""
BLOCK = 2 * SIDE * SIDE
"""Bytes of SIDE x SIDE values."""
LINE = 64
"""Bytes of a line of the cache; matrices in scratch memory have one more a row, lest their rows share few places of the cache."""
DEPTH = 8 * SIDE
"""What is summed over at once, so that SIDE rows of the left-hand side stay in the first-level cache."""
TOGETHER = 4
"""SIDEs of columns that are transposed together: whole lines of the cache, and some beside each other."""
RIGHT_AT_ONCE = 1 << 20
"""Bytes of the right-hand side that all rows of the left one are multiplied with before the next: half of the second-level cache."""

_FEATURES = ("amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64 lets a process use tiles once it has asked."""


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this process may multiply by tiles."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(feature) for feature in _FEATURES):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


# Instructions. Addresses and strides are whole numbers, in bytes; tiles are numbered 0 to 7.

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_HALVES, _WORDS = ir.VectorType(_I16, 32), ir.VectorType(_I32, 16)


def _address(builder: Any, value: Any, kind: Any = _I8) -> Any:
    return builder.inttoptr(value, kind.as_pointer())


def _instruction(name: str, tiles: int, addresses: int) -> Any:
    """An intrinsic of LLVM on tiles: their numbers, then maybe an address, then maybe a stride."""
    kinds = [_I8] * tiles + [_I8.as_pointer(), _I64][:addresses]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = [ir.Constant(_I8, kind.literal_value) for kind in signature.args[:tiles]]
        where = [_address(builder, values[tiles]), *values[tiles + 1 :]] if addresses else []
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}"
        )
        builder.call(function, [*numbers, *where])
        return context.get_dummy_value()

    return generate


@intrinsic(prefer_literal=True)
def configure(_: Any, address: Any) -> Any:
    """Shapes of tiles, from the 64 bytes at an address."""
    return types.void(types.intp), _instruction("ldtilecfg", 0, 1)


@intrinsic(prefer_literal=True)
def release(_: Any) -> Any:
    """Tiles are not needed any more."""
    return types.void(), _instruction("tilerelease", 0, 0)


@intrinsic(prefer_literal=True)
def zero(_: Any, tile: Any) -> Any:
    """tile = 0."""
    return types.void(tile), _instruction("tilezero", 1, 0)


@intrinsic(prefer_literal=True)
def load(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """16 rows of 64 bytes into a tile."""
    return types.void(tile, types.intp, types.intp), _instruction("tileloadd64", 1, 2)


@intrinsic(prefer_literal=True)
def store(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """A tile into 16 rows of 64 bytes."""
    return types.void(tile, types.intp, types.intp), _instruction("tilestored64", 1, 2)


@intrinsic(prefer_literal=True)
def multiply(_: Any, sums: Any, left: Any, right: Any) -> Any:
    """sums += left right, for tiles of 16 x 16 fp32, 16 x 32 bfloat16 and (16 pairs of rows) x 16 bfloat16."""
    return types.void(sums, left, right), _instruction("tdpbf16ps", 3, 0)


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """Asks for a line of the cache, which may lie anywhere."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [_I8.as_pointer(), _I32, _I32, _I32]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        builder.call(function, [_address(builder, values[0]), *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _shuffle(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_address(builder, address, kind), align=2)


def _write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _address(builder, address, value.type), align=2)


def _rows(builder: Any, address: Any, stride: Any, numbers: range) -> list[Any]:
    return [builder.add(address, builder.mul(stride, ir.Constant(_I64, number))) for number in numbers]


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """16 rows of 16 words as their columns: halves, quarters, ... change places."""
    for step in (8, 4, 2, 1):
        low = [16 + c - step if c & step else c for c in range(16)]
        high = [16 + c if c & step else c + step for c in range(16)]
        for i in range(16):
            if not i & step:
                first, second = rows[i], rows[i + step]
                rows[i] = _shuffle(builder, first, second, low)
                rows[i + step] = _shuffle(builder, first, second, high)
    return rows


_LOW, _HIGH = ([place for i in range(start, start + 16) for place in (i, 32 + i)] for start in (0, 16))
"""Two rows of 32 values in pairs, one above the other."""
_FOUR = (types.intp,) * 4


@intrinsic
def turn_words(_: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """16 rows of 16 words, transposed."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, target, target_stride = values
        rows = [_read(builder, row, _WORDS) for row in _rows(builder, source, source_stride, range(16))]
        for row, place in zip(_turned(builder, rows), _rows(builder, target, target_stride, range(16)), strict=True):
            _write(builder, row, place)
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


def _put_floats(turned: bool) -> Any:
    """16 rows of 16 floats, maybe transposed, written to or added to others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, target, stride, add = values
        kind = ir.VectorType(_F32, 16)
        rows = [_read(builder, row, kind) for row in _rows(builder, source, source_stride, range(16))]
        rows = _turned(builder, rows) if turned else rows
        places = _rows(builder, target, stride, range(16))
        with builder.if_else(builder.trunc(add, ir.IntType(1))) as (then, otherwise):
            with then:
                for row, place in zip(rows, places, strict=True):
                    _write(builder, builder.fadd(row, _read(builder, place, kind)), place)
            with otherwise:
                for row, place in zip(rows, places, strict=True):
                    _write(builder, row, place)
        return context.get_dummy_value()

    return generate


@intrinsic
def put_floats(_: Any, source: Any, source_stride: Any, target: Any, stride: Any, add: Any) -> Any:
    """16 rows of 16 floats, written or added to others."""
    return types.void(*_FOUR, types.boolean), _put_floats(turned=False)


@intrinsic
def put_turned_floats(_: Any, source: Any, source_stride: Any, target: Any, stride: Any, add: Any) -> Any:
    """The same transposed."""
    return types.void(*_FOUR, types.boolean), _put_floats(turned=True)


@intrinsic
def turn_values(_: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """32 rows of 32 values of 16 bits, transposed."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, target, target_stride = values
        lines = [_read(builder, row, _HALVES) for row in _rows(builder, source, source_stride, range(32))]
        for order, places in ((_LOW, range(16)), (_HIGH, range(16, 32))):
            pairs = [_shuffle(builder, lines[i], lines[i + 1], order) for i in range(0, 32, 2)]
            rows = _turned(builder, [builder.bitcast(pair, _WORDS) for pair in pairs])
            for row, place in zip(rows, _rows(builder, target, target_stride, places), strict=True):
                _write(builder, row, place)
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


@intrinsic
def pair(_: Any, first: Any, second: Any, low: Any, high: Any) -> Any:
    """Two rows of 32 values as 16 and 16 pairs."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first, second = (_read(builder, value, _HALVES) for value in values[:2])
        _write(builder, _shuffle(builder, first, second, _LOW), values[2])
        _write(builder, _shuffle(builder, first, second, _HIGH), values[3])
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


@intrinsic
def round_row(_: Any, source: Any, target: Any) -> Any:
    """32 floats as bfloat16, to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        floats, rounded = ir.VectorType(_F32, 16), ir.VectorType(BFloat(), 32)
        low, high = (_read(builder, builder.add(values[0], ir.Constant(_I64, offset)), floats) for offset in (0, 64))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(rounded, [floats, floats]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        _write(builder, builder.bitcast(builder.call(function, [high, low]), _HALVES), values[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_shapes = np.zeros(64, np.uint8)
_shapes[0] = 1
_shapes[16:32:2] = 64  # bytes in a row of each tile
_shapes[48:56] = 16  # rows
SHAPES = int(_shapes.ctypes.data)
"""Address of the configuration: eight tiles of 16 rows of 64 bytes."""


# Loops. `first` and `last` count blocks of SIDE rows (or columns) that a thread works on.


@compiled(set())
def pack_columns(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """The right-hand side of a product from its columns, which lie one after the other, `stride` apart."""
    steps = depth // SIDE
    for i in range(first, last):
        for j in range(steps):
            source, target = matrix + i * SIDE * stride + j * 64, packed + (i * steps + j) * BLOCK
            turn_words(source, stride, target, 64)
            turn_words(source + 16 * stride, stride, target + BLOCK // 2, 64)


@compiled(set())
def pack_rows(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """The same from its rows."""
    steps = depth // SIDE
    for j in range(steps):
        for i in range(first, last):
            source, target = matrix + j * SIDE * stride + i * 64, packed + (i * steps + j) * BLOCK
            for p in range(16):
                row = source + 2 * p * stride
                pair(row, row + stride, target + 64 * p, target + BLOCK // 2 + 64 * p)


@compiled(set())
def pack_left(matrix: int, stride: int, depth: int, first: int, last: int, packed: int) -> None:
    """A left-hand side that lies transposed, [depth, rows]: SIDE rows after SIDE rows, and in them block after block."""
    steps = depth // SIDE
    for j in range(steps):
        for i in range(first, last):
            turn_values(matrix + j * SIDE * stride + i * 64, stride, packed + ((i - first) * steps + j) * BLOCK, 64)


@compiled(set())
def multiply_panel(
    left: int, stride: int, step: int, right: int, apart: int, steps: int, columns: int,
    sums: int, sums_stride: int, add: bool,
) -> None:  # fmt: skip
    """SIDE rows times all columns, in fp32; tiles must be configured.

    Args:
        left: rows `stride` apart, SIDE values of a row `step`.
        right: packed, SIDE columns `apart`.
        steps: SIDEs of the depth.
        columns: in SIDEs.
        sums: [SIDE, columns] fp32, rows `sums_stride` apart, which the product is written or added to.
    """
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
    """output (+)= wide' narrow.

    Args:
        wide: [depth, rows].
        packed: the narrow matrix [depth, columns], packed for each DEPTH of the depth.
        at_once: of the depth, a multiple of DEPTH.
        columns: in SIDEs.
        output: fp32 [rows, columns], or its transpose if `turned`.
        scratch: room for SIDE rows of sums, and after them for TOGETHER * SIDE rows of `wide`'s part.
    """
    configure(shapes)
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
                    sums = scratch + j * 4 * SIDE
                    lower = sums + 16 * apart
                    if turned:
                        target = output + j * SIDE * output_stride + i * 4 * SIDE
                        below = target + 16 * output_stride
                        put_turned_floats(sums, apart, target, output_stride, more)
                        put_turned_floats(sums + 64, apart, below, output_stride, more)
                        put_turned_floats(lower, apart, target + 64, output_stride, more)
                        put_turned_floats(lower + 64, apart, below + 64, output_stride, more)
                    else:
                        target = output + i * SIDE * output_stride + j * 4 * SIDE
                        below = target + 16 * output_stride
                        put_floats(sums, apart, target, output_stride, more)
                        put_floats(sums + 64, apart, target + 64, output_stride, more)
                        put_floats(lower, apart, below, output_stride, more)
                        put_floats(lower + 64, apart, below + 64, output_stride, more)
    release()


# What the rest of the package calls.


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad' x, [outputs, inputs] of `dtype`: the gradient of a linear layer's weight.

    Args:
        grad: of the layer's output, [T, outputs].
        x: the layer's input, [T, inputs].
    """
    out = torch.empty(grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    add_weight_gradient(grad, x, out, first=True)
    return out


def add_weight_gradient(left: Tensor, right: Tensor, out: Tensor, *, first: bool) -> None:
    """out += left' right for [T, outputs] and [T, inputs]; the `first` takes the place of what is there."""
    if not _fits(left, right, out):
        # Products of bfloat16 want their first factor untransposed, at twice the speed, so the narrow one is transposed.
        turned = left.shape[1] > right.shape[1]
        part = (right.t().contiguous() @ left).t() if turned else left.t().contiguous() @ right
        if first:
            out.copy_(part)
        else:
            out += part
        return
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
        left.device.type == "cpu"
        and left.dtype == right.dtype == torch.bfloat16
        and out.dtype == torch.float32
        and not any(size % SIDE or not size for size in (*left.shape, right.shape[1]))
        and left.stride(1) == right.stride(1) == out.stride(1) == 1
        and available()
    )
