"""A grid of learning rates that extends itself: the rates that a task gets in addition to those of the list.

When every cell that the list asks for has a result, and the best rate of any model is the lowest or the highest, the next rate on
that side is added for all models with all seeds, and so on until the best rates of all lie inside, or no rate is left to add.
All models are tried at the same rates. Otherwise one can win by luck: its noise leads to better rates, at which an equally good
model is never tried. If a rate inside has the same score, the best rate does not lie at the end, and no rate is added.

The rates follow from the scores of requested cells, so neither the order of results nor a restart changes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mlmclm.analysis.simulated_choices import competing_rates
from mlmclm.results.intervals import TIE, mean
from mlmclm.results.metrics import Rule
from mlmclm.seeds import Seed

LOWEST, HIGHEST = "lowest", "highest"


@dataclass(frozen=True)
class Extension:
    """The rates that are added to a list.

    Attributes:
        added: those below the list, then those above it, the nearest first.
        to_come: the largest number of rates that may still be added; 0 once the extension has ended.
    """

    added: tuple[float, ...]
    to_come: int


def extension(
    models: Sequence[Mapping[tuple[float, Seed], float | None]],
    rates: Sequence[float],
    lower: Sequence[float],
    higher: Sequence[float],
    seeds: Sequence[Seed],
    *,
    rule: Rule = "mean",
) -> Extension:
    """Return the rates that the scores so far add to the list of one (task, setting).

    Args:
        models: for each model, its score by (learning rate, seed) on the split that chooses; None for a run that diverged, failed or
            has no score, and no entry for a run without a result.
        rates: the list.
        lower, higher: the rates that may be added below and above it, the nearest first.
        rule: how the best rate is chosen (`selection`).
    """
    below = above = 0
    while True:
        added = (*lower[:below], *higher[:above])
        tried = (*rates, *added)
        remaining = len(lower) - below, len(higher) - above
        best_ends = set[str]()
        for scores in models:
            cells = [(rate, seed) for rate in tried for seed in seeds]
            if any(cell not in scores for cell in cells):
                return Extension(added, sum(remaining))
            best_ends |= ends({cell: scores[cell] for cell in cells}, tried, rule)
        steps = LOWEST in best_ends and remaining[0] > 0, HIGHEST in best_ends and remaining[1] > 0
        if not any(steps):
            return Extension(added, 0)
        below, above = below + steps[0], above + steps[1]


def ends(
    scores: Mapping[tuple[float, Seed], float | None], tried: Collection[float], rule: Rule = "mean"
) -> frozenset[str]:
    """Return at which ends of the tried rates, `LOWEST` or `HIGHEST`, a best rate lies; at neither if only one rate was tried.

    Args:
        scores: by (learning rate, seed) on the split that chooses, of cells that may be chosen; None as for `extension`.
        rule: under `per_seed`, each seed has a best rate; otherwise the best rate is the one with the highest mean that competes.
    """
    by_rate: dict[float, dict[Seed, float]] = {}
    lost = Counter(rate for (rate, _), score in scores.items() if score is None)
    for (rate, seed), score in scores.items():
        if score is not None:
            by_rate.setdefault(rate, {})[seed] = score
    if rule == "per_seed":
        seeds = dict.fromkeys(seed for by_seed in by_rate.values() for seed in by_seed)
        curves = [{rate: by_seed[seed] for rate, by_seed in by_rate.items() if seed in by_seed} for seed in seeds]
    else:
        rates = competing_rates({rate: (len(by_seed), len(by_seed) + lost[rate]) for rate, by_seed in by_rate.items()})
        curves = [{rate: mean(list(by_seed.values())) for rate, by_seed in by_rate.items() if rate in rates}]
    low, high = min(tried), max(tried)
    best_ends = set()
    for curve in filter(None, curves):
        best = [rate for rate, score in curve.items() if score >= max(curve.values()) - TIE]
        if low < high and not any(low < rate < high for rate in best):
            best_ends.add(LOWEST if low in best else HIGHEST)
    return frozenset(best_ends)
