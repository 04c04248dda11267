"""Checks of the intervals' assumptions: seeds are independent over tasks, and the noise is normal and alike for all models.

Residuals are the runs' test scores minus the mean of their model, task and learning rate, divided by the fitted standard deviation
(`seed_noise`); runs that failed are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from mlmclm.analysis.contrasts import Effects
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.seed_noise import Fit
from mlmclm.analysis.shared_trainings import deviations
from mlmclm.results.intervals import NAN

SHOWN = 0.01
"""Level at which a check fails; one in a hundred sound studies fails it by chance."""


class Check(NamedTuple):
    """A statistic of the noise, and the p value of the assumption about it; NaN where too little is known."""

    value: float
    p: float

    @property
    def fails(self) -> bool:
        """Whether the assumption is rejected."""
        return self.p < SHOWN


class NoiseChecks(NamedTuple):
    """Checks of a study's noise.

    Attributes:
        together: the correlation of a seed's test scores on different tasks that are not known to share trainings.
        tails: the excess kurtosis of the residuals, which is 0 for normal noise.
        uneven: whether the models' variances differ, by the test of `pooled_variances`.
    """

    together: Check
    tails: Check
    uneven: bool


def noise_checks(
    runs: Mapping[tuple[str, str], Runs], fits: Mapping[tuple[str, str], Fit], effects: Effects
) -> NoiseChecks:
    """Check the noise of a study's runs."""
    pairs = [pair for pair, fit in fits.items() if fit.known]
    products, degrees = 0.0, 0.0
    for one, other in itertools.combinations(pairs, 2):
        if one[0] == other[0] and other[1] not in effects[one].alike:
            scale = float(np.nanmean(fits[one].deviations[1]) * np.nanmean(fits[other].deviations[1]))
            for first, second in deviations(runs[one], runs[other]):
                products += float((first * second).sum()) / scale
                degrees += len(first) - 1
    together = (
        Check(products / degrees, float(special.ndtr(-products / math.sqrt(degrees)))) if degrees else Check(NAN, NAN)
    )
    values = np.asarray([value for pair in pairs for value in _residuals(runs[pair], fits[pair])])
    tails = Check(NAN, NAN)
    if len(values) > 20:
        excess = float((values**4).mean() / (values**2).mean() ** 2 - 3)
        # Anscombe and Glynn 1983
        tails = Check(excess, float(stats.kurtosistest(values, alternative="greater").pvalue))
    return NoiseChecks(together, tails, any(not fit.pooled for fit in fits.values()))


def _residuals(runs: Runs, fit: Fit) -> Iterator[float]:
    usual = float(np.nanmedian(fit.deviations[1]))
    for row, learned in enumerate(runs.learned):
        scores = runs.test[row, learned]
        if len(scores) > 1 and usual > 0:
            # A variance that is not pooled (`pooled_variances`) would hide the outlier that made it large.
            scale = usual if fit.degrees[row] < len(scores) else fit.deviations[1][row]
            yield from ((scores - scores.mean()) / (scale * math.sqrt(1 - 1 / len(scores)))).tolist()
