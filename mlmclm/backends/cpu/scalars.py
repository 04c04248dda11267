"""Functions of one value or row, which numba inlines into the loops of this folder, and constants of these loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from mlmclm.backends.cpu.loops import Array, compiled

SUMS = {"reassoc", "contract", "nsz", "arcp"}
"""fastmath flags of loops that sum: without `nnan` and `ninf`, so that values that are not finite stay so."""
FAST = {"contract", "nsz", "arcp"}
"""fastmath flags of the other loops: no reordering of sums."""
ZERO, ONE = np.float32(0), np.float32(1)
"""Constants for the loops: numba computes fp32 mixed with Python's integers in float64."""


@intrinsic
def _float_of_bits(_: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.FloatType()
    )


@intrinsic
def _bits_of_float(_: Any, value: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.IntType(32)
    )


@intrinsic
def _rounded_bits(_: Any, value: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even.

    Computed with integers: on CPUs without an instruction for it, LLVM's own rounding calls a function that numba
    doesn't have.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(values[0], word)
        upper = builder.lshr(bits, word(16))
        half = builder.add(builder.and_(upper, word(1)), word(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), word(16))
        quiet = builder.or_(upper, word(0x40))  # a NaN with an empty upper half would become infinite
        return builder.trunc(
            builder.select(builder.fcmp_unordered("uno", values[0], values[0]), quiet, rounded), ir.IntType(16)
        )

    return types.uint16(types.float32), generate


@intrinsic
def _fused(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    kind = types.float32
    return kind(kind, kind, kind), lambda context, builder, signature, values: builder.fma(*values)


@intrinsic
def _maximum(_: Any, first: Any, second: Any) -> Any:
    """Return the larger of two floats, NaN if one is; numba's own `max` keeps loops from being vectorised."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = context.get_value_type(first)
        name = f"llvm.maximum.{'f64' if first == types.float64 else 'f32'}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), name)
        return builder.call(function, values)

    return first(first, first), generate


def wide(value: Any) -> Any:
    """Return an array's element as a float: fp32 for the bits of a bfloat16."""


@overload(wide)
def _overload_wide(value: Any) -> Any:
    def of_bits(value: Any) -> Any:
        # A bfloat16 is the upper half of an fp32.
        return _float_of_bits(np.uint32(value) << np.uint32(16))

    def same(value: Any) -> Any:
        return value

    return of_bits if value == types.uint16 else same


def put(row: Any, index: Any, value: Any) -> None:
    """Write a float into an array; bfloat16 is rounded to the nearest, ties to even."""


@overload(put)
def _overload_put(row: Any, index: Any, value: Any) -> Any:
    def as_bits(row: Any, index: Any, value: Any) -> None:
        row[index] = _rounded_bits(np.float32(value))

    def same(row: Any, index: Any, value: Any) -> None:
        row[index] = value

    return as_bits if row.dtype == types.uint16 else same


_LOG2_E = np.float32(1 / math.log(2))
_LOG2_E_REST = np.float32(1 / math.log(2) - float(_LOG2_E))
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))
"""Taylor coefficients of 2^f; the next term is below 2e-7 for |f| <= 1/2."""
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_SHIFT = np.float32(3 << 22)
"""A float of this size has no fraction: adding it rounds to the nearest integer."""


def exp(value: Any) -> Any:
    """Return e^value; in fp32 the value is clamped to -87 ... 88."""


@overload(exp, jit_options={"fastmath": FAST})
def _overload_exp(value: Any) -> Any:
    def double(value: Any) -> Any:
        return math.exp(value)

    def single(value: Any) -> Any:
        # e^x = 2^(x log2 e) = 2^whole * 2^f. The second constant holds what the first loses to rounding.
        x = _LOWEST if value < _LOWEST else value
        x = _HIGHEST if x > _HIGHEST else x
        shifted = x * _LOG2_E + _SHIFT
        whole = shifted - _SHIFT
        f = _fused(x, _LOG2_E, -whole) + x * _LOG2_E_REST
        power = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
        # The last bits of `shifted` are the integer; plus 127 it is the exponent of a power of two.
        return power * _float_of_bits((_bits_of_float(shifted) << np.uint32(23)) + np.uint32(127 << 23))

    return double if value == types.float64 else single


@compiled(SUMS)
def largest_of(row: Array) -> Any:
    """Return the largest element of a row as a float, NaN if it has one."""
    largest = wide(row[0])
    for i in range(row.shape[0]):
        largest = _maximum(largest, wide(row[i]))
    return largest
