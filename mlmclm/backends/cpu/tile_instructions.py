"""Tile instructions of Intel's CPUs (AMX) for numba's loops, and vector instructions that arrange matrices for them."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mlmclm.backends.cpu.loops import target_features
from mlmclm.backends.device_kinds import BACKEND

SIDE = 32
"""Rows and columns of the block of sums that is held in registers, and number of values that are multiplied at once."""
BLOCK = 2 * SIDE * SIDE
"""Bytes of SIDE x SIDE values."""
LINE = 64
"""Bytes of a cache line. Rows of matrices in scratch memory are a line longer than needed; otherwise their rows would
compete for a few places of the cache."""
_FEATURES = ("amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Arguments of the system call by which a process asks Linux on x86-64 for permission to use tiles."""


def available() -> bool:
    """Return whether this process uses tiles: it may, and the user has not chosen the backend without them."""
    # Read at each call, as in `backend_of`: only the permission is cached.
    return os.environ.get(BACKEND) != "cpu" and _permitted()


@lru_cache(maxsize=1)
def _permitted() -> bool:
    """Return whether numba compiles for tile instructions, this CPU has them, and the system permits their use."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(feature) and feature in target_features() for feature in _FEATURES):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


# Instructions. Addresses and strides are integers, in bytes; tiles are numbered 0 to 7.

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_HALVES, _WORDS = ir.VectorType(_I16, 32), ir.VectorType(_I32, 16)


def _address(builder: Any, value: Any, kind: Any = _I8) -> Any:
    return builder.inttoptr(value, kind.as_pointer())


def _instruction(name: str, tiles: int, addresses: int) -> Any:
    """Return the code generator for an LLVM intrinsic on tiles: their numbers, maybe an address, maybe a stride."""
    kinds = [_I8] * tiles + [_I8.as_pointer(), _I64][:addresses]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # Tile numbers are part of the instruction, so they must be literals.
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
    """Configure the tiles' shapes from the 64 bytes at an address."""
    return types.void(types.intp), _instruction("ldtilecfg", 0, 1)


@intrinsic(prefer_literal=True)
def release(_: Any) -> Any:
    """Release the tiles, which are not needed any more."""
    return types.void(), _instruction("tilerelease", 0, 0)


@intrinsic(prefer_literal=True)
def zero(_: Any, tile: Any) -> Any:
    """Set a tile to 0."""
    return types.void(tile), _instruction("tilezero", 1, 0)


@intrinsic(prefer_literal=True)
def load(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Load 16 rows of 64 bytes into a tile."""
    return types.void(tile, types.intp, types.intp), _instruction("tileloadd64", 1, 2)


@intrinsic(prefer_literal=True)
def store(_: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Store a tile as 16 rows of 64 bytes."""
    return types.void(tile, types.intp, types.intp), _instruction("tilestored64", 1, 2)


@intrinsic(prefer_literal=True)
def multiply(_: Any, sums: Any, left: Any, right: Any) -> Any:
    """Compute sums += left right, for tiles of 16 x 16 fp32, 16 x 32 bfloat16 and (16 pairs of rows) x 16 bfloat16."""
    return types.void(sums, left, right), _instruction("tdpbf16ps", 3, 0)


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """Prefetch a cache line; any address is allowed."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [_I8.as_pointer(), _I32, _I32, _I32]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        # To read, into all levels, from the data cache.
        builder.call(function, [_address(builder, values[0]), *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _shuffle(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_address(builder, address, kind), align=2)  # bfloat16 rows may begin at any even address


def _write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _address(builder, address, value.type), align=2)


def _rows(builder: Any, address: Any, stride: Any, numbers: range) -> list[Any]:
    return [builder.add(address, builder.mul(stride, ir.Constant(_I64, number))) for number in numbers]


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 rows of 16 words: halves, quarters, ... change places."""
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
"""Orders that pair two rows of 32 values element by element: the first 16 pairs, and the last 16."""
_FOUR = (types.intp,) * 4


@intrinsic
def turn_words(_: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose 16 rows of 16 words."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, target, target_stride = values
        rows = [_read(builder, row, _WORDS) for row in _rows(builder, source, source_stride, range(16))]
        for row, place in zip(_turned(builder, rows), _rows(builder, target, target_stride, range(16)), strict=True):
            _write(builder, row, place)
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


def _put_floats(turned: bool) -> Any:
    """Return the code generator that writes 16 rows of 16 floats, transposed if `turned`, or adds them to others."""

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
    """Write 16 rows of 16 floats, or add them to others."""
    return types.void(*_FOUR, types.boolean), _put_floats(turned=False)


@intrinsic
def put_turned_floats(_: Any, source: Any, source_stride: Any, target: Any, stride: Any, add: Any) -> Any:
    """Write 16 rows of 16 floats transposed, or add them to others."""
    return types.void(*_FOUR, types.boolean), _put_floats(turned=True)


@intrinsic
def turn_values(_: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose 32 rows of 32 16-bit values."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, target, target_stride = values
        lines = [_read(builder, row, _HALVES) for row in _rows(builder, source, source_stride, range(32))]
        for order, places in ((_LOW, range(16)), (_HIGH, range(16, 32))):
            # A word holds two adjacent rows' values of one column, so that transposing words transposes values.
            pairs = [_shuffle(builder, lines[i], lines[i + 1], order) for i in range(0, 32, 2)]
            rows = _turned(builder, [builder.bitcast(pair, _WORDS) for pair in pairs])
            for row, place in zip(rows, _rows(builder, target, target_stride, places), strict=True):
                _write(builder, row, place)
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


@intrinsic
def pair(_: Any, first: Any, second: Any, low: Any, high: Any) -> Any:
    """Write two rows of 32 values as 16 and 16 pairs."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first, second = (_read(builder, value, _HALVES) for value in values[:2])
        _write(builder, _shuffle(builder, first, second, _LOW), values[2])
        _write(builder, _shuffle(builder, first, second, _HIGH), values[3])
        return context.get_dummy_value()

    return types.void(*_FOUR), generate


@intrinsic
def round_row(_: Any, source: Any, target: Any) -> Any:
    """Round 32 floats to bfloat16, to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        floats, rounded = ir.VectorType(_F32, 16), ir.VectorType(BFloat(), 32)
        low, high = (_read(builder, builder.add(values[0], ir.Constant(_I64, offset)), floats) for offset in (0, 64))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(rounded, [floats, floats]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        _write(builder, builder.bitcast(builder.call(function, [high, low]), _HALVES), values[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


# At module level, because the compiled loops hold its address.
_shapes = np.zeros(64, np.uint8)
_shapes[0] = 1
_shapes[16:32:2] = 64  # bytes in a row of each tile
_shapes[48:56] = 16  # rows
SHAPES = int(_shapes.ctypes.data)
"""Address of the configuration: eight tiles of 16 rows of 64 bytes."""
