"""Claims that a planned study can settle: it has their models and tasks, and finds a difference of the published size.

Pairs, weights and the correction are those of the verdicts on the study's results (`tested_claims`), so that the plan and the
report count in the same way. Scores are simulated by the noise that is known before the study (`analysis.planned_power`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.analysis.contrasts import Effects, PairOnTask, contrast_of, model_weights
from mlmclm.analysis.power import POWER, smallest_shown
from mlmclm.reports import text
from mlmclm.reports.claim_pairs import PairFinder, matching_tasks, weighed
from mlmclm.reports.tested_claims import found_by
from mlmclm.results.intervals import NAN

Settles = Literal["yes", "too small", "not known", "no"]
"""Whether a plan settles a claim: a difference of the published size is found; it is too small for the plan; no difference is
published, or the noise is not known; or models or tasks are missing."""


@dataclass(frozen=True)
class PlannedClaim:
    """A claim, and what a planned study can say of it.

    Attributes:
        smallest: the smallest true difference that is found with 80 % power (`POWER`), as a fraction of 1; NaN if it is not known.
        published: the published difference.
        pairs, tasks: how many it is the mean over.
        needs: what the study lacks, or what would settle it.
    """

    claim: str
    source: str
    says: str
    settles: Settles
    smallest: float = NAN
    published: float = NAN
    pairs: int = 0
    tasks: int = 0
    needs: str = ""


@dataclass(frozen=True)
class PlannedClaims:
    """The claims that a planned study can settle, which share the error of all tests.

    Attributes:
        tests: number of tests that Holm's method corrects over.
        runs: the pretraining runs of each model.
    """

    claims: tuple[PlannedClaim, ...]
    tests: int
    runs: int

    def lines(self) -> Iterator[str]:
        """Yield a table, a line for each claim; differences are in points."""
        if not self.claims:
            return
        if all(own.settles == "no" for own in self.claims):
            yield f"claims: none of the {len(self.claims)} can be settled; {self.claims[0].claim}, for example: {self.claims[0].needs}"
            return
        yield (
            f"claims, with {text.plural(self.runs, 'pretraining run')} each: the smallest difference that is found with "
            f"{POWER * 100:g} % power and the published one, in points (Holm's method over {text.plural(self.tests, 'test')}):"
        )
        rows = [("claim", "settles", "finds", "published", "needs"), *map(_row, self.claims)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            yield "  ".join(("", *cells, row[4])).rstrip()


def _row(own: PlannedClaim) -> tuple[str, str, str, str, str]:
    found = "" if math.isnan(own.smallest) else text.points(own.smallest)
    published = "" if math.isnan(own.published) else text.points(abs(own.published))
    return own.claim, own.settles, found, published, own.needs


@dataclass(frozen=True)
class ClaimPlan:
    """A planned study as claims see it.

    Attributes:
        finder: its models and tasks.
        effects: of equal models with the noise that is known, over their pretraining runs.
        seeds, runs: of each rate and of each model.
        zero_shot: the tasks that models answer without training.
        confidence: of the tests.
    """

    finder: PairFinder
    effects: Effects
    seeds: int
    runs: int = 1
    zero_shot: Collection[str] = ()
    confidence: float = 0.95

    def planned(self, claims: Sequence[SourcedClaim]) -> PlannedClaims:
        """Say of each claim whether the study can settle it."""
        parts = [self._parts(each) for each in claims]
        tested = [
            own for (own, _), each in zip(parts, claims, strict=True) if own and each.claim.statistic != "same_data"
        ]
        number = len({_key(own) for own in tested})
        level = (1 - self.confidence) / max(1, number)
        rows = (self._claim(each, *own, level) for each, own in zip(claims, parts, strict=True))
        return PlannedClaims(tuple(rows), number, self.runs)

    def _parts(self, sourced: SourcedClaim) -> tuple[list[PairOnTask], str]:
        claim = sourced.claim
        if claim.statistic == "zero_shot":
            tasks = matching_tasks(claim.tasks.model_copy(update={"families": None}), dict.fromkeys(self.zero_shot, ""))
            if not tasks:
                return [], "the study has no such zero-shot task"
            return weighed(*self.finder.pairs(claim), tasks, lambda pair, task: True)
        if claim.statistic == "same_data":
            return weighed(*self.finder.pairs(claim), [""], lambda pair, task: True)
        return self.finder.parts(claim, lambda pair, task: True)

    def _claim(self, sourced: SourcedClaim, parts: list[PairOnTask], lacking: str, level: float) -> PlannedClaim:
        claim = sourced.claim
        found = PlannedClaim(
            sourced.name,
            sourced.cited,
            claim.says,
            "no",
            published=sourced.published,
            pairs=len({(part.first, part.second) for part in parts}),
            tasks=len({part.task for part in parts} - {""}),
        )
        if not parts:
            return replace(found, needs=f"{lacking}.")
        if claim.statistic != "score":
            if claim.statistic == "same_data":
                return replace(found, settles="yes", needs="It follows from how the models are trained.")
            why = {
                "zero_shot": "What it finds depends on the noise of the examples.",
                "sensitivity": "What it finds depends on the curves over learning rates.",
            }
            return replace(found, settles="not known", needs=why[claim.statistic])
        contrast = contrast_of(self.effects, parts, self.confidence)
        smallest = smallest_shown(contrast, level)
        if math.isnan(smallest):
            lacks = sorted({task for *_, task, _ in parts if not _known(self.effects, task)})
            noise = f" on {text.listing(lacks)}" if lacks else ""
            return replace(found, settles="not known", needs=f"The noise{noise} is not known.")
        found = replace(found, smallest=smallest)
        if math.isnan(sourced.published):
            return replace(found, settles="not known", needs="No difference is published.")
        if abs(sourced.published) >= smallest:
            return replace(found, settles="yes")
        needs = found_by(sourced.published, "it", contrast, self.runs, self.seeds, level)
        return replace(found, settles="too small", needs=needs)


def _key(parts: Sequence[PairOnTask]) -> frozenset[tuple[str, str, float]]:
    """Return the test of some pairs: two claims that weigh the models alike, or the other way around, are one test."""
    weights = {
        (task, model): round(weight, 12) for task, own in model_weights(parts).items() for model, weight in own.items()
    }
    sign = math.copysign(1.0, next((weight for _, weight in sorted(weights.items()) if weight), 1.0))
    return frozenset((task, model, sign * weight) for (task, model), weight in weights.items())


def _known(effects: Mapping[tuple[str, str], object], task: str) -> bool:
    return any(each == task for _, each in effects)
