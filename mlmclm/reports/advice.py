"""Advice from a study, in sentences: which model and learning rate, how sure, what it rests on, and what would settle the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS, against, holm_level
from mlmclm.analysis.power import POWER, seeds_for
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text, wording
from mlmclm.reports.wording import Headline, headline, told_apart


@dataclass(frozen=True)
class Advice:
    """The answer, and what belongs to it; each in plain sentences."""

    answer: Headline
    families: tuple[str, ...]
    rates: tuple[str, ...]
    rests_on: tuple[str, ...]
    open: tuple[str, ...]

    def parts(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return what belongs to the answer, by title; parts without sentences are left out."""
        parts = (
            ("By family", self.families),
            ("Learning rate", self.rates),
            ("Rests on", self.rests_on),
            ("Open", self.open),
        )
        return [(title, sentences) for title, sentences in parts if sentences]

    def lines(self) -> list[str]:
        """Return the advice as lines of text."""
        parts = [f"{title}: {' '.join(sentences)}" for title, sentences in self.parts()]
        return [self.answer.verdict, self.answer.detail, *parts]


def advise(analysis: Analysis) -> Advice:
    """Say what the results of a study advise; never a winner that they don't show."""
    answer = headline(analysis)
    return Advice(
        answer=answer,
        families=tuple(_families(analysis)),
        rates=tuple(_rates(analysis, answer)),
        rests_on=tuple(_rests_on(analysis)),
        open=tuple(_open(analysis, answer)),
    )


def _families(analysis: Analysis) -> list[str]:
    """Name the best model of every family of tasks, where it can be told apart."""
    groups: dict[str, list[Record]] = {}
    for row in records(analysis.overall):
        if row["kind"] == "family" and not math.isnan(row["mean"]):
            groups.setdefault(row["scope"], []).append(row)
    found = []
    for scope, rows in sorted(groups.items()):
        top = max(rows, key=lambda row: row["mean"])
        rivals = [row for row in against(analysis.comparisons, top["model"]) if row["scope"] == scope]
        close = [row["model_b"] for row in rivals if not told_apart(row, analysis.confidence)]
        name = text.family(scope)
        if not close and top["above_chance"] != "no":
            gap = min(rivals, key=lambda row: row["difference"])
            lead = text.estimate(gap["difference"], gap["low"], gap["high"], sign=True)
            found.append(f"{name}: {top['model']}, {lead} points to the next.")
        else:
            found.append(
                f"{name}: the results don't suffice; {text.listing([top['model'], *close], most=4)} are not told apart."
            )
    return found


def _rates(analysis: Analysis, answer: Headline) -> list[str]:
    """Say which learning rates the best model needs, and how sure the choice is."""
    name = answer.best[0] if answer.best else None
    rows = [row for row in records(analysis.best) if row["model"] == name and row["learning_rates"]]
    bands = {row["task"]: row for row in records(analysis.stability) if row["model"] == name}
    found = []
    for row in rows:
        band = bands.get(row["task"])
        own = f"{row['learning_rates']} on {row['task']}"
        if band is None or math.isnan(band["share_level"]):
            found.append(f"{own}.")
            continue
        low, high = rate_text(band["level_low"]), rate_text(band["level_high"])
        width = (
            f"rates from {low} to {high} are not told from the best"
            if low != high
            else "no other rate is level with it"
        )
        found.append(f"{own} (other seeds would choose it in {text.percent(row['p_chosen'])} of cases; {width}).")
    return found


def _rests_on(analysis: Analysis) -> list[str]:
    """Say what the answer rests on."""
    seeds = wording.seed_counts(analysis.grid, "fine-tuning seed")
    tasks = text.plural(len(analysis.grid.tasks), "task")
    found = [f"one pretraining run per model, {seeds} at each rate, {tasks}."]
    return [*found, *certificate_lines(analysis)]


def certificate_lines(analysis: Analysis) -> list[str]:
    """Say what the study's intervals and claims are worth; empty if its noise is not known."""
    found, certificate = [], analysis.certificate
    if not math.isnan(certificate.covered):
        found.append(
            f"In {certificate.repetitions:,} repetitions of this study with its own noise, {text.percent(certificate.covered)} of "
            f"the {analysis.confidence * 100:g} % intervals cover the true score."
        )
    if not math.isnan(certificate.false_claims):
        found.append(
            f"If all models were equal, {text.percent(certificate.false_claims)} of such studies would claim a difference."
        )
    least = certificate.smallest.get(ALL_TASKS, math.nan)
    if not math.isnan(least):
        found.append(
            f"A true difference of {text.points(least)} points on the mean over tasks is found with {POWER * 100:g} % power."
        )
    return found


def _open(analysis: Analysis, answer: Headline) -> list[str]:
    """Say what would settle what is open: the seeds and the cells that the models not told apart would need."""
    if analysis.missing:
        return [f"{analysis.missing:,} cells are still to be run; run the study's command again."]
    found = []
    tasks, grid = sorted(analysis.families), analysis.grid
    level = holm_level("all", analysis.families, len(analysis.models), analysis.confidence)
    for other in answer.tied if answer.best else ():
        pairs = [(analysis.effects[answer.best[0], task], analysis.effects[other, task]) for task in tasks]
        gap = math.fsum(one.seeds.value - two.seeds.value for one, two in pairs) / len(pairs)
        now = max(grid.seed_counts)
        needed = seeds_for(gap, pairs, now, level)
        lead = f"{text.difference(gap)} points to {other}"
        if needed is None:
            found.append(
                f"More seeds would not tell {lead} apart: the noise is not known, or the test sets are too small."
            )
        else:
            counts = [len(grid.seeds_on(task)) for task in tasks]
            more = sum(max(0, math.ceil(needed * count / now) - count) for count in counts)
            cells = more * len(grid.learning_rates) * 2
            found.append(
                f"If {lead} are true, {needed} seeds a rate find them with {POWER * 100:g} % power: {cells:,} more cells."
            )
    return found
