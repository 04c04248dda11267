"""The noise of fine-tuning seeds in the scores of one task, fitted per model, and simulated studies with that noise.

**Model.** A run of a model at learning rate r with seed s either fails, with probability p_r, or learns. Scores of runs that
learn are normal, with a mean and a standard deviation for each rate and split, one correlation of validation and test
score, and one correlation of the runs of a seed at different rates. Failed runs score at one level.

**Variances** of single rates rest on few seeds, so each is moderated by the mean over the model's rates: with d degrees of
freedom of its own and d0 of the mean, s~^2 = (d0 s0^2 + d s^2) / (d0 + d). d0 is estimated from how much the variances of the
task's models and rates differ beyond what their degrees of freedom explain (Smyth 2004, *Linear models and empirical Bayes
methods for assessing differential expression*, section 6.2): equal variances are pooled, and unequal ones stay apart.

**Failed runs** are those not above the chance level, and those below a gap: the run's distance to the best run at its rate is
at least `LEAST_GAP`, and `GAP` times the spread of the runs that learn. Their share at a rate is shrunk to that of all
rates, the more the less the rates differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from mlmclm.analysis.results import Record, by_rate, scored, seeds_of
from mlmclm.results.intervals import SINGLE, TIE
from mlmclm.results.measures import Array
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seeds

GAP, LEAST_GAP = 6.0, 0.05
"""Standard deviations, and points out of 1, below the best run at a rate from which on a run counts as failed."""
MOST_SHARED = 0.9
"""Highest correlation of a seed's runs at different rates; a few seeds can show 1 by accident."""
LEAST_POOLING, MOST_POOLING = 2.0, 200.0
"""Bounds of the weight of the share of failed runs over all rates in the share at one, in runs."""


@dataclass(frozen=True)
class Runs:
    """The runs of one model on one task.

    Attributes:
        rates: [R], increasing.
        validation, test: scores [R, S]; NaN where a run diverged or is missing.
        failed: [R, S], which of the scored runs failed.
        seeds: [S]; empty if they are not known.
    """

    rates: Sequence[float]
    validation: Array
    test: Array
    failed: Array
    seeds: Sequence[Seeds] = ()

    @property
    def present(self) -> Array:
        """Which runs have a score, [R, S]."""
        return np.isfinite(self.test)

    def at(self, rates: Collection[float]) -> Runs:
        """Return the runs at some of the learning rates."""
        keep = [rate in rates for rate in self.rates]
        left = tuple(rate for rate in self.rates if rate in rates)
        return Runs(left, self.validation[keep], self.test[keep], self.failed[keep], self.seeds)


def runs_of(group: Sequence[Record], chance: float = math.nan) -> Runs:
    """Arrange the cells of one (model, task) by learning rate and seed.

    Args:
        chance: the task's chance level; NaN if it is not known.
    """
    rates, seeds = list(by_rate(group)), sorted({seeds_of(cell) for cell in group})
    scores = np.full((2, len(rates), len(seeds)), math.nan)
    for cell in group:
        if scored(cell):
            place = rates.index(cell["learning_rate"]), seeds.index(seeds_of(cell))
            scores[0][place], scores[1][place] = cell["validation"], cell["test"]
    return Runs(rates, scores[0], scores[1], _failed(scores, chance), seeds)


def _failed(scores: Array, chance: float) -> Array:
    """Return which runs failed, [R, S], given validation and test scores [2, R, S]."""
    low = (scores[1] <= chance) if math.isfinite(chance) else np.zeros(scores[1].shape, bool)
    # Where most runs are at chance, the task is not learned, and no run stands out as failed.
    if 2 * low.sum() >= np.isfinite(scores[1]).sum():
        low[:] = False
    failed = low
    for split in scores:
        failed = failed | _below_gap(np.where(failed, math.nan, split))
    return failed


