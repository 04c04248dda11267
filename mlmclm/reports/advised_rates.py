"""Advice on learning rates: which ones the best model needs, and how sure the choice is."""

from __future__ import annotations

import math

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.wording import Headline

SURE = 0.95
"""Minimum share of studies with other seeds that choose the same learning rate, for the choice to count as sure."""


def advised_rates(analysis: Analysis, answer: Headline) -> list[str]:
    """Say which learning rates the best model needs where it is above chance, and how sure the choice is.

    Each pretraining run of a model chooses its rate. If there are several runs, all their rates are named, without a probability.
    """
    name = answer.best[0] if answer.best else ""
    runs = analysis.groups.get(name, [])
    rows = [
        row
        for row in records(analysis.best)
        if row["model"] in runs and row["learning_rates"] and row["above_chance"] != "no"
    ]
    bands = {(row["model"], row["task"]): row for row in records(analysis.stability)}
    sentences = []
    for task in dict.fromkeys(row["task"] for row in rows):
        task_rows = [row for row in rows if row["task"] == task]
        if len(runs) > 1:
            by_run = {row["model"]: _chosen(row) for row in task_rows}
            same = len(by_run) == len(runs) and len(set(by_run.values())) == 1
            rates = [_chosen(task_rows[0])] if same else [f"{rate} for {run}" for run, rate in by_run.items()]
            sentences.append(f"{text.listing(rates)} on {task}{' in each pretraining run' if same else ''}.")
            continue
        (row,) = task_rows
        band = bands.get((name, task))
        if band is None or math.isnan(band["share_level"]):
            sentences.append(f"{_chosen(row)} on {task}.")
            continue
        sentences.append(f"{_chosen(row)} on {task} ({_choice(row, band, analysis)}).")
    return [f"for {name}, {sentences[0]}", *sentences[1:]] if sentences else []


def _chosen(row: Record) -> str:
    """Return the best learning rates of a row of `best`, with the setting where the grid has several."""
    return f"{row['learning_rates']}{' with ' if row['setting'] else ''}{row['setting']}"


def _choice(row: Record, band: Record, analysis: Analysis) -> str:
    """Say how surely a learning rate is chosen, and whether test scores show it to be better than the others.

    The first part gives the share of studies with other seeds that choose this rate and setting (`best.p_chosen`), by validation
    scores except under `on_test`. The second part is from a test between the rates of the best setting: with few runs it may show no
    difference, however often a rate is chosen. It is left out if the grid has added rates to its list, which `sensitivity` ignores.

    Args:
        row, band: rows of the tables `best` and `stability`.
    """
    pair = row["model"], row["task"]
    low, high, tried = band["level_low"], band["level_high"], len(analysis.runs[pair].rates)
    level, sure = round(band["share_level"] * tried), row["p_chosen"] >= SURE
    point = "at this setting, " if row["setting"] else ""
    choice = "this setting and rate" if point else "it"
    often = f"other seeds would choose {choice} in {text.percent(row['p_chosen'])} of cases"
    if analysis.grid.added.get((*pair, row["setting"])):
        return often  # the test covers only the listed rates
    if level > 1:
        number = text.every(tried, "rate") if level == tried else f"{level} of {tried} rates"
        ties = f"{point}{number}, from {rate_text(low)} to {rate_text(high)}, are not clearly different from the best"
        return f"{often}, yet it is not shown to be better: on test scores, {ties}" if sure else f"{often}: {ties}"
    if math.isnan(row["learning_rate"]) or row["learning_rate"] != low:
        return f"{often}; {point}test scores show {rate_text(low)} to be better"
    better = f"{point}test scores show it to be better than all others"
    if sure:
        return f"{often}; {better}"
    on = "" if analysis.rule == "on_test" else " on validation scores"
    return f"{often}{on}, although {better}"
