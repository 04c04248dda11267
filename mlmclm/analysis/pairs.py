"""Two models on the same test examples: the difference of a score, with an interval and a test that pair the examples.

`comparison` asks what other fine-tuning seeds would give; this asks what other examples would, for the runs that are there.

- **Interval.** Percentile bootstrap over examples (Efron and Tibshirani 1993): a resample draws examples, the same for both
  sides and all seeds, and takes the difference of the scores on it. A score need not be a mean over examples: entity-level F1,
  Matthews' and the other correlations are computed of each resample.
- **Test.** Each example's two outcomes change sides at random, with probability 1/2; two-sided. For one seed and an outcome that
  is right or wrong the exact form is taken, McNemar's test.
- **Seeds.** A side is one cell, or several with a seed each; its score is the mean over them. Both sides have the same seeds,
  and where an example's outcomes change sides they do so for all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mlmclm.analysis.measures import Array, Measure, measure, outcome, weighted_mean
from mlmclm.errors import UserError
from mlmclm.results.examples import KeptExamples

RESAMPLES = 9_999
BATCH_VALUES = 1 << 21
"""Weights of the resamples that are computed at once: 16 MiB."""
TIE = 1e-12
GOLD = ("gold", "words", "entities_gold")
"""Columns that say nothing of the model."""
TESTED_ON = ("max_evaluation_examples", "max_evaluation_documents")
"""What a protocol says of the test examples."""


@dataclass(frozen=True)
class Pair:
    """What two sides got on the same examples; differences are the first minus the second. Scores are fractions of 1."""

    metric: str
    examples: int
    seeds: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    confidence: float
    p: float
    test: str
    """`mcnemar` or `permutation`."""
    only_first: int | None
    only_second: int | None
    """McNemar's: the examples that this side alone has right."""


