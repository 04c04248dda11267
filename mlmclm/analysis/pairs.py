"""Comparison of two models on the same test examples: a difference of scores with an interval and a p value of one method.

`comparison` asks what other fine-tuning seeds would give. This module asks what other examples would give for the runs
that exist.

- **Right or wrong answers**, each example by itself: McNemar's test with mid-p (Fagerland, Lydersen and Laake 2013), and
  Tango's (1998) score interval, which exists for perfect models too. Where test and interval disagree about a difference
  of 0, the interval's critical value is replaced by the one at which they agree.
- **Any other score, and examples in groups**: Student's interval and test with the jackknife over folds of the examples
  (`effects.fold_scores`). For a mean over up to 100 examples they equal those of the paired t test. Examples of a group, such as questions
  on one passage, are in one fold, so the interval covers the choice of groups.
- **Seeds.** A side is one cell, or several cells with different seeds; its score is the mean over them. Both sides have
  the same seeds. Neither interval nor test covers other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.effects import Effect, fold_scores, fold_variance
from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.results.intervals import NAN, TIE, all_equal, estimate, student
from mlmclm.results.measures import Array, Measure, Measures, WeightedMean, measure

SEEDS, EXAMPLES, BOTH = "seeds", "examples", "seeds and examples"
"""The noise that an interval covers: other fine-tuning seeds, other test examples, or both."""
TESTED_ON = ("max_evaluation_examples", "max_evaluation_documents")
"""Protocol settings that determine the test examples."""


@dataclass(frozen=True)
class PairedComparison:
    """The comparison of two sides on the same examples.

    Differences are the first side minus the second. Scores are fractions of 1.
    """

    metric: str
    examples: int
    groups: int | None
    """The number of groups of examples that belong together; None if all examples are independent."""
    seeds: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    """Ends of the interval over examples; NaN if all examples show the same difference, and so no noise."""
    confidence: float
    p: float
    test: str
    """`mcnemar` or `t`."""
    equal_seeds: bool
    """Whether a side has several seeds with equal scores, so that the noise of seeds is not known."""
    only_first: int | None
    only_second: int | None
    """Counts of McNemar's test: the examples that only this side has right; None for the other test."""


def compare_sides(
    first: Sequence[KeptExamples],
    second: Sequence[KeptExamples],
    *,
    metric: str,
    measures: Measures,
    gold: Sequence[str],
    confidence: float = 0.95,
) -> PairedComparison:
    """Compare two sides; the same cells always give the same numbers.

    Args:
        first, second: the cells of each side, one per seed; cells at the same position have the same seed.
        measures: the scores that the cells' family computes from columns (`Family.measures`).
        gold: the columns that depend on the test data alone (`Family.gold_columns`).
        confidence: of the interval, in (0, 1).

    Raises:
        UserError: the cells were not tested on the same examples, or have no such score.
    """
    for cell in (*first[1:], *second):
        check_same_examples(first[0], cell, gold)
    rows, groups, classes = first[0].rows, first[0].groups, len(first[0].label_names)
    units = first[0].units
    if units < 2:
        unit = "test example" if groups is None else "group of test examples"
        raise UserError(f"result {first[0].result['key']}: one {unit} is too little to compare on.")
    by_seed = [[measure(metric, measures(cell.columns, classes)) for cell in cells] for cells in (first, second)]
    one, other = map(mean_over_seeds, by_seed)
    once = np.ones((1, rows))
    scores = [float(side(once)[0]) for side in (one, other)]
    discordant = _discordant(one, other)
    # Answers of a group are not independent, so McNemar's test is used only if no answer differs, and then counts groups.
    if groups is not None:
        discordant = (0, 0, units) if discordant and not any(discordant[:2]) else None
    if discordant is None:
        variance, freedom = fold_variance(fold_scores(one, rows, groups) - fold_scores(other, rows, groups))
        # The jackknife of equal differences leaves rounding errors.
        error = math.sqrt(variance) if variance > TIE**2 else NAN
        difference = estimate(scores[0] - scores[1], error, freedom, confidence=confidence)
        p = 1.0 if math.isnan(error) and abs(difference.value) <= TIE else difference.p
        ends = difference.low, difference.high
    else:
        p, ends = mcnemar(*discordant[:2]), paired_interval(*discordant, confidence=confidence)
    return PairedComparison(
        metric=metric,
        examples=rows,
        groups=None if groups is None else units,
        seeds=len(first),
        first=scores[0],
        second=scores[1],
        difference=scores[0] - scores[1],
        low=ends[0],
        high=ends[1],
        confidence=confidence,
        p=p,
        test="mcnemar" if discordant else "t",
        equal_seeds=any(all_equal([float(seed(once)[0]) for seed in side]) for side in by_seed),
        only_first=discordant[0] if discordant else None,
        only_second=discordant[1] if discordant else None,
    )


