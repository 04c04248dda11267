"""Statistics and claims that are added to a study's own; registered, or of another package (`mlmclm.registry`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.errors import UserError
from mlmclm.registry import KINDS, Registry

Word = Literal["holds", "in part", "does not hold", "unknown"]


class Verdict(NamedTuple):
    """A claim's verdict by the results."""

    verdict: Word
    reason: str


STATISTICS: Registry[Callable[[Analysis], pd.DataFrame]] = KINDS["statistic"]
"""The added statistics by name: functions from an analysis to a table."""
CLAIMS: Registry[Callable[[Analysis], Verdict]] = KINDS["claim"]
"""The added claims by name: functions from an analysis to a verdict."""


TAKEN = ("report", "results", "zero_shot", "pairs", "tested_claims", "verdicts")
"""Names of the report's files, beside those of the tables of an `Analysis`."""


class Added(NamedTuple):
    """The tables that are added to a report, and why others are left out."""

    tables: dict[str, pd.DataFrame]
    left_out: tuple[str, ...]

    @property
    def absent(self) -> set[str]:
        """The names of the tables that there could be and are not."""
        return {*STATISTICS, "verdicts"} - self.tables.keys()


def added_tables(analysis: Analysis) -> Added:
    """Return the tables of added statistics by name, and of added claims as `verdicts`.

    A statistic or a claim that fails, or returns something else than it should, is left out.
    """

    def table(name: str, statistic: Callable[[Analysis], pd.DataFrame]) -> pd.DataFrame:
        if name in TAKEN or hasattr(analysis, name):
            raise UserError("another table of the report has this name; rename it.")
        found = statistic(analysis)
        if not isinstance(found, pd.DataFrame) or not found.columns.is_unique:
            raise UserError(f"returns {_kind(found)}; expected a pandas DataFrame with a name for each column.")
        if found.empty:
            raise UserError("returns an empty table.")
        return found

    def verdict(name: str, claim: Callable[[Analysis], Verdict]) -> Verdict:
        found = claim(analysis)
        if not isinstance(found, Verdict) or found.verdict not in get_args(Word):
            words = ", ".join(map(repr, get_args(Word)))
            raise UserError(f"returns {_kind(found)}; expected a mlmclm.analysis.additions.Verdict: {words}.")
        return found

    tables, absent = STATISTICS.each(table)
    verdicts, unknown = CLAIMS.each(verdict)
    if verdicts:
        tables["verdicts"] = pd.DataFrame([{"claim": name, **found._asdict()} for name, found in verdicts.items()])
    return Added(tables, (*absent, *unknown))


def _kind(value: object) -> str:
    return repr(value) if isinstance(value, Verdict) else f"a {type(value).__name__}"
