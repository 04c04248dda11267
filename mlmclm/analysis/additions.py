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
"""Names of the report's other files, which no added statistic may have; the names of an `Analysis`'s tables are refused too."""


class Tables(NamedTuple):
    """The tables of statistics by name, and the reasons why others are left out."""

    every: dict[str, pd.DataFrame]
    left_out: tuple[str, ...]

    @property
    def added(self) -> dict[str, pd.DataFrame]:
        """The tables of statistics that this package does not define; the report shows them as they are."""
        return {name: table for name, table in self.every.items() if not STATISTICS.is_built_in(name)}

    @property
    def absent(self) -> set[str]:
        """The names of the statistics without a table."""
        return {*STATISTICS} - self.every.keys()


def statistics_of(analysis: Analysis) -> Tables:
    """Return the tables of all statistics; those that fail, or return no valid table, are left out with the reason."""

    def table(name: str, statistic: Callable[[Analysis], pd.DataFrame]) -> pd.DataFrame:
        if STATISTICS.is_built_in(name):
            return getattr(analysis, name)
        if name in TAKEN or hasattr(analysis, name):
            raise UserError("another table of the report has this name; rename it.")
        result = statistic(deepcopy(analysis))  # a statistic may change the tables that it gets
        if not isinstance(result, pd.DataFrame) or not result.columns.is_unique:
            raise UserError(
                f"returns a {type(result).__name__}; expected a pandas DataFrame with a name for each column."
            )
        if result.empty:
            raise UserError("returns an empty table.")
        csv_text(result)  # if a value has no text form, this fails here and not when the report is written
        return result

    tables, absent = STATISTICS.each(table)
    return Tables(tables, tuple(absent))
