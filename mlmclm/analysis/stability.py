"""Sensitivity of the score to the seed and to the learning rate.

The paper plots the score's sensitivity to the fine-tuning learning rate (figure 5 of arXiv 2507.00994) without stating
the statistic, so these definitions are this project's own. All use test scores as fractions of 1; correlations lie
between -1 and 1, and 0 is chance.
"""

from __future__ import annotations

import math

import pandas as pd

from mlmclm.analysis.results import Record, by_rate, cells_by_pair, chosen_scores, columns, scored, table
from mlmclm.results.intervals import NAN, all_equal, deviation, deviation_interval, mean

NEAR_BEST = 0.01

STABILITY_COLUMNS = columns(
    "object: model task",
    "int64: cells diverged rates_cut",
    "float64: share_diverged sd_seeds sd_seeds_low sd_seeds_high",
    "float64: sd_seeds_pooled sd_seeds_pooled_low sd_seeds_pooled_high",
    "float64: sd_rates range_rates relative_sd_rates gain_at_stake regret share_near_best",
)


def stability_table(
    cells: pd.DataFrame, chosen: pd.DataFrame, *, baseline: str | None = None, confidence: float = 0.95
) -> pd.DataFrame:
    """Compute one row of stability statistics per (model, task) that has any cell.

    Columns:
        cells, diverged, share_diverged: the number of results, the number of them that diverged, and the share.
        rates_cut: the number of learning rates that a race cut. Their cells are in none of the figures below. Where it
            is not 0, the figures over learning rates are NaN, and so is share_diverged: the rates that are left are the
            best ones, which would flatter the model.
        sd_seeds (_low, _high): standard deviation over seeds at the chosen learning rate, with its chi-square interval,
            which equal scores don't have: they don't show how large the noise is.
        sd_seeds_pooled (_low, _high): the same pooled over all learning rates, sqrt(sum (n_r - 1) s_r^2 / sum (n_r -
        1)): the seed noise at a typical rate of the grid, estimated from many more cells.
        sd_rates: standard deviation over learning rates of the mean over scored seeds. Rates at which every seed
            diverged have no mean and are left out, so read it together with share_diverged.
        range_rates: highest minus lowest of those means.
        relative_sd_rates: sd_rates divided by the mean of those means (a coefficient of variation).
        gain_at_stake: sd_rates / (score at the chosen rate - the baseline's score at its own rate): the share of the
            gain from pretraining that an unlucky choice of rate puts at stake. NaN without a baseline, for the baseline
            itself, and where nothing was gained.
        regret: the highest mean minus the mean over learning rates, with diverged cells counting as a score of 0: the
            average loss from picking a rate of the grid blindly. NaN if no run has a score.
        share_near_best: share of the learning rates, diverged ones included, whose mean (diverged cells as 0) is within
            one point (0.01) of the highest.
    """
    picked = chosen_scores(chosen)
    rows = []
    for (model, task), group in cells_by_pair(cells).items():
        diverged = sum(cell["status"] == "diverged" for cell in group)
        row: Record = {
            "model": model,
            "task": task,
            "cells": len(group),
            "diverged": diverged,
            "rates_cut": len({cell["learning_rate"] for cell in group if cell["cut"]}),
            "share_diverged": diverged / len(group),
        }
        kept = [cell for cell in group if not cell["cut"]]
        row |= _over_seeds(kept, picked.get((model, task), []), confidence) | _over_rates(kept)
        if row["rates_cut"]:
            row |= dict.fromkeys(("share_diverged", *_over_rates(kept)), NAN)
        gain = NAN
        if baseline is not None and model != baseline:
            gain = mean(picked.get((model, task), [])) - mean(picked.get((baseline, task), []))
        # A NaN gain, from a missing score, fails the comparison as well.
        row["gain_at_stake"] = row["sd_rates"] / gain if gain > 0 else NAN
        rows.append(row)
    return table(rows, STABILITY_COLUMNS)


def _over_seeds(group: list[Record], picked: list[float], confidence: float) -> Record:
    sd = deviation(picked)
    none = (NAN, NAN)
    low, high = none if all_equal(picked) else deviation_interval(sd, len(picked) - 1, confidence=confidence)
    sets = [[cell["test"] for cell in members if scored(cell)] for members in by_rate(group).values()]
    freedom = sum(len(values) - 1 for values in sets if values)
    # A rate with one seed has no deviation (NaN) and adds no degree of freedom, so it is skipped.
    squares = math.fsum((len(values) - 1) * deviation(values) ** 2 for values in sets if len(values) > 1)
    pooled = math.sqrt(squares / freedom) if freedom else NAN
    # One seed shows no noise, and equal ones none that is known.
    noise = any(len(values) > 1 and not all_equal(values) for values in sets)
    pooled_low, pooled_high = deviation_interval(pooled, freedom, confidence=confidence) if noise else none
    return {
        "sd_seeds": sd,
        "sd_seeds_low": low,
        "sd_seeds_high": high,
        "sd_seeds_pooled": pooled,
        "sd_seeds_pooled_low": pooled_low,
        "sd_seeds_pooled_high": pooled_high,
    }


def _over_rates(group: list[Record]) -> Record:
    rates = by_rate(group)
    means = [mean([cell["test"] for cell in members if scored(cell)]) for members in rates.values()]
    means = [value for value in means if not math.isnan(value)]
    # Whoever picks a rate gets nothing from the runs that diverge, so for the regret they count as 0. Cells that end
    # without divergence but lack a score say nothing about the rate and are left out.
    kept = [[cell for cell in members if scored(cell) or cell["status"] == "diverged"] for members in rates.values()]
    floored = [mean([cell["test"] if scored(cell) else 0.0 for cell in members]) for members in kept if members]
    top = max(floored, default=NAN)
    average = mean(means)
    return {
        "sd_rates": deviation(means),
        "range_rates": max(means) - min(means) if means else NAN,
        "relative_sd_rates": deviation(means) / average if average > 0 else NAN,
        "regret": top - mean(floored) if means else NAN,
        "share_near_best": mean([float(value >= top - NEAR_BEST) for value in floored]) if means else NAN,
    }