def compare(
    first: Sequence[KeptExamples],
    second: Sequence[KeptExamples],
    *,
    metric: str,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    observer: Callable[[int], None] = lambda _: None,
) -> Pair:
    """Compares two sides; the same cells give the same numbers.

    Args:
        first, second: the cells of each side, one a seed; the two at a place have the same seed.
        metric: a score of theirs.
        confidence: of the interval, in (0, 1).
        resamples: of the bootstrap, and of the permutations where there are more.
        observer: gets how many have just been computed, of at most twice `resamples`.

    Raises:
        UserError: the cells were not tested on the same examples, or have no such score.
    """
    for cell in (*first[1:], *second):
        check_same_examples(first[0], cell)
    rows = first[0].rows
    if rows < 2:
        raise UserError(f"result {first[0].result['key']}: one test example is too little to compare on.")
    joined = [_joined(a, b) for a, b in zip(first, second, strict=True)]
    classes = len(first[0].label_names)
    one, other = (mean_over_seeds(metric, [cell.columns for cell in side], classes) for side in (first, second))

    def resampled(chosen: Array, axis: int) -> Array:
        """[R, rows], numbers of examples -> [R], the difference on them."""
        weights = counts(chosen.astype(np.int64), rows)
        observer(len(weights))
        return one(weights) - other(weights)

    batch = max(1, BATCH_VALUES // (2 * rows))
    bootstrap = stats.bootstrap(
        (np.arange(rows),),
        resampled,
        vectorized=True,
        n_resamples=resamples,
        batch=batch,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    scores = [float(side(np.ones((1, rows)))[0]) for side in (one, other)]
    discordant = _discordant(joined, metric)
    only_first, only_second = discordant or (None, None)
    return Pair(
        metric=metric,
        examples=rows,
        seeds=len(joined),
        first=scores[0],
        second=scores[1],
        difference=scores[0] - scores[1],
        low=float(bootstrap.confidence_interval.low),
        high=float(bootstrap.confidence_interval.high),
        confidence=confidence,
        p=mcnemar(*discordant)
        if discordant
        else permuted(mean_over_seeds(metric, joined, classes), rows, resamples, batch, observer),
        test="mcnemar" if discordant else "permutation",
        only_first=only_first,
        only_second=only_second,
    )


def check_same_examples(one: KeptExamples, other: KeptExamples) -> None:
    """Raises a `UserError` unless two cells were tested on the same examples."""
    told = {"family": "families", "task_data": "task data"}
    differing = [what for name, what in told.items() if one.result[name] != other.result[name]]
    differing += [name for name in TESTED_ON if one.result["protocol"].get(name) != other.result["protocol"].get(name)]
    if not differing and one.rows != other.rows:
        differing = ["numbers of examples"]
    if not differing:
        differing = [
            f"column {name}"
            for name in GOLD
            if name in one.columns and (one.columns[name] != other.columns[name]).any()
        ]
    if differing:
        raise UserError(
            f"results {one.result['key']} ({one.result['task']}) and {other.result['key']} ({other.result['task']}) cannot be "
            f"paired: they were tested on different examples ({', '.join(differing)} differ)."
        )


def mcnemar(only_first: int, only_second: int) -> float:
    """McNemar's exact two-sided p value; 1 where the sides are right on the same examples.

    Args:
        only_first, only_second: how many examples one side alone has right.
    """
    total = only_first + only_second
    return float(stats.binomtest(only_first, total, 0.5).pvalue) if total else 1.0


def permuted(
    score: Measure, rows: int, resamples: int, batch: int, observer: Callable[[int], None] = lambda _: None
) -> float:
    """The two-sided p value of the permutation test: over all 2^rows exchanges where that is no more than `resamples`, else
    (1 + as extreme ones) / (1 + resamples).

    scipy.stats.permutation_test gives the same, but shuffles every pair by itself and has no use for weights.

    Args:
        score: [R, 2 x rows], weights of the first side's examples and then of the second's -> [R].
    """
    generator = np.random.default_rng(1)
    exact = 2**rows <= resamples
    total = 2**rows if exact else resamples

    def differences(exchanged: Array) -> Array:
        """[R, rows], 1 where an example's outcomes change sides -> [R]."""
        weights = np.hstack((1 - exchanged, exchanged))
        return score(weights) - score(1 - weights)

    observed = abs(differences(np.zeros((1, rows)))[0])
    extreme = 0
    for start in range(0, total, batch):
        count = min(batch, total - start)
        if exact:
            exchanged = np.arange(start, start + count)[:, None] >> np.arange(rows) & 1
        else:
            exchanged = generator.integers(0, 2, (count, rows), dtype=np.int8)
        observer(count)
        extreme += int((abs(differences(exchanged.astype(np.float64))) >= observed - TIE).sum())
    return extreme / total if exact else (1 + extreme) / (1 + total)


def counts(chosen: Array, rows: int) -> Array:
    """How often each of `rows` is chosen: int [R, any] -> float [R, rows]."""
    places = chosen + rows * np.arange(len(chosen))[:, None]
    return np.bincount(places.ravel(), minlength=len(chosen) * rows).reshape(len(chosen), rows).astype(np.float64)


def mean_over_seeds(metric: str, seeds: Sequence[Mapping[str, Array]], classes: int) -> Measure:
    """The mean over seeds of a score; where the score is a mean over examples, of each example's mean over seeds, which is the
    same in one go.

    Args:
        seeds: the columns of each.
    """
    name = outcome(metric, seeds[0])
    if name is not None:
        return weighted_mean(np.mean([columns[name] for columns in seeds], axis=0))
    values = [measure(metric, columns, classes) for columns in seeds]
    return lambda weights: np.mean([value(weights) for value in values], axis=0)


def _joined(a: KeptExamples, b: KeptExamples) -> dict[str, Array]:
    return {name: np.concatenate((a.columns[name], b.columns[name])) for name in a.columns}


def _discordant(joined: Sequence[dict[str, Array]], metric: str) -> tuple[int, int] | None:
    """How many examples each side alone has right; None for several seeds and for outcomes other than right or wrong."""
    name = outcome(metric, joined[0])
    if len(joined) > 1 or name is None:
        return None
    sides = np.split(joined[0][name].astype(np.float64), 2)
    first, second = (side[~np.isnan(sides[0])] for side in sides)
    if not np.isin((first, second), (0, 1)).all():
        return None
    return int((first > second).sum()), int((second > first).sum())
