"""Scores by learning rate."""

from __future__ import annotations

import itertools
from operator import itemgetter

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.results import ANY_SCORE, columns, scored, seeds_of, table, wanted_seeds
from mlmclm.analysis.selection import of_both_splits

COLUMNS = columns(
    "object: model task metric",
    "float64: learning_rate",
    "int64: n diverged missing",
    "float64: validation_mean validation_low validation_high validation_sd test_mean test_low test_high test_sd",
)


def curves(analysis: Analysis) -> pd.DataFrame:
    """Tabulate score against learning rate, one row per (model, task, learning rate) that has any cell.

    `n` is the number of scored seeds; `diverged` and `missing` count the others. Mean, interval and standard deviation of validation
    and test scores are taken over the scored seeds.
    """
    wanted, rows = wanted_seeds(analysis.grid), []
    for (model, task), group in analysis.pairs.items():
        for rate, cells in itertools.groupby(group, itemgetter("learning_rate")):
            members = list(cells)
            scored_cells = [cell for cell in members if scored(cell)]
            rows.append(
                {
                    "model": model,
                    "task": task,
                    "metric": members[0]["metric"],
                    "learning_rate": rate,
                    "n": len(scored_cells),
                    "diverged": sum(cell["status"] == "diverged" for cell in members),
                    "missing": len(wanted - {seeds_of(cell) for cell in members}),
                    **of_both_splits(scored_cells, analysis.ranges.get(task, ANY_SCORE), analysis.confidence),
                }
            )
    return table(rows, COLUMNS)
