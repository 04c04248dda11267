"""How often runs fail or diverge, compared between models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.failed_runs import unlike
from mlmclm.analysis.results import columns, table
from mlmclm.results.intervals import holm
from mlmclm.results.measures import Array

COLUMNS = columns("object: model_a model_b", "int64: failed_a runs_a failed_b runs_b", "float64: p p_holm")


def failures(analysis: Analysis) -> pd.DataFrame:
    """Compare how often runs fail or diverge, for every pair of models on all tasks on which both have runs.

    Rates at which a model loses every run, and not by chance, are left out. `p` is that of Fisher's exact test, stratified by
    task and learning rate (`unlike`), and `p_holm` the same after Holm's correction over the pairs; both are NaN
    where no run is lost, since nothing is tested.
    """
    numbers: dict[str, dict[tuple[str, float], Array]] = {model: {} for model in analysis.groups}
    for (run, task), runs in analysis.runs.items():
        kept = np.ones(len(runs.rates), bool) if runs.hopeless is None else ~runs.hopeless
        counts = np.stack(((runs.failed | (runs.ran & ~runs.present)).sum(axis=1), runs.ran.sum(axis=1))) * kept
        for rate, count in zip(runs.rates, counts.T, strict=True):
            total = numbers[analysis.model_of[run]].setdefault((task, rate), np.zeros(2, int))
            total += count
    rows = []
    for one, other in itertools.combinations(sorted(numbers), 2):
        keys = [key for key, count in numbers[one].items() if count[1] and numbers[other].get(key, np.zeros(2))[1]]
        first, second = (np.asarray([numbers[model][key] for key in keys]).reshape(-1, 2).T for model in (one, other))
        counts = [*first.sum(axis=1).tolist(), *second.sum(axis=1).tolist()]
        p = unlike(first, first + second) if counts[0] + counts[2] else math.nan
        rows.append(dict(zip(COLUMNS, (one, other, *counts, p), strict=False)))
    corrected = holm([row["p"] for row in rows])
    return table([row | {"p_holm": p} for row, p in zip(rows, corrected, strict=True)], COLUMNS)