def _below_gap(scores: Array) -> Array:
    """Return which runs are below a gap: the split of all runs' distances to the best at their rate that fits them best."""
    known = np.isfinite(scores)
    best = np.max(np.where(known, scores, -math.inf), axis=1, keepdims=True)
    distance = np.where(known, best - scores, math.nan)
    # The best run at each rate has distance 0 by construction and says nothing.
    values = np.sort(distance[known & (distance > 0)])
    for count in range(len(values) // 2, 0, -1):
        near, far = values[:-count], values[-count:]
        spread = math.sqrt(float(np.mean(near**2))) if len(near) > 1 else math.nan
        if far[0] > max(LEAST_GAP, GAP * spread) and far[0] - near[-1] > GAP / 2 * spread:
            return np.asarray(known & (distance >= far[0]))
    return np.zeros(scores.shape, bool)


@dataclass(frozen=True)
class Fit:
    """The fitted noise of one model on one task; arrays over rates are [R], of validation and test [2, R].

    Attributes:
        present: which runs have a score, [R, S].
        means: mean scores of the runs that learn.
        deviations: their moderated standard deviations.
        freedom: degrees of freedom of a moderated variance; 0 if the noise is not known.
        degrees: degrees of freedom of the variance of the test scores at each rate, [R]; at most `freedom`.
        correlation: of the validation and the test score of a run.
        shared: correlation of the test scores of a seed's runs at different rates, at least 0.
        failing: the probability that a run fails.
        failures: the number of runs that failed.
        pooling: weight of the share of failed runs over all rates in `failing`, in runs.
        floor: the score of failed runs, [2].
    """

    present: Array
    means: Array
    deviations: Array
    freedom: float
    degrees: Array
    correlation: float
    shared: float
    failing: Array
    failures: Array
    pooling: float
    floor: Array

    @property
    def known(self) -> bool:
        """Whether the noise of seeds is known."""
        return self.freedom > 0

    @property
    def expected(self) -> Array:
        """Expected scores at each rate, failed runs included, [2, R]."""
        return np.asarray((1 - self.failing) * self.means + self.failing * self.floor[:, None])

    def at(self, keep: Array) -> Fit:
        """Return the fit at some of the learning rates, given which, [R]."""
        return replace(
            self,
            present=self.present[keep],
            means=self.means[:, keep],
            deviations=self.deviations[:, keep],
            degrees=self.degrees[keep],
            failing=self.failing[keep],
            failures=self.failures[keep],
        )

    def flat(self) -> Fit:
        """Return the fit with one mean at all rates: the study if the rate did not matter."""
        return replace(
            self, means=np.repeat(np.nanmean(self.means, axis=1, keepdims=True), self.means.shape[1], axis=1)
        )

    def shrunk(self) -> Fit:
        """Return the fit with means shrunk to their mean, so that their variance is what is left net of the seeds' noise."""
        if self.means.shape[1] < 2:
            return self
        runs = np.maximum(self.present.sum(axis=1), 1)
        noise = np.nanmean(self.deviations**2 / runs, axis=1, keepdims=True)
        centre, spread = (
            np.nanmean(self.means, axis=1, keepdims=True),
            np.nanvar(self.means, axis=1, ddof=1, keepdims=True),
        )
        kept = np.sqrt(np.clip(1 - noise / np.maximum(spread, 1e-300), 0, None))
        return replace(self, means=centre + kept * (self.means - centre))


def fit_task(models: Mapping[str, Runs]) -> dict[str, Fit]:
    """Fit the noise of all models on one task."""
    moments = {name: _moments(runs) for name, runs in models.items()}
    prior = [_prior_freedom([(own[1][split], own[2][split]) for own in moments.values()]) for split in (0, 1)]
    crossed = [_shared(runs, own[0][1]) for runs, own in ((models[name], moments[name]) for name in models)]
    weight = sum(pairs for _, pairs in crossed)
    shared = max(0.0, sum(value * pairs for value, pairs in crossed) / weight) if weight else 0.0
    pooling = _pooling([(runs.failed.sum(axis=1), runs.present.sum(axis=1)) for runs in models.values()])
    return {name: _fit(models[name], *moments[name], prior, min(shared, MOST_SHARED), pooling) for name in models}


def _moments(runs: Runs) -> tuple[Array, Array, Array]:
    """Return means and variances of the runs that learn, and degrees of freedom, each [2, R].

    Equal scores of a rate say nothing about its noise, and must not make that of the other rates seem smaller: they have no
    degrees of freedom, unless all rates' are equal.
    """
    learned = runs.present & ~runs.failed
    count = learned.sum(axis=1)
    values = np.where(learned, np.stack((runs.validation, runs.test)), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = values.sum(axis=2) / count
        centred = np.where(learned, values - means[:, :, None], 0.0)
        variances = (centred**2).sum(axis=2) / (count - 1)
    # Scores that differ by rounding alone show no noise.
    variances[np.sqrt(np.nan_to_num(variances)) <= np.maximum(TIE, SINGLE * np.abs(np.nan_to_num(means)))] = 0.0
    variances[:, count < 2] = math.nan
    shown = (variances > 0) | ~(variances > 0).any(axis=1, keepdims=True)
    return means, variances, np.where(shown, np.maximum(count - 1, 0), 0)


def moderate(variances: Array, freedom: Array, prior: float) -> Array:
    """Return moderated variances, [R], from variances with their degrees of freedom and d0; NaN if there are none.

    A rate with no degrees of freedom has the mean of the others.
    """
    total = float(freedom.sum())
    own = np.where(freedom > 0, np.nan_to_num(variances), 0.0)
    pooled = float((freedom * own).sum() / total) if total else math.nan
    if math.isinf(prior):
        return np.full(own.shape, pooled)
    return np.asarray((prior * pooled + freedom * own) / (prior + freedom))


def _prior_freedom(samples: Sequence[tuple[Array, Array]]) -> float:
    """Estimate d0 from variances and their degrees of freedom; infinite if they differ no more than chance explains.

    Each variance is taken relative to the mean over its model's rates, to which it is shrunk.
    """
    logs, expected = [], []
    for variances, freedom in samples:
        use = (freedom > 0) & (variances > 0)
        if use.sum() < 2:
            continue
        half = freedom[use] / 2
        own = np.log(variances[use]) - special.digamma(half) + np.log(half)
        logs.append(((own - own.mean()) ** 2).sum())
        expected.append((float(use.sum() - 1), float(special.polygamma(1, half).mean())))
    total = sum(number for number, _ in expected)
    if not total:
        return math.inf
    excess = sum(logs) / total - sum(number * value for number, value in expected) / total
    return math.inf if excess <= 0 else 2 * _inverse_trigamma(excess)


def _inverse_trigamma(value: float) -> float:
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(special.polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(special.polygamma(2, x))
    return x


def _shared(runs: Runs, means: Array) -> tuple[float, int]:
    """Return the mean correlation of a seed's test scores at different rates, and the number of pairs of rates it is from."""
    residuals = np.where(runs.present & ~runs.failed, runs.test - means[:, None], math.nan)
    total, pairs = 0.0, 0
    for first in range(len(residuals)):
        for second in range(first):
            both = np.isfinite(residuals[first]) & np.isfinite(residuals[second])
            a, b = residuals[first][both], residuals[second][both]
            scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
            if both.sum() > 1 and scale > 0:
                total += float((a * b).sum()) / scale
                pairs += 1
    return (total / pairs, pairs) if pairs else (0.0, 0)


def _pooling(samples: Sequence[tuple[Array, Array]]) -> float:
    """Return the weight of the share of failed runs over all rates in that at one, given failed and all runs by rate.

    The numbers of failed runs are taken for beta-binomial, and their dispersion gives the weight: it is high where shares
    differ between rates no more than chance explains. Otherwise the rate that happens to have lost no run would be taken for
    one that loses none.
    """
    excess, expected, sizes = 0.0, 0, []
    for failed, runs in samples:
        failed, runs = failed[runs > 0], runs[runs > 0]
        share = failed.sum() / max(1, runs.sum())
        if 0 < share < 1:
            excess += float(((failed - runs * share) ** 2 / (runs * share * (1 - share))).sum()) - (len(runs) - 1)
            expected += len(runs) - 1
            sizes.append(runs.mean())
    if excess <= 0:
        return MOST_POOLING
    weight = (float(np.mean(sizes)) - 1) * expected / excess - 1
    return float(np.clip(weight, LEAST_POOLING, MOST_POOLING))


def _fit(
    runs: Runs,
    means: Array,
    variances: Array,
    freedom: Array,
    prior: Sequence[float],
    shared: float,
    pooling: float,
) -> Fit:
    learned = runs.present & ~runs.failed
    total = float(freedom[1].sum())
    known = total > 0 and bool(np.nansum(variances[1]) > 0)
    moderated = np.stack([moderate(variances[split], freedom[split], prior[split]) for split in (0, 1)])
    # Where noise differs, a rate noisier than the mean is moderated too far down, and it may be the best: its own variance stands.
    alone = (np.nan_to_num(variances) > moderated) & np.isfinite(prior)[:, None]
    moderated = np.where(alone, variances, moderated)
    typical = float(freedom[1][freedom[1] > 0].mean()) if known else 0.0
    # Rates share seeds, so their variances are not independent: the pooled one has fewer degrees of freedom than their sum.
    number = max(1, int((freedom[1] > 0).sum()))
    most = total / (1 + (number - 1) * shared**2)
    residuals = [
        np.where(learned, split - mean[:, None], 0.0)
        for split, mean in zip((runs.validation, runs.test), means, strict=True)
    ]
    scale = math.sqrt(float((residuals[0] ** 2).sum() * (residuals[1] ** 2).sum()))
    count, failed = runs.present.sum(axis=1), runs.failed.sum(axis=1)
    overall = (failed.sum() + 0.5) / (count.sum() + 1) if failed.any() else 0.0
    floor = [float(split[runs.failed].mean()) if failed.any() else 0.0 for split in (runs.validation, runs.test)]
    # A rate at which every run failed has no mean of its own; its runs fail in every simulated study too.
    means = np.where(np.isfinite(means), means, np.asarray(floor)[:, None])
    degrees = min(prior[1] + typical, most) if known else 0.0
    return Fit(
        present=runs.present,
        means=means,
        deviations=np.sqrt(moderated),
        freedom=degrees,
        degrees=np.where(alone[1], np.minimum(freedom[1], degrees), degrees),
        correlation=float(np.clip((residuals[0] * residuals[1]).sum() / scale, -1, 1)) if scale > 0 else 0.0,
        shared=shared,
        failing=(failed + pooling * overall) / (count + pooling) if failed.any() else np.zeros(len(count)),
        failures=failed,
        pooling=pooling,
        floor=np.asarray(floor),
    )


def choose(validation: Array, test: Array, present: Array, rule: Rule) -> tuple[Array, Array]:
    """Choose learning rates in many studies at once, as `selection` does in one.

    Args:
        validation, test: scores [..., R, S]; anything where a run is not `present`.
        present: [R, S].

    Returns:
        The index of the rate chosen for each seed, [..., S], and whether the seed counts, [S] or [..., S].
    """
    if rule == "per_seed":
        return _first_best(np.where(present, validation, -math.inf), -2), np.asarray(present.any(axis=0))
    count = present.sum(axis=1)
    means = np.where(present, test if rule == "on_test" else validation, 0.0).sum(axis=-1) / np.maximum(count, 1)
    best = _first_best(np.where(count == count.max(), means, -math.inf), -1)
    counts: Array = present[best]
    return np.repeat(best[..., None], present.shape[1], axis=-1), counts


def _first_best(scores: Array, axis: int) -> Array:
    """Return the index of the first score that is the highest up to rounding."""
    return np.asarray((scores >= scores.max(axis=axis, keepdims=True) - TIE).argmax(axis=axis))


def crossed(validation: Array, test: Array, present: Array, rule: Rule) -> Array:
    """Return the score at the chosen rates in many studies, [...], from seeds that had no part in the choice.

    Under `per_seed`, the rate that a seed chooses is scored by the mean of the other seeds at it. Otherwise the rate is
    chosen without each seed in turn, and scored by that seed. Where there is no other seed, it is the seed's own score.

    Args:
        validation, test, present: see `choose`.
    """
    count = present.sum(axis=1)
    if rule == "per_seed":
        best, counts = choose(validation, test, present, rule)
        sums = np.where(present, test, 0.0).sum(axis=-1)
        own = np.take_along_axis(test, best[..., None, :], axis=-2)[..., 0, :]
        others = count[best] - 1
        scores = np.where(others > 0, (np.take_along_axis(sums, best, axis=-1) - own) / np.maximum(others, 1), own)
        return np.asarray(np.where(counts, scores, 0.0).sum(axis=-1) / counts.sum())
    basis = np.where(present, test if rule == "on_test" else validation, 0.0)
    left = count[:, None] - present  # [R, S], of each rate without each seed
    means = (basis.sum(axis=-1, keepdims=True) - basis) / np.maximum(left, 1)
    candidates = (count == count.max())[:, None] & present
    best = _first_best(np.where(candidates, means, -math.inf), -2)
    scores, counts = np.take_along_axis(test, best[..., None, :], axis=-2)[..., 0, :], candidates.any(axis=0)
    return np.asarray(np.where(counts, scores, 0.0).sum(axis=-1) / counts.sum())


def freedom_of(fit: Fit, weights: Array) -> float:
    """Return the degrees of freedom of a weighted sum of the rates' variances (Satterthwaite), at most `Fit.freedom`.

    Args:
        weights: [R].
    """
    parts = (weights * np.nan_to_num(fit.deviations[1] ** 2))[weights > 0]
    return float(min(fit.freedom, parts.sum() ** 2 / (parts**2 / fit.degrees[weights > 0]).sum()))


def failing_shares(fit: Fit, draws: int, generator: np.random.Generator) -> Array:
    """Draw the probability that a run fails at each rate, [draws, R], of an even number of draws.

    The shares of a few runs say little about it, so the share over all rates and that at each are drawn from their posterior
    distributions, which are beta distributions. The second half of the draws repeats the first.
    """
    if not fit.failing.any():
        return np.zeros((draws, len(fit.failing)))
    runs, half = fit.present.sum(axis=1), draws // 2
    failed, whole = float(fit.failures.sum()), float(runs.sum())
    overall = generator.beta(failed + 0.5, whole - failed + 0.5, (half, 1))
    shares = generator.beta(
        fit.failures + fit.pooling * overall + 1e-9, runs - fit.failures + fit.pooling * (1 - overall) + 1e-9
    )
    return np.tile(shares, (2, 1))


def simulate(fit: Fit, draws: int, generator: np.random.Generator, failing: Array | None = None) -> tuple[Array, Array]:
    """Draw studies of one model and task: validation and test scores, each [draws, R, S], of an even number of draws.

    The second half of the draws repeats the first with the sign of the test scores' own noise turned, so that this noise
    cancels in means over draws.

    Args:
        failing: the probability that a run fails in each study, [draws, R]; by default the fitted one.
    """
    rates, seeds = fit.present.shape
    half = (draws // 2, rates, seeds)
    own = math.sqrt(1 - fit.shared) * generator.standard_normal((2, *half))
    common = math.sqrt(fit.shared) * generator.standard_normal((2, draws // 2, 1, seeds))
    validation, independent = own + common
    independent = math.sqrt(1 - fit.correlation**2) * independent
    test = fit.correlation * validation + np.stack((independent, -independent))
    noise = np.stack((np.tile(validation, (2, 1, 1)), test.reshape(draws, rates, seeds)))
    scores = fit.means[:, None, :, None] + noise * fit.deviations[:, None, :, None]
    if fit.failing.any():
        shares = np.broadcast_to(fit.failing, (draws, rates)) if failing is None else failing
        failed = np.tile(generator.random(half) < shares[: draws // 2, :, None], (2, 1, 1))
        scores = np.where(failed, fit.floor[:, None, None, None], scores)
    return scores[0], scores[1]
