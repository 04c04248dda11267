"""Comparison of two models on the same test examples: a difference of scores with a paired interval and a paired test.

`comparison` asks what other fine-tuning seeds would give. This module asks what other examples would give for the runs
that exist.

- **Interval.** Percentile bootstrap over examples (Efron and Tibshirani 1993): each resample draws examples, the same
  for both sides and all seeds, and takes the difference of the scores on them. A score need not be a mean over
  examples: entity-level F1, Matthews' correlation and the other correlations are recomputed on each resample.
- **Test.** A two-sided permutation test: each example's two outcomes are exchanged at random, with probability 1/2. For
  one seed and an outcome that is right or wrong, the exact form is used, McNemar's test.
- **Seeds.** A side is one cell, or several cells with different seeds; its score is the mean over them. Both sides have
  the same seeds, and an exchange of an example's outcomes applies to all seeds. Neither interval nor test knows what
  other seeds would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from mlmclm.analysis.effects import Effect, fold_scores
from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples
from mlmclm.results.intervals import TIE, all_equal, contrast
from mlmclm.results.measures import Array, Measure, Measures, WeightedMean, measure
from mlmclm.results.resampling import BATCH_VALUES, RESAMPLES, resampled_interval

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
    seeds: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    """Ends of the interval over examples; NaN if resampling them changes nothing."""
    confidence: float
    p: float
    test: str
    """`mcnemar` or `permutation`."""
    equal_seeds: bool
    """Whether the seeds of a side, if it has several, give equal scores, so that their noise is not known."""
    only_first: int | None
    only_second: int | None
    """Counts of McNemar's test: the examples that only this side has right; None for the permutation test."""


