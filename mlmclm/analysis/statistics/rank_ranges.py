"""Ranks of a study's models."""

from __future__ import annotations

import math

import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import clearly_different
from mlmclm.analysis.model_ranks import rank_range
from mlmclm.analysis.results import columns, records, table

COLUMNS = columns("object: model", "int64: tasks", "float64: mean", "int64: rank rank_low rank_high")


def ranks(analysis: Analysis) -> pd.DataFrame:
    """Return the rank of each model by its mean over tasks, with the ranks that it may have by the comparisons of these means."""
    rows = [row for row in records(analysis.overall) if row["kind"] == "all" and not math.isnan(row["mean"])]
    rows.sort(key=lambda row: (-row["mean"], row["model"]))
    clear = {
        (row["model_a"], row["model_b"]) if row["difference"] > 0 else (row["model_b"], row["model_a"])
        for row in records(analysis.comparisons)
        if row["kind"] == "all" and clearly_different(row, analysis.confidence)
    }
    ranked = []
    for rank, row in enumerate(rows, 1):
        low, high = rank_range(row["model"], len(rows), clear)
        totals = {"model": row["model"], "tasks": row["tasks"], "mean": row["mean"]}
        ranked.append(totals | {"rank": rank, "rank_low": low, "rank_high": high})
    return table(ranked, COLUMNS)
