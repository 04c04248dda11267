"""The runs of one model on one task as arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlmclm.analysis.results import Record, scored, seeds_of
from mlmclm.analysis.simulated_choices import competes
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seeds


@dataclass(frozen=True)
class Runs:
    """The runs of one model on one task.

    Attributes:
        rates: [R], increasing.
        validation, test: scores [R, S]; NaN where a run diverged or is missing.
        failed: [R, S], which of the scored runs failed (`failed_runs`).
        seeds: [S]; empty if they are not known.
        diverged, unread: [R, S], which runs have diverged, and which others have no score; None if none has.
        settings: [R], the number of each rate's setting, where a setting is chosen together with the rate
            (`selection.with_settings`); otherwise None.
        hopeless: [R], the rates at which no run learns, and not by chance (`failed_runs`); None if there are none.
        unseen: [R], the score that the model may have at rates at which it lost all runs, maybe by chance (`failed_runs.with_unseen`); NaN at others.
    """

    rates: Sequence[float]
    validation: Array
    test: Array
    failed: Array
    seeds: Sequence[Seeds] = ()
    diverged: Array | None = None
    unread: Array | None = None
    settings: Array | None = None
    hopeless: Array | None = None
    unseen: Array | None = None

    @cached_property
    def present(self) -> Array:
        """Which runs have a score, [R, S]."""
        return np.isfinite(self.test)

    @property
    def ran(self) -> Array:
        """Which runs have a score or diverged, [R, S]."""
        return self.present if self.diverged is None else self.present | self.diverged

    @property
    def every(self) -> Array:
        """Which runs have any result, with or without a score, [R, S]."""
        return self.ran if self.unread is None else self.ran | self.unread

    @cached_property
    def learned(self) -> Array:
        """Which runs learned: they have a score, did not fail, and are at a rate where runs learn, [R, S]."""
        kept = self.present & ~self.failed
        return kept if self.hopeless is None else kept & ~self.hopeless[:, None]

    def counting(self, rule: Rule) -> Array:
        """Return the runs among which a rate is chosen, [R, S]: those that learned, or all with a score if none did.

        Unless each seed chooses for itself (`per_seed`), only runs at rates that compete count.
        """
        learned = self.learned if self.learned.any() else self.present
        if rule == "per_seed":
            return learned
        return np.asarray(learned & competes(learned.sum(axis=1), self.every.sum(axis=1))[:, None])

    def at(self, rates: Collection[float]) -> Runs:
        """Return the runs at some of the learning rates."""
        keep = [rate in rates for rate in self.rates]
        kept = tuple(rate for rate in self.rates if rate in rates)
        optional = (
            None if values is None else values[keep]
            for values in (self.diverged, self.unread, self.settings, self.hopeless, self.unseen)
        )
        return Runs(kept, self.validation[keep], self.test[keep], self.failed[keep], self.seeds, *optional)


def runs_of(group: Sequence[Record]) -> Runs:
    """Arrange the cells of one (model, task) by learning rate and seed; none of them has failed yet."""
    seeds_by_cell = [seeds_of(cell) for cell in group]
    rates, seeds = sorted({cell["learning_rate"] for cell in group}), sorted(set(seeds_by_cell))
    scores = np.full((2, len(rates), len(seeds)), math.nan)
    diverged, unread = np.zeros((2, len(rates), len(seeds)), bool)
    for cell, cell_seeds in zip(group, seeds_by_cell, strict=True):
        place = rates.index(cell["learning_rate"]), seeds.index(cell_seeds)
        if scored(cell):
            scores[0][place], scores[1][place] = cell["validation"], cell["test"]
        else:
            (diverged if cell["status"] == "diverged" else unread)[place] = True
    setting_of = {cell["learning_rate"]: cell["setting"] for cell in group}
    settings = sorted(set(setting_of.values()))
    return Runs(
        rates,
        scores[0],
        scores[1],
        np.zeros(scores[1].shape, bool),
        seeds,
        diverged if diverged.any() else None,
        unread if unread.any() else None,
        np.asarray([settings.index(setting_of[rate]) for rate in rates]) if len(settings) > 1 else None,
    )
