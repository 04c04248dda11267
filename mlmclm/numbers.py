"""Numbers for people and for JSON, in formats that several packages share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NONE = "–"
"""Text in place of a number that does not exist."""


def rate_text(rate: float) -> str:
    """Format a learning rate as configurations write it: 3e-4, 1.5e-5."""
    if not math.isfinite(rate) or rate == 0:
        return f"{rate:g}"
    mantissa, exponent = f"{rate:.5e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def without_nan(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with None in place of NaN, which JSON doesn't have."""
    return {str(name): None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def count(value: float | None) -> str:
    """Format a large number with three digits: 4.92 M, 99.1 B; small numbers in full, with thousands separators."""
    if value is None or math.isnan(value):
        return NONE
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        # Starts half a unit of the last digit below the size, so that 999,999 is 1.00 M.
        if abs(value) >= size * 0.9995:
            share = value / size
            digits = 2 if abs(share) < 9.995 else 1 if abs(share) < 99.95 else 0
            return f"{share:.{digits}f} {unit}"
    return f"{value:,.0f}"


def plural(number: int, singular: str, several: str = "") -> str:
    """Format a number of things: 1 cell, 12 cells."""
    return f"{number:,} {singular if number == 1 else several or singular + 's'}"


def time_text(hours: float) -> str:
    """Format a duration in the largest unit of which there is at least one."""
    units = ((hours, "h"), (60 * hours, "min"), (3600 * hours, "s"))
    amount, unit = next((pair for pair in units if pair[0] >= 1), units[-1])
    return f"{amount:,.0f} {unit}" if amount >= 10 else f"{amount:.2g} {unit}"
