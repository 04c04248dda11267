"""The tables of all statistics: of this package, registered ones, and those of other packages (`mlmclm.registry`)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.errors import UserError
from mlmclm.registry import KINDS, Registry
from mlmclm.storage.csv_text import csv_text

STATISTICS: Registry[Callable[[Analysis], pd.DataFrame]] = KINDS["statistic"]
"""The statistics by name: functions from an analysis to a table."""
TAKEN = ("report", "results", "zero_shot", "pairs", "tested_claims")
"""Names of the report's files, beside those of the tables of an `Analysis`."""


class Tables(NamedTuple):
    """The tables of statistics by name, and why others are left out."""

    every: dict[str, pd.DataFrame]
    left_out: tuple[str, ...]

    @property
    def added(self) -> dict[str, pd.DataFrame]:
        """Those that are not of this package, which the report shows as they are."""
        return {name: table for name, table in self.every.items() if not STATISTICS.is_built_in(name)}

    @property
    def absent(self) -> set[str]:
        """The names of the tables that there could be and are not."""
        return {*STATISTICS} - self.every.keys()


def statistics_of(analysis: Analysis) -> Tables:
    """Return the tables of all statistics, without those that fail or return something else than they should."""

    def table(name: str, statistic: Callable[[Analysis], pd.DataFrame]) -> pd.DataFrame:
        if STATISTICS.is_built_in(name):
            return getattr(analysis, name)
        if name in TAKEN or hasattr(analysis, name):
            raise UserError("another table of the report has this name; rename it.")
        found = statistic(deepcopy(analysis))  # it may change its tables, such as by a column more
        if not isinstance(found, pd.DataFrame) or not found.columns.is_unique:
            raise UserError(
                f"returns a {type(found).__name__}; expected a pandas DataFrame with a name for each column."
            )
        if found.empty:
            raise UserError("returns an empty table.")
        csv_text(found)  # fails here, and not as the report is written, where a value has no text
        return found

    tables, absent = STATISTICS.each(table)
    return Tables(tables, tuple(absent))
