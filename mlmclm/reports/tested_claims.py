"""Tests of claims from files by a study's results. Verdicts: seen, contradicted, too small to tell, or not tested here.

A claim about several pairs of models and several tasks is one test, of the mean difference over pairs and tasks
(`analysis.contrasts`). All tasks have equal weight, and so have the pairs on a task. Holm's correction is over all claims that are
tested together: if the models are equal in everything that the claims are about, at most 5 % of studies see or contradict any claim.
A lead of a model at chance does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist, harmonic_mean
from typing import Literal

import numpy as np
import pandas as pd

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.claim import Claim, SourcedClaim
from mlmclm.analysis.claim_sensitivities import RateVariance, rate_variance, sensitivity_test
from mlmclm.analysis.contrasts import Contrast, PairOnTask, mean_difference, model_weights, weighted_sum
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.power import runs_or_obstacle, seeds_or_obstacle, smallest_difference
from mlmclm.analysis.results import columns, records, table
from mlmclm.analysis.stated_claims import so_far
from mlmclm.reports import text
from mlmclm.reports.claim_pairs import Lacking, Pair, PairFinder, described_tasks, matching_tasks, traits_of, weighed
from mlmclm.reports.paired_models import paired_sum
from mlmclm.reports.study_facts import StudyFacts, ZeroShotFacts
from mlmclm.reports.wording import detectable_difference, pretraining_runs
from mlmclm.results.intervals import NAN, Estimate, estimate, holm

Finding = Literal["seen", "contradicted", "too small to tell", "not tested here"]
CLAIM_VERDICT_COLUMNS = columns(
    "object: claim source says verdict reason settle",
    "float64: difference low high p p_holm published",
    "int64: pairs tasks runs",
)


@dataclass(frozen=True)
class ClaimVerdict:
    """A study's verdict on a claim.

    Attributes:
        claim: the claim's name.
        source: where the claim is from.
        reason: the difference with its interval and what it is based on, or what the study lacks.
        settle: what would settle the claim, if the verdict is "too small to tell".
        difference: first minus second, with its interval, as a fraction of 1; a difference of sensitivities has none.
        p, p_holm: p value, also after Holm's correction over all tested claims; NaN if there is no test.
        published: the published difference.
        pairs, tasks: the numbers of pairs and of tasks that the difference is averaged over.
        runs: the fewest pretraining runs of a model.
    """

    claim: str
    source: str
    says: str
    verdict: Finding
    reason: str
    settle: str = ""
    difference: float = NAN
    low: float = NAN
    high: float = NAN
    p: float = NAN
    p_holm: float = NAN
    published: float = NAN
    pairs: int = 0
    tasks: int = 0
    runs: int = 0


@dataclass(frozen=True)
class _Tested:
    """A claim's test, before the correction over all claims.

    Attributes:
        draft: the verdict before the correction; it is final if there is no test.
        p: the p value of the difference, without leads of models at chance.
        contrast: the difference, from which the power is computed; None for a statistic whose power is not known.
        models: the models of the pairs; empty if there is no test.
    """

    draft: ClaimVerdict
    p: float = NAN
    contrast: Contrast | None = None
    models: frozenset[str] = frozenset()


def verdicts_on(claims: Sequence[SourcedClaim], analysis: Analysis, facts: StudyFacts) -> list[ClaimVerdict]:
    """Say of each claim what the results show."""
    bench = _Bench(analysis, facts)
    tested = [bench.test(claim) for claim in claims]
    # Two papers can make the same claim, or opposite ones; the correction counts these as one test.
    keys = [f"{abs(test.draft.difference)!r} {test.p!r}" for test in tested]
    same = {key: index for index, key in enumerate(keys)}
    indices = [same[key] for key in keys]
    once = holm([test.p if indices[index] == index else NAN for index, test in enumerate(tested)])
    corrected, number = [once[index] for index in indices], sum(not math.isnan(p) for p in once)
    return [bench.judged(test, claim, p, number) for test, claim, p in zip(tested, claims, corrected, strict=True)]


def claim_frame(found: Sequence[ClaimVerdict]) -> pd.DataFrame:
    """Return the table `tested_claims.csv`: a row for each claim."""
    return table([asdict(verdict) for verdict in found], CLAIM_VERDICT_COLUMNS)


@dataclass(frozen=True)
class _Bench:
    """Tester of claims by a study's results and facts."""

    analysis: Analysis
    facts: StudyFacts

    @cached_property
    def finder(self) -> PairFinder:
        traits = (traits_of(model) for model in self.facts.models if model.name in self.analysis.groups)
        return PairFinder([model for model in traits if model is not None], self.analysis.families)

    @cached_property
    def at_chance(self) -> set[tuple[str, str]]:
        return {(row["model"], row["task"]) for row in records(self.analysis.best) if row["above_chance"] == "no"}

    def test(self, sourced: SourcedClaim) -> _Tested:
        claim = sourced.claim
        blank = ClaimVerdict(
            sourced.name, sourced.cited, claim.says, "not tested here", "", published=sourced.published
        )
        tests: dict[str, Callable[[Claim, ClaimVerdict], _Tested]] = {
            "score": self._score,
            "sensitivity": self._sensitivity,
            "zero_shot": self._zero_shot,
            "same_data": self._same_data,
        }
        try:
            return tests[claim.statistic](claim, blank)
        except Lacking as reason:
            return _Tested(replace(blank, reason=f"{reason}."))

    def _score(self, claim: Claim, blank: ClaimVerdict) -> _Tested:
        parts = self.finder.parts(claim, self._has_score)
        if all({(part.first, part.task), (part.second, part.task)} <= self.at_chance for part in parts):
            raise Lacking("none of the models is above chance on these tasks")
        confidence = self.analysis.confidence
        contrast = weighted_sum(self.analysis.effects, model_weights(parts), confidence)
        gap = contrast.whole
        sound = [part for part in parts if not self._leads_at_chance(part, gap.value)]
        p = gap.p
        if len(sound) < len(parts) and not math.isnan(p):
            rest = weighted_sum(self.analysis.effects, model_weights(sound), confidence).whole
            p = rest.p if rest.value * gap.value > 0 and not math.isnan(rest.p) else 1.0
        verdict = replace(blank, difference=gap.value, low=gap.low, high=gap.high, p=gap.p)
        models, tasks = {model for part in parts for model in (part.first, part.second)}, {part.task for part in parts}
        reason = f"{text.estimate(gap.value, gap.low, gap.high, sign=True).strip()} points"
        if p != gap.p and not math.isnan(p):
            reason += ", part of which is at chance and doesn't count"
        reason += so_far(self.analysis, models, tasks)
        if any(self.analysis.effects[model, task].folds is None for model in models for task in tasks):
            reason += ", without the noise of the test set"
        return self._tested(verdict, parts, reason, p, contrast)

    def _leads_at_chance(self, part: PairOnTask, total: float) -> bool:
        """Return whether a pair contributes to the total difference with a lead of a model that is at chance."""
        lead = part.weight * (
            self.analysis.effects[part.first, part.task].seeds.value
            - self.analysis.effects[part.second, part.task].seeds.value
        )
        ahead = part.first if lead * part.weight > 0 else part.second
        return lead * total > 0 and (ahead, part.task) in self.at_chance

    def _sensitivity(self, claim: Claim, blank: ClaimVerdict) -> _Tested:
        def usable(pair: Pair, task: str) -> bool:
            runs = [run for model in pair for run in self.analysis.groups[model.name]]
            # A model that has learned nothing scores the same at any rate.
            if not all(self._learned(run, task) for run in runs):
                return False
            variances = [self._variance(run, task) for run in runs]
            if None in variances or any(variance.single for variance in variances if variance is not None):
                return False
            return len({variance.rates for variance in variances if variance is not None}) == 1

        above = "chance" if self.analysis.baseline is None else "chance and the untrained model"
        unusable = f"no pair above {above} has all its cells, with several runs at each of the same learning rates, on such a task"
        parts = self.finder.parts(claim, usable, unusable)
        runs = [
            PairOnTask(
                first,
                second,
                part.task,
                part.weight / len(self.analysis.groups[part.first]) / len(self.analysis.groups[part.second]),
            )
            for part in parts
            for first in self.analysis.groups[part.first]
            for second in self.analysis.groups[part.second]
        ]
        first, second, p = sensitivity_test(self._variance, runs)
        verdict = replace(blank, difference=first - second, p=p)
        reason = f"deviation over learning rates of {text.points(first)} against {text.points(second)} points"
        return self._tested(verdict, parts, reason, p)

    def _learned(self, run: str, task: str) -> bool:
        """Return whether a model is above chance, and shown to be above the untrained one where the study has it."""
        effects, baseline = self.analysis.run_effects, self.analysis.baseline
        if (run, task) in self.at_chance or (run, task) not in effects:
            return False
        if baseline is None or (baseline, task) not in effects:
            return True
        lead = mean_difference(effects, (run, baseline), [task], self.analysis.confidence).whole
        # If the noise is not known, there is no interval (NaN), and no claim can be tested.
        return not lead.low <= 0

    def _zero_shot(self, claim: Claim, blank: ClaimVerdict) -> _Tested:
        results = {(result.model, result.task): result for result in self.facts.zero_shot}
        tasks = dict.fromkeys((task for _, task in results), "")
        wanted = matching_tasks(claim.tasks.model_copy(update={"families": None}), tasks)
        if not wanted:
            raise Lacking(f"the study has no zero-shot {described_tasks(claim.tasks)}")

        def usable(pair: Pair, task: str) -> bool:
            return all(
                (model.name, task) in results
                and (claim.metric or results[model.name, task].main) in results[model.name, task].metrics
                for model in pair
            )

        parts = weighed(self.finder.pairs(claim), wanted, usable)
        gap = zero_shot_contrast(results, parts, claim.metric, self.analysis.confidence)
        verdict = replace(blank, difference=gap.value, low=gap.low, high=gap.high, p=gap.p)
        reason = f"{text.estimate(gap.value, gap.low, gap.high, sign=True).strip()} points, with the noise of the examples alone"
        return self._tested(verdict, parts, reason, gap.p)

    def _same_data(self, claim: Claim, blank: ClaimVerdict) -> _Tested:
        pairs = self.finder.pairs(claim)
        facts = {model.name: model for model in self.facts.models}
        members = [[facts[model.name] for model in pair] for pair in pairs]
        verdict = replace(blank, pairs=len(pairs), runs=1)
        if any(model.kind != "pretrained" for pair in members for model in pair):
            return _Tested(replace(verdict, reason="the models were not pretrained here."))
        if any(one.tokens != other.tokens for one, other in members):
            return _Tested(
                replace(verdict, verdict="contradicted", reason="the models of a pair saw different numbers of tokens.")
            )
        reason = "by design: batches follow from the corpus, the seed and the step alone, and both saw as many tokens."
        return _Tested(replace(verdict, verdict="seen", reason=reason))

    def _has_score(self, pair: Pair, task: str) -> bool:
        return all(
            (effect := self.analysis.effects.get((model.name, task))) is not None and math.isfinite(effect.seeds.value)
            for model in pair
        )

    @cached_property
    def _variance(self) -> Callable[[str, str], RateVariance | None]:
        analysis = self.analysis
        # Where cells are missing, the rates with scores may be the better ones.
        gaps = {(row["model"], row["task"]) for row in records(analysis.coverage) if row["missing"]}

        @cache
        def variance(model: str, task: str) -> RateVariance | None:
            """Return the variance between the listed rates; a grid adds others because of their neighbours' scores."""
            runs, fit = analysis.runs.get((model, task)), analysis.fits.get((model, task))
            if runs is None or fit is None or (model, task) in gaps:
                return None
            listed = [rate for rate in runs.rates if rate in analysis.grid.learning_rates]
            return rate_variance(runs.at(listed), fit.at(np.asarray([rate in listed for rate in runs.rates])))

        return variance

    def _tested(
        self, draft: ClaimVerdict, parts: Sequence[PairOnTask], reason: str, p: float, contrast: Contrast | None = None
    ) -> _Tested:
        models = frozenset(model for part in parts for model in (part.first, part.second))
        runs = {model: self.analysis.groups[model] for model in models}
        reason = f"{pretraining_runs(runs)} each: {reason}"
        pairs, tasks = {(part.first, part.second) for part in parts}, {part.task for part in parts}
        draft = replace(draft, verdict="too small to tell", reason=reason, runs=min(map(len, runs.values())))
        draft = replace(draft, pairs=len(pairs), tasks=len(tasks))
        return _Tested(draft, p, contrast, models)

    def judged(self, tested: _Tested, sourced: SourcedClaim, p: float, number: int) -> ClaimVerdict:
        """Return the verdict after Holm's correction over a number of claims."""
        verdict, claim = tested.draft, sourced.claim
        if not tested.models:
            return verdict
        over = f"over {text.plural(verdict.pairs, 'pair')} of models and {text.plural(verdict.tasks, 'task')}"
        if math.isnan(p):
            return replace(
                verdict,
                reason=f"{verdict.reason}, {over}; the noise is not known.",
                settle="Several seeds at each learning rate, whose scores differ, show the noise.",
            )
        verdict = replace(
            verdict,
            p_holm=p,
            reason=f"{verdict.reason}, {over}; p {text.probability(p)} after Holm's correction over {text.plural(number, 'test')}.",
        )
        level = 1 - self.analysis.confidence
        if p < level:
            right = claim.direction == "differs" or (verdict.difference > 0) == (claim.direction == "higher")
            return replace(verdict, verdict="seen" if right else "contradicted")
        return replace(verdict, settle=" ".join(self._settled_by(tested, sourced, level / max(1, number))))

    def _settled_by(self, tested: _Tested, sourced: SourcedClaim, level: float) -> Iterator[str]:
        """Say what difference the study would find, and what it would take to find the published one."""
        contrast, claim = tested.contrast, sourced.claim
        if contrast is None:
            yield (
                "More seeds, learning rates or tasks narrow it."
                if claim.statistic == "sensitivity"
                else "More examples narrow it."
            )
            return
        smallest = smallest_difference(contrast.whole.error, contrast.whole.freedom, level)
        if not math.isnan(smallest):
            yield detectable_difference(smallest)
        target, words = sourced.published, f"the published {text.difference(sourced.published)} points"
        if math.isnan(target):
            target, words = contrast.whole.value, f"{text.difference(contrast.whole.value)} points"
            if abs(target) < contrast.whole.error:
                return  # such a difference may well be noise, which is no reason for more runs
        elif claim.published_for:
            words += f" ({claim.published_for})"
        if not math.isnan(smallest) and abs(target) >= smallest:
            yield f"{words[0].upper()}{words[1:]} would be found more surely."
            return
        runs = harmonic_mean([len(self.analysis.groups[model]) for model in tested.models])
        yield found_by(target, words, contrast, runs, len(self.analysis.grid.seeds), level)


