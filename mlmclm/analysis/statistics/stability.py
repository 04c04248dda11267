"""Stability of fine-tuning: the noise of seeds, failed runs, and sensitivity to the learning rate.

The paper plots the score's sensitivity to the fine-tuning learning rate (figure 5 of arXiv 2507.00994) without stating
the statistic, so these definitions are this project's own. All use test scores as fractions of 1; correlations lie
between -1 and 1, and 0 is chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.effects import NO_EFFECT
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import Record, columns, records, table
from mlmclm.analysis.sensitivity import NAMES, sensitivity
from mlmclm.results.intervals import NAN, all_equal, deviation, deviation_interval

COLUMNS = columns(
    "object: model task",
    "int64: cells diverged failed",
    "float64: share_failed share_failed_low share_failed_high",
    "float64: sd_seeds sd_seeds_low sd_seeds_high sd_seeds_pooled sd_seeds_pooled_low sd_seeds_pooled_high",
    "float64: range_rates gain_at_stake regret",
    f"float64: {' '.join(NAMES)}",
)


def stability(analysis: Analysis) -> pd.DataFrame:
    """Compute one row of stability statistics per (model, task) that has any cell.

    Figures over learning rates leave out the rates that a grid added to its list because the best rate was the lowest or
    highest: they depend on the scores.

    Columns:
        cells, diverged: the number of results, and the number of them that diverged.
        failed: the number of runs that failed: diverged, not above chance, or below a gap (`failed_runs`).
        share_failed (_low, _high): their share, with its exact interval (Clopper and Pearson 1934).
        sd_seeds (_low, _high): standard deviation over seeds at the chosen learning rate of the runs that did not fail, with
            its chi-square interval, which equal scores don't have: they don't show how large the noise is.
        sd_seeds_pooled (_low, _high): the same pooled over all learning rates, sqrt(sum (n_r - 1) s_r^2 / sum (n_r -
            1)): the seed noise at a typical rate of the grid, estimated from many more cells.
        sd_rates and the other columns of `sensitivity.sensitivity`: sensitivity to the learning rate, corrected for seed noise.
        range_rates: highest minus lowest of the rates' means over scored seeds. Seed noise adds to it: see range_flat.
        gain_at_stake: sd_rates / (score of the model - score of the baseline): the share of the gain from pretraining that
            an unlucky choice of rate puts at stake. NaN without a baseline, for the baseline itself, and where nothing was
            gained.
        regret: the highest mean minus the mean over learning rates, with diverged cells counting as a score of 0: the
            average loss from picking a rate of the grid blindly. NaN if no run has a score. Seed noise adds to it: see
            regret_flat.
    """
    chosen: dict[tuple[str, str], list[float]] = {}
    for cell in records(analysis.chosen):
        chosen.setdefault((cell["model"], cell["task"]), []).append(cell["test"])
    rows = []
    for pair, group in analysis.pairs.items():
        runs = analysis.runs[pair]
        diverged = sum(cell["status"] == "diverged" for cell in group)
        failed = diverged + int(runs.failed.sum())
        row: Record = {"model": pair[0], "task": pair[1], "cells": len(group), "diverged": diverged, "failed": failed}
        share = stats.binomtest(failed, len(group)).proportion_ci(analysis.confidence, "exact")
        row |= {"share_failed": failed / len(group), "share_failed_low": share.low, "share_failed_high": share.high}
        listed, fit = analysis.listed(pair)
        row |= _over_rates(listed)
        row |= sensitivity(listed, fit, confidence=analysis.confidence)
        row |= _over_seeds(runs, chosen[pair] if runs.learned.any() else [], analysis.confidence)
        gain = NAN
        if pair[0] != analysis.baseline:
            base = analysis.run_effects.get((analysis.baseline or "", pair[1]), NO_EFFECT)
            gain = analysis.run_effects[pair].seeds.value - base.seeds.value
        # A NaN gain, from a missing score, fails the comparison as well.
        row["gain_at_stake"] = row["sd_rates"] / gain if gain > 0 else NAN
        rows.append(row)
    return table(rows, COLUMNS)


def _over_seeds(runs: Runs, chosen: Sequence[float], confidence: float) -> Record:
    """Return the deviations over seeds of the runs that learn: of the `chosen` scores, one per seed, and pooled over all rates."""
    sets = [row[keep].tolist() for row, keep in zip(runs.test, runs.learned, strict=True)]
    sd, unknown = deviation(chosen), (NAN, NAN)
    low, high = unknown if all_equal(chosen) else deviation_interval(sd, len(chosen) - 1, confidence=confidence)
    freedom = sum(len(values) - 1 for values in sets if values)
    # A rate with one seed has no deviation (NaN) and adds no degree of freedom, so it is skipped.
    squares = math.fsum((len(values) - 1) * deviation(values) ** 2 for values in sets if len(values) > 1)
    pooled = math.sqrt(squares / freedom) if freedom else NAN
    # One seed shows no noise, and equal scores don't show how large it is.
    noise = any(len(values) > 1 and not all_equal(values) for values in sets)
    pooled_low, pooled_high = deviation_interval(pooled, freedom, confidence=confidence) if noise else unknown
    return {
        "sd_seeds": sd,
        "sd_seeds_low": low,
        "sd_seeds_high": high,
        "sd_seeds_pooled": pooled,
        "sd_seeds_pooled_low": pooled_low,
        "sd_seeds_pooled_high": pooled_high,
    }


def _over_rates(runs: Runs) -> Record:
    """Return the figures over learning rates that need no model of the noise."""
    scored, ran = runs.present.sum(axis=1), runs.ran.sum(axis=1)
    if not scored.any():
        return {"range_rates": NAN, "regret": NAN}
    sums = np.where(runs.present, runs.test, 0.0).sum(axis=1)
    means = sums[scored > 0] / scored[scored > 0]
    # Whoever picks a rate gets nothing from the runs that diverge, so for the regret they count as 0. Cells that end
    # without divergence but lack a score say nothing about the rate and are left out.
    floored = sums[ran > 0] / ran[ran > 0]
    return {"range_rates": float(means.max() - means.min()), "regret": float(floored.max() - floored.mean())}
