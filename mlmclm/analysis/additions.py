"""Statistics and claims that are added to a study's own; registered, or of another package (`mlmclm.registry`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.errors import UserError
from mlmclm.registry import KINDS, Registry


class Verdict(NamedTuple):
    """A claim's verdict by the results."""

    verdict: Literal["holds", "in part", "does not hold", "unknown"]
    reason: str


STATISTICS: Registry[Callable[[Analysis], pd.DataFrame]] = KINDS["statistic"]
"""The added statistics by name: functions from an analysis to a table."""
CLAIMS: Registry[Callable[[Analysis], Verdict]] = KINDS["claim"]
"""The added claims by name: functions from an analysis to a verdict."""


def added_tables(analysis: Analysis) -> dict[str, pd.DataFrame]:
    """Return the tables of added statistics by name, and of added claims as `verdicts`; empty where there are none.

    Raises:
        UserError: a statistic returns something else than a table, or a claim something else than a verdict.
    """
    tables = {name: STATISTICS[name](analysis) for name in STATISTICS}
    for name, table in tables.items():
        if not isinstance(table, pd.DataFrame) or name == "verdicts" or hasattr(analysis, name):
            raise UserError(f"statistic {name!r}: returns a pandas DataFrame, under a name that no other table has.")
    rows = [(name, CLAIMS[name](analysis)) for name in CLAIMS]
    for name, found in rows:
        if not isinstance(found, Verdict):
            raise UserError(f"claim {name!r}: returns a mlmclm.analysis.additions.Verdict, not {found!r}.")
    verdicts = pd.DataFrame([{"claim": name, **found._asdict()} for name, found in rows])
    return {**tables, **({"verdicts": verdicts} if rows else {})}