def compare(
    first: Sequence[KeptExamples],
    second: Sequence[KeptExamples],
    *,
    metric: str,
    measures: Measures,
    gold: Sequence[str],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    observer: Callable[[int], None] = lambda _: None,
) -> PairedComparison:
    """Compare two sides; the same cells always give the same numbers.

    Args:
        first, second: the cells of each side, one per seed; cells at the same position have the same seed.
        measures: the scores that the cells' family computes from columns (`Family.measures`).
        gold: the columns that depend on the test data alone (`Family.gold_columns`).
        confidence: of the interval, in (0, 1).
        resamples: the number of bootstrap resamples, and the maximum number of permutations.
        observer: called with the number of resamples just computed; at most twice `resamples` in total.

    Raises:
        UserError: the cells were not tested on the same examples, or have no such score.
    """
    for cell in (*first[1:], *second):
        check_same_examples(first[0], cell, gold)
    rows = first[0].rows
    if rows < 2:
        raise UserError(f"result {first[0].result['key']}: one test example is too little to compare on.")
    joined = [
        {name: np.concatenate((a.columns[name], b.columns[name])) for name in a.columns}
        for a, b in zip(first, second, strict=True)
    ]
    classes = len(first[0].label_names)
    sides = [cell.columns for cell in first], [cell.columns for cell in second], joined
    by_seed = [[measure(metric, measures(columns, classes)) for columns in seeds] for seeds in sides]
    one, other, exchanged = map(mean_over_seeds, by_seed)

    # Halved because the permutation test has two weights per example, one for each side.
    batch = max(1, BATCH_VALUES // (2 * rows))
    low, high = resampled_interval(
        lambda weights: one(weights) - other(weights),
        rows,
        confidence=confidence,
        resamples=resamples,
        batch=batch,
        observer=observer,
    )
    once = np.ones((1, rows))
    scores = [float(side(once)[0]) for side in (one, other)]
    equal_seeds = any(all_equal([float(seed(once)[0]) for seed in side]) for side in by_seed[:2])
    discordant = _discordant(exchanged) if len(joined) == 1 else None
    only_first, only_second = discordant or (None, None)
    return PairedComparison(
        metric=metric,
        examples=rows,
        seeds=len(joined),
        first=scores[0],
        second=scores[1],
        difference=scores[0] - scores[1],
        low=low,
        high=high,
        confidence=confidence,
        p=mcnemar(*discordant) if discordant else permuted(exchanged, rows, resamples, batch, observer),
        test="mcnemar" if discordant else "permutation",
        equal_seeds=equal_seeds,
        only_first=only_first,
        only_second=only_second,
    )


def check_same_examples(one: KeptExamples, other: KeptExamples, gold: Sequence[str]) -> None:
    """Raise a `UserError` that names what differs, unless two cells were tested on the same examples."""
    told = {"family": "families", "task_data": "task data"}
    differing = [what for name, what in told.items() if one.result.get(name) != other.result.get(name)]
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
    """Return McNemar's exact two-sided p value; 1 if both sides are right on the same examples."""
    total = only_first + only_second
    return float(stats.binomtest(only_first, total, 0.5).pvalue) if total else 1.0


def permuted(score: Measure, rows: int, resamples: int, batch: int, observer: Callable[[int], None]) -> float:
    """Return the two-sided p value of the permutation test.

    All 2^rows exchanges are enumerated if there are at most `resamples` of them; otherwise they are sampled, and p is
    (1 + the number of extreme ones) / (1 + resamples). scipy.stats.permutation_test gives the same, but it shuffles
    every pair by itself and cannot make use of weights.

    Args:
        score: maps weights [R, 2 x rows], of the first side's examples and then of the second's, to scores [R].
    """
    generator = np.random.default_rng(1)
    exact = 2**rows <= resamples
    total = 2**rows if exact else resamples

    def differences(exchanged: Array) -> Array:
        """Map exchanges [R, rows], 1 where an example's outcomes change sides, to differences of scores [R]."""
        weights = np.hstack((1 - exchanged, exchanged))
        return score(weights) - score(1 - weights)

    observed = abs(differences(np.zeros((1, rows)))[0])
    extreme = 0
    for start in range(0, total, batch):
        count = min(batch, total - start)
        if exact:
            # The bits of each number from 0 to 2^rows - 1 are one pattern of exchanges.
            exchanged = np.arange(start, start + count)[:, None] >> np.arange(rows) & 1
        else:
            exchanged = generator.integers(0, 2, (count, rows), dtype=np.int8)
        observer(count)
        # The tolerance counts differences that equal the observed one up to rounding as extreme.
        extreme += int((abs(differences(exchanged.astype(np.float64))) >= observed - TIE).sum())
    return extreme / total if exact else (1 + extreme) / (1 + total)


def compare_with_seeds(
    first: Sequence[Measure], second: Sequence[Measure], rows: int, confidence: float = 0.95
) -> dict[str, Any]:
    """Compare two sides that chose nothing, with the noise of seeds and of examples in one interval.

    The variance is that of the mean over each side's seeds, and the jackknife's over examples, which both sides share.

    Args:
        first, second: the score of each seed, at least two on a side.
        rows: the number of examples.

    Returns:
        The fields of `PairedComparison` that do not depend on a test over examples, and what the interval `covers`. Where a side
        has equal scores, `low`, `high` and `p` are NaN, as the noise of seeds is not known.
    """
    sides, means = [], []
    for seeds in (first, second):
        own = contrast([[float(score(np.ones((1, rows)))[0]) for score in seeds]], [1.0])
        sides.append(Effect(own, own, np.ones(1), 0.0, fold_scores(mean_over_seeds(seeds), rows)))
        means.append(own.value)
    found = sides[0].minus(sides[1], confidence)
    return {
        "examples": rows,
        "seeds": len(first),
        "first": means[0],
        "second": means[1],
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "confidence": confidence,
        "p": found.p,
        "covers": BOTH,
    }


def mean_over_seeds(seeds: Sequence[Measure]) -> Measure:
    """Return the mean of a score over seeds, given the score of each seed's cell."""
    means = [score.values for score in seeds if isinstance(score, WeightedMean)]
    if len(means) == len(seeds):
        # If the score is a mean over examples, averaging each example over seeds first gives the same in one pass.
        return WeightedMean(np.mean(means, axis=0))
    return lambda weights: np.mean([score(weights) for score in seeds], axis=0)


def _discordant(score: Measure) -> tuple[int, int] | None:
    """Count the examples that only one side has right; None if they aren't right or wrong.

    Args:
        score: of the first side's examples and then of the second's.
    """
    if not isinstance(score, WeightedMean):
        return None
    sides = np.split(score.values, 2)
    first, second = (side[~np.isnan(sides[0])] for side in sides)
    if not np.isin((first, second), (0, 1)).all():
        return None
    return int((first > second).sum()), int((second > first).sum())