def check_same_examples(one: KeptExamples, other: KeptExamples, gold: Sequence[str]) -> None:
    """Raise a `UserError` that names what differs, unless two cells were tested on the same examples."""
    plurals = {"family": "families", "task_data": "task data"}
    differing = [plural for name, plural in plurals.items() if one.result.get(name) != other.result.get(name)]
    protocols = [cell.result.get("protocol", {}) for cell in (one, other)]  # other tools' results have none
    differing += [name for name in TESTED_ON if protocols[0].get(name) != protocols[1].get(name)]
    if not differing and one.rows != other.rows:
        differing = ["numbers of examples"]
    if not differing:
        differing = [f"column {name}" for name in gold if (one.columns[name] != other.columns[name]).any()]
    if differing:
        raise UserError(
            f"results {one.result['key']} ({one.result['task']}) and {other.result['key']} ({other.result['task']}) cannot be "
            f"paired: they were tested on different examples ({', '.join(differing)} differ)."
        )


def mcnemar(only_first: int, only_second: int) -> float:
    """Return McNemar's two-sided mid-p value; 1 if both sides are right on the same examples."""
    fewer, total = min(only_first, only_second), only_first + only_second
    if 2 * fewer == total:
        return 1.0
    return float(2 * stats.binom.cdf(fewer, total, 0.5) - stats.binom.pmf(fewer, total, 0.5))


def paired_interval(only_first: int, only_second: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the difference of two shares of right answers on the same examples: Tango's, adjusted to agree with `mcnemar`.

    Args:
        only_first, only_second: the examples that one side alone has right.
        total: all examples.
    """
    critical = float(special.ndtri(0.5 + confidence / 2))
    p, at_zero = mcnemar(only_first, only_second), abs(_score(0.0, only_first, only_second, total))
    if (p < 1 - confidence) != (at_zero > critical):
        critical *= at_zero / -float(special.ndtri(p / 2))
    centre = (only_first - only_second) / total

    def end(limit: float, wanted: float) -> float:
        # The statistic falls with the difference and is 0 at the observed one.
        if abs(_score(limit, only_first, only_second, total)) <= critical:
            return limit
        # Bisection needs only signs; at its limits the statistic is infinite.
        return float(
            optimize.bisect(lambda at: _score(at, only_first, only_second, total) - wanted, *sorted((centre, limit)))
        )

    return end(-1.0, critical), end(1.0, -critical)


def _score(difference: float, only_first: int, only_second: int, total: int) -> float:
    """Return Tango's score statistic of a difference: standard normal if it is the true one, infinite if it is impossible."""
    above = only_first - only_second - total * difference
    linear = -only_first - only_second + (2 * total - only_first + only_second) * difference
    # The restricted maximum likelihood estimate of the share that the second side alone has right.
    root = math.sqrt(max(0.0, linear**2 + 8 * total * only_second * difference * (1 - difference)))
    share = (root - linear) / (4 * total)
    variance = total * (2 * share + difference * (1 - difference))
    if abs(above) <= TIE * total:
        return 0.0
    return above / math.sqrt(variance) if variance > TIE else math.copysign(math.inf, above)


def compare_with_seeds(
    first: Sequence[Measure],
    second: Sequence[Measure],
    rows: int,
    confidence: float = 0.95,
    groups: Array | None = None,
) -> dict[str, Any]:
    """Compare two sides without a choice of learning rate, with the noise of seeds and of examples in one interval.

    The variance is the sum of two: of each side's mean over seeds, and the jackknife's over the examples, which both sides share.

    Args:
        first, second: the score of each seed, at least two on a side.
        rows: the number of examples.
        groups: the groups of examples that belong together, as for `fold_scores`.

    Returns:
        The fields of `PairedComparison` that do not depend on a test over examples, and what the interval `covers`. Where a side
        has equal scores, `low`, `high` and `p` are NaN, as the noise of seeds is not known.
    """
    sides = [score_of_seeds(seeds, rows, groups) for seeds in (first, second)]
    difference = mean_difference(
        {(side, ""): effect for side, effect in zip("ab", sides, strict=True)}, ("a", "b"), [""], confidence
    ).whole
    return {
        "examples": rows,
        "groups": None if groups is None else int(groups.max()) + 1,
        "seeds": len(first),
        "first": sides[0].seeds.value,
        "second": sides[1].seeds.value,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "confidence": confidence,
        "p": difference.p,
        "covers": BOTH,
    }


def score_of_seeds(seeds: Sequence[Measure], rows: int, groups: Array | None = None) -> Effect:
    """Return the score of a side without a choice of learning rate, given that of each seed."""
    over_seeds = student([float(score(np.ones((1, rows)))[0]) for score in seeds])
    return Effect(over_seeds, over_seeds, np.ones(1), 0.0, fold_scores(mean_over_seeds(seeds), rows, groups))


def mean_over_seeds(seeds: Sequence[Measure]) -> Measure:
    """Return the mean of a score over seeds, given the score of each seed's cell."""
    means = [score.values for score in seeds if isinstance(score, WeightedMean)]
    if len(means) == len(seeds):
        # If the score is a mean over examples, averaging each example over seeds first gives the same in one pass.
        return WeightedMean(np.mean(means, axis=0))
    return lambda weights: np.mean([score(weights) for score in seeds], axis=0)


def _discordant(one: Measure, other: Measure) -> tuple[int, int, int] | None:
    """Count the examples that only the first side has right, those that only the second has, and all; None if scores aren't 0 or 1."""
    if not isinstance(one, WeightedMean) or not isinstance(other, WeightedMean):
        return None
    first, second = (side.values[~np.isnan(one.values)] for side in (one, other))
    if not np.isin((first, second), (0, 1)).all():
        return None
    return int((first > second).sum()), int((second > first).sum()), len(first)
