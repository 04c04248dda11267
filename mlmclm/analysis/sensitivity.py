"""Sensitivity of a model's score to the learning rate, corrected for the noise of seeds.

Means over few seeds differ between learning rates even where the rate does not matter. So the range of the means and the regret
of a blind choice are positive for a flat curve, and higher for a model with more seed noise. Each is therefore given with its mean
over simulated studies with a flat curve and the fitted noise (`seed_noise`), and sensitivity itself is the standard deviation of
the rates' true means, with an interval that includes 0 in 97.5 % of studies with a flat curve of equally noisy normal scores.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special

from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import Record
from mlmclm.analysis.seed_noise import Fit, freedom_of
from mlmclm.results.intervals import NAN
from mlmclm.results.measures import Array

FLAT_DRAWS = 400
NOISES = 64
"""Equally probable sizes of the true noise over which `spread_interval` averages."""
LEAST_SHOWN = 0.16
"""Quantile of the F ratio of equal means: means that are even closer do not lower the upper limit any further."""
LARGE = 1_000.0
"""Noncentrality from which on the approximation of the chi-square distribution function is accurate to 0.001."""

NAMES = (
    "sd_rates",
    "sd_rates_low",
    "sd_rates_high",
    "p_flat",
    "range_flat",
    "regret_flat",
    "share_level",
    "level_low",
    "level_high",
)


def sensitivity(runs: Runs, fit: Fit, *, confidence: float = 0.95, draws: int = FLAT_DRAWS) -> Record:
    """Return the sensitivity to the learning rate by name (`NAMES`); NaN where there is one rate, or no known noise.

    Columns:
        sd_rates (_low, _high): standard deviation over learning rates of the true mean test scores of runs that learn,
            estimated as the root of the variance of the seed means minus the part that seeds' noise adds, at least 0, with
            the interval of `spread_interval`.
        p_flat: p value of "the learning rate does not matter" (F test).
        range_flat, regret_flat: what `range_rates` and `regret` are on average where the rate does not matter.
        share_level: share of the rates that are not clearly different from the best: their seed mean is below the highest by no more than
            happens in `confidence` of studies with a flat curve.
        level_low, level_high: the lowest and the highest of these rates.
    """
    row: Record = dict.fromkeys(NAMES, NAN)
    learned = runs.learned.sum(axis=1)
    use = np.asarray(learned > 0)
    counts = learned[use]
    if not fit.known or use.sum() < 2:
        return row
    means, errors = fit.means[1][use], fit.deviations[1][use] / np.sqrt(counts)
    spread, noise = fit.between(use)
    rates = degrees_between(errors**2)
    freedom = freedom_of(fit, np.where(use, 1 / np.maximum(learned, 1), 0.0))
    row["sd_rates"] = math.sqrt(max(0.0, spread - noise))
    ratio = spread / noise
    row["p_flat"] = float(special.fdtrc(rates, freedom, ratio))
    low, high = spread_interval(ratio, rates, freedom, confidence)
    scale = noise / rates
    row |= {"sd_rates_low": math.sqrt(scale * low), "sd_rates_high": math.sqrt(scale * high)}
    generator = np.random.default_rng(0)
    scores = fit.simulate(fit.shrunk(0.0), draws, generator)[1]
    flat = np.where(runs.learned, scores, 0.0).sum(axis=-1)[:, use] / counts
    top = flat.max(axis=1)
    row["range_flat"] = float((top - flat.min(axis=1)).mean())
    row["regret_flat"] = float((top - flat.mean(axis=1)).mean())
    # The standard errors are estimates, so the simulated gaps are divided by errors that vary as theirs do.
    doubt = np.sqrt(generator.chisquare(freedom, draws) / freedom)
    level = _gaps(means[None], errors)[0] <= np.quantile(_gaps(flat, errors).max(axis=1) / doubt, confidence)
    tried = np.asarray(runs.rates)[use][level]
    row |= {"share_level": level.sum() / len(runs.rates), "level_low": tried.min(), "level_high": tried.max()}
    return row


def degrees_between(variances: Array) -> float:
    """Return the degrees of freedom of the variance between means with these variances (Box 1954).

    They are the number of means less 1 where the variances are equal, and 1 where one is far larger than the others.
    """
    count = len(variances)
    centred = np.diag(variances) - variances / count
    centred -= centred.mean(axis=1, keepdims=True)
    return float(np.trace(centred) ** 2 / (centred * centred.T).sum())


def _gaps(means: Array, errors: Array) -> Array:
    """Return by how many standard errors each rate's mean is below the highest, [draws, R]."""
    best = means.argmax(axis=1)
    below = np.take_along_axis(means, best[:, None], axis=1) - means
    return np.asarray(below / np.sqrt(errors**2 + errors[best][:, None] ** 2))


def spread_interval(ratio: float, first: float, second: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the sum of squares of true means around their mean, in units of the estimated noise of a mean.

    Given the true noise, the sum of squares of the estimated means is noncentral chi-square; given the estimated noise, the
    true one is scaled inverse chi-square. The limits are quantiles over both (a generalised interval, Weerahandi 1993). The
    lower limit is 0 exactly where an F test does not reject equal means. Means that happen to be much closer than their noise
    would give too low an upper limit. So it is at least that of a ratio which equal means exceed in 84 % of cases (a
    power-constrained limit, Cowan et al., arXiv 1105.3166).

    Args:
        ratio: the F ratio of the means' mean square and the noise.
        first, second: its degrees of freedom.
    """
    tail = (1 - confidence) / 2
    scale = special.chdtri(second, (np.arange(NOISES) + 0.5) / NOISES) / second

    def at_most(size: float, ratio: float) -> float:
        """Return the probability of a ratio up to this one where the sum of squares has this size."""
        return float(_noncentral(first * ratio * scale, first, size * scale).mean())

    def end(probability: float, ratio: float) -> float:
        if special.fdtr(first, second, ratio) <= probability or at_most(0.0, ratio) <= probability:
            return 0.0
        upper = 10.0 + 4 * first * ratio
        while at_most(upper, ratio) > probability:
            upper *= 2
        return float(optimize.brentq(lambda size: at_most(size, ratio) - probability, 0.0, upper, rtol=1e-4))

    return end(1 - tail, ratio), end(tail, max(ratio, float(special.fdtri(first, second, LEAST_SHOWN))))


def _noncentral(values: Array, freedom: float, noncentrality: Array) -> Array:
    """Return the noncentral chi-square distribution function; where computing it is slow, its normal approximation (Abdel-Aty 1954)."""
    mean = freedom + noncentrality
    large = noncentrality > LARGE
    exact = special.chndtr(np.where(large, 0.0, values), freedom, np.where(large, 0.0, noncentrality))
    spread = 2 * (1 + noncentrality / mean) / (9 * mean)
    return np.where(large, special.ndtr((np.cbrt(values / mean) - 1 + spread) / np.sqrt(spread)), exact)
