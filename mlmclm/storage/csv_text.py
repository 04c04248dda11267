"""CSV that a spreadsheet shows as it is: no text in it is taken for a formula.

A text that begins with = + - @, a tab, a carriage return or an apostrophe has an apostrophe put in front, unless it is a number.
"""

from __future__ import annotations

import csv
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

MARK = "'"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", MARK)


def safe_cell(value: Any) -> Any:
    """Return a value as it is written to a CSV file; only texts change."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return MARK + value
    return value


def csv_text(frame: pd.DataFrame) -> str:
    """Return a table as the text of a CSV file, without its index."""
    texts: dict[str, Any] = {
        str(name): column.map(safe_cell) for name, column in frame.items() if column.dtype.kind == "O"
    }
    safe = frame.assign(**texts).rename(columns=safe_cell)
    # Other programs end a line at a carriage return, but by default the writer does not quote a text because of one.
    cells = chain(safe.columns, *texts.values())
    returns = any(isinstance(value, str) and "\r" in value for value in cells)
    quoting: Literal[0, 2] = csv.QUOTE_NONNUMERIC if returns else csv.QUOTE_MINIMAL
    return str(safe.to_csv(index=False, lineterminator="\n", quoting=quoting))