def found_by(target: float, words: str, contrast: Contrast, runs: float, seeds: int, level: float) -> str:
    """Say how many pretraining runs or seeds it takes to find a true difference.

    Args:
        words: the difference in words.
        runs, seeds: the harmonic mean of the models' numbers of pretraining runs, and the number of seeds, in the contrast.
        level: the level of the test.
    """
    if contrast.pooled:
        needed, unit = runs_or_obstacle(target, [contrast], runs, level), "pretraining runs of each model"
    else:
        needed, unit = seeds_or_obstacle(target, [contrast], seeds, level), "seeds a rate"
    if isinstance(needed, int):
        return f"To find {words} takes about {needed:,} {unit}."
    reasons = {"noise": "their noise is not known", "test sets": "the test sets are too small"}
    return f"More {unit} would not find {words}: {reasons.get(needed, 'it is too small')}."


def zero_shot_contrast(
    known: Mapping[tuple[str, str], ZeroShotFacts],
    parts: Sequence[PairOnTask],
    metric: str | None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the weighted sum of differences of a metric, by default each task's main one.

    Models answer the same examples, so the values of examples are paired if they are known. If not, the standard errors come from
    the models' 95 % intervals, as if the scores were independent.

    Args:
        known: the results by (model, task).
    """
    effects = {}
    for task, weights in model_weights(parts).items():
        difference = _sum([(weight, known[model, task]) for model, weight in weights.items()], metric)
        effects["", task] = Effect(difference, difference, np.ones(1), 0.0)
    return weighted_sum(effects, {task: {"": 1.0} for _, task in effects}, confidence).whole


def _sum(models: Sequence[tuple[float, ZeroShotFacts]], metric: str | None) -> Estimate:
    entries = [(weight, result, result.entry(metric or result.main)) for weight, result in models]
    scores = [entry.get("score") for _, _, entry in entries]
    if any(score is None for score in scores):
        return estimate(NAN, NAN, NAN)
    value = math.fsum(
        weight * float(score) for (weight, _, _), score in zip(entries, scores, strict=True) if score is not None
    )
    if metric in (None, *(result.main for _, result, _ in entries)) and (paired := paired_sum(models)) is not None:
        return paired
    reach, shares, count = 2 * NormalDist().inv_cdf(0.975), [], math.inf
    for weight, _, entry in entries:
        low, high = entry.get("low"), entry.get("high")
        if low is None or high is None:
            return estimate(value, NAN, NAN)
        shares.append((weight * (high - low) / reach) ** 2)
        count = min(count, entry.get("examples") or math.inf)
    variance = math.fsum(shares)
    return estimate(value, math.sqrt(variance) if variance else NAN, max(1.0, count - 1))
