"""The runs of one model on one task as arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mlmclm.analysis.results import Record, by_rate, competing, scored, seeds_of
from mlmclm.results.measures import Array
from mlmclm.seeds import Seeds


@dataclass(frozen=True)
class Runs:
    """The runs of one model on one task.

    Attributes:
        rates: [R], increasing.
        validation, test: scores [R, S]; NaN where a run diverged or is missing.
        failed: [R, S], which of the scored runs failed (`failed_runs`).
        seeds: [S]; empty if they are not known.
        competing: [R], which rates may be chosen (`results.competing`); None for all.
    """

    rates: Sequence[float]
    validation: Array
    test: Array
    failed: Array
    seeds: Sequence[Seeds] = ()
    competing: Array | None = None

    @property
    def present(self) -> Array:
        """Which runs have a score, [R, S]."""
        return np.isfinite(self.test)

    def at(self, rates: Collection[float]) -> Runs:
        """Return the runs at some of the learning rates."""
        keep = [rate in rates for rate in self.rates]
        left = tuple(rate for rate in self.rates if rate in rates)
        competing = None if self.competing is None else self.competing[keep]
        return Runs(left, self.validation[keep], self.test[keep], self.failed[keep], self.seeds, competing)


def runs_of(group: Sequence[Record]) -> Runs:
    """Arrange the cells of one (model, task) by learning rate and seed; none of them has failed yet."""
    rates, seeds = list(by_rate(group)), sorted({seeds_of(cell) for cell in group})
    scores = np.full((2, len(rates), len(seeds)), math.nan)
    for cell in group:
        if scored(cell):
            place = rates.index(cell["learning_rate"]), seeds.index(seeds_of(cell))
            scores[0][place], scores[1][place] = cell["validation"], cell["test"]
    compete = np.isin(rates, list(competing(group)))
    return Runs(rates, scores[0], scores[1], np.zeros(scores[1].shape, bool), seeds, compete)
